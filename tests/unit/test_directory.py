"""What a home says about who has which blocks, after whatever batches came, in whatever order."""

import struct
from collections.abc import Iterable

import pytest

from kvstore.cluster import directory as directories
from kvstore.cluster.batches import NAMES_MOST, element
from kvstore.cluster.directory import Directory
from kvstore.cluster.naming import PARTITIONS
from kvstore.errors import InvalidRequest, StaleLease
from kvstore.wire_cluster import DIGEST, HOLDING, STRIPE, Announce, Announced, Locate

HBM, DRAM, NVME = 1, 2, 4
P, Q = 7, 4095
Record = tuple[int, int, int]  # partition, name, tiers


def pack(code: str, numbers: Iterable[int]) -> bytes:
    numbers = list(numbers)
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def batch(node: str, sequence: int, records: Iterable[Record] = (), *, epoch: int = 1, is_first: bool | None = None,
          resets: Iterable[int] = (), digests: Iterable[Record] = ()) -> Announce:  # fmt: skip
    records = list(records)
    return Announce(
        id=sequence,
        node=node,
        epoch=epoch,
        sequence=sequence,
        is_first=sequence == 1 if is_first is None else is_first,
        resets=pack("H", resets),
        partitions=pack("H", (partition for partition, _, _ in records)),
        names=pack("Q", (name for _, name, _ in records)),
        tiers=bytes(tiers for _, _, tiers in records),
        digests=b"".join(DIGEST.pack(*digest) for digest in digests),
    )


class Home(Directory):
    """A directory that is checked after whatever it does, and tells and asks of plain names."""

    def tell(self, told: Announce) -> Announced:
        reply = self.apply(told)
        assert list(self.problems()) == []
        return reply

    def who(self, partition: int, *names: int) -> list[dict[str, int]]:
        reply = self.locate(Locate(9, STRIPE.pack(partition, len(names)), pack("Q", names)))
        assert reply.id == 9
        pairs = [HOLDING.iter_unpack(holding) for holding in reply.holdings]
        holdings = [{}, *({reply.nodes[number]: tiers for number, tiers in some} for some in pairs)]
        return [holdings[number] for (number,) in struct.iter_unpack("<H", reply.which)]


def names(packed: bytes) -> list[int]:
    return [name for (name,) in struct.iter_unpack("<Q", packed)]


@pytest.fixture
def home() -> Home:
    return Home()


def test_whoever_told_of_a_block_is_found_with_its_tiers(home):
    home.tell(batch("a", 1, [(P, 1, DRAM), (P, 2, DRAM | NVME)]))
    home.tell(batch("b", 1, [(P, 2, HBM)]))
    assert home.who(P, 1, 2, 3) == [{"a": DRAM}, {"a": DRAM | NVME, "b": HBM}, {}]
    assert (home.blocks, home.holdings) == (2, 3)


def test_a_record_says_all_the_tiers(home):
    home.tell(batch("a", 1, [(P, 1, DRAM), (P, 2, DRAM)]))
    home.tell(batch("a", 2, [(P, 1, NVME), (P, 2, 0), (P, 3, 0)]))
    assert home.who(P, 1, 2, 3) == [{"a": NVME}, {}, {}]
    assert (home.blocks, home.holdings) == (1, 1)


def test_the_last_record_of_a_batch_counts(home):
    home.tell(batch("a", 1, [(P, 1, DRAM), (P, 1, 0), (P, 1, NVME), (P, 2, DRAM), (P, 2, 0)]))
    assert home.who(P, 1, 2) == [{"a": NVME}, {}]


def test_one_answer_is_about_several_stripes(home):
    home.tell(batch("a", 1, [(P, 1, DRAM), (Q, 2, DRAM)]))
    stripes = STRIPE.pack(P, 2) + STRIPE.pack(Q, 1) + STRIPE.pack(P, 0) + STRIPE.pack(9, 1)
    reply = home.locate(Locate(1, stripes, pack("Q", [1, 2, 2, 1])))
    assert struct.unpack("<4H", reply.which) == (1, 0, 1, 0)
    assert (reply.nodes, reply.holdings) == (("a",), (HOLDING.pack(0, DRAM),))


