"""The instance whose queue ends first."""

from typing import ClassVar

from scheduler.outlook import Choice, Outlook
from scheduler.policies.policy import Draw, least
from scheduler.tuning import Tuning


class LeastLoaded:
    """By predicted seconds of waiting, not by the number of requests: prompts differ by a factor of a thousand."""

    name: ClassVar[str] = "least_loaded"

    def __init__(self, draw: Draw, tuning: Tuning) -> None:
        self._draw = draw

    def choose(self, outlook: Outlook) -> Choice:
        return outlook.local(least(outlook.queue_s, self._draw))
