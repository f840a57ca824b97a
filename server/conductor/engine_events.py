"""Follows the KV events of one engine over ZeroMQ, as vLLM and SGLang publish them.

    PUB     topic | sequence u64 big-endian | batch
    ROUTER  nothing | start sequence  ->  nothing | topic, or not | sequence | batch, each, then sequence -1

Replays tell what was missed: before the connection, and in gaps. Each begins with the batch that was taken last: where
it is another one now, or none, the engine was started anew, or has kept too little; all is forgotten, and begun with
what it has kept.

DEGRADED  a replay tells all since the engine's start, or it says that it has nothing ──> EXACT
EXACT     a gap that no replay fills, a batch that makes no sense ──> DEGRADED
either    the connection is lost, no reply ──> DEGRADED; the replay goes on where it was ──> what it was before
"""

import asyncio
import importlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from enum import Enum
from hashlib import blake2b
from struct import Struct
from typing import Any, Final

from engine_client.subscription import Standing
from kvstore.errors import ConfigError
from server.conductor.engine_blocks import EngineBlocks

log = logging.getLogger("cairn.conductor.engines")

MESSAGE_BYTES: Final = 64 << 20  # a larger one ends the connection
KEPT_MESSAGES: Final = 100_000  # that wait to be read: as many as vLLM keeps for sending
REPLY_S: Final = 5.0  # between two messages of a replay
QUIET_S: Final = 10.0  # without a message, after which the engine is asked whether there was none
ROUNDS_MOST: Final = 64  # of a replay in which messages are lost
RETRY_S: Final = 1.0
STEP: Final = 64  # messages between two looks at the event loop
END: Final = 2**64 - 1
MONITOR: Final = "inproc://connection"
EVENT: Final = Struct("=H")  # of a connection, as ZeroMQ tells of it


class Round(Enum):
    """How a replay went."""

    DONE = "done"  # all is told up to now
    CUT = "cut"  # it went on, but not to the end
    OTHER = "other"  # the engine does not know what it told before
    SILENT = "silent"  # no reply


