"""The block table, situation by situation: room, families, recency, events. Interleavings: tests/model."""

from collections.abc import Callable, Iterator

import pytest

from kvstore.check import check
from kvstore.emptying import SLABS_TRIED
from kvstore.errors import InvalidRequest, TierFull
from kvstore.gallop import gallop
from kvstore.holds import Holds
from kvstore.table import TRANSITIONS, BlockTable, Move, Replica, Space, TierShape
from kvstore.types import DRAM, BlockKey, Cause, Change, GroupKey, Owner, Placement, State

SLAB_BYTES = 4096  # four blocks of 1024 bytes, two of 2048
OWNER = Owner(1)


class Node:
    """A table with its holds, and the words in which a test tells what happens to it."""

    def __init__(self, slabs: int) -> None:
        self.table = BlockTable({DRAM: TierShape(SLAB_BYTES)})
        self.holds = Holds(self.table, 100, 100)
        self.tier = self.table.tiers[DRAM]
        for _ in range(slabs):
            self.tier.pool.grow()

    def space(self, tenant: str = "red") -> Space:
        return self.table.space(tenant, 1, DRAM)

    def begin(self, name: str, parent: str | None = None, size: int = 1024, tenant: str = "red") -> Replica:
        above = key(parent) if parent is not None else None
        replica = self.table.allocate(self.space(tenant), key(name), above, size)
        assert replica is not None, "no room"
        return replica

    def store(self, name: str, parent: str | None = None, size: int = 1024, tenant: str = "red") -> Replica:
        replica = self.begin(name, parent, size, tenant)
        self.table.commit(replica, 7)
        return replica

    def chain(self, names: str, size: int = 1024, tenant: str = "red") -> list[Replica]:
        return [self.store(name, parent, size, tenant) for parent, name in zip([None, *names], names, strict=False)]

    def make_room(self, size: int = 1024, tenant: str = "red") -> str:
        """Who went for it."""
        self.gone()
        self.table.make_room(self.space(tenant), size)
        return self.gone()

    def gone(self) -> str:
        """The names of those that went since the last call, in order."""
        events = self.table.take_changes()
        return "".join(name(event.replica) for event in events if event.change is Change.REMOVED)

    def evict_all(self) -> str:
        self.gone()
        while (replica := self.table.coldest(DRAM)) is not None:
            self.table.evict(replica, Cause.PRESSURE)
        return self.gone()

    def touch(self, name: str, tenant: str = "red") -> None:
        self.table.touch(self.space(tenant).replicas[key(name)])


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def name(replica: Replica) -> str:
    return replica.key.rstrip(b".").decode()


MakeNode = Callable[[int], Node]


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    """A node of so many slabs, in order when the test is over."""
    nodes: list[Node] = []

    def make(slabs: int) -> Node:
        nodes.append(Node(slabs))
        return nodes[-1]

    yield make
    for node in nodes:
        assert list(check(node.table, node.holds)) == []


class TestGallop:
    def test_finds_each_answer_of_each_length(self) -> None:
        for length in range(80):
            for answer in range(length + 1):
                asked: list[int] = []

                def here(position: int, answer: int = answer, asked: list[int] = asked) -> bool:
                    asked.append(position)
                    return position < answer

                assert gallop(here, length) == answer
                assert all(0 <= position < length for position in asked)
                assert len(asked) <= 2 + 2 * answer.bit_length()
                assert len(set(asked)) == len(asked) or length == 1, "asked the same twice"

    @pytest.mark.parametrize("answer", [0, 1, 5000, 9_999, 10_000])
    def test_asks_little_of_a_long_chain(self, answer: int) -> None:
        asked = 0

        def here(position: int) -> bool:
            nonlocal asked
            asked += 1
            return position < answer

        assert gallop(here, 10_000) == answer
        assert asked <= 30

    def test_of_a_chain_with_holes_is_a_position_that_is_here_or_none(self) -> None:
        for present in range(1 << 9):
            here = [bool(present >> position & 1) for position in range(9)]
            answer = gallop(here.__getitem__, 9)
            assert not answer or here[answer - 1]
            assert bool(answer) == here[0]


