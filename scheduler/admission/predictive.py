"""Refuses at arrival by the load that decode will have: with all who are still being prefilled for it.

Who decodes now counts as well, though some will have ended when the prefill is done: on a busy fleet others will have
come by then. So a place at decode is kept for whoever was admitted, and no prefill is wasted. The Mooncake paper
assumes one decode time for all and lets go who is older; replayed on the conversation trace, that admitted more at
first, wasted as much as the baseline and refused more in the end (docs/figures.md).
"""

from typing import ClassVar

from scheduler.admission.admission import Prospect
from scheduler.requests import Reason


class PredictiveRejection:
    """By the future: nothing is computed for a request that decode would refuse then."""

    name: ClassVar[str] = "predictive"

    def on_arrival(self, prospect: Prospect) -> Reason | None:
        if prospect.ttft_s > prospect.ttft_limit_s:
            return Reason.TTFT
        return Reason.TBT if prospect.future_tbt_s > prospect.tbt_limit_s else None

    def on_decode(self, tbt_s: float, tbt_limit_s: float) -> Reason | None:
        return Reason.TBT if tbt_s > tbt_limit_s else None
