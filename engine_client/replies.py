"""An async client's connection: matches replies with those who wait for them, and gives back what nobody waits for."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from engine_client.address import Address
from engine_client.retry import REPLY_BYTES
from engine_client.steps import Call
from kvstore import wire
from kvstore.errors import ConnectFailed, DeadlineExceeded, PeerLost, ProtocolError, StoreError
from kvstore.transport.stream import FrameStream, sink


class Replies(FrameStream):
    """`lost` says of what the connection ended, once it did."""

    def __init__(self) -> None:
        super().__init__(REPLY_BYTES)
        self._waiting: dict[int, tuple[asyncio.Future[Any], Call]] = {}
        self._arriving: tuple[int, Any] | None = None  # whose payload comes in, and the reply that it follows
        self._requests = 0
        self.lost: StoreError | None = None
        self.on_loss: Callable[[], None] | None = None  # called once, when the other side ended it
        self._is_hung_up = False

    @property
    def is_in_use(self) -> bool:
        return bool(self._waiting)

    async def ask(self, call: Call, timeout_s: float) -> Any:
        """Send and wait for the reply. Cancelled or late, it leaves nothing that could write into the targets."""
        return await self.finish(self.begin(call), timeout_s)

    def begin(self, call: Call) -> int:
        """Send a request; the number by which to `finish` or to `forget` it."""
        if self.lost is not None:
            raise PeerLost("the connection broke, and what it held is gone") from self.lost
        self._requests += 1
        self._waiting[self._requests] = asyncio.get_running_loop().create_future(), call
        self.send(wire.encode(call.request(self._requests), sum(map(len, call.payload))), call.payload)
        return self._requests

    async def finish(self, number: int, timeout_s: float) -> Any:
        """Wait for the reply, once. As `ask`."""
        future, call = self._asked(number)
        try:
            async with asyncio.timeout(timeout_s + call.wait_s):
                reply = await future
        except TimeoutError as error:
            self.forget(number)
            raise DeadlineExceeded(f"no answer in {timeout_s + call.wait_s} s") from error
        except BaseException:
            self.forget(number)
            raise
        del self._waiting[number]
        return reply

    def is_answered(self, number: int) -> bool:
        return self._asked(number)[0].done()

    def _asked(self, number: int) -> tuple[asyncio.Future[Any], Call]:
        if number not in self._waiting:
            raise PeerLost("nobody waits for it any more")
        return self._waiting[number]

    def forget(self, number: int) -> None:
        """Nobody waits for it any more: what it brings is given back, and written nowhere."""
        future, _ = self._asked(number)
        del self._waiting[number]
        if future.done() and not future.cancelled() and future.exception() is None:
            self._refuse(future.result())
        if self._arriving is not None and self._arriving[0] == number:
            self._arriving = None
            self.redirect_payload(sink(self.payload_left))

    def frame_received(self, body: bytes, payload_bytes: int) -> Sequence[memoryview]:
        reply = wire.decode_reply(body)
        if isinstance(reply, wire.Failed) and reply.id == 0:
            self._fail(wire.to_error(reply))
            return sink(payload_bytes)
        future, call = self._waiting.get(reply.id, (None, None))
        if future is None or call is None or future.done():  # whoever asked has gone
            self._refuse(reply)
            return sink(payload_bytes)
        if isinstance(reply, wire.Failed):
            future.set_exception(wire.to_error(reply))
            return sink(payload_bytes)
        if not payload_bytes:
            future.set_result(reply)
            return ()
        try:
            targets = call.targets(reply) if call.targets is not None else ()
            if sum(map(len, targets)) != payload_bytes:
                raise ProtocolError(f"a payload of {payload_bytes} bytes that was not asked for")
        except StoreError as error:
            future.set_exception(error)
            return sink(payload_bytes)
        self._arriving = reply.id, reply
        return targets

    def _refuse(self, reply: Any) -> None:
        """Give back what the node gave to somebody who does not wait for it any more."""
        if isinstance(reply, wire.Acquired) and reply.lease_id:
            self.post(lambda number: wire.Release(number, reply.lease_id))
        elif isinstance(reply, wire.Placed) and reply.grant_id:
            self.post(lambda number: wire.Abort(number, reply.grant_id))
        elif isinstance(reply, wire.Pinned) and reply.pin_id:
            self.post(lambda number: wire.Unpin(number, reply.pin_id))

    def post(self, request: Callable[[int], wire.Message]) -> None:
        """Send what needs no answer."""
        self._requests += 1
        self.send(wire.encode(request(self._requests)))

    def payload_received(self) -> None:
        if self._arriving is None:
            return
        (number, reply), self._arriving = self._arriving, None
        future, _ = self._waiting.get(number, (None, None))
        if future is not None and not future.done():
            future.set_result(reply)

    def broken(self, error: ProtocolError) -> None:
        self._fail(error)
        self.hang_up()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._fail(PeerLost(f"the node hung up{f': {error}' if error else ''}"))
        if self.on_loss is not None and not self._is_hung_up:
            self.on_loss()

    def hang_up(self) -> None:
        self._is_hung_up = True
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: StoreError) -> None:
        self.lost = self.lost or error
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(self.lost)
                future.exception()  # looked at: who began it may have failed, and not come back for it


async def open_replies(address: Address, tls: ssl.SSLContext | None, timeout_s: float) -> Replies:
    """A connection to `address`. Raises ConnectFailed."""
    loop = asyncio.get_running_loop()
    opening: Coroutine[Any, Any, tuple[asyncio.BaseTransport, Replies]]
    if address.path:
        opening = loop.create_unix_connection(Replies, address.path)
    else:
        opening = loop.create_connection(Replies, address.host, address.port, ssl=tls)
    try:
        async with asyncio.timeout(timeout_s):
            transport, replies = await opening
    except TimeoutError as error:
        raise ConnectFailed(f"{address}: no connection in {timeout_s} s") from error
    except OSError as error:
        raise ConnectFailed(f"{address}: {error.strerror or error}") from error
    if not address.path:
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return replies
