"""Replaying a trace: against caches written as plainly as can be, and against published traces where they are."""

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.replay import NAMES, Prefill, Request, Trace, parse, replay

PUBLISHED = "https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces"
BLOCK = 512


def line(*ids: int, tokens: int | None = None, output: int = 1) -> str:
    length = BLOCK * len(ids) if tokens is None else tokens
    return json.dumps({"timestamp": 0, "input_length": length, "output_length": output, "hash_ids": list(ids)})


def generated(seed: int, count: int = 300) -> Trace:
    """Conversations of several turns that all begin with the same block; about half of them get another turn."""
    chance = random.Random(seed)
    fresh = iter(range(1, 1 << 30))
    open_ones: list[list[int]] = []
    lines = []
    for _ in range(count):
        is_new = not open_ones or chance.random() < 0.5
        ids = [0] if is_new else open_ones.pop(int(len(open_ones) * chance.random() ** 0.5))
        ids = ids + [next(fresh) for _ in range(chance.randrange(1, 6))]
        open_ones.append(ids)
        lines.append(line(*ids, tokens=BLOCK * len(ids) - chance.randrange(BLOCK)))
    return parse(lines)


# Caches as plain as can be: lists, first to go first.


class Plain:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue: list[bytes] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self.queue

    def touch(self, key: bytes) -> None: ...

    def admit(self, key: bytes) -> None:
        if len(self.queue) == self.capacity:
            self.evict()
        self.queue.append(key)

    def evict(self) -> None:
        self.queue.pop(0)


class PlainLru(Plain):
    def touch(self, key: bytes) -> None:
        self.queue.remove(key)
        self.queue.append(key)


class PlainClock(Plain):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.used: set[bytes] = set()

    def touch(self, key: bytes) -> None:
        self.used.add(key)

    def evict(self) -> None:
        while self.queue[0] in self.used:
            self.used.remove(self.queue[0])
            self.queue.append(self.queue.pop(0))
        self.queue.pop(0)


class PlainS3Fifo(Plain):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.main: list[bytes] = []
        self.ghosts: list[bytes] = []
        self.uses: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self.queue or key in self.main

    def touch(self, key: bytes) -> None:
        self.uses[key] = min(3, self.uses[key] + 1)

    def admit(self, key: bytes) -> None:
        if len(self.queue) + len(self.main) == self.capacity:
            self.evict()
        (self.main if key in self.ghosts else self.queue).append(key)
        if key in self.ghosts:
            self.ghosts.remove(key)
        self.uses[key] = 0

    def evict(self) -> None:
        while True:
            if len(self.queue) >= 0.3 * self.capacity or not self.main:
                key = self.queue.pop(0)
                if not self.uses[key]:
                    self.ghosts = [*self.ghosts, key][-(self.capacity - 1) :]
                    return
                self.uses[key] = 0
            else:
                key = self.main.pop(0)
                if not self.uses[key]:
                    return
                self.uses[key] -= 1
            self.main.append(key)


def plain_hits(trace: Trace, cache: Plain) -> int:
    hits = 0
    for request in trace.requests:
        present = [key in cache for key in request.blocks]
        hits += [*present, False].index(False)
        for key, is_here in reversed(list(zip(request.blocks, present, strict=True))):
            if is_here:
                cache.touch(key)
        for key, is_here in zip(request.blocks, present, strict=True):
            if not is_here:
                cache.admit(key)
    return hits


def plain_belady_hits(trace: Trace, capacity: int) -> int:
    held: set[bytes] = set()
    hits = 0

    def rank(number: int, key: bytes) -> tuple[int, int]:
        """When it is used next after this request, and how deep it was: what is highest goes."""
        depth = next(r.blocks.index(key) for r in reversed(trace.requests[: number + 1]) if key in r.blocks)
        later = range(number + 1, len(trace.requests))
        return next((other for other in later if key in trace.requests[other].blocks), len(trace.requests)), depth

    for number, request in enumerate(trace.requests):
        hits += [*(key in held for key in request.blocks), False].index(False)
        waiting = list(request.blocks)
        while waiting:
            key = waiting.pop(0)
            if key not in held and len(held) == capacity:
                ranks = {
                    one: (number, -request.blocks.index(one)) if one in waiting else rank(number, one) for one in held
                }
                worst = max(ranks, key=ranks.__getitem__)
                if ranks[worst][0] <= rank(number, key)[0]:
                    continue
                held.remove(worst)
            held.add(key)
    return hits


