"""The NVMe tier's index on disk: which block lies in which slot, in a RocksDB that survives the process.

    0x01                    -> the marks
    0x02 slab id            -> slot_bytes u64, tenant in UTF-8
    0x03 number, block key  -> a record of RECORD_BYTES

Numbers in keys are big-endian, so that a scan is ordered; in values they are little-endian. Beside RocksDB's files
lie FORMAT, which says that this is a ledger and of which version, and CLEAN, which is there only while a ledger is
closed as it should be, and says how many changes it has seen: to find another number then is damage.

Every call blocks, and holds the GIL for about a microsecond a record; one call at a time, from any thread.
"""

import errno
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, lockf
from itertools import islice
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import rocksdict

from kvstore import ledger_format
from kvstore.durable import sync_folder
from kvstore.errors import ConfigError
from kvstore.ledger_format import FORMAT, write_durably
from kvstore.types import BlockKey, GroupKey

BATCH_RECORDS = 500  # RocksDB's write holds the GIL: about 0.4 ms for as many
STALL_ROUNDS = 4  # a write is tried, with a flush between
BROKEN_KEPT = 2  # ledgers set aside

Rows: TypeAlias = npt.NDArray[np.void]
"""Records side by side, with the fields of ROW; `keys`, `parents` and `records` make Python's objects of them."""

ROW = np.dtype(
    [
        *(("number", "<u4"), ("key_bytes", "u1"), ("parent_bytes", "u1"), ("unused", "<u2"), ("key", "V18")),
        *(("parent", "V18"), ("slab_id", "<u8"), ("slot_index", "<u4"), ("size", "<u4"), ("generation", "<u8")),
        *(("version", "<u8"), ("checksum", "<u8"), ("last_use_ms", "<u8"), ("depth", "<u4"), ("hits", "<u4")),
    ]
)
RECORD_BYTES = ROW.itemsize
_RECORD = struct.Struct("<IBB2x18s18sQIIQQQQII")
assert _RECORD.size == RECORD_BYTES

_MARKS_KEY, _SLABS, _BLOCKS, _END = b"\x01", b"\x02", b"\x03", b"\x04"
_MARKS = struct.Struct("<2Q")
_NUMBER, _SLAB_ID, _SLOT_BYTES = struct.Struct(">I"), struct.Struct(">Q"), struct.Struct("<Q")
_CLEAN = "CLEAN"
_ERRNO = {os.strerror(code): code for code in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EMFILE)}
_ERRNO["Write stall"] = errno.EAGAIN


class Record(NamedTuple):
    """A block (part) on NVMe: where it lies, what it must be, and how it was used."""

    number: int  # of its namespace
    key: BlockKey
    parent: BlockKey | None
    slab_id: int
    slot_index: int  # in the slab
    size: int  # bytes, below 4 GiB
    generation: int
    version: int
    checksum: int
    last_use_ms: int  # wall clock
    depth: int  # blocks before it in its chain
    hits: int  # below 2**32


class Marks(NamedTuple):
    """What a node must not forget: the tier's layout, and the epoch of its last start."""

    slab_bytes: int = 0
    epoch: int = 0


