"""Engines and a Conductor for tests of a gateway: they keep strictly to vLLM's, SGLang's and Cairn's conventions over
HTTP, remember what came, and fail on demand.

The model: a token is a byte of text or, made by it, a number from 1000 on, which the tokens before determine. So an
answer is right whoever made it, and from wherever it was continued.
"""

import asyncio
import hashlib
import json
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from server.conductor.models import StateBody, decoded, route_octets
from server.http_serving import HttpServing
from server.rest.http import connection_of

MODEL = "model"
EOS = 999


def made(tokens: list[int], count: int) -> list[int]:
    """What follows these tokens; shorter than `count` where the model ends by itself."""
    found: list[int] = []
    for _ in range(count):
        digest = hashlib.sha256(json.dumps(tokens + found).encode()).digest()
        found.append(1000 + digest[0])
    return found


def text_of(tokens: list[int]) -> str:
    return "".join(f" w{token}" for token in tokens)


def tokens_of(body: dict[str, Any]) -> list[int]:
    """Of a prompt, or of messages in a simple template."""
    if "messages" in body:
        lines = [f"<{message['role']}>{message['content']}" for message in body["messages"]]
        return list(("".join(lines) + "<assistant>").encode())
    prompt = body["prompt"]
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return prompt if isinstance(prompt, list) else list(prompt.encode())


def answer_to(body: dict[str, Any]) -> str:
    """The text that the one right answer has."""
    return text_of(made(tokens_of(body), body.get("max_completion_tokens") or body.get("max_tokens") or 16))


@dataclass
class Fabric:
    """What engines of one test pass on beside HTTP: KV that a prefill holds, and rooms in which pairs meet."""

    held: dict[str, list[int]] = field(default_factory=dict)
    rooms: dict[int, "Room"] = field(default_factory=dict)


