"""What fails over RDMA, by the software double: late, cancelled, lost or hostile, it ends in right bytes or in none."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from engine_client.blocking import BlockingClient
from engine_client.client import Client
from engine_client.steps import Begin, Call, Finish, Link, OpenSpace, Operation, Pull
from kvstore import wire
from kvstore.copier import address_of, checksum
from kvstore.errors import (
    ConnectFailed,
    Corrupt,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    PeerLost,
    ProtocolError,
    StaleLease,
    StoreError,
    TransportError,
)
from kvstore.packed import pack_keys, pack_u64, unpack_u64
from kvstore.prefix import Namespace
from kvstore.transport.rdma.nic import Options
from kvstore.transport.rdma.transfer import Fetch
from kvstore.transport.rdma.verbs import STATUSES
from kvstore.types import BlockKey
from kvstore.wire_rdma import PathEnds, QueueEnd, RdmaPort
from tests.conftest import LiveNode
from tests.soft_verbs import SoftFabric, SoftVerbs
from tests.system.nodes import free_port, until

BLOCK = 256 << 10
NAMESPACE = Namespace(model="m", dtype="float16", layout="flat", block_tokens=16, layers=1)
RETRY_EXC = STATUSES.index("RETRY_EXC_ERR")
TWO = ("soft0", "soft1")
PATIENT = Options(hung_s=30.0, slice_bytes=BLOCK)  # what is held back stays in flight; a READ for each block
RED, BLUE, READER = (f"{name}-token-of-this-tenant" for name in ("red", "blue", "reader"))
TENANTS = {
    "node.unix_tenant": "",
    "tenants.0.name": "red", "tenants.0.token": RED,
    "tenants.1.name": "blue", "tenants.1.token": BLUE,
    "tenants.2.name": "reader", "tenants.2.token": READER, "tenants.2.may_write": "false",
}  # fmt: skip


class Cluster:
    """A node with RDMA, and hosts on the same fabric that clients come from."""

    def __init__(self, folder: Path, devices: Sequence[str], settings: dict[str, str]) -> None:
        self.fabric = SoftFabric()
        self._folder = folder
        self._devices = devices
        self._settings = {"node.tcp_listen": f"127.0.0.1:{free_port()}", "rdma.slice": "256KiB"} | settings
        self.start()

    def start(self) -> None:
        """At the same address as before."""
        self.verbs = SoftVerbs(self.fabric, self._devices)
        self.node = LiveNode(self._folder, self._settings, self.verbs)
        self.store = self.node.node.store
        self.rdma = self.node.node.rdma

    def host(self) -> SoftVerbs:
        return SoftVerbs(self.fabric, self._devices)

    @property
    def address(self) -> str:
        return f"tcp://{self._settings['node.tcp_listen']}"

    def token(self) -> str:
        return RED if "tenants.0.name" in self._settings else self.node.token

    def client(self, host: SoftVerbs | None = None, token: str = "", **named: Any) -> BlockingClient:
        options = {
            "transport": "rdma",
            "rdma": Options(hung_s=0.2, slice_bytes=BLOCK),
            "verbs": host or self.host(),
        } | named
        return BlockingClient(self.address, token or self.token(), **options)

    def async_client(self, host: SoftVerbs | None = None, **named: Any) -> Client:
        options = {"transport": "rdma", "rdma": PATIENT, "verbs": host or self.host()} | named
        return Client(self.address, self.token(), **options)

    def cut(self, host: SoftVerbs, device: str = "soft0") -> None:
        self.fabric.cut(host.gid(device), self.verbs.gid(device))

    def at_read(self, number: int, happens: Callable[[], object]) -> None:
        """`happens` when it is the turn of READ `number` from now on, counted from 1."""
        self.fabric.before_reads[self.fabric.counts["reads"] + number] = happens  # type: ignore[assignment]

    def fail_reads(self, times: int) -> None:
        """So many READs fail in a row as if the peer did not answer, from the next on."""

        def fail(left: int) -> None:
            self.fabric.failing.append(RETRY_EXC)
            if left > 1:
                self.at_read(1, partial(fail, left - 1))

        self.at_read(1, partial(fail, times))

    def hang_up(self) -> None:
        """Every TCP connection of the node breaks."""
        self.node.call(lambda: [one._transport.abort() for one in self.node.node._connections if one._transport])

    @contextmanager
    def hung(self) -> Iterator[None]:
        """The node does nothing meanwhile."""
        go_on = threading.Event()
        self.node.loop.call_soon_threadsafe(go_on.wait, 30.0)
        try:
            yield
        finally:
            go_on.set()

    def holds(self) -> list[Any]:
        return list(self.node.call(lambda: [*self.store.own.held(), *self.store.holds.held()]))

    def stop(self) -> None:
        """Nothing is held, in quarantine, registered or open any more."""
        self.node.wait_until(lambda: not (self.rdma.peers or self.node.node._connections))
        self.node.wait_until(lambda: not list(self.store.own.held()) and not list(self.store.holds.held()))
        self.node.stop()
        assert self.fabric.registered_bytes == 0
        assert not self.fabric.pairs


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts one: `cluster(TWO, **settings)`. At the end there are no more descriptors than before."""
    clusters: list[Cluster] = []

    def start(devices: Sequence[str] = ("soft0",), settings: dict[str, str] | None = None) -> Cluster:
        clusters.append(Cluster(tmp_path / str(len(clusters)), devices, settings or {}))
        return clusters[-1]

    uvloop.run(asyncio.sleep(0))  # the first loop of a process opens what the others share
    before = set(os.listdir("/proc/self/fd"))
    yield start
    for one in clusters:
        one.stop()
    gc.collect()  # errors that a test has caught have the views of where they came from
    left = {name: link(name) for name in os.listdir("/proc/self/fd") if name not in before}
    assert not [name for name in left.values() if name], left


def link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # of the listing itself
        return ""


