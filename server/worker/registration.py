"""A worker at its Conductor: registers, says how it is doing, takes the role that it is given.

A Conductor that is gone is looked for again, less and less often; the worker serves on.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from kvstore.errors import ConnectFailed, ProtocolError, TransportError
from server.gateway.upstream import Answer, Upstream, url_at

log = logging.getLogger("cairn.worker")

ASK_S: Final = 5.0
HEARTBEAT_S: Final = 1.0  # where the Conductor does not say
LEAST_S, MOST_S = 0.5, 30.0  # between two tries to register
NOT_REGISTERED: Final = 404


class Registration:
    """`run` until cancelled, `leave` when the worker is to stop, `close` when it does.

    `body` says what the worker is, `beat` how it is doing now.
    """

    def __init__(
        self,
        name: str,
        conductor: str,
        token: str,
        body: Callable[[], dict[str, Any]],
        beat: Callable[[], dict[str, Any]],
        told: Callable[[str], None],
    ) -> None:
        """told: what it is called with says which role the Conductor wants."""
        self._conductor = conductor
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._body = body
        self._beat = beat
        self._told = told
        self._name = name
        self._upstream = Upstream()
        self._said: dict[str, Any] = {}
        self._is_leaving = False
        self._may_be_known = False  # from the first word that may have come there

    async def run(self) -> None:
        """Ends by being cancelled; or when it is to leave, and the Conductor does not know it any more."""
        wait_s, heartbeat_s = LEAST_S, HEARTBEAT_S
        while True:
            try:
                if not self._is_leaving:
                    heartbeat_s = await self._register()
                wait_s = LEAST_S
                if await self._keep_saying(heartbeat_s):
                    return
            except (TransportError, ProtocolError) as error:
                log.warning("the Conductor cannot be reached, next try in %g s: %s", wait_s, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MOST_S)

    async def leave(self) -> None:
        """Tell the Conductor that nothing more should come. From now on it is not registered again."""
        self._is_leaving = True
        if self._may_be_known:
            try:
                await self._ask("POST", f"/v1/instances/{self._name}/drain", None)
            except TransportError as error:
                log.warning("the Conductor was not told that this worker stops: %s", error)

    async def close(self) -> None:
        """Take the worker off the Conductor's list."""
        if self._may_be_known:
            try:
                await self._ask("DELETE", f"/v1/instances/{self._name}", None)
            except TransportError as error:
                log.warning("the Conductor was not told that this worker is gone: %s", error)
        await self._upstream.close()

    async def _register(self) -> float:
        """The seconds between two heartbeats. Raises TransportError, ProtocolError."""
        self._said = self._body()
        was_known, self._may_be_known = self._may_be_known, True
        try:
            answer = await self._ask("POST", "/v1/instances", self._said)
        except ConnectFailed:
            self._may_be_known = was_known
            raise
        if not answer.is_ok:
            raise ProtocolError(f"it answered {answer.status}: {answer.body[:200]!r}")
        heartbeat_ms = _field(answer, "heartbeat_ms")
        log.info("registered at the Conductor %s", self._conductor)
        return heartbeat_ms / 1000 if isinstance(heartbeat_ms, int | float) and heartbeat_ms > 0 else HEARTBEAT_S

    async def _keep_saying(self, heartbeat_s: float) -> bool:
        """Until there is something to register again, or, if this is True, nothing any more.

        Raises TransportError, ProtocolError.
        """
        if self._is_leaving:
            await self.leave()  # what was said of that may have come before it was registered
        while self._is_leaving or self._body() == self._said:
            answer = await self._ask("POST", f"/v1/instances/{self._name}/heartbeat", self._beat())
            if answer.status == NOT_REGISTERED:
                return self._is_leaving
            if not answer.is_ok:
                raise ProtocolError(f"it answered {answer.status} to a heartbeat: {answer.body[:200]!r}")
            role = _field(answer, "role")
            if isinstance(role, str):
                self._told(role)
                self._said["role"] = role
            await asyncio.sleep(heartbeat_s)
        return False

    async def _ask(self, method: str, path: str, body: Any) -> Answer:
        url = url_at(self._conductor, path)
        return await self._upstream.json(method, url, body, headers=self._headers, timeout_s=ASK_S)


def _field(answer: Answer, name: str) -> Any:
    document = answer.json()
    if not isinstance(document, dict):
        raise ProtocolError(f"it answered {document!r}")
    return document.get(name)
