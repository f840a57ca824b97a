"""The device pool on a real GPU: its memory, its streams, and engines in other processes."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.copier import Copier
from kvstore.errors import ConfigError, Forbidden, InvalidRequest
from kvstore.tiers import TierSpec
from kvstore.types import HBM, Slot
from tests.tier_contract import SLAB_BYTES, SLOT_BYTES, MediumContract, add_slabs, read_all, slot_of, write_all

torch = pytest.importorskip("torch", reason="needs a GPU: torch is not installed")
hbm = pytest.importorskip("kvstore.tiers.hbm")

REPO = Path(__file__).parents[2]
DEVICE = "cuda:0"
SPEC = TierSpec(HBM, SLAB_BYTES)
WRITTEN = 0x77


@pytest.fixture(autouse=True)
def warm() -> None:
    """CUDA opens files of its own when it is first used."""
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier(threads=2)
    yield made
    made.close()


def tier_of(copier: Copier, *, one_tenant: bool = False) -> Any:
    return hbm.HbmTier(SPEC, device=DEVICE, capacity_bytes=8 * SLAB_BYTES, copier=copier, one_tenant=one_tenant)


class TestHbmTierOnAGpu(MediumContract):
    tier = HBM

    def open(self, copier: Copier) -> Any:
        return tier_of(copier)

    def test_closing_gives_everything_back_and_may_be_done_twice(self, copier: Copier) -> None:
        async def work() -> None:
            medium = tier_of(copier, one_tenant=True)
            await add_slabs(medium, 1, 2)
            medium.export(1)
            await medium.prepare()
            await medium.aclose()
            await medium.aclose()

        before = torch.cuda.memory_allocated(DEVICE)
        asyncio.run(work())
        assert torch.cuda.memory_allocated(DEVICE) == before


class TestHbmTierOnAGpuWithSmallStaging(TestHbmTierOnAGpu):
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hbm, "STAGING_BYTES", 4096)


def test_the_frameworks_allocator_is_not_called_on_the_hot_path(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        slots = [slot_of(HBM, 1, index) for index in (0, 1)]
        before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
        await write_all(tier, slots, [b"a" * SLOT_BYTES, b"b" * 4001])
        await tier.copy_within([(slots[1], slots[0], 4001)])
        assert await read_all(tier, slots[:1], [4002]) == [b"b" * 4001 + b"a"]
        tier.drop_slab(1)
        await add_slabs(tier, 2)
        assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before
        await tier.aclose()

    asyncio.run(use())


def test_staging_is_page_locked_and_slots_are_on_the_device(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        tensor = tier.tensor(slot_of(HBM, 1, 1), 4001)
        assert (str(tensor.device), tensor.dtype, tuple(tensor.shape)) == (DEVICE, torch.uint8, (4001,))
        assert all(buffer.tensor.is_pinned() for lane in (tier._inward, tier._outward) for buffer in lane.staging)
        await tier.aclose()

    asyncio.run(use())


def test_more_than_is_free_ends_the_start_with_the_setting_and_what_is_free(copier: Copier) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.hbm\.capacity: .* do not fit on cuda:0, where \d+ of \d+ bytes"):
        hbm.HbmTier(SPEC, device=DEVICE, capacity_bytes=1 << 50, copier=copier)


def test_stat_names_the_gpu_and_every_pair(copier: Copier) -> None:
    described = tier_of(copier).describe()
    count = torch.cuda.device_count()
    assert described["device_name"] == torch.cuda.get_device_name(0)
    assert 0 < described["device_free_bytes"] <= described["device_total_bytes"]
    assert len(described["peer_access"]) == count * (count - 1)


def test_a_pool_that_tenants_may_share_is_not_exported(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        with pytest.raises(Forbidden):
            tier.export(1)
        await tier.aclose()

    asyncio.run(use())


@pytest.mark.parametrize("handle", [b"", bytes(63), bytes(65), b"\xff" * 64])
def test_bytes_that_are_no_event_are_refused_and_the_tier_goes_on(copier: Copier, handle: bytes) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        with pytest.raises(InvalidRequest):
            tier.wait_event(handle)
        await write_all(tier, [slot_of(HBM, 1, 0)], [b"cairn"])
        assert await read_all(tier, [slot_of(HBM, 1, 0)], [5]) == [b"cairn"]
        await tier.aclose()

    asyncio.run(use())


# Engines in other processes.


class Engine:
    """A process that works in `slot`, in the role "read" or "write"; `event` is the handle of one after its work."""

    def __init__(self, role: str, slab: bytes, slot: Slot, after: bytes = b"") -> None:
        command = [sys.executable, "-m", "tests.gpu.engine", role, slab.hex(), str(slot.offset), str(SLOT_BYTES)]
        self._process = subprocess.Popen(
            [*command, after.hex()], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        handle, state = self._line().split()
        self.event, self.is_late = bytes.fromhex(handle), state == "late"

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine died"
        return line

    def seen(self) -> set[int]:
        """The values that its slot had, when its work is done. Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        values = set(map(int, self._line().split()))
        self._process.communicate()
        assert self._process.returncode == 0
        return values


