"""The transformers adapter: outputs do not depend on what the store has, and layers stream both ways."""

import multiprocessing
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
)

from engine_client.adapters import transformers as adapter
from engine_client.layout import pack_layer

pytestmark = pytest.mark.engine

BLOCK, CHUNK = 16, 64
TIMES = ("load_s", "compute_s", "put_s", "put_hidden_s", "ttft_s", "total_s")


@dataclass
class Report:
    blocks: int
    bytes: int
    failure: str = ""


class MemoryStore:
    """Both ends of a store in one dict: the tokens up to a block's end, and its bytes."""

    def __init__(self, layout, *, executor=None):
        self.layout = layout
        self.executor = executor  # where writes run; None: on the engine's thread
        self.blocks = {}
        self.offers = []
        self.open_loads = 0

    def key(self, tokens, block):
        return tuple(tokens[: (block + 1) * self.layout.block_tokens])

    def begin(self, tokens):
        return MemoryStream(self, list(tokens))

    def load(self, tokens, deadline_s):
        tokens = list(tokens)
        blocks = []
        for block in range(len(tokens) // self.layout.block_tokens):
            found = self.blocks.get(self.key(tokens, block))
            if found is None:
                break
            blocks.append(memoryview(found).toreadonly())
        self.open_loads += 1
        return MemoryPrefix(self, blocks)


class MemoryPrefix:
    failure = ""

    def __init__(self, store, blocks):
        self.store = store
        self.blocks = blocks
        self.tokens = len(blocks) * store.layout.block_tokens

    def is_intact(self):
        return True

    def close(self):
        for block in self.blocks:
            block.release()
        self.store.open_loads -= 1


class MemoryStream:
    def __init__(self, store, tokens):
        self.store = store
        self.tokens = tokens
        count = len(tokens) // store.layout.block_tokens
        self.wanted = [n for n in range(count) if store.key(tokens, n) not in store.blocks]
        self.slots = {n: bytearray(store.layout.block_bytes) for n in self.wanted}
        self.layers = dict.fromkeys(self.wanted, 0)
        self.writes = []
        self.aborted = False

    def layer_ready(self, layer, first_block, stop_block, write):
        assert not self.aborted
        indexes = [n for n in self.wanted if first_block <= n < stop_block]
        assert indexes, "nothing here is wanted"
        for n in indexes:
            assert self.layers[n] == layer, "the layers of a block come in order"
            self.layers[n] += 1
        self.store.offers.append((layer, first_block, stop_block))
        blocks = [memoryview(self.slots[n]) for n in indexes]
        if self.store.executor is None:
            for block, index in zip(blocks, indexes, strict=True):
                write([block], [index])
        else:
            self.writes.append(self.store.executor.submit(write, blocks, indexes))

    def finish(self, complete_blocks):
        for write in self.writes:
            write.result()
        done = [n for n in self.wanted if n < complete_blocks]
        for n in done:
            assert self.layers[n] == self.store.layout.layers
            self.store.blocks[self.store.key(self.tokens, n)] = bytes(self.slots[n])
        return Report(len(done), len(done) * self.store.layout.block_bytes)

    def abort(self):
        self.aborted = True


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    return adapter.tiny_model()


def tokens_of(count, seed=3):
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_for(model, **settings):
    return adapter.TransformersEngine(model, **{"block_tokens": BLOCK, "chunk_tokens": CHUNK} | settings)


def run(model, tokens, cache, chunk=CHUNK, steps=12):
    """The tokens and the logits of a prefill and some steps."""
    logits = adapter.prefill(model, torch.tensor([tokens]), cache, chunk)
    steps = list(adapter.decode(model, logits, cache, steps))
    return [token for token, _ in steps], torch.cat([logits for _, logits in steps])


def raising(*args):
    raise OSError("the node is gone")


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prefix", [64, 128, 256, 320])
def test_a_warm_run_equals_the_cold_run_bit_for_bit(dtype, prefix):
    model = adapter.tiny_model(dtype=dtype)
    tokens = tokens_of(330)
    cold = DynamicCache(config=model.config)
    expected = run(model, tokens, cold)
    waiters = [
        lambda layer=layer: (layer.keys[:, :, :prefix].clone(), layer.values[:, :, :prefix].clone())
        for layer in cold.layers
    ]
    warm = adapter.StreamInCache(model.config, prefix, waiters)
    token_ids, logits = run(model, tokens, warm)
    assert token_ids == expected[0]
    assert same_bits(logits, expected[1])
    for one, other in zip(warm.layers, cold.layers, strict=True):
        assert same_bits(one.keys, other.keys)
        assert same_bits(one.values, other.values)


def test_the_prefix_matters_to_the_tiny_model(model):
    tokens = tokens_of(330)
    other = [(token + 1) % 512 for token in tokens[:64]] + tokens[64:]
    one, two = (run(model, each, DynamicCache(config=model.config)) for each in (tokens, other))
    assert one[0] != two[0]
    assert (one[1][0] - two[1][0]).abs().max() > 0.05


@pytest.mark.parametrize("length", [63, 64, 65, 66, 129, 250, 320])
@pytest.mark.parametrize("writes", ["at once", "in a thread"])
def test_an_engine_gives_the_same_tokens_whatever_the_store_has(model, length, writes):
    tokens = tokens_of(length)
    engine = engine_for(model)
    expected = engine.generate(tokens, 8)
    with ThreadPoolExecutor(1) as executor:
        store = MemoryStore(engine.layout, executor=executor if writes == "in a thread" else None)
        first = engine.generate(tokens, 8, load=store, store=store)
        again = engine.generate(tokens, 8, load=store, store=store)
    assert expected.token_ids == first.token_ids == again.token_ids
    assert (first.reused_tokens, first.computed_tokens) == (0, length)
    assert first.bytes_stored == length // CHUNK * CHUNK // BLOCK * engine.layout.block_bytes
    assert again.reused_tokens == (length - 2) // CHUNK * CHUNK
    assert again.computed_tokens == length - again.reused_tokens
    assert again.bytes_loaded == again.reused_tokens // BLOCK * engine.layout.block_bytes
    assert again.bytes_stored == 0
    assert first.failures == again.failures == ()
    assert store.open_loads == 0


def test_stored_blocks_are_the_bytes_of_the_plain_cache(model):
    tokens = tokens_of(192)
    engine = engine_for(model)
    store = MemoryStore(engine.layout)
    engine.generate(tokens, 0, store=store)
    cache = DynamicCache(config=model.config)
    adapter.prefill(model, torch.tensor([tokens]), cache, CHUNK)
    for n in range(12):
        expected = bytearray(engine.layout.block_bytes)
        for layer in range(4):
            pair = cache.layers[layer].keys, cache.layers[layer].values
            pack_layer(engine.layout, layer, [memoryview(expected)], [n * BLOCK], *pair)
        assert store.blocks[tuple(tokens[: (n + 1) * BLOCK])] == expected


def test_a_longer_prompt_with_the_same_beginning_computes_only_its_rest(model):
    document, questions = tokens_of(200), [tokens_of(20, seed) for seed in (7, 8, 9)]
    engine = engine_for(model)
    store = MemoryStore(engine.layout)
    engine.generate(document, 0, store=store)
    for question in questions:
        prompt = document + question
        warm = engine.generate(prompt, 8, load=store, store=store)
        assert warm.token_ids == engine.generate(prompt, 8).token_ids
        assert (warm.reused_tokens, warm.computed_tokens) == (192, 28)


def test_blocks_of_a_cut_chunk_are_neither_stored_nor_reused_when_aligned(model):
    tokens = tokens_of(120)
    aligned, loose = engine_for(model), engine_for(model, align_to_chunk=False)
    store = MemoryStore(aligned.layout)
    assert aligned.generate(tokens, 0, store=store).bytes_stored == 4 * aligned.layout.block_bytes
    assert loose.generate(tokens, 0, store=store).bytes_stored == 3 * aligned.layout.block_bytes
    assert aligned.generate(tokens, 0, load=store).reused_tokens == 64
    assert loose.generate(tokens, 0, load=store).reused_tokens == 112


def test_a_prefix_that_ends_within_a_chunk_is_used_up_to_the_chunk(model):
    tokens = tokens_of(200)
    engine = engine_for(model)
    store = MemoryStore(engine.layout)
    expected = engine.generate(tokens, 4, store=store).token_ids
    del store.blocks[tuple(tokens[: 11 * BLOCK])]
    got = engine.generate(tokens, 4, load=store)
    assert (got.token_ids, got.reused_tokens, got.failures) == (expected, 128, ())


def test_blocks_that_went_from_the_front_are_put_again(model):
    tokens = tokens_of(192)
    engine = engine_for(model)
    store = MemoryStore(engine.layout)
    engine.generate(tokens, 0, store=store)
    before = dict(store.blocks)

    class Forgetful(MemoryStore):
        """Has a prefix when it is asked, and has lost its first block when new ones come."""

        def begin(self, tokens):
            self.blocks.pop(tuple(tokens[:BLOCK]))
            return super().begin(tokens)

    forgetful = Forgetful(engine.layout)
    forgetful.blocks = dict(before)
    again = engine.generate(tokens, 0, load=forgetful, store=forgetful)
    assert again.reused_tokens == 128
    assert again.bytes_stored == engine.layout.block_bytes
    assert forgetful.blocks == before


def test_layers_are_offered_in_order_and_chunk_by_chunk(model):
    engine = engine_for(model)
    store = MemoryStore(engine.layout)
    engine.generate(tokens_of(150), 4, store=store)
    assert store.offers == [(layer, first, first + CHUNK // BLOCK) for first in (0, 4) for layer in range(4)]


def test_the_streaming_cache_equals_the_plain_cache_and_reports_every_layer(model):
    tokens, seen = tokens_of(150), []

    def sink(layer, start, end, keys, values):
        assert keys.shape == values.shape == (1, 2, end, 16)
        seen.append((layer, start, end, keys, values))

    streaming = adapter.StreamOutCache(model.config, sink)
    plain = DynamicCache(config=model.config)
    assert same_bits(
        adapter.prefill(model, torch.tensor([tokens]), streaming, CHUNK),
        adapter.prefill(model, torch.tensor([tokens]), plain, CHUNK),
    )
    cuts = [(0, 64), (64, 128), (128, 150)]
    assert [entry[:3] for entry in seen] == [(layer, *cut) for cut in cuts for layer in range(4)]
    for layer, _, end, keys, values in seen:
        assert same_bits(keys, plain.layers[layer].keys[:, :, :end])
        assert same_bits(values, plain.layers[layer].values[:, :, :end])


def test_a_layer_waits_for_its_own_prefix_only(model):
    tokens = tokens_of(150)
    cold = DynamicCache(config=model.config)
    expected = adapter.prefill(model, torch.tensor([tokens]), cold, CHUNK)
    arrived = [threading.Event() for _ in cold.layers]
    computed = []

    def wait_for(index):
        assert arrived[index].wait(timeout=60)
        return cold.layers[index].keys[:, :, :128], cold.layers[index].values[:, :, :128]

    def sink(layer, start, end, keys, values):
        computed.append(layer)
        if layer + 1 < len(arrived):
            arrived[layer + 1].set()  # the next layer's prefix comes only when this layer is done

    waiters = [lambda index=index: wait_for(index) for index in range(4)]
    warm = adapter.StreamInCache(model.config, 128, waiters, sink)
    assert warm.get_seq_length() == 128
    arrived[0].set()
    assert same_bits(adapter.prefill(model, torch.tensor([tokens]), warm, CHUNK), expected)
    assert computed == [0, 1, 2, 3]


@pytest.mark.parametrize("covered", [127, 128])
def test_a_prompt_that_is_wholly_covered_still_computes_its_end(model, covered):
    tokens = tokens_of(128)
    cold = DynamicCache(config=model.config)
    expected = adapter.prefill(model, torch.tensor([tokens]), cold, CHUNK)
    ends = []
    waiters = [lambda layer=layer: (layer.keys[:, :, :covered], layer.values[:, :, :covered]) for layer in cold.layers]
    warm = adapter.StreamInCache(
        model.config, covered, waiters, lambda layer, start, end, *_: ends.append((start, end))
    )
    logits = adapter.prefill(model, torch.tensor([tokens]), warm, CHUNK)
    assert ends == [(126, 128)] * 4
    assert torch.allclose(logits, expected, atol=1e-4)

    adapter.prefill(model, torch.tensor([tokens]), cold, CHUNK)
    assert cold.get_seq_length() == 128
    assert torch.allclose(cold.layers[3].keys, warm.layers[3].keys, atol=1e-4)


def test_an_engine_reuses_no_more_than_it_must_compute(model):
    tokens = tokens_of(128)
    engine = engine_for(model)
    store = MemoryStore(engine.layout)
    engine.generate(tokens, 0, store=store)
    assert len(store.blocks) == 8
    warm = engine.generate(tokens, 4, load=store)
    assert (warm.reused_tokens, warm.computed_tokens) == (64, 64)
    assert warm.token_ids == engine.generate(tokens, 4).token_ids


@pytest.mark.parametrize("length", [1, 2, 3, 16])
def test_a_short_prompt_needs_no_store(model, length):
    engine = engine_for(model)
    store = MemoryStore(engine.layout)
    store.load = store.begin = raising
    tokens = tokens_of(length)
    got = engine.generate(tokens, 3, load=store, store=store)
    assert got.token_ids == engine.generate(tokens, 3).token_ids
    assert (got.reused_tokens, got.bytes_stored, got.failures) == (0, 0, ())


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="at least one token"):
        engine_for(model).generate([], 3)


def test_decoding_ends_with_the_end_of_sequence():
    model = adapter.tiny_model()
    tokens = tokens_of(40)
    free = engine_for(model).generate(tokens, 8).token_ids
    assert len(free) == 8
    for stop in (free[2], [511, free[2]]):
        model.generation_config.eos_token_id = stop
        assert engine_for(model).generate(tokens, 8).token_ids == free[: free.index(free[2]) + 1]


@pytest.mark.parametrize("broken", ["load", "begin", "layer_ready", "finish", "close"])
def test_a_store_that_fails_costs_no_token(model, broken, monkeypatch):
    tokens = tokens_of(200)
    engine = engine_for(model)
    store = MemoryStore(engine.layout)
    engine.generate(tokens[:128], 0, store=store)
    expected = engine.generate(tokens, 6).token_ids
    if broken in ("load", "begin"):
        monkeypatch.setattr(store, broken, raising)
    elif broken == "close":
        monkeypatch.setattr(MemoryPrefix, broken, raising)
    else:
        monkeypatch.setattr(MemoryStream, broken, raising)
    got = engine.generate(tokens, 6, load=store, store=store)
    assert got.token_ids == expected
    assert len(got.failures) == 1
    assert "the node is gone" in got.failures[0]
    assert got.reused_tokens == (0 if broken == "load" else 128)


@dataclass
class Prefix:
    tokens: int
    blocks: list = field(default_factory=list)
    failure: str = ""
    closed: int = 0

    def is_intact(self):
        return True

    def close(self):
        self.closed += 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blocks: blocks[:-1], "3 blocks came for 64 tokens"),
        (lambda blocks: [*blocks[:3], blocks[3][:-1]], "a block came that is not"),
    ],
)
def test_a_load_that_makes_no_sense_is_a_miss(model, change, message):
    engine = engine_for(model)
    tokens = tokens_of(100)
    store = MemoryStore(engine.layout)
    engine.generate(tokens, 0, store=store)
    prefix = Prefix(64, change([memoryview(block) for block in store.blocks.values()]))
    store.load = lambda tokens, deadline_s: prefix
    got = engine.generate(tokens, 4, load=store)
    assert got.token_ids == engine.generate(tokens, 4).token_ids
    assert got.reused_tokens == 0
    assert message in got.failures[0]
    assert prefix.closed == 1


