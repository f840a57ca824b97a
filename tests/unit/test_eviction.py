"""What every eviction policy keeps to, the order of each, and the order across tenants and size classes."""

import gc
import random
import weakref
from collections.abc import Callable

import pytest

from kvstore.evictable import Evictable, Queue
from kvstore.eviction import EVICTION, EvictionPolicy
from kvstore.eviction.lru import Lru
from kvstore.replica import Replica, Space
from kvstore.slab import Slab
from kvstore.types import DRAM, BlockKey, GroupKey, State


class Block:
    """A candidate as policies see it."""

    def __init__(self, last_use: int, version: int = 0) -> None:
        self.last_use = last_use
        self.version = version or last_use


class EvictionContract:
    """Inherited by the tests of each policy, which say how it is made."""

    new_policy: Callable[[], EvictionPolicy]

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return type(self).new_policy()

    def test_nothing_to_evict_is_none(self, policy: EvictionPolicy) -> None:
        assert policy.peek() is None

    def test_what_was_added_is_offered_until_it_is_removed(self, policy: EvictionPolicy) -> None:
        block = Block(1)
        policy.add(block)
        assert block in policy
        assert policy.peek() is block
        assert policy.peek() is block, "looking takes nothing"
        policy.remove(block)
        assert block not in policy
        assert policy.peek() is None

    def test_added_twice_is_a_mistake(self, policy: EvictionPolicy) -> None:
        block = Block(1)
        policy.add(block)
        with pytest.raises(AssertionError):
            policy.add(block)

    @pytest.mark.parametrize("verb", ["remove", "touch"])
    def test_what_was_never_added_is_a_mistake(self, policy: EvictionPolicy, verb: str) -> None:
        policy.add(Block(2))
        with pytest.raises((AssertionError, KeyError)):
            getattr(policy, verb)(Block(1))

    def test_all_go_once_and_no_other(self, policy: EvictionPolicy) -> None:
        blocks = [Block(use) for use in random.Random(1).sample(range(1000), 200)]
        for block in blocks:
            policy.add(block)
        gone = []
        while (first := policy.peek()) is not None:
            policy.remove(first)
            gone.append(first)
        assert len(gone) == len(set(gone)) == 200
        assert set(gone) == set(blocks)

    def test_what_comes_back_is_offered_again(self, policy: EvictionPolicy) -> None:
        block = Block(1)
        for use in (1, 1, 5, 5, 3):
            block.last_use = use
            policy.add(block)
            assert policy.peek() is block
            policy.remove(block)
            assert policy.peek() is None

    def test_offers_only_members_whatever_happens(self, policy: EvictionPolicy) -> None:
        chance = random.Random(2)
        members: list[Block] = []
        for use in range(1, 5000):
            if not members or chance.random() < 0.3:
                members.append(Block(chance.choice([use, chance.randrange(1, use + 1)]), use))
                policy.add(members[-1])
            elif chance.random() < 0.5:
                block = chance.choice(members)
                block.last_use = use
                policy.touch(block)
            else:
                block = members.pop(chance.randrange(len(members)))
                policy.remove(block)
                assert block not in policy
            assert (policy.peek() in members) == bool(members)

    @pytest.mark.parametrize("order", [1, -1], ids=["in order", "late"])
    def test_what_was_removed_is_not_kept_alive(self, policy: EvictionPolicy, order: int) -> None:
        """Nor does the policy grow when the same blocks are held and let go all the time."""

        def come_and_go(round_number: int) -> list[weakref.ref[Block]]:
            blocks = [Block(1000 + order * use, round_number * 100 + use + 1) for use in range(100)]
            for _ in range(3):
                for block in blocks:
                    policy.add(block)
                for block in blocks:
                    policy.remove(block)
            return [weakref.ref(block) for block in blocks]

        gone = [ref for round_number in range(50) for ref in come_and_go(round_number)]
        gc.collect()
        assert sum(ref() is not None for ref in gone) <= 70, "removed blocks wait in the policy"


