"""What to pull ahead for queued requests, and when: a window of bytes for each target, which follows what it uses.

    WAITING   its turn has come and it fits the window: a hint ──> UNDERWAY
    UNDERWAY  arrived ──> THERE
    THERE     evicted before it was used ──> WAITING
    any       consumed, cancelled, or its deadline is gone: forgotten

What is underway or there fills the window. As TCP's, a window begins small and doubles with what it lets through
(slow start), then grows by one request for each window that was used, both while bytes come just in time or late and
the window is what held them up. It halves when bytes were evicted unused or lay for too long, once for all that were
pulled before. It is never more than the target uses in the time that a pull takes, with some slack; nor more than a
share of the target's memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from math import exp, inf
from typing import Final

from scheduler.requests import Pull

LEAST_BYTES: Final = 64 << 20  # a window begins here and is never smaller: 10 ms of a link of 50 Gbit/s
MOST_BYTES: Final = 64 << 30  # of a window, whatever is measured
MEMORY_SHARE: Final = 0.25  # of the target's memory that a window may take
DECREASE: Final = 0.5
SLACK_S: Final = 1.0  # bytes should be there so long before they are used; less is just in time
LAIN_S: Final = 4.0  # unused for longer: the window was too large
RATE_S: Final = 5.0  # time constant of what is measured: a burst of some seconds shows in it
AHEAD: Final = 2.0  # times the lead that a pull needs: expected times are rough, and it is the window that limits
UNDERWAY_MOST_S: Final = 60.0  # a pull of which nothing is heard for so long is lost
WAIT_MOST_S: Final = 600.0  # the deadline of what has none
QUEUED_MOST: Final = 100_000  # requests of all targets together


class State(Enum):
    """Of a request's bytes at their target."""

    WAITING = "waiting"
    UNDERWAY = "underway"
    THERE = "there"


@dataclass(frozen=True, slots=True)
class Hint:
    """Pull this now, ahead of the request: `size_bytes` that it is expected to use at `needed_s`."""

    request: str
    pull: Pull
    size_bytes: int
    needed_s: float


@dataclass(slots=True)
class Ahead:
    """One queued request's bytes."""

    request: str
    pull: Pull
    size_bytes: int
    needed_s: float
    deadline_s: float
    state: State = State.WAITING
    hinted_s: float = 0.0
    arrived_s: float = 0.0


@dataclass(slots=True)
class Rate:
    """Bytes a second, an exponentially weighted mean over RATE_S; 0 until so much time was seen."""

    at_s: float
    seen_s: float = 0.0
    _sum: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self._sum / (1.0 - exp(-self.seen_s / RATE_S)) if self.seen_s >= RATE_S else 0.0

    def add(self, size_bytes: int, now: float) -> None:
        self.pass_until(now)
        self._sum += size_bytes / RATE_S

    def pass_until(self, now: float) -> None:
        """Time in which there was something to use counts; `skip_to` passes over the rest."""
        passed = max(0.0, now - self.at_s)
        self._sum *= exp(-passed / RATE_S)
        self.seen_s += passed
        self.at_s = max(self.at_s, now)

    def skip_to(self, now: float) -> None:
        self.at_s = max(self.at_s, now)


