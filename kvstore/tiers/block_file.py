"""The files of the NVMe tier: what they can do, and which of two ways this machine has to do it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from kvstore.durable import sync_folder
from kvstore.errors import ConfigError
from kvstore.tiers.kvikio_file import KvikioFile, load_kvikio
from kvstore.tiers.posix_file import BlockBuffer, PosixFile, check_range

PathName = Literal["posix", "posix-buffered", "kvikio-posix", "kvikio-gds"]
FileIo = Literal["auto", "posix", "kvikio"]


class BlockFile(Protocol):
    """One file of preallocated space. Every call blocks, lets other threads run meanwhile, and is for an I/O thread.

    Offsets and sizes are multiples of 4096 bytes, or it is an AssertionError. Any number of threads may read and write
    at once; ranges that overlap are the caller's to keep apart. What fails is an OSError with its errno; then the
    buffers of a read, and the range of a write, hold anything. A buffer that is not 4096-aligned in memory goes
    through a copy as large as itself.
    """

    @property
    def path_name(self) -> PathName:
        """The way that bytes take, for stats."""

    def read(self, offset: int, buffers: Sequence[BlockBuffer]) -> None:
        """Fill the buffers, each contiguous, one after the other from `offset`.

        Memory of a GPU must not be in use by a stream.

        Raises:
            OSError: EIO where the file ends before the last buffer is full.
            TypeError: memory of a GPU without kvikio, or a buffer that is read-only.
        """

    def write(self, offset: int, buffers: Sequence[BlockBuffer]) -> None:
        """Write the buffers one after the other from `offset`. Durable after `sync`, not before.

        Raises:
            OSError: ENOSPC, EIO, EROFS, and so on.
            TypeError: memory of a GPU without kvikio.
        """

    def reserve(self, size: int) -> None:
        """Have disk space for the first `size` bytes, so that writing there cannot find the disk full.

        Raises:
            OSError: ENOSPC.
        """

    def punch(self, offset: int, size: int) -> None:
        """Give the disk space of a range back; it reads as zeros, and the file's length stays.

        Where the filesystem cannot, nothing happens, and `describe` says so.
        """

    def sync(self) -> None:
        """Return when everything that was written is on the disk."""

    def close(self) -> None:
        """Nothing of it is in use, and nobody calls it again: the descriptor's number will be another file's."""

    def describe(self) -> dict[str, Any]:
        """`path`: as path_name; `reasons`: what this file cannot have, and why."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Which way `io="auto"` takes on this machine, and why, in words for an operator."""

    path_name: PathName
    reason: str


def probe() -> Probe:
    """Look for a CUDA driver, kvikio and GPUDirect Storage. The first call may take a second."""
    kvikio = load_kvikio()
    if kvikio.module is None:
        return Probe("posix", kvikio.reason)
    return Probe("kvikio-gds" if kvikio.has_gds else "kvikio-posix", kvikio.reason)


def probe_for(device: str) -> Probe:
    """Which way a node takes by itself whose HBM tier is on `device` ("cuda:0", "cpu"; "" without one), and why."""
    if not device.startswith("cuda"):
        return Probe("posix", "no tier on a GPU, and for host memory the POSIX calls are faster")
    found = probe()
    if found.path_name == "kvikio-posix":
        return Probe("posix", f"no way straight into the GPU ({found.reason}), and the POSIX calls are faster")
    return found


def open_block_file(path: Path, *, io: FileIo = "auto", create_bytes: int | None = None) -> BlockFile:
    """Open a file, or make one with `create_bytes` of disk space reserved; its name is durable then.

    Raises:
        ConfigError: kvikio is asked for and cannot be had; says what is missing.
        OSError: EEXIST when it should be made, ENOENT when not, ENOSPC, EMFILE, EROFS, and so on. A file that was
            made is gone again.
    """
    kvikio = load_kvikio() if io != "posix" else None
    if io == "kvikio" and (kvikio is None or kvikio.module is None):
        raise ConfigError(f"kvikio (the extra gds: pip install 'cairn-kv[gds]') cannot be used: {probe().reason}")
    if create_bytes is not None:
        _create(path, create_bytes)
    try:
        if kvikio is None or kvikio.module is None:
            return PosixFile(path)
        return KvikioFile(path, kvikio)
    except BaseException:
        if create_bytes is not None:
            os.unlink(path)
        raise


def _create(path: Path, size: int) -> None:
    check_range(0, size)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        sync_folder(path.parent)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
