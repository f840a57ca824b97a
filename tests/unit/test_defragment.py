"""Slabs that are emptied into others in idle moments, and readers that hold nothing meanwhile."""

import asyncio
import errno
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from kvstore import defragment
from kvstore.catalogue import Tenant
from kvstore.check import check
from kvstore.copier import Copier
from kvstore.defragment import Defragment
from kvstore.exports import Exports
from kvstore.holds import Holds
from kvstore.published import ENTRY, IndexReader, ident
from kvstore.table import BlockTable, Replica, TierShape
from kvstore.tiers import TierSpec
from kvstore.tiers.dram import DramTier
from kvstore.types import DRAM, HBM, BlockKey, Cause, Owner, Slot, TierName

RED = Tenant("red")
SLAB_BYTES, SIZE = 64 << 10, 4096
SLOTS = SLAB_BYTES // SIZE
Pairs = Sequence[tuple[Slot, Slot, int]]


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def content(key: BlockKey) -> bytes:
    return key * (SIZE // 16)


class Rig:
    """A tier in host memory with all that follows its table, full of blocks; `tier` is what it is called."""

    def __init__(self, tier: TierName, slabs: int) -> None:
        self.tier = tier
        self.copier = Copier(2)
        self.table = BlockTable({tier: TierShape(SLAB_BYTES)})
        self.medium = DramTier(TierSpec(tier, SLAB_BYTES), self.copier, huge_pages="no", mlock="no", prefault=True)
        self.holds = Holds(self.table, 100, 100)
        self.exports = Exports(1024, 1, is_all=True)
        self.reader = IndexReader(self.exports.index(RED).memory)
        self.space = self.table.space("red", 1, tier)
        self.pool = self.table.tiers[tier].pool
        self.asked = 0
        self.copied: list[int] = []  # blocks of each step
        self.defragment = Defragment(self.table, {tier: self.copy}, asked=lambda: self.asked, settle=self.settle)
        self._slabs = slabs

    async def fill(self) -> None:
        for _ in range(self._slabs):
            await self.medium.prepare()
            self.medium.adopt(self.pool.grow().slab_id)
        for number in range(self._slabs * SLOTS):
            self.put(key_of(number))

    async def copy(self, pairs: Pairs) -> None:
        self.copied.append(len(pairs))
        view = self.medium.view
        await self.copier.copy([(view(target, size), view(source, size)) for source, target, size in pairs])

    def settle(self) -> None:
        self.exports.apply(self.table.take_changes())

    def put(self, key: BlockKey) -> bool:
        replica = self.table.allocate(self.space, key, None, SIZE)
        if replica is None:
            return False
        self.settle()  # what changed before is known before a writer knows of its slot
        self.medium.view(replica.slot, SIZE)[:] = content(key)
        self.table.commit(replica, checksum=1)
        self.settle()
        return True

    def drop(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            self.table.discard(replica, Cause.DELETED)
        self.settle()

    def keep(self, *counts: int) -> list[list[Replica]]:
        """Of each slab only the last so many blocks."""
        lying = [[r for r in slab.occupants if isinstance(r, Replica)] for slab in self.pool.slabs.values()]
        for replicas, count in zip(lying, counts, strict=True):
            self.drop(replicas[: len(replicas) - count])
        return [replicas[len(replicas) - count :] for replicas, count in zip(lying, counts, strict=True)]

    @property
    def used(self) -> list[int]:
        return [slab.used for slab in self.pool.slabs.values()]

    def assert_right(self) -> None:
        assert list(check(self.table, self.holds)) == []
        for key, replica in self.space.replicas.items():
            assert bytes(self.medium.view(replica.slot, SIZE)) == content(key)
            found = self.reader.find(ident(1, key))
            if self.tier == DRAM:
                assert found is not None
                entry = ENTRY.unpack(found[1])
                assert entry[7:9] == (replica.slot.slab_id, replica.slot.offset)


def rigged(use: Callable[[Rig], Awaitable[None]], tier: TierName = DRAM, slabs: int = 3) -> None:
    async def main() -> None:
        rig = Rig(tier, slabs)
        await rig.fill()
        try:
            await use(rig)
            rig.assert_right()
        finally:
            rig.exports.close()
            await rig.medium.aclose()
            rig.copier.close()

    asyncio.run(main())


@pytest.mark.parametrize("tier", [DRAM, HBM])
def test_the_emptiest_slab_goes_into_the_free_slots_of_the_others(tier: TierName) -> None:
    async def use(rig: Rig) -> None:
        moved = rig.keep(SLOTS - 2, 2, SLOTS - 1)[1]
        emptied = moved[0].slab
        assert await rig.defragment.step()
        assert sorted(rig.used) in ([0, SLOTS - 1, SLOTS], [0, SLOTS, SLOTS - 1])
        assert emptied.group is None, "it is spare"
        assert rig.defragment.moved_blocks == {tier: 2}
        assert not await rig.defragment.step()
        assert rig.put(key_of(999))

    rigged(use, tier)


def test_a_slab_goes_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defragment, "STEP_BYTES", 3 * SIZE)

    async def use(rig: Rig) -> None:
        rig.keep(7, 8, 1)
        rig.keep(7, 8, 1)
        while await rig.defragment.step():
            rig.assert_right()
        assert rig.copied == [1], "one slab is spare by then, and nobody gains by more"
        assert sorted(rig.used) == [0, 7 + 1, 8] or sorted(rig.used) == [0, 7, 9]

    rigged(use)

    async def use_more(rig: Rig) -> None:
        rig.keep(7, 8)
        while await rig.defragment.step():
            rig.assert_right()
        assert rig.copied == [3, 3, 1]
        assert rig.used == [0, 15]

    rigged(use_more, slabs=2)


@pytest.mark.parametrize("counts", [(SLOTS, SLOTS, SLOTS), (SLOTS - 1, 2, SLOTS), (2, 2, 0)])
def test_nothing_moves_where_nothing_is_gained(counts: tuple[int, ...]) -> None:
    """Nothing fits, or a slab is spare already."""

    async def use(rig: Rig) -> None:
        rig.keep(*counts)
        assert not await rig.defragment.step()
        assert rig.copied == []

    rigged(use)


def test_a_slab_of_which_somebody_holds_a_block_stays() -> None:
    async def use(rig: Rig) -> None:
        held = rig.keep(3, 4, 5)[0][1]
        place = held.slot
        lease = rig.holds.lease(Owner(1), [held], 1e9)
        assert await rig.defragment.step()
        assert held.slot == place
        assert (rig.copied, sorted(rig.used)) == ([4], [0, 3, 9]) or rig.used[0] in (3, 7)
        rig.holds.release(Owner(1), lease.lease_id)

    rigged(use)


def test_a_block_that_somebody_takes_or_deletes_while_it_is_copied_is_theirs() -> None:
    async def use(rig: Rig) -> None:
        taken, deleted, moved = rig.keep(5, 3)[1]
        place = taken.slot
        leases = []
        copy = rig.copy

        async def meanwhile(pairs: Pairs) -> None:
            await copy(pairs)
            leases.append(rig.holds.lease(Owner(1), [taken], 1e9))
            rig.drop([deleted])

        disturbed = Defragment(rig.table, {DRAM: meanwhile}, asked=lambda: 0, settle=rig.settle)
        assert await disturbed.step()
        assert disturbed.moved_blocks == {DRAM: 1}
        assert (taken.slot, moved.slab.slab_id) == (place, 1)
        assert deleted.key not in rig.space.replicas
        assert rig.used == [6, 1]
        rig.holds.release(Owner(1), leases[0].lease_id)
        assert await rig.defragment.step()
        assert rig.used == [7, 0]

    rigged(use, slabs=2)


def test_blocks_stay_where_they_are_when_the_copy_fails_or_is_cancelled() -> None:
    async def use(rig: Rig) -> None:
        rig.keep(5, 3)
        begun = asyncio.Event()

        async def fail(pairs: Pairs) -> None:
            raise OSError(errno.EIO, "no")

        async def hang(pairs: Pairs) -> None:
            begun.set()
            await asyncio.Event().wait()

        rig.defragment = Defragment(rig.table, {DRAM: fail}, asked=lambda: 0, settle=rig.settle)
        assert not await rig.defragment.step()
        rig.assert_right()
        rig.defragment = Defragment(rig.table, {DRAM: hang}, asked=lambda: 0, settle=rig.settle)
        stepping = asyncio.create_task(rig.defragment.step())
        await begun.wait()
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        assert rig.used == [5, 3]

    rigged(use, slabs=2)


def test_a_softly_pinned_block_takes_its_pin_along() -> None:
    async def use(rig: Rig) -> None:
        pinned = rig.keep(5, 3)[1][0]
        pin = rig.holds.pin("red", [pinned], hard=False, expires_at=1e9)
        assert await rig.defragment.step()
        assert rig.used == [8, 0]
        rig.assert_right()
        assert rig.holds.unpin("red", pin.pin_id)

    rigged(use, slabs=2)


def test_it_waits_until_nobody_asks_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defragment, "IDLE_S", 0.001)
    looks: list[Any] = []

    async def use(rig: Rig) -> None:
        busy, enough = True, asyncio.Event()

        def asked() -> int:
            looks.append(rig.copied[:])
            rig.asked += busy and len(looks) % 2 == 0  # so that two looks in a row may see no difference
            if len(looks) == 20:
                enough.set()
            return rig.asked

        def settle() -> None:
            rig.settle()
            moved.set()

        rig.keep(5, 3)
        moved = asyncio.Event()
        rig.defragment = Defragment(rig.table, {DRAM: rig.copy}, asked=asked, settle=settle)
        keeping = asyncio.create_task(rig.defragment.keep())
        await asyncio.wait_for(enough.wait(), 20)
        assert rig.copied == []
        busy = False
        await asyncio.wait_for(moved.wait(), 20)
        assert rig.used == [8, 0]
        keeping.cancel()
        await asyncio.wait([keeping])

    rigged(use, slabs=2)