def test_the_tier_reads_what_an_engine_writes_late_and_serves_others_meanwhile(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier, one_tenant=True)
        await add_slabs(tier, 1)
        slot = slot_of(HBM, 1, 3)
        engine = await asyncio.to_thread(Engine, "write", tier.export(1), slot)
        assert engine.is_late, "there is something to wait for"
        tier.wait_event(engine.event)
        reading = asyncio.create_task(read_all(tier, [slot], [SLOT_BYTES]))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 10, "the loop went on"
        assert await reading == [bytes([WRITTEN]) * SLOT_BYTES]
        assert await asyncio.to_thread(engine.seen) == {WRITTEN}
        await tier.aclose()

    asyncio.run(use())


def test_an_engine_reads_what_another_writes_late(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier, one_tenant=True)
        await add_slabs(tier, 1, 2)
        slot = slot_of(HBM, 2, 1)
        writer = await asyncio.to_thread(Engine, "write", tier.export(2), slot)
        tier.wait_event(writer.event)
        reader = await asyncio.to_thread(Engine, "read", tier.export(2), slot, tier.ready_event())
        assert await asyncio.to_thread(reader.seen) == {WRITTEN}
        assert await asyncio.to_thread(writer.seen) == {WRITTEN}
        await tier.aclose()

    asyncio.run(use())


def test_a_slot_is_not_written_again_while_an_engines_kernel_may_read_it(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier, one_tenant=True)
        await add_slabs(tier, 1)
        slot = slot_of(HBM, 1, 0)
        await write_all(tier, [slot], [b"\x11" * SLOT_BYTES])
        engine = await asyncio.to_thread(Engine, "read", tier.export(1), slot)
        assert engine.is_late
        tier.wait_event(engine.event)
        await write_all(tier, [slot], [b"\x22" * SLOT_BYTES])
        assert await asyncio.to_thread(engine.seen) == {0x11}
        assert await read_all(tier, [slot], [SLOT_BYTES]) == [b"\x22" * SLOT_BYTES]
        await tier.aclose()

    asyncio.run(use())


def test_a_dropped_slab_is_not_zeroed_while_an_engines_kernel_may_read_it(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier, one_tenant=True)
        await add_slabs(tier, 1)
        slot = slot_of(HBM, 1, 0)
        await write_all(tier, [slot], [b"\x11" * SLOT_BYTES])
        engine = await asyncio.to_thread(Engine, "read", tier.export(1), slot)
        assert engine.is_late
        tier.wait_event(engine.event)
        tier.drop_slab(1)
        await add_slabs(tier, 2)
        assert await asyncio.to_thread(engine.seen) == {0x11}
        await tier.aclose()

    asyncio.run(use())


def test_a_slab_that_is_exported_many_times_is_mapped_by_many(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier, one_tenant=True)
        await add_slabs(tier, 1, 2)
        slots = [slot_of(HBM, slab_id, 0) for slab_id in (1, 2, 1)]
        await write_all(tier, slots[:2], [b"\x01" * SLOT_BYTES, b"\x02" * SLOT_BYTES])
        ready = tier.ready_event()
        engines = [await asyncio.to_thread(Engine, "read", tier.export(slot.slab_id), slot, ready) for slot in slots]
        assert [await asyncio.to_thread(engine.seen) for engine in engines] == [{1}, {2}, {1}]
        await tier.aclose()

    asyncio.run(use())
