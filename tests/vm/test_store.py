"""The whole store on real verbs: a node process and clients that put, get, are cancelled, and are killed."""

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from engine_client.blocking import BlockingClient
from engine_client.client import Client
from engine_client.steps import OpenSpace
from kvstore.errors import DeadlineExceeded, StoreError, TransportError
from kvstore.transport.rdma.nic import Options
from kvstore.transport.rdma.paths import Paths
from kvstore.transport.rdma.verbs import BINDINGS, load_verbs
from kvstore.types import BlockKey
from tests.system.children import Child
from tests.system.nodes import NodeProcess, content, namespace, pause, until

BLOCK = 192 << 10
BLOCKS = 6
PATIENCE_S = 30.0
STORM, KILLS = 500, 6  # with each binding
SPACE = namespace("real")
SOFT = Options(queue_pairs=1, hung_s=5.0)  # an emulated NIC is slow
_chains = count()


class Host:
    """A node with one of the bindings, and clients with the same."""

    def __init__(self, binding: str, node: NodeProcess) -> None:
        self.binding = binding
        self.node = node
        self.channels = event_channels(node)  # without clients

    def client(self, **named: Any) -> BlockingClient:
        verbs = load_verbs(self.binding)
        options = {"transport": "rdma", "verbs": verbs, "rdma": SOFT, "timeout_s": PATIENCE_S} | named
        return BlockingClient(self.node.tcp, self.node.token, **options)


@pytest.fixture(scope="module", params=BINDINGS)
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """At the end the node stops in peace: all its verbs objects could be closed."""
    binding = request.param
    with pytest.MonkeyPatch.context() as patch:
        if binding == "pyverbs":
            pytest.importorskip("pyverbs.device", reason="pyverbs is of another Python")
        else:
            patch.delenv("PYTHONPATH", raising=False)  # where pyverbs comes from
        node = NodeProcess(tmp_path_factory.mktemp(binding)).start()
        try:
            assert binding_of(node) == binding
            yield Host(binding, node)
            node.stop()
        finally:
            node.kill()


@pytest.fixture(autouse=True)
def _nothing_is_left(host: Host) -> Iterator[None]:
    yield
    until(lambda: event_channels(host.node) == host.channels, "its clients to be gone", PATIENCE_S)
    host.node.assert_clean()
    host.node.empty()


def binding_of(node: NodeProcess) -> str:
    maps = Path(f"/proc/{node.pid}/maps").read_text()
    return next((name for name in BINDINGS if f"/{name}/" in maps), "")


