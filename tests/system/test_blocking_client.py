"""The blocking client and the engine clients on it: hung nodes, lost connections, threads, damaged memory."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest

from engine_client.blocking import BlockingClient
from engine_client.decode import DecodeClient
from engine_client.prefill import PrefillClient
from engine_client.steps import OpenSpace
from kvstore import wire
from kvstore.copier import checksum
from kvstore.errors import DeadlineExceeded, StaleLease, StoreError
from kvstore.packed import unpack_u64
from kvstore.region import Region
from kvstore.transport.local import Door
from kvstore.types import BlockKey
from tests.system.children import Child
from tests.system.nodes import NodeProcess, content, namespace, pause, until
from tests.system.test_full_store import timed
from tests.system.wire_client import WireClient

SIZE = 20_000
BLOCKS = 8
LAYERS = 4
LIMIT_S = 0.3
SLACK_S = 0.8  # what a call may take beyond its limit on a busy machine
SPACE = namespace("model", block_bytes=SIZE, layers=LAYERS)


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[NodeProcess]:
    started = NodeProcess(tmp_path_factory.mktemp("node"), "--limits.wait_max=1s").start()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def _nothing_is_left(node) -> Iterator[None]:
    yield
    node.thaw()
    node.assert_clean()
    node.empty()


@pytest.fixture(params=["unix", "tcp"])
def address(node, request) -> tuple[str, str]:
    return (node.unix, "") if request.param == "unix" else (node.tcp, node.token)


@pytest.fixture
def writer(node) -> Iterator[BlockingClient]:
    with BlockingClient(node.unix) as client:
        yield client


def prompt(seed: int, blocks: int = BLOCKS) -> list[int]:
    return [seed, *range(4 * blocks - 1)]


def store(client: BlockingClient, seed: int, blocks: int = BLOCKS) -> tuple[OpenSpace, list[BlockKey]]:
    space = client.open("model", SPACE)
    keys = space.keys(prompt(seed, blocks))
    client.put(space, keys, [content(key, SIZE) for key in keys])
    return space, keys


def are_right(keys: list[BlockKey], blocks: list) -> bool:
    return all(bytes(block) == content(key, SIZE) for key, block in zip(keys, blocks, strict=False))


# A node that hangs.


def test_every_call_on_a_node_that_hangs_ends_in_time(node, address):
    with BlockingClient(*address, timeout_s=LIMIT_S) as client:
        space, keys = store(client, 1)
        buffers = [bytearray(SIZE) for _ in keys]
        grant = client.place(space, space.keys(prompt(2)), [SIZE] * BLOCKS)
        calls: list[Callable[[], object]] = [
            lambda: client.put(space, space.keys(prompt(3)), [bytes(SIZE)] * BLOCKS), lambda: client.match(space, keys),
            lambda: client.get(space, keys, buffers), lambda: client.get(space, space.keys(prompt(4)), buffers),
            lambda: client.get(space, space.keys(prompt(2)), buffers, wait_s=0.2), lambda: client.commit(grant),
            lambda: client.get_bytes(space, keys[0]), lambda: client.evict(space, keys), client.stat, client.check,
            lambda: client.open("another", SPACE), lambda: client.pin(space, keys, hard=True, ttl_s=9.0),
            lambda: client.explain(space, keys), lambda: client.list_blocks(space), lambda: client.abort(grant),
            lambda: client.set_tier("dram", high_watermark=0.9), lambda: client.find("model"), client.connect,
        ]  # fmt: skip
        node.freeze()
        for number, call in enumerate(calls):
            with BlockingClient(*address, timeout_s=LIMIT_S) as fresh:
                said, seconds = timed(call)
                assert seconds < LIMIT_S + 0.2 + SLACK_S, number
                assert said in ("ok", "deadline_exceeded", "connect_failed", "stale_lease", "peer_lost"), number
                if number % 6 == 0:
                    said, seconds = timed(fresh.stat)
                    assert said in ("deadline_exceeded", "connect_failed")
                    assert seconds < LIMIT_S + SLACK_S
        node.thaw()
        until(lambda: timed(client.stat)[0] == "ok")
        assert until(lambda: client.get(space, keys, buffers)) == BLOCKS
        assert are_right(keys, buffers)


def test_many_threads_on_one_client_of_a_node_that_hangs(node, address):
    """They take turns on the connection, and each still ends in time."""
    with BlockingClient(*address, timeout_s=LIMIT_S) as client, ThreadPoolExecutor(6) as pool:
        client.stat()
        node.freeze()
        for said, seconds in pool.map(lambda _: timed(client.stat), range(12)):
            assert said in ("deadline_exceeded", "connect_failed")
            assert seconds < LIMIT_S + SLACK_S
        node.thaw()
        until(lambda: timed(client.stat)[0] == "ok")


@pytest.mark.parametrize("when", ["connected", "not connected", "frozen again and again"])
def test_a_load_from_a_node_that_hangs(node, writer, address, when):
    """An engine waits for its deadline, and then computes."""
    _, keys = store(writer, 5)
    with BlockingClient(*address, timeout_s=30.0) as client:
        decode = DecodeClient(client, client.open("model", SPACE))
        if when == "not connected":
            client.close()
        for turn in range(6 if when.startswith("frozen") else 1):
            if when.startswith("frozen"):
                with Freezer(node, turn * 0.0005):
                    loaded, seconds = load(decode, 5)
            else:
                node.freeze()
                loaded, seconds = load(decode, 5)
            assert seconds < 0.2 + SLACK_S
            assert are_right(keys, loaded.blocks)
            assert loaded.tokens == 4 * len(loaded.blocks)
            began = time.monotonic()
            loaded.close()
            assert time.monotonic() - began < 1.0 + SLACK_S
            node.thaw()
        assert until(lambda: load(decode, 5)[0].tokens) == 4 * BLOCKS


def load(decode: DecodeClient, seed: int):
    began = time.monotonic()
    loaded = decode.load(prompt(seed), 0.2)
    return loaded, time.monotonic() - began


class Freezer:
    """Freezes the node some time after it is entered."""

    def __init__(self, node: NodeProcess, after_s: float) -> None:
        self._timer = threading.Timer(after_s, node.freeze)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.join()


def test_a_prefill_whose_node_hangs_goes_quiet(node, address):
    with BlockingClient(*address, timeout_s=LIMIT_S) as client:
        prefill = PrefillClient(client, client.open("model", SPACE))
        stream = prefill.begin(prompt(6))
        stream.layer_ready(0, 0, 4, write_layer)
        stream.layer_ready(0, 4, BLOCKS, write_layer)
        until(lambda: node.used_bytes >= BLOCKS * SIZE)
        node.freeze()
        began = time.monotonic()
        for layer in range(1, LAYERS):
            stream.layer_ready(layer, 0, 4, write_layer)
            stream.layer_ready(layer, 4, BLOCKS, write_layer)
        assert time.monotonic() - began < 0.2, "the engine is not kept waiting"
        stored = stream.finish(BLOCKS)
        assert stored.failure
        assert time.monotonic() - began < 3 * LIMIT_S + SLACK_S
        assert timed(lambda: prefill.begin(prompt(7)).finish(0))[1] < 2 * LIMIT_S + SLACK_S
        node.thaw()
        until(lambda: timed(client.stat)[0] == "ok")
        stream = prefill.begin(prompt(8))
        for layer in range(LAYERS):
            stream.layer_ready(layer, 0, BLOCKS, write_layer)
        assert stream.finish(BLOCKS).blocks == BLOCKS
        prefill.close()


def write_layer(blocks, indexes) -> None:
    for block in blocks:
        block[:] = b"w" * len(block)


def test_an_engine_whose_write_fails(node, address):
    """A fault of the engine's side is raised there; no slot stays behind, and no write runs any more."""
    with BlockingClient(*address) as client:
        prefill = PrefillClient(client, client.open("model", SPACE))
        running = threading.Semaphore(0)

        def fail(blocks, indexes) -> None:
            running.release()
            raise ZeroDivisionError

        for end in ("finish", "abort"):
            stream = prefill.begin(prompt(9))
            for layer in range(LAYERS):
                stream.layer_ready(layer, 0, BLOCKS, fail)
            assert running.acquire(timeout=10.0)
            with pytest.raises(ZeroDivisionError):
                stream.finish(BLOCKS) if end == "finish" else stream.abort()
            assert node.used_bytes == 0
        prefill.close()


