"""Refuses at arrival by the load that both instances have then.

The decode instance's load then is not what it will be when the prefill is done: what is being prefilled is not in it
yet. So admission swings: an idle one admits too much, and a full one refuses what would have found it empty.
"""

from typing import ClassVar

from scheduler.admission.admission import Prospect
from scheduler.requests import Reason


class EarlyRejection:
    """By the present: nothing is computed for a request that decode would refuse now."""

    name: ClassVar[str] = "early"

    def on_arrival(self, prospect: Prospect) -> Reason | None:
        if prospect.ttft_s > prospect.ttft_limit_s:
            return Reason.TTFT
        return Reason.TBT if prospect.present_tbt_s > prospect.tbt_limit_s else None

    def on_decode(self, tbt_s: float, tbt_limit_s: float) -> Reason | None:
        return Reason.TBT if tbt_s > tbt_limit_s else None
