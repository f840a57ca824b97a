"""How many bytes may be under way to one peer: as many as it is seen to take, so that none wait in queues for long."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

GAIN = 1.5  # over what fills the path: finds out that it became faster, at the price of a queue of half as much
ROUNDS = 4  # full ones, over which the best rate counts: one slow round says nothing
TRIP_STALE_S = 10.0  # after that the shortest trip is measured again, by one job that goes alone,
TRIP_STALE_TRIPS = 40  # but not before as many trips: emptying a long path costs two of them


class Flight(NamedTuple):
    """One job under way: what `ended` must know of its start."""

    size_bytes: int
    started: float
    delivered_bytes: int  # by then
    is_alone: bool


@dataclass(slots=True)
class Window:
    """Jobs to one peer. `least_bytes` is one job's size; whatever is measured, no more than `most_bytes` are under way.

    The limit is GAIN x the best delivery rate of the last ROUNDS x the shortest trip of a job. Only rounds in which a
    start was refused lower the rate: a peer that is asked for little is not slow. With nothing under way a job of any
    size may start.
    """

    least_bytes: int
    most_bytes: int
    in_flight_bytes: int = 0
    trip_s: float = 0.0  # 0 until measured
    _delivered_bytes: int = 0
    _trip_at: float = 0.0
    _lone_trip_s: float = 0.0  # what it was after the last job that went alone
    _is_emptying: bool = False  # until a job has gone alone
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))
    _round_rate: float = 0.0
    _round_begin_bytes: int = 0
    _largest_bytes: int = 0  # job started in this round
    _largest_before_bytes: int = 0  # and in the one before: what is under way was started in these
    _is_full: bool = False  # a start was refused in this round

    @property
    def bytes_per_s(self) -> float:
        """The best rate of the last rounds, 0 until measured."""
        return max(max(self._rates, default=0.0), self._round_rate)

    @property
    def limit_bytes(self) -> int:
        return max(self.least_bytes, min(int(GAIN * self.bytes_per_s * self.trip_s), self.most_bytes))

    def may_start(self, size_bytes: int, now: float) -> bool:
        """Whether a job may start now; a refusal is remembered as the window being the limit. Ask again after `ended`.

        The limit is of what stays under way when the largest job ends: else large ones would go one by one behind it.
        """
        if not self.in_flight_bytes:
            return True
        if self._is_stale(now):
            self._is_emptying = True
        largest = max(size_bytes, self._largest_bytes, self._largest_before_bytes)
        fits = self.in_flight_bytes + size_bytes <= self.most_bytes
        if fits and not self._is_emptying and self.in_flight_bytes < self.limit_bytes + largest:
            return True
        self._is_full = True
        return False

    def started(self, size_bytes: int, now: float) -> Flight:
        """A job of `size_bytes` begins; what is returned goes to `ended`, once."""
        is_alone = not self.in_flight_bytes and (self._is_emptying or not self.trip_s)
        self.in_flight_bytes += size_bytes
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        return Flight(size_bytes, now, self._delivered_bytes, is_alone)

    def ended(self, flight: Flight, now: float, *, is_good: bool = True) -> None:
        """It is over; one that failed says nothing of the path."""
        self.in_flight_bytes -= flight.size_bytes
        assert self.in_flight_bytes >= 0, f"a job of {flight.size_bytes} bytes ended twice"
        took_s = now - flight.started
        if not is_good or took_s <= 0:
            return
        self._delivered_bytes += flight.size_bytes
        self._note_trip(flight, took_s, now)
        self._round_rate = max(self._round_rate, (self._delivered_bytes - flight.delivered_bytes) / took_s)
        if flight.delivered_bytes >= self._round_begin_bytes:
            self._end_round()

    def _is_stale(self, now: float) -> bool:
        return bool(self.trip_s) and now - self._trip_at > max(TRIP_STALE_S, TRIP_STALE_TRIPS * self.trip_s)

    def _note_trip(self, flight: Flight, took_s: float, now: float) -> None:
        """A trip far below that of the last lone job is of a path that became faster, and may hold a queue yet."""
        is_new = not self.trip_s or (flight.is_alone and self._is_stale(now))
        if not is_new and not flight.is_alone and took_s > self.trip_s:
            return
        self.trip_s = took_s if is_new else min(took_s, self.trip_s)
        self._trip_at = now
        if flight.is_alone:
            self._lone_trip_s = self.trip_s
        self._is_emptying = not flight.is_alone and took_s < self._lone_trip_s / 2

    def _end_round(self) -> None:
        if self._is_full or self._round_rate > max(self._rates, default=0.0):
            self._rates.append(self._round_rate)
        self._round_rate, self._round_begin_bytes, self._is_full = 0.0, self._delivered_bytes, False
        self._largest_before_bytes, self._largest_bytes = self._largest_bytes, 0
