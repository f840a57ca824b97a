"""The index of prefixes: who has how much of a chain, at any size and number of holders."""

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from scheduler import holder_sets, name_table
from scheduler.index import HOLDERS_MOST, PrefixIndex
from scheduler.name_table import TAKEN_OUT, Generation, hashes_of
from scheduler.requests import Names

HBM, DRAM, NVME = range(3)
BYTES_MOST = 45.0  # of a block, at any moment, however many holders it has


def chain(blocks: int, seed: int = 1) -> Names:
    return np.random.default_rng(seed).integers(0, 2**64, blocks, dtype=np.uint64)


def index_of(*holders: str) -> PrefixIndex:
    index = PrefixIndex()
    for name in holders:
        index.holder(name)
    return index


@pytest.fixture
def confused() -> Iterator[None]:
    """Sets are easily mistaken for each other."""
    with mock.patch.object(holder_sets, "_hash_of", lambda holder, tier: np.uint64(holder % 2 + 4)):
        yield


def test_tiers_are_counted_with_those_above() -> None:
    index = index_of("a", "b")
    names = chain(10)
    index.stored(0, HBM, names[:2])
    index.stored(0, DRAM, names[2:5])
    index.stored(0, NVME, names[1:9])
    assert index.prefixes(names).tolist() == [[2, 5, 9], [0, 0, 0]]
    assert index.prefixes(names).dtype == np.int32


def test_a_block_that_is_missing_ends_a_prefix() -> None:
    index = index_of("a", "b")
    names = chain(3000)
    index.stored(0, DRAM, names)
    index.stored(1, DRAM, names[:2000])
    index.removed(0, DRAM, names[1500:1501])
    assert index.prefixes(names)[:, NVME].tolist() == [1500, 2000]


def test_a_chain_that_nobody_has() -> None:
    index = index_of("a")
    assert index.prefixes(chain(5)).tolist() == [[0, 0, 0]]
    assert index.prefixes(chain(0)).tolist() == [[0, 0, 0]]
    assert PrefixIndex().prefixes(chain(5)).shape == (0, 3)


def test_what_is_not_there_is_removed_without_harm() -> None:
    index = index_of("a", "b")
    names = chain(10)
    index.removed(0, DRAM, names)
    index.stored(0, DRAM, names)
    index.removed(1, DRAM, names)
    index.removed(0, HBM, names)
    index.removed(0, DRAM, names[:0])
    index.stored(0, DRAM, names[:0])
    assert (index.blocks, index.holdings) == (10, 10)
    assert index.check() == []


def test_names_that_no_table_takes_are_blocks_too() -> None:
    index = index_of("a")
    folded = [pow(0xD6E8FEB86659FD93, -1, 2**64) * hash_ % 2**64 for hash_ in (0, 1)]
    unfolded = [pow(0x9E3779B97F4A7C15, -1, 2**64) * (hash_ ^ hash_ >> 32) % 2**64 for hash_ in folded]
    names = np.array([hash_ ^ hash_ >> 32 for hash_ in unfolded], np.uint64)
    assert (hashes_of(names) > TAKEN_OUT).all()
    index.stored(0, DRAM, names)
    assert index.blocks == 2
    assert index.prefixes(names).tolist() == [[0, 2, 2]]
    index.removed(0, DRAM, names)
    assert index.blocks == 0


def test_names_that_are_numbers_in_a_row() -> None:
    index = index_of("a")
    names = np.arange(50_000, dtype=np.uint64)
    index.stored(0, DRAM, names)
    assert index.prefixes(names).tolist() == [[0, 50_000, 50_000]]
    assert index.check() == []


def test_a_holder_keeps_its_number_until_it_is_released() -> None:
    index = index_of("a", "b", "c")
    index.stored(1, DRAM, chain(5))
    index.forget(1)
    assert (index.holder("b"), index.blocks, index.holders) == (1, 0, ["a", "b", "c"])
    index.stored(1, DRAM, chain(5))
    index.release("b")
    index.release("b")
    assert (index.blocks, index.holders) == (0, ["a", None, "c"])
    assert (index.holder("d"), index.holder("e"), index.holder("a")) == (1, 3, 0)
    assert index.check() == []


def test_blocks_of_nobody_are_an_error() -> None:
    index = index_of("a")
    index.release("a")
    with pytest.raises(AssertionError):
        index.stored(0, DRAM, chain(1))
    with pytest.raises(AssertionError):
        index_of("a").stored(0, 3, chain(1))


def test_as_many_holders_as_there_may_be() -> None:
    index = index_of(*map(str, range(HOLDERS_MOST)))
    names = chain(64)
    for number in range(0, HOLDERS_MOST, 97):
        index.stored(number, DRAM, names[: 1 + number % 64])
    found = index.prefixes(names)[:, DRAM]
    assert [found[number] for number in range(0, HOLDERS_MOST, 97)] == [
        1 + number % 64 for number in range(0, HOLDERS_MOST, 97)
    ]
    assert np.count_nonzero(found) == len(range(0, HOLDERS_MOST, 97))
    with pytest.raises(ValueError, match="none is left"):
        index.holder("one more")
    index.release("7")
    assert index.holder("one more") == 7
    assert index.check() == []


