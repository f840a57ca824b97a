"""One decode instance behind one link: what pulling early, late, or by a window costs in waiting and in memory.

A queued request begins when a sequence ends and its KV has room. Then its bytes should be there: those that are not
are pulled before all others, and how long that takes is its stall. Bytes that were pulled ahead lie in the same memory;
when it is full those that lie longest go first, as in any cache that knows no queue. All three strategies meet the same
requests, the same link and the same pace.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf, log
from typing import Final

from scheduler.prefetch import Prefetching
from scheduler.requests import Pull
from scheduler.simulation.loop import Loop

TARGET: Final = "decode"
SOURCE: Final = "store"
PACE_WEIGHT: Final = 0.1  # of the newest interval between two starts, in the expectation of the queue's


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What happens around the strategies. Defaults: LLaMA3-70B on one node of eight GPUs.

    kv_bytes: of a token: 80 layers x 8 heads x 128 x 2 x 2 bytes. link_rate: bytes/s, 200 Gbit/s. slow_link: share of
    it in a bad phase. slow_pace, fast_pace: of decoding. others_bytes: what other work takes of the memory in a phase.
    """

    requests: int = 1200
    kv_bytes: int = 327_680
    tokens: tuple[int, int] = (1_000, 12_000)
    output_tokens_mean: float = 120.0
    step_s: float = 0.03
    slots: int = 12
    memory_bytes: int = 64_000_000_000
    link_rate: float = 25e9
    latency_s: float = 0.002
    slow_link: float = 0.4
    slow_pace: float = 0.4
    fast_pace: float = 1.5
    others_bytes: int = 24_000_000_000
    phase_s: float = 15.0
    load: float = 0.85  # of what all slots could do at an even pace
    burst: float = 3.0  # arrivals in a burst, to their mean


@dataclass(frozen=True, slots=True)
class Ask:
    """One request that is to be decoded here."""

    number: int
    arrived_s: float
    size_bytes: int
    decode_s: float  # at an even pace

    @property
    def name(self) -> str:
        return str(self.number)


@dataclass(frozen=True, slots=True)
class Phases:
    """A value that changes from time to time: values[i] from begins_s[i] on; the last one stays."""

    begins_s: list[float]
    values: list[float]

    def at(self, now: float) -> float:
        return self.values[max(0, bisect_right(self.begins_s, now) - 1)]

    def end_s(self, now: float, amount: float) -> float:
        """When so much is done, at `values` a second."""
        position = max(0, bisect_right(self.begins_s, now) - 1)
        while position + 1 < len(self.begins_s):
            room = (self.begins_s[position + 1] - now) * self.values[position]
            if amount <= room:
                break
            amount -= room
            now = self.begins_s[position + 1]
            position += 1
        return now + amount / self.values[position]


@dataclass(frozen=True, slots=True)
class Weather:
    """One course of events for all strategies."""

    asks: list[Ask]
    link: Phases
    pace: Phases
    others: Phases


class Strategy:
    """Says which queued requests to pull ahead, and hears what became of them. This one pulls none: each is late."""

    name = "late"

    def queued(self, ask: Ask, expected_at_s: float, now: float) -> None:
        """Nothing to remember."""

    def due(self, now: float) -> list[str]:
        return []

    def arrived(self, name: str, now: float) -> None:
        """Nothing to learn."""

    def evicted(self, name: str, now: float) -> None:
        """It will be pulled when it is needed."""

    def consumed(self, name: str, now: float, stall_s: float) -> None:
        """Nothing to learn."""

    def wake_s(self, now: float) -> float | None:
        return None

    def window_bytes(self) -> float:
        return 0.0


class Early(Strategy):
    """Pulls everything as soon as it is queued, once."""

    name = "early"

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._due: list[str] = []

    def queued(self, ask: Ask, expected_at_s: float, now: float) -> None:
        if ask.name not in self._known:
            self._known.add(ask.name)
            self._due.append(ask.name)

    def due(self, now: float) -> list[str]:
        due, self._due = self._due, []
        return due


class Windowed(Strategy):
    """Pulls what `Prefetching` says."""

    name = "windowed"

    def __init__(self, scene: Scene) -> None:
        self._prefetching = Prefetching()
        self._prefetching.target(TARGET, scene.memory_bytes, 0.0)

    def queued(self, ask: Ask, expected_at_s: float, now: float) -> None:
        pull = Pull(SOURCE, TARGET, 0, 0, 1)
        self._prefetching.queued(ask.name, pull, ask.size_bytes, expected_at_s=expected_at_s, deadline_s=inf, now=now)

    def due(self, now: float) -> list[str]:
        return [hint.request for hint in self._prefetching.due(now)]

    def arrived(self, name: str, now: float) -> None:
        self._prefetching.arrived(name, now)

    def evicted(self, name: str, now: float) -> None:
        self._prefetching.evicted(name, now)

    def consumed(self, name: str, now: float, stall_s: float) -> None:
        self._prefetching.consumed(name, now, stall_s=stall_s)

    def wake_s(self, now: float) -> float | None:
        return self._prefetching.wake_s(now)

    def window_bytes(self) -> float:
        return self._prefetching.targets[TARGET].limit_bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """What the instance held at a moment, of its own requests."""

    at_s: float
    running_bytes: int
    ahead_bytes: int
    window_bytes: float


