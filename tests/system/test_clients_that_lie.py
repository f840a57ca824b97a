"""Clients that say what is not so, or what nobody may say: told what is wrong, and nobody else notices."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from engine_client.blocking import BlockingClient
from kvstore import wire
from kvstore.copier import checksum
from kvstore.errors import InvalidRequest, Rejected, StaleLease
from kvstore.packed import pack_keys, pack_u64, unpack_u64
from kvstore.types import BlockKey, Placement
from tests.system.children import Witness
from tests.system.nodes import NodeProcess, content, namespace, until
from tests.system.wire_client import WireClient

OPERATOR = "operator-operator-operator"
CROWD = "crowd-crowd-crowd-crowd"
TENANTS = (
    "--tenants.0.name=operator", f"--tenants.0.token={OPERATOR}", "--tenants.0.admin=true",
    "--tenants.1.name=crowd", f"--tenants.1.token={CROWD}", "--node.unix_tenant=crowd",
)  # fmt: skip
CONNECTIONS, LEASES, BATCH, INFLIGHT = 40, 32, 512, 4 << 20
LIMITS = (
    f"--limits.connections={CONNECTIONS}", f"--limits.leases_per_client={LEASES}", f"--limits.batch_blocks={BATCH}",
    f"--limits.inflight_bytes={INFLIGHT}", "--limits.frame_bytes=256KiB", "--limits.put_timeout=500ms",
    "--limits.pins_per_tenant=1000", "--limits.namespaces_per_tenant=64", "--rest.request_timeout=500ms",
)  # fmt: skip
SIZE = 50_000
EXTREMES = [-(2**63), -1, 0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[NodeProcess]:
    started = NodeProcess(tmp_path_factory.mktemp("node"), *TENANTS, *LIMITS, admin_token=OPERATOR).start()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def _others_are_served(node) -> Iterator[None]:
    with Witness(node, token=CROWD):
        yield
    node.assert_clean()
    with BlockingClient(node.unix, CROWD) as crowd:
        node.empty(crowd)


@pytest.fixture(params=["unix", "tcp"])
def liar(node, request) -> Iterator[WireClient]:
    with WireClient(node, tcp=request.param == "tcp", token=CROWD) as client:
        yield client


@pytest.fixture
def client(node) -> Iterator[BlockingClient]:
    with BlockingClient(node.unix) as reader:
        yield reader


def chain(seed: int, blocks: int) -> list[BlockKey]:
    return [BlockKey(checksum(f"{seed} {at}".encode()).to_bytes(8, "little") * 2) for at in range(blocks)]


def is_usable(liar: WireClient) -> bool:
    return isinstance(liar.ask(wire.Match(liar.next(), liar.open("lies", namespace("lies")).number, b"")), wire.Matched)


def code(reply: wire.Message) -> str:
    return reply.code if isinstance(reply, wire.Failed) else "ok"


def crcs(blocks: list[bytes]) -> bytes:
    return pack_u64([checksum(block) for block in blocks])


# Sizes and checksums.


@pytest.mark.parametrize("sizes", [[99], [101], [0], [2**63], [1, 100], []])
def test_a_put_of_blocks_of_another_size_than_the_namespace_says(liar, sizes):
    number = liar.open("sized", namespace("sized", block_bytes=100)).number
    assert code(liar.place(number, chain(1, 1), sizes)) == "invalid_request"
    assert is_usable(liar)


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 1 << 40, 2**64 - 1])
def test_a_put_of_a_block_as_large_as_a_slab_or_larger(liar, size):
    number = liar.open("lies", namespace("lies")).number
    placed = liar.place(number, chain(2, 1), [size])
    assert code(placed) == ("ok" if size == 1 << 20 else "invalid_request")
    if size == 1 << 20:
        assert code(liar.ask(wire.Abort(liar.next(), placed.grant_id))) == "ok"


def test_a_namespace_whose_blocks_fit_into_no_slab(liar):
    reply = liar.ask(wire.Open(liar.next(), "huge", namespace("huge", block_bytes=2 << 20)))
    assert code(reply) == "invalid_request"


@pytest.mark.parametrize("size", [100, SIZE, 700_000])
@pytest.mark.parametrize("way", ["commit", "put"])
def test_bytes_that_arrive_with_another_checksum(liar, client, size, way):
    number = liar.open("lies", namespace("lies")).number
    keys = chain(3, 2)
    blocks = [content(key, size) for key in keys]
    damaged = b"".join(blocks)[:-1] + b"\x00"
    if way == "commit":
        placed = liar.place(number, keys, [size] * 2)
        reply = liar.ask(wire.Commit(liar.next(), placed.grant_id, crcs(blocks)), damaged)
    else:
        request = wire.Put(liar.next(), number, pack_keys(keys), b"", pack_u64([size] * 2), crcs(blocks))
        reply = liar.ask(request, damaged)
    assert code(reply) == "corrupt"
    assert keys[1].hex() in reply.message
    space = client.open("lies", namespace("lies"))
    assert client.match(space, keys) == 0
    assert client.put(space, keys, blocks).stored == 2, "its slots were freed"
    assert liar.get(number, keys) == blocks


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_local_writer_that_commits_a_wrong_checksum(node, client, way):
    """Nobody looked at its bytes, so the first reader finds out: a miss, and the block is dropped for all."""
    space = client.open("lies", namespace("lies"))
    good, bad = chain(4, 3), chain(5, 2)
    client.put(space, good, [content(key, SIZE) for key in good])
    grant = client.place(space, bad, [SIZE] * 2, good[-1])
    for slot, key in zip(grant.slots, bad, strict=True):
        slot[:] = content(key, SIZE)
    client.commit(grant, [checksum(content(bad[0], SIZE)), 12345])
    before = node.counters()["corrupt_blocks"]
    with BlockingClient(node.tcp if way == "tcp" else node.unix, CROWD) as reader:
        its = reader.open("lies", namespace("lies"))
        assert reader.match(its, [*good, *bad]) == 5
        buffers = [bytearray(SIZE) for _ in range(5)]
        assert reader.get(its, [*good, *bad], buffers) == 4
        assert [bytes(buffer) for buffer in buffers[:4]] == [content(key, SIZE) for key in (*good, bad[0])]
        assert reader.match(its, [*good, *bad]) == 4
    assert node.counters()["corrupt_blocks"] == before + 1
    assert "corrupt" in client.explain(space, bad)[1]["reason"]
    assert client.put(space, bad, [content(key, SIZE) for key in bad], good[-1]).stored == 1


def test_a_report_of_damage_that_is_not_there(liar, client):
    space = client.open("lies", namespace("lies"))
    keys = chain(6, 3)
    client.put(space, keys, [content(key, SIZE) for key in keys])
    assert liar.ask(wire.Report(liar.next(), space.number, pack_keys([*keys, *chain(7, 2)]))).corrupt == 0
    assert client.get(space, keys, [bytearray(SIZE) for _ in keys]) == 3
    assert code(liar.ask(wire.Report(liar.next(), space.number, bytes(16 * (BATCH + 1))))) == "invalid_request"


# Numbers that stand for nothing, or for what is somebody else's.


def by_number(number: int) -> list[wire.Message]:
    key = chain(8, 1)[0]
    return [
        wire.Match(1, number, key), wire.Acquire(1, number, key, 1000), wire.Acquire(1, number, key, 1000, 10, 1, True),
        wire.Put(1, number, key, b"", pack_u64([8])), wire.Report(1, number, key), wire.Evict(1, number, key),
        wire.Evict(1, number, b"", True), wire.Pin(1, number, key, False, 1000), wire.Explain(1, number, key, bytes(8)),
        wire.List(1, number, b"", 10), wire.Unpin(1, number),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [-1, 0, 999, 65_536, 2**63, 2**64 - 1])
def test_a_namespace_or_pin_that_nobody_opened(liar, number):
    for request in by_number(number):
        assert code(liar.ask(request)) == "not_found", request
    put = wire.Put(1, number, chain(8, 1)[0], b"", pack_u64([8]), crcs([bytes(8)]))
    assert code(liar.ask(put, bytes(8))) == "not_found"
    assert is_usable(liar)


@pytest.mark.parametrize("number", EXTREMES)
def test_a_lease_or_grant_that_nobody_gave(liar, number):
    """Giving up what is not there is no error, since that is idempotent; using it is."""
    for request in (wire.Release(1, number), wire.Abort(1, number)):
        assert code(liar.ask(request)) == "ok", request
    assert code(liar.ask(wire.Renew(1, number, 1000))) == "stale_lease"
    assert code(liar.ask(wire.Progress(1, number, 1))) in ("stale_lease", "invalid_request")
    assert code(liar.ask(wire.Commit(1, number, bytes(8)), bytes(8))) == "stale_lease"
    assert code(liar.ask(wire.Commit(1, number, bytes(8)))) in ("stale_lease", "invalid_request")
    assert is_usable(liar)


def test_a_lease_and_a_grant_of_another_client(liar, node):
    with WireClient(node) as owner:
        number = owner.open("lies", namespace("lies")).number
        keys = chain(9, 4)
        owner.put(number, keys[:2], [bytes(SIZE)] * 2)
        lease_id = owner.ask(wire.Acquire(owner.next(), number, pack_keys(keys[:2]), 60_000)).lease_id
        grant_id = owner.place(number, keys[2:], [SIZE] * 2, keys[1]).grant_id
        for request in (
            wire.Release(1, lease_id), wire.Renew(1, lease_id, 1), wire.Abort(1, grant_id), wire.Abort(1, lease_id),
            wire.Release(1, grant_id), wire.Renew(1, grant_id, 1),
        ):  # fmt: skip
            assert code(liar.ask(request)) in ("stale_lease", "ok")
        assert code(liar.ask(wire.Release(1, lease_id))) == "stale_lease"
        assert code(liar.ask(wire.Abort(1, grant_id))) == "stale_lease"
        assert code(liar.ask(wire.Commit(1, grant_id, crcs([bytes(SIZE)] * 2)), bytes(2 * SIZE))) == "stale_lease"
        assert code(owner.ask(wire.Renew(owner.next(), lease_id, 60_000))) == "ok"
        assert code(owner.ask(wire.Commit(owner.next(), grant_id, crcs([bytes(SIZE)] * 2)), bytes(2 * SIZE))) == "ok"
        assert code(owner.ask(wire.Release(owner.next(), lease_id))) == "ok"
        assert liar.get(number, keys) == [bytes(SIZE)] * 4


def test_an_unknown_slab(node):
    with WireClient(node) as liar:
        ticket = liar.welcome.ticket
        for slab_ids in [(0,), (-1,), (2**63,), (10**6,), (10**6,) * 64]:
            assert code(liar.ask(wire.Attach(liar.next(), ticket, slab_ids))) == "not_found"
        assert code(liar.ask(wire.Attach(liar.next(), ticket, (1,) * 65))) == "invalid_request"
        assert is_usable(liar)


# Commits.


def test_a_commit_said_twice(liar):
    number = liar.open("lies", namespace("lies")).number
    keys = chain(10, 2)
    blocks = [content(key, SIZE) for key in keys]
    placed = liar.place(number, keys, [SIZE] * 2)
    for request_id in (1, 2):
        liar.send(wire.Commit(request_id, placed.grant_id, crcs(blocks)), b"".join(blocks))
    assert {code(liar.receive()), code(liar.receive())} in ({"ok", "stale_lease"}, {"ok", "invalid_request"})
    assert code(liar.ask(wire.Commit(liar.next(), placed.grant_id, crcs(blocks)))) in ("stale_lease", "invalid_request")
    assert code(liar.ask(wire.Abort(liar.next(), placed.grant_id))) == "ok"
    assert liar.get(number, keys) == blocks


def test_a_large_payload_sent_twice_and_given_up_in_between(liar):
    """The first is still being verified in a thread when the second comes."""
    number = liar.open("lies", namespace("lies")).number
    keys = chain(11, 3)
    blocks = [content(key, 700_000) for key in keys]
    for give_up in (False, True):
        placed = liar.place(number, keys, [700_000] * 3)
        commit = wire.Commit(7, placed.grant_id, crcs(blocks))
        liar.send(commit, b"".join(blocks))
        if give_up:
            liar.send(wire.Abort(8, placed.grant_id))
        liar.send(commit, b"".join(blocks))
        codes = sorted(code(liar.receive()) for _ in range(3 if give_up else 2))
        assert set(codes) <= {"ok", "stale_lease", "invalid_request"}
        assert liar.get(number, keys) in ([], blocks)
        liar.ask(wire.Evict(liar.next(), number, b"", True))


def test_a_remote_commit_without_its_payload(node):
    with WireClient(node, tcp=True, token=CROWD) as liar:
        number = liar.open("lies", namespace("lies")).number
        keys = chain(12, 1)
        placed = liar.place(number, keys, [SIZE])
        assert code(liar.ask(wire.Commit(liar.next(), placed.grant_id, crcs([bytes(SIZE)])))) == "invalid_request"
        assert liar.get(number, keys) == []
        assert code(liar.ask(wire.Commit(liar.next(), placed.grant_id, crcs([bytes(SIZE)])), bytes(SIZE))) == "ok"
        assert liar.get(number, keys) == [bytes(SIZE)]


def test_progress_of_slots_that_only_the_node_writes(node, client):
    """A remote writer has no layers in place before its payload: readers of partial blocks would see stale memory."""
    with WireClient(node, tcp=True, token=CROWD) as liar:
        number = liar.open("lies", namespace("lies")).number
        keys = chain(13, 1)
        placed = liar.place(number, keys, [SIZE])
        assert code(liar.ask(wire.Progress(liar.next(), placed.grant_id, 4))) == "invalid_request"
        space = client.open("lies", namespace("lies"))
        assert client.acquire(space, keys, lease_s=1.0, layers=1) is None


@pytest.mark.parametrize("layers", [-1, 5, 2**63])
def test_progress_to_a_layer_that_the_model_does_not_have(node, layers):
    with WireClient(node) as liar:
        number = liar.open("lies", namespace("lies")).number
        placed = liar.place(number, chain(14, 2), [SIZE] * 2)
        assert code(liar.ask(wire.Progress(liar.next(), placed.grant_id, 3))) == "ok"
        assert code(liar.ask(wire.Progress(liar.next(), placed.grant_id, 2))) == "invalid_request"
        assert code(liar.ask(wire.Progress(liar.next(), placed.grant_id, layers))) == "invalid_request"


@pytest.mark.parametrize("count", [0, 1, 3, 400])
def test_a_commit_with_another_number_of_checksums(liar, count):
    number = liar.open("lies", namespace("lies")).number
    keys = chain(15, 2)
    placed = liar.place(number, keys, [SIZE] * 2)
    reply = liar.ask(wire.Commit(liar.next(), placed.grant_id, bytes(8 * count)), bytes(2 * SIZE))
    assert code(reply) == "invalid_request"
    assert liar.get(number, keys) == []
    assert is_usable(liar)


@pytest.mark.parametrize("way", ["commit", "put"])
@pytest.mark.parametrize("size", [1, 2 * SIZE - 1, 2 * SIZE + 1, INFLIGHT])
def test_a_payload_of_another_size_than_its_blocks(liar, size, way):
    number = liar.open("lies", namespace("lies")).number
    keys = chain(16, 2)
    blocks = [content(key, SIZE) for key in keys]
    if way == "commit":
        grant_id = liar.place(number, keys, [SIZE] * 2).grant_id
        reply = liar.ask(wire.Commit(liar.next(), grant_id, crcs(blocks)), bytes(size))
    else:
        request = wire.Put(liar.next(), number, pack_keys(keys), b"", pack_u64([SIZE] * 2), crcs(blocks))
        reply = liar.ask(request, bytes(size))
    assert code(reply) == "invalid_request"
    assert str(size) in reply.message
    assert str(2 * SIZE) in reply.message
    assert liar.get(number, keys) == []
    assert code(liar.put(number, keys, blocks)) == "ok"
    assert liar.get(number, keys) == blocks


def test_a_payload_for_a_request_that_has_none(liar):
    number = liar.open("lies", namespace("lies")).number
    for request in (
        wire.Match(1, number, b""), wire.Stat(1), wire.Release(1, 1), wire.Put(1, number, b"", b"", b""),
        wire.Hello(1, wire.PROTOCOL, CROWD, "again"), wire.Attach(1, b"", ()),
    ):  # fmt: skip
        assert code(liar.ask(request, bytes(100_000))) in ("invalid_request", "protocol_error"), request
        assert is_usable(liar)


def test_a_payload_for_a_grant_that_ran_out(liar):
    number = liar.open("lies", namespace("lies")).number
    keys = chain(17, 2)
    placed = liar.place(number, keys, [SIZE] * 2)
    until(
        lambda: liar.place(number, keys, [SIZE] * 2).placements == bytes([Placement.GRANTED] * 2), "the time to run out"
    )
    assert (
        code(liar.ask(wire.Commit(liar.next(), placed.grant_id, crcs([bytes(SIZE)] * 2)), bytes(2 * SIZE)))
        == "stale_lease"
    )
    assert liar.get(number, keys) == []
    assert is_usable(liar)


def test_a_put_that_announces_blocks_and_sends_none(liar):
    number = liar.open("lies", namespace("lies")).number
    request = wire.Put(liar.next(), number, pack_keys(chain(18, 1)), b"", pack_u64([SIZE]), bytes(8))
    assert code(liar.ask(request)) == "invalid_request"
    assert is_usable(liar)


# Chains.


def test_keys_of_a_wrong_length(liar, node):
    number = liar.open("lies", namespace("lies")).number
    parted = liar.open("parted", namespace("parted", parts=2)).number
    for space, length in ((number, 15), (number, 17), (number, 18), (parted, 16), (parted, 17), (parted, 1)):
        key = bytes(length)
        for request in (
            wire.Match(1, space, key), wire.Acquire(1, space, key, 1000), wire.Evict(1, space, key),
            wire.Report(1, space, key), wire.Pin(1, space, key, True, 1000), wire.Explain(1, space, key),
            wire.Put(1, space, key, b"", pack_u64([8])),
        ):  # fmt: skip
            assert code(liar.ask(request)) == "invalid_request", request
        put = wire.Put(1, space, key, b"", pack_u64([8]), bytes(8))
        assert code(liar.ask(put, bytes(8))) == "invalid_request"
        whole = bytes(16 if space == number else 18)
        assert code(liar.ask(wire.Put(1, space, whole, key, pack_u64([8])))) == "invalid_request", "a parent"
        assert code(liar.ask(wire.List(1, space, key, 10))) in ("not_found", "invalid_request")
    assert is_usable(liar)


def test_parts_that_the_namespace_does_not_have(liar):
    number = liar.open("parted", namespace("parted", parts=2)).number
    for part in (2, 3, 65_535):
        key = bytes(16) + part.to_bytes(2, "little")
        assert code(liar.ask(wire.Put(1, number, key, b"", pack_u64([8])))) == "invalid_request"
        assert liar.ask(wire.Match(1, number, key)).blocks == 0
        assert liar.get(number, [BlockKey(key)]) == []


def test_a_block_twice_in_a_chain(liar):
    number = liar.open("lies", namespace("lies")).number
    one, two = chain(19, 2)
    for keys, parent in (([one, one], b""), ([one, two, one], b""), ([one, two], two), ([one], one)):
        assert code(liar.place(number, keys, [8] * len(keys), parent)) == "invalid_request"
    liar.put(number, [one, two], [b"12345678"] * 2)
    assert liar.ask(wire.Match(liar.next(), number, pack_keys([one] * BATCH))).blocks == BATCH
    assert liar.get(number, [one] * BATCH) == [b"12345678"] * BATCH, "asking twice is no lie"


def test_blocks_that_are_each_others_parents(liar, node):
    number = liar.open("lies", namespace("lies")).number
    keys = chain(20, 3)
    for at, key in enumerate(keys):
        assert code(liar.put(number, [key], [bytes(8)], keys[at - 1])) == "ok"
    node.assert_clean()
    evicted = liar.ask(wire.Evict(liar.next(), number, pack_keys(keys)))
    assert evicted.blocks == 3


def test_a_chain_without_its_beginning(liar, node, client):
    number = liar.open("lies", namespace("lies")).number
    keys = chain(21, 6)
    before = node.counters()["orphan_blocks"]
    assert code(liar.put(number, keys[3:], [bytes(8)] * 3, keys[2])) == "ok"
    assert node.counters()["orphan_blocks"] == before + 1
    space = client.open("lies", namespace("lies"))
    assert client.match(space, keys[3:]) == 3
    assert client.put(space, keys[:3], [bytes(8)] * 3).stored == 3
    assert client.get(space, keys, [bytearray(8) for _ in keys]) == 6


def test_a_chain_of_ten_thousand_blocks(node, liar, client):
    number = liar.open("lies", namespace("lies")).number
    keys = chain(22, 10_000)
    parent = b""
    for start in range(0, len(keys), BATCH):
        batch = keys[start : start + BATCH]
        assert code(liar.put(number, batch, [bytes(64)] * len(batch), parent)) == "ok"
        parent = batch[-1]
    space = client.open("lies", namespace("lies"))
    assert client.match(space, keys) == 10_000
    assert code(liar.ask(wire.Match(liar.next(), number, pack_keys(keys)))) == "invalid_request"
    assert code(liar.place(number, keys[:1], [64], keys[-1])) == "ok", "the last one as the first one's parent"
    node.assert_clean()
    assert client.evict(space).blocks == 10_000


def test_an_explanation_of_a_prompt_that_is_far_too_long(node, liar):
    """It is looked for in all of the tenant's namespaces, and nobody else is served meanwhile."""
    numbers = [liar.open(f"grid {at}", namespace(f"model {at}", block_tokens=1)).number for at in range(20)]
    keys = pack_keys(chain(34, BATCH))
    began = time.monotonic()
    for number in numbers:
        liar.send(wire.Explain(1, number, keys, bytes(200_000)))
    for _ in numbers:
        assert len(liar.receive().blocks) == BATCH
    assert time.monotonic() - began < 1.5


