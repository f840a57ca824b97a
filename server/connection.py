"""One client's connection, Unix or TCP: frames in, replies out, payloads straight from and into slots.

Whatever the client does (dies, hangs, lies, sends garbage), the connection ends at worst, and with it the
session: its leases and half-written blocks are freed, and nobody else notices.
"""

import array
import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore import wire
from kvstore.catalogue import Tenant
from kvstore.errors import Forbidden, InvalidRequest, ProtocolError, Rejected, StoreError, TransportError
from kvstore.transport.rdma.channel_stream import ChannelTransport
from kvstore.transport.rdma.verbs import VerbsError
from kvstore.transport.stream import FrameStream, sink
from server.cluster_session import ClusterSession
from server.lending import lent
from server.receipt import Receipt
from server.remote import RemoteClient
from server.session import Answer, Session

if TYPE_CHECKING:
    from server.node import Node

log = logging.getLogger("cairn.connection")

CONCURRENT_REQUESTS = 64  # of one connection that wait for something; it is not read from beyond
UNSENT_BYTES = 1 << 20  # replies a client may leave unread before it is not read from any more
KEEPALIVE_S = 30
DESCRIPTORS = 64  # in one message; the kernel takes 253


class Connection(FrameStream):
    """`kind` is "unix" or "tcp". The session begins with Hello and ends with the connection."""

    def __init__(self, node: "Node", kind: str) -> None:
        super().__init__(node.config.limits.frame_bytes)
        self._node = node
        self.kind = kind
        self._session: Session | ClusterSession | None = None
        self._ticket = b""
        # Whose payload is coming in, and where it goes; with an error it goes to the sink.
        self._incoming: tuple[wire.Message, Receipt | StoreError] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._remote: RemoteClient | None = None
        self.client = ""
        self.was_used = False
        self.is_stranger = True  # has not said who it is
        self.closed = asyncio.Event()

    # Frames.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.kind == "tcp":  # a host that vanished ends the session, and frees what it held
            stream = transport.get_extra_info("socket")
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 3)
        self._watch = self._after(self._node.config.rest.request_timeout, "no Hello in time")
        self._look_again()
        if not self._node.connected(self):
            self._fail(0, Rejected("this node has as many connections as it takes: limits.connections"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for timer in filter(None, (self._watch, self._look)):
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._session is not None:
            self._session.end()
        self.end_rdma()
        self._node.disconnected(self, self._ticket)
        self.closed.set()

    def broken(self, error: ProtocolError) -> None:
        log.warning("%s client %r: %s", self.kind, self.client, error)
        self._fail(0, error)

    def frame_received(self, body: bytes, payload_bytes: int) -> Sequence[memoryview]:
        request = wire.decode_request(body)
        self.was_used = True
        if payload_bytes:
            return self._payload_targets(request, payload_bytes)
        if isinstance(request, wire.Attach):
            self._spawn(self._hand_over(request))
        elif self._session is None:
            self._begin(request)
        elif isinstance(request, wire.Join) and isinstance(self._session, Session):
            self._spawn(self._join(self._session, request))
        else:
            self._answer(request, lambda session: session.handle(request))
        self._hold_back()
        return ()

    def _answer(self, request: wire.Message, ask: Callable[[Session | ClusterSession], Answer]) -> None:
        assert self._session is not None
        try:
            answer = ask(self._session)
        except StoreError as error:
            self._fail(request.id, error)
            return
        if isinstance(answer, wire.Message):
            self._reply(request, answer)
        else:
            self._spawn(self._answer_later(request, answer))

    async def _answer_later(self, request: wire.Message, answer: Awaitable[wire.Message]) -> None:
        try:
            self._reply(request, await answer)
        except StoreError as error:
            self._fail(request.id, error)

    def _begin(self, request: wire.Message) -> None:
        """The first request: who is it, and is it let in?"""
        try:
            self.send(wire.encode(self._welcome(request)))
        except StoreError as error:
            self._fail(request.id, error)
            self.close()

    def _welcome(self, request: Any) -> wire.Message:
        if not isinstance(request, wire.Hello):
            raise ProtocolError("a connection begins with Hello")
        if request.protocol != wire.PROTOCOL:
            raise ProtocolError(f"this node speaks protocol {wire.PROTOCOL}, not {request.protocol}")
        door = self._node.doorkeeper
        local = self.kind == "unix"
        if not local and door.admit_node(request.token):
            return self._welcome_node(request)
        tenant = door.admit_local(request.token) if local else door.admit(request.token)
        self._session = self._node.new_session(tenant, "shared" if local else "tcp")
        self.client = request.client[:64]
        if local:
            self._ticket = secrets.token_bytes(16)
            self._node.tickets[self._ticket] = self._session
        self._known()
        return self._greeting(request, tenant, may_write=tenant.may_write, is_local=local)

    def _welcome_node(self, request: wire.Hello) -> wire.Message:
        """Another node of the cluster: for a tenant's blocks, or about the cluster."""
        if self._node.cluster is None:
            raise Rejected("this node is not in the cluster yet", 0.1)
        self.client = request.client[:64]
        tenant = Tenant("") if not request.tenant else replace(self._node.doorkeeper.named(request.tenant), admin=False)
        if request.tenant:
            self._session = self._node.new_session(replace(tenant, may_write=False), "peer")
        else:
            self._session = ClusterSession(self._node.cluster, self._node.store.counters)
        self._known()
        return self._greeting(request, tenant, may_write=False, is_local=False)

    def _greeting(self, request: wire.Hello, tenant: Tenant, *, may_write: bool, is_local: bool) -> wire.Message:
        limits = self._node.config.limits
        return wire.Welcome(
            request.id,
            wire.PROTOCOL,
            self._node.config.node.name,
            self._node.epoch,
            tenant.name,
            self._ticket,
            may_write,
            tenant.admin,
            self._node.config.tiers.dram.slab,
            limits.batch_blocks,
            limits.frame_bytes,
            () if is_local or not tenant.name else self._node.rdma.ports,
        )

    # RDMA.

    async def _join(self, session: Session, request: wire.Join) -> None:
        """Connect queue pairs; the first time, then go on by the channel of theirs instead of TCP."""
        try:
            if self._remote is not None:
                self.send(wire.encode(self._remote.peer.accept(request)))
                self._remote.watch.refresh()
                return
            if self.kind != "tcp" or request.channel is None:
                raise InvalidRequest("a first Join comes over TCP, and has a channel")
            peer = self._node.rdma.peer(session.tenant.name, self)
            try:
                joined = peer.accept(request)
            except BaseException:
                self._node.rdma.close_peer(peer)
                raise
        except VerbsError as error:
            self._fail(request.id, TransportError(f"no queue pair: {error}"))
        except StoreError as error:
            self._fail(request.id, error)
        else:
            remote = self._remote = RemoteClient(session, self._node.rdma, peer)
            session.comes_by_rdma(remote)
            self.send(wire.encode(joined))
            await self.drained()
            channel = peer.channel
            assert channel is not None, "a first Join has a channel"
            try:
                self.move_to(lambda lifeline: ChannelTransport(channel, self, lifeline, remote.close))
            except StoreError as error:
                self._drop(str(error))
            remote.watch.refresh()

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and its session holds nothing."""
        idle = self._remote is None or self._remote.is_idle
        return idle and not self._tasks and self._session is not None and not self._session.holds_anything

    # Answers.

    def _reply(self, request: Any, reply: wire.Message) -> None:
        if isinstance(request, wire.Acquire) and request.deliver:
            assert isinstance(reply, wire.Acquired)
            self._deliver(reply)
        else:
            self.send(wire.encode(reply))

    def _fail(self, request_id: int, error: StoreError) -> None:
        self._node.store.counters.errors[error.code] += 1
        self.send(wire.encode(wire.failed(request_id, error)))
        if isinstance(error, ProtocolError):
            self.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._node.crashed(task.exception())
        self._hold_back()

    def _hold_back(self) -> None:
        """Take up nothing from a client that has too much going on, or does not read what it asked for."""
        if self._transport is None:
            return
        unread = self.is_draining and self._transport.get_write_buffer_size() > UNSENT_BYTES
        if unread or len(self._tasks) >= CONCURRENT_REQUESTS:
            self.hold()
        else:
            self.go_on()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._hold_back()

    # Payloads.

    def _deliver(self, reply: wire.Acquired) -> None:
        """Send blocks straight from their slots, as many as may be in flight; they are held until they are sent."""
        assert isinstance(self._session, Session)
        if not reply.lease_id:
            self.send(wire.encode(reply))
            return
        session, lease_id = self._session, reply.lease_id
        blocks, size = [], 0
        for replica in session.leased(lease_id):
            size += replica.size
            if size > self._node.config.limits.inflight_bytes:
                break
            blocks.append(session.store.view(replica))
        end = 8 * len(blocks)
        cut = wire.Acquired(reply.id, 0, 0, b"", b"", reply.sizes[:end], reply.checksums[:end], reply.layers[:end])
        self.send(wire.encode(cut, sum(map(len, blocks))), blocks)
        limits = self._node.config.limits
        self._spawn(self._release_when_sent(session, lease_id, min(limits.put_timeout, limits.lease_max / 2)))

    async def _release_when_sent(self, session: Session, lease_id: int, patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                await self.drained()
        except TimeoutError:
            self._drop("does not read its blocks")
        finally:
            session.store.reads.release(session.owner, lease_id)

    def _payload_targets(self, request: wire.Message, payload_bytes: int) -> Sequence[memoryview]:
        limits = self._node.config.limits
        if self._session is None:
            raise ProtocolError("a connection begins with Hello")
        if payload_bytes > limits.inflight_bytes:
            raise ProtocolError(f"a payload of {payload_bytes} bytes; inflight_bytes is {limits.inflight_bytes}")
        self._set_watch(self._after(limits.put_timeout, "payload not complete in time"))
        try:
            receipt = self._session.receive(request)
            if receipt.size_bytes != payload_bytes:
                self._session.refuse(receipt)
                raise InvalidRequest(f"a payload of {payload_bytes} bytes for blocks of {receipt.size_bytes}")
        except StoreError as error:
            self._incoming = request, error
            return sink(payload_bytes)
        self._incoming = request, receipt
        return receipt.targets

    def payload_received(self) -> None:
        assert self._incoming is not None, "a payload has a request"
        (request, receipt), self._incoming = self._incoming, None
        self._set_watch(None)
        if isinstance(receipt, StoreError):
            self._fail(request.id, receipt)
        else:
            self._answer(request, lambda session: session.received(receipt))
        self._hold_back()

    # Descriptors.

    async def _hand_over(self, request: wire.Attach) -> None:
        """Answer with descriptors. Needs no Hello: the ticket says whose session it is."""
        descriptors: list[int] = []
        try:
            session = self._node.tickets.get(request.ticket) if self.kind == "unix" else None
            if session is None:
                raise Forbidden("no session has this ticket; it comes in Welcome over the Unix socket")
            if len(request.slab_ids) > DESCRIPTORS:
                raise InvalidRequest(f"{len(request.slab_ids)} descriptors at once; at most {DESCRIPTORS}")
            if self.is_stranger:
                self._known()
            await self.drained()
            regions, writable, handles = lent(session, request.slab_ids, request.tier)
            for region, may_write in zip(regions, writable, strict=True):
                descriptors.append(os.dup(region.fd) if may_write else region.readonly_fd())
            sizes = tuple(region.size for region in regions)
            self._send_descriptors(wire.encode(wire.Attached(request.id, sizes, handles)), descriptors)
        except StoreError as error:
            self._fail(request.id, error)
        except OSError as error:  # it went, or does not read what it asked for, or this process has no descriptors left
            self._drop(f"cannot be handed descriptors: {error.strerror}")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _send_descriptors(self, frame: bytes, descriptors: list[int]) -> None:
        if self._transport is None:
            return
        with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as handle:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            if handle.sendmsg([frame], [rights]) != len(frame):
                self._drop("does not read its descriptors")

    # Ends.

    def _known(self) -> None:
        self.is_stranger = False
        self._set_watch(None)

    def _look_again(self, frames: int = 0, *, was_midway: bool = False) -> None:
        """Each `put_timeout`: who is in the middle of the same frame as a `put_timeout` ago is dropped."""

        def look() -> None:
            if was_midway and self.is_midway and frames == self.frames:
                self._drop("frame not complete in time")
            else:
                self._look_again(self.frames, was_midway=self.is_midway)

        self._look = asyncio.get_running_loop().call_later(self._node.config.limits.put_timeout, look)

    def _after(self, seconds: float, reason: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._drop, reason)

    def _set_watch(self, watch: asyncio.TimerHandle | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = watch

    def _drop(self, reason: str) -> None:
        """End it at once."""
        log.warning("%s client %r: %s", self.kind, self.client, reason)
        if self._transport is not None:
            self._transport.abort()

    def make_way(self) -> None:
        """Somebody else needs its place."""
        self._drop("makes way for others that wait: limits.connections, rdma.peers")
        self.end_rdma()

    def end_rdma(self) -> None:
        """No NIC touches memory for it any more. Idempotent."""
        if self._remote is not None:
            self._remote.close()

    def close(self) -> None:
        """Listen no more, and close once what was said is sent; at once for a client that does not take it."""
        self.listen_no_more()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            self._set_watch(self._after(1.0, "does not take its last answer"))
