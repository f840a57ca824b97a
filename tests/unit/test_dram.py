"""Slabs of host memory: made in a thread, mapped by clients, given back at once."""

import asyncio
import os
from collections.abc import Iterator

import pytest

from kvstore.copier import Copier
from kvstore.errors import ConfigError
from kvstore.region import Region
from kvstore.tiers import TierSpec
from kvstore.tiers.dram import DramTier
from kvstore.types import DRAM, Slot
from tests.tier_contract import MediumContract

SLAB_BYTES = 1 << 20


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier(threads=1)
    yield made
    made.close()


def tier_of(copier: Copier, *, huge_pages: str = "no") -> DramTier:
    return DramTier(TierSpec(DRAM, SLAB_BYTES), copier, huge_pages=huge_pages, mlock="no", prefault=True)


class TestDramTier(MediumContract):
    tier = DRAM

    def open(self, copier: Copier) -> DramTier:
        return tier_of(copier)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_blocks_are_written_and_read_where_their_slots_are(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        for slab_id in (7, 9):
            await tier.prepare()
            tier.adopt(slab_id)
        slots = [Slot(DRAM, slab_id, offset, 4096, 1) for slab_id in (7, 9) for offset in (0, SLAB_BYTES - 4096)]
        blocks = [bytes([number]) * 4000 for number in range(4)]
        await tier.write([(slot, memoryview(block)) for slot, block in zip(slots, blocks, strict=True)])
        copies = [bytearray(4000) for _ in slots]
        await tier.read([(slot, memoryview(copy)) for slot, copy in zip(slots, copies, strict=True)])
        assert copies == blocks
        assert [bytes(tier.view(slot, 4000)) for slot in slots] == blocks
        assert bytes(tier.region(9).view(SLAB_BYTES - 4096, 4001)) == blocks[3] + b"\0"
        with pytest.raises(AssertionError):
            tier.view(slots[0], 4097)
        described = tier.describe()
        assert (described["slabs_ready"], described["slabs_prefaulted"], described["reasons"]) == (2, 2, [])
        await tier.aclose()

    before = open_descriptors()
    asyncio.run(use())
    copier.close()  # its thread may be about to drop the last view
    assert open_descriptors() == before


def test_a_dropped_slab_takes_its_bytes_from_those_who_still_map_it(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        await tier.prepare()
        tier.adopt(1)
        client = Region(tier.region(1).readonly_fd(), SLAB_BYTES, writable=False, populate=True)
        tier.view(Slot(DRAM, 1, 0, 64, 1), 6)[:] = b"secret"
        assert bytes(client.view(0, 6)) == b"secret"
        tier.drop_slab(1)
        assert os.fstat(client.fd).st_blocks == 0
        assert not any(client.view(0, SLAB_BYTES))
        client.close()
        await tier.aclose()

    asyncio.run(use())


def test_memory_that_was_made_for_a_caller_who_was_cancelled_is_the_next_ones(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        before = open_descriptors()
        for _ in range(3):
            cancelled = asyncio.create_task(tier.prepare())
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
        await tier.prepare()
        assert open_descriptors() - before == 2, "one slab, and the descriptor of its mapping"
        tier.adopt(1)
        await tier.aclose()
        copier.close()
        assert open_descriptors() == before

    asyncio.run(use())


def test_what_is_required_and_refused_ends_the_start(copier: Copier) -> None:
    with pytest.raises(ConfigError, match="huge pages are required"):
        asyncio.run(tier_of(copier, huge_pages="require").prepare())
