"""What every eviction policy keeps to, the order of each, and the order across tenants and size classes."""

import gc
import random
import tracemalloc
import weakref
from collections.abc import Callable, Iterator

import pytest

from kvstore.evictable import Evictable, Queue
from kvstore.eviction import EVICTION, EvictionPolicy
from kvstore.eviction.adaptive import Adaptive
from kvstore.eviction.clock import Clock
from kvstore.eviction.lru import Lru
from kvstore.eviction.s3fifo import MOST_STEPS, Rule, S3Fifo
from kvstore.eviction.shadow import ShadowCache
from kvstore.replica import Replica, Space
from kvstore.slab import Slab
from kvstore.types import DRAM, BlockKey, GroupKey, State


class Block:
    """A candidate as policies see it."""

    def __init__(self, last_use: int, version: int = 0, size: int = 1, key: bytes = b"") -> None:
        self.last_use = last_use
        self.version = version or last_use
        self.size = size
        self.key = key or random.Random(self.version).randbytes(16)
        self.depth = 0
        self.hits = 0

    def use(self, now: int) -> "Block":
        self.last_use = now
        self.hits += 1
        return self


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
        return [block.last_use for block in evicted(lru)]


class TestClock(EvictionContract):
    new_policy = Clock

    def test_what_was_used_since_it_came_goes_after_what_was_not(self) -> None:
        clock = Clock()
        blocks = [Block(use) for use in (1, 2, 3)]
        for block in blocks:
            clock.add(block)
        clock.touch(blocks[0].use(4))
        assert evicted(clock) == [blocks[1], blocks[2], blocks[0]]

    def test_many_uses_are_one_chance(self) -> None:
        clock = Clock()
        blocks = [Block(use) for use in (1, 2)]
        for block in blocks:
            clock.add(block)
        for now in (3, 4, 5):
            clock.touch(blocks[0].use(now))
        clock.touch(blocks[1].use(6))
        assert evicted(clock) == blocks


class TestS3Fifo(EvictionContract):
    new_policy = S3Fifo

    def test_newcomers_go_before_what_was_used_again(self) -> None:
        policy = S3Fifo()
        old, *new = [Block(use) for use in range(1, 11)]
        policy.add(old)
        policy.touch(old.use(11))
        for block in new:
            policy.add(block)
        assert evicted(policy, 7) == new[:7]
        assert old in policy

    def test_what_comes_back_soon_after_it_went_is_no_newcomer(self) -> None:
        policy = S3Fifo()
        first, *others = [Block(use) for use in range(1, 11)]
        for block in (first, *others):
            policy.add(block)
        assert evicted(policy, 1) == [first]
        again = Block(11, key=first.key)
        for block in (again, Block(12), Block(13)):
            policy.add(block)
        assert evicted(policy)[-1] is again

    def test_what_went_long_ago_is_a_newcomer(self) -> None:
        policy = S3Fifo()
        blocks = [Block(use) for use in range(1, 101)]
        for block in blocks[:10]:
            policy.add(block)
        for block in blocks[10:]:
            evicted(policy, 1)
            policy.add(block)
        again = Block(101, key=blocks[0].key)
        for block in (again, Block(102), Block(103)):
            policy.add(block)
        assert evicted(policy)[-3] is again

    def test_what_was_removed_without_being_offered_is_no_ghost(self) -> None:
        policy = S3Fifo()
        blocks = [Block(use) for use in range(1, 11)]
        for block in blocks:
            policy.add(block)
        policy.remove(blocks[5])
        policy.add(blocks[5])
        assert evicted(policy) == blocks

    def test_what_comes_back_from_a_reader_is_no_newcomer(self) -> None:
        policy = S3Fifo()
        blocks = [Block(use) for use in range(1, 11)]
        for block in blocks:
            policy.add(block)
        policy.remove(blocks[0])
        policy.add(blocks[0].use(11))
        for block in (Block(12), Block(13)):
            policy.add(block)
        assert evicted(policy)[-1] is blocks[0]

    def test_the_small_queue_is_measured_in_bytes(self) -> None:
        policy = S3Fifo()
        big, *small = [Block(use, size=1000 if use == 1 else 1) for use in range(1, 11)]
        for block in (big, *small):
            policy.add(block)
        policy.touch(big.use(11))
        assert policy.peek() is big, "newcomers are most of the blocks and a hundredth of the bytes"


class TestS3FifoWithoutASmallQueue(EvictionContract):
    new_policy = staticmethod(lambda: S3Fifo(Rule(0)))

    def test_is_lru_if_what_is_spared_goes_by_its_use(self) -> None:
        chance = random.Random(4)
        policy, lru = S3Fifo(Rule(0, by_use=True)), Lru()
        blocks = [Block(use) for use in range(1, 200)]
        for block in blocks:
            policy.add(block)
            lru.add(block)
        for now in range(200, 1000):
            block = chance.choice(blocks).use(now)
            policy.touch(block)
            lru.touch(block)
        assert evicted(policy) == evicted(lru)


