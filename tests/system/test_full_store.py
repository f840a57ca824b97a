"""A store that is full, pinned, resized under load, or killed and started again: no wrong byte, and no hang."""

import asyncio
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest

from engine_client.blocking import BlockingClient
from engine_client.client import Client
from engine_client.decode import DecodeClient
from engine_client.prefill import PrefillClient
from kvstore import wire
from kvstore.errors import InvalidRequest, StoreError, TransportError
from kvstore.packed import pack_keys
from tests.system.children import Child
from tests.system.nodes import NodeProcess, content, namespace, until
from tests.system.test_clients_that_lie import chain as keys_of
from tests.system.wire_client import WireClient

MIB = 1 << 20
CAPACITY = 16 * MIB
SPACE = namespace("full")
SIZES = (1024, 60_000, 250_000, MIB)
BLOCKS = 8
TIMEOUT_S = 2.0
SLACK_S = 1.5  # what a call may take beyond its limit on a busy machine


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[NodeProcess]:
    options = ("--tiers.dram.high_watermark=0.9", "--tiers.dram.low_watermark=0.7")
    started = NodeProcess(tmp_path_factory.mktemp("node"), *options).start()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def _nothing_is_left(request) -> Iterator[None]:
    yield
    if "node" in request.fixturenames:
        node = request.getfixturevalue("node")
        node.assert_clean()
        node.empty()


@pytest.fixture
def client(node) -> Iterator[BlockingClient]:
    with BlockingClient(node.unix) as found:
        yield found


def prompt(seed: int, blocks: int = BLOCKS) -> list[int]:
    return [seed, *range(4 * blocks - 1)]


def size_of(seed: int) -> int:
    return SIZES[seed % len(SIZES)]


# Pressure.


def write_on(pipe: Connection, node: NodeProcess, tcp: bool, first: int, total_bytes: int) -> None:
    """Put chain after chain of several sizes, `total_bytes` in all or until told; says what was refused."""
    client = BlockingClient(node.tcp if tcp else node.unix, node.token if tcp else "")
    space = client.open("full", SPACE)
    seed, written, refused = first, 0, 0
    while written < total_bytes and not pipe.poll(0):
        keys = space.keys(prompt(seed))
        report = client.put(space, keys, [content(key, size_of(seed)) for key in keys])
        refused += report.refused
        written += BLOCKS * size_of(seed)
        seed += 2
    pipe.send((seed, refused))


def read_on(pipe: Connection, node: NodeProcess, tcp: bool) -> None:
    """Get chains at random until told, each byte looked at; says how many blocks it got, and its slowest call."""
    client = BlockingClient(node.tcp if tcp else node.unix, node.token if tcp else "", timeout_s=10.0)
    space = client.open("full", SPACE)
    choose = random.Random(7)
    blocks, slowest_s = 0, 0.0
    buffers = [bytearray(MIB) for _ in range(BLOCKS)]
    while not pipe.poll(0):
        seed = choose.randrange(120)
        keys, size = space.keys(prompt(seed)), size_of(seed)
        began = time.monotonic()
        found = client.get(space, keys, buffers)
        slowest_s = max(slowest_s, time.monotonic() - began)
        for key, buffer in zip(keys[:found], buffers, strict=False):
            assert buffer[:size] == content(key, size), "wrong bytes"
        blocks += found
    pipe.send((blocks, slowest_s))


def is_prefix(client: BlockingClient, seed: int) -> bool:
    space = client.open("full", SPACE)
    hits = [row["hit"] for row in client.explain(space, space.keys(prompt(seed)))]
    return hits == sorted(hits, reverse=True)


def test_puts_of_four_times_the_capacity(node, client):
    with ExitStack() as stack:
        readers = [stack.enter_context(Child(read_on, node, tcp)) for tcp in (False, True)]
        writers = [stack.enter_context(Child(write_on, node, at == 1, at, 2 * CAPACITY)) for at in (0, 1)]
        most = 0
        while not all(writer.pipe.poll(0.02) for writer in writers):
            used = node.used_bytes
            most = max(most, used)
            assert used <= CAPACITY
        for writer in writers:
            _, refused = writer.hear()
            assert refused <= 4 * BLOCKS, "only where readers and writers held nearly all of it"
        for reader in readers:
            reader.say("enough")
            blocks, slowest_s = reader.hear()
            assert blocks > 0
            assert slowest_s < 2.0
    assert most > 0.6 * CAPACITY
    until(lambda: node.used_bytes <= 0.9 * CAPACITY, "the high watermark to be kept")
    assert all(is_prefix(client, seed) for seed in range(120))
    assert client.stat()["counters"]["corrupt_blocks"] == 0


