"""The contract of a block file over kvikio's real code, run by test_block_file.py where a CUDA driver can be loaded."""

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import kvikio.defaults
import pytest

from kvstore.diskblock import ALIGN
from kvstore.tiers.block_file import BlockFile, open_block_file, probe
from kvstore.tiers.kvikio_file import THREADS
from kvstore.tiers.posix_file import aligned_buffer
from tests.unit.test_block_file import (
    BlockFileContract,
    DeviceMemory,
    PastThePageCache,
    disk,
    filled,
    in_memory,
    read_bytes,
)

__all__ = ["TestKvikioFile", "disk", "in_memory"]  # the fixtures are the contract's

SIZE = 16 * ALIGN


class OnDevice:
    """Memory that the driver gave, and copies to and from it."""

    def __init__(self, size: int) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.size = size
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        assert self.driver.cuInit(0) == 0
        assert self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.driver.cuCtxSetCurrent(context) == 0
        assert self.driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        self.address = address.value

    def array(self, start: int, size: int) -> DeviceMemory:
        return DeviceMemory(self.address + start, size)

    def fill(self, content: bytes) -> None:
        assert self.driver.cuMemcpyHtoD_v2(ctypes.c_uint64(self.address), content, ctypes.c_size_t(len(content))) == 0

    def content(self) -> bytes:
        back = ctypes.create_string_buffer(self.size)
        assert self.driver.cuMemcpyDtoH_v2(back, ctypes.c_uint64(self.address), ctypes.c_size_t(self.size)) == 0
        return back.raw

    def free(self) -> None:
        assert self.driver.cuMemFree_v2(ctypes.c_uint64(self.address)) == 0


class TestKvikioFile(PastThePageCache, BlockFileContract):
    def open(self, path: Path) -> BlockFile:
        return open_block_file(path, io="kvikio")

    @pytest.fixture
    def device(self) -> Iterator[OnDevice]:
        device = OnDevice(SIZE)
        yield device
        device.free()

    def test_it_is_what_auto_takes(self, path: Path) -> None:
        file = open_block_file(path)
        assert file.path_name == probe().path_name
        assert file.path_name in ("kvikio-posix", "kvikio-gds")
        file.close()

    def test_kvikio_has_threads_for_all_who_read(self, file: BlockFile) -> None:
        assert kvikio.defaults.get("num_threads") >= THREADS

    def test_memory_of_a_gpu_beside_memory_of_the_host(self, file: BlockFile, device: OnDevice) -> None:
        content, header = os.urandom(SIZE), filled(ALIGN, by=16)
        device.fill(content)
        file.write(0, [header, device.array(0, SIZE)])
        assert read_bytes(file, 0, ALIGN + SIZE) == header.tobytes() + content
        device.fill(bytes(SIZE))
        file.read(2 * ALIGN, [device.array(ALIGN, 4 * ALIGN), device.array(8 * ALIGN, ALIGN)])
        expected = bytearray(SIZE)
        expected[ALIGN : 5 * ALIGN] = content[ALIGN : 5 * ALIGN]
        expected[8 * ALIGN : 9 * ALIGN] = content[5 * ALIGN : 6 * ALIGN]
        assert device.content() == expected

    def test_memory_of_a_gpu_past_the_end_of_the_file_is_an_error(self, file: BlockFile, device: OnDevice) -> None:
        with pytest.raises(OSError) as failed:
            file.read(256 * ALIGN - ALIGN, [aligned_buffer(ALIGN), device.array(0, SIZE)])
        assert failed.value.errno == errno.EIO

    def test_part_of_a_page_of_a_gpu_is_a_bug(self, file: BlockFile, device: OnDevice) -> None:
        with pytest.raises(AssertionError):
            file.read(0, [device.array(0, 512)])
