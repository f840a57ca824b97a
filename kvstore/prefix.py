"""Namespaces and chained block keys: equal keys mean equal tokens from the start of the prompt to this block.

A root is blake2b-128, personalised, over the namespace's fields in their order, then tenant and secret:

    u16 length | field name | tag: i (integer) or s (text) | u32 length | value

with every number little-endian, an integer as 8 bytes and text as UTF-8. `codec` and `compaction` are left out where
they are empty. The key of block i is hash(key[i-1] ‖ its tokens as little-endian u32), where key[-1] is the
root.
"""

import re
import struct
from collections.abc import Callable, Iterable
from hashlib import blake2b, sha256
from typing import Any, Final, Literal, cast

import msgspec
import numpy as np
from xxhash import xxh3_128_digest

from kvstore.types import KEY_BYTES, BlockKey

HashName = Literal["xxh3", "sha256"]

TOKEN_BYTES: Final = 4
MAX_TOKEN: Final = 2**32 - 1
MAX_TEXT_BYTES: Final = 256
PART: Final = struct.Struct("<H")

LIMITS: Final = {  # inclusive, by field
    "weights_epoch": (0, 2**63 - 1),
    "block_tokens": (1, 65_536),
    "parts": (1, 65_535),
    "layers": (1, 65_535),
    "block_bytes": (0, 2**63 - 1),
}
REQUIRED_TEXT: Final = frozenset({"model", "dtype", "layout"})
TERMS: Final = frozenset({"codec", "compaction"})  # no part of a root while they are empty
TERMS_PATTERN: Final = r"^([a-z0-9]+([+._-][a-z0-9]+)*)?$"


def _sha256_128(block: bytes) -> BlockKey:
    return BlockKey(sha256(block).digest()[:KEY_BYTES])


HASHES: Final[dict[str, Callable[[bytes], BlockKey]]] = {
    "xxh3": cast(Callable[[bytes], BlockKey], xxh3_128_digest),
    "sha256": _sha256_128,
}


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What gives the bytes of a block their meaning. Any other value in any field is another namespace.

    model, revision, adapter: names as the engines agree on them; the last two may be empty.
    weights_epoch: grows when the weights change under the same name (0 and up).
    dtype, layout: how the values of a block are encoded and in what order they lie.
    block_tokens: tokens of a block, 1 to 65,536.
    hash: "xxh3", or "sha256" where strangers share a pool and could search for collisions.
    parts: writers that each put a slice of every block, 1 to 65,535.
    layers: layers of the model, 1 to 65,535; the watermark of a block counts up to it.
    block_bytes: bytes of one part of one block; 0 leaves the size open.
    codec: how the engines encode a block's values ("int8+zstd"); empty: as `dtype` and `layout` say.
    compaction: what of the cache is left out ("sink4+window1024"); empty: nothing.

    Raises ValueError for a value outside these, and for text over 256 bytes.
    """

    model: str
    revision: str = ""
    weights_epoch: int = 0
    dtype: str
    layout: str
    block_tokens: int
    adapter: str = ""
    hash: HashName = "xxh3"
    parts: int = 1
    layers: int
    block_bytes: int = 0
    codec: str = ""
    compaction: str = ""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check_field(name, getattr(self, name))

    def root(self, tenant: str, secret: str) -> BlockKey:
        """The key before the first block, for one tenant. Who lacks the secret cannot guess any key."""
        digest = blake2b(digest_size=KEY_BYTES, person=b"cairn-root")
        self._digest_into(digest)
        digest.update(_encode_field("tenant", tenant))
        digest.update(_encode_field("secret", secret))
        return BlockKey(digest.digest())

    def fingerprint(self) -> str:
        """32 hex digits that two sides compare; says nothing about tenant or secret."""
        digest = blake2b(digest_size=KEY_BYTES, person=b"cairn-namespace")
        self._digest_into(digest)
        return digest.hexdigest()

    def differences(self, other: "Namespace") -> list[str]:
        """One line for each field in which `other` differs: "dtype: 'bfloat16' here, 'float16' there"."""
        return [
            f"{name}: {mine!r} here, {theirs!r} there"
            for name in self.__struct_fields__
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]

    def _digest_into(self, digest: blake2b) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value or name not in TERMS:
                digest.update(_encode_field(name, value))


def chain(tokens: Any, block_tokens: int, root: BlockKey, hash: HashName = "xxh3") -> list[BlockKey]:
    """The key of each full block of `tokens`, first to last; a partial last block has none.

    tokens: one dimension of ids 0 to 2**32 - 1. Buffers of integers of 2 bytes and more (numpy, array,
    memoryview) and CPU tensors are taken whole; sequences and other iterables one id at a time.
    root: the namespace's root, or the key of the block before `tokens[0]`.

    Raises ValueError for ids out of range, for what is no integer, and for bytes, whose unit nobody knows.
    """
    if not 1 <= block_tokens <= LIMITS["block_tokens"][1]:
        raise ValueError(f"block_tokens must be 1 to {LIMITS['block_tokens'][1]:,}, not {block_tokens}")
    if len(root) != KEY_BYTES:
        raise ValueError(f"a root or parent key has {KEY_BYTES} bytes, not {len(root)}")
    if hash not in HASHES:
        raise ValueError(f"hash must be one of {', '.join(HASHES)}, not {hash!r}")
    digest = HASHES[hash]
    encoded = _encode_tokens(tokens)
    size = TOKEN_BYTES * block_tokens
    whole = memoryview(encoded)[: len(encoded) // size * size]
    key = root
    return [key := digest(key + block) for (block,) in struct.iter_unpack(f"{size}s", whole)]


def part_key(key: BlockKey, part: int) -> BlockKey:
    """The key of one part of a block, 18 bytes; where a namespace has one part, the block's own key is used."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a block key has {KEY_BYTES} bytes, not {len(key)}")
    if not 0 <= part < LIMITS["parts"][1]:
        raise ValueError(f"part must be 0 to {LIMITS['parts'][1] - 1:,}, not {part}")
    return BlockKey(key + PART.pack(part))


