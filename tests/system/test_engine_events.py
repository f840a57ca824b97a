"""Events of engines over real ZeroMQ sockets: gaps, restarts, a history that is gone, garbage, our own publisher."""

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from engine_client.blocking import BlockingClient
from engine_client.subscription import Standing
from kvstore.errors import ConfigError
from kvstore.prefix import chain
from kvstore.types import BlockKey
from scheduler.index import PrefixIndex
from scheduler.requests import names_of
from server.conductor import engine_events
from server.conductor.chains import Scheme
from server.conductor.engine_blocks import EngineBlocks
from server.conductor.engine_events import EngineEvents, split_endpoints
from tests.system.nodes import PATIENCE_S, NodeProcess, content, free_port, namespace

ROOT = BlockKey(bytes(16))
SIZE = 4
TOKENS = list(range(1, 1 + 64 * SIZE))
KEYS = chain(TOKENS, SIZE, ROOT)
END = (-1).to_bytes(8, "big", signed=True)
REPLY_S = 0.3


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(engine_events, "REPLY_S", REPLY_S)
    monkeypatch.setattr(engine_events, "QUIET_S", 0.5)


class Vllm:
    """Publishes as vLLM does, at a port and the one after. `lose` sequences are kept, but not sent."""

    def __init__(self, port: int, *, kept: int = 10_000, has_topic: bool = False, answers: bool = True) -> None:
        self.sequence = 0
        self.replays = 0
        self.answers = answers
        self.lose = False
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._topic = [b"kv@here"] if has_topic else []
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket, offset in ((self._publisher, 0), (self._router, 1)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"tcp://127.0.0.1:{port + offset}")
        self._task = asyncio.get_running_loop().create_task(self._replay())

    async def publish(self, *events: Any) -> None:
        await self.send(msgspec.msgpack.encode([1000.0 + self.sequence, list(events), 0]))

    async def send(self, payload: bytes) -> None:
        sequence, self.sequence = self.sequence, self.sequence + 1
        self._kept.append((sequence, payload))
        if not self.lose:
            await self.send_raw(b"kv@here", sequence.to_bytes(8, "big"), payload)

    async def send_raw(self, *frames: bytes) -> None:
        await self._publisher.send_multipart(frames)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _replay(self) -> None:
        while True:
            reader, empty, start = await self._router.recv_multipart()
            assert empty == b""
            self.replays += 1
            if not self.answers:
                continue
            for sequence, payload in list(self._kept):
                if sequence >= int.from_bytes(start, "big"):
                    frames = [reader, b"", *self._topic, sequence.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([reader, b"", *self._topic, END, b""])


def stored(first: int, stop: int, **changes: Any) -> dict[str, Any]:
    """Blocks [first, stop) of TOKENS. The engine's hash of a block is a number."""
    return {
        "type": "BlockStored",
        "block_hashes": list(range(1000 + first, 1000 + stop)),
        "parent_block_hash": 1000 + first - 1 if first else None,
        "token_ids": TOKENS[first * SIZE : stop * SIZE],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | changes


def removed(*blocks: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [1000 + block for block in blocks], "medium": "GPU"}


class Followed:
    """An engine's events, and the index that they fill."""

    def __init__(self, endpoints: str, root: BlockKey = ROOT, *, hashes_are_keys: bool = False) -> None:
        self.index = PrefixIndex()
        self.holder = self.index.holder("engine:here")
        scheme = Scheme(SIZE, "xxh3", root)
        self.blocks = EngineBlocks(self.index, self.holder, scheme, hashes_are_keys=hashes_are_keys)
        self.events = EngineEvents("here", endpoints, self.blocks)

    def prefix(self, keys: list[BlockKey] = KEYS) -> int:
        return int(self.index.prefixes(names_of(b"".join(keys)))[self.holder, 2])

    @property
    def is_exact(self) -> bool:
        return self.events.standing is Standing.EXACT

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def following(port: int, root: BlockKey = ROOT, *, hashes_are_keys: bool = False) -> AsyncIterator[Followed]:
    followed = Followed(f"tcp://127.0.0.1:{port}", root, hashes_are_keys=hashes_are_keys)
    followed.events.start()
    task = asyncio.create_task(followed.events.run())
    try:
        yield followed
        assert not task.done(), "the task has ended"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        followed.events.close()


def free_pair() -> int:
    while True:
        port = free_port()
        with zmq.Context() as context, context.socket(zmq.PUB) as probe:
            try:
                probe.bind(f"tcp://127.0.0.1:{port}")
                probe.bind(f"tcp://127.0.0.1:{port + 1}")
            except zmq.ZMQError:
                continue
        return port


@pytest.mark.parametrize("has_topic", [False, True])
def test_who_joins_late_learns_the_history_and_then_follows(has_topic):
    async def scenario() -> None:
        port = free_pair()
        engine = Vllm(port, has_topic=has_topic)
        await engine.publish(stored(0, 4))
        await engine.publish(stored(4, 6), removed(5))
        async with following(port) as followed:
            await followed.until(lambda: followed.is_exact)
            assert followed.prefix() == 5
            await engine.publish(stored(5, 8))
            await followed.until(lambda: followed.prefix() == 8)
            assert followed.is_exact
            assert not followed.events.row()["gaps"]
        await engine.stop()

    asyncio.run(scenario())


def test_an_engine_that_comes_later_is_found():
    async def scenario() -> None:
        port = free_pair()
        async with following(port) as followed:
            await asyncio.sleep(0.2)
            assert not followed.is_exact
            engine = Vllm(port)
            await followed.until(lambda: followed.is_exact)
            await engine.publish(stored(0, 4))
            await followed.until(lambda: followed.prefix() == 4)
            await engine.stop()
            await followed.until(lambda: not followed.is_exact)

    asyncio.run(scenario())


def test_a_gap_is_filled_from_the_replay():
    async def scenario() -> None:
        port = free_pair()
        engine = Vllm(port)
        async with following(port) as followed:
            await followed.until(lambda: followed.is_exact)
            await engine.publish(stored(0, 4))
            await followed.until(lambda: followed.prefix() == 4)
            engine.lose = True
            await engine.publish(stored(4, 8))
            await engine.publish(removed(7))
            engine.lose = False
            await engine.publish(stored(7, 9))
            await followed.until(lambda: followed.prefix() == 9)
            assert followed.is_exact
            assert not followed.events.restarts
        await engine.stop()

    asyncio.run(scenario())


def test_a_last_message_that_is_lost_is_found_in_the_quiet_after():
    async def scenario() -> None:
        port = free_pair()
        engine = Vllm(port)
        async with following(port) as followed:
            await followed.until(lambda: followed.is_exact)
            await engine.publish(stored(0, 4))
            await followed.until(lambda: followed.prefix() == 4)
            engine.lose = True
            await engine.publish(removed(2))
            await followed.until(lambda: followed.prefix() == 2)
            assert followed.is_exact
        await engine.stop()

    asyncio.run(scenario())


def test_where_the_history_is_gone_all_is_forgotten_until_the_engine_clears_its_cache():
    async def scenario() -> None:
        port = free_pair()
        engine = Vllm(port, kept=2)
        async with following(port) as followed:
            await followed.until(lambda: followed.is_exact)
            await engine.publish(stored(0, 4))
            await followed.until(lambda: followed.prefix() == 4)
            engine.lose = True
            for block in range(4, 10):
                await engine.publish(stored(block, block + 1))
            engine.lose = False
            await engine.publish(stored(0, 2))
            await followed.until(lambda: followed.prefix() == 2)
            assert not followed.is_exact
            await engine.publish({"type": "AllBlocksCleared"}, stored(0, 3))
            await followed.until(lambda: followed.is_exact and followed.prefix() == 3)
        await engine.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("batches", [0, 1, 3, 9])
def test_a_restarted_engine_has_only_what_it_says_anew(batches):
    """Fewer batches than before, as many, and more: the sequence alone would not tell."""

    async def scenario() -> None:
        port = free_pair()
        engine = Vllm(port)
        async with following(port) as followed:
            await followed.until(lambda: followed.is_exact)
            for block in range(3):
                await engine.publish(stored(block, block + 1))
            await followed.until(lambda: followed.prefix() == 3)
            await engine.stop()
            await followed.until(lambda: not followed.is_exact)
            engine = Vllm(port)
            for block in range(10, 10 + batches):
                await engine.publish(stored(block, block + 1, parent_block_hash=None))
            await followed.until(lambda: followed.is_exact)
            assert followed.prefix() == 0
            assert len(followed.blocks) == batches
            assert followed.events.restarts == 1
            await engine.publish(stored(0, 2))
            await followed.until(lambda: followed.prefix() == 2)
            assert followed.is_exact
        await engine.stop()

    asyncio.run(scenario())


def test_without_replays_a_gap_makes_it_forget_and_a_sequence_that_goes_back_is_a_restart():
    async def scenario() -> None:
        port = free_pair()
        engine = Vllm(port, answers=False)
        async with following(port) as followed:
            await followed.until(lambda: engine.replays)
            await asyncio.sleep(2 * REPLY_S)
            await engine.publish(stored(0, 4))
            await followed.until(lambda: followed.prefix() == 4)
            assert followed.is_exact
            engine.sequence = 5
            await engine.publish(stored(0, 2))
            await followed.until(lambda: followed.prefix() == 2)
            assert not followed.is_exact
            engine.sequence = 0
            await engine.publish(stored(0, 1))
            await followed.until(lambda: followed.prefix() == 1)
            assert followed.is_exact
            assert followed.events.restarts == 1
        await engine.stop()

    asyncio.run(scenario())


def test_garbage_of_every_kind_ends_nothing():
    async def scenario() -> None:
        port = free_pair()
        engine = Vllm(port)
        async with following(port) as followed:
            await followed.until(lambda: followed.is_exact)
            await engine.publish(stored(0, 2))
            await followed.until(lambda: followed.prefix() == 2)
            await engine.send_raw(b"alone")
            await engine.send_raw(b"topic", b"short", b"payload")
            await engine.send_raw(b"topic", END, b"payload")
            await engine.send_raw(b"topic", (2**62).to_bytes(8, "big"), b"payload")
            for payload in (b"", b"\xc1\xc1", b"\x91" * 10_000, msgspec.msgpack.encode({"events": 7})):
                await engine.send(payload)
            await engine.publish(7, [], {"type": "BlockStored"}, stored(2, 4))
            await followed.until(lambda: followed.prefix() == 4)
            assert not followed.is_exact
            assert followed.events.row()["garbled"] > 8
            await engine.publish({"type": "AllBlocksCleared"}, stored(0, 3))
            await followed.until(lambda: followed.is_exact and followed.prefix() == 3)
        await engine.stop()

    asyncio.run(scenario())


def test_our_own_publisher_is_followed(tmp_path):
    async def scenario(client: BlockingClient, port: int) -> None:
        space = client.open("llama", namespace(block_bytes=4096))
        async with following(port, space.root, hashes_are_keys=True) as followed:
            await followed.until(lambda: followed.is_exact)
            keys = space.keys(list(range(64)))
            client.put(space, keys, [content(key, 4096) for key in keys])
            await followed.until(lambda: followed.prefix(keys) == len(keys))
            assert followed.is_exact

    port = free_pair()
    node = NodeProcess(tmp_path, f"--events.zmq=127.0.0.1:{port}")
    node.start()
    try:
        with BlockingClient(node.unix, timeout_s=PATIENCE_S) as client:
            asyncio.run(scenario(client, port))
    finally:
        node.stop()


def test_endpoints_and_a_missing_pyzmq_are_told_readably(monkeypatch):
    assert split_endpoints("tcp://[::1]:5557") == ("tcp://[::1]:5557", "tcp://[::1]:5558")
    assert split_endpoints("tcp://a:1, tcp://b:9") == ("tcp://a:1", "tcp://b:9")
    for endpoints in ("", "a:5557", "tcp://a", "tcp://a:http"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            split_endpoints(endpoints)
    with pytest.raises(ConfigError, match="events of here"):
        Followed("tcp://127.0.0.1:1,nonsense").events.start()
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match="pip install"):
        Followed("tcp://127.0.0.1:1").events.start()
