"""Prefill and decode apart as SGLang does it: both get the same request at once, and meet in a bootstrap room."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from kvstore.errors import ProtocolError
from server.gateway.asked import Asked
from server.gateway.asking import Decision, Place
from server.gateway.engines import EngineFailed, Engines, Opened
from server.gateway.events import cached_of, document, events
from server.gateway.upstream import url_at

ROOM_BITS: Final = 63
LAG_S: Final = 0.2  # that the prefill's answer may come after the decode's
BOOTSTRAP_PORT: Final = 8998


def bootstrapped(wanted: Asked, prefill: Place) -> dict[str, Any]:
    """The request with the place where the two meet; several prompts have a room each."""
    host = prefill.bootstrap_host or urlsplit(url_at(prefill.address, "")).hostname or ""
    port = prefill.bootstrap_port or BOOTSTRAP_PORT
    count = wanted.prompts
    rooms = [secrets.randbits(ROOM_BITS) for _ in range(count)]
    many = isinstance(wanted.body.get("prompt"), list) and not isinstance(wanted.body["prompt"][0], int)
    meeting: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": rooms[0]}
    if many:
        meeting = {"bootstrap_host": [host] * count, "bootstrap_port": [port] * count, "bootstrap_room": rooms}
    return {**wanted.body, **meeting}


class Pairs:
    """Requests that two instances share. A prefill goes on when its decode is done first: it holds the KV that the
    decode took, and would let it go with an error."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._prefills: set[asyncio.Task[int | None]] = set()

    async def close(self) -> None:
        """Cut off the prefills that still run."""
        for task in self._prefills:
            task.cancel()
        await asyncio.gather(*self._prefills, return_exceptions=True)

    @asynccontextmanager
    async def together(self, decision: Decision, wanted: Asked, attempt_id: str) -> AsyncIterator[Opened]:
        """The decode instance's answer. When either fails, both are dropped.

        Raises EngineFailed, EngineRefused. Left by an exception it cancels the prefill as well.
        """
        body = bootstrapped(wanted, decision.prefill)
        both = asyncio.timeout(None)  # is over when the prefill fails: the decode would wait for it for long
        prefill = asyncio.create_task(self._prefill(decision.prefill, wanted, body, attempt_id))
        self._prefills.add(prefill)
        is_open = True

        def ended(task: asyncio.Task[int | None]) -> None:
            self._prefills.discard(task)
            if is_open and not task.cancelled() and task.exception() is not None:
                both.reschedule(0)

        async def cached_tokens() -> int | None:
            await asyncio.wait([prefill], timeout=LAG_S)
            return prefill.result() if prefill.done() else None

        try:
            async with both:
                prefill.add_done_callback(ended)
                try:
                    async with self._engines.stream(decision.decode, wanted, body, attempt_id) as chunks:
                        yield Opened(decision.decode, chunks, cached_tokens)
                finally:
                    is_open = False
        except TimeoutError:
            if prefill.done():
                prefill.result()  # raises why
            raise
        except BaseException:
            prefill.cancel()
            raise

    async def _prefill(self, place: Place, wanted: Asked, body: dict[str, Any], attempt_id: str) -> int | None:
        """Read what nobody wants to its end. The cached tokens, if it says."""
        cached: int | None = None
        async with self._engines.stream(place, wanted, body, attempt_id) as chunks:
            try:
                if wanted.is_stream:
                    async for raw in events(chunks):
                        if b'"usage"' in raw:
                            found = cached_of(document(raw))
                            cached = cached if found is None else found
                    return cached
                return cached_of(json.loads(b"".join([chunk async for chunk in chunks])))
            except (ProtocolError, ValueError) as error:
                raise EngineFailed(place, str(error)) from error
