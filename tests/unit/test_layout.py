"""The layout of KV blocks: where bytes lie, and that tensors come back as they went in."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_client.layout import DTYPE_BYTES, KvLayout, namespace_fields, pack_layer, unpack_layer

SHAPES = {
    "gqa": {"kind": "gqa", "kv_heads": 4, "head_dim": 16},
    "mqa": {"kind": "gqa", "kv_heads": 1, "head_dim": 8},
    "unequal": {"kind": "gqa", "kv_heads": 2, "head_dim": 12, "value_head_dim": 8},
    "mla": {"kind": "mla", "head_dim": 36},
    "mla_split": {"kind": "mla", "head_dim": 32, "value_head_dim": 4},
}


@pytest.fixture
def torch():
    """The tests that take it are marked `engine`, and run wherever that extra is installed."""
    return pytest.importorskip("torch")


def layout_of(shape, **fields):
    return KvLayout(**{"layers": 3, "block_tokens": 4, "dtype": "float32"} | SHAPES[shape] | fields)


def tensors_for(layout, tokens, seed=0):
    """A key and a value, or None, as random bits in numpy."""
    random = np.random.default_rng(seed)

    def bits(width):
        array = random.integers(0, 256, (layout.kv_heads, tokens, width * layout.element_bytes), np.uint8)
        return array.view(f"<u{layout.element_bytes}")

    value = bits(layout.value_head_dim) if layout.value_head_dim else None
    if layout.kind == "mla":
        return bits(layout.head_dim)[0], value if value is None else value[0]
    return bits(layout.head_dim), value


def as_float32(bits):
    return bits if bits is None else bits.view(np.float32)


def blocks_for(layout, count):
    memory = memoryview(bytearray(b"\xee" * layout.block_bytes * count))
    return [memory[n * layout.block_bytes : (n + 1) * layout.block_bytes] for n in range(count)]


def pack_all(layout, key, value, count):
    blocks = blocks_for(layout, count)
    for layer in range(layout.layers):
        pack_layer(layout, layer, blocks, [n * layout.block_tokens for n in range(count)], key, value)
    return blocks


def expected_layer(layout, key, value, start):
    """The bytes of one layer of the block at `start`, written out as the canonical order says."""
    tokens = slice(start, start + layout.block_tokens)
    if layout.kind == "mla":
        rows = key[tokens] if value is None else np.concatenate([key[tokens], value[tokens]], axis=1)
        return rows.tobytes()
    return key[:, tokens].tobytes() + value[:, tokens].tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_is_layers_of_keys_then_values_in_canonical_order(shape):
    layout = layout_of(shape)
    key, value = (as_float32(bits) for bits in tensors_for(layout, 12))
    blocks = pack_all(layout, key, value, 3)
    for number, block in enumerate(blocks):
        assert bytes(block) == expected_layer(layout, key, value, 4 * number) * layout.layers


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", [1, 3])
def test_layer_ranges_tile_the_block_exactly(shape, parts):
    for layout in layout_of(shape).split(layer_parts=parts):
        ranges = [layout.layer_range(layer) for layer in range(layout.layers)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == layout.block_bytes
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
        assert {stop - start for start, stop in ranges} == {layout.layer_bytes}


def test_sizes_are_those_of_the_models_they_stand_for():
    smollm2 = KvLayout(kind="gqa", layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16")
    assert smollm2.block_bytes == 16 * 23_040
    deepseek = KvLayout(kind="mla", layers=61, head_dim=512, value_head_dim=64, block_tokens=64, dtype="bfloat16")
    assert deepseek.layer_range(1) == (64 * 576 * 2, 2 * 64 * 576 * 2)


def test_packing_a_layer_leaves_the_other_layers_alone():
    layout = layout_of("gqa")
    key, value = (as_float32(bits) for bits in tensors_for(layout, 4))
    [block] = blocks_for(layout, 1)
    pack_layer(layout, 1, [block], [0], key, value)
    start, stop = layout.layer_range(1)
    assert set(block[:start]) == set(block[stop:]) == {0xEE}
    assert bytes(block[start:stop]) == expected_layer(layout, key, value, 0)


@pytest.mark.engine
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_tensors_of_every_dtype_come_back_bit_for_bit(torch, dtype, shape):
    layout = layout_of(shape, dtype=dtype)
    pair = tensors_for(layout, 8)
    key, value = (
        None if bits is None else torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, dtype)) for bits in pair
    )
    blocks = pack_all(layout, key, value, 2)
    assert bytes(blocks[1]) == expected_layer(layout, *pair, 4) * layout.layers

    back = [None if tensor is None else torch.zeros_like(tensor) for tensor in (key, value)]
    unpack_layer(layout, 2, blocks, [0, 4], *back)
    for tensor, original in zip(back, (key, value), strict=True):
        if original is not None:
            assert torch.equal(tensor.view(torch.uint8), original.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "float64", "int8"])
def test_numpy_arrays_stand_for_dtypes_that_numpy_does_not_know(dtype):
    layout = layout_of("gqa", dtype=dtype)
    key, value = tensors_for(layout, 4)
    if hasattr(np, dtype):
        key, value = key.view(dtype), value.view(dtype)
    [block] = pack_all(layout, key, value, 1)
    back = np.zeros_like(key), np.zeros_like(value)
    unpack_layer(layout, 0, [block], [0], *back)
    assert back[0].tobytes() == key.tobytes()
    assert back[1].tobytes() == value.tobytes()


def test_a_batch_axis_of_one_changes_nothing():
    layout = layout_of("gqa")
    key, value = (as_float32(bits) for bits in tensors_for(layout, 8))
    plain = pack_all(layout, key, value, 2)
    assert pack_all(layout, key[np.newaxis], value[np.newaxis], 2) == plain
    latent = layout_of("mla")
    key, _ = tensors_for(latent, 8)
    plain = pack_all(latent, as_float32(key), None, 2)
    assert pack_all(latent, as_float32(key)[np.newaxis, np.newaxis], None, 2) == plain


def check_strided(make, permute):
    """Packs and unpacks through tensors made of arrays by `make`, whose axes `permute` reorders."""
    layout = layout_of("gqa")
    key, value = (as_float32(bits) for bits in tensors_for(layout, 8))
    plain = pack_all(layout, key, value, 2)
    by_token = make(np.ascontiguousarray(key.transpose(1, 0, 2)))  # [tokens, kv_heads, head_dim], as in vLLM
    by_width = make(np.ascontiguousarray(value.transpose(0, 2, 1)))  # [kv_heads, head_dim, tokens]
    wide = make(np.zeros((4, 16, 48), np.float32))
    wide[:, ::2, ::3] = make(value)
    key_view, value_view = permute(by_token, (1, 0, 2)), permute(by_width, (0, 2, 1))
    assert pack_all(layout, key_view, value_view, 2) == plain
    assert pack_all(layout, key_view, wide[:, ::2, ::3], 2) == plain

    wide[:] = 0
    by_token[:] = 0
    unpack_layer(layout, 0, plain, [0, 4], key_view, wide[:, ::2, ::3])
    assert np.asarray(key_view).tobytes() == key.tobytes()
    assert np.asarray(wide)[:, ::2, ::3].tobytes() == value.tobytes()
    assert np.count_nonzero(np.asarray(wide)[:, 1::2]) == 0


def test_strided_and_transposed_arrays_pack_like_contiguous_ones():
    check_strided(lambda array: array, np.transpose)


@pytest.mark.engine
def test_strided_and_transposed_tensors_pack_like_contiguous_ones(torch):
    check_strided(torch.from_numpy, torch.permute)


def test_a_reversed_array_packs_in_its_own_order():
    layout = layout_of("gqa")
    key, value = (as_float32(bits) for bits in tensors_for(layout, 4))
    plain = pack_all(layout, np.ascontiguousarray(key[:, ::-1]), value, 1)
    assert pack_all(layout, key[:, ::-1], value, 1) == plain


def test_big_endian_arrays_become_little_endian_bytes():
    layout = layout_of("gqa")
    key, value = (as_float32(bits) for bits in tensors_for(layout, 4))
    assert pack_all(layout, key.astype(">f4"), value.astype(">f4"), 1) == pack_all(layout, key, value, 1)


@pytest.mark.engine
def test_a_tensor_that_needs_a_gradient_packs_too(torch):
    layout = layout_of("gqa")
    key, value = (as_float32(bits) for bits in tensors_for(layout, 4))
    tracked = torch.from_numpy(key.copy()).requires_grad_()
    assert pack_all(layout, tracked, value, 1) == pack_all(layout, key, value, 1)


def test_blocks_at_odd_addresses_and_in_any_order_are_fine():
    layout = layout_of("gqa")
    key, value = (as_float32(bits) for bits in tensors_for(layout, 12))
    memory = memoryview(bytearray(3 * layout.block_bytes + 3))
    blocks = [memory[1 + n * layout.block_bytes : 1 + (n + 1) * layout.block_bytes] for n in (2, 0, 1)]
    for layer in range(layout.layers):
        pack_layer(layout, layer, blocks, [5, 8, 0], key, value)
    for block, start in zip(blocks, [5, 8, 0], strict=True):
        assert bytes(block) == expected_layer(layout, key, value, start) * layout.layers
    assert memory[0] == memory[-1] == memory[-2] == 0


def check_parts(make, head_parts):
    whole = layout_of("gqa")
    key, value = (as_float32(bits) for bits in tensors_for(whole, 8))
    pair = make(key), make(value)
    back = tuple(np.zeros_like(array) for array in (key, value))
    for part in whole.split(head_parts=head_parts):
        heads = slice(part.first_head, part.first_head + part.kv_heads)
        from_all_heads = pack_all(part, *pair, 2)
        from_own_heads = pack_all(part, pair[0][heads], pair[1][heads], 2)
        assert from_all_heads == from_own_heads
        assert bytes(from_all_heads[1]) == expected_layer(part, key[heads], value[heads], 4) * 3
        unpack_layer(part, 0, from_all_heads, [0, 4], make(back[0]), make(back[1]))
    assert [array.tobytes() for array in back] == [key.tobytes(), value.tobytes()]


@pytest.mark.parametrize("head_parts", [1, 2, 4])
def test_parts_by_head_range_make_the_whole(head_parts):
    check_parts(lambda array: array, head_parts)


@pytest.mark.engine
def test_parts_by_head_range_of_tensors_make_the_whole(torch):
    check_parts(torch.from_numpy, 2)


def test_parts_are_numbered_by_stage_then_by_head_range():
    whole = layout_of("gqa")
    parts = whole.split(layer_parts=3, head_parts=2)
    assert [(part.first_layer, part.first_head) for part in parts] == [
        (0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2),
    ]  # fmt: skip
    assert [part.part for part in parts] == list(range(6))
    assert {part.parts for part in parts} == {6}
    assert sum(part.block_bytes for part in parts) == whole.block_bytes


def test_workers_of_one_block_describe_it_alike():
    parts = layout_of("gqa").split(layer_parts=3, head_parts=2)
    assert len({part.describe() for part in parts}) == 1
    assert len(parts[0].describe()) <= 256


@pytest.mark.parametrize(
    "other",
    [
        layout_of("gqa", layers=4),
        layout_of("gqa", kv_heads=2),
        layout_of("gqa", head_dim=8),
        layout_of("gqa", value_head_dim=8),
        layout_of("gqa", block_tokens=8),
        layout_of("gqa", dtype="float16"),
        layout_of("gqa", kind="mla", kv_heads=1),
        layout_of("gqa").split(head_parts=2)[0],
        layout_of("gqa").split(layer_parts=3)[0],
        layout_of("gqa", kv_heads=2, layers=6),
    ],
    ids=lambda layout: layout.describe(),
)
def test_the_description_changes_with_everything_that_changes_the_bytes(other):
    assert other.describe() != layout_of("gqa").describe()


def test_two_parts_of_other_shape_and_equal_number_are_told_apart():
    whole = layout_of("gqa", layers=2, kv_heads=2)
    [by_head, _], [by_layer, _] = whole.split(head_parts=2), whole.split(layer_parts=2)
    assert by_head.block_bytes == by_layer.block_bytes
    assert by_head.describe() != by_layer.describe()


def test_the_value_width_is_that_of_the_key_unless_given():
    assert layout_of("gqa") == layout_of("gqa", value_head_dim=16)
    assert layout_of("mla").value_head_dim == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "mamba"}, "kind 'mamba'"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"layers": 0}, "layers is 0"),
        ({"block_tokens": -1}, "block_tokens is -1"),
        ({"value_head_dim": -2}, "value_head_dim is -2"),
        ({"kind": "mla"}, "no heads"),
        ({"first_layer": 1}, "first_layer is 1"),
        ({"first_head": 2, "head_parts": 2}, "first_head is 2"),
        ({"first_head": 8, "head_parts": 2}, "first_head is 8"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        layout_of("gqa", **fields)


@pytest.mark.parametrize("cut", [{"layer_parts": 2}, {"head_parts": 3}, {"head_parts": 0}, {"layer_parts": -1}])
def test_an_uneven_split_is_refused(cut):
    with pytest.raises(ValueError, match="split evenly"):
        layout_of("gqa").split(**cut)


def test_a_part_is_not_split_again():
    with pytest.raises(ValueError, match="part already"):
        layout_of("gqa").split(head_parts=2)[1].split(head_parts=2)


KEY, VALUE = (as_float32(bits) for bits in tensors_for(layout_of("gqa"), 8))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (KEY[:3], VALUE, "key has 3 heads, where the layout has 4"),
        (KEY[:, :, :8], VALUE, "key is 8 wide, where the layout has 16"),
        (KEY, VALUE[:, :, :8], "value is 8 wide"),
        (KEY[:, :7], VALUE, "key has 7 tokens and value has 8"),
        (KEY[0], VALUE, r"key has shape \[8, 16\]"),
        (np.stack([KEY, KEY]), VALUE, r"key has shape \[2, 4, 8, 16\]"),
        (KEY[np.newaxis, np.newaxis], VALUE, r"key has shape \[1, 1, 4, 8, 16\]"),
        (np.zeros(KEY.shape, np.float16), VALUE, "key has dtype float16, where the layout has float32"),
        (KEY, VALUE.view(np.uint32), "value has dtype uint32"),
        (KEY.tolist(), VALUE, "key is a list"),
        (KEY, None, "value is missing"),
        (KEY[:, :7], VALUE[:, :7], r"tokens \[4, 8\) are not in a tensor of 7 tokens"),
    ],
)
@pytest.mark.parametrize("copy", [pack_layer, unpack_layer])
def test_a_tensor_that_does_not_fit_is_refused_before_a_byte_is_copied(copy, key, value, message):
    layout = layout_of("gqa")
    blocks = blocks_for(layout, 2)
    with pytest.raises(ValueError, match=message):
        copy(layout, 0, blocks, [0, 4], key, value)
    assert all(set(block) == {0xEE} for block in blocks)


@pytest.mark.engine
@pytest.mark.parametrize("copy", [pack_layer, unpack_layer])
def test_a_tensor_of_another_dtype_or_device_is_refused(torch, copy):
    layout = layout_of("gqa")
    blocks = blocks_for(layout, 2)
    with pytest.raises(ValueError, match="key has dtype bfloat16, where the layout has float32"):
        copy(layout, 0, blocks, [0, 4], torch.zeros(KEY.shape, dtype=torch.bfloat16), VALUE)
    with pytest.raises(ValueError, match="key is on meta, and must be on the CPU"):
        copy(layout, 0, blocks, [0, 4], torch.empty(KEY.shape, device="meta"), VALUE)


@pytest.mark.parametrize("copy", [pack_layer, unpack_layer])
def test_a_block_that_does_not_fit_is_refused(copy):
    layout = layout_of("gqa")
    [block] = blocks_for(layout, 1)
    key, value = KEY.copy(), VALUE.copy()
    size = layout.block_bytes
    with pytest.raises(ValueError, match=f"a block of {size - 1} bytes, where the layout has {size}"):
        copy(layout, 0, [block[:-1]], [0], key, value)
    with pytest.raises(ValueError, match=f"a block of {size + 1} bytes"):
        copy(layout, 0, [memoryview(bytearray(size + 1))], [0], key, value)
    with pytest.raises(ValueError, match="contiguous"):
        copy(layout, 0, [memoryview(bytearray(2 * size))[::2]], [0], key, value)
    with pytest.raises(ValueError, match="1 blocks and 2 starts"):
        copy(layout, 0, [block], [0, 4], key, value)
    with pytest.raises(ValueError, match=r"tokens \[-1, 3\)"):
        copy(layout, 0, [block], [-1], key, value)
    for layer in (-1, 3):
        with pytest.raises(ValueError, match=rf"layer {layer} is not in \[0, 3\)"):
            copy(layout, layer, [block], [0], key, value)
    assert key.tobytes() == KEY.tobytes()


def test_a_read_only_destination_is_refused():
    layout = layout_of("gqa")
    frozen = memoryview(bytes(layout.block_bytes))
    with pytest.raises(ValueError, match="block to be written is read-only"):
        pack_layer(layout, 0, [frozen], [0], KEY, VALUE)
    key = KEY.copy()
    unpack_layer(layout, 0, [frozen], [0], key, VALUE.copy())
    key.flags.writeable = False
    with pytest.raises(ValueError, match="tensor to be filled is read-only"):
        unpack_layer(layout, 0, [frozen], [0], key, VALUE.copy())


def test_a_second_tensor_for_a_single_latent_is_refused():
    layout = layout_of("mla")
    key, _ = tensors_for(layout, 4)
    with pytest.raises(ValueError, match="one latent tensor"):
        pack_layer(layout, 0, blocks_for(layout, 1), [0], as_float32(key), as_float32(key))


def test_a_split_latent_may_come_as_one_tensor_too():
    layout = layout_of("mla_split")
    key, value = (as_float32(bits) for bits in tensors_for(layout, 4))
    joined = np.concatenate([key, value], axis=1)
    assert pack_all(layout, joined, None, 1) == pack_all(layout, key, value, 1)


def test_an_engine_knows_the_fields_of_its_namespace():
    part = layout_of("gqa").split(layer_parts=3, head_parts=2)[4]
    fields = namespace_fields(part, model="tiny", revision="r1", weights_epoch=2, adapter="lora")
    assert fields == {
        "model": "tiny",
        "revision": "r1",
        "weights_epoch": 2,
        "dtype": "float32",
        "layout": part.describe(),
        "block_tokens": 4,
        "adapter": "lora",
        "parts": 6,
        "layers": 1,
        "block_bytes": part.block_bytes,
    }


layouts = st.one_of(
    st.builds(
        KvLayout,
        kind=st.just("gqa"),
        layers=st.integers(1, 4),
        kv_heads=st.integers(1, 5),
        head_dim=st.integers(1, 9),
        value_head_dim=st.integers(0, 9),
        block_tokens=st.integers(1, 7),
        dtype=st.sampled_from(["uint8", "bfloat16", "float8_e5m2"]),
    ),
    st.builds(
        KvLayout,
        kind=st.just("mla"),
        layers=st.integers(1, 4),
        head_dim=st.integers(1, 9),
        value_head_dim=st.integers(0, 5),
        block_tokens=st.integers(1, 7),
        dtype=st.sampled_from(["uint8", "bfloat16", "float8_e5m2"]),
    ),
)


@settings(max_examples=150, deadline=None)
@given(layout=layouts, tokens=st.integers(0, 40), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_any_layout_keeps_any_bits_where_the_canonical_order_says(layout, tokens, seed, data):
    tokens = max(tokens, layout.block_tokens)
    starts = data.draw(st.lists(st.integers(0, tokens - layout.block_tokens), max_size=4, unique=True))
    pairs = [tensors_for(layout, tokens, seed + layer) for layer in range(layout.layers)]
    blocks = blocks_for(layout, len(starts))
    for layer, pair in enumerate(pairs):
        pack_layer(layout, layer, blocks, starts, *pair)
    for block, start in zip(blocks, starts, strict=True):
        assert bytes(block) == b"".join(expected_layer(layout, *pair, start) for pair in pairs)
    for layer, pair in enumerate(pairs):
        back = [None if array is None else np.zeros_like(array) for array in pair]
        unpack_layer(layout, layer, blocks, starts, *back)
        again = blocks_for(layout, len(starts))
        for n in range(layout.layers):
            pack_layer(layout, n, again, starts, *back)
        for block, start in zip(again, starts, strict=True):
            assert bytes(block) == expected_layer(layout, *pair, start) * layout.layers
