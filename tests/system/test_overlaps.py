"""Calls that overlap with what ends under them: a close, a restart, a refusal; and one client that waits for itself."""

import asyncio
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from engine_client import writes
from engine_client.blocking import BlockingClient
from engine_client.client import Client
from engine_client.decode import DecodeClient
from engine_client.steps import Begin, Finish, Link, OpenSpace
from kvstore import wire
from kvstore.errors import InvalidRequest, PeerLost, TransportError
from kvstore.published import IDENT_PREFIX
from kvstore.transport import local
from kvstore.types import BlockKey, Placement
from tests.system.nodes import NodeProcess, content, namespace, until

SIZE = 1 << 20
SPACE = namespace("model", block_bytes=SIZE)
SMALL = namespace("small", block_bytes=4096)


@pytest.fixture
def node(tmp_path) -> Iterator[NodeProcess]:
    started = NodeProcess(tmp_path, "--tiers.dram.capacity=32MiB").start()
    yield started
    started.stop()


def test_a_ring_with_a_part_that_there_is_not(node):
    """Clients write their rings: whatever stands there, the node goes on."""
    with BlockingClient(node.unix) as client:
        space = client.open("halves", namespace("halves", block_bytes=4096, parts=2))
        key = space.keys([1, 2, 3, 4])[0]
        client.put(space, [key], [bytes(4096)])
        for part in (2, 65_534, 65_535):
            client._link.shared.ring.report(IDENT_PREFIX.pack(space.number, part) + key[:16], 1)
        client._link.shared.ring.report(struct.pack("<HH", 65_535, 65_535) + bytes(16), 2**32 - 1)
        assert client.stat()["tiers"][0]["blocks"] == 1
    node.assert_clean()


def test_an_async_client_that_is_closed_while_a_thread_still_writes(node, monkeypatch):
    """The node gives its slots to others only when no thread of it can write there any more."""
    fill, is_filling, go_on = writes._fill, threading.Event(), threading.Event()

    def late(grant, blocks):
        is_filling.set()
        assert go_on.wait(20)
        return fill(grant, blocks)

    async def use() -> None:
        client = Client(node.unix)
        space = await client.open("model", SPACE)
        monkeypatch.setattr(writes, "_fill", late)
        put = asyncio.create_task(client.put(space, space.keys(range(12)), [b"O" * SIZE] * 3))
        await asyncio.to_thread(is_filling.wait)
        monkeypatch.setattr(writes, "_fill", fill)
        closing = asyncio.create_task(client.aclose())
        await asyncio.sleep(0.1)
        with BlockingClient(node.unix, verify=False) as other:
            its = other.open("model", SPACE)
            keys = its.keys(range(700, 700 + 4 * 24))
            report = await asyncio.to_thread(other.put, its, keys, [b"N" * SIZE] * 24)
            go_on.set()
            await closing
            with pytest.raises(TransportError):
                await put
            targets = [bytearray(SIZE) for _ in range(report.stored)]
            assert other.get(its, keys[: report.stored], targets) == report.stored > 20
            assert all(target == b"N" * SIZE for target in targets)

    asyncio.run(use())
    node.assert_clean()


def test_an_async_get_under_which_the_node_is_started_again(node, monkeypatch):
    """It ends with the node that it was asked of: another has other memory under the same numbers."""
    get_into, is_reading, go_on = local.SharedMemory.get_into, threading.Event(), threading.Event()

    def late(self, *arguments, **options):
        found = get_into(self, *arguments, **options)
        if not is_reading.is_set():
            is_reading.set()
            assert go_on.wait(20)
        return found

    async def connected(client: Client, space: OpenSpace, keys: list[BlockKey]) -> bool:
        try:
            return await client.match(space, keys) == 8
        except TransportError:
            await asyncio.sleep(0.02)
            return False

    async def use() -> None:
        async with Client(node.unix, verify=False) as client:
            space = await client.open("model", SPACE)
            keys = space.keys(range(4 * 8))
            await client.put(space, space.keys(range(900, 932)), [b"O" * SIZE] * 8)
            monkeypatch.setattr(local.SharedMemory, "get_into", late)
            targets = [bytearray(SIZE) for _ in keys]
            get = asyncio.create_task(client.get(space, keys, targets, wait_s=0.5))
            await asyncio.to_thread(is_reading.wait)
            node.kill()
            await asyncio.to_thread(node.start)
            with BlockingClient(node.unix) as other:
                its = other.open("model", SPACE)
                other.put(its, keys, [b"N" * SIZE] * 8)
                async with asyncio.timeout(20):
                    while not await connected(client, space, keys):
                        pass
            go_on.set()
            with pytest.raises(PeerLost):
                await get
            assert await client.get(space, keys, targets) == 8
            assert all(target == b"N" * SIZE for target in targets)

    asyncio.run(use())
    node.assert_clean()


