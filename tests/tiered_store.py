"""A whole store of small tiers in this process, whose threads and clock do what a test says, and nothing by themselves.

What would be done in a thread (disk, copies, checksums) waits in `Threads` until a test begins and ends it; time passes
by `advance` only. So each interleaving can be had, and is the same again.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvstore.admission import Admission
from kvstore.catalogue import Catalogue, OpenNamespace, Tenant
from kvstore.copier import Copier, checksum, finished
from kvstore.disk import Disk, disk_stride
from kvstore.disk_queue import DiskQueue
from kvstore.intake import Limits
from kvstore.prefix import Namespace, chain, part_key
from kvstore.records import Records
from kvstore.recover import Recovery
from kvstore.store import Below, Store
from kvstore.table import BlockTable, TierShape
from kvstore.tiers import TierSpec
from kvstore.tiers import nvme as nvme_module
from kvstore.tiers.block_file import open_block_file
from kvstore.tiers.bucket import Bucket
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.object_store import ObjectSpec, ObjectTier
from kvstore.types import DRAM, NVME, BlockKey, Cause, Owner, Placement, State
from kvstore.upkeep import Marks, Upkeep
from tests.faulty_file import Fault, Faults, FaultyFile, FlipBit, Lose, Tear

DRAM_SLAB, NVME_SLAB = 8192, 32_768
TURNS = 12  # of the loop until nothing goes on by itself
OWNER = Owner(1)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time stands still unless a test moves it."""

    def __init__(self) -> None:
        self.seconds = 100.0
        super().__init__()
        self.set_default_executor(AtOnce())

    def time(self) -> float:
        return self.seconds

    def now(self) -> float:
        return self.seconds


class AtOnce(ThreadPoolExecutor):
    """Does what it is given before it returns."""

    def __init__(self) -> None:
        super().__init__(1)

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        job: Future[Any] = Future()
        try:
            job.set_result(work(*arguments, **named))
        except BaseException as error:
            job.set_exception(error)
        return job


class Job:
    """What was given to a thread. `kind` is load, store or copy."""

    def __init__(self, kind: str, work: Callable[[], Any]) -> None:
        self.kind = kind
        self.work = work
        self.future: Future[Any] = Future()

    @property
    def is_begun(self) -> bool:
        return self.future.running()

    def begin(self) -> bool:
        """A thread takes it up; False when it was cancelled before."""
        return self.is_begun or self.future.set_running_or_notify_cancel()

    def end(self) -> None:
        """What it does to memory and files happens now."""
        if self.begin():
            try:
                self.future.set_result(self.work())
            except BaseException as error:
                self.future.set_exception(error)


class Threads:
    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, kind: str, work: Callable[[], Any]) -> "Future[Any]":
        self.jobs.append(Job(kind, work))
        return self.jobs[-1].future

    def waiting(self, kind: str = "") -> list[Job]:
        self.jobs = [job for job in self.jobs if not job.future.done()]
        return [job for job in self.jobs if kind in ("", job.kind)]


class SteppedQueue(DiskQueue):
    def __init__(self, threads: Threads) -> None:
        super().__init__(1)
        self._to_do = threads

    async def load(self, work: Callable[[], Any]) -> Any:
        return await finished(self._to_do.submit("load", work))

    async def store(self, work: Callable[[], Any]) -> Any:
        return await finished(self._to_do.submit("store", work))


class SteppedCopier(Copier):
    def __init__(self, threads: Threads) -> None:
        super().__init__(1)
        self._to_do = threads

    async def run(self, work: Callable[[], Any]) -> Any:
        return await finished(self._to_do.submit("copy", work))


class PatientFaults(Faults):
    """A fault that cannot happen to an operation waits for the next."""

    def next(self, name: str, offset: int = 0, size: int = 0) -> Fault | None:
        number = len(self.operations)
        fault = self.at.get(number)
        is_far = isinstance(fault, FlipBit) and (name not in ("read", "write") or fault.bit >= 8 * size)
        is_of_writes = isinstance(fault, Tear | Lose) and name != "write"
        if is_far or is_of_writes:
            self.at[number + 1] = self.at.pop(number)
        return super().next(name, offset, size)


