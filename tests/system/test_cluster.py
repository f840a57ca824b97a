"""Five real nodes that are one pool: what is put on one is got on every other, copied, located, and drained."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from engine_client.blocking import BlockingClient
from tests.system import net
from tests.system.cairn_process import REPO, clean_environ
from tests.system.cluster import NAMES, Cluster, Prompts, etcd_or_skip
from tests.system.net import Net
from tests.system.nodes import content, free_port, namespace, until

TENANTS = {
    "node.unix_tenant": "",
    "tenants.0.name": "one",
    "tenants.0.token": "token-of-tenant-one",
    "tenants.0.secret": "secret-of-tenant-one",
    "tenants.0.admin": "true",
    "tenants.1.name": "two",
    "tenants.1.token": "token-of-tenant-two",
    "tenants.1.secret": "secret-of-tenant-two",
}
PORTS = 12  # of five nodes and etcd
prompts = count(1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    etcd_or_skip()
    network = None if net.why_not() else Net([*NAMES, "etcd"])
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), network)
    try:
        yield cluster.start()
    finally:
        cluster.close()


@pytest.fixture
def cluster(whole: Cluster) -> Iterator[Cluster]:
    yield whole
    whole.hang_up()
    assert whole.alive == list(NAMES)
    whole.assert_sound()
    whole.empty()
    whole.until_converged()


@pytest.mark.parametrize("source", NAMES)
def test_what_is_put_on_one_node_is_got_on_every_other(cluster: Cluster, source: str) -> None:
    prompt = next(prompts)
    assert cluster.at(source, "load").put(prompt) == 8
    for reader in NAMES:
        at = cluster.at(reader, "load")
        until(lambda at=at: at.has(prompt), f"{reader} to get what {source} has")


def test_a_chain_of_several_stripes_is_got_at_once_and_in_steps(cluster: Cluster) -> None:
    prompt, shape = next(prompts), {"blocks": 100, "block_bytes": 4096}
    source, reader, other = (cluster.at(name, "long", **shape) for name in ("n1", "n2", "n3"))
    assert source.put(prompt) == 100
    until(lambda: reader.has(prompt), "n2 to get 100 blocks")
    keys, done = source.keys(prompt), 0
    for end in (7, 40, 64, 100):
        wanted = keys[done:end]
        buffers = [bytearray(4096) for _ in wanted]
        parent = keys[done - 1] if done else None
        assert other.client.get(other.space, wanted, buffers, parent=parent) == len(wanted), (done, end)
        assert buffers == [content(key, 4096) for key in wanted]
        done = end


def test_a_chain_that_is_spread_over_nodes_is_got_whole(cluster: Cluster) -> None:
    """Each node puts a part of it, as engines do that take over a conversation."""
    prompt, shape = next(prompts), {"blocks": 50, "block_bytes": 4096}
    at = [cluster.at(name, "spread", **shape) for name in NAMES]
    keys = at[0].keys(prompt)
    for number, each in enumerate(at[:4]):
        start, end = number * 10, number * 10 + 10
        parent = keys[start - 1] if start else None
        if parent is not None:
            until(lambda each=each, start=start: each.get(prompt) >= start, "what came before")
        each.client.put(each.space, keys[start:end], [content(key, 4096) for key in keys[start:end]], parent)
    until(lambda: at[4].get(prompt) == 40, "n5 to get all 40 blocks")


def test_a_match_counts_what_other_nodes_have(cluster: Cluster) -> None:
    prompt = next(prompts)
    source, reader = cluster.at("n1", "load"), cluster.at("n4", "load")
    source.put(prompt)
    until(lambda: reader.client.match(reader.space, reader.keys(prompt)) == 8, "n4 to count n1's blocks")


def test_whereabouts_name_every_holder(cluster: Cluster) -> None:
    prompt = next(prompts)
    one, two, three = (cluster.at(name, "load") for name in ("n1", "n2", "n3"))
    one.put(prompt)
    until(lambda: three.holders(prompt) == [{"n1"}] * 8, "n3 to know that n1 has it")
    assert two.has(prompt)
    until(lambda: three.holders(prompt) == [{"n1", "n2"}] * 8, "n3 to know that n2 has a copy")
    two.client.evict(two.space, two.keys(prompt), tier="dram")
    until(lambda: three.holders(prompt) == [{"n1"}] * 8, "n3 to know that n2 has no copy any more")


def test_what_is_deleted_on_one_node_is_deleted_on_all(cluster: Cluster) -> None:
    prompt = next(prompts)
    at = [cluster.at(name, "load") for name in NAMES]
    at[0].put(prompt)
    for each in at[1:3]:
        until(lambda each=each: each.has(prompt), "copies")
    at[3].client.evict(at[3].space, at[3].keys(prompt))
    assert [each.get(prompt) for each in at] == [0] * 5


def test_every_node_lists_all(cluster: Cluster) -> None:
    for name in NAMES:
        roster = cluster.roster(name)
        assert roster.node == name
        assert roster.trouble == ""
        assert {row["name"]: row["epoch"] for row in roster.rows} == {
            each.name: each.cairn.epoch for each in cluster.nodes.values()
        }
        assert all(row["condition"] == "serving" and row["capacity_bytes"] == 24 << 20 for row in roster.rows)


def test_as_many_copies_are_made_as_are_asked_for(cluster: Cluster) -> None:
    prompt = next(prompts)
    source = cluster.at("n2", "load")
    source.put(prompt)
    done = source.client.replicate(source.space, source.keys(prompt), 3)
    assert (done.blocks, done.short) == (8, 0)
    until(lambda: all(len(holders) == 3 for holders in source.holders(prompt)), "three holders of each block")


def test_a_namespace_of_two_replicas_has_them_when_a_put_returns_that_waits_for_them(cluster: Cluster) -> None:
    prompt = next(prompts)
    with cluster.client("n3") as client:
        safe = Prompts(client, "safe", replicas=2, through=True)
        assert safe.put(prompt) == 8
        copies = [cluster.at(name, "safe").get(prompt, load_s=0) for name in NAMES]
        assert sorted(copies)[-2:] == [8, 8], copies


def test_a_namespace_of_two_replicas_has_them_soon(cluster: Cluster) -> None:
    prompt = next(prompts)
    behind = cluster.at("n3", "behind", replicas=2)
    assert behind.put(prompt) == 8
    until(lambda: all(len(holders) >= 2 for holders in behind.holders(prompt)), "two holders of each block")


def test_a_full_node_gets_what_others_have(cluster: Cluster) -> None:
    full, other = cluster.at("n1", "load"), cluster.at("n2", "load")
    for _ in range(60):  # 30 MiB of 24
        assert full.put(next(prompts)) == 8
    prompt = next(prompts)
    other.put(prompt)
    until(lambda: full.has(prompt), "a full node to make room for a copy")


def test_a_node_full_of_pinned_blocks_answers_in_time_and_keeps_them(cluster: Cluster) -> None:
    full, other = cluster.at("n1", "load"), cluster.at("n2", "load")
    prompt = next(prompts)
    pins = []
    while full.put(prompt) == 8:
        pins.append(full.client.pin(full.space, full.keys(prompt), hard=True, ttl_s=60).pin_id)
        prompt = next(prompts)
    last, wanted = prompt - 1, next(prompts)
    other.put(wanted)
    until(lambda: any(full.holders(wanted)), "n1 to know that n2 has it")
    full.get(wanted)
    assert full.has(last)
    assert other.has(wanted)
    for pin_id in pins:
        full.client.unpin(pin_id)


def test_what_a_tenant_has_is_nobody_elses_on_any_node(tmp_path: Path) -> None:
    etcd_or_skip()
    cluster = Cluster(tmp_path, settings=TENANTS, token=TENANTS["tenants.0.token"])
    try:
        cluster.start(NAMES[:2])
        one = [BlockingClient(node.unix, TENANTS["tenants.0.token"]) for node in cluster.nodes.values()]
        two = [BlockingClient(node.unix, TENANTS["tenants.1.token"]) for node in cluster.nodes.values()]
        theirs = [Prompts(client, "mine") for client in one]
        assert theirs[0].put(1) == 8
        until(lambda: theirs[1].has(1), "tenant one to get its blocks on the other node")
        keys = theirs[0].keys(1)
        for client in two:
            space = client.open("mine", namespace("mine", block_bytes=64 << 10))
            assert client.get(space, keys, [bytearray(64 << 10) for _ in keys]) == 0
            assert client.match(space, keys) == 0
            assert client.whereabouts(space, keys) == [{}] * 8
            client.close()
        for client in one:
            client.close()
    finally:
        cluster.close()


def test_scripts_start_five_nodes_on_one_host_and_stop_them(tmp_path: Path) -> None:
    etcd_or_skip()
    cairn = tmp_path / "cairn"
    cairn.write_text(f'#!/bin/sh\nPYTHONPATH={REPO} exec {sys.executable} -m server.cli "$@"\n')
    cairn.chmod(0o700)
    environ = clean_environ(CAIRN=str(cairn), CAPACITY="32MiB")
    scripts, folder = REPO / "deploy" / "cluster", tmp_path / "five"

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=90, check=False)

    try:
        started = run(scripts / "start.sh", folder, free_ports(PORTS))
        assert started.returncode == 0, started.stderr
        assert all(name in started.stdout for name in NAMES)
        address = f"unix://{folder}/n3/n3.sock"
        with BlockingClient(address) as client, BlockingClient(f"unix://{folder}/n5/n5.sock") as other:
            assert Prompts(client, "load").put(1) == 8
            reader = Prompts(other, "load")
            until(lambda: reader.has(1), "n5 to get what n3 has")
        checked = run(cairn, "check", "--cluster", "--address", address)
        assert checked.returncode == 0, checked.stdout
        again = run(scripts / "start.sh", folder)
        assert again.returncode == 1
        assert "runs already" in again.stderr
    finally:
        stopped = run(scripts / "stop.sh", folder)
    assert stopped.returncode == 0, stopped.stderr
    assert not list(folder.glob("*.pid"))


def free_ports(count: int) -> int:
    """The first of so many in a row."""
    while True:
        first = free_port() // 2
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
