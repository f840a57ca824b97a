"""Leases, grants and pins: who may let go of them, when they run out, and what is free then."""

from collections.abc import Callable, Iterator

import pytest

from kvstore.check import check
from kvstore.errors import Rejected, StaleLease, StoreError
from kvstore.holds import SLACK, Holds
from kvstore.table import BlockTable, Replica, TierShape
from kvstore.types import DRAM, NODE, BlockKey, Cause, Change, Owner, State

MINE, OTHERS = Owner(1), Owner(2)
LIMIT = 4


class Node:
    def __init__(self, limit: int = LIMIT) -> None:
        self.table = BlockTable({DRAM: TierShape(4096)})
        self.holds = Holds(self.table, limit, limit)
        self.tier = self.table.tiers[DRAM]
        self.space = self.table.space("red", 1, DRAM)
        for _ in range(4):
            self.tier.pool.grow()

    def begin(self, name: str, parent: str | None = None) -> Replica:
        above = BlockKey(parent.encode()) if parent is not None else None
        replica = self.table.allocate(self.space, BlockKey(name.encode()), above, 1024)
        assert replica is not None
        return replica

    def store(self, name: str) -> Replica:
        replica = self.begin(name)
        self.table.commit(replica, 7)
        return replica

    def causes(self) -> list[Cause | None]:
        return [event.cause for event in self.table.take_changes() if event.change is Change.REMOVED]

    @property
    def used_blocks(self) -> int:
        return self.tier.used_bytes // 1024


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    assert list(check(node.table, node.holds)) == []


class TestLease:
    def test_keeps_its_blocks_until_it_is_released(self, node: Node) -> None:
        replica = node.store("a")
        lease = node.holds.lease(MINE, [replica], 5)
        assert node.table.coldest(DRAM) is None
        assert node.holds.leased(MINE, lease.lease_id) == (replica,)
        assert node.holds.release(MINE, lease.lease_id)
        assert node.table.coldest(DRAM) is replica

    def test_keeps_the_slot_of_a_block_that_was_deleted_meanwhile(self, node: Node) -> None:
        replica = node.store("a")
        lease = node.holds.lease(MINE, [replica], 5)
        slot = replica.slot
        node.table.discard(replica, Cause.DELETED)
        assert (replica.state, replica.slot, node.used_blocks) == (State.EVICTED, slot, 1)
        assert node.store("a").slot != slot
        node.holds.release(MINE, lease.lease_id)
        assert replica.state is State.FREE

    def test_of_the_same_block_twice_holds_it_twice(self, node: Node) -> None:
        replica = node.store("a")
        lease = node.holds.lease(MINE, [replica, replica], 5)
        assert replica.holders == 2
        node.holds.release(MINE, lease.lease_id)
        assert replica.holders == 0

    def test_of_the_node_itself_is_not_refused_for_how_many_it_has(self, node: Node) -> None:
        replica = node.store("a")
        leases = [node.holds.lease(NODE, [replica], 5) for _ in range(LIMIT + 1)]
        for lease in leases:
            node.holds.release(NODE, lease.lease_id)

    def test_released_twice_is_no_mistake(self, node: Node) -> None:
        lease = node.holds.lease(MINE, [node.store("a")], 5)
        assert node.holds.release(MINE, lease.lease_id)
        assert not node.holds.release(MINE, lease.lease_id)
        assert not node.holds.release(OTHERS, lease.lease_id)

    def test_ends_at_its_time_and_not_before(self, node: Node) -> None:
        lease = node.holds.lease(MINE, [node.store("a")], 5)
        assert node.holds.expire(4.999) == 0
        assert node.holds.expire(5) == 1
        with pytest.raises(StaleLease):
            node.holds.leased(MINE, lease.lease_id)
        assert not node.holds.release(MINE, lease.lease_id)

    def test_renewed_ends_later_and_never_sooner(self, node: Node) -> None:
        lease = node.holds.lease(MINE, [node.store("a")], 5)
        node.holds.renew(MINE, lease.lease_id, 9)
        node.holds.renew(MINE, lease.lease_id, 7)
        assert node.holds.expire(8.9) == 0
        assert node.holds.expire(9) == 1

    def test_of_a_block_being_written_outlives_its_writer(self, node: Node) -> None:
        replica = node.begin("a")
        grant = node.holds.grant(MINE, [replica], 5)
        lease = node.holds.lease(OTHERS, [replica], 9)
        node.holds.give_up(MINE, grant.grant_id, Cause.ABORTED)
        assert node.used_blocks == 1
        node.holds.release(OTHERS, lease.lease_id)
        assert node.used_blocks == 0