# Limits.


def test_more_blocks_than_a_batch_may_have(liar):
    number = liar.open("lies", namespace("lies")).number
    many = pack_keys(chain(23, BATCH + 1))
    for request in (
        wire.Match(1, number, many), wire.Acquire(1, number, many, 1000), wire.Pin(1, number, many, False, 1000),
        wire.Explain(1, number, many), wire.Report(1, number, many), wire.Evict(1, number, many),
        wire.Put(1, number, many, b"", bytes(8 * (BATCH + 1))),
    ):  # fmt: skip
        assert code(liar.ask(request)) == "invalid_request", request
        assert "batch_blocks" in liar.ask(request).message
    assert is_usable(liar)


def test_more_leases_than_a_client_may_hold(node, liar):
    number = liar.open("lies", namespace("lies")).number
    keys = chain(24, 2)
    liar.put(number, keys, [bytes(SIZE)] * 2)
    acquire = wire.Acquire(1, number, pack_keys(keys), 60_000)
    leases = [liar.ask(acquire).lease_id for _ in range(LEASES)]
    refused = liar.ask(acquire)
    assert code(refused) == "rejected"
    assert "leases_per_client" in refused.message
    assert code(liar.place(number, chain(25, 1), [8])) == "rejected"
    assert code(liar.put(number, chain(25, 1), [bytes(8)])) == "rejected"
    assert code(liar.ask(wire.Acquire(1, number, pack_keys(keys), 0, 0, 0, True))) == "rejected"
    assert code(liar.ask(wire.Release(1, leases[0]))) == "ok"
    assert code(liar.ask(acquire)) == "ok"
    assert node.used_bytes >= 2 * SIZE