def test_a_client_whose_readers_wait_for_its_own_writer(node):
    """However many of its calls wait, the commit they wait for gets through."""

    async def use() -> None:
        async with Client(node.unix) as client:
            space = await client.open("small", SMALL)
            keys = space.keys(range(4))
            grant = await client.place(space, keys, [4096])
            waiting = [asyncio.create_task(client.acquire(space, keys, lease_s=5, wait_s=8)) for _ in range(100)]
            await asyncio.sleep(0.1)
            began = time.monotonic()
            await client.commit(grant)
            assert time.monotonic() - began < 2
            held = [one for one in await asyncio.gather(*waiting) if one is not None]
            assert len(held) >= 16
            for one in held:
                await client.release(one)

    asyncio.run(use())
    node.assert_clean()


def test_a_time_limit_that_is_over_or_has_no_end(node):
    with BlockingClient(node.unix) as client:
        space = client.open("small", SMALL)
        keys = space.keys(range(4))
        client.put(space, keys, [content(keys[0], 4096)])
        decode = DecodeClient(client, space)
        for deadline_s in (-1.0, -0.5, 0.0):
            assert decode.load(range(4), deadline_s).tokens in (0, 4)
        loaded = decode.load(range(4), float("inf"))
        assert loaded.tokens == 4, loaded.failure
        loaded.close()
        for within_s in (-1.0, -0.001):
            with pytest.raises(TransportError):
                client.release(client.acquire(space, keys, lease_s=5, within_s=within_s))
    until(lambda: node.used_bytes >= 0)


@pytest.mark.parametrize("blocks", [2, 32])
def test_a_put_with_a_block_twice_is_refused_whatever_its_size(node, blocks):
    with BlockingClient(node.unix) as client:
        space = client.open("model", SPACE)
        keys = space.keys(range(4 * blocks))
        with pytest.raises(InvalidRequest, match="once in a chain"):
            client.put(space, [*keys[:-1], keys[0]], [bytes(SIZE)] * blocks)
        with pytest.raises(InvalidRequest, match="once in a chain"):
            client.put(space, keys, [bytes(SIZE)] * blocks, parent=keys[-1])
        assert client.match(space, keys) == 0


def test_a_put_in_pieces_that_is_refused_and_cancelled_asks_for_nothing_twice():
    """What it still waits for when its second piece is refused is given up once, cancelled or not."""
    welcome = wire.Welcome(1, 1, "node", 1, "t", b"", True, False, SIZE, 1000, SIZE)
    link, space = Link(welcome, None, True), OpenSpace("model", SPACE, number=1)
    keys = [BlockKey(bytes([number]) * 16) for number in range(3)]
    pieces = [slice(0, 1), slice(1, 2), slice(2, 3)]
    put = writes._put_pieces(link, space, keys, [memoryview(b"x")] * 3, None, pieces)
    for ticket in range(3):
        step = next(put) if ticket == 0 else put.send(ticket - 1)
        assert isinstance(step, Begin)
    step = put.send(2)
    assert isinstance(step, Finish)
    assert step.ticket == 0
    step = put.send(wire.Placed(1, 0, bytes([Placement.FULL]), b"", b""))
    asked = [step.ticket]
    error: BaseException = asyncio.CancelledError()
    while not isinstance(ended := _throw(put, error), BaseException):
        asked.append(ended.ticket)
        error = PeerLost("nobody waits for it any more")
    assert isinstance(ended, asyncio.CancelledError)
    assert asked == [1, 2]
    assert link.lent == 0


def _throw(put, error):
    """The next step after `error`, or what the operation ends with."""
    try:
        return put.throw(error)
    except BaseException as end:
        return end
