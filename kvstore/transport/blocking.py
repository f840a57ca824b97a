"""Frames over a blocking socket (Unix, TCP or TLS): one exchange at a time, payloads received in place."""

import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore import wire
from kvstore.errors import PeerLost, ProtocolError

SMALL_BYTES = 4096  # a reply without payload mostly comes in one piece of this size
BUFFERS = 512  # handed to the kernel at once; it takes 1024


class FrameSocket:
    """`deadline` is on time.monotonic. After any error the stream is of no more use: close it."""

    def __init__(self, stream: socket.socket, frame_bytes: int) -> None:
        self._stream = stream
        self._frame_bytes = frame_bytes
        self._small = bytearray(SMALL_BYTES)

    def close(self) -> None:
        self._stream.close()

    def is_open(self) -> bool:
        """Whether the other end has not hung up, as far as is known here. From any thread; takes no time."""
        look = select.poll()  # one of its own: no two threads may use the same at once
        try:
            look.register(self._stream, select.POLLRDHUP)
            return not look.poll(0)
        except (OSError, ValueError):  # closed by another thread
            return False

    def send(self, frame: bytes, payload: Sequence[memoryview], deadline: float) -> None:
        """Send a frame and its payload. Raises TimeoutError, OSError."""
        self._stream.settimeout(left_s(deadline))
        if not payload or isinstance(self._stream, ssl.SSLSocket):
            self._stream.sendall(frame)
            for block in payload:
                self._stream.settimeout(left_s(deadline))
                self._stream.sendall(block)
            return
        pending = [memoryview(frame), *payload][::-1]
        while pending:
            self._stream.settimeout(left_s(deadline))
            sent = self._stream.sendmsg(pending[: -BUFFERS - 1 : -1])
            while pending and sent >= len(pending[-1]):
                sent -= len(pending.pop())
            if sent:
                pending[-1] = pending[-1][sent:]

    def receive(self, number: int, targets_of: Callable[[Any], Sequence[memoryview]] | None, deadline: float) -> Any:
        """The reply to request `number`, its payload received into what `targets_of` says of it.

        Raises TimeoutError, OSError, PeerLost, ProtocolError.
        """
        header = wire.HEADER.size
        with memoryview(self._small) as small:
            # What comes after the frame of a reply without payload is no one's: it may be read in one go.
            filled = self._fill(small if targets_of is None else small[:header], header, deadline)
            frame = wire.parse_header(small[:header], self._frame_bytes)
            here = min(filled - header, frame.body_bytes)
            body = memoryview(bytearray(frame.body_bytes))
            body[:here] = small[header : header + here]
        self._fill(body[here:], frame.body_bytes - here, deadline)
        reply = wire.decode_reply(body)
        if reply.id not in (number, 0):
            raise ProtocolError(f"an answer to request {reply.id} instead of {number}")
        targets = () if targets_of is None or isinstance(reply, wire.Failed) else targets_of(reply)
        if sum(map(len, targets)) != frame.payload_bytes:
            raise ProtocolError(f"a payload of {frame.payload_bytes} bytes where {sum(map(len, targets))} belong")
        for target in targets:
            self._fill(target, len(target), deadline)
        return reply

    def _fill(self, target: memoryview, least: int, deadline: float) -> int:
        """Receive into `target` until at least `least` bytes are there; how many are."""
        filled = 0
        while filled < least:
            self._stream.settimeout(left_s(deadline))
            received = self._stream.recv_into(target[filled:])
            if not received:
                raise PeerLost("the node hung up")
            filled += received
        return filled


def left_s(deadline: float) -> float:
    """Seconds until `deadline`. Raises TimeoutError when there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds
