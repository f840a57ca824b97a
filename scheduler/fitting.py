"""What prefill and decode cost on an instance, fitted to measurements: all at once, and one by one as they come in.

All errors are relative: a short prompt counts as much as a long one. No coefficient is ever negative, so predictions
grow with the tokens.
"""

from collections.abc import Sequence
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.costs import DecodeCost, PrefillCost

Floats = NDArray[np.float64]

ROUNDS: Final = 20  # of reweighting; both losses settle within ten on measurements with a tenth of outliers
TUKEY: Final = 4.685  # spreads from which an outlier counts nothing; 95 % as sharp as least squares on normal noise
MAD_TO_DEVIATION: Final = 1.4826  # of a normal distribution
LEAST_SPREAD: Final = 1e-3  # relative; below it measurements are as good as equal
LEAST_RANK: Final = 1e-3  # singular values below this share of the largest say nothing
PRODUCT_PER_SQUARE: Final = 2.0  # m new tokens look at m * m / 2 pairs among themselves, and at m * p cached ones

NOISE: Final = 0.04  # variance of one measurement, relative: a machine with other work is off by 20 %
LEVEL_DRIFT: Final = 0.0002  # variance that a machine's speed gains between two: about the last 15 tell how fast it is
FIRST_LEVEL: Final = 1.0  # the same variance at the beginning: another machine than the one that was measured
DRIFT: Final = 0.002  # share by which the covariance goes back to the first one, at each measurement
PULL: Final = 5e-5  # share by which the coefficients go back to the first ones' shape: many days of one length drift
PRIOR_DEVIATION: Final = 0.25  # relative, of the initial cost over all lengths
CLIP_SPREADS: Final = 3.0  # a measurement further from the prediction counts as this far
FIRST_SPREAD: Final = 0.2  # mean deviation, relative
SPREAD_GAIN: Final = 0.05
LARGEST_DEVIATION: Final = 2.0  # a single stall must not open the clip for all that follow
SHORTEST_S: Final = 1e-5  # no machine is faster
LEAST_LEVEL: Final = 1e-3  # a machine is at most so much faster than it was said to be
MOST_TOKENS: Final = 1 << 40  # more is no measurement, and squares must not overflow
PRIOR_TOKENS: Final = tuple(16 << step for step in range(14))  # 16 to 128 Ki
PRIOR_BATCHES: Final = (1, 4, 16, 64)
PRIOR_CONTEXTS: Final = (128, 1024, 8192)  # of one sequence


def fit_prefill(samples: Sequence[tuple[float, float, float]]) -> PrefillCost:
    """The cost that explains measurements (tokens, cached, seconds) best; outliers are left out.

    Without a cached prefix in any of them, attention to cached tokens is taken as twice that of new ones to each other.

    Raises:
        ValueError: they cannot tell (too few, or too much alike), or one is no measurement at all.
    """
    measured = _measured(samples)
    tokens, cached, seconds = measured.T
    if np.any(cached < 0) or np.any(tokens <= cached):
        raise ValueError("a prefill has at least one token that is not cached")
    rows = _prefill_rows(tokens, cached)
    if np.any(cached):
        return PrefillCost(*_fit(rows, seconds))
    base, per_token, per_square = _fit(rows[:, :3], seconds)
    return PrefillCost(base, per_token, per_square, PRODUCT_PER_SQUARE * per_square)


def fit_decode(samples: Sequence[tuple[float, float, float]]) -> DecodeCost:
    """The cost that explains measured steps (batch, context, seconds) best; context is of the whole batch, in tokens.

    Raises:
        ValueError: they cannot tell (too few, or too much alike: one batch, or one context for each sequence).
    """
    measured = _measured(samples)
    batch, context, seconds = measured.T
    if np.any(batch < 1) or np.any(context < 0):
        raise ValueError("a decode step has at least one sequence")
    return DecodeCost(*_fit(_decode_rows(batch, context), seconds))


