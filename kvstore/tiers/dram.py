"""Host memory that local clients can map: one memfd per slab."""

import errno
import resource
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.copier import Copier
from kvstore.region import Backing, Region, make_backed_region
from kvstore.tiers import TierSpec
from kvstore.types import Slot

MOST_DESCRIPTORS = 0.75  # of those that the process may have: clients need some too


class DramTier:
    """Slabs as memfds, prefaulted in a copier thread. `huge_pages` and `mlock` are "no", "try" or "require"."""

    def __init__(self, spec: TierSpec, copier: Copier, *, huge_pages: str, mlock: str, prefault: bool) -> None:
        self.spec = spec
        self._copier = copier
        self._huge_pages = huge_pages
        self._mlock = mlock
        self._prefault = prefault
        self._slabs: dict[int, tuple[Region, Backing]] = {}
        self._prepared: list[tuple[Region, Backing]] = []
        self.dropping: Callable[[int], None] = lambda slab_id: None  # who else knows of a slab forgets it first

    async def prepare(self) -> None:
        """Raises ConfigError when what is required of the memory cannot be had, OSError when there is none."""

        def make() -> None:
            made = make_backed_region(
                f"cairn-{self.spec.name}",
                self.spec.slab_bytes,
                huge_pages=self._huge_pages,
                mlock=self._mlock,
                prefault=self._prefault,
            )
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            if made[0].fd >= MOST_DESCRIPTORS * limit:
                made[0].close()
                raise OSError(errno.EMFILE, f"each slab has a descriptor, and there are {limit} (see `ulimit -n`)")
            self._prepared.append(made)

        if not self._prepared:  # a caller that was cancelled left its memory
            await self._copier.run(make)

    def adopt(self, slab_id: int) -> None:
        self._slabs[slab_id] = self._prepared.pop()

    def drop_slab(self, slab_id: int) -> None:
        self.dropping(slab_id)
        region, _ = self._slabs.pop(slab_id)
        region.punch()  # clients may have it mapped for long: its pages go now
        region.close()

    def region(self, slab_id: int) -> Region:
        return self._slabs[slab_id][0]

    def view(self, slot: Slot, size: int) -> memoryview:
        """The first `size` bytes of a slot, in place."""
        assert size <= slot.size
        return self._slabs[slot.slab_id][0].view(slot.offset, size)

    async def read(self, blocks: Sequence[tuple[Slot, memoryview]]) -> None:
        await self._copier.copy([(view, self.view(slot, len(view))) for slot, view in blocks])

    async def write(self, blocks: Sequence[tuple[Slot, memoryview]]) -> None:
        await self._copier.copy([(self.view(slot, len(view)), view) for slot, view in blocks])

    async def aclose(self) -> None:
        for slab_id in list(self._slabs):
            self.drop_slab(slab_id)
        while self._prepared:
            self._prepared.pop()[0].close()

    def describe(self) -> dict[str, Any]:
        backings = [backing for _, backing in self._slabs.values()]
        return {
            "medium": "memfd",
            "slabs_ready": len(backings),
            "slabs_in_huge_pages": sum(backing.huge_pages for backing in backings),
            "slabs_locked": sum(backing.locked for backing in backings),
            "slabs_prefaulted": sum(backing.prefaulted for backing in backings),
            "reasons": sorted({reason for backing in backings for reason in backing.reasons}),
        }
