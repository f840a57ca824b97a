"""A channel as a blocking socket: it waits, times out and ends as sockets do."""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvstore import wire
from kvstore.errors import PeerLost, ProtocolError
from kvstore.transport.blocking import FrameSocket
from kvstore.transport.rdma.channel_socket import ChannelSocket
from tests.channel_pair import Channels, soft_channels
from tests.soft_verbs import SoftFabric, SoftVerbs

FRAME_BYTES = 1 << 20


class Pair:
    """Both ends, and the TCP connection below them."""

    def __init__(self, fabric: SoftFabric, both: Channels) -> None:
        self.fabric = fabric
        self.both = both
        self.closed = 0
        self.lifelines = socket.socketpair()
        self.one = ChannelSocket(both.one, self.lifelines[0], self.close_pair)
        self.other = ChannelSocket(both.other, self.lifelines[1], self.close_pair)
        for end in (self.one, self.other):
            end.settimeout(10)

    def close_pair(self) -> None:
        self.closed += 1


@pytest.fixture
def pair() -> Iterator[Pair]:
    fabric = SoftFabric()
    with ExitStack() as stack:
        pair = Pair(fabric, soft_channels(fabric, stack))
        yield pair
        for end in (pair.one, pair.other):
            end.close()


def receive(end: ChannelSocket, size: int) -> bytes:
    data = bytearray(size)
    with memoryview(data) as view:
        at = 0
        while at < size:
            got = end.recv_into(view[at:])
            assert got, "the other end hung up"
            at += got
    return bytes(data)


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_10_mb_go_both_ways_between_two_threads(pair: Pair) -> None:
    data = random.Random(0).randbytes(10_000_000)
    got: list[bytes] = []

    def echo() -> None:
        for _ in range(10):
            pair.other.sendall(receive(pair.other, 1_000_000))

    thread = in_thread(echo)
    for at in range(0, len(data), 1_000_000):
        assert pair.one.sendmsg([data[at : at + 1], memoryview(data)[at + 1 : at + 1_000_000]]) == 1_000_000
        got.append(receive(pair.one, 1_000_000))
    thread.join()
    assert b"".join(got) == data


def test_it_sleeps_until_something_comes(pair: Pair) -> None:
    before = time.thread_time()
    timer = threading.Timer(0.2, lambda: pair.other.sendall(b"at last"))
    timer.start()
    assert receive(pair.one, 7) == b"at last"
    timer.join()
    assert time.thread_time() - before < 0.05


def test_nothing_in_time_is_a_timeout(pair: Pair) -> None:
    pair.one.settimeout(0.02)
    with pytest.raises(TimeoutError):
        pair.one.recv_into(memoryview(bytearray(1)))
    pair.one.settimeout(0)
    with pytest.raises(BlockingIOError):
        pair.one.recv_into(memoryview(bytearray(1)))
    pair.other.sendall(b"x")
    assert receive(pair.one, 1) == b"x"


@pytest.mark.parametrize(("seconds", "error"), [(0.02, TimeoutError), (0.0, BlockingIOError)])
def test_what_is_not_taken_in_time_is_never_sent_later(pair: Pair, seconds: float, error: type[OSError]) -> None:
    pair.one.settimeout(seconds)
    with pytest.raises(error):
        pair.one.sendall(bytes(1 << 20))
    assert pair.both.one.pending_bytes == 0
    with pytest.raises(ConnectionResetError):
        pair.one.sendall(b"more")
    assert len(receive(pair.other, 100_000)) == 100_000, "of what was out already"
    sent = pair.fabric.counts["sends"]
    pair.both.one.progress()
    assert pair.fabric.counts["sends"] == sent


def test_what_came_before_the_other_end_hung_up_is_read_first(pair: Pair) -> None:
    pair.other.sendall(b"last words")
    pair.lifelines[1].close()
    assert receive(pair.one, 10) == b"last words"
    for _ in range(2):
        assert pair.one.recv_into(memoryview(bytearray(1))) == 0
    with pytest.raises(ConnectionResetError):
        pair.one.sendall(bytes(1 << 20))


