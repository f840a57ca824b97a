"""Blocks on their way up into HBM, and leases on them there.

HBM is a cache: each block in it was copied from DRAM or read from the disk, so what it evicts for others simply goes.
Whoever asks for a chain there has it brought up first, as far as there is room: straight from the disk what only that
has, where the file can; else from DRAM, or by way of DRAM from lower tiers.
"""

import asyncio
import logging
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.catalogue import OpenNamespace
from kvstore.clock import Clock
from kvstore.copier import Copier
from kvstore.disk import Disk
from kvstore.health import Health
from kvstore.holds import Holds, Lease
from kvstore.intake import Intake, Limits, part_of
from kvstore.metrics import Counters
from kvstore.node_holds import NodeHolds
from kvstore.reads import Reads
from kvstore.sizing import Sizing
from kvstore.straight import Straight, allocate
from kvstore.table import Replica
from kvstore.tiers.dram import DramTier
from kvstore.types import NODE, BlockKey, Cause, Owner, State

if TYPE_CHECKING:  # it needs torch, which few nodes have
    from kvstore.tiers.hbm import HbmTier

log = logging.getLogger("cairn.lifting")

JOB_BYTES, JOB_BLOCKS = 16 << 20, 64  # of one copy: some fills of a staging buffer
TURNS = 16  # of one acquire, each straight from the disk or by way of DRAM; in the last all the rest comes that way


@dataclass(frozen=True, slots=True)
class Above:
    """The tier over DRAM. Engines may hold up the threads of `copier`, so nobody else uses them. It reads `disk`."""

    hbm: "HbmTier"
    copier: Copier
    disk: Disk | None = None


