"""A file read and written by kvikio's CuFile: to and from memory of a GPU, by GPUDirect Storage where that works."""

import ctypes
import errno
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kvstore.diskblock import ALIGN
from kvstore.tiers.posix_file import (
    NO_DIRECT_IO,
    NO_HOLES,
    BlockBuffer,
    check_range,
    host_view,
    name_of,
    punch_hole,
)

DRIVER = "libcuda.so.1"
THREADS = 8  # of kvikio's one pool, that all files share; it starts with one
NUMBERS = {os.strerror(number): number for number in errno.errorcode}


@dataclass(frozen=True, slots=True)
class Kvikio:
    """What this process has of kvikio. `module` is None where it cannot be used, and `reason` says why."""

    module: Any | None
    has_gds: bool
    reason: str


@cache
def load_kvikio() -> Kvikio:
    """Import kvikio and try it, once: it imports well on machines where its first read then fails.

    Sets kvikio's defaults of this process: enough threads, and O_DIRECT both ways. May take a second.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return Kvikio(None, False, f"no CUDA driver: {DRIVER} not found")
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except ModuleNotFoundError as error:
        missing = "" if error.name == "kvikio" else f" in full ({error.name} is missing)"
        return Kvikio(None, False, f"kvikio not installed{missing}: pip install 'cairn-kv[gds]'")
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: it does not find libcufile
        return Kvikio(None, False, f"kvikio cannot be loaded: {_first_line(error)}")
    try:
        kvikio.defaults.set(
            {
                "num_threads": max(THREADS, kvikio.defaults.get("num_threads")),
                "auto_direct_io_read": True,
                "auto_direct_io_write": True,
            }
        )
        _try_it(kvikio)
        if kvikio.defaults.is_compat_mode_preferred():
            return Kvikio(kvikio, False, "a CUDA driver, and no cuFile for it: kvikio's POSIX path")
        if not kvikio.cufile_driver.get("is_gds_available"):
            return Kvikio(kvikio, False, "a CUDA driver, and GPUDirect Storage not loaded: kvikio's POSIX path")
    except (OSError, RuntimeError) as error:
        return Kvikio(None, False, f"kvikio does not work with this CUDA driver: {_first_line(error)}")
    return Kvikio(kvikio, True, "GPUDirect Storage")


class KvikioFile:
    """A BlockFile over a CuFile of a file that exists. kvikio opens it twice, with and without O_DIRECT."""

    path_name: Literal["kvikio-posix", "kvikio-gds"]

    def __init__(self, path: Path, kvikio: Kvikio) -> None:
        assert kvikio.module is not None
        self._makes_holes = True
        self.path_name = "kvikio-gds" if kvikio.has_gds else "kvikio-posix"
        try:
            self._file = kvikio.module.CuFile(path, "r+")
        except RuntimeError as error:
            raise _as_os_error(error, str(path)) from error

    def read(self, offset: int, buffers: Sequence[BlockBuffer]) -> None:
        self._move(self._file.pread, offset, [_sized(buffer, writable=True) for buffer in buffers])

    def write(self, offset: int, buffers: Sequence[BlockBuffer]) -> None:
        self._move(self._file.pwrite, offset, [_sized(buffer, writable=False) for buffer in buffers])

    def reserve(self, size: int) -> None:
        check_range(0, size)
        os.posix_fallocate(self._file.fileno(), 0, size)

    def punch(self, offset: int, size: int) -> None:
        check_range(offset, size)
        self._makes_holes = punch_hole(self._file.fileno(), offset, size)

    def sync(self) -> None:
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def describe(self) -> dict[str, Any]:
        reasons = [] if self._file.is_direct_io_supported() else [NO_DIRECT_IO]
        if not self._makes_holes:
            reasons.append(NO_HOLES)
        return {"path": self.path_name, "reasons": reasons}

    def _move(self, submit: Callable[[Any, int, int], Any], offset: int, sized: list[tuple[Any, int]]) -> None:
        """Give all buffers to kvikio's threads, and return when none of them is in use, whatever failed."""
        assert offset % ALIGN == 0 <= offset, f"offset {offset} is no multiple of {ALIGN}"
        jobs: list[tuple[Any, int]] = []
        failures: list[RuntimeError] = []
        short = False
        try:
            for buffer, size in sized:
                jobs.append((submit(buffer, size, offset), size))
                offset += size
        except RuntimeError as error:
            failures.append(error)
        finally:
            for job, size in jobs:
                try:
                    short |= job.get() != size
                except RuntimeError as error:
                    failures.append(error)
        if failures:
            raise _as_os_error(failures[0], name_of(self._file.fileno())) from failures[0]
        if short:
            raise OSError(
                errno.EIO, f"the file ends, or takes no more, before byte {offset}", name_of(self._file.fileno())
            )


def _sized(buffer: BlockBuffer, *, writable: bool) -> tuple[Any, int]:
    """A buffer as kvikio takes it, and its bytes. kvikio itself would write into immutable memory."""
    if not hasattr(buffer, "__cuda_array_interface__"):
        view = host_view(buffer, writable=writable)
        return view, view.nbytes
    array = buffer.__cuda_array_interface__
    if array.get("strides") is not None:
        raise TypeError("memory of a GPU must be contiguous")
    _, is_readonly = array["data"]
    if writable and is_readonly:
        raise TypeError("cannot read into a read-only buffer")
    size = math.prod(array["shape"]) * int(array["typestr"][2:])
    assert size % ALIGN == 0 < size, f"a buffer of {size} bytes is no multiple of {ALIGN}"
    return buffer, size


def _try_it(kvikio: Any) -> None:
    """Write a page and read it, where no disk is needed. Raises RuntimeError with what kvikio has against it."""
    page, back = memoryview(os.urandom(ALIGN)), memoryview(bytearray(ALIGN))
    fd = os.memfd_create("cairn-kvikio", os.MFD_CLOEXEC)
    try:
        with kvikio.CuFile(f"/proc/self/fd/{fd}", "r+") as file:
            file.pwrite(page, ALIGN, 0).get()
            file.pread(back, ALIGN, 0).get()
    finally:
        os.close(fd)
    if back != page:
        raise RuntimeError("what was written is not what was read")


def _as_os_error(error: RuntimeError, name: str) -> OSError:
    """kvikio says what the system said at the end of its message, in words; EIO where it says something else."""
    number = NUMBERS.get(str(error).rsplit(": ", 1)[-1].strip(), errno.EIO)
    return OSError(number, _first_line(error), name)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
