"""Follows which blocks a node has, through gaps, restarts and lost connections.

async with aclosing(subscribe("tcp://node:7401", token)) as updates:
    async for update in updates:
        ...

DEGRADED  asks for pages ── last page and what happened meanwhile ──> EXACT
EXACT     asks what happened ── gap, or another start of the node ──> DEGRADED
either    the connection is lost ──> DEGRADED; back without a gap ──> EXACT
"""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

from engine_client.address import Address, parse_address, tls_context
from engine_client.replies import Replies, open_replies
from engine_client.retry import BACKOFF_S
from engine_client.steps import Call, milliseconds
from kvstore import wire
from kvstore.errors import NotFound, ProtocolError, Rejected, TransportError
from kvstore.wire_events import EVENTS_LIMIT, BlockEvent, Happened, Snapped, Snapshot, Subscribe, events_of

POLL_S = 2.0  # that the node waits for something to tell
ANSWER_S = 5.0  # for what it does not wait for; then it is taken for gone


class Standing(Enum):
    """What a follower's view of a node is worth."""

    EXACT = "exact"  # it had exactly these blocks when it answered last
    DEGRADED = "degraded"  # some are missing, or have gone since


@dataclass(frozen=True, slots=True)
class Update:
    """What changes in a view: first, on `is_reset`, forget all; then apply the events in order.

    A block (part) in a tier may be stored that is known already, and removed that is not: then nothing changes.
    """

    standing: Standing
    is_reset: bool = False
    events: tuple[BlockEvent, ...] = ()


class Follower:
    """One node's follower, without the connection: `ask` for what `request` says, and `take` the reply.

    `standing` is what the updates so far make of a view.
    """

    def __init__(self) -> None:
        self.standing = Standing.DEGRADED
        self.epoch = 0
        self.namespace = 0  # its number at this start of the node; 0: all of the tenant
        self._after = -1  # no snapshot was ever taken
        self._reach = 0  # the view is exact once all up to here is told
        self._cursor = 0
        self._is_paging = True

    @property
    def may_wait(self) -> bool:
        """Whether the node may wait with its answer: not while there is something to catch up on."""
        return self.standing is Standing.EXACT

    def connected(self, epoch: int, namespace: int) -> None:
        """To a node, perhaps of another start, where the namespace has this number."""
        if (epoch, namespace) != (self.epoch, self.namespace):
            self.epoch, self.namespace = epoch, namespace
            self._begin_paging()

    def lost(self) -> Update | None:
        """The connection is gone; what was asked for is asked again on the next."""
        return self._fall()

    def request(self, number: int) -> Subscribe | Snapshot:
        if self._is_paging:
            return Snapshot(number, self.namespace, self._cursor, EVENTS_LIMIT)
        wait_ms = milliseconds(POLL_S) if self.may_wait else 0
        return Subscribe(number, self.namespace, self.epoch, self._after, wait_ms, EVENTS_LIMIT)

    def take(self, reply: wire.Message) -> Update | None:
        """The update that a reply to `request` brings, if it does. ProtocolError for what is no such reply."""
        if isinstance(reply, Snapped) and self._is_paging:
            return self._page(reply)
        if isinstance(reply, Happened) and not self._is_paging:
            return self._happened(reply)
        raise ProtocolError(f"answered a subscriber with {type(reply).__name__}")

    def refused(self, error: NotFound) -> None:
        """The snapshot is gone: begin again. Raises `error` when there was none."""
        if not self._is_paging or not self._cursor:
            raise error
        self._begin_paging()

    def _page(self, reply: Snapped) -> Update:
        if reply.epoch != self.epoch:
            raise ProtocolError(f"a page of epoch {reply.epoch} from a node of epoch {self.epoch}")
        events = events_of(reply)
        is_first = not self._cursor
        if is_first:
            self._after = reply.sequence
        self._cursor = reply.cursor
        self._reach = reply.sequence
        self._is_paging = bool(reply.cursor)
        return Update(self.standing, is_first, tuple(events))

    def _happened(self, reply: Happened) -> Update | None:
        if not reply.is_exact or reply.epoch != self.epoch:
            self._begin_paging()
            return self._fall()
        if reply.first != self._after + 1 or reply.last < self._after:
            raise ProtocolError(f"events {reply.first} to {reply.last} after {self._after}")
        events = events_of(reply)
        self._after = reply.last
        was = self.standing
        if self._after >= self._reach:
            self.standing = Standing.EXACT
        return Update(self.standing, False, tuple(events)) if events or self.standing is not was else None

    def _begin_paging(self) -> None:
        self._is_paging, self._cursor = True, 0

    def _fall(self) -> Update | None:
        was, self.standing = self.standing, Standing.DEGRADED
        return Update(self.standing) if was is Standing.EXACT else None


async def subscribe(
    address: str, token: str = "", namespace: str = "", *, ca_file: str = "", name: str = ""
) -> AsyncGenerator[Update]:
    """What happens to the blocks of a tenant on the node at `address`, of one namespace if it is named; without end.

    A node that is gone, or has no such namespace yet, is asked again and again. Raises Forbidden and whatever else
    another try does not mend.
    """
    node = parse_address(address)
    tls = tls_context(ca_file) if node.tls else None
    hello = Call(lambda number: wire.Hello(number, wire.PROTOCOL, token, name or f"subscriber, pid {os.getpid()}"))
    follower = Follower()
    failures = 0
    while True:
        try:
            async with _connected(node, tls, hello) as (replies, epoch):
                follower.connected(epoch, await _number(replies, namespace))
                while True:
                    update = await _exchange(replies, follower)
                    failures = 0
                    if update is not None:
                        yield update
        except (TransportError, Rejected, NotFound):
            update = follower.lost()
        if update is not None:
            yield update
        await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
        failures += 1


@asynccontextmanager
async def _connected(node: Address, tls: ssl.SSLContext | None, hello: Call) -> AsyncIterator[tuple[Replies, int]]:
    """A connection and the node's epoch."""
    replies = await open_replies(node, tls, ANSWER_S)
    try:
        welcome = await replies.ask(hello, ANSWER_S)
        if not isinstance(welcome, wire.Welcome):
            raise ProtocolError(f"{node}: answered Hello with {type(welcome).__name__}")
        yield replies, welcome.epoch
    finally:
        replies.hang_up()


async def _number(replies: Replies, namespace: str) -> int:
    """Of a namespace that is known there; 0 for all. NotFound."""
    if not namespace:
        return 0
    opened = await replies.ask(Call(lambda number: wire.Open(number, namespace, None)), ANSWER_S)
    if not isinstance(opened, wire.Opened):
        raise ProtocolError(f"answered Open with {type(opened).__name__}")
    return opened.number


async def _exchange(replies: Replies, follower: Follower) -> Update | None:
    call = Call(follower.request, wait_s=POLL_S if follower.may_wait else 0.0)
    try:
        reply = await replies.ask(call, ANSWER_S)
    except NotFound as error:
        follower.refused(error)
        return None
    return follower.take(reply)