def test_what_comes_just_as_the_hang_up_is_seen_is_read_first(pair: Pair) -> None:
    class Lifeline:
        """Has been hung up, and lets what is under way arrive just then."""

        def recv(self, _size: int) -> bytes:
            pair.fabric.resume()
            return b""

        def close(self) -> None: ...

    pair.fabric.pause()
    pair.other.sendall(b"last words")
    pair.lifelines[1].close()
    pair.one._lifeline = Lifeline()  # type: ignore[assignment]
    assert receive(pair.one, 4) + receive(pair.one, 6) == b"last words"
    assert pair.one.recv_into(memoryview(bytearray(1))) == 0
    pair.lifelines[0].close()


def test_who_waits_is_woken_when_the_other_end_hangs_up(pair: Pair) -> None:
    timer = threading.Timer(0.05, pair.other.close)
    timer.start()
    assert pair.one.recv_into(memoryview(bytearray(1))) == 0
    timer.join()
    assert pair.closed == 1


def test_who_sends_is_woken_when_the_other_end_hangs_up(pair: Pair) -> None:
    timer = threading.Timer(0.05, pair.lifelines[1].shutdown, [socket.SHUT_RDWR])
    timer.start()
    with pytest.raises(ConnectionResetError):
        pair.one.sendall(bytes(1 << 20))
    timer.join()


def test_a_byte_over_tcp_after_the_move_is_refused(pair: Pair) -> None:
    pair.lifelines[1].send(b"x")
    for _ in range(2):
        with pytest.raises((ProtocolError, ConnectionResetError)):
            pair.one.recv_into(memoryview(bytearray(1)))
    assert pair.both.one._pair.state() == "RESET"


def test_nonsense_is_a_protocol_error(pair: Pair) -> None:
    pair.both.other._owed = 3
    pair.other.sendall(b"x")
    with pytest.raises(ProtocolError):
        pair.one.recv_into(memoryview(bytearray(1)))


@pytest.mark.parametrize("how", ["cut", "gone", "refused"])
def test_a_queue_pair_that_fails_is_a_lost_connection(pair: Pair, how: str) -> None:
    one, other = (end.verbs for end in pair.both.ends)
    assert isinstance(one, SoftVerbs)
    assert isinstance(other, SoftVerbs)
    if how == "cut":
        pair.fabric.cut(one.gid("soft0"), other.gid("soft0"))
        pair.one.sendall(b"x")
        pair.fabric.expire()
    elif how == "gone":
        one.vanish()
    else:
        pair.fabric.refused_posts = 1
    if how != "cut":  # which is not known yet
        with pytest.raises(ConnectionResetError):
            pair.one.sendall(b"x")
    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            pair.one.recv_into(memoryview(bytearray(1)))
    with pytest.raises(ConnectionResetError):
        pair.one.sendall(b"x")
    one.is_gone = False


def test_frames_go_over_it_and_a_hang_up_is_seen_without_reading(pair: Pair) -> None:
    frames = FrameSocket(pair.one, FRAME_BYTES)
    block = random.Random(0).randbytes(500_000)

    def answer() -> None:
        header = wire.parse_header(receive(pair.other, wire.HEADER.size), FRAME_BYTES)
        request = wire.decode_request(receive(pair.other, header.body_bytes))
        payload = receive(pair.other, header.payload_bytes)
        pair.other.sendall(wire.encode(wire.Done(request.id), len(payload)))
        pair.other.sendall(payload)

    thread = in_thread(answer)
    deadline = time.monotonic() + 10
    number = frames.begin(lambda number: wire.Release(number, 7), [memoryview(block)], deadline)
    got = bytearray(len(block))
    assert frames.finish(number, lambda reply: [memoryview(got)], deadline) == wire.Done(number)
    thread.join()
    assert got == block
    assert frames.is_open()
    assert frames.fileno() == pair.lifelines[0].fileno()
    pair.other.close()
    assert not frames.is_open()
    with pytest.raises(PeerLost):
        frames.finish(frames.begin(lambda number: wire.Release(number, 7), [], deadline), None, deadline)
    frames.close()
    assert not frames.is_open()
