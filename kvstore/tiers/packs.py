"""The format of packs of blocks in a bucket, of their manifests, and what both are called.

A pack, `v1/<root, 32 hex digits>/p/<id>`; integers are little-endian:

    0            8   magic "CAIRNPAK"
    8            2   version, 1
    10           6   zero
    16           ..  blocks as they are stored, one after the other
    blocks end   n   the index, below
    .. + n       4   n
    .. + n + 4   8   magic "CAIRNEND"

An index, which alone is also the manifest of its pack, `v1/<root>/m/<id>`:

    0            8   magic "CAIRNIDX"
    8            2   version, 1
    10           2   length of the pack's id, i
    12           4   number of blocks, b
    16           16  root of the namespace
    32           8   where the blocks end in the pack
    40           i   the pack's id, ASCII
    40 + i       68b entries of blocks
    40 + i + 68b 8   xxh3_64 of all before

An entry:

    0            18  key, zeros after its end
    18           18  key of the block before, likewise
    36           1   length of the key, 16 or 18
    37           1   length of the key before; 0: there is none, or nobody said
    38           1   codec: 0 none, 1 lz4, 2 zstd
    39           1   zero
    40           8   where the block begins in the pack
    48           4   bytes stored
    52           4   bytes of the block itself
    56           8   xxh3_64 of the block itself
    64           4   depth: blocks before it in its chain

An id is the wall clock of its writer in milliseconds as 12 hex digits, 8 random ones, the writer's name and a number:
sorted by name, manifests are sorted by age.
"""

import re
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.compression import MAX_BLOCK_BYTES, CodecName
from kvstore.types import KEY_BYTES

VERSION = 1
MAX_BLOCKS = 4096
"""Blocks of one pack."""
NUMBERS = 1_000_000

HEADER = struct.pack("<8sH6x", b"CAIRNPAK", VERSION)
TRAILER = struct.Struct("<I8s")
END = b"CAIRNEND"
INDEX = struct.Struct("<8sHHI16sQ")
INDEX_MAGIC = b"CAIRNIDX"
ENTRY = struct.Struct("<18s18sBBBxQIIQI")
CHECKSUM = struct.Struct("<Q")
ROOT_BYTES = KEY_BYTES
KEY_LENGTHS = (KEY_BYTES, KEY_BYTES + 2)

NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
ID = re.compile(rf"[0-9a-f]{{20}}-{NODE.pattern}-[0-9]{{6}}")
NAME = re.compile(r"v1/([0-9a-f]{32})/([mp])/(.+)")
MAX_ID_BYTES = 20 + 1 + 64 + 1 + 6
MAX_INDEX_BYTES = INDEX.size + MAX_ID_BYTES + MAX_BLOCKS * ENTRY.size + CHECKSUM.size

CODEC_NUMBERS: dict[CodecName, int] = {"none": 0, "lz4": 1, "zstd": 2}
CODEC_NAMES = {number: name for name, number in CODEC_NUMBERS.items()}


class PackedBlock(NamedTuple):
    """One block in a pack. `checksum` and `raw_bytes` are of the block, `stored_bytes` of what is in the pack."""

    key: bytes
    parent: bytes | None
    codec: CodecName
    offset: int
    stored_bytes: int
    raw_bytes: int
    checksum: int
    depth: int


class Index(NamedTuple):
    """What a pack says of itself."""

    pack_bytes: int  # of the whole object
    blocks: list[PackedBlock]


class Name(NamedTuple):
    """A name in the bucket, taken apart."""

    root: bytes
    is_manifest: bool
    pack_id: str


def pack_id(wall_ms: int, nonce: int, node: str, number: int) -> str:
    """The id of a pack; `nonce` has 32 bits and is the writer's, `number` counts its packs."""
    return f"{wall_ms:012x}{nonce:08x}-{node}-{number % NUMBERS:06d}"


def made_ms(identifier: str) -> int:
    """When its writer, by its own clock, made the id."""
    return int(identifier[:12], 16)


def folder(root: bytes) -> str:
    return f"v1/{root.hex()}/"


def manifest_name(root: bytes, identifier: str) -> str:
    return f"{folder(root)}m/{identifier}"


def pack_name(root: bytes, identifier: str) -> str:
    return f"{folder(root)}p/{identifier}"


def parse_name(name: str) -> Name | None:
    """None for whatever is no pack and no manifest: others may keep things beside."""
    match = NAME.fullmatch(name)
    if match is None or not ID.fullmatch(match[3]):
        return None
    return Name(bytes.fromhex(match[1]), match[2] == "m", match[3])


def blocks_end(blocks: Sequence[PackedBlock]) -> int:
    """Where the index begins, in a pack of blocks that lie one after the other."""
    return blocks[-1].offset + blocks[-1].stored_bytes if blocks else len(HEADER)


