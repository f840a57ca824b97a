"""Regions: shared pages, who may write to them, and what the kernel refuses."""

import ctypes
import fcntl
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.region import HUGE_PAGE_BYTES, Region, make_backed_region, make_region

REPO = Path(__file__).parents[2]
SIZE = 1 << 20
PAGE = mmap.PAGESIZE
NOBODY = 65534


@pytest.fixture
def region() -> Iterator[Region]:
    made = make_region("cairn-test", SIZE)
    yield made
    if made.fd >= 0:
        made.close()


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def is_mapped(name: str) -> bool:
    return f"/memfd:{name} " in Path("/proc/self/maps").read_text()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Sharing.


def test_a_new_region_is_zeros_without_pages(region: Region) -> None:
    assert resident_bytes(region.fd) == 0
    assert bytes(region.view(0, SIZE)) == bytes(SIZE)


def test_what_is_written_is_seen_through_every_mapping(region: Region) -> None:
    reader = Region(region.readonly_fd(), SIZE, writable=False, populate=True)
    region.view(4096, 5)[:] = b"cairn"
    assert bytes(reader.view(4096, 5)) == b"cairn"
    assert ctypes.string_at(reader.address + 4096, 5) == b"cairn"
    assert reader.memory[4096:4101] == b"cairn"
    reader.close()


def test_a_view_is_no_copy_and_stays_within_its_region(region: Region) -> None:
    whole, tail = region.view(0, SIZE), region.view(SIZE - 8, 8)
    tail[:] = b"12345678"
    assert bytes(whole[-8:]) == b"12345678"
    assert len(region.view(SIZE, 0)) == 0
    for offset, size in [(-1, 1), (0, SIZE + 1), (SIZE - 8, 9), (SIZE + 1, 0), (8, -4)]:
        with pytest.raises(AssertionError):
            region.view(offset, size)


def test_a_smaller_file_than_promised_is_not_mapped(region: Region) -> None:
    with pytest.raises(ValueError):
        Region(region.fd, SIZE + PAGE, writable=False, populate=False)


# Who may do what.