@dataclass(slots=True)
class Target:
    """One instance, or the node beside it, and its window. memory_bytes: 0: not known."""

    rate: Rate
    memory_bytes: int = 0
    window_bytes: float = LEAST_BYTES
    used_bytes: int = 0  # of the window
    underway_bytes: int = 0  # of these
    is_doubling: bool = True
    is_held_up: bool = False  # something did not fit the window since it last grew
    halved_s: float = -inf
    trip_s: float = 0.0  # of one pull that waits for no other; 0 until measured
    byte_s: float = 0.0  # and of one byte in it
    arrived_s: float = -inf  # the last one
    members: dict[str, Ahead] = field(default_factory=dict)
    waiting: list[tuple[float, str]] = field(default_factory=list)  # a heap of (needed_s, request); some are outdated

    @property
    def cap_bytes(self) -> float:
        cap = float(MOST_BYTES)
        if self.memory_bytes:
            cap = min(cap, MEMORY_SHARE * self.memory_bytes)
        if rate := self.rate.bytes_per_s:
            cap = min(cap, rate * (self.trip_s + SLACK_S))
        return max(cap, float(LEAST_BYTES))

    @property
    def limit_bytes(self) -> float:
        return min(self.window_bytes, self.cap_bytes)

    def begin_s(self, ahead: Ahead) -> float:
        """When its pull may begin: it goes behind what is underway."""
        lead_s = (self.underway_bytes + ahead.size_bytes) * self.byte_s + SLACK_S
        return ahead.needed_s - AHEAD * lead_s

    def first(self) -> Ahead | None:
        """The one that waits and is needed first."""
        while self.waiting:
            needed_s, request = self.waiting[0]
            ahead = self.members.get(request)
            if ahead is not None and ahead.state is State.WAITING and ahead.needed_s == needed_s:
                return ahead
            heappop(self.waiting)
        return None

    def wait(self, ahead: Ahead) -> None:
        ahead.state = State.WAITING
        if len(self.waiting) > 2 * len(self.members) + 64:
            self.waiting = [(each.needed_s, each.request) for each in self._all(State.WAITING)]
            heapify(self.waiting)
        heappush(self.waiting, (ahead.needed_s, ahead.request))

    def fits(self, ahead: Ahead) -> bool:
        """One of any size may go alone."""
        return not self.used_bytes or self.used_bytes + ahead.size_bytes <= self.limit_bytes

    def lost(self, now: float) -> list[Ahead]:
        return [each for each in self._all(State.UNDERWAY) if now - each.hinted_s > UNDERWAY_MOST_S]

    def enter(self, ahead: Ahead, now: float) -> None:
        """Its pull begins, and takes its part of the window."""
        ahead.state, ahead.hinted_s = State.UNDERWAY, now
        self.used_bytes += ahead.size_bytes
        self.underway_bytes += ahead.size_bytes

    def arrive(self, ahead: Ahead, now: float) -> None:
        self._note_trip(ahead, now)
        ahead.state, ahead.arrived_s = State.THERE, now
        self.underway_bytes -= ahead.size_bytes

    def leave(self, ahead: Ahead) -> None:
        """It takes no part of the window any more."""
        if ahead.state is State.UNDERWAY:
            self.underway_bytes -= ahead.size_bytes
        if ahead.state is not State.WAITING:
            self.used_bytes -= ahead.size_bytes
        assert 0 <= self.underway_bytes <= self.used_bytes, f"{ahead.request} left a window twice"

    def grow(self, size_bytes: int) -> None:
        if not self.is_held_up:
            return
        self.window_bytes += size_bytes if self.is_doubling else size_bytes * size_bytes / self.window_bytes
        if self.window_bytes >= self.cap_bytes:
            self.window_bytes, self.is_doubling = self.cap_bytes, False
        self.is_held_up = False

    def shrink(self, ahead: Ahead, now: float) -> None:
        """Once for all that was pulled before: they were let through by the same window."""
        self.is_doubling = False
        if ahead.hinted_s > self.halved_s:
            self.window_bytes = max(float(LEAST_BYTES), self.limit_bytes * DECREASE)
            self.halved_s = now

    def _note_trip(self, ahead: Ahead, now: float) -> None:
        """How long it took since the one before it arrived: pulls wait for one another on the same path."""
        took_s = max(0.0, now - max(ahead.hinted_s, self.arrived_s))
        is_first = self.arrived_s == -inf
        self.arrived_s = now
        byte_s = took_s / max(1, ahead.size_bytes)
        weight = 1.0 if is_first else 1.0 - exp(-max(took_s, 0.01) / RATE_S)
        self.trip_s += weight * (took_s - self.trip_s)
        self.byte_s += weight * (byte_s - self.byte_s)

    def _all(self, state: State) -> Iterator[Ahead]:
        return (each for each in self.members.values() if each.state is state)


