"""Blocks that another node holds too: when they go, and what is counted of them."""

from collections.abc import Iterator

import pytest

from kvstore.check import check
from kvstore.eviction import EVICTION
from kvstore.holds import Holds
from kvstore.table import BlockTable, Replica, Space, TierShape
from kvstore.types import DRAM, BlockKey, Cause, Change, GroupKey, Owner, State

SLAB_BYTES = 4096  # four blocks of 1024 bytes, two of 2048
CAPACITY_BYTES = 4 * SLAB_BYTES


class Node:
    def __init__(self, policy: str = "lru") -> None:
        self.table = BlockTable({DRAM: TierShape(SLAB_BYTES, policy)})
        self.holds = Holds(self.table, 100, 100)
        self.tier = self.table.tiers[DRAM]
        for _ in range(CAPACITY_BYTES // SLAB_BYTES):
            self.tier.pool.grow()

    def space(self, tenant: str = "red") -> Space:
        return self.table.space(tenant, 1, DRAM)

    def begin(self, name: str, parent: str | None = None, size: int = 1024, tenant: str = "red") -> Replica:
        above = key(parent) if parent is not None else None
        replica = self.table.allocate(self.space(tenant), key(name), above, size)
        assert replica is not None, "no room"
        return replica

    def store(self, names: str, copies: str = "", size: int = 1024, tenant: str = "red") -> list[Replica]:
        """A chain, of which some blocks are copies."""
        found = []
        for parent, name in zip([None, *names], names, strict=False):
            replica = self.begin(name, parent, size, tenant)
            self.table.commit(replica, 7)
            self.table.mark_copy(replica, is_copy=name in copies)
            found.append(replica)
        return found

    def evict_all(self, tenant: str | None = None) -> str:
        """The names of those that went, in order."""
        self.table.take_changes()
        while (replica := self.table.coldest(DRAM, tenant)) is not None:
            self.table.evict(replica, Cause.PRESSURE)
            assert self.problems() == []
        return self.gone()

    def gone(self) -> str:
        events = self.table.take_changes()
        return "".join(name_of(event.replica) for event in events if event.change is Change.REMOVED)

    def problems(self) -> list[str]:
        return list(check(self.table, self.holds))


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def name_of(replica: Replica) -> str:
    return replica.key.rstrip(b".").decode()


@pytest.fixture
def node() -> Iterator[Node]:
    """In order when the test is over."""
    made = Node()
    yield made
    assert made.problems() == []


class TestWhatMayGo:
    def test_a_copy_goes_before_its_children(self, node: Node) -> None:
        node.store("abc", copies="ab")
        assert node.evict_all() == "abc"

    def test_an_original_waits_for_its_children_copies_or_not(self, node: Node) -> None:
        node.store("abc", copies="c")
        assert node.evict_all() == "cba"

    def test_a_block_that_becomes_an_original_waits_for_its_children(self, node: Node) -> None:
        a, _ = node.store("ab", copies="a")
        node.table.mark_copy(a, is_copy=False)
        assert not a.is_evictable
        assert node.evict_all() == "ba"

    def test_marking_twice_is_marking_once(self, node: Node) -> None:
        (a,) = node.store("a", copies="a")
        node.table.mark_copy(a, is_copy=True)
        assert node.tier.copy_bytes == 1024
        node.table.mark_copy(a, is_copy=False)
        node.table.mark_copy(a, is_copy=False)
        assert node.tier.copy_bytes == 0
        assert node.evict_all() == "a"

    def test_what_is_held_stays_until_it_is_let_go(self, node: Node) -> None:
        a, _ = node.store("ab")
        lease = node.holds.lease(Owner(1), [a], 9.0)
        node.table.mark_copy(a, is_copy=True)
        assert node.evict_all() == "b"
        node.holds.release(Owner(1), lease.lease_id)
        assert node.evict_all() == "a"

    def test_a_block_may_be_marked_while_it_is_written(self, node: Node) -> None:
        replica = node.begin("a")
        node.table.mark_copy(replica, is_copy=True)
        assert node.table.coldest(DRAM) is None
        node.table.commit(replica, 7)
        child = node.begin("b", "a")
        assert node.table.coldest(DRAM) is replica
        node.table.abort(child, Cause.ABORTED)
        node.table.let_go(child)
        assert node.evict_all() == "a"

    def test_a_block_that_went_cannot_be_marked(self, node: Node) -> None:
        (a,) = node.store("a")
        node.table.discard(a, Cause.DELETED)
        with pytest.raises(AssertionError):
            node.table.mark_copy(a, is_copy=True)

    def test_a_copy_that_comes_back_as_an_original_finds_its_children(self, node: Node) -> None:
        a, *_ = node.store("abc", copies="a")
        node.table.evict(a, Cause.PRESSURE)
        (again,) = node.store("a")
        assert [name_of(child) for child in again.space.children_of(again)] == ["b"]
        assert node.evict_all() == "cba"


class TestOrder:
    def test_within_their_share_copies_and_originals_go_by_their_use(self, node: Node) -> None:
        for name in "abcd":
            node.store(name, copies="bd")
        assert node.evict_all() == "abcd"

    def test_over_their_share_copies_go_first_until_they_are_within(self, node: Node) -> None:
        node.tier.copy_share = 1024 / CAPACITY_BYTES
        for name in "abcd":
            node.store(name, copies="bcd")
        assert node.evict_all() == "bcad"

    def test_without_a_share_all_copies_go_first(self, node: Node) -> None:
        node.tier.copy_share = 0.0
        node.store("ab")
        node.store("cde", copies="cde")
        assert node.evict_all() == "cdeba"

    def test_softly_pinned_ones_go_last_and_their_copies_before_their_originals(self, node: Node) -> None:
        node.tier.copy_share = 0.0
        for name in "abcd":
            (replica,) = node.store(name, copies="bd")
            if name in "ab":
                node.table.soft_pin(replica, +1)
        assert node.evict_all() == "dcba"

    @pytest.mark.parametrize("share", [0.0, 1.0])
    def test_a_tenants_and_a_classs_coldest_are_chosen_alike(self, node: Node, share: float) -> None:
        node.tier.copy_share = share
        node.store("a", tenant="blue", copies="a")
        node.store("b")
        node.store("c", copies="c")
        node.store("d", copies="d", size=2048)
        expected = "b" if share else "c"
        coldest = node.tier.coldest_of(GroupKey("red", 1024))
        assert coldest is not None
        assert name_of(coldest) == expected
        assert node.evict_all("red") == ("bcd" if share else "cdb")

    def test_a_put_takes_the_room_of_copies_that_are_too_many(self, node: Node) -> None:
        node.tier.copy_share = 0.25
        node.store("abcdefgh")
        node.store("ijklmnop", copies="ijklmnop")
        node.table.take_changes()
        node.table.make_room(node.space(), 1024)
        assert node.gone() == "i"

    def test_bytes_of_a_copy_count_until_its_slot_is_free(self, node: Node) -> None:
        (a,) = node.store("a", copies="a")
        node.table.hold(a)
        node.table.discard(a, Cause.DELETED)
        assert (a.state, node.tier.copy_bytes) == (State.EVICTED, 1024)
        node.table.let_go(a)
        assert node.tier.copy_bytes == 0

    @pytest.mark.parametrize("policy", EVICTION)
    def test_every_policy_lets_all_go(self, policy: str) -> None:
        node = Node(policy)
        node.tier.copy_share = 0.2
        replicas = node.store("abcdefgh", copies="abcd") + node.store("ijkl", copies="jl")
        for replica in replicas[::3]:
            node.table.use(replica)
        for replica in replicas[::2]:
            node.table.mark_copy(replica, is_copy=not replica.is_copy)
        assert sorted(node.evict_all()) == sorted("abcdefghijkl")
        assert (node.tier.used_bytes, node.tier.copy_bytes) == (0, 0)


class TestRecency:
    @pytest.mark.parametrize("copies", ["a", "ab"])
    def test_a_copy_takes_up_the_recency_of_a_child_that_goes(self, node: Node, copies: str) -> None:
        _, b = node.store("ab", copies=copies)
        node.store("c")
        node.table.touch(b)
        node.table.discard(b, Cause.DELETED)
        assert node.evict_all() == "ca"

    def test_a_child_that_was_used_before_it_changes_nothing(self, node: Node) -> None:
        a, b = node.store("ab", copies="a")
        node.table.touch(a)
        node.store("c")
        node.table.discard(b, Cause.DELETED)
        assert node.evict_all() == "ac"

    def test_an_original_takes_up_the_recency_of_a_copy(self, node: Node) -> None:
        _, b = node.store("ab", copies="b")
        node.store("c")
        node.table.touch(b)
        assert node.evict_all() == "cba"
        (a,) = node.store("a")
        assert a.hits == 0


class TestManyAtOnce:
    def test_a_slab_is_emptied_of_a_copy_without_what_hangs_on_it(self, node: Node) -> None:
        node.store("abcd", copies="d")
        node.store("x", size=2048)
        child = node.begin("e", "d", size=2048)
        node.table.commit(child, 7)
        node.table.take_changes()
        assert node.table.empty_coldest_slab(DRAM, Cause.SHRUNK)
        assert node.gone() == "dcba"
        assert child.state is State.WRITTEN

    def test_a_slab_with_a_copy_can_be_emptied_though_what_hangs_on_it_is_held(self, node: Node) -> None:
        node.store("abcd", copies="abcd")
        held = node.begin("e", "d", size=2048)
        node.table.take_changes()
        assert node.table.empty_coldest_slab(DRAM, Cause.SHRUNK)
        assert sorted(node.gone()) == list("abcd")
        node.table.abort(held, Cause.ABORTED)
        node.table.let_go(held)

    def test_a_chain_of_copies_that_are_too_many_takes_no_original_along(self, node: Node) -> None:
        node.tier.copy_share = 0.0
        node.store("abcd", copies="cd")
        assert [name_of(replica) for replica in node.table.coldest_chain(DRAM, 9999)] == ["c"]

    def test_a_chain_that_goes_has_nothing_that_is_held(self, node: Node) -> None:
        node.tier.copy_share = 0.0
        _, b, c, _ = node.store("abcd", copies="abcd")
        node.table.discard(node.space().replicas[key("a")], Cause.DELETED)
        node.table.touch(node.space().replicas[key("d")])
        node.table.hold(b)
        assert node.table.coldest_chain(DRAM, 9999) == [c]
        node.table.let_go(b)


class TestMoves:
    def test_a_copy_that_moves_is_a_copy_still(self, node: Node) -> None:
        a, _ = node.store("ab", copies="a")
        move = node.table.begin_move(a)
        assert move is not None
        assert node.tier.copy_bytes == 1024
        assert node.table.end_move(move, is_copied=True)
        assert (a.is_copy, node.tier.copy_bytes) == (True, 1024)
        assert node.evict_all() == "ab"


def test_fsck_tells_that_copies_are_counted_wrongly() -> None:
    node = Node()
    (a,) = node.store("a")
    a.is_copy = True
    assert any("bytes of copies" in problem for problem in node.problems())


def test_a_block_of_an_earlier_start_is_told_of() -> None:
    node = Node()
    slab = node.tier.pool.restore(9, GroupKey("red", 1024), 5)
    assert slab.group is not None
    replica = Replica(node.space(), key("a"), None, slab, slab.group, 1, 3, 1000, 0, State.WRITTEN)
    node.table.restore(replica)
    assert node.table.take_changes() == [(Change.RESTORED, replica, None)]
    assert node.problems() == []
