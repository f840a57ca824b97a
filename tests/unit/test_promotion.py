"""Loads from lower tiers, interleaving by interleaving: deadlines, second reads, deletion and cancellation midway."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from kvstore.bandwidth import STALE_S
from kvstore.copier import checksum
from kvstore.intake import Limits
from kvstore.loads import JOB_BLOCKS
from kvstore.promotion import HEDGE_LEAST_S
from kvstore.types import DRAM, NVME, OBJECT, Cause, Owner, Placement
from tests.faulty_bucket import FaultyBucket
from tests.faulty_file import Fail, FlipBit
from tests.tiered_store import DRAM_SLAB, TieredStore, block_of, chain_keys, tiered_stores

Make = Callable[..., TieredStore]
SIZE = 1000
READS_TO_AWAY = 3


@pytest.fixture
def make() -> Iterator[Make]:
    with tiered_stores() as made:
        yield made


class Chain:
    """Blocks of one prompt, which lie on the disk only."""

    def __init__(self, node: TieredStore, blocks: int, *, tier: str = NVME, tenant: str = "red", size: int = SIZE):
        self.node = node
        self.space = node.open(tenant)
        self.keys = chain_keys(self.space, range(blocks))
        self.blocks = [block_of(key, size) for key in self.keys]
        node.sink(self.space, self.keys, self.blocks, tier)

    def get(self, keys=None, **how) -> int:
        """How many of its blocks can be had; their bytes are right."""
        found = self.node.get(self.space, keys or self.keys, **how)
        assert found == self.blocks[: len(found)]
        return len(found)

    def begin(self, load_s: float, tokens_per_s: float = 0.0, blocks: int | None = None) -> int:
        """How many are on their way."""
        promotion, keys = self.node.store.promotion, self.keys[:blocks]
        return self.node.call(lambda: promotion.begin(self.space, keys, load_s, tokens_per_s))

    def acquire(self, **how):
        return self.node.acquire(self.space, self.keys, **how)

    def delete(self, *positions: int, tier: str = "") -> None:
        self.node.store.discard(self.space, [self.keys[position] for position in positions], Cause.DELETED, tier)

    def where(self) -> list[str]:
        return [self.node.store.where(self.space, key)[0] for key in self.keys]


class TestOnce:
    def test_what_lies_below_is_loaded_with_its_bytes_and_its_uses(self, make):
        node = make()
        chain = Chain(node, 4)
        assert (node.store.reads.match(chain.space, chain.keys), chain.get()) == (4, 4)
        assert chain.where() == [DRAM] * 4
        assert node.store.counters.promoted_blocks == {NVME: 4}
        assert node.threads.waiting() == []

    def test_two_who_want_the_same_load_each_block_once(self, make):
        node = make()
        chain = Chain(node, 4)
        tasks = [node.start(chain.acquire(owner=Owner(number))) for number in (1, 2, 3)]
        assert len(node.threads.waiting("load")) == 1
        for number, task in enumerate(tasks, 1):
            assert node.read(node.finish(task), Owner(number)) == chain.blocks
        assert node.store.counters.promoted_blocks == {NVME: 4}

    def test_one_who_wants_more_loads_the_rest_only(self, make):
        node = make()
        chain = Chain(node, 4)
        short = node.start(node.acquire(chain.space, chain.keys[:2]))
        long = node.start(chain.acquire())
        assert node.read(node.finish(long)) == chain.blocks
        assert node.read(node.finish(short)) == chain.blocks[:2]
        assert node.store.counters.promoted_blocks == {NVME: 4}

    def test_a_prefix_in_memory_and_an_end_below_are_one_chain(self, make):
        node = make()
        chain = Chain(node, 4)
        assert node.get(chain.space, chain.keys[:2]) == chain.blocks[:2]
        assert chain.get() == 4

    def test_a_long_prefix_comes_in_several_jobs(self, make):
        node = make(dram=12, nvme=12)
        chain = Chain(node, 3 * JOB_BLOCKS - 5)
        task = node.start(chain.acquire())
        assert len(node.threads.waiting("load")) == 3
        for job in reversed(node.threads.waiting("load")):
            job.end()
            node.turn()
        assert node.read(node.finish(task)) == chain.blocks

    def test_more_than_may_be_on_the_way_comes_in_rounds(self, make):
        node = make(dram=4, limits=Limits(inflight_bytes=3 * SIZE))
        space = node.open()
        keys = chain_keys(space, range(8))
        blocks = [block_of(key, SIZE) for key in keys]
        for key, block, parent in zip(keys, blocks, [None, *keys], strict=False):
            node.put(space, [key], [block], parent=parent)
        node.run(node.store.demotion.demote(space, keys, NVME, evict=True))
        task = node.start(node.acquire(space, keys))
        assert node.store.promotion.loading_bytes == 3 * SIZE
        assert node.read(node.finish(task)) == blocks


class TestDeadline:
    """Blocks of 1,000 bytes over a disk that gives 10,000 bytes a second."""

    @pytest.fixture
    def chain(self, make) -> Chain:
        chain = Chain(make(), 8)
        reading, now = chain.node.disk.reading, chain.node.loop.now()
        reading.begin(5000, now - 0.5)
        reading.end(5000, now - 0.5, now, is_good=True)
        assert reading.bytes_per_s == 10_000
        return chain

    @pytest.mark.parametrize(("load_s", "blocks"), [(0.05, 0), (0.11, 1), (0.35, 3), (0.81, 8), (9.0, 8)])
    def test_the_longest_prefix_that_arrives_in_time_is_loaded(self, chain, load_s, blocks):
        assert chain.begin(load_s) == blocks
        assert chain.node.store.counters.loads_too_slow == 8 - blocks

    def test_what_is_queued_before_it_counts(self, chain):
        chain.node.disk.reading.queued_bytes = 3000
        assert chain.begin(0.55) == 2
        chain.node.disk.reading.queued_bytes -= 3000

    @pytest.mark.parametrize(
        ("tokens_per_s", "blocks"), [(16 * 10.1, 0), (16 * 9.9, 8), (0, 8)], ids=["slower", "faster", "unknown"]
    )
    def test_what_is_computed_sooner_than_loaded_is_not_loaded(self, chain, tokens_per_s, blocks):
        assert chain.get(tokens_per_s=tokens_per_s) == blocks

    def test_what_is_behind_a_queue_pays_only_when_enough_is_saved(self, chain):
        """Blocks are computed in 0.15 s each, and arrive after 0.2 s in 0.1 s each: four and more pay."""
        chain.node.disk.reading.queued_bytes = 2000
        assert chain.begin(9.0, 16 / 0.15, blocks=3) == 0
        assert chain.begin(9.0, 16 / 0.15) == 8
        chain.node.disk.reading.queued_bytes -= 2000

    def test_a_disk_that_was_slow_once_is_tried_from_time_to_time_and_trusted_again(self, chain):
        reading = chain.node.disk.reading
        reading.bytes_per_s = 1.0
        assert chain.begin(5.0) == 0
        for _ in range(20):
            chain.node.advance(STALE_S + 1)
            began = chain.begin(5.0)
            job = next(iter(chain.node.threads.waiting("load")), None)
            assert job is None or began
            chain.node.loop.seconds += 0.02
            chain.node.settle()
            chain.node.drop_dram(chain.space, chain.keys)
        assert reading.bytes_per_s > 10_000
        assert chain.begin(5.0) == 8

    def test_who_waits_gets_at_the_deadline_what_is_there_and_the_rest_goes_on(self, make):
        node = make(dram=12, nvme=12)
        chain = Chain(node, JOB_BLOCKS + 4)
        task = node.start(chain.acquire(load_s=1.0))
        node.threads.waiting("load")[0].end()
        node.advance(0.9)
        assert not task.done()
        node.advance(0.2)
        assert node.read(task.result()) == chain.blocks[:JOB_BLOCKS]
        node.settle()
        assert chain.where() == [DRAM] * len(chain.keys)

    def test_while_nothing_is_known_of_the_disk_it_is_tried(self, make):
        assert Chain(make(), 4).get(load_s=0.001, tokens_per_s=1e9) == 4


class TestRoom:
    def test_a_load_makes_room_as_a_put_does_and_never_at_its_own_beginning(self, make):
        node = make(dram=2, nvme=8)
        chain = Chain(node, 14)
        assert node.table.tiers[DRAM].used_bytes == 0
        assert chain.get() == 14

    def test_what_does_not_fit_is_cut_off(self, make):
        node = make(dram=1, nvme=8)
        space = node.open()
        keys = chain_keys(space, range(12))
        blocks = [block_of(key, SIZE) for key in keys]
        for start in (0, 6):
            parent = keys[start - 1] if start else None
            node.put(space, keys[start : start + 6], blocks[start : start + 6], parent=parent)
            node.run(node.store.demotion.demote(space, keys[start : start + 6], NVME, evict=True))
        assert node.get(space, keys) == blocks[:8]

    def test_the_quota_holds_for_loads(self, make):
        node = make(dram=4, nvme=8, quota=4096)
        space = node.open("blue")
        keys = chain_keys(space, range(8))
        blocks = [block_of(key, SIZE) for key in keys]
        for start in (0, 4):
            parent = keys[start - 1] if start else None
            node.put(space, keys[start : start + 4], blocks[start : start + 4], parent=parent)
            node.run(node.store.demotion.demote(space, keys[start : start + 4], NVME, evict=True))
        assert node.get(space, keys) == blocks[:4]
        assert node.table.tiers[DRAM].tenant_bytes["blue"] <= 4096

    def test_one_tenant_cannot_keep_all_others_from_loading(self, make):
        node = make(dram=8, nvme=8, limits=Limits(inflight_bytes=8 * SIZE))
        greedy, modest = Chain(node, 8), Chain(node, 3, tenant="blue")
        assert greedy.begin(30.0) == 8
        assert (modest.begin(30.0), modest.begin(30.0)) == (1, 0)
        node.settle()
        assert (greedy.get(), modest.get()) == (8, 3)

    def test_a_block_too_large_for_the_slabs_of_memory_is_a_miss(self, make):
        """Another node of the bucket, or an earlier start, had larger ones."""
        bucket = FaultyBucket()
        node = make(dram=2, bucket=bucket)
        space = node.open()
        keys = chain_keys(space, range(2))
        small, large = block_of(keys[0], SIZE), block_of(keys[1], DRAM_SLAB + 1)
        for key, block in ((keys[0], small), (keys[1], large)):
            offered = (key, None, 0, checksum(block), memoryview(block))
            node.run(node.store.below.bucket.write(space.root, [offered]))
        assert node.get(space, keys) == [small]


class TestDeleted:
    @pytest.mark.parametrize("is_begun", [False, True])
    def test_while_it_is_loaded_it_does_not_come_back(self, make, is_begun):
        chain = Chain(make(), 3)
        task = chain.node.start(chain.acquire())
        if is_begun:
            chain.node.threads.waiting("load")[0].begin()
        chain.delete(1)
        assert chain.node.read(chain.node.finish(task)) == chain.blocks[:1]
        assert chain.where() == [DRAM, "", DRAM]

    def test_and_put_again_while_the_old_load_is_under_way_the_new_bytes_count(self, make):
        chain = Chain(make(), 1)
        task = chain.node.start(chain.acquire())
        chain.delete(0)
        fresh = block_of(chain.keys[0], SIZE, version=1)
        assert chain.node.put(chain.space, chain.keys, [fresh]) == [Placement.GRANTED]
        assert chain.node.read(chain.node.finish(task)) in ([], [fresh])
        assert chain.node.get(chain.space, chain.keys) == [fresh]

    def test_from_the_disk_only_while_it_is_loaded_it_stays_in_memory(self, make):
        chain = Chain(make(), 1)
        task = chain.node.start(chain.acquire())
        chain.delete(0, tier=NVME)
        assert chain.node.read(chain.node.finish(task)) == chain.blocks
        assert chain.node.table.tiers[NVME].used_bytes == 0

    def test_while_a_second_read_is_copied(self, make):
        chain, task, first = late(make())
        second = chain.node.threads.waiting("load")[1]
        second.end()
        chain.node.turn()
        (copy,) = chain.node.threads.waiting("copy")
        chain.delete(0)
        copy.end()
        chain.node.turn()
        assert chain.where() == [""]
        first.end()
        assert chain.node.read(chain.node.finish(task)) == []


class TestCancelled:
    @pytest.mark.parametrize("turns", range(7))
    @pytest.mark.parametrize("is_begun", [False, True])
    def test_who_waits_leaves_the_load_to_others_and_holds_nothing(self, make, turns, is_begun):
        node = make()
        chain = Chain(node, 3)
        node.run(node.cancelled(chain.acquire(), turns, is_begun=is_begun))
        node.settle()
        assert node.problems() == []
        assert chain.get() == 3

    @pytest.mark.parametrize("is_begun", [False, True])
    def test_a_node_that_stops_during_a_load_keeps_the_blocks_on_its_disk(self, make, is_begun):
        node = make(ledger=True)
        node.run(node.recover())
        chain = Chain(node, 3)
        node.run(node.store.below.records.flush())
        task = node.start(chain.acquire())
        if is_begun:
            node.threads.waiting("load")[0].begin()
        task.cancel()
        node.stop_store()
        node.start_store()
        node.run(node.recover())
        chain.space = node.open()
        assert chain.get() == 3


def late(node: TieredStore, blocks: int = 1, tier: str = NVME):
    """A chain, who waits for it, and the thread at a read that was late: a second one has been begun."""
    chain = Chain(node, blocks, tier=tier)
    node.disk.reading.bytes_per_s = 1e9
    task = node.start(chain.acquire())
    first = node.threads.waiting("load")[0]
    first.begin()
    node.advance(HEDGE_LEAST_S + 0.01)
    assert len(node.threads.waiting("load")) == 2
    return chain, task, first


def copy_all(node: TieredStore) -> None:
    node.turn()
    while node.do_jobs("copy"):
        pass


class TestLate:
    def test_the_second_read_that_comes_first_is_the_answer(self, make):
        chain, task, first = late(make(), blocks=3)
        chain.node.threads.waiting("load")[1].end()
        copy_all(chain.node)
        assert chain.node.read(chain.node.finish(task)) == chain.blocks
        assert not first.future.done()
        counters = chain.node.store.counters
        assert (counters.hedged_loads, counters.hedges_won, counters.promoted_blocks[NVME]) == (3, 3, 3)

    def test_the_slot_that_the_late_read_writes_into_is_nobody_elses(self, make):
        chain, task, first = late(make(dram=1), blocks=3)
        chain.node.threads.waiting("load")[1].end()
        copy_all(chain.node)
        used = chain.node.table.tiers[DRAM].used_bytes
        first.end()
        assert chain.node.read(chain.node.finish(task)) == chain.blocks
        chain.node.settle()
        assert used == 2 * chain.node.table.tiers[DRAM].used_bytes

    def test_the_first_read_that_comes_first_is_not_kept_waiting_by_the_second(self, make):
        chain, task, first = late(make(), blocks=3)
        second = chain.node.threads.waiting("load")[1]
        second.begin()
        first.end()
        chain.node.turn()
        assert task.done()
        assert chain.node.read(task.result()) == chain.blocks
        counters = chain.node.store.counters
        assert (counters.hedged_loads, counters.hedges_won, counters.promoted_blocks[NVME]) == (3, 0, 3)

    def test_the_place_that_a_second_read_still_reads_from_is_not_given_back(self, make):
        chain, task, first = late(make(), blocks=3)
        chain.node.threads.waiting("load")[1].begin()
        first.end()
        chain.node.turn()
        assert chain.node.read(task.result()) == chain.blocks
        reclaim = chain.node.store.reclaim
        assert chain.node.start(reclaim.give_back(Cause.DRAINED, readmits=False)).result() is False
        chain.node.settle()
        assert chain.node.run(reclaim.give_back(Cause.DRAINED, readmits=False)) is True

    def test_without_room_for_a_second_copy_the_first_is_waited_for(self, make):
        chain, task, first = late(make(dram=1), blocks=8)
        chain.node.threads.waiting("load")[1].end()
        chain.node.turn()
        assert not task.done()
        first.end()
        assert chain.node.read(chain.node.finish(task)) == chain.blocks

    def test_the_second_copy_does_not_go_over_the_quota(self, make):
        node = make(quota=4096)
        chain = Chain(node, 4, tenant="blue")
        node.disk.reading.bytes_per_s = 1e9
        task = node.start(chain.acquire())
        first = node.threads.waiting("load")[0]
        first.begin()
        node.advance(HEDGE_LEAST_S + 0.01)
        node.threads.waiting("load")[1].end()
        node.turn()
        assert node.table.tiers[DRAM].tenant_bytes["blue"] <= 4096
        assert node.read(node.finish(task)) == chain.blocks

    def test_a_second_read_from_the_bucket_that_fails_does_not_spoil_the_first(self, make):
        bucket = FaultyBucket()
        node = make(nvme=0, bucket=bucket)
        chain = Chain(node, 1, tier=OBJECT)
        gate = asyncio.Event()

        async def slow(work):
            await gate.wait()
            return await work()

        async def gone(work):
            raise FileNotFoundError

        node.store.below.bucket.reading.bytes_per_s = 1e9
        bucket.next_up["get"] += [slow, gone]
        task = node.start(chain.acquire())
        node.advance(HEDGE_LEAST_S + 0.01)
        gate.set()
        lease = node.finish(task)
        assert [replica.checksum for replica in lease.replicas] == [checksum(block) for block in chain.blocks]
        assert node.read(lease) == chain.blocks
        node.settle()
        replica = node.table.readable(chain.space.dram, chain.keys[0])
        assert replica.checksum == checksum(chain.blocks[0])

    @pytest.mark.parametrize("ended", ["first", "second", "neither"])
    def test_a_node_that_stops_meanwhile_waits_for_both(self, make, ended):
        chain, task, first = late(make(), blocks=2)
        second = chain.node.threads.waiting("load")[1]
        second.begin()
        {"first": first.end, "second": second.end, "neither": lambda: None}[ended]()
        chain.node.turn()
        task.cancel()
        chain.node.stop_background()
        chain.node.settle()
        assert chain.node.problems() == []
        assert chain.get() == 2


class TestDamaged:
    def test_a_flipped_bit_is_a_miss_and_counted_and_the_block_goes(self, make):
        chain = Chain(make(), 3)
        chain.node.faults.at[len(chain.node.faults.operations) + 1] = FlipBit(8 * 4096 + 77)
        assert chain.get() == 1
        assert chain.where() == [DRAM, "", DRAM]
        assert chain.node.store.counters.corrupt_blocks == 1
        assert chain.node.store.counters.removed_blocks == {Cause.CORRUPT.value: 2, Cause.DEMOTED.value: 3}

    def test_a_flipped_bit_in_its_header_too(self, make):
        chain = Chain(make(), 1)
        chain.node.faults.at[len(chain.node.faults.operations)] = FlipBit(8 * 90)
        assert chain.get() == 0
        assert chain.node.store.counters.corrupt_blocks == 1

    def test_what_the_disk_has_damaged_the_bucket_may_have(self, make):
        node = make(bucket=FaultyBucket())
        space = node.open()
        keys = chain_keys(space, range(2))
        blocks = [block_of(key, SIZE) for key in keys]
        node.put(space, keys, blocks)
        node.run(node.store.demotion.demote(space, keys, OBJECT, evict=False))
        node.run(node.store.demotion.demote(space, keys, NVME, evict=True))
        node.faults.at[len(node.faults.operations)] = FlipBit(8 * 4096)
        assert node.get(space, keys) == blocks
        assert node.store.counters.promoted_blocks == {NVME: 1, OBJECT: 1}

    def test_a_block_that_cannot_be_read_goes_and_the_disk_is_still_trusted(self, make):
        chain = Chain(make(), 2)
        chain.node.faults.at[len(chain.node.faults.operations)] = Fail()
        assert chain.get() == 0
        assert chain.where() == ["", DRAM]
        assert chain.node.disk.may_load()

    def test_a_disk_that_is_gone_is_left_alone_keeps_its_blocks_and_serves_them_when_it_is_back(self, make):
        node = make(nvme=8)
        space = node.open()
        chains = [chain_keys(space, [number]) for number in range(READS_TO_AWAY + 3)]
        blocks = [[block_of(key, SIZE) for key in keys] for keys in chains]
        for keys, block in zip(chains, blocks, strict=True):
            node.sink(space, keys, block)
        start = len(node.faults.operations)
        node.faults.at |= dict.fromkeys(range(start, start + READS_TO_AWAY), Fail())
        assert [len(node.get(space, keys)) for keys in chains] == [0] * len(chains)
        assert len(node.faults.operations) == start + READS_TO_AWAY
        node.advance(1.1)
        assert [node.get(space, keys) for keys in chains[READS_TO_AWAY - 1 :]] == blocks[READS_TO_AWAY - 1 :]
