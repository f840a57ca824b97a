"""The published index: one tenant's replicas in shared memory, so that a local reader needs no round trip.

    0            4096                                         4096 + 64 * entries
    | header     | entry 0 | entry 1 | ...                     |

One writer, the node; any number of readers, which map it read-only. A reader copies an entry, copies the
payload it points at, and compares the entry again: the node removes an entry before the slot can be given
to another writer, so an unchanged entry means that the payload was not touched. `sequence` is odd while an
entry is written. The order of loads and stores is x86's; where memory order is weaker the checksum decides.

Open addressing with linear probing from a bucket that the key gives. Entries never move while they live, so
what is published all the time is found at any time. A bucket that a live entry's probe passes and that holds
none is GONE, and EMPTY as soon as no probe passes it: misses stay as short as if nothing had ever been removed.
The byte layout is drawn in docs/protocol.md.
"""

import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple, cast

from kvstore.errors import ProtocolError
from kvstore.gallop import gallop
from kvstore.types import KEY_BYTES, BlockKey

MAGIC = b"CAIRNIDX"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ")  # magic, version, entry bytes, entries, epoch
CROWDED_OUT = struct.Struct("<Q")  # right after the header: replicas of this node that found no bucket, ever
ELSEWHERE = struct.Struct("<Q")  # after that: 1 if the node has tiers that are not published
HEADER_BYTES = 4096
ENTRY = struct.Struct("<IBBHHH16sIQQQQ")
ENTRY_BYTES = 64
SEQUENCE = struct.Struct("<I")
BODY = struct.Struct("<BBH20sIQQQQ")  # an entry after its sequence, with namespace, part and key as its ident
PROBE = struct.Struct("<IB3x20s")  # of an entry: sequence, state, ident
STATE_AT, IDENT_AT, IDENT_END = 4, 8, 28
IDENT_PREFIX = struct.Struct("<HH")  # namespace, part
IDENT_HOME = struct.Struct("<2xHQ")  # of an ident: part, first half of the key
EMPTY, READABLE, PARTIAL, GONE = 0, 1, 2, 3
EMPTY_BODY = bytes(BODY.size)
GONE_BODY = bytes([GONE]) + bytes(BODY.size - 1)
PROBES = 128  # buckets looked at; an entry that finds none of them free is not published
PART_STRIDE = 0x9E3779B97F4A7C15

RING_HEADER_BYTES = 64
RING_HEAD = struct.Struct("<Q")
RING_ENTRY = struct.Struct("<20sI")  # name, blocks


class Entry(NamedTuple):
    """One replica as published. `layers` are in place, from the first; offsets and sizes in bytes."""

    sequence: int
    state: int
    tier: int
    layers: int
    namespace: int
    part: int
    key: bytes
    slab_id: int
    offset: int
    size: int
    checksum: int
    generation: int


def ident(namespace: int, key: BlockKey) -> bytes:
    """What an entry is found by: namespace number, part number, block key; 20 bytes."""
    part = int.from_bytes(key[16:18], "little")
    return IDENT_PREFIX.pack(namespace, part) + key[:16]


def index_bytes(entries: int) -> int:
    return HEADER_BYTES + ENTRY_BYTES * entries


def _home(name: bytes, mask: int) -> int:
    part, bucket = cast("tuple[int, int]", IDENT_HOME.unpack_from(name))
    return HEADER_BYTES + ENTRY_BYTES * (bucket + part * PART_STRIDE & mask)


