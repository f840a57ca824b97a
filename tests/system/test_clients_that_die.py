"""Clients that are killed or frozen in the middle of a put or a get: nothing of theirs stays, nobody else notices."""

import os
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from engine_client.blocking import BlockingClient
from kvstore import wire
from kvstore.copier import checksum
from kvstore.errors import StaleLease, TransportError
from kvstore.packed import pack_keys, pack_u64
from tests.system.children import Child, Witness
from tests.system.nodes import PATIENCE_S, NodeProcess, content, namespace, pause, until
from tests.system.wire_client import WireClient

SPACE = namespace("victims")
SIZE = 100_000
KILLS = 20  # of each seed


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[NodeProcess]:
    started = NodeProcess(tmp_path_factory.mktemp("node")).start()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def impatient(tmp_path_factory) -> Iterator[NodeProcess]:
    """A node that takes slots and leases back soon."""
    limits = ("--limits.put_timeout=400ms", "--limits.lease_max=400ms")
    started = NodeProcess(tmp_path_factory.mktemp("impatient"), *limits).start()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def _nothing_is_left(request) -> Iterator[None]:
    yield
    for name in {"node", "impatient"} & set(request.fixturenames):
        server = request.getfixturevalue(name)
        server.assert_clean()
        server.empty()


def tokens(seed: int, blocks: int) -> list[int]:
    return [seed, *range(4 * blocks - 1)]


def assert_can_be_stored(server: NodeProcess, seed: int, blocks: int) -> None:
    """The chain of `seed` is not here, and nothing stands in the way of a put."""
    with BlockingClient(server.unix) as client, BlockingClient(server.tcp, server.token) as remote:
        space = client.open("victims", SPACE)
        keys = space.keys(tokens(seed, blocks))
        assert client.match(space, keys) == 0
        assert client.put(space, keys, [content(key, SIZE) for key in keys]).stored == blocks
        its = remote.open("victims", SPACE)
        buffers = [bytearray(SIZE) for _ in keys]
        for reader, where in ((client, space), (remote, its)):
            assert reader.get(where, keys, buffers) == blocks
            assert [bytes(buffer) for buffer in buffers] == [content(key, SIZE) for key in keys]


# Killed.


