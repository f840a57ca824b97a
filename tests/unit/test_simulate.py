"""The simulated cluster: its clock, caches, links and engines, and whole replays under the real Conductor."""

from collections import OrderedDict
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.costs import DecodeCost, PrefillCost
from scheduler.requests import Chain, Request, Route
from scheduler.simulate import simulate
from scheduler.simulation.caches import BlockCache
from scheduler.simulation.cluster import Shape
from scheduler.simulation.decode import DecodeEngine
from scheduler.simulation.loop import Loop
from scheduler.simulation.network import Network
from scheduler.simulation.outcomes import Outcomes
from scheduler.simulation.prefill import Job, Pipeline, PrefillEngine
from scheduler.simulation.traces import TraceRequest, made_up
from scheduler.tuning import Slo


def a_job(number: int = 0, tokens: int = 1024, output_tokens: int = 100, cached_tokens: int = 0) -> Job:
    request = Request(
        id=str(number), tokens=tokens, chains=(Chain(np.zeros(0, np.uint64), 512),), arrived_s=0.0,
        output_tokens=output_tokens,
    )  # fmt: skip
    route = Route(
        request=str(number), prefill="p", decode="d", cached_tokens=cached_tokens, pull=None, queue_s=0.0,
        transfer_s=0.0, prefill_s=0.0, ttft_s=0.0, tbt_s=0.0,
    )  # fmt: skip
    return Job(request, [], 512, route, 0.0)


def test_events_of_one_moment_happen_in_the_order_in_which_they_were_asked_for() -> None:
    loop = Loop()
    seen: list[tuple[float, str]] = []

    def note(name: str) -> None:
        seen.append((loop.now, name))
        if name == "a":
            loop.after(0.0, partial(note, "late"))

    loop.at(2.0, partial(note, "c"))
    loop.at(1.0, partial(note, "a"))
    loop.at(1.0, partial(note, "b"))
    loop.at(1.5, partial(note, "never")).cancel()
    loop.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "late"), (2.0, "c")]


@given(st.integers(1, 12), st.lists(st.lists(st.integers(0, 20), unique=True, min_size=1), max_size=60))
def test_a_cache_holds_what_a_list_in_order_of_use_would_hold(capacity: int, chains: list[list[int]]) -> None:
    cache, right = BlockCache(capacity), OrderedDict[int, None]()
    for chain in chains:
        hits = next((index for index, name in enumerate(chain) if name not in right), len(chain))
        assert cache.prefix(chain) == hits
        before = set(right)
        for name in chain[:capacity][::-1]:
            right.pop(name, None)
            right[name] = None
        while len(right) > capacity:
            right.popitem(last=False)
        change = cache.use(chain)
        assert (before | set(change.stored)) - set(change.removed) == set(right)
        assert len(cache) == len(right)
        assert all(name in cache for name in right)


def test_a_chain_longer_than_the_cache_leaves_its_front_there() -> None:
    cache = BlockCache(3)
    assert cache.use([1, 2, 3, 4, 5]).stored == [1, 2, 3]
    assert cache.prefix([1, 2, 3, 4, 5]) == 3


def arrivals(flows: list[tuple[float, str, str, float, float]], rate: float = 10.0) -> list[float]:
    """When each of (begin, source, target, bytes, limit) has arrived."""
    loop = Loop()
    network = Network(loop, rate, 0.0)
    ended = [0.0] * len(flows)

    def begin(index: int) -> None:
        _, source, target, nbytes, limit = flows[index]

        def done() -> None:
            ended[index] = loop.now

        network.send(source, target, nbytes, done, limit=limit)

    for index, flow in enumerate(flows):
        loop.at(flow[0], partial(begin, index))
    loop.run()
    return ended


FREE = float("inf")


