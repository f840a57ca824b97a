"""A node that publishes: blocks in slots, their entries in an index, and dicts that say what should be found.

What it stores reaches readers through a `Wire`, in the order that the table's effects have: an entry goes
before its slot is given to another block, a payload is there before its entry says so.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from typing import Any, cast

from kvstore import published
from kvstore.copier import checksum
from kvstore.published import EMPTY, ENTRY_BYTES, GONE, HEADER_BYTES, PARTIAL, READABLE, STATE_AT
from kvstore.types import BlockKey
from tests.model.shared_memory import Subscripting, Wire, shared

SLOTS = 12
PIECES = 2  # a block's payload: one word of 8 bytes per layer
BLOCK_BYTES = 8 * PIECES
PIECE = struct.Struct("<HIH")  # which name, generation, which piece
CHANGING = object()


@contextmanager
def in_slow_motion(probes: int) -> Iterator[None]:
    """The published index reaches memory by subscripts, and looks at `probes` buckets."""
    kept: dict[str, Any] = {name: value for name, value in vars(published).items() if isinstance(value, struct.Struct)}
    doubles: dict[str, Any] = {name: Subscripting(value) for name, value in kept.items()}
    kept["PROBES"], doubles["PROBES"] = published.PROBES, probes
    vars(published).update(doubles)
    try:
        yield
    finally:
        vars(published).update(kept)


def pool(entries: int) -> list[bytes]:
    """Names that crowd around the table's end: with parts, the same key in two namespaces, a key of zeros."""
    homes = [entries - 1] * 4 + [entries - 2] * 3 + [0] * 3 + [1, 3, 2**64 - 1]
    keys = [home.to_bytes(8, "little") + bytes([number]) * 8 for number, home in enumerate(homes)]
    whole = [published.ident(1, BlockKey(key)) for key in (*keys, bytes(16))]
    parts = [published.ident(2, BlockKey(keys[0] + bytes([part, 0]))) for part in range(3)]
    return [*whole, *parts, published.ident(0, BlockKey(bytes(16)))]


@dataclass(frozen=True)
class Published:
    """What an entry says."""

    name: bytes
    state: int
    layers: int
    slot: int
    generation: int

    @property
    def pieces(self) -> list[bytes]:
        key = int.from_bytes(self.name[12:14], "little") ^ self.name[2] << 8
        return [PIECE.pack(key, self.generation, piece) for piece in range(PIECES)]

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        return 1, self.slot * BLOCK_BYTES, BLOCK_BYTES, checksum(b"".join(self.pieces)), self.generation

    def is_said_by(self, entry: bytes) -> bool:
        said = published.Entry._make(published.ENTRY.unpack(entry))
        return (
            said.sequence % 2 == 0
            and entry[8:28] == self.name
            and (said.state, said.tier, said.layers) == (self.state, 1, self.layers)
            and said[7:] == self.place
        )


