"""Figures of RDMA: what a READ costs in Python, over the software double; gets beside bare READs, on a device."""

import mmap
import os
import secrets
import select
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.measure import Figure, against_floor, spans_us
from bench.node import running_node
from engine_client.blocking import BlockingClient
from kvstore.copier import address_of
from kvstore.prefix import Namespace
from kvstore.transport.rdma.memory import Memory
from kvstore.transport.rdma.nic import DEFAULTS, Options, open_nics
from kvstore.transport.rdma.peer import Peer
from kvstore.transport.rdma.topology import has_devices
from kvstore.transport.rdma.transfer import Fetch, Transfer
from kvstore.transport.rdma.verbs import (
    SUCCESS,
    Access,
    Domain,
    Own,
    QueueLimits,
    QueuePair,
    Read,
    Remote,
    Verbs,
    load_verbs,
)
from kvstore.wire_rdma import Join
from tests.soft_verbs import SoftFabric, SoftVerbs

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 15
WAIT_S = 60.0
PATIENT = Options(hung_s=30.0)  # an emulated machine is slow
NAMES = ("rdma_python_per_read", "rdma_get_1m_b16", "rdma_get_64k_b64")
BATCHES = {"rdma_get_1m_b16": (MIB, 16, 0.85), "rdma_get_64k_b64": (64 * KIB, 64, 0.7)}


def run(names: set[str], binding: str = "") -> Iterator[Figure]:
    """Only those named, or all that can be measured here; `binding` is pyverbs or ibverbs."""
    wanted = names or set(NAMES)
    if "rdma_python_per_read" in wanted:
        yield python_per_read()
    if wanted & BATCHES.keys() and has_devices():
        yield from _gets(load_verbs(binding), wanted)


def python_per_read() -> Figure:
    """64 READs of 64 KiB in one transfer, less what the double takes for the same READs by itself."""
    with ExitStack() as stack:
        ends = _Ends(SoftVerbs(SoftFabric()), 64 * 64 * KIB, stack)
        fetches = [
            Fetch(
                ends.target + at * 64 * KIB, ends.memory.lkeys, ends.source + at * 64 * KIB, ends.memory.rkeys, 64 * KIB
            )
            for at in range(64)
        ]

        def transfer() -> None:
            reading = Transfer(fetches, MIB)
            ends.paths.start(reading)
            for fd in ends.paths.fds():
                ends.paths.progress(fd)
            assert reading.is_complete

        bare = ends.bare(64 * KIB, 64)
        ours, floor = spans_us(transfer, 1000), spans_us(bare, 1000)
    spent = sorted((one - other) / 64 for one, other in zip(ours, floor, strict=True))
    middle, last = spent[len(spent) // 2], spent[len(spent) * 99 // 100]
    note = "own Python work of one READ of 64, the double's own taken off"
    return Figure("rdma_python_per_read", middle, "us", None, None, last, 5.0, is_ratio=False, note=note)


def _gets(verbs: Verbs, wanted: set[str]) -> Iterator[Figure]:
    with ExitStack() as stack:
        ends = _Ends(verbs, 32 * MIB, stack)
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="cairn-bench-"))
        node = stack.enter_context(running_node(Path(run_dir), "128MiB", "--tiers.dram.slab=64MiB"))
        options: dict[str, Any] = {"transport": "rdma", "rdma": PATIENT, "verbs": verbs, "timeout_s": 60.0}
        client = stack.enter_context(BlockingClient(node.tcp_address, node.token, **options))
        target = bytearray(16 * MIB)
        client.register(target)
        for name, (size, count, least) in BATCHES.items():
            if name not in wanted:
                continue
            space = client.open(name, Namespace(model=name, dtype="u8", layout="flat", block_tokens=16, layers=1))
            keys = space.keys(range(16 * count))
            client.put(space, keys, [os.urandom(size) for _ in keys])
            views = [memoryview(target)[at * size : (at + 1) * size] for at in range(count)]

            def get(space: Any = space, keys: Any = keys, views: Any = views) -> None:
                assert client.get(space, keys, views) == len(keys)

            note = f"{count} blocks into registered memory, verified, beside bare READs ({verbs.name}, as many at once)"
            yield against_floor(name, get, ends.bare(size, count), target=least, note=note, rounds=ROUNDS)


class _Ends:
    """Two queue pairs on the first device, in this process, and paths like a client's, over `size` bytes of each."""

    def __init__(self, verbs: Verbs, size: int, stack: ExitStack) -> None:
        opened = open_nics(verbs, ())
        stack.callback(opened.close)
        nic = opened.nics[0]
        domain = nic.context.domain()
        stack.callback(domain.close)
        self._map = mmap.mmap(-1, 2 * size)
        self.source = address_of(memoryview(self._map))
        self.target = self.source + size
        self.memory = Memory([domain], self.source, 2 * size, Access.LOCAL_WRITE | Access.REMOTE_READ)
        stack.callback(self.memory.close)
        limits = QueueLimits(sends=128, receives=1)
        self._one, other = domain.queue_pair(limits), domain.queue_pair(limits)
        for pair in (self._one, other):
            stack.callback(pair.close)
        psns = secrets.randbits(24), secrets.randbits(24)
        for pair, peer, (mine, theirs) in ((self._one, other, psns), (other, self._one, psns[::-1])):
            own = Own(mine, nic.port.number, nic.gid.number, nic.port.mtu_bytes)
            pair.connect(own, Remote(peer.number, theirs, nic.gid.raw, nic.port.lid))
        self.paths = self._joined(opened.nics[:1], domain, stack).paths

    def _joined(self, nics: Sequence[Any], domain: Domain, stack: ExitStack) -> Peer:
        client, node = (Peer(nics, [domain], DEFAULTS, now=lambda: 0.0) for _ in range(2))
        for peer in (node, client):
            stack.callback(peer.close)
        ports = tuple(nic.described() for nic in nics)
        paths, channel = client.propose(ports)
        client.settle(node.accept(Join(1, ports, paths, channel)), range(len(paths)))
        return client

    def bare(self, size: int, count: int) -> Callable[[], None]:
        """`count` READs of `size` bytes, posted together, one completion, waited for asleep."""
        pair = self._one
        lkey, rkey = self.memory.lkeys[0], self.memory.rkeys[0]
        reads = [
            Read(at, self.target + at * size, lkey, size, self.source + at * size, rkey, at == count - 1)
            for at in range(count)
        ]

        def read() -> None:
            pair.post_reads(reads)
            _wait(pair)

        return read


def _wait(pair: QueuePair) -> None:
    while True:
        pair.arm()
        if done := pair.poll(16):
            assert all(one.status == SUCCESS for one in done)
            return
        assert select.select([pair.fd], [], [], WAIT_S)[0], "no completion"
