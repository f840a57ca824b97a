"""A client that comes by RDMA: the slabs that it may read, and the blocks that the node reads from it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.errors import InvalidRequest, PeerLost
from kvstore.packed import pack_u64, unpack_u64
from kvstore.replica import Replica
from kvstore.transport.rdma.memory import Memory
from kvstore.transport.rdma.peer import Peer
from kvstore.transport.rdma.pull import Watch, pull
from kvstore.transport.rdma.transfer import Fetch, merged
from kvstore.types import DRAM, Cause
from kvstore.wire_rdma import Fetched, Lend, Lent, Offer
from server.rdma import NodeRdma

if TYPE_CHECKING:
    from server.session import Session

MOST_LENT = 4096  # slabs in one request
MOST_KEY = (1 << 32) - 1
MOST_ADDRESS = (1 << 63) - 1  # with what is added to it for slices, it stays in 64 bits


class RemoteClient:
    """Serves Lend and Offer of one session. `peer` is its end of the queue pairs; `close` with the connection."""

    def __init__(self, session: "Session", rdma: NodeRdma, peer: Peer) -> None:
        self.peer = peer
        self.watch = Watch(peer.paths)
        self._session = session
        self._rdma = rdma

    def close(self) -> None:
        self.watch.stop()
        self._rdma.close_peer(self.peer)

    @property
    def is_idle(self) -> bool:
        return self.peer.paths.is_idle

    async def lend(self, request: Lend) -> Lent:
        slab_ids = unpack_u64(request.slab_ids)
        if len(slab_ids) > MOST_LENT:
            raise InvalidRequest(f"{len(slab_ids)} slabs at once; at most {MOST_LENT}")
        addresses: list[int] = []
        sizes: list[int] = []
        rkeys: list[int] = []
        for slab_id in slab_ids:
            memory = await self._slab(slab_id)
            addresses.append(memory.address if memory is not None else 0)
            sizes.append(memory.size if memory is not None else 0)
            rkeys += memory.rkeys if memory is not None else [0] * len(self._rdma.ports)
        return Lent(request.id, pack_u64(addresses), pack_u64(sizes), pack_u64(rkeys))

    async def _slab(self, slab_id: int) -> Memory | None:
        """None for one that is gone, or another tenant's."""
        session = self._session
        slab = session.store.table.tiers[DRAM].pool.slabs.get(slab_id)
        if slab is None or slab.tenants != {session.tenant.name}:
            return None
        return await self._rdma.memory(session.tenant.name, slab_id, session.store.dram.region(slab_id))

    async def offer(self, request: Offer) -> Fetched:
        """READ the blocks of a grant from the client's memory, verify, commit. The slots are held until no NIC writes
        into them, whatever becomes of the grant, the client or this call.

        PeerLost when they did not come, and may be offered again.
        """
        session = self._session
        store, owner = session.store, session.owner
        checksums, addresses, rkeys = map(unpack_u64, (request.checksums, request.addresses, request.rkeys))
        ports = self.peer.other_ports
        if any(rkey > MOST_KEY for rkey in rkeys) or any(address > MOST_ADDRESS for address in addresses):
            raise InvalidRequest("no memory has such keys or addresses")
        if len(addresses) != len(checksums) or len(rkeys) != ports * len(addresses):
            raise InvalidRequest(f"{len(addresses)} addresses and {len(rkeys)} keys of {len(checksums)} blocks")
        slots = store.puts.receive(owner, request.grant_id, len(checksums))
        replicas = store.holds.granted(owner, request.grant_id).replicas
        for replica in replicas:
            store.own.hold(replica)
        try:
            try:
                fetches = [
                    await self._fetch(replica, addresses[at], rkeys[at * ports : (at + 1) * ports])
                    for at, replica in enumerate(replicas)
                ]
            except BaseException:
                self._let_go(replicas)
                raise
            slice_bytes = self._rdma.options.slice_bytes
            await pull(self.watch, self.peer.paths, merged(fetches, slice_bytes), slice_bytes=slice_bytes,
                       timeout_s=store.limits.put_timeout_s, settled=lambda: self._let_go(replicas))  # fmt: skip
            found = await store.copier.checksums(slots)
        except PeerLost:  # by now no NIC writes into the slots; after others one may, and they are given up
            store.puts.receive_again(owner, request.grant_id)
            raise
        except BaseException:
            store.puts.abort(owner, request.grant_id, Cause.ABORTED)
            raise
        copies = session.copies_of(request.grant_id)
        store.puts.commit_verified(owner, request.grant_id, checksums, found, session.path)
        session.upkeep.room_was_taken()
        if copies is not None:
            await copies.made()
        down = (number for number, path in enumerate(self.peer.paths.paths) if not path.is_up)
        return Fetched(request.id, tuple(down))

    async def _fetch(self, replica: Replica, address: int, rkeys: Sequence[int]) -> Fetch:
        slab_id = replica.slot.slab_id
        store = self._session.store
        memory = await self._rdma.memory(self._session.tenant.name, slab_id, store.dram.region(slab_id))
        return Fetch(memory.address + replica.slot.offset, memory.lkeys, address, rkeys, replica.size, memory.numa_node)

    def _let_go(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            self._session.store.own.let_go(replica)
