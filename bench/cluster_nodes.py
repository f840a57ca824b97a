"""Clients of the nodes of a running cluster, and chains of blocks that the bench puts there."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count

from bench.local import mapped
from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace
from kvstore.cluster.homes import Homes
from kvstore.cluster.naming import STRIPE_BLOCKS, partition_of
from kvstore.prefix import Namespace
from kvstore.types import BlockKey
from tests.system.cluster import Cluster
from tests.system.nodes import pause

MIB = 1 << 20
PATIENCE_S = 30.0
LOOK_S = 0.005
GIVE_UP_S = 20.0  # for what should take 3 s


@dataclass(slots=True)
class At:
    """A client of one node, and a namespace there whose chains have `blocks` of `block_bytes`."""

    name: str
    client: BlockingClient
    space: OpenSpace
    blocks: int
    block_bytes: int

    def put(self, keys: Sequence[BlockKey]) -> None:
        block = os.urandom(self.block_bytes)
        report = self.client.put(self.space, keys, [block] * len(keys))
        assert report.stored + report.present == len(keys), report

    def has(self, keys: Sequence[BlockKey]) -> bool:
        return self.client.match(self.space, keys) == len(keys)

    def get(self, keys: Sequence[BlockKey], targets: Sequence[memoryview]) -> int:
        return self.client.get(self.space, keys, targets)

    def get_all(self, keys: Sequence[BlockKey], targets: Sequence[memoryview]) -> None:
        found = self.get(keys, targets)
        assert found == len(keys), f"{self.name} got {found} of {len(keys)} blocks"

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """In the memory of this node alone."""
        self.client.evict(self.space, keys, tier="dram")

    def empty(self) -> None:
        """Delete the namespace's blocks, on all nodes."""
        self.client.evict(self.space)

    def until_has(self, keys: Sequence[BlockKey]) -> None:
        until(lambda: self.has(keys), f"{self.name} to find a chain")

    def until_held(self, keys: Sequence[BlockKey], holding: Sequence["At"]) -> None:
        """The directory says that these have all of a chain, and this node none of it: what came to it is evicted."""
        expected = {at.name for at in holding}
        found: list[set[str]] = []

        def is_so() -> bool:
            found[:] = [set(holders) for holders in self.client.whereabouts(self.space, keys)]
            if any(self.name in holders for holders in found):
                self.forget(keys)
                return False
            return all(holders >= expected for holders in found)

        until(is_so, f"the directory to say that {expected} have a chain", found)


class Site:
    """A running cluster, whole and empty between two measures."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.names = list(cluster.nodes)
        self._prompts = count()

    @contextmanager
    def at(self, *names: str, blocks: int, block_bytes: int) -> Iterator[list[At]]:
        space = Namespace(
            model="bench", dtype="uint8", layout="raw", block_tokens=16, layers=1, block_bytes=block_bytes
        )
        with ExitStack() as stack:
            found = []
            for name in names:
                client = stack.enter_context(self.cluster.client(name, PATIENCE_S))
                found.append(At(name, client, client.open(str(block_bytes), space), blocks, block_bytes))
            yield found

    def chain(self, at: At, away_from: str = "") -> list[BlockKey]:
        """One that was not there before, and whose home `away_from` is of no stripe."""
        homes = Homes(self.names)
        while True:
            tokens = [next(self._prompts), *range(1, at.blocks * at.space.namespace.block_tokens)]
            keys = list(at.space.keys(tokens))
            partitions = [partition_of(at.space.root, key) for key in keys[::STRIPE_BLOCKS]]
            if away_from not in map(homes.home, partitions):
                return keys

    def kill(self, *names: str) -> None:
        for name in names:
            self.cluster.nodes[name].kill()

    def until_whole(self) -> None:
        """All nodes have all of their memory, and see each other."""
        for name in self.names:
            with self.cluster.client(name, PATIENCE_S) as client:
                until(lambda client=client: _is_grown(client), f"{name} to have all its memory")
        self.cluster.until_whole()

    def heal(self) -> None:
        """Whoever was killed runs again, and nobody has anything."""
        dead = set(self.names) - set(self.cluster.alive)
        if dead:
            self.cluster.start_nodes(dead)
        self.until_whole()
        self.cluster.empty()
        self.cluster.until_converged()


def _is_grown(client: BlockingClient) -> bool:
    dram = client.stat()["tiers"][0]
    return bool(dram["capacity_bytes"] == dram["target_bytes"])


def found_after_s(began: float, all_at: Sequence[At], chains: Sequence[Sequence[BlockKey]]) -> float:
    """Seconds from `began` until every node has found every chain."""
    waiting = [(at, keys) for keys in chains for at in all_at]
    while waiting:
        waiting = [(at, keys) for at, keys in waiting if not at.has(keys)]
        assert time.perf_counter() - began < GIVE_UP_S, f"{len(waiting)} chains were not found"
    return time.perf_counter() - began


def buffers(blocks: int, block_bytes: int) -> list[memoryview]:
    """That were written to before."""
    region = mapped(-(-blocks * block_bytes // MIB)).region
    return [region.view(number * block_bytes, block_bytes) for number in range(blocks)]


def until(condition: Callable[[], bool], what: str, seen: object = None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}: {seen}"
        pause(LOOK_S)