# Connections that are given up while somebody is in the node's memory.


def test_a_grant_whose_connection_another_thread_gave_up(node, writer):
    """Its slots are nobody else's until its writer is done with them, and its commit is refused."""
    with BlockingClient(node.unix, timeout_s=LIMIT_S) as client:
        space = client.open("model", SPACE)
        grant = client.place(space, space.keys(prompt(10)), [SIZE] * BLOCKS)
        node.freeze()
        with ThreadPoolExecutor(1) as other, pytest.raises(DeadlineExceeded):
            other.submit(client.stat).result()
        node.thaw()
        until(lambda: timed(client.stat)[0] == "ok")
        chains = [store(writer, 1000 + seed) for seed in range(120)]  # more than fit: every slot is used
        for slot in grant.slots:
            slot[:] = b"\xee" * SIZE
        for space, keys in chains:
            buffers = [bytearray(SIZE) for _ in keys]
            found = writer.get(space, keys, buffers)
            assert are_right(keys[:found], buffers)
        assert node.counters()["corrupt_blocks"] == 0
        with pytest.raises(StaleLease):
            client.commit(grant)
        writer.evict(space)
        until(lambda: node.used_bytes == 0, "its slots, now that it is done")


def test_blocks_in_hand_whose_connection_another_thread_gave_up(node, writer):
    _, keys = store(writer, 11)
    with BlockingClient(node.unix, timeout_s=LIMIT_S) as client:
        decode = DecodeClient(client, client.open("model", SPACE))
        loaded = decode.load(prompt(11), 2.0)
        assert loaded.tokens == 4 * BLOCKS
        node.freeze()
        with pytest.raises(DeadlineExceeded):
            client.stat()
        node.thaw()
        until(lambda: timed(client.stat)[0] == "ok")
        for seed in range(120):
            store(writer, 2000 + seed)
        assert not loaded.is_intact() or are_right(keys, loaded.blocks)
        assert loaded.is_intact(), "the connection was kept for it"
        loaded.close()
        loaded.close()