def place_and_write_half(pipe: Connection, server: NodeProcess) -> None:
    client = BlockingClient(server.unix)
    space = client.open("victims", SPACE)
    keys = space.keys(tokens(1, 8))
    grant = client.place(space, keys, [SIZE] * 8)
    client.progress(grant, 2)
    for slot in grant.slots[:5]:
        slot[: SIZE // 2] = b"\xee" * (SIZE // 2)
    pipe.send(len(grant.slots))
    pipe.recv()


def test_a_writer_killed_with_half_written_slots(node):
    with Witness(node):
        with Child(place_and_write_half, node) as writer:
            assert writer.hear() == 8
            assert node.used_bytes >= 8 * SIZE
            writer.kill()
        with BlockingClient(node.unix) as client:
            space = client.open("victims", SPACE)
            until(lambda: client.explain(space, space.keys(tokens(1, 8)))[0]["reason"].startswith("removed"))
            assert "writer_lost" in client.explain(space, space.keys(tokens(1, 8)))[7]["reason"]
        assert_can_be_stored(node, 1, 8)


def test_a_reader_that_waits_for_a_writer_that_is_killed(node):
    with Child(place_and_write_half, node) as writer, BlockingClient(node.unix) as client:
        assert writer.hear() == 8
        space = client.open("victims", SPACE)
        keys = space.keys(tokens(1, 8))

        def wait_for_it(pipe: Connection) -> None:
            with BlockingClient(node.tcp, node.token, timeout_s=PATIENCE_S) as reader:
                its = reader.open("victims", SPACE)
                pipe.send("waiting")
                pipe.send(reader.get(its, keys, [bytearray(SIZE)] * 8, wait_s=30.0))

        with Child(wait_for_it) as reader:
            assert reader.hear() == "waiting"
            until(lambda: client.stat()["counters"]["requests"].get("acquire", 0))
            writer.kill()
            assert reader.hear(5.0) == 0, "a miss, long before its 30 s"


@pytest.mark.parametrize("way", ["commit", "put"])
def test_a_remote_writer_killed_in_the_middle_of_a_payload(node, way):
    def send_half(pipe: Connection) -> None:
        client = WireClient(node, tcp=True)
        number = client.open("victims", SPACE).number
        with BlockingClient(node.unix) as local:
            keys = local.open("victims", SPACE).keys(tokens(2, 6))
        blocks = [content(key, SIZE) for key in keys]
        crcs = pack_u64([checksum(block) for block in blocks])
        half = b"".join(blocks)[: 3 * SIZE + 5]
        if way == "commit":
            placed = client.place(number, keys, [SIZE] * 6)
            client.send(wire.Commit(client.next(), placed.grant_id, crcs), half, 6 * SIZE)
        else:
            request = wire.Put(client.next(), number, pack_keys(keys), b"", pack_u64([SIZE] * 6), crcs)
            client.send(request, half, 6 * SIZE)
        pipe.send("half")
        pipe.recv()

    with Witness(node):
        with Child(send_half) as writer:
            assert writer.hear() == "half"
            until(lambda: node.used_bytes >= 6 * SIZE, "the slots to be given out")
            writer.kill()
        with BlockingClient(node.unix) as client:
            space = client.open("victims", SPACE)
            until(lambda: "writer_lost" in client.explain(space, space.keys(tokens(2, 6)))[0]["reason"])
        assert_can_be_stored(node, 2, 6)


@pytest.mark.parametrize("way", ["lease", "delivery"])
def test_a_reader_killed_with_blocks_in_hand(node, way):
    with BlockingClient(node.unix) as owner:
        space = owner.open("victims", SPACE)
        keys = space.keys(tokens(3, 40))
        assert owner.put(space, keys, [content(key, SIZE) for key in keys]).stored == 40

        def hold(pipe: Connection) -> None:
            if way == "lease":
                client = BlockingClient(node.unix)
                held = client.acquire(client.open("victims", SPACE), keys, lease_s=600)
                pipe.send(len(held.blocks))
            else:
                remote = WireClient(node, tcp=True, receive_bytes=4096)
                number = remote.open("victims", SPACE).number
                remote.send(wire.Acquire(remote.next(), number, pack_keys(keys), 60_000, 0, 0, True))
                remote.socket.recv(1)  # it is under way
                pipe.send(40)
            pipe.recv()

        with Witness(node), Child(hold) as reader:
            assert reader.hear() == 40
            assert owner.evict(space, keys).blocks == 40
            assert node.tier()["draining"] == 40, "they keep their slots while they are read"
            reader.kill()
            until(lambda: node.tier()["draining"] == 0, "the slots to be free")


def one_of_everything(pipe: Connection, server: NodeProcess, seed: int) -> None:
    """Put, place, get, acquire and pin at random over both ways, until killed; a beat for each."""
    choose = random.Random(seed)
    clients = [BlockingClient(server.unix), BlockingClient(server.tcp, server.token)]
    spaces = [client.open("victims", SPACE) for client in clients]
    while True:
        way = choose.randrange(2)
        client, space = clients[way], spaces[way]
        keys = space.keys(tokens(choose.randrange(6), choose.randrange(1, 9)))
        sizes = [choose.choice((SIZE, 3000)) for _ in keys]
        what = choose.choice(("put", "place", "half", "get", "acquire", "evict"))
        pipe.send(what)
        if what == "put":
            client.put(space, keys, [content(key, size) for key, size in zip(keys, sizes, strict=True)])
        elif what in ("place", "half"):
            grant = client.place(space, keys, sizes)
            for slot, at in zip(grant.slots, grant.granted, strict=True):
                slot[:] = content(keys[at], len(slot))
            if what == "place":
                client.commit(grant)
        elif what == "acquire" and not way:
            client.acquire(space, keys, lease_s=600)
        elif what == "evict":
            client.evict(space, keys[-1:])
        else:
            client.get(space, keys, [bytearray(SIZE) for _ in keys])


@pytest.mark.parametrize("seed", [1, None])  # a fresh one where there is none
def test_clients_killed_at_random_moments(node, seed):
    seed = seed or int(os.environ.get("CAIRN_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"CAIRN_TEST_SEED={seed}")
    choose = random.Random(seed)
    with Witness(node, slowest_s=5.0), BlockingClient(node.unix) as reader:
        space = reader.open("victims", SPACE)
        for _ in range(KILLS):
            with Child(one_of_everything, node, choose.randrange(1 << 32)) as victim:
                for _ in range(choose.randrange(12)):
                    victim.hear()
                pause(choose.random() * 0.004)
                victim.kill()
            for chain in range(6):
                keys = space.keys(tokens(chain, 8))
                buffers = [bytearray(SIZE) for _ in keys]
                for key, buffer in zip(keys, buffers[: reader.get(space, keys, buffers)], strict=False):
                    assert bytes(buffer) in (content(key, SIZE), content(key, 3000) + buffer[3000:])
    with node.admin() as admin:
        assert until(lambda: admin.stat()["counters"]["lost_sessions"])


# Frozen.


def write_late(pipe: Connection, server: NodeProcess, tcp: bool) -> None:
    """Place and half write; once told, write the rest and commit: what became of it."""
    client = BlockingClient(server.tcp if tcp else server.unix, server.token if tcp else "")
    space = client.open("victims", SPACE)
    keys = space.keys(tokens(4, 3))
    grant = client.place(space, keys, [SIZE] * 3)
    pipe.send("placed")
    pipe.recv()
    for slot in grant.slots:
        slot[:] = b"\xbb" * len(slot)
    pipe.send("written")
    pipe.recv()
    try:
        pipe.send(client.commit(grant))
    except (StaleLease, TransportError) as error:
        pipe.send(error.code)
    pipe.recv()


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_writer_frozen_beyond_its_time(impatient, tcp):
    """Its blocks are given up, its slots go to nobody while it may write to them, and its late commit is refused."""
    with Witness(impatient, slowest_s=5.0), Child(write_late, impatient, tcp) as writer:
        assert writer.hear() == "placed"
        writer.freeze()
        with BlockingClient(impatient.unix) as client:
            space = client.open("victims", SPACE)
            late = space.keys(tokens(4, 3))
            until(lambda: "put_timeout" in client.explain(space, late)[0]["reason"])
            others = [space.keys(tokens(100 + chain, 8)) for chain in range(25)]  # more than fit: every slot is used
            for chain in (late, *others):
                client.put(space, chain, [content(key, SIZE) for key in chain])
            writer.thaw()
            writer.say("write")
            assert writer.hear() == "written"
            for chain in (late, *others):
                buffers = [bytearray(SIZE) for _ in chain]
                blocks = client.get(space, chain, buffers)
                assert [bytes(buffer) for buffer in buffers[:blocks]] == [content(key, SIZE) for key in chain[:blocks]]
            assert client.stat()["counters"]["corrupt_blocks"] == 0
            client.evict(space)
            writer.say("commit")
            assert writer.hear() == "stale_lease"
            with impatient.admin() as admin:
                until(lambda: admin.match(admin.find("victims"), late) == 0)
                until(lambda: admin.stat()["tiers"][0]["draining"] == 0, "the slots of who has done writing")


def read_late(pipe: Connection, server: NodeProcess) -> None:
    client = BlockingClient(server.unix)
    space = client.open("victims", SPACE)
    held = client.acquire(space, space.keys(tokens(5, 3)), lease_s=600)
    pipe.send((len(held.blocks), held.lease_s))
    pipe.recv()
    try:
        client.renew(held, 10)
        pipe.send("renewed")
    except StaleLease as error:
        pipe.send(error.code)
    client.release(held)
    pipe.send("released")
    pipe.recv()


def test_a_reader_frozen_beyond_its_lease(impatient):
    with BlockingClient(impatient.unix) as client:
        space = client.open("victims", SPACE)
        keys = space.keys(tokens(5, 3))
        client.put(space, keys, [content(key, SIZE) for key in keys])
        with Child(read_late, impatient) as reader:
            assert reader.hear() == (3, 0.4), "no lease is longer than the node allows"
            reader.freeze()
            client.evict(space, keys)
            until(lambda: impatient.tier()["draining"] == 0, "the lease to lapse")
            reader.thaw()
            reader.say("go on")
            assert reader.hear() == "stale_lease"
            assert reader.hear() == "released"


@pytest.mark.parametrize("way", ["payload", "delivery"])
def test_a_remote_client_frozen_in_the_middle(impatient, way):
    """It is hung up on after its time; what it held is free although its process lives."""
    with BlockingClient(impatient.unix) as client:
        space = client.open("victims", SPACE)
        keys = space.keys(tokens(6, 40))

        def stop_in_the_middle(pipe: Connection) -> None:
            remote = WireClient(impatient, tcp=True, receive_bytes=4096)
            number = remote.open("victims", SPACE).number
            if way == "payload":
                placed = remote.place(number, keys, [SIZE] * 40)
                crcs = pack_u64([0] * 40)
                remote.send(wire.Commit(remote.next(), placed.grant_id, crcs), bytes(SIZE), 40 * SIZE)
            else:
                remote.send(wire.Acquire(remote.next(), number, pack_keys(keys), 60_000, 0, 0, True))
                remote.socket.recv(1)
            pipe.send("stuck")
            pipe.recv()

        if way == "delivery":
            assert client.put(space, keys, [content(key, SIZE) for key in keys]).stored == 40
        with Witness(impatient), Child(stop_in_the_middle) as remote:
            assert remote.hear() == "stuck"
            remote.freeze()
            client.evict(space, keys)
            until(lambda: impatient.used_bytes < 20 * SIZE, "its slots")
            assert impatient.tier()["draining"] == 0
