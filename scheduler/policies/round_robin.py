"""One instance after the other."""

from typing import ClassVar

from scheduler.outlook import Choice, Outlook
from scheduler.policies.policy import Draw
from scheduler.tuning import Tuning


class RoundRobin:
    """By name, the one after the last: also when instances come and go."""

    name: ClassVar[str] = "round_robin"

    def __init__(self, draw: Draw, tuning: Tuning) -> None:
        self._last = ""

    def choose(self, outlook: Outlook) -> Choice:
        names = outlook.pool.names
        after = [name for name in names if name > self._last]
        self._last = min(after or names)
        return outlook.local(names.index(self._last))
