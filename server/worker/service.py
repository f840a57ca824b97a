"""A worker: its model, the threads that serve it, its HTTP server and its place at the Conductor."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from server.http_serving import HttpServing, until_signalled
from server.worker.app import create_app
from server.worker.generator import Generator, Limits, Measured
from server.worker.model import Model
from server.worker.registration import Registration
from server.worker.serving import Serving
from server.worker.settings import WorkerSettings
from server.worker.store_side import StoreSide

log = logging.getLogger("cairn.worker")

FAILED = 1


class Worker:
    """Made inside the event loop, with a model that is loaded and what it takes. `serve` until a signal comes."""

    def __init__(self, settings: WorkerSettings, model: Model, costs: dict[str, list[float]]) -> None:
        """Raises ConfigError when the store's address is none."""
        self._settings = settings
        self._model = model
        self._costs = costs
        self.role: str = settings.role
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
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
        app = create_app(self._serving, settings.token)
        self._http = HttpServing(app, "worker.listen", settings.listen, self._cut_off)
        self._registrations: list[Registration] = []
        self._untold: list[Measured] = []  # what each Conductor has not heard of yet
        for number, url in enumerate(filter(None, settings.conductor.split(","))):
            self._untold.append(Measured())
            beat = partial(self._beat, self._untold[-1])
            told = _unheeded if number else self._told
            self._registrations.append(
                Registration(settings.name, url, settings.conductor_token, self._body, beat, told)
            )

    @property
    def url(self) -> str:
        """Where it listens, once it serves."""
        return self._http.url

    async def serve(self, ready: Callable[[], None]) -> int:
        """The exit code. `ready` is called once it serves. On a signal what runs may end, for drain_seconds.

        Raises ConfigError when it cannot listen.
        """
        registering: list[asyncio.Task[None]] = []
        try:
            if self._store is not None:
                await asyncio.to_thread(self._store.storing)
            await self._http.start()
            registering = [asyncio.create_task(registration.run()) for registration in self._registrations]
            ready()
            await until_signalled(self._failure)
            await self._drain()
        finally:
            await self._stop(registering)
        return FAILED if self._failure.done() else 0

    async def _drain(self) -> None:
        self._serving.is_draining = True
        await asyncio.gather(*(registration.leave() for registration in self._registrations))
        if not self._failure.done():
            await self._generator.drain(self._settings.drain_seconds)

    async def _stop(self, registering: list[asyncio.Task[None]]) -> None:
        for task in registering:
            task.cancel()
        await asyncio.gather(*registering, return_exceptions=True)
        await asyncio.gather(*(registration.close() for registration in self._registrations))
        await self._generator.stop()
        await self._http.stop()
        self._serving.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    def _failed(self) -> None:
        """The engine's thread is gone, or the HTTP server: whoever supervises this process should start another."""
        if not self._failure.done():
            self._failure.set_result(None)

    def _cut_off(self, error: BaseException) -> None:
        log.error("the HTTP server ended: %s", error)
        self._failed()

    # What the Conductor hears, and says.

    def _body(self) -> dict[str, Any]:
        settings, store = self._settings, self._store
        body: dict[str, Any] = {
            "name": settings.name,
            "role": self.role,
            "model": self._model.name,
            "engine": "cairn",
            "address": settings.advertise or self.url.removeprefix("http://"),
            "block_tokens": settings.block_tokens,
            "hash": self._model.namespace.hash,
            "kv_bytes": self._model.kv_bytes,
            "decode_tokens": settings.max_tokens_total,
            "decode_batch": settings.max_batch,
            "grid_tokens": settings.chunk_tokens,
            **self._costs,
        }
        if store is not None and store.root:
            body |= {"node": store.node_name, "root": store.root}
            body["node_address"] = settings.node_advertise or settings.node
            body["namespace"] = {"name": self._model.name, "fields": msgspec.to_builtins(self._model.namespace)}
        return body

    def _beat(self, untold: Measured) -> dict[str, Any]:
        prefill_tokens, decode_batch, decode_context = self._generator.load
        prefills, steps = self._generator.measured.take()
        for each in self._untold:
            each.prefills.extend(prefills)
            each.steps.extend(steps)
        prefills, steps = untold.take()
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


def _unheeded(role: str) -> None:
    """What other Conductors than the first want the role to be: they share nothing, so they may not agree."""
