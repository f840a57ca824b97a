"""Sums over a replay's records: what counts as served, effective and hit, and the longest intervals."""

from math import inf, isnan

import numpy as np
import pytest

from scheduler.simulation.outcomes import Outcomes, Record, distribution, longest_mean_s
from scheduler.tuning import Slo

SLO = Slo(10.0, 0.1)


def served(ttft_s: float, tbt_s: float, **fields) -> Record:
    return Record(
        id="r", arrived_s=0.0, tokens=1000, output_tokens=10, ttft_s=ttft_s, tbt_s=tbt_s, finished_s=50.0, **fields
    )


def refused(reason: str, **fields) -> Record:
    return Record(id="x", arrived_s=5.0, tokens=1000, output_tokens=10, reason=reason, **fields)


def test_a_request_is_effective_only_within_both_limits():
    outcomes = Outcomes([served(10, 0.1), served(10.1, 0.05), served(1, 0.11), served(1, 0.0)])
    assert outcomes.effective(SLO) == 2
    assert outcomes.effective_share(SLO) == 0.5


def test_a_refused_request_counts_as_arrived_and_not_as_served():
    outcomes = Outcomes([served(1, 0.05), refused("ttft"), refused("tbt"), refused("tbt", wasted_prefill_s=2.5)])
    assert outcomes.refused == {"tbt": 2, "ttft": 1}
    assert outcomes.refusals == 3
    assert outcomes.effective_share(SLO) == 0.25
    assert outcomes.mean_ttft_s == 1
    assert outcomes.wasted_prefill_s == 2.5


def test_a_refused_request_is_not_effective_however_quick_its_prefill_was():
    assert not refused("tbt", ttft_s=0.1, tbt_s=0.0).is_effective(SLO)


def test_a_request_without_an_end_is_not_served():
    outcomes = Outcomes([Record(id="r", arrived_s=0, tokens=1, output_tokens=1)])
    assert outcomes.served == []
    assert isnan(outcomes.mean_ttft_s)
    assert isnan(outcomes.ttft_percentile_s(90))


def test_hit_ratios_are_of_those_that_were_prefilled():
    outcomes = Outcomes(
        [
            served(1, 0.05, prefill_s=2.0, blocks=2, cached_tokens=500, cached_blocks=1),
            served(1, 0.05, prefill_s=1.0, blocks=2),
            refused("ttft", blocks=100),
        ]
    )
    assert outcomes.token_hit_ratio == 0.25
    assert outcomes.block_hit_ratio == 0.25
    assert outcomes.prefill_s_per_request == 1.5


def test_nothing_at_all_has_ratios_of_zero():
    outcomes = Outcomes([])
    assert outcomes.effective_share(SLO) == outcomes.token_hit_ratio == outcomes.arrivals_s == 0
    assert outcomes.summary(SLO)["requests"] == 0


def test_effective_requests_a_second_are_over_the_time_of_arrivals():
    assert Outcomes([served(1, 0.05), refused("ttft")]).effective_per_second(SLO) == pytest.approx(1 / 5)


def test_percentiles_are_of_the_served():
    outcomes = Outcomes([served(value, value / 100) for value in range(1, 102)] + [refused("ttft")])
    assert outcomes.ttft_percentile_s(90) == pytest.approx(91)
    assert outcomes.tbt_percentile_s(50) == pytest.approx(0.51)


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [([], 0.0), ([3.0], 3.0), ([1.0] * 9 + [5.0], 5.0), ([1.0] * 18 + [5.0, 7.0], 6.0), ([2.0, 1.0, 4.0], 4.0)],
)
def test_tbt_is_the_mean_of_the_longest_tenth_and_at_least_of_one(intervals, expected):
    assert longest_mean_s(np.array(intervals)) == expected


def test_a_distribution_rises_to_one():
    values, shares = distribution(np.array([3.0, 1.0, 2.0, inf]))
    assert values.tolist() == [1, 2, 3, inf]
    assert shares.tolist() == [0.25, 0.5, 0.75, 1]
    assert distribution(np.array([]))[1].tolist() == []


def test_the_summary_has_the_figures_by_name():
    found = Outcomes([served(1, 0.05), refused("ttft")]).summary(SLO)
    assert found["effective"] == 1
    assert found["ttft_mean_s"] == 1
    assert found["refused"] == {"ttft": 1}
