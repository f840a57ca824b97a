"""Events of a live node: followers through restarts and hung nodes, ZeroMQ as a router reads it, REST, the command."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from engine_client import subscription
from engine_client.blocking import BlockingClient
from engine_client.subscription import Standing, Update, subscribe
from kvstore.errors import Forbidden
from tests.system.cairn_process import clean_environ
from tests.system.nodes import PATIENCE_S, NodeProcess, content, free_port, namespace, until

SIZE = 4096
SPACE = namespace(block_bytes=SIZE)
TOPIC = "kv@here@llama"


def free_pair() -> int:
    """A port that is free, and so is the next."""
    while True:
        port = free_port()
        with zmq.Context() as context, context.socket(zmq.PUB) as probe:
            try:
                probe.bind(f"tcp://127.0.0.1:{port}")
                probe.bind(f"tcp://127.0.0.1:{port + 1}")
            except zmq.ZMQError:
                continue
        return port


@pytest.fixture
def node(tmp_path) -> Iterator[NodeProcess]:
    rest, publisher = free_port(), free_pair()
    options = (f"--rest.listen=127.0.0.1:{rest}", f"--events.zmq=127.0.0.1:{publisher}", f"--events.topic={TOPIC}")
    started = NodeProcess(tmp_path, *options, "--events.buffer=256")
    started.rest, started.zmq = f"http://127.0.0.1:{rest}", publisher  # type: ignore[attr-defined]
    started.start()
    yield started
    started.thaw()
    started.stop()


@pytest.fixture
def client(node) -> Iterator[BlockingClient]:
    with BlockingClient(node.unix, timeout_s=PATIENCE_S) as client:
        yield client


def store(client: BlockingClient, seed: int, blocks: int = 4, name: str = "llama") -> list[bytes]:
    space = client.open(name, SPACE)
    keys = space.keys([seed, *range(4 * blocks - 1)])
    client.put(space, keys, [content(key, SIZE) for key in keys])
    return list(keys)


class View:
    """What updates make of a node's blocks, and how they came."""

    def __init__(self, updates: AsyncIterator[Update]) -> None:
        self._updates = updates
        self.keys: set[bytes] = set()
        self.standing = Standing.DEGRADED
        self.resets = 0

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                update = await anext(self._updates)
                self.standing = update.standing
                if update.is_reset:
                    self.resets += 1
                    self.keys.clear()
                for event in update.events:
                    (self.keys.add if event.is_stored else self.keys.discard)(event.key)

    def is_exactly(self, keys: list[bytes]) -> Callable[[], bool]:
        return lambda: self.standing is Standing.EXACT and self.keys == set(keys)


def follow(node: NodeProcess, scenario: Callable[[View], Any], *, by: str = "unix", of: str = "") -> None:
    async def run() -> None:
        address, token = (node.unix, "") if by == "unix" else (node.tcp, node.token)
        async with aclosing(subscribe(address, token, of)) as updates:
            await scenario(View(updates))

    asyncio.run(run())


# Followers


@pytest.mark.parametrize("by", ["unix", "tcp"])
def test_a_follower_has_what_is_there_and_hears_of_what_comes_and_goes(node, client, by):
    first = store(client, 1)

    async def scenario(view: View) -> None:
        await view.until(view.is_exactly(first))
        second = await asyncio.to_thread(store, client, 2)
        await view.until(view.is_exactly(first + second))
        await asyncio.to_thread(client.evict, client.find("llama"), first)
        await view.until(view.is_exactly(second))
        assert view.resets == 1

    follow(node, scenario, by=by)


def test_a_follower_of_a_namespace_hears_of_that_only_and_waits_until_there_is_one(node, client):
    async def scenario(view: View) -> None:
        other = namespace("other", block_bytes=SIZE)
        await asyncio.to_thread(client.open, "other", other)
        task = asyncio.ensure_future(view.until(lambda: view.standing is Standing.EXACT))
        await asyncio.sleep(0.2)
        assert not task.done()
        keys = await asyncio.to_thread(store, client, 1)
        await task
        await view.until(view.is_exactly(keys))

    follow(node, scenario, of="llama")


