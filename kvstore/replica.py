"""A replica, and the space it lies in: plain records that the table changes, with who is whose child."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.slab import Slab
from kvstore.types import BlockKey, GroupKey, Slot, State, TierName


@dataclass(slots=True, eq=False)
class Replica:
    """One block (part) in one slot. `holders` counts its writer, leases and hard pins."""

    space: "Space"
    key: BlockKey
    parent: BlockKey | None
    slab: Slab
    group: GroupKey
    index: int
    generation: int
    size: int  # bytes
    holders: int = 1
    state: State = State.ALLOCATED
    last_use: int = 0  # no two replicas of a table that can be found have the same
    version: int = 0  # of the allocation, then of the commit; grows over the life of the node
    checksum: int = 0
    layers: int = 0  # in place, from the first
    depth: int = 0  # blocks before it in its chain, as far as they are known
    hits: int = 0  # uses since it was stored
    soft_pins: int = 0
    partition: int = -1  # of the cluster's directory; -1: not told there
    position: int = 0  # in its stripe
    is_copy: bool = False  # another node holds the block too, as far as is known
    next_sibling: "Replica | None" = None  # children of one parent key, in no order
    previous_sibling: "Replica | None" = None

    @property
    def slot(self) -> Slot:
        """Its place, or the one it had: a slab may be cut anew by the time that its removal is handled."""
        slot_bytes = self.group.slot_bytes
        return Slot(self.space.tier, self.slab.slab_id, self.index * slot_bytes, slot_bytes, self.generation)

    @property
    def is_evictable(self) -> bool:
        """Nobody holds it, and no child of it is in its tier, or it is a copy."""
        if self.state is not State.WRITTEN or self.holders:
            return False
        return self.key not in self.space.first_child or self.is_copy


@dataclass(slots=True, eq=False)
class Space:
    """The replicas of one namespace of one tenant in one tier.

    Children are kept by their parent's key, not in its replica: they can outlive that, and meet the next.
    """

    tenant: str
    number: int  # of the namespace, as published
    tier: TierName
    replicas: dict[BlockKey, Replica] = field(default_factory=dict)
    first_child: dict[BlockKey, Replica] = field(default_factory=dict)  # by the parent's key

    def children_of(self, replica: Replica) -> Iterator[Replica]:
        child = self.first_child.get(replica.key)
        while child is not None:
            yield child
            child = child.next_sibling

    def descends(self, key: BlockKey, ancestor: BlockKey) -> bool:
        """Whether `ancestor` is `key` or before it. O(blocks between), or O(1) if it has no children here."""
        if ancestor not in self.first_child:
            return key == ancestor
        above: BlockKey | None = key
        while above is not None and above != ancestor:
            replica = self.replicas.get(above)
            above = replica.parent if replica is not None else None
        return above is not None

    def add_child(self, replica: Replica, parent_key: BlockKey) -> None:
        sibling = self.first_child.get(parent_key)
        replica.next_sibling = sibling
        if sibling is not None:
            sibling.previous_sibling = replica
        self.first_child[parent_key] = replica

    def remove_child(self, replica: Replica, parent_key: BlockKey) -> None:
        before, after = replica.previous_sibling, replica.next_sibling
        if after is not None:
            after.previous_sibling = before
        if before is not None:
            before.next_sibling = after
        elif after is not None:
            self.first_child[parent_key] = after
        else:
            del self.first_child[parent_key]
        replica.previous_sibling = replica.next_sibling = None