PLAIN: dict[str, Callable[[int], Plain]] = {
    "fifo": Plain,
    "lru": PlainLru,
    "clock": PlainClock,
    "s3fifo": PlainS3Fifo,
}


@pytest.mark.parametrize("capacity", [1, 7, 50, 300, 5000])
@pytest.mark.parametrize("policy", PLAIN)
def test_hits_what_a_plain_cache_hits(policy: str, capacity: int) -> None:
    for seed in range(3):
        trace = generated(seed)
        assert replay(trace, policy, capacity).hit_blocks == plain_hits(trace, PLAIN[policy](capacity))


@pytest.mark.parametrize("capacity", [1, 7, 50])
def test_belady_hits_what_a_plain_search_of_the_future_hits(capacity: int) -> None:
    for seed in range(3):
        trace = generated(seed, 80)
        assert replay(trace, "belady", capacity).hit_blocks == plain_belady_hits(trace, capacity)


def test_no_policy_hits_more_than_belady_or_than_a_cache_without_end() -> None:
    trace = generated(4, 2000)
    for capacity in (20, 200, 100_000):
        hits = {policy: replay(trace, policy, capacity).hit_ratio for policy in NAMES}
        assert max(hits.values()) == hits["belady"]
        if capacity == 100_000:
            assert {*hits.values()} == {trace.summary()["infinite_hit_ratio"]}


def test_adaptive_is_nearly_as_good_as_the_best() -> None:
    trace = generated(5, 8000)
    for capacity in (300, 1000, 3000):
        hits = {policy: replay(trace, policy, capacity).hit_ratio for policy in ("lru", "clock", "s3fifo", "adaptive")}
        assert hits["adaptive"] > max(hits.values()) - 0.01, hits


# What is counted


def test_blocks_after_the_first_miss_are_no_hits() -> None:
    trace = parse([line(1, 2, 3), line(9, 2, 3), line(1, 2, 4)])
    assert replay(trace, "lru", 100).hit_blocks == 2, "those of the third request"


def test_blocks_after_the_first_miss_are_touched() -> None:
    trace = parse([line(1, 2, 3), line(9, 2, 3), line(8), line(2, 3)])
    assert replay(trace, "lru", 4).hit_blocks == 2, "1 went for 8, not 2 or 3"


def test_a_request_larger_than_the_cache_is_run_through_it() -> None:
    trace = parse([line(*range(10)), line(*range(10))])
    for policy in NAMES:
        assert 0 <= replay(trace, policy, 3).hit_blocks <= 3


def test_tokens_and_seconds_end_with_the_prompt() -> None:
    trace = parse([line(1, 2, tokens=600), line(1, 2, tokens=600)])
    prefill = Prefill(us_per_token=10.0, ns_per_token_pair=100.0)
    outcome = replay(trace, "lru", 10, prefill)
    assert (outcome.hit_blocks, outcome.hit_tokens) == (2, 600)
    assert outcome.saved_s == pytest.approx(600 * 10e-6 + 600 * 600 / 2 * 100e-9)
    assert outcome.saved_ratio == outcome.token_hit_ratio == outcome.hit_ratio == 0.5


def test_attention_makes_deep_blocks_dearer() -> None:
    prefill = Prefill()
    seconds = [prefill.seconds(blocks * BLOCK) for blocks in range(20)]
    of_block = [later - sooner for sooner, later in pairwise(seconds)]
    assert of_block == sorted(of_block)
    assert list(accumulate(of_block))[-1] == pytest.approx(seconds[-1])


def test_the_summary_counts_blocks_and_tokens() -> None:
    assert parse([line(1, 2, output=4), "", line(1, 3, 4, output=2)]).summary() == {
        "requests": 2,
        "mean_input_tokens": 2.5 * BLOCK,
        "mean_output_tokens": 3,
        "accesses": 5,
        "unique_blocks": 4,
        "used_once_share": 0.75,
        "most_uses_of_a_block": 2,
        "infinite_hit_ratio": 0.2,
    }


