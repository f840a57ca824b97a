"""The tables of the Conductor on small made-up traces: they are there, repeat themselves, and show planted bugs."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from bench import conductor
from bench.conductor import Assumptions, Row, Study, run, swings
from scheduler.admission.baseline import Baseline
from scheduler.outlook import Choice, Outlook
from scheduler.policies.prefix_affinity import PrefixAffinity
from scheduler.requests import Reason
from scheduler.simulate import simulate
from scheduler.simulation.cluster import Shape
from scheduler.simulation.hardware import LLAMA3_70B_8XA800
from scheduler.simulation.outcomes import LoadSample, Outcomes
from scheduler.simulation.traces import TraceRequest, made_up
from scheduler.traffic import Traffic
from scheduler.tuning import Slo

SMALL = Shape(prefill=4, decode=2)


def a_trace(count: int = 400, per_s: float = 2.5) -> list[TraceRequest]:
    return made_up(count, Random(7).random, per_s=per_s, mean_tokens=12_000, shared=0.7)


def a_study() -> Study:
    trace = a_trace(60)
    traces = dict.fromkeys(conductor.FILES, trace)
    return Study(traces, Assumptions(shape=SMALL, cache_nodes=3, searched=30), lambda about: None, is_brief=True)


def rows_of(names: set[str]) -> list[Row]:
    return list(run(a_study(), names))


@pytest.mark.parametrize("name", list(conductor.TABLES))
def test_each_table_has_figures_and_repeats_them(name: str) -> None:
    rows = rows_of({name})
    assert rows
    assert {row.table for row in rows} == {name}
    assert rows_of({name}) == rows
    assert any(row.published is not None for row in rows)


def test_a_difference_is_a_share_of_the_published_value() -> None:
    row = Row(table="t", name="n", value=3.0, unit="s", published=2.0)
    assert row.difference == 0.5
    assert replace(row, published=None).difference is None


def test_the_command_reads_a_folder_and_says_json(tmp_path: Path) -> None:
    lines = "".join(
        json.dumps(
            {
                "timestamp": request.arrived_s * 1000,
                "input_length": request.tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.blocks,
            }
        )
        + "\n"
        for request in a_trace(20)
    )
    for file in conductor.FILES.values():
        with gzip.open(tmp_path / file, "wt") if file.endswith(".gz") else (tmp_path / file).open("w") as out:
            out.write(lines)
    app = typer.Typer()
    app.command()(conductor.report)
    asked = ["hits", "--brief", "--trace-dir", str(tmp_path), "--json"]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 0, found.output
    assert {json.loads(line)["table"] for line in found.stdout.splitlines()} == {"hits"}
    assert CliRunner().invoke(app, ["novelty", "--trace-dir", str(tmp_path)]).exit_code == 2
    assert CliRunner().invoke(app, ["hits", "--trace-dir", str(tmp_path / "nowhere")]).exit_code == 2
    people = CliRunner().invoke(app, ["hits", "--brief", "--trace-dir", str(tmp_path)])
    assert "published" in people.stdout


def test_pools_that_take_turns_are_not_together() -> None:
    loads = [LoadSample(float(at), 1.0 + (at % 2), 2.0 - (at % 2)) for at in range(200)]
    assert swings(loads)[0] == pytest.approx(-1.0)
    assert swings([]) == (0.0, 0.0)


def replayed(
    requests: list[TraceRequest], *, shape: Shape = SMALL, policy: str = "kvcache_centric", admission: str = "none"
) -> Outcomes:
    return simulate(requests, shape, Random(1).random, policy=policy, admission=admission, slo=Slo(10.0, 0.1))


def test_policies_that_know_more_are_faster() -> None:
    requests = a_trace()
    means = [
        replayed(requests, policy=policy).mean_ttft_s
        for policy in ("random", "least_loaded", "prefix_affinity", "kvcache_centric")
    ]
    assert means == sorted(means, reverse=True)


def test_an_affinity_that_forgets_the_queue_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [replace(request, blocks=(1 << 40, *request.blocks[1:])) for request in a_trace()]  # one system prompt
    right = replayed(requests, policy="prefix_affinity").mean_ttft_s

    def longest(self: PrefixAffinity, outlook: Outlook) -> Choice:
        return outlook.local(int(np.argmax(outlook.local_tokens)))

    monkeypatch.setattr(PrefixAffinity, "choose", longest)
    assert replayed(requests, policy="prefix_affinity").mean_ttft_s > 2 * right


def shared_prompts(count: int) -> list[TraceRequest]:
    """A burst of requests that all go on from one long prompt."""
    document = tuple(range(100))
    first = TraceRequest(0.0, 100 * 512, 1, document)
    return [first] + [TraceRequest(30.0 + 0.01 * at, 101 * 512, 1, (*document, 1000 + at)) for at in range(count)]


def test_a_transfer_estimate_without_congestion_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = replace(LLAMA3_70B_8XA800.tiers, network_rate=LLAMA3_70B_8XA800.tiers.network_rate / 8)
    shape = Shape(prefill=8, decode=1, hardware=replace(LLAMA3_70B_8XA800, tiers=tiers))
    requests = shared_prompts(60)
    right = replayed(requests, shape=shape).mean_ttft_s

    def nothing(self: Traffic, node: str, now: float) -> float:
        return 0.0

    monkeypatch.setattr(Traffic, "ahead", nothing)
    assert replayed(requests, shape=shape).mean_ttft_s > right


def test_an_admission_that_never_refuses_lets_the_queue_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = a_trace(per_s=12.0)
    right = replayed(requests, admission="baseline")
    assert right.refusals > 0

    def admits(self: Baseline, *given: object) -> Reason | None:
        return None

    monkeypatch.setattr(Baseline, "on_arrival", admits)
    monkeypatch.setattr(Baseline, "on_decode", admits)
    wrong = replayed(requests, admission="baseline")
    assert wrong.refusals == 0
    assert wrong.ttft_percentile_s(90) > 2 * right.ttft_percentile_s(90)
    assert wrong.effective(Slo(10.0, 0.1)) < right.effective(Slo(10.0, 0.1))


def test_pulls_move_prefixes_to_idle_instances() -> None:
    requests = shared_prompts(20)
    moved, local = replayed(requests), replayed(requests, policy="prefix_affinity")
    assert moved.token_hit_ratio >= local.token_hit_ratio
    assert moved.mean_ttft_s < local.mean_ttft_s
