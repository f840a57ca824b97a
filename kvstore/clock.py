"""The clock that is passed in, so that tests can turn its hands."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time that never goes backwards."""

    def now(self) -> float:
        """Monotonic seconds from an arbitrary start; only differences mean anything."""
        ...


class MonotonicClock:
    """The host's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()