def test_an_engine_that_fails_gives_back_what_it_holds(model, monkeypatch):
    tokens = tokens_of(200)
    engine = engine_for(model)
    store = MemoryStore(engine.layout)
    engine.generate(tokens[:64], 0, store=store)
    streams = []
    monkeypatch.setattr(store, "begin", lambda tokens: streams.append(MemoryStream(store, list(tokens))) or streams[0])
    monkeypatch.setattr(adapter, "prefill", raising)
    with pytest.raises(OSError, match="the node is gone"):
        engine.generate(tokens, 4, load=store, store=store)
    assert streams[0].aborted
    assert store.open_loads == 0


def test_a_prefix_is_closed_as_soon_as_its_last_layer_is_in_the_cache(model):
    engine = engine_for(model)
    tokens = tokens_of(200)
    store = MemoryStore(engine.layout)
    engine.generate(tokens[:64], 0, store=store)
    open_at = []

    class Watching(MemoryStream):
        def layer_ready(self, layer, *rest):
            open_at.append((layer, store.open_loads))
            super().layer_ready(layer, *rest)

    store.begin = lambda tokens: Watching(store, list(tokens))
    engine.generate(tokens, 0, load=store, store=store)
    assert open_at[:5] == [(0, 1), (1, 1), (2, 1), (3, 0), (0, 0)]


