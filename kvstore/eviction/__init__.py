"""Which evictable replica goes first. One policy per file; EVICTION names them for configuration."""

from collections.abc import Callable
from typing import Protocol

from kvstore.eviction.lru import Lru


class Candidate(Protocol):
    """What a policy may look at. Policies see neither pins, leases nor slots."""

    @property
    def last_use(self) -> int: ...  # the table's count of operations when it was last used; grows
    @property
    def version(self) -> int: ...  # unique on a node


class EvictionPolicy(Protocol):
    """An order of the replicas that may be evicted now, and of nothing else.

    The table adds a replica when it becomes evictable and removes it when it stops being so. It sets
    `last_use` and then calls `touch`.
    """

    def add(self, replica: Candidate) -> None: ...

    def touch(self, replica: Candidate) -> None: ...

    def remove(self, replica: Candidate) -> None: ...

    def peek(self) -> Candidate | None:
        """The replica to evict first, or None when there is none."""

    def __contains__(self, replica: object) -> bool: ...


EVICTION: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru}
