"""How fast a path really is, measured as it is used, and when a load would arrive over it."""

from dataclasses import dataclass

SMOOTHING = 0.25  # weight of the newest window
WINDOW_BYTES = 16 << 20  # moved between two looks at the rate; or WINDOW_S of moving
WINDOW_S = 0.25
STALE_S = 10.0


@dataclass(slots=True)
class Bandwidth:
    """One direction of one tier. `bytes_per_s` and `request_s` (of one request) are 0 until something was measured.

    The rate is that of all requests together: bytes moved by the time in which at least one was under way.
    """

    bytes_per_s: float = 0.0
    request_s: float = 0.0
    total_bytes: int = 0
    requests: int = 0
    queued_bytes: int = 0  # begun and not ended
    _under_way: int = 0
    _since: float = 0.0
    _busy_s: float = 0.0
    _window_bytes: int = 0

    def begin(self, size: int, now: float) -> None:
        """A request of `size` bytes is given to the path."""
        if not self._under_way:
            self._since = now
        self._under_way += 1
        self.queued_bytes += size

    def end(self, size: int, started: float, now: float, *, is_good: bool) -> None:
        """A request that was begun at `started` is over; a failed one says nothing about the rate."""
        self._under_way -= 1
        self.queued_bytes -= size
        if is_good or self._under_way:
            self._busy_s += now - self._since
        self._since = now
        if not is_good:
            return
        self.requests += 1
        self.total_bytes += size
        self._window_bytes += size
        self.request_s = _smooth(self.request_s, now - started)
        if self._busy_s > 0 and (self._window_bytes >= WINDOW_BYTES or self._busy_s >= WINDOW_S):
            self.bytes_per_s = _smooth(self.bytes_per_s, self._window_bytes / self._busy_s)
            self._busy_s, self._window_bytes = 0.0, 0

    def is_stale(self, now: float) -> bool:
        """Whether what was measured is so old that the path may have another rate by now."""
        return not self._under_way and now - self._since > STALE_S

    def arrival_s(self, size: int) -> float:
        """Seconds until `size` more bytes would have arrived, after all that is queued; 0 while nothing is known."""
        if not self.bytes_per_s:
            return 0.0
        return (self.queued_bytes + size) / self.bytes_per_s


def _smooth(old: float, new: float) -> float:
    return new if not old else old + SMOOTHING * (new - old)
