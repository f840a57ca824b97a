"""What a cache of some capacity would have hit of a trace of requests, by policy: the store's own, FIFO and Belady's.

One cache for all requests. A hit is a block before the first miss of its request. Then the blocks that are there are
touched, the last of the request first, and those that are not are admitted, the first of it first.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.eviction import EVICTION, Candidate
from kvstore.eviction.order import UseOrder
from kvstore.eviction.shadow import ShadowCache
from kvstore.types import KEY_BYTES

BELADY = "belady"
NEVER = 1 << 62  # the request in which a block is used next, if there is none
SLACK = 64  # outdated entries that may wait in the heap beside twice the valid ones


class Fifo(UseOrder):
    """First in, first out. For comparison: no node evicts by it."""

    def touch(self, replica: Candidate) -> None:
        assert replica in self

    def peek(self) -> Candidate | None:
        return self.first()


POLICIES = {**EVICTION, "fifo": Fifo}
NAMES = (*POLICIES, BELADY)


@dataclass(frozen=True, slots=True)
class Prefill:
    """What computing KV costs, after Llama 3.1 8B on an H100 at 40 % of its peak; docs/traces.md derives it."""

    us_per_token: float = 40.6  # weights: the same for every token
    ns_per_token_pair: float = 1.33  # attention: for every token before it

    def seconds(self, tokens: int) -> float:
        """Of a prompt's first `tokens` tokens."""
        return tokens * self.us_per_token * 1e-6 + tokens * tokens / 2 * self.ns_per_token_pair * 1e-9


@dataclass(frozen=True, slots=True)
class Request:
    input_tokens: int
    output_tokens: int
    blocks: tuple[bytes, ...]  # keys, from the prompt's first block


@dataclass(frozen=True, slots=True)
class Trace:
    requests: Sequence[Request]
    block_tokens: int

    @property
    def accesses(self) -> int:
        """Blocks of all requests."""
        return sum(len(request.blocks) for request in self.requests)

    def seconds(self, prefill: Prefill) -> float:
        """To compute all of it."""
        return sum(prefill.seconds(request.input_tokens) for request in self.requests)

    def summary(self) -> dict[str, float]:
        """Counts and means. `infinite_hit_ratio` is what a cache that never evicts would hit, of all blocks."""
        uses = Counter(key for request in self.requests for key in request.blocks)
        count, accesses = len(self.requests), self.accesses
        once = sum(1 for used in uses.values() if used == 1)
        return {
            "requests": count,
            "mean_input_tokens": sum(request.input_tokens for request in self.requests) / count,
            "mean_output_tokens": sum(request.output_tokens for request in self.requests) / count,
            "accesses": accesses,
            "unique_blocks": len(uses),
            "used_once_share": once / len(uses),
            "most_uses_of_a_block": max(uses.values()),
            "infinite_hit_ratio": (accesses - len(uses)) / accesses,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy hit at one capacity. Ratios are of all blocks, tokens and seconds of the trace."""

    policy: str
    capacity_blocks: int
    hit_blocks: int
    hit_tokens: int
    saved_s: float
    hit_ratio: float
    token_hit_ratio: float
    saved_ratio: float


def parse(lines: Iterable[str], block_tokens: int = 512) -> Trace:
    """A trace from JSON lines with `input_length`, `output_length` (tokens) and `hash_ids`, one for each block.

    Raises InvalidRequest, which names the line.
    """
    keys: dict[int, bytes] = {}
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line), keys))
        except (ValueError, RecursionError) as error:
            what = "no JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
            raise InvalidRequest(f"line {number}: {what}") from error
    if not keys:
        raise InvalidRequest("no request with a block")
    return Trace(requests, block_tokens)


def replay(trace: Trace, policy: str, capacity_blocks: int, prefill: Prefill = Prefill()) -> Outcome:
    """Run the trace through an empty cache. `policy` is one of NAMES."""
    assert capacity_blocks > 0
    if policy == BELADY:
        hits = _belady_hits(trace, capacity_blocks)
    else:
        hits = _hits(trace, ShadowCache(POLICIES[policy](), capacity_blocks))
    tokens = [
        min(hit * trace.block_tokens, request.input_tokens) for hit, request in zip(hits, trace.requests, strict=True)
    ]
    saved_s = sum(map(prefill.seconds, tokens))
    return Outcome(
        policy,
        capacity_blocks,
        hit_blocks=sum(hits),
        hit_tokens=sum(tokens),
        saved_s=saved_s,
        hit_ratio=sum(hits) / trace.accesses,
        token_hit_ratio=sum(tokens) / max(1, sum(request.input_tokens for request in trace.requests)),
        saved_ratio=saved_s / (trace.seconds(prefill) or 1.0),
    )


def _request(row: Any, keys: dict[int, bytes]) -> Request:
    if not isinstance(row, dict):
        raise ValueError("a request is a JSON object")
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or any(type(one) is not int for one in ids):
        raise ValueError("hash_ids is a list of integers")
    if len(set(ids)) != len(ids):
        raise ValueError("hash_ids has a block twice")
    for one in ids:
        if one not in keys:
            keys[one] = blake2b(b"%d" % one, digest_size=KEY_BYTES).digest()
    return Request(_tokens(row, "input_length"), _tokens(row, "output_length"), tuple(keys[one] for one in ids))


def _tokens(row: dict[str, Any], name: str) -> int:
    found = row.get(name)
    if type(found) is not int or not 0 <= found < NEVER:
        raise ValueError(f"{name} is a number of tokens")
    return found


def _hits(trace: Trace, cache: ShadowCache) -> list[int]:
    """Blocks hit, by request."""
    found = []
    blocks = cache.blocks
    for request in trace.requests:
        keys = request.blocks
        present = [blocks.get(key) for key in keys]
        found.append(present.index(None) if None in present else len(present))
        for block in reversed(present):
            if block is not None:
                cache.touch(block)
        for depth, block in enumerate(present):
            if block is None:
                cache.admit(keys[depth], 1, depth)
    return found


def _belady_hits(trace: Trace, capacity: int) -> list[int]:
    """Blocks hit, by request, if what is used again latest, or never, always goes first or is not even let in."""
    next_uses = _next_uses(trace)
    held: dict[bytes, tuple[int, int]] = {}  # to (-next use, -depth): of one request, the deepest goes first
    order: list[tuple[int, int, bytes]] = []  # the same and the key, some outdated
    found = []
    for number, request in enumerate(trace.requests):
        keys, uses = request.blocks, next_uses[number]
        found.append(next((depth for depth, key in enumerate(keys) if key not in held), len(keys)))
        for depth, (key, use) in enumerate(zip(keys, uses, strict=True)):
            if key not in held and len(held) >= capacity:
                while held.get(order[0][2]) != order[0][:2]:
                    heappop(order)
                if -order[0][0] <= use:
                    continue
                del held[heappop(order)[2]]
            held[key] = (-use, -depth)
            heappush(order, (-use, -depth, key))
        if len(order) > 2 * len(held) + SLACK:
            order = [(*when, key) for key, when in held.items()]
            heapify(order)
    return found


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each block of each request, the next request with that block, or NEVER."""
    upcoming: dict[bytes, int] = {}
    found: list[list[int]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        keys = trace.requests[number].blocks
        found.append([upcoming.get(key, NEVER) for key in keys])
        upcoming.update(dict.fromkeys(keys, number))
    found.reverse()
    return found
