"""Figures of a node with an NVMe tier: what the tier costs those who do not need it, and what it gives those who do."""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from pathlib import Path
from threading import Event, Thread

import numpy as np

from bench import disk
from bench.measure import Figure, against_floor, spans_us
from bench.node import RunningNode, running_node
from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace
from kvstore.prefix import Namespace

NAMESPACE = Namespace(model="bench", dtype="u8", layout="bytes", block_tokens=16, layers=1)
MIB = 1 << 20
NAMES = ("tiered_get_64k", "put_when_full", "nvme_get_p99_reclaim")
COLD_BLOCKS = 256  # of 1 MiB, several times what DRAM holds
GETS = 400
PUTS = 60
PACE_S = 0.02


def run(names: set[str]) -> Iterator[Figure]:
    """Only those named, or all."""
    yield from disk.run(names)
    wanted = set(NAMES) & names if names else set(NAMES)
    if not wanted:
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cairn-bench-", dir="."))).absolute()
        tiered = stack.enter_context(_tiered(folder / "a", "256MiB"))
        plain = stack.enter_context(running_node(folder / "b", "1GiB"))
        if "tiered_get_64k" in wanted:
            yield _tiered_get(tiered, plain)
        if "put_when_full" in wanted:
            yield _put_when_full(tiered, plain)
        if "nvme_get_p99_reclaim" in wanted:
            small = stack.enter_context(_tiered(folder / "c", "64MiB", "512MiB"))
            yield _get_during_reclaim(small)


def _tiered(folder: Path, dram: str, nvme: str = "4GiB") -> AbstractContextManager[RunningNode]:
    return running_node(
        folder,
        dram,
        f"--tiers.nvme.path={folder / 'nvme'}",
        f"--tiers.nvme.capacity={nvme}",
        "--tiers.nvme.slab=16MiB",
        "--tiers.dram.slab=4MiB",
        "--tiers.nvme.admission=all",
    )


class _Writer:
    """Puts fresh chains of one node, each of some blocks of 1 MiB."""

    def __init__(self, node: RunningNode) -> None:
        self.client = BlockingClient(node.address, timeout_s=20)
        self.space: OpenSpace = self.client.open("bench", NAMESPACE)
        self._numbers = count(random.getrandbits(20))
        self._block = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)

    def fresh(self, blocks: int) -> list[bytes]:
        first = next(self._numbers) * 1000
        return list(self.space.keys(np.arange(first, first + 16 * blocks, dtype=np.uint32)))

    def put(self, blocks: int) -> list[bytes]:
        keys = self.fresh(blocks)
        self.client.put(self.space, keys, [self._block] * blocks)
        return keys


def _tiered_get(tiered: RunningNode, plain: RunningNode) -> Figure:
    calls = []
    for node in (tiered, plain):
        writer = _Writer(node)
        keys = writer.fresh(1)
        writer.client.put(writer.space, keys, [bytes(64 << 10)])
        target = [bytearray(64 << 10)]
        calls.append(lambda writer=writer, keys=keys, target=target: writer.client.get(writer.space, keys, target))
    note = "a DRAM hit of 64 KiB on a node with an NVMe tier, beside one without"
    return against_floor("tiered_get_64k", *calls, target=0.95, note=note, rounds=3000)


def _put_when_full(tiered: RunningNode, plain: RunningNode) -> Figure:
    full, empty = _Writer(tiered), _Writer(plain)
    for _ in range(32):
        full.put(16)
        pause(PACE_S)

    def paced(writer: _Writer) -> float:
        pause(PACE_S)  # as an engine puts: 0.8 GB/s
        began = time.perf_counter()
        writer.put(16)
        return (time.perf_counter() - began) * 1e6

    spans, floors = [], []
    for _ in range(PUTS):
        spans.append(paced(full))
        floors.append(paced(empty))
        empty.client.evict(empty.space)
    span, floor = statistics.median(spans), statistics.median(floors)
    note = "16 blocks of 1 MiB into a DRAM tier at its watermark, beside one with room"
    p99 = sorted(spans)[-1]
    return Figure("put_when_full", span, "us", floor, floor / span, p99, 1 / 3, is_ratio=True, note=note)


def _get_during_reclaim(node: RunningNode) -> Figure:
    writer = _Writer(node)
    cold = [writer.put(1) for _ in range(COLD_BLOCKS) if pause(PACE_S / 4)]
    target = [bytearray(MIB)]
    choose = random.Random(1)

    def get() -> None:
        writer.client.get(writer.space, choose.choice(cold), target)

    quiet = _p99(get)
    stop = Event()
    background = _Writer(node)

    def write() -> None:
        while not stop.wait(PACE_S):
            background.put(4)

    thread = Thread(target=write)
    thread.start()
    try:
        pause(2.0)
        busy = _p99(get)
    finally:
        stop.set()
        thread.join()
    note = "p99 of a 1 MiB get from NVMe while slabs are given back (200 MB/s of puts), beside none"
    return Figure("nvme_get_p99_reclaim", busy, "us", quiet, quiet / busy, None, 0.5, is_ratio=True, note=note)


def pause(seconds: float) -> bool:
    """As long as an engine takes between two puts."""
    return not Event().wait(seconds)


def _p99(work: Callable[[], None]) -> float:
    return sorted(spans_us(work, GETS))[GETS * 99 // 100]