def test_a_batch_that_comes_twice_is_answered_alike_and_changes_nothing(home):
    home.tell(batch("b", 1, [(P, 1, DRAM)]))
    first = home.tell(batch("a", 1, [(P, 1, DRAM)], digests=[(Q, 3, 3)]))
    home.tell(batch("b", 2, [(P, 1, 0)]))
    again = home.tell(batch("a", 1, [(P, 1, DRAM)]))
    assert again == first
    assert names(again.shared) == [1]
    assert struct.unpack("<H", again.differing) == (Q,)


def test_a_batch_from_long_ago_changes_nothing(home):
    home.tell(batch("a", 1, [(P, 1, DRAM)]))
    home.tell(batch("a", 2, [(P, 1, 0)]))
    assert home.tell(batch("a", 1, [(P, 1, DRAM)])) == Announced(1, 2)
    assert home.who(P, 1) == [{}]


def test_what_follows_a_lost_batch_is_not_taken_in(home):
    assert home.tell(batch("a", 5, [(P, 1, DRAM)])) == Announced(5, 0, is_gap=True)
    home.tell(batch("a", 1))
    assert home.tell(batch("a", 3, [(P, 1, DRAM)])) == Announced(3, 1, is_gap=True)
    assert home.who(P, 1) == [{}]


def test_a_new_stream_replaces_what_was_told_before(home):
    home.tell(batch("a", 1, [(P, 1, DRAM), (P, 2, DRAM)]))
    home.tell(batch("b", 1, [(P, 1, DRAM)]))
    assert not home.tell(batch("a", 6, [(P, 2, NVME)], is_first=True)).is_gap
    assert home.who(P, 1, 2) == [{"b": DRAM}, {"a": NVME}]
    assert home.tell(batch("a", 1, [(P, 1, DRAM)])).sequence == 6
    assert home.who(P, 1) == [{"b": DRAM}]
    assert not home.sweep(100)
    assert (home.blocks, home.holdings) == (2, 2)


def test_a_later_start_of_a_node_replaces_the_earlier_one(home):
    home.tell(batch("a", 1, [(P, 1, DRAM)]))
    assert home.tell(batch("a", 2, [(P, 2, DRAM)], epoch=2)) == Announced(2, 0, is_gap=True)
    assert home.who(P, 1) == [{"a": DRAM}]
    home.tell(batch("a", 1, [(P, 2, DRAM)], epoch=2))
    assert home.who(P, 1, 2) == [{}, {"a": DRAM}]
    with pytest.raises(StaleLease):
        home.tell(batch("a", 2, [(P, 1, DRAM)]))
    assert home.who(P, 1, 2) == [{}, {"a": DRAM}]


def test_what_is_reset_is_forgotten_before_the_records(home):
    home.tell(batch("a", 1, [(P, 1, DRAM), (P, 2, DRAM), (Q, 3, DRAM)]))
    home.tell(batch("b", 1, [(P, 2, DRAM)]))
    home.tell(batch("a", 2, [(P, 1, NVME)], resets=[P, 9]))
    assert home.who(P, 1, 2) == [{"a": NVME}, {"b": DRAM}]
    assert home.who(Q, 3) == [{"a": DRAM}]


def test_a_node_that_is_gone_is_in_no_answer_and_then_in_no_memory(home):
    home.tell(batch("a", 1, [(P, name, DRAM) for name in range(10)]))
    home.tell(batch("b", 1, [(P, name, DRAM) for name in range(5)]))
    home.forget("a", 1)
    assert home.who(P, 0, 9) == [{"b": DRAM}, {}]
    assert home.holdings == 5
    assert home.blocks == 10
    assert home.sweep(4)
    assert list(home.problems()) == []
    assert home.sweep(4)
    assert not home.sweep(4)
    assert list(home.problems()) == []
    assert home.blocks == 5


def test_a_partition_of_which_everything_is_gone_is_swept(home):
    home.tell(batch("a", 1, [(P, 1, DRAM), (P, 2, DRAM)]))
    home.forget("a", 1)
    home.keep(lambda partition: partition != P)
    assert not home.sweep(1)
    assert home.blocks == 0


def test_an_earlier_start_that_is_gone_says_nothing_of_a_later_one(home):
    home.tell(batch("a", 1, [(P, 1, DRAM)], epoch=5))
    home.forget("a", 4)
    home.forget("b", 4)
    assert home.who(P, 1) == [{"a": DRAM}]
    home.forget("a", 6)
    assert home.who(P, 1) == [{}]


