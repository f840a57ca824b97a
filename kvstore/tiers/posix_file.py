"""A file read and written by preadv and pwritev, past the page cache where the filesystem allows it."""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from kvstore.copier import address_of, copy_bytes
from kvstore.diskblock import ALIGN
from kvstore.region import KEEP_SIZE, PUNCH_HOLE

MAX_BUFFERS = os.sysconf("SC_IOV_MAX")  # of one system call
MAX_BUSY = 16  # EAGAIN in a row before it is an error
NO_HOLES = "punch: the filesystem makes no holes; only deleting the file gives room back"
NO_DIRECT_IO = "the filesystem has no O_DIRECT: what is read and written passes through the page cache"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class DeviceArray(Protocol):
    """Memory of a GPU: a CUDA tensor of torch (as uint8, detached), an array of cupy."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


BlockBuffer: TypeAlias = memoryview | DeviceArray


def aligned_buffer(size: int) -> memoryview:
    """`size` bytes of zeros that begin at a page, for O_DIRECT without a copy."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def host_view(buffer: BlockBuffer, *, writable: bool) -> memoryview:
    """The bytes of a buffer of host memory.

    Raises:
        TypeError: it is memory of a GPU, not contiguous, or read-only and must be written.
    """
    if not isinstance(buffer, memoryview):
        raise TypeError(f"a POSIX call takes host memory as a memoryview, and not {type(buffer).__name__}")
    if writable and buffer.readonly:
        raise TypeError("cannot read into a read-only buffer")
    view = buffer.cast("B")
    assert view.nbytes % ALIGN == 0 < view.nbytes, f"a buffer of {view.nbytes} bytes is no multiple of {ALIGN}"
    return view


def check_range(offset: int, size: int) -> None:
    assert offset % ALIGN == 0 <= offset, f"offset {offset} is no multiple of {ALIGN}"
    assert size % ALIGN == 0 < size, f"size {size} is no multiple of {ALIGN}"


def punch_hole(fd: int, offset: int, size: int) -> bool:
    """Give the disk space of a range back; it reads as zeros. False when the filesystem makes no holes."""
    while _libc.fallocate(fd, KEEP_SIZE | PUNCH_HOLE, offset, size):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if number != errno.EINTR:
            raise OSError(number, f"cannot punch a hole: {os.strerror(number)}")
    return True


def name_of(fd: int) -> str:
    """Where an open file is by now, for error messages: slabs are renamed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "a file that is closed"


class PosixFile:
    """A BlockFile over one descriptor of a file that exists. `direct=False` does not even try O_DIRECT."""

    path_name: Literal["posix", "posix-buffered"]

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self._makes_holes = True
        fd = _open_direct(path) if direct else None
        self.path_name = "posix-buffered" if fd is None else "posix"
        self._is_direct = fd is not None
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if fd is None else fd

    def read(self, offset: int, buffers: Sequence[BlockBuffer]) -> None:
        views = [host_view(buffer, writable=True) for buffer in buffers]
        targets = [view if self._takes(view) else aligned_buffer(view.nbytes) for view in views]
        self._move(os.preadv, offset, targets)
        for view, target in zip(views, targets, strict=True):
            if target is not view:
                copy_bytes(view, target)

    def write(self, offset: int, buffers: Sequence[BlockBuffer]) -> None:
        views = [host_view(buffer, writable=False) for buffer in buffers]
        self._move(os.pwritev, offset, [view if self._takes(view) else _aligned_copy(view) for view in views])

    def reserve(self, size: int) -> None:
        check_range(0, size)
        os.posix_fallocate(self._fd, 0, size)

    def punch(self, offset: int, size: int) -> None:
        check_range(offset, size)
        self._makes_holes = punch_hole(self._fd, offset, size)

    def sync(self) -> None:
        os.fdatasync(self._fd)
        if not self._is_direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def describe(self) -> dict[str, Any]:
        reasons = [] if self._is_direct else [NO_DIRECT_IO]
        if not self._makes_holes:
            reasons.append(NO_HOLES)
        return {"path": self.path_name, "reasons": reasons}

    def _takes(self, view: memoryview) -> bool:
        return not self._is_direct or address_of(view) % ALIGN == 0

    def _move(self, call: Callable[[int, list[memoryview], int], int], offset: int, views: list[memoryview]) -> None:
        """Call until every byte has moved: a call may move less, and ends at MAX_BUFFERS."""
        assert offset % ALIGN == 0 <= offset, f"offset {offset} is no multiple of {ALIGN}"
        start, busy = offset, 0
        while views:
            try:
                moved = call(self._fd, views[:MAX_BUFFERS], offset)
            except OSError as error:
                busy += 1
                if error.errno == errno.EAGAIN and busy < MAX_BUSY:
                    continue
                error.filename = name_of(self._fd)
                raise
            moved -= moved % ALIGN  # a file that ends inside a page; and O_DIRECT could not go on from there
            if not moved:
                raise OSError(errno.EIO, f"the file ends, or takes no more, at byte {offset}", name_of(self._fd))
            offset, busy = offset + moved, 0
            views = _after(views, moved)
        if not self._is_direct:
            os.posix_fadvise(self._fd, start, offset - start, os.POSIX_FADV_DONTNEED)


def _open_direct(path: Path) -> int | None:
    """A descriptor with O_DIRECT, or None: refused at once, or only when it is used."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    try:
        os.preadv(fd, [aligned_buffer(ALIGN)], 0)
    except OSError as error:  # anything else is a bad page, and the matter of who needs it
        if error.errno == errno.EINVAL:
            os.close(fd)
            return None
    return fd


def _aligned_copy(view: memoryview) -> memoryview:
    copy = aligned_buffer(view.nbytes)
    copy_bytes(copy, view)
    return copy


def _after(views: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of the views after their first `moved` bytes."""
    for index, view in enumerate(views):
        if moved < view.nbytes:
            return [view[moved:], *views[index + 1 :]] if moved else views[index:]
        moved -= view.nbytes
    return []
