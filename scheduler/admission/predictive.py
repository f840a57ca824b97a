"""Refuses at arrival by the load that decode will have when the prefill is done."""

from typing import ClassVar

from scheduler.admission.admission import Prospect
from scheduler.requests import Reason


class PredictiveRejection:
    """By the future: who is being prefilled will have come to decode by then, and who decodes long will have gone."""

    name: ClassVar[str] = "predictive"

    def on_arrival(self, prospect: Prospect) -> Reason | None:
        if prospect.ttft_s > prospect.ttft_limit_s:
            return Reason.TTFT
        return Reason.TBT if prospect.future_tbt_s > prospect.tbt_limit_s else None

    def on_decode(self, tbt_s: float, tbt_limit_s: float) -> Reason | None:
        return Reason.TBT if tbt_s > tbt_limit_s else None
