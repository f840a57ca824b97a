"""How many slabs a tier has: grown, shrunk, and their memory replaced before another tenant gets it."""

import asyncio
import logging

from kvstore.errors import ConfigError
from kvstore.slab import SlabPool
from kvstore.tiers import SlabMedium

log = logging.getLogger("cairn.sizing")


class Sizing:
    """Brings a pool to `target` slabs; memory comes and goes in step, and never exceeds the target by more
    than what cannot be given back yet."""

    def __init__(self, pool: SlabPool, medium: SlabMedium) -> None:
        self._pool = pool
        self._medium = medium
        self._turn = asyncio.Lock()
        self.target = 0  # slabs

    @property
    def is_reached(self) -> bool:
        return len(self._pool.slabs) == self.target

    async def grow(self) -> bool:
        """Add one slab if the target allows; whether there are more to add. Cancelled, it has added none.

        Raises as `SlabMedium.prepare`.
        """
        async with self._turn:
            if len(self._pool.slabs) >= self.target:
                return False
            await self._medium.prepare()
            slab = self._pool.grow()
            try:
                self._medium.adopt(slab.slab_id)
            except OSError:
                self._pool.remove(slab)
                raise
            return len(self._pool.slabs) < self.target

    def settle_for_less(self, error: Exception) -> None:
        """There is no more memory to be had: what there is is the target."""
        self.target = len(self._pool.slabs)
        log.error("the tier stays at %d slabs, there is no memory for more: %s", self.target, error)

    def shrink(self) -> bool:
        """Give back spare slabs over the target; whether more must go, for which slabs must be emptied."""
        for slab in list(self._pool.spare()):
            if len(self._pool.slabs) <= self.target:
                break
            self._pool.remove(slab)
            self._medium.drop_slab(slab.slab_id)
        return len(self._pool.slabs) > self.target

    def drop_dirty(self, tenant: str) -> bool:
        """Give back a spare slab that another tenant used, for a fresh one to come; False when there is none."""
        slab = self._pool.dirty(tenant)
        if slab is None:
            return False
        self._pool.remove(slab)
        self._medium.drop_slab(slab.slab_id)
        return True

    async def renew(self, tenant: str) -> bool:
        """Replace a spare slab that another tenant used by a fresh one. The old memory goes first.

        False when there is none, or no memory to be had for it.
        """
        async with self._turn:
            if not self.drop_dirty(tenant):
                return False
            try:
                await self._medium.prepare()
            except (OSError, ConfigError) as error:
                self.settle_for_less(error)
                return False
            self._medium.adopt(self._pool.grow().slab_id)
            return True
