"""Five node processes with a real etcd, each on a host of its own where namespaces can be had, and what tests ask."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from engine_client.blocking import BlockingClient
from kvstore.cluster.homes import Homes
from kvstore.cluster.naming import partition_of
from kvstore.types import BlockKey
from tests.cluster_etcd import EtcdProcess
from tests.system import net
from tests.system.cairn_process import CairnProcess
from tests.system.net import Net
from tests.system.nodes import content, free_port, namespace, nothing_held, pause, until
from tests.system.toxic_proxy import ToxicProxy

TOKEN = "a-secret-of-the-cluster"
NAMES = ("n1", "n2", "n3", "n4", "n5")
ETCD_PORT, NODE_PORT = 2379, 7401
PATIENCE_S = 30.0  # for a cluster to become whole, on a machine that is busy with other things
DEADLINE_S = 5.0  # of a client's call
BLOCK_BYTES = 64 << 10
SMALL = {
    "tiers.dram.capacity": "24MiB",
    "tiers.dram.slab": "1MiB",
    "tiers.dram.mlock": "no",
    "tiers.dram.huge_pages": "no",
    "index.entries": "4096",
    "node.drain_seconds": "1s",
    "rest.listen": "",
}


def etcd_or_skip() -> None:
    """Skips where etcd is missing, and fails in CI, which has promised it."""
    if shutil.which("etcd") is None:
        assert not os.environ.get("CI"), "CI runs the tests of a cluster, and has no etcd"
        pytest.skip("no etcd on the PATH: apt-get install etcd-server")


def net_or_skip(hosts: Sequence[str]) -> Net:
    reason = net.why_not()
    if reason:
        pytest.skip(reason)
    return Net(hosts)


class ClusterNode:
    """One `cairn node`, at the same addresses and with the same folders whenever it is started."""

    def __init__(
        self,
        run_dir: Path,
        settings: Mapping[str, str],
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.name = run_dir.name
        self.unix = f"unix://{run_dir}/{self.name}.sock"
        self.settings = {**SMALL, "node.name": self.name, **settings}
        self.ready_at = 0.0  # when it last said that it serves
        self._run_dir = run_dir
        self._inside = inside
        self._process: CairnProcess | None = None

    def start(self) -> None:
        with self._inside():
            self._process = CairnProcess(self._run_dir, {}, dict(self.settings))
        self.ready_at = time.monotonic()

    @property
    def cairn(self) -> CairnProcess:
        assert self._process is not None, "it was not started"
        return self._process

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.process.poll() is None

    def kill(self) -> None:
        if self.is_alive:
            self.thaw()
            self.cairn.kill()

    def stop(self) -> None:
        """As an operator does; fails the test unless it went in peace."""
        code = self.cairn.stop()
        assert code == 0, f"{self.name} ended with {code}:\n{self.log[-4000:]}"

    def freeze(self) -> None:
        os.kill(self.cairn.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.cairn.pid, signal.SIGCONT)

    @property
    def log(self) -> str:
        return self.cairn.log


class Cluster:
    """`start` starts all and waits until all see all. `settings` are all nodes', `own` of single ones.

    network: None for a cluster on this machine's loopback, where links cannot be cut.
    token: of an admin, where tenants are configured.
    behind: nodes that others reach only through a proxy, which is then in `proxies`; on loopback only.
    """

    def __init__(
        self,
        folder: Path,
        network: Net | None = None,
        settings: Mapping[str, str] | None = None,
        own: Mapping[str, Mapping[str, str]] | None = None,
        behind: Iterable[str] = (),
        token: str = "",
    ) -> None:
        self.net = network
        self.proxies: dict[str, ToxicProxy] = {}
        self._settings, self._own = settings or {}, own or {}
        self._behind, self._token = set(behind), token
        with self._inside("etcd")():
            self.etcd = EtcdProcess(folder / "etcd")
        self._folder = folder
        self._has_etcd = False
        self._probes = 0
        self._door: ToxicProxy | None = None  # to etcd, which listens to its own host only
        self.nodes: dict[str, ClusterNode] = {}
        self._clients: list[BlockingClient] = []

    def start(self, names: Sequence[str] = NAMES) -> "Cluster":
        self.start_etcd()
        endpoint = self.etcd.endpoint
        if self.net is not None:
            listen = (self.net.addresses["etcd"], ETCD_PORT)
            self._door = ToxicProxy(endpoint, listen, self._inside("etcd"))
            endpoint = listen
        for name in names:
            self.nodes[name] = self._node(name, endpoint)
        self.start_nodes(names)
        self.until_whole()
        return self

    def start_etcd(self) -> None:
        with self._inside("etcd")():
            self.etcd.start()
        self._has_etcd = True

    def kill_etcd(self) -> None:
        self._has_etcd = False
        self.etcd.kill()

    def start_nodes(self, names: Iterable[str]) -> None:
        """At once, as after a power cut."""
        wanted = [self.nodes[name] for name in names]
        with ThreadPoolExecutor(len(wanted)) as pool:
            list(pool.map(ClusterNode.start, wanted))

    def at(self, name: str, space: str, **shape: Any) -> "Prompts":
        """Prompts of a namespace at this node, through a client of their own, until `hang_up`."""
        self._clients.append(self.client(name))
        return Prompts(self._clients[-1], space, **shape)

    def hang_up(self) -> None:
        while self._clients:
            self._clients.pop().close()

    def close(self) -> None:
        self.hang_up()
        for node in self.nodes.values():
            node.kill()
        self.kill_etcd()
        for proxy in (*self.proxies.values(), self._door):
            if proxy is not None:
                proxy.close()
        if self.net is not None:
            self.net.stop()

    def client(self, name: str, timeout_s: float = DEADLINE_S) -> BlockingClient:
        return BlockingClient(self.nodes[name].unix, self._token, timeout_s=timeout_s, name="test")

    def roster(self, name: str) -> Any:
        """What a node says of the cluster."""
        with self.client(name) as client:
            return client.nodes()

    def members_seen_by(self, name: str) -> set[str]:
        return {str(row["name"]) for row in self.roster(name).rows}

    @property
    def alive(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node.is_alive]

    def until_whole(self) -> None:
        """All that are alive see all that are alive, in touch with etcd, and have told everything to the homes."""
        expected = set(self.alive)
        for name in self.alive:
            until(lambda name=name: self.members_seen_by(name) == expected, f"{name} to see {expected}", PATIENCE_S)
            until(lambda name=name: not self.roster(name).trouble, f"{name} to be in touch with etcd", PATIENCE_S)
        self.until_converged()

    def until_converged(self) -> None:
        """No node has anything to complain about, and the directory says what the holders have."""
        deadline = time.monotonic() + PATIENCE_S
        with self.client(self.alive[0], PATIENCE_S) as client:
            while problems := client.check(cluster=True):
                assert time.monotonic() < deadline, problems[:20]
                pause(0.1)

    def until_reached(self) -> None:
        """Each node gets what each other has: none is left alone any more for what it did not answer earlier."""
        self._probes += 1
        at = {name: self.at(name, "probe", blocks=1, block_bytes=4096) for name in self.alive}
        for number, name in enumerate(at):
            at[name].put(self._probes * len(self.nodes) + number)
        for reader, its in at.items():
            for number, name in enumerate(at):
                prompt = self._probes * len(self.nodes) + number
                until(lambda its=its, prompt=prompt: its.has(prompt), f"{reader} to reach {name}", PATIENCE_S)
        self.hang_up()

    def heal(self) -> None:
        """Everything runs, nothing is cut or slow, and all reach each other."""
        if not self._has_etcd:
            self.start_etcd()
        if self.net is not None:
            self.net.heal()
            for name in self.nodes:
                self.net.rate(name, 0)
        for proxy in self.proxies.values():
            proxy.heal()
        dead = [name for name in self.nodes if name not in self.alive]
        for name in self.alive:
            self.nodes[name].thaw()
        if dead:
            self.start_nodes(dead)
        self.until_whole()
        self.until_reached()

    def assert_sound(self) -> None:
        """Nothing is broken in any node that is alive, now or earlier."""
        for name in self.alive:
            log = self.nodes[name].log
            assert "broken invariant" not in log, f"{name}:\n{log[-4000:]}"
            assert "Traceback" not in log, f"{name}:\n{log[-4000:]}"
            with self.client(name) as client:
                assert client.check() == [], name

    def empty(self) -> None:
        """Delete all blocks everywhere: what stays in use is held by somebody."""
        for name in self.alive:
            with self.client(name) as client:
                for row in client.stat()["namespaces"]:
                    client.evict(client.find(row["names"][0]))
                until(lambda client=client: nothing_held(client), f"{name} to hold nothing")

    def _inside(self, host: str) -> Callable[[], AbstractContextManager[None]]:
        network = self.net
        return nullcontext if network is None else lambda: network.inside(host)

    def _node(self, name: str, etcd: tuple[str, int]) -> ClusterNode:
        host, port = ("127.0.0.1", free_port()) if self.net is None else (self.net.addresses[name], NODE_PORT)
        settings = {
            "node.tcp_listen": f"{host}:{port}",
            "cluster.coordinator": f"etcd://{etcd[0]}:{etcd[1]}/cairn",
            "cluster.token": TOKEN,
            "cluster.labels": f"host={name}",
            **self._settings,
            **self._own.get(name, {}),
        }
        if name in self._behind:
            self.proxies[name] = ToxicProxy((host, port))
            settings["cluster.advertise"] = "{}:{}".format(*self.proxies[name].address)
        return ClusterNode(self._folder / name, settings, self._inside(name))


class Prompts:
    """Chains of blocks by number, put and got through one client; every byte that comes is compared."""

    def __init__(
        self,
        client: BlockingClient,
        name: str = "load",
        blocks: int = 8,
        block_bytes: int = BLOCK_BYTES,
        replicas: int = -1,
        *,
        through: bool = False,
    ) -> None:
        self.client = client
        self._blocks, self._block_bytes = blocks, block_bytes
        self.space = client.open(name, namespace(name, block_bytes=block_bytes), replicas=replicas, through=through)

    def keys(self, prompt: int) -> list[BlockKey]:
        tokens = self._blocks * self.space.namespace.block_tokens
        return list(self.space.keys([prompt, *range(tokens)])[: self._blocks])

    def put(self, prompt: int) -> int:
        """How many of its blocks the node has then."""
        keys = self.keys(prompt)
        report = self.client.put(self.space, keys, [content(key, self._block_bytes) for key in keys])
        return report.stored + report.present

    def get(self, prompt: int, load_s: float | None = None) -> int:
        """How many of its blocks are there, all of them right."""
        keys = self.keys(prompt)
        buffers = [bytearray(self._block_bytes) for _ in keys]
        found = self.client.get(self.space, keys, buffers, load_s=load_s)
        for key, buffer in zip(keys[:found], buffers, strict=False):
            assert buffer == content(key, self._block_bytes), f"wrong bytes of prompt {prompt}"
        return found

    def has(self, prompt: int) -> bool:
        return self.get(prompt) == self._blocks

    def assert_has(self, prompt: int, where: str = "") -> None:
        """At the first try. What the node thinks of the others is said where not."""
        found = self.get(prompt)
        if found < self._blocks:
            rows = self.client.nodes().rows
            troubles = {row["name"]: row["trouble"] for row in rows if row.get("trouble")}
            home = self.home(prompt, [row["name"] for row in rows])
            holders = self.holders(prompt)
            raise AssertionError(
                f"{found} of {self._blocks} blocks {where}; home {home}, which says {holders}; {troubles}"
            )

    def home(self, prompt: int, names: Iterable[str]) -> str:
        """Whose directory knows of its first stripe, while these are the members."""
        return Homes(names).home(partition_of(self.space.root, self.keys(prompt)[0]))

    def holders(self, prompt: int) -> list[set[str]]:
        """Which nodes have each block, as the directory says."""
        return [set(nodes) for nodes in self.client.whereabouts(self.space, self.keys(prompt))]
