"""Membership in etcd: a key with a lease for each member, kept by a thread of its own, so that a busy node is alive.

The thread has one connection at a time, to one of the endpoints, and gives it up for the next at any failure. A
connection begins with saying who we are and listing who is there; from that revision on it watches. So nothing depends
on what a broken watch may have missed, nor on what etcd has compacted.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from itertools import cycle
from threading import Thread
from typing import Any

import msgspec

from kvstore.cluster.members import DEAD_S, HEARTBEAT_S, Member, View
from kvstore.errors import ConfigError, ConnectFailed

FAILURES: tuple[type[Exception], ...]
try:
    import grpc.aio  # type: ignore[import-untyped]
    from etcd3aio import EtcdError
    from etcd3aio.kv import KVService, prefix_range_end
    from etcd3aio.lease import LeaseService
    from etcd3aio.watch import WatchService

    FAILURES = (EtcdError, grpc.RpcError, OSError)
except ImportError:
    FAILURES = ()

CALL_S = 1.0  # for one call to etcd: less than DEAD_S, so that a hung server leaves time to ask another
JOIN_S = 5.0
LEAVE_S = 1.9
RETRY_S = 0.3  # between two connections
LONGEST_PAUSE_S = 30.0  # before joining again, for one whom others report dead again and again
SETTLED_S = 60.0  # whoever was a member for so long joins again at once
CLAIMS = 3  # of a name whose key changes meanwhile
MAX_MESSAGE_BYTES = 64 << 20  # 100,000 members, listed in one answer
CHANNEL = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new connection does not wait for the pause of a broken one
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)


class EtcdCoordinator:
    """A `Coordinator` over the etcd servers at `endpoints`, (host, port) each, for all that have the same `prefix`.
    Raises ConfigError when what it needs is not installed."""

    def __init__(self, endpoints: Sequence[tuple[str, int]], prefix: str) -> None:
        if not FAILURES:
            raise ConfigError("membership in etcd needs a package: pip install 'cairn-kv[cluster]'")
        self._endpoints = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in endpoints]
        self._prefix = f"{prefix.rstrip('/')}/members/"
        self._loop: asyncio.AbstractEventLoop  # of the thread, from `join` on
        self._membership: _Membership | None = None
        self._ended: Future[None] = Future()

    @property
    def trouble(self) -> str:
        return self._membership.trouble if self._membership is not None else ""

    async def join(self, member: Member, changed: Callable[[View], Any]) -> None:
        """As of `Coordinator`, within `JOIN_S`. After an error or a cancellation it has left."""
        assert self._membership is None, "a coordinator is for one start of a node"
        caller = asyncio.get_running_loop()

        def hear(view: View) -> None:
            caller.call_soon_threadsafe(changed, view)

        self._membership = membership = _Membership(self._endpoints, self._prefix, member, hear)
        self._loop = asyncio.SelectorEventLoop()
        Thread(target=self._run, args=(membership,), name="cairn-membership", daemon=True).start()
        try:
            async with asyncio.timeout(JOIN_S):
                await asyncio.wrap_future(membership.joined)
        except BaseException as error:
            why = membership.trouble
            await self.aclose()
            if isinstance(error, TimeoutError):
                raise ConnectFailed(why or f"no answer from etcd at {self._endpoints[0]}") from error
            raise

    async def update(self, member: Member) -> None:
        """As of `Coordinator`; returns before it is said."""
        if self._membership is not None:
            self._tell(self._membership.update, member)

    async def report_dead(self, name: str, epoch: int) -> None:
        """As of `Coordinator`; returns before it is said. Out of touch it is not said."""
        if self._membership is not None:
            self._tell(self._membership.report_dead, name, epoch)

    async def aclose(self) -> None:
        """As of `Coordinator`, within `LEAVE_S`. Where etcd does not hear of it, the lease ends by itself."""
        if self._membership is not None:
            self._tell(self._membership.leaving.set)
            await asyncio.wait([asyncio.wrap_future(self._ended)], timeout=LEAVE_S)

    def _tell(self, what: Callable[..., None], *about: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: it has left
            self._loop.call_soon_threadsafe(what, *about)

    def _run(self, membership: "_Membership") -> None:
        self._loop.set_exception_handler(_without_noise)
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(membership.run())
        finally:
            self._ended.set_result(None)


class _Membership:
    """What the thread does: one start of a node as a member, over one connection after the other."""

    def __init__(self, endpoints: Sequence[str], prefix: str, member: Member, hear: Callable[[View], None]) -> None:
        self.joined: Future[None] = Future()
        self._endpoints, self._endpoint, self._prefix = endpoints, endpoints[0], prefix
        self._member, self._hear = member, hear
        self.leaving, self._to_say = asyncio.Event(), asyncio.Event()
        self._line: _Line | None = None  # while in touch
        self._reports: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._lease = 0
        self._said: Member | None = None  # stands in etcd, as far as we know, since `_said_at`
        self._said_at = 0
        self._pause_s = 0.0
        self._not_before = 0.0  # joining again, by the loop's clock
        self._believed_at = 0.0  # when it became a member last
        self._listed: dict[str, Member] = {}
        self._listed_at = 0
        self._view = View()
        self._settled_at = 0.0
        self._away = self._away_since = self._taken = ""

    @property
    def trouble(self) -> str:
        """For any thread; all else is for this one."""
        return self._away or self._taken

    def update(self, member: Member) -> None:
        assert (member.name, member.epoch) == (self._member.name, self._member.epoch), "another start of a node"
        self._member = member
        self._to_say.set()

    def report_dead(self, name: str, epoch: int) -> None:
        key = name, epoch
        if self._line is not None and key not in self._reports and View(members=self._listed).has(name, epoch):
            self._reports[key] = asyncio.get_running_loop().create_task(self._report(self._line, name, epoch))
            self._reports[key].add_done_callback(lambda _: self._reports.pop(key))

    async def run(self) -> None:
        """Be a member until told to leave, and tell etcd so."""
        self.joined.set_running_or_notify_cancel()
        staying = asyncio.ensure_future(self._stay())
        leaving = asyncio.ensure_future(self.leaving.wait())
        await asyncio.wait({staying, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if staying.done():
            self._away = "membership has ended: see the log"
            if not self.joined.done():
                self.joined.set_exception(staying.exception() or AssertionError("not a member, and not staying"))
                return
            staying.result()
        stopped = [staying, *self._reports.values()]
        for task in stopped:
            task.cancel()
        await asyncio.wait(stopped)
        await self._revoke()

    async def _stay(self) -> None:
        for endpoint in cycle(self._endpoints):
            self._endpoint = endpoint
            line = _Line(endpoint, self._prefix)
            try:
                await self._keep_in_touch(line)
            except* FAILURES as failures:
                self._out_of_touch(failures)
            finally:
                self._line = None
                await line.close()
            await asyncio.sleep(RETRY_S)

    async def _keep_in_touch(self, line: "_Line") -> None:
        await self._beat(line)
        revision, members = await line.members()
        self._in_touch(line, revision, members)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(line, revision + 1))
            tasks.create_task(self._keep_beating(line))

    async def _keep_beating(self, line: "_Line") -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._to_say.wait()
            self._to_say.clear()
            await self._beat(line)

    async def _beat(self, line: "_Line") -> None:
        """Keep the lease, or get another, and see to it that what this member says of itself is in etcd."""
        loop = asyncio.get_running_loop()
        if self._lease and not await line.keep_alive(self._lease):
            self._lease, self._said = 0, None
        if self._said == self._member or loop.time() < self._not_before:
            return
        if not self._lease:
            self._lease = await line.grant()
        member = self._member
        try:
            self._said_at = await line.claim(member, self._lease)
        except ConfigError as taken:
            if not self.joined.done():
                raise
            self._taken = str(taken)
            self._not_before = loop.time() + DEAD_S
            return
        if self._said is None:
            self._believed_at = loop.time()
        self._said, self._taken = member, ""

    async def _watch(self, line: "_Line", revision: int) -> None:
        is_open = False
        async for answer in line.changes(revision):
            if answer.compact_revision or answer.canceled or (answer.created and is_open):
                raise ConnectionError("the watch broke")  # what came meanwhile may be missing: list again
            is_open = True
            for event in answer.events:
                self._apply(line.named(event.kv.key), event.kv.mod_revision, event.kv.value)
            if answer.events:
                self._listed_at = answer.events[-1].kv.mod_revision
                self._show()
        raise ConnectionError("the watch ended")

    def _apply(self, name: str, revision: int, value: bytes) -> None:
        """Take in a change of one key; `value` is empty when it was deleted."""
        member = _decoded(name, value)
        if member is None:
            self._listed.pop(name, None)
        else:
            self._listed[name] = member
        if name == self._member.name and revision > self._said_at:
            self._look_for_oneself()

    def _look_for_oneself(self) -> None:
        """Join again when this start of the node is listed no more, the more slowly the more often that happens."""
        if self._said is None or View(members=self._listed).has(self._member.name, self._member.epoch):
            return
        now = asyncio.get_running_loop().time()
        if now - self._believed_at > SETTLED_S:
            self._pause_s = 0.0
        self._not_before = now + self._pause_s
        self._pause_s = min(max(2 * self._pause_s, HEARTBEAT_S), LONGEST_PAUSE_S)
        self._said = None
        self._to_say.set()

    def _in_touch(self, line: "_Line", revision: int, members: dict[str, Member]) -> None:
        loop = asyncio.get_running_loop()
        if self._away and self._view.revision:
            self._settled_at = loop.time() + DEAD_S
            loop.call_later(DEAD_S, self._show)
        self._line = line
        self._away = self._away_since = ""
        self._listed, self._listed_at = members, revision
        self._look_for_oneself()
        self._show()
        if not self.joined.done():
            self.joined.set_result(None)

    def _out_of_touch(self, failures: BaseExceptionGroup) -> None:
        reason: BaseException = failures
        while isinstance(reason, BaseExceptionGroup):
            reason = reason.exceptions[0]
        self._away_since = self._away_since or f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        what = str(reason) or type(reason).__name__
        self._away = f"no etcd in touch since {self._away_since}; last tried {self._endpoint}: {what[:200]}"

    def _show(self) -> None:
        """Let the node hear who is there, if that changed. Back in touch, who is not listed is kept for `DEAD_S`: an
        etcd that was away has ended leases of living members, who say so within that time."""
        if self._away:
            return
        members = self._listed
        if asyncio.get_running_loop().time() < self._settled_at:
            members = {**self._view.members, **self._listed}
        if members != self._view.members or not self._view.revision:
            revision = max(self._listed_at, self._view.revision + 1)
            self._view = View(revision, dict(sorted(members.items())))
            try:
                self._hear(self._view)
            except RuntimeError:  # the node's loop is closed: it has ended without leaving
                self.leaving.set()

    async def _report(self, line: "_Line", name: str, epoch: int) -> None:
        with suppress(*FAILURES):
            await line.remove(name, epoch)

    async def _revoke(self) -> None:
        if self._lease:
            line = _Line(self._endpoint, self._prefix)
            with suppress(*FAILURES):
                await line.revoke(self._lease)
            await line.close()


class _Line:
    """A connection to one etcd server. Each call ends within `CALL_S`, or raises one of `FAILURES`."""

    def __init__(self, endpoint: str, prefix: str) -> None:
        self._prefix = prefix
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL)
        self._keys = KVService(self._channel, max_attempts=1)
        self._leases = LeaseService(self._channel, max_attempts=1)
        self._watches = WatchService(self._channel, max_attempts=1)

    def named(self, key: bytes) -> str:
        return key.decode(errors="replace").removeprefix(self._prefix)

    async def grant(self) -> int:
        return int((await self._leases.grant(round(DEAD_S), timeout=CALL_S)).ID)

    async def keep_alive(self, lease: int) -> bool:
        """Whether there is such a lease, which then is as new."""
        answers = self._leases.keep_alive(lease)
        try:
            async with asyncio.timeout(CALL_S):
                async for answer in answers:
                    return bool(answer.TTL > 0)
        finally:
            answers.cancel()
        raise ConnectionError("a heartbeat was not answered")

    async def revoke(self, lease: int) -> None:
        await self._leases.revoke(lease, timeout=CALL_S)

    async def members(self) -> tuple[int, dict[str, Member]]:
        """All that are there, and of which revision that is."""
        answer = await self._keys.get(self._prefix, prefix_range_end(self._prefix), timeout=CALL_S)
        named = ((self.named(held.key), held.value) for held in answer.kvs)
        listed = {name: member for name, value in named if (member := _decoded(name, value)) is not None}
        return answer.header.revision, listed

    def changes(self, revision: int) -> AsyncIterator[Any]:
        """etcd's answers to a watch of all members from a revision on."""
        return self._watches.watch(self._prefix, prefix_range_end(self._prefix), revision)

    async def claim(self, member: Member, lease: int) -> int:
        """Put a member's record in place of an older start's, and say at which revision. ConfigError when another that
        is as new stands there."""
        key = self._prefix + member.name
        for _ in range(CLAIMS):
            held = await self._held(key)
            known = _decoded(member.name, held.value) if held is not None else None
            if held is not None and held.lease != lease and known is not None and known.epoch >= member.epoch:
                where = f"at {known.address}, epoch {known.epoch}"
                raise ConfigError(f"a living node has the name {member.name}: {where}; this one has {member.epoch}")
            put = KVService.txn_op_put(key, msgspec.json.encode(member), lease=lease)
            answer = await self._keys.txn(_unchanged(key, held), [put], timeout=CALL_S)
            if answer.succeeded:
                return int(answer.header.revision)
        raise ConnectionError(f"others write {key} all the time")

    async def remove(self, name: str, epoch: int) -> None:
        """Delete a member's record, if it is of that start of it."""
        key = self._prefix + name
        held = await self._held(key)
        if held is not None and (known := _decoded(name, held.value)) is not None and known.epoch == epoch:
            await self._keys.txn(_unchanged(key, held), [KVService.txn_op_delete(key)], timeout=CALL_S)

    async def close(self) -> None:
        await self._channel.close()

    async def _held(self, key: str) -> Any:
        return next(iter((await self._keys.get(key, timeout=CALL_S)).kvs), None)


def _unchanged(key: str, held: Any) -> list[Any]:
    """What a transaction compares: this very write of a key, or that there is none."""
    return [
        KVService.txn_compare_create_revision(key, held.create_revision if held is not None else 0),
        KVService.txn_compare_version(key, held.version if held is not None else 0),
    ]


def _decoded(name: str, value: bytes) -> Member | None:
    """None for what is no record of that name: deleted, or written by something else."""
    try:
        member = msgspec.json.decode(value, type=Member)
    except msgspec.DecodeError:
        return None
    return member if member.name == name else None


def _without_noise(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC's poller reads from loops of several threads; who finds nothing there logs an error that is none."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