class TestAdaptive(EvictionContract):
    new_policy = Adaptive

    def test_has_its_name_in_the_configuration(self) -> None:
        assert EVICTION["adaptive"] is Adaptive

    @pytest.mark.parametrize("rules", [[Rule(0), Rule(0.3), Rule(0, by_use=True), Rule(0.7)]])
    def test_a_change_of_rule_loses_nobody(self, rules: list[Rule]) -> None:
        chance = random.Random(5)
        policy, members = S3Fifo(), set[Block]()
        for now in range(1, 4000):
            policy.rule = rules[now // 97 % len(rules)]
            if len(members) < 300 or chance.random() < 0.3:
                block = Block(now)
                members.add(block)
                policy.add(block)
            elif chance.random() < 0.6:
                policy.touch(chance.choice(sorted(members, key=lambda block: block.version)).use(now))
            else:
                (gone,) = evicted(policy, 1)
                members.remove(gone)
        gone = evicted(policy)
        assert len(gone) == len(members)
        assert set(gone) == members

    @pytest.mark.parametrize(
        ("workload", "regret"),
        [("scan", 0.01), ("drift", 0.01), ("echo", 0.03), ("scan, then drift", 0.01), ("scan, then echo", 0.01)],
    )
    def test_is_nearly_as_good_as_the_best(self, workload: str, regret: float) -> None:
        """What it loses, it loses before it knows."""
        keys = list(self.keys(workload))
        ratios = {}
        for name, new_policy in EVICTION.items():
            cache = ShadowCache(new_policy(), 1000)
            ratios[name] = sum(cache.use(key, 1, 0) for key in keys) / len(keys)
        best = max(ratios.values())
        assert best - min(ratios.values()) > 0.02, "the workload tells policies apart"
        assert ratios["adaptive"] > best - regret, ratios

    def keys(self, workload: str) -> Iterator[bytes]:
        chance = random.Random(6)

        def key(number: int) -> bytes:
            return random.Random(number).randbytes(16)

        def scan(first: int) -> Iterator[bytes]:
            """A few hot keys among many that never come back."""
            for number in range(60_000):
                yield key(chance.randrange(600)) if number % 5 == 0 else key(first + number)

        def drift(first: int) -> Iterator[bytes]:
            """Keys come back within 800 others, once or twice, and never again."""
            for number in range(60_000):
                yield key(first + number // 3 - (chance.randrange(800) if number % 3 else 0))

        def echo(first: int) -> Iterator[bytes]:
            """Some keys come back once, when nearly a whole cache has come in since."""
            for number in range(10_000):
                yield from (key(first + 5 * number + one) for one in range(5))
                yield key(first + 5 * (number - 156))

        parts = {"scan": scan, "drift": drift, "echo": echo}
        for number, part in enumerate(workload.split(", then "), 1):
            yield from parts[part](number * 1_000_000)


class TestBounds:
    @pytest.mark.parametrize("name", EVICTION)
    def test_a_look_is_short_even_if_all_were_used(self, name: str) -> None:
        looks = 0

        class Watched(Block):
            @property
            def key(self) -> bytes:
                return b"\1" * 16  # not sampled

            @key.setter
            def key(self, key: bytes) -> None: ...

            @property
            def last_use(self) -> int:
                nonlocal looks
                looks += 1
                return self._last_use

            @last_use.setter
            def last_use(self, now: int) -> None:
                self._last_use = now

        policy = EVICTION[name]()
        blocks = [Watched(use) for use in range(1, 10 * MOST_STEPS)]
        for block in blocks:
            policy.add(block)
        for block in blocks:
            policy.touch(block.use(block.version + 10 * MOST_STEPS))
        looks = 0
        first = policy.peek()
        assert first is not None
        assert looks <= 4 * MOST_STEPS
        assert policy.peek() is first, "looking takes nothing"

    @pytest.mark.parametrize("name", EVICTION)
    def test_what_is_remembered_is_bounded_by_what_is_held(self, name: str) -> None:
        """A cache through which very many go does not grow."""

        def size_bytes(count: int) -> int:
            tracemalloc.start()
            cache = ShadowCache(EVICTION[name](), 500)
            for number in range(count):
                cache.use(random.Random(number).randbytes(16), 1, 0)
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            return held

        few, many = size_bytes(3000), size_bytes(12_000)
        assert many < 1.2 * few + 20_000


def evicted(policy: EvictionPolicy, count: int = 1 << 30) -> list[Block]:
    """Evict so many, or all."""
    gone: list[Block] = []
    while len(gone) < count and (first := policy.peek()) is not None:
        policy.remove(first)
        gone.append(first)
    return gone


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
