"""A cache without bytes, run by a policy: what would be held, and what would be hit."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.eviction import EvictionPolicy


class Block:
    """A candidate of its own, for want of a replica. `version` is the use that brought it in."""

    __slots__ = ("depth", "hits", "key", "last_use", "size", "version")

    def __init__(self, key: bytes, size: int, depth: int, use: int) -> None:
        self.key = key
        self.size = size  # bytes, or blocks where all are alike
        self.depth = depth
        self.last_use = self.version = use
        self.hits = 0


class ShadowCache:
    """`capacity` is in the unit of the blocks' sizes, and may be changed between two uses."""

    def __init__(self, policy: "EvictionPolicy", capacity: int = 0) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.capacity = capacity
        self._policy = policy
        self._used = 0
        self._uses = 0

    def touch(self, block: Block) -> None:
        """Use a block that is held."""
        self._uses += 1
        block.last_use = self._uses
        block.hits += 1
        self._policy.touch(block)

    def admit(self, key: bytes, size: int, depth: int) -> None:
        """Use a block that is not held; evict for its room. What is larger than the cache is not let in."""
        self._uses += 1
        self._used += size
        while self._used > self.capacity:
            victim = self._policy.peek()
            if victim is None:
                self._used -= size
                return
            self._policy.remove(victim)
            del self.blocks[victim.key]
            self._used -= victim.size
        block = self.blocks[key] = Block(key, size, depth, self._uses)
        self._policy.add(block)

    def use(self, key: bytes, size: int, depth: int) -> bool:
        """Whether it was held."""
        block = self.blocks.get(key)
        if block is None:
            self.admit(key, size, depth)
            return False
        self.touch(block)
        return True
