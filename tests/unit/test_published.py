"""The published index: layout, what a reader finds, refusals, and two processes at full speed."""

import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from math import log2
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.copier import checksum
from kvstore.errors import ProtocolError
from kvstore.gallop import gallop
from kvstore.published import (
    EMPTY,
    ENTRY,
    ENTRY_BYTES,
    HEADER_BYTES,
    PARTIAL,
    PROBES,
    READABLE,
    STATE_AT,
    Entry,
    IndexReader,
    PublishedIndex,
    ident,
    index_bytes,
)
from kvstore.region import Region, make_region
from kvstore.types import BlockKey
from tests.unit.churning_writer import ENTRIES, KEYS, SLOT_BYTES, SLOTS, name_of, payload_of

REPO = Path(__file__).parents[2]
BODY = (READABLE, 1, 32)
PLACE = (5, 6 << 20, 65536, 0xFEDCBA9876543210, 9)


def key(number: int, home: int = 0) -> BlockKey:
    return BlockKey(home.to_bytes(8, "little") + number.to_bytes(8, "big"))


def made(entries: int) -> tuple[bytearray, PublishedIndex, IndexReader]:
    memory = bytearray(index_bytes(entries))
    return memory, PublishedIndex(memory, entries, epoch=77), IndexReader(memory)  # type: ignore[arg-type]


def said(found: tuple[int, bytes] | None) -> Entry:
    assert found is not None
    return Entry._make(ENTRY.unpack(found[1]))


# Layout.


def test_the_header_is_drawn_as_in_the_protocol() -> None:
    memory, _, reader = made(16)
    assert memory[:32] == b"CAIRNIDX" + struct.pack("<IIQQ", 1, 64, 16, 77)
    assert reader.epoch == 77
    assert len(memory) == 4096 + 16 * 64


def test_an_entry_is_drawn_as_in_the_protocol() -> None:
    memory, index, reader = made(16)
    name = BlockKey(key(3, home=5) + b"\x02\x01")
    index.publish(ident(7, name), (PARTIAL, 1, 300), PLACE)
    found = reader.find(ident(7, name))
    assert found is not None
    at, entry = found
    assert at == 4096 + 64 * ((5 + 0x102 * 0x9E3779B97F4A7C15) % 16)
    assert entry == memory[at : at + 64]
    assert entry[:4] == struct.pack("<I", 2)
    assert entry[4:8] == struct.pack("<BBH", PARTIAL, 1, 300)
    assert entry[8:28] == struct.pack("<HH", 7, 0x102) + name[:16]
    assert entry[28:64] == struct.pack("<IQQQQ", *PLACE)


def test_the_same_key_in_other_namespaces_and_parts_is_another_block() -> None:
    _, index, reader = made(64)
    names = [ident(space, BlockKey(key(1) + part)) for space in (1, 2) for part in (b"", b"\1\0", b"\0\1")]
    assert len(set(names)) == 6
    for generation, name in enumerate(names):
        index.publish(name, BODY, (*PLACE[:4], generation))
    assert [said(reader.find(name)).generation for name in names] == [0, 1, 2, 3, 4, 5]
    assert reader.find(ident(3, key(1))) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda memory: memory[:100],
        lambda memory: b"",
        lambda memory: b"KAIRNIDX" + memory[8:],
        lambda memory: memory[:8] + b"\2" + memory[9:],
        lambda memory: memory[:12] + b"\x80" + memory[13:],
        lambda memory: memory[:16] + bytes(8) + memory[24:],
        lambda memory: memory[:16] + b"\7" + memory[17:],
        lambda memory: memory[:16] + b"\x20" + memory[17:],
        lambda memory: memory[:16] + b"\xff" * 8 + memory[24:],
        lambda memory: memory[:-1],
    ],
    ids=["short", "empty", "magic", "version", "entry bytes", "no entries", "seven entries", "more", "endless", "cut"],
)
def test_what_is_no_index_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    memory, _, _ = made(16)
    with pytest.raises(ProtocolError):
        IndexReader(spoil(bytes(memory)))  # type: ignore[arg-type]


