"""`cairn trace replay`: what it prints and draws, and what it says of bad input."""

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.replay import NAMES
from server.cli import app

REQUESTS = [[0, 1, 2, 3], [0, 4, 5], [0, 1, 2, 3, 6], [0, 7], [0, 4, 5, 8]]


def run(*words: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    result = CliRunner().invoke(
        app, ["trace", "replay", *map(str, words)], env={"COLUMNS": "160"}, catch_exceptions=False
    )
    return result.exit_code, result.stdout, result.stderr


def refused(*words: object) -> str:
    """What it says of these words on stderr. It ends with 2."""
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    return err


def rows(*words: object) -> Any:
    code, out, err = run(*words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": 0, "input_length": 512 * len(ids), "output_length": 9, "hash_ids": ids}) + "\n"
            for ids in REQUESTS
        )
    )
    return path


def test_all_policies_are_compared_at_each_capacity(trace):
    code, out, err = run(trace, "--capacity", "3,100")
    assert (code, err) == (0, "")
    assert "5 requests, 18 blocks of 512 tokens, 9 of them different" in out
    assert "would hit 50.0%" in out
    for name in NAMES:
        assert len(re.findall(rf"\b{name}\b", out)) == 2


def test_json_has_the_trace_and_every_outcome(trace):
    found = rows(trace, "--capacity", "100,4", "--policy", "lru,belady")
    assert found["trace"]["accesses"] == 18
    assert [(one["capacity_blocks"], one["policy"]) for one in found["outcomes"]] == [
        (4, "lru"),
        (4, "belady"),
        (100, "lru"),
        (100, "belady"),
    ]
    assert found["outcomes"][2]["hit_blocks"] == 9
    assert found["outcomes"][2]["hit_tokens"] == 9 * 512
    assert found["outcomes"][2]["saved_s"] > 0


def test_a_capacity_can_be_a_size(trace):
    found = rows(trace, "-c", "1MiB,1GiB", "--block-bytes", "256KiB", "-p", "lru")
    assert [one["capacity_blocks"] for one in found["outcomes"]] == [4, 4096]


def test_prefill_costs_what_the_options_say(trace):
    (dear,) = rows(trace, "-c", 100, "-p", "lru", "--prefill-us", 1000, "--attention-ns", 0)["outcomes"]
    assert dear["saved_s"] == pytest.approx(9 * 512e-3)


def test_tokens_of_a_block_are_an_option(trace):
    (found,) = rows(trace, "-c", 100, "-p", "lru", "--block-tokens", 16)["outcomes"]
    assert found["hit_tokens"] == 9 * 16


def test_a_compressed_trace_is_the_same(trace):
    packed = trace.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert rows(packed, "-c", 4) == rows(trace, "-c", 4)


def test_the_curve_is_drawn_as_png(trace, tmp_path):
    picture = tmp_path / "curve.png"
    code, _, err = run(trace, "-c", "2,4,8", "--plot", picture)
    assert (code, err) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_curve_that_cannot_be_written_is_bad_input(trace, tmp_path):
    err = refused(trace, "-c", 4, "--plot", tmp_path / "nowhere" / "curve.png")
    assert "No such file" in err


def test_without_matplotlib_the_extra_is_named(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    err = refused(trace, "-c", 4, "--plot", tmp_path / "curve.png")
    assert "pip install 'cairn-kv[plots]'" in err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["-c", "4GiB"], "together with --block-bytes"),
        (["-c", "1MiB", "--block-bytes", "2MiB"], "not one block"),
        (["-c", "1MiB", "--block-bytes", "0"], "at least 1 byte"),
        (["-c", "0"], "not one block"),
        (["-c", "many"], "'many'"),
        (["-c", ","], "give at least one"),
        (["-p", "lru,best"], "not best"),
        (["-p", ""], "not none"),
    ],
)
def test_bad_options_are_named(trace, options, problem):
    assert problem in refused(trace, *options)


def test_a_bad_line_is_named_with_its_file(trace):
    trace.write_text(trace.read_text() + '{"hash_ids": 7}\n')
    assert f"{trace}: line 6: hash_ids is a list of integers" in refused(trace)


def test_a_file_that_is_not_there_is_named(tmp_path):
    assert f"{tmp_path / 'none.jsonl'}: No such file" in refused(tmp_path / "none.jsonl")


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_file_that_is_no_trace_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe\x00 no trace")
    assert str(path) in refused(path)


def test_a_compressed_trace_that_ends_too_early_is_named(trace):
    packed = trace.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes())[:-12])
    assert str(packed) in refused(packed)
