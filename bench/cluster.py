"""Five real nodes that are one pool: gets from other nodes, questions to the directory, and what killed nodes cost."""

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any

from bench import directory
from bench.local import mapped, raw_tcp
from bench.measure import Figure, without_collector
from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace
from kvstore.prefix import Namespace
from kvstore.types import BlockKey
from tests.system.cluster import Cluster
from tests.system.nodes import pause

MIB = 1 << 20
SETTINGS = {
    "tiers.dram.slab": "16MiB",
    "tiers.dram.huge_pages": "try",
    "index.entries": "65536",
    "cluster.hot_copies": "1",  # copies come by use alone, so that a prefix stays where the bench has put it
    "log.level": "warning",
}
SMALL_BYTES = 4096
LONG = 537  # blocks of a prompt of 8,590 tokens, 16 in a block
READERS = 8
PATIENCE_S = 30.0
LOOK_S = 0.005
GIVE_UP_S = 20.0  # for what should take 3 s


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; tests take less."""

    nodes: int = 5
    capacity: str = "512MiB"
    chains: int = 4  # that take turns, so that no cache holds them
    gets: int = 15  # of each shape
    shapes: tuple[tuple[str, int, int, float], ...] = (
        ("remote_get_1m_b64", 64, MIB, 0.7),
        ("remote_get_1m_b16", 16, MIB, 0.6),
        ("remote_get_64k_b64", 64, 64 << 10, 0.4),
    )
    questions: int = 1000
    kills: int = 5
    lost: int = 16  # chains of LONG small blocks that each node has when others are killed
    hot: int = 64  # blocks of 1 MiB
    hot_s: float = 3.0


def run(wanted: set[str], sizes: Sizes | None = None) -> Iterator[Figure]:
    """All figures, or those wanted. Needs etcd on the PATH, and takes about two minutes."""
    if not wanted or "directory_memory" in wanted:
        yield from directory.run({"directory_memory"})
    if wanted == {"directory_memory"}:
        return
    sizes = sizes or Sizes()
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as folder:
        cluster = Cluster(Path(folder), settings={**SETTINGS, "tiers.dram.capacity": sizes.capacity})
        try:
            cluster.start([f"n{number}" for number in range(1, sizes.nodes + 1)])
            for name, measure in Bench(cluster, sizes).measures().items():
                if not wanted or name in wanted:
                    yield measure()
        finally:
            cluster.close()


@dataclass(slots=True)
class At:
    """A client of one node, and a namespace there."""

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
        return self.client.get(self.space, keys, targets[: len(keys)])

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """In the memory of this node alone."""
        self.client.evict(self.space, keys, tier="dram")


class Bench:
    """`cluster` runs, and runs whole again after each measure: the first node holds, the second reads."""

    def __init__(self, cluster: Cluster, sizes: Sizes) -> None:
        self.cluster = cluster
        self.sizes = sizes
        self._names = list(cluster.nodes)
        self._prompts = count()

    def measures(self) -> dict[str, Callable[[], Figure]]:
        figures: dict[str, Callable[[], Figure]] = {
            name: lambda name=name, shape=shape: self.remote_get(name, *shape)  # type: ignore[misc]
            for name, *shape in self.sizes.shapes
        }
        return figures | {
            "remote_match_537": self.remote_match,
            "whereabouts_537": self.whereabouts,
            "hot_prefix": self.hot_prefix,
            "holder_killed_hit": lambda: self.holder_killed("holder_killed_hit", copies=1),
            "holder_killed_miss": lambda: self.holder_killed("holder_killed_miss", copies=0),
            "holder_killed_amid": self.holder_killed_amid,
            "directory_lost_1": lambda: self.directory_lost("directory_lost_1", self._names[-1:]),
            "directory_lost_most": lambda: self.directory_lost("directory_lost_most", self._names[2:]),
            "directory_lost_but_one": self.directory_lost_but_one,
        }

    @contextmanager
    def at(self, *names: str, blocks: int, block_bytes: int) -> Iterator[list[At]]:
        space = Namespace(
            model="bench", dtype="uint8", layout="raw", block_tokens=16, layers=1, block_bytes=block_bytes
        )
        with ExitStack() as stack:
            clients = [stack.enter_context(self.cluster.client(name, PATIENCE_S)) for name in names]
            yield [At(client, client.open(str(block_bytes), space), blocks, block_bytes) for client in clients]

    def chain(self, at: At) -> list[BlockKey]:
        """One that was not there before."""
        tokens = [next(self._prompts), *range(1, at.blocks * at.space.namespace.block_tokens)]
        return list(at.space.keys(tokens))

    # Gets and questions.

    def remote_get(self, name: str, blocks: int, block_bytes: int, target: float) -> Figure:
        """Whole chains that only another node has, evicted again after each get, by turns with a bare socket."""
        values, floors = [], []
        source, targets = _buffers(blocks, block_bytes), _buffers(blocks, block_bytes)
        with (
            self.at(*self._names[:2], blocks=blocks, block_bytes=block_bytes) as (holder, reader),
            raw_tcp(source) as receive,
        ):
            chains = [self.chain(holder) for _ in range(self.sizes.chains)]
            for keys in chains:
                holder.put(keys)
                _until(lambda keys=keys: reader.has(keys), "the directory to know of a chain")
            for number, keys in zip(range(-len(chains), self.sizes.gets), cycle(chains), strict=False):
                with without_collector():
                    value = _span_ms(lambda keys=keys: _expect(reader.get(keys, targets), blocks))
                    floor = min(_span_ms(lambda: receive(targets)) for _ in range(3))
                reader.forget(keys)
                if number >= 0:  # those before have made connections and touched memory
                    values.append(value)
                    floors.append(floor)
            holder.client.evict(holder.space)
        ratio = statistics.median(floor / value for value, floor in zip(values, floors, strict=True))
        note = (
            f"{blocks} x {block_bytes >> 10} KiB that another node has, by a client over a Unix socket, verified; floor:"
            " recv_into from a bare process, the best of 3"
        )
        floor = statistics.median(floors)
        return Figure(
            name, statistics.median(values), "ms", floor, ratio, max(values), target, is_ratio=True, note=note
        )

    def remote_match(self) -> Figure:
        """Through a client, beside a chain that the asked node has itself."""
        note = f"match of {LONG} blocks on another node, {self.sizes.nodes} homes; floor: on the node that is asked"
        return self._question("remote_match_537", lambda at, keys: at.has(keys), note)

    def whereabouts(self) -> Figure:
        note = (
            f"the holders of {LONG} blocks on another node; floor: on the node that is asked, which asks all the same"
        )

        def ask(at: At, keys: Sequence[BlockKey]) -> bool:
            return all(at.client.whereabouts(at.space, keys))

        return self._question("whereabouts_537", ask, note)

    def _question(self, name: str, ask: Callable[[At, Sequence[BlockKey]], bool], note: str) -> Figure:
        with self.at(*self._names[:2], blocks=LONG, block_bytes=SMALL_BYTES) as (holder, reader):
            far, near = self.chain(holder), self.chain(holder)
            holder.put(far)
            reader.put(near)
            for keys in (far, near):
                _until(lambda keys=keys: reader.has(keys), "the directory to know of a chain")
            with without_collector():
                pairs = [
                    (_span_ms(lambda: _expect(ask(reader, far), 1)), _span_ms(lambda: _expect(ask(reader, near), 1)))
                    for _ in range(self.sizes.questions)
                ]
            holder.client.evict(holder.space)
            reader.client.evict(reader.space)
        spans = sorted(span for span, _ in pairs)
        value, p99 = spans[len(spans) // 2], spans[len(spans) * 99 // 100]
        floor = statistics.median(floor for _, floor in pairs)
        return Figure(name, value, "ms", floor, floor / value, p99, 1.0, is_ratio=False, note=note)

    def hot_prefix(self) -> Figure:
        """Clients of all nodes but the last read one prefix, by TCP from its holder and then each from its own node."""
        nodes = self._names[: max(len(self._names) - 1, 2)]
        with self.at(*nodes, blocks=self.sizes.hot, block_bytes=MIB) as all_at:
            keys = self.chain(all_at[0])
            all_at[0].put(keys)
            targets = _buffers(self.sizes.hot, MIB)
            one = self.cluster.nodes[nodes[0]].cairn
            alone, alone_busy = _rate([(one.tcp_address, one.token)] * READERS, keys, self.sizes.hot_s)
            for at in all_at:
                _until(lambda at=at: at.get(keys, targets) == len(keys), "every node to have a copy")
            addresses = [self.cluster.nodes[nodes[number % len(nodes)]].cairn for number in range(READERS)]
            shared, shared_busy = _rate([(cairn.address, cairn.token) for cairn in addresses], keys, self.sizes.hot_s)
            for at in all_at:
                at.client.evict(at.space)
        note = (
            f"{READERS} clients of {len(nodes)} nodes read {self.sizes.hot} MiB; floor: all of them over TCP from its one"
            f" holder; of {os.cpu_count()} cores {alone_busy:.0%} were busy with one holder, {shared_busy:.0%} with all"
        )
        return Figure("hot_prefix", shared, "GB/s", alone, shared / alone, None, 2.5, is_ratio=True, note=note)

    # Nodes that are killed.

    def holder_killed(self, name: str, copies: int) -> Figure:
        """The first get of a chain after a holder of it was killed."""
        *held, reader_name = self._names[: copies + 1] + self._names[-1:]
        spans = []
        for _ in range(self.sizes.kills):
            with self.at(*held, reader_name, blocks=64, block_bytes=64 << 10) as (*holders, reader):
                keys, met = self.chain(reader), self.chain(reader)
                for holder in holders:
                    holder.put(keys)
                    holder.put(met)
                holding = set(held)
                _until(lambda: _holders(reader, keys) == holding, "the directory to know of all holders")
                targets = _buffers(64, 64 << 10)
                _expect(reader.get(met, targets), 64)  # the connections are there
                self.cluster.nodes[held[0]].kill()
                spans.append(_span_ms(lambda: _expect(reader.get(keys, targets), 64 if copies else 0)))
            self._heal()
        other = "another node has it too" if copies else "no other node has it: a miss"
        note = f"64 x 64 KiB at once after kill -9 of a holder; {other}; p99 is the longest of {len(spans)}"
        return Figure(name, statistics.median(spans), "ms", None, None, max(spans), 50.0, is_ratio=False, note=note)

    def holder_killed_amid(self) -> Figure:
        """A get during which one of two holders is killed: what it takes from then on."""
        spans = []
        for _ in range(self.sizes.kills):
            with self.at(*self._names[:2], self._names[-1], blocks=self.sizes.hot, block_bytes=MIB) as (
                *holders,
                reader,
            ):
                keys = self.chain(reader)
                for holder in holders:
                    holder.put(keys)
                holding = set(self._names[:2])
                _until(lambda: _holders(reader, keys) == holding, "the directory to know of all holders")
                targets = _buffers(self.sizes.hot, MIB)
                with ThreadPoolExecutor(1) as pool:
                    got = pool.submit(reader.get, keys, targets)
                    pause(0.02)
                    began = time.perf_counter()
                    self.cluster.nodes[self._names[0]].kill()
                    _expect(got.result(), len(keys))
                    spans.append((time.perf_counter() - began) * 1000)
            self._heal()
        note = f"{self.sizes.hot} x 1 MiB by two holders, one killed after 20 ms; from then until all is there"
        value = statistics.median(spans)
        return Figure("holder_killed_amid", value, "ms", None, None, max(spans), 1000.0, is_ratio=False, note=note)

    def directory_lost(self, name: str, killed: Sequence[str]) -> Figure:
        """Homes go for good: until each of the others finds all that each other one has."""
        left = [other for other in self._names if other not in killed]
        with self._told(left) as (all_at, chains):
            began = time.perf_counter()
            for node in killed:
                self.cluster.nodes[node].kill()
            spent_s = _found_after(began, all_at, chains)
        self._heal()
        note = f"kill -9 of {len(killed)} of {len(self._names)} nodes, until every block of one is found from another"
        return self._lost_figure(name, spent_s, chains, note)

    def directory_lost_but_one(self) -> Figure:
        """All homes but the holder are killed and started again, with nothing in them."""
        holder, *killed = self._names
        with self._told([holder]) as (_, chains):
            for node in killed:
                self.cluster.nodes[node].kill()
            self.cluster.start_nodes(killed)
            began = time.perf_counter()
            with self.at(*killed, blocks=LONG, block_bytes=SMALL_BYTES) as all_at:
                spent_s = _found_after(began, all_at, chains)
        self._heal()
        note = f"kill -9 of {len(killed)} of {len(self._names)} nodes; from when they serve again until each finds all"
        return self._lost_figure("directory_lost_but_one", spent_s, chains, note)

    def _lost_figure(self, name: str, spent_s: float, chains: Sequence[Sequence[BlockKey]], note: str) -> Figure:
        blocks = len(chains) * LONG
        return Figure(
            name, spent_s, "s", None, None, None, 3.0, is_ratio=False, note=f"{note}; {blocks:,} blocks survive"
        )

    @contextmanager
    def _told(self, names: Sequence[str]) -> Iterator[tuple[list[At], list[list[BlockKey]]]]:
        """Each of these nodes has chains, and all homes know of them."""
        with self.at(*names, blocks=LONG, block_bytes=SMALL_BYTES) as all_at:
            chains = [self.chain(at) for at in all_at for _ in range(self.sizes.lost)]
            for number, keys in enumerate(chains):
                all_at[number // self.sizes.lost].put(keys)
            _found_after(time.perf_counter(), all_at, chains)
            yield all_at, chains

    def _heal(self) -> None:
        """All nodes are there, and empty."""
        self.cluster.start_nodes([name for name in self._names if name not in self.cluster.alive])
        self.cluster.until_whole()
        self.cluster.empty()
        self.cluster.until_converged()


def _found_after(began: float, all_at: Sequence[At], chains: Sequence[Sequence[BlockKey]]) -> float:
    """Seconds from `began` until every node has found every chain."""
    waiting = [(at, keys) for keys in chains for at in all_at]
    while waiting:
        waiting = [(at, keys) for at, keys in waiting if not at.has(keys)]
        assert time.perf_counter() - began < GIVE_UP_S, f"{len(waiting)} chains were not found"
    return time.perf_counter() - began


def _holders(at: At, keys: Sequence[BlockKey]) -> set[str]:
    """Who has all blocks of a chain."""
    found = [set(holders) for holders in at.client.whereabouts(at.space, keys)]
    return set.intersection(*found)


def _buffers(blocks: int, block_bytes: int) -> list[memoryview]:
    """That were written to before."""
    region = mapped(-(-blocks * block_bytes // MIB)).region
    return [region.view(number * block_bytes, block_bytes) for number in range(blocks)]


def _span_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - began) / 1e6


def _expect(found: int, expected: int) -> None:
    assert found == expected, f"{found} instead of {expected}"


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        pause(LOOK_S)


def _rate(addresses: Sequence[tuple[str, str]], keys: list[BlockKey], seconds: float) -> tuple[float, float]:
    """GB/s of processes that read the same chain at once, one at each address, and how busy the processors were."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(addresses) + 1), context.Queue()
    running = [context.Process(target=_read, args=(*address, keys, seconds, barrier, results)) for address in addresses]
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


def _read(address: str, token: str, keys: list[BlockKey], seconds: float, barrier: threading.Barrier,
          results: Any) -> None:  # fmt: skip
    with BlockingClient(address, token, timeout_s=PATIENCE_S) as client:
        space = client.find(str(MIB))
        targets = _buffers(len(keys), MIB)
        client.get(space, keys, targets)  # maps all slabs
        barrier.wait(PATIENCE_S)
        began, got = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            got += client.get(space, keys, targets)
        results.put(got * MIB / (time.perf_counter() - began) / 1e9)
