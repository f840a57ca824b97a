"""How often stripes are read: counts that halve over time, of so many stripes at most."""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import exp2, log, log2


@dataclass(slots=True)
class _Entry:
    """Counts as levels: one of `l` is 2 ** (l - now / half_life_s), so that no time passing changes their order."""

    level: float
    inherited: float  # of the level, what may not be its own


@dataclass(slots=True)
class Heat:
    """Blocks read of each stripe, with a half-life. Of `entries` stripes at most: a new one takes the place of the
    coldest and its count (space-saving), so that one which becomes hot among many cold ones is not overlooked.

    `note` costs a step in a heap of `entries` at most, `rate` a look-up, `hottest` a pass over all.
    """

    half_life_s: float
    entries: int
    _by_key: dict[Hashable, _Entry] = field(default_factory=dict)
    _coldest: list[tuple[float, int, Hashable]] = field(default_factory=list)  # a heap; levels may have grown since
    _pushes: int = 0  # orders equal levels in the heap: keys need have no order

    def __len__(self) -> int:
        return len(self._by_key)

    def note(self, key: Hashable, blocks: int, now: float) -> None:
        """`blocks` (at least 1) of a stripe were read."""
        level = log2(blocks) + now / self.half_life_s
        entry = self._by_key.get(key)
        if entry is not None:
            entry.level = _sum(entry.level, level)
            return
        inherited = float("-inf")
        if len(self._by_key) >= self.entries:
            inherited = self._remove_coldest()
        self._by_key[key] = entry = _Entry(_sum(inherited, level), inherited)
        self._pushes += 1
        heapq.heappush(self._coldest, (entry.level, self._pushes, key))

    def rate(self, key: Hashable, now: float) -> float:
        """Blocks read per second lately; what it inherited does not count. 0 for one that is not known."""
        entry = self._by_key.get(key)
        return 0.0 if entry is None else self._rate(entry, now)

    def hottest(self, n: int, now: float) -> list[tuple[Hashable, float]]:
        """The `n` with the highest rates (blocks/s), the hottest first."""
        rates = ((self._rate(entry, now), key) for key, entry in self._by_key.items())
        return [(key, rate) for rate, key in heapq.nlargest(n, rates, key=lambda pair: pair[0])]

    def _rate(self, entry: _Entry, now: float) -> float:
        """At a steady rate the count is rate x half-life / ln 2."""
        age = now / self.half_life_s
        return (exp2(entry.level - age) - exp2(entry.inherited - age)) * log(2) / self.half_life_s

    def _remove_coldest(self) -> float:
        """Its level."""
        while True:
            level, _, key = self._coldest[0]
            entry = self._by_key[key]
            if entry.level == level:
                heapq.heappop(self._coldest)
                del self._by_key[key]
                return level
            self._pushes += 1
            heapq.heapreplace(self._coldest, (entry.level, self._pushes, key))


def _sum(one: float, other: float) -> float:
    """The level of two counts together."""
    high, low = max(one, other), min(one, other)
    return high + log2(1 + exp2(low - high))
