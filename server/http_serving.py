"""Serves an ASGI app over HTTP inside the running event loop, and stops it without dropping what is under way."""

import asyncio
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from kvstore.errors import ConfigError
from server.config import host_port
from server.rest.http import HttpConnection

BACKLOG: Final = 256
PATIENCE_S: Final = 30.0  # for a client that sends slowly
CONNECTIONS: Final = 4096
DRAIN_S: Final = 5.0
STOP_S: Final = 2.0  # for requests whose connections were cut to notice it


class HttpServer(uvicorn.Server):
    """uvicorn without hands on the process's signals, which are its owner's; `listening` once it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class HttpServing:
    """One app at `listen`, which the setting `setting` says. `ended` is called with what ends it by itself: a process
    that cannot be reached any more would look well to nobody who asks by HTTP.

    `errors` counts, by code, what is refused before it is a request. `port` is the one it listens at, once started.
    """

    def __init__(
        self,
        app: ASGIApp,
        setting: str,
        listen: str,
        ended: Callable[[BaseException], None],
        *,
        connections: int = CONNECTIONS,
        patience_s: float = PATIENCE_S,
        drain_s: float = DRAIN_S,
        errors: Counter[str] | None = None,
    ) -> None:
        self._app = app
        self._setting = setting
        self._listen = listen
        self._ended = ended
        self._drain_s = drain_s
        self._server: HttpServer | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0
        self.errors: Counter[str] = Counter() if errors is None else errors
        self._connection: Any = partial(
            HttpConnection, patience_s=patience_s, connections=connections, errors=self.errors
        )

    @property
    def url(self) -> str:
        """http://host:port, once it has started."""
        host, _ = host_port(self._listen)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def start(self) -> None:
        """Raises ConfigError when it cannot listen there."""
        listener = _bound(self._setting, self._listen)
        self.port = listener.getsockname()[1]
        self._server = HttpServer(
            uvicorn.Config(
                self._app,
                http=self._connection,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
            )
        )
        self._task = asyncio.get_running_loop().create_task(self._server.serve([listener]))
        self._task.add_done_callback(self._stopped)
        listening = asyncio.ensure_future(self._server.listening.wait())
        await asyncio.wait([self._task, listening], return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            await self._task  # raises what went wrong

    async def stop(self) -> None:
        """Let requests under way end for `drain_s`, then cut their connections."""
        if self._server is None or self._task is None:
            return
        state = self._server.server_state
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=self._drain_s)
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(list(state.tasks), timeout=STOP_S)
        for task in list(state.tasks):
            task.cancel()
        self._server.force_exit = True
        await asyncio.gather(self._task, *state.tasks, return_exceptions=True)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ended(error)


def _bound(setting: str, listen: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            *host_port(listen), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{setting} {listen}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{setting} {listen}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


async def until_signalled(failure: asyncio.Future[None]) -> None:
    """Wait for SIGTERM or SIGINT; raises what `failure` comes to first."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    failure.add_done_callback(lambda _: stopping.set())
    await stopping.wait()
    if failure.done():
        failure.result()
