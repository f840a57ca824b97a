"""An engine whose blocks go through a codec or lack something, with a real node: outputs, sizes, refusals."""

from functools import partial

import pytest
import torch
from transformers import DynamicCache

from engine_client.adapters import transformers as adapter
from engine_client.blocking import BlockingClient
from engine_client.codec import CODECS
from engine_client.compaction import SinkWindow
from engine_client.decode import DecodeClient
from engine_client.layout import namespace_fields
from engine_client.prefill import PrefillClient
from kvstore.prefix import Namespace

pytestmark = pytest.mark.engine

BLOCK, CHUNK = 16, 64
LOSSLESS = ("none", "lz4", "zstd")
TOKENS = torch.randint(0, 512, (330,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine_for(model, **settings):
    return adapter.TransformersEngine(
        model, **{"block_tokens": BLOCK, "chunk_tokens": CHUNK, "load_deadline_s": 20.0} | settings
    )


@pytest.fixture
def connect(live_node):
    """Both ends of a store for an engine: `connect(engine)`, over shared memory or, with `tcp=True`, over TCP."""
    node, opened = live_node(), []

    def clients(engine, *, tcp=False, name=None):
        address = node.call(lambda: node.node.addresses["tcp" if tcp else "unix"])
        client = BlockingClient(address, node.token, timeout_s=20.0)
        fields = namespace_fields(engine.layout, model="tiny", codec=engine.codec, compaction=engine.compaction)
        namespace = Namespace(**fields)
        space = client.open(name or f"tiny {namespace.fingerprint()}", namespace)
        store = PrefillClient(client, space, codec=engine.codec)
        opened.append((store, client))
        return DecodeClient(client, space, codec=engine.codec), store

    yield clients
    for store, client in opened:
        store.close()
        client.close()


@pytest.mark.parametrize("tcp", [False, True], ids=["shared memory", "tcp"])
@pytest.mark.parametrize("name", CODECS)
def test_a_prefix_goes_through_the_store_and_through_the_codec(connect, name, tcp):
    model = adapter.tiny_model(dtype="bfloat16")
    engine = engine_for(model, codec=name)
    load, store = connect(engine, tcp=tcp)
    cold = engine.generate(TOKENS, 8)
    first = engine.generate(TOKENS, 8, load=load, store=store)
    again = engine.generate(TOKENS, 8, load=load, store=store)
    assert first.failures == again.failures == ()
    assert first.token_ids == cold.token_ids
    assert (first.reused_tokens, again.reused_tokens) == (0, 320)
    assert again.bytes_stored == 0
    blocks = 320 // BLOCK
    if name in LOSSLESS:
        assert again.token_ids == cold.token_ids
    if engine.codec is not None and engine.codec.block_bytes:
        assert first.bytes_stored == blocks * engine.codec.block_bytes < blocks * engine.layout.block_bytes
    elif name != "none":
        assert 0 < first.bytes_stored <= blocks * engine.codec.most_bytes


def test_what_is_loaded_through_int8_is_near_what_was_computed(connect):
    model = adapter.tiny_model()
    engine = engine_for(model, codec="int8")
    load, store = connect(engine)
    engine.generate(TOKENS, 0, store=store)
    cold = DynamicCache(config=model.config)
    expected = adapter.prefill(model, torch.tensor([TOKENS]), cold, CHUNK)
    loaded = load.load(TOKENS[:320], 20.0)
    key, value = (torch.zeros(2, 320, 16) for _ in range(2))
    for layer in range(4):
        adapter_side = cold.layers[layer].keys[0, :, :320], cold.layers[layer].values[0, :, :320]
        for at, block in enumerate(loaded.blocks):
            raw = memoryview(bytearray(engine.layout.layer_bytes))
            engine.codec.decode_layer(layer, block, raw)
            both = torch.frombuffer(raw, dtype=torch.float32).reshape(2, 2, BLOCK, 16)
            key[:, at * BLOCK : (at + 1) * BLOCK], value[:, at * BLOCK : (at + 1) * BLOCK] = both
        for one, other in zip((key, value), adapter_side, strict=True):
            assert (one - other).abs().max() < 0.02 * (other.max() - other.min())
    loaded.close()
    assert expected.isfinite().all()


def test_a_block_with_a_value_that_is_not_finite_is_not_stored(connect):
    model = adapter.tiny_model()
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[0, 0] = float("inf")
    engine = engine_for(model, codec="int8")
    load, store = connect(engine)
    got = engine.generate(TOKENS, 0, store=store)
    assert got.bytes_stored == 0
    assert "not finite" in got.failures[0]
    assert load.load(TOKENS, 1.0).tokens == 0


def test_blocks_that_cannot_be_read_are_computed_instead(connect):
    model = adapter.tiny_model()
    writing, reading = engine_for(model, codec="int8"), engine_for(model, codec="int8")
    load, store = connect(writing)
    writing.generate(TOKENS, 0, store=store)
    expected = reading.generate(TOKENS, 6).token_ids

    class Scribbled:
        """What comes through it has lost the mark of its codec."""

        def load(self, tokens, deadline_s):
            loaded = load.load(tokens, deadline_s)
            loaded.blocks = [memoryview(bytes(block.nbytes)) for block in loaded.blocks]
            return loaded

    got = reading.generate(TOKENS, 6, load=Scribbled())
    assert got.token_ids == expected
    assert got.reused_tokens == 0
    assert "cannot be read" in got.failures[0]


def test_a_client_of_another_codec_than_its_namespace_is_refused(connect):
    model = adapter.tiny_model()
    int8, plain = engine_for(model, codec="int8"), engine_for(model)
    connect(int8, name="shared")
    with pytest.raises(Exception, match="codec: 'int8' here, '' there"):
        connect(plain, name="shared")
    plain.codec, int8.codec = int8.codec, None
    load, _ = connect(plain, name="other")
    for client in (DecodeClient, PrefillClient):
        with pytest.raises(ValueError, match="has codec 'int8'"):
            client(load._client, load._space)


@pytest.mark.parametrize("settings", [{"window": SinkWindow(4, 64)}, {"codec": "fp8"}, {"kept_heads": [[0]] * 4}])
def test_an_engine_is_not_let_into_the_namespace_of_another_form(connect, settings):
    model = adapter.tiny_model()
    plain, other = engine_for(model), engine_for(model, **settings)
    for engine, client in ((plain, other), (other, plain)):
        load, store = connect(client)
        for given in ({"load": load}, {"store": store}):
            with pytest.raises(ValueError, match="codec and compaction"):
                engine.generate(TOKENS, 0, **given)


# What is left out


def hidden_middle(model, tokens, prefix, kept_blocks, steps):
    """Greedy tokens and last logits of a run whose whole cache is there, and a mask hides what is left out."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens[:prefix]]), cache=cache, use_cache=True)
        visible = torch.zeros(prefix, dtype=torch.bool)
        for block in kept_blocks:
            visible[block * BLOCK : (block + 1) * BLOCK] = True

        def forward(ids):
            before, count = cache.get_seq_length(), len(ids)
            mask = torch.ones(count, before + count, dtype=torch.bool).tril(before)
            mask[:, :prefix] &= visible
            positions = torch.arange(before, before + count)[None]
            output = model(
                input_ids=torch.tensor([ids]), cache=cache, use_cache=True,
                attention_mask=mask[None, None], position_ids=positions,
            )  # fmt: skip
            return output.logits[0, -1]

        logits, made = forward(tokens[prefix:]), []
        first = logits
        for _ in range(steps):
            made.append(int(logits.argmax()))
            logits = forward(made[-1:])
    return made, first


def test_a_window_gives_what_the_whole_cache_gives_when_the_middle_is_hidden(connect):
    model = adapter.tiny_model()
    window = SinkWindow(4, 100)
    whole, engine = engine_for(model), engine_for(model, window=window)
    load, store = connect(engine)
    whole_load, _ = connect(whole)
    engine.generate(TOKENS, 0, store=store)
    got = engine.generate(TOKENS, 8, load=load)
    kept = window.kept_blocks(320 // BLOCK, BLOCK)
    assert len(kept) == 1 + 7
    expected, logits = hidden_middle(model, TOKENS, 320, kept, 8)
    assert got.failures == ()
    assert (got.reused_tokens, got.bytes_loaded) == (320, 8 * engine.layout.block_bytes)
    assert got.token_ids == expected
    full = whole.generate(TOKENS, 8)
    assert full.token_ids != expected, "the window is seen to matter"
    assert whole_load.load(TOKENS, 1.0).tokens == 0, "nobody else meets its blocks"

    prefix = [load.load(TOKENS[:320], 20.0)]
    waiters = []
    for layer in range(4):
        pair = [torch.zeros(1, 2, len(kept) * BLOCK, 16) for _ in range(2)]
        for place, block in enumerate(kept):
            raw = prefix[0].blocks[block][layer * engine.layout.layer_bytes : (layer + 1) * engine.layout.layer_bytes]
            both = torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(2, 2, BLOCK, 16)
            for tensor, one in zip(pair, both, strict=True):
                tensor[0, :, place * BLOCK : (place + 1) * BLOCK] = one
        waiters.append(partial(tuple, pair))
    cache = adapter.StreamInCache(model.config, len(kept) * BLOCK, waiters)
    near = adapter.prefill(model, torch.tensor([TOKENS]), cache, CHUNK, 320 - len(kept) * BLOCK)
    assert torch.allclose(near[0], logits, atol=1e-4)
    prefix[0].close()


def test_what_is_computed_after_a_window_is_stored_under_its_own_tokens(connect):
    model = adapter.tiny_model()
    engine = engine_for(model, window=SinkWindow(4, 100))
    load, store = connect(engine)
    engine.generate(TOKENS[:200], 0, store=store)
    longer = engine.generate(TOKENS, 0, load=load, store=store)
    assert (longer.reused_tokens, longer.failures) == (192, ())
    assert longer.bytes_stored == (320 - 192) // BLOCK * engine.layout.block_bytes
    loaded = load.load(TOKENS, 20.0)
    assert loaded.tokens == 320
    # by the mask again: what the last stored block of layer 3 must be
    kept = SinkWindow(4, 100).kept_blocks(192 // BLOCK, BLOCK)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([TOKENS[:192]]), cache=cache, use_cache=True)
        visible = torch.zeros(192, dtype=torch.bool)
        for block in kept:
            visible[block * BLOCK : (block + 1) * BLOCK] = True
        mask = torch.ones(128, 320, dtype=torch.bool).tril(192)
        mask[:, :192] &= visible
        model(
            input_ids=torch.tensor([TOKENS[192:320]]), cache=cache, use_cache=True,
            attention_mask=mask[None, None], position_ids=torch.arange(192, 320)[None],
        )  # fmt: skip
    last = loaded.blocks[19][3 * engine.layout.layer_bytes :]
    keys, values = torch.frombuffer(bytearray(last), dtype=torch.float32).reshape(2, 2, BLOCK, 16)
    assert torch.allclose(keys, cache.layers[3].keys[0, :, 304:320], atol=1e-4)
    assert torch.allclose(values, cache.layers[3].values[0, :, 304:320], atol=1e-4)
    loaded.close()


def test_heads_that_the_model_does_not_use_can_be_left_out(connect):
    model = adapter.tiny_model()
    kept = [[0], [1], [0], [1]]
    with torch.no_grad():
        for layer, (head,) in zip(model.model.layers, kept, strict=True):
            unused = 1 - head  # of 2 KV heads, each for 4 query heads of 16
            layer.self_attn.o_proj.weight[:, unused * 64 : (unused + 1) * 64] = 0
    engine = engine_for(model, kept_heads=kept)
    load, store = connect(engine)
    first = engine.generate(TOKENS, 8, store=store)
    again = engine.generate(TOKENS, 8, load=load)
    assert first.bytes_stored == again.bytes_loaded == 20 * engine.layout.block_bytes // 2
    assert again.token_ids == first.token_ids
    assert (again.reused_tokens, again.failures) == (320, ())
