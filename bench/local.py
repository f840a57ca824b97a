"""One node on this host and its clients: shared memory, Unix socket and TCP loopback."""

import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Figure, against_floor, latency
from bench.node import running_node
from bench.table import hash_8590, table_figures
from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace
from kvstore.prefix import Namespace
from kvstore.region import Region, make_region
from kvstore.types import BlockKey

MIB = 1 << 20
RESIDENT_BLOCKS = 192  # of 1 MiB: far more than the last-level cache
BATCH = 16
CLIENTS = 4
CLIENT_SECONDS = 3.0


def run(names: set[str]) -> Iterator[Figure]:
    """All figures whose name is in `names`, or all for an empty set. Takes about a minute."""

    def wanted(*candidates: str) -> bool:
        return not names or bool(names & set(candidates))

    if wanted("hash_8590_b16"):
        yield hash_8590()
    if wanted("table_match", "table_put", "table_evict", "table_memory"):
        yield from (figure for figure in table_figures(200_000) if wanted(figure.name))
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as run_dir, running_node(Path(run_dir)) as node:
        bench = Bench(node.address, node.tcp_address, node.token)
        try:
            for name, measure in bench.measures().items():
                if wanted(name):
                    yield measure()
            if wanted("clients_4", "clients_4_fairness"):
                yield from (figure for figure in clients(node.address, bench.big_keys) if wanted(figure.name))
        finally:
            bench.close()


@dataclass(slots=True)
class Mapped:
    """A region of `blocks` of 1 MiB with something in it, for floors and targets."""

    region: Region
    views: list[memoryview]
    arrays: list[Any]


def mapped(blocks: int) -> Mapped:
    region = make_region("bench", blocks * MIB)
    views = [region.view(number * MIB, MIB) for number in range(blocks)]
    arrays = [np.frombuffer(view, np.uint8) for view in views]
    for number, array in enumerate(arrays):
        array[:] = number % 251
    return Mapped(region, views, arrays)


