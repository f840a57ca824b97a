"""Stores from DRAM into lower tiers: what is worth a write, ahead of eviction or as soon as it is stored.

A store holds its block in DRAM until it is written below, then evicts it, unless it was used meanwhile. Where a
lower tier is full, failing or over its budget, the block goes without a copy: stores are shed, loads never.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter

from kvstore.admission import Admission
from kvstore.catalogue import Catalogue, OpenNamespace
from kvstore.clock import Clock
from kvstore.disk import Disk
from kvstore.errors import NotFound
from kvstore.metrics import Counters
from kvstore.node_holds import NodeHolds
from kvstore.table import Replica
from kvstore.tiers.dram import DramTier
from kvstore.tiers.object_store import ObjectTier
from kvstore.tiers.packing import Offered
from kvstore.types import DRAM, NVME, OBJECT, BlockKey, Cause, State

BATCH_BYTES, BATCH_BLOCKS = 16 << 20, 256  # of one step; held in DRAM while it is written
JOB_BYTES, JOB_BLOCKS = 2 << 20, 32  # of one store: a step of small blocks is for several threads, too
QUEUE_BLOCKS = 65_536  # that wait to be written through
LOOKED_BLOCKS = 4096  # looked at in one step
WALK_BLOCKS = 4096  # of a chain whose recency is passed on


class Demotion:
    """`writes_through` names the tiers that get a block as soon as it is admitted, not only ahead of eviction."""

    def __init__(self, own: NodeHolds, catalogue: Catalogue, dram: DramTier, clock: Clock, *,
                 counters: Counters, disk: Disk | None, bucket: ObjectTier | None, admission: Admission,
                 writes_through: frozenset[str], settle: Callable[[], None]) -> None:  # fmt: skip
        self._own = own
        self._table = own.table
        self._catalogue = catalogue
        self._dram = dram
        self._clock = clock
        self._counters = counters
        self._disk = disk
        self._bucket = bucket
        self.admission = admission
        self._writes_through = writes_through
        self._settle = settle
        self._offered: dict[Replica, None] = {}  # to be written through, oldest first
        self.offers = asyncio.Event()
        self._wants: set[str] = set()  # tenants for whom the disk had no room
        self._steps = 0  # that hold blocks, which go when they are written
        self._relieved = asyncio.Event()
        self._turn = asyncio.Lock()  # of those who demote by name: one batch waits for the disk at a time
        self.is_paused = False  # nothing may be allocated on the disk, for it is not known yet what lies there

    @property
    def is_needed(self) -> bool:
        """Whether there is a tier below DRAM."""
        return self._disk is not None or self._bucket is not None

    @property
    def is_relieving(self) -> bool:
        """Whether blocks are held that will go when they are written."""
        return self._steps > 0

    def offer(self, replica: Replica) -> None:
        """It was stored, or has shown to be of use: write it through, with what is before it in its chain."""
        if self._writes_through and len(self._offered) < QUEUE_BLOCKS:
            self._offered[replica] = None
            self.offers.set()

    async def step(self, excess_bytes: int, cause: Cause) -> bool:
        """Evict the coldest blocks of DRAM, some of them after writing them below; whether there was anything.

        About `excess_bytes`, but in one step not more than is held without harm.
        """
        chains: list[list[Replica]] = []
        left = min(excess_bytes, BATCH_BYTES, self._table.tiers[DRAM].pool.capacity_bytes // 8)
        while left > 0 and sum(map(len, chains)) < BATCH_BLOCKS:
            chain = self._table.coldest_chain(DRAM, left)
            if not chain:
                break
            for replica in chain:
                self._own.hold(replica)
            chains.append(chain)
            left -= sum(replica.size for replica in chain)
        coldest_uses = [chain[0].last_use for chain in chains]  # parents take it up as their children go
        self._steps += bool(chains)
        is_done = False
        try:
            admitted = [replica for chain in chains for replica in self._admitted(chain)]
            await self.copy_down(admitted)
            is_done = True
        finally:
            for chain, coldest_use in zip(chains, coldest_uses, strict=True):
                for replica in chain:
                    self._own.let_go(replica)
                    if is_done and replica.is_evictable and replica.last_use <= coldest_use:
                        self._evict(replica, cause)
            self._steps -= bool(chains)
            self._relieved.set()
            self._relieved = asyncio.Event()
            self._settle()
        await asyncio.sleep(0)  # where nothing was written either, others are served
        return bool(chains)

    async def relieved(self, within_s: float) -> None:
        """Until the blocks that are being written have gone, at most `within_s`."""
        relieved = self._relieved
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await relieved.wait()

    async def write_through(self) -> None:
        """Write what was offered, in one batch."""
        self.offers.clear()
        batch: dict[Replica, None] = {}
        seen: set[Replica] = set()
        size = 0
        while self._offered and size < BATCH_BYTES and len(batch) < BATCH_BLOCKS and len(seen) < LOOKED_BLOCKS:
            offered = next(iter(self._offered))
            del self._offered[offered]
            for replica in self._unwritten(offered, seen):
                if replica in batch or replica.state is not State.WRITTEN:
                    continue
                if self.admission.admits_early(replica.key, replica.hits, replica.size, self._clock.now()):
                    self._own.hold(replica)
                    batch[replica] = None
                    size += replica.size
        try:
            await self.copy_down(list(batch), tiers=self._writes_through)
        finally:
            for replica in batch:
                self._own.let_go(replica)
            self._settle()
        if self._offered:
            self.offers.set()
        await asyncio.sleep(0)  # where nothing was written, others are served

    async def demote(self, space: OpenNamespace, keys: Sequence[BlockKey] | None, tier: str, *,
                     evict: bool, within_budget: bool = True) -> tuple[int, int]:  # fmt: skip
        """Write blocks of a namespace, or all that DRAM has of it, into a lower tier: (blocks written, evicted).

        Admission is asked for the budget only, and not for that of an admin. NotFound for a tier that is not there.
        """
        if (NVME, self._disk) != (tier, None) and (OBJECT, self._bucket) != (tier, None) and tier in (NVME, OBJECT):
            wanted = list(space.dram.replicas) if keys is None else list(keys)
            # The budget is that of the tier next to DRAM.
            within_budget = within_budget and (tier == NVME or self._disk is None)
            return await self._write_all(space, wanted[::-1], tier, evict=evict, within_budget=within_budget)
        raise NotFound(f"no tier {tier!r} below DRAM on this node")

    async def flush(self, until: float) -> int:
        """Before a planned stop: write all of DRAM below, what was used last first; how many blocks were written."""
        replicas = [replica for space in self._catalogue.all() for replica in space.dram.replicas.values()]
        replicas.sort(key=attrgetter("last_use"), reverse=True)
        written, candidates = 0, iter(replicas)
        while self._clock.now() < until and (batch := self._hold_next(candidates)):
            try:
                written += await self.copy_down([replica for replica in batch if not self.is_below(replica)])
            finally:
                for replica in batch:
                    self._own.let_go(replica)
                self._settle()
        return written

    async def _write_all(self, space: OpenNamespace, keys: Sequence[BlockKey], tier: str, *,
                         evict: bool, within_budget: bool) -> tuple[int, int]:  # fmt: skip
        written = evicted = 0
        candidates = filter(None, (self._table.readable(space.dram, key) for key in keys))
        while True:
            async with self._turn:
                batch = self._hold_next(candidates)
                try:
                    wanted = self._affordable(batch, tier) if within_budget else batch
                    written += await self.copy_down(wanted, frozenset({tier}))
                finally:
                    for replica in batch:
                        self._own.let_go(replica)
                        if evict and replica.is_evictable and self.is_below(replica):
                            self._evict(replica, Cause.DEMOTED)
                            evicted += 1
                    self._settle()
            if not batch:
                return written, evicted
            await asyncio.sleep(0)

    def _hold_next(self, candidates: Iterator[Replica]) -> list[Replica]:
        """Hold the next that are stored, as many as are written in one step."""
        batch: list[Replica] = []
        size = 0
        for replica in candidates:
            if replica.state is State.WRITTEN:
                self._own.hold(replica)
                batch.append(replica)
                size += replica.size
                if size >= BATCH_BYTES or len(batch) == BATCH_BLOCKS:
                    break
        return batch

    def _affordable(self, batch: Sequence[Replica], tier: str) -> list[Replica]:
        """What the tier has not, as far as the budget goes."""
        now = self._clock.now()
        missing = [replica for replica in batch if not self._is_in(tier, self._space(replica), replica.key)]
        return [replica for replica in missing if self.admission.affords(replica.size, now)]

    async def copy_down(self, replicas: Sequence[Replica], tiers: frozenset[str] | None = None) -> int:
        """Write held replicas of DRAM into the next lower tier, or into those named; how many are written.

        What a tier has already it keeps.
        """
        if tiers is None:
            tiers = frozenset({NVME if self._disk is not None else OBJECT})
        written = 0
        if NVME in tiers and self._disk is not None and not self.is_paused and self._disk.may_store():
            written += await self._to_disk(replicas)
        if OBJECT in tiers and self._bucket is not None and self._bucket.may_store():
            written += await self._to_bucket(replicas)
        return written

    def is_below(self, replica: Replica) -> bool:
        """Whether a lower tier has a copy."""
        space = self._space(replica)
        return self._is_in(NVME, space, replica.key) or self._is_in(OBJECT, space, replica.key)

    def _is_in(self, tier: str, space: OpenNamespace, key: BlockKey) -> bool:
        if tier == NVME:
            return space.nvme is not None and self._table.readable(space.nvme, key) is not None
        return self._bucket is not None and self._bucket.has(space.root, key)

    def take_wants(self) -> set[str]:
        """The tenants for whom the disk had no room since the last call."""
        wants, self._wants = self._wants, set()
        return wants

    def _space(self, replica: Replica) -> OpenNamespace:
        found = self._catalogue.of_number(replica.space.number)
        assert found is not None, "what has replicas is open"
        return found

    def _may_store(self) -> bool:
        """Whether the next lower tier would take blocks now: else none is counted as admitted."""
        if self._disk is not None:
            return not self.is_paused and self._disk.may_store()
        return self._bucket is not None and self._bucket.may_store()

    def _admitted(self, chain: Sequence[Replica]) -> list[Replica]:
        """Of blocks that go, children first: those to write. A block was used as often as what hangs on it."""
        found = []
        hits = 0
        for replica in chain:
            hits = replica.hits = max(hits, replica.hits)
            if self.is_below(replica) or not self._may_store():
                continue
            if self.admission.admits(replica.key, hits, replica.size, self._clock.now()):
                found.append(replica)
                hits = max(hits, 1)
        return found

    def _unwritten(self, replica: Replica, seen: set[Replica]) -> list[Replica]:
        """It and what is before it in its chain, as far as no lower tier has it, nor was it `seen` with as many hits.

        The rest of a long chain is offered for another time.
        """
        found: list[Replica] = []
        above: Replica | None = replica
        while above is not None and not self.is_below(above):
            if above in seen and above.hits >= replica.hits:
                break
            above.hits = max(above.hits, replica.hits)
            if len(found) == BATCH_BLOCKS:
                self._offered[above] = None
                break
            seen.add(above)
            found.append(above)
            above = above.space.replicas.get(above.parent) if above.parent is not None else None
        return found

    def _evict(self, replica: Replica, cause: Cause) -> None:
        space = self._space(replica)
        below = space.nvme.replicas.get(replica.key) if space.nvme is not None else None
        if below is not None and below.state is State.WRITTEN:
            below.hits = max(below.hits, replica.hits)
            self._table.touch(below)
        is_below = self.is_below(replica)
        self._counters.shed_blocks += not is_below and replica.hits > 0
        self._table.evict(replica, Cause.DEMOTED if is_below else cause)

    async def _to_disk(self, replicas: Sequence[Replica]) -> int:
        jobs: list[list[Replica]] = [[]]
        job_bytes = 0
        for replica in replicas:
            if job_bytes >= JOB_BYTES or len(jobs[-1]) == JOB_BLOCKS:
                jobs.append([])
                job_bytes = 0
            jobs[-1].append(replica)
            job_bytes += replica.size
        written = await asyncio.gather(*(self._write_job(job) for job in jobs if job))
        return sum(written)

    async def _write_job(self, replicas: Sequence[Replica]) -> int:
        """Allocated targets are committed or given up, however it ends; how many are written."""
        assert self._disk is not None
        job = self._allocate(replicas)
        if not job:
            return 0
        is_good = False
        written = 0
        try:
            is_good = await self._disk.store([(target, self._view(replica)) for replica, target in job])
        finally:
            for replica, target in job:
                if is_good and replica.state is State.WRITTEN:  # else it was deleted meanwhile
                    self._own.commit(target, replica.checksum)
                    written += 1
                else:
                    self._table.abort(target, Cause.ABORTED)
                    self._own.let_go(target)
            self._settle()
        self._counters.demoted_blocks[NVME] += written
        self._touch_above(job[-1][1])
        return written

    def _allocate(self, replicas: Sequence[Replica]) -> list[tuple[Replica, Replica]]:
        """(Replica, its target on the disk), as far as there is room for those that are not there."""
        tier = self._table.tiers[NVME]
        job: list[tuple[Replica, Replica]] = []
        for replica in replicas:
            space = self._space(replica).nvme
            is_wanted = space is not None and replica.key not in space.replicas and replica.state is State.WRITTEN
            if space is None or not is_wanted or tier.stride(replica.size) > tier.pool.slab_bytes:
                continue
            target = self._own.allocate(space, replica.key, replica.parent, replica.size)
            if target is None:
                self._wants.add(space.tenant)
                continue  # it is full until slabs were given back, or what another tenant used was replaced
            target.checksum, target.hits = replica.checksum, replica.hits
            target.depth = max(target.depth, replica.depth)
            job.append((replica, target))
        return job

    def _touch_above(self, replica: Replica) -> None:
        """What is before a block on the disk is to stay as long as the block: it was used no less lately."""
        above = replica.space.replicas.get(replica.parent) if replica.parent is not None else None
        for _ in range(WALK_BLOCKS):
            if above is None or above.state is not State.WRITTEN:
                return  # who is writing it goes on from there
            self._table.touch(above)
            above = above.space.replicas.get(above.parent) if above.parent is not None else None

    async def _to_bucket(self, replicas: Sequence[Replica]) -> int:
        assert self._bucket is not None
        by_root: dict[bytes, list[Offered]] = {}
        for replica in replicas:
            space = self._space(replica)
            if not self._bucket.has(space.root, replica.key):
                view = self._dram.view(replica.slot, replica.size)
                offered = Offered(replica.key, replica.parent, replica.depth, replica.checksum, view)
                by_root.setdefault(space.root, []).append(offered)
        written = 0
        for root, blocks in by_root.items():
            with suppress(OSError):  # the bucket is away, and counts it
                written += await self._bucket.write(root, blocks)
        for replica in replicas:
            if replica.state is not State.WRITTEN:  # it was deleted meanwhile
                self._bucket.forget(self._space(replica).root, [replica.key])
        self._counters.demoted_blocks[OBJECT] += written
        return written

    def _view(self, replica: Replica) -> memoryview:
        """All of its slot: what follows the block in it is written as padding."""
        slot = replica.slot
        return self._dram.view(slot, slot.size)