def test_blocks_in_hand_whose_node_hung_up(node, writer):
    store(writer, 12)
    with BlockingClient(node.unix) as client:
        decode = DecodeClient(client, client.open("model", SPACE))
        loaded = decode.load(prompt(12), 2.0)
        assert loaded.is_intact()
        client.close()
        for seed in range(120):
            store(writer, 3000 + seed)
        assert not loaded.is_intact()
        loaded.close()


# Large puts, which go in pieces.

LARGE = 500_000


def large(client: BlockingClient, seed: int, blocks: int = 12) -> tuple[OpenSpace, list[BlockKey], list[bytes]]:
    space = client.open("large", namespace("large"))
    keys = space.keys(prompt(seed, blocks))
    return space, keys, [content(key, LARGE) for key in keys]


def test_a_large_put_of_which_some_is_here_already(node, address):
    with BlockingClient(*address) as client:
        space, keys, blocks = large(client, 50)
        assert client.put(space, keys[:3], blocks[:3]).stored == 3
        assert client.put(space, keys[6:7], blocks[6:7], keys[5]).stored == 1
        report = client.put(space, keys, blocks)
        assert (report.stored, report.present, report.stored_bytes) == (8, 4, 8 * LARGE)
        buffers = [bytearray(LARGE) for _ in keys]
        assert client.get(space, keys, buffers) == 12
        assert list(map(bytes, buffers)) == blocks


def test_a_large_put_for_which_there_is_no_room(node, writer, address):
    space, keys, blocks = large(writer, 51, 24)
    stored = writer.put(space, keys, blocks).stored
    pin = writer.pin(space, keys, hard=True, ttl_s=60.0)
    with BlockingClient(*address) as client:
        its, more, others = large(client, 52, 24)
        report = client.put(its, more, others)
        assert report.stored + report.refused == 24
        assert report.refused >= stored - 8
        assert client.match(its, more) == report.stored
    writer.unpin(pin.pin_id)


