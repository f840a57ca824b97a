"""What the block table and the holds should do, in dicts and sets: slow, plain, and ignorant of how they do it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvstore.replica import Replica
from kvstore.types import Slot

SLAB_BYTES = 4096
CLASSES = {1000: 1024, 1300: 1344, 2000: 2048}  # bytes of a block: bytes of its slot; 4, 3 and 2 to a slab

Room = tuple[str, int]
"""Tenant and bytes of a slot: who may share a slab."""
Place = tuple[str, int]
"""Tenant and number of a namespace."""


@dataclass(eq=False)
class Block:
    place: Place
    key: bytes
    parent: bytes | None
    size: int
    replica: Replica
    slot: Slot
    last_use: int
    state: str = "allocated"
    holders: int = 1
    soft_pins: int = 0
    is_copy: bool = False

    @property
    def room(self) -> Room:
        return self.place[0], CLASSES[self.size]


@dataclass
class Slab:
    """One that the tier has. Its tenant stays when it is spare."""

    tenant: str | None = None
    slot_bytes: int = 0
    occupants: set[Block] = field(default_factory=set)

    @property
    def has_room(self) -> bool:
        return bool(self.occupants) and len(self.occupants) < SLAB_BYTES // self.slot_bytes


@dataclass
class Model:
    blocks: dict[tuple[Place, bytes], Block] = field(default_factory=dict)  # that can be found
    slabs: dict[int, Slab] = field(default_factory=dict)
    given_out: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)  # slab: (start, end, generation)
    uses: int = 0
    copy_share: float = 1.0

    # Room.

    def has_room(self, room: Room) -> bool:
        tenant = room[0]
        return any(
            slab.has_room and (slab.tenant, slab.slot_bytes) == room
            if slab.occupants
            else slab.tenant in (None, tenant)
            for slab in self.slabs.values()
        )

    def has_dirty(self, tenant: str) -> bool:
        return any(not slab.occupants and slab.tenant not in (None, tenant) for slab in self.slabs.values())

    def add(self, block: Block) -> None:
        """It was just allocated; its slot must be one that it may have."""
        slot, slab = block.slot, self.slabs[block.slot.slab_id]
        assert block.size <= slot.size == CLASSES[block.size]
        start, end = slot.offset, slot.offset + slot.size
        assert 0 <= start
        assert end <= SLAB_BYTES
        assert slab.tenant in (None, block.place[0]), "a slab passed from one tenant to another"
        if slab.occupants:
            assert slab.slot_bytes == slot.size, "two classes in one slab"
        for other in slab.occupants:
            assert end <= other.slot.offset or other.slot.offset + other.slot.size <= start, "slots overlap"
        before = self.given_out.setdefault(slot.slab_id, [])
        newest = max((was for low, high, was in before if low < end and start < high), default=0)
        assert slot.generation > newest, "a slot was handed out twice"
        before.append((start, end, slot.generation))
        slab.tenant, slab.slot_bytes = block.place[0], slot.size
        slab.occupants.add(block)
        self.blocks[block.place, block.key] = block

    # Life.

    def find(self, place: Place, key: bytes) -> Block | None:
        return self.blocks.get((place, key))

    def readable(self, place: Place, key: bytes) -> Block | None:
        block = self.find(place, key)
        return block if block is not None and block.state == "written" else None

    def use(self, block: Block) -> None:
        self.uses += 1
        block.last_use = self.uses

    def let_go(self, block: Block) -> None:
        block.holders -= 1
        if block.state == "gone" and not block.holders:
            self.slabs[block.slot.slab_id].occupants.remove(block)

    def remove(self, block: Block) -> None:
        """No new reader finds it; its slot is free once nobody holds it."""
        del self.blocks[block.place, block.key]
        block.state = "gone"
        parent = self.find(block.place, block.parent) if block.parent is not None else None
        if parent is not None:
            parent.last_use = max(parent.last_use, block.last_use)
        if not block.holders:
            self.slabs[block.slot.slab_id].occupants.remove(block)

    # Eviction.

    def children(self, block: Block) -> list[Block]:
        return [child for child in self.blocks.values() if child.place == block.place and child.parent == block.key]

    def is_evictable(self, block: Block) -> bool:
        is_free = block.state == "written" and not block.holders
        return is_free and (block.is_copy or not self.children(block))

    def coldest(self, tenant: str | None = None, room: Room | None = None) -> Block | None:
        parents = {(block.place, block.parent) for block in self.blocks.values()}
        candidates = (
            block
            for block in self.blocks.values()
            if block.state == "written"
            and not block.holders
            and tenant in (None, block.place[0])
            and room in (None, block.room)
            and (block.is_copy or (block.place, block.key) not in parents)
        )
        copies_first = self.copy_bytes() > self.copy_share * len(self.slabs) * SLAB_BYTES

        def turn(block: Block) -> tuple[bool, bool, int]:
            is_pinned = block.soft_pins > 0
            return is_pinned, (is_pinned or copies_first) and not block.is_copy, block.last_use

        return min(candidates, key=turn, default=None)

    def descendants(self, blocks: Iterable[Block]) -> set[Block]:
        """These and all that must go before them."""
        found: set[Block] = set()
        stack = list(blocks)
        while stack:
            block = stack.pop()
            if block not in found:
                found.add(block)
                stack += [] if block.is_copy else self.children(block)
        return found

    def emptiable(self, *, pinned_too: bool, room: Room | None = None) -> list[set[Block]]:
        """What would have to go for a slab to be empty, for each slab that can be emptied."""
        found = []
        for slab in self.slabs.values():
            if slab.occupants and room in (None, (slab.tenant, slab.slot_bytes)):
                victims = self.descendants(slab.occupants)
                if not any(block.holders or (block.soft_pins and not pinned_too) for block in victims):
                    found.append(victims)
        return found

    def ways_to_make_room(self, room: Room) -> list[set[Block]]:
        """The sets of blocks of which one may go to make room for one more of `room`; none: the tier is full."""
        if self.has_room(room) or self.has_dirty(room[0]):
            return [set()]
        own, coldest = self.coldest(room=room), self.coldest()
        if coldest is not None and coldest is not own:
            ways = self.emptiable(pinned_too=False, room=coldest.room)
            if ways:
                return ways
        if own is not None and not own.soft_pins:
            return [{own}]
        last_resort = [{own}] if own is not None else self.emptiable(pinned_too=True)
        return self.emptiable(pinned_too=False) or last_resort

    # Bytes.

    def used_bytes(self) -> dict[str, int]:
        used: dict[str, int] = {}
        for block in self.occupants():
            used[block.place[0]] = used.get(block.place[0], 0) + block.slot.size
        return used

    def copy_bytes(self) -> int:
        return sum(block.slot.size for block in self.occupants() if block.is_copy)

    def occupants(self) -> Iterator[Block]:
        for slab in self.slabs.values():
            yield from slab.occupants