def test_more_bytes_on_the_way_than_a_client_may_have(liar):
    number = liar.open("lies", namespace("lies")).number
    half = [1 << 20] * 2
    first, second = liar.place(number, chain(26, 2), half), liar.place(number, chain(27, 2), half)
    assert code(first) == code(second) == "ok"
    refused = liar.place(number, chain(28, 1), [64])
    assert code(refused) == "rejected"
    assert "inflight_bytes" in refused.message
    assert code(liar.ask(wire.Abort(1, first.grant_id))) == "ok"
    assert code(liar.place(number, chain(28, 1), [64])) == "ok"


def test_more_pins_than_a_tenant_may_have(liar):
    number = liar.open("lies", namespace("lies")).number
    keys = chain(29, BATCH)
    liar.put(number, keys, [bytes(64)] * BATCH)
    pins = [liar.ask(wire.Pin(1, number, pack_keys(keys), hard, 60_000)) for hard in (True, False)]
    assert [code(pin) for pin in pins] == ["ok", "rejected"]
    assert "pins_per_tenant" in pins[1].message
    assert code(liar.ask(wire.Unpin(1, pins[0].pin_id))) == "ok"
    assert code(liar.ask(wire.Unpin(1, pins[0].pin_id))) == "not_found"


def test_more_namespaces_than_a_tenant_may_have(node):
    with WireClient(node, token=OPERATOR) as liar:
        codes = [code(liar.ask(wire.Open(1, f"name {at}", namespace("many")))) for at in range(70)]
        assert set(codes) == {"ok", "rejected"}
        for name in ("", "a/b", "x" * 129, "new\nline", "\x00"):
            assert code(liar.ask(wire.Open(1, name, namespace("many")))) == "invalid_request"
        assert code(liar.ask(wire.Open(1, "name 0", namespace("other")))) == "namespace_mismatch"


