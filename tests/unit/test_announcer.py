"""What a holder tells its homes: each change once, in numbered batches, and all anew where the home does not know."""

import struct
from collections.abc import Hashable

import pytest

from kvstore.cluster import announcer as announcers
from kvstore.cluster.announcer import Announcer
from kvstore.cluster.batches import element
from kvstore.cluster.homes import Homes
from kvstore.cluster.naming import PARTITIONS
from kvstore.errors import ProtocolError
from kvstore.wire_cluster import DIGEST, Announce, Announced

DRAM, NVME = 2, 4
ALL = set(range(PARTITIONS))


class Holder:
    """An announcer, and what its node has: (partition, name) -> tiers. A block is its own name."""

    def __init__(self, *names: str) -> None:
        self.announcer = Announcer("me", 3)
        self.tiers: dict[Hashable, int] = {}
        self.epochs = dict.fromkeys(names, 1)
        self.homes = Homes(names)
        assert self.announcer.homes_changed(self.homes, self.epochs) == (ALL if names else set())
        for name in names:
            assert self.send(name).is_first
            self.answer(name)

    def has(self, partition: int, name: int, tiers: int) -> None:
        before = self.tiers.get(name, 0)
        for index in range(3):
            if (before ^ tiers) >> index & 1:
                self.announcer.toggle(partition, name, index, is_there=bool(tiers >> index & 1))
        self.tiers[name] = tiers
        self.announcer.note(partition, name)

    def describe(self, block: Hashable) -> tuple[int, int]:
        assert isinstance(block, int)
        return block, self.tiers[block]

    def batch(self, home: str, *, most: int = 100, digest: bool = False) -> Announce | None:
        return self.announcer.batch(home, self.describe, most, digest=digest)

    def send(self, home: str, *, most: int = 100, digest: bool = False) -> Announce:
        batch = self.batch(home, most=most, digest=digest)
        assert batch is not None
        return batch

    def answer(self, home: str, *, is_gap: bool = False, differing: tuple[int, ...] = ()) -> set[int]:
        sent = self.send(home)
        packed = struct.pack(f"<{len(differing)}H", *differing)
        return self.announcer.answered(home, Announced(0, sent.sequence, is_gap=is_gap, differing=packed))

    def change_homes(self, **epochs: int) -> set[int]:
        self.homes, self.epochs = Homes(epochs), epochs
        return self.announcer.homes_changed(self.homes, epochs)


def records(batch: Announce) -> list[tuple[int, int, int]]:
    partitions = struct.unpack(f"<{len(batch.tiers)}H", batch.partitions)
    names = struct.unpack(f"<{len(batch.tiers)}Q", batch.names)
    return list(zip(partitions, names, batch.tiers, strict=True))


def resets(batch: Announce) -> set[int]:
    return {partition for (partition,) in struct.iter_unpack("<H", batch.resets)}


@pytest.fixture
def holder() -> Holder:
    return Holder("home")


def test_a_change_is_told_once_with_what_is_true_then(holder):
    holder.has(5, 1, DRAM)
    holder.has(6, 2, DRAM)
    holder.has(5, 1, DRAM | NVME)
    batch = holder.send("home")
    assert records(batch) == [(5, 1, DRAM | NVME), (6, 2, DRAM)]
    assert (batch.node, batch.epoch, batch.sequence, batch.is_first) == ("me", 3, 2, False)
    assert holder.announcer.homes_waiting() == ["home"]
    assert holder.answer("home") == set()
    assert holder.batch("home") is None
    assert holder.announcer.homes_waiting() == []


def test_a_batch_stays_as_it_is_until_it_is_answered(holder):
    holder.has(5, 1, DRAM)
    batch = holder.send("home")
    holder.has(5, 1, 0)
    assert holder.send("home") is batch
    assert holder.announcer.waiting("home") == 2
    holder.answer("home")
    assert records(holder.send("home")) == [(5, 1, 0)]
    assert holder.announcer.waiting("home") == 1


