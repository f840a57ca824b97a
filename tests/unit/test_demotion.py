"""Stores into lower tiers, interleaving by interleaving: what goes, what is shed, what is deleted or used meanwhile."""

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore import demotion
from kvstore.demotion import BATCH_BLOCKS
from kvstore.diskblock import ALIGN
from kvstore.errors import NotFound, Rejected
from kvstore.intake import Limits
from kvstore.types import DRAM, NVME, OBJECT, Cause, Placement
from tests.faulty_bucket import FaultyBucket
from tests.faulty_file import Fail, Lose
from tests.tiered_store import DRAM_SLAB, NVME_SLAB, OWNER, TieredStore, block_of, chain_keys, tiered_stores

Make = Callable[..., TieredStore]
SIZE = 1000
SLOT = 1024  # of such a block in memory
BOTH = frozenset({NVME, OBJECT})


@pytest.fixture
def make() -> Iterator[Make]:
    with tiered_stores() as made:
        yield made


class Chain:
    """Blocks of one prompt, stored in memory."""

    def __init__(self, node: TieredStore, blocks: int, *, first: int = 0, size: int = SIZE):
        self.node = node
        self.space = node.open()
        self.keys = chain_keys(self.space, range(first, first + blocks))
        self.blocks = [block_of(key, size) for key in self.keys]
        assert node.put(self.space, self.keys, self.blocks) == [Placement.GRANTED] * blocks

    def get(self) -> int:
        found = self.node.get(self.space, self.keys)
        assert found == self.blocks[: len(found)]
        return len(found)

    def where(self) -> list[str]:
        """For each block the tiers that have it, by their first letters."""
        return ["".join(space.tier[0] for space in self.space.spaces if key in space.replicas) +
                ("o" if self.bucket is not None and self.bucket.has(self.space.root, key) else "")
                for key in self.keys]  # fmt: skip

    @property
    def bucket(self):
        return self.node.store.below.bucket

    def delete(self, *positions: int) -> None:
        self.node.store.discard(self.space, [self.keys[position] for position in positions], Cause.DELETED)


def step(node: TieredStore, blocks: int = 1 << 20):
    return node.store.demotion.step(blocks * SIZE, Cause.WATERMARK)


def drain(node: TieredStore) -> tuple[int, int]:
    return node.run(node.upkeep.drain(DRAM))


