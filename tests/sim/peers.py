"""The protocol over the simulated network: a node's side of each connection, and what asks over one.

Every message is encoded where it is sent and decoded where it arrives, so the two sides share nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from kvstore import wire
from kvstore.catalogue import OpenNamespace
from kvstore.cluster.links import Lease
from kvstore.cluster.members import Member
from kvstore.copier import checksum
from kvstore.errors import ConnectFailed, DeadlineExceeded, NotFound, PeerLost, ProtocolError, StoreError
from kvstore.message import Message
from kvstore.packed import pack_keys, pack_u64, unpack_u64
from kvstore.types import BlockKey
from server.session import Session
from tests.sim.loop import Process
from tests.sim.network import End, Network, Parcel

FRAME_BYTES = 64 << 20
TOKEN = "of the cluster"
WITHIN_S = 5.0  # for what has no time limit of its own


class Door(Protocol):
    """Who asks: a tenant, another node for a tenant, or another node about the cluster."""

    def welcome(self, hello: wire.Hello) -> tuple[Any, wire.Welcome]:
        """(Its session, the answer)."""
        ...


class Served:
    """A node's end of a connection. Its session ends with it."""

    def __init__(self, end: End, door: Door) -> None:
        self._end = end
        self._door = door
        self._session: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        end.received = self._received
        end.broken = self._broken

    def _received(self, parcel: Parcel) -> None:
        request = wire.decode_request(_body(parcel.head))
        try:
            if self._session is None:
                self._session, welcome = self._door.welcome(request)
                self._send(welcome)
                return
            answer = self._answer(request, parcel.payload)
        except StoreError as error:
            self._send(wire.failed(request.id, error))
            return
        if isinstance(answer, Awaitable):
            task = asyncio.ensure_future(self._later(request, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._reply(request, answer)

    def _answer(self, request: Any, payload: bytes) -> Any:
        if not payload:
            return self._session.handle(request)
        receipt = self._session.receive(request)
        start = 0
        for target in receipt.targets:
            target[:] = payload[start : start + len(target)]
            start += len(target)
        return self._session.received(receipt)

    async def _later(self, request: Any, answer: Awaitable[Any]) -> None:
        try:
            reply = await answer
        except StoreError as error:
            self._send(wire.failed(request.id, error))
            return
        self._reply(request, reply)

    def _reply(self, request: Any, reply: Any) -> None:
        if not (isinstance(request, wire.Acquire) and request.deliver and reply.lease_id):
            self._send(reply)
            return
        session: Session = self._session
        blocks = [bytes(session.store.view(replica)) for replica in session.leased(reply.lease_id)]
        session.store.reads.release(session.owner, reply.lease_id)
        cut = wire.Acquired(reply.id, 0, 0, b"", b"", reply.sizes, reply.checksums, reply.layers)
        self._send(cut, b"".join(blocks))

    def _send(self, message: Message, payload: bytes = b"") -> None:
        self._end.send(Parcel(wire.encode(message, len(payload)), payload))

    def _broken(self) -> None:
        for task in sorted(self._tasks, key=hash):
            task.cancel()
        if self._session is not None:
            self._session.end()


class Caller:
    """The asking end of a connection."""

    def __init__(self, end: End, lost: Callable[[], None] = lambda: None) -> None:
        self._end = end
        self._lost = lost
        self._waiting: dict[int, asyncio.Future[tuple[Any, bytes]]] = {}
        self._orphans: dict[int, Callable[[Any], None]] = {}
        self._ids = 0
        self.is_lost = False
        self.numbers: dict[bytes, int] = {}  # namespaces at the other side, by root
        end.received = self._received
        end.broken = self._broken

    async def hello(self, tenant: str, token: str) -> wire.Welcome:
        self._ids += 1
        request = wire.Hello(self._ids, wire.PROTOCOL, token, self._end.host, tenant)
        welcome: wire.Welcome = (await self._answered(request, b"", WITHIN_S))[0]
        return welcome

    async def ask(self, request: Callable[[int], Message], within_s: float, *, payload: bytes = b"",
                  orphan: Callable[[Any], None] | None = None) -> tuple[Any, bytes]:  # fmt: skip
        """(The reply, its payload). Who does not wait for it any more leaves it to `orphan`."""
        self._ids += 1
        return await self._answered(request(self._ids), payload, within_s, orphan)

    def tell(self, request: Callable[[int], Message]) -> None:
        """Whatever is answered."""
        self._ids += 1
        self._end.send(Parcel(wire.encode(request(self._ids)), may_stray=False))

    def close(self) -> None:
        self._lost = lambda: None
        self._end.close()
        self._broken()

    async def _answered(self, request: Any, payload: bytes, within_s: float,
                        orphan: Callable[[Any], None] | None = None) -> tuple[Any, bytes]:  # fmt: skip
        if self.is_lost:
            raise PeerLost(f"{self._end.other.host} is lost")
        future: asyncio.Future[tuple[Any, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        may_stray = type(request).__module__.endswith("wire_cluster")
        self._end.send(Parcel(wire.encode(request, len(payload)), payload, may_stray))
        try:
            async with asyncio.timeout(within_s):
                reply, blocks = await future
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._end.other.host} did not answer within {within_s} s") from error
        finally:
            if self._waiting.pop(request.id, None) is not None and orphan is not None:
                if future.done() and not future.cancelled() and future.exception() is None:
                    orphan(future.result()[0])  # it came, and was not taken
                else:
                    self._orphans[request.id] = orphan
        if isinstance(reply, wire.Failed):
            raise wire.to_error(reply)
        return reply, blocks

    def _received(self, parcel: Parcel) -> None:
        reply = wire.decode_reply(_body(parcel.head))
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result((reply, parcel.payload))
        elif reply.id in self._orphans:
            self._orphans.pop(reply.id)(reply)

    def _broken(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._lost()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost(f"{self._end.other.host} is lost"))


class SimulatedLinks:
    """`kvstore.cluster.links.Links` of one node over the simulated network."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self._callers: dict[tuple[str, str], Caller] = {}
        self._connecting: dict[tuple[str, str], asyncio.Task[Caller]] = {}
        self.lost: Callable[[str], None] = lambda name: None  # hears of each member to which a connection broke

    async def ask(self, member: Member, request: Callable[[int], Message], within_s: float) -> Any:
        try:
            async with asyncio.timeout(within_s):
                caller = await self._caller(member, "")
                return (await caller.ask(request, within_s))[0]
        except TimeoutError as error:
            raise DeadlineExceeded(f"{member.name} did not answer within {within_s} s") from error

    async def lease(
        self, member: Member, space: OpenNamespace, keys: Sequence[BlockKey], *, lease_s: float, load_s: float
    ) -> Lease | None:
        caller = await self._caller(member, space.tenant.name)
        number = await self._number(caller, space)
        if number is None:
            return None

        def request(id: int) -> wire.Acquire:
            return wire.Acquire(
                id, number, pack_keys(keys), int(lease_s * 1000), deliver=False, load_ms=int(load_s * 1000)
            )

        def orphan(reply: Any) -> None:
            if isinstance(reply, wire.Acquired) and reply.lease_id:
                caller.tell(lambda id: wire.Release(id, reply.lease_id))

        reply, _ = await caller.ask(request, load_s + WITHIN_S, orphan=orphan)
        if not reply.lease_id:
            return None
        sizes, checksums = unpack_u64(reply.sizes), unpack_u64(reply.checksums)
        return Lease(member, space, tuple(keys[: len(sizes)]), sizes, checksums, (caller, reply.lease_id))

    async def read(self, lease: Lease, start: int, views: Sequence[memoryview], within_s: float) -> list[int]:
        caller, _ = lease.handle
        keys = pack_keys(lease.keys[start : start + len(views)])
        number = caller.numbers[lease.space.root]
        reply, payload = await caller.ask(lambda id: wire.Acquire(id, number, keys, 0, deliver=True), within_s)
        found = []
        position = 0
        for view, size in zip(views, unpack_u64(reply.sizes), strict=False):
            if size != len(view):
                raise ProtocolError(f"a block of {size} bytes for a view of {len(view)}")
            view[:] = payload[position : position + size]
            position += size
            found.append(checksum(view))
        return found

    def report(self, lease: Lease, key: BlockKey) -> None:
        caller, _ = lease.handle
        number = caller.numbers[lease.space.root]
        caller.tell(lambda id: wire.Report(id, number, key))

    def release(self, lease: Lease) -> None:
        caller, lease_id = lease.handle
        caller.tell(lambda id: wire.Release(id, lease_id))

    def close(self, name: str) -> None:
        for key in [key for key in self._connecting if key[0] == name]:
            self._connecting.pop(key).cancel()
        for key in [key for key in self._callers if key[0] == name]:
            self._callers.pop(key).close()

    async def aclose(self) -> None:
        for name in dict.fromkeys(name for name, _ in [*self._callers, *self._connecting]):
            self.close(name)

    async def _number(self, caller: Caller, space: OpenNamespace) -> int | None:
        if space.root not in caller.numbers:
            try:
                opened, _ = await caller.ask(lambda id: wire.Open(id, "", space.namespace), WITHIN_S)
            except NotFound:
                return None
            caller.numbers[space.root] = opened.number
        return caller.numbers[space.root]

    async def _caller(self, member: Member, tenant: str) -> Caller:
        key = (member.name, tenant)
        found = self._callers.get(key)
        if found is not None and not found.is_lost:
            return found
        if key not in self._connecting:
            task = self._connecting[key] = asyncio.ensure_future(self._connect(member, tenant))
            task.add_done_callback(lambda done: self._connected(key, done))
        connecting = self._connecting[key]
        await asyncio.wait([connecting])
        if connecting.cancelled():
            raise PeerLost(f"{member.name} is gone")
        return connecting.result()

    def _connected(self, key: tuple[str, str], task: "asyncio.Task[Caller]") -> None:
        if self._connecting.get(key) is task:
            del self._connecting[key]
        if not task.cancelled() and task.exception() is None:
            self._callers[key] = task.result()

    async def _connect(self, member: Member, tenant: str) -> Caller:
        try:
            async with asyncio.timeout(WITHIN_S):
                end = await self._network.connect(member.name)
                caller = Caller(end, lambda: self.lost(member.name))
                welcome = await caller.hello(tenant, TOKEN)
        except TimeoutError as error:
            raise ConnectFailed(f"{member.name} cannot be reached") from error
        if welcome.epoch != member.epoch:
            caller.close()
            raise PeerLost(f"{member.name} was started again")
        return caller


async def connected(network: Network, process: Process, host: str, token: str) -> tuple[Caller, wire.Welcome]:
    """A client's connection, as the tenant of that token."""
    caller = Caller(await network.connect(host, process))
    return caller, await caller.hello("", token)


def packed_sizes(blocks: Sequence[bytes]) -> tuple[bytes, bytes]:
    """(Sizes, checksums) as a Put has them."""
    return pack_u64([len(block) for block in blocks]), pack_u64([checksum(block) for block in blocks])


def _body(head: bytes) -> bytes:
    frame = wire.parse_header(head[: wire.HEADER.size], FRAME_BYTES)
    assert len(head) == wire.HEADER.size + frame.body_bytes
    return head[wire.HEADER.size :]
