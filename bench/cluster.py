"""Five real nodes that are one pool: gets from other nodes, questions to the directory, and what killed nodes cost."""

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from bench import directory
from bench.cluster_nodes import MIB, PATIENCE_S, At, Site, buffers, found_after_s
from bench.local import raw_tcp
from bench.measure import Figure, span_us, take_turns, without_collector
from engine_client.blocking import BlockingClient
from kvstore.types import BlockKey
from tests.system.cluster import Cluster
from tests.system.nodes import pause

SETTINGS = {
    "tiers.dram.slab": "16MiB",
    "tiers.dram.huge_pages": "try",
    "index.entries": "65536",
    "cluster.hot_copies": "1",  # copies come by gets alone, so that a chain stays where the bench has put it
    "log.level": "warning",
}
SMALL_BYTES = 4096
LONG = 537  # blocks of a prompt of 8,590 tokens, 16 in a block
FLOORS = 3  # of so many runs of a bare socket the best is the floor
AMID_S = 0.02


class Shape(NamedTuple):
    """What is got from another node at once; `target` is a ratio."""

    name: str
    blocks: int
    block_bytes: int
    target: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; tests take less."""

    nodes: int = 5
    capacity: str = "512MiB"
    chains: int = 4  # that take turns, so that no cache holds them
    gets: int = 15  # of each shape
    shapes: tuple[Shape, ...] = (
        Shape("remote_get_1m_b64", 64, MIB, 0.7),
        Shape("remote_get_1m_b16", 16, MIB, 0.6),
        Shape("remote_get_64k_b64", 64, 64 << 10, 0.4),
    )
    questions: int = 1000
    kills: int = 5
    lost: int = 16  # chains of LONG small blocks that each node has when others are killed
    hot: int = 64  # blocks of 1 MiB
    hot_s: float = 3.0
    readers: int = 8


def run(wanted: set[str], sizes: Sizes) -> Iterator[Figure]:
    """All figures, or those wanted. Needs etcd on the PATH, and takes about three minutes."""
    if not wanted or "directory_memory" in wanted:
        yield from directory.run({"directory_memory"})
    if wanted == {"directory_memory"}:
        return
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as folder:
        cluster = Cluster(Path(folder), settings={**SETTINGS, "tiers.dram.capacity": sizes.capacity})
        try:
            cluster.start([f"n{number}" for number in range(1, sizes.nodes + 1)])
            site = Site(cluster)
            site.until_whole()
            for name, measure in Bench(site, sizes).measures().items():
                if not wanted or name in wanted:
                    yield measure()
        finally:
            cluster.close()


class Bench:
    """The first node holds, and the second or the last one reads. Nodes that are killed are the last or the first."""

    def __init__(self, site: Site, sizes: Sizes) -> None:
        self.site = site
        self.sizes = sizes

    def measures(self) -> dict[str, Callable[[], Figure]]:
        names = self.site.names
        return {
            **{shape.name: partial(self.remote_get, shape) for shape in self.sizes.shapes},
            "remote_match_537": self.remote_match,
            "whereabouts_537": self.whereabouts,
            "hot_prefix": self.hot_prefix,
            "holder_killed_hit": partial(self.holder_killed, "holder_killed_hit", holders=2),
            "holder_killed_miss": partial(self.holder_killed, "holder_killed_miss", holders=1),
            "holder_killed_amid": self.holder_killed_amid,
            "directory_lost_1": partial(self.directory_lost, "directory_lost_1", names[-1:]),
            "directory_lost_most": partial(self.directory_lost, "directory_lost_most", names[2:]),
            "directory_lost_but_1": self.directory_lost_but_one,
        }

    # Gets and questions.

    def remote_get(self, shape: Shape) -> Figure:
        """Whole chains that another node has, evicted again after each get, by turns with a bare socket."""
        name, blocks, block_bytes, target = shape
        targets = buffers(blocks, block_bytes)
        with (
            self.site.at(*self.site.names[:2], blocks=blocks, block_bytes=block_bytes) as (holder, reader),
            raw_tcp(buffers(blocks, block_bytes)) as receive,
        ):
            chains = [self.site.chain(holder) for _ in range(self.sizes.chains)]
            for keys in chains:
                holder.put(keys)
            pairs = []
            for keys, _ in zip(cycle(chains), range(len(chains) + self.sizes.gets), strict=False):
                reader.until_held(keys, [holder])
                with without_collector():
                    value = span_us(partial(reader.get_all, keys, targets))
                    pairs.append((value, min(span_us(partial(receive, targets)) for _ in range(FLOORS))))
                reader.forget(keys)
            holder.empty()
        pairs = pairs[len(chains) :]  # those before have made connections and touched memory
        ratio = statistics.median(floor / value for value, floor in pairs)
        value, floor = (statistics.median(spans) for spans in zip(*pairs, strict=True))
        note = (
            f"{blocks} x {block_bytes >> 10} KiB that another node has, by a client of a Unix socket, verified;"
            f" floor: recv_into from a bare process, the best of {FLOORS}"
        )
        return Figure(name, value, "us", floor, ratio, max(pairs)[0], target, is_ratio=True, note=note)

    def remote_match(self) -> Figure:
        note = f"match of {LONG} blocks on another node, {self.sizes.nodes} homes; floor: of as many on this node"
        return self._question("remote_match_537", At.has, note)

    def whereabouts(self) -> Figure:
        note = (
            f"who has {LONG} blocks that another node has; floor: that this node has, which asks the homes all the same"
        )

        def ask(at: At, keys: Sequence[BlockKey]) -> bool:
            return all(at.client.whereabouts(at.space, keys))

        return self._question("whereabouts_537", ask, note)

    def _question(self, name: str, ask: Callable[[At, Sequence[BlockKey]], bool], note: str) -> Figure:
        def asked(at: At, keys: Sequence[BlockKey]) -> None:
            assert ask(at, keys), f"{at.name} does not find a chain any more"

        with self.site.at(*self.site.names[:2], blocks=LONG, block_bytes=SMALL_BYTES) as (holder, reader):
            far, near = self.site.chain(holder), self.site.chain(holder)
            holder.put(far)
            reader.put(near)
            reader.until_held(far, [holder])
            with without_collector():
                turns = take_turns(partial(asked, reader, far), partial(asked, reader, near), self.sizes.questions)
                values, floors = zip(*turns, strict=True)
            reader.empty()
        ordered = sorted(values)
        value, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
        floor = statistics.median(floors)
        return Figure(name, value, "us", floor, floor / value, p99, 1000.0, is_ratio=False, note=note)

    def hot_prefix(self) -> Figure:
        """Clients of all nodes but the last read one prefix: by TCP from its holder, then each from its own node."""
        names = self.site.names[: max(len(self.site.names) - 1, 2)]
        nodes = [self.site.cluster.nodes[name].cairn for name in names]
        one = [(nodes[0].tcp_address, nodes[0].token)] * self.sizes.readers
        own = [(node.address, node.token) for node, _ in zip(cycle(nodes), range(self.sizes.readers), strict=False)]
        with self.site.at(*names, blocks=self.sizes.hot, block_bytes=MIB) as (holder, *others):
            keys = self.site.chain(holder)
            holder.put(keys)
            alone, busy_alone = _rate(one, holder.space.name, keys, self.sizes.hot_s)
            for at in others:
                at.until_has(keys)
                at.get_all(keys, buffers(self.sizes.hot, MIB))
            spread, busy_spread = _rate(own, holder.space.name, keys, self.sizes.hot_s)
            holder.empty()
        note = (
            f"{self.sizes.readers} clients of {len(nodes)} nodes read {self.sizes.hot} MiB, each from its own; floor:"
            f" all over TCP from its holder; of {os.cpu_count()} cores {busy_spread:.0%} and {busy_alone:.0%} were busy"
        )
        return Figure("hot_prefix", spread, "GB/s", alone, spread / alone, None, 2.5, is_ratio=True, note=note)

    # Nodes that are killed.

    def holder_killed(self, name: str, holders: int) -> Figure:
        """The first get of a chain right after a holder of it was killed, to which the reader has a connection.

        The one that is killed is no home of the chain: of what homes knew see `directory_lost`.
        """
        spans = [self._after_kill(holders) for _ in range(self.sizes.kills)]
        other = "another node has them too" if holders > 1 else "nobody else has them: a miss"
        note = f"64 x 64 KiB at once after kill -9 of a holder; {other}; p99 is the longest of {len(spans)}"
        return Figure(name, statistics.median(spans), "ms", None, None, max(spans), 50.0, is_ratio=False, note=note)

    def _after_kill(self, holders: int) -> float:
        """Milliseconds."""
        with self._held(holders, 64, 64 << 10) as (keys, first, reader):
            targets = buffers(64, 64 << 10)
            reader.get_all(first, targets)
            self.site.kill(self.site.names[0])
            began = time.perf_counter()
            found = reader.get(keys, targets)
            spent_ms = (time.perf_counter() - began) * 1000
            assert found == (len(keys) if holders > 1 else 0), found
        return spent_ms

    def holder_killed_amid(self) -> Figure:
        """A get during which one of two holders is killed: what it takes from then on."""
        spans = []
        for _ in range(self.sizes.kills):
            with self._held(2, self.sizes.hot, MIB) as (keys, _, reader), ThreadPoolExecutor(1) as pool:
                got = pool.submit(reader.get_all, keys, buffers(self.sizes.hot, MIB))
                pause(AMID_S)
                began = time.perf_counter()
                self.site.kill(self.site.names[0])
                got.result()
                spans.append((time.perf_counter() - began) * 1000)
        note = f"{self.sizes.hot} x 1 MiB of two holders, one killed after {AMID_S} s; from then until all are there"
        value = statistics.median(spans)
        return Figure("holder_killed_amid", value, "ms", None, None, max(spans), 1000.0, is_ratio=False, note=note)

    @contextmanager
    def _held(self, holders: int, blocks: int, block_bytes: int) -> Iterator[tuple[list[BlockKey], list[BlockKey], At]]:
        """Two chains that the first nodes have, all of them both, and who reads. Healed at the end."""
        names = [*self.site.names[:holders], self.site.names[-1]]
        with self.site.at(*names, blocks=blocks, block_bytes=block_bytes) as (*all_at, reader):
            keys, first = (self.site.chain(reader, away_from=names[0]) for _ in range(2))
            for at in all_at:
                at.put(keys)
                at.put(first)
            reader.until_held(keys, all_at)
            reader.until_held(first, all_at)
            yield keys, first, reader
        self.site.heal()

    def directory_lost(self, name: str, killed: Sequence[str]) -> Figure:
        """Homes go for good: until each of the others finds all that each other one has."""
        left = [other for other in self.site.names if other not in killed]
        with self._told(left) as (all_at, chains):
            began = time.perf_counter()
            self.site.kill(*killed)
            spent_s = found_after_s(began, all_at, chains)
        note = f"kill -9 of {len(killed)} of {len(self.site.names)} nodes, until each other one finds all that is left"
        return self._lost(name, spent_s, chains, note)

    def directory_lost_but_one(self) -> Figure:
        """All homes but the holder are killed, and started again with nothing in them."""
        holder, *killed = self.site.names
        with self._told([holder]) as (_, chains):
            self.site.kill(*killed)
            self.site.cluster.start_nodes(killed)
            began = time.perf_counter()
            with self.site.at(*killed, blocks=LONG, block_bytes=SMALL_BYTES) as all_at:
                spent_s = found_after_s(began, all_at, chains)
        note = (
            f"kill -9 and start of {len(killed)} of {len(self.site.names)} nodes; from the start until each finds all"
        )
        return self._lost("directory_lost_but_1", spent_s, chains, note)

    def _lost(self, name: str, spent_s: float, chains: Sequence[Sequence[BlockKey]], note: str) -> Figure:
        note = f"{note}: {len(chains) * LONG:,} blocks"
        return Figure(name, spent_s, "s", None, None, None, 3.0, is_ratio=False, note=note)

    @contextmanager
    def _told(self, names: Sequence[str]) -> Iterator[tuple[list[At], list[list[BlockKey]]]]:
        """Each of these nodes has chains, and all homes know of them. Healed at the end."""
        with self.site.at(*names, blocks=LONG, block_bytes=SMALL_BYTES) as all_at:
            chains = [self.site.chain(at) for at in all_at for _ in range(self.sizes.lost)]
            for number, keys in enumerate(chains):
                all_at[number // self.sizes.lost].put(keys)
            found_after_s(time.perf_counter(), all_at, chains)
            yield all_at, chains
        self.site.heal()


def _rate(addresses: Sequence[tuple[str, str]], name: str, keys: list[BlockKey], seconds: float) -> tuple[float, float]:
    """GB/s of processes that read the same chain at once, one at each address, and how busy the processors were."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(addresses) + 1), context.Queue()
    read = partial(_read, name, keys, seconds, barrier, results)
    running = [context.Process(target=read, args=address) for address in addresses]
    for process in running:
        process.start()
    barrier.wait(PATIENCE_S)
    idle_before, before = _processors()
    rates = [results.get(timeout=PATIENCE_S + seconds) for _ in running]
    idle, after = _processors()
    for process in running:
        process.join(PATIENCE_S)
    return sum(rates), 1 - (idle - idle_before) / max(after - before, 1)


def _processors() -> tuple[int, int]:
    """Ticks of all processors since they started: idle ones, and all."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return ticks[3] + ticks[4], sum(ticks[:8])


def _read(name: str, keys: list[BlockKey], seconds: float, barrier: threading.Barrier, results: Any,
          *address: str) -> None:  # fmt: skip
    with BlockingClient(*address, timeout_s=PATIENCE_S) as client:
        space, targets = client.find(name), buffers(len(keys), MIB)
        client.get(space, keys, targets)  # maps all slabs
        barrier.wait(PATIENCE_S)
        began, got = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            got += client.get(space, keys, targets)
        results.put(got * MIB / (time.perf_counter() - began) / 1e9)
