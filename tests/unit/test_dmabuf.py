"""Memory of a GPU as dma-bufs, over a stub of the CUDA driver."""

import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.transport.rdma.dmabuf import export
from tests.stub.build import build_stub_driver

PAGE = 4096


class Allocated(NamedTuple):
    """`driver` is a path, so that no other test finds it as libcuda.so.1; `address` begins a page."""

    driver: str
    address: int
    size: int


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Allocated]:
    path = tmp_path_factory.mktemp("stub") / "stub.so"
    build_stub_driver(path)
    driver, address, size = ctypes.CDLL(str(path)), ctypes.c_uint64(), 8 * PAGE
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    yield Allocated(str(path), address.value, size)
    assert driver.cuMemFree_v2(address) == 0


def asked(fd: int) -> tuple[int, int]:
    """First byte and size, as the driver was asked for them. Closes `fd`."""
    try:
        return struct.unpack("QQ", os.pread(fd, 16, 0))
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("at", "size", "first_page", "pages"),
    [(0, 8 * PAGE, 0, 8), (0, 1, 0, 1), (100, 200, 0, 1), (PAGE - 1, 2, 0, 2), (2 * PAGE + 7, 3 * PAGE, 2, 4)],
)
def test_memory_anywhere_in_an_allocation_is_exported_in_whole_pages(gpu, at, size, first_page, pages):
    found = export(gpu.address + at, size, gpu.driver)
    assert found.offset == at - first_page * PAGE
    assert asked(found.fd) == (gpu.address + first_page * PAGE, pages * PAGE)


def test_more_than_was_allocated_is_refused(gpu):
    with pytest.raises(InvalidRequest, match="not within what CUDA allocated"):
        export(gpu.address + PAGE, gpu.size, gpu.driver)


def test_memory_of_the_host_is_refused(gpu):
    buffer = ctypes.create_string_buffer(PAGE)
    with pytest.raises(InvalidRequest, match="no memory of a GPU"):
        export(ctypes.addressof(buffer), PAGE, gpu.driver)


@pytest.mark.parametrize(("address", "size"), [(0, PAGE), (-PAGE, PAGE), (PAGE, 0), (PAGE, -1)])
def test_a_range_that_is_none_is_refused_before_there_is_a_driver(address, size):
    with pytest.raises(InvalidRequest):
        export(address, size, "/nowhere/libcuda.so.1")


def test_without_a_driver_the_reason_says_so():
    with pytest.raises(ConfigError, match="there is no CUDA driver"):
        export(PAGE, PAGE, "/nowhere/libcuda.so.1")


def test_a_driver_that_is_too_old_is_told_from_none():
    with pytest.raises(ConfigError, match=r"older than 11\.7"):
        export(PAGE, PAGE, "libc.so.6")


def test_a_gpu_without_dma_bufs_says_what_it_takes(tmp_path: Path):
    path = tmp_path / "stub.so"
    build_stub_driver(path, "-DDMA_BUF_SUPPORTED=0")
    driver, address = ctypes.CDLL(str(path)), ctypes.c_uint64()
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(PAGE)) == 0
    with pytest.raises(ConfigError, match="open kernel modules"):
        export(address.value, PAGE, str(path))
    assert driver.cuMemFree_v2(address) == 0


def test_no_descriptor_is_left_over_when_it_is_refused(gpu):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(InvalidRequest):
        export(gpu.address, gpu.size + 1, gpu.driver)
    assert os.listdir("/proc/self/fd") == before
