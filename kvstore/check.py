"""Fsck of a live node: what the table, the slabs and the holds say must agree. It only reads."""

from collections import Counter
from collections.abc import Iterable, Iterator

from kvstore.holds import Holds
from kvstore.replica import Replica, Space
from kvstore.table import BlockTable, Tier
from kvstore.types import State


def check(table: BlockTable, holds: Holds, own: Iterable[Replica] = ()) -> Iterator[str]:
    """Yield what is wrong, a sentence each; nothing when all is well. `own` is what the node holds. O(replicas)."""
    held = Counter(holds.held())
    held.update(own)
    held.update(move.replica for tier in table.tiers.values() for move in tier.moves)
    for tier in table.tiers.values():
        spaces = [space for space in table.spaces() if space.tier == tier.name]
        live = [replica for space in spaces for replica in space.replicas.values()]
        yield from _check_slots(tier, live)
        yield from _check_slabs(tier, live)
        yield from _check_bytes(tier, live)
        yield from _check_families(spaces, live)
        for replica in (*live, *tier.draining):
            if replica.holders != held[replica]:
                yield f"{replica.key.hex()}: counts {replica.holders} holders, and {held[replica]} hold it"
        for replica in tier.draining:
            if replica in tier.evictable:
                yield f"{replica.key.hex()}: is gone, and is offered for eviction"
        for replica in live:
            listed = replica in tier.evictable
            if listed != replica.is_evictable:
                yield f"{replica.key.hex()}: {'is' if listed else 'is not'} offered for eviction, wrongly"
            if replica.state not in (State.ALLOCATED, State.WRITTEN):
                yield f"{replica.key.hex()}: can be found, and is {replica.state.value}"


def _check_slots(tier: Tier, live: list[Replica]) -> Iterator[str]:
    yield from tier.pool.check()
    for replica in (*live, *tier.draining):
        if replica.slab.occupants[replica.index] is not replica:
            yield f"{replica.key.hex()}: its slot {replica.slab.slab_id}/{replica.index} is another's"
    occupied = sum(sum(1 for occupant in slab.occupants if occupant) for slab in tier.pool.in_use())
    wanted = len(live) + len(tier.draining) + len(tier.moves)
    if occupied != wanted:
        yield f"{tier.name}: {occupied} slots in use by {wanted} live and draining replicas"
    if tier.replicas != len(live):
        yield f"{tier.name}: counts {tier.replicas} replicas, and has {len(live)}"


def _check_slabs(tier: Tier, live: list[Replica]) -> Iterator[str]:
    held: Counter[int] = Counter()
    pinned: Counter[int] = Counter()
    for replica in (*live, *tier.draining):
        held[replica.slab.slab_id] += replica.holders > 0
    for replica in live:
        pinned[replica.slab.slab_id] += replica.soft_pins > 0
        if replica.slab.last_use < replica.last_use:
            yield f"{replica.key.hex()}: was used after its slab"
    for move in tier.moves:
        held[move.slab.slab_id] += 1
    for slab in tier.pool.in_use():
        if (slab.held, slab.pinned) != (held[slab.slab_id], pinned[slab.slab_id]):
            yield f"slab {slab.slab_id}: counts {slab.held} held and {slab.pinned} pinned blocks, wrongly"


def _check_bytes(tier: Tier, live: list[Replica]) -> Iterator[str]:
    used: Counter[str] = Counter()
    for replica in (*live, *tier.draining):
        used[replica.space.tenant] += replica.group.slot_bytes
        if replica.slab.group is None or replica.slab.group.tenant != replica.space.tenant:
            yield f"{replica.key.hex()}: lies in a slab of {replica.slab.group}"
    copies = sum(replica.group.slot_bytes for replica in (*live, *tier.draining) if replica.is_copy)
    if copies != tier.copy_bytes:
        yield f"{tier.name}: counts {tier.copy_bytes} bytes of copies, and has {copies}"
    for move in tier.moves:
        used[move.replica.space.tenant] += move.replica.group.slot_bytes
    if used.total() != tier.used_bytes:
        yield f"{tier.name}: counts {tier.used_bytes} bytes in use, and has {used.total()}"
    for tenant in used.keys() | tier.tenant_bytes.keys():
        counted = tier.tenant_bytes.get(tenant, 0)
        if used[tenant] != counted:
            yield f"{tier.name}: counts {counted} bytes of {tenant}, not {used[tenant]}"


def _check_families(spaces: list[Space], live: list[Replica]) -> Iterator[str]:
    expected = Counter((id(replica.space), replica.parent) for replica in live if replica.parent is not None)
    counted: Counter[tuple[int, bytes | None]] = Counter()
    for space in spaces:
        for parent_key, first in space.first_child.items():
            before: Replica | None = None
            child: Replica | None = first
            while child is not None:
                counted[id(space), parent_key] += 1
                if child.parent != parent_key or child.previous_sibling is not before:
                    yield f"{child.key.hex()}: its family is out of order"
                before, child = child, child.next_sibling
    if expected != counted:
        yield f"counts {counted.total()} children, and has {expected.total()}"
