"""Why a block is not here: what was evicted or refused lately, bounded."""

from collections import OrderedDict

from kvstore.types import BlockKey

Remembered = tuple[str, float]
"""What happened, and when on the node's clock in seconds."""


class History:
    """The last `limit` blocks that went or were refused, by namespace number and key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last: OrderedDict[tuple[int, BlockKey], Remembered] = OrderedDict()

    def remember(self, number: int, key: BlockKey, what: str, now: float) -> None:
        self._last[number, key] = (what, now)
        self._last.move_to_end((number, key))
        if len(self._last) > self._limit:
            self._last.popitem(last=False)

    def forget(self, number: int, key: BlockKey) -> None:
        """It is here again."""
        self._last.pop((number, key), None)

    def last(self, number: int, key: BlockKey) -> Remembered | None:
        return self._last.get((number, key))
