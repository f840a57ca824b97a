"""Medians of interleaved runs: the product and its floor take turns, so both meet the same noise."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of output. `ratio` is floor / value for times and value / floor for rates: 1 is the floor itself.

    `target` is what it should reach, as a ratio if `is_ratio`, else as a value not to exceed.
    """

    name: str
    value: float
    unit: str
    floor: float | None
    ratio: float | None
    p99: float | None
    target: float
    is_ratio: bool
    note: str

    @property
    def is_reached(self) -> bool:
        if self.is_ratio:
            return self.ratio is not None and self.ratio >= self.target
        return self.value <= self.target

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "is_ratio"} | {
            "reached": self.is_reached
        }


@contextmanager
def without_collector() -> Iterator[None]:
    """No garbage collection in the middle of a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def span_us(work: Callable[[], object]) -> float:
    """Microseconds of one call."""
    began = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - began) / 1000


def spans_us(work: Callable[[], object], runs: int) -> list[float]:
    """Microseconds of each of `runs` calls."""
    with without_collector():
        return [span_us(work) for _ in range(runs)]


def take_turns(
    product: Callable[[], object], floor: Callable[[], object], rounds: int
) -> Iterator[tuple[float, float]]:
    """(product, floor) microseconds, pair by pair, which goes first changing from pair to pair."""
    for number in range(rounds):
        first, second = (product, floor) if number % 2 else (floor, product)
        one, two = span_us(first), span_us(second)
        yield (one, two) if number % 2 else (two, one)


def against_floor(
    name: str,
    product: Callable[[], object],
    floor: Callable[[], object],
    *,
    target: float,
    note: str,
    rounds: int = 300,
) -> Figure:
    """Median time of `product` beside that of `floor`; the ratio is the median of the pairs'."""
    with without_collector():
        pairs = list(take_turns(product, floor, rounds))
    spans = sorted(span for span, _ in pairs)
    ratio = statistics.median(floor_span / span for span, floor_span in pairs)
    floor_us = statistics.median(floor_span for _, floor_span in pairs)
    return Figure(name, _p(spans, 50), "us", floor_us, ratio, _p(spans, 99), target, is_ratio=True, note=note)


def latency(
    name: str,
    product: Callable[[], object],
    floor: Callable[[], object] | None,
    *,
    most_us: float,
    note: str,
    runs: int = 4000,
) -> Figure:
    """Median and 99th percentile of single calls; the bound is on the median."""
    spans = sorted(spans_us(product, runs))
    p50 = _p(spans, 50)
    floor_us = _p(sorted(spans_us(floor, runs)), 50) if floor is not None else None
    ratio = floor_us / p50 if floor_us is not None else None
    return Figure(name, p50, "us", floor_us, ratio, _p(spans, 99), most_us, is_ratio=False, note=note)


def _p(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]