@dataclass(slots=True)
class Outcome:
    """stalls_s: of each request, in the order in which they began. pulled_bytes: over the link.

    wasted_bytes: of them, what was evicted before it was used. peak_bytes: of all that its requests held at a time.
    """

    strategy: str
    stalls_s: list[float] = field(default_factory=list)
    pulled_bytes: int = 0
    wasted_bytes: int = 0
    evictions: int = 0
    peak_bytes: int = 0
    ended_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    @property
    def stall_s(self) -> float:
        return sum(self.stalls_s)

    @property
    def ahead_bytes_mean(self) -> float:
        """Over time: what lay in memory before it was used."""
        held = sum(one.ahead_bytes * (next_.at_s - one.at_s) for one, next_ in pairwise(self.samples))
        return held / (self.samples[-1].at_s - self.samples[0].at_s)

    def stall_quantile_s(self, share: float) -> float:
        return sorted(self.stalls_s)[min(len(self.stalls_s) - 1, int(share * len(self.stalls_s)))]


def make_weather(scene: Scene, draw: Callable[[], float]) -> Weather:
    """A course of events. draw: evenly from [0, 1)."""

    def exponential(mean: float) -> float:
        return -mean * log(1.0 - draw())

    def phases(values: tuple[float, ...], until_s: float) -> Phases:
        begins, chosen = [0.0], [values[0]]
        while begins[-1] < until_s:
            begins.append(begins[-1] + scene.phase_s * (0.5 + draw()))
            chosen.append(values[int(draw() * len(values))])
        return Phases(begins, chosen)

    decode_s = scene.output_tokens_mean * scene.step_s
    mean_s = decode_s / (scene.slots * scene.load)
    span_s = scene.requests * mean_s
    calm = (scene.burst - 1.0) / scene.burst  # a burst is a third as long as the calm around it
    bursts = phases((calm, scene.burst, calm, calm), 2 * span_s)
    asks, now = [], 0.0
    for number in range(scene.requests):
        now = bursts.end_s(now, exponential(mean_s))
        low, high = scene.tokens
        tokens = low + int(draw() * (high - low))
        asks.append(Ask(number, now, tokens * scene.kv_bytes, exponential(decode_s)))
    return Weather(
        asks,
        phases((scene.link_rate, scene.link_rate, scene.link_rate * scene.slow_link), 4 * span_s),
        phases((1.0, scene.slow_pace, scene.fast_pace, scene.fast_pace), 4 * span_s),
        phases((0.0, float(scene.others_bytes), 0.0), 4 * span_s),
    )