class TestAllocate:
    @pytest.mark.parametrize("size", [0, -1, SLAB_BYTES + 1])
    def test_a_size_that_no_slot_can_have_is_refused(self, make_node: MakeNode, size: int) -> None:
        node = make_node(1)
        with pytest.raises(InvalidRequest):
            node.table.allocate(node.space(), key("a"), None, size)
        for ask in (node.table.make_room, node.table.has_room):
            with pytest.raises(InvalidRequest):
                ask(node.space(), size)

    def test_a_block_as_large_as_a_slab_has_one_to_itself(self, make_node: MakeNode) -> None:
        node = make_node(2)
        assert node.store("a", size=SLAB_BYTES).slot[2:4] == (0, SLAB_BYTES)
        assert node.store("b", size=SLAB_BYTES - 1).slot[2:4] == (0, SLAB_BYTES)

    def test_a_block_that_is_here_is_not_allocated_again(self, make_node: MakeNode) -> None:
        node = make_node(1)
        assert node.table.placement(node.space(), key("a")) is None
        node.begin("a")
        assert node.table.placement(node.space(), key("a")) is Placement.BUSY
        with pytest.raises(AssertionError, match="at most one replica"):
            node.begin("a")
        node.holds.grant(OWNER, list(node.space().replicas.values()), 1)

    def test_without_room_is_none_and_changes_nothing(self, make_node: MakeNode) -> None:
        node = make_node(1)
        node.chain("abcd")
        node.gone()
        assert node.table.allocate(node.space(), key("e"), key("d"), 1024) is None
        assert node.table.take_changes() == []
        assert node.table.coldest(DRAM) is node.space().replicas[key("d")]

    def test_progress_goes_up_only(self, make_node: MakeNode) -> None:
        node = make_node(1)
        replica = node.begin("a")
        for layers in (0, 2, 2, 5):
            node.table.progress(replica, layers)
        with pytest.raises(InvalidRequest):
            node.table.progress(replica, 4)
        assert replica.layers == 5
        node.table.commit(replica, 7)
        with pytest.raises(AssertionError):
            node.table.progress(replica, 6)


class TestTransitions:
    @pytest.mark.parametrize("verb", ["commit", "abort", "discard", "evict", "hold"])
    def test_what_is_gone_stays_gone(self, make_node: MakeNode, verb: str) -> None:
        node = make_node(1)
        replica = node.store("a")
        node.table.discard(replica, Cause.DELETED)
        argument = {"commit": [7], "hold": []}.get(verb, [Cause.DELETED])
        with pytest.raises(AssertionError):
            getattr(node.table, verb)(replica, *argument)

    def test_a_forbidden_one_names_both_states(self, make_node: MakeNode) -> None:
        node = make_node(1)
        with pytest.raises(AssertionError, match=r"State.WRITTEN -> State.WRITTEN"):
            node.table.commit(node.store("a"), 7)

    def test_none_leads_out_of_free(self) -> None:
        assert {before for before, _ in TRANSITIONS} == set(State) - {State.FREE}
        assert all(TRANSITIONS.values())

    def test_letting_go_more_often_than_holding_is_a_mistake(self, make_node: MakeNode) -> None:
        node = make_node(1)
        replica = node.store("a")
        with pytest.raises(AssertionError, match="once for each hold"):
            node.table.let_go(replica)

    def test_evicting_what_is_held_or_has_children_is_a_mistake(self, make_node: MakeNode) -> None:
        node = make_node(1)
        parent, child = node.chain("ab")
        with pytest.raises(AssertionError, match="nobody holds"):
            node.table.evict(parent, Cause.PRESSURE)
        lease = node.holds.lease(OWNER, [child], 1)
        with pytest.raises(AssertionError, match="nobody holds"):
            node.table.evict(child, Cause.PRESSURE)
        node.holds.release(OWNER, lease.lease_id)
        node.table.evict(child, Cause.PRESSURE)


