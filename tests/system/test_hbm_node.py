"""A node with its HBM tier on the CPU, and engines that read it in place: hits, tenants, pressure, deaths."""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from engine_client import leases
from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace, Patience
from kvstore import wire
from kvstore.catalogue import Tenant
from kvstore.errors import ConfigError, Forbidden, InvalidRequest, NotFound, StaleLease, TransportError
from kvstore.packed import pack_keys, unpack_u64
from kvstore.region import Region
from kvstore.transport.local import Door
from kvstore.types import BlockKey
from server.assembly import make_store
from server.config import load
from tests.conftest import LiveNode
from tests.system.children import Child
from tests.system.nodes import PATIENCE_S, NodeProcess, content, namespace, pause, until
from tests.system.test_clients_that_lie import code
from tests.system.wire_client import WireClient

pytest.importorskip("torch")
device = pytest.importorskip("engine_client.adapters.device")

SIZE = 60_000
SLOTS = (1 << 20) // 61_440  # in a slab of 1 MiB
BLOCKS = 20
HBM = ("--tiers.hbm.device=cpu", "--tiers.hbm.capacity=4MiB")
OPERATOR, RED, RED_READS, BLUE = (f"{name}-token-of-this-tenant" for name in ("operator", "red", "red-reads", "blue"))
TENANTS = (
    "--tenants.0.name=operator", f"--tenants.0.token={OPERATOR}", "--tenants.0.admin=true",
    "--tenants.1.name=red", f"--tenants.1.token={RED}", f"--tenants.1.read_token={RED_READS}",
    "--tenants.2.name=blue", f"--tenants.2.token={BLUE}", "--node.unix_tenant=",
)  # fmt: skip


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Starts a node with an HBM tier; in the end it is consistent and nobody holds anything."""
    nodes: list[NodeProcess] = []

    def started(*options: str, admin_token: str = "") -> NodeProcess:
        nodes.append(NodeProcess(tmp_path, *HBM, *options, admin_token=admin_token).start())
        return nodes[-1]

    yield started
    for node in nodes:
        node.assert_clean()
        with node.admin() as admin:
            until(lambda: all(not row["draining"] for row in admin.stat()["tiers"]), "nobody to hold anything")
        node.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    started = NodeProcess(tmp_path_factory.mktemp("node"), *HBM).start()
    yield started
    started.stop()


@pytest.fixture
def node(shared: NodeProcess) -> Iterator[NodeProcess]:
    """One for all tests, emptied after each."""
    yield shared
    shared.assert_clean()
    with shared.admin() as admin:
        admin.evict(admin.open("engines", namespace()))
        until(lambda: not any(row["used_bytes"] for row in admin.stat()["tiers"]), "nobody to hold anything")


@pytest.fixture
def client(node: NodeProcess) -> Iterator[BlockingClient]:
    with node.admin() as admin:
        yield admin


def put(client: BlockingClient, seed: int = 0, blocks: int = BLOCKS) -> tuple[OpenSpace, list[BlockKey]]:
    space = client.open("engines", namespace())
    keys = space.keys([seed, *range(1, 4 * blocks)])
    client.put(space, keys, [content(key, SIZE) for key in keys])
    return space, keys


def bytes_of(held: Any) -> list[bytes]:
    return [] if held is None else [bytes(tensor.numpy()) for tensor in held.tensors]


def contents(keys: Sequence[BlockKey]) -> list[bytes]:
    return [content(key, SIZE) for key in keys]


def row(client: BlockingClient, tier: str) -> dict[str, Any]:
    return next(row for row in client.stat()["tiers"] if row["tier"] == tier)


def test_an_engine_reads_blocks_in_place_and_finds_them_there_the_next_time(client: BlockingClient) -> None:
    space, keys = put(client)
    before = row(client, "hbm")
    with device.DeviceReader(client) as reader:
        held = reader.acquire(space, keys, lease_s=30)
        assert bytes_of(held) == contents(keys)
        assert [len(held.lease.checksums), held.lease.layers] == [BLOCKS, (4,) * BLOCKS]
        again = reader.acquire(space, [*keys, BlockKey(bytes(16))], lease_s=30)
        assert [tensor.data_ptr() for tensor in again.tensors] == [tensor.data_ptr() for tensor in held.tensors]
        found = row(client, "hbm")
        counted = {name: found[name] - before[name] for name in ("blocks", "lifted_blocks", "hit_blocks")}
        assert counted == {"blocks": BLOCKS, "lifted_blocks": BLOCKS, "hit_blocks": BLOCKS}
        assert (found["medium"]["device"], found["medium"]["peer_access"], found["health"]) == ("cpu", {}, "")
        assert reader.acquire(space, [BlockKey(bytes(16))], lease_s=30) is None
        reader.renew(held, 60)
        reader.release(held)
        reader.release(held)
        assert held.tensors == []
        with pytest.raises(StaleLease):
            reader.renew(held, 60)
        assert bytes_of(again) == contents(keys)


def test_blocks_that_left_dram_come_back_from_hbm(client: BlockingClient) -> None:
    space, keys = put(client)
    with device.DeviceReader(client) as reader:
        reader.acquire(space, keys, lease_s=30)
    before = row(client, "hbm")["promoted_blocks"]
    client.evict(space, keys, "dram")
    assert row(client, "dram")["blocks"] == 0
    assert client.match(space, keys) == BLOCKS
    buffers = [bytearray(SIZE) for _ in keys]
    assert client.get(space, keys, buffers) == BLOCKS
    assert list(map(bytes, buffers)) == contents(keys)
    assert row(client, "hbm")["promoted_blocks"] - before == BLOCKS
    client.evict(space, keys)
    assert client.match(space, keys) == 0


def disk_in(folder: Path) -> tuple[str, ...]:
    sizes = "--tiers.nvme.capacity=64MiB", "--tiers.nvme.slab=4MiB"
    return f"--tiers.nvme.path={folder}/disk", *sizes, "--tiers.nvme.admission=all"


def test_blocks_on_disk_come_straight_into_hbm(start: Callable[..., NodeProcess], tmp_path: Path) -> None:
    node = start(*disk_in(tmp_path))
    with node.admin() as client:
        space, keys = put(client)
        until(lambda: row(client, "nvme")["capacity_bytes"] and not row(client, "nvme")["is_recovering"])
        assert client.demote(space, keys, "nvme", evict=True).evicted == BLOCKS
        with device.DeviceReader(client) as reader:
            assert bytes_of(reader.acquire(space, keys, lease_s=30)) == contents(keys)
        assert row(client, "nvme")["promoted_blocks"] == row(client, "hbm")["lifted_blocks"] == BLOCKS
        assert row(client, "dram")["blocks"] == 0


def test_a_prefix_larger_than_dram_fits_into_hbm_and_is_there_after_a_restart(
    start: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    """DRAM has 2 slabs of 17 blocks, the chain 60 blocks, HBM 4 slabs."""
    node = start(*disk_in(tmp_path), "--tiers.dram.capacity=2MiB")
    blocks = 60
    with node.admin() as client:
        until(lambda: row(client, "nvme")["capacity_bytes"] and not row(client, "nvme")["is_recovering"])
        space = client.open("engines", namespace())
        keys = space.keys([0, *range(1, 4 * blocks)])
        for start_ in range(0, blocks, 10):
            piece = keys[start_ : start_ + 10]
            parent = keys[start_ - 1] if start_ else None
            client.put(space, piece, [content(key, SIZE) for key in piece], parent=parent)
            assert client.demote(space, piece, "nvme", evict=True).evicted == 10
    for _ in range(2):
        with node.admin() as client, device.DeviceReader(client) as reader:
            space = client.find("engines")
            held = reader.acquire(space, keys, lease_s=30)
            assert bytes_of(held) == contents(keys)
            assert row(client, "dram")["blocks"] == 0, "none came by way of DRAM"
            assert row(client, "hbm")["lifted_blocks"] == blocks
            reader.release(held)
        node.stop()
        node.start()
        with node.admin() as client:
            until(lambda client=client: not row(client, "nvme")["is_recovering"])


def test_a_writer_that_is_at_it_is_waited_for(node: NodeProcess, client: BlockingClient) -> None:
    space = client.open("engines", namespace())
    keys = space.keys(range(8))
    with BlockingClient(node.unix) as other, ThreadPoolExecutor(1) as pool, device.DeviceReader(other) as reader:
        theirs = other.open("engines", namespace())
        grant = client.place(space, keys, [SIZE] * 2)
        before = client.stat()["counters"]["requests"].get("acquire", 0)
        asked = pool.submit(reader.acquire, theirs, keys, lease_s=30, wait_s=PATIENCE_S)
        until(lambda: client.stat()["counters"]["requests"].get("acquire", 0) > before, "the reader to ask")
        for slot, key in zip(grant.slots, keys, strict=True):
            slot[:] = content(key, SIZE)
        assert not asked.done()
        client.commit(grant)
        assert bytes_of(asked.result()) == contents(keys)


def test_tenants_can_neither_find_nor_map_what_is_anothers(start: Callable[..., NodeProcess]) -> None:
    node = start(*TENANTS, admin_token=OPERATOR)
    with BlockingClient(node.unix, RED) as red, BlockingClient(node.unix, BLUE) as blue:
        space, keys = put(red)
        theirs = blue.open("engines", namespace())
        with device.DeviceReader(red) as reader, device.DeviceReader(blue) as spy:
            held = reader.acquire(space, keys, lease_s=30)
            assert bytes_of(held) == contents(keys)
            assert spy.acquire(theirs, keys, lease_s=30) is None
            door = Door(node.path, blue.connect().ticket)
            for slab_id, _, _ in held.lease.places:
                with pytest.raises(NotFound, match="no slab"):
                    door.attach([slab_id], "hbm", PATIENCE_S)
            door.close()
            _, own = put(blue, seed=7)
            assert bytes_of(spy.acquire(theirs, own, lease_s=30)) == contents(own)
            assert bytes_of(held) == contents(keys)


def test_nobody_gets_to_write_into_hbm(start: Callable[..., NodeProcess]) -> None:
    node = start(*TENANTS, admin_token=OPERATOR)
    with BlockingClient(node.unix, RED) as red, BlockingClient(node.unix, RED_READS) as reads:
        _, keys = put(red)
        with device.DeviceReader(reads) as reader:
            space = reads.find("engines")
            held = reader.acquire(space, keys, lease_s=30)
            assert bytes_of(held) == contents(keys)
            for client in (red, reads):
                door = Door(node.path, client.connect().ticket)
                (descriptor, size), = door.attach([held.lease.places[0][0]], "hbm", PATIENCE_S)[0]  # fmt: skip
                with pytest.raises(PermissionError):
                    Region(descriptor, size, writable=True, populate=False)
                os.close(descriptor)
                door.close()


def test_memory_of_one_tenant_is_nothing_but_zeros_when_another_gets_it(start: Callable[..., NodeProcess]) -> None:
    node = start(*TENANTS, "--tiers.hbm.capacity=1MiB", admin_token=OPERATOR)
    with BlockingClient(node.unix, RED) as red, BlockingClient(node.unix, BLUE) as blue:
        space, keys = put(red, blocks=SLOTS)
        with device.DeviceReader(red) as reader:
            held = reader.acquire(space, keys, lease_s=30)
            tensors = held.tensors
            reader.release(held)
            theirs, own = put(blue, seed=7, blocks=SLOTS)
            with device.DeviceReader(blue) as other:
                assert bytes_of(other.acquire(theirs, own, lease_s=30)) == contents(own)
                assert not any(tensor.any() for tensor in tensors), "the first sees neither its own bytes nor theirs"


def read_for_a_while(pipe: Connection, node: NodeProcess, seed: int) -> None:
    """Hold prefixes of many chains by turns, and look at every byte."""
    dice = random.Random(seed)
    with BlockingClient(node.unix, timeout_s=PATIENCE_S) as client, device.DeviceReader(client) as reader:
        space = client.find("engines")
        blocks = turns = 0
        until_s = time.monotonic() + 3
        while time.monotonic() < until_s:
            keys = space.keys([dice.randrange(8), *range(1, 4 * BLOCKS)])[: dice.randint(1, BLOCKS)]
            held = reader.acquire(space, keys, lease_s=30)
            if held is not None:
                assert bytes_of(held) == contents(keys[: len(held.tensors)])
                blocks += len(held.tensors)
                if dice.random() < 0.8:
                    reader.release(held)
            turns += 1
        pipe.send((turns, blocks))


def test_under_pressure_readers_get_right_bytes_or_fewer_of_them(node: NodeProcess, client: BlockingClient) -> None:
    for seed in range(8):
        put(client, seed)
    children = [Child(read_for_a_while, node, seed) for seed in range(3)]
    said = [child.hear() for child in children]
    for child in children:
        assert child.join() == 0
    assert all(blocks > 100 for _, blocks in said), said
    assert client.stat()["counters"]["removed_blocks"]["pressure"] > 50, "there was not enough room for all"
    assert client.check() == []


def hold_and_say(pipe: Connection, node: NodeProcess) -> None:
    with BlockingClient(node.unix, timeout_s=PATIENCE_S) as client:
        space = client.find("engines")
        keys = space.keys([0, *range(1, 4 * BLOCKS)])
        held = device.DeviceReader(client).acquire(space, keys, lease_s=600)
        pipe.send(len(held.tensors))
        pipe.recv()


def test_an_engine_that_is_killed_holds_nothing_any_more(node: NodeProcess, client: BlockingClient) -> None:
    space, keys = put(client)
    with Child(hold_and_say, node) as child:
        assert child.hear() == BLOCKS
        assert client.drain("hbm").left == BLOCKS
        child.kill()
        until(lambda: client.drain("hbm").left == 0, "the lease of the dead to go")
    with device.DeviceReader(client) as reader:
        assert bytes_of(reader.acquire(space, keys, lease_s=30)) == contents(keys)


def test_a_lease_that_runs_out_holds_nothing_any_more(client: BlockingClient) -> None:
    space, keys = put(client)
    with device.DeviceReader(client) as reader:
        held = reader.acquire(space, keys, lease_s=0.3)
        assert held.lease.lease_s == 0.3
        until(lambda: client.drain("hbm").left == 0)
        with pytest.raises(StaleLease):
            reader.renew(held, 30)


def test_an_engine_outlives_its_node_and_maps_the_next_ones_memory(start: Callable[..., NodeProcess]) -> None:
    node = start()
    client = node.admin()
    space, keys = put(client)
    with client, device.DeviceReader(client) as reader:
        held = reader.acquire(space, keys, lease_s=30)
        node.kill()
        assert bytes_of(held) == contents(keys), "what is mapped stays mapped"
        with pytest.raises(TransportError):
            reader.acquire(space, keys, lease_s=30)
        node.start()
        put(client, seed=3)  # other blocks in slabs of the same numbers
        space, keys = put(client, seed=4)
        other = reader.acquire(space, keys, lease_s=30)
        assert bytes_of(other) == contents(keys)
        reader.release(held)
        assert bytes_of(other) == contents(keys)


def test_deleted_blocks_stay_with_who_holds_them_and_are_found_by_nobody(client: BlockingClient) -> None:
    space, keys = put(client)
    with device.DeviceReader(client) as reader:
        held = reader.acquire(space, keys, lease_s=30)
        assert client.evict(space, keys).blocks == 2 * BLOCKS
        assert reader.acquire(space, keys, lease_s=30) is None
        put(client, seed=5)
        assert bytes_of(held) == contents(keys)
        assert row(client, "hbm")["draining"] == BLOCKS


def test_the_tier_shrinks_and_grows_while_it_serves(client: BlockingClient) -> None:
    space, keys = put(client, blocks=3 * SLOTS)
    with device.DeviceReader(client) as reader:
        reader.release(reader.acquire(space, keys, lease_s=30))
        client.set_tier("hbm", capacity_bytes=1 << 20)
        until(lambda: row(client, "hbm")["capacity_bytes"] == 1 << 20)
        assert bytes_of(reader.acquire(space, keys, lease_s=0.1)) == contents(keys[:SLOTS])
        client.set_tier("hbm", capacity_bytes=4 << 20)
        until(lambda: row(client, "hbm")["capacity_bytes"] == 4 << 20)
        assert bytes_of(reader.acquire(space, keys, lease_s=30)) == contents(keys)
        with pytest.raises(InvalidRequest, match="no watermarks"):
            client.set_tier("hbm", high_watermark=0.5)


@pytest.mark.parametrize("tier", ["dram", "hbm"])
def test_in_idle_moments_slabs_are_emptied_and_nobody_reads_wrong_bytes(
    start: Callable[..., NodeProcess], tier: str
) -> None:
    """Only the first block of each chain is left in a tier of full slabs; they fit into one slab."""
    node = start("--tiers.dram.capacity=4MiB", "--tiers.dram.low_watermark=0.99", "--tiers.dram.high_watermark=1.0")
    with node.admin() as client, device.DeviceReader(client) as reader:
        kept = []
        space, keys = put(client, 0, blocks=SLOTS)
        for seed in range(4):
            space, keys = put(client, seed, blocks=SLOTS)
            reader.release(reader.acquire(space, keys, lease_s=30))
            kept.append(keys[0])
        assert row(client, tier)["slabs"] == {"cut": 4, "spare": 0}
        for seed in range(4):
            client.evict(space, space.keys([seed, *range(1, 4 * SLOTS)])[1:], tier)
        unverified = BlockingClient(node.unix, verify=False)
        theirs = unverified.find("engines")
        buffer = bytearray(SIZE)

        def are_gathered() -> bool:
            for key in kept:  # without a request and without a lease, as long as the index has it
                if unverified.get(theirs, [key], [buffer]) == 1:
                    assert bytes(buffer) == content(key, SIZE)
            pause(0.4)
            return bool(row(client, tier)["slabs"]["spare"])

        until(are_gathered)
        assert row(client, tier)["moved_blocks"] > 0
        for key in kept:
            assert bytes_of(reader.acquire(space, [key], lease_s=30)) == contents([key])
            assert unverified.get(theirs, [key], [buffer]) == 1
            assert bytes(buffer) == content(key, SIZE)
        unverified.close()


def test_requests_that_make_no_sense_are_refused(node: NodeProcess, client: BlockingClient) -> None:
    _, keys = put(client, blocks=2)
    packed = pack_keys(keys)
    with WireClient(node) as liar:
        number = liar.ask(wire.Open(liar.next(), "engines", None)).number
        for wrong in (
            {"tier": "gpu"}, {"tier": "dram"}, {"tier": "hbm", "deliver": True}, {"tier": "hbm", "layers": 1},
        ):  # fmt: skip
            assert code(liar.ask(wire.Acquire(liar.next(), number, packed, 1000, **wrong))) == "invalid_request", wrong
        lease = liar.ask(wire.Acquire(liar.next(), number, packed, 60_000, tier="hbm"))
        assert unpack_u64(lease.sizes) == (SIZE, SIZE)
        released = liar.ask(wire.Release(liar.next(), lease.lease_id, b"no event"))
        assert code(released) == "invalid_request"
        assert client.drain("hbm").left == 2, "its last use is not known, so it is still held"
        assert isinstance(liar.ask(wire.Release(liar.next(), lease.lease_id)), wire.Done)
    with WireClient(node, tcp=True) as remote:
        number = remote.ask(wire.Open(remote.next(), "engines", None)).number
        assert code(remote.ask(wire.Acquire(remote.next(), number, packed, 1000, tier="hbm"))) == "invalid_request"
    with BlockingClient(node.tcp, node.token) as remote_client:
        remote_space = remote_client.find("engines")
        with pytest.raises(InvalidRequest):
            device.DeviceReader(remote_client).acquire(remote_space, keys, lease_s=1)


def test_a_node_without_the_tier_says_so(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path).start()
    with node.admin() as client:
        space, keys = put(client)
        with pytest.raises(InvalidRequest, match="no tier 'hbm'"):
            device.DeviceReader(client).acquire(space, keys, lease_s=1)
        with pytest.raises(InvalidRequest, match="no tier 'hbm'"):
            Door(node.path, client.connect().ticket).attach([1], "hbm", PATIENCE_S)
    node.stop()


def test_slabs_of_a_gpu_come_as_handles_to_those_who_may_see_its_pool(live_node: Callable[..., LiveNode]) -> None:
    """As on a GPU: `export` gives handles, and refuses where the pool is not the tenant's alone."""
    node = live_node({"tiers.hbm.device": "cpu", "tiers.hbm.capacity": "32MiB"})
    hbm = node.call(lambda: node.node.store.lifting.hbm)
    hbm.export = lambda slab_id: b"handle of %d" % slab_id * 40
    with BlockingClient(f"unix://{node.config.node.unix_socket}") as client:
        space, keys = put(client)
        lease = client.run(
            lambda link: leases.acquire_on_device(link, space, keys, lease_s=30, patience=Patience(0, 0))
        )
        slab_ids = [lease.places[0][0]] * 40  # several messages
        found = client.run(lambda link: leases.device_slabs(link, lease, slab_ids))
        assert found == [b"handle of %d" % slab_id * 40 for slab_id in slab_ids]
        hbm.may_export = lambda *, to_writer: False
        with pytest.raises(Forbidden, match="the whole pool"):
            client.run(lambda link: leases.device_slabs(link, lease, slab_ids))
        with pytest.raises(Forbidden, match="the whole pool"):
            device.DeviceReader(client).acquire(space, keys, lease_s=30)
        client.release(lease)


def test_a_tier_smaller_than_a_slab_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a slab must fit into the tier: tiers\.dram\.slab is"):
        load(None, {"HOME": "/tmp"}, ["--tiers.hbm.device=cpu", "--tiers.hbm.capacity=1MiB"])


@pytest.mark.parametrize("name", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    config = load(None, {"HOME": "/tmp"}, [f"--tiers.hbm.device={name}"])
    with pytest.raises(ConfigError, match=r"tiers\.hbm\.device"):
        make_store(config, 1, [Tenant("red")], lambda _: None)
