"""Costs are found again in noisy measurements, at once and one by one; what cannot be told is refused."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.costs import DecodeCost, PrefillCost
from scheduler.fitting import Refitting, RefittingDecode, fit_decode, fit_prefill, relative_errors

NOISE = 0.2
PREFILL = PrefillCost(0.02, 8e-5, 4e-9, 8e-9)
DECODE = DecodeCost(0.012, 4e-4, 3e-8)
LENGTHS = (128, 1024, 8192, 65536)
PLACES = [(length, cached) for length in LENGTHS for cached in (0, length * 3 // 4)]

Sample = tuple[float, float, float]


def noisy(draw: np.random.Generator, seconds: float) -> float:
    return seconds * max(0.1, 1 + NOISE * draw.normal())


def prefills(draw: np.random.Generator, count: int, cost: PrefillCost = PREFILL) -> list[Sample]:
    made = []
    for _ in range(count):
        tokens = int(2 ** draw.uniform(4, 17))
        cached = int(tokens * draw.choice([0, 0.5, 0.75, 0.9]))
        made.append((tokens, cached, noisy(draw, cost.seconds(tokens, cached))))
    return made


def steps(draw: np.random.Generator, count: int, cost: DecodeCost = DECODE) -> list[Sample]:
    made = []
    for _ in range(count):
        batch = int(2 ** draw.uniform(0, 7))
        context = batch * int(2 ** draw.uniform(6, 15))
        made.append((batch, context, noisy(draw, cost.seconds(batch, context))))
    return made


def largest_error(cost: PrefillCost, wanted: Callable[[float, float], float]) -> float:
    """Relative, over short and long prompts with and without a cached part."""
    return max(abs(cost.seconds(*place) / wanted(*place) - 1) for place in PLACES)


def mean_error(cost: PrefillCost, wanted: Callable[[float, float], float]) -> float:
    return float(np.mean([abs(cost.seconds(*place) / wanted(*place) - 1) for place in PLACES]))


class TestAllAtOnce:
    @pytest.mark.parametrize("seed", range(5))
    def test_prefill_is_known_within_five_percent_under_twenty_percent_noise(self, seed: int) -> None:
        found = fit_prefill(prefills(np.random.default_rng(seed), 10_000))
        assert found.coefficients == pytest.approx(PREFILL.coefficients, rel=0.05)

    @pytest.mark.parametrize("seed", range(5))
    def test_decode_is_known_within_five_percent_under_twenty_percent_noise(self, seed: int) -> None:
        found = fit_decode(steps(np.random.default_rng(seed), 10_000))
        expected = (DECODE.base_s, DECODE.per_sequence_s, DECODE.per_token_s)
        assert (found.base_s, found.per_sequence_s, found.per_token_s) == pytest.approx(expected, rel=0.05)

    def test_a_tenth_of_stalled_measurements_changes_nothing(self) -> None:
        draw = np.random.default_rng(7)
        samples = [
            (tokens, cached, seconds * (30 if number % 10 == 0 else 1))
            for number, (tokens, cached, seconds) in enumerate(prefills(draw, 2000))
        ]
        assert largest_error(fit_prefill(samples), PREFILL.seconds) < 0.05

    def test_exact_measurements_give_the_exact_cost(self) -> None:
        samples = [(length, cached, PREFILL.seconds(length, cached)) for length, cached in PLACES]
        assert fit_prefill(samples).coefficients == pytest.approx(PREFILL.coefficients, rel=1e-6)

    def test_a_cost_without_attention_gets_none(self) -> None:
        linear = PrefillCost(0.01, 1e-4, 0.0, 0.0)
        found = fit_prefill(prefills(np.random.default_rng(3), 500, linear))
        assert min(found.coefficients) >= 0
        assert largest_error(found, linear.seconds) < 0.08

    def test_short_prompts_count_as_much_as_long_ones(self) -> None:
        """A kink that no polynomial follows: plain least squares would give short prompts a senseless cost."""
        samples = [(length, 0.0, max(0.05, PREFILL.seconds(length, 0))) for length in (16, 64, 256, 4096, 16384, 65536)]
        found = fit_prefill(samples)
        assert found.seconds(16, 0) == pytest.approx(0.05, rel=0.3)
        assert found.seconds(65536, 0) == pytest.approx(PREFILL.seconds(65536, 0), rel=0.3)

    def test_where_nothing_was_cached_attention_to_it_is_taken_from_the_rest(self) -> None:
        found = fit_prefill([(length, 0, PREFILL.seconds(length, 0)) for length in LENGTHS])
        assert found.per_product_s == pytest.approx(2 * PREFILL.per_square_s, rel=1e-6)

    @pytest.mark.parametrize(
        "samples",
        [
            [],
            [(100, 0, 0.1), (200, 0, 0.2)],
            [(100, 0, 0.1)] * 50,
            [(100 + number % 3, 0, 0.1) for number in range(50)],
            [(100, 0, 0.1), (200, 0, 0.2)] * 25,
            [(length, length // 2, 0.001 * length) for length in (100, 1000, 10_000, 100_000)],
        ],
        ids=["none", "two", "one length", "nearly one length", "two lengths", "always half cached"],
    )
    def test_prefills_that_cannot_tell_are_refused(self, samples: list[Sample]) -> None:
        with pytest.raises(ValueError):
            fit_prefill(samples)

    def test_steps_of_one_length_each_are_refused(self) -> None:
        with pytest.raises(ValueError):
            fit_decode([(batch, batch * 512, DECODE.seconds(batch, batch * 512)) for batch in (1, 2, 4, 8, 16)])

    @pytest.mark.parametrize("wrong", [(100, 100, 0.1), (100, -1, 0.1), (100, 0, 0.0), (100, 0, float("nan"))])
    def test_what_is_no_measurement_is_refused(self, wrong: Sample) -> None:
        with pytest.raises(ValueError):
            fit_prefill([*prefills(np.random.default_rng(1), 100), wrong])

    @given(
        st.lists(st.tuples(st.integers(2, 10**6), st.floats(0, 0.99), st.floats(1e-6, 1e4)), min_size=4, max_size=40)
    )
    @settings(max_examples=100, deadline=None)
    def test_whatever_was_measured_costs_are_not_negative_and_grow_with_tokens(
        self, drawn: list[tuple[int, float, float]]
    ) -> None:
        samples = [(tokens, int(tokens * share), seconds) for tokens, share, seconds in drawn]
        try:
            cost = fit_prefill(samples)
        except ValueError:
            return
        check_sane(cost)

    def test_errors_are_told_as_median_and_ninetieth_percentile(self) -> None:
        median, high = relative_errors([1.0] * 9 + [2.0], [1.0] * 10)
        assert median == 0.0
        assert 0.0 < high < 1.0


class TestOneByOne:
    def test_the_initial_cost_is_what_there_is_before_any_measurement(self) -> None:
        assert Refitting(PREFILL).cost == PREFILL
        assert RefittingDecode(DECODE).cost == DECODE

    @pytest.mark.parametrize("seed", range(5))
    def test_a_machine_that_gets_twice_as_slow_is_followed_within_fifty_measurements(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        refitting = Refitting(PREFILL)
        feed(refitting, prefills(draw, 300))
        assert mean_error(refitting.cost, PREFILL.seconds) < 0.12
        slow = PrefillCost(*(2 * each for each in PREFILL.coefficients))
        feed(refitting, prefills(draw, 50, slow))
        assert mean_error(refitting.cost, slow.seconds) < 0.15

    def test_decode_steps_are_followed_too(self) -> None:
        draw = np.random.default_rng(2)
        refitting = RefittingDecode(DECODE)
        slow = DecodeCost(0.024, 8e-4, 6e-8)
        for batch, context, seconds in [*steps(draw, 200), *steps(draw, 60, slow)]:
            refitting.seen(batch, context, seconds)
        for batch, context in ((1, 1000), (16, 16_000), (64, 640_000)):
            assert refitting.cost.seconds(batch, context) == pytest.approx(slow.seconds(batch, context), rel=0.2)

    def test_one_length_tells_of_the_others_where_the_whole_machine_is_slower(self) -> None:
        refitting = Refitting(PREFILL)
        for _ in range(100):
            refitting.seen(2000, 0, 2 * PREFILL.seconds(2000, 0))
        assert refitting.cost.seconds(2000, 0) == pytest.approx(2 * PREFILL.seconds(2000, 0), rel=0.05)
        assert refitting.cost.seconds(65536, 0) == pytest.approx(2 * PREFILL.seconds(65536, 0), rel=0.5)

    @pytest.mark.parametrize("seed", range(5))
    def test_a_burst_of_one_length_leaves_what_was_learned_of_others(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        refitting = Refitting(PrefillCost(0.05, 4e-5, 8e-9, 8e-9))
        feed(refitting, prefills(draw, 300))
        before = refitting.cost
        feed(refitting, [(1000, 0, noisy(draw, PREFILL.seconds(1000, 0))) for _ in range(2000)])
        assert largest_error(refitting.cost, before.seconds) < 0.25
        assert mean_error(refitting.cost, PREFILL.seconds) < 0.12

    def test_days_of_one_length_do_not_drift_away(self) -> None:
        draw = np.random.default_rng(6)
        refitting = Refitting(PREFILL)
        feed(refitting, [(1000, 0, noisy(draw, PREFILL.seconds(1000, 0))) for _ in range(20_000)])
        assert largest_error(refitting.cost, PREFILL.seconds) < 0.4

    def test_measurements_that_contradict_each_other_leave_a_cost_between_them(self) -> None:
        """Every fourth is 50 times as slow: no cost explains that, and none may vanish over it."""
        draw = np.random.default_rng(8)
        refitting = Refitting(PREFILL)
        for number, (tokens, cached, seconds) in enumerate(prefills(draw, 4000)):
            refitting.seen(tokens, cached, seconds * (50 if number % 4 == 0 else 1))
        for place in PLACES:
            assert 0.5 < refitting.cost.seconds(*place) / PREFILL.seconds(*place) < 60

    def test_a_stall_is_clipped(self) -> None:
        draw = np.random.default_rng(4)
        refitting = Refitting(PREFILL)
        feed(refitting, prefills(draw, 300))
        before = refitting.cost
        refitting.seen(1000, 0, 1000 * PREFILL.seconds(1000, 0))
        assert largest_error(refitting.cost, before.seconds) < 0.1

    def test_a_first_guess_that_is_fifty_times_too_fast_is_left_behind(self) -> None:
        draw = np.random.default_rng(5)
        refitting = Refitting(PrefillCost(*(each / 50 for each in PREFILL.coefficients)))
        feed(refitting, prefills(draw, 200))
        assert mean_error(refitting.cost, PREFILL.seconds) < 0.15

    def test_what_is_no_measurement_is_ignored(self) -> None:
        refitting = Refitting(PREFILL)
        for wrong in (
            (0, 0, 1.0),
            (1e300, 0, 1.0),
            (100, 100, 1.0),
            (100, 0, 0.0),
            (100, 0, float("nan")),
            (100, -1, 1.0),
        ):
            refitting.seen(*wrong)
        assert refitting.cost == PREFILL

    @given(
        st.sampled_from([PREFILL, PrefillCost(0.0, 1e-4, 0.0, 0.0), PrefillCost(0.0, 0.0, 0.0, 0.0)]),
        st.lists(st.tuples(st.integers(2, 10**6), st.floats(0, 0.99), st.floats(1e-6, 1e4)), max_size=60),
    )
    @settings(max_examples=100, deadline=None)
    def test_whatever_is_measured_costs_stay_not_negative_and_grow_with_tokens(
        self, initial: PrefillCost, drawn: list[tuple[int, float, float]]
    ) -> None:
        refitting = Refitting(initial)
        for tokens, share, seconds in drawn:
            refitting.seen(tokens, int(tokens * share), seconds)
        check_sane(refitting.cost)


def feed(refitting: Refitting, samples: list[Sample]) -> None:
    for sample in samples:
        refitting.seen(*sample)


def check_sane(cost: PrefillCost) -> None:
    assert all(np.isfinite(cost.coefficients))
    assert min(cost.coefficients) >= 0
    predictions = [cost.seconds(tokens, 0) for tokens in (1, 100, 10_000, 1_000_000)]
    assert predictions == sorted(predictions)
