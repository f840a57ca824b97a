"""Codecs: what comes back is as near as promised, bytes that are not theirs are refused, layers stand alone."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_client.codec import (
    CODECS,
    check_namespace,
    codec_for,
    decode_block,
    encode_block,
    pack_encoded,
    unpack_encoded,
)
from engine_client.layout import KvLayout, namespace_fields
from engine_client.quantise import NotEncoded
from kvstore.prefix import Namespace

LOSSLESS = ("none", "lz4", "zstd")
QUANTISED = ("int8", "int4", "fp8")
SHAPES = {
    "gqa": {"kind": "gqa", "kv_heads": 2, "head_dim": 16},
    "odd": {"kind": "gqa", "kv_heads": 3, "head_dim": 5, "value_head_dim": 3, "block_tokens": 7},
    "mla": {"kind": "mla", "head_dim": 24, "value_head_dim": 8},
    "latent": {"kind": "mla", "head_dim": 33, "block_tokens": 5},
}
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # between 1 and the next number


def layout_of(shape="gqa", **fields):
    return KvLayout(**{"layers": 3, "block_tokens": 8, "dtype": "float32"} | SHAPES[shape] | fields)


def bits_of(values, dtype):
    """float32 values as the bits of a dtype, rounded to it."""
    values = np.asarray(values, np.float32)
    if dtype == "bfloat16":
        wide = values.view(np.uint32).astype(np.uint64)
        return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
    return values.astype(dtype)


def values_of(raw, dtype):
    if dtype == "bfloat16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, dtype).astype(np.float32)


def block_of(layout, values):
    return memoryview(bytearray(bits_of(values, layout.dtype).tobytes()))


def random_block(layout, seed=0, spread=1.0):
    random = np.random.default_rng(seed)
    return block_of(layout, random.normal(0, spread, layout.block_bytes // layout.element_bytes))


def planes(layout, values):
    """Keys and values of one layer `[heads, tokens, width]`, written out as docs/layout.md says."""
    heads, tokens = layout.kv_heads, layout.block_tokens
    if layout.kind == "mla":
        rows = values.reshape(1, tokens, -1)
        split = [rows[..., : layout.head_dim], rows[..., layout.head_dim :]]
        return [plane for plane in split if plane.size]
    keys = heads * tokens * layout.head_dim
    return [values[:keys].reshape(heads, tokens, -1), values[keys:].reshape(heads, tokens, -1)]


def encoded(codec, raw):
    target = memoryview(bytearray(b"\xee" * codec.most_bytes))
    return target[: encode_block(codec, raw, target)]


def decoded(codec, block):
    target = memoryview(bytearray(codec.layout.block_bytes))
    decode_block(codec, block, target)
    return target


def there_and_back(name, layout, raw):
    codec = codec_for(name, layout)
    block = encoded(codec, raw)
    if codec.block_bytes:
        assert block.nbytes == codec.block_bytes == codec.most_bytes
    assert block.nbytes <= codec.most_bytes
    return decoded(codec, block)


def allowed_error(name, layout, plane, group_axis):
    """Half a step of the group's range, and what rounding the parameters and the result may add."""
    largest = np.abs(plane).max(axis=(1, 2), keepdims=True)
    rounding = np.abs(plane) * EPSILON[layout.dtype] + largest * 2.0**-21 + (layout.dtype == "float16") * 2.0**-25
    if name == "fp8":
        return np.maximum(np.abs(plane) * 2.0**-4, largest / 448 * 2.0**-10) + rounding
    span = plane.max(axis=group_axis, keepdims=True) - plane.min(axis=group_axis, keepdims=True)
    if name == "int8":
        return span / 255 / 2 + rounding
    low = np.abs(plane.min(axis=group_axis, keepdims=True))
    return span / 15 / 2 + (span + low) * 2.0**-10 + 15 * 2.0**-24 + rounding


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", QUANTISED)
def test_no_value_is_further_off_than_half_a_step_of_its_group(name, shape, dtype):
    layout = layout_of(shape, dtype=dtype)
    for spread in (1e-3, 1.0, 300.0):
        raw = random_block(layout, seed=int(spread), spread=spread)
        back = there_and_back(name, layout, raw)
        for layer in range(layout.layers):
            start, stop = layout.layer_range(layer)
            before, after = (planes(layout, values_of(bytes(side[start:stop]), dtype)) for side in (raw, back))
            axes = (2, 1) if layout.kind == "mla" else (1, 2)
            for one, other, axis in zip(before, after, axes, strict=False):
                assert (np.abs(one - other) <= allowed_error(name, layout, one, axis)).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_one_wild_channel_of_a_key_costs_the_others_nothing_and_one_wild_token_of_a_value_neither(name):
    layout = layout_of(layers=1)
    raw = random_block(layout)
    values = values_of(raw, "float32").copy()
    keys, rest = planes(layout, values)
    keys[:, :, 3] *= 1e4
    rest[:, 5, :] *= 1e4
    plain, wild = (
        planes(layout, values_of(there_and_back(name, layout, each), "float32"))
        for each in (raw, block_of(layout, values))
    )
    quiet = np.arange(16) != 3, np.arange(8) != 5
    assert np.array_equal(plain[0][:, :, quiet[0]], wild[0][:, :, quiet[0]])
    assert np.array_equal(plain[1][:, quiet[1]], wild[1][:, quiet[1]])


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["gqa", "mla"]),
    heads=st.integers(1, 3),
    width=st.integers(1, 9),
    value_width=st.integers(0, 9),
    tokens=st.integers(1, 9),
    name=st.sampled_from(CODECS),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float64", "int8"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layout_goes_through_any_codec(kind, heads, width, value_width, tokens, name, dtype, seed):
    layout = KvLayout(
        kind=kind, layers=2, kv_heads=heads if kind == "gqa" else 1, head_dim=width, value_head_dim=value_width,
        block_tokens=tokens, dtype=dtype,
    )  # fmt: skip
    if name in LOSSLESS:
        random = np.random.default_rng(seed)
        raw = memoryview(bytearray(random.integers(0, 256, layout.block_bytes, np.uint8).tobytes()))
        assert there_and_back(name, layout, raw) == raw
    elif dtype in EPSILON:
        raw = random_block(layout, seed)
        back = there_and_back(name, layout, raw)
        assert np.isfinite(values_of(back, dtype)).all()
        assert there_and_back(name.split("+")[0], layout, raw) == back
    else:
        with pytest.raises(ValueError, match=f"not {dtype}"):
            codec_for(name, layout)


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_what_is_not_finite_goes_through_a_lossless_codec_bit_for_bit(name):
    layout = layout_of(dtype="bfloat16")
    raw = random_block(layout)
    raw[:8] = struct.pack("<4H", 0x7FC0, 0x7F80, 0xFF80, 0x7F81)  # quiet NaN, both infinities, a signalling NaN
    assert there_and_back(name, layout, raw) == raw


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_value_that_is_not_finite_is_refused(name, odd, dtype):
    layout = layout_of(dtype=dtype)
    codec = codec_for(name, layout)
    for place in (0, 100, layout.block_bytes // layout.element_bytes - 1):
        values = values_of(random_block(layout), dtype).copy()
        values[place] = odd
        with pytest.raises(ValueError, match="not finite"):
            encoded(codec, block_of(layout, values))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "large"), [("int8", 3e38), ("int4", 70_000.0)])
