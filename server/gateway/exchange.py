"""One request from its route to its last byte, over as many instances as it takes."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from kvstore.errors import ProtocolError
from server.gateway.asked import Asked, Refused
from server.gateway.asking import Asking, Decision, Place, Wait
from server.gateway.client import Client
from server.gateway.engines import EngineFailed, EngineRefused, Engines, Opened
from server.gateway.events import error_in, event, events, payload, with_cached
from server.gateway.metrics import Metrics
from server.gateway.settings import GatewaySettings
from server.gateway.sglang import Pairs
from server.gateway.tokens import Tokens
from server.gateway.transcript import Transcript
from server.gateway.upstream import ANSWER_BYTES, Answer
from server.gateway.vllm import prefill_then_decode

log = logging.getLogger("cairn.gateway")

PAUSE_S: Final = 0.1  # before instances that failed are asked again; doubles
READ_OUT_S: Final = 0.5
PASSED_ON: Final = ("retry-after",)


class Parts(NamedTuple):
    """What all exchanges of a gateway share."""

    settings: GatewaySettings
    asking: Asking
    tokens: Tokens
    engines: Engines
    pairs: Pairs
    metrics: Metrics
    now: Callable[[], float]


class Exchange:
    """`run` sends the client its answer. Cancelled, it closes what is open to engines and tells the Conductor."""

    def __init__(self, parts: Parts, wanted: Asked, client: Client, arrived_s: float) -> None:
        self._parts = parts
        self._wanted = wanted
        self._client = client
        self._arrived_s = arrived_s
        self._exclude: set[str] = set()  # instances that failed at this request
        self._transcript = Transcript(wanted)
        self._pause_s = PAUSE_S
        self._attempt_id = ""  # of the try that is under way; "": none that the Conductor knows
        self._is_prefilled = False
        self._awaited: tuple[Place, ...] = ()  # the instances that are to say something next

    async def run(self) -> str:
        """The outcome, as metrics name it. Raises ClientGone; an answer that failed is sent, too."""
        settings = self._parts.settings
        try:
            async with asyncio.timeout(settings.request_timeout):
                tokens = self._parts.tokens
                self._wanted = self._wanted.knowing(
                    await tokens.of(self._wanted), tokens.most_known(self._wanted.model)
                )
                self._transcript = Transcript(self._wanted)
                return await self._tries()
        except TimeoutError:
            return await self._give_up(Refused(504, "no whole answer in time", code="timeout"))
        except Refused as refused:
            return await self._give_up(refused)
        except EngineRefused as refused:
            if self._client.has_begun:
                message = f"the answer could not go on elsewhere: {refused}"
                return await self._give_up(Refused(502, message, code="engine_failed"))
            await self._pass_on(refused.answer)
            return "invalid"
        except EngineFailed as failed:
            return await self._give_up_on(failed)
        finally:
            if self._attempt_id:
                self._report("cancelled")

    async def _tries(self) -> str:
        """Raises Refused, EngineRefused, EngineFailed: what the last try said."""
        wanted = self._wanted
        for number in range(self._parts.settings.tries):
            is_last = number == self._parts.settings.tries - 1
            self._check_deadline()
            attempt_id = self._wanted.id if not number else f"{self._wanted.id}.{number}"
            self._attempt_id, self._is_prefilled = attempt_id, False
            try:
                decision = await self._route(wanted, attempt_id)
            except Refused:
                self._attempt_id = ""
                if is_last or not number:
                    raise
                await self._pause()
                continue
            try:
                await self._attempt(decision, wanted)
                return "finished"
            except EngineFailed as failed:
                self._failed(failed)
                if self._transcript.has_begun:
                    following = await self._following()
                    if await self._ended():
                        return "finished"
                    if following is None:
                        raise
                    self._parts.metrics.continued.inc()
                    wanted = following
                self._check_deadline()
                if is_last:
                    raise
                self._parts.metrics.retries.inc()
        raise AssertionError("the last try returns or raises")

    async def _following(self) -> Asked | None:
        """What to ask another instance. None when there is nothing to ask for, or nobody says how much."""
        following = self._transcript.continuation()
        if following is None or following.output_tokens is not None or self._transcript.ending() is not None:
            return following
        self._transcript.learn(await self._parts.tokens.most_of(self._wanted.model))
        following = self._transcript.continuation()
        return following if following is not None and following.output_tokens is not None else None

    async def _route(self, wanted: Asked, attempt_id: str) -> Decision:
        """Past what failed, if there is another: one that failed may be back, and is better than none.

        Raises Refused.
        """
        asking = self._parts.asking
        down = frozenset(asking.down)
        for exclude in dict.fromkeys((down | self._exclude, down)):
            if exclude:
                try:
                    return await asking.route(wanted, attempt_id, exclude)
                except Refused as refused:
                    if refused.status != 503:
                        raise
                    await self._pause()
        return await asking.route(wanted, attempt_id, ())

    async def _pause(self) -> None:
        """Give what failed some time, if anything did."""
        if self._exclude:
            await asyncio.sleep(self._pause_s)
            self._pause_s *= 2

    async def _attempt(self, decision: Decision, wanted: Asked) -> None:
        async with AsyncExitStack() as stack:
            async with self._waiting():
                opened = await stack.enter_async_context(self._open(decision, wanted))
            opened = replace(opened, chunks=self._heard(opened))
            await (self._stream(opened) if wanted.is_stream else self._whole(opened))
        self._report("finished")

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        """Raises EngineFailed when the Conductor has given up on who is waited for: it may hang and never say so."""
        wait, waits = Wait(lambda: self._awaited), self._parts.asking.waits
        try:
            async with wait.limit:
                waits.add(wait)
                try:
                    yield
                finally:
                    waits.discard(wait)
        except TimeoutError as error:
            if wait.gone is None or not wait.limit.expired():
                raise
            raise EngineFailed(wait.gone, "silent, and lost to the Conductor", is_down=True) from error

    async def _heard(self, opened: Opened) -> AsyncIterator[bytes]:
        while True:
            async with self._waiting():
                chunk = await anext(opened.chunks, None)
            if chunk is None:
                return
            self._awaited = (opened.place,)
            yield chunk

    def _open(self, decision: Decision, wanted: Asked) -> AbstractAsyncContextManager[Opened]:
        parts, attempt_id = self._parts, self._attempt_id
        self._awaited = (decision.prefill,)
        if decision.is_collocated:
            return parts.engines.alone(decision.prefill, wanted, attempt_id)
        if decision.prefill.engine == "sglang":
            self._awaited = (decision.prefill, decision.decode)
            return parts.pairs.together(decision, wanted, attempt_id)
        if not wanted.is_one:
            self._awaited = (decision.decode,)
            return parts.engines.alone(decision.decode, wanted, attempt_id)
        return prefill_then_decode(
            parts.engines, decision, wanted, attempt_id, partial(self._prefilled, decision.decode)
        )

    async def _stream(self, opened: Opened) -> None:
        """Raises EngineFailed when it breaks, or ends without its end."""
        try:
            async for raw in events(opened.chunks):
                said = payload(raw)
                if not said:
                    continue  # a comment, to keep a connection alive
                self._look_for_error(opened, raw)
                self._began()
                cached_tokens = await opened.cached_tokens() if opened.cached_tokens and b'"usage"' in raw else None
                told = self._transcript.take(raw, cached_tokens, is_apart=opened.cached_tokens is not None)
                await self._client.piece(told)
                if said == b"[DONE]":
                    await self._client.end()
                    await _read_out(opened)
                    return
        except ProtocolError as error:
            raise EngineFailed(opened.place, str(error)) from error
        raise EngineFailed(opened.place, "its stream ended early")

    async def _whole(self, opened: Opened) -> None:
        parts, size = [], 0
        async for chunk in opened.chunks:
            parts.append(chunk)
            size += len(chunk)
            if size > ANSWER_BYTES:
                raise EngineFailed(opened.place, f"its answer has more than {ANSWER_BYTES} bytes")
        body = b"".join(parts)
        if opened.cached_tokens is not None:
            body = _rewritten(opened, body, await opened.cached_tokens())
        await self._client.answer(200, body)

    def _look_for_error(self, opened: Opened, raw: bytes) -> None:
        """An engine that fails after its status says so in an event."""
        error = error_in(raw)
        if error is None:
            return
        code = error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        if 400 <= status < 500 and not self._transcript.has_begun:
            raise EngineRefused(Answer(status, {}, payload(raw)))
        raise EngineFailed(opened.place, f"in its stream: {error.get('message')}")

    def _began(self) -> None:
        """The first token came."""
        if not self._is_prefilled:
            self._is_prefilled = True
            self._report("prefilled")
        if not self._transcript.has_begun:
            self._parts.metrics.ttft_s.observe(self._parts.now() - self._arrived_s)

    async def _prefilled(self, decode: Place) -> None:
        """The prefill is done where that is a step of its own. Raises Refused."""
        self._is_prefilled = True
        self._awaited = (decode,)
        await self._parts.asking.prefilled(self._attempt_id)

    def _failed(self, failed: EngineFailed) -> None:
        log.warning("request %s, try %s: %s", self._wanted.id, self._attempt_id, failed)
        is_late = self._wanted.deadline_s is not None and self._parts.now() >= self._wanted.deadline_s
        blamed = "" if failed.is_busy or is_late else failed.place.name
        if blamed:
            self._parts.asking.suspect(blamed, is_down=failed.is_down)
        self._exclude.add(failed.place.name)
        self._report("failed", blamed)

    def _report(self, state: Any, instance: str = "") -> None:
        self._parts.asking.report(self._attempt_id, state, instance)
        if state != "prefilled":
            self._attempt_id = ""

    async def _ended(self) -> bool:
        """Whether a stream that broke had said all but its end, which it gets here."""
        rest = self._transcript.ending()
        if rest is None:
            return False
        await self._client.piece(rest)
        await self._client.end()
        return True

    def _check_deadline(self) -> None:
        deadline_s = self._wanted.deadline_s
        if deadline_s is not None and not self._transcript.has_begun and self._parts.now() >= deadline_s:
            raise Refused(504, "the deadline passed before the answer began", code="deadline_exceeded")

    async def _give_up_on(self, failed: EngineFailed) -> str:
        if failed.answer is not None and not self._client.has_begun:
            await self._pass_on(failed.answer)
            return "failed"
        return await self._give_up(
            Refused(502, f"no instance could answer; the last was {failed}", code="engine_failed")
        )

    async def _give_up(self, refused: Refused) -> str:
        """Refuse, or end a stream with an error. Without [DONE]: nobody shall take it for whole."""
        if self._client.has_begun:
            await self._client.piece(event(refused.document()))
            await self._client.end()
            return "failed"
        await self._client.refuse(refused)
        return "refused" if refused.status in (429, 503) else "failed"

    async def _pass_on(self, answer: Answer) -> None:
        """An engine's refusal, as it is."""
        content_type = answer.headers.get("content-type", "application/json")
        headers = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
        await self._client.answer(answer.status, answer.body, content_type, headers)


async def _read_out(opened: Opened) -> None:
    """Read what follows the last event, which is nothing, so that the connection can be used again."""
    try:
        async with asyncio.timeout(READ_OUT_S):
            async for _ in opened.chunks:
                pass
    except (TimeoutError, EngineFailed):
        pass


def _rewritten(opened: Opened, body: bytes, cached_tokens: int | None) -> bytes:
    """An answer with the usage that the client is to see, and without what is between engines. Raises EngineFailed."""
    try:
        found = json.loads(body)
    except ValueError as error:
        raise EngineFailed(opened.place, "its answer is not JSON") from error
    if not isinstance(found, dict):
        return body
    found.pop("kv_transfer_params", None)
    if isinstance(found.get("usage"), dict):
        found["usage"] = with_cached(found["usage"], cached_tokens)
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
