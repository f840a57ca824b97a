"""Membership in etcd: a key with a lease for each member, kept by a thread of its own, so that a busy node is alive.

The thread has one connection at a time, to one of the endpoints, and gives it up for the next at any failure. A
connection begins with saying who we are and listing who is there; from that revision on it watches. So nothing depends
on what a broken watch may have missed, nor on what etcd has compacted.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from itertools import cycle
from threading import Thread
from typing import Any

from kvstore.cluster.etcd_line import FAILURES, Line, decoded
from kvstore.cluster.members import DEAD_S, HEARTBEAT_S, Member, View
from kvstore.errors import ConfigError, ConnectFailed

JOIN_S = 5.0
LEAVE_S = 1.9
RETRY_S = 0.3  # between two connections
LONGEST_PAUSE_S = 30.0  # before joining again, for one whom others report dead again and again
SETTLED_S = 60.0  # whoever was a member for so long joins again at once


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
        self._line: Line | None = None  # while in touch
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
            line = Line(endpoint, self._prefix)
            try:
                await self._keep_in_touch(line)
            except* FAILURES as failures:
                self._out_of_touch(failures)
            finally:
                self._line = None
                await line.close()
            await asyncio.sleep(RETRY_S)

    async def _keep_in_touch(self, line: "Line") -> None:
        await self._beat(line)
        revision, members = await line.members()
        self._in_touch(line, revision, members)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(line, revision + 1))
            tasks.create_task(self._keep_beating(line))

    async def _keep_beating(self, line: "Line") -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._to_say.wait()
            self._to_say.clear()
            await self._beat(line)

    async def _beat(self, line: "Line") -> None:
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

    async def _watch(self, line: "Line", revision: int) -> None:
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
        member = decoded(name, value)
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

    def _in_touch(self, line: "Line", revision: int, members: dict[str, Member]) -> None:
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
        what = _told(reason) or type(reason).__name__
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

    async def _report(self, line: "Line", name: str, epoch: int) -> None:
        with suppress(*FAILURES):
            await line.remove(name, epoch)

    async def _revoke(self) -> None:
        if self._lease:
            line = Line(self._endpoint, self._prefix)
            with suppress(*FAILURES):
                await line.revoke(self._lease)
            await line.close()


def _told(error: BaseException) -> str:
    """In a line: gRPC's own text is a page."""
    details = getattr(error, "details", None)
    return " ".join(str(details() if callable(details) else error).split())


def _without_noise(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC's poller reads from loops of several threads; who finds nothing there logs an error that is none."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
