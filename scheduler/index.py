"""What prefixes the holders have: block name -> which of them have it in which tier, for tens of millions of blocks.

A hint, and never more: it may not know of a block, and what it says may be over. Where there are more different sets of
holders than there is room for, it forgets blocks (`dropped` counts them) and never says what it was not told.
"""

from collections.abc import Iterator
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.holder_sets import NO_SET, NOTHING, TIERS, HolderSets
from scheduler.name_table import Hashes, NameTable, Slots, Values, hashes_of
from scheduler.requests import Names

HOLDERS_MOST: Final = 4096
BATCH: Final = 1 << 16  # names that are changed at a time
LOOKED_UP: Final = 1024  # names at first; the rest only if somebody has all of these


class PrefixIndex:
    """Holders by number, and what each has. `dropped`: blocks that it should know of a holder, and does not."""

    def __init__(self) -> None:
        self._holders: dict[str, int] = {}
        self._free: list[int] = []
        self._names = NameTable()
        self._sets = HolderSets()
        self.dropped = 0

    @property
    def holders(self) -> dict[str, int]:
        """Numbers by name, of those that have one."""
        return dict(self._holders)

    @property
    def blocks(self) -> int:
        """Different blocks."""
        return len(self._names)

    @property
    def holdings(self) -> int:
        """Pairs of a block and a holder."""
        return self._sets.holdings

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return self._names.nbytes + self._sets.nbytes

    def holder(self, name: str) -> int:
        """Its number, a new one if it has none. Raises ValueError when 4,096 have one."""
        number = self._holders.get(name)
        if number is None:
            if not self._free and len(self._holders) == HOLDERS_MOST:
                raise ValueError(f"{HOLDERS_MOST} holders have numbers: none is left for {name}")
            number = self._holders[name] = self._free.pop() if self._free else len(self._holders)
            self._sets.widen(number + 1)
        return number

    def release(self, name: str) -> None:
        """A holder that will not come back: all its blocks go, and its number may be given to another one."""
        number = self._holders.get(name)
        if number is not None:
            self.forget(number)
            self._free.append(self._holders.pop(name))

    def forget(self, holder: int) -> None:
        """All its blocks go; it keeps its number."""
        after, lost = self._sets.forget(holder)
        blocks = self.blocks
        self._names.rewrite(after)
        assert self.blocks == blocks - lost

    def stored(self, holder: int, tier: int, names: Names) -> None:
        """It has these blocks in that tier, and where it had them before."""
        for hashes in self._batches(holder, tier, names):
            self._store(holder, tier, hashes)

    def removed(self, holder: int, tier: int, names: Names) -> None:
        """It has these blocks in that tier no more."""
        for hashes in self._batches(holder, tier, names):
            self._remove(holder, tier, hashes)

    def prefixes(self, names: Names) -> NDArray[np.int32]:
        """`[holders, 3]`, by number: how many of a chain's blocks, from the first on without a gap, each holder has in
        HBM, in HBM or DRAM, in any tier. The row of a number that nobody has is 0."""
        holders = len(self._holders) + len(self._free)
        if not holders or not len(names):
            return np.zeros((holders, TIERS), np.int32)
        head = self._prefixes(names[:LOOKED_UP], holders)
        if len(names) <= LOOKED_UP or head[:, -1].max() < LOOKED_UP:
            return head
        return self._prefixes(names, holders)
