"""Figures of the NVMe tier's files: what blocks with headers and checksums cost beside plain reads and writes."""

import asyncio
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.measure import Figure
from kvstore.clock import MonotonicClock
from kvstore.copier import checksum
from kvstore.disk import Disk, disk_stride
from kvstore.disk_queue import RESERVED, DiskQueue
from kvstore.prefix import chain
from kvstore.table import BlockTable, Replica, TierShape
from kvstore.tiers import TierSpec
from kvstore.tiers.nvme import NvmeTier
from kvstore.types import NVME, BlockKey

BLOCK_BYTES = 1 << 20
SLAB_BYTES = 256 << 20
BLOCKS = 64
JOB_BLOCKS = 4
THREADS = 8
ROUNDS = 15


def run(names: set[str]) -> Iterator[Figure]:
    """Only those named, or all."""
    wanted = {"nvme_read_1m", "nvme_write_1m"} & (names or {"nvme_read_1m", "nvme_write_1m"})
    if wanted:
        with tempfile.TemporaryDirectory(prefix="cairn-bench-", dir=".") as folder:
            yield from asyncio.run(_figures(Path(folder), wanted))


async def _figures(folder: Path, wanted: set[str]) -> list[Figure]:
    bench = await _Bench.make(folder)
    try:
        figures = []
        if "nvme_write_1m" in wanted:
            note = "64 blocks of 1 MiB with headers, beside pwritev by as many threads as store (6)"
            figures.append(await bench.compare("nvme_write_1m", bench.store, bench.plain_write, 0.85, note))
        if "nvme_read_1m" in wanted:
            await bench.store()
            await bench.plain_write()  # reading what was never written costs nothing
            note = "64 blocks of 1 MiB, headers and checksums verified, beside preadv by 8 threads"
            figures.append(await bench.compare("nvme_read_1m", bench.load, bench.plain_read, 0.9, note))
        return figures
    finally:
        await bench.close()


class _Bench:
    def __init__(self, folder: Path, disk: Disk, replicas: list[Replica]) -> None:
        self._disk = disk
        self._replicas = replicas
        self._readers = ThreadPoolExecutor(THREADS)
        self._writers = ThreadPoolExecutor(THREADS - RESERVED)
        self._memory = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(BLOCKS)]
        source = os.urandom(BLOCK_BYTES)
        for view in self._memory:
            view[:] = source
        for replica in replicas:
            replica.checksum = checksum(source)
        path = folder / "plain"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, SLAB_BYTES)

    @classmethod
    async def make(cls, folder: Path) -> "_Bench":
        queue = DiskQueue(THREADS)
        medium = NvmeTier(TierSpec(NVME, SLAB_BYTES), folder / "slabs", queue, io="posix")
        table = BlockTable({NVME: TierShape(SLAB_BYTES, "", disk_stride)})
        await medium.prepare()
        medium.adopt(table.tiers[NVME].pool.grow().slab_id)
        space = table.space("bench", 1, NVME)
        keys = chain(range(BLOCKS), 1, BlockKey(bytes(16)))
        made = [table.allocate(space, key, None, BLOCK_BYTES) for key in keys]
        replicas = [replica for replica in made if replica is not None]
        assert len(replicas) == BLOCKS
        disk = Disk(medium, queue, MonotonicClock(), wall_ms=lambda: 0, root_of=lambda space: bytes(16))
        return cls(folder, disk, replicas)

    async def store(self) -> None:
        jobs = self._jobs()
        stored = await asyncio.gather(*(self._disk.store(job) for job in jobs))
        assert all(stored)

    async def load(self) -> None:
        found = await asyncio.gather(*(self._disk.load(job) for job in self._jobs()))
        assert all(loaded == "good" for job in found for loaded in job)

    def _jobs(self) -> list[list[tuple[Replica, memoryview]]]:
        pairs = list(zip(self._replicas, self._memory, strict=True))
        return [pairs[start : start + JOB_BLOCKS] for start in range(0, BLOCKS, JOB_BLOCKS)]

    async def plain_read(self) -> None:
        await self._plain(self._readers, lambda at: os.preadv(self._fd, [self._memory[at]], at * BLOCK_BYTES))

    async def plain_write(self) -> None:
        await self._plain(self._writers, lambda at: os.pwritev(self._fd, [self._memory[at]], at * BLOCK_BYTES))

    async def _plain(self, pool: ThreadPoolExecutor, work: Callable[[int], int]) -> None:
        def job(start: int) -> int:
            return sum(work(at) for at in range(start, start + JOB_BLOCKS))

        loop = asyncio.get_running_loop()
        done = await asyncio.gather(*(loop.run_in_executor(pool, job, start) for start in range(0, BLOCKS, JOB_BLOCKS)))
        assert sum(done) == BLOCKS * BLOCK_BYTES

    async def compare(
        self, name: str, product: Callable[[], object], floor: Callable[[], object], target: float, note: str
    ) -> Figure:
        """Pair by pair, which goes first changing; both have run once before."""
        pairs = []
        for number in range(ROUNDS + 1):
            spans = {}
            for work in (product, floor) if number % 2 else (floor, product):
                began = time.perf_counter()
                await work()  # type: ignore[misc]
                spans[work] = time.perf_counter() - began
            pairs.append((spans[product], spans[floor]))
        pairs = pairs[1:]
        ratio = statistics.median(floor_s / span for span, floor_s in pairs)
        rate = BLOCKS * BLOCK_BYTES / statistics.median(span for span, _ in pairs) / 1e9
        floor_rate = BLOCKS * BLOCK_BYTES / statistics.median(floor_s for _, floor_s in pairs) / 1e9
        return Figure(name, rate, "GB/s", floor_rate, ratio, None, target, is_ratio=True, note=note)

    async def close(self) -> None:
        os.close(self._fd)
        self._readers.shutdown()
        self._writers.shutdown()
        await self._disk.aclose()
