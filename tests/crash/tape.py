"""A machine that may stop before any write: images of a folder as a killed process, and as a power loss, leave it.

While a `Tape` runs, each write to the folder first makes a copy of all that is there (the live image). What the disk
had not made durable by then is known too, page by page: a power loss leaves any mixture of old and new.
"""

import os
import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstore import records as records_module
from kvstore.diskblock import ALIGN, parse
from kvstore.ledger import Ledger, Record
from kvstore.tiers import nvme as nvme_module
from kvstore.tiers.block_file import BlockFile
from kvstore.types import BlockKey

ZEROS = bytes(ALIGN)


@dataclass
class Point:
    """The moment before one write. `durable`: the blocks that a killed process must have kept."""

    number: int
    name: str
    image: Path
    inodes: dict[str, int]  # of slab files by name
    synced_logs: dict[str, int]  # bytes of the ledger's write-ahead logs that are durable
    durable: frozenset[tuple[int, BlockKey]]
    torn: tuple[int, int, bytes] | None = None  # a data write under way: inode, offset, what it writes


@dataclass
class Pages:
    """What each page of a file held, with the number of the write that put it there."""

    versions: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    syncs: list[int] = field(default_factory=list)

    def write(self, number: int, offset: int, block: bytes) -> None:
        for start in range(0, len(block), ALIGN):
            page = self.versions.setdefault((offset + start) // ALIGN, [(-1, ZEROS)])
            page.append((number, block[start : start + ALIGN]))

    def possible(self, number: int) -> Iterator[tuple[int, list[bytes]]]:
        """What each page may hold if the power goes before write `number`; the last one is the newest."""
        synced = max((sync for sync in self.syncs if sync < number), default=-1)
        for page, versions in self.versions.items():
            before = [(made, block) for made, block in versions if made < number]
            first = max((place for place, (made, _) in enumerate(before) if made <= synced), default=0)
            yield page, [block for _, block in before[first:]]


class Tape:
    """Of what is written to the tier in `folder`. One write at a time; images lie in `images`."""

    def __init__(self, folder: Path, images: Path) -> None:
        self.folder = folder
        self.points: list[Point] = []
        self._images = images
        self._turn = threading.RLock()
        self._pages: dict[int, Pages] = {}
        self._slots: dict[tuple[int, int], tuple[BlockKey, int]] = {}  # (slab, index) -> what lies there whole
        self._recorded: dict[tuple[int, BlockKey], Record] = {}
        self._synced_logs: dict[str, int] = {}

    @contextmanager
    def writing(self, name: str, torn: tuple[int, int, bytes] | None = None) -> Iterator[int]:
        with self._turn:
            number = len(self.points)
            image = self._images / f"{number:04d}"
            shutil.copytree(self.folder, image)
            inodes = {path.name: path.stat().st_ino for path in self.folder.glob("slabs/*")}
            kept = frozenset(
                at for at, record in self._recorded.items()
                if self._slots.get((record.slab_id, record.slot_index)) == (record.key, record.generation)
            )  # fmt: skip
            self.points.append(Point(number, name, image, inodes, dict(self._synced_logs), kept, torn))
            yield number

    def made(self, inode: int) -> None:
        self._pages[inode] = Pages()

    def found(self, inode: int) -> None:
        """A file of before the tape, all of it durable: what it held is lost with the page, if that is written."""
        self._pages.setdefault(inode, Pages())

    def write(self, inode: int, file: BlockFile, offset: int, buffers: Sequence[Any]) -> None:
        block = b"".join(buffers)
        header = parse(block)
        assert header is not None
        place = (header.slab_id, header.slot_index)
        with self._turn:
            self._slots.pop(place, None)  # half overwritten from here on
            with self.writing("data", (inode, offset, block)) as number:
                file.write(offset, buffers)
                self._pages[inode].write(number, offset, block)
            self._slots[place] = (header.key, header.generation)

    def punch(self, inode: int, file: BlockFile, offset: int, size: int) -> None:
        with self.writing("punch") as number:
            slab_id = next(int(p.stem) for p in self.folder.glob("slabs/*.slab") if p.stat().st_ino == inode)
            self._forget(slab_id)
            file.punch(offset, size)
            self._pages[inode].write(number, offset, bytes(size))

    def sync(self, inode: int, file: BlockFile) -> None:
        with self._turn:
            file.sync()
            self._pages[inode].syncs.append(len(self.points) - 1)

    def removed(self, slab_id: int) -> None:
        self._forget(slab_id)

    def told(self, puts: Sequence[Record], deletes: Sequence[tuple[int, bytes]]) -> None:
        for number, key in deletes:
            self._recorded.pop((number, BlockKey(key)), None)
        self._recorded.update({(record.number, record.key): record for record in puts})

    def ledger_synced(self) -> None:
        self._synced_logs = {path.name: path.stat().st_size for path in self.folder.glob("ledger/*.log")}

    def _forget(self, slab_id: int) -> None:
        for place in [place for place in self._slots if place[0] == slab_id]:
            del self._slots[place]

    # Images.

    def killed(self, point: Point, target: Path, rng: random.Random) -> None:
        """The folder as it was; a write under way has come as far as chance has it."""
        shutil.copytree(point.image, target)
        if point.torn is not None:
            inode, offset, block = point.torn
            name = next(name for name, number in point.inodes.items() if number == inode)
            with (target / "slabs" / name).open("r+b") as file:
                file.seek(offset)
                file.write(block[: rng.randrange(len(block) // ALIGN + 1) * ALIGN])

    def powerless(self, point: Point, target: Path, rng: random.Random) -> None:
        """The folder as a power loss leaves it: of what was not synced, anything may be missing."""
        self.killed(point, target, rng)
        loss = rng.choice((0.05, 0.3, 1.0))
        for name, inode in point.inodes.items():
            with (target / "slabs" / name).open("r+b") as file:
                for page, possible in self._pages.get(inode, Pages()).possible(point.number):
                    if rng.random() < loss:
                        file.seek(page * ALIGN)
                        file.write(rng.choice(possible))
        for log in target.glob("ledger/*.log"):
            size = log.stat().st_size
            os.truncate(log, rng.randint(min(point.synced_logs.get(log.name, 0), size), size))
        slabs = sorted(target.glob("slabs/*.slab"))
        if slabs and rng.random() < 0.2 and not (target / "slabs" / nvme_module.PREPARED).exists():
            slabs[-1].rename(target / "slabs" / nvme_module.PREPARED)  # its name was not durable yet


class TapedFile:
    """A BlockFile whose writes are on the tape."""

    def __init__(self, tape: Tape, file: BlockFile, inode: int) -> None:
        self._tape, self._file, self._inode = tape, file, inode
        self.path_name = file.path_name
        self.read, self.reserve, self.close, self.describe = file.read, file.reserve, file.close, file.describe

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        self._tape.write(self._inode, self._file, offset, buffers)

    def punch(self, offset: int, size: int) -> None:
        self._tape.punch(self._inode, self._file, offset, size)

    def sync(self) -> None:
        self._tape.sync(self._inode, self._file)


@contextmanager
def taped(folder: Path, images: Path) -> Iterator[Tape]:
    """While it lasts, all that is written to the tier in `folder` is on the tape."""
    tape = Tape(folder, images)
    open_file, write_durably = nvme_module.open_block_file, records_module._write_durably

    def open_taped(path: Path, *, io: Any = "auto", create_bytes: int | None = None) -> TapedFile:
        if create_bytes is None:
            tape.found(path.stat().st_ino)
            return TapedFile(tape, open_file(path, io=io), path.stat().st_ino)
        with tape.writing("slab"):
            file = open_file(path, io=io, create_bytes=create_bytes)
            tape.made(path.stat().st_ino)
        return TapedFile(tape, file, path.stat().st_ino)

    def write_taped(path: Path, content: bytes) -> None:
        with tape.writing("namespaces"):
            write_durably(path, content)

    class TapedTier(nvme_module.NvmeTier):
        def adopt(self, slab_id: int) -> None:
            with tape.writing("rename"):
                super().adopt(slab_id)

        def drop_slab(self, slab_id: int) -> None:
            with tape.writing("unlink"):
                tape.removed(slab_id)
                super().drop_slab(slab_id)

        def remove(self, slab_id: int) -> None:
            with tape.writing("unlink"):
                tape.removed(slab_id)
                super().remove(slab_id)

    class TapedLedger(Ledger):
        def apply(self, puts: Sequence[Record], deletes: Sequence[tuple[int, bytes]] = ()) -> None:
            with tape.writing("records"):
                super().apply(puts, deletes)
                tape.told(puts, deletes)

        def put_slab(self, slab_id: int, tenant: str, slot_bytes: int) -> None:
            with tape.writing("slab record"):
                super().put_slab(slab_id, tenant, slot_bytes)

        def sync(self) -> None:
            with tape.writing("sync"):
                super().sync()
                tape.ledger_synced()

        def close(self, *, is_whole: bool = True) -> None:
            with tape.writing("close"):
                super().close(is_whole=is_whole)
                tape.ledger_synced()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_module, "open_block_file", open_taped)
        patch.setattr(records_module, "_write_durably", write_taped)
        patch.setattr(records_module, "Ledger", TapedLedger)
        patch.setattr("server.assembly.NvmeTier", TapedTier)
        yield tape