class Ledger:
    """One process's hold of a ledger, until it is closed. RocksDB's failures are OSErrors with its words."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Open the ledger in the folder `path`; where nothing is, make one if `create`.

        ConfigError if another process has it, or it is no ledger, or of another format version. OSError if it
        is damaged: then `set_aside` clears the way for a new one.
        """
        self._path = path
        if not (path.is_dir() and any(path.iterdir())):
            if not create:
                raise ConfigError(f"{path} is not a ledger: nothing is there")
            _make(path)
        ledger_format.check(path)
        self._no_waiting = rocksdict.WriteOptions()
        self._no_waiting.no_slowdown = True
        with _translated(path):
            self._db = rocksdict.Rdict(str(path), _options())
        try:
            self.was_clean = self._take_clean_mark()
            """Whether it was closed as it should be; if not, the last changes before a power loss may be missing."""
        except OSError:
            self._db.close()
            raise

    def close(self, *, is_whole: bool = True) -> None:
        """Write everything out and let go of the folder, even where writing fails (OSError); as clean if `is_whole`."""
        try:
            with _translated(self._path):
                self._db.flush()
                changes = self._db.latest_sequence_number()
        finally:
            with _translated(self._path):
                self._db.close()
        if is_whole:
            write_durably(self._path / _CLEAN, f"{changes}\n")

    def apply(self, puts: Sequence[Record], deletes: Sequence[tuple[int, bytes]] = ()) -> None:
        """Delete blocks by (namespace number, key), then put records, in that order.

        Up to BATCH_RECORDS of both are one atomic step; more are several, in order. A killed process loses none
        of it, a power loss what was not synced. Raises OSError: then the ledger may have a part of it, in order.
        """
        written = [(_block_key(record.number, record.key), _pack(record)) for record in puts]
        gone = [_block_key(number, key) for number, key in deletes]
        for first in range(0, len(gone) + len(written), BATCH_RECORDS):
            start, stop = (max(end - len(gone), 0) for end in (first, first + BATCH_RECORDS))
            self._write(gone[first : first + BATCH_RECORDS], written[start:stop])

    def sync(self) -> None:
        """Make all changes so far durable. Does not hold the GIL."""
        with _translated(self._path):
            self._db.flush_wal(True)

    def get(self, number: int, key: bytes) -> Record | None:
        value = self._get(_block_key(number, key))
        return None if value is None else records(_unpack(value, self._path))[0]

    def scan(self, chunk: int = 1024) -> Iterator[Rows]:
        """All records by namespace number and key, `chunk` at a time; only these are in memory.

        What is put while it runs may be in it; what is deleted meanwhile may have been. Raises OSError at what
        cannot be read; what it gave before is right.
        """
        assert chunk > 0
        start = _BLOCKS
        while True:
            rows = self._rows(start, chunk)
            if not len(rows):
                return
            yield rows
            start = _after(rows)

    def count(self) -> int:
        """How many blocks it has. Reads them all."""
        return sum(map(len, self.scan()))

    def marks(self) -> Marks:
        """As they were put last; all 0 in a new ledger."""
        value = self._get(_MARKS_KEY)
        return Marks() if value is None else Marks(*_MARKS.unpack(value))

    def put_marks(self, marks: Marks) -> None:
        """Durable on return."""
        self._write([], [(_MARKS_KEY, _MARKS.pack(*marks))])
        self.sync()

    def slabs(self) -> dict[int, GroupKey]:
        """Slab id -> the group that it is cut for."""
        found = self._entries(_SLABS, _BLOCKS)
        return {
            _SLAB_ID.unpack(key[1:])[0]: GroupKey(value[8:].decode(), *_SLOT_BYTES.unpack(value[:8]))
            for key, value in found
        }

    def put_slab(self, slab_id: int, tenant: str, slot_bytes: int) -> None:
        self._write([], [(_SLABS + _SLAB_ID.pack(slab_id), _SLOT_BYTES.pack(slot_bytes) + tenant.encode())])

    def delete_slabs(self, slab_ids: Iterable[int]) -> None:
        """Not their blocks."""
        self._write([_SLABS + _SLAB_ID.pack(slab_id) for slab_id in slab_ids], [])

    def _get(self, key: bytes) -> bytes | None:
        with _translated(self._path):
            value: bytes | None = self._db.get(key)
        return value

    def _write(self, gone: list[bytes], written: list[tuple[bytes, bytes]]) -> None:
        """One atomic step. Where RocksDB would let it wait with the GIL held, wait for a flush without it instead."""
        for rounds_left in reversed(range(STALL_ROUNDS)):
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key in gone:
                batch.delete(key)
            for key, value in written:
                batch.put(key, value)
            try:
                with _translated(self._path):
                    self._db.write(batch, self._no_waiting)
                return
            except BlockingIOError:
                if not rounds_left:
                    raise
            with _translated(self._path):
                self._db.flush()

    def _entries(self, start: bytes, stop: bytes, limit: int | None = None) -> list[tuple[bytes, bytes]]:
        """From the key `start` to before the key `stop`, `limit` at most. OSError at what cannot be read."""
        found: list[tuple[bytes, bytes]] = []
        with _translated(self._path):
            entries = self._db.iter()
            try:
                entries.seek(start)
                while len(found) != limit and entries.valid() and (key := entries.key()) < stop:
                    found.append((key, entries.value()))
                    entries.next()
                entries.status()
            finally:
                del entries  # a traceback would keep it, and it the folder's lock
        return found

    def _rows(self, start: bytes, limit: int) -> Rows:
        ahead = rocksdict.ReadOptions()
        ahead.set_readahead_size(1 << 20)
        with _translated(self._path):
            values = b"".join(islice(self._db.values(from_key=start, read_opt=ahead), limit))
        rows = _unpack(values, self._path)
        rest = _after(rows) if len(rows) else start
        if len(rows) < limit and self._entries(rest, _END, 1):  # values end at damage as they do at the end
            raise OSError(errno.EIO, "a scan ended before the last record", str(self._path))
        return rows

    def _take_clean_mark(self) -> bool:
        """From now on it is not clean. OSError if it is not at the change that it was closed at."""
        mark = self._path / _CLEAN
        if not mark.exists():
            return False
        said, found = mark.read_text(errors="replace").strip(), self._db.latest_sequence_number()
        if said != str(found):
            raise OSError(errno.EIO, f"closed at change {said}, and now at {found}", str(self._path))
        mark.unlink()
        sync_folder(self._path)
        return True


