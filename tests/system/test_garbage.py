"""Bytes that are no conversation: garbage, halves, floods, on every socket of a node, which says so and goes on."""

import os
import random
import socket
from collections.abc import Iterator

import msgspec
import pytest

from engine_client.blocking import BlockingClient
from kvstore import wire
from kvstore.packed import pack_keys, pack_u64, unpack_u64
from kvstore.published import ident
from kvstore.region import Region
from kvstore.transport.local import Door
from kvstore.types import BlockKey
from tests.system.children import Witness
from tests.system.nodes import NodeProcess, content, free_port, namespace, pause, until
from tests.system.test_clients_that_lie import CROWD, LIMITS, OPERATOR, TENANTS, by_number, chain, code, crcs
from tests.system.wire_client import WireClient

SEEDS = [1, None]  # a fresh one where there is none
CONVERSATIONS = 150
HEADER = wire.HEADER
HELLO = wire.Hello(1, wire.PROTOCOL, CROWD, "garbage")


@pytest.fixture(scope="module")
def rest_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def node(tmp_path_factory, rest_port) -> Iterator[NodeProcess]:
    options = (*TENANTS, *LIMITS, f"--rest.listen=127.0.0.1:{rest_port}")
    started = NodeProcess(tmp_path_factory.mktemp("node"), *options, admin_token=OPERATOR).start()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def _others_are_served(node) -> Iterator[None]:
    with Witness(node, token=CROWD, slowest_s=4.0):
        yield
    node.assert_clean()
    with BlockingClient(node.unix, CROWD) as crowd:
        node.empty(crowd)


@pytest.fixture(params=["unix", "tcp"])
def is_tcp(request) -> bool:
    return request.param == "tcp"


def header(body_bytes: int, magic: int = wire.MAGIC, payload_bytes: int = 0) -> bytes:
    return HEADER.pack(body_bytes, magic, payload_bytes)


def last_word(client: WireClient) -> str:
    """The error after which the node hangs up. Empty where it was lost: TCP resets what was not read to its end."""
    try:
        said = code(client.receive())
    except OSError:
        said = ""
    assert client.is_hung_up()
    return said


# How a conversation begins.


