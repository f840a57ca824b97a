"""A worker: its model, the threads that serve it, its HTTP server and its place at the Conductor."""

import asyncio
import logging
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from kvstore.errors import ConfigError
from server.config import host_port
from server.http_serving import HttpServer
from server.rest.http import HttpConnection
from server.worker.app import create_app
from server.worker.generator import Generator, Limits, Measured
from server.worker.model import Model
from server.worker.registration import Registration
from server.worker.serving import Serving
from server.worker.settings import WorkerSettings
from server.worker.store_side import StoreSide

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("cairn.worker")

CONNECTIONS = 1024
PATIENCE_S = 30.0  # for a client to send a head, or to take the end of an answer
STOP_S = 2.0  # for answers to leave after the last token
FAILED = 1


class Worker:
    """Made inside the event loop, with a model that is loaded and what it takes. `serve` until a signal comes."""

    def __init__(self, settings: WorkerSettings, model: Model, costs: dict[str, list[float]]) -> None:
        """Raises ConfigError when it cannot listen, or has a store's address that is none."""
        self._settings = settings
        self._model = model
        self._costs = costs
        self._listener = _bind(settings.listen)
        self.role: str = settings.role
        self._stopping = asyncio.Event()
        self._has_failed = False
        self._store: StoreSide | None = None
        if settings.node:
            self._store = StoreSide(settings.node, settings.node_token, model.name, model.namespace, settings.name)
        self._generator = Generator(
            model.engine,
            Limits(settings.max_batch, settings.max_tokens_total, settings.queue, settings.chunks_per_step),
            settings.threads,
            self._store,
            self._failed,
        )
        self._serving = Serving(settings, model, self._generator)
        self._registration: Registration | None = None
        if settings.conductor:
            self._registration = Registration(
                settings.conductor, settings.conductor_token, self._body, self._beat, self._told
            )

    @property
    def address(self) -> str:
        """host:port where it listens."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def measured(self) -> Measured:
        return self._generator.measured

    async def serve(self, ready: "Callable[[], None]") -> int:
        """The exit code. `ready` is called once it serves. On a signal what runs may end, for drain_seconds."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        if self._store is not None:
            await asyncio.to_thread(self._store.storing)
        server = self._http_server()
        serving = loop.create_task(server.serve([self._listener]))
        serving.add_done_callback(lambda task: self._stopping.set())
        await asyncio.wait([serving, loop.create_task(server.listening.wait())], return_when=asyncio.FIRST_COMPLETED)
        registering = None if self._registration is None else loop.create_task(self._registration.run())
        ready()
        await self._stopping.wait()
        await self._drain()
        if registering is not None and self._registration is not None:
            registering.cancel()
            await asyncio.wait([registering])
            await self._registration.close()
        await self._close(server, serving)
        return FAILED if self._has_failed else 0

    async def _drain(self) -> None:
        self._serving.is_draining = True
        if self._registration is not None:
            await self._registration.leave()
        if not self._has_failed:
            await self._generator.drain(self._settings.drain_seconds)

    async def _close(self, server: HttpServer, serving: "asyncio.Task[None]") -> None:
        await self._generator.stop()
        server.should_exit = True
        await asyncio.wait([serving], timeout=STOP_S)
        server.force_exit = True
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(serving, *server.server_state.tasks, return_exceptions=True)
        self._serving.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    def _http_server(self) -> HttpServer:
        connection: Any = partial(
            HttpConnection,
            patience_s=PATIENCE_S,
            connections=CONNECTIONS,
            errors=self._serving.http_errors,
        )
        return HttpServer(
            uvicorn.Config(
                create_app(self._serving, self._settings.token),
                http=connection,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
            )
        )

    def _failed(self) -> None:
        """The engine's thread is gone: whoever supervises this process should start another."""
        self._has_failed = True
        self._stopping.set()

    # What the Conductor hears, and says.

    def _body(self) -> dict[str, Any]:
        settings, store = self._settings, self._store
        body: dict[str, Any] = {
            "name": settings.name,
            "role": self.role,
            "model": self._model.name,
            "engine": "cairn",
            "address": settings.advertise or self.address,
            "block_tokens": settings.block_tokens,
            "hash": self._model.namespace.hash,
            "kv_bytes": self._model.kv_bytes,
            "decode_tokens": settings.max_tokens_total,
            "decode_batch": settings.max_batch,
            **self._costs,
        }
        if store is not None and store.root:
            body |= {"node": store.node_name, "root": store.root}
            body["node_address"] = settings.node_advertise or settings.node
        return body

    def _beat(self) -> dict[str, Any]:
        prefill_tokens, decode_batch, decode_context = self._generator.load
        prefills, steps = self.measured.take()
        return {
            "prefill_tokens": prefill_tokens,
            "decode_batch": decode_batch,
            "decode_context": decode_context,
            "prefills": prefills,
            "steps": steps,
        }

    def _told(self, role: str) -> None:
        if role != self.role:
            log.info("the role is %s now, it was %s", role, self.role)
            self.role = role


def _bind(listen: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            *host_port(listen), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"worker.listen {listen}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"worker.listen {listen}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