def test_a_large_put_to_a_node_that_hangs_in_the_middle(node, address):
    with BlockingClient(*address, timeout_s=LIMIT_S) as client:
        for turn in range(4):
            space, keys, blocks = large(client, 60 + turn)
            with Freezer(node, turn * 0.0008):
                said, seconds = timed(lambda: client.put(space, keys, blocks))  # noqa: B023
            assert said in ("ok", "deadline_exceeded")
            assert seconds < LIMIT_S + SLACK_S
            node.thaw()
            until(lambda: timed(client.stat)[0] == "ok")
            until(lambda: held_now(node) == 0, "its slots")
            assert until(lambda: client.put(space, keys, blocks)).refused == 0  # noqa: B023
            buffers = [bytearray(LARGE) for _ in keys]
            assert client.get(space, keys, buffers) == 12
            assert list(map(bytes, buffers)) == blocks
            client.evict(space)


def held_now(node: NodeProcess) -> int:
    with node.admin() as admin:
        rows = admin.list_blocks(admin.find("large")).blocks
        return node.tier()["draining"] + sum(row["holders"] for row in rows)


# Waiting for a block that is being written.


def waiting(node: NodeProcess, address: tuple[str, str], seed: int, wait_s: float) -> Child:
    def wait_for_it(pipe: Connection) -> None:
        client = BlockingClient(*address)
        space = client.open("model", SPACE)
        keys = space.keys(prompt(seed))
        buffers = [bytearray(SIZE) for _ in keys]
        pipe.send("asking")
        began = time.monotonic()
        found = client.get(space, keys, buffers, wait_s=wait_s)
        assert are_right(keys[:found], buffers)
        pipe.send((found, time.monotonic() - began))

    child = Child(wait_for_it)
    assert child.hear() == "asking"
    return child


def begun(writer: BlockingClient, node: NodeProcess, seed: int):
    space = writer.open("model", SPACE)
    keys = space.keys(prompt(seed))
    writer.put(space, keys[:2], [content(key, SIZE) for key in keys[:2]])
    return keys, writer.place(space, keys[2:], [SIZE] * (BLOCKS - 2), keys[1])


def test_a_get_that_waits_until_the_writer_commits(node, writer, address):
    keys, grant = begun(writer, node, 20)
    asked = node.counters()["requests"].get("acquire", 0)
    with waiting(node, address, 20, 10.0) as reader:
        until(lambda: node.counters()["requests"].get("acquire", 0) > asked)
        assert not reader.pipe.poll(0.05)
        for slot, key in zip(grant.slots, keys[2:], strict=True):
            slot[:] = content(key, SIZE)
        writer.commit(grant)
        found, seconds = reader.hear(5.0)
        assert found == BLOCKS
        assert seconds < 5.0


def test_a_get_that_waits_for_a_writer_that_gives_up(node, writer, address):
    _, grant = begun(writer, node, 21)
    asked = node.counters()["requests"].get("acquire", 0)
    with waiting(node, address, 21, 10.0) as reader:
        until(lambda: node.counters()["requests"].get("acquire", 0) > asked)
        writer.abort(grant)
        found, seconds = reader.hear(5.0)
        assert found == 2
        assert seconds < 5.0


def test_a_get_that_waits_for_a_writer_that_does_nothing(node, writer, address):
    _, grant = begun(writer, node, 22)
    for wait_s, least_s in ((0.0, 0.0), (0.2, 0.2), (600.0, 1.0)):  # the node waits no longer than wait_max
        with waiting(node, address, 22, wait_s) as reader:
            found, seconds = reader.hear(10.0)
            assert found == 2, "what was there it got"
            assert least_s <= seconds < least_s + SLACK_S
    writer.abort(grant)


def test_a_get_that_would_wait_for_what_nobody_writes(node, writer, address):
    store(writer, 23, 3)
    with waiting(node, address, 23, 10.0) as reader:
        found, seconds = reader.hear(5.0)
        assert found == 3
        assert seconds < SLACK_S


# Threads.


