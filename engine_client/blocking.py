"""A client for synchronous engines: each call does its work in the calling thread, within its time limit.

    with BlockingClient("unix:///run/cairn/node.sock") as client:
        space = client.open("llama", namespace)
        keys = space.keys(tokens)
        blocks = client.get(space, keys, buffers)

Local reads of blocks in DRAM take neither lock nor round trip, from any thread. Everything else takes turns on
one connection. After an error of the connection the next call connects again; leases and grants of before are
gone then, as the node has freed them.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from engine_client import leases, operations, writes
from engine_client.address import Address, open_stream, parse_address, tls_context
from engine_client.joining import join, may_join_later, rejoin
from engine_client.operating import Operating
from engine_client.pulls import pull_in_thread
from engine_client.remote import Rdma, Registered, rdma_for
from engine_client.retry import REPLY_BYTES, Retry
from engine_client.slots import Slots
from engine_client.steps import (
    Begin,
    Call,
    Finish,
    Grant,
    Held,
    Link,
    Loan,
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
from kvstore.errors import (
    ConnectFailed,
    DeadlineExceeded,
    InvalidRequest,
    PeerLost,
    ProtocolError,
)
from kvstore.prefix import Namespace
from kvstore.transport.blocking import FrameSocket
from kvstore.transport.local import Door, SharedMemory
from kvstore.transport.rdma.channel_socket import ChannelSocket
from kvstore.transport.rdma.nic import DEFAULTS, Options
from kvstore.transport.rdma.verbs import Verbs
from kvstore.types import BlockKey

Result = TypeVar("Result")

LOOK_S = 0.05  # between two looks at the connection by calls that need nothing of it
LEAST_S, MOST_S = 0.001, 86_400.0  # a socket's limit is above 0, and a lock's below 300 years


class BlockingClient(Operating, Slots):
    """Methods raise errors of kvstore.errors, each within `timeout_s` plus what the node was asked to wait.

    Args:
        address: see `parse_address`.
        token: not needed over a Unix socket whose file lets this user in.
        verify: compare each block read through shared memory with its checksum; over a network always done.
        name: says who is asking, for the node's log.
        ca_file: authorities to trust for tls://, else the system's.
        transport: auto, local, rdma or tcp; see docs/rdma.md. `rdma` and `verbs` say how, and by which binding.
    """

    def __init__(self, address: str, token: str = "", *, verify: bool = True, timeout_s: float = 5.0,
                 name: str = "", ca_file: str = "", transport: str = "auto", rdma: Options = DEFAULTS,
                 verbs: Verbs | None = None) -> None:  # fmt: skip
        self.address: Address = parse_address(address)
        self._token = token
        self._verify = verify
        self._timeout_s = timeout_s
        self._name = name or f"pid {os.getpid()}"
        self._tls = tls_context(ca_file) if self.address.tls else None
        self._is_forced = transport == "rdma"
        self._rdma: Rdma | None = rdma_for(transport, self.address, rdma, verbs)
        self._turn = threading.RLock()
        self._stream: FrameSocket | None = None
        self._link: Link | None = None
        self._openings: list[Callable[[Link], Operation[OpenSpace]]] = []
        self._retry = Retry()
        self._look_at = 0.0
        self._until = math.inf
        self._left: list[tuple[FrameSocket, Link | None]] = []  # given up, and still open

    def __enter__(self) -> "BlockingClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; the node frees what this client held. Nobody may be using it any more."""
        with self._turn:
            self._disconnect()
            while self._left:
                self._left.pop()[0].close()
            if self._rdma is not None:
                self._rdma.close()

    # Operations; see engine_client.operations.

    def connect(self, within_s: float | None = None) -> wire.Welcome:
        """Connect now rather than at the first call; what the node said of itself."""
        return self._drive(operations.welcome, within_s)

    def open(
        self, name: str, namespace: Namespace, part: int = 0, *, replicas: int = -1, through: bool = False
    ) -> OpenSpace:
        """Name a namespace and use it; see `Client.open`."""
        space = OpenSpace(name, namespace, part=part)
        opening = partial(operations.open_space, space=space, replicas=replicas, through=through)
        self._drive(opening)
        self._openings.append(opening)
        return space

    def register(self, buffer: Any) -> Registered:
        """Let NICs read and write this buffer in place, which saves a copy; see docs/rdma.md. Nothing without RDMA."""
        with self._turn:
            return self._rdma.register(buffer) if self._rdma is not None else Registered(None, buffer, None)

    def find(self, name: str, part: int = 0) -> OpenSpace:
        """Use the namespace that a name stands for already. NotFound when it stands for none."""
        space = self._drive(lambda link: operations.find_space(link, name, part))
        self._openings.append(partial(operations.open_space, space=space))
        return space

    def match(self, space: OpenSpace, keys: Sequence[BlockKey], *, within_s: float | None = None,
              parent: BlockKey | None = None) -> int:  # fmt: skip
        """How many blocks of a chain the node has, from the first. Nothing is held; `parent`: see `Client.match`."""
        number, shared = space.number, self._shared(space)
        if shared is not None and shared.reader.is_complete:
            return shared.reader.match(number, keys, space.namespace.parts)
        return self._drive(lambda link: operations.match(link, space, keys, parent), within_s)

    def get(
        self,
        space: OpenSpace,
        keys: Sequence[BlockKey],
        targets: Sequence[Any],
        *,
        wait_s: float = 0.0,
        load_s: float | None = None,
        tokens_per_s: float = 0.0,
        within_s: float | None = None,
        parent: BlockKey | None = None,
    ) -> int:
        """Copy blocks of a chain into writable buffers, from the first; how many of them are in place.

        The rest is not here, damaged, or did not come in time: see `Patience`; without `load_s`, loads may take half
        of the client's time limit. Buffers beyond may be scribbled on. `within_s` bounds the whole call:
        DeadlineExceeded.
        """
        if len(targets) != len(keys):
            raise InvalidRequest(f"{len(targets)} buffers for {len(keys)} keys")
        local = None
        patience = self._patience(wait_s, load_s, tokens_per_s)
        prefix, shared = space.prefix, self._shared(space)
        if shared is not None:
            local = shared.get_into(prefix, keys, targets, verify=self._verify)
            if local.blocks == len(keys):
                return local.blocks

        def rest(link: Link) -> Operation[int]:
            so_far = local if link.shared is shared else None  # else the node was restarted meanwhile
            return operations.get_rest(link, space, keys, targets, patience, so_far, parent=parent)

        return self._drive(rest, within_s, max(wait_s, load_s or 0.0))

    def acquire(
        self,
        space: OpenSpace,
        keys: Sequence[BlockKey],
        *,
        lease_s: float,
        wait_s: float = 0.0,
        load_s: float | None = None,
        tokens_per_s: float = 0.0,
        layers: int = 0,
        within_s: float | None = None,
        parent: BlockKey | None = None,
    ) -> Held | None:
        """Hold the longest prefix that is here or comes in time (see `get`), in place. Shared memory only.

        With `layers` a block that is being written counts as soon as that many layers of it are in place.
        """
        patience = self._patience(wait_s, load_s, tokens_per_s)
        hold = partial(leases.acquire, lease_s=lease_s, patience=patience, layers=layers, parent=parent)
        return self._drive(lambda link: hold(link, space, keys), within_s, max(wait_s, load_s or 0.0))

    def release(self, held: Held, within_s: float | None = None) -> None:
        """Let go. Idempotent."""
        if self._is_of_now(held):
            self._drive(lambda link: leases.release(link, held), within_s)

    def put(
        self,
        space: OpenSpace,
        keys: Sequence[BlockKey],
        blocks: Sequence[Any],
        parent: BlockKey | None = None,
    ) -> PutReport:
        """Store a run of a chain: those of its blocks that the node has not and has room for."""
        return self._drive(lambda link: writes.put(link, space, keys, blocks, parent))

    def abort(self, grant: Grant) -> None:
        """This client will not write into the slots any more. Idempotent."""
        if self._is_of_now(grant):
            self._drive(lambda link: writes.abort(link, grant))

    # Driving.

    def _patience(self, wait_s: float, load_s: float | None, tokens_per_s: float) -> Patience:
        return Patience(wait_s, self._timeout_s / 2 if load_s is None else load_s, tokens_per_s)

    def _drive(
        self, begin: Callable[[Link], Operation[Result]], within_s: float | None = None, wait_s: float = 0.0
    ) -> Result:
        """Run an operation. `within_s`, else the client's limit and `wait_s`, bounds all its waiting."""
        limit_s = min(max(self._timeout_s + wait_s if within_s is None else within_s, 0.0), MOST_S)
        until = time.monotonic() + limit_s
        if not self._turn.acquire(timeout=limit_s):
            raise DeadlineExceeded(f"another thread's call took longer than {limit_s} s")
        outer, self._until = self._until, min(until, self._until)
        try:
            link = self._connected()
            if link.shared is not None:
                link.shared.timeout_s = max(self._until - time.monotonic(), LEAST_S)
            return self._run(begin(link))
        finally:
            self._until = outer
            if self._left:
                self._leave()
            self._turn.release()

    def _run(self, operation: Operation[Result]) -> Result:
        outcome: Any = None
        error: BaseException | None = None
        while True:
            try:
                step = operation.send(outcome) if error is None else operation.throw(error)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            except BaseException:
                if self._stream is not None and self._stream.is_in_use:
                    self._disconnect()
                raise
            outcome = error = None
            try:
                outcome = self._perform(step)
            except BaseException as failure:
                error = failure

    def _perform(self, step: Step) -> Any:
        if isinstance(step, Work):
            return step.run()
        if isinstance(step, Rejoin):
            assert self._link is not None
            return self._run(rejoin(self._link))
        return self._exchange(step) if not isinstance(step, Pull) else pull_in_thread(step, self._link, self._until)

    def _exchange(self, step: Call | Post | Begin | Finish) -> Any:
        """Over the connection; after an error it is given up, since what comes next on it is unknown."""
        if self._stream is None:
            raise PeerLost("the connection broke, and what it held is gone")
        try:
            if isinstance(step, Post):
                return self._stream.post(step.request, self._until)
            if isinstance(step, Begin):
                return self._stream.begin(step.call.request, step.call.payload, self._until)
            if isinstance(step, Finish):
                reply = self._stream.finish(step.ticket, None, self._until)
            else:
                number = self._stream.begin(step.request, step.payload, self._until)
                reply = self._stream.finish(number, step.targets, self._until)
        except TimeoutError as error:
            self._disconnect()
            raise DeadlineExceeded(f"{self.address}: no answer in time") from error
        except OSError as error:
            self._disconnect()
            raise PeerLost(f"{self.address}: {error.strerror or error}") from error
        except BaseException:
            self._disconnect()
            raise
        if isinstance(reply, wire.Failed):
            raise wire.to_error(reply)
        return reply

    def _is_of_now(self, loan: Loan) -> bool:
        """Whether the node has to be told that it is given back. With a connection that was given up it need not."""
        if loan.link is self._link:
            return True
        loan.give_back()
        with self._turn:
            self._leave()
        return False

    # Connecting.

    def _shared(self, space: OpenSpace) -> SharedMemory | None:
        """The memory to read `space` in without asking the node; None when the node must be asked first.

        A node that is gone is noticed within LOOK_S: until then its blocks are still right, just not its own.
        """
        link, stream = self._link, self._stream
        if link is None or stream is None or link.shared is None or space.epoch != link.welcome.epoch:
            return None
        now = time.monotonic()
        if now >= self._look_at:
            if not stream.is_open():
                return None
            self._look_at = now + LOOK_S
        return link.shared

    def _connected(self) -> Link:
        link, stream = self._link, self._stream
        if link is not None and stream is not None and stream.is_open():
            is_to_stay = stream.is_in_use or not may_join_later(link, self._rdma)
            if is_to_stay:
                return link
        self._retry.check(self.address)
        self._disconnect()
        try:
            try:
                self._link = self._connect()
            except ConnectFailed:
                if self._rdma is None or self._is_forced or self._rdma.health.is_well:
                    raise
                self._disconnect()
                self._link = self._connect()
            for opening in self._openings:
                self._run(opening(self._link))
        except BaseException as error:
            self._disconnect()
            self._retry.failed(error)
            raise
        self._retry.succeeded()
        return self._link

    def _connect(self) -> Link:
        """By RDMA where both ends have it; once that failed, by TCP for a while."""
        raw = open_stream(self.address, self._tls, self._until)
        self._stream = FrameSocket(raw, REPLY_BYTES)
        link = self._say_hello(self._stream.is_open)
        if self._rdma is not None:
            link.remote = self._run(join(link, self._rdma, is_forced=self._is_forced))
        if link.remote is not None:
            peer = link.remote.peer
            assert peer.channel is not None
            self._stream = FrameSocket(ChannelSocket(peer.channel, raw, peer.close), REPLY_BYTES)
            link.is_open, link.lifeline = self._stream.is_open, self._stream.fileno
        return link

    def _say_hello(self, is_open: Callable[[], bool]) -> Link:
        welcome = self._exchange(Call(lambda number: wire.Hello(number, wire.PROTOCOL, self._token, self._name)))
        if not isinstance(welcome, wire.Welcome):
            raise ProtocolError(f"{self.address}: answered Hello with {type(welcome).__name__}")
        shared = None
        if self.address.path:
            timeout_s = max(self._until - time.monotonic(), LEAST_S)
            shared = SharedMemory(Door(self.address.path, welcome.ticket), timeout_s, may_write=welcome.may_write)
        return Link(welcome, shared, self._verify, is_open=is_open)

    def _disconnect(self) -> None:
        """Give the connection up. It stays open while somebody here may be in the node's memory."""
        stream, link, self._stream, self._link = self._stream, self._link, None, None
        if stream is not None:
            self._left.append((stream, link))
        if link is not None and link.shared is not None:
            link.shared.close()
        self._leave()

    def _leave(self) -> None:
        """Close the given up connections of which nobody has anything any more."""
        left, self._left = self._left, []
        for stream, link in left:
            if link is not None and link.shared is not None and link.lent and stream.is_open():
                self._left.append((stream, link))
            else:
                stream.close()
