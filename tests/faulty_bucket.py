"""A bucket in memory whose requests go wrong when a test says so: what networks, proxies and stores do."""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from kvstore.tiers.bucket import Listed

Work = Callable[[], Awaitable[Any]]
Toxic = Callable[[Work], Awaitable[Any]]


class MemoryBucket:
    """Objects in a dict, in pages of three so that listings have several. `now` is the store's own clock."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self.now = 0.0

    async def put(self, name: str, body: memoryview, *, part_bytes: int) -> None:
        if name in self.objects and not part_bytes:
            raise FileExistsError(name)
        self.objects[name] = bytes(body)
        self.modified[name] = self.now

    async def get(self, name: str, start: int, end: int) -> memoryview:
        if name not in self.objects:
            raise FileNotFoundError(name)
        return memoryview(self.objects[name])[start:end]

    async def listing(self, prefix: str, after: str) -> AsyncGenerator[list[Listed], None]:
        names = [name for name in sorted(self.objects) if name.startswith(prefix) and name > after]
        found = [Listed(name, len(self.objects[name]), self.modified[name]) for name in names]
        for start in range(0, len(found), 3):
            yield found[start : start + 3]

    async def delete(self, name: str) -> None:
        if name not in self.objects:
            raise FileNotFoundError(name)
        del self.objects[name]


class FaultyBucket(MemoryBucket):
    """`next_up["get"]` are toxics for the next gets, one each, None for none; `always["get"]` is for all after."""

    def __init__(self) -> None:
        super().__init__()
        self.next_up: dict[str, deque[Toxic | None]] = defaultdict(deque)
        self.always: dict[str, Toxic] = {}
        self.asked: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0

    async def put(self, name: str, body: memoryview, *, part_bytes: int) -> None:
        await self._through("put", lambda: super(FaultyBucket, self).put(name, body, part_bytes=part_bytes))

    async def get(self, name: str, start: int, end: int) -> memoryview:
        body = await self._through("get", lambda: super(FaultyBucket, self).get(name, start, end))
        return memoryview(body)

    async def listing(self, prefix: str, after: str) -> AsyncGenerator[list[Listed], None]:
        async def pages() -> list[list[Listed]]:
            return [page async for page in super(FaultyBucket, self).listing(prefix, after)]

        for page in await self._through("list", pages):
            yield page

    async def delete(self, name: str) -> None:
        await self._through("delete", lambda: super(FaultyBucket, self).delete(name))

    async def _through(self, kind: str, work: Work) -> Any:
        self.asked[kind] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        waiting = self.next_up[kind]
        toxic = waiting.popleft() if waiting else self.always.get(kind)
        try:
            return await (toxic(work) if toxic else work())
        finally:
            self.at_once -= 1

    def cut_off(self, error: OSError) -> None:
        """No request gets through, until `reconnect`."""
        self.always = dict.fromkeys(("put", "get", "list", "delete"), fails(error))

    def reconnect(self) -> None:
        self.always = {}


def fails(error: OSError) -> Toxic:
    async def toxic(work: Work) -> Any:
        raise error

    return toxic


def loses_the_answer(error: OSError) -> Toxic:
    """It is done, and nobody hears of it."""

    async def toxic(work: Work) -> Any:
        await work()
        raise error

    return toxic


def waits(begun: asyncio.Event, until: asyncio.Event) -> Toxic:
    async def toxic(work: Work) -> Any:
        begun.set()
        await until.wait()
        return await work()

    return toxic


def never_answers() -> Toxic:
    async def toxic(work: Work) -> Any:
        await asyncio.Event().wait()

    return toxic


def cuts(most: int) -> Toxic:
    """A body has no more than that."""

    async def toxic(work: Work) -> Any:
        return (await work())[:most]

    return toxic


def flips(place: int) -> Toxic:
    """One bit of a body is another; counted from its end when negative."""

    async def toxic(work: Work) -> Any:
        body = bytearray(await work())
        body[place % len(body)] ^= 4
        return body

    return toxic


def answers(answer: Any) -> Toxic:
    """An answer of another time, or of somebody else; what was asked is not done."""

    async def toxic(work: Work) -> Any:
        return answer

    return toxic


def first(step: Callable[[], Any]) -> Toxic:
    """Something happens just before."""

    async def toxic(work: Work) -> Any:
        step()
        return await work()

    return toxic