class TestStep:
    def test_the_coldest_goes_down_and_its_place_is_free(self, make):
        node = make()
        cold, warm = Chain(node, 3), Chain(node, 3, first=50)
        assert node.run(step(node, 3))
        assert (cold.where(), warm.where()) == (["n"] * 3, ["d"] * 3)
        assert node.table.tiers[DRAM].used_bytes == 3 * SLOT
        assert node.store.counters.removed_blocks == {Cause.DEMOTED.value: 3}
        assert (cold.get(), warm.get()) == (3, 3)

    def test_all_goes_down_in_small_steps_that_hold_little(self, make):
        node = make(nvme=8)
        chain = Chain(node, 20)
        task = node.start(step(node))
        held = [replica for replica in chain.space.dram.replicas.values() if replica.holders]
        assert 0 < sum(replica.size for replica in held) < 4 * DRAM_SLAB // 8 + SIZE
        node.finish(task)
        assert drain(node) == (20 - len(held), 0)
        assert chain.where() == ["n"] * 20

    def test_without_anything_to_evict_there_is_nothing_to_do(self, make):
        assert not make().run(step(make()))

    def test_what_was_used_while_it_was_written_stays(self, make):
        node = make()
        chain = Chain(node, 3)
        task = node.start(step(node))
        node.table.use(chain.space.dram.replicas[chain.keys[2]])
        node.finish(task)
        assert chain.where() == ["dn"] * 3

    def test_what_is_held_by_a_reader_while_it_is_written_stays_readable(self, make):
        node = make()
        chain = Chain(node, 3)
        task = node.start(step(node))
        lease = node.run(node.acquire(chain.space, chain.keys, load_s=0))
        node.finish(task)
        assert node.read(lease) == chain.blocks

    @pytest.mark.parametrize("is_begun", [False, True])
    def test_what_is_deleted_while_it_is_written_is_nowhere(self, make, is_begun):
        node = make()
        chain = Chain(node, 3)
        task = node.start(step(node))
        if is_begun:
            node.threads.waiting("store")[0].begin()
        chain.delete(1)
        node.finish(task)
        assert chain.where() == ["n", "", "n"]
        assert node.store.counters.demoted_blocks == {NVME: 2}

    def test_what_is_deleted_and_put_anew_while_it_is_written_has_the_new_bytes(self, make):
        node = make()
        chain = Chain(node, 1)
        task = node.start(step(node))
        chain.delete(0)
        chain.blocks = [block_of(chain.keys[0], SIZE, version=1)]
        node.put(chain.space, chain.keys, chain.blocks)
        node.finish(task)
        assert chain.where() == ["d"]
        assert chain.get() == 1
        drain(node)
        assert (chain.where(), chain.get()) == (["n"], 1)

    @pytest.mark.parametrize("turns", range(8))
    @pytest.mark.parametrize("is_begun", [False, True])
    def test_cancelled_it_leaves_neither_holds_nor_slots_behind(self, make, turns, is_begun):
        node = make(bucket=FaultyBucket())
        chain = Chain(node, 4)
        node.run(node.cancelled(step(node), turns, is_begun=is_begun))
        node.settle()
        assert node.problems() == []
        drain(node)
        assert chain.get() == 4

    def test_a_block_too_large_for_the_slabs_of_the_disk_is_shed(self, make, monkeypatch):
        monkeypatch.setattr("tests.tiered_store.NVME_SLAB", 2 * ALIGN)
        node = make()
        large, small = Chain(node, 1, size=ALIGN + 1), Chain(node, 1, first=50)
        assert drain(node) == (2, 0)
        assert (large.where(), small.where()) == ([""], ["n"])


