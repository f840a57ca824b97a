"""Frames over a blocking socket (Unix, TCP, TLS, or what behaves like one), payloads received in place."""

import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore import wire
from kvstore.errors import PeerLost, ProtocolError
from kvstore.transport.rdma.channel_socket import ChannelSocket

SMALL_BYTES = 4096  # frames up to this size are received together
SPIN_S = 150e-6  # to be woken up costs 20 to 50 us, and most answers come sooner
BUFFERS = 512  # handed to the kernel at once; it takes 1024


class FrameSocket:
    """`deadline` is on time.monotonic. After any error the stream is of no more use: close it."""

    def __init__(self, stream: socket.socket | ChannelSocket, frame_bytes: int) -> None:
        self._stream = stream
        self._spins = type(stream) is socket.socket  # neither TLS nor a NIC can be asked so cheaply
        self._frame_bytes = frame_bytes
        self._small = bytearray(SMALL_BYTES)
        self._start = self._end = 0  # of what is received in `_small` and not taken yet
        self._requests = 0
        self._begun: set[int] = set()
        self._unwanted: set[int] = set()
        self._early: dict[int, Any] = {}  # replies that came before they were asked for

    def close(self) -> None:
        self._stream.close()

    def fileno(self) -> int:
        return self._stream.fileno()

    def is_open(self) -> bool:
        """Whether the other end has not hung up, as far as is known here. From any thread; takes no time."""
        look = select.poll()  # one of its own: no two threads may use the same at once
        try:
            look.register(self._stream, select.POLLRDHUP)
            return not look.poll(0)
        except (OSError, ValueError):  # closed by another thread
            return False

    @property
    def is_in_use(self) -> bool:
        """Whether replies are on their way that nobody has waited for yet."""
        return bool(self._begun)

    def begin(self, request: Callable[[int], wire.Message], payload: Sequence[memoryview], deadline: float) -> int:
        """Send a request and its payload; the number by which to wait for its reply. Raises TimeoutError, OSError."""
        self._requests += 1
        number = self._requests
        self._send(wire.encode(request(number), sum(map(len, payload))), payload, deadline)
        self._begun.add(number)
        return number

    def post(self, request: Callable[[int], wire.Message], deadline: float) -> None:
        """Send a request whose reply is thrown away when it comes. Raises as `begin`."""
        self._unwanted.add(self.begin(request, (), deadline))
        self._begun.discard(self._requests)

    def _send(self, frame: bytes, payload: Sequence[memoryview], deadline: float) -> None:
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

    def finish(self, number: int, targets_of: Callable[[Any], Sequence[memoryview]] | None, deadline: float) -> Any:
        """The reply to request `number`, its payload received into what `targets_of` says of it.

        Replies to other requests that are under way may come before it; they are kept until they are asked for.
        Raises TimeoutError, OSError, PeerLost, ProtocolError.
        """
        while number not in self._early:
            frame = wire.parse_header(self._take(wire.HEADER.size, deadline), self._frame_bytes)
            reply = wire.decode_reply(self._take(frame.body_bytes, deadline))
            is_wanted = reply.id == number and not isinstance(reply, wire.Failed)
            targets = targets_of(reply) if targets_of is not None and is_wanted else ()
            if sum(map(len, targets)) != frame.payload_bytes:
                raise ProtocolError(f"a payload of {frame.payload_bytes} bytes where {sum(map(len, targets))} belong")
            for target in targets:
                self._fill(target, deadline)
            if reply.id in self._unwanted:
                self._unwanted.discard(reply.id)
                continue
            if reply.id == 0:  # what belongs to no request ends the connection
                return reply
            self._early[reply.id] = reply
        self._begun.discard(number)
        return self._early.pop(number)

    def _take(self, size: int, deadline: float) -> bytes | bytearray:
        """The next `size` bytes. Small frames come whole with one call of the system, more than one at a time."""
        if size > SMALL_BYTES:
            large = bytearray(size)
            self._fill(memoryview(large), deadline)
            return large
        while self._end - self._start < size:
            if self._start:
                self._small[: self._end - self._start] = self._small[self._start : self._end]
                self._start, self._end = 0, self._end - self._start
            with memoryview(self._small) as small:
                self._end += self._receive_into(small[self._end :], deadline)
        start, self._start = self._start, self._start + size
        return self._small[start : self._start]

    def _fill(self, target: memoryview, deadline: float) -> None:
        here = min(self._end - self._start, len(target))
        target[:here] = self._small[self._start : self._start + here]
        self._start += here
        while here < len(target):
            here += self._receive_into(target[here:], deadline)

    def _receive_into(self, target: memoryview, deadline: float) -> int:
        received = self._spin(target) if self._spins else -1
        if received < 0:
            self._stream.settimeout(left_s(deadline))
            received = self._stream.recv_into(target)
        if not received:
            raise PeerLost("the node hung up")
        return received

    def _spin(self, target: memoryview) -> int:
        """Look for an answer for a moment without going to sleep; bytes received, -1 for none."""
        self._stream.settimeout(0)
        until = time.monotonic() + SPIN_S
        while True:
            try:
                return self._stream.recv_into(target)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return -1


def left_s(deadline: float) -> float:
    """Seconds until `deadline`. Raises TimeoutError when there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds
