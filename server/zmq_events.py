"""Publishes the events of a tenant's blocks on ZeroMQ, as vLLM does and as routers that know vLLM read them.

    PUB     topic | sequence u64 big-endian | MessagePack [time, [event...], None]
    ROUTER  a start sequence -> from it on what is still kept, each as above, then sequence -1 and nothing

It begins with AllBlocksCleared and all that is there. So it does again when it lost the thread itself, and when a
reader asks for what is not kept any more: who follows from an AllBlocksCleared on, and misses no sequence, has exactly
what is there.
"""

import asyncio
import importlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kvstore.errors import ConfigError
from kvstore.events import Entry, Pages
from kvstore.prefix import split_part
from kvstore.replica import Space
from kvstore.store import Store
from kvstore.types import DRAM, HBM, KEY_BYTES, NVME, TierName
from server.config import host_port

log = logging.getLogger("cairn.zmq")

MEDIA = {HBM: "GPU", DRAM: "CPU", NVME: "STORAGE"}
BATCH_EVENTS = 1024  # of blocks, in one message
KEPT_BATCHES = 10_000  # for replay
KEPT_BYTES = 64 << 20
LINGER_S = 0.01  # that events wait for others to share their message
REQUEST_BYTES = 1024  # of a replay's, or a subscription's topic; larger ones end the connection
ANEW_S = 60.0  # between two times that all is told because a reader asks
REPLAY_STEP = 64  # batches between two looks at the event loop
END = (-1).to_bytes(8, "big", signed=True)

_encode = msgspec.msgpack.Encoder().encode


class ZmqPublisher:
    """`listen` is host:port; replays are at the port after."""

    def __init__(self, store: Store, tenant: str, listen: str, topic: str) -> None:
        self._events = store.events
        self._catalogue = store.catalogue
        self._tenant = tenant
        self._listen = listen
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._sequence = 0  # of the next message
        self._after = -1  # of the log: all up to there was told
        self._told_all_at = -ANEW_S
        self._stirred = asyncio.Event()
        self._context: Any = None
        self._publisher: Any = None
        self._replays: Any = None

    def start(self) -> None:
        """Listen. ConfigError when pyzmq is not there, or when it cannot listen at both ports."""
        try:
            zmq = importlib.import_module("zmq")
            waiting = importlib.import_module("zmq.asyncio")
        except ModuleNotFoundError as error:
            raise ConfigError("events.zmq needs pyzmq: pip install 'cairn-kv[zmq]'") from error
        host, port = host_port(self._listen)
        host = f"[{host}]" if ":" in host else host
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._replays = waiting.Socket(self._context, zmq.ROUTER)
        for socket, messages in ((self._publisher, KEPT_BATCHES), (self._replays, KEPT_BATCHES + 1)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, messages)
            socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
            socket.setsockopt(zmq.IPV6, ":" in host)
        try:
            self._publisher.bind(f"tcp://{host}:{port}")
            self._replays.bind(f"tcp://{host}:{port + 1}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"events.zmq {self._listen}, and the port after: {error}") from error

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish())
            tasks.create_task(self._replay())

    def close(self) -> None:
        """Idempotent. What subscribers have not taken yet is lost to them."""
        context, self._context = self._context, None
        if context is not None:
            self._publisher.close()
            self._replays.close()
            context.term()

    async def _publish(self) -> None:
        self._events.watch(self._stirred.set)
        try:
            while True:
                self._stirred.clear()
                found = self._events.since(self._after, BATCH_EVENTS, self._tenant)
                if not found.is_exact:
                    self._after = await self._publish_all()
                    continue
                self._after = found.last
                self._send(found.entries)
                if self._after < self._events.sequence:
                    await asyncio.sleep(0)
                else:
                    await self._stirred.wait()
                    await asyncio.sleep(LINGER_S)
        finally:
            self._events.unwatch(self._stirred.set)

    async def _publish_all(self) -> int:
        """All that is there, each block once, and meanwhile what happens; the sequence up to which all was told.

        Readers may count how often a block was stored: one that an event told of since the start is left out of pages.
        """
        self._told_all_at = asyncio.get_running_loop().time()
        self._send_events([{"type": "AllBlocksCleared"}])
        opened = [found for found in self._catalogue.all() if found.tenant.name == self._tenant]
        pages = Pages(space for found in opened for space in found.spaces)
        after = self._events.sequence
        told: set[tuple[Space, bytes]] = set()
        while pages.more:
            page = pages.next(BATCH_EVENTS)
            while after < self._events.sequence:
                found = self._events.since(after, BATCH_EVENTS, self._tenant)
                if not found.is_exact:
                    return after
                self._send(found.entries)
                told.update((entry.space, entry.key) for entry in found.entries)
                after = found.last
            self._send([entry for entry in page if (entry.space, entry.key) not in told])
            await asyncio.sleep(0)
        return after

    def _send(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._send_events(list(encode_events(entries, self._block_tokens)))

    def _block_tokens(self, number: int) -> int:
        found = self._catalogue.of_number(number)
        assert found is not None, "namespaces are never closed"
        return found.namespace.block_tokens

    def _send_events(self, events: list[dict[str, Any]]) -> None:
        """A subscriber that does not keep up misses messages, and can ask for them again."""
        payload = _encode([time.time(), events, None])
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._publisher.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    async def _replay(self) -> None:
        while True:
            frames = await self._replays.recv_multipart()
            if len(frames) < 2 or len(frames[-1]) != 8:
                log.info("a request for a replay that makes no sense")
                continue
            reader, start = frames[0], int.from_bytes(frames[-1], "big")
            if self._kept and start < self._kept[0][0]:
                self._begin_anew()
            for position, (sequence, payload) in enumerate(list(self._kept)):
                if sequence >= start:
                    await self._replays.send_multipart((reader, b"", self._topic, sequence.to_bytes(8, "big"), payload))
                if position % REPLAY_STEP == 0:
                    await asyncio.sleep(0)
            await self._replays.send_multipart((reader, b"", self._topic, END, b""))

    def _begin_anew(self) -> None:
        """A reader has missed what is not kept any more."""
        if asyncio.get_running_loop().time() - self._told_all_at >= ANEW_S:
            self._after = -1
            self._stirred.set()


def encode_events(entries: Sequence[Entry], block_tokens: Callable[[int], int]) -> Iterator[dict[str, Any]]:
    """As tagged maps; what follows one another in a chain, or goes from one place, shares a map.

    A part of a block has the block's hash, and the part's number as its group. Tokens are not known here: their list
    is empty.
    """
    for run in _runs(entries):
        first = run[0]
        hashes = [entry.key[:KEY_BYTES] for entry in run]
        event: dict[str, Any] = {"type": "BlockStored" if first.is_stored else "BlockRemoved", "block_hashes": hashes}
        if first.is_stored:
            event |= {
                "parent_block_hash": first.parent[:KEY_BYTES] if first.parent is not None else None,
                "token_ids": [],
                "block_size": block_tokens(first.space.number),
                "lora_id": None,
                "lora_name": None,
            }
        event["medium"] = MEDIA[TierName(first.space.tier)]
        if len(first.key) > KEY_BYTES:
            event["group_idx"] = split_part(first.key)[1]
        yield event


def _runs(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    run: list[Entry] = []
    for entry in entries:
        if run and not _continues(run[-1], entry):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _continues(before: Entry, entry: Entry) -> bool:
    is_alike = before.space is entry.space and before.key[KEY_BYTES:] == entry.key[KEY_BYTES:]
    if not is_alike or before.is_stored is not entry.is_stored:
        return False
    return not entry.is_stored or entry.parent == before.key
