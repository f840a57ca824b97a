"""A node with lower tiers among clients that lie or go away, and an operator who moves everything under them."""

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine_client.blocking import BlockingClient
from kvstore import records, wire
from kvstore.errors import NotFound, Rejected, StoreError
from kvstore.packed import pack_keys
from kvstore.types import DRAM, NVME, BlockKey, Cause
from server.session import Session
from tests.system.nodes import NodeProcess, content, namespace, nothing_held, pause, until
from tests.system.wire_client import WireClient
from tests.tiered_store import OWNER, TieredStore, block_of, chain_keys

OPERATOR = "operator-operator-operator"
CROWD = "crowd-crowd-crowd-crowd"
SIZE = 20_000
SPACE = namespace("model", block_bytes=SIZE)
EXTREMES = [-(2**63), -1, 0, 1, 2**31, 2**63, 2**64 - 1]
RATES = [float("nan"), float("-inf"), -1.0, -5e-324, 5e-324, 1e308, float("inf")]
SENSELESS = RATES[:4]


def settings(folder: Path) -> list[str]:
    return [
        "--tenants.0.name=operator", f"--tenants.0.token={OPERATOR}", "--tenants.0.admin=true",
        "--tenants.1.name=crowd", f"--tenants.1.token={CROWD}", "--node.unix_tenant=crowd",
        f"--tiers.nvme.path={folder}/nvme", "--tiers.nvme.capacity=24MiB", "--tiers.nvme.slab=1MiB",
        "--tiers.nvme.io=posix", "--tiers.nvme.admission=all", "--tiers.nvme.write=through",
        f"--tiers.object.url=file://{folder}/bucket", "--limits.batch_blocks=2048",
    ]  # fmt: skip


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    started = NodeProcess(tmp_path, *settings(tmp_path), admin_token=OPERATOR).start()
    until(lambda: not lower(started)["is_recovering"] and lower(started)["capacity_bytes"], "the disk to be known")
    yield started
    started.stop()


@pytest.fixture
def client(node: NodeProcess) -> Iterator[BlockingClient]:
    with BlockingClient(node.unix) as client:
        yield client


def lower(node: NodeProcess) -> dict[str, Any]:
    with node.admin() as admin:
        return dict(next(row for row in admin.stat()["tiers"] if row["tier"] == NVME))


def sunk(client: BlockingClient, prompt: int, blocks: int) -> tuple[Any, list[BlockKey]]:
    """A chain that lies on the disk only."""
    space = client.open("model", SPACE)
    keys = space.keys(range(1000 * prompt, 1000 * prompt + 4 * blocks))
    client.put(space, keys, [content(key, SIZE) for key in keys])
    evicted = 0

    def is_sunk() -> bool:  # not at once: they may be on their way there already, written through
        nonlocal evicted
        evicted += client.demote(space, keys, NVME, evict=True).evicted
        return evicted == blocks

    until(is_sunk, "a chain to be on the disk only")
    return space, keys


def test_numbers_that_make_no_sense(node, client):
    space, keys = sunk(client, 1, 8)
    with WireClient(node) as liar:
        number, packed = liar.open("model", SPACE).number, pack_keys(keys)
        for load_ms in EXTREMES:
            for rate in RATES:
                reply = liar.ask(wire.Acquire(liar.next(), number, packed, 1000, 0, 0, False, min(load_ms, 50), rate))
                assert isinstance(reply, wire.Failed) == (rate in SENSELESS[1:] or rate != rate)
            liar.ask(wire.Acquire(liar.next(), number, packed, load_ms, -1, -1, False, 1, 0.0))
            reply = liar.ask(wire.Promote(liar.next(), number, packed, load_ms))
            assert isinstance(reply, wire.Promoted) == (load_ms > 0)
        too_many = pack_keys(keys * 300)
        for request in (
            wire.Acquire(liar.next(), number, too_many, 1000, 0, 0, False, 50),
            wire.Promote(liar.next(), number, too_many, 50),
            wire.Promote(liar.next(), number, packed[:-1], 50),
            wire.Demote(liar.next(), number, too_many, False, NVME, False),
            wire.Demote(liar.next(), number, packed, False, "tape", True),
            wire.Evict(liar.next(), number, packed, False, "tape"),
            wire.Evict(liar.next(), liar.open("empty", namespace("empty")).number, b"", True, "tape"),
            wire.Drain(liar.next(), NVME),
            wire.SetTier(liar.next(), NVME, 1 << 40),
        ):
            assert isinstance(liar.ask(request), wire.Failed), request
        again = liar.ask(wire.Acquire(liar.next(), number, pack_keys(keys[:1] * 2000), 1000, 0, 0, False, 20_000))
        assert len(again.sizes) == 8 * 2000
    node.assert_clean()
    assert client.get(space, keys, [bytearray(SIZE) for _ in keys], load_s=5) == 8


@pytest.mark.parametrize("tier", ["", "object"])
def test_a_block_that_only_the_bucket_has_is_deleted_and_counted(node, client, tier):
    space = client.open("model", SPACE)
    keys = space.keys(range(8))
    client.put(space, keys, [content(key, SIZE) for key in keys])
    until(lambda: not client.demote(space, keys, "object").written, "all to be in the bucket")
    for above in (NVME, DRAM):
        client.evict(space, keys, above)
    assert client.match(space, keys) == 2
    assert client.evict(space, keys, tier).blocks == 2
    assert client.match(space, keys) == 0


