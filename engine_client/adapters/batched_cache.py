"""The KV of sequences that are decoded together: each attends to its own, whatever the lengths of the others.

A step's linear layers take all sequences at once. A GEMM of many rows rounds otherwise than one of a single row, so
what a sequence says would depend, in its last bits, on who else is there; `RowByRow` takes that away.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

try:
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ImportError as missing:
    raise ImportError("transformers or torch is missing: pip install 'cairn-kv[engine]'") from missing

ATTENTION = "cairn_batched"
GROWTH_TOKENS = 256  # that a sequence's buffers grow by
TILE_ROWS = 2048  # of a weight, so that it stays in the processor's cache while the sequences take turns


class SequenceKv:
    """The keys and values of one sequence, `[1, kv_heads, length, head_dim]` per layer, in buffers that grow.

    Takes over what `cache` has by copying it; the cache itself is not changed.
    """

    def __init__(self, cache: DynamicCache) -> None:
        self.length = int(cache.get_seq_length())
        layers: list[Any] = cache.layers
        self._buffers = [(self._with_room(layer.keys), self._with_room(layer.values)) for layer in layers]

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the token that follows, `[1, kv_heads, 1, head_dim]`; returns all there are, it among them."""
        at = self.length
        held_keys, held_values = self._buffers[layer]
        if at == held_keys.shape[2]:
            held_keys, held_values = self._with_room(held_keys), self._with_room(held_values)
            self._buffers[layer] = held_keys, held_values
        held_keys[:, :, at : at + 1] = keys
        held_values[:, :, at : at + 1] = values
        return held_keys[:, :, : at + 1], held_values[:, :, : at + 1]

    @staticmethod
    def _with_room(held: torch.Tensor) -> torch.Tensor:
        batch, heads, tokens, width = held.shape
        room = (tokens // GROWTH_TOKENS + 1) * GROWTH_TOKENS
        grown = torch.empty((batch, heads, room, width), dtype=held.dtype)
        grown[:, :, :tokens] = held
        return grown


class StepCache:
    """What a model takes for its cache in one step of many sequences: row n of the batch is `sequences[n]`."""

    def __init__(self, sequences: Sequence[SequenceKv]) -> None:
        self._sequences = sequences

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(sequence.length for sequence in self._sequences)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        pairs = [
            sequence.append(layer_idx, key_states[row : row + 1], value_states[row : row + 1])
            for row, sequence in enumerate(self._sequences)
        ]
        return [keys for keys, _ in pairs], [values for _, values in pairs]


def attend_each(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | list[torch.Tensor],
    value: torch.Tensor | list[torch.Tensor],
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA; for a step's keys and values, that of each row by itself."""
    if isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor):
        whole: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return whole
    outputs = [
        sdpa_attention_forward(module, query[row : row + 1], keys, values, None, **kwargs)[0]
        for row, (keys, values) in enumerate(zip(key, value, strict=True))
    ]
    return torch.cat(outputs), None


class RowByRow(TorchFunctionMode):
    """Within it, a linear layer computes each row of a batch as if it were alone, bit for bit."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.nn.functional.linear and args[0].shape[0] > 1:
            return _linear_by_rows(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear_by_rows(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`rows` is `[batch, 1, in]`, the result `[batch, 1, out]`; a weight comes from memory once for all rows."""
    linear = torch._C._nn.linear  # the same function: within the mode, torch.nn.functional's would come back here
    batch, out = rows.shape[0], weight.shape[0]
    if out <= 2 * TILE_ROWS:
        return torch.cat([linear(rows[row : row + 1], weight, bias) for row in range(batch)])
    result = torch.empty((*rows.shape[:-1], out), dtype=rows.dtype)
    for start in range(0, out, TILE_ROWS):
        stop = start + TILE_ROWS if start + 2 * TILE_ROWS <= out else out
        part = bias[start:stop] if bias is not None else None
        for row in range(batch):
            result[row : row + 1, ..., start:stop] = linear(rows[row : row + 1], weight[start:stop], part)
        if stop == out:
            break
    return result


def attend_in_batches(model: PreTrainedModel) -> None:
    """Makes `model` take a StepCache; its other forwards stay what they are with SDPA. Raises ValueError."""
    found = model.config._attn_implementation
    if found not in ("sdpa", ATTENTION):
        raise ValueError(f"the model attends by {found}, not by sdpa")
    AttentionInterface.register(ATTENTION, attend_each)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)


def step(
    model: PreTrainedModel, tokens: Sequence[int], sequences: Sequence[SequenceKv], *, is_exact: bool
) -> torch.Tensor:
    """One forward: token n follows `sequences[n]`, which it is added to. The logits after each, `[batch, vocab]`.

    is_exact: each row is, bit for bit, what it would be without the others.
    """
    ids = torch.tensor(tokens)[:, None]
    positions = torch.tensor([sequence.length for sequence in sequences])[:, None]
    prepared = torch.ones(
        (1, 1, 1, 1), dtype=torch.bool
    )  # a mask that is ready is left alone, and attend_each has none
    arguments: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "attention_mask": prepared}
    arguments |= {"cache": StepCache(sequences), "use_cache": True, "logits_to_keep": 1}
    with torch.inference_mode():
        if is_exact and len(sequences) > 1:
            with RowByRow():
                logits: torch.Tensor = model(**arguments).logits
        else:
            logits = model(**arguments).logits
    for sequence in sequences:
        sequence.length += 1
    return logits[:, -1]