@dataclass
class Room:
    body: dict[str, Any] | None = None  # of the prefill
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """One instance. `faults` are used up one a request: refuse, busy, bad, cut, stall, error_event, or die:N and
    stall:N after N tokens. `events` of a stream wait for `gate` where it is not set."""

    def __init__(self, name: str, fabric: Fabric, engine: str = "vllm", role: str = "both") -> None:
        self.name = name
        self.engine = engine
        self.role = role
        self.fabric = fabric
        self.faults: deque[str] = deque()
        self.asked: list[dict[str, Any]] = []  # bodies, with the request's id
        self.tokenize_faults: deque[str] = deque()
        self.hung_up = 0  # answers that were not taken to their end
        self.under_way = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.returns_ids = engine != "sglang"
        paths = ("/v1/completions", "/v1/chat/completions")
        routes = [Route(path, self.complete, methods=["POST"]) for path in paths]
        routes.append(Route("/tokenize", self.tokenize, methods=["POST"]))
        self._serving = HttpServing(Starlette(routes=routes), "fake", "127.0.0.1:0", lambda error: None)

    async def start(self) -> None:
        await self._serving.start()

    async def stop(self) -> None:
        """Gone, as when its process is killed."""
        server = self._serving._server
        if server is not None:
            for connection in list(server.server_state.connections):
                connection.transport.abort()
        await self._serving.stop()

    @property
    def place(self) -> dict[str, Any]:
        place = {"name": self.name, "address": f"127.0.0.1:{self._serving.port}", "engine": self.engine}
        return place | {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        fault = self.tokenize_faults.popleft() if self.tokenize_faults else ""
        if fault == "stall":
            await self._wait(request, asyncio.Event())
        if fault:
            return JSONResponse({"error": fault}, 500)
        assert body["model"] == MODEL
        assert "prompt" in body or body["add_generation_prompt"] is True
        tokens = tokens_of(body)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        body["@id"], body["@path"] = request.headers.get("x-request-id"), request.url.path
        self.asked.append(body)
        self.under_way += 1
        fault = self.faults.popleft() if self.faults else ""
        refusal = await self._failed(request, fault) or self._strict(body)
        cached = await self._met(request, body) if refusal is None else 0
        params = body.get("kv_transfer_params") or {}
        if refusal is None and params.get("do_remote_prefill"):
            held = self.fabric.held.pop(params["remote_request_id"], [])
            cached = len(held)
            if held != tokens_of(body):
                refusal = JSONResponse({"error": {"message": "no such KV", "code": 500}}, 500)
        if refusal is None and body.get("stream"):
            return StreamingResponse(self._stream(request, body, fault, cached), media_type="text/event-stream")
        if refusal is None and not params.get("do_remote_decode"):
            await self._wait(request, self.gate)
        self.under_way -= 1
        if refusal is not None:
            return refusal
        return JSONResponse(self._prefilled(body) if params.get("do_remote_decode") else self._whole(body, cached))

    async def _wait(self, request: Request, event: asyncio.Event) -> None:
        """For this, or for the client's leaving."""
        if event.is_set():
            return
        gone = connection_of(request.scope)
        assert gone is not None
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(gone.lost.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if gone.lost.is_set():
            self.hung_up += 1

    async def _failed(self, request: Request, fault: str) -> Response | None:
        if fault == "refuse":
            return JSONResponse({"error": {"message": "engine is dead", "code": 500}}, 500)
        if fault == "busy":
            return JSONResponse({"error": {"message": "full", "code": 503}}, 503, {"retry-after": "7"})
        if fault == "bad":
            error = {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}
            return JSONResponse({"error": error}, 400)
        connection = connection_of(request.scope)
        assert connection is not None
        if fault == "cut":
            await connection.abort()
        if fault == "stall":
            await connection.lost.wait()
            self.hung_up += 1
            return Response(status_code=500)
        return None

    def _strict(self, body: dict[str, Any]) -> Response | None:
        """A refusal of what a real engine would refuse, or get wrong without a word."""
        wrong = ""
        params = body.get("kv_transfer_params") or {}
        if not body["@id"]:
            wrong = "no X-Request-Id"
        elif params.get("do_remote_decode"):
            if body.get("stream") or "stream_options" in body or body.get("max_tokens") != 1:
                wrong = "a prefill makes one token and does not stream"
            elif set(params) != {
                *("do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids"),
                *("remote_host", "remote_port"),
            }:
                wrong = "kv_transfer_params are not as they should be"
        elif body.get("stream_options") and not body.get("stream"):
            wrong = "stream_options without a stream"
        if body.get("min_tokens", 0) > (body.get("max_tokens") or 16):
            wrong = "min_tokens over max_tokens"
        if self.engine == "sglang" and self.role != "both" and "bootstrap_room" not in body:
            wrong = "no bootstrap_room"
        if wrong:
            return JSONResponse({"error": {"message": wrong, "type": "BadRequestError", "code": 400}}, 400)
        return None

    async def _met(self, request: Request, body: dict[str, Any]) -> int:
        """SGLang's pairs wait for each other. The cached tokens."""
        if self.engine != "sglang" or self.role == "both":
            return 0
        assert body["bootstrap_host"] == "127.0.0.1"
        assert body["bootstrap_port"] == 8998
        room = self.fabric.rooms.setdefault(body["bootstrap_room"], Room())
        mine = {name: value for name, value in body.items() if not name.startswith("@")}
        if self.role == "prefill":
            room.body = mine
            room.arrived.set()
            await self._wait(request, room.taken)
            return 7
        await self._wait(request, room.arrived)
        assert room.body in (mine, None)
        room.taken.set()
        return 0

    def _prefilled(self, body: dict[str, Any]) -> dict[str, Any]:
        self.fabric.held[body["@id"]] = tokens_of(body)
        handed = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.name}
        handed |= {"remote_block_ids": [1, 2], "remote_host": "127.0.0.1", "remote_port": 5600}
        return self._whole(body, 7) | {"kv_transfer_params": handed | {"remote_request_id": body["@id"]}}

    def _usage(self, body: dict[str, Any], count: int, cached: int) -> dict[str, Any]:
        prompt = len(tokens_of(body))
        told = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        return told | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _made(self, body: dict[str, Any]) -> list[int]:
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        return made(tokens_of(body), 1 if self.engine == "sglang" and self.role == "prefill" else most)

    def _whole(self, body: dict[str, Any], cached: int) -> dict[str, Any]:
        tokens = self._made(body)
        is_chat = "messages" in body
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        said = text_of(tokens)
        choice |= {"message": {"role": "assistant", "content": said}} if is_chat else {"text": said}
        told = {"id": f"cmpl-{body['@id']}", "object": "chat.completion" if is_chat else "text_completion"}
        usage = self._usage(body, len(tokens), cached)
        return told | {"created": 1, "model": body["model"], "choices": [choice], "usage": usage}

    async def _stream(self, request: Request, body: dict[str, Any], fault: str, cached: int) -> AsyncIterator[bytes]:
        connection = connection_of(request.scope)
        assert connection is not None
        is_chat = "messages" in body
        wants_ids = self.returns_ids and body.get("return_token_ids")
        kind, _, after = fault.partition(":")
        envelope = {"id": f"cmpl-{body['@id']}", "object": "chat.completion.chunk" if is_chat else "text_completion"}
        envelope |= {"created": 1, "model": body["model"]}
        tokens = self._made(body)
        ended = False
        try:
            if is_chat:
                choice: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}}
                yield _event(envelope | {"choices": [choice | {"logprobs": None, "finish_reason": None}]})
            for number, token in enumerate(tokens):
                await self._wait(request, self.gate)
                if kind and number == int(after or 0):
                    if kind == "die":
                        await connection.abort()
                    if kind == "stall":
                        await connection.lost.wait()
                    if kind == "error_event":
                        yield _event({"error": {"message": "engine died", "code": 500}})
                        yield b"data: [DONE]\n\n"
                    return
                said = text_of([token])
                choice = {"index": 0, "logprobs": None}
                choice |= {"delta": {"content": said}} if is_chat else {"text": said}
                choice["finish_reason"] = "length" if number == len(tokens) - 1 else None
                if wants_ids:
                    choice["token_ids"] = [token]
                    if not number:
                        choice["prompt_token_ids"] = tokens_of(body)
                yield _event(envelope | {"choices": [choice]})
            if (body.get("stream_options") or {}).get("include_usage"):
                yield _event(envelope | {"choices": [], "usage": self._usage(body, len(tokens), cached)})
            if kind == "die":  # after all its tokens
                await connection.abort()
                return
            yield b"data: [DONE]\n\n"
            ended = True
        finally:
            self.under_way -= 1
            self.hung_up += not ended and not fault