def test_a_follower_that_missed_more_than_is_kept_takes_a_snapshot(node, client):
    async def scenario(view: View) -> None:
        await view.until(view.is_exactly([]))
        keys: list[bytes] = []
        for seed in range(40):  # 1,280 events while it does not ask
            keys += store(client, seed, 32)
        await view.until(view.is_exactly(keys))
        assert view.resets == 2

    follow(node, scenario)


def test_a_follower_of_a_node_that_is_killed_is_degraded_and_takes_a_snapshot_of_the_next_start(node, client):
    first = store(client, 1)

    async def scenario(view: View) -> None:
        await view.until(view.is_exactly(first))
        node.kill()
        await view.until(lambda: view.standing is Standing.DEGRADED)
        await asyncio.to_thread(node.start)
        await view.until(view.is_exactly([]))
        second = await asyncio.to_thread(store, client, 2)
        await view.until(view.is_exactly(second))
        assert view.resets == 2

    follow(node, scenario)


def test_a_follower_of_a_hung_node_is_degraded_and_goes_on_without_a_snapshot(node, client, monkeypatch):
    monkeypatch.setattr(subscription, "ANSWER_S", 0.5)
    first = store(client, 1)

    async def scenario(view: View) -> None:
        await view.until(view.is_exactly(first))
        node.freeze()
        await view.until(lambda: view.standing is Standing.DEGRADED)
        node.thaw()
        await view.until(view.is_exactly(first))
        assert view.resets == 1

    follow(node, scenario)


def test_a_follower_with_a_wrong_token_is_told_so(node):
    async def scenario() -> None:
        async with aclosing(subscribe(node.tcp, "wrong-token-of-some-length")) as updates:
            await anext(updates)

    with pytest.raises(Forbidden):
        asyncio.run(scenario())


def test_what_the_disk_kept_is_told_after_a_restart(tmp_path):
    settings = {"path": tmp_path / "disk", "capacity": "16MiB", "slab": "1MiB", "admission": "all", "write": "through"}
    node = NodeProcess(tmp_path, *(f"--tiers.nvme.{name}={value}" for name, value in settings.items())).start()
    with BlockingClient(node.unix, timeout_s=PATIENCE_S) as client:

        def disk() -> dict[str, Any]:
            return next(row for row in client.stat()["tiers"] if row["tier"] == "nvme")

        until(lambda: not disk()["is_recovering"] and disk()["capacity_bytes"])
        keys = store(client, 1)
        until(lambda: disk()["blocks"] == len(keys))
    node.stop()
    node.start()
    follow(node, lambda view: view.until(view.is_exactly(keys)))
    node.stop()


# ZeroMQ, read as a router does: kinds by tag, and counts of how often each block is stored in each medium


class Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


DECODE = msgspec.msgpack.Decoder(Batch).decode


