"""Open addressing from 64-bit hashes to 32-bit values, whole arrays at a time.

A bucket has eight slots, which is one cache line of hashes; a hash that finds its bucket full goes on by a step of its
own. There are as many buckets as a prime, so that every step comes to all of them. A search ends at a bucket with an
empty slot: taking a hash out of a full bucket leaves a mark there, out of any other one nothing.

Growth does not stop the world. A larger generation takes new hashes at once, and each change moves a few buckets of
the last one into it. Buckets are in the order of hashes: this, and any sorted batch, goes through memory in order.
"""

from collections.abc import Iterator
from math import ceil
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
PREPARED: Final = 0.78  # of the slots: when the next generation is made
GROWTH: Final = 1.4  # two generations together take at most 12 / 0.78 * (1 + 1.4) = 36.9 bytes a hash
THIN: Final = 0.2  # of the slots; with less in it a table shrinks
LEAST_BUCKETS: Final = 11
HASTE: Final = 1.2  # times as fast as needed: searches in two generations cost more
LOOKED_AT: Final = 1024  # buckets, by the later rounds of a search
WIDTH_MOST: Final = 16
MOVED_LEAST: Final = 512  # slots that any change moves
MOVED_AT_ONCE: Final = 1 << 10  # buckets: what is in them fits into a core's cache
REWRITTEN: Final = 1 << 18  # slots at a time
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
        self.hashes: Hashes = _lines(self.buckets)
        self.values: Values = np.zeros(self.buckets * BUCKET, np.uint32)  # 0 where there is no hash
        self.live = 0
        self.marks = 0  # slots that hashes were taken out of, and that are not empty
        self._touched = 0  # buckets

    @property
    def slots(self) -> int:
        return self.buckets * BUCKET

    @property
    def nbytes(self) -> int:
        return self.hashes.nbytes + self.values.nbytes

    def touch(self, buckets: int) -> None:
        """Before anything is in it: write to so many more, whose memory the system gives only then, and slowly."""
        stop = self._touched + buckets
        self.hashes[self._touched : stop] = EMPTY
        self.values[self._touched * BUCKET : stop * BUCKET] = 0
        self._touched = stop

    def find(self, hashes: Hashes) -> Slots:
        """The slot of each; -1 where there is none."""
        found = np.full(len(hashes), -1, np.int64)
        which = step = None  # of those that are looked for still, after the first round
        buckets, width = self._homes(hashes), 1
        while True:
            rows = self._rows(buckets, width)
            hits = np.flatnonzero(rows == hashes[:, None])
            hit = hits >> 3 if width == 1 else hits // (BUCKET * width)
            found[hit if which is None else which[hit]] = (buckets[hits >> 3] << 3) + (hits & 7)
            is_left = np.ones(len(hashes), np.bool_)
            is_left[hit] = False
            left = np.flatnonzero(is_left)
            left = left[(rows[left] != EMPTY).all(axis=1)]
            if not len(left):
                return found
            hashes = hashes[left]
            which = left if which is None else which[left]
            step = self._steps(hashes) if step is None else step[left]
            at, width = buckets[(left + 1) * width - 1], _width(len(left))
            buckets = self._path(at, step, width)

    def put(self, hashes: Hashes, values: Values) -> None:
        """Hashes that are not here, each once."""
        self.live += len(hashes)
        flat = self.hashes.reshape(-1)
        step = self._steps(hashes)
        at, width = self._homes(hashes) - step, 1  # `at`: the last bucket that is known to be full
        while len(hashes):
            buckets = self._path(at, step, width)
            is_free = self._rows(buckets, width) <= TAKEN_OUT
            place = is_free.argmax(axis=1) + np.arange(0, is_free.size, is_free.shape[1])
            fits = np.flatnonzero(is_free.reshape(-1)[place])
            place = place[fits]
            slots = (buckets[place >> 3] << 3) + (place & 7)
            is_marked = flat[slots] == TAKEN_OUT
            flat[slots] = hashes[fits]
            is_in = flat[slots] == hashes[fits]  # of those that chose the same slot, one
            self.marks -= int(np.count_nonzero(is_marked & is_in))
            self.values[slots[is_in]] = values[fits[is_in]]
            is_full = np.ones(len(hashes), np.bool_)
            is_full[fits] = False
            at = np.where(is_full, buckets[width - 1 :: width], at)
            is_left = is_full
            is_left[fits] = ~is_in
            at, step, hashes, values = at[is_left], step[is_left], hashes[is_left], values[is_left]
            width = _width(len(hashes))

    def clear(self, slots: Slots) -> None:
        """Take out what is in these, each given once."""
        has_empty = _any(self.hashes.take(slots >> 3, axis=0) == EMPTY)
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

    def take(self, first: int, stop: int) -> tuple[Hashes, Values]:
        """All that is in buckets [first, stop), which have marks instead from now on."""
        hashes = self.hashes[first:stop].reshape(-1)
        values = self.values[first * BUCKET : stop * BUCKET]
        slots = np.flatnonzero(hashes > TAKEN_OUT)
        taken = hashes[slots], values[slots]
        hashes[slots] = TAKEN_OUT
        values[slots] = 0
        self.live -= len(slots)
        self.marks += len(slots)
        return taken

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

    def _steps(self, hashes: Hashes) -> Slots:
        return ((hashes & _LOW) % np.uint64(self.buckets - 1) + np.uint64(1)).view(np.int64)

    def _path(self, at: Slots, step: Slots, width: int) -> Slots:
        """The next `width` buckets of each."""
        path = at + step if width == 1 else (at[:, None] + step[:, None] * np.arange(1, width + 1)).reshape(-1)
        path %= self.buckets
        return path

    def _rows(self, buckets: Slots, width: int) -> Hashes:
        """`[n, 8 * width]`: the hashes of these, `width` buckets to a row."""
        self.hashes.reshape(-1).take(buckets << 3)  # more of these wait for memory at a time than of whole buckets
        return self.hashes.take(buckets, axis=0).reshape(-1, BUCKET * width)