class Instance:
    """The decode instance, its memory and its link, with one strategy."""

    def __init__(self, scene: Scene, weather: Weather, strategy: Strategy) -> None:
        self.outcome = Outcome(strategy.name)
        self._scene, self._weather, self._strategy = scene, weather, strategy
        self._loop = Loop()
        self._asks = {ask.name: ask for ask in weather.asks}
        self._queue: deque[Ask] = deque()
        self._running: set[str] = set()
        self._running_bytes = 0
        self._ahead: dict[str, bool] = {}  # pulled ahead, or being so: whether it is there; in the order of arrival
        self._ahead_bytes = 0
        self._wanted: dict[str, float] = {}  # began, and waits for its bytes since
        self._pulls: deque[str] = deque()  # to go over the link; those that are wanted go first
        self._is_pulling = False
        self._began_s = 0.0
        self._interval_s = scene.output_tokens_mean * scene.step_s / scene.slots
        self._wakes_s = inf

    def run(self) -> Outcome:
        for ask in self._weather.asks:
            self._loop.at(ask.arrived_s, partial(self._arrive, ask))
        last_s = self._weather.asks[-1].arrived_s
        for begin_s in self._weather.others.begins_s:
            if begin_s <= last_s:
                self._loop.at(begin_s, self._turn)
        self._loop.run()
        assert len(self.outcome.stalls_s) == len(self._asks), "a request never began"
        return self.outcome

    def _arrive(self, ask: Ask) -> None:
        self._queue.append(ask)
        self._turn()

    def _turn(self) -> None:
        """After anything that happens: begin what can begin, pull what is due."""
        now = self._loop.now
        self._make_room(0)
        self._begin()
        for position, ask in enumerate(self._queue):
            self._strategy.queued(ask, now + (position + 1) * self._interval_s, now)
        self._pulls.extend(name for name in self._strategy.due(now) if name not in self._wanted)
        self._pull()
        wake_s = self._strategy.wake_s(now)
        if wake_s is not None and wake_s < inf and not now < self._wakes_s <= wake_s:
            self._wakes_s = max(wake_s, now + 1e-3)
            self._loop.at(self._wakes_s, self._turn)
        self._sample()

    def _begin(self) -> None:
        """Requests take free slots in their order; one whose bytes are not there wants them now."""
        while self._queue and len(self._running) < self._scene.slots:
            ask = self._queue[0]
            if self._running_bytes + ask.size_bytes + self._others() > self._scene.memory_bytes and self._running:
                return
            self._queue.popleft()
            self._note_interval()
            self._running.add(ask.name)
            self._running_bytes += ask.size_bytes
            if self._ahead.get(ask.name):
                self._leave(ask)
                self._start(ask, 0.0)
                continue
            self._wanted[ask.name] = self._loop.now
            if ask.name in self._ahead:
                self._leave(ask)  # what is on the link already fills the room of the request itself
            elif ask.name not in self._pulls:
                self._pulls.appendleft(ask.name)
            self._make_room(0)

    def _note_interval(self) -> None:
        """While there is a queue, the time between two starts says when the next ones will be."""
        now = self._loop.now
        if self._queue and self._began_s:
            self._interval_s += PACE_WEIGHT * (now - self._began_s - self._interval_s)
        self._began_s = now if self._queue else 0.0

    def _start(self, ask: Ask, stall_s: float) -> None:
        now = self._loop.now
        self.outcome.stalls_s.append(stall_s)
        self._strategy.consumed(ask.name, now, stall_s)
        self._loop.at(self._weather.pace.end_s(now, ask.decode_s), partial(self._end, ask))

    def _end(self, ask: Ask) -> None:
        self._running.remove(ask.name)
        self._running_bytes -= ask.size_bytes
        self.outcome.ended_s = self._loop.now
        self._turn()

    def _pull(self) -> None:
        """The next one over the link: wanted ones first. What is pulled ahead needs room, wanted bytes have it."""
        while self._pulls and not self._is_pulling:
            name = next((each for each in self._pulls if each in self._wanted), self._pulls[0])
            self._pulls.remove(name)
            ask = self._asks[name]
            if name not in self._wanted:
                if not self._make_room(ask.size_bytes):
                    self._strategy.evicted(name, self._loop.now)
                    continue
                self._ahead[name] = False
                self._ahead_bytes += ask.size_bytes
            self._is_pulling = True
            self.outcome.pulled_bytes += ask.size_bytes
            end_s = self._weather.link.end_s(self._loop.now + self._scene.latency_s, ask.size_bytes)
            self._loop.at(end_s, partial(self._pulled, ask))

    def _pulled(self, ask: Ask) -> None:
        self._is_pulling = False
        self._strategy.arrived(ask.name, self._loop.now)
        wanted_s = self._wanted.pop(ask.name, None)
        if wanted_s is not None:
            self._start(ask, self._loop.now - wanted_s)
        elif ask.name in self._ahead:
            del self._ahead[ask.name]
            self._ahead[ask.name] = True
        self._turn()

    def _make_room(self, size_bytes: int) -> bool:
        """Evict what lies longest of what was pulled ahead, until so much is free."""
        limit = self._scene.memory_bytes - self._others() - size_bytes
        while self._running_bytes + self._ahead_bytes > limit:
            victim = next((name for name, is_there in self._ahead.items() if is_there), None)
            if victim is None:
                return False
            ask = self._asks[victim]
            self._leave(ask)
            self.outcome.wasted_bytes += ask.size_bytes
            self.outcome.evictions += 1
            self._strategy.evicted(victim, self._loop.now)
        return True

    def _leave(self, ask: Ask) -> None:
        del self._ahead[ask.name]
        self._ahead_bytes -= ask.size_bytes

    def _others(self) -> int:
        return int(self._weather.others.at(self._loop.now))

    def _sample(self) -> None:
        held = self._running_bytes + self._ahead_bytes
        self.outcome.peak_bytes = max(self.outcome.peak_bytes, held)
        sample = Sample(self._loop.now, self._running_bytes, self._ahead_bytes, self._strategy.window_bytes())
        self.outcome.samples.append(sample)


def compare(scene: Scene, draw: Callable[[], float]) -> list[Outcome]:
    """Early, late and windowed on one course of events."""
    weather = make_weather(scene, draw)
    strategies: tuple[Strategy, ...] = (Early(), Strategy(), Windowed(scene))
    return [Instance(scene, weather, strategy).run() for strategy in strategies]
