"""Room on the NVMe tier: the coldest slab is given back whole, and what is hot in it is written once more.

So the disk sees long sequential writes and large holes only, and its blocks are never shuffled one by one.
"""

import asyncio
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from heapq import nsmallest
from itertools import accumulate
from operator import attrgetter
from typing import cast

from kvstore.catalogue import Catalogue
from kvstore.disk import Disk, Loaded
from kvstore.diskblock import padded
from kvstore.metrics import Counters
from kvstore.node_holds import NodeHolds
from kvstore.slab import Slab
from kvstore.table import Move, Replica
from kvstore.tiers.object_store import ObjectTier
from kvstore.tiers.packing import Offered
from kvstore.types import NVME, OBJECT, Cause, State

SLABS_TRIED = 32  # of those used longest ago, looked into
SAMPLE = 32  # blocks of each
READMITTED = 0.2  # of a slab's bytes at most: so each byte admitted costs at most 1.25 written
JOB_BYTES, JOB_BLOCKS = 4 << 20, 16
STEP_BLOCKS = 256  # discarded between two looks at the event loop: about 2 ms


class Reclaim:
    """`high` and `low` watermarks are shares of the slabs that the tier has."""

    def __init__(self, own: NodeHolds, catalogue: Catalogue, disk: Disk, counters: Counters, *,
                 bucket: ObjectTier | None, settle: Callable[[], None]) -> None:  # fmt: skip
        self._own = own
        self._table = own.table
        self._catalogue = catalogue
        self._disk = disk
        self._counters = counters
        self._bucket = bucket
        self._settle = settle
        self._tier = own.table.tiers[NVME]

    def cut_slabs(self) -> int:
        return sum(1 for _ in self._tier.pool.in_use())

    async def give_back(self, cause: Cause, *, readmits: bool) -> bool:
        """Empty one slab and punch it; False when there is none that nobody holds."""
        slab = self._coldest()
        if slab is None:
            return False
        pool = self._tier.pool
        pool.set_apart(slab)
        try:
            occupants = [cast(Replica, occupant) for occupant in slab.occupants if occupant is not None]
            hot = self._hot(slab, occupants) if readmits else set()
            going = [replica for replica in occupants if replica not in hot]
            await self._to_bucket([replica for replica in going if replica.hits])
            await self._readmit(hot)
            await self._discard(slab, cause)
            if not slab.used:
                await self._disk.punch(slab.slab_id)  # while it is apart: nobody is given a slot of it meanwhile
        finally:
            pool.rejoin(slab)
            self._settle()
        return True

    async def _discard(self, slab: Slab, cause: Cause) -> None:
        """All that is still stored in it, in small steps: of small blocks a slab has tens of thousands."""
        for start in range(0, slab.slots, STEP_BLOCKS):
            for occupant in slab.occupants[start : start + STEP_BLOCKS]:
                replica = cast("Replica | None", occupant)
                if replica is not None and replica.state is State.WRITTEN and replica.slab is slab:
                    self._table.discard(replica, cause)
            self._settle()
            await asyncio.sleep(0)

    def _coldest(self) -> Slab | None:
        """Of the slabs used longest ago, the one whose blocks were on average."""
        pool = self._tier.pool
        candidates = (slab for slab in pool.in_use() if not slab.held and slab.used and not pool.is_apart(slab))
        tried = nsmallest(SLABS_TRIED, candidates, key=attrgetter("last_use"))
        return min(tried, key=_mean_use, default=None)

    def _hot(self, slab: Slab, occupants: Sequence[Replica]) -> set[Replica]:
        """Blocks that were used in the newer half of the time that the tier's slabs span, and that DRAM has not: the
        newest of them, up to the share that may be written once more."""
        last_uses = [other.last_use for other in self._tier.pool.in_use()]
        newer = (min(last_uses) + max(last_uses)) / 2
        left = READMITTED * self._tier.pool.slab_bytes
        hot = set()
        for replica in sorted(occupants, key=attrgetter("last_use"), reverse=True):
            left -= replica.group.slot_bytes
            if left < 0 or replica.last_use <= newer:
                break
            space = self._catalogue.of_number(replica.space.number)
            if space is not None and replica.key not in space.dram.replicas:
                hot.add(replica)
        return hot

    async def _readmit(self, hot: set[Replica]) -> None:
        """Copy blocks into other slabs; those that cannot be copied stay where they are."""
        moves: list[Move] = []
        for replica in hot:
            if replica.state is State.WRITTEN and not replica.holders:
                move = self._table.begin_move(replica)
                if move is None:
                    break
                moves.append(move)
        for job in _jobs(moves):
            copied: Sequence[str] = []
            try:
                copied = await self._disk.copy([(move.replica, move.target) for move in job])
            finally:
                for position, move in enumerate(job):
                    is_copied = position < len(copied) and copied[position] == "good"
                    moves.remove(move)
                    self._counters.readmitted_blocks += self._table.end_move(move, is_copied=is_copied)
                if not copied:
                    for move in moves:
                        self._table.end_move(move, is_copied=False)
                self._settle()

    async def _to_bucket(self, going: Sequence[Replica]) -> None:
        """Blocks that were of use go on to the object tier, if there is one and it has them not."""
        bucket = self._bucket
        if bucket is None or not bucket.may_store():
            return
        wanted: dict[bytes, list[Replica]] = {}
        for replica in going:
            space = self._catalogue.of_number(replica.space.number)
            if space is not None and replica.state is State.WRITTEN and not bucket.has(space.root, replica.key):
                self._own.hold(replica)
                wanted.setdefault(space.root, []).append(replica)
        try:
            for root, replicas in wanted.items():
                ends = list(accumulate(padded(replica.size) for replica in replicas))
                memory = memoryview(mmap.mmap(-1, ends[-1]))
                copies = [memory[end - padded(r.size) : end] for r, end in zip(replicas, ends, strict=True)]
                loaded: list[Loaded] = []
                for start in range(0, len(replicas), JOB_BLOCKS):  # other loads come between
                    end = start + JOB_BLOCKS
                    pairs = zip(replicas[start:end], copies[start:end], strict=True)
                    loaded += await self._disk.load(list(pairs))
                blocks: list[Offered] = [
                    Offered(replica.key, replica.parent, replica.depth, replica.checksum, copy[: replica.size])
                    for replica, copy, found in zip(replicas, copies, loaded, strict=True)
                    if found == "good"
                ]
                if not blocks:
                    continue
                with suppress(OSError):  # the bucket is away, and counts it
                    self._counters.demoted_blocks[OBJECT] += await bucket.write(root, blocks)
                deleted = [replica.key for replica in replicas if replica.state is not State.WRITTEN]
                bucket.forget(root, deleted)
        finally:
            for replicas in wanted.values():
                for replica in replicas:
                    self._own.let_go(replica)


def _mean_use(slab: Slab) -> float:
    uses = [cast(Replica, occupant).last_use for occupant in slab.occupants if occupant is not None]
    sample = uses[:: max(len(uses) // SAMPLE, 1)]
    return sum(sample) / len(sample)


def _jobs(moves: Sequence[Move]) -> list[list[Move]]:
    jobs: list[list[Move]] = []
    job_bytes = JOB_BYTES
    for move in moves:
        if job_bytes >= JOB_BYTES:
            jobs.append([])
            job_bytes = 0
        jobs[-1].append(move)
        job_bytes += move.replica.size
    return jobs
