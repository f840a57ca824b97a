"""Coupled engines: who stalls whom, what is cached, and how requests are spread; and traces and capacities."""

import json
from dataclasses import replace
from random import Random

import pytest

from scheduler.costs import DecodeCost, PrefillCost, TierCost
from scheduler.simulation.capacity import PRECISION, capacities, coupled_systems, gain
from scheduler.simulation.coupled import (
    TOO_LONG,
    VLLM,
    VLLM_CHUNKED,
    VLLM_PREFIX,
    CoupledSettings,
    cache_aware,
    replay_coupled,
    round_robin,
)
from scheduler.simulation.hardware import LLAMA3_70B_8XA800, Hardware
from scheduler.simulation.outcomes import Outcomes, Record
from scheduler.simulation.traces import TraceRequest, cut, faster, made_up, read_trace

STEP_S = 0.01
PLAIN = Hardware(  # a millisecond a prompt's token, 10 ms a step whatever is in it
    name="plain",
    prefill=PrefillCost(0.0, 0.001, 0.0, 0.0),
    decode=DecodeCost(STEP_S, 0.0, 0.0),
    tiers=TierCost(1, 1.0, 1.0, 1.0),
    kv_bytes=1,
    dram_tokens=0,
    decode_tokens=100_000,
)
WHOLE = CoupledSettings(piece_cost=1.0)
PIECES = CoupledSettings(is_chunked=True, step_tokens=101, piece_cost=1.0)


