"""The simulated hardware: its costs follow the published formulas and figures."""

from dataclasses import replace

import pytest

from scheduler.simulation.hardware import (
    LLAMA3_70B,
    LLAMA3_70B_8XA800,
    NODE_8XA800,
    Efficiency,
    hardware,
)

K = 1024


def test_a_token_has_320_kib_of_kv():
    assert LLAMA3_70B.kv_bytes == LLAMA3_70B_8XA800.kv_bytes == 320 * K


def test_prefill_seconds_are_the_formulas_operations_at_the_share_of_the_peak_that_is_reached():
    efficiency = Efficiency(mfu=0.5, prompt_s=0.2)
    cost = hardware(LLAMA3_70B, NODE_8XA800, efficiency).prefill
    for tokens, cached in ((1, 0), (12_035, 0), (12_035, 4_096), (131_072, 131_071)):
        expected = 0.2 + LLAMA3_70B.flops(tokens, cached) / (8 * 312e12 * 0.5)
        assert cost.seconds(tokens, cached) == pytest.approx(expected)


def test_95_percent_of_a_128k_prompt_cached_saves_92_percent_of_its_prefill():
    cost = LLAMA3_70B_8XA800.prefill  # figure 14
    saved = 1 - cost.seconds(128 * K, int(0.95 * 128 * K)) / cost.seconds(128 * K, 0)
    assert saved == pytest.approx(0.92, abs=0.01)


def test_loading_8k_tokens_pays_from_6_gb_a_second_on():
    tokens = 8192  # §2: the KV's bytes over the time to compute it at the full peak
    seconds = LLAMA3_70B.flops(tokens) / (8 * 312e12)
    assert tokens * LLAMA3_70B.kv_bytes / seconds == pytest.approx(6e9, rel=0.05)


def test_a_decode_step_reads_weights_and_kv_once():
    node = LLAMA3_70B_8XA800
    rate = 8 * 2039e9 * Efficiency().hbm
    assert node.weights_s == pytest.approx(140e9 / rate)
    assert node.decode.per_token_s * rate == pytest.approx(node.kv_bytes)
    assert node.decode.base_s > node.weights_s


def test_most_batches_of_the_published_cluster_stay_below_100_ms_a_token():
    assert LLAMA3_70B_8XA800.decode.seconds(32, 32 * 12_378) < 0.1  # figures 6 and 7


def test_kv_memory_is_what_weights_and_activations_leave_of_the_hbm():
    assert LLAMA3_70B_8XA800.decode_tokens == pytest.approx(1.4e6, rel=0.01)
    assert LLAMA3_70B_8XA800.dram_tokens == 3_000_000


def test_a_pull_runs_at_the_measured_rate_of_the_links():
    cost = LLAMA3_70B_8XA800.tiers  # figure 12: 87 GB/s, 40 GB of KV
    assert cost.network_rate == pytest.approx(87e9)
    assert cost.pull_seconds(128 * K, 0, 0) == pytest.approx(128 * K * 320 * K / 87e9, rel=0.01)


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        hardware(replace(LLAMA3_70B, weights=400_000_000_000), NODE_8XA800)
