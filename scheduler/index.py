"""What prefixes the holders have: block name -> which of them have it in which tier, for tens of millions of blocks.

A hint, and never more: it may not know of a block, and what it says may be over. Where there are more different sets of
holders than there is room for, it forgets blocks (`dropped` counts them) and never says what it was not told.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.holder_sets import NO_SET, NOTHING, TIERS, HolderSets
from scheduler.name_table import Hashes, NameTable, Slots, Values, hashes_of
from scheduler.requests import Names

HOLDERS_MOST: Final = 4096
BATCH: Final = 1 << 13  # names that are changed at a time: what they need fits into a core's cache


class PrefixIndex:
    """Holders by number, and what each has.

    dropped: pairs of a block and a holder that it was told of and has forgotten, at most; while 0, it is exact.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._holders: list[str | None] = []  # by number
        self._names = NameTable()
        self._sets = HolderSets()
        self.dropped = 0

    @property
    def holders(self) -> list[str | None]:
        """Names by number; None where it is free."""
        return self._holders.copy()

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
        number = self._numbers.get(name)
        if number is None:
            if len(self._numbers) == HOLDERS_MOST:
                raise ValueError(f"{HOLDERS_MOST} holders have numbers: none is left for {name}")
            if len(self._numbers) == len(self._holders):
                self._holders.append(None)
                self._sets.widen(len(self._holders))
            number = self._numbers[name] = self._holders.index(None)
            self._holders[number] = name
        return number

    def release(self, name: str) -> None:
        """A holder that will not come back: all its blocks go, and its number may be given to another one."""
        number = self._numbers.get(name)
        if number is not None:
            self.forget(number)
            del self._numbers[name]
            self._holders[number] = None

    def forget(self, holder: int) -> None:
        """All its blocks go; it keeps its number. Goes through all blocks."""
        after, dropped = self._sets.forget(holder)
        self.dropped += dropped
        if (after != np.arange(len(after))).any():
            self._names.rewrite(after)

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
        return self._sets.prefixes(self._names.lookup(hashes_of(names)), len(self._holders))

    def check(self) -> list[str]:
        """What is broken, each as a sentence; nothing, if all is well. Goes through all blocks."""
        found = [*self._names.check(), *self._sets.check(self._names.all_values())]
        if self._numbers != {name: number for number, name in enumerate(self._holders) if name is not None}:
            found.append("the names of holders and their numbers differ")
        return found

    def _batches(self, holder: int, tier: int, names: Names) -> Iterator[Hashes]:
        """Each name once, ascending by hash: so a batch goes through memory in order."""
        assert 0 <= tier < TIERS, tier
        assert self._holders[holder] is not None, holder
        for first in range(0, len(names), BATCH):
            hashes = np.sort(hashes_of(names[first : first + BATCH]))
            is_first = np.ones(len(hashes), np.bool_)
            np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
            yield hashes[is_first]

    def _store(self, holder: int, tier: int, hashes: Hashes) -> None:
        slots = self._names.find(hashes, room=len(hashes))
        is_known = slots >= 0
        known = slots[is_known]
        before = np.zeros(len(hashes), np.uint32)
        before[is_known] = self._names.values[known]
        sets, which, blocks = _distinct(before)
        changed = self._sets.changed(sets, holder, tier, is_there=True)
        is_refused = changed == NO_SET
        self.dropped += int(blocks[is_refused].sum())
        changed[is_refused] = sets[is_refused]
        self._sets.count(sets, changed, blocks)
        after = changed[which]
        self._names.values[known] = after[is_known]
        is_new = ~is_known & (after != NOTHING)
        self._names.put(hashes[is_new], after[is_new])

    def _remove(self, holder: int, tier: int, hashes: Hashes) -> None:
        slots = self._names.find(hashes)
        slots = slots[slots >= 0]
        if not len(slots):
            return
        sets, which, blocks = _distinct(self._names.values[slots])
        changed = self._sets.changed(sets, holder, tier, is_there=False)
        is_refused = changed == NO_SET
        self.dropped += int((blocks * self._sets.holders(sets))[is_refused].sum())
        changed[is_refused] = NOTHING
        self._sets.count(sets, changed, blocks)
        after = changed[which]
        self._names.values[slots] = after
        self._names.clear(slots[after == NOTHING])


def _distinct(values: Values) -> tuple[Values, Slots, NDArray[np.int64]]:
    """The different ones, where each of `values` is among them, and how often each is there."""
    if (values == values[0]).all():
        return values[:1].copy(), np.zeros(len(values), np.int64), np.array([len(values)])
    found, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return found, which, counts
