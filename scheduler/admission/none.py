"""Admits everything: clients wait as long as it takes."""

from typing import ClassVar

from scheduler.admission.admission import Prospect
from scheduler.requests import Reason


class AdmitAll:
    """Refuses nothing. A request's own deadline counts all the same, for whom this class is not asked."""

    name: ClassVar[str] = "none"

    def on_arrival(self, prospect: Prospect) -> Reason | None:
        return None

    def on_decode(self, tbt_s: float, tbt_limit_s: float) -> Reason | None:
        return None