def fill(size: int = BLOCK, count: int = 1) -> list[bytes]:
    return [os.urandom(size) for _ in range(count)]


def targets_of(blocks: Sequence[bytes]) -> list[bytearray]:
    return [bytearray(len(block)) for block in blocks]


def stored(client: BlockingClient, count: int, size: int = BLOCK, first: int = 0) -> tuple[OpenSpace, Any, list[bytes]]:
    space = client.open("s", NAMESPACE)
    keys = space.keys([first, *range(16 * count - 1)])
    blocks = fill(size, count)
    assert client.put(space, keys, blocks).stored == count
    return space, keys, blocks


def assert_got(client: BlockingClient, space: OpenSpace, keys: Sequence[BlockKey], blocks: list[bytes]) -> None:
    targets = targets_of(blocks)
    assert client.get(space, keys, targets) == len(keys)
    assert targets == [bytearray(block) for block in blocks]


def ask(client: BlockingClient, request: Callable[[int], wire.Message]) -> Any:
    """Say to the node whatever a test wants said."""

    def saying(_: Link) -> Operation[Any]:
        return (yield Call(request))

    return client.run(saying)


@contextmanager
def elsewhere(work: Callable[[], Any]) -> Iterator["Future[Any]"]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)


def remote_of(client: Any) -> Any:
    link = client._link if isinstance(client, BlockingClient) else client._current[0]
    assert link is not None
    return link.remote


# Bytes that are wrong.


def test_a_bit_that_flips_in_a_get_ends_it_before_that_block_and_the_node_is_told(cluster) -> None:
    here = cluster()
    with here.client(rdma=Options(queue_pairs=1, slice_bytes=BLOCK)) as client:
        space, keys, blocks = stored(client, 6)
        here.fabric.flipped_reads = {here.fabric.counts["reads"] + 4}
        targets = targets_of(blocks)
        asked = here.store.counters.requests["report"]
        assert client.get(space, keys, targets) == 3
        assert targets[:3] == [bytearray(block) for block in blocks[:3]]
        assert here.store.counters.requests["report"] == asked + 1
        assert_got(client, space, keys, blocks)  # the node has looked: its own bytes are right


def test_a_bit_that_flips_in_a_put_is_refused_and_the_slots_are_free(cluster) -> None:
    here = cluster()
    with here.client() as client:
        space = client.open("s", NAMESPACE)
        keys = space.keys(range(48))
        here.fabric.flipped_reads = {2}
        with pytest.raises(Corrupt):
            client.put(space, keys, fill(count=3))
        assert here.store.counters.corrupt_blocks == 1
        assert here.node.used_bytes == 0
        assert here.holds() == []
        assert client.match(space, keys) == 0
        assert client.put(space, keys, fill(count=3)).stored == 3


# Memory that is not lent any more.


@pytest.mark.parametrize("read", [1, 3])
def test_a_slab_that_is_deregistered_under_a_get_is_asked_for_anew(cluster, read: int) -> None:
    here = cluster()
    with here.client() as client:
        space, keys, blocks = stored(client, 6)
        assert_got(client, space, keys, blocks)
        slab_id, slab = next(iter(remote_of(client).slabs.items()))
        here.at_read(read, lambda: here.rdma.dropped(slab_id))
        counted = here.fabric.counts["reads"]
        assert_got(client, space, keys, blocks)
        assert remote_of(client).slabs[slab_id].rkeys != slab.rkeys
        assert here.fabric.counts["reads"] >= counted + 6


def test_other_gets_under_way_come_through_when_a_slab_is_deregistered(cluster) -> None:
    async def run(here: Cluster) -> None:
        async with here.async_client() as client:
            space = await client.open("s", NAMESPACE)
            chains = [space.keys([chain, *range(63)]) for chain in range(8)]
            blocks = [fill(count=4) for _ in chains]
            for chain, its in zip(chains, blocks, strict=True):
                await client.put(space, chain, its)
            await client.get(space, chains[0], targets_of(blocks[0]))
            slab_id = next(iter(remote_of(client).slabs))
            here.at_read(9, lambda: here.rdma.dropped(slab_id))
            targets = [targets_of(its) for its in blocks]
            assert await asyncio.gather(*(map(partial(client.get, space), chains, targets))) == [4] * 8
            assert targets == [[bytearray(block) for block in its] for its in blocks]

    asyncio.run(run(cluster()))


def test_a_slab_that_was_dropped_and_another_made_gives_new_bytes_or_a_miss(cluster) -> None:
    here = cluster()
    with here.client() as client:
        space, keys, blocks = stored(client, 60)
        assert_got(client, space, keys, blocks)
        known = set(remote_of(client).slabs)
        client.evict(space)
        client.set_tier("dram", capacity_bytes=8 << 20)
        here.node.wait_until(lambda: len(here.store.table.tiers["dram"].pool.slabs) <= 1)
        client.set_tier("dram", capacity_bytes=32 << 20)
        here.node.wait_until(lambda: len(here.store.table.tiers["dram"].pool.slabs) == 4)
        assert client.get(space, keys, targets_of(blocks)) == 0
        assert_got(client, *stored(client, 60))
        assert set(remote_of(client).slabs) - known


def test_a_node_that_was_started_again_has_a_miss_and_then_new_bytes(cluster) -> None:
    here = cluster()
    with here.client() as client:
        space, keys, blocks = stored(client, 4)
        here.node.stop()
        here.start()
        with suppress(TransportError):
            client.get(space, keys, targets_of(blocks))
        until(lambda: answers(client, space, keys))
        assert client.get(space, keys, targets_of(blocks)) == 0
        assert_got(client, *stored(client, 4))


def answers(client: BlockingClient, space: OpenSpace, keys: Sequence[BlockKey]) -> bool:
    try:
        client.match(space, keys)
    except TransportError:
        return False
    return True


# Paths.