class Bench:
    def __init__(self, address: str, tcp_address: str, token: str) -> None:
        self.address, self.tcp_address, self.token = address, tcp_address, token
        self.verified = BlockingClient(address, token, timeout_s=30)
        self.relaxed = BlockingClient(address, token, verify=False, timeout_s=30)
        self.tcp = BlockingClient(tcp_address, token, timeout_s=30)
        big = Namespace(model="bench", dtype="uint8", layout="raw", block_tokens=16, layers=1, block_bytes=MIB)
        small = Namespace(model="bench", dtype="uint8", layout="raw", block_tokens=16, layers=1)
        self.big = {client: client.open("big", big) for client in (self.verified, self.relaxed, self.tcp)}
        self.small = self.verified.open("small", small)
        self.source = mapped(RESIDENT_BLOCKS)
        self.target = mapped(BATCH)
        self.big_keys = [BlockKey(os.urandom(16)) for _ in range(RESIDENT_BLOCKS)]
        self._store_big()
        self.random = random.Random(1)
        self._picked = 0

    def _store_big(self) -> None:
        for start in range(0, RESIDENT_BLOCKS, BATCH):
            batch = slice(start, start + BATCH)
            self.verified.put(self.big[self.verified], self.big_keys[batch], self.source.views[batch])

    def close(self) -> None:
        for client in (self.verified, self.relaxed, self.tcp):
            client.close()

    def measures(self) -> dict[str, Callable[[], Figure]]:
        return {
            "get_copy_1m_b16": lambda: self.get_copy("get_copy_1m_b16", self.relaxed, BATCH, 0.90),
            "get_verified_1m_b16": lambda: self.get_copy("get_verified_1m_b16", self.verified, BATCH, 0.60),
            "get_copy_1m_b1": lambda: self.get_copy("get_copy_1m_b1", self.relaxed, 1, 0.85),
            "get_view_1m_b16": self.get_view,
            "get_4k": lambda: self.get_small("get_4k", 4096, 6.0),
            "get_64k": lambda: self.get_small("get_64k", 65_536, 10.0),
            "exists_17": lambda: self.match("exists_17", 17, 10.0),
            "match_1024": lambda: self.match("match_1024", 1024, 25.0),
            "put_1m_b16": self.put_big,
            "put_64k": self.put_small,
            "tcp_get_1m_b16": self.tcp_get,
        }

    def _pick(self, blocks: int) -> slice:
        """Another run of resident blocks each time, so that no cache holds it."""
        self._picked = (self._picked + BATCH + 3) % (RESIDENT_BLOCKS - blocks + 1)
        return slice(self._picked, self._picked + blocks)

    def get_copy(self, name: str, client: BlockingClient, blocks: int, target: float) -> Figure:
        space, targets = self.big[client], self.target.views[:blocks]

        def product() -> None:
            assert client.get(space, self.big_keys[self._pick(blocks)], targets) == blocks

        note = f"local get of {blocks} x 1 MiB into the caller's buffer; floor: np.copyto between mapped regions"
        return against_floor(name, product, lambda: self._copy(blocks), target=target, note=note)

    def _copy(self, blocks: int) -> None:
        for target, source in zip(self.target.arrays, self.source.arrays[self._pick(blocks)], strict=False):
            np.copyto(target, source)

    def get_view(self) -> Figure:
        space = self.big[self.verified]

        def product() -> None:
            views = self.verified.views(space, self.big_keys[self._pick(BATCH)])
            assert len(views) == BATCH
            assert all(view.is_valid() for view in views)

        note = "16 x 1 MiB in place, looked up and validated; floor: slicing 16 views"
        floor = lambda: [self.source.region.view(n * MIB, MIB) for n in range(BATCH)]  # noqa: E731
        return latency("get_view_1m_b16", product, floor, most_us=35.0, note=note)

    def _fill_small(self, size: int, blocks: int) -> list[BlockKey]:
        keys = [BlockKey(os.urandom(16)) for _ in range(blocks)]
        for key in keys:
            self.verified.put(self.small, [key], [os.urandom(size)])
        return keys

    def get_small(self, name: str, size: int, most_us: float) -> Figure:
        keys = self._fill_small(size, 1000)
        target = bytearray(size)
        sources = [np.frombuffer(os.urandom(size), np.uint8) for _ in range(1000)]
        array = np.frombuffer(target, np.uint8)

        def product() -> None:
            assert self.verified.get(self.small, [self.random.choice(keys)], [target]) == 1

        note = f"one {size // 1024} KiB block, verified; floor: np.copyto"
        floor = lambda: np.copyto(array, self.random.choice(sources))  # noqa: E731
        return latency(name, product, floor, most_us=most_us, note=note)

    def match(self, name: str, length: int, most_us: float) -> Figure:
        keys = [BlockKey(os.urandom(16)) for _ in range(length)]
        present = length * 7 // 10  # most probes: neither all nor nothing is here
        for start in range(0, present, 256):
            batch = keys[start : min(start + 256, present)]
            self.verified.put(self.small, batch, [b"x" * 256] * len(batch), keys[start - 1] if start else None)
        known = set(keys[:present])

        def product() -> None:
            assert self.verified.match(self.small, keys) == present

        floor = lambda: sum(key in known for key in keys)  # noqa: E731
        note = f"longest prefix of {length} blocks, 70 % of them there; floor: each looked up in a set"
        return latency(name, product, floor, most_us=most_us, note=note)

    def put_big(self) -> Figure:
        space = self.big[self.verified]

        def product() -> None:
            keys = [BlockKey(os.urandom(16)) for _ in range(BATCH)]
            report = self.verified.put(space, keys, self.source.views[self._pick(BATCH)])
            assert report.stored == BATCH

        slots = mapped(RESIDENT_BLOCKS).arrays  # as many as the caches cannot hold, like a node's

        def floor() -> None:
            sources = self.source.arrays[self._pick(BATCH)]
            for slot, source in zip(slots[self._pick(BATCH)], sources, strict=True):
                np.copyto(slot, source)

        note = "local put of 16 x 1 MiB with checksums into a full node; floor: np.copyto between mapped regions"
        figure = against_floor("put_1m_b16", product, floor, target=0.75, note=note, rounds=150)
        self.verified.evict(space)
        self._store_big()
        return figure

    def put_small(self) -> Figure:
        block = os.urandom(65_536)

        def product() -> None:
            assert self.verified.put(self.small, [BlockKey(os.urandom(16))], [block]).stored == 1

        with echo() as ask:
            note = "one 64 KiB block; floor: a round trip of one byte to another process over a Unix socket"
            return latency("put_64k", product, ask, most_us=120.0, note=note, runs=1500)

    def tcp_get(self) -> Figure:
        space, targets = self.big[self.tcp], self.target.views

        def product() -> None:
            assert self.tcp.get(space, self.big_keys[self._pick(BATCH)], targets) == BATCH

        with raw_tcp(self.source.views[:BATCH]) as receive:
            note = "16 x 1 MiB over TCP loopback, verified; floor: recv_into from a bare process"
            floor = lambda: receive(targets)  # noqa: E731
            return against_floor("tcp_get_1m_b16", product, floor, target=0.8, note=note, rounds=100)