def encode_index(root: bytes, identifier: str, blocks: Sequence[PackedBlock]) -> bytes:
    """The manifest of a pack of at most `MAX_BLOCKS` blocks, which lie one after the other."""
    assert len(root) == ROOT_BYTES
    assert len(blocks) <= MAX_BLOCKS
    assert ID.fullmatch(identifier), identifier
    name = identifier.encode()
    index = bytearray(INDEX.pack(INDEX_MAGIC, VERSION, len(name), len(blocks), root, blocks_end(blocks)))
    index += name
    for block in blocks:
        parent = block.parent or b""
        index += ENTRY.pack(
            *(block.key, parent, len(block.key), len(parent), CODEC_NUMBERS[block.codec]),
            *(block.offset, block.stored_bytes, block.raw_bytes, block.checksum, block.depth),
        )
    index += CHECKSUM.pack(xxh3_64_intdigest(index))
    return bytes(index)


def encode_trailer(index: bytes) -> bytes:
    """What follows the blocks in a pack."""
    return index + TRAILER.pack(len(index), END)


def parse_index(index: bytes | memoryview, root: bytes, identifier: str) -> Index | None:
    """What is in the pack `identifier` of `root`; None when that is not what the bytes say, or when they are damaged.

    Each block of the answer lies inside the pack and has sensible sizes.
    """
    fixed = INDEX.size + CHECKSUM.size
    if not fixed <= len(index) <= MAX_INDEX_BYTES:
        return None
    covered = memoryview(index)[: -CHECKSUM.size]
    if CHECKSUM.unpack_from(index, len(covered)) != (xxh3_64_intdigest(covered),):
        return None
    magic, version, id_bytes, count, their_root, end = INDEX.unpack_from(index)
    name = identifier.encode()
    if (magic, version, their_root, id_bytes) != (INDEX_MAGIC, VERSION, root, len(name)):
        return None
    entries = covered[INDEX.size + id_bytes :]
    if covered[INDEX.size : INDEX.size + id_bytes] != name or len(entries) != count * ENTRY.size:
        return None
    blocks = [_block(fields, end) for fields in ENTRY.iter_unpack(entries)]
    if count > MAX_BLOCKS or None in blocks:
        return None
    return Index(end + len(index) + TRAILER.size, [block for block in blocks if block is not None])


def _block(fields: tuple[bytes, bytes, int, int, int, int, int, int, int, int], end: int) -> PackedBlock | None:
    key, parent, key_bytes, parent_bytes, codec, offset, stored, raw, checksum, depth = fields
    is_sound = (
        key_bytes in KEY_LENGTHS
        and parent_bytes in (0, *KEY_LENGTHS)
        and codec in CODEC_NAMES
        and len(HEADER) <= offset <= offset + stored <= end
        and 0 < stored <= raw <= MAX_BLOCK_BYTES
        and (stored == raw or codec != CODEC_NUMBERS["none"])
    )
    if not is_sound:
        return None
    before = parent[:parent_bytes] if parent_bytes else None
    return PackedBlock(key[:key_bytes], before, CODEC_NAMES[codec], offset, stored, raw, checksum, depth)


def parse_pack(pack: bytes | memoryview, root: bytes, identifier: str) -> Index | None:
    """The same from a whole pack, without its manifest; None when it is not that pack, or damaged in its index."""
    if len(pack) < len(HEADER) + TRAILER.size or memoryview(pack)[: len(HEADER)] != HEADER:
        return None
    start_of_trailer = len(pack) - TRAILER.size
    index_bytes, magic = TRAILER.unpack_from(pack, start_of_trailer)
    if magic != END or index_bytes > start_of_trailer - len(HEADER):
        return None
    index = parse_index(memoryview(pack)[start_of_trailer - index_bytes : start_of_trailer], root, identifier)
    return index if index is not None and index.pack_bytes == len(pack) else None


class Span(NamedTuple):
    """Neighbours in one pack that one request reads: [start, end), and which of the wanted blocks lie in it."""

    start: int
    end: int
    members: list[int]


def spans(places: Iterable[tuple[int, int, int]], gap_bytes: int, most_bytes: int) -> list[Span]:
    """Join (offset, bytes, which) of one pack into as few reads as the limits allow.

    Blocks at most `gap_bytes` apart are read together, up to `most_bytes` a read; a larger block is read alone.
    """
    joined: list[Span] = []
    for offset, size, which in sorted(places):
        end = offset + size
        if joined:
            last = joined[-1]
            wider = max(last.end, end)
            if offset - last.end <= gap_bytes and wider - last.start <= most_bytes:
                joined[-1] = Span(last.start, wider, [*last.members, which])
                continue
        joined.append(Span(offset, end, [which]))
    return joined
