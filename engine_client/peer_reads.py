"""What one node asks of another about blocks: keep these, let me have their bytes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from engine_client.remote_reads import CROSSOVER_BYTES, MOST_TRIES, mend, read_held
from engine_client.steps import Call, Link, Operation, Post, Rejoin, Work, milliseconds
from kvstore import wire
from kvstore.copier import checksum
from kvstore.errors import NotFound, PeerLost, ProtocolError, StaleLease
from kvstore.packed import pack_keys, unpack_u64
from kvstore.prefix import Namespace
from kvstore.types import BlockKey
from kvstore.wire_cluster import (
    Announce,
    Announced,
    Discard,
    Discarded,
    Examine,
    Examined,
    Fill,
    Filled,
    Locate,
    Located,
    Vacate,
    Vacated,
)

Reply = TypeVar("Reply", bound=wire.Message)

ANSWERS: dict[type[wire.Message], type[wire.Message]] = {
    Announce: Announced,
    Locate: Located,
    Fill: Filled,
    Discard: Discarded,
    Vacate: Vacated,
    Examine: Examined,
}


class Numbers:
    """What numbers namespaces have on one connection, by root."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._numbers: dict[bytes, int] = {}

    def of(self, link: Link, root: bytes, namespace: Namespace) -> Operation[int]:
        """NotFound when the other node does not know the namespace, or not with this tenant's secret."""
        if self._link is not link:
            self._link, self._numbers = link, {}
        if root not in self._numbers:
            reply = _expected((yield Call(lambda number: wire.Open(number, "", namespace))), wire.Opened)
            if reply.root != root:
                raise NotFound("the other node has another secret for this tenant")
            self._numbers[root] = int(reply.number)
        return self._numbers[root]


def hold(
    link: Link, number: int, keys: Sequence[BlockKey], lease_s: float, load_s: float
) -> Operation[wire.Acquired | None]:
    """A lease on the longest prefix of `keys` that the other node has, or loads from its own tiers in time."""
    call = Call(
        lambda request: wire.Acquire(
            request, number, pack_keys(keys), milliseconds(lease_s), load_ms=milliseconds(load_s)
        ),
        wait_s=load_s,
    )
    reply = _expected((yield call), wire.Acquired)
    if not reply.lease_id:
        return None
    counts = {len(unpack_u64(column)) for column in (reply.sizes, reply.checksums, reply.slab_ids, reply.offsets)}
    if len(counts) != 1 or counts.pop() > len(keys):
        raise ProtocolError("a lease that makes no sense")
    return reply


def fetch(
    link: Link, number: int, keys: Sequence[BlockKey], held: wire.Acquired, start: int, views: Sequence[memoryview]
) -> Operation[list[int]]:
    """Blocks of a lease, from number `start` on, into views of their sizes; the checksum of each as it arrived."""
    found: list[int] = []
    if link.remote is not None and sum(map(len, views)) > CROSSOVER_BYTES:
        found = yield from _read(link, held, start, views)
    if len(found) < len(views):
        found = found + (yield from _deliver(link, number, keys[start + len(found) :], views[len(found) :]))
    return found


def _read(link: Link, held: wire.Acquired, start: int, views: Sequence[memoryview]) -> Operation[list[int]]:
    """As many as come by READs."""
    found: list[int] = []
    yield from mend(link)
    for _ in range(MOST_TRIES):
        try:
            here = yield from read_held(link, held, start + len(found), views[len(found) :])
        except StaleLease:
            assert link.remote is not None
            link.remote.slabs.clear()
        except PeerLost:
            if not link.is_open():
                raise
            yield Rejoin()
        else:
            found += here
            if len(found) == len(views) or not here:
                break
    return found


def _deliver(link: Link, number: int, keys: Sequence[BlockKey], views: Sequence[memoryview]) -> Operation[list[int]]:
    """Over the connection."""

    def places(reply: wire.Message) -> Sequence[memoryview]:
        sizes = unpack_u64(_expected(reply, wire.Acquired).sizes)
        if len(sizes) > len(views) or any(size != len(view) for size, view in zip(sizes, views, strict=False)):
            raise ProtocolError("blocks of other sizes than their lease says")
        return views[: len(sizes)]

    wanted = pack_keys(keys[: len(views)])
    reply = yield Call(lambda request: wire.Acquire(request, number, wanted, 0, deliver=True), targets=places)
    here = places(reply)
    found: list[int] = yield Work(lambda: [checksum(view) for view in here], sum(map(len, here)))
    return found


def let_go(link: Link, held_on: Link, lease_id: int) -> Operation[None]:
    """Nothing is left to let go of on another connection than the lease was got on."""
    if link is held_on:
        yield Post(lambda number: wire.Release(number, lease_id))


def report(link: Link, number: int, key: BlockKey) -> Operation[None]:
    """This block did not have its checksum here: the other node looks at its own."""
    yield Post(lambda request: wire.Report(request, number, pack_keys([key])))


def about(link: Link, call: Call) -> Operation[wire.Message]:
    """The reply to a request about the cluster."""
    asked: list[type[wire.Message]] = []

    def request(number: int) -> wire.Message:
        message = call.request(number)
        asked.append(type(message))
        return message

    reply = yield replace(call, request=request)
    return _expected(reply, ANSWERS[asked[-1]])


def _expected(reply: Any, kind: type[Reply]) -> Reply:
    """Whatever another node answers, this one goes on."""
    if not isinstance(reply, kind):
        raise ProtocolError(f"an answer of {type(reply).__name__}, where {kind.__name__} belongs")
    return reply
