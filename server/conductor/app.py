"""The Conductor over HTTP: paths, bodies, statuses; what they mean is the service's."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstore.errors import Forbidden, StoreError
from scheduler.requests import Reason, Refusal
from server.conductor.exporter import render
from server.conductor.models import (
    HeartbeatBody,
    InstanceBody,
    RoleBody,
    RouteQuery,
    StateBody,
    decoded,
    route_body,
    route_octets,
)
from server.conductor.service import ConductorService, Tokens
from server.rest.problems import Problem, problem_of, unauthorized

log = logging.getLogger("cairn.conductor")

GUARDED: Final = "/v1/"
OCTETS: Final = "application/octet-stream"
BODY_S: Final = 30.0  # that a body may take to come
TELL_BYTES: Final = 1 << 20  # of a body that is no prompt
encode = msgspec.json.Encoder().encode


class ConductorRoutes:
    """One method for each path. Raises Problem for whatever is refused."""

    def __init__(self, service: ConductorService) -> None:
        self._service = service
        self._body_bytes = service.config.conductor.body

    def paths(self) -> list[Path]:
        return [
            Path("/v1/route", self.route, methods=["POST"]),
            Path("/v1/explain", self.explain, methods=["POST"]),
            Path("/v1/requests/{id:path}", self.report, methods=["POST"]),
            Path("/v1/instances", self.instances, methods=["GET", "POST"]),
            Path("/v1/instances/{name}/heartbeat", self.heartbeat, methods=["POST"]),
            Path("/v1/instances/{name}/drain", self.drain, methods=["POST"]),
            Path("/v1/instances/{name}/role", self.role, methods=["POST"]),
            Path("/v1/instances/{name}", self.remove, methods=["DELETE"]),
            Path("/v1/scaling", self.scaling, methods=["GET"]),
            Path("/v1/health", self.health, methods=["GET"]),
            Path("/metrics", self.metrics, methods=["GET"]),
        ]

    async def route(self, request: Request) -> Response:
        query, tokens = await self._asked(request)
        answer = self._service.route(query, tokens)
        return refused(answer) if isinstance(answer, Refusal) else answered(answer)

    async def explain(self, request: Request) -> Response:
        query, tokens = await self._asked(request)
        return answered(self._service.explain(query, tokens))

    async def report(self, request: Request) -> Response:
        told = decoded(await body_of(request, TELL_BYTES), StateBody)
        refusal = self._service.report(request.path_params["id"], told)
        return refused(refusal) if refusal is not None else Response(status_code=204)

    async def instances(self, request: Request) -> Response:
        """Register one, or see all."""
        if request.method != "POST":
            return answered(self._service.instances())
        told = decoded(await body_of(request, TELL_BYTES), InstanceBody)
        return answered(self._service.register(told))

    async def heartbeat(self, request: Request) -> Response:
        told = decoded(await body_of(request, TELL_BYTES), HeartbeatBody)
        return answered(self._service.heartbeat(request.path_params["name"], told))

    async def drain(self, request: Request) -> Response:
        self._service.drain(request.path_params["name"])
        return Response(status_code=204)

    async def role(self, request: Request) -> Response:
        told = decoded(await body_of(request, TELL_BYTES), RoleBody)
        self._service.switch(request.path_params["name"], told.role)
        return Response(status_code=204)

    async def remove(self, request: Request) -> Response:
        self._service.remove(request.path_params["name"])
        return Response(status_code=204)

    async def scaling(self, request: Request) -> Response:
        return answered(self._service.scaling())

    async def health(self, request: Request) -> Response:
        return answered(self._service.health())

    async def metrics(self, request: Request) -> Response:
        text, media_type = render(self._service)
        return Response(text, media_type=media_type)

    async def _asked(self, request: Request) -> tuple[RouteQuery, Tokens]:
        body = await body_of(request, self._body_bytes)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() == OCTETS:
            return route_octets(body, request.query_params.multi_items())
        return route_body(body)


class TokenDoor:
    """ASGI middleware: whoever has not the token stays outside of what it guards."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._expected and scope["type"] == "http" and scope["path"].startswith(GUARDED):
            offered = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(offered, self._expected):
                problem = unauthorized(Forbidden("the Conductor wants its token"), offered=bool(offered))
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_app(service: ConductorService) -> ASGIApp:
    """The whole of it."""
    app = Starlette(routes=ConductorRoutes(service).paths(), exception_handlers=_answers(service))
    return TokenDoor(app, service.config.conductor.token)


async def body_of(request: Request, most_bytes: int) -> bytes:
    """Raises Problem over `most_bytes`, and for one that does not come."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > most_bytes:
        raise Problem(413, f"a body of {announced} bytes; at most {most_bytes} here")
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most_bytes:
                    raise Problem(413, f"a body has at most {most_bytes} bytes here")
                chunks.append(chunk)
    except TimeoutError as error:
        raise Problem(408, f"the body did not come within {BODY_S:g} s") from error
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def answered(document: Any) -> Response:
    return Response(encode(document), media_type="application/json")


def refused(refusal: Refusal) -> Response:
    """429, or 503 where nobody serves the model."""
    status = 503 if refusal.reason is Reason.NO_INSTANCE else 429
    members: dict[str, Any] = {"reason": refusal.reason.value, "id": refusal.request}
    if refusal.reason is not Reason.NO_INSTANCE:
        members |= {"predicted": {"ttft_ms": refusal.ttft_s * 1000, "tbt_ms": refusal.tbt_s * 1000}}
    return Problem(
        status,
        REASONS[refusal.reason],
        code="rejected",
        retry_after_s=max(1.0, refusal.retry_after_s),
        members=members,
    ).response()


REASONS: Final[Mapping[Reason, str]] = {
    Reason.NO_INSTANCE: "no instance serves this model now",
    Reason.TTFT: "the first token would come too late",
    Reason.TBT: "decoding would fall behind",
    Reason.FAIR_SHARE: "the fleet is busy, and this tenant has its share of it",
}


def _answers(service: ConductorService) -> dict[Any, Callable[[Request, Any], Awaitable[Response]]]:
    """Every exception as a problem document."""

    async def problem(request: Request, error: Problem) -> Response:
        return error.response()

    async def failed(request: Request, error: StoreError) -> Response:
        return problem_of(error).response()

    async def unroutable(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == 405:
            methods = (error.headers or {}).get("Allow", "")
            return Problem(405, f"{path} takes {methods}", headers={"Allow": methods}).response()
        return Problem(404, f"there is no {path}").response()

    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    async def broken(request: Request, error: Exception) -> Response:
        if isinstance(error, AssertionError):
            service.crashed(error)
        return Problem(500, "the Conductor failed at this request; its log says more").response()

    return {
        Problem: problem,
        StoreError: failed,
        HTTPException: unroutable,
        ClientDisconnect: gone,
        Exception: broken,
    }
