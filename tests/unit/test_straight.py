"""Blocks read straight from the disk into HBM, over a whole store with HBM on the CPU and files that go wrong."""

import asyncio
import errno
import random
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.catalogue import OpenNamespace, Tenant
from kvstore.copier import Copier
from kvstore.holds import Lease
from kvstore.loads import JOB_BLOCKS
from kvstore.tiers import TierSpec
from kvstore.tiers import block_file as block_file_module
from kvstore.tiers import nvme as nvme_module
from kvstore.tiers.block_file import Probe, open_block_file, probe_for
from kvstore.types import DRAM, HBM, NVME, BlockKey, Owner, Slot, State, TierName
from server import assembly
from server.config import load
from tests.faulty_file import Fail, Fault, Faults, FaultyFile, FlipBit, Wait
from tests.stub.build import environ_with_stub_driver

pytest.importorskip("torch")
from tests.unit import test_lifting
from tests.unit.test_hbm import OneTensorPool, hbm
from tests.unit.test_lifting import BLUE, OTHER, READER, RED, SIZE, SLOTS, Rig, content, keys_of, until

Use = Callable[["DiskRig"], Awaitable[None]]
HEADER_BITS = 4096 * 8
REPO = Path(__file__).parents[2]


class DiskRig(Rig):
    """With a disk of 16 slabs below, whose files do what `faults` say."""

    def __init__(self, folder: Path, slabs: int, faults: Faults, **settings: str) -> None:
        disk = {
            "tiers.nvme.path": str(folder / "disk"), "tiers.nvme.capacity": "16MiB", "tiers.nvme.slab": "1MiB",
            "tiers.nvme.admission": "all", "tiers.nvme.threads": "4",
        }  # fmt: skip
        super().__init__(folder, slabs, **{**disk, **settings})
        self.faults = faults
        self.straight = self.lifting.straight

    async def begin(self) -> None:
        assert self.recovery is not None
        await self.recovery.begin()
        await self.recovery.load()
        self.store.demotion.is_paused = False
        await self.grow()

    async def sink(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> None:
        """Have blocks on the disk only."""
        self.put(space, keys)
        assert await self.store.demotion.demote(space, keys, NVME, evict=True) == (len(keys), len(keys))
        self.faults.operations.clear()

    def next_is(self, fault: Fault) -> None:
        self.faults.at[len(self.faults.operations)] = fault

    @property
    def reads(self) -> int:
        return sum(name == "read" for name, _, _ in self.faults.operations)

    def where(self, space: OpenNamespace, key: BlockKey) -> set[TierName]:
        return {tier.tier for tier in space.spaces if self.store.table.readable(tier, key) is not None}

    async def read_all(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> int:
        """How many blocks come into HBM; their bytes are right."""
        lease = await self.acquire(space, keys)
        found = await self.read(lease)
        assert found == list(map(content, keys[: len(found)]))
        self.store.end(READER)
        return len(found)

    async def read_in_dram(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> int:
        lease = await self.store.reads.acquire(OTHER, space, keys, lease_s=60, wait_s=0, layers=0, load_s=5)
        found = [bytes(self.store.view(replica)) for replica in lease.replicas] if lease is not None else []
        assert found == list(map(content, keys[: len(found)]))
        self.store.end(OTHER)
        return len(found)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()
    monkeypatch.setattr(
        nvme_module, "open_block_file", lambda path, **how: FaultyFile(open_block_file(path, **how), faults)
    )
    return faults


@pytest.fixture
def rigged(tmp_path: Path, faults: Faults) -> Callable[..., None]:
    """Runs a coroutine function with a rig; in the end nobody holds anything and all is consistent."""

    def run(use: Use, slabs: int = 4, **settings: str) -> None:
        async def main() -> None:
            rig = DiskRig(tmp_path, slabs, faults, **settings)
            try:
                await rig.begin()
                await use(rig)
                for owner in (READER, OTHER, test_lifting.WRITER):
                    rig.store.end(owner)
                await until(lambda: rig.store.promotion.is_idle and not rig.straight._loads)
                assert list(rig.store.problems()) == []
                assert all(not tier.draining for tier in rig.store.table.tiers.values())
                assert rig.crashes == []
            finally:
                await rig.store.aclose()

        asyncio.run(main())

    return run


def test_what_only_the_disk_has_comes_into_hbm_without_a_slot_of_dram(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 40)
        await rig.sink(space, keys)
        lease = await rig.acquire(space, keys)
        assert await rig.read(lease) == list(map(content, keys))
        assert lease is not None
        assert [replica.parent for replica in lease.replicas] == [None, *keys[:-1]]
        assert {replica.layers for replica in lease.replicas} == {2}
        assert (rig.store.table.tiers[DRAM].used_bytes, rig.reads) == (0, 40)
        assert (rig.straight.loaded_blocks, rig.lifting.lifted_blocks) == (40, 40)
        assert rig.store.counters.promoted_blocks == {NVME: 40}
        assert (space.hit_blocks, space.missed_blocks) == (40, 0)
        assert rig.where(space, keys[0]) == {HBM, NVME}, "the disk keeps it, so HBM may drop it"

    rigged(use)


def test_a_chain_that_lies_here_and_there_comes_piece_by_piece_from_where_it_is(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 30)
        await rig.sink(space, keys)
        assert await rig.read_in_dram(space, keys[:5]) == 5
        assert await rig.read_in_dram(space, keys[10:15]) == 5
        assert await rig.read_all(space, [*keys, BlockKey(bytes(16))]) == 30
        assert rig.straight.loaded_blocks == 20
        assert rig.store.table.tiers[DRAM].replicas == 10
        assert space.missed_blocks == 1

    rigged(use)


def test_a_chain_that_alternates_comes_in_the_end_by_way_of_dram(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 30)
        await rig.sink(space, keys)
        for key in keys[::2]:
            assert await rig.read_in_dram(space, [key]) == 1
        assert await rig.read_all(space, keys) == 30
        assert 0 < rig.straight.loaded_blocks < 15

    rigged(use)


def test_a_header_of_another_block_is_a_miss_and_the_block_is_dropped(rigged: Any, tmp_path: Path) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 4)
        await rig.sink(space, keys)
        assert space.nvme is not None
        one, other = (space.nvme.replicas[key].slot for key in keys[1:3])
        assert one.slab_id == other.slab_id
        path = tmp_path / "disk" / "slabs" / f"{one.slab_id:010d}.slab"
        with path.open("r+b", buffering=0) as file:
            file.seek(one.offset)
            whole = file.read(one.size)
            file.seek(other.offset)
            file.write(whole)
        assert await rig.read_all(space, keys) == 2
        assert (rig.where(space, keys[2]), rig.where(space, keys[3])) == (set(), {HBM, NVME})
        assert rig.store.counters.corrupt_blocks == 1

    rigged(use)


@pytest.mark.parametrize("bit", [8, HEADER_BITS + 8 * 7, HEADER_BITS + 8 * (SIZE - 1)])
def test_a_bit_that_is_another_is_a_miss_and_the_block_is_dropped(rigged: Any, bit: int) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 3)
        await rig.sink(space, keys)
        rig.faults.at[1] = FlipBit(bit)
        assert await rig.read_all(space, keys) == 1
        assert (rig.where(space, keys[1]), rig.where(space, keys[2])) == (set(), {HBM, NVME})
        assert rig.store.counters.corrupt_blocks == 1

    rigged(use)


def test_a_bit_of_the_padding_is_of_no_consequence(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 2)
        await rig.sink(space, keys)
        rig.next_is(FlipBit(HEADER_BITS + 8 * SIZE))
        assert await rig.read_all(space, keys) == 2

    rigged(use)


def test_a_read_that_fails_is_done_once_more_by_way_of_dram_and_nothing_is_dropped(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys, more = keys_of(space, 3), keys_of(space, 3, 1)
        await rig.sink(space, keys)
        await rig.sink(space, more)
        rig.faults.at[0] = Fail(errno.EIO)
        assert await rig.read_all(space, keys) == 3
        assert rig.where(space, keys[0]) == {HBM, DRAM, NVME}
        assert rig.store.below.disk.read_health.is_well  # type: ignore[union-attr]
        assert not rig.straight.health.is_well
        loaded = rig.straight.loaded_blocks
        assert await rig.read_all(space, more) == 3
        assert rig.straight.loaded_blocks == loaded, "this way is left alone for a while"

    rigged(use)


def test_a_page_that_cannot_be_read_either_way_is_dropped(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 1)
        await rig.sink(space, keys)
        rig.faults.at |= {0: Fail(errno.EIO), 1: Fail(errno.EIO)}
        assert await rig.read_all(space, keys) == 0
        assert rig.where(space, keys[0]) == set()

    rigged(use)


def test_a_device_that_fails_costs_no_block_on_the_disk(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 3)
        await rig.sink(space, keys)

        async def fail(places: Any) -> Any:
            raise OSError(errno.EIO, "unspecified launch failure")

        rig.lifting.hbm.buffers = fail  # type: ignore[method-assign]
        assert await rig.read_all(space, keys) == 0
        assert "launch failure" in rig.lifting.health.reason
        assert (rig.used_bytes, rig.reads) == (0, 0)
        assert await rig.read_in_dram(space, keys) == 3

    rigged(use)


@pytest.mark.parametrize("tier", ["", NVME])
def test_a_block_that_is_deleted_while_it_is_read_is_not_there_after(rigged: Any, tier: str) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 3)
        await rig.sink(space, keys)
        rig.next_is(gate := Wait(threading.Event()))
        asked = asyncio.create_task(rig.acquire(space, keys))
        await until(gate.begun.is_set)
        rig.forget(space, keys[1:2], tier)
        if not tier:
            rig.put(space, keys[1:2])
        gate.until.set()
        lease = await asked
        assert lease is not None
        assert len(lease.replicas) == (1 if tier else 3)
        assert await rig.read(lease) == list(map(content, keys[: len(lease.replicas)]))
        assert rig.straight.loaded_blocks == 2, "what was put since came from DRAM"

    rigged(use)


def test_a_reader_that_goes_leaves_the_load_to_others(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 3)
        await rig.sink(space, keys)
        rig.next_is(gate := Wait(threading.Event()))
        going = asyncio.create_task(rig.acquire(space, keys))
        await until(gate.begun.is_set)
        staying = asyncio.create_task(rig.acquire(space, keys, OTHER))
        await asyncio.sleep(0)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        rig.store.end(READER)
        gate.until.set()
        assert await rig.read(await staying) == list(map(content, keys))
        assert (rig.reads, rig.straight.loaded_blocks) == (3, 3)

    rigged(use)


def test_several_who_want_it_at_once_read_each_block_once(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 3 * JOB_BLOCKS)
        await rig.sink(space, keys)
        leases = await asyncio.gather(*(rig.acquire(space, keys[: JOB_BLOCKS * n]) for n in (1, 2, 3, 3)))
        assert [len(lease.replicas) for lease in leases if lease is not None] == [16, 32, 48, 48]
        for lease in leases:
            assert await rig.read(lease) == [content(replica.key) for replica in lease.replicas]  # type: ignore[union-attr]
        assert (rig.reads, rig.store.table.tiers[DRAM].used_bytes) == (48, 0)

    rigged(use)


def test_what_is_on_its_way_into_dram_is_waited_for_and_copied(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 3)
        await rig.sink(space, keys)
        rig.next_is(gate := Wait(threading.Event()))
        into_dram = asyncio.create_task(rig.read_in_dram(space, keys))
        await until(gate.begun.is_set)
        into_hbm = asyncio.create_task(rig.read_all(space, keys))
        await asyncio.sleep(0)
        gate.until.set()
        assert (await into_dram, await into_hbm) == (3, 3)
        assert (rig.reads, rig.straight.loaded_blocks) == (3, 0)

    rigged(use)


def test_a_reader_of_dram_need_not_wait_for_hbm(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 3)
        await rig.sink(space, keys)
        rig.next_is(gate := Wait(threading.Event()))
        into_hbm = asyncio.create_task(rig.read_all(space, keys))
        await until(gate.begun.is_set)
        assert await rig.read_in_dram(space, keys) == 3
        gate.until.set()
        assert await into_hbm == 3
        assert rig.reads == 6

    rigged(use)


def test_a_slow_disk_holds_no_reader_beyond_its_deadline_and_the_block_comes_later(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, JOB_BLOCKS + 3)
        await rig.sink(space, keys)
        rig.next_is(gate := Wait(threading.Event()))
        async with asyncio.timeout(5):
            lease = await rig.lifting.acquire(READER, space, keys, lease_s=60, wait_s=0, load_s=0.2, tokens_per_s=0)
        assert lease is None or len(lease.replicas) in (JOB_BLOCKS, 3), "the other of the two reads"
        gate.until.set()
        await until(lambda: rig.lifting.is_here(space, keys))
        assert await rig.read_all(space, keys) == JOB_BLOCKS + 3
        assert rig.reads == JOB_BLOCKS + 3

    rigged(use)


def test_who_does_not_want_to_wait_gets_nothing_and_begins_nothing(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 3)
        await rig.sink(space, keys)
        assert await rig.lifting.acquire(READER, space, keys, lease_s=60, wait_s=9, load_s=0, tokens_per_s=0) is None
        assert (rig.reads, rig.used_bytes, space.missed_blocks) == (0, 0, 3)

    rigged(use)


def test_what_is_computed_sooner_than_read_is_not_read(rigged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one token and 60,000 bytes, from a disk that gives 600,000 bytes a second."""

    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 4)
        await rig.sink(space, keys)
        reading = rig.store.below.disk.reading  # type: ignore[union-attr]
        monkeypatch.setattr(type(reading), "is_stale", lambda self, now: False)
        reading.bytes_per_s = 10.0 * SIZE
        asked = rig.lifting.acquire(READER, space, keys, lease_s=60, wait_s=0, load_s=5, tokens_per_s=11)
        assert await asked is None
        assert (rig.reads, rig.store.counters.loads_too_slow) == (0, 4)
        now = rig.store.clock.now()
        assert len(rig.straight.begin(space, keys, now + 0.25, 9)) == 2, "no more arrive before the deadline"
        assert len(rig.straight.begin(space, keys, now + 0.35, 0)) == 3, "behind those that are on their way"

    rigged(use)


def test_no_more_is_begun_at_once_than_may_be_on_the_way(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 4 * JOB_BLOCKS)
        for start in range(0, len(keys), 10):
            await rig.sink(space, keys[start : start + 10])
        rig.straight._most_bytes = 1 << 20
        rig.next_is(gate := Wait(threading.Event()))
        begun = rig.straight.begin(space, keys, rig.store.clock.now() + 5, 0)
        assert len(begun) == 2 * JOB_BLOCKS, "the first job is under the limit, and the second goes over it"
        gate.until.set()
        assert await rig.read_all(space, keys) == 4 * JOB_BLOCKS

    rigged(use, slabs=8)


def test_what_finds_no_room_in_hbm_is_left_out_from_the_end(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        held, keys = keys_of(space, SLOTS, 1), keys_of(space, 2 * SLOTS, 2)
        await rig.sink(space, held)
        await rig.sink(space, keys)
        assert await rig.acquire(space, held, OTHER) is not None
        assert await rig.read_all(space, keys) == SLOTS
        assert await rig.acquire(space, keys[:SLOTS]) is not None
        assert await rig.acquire(space, keys_of(space, 3, 3)) is None
        rig.store.end(OTHER)
        rig.store.end(READER)
        assert await rig.read_all(space, keys) == 2 * SLOTS, "what nobody holds makes room"

    rigged(use, slabs=2)


@pytest.mark.parametrize("size", [5000, 60_000 + 2048])
def test_a_slot_without_room_for_the_padding_is_filled_from_dram(
    rigged: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(test_lifting, "SIZE", size)

    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 4)
        await rig.sink(space, keys)
        assert await rig.read_all(space, keys) == 4
        assert (rig.straight.loaded_blocks, rig.store.table.tiers[DRAM].replicas) == (0, 4)

    rigged(use)


def test_a_block_of_several_parts_comes_by_way_of_dram(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open(parts=2)
        parts = [[test_lifting.part_key(key, part) for key in keys_of(space, 3)] for part in (0, 1)]
        for keys in parts:
            await rig.sink(space, keys)
        assert await rig.read_all(space, parts[0]) == 3
        assert rig.straight.loaded_blocks == 0

    rigged(use)


def test_memory_that_another_tenant_had_is_made_anew_before_a_file_is_read_into_it(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        red, blue = rig.open(RED), rig.open(BLUE)
        for space in (red, blue):
            keys = keys_of(space, SLOTS)
            await rig.sink(space, keys)
            assert await rig.read_all(space, keys) == SLOTS

    rigged(use, slabs=1)


async def already() -> None:
    """It was closed by the test."""


def test_a_stop_while_a_block_is_read_waits_for_its_last_byte(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 3)
        await rig.sink(space, keys)
        rig.next_is(gate := Wait(threading.Event()))
        asked = asyncio.create_task(rig.acquire(space, keys))
        await until(gate.begun.is_set)
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked
        closing = asyncio.create_task(rig.store.aclose())
        await asyncio.sleep(0.01)
        assert not closing.done()
        gate.until.set()
        await closing
        assert not rig.straight._loads
        rig.store.aclose = already  # type: ignore[method-assign]

    rigged(use)


def test_what_is_asked_of_a_disk_that_is_closed_fails(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 1)
        await rig.sink(space, keys)
        disk = rig.store.below.disk
        assert disk is not None
        assert space.nvme is not None
        await disk.aclose()
        assert await disk.fetch([(space.nvme.replicas[keys[0]], memoryview(bytearray(61_440)))]) == ["failed"]
        assert disk.queue._threads == []

    rigged(use)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_meanwhile_the_bytes_are_those_of_the_key(rigged: Any, faults: Faults, seed: int) -> None:
    """Readers of HBM and DRAM while blocks are put, written below, deleted and evicted, on a disk that errs."""
    dice = random.Random(seed)

    async def use(rig: DiskRig) -> None:
        rig.straight.health.tolerance = rig.lifting.health.tolerance = 10**6
        disk = rig.store.below.disk
        assert disk is not None
        disk.read_health.tolerance = disk.write_health.tolerance = 10**6
        spaces = [rig.open(tenant) for tenant in (RED, BLUE)]
        chains = [(space, keys_of(space, dice.randint(1, 20), number)) for number in range(4) for space in spaces]
        for number in range(400):
            if dice.random() < 0.08:
                faults.at[number] = dice.choice([Fail(errno.EIO), FlipBit(dice.randrange(HEADER_BITS + 8 * SIZE))])

        async def reader(owner: Owner) -> None:
            for _ in range(12):
                space, keys = dice.choice(chains)
                lease = await rig.acquire(space, keys, owner)
                assert await rig.read(lease) == [content(key) for key in keys[: len(lease.replicas) if lease else 0]]
                if lease is not None and dice.random() < 0.9:
                    rig.store.reads.release(owner, lease.lease_id)

        async def trouble() -> None:
            for _ in range(60):
                space, keys = dice.choice(chains)
                deed = dice.random()
                if deed < 0.4:
                    missing = [key for key in keys if key not in space.dram.replicas]
                    if missing:
                        rig.put(space, missing)
                elif deed < 0.7:
                    await rig.store.demotion.demote(space, keys, NVME, evict=True)
                else:
                    rig.forget(space, dice.sample(keys, dice.randint(1, len(keys))), dice.choice(["", DRAM, HBM, NVME]))
                await asyncio.sleep(0)

        for space, keys in chains:
            rig.put(space, keys)
            await rig.store.demotion.demote(space, keys, NVME, evict=True)
        readers = [asyncio.create_task(reader(Owner(10 + number))) for number in range(5)]
        troubled = asyncio.create_task(trouble())
        for task in readers[:2]:
            for _ in range(dice.randint(20, 200)):
                await asyncio.sleep(0)
            task.cancel()
        for outcome in await asyncio.gather(*readers, troubled, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        for number in range(5):
            rig.store.end(Owner(10 + number))
        assert rig.straight.loaded_blocks > 0
        for space in spaces:
            assert all(replica.state is State.WRITTEN for replica in space.dram.replicas.values())

    rigged(use, slabs=3)


def test_where_files_do_not_reach_the_gpu_blocks_come_by_way_of_dram(
    rigged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hbm.POOLS, "cuda", OneTensorPool)

    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 4)
        await rig.sink(space, keys)
        assert await rig.read_all(space, keys) == 4
        assert (rig.straight.loaded_blocks, rig.lifting.lifted_blocks) == (0, 4)

    rigged(use, **{"tiers.hbm.device": "cuda:0"})


def test_a_file_gets_a_slot_only_when_all_streams_have_done_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hbm.POOLS, "cuda", OneTensorPool)
    copier = Copier(threads=2)

    async def use() -> None:
        tier = hbm.HbmTier(TierSpec(HBM, 8192), device="cuda:0", capacity_bytes=8192, copier=copier)
        await tier.prepare()
        tier.adopt(1)
        slot = Slot(HBM, 1, 0, 4096, 1)
        tensor = tier.tensor(slot, 4096)
        tier._inward.stream.copy([(tensor, hbm.torch.full((4096,), 7, dtype=hbm.torch.uint8))])
        assert not (tensor == 7).any(), "a copy that is late"
        (buffer,) = await tier.buffers([(slot, 4096)])
        assert (tensor == 7).all()
        assert buffer.data_ptr() == tensor.data_ptr(), "memory of a GPU is given as it is"
        await tier.aclose()

    asyncio.run(use())
    copier.close()


@pytest.mark.parametrize(
    ("io", "device", "found", "taken"),
    [
        ("auto", "", "kvikio-gds", "posix"),
        ("auto", "cpu", "kvikio-gds", "posix"),
        ("auto", "cuda:0", "posix", "posix"),
        ("auto", "cuda:0", "kvikio-posix", "posix"),
        ("auto", "cuda:0", "kvikio-gds", "kvikio"),
        ("kvikio", "", "kvikio-posix", "kvikio"),
        ("posix", "cuda:0", "kvikio-gds", "posix"),
    ],
)
def test_by_itself_a_node_takes_kvikio_only_where_that_reaches_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, io: str, device: str, found: Any, taken: str
) -> None:
    monkeypatch.setattr(block_file_module, "probe", lambda: Probe(found, "as the test wants it"))
    monkeypatch.setattr(assembly, "_above", lambda *arguments: None)
    options = [f"--tiers.nvme.path={tmp_path}", f"--tiers.nvme.io={io}", f"--tiers.hbm.device={device}"]
    made = assembly.make_store(load(None, {"HOME": str(tmp_path)}, options), 1, [Tenant("red")], lambda _: None)
    assert made.store.below.disk is not None
    assert made.store.below.disk.medium._io == taken
    if io == "auto":
        assert probe_for(device).path_name == ("kvikio-gds" if taken == "kvikio" else "posix")


def test_over_a_stub_driver_blocks_come_straight_into_its_memory(tmp_path: Path) -> None:
    environ = environ_with_stub_driver(tmp_path)
    tests = REPO / "tests" / "stub" / "straight_contract.py"
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", REPO, tests]
    child = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr


def test_a_lease_on_what_came_straight_is_like_any_other(rigged: Any) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 4)
        await rig.sink(space, keys)
        lease: Lease | None = await rig.acquire(space, keys)
        assert lease is not None
        rig.forget(space, keys, "")
        assert await rig.read(lease) == list(map(content, keys)), "who holds it reads on"
        assert not rig.lifting.is_here(space, keys)
        assert await rig.acquire(space, keys, OTHER) is None

    rigged(use)
