"""Connections to the other nodes of the cluster: one about the cluster, and one per tenant for its blocks."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from engine_client import peer_reads
from engine_client.address import tls_context
from engine_client.client import Client
from engine_client.peer_reads import Numbers
from engine_client.steps import Call, Link, Operation
from kvstore import wire
from kvstore.catalogue import OpenNamespace
from kvstore.cluster.links import Lease
from kvstore.cluster.members import Member
from kvstore.errors import ConnectFailed, DeadlineExceeded, NotFound, PeerLost, StoreError
from kvstore.message import Message
from kvstore.packed import unpack_u64
from kvstore.tasks import Tasks
from kvstore.transport.rdma.nic import Options
from kvstore.transport.rdma.verbs import Verbs
from kvstore.types import BlockKey

Result = TypeVar("Result")

CONNECT_S = 2.0  # for a connection, and for an answer to which nothing says otherwise
ABOUT_THE_CLUSTER = ""


class Handle(NamedTuple):
    """What a lease was got on."""

    peer: "Peer"
    link: Link
    number: int  # of the namespace there
    held: wire.Acquired


@dataclass(slots=True, eq=False)
class Peer:
    """A connection to one start of a member, for one tenant."""

    member: Member
    client: Client
    numbers: Numbers
    connecting: "asyncio.Future[None] | None" = None  # for all who wait for a connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How this node comes to others. `transport` as for `Client`."""

    me: str
    token: str
    ca_file: str = ""
    transport: str = "auto"
    rdma: Options
    verbs: Verbs | None = None


class PeerLinks:
    """`lost` is called with the name of a member to which a connection broke. Raises ConfigError for `ca_file`."""

    def __init__(self, manner: Manner, lost: Callable[[str], None], crashed: Callable[[BaseException], None]) -> None:
        self._manner = manner
        self._lost = lost
        self._tasks = Tasks(crashed)
        self._peers: dict[tuple[str, str], Peer] = {}  # by member and tenant
        self._is_closed = False
        if manner.ca_file:
            tls_context(manner.ca_file)  # a wrong one is told at once

    async def ask(self, member: Member, request: Callable[[int], Message], within_s: float) -> Any:
        peer = self._peer(member, ABOUT_THE_CLUSTER)
        call = Call(request, wait_s=max(within_s - CONNECT_S, 0.0))
        return await self._within(peer, within_s, lambda link: peer_reads.about(link, call))

    async def lease(
        self, member: Member, space: OpenNamespace, keys: Sequence[BlockKey], *, lease_s: float, load_s: float
    ) -> Lease | None:
        peer = self._peer(member, space.tenant.name)

        def hold(link: Link) -> Operation[Handle | None]:
            number = yield from peer.numbers.of(link, space.root, space.namespace)
            held = yield from peer_reads.hold(link, number, keys, lease_s, load_s)
            return Handle(peer, link, number, held) if held is not None else None

        try:
            handle = await self._within(peer, CONNECT_S + load_s, hold)
        except NotFound:
            return None
        if handle is None:
            return None
        sizes, checksums = unpack_u64(handle.held.sizes), unpack_u64(handle.held.checksums)
        return Lease(member, space, keys[: len(sizes)], sizes, checksums, handle)

    async def read(self, lease: Lease, start: int, views: Sequence[memoryview], within_s: float) -> list[int]:
        handle: Handle = lease.handle

        def fetch(link: Link) -> Operation[list[int]]:
            if link is not handle.link:
                raise PeerLost("the connection broke, and the lease with it")
            return (yield from peer_reads.fetch(link, handle.number, lease.keys, handle.held, start, views))

        return await self._within(handle.peer, within_s, fetch)

    def report(self, lease: Lease, key: BlockKey) -> None:
        handle: Handle = lease.handle
        self._post(handle.peer, lambda link: peer_reads.report(link, handle.number, key))

    def release(self, lease: Lease) -> None:
        handle: Handle = lease.handle
        if handle.link.is_open():
            self._post(handle.peer, lambda link: peer_reads.let_go(link, handle.link, handle.held.lease_id))

    def close(self, name: str) -> None:
        for key in [key for key in self._peers if key[0] == name]:
            self._tasks.spawn(self._peers.pop(key).client.aclose())

    async def aclose(self) -> None:
        self._is_closed = True
        peers, self._peers = list(self._peers.values()), {}
        await asyncio.gather(*(peer.client.aclose() for peer in peers))
        await self._tasks.aclose()

    def _peer(self, member: Member, tenant: str) -> Peer:
        if self._is_closed:
            raise ConnectFailed(f"{member.name}: this node hung up on all others")
        peer = self._peers.get((member.name, tenant))
        if peer is not None and (peer.member.epoch, peer.member.address) != (member.epoch, member.address):
            self.close(member.name)
            peer = None
        if peer is None:
            manner = self._manner
            client = Client(
                *(member.address, manner.token),
                timeout_s=CONNECT_S,
                name=f"node {manner.me}",
                ca_file=manner.ca_file,
                transport=manner.transport if tenant else "tcp",
                rdma=manner.rdma,
                verbs=manner.verbs,
                tenant=tenant,
                lost=lambda: self._lost(member.name),
            )
            peer = self._peers[member.name, tenant] = Peer(member, client, Numbers())
        return peer

    async def _within(self, peer: Peer, within_s: float, begin: Callable[[Link], Operation[Result]]) -> Result:
        try:
            async with asyncio.timeout(within_s):
                await self._connected(peer)
                return await peer.client.run(lambda link: _at(peer.member, link, begin))
        except TimeoutError as error:
            raise DeadlineExceeded(f"{peer.member.name} did not answer in {within_s} s") from error

    async def _connected(self, peer: Peer) -> None:
        """One connects for all who ask meanwhile; it goes on when they wait no more, and would else never end."""
        if peer.client.is_connected:
            return
        connecting = peer.connecting
        if connecting is None or connecting.done():
            connecting = peer.connecting = asyncio.get_running_loop().create_future()
            self._tasks.spawn(self._connect(peer, connecting))
        await asyncio.wait([connecting])
        connecting.result()

    async def _connect(self, peer: Peer, connecting: "asyncio.Future[None]") -> None:
        failure: StoreError = PeerLost("this node hung up on all others")
        try:
            await peer.client.connect()
        except StoreError as error:
            failure = error
        else:
            connecting.set_result(None)
        finally:
            if not connecting.done():
                connecting.set_exception(failure)
                connecting.exception()  # looked at: nobody may wait for it any more

    def _post(self, peer: Peer, begin: Callable[[Link], Operation[None]]) -> None:
        async def post() -> None:
            with suppress(StoreError):
                await self._within(peer, CONNECT_S, begin)

        work: Coroutine[Any, Any, None] = post()
        self._tasks.spawn(work)


def _at(member: Member, link: Link, begin: Callable[[Link], Operation[Result]]) -> Operation[Result]:
    """PeerLost when another node, or another start of it, is at the member's address by now."""
    welcome = link.welcome
    if (welcome.node, welcome.epoch) != (member.name, member.epoch):
        raise PeerLost(f"at {member.address} there is {welcome.node}, epoch {welcome.epoch}, not {member.name}")
    return (yield from begin(link))
