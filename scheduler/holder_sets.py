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
        self._free = np.arange(_SETS_FIRST - 1, -1, -1, dtype=np.uint32)  # numbers, up to `_idle`; NOTHING is the next
        self._idle = _SETS_FIRST - 1
        self.holdings = 0  # pairs of a block and a holder

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def nbytes(self) -> int:
        arrays = (self._masks, self._hashes, self._blocks, self._holders, self._free)
        return sum(int(array.nbytes) for array in arrays) + self._numbers.nbytes

    @property
    def most(self) -> int:
        """Sets that there may be, with as many holders as now."""
        return min(SETS_MOST, SETS_BYTES // int(self._masks[0].nbytes))

    def holders(self, numbers: Values) -> NDArray[np.int32]:
        """How many are in each."""
        return self._holders[numbers]

    def widen(self, holders: int) -> None:
        """Make masks long enough for so many."""
        words = self._masks.shape[2]
        if holders > words * _WORD:
            more = max(words, -(-holders // _WORD) - words)
            self._masks = np.pad(self._masks, ((0, 0), (0, 0), (0, more)))

    def changed(self, numbers: Values, holder: int, tier: int, *, is_there: bool) -> Values:
        """Of each set, given once: the set that has the holder in that tier too, or no more. Makes those that are new.

        NO_SET where there is no room for another. `count` must hear of the sets that were made.
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
        missing = np.flatnonzero((self._numbers.lookup(_in_table(hashes)) == 0) & (holders > 0))
        missing = missing[np.unique(_in_table(hashes[missing]), return_index=True)[1]]
        made = self._make(len(missing))
        missing = missing[: len(made)]
        self._masks[made] = self._masks[before[missing]]
        self._masks[made, tier, word] ^= flag
        self._hashes[made] = hashes[missing]
        self._holders[made] = holders[missing]
        self._enter(made)
        found = self._numbers.lookup(_in_table(hashes))
        found[holders == 0] = NOTHING
        masks = self._masks[before]
        masks[:, tier, word] ^= flag
        found[_differ(masks, self._masks[found])] = NO_SET
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
        """Take a holder out of all sets: the set that each number means now, and how many holdings of others are lost.

        Sets that have become equal are one from now on.
        """
        word, bit = divmod(holder, _WORD)
        flag = np.uint64(1 << bit)
        after = np.arange(len(self._blocks), dtype=np.uint32)
        told = (self._masks[:, :, word] & flag) != 0
        numbers = np.flatnonzero(told.any(axis=1)).astype(np.uint32)
        self._leave(numbers)
        self._masks[numbers, :, word] &= ~flag
        for tier in range(TIERS):
            self._hashes[numbers[told[numbers, tier]]] ^= _hash_of(holder, tier)
        self._holders[numbers] -= 1
        self.holdings -= int(self._blocks[numbers].sum())
        left = numbers[self._holders[numbers] > 0]
        hashes, first = np.unique(_in_table(self._hashes[left]), return_index=True)
        self._enter(left[first[self._numbers.lookup(hashes) == 0]])
        found = self._numbers.lookup(_in_table(self._hashes[left]))
        differs = _differ(self._masks[left], self._masks[found])
        lost = left[differs]
        dropped = int((self._blocks[lost] * self._holders[lost]).sum())
        self.holdings -= dropped
        found[differs] = NOTHING
        after[numbers] = NOTHING
        after[left] = found
        gone = numbers[after[numbers] != numbers]
        np.add.at(self._blocks, after[gone], self._blocks[gone])
        self._blocks[NOTHING] = 0
        self._wipe(gone)
        return after, dropped

    def prefixes(self, numbers: Values, holders: int) -> NDArray[np.int32]:
        """`[holders, 3]`: how many of these sets, from the first on without a gap, have each holder in a tier or above.

        numbers: of the blocks of a chain, NOTHING where a block is not known.
        """
        words = self._masks.shape[2]
        missing = np.flatnonzero(numbers == NOTHING)
        numbers = numbers[: missing[0]] if len(missing) else numbers
        counts = np.zeros(TIERS * words * _WORD, np.int32)
        if len(numbers):
            starts = np.concatenate([[0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1])
            masks = np.ascontiguousarray(self._masks[numbers[starts]].reshape(len(starts), -1).T)
            masks[words : 2 * words] |= masks[:words]
            masks[2 * words :] |= masks[words : 2 * words]
            np.bitwise_and.accumulate(masks, axis=1, out=masks)
            counts[_bits(masks[:, -1])] = len(numbers)
            ends = masks[:, :-1] ^ masks[:, 1:]  # a bit that is set: here a prefix ends; each ends once
            rows, runs = np.nonzero(ends)
            places = _bits(ends[rows, runs])
            counts[rows[places // _WORD] * _WORD + places % _WORD] = starts[runs[places // _WORD] + 1]
        return np.ascontiguousarray(counts.reshape(TIERS, words * _WORD)[:, :holders].T)

    def check(self, values: Values) -> Iterator[str]:
        """What is broken, each as a sentence; values: the sets of all blocks."""
        yield from self._numbers.check()
        numbers = self._numbers.all_values()
        every = np.sort(np.concatenate([numbers, self._free[: self._idle], np.zeros(1, np.uint32)]))
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
        if wanted > self._idle:
            self._grow(wanted)
        self._idle -= wanted
        return self._free[self._idle : self._idle + wanted].copy()

    def _grow(self, wanted: int) -> None:
        size = len(self._blocks)
        more = max(size // 2, wanted)
        self._masks = np.concatenate([self._masks, np.zeros((more, *self._masks.shape[1:]), np.uint64)])
        self._hashes = np.concatenate([self._hashes, np.zeros(more, np.uint64)])
        self._blocks = np.concatenate([self._blocks, np.zeros(more, np.int64)])
        self._holders = np.concatenate([self._holders, np.zeros(more, np.int32)])
        free = self._free[: self._idle]
        self._free = np.zeros(size + more, np.uint32)
        self._free[: self._idle] = free
        self._free[self._idle : self._idle + more] = np.arange(size + more - 1, size - 1, -1)
        self._idle += more

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
        self._free[self._idle : self._idle + len(numbers)] = numbers
        self._idle += len(numbers)


def _hash_of(holder: int, tier: int) -> np.uint64:
    return np.uint64(hashes_of(np.array([holder * TIERS + tier + 1], np.uint64))[0])


def _in_table(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes of sets as a table takes them."""
    return np.maximum(hashes, np.uint64(2))


def _differ(some: Masks, others: Masks) -> NDArray[np.bool_]:
    """Which sets are not those that their hashes found: as good as never, but a wrong one would stay."""
    differ: NDArray[np.bool_] = (some != others).any(axis=(1, 2))
    return differ


def _bits(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The places of the set bits, 64 to a word."""
    return np.flatnonzero(np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little"))