def test_a_range_that_a_parameter_cannot_hold_is_refused(name, large):
    layout = layout_of()
    values = values_of(random_block(layout), "float32").copy()
    values[0], values[16] = large, -large
    with pytest.raises(ValueError, match="out of the range"):
        encoded(codec_for(name, layout), block_of(layout, values))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("constant", [0.0, 1.5, -384.0])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_range_of_nothing_comes_back_as_it_was(name, constant, dtype):
    layout = layout_of(dtype=dtype)
    raw = block_of(layout, np.full(layout.block_bytes // layout.element_bytes, constant))
    assert there_and_back(name, layout, raw) == raw


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("smallest", [1e-45, 1e-41, 1.2e-38, 1e-30])
@pytest.mark.parametrize("name", QUANTISED)
def test_values_near_nothing_stay_near_nothing(name, smallest):
    layout = layout_of()
    values = np.random.default_rng(1).integers(-3, 4, layout.block_bytes // 4).astype(np.float32) * np.float32(smallest)
    back = values_of(there_and_back(name, layout, block_of(layout, values)), "float32")
    assert np.abs(back).max() <= 2 * np.abs(values).max()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "dtype", "low", "high"),
    [
        *((name, "float16", low, 65504.0) for name in QUANTISED for low in (-65504.0, 0.0)),
        *((name, "bfloat16", 0.0, 3.3895e38) for name in ("int8", "fp8")),
        *((name, "float32", low, np.finfo(np.float32).max) for name in ("int8", "fp8") for low in (0.0, 1e36)),
    ],
)
def test_the_largest_numbers_of_a_dtype_do_not_become_infinite(name, dtype, low, high):
    layout = layout_of(dtype=dtype)
    values = np.random.default_rng(2).choice([low, high, 1.0], layout.block_bytes // layout.element_bytes)
    back = values_of(there_and_back(name, layout, block_of(layout, values)), dtype)
    assert np.isfinite(back).all()
    assert np.abs(back[values == high] / high - 1).max() < 1e-2


def e4m3(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


def test_fp8_rounds_to_the_nearest_number_and_of_two_to_the_even_code():
    table = np.array([e4m3(code) for code in range(127)])
    between = (table[1:] + table[:-1]) / 2
    probes = np.concatenate([table, between, between * (1 - 2**-20), between * (1 + 2**-20), [448.0]])
    probes = np.concatenate([probes, -probes]).astype(np.float32)
    probes[-1] = 448  # so that the scale is 1
    layout = KvLayout(kind="mla", layers=1, head_dim=len(probes), block_tokens=1, dtype="float32")
    back = values_of(there_and_back("fp8", layout, block_of(layout, probes)), "float32")
    for probe, got in zip(np.abs(probes).astype(float), np.abs(back), strict=True):
        distance = np.abs(table - probe)
        nearest = np.flatnonzero(distance == distance.min())
        assert got == table[next((code for code in nearest if code % 2 == 0), nearest[0])]
    assert (np.signbit(back) == np.signbit(probes)).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_the_bytes_of_a_block_are_those_of_its_values_alone(name):
    layout = layout_of("odd")
    codec, raw = codec_for(name, layout), random_block(layout)
    zeroed, dirty = bytearray(codec.most_bytes), bytearray(b"\xff" * codec.most_bytes)
    for target in (zeroed, dirty):
        encode_block(codec, raw, memoryview(target))
    assert zeroed == dirty


def test_a_layer_of_int8_is_drawn_right():
    layout = KvLayout(kind="gqa", layers=1, kv_heads=1, head_dim=2, block_tokens=2, dtype="float32")
    # keys: token 0 (0, 10), token 1 (255, 10); values: token 0 (-1, 254), token 1 (3, 3)
    block = encoded(codec_for("int8", layout), block_of(layout, [0, 10, 255, 10, -1, 254, 3, 3]))
    head = b"\xc1" + bytes(7)
    keys, values = struct.pack("<4f", 0, 10, 1, 0), struct.pack("<4f", -1, 3, 1, 0)
    assert bytes(block) == head + keys + values + bytes([0, 0, 255, 0]) + bytes([0, 255, 0, 0])


def test_a_layer_of_int4_is_drawn_right():
    layout = KvLayout(kind="gqa", layers=1, kv_heads=1, head_dim=2, block_tokens=2, dtype="float32")
    block = encoded(codec_for("int4", layout), block_of(layout, [0, 10, 15, 10, -1, 14, 3, 3]))
    keys, values = struct.pack("<4e", 0, 10, 1, 0), struct.pack("<4e", -1, 3, 1, 0)
    packed = bytes([0 | 15 << 4, 0 | 0 << 4]) + bytes([0 | 0 << 4, 15 | 0 << 4])
    assert bytes(block) == b"\xc2" + bytes(7) + keys + values + packed + bytes(4)


@pytest.mark.parametrize("name", CODECS)
def test_a_layer_can_be_decoded_before_the_next_one_is_there(name):
    layout = layout_of(dtype="bfloat16")
    codec, raw = codec_for(name, layout), random_block(layout)
    target = memoryview(bytearray(b"\xee" * codec.most_bytes))
    whole = decoded(codec, encoded(codec, raw))
    for layer in range(layout.layers):
        start, stop = layout.layer_range(layer)
        codec.encode_layer(layer, raw[start:stop], target)
        for earlier in range(layer + 1):
            back = memoryview(bytearray(layout.layer_bytes))
            codec.decode_layer(earlier, target, back)
            start, stop = layout.layer_range(earlier)
            assert back == whole[start:stop]
        if layer + 1 < layout.layers and name != "none":
            with pytest.raises(NotEncoded):
                codec.decode_layer(layer + 1, target, back)


@pytest.mark.parametrize("written", CODECS[1:])
@pytest.mark.parametrize("read", CODECS[1:])
def test_a_block_of_another_codec_is_not_taken_for_its_own(written, read):
    layout = layout_of(dtype="bfloat16")
    block = encoded(codec_for(written, layout), random_block(layout))
    if written != read:
        with pytest.raises(ValueError):
            decoded(codec_for(read, layout), block)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(["lz4", "zstd", "int8+zstd", "int4+lz4"]))
def test_a_damaged_compressed_block_is_refused_or_wrong_and_never_reads_elsewhere(data, name):
    layout = layout_of(dtype="bfloat16")
    codec = codec_for(name, layout)
    block = bytearray(encoded(codec, block_of(layout, np.arange(layout.block_bytes // 2) // 7)))
    at = data.draw(st.integers(0, len(block) - 1))
    block[at] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(block)))
    for damaged in (block, block[:cut]):
        try:
            decoded(codec, memoryview(damaged))
        except NotEncoded:
            continue


@pytest.mark.parametrize("name", CODECS)
def test_what_has_another_size_than_the_layout_says_is_refused(name):
    layout = layout_of()
    codec = codec_for(name, layout)
    raw, block = memoryview(bytearray(layout.layer_bytes)), memoryview(bytearray(codec.most_bytes))
    with pytest.raises(ValueError, match="bytes"):
        codec.encode_layer(0, raw[:-1], block)
    with pytest.raises(ValueError, match="bytes"):
        codec.encode_layer(0, raw, block[:-1])
    codec.encode_layer(0, raw, block)
    with pytest.raises(ValueError, match="bytes"):
        codec.decode_layer(0, block, raw[:-1])
    with pytest.raises(ValueError, match="layer 3"):
        codec.decode_layer(3, block, raw)


@pytest.mark.parametrize("name", CODECS)
def test_tensors_come_back_through_encoded_blocks_in_their_places(name):
    layout = layout_of()
    codec = codec_for(name, layout)
    random = np.random.default_rng(3)
    key, value = (random.normal(size=(2, 24, 16)).astype(np.float32) for _ in range(2))
    blocks = [memoryview(bytearray(codec.most_bytes)) for _ in range(3)]
    for layer in range(layout.layers):
        pack_encoded(codec, layer, blocks, [0, 8, 16], key, value)
    back = np.zeros_like(key), np.zeros_like(value)
    unpack_encoded(codec, 1, [blocks[2], blocks[0]], [16, 0], *back)
    tolerance = 0 if name in LOSSLESS else 0.4
    for tensor, original in zip(back, (key, value), strict=True):
        assert np.abs(tensor[:, 16:] - original[:, 16:]).max() <= tolerance
        assert np.abs(tensor[:, :8] - original[:, :8]).max() <= tolerance
        assert (tensor[:, 8:16] == 0).all()


def test_quantised_blocks_have_the_sizes_that_the_page_says():
    smollm2 = KvLayout(kind="gqa", layers=30, kv_heads=3, head_dim=64, block_tokens=64, dtype="bfloat16")
    ratios = {name: codec_for(name, smollm2).block_bytes / smollm2.block_bytes for name in QUANTISED}
    assert {name: round(ratio, 3) for name, ratio in ratios.items()} == {"int8": 0.563, "int4": 0.281, "fp8": 0.501}


def test_zeros_compress_and_noise_does_not_grow():
    layout = layout_of(dtype="bfloat16", block_tokens=64)
    noise = memoryview(bytearray(np.random.default_rng(4).bytes(layout.block_bytes)))
    for name in ("lz4", "zstd"):
        codec = codec_for(name, layout)
        assert encoded(codec, memoryview(bytearray(layout.block_bytes))).nbytes < layout.block_bytes / 20
        assert encoded(codec, noise).nbytes <= codec.most_bytes == layout.block_bytes + 16


def test_a_name_that_stands_for_no_codec_is_refused():
    for name in ("", "int2", "zstd+int8", "int8+int4", "int8+"):
        with pytest.raises(ValueError, match="is not one of"):
            codec_for(name, layout_of())


def test_a_client_and_its_namespace_agree_on_the_codec():
    layout = layout_of()
    int8, zstd = codec_for("int8", layout), codec_for("zstd", layout)
    spaces = {
        codec: Namespace(**namespace_fields(layout, model="m", codec=codec))
        for codec in (None, int8, zstd, codec_for("none", layout))
    }
    assert len({space.fingerprint() for space in spaces.values()}) == 3
    for mine, namespace in spaces.items():
        check_namespace(namespace, mine)
        for other in (None, int8, zstd):
            if (other.name if other else "") != namespace.codec:
                with pytest.raises(ValueError, match="has codec"):
                    check_namespace(namespace, other)
    longer = layout_of(block_tokens=16)
    with pytest.raises(ValueError, match="bytes"):
        check_namespace(spaces[int8], codec_for("int8", longer))
