"""What is asked through a blocking client now and then: single blocks, moves between tiers, pins, settings."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from engine_client import operations
from engine_client.steps import Link, OpenSpace, Operation, Patience
from kvstore import wire
from kvstore.types import BlockKey

Result = TypeVar("Result")


class Operating(Protocol):
    """A part of the blocking client, which drives the operations."""

    def _drive(
        self, begin: Callable[[Link], Operation[Result]], within_s: float | None = None, wait_s: float = 0.0
    ) -> Result: ...

    def _patience(self, wait_s: float, load_s: float | None, tokens_per_s: float) -> Patience: ...

    def get_bytes(self, space: OpenSpace, key: BlockKey) -> bytes:
        """One block as fresh bytes. Raises NotFound, Corrupt."""
        patience = self._patience(0.0, None, 0.0)
        return self._drive(lambda link: operations.get_bytes(link, space, key, patience))

    def report(self, space: OpenSpace, keys: Sequence[BlockKey], within_s: float | None = None) -> int:
        """These blocks were damaged here: the node looks itself, and drops those that are; how many."""
        return self._drive(lambda _: operations.report(space, keys), within_s)

    def evict(self, space: OpenSpace, keys: Sequence[BlockKey] | None = None, tier: str = "") -> wire.Evicted:
        """Delete blocks, or all of the namespace; from one tier only if it is named."""
        return self._drive(lambda _: operations.evict(space, keys, tier))

    def promote(self, space: OpenSpace, keys: Sequence[BlockKey], load_s: float = 30.0) -> int:
        """Begin to load what of these blocks lower tiers have, ahead of need; how many are on their way."""
        return self._drive(lambda _: operations.promote(space, keys, load_s))

    def demote(
        self, space: OpenSpace, keys: Sequence[BlockKey] | None = None, tier: str = "nvme", *, evict: bool = False
    ) -> wire.Demoted:
        """Write blocks, or all of the namespace, into a lower tier; with `evict` they leave DRAM then."""
        return self._drive(lambda _: operations.demote(space, keys, tier, evict=evict), None, operations.SLOW_S)

    def drain(self, tier: str) -> wire.Drained:
        """Empty a tier into the next lower one. Needs an admin."""
        return self._drive(lambda _: operations.drain(tier), None, operations.SLOW_S)

    def pin(self, space: OpenSpace, keys: Sequence[BlockKey], *, hard: bool, ttl_s: float) -> wire.Pinned:
        """Keep the prefix of `keys` that is here: `hard` never goes, soft goes last."""
        return self._drive(lambda _: operations.pin(space, keys, hard=hard, ttl_s=ttl_s))

    def unpin(self, pin_id: int) -> None:
        self._drive(lambda _: operations.unpin(pin_id))

    def explain(self, space: OpenSpace, keys: Sequence[BlockKey], tokens: bytes = b"") -> list[dict[str, Any]]:
        """Why each block hits or misses; with the prompt's tokens (u32) other namespaces are looked at too."""
        return self._drive(lambda _: operations.explain(space, keys, tokens))

    def list_blocks(self, space: OpenSpace, after: BlockKey | None = None, limit: int = 1000) -> wire.Listed:
        """Blocks of a namespace, from the one after `after` on."""
        return self._drive(lambda _: operations.list_blocks(space, after, limit))

    def stat(self) -> dict[str, Any]:
        """What the node says of itself."""
        return self._drive(lambda _: operations.stat())

    def set_tier(
        self,
        tier: str,
        *,
        capacity_bytes: int | None = None,
        high_watermark: float | None = None,
        low_watermark: float | None = None,
    ) -> None:
        """Change a tier while it serves. Needs an admin."""
        self._drive(lambda _: operations.set_tier(tier, capacity_bytes, high_watermark, low_watermark))

    def check(self) -> list[str]:
        """Fsck of the live node. Needs an admin."""
        return self._drive(lambda _: operations.check())