def test_the_front_of_a_chain_goes_last(node, client):
    space = client.open("full", SPACE)
    old, new = space.keys(prompt(1000, 40)), space.keys(prompt(2000, 40))
    client.put(space, old, [bytes(240_000)] * 40)
    assert client.put(space, new, [bytes(240_000)] * 40).stored == 40
    until(lambda: node.used_bytes <= 0.9 * CAPACITY)
    assert client.match(space, new) == 40
    left = client.match(space, old)
    assert 0 < left < 40, "the old chain lost its end"
    assert client.get(space, old[:left], [bytearray(240_000) for _ in range(left)]) == left
    assert set(client.stat()["counters"]["removed_blocks"]) & {"watermark", "pressure", "slab_taken"}
    assert "removed" in client.explain(space, old)[39]["reason"]


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_everything_is_pinned(node, way):
    with BlockingClient(node.tcp if way == "tcp" else node.unix, node.token) as client:
        space = client.open("full", SPACE)
        keys = space.keys(prompt(3000, 16))
        stored = client.put(space, keys, [bytes(1_000_000)] * 16).stored
        pin = client.pin(space, keys, hard=True, ttl_s=60)
        assert pin.blocks == stored
        began = time.monotonic()
        for size in SIZES:
            fresh = keys_of(size, 40)
            report = client.put(space, fresh, [bytes(size)] * 40)
            assert report.stored + report.refused == 40
        assert report.refused == 40
        assert "tier full" in client.explain(space, fresh)[0]["reason"]
        assert time.monotonic() - began < 3.0
        assert client.match(space, keys) == pin.blocks
        client.unpin(pin.pin_id)
        assert client.put(space, fresh[:1], [bytes(MIB)]).stored == 1


def test_soft_pins_go_last(node, client):
    space = client.open("full", SPACE)
    dear, cheap = space.keys(prompt(4000, 6)), space.keys(prompt(4001, 6))
    client.put(space, dear, [bytes(1_000_000)] * 6)
    pin = client.pin(space, dear, hard=False, ttl_s=60)
    client.put(space, cheap, [bytes(1_000_000)] * 6)
    for seed in range(10):
        assert client.put(space, space.keys(prompt(5000 + seed, 1)), [bytes(1_000_000)]).stored == 1
    assert client.match(space, dear) == 6
    assert client.match(space, cheap) < 6
    client.unpin(pin.pin_id)


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_delivery_on_a_lease_of_nothing_while_the_store_is_filled(node, client, tcp):
    """What is on its way to a reader keeps its slots until it is there, however slowly it reads."""
    with WireClient(node, tcp=tcp, receive_bytes=4096) as reader:
        space = client.open("full", SPACE)
        keys = keys_of(4, 6)
        client.put(space, keys, [content(key, 600_000) for key in keys])
        reader.send(wire.Acquire(7, reader.open("full", SPACE).number, pack_keys(keys), 0, 0, 0, True))
        reader.socket.recv(1, socket.MSG_PEEK)
        client.evict(space, keys)
        for fresh in keys_of(5, 60):  # more than fit: every free slot is used
            client.put(space, [fresh], [bytes(600_000)])
        reader.receive()
        assert reader.payload == b"".join(content(key, 600_000) for key in keys)


# Capacity.


def test_a_tier_that_shrinks_and_grows_under_load(node, client):
    with ExitStack() as stack, node.admin() as admin:
        readers = [stack.enter_context(Child(read_on, node, tcp)) for tcp in (False, True)]
        writers = [stack.enter_context(Child(write_on, node, at == 1, at, 1 << 40)) for at in (0, 1)]
        for slabs in (8, 1, 3, 24, 1, 16):
            admin.set_tier("dram", capacity_bytes=slabs * MIB)
            until(lambda slabs=slabs: node.tier()["capacity_bytes"] == slabs * MIB, f"{slabs} slabs")
            assert node.used_bytes <= slabs * MIB
            assert admin.check() == []
        for child in (*writers, *readers):
            child.say("enough")
        for child in (*writers, *readers):
            child.hear()


