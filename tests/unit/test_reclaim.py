"""The disk's coldest slab given back whole: what moves, what is deleted or read meanwhile, and what a stop leaves."""

import asyncio
from collections.abc import Callable, Iterator
from errno import ENOSPC, EROFS

import pytest

from kvstore.types import DRAM, NVME, OBJECT, Cause
from tests.faulty_bucket import FaultyBucket
from tests.faulty_file import Fail, FlipBit
from tests.tiered_store import TieredStore, block_of, chain_keys, tiered_stores

Make = Callable[..., TieredStore]
SIZE = 1000
PER_SLAB = 4  # such blocks


@pytest.fixture
def make() -> Iterator[Make]:
    with tiered_stores() as made:
        yield made


class Slabs:
    """So many slabs full of blocks of one block prompts, on the disk only, the coldest first."""

    def __init__(self, node: TieredStore, slabs: int):
        self.node = node
        self.space = node.open()
        self.keys = [chain_keys(self.space, [number])[0] for number in range(slabs * PER_SLAB)]
        self.blocks = [block_of(key, SIZE) for key in self.keys]
        for key, block in zip(self.keys, self.blocks, strict=True):
            node.sink(self.space, [key], [block])

    def give_back(self, *, readmits: bool = True):
        return self.node.store.reclaim.give_back(Cause.WATERMARK, readmits=readmits)

    def here(self) -> list[int]:
        """Which of the blocks can be had, by number; their bytes are right."""
        found = []
        for number, key in enumerate(self.keys):
            got = self.node.get(self.space, [key])
            if got:
                assert got == [self.blocks[number]]
                found.append(number)
        return found

    def on_disk(self) -> list[int]:
        return [number for number, key in enumerate(self.keys) if key in self.space.nvme.replicas]

    def use(self, *numbers: int) -> None:
        """They are read by way of memory, and go from there."""
        for number in numbers:
            self.node.table.use(self.space.nvme.replicas[self.keys[number]])

    def replica(self, number: int):
        return self.space.nvme.replicas[self.keys[number]]


def test_the_slab_used_longest_ago_goes_whole_and_its_space_with_it(make):
    slabs = Slabs(make(), 3)
    assert slabs.node.run(slabs.give_back())
    assert slabs.on_disk() == list(range(4, 12))
    assert [name for name, *_ in slabs.node.faults.operations[-1:]] == ["punch"]
    assert slabs.node.table.tiers[NVME].used_bytes == 8 * 8192
    assert slabs.node.store.counters.removed_blocks[Cause.WATERMARK.value] == 4
    assert slabs.here() == list(range(4, 12))


def test_a_slab_that_was_given_back_can_be_written_again(make):
    slabs = Slabs(make(nvme=3), 3)
    slabs.node.run(slabs.give_back())
    again = slabs.keys[:2]
    for key, block in zip(again, slabs.blocks, strict=False):
        slabs.node.sink(slabs.space, [key], [block])
    assert slabs.here() == [0, 1, *range(4, 12)]


def hot_in_cold(make, monkeypatch, **settings) -> Slabs:
    """Block 1 is hot and lies in the slab that goes next: it will be written once more."""
    monkeypatch.setattr("kvstore.reclaim.READMITTED", 0.3)
    slabs = Slabs(make(nvme=4, **settings), 3)
    slabs.use(*range(4, 12), 1)
    return slabs


def test_a_hot_block_of_a_cold_slab_is_written_once_more(make, monkeypatch):
    slabs = hot_in_cold(make, monkeypatch)
    before = slabs.replica(1).slot
    slabs.node.run(slabs.give_back())
    assert slabs.on_disk() == [1, *range(4, 12)]
    assert slabs.replica(1).slot != before
    assert slabs.node.store.counters.readmitted_blocks == 1
    assert slabs.here() == [1, *range(4, 12)]


@pytest.mark.parametrize(("share", "blocks"), [(0.2, 0), (0.5, 2), (1.0, 4)])
def test_no_more_is_written_once_more_than_its_share(make, monkeypatch, share, blocks):
    slabs = hot_in_cold(make, monkeypatch)
    monkeypatch.setattr("kvstore.reclaim.READMITTED", share)
    monkeypatch.setattr("kvstore.reclaim._mean_use", lambda slab: -slab.slab_id)  # the first is taken last
    slabs.use(*range(4, 12), 0, 1, 2, 3)
    slabs.node.run(slabs.give_back())
    assert slabs.on_disk() == list(range(4 - blocks, 12))


