"""Tenants of one node: neither keys, numbers, memory nor pressure lets one reach or learn what is another's."""

import asyncio
import hmac
import mmap
import socket
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from engine_client.blocking import BlockingClient
from engine_client.client import Client
from kvstore import wire
from kvstore.errors import ConnectFailed, Forbidden, NotFound, TransportError
from kvstore.packed import pack_keys, pack_u64, unpack_u64
from kvstore.region import Region
from kvstore.slab import slot_bytes
from kvstore.transport.local import Door
from kvstore.types import BlockKey, Placement
from server import tenants
from server.config import load
from tests.system.children import Child
from tests.system.nodes import NodeProcess, content, namespace, until
from tests.system.test_clients_that_lie import by_number, code
from tests.system.wire_client import WireClient

OPERATOR, RED, RED_READS, BLUE, READER, QUEUE = (
    f"{name}-token-of-this-tenant" for name in ("operator", "red", "red-reads", "blue", "reader", "queue")
)
SETTINGS = (
    "--tenants.0.name=operator", f"--tenants.0.token={OPERATOR}", "--tenants.0.admin=true",
    "--tenants.1.name=red", f"--tenants.1.token={RED}", "--tenants.1.secret=red-secret",
    f"--tenants.1.read_token={RED_READS}",
    "--tenants.2.name=blue", f"--tenants.2.token={BLUE}", "--tenants.2.secret=blue-secret",
    "--tenants.3.name=reader", f"--tenants.3.token={READER}", "--tenants.3.may_write=false",
    "--tenants.4.name=queue", f"--tenants.4.token={QUEUE}", "--tenants.4.quota=1MiB", "--node.unix_tenant=",
    "--tiers.dram.low_watermark=0.99", "--tiers.dram.high_watermark=1.0",
)  # fmt: skip
SPACE = namespace("shared-model")
TOKENS = list(range(64))
SIZE = 10_000
MIB = 1 << 20
SLABS = 16


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[NodeProcess]:
    started = NodeProcess(tmp_path_factory.mktemp("node"), *SETTINGS, admin_token=OPERATOR).start()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def _nothing_is_left(request) -> Iterator[None]:
    yield
    if "node" in request.fixturenames:
        node = request.getfixturevalue("node")
        node.assert_clean()
        clients = [BlockingClient(node.unix, token) for token in (RED, BLUE, QUEUE)]
        node.empty(*clients)
        for client in clients:
            client.close()


@pytest.fixture
def red(node) -> Iterator[BlockingClient]:
    with BlockingClient(node.unix, RED) as client:
        yield client


@pytest.fixture
def blue(node) -> Iterator[BlockingClient]:
    with BlockingClient(node.unix, BLUE) as client:
        yield client


# Keys and numbers.