class TestFull:
    def test_what_does_not_fit_onto_the_disk_is_shed(self, make):
        node = make(nvme=1)
        chain = Chain(node, 6)
        assert drain(node) == (6, 0)
        assert sorted(chain.where()) == ["", "", "n", "n", "n", "n"]

    def test_a_failing_disk_is_left_alone_stores_are_shed_and_resume_when_it_is_well(self, make):
        node = make(nvme=8)
        chains = [Chain(node, 2, first=50 * number) for number in range(3)]
        node.faults.at[len(node.faults.operations)] = Fail()
        node.run(step(node, 2))
        assert not node.disk.may_store()
        before = len(node.faults.operations)
        node.run(step(node, 2))
        assert len(node.faults.operations) == before
        node.advance(1.1)
        node.run(step(node, 2))
        assert [chain.where() for chain in chains] == [["", ""], ["", ""], ["n", "n"]]
        assert node.disk.may_store()
        assert chains[2].get() == 2

    def test_a_lost_write_is_a_miss_later(self, make):
        node = make()
        chain = Chain(node, 2)
        node.faults.at[len(node.faults.operations)] = Lose()
        drain(node)
        chain.get()
        assert chain.where().count("") == 1

    def test_a_put_while_memory_is_full_of_blocks_on_their_way_waits_and_is_not_refused(self, make):
        node = make(dram=1, nvme=8)
        old = Chain(node, 8)
        task = node.start(node.store.demotion.step(8 * SIZE, Cause.WATERMARK))
        held = [replica for replica in old.space.dram.replicas.values() if replica.holders]
        for replica in old.space.dram.replicas.values():
            if replica not in held:
                node.table.hold(replica)
        keys = chain_keys(old.space, [99])
        placing = node.store.puts.place(OWNER, old.space, keys, None, [SIZE])
        assert placing.placements == [Placement.FULL]
        assert node.store.puts.needs_memory(placing, old.space.tenant)
        node.store.puts.withdraw(placing)
        put = node.start(node.store.puts.place_slowly(old.space, keys, None, [SIZE]))
        assert not put.done()
        node.finish(task)
        placing = node.finish(put)
        assert placing.placements == [Placement.GRANTED]
        node.store.puts.withdraw(placing)
        for replica in list(old.space.dram.replicas.values()):
            if replica not in held:
                node.table.let_go(replica)

    def test_a_step_that_ends_while_another_writes_does_not_refuse_who_waits(self, make):
        node = make(dram=1, nvme=8)
        old = Chain(node, 8)
        slow = node.start(node.store.demotion.step(8 * SIZE, Cause.WATERMARK))
        held = [replica for replica in old.space.dram.replicas.values() if not replica.holders]
        for replica in held:
            node.table.hold(replica)
        assert node.run(node.cancelled(step(node), 2)) is None
        assert node.store.demotion.is_relieving
        assert not slow.done()
        for replica in held:
            node.table.let_go(replica)
        node.finish(slow)
        assert not node.store.demotion.is_relieving

    def test_who_has_no_room_on_the_disk_does_not_cost_others_theirs(self, make):
        node = make(nvme=2)
        red, blue = Chain(node, 4), node.open("blue")
        keys = chain_keys(blue, range(3))
        node.put(blue, keys, [block_of(key, SIZE) for key in keys])
        for space, key in ((blue, keys[2]), (red.space, red.keys[3])):
            node.run(node.store.demotion.demote(space, [key], NVME, evict=True))
        more = chain_keys(red.space, range(100, 103))
        node.put(red.space, more, [block_of(key, SIZE) for key in more])
        node.run(node.store.demotion.demote(red.space, more, NVME, evict=True))
        drain(node)
        assert [node.store.where(blue, key)[0] for key in keys] == [NVME] * 3

    def test_a_put_that_waits_in_vain_is_refused_at_its_time_limit(self, make):
        node = make(dram=1, nvme=8)
        old = Chain(node, 8)
        for replica in old.space.dram.replicas.values():
            node.table.hold(replica)
        node.store.demotion._steps = 1
        put = node.start(node.store.puts.place_slowly(old.space, chain_keys(old.space, [99]), None, [SIZE]))
        node.advance(node.limits.put_timeout_s - 1)
        assert not put.done()
        node.advance(2)
        assert put.result().placements == [Placement.FULL]
        for replica in old.space.dram.replicas.values():
            node.table.let_go(replica)

    def test_puts_that_waited_together_get_no_more_than_their_client_may_have(self, make):
        node = make(dram=2, limits=Limits(inflight_bytes=4 * SIZE))
        space, placings = node.open(), []
        for number in range(2):
            keys = chain_keys(space, range(3 * number + 1, 3 * number + 4))
            placings.append((keys, node.run(node.store.puts.place_slowly(space, keys, None, [SIZE] * 3))))
        node.store.puts.granted(OWNER, space, *placings[0])
        with pytest.raises(Rejected):
            node.store.puts.granted(OWNER, space, *placings[1])
        assert node.table.tiers[DRAM].replicas == 3
        node.store.end(OWNER)

    @pytest.mark.parametrize("turns", range(5))
    def test_a_put_that_waits_and_is_cancelled_leaves_nothing_behind(self, make, turns):
        node = make(dram=1, nvme=8)
        old = Chain(node, 8)
        task = node.start(step(node))
        node.run(
            node.cancelled(node.store.puts.place_slowly(old.space, chain_keys(old.space, [99]), None, [SIZE]), turns)
        )
        node.finish(task)


