"""Every refusal of the REST interface as a problem document (RFC 9457), whoever raised it.

A problem's `code` is the error's code of kvstore.errors; where HTTP knows errors that the store does not, it is
one of `HTTP_CODES`. Statuses: 400 could not be parsed, 401 no valid token, 403 the tenant may not, 404 not here,
409 contradicts the state of what is here, 422 does not fit the schema or itself, 429 and 503 ask again later.
"""

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path

from kvstore.errors import (
    Corrupt,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NamespaceMismatch,
    NotFound,
    ProtocolError,
    QuotaExceeded,
    Rejected,
    StaleLease,
    StoreError,
    TierFull,
)

if TYPE_CHECKING:
    from server.node import Node

MEDIA_TYPE = "application/problem+json"
ERRORS_SHOWN = 20  # of one request; the rest is more of the same

STATUSES: dict[type[StoreError], int] = {
    ProtocolError: 400,
    Forbidden: 403,
    NotFound: 404,
    StaleLease: 408,  # the one lease of a REST client is its upload's, which took too long
    NamespaceMismatch: 409,
    Corrupt: 422,
    InvalidRequest: 422,
    Rejected: 429,
    DeadlineExceeded: 503,
    TierFull: 507,
    QuotaExceeded: 507,
}
HTTP_CODES: dict[int, str] = {  # what HTTP refuses before the store is asked
    400: "malformed",
    401: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    411: "length_required",
    413: "too_large",
    415: "malformed",
    416: "range_not_satisfiable",
    422: "invalid_request",
    431: "too_large",
    500: "internal",
    503: "rejected",
}
RETRY_AFTER_S = 1.0  # where the error does not say


class Problem(HTTPException):
    """A refusal with its status. `code` defaults to the status's, `members` are further members of the document."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        code: str = "",
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.code = code or HTTP_CODES[status]
        self.retry_after_s = retry_after_s
        self.members = dict(members or {})

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "type": f"urn:cairn:problem:{self.code}",
            "title": HTTPStatus(self.status_code).phrase,
            "status": self.status_code,
            "detail": self.detail,
            "code": self.code,
        }
        if self.retry_after_s is not None:
            document["retry_after"] = self.retry_after_s
        return document | self.members

    def response(self) -> Response:
        headers = dict(self.headers or {})
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return JSONResponse(self.document(), self.status_code, headers, MEDIA_TYPE)


def unauthorized(error: Forbidden, *, offered: bool) -> Problem:
    """No token came, or, if one was `offered`, a wrong one."""
    challenge = 'Bearer realm="cairn"' + (', error="invalid_token"' if offered else "")
    return Problem(401, str(error), headers={"WWW-Authenticate": challenge})


def invalid(location: str, message: str) -> Problem:
    """Something of a request does not fit the schema."""
    return _invalid([{"location": location, "message": message}])


def problem_of(error: StoreError) -> Problem:
    """How the store's error looks over HTTP."""
    status = next((STATUSES[cls] for cls in type(error).__mro__ if cls in STATUSES), 500)
    retry_after_s = RETRY_AFTER_S if error.retryable else None
    if isinstance(error, Rejected):
        retry_after_s = error.retry_after_s
    return Problem(status, str(error), code=error.code, retry_after_s=retry_after_s)


def install(app: FastAPI, node: "Node | None") -> None:
    """Let `app` answer every exception with a problem. A broken invariant stops the node, as elsewhere."""

    def answer(problem: Problem) -> Response:
        if node is not None:
            node.store.counters.errors[problem.code] += 1
        return problem.response()

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return answer(error)

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, StoreError)
        return answer(problem_of(error))

    async def misfit(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(_validation(error.errors()))

    async def unroutable(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return answer(_routing(app, request, error))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody reads it

    async def broken(request: Request, error: Exception) -> Response:
        if node is not None and isinstance(error, AssertionError):
            node.crashed(error)
        return answer(Problem(500, "the node failed at this request; its log says more"))

    app.add_exception_handler(Problem, refused)
    app.add_exception_handler(StoreError, failed)
    app.add_exception_handler(RequestValidationError, misfit)
    app.add_exception_handler(HTTPException, unroutable)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, broken)


def _validation(errors: Sequence[Any]) -> Problem:
    """Says where and what, and not what was sent: that may be large, or a secret."""
    if any(error["type"] == "json_invalid" for error in errors):
        return Problem(400, f"the body is no JSON: {errors[0]['ctx']['error']}")
    rows = [
        {"location": ".".join(str(step) for step in error["loc"]), "message": str(error["msg"])}
        for error in errors[:ERRORS_SHOWN]
    ]
    return _invalid(rows)


def _invalid(rows: Sequence[Mapping[str, str]]) -> Problem:
    return Problem(422, f"{rows[0]['location']}: {rows[0]['message']}", members={"errors": rows})


def _routing(app: FastAPI, request: Request, error: HTTPException) -> Problem:
    if error.status_code == 405:
        methods = ", ".join(_allowed(app, request.url.path))
        return Problem(405, f"{request.url.path} takes {methods}", headers={"Allow": methods})
    if error.status_code == 404:
        return Problem(404, f"there is no {request.url.path}; /docs shows what there is")
    status = error.status_code if error.status_code in HTTP_CODES else 400
    return Problem(status, str(error.detail))


def _allowed(app: FastAPI, path: str) -> list[str]:
    """The methods of a path: its routes by themselves know one each."""
    for template, operations in app.openapi()["paths"].items():
        if compile_path(template)[0].match(path):
            return sorted(method.upper() for method in operations)
    return ["GET", "HEAD"]  # the document itself, and the page that shows it
