"""What the table knows of one tier: how it is cut, what lies in it, and what happens to that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.evictable import Evictable, WholeSlabs
from kvstore.replica import Replica
from kvstore.slab import Slab, SlabPool, slot_bytes
from kvstore.types import Cause, Change, GroupKey, Slot, TierName


class Event(NamedTuple):
    """One change, as `take_changes` hands it over."""

    change: Change
    replica: Replica
    cause: Cause | None = None


@dataclass(slots=True, eq=False)
class Move:
    """A written replica on its way to another slot of its tier: it is read at `replica.slot`, written at `target`."""

    replica: Replica
    slab: Slab
    index: int
    generation: int

    @property
    def target(self) -> Slot:
        slot_bytes = self.replica.group.slot_bytes
        tier = self.replica.space.tier
        return Slot(tier, self.slab.slab_id, self.index * slot_bytes, slot_bytes, self.generation)


@lru_cache(1024)
def _group_of(tenant: str, stride: Callable[[int], int], size: int) -> GroupKey:
    return GroupKey(tenant, stride(size))


@dataclass(frozen=True, slots=True)
class TierShape:
    """How a tier is cut: bytes of a slab, and of the slot for a block of some size. `policy` is a name of EVICTION;
    empty where blocks go with their slab only."""

    slab_bytes: int
    policy: str = "lru"
    stride: Callable[[int], int] = slot_bytes

    def make(self, name: TierName) -> "Tier":
        evictable = Evictable(self.policy) if self.policy else WholeSlabs()
        return Tier(name, SlabPool(self.slab_bytes), evictable, self.stride)


@dataclass(slots=True)
class Tier:
    """What the table knows of one tier."""

    name: TierName
    pool: SlabPool
    evictable: Evictable | WholeSlabs
    stride: Callable[[int], int]
    draining: set[Replica] = field(default_factory=set)
    moves: set["Move"] = field(default_factory=set)
    used_bytes: int = 0  # of slots that are not free
    tenant_bytes: dict[str, int] = field(default_factory=dict)
    copy_bytes: int = 0  # of slots of copies that are not free
    copy_share: float = 1.0  # of the capacity: while copies take more, they go before originals
    replicas: int = 0

    def coldest(self, tenant: str | None = None) -> Replica | None:
        copies_first = self.copy_bytes > 0 and self.copies_first
        if tenant is None:
            return self.evictable.coldest(copies_first=copies_first)
        return self.evictable.coldest_of_tenant(tenant, copies_first=copies_first)

    def coldest_of(self, group: GroupKey) -> Replica | None:
        return self.evictable.coldest_of(group, copies_first=self.copies_first)

    @property
    def copies_first(self) -> bool:
        return self.copy_bytes > self.copy_share * self.pool.capacity_bytes

    def group(self, tenant: str, size: int) -> GroupKey:
        """Where a block of `size` bytes belongs. InvalidRequest if its slot would not fit into a slab."""
        if not 0 < size <= self.pool.slab_bytes or self.stride(size) > self.pool.slab_bytes:
            raise InvalidRequest(f"a block in {self.name} has 1 to {self.pool.slab_bytes} bytes, not {size}")
        return _group_of(tenant, self.stride, size)
