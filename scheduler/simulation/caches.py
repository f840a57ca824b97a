"""The DRAM of a store node: blocks in the order of their last use, the oldest goes first."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """What a use of the cache brought in and pushed out, as its events would say."""

    stored: list[int]
    removed: list[int]


class BlockCache:
    """LRU of block names. A chain is used from its tail to its front, so that its tail is what goes first."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"a cache needs at least one block, not {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self._blocks: dict[int, None] = {}  # first: the least recently used

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: int) -> bool:
        return name in self._blocks

    def prefix(self, names: Sequence[int]) -> int:
        """Blocks of the chain before the first that is not here; uses none of them."""
        blocks = self._blocks
        for index, name in enumerate(names):
            if name not in blocks:
                return index
        return len(names)

    def use(self, names: Sequence[int]) -> Change:
        """All blocks of a chain are used; those that are absent come in. Of a chain too long, the front stays."""
        blocks = self._blocks
        stored = []
        for name in reversed(names[: self.capacity_blocks]):
            if name in blocks:
                del blocks[name]
            else:
                stored.append(name)
            blocks[name] = None
        stored.reverse()
        removed = []
        while len(blocks) > self.capacity_blocks:
            oldest = next(iter(blocks))
            del blocks[oldest]
            removed.append(oldest)
        return Change(stored, removed)
