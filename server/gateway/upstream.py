"""An HTTP client of what stands behind: engines and the Conductor; connections are pooled, every wait is bounded.

Whatever goes wrong below HTTP is a TransportError. ConnectFailed: nothing was sent. PeerLost: the connection broke,
and the peer may have had the request. DeadlineExceeded: no answer, or no more of it, in time. A status is a result.
"""

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import ConfigError, ConnectFailed, DeadlineExceeded, PeerLost, ProtocolError, TransportError

if TYPE_CHECKING:
    import aiohttp

CONNECT_S: Final = 5.0
CONNECTIONS: Final = 4096  # over all peers; what bounds requests bounds these first
IDLE_S: Final = 3.0  # a pooled connection's; shorter than the 5 s after which uvicorn, so vLLM and SGLang, closes it
ANSWER_BYTES: Final = 64 << 20
LINE_BYTES: Final = 64 << 10  # of one header
Errors = tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. Names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Raises ProtocolError when the body is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise ProtocolError(f"an answer with status {self.status} is not JSON: {self.body[:80]!r}") from error


class Streamed:
    """An answer whose body still comes. Names of `headers` are in lower case; `idle_s` may be set on the way."""

    def __init__(self, response: "aiohttp.ClientResponse", url: str, idle_s: float, broken: Errors) -> None:
        self.status = response.status
        self.headers = _lower(response)
        self._response = response
        self._url = url
        self.idle_s = idle_s
        self._broken = broken

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they come. Raises PeerLost, DeadlineExceeded when none came for `idle_s`."""
        while True:
            try:
                async with asyncio.timeout(self.idle_s):
                    chunk = await self._response.content.readany()
            except TimeoutError as error:
                raise DeadlineExceeded(f"{self._url}: nothing came for {self.idle_s:g} s") from error
            except self._broken as error:
                raise PeerLost(f"{self._url}: {str(error) or type(error).__name__}") from error
            if not chunk:
                return
            yield chunk

    async def read(self) -> bytes:
        """All of the body; raises as `chunks` does, and ProtocolError over ANSWER_BYTES."""
        parts, size = [], 0
        async for chunk in self.chunks():
            parts.append(chunk)
            size += len(chunk)
            if size > ANSWER_BYTES:
                raise ProtocolError(f"{self._url}: the answer has more than {ANSWER_BYTES} bytes")
        return b"".join(parts)


class Upstream:
    """Made and closed inside the event loop that uses it. Raises ConfigError when aiohttp is not installed."""

    def __init__(self, *, connect_s: float = CONNECT_S, connections: int = CONNECTIONS) -> None:
        self._http = _aiohttp()
        self._session = self._http.ClientSession(
            connector=self._http.TCPConnector(limit=connections, limit_per_host=0, keepalive_timeout=IDLE_S),
            timeout=self._http.ClientTimeout(total=None, connect=None, sock_connect=connect_s, sock_read=None),
            cookie_jar=self._http.DummyCookieJar(),
            auto_decompress=True,
            max_line_size=LINE_BYTES,
            max_field_size=LINE_BYTES,
        )
        self._broken: Errors = (self._http.ClientError, OSError, UnicodeError)  # the last: a host that is no name

    async def close(self) -> None:
        """Close all connections; what is under way on them fails with PeerLost."""
        await self._session.close()

    async def json(
        self, method: str, url: str, body: Any = None, *, headers: Mapping[str, str] | None = None, timeout_s: float
    ) -> Answer:
        """The whole answer within `timeout_s`. `body`: bytes go as they are, all else as JSON, None not at all.

        Raises TransportError, and ProtocolError for an answer over ANSWER_BYTES.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.stream(method, url, body, headers=headers, timeout_s=timeout_s, idle_s=timeout_s) as streamed,
            ):
                return Answer(streamed.status, streamed.headers, await streamed.read())
        except TimeoutError as error:
            raise DeadlineExceeded(f"{url}: no answer within {timeout_s:g} s") from error

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        idle_s: float,
    ) -> AsyncIterator[Streamed]:
        """An answer whose body is read as it comes: status and headers within `timeout_s`, then a chunk each `idle_s`.

        Leaving before the body's end closes the connection, which is how the peer learns that nobody waits.
        Raises TransportError.
        """
        payload, content = _encode(body)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._session.request(
                    method, url, data=payload, headers={**content, **(headers or {})}, allow_redirects=False
                )
        except TimeoutError as error:
            raise DeadlineExceeded(f"{url}: no answer within {timeout_s:g} s") from error
        except self._broken as error:
            raise self._translated(error, url) from error
        try:
            yield Streamed(response, url, idle_s, self._broken)
        finally:
            if not response.content.at_eof():
                response.close()
            response.release()

    def _translated(self, error: BaseException, url: str) -> TransportError:
        said = f"{url}: {str(error) or type(error).__name__}"
        http = self._http
        never_sent = (http.ClientConnectorError, http.ConnectionTimeoutError, http.InvalidURL, UnicodeError)
        return ConnectFailed(said) if isinstance(error, never_sent) else PeerLost(said)


def url_at(address: str, path: str) -> str:
    """The URL of `path` at an address, which may be host:port or a URL itself."""
    root = address.rstrip("/")
    return f"{root}{path}" if "://" in root else f"http://{root}{path}"


def _encode(body: Any) -> tuple[bytes | None, dict[str, str]]:
    if body is None:
        return None, {}
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), {"content-type": "application/octet-stream"}
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass"), {"content-type": "application/json"}


def _lower(response: "aiohttp.ClientResponse") -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def _aiohttp() -> Any:
    try:
        return importlib.import_module("aiohttp")
    except ImportError as error:
        raise ConfigError("this needs the extra `gateway`: pip install 'cairn-kv[gateway]'") from error
