"""Members whose process is gone while no coordinator can be told, and how long one that failed is left alone."""

from collections.abc import Iterator

import pytest

from kvstore.cluster.choice import LONGEST_PAUSE_S
from kvstore.errors import ConnectFailed
from tests.peer_doubles import Make, Node, clusters


@pytest.fixture
def make() -> Iterator[Make]:
    with clusters() as made:
        yield made


def refused() -> ConnectFailed:
    error = ConnectFailed("refused")
    error.__cause__ = ConnectionRefusedError()
    return error


def is_seen(node: Node, name: str) -> bool:
    return name in node.cluster.view.members


def test_out_of_touch_a_member_whose_process_is_gone_is_done_without(make):
    node = make()
    node.store.call(lambda: node.room.cut("a"))
    node.store.advance(1.5)
    assert node.cluster.trouble

    node.store.call(lambda: node.cluster.probing.failed(node.others["b"], refused()))

    assert not is_seen(node, "b")
    assert is_seen(node, "c")
    assert "b" not in {node.cluster._homes.home(partition) for partition in range(4096)}


def test_in_touch_the_coordinator_decides_who_is_a_member(make):
    node = make()
    node.cluster.probing._coordinator.report_dead = _say_nothing
    node.store.call(lambda: node.cluster.probing.failed(node.others["b"], refused()))
    assert is_seen(node, "b")


def test_a_member_that_failed_again_and_again_is_asked_soon_after(make):
    node = make()
    for _ in range(12):
        node.cluster.routes.failed("b", "hangs")
        node.store.advance(LONGEST_PAUSE_S)
    assert node.cluster.routes.may_ask("b")


async def _say_nothing(name: str, epoch: int) -> None:
    pass
