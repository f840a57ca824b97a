"""Traces of requests to replay: read from JSON lines, sped up, cut, or made up for tests."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, Final

BLOCK_TOKENS: Final = 512  # for which the public traces have one id
NAMES_END: Final = 1 << 63  # of ids: they fit the index and JSON alike


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. blocks: a name for each block of its prompt, the last perhaps not full; equal names mean equal
    prefixes up to there. Times are seconds since the trace's first request."""

    arrived_s: float
    tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(lines: Iterable[str], block_tokens: int = BLOCK_TOKENS) -> list[TraceRequest]:
    """Requests in order of arrival, the first at 0, from lines of `{"timestamp": ms, "input_length": tokens,
    "output_length": tokens, "hash_ids": [id of each block]}`. Empty lines are skipped.

    Raises ValueError, which names the line.
    """
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_request(json.loads(line), block_tokens))
        except (ValueError, RecursionError) as error:
            what = "no JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
            raise ValueError(f"line {number}: {what}") from error
    if not found:
        raise ValueError("no request in it")
    found.sort(key=lambda request: request.arrived_s)
    return _from_zero(found)


def faster(requests: Sequence[TraceRequest], speed: float) -> list[TraceRequest]:
    """The same requests, `speed` times as fast after each other."""
    if not speed > 0:
        raise ValueError(f"a trace cannot be replayed at {speed:g} times its speed")
    return [replace(request, arrived_s=request.arrived_s / speed) for request in requests]


def cut(requests: Sequence[TraceRequest], first: int, stop: int) -> list[TraceRequest]:
    """Requests [first, stop) alone; the first arrives at 0."""
    return _from_zero(requests[first:stop])


def made_up(
    count: int, draw: Callable[[], float], *, per_s: float = 4.0, mean_tokens: int = 8192, shared: float = 0.5
) -> list[TraceRequest]:
    """A small trace: Poisson arrivals, prompts of exponential length, answers of 128 tokens on average.

    `shared` of the requests go on from an earlier one: its blocks, then new ones. `draw` gives numbers in [0, 1).
    """
    at_s, next_name = 0.0, 0
    made: list[TraceRequest] = []
    for _ in range(count):
        tokens = 1 + int(_exponential(draw) * mean_tokens)
        prefix: tuple[int, ...] = ()
        if made and draw() < shared:
            before = made[int(draw() * len(made))]
            prefix = before.blocks[: before.tokens // BLOCK_TOKENS]
            tokens += len(prefix) * BLOCK_TOKENS
        new = -(-tokens // BLOCK_TOKENS) - len(prefix)
        blocks = (*prefix, *range(next_name, next_name + new))
        next_name += new
        made.append(TraceRequest(at_s, tokens, 1 + int(_exponential(draw) * 128), blocks))
        at_s += _exponential(draw) / per_s
    return made


def _exponential(draw: Callable[[], float]) -> float:
    return -log(1.0 - draw())


def _from_zero(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    return [replace(request, arrived_s=request.arrived_s - requests[0].arrived_s) for request in requests]


def _request(entry: Any, block_tokens: int) -> TraceRequest:
    if not isinstance(entry, dict):
        raise ValueError("no JSON object")
    at_ms, blocks = entry.get("timestamp"), entry.get("hash_ids")
    if not isinstance(at_ms, int | float) or isinstance(at_ms, bool) or not 0 <= at_ms < float("inf"):
        raise ValueError(f"timestamp is {at_ms!r}, not milliseconds from 0 on")
    tokens, output_tokens = _count(entry, "input_length"), _count(entry, "output_length")
    if not isinstance(blocks, list) or not all(type(name) is int and 0 <= name < NAMES_END for name in blocks):
        raise ValueError("hash_ids is no list of whole numbers from 0 on")
    if len(blocks) != -(-tokens // block_tokens):
        raise ValueError(f"{len(blocks)} hash_ids for {tokens} tokens in blocks of {block_tokens}")
    return TraceRequest(at_ms / 1000, tokens, output_tokens, tuple(blocks))


def _count(entry: dict[str, Any], field: str) -> int:
    found = entry.get(field)
    if type(found) is not int or not 0 < found < 1 << 40:
        raise ValueError(f"{field} is {found!r}, not a number of tokens from 1 on")
    return found