def test_many_threads_on_one_client(node, address):
    """Readers, writers and deleters of the same few chains: each reads right bytes or none."""
    faults: list[BaseException] = []
    with BlockingClient(*address, timeout_s=10.0) as client:
        space = client.open("model", SPACE)
        chains = [space.keys(prompt(100 + chain)) for chain in range(4)]
        is_over = threading.Event()

        def work(number: int) -> None:
            buffers = [bytearray(SIZE) for _ in range(BLOCKS)]
            turn = 0
            try:
                while not is_over.is_set():
                    keys = chains[(number + turn) % 4]
                    turn += 1
                    if number < 2:
                        client.put(space, keys, [content(key, SIZE) for key in keys])
                    elif number == 2:
                        client.evict(space, keys[turn % BLOCKS :])
                    elif number == 3 and address[0].startswith("unix"):
                        held = client.acquire(space, keys, lease_s=5.0)
                        if held is not None:
                            assert are_right(keys, held.blocks)
                            client.release(held)
                    else:
                        client.match(space, keys)
                        found = client.get(space, keys, buffers)
                        assert are_right(keys[:found], buffers)
            except BaseException as fault:
                faults.append(fault)
                raise

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        pause(1.0)
        is_over.set()
        for thread in threads:
            thread.join()
        assert not faults
        assert node.counters()["corrupt_blocks"] == 0


def test_a_client_that_is_closed_while_others_read(node, writer, address):
    """They get right bytes, or an error of the store's: no crash, and nothing else."""
    _, keys = store(writer, 30)
    codes: set[str] = set()
    for _ in range(15):
        client = BlockingClient(*address, timeout_s=5.0)
        space = client.open("model", SPACE)

        def read(client: BlockingClient = client, space: OpenSpace = space) -> None:
            buffers = [bytearray(SIZE) for _ in keys]
            for _ in range(30):
                try:
                    assert are_right(keys[: client.get(space, keys, buffers)], buffers)
                    for view in client.views(space, keys) if address[0].startswith("unix") else ():
                        assert len(view.data) == SIZE
                        assert view.is_valid()
                except StoreError as error:
                    codes.add(error.code)

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(read) for _ in range(4)]
            client.close()
            for job in jobs:
                job.result()
        client.close()
    assert codes <= {"peer_lost", "connect_failed"}


# Damaged memory.


def damage(node: NodeProcess, number: int, key: BlockKey) -> None:
    """As a hostile local writer does: change a byte of a block that is committed."""
    with WireClient(node) as hostile:
        lease = hostile.ask(wire.Acquire(1, number, key, 60_000))
        (slab_id,), (offset,) = unpack_u64(lease.slab_ids), unpack_u64(lease.offsets)
        door = Door(node.path, hostile.welcome.ticket)
        ((descriptor, size),) = door.fetch([slab_id], 5.0)
        region = Region(descriptor, size, writable=True, populate=False)
        region.memory[offset + SIZE // 2] ^= 0xFF
        region.close()
        door.close()


@pytest.mark.parametrize("how", ["get", "get again", "load", "wait"])
def test_memory_that_somebody_damaged(node, writer, address, how):
    space, keys = store(writer, 40)
    before = node.counters()["corrupt_blocks"]
    with BlockingClient(*address) as client:
        its = client.open("model", SPACE)
        buffers = [bytearray(SIZE) for _ in keys]
        if how == "get again":
            assert client.get(its, keys, buffers) == BLOCKS
        damage(node, space.number, keys[3])
        if how == "load":
            loaded = DecodeClient(client, its).load(prompt(40), 5.0)
            assert (loaded.tokens, len(loaded.blocks)) == (12, 3)
            assert are_right(keys, loaded.blocks)
            loaded.close()
        else:
            assert client.get(its, keys, buffers, wait_s=1.0 if how == "wait" else 0.0) == 3
            assert are_right(keys[:3], buffers)
        assert client.match(its, keys) in (3, BLOCKS), "what is above a hole may be counted"
        assert client.get(its, keys, buffers) == 3
        assert client.get(its, keys[4:], buffers[4:]) == BLOCKS - 4, "its neighbours are whole"
    assert node.counters()["corrupt_blocks"] == before + 1
    assert "corrupt" in writer.explain(space, keys)[3]["reason"]
    assert writer.put(space, keys, [content(key, SIZE) for key in keys]).stored == 1


def test_damage_that_a_reader_chose_not_to_look_for(node, writer):
    space, keys = store(writer, 41)
    damage(node, space.number, keys[0])
    with BlockingClient(node.unix, verify=False) as careless:
        its = careless.open("model", SPACE)
        buffers = [bytearray(SIZE) for _ in keys]
        assert careless.get(its, keys, buffers) == BLOCKS
        assert checksum(buffers[0]) != checksum(content(keys[0], SIZE))
        assert are_right(keys[1:], buffers[1:])
