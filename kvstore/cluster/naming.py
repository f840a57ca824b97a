"""What blocks are called in the directory: 60 bits of their key and root, and which partition each is in."""

from collections.abc import Sequence

import numpy as np

from kvstore.types import KEY_BYTES, BlockKey

STRIPE_BLOCKS = 32  # consecutive blocks of a chain that have one home
PARTITIONS = 4096  # that homes are given; a stripe is in the one of its first block
NAME_BITS = 60  # an int of so many takes 32 bytes
_MASK = (1 << NAME_BITS) - 1
_PART = 0x9E3779B97F4A7C15


def names_of(root: bytes, keys: Sequence[bytes]) -> list[int]:
    """The name of each block (part). Two blocks may have the same: whoever reads checks the key."""
    if not keys:
        return []
    size = len(keys[0])
    table = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, size)
    names = np.ascontiguousarray(table[:, :8]).view("<u8")[:, 0] ^ np.frombuffer(root, "<u8", 1)
    if size > KEY_BYTES:
        parts = np.ascontiguousarray(table[:, KEY_BYTES:]).view("<u2")[:, 0].astype(np.uint64)
        names = names ^ (parts * np.uint64(_PART))
    found: list[int] = (names & np.uint64(_MASK)).tolist()
    return found


def name_of(root: bytes, key: bytes) -> int:
    """As `names_of`, for one."""
    name = int.from_bytes(key[:8], "little") ^ int.from_bytes(root[:8], "little")
    if len(key) > KEY_BYTES:
        name ^= int.from_bytes(key[KEY_BYTES:], "little") * _PART
    return name & _MASK


def partition_of(root: bytes, first: BlockKey) -> int:
    """Of the stripe that begins with block `first`; all its parts are in the same."""
    return name_of(root, first[:KEY_BYTES]) >> (NAME_BITS - 12)
