"""What came of a replay: a record for each request, and their sums, percentiles and curves."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.tuning import Slo

Floats = NDArray[np.float64]

LONGEST_SHARE: Final = 0.1  # of a request's token intervals, whose mean is its TBT


@dataclass(slots=True, kw_only=True)
class Record:
    """One request of a replay. Times are seconds, `arrived_s` and `finished_s` since the replay's start.

    tokens: of the prompt; cached_tokens of them were not computed. blocks, cached_blocks: the same in the trace's
    blocks. tbt_s: mean of the longest tenth of its token intervals; 0 when it has one token. reason: why it was
    refused; empty when it was not. ttft_s, tbt_s and finished_s are infinite when there was no such token.
    wasted_prefill_s: of a request that was refused after its prefill.
    """

    id: str
    arrived_s: float
    tokens: int
    output_tokens: int
    blocks: int = 0
    cached_tokens: int = 0
    cached_blocks: int = 0
    queue_s: float = 0.0
    transfer_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = inf
    tbt_s: float = inf
    finished_s: float = inf
    wasted_prefill_s: float = 0.0
    reason: str = ""
    prefill: str = ""  # names of the instances
    decode: str = ""

    def is_effective(self, slo: Slo) -> bool:
        return not self.reason and self.ttft_s <= slo.ttft_s and self.tbt_s <= slo.tbt_s


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Mean load of each pool at one moment, as a share of what the SLO allows: 1 is full."""

    at_s: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Outcomes:
    """All records of one replay, in order of arrival, and how loaded the pools were in it.

    Means, percentiles and curves are of the requests that were served to their end.
    """

    records: Sequence[Record]
    loads: Sequence[LoadSample] = field(default_factory=list)

    @property
    def served(self) -> list[Record]:
        return [record for record in self.records if not record.reason and record.finished_s < inf]

    @property
    def refused(self) -> dict[str, int]:
        """How many were refused, by reason; the commonest first."""
        return dict(Counter(record.reason for record in self.records if record.reason).most_common())

    @property
    def refusals(self) -> int:
        return sum(1 for record in self.records if record.reason)

    @property
    def ttft_s(self) -> Floats:
        return _column(self.served, lambda record: record.ttft_s)

    @property
    def tbt_s(self) -> Floats:
        return _column(self.served, lambda record: record.tbt_s)

    @property
    def mean_ttft_s(self) -> float:
        """nan when nothing was served; so with all means and percentiles."""
        return _mean(self.ttft_s)

    @property
    def mean_tbt_s(self) -> float:
        return _mean(self.tbt_s)

    def ttft_percentile_s(self, percent: float) -> float:
        return _percentile(self.ttft_s, percent)

    def tbt_percentile_s(self, percent: float) -> float:
        return _percentile(self.tbt_s, percent)

    def effective(self, slo: Slo) -> int:
        """Requests that met both limits. One that was refused has met none."""
        return sum(1 for record in self.records if record.is_effective(slo))

    def effective_share(self, slo: Slo) -> float:
        """Of all that arrived."""
        return _ratio(self.effective(slo), len(self.records))

    def effective_per_second(self, slo: Slo) -> float:
        return _ratio(self.effective(slo), self.arrivals_s)

    @property
    def arrivals_s(self) -> float:
        """From the first arrival to the last."""
        arrived = [record.arrived_s for record in self.records]
        return max(arrived) - min(arrived) if arrived else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """Of the prompts' tokens, of requests that were prefilled."""
        found = self._prefilled
        return _ratio(sum(record.cached_tokens for record in found), sum(record.tokens for record in found))

    @property
    def block_hit_ratio(self) -> float:
        found = self._prefilled
        return _ratio(sum(record.cached_blocks for record in found), sum(record.blocks for record in found))

    @property
    def prefill_s_per_request(self) -> float:
        found = self._prefilled
        return _ratio(sum(record.prefill_s for record in found), len(found))

    @property
    def wasted_prefill_s(self) -> float:
        return sum(record.wasted_prefill_s for record in self.records)

    @property
    def _prefilled(self) -> list[Record]:
        return [record for record in self.records if record.prefill_s > 0]

    def summary(self, slo: Slo) -> dict[str, float | int | dict[str, int]]:
        """The figures by name, in seconds and shares of 1; nan where nothing was served."""
        return {
            "requests": len(self.records),
            "served": len(self.served),
            "refused": self.refused,
            "effective": self.effective(slo),
            "effective_share": self.effective_share(slo),
            "ttft_mean_s": self.mean_ttft_s,
            "ttft_p50_s": self.ttft_percentile_s(50),
            "ttft_p90_s": self.ttft_percentile_s(90),
            "ttft_p99_s": self.ttft_percentile_s(99),
            "tbt_mean_s": self.mean_tbt_s,
            "tbt_p50_s": self.tbt_percentile_s(50),
            "tbt_p90_s": self.tbt_percentile_s(90),
            "tbt_p99_s": self.tbt_percentile_s(99),
            "token_hit_ratio": self.token_hit_ratio,
            "block_hit_ratio": self.block_hit_ratio,
            "prefill_s_per_request": self.prefill_s_per_request,
            "wasted_prefill_s": self.wasted_prefill_s,
        }


def longest_mean_s(intervals_s: Floats) -> float:
    """Mean of the longest tenth, at least one, of a request's token intervals; 0 when there are none."""
    if not len(intervals_s):
        return 0.0
    count = max(1, int(len(intervals_s) * LONGEST_SHARE))
    return float(np.partition(intervals_s, len(intervals_s) - count)[-count:].mean())


def distribution(values: Floats) -> tuple[Floats, Floats]:
    """A cumulative distribution: values in order, and for each the share of all that are not larger."""
    return np.sort(values), np.arange(1, len(values) + 1) / max(1, len(values))


def _column(records: Sequence[Record], value: Callable[[Record], float]) -> Floats:
    return np.array([value(record) for record in records], dtype=np.float64)


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _percentile(values: Floats, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
