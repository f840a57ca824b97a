"""Drive a whole store with a disk and a bucket through random interleavings, faults and restarts.

The oracle is which bytes were ever put under a key, and which keys were deleted since: whatever is read is some of the
former and none of the latter, and at rest nothing is left behind.
"""

import os
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import suppress
from errno import EIO, ENOSPC
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.catalogue import OpenNamespace
from kvstore.copier import checksum
from kvstore.errors import Rejected, StaleLease
from kvstore.types import DRAM, NVME, OBJECT, BlockKey, Cause, Owner
from tests.faulty_bucket import FaultyBucket, Work
from tests.faulty_file import Fail, FlipBit, Lose, Tear
from tests.tiered_store import TieredStore, block_of, chain_keys

QUOTA = 5 * 1024
SIZES = (700, 1000, 1500)
READER, WRITER = Owner(1), Owner(2)
SHM = Path("/dev/shm")

PROFILES = {
    # name: (examples, steps, derandomized)
    "mutant": (150, 50, True),
    "ci": (60, 60, False),
    "long": (600, 120, False),
}

Name = tuple[str, int]
"""Tenant and parts of a namespace."""

names = st.sampled_from([("red", 1), ("blue", 2)])
prompts = st.tuples(st.integers(0, 2), st.integers(2, 4)).map(lambda ab: [ab[0], *range(50, 49 + ab[1])])
jobs_done = st.sampled_from([0, 0, 1, 2, 9])  # of the threads', after something was begun
sometimes = st.sampled_from([False, False, True])
seldom = st.integers(0, 4).map(lambda number: number == 4)
parts = st.integers(0, 1)
which = st.integers(0, 63)  # one of those there are, modulo their number
lower = st.sampled_from([NVME, NVME, OBJECT])
disk_faults = st.sampled_from(
    [Fail(EIO), Fail(ENOSPC), Lose(), FlipBit(8 * 40), FlipBit(8 * 4096 + 3), Tear(4096), Tear(100)]
)


class Leased(NamedTuple):
    name: Name
    lease: Any
    blocks: list[bytes]


class Granted(NamedTuple):
    name: Name
    grant: Any
    blocks: dict[BlockKey, bytes]


class Going(NamedTuple):
    """Something on its way; what an acquire asked for."""

    task: Any
    name: Name | None = None
    keys: list[BlockKey] | None = None
    is_recovery: bool = False


