"""What the ledger is told, in the order in which it happened, whatever happens meanwhile."""

import asyncio
import threading
from pathlib import Path

from kvstore.ledger import Ledger, records
from kvstore.types import NVME, BlockKey, Cause
from tests.crash.tiered import Tiered, keys_of, opened

SIZE = 8192
NOBODY = BlockKey(bytes(16))


async def move(node: Tiered) -> None:
    """Give the coldest slab back; what is hot in it is moved."""
    node.upkeep.set_tier(NVME, high_watermark=0.2, low_watermark=0.1)
    assert node.store.reclaim is not None
    assert await node.store.reclaim.give_back(Cause.WATERMARK, readmits=True)


def test_a_block_that_is_moved_while_the_ledger_is_told_of_it_is_told_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(tmp_path) as node:
            space = node.open("small", SIZE)
            await node.flush()
            keys = keys_of(space, 1, 8)
            await node.store_below(space, keys)
            assert space.nvme is not None
            moved = space.nvme.replicas[keys[-1]]
            node.table.touch(moved)
            where, gate = moved.slot, threading.Event()
            held = asyncio.ensure_future(node.records.run(lambda _: gate.wait(10)))
            await asyncio.sleep(0)
            telling = asyncio.ensure_future(node.records.flush())
            await asyncio.sleep(0)  # it has made its records, and waits for the ledger
            await move(node)
            gate.set()
            await asyncio.gather(held, telling)
            assert moved.slot != where
            await node.flush()
            assert node.records.pending == 0
        async with opened(tmp_path) as node:
            assert await node.has(node.open("small", SIZE), keys[-1])

    asyncio.run(story())


def test_what_differs_between_ledger_and_table_is_told(tmp_path: Path) -> None:
    def forget_first(ledger: Ledger) -> None:
        (gone,) = records(next(ledger.scan(1)))
        ledger.apply([gone._replace(key=NOBODY)], [(gone.number, gone.key)])

    async def story() -> None:
        async with opened(tmp_path) as node:
            space = node.open("small", SIZE)
            await node.store_below(space, keys_of(space, 1, 3))
            await node.flush()
            await node.records.run(forget_first)
            problems = await node.records.problems([space.nvme] if space.nvme else [])
            assert sorted(problem.split(": ")[1].split(" (")[0] for problem in problems) == [
                "the ledger does not have it",
                "the ledger has",
            ]
            node.store.discard(space, keys_of(space, 1, 3), Cause.DELETED)
            await node.flush()
            node.records.forget([(space.number, NOBODY)])

    asyncio.run(story())