def test_puts_in_a_thread_are_hidden_behind_the_computation_and_others_are_not(model):
    tokens = tokens_of(300)
    engine = engine_for(model)
    inline = engine.generate(tokens, 0, store=MemoryStore(engine.layout))
    assert inline.put_s > 0
    assert inline.put_hidden_s == pytest.approx(0, abs=1e-9)
    with ThreadPoolExecutor(1) as executor:
        threaded = engine.generate(tokens, 0, store=MemoryStore(engine.layout, executor=executor))
    assert 0 < threaded.put_hidden_s <= threaded.put_s
    for got in (inline, threaded):
        assert all(getattr(got, name) >= 0 for name in TIMES)
        assert got.compute_s < got.ttft_s <= got.total_s


def test_time_at_the_store_is_not_counted_as_computation(model):
    now = [0.0]

    class Slow(MemoryStore):
        """Takes 2 s for a load and 5 s to begin; the model takes no time by this clock."""

        def begin(self, tokens):
            now[0] += 5
            return SlowStream(self, tokens)

        def load(self, tokens, deadline_s):
            now[0] += 2
            return super().load(tokens, deadline_s)

    class SlowStream(MemoryStream):
        """Takes 1 s for each layer of a chunk, and 3 s to finish."""

        def layer_ready(self, *offer):
            now[0] += 1
            super().layer_ready(*offer)

        def finish(self, complete_blocks):
            now[0] += 3
            return super().finish(complete_blocks)

    engine = engine_for(model, clock=lambda: now[0])
    store = Slow(engine.layout)
    got = engine.generate(tokens_of(130), 2, load=store, store=store)
    assert [getattr(got, name) for name in TIMES] == [2, 0, 5 + 8 + 3, 0, 2 + 5 + 8, 2 + 5 + 8 + 3]


