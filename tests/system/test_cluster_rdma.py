"""Blocks that one node pulls from another by READs, over the software double of RDMA."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_client.blocking import BlockingClient
from tests.cluster_etcd import EtcdProcess, until
from tests.conftest import LiveNode
from tests.soft_verbs import SoftFabric, SoftVerbs
from tests.system.nodes import content, namespace

BLOCK_BYTES = 64 << 10
BLOCKS = 24


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    server = EtcdProcess(tmp_path / "etcd").start()
    yield server
    server.kill()


@pytest.fixture
def pair(live_node: Callable[..., LiveNode], etcd: EtcdProcess) -> Iterator[tuple[list[BlockingClient], SoftFabric]]:
    """Clients of two nodes that see each other, and the network between these."""
    fabric = SoftFabric()
    settings = {"cluster.coordinator": f"etcd://127.0.0.1:{etcd.port}/cairn", "cluster.token": "a-secret-of-the-nodes"}
    nodes = [live_node({"node.name": name, **settings}, SoftVerbs(fabric)) for name in ("one", "other")]
    clients = [BlockingClient(f"unix://{node.config.node.unix_socket}") for node in nodes]
    until(lambda: all(len(client.nodes().rows) == 2 for client in clients), "both nodes to see each other")
    yield clients, fabric
    for client in clients:
        client.close()


def test_large_blocks_come_from_another_node_by_reads(pair) -> None:
    (one, other), fabric = pair
    space, same = (client.open("m", namespace(model="m")) for client in (one, other))
    keys = space.keys(list(range(4 * BLOCKS)))
    blocks = [content(key, BLOCK_BYTES) for key in keys]
    one.put(space, keys, blocks)
    until(lambda: other.match(same, keys) == BLOCKS, "the other node to hear of them")
    targets = [bytearray(BLOCK_BYTES) for _ in keys]

    assert other.get(same, keys, targets) == BLOCKS
    assert targets == blocks
    assert fabric.counts["read_bytes"] >= BLOCKS * BLOCK_BYTES