def test_a_tier_that_shrinks_while_blocks_are_held(node, client):
    space = client.open("full", SPACE)
    keys = space.keys(prompt(6000, 6))
    blocks = [content(key, 1_000_000) for key in keys]
    client.put(space, keys, blocks)
    held = client.acquire(space, keys, lease_s=60)
    with node.admin() as admin:
        admin.set_tier("dram", capacity_bytes=MIB)
        until(lambda: node.tier()["capacity_bytes"] == 6 * MIB, "what is not held to go")
        assert [bytes(block) for block in held.blocks] == blocks
        assert client.put(space, space.keys(prompt(6001, 1)), [bytes(1_000_000)]).refused == 1
        client.release(held)
        until(lambda: node.tier()["capacity_bytes"] == MIB)
        with pytest.raises(InvalidRequest):
            admin.set_tier("dram", capacity_bytes=MIB - 1)
        admin.set_tier("dram", capacity_bytes=CAPACITY)
        until(lambda: node.tier()["capacity_bytes"] == CAPACITY)


def test_a_tier_that_cannot_grow(tmp_path):
    """The system gives no more descriptors, and so no more slabs: the node says so, and serves with what it has."""
    node = NodeProcess(tmp_path).start()
    with BlockingClient(node.unix) as client, node.admin() as admin:
        space = client.open("full", SPACE)
        keys = space.keys(prompt(1))
        client.put(space, keys, [content(key, 5000) for key in keys])
        few = 200
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (few, few))
        admin.set_tier("dram", capacity_bytes=few * MIB)
        until(lambda: node.tier()["target_bytes"] < few * MIB, "the node to settle for less")
        assert CAPACITY < node.tier()["capacity_bytes"] < 0.75 * few * MIB
        assert "no memory for more" in node.log
        assert client.get(space, keys, [bytearray(5000) for _ in keys]) == BLOCKS
        with ExitStack() as stack:
            more = [stack.enter_context(BlockingClient(node.unix, timeout_s=1.0)) for _ in range(20)]
            assert {timed(guest.stat)[0] for guest in more} <= {
                "ok",
                "deadline_exceeded",
                "connect_failed",
                "peer_lost",
            }
        assert client.get(space, keys, [bytearray(5000) for _ in keys]) == BLOCKS
    node.empty()
    node.stop()


# The node dies.


def timed(what: Callable[[], object]) -> tuple[str, float]:
    """What became of a call: the error's code or "ok", and its seconds. Anything but a StoreError is a fault."""
    began = time.monotonic()
    try:
        what()
        said = "ok"
    except StoreError as error:
        said = error.code
    return said, time.monotonic() - began


def use_a_node_that_dies(pipe: Connection, node: NodeProcess, tcp: bool) -> None:
    """Everything a blocking client can do, over and over, until told; each call within its limit, with typed errors."""
    client = BlockingClient(node.tcp if tcp else node.unix, node.token if tcp else "", timeout_s=TIMEOUT_S)
    space = client.open("full", SPACE)
    keys = space.keys(prompt(1))
    blocks = [content(key, 5000) for key in keys]
    buffers = [bytearray(5000) for _ in keys]
    codes: set[str] = set()
    slowest_s = 0.0

    def get_right() -> None:
        found = client.get(space, keys, buffers)
        assert list(map(bytes, buffers))[:found] == blocks[:found]

    calls = [
        lambda: client.put(space, keys, blocks), get_right, lambda: client.match(space, keys), client.stat,
        lambda: client.get_bytes(space, keys[0]), lambda: client.evict(space, keys[-1:]),
        lambda: client.explain(space, keys), lambda: client.get(space, space.keys(prompt(2)), buffers),
        lambda: client.pin(space, keys, hard=False, ttl_s=1.0),
    ]  # fmt: skip
    if not tcp:
        calls += [lambda: client.views(space, keys), lambda: client.acquire(space, keys, lease_s=0.5)]
    pipe.send("ready")
    while not pipe.poll(0):
        for call in calls:
            code, seconds = timed(call)
            codes.add(code)
            slowest_s = max(slowest_s, seconds)
    pipe.send((codes, slowest_s))