class TestGrant:
    def test_committed_lets_go_and_can_be_found(self, node: Node) -> None:
        replicas = [node.begin(name) for name in "ab"]
        grant = node.holds.grant(MINE, replicas, 5)
        assert (grant.size_bytes, node.holds.writing_bytes(MINE)) == (2048, 2048)
        node.holds.finish(node.holds.written(MINE, grant.grant_id), [7, 8])
        assert [replica.checksum for replica in replicas] == [7, 8]
        assert [replica.holders for replica in replicas] == [0, 0]
        assert (node.holds.writing_bytes(MINE), node.holds.held_by(MINE)) == (0, 0)
        assert node.holds.expire(99) == 0

    def test_with_another_number_of_checksums_is_a_mistake(self, node: Node) -> None:
        grant = node.holds.grant(MINE, [node.begin("a")], 5)
        with pytest.raises(AssertionError):
            node.holds.finish(grant, [])

    def test_that_ran_out_is_out_of_reach_but_keeps_its_slots(self, node: Node) -> None:
        grant = node.holds.grant(MINE, [node.begin(name) for name in "ab"], 5)
        assert node.holds.expire(5) == 1
        assert node.causes() == [Cause.PUT_TIMEOUT] * 2
        assert not node.space.replicas
        assert (node.used_blocks, node.holds.writing_bytes(MINE), node.holds.held_by(MINE)) == (2, 2048, 1)
        assert grant.overdue

    def test_that_ran_out_may_still_be_written_to_when_its_writer_tells_of_progress(self, node: Node) -> None:
        """It streams layer by layer, and its next layer is on the way: nobody else may have the slot yet."""
        grant = node.holds.grant(MINE, [node.begin("a")], 5)
        node.holds.expire(5)
        with pytest.raises(StaleLease, match="given up"):
            node.holds.granted(MINE, grant.grant_id)
        assert node.used_blocks == 1

    @pytest.mark.parametrize("last_word", ["commit", "abort", "end of session"])
    def test_that_ran_out_frees_its_slots_at_its_writers_last_word(self, node: Node, last_word: str) -> None:
        grant = node.holds.grant(MINE, [node.begin("a")], 5)
        node.holds.expire(5)
        node.causes()
        if last_word == "commit":
            with pytest.raises(StaleLease, match="ran out"):
                node.holds.written(MINE, grant.grant_id)
        elif last_word == "abort":
            assert node.holds.give_up(MINE, grant.grant_id, Cause.ABORTED)
        else:
            assert node.holds.end(MINE) == 1
        assert (node.used_blocks, node.holds.held_by(MINE)) == (0, 0)
        assert node.causes() == [], "it went once, when it ran out"

    def test_that_ran_out_is_counted_once(self, node: Node) -> None:
        node.holds.grant(MINE, [node.begin("a")], 5)
        assert node.holds.expire(5) == 1
        for _ in range(2 * SLACK):  # so many that the list of deadlines is made anew
            node.holds.release(OTHERS, node.holds.lease(OTHERS, [], 99).lease_id)
        assert node.holds.expire(100) == 0

    def test_given_up_twice_is_no_mistake(self, node: Node) -> None:
        grant = node.holds.grant(MINE, [node.begin("a")], 5)
        assert node.holds.give_up(MINE, grant.grant_id, Cause.ABORTED)
        assert not node.holds.give_up(MINE, grant.grant_id, Cause.ABORTED)
        assert node.causes() == [Cause.ABORTED]

    def test_frees_a_key_for_the_next_writer_at_once(self, node: Node) -> None:
        first = node.begin("a")
        node.holds.grant(MINE, [first], 5)
        node.holds.expire(5)
        second = node.begin("a")
        node.holds.grant(OTHERS, [second], 9)
        assert first.slot != second.slot


class TestPin:
    def test_that_is_hard_keeps_a_block(self, node: Node) -> None:
        replica = node.store("a")
        pin = node.holds.pin("red", [replica], hard=True, expires_at=5)
        assert node.table.coldest(DRAM) is None
        assert node.holds.pins("red") == [pin]
        assert node.holds.unpin("red", pin.pin_id)
        assert node.table.coldest(DRAM) is replica
        assert node.holds.pins("red") == []

    @pytest.mark.parametrize("hard", [True, False])
    def test_runs_out(self, node: Node, hard: bool) -> None:
        replica = node.store("a")
        pin = node.holds.pin("red", [replica], hard=hard, expires_at=5)
        assert node.holds.expire(5) == 1
        assert (replica.holders, replica.soft_pins) == (0, 0)
        assert not node.holds.unpin("red", pin.pin_id)

    @pytest.mark.parametrize("hard", [True, False])
    def test_is_let_go_after_its_block_was_deleted(self, node: Node, hard: bool) -> None:
        replica = node.store("a")
        pin = node.holds.pin("red", [replica], hard=hard, expires_at=5)
        node.table.discard(replica, Cause.DELETED)
        again = node.store("a")
        assert (again.holders, again.soft_pins) == (0, 0)
        assert node.used_blocks == (2 if hard else 1)
        node.holds.unpin("red", pin.pin_id)
        assert node.used_blocks == 1
        assert node.table.coldest(DRAM) is again

    def test_of_a_block_being_written_does_not_stay_with_it(self, node: Node) -> None:
        replica = node.begin("a")
        pin = node.holds.pin("red", [replica], hard=False, expires_at=5)
        node.holds.unpin("red", pin.pin_id)
        node.table.commit(replica, 7)
        assert replica.soft_pins == 0

    def test_of_another_tenant_is_not_there(self, node: Node) -> None:
        pin = node.holds.pin("red", [node.store("a")], hard=True, expires_at=5)
        assert not node.holds.unpin("blue", pin.pin_id)
        assert node.holds.pins("blue") == []

    def test_of_nothing_comes_and_goes_like_any_other(self, node: Node) -> None:
        pins = [node.holds.pin("red", [], hard=True, expires_at=5) for _ in range(LIMIT)]
        with pytest.raises(Rejected):
            node.holds.pin("red", [], hard=True, expires_at=5)
        for pin in pins:
            assert node.holds.unpin("red", pin.pin_id)
        node.holds.pin("red", [node.store(name) for name in "abcd"], hard=False, expires_at=5)


