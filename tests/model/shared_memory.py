"""Shared memory in slow motion: what one process stores reaches another word by word, when a test says so.

A writer works on its own copy at once. Its stores queue up, cut at 8-byte words, and land in what the reader
sees one at a time, in their order; words of one store in any order. The reader's loads are cut in the same way,
with stores landing between them, so it meets every prefix of the writer's work, and torn copies. The word at
the start of a copy is loaded first, as memcpy does.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

WORD = 8


class Store(NamedTuple):
    memory: "Seen"
    offset: int
    data: bytes


class Wire:
    """What is on its way from the writer to the reader: stores, and marks that call back when they land.

    `landing` says how many of these land before each of the reader's loads; when it is used up, none do.
    """

    def __init__(self) -> None:
        self.pending: deque[Store | Callable[[], None]] = deque()
        self.landing: deque[int] = deque()
        self.order: Sequence[int] = range(WORD)  # in which words of one store land and of one copy are loaded

    def store(self, memory: "Seen", offset: int, data: bytes) -> None:
        words = [Store(memory, start, data[start - offset : end - offset]) for start, end in _words(offset, len(data))]
        self.pending.extend(self._ordered(words))

    def load(self, memory: bytearray, offset: int, size: int) -> bytes:
        if not self.landing:
            return bytes(memoryview(memory)[offset : offset + size])
        copied = bytearray(size)
        first, *rest = _words(offset, size)
        for start, end in (first, *self._ordered(rest)):
            self.land(self.landing.popleft() if self.landing else 0)
            copied[start - offset : end - offset] = bytes(memoryview(memory)[start:end])
        return bytes(copied)

    def land(self, count: int) -> None:
        for _ in range(min(count, len(self.pending))):
            landed = self.pending.popleft()
            if isinstance(landed, Store):
                with memoryview(landed.memory) as view:
                    view[landed.offset : landed.offset + len(landed.data)] = landed.data
            else:
                landed()

    def _ordered(self, words: list[Any]) -> list[Any]:
        return [words[at] for at in self.order if at < len(words)] + words[len(self.order) :]


class Seen(bytearray):
    """What the reader sees; each of its loads goes through the wire."""

    wire: Wire

    def __getitem__(self, where: Any) -> Any:
        if isinstance(where, slice):
            start, stop, _ = where.indices(len(self))
            return self.wire.load(self, start, stop - start)
        return self.wire.load(self, where, 1)[0]


class Written(bytearray):
    """The writer's own copy; each of its stores goes into the wire as well."""

    wire: Wire
    seen: Seen

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        return bytes(found) if isinstance(where, slice) else found

    def __setitem__(self, where: Any, data: Any) -> None:
        super().__setitem__(where, data)
        offset = where.indices(len(self))[0] if isinstance(where, slice) else where
        self.wire.store(self.seen, offset, bytes(data) if isinstance(where, slice) else bytes([data]))


def shared(wire: Wire, size: int) -> tuple[Written, Seen]:
    written, seen = Written(size), Seen(size)
    written.wire = seen.wire = wire
    written.seen = seen
    return written, seen


class Subscripting:
    """A `struct.Struct` that reaches memory by subscripts, where the classes above can meet it."""

    def __init__(self, inner: struct.Struct) -> None:
        self._inner = inner
        self.size = inner.size
        self.pack = inner.pack
        self.unpack = inner.unpack

    def pack_into(self, memory: bytearray, offset: int, *values: Any) -> None:
        memory[offset : offset + self.size] = self.pack(*values)

    def unpack_from(self, memory: bytes, offset: int = 0) -> tuple[Any, ...]:
        return self.unpack(memory[offset : offset + self.size])


def _words(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """The half-open ranges that word boundaries cut `size` bytes at `offset` into."""
    start, stop = offset, offset + size
    while start < stop:
        end = min(start - start % WORD + WORD, stop)
        yield start, end
        start = end
