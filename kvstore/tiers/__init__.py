"""Media that hold slabs of bytes. One per file; a tier knows no keys, states or policies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.types import Slot, TierName


@dataclass(frozen=True, slots=True)
class TierSpec:
    """What a tier is made of; sizes in bytes."""

    name: TierName
    slab_bytes: int


class SlabMedium(Protocol):
    """Slabs by id; the table decides which there are, and which slot is whose."""

    spec: TierSpec

    async def prepare(self) -> None:
        """Have memory ready for one more slab. May take a second per GiB; other slabs are served meanwhile."""

    def adopt(self, slab_id: int) -> None:
        """Memory that was prepared is this slab's."""

    def drop_slab(self, slab_id: int) -> None:
        """Give a slab's memory back at once. Nobody holds a slot in it."""

    async def aclose(self) -> None: ...

    def describe(self) -> dict[str, Any]:
        """What the medium says of itself in `stat`."""


class TierMedium(SlabMedium, Protocol):
    """Slabs in memory, whose slots are read and written as they are."""

    async def read(self, blocks: Sequence[tuple[Slot, memoryview]]) -> None:
        """Fill each view from the start of its slot."""

    async def write(self, blocks: Sequence[tuple[Slot, memoryview]]) -> None:
        """Write each view to the start of its slot."""