class TieredStore:
    """`restart` begins anew on what lies in `folder`. Sizes of tiers in slabs; without `nvme` there is no disk."""

    def __init__(self, folder: Path, *, dram: int = 4, nvme: int = 4, bucket: Bucket | None = None,
                 ledger: bool = False, everything: bool = True, bytes_per_day: int = 0,
                 through: frozenset[str] = frozenset(), quota: int = 0,
                 limits: Limits | None = None, epoch: int = 0) -> None:  # fmt: skip
        self.loop = VirtualLoop()
        self.threads = Threads()
        self.faults = PatientFaults()
        self.folder = folder
        self.bucket = bucket
        self.sizes = {DRAM: dram, NVME: nvme}
        self.has_ledger = ledger
        self.admission = (everything, bytes_per_day)
        self.through = through
        self.limits = limits or Limits()
        self.tenants = {"red": Tenant("red", "r"), "blue": Tenant("blue", "b", quota_bytes=quota)}
        self.crashes: list[BaseException] = []
        self.epoch = epoch
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(nvme_module, "open_block_file", self._open_file)
        self.start_store()

    # Life.

    def start_store(self) -> None:
        self.epoch += 1000
        shapes = {DRAM: TierShape(DRAM_SLAB)}
        if self.sizes[NVME]:
            shapes[NVME] = TierShape(NVME_SLAB, "", disk_stride)
        self.table = BlockTable(shapes)
        self.catalogue = Catalogue(
            16, lambda tenant, number: tuple(self.table.space(tenant, number, t) for t in shapes)
        )
        copier = SteppedCopier(self.threads)
        dram = DramTier(TierSpec(DRAM, DRAM_SLAB), copier, huge_pages="no", mlock="no", prefault=False)
        self.disk, records, self.recovery = None, None, None
        if self.sizes[NVME]:
            queue = SteppedQueue(self.threads)
            medium = NvmeTier(TierSpec(NVME, NVME_SLAB), self.folder / "slabs", queue, io="posix")
            self.disk = Disk(medium, queue, self.loop, wall_ms=self._wall_ms, root_of=self._root_of)
        if self.disk is not None and self.has_ledger:
            records = Records(self.folder, wall_ms=self._wall_ms, failed=self.disk.store_failed)
            records._thread = AtOnce()
            self.recovery = Recovery(
                *(self.table, self.catalogue, self.disk, records),
                tenants=self.tenants,
                epoch=self.epoch,
                now=self.loop.now,
            )
        self.store = Store(
            *(self.table, self.catalogue, dram, copier, self.loop),
            limits=self.limits,
            index_entries=1024,
            epoch=self.epoch,
            above=None,
            below=Below(self._admission(), self.disk, records, self._object_tier(copier), self.through),
            crashed=self.crashes.append,
        )
        capacities = {DRAM: self.sizes[DRAM] * DRAM_SLAB, NVME: self.sizes[NVME] * NVME_SLAB}
        kept = {tier: size for tier, size in capacities.items() if size}
        self.upkeep = Upkeep(self.store, {tier: Marks(0.75, 0.5) for tier in kept}, kept)
        self.store.demotion.is_paused = self.recovery is not None
        self.run(self.upkeep.resize(DRAM))
        if self.recovery is not None:
            self.run(self.recovery.begin())
        elif self.disk is not None:
            self.run(self.upkeep.resize_disk())

    async def recover(self) -> None:
        """What the node does about its disk after `begin`."""
        assert self.recovery is not None
        await self.recovery.load()
        self.store.demotion.is_paused = False
        await self.upkeep.resize_disk()

    def stop_store(self) -> None:
        self.run(self.store.aclose())

    def forget_untold(self) -> None:
        """What the ledger was not told yet it will not be: the process is killed."""
        records = self.store.below.records
        assert records is not None
        records._pending.clear()
        records._namespaces = None

    def close(self) -> None:
        """Stop the store, and what goes on in the loop."""
        self.stop_store()
        self._patch.undo()
        self.loop.close()
        assert self.crashes == []

    # What goes on.

    def turn(self, turns: int = TURNS) -> None:
        """Let the loop do what needs neither a thread nor time."""

        async def spin() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(spin())

    def start(self, work: Coroutine[Any, Any, Any], turns: int = TURNS) -> "asyncio.Task[Any]":
        """Begin something, up to where it waits."""
        task = self.loop.create_task(work)
        self.turn(turns)
        return task

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something to its end; threads and time help."""
        return self.finish(self.start(work))

    def call(self, work: Callable[[], Any]) -> Any:
        """Do something that begins tasks of its own."""

        async def called() -> Any:
            return work()

        return self.run(called())

    async def cancelled(self, work: Coroutine[Any, Any, Any], turns: int, *, is_begun: bool = False) -> None:
        """Begin something and cancel it after so many turns of the loop; with `is_begun` its thread is at it then."""
        task = self.loop.create_task(work)
        for _ in range(turns):
            await asyncio.sleep(0)
        if is_begun and self.threads.waiting():
            self.threads.waiting()[0].begin()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def finish(self, task: "asyncio.Task[Any]") -> Any:
        for _ in range(2000):
            if task.done():
                return task.result()
            if not self.do_jobs():
                self.advance(0.05)
        raise AssertionError("it does not end")

    def do_jobs(self, kind: str = "", jobs: int = 1 << 30) -> int:
        """Do what waits for a thread, the oldest first; how many those were."""
        waiting = self.threads.waiting(kind)[:jobs]
        for job in waiting:
            job.end()
            self.turn()
        return len(waiting)

    def stop_background(self) -> None:
        """As at the node's end: what runs in the background is cancelled, and not waited for here."""
        self.loop.create_task(self.store._tasks.aclose())

    def settle(self) -> None:
        """Until nothing waits for a thread."""
        self.turn()
        while self.do_jobs():
            pass

    def advance(self, seconds: float) -> None:
        self.loop.seconds += seconds
        self.turn()

    # Blocks.

    def open(self, tenant: str = "red", parts: int = 1) -> OpenNamespace:
        namespace = Namespace(model="m", dtype="u8", layout="x", block_tokens=16, parts=parts, layers=2)
        return self.call(lambda: self.store.open(self.tenants[tenant], f"of {parts}", namespace))

    def put(self, space: OpenNamespace, keys: Sequence[BlockKey], blocks: Sequence[bytes], *,
            parent: BlockKey | None = None) -> list[Placement]:  # fmt: skip
        """Store a run of a chain, or what of it is wanted; what became of each."""
        puts, sizes = self.store.puts, [len(block) for block in blocks]
        placing = puts.place(OWNER, space, keys, parent, sizes)
        puts.granted(OWNER, space, keys, placing)
        if placing.grant is not None:
            self.fill(placing.grant.replicas, dict(zip(keys, blocks, strict=True)))
            sums = [checksum(self.store.view(replica)) for replica in placing.grant.replicas]
            puts.commit(OWNER, placing.grant.grant_id, sums, "shared")
        return placing.placements

    def fill(self, replicas: Sequence[Any], blocks: dict[BlockKey, bytes]) -> None:
        for replica in replicas:
            self.store.view(replica)[:] = blocks[replica.key]

    def acquire(self, space: OpenNamespace, keys: Sequence[BlockKey], *, load_s: float = 30.0, wait_s: float = 0.0,
                tokens_per_s: float = 0.0, owner: Owner = OWNER) -> Coroutine[Any, Any, Any]:  # fmt: skip
        return self.store.reads.acquire(
            owner, space, keys, lease_s=60.0, wait_s=wait_s, layers=0, load_s=load_s, tokens_per_s=tokens_per_s
        )

    def get(self, space: OpenNamespace, keys: Sequence[BlockKey], *, load_s: float = 30.0,
            tokens_per_s: float = 0.0) -> list[bytes]:  # fmt: skip
        """The bytes of the prefix that can be had."""
        return self.read(self.run(self.acquire(space, keys, load_s=load_s, tokens_per_s=tokens_per_s)))

    def read(self, lease: Any, owner: Owner = OWNER) -> list[bytes]:
        """What a lease holds; it is released."""
        if lease is None:
            return []
        found = [bytes(self.store.view(replica)) for replica in lease.replicas]
        self.store.reads.release(owner, lease.lease_id)
        return found

    def drop_dram(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> None:
        """As if they had been evicted."""
        for key in reversed(keys):
            replica = self.table.readable(space.dram, key)
            if replica is not None:
                self.store.discard(space, [key], Cause.WATERMARK, DRAM)

    def sink(self, space: OpenNamespace, keys: Sequence[BlockKey], blocks: Sequence[bytes], tier: str = NVME) -> None:
        """Have blocks in a lower tier only."""
        assert self.put(space, keys, blocks) == [Placement.GRANTED] * len(keys)
        assert self.run(self.store.demotion.demote(space, keys, tier, evict=True)) == (len(keys), len(keys))

    def problems(self) -> list[str]:
        """What is wrong at rest: nothing may be on its way."""
        found = list(self.store.problems())
        for space in self.table.spaces():
            found += [f"{key.hex()} is {replica.state}" for key, replica in space.replicas.items()
                      if replica.state is not State.WRITTEN]  # fmt: skip
        for tier in self.table.tiers.values():
            found += [f"{tier.name}: {len(tier.draining)} replicas drain"] if tier.draining else []
            found += [f"{tier.name}: {len(tier.moves)} replicas move"] if tier.moves else []
        found += [f"{replica.key.hex()} is held by the node" for replica in self.store.own.held()]
        for tier in self.table.tiers.values():
            apart = [slab.slab_id for slab in tier.pool.in_use() if tier.pool.is_apart(slab)]
            found += [f"{tier.name}: slabs {apart} are apart"] if apart else []
        if self.store.promotion.loading_bytes or not self.store.promotion.is_idle:
            found.append(f"{self.store.promotion.loading_bytes} bytes are being loaded")
        return found

    # Inside.

    def _open_file(self, path: Path, **how: Any) -> FaultyFile:
        return FaultyFile(open_block_file(path, **how), self.faults)

    def _wall_ms(self) -> int:
        return int(self.loop.seconds * 1000)

    def _root_of(self, space: Any) -> bytes:
        found = self.catalogue.of_number(space.number)
        assert found is not None
        return found.root

    def _admission(self) -> Admission:
        everything, bytes_per_day = self.admission
        return Admission(everything=everything, bytes_per_day=bytes_per_day, now=self.loop.now())

    def _object_tier(self, copier: Copier) -> ObjectTier | None:
        if self.bucket is None:
            return None
        spec = ObjectSpec(node="n", capacity_bytes=0)
        return ObjectTier(self.bucket, spec, copier, clock=self.loop, wall=self.loop.now, random=Random(self.epoch))


def chain_keys(space: OpenNamespace, prompt: Sequence[int], part: int = 0) -> list[BlockKey]:
    """Keys that share what their prompts share; one block for each number."""
    tokens = [number for number in prompt for _ in range(space.namespace.block_tokens)]
    keys = chain(tokens, space.namespace.block_tokens, space.root)
    return keys if space.namespace.parts == 1 else [part_key(key, part) for key in keys]


def block_of(key: BlockKey, size: int, version: int = 0) -> bytes:
    """Bytes that no other key or version has."""
    return Random(key + bytes([version])).randbytes(size)


@contextmanager
def tiered_stores() -> Iterator[Callable[..., TieredStore]]:
    """Makes stores that at the end are at rest and in order."""
    stores: list[TieredStore] = []
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))

    def made(**settings) -> TieredStore:
        stores.append(TieredStore(folder / str(len(stores)), **settings))
        return stores[-1]

    yield made
    try:
        for node in stores:
            node.settle()
            assert node.problems() == []
            node.close()
    finally:
        shutil.rmtree(folder)
