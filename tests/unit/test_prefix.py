"""Namespaces and chained keys, against encodings and hashes written out once more here."""

import struct
from array import array
from hashlib import blake2b, sha256

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.prefix import Namespace, chain, part_key, split_part
from kvstore.types import BlockKey

ROOT = BlockKey(bytes(range(16)))
TOKENS = [0, 1, 2, 255, 256, 49_151, 65_536, 2**31 - 1, 7, 7, 7]
FIELDS = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "revision": "main",
    "weights_epoch": 3,
    "dtype": "bfloat16",
    "layout": "LKHTD",
    "block_tokens": 16,
    "adapter": "",
    "hash": "xxh3",
    "parts": 1,
    "layers": 30,
    "block_bytes": 368_640,
    "codec": "",
    "compaction": "",
}
OTHER = {
    "model": "HuggingFaceTB/SmolLM2-135M",
    "revision": "",
    "weights_epoch": 4,
    "dtype": "float16",
    "layout": "LKTHD",
    "block_tokens": 32,
    "adapter": "sql-lora",
    "hash": "sha256",
    "parts": 2,
    "layers": 31,
    "block_bytes": 0,
    "codec": "int8",
    "compaction": "sink4+window1024",
}

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def namespace(**changes) -> Namespace:
    return Namespace(**(FIELDS | changes))


