"""Frames over a channel in an event loop: they move there from TCP, and both end as one."""

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop

from kvstore.errors import PeerLost, ProtocolError
from kvstore.transport.rdma.channel import Channel
from kvstore.transport.rdma.channel_stream import ChannelTransport
from kvstore.wire import HEADER, MAGIC
from tests.channel_pair import Channels, soft_channels
from tests.soft_verbs import SoftFabric, SoftVerbs
from tests.unit.test_stream import Receiver, framed

Run = Callable[[Callable[["Pair"], Coroutine[Any, Any, None]]], None]


class Pair:
    """Two connections' ends that have moved to RDMA, and what is below them."""

    def __init__(self, fabric: SoftFabric, both: Channels) -> None:
        self.fabric = fabric
        self.both = both
        self.closed: list[str] = []
        self.one, self.other = Receiver(), Receiver()
        self.lifelines: list[asyncio.Transport] = []

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        for handle, end in zip(socket.socketpair(), (self.one, self.other), strict=True):
            handle.setblocking(False)
            await loop.connect_accepted_socket(lambda end=end: end, handle)  # type: ignore[misc]

    async def talk_over_tcp(self) -> None:
        self.one.send(framed(b"join"))
        await self.other.until(lambda: self.other.bodies == [b"join"])
        self.other.send(framed(b"joined"))
        await self.one.until(lambda: self.one.bodies == [b"joined"])

    def move(self, end: Receiver, channel: Channel, name: str) -> None:
        def onto(lifeline: asyncio.Transport) -> ChannelTransport:
            self.lifelines.append(lifeline)
            return ChannelTransport(channel, end, lifeline, lambda: self.closed.append(name))

        end.move_to(onto)

    async def ended(self) -> None:
        """Both ends, each once."""
        for end in (self.one, self.other):
            await end.until(lambda end=end: bool(end.lost))  # type: ignore[misc]
        for _ in range(3):
            await asyncio.sleep(0)
        assert [len(end.lost) for end in (self.one, self.other)] == [1, 1]
        assert sorted(self.closed) == ["one", "other"]
        assert [channel._pair.state() for channel in self.both[:2]] == ["RESET", "RESET"]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    def run_with_loop(work: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
        async def moved(both: Channels) -> None:
            pair = Pair(fabric, both)
            await pair.connect()
            await pair.talk_over_tcp()
            pair.move(pair.other, both.other, "other")
            pair.move(pair.one, both.one, "one")
            await asyncio.wait_for(work(pair), 5)
            for end in (pair.one, pair.other):
                if not end.lost:
                    transport_of(end).abort()
            await pair.ended()

        fabric = SoftFabric()
        with ExitStack() as stack, asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(moved(soft_channels(fabric, stack)))

    return run_with_loop


def transport_of(end: Receiver) -> asyncio.Transport:
    transport = end._transport
    assert transport is not None
    return transport


def test_frames_and_payloads_cross_in_both_directions(run: Run) -> None:
    blocks = [random.Random(seed).randbytes(size) for seed, size in enumerate([3_000_000, 0, 1, 70_000])]
    views = [memoryview(block) for block in blocks]

    async def exchange(pair: Pair) -> None:
        for end in (pair.one, pair.other):
            for number in range(3):
                end.send(framed(b"_" * 100_000), [])
                end.send(HEADER.pack(4, MAGIC, sum(map(len, blocks))) + bytes([number]) * 4, views)
        for end in (pair.one, pair.other):
            await end.drained()
            await end.until(lambda end=end: len(end.payloads) == 3)  # type: ignore[misc]
            assert end.bodies[1:] == [body for number in range(3) for body in (b"_" * 100_000, bytes([number]) * 4)]
            assert end.payloads == [b"".join(blocks)] * 3

    run(exchange)


def test_what_the_other_end_said_before_this_one_moved_is_heard() -> None:
    async def early() -> None:
        pair = Pair(fabric, both)
        await pair.connect()
        pair.move(pair.one, both.one, "one")
        pair.one.send(framed(b"early"))
        await asyncio.sleep(0)
        pair.move(pair.other, both.other, "other")
        await pair.other.until(lambda: pair.other.bodies == [b"early"])
        transport_of(pair.one).close()
        await pair.ended()

    fabric = SoftFabric()
    with ExitStack() as stack, asyncio.Runner() as runner:
        both = soft_channels(fabric, stack)
        runner.run(asyncio.wait_for(early(), 20))


def test_a_peer_that_does_not_read_is_waited_for(run: Run) -> None:
    block = bytes(4 << 20)

    async def send(pair: Pair) -> None:
        transport_of(pair.other).pause_reading()
        pair.one.send(HEADER.pack(4, MAGIC, len(block)) + b"body", [memoryview(block)])
        assert pair.one.is_draining
        waiting = [asyncio.create_task(pair.one.drained()) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, timeout=0.02)
        assert not done
        assert transport_of(pair.one).get_write_buffer_size() > len(block) - (1 << 17)
        waiting.pop().cancel()
        pair.other.send(framed(b"meanwhile"))
        await pair.one.until(lambda: pair.one.bodies[1:] == [b"meanwhile"])
        transport_of(pair.other).resume_reading()
        await waiting[0]
        assert transport_of(pair.one).get_write_buffer_size() == 0
        await pair.other.until(lambda: pair.other.payloads == [block])

    run(send)


def test_an_end_that_is_held_takes_nothing_up_until_it_goes_on(run: Run) -> None:
    async def hold(pair: Pair) -> None:
        pair.other.hold()
        for number in range(200):
            pair.one.send(framed(b"%d" % number * 100))
        await asyncio.wait([asyncio.create_task(pair.one.drained())], timeout=0.02)
        assert len(pair.other.bodies) == 1
        pair.other.go_on()
        await pair.other.until(lambda: len(pair.other.bodies) == 201)

    run(hold)


def test_closing_sends_what_was_said_and_then_ends_both(run: Run) -> None:
    block = random.Random(0).randbytes(2_000_000)

    async def close(pair: Pair) -> None:
        pair.one.send(HEADER.pack(4, MAGIC, len(block)) + b"body", [memoryview(block)])
        transport_of(pair.one).close()
        assert transport_of(pair.one).is_closing()
        pair.one.send(framed(b"too late"))
        await pair.ended()
        assert pair.other.payloads == [block]
        assert pair.other.bodies == [b"join", b"body"]
        assert pair.one.lost == pair.other.lost == [None]

    run(close)


def test_aborting_ends_both_at_once(run: Run) -> None:
    block = bytes(4 << 20)

    async def abort(pair: Pair) -> None:
        transport_of(pair.other).pause_reading()
        pair.one.send(HEADER.pack(4, MAGIC, len(block)) + b"body", [memoryview(block)])
        waiting = asyncio.create_task(pair.one.drained())
        transport = transport_of(pair.one)
        transport.close()
        transport.abort()
        transport.abort()
        assert pair.one.lost == [], "not from within abort"
        await waiting
        await pair.ended()
        assert pair.other.payloads == []

    run(abort)


def test_when_the_tcp_connection_ends_what_came_is_delivered(run: Run) -> None:
    async def end(pair: Pair) -> None:
        pair.one.send(framed(b"last words"))
        pair.lifelines[1].abort()
        await pair.ended()
        assert pair.other.bodies == [b"join", b"last words"]

    run(end)


def test_what_is_not_taken_up_yet_when_the_tcp_connection_ends_is_delivered(run: Run) -> None:
    async def end(pair: Pair) -> None:
        pair.one.send(framed(b"last words"))
        lifeline = pair.lifelines[0].get_protocol()  # of the other end: it moved first
        assert lifeline is not None
        lifeline.connection_lost(None)
        await pair.ended()
        assert pair.other.bodies == [b"join", b"last words"]

    run(end)


def test_a_byte_over_tcp_after_the_move_ends_both(run: Run) -> None:
    async def speak(pair: Pair) -> None:
        pair.lifelines[1].write(b"x")
        await pair.ended()
        assert isinstance(pair.other.lost[0], ProtocolError)

    run(speak)


def test_nonsense_on_the_channel_ends_both(run: Run) -> None:
    async def speak(pair: Pair) -> None:
        pair.both.one._owed = 3
        pair.one.send(framed(b"x"))
        await pair.ended()
        assert isinstance(pair.other.lost[0], ProtocolError)

    run(speak)


@pytest.mark.parametrize("how", ["cut", "failed", "gone", "refused"])
def test_a_queue_pair_that_fails_ends_both(run: Run, how: str) -> None:
    async def fail(pair: Pair) -> None:
        one, other = (end.verbs for end in pair.both.ends)
        assert isinstance(one, SoftVerbs)
        assert isinstance(other, SoftVerbs)
        if how == "cut":
            pair.fabric.cut(one.gid("soft0"), other.gid("soft0"))
        elif how == "failed":
            pair.both.one._pair.fail()
        elif how == "gone":
            one.vanish()
        else:
            pair.fabric.refused_posts = 1
        pair.one.send(framed(b"x"))
        if how == "cut":
            pair.fabric.expire()
        await pair.one.until(lambda: bool(pair.one.lost))
        assert isinstance(pair.one.lost[0], PeerLost)
        one.is_gone = False
        if how == "gone":
            pair.both.one._pair.reset()

    run(fail)


def test_a_protocol_that_fails_ends_both(run: Run) -> None:
    async def fail(pair: Pair) -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        pair.other.segments = lambda size: [size // 2]  # less than what comes
        pair.one.send(framed(b"body", b"payload"))
        await pair.ended()
        assert isinstance(reported[0]["exception"], AssertionError)

    run(fail)


def test_a_connection_moves_only_between_frames() -> None:
    async def midway() -> None:
        pair = Pair(fabric, both)
        await pair.connect()
        transport_of(pair.one).write(framed(b"body", b"payload")[:-3])
        await pair.other.until(lambda: bool(pair.other.places))
        with pytest.raises(ProtocolError):
            pair.move(pair.other, both.other, "other")
        transport_of(pair.one).write(b"oad")
        await pair.other.until(lambda: bool(pair.other.payloads))
        transport_of(pair.other).pause_reading()
        block = bytes(8 << 20)
        pair.one.send(framed(b"body", block))
        with pytest.raises(ProtocolError):
            pair.move(pair.one, both.one, "one")
        transport_of(pair.one).abort()
        with pytest.raises(PeerLost):
            pair.move(pair.one, both.one, "one")
        transport_of(pair.other).abort()
        assert (pair.lifelines, both.one.error) == ([], None)

    fabric = SoftFabric()
    with ExitStack() as stack, asyncio.Runner() as runner:
        both = soft_channels(fabric, stack)
        runner.run(asyncio.wait_for(midway(), 20))
