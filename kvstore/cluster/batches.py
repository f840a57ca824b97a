"""What is in a batch of announcements: packed numbers, checked, and the digests that compare two sides.

A block in a tier is an element. The digest of a partition has the count of a node's elements there and their xor.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.cluster.homes import Words, mix
from kvstore.cluster.naming import NAME_BITS, PARTITIONS
from kvstore.errors import InvalidRequest
from kvstore.wire_cluster import DIGEST, TIER_BITS, Announce

NAMES_MOST = (1 << 16) - 1  # of one message: `Located.which` is of u16
ALL_TIERS = sum(TIER_BITS.values())
TIER_INDICES = range(ALL_TIERS.bit_length())
_WORD = (1 << 64) - 1


def element(name: int, bit: int) -> int:
    """What a block in a tier (the index of its bit in `TIER_BITS`) is in the digests of its partition: 64 bits."""
    word = name * 8 + bit
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)


def elements(names: Words, tiers: int) -> Words:
    """The xor of each block's elements in all these tiers (bits)."""
    found = np.zeros_like(names)
    for bit in TIER_INDICES:
        if tiers >> bit & 1:
            found ^= mix(names * np.uint64(8) + np.uint64(bit))
    return found


class Records(NamedTuple):
    """A batch, unpacked and found to make sense."""

    resets: tuple[int, ...]
    partitions: tuple[int, ...]
    names: tuple[int, ...]
    tiers: bytes
    digests: list[tuple[int, int, int]]


def numbers(code: str, packed: bytes) -> tuple[int, ...]:
    """Raises InvalidRequest if a part of a number is left."""
    count, rest = divmod(len(packed), struct.calcsize(f"<{code}"))
    if rest:
        raise InvalidRequest(f"{len(packed)} bytes are no whole number of {code}")
    return struct.unpack(f"<{count}{code}", packed)


def pack(code: str, numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def unpack(batch: Announce) -> Records:
    """Raises InvalidRequest for lengths that do not agree and numbers out of range."""
    records = Records(
        resets=numbers("H", batch.resets),
        partitions=numbers("H", batch.partitions),
        names=numbers("Q", batch.names),
        tiers=batch.tiers,
        digests=list(DIGEST.iter_unpack(batch.digests[: len(batch.digests) // DIGEST.size * DIGEST.size])),
    )
    if len(batch.digests) % DIGEST.size or batch.sequence < 1:
        raise InvalidRequest("a part of a digest, or a batch without a number")
    if not len(records.partitions) == len(records.names) == len(records.tiers) <= NAMES_MOST:
        raise InvalidRequest("partitions, names and tiers do not agree, or are too many")
    told = (*records.resets, *records.partitions, *(partition for partition, _, _ in records.digests))
    if max(told, default=0) >= PARTITIONS or max(records.tiers, default=0) > ALL_TIERS:
        raise InvalidRequest("a partition or a tier that there is not")
    if max(records.names, default=0) >> NAME_BITS:
        raise InvalidRequest(f"a name of more than {NAME_BITS} bits")
    return records
