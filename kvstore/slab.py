"""Slabs: a tier's memory in equal pieces, each cut into slots of one size class for one tenant.

    tier      |--- slab 3 (tenant a, 1 MiB slots) ---|--- slab 4 (tenant a, 64 KiB) ---|--- spare ---|
    slab 3    |slot 0|slot 1|slot 2| ... |slot 63|

A slab is made on demand and given back when its last slot is free. Its id is never used again after
the slab passed to another tenant, so a client that mapped it can never see a stranger's bytes in it.
"""

from collections.abc import Hashable, Iterator
from functools import lru_cache
from itertools import chain, count

from kvstore.errors import ConfigError
from kvstore.types import GroupKey

SLOT_ALIGN_BYTES = 64
STEPS_PER_DOUBLING = 16


@lru_cache(1024)
def slot_bytes(size: int) -> int:
    """The size class of a block of `size` bytes: the next of 16 steps per doubling, a multiple of 64 bytes.

    So at most 1/16 is lost, or 63 bytes.
    """
    assert size > 0
    power = 1 << (size - 1).bit_length() >> 1  # largest power of two below size
    step = max(power // STEPS_PER_DOUBLING, SLOT_ALIGN_BYTES)
    return -(-size // step) * step


class Slab:
    """One piece of a tier's memory. `slots` is how many blocks of `slot_bytes` fit into it.

    `held`, `pinned` and `last_use` are the table's: how many occupants somebody holds or softly pinned, and a
    count of uses that grows: when one of them, or what hangs on it, was used last as far as is known.
    """

    __slots__ = (
        *("slab_id", "group", "tenants", "slots", "occupants", "held", "pinned", "last_use"),
        *("_free", "_generations"),
    )

    def __init__(self, slab_id: int) -> None:
        self.slab_id = slab_id
        self.group: GroupKey | None = None
        self.tenants: set[Hashable] = set()  # who was ever given it; one at most
        self.slots = 0
        self.last_use = 0
        self.held = 0
        self.pinned = 0
        self.occupants: list[object | None] = []
        self._free: list[int] = []
        self._generations: list[int] = []

    def cut(self, group: GroupKey, slab_bytes: int, generation: int = 0) -> None:
        """Make it a slab of `group`. Generations go on from the highest so far, and from `generation`."""
        assert self.group is None
        assert self.used == 0
        assert self.tenants <= {group.tenant}, "a slab never passes to another tenant"
        self.tenants.add(group.tenant)
        newest = max(generation, *self._generations, 0) + 1
        self.group = group
        self.slots = slab_bytes // group.slot_bytes
        self.last_use = 0
        self.occupants = [None] * self.slots
        self._free = list(range(self.slots - 1, -1, -1))  # popped from the end: low offsets first
        self._generations = [newest] * self.slots

    def uncut(self) -> None:
        assert self.used == self.held == self.pinned == 0
        self.group = None

    @property
    def owner(self) -> Hashable:
        """Whose memory it is: the tenant that was given it, None while nobody was."""
        return next(iter(self.tenants), None)

    @property
    def used(self) -> int:
        """Slots in use."""
        return self.slots - len(self._free)

    @property
    def is_full(self) -> bool:
        return not self._free

    def restore(self, index: int, occupant: object, generation: int) -> None:
        """Put back what lay in a slot at an earlier start. Free slots are known by `settle` only."""
        assert self.occupants[index] is None
        self.occupants[index] = occupant
        self._generations[index] = generation

    def settle(self, *, known: bool) -> None:
        """Say whether it is known which slots are free: those without an occupant, or none for now."""
        free = (index for index in range(self.slots - 1, -1, -1) if self.occupants[index] is None)
        self._free = list(free) if known else []

    def take(self, occupant: object) -> tuple[int, int]:
        """A free slot for `occupant`: (index, generation)."""
        index = self._free.pop()
        self.occupants[index] = occupant
        return index, self._generations[index]

    def give_back(self, index: int) -> None:
        assert self.occupants[index] is not None, "a slot is given back once"
        self.occupants[index] = None
        self._generations[index] += 1
        self._free.append(index)

    def check(self) -> Iterator[str]:
        occupied = {index for index, occupant in enumerate(self.occupants) if occupant is not None}
        if self.group is not None and (occupied & set(self._free) or len(occupied) + len(self._free) != self.slots):
            free = len(self._free)
            yield f"slab {self.slab_id}: {len(occupied)} used + {free} free != {self.slots}, or doubled"


class SlabPool:
    """The slabs of one tier: which are spare, which belong to whom, and which have room."""

    def __init__(self, slab_bytes: int) -> None:
        """ConfigError unless a slab is a size class itself: else a block could fit, and its slot not."""
        if slab_bytes <= 0 or slot_bytes(slab_bytes) != slab_bytes:
            larger = slot_bytes(max(slab_bytes, 1))
            raise ConfigError(f"a slab cannot have {slab_bytes} bytes; the next size it can have is {larger}")
        self.slab_bytes = slab_bytes
        self.slabs: dict[int, Slab] = {}
        self._ids = count(1)
        self._spare: dict[Hashable, dict[int, Slab]] = {}  # without a group, by who had it; None: nobody yet
        self._roomy: dict[GroupKey, dict[int, Slab]] = {}  # with a group and a free slot
        self._apart: set[int] = set()  # ids of those that give out no slot for now
        self._cut: dict[GroupKey, dict[int, Slab]] = {}  # all with a group

    @property
    def capacity_bytes(self) -> int:
        return len(self.slabs) * self.slab_bytes

    def grow(self) -> Slab:
        """Count in one more slab, whose memory the tier has ready."""
        slab = Slab(next(self._ids))
        self.slabs[slab.slab_id] = slab
        self._set_aside(slab)
        return slab

    def restore(self, slab_id: int, group: GroupKey, generation: int) -> Slab:
        """Count in a slab that an earlier start cut for `group`. No slot of it is given out before `restored`.

        Later ids are greater than its own, and generations of its free slots greater than `generation`.
        """
        assert slab_id not in self.slabs
        slab = self.slabs[slab_id] = Slab(slab_id)
        self._ids = count(max(slab_id + 1, next(self._ids)))
        slab.cut(group, self.slab_bytes, generation)
        slab.settle(known=False)
        self._cut.setdefault(group, {})[slab_id] = slab
        self._roomy.setdefault(group, {})
        self._apart.add(slab_id)
        return slab

    def restored(self, slab: Slab) -> None:
        """All that lay in it is in it again: its other slots may be used."""
        slab.settle(known=True)
        self.rejoin(slab)

    def remove(self, slab: Slab) -> None:
        """Count out a spare slab: its memory goes, or is replaced."""
        spare = self._spare[slab.owner]
        del spare[slab.slab_id], self.slabs[slab.slab_id]
        if not spare:
            del self._spare[slab.owner]

    def spare(self) -> Iterator[Slab]:
        return chain.from_iterable(slabs.values() for slabs in self._spare.values())

    def dirty(self, tenant: Hashable) -> Slab | None:
        """A spare slab that another tenant has used: `tenant` may have its room, not its memory."""
        others = (slabs for owner, slabs in self._spare.items() if owner is not None and owner != tenant)
        return next((slab for slabs in others for slab in slabs.values()), None)

    def groups(self) -> Iterator[GroupKey]:
        return iter(self._cut)

    def of_group(self, group: GroupKey) -> list[Slab]:
        return list(self._cut.get(group, {}).values())

    def in_use(self) -> Iterator[Slab]:
        """All with a group."""
        return chain.from_iterable(slabs.values() for slabs in self._cut.values())

    def has_slabs(self, group: GroupKey) -> bool:
        return group in self._cut

    def has_room(self, group: GroupKey) -> bool:
        return bool(self._roomy.get(group)) or group.tenant in self._spare or None in self._spare

    def set_apart(self, slab: Slab) -> None:
        """Give no slot of it to anyone, until `rejoin`; what is left in it may go meanwhile."""
        assert slab.group is not None
        self._apart.add(slab.slab_id)
        self._roomy[slab.group].pop(slab.slab_id, None)

    def is_apart(self, slab: Slab) -> bool:
        return slab.slab_id in self._apart

    def rejoin(self, slab: Slab) -> None:
        """Its free slots may be used again; without an occupant it is spare."""
        self._apart.remove(slab.slab_id)
        assert slab.group is not None
        if slab.used == 0:
            self._uncut(slab, slab.group)
        elif not slab.is_full:
            self._roomy[slab.group][slab.slab_id] = slab

    def take(self, group: GroupKey, occupant: object) -> tuple[Slab, int, int] | None:
        """A slot of `group`: (slab, index, generation); None if no slab of it has room and none is spare."""
        roomy = self._roomy.get(group)
        if not roomy:
            slab = self._take_spare(group.tenant) or self._take_spare(None)  # what is mapped stays in use
            if slab is None:
                return None
            slab.cut(group, self.slab_bytes)
            self._cut.setdefault(group, {})[slab.slab_id] = slab
            roomy = self._roomy.setdefault(group, {})  # as long as the group has a slab
            roomy[slab.slab_id] = slab
        slab_id, slab = roomy.popitem()  # the latest: at a dict's front lie the traces of all that left it
        index, generation = slab.take(occupant)
        if not slab.is_full:
            roomy[slab_id] = slab
        return slab, index, generation

    def give_back(self, slab: Slab, index: int) -> None:
        """Free a slot, and the slab with its last one."""
        group = slab.group
        assert group is not None
        is_apart = slab.slab_id in self._apart
        if slab.is_full and not is_apart:
            self._roomy[group][slab.slab_id] = slab
        slab.give_back(index)
        if slab.used == 0 and not is_apart:
            self._uncut(slab, group)

    def _uncut(self, slab: Slab, group: GroupKey) -> None:
        cut, roomy = self._cut[group], self._roomy[group]
        del cut[slab.slab_id]
        roomy.pop(slab.slab_id, None)
        if not cut:
            del self._cut[group], self._roomy[group]
        slab.uncut()
        self._set_aside(slab)

    def _set_aside(self, slab: Slab) -> None:
        self._spare.setdefault(slab.owner, {})[slab.slab_id] = slab

    def _take_spare(self, owner: Hashable) -> Slab | None:
        spare = self._spare.get(owner)
        if spare is None:
            return None
        _, slab = spare.popitem()
        if not spare:
            del self._spare[owner]
        return slab

    def check(self) -> Iterator[str]:
        for slab in self.slabs.values():
            if slab.slab_id in self._apart:
                continue
            yield from slab.check()
            if (slab.group is None) != (slab.slab_id in self._spare.get(slab.owner, {})):
                yield f"slab {slab.slab_id}: spare and in use"
            if slab.group is not None and slab.slab_id not in self._cut[slab.group]:
                yield f"slab {slab.slab_id}: lost to its class"
            if slab.group is not None and slab.is_full == (slab.slab_id in self._roomy.get(slab.group, {})):
                yield f"slab {slab.slab_id}: has room and is not offered, or the other way round"