def test_a_path_that_fails_in_the_middle_of_a_get_is_connected_anew(cluster) -> None:
    here = cluster()
    with here.client() as client:
        space, keys, blocks = stored(client, 8)
        here.at_read(4, lambda: here.fabric.failing.append(RETRY_EXC))
        delivered = here.fabric.counts["sends"]
        assert_got(client, space, keys, blocks)
        (path,) = remote_of(client).peer.paths.paths
        assert path.connects == 2
        assert here.fabric.counts["sends"] - delivered < 20, "it went by the channel"


def test_of_two_paths_the_other_takes_over(cluster) -> None:
    here, number = cluster(TWO), iter(range(9))
    host = here.host()
    with here.client(host) as client:
        space, keys, blocks = stored(client, 8)
        paths = remote_of(client).peer.paths.paths
        assert len(paths) == 2
        here.cut(host, "soft1")
        started = time.monotonic()
        assert_got(client, space, keys, blocks)
        assert time.monotonic() - started < 2.0
        assert not paths[1].is_up
        here.fabric.heal()
        client.get(space, keys, targets_of(blocks))
        remote_of(client).peer.paths._now = lambda: time.monotonic() + 60.0 + next(number)
        client.get(space, keys, targets_of(blocks))
        assert paths[1].is_up
    assert here.fabric.counts["reads"]


def test_a_path_that_stays_down_rests_meanwhile_all_goes_by_the_channel(cluster) -> None:
    here = cluster()
    with here.client() as client:
        space, keys, blocks = stored(client, 4)
        (path,) = remote_of(client).peer.paths.paths
        here.fail_reads(100)
        assert_got(client, space, keys, blocks)
        assert not path.health.is_well
        connects, failures = path.connects, path.health.failures
        for _ in range(3):
            assert_got(client, space, keys, blocks)
        assert (path.connects, path.health.failures) == (connects, failures)
        here.fabric.before_reads.clear()
        remote_of(client).peer.paths._now = lambda: time.monotonic() + 120.0
        read = here.fabric.counts["reads"]
        assert_got(client, space, keys, blocks)
        assert here.fabric.counts["reads"] == read + 4
        assert path.health.is_well


def test_a_read_that_is_never_answered_does_not_keep_a_get(cluster) -> None:
    here = cluster(TWO)
    host = here.host()
    with here.client(host, transport="rdma") as client:
        space, keys, blocks = stored(client, 8)
        here.at_read(2, lambda: here.cut(host, "soft1"))
        assert_got(client, space, keys, blocks)


def test_paths_that_fail_at_the_node_in_a_put_are_connected_anew(cluster) -> None:
    here = cluster()
    with here.client() as client:
        space = client.open("s", NAMESPACE)
        keys, blocks = space.keys(range(64)), fill(count=4)
        here.fail_reads(1)
        assert client.put(space, keys, blocks).stored == 4
        (path,) = remote_of(client).peer.paths.paths
        assert path.connects == 2
        assert_got(client, space, keys, blocks)


def test_a_put_goes_by_the_channel_when_the_node_cannot_read(cluster) -> None:
    here = cluster()
    with here.client() as client:
        space = client.open("s", NAMESPACE)
        keys, blocks = space.keys(range(64)), fill(count=4)
        here.fail_reads(100)
        assert client.put(space, keys, blocks).stored == 4
        here.fabric.before_reads.clear()
        assert_got(client, space, keys, blocks)


def test_bytes_of_a_try_that_failed_do_not_land_after_the_next_has_ended(cluster) -> None:
    """One path refuses while READs of the same blocks wait on the other: those may write until they have settled."""
    here = cluster(TWO)
    host = here.host()
    with here.client(host, rdma=Options(hung_s=0.3, queue_pairs=1, slice_bytes=64 << 10)) as client:
        space, keys, blocks = stored(client, 8)
        target = bytearray(8 * BLOCK)
        registered = client.register(target)
        views = [memoryview(target)[at * BLOCK : (at + 1) * BLOCK] for at in range(8)]
        assert client.get(space, keys, views) == 8
        slab_id = next(iter(remote_of(client).slabs))
        here.cut(host, "soft1")
        here.at_read(3, lambda: here.rdma.dropped(slab_id))
        assert client.get(space, keys, views) == 8
        assert registered.is_quiet
        assert target == b"".join(blocks)
        here.fabric.heal()
        assert target == b"".join(blocks)
        registered.close()


def test_nor_do_they_in_an_event_loop(cluster) -> None:
    async def run(here: Cluster) -> None:
        host = here.host()
        options = Options(hung_s=0.3, queue_pairs=1, slice_bytes=64 << 10)
        async with here.async_client(host, rdma=options) as client:
            space = await client.open("s", NAMESPACE)
            keys, blocks = space.keys(range(128)), fill(count=8)
            await client.put(space, keys, blocks)
            target = bytearray(8 * BLOCK)
            registered = client.register(target)
            views = [memoryview(target)[at * BLOCK : (at + 1) * BLOCK] for at in range(8)]
            assert await client.get(space, keys, views) == 8
            slab_id = next(iter(remote_of(client).slabs))
            here.cut(host, "soft1")
            here.at_read(3, lambda: here.rdma.dropped(slab_id))
            assert await client.get(space, keys, views) == 8
            assert registered.is_quiet
            assert target == b"".join(blocks)
            registered.close()

    asyncio.run(run(cluster(TWO)))


def test_a_device_that_vanishes_ends_a_call_in_time(cluster) -> None:
    here = cluster(TWO)
    one = SoftVerbs(here.fabric, TWO)
    with here.client(one, rdma=Options(devices=("soft0",))) as client:
        space, keys, blocks = stored(client, 4)
        one.vanish()
        started = time.monotonic()
        with pytest.raises(TransportError):
            client.get(space, keys, targets_of(blocks))
        assert time.monotonic() - started < 6.0


# Connections.