class TestEvents:
    def test_come_in_order_and_once(self, make_node: MakeNode) -> None:
        node = make_node(1)
        replica = node.begin("a")
        node.table.progress(replica, 1)
        node.table.commit(replica, 7)
        node.table.discard(replica, Cause.CORRUPT)
        assert node.table.take_changes() == [
            (Change.PROGRESSED, replica, None),
            (Change.COMMITTED, replica, None),
            (Change.REMOVED, replica, Cause.CORRUPT),
        ]
        assert node.table.take_changes() == []

    def test_of_a_removal_tell_the_slot_even_if_its_slab_was_cut_anew(self, make_node: MakeNode) -> None:
        node = make_node(1)
        _, second = node.chain("ab")
        slot = second.slot
        node.evict_all()
        assert second.slot == slot
        node.store("c", size=2048)
        assert second.slot == slot

    def test_versions_grow_over_all_blocks(self, make_node: MakeNode) -> None:
        node = make_node(1)
        first, second = node.begin("a"), node.begin("b")
        assert first.version < second.version
        node.table.commit(second, 7)
        node.table.commit(first, 7)
        assert first.version > second.version > 2


class TestFamily:
    def test_leaves_go_before_what_they_hang_on(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.chain("abcd")
        node.store("x", "b")
        assert node.evict_all() == "dcxba"

    def test_a_parent_that_comes_after_its_child_goes_after_it(self, make_node: MakeNode) -> None:
        node = make_node(1)
        node.store("b", "a")
        parent = node.store("a")
        assert not parent.is_evictable
        assert node.evict_all() == "ba"

    def test_a_parent_that_comes_back_finds_its_children(self, make_node: MakeNode) -> None:
        node = make_node(1)
        parent, *_ = node.chain("ab")
        node.store("c", "a")
        node.table.discard(parent, Cause.CORRUPT)
        again = node.store("a")
        assert sorted(map(name, again.space.children_of(again))) == ["b", "c"]
        node.gone()
        assert node.evict_all() == "bca"

    def test_a_parent_whose_only_child_was_aborted_may_go(self, make_node: MakeNode) -> None:
        node = make_node(1)
        node.store("a")
        child = node.begin("b", "a")
        assert node.table.coldest(DRAM) is None
        node.table.abort(child, Cause.ABORTED)
        assert node.evict_all() == "a"
        node.table.let_go(child)

    def test_middle_children_leave_the_others_in_the_family(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.store("p")
        children = {child: node.store(child, "p") for child in "abcd"}
        for child in "bdca":
            node.table.discard(children.pop(child), Cause.DELETED)
            found = map(name, node.space().children_of(node.space().replicas[key("p")]))
            assert sorted(found) == sorted(children)
            assert list(check(node.table, node.holds)) == []
        assert node.table.coldest(DRAM) is node.space().replicas[key("p")]

    def test_a_block_that_says_it_is_its_own_parent_can_still_go(self, make_node: MakeNode) -> None:
        node = make_node(1)
        node.store("a", "a")
        assert node.evict_all() == "a"

    def test_blocks_that_say_they_are_each_others_parents_can_still_go(self, make_node: MakeNode) -> None:
        node = make_node(1)
        node.store("a", "c")
        node.store("b", "a")
        node.store("c", "b")
        assert sorted(node.evict_all()) == ["a", "b", "c"]
        node.chain("xyz")
        node.table.discard(node.space().replicas[key("x")], Cause.DELETED)
        node.store("x", "z")
        assert node.table.empty_coldest_slab(DRAM, Cause.SHRUNK)

    def test_the_same_key_in_another_namespace_is_another_family(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.store("a")
        node.store("b", "a", tenant="blue")
        assert node.table.coldest(DRAM, "red") is node.space().replicas[key("a")]

    def test_two_that_were_each_other_s_parents_at_different_times_are_restored_without_a_ring(self, make_node):
        """As headers on a disk say it, of which one is of a block that had gone."""
        node = make_node(2)
        slab = node.tier.pool.restore(9, GroupKey("red", 1024), 5)
        for index, (child, parent) in enumerate(("ab", "ba")):
            replica = Replica(node.space(), key(child), key(parent), slab, slab.group, index, 3, 1024, 0, State.WRITTEN)
            node.table.restore(replica)
        node.tier.pool.restored(slab)
        node.store("d", "c")
        node.store("c", "a")
        assert list(check(node.table, node.holds)) == []
        assert sorted(node.evict_all()) == list("abcd")


class TestRecency:
    def test_the_chain_used_last_goes_last_from_its_leaf(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.chain("abcd")
        node.chain("xyz")
        assert node.table.match([node.space()], [key(each) for each in "abcd"]) == 4
        assert node.evict_all() == "zyxdcba"

    def test_a_partial_match_uses_what_it_found(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.chain("abcd")
        node.chain("xyz")
        assert node.table.match([node.space()], [key(each) for each in "abQ"]) == 2
        assert node.evict_all() == "dczyxba"

    def test_what_is_being_written_does_not_match(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.chain("ab")
        node.holds.grant(OWNER, [node.begin("c", "b")], 1)
        for names, expected in (("abc", 2), ("abcd", 2), ("c", 0)):
            assert node.table.match([node.space()], [key(each) for each in names]) == expected

    def test_a_match_of_nothing_uses_nothing(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.chain("ab")
        node.store("x")
        assert node.table.match([node.space()], [key("Q"), key("a")]) == 0
        assert node.table.match([node.space()], []) == 0
        assert node.evict_all() == "bax"

    @pytest.mark.parametrize("how", ["evicted", "discarded", "aborted"])
    def test_a_parent_was_used_when_its_child_was_however_that_went(self, make_node: MakeNode, how: str) -> None:
        node = make_node(2)
        node.store("a")
        child = node.begin("b", "a") if how == "aborted" else None
        node.store("x")
        if child is None:
            child = node.store("b", "a")
            (node.table.evict if how == "evicted" else node.table.discard)(child, Cause.DELETED)
            assert node.evict_all() == "xa"
        else:
            node.table.abort(child, Cause.ABORTED)
            node.table.let_go(child)
            assert node.evict_all() == "ax", "a was used when b was begun, x after that"

    def test_what_was_held_for_long_goes_at_its_own_time(self, make_node: MakeNode) -> None:
        node = make_node(2)
        first = node.store("a")
        lease = node.holds.lease(OWNER, [first], 1)
        node.store("b")
        node.store("c")
        node.holds.release(OWNER, lease.lease_id)
        assert node.evict_all() == "abc"

    def test_looking_a_block_up_is_no_use(self, make_node: MakeNode) -> None:
        node = make_node(1)
        first = node.store("a")
        node.store("b")
        assert node.table.readable(node.space(), key("a")) is first
        assert node.table.readable(node.space(), key("Q")) is None
        assert node.evict_all() == "ab"


class TestMakeRoom:
    def test_takes_the_slot_of_the_coldest_of_its_class(self, make_node: MakeNode) -> None:
        node = make_node(1)
        for each in "abcd":
            node.store(each)
        node.touch("a")
        assert node.make_room() == "b"
        assert node.make_room() == "", "there is room"
        grant = node.holds.grant(OWNER, [node.begin("e")], 1)
        node.holds.expire(1)
        assert node.make_room() == "c", "what is overdue keeps its slot"
        assert grant.overdue

    def test_takes_the_slab_of_another_class_that_has_the_coldest(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.store("x", size=2048)
        node.store("y", size=2048)
        for each in "abcd":
            node.store(each)
        assert sorted(node.make_room()) == ["x", "y"]
        node.store("e")

    def test_leaves_a_colder_slab_of_another_class_that_is_held(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.store("x", size=2048)
        node.holds.lease(OWNER, [node.store("y", size=2048)], 1)
        for each in "abcd":
            node.store(each)
        assert node.make_room() == "a"

    def test_from_another_tenant_leaves_a_slab_that_must_be_replaced(self, make_node: MakeNode) -> None:
        node = make_node(1)
        node.chain("ab")
        assert node.make_room(tenant="blue") == "ba"
        assert not node.table.has_room(node.space("blue"), 1024)
        assert node.tier.pool.dirty("blue") is not None
        assert node.make_room(tenant="blue") == "", "the tier has not replaced it yet, and has no need of more"

    def test_counts_slab_taken_and_pressure_apart(self, make_node: MakeNode) -> None:
        node = make_node(1)
        for each in "abcd":
            node.store(each)
        node.table.take_changes()
        node.table.make_room(node.space(), 1024)
        node.table.make_room(node.space("blue"), 1024)
        causes = [event.cause for event in node.table.take_changes()]
        assert causes == [Cause.PRESSURE, *[Cause.SLAB_TAKEN] * 3]

    def test_is_refused_when_all_is_held_or_being_written(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.holds.lease(OWNER, node.chain("abcd"), 1)
        replicas = [node.begin(each, size=2048) for each in "xy"]
        node.holds.grant(OWNER, replicas, 1)
        for tenant, size in (("red", 1024), ("red", 2048), ("red", 64), ("blue", 1024)):
            with pytest.raises(TierFull):
                node.make_room(size, tenant)
        assert node.gone() == ""

    def test_is_refused_when_a_block_being_written_hangs_on_all(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.chain("abcd")
        node.holds.grant(OWNER, [node.begin("x", "d", size=SLAB_BYTES)], 1)
        for size in (1024, 2048):
            with pytest.raises(TierFull):
                node.make_room(size)

    def test_without_any_slab_is_refused(self, make_node: MakeNode) -> None:
        with pytest.raises(TierFull):
            make_node(0).make_room()

    def test_takes_with_a_block_all_that_hangs_on_it(self, make_node: MakeNode) -> None:
        node = make_node(2)
        node.chain("abcd")
        node.store("x", "c", size=2048)
        node.store("y", "x", size=2048)
        assert node.make_room(64) in ("yxdcba", "dyxcba", "yx")

    def test_spares_a_slab_on_which_the_hottest_chain_hangs(self, make_node: MakeNode) -> None:
        """Only the last block of a chain is touched: the front of a hot one looks as if nobody used it."""
        node = make_node(3)
        node.chain("abcd")  # a system prompt, never touched itself
        node.store("x", "d", size=2048)
        node.store("y", "x", size=2048)
        for each in "pqrs":
            node.store(each, size=1000)
        node.touch("y")
        assert sorted(node.make_room(64)) == ["p", "q", "r", "s"]

    def test_finds_a_slab_behind_many_that_are_held(self, make_node: MakeNode) -> None:
        node = make_node(4 * SLABS_TRIED + 1)
        for number in range(4 * SLABS_TRIED):
            node.holds.lease(OWNER, [node.store(f"held {number}", size=SLAB_BYTES)], 1)
        node.store("free", size=SLAB_BYTES)
        assert node.make_room(64) == "free"

    def test_finds_in_the_end_a_slab_behind_many_on_which_something_held_hangs(self, make_node: MakeNode) -> None:
        """A put looks into a few slabs only; the next one looks into others."""
        node = make_node(5 * SLABS_TRIED + 1)
        for number in range(4 * SLABS_TRIED):
            node.store(f"above {number}", size=SLAB_BYTES)
        node.store("free", size=SLAB_BYTES)
        for number in range(4 * SLABS_TRIED):
            child = node.begin(f"child {number}", f"above {number}", size=1024)
            node.holds.grant(OWNER, [child], 1)
        with pytest.raises(TierFull):
            node.make_room(64)
        assert node.make_room(64) == "free"


class TestSoftPins:
    def pin(self, node: Node, *replicas: Replica) -> int:
        return node.holds.pin("red", replicas, hard=False, expires_at=1).pin_id

    def test_go_after_all_others(self, make_node: MakeNode) -> None:
        node = make_node(1)
        replicas = [node.store(each) for each in "abcd"]
        pin_id = self.pin(node, replicas[0], replicas[2])
        assert node.table.coldest(DRAM) is replicas[1]
        node.holds.unpin("red", pin_id)
        assert node.table.coldest(DRAM) is replicas[0]
        self.pin(node, replicas[0], replicas[2])
        assert node.evict_all() == "bdac"

    def test_keep_their_slab_as_long_as_there_is_another_way(self, make_node: MakeNode) -> None:
        node = make_node(3)
        self.pin(node, node.store("a", size=2048))
        node.store("b", size=2048)
        for each in "wxyz":
            node.store(each)
        node.store("c", size=SLAB_BYTES)
        assert sorted(node.make_room(64)) == ["w", "x", "y", "z"], "not the slab used longest ago: that has a pin"
        assert node.tier.pool.slabs[3].owner == "red"
        node.store("d", size=64)
        assert node.make_room(2048) == "b", "of its own class, the one without a pin"

    def test_of_its_own_class_stay_when_a_slab_without_pins_can_be_emptied(self, make_node: MakeNode) -> None:
        node = make_node(3)
        node.store("coldest", size=1300)
        node.holds.lease(OWNER, [node.store("held", size=1300)], 1)
        self.pin(node, *(node.store(each) for each in "abcd"))
        node.chain("xy", size=2048)
        assert node.make_room() == "yx"

    def test_go_rather_than_that_a_put_is_refused(self, make_node: MakeNode) -> None:
        node = make_node(1)
        self.pin(node, *node.chain("ab", size=2048))
        assert node.make_room(2048) == "b"
        assert node.make_room(1024, "blue") == "a"

    def test_of_what_hangs_on_a_slab_spare_it_too(self, make_node: MakeNode) -> None:
        node = make_node(3)
        node.chain("abcd")
        self.pin(node, node.store("x", "d", size=SLAB_BYTES))
        node.store("y", size=2048)
        assert node.make_room(64) == "y"
        node.holds.lease(OWNER, [node.store("z", size=512)], 1)
        assert node.make_room(256) == "x"

    def test_count_for_each_pin(self, make_node: MakeNode) -> None:
        node = make_node(1)
        replica = node.store("a")
        node.store("b")
        first, second = self.pin(node, replica), self.pin(node, replica)
        node.holds.unpin("red", first)
        assert node.table.coldest(DRAM) is not replica
        node.holds.unpin("red", second)
        assert node.table.coldest(DRAM) is replica
        with pytest.raises(AssertionError, match="once for each pin"):
            node.table.soft_pin(replica, -1)


class TestEmptySlab:
    def test_takes_the_one_used_longest_ago(self, make_node: MakeNode) -> None:
        node = make_node(2)
        for each in "abcdefgh":
            node.store(each)
        for each in "ac":
            node.touch(each)
        node.gone()
        assert node.table.empty_coldest_slab(DRAM, Cause.SHRUNK)
        assert sorted(node.gone()) == ["e", "f", "g", "h"]
        assert len(list(node.tier.pool.spare())) == 1

    def test_takes_pinned_ones_when_there_are_no_others(self, make_node: MakeNode) -> None:
        node = make_node(1)
        node.holds.pin("red", [node.store("a")], hard=False, expires_at=1)
        assert node.table.empty_coldest_slab(DRAM, Cause.SHRUNK)

    def test_cannot_empty_what_drains(self, make_node: MakeNode) -> None:
        """A deleted block that somebody still reads keeps its slot, and its slab."""
        node = make_node(1)
        replica = node.store("a")
        node.store("b")
        lease = node.holds.lease(OWNER, [replica], 1)
        node.table.discard(replica, Cause.DELETED)
        assert not node.table.empty_coldest_slab(DRAM, Cause.SHRUNK)
        node.holds.release(OWNER, lease.lease_id)
        assert node.table.empty_coldest_slab(DRAM, Cause.SHRUNK)

    def test_of_an_empty_tier_there_is_none(self, make_node: MakeNode) -> None:
        assert not make_node(2).table.empty_coldest_slab(DRAM, Cause.SHRUNK)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda node, replica: setattr(replica, "holders", 2), "holders"),
        (lambda node, replica: setattr(replica, "state", State.EVICTED), "can be found"),
        (lambda node, replica: node.space().first_child.clear(), "children"),
        (lambda node, replica: setattr(replica, "parent", key("Q")), "out of order"),
        (lambda node, replica: setattr(node.tier, "used_bytes", 1), "bytes in use"),
        (lambda node, replica: node.tier.tenant_bytes.update(red=1), "bytes of red"),
        (lambda node, replica: setattr(node.tier, "replicas", 9), "counts 9 replicas"),
        (lambda node, replica: node.tier.evictable.remove(replica), "offered for eviction"),
        (lambda node, replica: node.space().replicas.pop(replica.key), "slots in use"),
        (lambda node, replica: replica.slab.give_back(replica.index), "slot"),
        (lambda node, replica: setattr(replica, "index", 0), "another's"),
        (lambda node, replica: setattr(replica.slab, "held", 1), "held"),
        (lambda node, replica: setattr(replica.slab, "pinned", 1), "pinned"),
        (lambda node, replica: setattr(replica.slab, "last_use", 0), "after its slab"),
        (lambda node, replica: setattr(replica.space, "tenant", "blue"), "lies in a slab of"),
    ],
)
def test_check_finds(damage: Callable[[Node, Replica], object], complaint: str) -> None:
    node = Node(2)
    *_, replica = node.chain("abc")
    assert list(check(node.table, node.holds)) == []
    damage(node, replica)
    assert complaint in "; ".join(check(node.table, node.holds))


class TestMove:
    def move(self, node: Node, name_: str) -> Move:
        move = node.table.begin_move(node.space().replicas[key(name_)])
        assert move is not None
        return move

    def test_a_copied_block_lies_in_its_new_slot_and_the_old_one_is_free(self, make_node: MakeNode) -> None:
        node = make_node(1)
        replica = node.store("a")
        old, version, move = replica.slot, replica.version, self.move(node, "a")
        node.table.take_changes()
        assert node.tier.used_bytes == 2048
        assert node.table.end_move(move, is_copied=True)
        assert replica.slot == move.target
        assert replica.version > version
        assert [event.change for event in node.table.take_changes()] == [Change.MOVED]
        assert node.store("b").slot[1:3] == old[1:3]

    @pytest.mark.parametrize("reason", ["not copied", "deleted", "held"])
    def test_else_it_stays_where_it_is(self, make_node: MakeNode, reason: str) -> None:
        node = make_node(1)
        replica = node.store("a")
        old, move = replica.slot, self.move(node, "a")
        if reason == "deleted":
            node.table.discard(replica, Cause.DELETED)
        elif reason == "held":
            node.table.hold(replica)
        node.table.take_changes()
        assert not node.table.end_move(move, is_copied=reason != "not copied")
        assert replica.slot == old
        assert node.table.take_changes() == []
        if reason == "held":
            node.table.let_go(replica)
        assert node.tier.used_bytes == (0 if reason == "deleted" else 1024)

    def test_what_is_held_or_being_written_does_not_move(self, make_node: MakeNode) -> None:
        node = make_node(1)
        replica = node.begin("a")
        for _ in range(2):
            with pytest.raises(AssertionError):
                node.table.begin_move(replica)
            if replica.state is State.ALLOCATED:
                node.table.commit(replica, 7)
                node.table.hold(replica)
        node.table.let_go(replica)

    def test_without_room_is_none_and_changes_nothing(self, make_node: MakeNode) -> None:
        node = make_node(1)
        node.chain("abcd")
        assert node.table.begin_move(node.space().replicas[key("a")]) is None
        assert node.tier.used_bytes == 4096


class TestColdestChain:
    def chain_of(self, node: Node, most_bytes: int) -> str:
        return "".join(name(replica) for replica in node.table.coldest_chain(DRAM, most_bytes))

    @pytest.mark.parametrize(("most_bytes", "expected"), [(1, "d"), (1024, "d"), (1025, "dc"), (99_999, "dcba")])
    def test_each_goes_before_its_parent_up_to_so_many_bytes(
        self, make_node: MakeNode, most_bytes: int, expected: str
    ) -> None:
        node = make_node(1)
        node.chain("abcd")
        assert self.chain_of(node, most_bytes) == expected

    def test_of_nothing_is_nothing(self, make_node: MakeNode) -> None:
        assert self.chain_of(make_node(1), 9999) == ""

    @pytest.mark.parametrize("reason", ["another child", "used since", "held", "pinned"])
    def test_ends_where_something_else_keeps_the_parent(self, make_node: MakeNode, reason: str) -> None:
        node = make_node(1)
        node.chain("abc")
        parent = node.space().replicas[key("b")]
        if reason == "another child":
            node.store("x", "b")
        elif reason == "used since":
            node.table.touch(parent)
        elif reason == "held":
            node.table.hold(parent)
        else:
            node.table.soft_pin(parent, +1)
        assert self.chain_of(node, 9999) == "c"
        if reason == "held":
            node.table.let_go(parent)

    def test_a_tier_of_whole_slabs_has_none(self) -> None:
        table = BlockTable({DRAM: TierShape(SLAB_BYTES, "")})
        table.tiers[DRAM].pool.grow()
        replica = table.allocate(table.space("red", 1, DRAM), key("a"), None, 1024)
        assert replica is not None
        table.commit(replica, 7)
        assert table.coldest_chain(DRAM, 9999) == []
        assert replica in table.tiers[replica.space.tier].evictable