def _width(left: int) -> int:
    """Buckets of each to look at together: the more, the fewer hashes are left, for a round has a price of its own."""
    return max(1, min(LOOKED_AT // max(1, left), WIDTH_MOST))


def _lines(buckets: int) -> Hashes:
    """Buckets of zeros, each in one cache line: one that lies in two costs two waits for memory."""
    words = np.zeros((buckets + 1) * BUCKET, np.uint64)
    first = -words.ctypes.data // 8 % BUCKET
    return words[first : first + buckets * BUCKET].reshape(buckets, BUCKET)


def _any(rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of each row of eight, whether any is true."""
    found: NDArray[np.bool_] = rows.view(np.uint64)[:, 0] != 0
    return found


class NameTable:
    """A table that grows and shrinks. Slots are of its current generation, and good until the next `find` or `put`."""

    def __init__(self) -> None:
        self._current = Generation(0)
        self._last: Generation | None = None
        self._next: Generation | None = None  # empty
        self._moved = 0  # buckets of the last generation, from its first
        self._pace = 1  # slots to move for each hash that may come, so that the last is gone before the next is needed

    def __len__(self) -> int:
        return self._current.live + (self._last.live if self._last is not None else 0)

    @property
    def nbytes(self) -> int:
        generations = (self._current, self._last, self._next)
        return sum(generation.nbytes for generation in generations if generation is not None)

    @property
    def values(self) -> Values:
        """By slot; may be written, but not with 0."""
        return self._current.values

    def lookup(self, hashes: Hashes) -> Values:
        """The value of each; 0 where there is none. Changes nothing."""
        slots = self._current.find(hashes)
        found = self._current.values.take(slots, mode="wrap")
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            found[missing] = 0
            if self._last is not None:
                slots = self._last.find(hashes[missing])
                is_here = slots >= 0
                found[missing[is_here]] = self._last.values[slots[is_here]]
        return found

    def find(self, hashes: Hashes, *, room: int = 0) -> Slots:
        """The slot of each; -1 where there is none. So many may be put before the next call."""
        self._make_room(room, len(hashes))
        slots = self._current.find(hashes)
        if self._last is not None:
            missing = np.flatnonzero(slots < 0)
            in_last = self._last.find(hashes[missing])
            is_here = in_last >= 0
            missing, in_last = missing[is_here], in_last[is_here]
            self._current.put(hashes[missing], self._last.values[in_last])
            self._last.clear(in_last)
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
            if np.count_nonzero(self._current.find(left) >= 0):
                yield "a hash is in both generations"

    def _generations(self) -> Iterator[Generation]:
        yield self._current
        if self._last is not None:
            yield self._last

    def _make_room(self, more: int, hashes: int) -> None:
        """So that `more` hashes can be put; and go on with what is under way, in step with a change of so many."""
        if self._last is not None:
            self._move(max(MOVED_LEAST, self._pace * hashes))
        wanted, slots = len(self) + more, self._current.slots
        is_thin = wanted < THIN * slots and self._current.buckets > LEAST_BUCKETS and self._last is None
        filled = (wanted + self._current.marks) / slots
        if self._last is None and filled > PREPARED:
            self._next = self._next or Generation(int(wanted * GROWTH / LOAD))
            self._next.touch(1 + int(self._next.buckets * hashes / ((LOAD - PREPARED) * slots)))
        if is_thin:
            self._next = None  # it would be too large
        if filled > LOAD or is_thin:
            self._begin(wanted)

    def _begin(self, wanted: int) -> None:
        """A generation for so many hashes."""
        if self._last is not None:
            self._move(self._last.slots)
        room = LOAD * self._next.slots - wanted if self._next is not None else 0
        if self._next is None or room < wanted * (GROWTH - 1) / 2:
            self._next = Generation(int(wanted * GROWTH / LOAD))
            room = LOAD * self._next.slots - wanted
        self._last, self._current, self._next = self._current, self._next, None
        self._pace = ceil(HASTE * self._last.slots / room)
        self._moved = 0
        self._move(MOVED_LEAST)

    def _move(self, slots: int) -> None:
        """Of the last generation's next buckets, at least one; when none is left, it goes."""
        assert self._last is not None
        stop = min(self._moved + max(1, slots // BUCKET), self._last.buckets)
        for first in range(self._moved, stop, MOVED_AT_ONCE):
            self._current.put(*self._last.take(first, min(first + MOVED_AT_ONCE, stop)))
        self._moved = stop
        if stop == self._last.buckets:
            self._last = None
