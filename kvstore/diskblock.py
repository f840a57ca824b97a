"""The header page before each block on disk, byte by byte, and how slots are laid out.

A slot is one page for the header, then the payload, both from and to multiples of `ALIGN`. The header:

    offset  bytes
         0      8  magic, "CAIRNBLK"
         8      2  u16 format version, 1
        10      1  u8 bytes of the key: 16, or 18 for a part
        11      1  u8 bytes of the parent's key: 0 when there is none, 16 or 18
        12      4  u32 depth: blocks before this one in its chain
        16     16  root of the namespace
        32     18  key, then zeros
        50     18  parent's key, then zeros
        68      4  u32 hits, of at most 2**32 - 1
        72      8  u64 slab
        80      4  u32 slot's index in its slab
        84      4  zeros
        88      8  u64 generation of the slot
        96      8  u64 bytes of the payload
       104      8  u64 xxh3_64 of the payload
       112      8  u64 last use, milliseconds since 1970
       120      8  u64 xxh3_64 of bytes 0 to 119
       128   3968  zeros

Numbers are little-endian. The padding after the payload may hold anything. A slot that was given back still has its old
header: whoever reads it compares key, slab, index and generation with what it expects.
"""

import struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.types import KEY_BYTES, BlockKey

ALIGN: Final = 4096
"""Of offsets, sizes and memory: what every disk and filesystem takes past the page cache."""

MAGIC: Final = b"CAIRNBLK"
FORMAT_VERSION: Final = 1
MAX_HITS: Final = 2**32 - 1
FIELDS: Final = struct.Struct("<8sHBBI16s18s18sIQI4xQQQQ")
CHECKSUM: Final = struct.Struct("<Q")
HEADER_BYTES: Final = FIELDS.size + CHECKSUM.size
PART_KEY_BYTES: Final = KEY_BYTES + 2
KEY_LENGTHS: Final = (KEY_BYTES, PART_KEY_BYTES)

assert HEADER_BYTES == 128


class BlockHeader(NamedTuple):
    """What a block on disk says of itself. Sizes in bytes."""

    root: bytes
    key: BlockKey
    parent: BlockKey | None
    depth: int
    slab_id: int
    slot_index: int
    generation: int
    size: int
    checksum: int
    last_use_ms: int
    hits: int


def padded(size: int) -> int:
    """`size` rounded up to a multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def stride(slot_bytes: int) -> int:
    """Bytes from one slot to the next, header page included, where payloads have up to `slot_bytes`."""
    return ALIGN + padded(slot_bytes)


def pack(header: BlockHeader) -> bytes:
    """The first HEADER_BYTES of the page; the rest of it must be zeros.

    Raises:
        struct.error: a number does not fit.
    """
    parent = header.parent or b""
    assert len(header.root) == KEY_BYTES
    assert len(header.key) in KEY_LENGTHS
    assert len(parent) in (0, *KEY_LENGTHS)
    fields = FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        len(header.key),
        len(parent),
        header.depth,
        header.root,
        header.key,
        parent,
        min(header.hits, MAX_HITS),
        header.slab_id,
        header.slot_index,
        header.generation,
        header.size,
        header.checksum,
        header.last_use_ms,
    )
    return fields + CHECKSUM.pack(xxh3_64_intdigest(fields))


def parse(page: bytes | bytearray | memoryview) -> BlockHeader | None:
    """The header at the start of `page`. None when there is none, or it is torn, damaged or of another version."""
    if len(page) < HEADER_BYTES:
        return None
    fields = bytes(page[: FIELDS.size])
    (expected,) = CHECKSUM.unpack_from(page, FIELDS.size)
    if xxh3_64_intdigest(fields) != expected:
        return None
    magic, version, key_bytes, parent_bytes, depth, root, key, parent, hits, *rest = FIELDS.unpack(fields)
    if magic != MAGIC or version != FORMAT_VERSION:
        return None
    if key_bytes not in KEY_LENGTHS or parent_bytes not in (0, *KEY_LENGTHS):
        return None
    slab_id, slot_index, generation, size, checksum, last_use_ms = rest
    return BlockHeader(
        root=root,
        key=BlockKey(key[:key_bytes]),
        parent=BlockKey(parent[:parent_bytes]) if parent_bytes else None,
        depth=depth,
        slab_id=slab_id,
        slot_index=slot_index,
        generation=generation,
        size=size,
        checksum=checksum,
        last_use_ms=last_use_ms,
        hits=hits,
    )