def size_of(key: BlockKey) -> int:
    return SIZES[key[0] % len(SIZES)]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=SHM if SHM.is_dir() else None))
        self.ever: dict[tuple[Name, BlockKey], set[bytes]] = {}
        self.deleted: set[tuple[Name, BlockKey]] = set()
        self.deleted_lately: set[tuple[Name, BlockKey]] = set()  # and the ledger may not know
        self.going: list[Going] = []
        self.leases: list[Leased] = []
        self.grants: list[Granted] = []
        self.chains: list[tuple[Name, list[int], int]] = []  # that were stored below
        self.starts = 0

    @initialize(bucket=st.booleans(), everything=st.booleans(), through=st.booleans(),
                stored=st.lists(st.tuples(names, prompts, parts), min_size=1, max_size=4))  # fmt: skip
    def start(self, bucket: bool, everything: bool, through: bool, stored: Any) -> None:
        self.bucket = FaultyBucket() if bucket else None
        self.settings = {"everything": everything, "through": frozenset({NVME, OBJECT}) if through else frozenset()}
        self.node = self.new_node(0)
        self.node.run(self.node.recover())
        for name, prompt, _ in stored:
            self.store_below(name, prompt, delete=False)

    def new_node(self, epoch: int) -> TieredStore:
        self.starts += 1
        folder = self.folder / str(self.starts)
        return TieredStore(
            folder, dram=4, nvme=4, ledger=True, bucket=self.bucket, quota=QUOTA, epoch=epoch, **self.settings
        )

    def teardown(self) -> None:
        try:
            if hasattr(self, "node"):
                self.rest()
                self.node.close()
        finally:
            shutil.rmtree(self.folder)

    # What goes on.

    def space(self, name: Name) -> OpenNamespace:
        return self.node.open(*name)

    def keys(self, name: Name, prompt: list[int], part: int) -> list[BlockKey]:
        return chain_keys(self.space(name), prompt, part % name[1])

    def begin(self, work: Coroutine[Any, Any, Any], jobs: int, name: Name | None = None, keys: Any = None) -> None:
        self.going.append(Going(self.node.start(work), name, keys))
        self.collect()
        self.node.do_jobs(jobs=jobs)
        self.collect()

    def collect(self) -> None:
        """Take up what has ended: an acquire's blocks must be right."""
        self.node.turn()
        for going in [going for going in self.going if going.task.done()]:
            self.going.remove(going)
            if going.task.cancelled():
                continue
            if going.task.exception() is not None:
                assert isinstance(going.task.exception(), Rejected), going.task.exception()
            elif going.keys is not None and going.name is not None and going.task.result() is not None:
                self.take(going.name, going.keys, going.task.result())

    def take(self, name: Name, keys: list[BlockKey], lease: Any) -> None:
        blocks = [bytes(self.node.store.view(replica)) for replica in lease.replicas]
        for key, replica, block in zip(keys, lease.replicas, blocks, strict=False):
            assert replica.key == key
            assert block in self.ever.get((name, key), ()), "bytes that were never put"
            assert checksum(block) == replica.checksum
            assert (name, key) not in self.deleted, "a deleted block came back"
        self.leases.append(Leased(name, lease, blocks))

    # Clients.

    @rule(
        name=names, prompt=prompts, part=parts, version=st.integers(0, 1), end=st.sampled_from(["commit", "", "abort"])
    )
    def put(self, name: Name, prompt: list[int], part: int, version: int, end: str) -> None:
        keys = self.keys(name, prompt, part)
        blocks = {key: block_of(key, size_of(key), version) for key in keys}
        puts = self.node.store.puts
        try:
            placing = puts.place(WRITER, self.space(name), keys, None, [size_of(key) for key in keys])
        except Rejected:
            return
        puts.granted(WRITER, self.space(name), keys, placing)
        if placing.grant is not None:
            self.node.fill(placing.grant.replicas, blocks)
            self.grants.append(Granted(name, placing.grant, blocks))
            if end:
                self.end_grant(len(self.grants) - 1, end == "commit")
        self.collect()

    @precondition(lambda self: self.grants)
    @rule(number=which, is_good=st.booleans())
    def end_put(self, number: int, is_good: bool) -> None:
        self.end_grant(number % len(self.grants), is_good)
        self.collect()

    def end_grant(self, number: int, is_good: bool) -> None:
        name, grant, blocks = self.grants.pop(number)
        if not is_good:
            self.node.store.puts.abort(WRITER, grant.grant_id)
            return
        sums = [checksum(blocks[replica.key]) for replica in grant.replicas]
        with suppress(StaleLease):  # it took too long
            self.node.store.puts.commit(WRITER, grant.grant_id, sums, "shared")
            for replica in grant.replicas:
                self.ever.setdefault((name, replica.key), set()).add(blocks[replica.key])
                self.deleted.discard((name, replica.key))

    @rule(name=names, prompt=prompts, part=parts, load_s=st.sampled_from([0.0, 0.2, 30.0, 30.0]),
          wait_s=st.sampled_from([0.0, 1.0]), tokens_per_s=st.sampled_from([0.0, 0.0, 1000.0]),
          jobs=jobs_done)  # fmt: skip
    def acquire(self, *, name: Name, prompt: list[int], part: int, load_s: float, wait_s: float,
                tokens_per_s: float, jobs: int) -> None:  # fmt: skip
        keys = self.keys(name, prompt, part)
        work = self.node.acquire(
            self.space(name), keys, load_s=load_s, wait_s=wait_s, tokens_per_s=tokens_per_s, owner=READER
        )
        self.begin(work, jobs, name, keys)

    @precondition(lambda self: self.chains)
    @rule(number=which, below=st.booleans(), delete=sometimes, damage=sometimes)
    def get(self, *, number: int, below: bool, delete: bool, damage: bool) -> None:
        """Ask for a chain that was put, with what that needs of threads and time; not from memory, if `below`."""
        name, prompt, part = self.chains[-1 - number % min(len(self.chains), 8)]
        self.heal()
        if below or damage or delete:
            self.drop_from_memory(name, prompt, part)
        if damage:
            self.damage(self.space(name), self.keys(name, prompt, part))
        self.acquire(name=name, prompt=prompt, part=part, load_s=30.0, wait_s=0.0, tokens_per_s=0.0, jobs=0)
        if delete:
            self.delete(name, prompt, part, "")
        for _ in range(8):
            self.node.do_jobs()
            self.collect()

    def drop_from_memory(self, name: Name, prompt: list[int], part: int) -> None:
        self.node.drop_dram(self.space(name), self.keys(name, prompt, part))
        self.collect()

    @precondition(lambda self: self.leases)
    @rule(number=which)
    def release(self, number: int) -> None:
        """Until then its blocks stay as they were."""
        _, lease, blocks = self.leases.pop(number % len(self.leases))
        with suppress(StaleLease):  # it lapsed
            self.node.store.holds.leased(READER, lease.lease_id)
            assert self.node.read(lease, READER) == blocks, "a block changed under its lease"
        self.collect()

    @rule(name=names, prompt=prompts, part=parts)
    def match(self, name: Name, prompt: list[int], part: int) -> None:
        """What was deleted is nowhere."""
        keys = self.keys(name, prompt, part)
        self.node.store.reads.match(self.space(name), keys)
        for key in keys:
            if (name, key) in self.deleted:
                assert self.node.store.where(self.space(name), key) == ("", 0), "a deleted block is still here"

    @rule(name=names, prompt=prompts, part=parts, tier=st.sampled_from(["", "", DRAM, NVME]))
    def delete(self, name: Name, prompt: list[int], part: int, tier: str) -> None:
        self.delete_end(name, self.keys(name, prompt, part), tier)

    @precondition(lambda self: any(going.keys for going in self.going))
    @rule()
    def delete_what_is_asked_for(self) -> None:
        going = next(going for going in self.going if going.keys)
        assert going.name is not None
        assert going.keys is not None
        self.delete_end(going.name, going.keys, "")

    def delete_end(self, name: Name, keys: list[BlockKey], tier: str) -> None:
        keys = keys[-2:]
        self.node.store.discard(self.space(name), keys, Cause.DELETED, tier)
        if not tier:
            self.deleted |= {(name, key) for key in keys}
            self.deleted_lately |= {(name, key) for key in keys}
        self.collect()

    @precondition(lambda self: self.going)
    @rule(number=which)
    def cancel(self, number: int) -> None:
        going = self.going[number % len(self.going)]
        if not going.is_recovery:
            going.task.cancel()
        self.collect()

    # The node.

    @rule(name=names, prompt=prompts, part=parts, tier=lower, evict=st.booleans(), jobs=jobs_done)
    def demote(self, name: Name, prompt: list[int], part: int, tier: str, evict: bool, jobs: int) -> None:
        if tier == NVME or self.bucket is not None:
            keys = self.keys(name, prompt, part)
            self.begin(self.node.store.demotion.demote(self.space(name), keys, tier, evict=evict), jobs)

    @rule(excess=st.sampled_from([1, 3000, 99_999]), jobs=jobs_done, delete=sometimes)
    def step(self, excess: int, jobs: int, delete: bool) -> None:
        coldest = self.node.table.coldest(DRAM)
        self.begin(self.node.store.demotion.step(excess, Cause.WATERMARK), 0)
        if delete and coldest is not None:
            name = next(name for name in (("red", 1), ("blue", 2)) if self.space(name).dram is coldest.space)
            self.delete_end(name, [coldest.key], "")
        self.node.do_jobs(jobs=jobs)
        self.collect()

    @rule(job=st.sampled_from(["write through", "give back", "give back hot", "look"]), jobs=jobs_done)
    def keep_up(self, job: str, jobs: int) -> None:
        store, is_paused = self.node.store, self.node.store.demotion.is_paused
        if job == "write through" and not is_paused:
            self.begin(store.demotion.write_through(), jobs)
        elif job == "look":
            self.node.upkeep.look()
        elif job.startswith("give back") and store.reclaim is not None:
            self.begin(store.reclaim.give_back(Cause.WATERMARK, readmits=job.endswith("hot")), jobs)
        if not is_paused:
            self.begin(self.node.upkeep.resize_disk(), jobs)

    def tell_the_ledger(self) -> None:
        assert self.node.store.below.records is not None
        self.node.run(self.node.store.below.records.flush())
        self.deleted_lately.clear()
        self.collect()

    # Threads, time, faults.

    @precondition(lambda self: self.node.threads.waiting())
    @rule(number=which, is_end=st.booleans())
    def thread_works(self, number: int, is_end: bool) -> None:
        waiting = self.node.threads.waiting()
        job = waiting[number % len(waiting)]
        if is_end:
            job.end()
        else:
            job.begin()
        self.collect()

    @precondition(lambda self: self.going)
    @rule(seconds=st.sampled_from([0.06, 0.3, 1.5, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.node.advance(seconds)
        self.collect()

    @rule(fault=disk_faults | st.sampled_from(["bit", "get", "put", "list"]), after=st.integers(0, 2), number=which)
    def something_goes_wrong(self, fault: Any, after: int, number: int) -> None:
        """At one of the next operations of the disk, on its files as they lie, or at a request to the bucket."""
        faults = self.node.faults
        if fault == "bit":
            self.flip_bit(number, after)
        elif isinstance(fault, str):
            self.bucket_goes_wrong(fault)
        else:
            faults.at = {len(faults.operations) + after: fault}

    def damage(self, space: OpenNamespace, keys: list[BlockKey]) -> None:
        """A bit flips of the first block that the disk has of these."""
        assert space.nvme is not None
        replica = next((space.nvme.replicas[key] for key in keys if key in space.nvme.replicas), None)
        if replica is not None:
            file = self.node.folder / "slabs" / f"{replica.slab.slab_id:010d}.slab"
            self.flip(file, replica.slot.offset + 4096 + replica.size // 2, 1)

    def heal(self) -> None:
        """The disk is well, and it is known what lies on it."""
        self.node.faults.at = {}
        for going in [going for going in self.going if going.is_recovery]:
            self.node.finish(going.task)
        assert self.node.disk is not None
        while not (self.node.disk.may_load() and self.node.disk.may_store()):
            self.node.advance(30.0)
        self.collect()

    def flip_bit(self, number: int, seed: int) -> None:
        files = sorted((self.node.folder / "slabs").glob("*.slab"))
        if files:
            file = files[number % len(files)]
            slot = Random(seed).randrange(file.stat().st_size // 8192) * 8192
            self.flip(file, slot + Random(seed).choice([20, 60, 4096, 4200, 4500]), 1 << seed % 8)

    def flip(self, file: Path, position: int, bits: int) -> None:
        with file.open("r+b") as opened:
            opened.seek(position)
            (byte,) = opened.read(1) or b"\0"
            opened.seek(position)
            opened.write(bytes([byte ^ bits]))

    def bucket_goes_wrong(self, kind: str) -> None:
        if self.bucket is not None:

            async def away(work: Work) -> Any:
                raise OSError("away")

            self.bucket.next_up[kind].append(away)

    # Restarts.

    def leave(self) -> None:
        """All clients go."""
        for going in self.going:
            going.task.cancel()
        self.node.settle()
        self.collect()
        self.leases.clear()
        self.grants.clear()

    @rule(name=names, prompt=prompts, delete=sometimes)
    def store_below(self, name: Name, prompt: list[int], delete: bool) -> None:
        """All that it takes for a chain to lie on the disk, and the ledger to know it; its end goes on the way."""
        self.heal()
        for part in range(name[1]):
            self.put(name, prompt, part, 0, "commit")
            self.chains.append((name, prompt, part))
            keys = self.keys(name, prompt, part)
            task = self.node.start(self.node.store.demotion.demote(self.space(name), keys, NVME, evict=True))
            if delete:
                self.delete_end(name, keys, "")
            self.node.finish(task)
        self.tell_the_ledger()

    @rule(really=seldom, flush=st.booleans(), before=which, deleted=which)
    def restart(self, really: bool, flush: bool, before: int, deleted: int) -> None:
        if not really:
            return
        if flush:
            self.node.run(self.node.store.demotion.flush(self.node.loop.now() + 9))
        self.delete_one(before)
        self.leave()
        self.node.faults.at.clear()
        self.node.stop_store()
        assert self.node.crashes == []
        if self.bucket is not None:
            self.deleted.clear()  # what other nodes may have of it is found again
        self.deleted_lately.clear()
        self.node.start_store()
        self.come_back(deleted)

    @rule(really=seldom, deleted=which)
    def kill(self, really: bool, deleted: int) -> None:
        """What the disk has at this moment, and what the ledger was told, is what the next start finds."""
        if not really:
            return
        old = self.node
        image = self.folder / str(self.starts + 1)
        shutil.copytree(old.folder / "slabs", image / "slabs")
        self.leave()
        old.forget_untold()
        old.close()
        shutil.copytree(old.folder, image, dirs_exist_ok=True, ignore=lambda *_: {"slabs"})
        shutil.rmtree(old.folder)
        self.deleted -= self.deleted_lately
        if self.bucket is not None:
            self.deleted.clear()
        self.deleted_lately.clear()
        self.node = self.new_node(old.epoch)
        self.come_back(deleted)

    def come_back(self, deleted: int) -> None:
        """`deleted` is, as soon as the node serves."""
        for name in (("red", 1), ("blue", 2)):
            self.space(name)
        self.going.append(Going(self.node.start(self.node.recover(), turns=1), is_recovery=True))
        self.delete_one(deleted)
        self.collect()

    def delete_one(self, number: int) -> None:
        """Of those that were ever put, or none."""
        known = [*self.ever, None]
        found = known[number % len(known)]
        if found is not None:
            self.delete_end(found[0], [found[1]], "")

    # At rest.

    @rule(really=seldom)
    def come_to_rest(self, really: bool) -> None:
        if really:
            self.rest()

    def rest(self) -> None:
        while self.leases:
            self.release(0)
        while self.grants:
            self.end_grant(0, is_good=True)
        for _ in range(400):
            self.node.settle()
            self.collect()
            if not self.going and self.node.store.promotion.is_idle:
                break
            self.node.advance(0.3)
        else:
            raise AssertionError(f"it does not come to rest: {self.going}")
        while self.leases:
            self.release(0)
        self.node.settle()
        assert self.node.problems() == []
        for name, key in self.deleted:
            assert self.node.store.where(self.space(name), key) == ("", 0), "a deleted block came back"

    @invariant()
    def nothing_is_wrong(self) -> None:
        if not hasattr(self, "node"):
            return
        assert self.node.crashes == []
        assert list(self.node.store.problems()) == []
        dram, disk = self.node.table.tiers[DRAM], self.node.table.tiers[NVME]
        assert dram.tenant_bytes.get("blue", 0) <= QUOTA
        assert disk.used_bytes <= disk.pool.capacity_bytes <= self.node.sizes[NVME] * disk.pool.slab_bytes


_examples, _steps, _derandomized = PROFILES[os.environ.get("CAIRN_MODEL_PROFILE", "ci")]

TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=_examples,
    stateful_step_count=_steps,
    deadline=None,
    derandomize=_derandomized,
    phases=[Phase.generate] if _derandomized else list(Phase),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
