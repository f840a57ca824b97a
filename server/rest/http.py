"""HTTP connections of the REST interface: uvicorn's, with limits, and with word of when bytes have left.

uvicorn by itself waits for ever for a request's head, takes heads of any size and any number of connections and of
requests sent ahead, does not tell all of those when their connection is lost, and cannot say when the bytes it was
given are out of the sender's memory.
"""

import asyncio
import logging
from collections import Counter, deque
from typing import Any

from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.rest.problems import RETRY_AFTER_S, Problem

log = logging.getLogger("cairn.rest")

HEAD_BYTES = 64 << 10  # of a request line and its headers
PIPELINED_REQUESTS = 16  # of one connection, waiting for their turn
EXTENSION = "cairn.connection"


def connection_of(scope: Scope) -> "HttpConnection | None":
    """The connection that a request came over; None when another server runs the app."""
    found = scope.get("extensions", {}).get(EXTENSION, {}).get("")
    return found if isinstance(found, HttpConnection) else None


class HttpConnection(HttpToolsProtocol):
    """One client's connection. `patience_s` bounds each wait for the client that no request's own limit covers:
    for a head, for the rest of a body nobody wants, for the client to take the end of an answer. What is refused
    before it is a request is counted in `errors`, by code."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        patience_s: float,
        connections: int,
        errors: Counter[str],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._patience_s = patience_s
        self._most_connections = connections
        self._errors = errors
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0  # of the chunks that began in this head
        self._has_begun = False
        self.lost = asyncio.Event()

    # For answers that are sent in place.

    async def sent(self) -> None:
        """Wait until all that was written is out of this process's memory, or the connection is lost."""
        while not self.lost.is_set() and self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(high=0)
            await self.flow.drain()
        if not self.lost.is_set():
            self.transport.set_write_buffer_limits()

    async def abort(self) -> None:
        """End the connection; on return no byte of what was written is read any more."""
        self.transport.abort()
        await self.lost.wait()

    # uvicorn's side.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._be_patient()
        if len(self.connections) > self._most_connections:
            message = f"{self._most_connections} HTTP connections are open, and no more are taken"
            self._refuse(Problem(503, message, retry_after_s=RETRY_AFTER_S))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watch()
        self.lost.set()
        for cycle in self._unanswered:  # uvicorn tells only the last of those that were sent ahead
            cycle.disconnected = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(Problem(431, f"the head of a request has at most {HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:
            self._in_head, self._head_bytes = True, 0
        self._has_begun = True
        self._be_patient()
        self.scope["extensions"] = {EXTENSION: {"": self}}

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_watch()
        if len(self.pipeline) >= PIPELINED_REQUESTS:
            log.warning("an HTTP client sent over %d requests ahead", PIPELINED_REQUESTS)
            self.transport.abort()
            return
        super().on_headers_complete()
        self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        if self.cycle.response_complete:
            self.cycle.more_body = False
            self._stop_watch()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        if self.cycle.more_body or self.transport.get_write_buffer_size():
            self._be_patient()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Problem(400, msg))

    # Inside.

    def _be_patient(self) -> None:
        self._stop_watch()
        self._watch = self.loop.call_later(self._patience_s, self._give_up)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _give_up(self) -> None:
        if self._in_head and self._has_begun and not self.transport.is_closing():
            self._refuse(Problem(408, "no request came in time"))
        else:
            self.transport.abort()

    def _refuse(self, problem: Problem) -> None:
        """Answer outside of a request, and hang up."""
        self._errors[problem.code] += 1
        response = problem.response()
        head = [STATUS_LINE[problem.status_code], b"connection: close\r\n"]
        head += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self.transport.close()
        self._be_patient()
