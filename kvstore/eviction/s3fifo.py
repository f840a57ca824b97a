"""First in, first out, in a small queue for newcomers and a main one for what was used again (S3-FIFO).

What falls out of the small queue unused is remembered by its key for a while (a ghost); if it comes back, it goes
straight to the main queue. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from kvstore.eviction.order import UseOrder

if TYPE_CHECKING:
    from kvstore.eviction import Candidate

USES = 3  # bits that count a member's uses between two looks at it
MAIN = 4  # the bit of a member of the main queue
MOST_STEPS = 1000  # of one look; after these the next goes, used or not
STEP = 8  # members that leave a small queue which is no longer wanted, each time that one comes in


class Rule(NamedTuple):
    """Of the bytes held, `small_share` is the part from which on newcomers go first; 0: there is no small queue.

    `by_use`: what is spared goes where its last use puts it, not to the end.
    """

    small_share: float = 0.3
    by_use: bool = False


class S3Fifo:
    """`rule` may be changed at any time. The ghosts stand for at most as many bytes as are held."""

    def __init__(self, rule: Rule = Rule()) -> None:
        self.rule = rule
        self._small = UseOrder()
        self._main = UseOrder()
        self._small_bytes = 0
        self._bytes = 0  # of both
        self._members: dict[Candidate, int] = {}  # to USES and MAIN
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()  # bytes by key, oldest first
        self._ghost_bytes = 0
        self._offered: Candidate | None = None

    def add(self, replica: "Candidate") -> None:
        assert replica not in self._members
        is_ghost = replica.key in self._ghosts
        if is_ghost:
            self._ghost_bytes -= self._ghosts.pop(replica.key)
        small_share = self.rule.small_share
        size = replica.size
        self._bytes += size
        if is_ghost or replica.hits or not small_share:
            self._members[replica] = MAIN
            self._main.add(replica)
        else:
            self._members[replica] = 0
            self._small.add(replica)
            self._small_bytes += size
        if not small_share and self._small_bytes:
            self._merge()

    def touch(self, replica: "Candidate") -> None:
        state = self._members[replica]
        if state & USES < USES:
            self._members[replica] = state + 1
        if replica is self._offered:
            self._offered = None  # not the next any more

    def remove(self, replica: "Candidate") -> None:
        """What was offered last is taken to be evicted."""
        size = replica.size
        self._bytes -= size
        if self._members.pop(replica) & MAIN:
            self._main.remove(replica)
        else:
            self._small.remove(replica)
            self._small_bytes -= size
            if replica is self._offered:
                self._remember(replica)
        if replica is self._offered:
            self._offered = None

    def peek(self) -> "Candidate | None":
        if self._offered is None:
            first = self._first()
            for _ in range(MOST_STEPS):
                if first is None or not self._members[first] & USES:
                    break
                self._spare(first)
                first = self._first()
            self._offered = first
        return self._offered

    def __contains__(self, replica: object) -> bool:
        return replica in self._members

    def _first(self) -> "Candidate | None":
        """Whose turn it is."""
        small_bytes, small_share = self._small_bytes, self.rule.small_share
        if small_bytes and small_share and small_bytes >= small_share * self._bytes:
            return self._small.first()
        return self._main.first() or self._small.first()

    def _spare(self, replica: "Candidate") -> None:
        """It was used, so its turn passes: on to the main queue, or to the end of that."""
        state = self._members[replica]
        if state & MAIN:
            self._main.remove(replica)
            self._members[replica] = state - 1
        else:
            self._small.remove(replica)
            self._small_bytes -= replica.size
            self._members[replica] = MAIN
        if self.rule.by_use:
            self._members[replica] = MAIN
            self._main.add(replica)
        else:
            self._main.append(replica)

    def _merge(self) -> None:
        for _ in range(STEP):
            replica = self._small.first()
            if replica is None:
                return
            self._small.remove(replica)
            self._small_bytes -= replica.size
            self._main.add(replica)
            self._members[replica] |= MAIN

    def _remember(self, replica: "Candidate") -> None:
        previous = self._ghosts.pop(replica.key, 0)
        self._ghosts[replica.key] = replica.size
        self._ghost_bytes += replica.size - previous
        while self._ghost_bytes > self._bytes:
            _, size = self._ghosts.popitem(last=False)
            self._ghost_bytes -= size
