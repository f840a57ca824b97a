"""RDMA where people meet it: the command line, stat, REST and metrics, with the software double for a NIC."""

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_client.blocking import BlockingClient
from kvstore.errors import TransportError
from kvstore.prefix import Namespace
from kvstore.transport.rdma.nic import Options, open_nics
from server.commands import bench
from server.commands.loopback import Loopback
from server.commands.transport_bench import NAME, Case, measure
from tests.conftest import LiveNode
from tests.soft_verbs import SoftFabric, SoftVerbs
from tests.system.test_cli import FIELDS, KEY, Outcome, Shell

BLOCK = 256 << 10
NAMESPACE = Namespace(model="m", dtype="float16", layout="flat", block_tokens=16, layers=1)
RED, BLUE, BOSS = "r" * 32, "b" * 32, "a" * 32
TENANTS = {
    "tenants.0.name": "red",
    "tenants.0.token": RED,
    "tenants.1.name": "blue",
    "tenants.1.token": BLUE,
    "tenants.2.name": "boss",
    "tenants.2.token": BOSS,
    "tenants.2.admin": "true",
    "node.unix_tenant": "boss",
}


@pytest.fixture
def fabric() -> SoftFabric:
    return SoftFabric()


@pytest.fixture
def node(live_node: Callable[..., LiveNode], fabric: SoftFabric) -> LiveNode:
    return live_node(TENANTS, SoftVerbs(fabric))


def tcp(node: LiveNode) -> str:
    return str(node.call(lambda: node.node.addresses["tcp"]))


@contextmanager
def reader(node: LiveNode, fabric: SoftFabric, token: str, name: str) -> Iterator[BlockingClient]:
    """A client that has put four blocks by RDMA."""
    options: dict[str, Any] = {"transport": "rdma", "verbs": SoftVerbs(fabric), "rdma": Options(hung_s=0.2)}
    with BlockingClient(tcp(node), token, name=name, **options) as client:
        space = client.open("s", NAMESPACE)
        keys = space.keys(list(range(16 * 4)))
        assert client.put(space, keys, [os.urandom(BLOCK) for _ in keys]).stored == 4
        yield client