def asks(at_s: float, tokens: int, output_tokens: int, first: int = 0) -> TraceRequest:
    """With blocks that are named from `first` on."""
    return TraceRequest(at_s, tokens, output_tokens, tuple(range(first, first - (-tokens // 512))))


def replay(requests, settings=WHOLE, instances=1, hardware=PLAIN, **options) -> list[Record]:
    return list(replay_coupled(requests, hardware, settings, instances=instances, **options).records)


def test_a_lone_request_takes_its_prefill_and_a_step_for_each_further_token():
    (record,) = replay([asks(0, 1000, 11)])
    assert record.ttft_s == record.prefill_s == pytest.approx(1.0)
    assert record.finished_s == pytest.approx(1.0 + 10 * STEP_S)
    assert record.tbt_s == pytest.approx(STEP_S)
    assert record.queue_s == 0


def test_an_answer_of_one_token_ends_with_its_prefill():
    (record,) = replay([asks(0, 1000, 1)])
    assert (record.finished_s, record.tbt_s) == (pytest.approx(1.0), 0.0)


def test_a_prompt_that_comes_stops_those_that_decode_until_it_is_done():
    first, second = replay([asks(0, 1000, 101), asks(1.205, 2000, 2, first=100)])
    # the step that runs when it comes is ended first
    assert second.queue_s == pytest.approx(0.005)
    assert second.ttft_s == pytest.approx(2.005)
    assert first.tbt_s == pytest.approx((2.0 + 10 * STEP_S) / 10)  # one of its 100 intervals was 2 s longer
    assert first.finished_s == pytest.approx(1.0 + 100 * STEP_S + 2.0)


def test_prompts_that_wait_are_computed_in_one_step():
    requests = [asks(0, 1000, 2), asks(0.1, 1000, 2, first=10), asks(0.2, 1000, 2, first=20)]
    first, second, third = replay(requests)
    assert first.ttft_s == pytest.approx(1.0)
    assert second.arrived_s + second.ttft_s == third.arrived_s + third.ttft_s == pytest.approx(3.0)


def test_a_step_of_prompts_ends_where_its_budget_does():
    settings = replace(WHOLE, prompt_tokens=1500)
    requests = [asks(0, 1000, 1), asks(0.1, 1000, 1, first=10), asks(0.2, 1000, 1, first=20)]
    assert [record.finished_s for record in replay(requests, settings)] == pytest.approx([1.0, 2.0, 3.0])


def test_a_stop_right_after_the_first_token_counts_as_an_interval():
    settings = replace(WHOLE, prompt_tokens=1500)
    first, _ = replay([asks(0, 1000, 11), asks(0.5, 1000, 2, first=10)], settings)
    assert first.tbt_s == pytest.approx(1.0 + STEP_S)


def test_in_pieces_a_prompt_delays_tokens_by_a_piece_and_not_by_all_of_it():
    first, second = replay([asks(0, 1000, 201), asks(2.005, 2020, 2, first=100)], PIECES)
    # 20 steps of 100 tokens of it and one of the other, 110 ms each, and one of the last 20
    assert second.ttft_s == pytest.approx(20 * (STEP_S + 0.1) + STEP_S + 0.02, abs=STEP_S)
    assert first.tbt_s == pytest.approx(0.11)


def test_the_reading_of_weights_is_hidden_by_a_piece_that_is_computed():
    reads = replace(PLAIN, weights_s=0.004)
    (record,) = replay([asks(0, 101, 1)], PIECES, hardware=reads)
    assert record.ttft_s == pytest.approx(STEP_S - 0.004 + 0.101)


def test_pieces_cost_more_than_the_whole_by_what_is_set():
    (record,) = replay([asks(0, 202, 1)], replace(PIECES, piece_cost=1.5))
    assert record.prefill_s == pytest.approx(0.202 * 1.5)
    assert record.ttft_s == pytest.approx(0.202 * 1.5 + 2 * STEP_S)


def test_one_step_has_pieces_of_several_short_prompts():
    first, second = replay([asks(0, 40, 1), asks(0, 60, 1, first=10)], replace(PIECES, step_tokens=200))
    assert first.ttft_s == pytest.approx(STEP_S + 0.04)  # it was there alone when the step began
    assert second.ttft_s == pytest.approx(2 * STEP_S + 0.1)


def test_a_prefix_that_was_computed_here_is_not_computed_again():
    requests = [asks(0, 1024, 2), asks(10, 1536, 2), asks(20, 1024, 2)]
    cold, warm, same = replay(requests, replace(WHOLE, is_caching=True))
    assert (cold.cached_tokens, warm.cached_tokens, same.cached_tokens) == (0, 1024, 1023)
    assert (warm.cached_blocks, same.cached_blocks) == (2, 2)
    assert warm.prefill_s == pytest.approx(0.512)
    assert all(record.cached_tokens == 0 for record in replay(requests))


def test_a_prefix_is_gone_when_the_kv_memory_had_other_use():
    small = replace(PLAIN, decode_tokens=4096)
    requests = [asks(0, 2048, 2), asks(10, 3584, 2, first=50), asks(30, 2048, 2)]
    *_, again = replay(requests, replace(WHOLE, is_caching=True), hardware=small)
    assert again.cached_tokens < 1024


def test_a_request_waits_until_its_kv_fits():
    small = replace(PLAIN, decode_tokens=1500)
    first, second = replay([asks(0, 1000, 101), asks(0.5, 1000, 2, first=10)], hardware=small)
    assert second.queue_s == pytest.approx(first.finished_s - 0.5)


def test_a_request_that_never_fits_is_refused():
    first, second = replay([asks(0, 2000, 1), asks(0, 500, 1, first=9)], hardware=replace(PLAIN, decode_tokens=1000))
    assert (first.reason, second.reason) == (TOO_LONG, "")


def test_no_more_sequences_than_the_batch_takes():
    requests = [asks(0, 100, 11, first=10 * number) for number in range(3)]
    records = replay(requests, replace(WHOLE, most_sequences=1))
    assert [record.queue_s for record in records] == pytest.approx([0, 0.2, 0.4])


def test_the_least_loaded_engine_is_the_one_with_the_fewest_tokens_to_prefill():
    requests = [asks(0, 5000, 2), asks(0.1, 100, 2, first=20), asks(0.15, 100, 2, first=30), asks(0.6, 9, 2, first=40)]
    assert [record.prefill for record in replay(requests, instances=2)] == [
        "coupled-0",
        *["coupled-1"] * 3,
    ]


def test_round_robin_takes_turns():
    requests = [asks(number, 100, 2, first=number) for number in range(4)]
    names = [record.prefill for record in replay(requests, instances=2, spread=round_robin)]
    assert names == ["coupled-0", "coupled-1"] * 2


def test_cache_aware_spreading_goes_where_the_prefix_is_unless_the_queue_is_longer():
    caching = replace(WHOLE, is_caching=True)
    before, asked = [asks(0, 2048, 2), asks(5, 100, 2, first=50)], asks(10, 2048, 2)
    first, *_, last = replay([*before, asked], caching, instances=2, spread=cache_aware)
    assert last.prefill == first.prefill
    first, _, busy, last = replay([*before, asks(9.9, 6000, 2), asked], caching, instances=2, spread=cache_aware)
    assert first.prefill == busy.prefill != last.prefill


@pytest.mark.parametrize("settings", [VLLM, VLLM_PREFIX, VLLM_CHUNKED])
def test_every_request_of_a_busy_trace_ends_with_all_its_tokens(settings):
    requests = made_up(300, Random(3).random, per_s=8)
    outcomes = replay_coupled(requests, LLAMA3_70B_8XA800, settings, instances=4)
    assert len(outcomes.served) == 300
    for request, record in zip(requests, outcomes.records, strict=True):
        steps_s = (request.output_tokens - 1) * LLAMA3_70B_8XA800.decode.base_s
        assert record.finished_s - record.arrived_s >= record.ttft_s + steps_s * 0.5
        assert record.ttft_s >= record.queue_s >= 0
    assert replay_coupled(requests, LLAMA3_70B_8XA800, settings, instances=4).records == outcomes.records


def test_chunks_keep_more_requests_within_200_ms_than_whole_prompts():
    requests = made_up(400, Random(5).random, per_s=2)
    found = capacities(requests, coupled_systems(LLAMA3_70B_8XA800, 8))
    share = {row.system: row.share for row in found if row.slo.tbt_s == 0.2}
    assert share["vllm"] < share["vllm-prefix"]
    assert share["vllm"] < share["vllm-chunked"]


def test_the_highest_speed_is_where_a_tenth_of_the_requests_falls_out():
    requests = [asks(number / 10, 100, 2) for number in range(101)]

    def system(asked):
        tbt_s = 0.2 if asked[-1].arrived_s < 5 else 0.05  # too slow from twice the speed on
        return Outcomes(
            [Record(id="", arrived_s=0, tokens=1, output_tokens=1, ttft_s=1, tbt_s=tbt_s, finished_s=1) for _ in asked]
        )

    strict, middle, loose = capacities(requests, {"it": system}, sought=requests)
    assert 2 / PRECISION <= strict.highest_speed <= 2
    assert strict.per_s == pytest.approx(10.1 * strict.highest_speed)
    assert strict.effective == 101
    assert min(middle.highest_speed, loose.highest_speed) > 15


def test_gain_is_how_much_more():
    assert gain(150, 100) == pytest.approx(0.5)
    assert gain(1, 0) == float("inf")


def line(**fields) -> str:
    whole = {"timestamp": 3000, "input_length": 513, "output_length": 2, "hash_ids": [4, 5]}
    return json.dumps(whole | fields)


def test_a_trace_begins_at_zero_and_is_in_order_of_arrival():
    found = read_trace([line(timestamp=9000), "\n", line(hash_ids=[7, 8])])
    assert found == [TraceRequest(0.0, 513, 2, (7, 8)), TraceRequest(6.0, 513, 2, (4, 5))]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ("[" * 100_000, "no JSON"),
        (line(timestamp=-1), "timestamp"),
        (line(timestamp=True), "timestamp"),
        (line(timestamp=float("nan")), "timestamp"),
        (line(input_length=0), "input_length"),
        (line(output_length=1.5), "output_length"),
        (line(output_length=None), "output_length"),
        (line(hash_ids=[4]), "1 hash_ids for 513 tokens"),
        (line(hash_ids=[4, -1]), "hash_ids is no list"),
        (line(hash_ids="ab"), "hash_ids is no list"),
    ],
)
def test_a_bad_line_is_named(bad, said):
    with pytest.raises(ValueError, match=f"^line 2: .*{said}"):
        read_trace([line(), bad])


def test_a_trace_without_a_request_is_refused():
    with pytest.raises(ValueError, match="no request"):
        read_trace(["\n"])


def test_a_trace_can_be_sped_up_and_cut():
    requests = made_up(5, Random(1).random)
    assert [r.arrived_s for r in faster(requests, 2)] == [r.arrived_s / 2 for r in requests]
    assert [r.tokens for r in cut(requests, 2, 4)] == [r.tokens for r in requests[2:4]]
    assert cut(requests, 2, 4)[0].arrived_s == 0
    with pytest.raises(ValueError, match="0 times"):
        faster(requests, 0)


def test_a_made_up_trace_has_a_block_for_each_512_tokens_and_shared_prefixes():
    requests = made_up(200, Random(2).random)
    assert all(len(request.blocks) == -(-request.tokens // 512) for request in requests)
    assert len({name for request in requests for name in request.blocks}) < sum(len(r.blocks) for r in requests)
    assert made_up(200, Random(2).random) == requests
