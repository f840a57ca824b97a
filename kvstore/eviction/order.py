"""Candidates in the order of a stamp: the last use that each had when it was put in.

What is put in was nearly always used later than all before it, and is kept in that order as it comes. The rest (a
parent whose last child went, a block that was held for long) waits in a heap.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.eviction import Candidate

SLACK = 64  # outdated entries that may wait in the heap beside twice the valid ones


class UseOrder:
    """`first` is the one with the lowest stamp, of equal ones the one with the lowest version."""

    def __init__(self) -> None:
        self._in_order: OrderedDict[Candidate, int] = OrderedDict()  # to stamps, lowest first
        self._newest = 0  # no stamp is higher
        self._late: dict[Candidate, int] = {}
        self._heap: list[tuple[int, int, Candidate]] = []  # (stamp, version, late one), some outdated

    def add(self, replica: "Candidate") -> None:
        assert replica not in self._in_order and replica not in self._late  # noqa: PT018 - on the hot path
        stamp = replica.last_use
        if stamp > self._newest:
            self._newest = stamp
            self._in_order[replica] = stamp
        else:
            self._late[replica] = stamp
            heappush(self._heap, (stamp, replica.version, replica))

    def append(self, replica: "Candidate") -> None:
        """Put it in after all others, whenever it was used."""
        assert replica not in self
        self._newest = max(self._newest, replica.last_use)
        self._in_order[replica] = self._newest

    def remove(self, replica: "Candidate") -> None:
        if replica in self._in_order:
            del self._in_order[replica]
            return
        del self._late[replica]
        if len(self._heap) > 2 * len(self._late) + SLACK:
            self._heap = [(stamp, late.version, late) for late, stamp in self._late.items()]
            heapify(self._heap)

    def first(self) -> "Candidate | None":
        first = next(iter(self._in_order), None)
        heap = self._heap
        while heap:
            stamp, version, replica = heap[0]
            if self._late.get(replica) == stamp:
                if first is None or (stamp, version) < (self._in_order[first], first.version):
                    return replica
                break
            heappop(heap)
        return first

    def stamp(self, replica: "Candidate") -> int:
        return self._in_order[replica] if replica in self._in_order else self._late[replica]

    def __contains__(self, replica: object) -> bool:
        return replica in self._in_order or replica in self._late
