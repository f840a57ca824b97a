"""Frames over an asyncio stream (Unix, TCP or TLS), payloads received straight to where they belong.

Both ends use it: the node for its clients, the async client for its node. A subclass says what to do with a
frame and where its payload goes; payload bytes are never gathered first.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

from kvstore.errors import PeerLost, ProtocolError
from kvstore.wire import HEADER, Frame, parse_header

RECEIVE_BYTES = 64 << 10
PAYLOAD_BYTES = 64 << 30  # of one frame: over it, it is a header that lies
_SINK = memoryview(bytearray(64 << 10))


def sink(size: int) -> list[memoryview]:
    """A place for `size` bytes of payload that nobody wants."""
    whole, rest = divmod(size, len(_SINK))
    return [_SINK] * whole + [_SINK[:rest]] * (rest > 0)


class FrameStream(asyncio.BufferedProtocol, ABC):
    """One connection. `frame_bytes` bounds a body; a payload is bounded by whoever gives it a place."""

    def __init__(self, frame_bytes: int) -> None:
        self._frame_bytes = frame_bytes
        self._received = bytearray(RECEIVE_BYTES)
        self._filled = 0
        self._frame: Frame | None = None  # its header is parsed, its body is not complete
        self._targets: list[memoryview] = []  # where the payload goes, in reverse
        self._transport: asyncio.Transport | None = None
        self._drained: asyncio.Future[None] | None = None
        self._is_held = False
        self._is_parsing = False
        self._is_deaf = False
        self.frames = 0  # whose body came so far

    # For subclasses.

    @abstractmethod
    def frame_received(self, body: bytes, payload_bytes: int) -> Sequence[memoryview]:
        """A frame's body is here. Returns where its payload goes: exactly `payload_bytes` in all."""

    @abstractmethod
    def payload_received(self) -> None:
        """All of the payload of the last frame is in place."""

    @abstractmethod
    def broken(self, error: ProtocolError) -> None:
        """The peer sent what is no frame: nothing after it can be understood, and nothing after it is read."""

    # Sending.

    def send(self, frame: bytes, payload: Sequence[memoryview] = ()) -> None:
        """Queue a frame and its payload. The payload's memory must stay as it is until `drained`."""
        if self._transport is not None and not self._transport.is_closing():
            parts: list[bytes | memoryview] = [frame, *payload]
            for part in parts:  # asyncio's writelines does not pause the writer in Python 3.12 and 3.13
                self._transport.write(part)

    async def drained(self) -> None:
        """All that was queued has been handed to the system, or the connection is lost."""
        if self._drained is not None:
            await asyncio.shield(self._drained)

    @property
    def is_draining(self) -> bool:
        return self._drained is not None

    def move_to(self, move: Callable[[asyncio.Transport], asyncio.Transport]) -> None:
        """Go on over another transport, which `move` makes of the one so far, and which owns that one from then on.

        Nothing has changed after ProtocolError: part of a frame has come, or what was sent is not out yet (wait for
        `drained`); nor after PeerLost: there is no connection any more.
        """
        if self._transport is None or self._transport.is_closing():
            raise PeerLost("the connection ended before it could be moved")
        if self._frame is not None or self._targets or (self._filled and not self._is_parsing) or self.is_draining:
            raise ProtocolError("a connection cannot be moved in the middle of a frame")
        self._transport = move(self._transport)
        if self._is_held:
            self._transport.pause_reading()

    # asyncio's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._targets.clear()
        self.resume_writing()

    def get_buffer(self, _sizehint: int) -> memoryview:
        if self._targets:
            return self._targets[-1]
        return memoryview(self._received)[self._filled :]

    def buffer_updated(self, received: int) -> None:
        if self._is_deaf:
            return
        if self._targets:
            self._payload_arrived(received)
        else:
            self._filled += received
            self._parse()

    # Holding back.

    def hold(self) -> None:
        """Read nothing more, and take up nothing of what was read, until `go_on`."""
        self._is_held = True
        if self._transport is not None:
            self._transport.pause_reading()

    def go_on(self) -> None:
        if not self._is_held or self._is_deaf:
            return
        self._is_held = False
        if not self._is_parsing:
            self._parse()
        if not self._is_held and self._transport is not None:
            self._transport.resume_reading()

    def listen_no_more(self) -> None:
        """For good: whatever comes is not looked at."""
        self._is_deaf = True
        self._targets.clear()
        self.hold()

    @property
    def is_midway(self) -> bool:
        """A frame has begun to come, and its body is not complete."""
        return (self._filled > 0 or self._frame is not None) and not self._is_held

    @property
    def payload_left(self) -> int:
        """Bytes of payload that are still to come."""
        return sum(map(len, self._targets))

    def redirect_payload(self, targets: Sequence[memoryview]) -> None:
        """Send the rest of the payload that is coming in elsewhere: `targets` have at least its bytes."""
        self._targets = _take(targets, self.payload_left)

    def _payload_arrived(self, received: int) -> None:
        rest = self._targets.pop()[received:]
        if rest:
            self._targets.append(rest)
        elif not self._targets:
            try:
                self.payload_received()
            except ProtocolError as error:
                self._break(error)

    def _break(self, error: ProtocolError) -> None:
        self.listen_no_more()
        self.broken(error)

    def _parse(self) -> None:
        self._is_parsing = True
        try:
            self._take_up()
        except ProtocolError as error:
            self._break(error)
        finally:
            self._is_parsing = False
            if self._is_deaf:
                self._filled = 0

    def _take_up(self) -> None:
        """Frame by frame, until what is left is none or the subclass wants no more for now."""
        start = 0
        with memoryview(self._received) as received:
            while not self._is_held:
                if self._frame is None:
                    if self._filled - start < HEADER.size:
                        break
                    self._frame = parse_header(received[start : start + HEADER.size], self._frame_bytes)
                    start += HEADER.size
                if self._filled - start < self._frame.body_bytes:
                    break
                body = bytes(received[start : start + self._frame.body_bytes])
                start += self._frame.body_bytes
                payload_bytes, self._frame = self._frame.payload_bytes, None
                if payload_bytes > PAYLOAD_BYTES:
                    raise ProtocolError(f"a payload of {payload_bytes} bytes")
                self.frames += 1
                targets = self.frame_received(body, payload_bytes)
                if payload_bytes and not self._is_deaf:
                    start += self._begin_payload(targets, payload_bytes, received[start : self._filled])
        self._keep(start)

    def _keep(self, start: int) -> None:
        """Make room after what is not parsed yet. The buffer grows as a large body comes, not as it is announced.

        A buffer of another size is a new one: the loop may still hold the old.
        """
        left = self._filled - start
        if left == len(self._received):
            if self._frame is not None:  # else it is held, and not read into until it was parsed
                self._received = self._received + bytes(min(left, max(self._frame.body_bytes - left, 1)))
        elif start and left < RECEIVE_BYTES < len(self._received):
            self._received = self._received[start : self._filled] + bytes(RECEIVE_BYTES - left)
        elif start:
            self._received[:left] = self._received[start : self._filled]
        self._filled = left

    def _begin_payload(self, targets: Sequence[memoryview], payload_bytes: int, here: memoryview) -> int:
        """Place what came with the frame; how many bytes that was. The rest is received in place."""
        self._targets = _take(targets, payload_bytes)
        placed = 0
        while self._targets and placed < len(here):
            target = self._targets.pop()
            size = min(len(target), len(here) - placed)
            target[:size] = here[placed : placed + size]
            placed += size
            if size < len(target):
                self._targets.append(target[size:])
        if not self._targets:
            self.payload_received()
        return placed


def _take(targets: Sequence[memoryview], size: int) -> list[memoryview]:
    """The first `size` bytes of `targets`, in reverse, empty ones left out."""
    taken = []
    for target in targets:
        part = target[: min(len(target), size)]
        size -= len(part)
        if part:
            taken.append(part)
    assert size == 0, "a payload has a place for every byte"
    return taken[::-1]