class TestMeanwhile:
    def moving(self, make, monkeypatch, **settings):
        slabs = hot_in_cold(make, monkeypatch, **settings)
        task = slabs.node.start(slabs.give_back())
        assert len(slabs.node.table.tiers[NVME].moves) == 1
        return slabs, task

    @pytest.mark.parametrize("jobs", [0, 1])
    def test_what_is_deleted_while_it_is_copied_does_not_come_back(self, make, monkeypatch, jobs):
        slabs, task = self.moving(make, monkeypatch)
        slabs.node.do_jobs(jobs=jobs)
        slabs.node.store.discard(slabs.space, [slabs.keys[1]], Cause.DELETED)
        slabs.node.finish(task)
        assert slabs.here() == list(range(4, 12))

    def test_what_is_read_while_it_is_copied_is_read_whole(self, make, monkeypatch):
        slabs, task = self.moving(make, monkeypatch)
        read = slabs.node.start(slabs.node.acquire(slabs.space, [slabs.keys[1]]))
        slabs.node.finish(task)
        assert slabs.node.read(slabs.node.finish(read)) == [slabs.blocks[1]]

    def test_what_is_read_while_its_slab_goes_keeps_the_slab_until_it_is_read(self, make):
        slabs = Slabs(make(bucket=FaultyBucket()), 2)
        slabs.use(0, 1, 2, 3, 4, 5, 6, 7)
        task = slabs.node.start(slabs.give_back())
        read = slabs.node.start(slabs.node.acquire(slabs.space, [slabs.keys[3]]))
        last = slabs.node.threads.waiting("load")[-1]
        while not task.done():
            for job in slabs.node.threads.waiting():
                if job is not last:
                    job.end()
            slabs.node.turn()
        assert "punch" not in [name for name, *_ in slabs.node.faults.operations]
        assert slabs.node.read(slabs.node.finish(read)) == [slabs.blocks[3]]

    def test_a_put_gets_no_slot_of_a_slab_that_goes(self, make, monkeypatch):
        slabs = hot_in_cold(make, monkeypatch)
        going = slabs.replica(0).slab
        slabs.node.store.discard(slabs.space, [slabs.keys[0]], Cause.DELETED)
        task = slabs.node.start(slabs.give_back())
        slabs.node.store.discard(slabs.space, [slabs.keys[2]], Cause.DELETED)
        key = chain_keys(slabs.space, [99])[0]
        slabs.node.put(slabs.space, [key], [block_of(key, SIZE)])
        demote = slabs.node.start(slabs.node.store.demotion.demote(slabs.space, [key], NVME, evict=False))
        assert slabs.space.nvme.replicas[key].slab is not going
        slabs.node.finish(task)
        slabs.node.finish(demote)
        assert slabs.here() == [1, *range(4, 12)]

    def test_a_block_that_cannot_be_copied_goes_with_its_slab(self, make, monkeypatch):
        for fault in (Fail(), FlipBit(8 * 4096)):
            slabs, task = self.moving(make, monkeypatch)
            slabs.node.faults.at[len(slabs.node.faults.operations)] = fault
            slabs.node.finish(task)
            assert slabs.here() == list(range(4, 12))
            assert slabs.node.store.counters.readmitted_blocks == 0

    @pytest.mark.parametrize("turns", range(12))
    @pytest.mark.parametrize("is_begun", [False, True])
    def test_cancelled_it_leaves_the_slab_in_use(self, make, monkeypatch, turns, is_begun):
        slabs = hot_in_cold(make, monkeypatch, bucket=FaultyBucket())
        slabs.node.run(slabs.node.cancelled(slabs.give_back(), turns, is_begun=is_begun))
        slabs.node.settle()
        assert slabs.node.problems() == []
        while slabs.node.run(slabs.give_back(readmits=False)):
            pass
        assert slabs.on_disk() == []

    def test_two_at_once_give_two_slabs_back(self, make, monkeypatch):
        slabs, first = self.moving(make, monkeypatch)
        second = slabs.node.start(slabs.give_back(readmits=False))
        assert (slabs.node.finish(first), slabs.node.finish(second)) == (True, True)
        assert slabs.node.problems() == []


class TestBucket:
    def test_what_was_of_use_goes_on_to_the_bucket(self, make):
        slabs = Slabs(make(nvme=3, bucket=FaultyBucket()), 3)
        slabs.replica(2).hits = 1
        slabs.node.run(slabs.give_back())
        assert slabs.here() == [2, *range(4, 12)]
        assert slabs.node.store.counters.demoted_blocks[OBJECT] == 1

    def test_what_is_deleted_on_its_way_is_not_known_any_more(self, make):
        bucket = FaultyBucket()
        slabs = Slabs(make(nvme=3, bucket=bucket), 3)
        slabs.replica(2).hits = 1
        gate = asyncio.Event()

        async def slow(work):
            await gate.wait()
            return await work()

        bucket.next_up["put"].append(slow)
        task = slabs.node.start(slabs.give_back())
        slabs.node.settle()
        slabs.node.store.discard(slabs.space, [slabs.keys[2]], Cause.DELETED)
        gate.set()
        slabs.node.finish(task)
        assert slabs.here() == list(range(4, 12))