def event_channels(node: NodeProcess) -> int:
    """One for each open device, and one for each queue pair."""
    channels = 0
    for fd in Path(f"/proc/{node.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            channels += "infinibandevent" in os.readlink(fd)
    return channels


def chain(space: OpenSpace, blocks: int = BLOCKS) -> list[BlockKey]:
    """Keys that no other test has."""
    return space.keys([next(_chains), *range(4 * blocks - 1)])


def put(client: BlockingClient, space: OpenSpace, keys: list[BlockKey]) -> None:
    report = client.put(space, keys, [content(key, BLOCK) for key in keys])
    assert report.stored == len(keys), report


def got(client: BlockingClient, space: OpenSpace, keys: list[BlockKey]) -> int:
    """How many blocks there are; what there is, is right."""
    targets = [bytearray(BLOCK) for _ in keys]
    found = client.get(space, keys, targets)
    for key, target in zip(keys[:found], targets, strict=False):
        assert target == content(key, BLOCK), "wrong bytes"
    return found


def paths_of(client: BlockingClient | Client) -> Paths:
    link = client._link if isinstance(client, BlockingClient) else client._current and client._current[0]
    assert link is not None
    assert link.remote is not None, "it does not go by RDMA"
    return link.remote.peer.paths


def answers(client: BlockingClient, space: OpenSpace) -> bool:
    try:
        client.match(space, space.keys(range(4)))
    except TransportError:
        return False
    return True


def test_blocks_are_put_and_got_by_reads_on_every_device(host: Host) -> None:
    with host.client() as client:
        space = client.open("s", SPACE)
        keys = chain(space)
        put(client, space, keys)
        assert got(client, space, keys) == BLOCKS
        paths = paths_of(client).paths
        assert sum(path.rate.total_bytes for path in paths) == BLOCKS * BLOCK
        assert all(path.is_up and path.rate.total_bytes for path in paths)
        assert len(paths) == len(os.listdir("/sys/class/infiniband"))
        counters = host.node.counters()
        assert counters["stored_bytes"]["rdma"] == counters["loaded_bytes"]["rdma"] == BLOCKS * BLOCK


def test_registered_buffers_are_read_into_in_place(host: Host) -> None:
    with host.client() as client:
        space = client.open("s", SPACE)
        keys = chain(space)
        buffer = bytearray(BLOCKS * BLOCK)
        registered = client.register(buffer)
        views = [memoryview(buffer)[at * BLOCK : (at + 1) * BLOCK] for at in range(BLOCKS)]
        for view, key in zip(views, keys, strict=True):
            view[:] = content(key, BLOCK)
        assert client.put(space, keys, views).stored == BLOCKS
        buffer[:] = bytes(len(buffer))
        assert client.get(space, keys, views) == BLOCKS
        assert buffer == b"".join(content(key, BLOCK) for key in keys)
        assert client._rdma is not None
        assert client._rdma.staged_bytes == 0
        assert registered.is_quiet
        registered.close()


def test_slabs_that_go_and_come_under_gets_give_right_bytes_or_misses(host: Host) -> None:
    with host.client() as client, host.client() as writer, host.node.admin() as admin:
        space, theirs = client.open("s", SPACE), writer.open("s", SPACE)
        keys, enough, found = chain(space), threading.Event(), []

        def read() -> None:
            while not enough.is_set():
                found.append(got(client, space, keys))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for _ in range(2):
                put(writer, theirs, keys)
                seen = len(found)
                until(lambda seen=seen: len(found) > seen + 1, within_s=PATIENCE_S)
                writer.evict(theirs)
                for capacity_bytes in (1 << 20, 16 << 20):
                    admin.set_tier("dram", capacity_bytes=capacity_bytes)
                    until(lambda: host.node.is_grown, within_s=PATIENCE_S)
        finally:
            enough.set()
            reader.join()
        put(writer, theirs, keys)
        assert got(client, space, keys) == BLOCKS
        assert max(found) == BLOCKS


def test_a_node_that_is_stopped_costs_a_call_its_time_limit(host: Host) -> None:
    with host.client() as client:
        space = client.open("s", SPACE)
        keys = chain(space)
        put(client, space, keys)
        host.node.freeze()
        try:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                client.get(space, keys, [bytearray(BLOCK) for _ in keys], within_s=0.5)
            assert time.monotonic() - began < 3.0
        finally:
            host.node.thaw()
        until(lambda: answers(client, space), within_s=PATIENCE_S)
        assert got(client, space, keys) == BLOCKS


def test_a_storm_of_cancelled_gets_leaves_nothing_behind(host: Host) -> None:
    async def run() -> float:
        chance = random.Random(1)
        verbs = load_verbs(host.binding)
        options = {"transport": "rdma", "verbs": verbs, "rdma": SOFT, "timeout_s": PATIENCE_S}
        took_s = []
        async with Client(host.node.tcp, host.node.token, **options) as client:  # type: ignore[arg-type]
            space = await client.open("s", SPACE)
            keys = chain(space, 2)
            await client.put(space, keys, [content(key, BLOCK) for key in keys])
            targets = [bytearray(BLOCK) for _ in keys]
            for _ in range(STORM):
                getting = asyncio.create_task(client.get(space, keys, targets))
                for _ in range(chance.randrange(1, 6)):
                    await asyncio.sleep(0)
                getting.cancel()
                began = time.perf_counter()
                with suppress(asyncio.CancelledError):
                    await getting
                took_s.append(time.perf_counter() - began)
            assert await client.get(space, keys, targets) == 2
            assert targets == [bytearray(content(key, BLOCK)) for key in keys]
            assert client._rdma is not None
            assert client._rdma.staging.taken_bytes == 0
            paths = paths_of(client)
            assert (paths.quarantined_bytes, paths.is_idle) == (0, True)
        return sorted(took_s)[STORM // 2]

    print(f"{host.binding}: a cancelled get returned after {asyncio.run(run()) * 1e6:.0f} us at the median")


def work(pipe: Connection, host: Host, seed: int) -> None:
    """Put and get until killed."""
    with host.client() as client:
        space = client.open("s", SPACE)
        for round_ in count():
            keys = space.keys([1 << 20, seed, round_, *range(4 * BLOCKS - 3)])
            put(client, space, keys)
            assert got(client, space, keys) == BLOCKS
            client.evict(space, keys)
            if not round_:
                pipe.send("working")


def test_clients_that_are_killed_at_any_moment_leave_nothing_behind(host: Host) -> None:
    chance = random.Random(2)
    for seed in range(KILLS):
        with Child(work, host, seed) as child:
            child.hear(PATIENCE_S)
            pause(chance.uniform(0.0, 0.05))
            child.kill()


def test_a_node_that_is_killed_under_gets_and_started_again_serves_on(host: Host) -> None:
    with host.client(transport="auto") as client:
        space = client.open("s", SPACE)
        keys, reading = chain(space), threading.Event()
        put(client, space, keys)
        failures: list[StoreError] = []

        def read() -> None:
            try:
                while True:
                    assert got(client, space, keys) == BLOCKS
                    reading.set()
            except StoreError as error:
                failures.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert reading.wait(PATIENCE_S)
        host.node.kill()
        began = time.monotonic()
        reader.join(PATIENCE_S)
        assert isinstance(failures[0], TransportError), failures
        assert time.monotonic() - began < 5.0
        host.node.start()
        until(lambda: answers(client, space), within_s=PATIENCE_S)
        assert got(client, space, keys) == 0
        put(client, space, keys)
        assert got(client, space, keys) == BLOCKS