def test_a_node_that_was_taken_for_dead_begins_anew(home):
    home.tell(batch("a", 1, [(P, 1, DRAM)]))
    home.forget("a", 1)
    assert home.tell(batch("a", 2, [(P, 2, DRAM)])).is_gap
    home.tell(batch("a", 3, [(P, 2, DRAM)], is_first=True))
    assert home.who(P, 1, 2) == [{}, {"a": DRAM}]
    assert not home.sweep(10)
    assert home.blocks == 1


def test_partitions_with_another_home_are_dropped(home):
    home.tell(batch("a", 1, [(P, 1, DRAM), (Q, 2, DRAM)], digests=[]))
    home.keep(lambda partition: partition == Q)
    assert list(home.problems()) == []
    assert home.who(P, 1) == [{}]
    assert home.who(Q, 2) == [{"a": DRAM}]
    assert (home.blocks, home.holdings) == (1, 1)
    home.tell(batch("a", 2, [(P, 1, DRAM)]))
    assert home.who(P, 1) == [{"a": DRAM}]


def test_who_is_left_alone_with_a_block_is_told(home):
    home.tell(batch("a", 1, [(P, 1, DRAM), (P, 2, DRAM), (P, 3, DRAM)]))
    assert names(home.tell(batch("b", 1, [(P, 1, DRAM), (P, 2, DRAM), (P, 3, DRAM)])).sole) == []
    home.tell(batch("a", 2, [(P, 1, 0), (P, 2, 0), (P, 3, NVME)]))
    home.tell(batch("a", 3, [(P, 2, DRAM)]))
    assert names(home.tell(batch("b", 2)).sole) == [1]
    assert names(home.tell(batch("b", 2)).sole) == [1]
    assert names(home.tell(batch("b", 3)).sole) == []


def test_who_is_left_by_a_node_that_is_gone_is_told(home):
    home.tell(batch("a", 1, [(P, 1, DRAM), (P, 2, DRAM)]))
    home.tell(batch("b", 1, [(P, 1, DRAM), (P, 2, DRAM)]))
    home.forget("a", 1)
    assert names(home.tell(batch("b", 2, [(P, 2, NVME)])).sole) == [2]
    home.sweep(100)
    assert names(home.tell(batch("b", 3)).sole) == [1]


def test_what_a_node_is_to_be_told_survives_a_new_stream_of_it(home):
    home.tell(batch("a", 1, [(P, 1, DRAM)]))
    home.tell(batch("b", 1, [(P, 1, DRAM)]))
    home.tell(batch("a", 2, [(P, 1, 0)]))
    assert names(home.tell(batch("b", 2, [(P, 1, DRAM)], is_first=True)).sole) == [1]


def test_of_much_that_is_left_a_node_is_told_in_parts_and_not_of_all(home, monkeypatch):
    monkeypatch.setattr(directories, "SOLE_MOST", 4)
    monkeypatch.setattr(directories, "SOLE_KEPT_MOST", 6)
    home.tell(batch("a", 1, [(P, name, DRAM) for name in range(9)]))
    home.tell(batch("b", 1, [(P, name, DRAM) for name in range(9)]))
    home.tell(batch("b", 2, [(P, name, 0) for name in range(9)]))
    told = [names(home.tell(batch("a", sequence)).sole) for sequence in (2, 3, 4)]
    assert told == [[0, 1, 2, 3], [4, 5], []]


def test_a_batch_is_answered_with_those_of_its_names_that_others_have(home):
    home.tell(batch("a", 1, [(P, 1, DRAM), (P, 2, DRAM), (P, 3, DRAM)]))
    reply = home.tell(batch("b", 1, [(P, 1, DRAM), (P, 4, DRAM), (P, 2, NVME), (P, 3, 0)]))
    assert names(reply.shared) == [1, 2]
    home.forget("a", 1)
    assert names(home.tell(batch("b", 2, [(P, 1, DRAM)])).shared) == []