class TestAdmission:
    def test_what_nobody_used_is_written_when_it_comes_a_second_time(self, make):
        node = make(everything=False)
        chain = Chain(node, 2)
        drain(node)
        assert chain.where() == ["", ""]
        node.put(chain.space, chain.keys, chain.blocks)
        drain(node)
        assert chain.where() == ["n", "n"]
        assert node.store.demotion.admission.unused_blocks == 2

    def test_what_is_before_a_used_block_is_of_use_too(self, make):
        node = make(everything=False)
        chain = Chain(node, 3)
        node.table.use(chain.space.dram.replicas[chain.keys[1]])
        drain(node)
        assert chain.where() == ["n", "n", ""]
        assert node.store.counters.shed_blocks == 0

    def test_what_was_written_once_is_not_written_again(self, make):
        node = make()
        chain = Chain(node, 2)
        drain(node)
        writes = len(node.faults.operations)
        assert chain.get() == 2
        drain(node)
        assert [name for name, *_ in node.faults.operations[writes:]] == ["read", "read"]
        assert chain.where() == ["n", "n"]

    def test_over_the_budget_blocks_are_shed_and_counted(self, make):
        node = make(bytes_per_day=24 * 3 * SIZE)
        chain = Chain(node, 5)
        drain(node)
        assert sorted(chain.where()) == ["", "", "n", "n", "n"]
        assert node.store.demotion.admission.over_budget_blocks == 2

    def test_what_is_demoted_by_name_need_not_have_been_used_but_the_budget_holds(self, make):
        node = make(everything=False, bytes_per_day=24 * 3 * SIZE)
        chain = Chain(node, 5)
        assert node.run(node.store.demotion.demote(chain.space, chain.keys, NVME, evict=False)) == (3, 0)
        assert sorted(chain.where()) == ["d", "d", "dn", "dn", "dn"]

    @pytest.mark.parametrize(("bounded", "blocks"), [(True, 3), (False, 5)])
    def test_nobody_but_an_admin_writes_more_than_the_budget_by_demoting_again_and_again(self, make, bounded, blocks):
        node = make(bytes_per_day=24 * 3 * SIZE)
        chain = Chain(node, 1)
        written = 0
        for _ in range(5):
            work = node.store.demotion.demote(chain.space, chain.keys, NVME, evict=False, within_budget=bounded)
            written += node.run(work)[0]
            node.store.discard(chain.space, chain.keys, Cause.DELETED, NVME)
        assert (written, chain.where()) == (blocks, ["d"])

    def test_demoting_by_name_holds_no_more_at_once_than_a_step(self, make, monkeypatch):
        monkeypatch.setattr(demotion, "BATCH_BYTES", 2 * SIZE)
        node = make()
        chain = Chain(node, 6)
        work = [node.store.demotion.demote(chain.space, chain.keys[start:][:3], NVME, evict=False) for start in (0, 3)]
        tasks = [node.start(each) for each in work]
        assert sum(replica.holders > 0 for replica in chain.space.dram.replicas.values()) == 2
        assert [node.finish(task) for task in tasks] == [(3, 0), (3, 0)]

    @pytest.mark.parametrize("tier", [DRAM, OBJECT, "tape"])
    def test_a_tier_that_is_not_there_is_told(self, make, tier):
        node = make()
        with pytest.raises(NotFound):
            node.run(node.store.demotion.demote(node.open(), None, tier, evict=False))


