"""Slabs as files of a folder: preallocated, written past the page cache, given back as holes."""

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from errno import EINVAL, EMFILE
from pathlib import Path
from typing import Any

from kvstore.disk_queue import DiskQueue
from kvstore.durable import sync_folder
from kvstore.errors import ConfigError
from kvstore.tiers import TierSpec
from kvstore.tiers.block_file import BlockFile, FileIo, open_block_file
from kvstore.tiers.posix_file import BlockBuffer
from kvstore.types import Slot

SLABS = "slabs"  # the folder, in that of the tier
SUFFIX = ".slab"
PREPARED = "prepared.new"
DESCRIPTORS = 2  # of a slab at most: kvikio opens a file twice
MOST_DESCRIPTORS = 0.5  # of those that the process may have: memory and clients need some too


class NvmeTier:
    """`folder` holds nothing else. What reads and writes blocks, and is for the threads of `queue`."""

    def __init__(self, spec: TierSpec, folder: Path, queue: DiskQueue, *, io: FileIo) -> None:
        self.spec = spec
        self._folder = folder
        self._queue = queue
        self._io = io
        self._files: dict[int, BlockFile] = {}
        self._prepared: list[BlockFile] = []
        self._unnamed: set[int] = set()  # whose file's name may not survive a power loss yet
        self._punched: set[int] = set()  # whose disk space was given back since they were last written
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}") from error

    def existing(self) -> Iterator[int]:
        """Ids of the slabs that an earlier start left, whole ones only; other files are removed."""
        (self._folder / PREPARED).unlink(missing_ok=True)  # of a node that was killed
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path.stem.isdecimal() and path.stat().st_size == self.spec.slab_bytes:
                yield int(path.stem)
            else:
                path.unlink()

    def restore(self, slab_id: int) -> None:
        """Open the file of an earlier start. Raises OSError."""
        self._files[slab_id] = open_block_file(self._path(slab_id), io=self._io)

    def release(self, slab_id: int) -> None:
        """Close the file of a slab, and keep it."""
        self._files.pop(slab_id).close()

    def remove(self, slab_id: int) -> None:
        """Remove the file of an earlier start, which nobody opened."""
        assert slab_id not in self._files
        self._path(slab_id).unlink(missing_ok=True)

    async def prepare(self) -> None:
        """Raises OSError when there is no disk space, ConfigError when the way to the disk cannot be had."""

        def make() -> None:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            if DESCRIPTORS * len(self._files) >= MOST_DESCRIPTORS * limit:
                raise OSError(EMFILE, f"{DESCRIPTORS} descriptors a slab, of {limit} in all (see `ulimit -n`)")
            path = self._folder / PREPARED
            path.unlink(missing_ok=True)
            self._prepared.append(open_block_file(path, io=self._io, create_bytes=self.spec.slab_bytes))

        if not self._prepared:  # a caller that was cancelled left its file
            await self._queue.store(make)

    def adopt(self, slab_id: int) -> None:
        file = self._prepared.pop()
        try:
            (self._folder / PREPARED).rename(self._path(slab_id))
        except OSError:
            file.close()
            raise
        self._files[slab_id] = file
        self._unnamed.add(slab_id)

    def drop_slab(self, slab_id: int) -> None:
        self._files.pop(slab_id).close()
        self._punched.discard(slab_id)
        self._unnamed.discard(slab_id)
        with suppress(OSError):  # a disk that is gone or read-only keeps it; the next start removes it
            self._path(slab_id).unlink()

    def reaches_gpus(self, slab_id: int) -> bool:
        """Whether what lies in a slab can be read into memory of a GPU without passing through the host's."""
        file = self._files.get(slab_id)
        return file is not None and file.path_name == "kvikio-gds"

    def load(self, slot: Slot, buffers: Sequence[BlockBuffer]) -> None:
        """Fill the buffers, one after the other, from the start of a slot. Blocks. Raises OSError."""
        self._file(slot.slab_id).read(slot.offset, buffers)

    def save(self, slot: Slot, buffers: Sequence[BlockBuffer]) -> None:
        """Write the buffers, one after the other, from the start of a slot. Blocks. Raises OSError."""
        file = self._file(slot.slab_id)
        if slot.slab_id in self._unnamed:
            sync_folder(self._folder)
            self._unnamed.discard(slot.slab_id)
        if slot.slab_id in self._punched:
            file.reserve(self.spec.slab_bytes)
            self._punched.discard(slot.slab_id)
        file.write(slot.offset, buffers)

    def punch(self, slab_id: int) -> None:
        """Give the disk space of a slab back, whose slots nobody holds, until it is written again. Blocks."""
        self._punched.add(slab_id)
        self._file(slab_id).punch(0, self.spec.slab_bytes)

    async def aclose(self) -> None:
        for file in (*self._files.values(), *self._prepared):
            file.close()
        if self._prepared:
            with suppress(OSError):
                (self._folder / PREPARED).unlink()
        self._files.clear()
        self._prepared.clear()

    def describe(self) -> dict[str, Any]:
        told = [file.describe() for file in self._files.values()]
        return {
            "medium": "files",
            "folder": str(self._folder),
            "paths": sorted({row["path"] for row in told}),
            "reasons": sorted({reason for row in told for reason in row["reasons"]}),
            "slabs_ready": len(told),
            "slabs_punched": len(self._punched),
            "filesystem_free_bytes": self._free_bytes(),
        }

    def _free_bytes(self) -> int:
        try:
            stat = os.statvfs(self._folder)
        except OSError:
            return 0  # the folder or its disk is gone
        return stat.f_bavail * stat.f_frsize

    def _file(self, slab_id: int) -> BlockFile:
        file = self._files.get(slab_id)
        if file is None:
            raise OSError(EINVAL, f"slab {slab_id} is gone")
        return file

    def _path(self, slab_id: int) -> Path:
        return self._folder / f"{slab_id:010d}{SUFFIX}"
