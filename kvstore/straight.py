"""Blocks read straight from the disk into slots of HBM, past DRAM: by GPUDirect Storage on a GPU.

As in `Promotion`, a load is a replica that the node writes, one for each block however many want it, and nobody who
waits owns it: who goes leaves it running. The bytes are compared with the checksum as they lie in HBM.
"""

import asyncio
import logging
import mmap
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from kvstore.catalogue import OpenNamespace
from kvstore.clock import Clock
from kvstore.copier import Copier
from kvstore.disk import Disk, Loaded
from kvstore.diskblock import ALIGN, padded
from kvstore.errors import TierFull
from kvstore.health import Health
from kvstore.loads import JOB_BLOCKS, JOB_BYTES, Source, worthwhile
from kvstore.metrics import Counters
from kvstore.node_holds import NodeHolds
from kvstore.table import Replica
from kvstore.types import HBM, NVME, BlockKey, Cause, State

if TYPE_CHECKING:  # it needs torch, which few nodes have
    from kvstore.tiers.hbm import HbmTier

log = logging.getLogger("cairn.straight")


class Straight:
    """`failed` hears of an error of the device; `settle` makes known what the table changed."""

    def __init__(self, own: NodeHolds, hbm: "HbmTier", copier: Copier, disk: Disk | None, *,
                 clock: Clock, most_bytes: int, counters: Counters,
                 failed: Callable[[OSError], None], settle: Callable[[], None]) -> None:  # fmt: skip
        self._own = own
        self._table = own.table
        self._hbm = hbm
        self._copier = copier
        self._disk = disk
        self._clock = clock
        self._most_bytes = most_bytes
        self._counters = counters
        self._failed = failed
        self._settle = settle
        self._loads: dict[Replica, asyncio.Task[None]] = {}  # by what they fill
        self.health = Health()  # of this way; the disk and the device have their own
        self.loaded_blocks = 0

    def target(self, space: OpenNamespace, key: BlockKey) -> Replica | None:
        """What a block is being read into."""
        found = space.hbm.replicas.get(key) if space.hbm is not None else None
        return found if found in self._loads else None

    def first(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> int:
        """How many of `keys`, of which the first was not begun, are before the next that comes straight."""
        if self._source(space, keys[0]) is not None:
            return len(keys)  # it could come, and is not worth it or finds no room: nor are those after it, or do they
        found = (self.target(space, key) or self._source(space, key) for key in keys)
        return sum(1 for _ in takewhile(lambda replica: replica is None, found))

    def begin(self, space: OpenNamespace, keys: Sequence[BlockKey], load_until: float,
              tokens_per_s: float) -> list[Replica]:  # fmt: skip
        """Begin to read what can come straight, of a run from the first of `keys`; what of it is on its way then.

        Cut off is what would not be here by `load_until` (node's seconds), what can be computed sooner at
        `tokens_per_s` (0: unknown), and what finds no room.
        """
        targets = _until_none(self.target(space, key) for key in keys)
        sources = _until_none(self._source(space, key) for key in keys[len(targets) :])
        now = self._clock.now()
        if self._disk is None or not sources or now >= load_until:
            return targets
        count = worthwhile(
            [(position, Source(NVME, s.key, s.parent, s.size, s)) for position, s in enumerate(sources)],
            *(0, {NVME: self._disk.reading}, now),
            load_s=load_until - now,
            block_s=space.namespace.block_tokens / tokens_per_s if tokens_per_s else 0.0,
        )
        begun = 0
        while begun < count and sum(target.size for target in self._loads) < self._most_bytes:
            job = allocate(self._own, space, sources[begun:count], JOB_BLOCKS, JOB_BYTES)
            if not job:
                break
            for source, _ in job:
                self._own.hold(source)
                self._disk.reading.queued_bytes += source.size
            load = asyncio.get_running_loop().create_task(self._load(space, job))
            self._loads |= {target: load for _, target in job}
            targets += [target for _, target in job]
            begun += len(job)
        self._settle()
        return targets

    async def wait(self, targets: Sequence[Replica], until: float) -> None:
        """For what is on its way, `until` then at most. Raises what a load raised that is a bug."""
        loads = {self._loads[target] for target in targets}
        left_s = until - self._clock.now()
        if left_s > 0:
            ended, _ = await asyncio.wait(loads, timeout=left_s)
            for load in ended:
                load.result()

    async def aclose(self) -> None:
        """What is under way ends, and comes to nothing."""
        loads = set(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    # Inside.

    def _source(self, space: OpenNamespace, key: BlockKey) -> Replica | None:
        """What the disk has, and neither HBM nor DRAM, if it can be read into a slot of HBM with its padding.

        A block of several parts comes by way of DRAM, where the others are looked for as well.
        """
        if self._disk is None or space.nvme is None or space.hbm is None or space.namespace.parts > 1:
            return None
        source = self._table.readable(space.nvme, key)
        if source is None or key in space.hbm.replicas or key in space.dram.replicas:
            return None
        can_read = self._hbm.device.type == "cpu" or self._disk.medium.reaches_gpus(source.slab.slab_id)
        has_padding = self._table.tiers[HBM].group(space.tenant.name, source.size).slot_bytes % ALIGN == 0
        is_well = self._disk.may_load() and self.health.may_try(self._clock.now())
        return source if can_read and has_padding and is_well else None

    async def _load(self, space: OpenNamespace, job: Sequence[tuple[Replica, Replica]]) -> None:
        """Read a job's blocks. However it ends, its sources are let go and its targets committed or given up."""
        found: Sequence[Loaded] = ["failed"] * len(job)
        try:
            found = await self._read(job)
        except OSError as error:
            self._failed(error)
        finally:
            for (source, target), loaded in zip(job, found, strict=True):
                self._finish(space, source, target, loaded)
            self._settle()

    async def _read(self, job: Sequence[tuple[Replica, Replica]]) -> list[Loaded]:
        """Read into the slots, and compare what lies there then with the checksums. OSError when the device fails."""
        assert self._disk is not None
        try:
            buffers = await self._hbm.buffers([(target.slot, padded(target.size)) for _, target in job])
        finally:
            self._disk.reading.queued_bytes -= sum(source.size for source, _ in job)  # the disk counts it from here on
        found = await self._disk.fetch([(source, buffer) for (source, _), buffer in zip(job, buffers, strict=True)])
        if "failed" not in found:
            self.health.succeeded()
        elif self.health.failed("a read from the disk into HBM failed", self._clock.now()):
            log.error("nothing is read straight from the disk into hbm for now")
        views = [
            buffer[: target.size] if isinstance(buffer, memoryview) else memoryview(mmap.mmap(-1, target.size))
            for (_, target), buffer in zip(job, buffers, strict=True)
        ]
        if self._hbm.device.type != "cpu":
            await self._hbm.read([(target.slot, view) for (_, target), view in zip(job, views, strict=True)])
        sums = await self._copier.checksums(views)
        return [
            "corrupt" if loaded == "good" and actual != source.checksum else loaded
            for loaded, actual, (source, _) in zip(found, sums, job, strict=True)
        ]

    def _finish(self, space: OpenNamespace, source: Replica, target: Replica, loaded: Loaded) -> None:
        """What failed stays on the disk: it is read once more by way of DRAM, and that says what is to blame."""
        del self._loads[target]
        self._own.let_go(source)
        is_there = source.state is State.WRITTEN  # else somebody deleted it
        if loaded == "good" and is_there:
            target.layers, target.hits = space.namespace.layers, source.hits
            target.depth = max(target.depth, source.depth)
            self._table.use(source)
            self._own.commit(target, source.checksum)
            self._counters.promoted_blocks[NVME] += 1
            self.loaded_blocks += 1
            return
        cause = Cause.CORRUPT if loaded == "corrupt" else Cause.LOAD_FAILED
        self._table.abort(target, cause)
        self._own.let_go(target)
        if loaded == "corrupt" and is_there:
            self._counters.corrupt_blocks += 1
            self._table.discard(source, cause)


def _until_none(found: Iterable[Replica | None]) -> list[Replica]:
    return [replica for replica in takewhile(lambda replica: replica is not None, found) if replica is not None]


def allocate(own: NodeHolds, space: OpenNamespace, sources: Sequence[Replica], most: int,
             most_bytes: int) -> list[tuple[Replica, Replica]]:  # fmt: skip
    """(Source, target in HBM) of the next of them, as many as there is room for, of those for one job."""
    assert space.hbm is not None
    job: list[tuple[Replica, Replica]] = []
    size = 0
    for source in sources[:most]:
        size += source.size
        is_wanted = source.state is State.WRITTEN and source.key not in space.hbm.replicas
        if not is_wanted or (job and size > most_bytes):
            break
        try:
            own.table.make_room(space.hbm, source.size)
        except TierFull:
            break
        target = own.allocate(space.hbm, source.key, source.parent, source.size)
        if target is None:
            break  # there is memory, but another tenant's: it must be replaced first
        job.append((source, target))
    return job