@pytest.mark.parametrize(
    ("flows", "expected"),
    [
        ([(0, "a", "b", 100, FREE)], [10]),
        ([(0, "a", "b", 100, FREE), (0, "a", "c", 100, FREE)], [20, 20]),  # the source is shared
        ([(0, "a", "c", 100, FREE), (0, "b", "c", 50, FREE)], [15, 10]),  # the target is, and is freed
        ([(0, "a", "b", 100, FREE), (0, "c", "d", 100, FREE)], [10, 10]),  # nothing is
        ([(0, "a", "b", 100, FREE), (5, "a", "c", 100, FREE)], [15, 20]),  # the later one slows the earlier
        ([(0, "a", "b", 20, 2), (0, "a", "c", 80, FREE)], [10, 10]),  # who makes less leaves the rest
        ([(0, "a", "b", 100, FREE), (0, "b", "a", 100, FREE)], [10, 10]),  # both directions at once
    ],
)
def test_flows_share_their_links(flows: list[tuple[float, str, str, float, float]], expected: list[float]) -> None:
    assert arrivals(flows) == pytest.approx(expected)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.sampled_from("abc"), st.sampled_from("xyz"), st.floats(1, 50)), max_size=12)
)
def test_no_link_carries_more_than_it_can(flows: list[tuple[float, str, str, float]]) -> None:
    ended = arrivals([(*flow, FREE) for flow in flows])
    for end in range(1, 3):
        for name in {flow[end] for flow in flows}:
            mine = [(flow[0], flow[3], at) for flow, at in zip(flows, ended, strict=True) if flow[end] == name]
            first = min(begin for begin, _, _ in mine)
            assert max(at for _, _, at in mine) >= first + sum(nbytes for _, nbytes, _ in mine) / 10 - 5 - 1e-6
    for (begin, _, _, nbytes), at in zip(flows, ended, strict=True):
        assert at >= begin + nbytes / 10 - 1e-6


def test_a_cancelled_flow_leaves_its_share_to_the_others() -> None:
    loop = Loop()
    network = Network(loop, 10.0, 0.0)
    ended: list[float] = []
    network.send("a", "b", 100, lambda: ended.append(loop.now))
    other = network.send("a", "c", 100, lambda: ended.append(-1.0))
    loop.at(5.0, lambda: network.cancel(other))
    loop.at(6.0, lambda: network.cancel(other))
    loop.run()
    assert ended == [pytest.approx(12.5)]
    assert network.queued_bytes("a") == 0


def test_a_flow_is_cancelled_while_its_last_bytes_are_on_the_way() -> None:
    loop = Loop()
    network = Network(loop, 10.0, 1.0)
    ended: list[float] = []
    flow = network.send("a", "b", 100, lambda: ended.append(loop.now))
    network.send("a", "c", 100, lambda: ended.append(loop.now))
    loop.at(20.5, lambda: network.cancel(flow))
    loop.run()
    assert ended == [21.0]


def step_by_step(jobs: list[tuple[float, int, int]], cost: DecodeCost, capacity: int) -> dict[int, tuple[float, float]]:
    """When each of (ready, tokens, output) ends and its longest interval: one step after the other."""
    now, waiting, running = 0.0, list(enumerate(jobs)), dict[int, list[float]]()
    ended: dict[int, tuple[float, float]] = {}
    while waiting or running:
        while waiting and waiting[0][1][0] <= now:
            held = sum(jobs[index][1] + jobs[index][2] for index in running)
            index, (ready, tokens, output) = waiting[0]
            if running and held + tokens + output > capacity:
                break
            waiting.pop(0)
            running[index] = [ready]
        if not running:
            now = waiting[0][1][0]
            continue
        now += cost.seconds(len(running), sum(jobs[index][1] + len(times) for index, times in running.items()))
        for index in list(running):
            running[index].append(now)
            if len(running[index]) == jobs[index][2]:
                ended[index] = now, float(np.diff(running.pop(index)).max())
    return ended


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 500), st.integers(2, 40)),
        min_size=1,
        max_size=20,
        unique_by=lambda job: job[0],
    ),
    st.integers(500, 2000),
)
def test_decoding_in_plans_is_decoding_step_by_step(jobs: list[tuple[float, int, int]], capacity: int) -> None:
    jobs.sort()
    cost = DecodeCost(0.02, 0.001, 1e-5)
    loop = Loop()
    found: dict[int, tuple[float, float]] = {}

    def end(job: Job) -> None:
        found[int(job.request.id)] = loop.now, float(engine.intervals(job).max())

    engine = DecodeEngine(loop, cost, capacity, 1000, end)

    def begin(index: int) -> None:
        job = a_job(index, jobs[index][1], jobs[index][2])
        job.prefilled_s = loop.now
        engine.submit(job)

    for index, (ready, _, _) in enumerate(jobs):
        loop.at(ready, partial(begin, index))
    loop.run()
    assert engine.batch == engine.context == 0
    right = step_by_step(jobs, cost, capacity)
    for index in range(len(jobs)):
        assert found[index] == pytest.approx(right[index])


