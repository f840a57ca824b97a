"""What a node does when nobody asks: lapsed holds, use rings, watermarks, capacity. In small steps."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from kvstore.errors import ConfigError, InvalidRequest, NotFound
from kvstore.store import Store
from kvstore.types import DRAM, HBM, NVME, Cause, TierName

STEP_BLOCKS = 32  # evicted between two looks at the event loop: about 0.25 ms
INTERVAL_S = 0.05
FIRST_SLABS = 8
BUCKET_INTERVAL_S = 2.0  # between two looks for what other nodes put into the bucket
TRIM_INTERVAL_S = 60.0
HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Marks:
    """Watermarks of a tier, as shares of its capacity."""

    high: float
    low: float


class Upkeep:
    """`marks` and `capacities` (in bytes) of the tiers that have slabs."""

    def __init__(self, store: Store, marks: Mapping[TierName, Marks], capacities: Mapping[TierName, int]) -> None:
        self._store = store
        self.marks = dict(marks)
        self._pressed = asyncio.Event()
        self.resized = asyncio.Event()  # set while DRAM has the capacity that it should have
        for tier, capacity_bytes in capacities.items():
            self.set_tier(tier, capacity_bytes=capacity_bytes)

    def jobs(self) -> list[Callable[[], Awaitable[None]]]:
        """What is to run until it is cancelled, each by itself."""
        jobs: list[Callable[[], Awaitable[None]]] = [
            *(self.tend, self.keep_room, self.keep_size, self._store.defragment.keep)
        ]
        if self._store.lifting is not None:
            jobs.append(self.keep_device)
        if self._store.below.disk is not None:
            jobs.append(self.keep_disk)
        if self._store.below.writes_through:
            jobs.append(self.write_through)
        if self._store.below.records is not None:
            jobs += [self._store.below.records.keep, self._store.below.records.keep_durable]
        if self._store.below.bucket is not None:
            jobs += [self.look_into_bucket, self.trim_bucket]
        return jobs

    def set_tier(
        self,
        tier: str,
        *,
        capacity_bytes: int | None = None,
        high_watermark: float | None = None,
        low_watermark: float | None = None,
    ) -> None:
        """Change a tier while it serves; `keep_size` brings it there. All or nothing.

        Raises NotFound for an unknown tier, InvalidRequest for values that make no sense.
        """
        name = TierName(tier)
        if name not in self.marks:
            raise NotFound(f"no tier {tier!r} with slabs; there is {', '.join(self.marks)}")
        marks = self.marks[name]
        high = marks.high if high_watermark is None else high_watermark
        low = marks.low if low_watermark is None else low_watermark
        if name == HBM and Marks(high, low) != marks:
            raise InvalidRequest("hbm has no watermarks: a block goes when another needs its room")
        if name != HBM and not 0 < low < high <= 1:
            raise InvalidRequest(f"watermarks: 0 < low < high <= 1, not {low} and {high}")
        if capacity_bytes is not None:
            self._resize(name, capacity_bytes)
        self.marks[name] = Marks(high, low)

    def _resize(self, tier: TierName, capacity_bytes: int) -> None:
        slabs = capacity_bytes // self._store.table.tiers[tier].pool.slab_bytes
        if slabs < 1:
            raise InvalidRequest(f"a capacity of {capacity_bytes} bytes is less than one slab")
        if tier == DRAM and capacity_bytes > HOST_BYTES:
            raise InvalidRequest(f"a capacity of {capacity_bytes} bytes; this host has {HOST_BYTES} in all")
        self._store.sizings[tier].target = slabs
        if tier == DRAM:
            self.resized.clear()

    async def tend(self) -> None:
        """Until cancelled: look after holds and uses, each 50 ms."""
        while True:
            self.look()
            await asyncio.sleep(INTERVAL_S)

    async def keep_room(self) -> None:
        """Until cancelled: look after DRAM's watermarks, each 50 ms and when room runs out; in small steps."""
        while True:
            self._pressed.clear()
            await self.relieve()
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._pressed.wait()

    async def keep_size(self) -> None:
        """Until cancelled: bring DRAM to its capacity. Apart from `keep_room`, since memory takes its time."""
        while True:
            await self.resize(DRAM)
            await asyncio.sleep(INTERVAL_S)

    async def keep_device(self) -> None:
        """Until cancelled: bring HBM to its capacity. Apart from DRAM, since engines may hold up the device."""
        while True:
            await self.resize(HBM)
            await asyncio.sleep(INTERVAL_S)

    async def keep_disk(self) -> None:
        """Until cancelled: once it is known what lies on the disk, look after its capacity and watermarks."""
        while True:
            if not self._store.demotion.is_paused:
                await self.resize_disk()
                await self.relieve_disk()
            await asyncio.sleep(INTERVAL_S)

    async def write_through(self) -> None:
        """Until cancelled: write what was offered."""
        while True:
            await self._store.demotion.offers.wait()
            if self._store.demotion.is_paused:
                await asyncio.sleep(INTERVAL_S)
            else:
                await self._store.demotion.write_through()

    async def look_into_bucket(self) -> None:
        """Until cancelled: learn what other nodes put into the bucket."""
        bucket = self._store.below.bucket
        assert bucket is not None
        while True:
            await asyncio.gather(*(bucket.refresh(space.root) for space in self._store.catalogue.all()))
            await asyncio.sleep(BUCKET_INTERVAL_S)

    async def trim_bucket(self) -> None:
        """Until cancelled: keep the bucket at its capacity."""
        bucket = self._store.below.bucket
        assert bucket is not None
        while True:
            await asyncio.sleep(TRIM_INTERVAL_S)
            with suppress(OSError):  # it is away, and counts it
                await bucket.trim()

    async def drain(self, tier: str) -> tuple[int, int]:
        """Empty a tier, what is worth it going to the next lower one: (blocks that went, blocks that are left).

        NotFound for a tier that is not there, or that this node cannot drain.
        """
        if tier not in self.marks:
            raise NotFound(f"no tier {tier!r} that can be drained; there is {', '.join(self.marks)}")
        state = self._store.table.tiers[TierName(tier)]
        before = state.replicas
        if tier == DRAM:
            left = before
            while left > 0 and await self._store.demotion.step(state.used_bytes, Cause.DRAINED):
                left = min(left - 1, state.replicas)
        elif tier == HBM:
            for _ in list(state.pool.in_use()):  # what is lifted meanwhile is newer
                self._store.empty_slab(HBM, Cause.DRAINED)
                await asyncio.sleep(0)
        else:
            assert self._store.reclaim is not None
            for _ in range(self._store.reclaim.cut_slabs()):  # what is cut meanwhile holds newer blocks
                if not await self._store.reclaim.give_back(Cause.DRAINED, readmits=False):
                    break
        return max(before - state.replicas, 0), state.replicas  # others may have come meanwhile

    def room_was_taken(self) -> None:
        """Evict soon, after the answer and not before it, if that put DRAM over its high watermark."""
        if self._is_over():
            self._pressed.set()

    def _is_over(self) -> bool:
        tier = self._store.table.tiers[DRAM]
        return tier.used_bytes > self.marks[DRAM].high * tier.pool.capacity_bytes

    def look(self) -> None:
        """Let go of what lapsed, and take up what local readers used."""
        self._store.expire()
        self._store.note_uses()

    async def relieve(self) -> None:
        """Over the high watermark, bring DRAM down to the low one: what is worth it is written below first."""
        if not self._is_over():
            return
        tier = self._store.table.tiers[DRAM]
        low_bytes = int(self.marks[DRAM].low * tier.pool.capacity_bytes)
        demotion = self._store.demotion
        more = True
        while more and tier.used_bytes > low_bytes:
            if demotion.is_needed:
                more = await demotion.step(tier.used_bytes - low_bytes, Cause.WATERMARK)
            else:
                more = self._store.evict_step(low_bytes, STEP_BLOCKS)
            await asyncio.sleep(0)

    async def resize(self, tier: TierName) -> None:
        """Bring DRAM or HBM to its target capacity, as far as what is held lets it."""
        sizing = self._store.sizings[tier]
        try:
            while await sizing.grow():
                pass
        except (OSError, ConfigError) as error:
            sizing.settle_for_less(error)
        while sizing.shrink():
            await asyncio.sleep(0)
            if not self._store.empty_slab(tier, Cause.SHRUNK):
                break  # all that is left is held: another pass will find it free
        if tier == DRAM and sizing.is_reached:
            self.resized.set()

    async def make_first_slabs(self) -> None:
        """Have some slabs on the disk, so that what is written first finds room; `keep_disk` makes the others."""
        assert self._store.below.disk is not None
        try:
            for _ in range(FIRST_SLABS):
                if not await self._store.sizings[NVME].grow():
                    break
        except (OSError, ConfigError) as error:
            self._store.below.disk.store_failed(error)

    async def resize_disk(self) -> None:
        """Bring the disk to its target capacity; it stays smaller while there is no space, and tries again."""
        store, sizing = self._store, self._store.sizings[NVME]
        assert store.below.disk is not None
        assert store.reclaim is not None
        disk = store.below.disk
        if disk.may_store():
            for tenant in store.demotion.take_wants():
                sizing.drop_dirty(tenant)  # what another tenant used does not pass to it
        while disk.may_store():
            try:
                if not await sizing.grow():
                    break
            except (OSError, ConfigError) as error:
                disk.store_failed(error)
        while sizing.shrink():
            if not await store.reclaim.give_back(Cause.SHRUNK, readmits=False):
                break

    async def relieve_disk(self) -> None:
        """Over the high watermark, give slabs back until the low one is reached."""
        reclaim = self._store.reclaim
        assert reclaim is not None
        pool = self._store.table.tiers[NVME].pool
        marks = self.marks[NVME]
        if reclaim.cut_slabs() <= marks.high * len(pool.slabs):
            return
        while reclaim.cut_slabs() > marks.low * len(pool.slabs):
            if not await reclaim.give_back(Cause.WATERMARK, readmits=True):
                break