def expected_keys(tokens: list[int], block_tokens: int, digest) -> list[bytes]:
    keys, parent = [], ROOT
    for block in range(len(tokens) // block_tokens):
        ids = tokens[block * block_tokens : (block + 1) * block_tokens]
        parent = digest(parent + b"".join(token.to_bytes(4, "little") for token in ids))[:16]
        keys.append(parent)
    return keys


def expected_root(tenant: str, secret: str) -> bytes:
    encoded = b""
    told = [(name, value) for name, value in FIELDS.items() if value or name not in ("codec", "compaction")]
    for name, value in [*told, ("tenant", tenant), ("secret", secret)]:
        tag, raw = (b"s", value.encode()) if isinstance(value, str) else (b"i", struct.pack("<Q", value))
        encoded += struct.pack("<H", len(name)) + name.encode() + tag + struct.pack("<I", len(raw)) + raw
    return blake2b(encoded, digest_size=16, person=b"cairn-root").digest()


# Keys


def test_keys_are_those_of_other_implementations_forever():
    assert [key.hex() for key in chain([1, 2, 3, 4, 5], 2, ROOT)] == [
        "314a3cfd526b005b4014db1299369111",
        "00fa6f62292031107c1325e035ddaa0d",
    ]
    assert [key.hex() for key in chain([1, 2, 3, 4, 5], 2, ROOT, "sha256")] == [
        "820da1eb5a4ab2b046a95701432d2d65",
        "049c8eb0053ff2ad902297df96d2752e",
    ]
    assert namespace().root("default", "").hex() == "4a5774878ee457dee41ccf6a47e2b53d"


@pytest.mark.parametrize(
    ("name", "digest"),
    [("xxh3", lambda data: xxhash.xxh3_128(data).digest()), ("sha256", lambda data: sha256(data).digest())],
)
@given(tokens=tokens_lists, block_tokens=st.integers(1, 20))
def test_every_full_block_has_the_hash_of_its_parent_and_its_tokens(name, digest, tokens, block_tokens):
    assert chain(tokens, block_tokens, ROOT, name) == expected_keys(tokens, block_tokens, digest)


def torch_tensor(dtype: str):
    def make(tokens):
        import torch

        return torch.tensor(tokens, dtype=getattr(torch, dtype))

    return make


class Tensor:
    """What a tensor of any framework has: the values behind `numpy()`, and no buffer of its own."""

    def __init__(self, tokens):
        self.tokens = tokens

    def numpy(self):
        return np.array(self.tokens, dtype=np.int32)


def strided(tokens):
    spaced = np.full(3 * len(tokens), -1, dtype=np.int32)
    spaced[::3] = tokens
    return spaced[::3]


KINDS = {
    "tuple": tuple,
    "generator": iter,
    "dict view": lambda tokens: dict(enumerate(tokens)).values(),
    "numpy int32": lambda tokens: np.array(tokens, dtype=np.int32),
    "numpy uint32": lambda tokens: np.array(tokens, dtype=np.uint32),
    "numpy int64": lambda tokens: np.array(tokens, dtype=np.int64),
    "numpy uint64": lambda tokens: np.array(tokens, dtype=np.uint64),
    "numpy big-endian": lambda tokens: np.array(tokens, dtype=">i4"),
    "numpy with gaps": strided,
    "numpy read-only": lambda tokens: np.frombuffer(array("i", tokens).tobytes(), dtype=np.int32),
    "array int": lambda tokens: array("i", tokens),
    "array unsigned": lambda tokens: array("I", tokens),
    "array long": lambda tokens: array("q", tokens),
    "memoryview": lambda tokens: memoryview(array("i", tokens)),
    "list of numpy integers": lambda tokens: list(np.array(tokens)),
    "any tensor": Tensor,
    "torch int32": torch_tensor("int32"),
    "torch int64": torch_tensor("int64"),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_the_same_tokens_in_another_container_have_the_same_keys(kind):
    assert chain(kind(TOKENS), 2, ROOT) == chain(TOKENS, 2, ROOT)
    assert chain(kind([]), 2, ROOT) == []


def test_16_bit_tokens_have_the_same_keys_as_wide_ones():
    assert chain(np.array([1, 65_535], dtype=np.uint16), 1, ROOT) == chain([1, 65_535], 1, ROOT)


@given(tokens=tokens_lists.filter(bool), data=st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(tokens, data):
    index = data.draw(st.integers(0, len(tokens) - 1))
    changed = tokens.copy()
    changed[index] ^= 1 << data.draw(st.integers(0, 31))
    before, after = chain(tokens, 4, ROOT), chain(changed, 4, ROOT)
    equal = [mine == theirs for mine, theirs in zip(before, after, strict=True)]
    assert equal == [block < index // 4 for block in range(len(tokens) // 4)]


@given(tokens=tokens_lists, cut=st.integers(0, 10))
def test_a_chain_goes_on_from_the_key_before(tokens, cut):
    whole = chain(tokens, 5, ROOT)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else ROOT
    assert whole[:cut] + chain(tokens[5 * cut :], 5, parent) == whole


def test_a_longer_prompt_with_the_same_beginning_shares_its_keys():
    assert chain([*TOKENS, 5, 6, 7], 4, ROOT)[:2] == chain(TOKENS, 4, ROOT)


def test_the_same_tokens_under_another_root_share_no_key():
    other = BlockKey(bytes(16))
    assert not set(chain(TOKENS, 1, ROOT)) & set(chain(TOKENS, 1, other))


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [1.0],
        ["1"],
        [None],
        "12",
        b"\x01\x00\x00\x00",
        bytearray(4),
        memoryview(b"\x01\x00\x00\x00"),
        np.array([5, -1], dtype=np.int32),
        np.array([-(2**31)], dtype=np.int32),
        np.array([-1], dtype=np.int64),
        np.array([2**32], dtype=np.int64),
        np.array([2**63], dtype=np.uint64),
        np.array([1], dtype=np.uint8),
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2]], dtype=np.int32),
        np.array(1, dtype=np.int32),
        array("i", [-5]),
        array("d", [1.0]),
    ],
    ids=repr,
)
def test_what_is_no_row_of_token_ids_is_refused(tokens):
    with pytest.raises(ValueError, match=r"^tokens must "):
        chain(tokens, 1, ROOT)


def test_an_id_out_of_range_in_the_partial_last_block_is_refused_too():
    with pytest.raises(ValueError, match="-3 to 2"):
        chain(np.array([1, 2, -3], dtype=np.int32), 2, ROOT)


