"""Blocks on the NVMe tier: each with its header, verified whenever it is read, its disk's speed and health watched."""

import asyncio
import logging
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from kvstore.bandwidth import Bandwidth
from kvstore.clock import Clock
from kvstore.copier import checksum, copy_bytes
from kvstore.disk_queue import DiskQueue
from kvstore.diskblock import ALIGN, BlockHeader, pack, padded, parse, stride
from kvstore.health import Health
from kvstore.replica import Replica, Space
from kvstore.slab import slot_bytes
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.posix_file import BlockBuffer
from kvstore.types import Slot

log = logging.getLogger("cairn.disk")

Loaded = Literal["good", "corrupt", "failed"]

READ_FAILURES = 2  # in a row: bad blocks; more are a bad disk


def disk_stride(size: int) -> int:
    """Bytes from one slot to the next of those for blocks of `size` bytes."""
    return stride(slot_bytes(size))


class Disk:
    """The medium with what the node knows of it. `root_of` names a space's namespace in the headers."""

    def __init__(self, medium: NvmeTier, queue: DiskQueue, clock: Clock, *,
                 wall_ms: Callable[[], int], root_of: Callable[[Space], bytes]) -> None:  # fmt: skip
        self.medium = medium
        self.queue = queue
        self.reading, self.writing = Bandwidth(), Bandwidth()
        self.read_health, self.write_health = Health(tolerance=READ_FAILURES), Health()
        self._clock = clock
        self._wall_ms = wall_ms
        self._root_of = root_of
        self._read_error = ""
        self._is_closed = False
        self._pages: deque[mmap.mmap] = deque()  # for headers; one for each thread that is at it

    def may_load(self) -> bool:
        return self.read_health.may_try(self._clock.now())

    def may_store(self) -> bool:
        return self.write_health.may_try(self._clock.now())

    def store_failed(self, error: Exception) -> None:
        """Something could not be written, or no space be had: leave the disk alone for a while."""
        if self.write_health.failed(str(error), self._clock.now()):
            log.error("nothing is written to %s for now: %s", self.medium.spec.name, error)

    async def load(self, blocks: Sequence[tuple[Replica, memoryview]]) -> list[Loaded]:
        """Fill each view with the block of a replica that the caller holds; what became of each, in order.

        A view that is page aligned and has room for the block's padding is read into directly, its rest changed.
        """
        wanted = [(replica.slot, self._header(replica, replica.slot), target) for replica, target in blocks]
        found = await self._read([replica for replica, _ in blocks], lambda: [self._load(*block) for block in wanted])
        if "failed" in found and self.read_health.failed(self._read_error, self._clock.now()):
            log.error("nothing is read from %s for now: %s", self.medium.spec.name, self._read_error)
        return found

    async def fetch(self, blocks: Sequence[tuple[Replica, BlockBuffer]]) -> list[Loaded]:
        """As `load`, into memory of any kind with room for the padding; only the header of a "good" one was compared.

        Whether its bytes are the block's is the caller's to find out, and whether the disk is to blame for a failure.
        Memory of a GPU is in use by no stream.
        """
        if self._is_closed:
            return ["failed"] * len(blocks)
        wanted = [(replica.slot, self._header(replica, replica.slot), target) for replica, target in blocks]
        return await self._read([replica for replica, _ in blocks], lambda: [self._fetch(*block) for block in wanted])

    async def _read(self, replicas: Sequence[Replica], work: Callable[[], list[Loaded]]) -> list[Loaded]:
        """Do the reads in a thread, and take note of how fast they were."""
        started, size = self._clock.now(), sum(replica.size for replica in replicas)
        self.reading.begin(size, started)
        found: list[Loaded] = []
        try:
            found = await self.queue.load(work)
        finally:
            is_good = bool(found) and "failed" not in found
            self.reading.end(size, started, self._clock.now(), is_good=is_good)
        if is_good and self.read_health.succeeded():
            log.warning("%s gives blocks again", self.medium.spec.name)
        return found

    async def store(self, blocks: Sequence[tuple[Replica, memoryview]]) -> bool:
        """Write each view as the block of a replica, which the caller has allocated; False if the disk failed.

        The checksum is the replica's. A view that has room for the block's padding is written with it.
        """
        return await self._store(
            [(replica.slot, self._header(replica, replica.slot), view) for replica, view in blocks]
        )

    async def copy(self, blocks: Sequence[tuple[Replica, Slot]]) -> list[Loaded]:
        """Copy each replica, which the caller holds, to another slot of its tier; what became of each."""
        targets = [memoryview(mmap.mmap(-1, padded(replica.size))) for replica, _ in blocks]
        pairs = [(replica, target) for (replica, _), target in zip(blocks, targets, strict=True)]
        found = await self.load(pairs)
        good = [
            (slot, self._header(replica, slot), target)
            for (replica, slot), target, loaded in zip(blocks, targets, found, strict=True)
            if loaded == "good"
        ]
        if good and not await self._store(good):
            return ["failed" if loaded == "good" else loaded for loaded in found]
        return found

    async def punch(self, slab_id: int) -> None:
        """Give the space of an unused slab back to the disk."""
        try:
            await self.queue.store(lambda: self.medium.punch(slab_id))
        except OSError as error:
            self.store_failed(error)

    async def aclose(self) -> None:
        """What is to be fetched from here on fails: it would start the threads again."""
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(None, self.queue.close)
        await self.medium.aclose()

    async def _store(self, blocks: Sequence[tuple[Slot, BlockHeader, memoryview]]) -> bool:
        started, size = self._clock.now(), sum(header.size for _, header, _ in blocks)
        self.writing.begin(size, started)
        is_good = False
        try:
            await self.queue.store(lambda: self._save_all(blocks))
            is_good = True
        except OSError as error:
            self.store_failed(error)
            return False
        finally:
            self.writing.end(size, started, self._clock.now(), is_good=is_good)
        if self.write_health.succeeded():
            log.warning("%s takes blocks again", self.medium.spec.name)
        return True

    def _header(self, replica: Replica, slot: Slot) -> BlockHeader:
        return BlockHeader(
            self._root_of(replica.space),
            replica.key,
            replica.parent,
            replica.depth,
            slot.slab_id,
            slot.offset // slot.size,
            slot.generation,
            replica.size,
            replica.checksum,
            self._wall_ms(),
            replica.hits,
        )

    def _load(self, slot: Slot, wanted: BlockHeader, target: memoryview) -> Loaded:
        whole = padded(wanted.size)
        is_direct = len(target) >= whole
        payload = target[:whole] if is_direct else memoryview(mmap.mmap(-1, whole))
        found = self._fetch(slot, wanted, payload)
        if found == "good" and checksum(payload[: wanted.size]) != wanted.checksum:
            return "corrupt"
        if found == "good" and not is_direct:
            copy_bytes(target, payload[: wanted.size])
        return found

    def _fetch(self, slot: Slot, wanted: BlockHeader, payload: BlockBuffer) -> Loaded:
        page = self._page()
        try:
            self.medium.load(slot, [memoryview(page), payload])
        except OSError as error:
            self._read_error = str(error)
            return "failed"
        found = parse(memoryview(page))
        self._pages.append(page)
        return "good" if found is not None and _is_same(found, wanted) else "corrupt"

    def _save_all(self, blocks: Sequence[tuple[Slot, BlockHeader, memoryview]]) -> None:
        for slot, header, source in blocks:
            self._save(slot, header, source)

    def _save(self, slot: Slot, header: BlockHeader, source: memoryview) -> None:
        page = self._page()
        page[:] = pack(header).ljust(ALIGN, b"\0")  # it was read into, maybe from another tenant's slab
        whole = padded(header.size)
        payload = source[:whole]
        if len(source) < whole:
            payload = memoryview(mmap.mmap(-1, whole))
            copy_bytes(payload, source)
        self.medium.save(slot, [memoryview(page), payload])
        self._pages.append(page)

    def _page(self) -> mmap.mmap:
        try:
            return self._pages.pop()
        except IndexError:
            return mmap.mmap(-1, ALIGN)


def _is_same(found: BlockHeader, wanted: BlockHeader) -> bool:
    """Whether a header is that of the wanted block in the wanted place; use and depth may have changed since."""
    same = ("root", "key", "slab_id", "slot_index", "generation", "size", "checksum")
    return all(getattr(found, name) == getattr(wanted, name) for name in same)
