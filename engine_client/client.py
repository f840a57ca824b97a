"""The client for asyncio engines and services: many calls at once on one connection, each can be cancelled.

    async with Client("unix:///run/cairn/node.sock") as client:
        space = await client.open("llama", namespace)
        blocks = await client.get(space, space.keys(tokens), buffers)

Small local reads happen on the event loop (they take microseconds), copies in copier threads. A cancelled call
returns when no thread and no socket can still write into its buffers.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from engine_client import leases, operations, writes
from engine_client.address import Address, parse_address, tls_context
from engine_client.joining import join, may_join_later, rejoin
from engine_client.operating import AsyncOperating
from engine_client.pulls import Pulls
from engine_client.remote import Rdma, Registered, rdma_for
from engine_client.replies import Replies, open_replies
from engine_client.retry import Retry
from engine_client.steps import (
    Begin,
    Call,
    Finish,
    Grant,
    Held,
    Link,
    OpenSpace,
    Operation,
    Patience,
    Post,
    Pull,
    PutReport,
    Rejoin,
    Step,
    Work,
)
from kvstore import wire
from kvstore.copier import Copier
from kvstore.errors import (
    ConnectFailed,
    InvalidRequest,
    PeerLost,
    ProtocolError,
    StoreError,
)
from kvstore.prefix import Namespace
from kvstore.transport.local import Door, SharedMemory, View
from kvstore.transport.rdma.nic import DEFAULTS, Options
from kvstore.transport.rdma.verbs import Verbs
from kvstore.types import BlockKey

Result = TypeVar("Result")

ON_LOOP_BYTES = 64 << 10  # moved on the event loop; more in a copier thread


class Client(AsyncOperating):
    """Methods raise errors of kvstore.errors, each within `timeout_s` plus what the node was asked to wait.

    Args: see `BlockingClient`. To be used from one event loop. `tenant` is for a node that comes with the cluster's
    token; `lost` is called when a connection ends that was not hung up here.
    """

    def __init__(self, address: str, token: str = "", *, verify: bool = True, timeout_s: float = 5.0,
                 name: str = "", ca_file: str = "", copier_threads: int = 2, transport: str = "auto",
                 rdma: Options = DEFAULTS, verbs: Verbs | None = None, tenant: str = "",
                 lost: Callable[[], None] | None = None) -> None:  # fmt: skip
        self.address: Address = parse_address(address)
        self._token = token
        self._tenant = tenant
        self._lost = lost
        self._verify = verify
        self._timeout_s = timeout_s
        self._name = name or f"pid {os.getpid()}"
        self._tls = tls_context(ca_file) if self.address.tls else None
        self._is_forced = transport == "rdma"
        self._rdma: Rdma | None = rdma_for(transport, self.address, rdma, verbs)
        self._pulls: dict[Link, Pulls] = {}  # of the present connection, if it goes by RDMA
        self._copier = Copier(copier_threads)
        self._turn = asyncio.Lock()
        self._mapping = asyncio.Lock()  # memory is mapped by one at a time
        self._is_closed = False
        self._current: tuple[Link, Replies] | None = None
        self._openings: list[Callable[[Link], Operation[OpenSpace]]] = []
        self._retry = Retry()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Hang up, for good; the node frees what this client held. Calls under way end with a TransportError.

        First the threads end: until then they may be writing into slots that the node would give to others.
        """
        self._is_closed = True
        await asyncio.to_thread(self._copier.close)
        self._disconnect()
        if self._rdma is not None:
            self._rdma.close()

    # Operations; see engine_client.operations.

    async def connect(self) -> wire.Welcome:
        """Connect now rather than at the first call; what the node said of itself."""
        return await self._drive(operations.welcome)

    async def open(
        self, name: str, namespace: Namespace, part: int = 0, *, replicas: int = -1, through: bool = False
    ) -> OpenSpace:
        """Name a namespace and use it. The first to use a name says what it stands for.

        `replicas` is how many nodes of a cluster shall have each block, 0 for as many as it is wanted by, -1 for what
        was said last; `through`: commits wait for them.
        """
        space = OpenSpace(name, namespace, part=part)
        opening = partial(operations.open_space, space=space, replicas=replicas, through=through)
        await self._drive(opening)
        self._openings.append(opening)
        return space

    def register(self, buffer: Any) -> Registered:
        """Let NICs read and write this buffer in place, which saves a copy; see docs/rdma.md. Nothing without RDMA."""
        return self._rdma.register(buffer) if self._rdma is not None else Registered(None, buffer, None)

    async def find(self, name: str, part: int = 0) -> OpenSpace:
        """Use the namespace that a name stands for already. NotFound when it stands for none."""
        space = await self._drive(lambda link: operations.find_space(link, name, part))
        self._openings.append(partial(operations.open_space, space=space))
        return space

    async def match(self, space: OpenSpace, keys: Sequence[BlockKey], *, parent: BlockKey | None = None) -> int:
        """How many blocks of a chain the node has, from the first. Nothing is held. What other nodes of a
        cluster have counts too, from a chain's start, or after `parent`, the key before the first, if it is here."""
        return await self._drive(lambda link: operations.match(link, space, keys, parent))

    async def get(
        self,
        space: OpenSpace,
        keys: Sequence[BlockKey],
        targets: Sequence[Any],
        *,
        wait_s: float = 0.0,
        load_s: float | None = None,
        tokens_per_s: float = 0.0,
        parent: BlockKey | None = None,
    ) -> int:
        """Copy blocks of a chain into writable buffers, from the first; how many of them are in place.

        See `Patience`; without `load_s`, loads may take half of the client's time limit. `parent` as for `match`.
        """
        if len(targets) != len(keys):
            raise InvalidRequest(f"{len(targets)} buffers for {len(keys)} keys")
        patience = self._patience(wait_s, load_s, tokens_per_s)
        return await self._drive(
            lambda link: operations.get_rest(link, space, keys, targets, patience, None, parent=parent)
        )

    async def views(self, space: OpenSpace, keys: Sequence[BlockKey]) -> list[View]:
        """Blocks in place without a lease: use them, then ask each whether it `is_valid()`."""
        return await self._drive(lambda link: operations.views(link, space, keys))

    async def acquire(
        self,
        space: OpenSpace,
        keys: Sequence[BlockKey],
        *,
        lease_s: float,
        wait_s: float = 0.0,
        load_s: float | None = None,
        tokens_per_s: float = 0.0,
        layers: int = 0,
        parent: BlockKey | None = None,
    ) -> Held | None:
        """Hold the longest prefix that is here or comes in time (see `get`), in place. Shared memory only."""
        patience = self._patience(wait_s, load_s, tokens_per_s)
        return await self._drive(
            lambda link: leases.acquire(
                link, space, keys, lease_s=lease_s, patience=patience, layers=layers, parent=parent
            )
        )

    async def renew(self, held: Held, lease_s: float) -> None:
        """Keep it for longer. StaleLease when it lapsed."""
        await self._drive(lambda link: leases.renew(link, held, lease_s))

    async def release(self, held: Held) -> None:
        """Let go. Idempotent."""
        await self._drive(lambda link: leases.release(link, held))

    async def put(
        self,
        space: OpenSpace,
        keys: Sequence[BlockKey],
        blocks: Sequence[Any],
        parent: BlockKey | None = None,
    ) -> PutReport:
        """Store a run of a chain: those of its blocks that the node has not and has room for."""
        return await self._drive(lambda link: writes.put(link, space, keys, blocks, parent))

    async def place(
        self, space: OpenSpace, keys: Sequence[BlockKey], sizes: Sequence[int], parent: BlockKey | None = None
    ) -> Grant:
        """Ask for slots for a run of a chain; fill them, then `commit` or `abort`."""
        return await self._drive(lambda link: writes.place(link, space, keys, sizes, parent))

    async def progress(self, grant: Grant, layers: int) -> None:
        """The first `layers` layers of all slots are in place: readers that asked for that may begin."""
        await self._drive(lambda link: writes.progress(link, grant, layers))

    async def commit(self, grant: Grant, checksums: Sequence[int] | None = None) -> PutReport:
        """All slots are filled. StaleLease when it took too long, Corrupt when the bytes did not arrive well."""
        return await self._drive(lambda link: writes.commit(link, grant, checksums))

    async def abort(self, grant: Grant) -> None:
        """This client will not write into the slots any more. Idempotent."""
        await self._drive(lambda link: writes.abort(link, grant))

    def _patience(self, wait_s: float, load_s: float | None, tokens_per_s: float) -> Patience:
        return Patience(wait_s, self._timeout_s / 2 if load_s is None else load_s, tokens_per_s)

    # Driving.

    async def run(self, begin: Callable[[Link], Operation[Result]]) -> Result:
        """Run an operation that is none of the above."""
        return await self._drive(begin)

    async def _drive(self, begin: Callable[[Link], Operation[Result]]) -> Result:
        link, replies = await self._connected()
        return await self._run(begin(link), link, replies)

    async def _run(self, operation: Operation[Result], link: Link, replies: Replies) -> Result:
        """Run an operation on one connection: a later one may be to another node, with other memory.

        Cancelled, it lets the operation give back what it has, and is cancelled then whatever comes of it.
        """
        outcome: Any = None
        error: BaseException | None = None
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                step = operation.send(outcome) if error is None else operation.throw(error)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            except StoreError:
                if cancelled is not None:
                    raise cancelled from None
                raise
            outcome = error = None
            try:
                outcome = await (self._perform if cancelled is None else self._let_go)(step, link, replies)
            except asyncio.CancelledError as failure:
                error = cancelled = failure
            except BaseException as failure:
                error = failure

    async def _perform(self, step: Step, link: Link, replies: Replies) -> Any:
        if isinstance(step, Work):
            if 0 <= step.size <= ON_LOOP_BYTES:
                return step.run()
            if step.size >= 0:
                return await self._in_thread(step.run)
            async with self._mapping:
                return await self._in_thread(step.run)
        if isinstance(step, Finish):
            return await replies.finish(step.ticket, self._timeout_s)
        if isinstance(step, Pull | Rejoin):
            pulls = self._pulls.get(link)
            if pulls is not None:
                return await (pulls.rejoin() if isinstance(step, Rejoin) else pulls.pull(step, self._timeout_s))
            if isinstance(step, Pull):
                step.settled()
            raise PeerLost("the connection broke, and what it held is gone")
        if self._is_closed:
            raise PeerLost(f"{self.address}: this client was closed")
        if isinstance(step, Begin):
            return replies.begin(step.call)
        if isinstance(step, Post):
            return replies.post(step.request)
        return await replies.ask(step, self._timeout_s)

    async def _let_go(self, step: Step, link: Link, replies: Replies) -> Any:
        """A cancelled operation's step: say what is to be said, and wait for nothing. Replies to come are refused."""
        if isinstance(step, Finish):
            if replies.is_answered(step.ticket):
                return await replies.finish(step.ticket, self._timeout_s)
            replies.forget(step.ticket)
        if not isinstance(step, Call | Post):
            raise PeerLost("nobody waits for it any more")
        replies.post(step.request)

    async def _in_thread(self, run: Callable[[], Result]) -> Result:
        if self._is_closed:  # and its threads are gone
            raise PeerLost(f"{self.address}: this client was closed")
        return await self._copier.run(run)

    # Connecting.

    @property
    def is_connected(self) -> bool:
        """Whether a call would go out at once."""
        return self._current is not None and self._is_of_use(*self._current)

    async def _connected(self) -> tuple[Link, Replies]:
        current = self._current
        if current is not None and self._is_of_use(*current):
            return current
        async with self._turn:
            current = self._current
            if current is not None and self._is_of_use(*current):
                return current
            if self._is_closed:
                raise ConnectFailed(f"{self.address}: this client was closed")
            self._retry.check(self.address)
            self._disconnect()
            try:
                try:
                    self._current = await self._connect()
                except ConnectFailed:
                    if self._rdma is None or self._is_forced or self._rdma.health.is_well:
                        raise
                    self._current = await self._connect()
            except BaseException as error:
                self._retry.failed(error)
                raise
            self._retry.succeeded()
            return self._current

    def _is_of_use(self, link: Link, replies: Replies) -> bool:
        return replies.lost is None and (replies.is_in_use or not may_join_later(link, self._rdma))

    async def _connect(self) -> tuple[Link, Replies]:
        """By RDMA where both ends have it; once that failed, by TCP for a while."""
        replies = await open_replies(self.address, self._tls, self._timeout_s)
        link: Link | None = None
        try:
            link = await self._say_hello(replies)
            if self._rdma is not None:
                link.remote = await self._run(join(link, self._rdma, is_forced=self._is_forced), link, replies)
            if link.remote is not None:
                pulls = self._pulls[link] = Pulls(link.remote, lambda: self._run(rejoin(link), link, replies))
                pulls.take_over(replies)
            for opening in self._openings:
                await self._run(opening(link), link, replies)
            if self._is_closed:  # meanwhile
                raise ConnectFailed(f"{self.address}: this client was closed")
        except BaseException:
            self._hang_up(link, replies)
            raise
        replies.on_loss = self._lost
        return link, replies

    async def _say_hello(self, replies: Replies) -> Link:
        address = self.address
        hello = Call(lambda number: wire.Hello(number, wire.PROTOCOL, self._token, self._name, self._tenant))
        welcome = await replies.ask(hello, self._timeout_s)
        if not isinstance(welcome, wire.Welcome):
            raise ProtocolError(f"{address}: answered Hello with {type(welcome).__name__}")
        shared = None
        if address.path:
            door = Door(address.path, welcome.ticket)
            try:
                shared = await self._in_thread(lambda: SharedMemory(door, self._timeout_s, may_write=welcome.may_write))
            except BaseException:
                door.close()
                raise
        return Link(welcome, shared, self._verify, is_open=lambda: replies.lost is None)

    def _disconnect(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            self._hang_up(*current)

    def _hang_up(self, link: Link | None, replies: Replies) -> None:
        replies.hang_up()
        if link is not None and link in self._pulls:
            self._pulls.pop(link).close()
        if link is not None and link.shared is not None:
            link.shared.close()