def test_more_connections_than_the_node_takes(node, client):
    space = client.open("lies", namespace("lies"))
    with ExitStack() as stack:
        codes = [_enters(node, stack, tcp=at % 2 == 0) for at in range(CONNECTIONS + 10)]
        assert 10 <= codes.count("rejected") <= 20, codes
        assert client.put(space, chain(30, 1), [bytes(8)]).stored == 1, "who is in stays in"
    with BlockingClient(node.tcp, CROWD) as late:
        until(lambda: _connects(late), "room for another")


def _enters(node: NodeProcess, stack: ExitStack, *, tcp: bool) -> str:
    bare = stack.enter_context(WireClient(node, tcp=tcp, hello=False))
    try:
        bare.send(wire.Hello(1, wire.PROTOCOL, CROWD, "one of many"))
    except OSError:
        pass  # refused before it said a word
    return code(bare.receive())


def test_a_crowd_that_does_not_say_who_it_is(node):
    """It cannot keep out who does: those who came first are sent away."""
    with ExitStack() as stack:
        crowd = [stack.enter_context(WireClient(node, tcp=at % 2 == 0, hello=False)) for at in range(3 * CONNECTIONS)]
        assert all(stranger.is_hung_up(0.3) for stranger in crowd[:CONNECTIONS])
        for tcp in (False, True):
            stack.enter_context(WireClient(node, tcp=tcp, token=CROWD))


