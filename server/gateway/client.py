"""The client of one request: what it is sent, and whether it is still there."""

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Send

from server.gateway.asked import Refused

STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class ClientGone(Exception):
    """It hung up, or does not take what it is sent."""


class Client:
    """`timeout_s` bounds each wait for it. `has_begun`: it has a status, so another cannot be sent any more.
    `has_all`: it has the whole answer, after which a server says that it is gone whether it is or not."""

    def __init__(self, receive: Receive, send: Send, timeout_s: float) -> None:
        self._receive = receive
        self._send = send
        self._timeout_s = timeout_s
        self.request_id = ""
        self.has_begun = False
        self.has_all = False

    async def body(self, most_bytes: int) -> bytes:
        """The request's body. Raises Refused when it is too large or too slow, and ClientGone."""
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self._timeout_s):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > most_bytes:
                        raise Refused(413, f"a body has at most {most_bytes} bytes")
        except TimeoutError as error:
            raise Refused(408, "the body did not come in time") from error
        return b"".join(parts)

    async def gone(self) -> None:
        """Returns when it hangs up; to be called once the body is there."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self, status: int, body: bytes, content_type: str = "application/json", headers: Mapping[str, str] | None = None
    ) -> None:
        """All of an answer."""
        more = [(name.encode(), value.encode("latin-1", "replace")) for name, value in (headers or {}).items()]
        head = [(b"content-type", content_type.encode("latin-1")), (b"content-length", b"%d" % len(body)), *more]
        await self._start(status, head)
        self.has_all = True
        await self._say({"type": "http.response.body", "body": body})

    async def refuse(self, refused: Refused) -> None:
        """An error in OpenAI's form."""
        headers = {}
        if refused.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(refused.retry_after_s)))
        if refused.status == 401:
            headers["www-authenticate"] = "Bearer"
        await self.answer(refused.status, json.dumps(refused.document()).encode(), headers=headers)

    async def piece(self, body: bytes) -> None:
        """Some of a stream; the first begins it."""
        if not self.has_begun:
            await self._start(200, list(STREAM_HEADERS))
        await self._say({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        """Of a stream."""
        self.has_all = True
        await self._say({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        if self.request_id:
            headers.append((b"x-request-id", self.request_id.encode("latin-1", "replace")))
        await self._say({"type": "http.response.start", "status": status, "headers": headers})

    async def _say(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError as error:
            raise ClientGone from error