class Node:
    """The writer's side, and what of it has landed on the reader's."""

    def __init__(self, entries: int) -> None:
        self.entries = entries
        self.names = pool(entries)
        self.wire = Wire()
        self.index_memory, self.index_seen = shared(self.wire, published.index_bytes(entries))
        self.slots_memory, self.slots_seen = shared(self.wire, BLOCK_BYTES * SLOTS)
        self.index = published.PublishedIndex(cast(mmap, self.index_memory), entries, 7)
        self.land_all()
        self.reader = published.IndexReader(cast(mmap, self.index_seen))
        self.model: dict[bytes, Published] = {}
        self.visible: dict[bytes, Any] = {}  # what of it has landed: a Published, CHANGING, or nothing
        self.history: dict[bytes, list[Published]] = {}
        self.generations = [0] * SLOTS
        self.free = list(range(SLOTS))
        self.crowded_out = 0
        self.when_disturbed: Callable[[bytes], None] = lambda name: None

    def land_all(self) -> None:
        self.wire.land(len(self.wire.pending))

    def publish(self, entry: Published) -> bool:
        self.history.setdefault(entry.name, []).append(entry)
        self._mark(entry.name, CHANGING)
        done = self.index.publish(entry.name, (entry.state, 1, entry.layers), entry.place)
        if done:
            self.model[entry.name] = entry
        self._mark(entry.name, self.model.get(entry.name))
        return done

    def put(self, name: bytes, *, as_it_comes: bool = False) -> bool:
        entry = self._take_slot(name, *((PARTIAL, 0) if as_it_comes else (READABLE, PIECES)))
        if not as_it_comes:
            self._fill(entry, 0)
            self._fill(entry, 1)
        home = self.bucket(name)
        if self.publish(entry):
            return True
        probe = [(home + ahead) % self.entries for ahead in range(published.PROBES)]
        assert all(self.state(at) in (READABLE, PARTIAL) for at in probe), "there is room, and it is not published"
        self.crowded_out += 1
        self._give_back(entry.slot)
        return False

    def progress(self, name: bytes) -> None:
        before = self.model[name]
        self._fill(before, before.layers)
        layers = before.layers + 1
        state = READABLE if layers == PIECES else PARTIAL
        after = Published(before.name, state, layers, before.slot, before.generation)
        assert self.publish(after), "what is published can be published again"

    def remove(self, name: bytes) -> None:
        entry = self.model.pop(name, None)
        if entry is not None:
            self._mark(name, CHANGING)
        assert self.index.remove(name) == (entry is not None)
        if entry is not None:
            self._mark(name, None)
            self._give_back(entry.slot)

    def move(self, name: bytes, *, in_place: bool) -> None:
        """Evicted and stored again elsewhere; or overwritten by a replica that lies elsewhere."""
        old = self.model[name]
        if not in_place:
            self.remove(name)
            self.free.append(self.free.pop(0))
        new = self._take_slot(name, READABLE, PIECES)
        self._fill(new, 1)
        self._fill(new, 0)
        assert self.publish(new), "its own bucket is there"
        if in_place:
            self._give_back(old.slot)

    def bucket(self, name: bytes) -> int:
        part = int.from_bytes(name[2:4], "little")
        return (int.from_bytes(name[4:12], "little") + part * 0x9E3779B97F4A7C15) % self.entries

    def state(self, bucket: int) -> int:
        return int(self.index_memory[HEADER_BYTES + ENTRY_BYTES * bucket + STATE_AT])

    def check(self) -> None:
        """What is published, and nothing else, can be found; and no bucket is wasted."""
        assert (self.index.published, self.index.crowded_out) == (len(self.model), self.crowded_out)
        own = published.IndexReader(cast(mmap, self.index_memory))
        assert own.is_complete == (self.crowded_out == 0)
        expected = [EMPTY] * self.entries
        for name in self.names:
            found, said = own.find(name), self.model.get(name)
            assert own.is_readable(name) == (said is not None and said.state == READABLE)
            if said is None:
                assert found is None
                continue
            assert found is not None
            assert said.is_said_by(found[1])
            bucket, last = self.bucket(name), (found[0] - HEADER_BYTES) // ENTRY_BYTES
            while bucket != last:
                expected[bucket] = expected[bucket] or GONE
                bucket = (bucket + 1) % self.entries
            expected[last] = said.state
        assert [self.state(at) for at in range(self.entries)] == expected, "GONE is for what a probe passes"

    def _take_slot(self, name: bytes, state: int, layers: int) -> Published:
        slot = self.free.pop(0)
        self.generations[slot] += 1
        return Published(name, state, layers, slot, self.generations[slot])

    def _give_back(self, slot: int) -> None:
        self.free.insert(0, slot)  # the next block gets it

    def _fill(self, entry: Published, piece: int) -> None:
        at = entry.slot * BLOCK_BYTES + 8 * piece
        self.slots_memory[at : at + 8] = entry.pieces[piece]

    def _mark(self, name: bytes, value: Any) -> None:
        def land() -> None:
            self.visible[name] = value
            self.when_disturbed(name)

        self.wire.pending.append(land)