def test_a_channel_that_fails_ends_the_connection_and_the_next_is_made(cluster) -> None:
    here = cluster()
    with here.client() as client:
        space, keys, blocks = stored(client, 4)
        here.fabric.failing.append(RETRY_EXC)
        with pytest.raises(TransportError):
            client.match(space, keys)
        assert_got(client, space, keys, blocks)


def test_a_lifeline_that_is_cut_ends_the_connection_and_the_next_is_made(cluster) -> None:
    here = cluster()
    with here.client() as client:
        space, keys, blocks = stored(client, 4)
        here.hang_up()
        here.node.wait_until(lambda: not here.rdma.peers)
        assert_got(client, space, keys, blocks)


def test_a_lifeline_that_is_cut_in_the_middle_of_a_get_ends_it_at_once(cluster) -> None:
    here = cluster()
    host = here.host()
    with here.client(host, rdma=PATIENT) as client:
        space, keys, blocks = stored(client, 4)
        held = threading.Event()
        here.at_read(2, lambda: (here.cut(host), held.set()))
        with elsewhere(lambda: client.get(space, keys, targets_of(blocks))) as getting:
            assert held.wait(5.0)
            started = time.monotonic()
            here.hang_up()
            with pytest.raises(PeerLost):
                getting.result(5.0)
            assert time.monotonic() - started < 1.0
        here.fabric.heal()
        assert_got(client, space, keys, blocks)


@pytest.mark.parametrize("read", [1, 3])
def test_a_node_that_is_killed_under_a_get_ends_it(cluster, read: int) -> None:
    here = cluster()
    with here.client(transport="auto") as client:
        space, keys, blocks = stored(client, 4)
        killed = threading.Event()
        here.at_read(read, lambda: (here.verbs.kill(), killed.set()))
        with elsewhere(lambda: client.get(space, keys, targets_of(blocks))) as getting:
            assert killed.wait(5.0)
            here.hang_up()
            with pytest.raises(TransportError):
                getting.result(5.0)


def test_a_node_that_hangs_costs_a_call_its_time_limit_and_no_more(cluster) -> None:
    here = cluster()
    with here.client() as client:
        space, keys, blocks = stored(client, 4)
        with here.hung():
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                client.get(space, keys, targets_of(blocks), within_s=0.5)
            assert 0.4 < time.monotonic() - started < 1.0
        until(lambda: answers(client, space, keys))
        assert_got(client, space, keys, blocks)


@pytest.mark.parametrize("what", ["node", "client"])
def test_rdma_that_cannot_be_joined_gives_way_to_tcp_in_the_same_call(cluster, what: str) -> None:
    here = cluster()
    for transport in ("auto", "rdma"):
        with here.client(transport=transport) as client:
            host = client._rdma._opened.nics[0].context.verbs  # type: ignore[union-attr]
            if what == "node":
                make = here.rdma.peer
                here.rdma.peer = refused  # type: ignore[method-assign]
            else:
                here.cut(host)
                make = here.rdma.peer
                here.fabric.refused_registrations = 1
            if transport == "rdma":
                with pytest.raises(ConnectFailed):
                    client.connect()
            else:
                client.connect()
                assert client._link is not None
                assert client._link.remote is None
            here.rdma.peer = make  # type: ignore[method-assign]
            here.fabric.refused_registrations = 0
            here.fabric.heal()


def refused(tenant: str, guest: Any) -> Any:
    raise TransportError(f"no queue pair for {tenant}")


def test_after_a_rest_an_idle_tcp_connection_comes_back_to_rdma(cluster) -> None:
    here = cluster()
    with here.client(transport="auto") as client:
        here.fabric.refused_registrations = 1
        space, keys, blocks = stored(client, 4)
        assert remote_of(client) is None
        assert client._rdma is not None
        assert_got(client, space, keys, blocks)
        assert here.fabric.counts["reads"] == 0
        client._rdma.health._resume_at = 0.0
        assert_got(client, space, keys, blocks)
        assert remote_of(client) is not None
        assert here.fabric.counts["reads"] == 4


def test_a_node_stops_while_clients_are_connected(cluster) -> None:
    here = cluster()
    with here.client() as client, here.client() as other:
        stored(client, 2)
        stored(other, 2, first=1)
        here.node.stop()
    here.start()


# Calls that end before their READs.


def test_a_late_get_leaves_its_buffer_quiet_and_its_pieces_free(cluster) -> None:
    here = cluster()
    host = here.host()
    with here.client(host, rdma=PATIENT) as client:
        space, keys, blocks = stored(client, 4)
        buffer = bytearray(2 * BLOCK)
        registered = client.register(buffer)
        views = [memoryview(buffer)[:BLOCK], memoryview(buffer)[BLOCK:], *targets_of(blocks[2:])]
        here.at_read(1, lambda: here.cut(host))
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.get(space, keys, views, within_s=0.3)
        assert time.monotonic() - started < 0.6
        assert registered.is_quiet
        assert client._rdma is not None
        assert client._rdma.staging.taken_bytes == 0
        here.fabric.heal()
        assert buffer == bytes(2 * BLOCK), "a NIC wrote into it after all"
        until(lambda: answers(client, space, keys))
        assert_got(client, space, keys, blocks)