def test_the_deadline_is_handed_to_the_load(model):
    engine = engine_for(model, load_deadline_s=0.25)
    asked = []
    store = MemoryStore(engine.layout)
    store.load = lambda tokens, deadline_s: asked.append((len(tokens), deadline_s)) or Prefix(0)
    engine.generate(tokens_of(200), 0, load=store)
    assert asked == [(192, 0.25)]


def test_a_chunk_that_cuts_blocks_is_refused(model):
    with pytest.raises(ValueError, match="chunk_tokens 100 is not a multiple of block_tokens 16"):
        engine_for(model, chunk_tokens=100)


def test_the_layout_is_that_of_the_cache(model):
    layout = adapter.kv_layout(model.config, BLOCK, "float32")
    assert (layout.kind, layout.layers, layout.kv_heads, layout.head_dim) == ("gqa", 4, 2, 16)
    bare = LlamaConfig(hidden_size=128, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=3)
    assert adapter.kv_layout(bare, BLOCK, "bfloat16").head_dim == 16


def test_a_model_whose_cache_has_no_blocks_is_refused():
    config = Gemma3TextConfig(num_hidden_layers=6, hidden_size=64, intermediate_size=64)
    with pytest.raises(ValueError, match="gemma3_text model keeps its cache in DynamicSlidingWindowLayer"):
        adapter.kv_layout(config, BLOCK, "float32")


