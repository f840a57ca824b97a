"""The bench of a cluster, with sizes that say nothing about speed: figures of every kind can be measured."""

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
