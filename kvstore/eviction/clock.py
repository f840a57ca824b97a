"""First in, first out, with a second chance for what was used since it came in (CLOCK).

A touch writes nothing: that a replica was used is seen from its `last_use`, once its turn has come.
"""

from typing import TYPE_CHECKING

from kvstore.eviction.order import UseOrder

if TYPE_CHECKING:
    from kvstore.eviction import Candidate

MOST_CHANCES = 256  # given out by one look; after these the next goes, used or not


class Clock(UseOrder):
    def __init__(self) -> None:
        super().__init__()
        self._offered: Candidate | None = None

    def touch(self, replica: "Candidate") -> None:
        assert replica in self
        if replica is self._offered:
            self._offered = None

    def remove(self, replica: "Candidate") -> None:
        super().remove(replica)
        if replica is self._offered:
            self._offered = None

    def peek(self) -> "Candidate | None":
        if self._offered is None:
            self._offered = self._next()
        return self._offered

    def _next(self) -> "Candidate | None":
        first = self.first()
        for _ in range(MOST_CHANCES):
            if first is None or first.last_use <= self.stamp(first):
                break
            super().remove(first)
            self.append(first)
            first = self.first()
        return first
