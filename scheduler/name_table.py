"""Open addressing from 64-bit hashes to 32-bit values, whole arrays at a time.

A bucket has eight slots, which is one cache line of hashes; a hash that finds its bucket full goes on by a step of its
own. There are as many buckets as a prime, so that every step comes to all of them. A search ends at a bucket with an
empty slot: taking a hash out of a full bucket leaves a mark there, out of any other one nothing.

Growth does not stop the world. A larger generation takes new hashes at once, and each change moves a few buckets of
the last one into it. Buckets are in the order of hashes, so that this, and any sorted batch, goes through memory in order.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Values = NDArray[np.uint32]
Slots = NDArray[np.int64]

EMPTY: Final = 0  # two hashes that no name has; `hashes_of` sees to it
TAKEN_OUT: Final = 1
BUCKET: Final = 8
LOAD: Final = 0.8  # of the slots that are not empty, at most
GROWTH: Final = 1.3  # with LOAD: both generations together take at most 12 / 0.8 * (1 + 1.3) = 34.5 bytes a hash
THIN: Final = 0.2  # of the slots; with less in it a table shrinks
LEAST_BUCKETS: Final = 11
MOVED_LEAST: Final = 512  # slots that any change moves
REWRITTEN: Final = 1 << 18  # slots at a time
_MISSING: Final = -1
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_FOLD: Final = np.uint64(0xD6E8FEB86659FD93)
_HALF: Final = np.uint64(32)
_LOW: Final = np.uint64(0xFFFFFFFF)


def hashes_of(names: NDArray[np.uint64]) -> Hashes:
    """A number for each name: equal for equal names only, except that those of two names are moved out of the way."""
    hashes = names ^ (names >> _HALF)
    hashes *= _ODD
    hashes ^= hashes >> _HALF
    hashes *= _FOLD
    hashes[hashes <= TAKEN_OUT] |= np.uint64(1 << 63)
    return hashes


def _nth_bits() -> NDArray[np.uint8]:
    """Of each byte, most significant bit first: where its first, second, ... set bit is; BUCKET where there is none."""
    found = np.full((256, BUCKET + 1), BUCKET, np.uint8)
    for byte in range(256):
        places = [place for place in range(BUCKET) if byte >> (7 - place) & 1]
        found[byte, : len(places)] = places
    return found


_NTH_BIT: Final = _nth_bits()


def _prime(least: int) -> int:
    """The smallest that is not below `least`."""
    candidate = least | 1
    while any(candidate % factor == 0 for factor in range(3, int(candidate**0.5) + 1, 2)):
        candidate += 2
    return candidate


class Generation:
    """A table of fixed size. Whoever puts into it sees to it that a fifth of its slots stays empty."""

    def __init__(self, slots: int) -> None:
        self.buckets = _prime(max(LEAST_BUCKETS, -(-slots // BUCKET)))
        self.hashes: Hashes = np.zeros((self.buckets, BUCKET), np.uint64)
        self.values: Values = np.zeros(self.buckets * BUCKET, np.uint32)  # 0 where there is no hash
        self.live = 0
        self.marks = 0  # slots that hashes were taken out of, and that are not empty

    @property
    def slots(self) -> int:
        return self.buckets * BUCKET

    @property
    def nbytes(self) -> int:
        return self.hashes.nbytes + self.values.nbytes

    def find(self, hashes: Hashes) -> Slots:
        """The slot of each; -1 where there is none."""
        found = np.full(len(hashes), _MISSING, np.int64)
        which: Slots | None = None  # of `found`, after the first round
        at = self._homes(hashes)
        while len(hashes):
            rows = self.hashes.take(at, axis=0)
            hits = np.flatnonzero(rows == hashes[:, None])
            hit = hits >> 3
            found[hit if which is None else which[hit]] = (at[hit] << 3) + (hits & 7)
            if len(hit) == len(hashes):
                break
            goes_on = rows.min(axis=1) != EMPTY
            goes_on[hit] = False
            left = np.flatnonzero(goes_on)
            which = left if which is None else which[left]
            hashes = hashes[left]
            at = self._next(at[left], hashes)
        return found

    def put(self, hashes: Hashes, values: Values) -> None:
        """Hashes that are not here, each once."""
        self.live += len(hashes)
        at = self._homes(hashes)
        while len(hashes):
            order = np.argsort(at, kind="stable")
            at, hashes, values = at[order], hashes[order], values[order]
            rows = self.hashes.take(at, axis=0)
            free = np.packbits(rows <= TAKEN_OUT, axis=1)[:, 0]
            place = _NTH_BIT[free, np.minimum(_ranks(at), BUCKET)]
            fits = place < BUCKET
            slots = (at[fits] << 3) + place[fits]
            flat = self.hashes.reshape(-1)
            self.marks -= int(np.count_nonzero(flat[slots] == TAKEN_OUT))
            flat[slots] = hashes[fits]
            self.values[slots] = values[fits]
            left = ~fits
            hashes, values = hashes[left], values[left]
            at = self._next(at[left], hashes)

    def clear(self, slots: Slots) -> None:
        """Take out what is in these, each given once."""
        has_empty = self.hashes.take(slots >> 3, axis=0).min(axis=1) == EMPTY
        self.hashes.reshape(-1)[slots] = np.where(has_empty, np.uint64(EMPTY), np.uint64(TAKEN_OUT))
        self.values[slots] = 0
        self.live -= len(slots)
        self.marks += len(slots) - int(np.count_nonzero(has_empty))

    def rewrite(self, after: Values) -> None:
        """Every value v becomes after[v], where after[0] is 0; what becomes 0 is taken out."""
        is_changed = after != np.arange(len(after), dtype=np.uint32)
        for first in range(0, self.slots, REWRITTEN):
            slots = np.flatnonzero(is_changed[self.values[first : first + REWRITTEN]]) + first
            changed = after[self.values[slots]]
            self.values[slots] = changed
            self.clear(slots[changed == 0])

    def check(self) -> Iterator[str]:
        flat = self.hashes.reshape(-1)
        slots = np.flatnonzero(flat > TAKEN_OUT)
        marks = int(np.count_nonzero(flat == TAKEN_OUT))
        if (len(slots), marks) != (self.live, self.marks):
            yield f"{len(slots)} hashes and {marks} marks are there, {self.live} and {self.marks} are counted"
        lost = np.count_nonzero(self.find(flat[slots]) != slots)
        if lost:
            yield f"{lost} hashes are not found where they are"
        if np.count_nonzero(self.values[flat <= TAKEN_OUT]) or np.count_nonzero(self.values[slots] == 0):
            yield "a slot has a value without a hash, or a hash without a value"
        if len(slots) + marks > LOAD * self.slots + 1:
            yield f"{len(slots)} hashes and {marks} marks are too many for {self.slots} slots"

    def _homes(self, hashes: Hashes) -> Slots:
        return (((hashes >> _HALF) * np.uint64(self.buckets)) >> _HALF).view(np.int64)

    def _next(self, at: Slots, hashes: Hashes) -> Slots:
        step = (hashes & _LOW) % np.uint64(self.buckets - 1) + np.uint64(1)
        return (at + step.view(np.int64)) % self.buckets


def _ranks(groups: Slots) -> Slots:
    """How many equal numbers are before each, in an ascending array."""
    places = np.arange(len(groups))
    is_first = np.empty(len(groups), np.bool_)
    is_first[:1] = True
    np.not_equal(groups[1:], groups[:-1], out=is_first[1:])
    return places - np.maximum.accumulate(np.where(is_first, places, 0))


class NameTable:
    """A table that grows and shrinks. Slots are of its current generation, and good until the next `find` or `put`."""

    def __init__(self) -> None:
        self._current = Generation(0)
        self._last: Generation | None = None
        self._moved = 0  # buckets of the last generation, from its first
        self._pace = 1  # slots to move for each hash that may come, so that the last is gone before the next is needed

    def __len__(self) -> int:
        return self._current.live + (self._last.live if self._last is not None else 0)

    @property
    def nbytes(self) -> int:
        return self._current.nbytes + (self._last.nbytes if self._last is not None else 0)

    @property
    def values(self) -> Values:
        """By slot; may be written, but not with 0."""
        return self._current.values

    def lookup(self, hashes: Hashes) -> Values:
        """The value of each; 0 where there is none. Changes nothing."""
        slots = self._current.find(hashes)
        found = self._current.values.take(slots, mode="wrap")
        missing = np.flatnonzero(slots == _MISSING)
        if len(missing):
            found[missing] = 0
            if self._last is not None:
                slots = self._last.find(hashes[missing])
                is_here = slots != _MISSING
                found[missing[is_here]] = self._last.values[slots[is_here]]
        return found

    def find(self, hashes: Hashes, *, room: int = 0) -> Slots:
        """The slot of each; -1 where there is none. So many may be put before the next call."""
        self._make_room(room, self._pace * len(hashes))
        slots = self._current.find(hashes)
        if self._last is not None:
            missing = np.flatnonzero(slots == _MISSING)
            in_last = self._last.find(hashes[missing])
            is_here = in_last != _MISSING
            self._take_over(in_last[is_here])
            slots[missing] = self._current.find(hashes[missing])
        return slots

    def put(self, hashes: Hashes, values: Values) -> None:
        """Of hashes that `find` has just not found and has made room for, each once. No value is 0."""
        self._current.put(hashes, values)

    def clear(self, slots: Slots) -> None:
        """Take out what is in these, each given once."""
        self._current.clear(slots)

    def rewrite(self, after: Values) -> None:
        """Every value v becomes after[v], where after[0] is 0; what becomes 0 is taken out. Goes through all slots."""
        for generation in self._generations():
            generation.rewrite(after)

    def all_values(self) -> Values:
        """Those of all hashes, in any order."""
        return np.concatenate([generation.values[generation.values != 0] for generation in self._generations()])

    def check(self) -> Iterator[str]:
        """What is broken, each as a sentence."""
        for generation in self._generations():
            yield from generation.check()
        if self._last is not None:
            if np.count_nonzero(self._last.hashes[: self._moved] > TAKEN_OUT):
                yield "a bucket that was moved has hashes"
            left = self._last.hashes[self._last.hashes > TAKEN_OUT]
            if np.count_nonzero(self._current.find(left) != _MISSING):
                yield "a hash is in both generations"

    def _generations(self) -> Iterator[Generation]:
        yield self._current
        if self._last is not None:
            yield self._last

    def _make_room(self, more: int, moved: int) -> None:
        """So that `more` hashes can be put; and go on with moving, by so many slots."""
        if self._last is not None:
            self._move(max(MOVED_LEAST, moved))
        wanted = len(self) + more
        is_full = wanted + self._current.marks > LOAD * self._current.slots
        is_thin = wanted < THIN * self._current.slots and self._current.buckets > LEAST_BUCKETS
        if is_full or (is_thin and self._last is None):
            if self._last is not None:
                self._move(self._last.slots)
            self._last, self._moved = self._current, 0
            self._current = Generation(int(wanted * GROWTH / LOAD))
            self._pace = 1 + int(self._last.slots / (LOAD * self._current.slots - wanted))
            self._move(MOVED_LEAST)

    def _move(self, slots: int) -> None:
        """Of the last generation's next buckets, at least one; when none is left, it goes."""
        assert self._last is not None
        first, stop = self._moved, min(self._moved + max(1, slots // BUCKET), self._last.buckets)
        found = np.flatnonzero(self._last.hashes[first:stop] > TAKEN_OUT) + first * BUCKET
        self._moved = stop
        self._take_over(found)
        if stop == self._last.buckets:
            self._last = None

    def _take_over(self, slots: Slots) -> None:
        """From the last generation into the current one."""
        assert self._last is not None
        hashes, values = self._last.hashes.reshape(-1)[slots], self._last.values[slots]
        self._last.clear(slots)
        self._current.put(hashes, values)
