"""The block table: the one owner of every replica's state on a node.

It does no I/O, never waits, takes no lock and reads no clock: each method runs to its end on the
event-loop thread, and `now` is an argument. What must be done about a change (publish it, wake who waits for
it, tell others) is the caller's part: `take_changes` hands over what happened since the last call, in order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count

from kvstore.emptying import next_to_go, victims
from kvstore.errors import InvalidRequest, TierFull
from kvstore.evictable import Evictable, WholeSlabs
from kvstore.gallop import gallop
from kvstore.replica import Replica, Space
from kvstore.slab import Slab
from kvstore.tier_state import Event, Move, Tier, TierShape
from kvstore.types import BlockKey, Cause, Change, GroupKey, Placement, State, TierName

__all__ = ["TRANSITIONS", "BlockTable", "Event", "Move", "Replica", "Space", "Tier", "TierShape"]

TRANSITIONS: dict[tuple[State, State], str] = {
    (State.ALLOCATED, State.WRITTEN): "commit",
    (State.ALLOCATED, State.EVICTED): "abort: the writer is lost, its last bytes may still land",
    (State.WRITTEN, State.EVICTED): "evict or discard",
    (State.EVICTED, State.FREE): "drain: the last holder let go",
}

_NOWHERE = Slab(0)


class BlockTable:
    """Replicas of all spaces of all tiers, fastest first. A tier's capacity is its pool's slabs."""

    def __init__(self, tiers: Mapping[TierName, TierShape]) -> None:
        self.tiers = {name: shape.make(name) for name, shape in tiers.items()}
        self._spaces: dict[tuple[str, int, TierName], Space] = {}
        self._changes: list[Event] = []
        self._versions = count(1)
        self._uses = 0

    def space(self, tenant: str, number: int, tier: TierName) -> Space:
        """Where the replicas of a namespace in a tier are kept; made at first use."""
        key = (tenant, number, tier)
        if key not in self._spaces:
            self._spaces[key] = Space(tenant, number, tier)
        return self._spaces[key]

    def spaces(self) -> Iterator[Space]:
        return iter(self._spaces.values())

    def take_changes(self) -> list[Event]:
        """What happened since the last call, in order. A slot in a REMOVED event may be given out again only
        by a later call, so handling the events before anyone is told of a new slot is early enough."""
        changes, self._changes = self._changes, []
        return changes

    # Writing.

    def allocate(self, space: Space, key: BlockKey, parent: BlockKey | None, size: int) -> Replica | None:
        """Give `key` a slot; the caller is its one writer, and holds it. None when its class has no room.

        A `parent` that stands below `key` itself would make a ring, whose blocks could never go: it is none.
        """
        assert key not in space.replicas, "a block has at most one replica in a tier"
        tier = self.tiers[space.tier]
        group = self._group(space, size)
        if parent is not None and space.descends(parent, key):
            parent = None
        replica = Replica(space, key, parent, _NOWHERE, group, 0, 0, size)
        taken = tier.pool.take(group, replica)
        if taken is None:
            return None
        slab, replica.index, replica.generation = taken
        replica.slab = slab
        replica.group = slab.group or group  # one object for all of a slab
        self._uses += 1
        replica.last_use = slab.last_use = self._uses
        replica.version = next(self._versions)
        slab.held += 1
        space.replicas[key] = replica
        self._count(tier, space.tenant, +group.slot_bytes)
        tier.replicas += 1
        if parent is not None:
            self._adopt(replica, parent)
        return replica

    def restore(self, replica: Replica) -> None:
        """Take up a written replica of an earlier start, whole with its slab, slot and checksum.

        Its key is not in its space, and its slot is nobody's.
        """
        space, slab, key = replica.space, replica.slab, replica.key
        tier = self.tiers[space.tier]
        assert key not in space.replicas
        assert replica.state is State.WRITTEN
        slab.restore(replica.index, replica, replica.generation)
        self._uses += 1
        replica.last_use = slab.last_use = self._uses
        replica.version = next(self._versions)
        space.replicas[key] = replica
        self._count(tier, space.tenant, +replica.group.slot_bytes)
        tier.replicas += 1
        if replica.parent is not None and space.descends(replica.parent, key):
            replica.parent = None
        if replica.parent is not None:
            self._adopt(replica, replica.parent)
        if replica.is_evictable:
            tier.evictable.add(replica)
        self._changes.append(Event(Change.RESTORED, replica))

    def placement(self, space: Space, key: BlockKey) -> Placement | None:
        """What stands in the way of allocating `key`: PRESENT, BUSY or nothing."""
        replica = space.replicas.get(key)
        if replica is None:
            return None
        return Placement.PRESENT if replica.state is State.WRITTEN else Placement.BUSY

    def progress(self, replica: Replica, layers: int) -> None:
        """The first `layers` layers are in place. Never goes back."""
        assert replica.state is State.ALLOCATED
        if layers < replica.layers:
            raise InvalidRequest(f"layers in place go up: {replica.layers}, then {layers}")
        replica.layers = layers
        self._changes.append(Event(Change.PROGRESSED, replica))

    def commit(self, replica: Replica, checksum: int) -> None:
        """The bytes are in place, and the writer lets go."""
        self._move(replica, State.WRITTEN)
        replica.version = next(self._versions)
        replica.checksum = checksum
        self.touch(replica)
        self._changes.append(Event(Change.COMMITTED, replica))
        self.let_go(replica)

    def abort(self, replica: Replica, cause: Cause) -> None:
        """Take the unfinished block out of reach. The writer still holds the slot: `let_go` frees it."""
        assert replica.state is State.ALLOCATED
        self._forget(replica, cause)

    # Reading.

    def readable(self, space: Space, key: BlockKey) -> Replica | None:
        replica = space.replicas.get(key)
        return replica if replica is not None and replica.state is State.WRITTEN else None

    def match(self, spaces: Sequence[Space], keys: Sequence[BlockKey],
              elsewhere: Callable[[BlockKey], bool] | None = None) -> int:  # fmt: skip
        """How many of `keys`, a chain, can be read now, from the first. Changes nothing but recency.

        `elsewhere` says of a key that is not here whether it can be read all the same.

        It gallops: blocks go leaves first, so a block that is here vouches for those before it. Where that
        fails (a parent was discarded) the answer is too high; whoever acquires checks each block.
        """

        def here(position: int) -> Replica | None:
            for space in spaces:
                replica = space.replicas.get(keys[position])
                if replica is not None and replica.state is State.WRITTEN:
                    return replica
            return None

        def found(position: int) -> bool:
            return here(position) is not None or (elsewhere is not None and elsewhere(keys[position]))

        matched = gallop(found, len(keys))
        last = here(matched - 1) if matched else None
        if last is not None:
            self.touch(last)
        return matched

    def touch(self, replica: Replica) -> None:
        """It was used, and with it all before it: a parent takes up its child's recency when that goes."""
        self._uses += 1
        replica.last_use = replica.slab.last_use = self._uses
        if replica.is_evictable:
            self._evictable(replica).touch(replica)

    def use(self, replica: Replica) -> None:
        """Its bytes were used: it is touched, and has shown that it is worth keeping."""
        replica.hits += 1
        self.touch(replica)

    def hold(self, replica: Replica) -> None:
        """Keep its slot until `let_go`."""
        assert replica.state in (State.WRITTEN, State.ALLOCATED)
        if replica.is_evictable:
            self._evictable(replica).remove(replica)
        if not replica.holders:
            replica.slab.held += 1
        replica.holders += 1

    def let_go(self, replica: Replica) -> None:
        assert replica.holders > 0, "let go once for each hold"
        replica.holders -= 1
        if replica.holders:
            return
        replica.slab.held -= 1
        if replica.state is State.EVICTED:
            self._drain(replica)
        elif replica.is_evictable:
            self._evictable(replica).add(replica)

    def soft_pin(self, replica: Replica, step: int) -> None:
        """Evict it after all that is not pinned (+1), or count one wish less (-1), even when it is gone."""
        assert replica.soft_pins + step >= 0, "unpin once for each pin"
        is_evictable = replica.is_evictable
        if is_evictable:
            self._evictable(replica).remove(replica)
        was_pinned = replica.soft_pins > 0
        replica.soft_pins += step
        if replica.state in (State.ALLOCATED, State.WRITTEN):
            replica.slab.pinned += (replica.soft_pins > 0) - was_pinned
        if is_evictable:
            self._evictable(replica).add(replica)

    def mark_copy(self, replica: Replica, *, is_copy: bool) -> None:
        """Whether another node holds the block too, as far as is known: then it may go before its children."""
        assert replica.state in (State.ALLOCATED, State.WRITTEN)
        if replica.is_copy == is_copy:
            return
        if replica.is_evictable:
            self._evictable(replica).remove(replica)
        replica.is_copy = is_copy
        self.tiers[replica.space.tier].copy_bytes += replica.group.slot_bytes * (1 if is_copy else -1)
        if replica.is_evictable:
            self._evictable(replica).add(replica)

    # Making room.

    def coldest(self, tier_name: TierName, tenant: str | None = None) -> Replica | None:
        """What goes next, of one tenant or of all: `Evictable` says which that is."""
        return self.tiers[tier_name].coldest(tenant)

    def evict(self, replica: Replica, cause: Cause) -> None:
        assert replica.is_evictable, "evict only what nobody holds and no child needs"
        self.discard(replica, cause)

    def discard(self, replica: Replica, cause: Cause) -> None:
        """Take a written block out of reach at once, children or not. Holders keep the slot."""
        assert replica.state is State.WRITTEN
        if replica.is_evictable:
            self._evictable(replica).remove(replica)
        self._forget(replica, cause)
        if not replica.holders:
            self._drain(replica)

    def coldest_chain(self, tier_name: TierName, most_bytes: int) -> list[Replica]:
        """What goes next, of one chain, each before its parent; up to `most_bytes`, at least one if there is one."""
        coldest = self.coldest(tier_name)
        return next_to_go(coldest, most_bytes) if coldest is not None else []

    def begin_move(self, replica: Replica) -> Move | None:
        """Take a second slot of its class for a written replica that nobody holds; None when there is no room.

        Both slots are kept until `end_move`, however it ends.
        """
        assert replica.state is State.WRITTEN
        assert not replica.holders
        tier = self.tiers[replica.space.tier]
        taken = tier.pool.take(replica.group, replica)
        if taken is None:
            return None
        move = Move(replica, *taken)
        move.slab.held += 1
        tier.moves.add(move)
        self._count(tier, replica.space.tenant, +replica.group.slot_bytes)
        self.hold(replica)
        return move

    def end_move(self, move: Move, *, is_copied: bool) -> bool:
        """Whether it lies in its new slot from here on: not if it went meanwhile, or somebody else holds it."""
        replica = move.replica
        tier = self.tiers[replica.space.tier]
        tier.moves.remove(move)
        move.slab.held -= 1
        self._count(tier, replica.space.tenant, -replica.group.slot_bytes)
        is_moved = is_copied and replica.state is State.WRITTEN and replica.holders == 1
        if is_moved:
            old_slab, old_index = replica.slab, replica.index
            old_slab.held -= 1
            old_slab.pinned -= replica.soft_pins > 0
            replica.slab, replica.index, replica.generation = move.slab, move.index, move.generation
            move.slab.held += 1
            move.slab.pinned += replica.soft_pins > 0
            move.slab.last_use = max(move.slab.last_use, replica.last_use)
            replica.version = next(self._versions)
            self._changes.append(Event(Change.MOVED, replica))
            tier.pool.give_back(old_slab, old_index)
        else:
            tier.pool.give_back(move.slab, move.index)
        self.let_go(replica)
        return is_moved

    def has_room(self, space: Space, size: int) -> bool:
        """Whether `allocate` would find a slot for a block of `size` bytes."""
        return self.tiers[space.tier].pool.has_room(self._group(space, size))

    def make_room(self, space: Space, size: int, cause: Cause = Cause.PRESSURE) -> None:
        """Free a slot for a block of `size` bytes, or raise TierFull.

        The coldest replica of the tier decides: if it is of the same class its slot is the room, else a slab
        of its class is emptied and given back. What is softly pinned goes when nothing else would do.
        Whether the tenant may have the slab's memory is the tier's part.
        """
        tier = self.tiers[space.tier]
        wanted = self._group(space, size)
        if tier.pool.has_room(wanted) or tier.pool.dirty(space.tenant) is not None:
            return
        own = tier.coldest_of(wanted)
        coldest = tier.coldest()
        if coldest is not None and coldest is not own:
            slabs = tier.pool.of_group(coldest.group)
            if self._empty_slab(slabs, Cause.SLAB_TAKEN, pinned_too=False):
                return
        if own is not None and not own.soft_pins:
            self.evict(own, cause)
        elif self._empty_slab(tier.pool.in_use(), Cause.SLAB_TAKEN, pinned_too=False):
            return
        elif own is not None:
            self.evict(own, cause)
        elif not self._empty_slab(tier.pool.in_use(), Cause.SLAB_TAKEN, pinned_too=True):
            raise TierFull(f"{space.tier}: no room for {size} bytes, and no slab can be emptied")

    def empty_coldest_slab(self, tier_name: TierName, cause: Cause) -> bool:
        """Evict all of the slab used longest ago, of those that can be emptied; False if none can."""
        slabs = list(self.tiers[tier_name].pool.in_use())
        return any(self._empty_slab(slabs, cause, pinned_too=pinned_too) for pinned_too in (False, True))

    # State.

    def _move(self, replica: Replica, state: State) -> None:
        assert (replica.state, state) in TRANSITIONS, f"{replica.state} -> {state}"
        replica.state = state

    def _group(self, space: Space, size: int) -> GroupKey:
        return self.tiers[space.tier].group(space.tenant, size)

    def _evictable(self, replica: Replica) -> Evictable | WholeSlabs:
        return self.tiers[replica.space.tier].evictable

    def _empty_slab(self, slabs: Iterable[Slab], cause: Cause, *, pinned_too: bool) -> bool:
        self._uses += 1
        doomed = victims(slabs, self._uses, pinned_too=pinned_too)
        for replica in doomed:
            self.evict(replica, cause)
        return bool(doomed)

    def _forget(self, replica: Replica, cause: Cause) -> None:
        """No new reader can find it from here on."""
        self._move(replica, State.EVICTED)
        tier = self.tiers[replica.space.tier]
        del replica.space.replicas[replica.key]
        tier.draining.add(replica)
        tier.replicas -= 1
        if replica.soft_pins:
            replica.slab.pinned -= 1
        if replica.parent is not None:
            self._orphan(replica, replica.parent)
        self._changes.append(Event(Change.REMOVED, replica, cause))

    def _drain(self, replica: Replica) -> None:
        self._move(replica, State.FREE)
        tier = self.tiers[replica.space.tier]
        tier.draining.remove(replica)
        self._count(tier, replica.space.tenant, -replica.group.slot_bytes)
        tier.copy_bytes -= replica.group.slot_bytes if replica.is_copy else 0
        tier.pool.give_back(replica.slab, replica.index)
        if not tier.pool.has_slabs(replica.group):
            tier.evictable.drop(replica.group)

    @staticmethod
    def _count(tier: Tier, tenant: str, step: int) -> None:
        tier.used_bytes += step
        tier.tenant_bytes[tenant] = tier.tenant_bytes.get(tenant, 0) + step

    def _adopt(self, replica: Replica, parent_key: BlockKey) -> None:
        """Count a child in: its parent may not be evicted before it, unless that is a copy."""
        parent = replica.space.replicas.get(parent_key)
        if parent is not None:
            replica.depth = parent.depth + 1
            if parent.is_evictable and not parent.is_copy:
                self._evictable(parent).remove(parent)
        replica.space.add_child(replica, parent_key)

    def _orphan(self, replica: Replica, parent_key: BlockKey) -> None:
        """Count a child out: its parent takes up its recency, and after the last one may be evicted."""
        replica.space.remove_child(replica, parent_key)
        parent = replica.space.replicas.get(parent_key)
        if parent is None:
            return
        if is_used_later := replica.last_use > parent.last_use:
            parent.last_use = replica.last_use
        parent.hits = max(parent.hits, replica.hits)
        parent.slab.last_use = max(parent.slab.last_use, parent.last_use)
        if parent.is_evictable and not parent.is_copy:
            self._evictable(parent).add(parent)
        elif parent.is_evictable and is_used_later:  # it was listed already
            self._evictable(parent).touch(parent)