def run_an_engine(pipe: Connection, node: NodeProcess, tcp: bool) -> None:
    """As an engine does: load, compute, stream out. It never sees an exception, and no load beyond its deadline."""
    client = BlockingClient(node.tcp if tcp else node.unix, node.token if tcp else "", timeout_s=TIMEOUT_S)
    space = client.open("engine", namespace("engine", block_bytes=4096))
    decode, prefill = DecodeClient(client, space), PrefillClient(client, space)
    seed, slowest_s, hits = 0, 0.0, 0
    pipe.send("ready")
    while not pipe.poll(0.001):
        tokens = prompt(seed // 2)
        began = time.monotonic()
        loaded = decode.load(tokens, 0.3)
        slowest_s = max(slowest_s, time.monotonic() - began)
        for block in loaded.blocks:
            assert not loaded.is_intact() or bytes(block) == b"e" * 4096
        hits += bool(loaded.tokens)
        loaded.close()
        stream = prefill.begin(tokens)
        for layer in range(4):
            stream.layer_ready(layer, 0, BLOCKS, write_layer)
        stream.finish(BLOCKS)
        seed += 1
    prefill.close()
    pipe.send((slowest_s, hits))


def write_layer(blocks, indexes) -> None:
    for block in blocks:
        block[:] = b"e" * 4096


def test_a_node_that_is_killed_and_started_again(tmp_path):
    node = NodeProcess(tmp_path).start()
    with ExitStack() as stack:
        users = [stack.enter_context(Child(use_a_node_that_dies, node, tcp)) for tcp in (False, True)]
        engines = [stack.enter_context(Child(run_an_engine, node, tcp)) for tcp in (False, True)]
        for child in (*users, *engines):
            assert child.hear() == "ready"
        for _ in range(2):
            stored = node.counters()["stored_blocks"]
            until(
                lambda stored=stored: node.counters()["stored_blocks"] > stored + 2 * BLOCKS, "the clients to be back"
            )
            epoch = node.epoch
            node.kill()
            assert not any(child.pipe.poll(0.05) for child in (*users, *engines)), "a client gave up"
            node.start()
            assert node.epoch > epoch
        until(lambda: node.counters()["stored_blocks"] > 2 * BLOCKS, "the clients to be back")
        for child in (*users, *engines):
            child.say("enough")
        for user in users:
            codes, slowest_s = user.hear()
            assert "ok" in codes
            assert codes <= {"ok", "peer_lost", "connect_failed", "deadline_exceeded", "not_found", "corrupt"}, codes
            assert slowest_s < TIMEOUT_S + SLACK_S
        for engine in engines:
            slowest_s, hits = engine.hear()
            assert slowest_s < 0.3 + SLACK_S
            assert hits > 0
    node.assert_clean()
    node.empty()
    node.stop()


def test_a_reader_that_only_misses_notices_that_its_node_was_replaced(tmp_path):
    """All that it asks is answered by shared memory, which says the same for ever once its node is dead."""
    node = NodeProcess(tmp_path).start()
    with BlockingClient(node.unix, timeout_s=TIMEOUT_S) as reader:
        space = reader.open("full", SPACE)
        keys = space.keys(prompt(1))
        assert reader.match(space, keys) == 0
        node.kill()
        node.start()
        with BlockingClient(node.unix) as writer:
            assert writer.put(writer.open("full", SPACE), keys, [content(key, 5000) for key in keys]).stored == BLOCKS
        assert _patiently(lambda: reader.match(space, keys)) == BLOCKS
        node.kill()
        node.start()
        with BlockingClient(node.unix) as writer:
            assert writer.put(writer.open("full", SPACE), keys, [content(key, 5000) for key in keys]).stored == BLOCKS
        more = space.keys(prompt(1, 2 * BLOCKS))
        with BlockingClient(node.unix) as writer:
            writer.put(writer.open("full", SPACE), more, [content(key, 5000) for key in more])
        buffers = [bytearray(5000) for _ in more]
        assert _patiently(lambda: reader.get(space, more, buffers)) >= BLOCKS
        until(lambda: _patiently(lambda: reader.get(space, more, buffers)) == 2 * BLOCKS, "the new node's blocks")
    node.stop()


def _patiently(ask: Callable[[], int]) -> int:
    def answer() -> list[int]:
        try:
            return [ask()]
        except TransportError:
            return []

    return until(answer)[0]


def test_an_async_client_whose_node_is_replaced(tmp_path):
    node = NodeProcess(tmp_path).start()

    async def use() -> None:
        async with (
            Client(node.unix, timeout_s=TIMEOUT_S) as local,
            Client(node.tcp, node.token, timeout_s=TIMEOUT_S) as remote,
        ):
            for client in (local, remote):
                space = await client.open("full", SPACE)
                keys = space.keys(prompt(1))
                blocks = [content(key, 5000) for key in keys]
                await client.put(space, keys, blocks)
                node.kill()
                with pytest.raises(TransportError):
                    await client.stat()
                await asyncio.to_thread(node.start)
                deadline = time.monotonic() + 5.0
                while time.monotonic() < deadline:
                    try:
                        assert (await client.put(space, keys, blocks)).stored == BLOCKS
                        break
                    except TransportError:
                        await asyncio.sleep(0.01)
                buffers = [bytearray(5000) for _ in keys]
                assert await client.get(space, keys, buffers) == BLOCKS
                assert list(map(bytes, buffers)) == blocks

    asyncio.run(use())
    node.empty()
    node.stop()


def test_ids_of_a_node_that_is_gone(tmp_path):
    """They stand for nothing on the next, not even for what a client got there at the same place in its life."""
    node = NodeProcess(tmp_path).start()
    ids = []
    for _ in range(2):
        with WireClient(node) as client:
            number = client.open("full", SPACE).number
            keys = keys_of(1, 2)
            client.put(number, keys, [bytes(100)] * 2)
            lease_id = client.ask(wire.Acquire(1, number, pack_keys(keys), 60_000)).lease_id
            grant_id = client.place(number, keys_of(2, 1), [100]).grant_id
            pin_id = client.ask(wire.Pin(1, number, pack_keys(keys), True, 60_000)).pin_id
            for lease, grant, pin in ids:
                client.ask(wire.Release(1, lease))
                client.ask(wire.Abort(1, grant))
                assert isinstance(client.ask(wire.Unpin(1, pin)), wire.Failed)
                assert isinstance(client.ask(wire.Commit(1, grant, bytes(8))), wire.Failed)
                assert isinstance(client.ask(wire.Renew(1, lease_id, 60_000)), wire.Done)
                assert isinstance(client.ask(wire.Progress(1, grant_id, 1)), wire.Done)
            ids.append((lease_id, grant_id, pin_id))
            assert max(ids[-1]) < 2**53, "they travel as JSON numbers too"
            client.ask(wire.Unpin(1, pin_id))
        node.kill()
        node.start()
    node.stop()


def test_a_grant_and_a_lease_of_a_node_that_is_gone(tmp_path):
    node = NodeProcess(tmp_path).start()
    with BlockingClient(node.unix, timeout_s=TIMEOUT_S) as client:
        space = client.open("full", SPACE)
        keys = space.keys(prompt(1))
        client.put(space, keys[:4], [content(key, 5000) for key in keys[:4]])
        held = client.acquire(space, keys[:4], lease_s=60)
        grant = client.place(space, keys[4:], [5000] * 4, keys[3])
        node.kill()
        for slot in grant.slots:
            slot[:] = bytes(5000)
        assert bytes(held.blocks[0]) == content(keys[0], 5000), "what is mapped stays readable"
        with pytest.raises(TransportError):
            client.commit(grant)
        node.start()
        assert until(lambda: timed(lambda: client.put(space, keys, [bytes(5000)] * 8))[0] == "ok")
        for call in (lambda: client.commit(grant), lambda: client.renew(held, 1.0)):
            assert timed(call)[0] == "stale_lease"
        client.abort(grant)
        client.release(held)
    node.empty()
    node.stop()
