"""What the node itself holds while it moves bytes between tiers, counted so that `check` can tell it from a leak."""

from collections.abc import Iterator

from kvstore.table import BlockTable, Replica, Space
from kvstore.types import BlockKey


class NodeHolds:
    """The table's `hold`, `let_go`, `allocate` and `commit`, for the node as the holder or the writer."""

    def __init__(self, table: BlockTable) -> None:
        self.table = table
        self._counts: dict[Replica, int] = {}

    def hold(self, replica: Replica) -> None:
        self.table.hold(replica)
        self._counts[replica] = self._counts.get(replica, 0) + 1

    def let_go(self, replica: Replica) -> None:
        """Once for each `hold`, and for an `allocate` that was aborted."""
        self._uncount(replica)
        self.table.let_go(replica)

    def allocate(self, space: Space, key: BlockKey, parent: BlockKey | None, size: int) -> Replica | None:
        replica = self.table.allocate(space, key, parent, size)
        if replica is not None:
            self._counts[replica] = 1
        return replica

    def commit(self, replica: Replica, checksum: int) -> None:
        self._uncount(replica)
        self.table.commit(replica, checksum)

    def held(self) -> Iterator[Replica]:
        """Each replica, once for each hold."""
        for replica, count in self._counts.items():
            yield from [replica] * count

    def _uncount(self, replica: Replica) -> None:
        left = self._counts[replica] - 1
        if left:
            self._counts[replica] = left
        else:
            del self._counts[replica]
