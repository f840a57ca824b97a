"""`cairn simulate`: what it prints, draws and refuses."""

import gzip
import json
import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from scheduler.simulation.outcomes import Outcomes
from scheduler.simulation.traces import TraceRequest, made_up
from scheduler.tuning import Slo
from server.commands.reach import LocalCommand
from server.commands.simulate import _document as described
from server.commands.simulate import simulate

app = typer.Typer()
app.command("simulate", cls=LocalCommand)(simulate)
SMALL = ("--prefill", "2", "--decode", "2")


def run(*words: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"}, catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def refused(*words: object) -> str:
    """What it says of these words on stderr. It ends with 2."""
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    return err


def document(*words: object) -> Any:
    code, out, err = run(*words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def names(found: Any) -> list[str]:
    return [outcome["name"] for outcome in found["outcomes"]]


def lines(count: int = 120, *, per_s: float = 1.0) -> Sequence[str]:
    return [
        json.dumps(
            {
                "timestamp": request.arrived_s * 1000,
                "input_length": request.tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.blocks,
            }
        )
        for request in made_up(count, Random(7).random, per_s=per_s)
    ]


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines()))
    return path


def test_a_table_has_a_row_for_each_policy(trace):
    code, out, err = run(trace, *SMALL, "--policy", "random,kvcache_centric")
    assert (code, err) == (0, "")
    assert "120 requests" in out
    assert "LLaMA3-70B on 8xA800-80GB, 2 prefill and 2 decode" in out
    assert "in TTFT 30 s, TBT 100 ms" in out
    rows = [row.split()[0] for row in out.splitlines()[3:] if row.strip()]
    assert rows == ["random", "kvcache_centric"]


def test_each_policy_is_run_under_each_admission(trace):
    found = document(trace, *SMALL, "--policy", "random,least_loaded", "--admission", "none,early")
    assert names(found) == ["random · none", "random · early", "least_loaded · none", "least_loaded · early"]


def test_coupled_engines_stand_beside_the_policies_or_alone(trace):
    found = document(trace, *SMALL, "--policy", "least_loaded", "--coupled", "vllm,vllm-chunked")
    assert names(found) == ["least_loaded", "vllm", "vllm-chunked"]
    found = document(trace, *SMALL, "--policy", "none", "--coupled", "vllm-prefix", "--spread", "cache_aware")
    assert names(found) == ["vllm-prefix"]


def test_the_document_has_the_trace_the_limits_and_the_figures(trace):
    found = document(trace, *SMALL, "--policy", "kvcache_centric", "--ttft-slo", "10s", "--tbt-slo", "50ms")
    assert found["slo"] == {"ttft_s": 10.0, "tbt_s": 0.05}
    assert found["trace"]["requests"] == 120
    assert found["plots"] == []
    (outcome,) = found["outcomes"]
    assert outcome["served"] == 120
    assert outcome["effective"] == round(outcome["effective_share"] * 120)
    assert 0 < outcome["token_hit_ratio"] < 1
    assert outcome["ttft_p50_s"] <= outcome["ttft_p90_s"] <= outcome["ttft_p99_s"]


def test_equal_seeds_give_equal_documents(trace):
    words = (trace, *SMALL, "--policy", "random")
    assert document(*words, "--seed", "1") == document(*words, "--seed", "1")
    assert document(*words, "--seed", "1") != document(*words, "--seed", "2")


def test_a_faster_replay_makes_requests_wait_longer(trace):
    slow, fast = (document(trace, *SMALL, "--policy", "least_loaded", "--speed", speed) for speed in (0.5, 5))
    assert fast["outcomes"][0]["ttft_mean_s"] > slow["outcomes"][0]["ttft_mean_s"]
    assert fast["trace"]["seconds"] == pytest.approx(slow["trace"]["seconds"] / 10)


def test_only_the_first_requests_are_replayed(trace):
    assert document(trace, *SMALL, "--policy", "random", "--first", "7")["trace"]["requests"] == 7


def test_a_compressed_trace_is_read(tmp_path, trace):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(trace.read_bytes()))
    assert document(path, *SMALL, "--policy", "random") == document(trace, *SMALL, "--policy", "random")


def test_what_was_refused_is_told_with_its_reason(trace):
    words = (trace, *SMALL, "--policy", "least_loaded", "--admission", "early", "--ttft-slo", "500ms", "--speed", "3")
    (outcome,) = document(*words)["outcomes"]
    assert outcome["refused"]["ttft"] > 0
    _, out, _ = run(*words)
    assert f"least_loaded refused {outcome['refused']['ttft']} for ttft" in out


def test_what_was_not_measured_is_null():
    slo = Slo()
    summary = Outcomes([], []).summary(slo)
    assert not isfinite(summary["ttft_mean_s"])
    (told,) = described([TraceRequest(0.0, 1, 1, ())], {"none": Outcomes([], [])}, slo, [])["outcomes"]
    assert told["ttft_mean_s"] is None
    assert told["served"] == 0


def test_plots_are_png_files_in_a_folder_that_is_made(trace, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "plots"
    found = document(trace, *SMALL, "--coupled", "vllm", "--plot", folder)
    assert [Path(path).name for path in found["plots"]] == ["latency.png", "load.png", "hits.png"]
    for path in found["plots"]:
        assert Path(path).read_bytes().startswith(b"\x89PNG")


def test_plots_without_the_extra_are_refused_before_anything_is_replayed(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'cairn-kv[plots]'" in refused(trace, "--plot", tmp_path / "plots")


def test_plots_where_a_file_is_are_refused(trace, tmp_path):
    pytest.importorskip("matplotlib")
    assert "trace.jsonl" in refused(trace, *SMALL, "--policy", "random", "--plot", trace)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "best"), "--policy takes some of random, "),
        (("--policy", ""), "--policy takes some of"),
        (("--admission", "late"), "--admission takes some of none, "),
        (("--coupled", "tgi"), "--coupled takes some of vllm, "),
        (("--spread", "evenly"), "--spread takes some of least_loaded, "),
        (("--policy", "none"), "nothing to replay"),
        (("--ttft-slo", "soon"), "expected a duration"),
        (("--tbt-slo", "0"), "expected a duration"),
        (("--prefill", "0"), "--prefill"),
        (("--speed", "0"), "--speed"),
    ],
)
def test_what_cannot_be_simulated_is_refused(trace, words, said):
    assert said in refused(trace, *words)


def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines(1)[0] + "\n{}\n")
    assert f"{path}: line 2: timestamp" in refused(path)
    path.write_text("")
    assert "no request" in refused(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "no text" in refused(path)
    broken = tmp_path / "bad.jsonl.gz"
    broken.write_bytes(gzip.compress(lines(1)[0].encode())[:-4])
    assert str(broken) in refused(broken)
    assert "No such file" in refused(tmp_path / "nothing.jsonl")


def test_a_prefill_instance_of_several_nodes_begins_sooner(trace):
    alone, together = (
        document(trace, *SMALL, "--policy", "least_loaded", *more)["outcomes"][0]["ttft_mean_s"]
        for more in ((), ("--pipeline-nodes", "4"))
    )
    assert together < 0.7 * alone
