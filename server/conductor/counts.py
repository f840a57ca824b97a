"""What the Conductor counts on its way: plain integers, so that a decision pays nothing for being counted."""

from bisect import bisect_left
from collections import Counter
from typing import Final

ROUTE_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)  # upper bounds; the target is 2 ms
ERROR_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Histogram:
    """How many values were at most each of `bounds`, and how many more."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: (upper bound, how many up to there)."""
        found, so_far = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            found.append((bound, float(so_far)))
        return found


class Counts:
    """Since the start."""

    def __init__(self) -> None:
        self.routes: Counter[str] = Counter()  # by outcome: collocated, disaggregated
        self.pulls = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.refusals: Counter[str] = Counter()  # by reason
        self.states: Counter[str] = Counter()  # of requests, as they were reported
        self.lost_instances = 0
        self.lost_requests = 0
        self.expired_requests = 0
        self.route_s = Histogram(ROUTE_S)
        self.ttft_error_s = Histogram(ERROR_S)  # predicted against measured, without a sign
        self.predicted_ttft_s = 0.0  # sums over the same requests
        self.measured_ttft_s = 0.0
        self.in_time = 0  # first tokens within the SLO
        self.late = 0
