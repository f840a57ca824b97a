"""Each pool refuses for itself: prefill at arrival, decode when the prefill is done and its work is wasted."""

from typing import ClassVar

from scheduler.admission.admission import Prospect
from scheduler.requests import Reason


class Baseline:
    """What a system does whose pools do not know of each other."""

    name: ClassVar[str] = "baseline"

    def on_arrival(self, prospect: Prospect) -> Reason | None:
        return Reason.TTFT if prospect.ttft_s > prospect.ttft_limit_s else None

    def on_decode(self, tbt_s: float, tbt_limit_s: float) -> Reason | None:
        return Reason.TBT if tbt_s > tbt_limit_s else None
