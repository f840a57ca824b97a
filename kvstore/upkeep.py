"""What a node does when nobody asks: lapsed holds, use rings, watermarks, capacity. In small steps."""

import asyncio
import os
from contextlib import suppress

from kvstore.errors import ConfigError, InvalidRequest, NotFound
from kvstore.store import Store
from kvstore.types import DRAM, Cause

STEP_BLOCKS = 32  # evicted between two looks at the event loop: about 0.25 ms
INTERVAL_S = 0.05
HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Upkeep:
    """`high` and `low` watermarks are shares of the tier's capacity in bytes."""

    def __init__(self, store: Store, *, capacity_bytes: int, high: float, low: float) -> None:
        self._store = store
        self.high = high
        self.low = low
        self._pressed = asyncio.Event()
        self.resized = asyncio.Event()  # set while the capacity is what it should be
        self.set_tier(DRAM, capacity_bytes=capacity_bytes)

    def set_tier(
        self,
        tier: str,
        *,
        capacity_bytes: int | None = None,
        high_watermark: float | None = None,
        low_watermark: float | None = None,
    ) -> None:
        """Change a tier while it serves; `run` brings it there. All or nothing.

        Raises NotFound for an unknown tier, InvalidRequest for values that make no sense.
        """
        if tier != DRAM:
            raise NotFound(f"no tier {tier!r}; there is {DRAM!r}")
        high = self.high if high_watermark is None else high_watermark
        low = self.low if low_watermark is None else low_watermark
        if not 0 < low < high <= 1:
            raise InvalidRequest(f"watermarks: 0 < low < high <= 1, not {low} and {high}")
        if capacity_bytes is not None:
            slabs = capacity_bytes // self._store.table.tiers[DRAM].pool.slab_bytes
            if slabs < 1:
                raise InvalidRequest(f"a capacity of {capacity_bytes} bytes is less than one slab")
            if capacity_bytes > HOST_BYTES:
                raise InvalidRequest(f"a capacity of {capacity_bytes} bytes; this host has {HOST_BYTES} in all")
            self._store.sizing.target = slabs
            self.resized.clear()
        self.high, self.low = high, low

    async def tend(self) -> None:
        """Until cancelled: look after holds, uses and watermarks, each 50 ms and when room runs out; in small steps."""
        while True:
            self._pressed.clear()
            self.look()
            await self.relieve()
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._pressed.wait()

    def room_was_taken(self) -> None:
        """Evict soon, after the answer and not before it, if that put the tier over its high watermark."""
        if self._is_over():
            self._pressed.set()

    def _is_over(self) -> bool:
        tier = self._store.table.tiers[DRAM]
        return tier.used_bytes > self.high * tier.pool.capacity_bytes

    async def keep_size(self) -> None:
        """Until cancelled: bring the tier to its capacity. Apart from `tend`, since memory takes its time."""
        while True:
            await self.resize()
            await asyncio.sleep(INTERVAL_S)

    def look(self) -> None:
        """Let go of what lapsed, and take up what local readers used."""
        self._store.expire()
        self._store.note_uses()

    async def relieve(self) -> None:
        """Over the high watermark, evict down to the low one."""
        if self._is_over():
            low_bytes = int(self.low * self._store.table.tiers[DRAM].pool.capacity_bytes)
            more = True
            while more:
                more = self._store.evict_step(low_bytes, STEP_BLOCKS)
                await asyncio.sleep(0)

    async def resize(self) -> None:
        """Bring the tier to its target capacity, as far as what is held lets it."""
        sizing = self._store.sizing
        try:
            while await sizing.grow():
                pass
        except (OSError, ConfigError) as error:
            sizing.settle_for_less(error)
        while sizing.shrink():
            await asyncio.sleep(0)
            if not self._store.empty_slab(Cause.SHRUNK):
                break  # all that is left is held: another pass will find it free
        if sizing.is_reached:
            self.resized.set()
