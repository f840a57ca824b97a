"""Disks of simulated nodes: real files and ledgers, in virtual time and without threads."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kvstore.catalogue import Catalogue, Tenant
from kvstore.clock import Clock
from kvstore.disk import Disk, disk_stride
from kvstore.disk_queue import DiskQueue
from kvstore.records import Records
from kvstore.recover import Recovery
from kvstore.table import BlockTable, TierShape
from kvstore.tiers import TierSpec
from kvstore.tiers.nvme import NvmeTier
from kvstore.types import NVME

Result = TypeVar("Result")

SLAB_BYTES = 256 << 10
DISK_S = 500e-6  # that anything takes
SHAPE = TierShape(SLAB_BYTES, "", disk_stride)


class AtOnce(ThreadPoolExecutor):
    """Does what it is given before it returns."""

    def __init__(self) -> None:
        super().__init__(1)

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        job: Future[Any] = Future()
        try:
            job.set_result(work(*arguments, **named))
        except OSError as error:
            job.set_exception(error)
        return job


class SimulatedQueue(DiskQueue):
    """Does what it is given when its time is over."""

    def __init__(self) -> None:
        super().__init__(1)

    async def load(self, work: Callable[[], Result]) -> Result:
        await asyncio.sleep(DISK_S)
        return work()

    async def store(self, work: Callable[[], Result]) -> Result:
        await asyncio.sleep(DISK_S)
        return work()


class SimulatedDisk:
    """What one start of a node has of its disk, in `folder`; the next start takes up what lies there."""

    def __init__(self, folder: Path, clock: Clock, table: BlockTable, catalogue: Catalogue, *,
                 tenants: Mapping[str, Tenant], epoch: int) -> None:  # fmt: skip
        def root_of(space: Any) -> bytes:
            found = catalogue.of_number(space.number)
            assert found is not None
            return found.root

        def wall_ms() -> int:
            return int(clock.now() * 1000)

        queue = SimulatedQueue()
        self.medium = NvmeTier(TierSpec(NVME, SLAB_BYTES), folder / "slabs", queue, io="posix")
        self.disk = Disk(self.medium, queue, clock, wall_ms=wall_ms, root_of=root_of)
        self.records = Records(folder, wall_ms=wall_ms, failed=self.disk.store_failed)
        self.records._thread = AtOnce()
        self.recovery = Recovery(table, catalogue, self.disk, self.records, tenants=tenants, epoch=epoch, now=clock.now)

    def let_go(self) -> None:
        """The process is gone: what the ledger was not told yet it never will be."""
        if self.records._ledger is not None:
            self.records._ledger.close()
            self.records._ledger = None
        with suppress(StopIteration):
            self.medium.aclose().send(None)
