"""What a worker refuses, in the words of OpenAI's API."""

from typing import Any

from starlette.responses import JSONResponse


class Refused(Exception):
    """A request that gets no tokens. `param` is the field that is wrong, where it is one."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"retry-after": str(self.retry_after_s)} if self.retry_after_s else None
        return JSONResponse(self.body(), self.status, headers)


def field_is_wrong(field: str, expected: str) -> Refused:
    return Refused(400, f"{field}: expected {expected}", param=field, code="invalid_value")
