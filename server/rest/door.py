"""Lets HTTP requests in: whose they are, how many of them, and how large and slow they may be."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.catalogue import Tenant
from kvstore.errors import Forbidden
from server.rest.http import connection_of
from server.rest.problems import RETRY_AFTER_S, Problem, unauthorized
from server.session import Session

if TYPE_CHECKING:
    from server.node import Node

GUARDED = "/v1/"
JSON_BYTES = 4 << 20  # two full batches of keys, or of tokens; reading it keeps others waiting for 0.1 s
SLOW_S = 3600.0  # for a request that moves a whole tier or namespace
VISIT = "cairn.visit"


class Sessions:
    """One session per tenant and its rights while any request is under way: a client's limits hold for all of them."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._open: dict[Tenant, tuple[Session, int]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def visit(self, tenant: Tenant) -> Iterator[Session]:
        session, requests = self._open.get(tenant) or (self._node.new_session(tenant, "rest"), 0)
        self._open[tenant] = session, requests + 1
        try:
            yield session
        finally:
            requests = self._open[tenant][1] - 1
            if requests:
                self._open[tenant] = session, requests
            else:
                del self._open[tenant]
                session.end()


class Bucket:
    """A tenant's rate: `rate` requests a second, as many at once as come in one second, at least one."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._most = max(rate, 1.0)
        self._left = self._most
        self._at = now

    def take(self, now: float) -> float:
        """0 when there was one left, else the seconds until there is."""
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self._rate
        self._left -= 1
        return 0.0


class Visit:
    """One request: its session, how much of a body it takes, and until when it must be answered."""

    def __init__(self, scope: Scope, session: Session | None, body_bytes: int) -> None:
        self.session = session
        self.body_bytes = body_bytes  # a handler may allow another size before it reads
        self.deadline = asyncio.timeout(None)
        self.content_length: int | None = None
        self.has_body = False
        self.answering = False
        self._read_bytes = 0
        for name, value in scope["headers"]:
            if name == b"content-length":
                self.content_length = int(value)
                self.has_body = self.content_length > 0
            elif name == b"transfer-encoding":
                self.has_body = True

    def allow(self, seconds: float) -> None:
        """Give it so much time from now."""
        self.deadline.reschedule(asyncio.get_running_loop().time() + seconds)

    def count_body(self, message: Message) -> None:
        """Raises Problem for a body that is larger than it may be."""
        self._read_bytes += len(message.get("body", b""))
        self.check_body(self._read_bytes)
        if not message.get("more_body", False):
            self.has_body = False

    def check_body(self, size: int | None) -> None:
        if size is not None and size > self.body_bytes:
            raise Problem(413, f"a body of {size} bytes; at most {self.body_bytes} here")


def visit_of(request: Request) -> Visit:
    """What the door knows of this request."""
    visit = request.scope[VISIT]
    assert isinstance(visit, Visit)
    return visit


def node_of(request: Request) -> "Node":
    """The node that the request came to."""
    node: Node = request.app.state.node
    return node


def session_of(request: Request) -> Session:
    """The session of the request's tenant."""
    session = visit_of(request).session
    assert session is not None, "only guarded paths have a session"
    return session


class Door:
    """ASGI middleware. Whatever happens to a request, its session ends after it, and with that all it held."""

    def __init__(self, app: ASGIApp, node: "Node", sessions: Sessions) -> None:
        self._app = app
        self._node = node
        self._sessions = sessions
        self._buckets: dict[str, Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not scope["path"].startswith(GUARDED):
            await self._serve(scope, receive, send, None)
            return
        try:
            tenant = self._admit(scope)
        except Problem as problem:
            self._node.store.counters.errors[problem.code] += 1
            await problem.response()(scope, receive, send)
            return
        with self._sessions.visit(tenant) as session:
            await self._serve(scope, receive, send, session)

    def _admit(self, scope: Scope) -> Tenant:
        authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = authorization.decode("latin-1").partition(" ")
        try:
            tenant = self._node.doorkeeper.admit(token.strip() if scheme.lower() == "bearer" else "")
        except Forbidden as error:
            raise unauthorized(error, offered=bool(authorization)) from error
        rate = self._node.config.rest.requests_per_second
        if rate:
            now = self._node.store.clock.now()
            bucket = self._buckets.setdefault(tenant.name, Bucket(rate, now))
            wait_s = bucket.take(now)
            if wait_s:
                message = f"more than {rate:g} requests a second: rest.requests_per_second"
                raise Problem(429, message, code="rejected", retry_after_s=wait_s)
        return tenant

    async def _serve(self, scope: Scope, receive: Receive, send: Send, session: Session | None) -> None:
        config = self._node.config
        visit = scope[VISIT] = Visit(scope, session, min(JSON_BYTES, config.limits.frame_bytes, config.rest.body_bytes))

        async def receive_limited() -> Message:
            visit.check_body(visit.content_length)
            message = await receive()
            visit.count_body(message)
            return message

        async def send_noted(message: Message) -> None:
            visit.answering = True
            await send(message)

        try:
            async with visit.deadline:
                visit.allow(config.rest.request_timeout)
                await self._app(scope, receive_limited, send_noted)
        except TimeoutError:
            if not visit.deadline.expired():
                raise
            await self._too_slow(scope, receive, send)

    async def _too_slow(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit: Visit = scope[VISIT]
        connection = connection_of(scope)
        if visit.answering:
            if connection is not None:
                await connection.abort()
            return
        close = {"Connection": "close"}
        if visit.has_body:
            problem = Problem(408, "the body did not come in time: rest.request_timeout", headers=close)
        else:
            message = "no answer in time: rest.request_timeout"
            problem = Problem(503, message, code="deadline_exceeded", retry_after_s=RETRY_AFTER_S, headers=close)
        self._node.store.counters.errors[problem.code] += 1
        await problem.response()(scope, receive, send)
