"""Compaction: which blocks of a prefix are loaded, and which heads of a layer are written."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_client.codec import CODECS, check_namespace, codec_for, decode_block, encode_block
from engine_client.compaction import KeptHeads, SinkWindow, codec_of, compaction_terms
from engine_client.layout import KvLayout, namespace_fields
from kvstore.prefix import Namespace

LAYOUT = KvLayout(kind="gqa", layers=3, kv_heads=4, head_dim=8, value_head_dim=6, block_tokens=4, dtype="float32")
KEPT = [[0, 2], [1, 3], [0, 3]]


@given(sinks=st.integers(0, 40), window=st.integers(1, 40), blocks=st.integers(0, 30), block_tokens=st.integers(1, 20))
def test_every_sink_and_every_token_of_the_window_is_kept_and_no_block_without_one(sinks, window, blocks, block_tokens):
    kept = SinkWindow(sinks, window).kept_blocks(blocks, block_tokens)
    tokens = blocks * block_tokens
    wanted = {*range(min(sinks, tokens)), *range(max(tokens - window, 0), tokens)}
    assert kept == sorted({token // block_tokens for token in wanted})


def test_a_short_prefix_is_kept_whole():
    assert SinkWindow(4, 64).kept_blocks(5, 16) == [0, 1, 2, 3, 4]
    assert SinkWindow(4, 64).kept_blocks(6, 16) == [0, 2, 3, 4, 5]


@pytest.mark.parametrize(("sinks", "window"), [(-1, 4), (4, 0)])
def test_a_window_of_nothing_is_refused(sinks, window):
    with pytest.raises(ValueError, match="make no cache"):
        SinkWindow(sinks, window)


def raw_block(seed=0):
    values = np.random.default_rng(seed).normal(size=LAYOUT.block_bytes // 4).astype(np.float32)
    return memoryview(bytearray(values.tobytes()))


def heads_of(block, layer):
    """Keys and values of a layer, a row per head."""
    start, stop = LAYOUT.layer_range(layer)
    values = np.frombuffer(block[start:stop], np.float32)
    keys = LAYOUT.kv_heads * LAYOUT.block_tokens * LAYOUT.head_dim
    return values[:keys].reshape(4, -1), values[keys:].reshape(4, -1)


@pytest.mark.parametrize("name", CODECS)
def test_kept_heads_come_back_as_through_the_codec_alone_and_the_others_as_zeros(name):
    codec, plain, raw = KeptHeads(name, LAYOUT, KEPT), codec_for(name, LAYOUT), raw_block()
    back = []
    for each in (codec, plain):
        block = memoryview(bytearray(each.most_bytes))
        size = encode_block(each, raw, block)
        back.append(memoryview(bytearray(b"\xee" * LAYOUT.block_bytes)))
        decode_block(each, block[:size], back[-1])
    for layer, heads in enumerate(KEPT):
        for few, all_of_them in zip(heads_of(back[0], layer), heads_of(back[1], layer), strict=True):
            assert np.array_equal(few[heads], all_of_them[heads])
            assert not few[[head for head in range(4) if head not in heads]].any()


def test_half_the_heads_are_half_the_bytes():
    assert KeptHeads("none", LAYOUT, KEPT).block_bytes == LAYOUT.block_bytes // 2


@pytest.mark.parametrize(
    "kept",
    [[[0]], [[0], [1], [0, 1]], [[], [], []], [[0], [1], [4]], [[-1], [0], [1]], [[1, 0]] * 3, [[1, 1]] * 3],
)
def test_heads_that_the_layout_does_not_have_are_refused(kept):
    with pytest.raises(ValueError, match="heads"):
        KeptHeads("none", LAYOUT, kept)


def test_a_part_of_the_heads_and_a_latent_have_none_to_leave_out():
    latent = KvLayout(kind="mla", layers=1, head_dim=8, block_tokens=4, dtype="float32")
    for layout in (LAYOUT.split(head_parts=2)[0], latent):
        with pytest.raises(ValueError, match="heads can be left out"):
            KeptHeads("none", layout, [[0]] * layout.layers)


def test_layers_may_be_in_parts():
    part = LAYOUT.split(layer_parts=3)[1]
    codec = KeptHeads("int8", part, [[1]])
    assert codec.block_bytes == codec_for("int8", part).block_bytes // 4 + 6  # the head and the end of a layer stay


def test_each_way_to_leave_something_out_is_a_namespace_of_its_own():
    ways = [
        (None, codec_of(LAYOUT, "none", None)),
        (SinkWindow(4, 1024), None),
        (SinkWindow(4, 512), None),
        (None, codec_of(LAYOUT, "none", KEPT)),
        (None, codec_of(LAYOUT, "none", [[0, 1]] * 3)),
        (SinkWindow(4, 1024), codec_of(LAYOUT, "int8", KEPT)),
    ]
    spaces = [
        Namespace(**namespace_fields(LAYOUT, model="m", codec=codec, compaction=compaction_terms(window, codec)))
        for window, codec in ways
    ]
    assert len({space.fingerprint() for space in spaces}) == len(ways)
    assert spaces[1].compaction == "sink4+window1024"
    for (_, codec), space in zip(ways, spaces, strict=True):
        check_namespace(space, codec)
    with pytest.raises(ValueError, match="keeps"):
        check_namespace(spaces[3], ways[4][1])
    with pytest.raises(ValueError, match="keeps"):
        check_namespace(spaces[3], None)
