"""Frames over a stream: they arrive intact however the bytes are cut, and a slow peer is waited for."""

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from unittest import mock

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ProtocolError
from kvstore.transport import stream
from kvstore.transport.stream import PAYLOAD_BYTES, RECEIVE_BYTES, FrameStream, sink
from kvstore.wire import HEADER, MAGIC

FRAME_BYTES = 1 << 20
SMALL_BUFFER = 40  # so that frames of a few bytes are larger


class Receiver(FrameStream):
    """Keeps what it is told. `segments` says how the payload's place is cut; refuses bodies that begin with "bad"."""

    def __init__(self, segments: Callable[[int], list[int]] = lambda size: [size]) -> None:
        super().__init__(FRAME_BYTES)
        self.segments = segments
        self.bodies: list[bytes] = []
        self.places: list[list[bytearray]] = []
        self.payloads: list[bytes] = []
        self.errors: list[ProtocolError] = []
        self.lost: list[Exception | None] = []
        self.changed = asyncio.Event()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Looks whenever something comes, or the connection is lost."""
        while not is_so():
            self.changed.clear()
            await self.changed.wait()

    def buffer_updated(self, received: int) -> None:
        super().buffer_updated(received)
        self.changed.set()

    def frame_received(self, body: bytes, payload_bytes: int) -> Sequence[memoryview]:
        if body.startswith(b"bad"):
            raise ProtocolError("not understood")
        self.bodies.append(body)
        if not payload_bytes:
            return ()
        self.places.append([bytearray(size) for size in self.segments(payload_bytes)])
        return [memoryview(place) for place in self.places[-1]]

    def payload_received(self) -> None:
        assert self.payload_left == 0
        self.payloads.append(b"".join(self.places[-1]))
        if self.bodies[-1].startswith(b"worse"):
            raise ProtocolError("does not make sense")

    def broken(self, error: ProtocolError) -> None:
        self.errors.append(error)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.lost.append(error)
        self.changed.set()


def framed(body: bytes, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(body), MAGIC, len(payload)) + body + payload


def feed(receiver: FrameStream, data: bytes, cut: Callable[[], int] = lambda: 1 << 30) -> None:
    """As an event loop does, in reads of at most `cut()` bytes."""
    at = 0
    while at < len(data):
        buffer = receiver.get_buffer(-1)
        assert len(buffer), "a loop gives up on an empty buffer"
        size = min(len(buffer), len(data) - at, cut())
        buffer[:size] = data[at : at + size]
        receiver.buffer_updated(size)
        at += size


# Any cuts.

sizes = st.integers(0, 12) | st.sampled_from([39, 40, 41, 79, 80, 81, 150, 400])
cuts = st.lists(st.integers(1, 9) | st.sampled_from([15, 16, 17, 33, 40, 1000]), min_size=1, max_size=12)


@given(
    frames=st.lists(st.tuples(sizes, st.lists(sizes, max_size=5)), max_size=6),
    cuts=cuts,
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_frames_and_payloads_arrive_however_they_are_cut(
    frames: list[tuple[int, list[int]]], cuts: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    data = [(chance.randbytes(size), chance.randbytes(sum(places))) for size, places in frames]
    data = [(b"_" + body[1:] if body else body, payload) for body, payload in data]
    places = iter([places for _, places in frames if sum(places)])
    with mock.patch.object(stream, "RECEIVE_BYTES", SMALL_BUFFER):
        receiver = Receiver(lambda size: next(places))
        turns = iter(cuts * 10_000)
        feed(receiver, b"".join(framed(body, payload) for body, payload in data), lambda: next(turns))
        assert receiver.bodies == [body for body, _ in data]
        assert receiver.payloads == [payload for _, payload in data if payload]
        assert receiver.errors == []
        assert len(receiver.get_buffer(-1)) <= SMALL_BUFFER, "a large body's buffer is given back"


@given(payload=st.binary(min_size=1, max_size=120), ahead=st.integers(0, 119), cuts=cuts)
@settings(max_examples=100, deadline=None)
def test_a_payload_that_is_redirected_midway_leaves_its_first_place_alone(
    payload: bytes, ahead: int, cuts: list[int]
) -> None:
    ahead = min(ahead, len(payload) - 1)
    receiver, turns = Receiver(lambda size: [size // 2, size - size // 2]), iter(cuts * 1000)
    feed(receiver, framed(b"first", payload)[: len(framed(b"first")) + ahead], lambda: next(turns))
    assert receiver.payload_left == len(payload) - ahead
    elsewhere = bytearray(len(payload) - ahead + 3)
    receiver.redirect_payload([memoryview(b"").cast("B"), memoryview(elsewhere)])
    feed(receiver, payload[ahead:] + framed(b"second", b"xyz"), lambda: next(turns))
    assert b"".join(receiver.places[0]) == payload[:ahead] + bytes(len(payload) - ahead)
    assert elsewhere == payload[ahead:] + b"\0\0\0"
    assert receiver.bodies == [b"first", b"second"]
    assert receiver.payloads[1] == b"xyz"


def test_nothing_is_redirected_when_nothing_comes() -> None:
    receiver = Receiver()
    feed(receiver, framed(b"first", b"payload"))
    receiver.redirect_payload([])
    feed(receiver, framed(b"second"))
    assert receiver.bodies == [b"first", b"second"]


def test_a_payload_is_received_where_it_belongs() -> None:
    receiver = Receiver()
    feed(receiver, framed(b"body", b"0123456789")[:-7])
    buffer = receiver.get_buffer(-1)
    assert len(buffer) == 7
    buffer[:2] = b"ab"
    assert receiver.places[0][0] == b"012ab\0\0\0\0\0"


def test_a_place_that_is_larger_than_the_payload_is_filled_in_part() -> None:
    receiver = Receiver(lambda size: [0, size - 1, 0, 10, 10])
    feed(receiver, framed(b"first", b"abc") + framed(b"second"))
    assert [bytes(place) for place in receiver.places[0]] == [b"", b"ab", b"", b"c" + bytes(9), bytes(10)]
    assert receiver.bodies == [b"first", b"second"]


def test_a_place_that_is_too_small_is_a_broken_invariant() -> None:
    receiver = Receiver(lambda size: [size - 1])
    with pytest.raises(AssertionError):
        feed(receiver, framed(b"first", b"abc"))


def test_the_buffer_grows_as_a_large_body_comes_not_as_it_is_announced() -> None:
    body = random.Random(1).randbytes(FRAME_BYTES)
    receiver = Receiver()
    data = framed(b"_" + body[1:], b"payload") + framed(b"next")
    came = 0
    while came < len(data):
        buffer = receiver.get_buffer(-1)
        assert len(buffer) <= max(RECEIVE_BYTES, came)
        size = min(len(buffer), 5000, len(data) - came)
        buffer[:size] = data[came : came + size]
        receiver.buffer_updated(size)
        came += size
    assert receiver.bodies == [b"_" + body[1:], b"next"]
    assert receiver.payloads == [b"payload"]
    assert len(receiver.get_buffer(-1)) == RECEIVE_BYTES


# Holding back.


class Reserved(Receiver):
    """Holds back after every frame, and after every payload."""

    def frame_received(self, body: bytes, payload_bytes: int) -> Sequence[memoryview]:
        self.hold()
        return super().frame_received(body, payload_bytes)

    def payload_received(self) -> None:
        self.hold()
        super().payload_received()


@given(
    frames=st.lists(st.tuples(sizes, st.integers(0, 90)), max_size=8),
    cuts=cuts,
)
@settings(max_examples=100, deadline=None)
def test_one_frame_is_taken_up_at_a_time_by_who_holds_back(frames: list[tuple[int, int]], cuts: list[int]) -> None:
    data = [(bytes([number]) * body, bytes([number]) * payload) for number, (body, payload) in enumerate(frames)]
    transport, turns = mock.Mock(), iter(cuts * 10_000)
    is_read = [True]
    transport.pause_reading = lambda: is_read.__setitem__(0, False)
    transport.resume_reading = lambda: is_read.__setitem__(0, True)
    with mock.patch.object(stream, "RECEIVE_BYTES", SMALL_BUFFER):
        receiver = Reserved()
        receiver.connection_made(transport)
        coming = b"".join(framed(body, payload) for body, payload in data)
        while coming or receiver.frames < len(data) or len(receiver.payloads) < sum(size > 0 for _, size in frames):
            taken = receiver.frames
            if is_read[0] or receiver.payload_left:
                size = min(len(receiver.get_buffer(-1)), len(coming), next(turns))
                feed(receiver, coming[:size])
                coming = coming[size:]
            else:
                receiver.go_on()
            assert receiver.frames <= taken + 1
        assert receiver.bodies == [body for body, _ in data]
        assert receiver.payloads == [payload for _, payload in data if payload]


def test_a_frame_that_has_begun_and_stops_is_midway() -> None:
    receiver = Receiver()
    for data, is_midway in [
        (framed(b"first")[:3], True),
        (framed(b"first")[3:16], True),
        (framed(b"first")[16:20], True),
        (framed(b"first")[20:], False),
        (framed(b"second", b"payload")[:-3], False),
        (b"oad" + framed(b"third")[:-1], True),
        (b"d", False),
    ]:
        feed(receiver, data)
        assert receiver.is_midway == is_midway
    assert receiver.frames == 3


def test_who_listens_no_more_hears_nothing_even_if_told_to_go_on() -> None:
    receiver = Receiver()
    feed(receiver, framed(b"first") + framed(b"second")[:-1])
    receiver.listen_no_more()
    receiver.go_on()
    feed(receiver, b"d" + framed(b"third"))
    assert receiver.bodies == [b"first"]
    assert receiver.errors == []


# What is no frame.


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(FRAME_BYTES + 1, MAGIC, 0),
        HEADER.pack(1, MAGIC, PAYLOAD_BYTES + 1) + b"x",
        HEADER.pack(0, MAGIC ^ 1, 0),
        framed(b"bad"),
        framed(b"bad", b"with a payload"),
        framed(b"worse", b"with a payload"),
    ],
    ids=["http", "too large", "too much payload", "magic", "body", "body before a payload", "payload"],
)
@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_after_nonsense_nothing_is_read(nonsense: bytes, cut: int) -> None:
    receiver = Receiver()
    feed(receiver, framed(b"before") + nonsense + framed(b"after") * 3, lambda: cut)
    feed(receiver, framed(b"later") + nonsense, lambda: cut)
    assert [body for body in receiver.bodies if not body.startswith(b"worse")] == [b"before"]
    assert len(receiver.errors) == 1
    assert receiver.payload_left == 0


@given(st.binary(max_size=200), cuts)
@settings(max_examples=100, deadline=None)
def test_garbage_breaks_the_stream_and_nothing_else(garbage: bytes, cuts: list[int]) -> None:
    receiver, turns = Receiver(), iter(cuts * 300)
    feed(receiver, garbage, lambda: next(turns))
    if len(garbage) >= HEADER.size and garbage[4:8] != b"CVK1":
        assert len(receiver.errors) == 1
        assert receiver.bodies == []


@pytest.mark.parametrize("size", [0, 1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 1_000_000])
def test_a_sink_takes_exactly_what_it_is_for(size: int) -> None:
    assert sum(map(len, sink(size))) == size
    assert all(sink(size))


# Over real connections.


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Any:
    def run_with_loop(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(work, 20))

    return run_with_loop


async def joined() -> tuple[Receiver, Receiver]:
    """Two ends of one connection."""
    loop, ends = asyncio.get_running_loop(), []
    for handle in socket.socketpair():
        handle.setblocking(False)
        _, end = await loop.connect_accepted_socket(Receiver, handle)
        ends.append(end)
    return ends[0], ends[1]


def transport_of(end: FrameStream) -> asyncio.Transport:
    transport = end._transport
    assert transport is not None
    return transport


def test_blocks_cross_a_connection_in_both_directions(run: Any) -> None:
    blocks = [random.Random(seed).randbytes(size) for seed, size in enumerate([3_000_000, 0, 1, 70_000])]
    views = [memoryview(block) for block in blocks]

    async def exchange() -> None:
        ends = await joined()
        for end in ends:
            for number in range(3):
                end.send(framed(b"_" * 100_000), [])
                end.send(HEADER.pack(4, MAGIC, sum(map(len, blocks))) + bytes([number]) * 4, views)
        for end in ends:
            await end.drained()
            await end.until(lambda end=end: len(end.payloads) == 3)  # type: ignore[misc]
            assert end.bodies == [body for number in range(3) for body in (b"_" * 100_000, bytes([number]) * 4)]
            assert end.payloads == [b"".join(blocks)] * 3
            transport_of(end).close()

    run(exchange())


def test_a_peer_that_does_not_read_is_waited_for(run: Any) -> None:
    block = bytes(8 << 20)

    async def send() -> None:
        sender, reader = await joined()
        transport_of(reader).pause_reading()
        await sender.drained()
        sender.send(HEADER.pack(4, MAGIC, len(block)) + b"body", [memoryview(block)])
        assert sender.is_draining
        waiting = [asyncio.create_task(sender.drained()) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, timeout=0.02)
        assert not done
        gives_up = waiting.pop()
        gives_up.cancel()
        done, _ = await asyncio.wait(waiting, timeout=0.02)
        assert not done, "one who gives up waiting changes nothing for the others"
        transport_of(reader).resume_reading()
        await waiting[0]
        await sender.drained()
        await reader.until(lambda: len(reader.payloads) == 1)
        for end in (sender, reader):
            transport_of(end).close()

    run(send())


def test_who_waits_for_a_peer_that_goes_is_let_go(run: Any) -> None:
    block = bytes(8 << 20)

    async def send() -> None:
        sender, reader = await joined()
        transport_of(reader).pause_reading()
        sender.send(HEADER.pack(4, MAGIC, len(block)) + b"body", [memoryview(block)])
        assert sender.is_draining
        transport_of(reader).abort()
        await sender.drained()
        await sender.until(lambda: bool(sender.lost))
        sender.send(framed(b"into the void"))
        await sender.drained()

    run(send())


def test_a_connection_that_ends_midway_leaves_the_place_alone(run: Any) -> None:
    async def send() -> None:
        sender, reader = await joined()
        sender.send(HEADER.pack(4, MAGIC, 1000) + b"body" + b"x" * 500)
        await reader.until(lambda: bool(reader.places))
        transport_of(sender).close()
        await reader.until(lambda: bool(reader.lost))
        assert reader.payload_left == 0
        assert reader.payloads == []
        assert reader.places[0][0].count(b"x") == 500

    run(send())