def test_the_largest_id_is_taken():
    assert chain([2**32 - 1], 1, ROOT) == chain(np.array([2**32 - 1]), 1, ROOT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], 0, ROOT), "block_tokens"),
        (([1], 65_537, ROOT), "block_tokens"),
        (([1], 1, b"short"), "16 bytes"),
        (([1], 1, ROOT, "md5"), "xxh3, sha256"),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        chain(*arguments)


# Parts


@given(part=st.integers(0, 65_534))
def test_the_key_of_a_part_splits_into_what_it_was_made_of(part):
    key = part_key(ROOT, part)
    assert key == ROOT + part.to_bytes(2, "little")
    assert split_part(key) == (ROOT, part)


def test_a_block_s_own_key_is_its_only_part():
    assert split_part(ROOT) == (ROOT, 0)


@pytest.mark.parametrize("part", [-1, 65_535])
def test_a_part_number_that_no_namespace_has_is_refused(part):
    with pytest.raises(ValueError, match="part must be"):
        part_key(ROOT, part)


def test_a_key_of_another_length_is_refused():
    with pytest.raises(ValueError, match="17"):
        split_part(BlockKey(bytes(17)))
    with pytest.raises(ValueError, match="18"):
        part_key(part_key(ROOT, 1), 1)


# Namespaces


@pytest.mark.parametrize(("tenant", "secret"), [("default", ""), ("team-a", "s3cret"), ("é", "ü")])
def test_the_root_is_the_documented_encoding(tenant, secret):
    assert namespace().root(tenant, secret) == expected_root(tenant, secret)


@pytest.mark.parametrize("field", Namespace.__struct_fields__)
def test_every_field_counts(field):
    mine, other = namespace(), namespace(**{field: OTHER[field]})
    assert mine.root("t", "s") != other.root("t", "s")
    assert mine.fingerprint() != other.fingerprint()
    assert mine.differences(other) == [f"{field}: {FIELDS[field]!r} here, {OTHER[field]!r} there"]


def test_another_tenant_or_secret_is_another_root_under_the_same_fingerprint():
    same = namespace()
    roots = {same.root(tenant, secret) for tenant in ("a", "b") for secret in ("", "x")}
    assert len(roots) == 4
    assert same.root("ab", "c") != same.root("a", "bc")
    assert len(same.fingerprint()) == 32
    assert bytes.fromhex(same.fingerprint()) not in roots


def test_text_that_moves_from_one_field_to_the_next_is_another_namespace():
    assert namespace(model="ab", revision="c").root("", "") != namespace(model="a", revision="bc").root("", "")


def test_equal_namespaces_differ_in_nothing():
    assert namespace().differences(namespace()) == []
    assert namespace() == namespace()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", "x" * 257),
        ("model", "é" * 129),
        ("model", None),
        ("dtype", ""),
        ("layout", ""),
        ("revision", 5),
        ("adapter", "x" * 257),
        ("hash", "md5"),
        ("hash", 1),
        ("weights_epoch", -1),
        ("weights_epoch", 2**63),
        ("block_tokens", 0),
        ("block_tokens", 65_537),
        ("block_tokens", 16.0),
        ("block_tokens", "16"),
        ("block_tokens", True),
        ("parts", 0),
        ("parts", 65_536),
        ("layers", 0),
        ("layers", 65_536),
        ("block_bytes", -1),
    ],
)
def test_a_field_out_of_its_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field} must "):
        namespace(**{field: value})


def test_text_of_256_bytes_and_the_ends_of_the_ranges_are_taken():
    namespace(model="é" * 128, block_tokens=65_536, parts=65_535, layers=65_535, weights_epoch=2**63 - 1)


def test_a_namespace_survives_the_wire():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(namespace()), type=Namespace) == namespace()


@pytest.mark.parametrize("change", [{"parts": 0}, {"rope_scaling": 2}, {"hash": "md5"}])
def test_a_bad_or_unknown_field_from_the_wire_is_refused(change):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(FIELDS | change), type=Namespace)
