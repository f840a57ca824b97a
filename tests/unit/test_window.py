"""Windows on a simulated link: it is kept busy, its queue stays short, and it is followed when it changes."""

import heapq
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cluster.window import TRIP_STALE_S, Flight, Window

MIB = 1 << 20


@dataclass
class Link:
    """First come, first served at `bytes_per_s`; an answer is `latency_s` under way after that. Demand is endless."""

    window: Window
    sizes: list[int]
    bytes_per_s: float
    latency_s: float
    now: float = 0.0
    delivered: int = 0
    most_in_flight: int = 0
    _free_at: float = 0.0
    _next: int = 0
    _ends: list[tuple[float, int, Flight]] = field(default_factory=list)

    def run(self, seconds: float) -> float:
        """Bytes a second that arrived in so long; `most_in_flight` is of this time."""
        until, before, self.most_in_flight = self.now + seconds, self.delivered, 0
        self._fill()
        while self._ends and self._ends[0][0] <= until:
            self.now, _, flight = heapq.heappop(self._ends)
            self.window.ended(flight, self.now)
            self.delivered += flight.size_bytes
            self._fill()
        self.now = until
        return (self.delivered - before) / seconds

    def _fill(self) -> None:
        while self.window.may_start(size := self.sizes[self._next % len(self.sizes)], self.now):
            flight = self.window.started(size, self.now)
            self._free_at = max(self._free_at, self.now) + size / self.bytes_per_s
            heapq.heappush(self._ends, (self._free_at + self.latency_s, self._next, flight))
            self._next += 1
            self.most_in_flight = max(self.most_in_flight, self.window.in_flight_bytes)

    @property
    def filling_bytes(self) -> float:
        """What keeps the link busy: its bandwidth-delay product, and the job that is being sent."""
        return self.bytes_per_s * self.latency_s + max(self.sizes)


rates = st.floats(1e7, 2e10)
jobs_under_way = st.floats(0.01, 12)  # that fill the path
job_sizes = st.lists(st.integers(MIB, 32 * MIB), min_size=1, max_size=5)


def window() -> Window:
    return Window(least_bytes=MIB, most_bytes=8 << 30)


def link_of(rate: float, jobs: float, sizes: list[int]) -> Link:
    return Link(window(), sizes, rate, jobs * max(sizes) / rate)


def settle_s(link: Link) -> float:
    """Enough rounds to grow from one job to any window, or to forget ROUNDS of another rate."""
    return 100 * (link.filling_bytes + sum(link.sizes)) / link.bytes_per_s


def is_followed(link: Link) -> bool:
    link.run(settle_s(link))
    rate = link.run(50 * link.filling_bytes / link.bytes_per_s)
    assert rate >= 0.9 * link.bytes_per_s
    assert link.most_in_flight - link.filling_bytes <= 3 * link.filling_bytes
    return True


@given(rate=rates, jobs=jobs_under_way, sizes=job_sizes)
@settings(max_examples=40, deadline=None)
def test_a_link_is_kept_busy_with_a_short_queue(rate, jobs, sizes):
    assert is_followed(link_of(rate, jobs, sizes))


@given(rate=rates, jobs=jobs_under_way, size=st.integers(MIB, 32 * MIB))
@settings(max_examples=25, deadline=None)
def test_a_link_that_gets_ten_times_slower_and_recovers_is_followed(rate, jobs, size):
    link = link_of(rate, jobs, [size])
    assert is_followed(link)
    link.bytes_per_s = rate / 10
    assert is_followed(link)
    link.bytes_per_s = rate
    assert is_followed(link)


def test_a_path_that_gets_longer_is_followed_once_its_trip_is_measured_again():
    link = Link(window(), [MIB], 1e9, 0.0001)
    assert is_followed(link)
    link.latency_s = 0.02
    link.run(TRIP_STALE_S + 1)
    assert is_followed(link)


def test_a_queue_that_stands_for_long_does_not_pass_for_a_long_path():
    link = Link(window(), [MIB], 1e9, 0.002)
    assert is_followed(link)
    trip_s = link.window.trip_s
    assert link.run(5 * TRIP_STALE_S) > 0.98e9
    assert link.window.trip_s <= 1.01 * trip_s
    assert is_followed(link)


def test_a_peer_that_is_asked_for_little_is_not_slow():
    link = Link(window(), [MIB], 1e9, 0.005)
    assert is_followed(link)
    limit, wide = link.window.limit_bytes, link.window
    while link._ends:
        link.now, _, flight = heapq.heappop(link._ends)
        wide.ended(flight, link.now)
    for _ in range(1000):
        link.now += 0.01
        flight = wide.started(MIB, link.now)
        link.now += 0.006
        wide.ended(flight, link.now)
    assert wide.limit_bytes >= 0.9 * limit


def test_with_nothing_under_way_a_job_of_any_size_may_start():
    narrow = Window(least_bytes=1, most_bytes=10)
    assert narrow.may_start(1000, 0.0)
    narrow.started(1000, 0.0)
    assert not narrow.may_start(1, 0.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.floats(0, 30), st.booleans()), max_size=80))
def test_whatever_happens_no_more_than_the_most_is_under_way_and_all_of_it_is_given_back(steps):
    bounded, now, flights = Window(least_bytes=10, most_bytes=100), 0.0, []
    for starts, size, wait_s, is_good in steps:
        now += wait_s
        if starts and bounded.may_start(size, now):
            flights.append(bounded.started(size, now))
        elif flights:
            bounded.ended(flights.pop(0), now, is_good=is_good)
        assert bounded.in_flight_bytes == sum(flight.size_bytes for flight in flights) <= 100
        assert 10 <= bounded.limit_bytes <= 100
    for flight in flights:
        bounded.ended(flight, now, is_good=False)
    assert bounded.may_start(1000, now)


def test_a_failed_job_says_nothing_of_the_path():
    seen = window()
    seen.ended(seen.started(MIB, 0.0), 0.001, is_good=False)
    assert seen.bytes_per_s == seen.trip_s == 0.0
    assert not seen.in_flight_bytes