def split_part(key: BlockKey) -> tuple[BlockKey, int]:
    """The block's key and the part's number; 0 for a block's own key. ValueError for any other length."""
    if len(key) == KEY_BYTES:
        return key, 0
    if len(key) == KEY_BYTES + PART.size:
        return BlockKey(key[:KEY_BYTES]), PART.unpack_from(key, KEY_BYTES)[0]
    raise ValueError(f"a key has {KEY_BYTES} or {KEY_BYTES + PART.size} bytes, not {len(key)}")


def _check_field(name: str, value: object) -> None:
    if name in LIMITS:
        low, high = LIMITS[name]
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} must be an integer from {low:,} to {high:,}, not {value!r}")
    elif not isinstance(value, str):
        raise ValueError(f"{name} must be text, not {value!r}")
    elif name == "hash":
        if value not in HASHES:
            raise ValueError(f"hash must be one of {', '.join(HASHES)}, not {value!r}")
    elif len(value.encode()) > MAX_TEXT_BYTES:
        raise ValueError(f"{name} must be at most {MAX_TEXT_BYTES} bytes of UTF-8, not {len(value.encode())}")
    elif not value and name in REQUIRED_TEXT:
        raise ValueError(f"{name} must not be empty")
    elif name in TERMS and not re.fullmatch(TERMS_PATTERN, value):
        raise ValueError(f"{name} must be terms of a-z and 0-9, with + . _ or - between them, not {value!r}")


def _encode_field(name: str, value: str | int) -> bytes:
    tag, encoded = (b"s", value.encode()) if isinstance(value, str) else (b"i", value.to_bytes(8, "little"))
    label = name.encode()
    return struct.pack("<H", len(label)) + label + tag + struct.pack("<I", len(encoded)) + encoded


def _encode_tokens(tokens: Any) -> bytes:
    if isinstance(tokens, str | bytes | bytearray):
        raise ValueError(f"tokens must be integers, not {type(tokens).__name__}")
    if hasattr(tokens, "numpy"):
        tokens = tokens.numpy()
    try:
        ids = np.asarray(memoryview(tokens))
    except TypeError:
        return _pack(tokens)
    if ids.ndim != 1:
        raise ValueError(f"tokens must have one dimension, not the shape {ids.shape}")
    if ids.dtype.kind not in "iu" or ids.dtype.itemsize == 1:
        raise ValueError(f"tokens must be integers of at least 2 bytes, not {ids.dtype}")
    if not _in_range(ids):
        raise ValueError(f"tokens must be 0 to {MAX_TOKEN:,}, not {int(ids.min()):,} to {int(ids.max()):,}")
    return ids.astype("<u4", copy=False).tobytes()


def _in_range(ids: np.ndarray) -> bool:
    if not ids.size:
        return True
    if ids.dtype.kind == "i" and int(ids.min()) < 0:
        return False
    return ids.dtype.itemsize <= TOKEN_BYTES or int(ids.max()) <= MAX_TOKEN


def _pack(tokens: Iterable[int]) -> bytes:
    ids = tokens if isinstance(tokens, list | tuple) else list(tokens)
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise ValueError(f"tokens must be integers from 0 to {MAX_TOKEN:,}: {error}") from error
