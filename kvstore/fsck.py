"""Fsck of an NVMe tier whose node does not run: do ledger, slab files and the blocks' headers agree?

A node needs none of this: it believes nothing that it finds. What is mended here is what it would lose, or drop one by
one when it is asked for it.
"""

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from mmap import mmap
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.copier import checksum
from kvstore.disk import disk_stride
from kvstore.diskblock import ALIGN, BlockHeader, padded, parse
from kvstore.errors import ConfigError
from kvstore.ledger import ROW, Ledger, Marks, Record, Rows, records, set_aside
from kvstore.records import LEDGER, NAMESPACES, read_namespaces
from kvstore.salvage import group_of, headers, is_at_home
from kvstore.tiers.nvme import SLABS, SUFFIX
from kvstore.tiers.posix_file import PosixFile
from kvstore.types import GroupKey

LATE_MS = 5_000  # after a crash, a block written as long before the newest record may have none yet

UNKNOWN = "records of namespaces that nobody knows"
MISFIT = "records that do not fit into their slab"
SHARED = "records in a slot that is another's"
NO_DATA = "records whose slot does not have their block"
DAMAGED = "blocks whose payload is damaged"
UNINDEXED = "blocks that no record leads to"

Progress = Callable[[int, int], None]
"""Hears of (slabs done, slabs in all)."""


class Owner(NamedTuple):
    """Whose the blocks of a namespace are."""

    number: int
    root: bytes
    tenant: str


@dataclass(slots=True)
class Counts:
    """What was looked at, and what became of it. `problems` by their kind; `mended`: records and files changed."""

    slabs: int = 0
    records: int = 0
    good: int = 0  # records whose block is where they say
    problems: Counter[str] = field(default_factory=Counter)
    mended: int = 0


@dataclass(slots=True)
class Verdict:
    """Of one slab: what of its records holds, what not and why, and which blocks have no record."""

    good: list[Record] = field(default_factory=list)
    bad: list[tuple[str, Record]] = field(default_factory=list)
    unindexed: list[Record] = field(default_factory=list)


