"""The header of a block on disk: what is written is parsed, and nothing else is."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore.diskblock import ALIGN, HEADER_BYTES, MAX_HITS, BlockHeader, pack, padded, parse, stride
from kvstore.types import BlockKey

HEADER = BlockHeader(
    root=bytes(range(16)),
    key=BlockKey(bytes(range(16, 34))),
    parent=BlockKey(bytes(range(34, 50))),
    depth=7,
    slab_id=0x0102030405060708,
    slot_index=9,
    generation=10,
    size=1 << 20,
    checksum=0xFEDCBA9876543210,
    last_use_ms=1_780_000_000_000,
    hits=11,
)
keys = st.binary(min_size=16, max_size=16) | st.binary(min_size=18, max_size=18)
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
headers = st.builds(
    BlockHeader,
    root=st.binary(min_size=16, max_size=16),
    key=keys,
    parent=st.none() | keys,
    depth=u32,
    slab_id=u64,
    slot_index=u32,
    generation=u64,
    size=u64,
    checksum=u64,
    last_use_ms=u64,
    hits=u32,
)


def resealed(page: bytes) -> bytes:
    """The page with a right checksum of its own: what a bug would write, not what a disk would break."""
    return page[: HEADER_BYTES - 8] + struct.pack("<Q", xxh3_64_intdigest(page[: HEADER_BYTES - 8]))


@given(headers)
def test_a_header_comes_back_as_it_was_packed(header):
    assert parse(pack(header).ljust(ALIGN, b"\0")) == header


def test_a_header_lies_as_the_drawing_says():
    page = pack(HEADER)
    assert len(page) == HEADER_BYTES
    assert page[:12] == b"CAIRNBLK" + struct.pack("<HBB", 1, 18, 16)
    assert page[12:32] == struct.pack("<I", 7) + HEADER.root
    assert page[32:68] == HEADER.key + HEADER.parent + bytes(2)
    assert page[68:120] == struct.pack(
        "<IQIIQQQQ", 11, HEADER.slab_id, 9, 0, 10, 1 << 20, HEADER.checksum, HEADER.last_use_ms
    )
    assert page[120:] == struct.pack("<Q", xxh3_64_intdigest(page[:120]))


@settings(max_examples=300)
@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_header_with_one_flipped_bit_is_none(header, bit):
    page = bytearray(pack(header))
    page[bit // 8] ^= 1 << bit % 8
    assert parse(page) is None


@given(headers, headers, st.integers(0, HEADER_BYTES))
def test_a_header_torn_into_an_older_one_is_one_of_both_or_none(new, old, kept):
    assert parse(pack(new)[:kept] + pack(old)[kept:]) in (new, old, None)


@given(st.binary(max_size=256))
def test_garbage_is_no_header(page):
    assert parse(page) is None


def test_zeros_and_a_short_page_are_no_header():
    assert parse(bytes(ALIGN)) is None
    assert parse(pack(HEADER)[:-1]) is None
    assert parse(b"") is None


@pytest.mark.parametrize(
    ("offset", "change"),
    [(0, b"CAIRNBLQ"), (8, b"\2\0"), (10, b"\x11"), (10, b"\0"), (11, b"\x11")],
    ids=["magic", "version", "key of 17 bytes", "no key", "parent of 17 bytes"],
)
def test_a_header_that_another_program_wrote_is_none(offset, change):
    page = bytearray(pack(HEADER))
    page[offset : offset + len(change)] = change
    assert parse(resealed(bytes(page))) is None


def test_hits_stop_at_what_fits():
    parsed = parse(pack(HEADER._replace(hits=2**40)))
    assert parsed is not None
    assert parsed.hits == MAX_HITS


def test_a_number_that_does_not_fit_is_refused():
    with pytest.raises(struct.error):
        pack(HEADER._replace(generation=-1))
    with pytest.raises(AssertionError):
        pack(HEADER._replace(key=BlockKey(bytes(17))))


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192), (1 << 20, 1 << 20)])
def test_sizes_are_rounded_up_to_pages(size, expected):
    assert padded(size) == expected
    assert stride(size) == 4096 + expected
