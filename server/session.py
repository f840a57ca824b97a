"""One client's dealings with the node: each wire request becomes a call of the store, for one tenant.

Connections and REST use it alike, so both have the same limits, checks and errors. `handle` answers at once
where nothing has to be waited for, else with a coroutine.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from kvstore import wire
from kvstore.catalogue import OpenNamespace, Tenant
from kvstore.cluster.service import Cluster
from kvstore.errors import Forbidden, InvalidRequest, ProtocolError, Rejected
from kvstore.holds import Lease
from kvstore.intake import Placing
from kvstore.lifting import Lifting
from kvstore.packed import pack_u64, unpack_u64
from kvstore.store import Store
from kvstore.table import Replica
from kvstore.types import HBM, BlockKey, Owner
from kvstore.upkeep import Upkeep
from kvstore.wire_cluster import MOST_COPIES
from server.lending import lifting_of
from server.operator_requests import OperatorRequests
from server.rdma import NodeRdma
from server.receipt import Receipt, complete, keys_of, receive_commit, receive_put
from server.remote import RemoteClient

Answer = wire.Message | Awaitable[wire.Message]

WRITES = (wire.Put, wire.Progress, wire.Commit, wire.Offer, wire.Abort, wire.Demote, wire.Evict, wire.Pin, wire.Unpin)
ADMIN = (wire.SetTier, wire.Check, wire.Drain)
MOST_WAITING = 32  # acquires of one client; more are answered at once, or its own commits could not be read


class Copies(NamedTuple):
    """Blocks of a commit that is answered once other nodes have them too, or after a while."""

    cluster: Cluster
    space: OpenNamespace
    keys: list[BlockKey]

    async def made(self) -> None:
        await self.cluster.copied(self.space, self.keys)


class Session:
    """`path` names how blocks travel to this client: shared, tcp, rdma, rest or peer; for the counters.

    With `is_peer` the client is another node of `cluster`: it gets what is here, and no third node is asked for it.
    """

    def __init__(self, store: Store, upkeep: Upkeep, tenant: Tenant, owner: Owner, path: str, *,
                 rdma: NodeRdma | None = None, cluster: Cluster | None = None,
                 is_peer: bool = False) -> None:  # fmt: skip
        self.store = store
        self.upkeep = upkeep
        self.tenant = tenant
        self.owner = owner
        self.path = path
        self.rdma = rdma
        self.cluster = cluster
        self.is_peer = is_peer
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
            **OperatorRequests(self).handlers(),
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
        copies = self.copies_of(receipt.grant_id) if receipt.grant_id else None
        reply = complete(self.store, self.owner, receipt, self.path)
        return reply if copies is None else self._answer_copied(reply, copies)

    def refuse(self, receipt: Receipt) -> None:
        """The payload is not what was announced: free its slots."""
        self.store.puts.abort(self.owner, receipt.grant_id)

    def _admit(self, request: wire.Message) -> None:
        self.store.counters.requests[str(request.__struct_config__.tag)] += 1
        if isinstance(request, WRITES) and not self.tenant.may_write:
            raise Forbidden(f"tenant {self.tenant.name} may only read")
        if isinstance(request, wire.Put) and self.cluster is not None and self.cluster.is_draining:
            raise Rejected("this node is being emptied, and takes no blocks")
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
        if self.is_peer and request.namespace is not None and not request.name:
            space = self.store.catalogue.of_fields(self.tenant, request.namespace)
        elif request.namespace is None:
            space = self.store.catalogue.find(self.tenant, request.name)
        else:
            space = self.store.open(self.tenant, request.name, request.namespace)
        if request.replicas >= 0:
            self._keep_copies(space, request)
        return wire.Opened(request.id, space.number, space.root, space.namespace)

    def _keep_copies(self, space: OpenNamespace, request: wire.Open) -> None:
        if request.replicas > 1 and self.cluster is None:
            raise InvalidRequest("replicas are for a cluster, and this node is in none: cluster.coordinator")
        if request.replicas > MOST_COPIES or (request.through and request.replicas < 2):
            raise InvalidRequest(f"{request.replicas} replicas: from 0 to {MOST_COPIES}, 2 at least to wait for")
        if not self.tenant.may_write:
            raise Forbidden(f"tenant {self.tenant.name} may only read")
        space.replicas, space.through = request.replicas, request.through

    # Reading.

    def _match(self, request: wire.Match) -> Answer:
        space = self._space(request.namespace)
        keys = keys_of(space, request.keys)
        matched = self.store.reads.match(space, keys)
        if self.cluster is not None and not self.is_peer and matched < len(keys):
            return self._match_all(request, self.cluster, space, keys)
        return wire.Matched(request.id, matched)

    async def _match_all(
        self, request: wire.Match, cluster: Cluster, space: OpenNamespace, keys: list[BlockKey]
    ) -> wire.Message:
        parent = BlockKey(request.parent) if request.parent else None
        return wire.Matched(request.id, await cluster.pulling.reach(space, keys, parent))

    def _acquire(self, request: wire.Acquire) -> Answer:
        space = self._space(request.namespace)
        keys = keys_of(space, request.keys)
        if not request.tokens_per_s >= 0:
            raise InvalidRequest(f"tokens_per_s is 0 or more, not {request.tokens_per_s}")
        if request.tier:
            return self._acquire_above(request, space, keys)
        self.store.note_uses(self.owner)
        loading = 0
        if self.cluster is not None and not self.is_peer and request.load_ms > 0 and self._waiting < MOST_WAITING:
            if not self.store.reads.is_here(space, keys, request.layers):
                self._waiting += 1
                return self._acquire_later(request, space, keys)
        elif request.load_ms > 0:
            loading = self.store.promotion.begin(space, keys, request.load_ms / 1000, request.tokens_per_s)
        is_patient = (request.wait_ms > 0 or loading > 0) and self._waiting < MOST_WAITING
        if request.enough > 0 and self.store.reads.is_here(space, keys[: request.enough], request.layers):
            is_patient = False
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
                parent=BlockKey(request.parent) if request.parent else None,
                alone=self.is_peer,
                enough=request.enough,
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
        if not self.is_peer or request.deliver or self.path == "rdma":
            self.store.counters.loaded_bytes[self.path] += sum(replica.size for replica in replicas)
        if self.is_peer and self.cluster is not None and not request.deliver:
            self.cluster.was_read(replicas)
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
        copies = self.copies_of(request.grant_id)
        self.store.puts.commit(self.owner, request.grant_id, unpack_u64(request.checksums), self.path)
        reply = wire.Done(request.id)
        return reply if copies is None else self._answer_copied(reply, copies)

    def copies_of(self, grant_id: int) -> Copies | None:
        """What is to be copied before the commit of this grant is answered, if its namespace says so."""
        if self.cluster is None:
            return None
        replicas = self.store.holds.granted(self.owner, grant_id).replicas
        space = self.store.catalogue.of_number(replicas[0].space.number)
        if space is None or not space.through:
            return None
        return Copies(self.cluster, space, [replica.key for replica in replicas])

    async def _answer_copied(self, reply: Answer, copies: Copies) -> wire.Message:
        committed = await reply if isinstance(reply, Awaitable) else reply
        await copies.made()
        return committed

    def leased(self, lease_id: int) -> tuple[Replica, ...]:
        """The replicas of a lease that was just given."""
        return self.store.holds.leased(self.owner, lease_id)

    def _abort(self, request: wire.Abort) -> Answer:
        self.store.puts.abort(self.owner, request.grant_id)
        return wire.Done(request.id)

    async def _report(self, request: wire.Report) -> wire.Message:
        space = self._space(request.namespace)
        return wire.Reported(request.id, await self.store.verify(space, keys_of(space, request.keys)))