class Fsck:
    """One look at the tier in `folder`; `deep` reads the payloads too. Only `repair` changes what is there."""

    def __init__(self, folder: Path, *, deep: bool, repair: bool) -> None:
        self._folder = folder
        self._deep = deep
        self._repair = repair
        self._by_number: dict[int, Owner] = {}
        self._by_root: dict[bytes, Owner] = {}
        self._groups: dict[int, GroupKey] = {}
        self._slab_bytes = 0
        self._late_ms: int | None = None  # blocks written since may have no record; None: all have one
        self.counts = Counts()

    def run(self, progress: Progress = lambda done, total: None) -> Iterator[str]:
        """Say what is wrong, a sentence each: at most one for each slab and kind of problem.

        ConfigError if a node runs there, or if it is no NVMe tier or one of another format version.
        """
        if not (self._folder / SLABS).is_dir():
            raise ConfigError(f"{self._folder} has no NVMe tier: there is no folder {SLABS}")
        try:
            rows_of_namespaces = read_namespaces(self._folder)
        except OSError as error:
            raise ConfigError(f"{self._folder / NAMESPACES} cannot be read: {error}") from error
        for row in rows_of_namespaces:
            self._take_namespace(row)
        ledger, flaw = self._open()
        if flaw:
            yield self._problem("ledgers that cannot be read", flaw)
        try:
            rows = np.concatenate([np.zeros(0, ROW), *(ledger.scan() if ledger is not None else [])])
            self.counts.records = len(rows)
            if len(rows) and not self._by_number:
                yield self._problem(UNKNOWN, f"{NAMESPACES} is lost or damaged, nobody knows whose the blocks are")
                return
            yield from self._check(ledger, rows, progress)
        finally:
            if ledger is not None:
                ledger.close(is_whole=ledger.was_clean or self._repair)

    def _problem(self, kind: str, sentence: str, count: int = 1) -> str:
        self.counts.problems[kind] += count
        return sentence

    def _take_namespace(self, row: Mapping[str, Any]) -> None:
        try:
            owner = Owner(int(row["number"]), bytes.fromhex(row["root"]), str(row["tenant"]))
        except (KeyError, TypeError, ValueError):
            return  # its blocks are those of nobody
        self._by_number[owner.number] = self._by_root[owner.root] = owner

    def _open(self) -> tuple[Ledger | None, str]:
        """The ledger, and what is wrong with it. None when there is none to read, and none shall be made."""
        path = self._folder / LEDGER
        if not path.is_dir() or not any(path.iterdir()):
            flaw = "there is no ledger"
        else:
            try:
                return self._opened(path), ""
            except OSError as error:
                if error.errno != errno.EIO:
                    raise ConfigError(f"{path}: {error}") from error
                flaw = f"the ledger is damaged: {error}"
        self._late_ms = 0
        if not self._repair:
            return None, flaw
        if path.is_dir() and any(path.iterdir()):
            set_aside(path)
        self.counts.mended += 1
        return Ledger(path), flaw

    def _opened(self, path: Path) -> Ledger:
        """The ledger, which can be read from its beginning to its end."""
        ledger = Ledger(path, create=False)
        try:
            newest = max((int(rows["last_use_ms"].max()) for rows in ledger.scan()), default=0)
            self._groups = ledger.slabs()
        except OSError:
            ledger.close(is_whole=False)
            raise
        if not ledger.was_clean:
            self._late_ms = max(newest - LATE_MS, 0)
        return ledger

    def _check(self, ledger: Ledger | None, rows: Rows, progress: Progress) -> Iterator[str]:
        marks = ledger.marks() if ledger is not None else Marks()
        files, strays = self._files(marks)
        for path in strays:
            yield self._problem("stray files", f"{path.name} is no whole slab")
            self._mend(path.unlink)
        rows = rows[np.argsort(rows["slab_id"], kind="stable")]
        slab_ids = sorted({*files, *map(int, np.unique(rows["slab_id"]))})
        for done, slab_id in enumerate(slab_ids):
            progress(done, len(slab_ids))
            first, last = (int(np.searchsorted(rows["slab_id"], slab_id, side)) for side in ("left", "right"))
            yield from self._check_slab(ledger, slab_id, files.get(slab_id), records(rows[first:last]))
        progress(len(slab_ids), len(slab_ids))
        self.counts.slabs = len(files)
        if ledger is not None and self._repair:
            ledger.delete_slabs(self._groups.keys() - files.keys())
            if not marks.slab_bytes and self._slab_bytes:
                ledger.put_marks(marks._replace(slab_bytes=self._slab_bytes))

    def _files(self, marks: Marks) -> tuple[dict[int, Path], list[Path]]:
        """The whole slab files by id, and what else lies beside them."""
        sizes = {path: path.stat().st_size for path in sorted((self._folder / SLABS).iterdir())}
        slabs = {path: size for path, size in sizes.items() if path.suffix == SUFFIX and path.stem.isdecimal()}
        common = Counter(slabs.values()).most_common(1)
        self._slab_bytes = marks.slab_bytes or (common[0][0] if common else 0)
        files = {int(path.stem): path for path, size in slabs.items() if size == self._slab_bytes}
        return files, [path for path in sizes if path not in files.values()]

    def _check_slab(self, ledger: Ledger | None, slab_id: int, path: Path | None, its: list[Record]) -> Iterator[str]:
        group = self._groups.get(slab_id)
        verdict = Verdict(bad=[(NO_DATA, record) for record in its])
        if path is not None:
            try:
                with closing(OpenSlab(slab_id, path, self._slab_bytes)) as slab:
                    group = group or self._group_by_headers(slab)
                    verdict = self._judge(slab, group, its) if group else Verdict(bad=[(MISFIT, it) for it in its])
            except OSError as error:
                yield self._problem("slabs that cannot be read", f"slab {slab_id} cannot be read: {error}")
                return
            if ledger is not None:
                verdict.unindexed = [it for it in verdict.unindexed if ledger.get(it.number, it.key) is None]
        self.counts.good += len(verdict.good)
        problems = [*verdict.bad, *((UNINDEXED, record) for record in verdict.unindexed)]
        for kind, count in Counter(kind for kind, _ in problems).items():
            first = next(record for found, record in problems if found == kind)
            sentence = f"slab {slab_id}: {count} {kind}, the first {first.key.hex()} in slot {first.slot_index}"
            yield self._problem(kind, sentence if path is not None else f"{sentence}: its file is gone", count)
        if problems and ledger is not None and self._repair:
            if path is not None and group is not None and slab_id not in self._groups:
                ledger.put_slab(slab_id, str(group.tenant), group.slot_bytes)
            ledger.apply(verdict.unindexed, [(record.number, record.key) for _, record in verdict.bad])
            self.counts.mended += len(problems)

    def _group_by_headers(self, slab: "OpenSlab") -> GroupKey | None:
        """What a slab without a record was cut for, if it can have blocks at all."""
        if self._late_ms is None or not slab.has_data():
            return None
        found = list(headers(slab.read, slab.slab_id, self._slab_bytes))
        return group_of(found, {root: owner.tenant for root, owner in self._by_root.items()})

    def _judge(self, slab: "OpenSlab", group: GroupKey, its: Iterable[Record]) -> Verdict:
        verdict = Verdict()
        taken: dict[int, Record] = {}
        for record in sorted(its, key=attrgetter("generation")):
            flaw = self._misfit(record, group)
            if flaw:
                verdict.bad.append((flaw, record))
                continue
            earlier = taken.get(record.slot_index)
            if earlier is not None:
                verdict.bad.append((SHARED, earlier))
            taken[record.slot_index] = record
        slots = range(self._slab_bytes // group.slot_bytes) if self._late_ms is not None else sorted(taken)
        for index in slots:
            offset = index * group.slot_bytes
            header, claim = slab.header(offset), taken.get(index)
            found = self._record_of(header) if header is not None else None
            if claim is not None and found is not None and self._is_same(claim, found):
                if self._deep and not slab.has_payload(offset, claim):
                    verdict.bad.append((DAMAGED, claim))
                else:
                    verdict.good.append(claim)
                continue
            if claim is not None:
                verdict.bad.append((NO_DATA, claim))
            if header is not None and found is not None and self._is_late(header, slab, offset, group):
                verdict.unindexed.append(found)
        return verdict

    def _misfit(self, record: Record, group: GroupKey) -> str:
        owner = self._by_number.get(record.number)
        if owner is None:
            return UNKNOWN
        fits = record.size > 0 and GroupKey(owner.tenant, disk_stride(record.size)) == group
        return "" if fits and record.slot_index < self._slab_bytes // group.slot_bytes else MISFIT

    def _record_of(self, header: BlockHeader) -> Record | None:
        """As the ledger would have it; None for a namespace that nobody knows."""
        owner = self._by_root.get(header.root)
        if owner is None:
            return None
        return Record(
            *(owner.number, header.key, header.parent, header.slab_id, header.slot_index, header.size),
            *(header.generation, 0, header.checksum, header.last_use_ms, header.depth, header.hits),
        )

    @staticmethod
    def _is_same(record: Record, found: Record) -> bool:
        same = ("number", "key", "slab_id", "slot_index", "size", "generation", "checksum")
        return all(getattr(record, name) == getattr(found, name) for name in same)

    def _is_late(self, header: BlockHeader, slab: "OpenSlab", offset: int, group: GroupKey) -> bool:
        """Whether it is a whole block that the ledger was not told of: any other without a record was given back."""
        if self._late_ms is None or header.last_use_ms < self._late_ms:
            return False
        if not is_at_home(header, slab.slab_id, offset, self._slab_bytes):
            return False
        owner = self._by_root[header.root]
        return GroupKey(owner.tenant, disk_stride(header.size)) == group and slab.has_payload(offset, header)

    def _mend(self, change: Callable[[], None]) -> None:
        if self._repair:
            change()
            self.counts.mended += 1


class OpenSlab:
    """A slab's file, to look into. Raises OSError where it cannot be read."""

    def __init__(self, slab_id: int, path: Path, slab_bytes: int) -> None:
        self.slab_id = slab_id
        self._path = path
        self._slab_bytes = slab_bytes
        self._file = PosixFile(path)
        self._page = memoryview(mmap(-1, ALIGN))

    def close(self) -> None:
        self._file.close()

    def read(self, offset: int, view: memoryview) -> None:
        self._file.read(offset, [view])

    def has_data(self) -> bool:
        """Whether anything was written into it since it was made or emptied, as far as the filesystem can tell."""
        with self._path.open("rb") as file:
            try:
                return os.lseek(file.fileno(), 0, os.SEEK_DATA) < self._slab_bytes
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return False
                raise

    def header(self, offset: int) -> BlockHeader | None:
        self.read(offset, self._page)
        return parse(self._page)

    def has_payload(self, offset: int, block: Record | BlockHeader) -> bool:
        """Whether the block behind the header at `offset` has its checksum."""
        payload = memoryview(mmap(-1, padded(block.size)))
        self.read(offset + ALIGN, payload)
        return checksum(payload[: block.size]) == block.checksum
