"""Least recently used first, by the replica's own `last_use`."""

from typing import TYPE_CHECKING

from kvstore.eviction.order import UseOrder

if TYPE_CHECKING:
    from kvstore.eviction import Candidate


class Lru(UseOrder):
    def touch(self, replica: "Candidate") -> None:
        self.remove(replica)
        self.add(replica)

    def peek(self) -> "Candidate | None":
        return self.first()
