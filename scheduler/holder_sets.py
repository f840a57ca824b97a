"""Which holders have a block in which tiers: each such set once, under a number, however many blocks have it.

A set is a bit mask for each tier, one bit for each holder. It is found again by its hash: the xor of a number for each
holder and tier in it, so that the hash of a set with one more or one less is known before the set is made.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.name_table import NameTable, Values, hashes_of

TIERS: Final = 3
SETS_MOST: Final = 1 << 20
SETS_BYTES: Final = 256 << 20  # of masks, at most; 64 holders: 11 M sets, 4,096 holders: 174 thousand
NOTHING: Final = 0  # the set of no holders
NO_SET: Final = 0xFFFFFFFF  # there are too many already
_WORD: Final = 64
_SETS_FIRST: Final = 64

Masks = NDArray[np.uint64]


class HolderSets:
    """Sets by number. Blocks are counted in `count`; a set that no block has is gone, and its number is used again."""

    def __init__(self) -> None:
        self._masks: Masks = np.zeros((_SETS_FIRST, TIERS, 1), np.uint64)
        self._hashes = np.zeros(_SETS_FIRST, np.uint64)
        self._blocks = np.zeros(_SETS_FIRST, np.int64)
        self._holders = np.zeros(_SETS_FIRST, np.int32)
        self._numbers = NameTable()  # by hash
        self._free = list(range(_SETS_FIRST - 1, 0, -1))
        self.holdings = 0  # pairs of a block and a holder

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def nbytes(self) -> int:
        arrays = (self._masks, self._hashes, self._blocks, self._holders)
        return sum(array.nbytes for array in arrays) + self._numbers.nbytes + 8 * len(self._free)

    @property
    def most(self) -> int:
        """Sets that there may be, with as many holders as now."""
        return min(SETS_MOST, SETS_BYTES // (self._masks[0].nbytes))

    def widen(self, holders: int) -> None:
        """Make masks long enough for so many."""
        words = self._masks.shape[2]
        if holders > words * _WORD:
            more = max(words, -(-holders // _WORD) - words)
            self._masks = np.pad(self._masks, ((0, 0), (0, 0), (0, more)))

    def changed(self, numbers: Values, holder: int, tier: int, *, is_there: bool) -> Values:
        """Of each set, given once: the set that has the holder in that tier too, or no more. Makes those that are new.

        NO_SET where there is no room for another. What `count` is not told of before the next call may go.
        """
        word, bit = divmod(holder, _WORD)
        flag = np.uint64(1 << bit)
        words = self._masks[numbers, :, word]
        after = numbers.copy()
        moves = np.flatnonzero(((words[:, tier] & flag) != 0) != is_there)
        if not len(moves):
            return after
        before, words = numbers[moves], words[moves]
        had = (words & flag).any(axis=1).astype(np.int32)
        words[:, tier] ^= flag
        holders = self._holders[before] + (words & flag).any(axis=1) - had
        hashes = self._hashes[before] ^ _hash_of(holder, tier)
        found = self._numbers.lookup(_in_table(hashes))
        found[holders == 0] = NOTHING
        missing = np.flatnonzero((found == 0) & (holders > 0))
        made = self._make(len(missing))
        missing, rest = missing[: len(made)], missing[len(made) :]
        found[rest] = NO_SET
        found[missing] = made
        self._masks[made] = self._masks[before[missing]]
        self._masks[made, tier, word] ^= flag
        self._hashes[made] = hashes[missing]
        self._holders[made] = holders[missing]
        self._enter(made)
        found[self._differs(before, found, tier, word, flag)] = NO_SET
        after[moves] = found
        return after

    def count(self, before: Values, after: Values, blocks: NDArray[np.int64]) -> None:
        """So many blocks had a set and have another now. Sets that no block has any more go."""
        np.add.at(self._blocks, after, blocks)
        np.subtract.at(self._blocks, before, blocks)
        gained = self._holders[after].astype(np.int64) - self._holders[before]
        self.holdings += int((gained * blocks).sum())
        self._blocks[NOTHING] = 0
        touched = np.unique(np.concatenate([before, after]))
        self._drop(touched[(self._blocks[touched] == 0) & (touched != NOTHING)])

    def forget(self, holder: int) -> tuple[Values, int]:
        """Take a holder out of all sets: by number, the set that each has become; and the blocks that are left with none.

        Sets that have become equal are one from now on.
        """
        word, bit = divmod(holder, _WORD)
        flag = np.uint64(1 << bit)
        after = np.arange(len(self._blocks), dtype=np.uint32)
        told = (self._masks[:, :, word] & flag) != 0
        numbers = np.flatnonzero(told.any(axis=1)).astype(np.uint32)
        if not len(numbers):
            return after, 0
        self.holdings -= int(self._blocks[numbers].sum())
        self._leave(numbers)
        self._masks[numbers, :, word] &= ~flag
        for tier in range(TIERS):
            self._hashes[numbers[told[numbers, tier]]] ^= _hash_of(holder, tier)
        self._holders[numbers] -= 1
        lost = numbers[self._holders[numbers] == 0]
        blocks = int(self._blocks[lost].sum())
        after[lost] = NOTHING
        left = numbers[self._holders[numbers] > 0]
        hashes, first = np.unique(self._hashes[left], return_index=True)
        new = self._numbers.lookup(_in_table(hashes)) == 0
        self._enter(left[first[new]])
        after[left] = self._numbers.lookup(_in_table(self._hashes[left]))
        merged = left[after[left] != left]
        np.add.at(self._blocks, after[merged], self._blocks[merged])
        self._wipe(np.concatenate([lost, merged]))
        return after, blocks

    def prefixes(self, numbers: Values, holders: int) -> NDArray[np.int32]:
        """`[holders, 3]`: from the first of these sets on, how many in a row have each holder in a tier, or a faster one.

        numbers: of the blocks of a chain, NOTHING where a block is not known.
        """
        words = self._masks.shape[2]
        starts, lengths = _runs(numbers)
        masks = self._masks[numbers[starts]].reshape(len(starts), TIERS * words).T.copy()
        masks[words : 2 * words] |= masks[:words]
        masks[2 * words :] |= masks[words : 2 * words]
        np.bitwise_and.accumulate(masks, axis=1, out=masks)
        is_new = np.flatnonzero((masks[:, 1:] != masks[:, :-1]).any(axis=0)) + 1
        firsts = np.concatenate([[0], is_new])
        blocks = np.add.reduceat(lengths, firsts)
        rows = np.ascontiguousarray(masks[:, firsts].T).view(np.uint8)
        bits = np.unpackbits(rows, axis=1, bitorder="little").astype(np.float32)  # exact: a chain is below 2^24 blocks
        counted = (blocks.astype(np.float32) @ bits).astype(np.int32)
        return np.ascontiguousarray(counted.reshape(TIERS, words * _WORD)[:, :holders].T)

    def check(self, values: Values) -> Iterator[str]:
        """What is broken, each as a sentence; values: the sets of all blocks."""
        yield from self._numbers.check()
        numbers = self._numbers.all_values()
        every = np.sort(np.concatenate([numbers, np.array(self._free, np.uint32), np.zeros(1, np.uint32)]))
        if not np.array_equal(every, np.arange(len(self._blocks))):
            yield "the numbers in use and those that are free are not all numbers, each once"
        counts = np.bincount(values, minlength=len(self._blocks))
        if len(counts) > len(self._blocks) or (counts != self._blocks).any():
            yield "blocks are counted for another set than they have"
        if (self._blocks[numbers] <= 0).any():
            yield "a set that no block has is still there"
        if (self._numbers.lookup(_in_table(self._hashes[numbers])) != numbers).any():
            yield "a set is not found by its hash"
        bits = np.unpackbits(np.ascontiguousarray(self._masks).view(np.uint8), axis=2, bitorder="little")
        if (bits.any(axis=1).sum(axis=1) != self._holders).any():
            yield "the holders of a set are counted wrong"
        if self._masks[self._blocks == 0].any() or self._hashes[self._blocks == 0].any():
            yield "a free number has a mask"
        for number in numbers[:1000]:
            tiers, holders = np.nonzero(bits[number])
            pairs = zip(holders.tolist(), tiers.tolist(), strict=True)
            if np.bitwise_xor.reduce([_hash_of(*pair) for pair in pairs]) != self._hashes[number]:
                yield f"set {number} has the hash of another"
        if self.holdings != int((counts * self._holders[: len(counts)]).sum()):
            yield f"{self.holdings} holdings are counted, which is not the sum over all blocks"

    def _make(self, wanted: int) -> Values:
        """Numbers for new sets; fewer where there may not be so many."""
        wanted = max(0, min(wanted, self.most - len(self)))
        size = len(self._blocks)
        if wanted > len(self._free):
            grown = max(size * 3 // 2, size + wanted)
            more = grown - size
            self._masks = np.concatenate([self._masks, np.zeros((more, *self._masks.shape[1:]), np.uint64)])
            self._hashes = np.concatenate([self._hashes, np.zeros(more, np.uint64)])
            self._blocks = np.concatenate([self._blocks, np.zeros(more, np.int64)])
            self._holders = np.concatenate([self._holders, np.zeros(more, np.int32)])
            self._free = [*range(grown - 1, size - 1, -1), *self._free]
        made = self._free[len(self._free) - wanted :]
        del self._free[len(self._free) - wanted :]
        return np.array(made, np.uint32)

    def _differs(
        self, before: Values, found: Values, tier: int, word: int, flag: np.uint64
    ) -> NDArray[np.bool_]:
        """Where the set that was found by its hash is another one: as good as never, but a wrong one would stay."""
        known = np.where(found == NO_SET, NOTHING, found)
        masks = self._masks[before]
        masks[:, tier, word] ^= flag
        differs: NDArray[np.bool_] = (masks != self._masks[known]).any(axis=(1, 2))
        return differs

    def _enter(self, numbers: Values) -> None:
        """So that they are found by their hashes."""
        hashes = _in_table(self._hashes[numbers])
        self._numbers.find(hashes, room=len(hashes))
        self._numbers.put(hashes, numbers)

    def _leave(self, numbers: Values) -> None:
        self._numbers.clear(self._numbers.find(_in_table(self._hashes[numbers])))

    def _drop(self, numbers: Values) -> None:
        if len(numbers):
            self._leave(numbers)
            self._wipe(numbers)

    def _wipe(self, numbers: Values) -> None:
        """Numbers that are not found any more are free."""
        self._masks[numbers] = 0
        self._hashes[numbers] = 0
        self._blocks[numbers] = 0
        self._holders[numbers] = 0
        self._free += numbers.tolist()


def _hash_of(holder: int, tier: int) -> np.uint64:
    return np.uint64(hashes_of(np.array([holder * TIERS + tier + 1], np.uint64))[0])


def _in_table(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes of sets as a table takes them."""
    return np.maximum(hashes, np.uint64(2))


def _runs(numbers: Values) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each run of equal numbers begins, and how long it is."""
    starts = np.concatenate([[0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1])
    return starts, np.diff(starts, append=len(numbers))
