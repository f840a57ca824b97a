"""Asks the Conductor where requests go and tells it how they fare; without it, instances last seen take turns."""

import asyncio
import contextlib
import logging
import math
import secrets
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlencode

from kvstore.errors import ProtocolError, TransportError
from server.gateway.asked import CHAT, Asked, Refused
from server.gateway.settings import GatewaySettings
from server.gateway.upstream import Answer, Upstream, url_at

log = logging.getLogger("cairn.gateway")

State = Literal["prefilled", "finished", "failed", "cancelled"]
REPORTERS: Final = 4  # reports on their way at a time
SUSPECT_S: Final = 5.0  # that an instance which failed comes last, where no Conductor knows better
DOWN_S: Final = 3.0  # that one which does not listen is not asked for: so long a Conductor takes to miss it
BYTES_PER_TOKEN: Final = 4  # of text, where nobody counts tokens
MOST_EXCLUDED: Final = 64
TOO_LARGE: Final = 413
NO_INSTANCE: Final = "no_instance"
QUIET_S: Final = 3.0  # that an instance may be silent and not listed: it may still register at a new Conductor
REMEMBER_S: Final = 5.0  # that instances count as there when a Conductor knows none: it may be new, they are not


@dataclass(frozen=True, slots=True)
class Place:
    """An instance, as far as it takes to send it something."""

    name: str
    address: str
    engine: str = "vllm"
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    role: str = "both"
    model: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where one try goes."""

    prefill: Place
    decode: Place

    @property
    def is_collocated(self) -> bool:
        return self.prefill.name == self.decode.name


class Wait:
    """For something to come from instances, which `places` tells anew each time. `limit` is over when the Conductor has
    not listed one of them for QUIET_S, and `gone` is that one."""

    def __init__(self, places: Callable[[], Iterable[Place]]) -> None:
        self.limit = asyncio.timeout(None)
        self.gone: Place | None = None
        self._places = places
        self._since_s = 0.0
        self._is_over = False

    def looked(self, listed: Collection[str] | None, now: float) -> None:
        """What the Conductor lists; None: it did not say."""
        missing = [place for place in self._places() if listed is not None and place.name not in listed]
        gone = missing[0] if missing else None
        if self._is_over:
            return
        if gone != self.gone:
            self.gone, self._since_s = gone, now
        elif gone is not None and now - self._since_s >= QUIET_S:
            self._is_over = True
            self.limit.reschedule(0)


class Asking:
    """The Conductor as one gateway sees it. `is_up` is None until it was asked for the first time."""

    def __init__(self, upstream: Upstream, settings: GatewaySettings, now: Callable[[], float]) -> None:
        self._upstream = upstream
        self._settings = settings
        self._now = now
        token = settings.conductor_token
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._reports: asyncio.Queue[tuple[str, dict[str, str]]] = asyncio.Queue(settings.reports)
        self._tasks: list[asyncio.Task[None]] = []
        self._suspects: dict[str, float] = {}
        self._down: dict[str, float] = {}
        self._turn = 0
        self.places: dict[str, Place] = {}
        self.waits: set[Wait] = set()  # whose limits have been entered
        self._remembered_until_s = 0.0
        self.is_up: bool | None = None
        self.counts: Counter[str] = Counter()  # reports, dropped, undelivered, fallbacks

    async def start(self) -> None:
        """Look once, then go on in the background."""
        await self._look()
        self._tasks = [asyncio.create_task(self._keep_looking())]
        self._tasks += [asyncio.create_task(self._keep_reporting()) for _ in range(REPORTERS)]

    async def stop(self, timeout_s: float = 1.0) -> None:
        """Deliver what reports there are, for so long."""
        if self.is_up:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reports.join(), timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def models(self) -> list[str]:
        return sorted({place.model for place in self.places.values()})

    async def route(self, wanted: Asked, attempt_id: str, exclude: Collection[str]) -> Decision:
        """Raises Refused as the Conductor refuses, and when it is gone and there is nobody to fall back to."""
        if self.is_up is not False:
            try:
                answer = await self._ask(wanted, attempt_id, exclude)
                if answer.is_ok:
                    return _decision(answer.json())
                if answer.status in (429, 503) and "retry-after" in answer.headers:
                    refused = _refusal(answer)
                    if exclude or refused.code != NO_INSTANCE or not self.of_model(wanted.model):
                        raise refused
                    return self._fall_back(wanted, exclude)  # it has just started, and they will register again
                if answer.status == TOO_LARGE:  # to be refused, or large prompts would go past its admission
                    raise Refused(TOO_LARGE, "the prompt is too long for the Conductor", code="context_length_exceeded")
                log.warning("the Conductor answers a route with %d: %s", answer.status, answer.body[:200])
                if answer.status >= 500:
                    self._mark(is_up=False, why=f"it answers with {answer.status}")
            except (TransportError, ProtocolError) as error:
                self._mark(is_up=False, why=str(error))
        return self._fall_back(wanted, exclude)

    async def prefilled(self, attempt_id: str) -> None:
        """Tell the Conductor, which may still refuse the decode. Raises Refused."""
        if not self.is_up:
            return
        url = url_at(self._settings.conductor, f"/v1/requests/{attempt_id}")
        timeout_s = self._settings.route_timeout
        try:
            answer = await self._upstream.json(
                "POST", url, {"state": "prefilled"}, headers=self._headers, timeout_s=timeout_s
            )
        except (TransportError, ProtocolError):
            self.counts["undelivered"] += 1
            return
        if answer.status in (429, 503) and "retry-after" in answer.headers:
            raise _refusal(answer)

    def report(self, attempt_id: str, state: State, instance: str = "") -> None:
        """Tell the Conductor some time soon; what the queue has no room for is dropped."""
        body = {"state": state, **({"instance": instance} if instance else {})}
        self.counts["reports"] += 1
        try:
            self._reports.put_nowait((attempt_id, body))
        except asyncio.QueueFull:
            self.counts["dropped"] += 1

    def suspect(self, name: str, *, is_down: bool) -> None:
        """This instance failed just now. is_down: nobody listens there."""
        self._suspects[name] = self._now() + SUSPECT_S
        if is_down:
            self._down[name] = self._now() + DOWN_S

    @property
    def down(self) -> set[str]:
        """Instances that did not listen a moment ago."""
        now = self._now()
        self._down = {name: until_s for name, until_s in self._down.items() if until_s > now}
        return set(self._down)

    def of_model(self, model: str, exclude: Collection[str] = ()) -> list[Place]:
        """The known instances, those that failed lately last."""
        now = self._now()
        found = [place for place in self.places.values() if place.model == model and place.name not in exclude]
        return sorted(found, key=lambda place: self._suspects.get(place.name, 0.0) > now)

    async def _ask(self, wanted: Asked, attempt_id: str, exclude: Collection[str]) -> Answer:
        fields: dict[str, Any] = {"model": wanted.model, "id": attempt_id, "tenant": wanted.tenant}
        fields |= {"session": wanted.session} if wanted.session else {}
        fields |= {"priority": wanted.priority} if wanted.priority else {}
        fields |= {"output_tokens": wanted.output_tokens} if wanted.output_tokens else {}
        fields |= {"exclude": ",".join(list(exclude)[-MOST_EXCLUDED:])} if exclude else {}
        if wanted.deadline_s is not None:
            fields["deadline_ms"] = max(0, round((wanted.deadline_s - self._now()) * 1000))
        return await self._upstream.json(
            "POST",
            url_at(self._settings.conductor, f"/v1/route?{urlencode(fields)}"),
            _octets(wanted),
            headers=self._headers,
            timeout_s=self._settings.route_timeout,
        )

    def _fall_back(self, wanted: Asked, exclude: Collection[str]) -> Decision:
        places = self.of_model(wanted.model, exclude)
        self._turn += 1
        now = self._now()
        well = [place for place in places if self._suspects.get(place.name, 0.0) <= now]
        found = _pairs(well, self._turn) or _pairs(places, self._turn)
        if found is None:
            message = "the Conductor is out of reach, and no instance is known that serves this model"
            raise Refused(503, message, code=NO_INSTANCE, retry_after_s=1.0)
        self.counts["fallbacks"] += 1
        return Decision(*found)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._settings.refresh)
            await self._look()

    async def _look(self) -> None:
        url = url_at(self._settings.conductor, "/v1/instances")
        try:
            timeout_s = self._settings.route_timeout
            answer = await self._upstream.json("GET", url, headers=self._headers, timeout_s=timeout_s)
            if not answer.is_ok:
                raise ProtocolError(f"{url} answers with {answer.status}")
            rows = _rows(answer.json())
            self._listed([place for place, is_draining in rows if not is_draining], {place.name for place, _ in rows})
            self._mark(is_up=True)
        except (TransportError, ProtocolError) as error:
            self._tell_waits(None)
            self._mark(is_up=False, why=str(error))

    def _listed(self, places: Iterable[Place], names: Collection[str]) -> None:
        """places: those that take requests. names: theirs, and of those that only end what they have."""
        found = {place.name: place for place in places}
        is_certain = bool(found) or self._now() >= self._remembered_until_s
        if is_certain:
            self.places = found
            self._remembered_until_s = self._now() + REMEMBER_S
        self._tell_waits(names if is_certain else None)

    def _tell_waits(self, listed: Collection[str] | None) -> None:
        for wait in self.waits:
            wait.looked(listed, self._now())

    async def _keep_reporting(self) -> None:
        while True:
            attempt_id, body = await self._reports.get()
            url = url_at(self._settings.conductor, f"/v1/requests/{attempt_id}")
            try:
                if self.is_up:
                    timeout_s = self._settings.route_timeout
                    await self._upstream.json("POST", url, body, headers=self._headers, timeout_s=timeout_s)
                else:
                    self.counts["undelivered"] += 1
            except (TransportError, ProtocolError):
                self.counts["undelivered"] += 1
            finally:
                self._reports.task_done()

    def _mark(self, *, is_up: bool, why: str = "") -> None:
        if is_up is False and self.is_up is not False:
            log.warning("the Conductor is out of reach, known instances take turns: %s", why)
        elif is_up and self.is_up is False:
            log.warning("the Conductor is back")
        self.is_up = is_up


def _octets(wanted: Asked) -> bytes:
    """The prompt's tokens as u32; a stand-in of about its length that equals no other, where they are not known."""
    if wanted.tokens is None:
        prompt = wanted.body.get("messages" if wanted.path == CHAT else "prompt")
        count = math.ceil(_text_bytes(prompt) / BYTES_PER_TOKEN)
        first = 0x80000000 | secrets.randbits(31)
        packed = array("I", [first, *[0xFFFFFFFF] * (count - 1)])
    else:
        packed = array("I", wanted.tokens)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _text_bytes(prompt: Any) -> int:
    """Of all text in a prompt or in messages; inline pictures are no text."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return sum(map(_text_bytes, prompt))
    if isinstance(prompt, dict):
        return _text_bytes(prompt.get("content")) + _text_bytes(prompt.get("text"))
    return BYTES_PER_TOKEN if isinstance(prompt, int) else 0


def _pairs(places: list[Place], turn: int) -> tuple[Place, Place] | None:
    """The next of those that can serve: one that does both, or one for prefill with one for decode beside it.

    vLLM's and our own instances serve alone whatever their role; SGLang's do not.
    """
    firsts = [place for place in places if place.role != "decode"]
    firsts = firsts or [place for place in places if place.engine != "sglang"]
    for offset in range(len(firsts)):
        prefill = firsts[(turn + offset) % len(firsts)]
        if prefill.role != "prefill":
            return prefill, prefill
        seconds = [place for place in places if place.role == "decode" and place.engine == prefill.engine]
        if seconds:
            return prefill, seconds[turn % len(seconds)]
        if prefill.engine != "sglang":
            return prefill, prefill
    return None


def _decision(document: Any) -> Decision:
    """Raises ProtocolError."""
    try:
        prefill, decode = _place(document["prefill"]), _place(document["decode"])
    except (KeyError, TypeError) as error:
        raise ProtocolError("the Conductor's route has no prefill or decode instance") from error
    return Decision(prefill, decode)


def _rows(document: Any) -> list[tuple[Place, bool]]:
    """Of GET /v1/instances: each, and whether it drains. Raises ProtocolError."""
    rows: Any = document.get("instances") if isinstance(document, dict) else document
    try:
        return [(_place(row), bool(row.get("is_draining"))) for row in rows]
    except (AttributeError, KeyError, TypeError) as error:
        raise ProtocolError("the Conductor's instances are not a list of them") from error


def _place(row: Any) -> Place:
    return Place(
        name=row["name"],
        address=row["address"],
        engine=row.get("engine") or "vllm",
        bootstrap_host=row.get("bootstrap_host") or "",
        bootstrap_port=row.get("bootstrap_port") or 0,
        role=row.get("role") or "both",
        model=row.get("model") or "",
    )


def _refusal(answer: Answer) -> Refused:
    try:
        document = answer.json()
    except ProtocolError:
        document = {}
    told = document if isinstance(document, dict) else {}
    reason = str(told.get("reason") or (NO_INSTANCE if answer.status == 503 else "busy"))
    message = str(told.get("detail") or told.get("title") or "not now")
    try:
        retry_after_s = max(1.0, float(answer.headers["retry-after"]))
    except ValueError:
        retry_after_s = 1.0
    return Refused(answer.status, f"{message} ({reason})", code=reason, retry_after_s=retry_after_s)