def test_a_prefill_waits_for_the_one_before_it_and_for_its_prefix() -> None:
    loop = Loop()
    ended: list[tuple[str, float]] = []
    engine = PrefillEngine(
        loop, PrefillCost(1.0, 0.0, 0.0, 0.0), Pipeline(), lambda job: 0, lambda job: None,
        lambda job: ended.append((job.request.id, loop.now)),
    )  # fmt: skip
    first, second, third = a_job(1), a_job(2), a_job(3)
    for job in (first, second, third):
        engine.submit(job)
    engine.ready(second)
    engine.ready(first)
    loop.at(5.0, lambda: engine.ready(third))
    loop.run()
    assert ended == [("1", 1.0), ("2", 2.0), ("3", 6.0)]


@pytest.mark.parametrize(("tokens", "seconds"), [(1024, 8.0), (2048, 5.0), (8 * 1024, 2.75), (128 * 1024, 2.0469)])
def test_a_pipeline_of_four_nodes_shortens_long_prompts_only(tokens: int, seconds: float) -> None:
    assert Pipeline(4).latency_s(8.0, tokens) == pytest.approx(seconds, abs=1e-4)
    assert Pipeline(4).occupancy_s(8.0) == 2.0
    assert Pipeline().latency_s(8.0, tokens) == 8.0


def replayed(shape: Shape, *, admission: str = "none", slo: Slo | None = None, count: int = 120) -> Outcomes:
    requests = made_up(count, Random(3).random, per_s=4.0, shared=0.7)
    return simulate(requests, shape, Random(1).random, admission=admission, slo=slo)


def test_a_replay_of_one_seed_repeats_itself_and_ends_every_request() -> None:
    shape = Shape(prefill=3, decode=2)
    found = replayed(shape)
    assert found == replayed(shape)
    assert len(found.records) == 120
    for record in found.records:
        assert record.arrived_s + record.ttft_s <= record.finished_s < float("inf")
        assert record.ttft_s == pytest.approx(record.queue_s + record.prefill_s)
        assert record.cached_tokens < record.tokens
        assert record.transfer_s <= record.queue_s + 1e-9


def test_a_request_that_decode_refuses_has_wasted_its_prefill() -> None:
    found = replayed(Shape(prefill=3, decode=1), admission="baseline", slo=Slo(1000.0, 0.001))
    refused = [record for record in found.records if record.reason]
    assert 100 < len(refused) < 120  # who decodes alone is refused by nobody
    for record in refused:
        assert record.reason == "tbt"
        assert record.wasted_prefill_s == record.prefill_s > 0
        assert record.ttft_s == record.finished_s == float("inf")


def test_late_events_of_the_stores_cost_hits() -> None:
    at_once = replayed(Shape(prefill=3, decode=2))
    late = replayed(Shape(prefill=3, decode=2, event_lag_s=60.0))
    assert late.token_hit_ratio < at_once.token_hit_ratio


def test_a_pipeline_of_nodes_brings_long_prompts_forward() -> None:
    prompt = [TraceRequest(0.0, 128 * 1024, 1, tuple(range(256)))]
    alone = simulate(prompt, Shape(prefill=1, decode=1), Random(1).random).mean_ttft_s
    four = simulate(prompt, Shape(prefill=1, decode=1, pipeline_nodes=4), Random(1).random).mean_ttft_s
    assert four == pytest.approx(alone / 4 * (1 + 3 / 128))


def test_a_policy_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match="clever is none of random, "):
        simulate([], Shape(), Random(1).random, policy="clever")
