"""A fixed workload that stops before each of its writes: whatever the disk was left with, no wrong byte is served."""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore.catalogue import OpenNamespace
from kvstore.tiers.nvme import SLABS
from kvstore.types import NVME, BlockKey, Cause
from tests.crash.tape import Point, Tape, taped
from tests.crash.tiered import Tiered, fsck, keys_of, opened

SMALL, LARGE = 8192, 20_000
SIZES = {"small": SMALL, "large": LARGE}
SEED = int(os.environ.get("CAIRN_TEST_SEED", "20"))


async def first_life(folder: Path) -> None:
    """Slabs are made, filled, moved, punched, filled again and dropped."""
    async with opened(folder) as node:
        small, large = node.open("small", SMALL), node.open("large", LARGE)
        first, second = keys_of(small, 1, 8), keys_of(small, 2, 8)
        await node.store_below(small, first)
        await node.flush(sync=True)
        await node.store_below(large, keys_of(large, 1, 4))
        await node.flush()
        node.store.discard(small, first[6:], Cause.DELETED)
        await node.store_below(small, second)
        await node.flush()
        assert small.nvme is not None
        node.table.touch(small.nvme.replicas[first[1]])
        await node.store_below(large, keys_of(large, 2, 4))
        node.upkeep.set_tier(NVME, high_watermark=0.5, low_watermark=0.4)
        await node.upkeep.relieve_disk()
        await node.flush(sync=True)
        assert node.store.counters.readmitted_blocks
        await node.store_below(small, keys_of(small, 3, 5))
        node.upkeep.set_tier(NVME, capacity_bytes=384 << 10)
        await node.upkeep.resize_disk()
        await node.flush()


async def second_life(folder: Path) -> None:
    """What the first left is taken up, and added to."""
    async with opened(folder, capacity="384KiB") as node:
        small = node.open("small", SMALL)
        node.store.discard(small, keys_of(small, 3, 5)[3:], Cause.DELETED)
        await node.store_below(small, keys_of(small, 4, 3))
        await node.flush()


@pytest.fixture(scope="module")
def tape() -> Iterator[Tape]:
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        with taped(Path(folder, "tier"), Path(folder, "images")) as tape:
            tape.folder.mkdir()
            asyncio.run(first_life(tape.folder))
            asyncio.run(second_life(tape.folder))
        yield tape


def prompts(node: Tiered) -> Iterator[tuple[OpenNamespace, BlockKey]]:
    """All that either life has ever put."""
    for name, size in SIZES.items():
        space = node.open(name, size)
        for prompt in range(1, 5):
            yield from ((space, key) for key in keys_of(space, prompt, 8))


async def come_back(folder: Path, must_have: frozenset[tuple[int, BlockKey]]) -> None:
    """Start on what is left, get every block that was ever put, and put another; then fsck must be content."""
    async with opened(folder) as node:
        found = {(space.number, key) for space, key in prompts(node) if await node.has(space, key)}
        assert must_have <= found, f"{len(must_have - found)} of {len(must_have)} durable blocks are lost"
        assert node.blocks_on_disk() == len(found)
        space = node.open("small", SMALL)
        assert await node.store_below(space, keys_of(space, 9, 2)) == 2
    assert fsck(folder) == []


def test_the_workload_has_every_kind_of_write(tape: Tape) -> None:
    kinds = {"data", "punch", "slab", "rename", "unlink", "namespaces", "records", "slab record", "sync", "close"}
    assert {point.name for point in tape.points} == kinds
    assert max(len(point.durable) for point in tape.points) > 15


def survive(tape: Tape, point: Point, how: str, must_have: frozenset[tuple[int, BlockKey]]) -> None:
    seed = f"{SEED}/{point.number}/{how}"
    with TemporaryDirectory(dir=tape.folder.parent) as folder:
        tier = Path(folder, "tier")
        try:
            if how == "powerless":
                tape.powerless(point, tier, random.Random(seed))
            else:
                tape.killed(point, tier, random.Random(seed))
            if how == "repaired" and (tier / SLABS).is_dir():
                fsck(tier, repair=True)
                assert fsck(tier) == []
            asyncio.run(come_back(tier, must_have))
        except BaseException as error:
            error.add_note(f"CAIRN_TEST_SEED={SEED}: {how} before {point.name}, write {point.number}")
            raise


def test_a_process_killed_before_any_write_serves_all_that_was_recorded(tape: Tape) -> None:
    for point in tape.points:
        survive(tape, point, "killed", point.durable)


def test_a_power_loss_before_any_write_leaves_no_wrong_bytes(tape: Tape) -> None:
    for point in tape.points:
        survive(tape, point, "powerless", frozenset())


def test_after_a_crash_at_any_write_repair_leaves_a_tier_that_is_sound_and_has_no_less(tape: Tape) -> None:
    for point in tape.points[::2]:
        survive(tape, point, "repaired", point.durable)


def test_a_crash_while_an_earlier_one_is_recovered_from_costs_nothing_more(tape: Tape) -> None:
    """Starting again writes too: marks, records of what is of no use, namespaces, slabs."""
    for point in tape.points[5::10]:
        with TemporaryDirectory(dir=tape.folder.parent) as folder:
            again = Path(folder, "again")
            tape.powerless(point, again, random.Random(f"{SEED}/{point.number}/again"))
            with taped(again, Path(folder, "images")) as second:
                asyncio.run(second_life(again))
            for later in second.points:
                survive(second, later, "killed", later.durable)