@contextmanager
def echo() -> Iterator[Callable[[], object]]:
    """A process that answers each byte with a byte."""
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("fork").Process(target=_echo, args=(ours, theirs), daemon=True)
    process.start()
    theirs.close()

    def ask() -> None:
        ours.sendall(b"x")
        ours.recv(1)

    try:
        yield ask
    finally:
        ours.close()
        process.join(5)


def _echo(ours: socket.socket, theirs: socket.socket) -> None:
    ours.close()
    while theirs.recv(1):
        theirs.sendall(b"y")


@contextmanager
def raw_tcp(blocks: list[memoryview]) -> Iterator[Callable[[list[memoryview]], None]]:
    """A process that sends the same blocks for each byte it is sent, as fast as a bare socket can."""
    listener = socket.create_server(("127.0.0.1", 0))
    process = multiprocessing.get_context("fork").Process(target=_send_blocks, args=(listener, blocks), daemon=True)
    process.start()
    stream = socket.create_connection(listener.getsockname())
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.close()

    def receive(targets: list[memoryview]) -> None:
        stream.sendall(b"x")
        for target in targets:
            filled = 0
            while filled < len(target):
                filled += stream.recv_into(target[filled:])

    try:
        yield receive
    finally:
        stream.close()
        process.join(5)


def _send_blocks(listener: socket.socket, blocks: list[memoryview]) -> None:
    stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while stream.recv(1):
        for block in blocks:
            stream.sendall(block)


def clients(address: str, keys: list[BlockKey]) -> list[Figure]:
    """Throughput of four client processes at once beside that of one, and how evenly they share it."""
    alone = _rates(address, keys, 1)
    together = _rates(address, keys, CLIENTS)
    total, single = sum(together), statistics.median(alone)
    fairness = max(together) / max(min(together), 1e-9)
    note = "local verified gets of 16 x 1 MiB by four processes at once; floor: one process"
    return [
        Figure("clients_4", total, "GB/s", single, total / single, None, 1.0, is_ratio=True, note=note),
        Figure("clients_4_fairness", fairness, "max/min", None, None, None, 2.0, is_ratio=False, note="of the four"),
    ]


def _rates(address: str, keys: list[BlockKey], processes: int) -> list[float]:
    """GB/s of each of so many processes while all of them read."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    running = [context.Process(target=_read, args=(address, keys, barrier, results)) for _ in range(processes)]
    for process in running:
        process.start()
    rates = [results.get(timeout=60) for _ in running]
    for process in running:
        process.join(10)
    return rates


def _read(address: str, keys: list[BlockKey], barrier: threading.Barrier, results: Any) -> None:
    with BlockingClient(address, timeout_s=30) as client:
        space: OpenSpace = client.find("big")
        targets = mapped(BATCH).views
        client.get(space, keys[:BATCH], targets)
        for start in range(0, len(keys) - BATCH, BATCH):
            client.get(space, keys[start : start + BATCH], targets)  # maps all slabs
        barrier.wait(60)
        began, moved, start = time.perf_counter(), 0, os.getpid() % len(keys)
        while time.perf_counter() - began < CLIENT_SECONDS:
            start = (start + BATCH + 3) % (len(keys) - BATCH)
            moved += client.get(space, keys[start : start + BATCH], targets) * MIB
        results.put(moved / (time.perf_counter() - began) / 1e9)
