"""Least recently used first, by the replica's own `last_use`.

What is added or touched was nearly always used later than all before it, and is kept in that order as it
comes. The rest (a parent whose last child went, a block that was held for long) waits in a heap.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.eviction import Candidate

SLACK = 64  # outdated entries that may wait in the heap beside twice the valid ones


class Lru:
    def __init__(self) -> None:
        self._in_order: OrderedDict[Candidate, None] = OrderedDict()  # used longest ago first
        self._newest_use = 0  # of all that came in order
        self._late: set[Candidate] = set()
        self._heap: list[tuple[int, int, Candidate]] = []  # (last use, version, late one), some outdated

    def add(self, replica: "Candidate") -> None:
        assert replica not in self
        if replica.last_use > self._newest_use:
            self._newest_use = replica.last_use
            self._in_order[replica] = None
        else:
            self._late.add(replica)
            heappush(self._heap, (replica.last_use, replica.version, replica))

    def touch(self, replica: "Candidate") -> None:
        self.remove(replica)
        self.add(replica)

    def remove(self, replica: "Candidate") -> None:
        if replica in self._in_order:
            del self._in_order[replica]
            return
        self._late.remove(replica)
        if len(self._heap) > 2 * len(self._late) + SLACK:
            self._heap = [(late.last_use, late.version, late) for late in self._late]
            heapify(self._heap)

    def peek(self) -> "Candidate | None":
        first = next(iter(self._in_order), None)
        heap = self._heap
        while heap:
            last_use, version, replica = heap[0]
            if replica in self._late and replica.last_use == last_use:
                if first is None or (last_use, version) < (first.last_use, first.version):
                    return replica
                break
            heappop(heap)
        return first

    def __contains__(self, replica: object) -> bool:
        return replica in self._in_order or replica in self._late