class Lifting:
    """`settle` makes known what the table changed."""

    def __init__(self, own: NodeHolds, holds: Holds, intake: Intake, reads: Reads, above: Above, sizing: Sizing, *,
                 dram: DramTier, clock: Clock, limits: Limits, counters: Counters,
                 settle: Callable[[], None]) -> None:  # fmt: skip
        self._own = own
        self._table = own.table
        self._holds = holds
        self._intake = intake
        self._reads = reads
        self.hbm = above.hbm
        self._copier = above.copier
        self._sizing = sizing
        self._dram = dram
        self._clock = clock
        self._limits = limits
        self._counters = counters
        self._settle = settle
        self._ends: dict[Replica, asyncio.Event] = {}  # of the copy that fills it
        self.health = Health()
        self.straight = Straight(
            *(own, above.hbm, above.copier, above.disk),
            clock=clock,
            most_bytes=limits.inflight_bytes,
            counters=counters,
            failed=self._failed,
            settle=settle,
        )
        self.hit_blocks = 0  # that readers found in HBM
        self._copied_blocks = 0

    @property
    def lifted_blocks(self) -> int:
        """Brought into HBM so far, from DRAM or from the disk."""
        return self._copied_blocks + self.straight.loaded_blocks

    def is_here(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> bool:
        """Whether all of a chain is in HBM."""
        return len(self._present(space, keys)) == len(keys)

    def hold(self, owner: Owner, space: OpenNamespace, keys: Sequence[BlockKey], lease_s: float) -> Lease | None:
        """A lease on the prefix of `keys` that is in HBM now; None when nothing of it is."""
        self._intake.check_batch(space, keys)
        replicas = self._present(space, keys)
        self._count_hits(space, len(replicas))
        space.missed_blocks += len(keys) - len(replicas)
        return self._lease(owner, replicas, lease_s)

    async def acquire(self, owner: Owner, space: OpenNamespace, keys: Sequence[BlockKey], *, lease_s: float,
                      wait_s: float, load_s: float, tokens_per_s: float) -> Lease | None:  # fmt: skip
        """Hold the longest prefix of `keys` that is in HBM or can be brought there; None when there is none.

        What DRAM has not is waited for or loaded as by `Reads.acquire`. Cancelled, it holds nothing, once the copy
        under way has ended; what is read straight from the disk goes on.
        """
        self._intake.check_batch(space, keys)
        self._count_hits(space, len(self._present(space, keys)))
        now, most_s = self._clock.now(), self._limits.wait_max_s
        await self._bring(space, keys, now + min(wait_s, most_s), now + min(load_s, most_s), tokens_per_s)
        return self._lease(owner, self._present(space, keys), lease_s)

    async def lift(self, space: OpenNamespace, sources: Sequence[Replica]) -> list[Replica]:
        """Copy blocks of a chain from DRAM, where the caller holds them: those that are in HBM then, from the first.

        Nobody holds them: do so before the next await. A block that another task copies is waited for, and not
        copied twice. It ends early where there is no room, at a source that goes or is damaged, at a block that the
        disk is read for, and when the device fails. Cancelled, it leaves what is copied by then.
        """
        assert space.hbm is not None
        lifted: list[Replica] = []
        try:
            while len(lifted) < len(sources):
                source = sources[len(lifted)]
                found = space.hbm.replicas.get(source.key)
                if found is not None and found.state is State.WRITTEN:
                    self._own.hold(found)
                    lifted.append(found)
                elif self.straight.target(space, source.key) is not None:
                    break  # who waits for a disk has a deadline
                elif found is not None:
                    await self._ends[found].wait()
                elif source.state is not State.WRITTEN:
                    break
                elif job := allocate(self._own, space, sources[len(lifted) :], JOB_BLOCKS, JOB_BYTES):
                    if not await self._copy(job):
                        break
                elif not await self._sizing.renew(space.tenant.name):
                    break
        finally:
            for replica in lifted:
                self._own.let_go(replica)
            self._settle()
        return [replica for replica in lifted if replica.state is State.WRITTEN]

    async def verify(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> int:
        """Read blocks that somebody found damaged, and drop those that are; how many those were."""
        corrupt = 0
        for key in keys:
            replica = self._table.readable(space.hbm, key) if space.hbm is not None else None
            if replica is None:
                continue
            lease = self._holds.lease(NODE, [replica], math.inf)
            copy = memoryview(mmap.mmap(-1, replica.size))
            try:
                await self.hbm.read([(replica.slot, copy)])
                (found,) = await self._copier.checksums([copy])
            except OSError as error:
                self._failed(error)
                continue
            finally:
                self._holds.release(NODE, lease.lease_id)
            if found != replica.checksum and replica.state is State.WRITTEN:
                corrupt += 1
                self._table.discard(replica, Cause.CORRUPT)
        return corrupt

    async def aclose(self) -> None:
        """Free the device's memory, after the copies under way. The disk is closed by then."""
        await self.straight.aclose()
        await self.hbm.aclose()
        self._copier.close()

    # Inside.

    def _present(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> list[Replica]:
        assert space.hbm is not None
        found = []
        for key in keys:
            replica = self._table.readable(space.hbm, key)
            if replica is None or not self._is_whole(space, key):
                break
            found.append(replica)
        return found

    def _is_whole(self, space: OpenNamespace, key: BlockKey) -> bool:
        """Whether all parts of the block can be read here, so that it is nobody's half."""
        parts = (part_of(space, key, part) for part in range(space.namespace.parts))
        tiers = [tier for tier in (space.hbm, space.dram) if tier is not None]
        return space.namespace.parts == 1 or all(
            any(self._table.readable(tier, part) is not None for tier in tiers) for part in parts
        )

    def _lease(self, owner: Owner, replicas: Sequence[Replica], lease_s: float) -> Lease | None:
        if not replicas:
            return None
        expires_at = self._clock.now() + min(lease_s, self._limits.lease_max_s)
        lease = self._holds.lease(owner, replicas, expires_at)
        self._table.use(replicas[-1])
        return lease

    def _count_hits(self, space: OpenNamespace, blocks: int) -> None:
        space.hit_blocks += blocks
        self.hit_blocks += blocks

    async def _bring(self, space: OpenNamespace, keys: Sequence[BlockKey], wait_until: float, load_until: float,
                     tokens_per_s: float) -> None:  # fmt: skip
        """Have what is missing of a chain in HBM, from its first block: straight from the disk and from DRAM by turns.

        What is there or on its way is held meanwhile: room for the end is not made at the beginning.
        """
        kept: list[Replica] = []
        here = asked = 0  # how many blocks are there, and how many are counted as hits or misses
        may_be_straight, from_dram = True, False
        try:
            for turn in range(TURNS):
                may_be_straight &= turn < TURNS - 1
                came = self._present(space, keys[here:])
                self._keep(kept, came)
                here += len(came)
                rest = keys[here:]
                if not rest or not self.health.may_try(self._clock.now()):
                    break
                targets = self.straight.begin(space, rest, load_until, tokens_per_s) if may_be_straight else []
                self._keep(kept, targets)
                if from_dram and not came and not targets:
                    break
                from_dram = not targets
                if targets:
                    await self.straight.wait(targets, load_until)
                    may_be_straight = targets[0].state is State.WRITTEN
                    came_straight = sum(target.state is State.WRITTEN for target in targets)
                    space.hit_blocks += came_straight
                    asked = max(asked, here + came_straight)
                else:
                    if may_be_straight:
                        rest = rest[: self.straight.first(space, rest)]
                    asked = max(asked, here + len(rest))
                    await self._lift_from_dram(space, rest, wait_until, load_until, tokens_per_s)
        finally:
            space.missed_blocks += len(keys) - max(asked, here)
            for replica in kept:
                self._own.let_go(replica)
            self._settle()

    def _keep(self, kept: list[Replica], replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            self._own.hold(replica)
        kept += replicas

    async def _lift_from_dram(self, space: OpenNamespace, keys: Sequence[BlockKey], wait_until: float,
                              load_until: float, tokens_per_s: float) -> None:  # fmt: skip
        now = self._clock.now()
        source = await self._reads.acquire(
            *(NODE, space, keys),
            lease_s=self._limits.lease_max_s,
            wait_s=wait_until - now,
            layers=0,
            load_s=load_until - now,
            tokens_per_s=tokens_per_s,
        )
        if source is not None:
            await self._lift_held(space, source)

    async def _lift_held(self, space: OpenNamespace, source: Lease) -> None:
        self._holds.renew(NODE, source.lease_id, math.inf)  # a copy may wait for an engine, and take its time
        try:
            await self.lift(space, source.replicas)
        finally:
            self._reads.release(NODE, source.lease_id)

    async def _copy(self, job: Sequence[tuple[Replica, Replica]]) -> bool:
        """Copy and commit; False, and nothing of the job is in HBM, when something of it is not as it should be."""
        targets = [target for _, target in job]
        ended = asyncio.Event()
        self._ends |= dict.fromkeys(targets, ended)
        is_good = False
        self._settle()  # what was evicted for them
        try:
            views = [self._dram.view(source.slot, source.size) for source, _ in job]
            if self._are_intact(job, await self._copier.checksums(views)):
                await self.hbm.write([(target.slot, view) for target, view in zip(targets, views, strict=True)])
                if self.health.succeeded():
                    log.warning("hbm takes blocks again")
                is_good = all(source.state is State.WRITTEN for source, _ in job)  # else somebody deleted it
        except OSError as error:
            self._failed(error)
        finally:
            for source, target in job:
                del self._ends[target]
                if is_good:
                    target.layers, target.depth = source.layers, max(source.depth, target.depth)
                    self._own.commit(target, source.checksum)
                    self._copied_blocks += 1
                else:
                    self._table.abort(target, Cause.LOAD_FAILED)
                    self._own.let_go(target)
            ended.set()
            self._settle()
        return is_good

    def _are_intact(self, job: Sequence[tuple[Replica, Replica]], found: Sequence[int]) -> bool:
        """Whether all sources have their checksums; those that have not are dropped."""
        damaged = [source for (source, _), actual in zip(job, found, strict=True) if actual != source.checksum]
        self._counters.corrupt_blocks += len(damaged)
        for source in damaged:
            if source.state is State.WRITTEN:
                self._table.discard(source, Cause.CORRUPT)
        return not damaged

    def _failed(self, error: OSError) -> None:
        if self.health.failed(str(error), self._clock.now()):
            log.error("nothing is brought into hbm for now: %s", error)
