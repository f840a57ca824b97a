"""Refuses at arrival by the load that decode will have when the prefill is done."""

from typing import ClassVar

from scheduler.admission.admission import Prospect
from scheduler.decode_pool import DecodePool
from scheduler.requests import Reason


class PredictiveRejection:
    """By the future: who is being prefilled will have come to decode by then, and who decodes long will have gone."""

    name: ClassVar[str] = "predictive"

    def on_arrival(self, prospect: Prospect, pool: DecodePool) -> Reason | None:
        if prospect.ttft_s > prospect.ttft_limit_s:
            return Reason.TTFT
        tbt_s = pool.tbt_s_at(prospect.first_token_s, prospect.now)
        return Reason.TBT if tbt_s > prospect.tbt_limit_s else None

    def on_decode(self, tbt_s: float, tbt_limit_s: float) -> Reason | None:
        return Reason.TBT if tbt_s > tbt_limit_s else None
