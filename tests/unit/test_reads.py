"""Leases on what comes in time: who waits for what, how often it looks, and what is left when it goes."""

import time
from collections.abc import Callable, Iterator
from random import Random

import pytest

from kvstore.copier import checksum
from kvstore.errors import InvalidRequest, Rejected
from kvstore.intake import Limits
from kvstore.types import DRAM, NVME, Cause, Owner
from tests.tiered_store import OWNER, TieredStore, block_of, chain_keys, tiered_stores

Make = Callable[..., TieredStore]
SIZE = 1000


@pytest.fixture
def make() -> Iterator[Make]:
    with tiered_stores() as made:
        yield made


class Chain:
    def __init__(self, node: TieredStore, blocks: int, *, parts: int = 1, first: int = 0, size: int = SIZE):
        self.node = node
        self.space = node.open(parts=parts)
        self.keys = chain_keys(self.space, range(first, first + blocks))
        self.parts = [chain_keys(self.space, range(first, first + blocks), part) for part in range(parts)]
        self.blocks = [block_of(key, size) for key in self.keys]

    def put(self, part: int = 0, blocks: int | None = None) -> None:
        keys = self.parts[part][:blocks]
        self.node.put(self.space, keys, [block_of(key, SIZE) for key in keys])

    def begin(self, first: int, end: int):
        """A grant on blocks [first, end): somebody is writing them."""
        puts, keys = self.node.store.puts, self.keys[first:end]
        parent = self.keys[first - 1] if first else None
        placing = puts.place(Owner(7), self.space, keys, parent, [SIZE] * len(keys))
        puts.granted(Owner(7), self.space, keys, placing)
        return placing.grant

    def commit(self, grant) -> None:
        self.node.fill(grant.replicas, dict(zip(self.keys, self.blocks, strict=True)))
        sums = [checksum(self.node.store.view(replica)) for replica in grant.replicas]
        self.node.store.puts.commit(Owner(7), grant.grant_id, sums, "shared")

    def acquire(self, **how):
        return self.node.acquire(self.space, self.keys, **how)

    def got(self, task) -> int:
        found = self.node.read(self.node.finish(task))
        assert found == self.blocks[: len(found)]
        return len(found)


class TestWriters:
    def test_a_block_that_is_being_written_is_waited_for(self, make):
        chain = Chain(make(), 3)
        chain.put(blocks=2)
        grant = chain.begin(2, 3)
        task = chain.node.start(chain.acquire(wait_s=5.0))
        assert not task.done()
        chain.commit(grant)
        chain.node.turn()
        assert task.done()
        assert chain.got(task) == 3

    def test_in_vain_for_as_long_as_was_asked(self, make):
        chain = Chain(make(), 3)
        chain.put(blocks=2)
        grant = chain.begin(2, 3)
        task = chain.node.start(chain.acquire(wait_s=5.0))
        chain.node.advance(4.9)
        assert not task.done()
        chain.node.advance(0.2)
        assert chain.got(task) == 2
        chain.node.store.puts.abort(Owner(7), grant.grant_id)

    def test_never_longer_than_the_node_allows(self, make):
        chain = Chain(make(limits=Limits(wait_max_s=2.0)), 1)
        grant = chain.begin(0, 1)
        task = chain.node.start(chain.acquire(wait_s=1e9, load_s=1e9))
        chain.node.advance(2.1)
        assert task.done()
        chain.node.store.puts.abort(Owner(7), grant.grant_id)

    def test_a_writer_that_gives_up_ends_the_wait(self, make):
        chain = Chain(make(), 3)
        chain.put(blocks=2)
        grant = chain.begin(2, 3)
        task = chain.node.start(chain.acquire(wait_s=5.0))
        chain.node.store.puts.abort(Owner(7), grant.grant_id)
        chain.node.turn()
        assert task.done()
        assert chain.got(task) == 2

    def test_loads_of_the_middle_and_a_writer_of_the_end_are_both_waited_for(self, make):
        chain = Chain(make(), 3)
        chain.node.sink(chain.space, chain.keys[:2], chain.blocks[:2])
        grant = chain.begin(2, 3)
        task = chain.node.start(chain.acquire(wait_s=5.0, load_s=5.0))
        chain.node.settle()
        assert not task.done()
        chain.commit(grant)
        assert chain.got(task) == 3

    def test_without_time_to_load_there_is_no_load(self, make):
        chain = Chain(make(), 2)
        chain.node.sink(chain.space, chain.keys, chain.blocks)
        assert chain.got(chain.node.start(chain.acquire(load_s=0.0, wait_s=5.0))) == 0
        assert chain.node.threads.waiting() == []