def _connects(client: BlockingClient) -> bool:
    try:
        return bool(client.connect())
    except Rejected:
        return False


# Numbers at their ends.


@pytest.mark.parametrize("extreme", EXTREMES)
def test_numbers_at_the_ends_of_their_range(liar, extreme):
    number = liar.open("lies", namespace("lies")).number
    keys = chain(31, 2)
    liar.put(number, keys, [content(key, SIZE) for key in keys])
    packed = pack_keys(keys)
    lease = liar.ask(wire.Acquire(1, number, packed, extreme, 0, 0))
    assert code(lease) == "ok"
    for request in (
        wire.Acquire(1, number, packed, 1000, 0, extreme), wire.Renew(1, lease.lease_id, extreme),
        wire.Acquire(1, number, packed, extreme, extreme, extreme),
        wire.Pin(1, number, packed, True, extreme), wire.Pin(1, number, packed, False, extreme),
        wire.List(1, number, b"", extreme), wire.Progress(1, 1, extreme),
        wire.SetTier(1, "dram", extreme), wire.SetTier(1, "dram", None, float(extreme)),
    ):  # fmt: skip
        reply = liar.ask(request)
        assert code(reply) in ("ok", "invalid_request", "stale_lease", "forbidden"), (request, reply)
        if isinstance(reply, wire.Pinned):
            liar.ask(wire.Unpin(1, reply.pin_id))
    assert liar.get(number, keys) == [content(key, SIZE) for key in keys]
    delivered = liar.ask(wire.Acquire(1, number, packed, extreme, 0, 0, True))
    assert liar.payload == b"".join(content(key, SIZE) for key in keys), delivered
    assert unpack_u64(delivered.sizes) == (SIZE, SIZE)