def fetched(node: LiveNode, path: str, token: str = "") -> bytes:
    request = urllib.request.Request(node.url + path, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return bytes(answer.read())


def metrics(node: LiveNode) -> dict[str, float]:
    lines = fetched(node, "/metrics").decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def rdma_of(node: LiveNode, token: str) -> Any:
    return json.loads(fetched(node, "/v1/stats", token))["rdma"]


# Stat and REST


def test_stat_says_what_each_path_does_over_all_surfaces(node: LiveNode, fabric: SoftFabric) -> None:
    with reader(node, fabric, RED, "engine") as client:
        found = client.stat()["rdma"]
        over_rest = rdma_of(node, BOSS)
        over_cli = Shell(CAIRN_ADDRESS=tcp(node), CAIRN_TOKEN=BOSS).ok("stat", "--json").row["rdma"]
        text = Shell(CAIRN_ADDRESS=tcp(node), CAIRN_TOKEN=BOSS).ok("stat").text
    assert over_rest == over_cli == found
    assert (found["binding"], found["peers"], found["reasons"]) == ("soft", 1, [])
    assert found["registered_bytes"] > 0
    (port,) = found["ports"]
    assert (port["port"], port["up"], port["down"], port["read_bytes"]) == ("soft0:1", 1, 0, 4 * BLOCK)
    (path,) = found["paths"]
    assert (path["tenant"], path["client"], path["path"]) == ("red", "engine", "soft0:1 to soft0:1")
    assert (path["up"], path["reason"], path["failures"], path["connects"]) == (True, "", 0, 1)
    assert path["read_bytes"] == 4 * BLOCK
    assert path["request_s"] > 0
    assert "RDMA by soft on soft0:1: 1 connection" in text
    assert "soft0:1 to soft0:1" in text


def test_a_tenant_sees_its_own_clients_and_an_admin_all(node: LiveNode, fabric: SoftFabric) -> None:
    with reader(node, fabric, RED, "red engine"), reader(node, fabric, BLUE, "blue engine"):
        assert {path["client"] for path in rdma_of(node, RED)["paths"]} == {"red engine"}
        assert "blue" not in json.dumps(rdma_of(node, RED))
        assert {path["client"] for path in rdma_of(node, BOSS)["paths"]} == {"red engine", "blue engine"}
        assert rdma_of(node, RED)["peers"] == 2


def test_names_that_clients_give_cannot_move_a_terminal(node: LiveNode, fabric: SoftFabric) -> None:
    with reader(node, fabric, RED, "\x1b[2Jengine"):
        assert rdma_of(node, BOSS)["paths"][0]["client"] == "?[2Jengine"


def test_a_node_without_rdma_says_why_and_prints_no_table(live_node: Callable[..., LiveNode]) -> None:
    node = live_node({"rdma.devices": "off"})
    shell = Shell(CAIRN_ADDRESS=node.call(lambda: node.node.addresses["unix"]))
    found = shell.ok("stat", "--json").row["rdma"]
    assert found["reasons"] == ["rdma.devices is off"]
    assert "RDMA" not in shell.ok("stat").text
    assert metrics(node)["cairn_rdma_peers"] == 0


# Metrics


def test_metrics_count_by_port_of_the_node(node: LiveNode, fabric: SoftFabric) -> None:
    with reader(node, fabric, RED, "engine"):
        found = metrics(node)
    assert found["cairn_rdma_peers"] == 1
    assert found["cairn_rdma_registered_bytes"] > 0
    assert found['cairn_rdma_read_bytes_total{port="soft0:1"}'] == 4 * BLOCK
    assert found['cairn_rdma_paths{port="soft0:1",state="up"}'] == 1
    assert found['cairn_rdma_path_connects_total{port="soft0:1"}'] == 1
    assert found['cairn_rdma_read_seconds{port="soft0:1"}'] > 0


def test_counters_do_not_go_back_when_a_connection_ends(node: LiveNode, fabric: SoftFabric) -> None:
    with reader(node, fabric, RED, "engine"):
        before = metrics(node)
    node.wait_until(lambda: not node.node.rdma.peers)
    after = metrics(node)
    counters = [name for name in before if name.startswith("cairn_rdma") and "_total" in name]
    assert len(counters) == 4
    assert {name: after[name] for name in counters} == {name: before[name] for name in counters}
    assert after["cairn_rdma_peers"] == 0
    assert after['cairn_rdma_paths{port="soft0:1",state="up"}'] == 0
    with reader(node, fabric, BLUE, "engine"):
        assert metrics(node)['cairn_rdma_read_bytes_total{port="soft0:1"}'] == 8 * BLOCK


# Which way to go


@pytest.fixture
def block(tmp_path: Path) -> Path:
    path = tmp_path / "block"
    path.write_bytes(os.urandom(4096))
    return path


def test_the_variable_is_for_what_moves_blocks(live_node: Callable[..., LiveNode], block: Path) -> None:
    node = live_node()
    shell = Shell(CAIRN_ADDRESS=tcp(node), CAIRN_TOKEN=node.token, CAIRN_TRANSPORT="rdma")
    shell.ok("namespace", "define", "n", *FIELDS)
    shell.ok("stat")
    words: list[object] = ["put", "n", block, "--key", KEY]
    assert_refused(shell(*words))
    assert_refused(shell("get", "n", KEY, "-o", block))
    assert_refused(shell("stat", "--transport", "rdma"))
    shell.ok(*words, "--transport", "tcp")
    shell.ok(*words, "--transport", "auto")
    assert_refused(shell(*words, "--transport", "local"))
    assert_refused(shell("stat", "--transport", "pigeon"))


def assert_refused(outcome: Outcome) -> None:
    assert outcome.code == 2
    assert outcome.err.startswith("error[")


def test_a_socket_is_gone_to_by_shared_memory_only(live_node: Callable[..., LiveNode]) -> None:
    node = live_node()
    shell = Shell(CAIRN_ADDRESS=node.call(lambda: node.node.addresses["unix"]))
    shell.ok("stat", "--transport", "local")
    assert_refused(shell("stat", "--transport", "tcp"))


# Bench


@pytest.fixture
def with_double(monkeypatch: pytest.MonkeyPatch, fabric: SoftFabric) -> None:
    monkeypatch.setattr(bench, "_verbs", lambda: (SoftVerbs(fabric), {}))


@pytest.mark.usefixtures("with_double")
def test_bench_measures_each_way_beside_bare_reads_and_leaves_nothing(node: LiveNode, fabric: SoftFabric) -> None:
    shell = Shell(CAIRN_ADDRESS=node.call(lambda: node.node.addresses["unix"]), CAIRN_TOKEN=BOSS)
    words = ["bench", "transport", "--tcp-address", tcp(node), "--size", "4KiB,1MiB", "--batch", "1,4"]
    found = shell.ok(*words, "--seconds", "20ms", "--json").row
    assert (found["binding"], found["missing"]) == ("soft", {})
    rows = {(row["transport"], row["call"], row["size_bytes"], row["batch"]): row for row in found["figures"]}
    assert len(rows) == 3 * 2 * 2 * 2
    for row in rows.values():
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["ratio"] > 0
        assert row["rounds"] >= 5
    counted = node.node.store.counters
    assert all(counted.loaded_bytes[path] > 0 for path in ("rdma", "tcp"))
    assert all(counted.stored_bytes[path] > 0 for path in ("shared", "rdma", "tcp"))
    assert node.used_bytes == 0
    assert {name for row in shell.ok("ls", "--json").rows for name in row["names"]} == {NAME}
    node.wait_until(lambda: not node.node.rdma.peers)
    text = shell.ok(*words, "--seconds", "20ms").text
    assert "rdma" in text
    assert "1.0 MiB" in text


@pytest.mark.usefixtures("with_double")
def test_bench_measures_the_one_way_that_is_asked_for(node: LiveNode) -> None:
    shell = Shell(CAIRN_ADDRESS=tcp(node), CAIRN_TOKEN=BOSS)
    words = ["--size=64KiB", "--batch=2", "--seconds=10ms", "--json"]
    found = shell.ok("bench", "transport", "--transport", "rdma", *words).row
    assert {row["transport"] for row in found["figures"]} == {"rdma"}
    found = shell.ok("bench", "transport", *words).row
    assert {row["transport"] for row in found["figures"]} == {"rdma", "tcp"}
    assert list(found["missing"]) == ["local"]


def test_bench_without_a_device_says_so_and_has_no_floor(
    live_node: Callable[..., LiveNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "has_devices", lambda: False)
    node = live_node()
    shell = Shell(CAIRN_ADDRESS=node.call(lambda: node.node.addresses["unix"]), CAIRN_TOKEN=node.token)
    words = ["bench", "transport", "--tcp-address", tcp(node), "--size=4KiB", "--batch=1", "--seconds=10ms", "--json"]
    found = shell.ok(*words).row
    assert found["missing"] == {"rdma": bench.NO_DEVICE}
    assert [row["ratio"] for row in found["figures"]] == [None] * 4
    assert_refused(shell("bench", "transport", "--tcp-address", tcp(node), "--transport", "rdma"))


def test_bench_does_not_measure_another_node(
    live_node: Callable[..., LiveNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "has_devices", lambda: False)
    node, other = live_node(), live_node()
    shell = Shell(CAIRN_ADDRESS=node.call(lambda: node.node.addresses["unix"]), CAIRN_TOKEN=node.token)
    words = ["--size=4KiB", "--batch=1", "--seconds=10ms", "--json"]
    found = shell.ok("bench", "transport", "--tcp-address", tcp(other), *words).row
    assert {row["transport"] for row in found["figures"]} == {"local"}
    assert "tcp" in found["missing"]


@pytest.mark.parametrize(
    "words", [["--size=0"], ["--size=64MiB"], ["--batch=0"], ["--batch=some"], ["--size=some"], ["--seconds=0s"]]
)
def test_bench_refuses_what_cannot_be_measured(live_node: Callable[..., LiveNode], words: list[str]) -> None:
    node = live_node()
    shell = Shell(CAIRN_ADDRESS=node.call(lambda: node.node.addresses["unix"]))
    assert_refused(shell("bench", "transport", *words))


def test_bench_ends_with_an_error_and_evicts_when_the_node_has_no_room(
    live_node: Callable[..., LiveNode], fabric: SoftFabric
) -> None:
    node = live_node({"tiers.dram.capacity": "8MiB"})
    shell = Shell(CAIRN_ADDRESS=node.call(lambda: node.node.addresses["unix"]), CAIRN_TOKEN=node.token)
    outcome = shell("bench", "transport", "--transport=local", "--size=1MiB", "--batch=16", "--seconds=10ms", "--json")
    assert outcome.code == 1
    assert "no room" in outcome.row["error"]["message"]
    assert node.used_bytes == 0


def test_bare_reads_that_fail_end_the_bench(node: LiveNode, fabric: SoftFabric) -> None:
    opened = open_nics(SoftVerbs(fabric), ())
    loopback = Loopback(opened.nics[0], 4096, 4)
    loopback.close()
    opened.close()
    with (
        BlockingClient(tcp(node), RED, transport="tcp") as client,
        pytest.raises(TransportError, match="bare READs"),
    ):
        measure({"tcp": client}, loopback, Case(4096, 1), 0.01)
    assert node.used_bytes == 0
