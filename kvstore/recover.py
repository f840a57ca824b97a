"""The start of a node that has an NVMe tier: what an earlier start left on the disk is taken up while it serves.

The namespaces first, so that clients find them; then the slabs; then the blocks, in small steps, coldest first. Nothing
is written to the disk until all is known. No block is believed: each is verified when it is read.
"""

import asyncio
import errno
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.catalogue import Catalogue, OpenNamespace, Tenant
from kvstore.disk import Disk
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.ledger import ROW, Ledger, Marks, Rows, keys, parents
from kvstore.prefix import Namespace
from kvstore.records import Records
from kvstore.replica import Replica, Space
from kvstore.salvage import salvage
from kvstore.slab import Slab
from kvstore.table import BlockTable
from kvstore.types import NVME, BlockKey, GroupKey, State

log = logging.getLogger("cairn.recover")

STEP_BLOCKS = 256  # taken up between two looks at the event loop: about a millisecond
RETRY_S = 10.0
FIELDS = ("number", "slab_id", "slot_index", "generation", "size", "checksum", "depth", "hits")

UNKNOWN = "of namespaces that are unknown or changed"
GONE = "whose data is gone"
NO_KEY = "whose key makes no sense"
TAKEN = "in a slot that is another's"
MISFIT = "of a size that their slab is not for"
DELETED = "deleted since"


@dataclass(slots=True)
class Recovered:
    """What was found; `ignored` counts blocks by the reason why they are of no use."""

    blocks: int = 0
    namespaces: int = 0
    slabs: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    is_done: bool = False
    seconds: float = 0.0


class Home(NamedTuple):
    """Where blocks of one namespace and size in one slab belong."""

    space: Space
    slab: Slab
    group: GroupKey
    layers: int
    key_bytes: int


