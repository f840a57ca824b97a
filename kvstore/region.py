"""One stretch of addressable memory that processes on a host can share: a memfd and its mapping here.

The node makes regions; a client maps the same pages from a file descriptor that it was handed, read-only
unless it may write. Size is sealed: nobody can shrink a region under a reader's feet.
"""

import ctypes
import fcntl
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvstore.errors import ConfigError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
KEEP_SIZE, PUNCH_HOLE = 1, 2
HUGE_PAGE_BYTES = 2 << 20
SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; in Python's fcntl from 3.13 on
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class Backing:
    """What was asked of the kernel and what it gave; `reasons` says why something was not given."""

    huge_pages: bool
    locked: bool
    prefaulted: bool
    reasons: tuple[str, ...] = ()


class Region:
    """A mapping of `size` bytes at `address`. `view(offset, size)` is a memoryview into it, not a copy.

    `close` closes `fd` as well. Populate what has pages already: in a sparse memfd it would make them all.

    Raises:
        OSError: the kernel does not map it, or not writable.
        ValueError: the file has fewer bytes than `size`.
    """

    def __init__(self, fd: int, size: int, *, writable: bool, populate: bool) -> None:
        self.fd = fd
        self.size = size
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self.memory = mmap.mmap(fd, size, flags=flags, prot=protection)
        self.address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        self._view = memoryview(self.memory)

    def view(self, offset: int, size: int) -> memoryview:
        assert 0 <= offset <= offset + size <= self.size, (offset, size, self.size)
        return self._view[offset : offset + size]

    def readonly_fd(self) -> int:
        """A new descriptor of the same pages through which nobody can write. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def punch(self) -> None:
        """Give all pages back to the system at once, for every process that maps them; they read as zeros."""
        if _libc.fallocate(self.fd, KEEP_SIZE | PUNCH_HOLE, 0, self.size):
            raise OSError(ctypes.get_errno(), "cannot punch a hole into a memfd")

    def close(self) -> None:
        """Unmap, unless somebody still has a view into it; then the mapping goes with the last view."""
        fd, self.fd = self.fd, -1
        os.close(fd)
        self._view.release()
        memory = self.memory
        del self.memory
        with suppress(BufferError):
            memory.close()


def view_of(address: int, size: int) -> memoryview:
    """Memory at an address as writable bytes; whoever has it keeps it mapped."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def make_region(name: str, size: int, *, only_writer: bool = False) -> Region:
    """A new memfd of `size` bytes, all zeros and without pages yet.

    Other users cannot reopen its descriptors. With `only_writer` nobody can ever write to it but through the
    mapping that is returned, not even a process of this user that reopens a descriptor it was handed.
    """
    region = _make(name, size, 0)
    seals = SEALS | (SEAL_FUTURE_WRITE if only_writer else 0)
    fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
    return region


def _make(name: str, size: int, flags: int) -> Region:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        return Region(fd, size, writable=True, populate=False)
    except BaseException:
        os.close(fd)
        raise


def make_backed_region(name: str, size: int, *, huge_pages: str, mlock: str, prefault: bool) -> tuple[Region, Backing]:
    """A region for payloads. `huge_pages` and `mlock` are "no", "try" or "require".

    Blocks for about a second per GiB when it prefaults: call it in a thread. Releases the GIL.

    Raises:
        ConfigError: something is required and the kernel refuses it.
    """
    reasons: list[str] = []
    region = None
    if huge_pages != "no":
        region = _make_huge_region(name, size, reasons)
    huge = region is not None
    if region is None:
        if huge_pages == "require":
            raise ConfigError(f"huge pages are required and cannot be had: {reasons[-1]}")
        region = make_region(name, size)
    if prefault:
        ctypes.memset(region.address, 0, size)
    locked = False
    if mlock != "no":
        locked = _libc.mlock(region.address, size) == 0
        if not locked:
            reasons.append(f"mlock: {os.strerror(ctypes.get_errno())} (see `ulimit -l`)")
            if mlock == "require":
                region.close()
                raise ConfigError(f"memory must be locked and cannot be: {reasons[-1]}")
    return region, Backing(huge, locked, prefault, tuple(reasons))


def _make_huge_region(name: str, size: int, reasons: list[str]) -> Region | None:
    if size % HUGE_PAGE_BYTES:
        reasons.append(f"huge pages: a slab of {size} bytes is no multiple of {HUGE_PAGE_BYTES}")
        return None
    try:
        region = _make(name, size, os.MFD_HUGETLB)
    except OSError as error:
        reasons.append(f"huge pages: {error.strerror} (see /proc/sys/vm/nr_hugepages)")
        return None
    fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
    return region
