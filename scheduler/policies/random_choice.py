"""Any instance, whatever it has to do: the floor that others are measured against."""

from typing import ClassVar

from scheduler.outlook import Choice, Outlook
from scheduler.policies.policy import Draw
from scheduler.tuning import Tuning


class RandomChoice:
    """Uniform; prefixes are used where the request happens to land."""

    name: ClassVar[str] = "random"

    def __init__(self, draw: Draw, tuning: Tuning) -> None:
        self._draw = draw

    def choose(self, outlook: Outlook) -> Choice:
        return outlook.local(int(self._draw() * len(outlook)))
