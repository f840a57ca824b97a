"""The format of packs and manifests: what comes back, what damage looks like, and which blocks are read together."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.copier import checksum
from kvstore.tiers.pack_map import Location, Pack
from kvstore.tiers.packing import Offered, assemble, groups, take_out
from kvstore.tiers.packs import (
    HEADER,
    MAX_BLOCKS,
    PackedBlock,
    blocks_end,
    encode_index,
    made_ms,
    manifest_name,
    pack_id,
    pack_name,
    parse_index,
    parse_name,
    parse_pack,
    spans,
)

ROOT = bytes(range(16))
OTHER_ROOT = bytes(16)
ID = pack_id(1_764_460_800_000, 0xCA1211, "node-a", 7)

KEYS = st.one_of(st.binary(min_size=16, max_size=16), st.binary(min_size=18, max_size=18))


@st.composite
def packed_blocks(draw: Any) -> list[PackedBlock]:
    blocks, end = [], len(HEADER)
    for key in draw(st.lists(KEYS, max_size=20)):
        raw = draw(st.integers(1, 1 << 30))
        stored = draw(st.integers(1, raw))
        codec = draw(st.sampled_from(["lz4", "zstd"])) if stored < raw else "none"
        parent = draw(st.none() | KEYS)
        digest, depth = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**32 - 1))
        blocks.append(PackedBlock(key, parent, codec, end, stored, raw, digest, depth))
        end += stored
    return blocks


def offered(*contents: bytes) -> list[Offered]:
    return [
        Offered(bytes([number]) * 16, None, number, checksum(content), memoryview(content))
        for number, content in enumerate(contents)
    ]


def small_pack(codec: Any = "none") -> tuple[bytes, list[bytes]]:
    contents = [b"first block" * 9, b"second" * 30, b"x"]
    packed = assemble(codec, offered(*contents))
    return bytes(packed.sealed(encode_index(ROOT, ID, packed.blocks))), contents


def read_back(pack: bytes, block: PackedBlock) -> bytes | None:
    target = bytearray(block.raw_bytes)
    place = Location(
        Pack(0, ROOT, ID, 0), block.offset, block.stored_bytes, block.raw_bytes, block.checksum, block.codec
    )
    body = memoryview(pack)[block.offset : block.offset + block.stored_bytes]
    return bytes(target) if take_out(body, block.offset, place, memoryview(target)) else None


# Indexes and packs


@given(packed_blocks())
def test_any_index_comes_back(blocks: list[PackedBlock]) -> None:
    index = parse_index(encode_index(ROOT, ID, blocks), ROOT, ID)
    assert index is not None
    assert index.blocks == blocks
    assert index.pack_bytes > blocks_end(blocks)


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_a_pack_can_be_read_without_its_manifest(codec: Any) -> None:
    pack, contents = small_pack(codec)
    index = parse_pack(pack, ROOT, ID)
    assert index is not None
    assert index.pack_bytes == len(pack)
    assert [block.codec for block in index.blocks] == ([codec, codec, "none"] if codec != "none" else ["none"] * 3)
    assert [read_back(pack, block) for block in index.blocks] == contents


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_a_flipped_byte_anywhere_gives_a_miss_or_the_same_bytes(codec: Any) -> None:
    pack, contents = small_pack(codec)
    for place in range(len(pack)):
        for change in (1, 0x80, 0xFF):
            damaged = bytearray(pack)
            damaged[place] ^= change
            index = parse_pack(bytes(damaged), ROOT, ID)
            for block in index.blocks if index else []:
                assert read_back(bytes(damaged), block) in (None, contents[block.depth])


@pytest.mark.parametrize("change", [1, 0x80, 0xFF])
def test_a_flipped_byte_in_a_manifest_makes_all_of_it_a_miss(change: int) -> None:
    packed = assemble("none", offered(b"one", b"two"))
    manifest = encode_index(ROOT, ID, packed.blocks)
    for place in range(len(manifest)):
        damaged = bytearray(manifest)
        damaged[place] ^= change
        assert parse_index(bytes(damaged), ROOT, ID) is None


def test_whatever_is_cut_off_or_added_makes_it_a_miss() -> None:
    pack, _ = small_pack()
    manifest = encode_index(ROOT, ID, assemble("none", offered(b"one", b"two")).blocks)
    for most in range(len(pack)):
        assert parse_pack(pack[:most], ROOT, ID) is None
    for most in range(len(manifest)):
        assert parse_index(manifest[:most], ROOT, ID) is None
    assert parse_pack(pack + b"x", ROOT, ID) is None
    assert parse_index(manifest + b"x", ROOT, ID) is None


def test_a_pack_of_another_namespace_or_name_is_a_miss() -> None:
    pack, _ = small_pack()
    other = pack_id(1_764_460_800_000, 0xCA1211, "node-b", 7)
    assert parse_pack(pack, OTHER_ROOT, ID) is None
    assert parse_pack(pack, ROOT, other) is None


@given(st.binary(max_size=400))
def test_garbage_is_a_miss(garbage: bytes) -> None:
    assert parse_index(garbage, ROOT, ID) is None
    assert parse_pack(garbage, ROOT, ID) is None


def sound(**changed: Any) -> PackedBlock:
    return PackedBlock(b"k" * 16, None, "none", 16, 10, 10, 1, 0)._replace(**changed)


@pytest.mark.parametrize(
    "block",
    [
        sound(key=b"k" * 17),
        sound(parent=b"p" * 5),
        sound(offset=15),
        sound(stored_bytes=0),
        sound(stored_bytes=9),
        sound(raw_bytes=9),
        sound(raw_bytes=2**31, codec="zstd"),
    ],
)
def test_an_index_that_makes_no_sense_is_a_miss_though_its_checksum_is_right(block: PackedBlock) -> None:
    assert parse_index(encode_index(ROOT, ID, [block]), ROOT, ID) is None
    assert parse_index(encode_index(ROOT, ID, [sound()]), ROOT, ID) is not None


def test_a_block_that_reaches_into_the_index_is_a_miss() -> None:
    beyond = sound(offset=20)
    last = sound(key=b"l" * 16, offset=16)  # where the blocks end: 26
    assert parse_index(encode_index(ROOT, ID, [beyond, last]), ROOT, ID) is None


# Putting together


def test_a_block_without_its_checksum_does_not_get_into_a_pack() -> None:
    good, bad = offered(b"good", b"bad")
    packed = assemble("none", [bad._replace(checksum=0), good])
    assert [block.key for block in packed.blocks] == [good.key]


def test_blocks_are_spread_over_packs_in_their_order() -> None:
    blocks = offered(b"a" * 60, b"b" * 60, b"c" * 200, b"d" * 10, b"e" * 90)
    assert [[block.depth for block in group] for group in groups(blocks, 100)] == [[0], [1], [2], [3, 4]]
    many = offered(*[b"x"]) * (MAX_BLOCKS + 1)
    assert [len(group) for group in groups(many, 1 << 30)] == [MAX_BLOCKS, 1]
    assert list(groups([], 100)) == []


# Names


def test_names_are_sorted_by_age_and_come_apart_again() -> None:
    ids = [pack_id(1000, 5, "b", 1), pack_id(1001, 4, "a", 0), pack_id(1 << 40, 0, "a", 999_999)]
    assert sorted(ids) == ids
    assert [made_ms(identifier) for identifier in ids] == [1000, 1001, 1 << 40]
    assert parse_name(manifest_name(ROOT, ID)) == (ROOT, True, ID)
    assert parse_name(pack_name(ROOT, ID)) == (ROOT, False, ID)


@pytest.mark.parametrize("name", ["", "v1", "v2/" + "0" * 32 + "/m/" + ID, f"v1/{'0' * 31}/m/{ID}", "v1/readme.txt"])
def test_what_others_keep_in_the_bucket_is_no_pack(name: str) -> None:
    assert parse_name(name) is None
    assert parse_name(pack_name(ROOT, "notes.txt")) is None
    assert parse_name(pack_name(ROOT, ID + "/x")) is None


# Reading together

PLACES = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 900)), max_size=30)


@given(PLACES, st.integers(0, 300), st.integers(1, 2000))
@settings(max_examples=200)
def test_every_block_is_read_once_and_within_the_limits(places: Any, gap: int, most: int) -> None:
    wanted = [(offset, size, which) for which, (offset, size) in enumerate(places)]
    joined = spans(wanted, gap, most)
    assert sorted(which for span in joined for which in span.members) == list(range(len(places)))
    for span in joined:
        inside = [wanted[which] for which in span.members]
        assert span.start == min(offset for offset, _, _ in inside)
        assert span.end == max(offset + size for offset, size, _ in inside)
        assert len(inside) == 1 or span.end - span.start <= most


def test_neighbours_are_read_together_and_what_is_far_is_not() -> None:
    joined = spans([(0, 100, 0), (100, 100, 1), (250, 50, 2), (400, 10, 3)], 50, 1000)
    assert [(span.start, span.end, span.members) for span in joined] == [(0, 300, [0, 1, 2]), (400, 410, [3])]
