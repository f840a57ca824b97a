"""Put blocks together to a pack, and take them out again: what the object tier does in copier threads."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.compression import MAX_BLOCK_BYTES, CodecName, compress, decompress
from kvstore.copier import checksum, copy_bytes
from kvstore.errors import ConfigError
from kvstore.tiers.pack_map import Location
from kvstore.tiers.packs import (
    HEADER,
    KEY_LENGTHS,
    MAX_BLOCKS,
    MAX_INDEX_BYTES,
    TRAILER,
    PackedBlock,
    blocks_end,
    encode_trailer,
)


class Offered(NamedTuple):
    """A block to store. `parent` is the key before, `depth` the blocks before it, `checksum` xxh3_64 of `block`."""

    key: bytes
    parent: bytes | None
    depth: int
    checksum: int
    block: memoryview

    def check(self) -> None:
        """Raise ValueError for what a pack cannot hold."""
        if len(self.key) not in KEY_LENGTHS or (self.parent and len(self.parent) not in KEY_LENGTHS):
            raise ValueError(f"a key has 16 or 18 bytes: {self.key!r} after {self.parent!r}")
        if not 0 < self.block.nbytes <= MAX_BLOCK_BYTES:
            raise ValueError(f"a block has 1 to {MAX_BLOCK_BYTES:,} bytes, not {self.block.nbytes:,}")
        if not 0 <= self.depth < 1 << 32:
            raise ValueError(f"depth must be 0 to 2**32 - 1, not {self.depth}")


@dataclass(slots=True)
class Packed:
    """A pack in memory of its own, but for its index."""

    body: memoryview
    blocks: list[PackedBlock]

    def sealed(self, index: bytes) -> memoryview:
        """The whole pack, with this index in place of an earlier one."""
        trailer = encode_trailer(index)
        start = blocks_end(self.blocks)
        self.body[start : start + len(trailer)] = trailer
        return self.body[: start + len(trailer)]


def groups(blocks: Iterable[Offered], pack_bytes: int) -> Iterator[list[Offered]]:
    """Blocks in their order, as many to a pack as fit in `pack_bytes`; a larger block has one of its own."""
    group: list[Offered] = []
    size = 0
    for block in blocks:
        if group and (size + block.block.nbytes > pack_bytes or len(group) == MAX_BLOCKS):
            yield group
            group, size = [], 0
        group.append(block)
        size += block.block.nbytes
    if group:
        yield group


def assemble(codec: CodecName, offered: Sequence[Offered]) -> Packed:
    """Copy or compress the blocks into a pack, but for those whose bytes do not have their checksum."""
    blocks: list[PackedBlock] = []
    pieces: list[memoryview] = []
    end = len(HEADER)
    for key, parent, depth, digest, block in offered:
        if checksum(block) != digest:
            continue
        piece = block if codec == "none" else memoryview(compress(codec, block))
        name = codec if piece.nbytes < block.nbytes else "none"
        blocks.append(PackedBlock(key, parent or None, name, end, piece.nbytes, block.nbytes, digest, depth))
        pieces.append(piece)
        end += piece.nbytes
    body = np.empty(end + MAX_INDEX_BYTES + TRAILER.size, np.uint8).data  # a bytearray is filled, under the GIL
    body[: len(HEADER)] = HEADER
    for packed, piece in zip(blocks, pieces, strict=True):
        copy_bytes(body[packed.offset : packed.offset + packed.stored_bytes], piece)
    return Packed(body, blocks)


def take_out(body: memoryview, start: int, location: Location, target: memoryview) -> bool:
    """Fill `target` with a block of a pack, of which `body` is what begins at `start`; whether it has its checksum."""
    offset = location.offset - start
    stored = body[offset : offset + location.stored_bytes]
    if stored.nbytes != location.stored_bytes:
        return False
    try:
        if location.codec == "none":
            copy_bytes(target, stored)
        else:
            decompress(location.codec, stored, target)
    except (ValueError, ConfigError):
        return False
    return checksum(target) == location.checksum
