"""The model that a worker serves, with its tokens, and the namespace that its KV has in the store."""

import importlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.errors import ConfigError
from kvstore.prefix import Namespace
from server.worker.settings import BUILT_IN, WorkerSettings
from server.worker.texts import ByteTokens, ModelTokens, Tokens

if TYPE_CHECKING:
    from engine_client.adapters.batching import BatchingEngine, Running

MEASURED_TOKENS: Final = 256
MEASURED_STEPS: Final = 4


@dataclass(frozen=True, slots=True)
class Model:
    """`name` is what clients and the store call it."""

    name: str
    engine: "BatchingEngine"
    tokens: Tokens
    namespace: Namespace

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return self.namespace.block_bytes // self.namespace.block_tokens


def load_model(settings: WorkerSettings) -> Model:
    """Takes seconds. Raises ConfigError when something that it needs is missing, or the folder holds no model."""
    try:
        from engine_client.adapters import batching
        from engine_client.adapters import transformers as adapter
    except ImportError as error:
        raise ConfigError(f"a worker needs the extra `engine`: {error}") from error
    from engine_client.layout import namespace_fields

    tokens: Tokens
    try:
        if settings.model == "tiny":
            model, tokens, revision = adapter.tiny_model(dtype=settings.dtype), ByteTokens(), "seed-0"
        elif settings.model == "smollm2":
            model, tokenizer = adapter.load_model(settings.dtype, settings.threads)
            tokens, revision = _tokens_of(tokenizer), adapter.smollm2_revision()
        else:
            model, tokenizer = batching.load_folder(Path(settings.model), settings.dtype, settings.threads)
            tokens, revision = _tokens_of(tokenizer), settings.revision
        engine = batching.BatchingEngine(
            model,
            block_tokens=settings.block_tokens,
            chunk_tokens=settings.chunk_tokens,
            is_exact=settings.batching == "exact",
            load_deadline_s=settings.load_seconds,
        )
        engine.use_threads(settings.threads)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"worker.model {settings.model}: {error}") from error
    name = settings.served_model or (settings.model if settings.model in BUILT_IN else Path(settings.model).name)
    fields = namespace_fields(engine.layout, model=name, revision=revision)
    return Model(name, engine, tokens, Namespace(**fields))


def measure(engine: "BatchingEngine") -> dict[str, list[float]]:
    """What the first prompts and steps take, as coefficients of the costs that a Conductor counts with.

    Rough: attention is left out, and measurements of real work will tell more. It warms the model up as well.
    """
    from engine_client.adapters.batching import Sampler

    batch = [engine.open([1] * MEASURED_TOKENS, Sampler()) for _ in range(2)]
    for running in batch:
        while engine.chunk(running) is None:
            continue
    one_s, both_s = (min(_step_s(engine, some) for _ in range(MEASURED_STEPS)) for some in (batch[:1], batch))
    per_sequence_s = max(0.0, both_s - one_s)
    prefill_s = min(running.compute_s for running in batch)
    return {
        "prefill": [0.0, prefill_s / MEASURED_TOKENS, 0.0, 0.0],
        "decode": [max(0.0, one_s - per_sequence_s), per_sequence_s, 0.0],
    }


def _step_s(engine: "BatchingEngine", batch: "list[Running]") -> float:
    began = time.perf_counter()
    engine.step(batch)
    return time.perf_counter() - began


def _tokens_of(tokenizer: object) -> ModelTokens:
    """Raises ValueError for a tokenizer that is not one of transformers'."""
    refusals = (importlib.import_module("jinja2").TemplateError,)  # what transformers' templates are of
    try:
        return ModelTokens(
            tokenizer.encode,  # type: ignore[attr-defined]
            tokenizer.decode,  # type: ignore[attr-defined]
            tokenizer.apply_chat_template,  # type: ignore[attr-defined]
            refusals,
        )
    except AttributeError as error:
        raise ValueError(f"its tokenizer cannot be used: {error}") from error
