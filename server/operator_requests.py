"""What operators ask of a node, for one tenant: tiers, pins, deletion, explanation, and the cluster as a whole."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstore import wire
from kvstore.catalogue import OpenNamespace
from kvstore.cluster.overview import Overview
from kvstore.errors import Forbidden, InvalidRequest, NotFound, Rejected
from kvstore.explain import explain, listed_row
from kvstore.types import NVME, OBJECT, BlockKey, Cause
from kvstore.wire_cluster import MOST_COPIES, Nodes, Replicate, Replicated, Roster, Whereabout, Whereabouts
from server.event_feed import EventFeed
from server.receipt import keys_of
from server.stats import stats

if TYPE_CHECKING:
    from server.session import Answer, Session

LIST_LIMIT = 10_000
EVICT_STEP_BLOCKS = 64


class OperatorRequests:
    """Of one session."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self.store = session.store
        self.upkeep = session.upkeep
        self.tenant = session.tenant
        self._feed = EventFeed(session.store, session.tenant)

    def handlers(self) -> dict[type[wire.Message], Callable[[Any], "Answer"]]:
        """By request."""
        return {
            wire.Promote: self._promote,
            wire.Demote: self._demote,
            wire.Drain: self._drain,
            wire.Evict: self._evict,
            wire.Pin: self._pin,
            wire.Unpin: self._unpin,
            wire.Explain: self._explain,
            wire.List: self._list,
            wire.Stat: self._stat,
            wire.SetTier: self._set_tier,
            wire.Check: self._check,
            wire.Subscribe: self._feed.subscribe,
            wire.Snapshot: self._feed.snapshot,
            Nodes: self._nodes,
            Whereabouts: self._whereabouts,
            Replicate: self._replicate,
        }

    def _overview(self) -> Overview:
        if self._session.cluster is None:
            raise InvalidRequest("this node is in no cluster: cluster.coordinator")
        if self._session.is_peer:
            raise InvalidRequest("another node asks for what is here, and sees the whole by itself")
        return Overview(self._session.cluster)

    def _space(self, number: int) -> OpenNamespace:
        return self.store.catalogue.numbered(self.tenant, number)

    def _promote(self, request: wire.Promote) -> "Answer":
        space = self._space(request.namespace)
        keys = keys_of(space, request.keys)
        self.store.intake.check_batch(space, keys)
        if request.load_ms <= 0:
            raise InvalidRequest("a load has time: load_ms above 0")
        if self._session.cluster is not None and not self._session.is_peer:
            return self._pull(request, space, keys)
        return wire.Promoted(request.id, self.store.promotion.begin(space, keys, request.load_ms / 1000, 0.0))

    async def _pull(self, request: wire.Promote, space: OpenNamespace, keys: list[BlockKey]) -> wire.Message:
        """Other nodes are asked first."""
        parent = BlockKey(request.parent) if request.parent else None
        load_s = request.load_ms / 1000
        loading = await self.store.reads.begin(space, keys, parent, load_s)
        return wire.Promoted(request.id, loading)

    async def _demote(self, request: wire.Demote) -> wire.Message:
        space = self._space(request.namespace)
        keys = None if request.whole else keys_of(space, request.keys)
        self.store.intake.check_batch(space, keys or ())
        counts = await self.store.demotion.demote(
            *(space, keys, request.tier), evict=request.evict, within_budget=not self.tenant.admin
        )
        return wire.Demoted(request.id, *counts)

    async def _drain(self, request: wire.Drain) -> wire.Message:
        if request.node:
            return wire.Drained(request.id, *await self._overview().drain(request.node))
        return wire.Drained(request.id, *await self.upkeep.drain(request.tier))

    def _evict(self, request: wire.Evict) -> "Answer":
        space = self._space(request.namespace)
        if request.whole:
            return self._evict_all(request, space)
        keys = keys_of(space, request.keys)
        self.store.intake.check_batch(space, keys)
        counts = self.store.discard(space, keys, Cause.DELETED, request.tier)
        if self._session.cluster is not None and not request.tier:
            return self._evict_elsewhere(request, space, keys, counts)
        return wire.Evicted(request.id, *counts)

    async def _evict_elsewhere(
        self, request: wire.Evict, space: OpenNamespace, keys: list[BlockKey], counts: tuple[int, int]
    ) -> wire.Message:
        others = await self._overview().discard(space, keys, whole=request.whole)
        return wire.Evicted(request.id, counts[0] + others[0], counts[1] + others[1])

    async def _evict_all(self, request: wire.Evict, space: OpenNamespace) -> wire.Message:
        """What is here now, in small steps and children first: others are served meanwhile."""
        if self.store.demotion.is_paused and request.tier in ("", NVME):
            raise Rejected("it is not known yet what lies on the disk: ask again, or name another tier")
        blocks, freed_bytes = self.store.discard(space, (), Cause.DELETED, request.tier)  # is there such a tier?
        keys = list(dict.fromkeys(key for tier_space in space.spaces for key in tier_space.replicas))[::-1]
        if request.tier in ("", OBJECT) and self.store.below.bucket is not None:
            try:
                await self.store.below.bucket.delete(space.root)
            except OSError as error:
                raise Rejected(f"the bucket does not answer, nothing was deleted: {error}") from error
        for start in range(0, len(keys), EVICT_STEP_BLOCKS):
            step = keys[start : start + EVICT_STEP_BLOCKS]
            counts = self.store.discard(space, step, Cause.DELETED, request.tier)
            blocks, freed_bytes = blocks + counts[0], freed_bytes + counts[1]
            await asyncio.sleep(0)
        if self._session.cluster is not None and not request.tier:
            return await self._evict_elsewhere(request, space, [], (blocks, freed_bytes))
        return wire.Evicted(request.id, blocks, freed_bytes)

    def _pin(self, request: wire.Pin) -> "Answer":
        space = self._space(request.namespace)
        keys = keys_of(space, request.keys)
        if request.ttl_ms <= 0:
            raise InvalidRequest("a pin has a time limit: ttl_ms above 0")
        pin = self.store.pin(space, keys, hard=request.hard, ttl_s=request.ttl_ms / 1000)
        if pin is None:
            return wire.Pinned(request.id, 0, 0)
        return wire.Pinned(request.id, pin.pin_id, len(pin.replicas))

    def _unpin(self, request: wire.Unpin) -> "Answer":
        self.store.unpin(self.tenant, request.pin_id)
        return wire.Done(request.id)

    def _explain(self, request: wire.Explain) -> "Answer":
        space = self._space(request.namespace)
        if len(request.tokens) % 4:
            raise InvalidRequest("tokens are u32: a multiple of 4 bytes")
        keys = keys_of(space, request.keys)
        if len(keys) > self.store.limits.batch_blocks:
            raise InvalidRequest(f"{len(keys)} blocks; batch_blocks is {self.store.limits.batch_blocks}")
        return wire.Explained(request.id, explain(self.store, space, keys, request.tokens))

    def _list(self, request: wire.List) -> "Answer":
        space = self._space(request.namespace)
        limit = min(max(request.limit, 1), LIST_LIMIT)
        after = BlockKey(request.after)
        rows: list[dict[str, Any]] = []
        seen_after = not after
        more = False
        for key, replica in self.store.listed(space):
            if not seen_after:
                seen_after = key == after
            elif len(rows) == limit:
                more = True
                break
            else:
                rows.append(listed_row(replica))
        if not seen_after:
            raise NotFound(f"block {after.hex()} to list after is gone: list from the start")
        return wire.Listed(request.id, rows, more)

    def _stat(self, request: wire.Stat) -> "Answer":
        self.store.note_uses()
        return wire.Stats(
            request.id, stats(self.store, self.upkeep, self.tenant, self._session.rdma, self._session.cluster)
        )

    def _set_tier(self, request: wire.SetTier) -> "Answer":
        self.upkeep.set_tier(
            request.tier,
            capacity_bytes=request.capacity_bytes,
            high_watermark=request.high_watermark,
            low_watermark=request.low_watermark,
        )
        return wire.Done(request.id)

    async def _check(self, request: wire.Check) -> wire.Message:
        if request.cluster:
            return wire.Checked(request.id, await self._overview().check())
        return wire.Checked(request.id, await self.store.check())

    # The cluster.

    def _nodes(self, request: Nodes) -> "Answer":
        overview = self._overview()
        return Roster(request.id, overview.me, overview.trouble, overview.roster())

    async def _whereabouts(self, request: Whereabouts) -> wire.Message:
        space = self._space(request.namespace)
        keys = keys_of(space, request.keys)
        self.store.intake.check_batch(space, keys)
        parent = BlockKey(request.parent) if request.parent else None
        return Whereabout(request.id, await self._overview().whereabouts(space, keys, parent))

    async def _replicate(self, request: Replicate) -> wire.Message:
        if not self.tenant.may_write:
            raise Forbidden(f"tenant {self.tenant.name} may only read")
        space = self._space(request.namespace)
        keys = keys_of(space, request.keys)
        if not 1 <= request.copies <= MOST_COPIES:
            raise InvalidRequest(f"{request.copies} copies: from 1 to {MOST_COPIES}")
        if request.whole:
            keys = list(dict.fromkeys(key for tier_space in space.spaces for key in tier_space.replicas))
        else:
            self.store.intake.check_batch(space, keys)
        return Replicated(request.id, *await self._overview().replicate(space, keys, request.copies))
