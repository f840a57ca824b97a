"""The bench of a cluster, with sizes that say nothing about speed: figures of every kind can be measured."""

import json
from pathlib import Path

from bench import cluster_trace
from bench.cluster import Shape, Sizes, run
from tests.system.cluster import etcd_or_skip

TINY = Sizes(
    nodes=3,
    capacity="64MiB",
    chains=2,
    gets=2,
    shapes=(Shape("remote_get_64k_b4", 4, 64 << 10, 0.4),),
    questions=5,
    kills=1,
    lost=1,
    hot=4,
    hot_s=0.1,
    readers=2,
)
NAMES = {
    "remote_get_64k_b4",
    "remote_match_537",
    "whereabouts_537",
    "hot_prefix",
    "holder_killed_hit",
    "holder_killed_amid",
    "directory_lost_1",
    "directory_lost_but_1",
}


def test_figures_are_measured_on_a_small_cluster() -> None:
    etcd_or_skip()
    figures = list(run(NAMES, TINY))
    assert {figure.name for figure in figures} == NAMES
    assert all(figure.value > 0 for figure in figures)


def test_a_trace_is_replayed_over_a_simulated_cluster(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1 + at % 3]} for at in range(8)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))

    hits, *balance = cluster_trace.report(trace, nodes=2, blocks=64, copies=0.1)

    assert hits.value == hits.floor > 0
    assert all(figure.value >= 1 for figure in balance)