class Router:
    """Reads a publisher from its first message on: the first ones are asked for, as a router that comes late does."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._news = self._context.socket(zmq.SUB)
        self._news.subscribe(TOPIC)
        self._news.connect(f"tcp://127.0.0.1:{port}")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(f"tcp://127.0.0.1:{port + 1}")
        self.next = 0
        self.cleared = 0
        self.counts: Counter[tuple[bytes, str | None]] = Counter()
        self.parents: dict[bytes, bytes | None] = {}

    def close(self) -> None:
        self._context.destroy()

    def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(int(PATIENCE_S / 0.1)):
            self.replay(self.next)
            while self._news.poll(100):
                topic, sequence, payload = self._news.recv_multipart()
                assert topic == TOPIC.encode()
                self.take(int.from_bytes(sequence, "big"), payload)
            if condition():
                return
        pytest.fail(f"in vain: {self.counts}")

    def replay(self, start: int) -> int:
        """How many batches came."""
        self._replay.send_multipart((b"", start.to_bytes(8, "big")))
        batches = 0
        while self._replay.poll(int(PATIENCE_S * 1000)):
            empty, topic, sequence, payload = self._replay.recv_multipart()
            assert (empty, topic) == (b"", TOPIC.encode())
            number = int.from_bytes(sequence, "big", signed=True)
            if number == -1:
                assert payload == b""
                return batches
            batches += 1
            self.take(number, payload)
        pytest.fail("no end of the replay")

    def take(self, sequence: int, payload: bytes) -> None:
        if sequence != self.next:
            return
        self.next += 1
        for event in DECODE(payload).events:
            if isinstance(event, Cleared):
                self.counts.clear()
                self.cleared += 1
            elif isinstance(event, Stored):
                assert (event.block_size, event.token_ids) == (4, [])
                for before, key in zip(
                    [event.parent_block_hash, *event.block_hashes], event.block_hashes, strict=False
                ):
                    self.parents[key] = before
                self.counts.update((key, event.medium) for key in event.block_hashes)
            else:
                self.counts.subtract((key, event.medium) for key in event.block_hashes)

    def has(self, keys: list[bytes]) -> bool:
        return +self.counts == Counter({(key, "CPU"): 1 for key in keys}) and min(self.counts.values(), default=0) >= 0


def test_a_router_reads_each_block_just_once_with_its_parent_and_that_it_went(node, client):
    with closing(Router(node.zmq)) as router:
        first, second = store(client, 1), store(client, 2)
        router.until(lambda: router.has(first + second))
        assert [router.parents[key] for key in first] == [None, *first[:-1]]
        client.evict(client.find("llama"), first)
        router.until(lambda: router.has(second))


def test_a_router_that_comes_late_has_all_by_a_replay(node, client):
    keys = store(client, 1)
    with closing(Router(node.zmq)) as early:
        early.until(lambda: early.has(keys))
    with closing(Router(node.zmq)) as late:
        assert late.replay(0) == late.next == early.next
        assert late.has(keys)
        assert late.replay(late.next) == 0


def test_a_publisher_that_cannot_keep_up_begins_anew_and_counts_stay_right(node, client):
    with closing(Router(node.zmq)) as router:
        keys: list[bytes] = []
        for seed in range(10):
            keys += store(client, seed, 300)  # more at once than the log keeps
        router.until(lambda: router.has(keys))
        assert router.cleared > 1


def test_garbage_at_the_ports_of_zeromq_hurts_nobody(node, client):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://127.0.0.1:{node.zmq + 1}")
        for frames in ([b""], [b"", b"\0"], [b"x" * 2000], [b""] * 5, [b"", b"\xff" * 8]):
            stranger.send_multipart(frames)
        with closing(Router(node.zmq)) as router:
            keys = store(client, 1)
            router.until(lambda: router.has(keys))
    node.assert_clean()


# REST, and the command


def test_rest_tells_where_to_begin_and_then_what_happened(node, client):
    keys = store(client, 1)
    with httpx.Client(base_url=node.rest, headers={"Authorization": f"Bearer {node.token}"}, timeout=PATIENCE_S) as web:
        begin = web.get("/v1/events").json()
        assert (begin["is_exact"], begin["events"], begin["epoch"]) == (False, [], node.epoch)
        client.evict(client.find("llama"), keys[-1:])
        after = {"epoch": begin["epoch"], "after": begin["last"], "wait_s": 5, "namespace": "llama"}
        told = web.get("/v1/events", params=after).json()
        row = {"type": "removed", "namespace": "llama", "tier": "dram", "key": keys[-1].hex(), "parent": "", "bytes": 0}
        assert (told["is_exact"], told["first"], told["events"]) == (True, begin["last"] + 1, [row])
        assert web.get("/v1/events", params={"namespace": "none"}).status_code == 404
        assert web.get("/v1/events", params={"wait_s": 1e9}).status_code == 422


def test_the_command_prints_what_is_there_and_ends_when_it_was_told_to(node, client):
    keys = store(client, 1)
    command = [sys.executable, "-m", "server.cli", "events", "llama", "--all", "--limit", "4", "--json"]
    environ = clean_environ(CAIRN_ADDRESS=node.unix)
    found = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [(row["type"], row["namespace"], row["tier"], row["bytes"]) for row in rows] == [
        ("stored", "llama", "dram", SIZE)
    ] * 4
    assert {row["key"] for row in rows} == {key.hex() for key in keys}