def test_the_same_prompt_of_two_tenants(red, blue):
    mine, theirs = red.open("llama", SPACE), blue.open("llama", SPACE)
    assert mine.namespace == theirs.namespace
    assert mine.number != theirs.number
    assert not {*mine.keys(TOKENS)} & {*theirs.keys(TOKENS)}
    red.put(mine, mine.keys(TOKENS), [b"red " * 100] * 16)
    assert blue.match(theirs, theirs.keys(TOKENS)) == 0
    assert blue.put(theirs, theirs.keys(TOKENS), [b"blue" * 100] * 16).stored == 16, "no dedup that would tell"
    buffers = [bytearray(400) for _ in range(16)]
    assert red.get(mine, mine.keys(TOKENS), buffers) == 16
    assert bytes(buffers[3]) == b"red " * 100
    assert blue.get(theirs, theirs.keys(TOKENS), buffers) == 16
    assert bytes(buffers[3]) == b"blue" * 100


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_tenant_with_the_leaked_keys_numbers_and_ids_of_another(node, red, tcp):
    space = red.open("llama", SPACE)
    prompt = [int(tcp), *TOKENS[1:]]
    keys = space.keys(prompt)
    blocks = [content(key, SIZE) for key in keys]
    red.put(space, keys, blocks)
    pin = red.pin(space, keys[:2], hard=True, ttl_s=60)
    packed = pack_keys(keys)
    with WireClient(node, token=RED) as owner, WireClient(node, tcp=tcp, token=BLUE) as thief:
        lease_id = owner.ask(wire.Acquire(1, space.number, packed, 60_000)).lease_id
        grant_id = owner.place(space.number, [BlockKey(bytes(16))], [SIZE]).grant_id
        for request in by_number(space.number):
            assert code(thief.ask(request)) == "not_found", request
        for request in (wire.Unpin(1, pin.pin_id), wire.Open(1, "unknown", None)):
            assert code(thief.ask(request)) == "not_found"
        for request in (wire.Release(1, lease_id), wire.Renew(1, lease_id, 1), wire.Abort(1, grant_id)):
            assert code(thief.ask(request)) == "stale_lease"
        assert code(thief.ask(wire.Commit(1, grant_id, bytes(8)), bytes(SIZE))) == "stale_lease"

        own = thief.open("llama", SPACE).number
        assert thief.ask(wire.Match(1, own, packed)).blocks == 0
        assert thief.ask(wire.Acquire(1, own, packed, 1000)).lease_id == 0
        assert thief.get(own, keys) == []
        assert thief.ask(wire.Evict(1, own, packed)).blocks == 0
        assert thief.ask(wire.Pin(1, own, packed, True, 1000)).pin_id == 0
        assert thief.ask(wire.Report(1, own, packed)).corrupt == 0
        assert thief.ask(wire.List(1, own, b"", 100)).blocks == []
        assert code(thief.ask(wire.List(1, own, keys[0], 100))) == "not_found"
        told = thief.ask(wire.Explain(1, own, packed, b"".join(token.to_bytes(4, "little") for token in prompt))).blocks
        assert {row["reason"] for row in told} == {"not stored here, as far back as this node remembers"}
        values = thief.ask(wire.Stat(1)).values
        assert set(values["tenants"]) == set(values["index"]) | {"blue"} == {"blue"}
        assert {row["tenant"] for row in values["namespaces"]} == {"blue"}

        poison = thief.put(own, keys, [bytes(SIZE)] * len(keys))
        assert set(poison.placements) == {Placement.GRANTED}, "in its own namespace it may store what it likes"
        assert thief.ask(wire.Evict(1, own, b"", True)).blocks == len(keys)
        owner.ask(wire.Abort(1, grant_id))
    buffers = [bytearray(SIZE) for _ in keys]
    assert red.get(space, keys, buffers) == len(keys)
    assert list(map(bytes, buffers)) == blocks
    red.unpin(pin.pin_id)


def test_what_a_tenant_may_map(node, red, blue):
    """Neither the slabs nor the index of another; its own index names no block of another."""
    mine, theirs = red.open("llama", SPACE), blue.open("llama", SPACE)
    keys = mine.keys(TOKENS)
    red.put(mine, keys, [content(key, SIZE) for key in keys])
    blue.put(theirs, theirs.keys(TOKENS), [b"blue" * 2500] * 16)
    with WireClient(node, token=RED) as owner, WireClient(node, token=BLUE) as thief:
        lease = owner.ask(wire.Acquire(1, mine.number, pack_keys(keys), 60_000))
        door = Door(node.path, thief.welcome.ticket)
        for slab_id in range(200):
            try:
                ((descriptor, size),) = door.fetch([slab_id], 5.0)
            except NotFound:
                continue
            assert slab_id not in unpack_u64(lease.slab_ids)
            assert keys[0] not in Region(descriptor, size, writable=False, populate=False).memory
        for descriptor, size in door.fetch([], 5.0):
            memory = Region(descriptor, size, writable=False, populate=False).memory
            assert not any(key in memory[: 8 * MIB] for key in keys)
        with pytest.raises(NotFound):
            door.fetch([unpack_u64(lease.slab_ids)[0]], 5.0)
        door.close()


def test_an_index_or_a_slab_that_a_client_would_like_to_write(node):
    with WireClient(node, token=RED) as client, WireClient(node, token=READER) as reader:
        for guest in (client, reader):
            door = Door(node.path, guest.welcome.ticket)
            (index, size), (ring, _) = door.fetch([], 5.0)
            assert mmap.mmap(index, size, prot=mmap.PROT_READ)
            path = f"/proc/self/fd/{index}"
            for wish in ("r+b", "wb", "ab"):
                with pytest.raises((OSError, ValueError)), open(path, wish) as again:
                    mmap.mmap(again.fileno(), size)
            with pytest.raises(OSError):
                mmap.mmap(index, size)
            with pytest.raises(OSError), open(f"/proc/self/fd/{ring}", "r+b") as again:
                again.truncate(0)
            door.close()


# Memory.