def keys(rows: Rows) -> list[BlockKey]:
    """16 or 18 bytes each."""
    return [BlockKey(key[:size]) for key, size in zip(rows["key"].tolist(), rows["key_bytes"].tolist(), strict=True)]


def parents(rows: Rows) -> list[BlockKey | None]:
    pairs = zip(rows["parent"].tolist(), rows["parent_bytes"].tolist(), strict=True)
    return [BlockKey(key[:size]) if size else None for key, size in pairs]


def records(rows: Rows) -> list[Record]:
    columns = {name: rows[name].tolist() for name in Record._fields} | {"key": keys(rows), "parent": parents(rows)}
    return list(map(Record._make, zip(*columns.values(), strict=True)))


def set_aside(path: Path) -> Path:
    """Rename the ledger in `path`, which nobody has open, to `path`.broken-N, and say so; keep the last BROKEN_KEPT.

    ConfigError if another process has it open, or it is no ledger: then it stays.
    """
    if not (path / FORMAT).is_file():
        raise ConfigError(f"{path} is not a ledger: it has no {FORMAT}")
    with (path / "LOCK").open("a") as lock:
        try:
            lockf(lock, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{path} is in use by another process") from error
        prefix = f"{path.name}.broken-"
        broken = {int(n): p for p in path.parent.glob(f"{prefix}*") if (n := p.name.removeprefix(prefix)).isdecimal()}
        target = path.with_name(f"{prefix}{max(broken, default=0) + 1}")
        path.rename(target)
    sync_folder(path.parent)
    for number in sorted(broken, reverse=True)[BROKEN_KEPT - 1 :]:
        rmtree(broken[number])
    return target


def _options() -> rocksdict.Options:
    """Small: an index of a hundred bytes a block must not weigh on the node. The decision record says why."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(False)
    options.set_paranoid_checks(True)
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.point_in_time())
    options.set_write_buffer_size(16 << 20)
    options.set_max_write_buffer_number(4)
    options.set_max_total_wal_size(64 << 20)
    options.set_max_background_jobs(2)
    options.set_max_file_opening_threads(2)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_max_log_file_size(1 << 20)
    options.set_keep_log_file_num(2)
    options.set_max_manifest_file_size(4 << 20)
    table = rocksdict.BlockBasedOptions()
    table.set_bloom_filter(10, block_based=False)
    table.set_block_size(16 << 10)
    table.set_block_cache(rocksdict.Cache(16 << 20))
    options.set_block_based_table_factory(table)
    return options


def _make(path: Path) -> None:
    """A new ledger in `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{path.name}.new-", dir=path.parent, ignore_cleanup_errors=True) as folder:
        options = _options()
        options.create_if_missing(True)
        with _translated(path):
            rocksdict.Rdict(folder, options).close()
        ledger_format.mark(Path(folder))
        write_durably(Path(folder, _CLEAN), "0\n")
        Path(folder).rename(path)
    sync_folder(path.parent)


def _pack(record: Record) -> bytes:
    number, key, parent, *rest = record
    above = parent or b""
    assert len(key) in (16, 18)
    assert len(above) in (0, 16, 18)
    return _RECORD.pack(number, len(key), len(above), key, above, *rest)


def _unpack(values: bytes, path: Path) -> Rows:
    if len(values) % RECORD_BYTES:
        raise OSError(errno.EIO, "a record has not its length", str(path))
    return np.frombuffer(values, ROW)


def _block_key(number: int, key: bytes) -> bytes:
    return _BLOCKS + _NUMBER.pack(number) + key


def _after(rows: Rows) -> bytes:
    """The least key behind the last of `rows`."""
    last = rows[-1:]
    return _block_key(int(last["number"][0]), keys(last)[0]) + b"\0"


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # rocksdict's own class of errors is this one
        raise _told(str(error), path) from error


def _told(words: str, path: Path) -> Exception:
    if "lock hold by current process" in words or "While lock file" in words:
        return ConfigError(f"{path} is in use by another process")
    number = next((number for part, number in _ERRNO.items() if part in words), errno.EIO)
    return OSError(number, words, str(path))