def test_what_is_kept_when_there_are_too_many_sets() -> None:
    index = index_of(*map(str, range(8)))
    names = chain(8)
    with mock.patch.object(holder_sets, "SETS_MOST", 4):
        for number in range(8):
            index.stored(number, DRAM, names[number:])
        assert index.dropped == sum(8 - number for number in range(8)) - index.holdings > 0
        found = index.prefixes(names[:1])[:, DRAM]
        assert found[0] == 1
        assert not found[1:].any()
        for number in range(8):
            index.removed(number, DRAM, names)
    assert (index.blocks, index.holdings) == (0, 0)
    assert index.check() == []


def test_a_block_goes_when_there_is_no_room_for_what_is_left_of_its_set() -> None:
    index = index_of("a", "b", "c", "d")
    names = chain(4)
    with mock.patch.object(holder_sets, "SETS_MOST", 3):
        index.stored(0, DRAM, names[:2])
        index.stored(1, DRAM, names[:2])
        index.stored(2, DRAM, names[2:3])
        index.stored(3, DRAM, names[3:])
        assert index.dropped == 0
        index.removed(0, DRAM, names[:1])
    assert index.dropped >= 1
    assert (index.blocks, index.holdings) == (3, 4)
    assert not index.prefixes(names[:1]).any()
    assert index.prefixes(names[1:])[:, DRAM].tolist() == [1, 1, 0, 0]
    assert index.check() == []


def test_sets_that_a_hash_confuses_are_never_taken_for_each_other(confused: None) -> None:
    index = index_of(*map(str, range(8)))
    names = chain(8)
    told: set[tuple[int, int]] = set()
    for number in (0, 2, 1, 3, 4, 5):
        index.stored(number, DRAM, names[number:])
        told |= {(number, place) for place in range(number, 8)}
    assert index.dropped > 0
    for number in (4, 0, 1):
        index.forget(number)
        told -= {(number, place) for place in range(8)}
        for place in range(8):
            said = np.flatnonzero(index.prefixes(names[place : place + 1])[:, DRAM]).tolist()
            assert {(holder, place) for holder in said} <= told
        assert index.check() == []


def test_sets_that_a_hash_confuses_once_a_holder_is_gone() -> None:
    hashes = [16, 33, 70, 70]
    index = index_of("a", "b", "c", "d")
    names = chain(2)
    with mock.patch.object(holder_sets, "_hash_of", lambda holder, tier: np.uint64(hashes[holder])):
        for holder, stored in ((0, names), (2, names[:1]), (1, names[1:]), (3, names[1:])):
            index.stored(holder, DRAM, stored)
        assert index.dropped == 0
        index.forget(1)
        assert (index.dropped, index.blocks, index.holdings) == (2, 1, 2)
        assert index.prefixes(names[:1])[:, DRAM].tolist() == [1, 0, 1, 0]
        assert index.check() == []


def test_memory_of_a_block_at_any_moment_of_growing() -> None:
    index = index_of(*map(str, range(64)))
    names = chain(300_000)
    for first in range(0, len(names), 4096):
        index.stored(first // 4096 % 64, DRAM, names[first : first + 4096])
        if index.blocks > 50_000:
            assert index.nbytes / index.blocks < BYTES_MOST
    for copy in range(1, 4):
        for first in range(0, len(names), 4096):
            index.stored((first // 4096 + copy) % 64, DRAM, names[first : first + 4096])
    assert index.holdings == 4 * len(names)
    assert index.nbytes / index.blocks < BYTES_MOST
    assert index.check() == []


def test_memory_comes_back_when_blocks_go() -> None:
    index = index_of("a", "b")
    names = chain(100_000)
    index.stored(0, DRAM, names)
    index.stored(1, DRAM, names[:5000])
    most = index.nbytes
    index.forget(0)
    for _ in range(40):
        index.removed(1, DRAM, names[-1000:])
    assert index.nbytes < most / 4
    assert index.prefixes(names)[1, DRAM] == 5000
    assert index.check() == []


def test_a_generation_is_moved_a_little_at_a_time() -> None:
    index = index_of("a")
    moved: list[int] = []
    take = Generation.take

    def counted(self: Generation, first: int, stop: int) -> tuple[Names, name_table.Values]:
        taken = take(self, first, stop)
        moved[-1] += len(taken[0])
        return taken

    names = chain(400_000)
    with mock.patch.object(Generation, "take", counted):
        for first in range(0, len(names), 1000):
            moved.append(0)
            index.stored(0, DRAM, names[first : first + 1000])
    late = moved[200:]
    assert max(late) < 20_000
    assert sum(late) > 100_000
