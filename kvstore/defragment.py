"""Fewer slabs for the same blocks, in idle moments: a slab is emptied into the free slots of the others of its class.

    slab 3    | a | b |   |   |        | a | b | e |   |
    slab 7    | c |   | d |   |   ->   | c | f | d |   |
    slab 9    |   | e |   | f |        spare

Only in a tier in which no slab is spare: elsewhere nobody gains by it. Only blocks that nobody holds move. Readers that
hold nothing look at a published entry before and after: it names the new slot before the old one can be another's.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import attrgetter
from typing import cast

from kvstore.slab import Slab, SlabPool
from kvstore.table import BlockTable, Move, Replica
from kvstore.types import Slot, TierName

log = logging.getLogger("cairn.defragment")

IDLE_S = 0.1  # without a request or a local read
STEP_BYTES = 4 << 20  # below 1 ms of copying, and what is held meanwhile

Copy = Callable[[Sequence[tuple[Slot, Slot, int]]], Awaitable[None]]
"""Copy `size` bytes for each (source, target, size). Raises OSError; cancelled, it ends when nothing moves any more."""


class Defragment:
    """`copies` by tier; `asked` changes whenever a client asks for or reads anything; `settle` makes known what the
    table changed."""

    def __init__(self, table: BlockTable, copies: Mapping[TierName, Copy], *,
                 asked: Callable[[], object], settle: Callable[[], None]) -> None:  # fmt: skip
        self._table = table
        self._copies = copies
        self._asked = asked
        self._settle = settle
        self.moved_blocks: Counter[TierName] = Counter()

    async def keep(self) -> None:
        """Until cancelled: step after step while nobody asks for anything, until there is nothing left to gain."""
        asked, done = self._asked(), None
        while True:
            await asyncio.sleep(IDLE_S)
            before, asked = asked, self._asked()
            if asked != before or asked == done:
                continue
            while asked == self._asked() and await self.step():
                pass
            done = asked

    async def step(self) -> bool:
        """Move a few MiB out of one slab of one tier; whether there was anything to move."""
        for tier_name, copy in self._copies.items():
            pool = self._table.tiers[tier_name].pool
            slab = _superfluous(pool)
            if slab is None:
                continue
            moved = await self._move(copy, self._begin(pool, slab))
            self.moved_blocks[tier_name] += moved
            return moved > 0
        return False

    def _begin(self, pool: SlabPool, slab: Slab) -> list[Move]:
        moves: list[Move] = []
        left = STEP_BYTES
        pool.set_apart(slab)  # or its own free slots would be taken
        try:
            for occupant in slab.occupants:
                if occupant is None:
                    continue
                replica = cast(Replica, occupant)
                move = self._table.begin_move(replica) if left > 0 else None
                if move is None:
                    break
                moves.append(move)
                left -= replica.size
        finally:
            pool.rejoin(slab)
        return moves

    async def _move(self, copy: Copy, moves: Sequence[Move]) -> int:
        """How many of the blocks lie in their new slots from here on."""
        is_copied = False
        try:
            await copy([(move.replica.slot, move.target, move.replica.size) for move in moves])
            is_copied = True
        except OSError as error:
            log.error("blocks stay where they are: %s", error)
        finally:
            moved = sum(self._table.end_move(move, is_copied=is_copied) for move in moves)
            self._settle()  # before anybody can be given an old slot
        return moved


def _superfluous(pool: SlabPool) -> Slab | None:
    """The slab with the fewest blocks of those that nobody holds any block of, if the others have room for them."""
    if next(pool.spare(), None) is not None:
        return None
    found = []
    for group in pool.groups():
        slabs = [slab for slab in pool.of_group(group) if not pool.is_apart(slab)]
        free_slots = sum(slab.slots - slab.used for slab in slabs)
        loose = (slab for slab in slabs if not slab.held)
        slab = min(loose, key=attrgetter("used"), default=None)
        if slab is not None and slab.used <= free_slots - (slab.slots - slab.used):
            found.append(slab)
    return min(found, key=attrgetter("used"), default=None)
