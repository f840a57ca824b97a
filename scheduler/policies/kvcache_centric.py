"""The first token as early as the whole cluster's cache allows: where a prefix lies, or where it can be brought to.

This is the idea of Algorithm 1 of the Mooncake paper (FAST 2025), with four differences: times overlap where the work
does (a pull runs while its request waits), a pull must be worth it in seconds as well as in length, and a source's disk
and traffic count, also what it hands over to be decoded. And while instances are busy, work counts beside time:
what is computed twice keeps all who come later waiting. A pulled prefix stays where it was pulled to, so hot prefixes
spread with the load.
"""

from typing import ClassVar

import numpy as np

from scheduler.outlook import Choice, Outlook
from scheduler.policies.policy import Draw, least
from scheduler.tuning import Tuning


class KvcacheCentric:
    """The least predicted time to the first token over all instances, with and without a pull from the best sources."""

    name: ClassVar[str] = "kvcache_centric"

    def __init__(self, draw: Draw, tuning: Tuning) -> None:
        self._draw = draw
        self._threshold = tuning.balancing_threshold
        self._weight = tuning.work_weight

    def choose(self, outlook: Outlook) -> Choice:
        local_s = outlook.local_cost_s(self._weight)
        pull_s = outlook.pull_cost_s(self._threshold, self._weight)
        if not len(pull_s):
            return outlook.local(least(local_s, self._draw))
        source = np.argmin(pull_s, axis=0)
        pulled_s = pull_s[source, np.arange(len(outlook))]
        at = least(np.minimum(local_s, pulled_s), self._draw)
        return outlook.pulling(at, int(source[at])) if pulled_s[at] < local_s[at] else outlook.local(at)