def test_a_reader_that_holds_nothing_never_takes_another_blocks_bytes_for_right() -> None:
    """It looks at the entry, copies, and looks again, over and over, while blocks move and their slots are reused."""
    wrong: list[str] = []
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    hits, over = [0], threading.Event()

    def read(rig: Rig) -> None:
        regions = {slab_id: rig.medium.region(slab_id) for slab_id in rig.pool.slabs}
        while not over.is_set():
            for number in range(6 * SLOTS):
                key = key_of(number)
                found = rig.reader.find(ident(1, key))
                if found is None:
                    continue
                entry = ENTRY.unpack(found[1])
                copy = bytes(regions[entry[7]].view(entry[8], SIZE))
                if rig.reader.is_unchanged(*found):
                    hits[0] += 1
                    if copy != content(key):
                        wrong.append(f"{number}: {copy[:16].hex()}")

    async def use(rig: Rig) -> None:
        reading = asyncio.create_task(asyncio.to_thread(read, rig))
        moved = 0
        for turn in range(1000):
            if turn % 2:
                while await rig.defragment.step():
                    pass
                for number in range(6 * SLOTS):  # what was left is another's at once
                    if key_of(number) not in rig.space.replicas and not rig.put(key_of(number)):
                        break
            else:
                live = list(rig.space.replicas.values())
                rig.drop(live[turn % 3 :: 3] + live[(turn + 1) % 3 :: 3])
            await asyncio.sleep(0)
            moved = rig.defragment.moved_blocks[DRAM]
        over.set()
        await reading
        assert wrong == []
        assert moved > 1000, moved
        assert hits[0] > 1000, hits

    try:
        rigged(use, slabs=4)
    finally:
        over.set()
        sys.setswitchinterval(interval_s)