class TestLru(EvictionContract):
    new_policy = Lru

    def test_has_its_name_in_the_configuration(self) -> None:
        assert EVICTION["lru"] is Lru

    def test_goes_by_last_use_not_by_arrival(self) -> None:
        lru = Lru()
        for use in (3, 1, 2, 5, 4):
            lru.add(Block(use))
        assert self.drained(lru) == [1, 2, 3, 4, 5]

    def test_touched_goes_last(self) -> None:
        lru = Lru()
        first, second = Block(1), Block(2)
        lru.add(first)
        lru.add(second)
        first.last_use = 3
        lru.touch(first)
        assert self.drained(lru) == [2, 3]

    def test_equal_uses_go_by_version(self) -> None:
        lru = Lru()
        for version in (7, 5, 6):
            lru.add(Block(1, version))
        order = []
        while (block := lru.peek()) is not None:
            lru.remove(block)
            order.append(block.version)
        assert order == [5, 6, 7]

    @pytest.mark.parametrize("seed", range(10))
    def test_is_a_sorted_list(self, seed: int) -> None:
        chance = random.Random(seed)
        lru, members = Lru(), set[Block]()
        for use in range(1, 3000):
            action = chance.random()
            if action < 0.35 or not members:
                block = Block(use if chance.random() < 0.5 else chance.randrange(use), use)
                members.add(block)
                lru.add(block)
            elif action < 0.6:
                block = chance.choice(sorted(members, key=lambda block: block.version))
                block.last_use = use
                lru.touch(block)
            elif action < 0.8:
                block = chance.choice(sorted(members, key=lambda block: block.version))
                members.remove(block)
                lru.remove(block)
            expected = min(members, key=lambda block: (block.last_use, block.version), default=None)
            assert lru.peek() is expected
            if expected is not None and action > 0.9:
                members.remove(expected)
                lru.remove(expected)

    def drained(self, lru: Lru) -> list[int]:
        order = []
        while (block := lru.peek()) is not None:
            lru.remove(block)
            order.append(block.last_use)
        return order


def replica(tenant: str, slot_bytes: int, last_use: int, soft_pins: int = 0) -> Replica:
    found = Replica(
        Space(tenant, 1, DRAM), BlockKey(b""), None, Slab(1), GroupKey(tenant, slot_bytes), 0, 1, slot_bytes
    )
    found.state, found.last_use, found.soft_pins = State.WRITTEN, last_use, soft_pins
    return found


class TestAcrossGroups:
    def test_the_coldest_is_found_among_many_tenants_and_classes(self) -> None:
        chance = random.Random(3)
        evictable = Evictable("lru")
        members: set[Replica] = set()
        uses = iter(chance.sample(range(100_000), 2000))
        for _ in range(1000):
            action = chance.random()
            if action < 0.5 or not members:
                pinned = chance.random() < 0.1
                block = replica(f"tenant {chance.randrange(9)}", chance.choice([64, 128]), next(uses), pinned)
                members.add(block)
                evictable.add(block)
            elif action < 0.7:
                block = chance.choice(sorted(members, key=lambda block: block.last_use))
                block.last_use = next(uses) + 100_000
                evictable.touch(block)
            else:
                block = chance.choice(sorted(members, key=lambda block: block.last_use))
                members.remove(block)
                evictable.remove(block)
                assert block not in evictable
            self.compare(evictable, members)

    def compare(self, evictable: Evictable, members: set[Replica]) -> None:
        def coldest(among: list[Replica]) -> Replica | None:
            return min(among, key=lambda block: (block.soft_pins > 0, block.last_use), default=None)

        assert evictable.coldest() is coldest(list(members))
        for tenant in ("tenant 0", "tenant 8"):
            mine = [block for block in members if block.group.tenant == tenant]
            assert evictable.coldest_of_tenant(tenant) is coldest(mine)
            small = [block for block in mine if block.group.slot_bytes == 64]
            assert evictable.coldest_of(GroupKey(tenant, 64)) is coldest(small)

    def test_a_group_that_was_dropped_starts_anew(self) -> None:
        evictable = Evictable("lru")
        for use in (5, 3, 4):
            block = replica("red", 64, use)
            evictable.add(block)
            assert evictable.coldest() is block
            evictable.remove(block)
            evictable.drop(block.group)
            assert evictable.coldest() is None
            assert block not in evictable

    def test_a_group_with_candidates_is_not_dropped(self) -> None:
        evictable = Evictable("lru")
        block = replica("red", 64, 1)
        evictable.add(block)
        with pytest.raises(AssertionError):
            evictable.drop(block.group)

    def test_groups_that_grow_colder_again_and_again_leave_no_trace(self) -> None:
        evictable = Evictable("lru")

        def come_and_go(use: int) -> None:
            block = replica("red", 64, use)
            evictable.add(block)
            evictable.remove(block)
            evictable.drop(block.group)

        for use in range(3000, 0, -1):
            come_and_go(use)
        gc.collect()
        assert sum(isinstance(found, Queue) for found in gc.get_objects()) <= 2 * 70
