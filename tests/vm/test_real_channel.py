"""A channel on real verbs: bytes both ways, an event loop, a peer that is gone."""

import asyncio
import os
import random
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvstore.errors import PeerLost
from kvstore.transport.rdma.channel import CHANNEL_BYTES, Channel
from kvstore.transport.rdma.channel_socket import ChannelSocket
from kvstore.transport.rdma.channel_stream import ChannelTransport
from kvstore.transport.rdma.verbs import BINDINGS, load_verbs
from kvstore.wire import HEADER, MAGIC
from tests.channel_pair import Channels, channels
from tests.unit.test_stream import Receiver, framed

PATIENCE_S = 30.0
ROUNDS = 200


@pytest.fixture(params=BINDINGS)
def both(request: pytest.FixtureRequest) -> Iterator[Channels]:
    if request.param == "pyverbs":
        pytest.importorskip("pyverbs.device", reason="pyverbs is of another Python here")
    verbs = load_verbs(request.param)
    if not verbs.devices():
        pytest.skip("no RDMA device: run it in the virtual machine")
    with ExitStack() as stack:
        both = channels((verbs, verbs), stack)
        yield both
        for channel in both[:2]:
            channel.close()


def wait(*waiting: Channel) -> None:
    """Until something completed at one of them."""
    assert select.select([channel.fd for channel in waiting], [], [], PATIENCE_S)[0], "nothing completes any more"


def exchange(both: Channels, data: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """What each reads of what the other writes, both at once; asleep whenever nothing has come."""
    got = bytearray(), bytearray()
    buffer = memoryview(bytearray(CHANNEL_BYTES))
    for channel, mine in zip(both[:2], data, strict=True):
        channel.write(mine)
    while (len(got[0]), len(got[1])) != (len(data[1]), len(data[0])):
        moved = 0
        for channel, mine in zip(both[:2], got, strict=True):
            channel.progress()
            assert channel.error is None, channel.error
            size = channel.read_into(buffer)
            mine += buffer[:size]
            moved += size
        if not moved:
            wait(*both[:2])
    return bytes(got[0]), bytes(got[1])


def test_bytes_go_both_ways_at_once_in_order(both: Channels) -> None:
    data = random.Random(1).randbytes(2_000_000), random.Random(2).randbytes(2_000_000)
    assert exchange(both, data) == data[::-1]
    assert both.one.late_completions == both.other.late_completions == 0


def test_pieces_of_any_size_arrive(both: Channels) -> None:
    chance = random.Random(3)
    for size in (0, 1, 55, 56, 57, 87, 88, 89, 8183, 8184, 8185, 20_000):
        data = chance.randbytes(size), chance.randbytes(20_000 - size)
        assert exchange(both, data) == data[::-1]


def test_what_came_can_be_read_after_the_queue_pair_failed(both: Channels) -> None:
    both.other.write(b"last words")
    both.other.flush()
    both.one.progress()
    while not both.one.is_readable:
        wait(both.one)
        both.one.progress()
    both.other.close()
    both.one.write(b"hello?")
    both.one.flush()
    both.one.progress()
    while both.one.error is None:
        wait(both.one)
        both.one.progress()
    assert isinstance(both.one.error, PeerLost)
    buffer = memoryview(bytearray(100))
    assert bytes(buffer[: both.one.read_into(buffer)]) == b"last words"
    assert both.ends[0].pair.state() == "RESET"


def test_a_socket_over_it_answers_and_hangs_up(both: Channels) -> None:
    one, other = socket.socketpair()
    here, there = ChannelSocket(both.one, one, both.one.close), ChannelSocket(both.other, other, both.other.close)
    buffer = memoryview(bytearray(100))
    taken_s = []
    for end in (here, there):
        end.settimeout(PATIENCE_S)
    for _ in range(ROUNDS):
        started = time.perf_counter()
        here.sendall(b"q" * 40)
        assert there.recv_into(buffer) == 40
        there.sendall(b"a" * 40)
        assert here.recv_into(buffer) == 40
        taken_s.append(time.perf_counter() - started)
    print(f"socket, 40 B there and back in one thread: {sorted(taken_s)[ROUNDS // 2] * 1e6:.0f} us at the median")
    there.close()
    assert here.recv_into(buffer) == 0
    here.close()


def test_frames_in_an_event_loop_and_both_ends_end(both: Channels) -> None:
    block = os.urandom(1_000_000)
    closed: list[str] = []

    async def talk() -> None:
        loop = asyncio.get_running_loop()
        ends = Receiver(), Receiver()
        for handle, end, channel in zip(socket.socketpair(), ends, both[:2], strict=True):
            handle.setblocking(False)
            await loop.connect_accepted_socket(lambda end=end: end, handle)  # type: ignore[misc]
            end.move_to(
                lambda lifeline, channel=channel, end=end: ChannelTransport(  # type: ignore[misc]
                    channel, end, lifeline, lambda: closed.append("closed")
                )
            )
        taken_s = []
        for number in range(ROUNDS):
            started = time.perf_counter()
            for source, target in (ends, ends[::-1]):
                source.send(framed(b"q" * 40))
                await target.until(lambda target=target, number=number: len(target.bodies) > number)  # type: ignore[misc]
            taken_s.append(time.perf_counter() - started)
        print(f"frames, 40 B there and back in one loop: {sorted(taken_s)[ROUNDS // 2] * 1e6:.0f} us at the median")
        ends[0].send(HEADER.pack(4, MAGIC, len(block)) + b"body", [memoryview(block)])
        transport = ends[0]._transport
        assert transport is not None
        transport.close()
        await ends[1].until(lambda: bool(ends[1].lost))
        await ends[0].until(lambda: bool(ends[0].lost))
        assert ends[1].payloads == [block]
        assert [len(end.lost) for end in ends] == [1, 1]
        assert closed == ["closed", "closed"]

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_S))