def test_an_admin_that_asks_for_what_no_host_has(node):
    with WireClient(node, token=OPERATOR) as admin:
        before = node.tier()["capacity_bytes"]
        for request in (
            wire.SetTier(1, "dram", 2**62), wire.SetTier(1, "dram", 0), wire.SetTier(1, "dram", -1),
            wire.SetTier(1, "dram", None, 0.5, 0.6), wire.SetTier(1, "dram", None, float("nan")),
            wire.SetTier(1, "dram", None, float("inf")), wire.SetTier(1, "dram", None, None, -1.0),
        ):  # fmt: skip
            assert code(admin.ask(request)) == "invalid_request", request
        assert code(admin.ask(wire.SetTier(1, "tape", 1 << 30))) == "not_found"
        assert node.tier()["capacity_bytes"] == node.tier()["target_bytes"] == before


def test_a_client_library_that_is_misused(client):
    space = client.open("lies", namespace("lies"))
    keys = chain(32, 2)
    with pytest.raises(InvalidRequest):
        client.get(space, keys, [bytearray(8)])
    with pytest.raises(InvalidRequest):
        client.put(space, keys, [bytes(8)])
    client.put(space, keys, [bytes(SIZE)] * 2)
    for target in (bytes(SIZE), bytearray(SIZE - 1), memoryview(bytearray(2 * SIZE))[::2]):
        with pytest.raises(InvalidRequest):
            client.get(space, keys, [target, bytearray(SIZE)])
    grant = client.place(space, chain(33, 1), [SIZE])
    client.abort(grant)
    with pytest.raises(StaleLease):
        client.commit(grant)
    assert client.get(space, keys, [bytearray(SIZE) for _ in keys]) == 2