@pytest.mark.parametrize("size", [0, SIZE // 2, 2 * SIZE])
def test_nobody_can_change_its_size(region: Region, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, size)


def test_nobody_can_seal_it_further(region: Region) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_read_only_descriptor_cannot_be_written_or_mapped_writable(region: Region) -> None:
    fd = region.readonly_fd()
    try:
        assert not os.get_inheritable(fd)
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            Region(fd, SIZE, writable=True, populate=False)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        reader = Region(os.dup(fd), SIZE, writable=False, populate=False)
        with pytest.raises(TypeError):
            reader.view(0, 1)[:] = b"x"
        with pytest.raises(TypeError):
            reader.memory[0:1] = b"x"
        reader.close()
    finally:
        os.close(fd)


def test_a_read_only_mapping_cannot_be_made_writable(region: Region) -> None:
    reader = Region(region.readonly_fd(), SIZE, writable=False, populate=False)
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.mprotect(ctypes.c_void_p(reader.address), ctypes.c_size_t(SIZE), mmap.PROT_READ | mmap.PROT_WRITE)
    assert refused == -1
    reader.close()


def test_what_has_one_writer_cannot_be_written_even_by_reopening_a_descriptor() -> None:
    region = make_region("cairn-test", SIZE, only_writer=True)
    fd = os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR | os.O_CLOEXEC)
    with pytest.raises(PermissionError):
        Region(fd, SIZE, writable=True, populate=False)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    region.view(0, 1)[:] = b"y"
    reader = Region(fd, SIZE, writable=False, populate=False)
    assert bytes(reader.view(0, 1)) == b"y"
    reader.close()
    region.close()


REOPEN = f"""
import os, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
for mode in os.O_RDWR, os.O_RDONLY:
    try:
        os.open(f"/proc/self/fd/{{sys.argv[1]}}", mode)
    except PermissionError:
        print("refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_cannot_reopen_a_descriptor_that_it_was_handed(region: Region) -> None:
    command = [sys.executable, "-c", REOPEN, str(region.fd)]
    done = subprocess.run(command, pass_fds=[region.fd], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["refused", "refused"]


# Pages.


def test_a_punched_region_is_zeros_for_all_who_map_it_and_holds_no_pages(region: Region) -> None:
    reader = Region(region.readonly_fd(), SIZE, writable=False, populate=True)
    view = reader.view(0, SIZE)
    region.view(0, SIZE)[:] = b"\xaa" * SIZE
    assert resident_bytes(region.fd) == SIZE
    region.punch()
    assert resident_bytes(region.fd) == 0
    assert bytes(view) == bytes(SIZE)
    assert not any(region.view(0, SIZE))
    reader.close()
    view.release()


def test_a_punch_that_fails_is_an_error(region: Region) -> None:
    reader = Region(region.readonly_fd(), SIZE, writable=False, populate=False)
    with pytest.raises(OSError, match="cannot punch"):
        reader.punch()
    reader.close()


def test_a_region_that_is_prefaulted_has_its_pages() -> None:
    region, backing = make_backed_region("cairn-test", SIZE, huge_pages="no", mlock="no", prefault=True)
    assert (backing.prefaulted, backing.locked, backing.huge_pages, backing.reasons) == (True, False, False, ())
    assert resident_bytes(region.fd) == SIZE
    region.close()


# The end.


def test_a_closed_region_is_unmapped_and_its_descriptors_are_closed() -> None:
    before = open_descriptors()
    region = make_region("cairn-closed", SIZE)
    view = region.view(0, 8)
    view.release()
    region.close()
    assert open_descriptors() == before
    assert not is_mapped("cairn-closed")


def test_views_outlive_the_region_and_the_mapping_goes_with_the_last() -> None:
    region = make_region("cairn-viewed", SIZE)
    region.view(16, 4)[:] = b"live"
    view = region.view(16, 4)
    array = np.frombuffer(region.view(0, 32), np.uint8)
    region.close()
    assert bytes(view) == b"live"
    assert bytes(array[16:20]) == b"live"
    view.release()
    assert is_mapped("cairn-viewed")
    del array
    assert not is_mapped("cairn-viewed")


def test_a_second_close_closes_nobody_elses_descriptor() -> None:
    region = make_region("cairn-test", SIZE)
    region.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        region.close()


def test_a_region_that_cannot_be_made_leaves_no_descriptor() -> None:
    before = open_descriptors()
    with pytest.raises((OSError, ValueError, OverflowError)):
        make_region("cairn-test", 1 << 62)
    with pytest.raises((OSError, ValueError)):
        make_region("cairn-test", 0)
    assert open_descriptors() == before


# What the kernel may refuse.


def test_huge_pages_for_a_slab_of_another_size_are_refused_with_a_reason() -> None:
    region, backing = make_backed_region("cairn-test", SIZE, huge_pages="try", mlock="no", prefault=False)
    assert not backing.huge_pages
    assert [reason.partition(":")[0] for reason in backing.reasons] == ["huge pages"]
    region.view(0, 1)[:] = b"x"
    region.close()


def test_huge_pages_are_had_or_the_reason_is_told() -> None:
    size = HUGE_PAGE_BYTES
    region, backing = make_backed_region("cairn-huge", size, huge_pages="try", mlock="no", prefault=True)
    assert backing.huge_pages == (not backing.reasons)
    assert all("nr_hugepages" in reason for reason in backing.reasons)
    region.view(size - 1, 1)[:] = b"x"
    region.punch()
    assert bytes(region.view(size - 1, 1)) == b"\0"
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 2 * size)
    region.close()


def test_required_huge_pages_that_cannot_be_had_end_the_start() -> None:
    before = open_descriptors()
    with pytest.raises(ConfigError, match="huge pages are required and cannot be had: huge pages: a slab of 1048576"):
        make_backed_region("cairn-test", SIZE, huge_pages="require", mlock="no", prefault=False)
    assert open_descriptors() == before


def test_memory_that_may_be_locked_is_locked() -> None:
    size = 64 << 10
    region, backing = make_backed_region("cairn-test", size, huge_pages="no", mlock="try", prefault=False)
    assert backing.locked == (not backing.reasons)
    if backing.locked:
        assert resident_bytes(region.fd) == size
        region.punch()
        assert resident_bytes(region.fd) == 0
    region.close()


LOCKED_OUT = f"""
import os, resource
from kvstore.errors import ConfigError
from kvstore.region import make_backed_region
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
if os.geteuid() == 0:
    os.setuid({NOBODY})
region, backing = make_backed_region("cairn-test", {SIZE}, huge_pages="no", mlock="try", prefault=False)
assert not backing.locked
print(*backing.reasons)
region.close()
before = len(os.listdir("/proc/self/fd"))
try:
    make_backed_region("cairn-test", {SIZE}, huge_pages="no", mlock="require", prefault=False)
except ConfigError as error:
    print(error)
assert len(os.listdir("/proc/self/fd")) == before
"""


def test_memory_that_may_not_be_locked_is_said_to_be_or_ends_the_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCKED_OUT], cwd=REPO, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    tried, required = done.stdout.splitlines()
    assert tried.startswith("mlock: ")
    assert "ulimit -l" in tried
    assert required == f"memory must be locked and cannot be: {tried}"


def test_the_limit_on_descriptors_is_met_without_a_leak() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))  # room for the memfd, and none for its mapping's
    try:
        with pytest.raises(OSError, match="Too many open files"):
            make_region("cairn-test", PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_descriptors() == before