class FakeConductor:
    """Takes turns over `pairs` of engines' names. `refusals` (status, reason) are used up one a route."""

    def __init__(self, engines: list[FakeEngine], pairs: list[tuple[str, str]] | None = None) -> None:
        self.engines = {engine.name: engine for engine in engines}
        self.pairs = pairs or [(engine.name, engine.name) for engine in engines]
        self.refusals: deque[tuple[int, str]] = deque()
        self.late_refusals: deque[tuple[int, str]] = deque()  # of reports that a prefill is done
        self.routes: list[dict[str, Any]] = []
        self.states: list[tuple[str, str, str]] = []
        self.counts: Counter[str] = Counter()
        self.is_broken = False
        self.is_new = False  # nobody has registered yet
        self._serving = self._server("127.0.0.1:0")

    def _server(self, listen: str) -> HttpServing:
        routes = [
            Route("/v1/route", self.route, methods=["POST"]),
            Route("/v1/requests/{id}", self.report, methods=["POST"]),
            Route("/v1/instances", self.instances, methods=["GET"]),
        ]
        return HttpServing(Starlette(routes=routes), "fake", listen, lambda error: None)

    async def start(self) -> None:
        await self._serving.start()

    async def stop(self) -> None:
        await self._serving.stop()

    async def restart(self) -> None:
        """At the same port."""
        self._serving = self._server(f"127.0.0.1:{self._serving.port}")
        await self._serving.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._serving.port}"

    def of(self, state: str) -> list[tuple[str, str]]:
        return [(request, instance) for request, told, instance in self.states if told == state]

    async def route(self, request: Request) -> Response:
        query, tokens = route_octets(await request.body(), request.query_params.multi_items())
        self.routes.append({"query": query, "tokens": tokens.tolist()})
        if self.is_broken:
            return JSONResponse({}, 500)
        if self.refusals:
            return _refusal(*self.refusals.popleft())
        fit = [pair for pair in self.pairs if not set(pair) & set(query.exclude)]
        if self.is_new or not fit or query.model != MODEL:
            return _refusal(503, "no_instance")
        prefill, decode = fit[self.counts["turn"] % len(fit)]
        self.counts["turn"] += 1
        places = {"prefill": self.engines[prefill].place, "decode": self.engines[decode].place}
        return JSONResponse({"id": query.id, **places, "is_collocated": prefill == decode, "cached_tokens": 0})

    async def report(self, request: Request) -> Response:
        told = decoded(await request.body(), StateBody)
        self.states.append((request.path_params["id"], told.state, told.instance))
        if told.state == "prefilled" and self.late_refusals:
            return _refusal(*self.late_refusals.popleft())
        return Response(status_code=204)

    async def instances(self, request: Request) -> Response:
        rows = (
            []
            if self.is_new
            else [
                engine.place | {"role": engine.role, "model": MODEL, "is_draining": False}
                for engine in self.engines.values()
            ]
        )
        return JSONResponse({"instances": rows})


def _refusal(status: int, reason: str) -> Response:
    problem = {"title": "not now", "status": status, "detail": "not now", "reason": reason}
    return JSONResponse(problem, status, {"retry-after": "3"}, media_type="application/problem+json")


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