class EngineEvents:
    """endpoints: "tcp://host:5557,tcp://host:5558" for events and replays; without the second it is the port after.

    What the engine tells goes to `blocks`. `standing` is EXACT while that is all and nothing but what it has.
    """

    def __init__(self, name: str, endpoints: str, blocks: EngineBlocks) -> None:
        self.name = name
        self.blocks = blocks
        self.batches = self.gaps = self.restarts = self.garbled = 0
        self._endpoint, self._replay_endpoint = split_endpoints(endpoints)
        self._next = 0  # sequence of the batch to come
        self._last = b""  # digest of the one before it
        self._live = -1  # sequence that was published last; replays may be ahead of it
        self._is_current = False
        self._zmq: Any = None
        self._waiting: Any = None
        self._context: Any = None

    @property
    def standing(self) -> Standing:
        return Standing.EXACT if self._is_current and self.blocks.is_complete else Standing.DEGRADED

    def start(self) -> None:
        """ConfigError when pyzmq is not there, or the endpoints are none."""
        try:
            self._zmq = importlib.import_module("zmq")
            self._waiting = importlib.import_module("zmq.asyncio")
        except ModuleNotFoundError as error:
            raise ConfigError("events of engines need pyzmq: pip install 'cairn-kv[zmq]'") from error
        self._context = self._zmq.Context()
        try:
            for kind, endpoint in ((self._zmq.SUB, self._endpoint), (self._zmq.DEALER, self._replay_endpoint)):
                self._connect(kind, endpoint).close()
        except self._zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"events of {self.name}, {self._endpoint} {self._replay_endpoint}: {error}") from error

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._follow()
            except self._zmq.ZMQError as error:
                log.warning("events of %s: %s", self.name, error)
            self._is_current = False
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """Idempotent; after `run` has ended."""
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)

    def row(self) -> dict[str, Any]:
        counts = self.blocks.counts
        return {
            "name": self.name,
            "standing": self.standing.value,
            "blocks": len(self.blocks),
            "block_tokens": self.blocks.block_tokens,
            "batches": self.batches,
            "gaps": self.gaps,
            "restarts": self.restarts,
            "garbled": self.garbled + counts.garbled,
            "unplaced": counts.unplaced,
            "foreign": counts.foreign,
            "odd_size": counts.odd_size,
            "left_out": counts.left_out,
        }

    async def _follow(self) -> None:
        zmq = self._zmq
        events = self._connect(zmq.SUB, None)
        events.monitor(MONITOR, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        monitor = self._connect(zmq.PAIR, MONITOR)
        try:
            events.setsockopt(zmq.SUBSCRIBE, b"")
            events.connect(self._endpoint)
            poller = self._waiting.Poller()
            poller.register(events, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            is_connected = False
            while True:
                ready = dict(await poller.poll(QUIET_S * 1000))
                if monitor in ready:
                    is_connected = await self._connection(monitor)
                elif events in ready:
                    await self._read(events)
                elif is_connected:
                    await self._catch_up()
        finally:
            events.monitor(None, 0)
            monitor.close()
            events.close()

    def _connect(self, kind: int, endpoint: str | None) -> Any:
        socket = self._waiting.Socket(self._context, kind)
        for option, value in (
            (self._zmq.LINGER, 0),
            (self._zmq.RCVHWM, KEPT_MESSAGES),
            (self._zmq.MAXMSGSIZE, MESSAGE_BYTES),
        ):
            socket.setsockopt(option, value)
        if endpoint is not None:
            try:
                socket.connect(endpoint)
            except self._zmq.ZMQError:
                socket.close()
                raise
        return socket

    async def _connection(self, monitor: Any) -> bool:
        """It came, or it went; whether it is there."""
        frames = await monitor.recv_multipart()
        is_there = bool(EVENT.unpack_from(frames[0])[0] == self._zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if is_there:
            await self._catch_up()
        else:
            self._is_current = False
        return is_there

    async def _read(self, events: Any) -> None:
        for _ in range(STEP):
            try:
                frames = await events.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                break
            await self._take(frames)
        self.blocks.tell_index()
        await asyncio.sleep(0)

    async def _take(self, frames: list[bytes]) -> None:
        """A published batch."""
        if len(frames) < 2 or len(frames[-2]) != 8 or frames[-2] >= b"\x80":
            self.garbled += 1
            self.blocks.missed()
            return
        sequence, payload = int.from_bytes(frames[-2], "big"), frames[-1]
        if sequence <= self._live:
            self._restart()
        self._live = sequence
        if sequence > self._next:
            self.gaps += 1
            await self._catch_up()
        if sequence > self._next:
            self.blocks.forget()
            self.blocks.missed()
            self._next = sequence
        if not sequence and not self._next:
            self.blocks.forget()
        if sequence == self._next:
            self._apply(payload)
            self._is_current = True

    def _apply(self, payload: bytes) -> None:
        self.batches += 1
        self.blocks.take(payload)
        self._next += 1
        self._last = _digest(payload)

    def _restart(self) -> None:
        """Another start of the engine, as far as one can tell: it has nothing yet."""
        if self._next:
            self.restarts += 1
        self._next, self._live = 0, -1
        self.blocks.forget()

    async def _catch_up(self) -> None:
        """Ask for what was told since the last batch, as often as it gets further."""
        for _ in range(ROUNDS_MOST):
            found = await self._round()
            self.blocks.tell_index()
            if found is Round.OTHER:
                self._restart()
            elif found is not Round.CUT:
                self._is_current = found is Round.DONE
                return
        self._is_current = False

    async def _round(self) -> Round:
        start = max(0, self._next - 1)
        is_known = not self._next  # that the engine goes on where it was
        if is_known:
            self.blocks.forget()
        before, found = self._next, 0
        try:
            async with aclosing(self._replay(start)) as replay:
                async for sequence, payload in replay:
                    found += 1
                    if not is_known:
                        if sequence != start or _digest(payload) != self._last:
                            return Round.OTHER
                        is_known = True
                        continue
                    if not self._next and sequence:
                        self.blocks.missed()
                        self._next = sequence
                    if sequence > self._next:
                        return Round.CUT if self._next > before else Round.SILENT
                    if sequence == self._next:
                        self._apply(payload)
        except TimeoutError:
            if not self._next:
                self.blocks.missed()
            return Round.CUT if self._next > before else Round.SILENT
        return Round.DONE if is_known else Round.OTHER

    async def _replay(self, start: int) -> AsyncGenerator[tuple[int, bytes]]:
        """What the engine has kept from `start` on. TimeoutError when it does not say that this was all."""
        socket = self._connect(self._zmq.DEALER, self._replay_endpoint)
        try:
            await socket.send_multipart((b"", start.to_bytes(8, "big")))
            for number in range(2 * KEPT_MESSAGES):
                async with asyncio.timeout(REPLY_S):
                    frames = await socket.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8:
                    self.garbled += 1
                    continue
                sequence = int.from_bytes(frames[-2], "big")
                if sequence == END:
                    return
                yield sequence, frames[-1]
                if number % STEP == 0:
                    self.blocks.tell_index()
                    await asyncio.sleep(0)
            raise TimeoutError
        finally:
            socket.close()


def split_endpoints(endpoints: str) -> tuple[str, str]:
    """Those for events and for replays. ConfigError."""
    events, _, replays = (part.strip() for part in endpoints.partition(","))
    if replays:
        return events, replays
    host, colon, port = events.rpartition(":")
    if not events.startswith("tcp://") or not colon or not port.isdecimal():
        raise ConfigError(f"events are at tcp://HOST:PORT, perhaps with a second one for replays, not {endpoints!r}")
    return events, f"{host}:{int(port) + 1}"


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()