class Recovery:
    """`begin` before serving, then `load`. `tenants` by name, those of the configuration."""

    def __init__(self, table: BlockTable, catalogue: Catalogue, disk: Disk, records: Records, *,
                 tenants: Mapping[str, Tenant], epoch: int, now: Callable[[], float]) -> None:  # fmt: skip
        self._table = table
        self._catalogue = catalogue
        self._disk = disk
        self._records = records
        self._tenants = tenants
        self._epoch = epoch
        self._now = now
        self._spaces: dict[int, OpenNamespace] = {}  # of earlier starts; a new one has none of their numbers
        self._slabs: dict[int, Slab] = {}
        self._homes: dict[tuple[int, int, int], Home | str] = {}  # by number, slab id, size; or why there is none
        self._is_open = False
        self._is_salvaged = False  # blocks were found that the ledger does not have
        self.found = Recovered()

    async def begin(self) -> None:
        """Take up namespaces, and look at the ledger; where the disk does not let one, `load` tries again.

        ConfigError when the disk was laid out otherwise than it is configured, is in use by another node, or does not
        say whose its blocks are: nothing is changed then.
        """
        try:
            rows = self._records.read_namespaces()
        except OSError as error:
            raise ConfigError(f"the nvme tier cannot be read: {error}") from error
        for row in rows:
            self._restore_namespace(row)
        try:
            await self._open()
        except OSError as error:
            log.error("the nvme tier is not used for now: %s", error)

    async def load(self, settle: Callable[[], None] | None = None) -> None:
        """Take up slabs and blocks, while others are served; tried again as long as the disk does not let one.

        `settle` makes known what the table changed; it is called after each step.
        """
        started = self._now()
        rows = await self._read_all()
        order, doubled = await self._disk.queue.load(lambda: _arranged(rows))
        self._ignore(doubled, TAKEN)
        with _collector_spared():
            for start in range(0, len(order), STEP_BLOCKS):
                self._restore_blocks(rows[order[start : start + STEP_BLOCKS]])
                if settle is not None:
                    settle()
                await asyncio.sleep(0)
        self._homes.clear()
        self._records.deleted.clear()
        pool = self._table.tiers[NVME].pool
        for slab in self._slabs.values():
            pool.restored(slab)
        self.found.seconds = self._now() - started
        self.found.is_done = True
        log.info(
            "the nvme tier has %d blocks in %d slabs of earlier starts, found in %.1f s; of no use: %s",
            *(self.found.blocks, self.found.slabs, self.found.seconds),
            ", ".join(f"{count} {reason}" for reason, count in self.found.ignored.items()) or "none",
        )

    async def _open(self) -> None:
        """Hold the ledger against the configuration. Raises OSError when the disk does not let one."""
        try:
            marks = await self._records.run(Ledger.marks)
            holds_any = await self._records.run(lambda ledger: any(True for _ in ledger.scan(1)))
        except OSError as error:
            await self._renew(error)
            marks, holds_any = Marks(), False
        slab_bytes = self._disk.medium.spec.slab_bytes
        if marks.slab_bytes not in (0, slab_bytes):
            raise ConfigError(
                f"the nvme tier was laid out with slabs of {marks.slab_bytes} bytes, not {slab_bytes}: "
                "set tiers.nvme.slab as it was, or give tiers.nvme.path an empty folder"
            )
        if holds_any and not self._records.read_namespaces():
            log.error("nobody knows whose the blocks on the disk are")
            await self._records.renew()  # or its numbers would soon stand for other namespaces
        await self._mark()
        self._is_open = True

    async def _mark(self) -> None:
        marks = Marks(slab_bytes=self._disk.medium.spec.slab_bytes, epoch=self._epoch)
        await self._records.run(lambda ledger: ledger.put_marks(marks))

    async def _renew(self, error: OSError) -> None:
        """After damage, and nothing else: a disk that is full or read-only has a good ledger."""
        if error.errno != errno.EIO:
            raise error
        log.error("the ledger cannot be read: %s", error)
        await self._records.renew()

    async def _read_all(self) -> Rows:
        """All records, their slabs opened."""
        while True:
            try:
                if not self._is_open:
                    await self._open()
                rows, groups = await self._read()
                await self._restore_slabs(groups)
                return rows
            except (OSError, ConfigError) as error:
                log.error("the nvme tier is not used for now: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _read(self) -> tuple[Rows, dict[int, GroupKey]]:
        """What the ledger has, or what the headers on the disk say where it is empty."""

        def scan(ledger: Ledger) -> Rows:
            return _joined(list(ledger.scan(2048)))

        rows, groups = _joined([]), dict[int, GroupKey]()
        try:
            rows = await self._records.run(scan)
            groups = await self._records.run(Ledger.slabs)
        except OSError as error:
            await self._renew(error)
            await self._mark()
        if not groups:
            chunks, groups = await salvage(self._disk, self._catalogue)
            rows = _joined(chunks)
            self._is_salvaged = True
        return rows, groups

    def _restore_namespace(self, row: dict[str, Any]) -> None:
        try:
            number, names, tenant_name = int(row["number"]), list(row["names"]), row["tenant"]
            namespace, root = Namespace(**row["fields"]), bytes.fromhex(row["root"])
        except (KeyError, TypeError, ValueError) as error:
            log.error("a namespace of an earlier start makes no sense, its blocks are ignored: %s", error)
            return
        tenant = self._tenants.get(tenant_name)
        if tenant is None:
            log.warning("tenant %s is not configured any more: its blocks on the disk are removed", tenant_name)
        elif namespace.root(tenant.name, tenant.secret) != root:
            log.warning("the secret of tenant %s has changed: its blocks of %s are removed", tenant_name, names)
        elif self._catalogue.of_number(number) is None:
            self._spaces[number] = self._catalogue.restore(number, tenant, names, namespace)
            self.found.namespaces += 1
        self._catalogue.reserve(number)

    async def _restore_slabs(self, groups: Mapping[int, GroupKey]) -> None:
        medium, pool = self._disk.medium, self._table.tiers[NVME].pool

        def open_all() -> list[int]:
            opened = []
            for slab_id in medium.existing():
                group = groups.get(slab_id)
                if group is None or group.tenant not in self._tenants or group.slot_bytes > pool.slab_bytes:
                    medium.remove(slab_id)
                    continue
                try:
                    medium.restore(slab_id)
                except OSError as error:
                    log.error("slab %d cannot be opened, its blocks are lost: %s", slab_id, error)
                    continue
                opened.append(slab_id)
            return opened

        opened = await self._disk.queue.load(open_all)
        if not self._is_salvaged:
            gone = groups.keys() - opened
            await self._records.run(lambda ledger: ledger.delete_slabs(gone))
            self._records.known_slabs({slab_id: groups[slab_id].slot_bytes for slab_id in opened})
        for slab_id in sorted(opened):
            self._slabs[slab_id] = pool.restore(slab_id, groups[slab_id], self._epoch)
        self.found.slabs = len(self._slabs)

    def _restore_blocks(self, rows: Rows) -> None:
        columns = zip(keys(rows), parents(rows), *(rows[name].tolist() for name in FIELDS), strict=True)
        homes, restore, deleted = self._homes, self._table.restore, self._records.deleted
        lost: list[tuple[int, BlockKey]] = []
        for key, parent, number, slab_id, index, generation, size, checksum, depth, hits in columns:
            home = homes.get((number, slab_id, size))
            if home is None:
                home = homes[number, slab_id, size] = self._home(number, slab_id, size)
            reason = home if isinstance(home, str) else _flaw(home, key, index)
            if deleted and (number, key) in deleted:
                reason = DELETED
            if reason:
                self.found.ignored[reason] += 1
                lost.append((number, key))
                continue
            assert isinstance(home, Home)
            space, slab, group, layers, _ = home
            replica = Replica(space, key, parent, slab, group, index, generation, size, 0, State.WRITTEN)
            replica.checksum, replica.layers, replica.depth, replica.hits = checksum, layers, depth, hits
            restore(replica)
            if self._is_salvaged:
                self._records.remember(replica)
        self.found.blocks += len(rows) - len(lost)
        if lost:
            self._records.forget(lost)

    def _home(self, number: int, slab_id: int, size: int) -> Home | str:
        """Where blocks belong, or why they are of no use."""
        space, slab = self._spaces.get(number), self._slabs.get(slab_id)
        if space is None or space.nvme is None:
            return UNKNOWN
        if slab is None or slab.group is None:
            return GONE
        try:
            if self._table.tiers[NVME].group(space.tenant.name, size) != slab.group:
                return MISFIT
        except InvalidRequest:
            return MISFIT
        return Home(space.nvme, slab, slab.group, space.namespace.layers, space.key_bytes)

    def _ignore(self, rows: Rows, reason: str) -> None:
        if len(rows):
            self.found.ignored[reason] += len(rows)
            self._records.forget(zip(rows["number"].tolist(), keys(rows), strict=True))


def tenants_by_name(tenants: Sequence[Tenant]) -> dict[str, Tenant]:
    """The writing one of each name."""
    return {tenant.name: tenant for tenant in sorted(tenants, key=lambda tenant: tenant.may_write)}


@contextmanager
def _collector_spared() -> Iterator[None]:
    """What is taken up stays: the collector would take a third of the time to find that out, and pause for it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _flaw(home: Home, key: BlockKey, index: int) -> str:
    """Why a record is of no use; empty if it may be."""
    if len(key) != home.key_bytes or key in home.space.replicas:
        return NO_KEY
    if index >= home.slab.slots or home.slab.occupants[index] is not None:
        return TAKEN
    return ""


def _joined(chunks: Iterable[Rows]) -> Rows:
    return np.concatenate([np.zeros(0, ROW), *chunks])


def _arranged(rows: Rows) -> tuple[npt.NDArray[np.intp], Rows]:
    """The order in which to take rows up, those used longest ago first; and those left out of it, whose slot a later
    generation has: the ledger was not told in time that they went."""
    by_place = np.lexsort((rows["generation"], rows["slot_index"], rows["slab_id"]))
    slabs, slots = rows["slab_id"][by_place], rows["slot_index"][by_place]
    is_doubled = np.zeros(len(rows), bool)
    is_doubled[by_place[:-1]] = (slabs[:-1] == slabs[1:]) & (slots[:-1] == slots[1:])
    order = np.argsort(rows["last_use_ms"], kind="stable")
    return order[~is_doubled[order]], rows[is_doubled]