def test_a_latent_cache_streams_like_any_other():
    config = DeepseekV3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=24,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    engine = engine_for(DeepseekV3ForCausalLM(config).eval())
    assert (engine.layout.kind, engine.layout.layer_bytes) == ("mla", BLOCK * 32 * 4)
    store = MemoryStore(engine.layout)
    tokens = tokens_of(200)
    cold = engine.generate(tokens, 6, store=store)
    warm = engine.generate(tokens, 6, load=store)
    assert (cold.failures, warm.failures, warm.reused_tokens) == ((), (), 192)
    assert warm.token_ids == cold.token_ids == engine.generate(tokens, 6).token_ids


def test_a_model_that_takes_no_cache_is_told_apart(model):
    def forward(*, input_ids, use_cache, logits_to_keep, **ignored):
        return model(input_ids=input_ids, logits_to_keep=1)

    with pytest.raises(ValueError, match="does not fill the cache"):
        adapter.prefill(forward, torch.tensor([tokens_of(4)]), DynamicCache(config=model.config), CHUNK)


def test_a_missing_engine_extra_is_named():
    program = "import sys; sys.modules['torch'] = None; import engine_client.adapters.transformers"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'cairn-kv[engine]'" in done.stderr


def test_tiny_models_of_one_seed_are_equal_and_leave_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, other = adapter.tiny_model(), adapter.tiny_model(), adapter.tiny_model(seed=1)
    assert torch.equal(torch.rand(1), expected)
    weights = [model.lm_head.weight for model in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def load_in_process(cache_dir, answers):
    model, _ = adapter.load_model("float32", 1, cache_dir)
    answers.put(model.get_input_embeddings().weight[:100].sum().item())


def test_what_a_client_reports_of_its_failures_is_passed_on(model):
    engine = engine_for(model)
    tokens = tokens_of(200)
    store = MemoryStore(engine.layout)

    class Full(MemoryStream):
        """Has no room for anything."""

        def finish(self, complete_blocks):
            return Report(0, 0, "full")

    store.load = lambda tokens, deadline_s: Prefix(0, failure="peer_lost: the node is gone")
    store.begin = lambda tokens: Full(store, list(tokens))
    got = engine.generate(tokens, 4, load=store, store=store)
    assert got.failures == ("load: peer_lost: the node is gone", "put: full")
    assert got.token_ids == engine.generate(tokens, 4).token_ids


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_loads_without_a_network_from_two_processes_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=load_in_process, args=(tmp_path, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    assert answers.get(timeout=500) == answers.get(timeout=500)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"smollm2-135m-instruct-{adapter.smollm2_revision()}"]

    model, tokenizer = adapter.load_model("bfloat16", 1, tmp_path)
    assert model.dtype == torch.bfloat16
    layout = adapter.kv_layout(model.config, 64, "bfloat16")
    assert layout.block_bytes == 64 * 23_040
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids
    engine = adapter.TransformersEngine(model)
    answer = engine.generate(ids, 12)
    assert "Paris" in tokenizer.decode(answer.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("layers_read", [1, 2, 4])
def test_a_prefix_lost_while_it_is_read_is_computed_instead(model, layers_read):
    class Lapsing(MemoryPrefix):
        reads = 0

        def is_intact(self):
            self.reads += 1
            return self.reads < layers_read

    class LapsingStore(MemoryStore):
        def load(self, tokens, deadline_s):
            loaded = super().load(tokens, deadline_s)
            return Lapsing(self, loaded.blocks)

    engine = engine_for(model)
    store = LapsingStore(engine.layout)
    tokens = tokens_of(200)
    cold = engine.generate(tokens, 8, store=store)
    before = dict(store.blocks)
    warm = engine.generate(tokens, 8, load=store, store=store)
    assert warm.token_ids == cold.token_ids
    assert warm.reused_tokens == 0
    assert "lost" in warm.failures[0]
    assert store.blocks == before
    assert store.open_loads == 0
