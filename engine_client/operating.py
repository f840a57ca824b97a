"""What is asked through a client now and then: single blocks, moves between tiers and nodes, pins, settings."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from engine_client import cluster_operations, operations
from engine_client.cluster_operations import CHECK_S, SLOW_S
from engine_client.steps import Link, OpenSpace, Operation, Patience
from kvstore import wire
from kvstore.types import BlockKey
from kvstore.wire_cluster import Replicated, Roster

Result = TypeVar("Result")


class Operating(Protocol):
    """A part of the blocking client, which drives the operations."""

    def _drive(
        self, begin: Callable[[Link], Operation[Result]], within_s: float | None = None, wait_s: float = 0.0
    ) -> Result: ...

    def _patience(self, wait_s: float, load_s: float | None, tokens_per_s: float) -> Patience: ...

    def run(self, begin: Callable[[Link], Operation[Result]], wait_s: float = 0.0) -> Result:
        """Any other operation of engine_client.operations; the node may take `wait_s` on purpose."""
        return self._drive(begin, None, wait_s)

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

    def promote(
        self, space: OpenSpace, keys: Sequence[BlockKey], load_s: float = 30.0, parent: BlockKey | None = None
    ) -> int:
        """Begin to load what of these blocks lower tiers have, ahead of need; how many are on their way. In a cluster
        other nodes' too, as for `match`."""
        return self._drive(lambda _: operations.promote(space, keys, load_s, parent))

    def demote(
        self, space: OpenSpace, keys: Sequence[BlockKey] | None = None, tier: str = "nvme", *, evict: bool = False
    ) -> wire.Demoted:
        """Write blocks, or all of the namespace, into a lower tier; with `evict` they leave DRAM then."""
        return self._drive(lambda _: operations.demote(space, keys, tier, evict=evict), None, SLOW_S)

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

    def nodes(self) -> Roster:
        """Who is in the cluster, as the node sees it. InvalidRequest when it is in none."""
        return self._drive(lambda _: cluster_operations.nodes())

    def whereabouts(
        self, space: OpenSpace, keys: Sequence[BlockKey], parent: BlockKey | None = None
    ) -> list[dict[str, list[str]]]:
        """For each block of a chain the nodes of the cluster that have it, each with its tiers."""
        return self._drive(lambda _: cluster_operations.whereabouts(space, keys, parent))

    def replicate(self, space: OpenSpace, keys: Sequence[BlockKey] | None = None, copies: int = 2) -> Replicated:
        """Have `copies` of these blocks in the cluster, or more; None: of all that the node has of the namespace."""
        return self._drive(lambda _: cluster_operations.replicate(space, keys, copies), None, SLOW_S)

    def drain(self, tier: str = "", node: str = "") -> wire.Drained:
        """Empty a tier into the next lower one; or a node of the cluster into others. Needs an admin."""
        return self._drive(lambda _: cluster_operations.drain(tier, node), None, SLOW_S)

    def check(self, *, cluster: bool = False) -> list[str]:
        """Fsck of the live node, or of the whole cluster. Needs an admin."""
        return self._drive(lambda _: cluster_operations.check(cluster=cluster), None, CHECK_S if cluster else 0.0)


class AsyncOperating(Protocol):
    """The same of the client for asyncio."""

    async def _drive(self, begin: Callable[[Link], Operation[Result]]) -> Result: ...

    def _patience(self, wait_s: float, load_s: float | None, tokens_per_s: float) -> Patience: ...

    async def get_bytes(self, space: OpenSpace, key: BlockKey) -> bytes:
        """One block as fresh bytes. Raises NotFound, Corrupt."""
        patience = self._patience(0.0, None, 0.0)
        return await self._drive(lambda link: operations.get_bytes(link, space, key, patience))

    async def evict(self, space: OpenSpace, keys: Sequence[BlockKey] | None = None, tier: str = "") -> wire.Evicted:
        """Delete blocks, or all of the namespace; from one tier only if it is named."""
        return await self._drive(lambda _: operations.evict(space, keys, tier))

    async def promote(
        self, space: OpenSpace, keys: Sequence[BlockKey], load_s: float = 30.0, parent: BlockKey | None = None
    ) -> int:
        """Begin to load what of these blocks lower tiers have, ahead of need; how many are on their way. In a cluster
        other nodes' too, as for `match`."""
        return await self._drive(lambda _: operations.promote(space, keys, load_s, parent))

    async def demote(
        self, space: OpenSpace, keys: Sequence[BlockKey] | None = None, tier: str = "nvme", *, evict: bool = False
    ) -> wire.Demoted:
        """Write blocks, or all of the namespace, into a lower tier; with `evict` they leave DRAM then."""
        return await self._drive(lambda _: operations.demote(space, keys, tier, evict=evict))

    async def pin(self, space: OpenSpace, keys: Sequence[BlockKey], *, hard: bool, ttl_s: float) -> wire.Pinned:
        """Keep the prefix of `keys` that is here: `hard` never goes, soft goes last."""
        return await self._drive(lambda _: operations.pin(space, keys, hard=hard, ttl_s=ttl_s))

    async def unpin(self, pin_id: int) -> None:
        await self._drive(lambda _: operations.unpin(pin_id))

    async def explain(self, space: OpenSpace, keys: Sequence[BlockKey], tokens: bytes = b"") -> list[dict[str, Any]]:
        """Why each block hits or misses; with the prompt's tokens (u32) other namespaces are looked at too."""
        return await self._drive(lambda _: operations.explain(space, keys, tokens))

    async def list_blocks(self, space: OpenSpace, after: BlockKey | None = None, limit: int = 1000) -> wire.Listed:
        """Blocks of a namespace, from the one after `after` on."""
        return await self._drive(lambda _: operations.list_blocks(space, after, limit))

    async def stat(self) -> dict[str, Any]:
        """What the node says of itself."""
        return await self._drive(lambda _: operations.stat())

    async def nodes(self) -> Roster:
        """Who is in the cluster, as the node sees it. InvalidRequest when it is in none."""
        return await self._drive(lambda _: cluster_operations.nodes())

    async def whereabouts(
        self, space: OpenSpace, keys: Sequence[BlockKey], parent: BlockKey | None = None
    ) -> list[dict[str, list[str]]]:
        """For each block of a chain the nodes of the cluster that have it, each with its tiers."""
        return await self._drive(lambda _: cluster_operations.whereabouts(space, keys, parent))

    async def replicate(self, space: OpenSpace, keys: Sequence[BlockKey] | None = None, copies: int = 2) -> Replicated:
        """Have `copies` of these blocks in the cluster, or more; None: of all that the node has of the namespace."""
        return await self._drive(lambda _: cluster_operations.replicate(space, keys, copies))

    async def drain(self, tier: str = "", node: str = "") -> wire.Drained:
        """Empty a tier into the next lower one; or a node of the cluster into others. Needs an admin."""
        return await self._drive(lambda _: cluster_operations.drain(tier, node))

    async def check(self, *, cluster: bool = False) -> list[str]:
        """Fsck of the live node, or of the whole cluster. Needs an admin."""
        return await self._drive(lambda _: cluster_operations.check(cluster=cluster))