class PublishedIndex:
    """The writer's side. `memory` has `index_bytes(entries)` bytes, zeroed; `entries` is a power of two."""

    def __init__(self, memory: mmap.mmap, entries: int, epoch: int, *, is_all: bool = True) -> None:
        assert entries & (entries - 1) == 0
        HEADER.pack_into(memory, 0, MAGIC, VERSION, ENTRY_BYTES, entries, epoch)
        ELSEWHERE.pack_into(memory, HEADER.size + CROWDED_OUT.size, not is_all)
        self._memory = memory
        self._mask = entries - 1
        self._end = index_bytes(entries)
        self._wrap = ENTRY_BYTES * entries - 1  # masks a difference of places
        self._longest = ENTRY_BYTES * min(PROBES, entries)  # probe
        self.published = 0
        self.crowded_out = 0  # replicas that found no bucket: the node itself must be asked for them

    def publish(self, name: bytes, body: tuple[int, int, int], place: tuple[int, int, int, int, int]) -> bool:
        """Write or overwrite the entry of `name` (an `ident`). False when all its buckets are taken.

        Args:
            body: state, tier, layers.
            place: slab id, offset, size, checksum, generation.
        """
        at, found = self._find(name)
        if at is None:
            self.crowded_out += 1
            CROWDED_OUT.pack_into(self._memory, HEADER.size, self.crowded_out)
            return False
        self.published += not found
        self._write(at, BODY.pack(*body, name, *place))
        return True

    def remove(self, name: bytes) -> bool:
        """From here on no reader that begins or ends its copy finds `name`. False when it was not published."""
        at, found = self._find(name)
        if at is None or not found:
            return False
        self.published -= 1
        length = at - _home(name, self._mask) & self._wrap  # of its own probe, in bytes
        reach = self._reach_over(at, length)
        self._write(at, EMPTY_BODY if reach < 0 else GONE_BODY)
        if reach < length:
            self._clean(at, length, reach)
        return True

    def _reach_over(self, at: int, enough: int) -> int:
        """How far before `at` the farthest probe begins that passes it, in bytes; negative when none does.

            | home of b | at | a | b | EMPTY |     b's probe passes `at`, and begins one entry before it

        Looks no further than for a reach of `enough`.
        """
        memory, mask, wrap = self._memory, self._mask, self._wrap
        probe = PROBE.unpack_from
        reach = -1
        after = at
        for ahead in range(ENTRY_BYTES, self._longest, ENTRY_BYTES):
            after += ENTRY_BYTES
            if after == self._end:
                after = HEADER_BYTES
            _, state, name = probe(memory, after)
            if state == EMPTY:
                break
            if state != GONE:
                reach = max(reach, (after - _home(name, mask) & wrap) - ahead)
                if reach >= enough:
                    break
        return reach

    def _clean(self, at: int, length: int, reach: int) -> None:
        """Empty what only the probe of the entry that was at `at` passed: of the `length` bytes before it.

        `reach` is that of the probes over `at`.
        """
        memory = self._memory
        before = at
        for back in range(ENTRY_BYTES, length + ENTRY_BYTES, ENTRY_BYTES):
            before = (self._end if before == HEADER_BYTES else before) - ENTRY_BYTES
            _, state, name = PROBE.unpack_from(memory, before)
            if state != GONE:
                reach = max(reach, back + (before - _home(name, self._mask) & self._wrap))
            elif reach < back:
                self._write(before, EMPTY_BODY)

    def _find(self, name: bytes) -> tuple[int | None, bool]:
        """Where `name` is, or where it may go: (offset, found); offset None when there is no place."""
        memory = self._memory
        probe = PROBE.unpack_from
        at = _home(name, self._mask)
        place = None
        for _ in range(PROBES):
            _, state, found = probe(memory, at)
            if state == EMPTY:
                return at if place is None else place, False
            if state == GONE:
                place = at if place is None else place
            elif found == name:
                return at, True
            at += ENTRY_BYTES
            if at == self._end:
                at = HEADER_BYTES
        return place, False

    def _write(self, at: int, body: bytes) -> None:
        memory = self._memory
        (sequence,) = SEQUENCE.unpack_from(memory, at)
        SEQUENCE.pack_into(memory, at, sequence | 1)
        memory[at + STATE_AT : at + ENTRY_BYTES] = body
        SEQUENCE.pack_into(memory, at, (sequence | 1) + 1 & 0xFFFFFFFF)