class TestWriteThrough:
    def test_what_is_stored_is_written_at_once_where_everything_is_admitted(self, make):
        node = make(through=frozenset({NVME}))
        chain = Chain(node, 3)
        assert node.store.demotion.offers.is_set()
        node.run(node.store.demotion.write_through())
        assert chain.where() == ["dn"] * 3
        assert not node.store.demotion.offers.is_set()

    def test_a_chain_is_written_when_its_last_block_is_used(self, make):
        node = make(through=frozenset({NVME}), everything=False)
        used, unused = Chain(node, 3), Chain(node, 3, first=50)
        node.run(node.store.demotion.write_through())
        assert used.where() + unused.where() == ["d"] * 6
        assert used.get() == 3
        node.run(node.store.demotion.write_through())
        assert (used.where(), unused.where()) == (["dn"] * 3, ["d"] * 3)

    def test_a_used_chain_longer_than_a_batch_is_written_to_its_beginning(self, make):
        node = make(dram=40, nvme=80, through=frozenset({NVME}), everything=False)
        chain = Chain(node, BATCH_BLOCKS + 30)
        node.run(node.store.demotion.write_through())
        chain.get()
        while node.store.demotion.offers.is_set():
            node.run(node.store.demotion.write_through())
        assert chain.where() == ["dn"] * len(chain.keys)

    def test_both_tiers_get_it(self, make):
        node = make(through=BOTH, bucket=FaultyBucket())
        chain = Chain(node, 2)
        node.run(node.store.demotion.write_through())
        assert chain.where() == ["dno", "dno"]

    def test_what_went_before_its_turn_is_passed_over(self, make):
        node = make(through=frozenset({NVME}))
        chain = Chain(node, 2)
        chain.delete(1)
        node.run(node.store.demotion.write_through())
        assert chain.where() == ["dn", ""]

    @pytest.mark.parametrize("turns", range(6))
    def test_cancelled_it_leaves_nothing_behind(self, make, turns):
        node = make(through=BOTH, bucket=FaultyBucket())
        Chain(node, 3)
        node.run(node.cancelled(node.store.demotion.write_through(), turns))
        node.settle()
        assert node.problems() == []

    def test_looking_at_a_long_unused_chain_takes_time_in_proportion(self, make):
        """Each block is offered as it is stored: looking up the chain for each would be quadratic."""
        node = make(dram=300, nvme=4, through=frozenset({NVME}), everything=False)
        took_s = []
        for blocks, first in ((200, 0), (1600, 10_000)):
            Chain(node, blocks, first=first, size=64)
            started = time.perf_counter()
            while node.store.demotion.offers.is_set():
                node.run(node.store.demotion.write_through())
            took_s.append((time.perf_counter() - started) / blocks)
        assert took_s[1] < 3 * took_s[0]


class TestBucket:
    def test_what_is_deleted_while_it_is_sent_is_not_known_any_more(self, make):
        bucket = FaultyBucket()
        node = make(nvme=0, bucket=bucket)
        chain = Chain(node, 2)
        gate = asyncio.Event()

        async def slow(work):
            await gate.wait()
            return await work()

        bucket.next_up["put"].append(slow)
        task = node.start(step(node))
        node.settle()
        chain.delete(1)
        gate.set()
        node.finish(task)
        assert chain.where() == ["o", ""]
        assert chain.get() == 1

    def test_a_bucket_that_is_away_sheds_stores(self, make):
        bucket = FaultyBucket()
        node = make(nvme=0, bucket=bucket)
        chain = Chain(node, 2)

        async def away(work):
            raise OSError("away")

        bucket.always["put"] = away
        assert drain(node) == (2, 0)
        assert chain.where() == ["", ""]

    def test_before_a_planned_stop_all_is_written_what_was_used_last_first(self, make):
        node = make(nvme=1)
        cold, warm = Chain(node, 3), Chain(node, 3, first=50)
        assert node.run(node.store.demotion.flush(node.loop.now() + 9)) == 4
        assert warm.where() == ["dn"] * 3
        assert sorted(cold.where()) == ["d", "d", "dn"]


def test_the_disk_never_has_more_than_its_slabs(make):
    node = make(nvme=2, dram=4)
    for number in range(8):
        Chain(node, 3, first=50 * number)
        drain(node)
    assert len(list((node.folder / "slabs").iterdir())) == 2
    assert all(file.stat().st_size == NVME_SLAB for file in (node.folder / "slabs").iterdir())
