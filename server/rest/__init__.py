"""The REST interface of a node: its FastAPI app, and the HTTP server that runs inside the node's event loop."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from kvstore.errors import ConfigError
from server.config import host_port
from server.exporter import Exporter
from server.rest import blocks, cluster, events, namespaces
from server.rest import node as node_routes
from server.rest.door import Door, Sessions
from server.rest.http import HttpConnection
from server.rest.openapi import DESCRIPTION, complete, limit_block_bytes
from server.rest.problems import install

if TYPE_CHECKING:
    from server.node import Node

API_VERSION = "1.0.0"
BACKLOG = 256
STOP_S = 2.0  # for requests whose connections were cut to notice it


class RestApp(FastAPI):
    """FastAPI with a document that says all of what can come back."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = complete(super().openapi())
            if self.state.node is not None:
                limit_block_bytes(document, self.state.node.config.tiers.dram.slab)
            self.openapi_schema = document
        return self.openapi_schema


def create_app(node: "Node | None") -> FastAPI:
    """The app of a node; without one it only has its document."""
    app = RestApp(
        title="Cairn",
        version=API_VERSION,
        description=DESCRIPTION,
        routes=[
            *blocks.router.routes,
            *namespaces.router.routes,
            *node_routes.router.routes,
            *events.router.routes,
            *cluster.router.routes,
        ],
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.node = node
    install(app, node)
    if node is not None:
        sessions = Sessions(node)
        app.state.exporter = Exporter(node, sessions.__len__)
        app.add_middleware(Door, node=node, sessions=sessions)
    return app


class HttpServer(uvicorn.Server):
    """uvicorn without hands on the process's signals, which are the node's; `listening` once it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class RestServer:
    """Serves `create_app(node)` at `rest.listen`. `port` is the one it listens at, once it has started."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._server: HttpServer | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Raises ConfigError when it cannot listen there."""
        listener = self._bind()
        self.port = listener.getsockname()[1]
        config = self._node.config
        connection: Any = partial(
            HttpConnection,
            patience_s=config.rest.request_timeout,
            connections=config.limits.connections,
            errors=self._node.store.counters.errors,
        )
        self._server = HttpServer(
            uvicorn.Config(
                create_app(self._node),
                http=connection,
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
        self._task.add_done_callback(self._ended)
        listening = asyncio.ensure_future(self._server.listening.wait())
        await asyncio.wait([self._task, listening], return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            await self._task  # raises what went wrong

    async def stop(self) -> None:
        """Let requests under way end for `drain_seconds`, then cut their connections."""
        if self._server is None or self._task is None:
            return
        state = self._server.server_state
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=self._node.config.node.drain_seconds)
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(list(state.tasks), timeout=STOP_S)
        for task in list(state.tasks):
            task.cancel()
        self._server.force_exit = True
        await asyncio.gather(self._task, *state.tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A node that cannot be reached by HTTP any more would look well to nobody who asks by HTTP."""
        if not task.cancelled() and task.exception() is not None:
            self._node.crashed(task.exception())

    def _bind(self) -> socket.socket:
        listen = self._node.config.rest.listen
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                *host_port(listen), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise ConfigError(f"rest.listen {listen}: {error.strerror or error}") from error
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            listener.close()
            raise ConfigError(f"rest.listen {listen}: {error.strerror or error}") from error
        listener.setblocking(False)
        return listener