@given(st.binary(min_size=0, max_size=64), st.binary(min_size=1024, max_size=1024))
@settings(max_examples=100, deadline=None)
def test_garbage_is_refused_or_read_within_its_bounds(header: bytes, entries: bytes) -> None:
    memory, _, _ = made(16)
    memory[: len(header)] = header
    memory[HEADER_BYTES:] = entries
    try:
        reader = IndexReader(bytes(memory))  # type: ignore[arg-type]
    except ProtocolError:
        assert header
        return
    name = entries[8:28]
    found = reader.find(name)
    assert found is None or (found[1][8:28] == name and not found[1][0] & 1)
    assert isinstance(reader.is_readable(name), bool)


# One writer, one reader.


def test_what_is_removed_is_not_found_and_what_is_overwritten_changes() -> None:
    _, index, reader = made(16)
    name = ident(1, key(1))
    assert reader.find(name) is None
    assert not index.remove(name)
    assert index.publish(name, (PARTIAL, 1, 3), PLACE)
    assert said(reader.find(name)).layers == 3
    assert not reader.is_readable(name)
    partial = reader.find(name)
    assert partial is not None
    assert reader.is_unchanged(*partial)
    assert index.publish(name, BODY, PLACE)
    assert not reader.is_unchanged(*partial)
    assert reader.is_readable(name)
    whole = reader.find(name)
    assert whole is not None
    assert whole[0] == partial[0], "entries do not move"
    assert index.published == 1
    assert index.remove(name)
    assert not reader.is_unchanged(*whole)
    assert not reader.is_readable(name)
    assert reader.find(name) is None
    assert index.published == 0


def test_the_same_again_in_the_same_place_is_a_change() -> None:
    _, index, reader = made(16)
    name = ident(1, key(1))
    index.publish(name, BODY, PLACE)
    found = reader.find(name)
    assert found is not None
    index.remove(name)
    index.publish(name, BODY, PLACE)
    assert not reader.is_unchanged(*found)


def test_an_entry_that_is_being_written_is_not_handed_out() -> None:
    memory, index, reader = made(16)
    name = ident(1, key(1))
    index.publish(name, BODY, PLACE)
    found = reader.find(name)
    assert found is not None
    at, _ = found
    memory[at] |= 1  # the writer died here
    assert reader.find(name) is None
    assert not reader.is_readable(name)
    assert not reader.is_unchanged(at, bytes(memory[at : at + ENTRY_BYTES]))


def test_a_sequence_runs_over() -> None:
    memory, index, reader = made(16)
    name = ident(1, key(1, home=2))
    at = HEADER_BYTES + 2 * ENTRY_BYTES
    memory[at : at + 4] = b"\xfe\xff\xff\xff"
    index.publish(name, BODY, PLACE)
    assert said(reader.find(name)).sequence == 0
    index.publish(name, BODY, PLACE)
    assert said(reader.find(name)).sequence == 2


