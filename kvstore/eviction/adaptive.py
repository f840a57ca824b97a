"""S3-FIFO whose rule follows a duel of policies on a sample of the keys; it can become CLOCK or LRU.

The size of the small queue moves in small steps towards the contender that hits more: too large a queue loses on
small caches, too small a one on large caches, and jumps lose on all. CLOCK or LRU must lead clearly to be followed.
"""

from math import sqrt
from typing import TYPE_CHECKING

from kvstore.eviction.clock import Clock
from kvstore.eviction.lru import Lru
from kvstore.eviction.s3fifo import Rule, S3Fifo
from kvstore.eviction.shadow import ShadowCache

if TYPE_CHECKING:
    from kvstore.eviction import Candidate, EvictionPolicy

SAMPLE = 16  # one key in so many
ROUND = 128  # sampled uses from one decision to the next
MEMORY = 31 / 32  # of what a round counted is left after the next

NARROWEST, FIRST, WIDEST = 0.3, 0.5, 0.7  # shares of the small queue
SHARE_STEP = 0.02  # of one decision
CLEAR, OVERWHELMING = 3.0, 5.0  # leads in standard deviations, to move the share and to leave S3-FIFO

NARROW, WIDE, CLOCK, LRU = range(4)


class Duel:
    """Which rule to follow. Each contender runs a cache of the sampled keys, without bytes."""

    def __init__(self) -> None:
        self.rule = Rule(FIRST)
        self._share = FIRST
        contenders: list[EvictionPolicy] = [S3Fifo(Rule(NARROWEST)), S3Fifo(Rule(WIDEST)), Clock(), Lru()]
        self._caches = [(1 << number, ShadowCache(policy)) for number, policy in enumerate(contenders)]
        self._outcomes = [0.0] * (1 << len(contenders))  # uses, by the set of contenders that had it: a bit for each
        self._uses = 0

    def use(self, replica: "Candidate", capacity: int) -> None:
        """A sampled replica was used; of all that are sampled, `capacity` bytes may be held."""
        had_it = 0
        for bit, cache in self._caches:
            cache.capacity = capacity
            if cache.use(replica.key, replica.size, replica.depth):
                had_it |= bit
        self._outcomes[had_it] += 1
        self._uses += 1
        if not self._uses % ROUND:
            self.rule = self._decide()
            self._outcomes = [MEMORY * uses for uses in self._outcomes]

    def _decide(self) -> Rule:
        lead = self._lead(NARROW, WIDE)
        if lead > CLEAR:
            self._share = max(NARROWEST, self._share - SHARE_STEP)
        elif lead < -CLEAR:
            self._share = min(WIDEST, self._share + SHARE_STEP)
        best_share = NARROW if lead > 0 else WIDE
        challenger = CLOCK if self._lead(CLOCK, LRU) >= 0 else LRU
        is_away = not self.rule.small_share
        if self._lead(challenger, best_share) > (0 if is_away else OVERWHELMING):
            return Rule(0, by_use=challenger == LRU)
        return Rule(self._share)

    def _lead(self, one: int, other: int) -> float:
        """How often `one` hit where `other` missed, less the reverse; in standard deviations of pure chance."""
        uses = self._outcomes
        ahead = sum(uses[had_it] for had_it in range(len(uses)) if had_it >> one & 1 and not had_it >> other & 1)
        behind = sum(uses[had_it] for had_it in range(len(uses)) if had_it >> other & 1 and not had_it >> one & 1)
        return (ahead - behind) / sqrt(max(1.0, ahead + behind))


class Adaptive(S3Fifo):
    def __init__(self) -> None:
        super().__init__(Rule(FIRST))
        self._duel = Duel()
        self._newest_use = 0

    def add(self, replica: "Candidate") -> None:
        super().add(replica)
        if replica.last_use > self._newest_use:  # else it comes back without having been used
            self._newest_use = replica.last_use
            if not replica.key[0] % SAMPLE:
                self._sample(replica)

    def touch(self, replica: "Candidate") -> None:
        super().touch(replica)
        if not replica.key[0] % SAMPLE:
            self._sample(replica)

    def _sample(self, replica: "Candidate") -> None:
        self._duel.use(replica, self._bytes // SAMPLE)
        self.rule = self._duel.rule
