"""What every medium that holds slabs of bytes promises, as a test class to inherit."""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator

import pytest

from kvstore.copier import Copier
from kvstore.tiers import TierMedium
from kvstore.types import Slot, TierName

SLAB_BYTES = 1 << 20
SLOT_BYTES = 64 << 10
SIZES = [1, 63, 64, 4001, SLOT_BYTES - 1, SLOT_BYTES]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def slot_of(tier: TierName, slab_id: int, index: int) -> Slot:
    return Slot(tier, slab_id, index * SLOT_BYTES, SLOT_BYTES, 1)


async def add_slabs(medium: TierMedium, *slab_ids: int) -> None:
    for slab_id in slab_ids:
        await medium.prepare()
        medium.adopt(slab_id)


async def write_all(medium: TierMedium, slots: list[Slot], blocks: list[bytes]) -> None:
    await medium.write([(slot, memoryview(block)) for slot, block in zip(slots, blocks, strict=True)])


async def read_all(medium: TierMedium, slots: list[Slot], sizes: list[int]) -> list[bytes]:
    copies = [bytearray(size) for size in sizes]
    await medium.read([(slot, memoryview(copy)) for slot, copy in zip(slots, copies, strict=True)])
    return [bytes(copy) for copy in copies]


class MediumContract:
    """Inherit it as `Test...` and say how a medium with slabs of SLAB_BYTES, eight at least, is opened."""

    tier: TierName

    def open(self, copier: Copier) -> TierMedium:
        raise AssertionError("the class that inherits opens it")

    @pytest.fixture
    def copier(self) -> Iterator[Copier]:
        made = Copier(threads=2)
        yield made
        made.close()

    @pytest.fixture
    def use(self, copier: Copier) -> Callable[[Callable[[TierMedium], Awaitable[None]]], None]:
        """Runs a coroutine with an open medium, and closes that."""

        def run(work: Callable[[TierMedium], Awaitable[None]]) -> None:
            async def opened() -> None:
                medium = self.open(copier)
                try:
                    await work(medium)
                finally:
                    await medium.aclose()

            asyncio.run(opened())

        return run

    @pytest.mark.parametrize("size", SIZES)
    def test_a_block_of_any_size_is_read_as_it_was_written(self, use, size):
        async def work(medium: TierMedium) -> None:
            await add_slabs(medium, 1)
            block, slot = random.Random(size).randbytes(size), slot_of(self.tier, 1, 3)
            await write_all(medium, [slot], [block])
            assert await read_all(medium, [slot], [size]) == [block]

        use(work)

    def test_blocks_in_all_slots_of_several_slabs_do_not_mix(self, use):
        async def work(medium: TierMedium) -> None:
            await add_slabs(medium, 7, 9, 4)
            slots = [slot_of(self.tier, slab_id, i) for slab_id in (9, 4, 7) for i in range(SLAB_BYTES // SLOT_BYTES)]
            blocks = [random.Random(number).randbytes(SLOT_BYTES) for number in range(len(slots))]
            await write_all(medium, slots, blocks)
            assert await read_all(medium, slots[::-1], [SLOT_BYTES] * len(slots)) == blocks[::-1]

        use(work)

    def test_a_short_block_leaves_the_rest_of_its_slot_and_the_next_slot_alone(self, use):
        async def work(medium: TierMedium) -> None:
            await add_slabs(medium, 1)
            slots = [slot_of(self.tier, 1, index) for index in (4, 5, 6)]
            await write_all(medium, slots, [b"\xaa" * SLOT_BYTES] * 3)
            await write_all(medium, slots[1:2], [b"\xbb" * 4001])
            assert await read_all(medium, slots, [SLOT_BYTES] * 3) == [
                b"\xaa" * SLOT_BYTES,
                b"\xbb" * 4001 + b"\xaa" * (SLOT_BYTES - 4001),
                b"\xaa" * SLOT_BYTES,
            ]

        use(work)

    def test_nothing_to_read_or_write_is_done_at_once(self, use):
        async def work(medium: TierMedium) -> None:
            await add_slabs(medium, 1)
            await medium.read([])
            await medium.write([])

        use(work)

    def test_a_slab_that_gets_the_memory_of_a_dropped_one_finds_zeros(self, use):
        async def work(medium: TierMedium) -> None:
            for slab_id in range(1, 20):
                await add_slabs(medium, slab_id)
                slots = [slot_of(self.tier, slab_id, index) for index in range(SLAB_BYTES // SLOT_BYTES)]
                assert not any(map(any, await read_all(medium, slots, [SLOT_BYTES] * len(slots))))
                await write_all(medium, slots, [b"\xee" * SLOT_BYTES] * len(slots))
                medium.drop_slab(slab_id)

        use(work)

    def test_a_slab_is_dropped_and_its_neighbours_keep_their_blocks(self, use):
        async def work(medium: TierMedium) -> None:
            await add_slabs(medium, 1, 2, 3)
            slots = [slot_of(self.tier, slab_id, 0) for slab_id in (1, 2, 3)]
            await write_all(medium, slots, [b"one" * 9, b"two" * 9, b"six" * 9])
            medium.drop_slab(2)
            await add_slabs(medium, 4)
            await write_all(medium, [slot_of(self.tier, 4, 0)], [b"\xff" * SLOT_BYTES])
            assert await read_all(medium, [slots[0], slots[2]], [27, 27]) == [b"one" * 9, b"six" * 9]

        use(work)

    def test_batches_at_the_same_time_all_get_their_own_bytes(self, use):
        async def work(medium: TierMedium) -> None:
            await add_slabs(medium, 1, 2, 3, 4)

            async def of_one_slab(slab_id: int) -> None:
                slots = [slot_of(self.tier, slab_id, index) for index in range(SLAB_BYTES // SLOT_BYTES)]
                for turn in range(4):
                    seed = random.Random(slab_id * 10 + turn)
                    sizes = [seed.randint(1, SLOT_BYTES) for _ in slots]
                    blocks = [seed.randbytes(size) for size in sizes]
                    await write_all(medium, slots, blocks)
                    assert await read_all(medium, slots, sizes) == blocks

            await asyncio.gather(*map(of_one_slab, (1, 2, 3, 4)))

        use(work)

    def test_memory_that_was_made_for_a_caller_who_was_cancelled_is_the_next_ones(self, use):
        async def work(medium: TierMedium) -> None:
            await add_slabs(medium, 1)
            before = open_descriptors()
            medium.drop_slab(1)
            for _ in range(5):
                cancelled = asyncio.create_task(medium.prepare())
                await asyncio.sleep(0)
                cancelled.cancel()
                await asyncio.wait([cancelled])
            await add_slabs(medium, 2)
            assert open_descriptors() == before, "no more than one slab has memory"
            await write_all(medium, [slot_of(self.tier, 2, 0)], [b"cairn"])

        use(work)

    def test_closing_gives_everything_back_and_may_be_done_twice(self, copier):
        async def work() -> None:
            medium = self.open(copier)
            await add_slabs(medium, 1, 2)
            await medium.prepare()
            await write_all(medium, [slot_of(self.tier, 2, 0)], [b"cairn"])
            await medium.aclose()
            await medium.aclose()

        before = open_descriptors()
        asyncio.run(work())
        copier.close()  # its threads may be about to drop the last view
        assert open_descriptors() == before

    def test_it_says_of_itself_what_it_is(self, use):
        async def work(medium: TierMedium) -> None:
            await add_slabs(medium, 1, 2)
            described = medium.describe()
            assert described["medium"]
            assert described["slabs_ready"] == 2

        use(work)
