"""What goes next, and which slab can be emptied at the least loss. Decides; `table` evicts."""

from collections.abc import Iterable
from heapq import nsmallest
from operator import attrgetter
from typing import cast

from kvstore.replica import Replica
from kvstore.slab import Slab
from kvstore.types import State

SLABS_TRIED = 8  # slabs looked into for one that can be emptied, those used longest ago first


def next_to_go(coldest: Replica, most_bytes: int) -> list[Replica]:
    """`coldest`, then those before it in its chain, as long as nothing else hangs on them or used them later.

    It stops at `most_bytes`, or at what is held or pinned otherwise.
    """
    found = [coldest]
    replica = coldest
    most_bytes -= replica.size
    while most_bytes > 0 and replica.parent is not None:
        above = replica.space.replicas.get(replica.parent)
        has_siblings = replica.next_sibling is not None or replica.previous_sibling is not None
        if above is None or has_siblings or above.state is not State.WRITTEN or above.holders:
            break
        if above.last_use > coldest.last_use or bool(above.soft_pins) != bool(coldest.soft_pins):
            break
        if above.is_copy != coldest.is_copy:
            break  # they do not go in one order
        found.append(above)
        most_bytes -= above.size
        replica = above
    return found


def victims(slabs: Iterable[Slab], uses: int, *, pinned_too: bool) -> list[Replica]:
    """What to evict, in this order, to empty one of `slabs`: the one whose contents were used longest ago.

    With a block go its descendants, wherever they lie, and it was used whenever one of them was. A copy goes
    without them, and what hangs on it says nothing of its use. Empty when none of the slabs looked into can be
    emptied: something in them or below is held, or softly pinned (unless `pinned_too`). What is found out about a
    slab's use is kept in its `last_use`, `uses` standing for now and being more than any so far, so that the next
    call looks into others.
    """
    candidates = (slab for slab in slabs if not slab.held and (pinned_too or not slab.pinned))
    best: list[Replica] = []
    best_use = uses
    for slab in nsmallest(SLABS_TRIED, candidates, key=attrgetter("last_use")):
        if slab.last_use >= best_use:
            break
        found, last_use = _descendants_first(slab, best_use, uses, pinned_too=pinned_too)
        slab.last_use = max(slab.last_use, last_use)
        if found:
            best, best_use = found, last_use
    return best


def _descendants_first(slab: Slab, before: int, uses: int, *, pinned_too: bool) -> tuple[list[Replica], int]:
    """What must go, each block after its children, and its last use; nothing if that is not `before`."""
    order: list[Replica] = []
    last_use = 0
    seen: set[Replica] = set()
    stack = [(cast(Replica, occupant), False) for occupant in slab.occupants if occupant is not None]
    while stack:
        replica, children_are_in = stack.pop()
        if children_are_in:
            order.append(replica)
        elif replica not in seen:
            if replica.holders or (replica.soft_pins and not pinned_too):
                return [], uses
            last_use = max(last_use, replica.last_use)
            if last_use >= before:
                return [], last_use
            seen.add(replica)
            stack.append((replica, True))
            if not replica.is_copy:
                stack.extend((child, False) for child in replica.space.children_of(replica))
    return order, last_use
