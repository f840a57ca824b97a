"""Events in virtual time: what was asked for first at a moment happens first."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Timer:
    """One call that is to come. `call` is None once it ran or was cancelled."""

    call: Callable[[], None] | None

    def cancel(self) -> None:
        self.call = None


class Loop:
    """A clock that jumps from event to event. `now` is in seconds and never goes back."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Timer]] = []
        self._asked = 0

    def at(self, when_s: float, call: Callable[[], None]) -> Timer:
        """Call at a moment; one that has passed is now."""
        timer = Timer(call)
        heapq.heappush(self._events, (max(when_s, self.now), self._asked, timer))
        self._asked += 1
        return timer

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        return self.at(self.now + delay_s, call)

    def run(self, until_s: float = float("inf")) -> None:
        """All events up to a moment, those that they ask for included."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now, _, timer = heapq.heappop(events)
            call, timer.call = timer.call, None
            if call is not None:
                call()
