"""A channel as a blocking socket, tied to the TCP connection that it began over."""

import math
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence

from kvstore.errors import PeerLost, ProtocolError
from kvstore.transport.rdma.channel import Channel


class ChannelSocket:
    """Takes `lifeline`, a TCP or TLS connection, over: nothing may come by it any more, and its end ends the channel.

    Waits without holding the GIL. Errors as sockets raise them, and ProtocolError for what no peer sends. After any
    error it is of no more use: close it. `closed` is called then, to close the channel's pair.
    """

    def __init__(self, channel: Channel, lifeline: socket.socket, closed: Callable[[], None]) -> None:
        self._closed = closed
        self._channel = channel
        self._lifeline = lifeline
        self._timeout_s: float | None = None
        self._is_hung_up = False
        self._events = select.poll()
        self._events.register(channel.fd, select.POLLIN)
        self._events.register(lifeline, select.POLLIN)
        lifeline.settimeout(0)

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def fileno(self) -> int:
        """Of the TCP connection: it says whether the other end is there."""
        return self._lifeline.fileno()

    def sendall(self, data: bytes | memoryview) -> None:
        self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """All of them, always. They are where they cannot change any more, which is not yet at the peer."""
        until = self._until()
        for data in buffers:
            self._channel.write(data)
        try:
            self._channel.flush()
            self._check()
            while self._channel.pending_bytes:
                self._progress(until)
        except BaseException:  # of a message that is half sent, the rest must never be taken for the next
            self._channel.close()
            raise
        return sum(map(len, buffers))

    def recv_into(self, target: memoryview) -> int:
        """What is there, at least a byte; 0 once the other end has hung up."""
        until = self._until()
        if not self._channel.is_readable:
            self._channel.progress()
        while not self._channel.is_readable:
            if self._is_hung_up:
                return 0
            self._check()
            self._wait(until)
        return self._channel.read_into(target)

    def close(self) -> None:
        """At once: what the peer has not got yet may be lost. Idempotent."""
        self._channel.close()
        self._lifeline.close()
        self._closed()

    def _until(self) -> float | None:
        return None if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _progress(self, until: float | None) -> None:
        """Wait for something to happen while there is something to be sent."""
        self._channel.progress()
        self._check()
        if self._is_hung_up:
            raise ConnectionResetError("the other end hung up")
        if self._channel.pending_bytes:
            self._wait(until)

    def _check(self) -> None:
        if isinstance(self._channel.error, ProtocolError):
            raise self._channel.error
        if isinstance(self._channel.error, PeerLost):
            raise ConnectionResetError(str(self._channel.error)) from self._channel.error

    def _wait(self, until: float | None) -> None:
        """Until something completed or the lifeline ended, and take it up."""
        if self._timeout_s == 0:
            raise BlockingIOError("nothing to be done without waiting")
        left_s = None if until is None else until - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError("timed out")
        ready = self._events.poll(None if left_s is None else math.ceil(left_s * 1000))
        if any(descriptor != self._channel.fd for descriptor, _ in ready):
            self._look_at_lifeline()
        self._channel.progress()

    def _look_at_lifeline(self) -> None:
        try:
            spoke = self._lifeline.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):  # nothing that is meant for us
            return
        except OSError:
            spoke = b""
        if spoke:
            self._channel.close()
            raise ProtocolError("bytes over TCP from a peer that has moved to RDMA")
        self._is_hung_up = True