class TestParts:
    def test_all_parts_of_a_block_are_loaded_for_one(self, make):
        node = make(nvme=8)
        chain = Chain(node, 2, parts=2)
        for part in (0, 1):
            chain.put(part)
        for part in (0, 1):
            node.run(node.store.demotion.demote(chain.space, chain.parts[part], NVME, evict=True))
        assert chain.got(node.start(chain.acquire())) == 2
        assert node.store.counters.promoted_blocks == {NVME: 4}

    def test_a_block_without_one_of_its_parts_ends_the_prefix(self, make):
        node = make(nvme=8)
        chain = Chain(node, 3, parts=2)
        for part in (0, 1):
            chain.put(part)
        for part in (0, 1):
            node.run(node.store.demotion.demote(chain.space, chain.parts[part], NVME, evict=True))
        node.store.discard(chain.space, [chain.parts[1][1]], Cause.DELETED)
        assert chain.got(node.start(chain.acquire())) == 1

    def test_as_many_parts_as_a_namespace_may_have_do_not_keep_the_node_busy(self, make):
        node = make()
        space = node.open(parts=65_535)
        keys = chain_keys(space, range(node.limits.batch_blocks))
        node.sink(space, keys[:1], [block_of(keys[0], SIZE)])
        started = time.perf_counter()
        assert node.store.reads.match(space, keys) == 0
        task = node.start(node.acquire(space, keys))
        assert not task.done()
        assert node.finish(task) is None
        assert time.perf_counter() - started < 5.0


class TestGone:
    @pytest.mark.parametrize("turns", range(6))
    @pytest.mark.parametrize("below", [False, True])
    def test_cancelled_at_any_of_its_turns_it_holds_nothing(self, make, turns, below):
        node = make()
        chain = Chain(node, 3)
        if below:
            node.sink(chain.space, chain.keys, chain.blocks)
        else:
            chain.put(blocks=2)
        node.run(node.cancelled(chain.acquire(wait_s=5.0), turns))
        node.settle()
        for lease_id in list(node.store.holds._leases):
            node.store.reads.release(OWNER, lease_id)
        assert node.problems() == []
        assert node.store.reads._arrivals == {}

    def test_nobody_is_left_in_the_list_of_those_who_wait(self, make):
        chain = Chain(make(), 3)
        grant = chain.begin(0, 1)
        tasks = [chain.node.start(chain.acquire(wait_s=5.0)) for _ in range(3)]
        tasks[0].cancel()
        chain.node.turn()
        chain.node.advance(6.0)
        assert [task.done() for task in tasks] == [True] * 3
        assert chain.node.store.reads._arrivals == {}
        chain.node.store.puts.abort(Owner(7), grant.grant_id)

    def test_a_client_with_too_many_leases_is_told_and_its_load_goes_on(self, make):
        node = make(limits=Limits(leases_per_client=1))
        chain = Chain(node, 2)
        node.sink(chain.space, chain.keys, chain.blocks)
        lease = node.run(chain.acquire())
        with pytest.raises(Rejected):
            node.run(chain.acquire())
        assert node.read(lease) == chain.blocks

    def test_keys_that_make_no_sense_are_refused_before_anything_is_loaded(self, make):
        node = make(limits=Limits(batch_blocks=2))
        chain = Chain(node, 3)
        for keys in (chain.keys, [b"short"]):
            with pytest.raises(InvalidRequest):
                node.run(node.acquire(chain.space, keys))


class TestMatch:
    def test_counts_what_any_tier_has(self, make):
        node = make()
        chain = Chain(node, 4)
        node.sink(chain.space, chain.keys[:2], chain.blocks[:2])
        node.put(chain.space, chain.keys[2:], chain.blocks[2:], parent=chain.keys[1])
        assert node.store.reads.match(chain.space, chain.keys) == 4
        assert [node.store.where(chain.space, key)[0] for key in chain.keys] == [NVME, NVME, DRAM, DRAM]

    def test_begins_no_load(self, make):
        node = make()
        chain = Chain(node, 4)
        node.sink(chain.space, chain.keys, chain.blocks)
        node.store.reads.match(chain.space, chain.keys)
        assert node.threads.waiting() == []


def seconds_to_acquire(node: TieredStore, blocks: int, first: int) -> float:
    """Of the node's own time, while `blocks` are loaded by jobs that end in any order."""
    chain = Chain(node, blocks, first=first, size=64)
    for start in range(0, blocks, 200):
        parent = chain.keys[start - 1] if start else None
        keys, contents = chain.keys[start : start + 200], chain.blocks[start : start + 200]
        node.put(chain.space, keys, contents, parent=parent)
        node.run(node.store.demotion.demote(chain.space, keys, NVME, evict=True))
    started = time.perf_counter()
    task = node.start(chain.acquire())
    jobs = node.threads.waiting("load")
    for job in Random(1).sample(jobs, len(jobs)):
        job.end()
        node.turn(4)
    assert chain.got(task) == blocks
    return time.perf_counter() - started


def test_waiting_for_a_long_prefix_takes_time_in_proportion(make):
    node = make(dram=20, nvme=700)
    seconds_to_acquire(node, 100, 50_000)
    short, long = seconds_to_acquire(node, 250, 0), seconds_to_acquire(node, 2000, 10_000)
    assert long < 3 * 8 * short