class IndexReader:
    """A reader's side, over a read-only mapping.

    Raises:
        ProtocolError: the memory is no published index of this version.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        if len(memory) < HEADER_BYTES:
            raise ProtocolError(f"not a published index: {len(memory)} bytes")
        magic, version, entry_bytes, entries, self.epoch = HEADER.unpack_from(memory, 0)
        if (magic, version, entry_bytes) != (MAGIC, VERSION, ENTRY_BYTES):
            raise ProtocolError(f"not a published index of version {VERSION}: {magic!r} {version}")
        if entries.bit_count() != 1 or len(memory) < index_bytes(entries):
            raise ProtocolError(f"a published index of {entries} entries does not have {len(memory)} bytes")
        self._memory = memory
        self._mask = entries - 1
        self._end = index_bytes(entries)

    def find(self, name: bytes) -> tuple[int, bytes] | None:
        """Where the entry of `name` is, and its 64 bytes: whole, as they were at one moment.

        None when it is not published, or just being written.
        """
        memory = self._memory
        at = _home(name, self._mask)
        for _ in range(PROBES):
            entry = memory[at : at + ENTRY_BYTES]
            state = entry[STATE_AT]
            if state == EMPTY:
                return None
            if entry[IDENT_AT:IDENT_END] == name and state != GONE:
                return (at, entry) if self.is_unchanged(at, entry) else None
            at += ENTRY_BYTES
            if at == self._end:
                at = HEADER_BYTES
        return None

    def is_readable(self, name: bytes) -> bool:
        """As `find`, for whole blocks only and without the entry."""
        memory = self._memory
        probe = PROBE.unpack_from
        at = _home(name, self._mask)
        for _ in range(PROBES):
            sequence, state, found = probe(memory, at)
            if state == EMPTY:
                return False
            if found == name and state != GONE:
                return state == READABLE and not sequence & 1
            at += ENTRY_BYTES
            if at == self._end:
                at = HEADER_BYTES
        return False

    @property
    def is_complete(self) -> bool:
        """Whether what is not found here is nowhere on the node; else the node must be asked."""
        return not any(self._memory[HEADER.size : HEADER.size + CROWDED_OUT.size + ELSEWHERE.size])

    def is_unchanged(self, at: int, entry: bytes) -> bool:
        """Whether all that was copied since `find` returned (at, entry) is that entry's."""
        return self._memory[at : at + ENTRY_BYTES] == entry and not entry[0] & 1

    def match(self, namespace: int, keys: Sequence[BlockKey], parts: int = 1) -> int:
        """How many of `keys`, a chain, are readable in all their parts, from the first. See `gallop`."""
        is_readable = self.is_readable
        prefixes = [IDENT_PREFIX.pack(namespace, part) for part in range(parts)]
        if parts == 1:
            prefix = prefixes[0]
            return gallop(lambda position: is_readable(prefix + keys[position]), len(keys))
        blocks = [key[:KEY_BYTES] for key in keys]  # each prefix names its part
        return gallop(lambda position: all(is_readable(prefix + blocks[position]) for prefix in prefixes), len(keys))


def ring_bytes(entries: int) -> int:
    return RING_HEADER_BYTES + RING_ENTRY.size * entries


class UseRing:
    """A client's reports of what it read without asking: written by the client, drained by the node.

    Best effort: what is overwritten before it is drained is forgotten, and only recency suffers.
    The node believes nothing in it: an unknown name is ignored.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._entries = (len(memory) - RING_HEADER_BYTES) // RING_ENTRY.size
        (self._head,) = RING_HEAD.unpack_from(memory, 0)

    def report(self, name: bytes, blocks: int) -> None:
        """`blocks` of a chain were read, and `name` is the last of them."""
        head = self._head
        at = RING_HEADER_BYTES + RING_ENTRY.size * (head % self._entries)
        RING_ENTRY.pack_into(self._memory, at, name, blocks)
        self._head = head + 1 & 0xFFFFFFFFFFFFFFFF
        RING_HEAD.pack_into(self._memory, 0, self._head)

    def drain(self, most: int | None = None) -> list[tuple[bytes, int]]:
        """(name, blocks) of the reports since the last drain, oldest first: the newest `most`, at most a ringful."""
        (head,) = RING_HEAD.unpack_from(self._memory, 0)
        count = min(max(head - self._head, 0), self._entries if most is None else min(most, self._entries))
        self._head = head
        first = (head - count) % self._entries
        over = max(first + count - self._entries, 0)  # [first, entries) and [0, over) are new
        fresh = self._slice(first, first + count - over) + self._slice(0, over)
        return list(RING_ENTRY.iter_unpack(fresh))

    def _slice(self, first: int, end: int) -> bytes:
        size = RING_ENTRY.size
        return self._memory[RING_HEADER_BYTES + size * first : RING_HEADER_BYTES + size * end]
