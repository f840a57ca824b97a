"""How many instances each model should have: the scaling advice, fed with what goes through the Conductor."""

from collections.abc import Iterable
from typing import Any

from scheduler.fleet import Fleet
from scheduler.requests import Reason
from scheduler.scaling import Advice, Meter, Scaling, ScalingSettings
from scheduler.tuning import Slo
from server.conductor.settings import ScalingLimits


class Advisors:
    """One for each model that instances serve; what is told of another is passed over."""

    def __init__(self, limits: ScalingLimits, slo: Slo) -> None:
        self._settings = ScalingSettings(
            min_prefill=limits.prefill_min,
            max_prefill=limits.prefill_max,
            min_decode=limits.decode_min,
            max_decode=limits.decode_max,
            prefill_utilisation=limits.prefill_utilisation,
            decode_utilisation=limits.decode_utilisation,
            hold_s=limits.hold,
        )
        self._slo = slo
        self._meters: dict[str, Meter] = {}
        self._scalings: dict[str, Scaling] = {}

    def asked(self, model: str, prefill_s: float) -> None:
        if model in self._meters:
            self._meters[model].asked(prefill_s)

    def refused(self, model: str, reason: Reason, prefill_s: float) -> None:
        if model in self._meters:
            self._meters[model].refused(reason, prefill_s)

    def began(self, model: str, ttft_s: float) -> None:
        if model in self._meters:
            self._meters[model].began(ttft_s)

    def stepped(self, model: str, step_s: float) -> None:
        """An instance measured a decode step: what all its sequences waited between two tokens."""
        if model in self._meters:
            self._meters[model].ended(step_s)

    def observe(self, fleet: Fleet, models: Iterable[str], now: float) -> None:
        """To be called each second. Models that nobody serves are forgotten."""
        present = set(models)
        for model in self._meters.keys() - present:
            del self._meters[model], self._scalings[model]
        for model in present:
            if model in self._meters:
                self._scalings[model].observe(self._meters[model].demand(fleet, now), now)
            else:
                self._meters[model] = Meter(model, self._slo.ttft_s, self._slo.tbt_s, now)
                self._scalings[model] = Scaling(self._settings)

    def advice(self, now: float) -> dict[str, Advice]:
        """By model."""
        return {model: scaling.advice(now) for model, scaling in sorted(self._scalings.items())}

    def rows(self, now: float) -> list[dict[str, Any]]:
        """What `GET /v1/scaling` says."""
        return [
            {
                "model": model,
                "prefill": advice.prefill,
                "decode": advice.decode,
                "reasons": advice.reasons,
                "switches": [{"instance": name, "role": role.value} for name, role in advice.switches],
            }
            for model, advice in self.advice(now).items()
        ]
