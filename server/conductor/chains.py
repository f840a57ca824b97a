"""Prompts as their blocks' keys, once for each way in which a model's holders name them."""

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix import HashName, chain
from kvstore.types import KEY_BYTES, BlockKey
from scheduler.requests import Chain, names_of

NO_ROOT: Final = bytes(KEY_BYTES)  # of engines without a store: what their own events are named after


class Scheme(NamedTuple):
    """How blocks are named: their size, the hash, and the key before the first."""

    block_tokens: int
    hash: HashName
    root: bytes


class Hashed(NamedTuple):
    """One prompt under one scheme: `keys` are what `chain` is made of, packed."""

    chain: Chain
    keys: bytes
    scheme: Scheme

    def key(self, block: int) -> BlockKey:
        return BlockKey(self.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES])

    def run(self, first: int, stop: int) -> list[BlockKey]:
        """Keys of blocks [first, stop)."""
        return [self.key(block) for block in range(first, stop)]


def hashed(tokens: NDArray[np.uint32], schemes: Iterable[Scheme]) -> list[Hashed]:
    """tokens: u32 `[n]`."""
    found = []
    for scheme in schemes:
        keys = b"".join(chain(tokens, scheme.block_tokens, BlockKey(scheme.root), scheme.hash))
        found.append(Hashed(Chain(names_of(keys), scheme.block_tokens), keys, scheme))
    return found
