"""The paths to other members, as they are used: what is measured of each, and how much may be under way on it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvstore.clock import Clock
from kvstore.cluster.choice import Route
from kvstore.cluster.members import View, distance
from kvstore.cluster.window import Window
from kvstore.errors import Rejected

LEAST_WINDOW_BYTES = 16 << 20  # four jobs of Promotion: one is sent while others are verified
MOST_WINDOW_BYTES = 256 << 20


@dataclass(slots=True)
class Turn:
    """A read that is under way. It says at its end whether all of it came."""

    is_good: bool = False


@dataclass(slots=True, eq=False)
class Path:
    """`route` is for choosing; `window` says how much may be under way, and `waiting` are reads until it does."""

    route: Route
    window: Window = field(default_factory=lambda: Window(LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES))
    waiting: deque["asyncio.Future[None]"] = field(default_factory=deque)

    def wake(self) -> None:
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_result(None)
                return


class Routes:
    """Of the members that were seen last; a node that was started again is a new one."""

    def __init__(self, me: str, labels: Mapping[str, str], clock: Clock) -> None:
        self._me = me
        self._labels = labels
        self._clock = clock
        self._epochs: dict[str, int] = {}
        self._paths: dict[str, Path] = {}
        self.routes: dict[str, Route] = {}

    def changed(self, view: View) -> None:
        for name in [name for name, epoch in self._epochs.items() if not view.has(name, epoch)]:
            del self._epochs[name], self._paths[name], self.routes[name]
        for name, member in view.members.items():
            if name != self._me and name not in self._epochs:
                self._epochs[name] = member.epoch
                route = self.routes[name] = Route(distance(self._labels, member.labels))
                self._paths[name] = Path(route)

    def failed(self, name: str, reason: str) -> None:
        """It is left alone for a while."""
        route = self.routes.get(name)
        if route is not None:
            route.health.failed(reason, self._clock.now())

    def may_ask(self, name: str) -> bool:
        """Whether it is well, or its pause is over."""
        route = self.routes.get(name)
        return route is None or route.health.may_try(self._clock.now())

    def answered(self, name: str, took_s: float) -> None:
        """It is well; `took_s` is 0 where that says nothing of the path."""
        route = self.routes.get(name)
        if route is not None:
            if took_s:
                route.answered(took_s)
            route.health.succeeded()

    @asynccontextmanager
    async def turn(self, name: str, size_bytes: int) -> AsyncIterator[Turn]:
        """Wait until so much more may be under way to a member, and measure what is done meanwhile.

        Rejected when the member failed while this waited: who waits behind a read that hangs does not hang too.
        """
        path = self._paths.get(name) or Path(Route())  # of a member that has just gone: the read will say so
        queue = path.waiting.append
        while not path.window.may_start(size_bytes, self._clock.now()):
            future = asyncio.get_running_loop().create_future()
            queue(future)
            try:
                await future
            except BaseException:
                if future.done() and not future.cancelled():
                    path.wake()  # it was this one's turn, and is another's
                raise
            queue = path.waiting.appendleft
            if not path.route.health.may_try(self._clock.now()):
                path.wake()
                raise Rejected(f"{name} failed while this waited for its turn")
        begun = self._clock.now()
        flight = path.window.started(size_bytes, begun)
        path.route.reading.begin(size_bytes, begun)
        path.wake()  # there may be room for one more
        turn = Turn()
        try:
            yield turn
        finally:
            now = self._clock.now()
            path.window.ended(flight, now, is_good=turn.is_good)
            path.route.reading.end(size_bytes, begun, now, is_good=turn.is_good)
            if turn.is_good:
                path.route.health.succeeded()
            path.wake()