class TestEnd:
    def test_of_a_session_frees_all_that_it_held_and_nothing_else(self, node: Node) -> None:
        kept = node.store("kept")
        node.holds.lease(OTHERS, [kept], 5)
        node.holds.lease(MINE, [kept, node.store("a")], 5)
        node.holds.grant(MINE, [node.begin("b")], 5)
        node.holds.pin("red", [kept], hard=True, expires_at=5)
        node.table.take_changes()
        assert node.holds.end(MINE) == 2
        assert node.causes() == [Cause.WRITER_LOST]
        assert kept.holders == 2
        assert node.used_blocks == 2

    def test_of_one_that_held_nothing_frees_nothing(self, node: Node) -> None:
        assert node.holds.end(MINE) == 0


class TestRefusal:
    """Each raises an error of the tree, and changes nothing."""

    CALLS: tuple[tuple[str, Callable[[Node], object], type[StoreError]], ...] = (
        ("renew another's lease", lambda node: node.holds.renew(OTHERS, 1, 99), StaleLease),
        ("renew no lease", lambda node: node.holds.renew(MINE, 99, 99), StaleLease),
        ("renew a grant", lambda node: node.holds.renew(MINE, 2, 99), StaleLease),
        ("read another's lease", lambda node: node.holds.leased(OTHERS, 1), StaleLease),
        ("release another's lease", lambda node: node.holds.release(OTHERS, 1), StaleLease),
        ("progress of another's grant", lambda node: node.holds.granted(OTHERS, 2), StaleLease),
        ("progress of a lease", lambda node: node.holds.granted(MINE, 1), StaleLease),
        ("commit another's grant", lambda node: node.holds.written(OTHERS, 2), StaleLease),
        ("commit another's overdue grant", lambda node: node.holds.written(OTHERS, 3), StaleLease),
        ("progress of an overdue grant", lambda node: node.holds.granted(MINE, 3), StaleLease),
        ("abort another's grant", lambda node: node.holds.give_up(OTHERS, 2, Cause.ABORTED), StaleLease),
        ("a lease too many", lambda node: node.holds.lease(MINE, [], 99), Rejected),
        ("a grant too many", lambda node: node.holds.admit(MINE), Rejected),
        (
            "a pin too many",
            lambda node: node.holds.pin("red", list(node.space.replicas.values()), hard=True, expires_at=9),
            Rejected,
        ),
    )

    @pytest.mark.parametrize(("call", "error"), [each[1:] for each in CALLS], ids=[each[0] for each in CALLS])
    def test_changes_nothing(self, node: Node, call: Callable[[Node], object], error: type[StoreError]) -> None:
        replica = node.store("a")
        node.holds.lease(MINE, [replica], 50)
        node.holds.grant(MINE, [node.begin("b")], 50)
        node.holds.grant(MINE, [node.begin("c")], 5)
        node.holds.lease(MINE, [], 50)
        node.holds.pin("red", [node.store(str(number)) for number in range(3)], hard=False, expires_at=50)
        node.holds.expire(5)
        before = self.state(node)
        with pytest.raises(error):
            call(node)
        assert self.state(node) == before

    def state(self, node: Node) -> object:
        replicas = [*node.space.replicas.values(), *node.tier.draining]
        counts = [(replica.key, replica.state, replica.holders, replica.soft_pins) for replica in replicas]
        return counts, node.used_blocks, node.holds.held_by(MINE), node.holds.held_by(OTHERS), node.holds.pins("red")


class TestDeadlines:
    def test_of_what_was_released_do_not_pile_up(self) -> None:
        node = Node(limit=1 << 20)
        replica = node.store("a")
        kept = [node.holds.lease(MINE, [replica], 1e6 + number) for number in range(10)]
        for number in range(20 * SLACK):
            node.holds.release(MINE, node.holds.lease(MINE, [replica], 1e6 + number).lease_id)
            assert len(node.holds._deadlines) <= SLACK + 2 * (len(kept) + 1)
        assert node.holds.expire(2e6) == len(kept)
        assert replica.holders == 0

    def test_of_what_is_renewed_all_the_time_do_not_pile_up(self) -> None:
        node = Node()
        lease = node.holds.lease(MINE, [node.store("a")], 1)
        for now in range(3 * SLACK):
            node.holds.renew(MINE, lease.lease_id, now + 2)
            assert node.holds.expire(now + 1) == 0
        assert len(node.holds._deadlines) == 1
