"""The instance where the first token comes first with what is there: local caches count, and so does the queue."""

from typing import ClassVar

from scheduler.outlook import Choice, Outlook
from scheduler.policies.policy import Draw, least
from scheduler.tuning import Tuning


class PrefixAffinity:
    """Cache-aware within each host: nothing moves between nodes. Bare affinity without the queue would send all that
    share a system prompt to one instance."""

    name: ClassVar[str] = "prefix_affinity"

    def __init__(self, draw: Draw, tuning: Tuning) -> None:
        self._draw = draw
        self._weight = tuning.work_weight

    def choose(self, outlook: Outlook) -> Choice:
        return outlook.local(least(outlook.local_cost_s(self._weight), self._draw))