def test_a_batch_has_no_more_blocks_than_asked_for(holder):
    for name in range(5):
        holder.has(5, name, DRAM)
    assert [name for _, name, _ in records(holder.send("home", most=3))] == [0, 1, 2]
    holder.answer("home")
    assert [name for _, name, _ in records(holder.send("home", most=3))] == [3, 4]


def test_an_answer_to_an_earlier_batch_changes_nothing(holder):
    holder.has(5, 1, DRAM)
    batch = holder.send("home")
    assert holder.announcer.answered("home", Announced(0, batch.sequence - 1)) == set()
    assert holder.send("home") is batch
    holder.answer("home")
    assert holder.announcer.answered("home", Announced(0, batch.sequence, is_gap=True)) == set()
    assert holder.announcer.answered("nobody", Announced(0, 1)) == set()
    assert holder.batch("home") is None


def test_after_a_gap_a_new_stream_tells_everything(holder):
    holder.has(5, 1, DRAM)
    before = holder.send("home")
    assert holder.answer("home", is_gap=True) == ALL
    holder.announcer.note(5, 1)
    batch = holder.send("home")
    assert batch.is_first
    assert batch.sequence > before.sequence
    assert records(batch) == [(5, 1, DRAM)]
    holder.answer("home")
    holder.has(5, 1, 0)
    assert not holder.send("home").is_first


def test_a_home_that_is_ahead_is_told_everything_with_higher_numbers(holder):
    holder.has(5, 1, DRAM)
    holder.send("home")
    assert holder.announcer.answered("home", Announced(0, 70)) == ALL
    assert (holder.send("home").is_first, holder.send("home").sequence) == (True, 71)


def test_each_home_has_its_own_stream():
    holder = Holder("a", "b")
    in_a, in_b = holder.homes.owned("a")[0], holder.homes.owned("b")[0]
    holder.has(in_a, 1, DRAM)
    holder.has(in_b, 2, DRAM)
    sent = holder.send("b")
    assert records(sent) == [(in_b, 2, DRAM)]
    assert records(holder.send("a")) == [(in_a, 1, DRAM)]
    holder.answer("b")
    assert holder.announcer.homes_waiting() == ["a"]
    holder.has(in_b, 2, 0)
    assert holder.send("b").sequence == sent.sequence + 1


def test_a_home_that_joins_is_told_what_became_its_own(holder):
    holder.has(5, 1, DRAM)
    before = holder.homes
    moved = holder.change_homes(home=1, new=1)
    assert moved == set(holder.homes.owned("new")) == set(holder.homes.moved(before))
    batch = holder.send("new")
    assert batch.is_first
    assert holder.announcer.homes_waiting() == ["home", "new"]


def test_a_block_does_not_wait_for_a_home_that_is_not_its_own_any_more(holder):
    after = Homes(["home", "new"])
    stays, moves = after.owned("home")[0], after.owned("new")[0]
    holder.has(stays, 1, DRAM)
    holder.has(moves, 2, DRAM)
    assert moves in holder.change_homes(home=1, new=1)
    assert records(holder.send("home")) == [(stays, 1, DRAM)]
    assert records(holder.send("new")) == []
    holder.announcer.note(moves, 2)
    holder.answer("new")
    assert records(holder.send("new")) == [(moves, 2, DRAM)]


def test_what_comes_back_to_a_home_is_reset_there(holder):
    holder.change_homes(home=1, new=1)
    new = set(holder.homes.owned("new"))
    assert holder.change_homes(home=1) == new
    batch = holder.send("home")
    assert not batch.is_first
    assert resets(batch) == new
    holder.answer("home")
    assert holder.batch("home") is None


def test_a_home_that_was_started_again_is_told_everything(holder):
    holder.has(5, 1, DRAM)
    holder.send("home")
    assert holder.change_homes(home=2) == ALL
    assert holder.send("home").is_first
    assert records(holder.send("home")) == []
    assert holder.send("home").sequence == 3


def test_a_home_that_was_away_is_told_everything_with_higher_numbers():
    holder = Holder("a", "b")
    for name in range(1, 4):
        holder.has(holder.homes.owned("b")[0], name, DRAM)
        last = holder.send("b").sequence
        holder.answer("b")
    holder.change_homes(a=1)
    holder.change_homes(a=1, b=1)
    batch = holder.send("b")
    assert batch.is_first
    assert batch.sequence > last


