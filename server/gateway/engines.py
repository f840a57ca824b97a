"""Sends requests to engines and says in one way how that failed: is it the engine, or is it the request?"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import ConnectFailed, ProtocolError, TransportError
from server.gateway.asked import Asked
from server.gateway.asking import Place
from server.gateway.settings import GatewaySettings
from server.gateway.transcript import is_continuable
from server.gateway.upstream import Answer, Streamed, Upstream, url_at

ELSEWHERE: Final = frozenset({404, 408, 425, 429})  # and 5xx: another instance may well do it
BUSY: Final = frozenset({425, 429, 503})
RETURNS_IDS: Final = frozenset({"vllm", "cairn"})
LEAST_WAIT_S: Final = 0.001


class EngineFailed(Exception):
    """This instance did not do it; another may. answer: what it said, if it did. is_busy: it is well, without room.
    is_down: nobody listens there."""

    def __init__(self, place: Place, message: str, answer: Answer | None = None, *, is_down: bool = False) -> None:
        super().__init__(f"{place.name}: {message}")
        self.place = place
        self.answer = answer
        self.is_down = is_down

    @property
    def is_busy(self) -> bool:
        return self.answer is not None and self.answer.status in BUSY


class EngineRefused(Exception):
    """The request is no good, as any instance would say; its answer is the client's."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer of `place`, which has status 200. Where another did the prefill, `cached_tokens` gives what that one
    found in caches, or None where it does not say."""

    place: Place
    chunks: AsyncIterator[bytes]
    cached_tokens: Callable[[], Awaitable[int | None]] | None = None


class Engines:
    """All of them: a request finds its instance by the `Place` it goes to."""

    def __init__(self, upstream: Upstream, settings: GatewaySettings, now: Callable[[], float]) -> None:
        self._upstream = upstream
        self._settings = settings
        self._now = now
        token = settings.engine_token
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    async def ask(self, place: Place, wanted: Asked, body: Mapping[str, Any], attempt_id: str) -> Answer:
        """A whole answer, whose first token is its last. Raises EngineFailed, EngineRefused."""
        try:
            answer = await self._upstream.json(
                "POST",
                url_at(place.address, wanted.path),
                body,
                headers={**self._headers, "x-request-id": attempt_id},
                timeout_s=self._first_token_s(wanted),
            )
        except (TransportError, ProtocolError) as error:
            raise EngineFailed(place, str(error), is_down=isinstance(error, ConnectFailed)) from error
        _check(place, answer)
        return answer

    @asynccontextmanager
    async def stream(
        self, place: Place, wanted: Asked, body: Mapping[str, Any], attempt_id: str
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The body of an answer as it comes. Raises EngineFailed, also while it is read, and EngineRefused."""
        settings = self._settings
        wait_s = self._first_token_s(wanted) if wanted.is_stream else settings.request_timeout
        async with contextlib.AsyncExitStack() as stack:
            try:
                streamed = await stack.enter_async_context(
                    self._upstream.stream(
                        "POST",
                        url_at(place.address, wanted.path),
                        body,
                        headers={**self._headers, "x-request-id": attempt_id},
                        timeout_s=wait_s,
                        idle_s=wait_s if wanted.is_stream else settings.idle_timeout,
                    )
                )
                if not streamed.is_ok:
                    _check(place, Answer(streamed.status, streamed.headers, await streamed.read()))
            except (TransportError, ProtocolError) as error:
                raise EngineFailed(place, str(error), is_down=isinstance(error, ConnectFailed)) from error
            yield _chunks(place, streamed, settings.idle_timeout)

    @asynccontextmanager
    async def alone(self, place: Place, wanted: Asked, attempt_id: str) -> AsyncIterator[Opened]:
        """One instance does all of it. Raises EngineFailed, EngineRefused."""
        async with self.stream(place, wanted, with_ids(place, wanted), attempt_id) as chunks:
            yield Opened(place, chunks)

    def _first_token_s(self, wanted: Asked) -> float:
        most = self._settings.first_token_timeout
        if wanted.deadline_s is None:
            return most
        return max(LEAST_WAIT_S, min(most, wanted.deadline_s - self._now()))


def with_ids(place: Place, wanted: Asked) -> Mapping[str, Any]:
    """The body, which asks for token ids too where a stream that breaks could go on from them elsewhere."""
    if place.engine in RETURNS_IDS and is_continuable(wanted):
        return {**wanted.body, "return_token_ids": True}
    return wanted.body


async def _chunks(place: Place, streamed: Streamed, idle_s: float) -> AsyncIterator[bytes]:
    try:
        async for chunk in streamed.chunks():
            streamed.idle_s = idle_s
            yield chunk
    except TransportError as error:
        raise EngineFailed(place, str(error)) from error


def _check(place: Place, answer: Answer) -> None:
    """Raises what a status means."""
    if answer.is_ok:
        return
    if answer.status in ELSEWHERE or not 400 <= answer.status < 500:
        raise EngineFailed(place, f"status {answer.status}: {answer.body[:200]!r}", answer)
    raise EngineRefused(answer)