def test_many_who_begin_loads_and_go_away_at_once(node, client):
    chains = [sunk(client, prompt, 8) for prompt in range(1, 13)]
    for turn in range(10):
        with ExitStack() as stack:
            for _, keys in chains:
                leaver = stack.enter_context(WireClient(node))
                number = leaver.open("model", SPACE).number
                leaver.send(wire.Acquire(leaver.next(), number, pack_keys(keys), 60_000, 0, 0, turn % 2 > 0, 5000))
        for space, keys in chains:
            client.evict(space, keys, DRAM)
    for space, keys in chains:
        targets = [bytearray(SIZE) for _ in keys]
        assert client.get(space, keys, targets, load_s=10) == 8
        assert [bytes(target) for target in targets] == [content(key, SIZE) for key in keys]
    node.empty(client)


def test_an_operator_who_resizes_drains_and_evicts_while_everything_moves(node):
    """Whatever is got is right, and at the end nothing is held."""
    ended, wrong = threading.Event(), list[str]()

    def use(seed: int, token: str) -> None:
        chance = random.Random(seed)
        with BlockingClient(node.unix, token, timeout_s=20) as client:
            space = client.open("model", SPACE)
            while not ended.is_set():
                first = 4000 * chance.randrange(30)
                keys = space.keys(range(first, first + 4 * 12))
                targets = [bytearray(SIZE) for _ in keys]
                found = client.get(space, keys, targets, load_s=chance.choice([0.0, 0.05, 1.0]))
                wrong.extend(
                    key.hex()
                    for key, target in zip(keys[:found], targets, strict=False)
                    if bytes(target) != content(key, SIZE)
                )
                client.put(space, keys, [content(key, SIZE) for key in keys])

    def operate(seed: int) -> None:
        chance = random.Random(seed)
        with node.admin() as admin, BlockingClient(node.unix, timeout_s=20) as crowd:
            space = crowd.open("model", SPACE)
            deeds: list[Callable[[], object]] = [
                lambda: admin.set_tier(NVME, capacity_bytes=chance.randrange(1, 24) << 20),
                lambda: admin.set_tier(DRAM, capacity_bytes=chance.randrange(2, 16) << 20),
                lambda: admin.drain(chance.choice([DRAM, NVME])),
                lambda: crowd.evict(space, None, chance.choice(["", DRAM, NVME, "object"])),
                lambda: crowd.demote(space, None, chance.choice([NVME, "object"]), evict=chance.random() < 0.5),
            ]
            while not ended.is_set():
                chance.choice(deeds)()
            admin.set_tier(DRAM, capacity_bytes=16 << 20)

    errors = list[BaseException]()

    def guarded(work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except (StoreError, OSError, AssertionError) as error:
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(use, seed, token)) for seed, token in enumerate([CROWD, OPERATOR])
    ]
    threads += [threading.Thread(target=guarded, args=(operate, seed)) for seed in (7, 8)]
    for thread in threads:
        thread.start()
    pause(4.0)
    ended.set()
    for thread in threads:
        thread.join()
    assert (errors, wrong) == ([], [])
    with BlockingClient(node.unix, CROWD) as crowd:
        until(lambda: not lower(node)["queued"] and not lower(node)["draining"], "all to be at rest")
        node.empty(crowd)


def test_a_namespace_that_is_deleted_while_it_is_written_through(node, client):
    space = client.open("model", SPACE)
    for prompt in range(20):
        keys = space.keys(range(1000 * prompt, 1000 * prompt + 4 * 16))
        client.put(space, keys, [content(key, SIZE) for key in keys])
        client.evict(space)
        assert client.match(space, keys) == 0
    with node.admin() as admin:
        until(lambda: nothing_held(admin), "nobody to hold anything")
        tiers = {row["tier"]: row["blocks"] for row in admin.stat()["tiers"]}
    assert tiers == {DRAM: 0, NVME: 0, "object": 0}


def test_a_disk_whose_folder_is_gone_is_told_and_memory_goes_on(node, client, tmp_path):
    space, _ = sunk(client, 1, 8)
    shutil.rmtree(tmp_path / "nvme" / "slabs")
    assert lower(node)["medium"]["filesystem_free_bytes"] == 0
    more = space.keys(range(9000, 9000 + 4 * 8))
    client.put(space, more, [content(key, SIZE) for key in more])
    assert client.get(space, more, [bytearray(SIZE) for _ in more]) == 8


def test_nothing_comes_back_that_was_deleted_before_it_was_known_what_lies_on_the_disk(tmp_path):
    node = TieredStore(tmp_path, ledger=True)
    space = node.open()
    keys = chain_keys(space, range(3))
    node.run(node.recover())
    node.sink(space, keys, [block_of(key, 1000) for key in keys])
    node.stop_store()
    node.start_store()
    space = node.open()
    session = Session(node.store, node.upkeep, node.tenants["red"], OWNER, "shared")
    with pytest.raises(Rejected):
        node.run(session.ask(wire.Evict(1, space.number, b"", True)))
    assert node.run(session.ask(wire.Evict(2, space.number, b"", True, DRAM))).blocks == 0
    with pytest.raises(NotFound):
        node.run(session.ask(wire.Evict(3, space.number, b"", True, "tape")))
    node.run(node.recover())
    assert node.run(session.ask(wire.Evict(4, space.number, b"", True))).blocks == 3
    assert node.get(space, keys) == []
    node.close()


def test_no_more_is_remembered_of_what_was_deleted_than_there_is_memory_for(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MOST_DELETED", 4)
    node = TieredStore(tmp_path, ledger=True)
    space = node.open()
    keys = chain_keys(space, range(6))
    node.store.discard(space, keys, Cause.DELETED)
    with pytest.raises(Rejected):
        node.store.discard(space, keys, Cause.DELETED)
    node.store.discard(space, keys, Cause.DELETED, DRAM)
    node.run(node.recover())
    node.store.discard(space, keys, Cause.DELETED)
    node.close()