def test_without_members_nothing_waits(holder):
    holder.has(5, 1, DRAM)
    assert holder.change_homes() == ALL
    holder.has(5, 1, 0)
    assert holder.announcer.homes_waiting() == []
    assert holder.announcer.waiting("home") == 0
    assert holder.batch("home") is None
    assert holder.change_homes(home=1) == ALL


def test_digests_are_sent_when_everything_has_been_told(holder):
    holder.has(5, 1, DRAM | NVME)
    holder.has(5, 2, DRAM)
    holder.has(5, 2, 0)
    assert holder.send("home", digest=True).digests == b""
    holder.answer("home")
    digests = {partition: told for partition, *told in DIGEST.iter_unpack(holder.send("home", digest=True).digests)}
    assert digests.keys() == ALL
    assert digests[5] == [2, element(1, 1) ^ element(1, 2)]
    assert digests[6] == [0, 0]


def test_what_differs_is_told_anew(holder):
    holder.has(5, 1, DRAM)
    holder.answer("home")
    holder.send("home", digest=True)
    assert holder.answer("home", differing=(5, 9)) == {5, 9}
    holder.announcer.note(5, 1)
    batch = holder.send("home", digest=True)
    assert resets(batch) == {5, 9}
    assert records(batch) == [(5, 1, DRAM)]
    assert batch.digests == b""


def test_what_a_home_says_of_others_partitions_is_passed_over():
    holder = Holder("a", "b")
    holder.send("a", digest=True)
    others = holder.homes.owned("b")[0]
    assert holder.answer("a", differing=(others, PARTITIONS)) == set()


def test_an_answer_that_makes_no_sense_is_refused(holder):
    holder.has(5, 1, DRAM)
    batch = holder.send("home")
    with pytest.raises(ProtocolError):
        holder.announcer.answered("home", Announced(0, batch.sequence, differing=b"1"))
    assert holder.send("home") is batch


def test_what_there_is_no_room_for_is_told_anew_once_there_is(holder, monkeypatch):
    monkeypatch.setattr(announcers, "WAITING_MOST", 4)
    for name in range(4):
        holder.has(5, name, DRAM)
    for name in range(4, 7):
        holder.has(6, name, DRAM)
    holder.has(7, 7, DRAM)
    holder.has(5, 0, 0)
    assert holder.announcer.waiting("home") == 4
    holder.send("home", most=1)
    holder.has(6, 6, NVME)
    assert records(holder.send("home")) == [(5, 0, 0)]
    assert holder.answer("home") == set()
    assert len(records(holder.send("home", digest=True))) == 3
    assert holder.answer("home") == {6}
    for name in range(4, 7):
        holder.announcer.note(6, name)
    batch = holder.send("home", digest=True)
    assert (resets(batch), batch.digests) == ({6}, b"")
    assert records(batch) == [(6, 4, DRAM), (6, 5, DRAM), (6, 6, NVME)]
    assert holder.answer("home") == {7}


def test_what_was_late_is_a_gap_of_no_more_than_the_rest(holder, monkeypatch):
    monkeypatch.setattr(announcers, "WAITING_MOST", 1)
    holder.has(5, 1, DRAM)
    holder.has(6, 2, DRAM)
    assert holder.answer("home", is_gap=True) == ALL
    holder.answer("home")
    holder.announcer.note(6, 2)
    assert records(holder.send("home")) == [(6, 2, DRAM)]


def test_what_is_late_and_moves_is_no_more_of_its_old_home(holder, monkeypatch):
    monkeypatch.setattr(announcers, "WAITING_MOST", 1)
    moves = Homes(["home", "new"]).owned("new")
    holder.has(5, 1, DRAM)
    holder.has(moves[0], 2, DRAM)
    holder.change_homes(home=1, new=1)
    while holder.batch("home") is not None:
        assert not holder.answer("home") & set(moves)


def test_more_that_leaves_than_came_is_a_bug(holder):
    with pytest.raises(AssertionError):
        holder.announcer.toggle(5, 1, 0, is_there=False)