class Prefetching:
    """All targets' windows. Every call may come twice, late, or for a request that is not known: then nothing changes.

    After any call there may be hints: ask `due`, and again at `wake_s`.
    """

    def __init__(self) -> None:
        self.targets: dict[str, Target] = {}
        self._requests: dict[str, Ahead] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; some are outdated

    def __len__(self) -> int:
        return len(self._requests)

    def target(self, name: str, memory_bytes: int, now: float) -> None:
        """A target, and how much of such bytes it has room for; again: its room has changed."""
        self._target(name, now).memory_bytes = memory_bytes

    def remove(self, name: str) -> None:
        """A target that is gone, with all that was pulled there."""
        target = self.targets.pop(name, None)
        for request in target.members if target is not None else ():
            del self._requests[request]

    def queued(
        self,
        request: str,
        pull: Pull,
        size_bytes: int,
        *,
        expected_at_s: float,
        deadline_s: float | None = None,
        now: float,
    ) -> bool:
        """A request waits, and is expected to use these bytes at that time; again: only the times change.

        False when there are too many already: it is then not pulled ahead.
        """
        known = self._requests.get(request)
        if known is not None:
            self._expect(known, expected_at_s)
            return True
        if len(self._requests) >= QUEUED_MOST:
            return False
        target = self._target(pull.target, now)
        if not target.members:
            target.rate.skip_to(now)
        deadline_s = now + WAIT_MOST_S if deadline_s is None else deadline_s
        ahead = Ahead(request, pull, size_bytes, expected_at_s, deadline_s)
        self._requests[request] = target.members[request] = ahead
        target.wait(ahead)
        self._await_deadline(ahead)
        return True

    def due(self, now: float) -> list[Hint]:
        """What to pull now, by when it is needed. Each is told once, and takes its part of the window from here on."""
        hints = []
        for target in self.targets.values():
            for lost in target.lost(now):
                self._forget(lost)
            while (ahead := target.first()) is not None and target.begin_s(ahead) <= now:
                if not target.fits(ahead):
                    target.is_held_up = True
                    break
                target.enter(ahead, now)
                hints.append(Hint(ahead.request, ahead.pull, ahead.size_bytes, ahead.needed_s))
        return sorted(hints, key=lambda hint: hint.needed_s)

    def arrived(self, request: str, now: float) -> None:
        ahead = self._requests.get(request)
        if ahead is not None and ahead.state is State.UNDERWAY:
            self.targets[ahead.pull.target].arrive(ahead, now)

    def consumed(self, request: str, now: float, *, stall_s: float = 0.0) -> None:
        """The request uses its bytes, for which it had to wait for `stall_s`; also when they were not pulled ahead."""
        ahead = self._requests.get(request)
        if ahead is None:
            return
        target = self.targets[ahead.pull.target]
        target.rate.add(ahead.size_bytes, now)
        lain_s = now - ahead.arrived_s if ahead.state is State.THERE else 0.0
        if stall_s > 0.0 or lain_s <= SLACK_S:
            target.grow(ahead.size_bytes)
        elif lain_s > LAIN_S:
            target.shrink(ahead, now)
        else:
            target.is_doubling = False
        self._forget(ahead)

    def evicted(self, request: str, now: float) -> None:
        """Its bytes are gone, or found no room: they are to be pulled again."""
        ahead = self._requests.get(request)
        if ahead is not None and ahead.state is not State.WAITING:
            target = self.targets[ahead.pull.target]
            target.shrink(ahead, now)
            target.leave(ahead)
            target.wait(ahead)

    def cancelled(self, request: str) -> None:
        """The request is gone, or its pull failed and is not tried again ahead of it."""
        ahead = self._requests.get(request)
        if ahead is not None:
            self._forget(ahead)

    def expired(self, now: float) -> list[str]:
        """Requests whose deadline is gone: to be dropped, and what is pulled for them cancelled. Forgotten here."""
        found = []
        while self._deadlines and self._deadlines[0][0] < now:
            deadline_s, request = heappop(self._deadlines)
            ahead = self._requests.get(request)
            if ahead is not None and ahead.deadline_s == deadline_s:
                found.append(request)
                self._forget(ahead)
        return found

    def wake_s(self, now: float) -> float | None:
        """When to ask `due` and `expired` again, if nothing happens before; None: not before something happens."""
        times = [self._deadlines[0][0]] if self._deadlines else []
        for target in self.targets.values():
            ahead = target.first()
            if ahead is not None and target.fits(ahead):
                times.append(max(now, target.begin_s(ahead)))
        return min(times, default=None)

    def _target(self, name: str, now: float) -> Target:
        target = self.targets.get(name)
        if target is None:
            target = self.targets[name] = Target(Rate(now))
        return target

    def _expect(self, ahead: Ahead, expected_at_s: float) -> None:
        if expected_at_s != ahead.needed_s:
            ahead.needed_s = expected_at_s
            if ahead.state is State.WAITING:
                self.targets[ahead.pull.target].wait(ahead)

    def _await_deadline(self, ahead: Ahead) -> None:
        if len(self._deadlines) > 2 * len(self._requests) + 64:
            self._deadlines = [(each.deadline_s, each.request) for each in self._requests.values()]
            heapify(self._deadlines)
        else:
            heappush(self._deadlines, (ahead.deadline_s, ahead.request))

    def _forget(self, ahead: Ahead) -> None:
        target = self.targets[ahead.pull.target]
        target.leave(ahead)
        del self._requests[ahead.request], target.members[ahead.request]
