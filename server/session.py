"""One client's dealings with the node: each wire request becomes a call of the store, for one tenant.

Connections and REST use it alike, so both have the same limits, checks and errors. `handle` answers at once
where nothing has to be waited for, else with a coroutine.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvstore import wire
from kvstore.catalogue import OpenNamespace, Tenant
from kvstore.errors import Forbidden, InvalidRequest, NotFound, ProtocolError, Rejected
from kvstore.explain import explain, listed_row
from kvstore.holds import Lease
from kvstore.intake import Placing
from kvstore.lifting import Lifting
from kvstore.packed import pack_u64, unpack_u64
from kvstore.store import Store
from kvstore.table import Replica
from kvstore.types import HBM, NVME, OBJECT, BlockKey, Cause, Owner
from kvstore.upkeep import Upkeep
from server.lending import lifting_of
from server.rdma import NodeRdma
from server.receipt import Receipt, complete, keys_of, receive_commit, receive_put
from server.remote import RemoteClient
from server.stats import stats

Answer = wire.Message | Awaitable[wire.Message]

WRITES = (wire.Put, wire.Progress, wire.Commit, wire.Offer, wire.Abort, wire.Demote, wire.Evict, wire.Pin, wire.Unpin)
ADMIN = (wire.SetTier, wire.Check, wire.Drain)
MOST_WAITING = 32  # acquires of one client; more are answered at once, or its own commits could not be read
LIST_LIMIT = 10_000
EVICT_STEP_BLOCKS = 64


class Session:
    """`path` names how blocks travel to this client: shared, tcp, rdma or rest; for the counters."""

    def __init__(
        self, store: Store, upkeep: Upkeep, tenant: Tenant, owner: Owner, path: str, rdma: NodeRdma | None = None
    ) -> None:
        self.store = store
        self.upkeep = upkeep
        self.tenant = tenant
        self.owner = owner
        self.path = path
        self._rdma = rdma
        self._waiting = 0
        self._handlers: dict[type[wire.Message], Callable[[Any], Answer]] = {
            wire.Open: self._open,
            wire.Match: self._match,
            wire.Acquire: self._acquire,
            wire.Renew: self._renew,
            wire.Release: self._release,
            wire.Put: self._put,
            wire.Progress: self._progress,
            wire.Commit: self._commit,
            wire.Abort: self._abort,
            wire.Report: self._report,
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
        }

    def comes_by_rdma(self, client: RemoteClient) -> None:
        """From now on: it reads blocks itself, and lets the node read its own."""
        self.path = "rdma"
        self._handlers |= {wire.Lend: client.lend, wire.Offer: client.offer}

    @property
    def holds_anything(self) -> bool:
        return bool(self.store.holds.held_by(self.owner))

    def handle(self, request: wire.Message) -> Answer:
        """The reply, or a coroutine that makes it. Raises what the store raises; changes nothing then."""
        handler = self._handlers.get(type(request))
        if handler is None:
            raise ProtocolError(f"{type(request).__name__} does not belong here")
        self._admit(request)
        return handler(request)

    def receive(self, request: wire.Message) -> Receipt:
        """A request whose payload follows: where it goes. Continued by `received`, or `refuse` on a change of mind."""
        self._admit(request)
        if isinstance(request, wire.Commit):
            return receive_commit(self.store, self.owner, request)
        if isinstance(request, wire.Put) and request.checksums:
            return receive_put(self.store, self.owner, self._space(request.namespace), request)
        raise InvalidRequest(f"{type(request).__name__} has no payload")

    def received(self, receipt: Receipt) -> Answer:
        """The payload is in place: verify and commit it."""
        self.upkeep.room_was_taken()
        return complete(self.store, self.owner, receipt, self.path)

    def refuse(self, receipt: Receipt) -> None:
        """The payload is not what was announced: free its slots."""
        self.store.puts.abort(self.owner, receipt.grant_id)

    def _admit(self, request: wire.Message) -> None:
        self.store.counters.requests[str(request.__struct_config__.tag)] += 1
        if isinstance(request, WRITES) and not self.tenant.may_write:
            raise Forbidden(f"tenant {self.tenant.name} may only read")
        if isinstance(request, ADMIN) and not self.tenant.admin:
            raise Forbidden(f"tenant {self.tenant.name} is no admin")

    async def ask(self, request: wire.Message) -> Any:
        """`handle`, awaited whichever way it answers."""
        answer = self.handle(request)
        return await answer if isinstance(answer, Awaitable) else answer

    def end(self) -> None:
        """The client is gone, and so are its mappings: free what it held."""
        self.store.end(self.owner)

    def _space(self, number: int) -> OpenNamespace:
        return self.store.catalogue.numbered(self.tenant, number)

    def _open(self, request: wire.Open) -> Answer:
        if request.namespace is None:
            space = self.store.catalogue.find(self.tenant, request.name)
        else:
            space = self.store.open(self.tenant, request.name, request.namespace)
        return wire.Opened(request.id, space.number, space.root, space.namespace)

    # Reading.

    def _match(self, request: wire.Match) -> Answer:
        space = self._space(request.namespace)
        return wire.Matched(request.id, self.store.reads.match(space, keys_of(space, request.keys)))

    def _acquire(self, request: wire.Acquire) -> Answer:
        space = self._space(request.namespace)
        keys = keys_of(space, request.keys)
        if not request.tokens_per_s >= 0:
            raise InvalidRequest(f"tokens_per_s is 0 or more, not {request.tokens_per_s}")
        if request.tier:
            return self._acquire_above(request, space, keys)
        self.store.note_uses(self.owner)
        loading = 0
        if request.load_ms > 0:
            loading = self.store.promotion.begin(space, keys, request.load_ms / 1000, request.tokens_per_s)
        is_patient = (request.wait_ms > 0 or loading > 0) and self._waiting < MOST_WAITING
        lease, blocked = self.store.reads.try_acquire(
            self.owner,
            space,
            keys,
            lease_s=self._lease_s(request),
            layers=request.layers,
            partly=not is_patient,
        )
        if blocked is None or not is_patient:
            return self._acquired(request, lease)
        self._waiting += 1
        return self._acquire_later(request, space, keys)

    def _lease_s(self, request: wire.Acquire) -> float:
        """A delivery is held until it is sent, whatever the client says of a lease."""
        return self.store.limits.lease_max_s if request.deliver else request.lease_ms / 1000

    async def _acquire_later(self, request: wire.Acquire, space: OpenNamespace, keys: list[BlockKey]) -> wire.Message:
        try:
            lease = await self.store.reads.acquire(
                self.owner,
                space,
                keys,
                lease_s=self._lease_s(request),
                wait_s=request.wait_ms / 1000,
                layers=request.layers,
                load_s=request.load_ms / 1000,
                tokens_per_s=request.tokens_per_s,
            )
        finally:
            self._waiting -= 1
        return self._acquired(request, lease)

    def _acquire_above(self, request: wire.Acquire, space: OpenNamespace, keys: list[BlockKey]) -> Answer:
        lifting = lifting_of(self, request.tier)
        if request.deliver or request.layers:
            raise InvalidRequest("blocks in HBM are whole, and are not delivered")
        if self._waiting >= MOST_WAITING or lifting.is_here(space, keys):
            lease = lifting.hold(self.owner, space, keys, request.lease_ms / 1000)
            return self._acquired(request, lease, lifting.hbm.ready_event())
        self._waiting += 1
        return self._lift_later(request, lifting, space, keys)

    async def _lift_later(
        self, request: wire.Acquire, lifting: Lifting, space: OpenNamespace, keys: list[BlockKey]
    ) -> wire.Message:
        try:
            lease = await lifting.acquire(
                *(self.owner, space, keys),
                lease_s=request.lease_ms / 1000,
                wait_s=request.wait_ms / 1000,
                load_s=request.load_ms / 1000,
                tokens_per_s=request.tokens_per_s,
            )
        finally:
            self._waiting -= 1
        return self._acquired(request, lease, lifting.hbm.ready_event())

    def _acquired(self, request: wire.Acquire, lease: Lease | None, event: bytes = b"") -> wire.Message:
        replicas = lease.replicas if lease is not None else ()
        slots = [replica.slot for replica in replicas]
        self.store.counters.loaded_bytes[self.path] += sum(replica.size for replica in replicas)
        return wire.Acquired(
            request.id,
            lease.lease_id if lease is not None else 0,
            min(request.lease_ms, int(self.store.limits.lease_max_s * 1000)),
            pack_u64([slot.slab_id for slot in slots]),
            pack_u64([slot.offset for slot in slots]),
            pack_u64([replica.size for replica in replicas]),
            pack_u64([replica.checksum for replica in replicas]),
            pack_u64([replica.layers for replica in replicas]),
            event,
        )

    def _renew(self, request: wire.Renew) -> Answer:
        self.store.reads.renew(self.owner, request.lease_id, request.lease_ms / 1000)
        return wire.Done(request.id)

    def _release(self, request: wire.Release) -> Answer:
        if request.event:
            lifting_of(self, HBM).hbm.wait_event(request.event)  # before anything can be given the slots
        self.store.reads.release(self.owner, request.lease_id)
        return wire.Done(request.id)

    # Writing.

    def _put(self, request: wire.Put) -> Answer:
        if request.checksums:
            raise InvalidRequest("the blocks of a Put with checksums follow it as payload")
        space = self._space(request.namespace)
        keys = keys_of(space, request.keys)
        parent = BlockKey(request.parent) if request.parent else None
        sizes = unpack_u64(request.sizes)
        placing = self.store.puts.place(self.owner, space, keys, parent, sizes)
        if self.store.puts.needs_memory(placing, self.tenant):
            self.store.puts.withdraw(placing)  # a coroutine that is cancelled before it begins could not
            return self._put_later(request, space, keys, parent)
        return self._placed(request, space, keys, placing)

    async def _put_later(
        self, request: wire.Put, space: OpenNamespace, keys: list[BlockKey], parent: BlockKey | None
    ) -> wire.Message:
        placing = await self.store.puts.place_slowly(space, keys, parent, unpack_u64(request.sizes))
        return self._placed(request, space, keys, placing)

    def _placed(self, request: wire.Put, space: OpenNamespace, keys: list[BlockKey], placing: Placing) -> wire.Message:
        self.store.puts.granted(self.owner, space, keys, placing)
        self.upkeep.room_was_taken()
        slots = [replica.slot for replica in placing.replicas]
        return wire.Placed(
            request.id,
            placing.grant.grant_id if placing.grant is not None else 0,
            bytes(placing.placements),
            pack_u64([slot.slab_id for slot in slots]),
            pack_u64([slot.offset for slot in slots]),
        )

    def _progress(self, request: wire.Progress) -> Answer:
        if self.path != "shared":
            raise InvalidRequest("there are no layers in place before the payload, where memory is not shared")
        self.store.puts.progress(self.owner, request.grant_id, request.layers)
        return wire.Done(request.id)

    def _commit(self, request: wire.Commit) -> Answer:
        if self.path != "shared":
            raise InvalidRequest("the blocks of a Commit follow it as payload, where memory is not shared")
        self.store.puts.commit(self.owner, request.grant_id, unpack_u64(request.checksums), self.path)
        return wire.Done(request.id)

    def leased(self, lease_id: int) -> tuple[Replica, ...]:
        """The replicas of a lease that was just given."""
        return self.store.holds.leased(self.owner, lease_id)

    def _abort(self, request: wire.Abort) -> Answer:
        self.store.puts.abort(self.owner, request.grant_id)
        return wire.Done(request.id)

    async def _report(self, request: wire.Report) -> wire.Message:
        space = self._space(request.namespace)
        return wire.Reported(request.id, await self.store.verify(space, keys_of(space, request.keys)))

    # Operators.

    def _promote(self, request: wire.Promote) -> Answer:
        space = self._space(request.namespace)
        keys = keys_of(space, request.keys)
        self.store.intake.check_batch(space, keys)
        if request.load_ms <= 0:
            raise InvalidRequest("a load has time: load_ms above 0")
        return wire.Promoted(request.id, self.store.promotion.begin(space, keys, request.load_ms / 1000, 0.0))

    async def _demote(self, request: wire.Demote) -> wire.Message:
        space = self._space(request.namespace)
        keys = None if request.whole else keys_of(space, request.keys)
        self.store.intake.check_batch(space, keys or ())
        counts = await self.store.demotion.demote(
            *(space, keys, request.tier), evict=request.evict, within_budget=not self.tenant.admin
        )
        return wire.Demoted(request.id, *counts)

    async def _drain(self, request: wire.Drain) -> wire.Message:
        return wire.Drained(request.id, *await self.upkeep.drain(request.tier))

    def _evict(self, request: wire.Evict) -> Answer:
        space = self._space(request.namespace)
        if request.whole:
            return self._evict_all(request, space)
        keys = keys_of(space, request.keys)
        self.store.intake.check_batch(space, keys)
        return wire.Evicted(request.id, *self.store.discard(space, keys, Cause.DELETED, request.tier))

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
        return wire.Evicted(request.id, blocks, freed_bytes)

    def _pin(self, request: wire.Pin) -> Answer:
        space = self._space(request.namespace)
        keys = keys_of(space, request.keys)
        if request.ttl_ms <= 0:
            raise InvalidRequest("a pin has a time limit: ttl_ms above 0")
        pin = self.store.pin(space, keys, hard=request.hard, ttl_s=request.ttl_ms / 1000)
        if pin is None:
            return wire.Pinned(request.id, 0, 0)
        return wire.Pinned(request.id, pin.pin_id, len(pin.replicas))

    def _unpin(self, request: wire.Unpin) -> Answer:
        self.store.unpin(self.tenant, request.pin_id)
        return wire.Done(request.id)

    def _explain(self, request: wire.Explain) -> Answer:
        space = self._space(request.namespace)
        if len(request.tokens) % 4:
            raise InvalidRequest("tokens are u32: a multiple of 4 bytes")
        keys = keys_of(space, request.keys)
        if len(keys) > self.store.limits.batch_blocks:
            raise InvalidRequest(f"{len(keys)} blocks; batch_blocks is {self.store.limits.batch_blocks}")
        return wire.Explained(request.id, explain(self.store, space, keys, request.tokens))

    def _list(self, request: wire.List) -> Answer:
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

    def _stat(self, request: wire.Stat) -> Answer:
        self.store.note_uses()
        return wire.Stats(request.id, stats(self.store, self.upkeep, self.tenant, self._rdma))

    def _set_tier(self, request: wire.SetTier) -> Answer:
        self.upkeep.set_tier(
            request.tier,
            capacity_bytes=request.capacity_bytes,
            high_watermark=request.high_watermark,
            low_watermark=request.low_watermark,
        )
        return wire.Done(request.id)

    async def _check(self, request: wire.Check) -> wire.Message:
        return wire.Checked(request.id, await self.store.check())
