"""The replicas of a tier that may be evicted now: by tenant and size class, softly pinned ones last."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import cast

from kvstore.eviction import EVICTION, EvictionPolicy
from kvstore.replica import Replica
from kvstore.types import GroupKey

NEVER = 1 << 63
SLACK = 64  # outdated entries that may wait in the heap beside twice the queues


class Queue:
    """One policy's candidates. `known_use` is at most the last use of its first, NEVER while it has none."""

    __slots__ = ("known_use", "number", "policy")

    def __init__(self, policy: EvictionPolicy, number: int) -> None:
        self.policy = policy
        self.number = number
        self.known_use = NEVER


class Queues:
    """One queue per tenant and size class; which has the coldest replica is known without asking each."""

    def __init__(self, new_policy: Callable[[], EvictionPolicy]) -> None:
        self._new_policy = new_policy
        self._queues: dict[GroupKey, Queue] = {}
        self._heap: list[tuple[int, int, Queue]] = []  # (known use, number, queue): too old, never too new
        self._numbers = count()

    def add(self, replica: Replica) -> None:
        queue = self._queues.get(replica.group)
        if queue is None:
            queue = self._queues[replica.group] = Queue(self._new_policy(), next(self._numbers))
        queue.policy.add(replica)
        if replica.last_use < queue.known_use:
            queue.known_use = replica.last_use
            heappush(self._heap, (replica.last_use, queue.number, queue))
            if len(self._heap) > 2 * len(self._queues) + SLACK:
                known = (queue for queue in self._queues.values() if queue.known_use < NEVER)
                self._heap = [(queue.known_use, queue.number, queue) for queue in known]
                heapify(self._heap)

    def touch(self, replica: Replica) -> None:
        self._queues[replica.group].policy.touch(replica)

    def remove(self, replica: Replica) -> None:
        self._queues[replica.group].policy.remove(replica)

    def coldest(self) -> Replica | None:
        while self._heap:
            known_use, number, queue = self._heap[0]
            first = queue.policy.peek() if known_use == queue.known_use else None
            if first is None:  # outdated, or a queue that ran empty
                heappop(self._heap)
                if known_use == queue.known_use:
                    queue.known_use = NEVER
            elif first.last_use > known_use:
                queue.known_use = first.last_use
                heapreplace(self._heap, (first.last_use, number, queue))
            else:
                return cast(Replica, first)
        return None

    def coldest_of(self, group: GroupKey) -> Replica | None:
        queue = self._queues.get(group)
        return cast("Replica | None", queue.policy.peek()) if queue is not None else None

    def coldest_of_tenant(self, tenant: str) -> Replica | None:
        firsts = [self.coldest_of(group) for group in self._queues if group.tenant == tenant]
        return min(filter(None, firsts), key=lambda first: first.last_use, default=None)

    def drop(self, group: GroupKey) -> None:
        """The group has no slab any more. A later one of the same name starts anew."""
        queue = self._queues.pop(group, None)
        if queue is not None:
            assert queue.policy.peek() is None
            queue.known_use = NEVER

    def __contains__(self, replica: Replica) -> bool:
        queue = self._queues.get(replica.group)
        return queue is not None and replica in queue.policy


class WholeSlabs:
    """For a tier whose blocks go with their slab, and never one by one."""

    def add(self, replica: Replica) -> None: ...

    def touch(self, replica: Replica) -> None: ...

    def remove(self, replica: Replica) -> None: ...

    def coldest(self, *, copies_first: bool = False) -> None: ...

    def coldest_of(self, group: GroupKey, *, copies_first: bool = False) -> None: ...

    def coldest_of_tenant(self, tenant: str, *, copies_first: bool = False) -> None: ...

    def drop(self, group: GroupKey) -> None: ...

    def __contains__(self, replica: Replica) -> bool:
        return replica.is_evictable


class Evictable:
    """`policy` is a name of EVICTION. Copies (`Replica.is_copy`) have queues of their own.

    The coldest is whichever of copy and original was used longer ago, or, with `copies_first`, a copy if there is one.
    Softly pinned ones go after all others, and copies of them first.
    """

    def __init__(self, policy: str) -> None:
        self._free = Queues(EVICTION[policy])
        self._copies = Queues(EVICTION[policy])
        self._pinned = Queues(EVICTION[policy])
        self._pinned_copies = Queues(EVICTION[policy])

    def add(self, replica: Replica) -> None:
        (self._queues_of(replica) if replica.soft_pins or replica.is_copy else self._free).add(replica)

    def touch(self, replica: Replica) -> None:
        (self._queues_of(replica) if replica.soft_pins or replica.is_copy else self._free).touch(replica)

    def remove(self, replica: Replica) -> None:
        (self._queues_of(replica) if replica.soft_pins or replica.is_copy else self._free).remove(replica)

    def coldest(self, *, copies_first: bool = False) -> Replica | None:
        first, copy = self._free.coldest(), self._copies.coldest()
        if copy is not None:
            first = _first(copy, first, copies_first=copies_first)
        return first or self._pinned_copies.coldest() or self._pinned.coldest()

    def coldest_of(self, group: GroupKey, *, copies_first: bool = False) -> Replica | None:
        first = _first(self._copies.coldest_of(group), self._free.coldest_of(group), copies_first=copies_first)
        return first or self._pinned_copies.coldest_of(group) or self._pinned.coldest_of(group)

    def coldest_of_tenant(self, tenant: str, *, copies_first: bool = False) -> Replica | None:
        copy, original = self._copies.coldest_of_tenant(tenant), self._free.coldest_of_tenant(tenant)
        first = _first(copy, original, copies_first=copies_first)
        return first or self._pinned_copies.coldest_of_tenant(tenant) or self._pinned.coldest_of_tenant(tenant)

    def drop(self, group: GroupKey) -> None:
        for queues in (self._free, self._copies, self._pinned, self._pinned_copies):
            queues.drop(group)

    def __contains__(self, replica: Replica) -> bool:
        return replica in self._queues_of(replica)

    def _queues_of(self, replica: Replica) -> Queues:
        if replica.soft_pins:
            return self._pinned_copies if replica.is_copy else self._pinned
        return self._copies if replica.is_copy else self._free


def _first(copy: Replica | None, original: Replica | None, *, copies_first: bool) -> Replica | None:
    if copy is None or original is None:
        return copy or original
    return copy if copies_first or copy.last_use < original.last_use else original