def test_a_cancelled_get_returns_at_once_and_its_memory_stays_out_of_use(cluster) -> None:
    async def run(here: Cluster) -> None:
        host = here.host()
        async with here.async_client(host) as client:
            space = await client.open("s", NAMESPACE)
            keys, blocks = space.keys(range(64)), fill(count=4)
            await client.put(space, keys, blocks)
            buffer = bytearray(2 * BLOCK)
            registered = client.register(buffer)
            views = [memoryview(buffer)[:BLOCK], memoryview(buffer)[BLOCK:], *targets_of(blocks[2:])]
            held = asyncio.Event()
            here.at_read(1, lambda: (here.cut(host), held.set()))
            getting = asyncio.create_task(client.get(space, keys, views))
            await held.wait()
            getting.cancel()
            started = time.perf_counter()
            with pytest.raises(asyncio.CancelledError):
                await getting
            assert time.perf_counter() - started < 0.1
            assert not registered.is_quiet
            with pytest.raises(InvalidRequest):
                registered.close()
            rdma = client._rdma
            assert rdma is not None
            taken = rdma.staging.taken_bytes
            assert taken == 2 * BLOCK
            assert remote_of(client).peer.paths.quarantined_bytes == 4 * BLOCK
            piece = rdma.staging.take(BLOCK)
            assert piece is not None
            rdma.staging.view(piece, BLOCK)[:] = b"\x55" * BLOCK
            here.fabric.heal()  # the READs arrive after all
            await until_quiet(lambda: registered.is_quiet and rdma.staging.taken_bytes == BLOCK)
            assert rdma.staging.view(piece, BLOCK) == b"\x55" * BLOCK
            rdma.staging.give_back(piece, BLOCK)
            targets = targets_of(blocks)
            assert await client.get(space, keys, targets) == 4
            assert targets == [bytearray(block) for block in blocks]
            registered.close()

    asyncio.run(run(cluster()))


async def until_quiet(is_so: Callable[[], bool]) -> None:
    loop, turn = asyncio.get_running_loop(), asyncio.Event()
    async with asyncio.timeout(10.0):
        while not is_so():
            loop.call_later(0.001, turn.set)
            await turn.wait()
            turn.clear()


