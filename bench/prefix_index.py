"""The Conductor's index of prefixes, in this process: memory of a block and holder, changes, questions, a lost holder."""

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bench.measure import Figure, latency, without_collector
from scheduler.index import PrefixIndex
from scheduler.requests import Names

BATCH = 1 << 16
HOLDERS = 64
CHAIN = 256  # consecutive blocks that have the same holders
COPIES = 4
ASKED = (512, 2048, 8192)
DRAM, NVME = 1, 2
PAGE = 4096


def run(wanted: set[str], blocks: int = 10_000_000) -> Iterator[Figure]:
    """All figures; `wanted` chooses which are shown, since each needs what those before it have filled."""
    for figure in _figures(blocks):
        if not wanted or figure.name in wanted:
            yield figure


def _figures(blocks: int) -> Iterator[Figure]:
    names = np.random.default_rng(1).integers(0, 2**64, blocks, dtype=np.uint64)
    index = PrefixIndex()
    for number in range(HOLDERS):
        index.holder(f"node:{number}")
    before = _resident_bytes()
    spans: list[float] = []
    most = 0
    with without_collector():
        for first in range(0, blocks, BATCH):
            spans.append(_span_s(lambda at=first: _tell(index, names, at, 0)))  # type: ignore[misc]
            most = max(most, index.nbytes * BATCH // max(BATCH, index.holdings))
    note = f"{blocks:,} blocks, each at one of {HOLDERS} holders, chains of {CHAIN}, in batches of {BATCH:,}"
    yield _bytes("prefix_index_bytes_1", index.nbytes, index.holdings, f"arrays; {note}")
    yield _bytes("prefix_index_resident_1", _resident_bytes() - before, index.holdings, f"resident growth; {note}")
    yield _figure("prefix_index_insert", sum(spans) / blocks * 1e6, "us/block", 1.0, note)
    yield _figure("prefix_index_insert_longest", max(spans) * 1e3, "ms", 50.0, f"the slowest batch; {note}")
    for copy in range(1, COPIES):
        for first in range(0, blocks, BATCH):
            _tell(index, names, first, copy)
    note = f"{blocks:,} blocks, each at {COPIES} of {HOLDERS} holders"
    yield _bytes("prefix_index_bytes_4", index.nbytes, index.holdings, f"arrays; {note}")
    yield _bytes("prefix_index_resident_4", _resident_bytes() - before, index.holdings, f"resident growth; {note}")
