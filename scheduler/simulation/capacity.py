"""How many requests a system serves within its limits: at a trace's own speed, and at the highest that it can bear."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from scheduler.simulation.coupled import (
    BASELINES,
    VLLM,
    VLLM_PREFIX,
    CoupledSettings,
    Spread,
    cache_aware,
    least_loaded,
    replay_coupled,
    round_robin,
)
from scheduler.simulation.hardware import LLAMA3_70B, NODE_8XA800, Efficiency, Hardware, hardware
from scheduler.simulation.outcomes import Outcomes
from scheduler.simulation.traces import TraceRequest, faster
from scheduler.tuning import Slo

TTFT_S: Final = 30.0  # §5.2 of the Mooncake paper (FAST '25), and the three limits of the time between tokens
TBT_S: Final = (0.1, 0.2, 0.3)
PUBLISHED_GAINS: Final = {  # over vLLM, at these limits: figure 1, and figures 6 and 7
    "conversation": (4.98, 1.57, 0.59),
    "tool&agent": (0.64, 0.42, 0.22),
    "synthetic": (0.62, 0.40, 0.28),
}
ENOUGH: Final = 0.9  # of the requests within both limits, that a speed counts as borne
SLOWEST, FASTEST = 1 / 16, 16.0  # speeds between which is searched
PRECISION: Final = 1.05  # of the search

System = Callable[[Sequence[TraceRequest]], Outcomes]


@dataclass(frozen=True, slots=True)
class Capacity:
    """One system under one limit. `effective` requests of the trace met it at `speed`.

    highest_speed: of replay at which `ENOUGH` of the requests still meet it, within 5 %; 0 when not even the slowest
    does. per_s: requests a second that arrive at that speed.
    """

    system: str
    slo: Slo
    speed: float
    effective: int
    share: float
    highest_speed: float
    per_s: float


HARDWARES: Final = {  # what the figures depend on: the same node, with other shares of its peaks
    "MFU 0.55": hardware(LLAMA3_70B, NODE_8XA800, Efficiency(mfu=0.55)),
    "MFU 0.75": hardware(LLAMA3_70B, NODE_8XA800, Efficiency(mfu=0.75)),
    "step 10 ms": hardware(LLAMA3_70B, NODE_8XA800, Efficiency(step_s=0.010)),
    "step 30 ms": hardware(LLAMA3_70B, NODE_8XA800, Efficiency(step_s=0.030)),
}
BUDGETS: Final = (256, 1024, 2048)  # tokens a step, beside the default


def coupled_systems(node: Hardware, instances: int = 16) -> dict[str, System]:
    """The published baselines by name, each on all instances, requests to the least loaded."""
    return {name: _coupled(node, settings, instances) for name, settings in BASELINES.items()}


def more_coupled_systems(node: Hardware, instances: int = 16) -> dict[str, System]:
    """The baselines with other balancing and other budgets of tokens a step: what a comparison depends on."""
    budgets = {
        f"vllm-chunked, {tokens}": _coupled(node, CoupledSettings(is_chunked=True, step_tokens=tokens), instances)
        for tokens in BUDGETS
    }
    return {
        "vllm, round robin": _coupled(node, VLLM, instances, round_robin),
        "vllm-prefix, cache-aware": _coupled(node, VLLM_PREFIX, instances, cache_aware),
        **budgets,
    }


def capacities(
    requests: Sequence[TraceRequest],
    systems: Mapping[str, System],
    *,
    speed: float = 1.0,
    sought: Sequence[TraceRequest] = (),
    told: Callable[[str, float], None] = lambda system, speed: None,
) -> list[Capacity]:
    """Each system under each limit: `requests` at `speed`, and the highest speed of `sought` (a part of them, to be
    quicker; nothing: no search, and 0). `told` hears of each replay before it begins."""
    found = []
    for name, system in systems.items():
        told(name, speed)
        outcomes = system(faster(requests, speed))
        bearing = _Bearing(name, system, sought, told)
        for tbt_s in TBT_S:
            slo = Slo(TTFT_S, tbt_s)
            highest = bearing.highest_speed(slo) if sought else 0.0
            per_s = highest * len(sought) / sought[-1].arrived_s if sought and sought[-1].arrived_s else 0.0
            effective = outcomes.effective(slo)
            found.append(Capacity(name, slo, speed, effective, effective / len(requests), highest, per_s))
    return found


def gain(mine: float, other: float) -> float:
    """0.5 is half as much more; infinite over nothing."""
    return mine / other - 1 if other else float("inf")


def _coupled(node: Hardware, settings: CoupledSettings, instances: int, spread: Spread = least_loaded) -> System:
    return partial(replay_coupled, hardware=node, settings=settings, instances=instances, spread=spread)


class _Bearing:
    """Replays of one system at several speeds, each once, whatever the limit that is asked about."""

    def __init__(
        self, name: str, system: System, requests: Sequence[TraceRequest], told: Callable[[str, float], None]
    ) -> None:
        self._name = name
        self._system = system
        self._requests = requests
        self._told = told
        self._outcomes: dict[float, Outcomes] = {}

    def highest_speed(self, slo: Slo) -> float:
        """By halving between the slowest and the fastest, on the scale of ratios; all limits look at equal speeds."""
        if not self._bears(SLOWEST, slo):
            return 0.0
        low, high = SLOWEST, FASTEST
        while high / low > PRECISION:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._bears(middle, slo) else (low, middle)
        return low

    def _bears(self, speed: float, slo: Slo) -> bool:
        if speed not in self._outcomes:
            self._told(self._name, speed)
            self._outcomes[speed] = self._system(faster(self._requests, speed))
        return self._outcomes[speed].effective_share(slo) >= ENOUGH
