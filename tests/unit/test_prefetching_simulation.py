"""Early, late and windowed prefetch on the same simulated requests: ratios, and faults planted in the window."""

import json
import random
from functools import cache

import pytest
from typer.testing import CliRunner

from bench.__main__ import app
from scheduler import prefetch
from scheduler.simulation.prefetching import Instance, Outcome, Scene, Windowed, compare, make_weather

SEEDS = (0, 1, 2)
SCENE = Scene(requests=900)


@cache
def outcomes(seed: int) -> dict[str, Outcome]:
    return {outcome.strategy: outcome for outcome in compare(SCENE, random.Random(seed).random)}


def windowed_anew(seed: int) -> Outcome:
    return Instance(SCENE, make_weather(SCENE, random.Random(seed).random), Windowed(SCENE)).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_window_waits_less_than_either_extreme(seed):
    found = outcomes(seed)
    least_s = min(found["early"].stall_s, found["late"].stall_s)
    assert found["windowed"].stall_s < 0.6 * least_s
    quantiles_s = {name: outcome.stall_quantile_s(0.99) for name, outcome in found.items()}
    assert quantiles_s["windowed"] < min(quantiles_s["early"], quantiles_s["late"])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_window_costs_little_memory_and_little_traffic(seed):
    found = outcomes(seed)
    assert found["windowed"].peak_bytes < 1.45 * found["late"].peak_bytes
    assert found["early"].peak_bytes > 1.6 * found["late"].peak_bytes
    assert found["windowed"].wasted_bytes < 0.05 * found["windowed"].pulled_bytes
    assert found["early"].wasted_bytes > 0.3 * found["early"].pulled_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_all_strategies_serve_the_same_requests_and_account_for_every_byte(seed):
    needed = sum(ask.size_bytes for ask in make_weather(SCENE, random.Random(seed).random).asks)
    for outcome in outcomes(seed).values():
        assert len(outcome.stalls_s) == SCENE.requests
        assert outcome.pulled_bytes == needed + outcome.wasted_bytes
        assert outcome.peak_bytes <= SCENE.memory_bytes
    assert not outcomes(seed)["late"].wasted_bytes
    assert windowed_anew(seed).stalls_s == outcomes(seed)["windowed"].stalls_s


def test_a_window_that_never_shrinks_shows_as_bytes_pulled_twice(monkeypatch):
    monkeypatch.setattr(prefetch, "DECREASE", 1.0)
    wasted = sum(windowed_anew(seed).wasted_bytes for seed in SEEDS)
    assert wasted > 2.0 * sum(outcomes(seed)["windowed"].wasted_bytes for seed in SEEDS)


def test_a_window_that_ignores_what_is_used_shows_as_bytes_that_lie(monkeypatch):
    monkeypatch.setattr(prefetch.Rate, "bytes_per_s", 0.0)
    ahead = sum(windowed_anew(seed).ahead_bytes_mean for seed in SEEDS)
    assert ahead > 1.3 * sum(outcomes(seed)["windowed"].ahead_bytes_mean for seed in SEEDS)


def test_a_window_that_never_grows_shows_as_waiting(monkeypatch):
    monkeypatch.setattr(prefetch.Target, "grow", lambda target, size_bytes: None)
    stall_s = sum(windowed_anew(seed).stall_s for seed in SEEDS)
    assert stall_s > 1.2 * sum(outcomes(seed)["windowed"].stall_s for seed in SEEDS)


def test_the_bench_prints_a_line_for_each_strategy_and_draws(tmp_path):
    options = ["prefetch", "--seeds", "1", "--requests", "200", "--json", "--plot", str(tmp_path / "drawn.png")]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["prefetch"] for row in rows] == ["early", "late", "windowed"]
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