def test_a_thousand_cancelled_gets_leave_nothing_behind(cluster) -> None:
    async def run(here: Cluster) -> list[float]:
        host = here.host()
        took_s = []
        async with here.async_client(host) as client:
            space = await client.open("s", NAMESPACE)
            keys, blocks = space.keys(range(64)), fill(count=4)
            await client.put(space, keys, blocks)
            targets = targets_of(blocks)
            for number in range(1000):
                held = asyncio.Event()
                here.at_read(1 + number % 4, lambda held=held: (here.cut(host), held.set()))
                getting = asyncio.create_task(client.get(space, keys, targets))
                await held.wait()
                getting.cancel()
                started = time.perf_counter()
                with pytest.raises(asyncio.CancelledError):
                    await getting
                took_s.append(time.perf_counter() - started)
                here.fabric.heal()
            rdma = client._rdma
            assert rdma is not None
            await until_quiet(lambda: rdma.staging.taken_bytes == 0)
            paths = remote_of(client).peer.paths
            assert (paths.quarantined_bytes, paths.is_idle, here.fabric.completions_waiting) == (0, True, 0)
            assert await client.get(space, keys, targets) == 4
            assert targets == [bytearray(block) for block in blocks]
            await until_quiet(lambda: not here.holds())
        return took_s

    here = cluster()
    took_s = sorted(asyncio.run(run(here)))
    assert took_s[len(took_s) // 2] < 1e-3, took_s[len(took_s) // 2]
    assert here.node.problems() == []


def test_a_client_that_closes_with_gets_under_way_leaves_nothing(cluster) -> None:
    async def run(here: Cluster) -> None:
        host = here.host()
        client = here.async_client(host)
        space = await client.open("s", NAMESPACE)
        keys, blocks = space.keys(range(64)), fill(count=4)
        await client.put(space, keys, blocks)
        buffer = bytearray(4 * BLOCK)
        registered = client.register(buffer)
        views = [memoryview(buffer)[at * BLOCK : (at + 1) * BLOCK] for at in range(4)]
        held = asyncio.Event()
        here.at_read(2, lambda: (here.cut(host), held.set()))
        getting = asyncio.create_task(client.get(space, keys, views))
        await held.wait()
        await client.aclose()
        with pytest.raises(StoreError):
            await getting
        assert registered.is_quiet
        registered.close()

    asyncio.run(run(cluster()))


# Puts.


def offering(
    here: Cluster, client: BlockingClient, keys: Sequence[BlockKey], blocks: list[bytes], space: OpenSpace
) -> Any:
    placed = ask(client, lambda number: wire.Put(number, space.number, pack_keys(keys), b"", sizes_of(blocks)))
    assert placed.grant_id
    return placed


def sizes_of(blocks: Sequence[Any]) -> bytes:
    return pack_u64([len(block) for block in blocks])


class Source:
    """Registered memory of a client with blocks to offer."""

    def __init__(self, client: BlockingClient, blocks: Sequence[bytes]) -> None:
        self.buffer = bytearray(b"".join(blocks))
        self.registered = client.register(self.buffer)
        memory = self.registered.memory
        assert memory is not None
        start = address_of(memoryview(self.buffer))
        self.addresses = [start + at * BLOCK for at in range(len(blocks))]
        self.rkeys = list(memory.rkeys) * len(blocks)
        self.checksums = [checksum(block) for block in blocks]

    def offer(self, grant_id: int, **changed: list[int]) -> Callable[[int], wire.Message]:
        said = {"checksums": self.checksums, "addresses": self.addresses, "rkeys": self.rkeys} | changed
        packed = {name: pack_u64(values) for name, values in said.items()}
        return lambda number: wire.Offer(number, grant_id, **packed)


def test_slots_of_a_client_that_dies_in_the_middle_of_an_offer_are_free_once_no_nic_writes(cluster) -> None:
    here = cluster()
    host = here.host()
    here.node.call(lambda: setattr(here.rdma, "options", PATIENT))
    client = here.client(host)
    space = client.open("s", NAMESPACE)
    keys, blocks = space.keys(range(64)), fill(count=4)
    held = threading.Event()
    here.at_read(2, lambda: (here.cut(host), held.set()))
    with elsewhere(lambda: client.put(space, keys, blocks)) as putting:
        assert held.wait(5.0)
        assert len(here.node.call(lambda: list(here.store.own.held()))) == 4
        assert here.node.used_bytes >= 4 * BLOCK
        host.kill()
        here.hang_up()
        with pytest.raises(TransportError):
            putting.result(5.0)
    here.node.wait_until(lambda: not list(here.store.own.held()))
    assert here.node.used_bytes == 0
    client.close()


def test_a_slot_that_a_nic_may_still_write_into_is_given_to_nobody(cluster) -> None:
    """The offer is aborted while READs wait: what they bring later lands in no other block."""
    full = {"tiers.dram.low_watermark": "0.99", "tiers.dram.high_watermark": "1.0"}
    here = cluster(TWO, {"tiers.dram.capacity": "8MiB", "tiers.dram.slab": "8MiB"} | full)
    here.node.call(lambda: setattr(here.rdma, "options", Options(hung_s=30.0, queue_pairs=1, slice_bytes=BLOCK)))
    host = here.host()
    with here.client(host, rdma=PATIENT) as client, here.client() as other:
        space, blocks = client.open("s", NAMESPACE), fill(count=8)
        keys = space.keys(range(128))
        grant = offering(here, client, keys, blocks, space)
        source = Source(client, blocks)
        here.cut(host, "soft1")
        theirs = other.open("other", NAMESPACE)
        chain, mine = theirs.keys([7, *range(16 * 24 - 1)]), fill(count=24)

        def given_up(_: Link) -> Operation[None]:
            offered = yield Begin(Call(source.offer(grant.grant_id)))
            until(lambda: any(pair.posted for pair in list(here.fabric.pairs.values())))
            yield Call(lambda number: wire.Abort(number, grant.grant_id))
            assert len(here.node.call(lambda: list(here.store.own.held()))) == 8
            assert other.put(theirs, chain, mine).stored == 24
            assert other.put(theirs, theirs.keys([8, *range(127)]), fill(count=8)).stored == 8  # in place of others
            source.buffer[:] = b"\xdb" * len(source.buffer)
            here.fabric.heal()
            with pytest.raises(StaleLease):
                yield Finish(offered)

        client.run(given_up)
        here.node.wait_until(lambda: not list(here.store.own.held()))
        targets = targets_of(mine)
        got = other.get(theirs, chain, targets)
        assert targets[:got] == [bytearray(block) for block in mine[:got]]
        assert here.store.counters.corrupt_blocks == 0
        source.registered.close()


def test_an_offer_that_ran_out_of_time_is_given_up_and_not_taken_again(cluster) -> None:
    """READs may be under way still: another payload for the same slots would be mixed with what they bring."""
    here = cluster(TWO, {"limits.put_timeout": "1s"})
    here.node.call(lambda: setattr(here.rdma, "options", PATIENT))
    host = here.host()
    with here.client(host, rdma=PATIENT) as client:
        space, blocks = client.open("s", NAMESPACE), fill(count=8)
        keys = space.keys(range(128))
        grant = offering(here, client, keys, blocks, space)
        source = Source(client, blocks)
        here.cut(host, "soft1")
        with pytest.raises((DeadlineExceeded, StaleLease)):
            ask(client, source.offer(grant.grant_id))
        here.node.wait_until(lambda: not here.store.holds.held() or not list(here.store.holds.held()))
        with pytest.raises(StaleLease):
            ask(client, source.offer(grant.grant_id))
        assert len(here.node.call(lambda: list(here.store.own.held()))) == 8
        here.fabric.heal()
        here.node.wait_until(lambda: not list(here.store.own.held()))
        assert client.match(space, keys) == 0
        source.registered.close()


def test_an_offer_that_makes_no_sense_is_refused_and_the_grant_is_as_before(cluster) -> None:
    here = cluster()
    with here.client() as client, here.client() as other:
        space, blocks = client.open("s", NAMESPACE), fill(count=4)
        keys = space.keys(range(64))
        grant = offering(here, client, keys, blocks, space)
        source = Source(client, blocks)
        for changed in (
            {"addresses": source.addresses[:3]},
            {"rkeys": source.rkeys * 2},
            {"checksums": source.checksums[:3]},
            {"checksums": source.checksums[:3], "addresses": source.addresses[:3], "rkeys": source.rkeys[:3]},
            {"checksums": [], "addresses": [], "rkeys": []},
            {"rkeys": [1 << 40] * 4},
            {"addresses": [(1 << 64) - 1] * 4},
        ):
            with pytest.raises(InvalidRequest):
                ask(client, source.offer(grant.grant_id, **changed))
        with pytest.raises(StaleLease):
            ask(other, source.offer(grant.grant_id))
        ask(client, source.offer(grant.grant_id))
        with pytest.raises(StaleLease):
            ask(client, source.offer(grant.grant_id))
        assert_got(other, other.open("s", NAMESPACE), keys, blocks)
        source.registered.close()


@pytest.mark.parametrize("what", ["rkeys", "addresses"])
def test_an_offer_of_memory_that_is_not_there_is_given_up(cluster, what: str) -> None:
    here = cluster()
    with here.client() as client:
        space, blocks = client.open("s", NAMESPACE), fill(count=4)
        source = Source(client, blocks)
        grant = offering(here, client, space.keys(range(64)), blocks, space)
        with pytest.raises(StaleLease):
            ask(client, source.offer(grant.grant_id, **{what: [64] * 4}))
        assert here.holds() == []
        assert here.node.used_bytes == 0
        assert_got(client, *stored(client, 4, first=9))  # over paths that were connected anew
        source.registered.close()


def test_a_second_offer_meanwhile_is_refused_and_the_first_comes_in(cluster) -> None:
    here = cluster(TWO)
    here.node.call(lambda: setattr(here.rdma, "options", PATIENT))
    host = here.host()
    with here.client(host, rdma=PATIENT) as client:
        space, blocks = client.open("s", NAMESPACE), fill(count=8)
        keys = space.keys(range(128))
        grant = offering(here, client, keys, blocks, space)
        source = Source(client, blocks)
        here.cut(host, "soft1")

        def twice(_: Link) -> Operation[None]:
            first = yield Begin(Call(source.offer(grant.grant_id)))
            with pytest.raises(InvalidRequest):
                yield Call(source.offer(grant.grant_id))
            here.fabric.heal()
            yield Finish(first)

        client.run(twice)
        assert_got(client, space, keys, blocks)
        source.registered.close()


# Hostile clients.


def test_a_slab_of_another_tenant_cannot_be_read_by_its_real_key(cluster) -> None:
    here = cluster(settings=TENANTS)
    with here.client(token=RED) as red, here.client(token=BLUE) as blue:
        space, keys, blocks = stored(blue, 4)
        assert_got(blue, space, keys, blocks)
        slab_id, slab = next(iter(remote_of(blue).slabs.items()))
        stored(red, 4)
        target = bytearray(BLOCK)
        registered = red.register(target)
        assert registered.memory is not None
        fetch = Fetch(registered.memory.address, registered.memory.lkeys, slab.address, slab.rkeys, BLOCK)
        with pytest.raises(StaleLease):
            red.run(lambda _: pulling([fetch]))
        assert target == bytes(BLOCK)
        lent = ask(red, lambda number: wire.Lend(number, pack_u64([slab_id, 10**6])))
        assert unpack_u64(lent.sizes) == unpack_u64(lent.addresses) == (0, 0)
        assert set(unpack_u64(lent.rkeys)) == {0}
        assert_got(red, *stored(red, 4, first=3))
        registered.close()


def pulling(fetches: Sequence[Fetch]) -> Operation[None]:
    yield Pull(fetches, lambda: None)


def test_who_may_only_read_gets_and_cannot_offer(cluster) -> None:
    here = cluster(settings=TENANTS)
    with here.client(token=READER) as reader:
        space = reader.open("s", NAMESPACE)
        assert remote_of(reader) is not None
        assert reader.get(space, space.keys(range(64)), targets_of(fill(count=4))) == 0
        with pytest.raises(Forbidden):
            reader.put(space, space.keys(range(64)), fill(count=4))
        with pytest.raises(Forbidden):
            ask(reader, lambda number: wire.Offer(number, 1, b"", b"", b""))


GID = bytes(10) + b"\xff\xff\x0a\x00\x09\x09"
PORT = RdmaPort("x:1", GID, 0, 4096, "ethernet")
QUEUE = QueueEnd(0x5000, 1)
PATH = PathEnds(0, 0, 0, (QUEUE,))


def join(ports: Any = (PORT,), paths: Any = (PATH,), channel: Any = PATH) -> Callable[[int], wire.Message]:
    return lambda number: wire.Join(number, tuple(ports), tuple(paths), channel)


@pytest.mark.parametrize(
    "request_",
    [
        join(ports=()),
        join(channel=None),
        join(paths=[PATH] * 9),
        join(paths=[PathEnds(0, 5, 0, (QUEUE,))]),
        join(paths=[PathEnds(0, 0, 5, (QUEUE,))]),
        join(paths=[PathEnds(-1, 0, 0, (QUEUE,))]),
        join(paths=[PathEnds(10**9, 0, 0, (QUEUE,))]),
        join(paths=[PathEnds(0, 0, 0, (QUEUE,) * 10_000)]),
        join(paths=[PathEnds(0, 0, 0, ())]),
        join(paths=[PathEnds(0, 0, 0, (QueueEnd(1 << 40, 1),))]),
        join(paths=[PathEnds(0, 0, 0, (QueueEnd(-1, 1),))]),
        join(paths=[PathEnds(0, 0, 0, (QueueEnd(1, 1 << 24),))]),
        join(channel=PathEnds(0, 0, 0, (QueueEnd(1, 1 << 50),))),
        join(channel=PathEnds(0, 3, 0, (QUEUE,))),
        join(ports=[PORT] * 65),
        join(ports=[RdmaPort("x:1", b"short", 0, 4096, "ethernet")]),
        join(ports=[RdmaPort("x:1", GID, 1 << 30, 4096, "ethernet")]),
        join(ports=[RdmaPort("x:1", GID, 0, 5000, "ethernet")]),
        join(ports=[RdmaPort("x:1", GID, 0, -4096, "ethernet")]),
    ],
)
def test_a_join_that_makes_no_sense_ends_the_connection_and_nothing_else(cluster, request_) -> None:
    here = cluster()
    with here.client() as witness, here.client(transport="tcp") as client:
        stored(witness, 2)
        client.connect()
        with pytest.raises((ProtocolError, InvalidRequest)):
            ask(client, request_)
        here.node.wait_until(lambda: len(here.rdma.peers) == 1)
        assert_got(witness, *stored(witness, 2, first=1))


def test_a_second_first_join_ends_the_connection(cluster) -> None:
    here = cluster()
    with here.client() as client:
        client.connect()
        with pytest.raises(ProtocolError):
            ask(client, join())
        here.node.wait_until(lambda: not here.rdma.peers)
        assert_got(client, *stored(client, 2))


def test_later_joins_with_other_paths_end_the_connection(cluster) -> None:
    here = cluster()
    with here.client() as client:
        for paths in ([PathEnds(0, 0, 0, (QUEUE,) * 5)], [PathEnds(0, 9, 0, (QUEUE,))], [PATH] * 9):
            client.connect()
            with pytest.raises(ProtocolError):
                ask(client, join((), paths, None))
            here.node.wait_until(lambda: not here.rdma.peers)
        assert_got(client, *stored(client, 2))


def test_a_client_that_adds_paths_later_has_at_most_those_that_a_first_join_may_have(cluster) -> None:
    here = cluster()
    with here.client() as client:
        client.connect()
        for number in range(1, 20):
            with suppress(ProtocolError, TransportError):
                ask(client, join((), [PathEnds(number % 8, 0, 0, (QUEUE,) * 16)], None))
            assert len(here.fabric.pairs) <= 2 * 8 * 16 + 8


def test_a_join_without_a_token_or_over_a_unix_socket_is_refused(cluster) -> None:
    here = cluster()
    with pytest.raises(Forbidden), here.client(token="of nobody") as stranger:
        stranger.connect()
    with BlockingClient(here.node.call(lambda: here.node.node.addresses["unix"]), here.token()) as client:
        client.connect()
        assert client.connect().ports == ()
        with pytest.raises(InvalidRequest):
            ask(client, join())


def test_garbage_over_the_channel_ends_the_connection(cluster) -> None:
    here = cluster()
    with here.client() as witness, here.client() as client:
        space, keys, blocks = stored(witness, 2)
        client.connect()
        stream: Any = client._stream
        for garbage in (os.urandom(100), bytes(5000), b"\xff" * 20_000):
            with suppress(StoreError, OSError):
                stream._stream.sendall(garbage)
            here.node.wait_until(lambda: len(here.rdma.peers) == 1)
            assert_got(witness, space, keys, blocks)
            client.connect()
            stream = client._stream


def test_bytes_over_tcp_from_a_client_that_has_moved_end_the_connection(cluster) -> None:
    here = cluster()
    with here.client() as client:
        client.connect()
        stream: Any = client._stream
        os.write(stream._stream._lifeline.fileno(), b"hello?")
        here.node.wait_until(lambda: not here.rdma.peers)
        assert_got(client, *stored(client, 2))


# How many connections have queue pairs.


def test_an_idle_connection_makes_way_and_a_busy_one_does_not(cluster) -> None:
    here = cluster(settings={"rdma.peers": "2"})
    with here.client() as idle, here.client() as busy:
        space, keys, blocks = stored(busy, 4)
        placed = offering(here, busy, space.keys([5, *range(63)]), blocks, space)
        idle.connect()
        with here.client() as third:
            assert_got(third, third.open("s", NAMESPACE), keys, blocks)
            assert len(here.rdma.peers) == 2
            assert remote_of(busy).peer.channel is not None
            ask(busy, lambda number: wire.Abort(number, placed.grant_id))
            assert_got(busy, space, keys, blocks)
            assert_got(idle, idle.open("s", NAMESPACE), keys, blocks)  # somebody makes way for it in turn


def test_who_finds_all_places_busy_goes_on_over_tcp(cluster) -> None:
    here = cluster(settings={"rdma.peers": "1"})
    with here.client() as busy, here.client(transport="auto") as third:
        space, keys, blocks = stored(busy, 4)
        placed = offering(here, busy, space.keys([5, *range(63)]), blocks, space)
        assert_got(third, third.open("s", NAMESPACE), keys, blocks)
        assert remote_of(third) is None
        ask(busy, lambda number: wire.Abort(number, placed.grant_id))
        assert third._rdma is not None
        third._rdma.health._resume_at = 0.0
        assert_got(third, third.open("s", NAMESPACE), keys, blocks)
        assert remote_of(third) is not None


# Sizes.


@pytest.mark.parametrize(
    "size", [1, 4095, (128 << 10) - 1, 128 << 10, (128 << 10) + 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1]
)
def test_blocks_of_any_size_come_back(cluster, size: int) -> None:
    here = cluster()
    with here.client() as client:
        assert_got(client, *stored(client, 3, size))


def test_blocks_of_64_mib_and_more_than_the_staging_memory_come_back(cluster) -> None:
    here = cluster(
        settings={
            "tiers.dram.capacity": "256MiB",
            "tiers.dram.slab": "128MiB",
            "limits.inflight_bytes": "1GiB",
            "tiers.dram.high_watermark": "1.0",
        }
    )
    with here.client(timeout_s=30.0) as client:
        space, keys, blocks = stored(client, 3, 64 << 20)
        assert_got(client, space, keys, blocks)
        assert client._rdma is not None
        assert client._rdma.staging.taken_bytes == 0
        big = bytearray(3 * (64 << 20))
        registered = client.register(big)
        views = [memoryview(big)[at * (64 << 20) : (at + 1) * (64 << 20)] for at in range(3)]
        staged = client._rdma.staged_bytes
        assert client.get(space, keys, views) == 3
        assert big == b"".join(blocks)
        assert client._rdma.staged_bytes == staged
        registered.close()


def test_more_blocks_than_the_staging_memory_holds_are_got_in_turns(cluster, monkeypatch) -> None:
    monkeypatch.setattr("engine_client.remote.STAGING_BYTES", 1 << 20)
    here = cluster()
    with here.client() as client:
        assert_got(client, *stored(client, 30))
        assert here.fabric.counts["reads"] >= 30


# Ends.


def test_a_buffer_outlives_its_client(cluster) -> None:
    here = cluster()
    client = here.client()
    registered = client.register(bytearray(BLOCK))
    client.close()
    registered.close()
    client.close()


def test_a_slab_that_is_being_registered_when_its_client_dies_is_not_left_registered(cluster) -> None:
    here = cluster()
    go_on, began = threading.Event(), threading.Event()
    with here.client() as client, here.client() as other:
        space, keys, blocks = stored(client, 4)
        slab_id = here.node.call(lambda: next(iter(here.rdma._slabs)))
        here.node.call(lambda: here.rdma.dropped(slab_id))
        domains = here.rdma._domains["default"]
        register = domains[0].register

        def slowly(*arguments: Any) -> Any:
            began.set()
            assert go_on.wait(10.0)
            return register(*arguments)

        domains[0].register = slowly  # type: ignore[method-assign]
        with elsewhere(lambda: client.get(space, keys, targets_of(blocks))) as getting:
            assert began.wait(5.0)
            here.hang_up()
            with pytest.raises(TransportError):
                getting.result(5.0)
            go_on.set()
        here.node.wait_until(lambda: not here.rdma.peers)
        del domains[0].register
        assert_got(other, other.open("s", NAMESPACE), keys, blocks)