class TestDrain:
    def test_a_disk_is_emptied_slab_by_slab(self, make):
        slabs = Slabs(make(), 3)
        assert slabs.node.run(slabs.node.upkeep.drain(NVME)) == (12, 0)
        assert slabs.node.table.tiers[NVME].used_bytes == 0

    def test_a_block_that_is_held_keeps_its_slab(self, make):
        slabs = Slabs(make(), 3)
        replica = slabs.replica(5)
        slabs.node.table.hold(replica)
        assert slabs.node.run(slabs.node.upkeep.drain(NVME)) == (8, 4)
        slabs.node.table.let_go(replica)

    def test_over_the_high_watermark_slabs_go_until_the_low_one(self, make):
        slabs = Slabs(make(nvme=4), 4)
        slabs.node.run(slabs.node.upkeep.relieve_disk())
        assert slabs.node.store.reclaim.cut_slabs() == 2
        assert slabs.here() == list(range(8, 16))

    def test_while_it_is_not_known_yet_what_lies_on_the_disk_nothing_goes(self, make, monkeypatch):
        monkeypatch.setattr("kvstore.recover.STEP_BLOCKS", 1)
        node = make(ledger=True)
        node.run(node.recover())
        Slabs(node, 3)
        node.run(node.store.below.records.flush())
        node.stop_store()
        node.start_store()
        recover = node.start(node.recover())
        node.threads.waiting("load")[0].end()
        while not node.table.tiers[NVME].pool.slabs:
            node.turn(0)
        drained = node.start(node.upkeep.drain(NVME), turns=0)
        assert not recover.done()
        node.finish(recover)
        node.finish(drained)
        node.run(node.upkeep.drain(NVME))
        assert node.table.tiers[NVME].replicas == 0


def test_the_disk_grows_and_shrinks_while_it_serves(make):
    slabs = Slabs(make(nvme=3), 3)
    slabs.node.upkeep.set_tier(NVME, capacity_bytes=1 * 32_768)
    slabs.node.run(slabs.node.upkeep.resize_disk())
    assert slabs.here() == list(range(8, 12))
    assert len(list((slabs.node.folder / "slabs").iterdir())) == 1
    slabs.node.upkeep.set_tier(NVME, capacity_bytes=2 * 32_768)
    slabs.node.run(slabs.node.upkeep.resize_disk())
    assert len(list((slabs.node.folder / "slabs").iterdir())) == 2


def test_blocks_that_memory_has_are_not_written_once_more(make, monkeypatch):
    slabs = hot_in_cold(make, monkeypatch)
    slabs.node.get(slabs.space, [slabs.keys[1]])
    assert slabs.node.store.where(slabs.space, slabs.keys[1])[0] == DRAM
    slabs.use(*range(4, 12))
    slabs.node.run(slabs.give_back())
    assert slabs.node.store.counters.readmitted_blocks == 0


@pytest.mark.parametrize("step", ["prepare", "adopt"])
def test_a_disk_without_space_for_another_tenant_s_slab_has_all_of_its_slabs_when_there_is_some(
    make, monkeypatch, step
):
    """A slab never passes to another tenant: it goes, and one is made anew."""
    node = make(nvme=2)
    slabs = Slabs(node, 2)
    node.run(node.upkeep.drain(NVME))
    blue = node.open("blue")
    key = chain_keys(blue, [1])[0]
    node.put(blue, [key], [block_of(key, SIZE)])

    async def prepare() -> None:
        raise OSError(ENOSPC, "no space left on device")

    def adopt(slab_id: int) -> None:
        medium._prepared.pop().close()
        raise OSError(EROFS, "read-only file system")

    medium, demotion = node.store.below.disk.medium, node.store.demotion
    with monkeypatch.context() as patch:
        patch.setattr(medium, step, {"prepare": prepare, "adopt": adopt}[step])
        for _ in range(3):
            assert node.run(demotion.demote(blue, [key], NVME, evict=False)) == (0, 0)
            node.run(node.upkeep.resize_disk())
            node.run(node.upkeep.relieve_disk())
            node.advance(0.2)
    node.advance(120.0)
    node.run(node.upkeep.resize_disk())
    assert node.table.tiers[NVME].pool.capacity_bytes == 2 * 32_768
    assert node.run(demotion.demote(blue, [key], NVME, evict=True)) == (1, 1)
    assert node.get(blue, [key]) == [block_of(key, SIZE)]
    assert slabs.here() == []