def test_digests_find_what_differs(home):
    home.tell(batch("a", 1, [(P, 1, DRAM | NVME), (P, 2, DRAM), (Q, 3, HBM)]))
    home.tell(batch("a", 2, [(P, 2, 0)]))
    right = element(1, 1) ^ element(1, 2)
    digests = [(P, 2, right), (Q, 1, element(3, 0)), (8, 0, 0)]
    assert home.tell(batch("a", 3, digests=digests)).differing == b""
    digests = [(P, 1, right), (Q, 1, element(3, 1)), (8, 1, 0), (9, 0, 0)]
    assert struct.unpack("<3H", home.tell(batch("a", 4, digests=digests)).differing) == (P, Q, 8)


def test_of_a_block_that_everybody_has_some_holders_are_named(home, monkeypatch):
    monkeypatch.setattr(directories, "HOLDERS_MOST", 3)
    for number in range(5):
        home.tell(batch(f"n{number}", 1, [(P, 1, DRAM)]))
    home.forget("n1", 1)
    assert home.who(P, 1) == [{"n0": DRAM, "n2": DRAM, "n3": DRAM}]


def malformed() -> dict[str, Announce]:
    right = {"node": "a", "epoch": 1, "sequence": 2, "is_first": False, "resets": b"", "digests": b""}
    records = {"partitions": pack("H", [P]), "names": pack("Q", [1]), "tiers": b"\x00"}
    wrong: dict[str, dict[str, object]] = {
        "half a reset": {"resets": b"\x01"},
        "a reset of what there is not": {"resets": pack("H", [PARTITIONS])},
        "half a partition": {"partitions": b"\x01"},
        "a partition that there is not": {"partitions": pack("H", [PARTITIONS])},
        "half a name": {"names": b"1234"},
        "a name that is too long": {"names": pack("Q", [1 << 60])},
        "a name too many": {"names": pack("Q", [1, 2])},
        "a tier too few": {"tiers": b""},
        "a tier that there is not": {"tiers": b"\x08"},
        "half a digest": {"digests": DIGEST.pack(P, 0, 0)[1:]},
        "a digest of what there is not": {"digests": DIGEST.pack(PARTITIONS, 0, 0)},
        "no number": {"sequence": 0, "is_first": True},
        "too many": {
            "partitions": bytes(2 * (NAMES_MOST + 1)),
            "names": bytes(8 * (NAMES_MOST + 1)),
            "tiers": bytes(NAMES_MOST + 1),
        },
    }
    return {situation: Announce(id=1, **(right | records | fields)) for situation, fields in wrong.items()}


@pytest.mark.parametrize("told", malformed().values(), ids=malformed())
def test_a_batch_that_makes_no_sense_is_refused_whole(home, told):
    home.tell(batch("a", 1, [(P, 1, DRAM)]))
    with pytest.raises(InvalidRequest):
        home.tell(told)
    assert home.who(P, 1) == [{"a": DRAM}]
    assert not home.tell(batch("a", 2, [(P, 1, NVME)])).is_gap


@pytest.mark.parametrize(
    ("stripes", "wanted"),
    [
        (STRIPE.pack(P, 2), pack("Q", [1])),
        (STRIPE.pack(P, 1), pack("Q", [1, 2])),
        (b"", pack("Q", [1])),
        (STRIPE.pack(P, 1)[1:], pack("Q", [1])),
        (STRIPE.pack(P, 1), b"1234"),
        (STRIPE.pack(PARTITIONS, 1), pack("Q", [1])),
        (STRIPE.pack(P, NAMES_MOST) + STRIPE.pack(P, 1), bytes(8 * (NAMES_MOST + 1))),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(home, stripes, wanted):
    with pytest.raises(InvalidRequest):
        home.locate(Locate(1, stripes, wanted))


def test_what_does_not_agree_is_said(home):
    home.tell(batch("a", 1, [(P, 1, DRAM)]))
    home._partitions[P][1].blocks = 2
    home._nodes["a"].tallies[P].xor = 0
    home._nodes["a"].tallies[Q] = directories.Tally(blocks=1)
    home._partitions[P][2] = directories.Holding(((5, DRAM), (3, DRAM)))
    home._nodes["b"] = home._nodes.pop("a")
    problems = "\n".join(home.problems())
    for part in (
        "counts 2 blocks, of 1",
        "partition 7: counts",
        "partition 4095",
        "not in order",
        "gone",
        "not that of",
    ):
        assert part in problems
