"""Straight loads through kvikio's real code into memory of a stub driver's device, run by test_straight.py."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.copier import Copier
from kvstore.tiers import TierSpec, hbm
from kvstore.tiers.block_file import BlockFile, open_block_file
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.posix_file import BlockBuffer
from kvstore.types import DRAM, HBM, NVME, Slot
from tests.faulty_file import Faults
from tests.stub.kvikio_contract import OnDevice
from tests.unit import test_straight
from tests.unit.test_block_file import DeviceMemory
from tests.unit.test_hbm import OneTensorPool
from tests.unit.test_lifting import keys_of
from tests.unit.test_straight import DiskRig

__all__ = ["rigged"]
rigged = test_straight.rigged


class StubPool(OneTensorPool):
    """A pool in memory of the driver's device, which torch sees as the host's."""

    def __init__(self, spec: TierSpec, device: Any, capacity_bytes: int) -> None:
        super().__init__(spec, device, 0)
        memory = OnDevice(capacity_bytes)
        array = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_ubyte * capacity_bytes).from_address(memory.address))
        self._pool = torch.from_numpy(array)


class StubHbm(hbm.HbmTier):
    async def buffers(self, places: Sequence[tuple[Slot, int]]) -> list[BlockBuffer]:
        tensors: list[Any] = await super().buffers(places)
        return [DeviceMemory(tensor.data_ptr(), tensor.numel()) for tensor in tensors]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Of none: the files are kvikio's own. Counts the reads into memory of the device."""
    monkeypatch.setitem(hbm.POOLS, "cuda", StubPool)
    monkeypatch.setattr(hbm, "HbmTier", StubHbm)
    monkeypatch.setattr(NvmeTier, "reaches_gpus", lambda self, slab_id: True)
    faults = Faults()
    load = NvmeTier.load

    def counted(self: NvmeTier, slot: Slot, buffers: Sequence[BlockBuffer]) -> None:
        if any(isinstance(buffer, DeviceMemory) for buffer in buffers):
            faults.next("read")
        load(self, slot, buffers)

    monkeypatch.setattr(NvmeTier, "load", counted)
    return faults


GPU = {"tiers.hbm.device": "cuda:0", "tiers.nvme.io": "kvikio"}


def test_blocks_come_from_the_disk_into_memory_of_the_device(rigged: Callable[..., None]) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 40)
        await rig.sink(space, keys)
        assert await rig.read_all(space, keys) == 40
        assert (rig.reads, rig.straight.loaded_blocks, rig.store.table.tiers[DRAM].used_bytes) == (40, 40, 0)
        disk = rig.store.below.disk
        assert disk is not None
        assert disk.medium.describe()["paths"] in (["kvikio-posix"], ["kvikio-gds"])

    rigged(use, **GPU)


def test_a_byte_that_is_another_is_found_in_memory_of_the_device(rigged: Callable[..., None], tmp_path: Path) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 3)
        await rig.sink(space, keys)
        assert space.nvme is not None
        slot = space.nvme.replicas[keys[1]].slot
        fd = os.open(tmp_path / "disk" / "slabs" / f"{slot.slab_id:010d}.slab", os.O_RDWR)
        assert os.pwrite(fd, b"\xff\xfe", slot.offset + 4096 + 30_000) == 2
        os.fsync(fd)
        os.close(fd)
        assert await rig.read_all(space, keys) == 1
        assert (rig.where(space, keys[1]), rig.where(space, keys[2])) == (set(), {HBM, NVME})
        assert rig.store.counters.corrupt_blocks == 1

    rigged(use, **GPU)


def test_a_file_that_ends_too_early_is_a_read_that_failed(rigged: Callable[..., None], tmp_path: Path) -> None:
    async def use(rig: DiskRig) -> None:
        space = rig.open()
        keys = keys_of(space, 3)
        await rig.sink(space, keys)
        assert space.nvme is not None
        last = max(keys, key=lambda key: space.nvme.replicas[key].slot.offset)  # type: ignore[union-attr]
        slot = space.nvme.replicas[last].slot
        os.truncate(tmp_path / "disk" / "slabs" / f"{slot.slab_id:010d}.slab", slot.offset + 8192)
        assert await rig.read_all(space, keys) == keys.index(last)
        assert not rig.straight.health.is_well
        assert all(HBM in rig.where(space, key) for key in keys if key != last)

    rigged(use, **GPU)


def test_the_device_is_given_whole_slots_in_place(tmp_path: Path) -> None:
    """What kvikio reads into a buffer of the tier is what the tier's streams find there."""
    hbm.POOLS["cuda"] = StubPool
    copier = Copier(2)
    path = tmp_path / "slab"
    content = os.urandom(8192)

    async def use() -> None:
        tier = StubHbm(TierSpec(HBM, 16_384), device="cuda:0", capacity_bytes=32_768, copier=copier)
        for slab_id in (1, 2):
            await tier.prepare()
            tier.adopt(slab_id)
        slot = Slot(HBM, 2, 4096, 8192, 1)
        file: BlockFile = open_block_file(path, io="kvikio", create_bytes=16_384)
        file.write(4096, [memoryview(bytearray(content))])
        file.read(4096, await tier.buffers([(slot, 8192)]))
        back = bytearray(8192)
        await tier.read([(slot, memoryview(back))])
        assert back == content
        file.close()
        await tier.aclose()

    asyncio.run(use())
    copier.close()
