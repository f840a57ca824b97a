"""What is asked of thousands of small blocks at once is done in steps: the event loop has time for others between."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import demotion, promotion, reclaim
from kvstore.types import Cause
from tests.tiered_store import TieredStore, block_of, chain_keys

SIZE, BLOCKS = 1000, 8
PER_SLAB = 4  # such blocks on the disk


@pytest.fixture
def node() -> Iterator[TieredStore]:
    """At the end it is at rest and in order."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    made = TieredStore(folder)
    yield made
    made.settle()
    assert made.problems() == []
    made.close()
    shutil.rmtree(folder)


def test_a_long_chain_is_loaded_in_rounds(node, monkeypatch):
    monkeypatch.setattr(promotion, "BEGUN_BLOCKS", 3)
    space = node.open()
    keys = chain_keys(space, range(BLOCKS))
    blocks = [block_of(key, SIZE) for key in keys]
    node.sink(space, keys, blocks)
    assert node.call(lambda: node.store.promotion.begin(space, keys, 30.0, 0.0)) == 3
    assert node.get(space, keys) == blocks


def test_a_step_of_small_blocks_is_written_by_several_threads(node, monkeypatch):
    monkeypatch.setattr(demotion, "JOB_BLOCKS", 2)
    space = node.open()
    keys = chain_keys(space, range(BLOCKS))
    node.put(space, keys, [block_of(key, SIZE) for key in keys])
    task = node.start(node.store.demotion.demote(space, keys, "nvme", evict=True))
    assert len(node.threads.waiting("store")) == BLOCKS // 2
    assert node.finish(task) == (BLOCKS, BLOCKS)


def test_what_is_before_blocks_that_are_written_is_walked_once(node, monkeypatch):
    monkeypatch.setattr(demotion, "JOB_BLOCKS", 2)
    space = node.open()
    keys = chain_keys(space, range(BLOCKS))
    blocks = [block_of(key, SIZE) for key in keys]
    node.sink(space, keys[:2], blocks[:2])
    node.put(space, keys, blocks)
    touched = []
    touch = node.table.touch
    monkeypatch.setattr(node.table, "touch", lambda replica: (touched.append(replica.key), touch(replica)))
    node.run(node.store.demotion.demote(space, keys[2:], "nvme", evict=False))
    assert [touched.count(key) for key in keys[:2]] == [1, 1]


def test_a_slab_is_emptied_in_steps(node, monkeypatch):
    monkeypatch.setattr(reclaim, "STEP_BLOCKS", 1)
    space = node.open()
    for number in range(2 * PER_SLAB):
        keys = chain_keys(space, [number])
        node.sink(space, keys, [block_of(keys[0], SIZE)])
    seen = []

    async def look() -> None:
        while True:
            seen.append(len(space.nvme.replicas))
            await asyncio.sleep(0)

    looking = node.start(look(), turns=1)
    node.run(node.store.reclaim.give_back(Cause.WATERMARK, readmits=False))
    looking.cancel()
    assert set(seen) == set(range(PER_SLAB, 2 * PER_SLAB + 1))
