"""The HTTP interface of a worker: OpenAI's API, and what gateways and operators ask beside it."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeVar
from uuid import uuid4

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.rest.http import connection_of
from server.worker.jobs import Job
from server.worker.openai_api import Answer, Asked, Piece, asked
from server.worker.problems import Refused
from server.worker.serving import Serving

BODY_BYTES: Final = 64 << 20
BODY_S: Final = 60.0  # that a body may take to come
TAKE_S: Final = 60.0  # that a client may take for a piece of a stream
OPEN_PATHS: Final = frozenset({"/health", "/metrics"})
DONE: Final = b"data: [DONE]\n\n"
Result = TypeVar("Result")


def create_app(serving: Serving, token: str) -> Starlette:
    """The app of a worker; with a `token` only requests that show it get more than /health and /metrics."""
    routes = Routes(serving)
    return Starlette(
        routes=[
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={Refused: _refused},
    )


class Guard:
    """Lets in who shows the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._shown = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._shown and scope["path"] not in OPEN_PATHS:
            shown = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(shown, self._shown):
                response = Refused(401, "a bearer token is needed", code="invalid_api_key").response()
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Routes:
    """The handlers, each with what it answers."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def models(self, request: Request) -> Response:
        serving = self._serving
        model = {"id": serving.model.name, "object": "model", "created": 0, "owned_by": "cairn"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": serving.most_tokens}]})

    async def tokenize(self, request: Request) -> Response:
        body = await _json(request)
        is_chat = isinstance(body, dict) and "messages" in body
        wanted = asked(body, is_chat=is_chat, model=self._serving.model.name)
        with_answer = body.get("add_generation_prompt") is not False
        tokens = await self._serving.prompt(wanted, with_answer=with_answer)
        return JSONResponse(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self._serving.most_tokens, "token_strs": None}
        )

    async def health(self, request: Request) -> Response:
        if self._serving.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._serving.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        serving = self._serving
        try:
            wanted = asked(await _json(request), is_chat=is_chat, model=serving.model.name)
            tokens = await serving.prompt(wanted)
        except Refused:
            serving.metrics.requests.labels("invalid").inc()
            raise
        request_id = request.headers.get("x-request-id") or uuid4().hex
        answer = Answer(request_id, serving.model.name, wanted, tokens)
        job, seed = serving.begin(wanted, tokens)
        if not wanted.is_stream:
            try:
                pieces = await _while_connected(request, self._collect(job, wanted))
            finally:
                serving.leave(job)
            token = next((token for piece in pieces for token in piece.token_ids), -1)
            transfer = serving.transfer(request_id, token, seed) if wanted.hands_over else None
            return JSONResponse(answer.whole(pieces, job.cached_tokens, transfer))
        rest = serving.pieces(job, wanted)
        try:
            first = await _while_connected(request, anext(rest))
        except BaseException:
            serving.leave(job)
            raise
        return Stream(self._events(answer, job, first, rest), lambda: serving.leave(job))

    async def _collect(self, job: Job, wanted: Asked) -> list[Piece]:
        return [piece async for piece in self._serving.pieces(job, wanted)]

    async def _events(self, answer: Answer, job: Job, first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        count = len(first.token_ids)
        for event in answer.events(first):
            yield _event(event)
        try:
            async for piece in rest:
                count += len(piece.token_ids)
                for event in answer.events(piece):
                    yield _event(event)
        except Refused as refused:
            yield _event(refused.body())
            return
        usage = answer.last_event(count, job.cached_tokens)
        if usage is not None:
            yield _event(usage)
        yield DONE


class Stream(StreamingResponse):
    """Server-sent events; `left` is called whatever becomes of them. Who takes none for TAKE_S is hung up on."""

    def __init__(self, events: AsyncIterator[bytes], left: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            async with asyncio.timeout(TAKE_S):
                await send(message)

        try:
            await super().__call__(scope, receive, sent)
        except (TimeoutError, ClientDisconnect):
            connection = connection_of(scope)
            if connection is not None:
                await connection.abort()
        finally:
            self._left()


async def _while_connected(request: Request, wanted: Awaitable[Result]) -> Result:
    """The result of `wanted`, which is cancelled when the client goes. Raises Refused then, for nobody to read."""
    task = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "the client is gone", code="cancelled")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _json(request: Request) -> Any:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S), aclosing(request.stream()) as parts:
            async for part in parts:
                body += part
                if len(body) > BODY_BYTES:
                    raise Refused(413, f"a body has at most {BODY_BYTES} bytes")
    except TimeoutError as error:
        raise Refused(408, f"the body did not come within {BODY_S:g} s") from error
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error


def _event(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.response()