def test_entries_collide_past_the_tables_end() -> None:
    _, index, reader = made(8)
    names = [ident(1, key(number, home=7)) for number in range(4)]
    for name in names:
        index.publish(name, BODY, PLACE)
    places = [(found[0] - HEADER_BYTES) // ENTRY_BYTES for found in map(reader.find, names) if found is not None]
    assert places == [7, 0, 1, 2]
    index.remove(names[0])
    assert [reader.is_readable(name) for name in names] == [False, True, True, True]
    index.publish(names[0], BODY, PLACE)
    again = reader.find(names[0])
    assert again is not None
    assert again[0] == HEADER_BYTES + 7 * ENTRY_BYTES


@pytest.mark.parametrize("entries", [1, 2, 64, 512])
def test_what_finds_no_bucket_is_crowded_out_and_readers_are_told(entries: int) -> None:
    _, index, reader = made(entries)
    room = min(entries, PROBES)
    names = [ident(1, key(number, home=3)) for number in range(room + 3)]
    assert [index.publish(name, BODY, PLACE) for name in names] == [True] * room + [False] * 3
    assert (index.published, index.crowded_out, reader.is_complete) == (room, 3, False)
    assert [reader.is_readable(name) for name in names] == [True] * room + [False] * 3
    assert not index.remove(names[-1])
    assert index.publish(names[0], BODY, PLACE), "what is published can be published again"
    assert index.remove(names[room // 2])
    assert index.publish(names[-1], BODY, PLACE)
    assert reader.is_readable(names[-1])


def test_a_table_that_was_churned_is_as_fast_as_a_fresh_one() -> None:
    entries, chance = 1024, random.Random(1)
    memory, index, _ = made(entries)
    live: list[bytes] = []
    for _ in range(6 * entries):
        name = ident(1, BlockKey(chance.randbytes(16)))
        assert index.publish(name, BODY, PLACE)
        live.append(name)
        if len(live) > entries // 2:
            victim = chance.randrange(len(live))
            live[victim], live[-1] = live[-1], live[victim]
            assert index.remove(live.pop())
    states = [memory[HEADER_BYTES + at * ENTRY_BYTES + STATE_AT] for at in range(entries)]
    lengths, run = [], 0
    for state in states + states:
        run = 0 if state == EMPTY else run + 1
        lengths.append(run)
    assert sum(lengths[entries:]) / entries < 12, "buckets that a miss looks at, half of the table in use"
    for name in live:
        index.remove(name)
    assert not any(memory[HEADER_BYTES + at * ENTRY_BYTES + STATE_AT] for at in range(entries))


# Chains.


@given(st.integers(0, 70), st.data())
@settings(deadline=None)
def test_gallop_counts_what_is_here_in_few_looks(length: int, data: st.DataObject) -> None:
    answer = data.draw(st.integers(0, length))
    looks: list[int] = []

    def here(position: int) -> bool:
        looks.append(position)
        return position < answer

    assert gallop(here, length) == answer
    assert all(0 <= position < length for position in looks)
    assert len(looks) <= 3 + 2 * log2(max(answer, 1) + 1)


@pytest.mark.parametrize("parts", [1, 3])
def test_match_is_the_longest_prefix_that_is_readable_in_all_parts(parts: int) -> None:
    chance = random.Random(parts)
    _, index, reader = made(512)
    keys = [BlockKey(chance.randbytes(16)) for _ in range(40)]
    names = [[ident(4, BlockKey(key + part.to_bytes(2, "little"))) for part in range(parts)] for key in keys]
    assert reader.match(4, [], parts) == 0
    for stored, block in enumerate(names):
        assert reader.match(4, keys, parts) == stored
        assert reader.match(5, keys, parts) == 0
        for part, name in enumerate(block):
            index.publish(name, (PARTIAL, 1, 1), PLACE)
            assert reader.match(4, keys, parts) == stored, "a part is being written"
            index.publish(name, BODY, PLACE)
            assert reader.match(4, keys, parts) == stored + (part == parts - 1)
    for stored in range(len(keys) - 1, -1, -1):
        index.remove(names[stored][stored % parts])
        assert reader.match(4, keys, parts) == stored


# Two processes.


def test_a_reader_at_full_speed_beside_a_writer_at_full_speed_gets_right_bytes() -> None:
    index, slots = make_region("index", index_bytes(ENTRIES)), make_region("slots", SLOTS * SLOT_BYTES)
    found = unchanged = 0
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.churning_writer", str(index.fd), str(slots.fd)],
        cwd=REPO, pass_fds=(index.fd, slots.fd), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert writer.stdin is not None
    assert writer.stdout is not None
    with writer:
        assert writer.stdout.readline() == b"in full swing\n"
        mapped, entries = (
            Region(region.readonly_fd(), region.size, writable=False, populate=True) for region in (slots, index)
        )
        reader = IndexReader(entries.memory)
        names = [name_of(number) for number in range(KEYS)]
        end = time.monotonic() + 1
        while time.monotonic() < end:
            for number, name in enumerate(names):
                get = reader.find(name)
                if get is None:
                    continue
                found += 1
                entry = said(get)
                copied = bytes(mapped.view(entry.offset, entry.size))
                is_right = copied == payload_of(number, entry.generation)
                if reader.is_unchanged(*get):
                    unchanged += 1
                    assert is_right, "the index by itself promised these bytes"
                assert (checksum(copied) == entry.checksum) == is_right
        writer.stdin.close()
    assert writer.returncode == 0
    assert found > 1000
    assert found / 4 < unchanged < found, "the writer was in the way, and not always"
    for region in (index, slots, mapped, entries):
        region.close()
