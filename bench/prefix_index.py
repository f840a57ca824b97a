"""The Conductor's index of prefixes, in this process: memory of a block and holder, changes, questions, a lost one."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from bench.measure import Figure, latency, span_us, without_collector
from scheduler.index import PrefixIndex
from scheduler.requests import Names

BLOCKS = 10_000_000
HOLDERS, COPIES = 64, 4
BATCH, SMALL = 1 << 16, 1 << 10  # names: of a snapshot's part, of a message of events
ASKED = {512: 60.0, 2048: 120.0, 8192: 300.0}  # names, and microseconds at most
DRAM = 1
PAGE_BYTES = 4096


def run(wanted: set[str], blocks: int = BLOCKS) -> Iterator[Figure]:
    """All figures, or those wanted; each needs what those before it have filled."""
    for figure in _figures(blocks):
        if not wanted or figure.name in wanted:
            yield figure


def _figures(blocks: int) -> Iterator[Figure]:
    names = np.random.default_rng(1).integers(0, 2**64, blocks, dtype=np.uint64)
    index = PrefixIndex()
    for number in range(HOLDERS):
        index.holder(f"node:{number}")
    before = _resident_bytes()
    note = f"{blocks:,} blocks, each at one of {HOLDERS} holders"
    most = 0.0
    spans = []
    with without_collector():
        for first in range(0, blocks, BATCH):
            spans.append(_fill(index, names[first : first + BATCH], first // BATCH))
            if index.blocks > blocks // 10:
                most = max(most, index.nbytes / index.holdings)
    yield _figure("index_bytes_1", index.nbytes / index.holdings, "bytes/block and holder", 60.0, f"arrays; {note}")
    yield _figure("index_bytes_1_most", most, "bytes/block and holder", 60.0, "arrays, at the worst moment of growing")
    resident = (_resident_bytes() - before) / index.holdings
    yield _figure("index_resident_1", resident, "bytes/block and holder", 60.0, f"what the process grew by; {note}")
    yield _figure("index_insert", sum(spans) / blocks, "us/block", 1.0, f"in batches of {BATCH:,}; {note}")
    yield from _small_changes(index)
    for copy in range(1, COPIES):
        for first in range(0, blocks, BATCH):
            _fill(index, names[first : first + BATCH], first // BATCH + copy)
    note = f"{blocks:,} blocks, each at {COPIES} of {HOLDERS} holders"
    yield _figure("index_bytes_4", index.nbytes / index.holdings, "bytes/block and holder", 60.0, f"arrays; {note}")
    resident = (_resident_bytes() - before) / index.holdings
    yield _figure("index_resident_4", resident, "bytes/block and holder", 60.0, f"what the process grew by; {note}")
    for asked, most_us in ASKED.items():
        yield _question(index, names, asked, most_us)
    spent_ms = span_us(lambda: index.forget(0)) / 1000
    yield _figure("index_forget", spent_ms, "ms", 100.0, f"a holder of {COPIES * blocks // HOLDERS:,} blocks; {note}")


def _fill(index: PrefixIndex, names: Names, holder: int) -> float:
    """Microseconds."""
    return span_us(lambda: index.stored(holder % HOLDERS, DRAM, names))


def _small_changes(index: PrefixIndex) -> Iterator[Figure]:
    """Messages of new blocks while the index grows by a tenth; and the same blocks taken out."""
    chance = np.random.default_rng(2)
    news = [chance.integers(0, 2**64, SMALL, dtype=np.uint64) for _ in range(max(100, index.blocks // 10 // SMALL))]
    for name, change in (("index_stored_1k", index.stored), ("index_removed_1k", index.removed)):
        turns = iter(news)
        note = f"{SMALL:,} names that one holder tells of, {len(news):,} times"
        yield latency(name, lambda: change(1, DRAM, next(turns)), None, most_us=1000.0, note=note, runs=len(news))  # noqa: B023


def _question(index: PrefixIndex, names: Names, asked: int, most_us: float) -> Figure:
    """Chains from all over the table, which are in no cache of the processor."""
    numbers = count()
    places = np.random.default_rng(3).integers(0, len(names), (100, asked))

    def ask() -> None:
        first = next(numbers) * 104_729 % max(1, len(names) - asked)
        index.prefixes(names[first : first + asked])

    def floor() -> None:
        names.take(places[next(numbers) % len(places)])

    note = f"the prefix that each of {HOLDERS} holders has of {asked:,} names; floor: as many numbers from anywhere"
    return latency(f"index_prefixes_{asked}", ask, floor, most_us=most_us, note=note, runs=500)


def _figure(name: str, value: float, unit: str, most: float, note: str) -> Figure:
    return Figure(name, value, unit, None, None, None, most, is_ratio=False, note=note)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
