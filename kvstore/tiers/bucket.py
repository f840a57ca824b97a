"""Requests to a bucket: each with a time limit, few at once, repeated within a budget, and none while it is away."""

import asyncio
import errno
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, Protocol, TypeVar

from kvstore.bandwidth import Bandwidth
from kvstore.clock import Clock
from kvstore.health import Health

Answer = TypeVar("Answer")

ATTEMPTS = 4
RETRY_SHARE = 0.1  # of a retry that each request earns
RETRY_BURST = 10.0  # retries that may be saved up
FAILURES = 2  # requests in a row that say nothing of the bucket; one more, and it is away
LIST_LIMIT = 200_000  # names of one listing; about 300 bytes each while it is looked at
LOOK_LIMIT = 10 * LIST_LIMIT  # names to find those among, where a store does not sort them


class BucketAway(OSError):
    """Nothing was asked: the bucket is away, and it is not yet time to try it again."""


class Listed(NamedTuple):
    """An object in the bucket; `modified_s` by the store's wall clock."""

    name: str
    size_bytes: int
    modified_s: float


class Bucket(Protocol):
    """Objects by name. Every error is an OSError: FileNotFoundError, FileExistsError and PermissionError where so."""

    async def put(self, name: str, body: memoryview, *, part_bytes: int) -> None:
        """Store an object: whole or not at all. Never over one that is there (FileExistsError).

        With `part_bytes` it goes in parts of that size; then, and only then, it replaces what is there.
        `body` may be read until the call is over, and for a while after it was cancelled.
        """

    async def get(self, name: str, start: int, end: int) -> memoryview:
        """Bytes [start, end) in memory of their own; fewer where the object ends before."""

    def listing(self, prefix: str, after: str) -> AsyncGenerator[list[Listed], None]:
        """Whatever begins with `prefix`, a whole folder, and sorts after `after`; in any order."""

    async def delete(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long and how often: a request may take `request_s` and besides what its bytes take at the slowest pace."""

    request_s: float = 10.0
    slowest_bytes_per_s: int = 4 << 20
    backoff_s: float = 0.1
    longest_backoff_s: float = 5.0
    requests_at_once: int = 32


class Requests:
    """The bucket as this node sees it: up, or away until it is tried again.

    Retries are at most a tenth of all requests, and ten; they wait a random part of a time that doubles. After three
    requests that failed, with their retries, nothing is asked for a time that doubles, from a second to a minute;
    then one request is let through, and what comes of it decides.
    """

    def __init__(self, bucket: Bucket, patience: Patience, *, clock: Clock, random: Random) -> None:
        self._bucket = bucket
        self._patience = patience
        self._clock = clock
        self._random = random
        self._slots = asyncio.Semaphore(patience.requests_at_once)
        self._retries_left = RETRY_BURST
        self._is_probing = False
        self.health = Health(tolerance=FAILURES)
        self.reading = Bandwidth()
        self.asked: Counter[str] = Counter()
        self.retries = 0
        self.errors = 0
        self.bytes_read = 0
        self.bytes_written = 0

    def may_ask(self) -> bool:
        """Whether a request would be sent now."""
        return self.health.is_well or (not self._is_probing and self.health.may_try(self._clock.now()))

    async def put(self, name: str, body: memoryview, *, part_bytes: int = 0) -> None:
        await self._ask("put", body.nbytes, lambda: self._bucket.put(name, body, part_bytes=part_bytes))
        self.bytes_written += body.nbytes

    async def get(self, name: str, start: int, end: int) -> memoryview:
        started_s, is_good = self._clock.now(), False
        self.reading.begin(end - start, started_s)
        try:
            body = await self._ask("get", end - start, lambda: self._bucket.get(name, start, end))
            is_good = True
        finally:
            self.reading.end(end - start, started_s, self._clock.now(), is_good=is_good)
        self.bytes_read += body.nbytes
        return body

    async def listing(self, prefix: str, after: str = "") -> list[Listed]:
        """The first `LIST_LIMIT`, sorted by name. The time limit is for each page of them."""
        return await self._ask("list", None, lambda: self._all_pages(prefix, after))

    async def delete(self, name: str) -> None:
        """Also when it is gone already."""
        try:
            await self._ask("delete", 0, lambda: self._bucket.delete(name))
        except FileNotFoundError:
            pass

    async def _all_pages(self, prefix: str, after: str) -> list[Listed]:
        found: list[Listed] = []
        looked_at = 0
        async with aclosing(self._bucket.listing(prefix, after)) as pages:
            while looked_at < LOOK_LIMIT:
                async with asyncio.timeout(self._patience.request_s):
                    try:
                        page = await anext(pages)
                    except StopAsyncIteration:
                        break
                found += page
                looked_at += len(page)
                if len(found) > 2 * LIST_LIMIT:
                    found = sorted(found)[:LIST_LIMIT]
        return sorted(found)[:LIST_LIMIT]

    async def _ask(self, kind: str, size: int | None, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """`size` in bytes sets the time limit; None: `work` has its own."""
        if not self.may_ask():
            raise self._refusal()
        is_probe = self._is_probing = not self.health.is_well
        limit_s = None if size is None else self._patience.request_s + size / self._patience.slowest_bytes_per_s
        self._retries_left = min(RETRY_BURST, self._retries_left + RETRY_SHARE)
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    async with self._slots, asyncio.timeout(limit_s):
                        if not self.health.is_well and not is_probe:  # since it was asked for
                            raise self._refusal()
                        self.asked[kind] += 1
                        answer = await work()
                except (FileNotFoundError, FileExistsError):
                    self.health.succeeded()
                    raise
                except BucketAway:
                    raise
                except OSError as error:
                    self.errors += 1
                    is_last = attempt == ATTEMPTS or isinstance(error, PermissionError)
                    if is_last or not self.health.is_well or self._retries_left < 1:
                        self.health.failed(f"{kind}: {str(error) or 'no answer in time'}", self._clock.now())
                        raise
                else:
                    self.health.succeeded()
                    return answer
                self._retries_left -= 1
                self.retries += 1
                longest = min(self._patience.longest_backoff_s, self._patience.backoff_s * 2**attempt)
                await asyncio.sleep(self._random.uniform(0, longest))
        finally:
            if is_probe:
                self._is_probing = False
        raise AssertionError("the last attempt returns or raises")

    def _refusal(self) -> BucketAway:
        return BucketAway(errno.EHOSTDOWN, f"the bucket is away: {self.health.reason}")


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all at once, wait for all, then raise the first error."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if outcome is not None:
            raise outcome
