"""Which evictable replica goes first. One policy per file; EVICTION names them for configuration."""

from collections.abc import Callable
from typing import Protocol

from kvstore.eviction.adaptive import Adaptive
from kvstore.eviction.clock import Clock
from kvstore.eviction.lru import Lru
from kvstore.eviction.s3fifo import S3Fifo


class Candidate(Protocol):
    """What a policy may look at. Policies see neither pins, leases nor slots.

    `size` and `key` stay the same; `last_use` and `hits` are set before the policy is told.
    """

    @property
    def key(self) -> bytes: ...  # evenly spread, 16 bytes at least
    @property
    def size(self) -> int: ...  # bytes
    @property
    def depth(self) -> int: ...  # blocks before it in its chain, as far as they are known
    @property
    def hits(self) -> int: ...  # uses since it was stored, its own or inherited from a child that went
    @property
    def last_use(self) -> int: ...  # the table's count of operations when it was last used; grows
    @property
    def version(self) -> int: ...  # unique on a node


class EvictionPolicy(Protocol):
    """An order of the replicas that may be evicted now, and of nothing else.

    The table adds a replica when it becomes evictable and removes it when it stops being so. It sets
    `last_use` and then calls `touch`. What is removed while `peek` offers it counts as evicted.
    """

    def add(self, replica: Candidate) -> None: ...

    def touch(self, replica: Candidate) -> None: ...

    def remove(self, replica: Candidate) -> None: ...

    def peek(self) -> Candidate | None:
        """The replica to evict first, or None when there is none. Bounded work, whatever is held."""

    def __contains__(self, replica: object) -> bool: ...


EVICTION: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru, "clock": Clock, "s3fifo": S3Fifo, "adaptive": Adaptive}
