"""What the NVMe tier's ledger is told: the table's changes, in a thread of its own, and the namespaces they are of.

The ledger follows the table: a block is recorded after its bytes are written, and what a killed node had not yet
recorded is lost, never wrong, for the header on the disk decides. Beside the ledger, `namespaces.json` says what each
namespace number stands for: with it and the headers a lost ledger can be made anew.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from kvstore.catalogue import Catalogue
from kvstore.copier import finished
from kvstore.durable import sync_folder
from kvstore.errors import Rejected
from kvstore.ledger import BATCH_RECORDS, Ledger, Record, records, set_aside
from kvstore.prefix import Namespace
from kvstore.table import Event, Replica, Space
from kvstore.types import NVME, BlockKey, Change, State

log = logging.getLogger("cairn.records")

Result = TypeVar("Result")

FLUSH_S = 0.05  # of records may be lost with a killed process
SYNC_S = 1.0  # of them with the power
RETRY_S = 5.0
MOST_DELETED = 1 << 20  # remembered while it is not known what an earlier start left; 200 bytes each
NAMESPACES = "namespaces.json"
LEDGER = "ledger"
ALREADY_TOLD = (Change.PROGRESSED, Change.RESTORED)  # of these there is nothing to record


class Records:
    """In `folder`, which is made if need be. `failed` hears of failures to write."""

    def __init__(self, folder: Path, *, wall_ms: Callable[[], int], failed: Callable[[Exception], None]) -> None:
        self._path = folder / LEDGER
        self._folder = folder
        self._wall_ms = wall_ms
        self._failed = failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cairn-ledger")
        self._ledger: Ledger | None = None
        self._pending: dict[tuple[int, BlockKey], Replica | None] = {}  # None: it is gone
        self.deleted: set[tuple[int, BlockKey]] = set()  # while it is not known yet what an earlier start left of them
        self._slabs: dict[int, int] = {}  # that the ledger knows: id -> slot_bytes
        self._namespaces: list[dict[str, Any]] | None = None  # to be written
        self._changed = asyncio.Event()
        self.written = 0

    @property
    def pending(self) -> int:
        """Changes that the ledger has not been told of."""
        return len(self._pending)

    async def run(self, work: Callable[[Ledger], Result]) -> Result:
        """Do `work` with the ledger, in its thread. Raises OSError; then the ledger is opened anew next time."""

        def at_it() -> Result:
            if self._ledger is None:
                self._ledger = Ledger(self._path)
            try:
                return work(self._ledger)
            except OSError:
                broken, self._ledger = self._ledger, None
                broken.close()
                raise

        return await finished(self._thread.submit(at_it))

    def note(self, events: Sequence[Event]) -> None:
        """Take up what the table changed."""
        for event in events:
            replica = event.replica
            if replica.space.tier == NVME and event.change not in ALREADY_TOLD:
                name = (replica.space.number, replica.key)
                if event.change is Change.REMOVED:
                    self._note(name, None)
                elif replica.state is State.WRITTEN:
                    self._note(name, replica)
        if self._pending:
            self._changed.set()

    def _note(self, name: tuple[int, BlockKey], replica: Replica | None) -> None:
        """Behind all changes before it: one of them may be the removal of what lay in the same slot."""
        self._pending.pop(name, None)
        self._pending[name] = replica

    def forget(self, names: Iterable[tuple[int, BlockKey]]) -> None:
        """Records of an earlier start that are of no use."""
        self._pending.update(dict.fromkeys(names))
        self._changed.set()

    def delete(self, names: Iterable[tuple[int, BlockKey]]) -> None:
        """Deleted before an earlier start's records were all taken up: they are not to be taken up any more.

        Rejected when there are so many that they cannot be remembered.
        """
        if len(self.deleted) >= MOST_DELETED:
            raise Rejected("it is not known yet what lies on the disk: no more can be deleted there before it is")
        self.deleted.update(names)
        self.forget(names)

    def remember(self, replica: Replica) -> None:
        """A block of an earlier start that the ledger does not have."""
        self._pending[replica.space.number, replica.key] = replica
        self._changed.set()

    async def renew(self) -> None:
        """The ledger is damaged: put it aside, and begin an empty one. Raises ConfigError, OSError."""

        def at_it() -> None:
            if self._ledger is not None:
                self._ledger.close()
            self._ledger = None
            log.error("the ledger was damaged, and lies at %s now", set_aside(self._path))
            self._ledger = Ledger(self._path)

        await finished(self._thread.submit(at_it))

    def known_slabs(self, slabs: dict[int, int]) -> None:
        """The slabs that the ledger has already: id -> slot_bytes."""
        self._slabs.update(slabs)

    def note_namespaces(self, catalogue: Catalogue) -> None:
        """There is a new namespace or name."""
        self._namespaces = [
            {
                "number": space.number,
                "tenant": space.tenant.name,
                "names": space.names,
                "root": space.root.hex(),
                "fields": {name: getattr(space.namespace, name) for name in Namespace.__struct_fields__},
            }
            for space in catalogue.all()
        ]
        self._changed.set()

    def read_namespaces(self) -> list[dict[str, Any]]:
        """What `note_namespaces` wrote at an earlier start."""
        return read_namespaces(self._folder)

    async def keep(self) -> None:
        """Until cancelled: tell the ledger what changed."""
        while True:
            await self._changed.wait()
            try:
                await self.flush()
            except OSError as error:
                log.error("the ledger does not take records, %d wait: %s", len(self._pending), error)
                self._failed(error)
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(FLUSH_S)

    async def keep_durable(self) -> None:
        """Until cancelled: have what the ledger was told on the disk, each second."""
        synced = 0
        while True:
            await asyncio.sleep(SYNC_S)
            written = self.written
            if written != synced:
                try:
                    await self.run(Ledger.sync)
                    synced = written
                except OSError as error:
                    self._failed(error)

    async def flush(self) -> None:
        """Tell the ledger all that changed until now. Raises OSError; then nothing is forgotten."""
        self._changed.clear()
        try:
            await self._flush_namespaces()
            while self._pending:
                batch = dict(islice(self._pending.items(), BATCH_RECORDS))
                versions = {replica: replica.version for replica in batch.values() if replica is not None}
                await self._flush_batch(batch)
                for name, replica in batch.items():
                    is_told = replica is None or replica.version == versions[replica]  # and was not moved since
                    if is_told and self._pending.get(name, name) is replica:
                        del self._pending[name]
                self.written += len(batch)
        except OSError:
            self._changed.set()
            raise

    async def _flush_namespaces(self) -> None:
        wanted = self._namespaces
        if wanted is not None:
            await self.run(lambda _: _write_durably(self._folder / NAMESPACES, json.dumps(wanted, indent=1).encode()))
            if self._namespaces is wanted:
                self._namespaces = None

    async def _flush_batch(self, batch: dict[tuple[int, BlockKey], Replica | None]) -> None:
        now_ms = self._wall_ms()
        live = [replica for replica in batch.values() if replica is not None]
        puts = [_record(replica, now_ms) for replica in live]
        gone = [name for name, replica in batch.items() if replica is None]
        slabs = {
            replica.slab.slab_id: (replica.space.tenant, replica.group.slot_bytes)
            for replica in live
            if self._slabs.get(replica.slab.slab_id) != replica.group.slot_bytes
        }

        def write(ledger: Ledger) -> None:
            for slab_id, (tenant, slot_bytes) in slabs.items():
                ledger.put_slab(slab_id, tenant, slot_bytes)
            ledger.apply(puts, gone)

        await self.run(write)
        self._slabs.update({slab_id: slot_bytes for slab_id, (_, slot_bytes) in slabs.items()})

    async def problems(self, spaces: Iterable[Space]) -> list[str]:
        """Where the ledger, told all until now, differs from these spaces of the disk, a sentence each.

        Once all that an earlier start left is taken up. Raises OSError.
        """
        await self.flush()  # nothing else happens until the scan is queued: it sees this very moment
        wanted = {
            (space.number, replica.key): (replica.slab.slab_id, replica.index, replica.generation, replica.checksum)
            for space in spaces
            for replica in space.replicas.values()
            if replica.state is State.WRITTEN
        }

        def scan(ledger: Ledger) -> list[str]:
            found = []
            for record in chain.from_iterable(map(records, ledger.scan())):
                place = (record.slab_id, record.slot_index, record.generation, record.checksum)
                meant = wanted.pop((record.number, record.key), None)
                if meant != place:
                    found.append(f"{record.key.hex()}: the ledger has {place}, the table {meant}")
            return found + [f"{key.hex()}: the ledger does not have it" for _, key in wanted]

        return await self.run(scan)

    async def aclose(self) -> None:
        """Write what is left, and close the ledger."""
        try:
            await self.flush()
        except OSError as error:
            log.error("the ledger lacks %d records: %s", len(self._pending), error)

        def close() -> None:
            if self._ledger is not None:
                self._ledger.close()

        try:
            await finished(self._thread.submit(close))
        except OSError as error:
            log.error("the ledger is not closed well: %s", error)
        self._thread.shutdown()


def read_namespaces(folder: Path) -> list[dict[str, Any]]:
    """What the NVMe tier in `folder` says of its namespaces; nothing where that is lost or damaged.

    OSError where the disk does not give it: then it may be there, and must not be taken for lost.
    """
    try:
        found = json.loads((folder / NAMESPACES).read_bytes())
    except FileNotFoundError:
        return []
    except ValueError as error:
        log.error("%s is lost, and with it all blocks on the disk: %s", NAMESPACES, error)
        return []
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _record(replica: Replica, now_ms: int) -> Record:
    return Record(
        replica.space.number,
        replica.key,
        replica.parent,
        replica.slab.slab_id,
        replica.index,
        replica.size,
        replica.generation,
        replica.version,
        replica.checksum,
        now_ms,
        replica.depth,
        replica.hits,
    )


def _write_durably(path: Path, content: bytes) -> None:
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)
