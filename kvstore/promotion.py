"""Loads from other tiers into DRAM: what of a prefix is worth loading, and the loading itself.

A load is a replica in DRAM that this module writes: readers find it ALLOCATED and wait for it as for any other
writer, so two readers never load the same block twice. Nobody who waits owns a load: who goes leaves it running.
"""

import asyncio
import mmap
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from itertools import accumulate
from typing import Any

from kvstore.catalogue import OpenNamespace
from kvstore.clock import Clock
from kvstore.copier import Copier
from kvstore.disk import Disk
from kvstore.intake import Intake, part_of
from kvstore.loads import FAILED, Load, Peers, Read, Source, jobs_of, read_of, worthwhile
from kvstore.metrics import Counters
from kvstore.node_holds import NodeHolds
from kvstore.table import Replica
from kvstore.tiers import TierMedium
from kvstore.tiers.dram import DramTier
from kvstore.tiers.object_store import ObjectTier
from kvstore.types import DRAM, HBM, NVME, OBJECT, PEER, BlockKey, Cause, Placement, State, TierName

BEGUN_BLOCKS = 1024  # at once: about 15 ms of the event loop
HEDGE_LEAST_S = 0.05  # a read may take that long, and HEDGE_TIMES as long as it should, before it is read once more
HEDGE_TIMES = 4.0
HEDGES = 4  # at once
SHARE = 8  # a tenant may have that part of the limit under way, whatever the others have

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Promotion:
    """`settle` makes known what the table changed; `spawn` runs a coroutine until the node stops."""

    def __init__(self, own: NodeHolds, intake: Intake, dram: DramTier, copier: Copier, clock: Clock, *,
                 counters: Counters, disk: Disk | None, bucket: ObjectTier | None, hbm: TierMedium | None,
                 most_bytes: int, settle: Callable[[], None], spawn: Spawn) -> None:  # fmt: skip
        self._own = own
        self._table = own.table
        self._intake = intake
        self._dram = dram
        self._copier = copier
        self._clock = clock
        self._counters = counters
        self._disk = disk
        self._bucket = bucket
        self._hbm = hbm
        self._peers: Peers | None = None
        self._most_bytes = most_bytes
        self._settle = settle
        self._spawn = spawn
        below = {NVME: disk, OBJECT: bucket}
        self._paths = {tier: medium.reading for tier, medium in below.items() if medium is not None}
        self._loading: dict[Replica, Load] = {}
        self._hedges = 0
        self._tenant_bytes: Counter[str] = Counter()
        self.loading_bytes = 0

    def use_peers(self, peers: Peers) -> None:
        """From now on blocks come from other nodes too."""
        self._peers = peers
        self._paths[PEER] = peers.reading

    @property
    def is_idle(self) -> bool:
        return not self._loading

    def may_load(self, tier: TierName) -> bool:
        """Whether blocks of a tier can be had now: its disk is well, or it is time to try it again."""
        return tier != NVME or self._disk is None or self._disk.may_load()

    def is_loading(self, replica: Replica) -> bool:
        return replica in self._loading

    def begin(self, space: OpenNamespace, keys: Sequence[BlockKey], load_s: float, tokens_per_s: float,
              parent: BlockKey | None = None) -> int:  # fmt: skip
        """Begin to load what of a prefix is in other tiers only; how many blocks are on their way then.

        Cut off are those that would not be here within `load_s`, that can be computed sooner at `tokens_per_s`
        (0: unknown), or for which there is no room. `parent` is the key before the first.
        """
        if not self._paths and self._hbm is None:
            return 0
        wanted, first, end = self._wanted(space, keys, parent)
        wanted = wanted[: self._fitting(wanted, space.tenant.name)]
        block_s = space.namespace.block_tokens / tokens_per_s if tokens_per_s else 0.0
        count = worthwhile(wanted, first, self._paths, self._clock.now(), load_s=load_s, block_s=block_s)
        self._counters.loads_too_slow += len(wanted) - count
        if not count:
            return 0
        parts = (part_of(space, key, part) for key in keys[:end] for part in range(space.namespace.parts))
        present = [found for key in parts if (found := self._table.readable(space.dram, key)) is not None]
        for replica in present:
            self._own.hold(replica)  # room for its end is not made at its beginning
        try:
            loads = self._allocate(space, [source for _, source in wanted[:count]])
        finally:
            for replica in reversed(present):
                self._table.touch(replica)  # nor before its end is here
                self._own.let_go(replica)
        self._settle()
        for job in jobs_of(loads):
            self._spawn(self._run(space, job))
        return len(loads)

    def _wanted(
        self, space: OpenNamespace, keys: Sequence[BlockKey], before: BlockKey | None
    ) -> tuple[list[tuple[int, Source]], int, int]:
        """(Position, source) of each part that a lower tier has and DRAM has not, up to the first that nobody has;
        the position of the first block that is not all here, and of the first that cannot be."""
        found: list[tuple[int, Source]] = []
        first = len(keys)
        largest = self._table.tiers[DRAM].pool.slab_bytes
        for position, key in enumerate(keys):
            for part in range(space.namespace.parts):
                wanted = part_of(space, key, part)
                if wanted in space.dram.replicas:
                    continue
                above = keys[position - 1] if position else before
                parent = part_of(space, above, part) if above is not None else None
                source = self._source(space, wanted, parent)
                if source is None or source.size > largest or len(found) == BEGUN_BLOCKS:
                    return found, first, position
                first = min(first, position)
                found.append((position, source))
        return found, first, len(keys)

    def _source(self, space: OpenNamespace, key: BlockKey, parent: BlockKey | None) -> Source | None:
        if self._hbm is not None and space.hbm is not None:
            replica = self._table.readable(space.hbm, key)
            if replica is not None:
                return Source(HBM, key, replica.parent or parent, replica.size, replica)
        if self._disk is not None and space.nvme is not None:
            replica = self._table.readable(space.nvme, key)
            if replica is not None and self._disk.may_load():
                return Source(NVME, key, replica.parent or parent, replica.size, replica)
        offer = self._peers.offer(space, key) if self._peers is not None else None
        if offer is not None:
            return Source(PEER, key, parent, offer.size, None, offer)
        if self._bucket is not None and self._bucket.may_load():
            size = self._bucket.raw_size(space.root, key)
            if size is not None:
                return Source(OBJECT, key, parent, size, None)
        return None

    def _fitting(self, wanted: Sequence[tuple[int, Source]], tenant: str) -> int:
        """How many may be under way beside what is; other tenants' loads leave each its share."""
        share_bytes = self._most_bytes // SHARE - self._tenant_bytes[tenant]
        left_bytes = max(self._most_bytes - self.loading_bytes, share_bytes)
        return sum(1 for total in accumulate(source.size for _, source in wanted) if total <= left_bytes)

    def _allocate(self, space: OpenNamespace, sources: Sequence[Source]) -> list[Load]:
        loads = []
        for source in sources:
            if source.key in space.dram.replicas:
                continue  # asked for twice
            if source.replica is not None:
                if source.replica.state is not State.WRITTEN:
                    break  # making room took it
                self._own.hold(source.replica)
            target = None
            if self._intake.make_room(space, source.size) is Placement.GRANTED:
                target = self._own.allocate(space.dram, source.key, source.parent, source.size)
            if target is None:
                if source.replica is not None:
                    self._own.let_go(source.replica)
                break
            if source.offer is not None:
                source.offer.take()
            load = self._loading[target] = Load(source, target)
            self.loading_bytes += source.size
            self._tenant_bytes[space.tenant.name] += source.size
            loads.append(load)
        return loads

    def give_up(self, target: Replica) -> None:
        """The block of this load was deleted: nobody is to find it, and its slot is free when the read has ended."""
        assert target in self._loading
        self._table.abort(target, Cause.DELETED)

    async def _run(self, space: OpenNamespace, job: Sequence[Load]) -> None:
        """Load a job's blocks. However it ends, its sources are let go and its targets committed or given up."""
        try:
            await self._load(space, job)
        finally:
            for load in job:
                if load.source.replica is not None:
                    self._own.let_go(load.source.replica)
                if load.source.offer is not None:
                    load.source.offer.leave()
            self._settle()

    async def _load(self, space: OpenNamespace, job: Sequence[Load]) -> None:
        """Nobody reads the sources any more when it ends."""
        reading = asyncio.ensure_future(self._read(space, job, [self._view(load.target) for load in job]))
        hedge: asyncio.Future[None] | None = None
        try:
            if await self._is_late(job, reading):
                hedge = asyncio.ensure_future(self._hedge(space, job))
                await asyncio.wait([reading, hedge], return_when=asyncio.FIRST_COMPLETED)
            found = await reading
        except BaseException:
            under_way: list[asyncio.Future[Any]] = [reading] if hedge is None else [reading, hedge]
            for task in under_way:
                task.cancel()
            await asyncio.wait(under_way)
            for load in job:
                self._finish(space, load, None)
            self._settle()
            raise
        for load, read in zip(job, found, strict=True):
            self._finish(space, load, read)
        self._settle()
        if hedge is not None:
            await hedge

    async def _read(self, space: OpenNamespace, job: Sequence[Load], views: Sequence[memoryview]) -> list[Read]:
        """Into `views`."""
        if job[0].source.tier == HBM:
            return await self._read_device(job, views)
        if job[0].source.tier == PEER:
            assert self._peers is not None
            blocks = [
                (load.source.key, load.source.offer, view[: load.source.size])
                for load, view in zip(job, views, strict=True)
            ]
            return [read_of(checksum) for checksum in await self._peers.read(space, blocks)]
        if job[0].source.tier == NVME:
            assert self._disk is not None
            sources = [load.source.replica for load in job if load.source.replica is not None]
            loaded = await self._disk.load(list(zip(sources, views, strict=True)))
            return [Read(found, source.checksum) for found, source in zip(loaded, sources, strict=True)]
        assert self._bucket is not None
        wanted = [(load.source.key, view[: load.source.size]) for load, view in zip(job, views, strict=True)]
        checksums = await self._bucket.read(space.root, wanted)
        return [read_of(checksum) for checksum in checksums]

    async def _read_device(self, job: Sequence[Load], views: Sequence[memoryview]) -> list[Read]:
        assert self._hbm is not None
        sources = [load.source.replica for load in job if load.source.replica is not None]
        copies = [(source.slot, view[: source.size]) for source, view in zip(sources, views, strict=True)]
        try:
            await self._hbm.read(copies)
        except OSError:
            return [FAILED] * len(job)
        found = await self._copier.checksums([view for _, view in copies])
        return [
            Read("good" if checksum == source.checksum else "corrupt", checksum)
            for checksum, source in zip(found, sources, strict=True)
        ]

    def _view(self, target: Replica) -> memoryview:
        """All of the target's slot, so that a page-aligned one can be read into with its padding."""
        slot = target.slot
        return self._dram.view(slot, slot.size)

    def _finish(self, space: OpenNamespace, load: Load, read: Read | None) -> None:
        """None: it was not read to its end, which says nothing of its source."""
        source, target = load.source, load.target
        self._loading.pop(target, None)
        self.loading_bytes -= source.size
        self._tenant_bytes[space.tenant.name] -= source.size
        cause = Cause.CORRUPT if read is not None and read.loaded == "corrupt" else Cause.LOAD_FAILED
        if target.state is not State.ALLOCATED:
            self._own.let_go(target)  # a second read was faster, or it was given up
        elif read is not None and read.loaded == "good":
            self._commit(space, load, target, read.checksum)
        else:
            self._table.abort(target, cause)
            self._own.let_go(target)
        if source.replica is None or source.replica.state is not State.WRITTEN:
            return
        if read is not None and self._is_lost(source, read):
            self._counters.corrupt_blocks += read.loaded == "corrupt"
            self._table.discard(source.replica, cause)

    def _is_lost(self, source: Source, read: Read) -> bool:
        """Whether it is of no use to try again: damaged, or what a disk that is well cannot read."""
        if read.loaded == "failed" and source.tier == NVME and self._disk is not None:
            return self._disk.read_health.is_well
        return read.loaded != "good"

    def _commit(self, space: OpenNamespace, load: Load, target: Replica, checksum: int) -> None:
        source = load.source
        target.layers = space.namespace.layers
        if source.offer is not None and self._peers is not None:
            self._peers.arrived(target, source.offer)
        if source.replica is not None:
            target.hits = source.replica.hits
            target.depth = max(target.depth, source.replica.depth)
            self._table.use(source.replica)
        self._counters.promoted_blocks[source.tier] += 1
        self._own.commit(target, checksum)

    # A read that is late is done once more, into other memory.

    async def _is_late(self, job: Sequence[Load], reading: "asyncio.Future[list[Read]]") -> bool:
        tier = job[0].source.tier
        path = self._paths.get(tier)
        if path is None or (not path.bytes_per_s and tier != PEER):
            return False
        expected_s = max(path.arrival_s(0), path.request_s)
        await asyncio.wait([reading], timeout=max(HEDGE_LEAST_S, HEDGE_TIMES * expected_s))
        return not reading.done() and self._hedges < HEDGES

    async def _hedge(self, space: OpenNamespace, job: Sequence[Load]) -> None:
        """Read the job into memory of its own; if that is there first, it goes into other slots than the first read's,
        which may still write into those."""
        self._hedges += 1
        self._counters.hedged_loads += len(job)
        try:
            copies = [memoryview(mmap.mmap(-1, load.target.group.slot_bytes)) for load in job]
            found = await self._read(space, job, copies)
            for load, copy, read in zip(job, copies, found, strict=True):
                if read.loaded == "good" and load.target.state is State.ALLOCATED and load.target in self._loading:
                    await self._replace(space, load, copy, read.checksum)
        finally:
            self._hedges -= 1

    async def _replace(self, space: OpenNamespace, load: Load, copy: memoryview, checksum: int) -> None:
        first = load.target
        if self._intake.make_room(space, first.size) is not Placement.GRANTED:
            self._settle()
            return
        self._table.abort(first, Cause.LOAD_FAILED)
        del self._loading[first]
        other = self._own.allocate(space.dram, first.key, first.parent, first.size)
        assert other is not None, "room was made"
        self._loading[other] = load
        self._settle()
        is_copied = False
        try:
            await self._copier.copy([(self._dram.view(other.slot, other.size), copy[: other.size])])
            is_copied = True
        finally:
            del self._loading[other]
            if is_copied and other.state is State.ALLOCATED:  # else it was given up meanwhile
                self._commit(space, load, other, checksum)
                self._counters.hedges_won += 1
            else:
                if other.state is State.ALLOCATED:
                    self._table.abort(other, Cause.LOAD_FAILED)
                self._own.let_go(other)
            self._settle()