def relative_errors(predicted: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(median, 90th percentile) of how far predictions are from measurements, as shares of the measurements."""
    measured = np.asarray(seconds, dtype=np.float64)
    errors = np.abs(np.asarray(predicted, dtype=np.float64) - measured) / measured
    return float(np.median(errors)), float(np.quantile(errors, 0.9))


class Refitting:
    """A prefill cost that follows what the instance measures, however long it runs, in constant memory."""

    def __init__(self, initial: PrefillCost) -> None:
        tokens = np.array([length for length in PRIOR_TOKENS for _ in range(2)], dtype=np.float64)
        cached = tokens * np.tile([0.0, 0.75], len(PRIOR_TOKENS))
        self._following = _Following(_prefill_rows(tokens, cached), initial.coefficients)
        self._cost: PrefillCost | None = initial

    def seen(self, tokens: float, cached: float, seconds: float) -> None:
        """One prefill was measured; what cannot be one is ignored."""
        if 0 <= cached < tokens <= MOST_TOKENS and 0 < seconds < np.inf:
            self._following.seen(_prefill_rows(np.array([tokens]), np.array([cached]))[0], seconds)
            self._cost = None

    @property
    def cost(self) -> PrefillCost:
        if self._cost is None:
            self._cost = PrefillCost(*self._following.coefficients())
        return self._cost


class RefittingDecode:
    """The same for decode steps."""

    def __init__(self, initial: DecodeCost) -> None:
        batch, context = np.array(list(product(PRIOR_BATCHES, PRIOR_CONTEXTS)), dtype=np.float64).T
        coefficients = (initial.base_s, initial.per_sequence_s, initial.per_token_s)
        self._following = _Following(_decode_rows(batch, batch * context), coefficients)
        self._cost: DecodeCost | None = initial

    def seen(self, batch: float, context: float, seconds: float) -> None:
        """One step was measured; what cannot be one is ignored."""
        if 1 <= batch <= MOST_TOKENS and 0 <= context <= MOST_TOKENS and 0 < seconds < np.inf:
            self._following.seen(_decode_rows(np.array([batch]), np.array([context]))[0], seconds)
            self._cost = None

    @property
    def cost(self) -> DecodeCost:
        if self._cost is None:
            self._cost = DecodeCost(*self._following.coefficients())
        return self._cost


class _Following:
    """A Kalman filter over the coefficients, on relative errors. Before each measurement it grants that

    - the whole machine may have become slower or faster: variance along the coefficients themselves, so that one
      length tells of all others;
    - each length may have changed by itself: the covariance drifts back to that of the beginning, and never beyond it,
      so that a thousand prompts of one length leave what is known of the others nearly as it was.
    """

    def __init__(self, prior_rows: Floats, coefficients: Sequence[float]) -> None:
        initial = np.array(coefficients, dtype=np.float64)
        initial[0] = max(initial[0], SHORTEST_S)
        rows = prior_rows / (prior_rows @ initial)[:, None]
        self._scale = 1.0 / np.sqrt(np.mean(rows * rows, axis=0))  # the coefficients are ten orders of magnitude apart
        self._initial = self._scaled = initial / self._scale
        rows = rows * self._scale
        self._mean_row = rows.mean(axis=0)
        self._prior: Floats = np.linalg.inv(rows.T @ rows) * (len(rows) / len(initial) * PRIOR_DEVIATION**2)
        self._covariance = self._prior + FIRST_LEVEL * np.outer(self._scaled, self._scaled)
        self._spread = FIRST_SPREAD

    def seen(self, row: Floats, seconds: float) -> None:
        row = row * self._scale
        predicted = max(float(row @ self._scaled), LEAST_LEVEL * float(row @ self._initial))
        deviation = seconds / predicted - 1.0
        limit = CLIP_SPREADS * self._spread
        self._spread += SPREAD_GAIN * (min(abs(deviation), LARGEST_DEVIATION) - self._spread)
        level = max(float(self._mean_row @ self._scaled), LEAST_LEVEL)
        covariance = self._covariance + DRIFT * (level * level * self._prior - self._covariance)
        covariance = covariance + LEVEL_DRIFT * np.outer(self._scaled, self._scaled)
        self._scaled = self._scaled + PULL * (level * self._initial - self._scaled)
        unit = row / predicted
        towards = covariance @ unit
        gain = towards / (float(unit @ towards) + NOISE)
        self._covariance = covariance - np.outer(gain, towards)
        self._scaled = self._not_negative(self._scaled + gain * min(max(deviation, -limit), limit))

    def coefficients(self) -> tuple[float, ...]:
        return tuple((self._scaled * self._scale).tolist())

    def _not_negative(self, scaled: Floats) -> Floats:
        """What is negative is taken for 0, and the others as they are likely given that."""
        for _ in range(len(scaled)):
            index = int(np.argmin(scaled))
            if scaled[index] >= 0:
                return scaled
            scaled = scaled - self._covariance[:, index] * (scaled[index] / self._covariance[index, index])
            scaled[index] = 0.0
        return np.maximum(scaled, 0.0)


def _measured(samples: Sequence[tuple[float, float, float]]) -> Floats:
    measured = np.asarray(samples, dtype=np.float64).reshape(-1, 3)
    if not np.all(np.isfinite(measured)) or np.any(measured[:, 2] <= 0):
        raise ValueError("a measurement is finite and takes more than no time")
    return measured


def _prefill_rows(tokens: Floats, cached: Floats) -> Floats:
    """`[samples, 4]`: what each coefficient of a PrefillCost is multiplied with."""
    computed = tokens - cached
    return np.stack([np.ones_like(computed), computed, computed * computed, computed * cached], axis=1)


def _decode_rows(batch: Floats, context: Floats) -> Floats:
    """`[samples, 3]`: what each coefficient of a DecodeCost is multiplied with."""
    return np.stack([np.ones_like(batch), batch, context], axis=1)


def _fit(rows: Floats, seconds: Floats) -> tuple[float, ...]:
    """Non-negative coefficients of least relative error: first the median's fit, then all but outliers of it."""
    _check_that_they_tell(rows, seconds)
    scale, weights = seconds, np.ones(len(rows))
    coefficients: tuple[float, ...] = ()
    for turn in range(2 * ROUNDS):
        units = rows / scale[:, None]
        known = units.T @ (units * weights[:, None])
        coefficients = _not_negative(known, units.T @ (weights * seconds / scale))
        # Weighed by what is predicted, not by what was measured: else the slow half of the noise would count less.
        scale = np.maximum(rows @ coefficients, SHORTEST_S)
        deviations = np.abs(seconds / scale - 1.0)
        if turn < ROUNDS:
            weights = 1.0 / np.maximum(deviations, LEAST_SPREAD)
        else:
            spread = max(float(np.median(deviations)) * MAD_TO_DEVIATION, LEAST_SPREAD)
            weights = np.maximum(1.0 - (deviations / (TUKEY * spread)) ** 2, 0.0) ** 2
    return coefficients


def _check_that_they_tell(rows: Floats, seconds: Floats) -> None:
    wanted = rows.shape[1]
    if len(rows) < wanted:
        raise ValueError(f"{len(rows)} measurements cannot tell {wanted} coefficients")
    units = rows / seconds[:, None]
    values = np.linalg.svd(units / np.linalg.norm(units, axis=0), compute_uv=False)
    if values[-1] < LEAST_RANK * values[0]:
        raise ValueError("the measurements are too much alike to tell what costs what")


def _not_negative(known: Floats, told: Floats) -> tuple[float, ...]:
    """The x >= 0 that makes x @ known @ x / 2 - told @ x least: the best of those with some 0 and the rest free."""
    scale = 1.0 / np.sqrt(np.maximum(np.diagonal(known), np.finfo(np.float64).tiny))
    known, told = known * np.outer(scale, scale), told * scale
    best, least = np.zeros(len(told)), 0.0
    for chosen in product((False, True), repeat=len(told)):
        free = np.flatnonzero(chosen)
        if not len(free):
            continue
        found = np.linalg.lstsq(known[np.ix_(free, free)], told[free], rcond=None)[0]
        value = -0.5 * float(told[free] @ found)
        if value < least and np.all(found >= 0):
            best, least = np.zeros(len(told)), value
            best[free] = found
    return tuple(float(each) for each in best * scale)