@pytest.mark.parametrize(
    "greeting",
    [
        wire.Hello(1, 0, CROWD, "old"), wire.Hello(1, 2, CROWD, "new"), wire.Hello(1, 2**64 - 1, CROWD, "newest"),
        wire.Hello(1, wire.PROTOCOL, "not-the-token-of-anybody", "stranger"),
        wire.Hello(1, wire.PROTOCOL, "ü" * 1000, "stranger"), *by_number(1), wire.Stat(1), wire.Check(1),
        wire.Open(1, "x", namespace()), wire.SetTier(1, "dram", 1 << 20),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_a_client_that_does_not_begin_as_it_should(node, is_tcp, greeting):
    with WireClient(node, tcp=is_tcp, hello=False) as client:
        client.socket.sendall(wire.encode(greeting) + wire.encode(HELLO))  # the second comes too late
        assert last_word(client) in ("protocol_error", "forbidden", "")


def test_a_tcp_client_without_a_token(node):
    with WireClient(node, tcp=True, hello=False) as client:
        client.send(wire.Hello(1, wire.PROTOCOL, "", "nobody"))
        assert code(client.receive()) == "forbidden"
        assert client.is_hung_up()


def test_a_second_hello(node, is_tcp):
    with WireClient(node, tcp=is_tcp, token=CROWD) as client:
        assert code(client.ask(HELLO)) == "protocol_error"
        assert client.is_hung_up()


@pytest.mark.parametrize("said", [b"", HEADER.pack(100, wire.MAGIC, 0)[:7], header(1000), header(1000) + bytes(10)])
def test_half_a_hello_and_then_silence(node, is_tcp, said):
    with WireClient(node, tcp=is_tcp, hello=False) as client:
        client.socket.sendall(said)
        assert client.is_hung_up(5.0)


@pytest.mark.parametrize("said", [header(100)[:7], header(200_000) + bytes(70_000)], ids=["header", "body"])
def test_half_a_request_and_then_silence(node, is_tcp, said):
    with WireClient(node, tcp=is_tcp, token=CROWD) as client, WireClient(node, tcp=is_tcp, token=CROWD) as idle:
        client.socket.sendall(said)
        assert client.is_hung_up(5.0)
        assert code(idle.ask(wire.Stat(1))) == "ok", "who has nothing to say may stay"


def test_a_frame_that_comes_byte_by_byte(node, is_tcp):
    with WireClient(node, tcp=is_tcp, token=CROWD) as client:
        for byte in wire.encode(wire.Stat(7)) * 2:
            client.socket.sendall(bytes([byte]))
        assert client.receive().id == client.receive().id == 7


@pytest.mark.parametrize(
    "said",
    [
        header(1 << 19), header(2**32 - 1), header(10, 0), header(10, wire.MAGIC, 2**64 - 1) + bytes(10),
        header(0), header(2) + b"\x93\x01", header(1) + b"\xc1", header(4) + b"\x91\xa1xx", b"GET / HTTP/1.1\r\n\r\n",
        wire.encode(wire.Stat(1), 2**63), wire.encode(wire.Stat(1), 1 << 30),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(9),
        header(60_000) + b"\x91" * 60_000,
    ],
)  # fmt: skip
def test_what_is_no_frame(node, is_tcp, said):
    with WireClient(node, tcp=is_tcp, token=CROWD) as client:
        client.socket.sendall(said)
        assert last_word(client) == "protocol_error"


# Descriptors.


def test_a_ticket_that_nobody_has(node, is_tcp):
    with WireClient(node) as guest:
        ticket = guest.welcome.ticket
    until(lambda: _attach(node, ticket) == "forbidden", "its ticket to end with its session")
    with WireClient(node, token=CROWD) as guest:
        for wrong in (b"", bytes(16), guest.welcome.ticket[:-1], guest.welcome.ticket + b"x", bytes(100_000)):
            with WireClient(node, tcp=is_tcp, hello=False) as client:
                client.send(wire.Attach(1, wrong, ()))
                assert code(client.receive()) == "forbidden"
        if is_tcp:
            with WireClient(node, tcp=True, token=CROWD) as client:
                assert code(client.ask(wire.Attach(1, guest.welcome.ticket, ()))) == "forbidden", "no memory over TCP"
                assert client.welcome.ticket == b""


def _attach(node: NodeProcess, ticket: bytes) -> str:
    with WireClient(node, hello=False) as client:
        return code(client.ask(wire.Attach(1, ticket, ())))


def test_clients_that_go_before_their_descriptors_come(node):
    before = node.descriptors
    with WireClient(node) as guest:
        for _ in range(100):
            with WireClient(node, hello=False) as client:
                client.send(wire.Attach(1, guest.welcome.ticket, ()))
    until(lambda: node.descriptors <= before + 4, "its descriptors")


def test_a_client_that_asks_for_descriptors_and_takes_none(node):
    before = node.descriptors
    with WireClient(node) as guest, WireClient(node, hello=False) as client:
        number = guest.open("garbage", namespace("garbage")).number
        placed = guest.place(number, chain(1, 1), [1000])
        (slab_id,) = msgspec.msgpack.decode(msgspec.msgpack.encode(unpack_u64(placed.slab_ids)))
        frame = wire.encode(wire.Attach(1, guest.welcome.ticket, (slab_id,) * 64))
        client.socket.settimeout(5.0)
        try:
            for _ in range(2000):
                client.socket.sendall(frame)
        except OSError:
            pass  # it is not read from any more, or hung up on
        assert node.descriptors < before + 300
    until(lambda: node.descriptors <= before + 4, "its descriptors")


def test_a_client_that_sends_descriptors_of_its_own(node, is_tcp):
    if is_tcp:
        pytest.skip("descriptors travel over Unix sockets only")
    before = node.descriptors
    with WireClient(node) as client:
        for _ in range(20):
            socket.send_fds(client.socket, [wire.encode(wire.Stat(1))], [client.socket.fileno()] * 100)
            assert code(client.receive()) == "ok"
        assert node.descriptors <= before + 4


def test_garbage_in_a_ring_of_uses(node):
    """It is the client's to write, so the node believes nothing in it; names of blocks that are there, too."""
    choose = random.Random(3)
    with WireClient(node) as client:
        number = client.open("garbage", namespace("garbage")).number
        keys = chain(6, 50)
        client.put(number, keys, [bytes(100)] * 50)
        door = Door(node.path, client.welcome.ticket)
        _, (descriptor, size) = door.fetch((), 5.0)
        ring = Region(descriptor, size, writable=True, populate=True).memory
        asked = node.counters()["requests"]["stat"]
        while node.counters()["requests"]["stat"] < asked + 50:
            ring[64:] = choose.randbytes(size - 64)
            for at in range(64, size - 24, 240):
                ring[at : at + 24] = ident(number, choose.choice(keys)) + choose.randbytes(4)
            ring[:8] = choose.choice([b"\xff" * 8, bytes(8), choose.randbytes(8), choose.randbytes(2) + bytes(6)])
        assert client.get(number, keys) == [bytes(100)] * 50
        door.close()


# Floods.


def requests(number: int, keys: list[BlockKey]) -> dict[str, wire.Message]:
    packed = pack_keys(keys)
    return {
        "stat": wire.Stat(1),
        "list": wire.List(1, number, b"", 10_000),
        "explain": wire.Explain(1, number, packed, bytes(4 * 4 * len(keys))),
        "deliver": wire.Acquire(1, number, packed[:32], 60_000, 0, 0, True),
        "lease": wire.Acquire(1, number, packed[:32], 60_000),
        "wait": wire.Acquire(1, number, bytes(16), 60_000, 60_000),
        "open": wire.Open(1, "garbage", namespace("garbage")),
        "put": wire.Put(1, number, packed, b"", pack_u64([100] * len(keys))),
        "report": wire.Report(1, number, packed),
    }


@pytest.mark.parametrize("what", list(requests(0, [])))
def test_a_client_that_never_reads_its_replies(node, is_tcp, what):
    with WireClient(node, tcp=is_tcp, token=CROWD) as client:
        number = client.open("garbage", namespace("garbage")).number
        keys = chain(2, 400)
        client.put(number, keys[:4], [bytes(200_000)] * 4)
        client.put(number, keys[4:], [bytes(64)] * 396, keys[3])
        client.place(number, [BlockKey(bytes(16))], [1000])
        before = node.memory_bytes
        frame = wire.encode(requests(number, keys)[what])
        flood = frame * (1 + (2 << 20) // len(frame))
        client.socket.settimeout(0.3)
        try:
            client.socket.sendall(flood)
        except OSError:
            pass  # it is not read from any more
        node.assert_clean()
        assert node.memory_bytes < before + (24 << 20)


def test_a_client_that_reads_its_blocks_a_byte_at_a_time(node, is_tcp):
    with WireClient(node, tcp=is_tcp, token=CROWD, receive_bytes=4096) as client:
        number = client.open("garbage", namespace("garbage")).number
        keys = chain(3, 8)
        for key in keys:
            client.put(number, [key], [content(key, 500_000)])
        client.send(wire.Acquire(1, number, pack_keys(keys), 60_000, 0, 0, True))
        client.socket.recv(1)
        with BlockingClient(node.unix) as other:
            other.evict(other.open("garbage", namespace("garbage")), keys)

            def reads_on() -> bool:
                try:
                    client.socket.recv(1)
                except OSError:
                    pass
                pause(0.05)
                return bool(node.tier()["draining"] == 0)

            until(reads_on, "its blocks to be taken from it")


# Fuzz.


def valid(number: int, keys: list[BlockKey], ticket: bytes) -> list[tuple[wire.Message, bytes]]:
    blocks = [content(key, 3000) for key in keys]
    put = wire.Put(2, number, pack_keys(keys), b"", pack_u64([3000] * len(keys)), crcs(blocks))
    messages = [*by_number(number), *requests(number, keys).values(), wire.Attach(3, ticket, (1, 2)), HELLO]
    messages += [wire.Commit(4, at, crcs(blocks)) for at in range(4)] + [wire.Renew(5, 1, 1000), wire.Release(6, 1)]
    return [
        (put, b"".join(blocks)),
        (wire.Commit(7, 5, crcs(blocks)), b"".join(blocks)),
        *((each, b"") for each in messages),
    ]


def mutated(message: wire.Message, choose: random.Random) -> bytes:
    """A body that looks much like the message's."""
    what = choose.randrange(5)
    body = bytearray(msgspec.msgpack.encode(message))
    if what == 0:  # other bytes
        for _ in range(choose.randrange(1, 4)):
            body[choose.randrange(len(body))] = choose.randrange(256)
    elif what == 1:  # more or less
        at = choose.randrange(len(body))
        body[at:at] = choose.randbytes(choose.randrange(9)) if choose.random() < 0.5 else b""
        del body[choose.randrange(len(body)) :][: choose.randrange(9)]
    elif what in (2, 3):  # another value in a field
        fields = msgspec.msgpack.decode(body)
        odd = [None, True, -1, 0, 2**63, 1.5, "", "x" * 300, b"", choose.randbytes(48), [], [1] * 50, {}, {"a": 1}]
        fields[choose.randrange(len(fields))] = choose.choice(odd)
        body = bytearray(msgspec.msgpack.encode(fields))
    return bytes(body)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_and_mutated_frames(node, is_tcp, seed):
    seed = seed or int(os.environ.get("CAIRN_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"CAIRN_TEST_SEED={seed}")
    choose = random.Random(seed)
    with WireClient(node, token=CROWD) as guest:
        number = guest.open("garbage", namespace("garbage")).number
        seeds = valid(number, chain(seed, 6), guest.welcome.ticket)
        for _ in range(CONVERSATIONS):
            with WireClient(node, tcp=is_tcp, token=CROWD, hello=choose.random() < 0.9) as client:
                client.socket.settimeout(2.0)
                try:
                    for _ in range(choose.randrange(1, 12)):
                        client.socket.sendall(_utterance(choose, seeds))
                        if choose.random() < 0.3:
                            client.socket.setblocking(False)
                            client.socket.recv(1 << 20)
                except OSError:
                    pass  # hung up on, or nothing said yet
    assert node.is_alive, node.log[-3000:]


def _utterance(choose: random.Random, seeds: list[tuple[wire.Message, bytes]]) -> bytes:
    message, payload = choose.choice(seeds)
    body = msgspec.msgpack.encode(message) if choose.random() < 0.3 else mutated(message, choose)
    length = len(body) if choose.random() < 0.97 else choose.choice([0, 1, len(body) + 1, 70_000, 2**31])
    announced = len(payload) if choose.random() < 0.9 else choose.choice([0, 1, len(payload) + 1, 1 << 20, 2**40])
    magic = wire.MAGIC if choose.random() < 0.98 else choose.randrange(2**32)
    said = HEADER.pack(length, magic, announced) + body + payload
    return said if choose.random() < 0.95 else choose.randbytes(choose.randrange(200))


@pytest.mark.parametrize("door", ["unix", "tcp", "rest"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_bytes(node, rest_port, door, seed):
    seed = seed or int(os.environ.get("CAIRN_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"CAIRN_TEST_SEED={seed}")
    choose = random.Random(seed)
    starts = [
        b"",
        b"",
        b"GET /v1/tiers HTTP/1.1\r\n",
        b"PUT /v1/namespaces/x/blocks/00 HTTP/1.1\r\ncontent-length: 99999\r\n\r\n",
    ]
    for _ in range(60):
        family = socket.AF_UNIX if door == "unix" else socket.AF_INET
        with socket.socket(family) as bare:
            bare.settimeout(2.0)
            bare.connect(node.path if door == "unix" else ("127.0.0.1", node.port if door == "tcp" else rest_port))
            try:
                bare.sendall(choose.choice(starts) + choose.randbytes(choose.choice([1, 15, 16, 17, 300, 70_000])))
                bare.setblocking(False)
                bare.recv(100)
            except OSError:
                pass
    assert node.is_alive, node.log[-3000:]
