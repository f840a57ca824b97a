"""A channel as an asyncio transport, tied to the TCP connection that it began over."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvstore.errors import ProtocolError
from kvstore.transport.rdma.channel import Channel


class ChannelTransport(asyncio.Transport):
    """Moves `protocol` from `lifeline`, transport of a TCP or TLS connection, to `channel`, whose pair is connected.

    When either of the two ends, so does the other. `connection_lost` is called once, and then `closed`, to close the
    channel's pair. When the lifeline ends, what came before is delivered first, unless reading is paused.
    Writing is paused whenever something is not in a slot yet.
    """

    def __init__(
        self,
        channel: Channel,
        protocol: asyncio.BufferedProtocol,
        lifeline: asyncio.Transport,
        closed: Callable[[], None],
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._protocol = protocol
        self._lifeline = lifeline
        self._closed = closed
        self._is_paused = False
        self._is_writing_paused = False
        self._is_closing = False
        self._is_ended = False
        lifeline.set_protocol(_Lifeline(self._lifeline_spoke, self._lifeline_lost))
        lifeline.resume_reading()
        self._loop.add_reader(channel.fd, self._progress)
        self._loop.call_soon(self._progress)  # something may have come before anybody listened

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._lifeline.get_extra_info(name, default)

    # Reading.

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._loop.call_soon(self._go_on)

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    # Writing.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Unlike others', it does not copy what cannot be sent yet: it must stay as it is until writing resumes."""
        if self._is_closing:
            return
        self._channel.write(data)
        self._channel.flush()
        if self._channel.error is not None:
            self._loop.call_soon(self._go_on)
        elif self._channel.pending_bytes and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self._channel.pending_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 0, 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """They are 0, whatever is asked for."""

    # Ends.

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Read nothing more, and end once all that was written is in the peer's memory."""
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._go_on)

    def abort(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._is_ended:
            return
        self._is_ended = self._is_closing = True
        self._loop.remove_reader(self._channel.fd)
        self._channel.close()
        self._lifeline.abort()
        self._loop.call_soon(self._lost, error)

    def _lost(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._closed()

    def _lifeline_spoke(self) -> None:
        self._end(ProtocolError("bytes over TCP from a peer that has moved to RDMA"))

    def _lifeline_lost(self, error: Exception | None) -> None:
        self._progress()
        self._end(error)

    # What happens.

    def _progress(self) -> None:
        if not self._is_ended:
            self._channel.progress()
            self._go_on()

    def _go_on(self) -> None:
        if self._is_ended:
            return
        try:
            self._deliver()
            if self._is_writing_paused and self._channel.error is None and not self._channel.pending_bytes:
                self._is_writing_paused = False
                self._protocol.resume_writing()
        except BaseException:
            self._end(ConnectionAbortedError("what came could not be dealt with"))
            raise
        if self._channel.error is not None:
            self._end(self._channel.error)
        elif self._is_closing and self._channel.is_sent:
            self._end(None)

    def _deliver(self) -> None:
        """At most what the channel's slots hold: more comes in by `_progress` only."""
        while self._channel.is_readable and not self._is_paused and not self._is_closing:
            buffer = memoryview(self._protocol.get_buffer(-1))
            assert len(buffer), "a protocol that reads has room"
            self._protocol.buffer_updated(self._channel.read_into(buffer))


class _Lifeline(asyncio.Protocol):
    """Listens to the TCP connection, over which nothing comes any more but its end."""

    def __init__(self, spoke: Callable[[], None], lost: Callable[[Exception | None], None]) -> None:
        self._spoke = spoke
        self._lost = lost

    def data_received(self, _data: bytes) -> None:
        self._spoke()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(error)