def test_equal_ids_are_equal_blocks_and_others_are_not() -> None:
    first, second = parse([line(1, -1, 1 << 70), line(1)]).requests
    assert isinstance(first, Request)
    assert len({*first.blocks, *second.blocks}) == 3


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "a request is a JSON object"),
        ("{}", "hash_ids is a list of integers"),
        ('{"hash_ids": [1.5]}', "hash_ids is a list of integers"),
        ('{"hash_ids": [true]}', "hash_ids is a list of integers"),
        ('{"hash_ids": [7, 7]}', "hash_ids has a block twice"),
        ('{"hash_ids": [7]}', "input_length is a number of tokens"),
        ('{"hash_ids": [7], "input_length": -1}', "input_length is a number of tokens"),
        ('{"hash_ids": [7], "input_length": 1, "output_length": "2"}', "output_length is a number of tokens"),
    ],
)
def test_a_bad_line_is_named(bad: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^line 3: {problem}$"):
        parse([line(1), line(2), bad])


@pytest.mark.parametrize("lines", [[], ["", " "], [line()]])
def test_a_trace_without_blocks_is_none(lines: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="no request with a block"):
        parse(lines)


# Published traces: they are large and not ours, so they are read from a folder that CAIRN_TRACES names.

SMALL_TO_LARGE = (1000, 10_000, 30_000, 50_000, 100_000)
CLOCK_SIZES = (1000, 3000, 5859, 10_000, 20_000, 30_000, 50_000)
RIGHT = [
    ("conversation", "lru", SMALL_TO_LARGE, (0.0445, 0.2116, 0.3257, 0.3546, 0.3637)),
    ("conversation", "fifo", SMALL_TO_LARGE[:4], (0.0434, 0.1813, 0.2933, 0.3335)),
    ("conversation", "clock", CLOCK_SIZES, (0.0447, 0.0674, 0.1384, 0.2144, 0.2921, 0.3290, 0.3542)),
    ("conversation", "s3fifo", CLOCK_SIZES, (0.0565, 0.1015, 0.1600, 0.2112, 0.2850, 0.3114, 0.3448)),
    ("conversation", "belady", SMALL_TO_LARGE[:2], (0.1907, 0.3664)),
    ("synthetic", "lru", SMALL_TO_LARGE, (0.0841, 0.4239, 0.6242, 0.6396, 0.6396)),
    ("synthetic", "fifo", SMALL_TO_LARGE[:4], (0.0819, 0.3970, 0.5941, 0.6396)),
    ("synthetic", "belady", SMALL_TO_LARGE[:2], (0.2767, 0.618)),
]
SUMMARIES = {
    "conversation": ((12_031, 12_035, 343, 288_500, 182_790, 12_031), (0.7585, 0.3664)),
    "synthetic": ((3993, 15_325, 149, 121_877, 43_924, 24), (0.5845, 0.6396)),
}
SHARES = ("used_once_share", "infinite_hit_ratio")
COMPARED = {"conversation": sorted({*SMALL_TO_LARGE, *CLOCK_SIZES}), "synthetic": SMALL_TO_LARGE}


@lru_cache
def published(name: str) -> Trace:
    folder = os.environ.get("CAIRN_TRACES")
    if not folder:
        pytest.skip(f"CAIRN_TRACES names no folder with the traces of {PUBLISHED}")
    return parse(lines_of(Path(folder), f"{name}_trace.jsonl"))


def lines_of(folder: Path, name: str) -> Iterator[str]:
    path = folder / name
    with path.open() if path.exists() else gzip.open(folder / f"{name}.gz", "rt") as file:
        yield from file


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMARIES)
def test_a_published_trace_is_counted_as_published(name: str) -> None:
    counts, shares = SUMMARIES[name]
    found = published(name).summary()
    assert tuple(round(value) for field, value in found.items() if field not in SHARES) == counts
    assert tuple(found[field] for field in SHARES) == pytest.approx(shares, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy", "capacities", "ratios"), RIGHT, ids=[f"{row[0]} {row[1]}" for row in RIGHT])
def test_a_published_trace_has_its_known_hit_ratios(
    name: str, policy: str, capacities: tuple[int, ...], ratios: tuple[float, ...]
) -> None:
    trace = published(name)
    assert [replay(trace, policy, capacity).hit_ratio for capacity in capacities] == pytest.approx(ratios, abs=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMARIES)
def test_adaptive_is_within_half_a_percent_of_the_best_on_a_published_trace(name: str) -> None:
    trace = published(name)
    for capacity in COMPARED[name]:
        best = max(replay(trace, policy, capacity).hit_ratio for policy in ("lru", "clock", "s3fifo"))
        assert replay(trace, "adaptive", capacity).hit_ratio >= best - 0.005, capacity
