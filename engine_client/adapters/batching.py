"""Continuous batching: a prompt is computed chunk by chunk between the steps that all running sequences take together.

Greedy tokens are those of `TransformersEngine.generate`, which computes one request alone; with `is_exact` its logits
as well, bit for bit. Prefixes come from the store and go to it in the same way.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine_client.adapters import DecodeClient, Offering, PrefillClient, PrefixLostError, StoredPrefix
from engine_client.adapters.batched_cache import SequenceKv, attend_in_batches, step
from engine_client.adapters.transformers import (
    MIN_COMPUTED_TOKENS,
    StreamOutCache,
    TransformersEngine,
    prefill,
)

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
except ImportError as missing:
    raise ImportError("transformers or torch is missing: pip install 'cairn-kv[engine]'") from missing


LEAST_TEMPERATURE = 1e-5  # below it there is but one token, and the quotients would be no numbers


class ComputeFailed(Exception):
    """The model raised while it computed; the sequences that it computed are of no use any more."""


def load_folder(folder: Path, dtype: str, threads: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer out of a folder of safetensors, without a network. Raises OSError and ValueError.

    Sets torch's number of threads for the whole process.
    """
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    model.train(mode=False)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


class Sampler:
    """Picks tokens: the likeliest at temperature 0 or next to it, else by chance, with random numbers of its own seed.

    top_p: of the probability, how much the tokens have together that may be picked, likeliest first.
    """

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        self._temperature = temperature
        self._top_p = top_p
        self._random = torch.Generator().manual_seed(seed)

    def pick(self, logits: torch.Tensor) -> int:
        """A token by its `logits` `[vocab]`."""
        if self._temperature < LEAST_TEMPERATURE:
            return int(logits.argmax())
        shares, order = torch.softmax(logits.float() / self._temperature, dim=-1).sort(descending=True, stable=True)
        before = shares.cumsum(-1) - shares
        is_in = before < self._top_p
        is_in[0] = True  # the likeliest, whatever `top_p` is
        shares = torch.where(is_in, shares, 0.0)
        return int(order[torch.multinomial(shares, 1, generator=self._random)])


@dataclass(slots=True, eq=False)
class Running:
    """One request in the engine. `token` is the last that it gave; -1 before the first."""

    tokens: list[int]
    sampler: Sampler
    prefix: StoredPrefix
    offering: Offering
    failures: list[str] = field(default_factory=list)
    cache: StreamOutCache | None = None
    kv: SequenceKv | None = None
    computed_tokens: int = 0  # of the prompt, the loaded ones among them
    compute_s: float = 0.0  # of the prompt
    token: int = -1

    @property
    def context_tokens(self) -> int:
        return self.kv.length if self.kv is not None else self.computed_tokens

    @property
    def left_tokens(self) -> int:
        """Of the prompt, those to compute."""
        return len(self.tokens) - self.computed_tokens


class BatchingEngine(TransformersEngine):
    """A model that many requests share. Its arguments are those of TransformersEngine.

    is_exact: linear layers take the rows of a batch one by one, so that no bit depends on who else is in it. It costs
    time: with SmolLM2-135M in float32 on 2 cores a step of 16 sequences took 238 ms, without it 132 ms; of one, 45 ms.

    `open`, `prepare`, `finish` and `close` may be called from any thread, `chunk` and `step` from one at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        block_tokens: int = 64,
        chunk_tokens: int = 256,
        is_exact: bool = True,
        load_deadline_s: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(
            model,
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
            load_deadline_s=load_deadline_s,
            clock=clock,
        )
        attend_in_batches(model)
        self._is_exact = is_exact
        config = model.config.get_text_config(decoder=True)
        self.vocabulary = int(config.vocab_size)
        self.context_tokens = int(config.max_position_embeddings)
        stop = model.generation_config.eos_token_id
        self.ends = frozenset([stop] if isinstance(stop, int) else stop or ())

    def use_threads(self, threads: int) -> None:
        """How many cores the calling thread computes with; OpenMP keeps that for each thread by itself."""
        torch.set_num_threads(threads)

    def open(self, tokens: Sequence[int], sampler: Sampler) -> Running:
        """A request that has nothing of the store yet. Raises ValueError for an empty prompt."""
        if len(tokens) == 0:
            raise ValueError("a prompt has at least one token")
        failures: list[str] = []
        prefix = StoredPrefix(self.layout, self._clock, failures)
        return Running(list(tokens), sampler, prefix, Offering(self.layout, self._clock, failures), failures)

    def prepare(self, running: Running, load: DecodeClient | None, store: PrefillClient | None) -> None:
        """Finds what the store has of the prompt, and opens a stream for what it lacks. Waits for the store.

        May be called again, without `load`, for one whose prefix was lost: it begins anew.
        """
        self.close(running)
        running.cache, running.computed_tokens = None, 0
        running.prefix = StoredPrefix(self.layout, self._clock, running.failures)
        running.offering = Offering(self.layout, self._clock, running.failures)
        tokens = running.tokens
        if load is not None:
            most = self._on_grid(len(tokens) - MIN_COMPUTED_TOKENS)
            running.prefix.find(load, tokens[:most], self._load_deadline_s, self._grid_tokens)
            if running.prefix.tokens == 0:
                running.prefix.close()
        storable = self._on_grid(len(tokens))
        if store is not None and storable > running.prefix.tokens:
            running.offering.begin(store, tokens[:storable], running.prefix)

    def chunk(self, running: Running) -> int | None:
        """Computes the next chunk of the prompt; the first token once all of it is computed.

        Raises PrefixLostError when what was loaded cannot be relied upon: `prepare` it again. Raises ComputeFailed.
        """
        began = self._clock()
        if running.cache is None:
            running.cache = self._cache(running.prefix, running.offering.offer)
            running.computed_tokens = running.prefix.tokens
        size, total = self._chunk_tokens, len(running.tokens)
        end = (running.computed_tokens // size + 1) * size
        if total - end < MIN_COMPUTED_TOKENS:  # a piece of a single token must be computed in one call with this one
            end = total
        ids = torch.tensor([running.tokens[:end]])
        with _computing():
            logits = prefill(self._model, ids, running.cache, size)
            running.computed_tokens = end
            if end == total:
                running.kv, running.cache = SequenceKv(running.cache), None
                running.token = running.sampler.pick(logits[0])
        running.compute_s += self._clock() - began
        return running.token if end == total else None

    def step(self, batch: Sequence[Running]) -> list[int]:
        """The next token of each: one forward for all. Raises ComputeFailed."""
        sequences = [running.kv for running in batch if running.kv is not None]
        assert len(sequences) == len(batch), "only sequences whose prompt is computed take steps"
        with _computing():
            logits = step(self._model, [running.token for running in batch], sequences, is_exact=self._is_exact)
            for running, row in zip(batch, logits, strict=True):
                running.token = running.sampler.pick(row)
        return [running.token for running in batch]

    def finish(self, running: Running) -> None:
        """Waits until what was computed of the prompt is in the store."""
        running.offering.finish()

    def close(self, running: Running) -> None:
        """Gives back what the request holds at the store; may be called at any time after `chunk` returned."""
        running.prefix.close()
        running.offering.abort()


@contextmanager
def _computing() -> Iterator[None]:
    try:
        yield
    except PrefixLostError:
        raise
    except Exception as error:
        raise ComputeFailed(f"{type(error).__name__}: {error}") from error