def fill_and_watch(pipe: Connection, node: NodeProcess) -> None:
    """As red: fill the tier with a mark, keep everything mapped; say later what the mappings show."""
    client = BlockingClient(node.unix, RED)
    space = client.open("llama", SPACE)
    slots = []
    for at in range(SLABS):
        grant = client.place(space, space.keys([at, 0, 0, 0]), [MIB])
        grant.slots[0][:] = b"redmark!" * (MIB // 8)
        slots += grant.slots
        client.commit(grant)
    pipe.send(len(slots))
    while pipe.recv() == "look":
        seen = [bytes(slot) for slot in slots]
        pipe.send([(page.count(b"redmark!"), page.count(b"blue"), page.count(0)) for page in seen])


def test_memory_that_was_taken_from_one_tenant_for_another(node, blue):
    with Child(fill_and_watch, node) as child:
        assert child.hear() == SLABS
        child.say("look")
        assert child.hear() == [(MIB // 8, 0, 0)] * SLABS
        space = blue.open("llama", SPACE)
        for turn in range(3 * SLABS):
            (key,) = space.keys([turn, 1, 1, 1])
            assert blue.put(space, [key], [b"blue" * (MIB // 4)]).stored == 1
        child.say("look")
        pages = child.hear()
        assert {blue_marks for _, blue_marks, _ in pages} == {0}
        assert pages == [(0, 0, MIB)] * SLABS, "it has them mapped, and they are empty"
        assert node.tier()["capacity_bytes"] == SLABS * MIB


def test_slabs_that_go_to_and_fro(node):
    """An id stands for one tenant's memory for ever."""
    seen: dict[str, set[int]] = {RED: set(), BLUE: set()}
    with WireClient(node, token=RED) as red, WireClient(node, token=BLUE) as blue:
        for turn in range(8):
            for token, client in ((RED, red), (BLUE, blue)):
                number = client.open("llama", SPACE).number
                keys = [BlockKey(bytes([turn, at]) * 8) for at in range(SLABS - 4)]
                size = (MIB, MIB // 2, MIB // 4)[turn % 3]
                placed = client.place(number, keys, [size] * len(keys))
                assert set(placed.placements) == {Placement.GRANTED}
                seen[token] |= {*unpack_u64(placed.slab_ids)}
                crcs = pack_u64([0] * len(keys))
                assert code(client.ask(wire.Commit(1, placed.grant_id, crcs))) == "ok"
        assert min(map(len, seen.values())) > SLABS
        assert not seen[RED] & seen[BLUE]


def test_writers_that_go_while_memory_is_made_ready_for_them(node, blue):
    """Their put has no slots yet when their connection ends; it must not get any after."""
    space = blue.open("llama", SPACE)
    for turn in range(6):
        for at in range(SLABS):
            blue.put(space, space.keys([turn, at, 0, 0]), [bytes(MIB)])
        blue.evict(space)
        for at in range(6):
            with WireClient(node, token=RED, tcp=at % 2 == 1) as red:
                number = red.open("llama", SPACE).number
                keys = [BlockKey(bytes([turn, at, block]) + bytes(13)) for block in range(SLABS)]
                red.send(wire.Put(1, number, pack_keys(keys), b"", pack_u64([MIB] * SLABS)))
                if at % 3 == 0:
                    assert node.used_bytes >= 0
        until(lambda: node.used_bytes == 0, "nothing to be left of puts that nobody waits for")
        node.assert_clean()


def test_a_check_while_memory_is_made_ready(node, red, blue):
    space, its = blue.open("llama", SPACE), red.open("llama", SPACE)
    until(lambda: node.is_grown)
    for at in range(SLABS):
        blue.put(space, space.keys([at, 0, 0, 0]), [bytes(MIB)])
    blue.evict(space)
    with WireClient(node, token=RED) as bare, node.admin() as admin:
        keys = its.keys([*range(4 * SLABS)])
        bare.send(wire.Put(1, its.number, pack_keys(keys), b"", pack_u64([MIB] * SLABS)))
        for _ in range(20):
            assert admin.check() == []
        placed = bare.receive()
        assert set(placed.placements) == {Placement.GRANTED}


# Quotas.


def test_a_tenant_at_its_quota(node, blue):
    """Its own coldest goes, nobody else's; what it uses is counted to the byte."""
    others = blue.open("llama", SPACE)
    blue.put(others, others.keys(TOKENS), [bytes(SIZE)] * 16)
    with BlockingClient(node.unix, QUEUE) as client:
        space = client.open("llama", SPACE)
        fits = MIB // slot_bytes(SIZE)
        for at in range(3 * fits):
            keys = space.keys([at, 0, 0, 0])
            assert client.put(space, keys, [content(keys[0], SIZE)]).stored == 1
            used = client.stat()["tenants"]["queue"]["used_bytes"]["dram"]
            assert used == min(at + 1, fits) * slot_bytes(SIZE) <= MIB
        present = [at for at in range(3 * fits) if client.match(space, space.keys([at, 0, 0, 0]))]
        assert present == list(range(2 * fits, 3 * fits)), "the coldest went first"
        assert "quota" in client.explain(space, space.keys([0, 0, 0, 0]))[0]["reason"]
    assert blue.match(others, others.keys(TOKENS)) == 16


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_tenant_whose_quota_is_all_in_use(node, way):
    with BlockingClient(node.tcp if way == "tcp" else node.unix, QUEUE) as client:
        space = client.open("llama", SPACE)
        keys = space.keys(list(range(4 * 20)))
        size = 64_000
        fits = MIB // slot_bytes(size)
        report = client.put(space, keys, [content(key, size) for key in keys])
        assert (report.stored, report.refused) == (fits, 20 - fits), "a chain that is longer than the quota"
        assert report.over_quota == report.refused
        pin = client.pin(space, keys, hard=True, ttl_s=60)
        assert pin.blocks == fits
        fresh = space.keys([7, 7, 7, 7])
        assert client.put(space, fresh, [bytes(size)]).refused == 1
        assert "over quota" in client.explain(space, fresh)[0]["reason"]
        client.unpin(pin.pin_id)
        assert client.put(space, fresh, [bytes(size)]).stored == 1
        assert node.counters()["refused_blocks"]["over quota"] >= 1


def test_a_block_larger_than_the_quota(tmp_path):
    """It cannot be had at any price, so nothing is evicted for it."""
    options = (
        "--tenants.0.name=only",
        f"--tenants.0.token={RED}",
        "--tenants.0.quota=100KiB",
        "--tenants.0.admin=true",
    )
    node = NodeProcess(tmp_path, *options, "--node.unix_tenant=only").start()
    with BlockingClient(node.unix) as client:
        space = client.open("llama", SPACE)
        keys = space.keys(TOKENS)
        assert client.put(space, keys, [bytes(4096)] * 16).stored == 16
        assert client.put(space, space.keys([9, 9, 9, 9]), [bytes(200_000)]).refused == 1
        assert client.match(space, keys) == 16
    node.stop()


# Who may what.


def test_a_tenant_that_may_only_read(node):
    with WireClient(node, token=READER) as reader, BlockingClient(node.tcp, READER) as remote:
        number = reader.open("llama", SPACE).number
        key = bytes(16)
        for request in (
            wire.Put(1, number, key, b"", pack_u64([8])), wire.Progress(1, 1, 1), wire.Commit(1, 1, bytes(8)),
            wire.Abort(1, 1), wire.Evict(1, number, key), wire.Evict(1, number, b"", True),
            wire.Pin(1, number, key, True, 1000), wire.Unpin(1, 1), wire.SetTier(1, "dram", MIB), wire.Check(1),
        ):  # fmt: skip
            assert code(reader.ask(request)) == "forbidden", request
        assert code(reader.ask(wire.Put(1, number, key, b"", pack_u64([8]), bytes(8)), bytes(8))) == "forbidden"
        assert reader.get(number, [BlockKey(key)]) == []
        space = remote.open("llama", SPACE)
        with pytest.raises(Forbidden):
            remote.put(space, space.keys(TOKENS), [bytes(8)] * 16)
        assert remote.match(space, space.keys(TOKENS)) == 0
        assert not reader.welcome.may_write


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_token_of_a_tenant_that_may_only_read(node, red, way):
    space = red.open("llama", SPACE)
    keys, blocks = space.keys(TOKENS), [content(key, SIZE) for key in space.keys(TOKENS)]
    red.put(space, keys, blocks)
    with BlockingClient(getattr(node, way), RED_READS) as reader:
        same = reader.find("llama")
        targets = [bytearray(SIZE) for _ in keys]
        assert same.keys(TOKENS) == keys
        assert reader.get(same, keys, targets) == 16
        assert targets == blocks
        for ask in (lambda: reader.put(same, [keys[0]], [blocks[0]]), lambda: reader.evict(same), reader.check):
            with pytest.raises(Forbidden):
                ask()
        if way == "unix":
            (view,) = reader.views(same, keys[:1])
            assert view.data.readonly
    assert red.match(space, keys) == 16


def test_a_tenant_that_is_no_admin(red):
    for ask in (red.check, lambda: red.set_tier("dram", capacity_bytes=MIB)):
        with pytest.raises(Forbidden):
            ask()


@pytest.mark.parametrize("token", ["", "wrong", RED[:-1], RED + " ", RED.upper(), "x" * 10_000, "tökén" * 5])
def test_a_wrong_token(node, token):
    for address in (node.tcp, node.unix):
        with BlockingClient(address, token) as client, pytest.raises(Forbidden):
            client.stat()

        async def ask(address: str) -> None:
            async with Client(address, token) as client:
                with pytest.raises(Forbidden):
                    await client.stat()

        asyncio.run(ask(address))


def test_tokens_are_compared_in_constant_time_with_every_tenants(tmp_path, monkeypatch):
    compared: list[tuple[bytes, bytes]] = []

    def spy(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    door = tenants.doorkeeper(load(None, {"HOME": str(tmp_path)}, SETTINGS))
    monkeypatch.setattr(tenants, "hmac", type("Spied", (), {"compare_digest": staticmethod(spy)}))
    for token in (OPERATOR, RED, QUEUE, "wrong"):
        compared.clear()
        try:
            door.admit(token)
        except Forbidden:
            assert token == "wrong"
        known = (OPERATOR, RED, RED_READS, BLUE, READER, QUEUE)
        assert [one for one, _ in compared] == [each.encode() for each in known]
        assert {other for _, other in compared} == {token.encode()}


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """(certificate, key), signed by itself, for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=cairn-test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


@pytest.fixture(scope="module")
def tls_node(tmp_path_factory, certificate) -> Iterator[NodeProcess]:
    options = (f"--node.tls_cert={certificate[0]}", f"--node.tls_key={certificate[1]}")
    started = NodeProcess(tmp_path_factory.mktemp("tls"), *options, tls=True).start()
    yield started
    started.assert_clean()
    started.empty()
    started.stop()


def test_blocks_over_tls(tls_node, certificate):
    ca_file = str(certificate[0])
    sizes = [1, 70_000, 1_000_000]
    with BlockingClient(tls_node.tcp, tls_node.token, ca_file=ca_file) as client:
        space = client.open("llama", SPACE)
        keys = space.keys([1, *range(11)])
        blocks = [content(key, size) for key, size in zip(keys, sizes, strict=True)]
        assert client.put(space, keys, blocks).stored == 3
        buffers = [bytearray(size) for size in sizes]
        assert client.get(space, keys, buffers) == 3
        assert list(map(bytes, buffers)) == blocks

    async def ask() -> None:
        async with Client(tls_node.tcp, tls_node.token, ca_file=ca_file) as client:
            space = await client.open("llama", SPACE)
            keys = space.keys([2, *range(11)])
            blocks = [content(key, size) for key, size in zip(keys, sizes, strict=True)]
            assert (await client.put(space, keys, blocks)).stored == 3
            buffers = [bytearray(size) for size in sizes]
            assert await client.get(space, keys, buffers) == 3
            assert list(map(bytes, buffers)) == blocks

    asyncio.run(ask())


def test_a_certificate_that_nobody_vouches_for(tls_node):
    with BlockingClient(tls_node.tcp, tls_node.token) as client, pytest.raises(ConnectFailed, match=r"(?i)certificate"):
        client.stat()

    async def ask() -> None:
        async with Client(tls_node.tcp, tls_node.token) as client:
            with pytest.raises(ConnectFailed, match=r"(?i)certificate"):
                await client.stat()

    asyncio.run(ask())


def test_a_client_without_tls_at_a_door_with_it_and_the_other_way_round(tls_node, node, certificate):
    plain = f"tcp://127.0.0.1:{tls_node.port}"
    with BlockingClient(plain, tls_node.token, timeout_s=3.0) as client, pytest.raises(TransportError):
        client.stat()
    wrapped = f"tls://127.0.0.1:{node.port}"
    with (
        BlockingClient(wrapped, RED, ca_file=str(certificate[0]), timeout_s=3.0) as client,
        pytest.raises(ConnectFailed),
    ):
        client.stat()

    async def ask(address: str, token: str, ca_file: str) -> None:
        async with Client(address, token, ca_file=ca_file, timeout_s=3.0) as client:
            with pytest.raises(TransportError):
                await client.stat()

    asyncio.run(ask(plain, tls_node.token, ""))
    asyncio.run(ask(wrapped, RED, str(certificate[0])))


def test_garbage_at_a_door_with_tls(tls_node):
    for said in (b"", bytes(100), b"\x16\x03\x01\x00\xff" + bytes(300), wire.encode(wire.Stat(1))):
        with socket.create_connection(("127.0.0.1", tls_node.port), 5.0) as bare:
            bare.sendall(said)
    tls_node.assert_clean()
