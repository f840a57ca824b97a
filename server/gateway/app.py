"""The gateway's HTTP interface: who may ask, how many at a time, and what is not a completion."""

import asyncio
import hmac
import json
import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from server.gateway.asked import CHAT, COMPLETIONS, TEXT_LENGTH, Refused, asked
from server.gateway.client import Client, ClientGone
from server.gateway.exchange import Exchange, Parts
from server.gateway.settings import GatewayConfig

log = logging.getLogger("cairn.gateway")

ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,120}")  # leaves room for the number of a try
DEFAULT_TENANT: Final = "default"


class Front:
    """Admits requests and lets each run until its client has all of it, or is gone."""

    def __init__(self, config: GatewayConfig, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self._tokens = {tenant.token.encode(): tenant.name for tenant in config.tenants}
        self._ids: set[str] = set()
        self._emptied = asyncio.Event()
        self.is_draining = False

    @property
    def in_flight(self) -> int:
        return len(self._ids)

    async def drained(self, seconds: float) -> None:
        """Let no more requests in, and return when those under way have ended, or after so long."""
        self.is_draining = True
        if self._ids:
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), seconds)
            except TimeoutError:
                log.warning("%d requests did not end in time", self.in_flight)

    async def serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """One completion."""
        client = Client(receive, send, self._config.gateway.client_timeout)
        metrics = self._parts.metrics
        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            request_id = self._enter(headers)
        except Refused as refused:
            metrics.requests.labels("overloaded" if refused.status == 503 else "invalid").inc()
            await _quietly(client.refuse(refused))
            return
        client.request_id = headers.get("x-request-id", "")[:TEXT_LENGTH] or request_id
        metrics.in_flight.inc()
        try:
            outcome = await self._exchange(path, headers, request_id, client)
            metrics.requests.labels(outcome).inc()
        except asyncio.CancelledError:
            metrics.requests.labels("cancelled").inc()
            raise
        finally:
            self._ids.discard(request_id)
            if not self._ids:
                self._emptied.set()
            metrics.in_flight.dec()

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Raises Refused."""
        if not self._tokens:
            return DEFAULT_TENANT
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip().encode() if scheme.lower() == "bearer" else b""
        found = [name for known, name in self._tokens.items() if hmac.compare_digest(known, given)]
        if not found:
            raise Refused(401, "the API key is missing or wrong", code="invalid_api_key")
        return found[0]

    def _enter(self, headers: Mapping[str, str]) -> str:
        """An id that no other request has, here or at another gateway of the Conductor. Raises Refused."""
        self.tenant(headers)
        if self.is_draining:
            raise Refused(503, "this gateway shuts down", code="draining", retry_after_s=1.0)
        if self.in_flight >= self._config.gateway.limit:
            raise Refused(503, "too many requests are under way", code="overloaded", retry_after_s=1.0)
        given = headers.get("x-request-id", "")
        fits = ID.fullmatch(given) is not None
        found = f"{given[:80] if fits else 'cairn'}-{secrets.token_hex(8)}"
        self._ids.add(found)
        return found

    async def _exchange(self, path: str, headers: Mapping[str, str], request_id: str, client: Client) -> str:
        """The outcome."""
        arrived_s = self._parts.now()
        try:
            body = _parsed(await client.body(self._config.gateway.body_bytes))
            tenant = self.tenant(headers)
            wanted = asked(path, body, headers, request_id=request_id, tenant=tenant, now=arrived_s)
        except Refused as refused:
            await _quietly(client.refuse(refused))
            return "invalid"
        except ClientGone:
            return "cancelled"
        work = asyncio.ensure_future(Exchange(self._parts, wanted, client, arrived_s).run())
        gone = asyncio.ensure_future(client.gone())
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not client.has_all:
                return "cancelled"
            return await work  # what is left has its own bounds
        except ClientGone:
            return "cancelled"
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


def create_app(config: GatewayConfig, parts: Parts) -> tuple[Starlette, Front]:
    """The app, and what it lets in."""
    front = Front(config, parts)
    routes = [
        Route(COMPLETIONS, _Completion(front, COMPLETIONS), methods=["POST"]),
        Route(CHAT, _Completion(front, CHAT), methods=["POST"]),
        Route("/v1/models", _guarded(front, _models), methods=["GET"]),
        Route("/v1/models/{model:path}", _guarded(front, _model), methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
        Route("/metrics", _metrics, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})
    app.state.parts, app.state.front = parts, front
    return app, front


class _Completion:
    """An endpoint that sees the connection itself: a client that hangs up must end what runs for it."""

    def __init__(self, front: Front, path: str) -> None:
        self._front = front
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front.serve(self._path, scope, receive, send)


def _guarded(front: Front, endpoint: Any) -> Any:
    async def guarded(request: Request) -> Response:
        try:
            front.tenant(request.headers)
        except Refused as refused:
            return _refused(refused)
        found: Response = await endpoint(request)
        return found

    return guarded


def _parts(request: Request) -> Parts:
    parts = request.app.state.parts
    assert isinstance(parts, Parts)
    return parts


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_card(model) for model in _parts(request).asking.models]})


async def _model(request: Request) -> Response:
    model = request.path_params["model"]
    if model not in _parts(request).asking.models:
        return _refused(Refused(404, f"no instance serves {model}", code="model_not_found", param="model"))
    return JSONResponse(_card(model))


async def _health(request: Request) -> Response:
    """200 as long as requests have somewhere to go."""
    asking, front = _parts(request).asking, request.app.state.front
    is_well = not front.is_draining and bool(asking.is_up or asking.places)
    state = "draining" if front.is_draining else "ok" if asking.is_up else "degraded" if is_well else "down"
    told = {"status": state, "conductor": "up" if asking.is_up else "lost", "instances": len(asking.places)}
    return JSONResponse({**told, "in_flight": front.in_flight}, status_code=200 if is_well else 503)


async def _metrics(request: Request) -> Response:
    text, media_type = _parts(request).metrics.render()
    return Response(text, headers={"content-type": media_type})


async def _no_route(request: Request, error: Any) -> Response:
    message = f"there is no {request.method} {request.url.path}"
    return _refused(Refused(error.status_code, message, code="not_found"))


def _refused(refused: Refused) -> Response:
    return JSONResponse(refused.document(), status_code=refused.status)


def _card(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "cairn"}


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the body is not JSON") from error


async def _quietly(work: Any) -> None:
    try:
        await work
    except ClientGone:
        pass
