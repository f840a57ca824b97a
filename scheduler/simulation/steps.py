"""The decode steps of a batch that stays as it is, computed at once: when each of them ends."""

from collections.abc import Callable

import numpy as np

from scheduler.costs import DecodeCost, Floats
from scheduler.simulation.loop import Loop, Timer


class PlannedSteps:
    """Steps from now on, until `over` is called at the end of the last one. Its owner takes them then."""

    def __init__(self, loop: Loop, cost: DecodeCost, over: Callable[[], None]) -> None:
        self._loop = loop
        self._cost = cost
        self._over = over
        self._ends: Floats = np.zeros(0)
        self._timer: Timer | None = None

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def done(self) -> int:
        """How many have ended by now."""
        return int(np.searchsorted(self._ends, self._loop.now, "right"))

    def make(self, batch: int, steps: int, context: int) -> None:
        """Step k of a batch of b has b * k tokens more than the first, which has `context`."""
        first_s = self._cost.seconds(batch, context)
        more_s = self._cost.per_token_s * batch
        counts = np.arange(1, steps + 1)
        self._ends = self._loop.now + counts * first_s + more_s * counts * (counts - 1) / 2
        self._timer = self._loop.at(float(self._ends[-1]), self._over)

    def shorten(self) -> None:
        """The step in progress is the last one."""
        step = int(np.searchsorted(self._ends, self._loop.now, "left"))
        if step + 1 < len(self._ends):
            self._ends = self._ends[: step + 1]
            assert self._timer is not None
            self._timer.cancel()
            self._timer = self._loop.at(float(self._ends[-1]), self._over)

    def take(self) -> Floats:
        """When each of them ended; none is left."""
        ends, self._ends = self._ends, np.zeros(0)
        return ends
