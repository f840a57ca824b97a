"""Blocks brought into HBM and back down, over a whole store with its tier on the CPU."""

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.catalogue import OpenNamespace, Tenant
from kvstore.copier import checksum
from kvstore.errors import InvalidRequest, Rejected
from kvstore.holds import Lease
from kvstore.lifting import JOB_BLOCKS
from kvstore.prefix import Namespace, chain, part_key
from kvstore.store import Store
from kvstore.table import Replica
from kvstore.types import DRAM, HBM, NODE, BlockKey, Cause, Owner, State
from server.assembly import make_store
from server.config import load

pytest.importorskip("torch")

RED, BLUE = Tenant("red", secret="a"), Tenant("blue", secret="b")
READER, OTHER, WRITER = Owner(1), Owner(2), Owner(3)
SIZE = 60_000
SLAB = "1MiB"
SLOTS = (1 << 20) // 61_440  # in a slab, of blocks of that size

Use = Callable[["Rig"], Awaitable[None]]


class Rig:
    """A store with nothing running by itself: HBM of `slabs`, DRAM of 16."""

    def __init__(self, folder: Path, slabs: int, **settings: str) -> None:
        given = {
            "tiers.hbm.device": "cpu", "tiers.hbm.capacity": f"{slabs}MiB",
            "tiers.dram.capacity": "16MiB", "tiers.dram.slab": SLAB, "tiers.dram.mlock": "no", "index.entries": "1024",
        }  # fmt: skip
        options = [f"--{name}={value}" for name, value in {**given, **settings}.items()]
        config = load(None, {"HOME": str(folder)}, options)
        self.crashes: list[BaseException | None] = []
        made = make_store(config, 1, [RED, BLUE], self.crashes.append)
        self.store: Store = made.store
        self.recovery = made.recovery
        for tier, capacity_bytes in made.capacities.items():
            self.store.sizings[tier].target = capacity_bytes // self.store.table.tiers[tier].pool.slab_bytes
        assert self.store.lifting is not None
        self.lifting = self.store.lifting
        self.writes: list[int] = []  # blocks of each copy into HBM
        self._write = self.lifting.hbm.write

    async def grow(self) -> None:
        for sizing in self.store.sizings.values():
            while await sizing.grow():
                pass

    def open(self, tenant: Tenant = RED, name: str = "llama", parts: int = 1) -> OpenNamespace:
        namespace = Namespace(model=name, dtype="bf16", layout="x", block_tokens=1, layers=2, parts=parts)
        return self.store.open(tenant, name, namespace)

    def put(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> None:
        placing = self.store.puts.place(WRITER, space, keys, None, [SIZE] * len(keys))
        self.store.puts.granted(WRITER, space, keys, placing)
        if placing.grant is None:
            return
        blocks = [content(replica.key) for replica in placing.grant.replicas]
        for replica, block in zip(placing.grant.replicas, blocks, strict=True):
            self.store.view(replica)[:] = block
        self.store.puts.commit(WRITER, placing.grant.grant_id, list(map(checksum, blocks)), "test")

    async def acquire(self, space: OpenNamespace, keys: Sequence[BlockKey], owner: Owner = READER) -> Lease | None:
        return await self.lifting.acquire(owner, space, keys, lease_s=60, wait_s=0, load_s=5, tokens_per_s=0)

    async def read(self, lease: Lease | None) -> list[bytes]:
        """What lies in HBM at the places of a lease."""
        replicas = lease.replicas if lease is not None else ()
        assert all(replica.space.tier == HBM for replica in replicas)
        copies = [bytearray(replica.size) for replica in replicas]
        places = [replica.slot for replica in replicas]
        await self.lifting.hbm.read([(place, memoryview(copy)) for place, copy in zip(places, copies, strict=True)])
        return list(map(bytes, copies))

    def forget(self, space: OpenNamespace, keys: Sequence[BlockKey], tier: str) -> None:
        self.store.discard(space, keys, Cause.DELETED, tier)

    def instead_of_write(self, work: Callable[[Any], Awaitable[None]]) -> None:
        """Before each copy into HBM comes `work`."""

        async def write(blocks: Any) -> None:
            self.writes.append(len(blocks))
            await work(blocks)
            await self._write(blocks)

        self.lifting.hbm.write = write  # type: ignore[method-assign]

    @property
    def used_bytes(self) -> int:
        return self.store.table.tiers[HBM].used_bytes

    def spoil(self, replica: Replica) -> None:
        if replica.space.tier == HBM:
            self.lifting.hbm.tensor(replica.slot, replica.size)[7] += 1
        else:
            self.store.view(replica)[7] ^= 1


def content(key: BlockKey) -> bytes:
    return (key * (SIZE // len(key) + 1))[:SIZE]


def keys_of(space: OpenNamespace, count: int, seed: int = 0) -> list[BlockKey]:
    return chain([seed, *range(1, count)], 1, space.root, "xxh3")


async def nothing(blocks: Any) -> None:
    pass


async def until(is_so: Callable[[], bool]) -> None:
    turn = asyncio.Event()
    while not is_so():
        asyncio.get_running_loop().call_later(0.001, turn.set)
        await turn.wait()
        turn.clear()


@pytest.fixture
def rigged(tmp_path: Path) -> Callable[..., None]:
    """Runs a coroutine function with a rig; in the end nobody holds anything and all is consistent."""

    @asynccontextmanager
    async def opened(slabs: int, settings: dict[str, str]) -> Any:
        rig = Rig(tmp_path, slabs, **settings)
        await rig.grow()
        rig.instead_of_write(nothing)
        try:
            yield rig
            for owner in (READER, OTHER, WRITER, NODE):
                rig.store.end(owner)
            assert list(rig.store.problems()) == []
            assert all(not tier.draining for tier in rig.store.table.tiers.values())
            assert rig.crashes == []
        finally:
            await rig.store.aclose()

    def run(use: Use, slabs: int = 4, **settings: str) -> None:
        async def main() -> None:
            async with opened(slabs, settings) as rig:
                await use(rig)

        asyncio.run(main())

    return run


def test_a_chain_is_copied_once_and_found_in_hbm_from_then_on(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 40)
        rig.put(space, keys)
        assert not rig.lifting.is_here(space, keys)
        assert rig.lifting.hold(READER, space, keys, 60) is None
        lease = await rig.acquire(space, keys)
        assert await rig.read(lease) == list(map(content, keys))
        assert rig.lifting.is_here(space, keys)
        assert lease is not None
        assert [replica.parent for replica in lease.replicas] == [None, *keys[:-1]]
        assert [replica.layers for replica in lease.replicas] == [2] * 40
        again = rig.lifting.hold(OTHER, space, [*keys, BlockKey(bytes(16))], 60)
        assert again is not None
        assert again.replicas == lease.replicas
        assert (sum(rig.writes), rig.lifting.lifted_blocks, rig.lifting.hit_blocks) == (40, 40, 40)

    rigged(use)


def test_two_readers_at_once_copy_each_block_once(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 30)
        rig.put(space, keys)
        leases = await asyncio.gather(*(rig.acquire(space, keys[: 10 * n]) for n in (1, 2, 3, 3)))
        assert [len(lease.replicas) for lease in leases if lease is not None] == [10, 20, 30, 30]
        for lease in leases:
            assert await rig.read(lease) == [content(replica.key) for replica in lease.replicas]  # type: ignore[union-attr]
        assert sum(rig.writes) == 30

    rigged(use)


def test_what_finds_no_room_is_left_out_from_the_end_of_the_chain(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 3 * SLOTS)
        rig.put(space, keys)
        lease = await rig.acquire(space, keys)
        assert await rig.read(lease) == list(map(content, keys[: 2 * SLOTS]))

    rigged(use, slabs=2)


def test_the_chain_used_longest_ago_makes_room_and_a_held_one_does_not(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        first, second, third = (keys_of(space, SLOTS, seed) for seed in (1, 2, 3))
        for keys in (first, second, third):
            rig.put(space, keys)
        held = await rig.acquire(space, first)
        assert held is not None
        loose = await rig.acquire(space, second, OTHER)
        assert loose is not None
        rig.store.reads.release(OTHER, loose.lease_id)
        lease = await rig.acquire(space, third, OTHER)
        assert await rig.read(lease) == list(map(content, third))
        assert await rig.read(held) == list(map(content, first))
        assert rig.lifting.hold(OTHER, space, second, 60) is None
        assert rig.store.reads.match(space, second) == SLOTS, "DRAM has them all the same"
        fourth = keys_of(space, SLOTS, 4)
        rig.put(space, fourth)
        assert await rig.acquire(space, fourth) is None, "all of HBM is held"

    rigged(use, slabs=2)


def test_the_beginning_of_a_chain_does_not_make_room_for_its_end(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys, warmer = keys_of(space, 2 * SLOTS, 1), keys_of(space, SLOTS, 2)
        for chain_ in (keys, warmer):
            rig.put(space, chain_)
        for chain_ in (keys[:SLOTS], warmer):
            await rig.acquire(space, chain_)
            rig.store.end(READER)
        assert await rig.read(await rig.acquire(space, keys)) == list(map(content, keys))

    rigged(use, slabs=2)


def test_a_reader_that_goes_while_its_blocks_are_copied_leaves_nothing(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 10)
        rig.put(space, keys)
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def gate(blocks: Any) -> None:
            begun.set()
            await go_on.wait()

        rig.instead_of_write(gate)
        going = asyncio.create_task(rig.acquire(space, keys))
        await begun.wait()
        staying = asyncio.create_task(rig.acquire(space, keys, OTHER))
        await asyncio.sleep(0)
        rig.store.end(READER)
        assert all(replica.holders for replica in space.dram.replicas.values()), "the copy goes on"
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        go_on.set()
        assert await rig.read(await staying) == list(map(content, keys))
        assert rig.writes == [10, 10], "who waited for the first copy does it itself"
        rig.store.end(OTHER)
        assert not any(replica.holders for replica in space.dram.replicas.values())

    rigged(use)


def test_a_device_that_fails_is_left_alone_for_a_while(rigged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 10)
        rig.put(space, keys)

        async def fail(blocks: Any) -> None:
            raise OSError(errno.EIO, "unspecified launch failure")

        rig.instead_of_write(fail)
        assert await rig.acquire(space, keys) is None
        assert "launch failure" in rig.lifting.health.reason
        assert rig.used_bytes == 0
        rig.instead_of_write(nothing)
        assert await rig.acquire(space, keys) is None
        assert rig.writes == [10]
        assert rig.store.reads.match(space, keys) == 10, "DRAM goes on"
        later = rig.store.clock.now() + 3600
        monkeypatch.setattr(rig.store.clock, "now", lambda: later)
        assert await rig.read(await rig.acquire(space, keys)) == list(map(content, keys))
        assert rig.lifting.health.is_well

    rigged(use)


def test_a_block_that_is_deleted_while_it_is_copied_is_not_there_after(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 10)
        rig.put(space, keys)

        async def delete(blocks: Any) -> None:
            rig.forget(space, keys[5:6], "")

        rig.instead_of_write(delete)
        assert await rig.acquire(space, keys) is None
        assert keys[5] not in space.hbm.replicas  # type: ignore[union-attr]
        rig.instead_of_write(nothing)
        assert await rig.read(await rig.acquire(space, keys)) == list(map(content, keys[:5]))

    rigged(use)


def test_a_block_that_is_damaged_in_dram_is_dropped_and_not_copied(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 10)
        rig.put(space, keys)
        rig.spoil(space.dram.replicas[keys[4]])
        assert await rig.acquire(space, keys) is None
        assert rig.store.counters.corrupt_blocks == 1
        assert keys[4] not in space.dram.replicas
        assert await rig.read(await rig.acquire(space, keys)) == list(map(content, keys[:4]))

    rigged(use)


def test_what_only_hbm_has_is_loaded_into_dram(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 40)
        rig.put(space, keys)
        lifted = await rig.acquire(space, keys)
        assert lifted is not None
        rig.store.reads.release(READER, lifted.lease_id)
        rig.forget(space, keys, DRAM)
        assert rig.store.reads.match(space, keys) == 40
        assert rig.store.where(space, keys[0]) == ("hbm", SIZE)
        lease = await rig.store.reads.acquire(READER, space, keys, lease_s=60, wait_s=0, layers=0, load_s=5)
        assert lease is not None
        assert [bytes(rig.store.view(replica)) for replica in lease.replicas] == list(map(content, keys))
        assert rig.store.counters.promoted_blocks[HBM] == 40
        assert rig.store.where(space, keys[0]) == ("dram", SIZE)

    rigged(use)


def test_what_is_damaged_in_hbm_is_a_miss_and_is_dropped(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 10)
        rig.put(space, keys)
        await rig.acquire(space, keys)
        rig.store.end(READER)
        rig.forget(space, keys, DRAM)
        rig.spoil(space.hbm.replicas[keys[6]])  # type: ignore[union-attr]
        lease = await rig.store.reads.acquire(READER, space, keys, lease_s=60, wait_s=0, layers=0, load_s=5)
        assert lease is not None
        assert len(lease.replicas) == 6
        assert keys[6] not in space.hbm.replicas  # type: ignore[union-attr]
        assert rig.store.counters.corrupt_blocks == 1

    rigged(use)


def test_a_report_of_damage_is_looked_into_in_both_tiers(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 4)
        rig.put(space, keys)
        lease = await rig.acquire(space, keys)
        assert await rig.store.verify(space, keys) == 0
        rig.spoil(space.hbm.replicas[keys[1]])  # type: ignore[union-attr]
        assert await rig.store.verify(space, keys) == 1
        assert rig.store.counters.corrupt_blocks == 1
        assert rig.lifting.hold(OTHER, space, keys, 60).replicas == lease.replicas[:1]  # type: ignore[union-attr]
        rig.store.end(READER)
        assert await rig.read(await rig.acquire(space, keys)) == list(map(content, keys)), "DRAM's was good"

    rigged(use)


def test_memory_that_another_tenant_had_is_made_anew(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        red, blue = rig.open(RED), rig.open(BLUE)
        keys = keys_of(red, SLOTS)
        rig.put(red, keys)
        lease = await rig.acquire(red, keys)
        assert lease is not None
        slab = lease.replicas[0].slab.slab_id
        rig.store.end(READER)
        theirs = keys_of(blue, SLOTS)
        rig.put(blue, theirs)
        lease = await rig.acquire(blue, theirs)
        assert await rig.read(lease) == list(map(content, theirs))
        assert lease is not None
        assert lease.replicas[0].slab.slab_id != slab
        assert rig.lifting.hold(READER, red, keys, 60) is None

    rigged(use, slabs=1)


def test_a_block_of_several_parts_counts_when_all_of_them_are_here(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open(parts=2)
        parts = [[part_key(key, part) for key in keys_of(space, 5)] for part in (0, 1)]
        rig.put(space, parts[0])
        assert await rig.acquire(space, parts[0]) is None
        rig.put(space, parts[1])
        assert await rig.read(await rig.acquire(space, parts[0])) == list(map(content, parts[0]))
        rig.store.end(READER)
        rig.forget(space, parts[1][3:], DRAM)
        lease = await rig.acquire(space, parts[0])
        assert lease is not None
        assert len(lease.replicas) == 3
        assert await rig.read(await rig.acquire(space, parts[1])) == list(map(content, parts[1][:3]))

    rigged(use)


def test_a_gap_in_hbm_is_filled(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 20)
        rig.put(space, keys)
        await rig.acquire(space, keys)
        rig.forget(space, keys[8:10], HBM)
        rig.forget(space, keys[15:], DRAM)  # HBM alone has the end
        assert await rig.read(await rig.acquire(space, keys)) == list(map(content, keys))
        assert rig.lifting.lifted_blocks == 22

    rigged(use)


def test_a_batch_over_the_limit_and_a_client_that_holds_too_much_are_refused(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 3)
        rig.put(space, keys)
        with pytest.raises(InvalidRequest, match="batch_blocks"):
            await rig.acquire(space, keys_of(space, 101))
        for _ in range(2):
            await rig.acquire(space, keys)
        with pytest.raises(Rejected, match="leases_per_client"):
            await rig.acquire(space, keys)

    rigged(use, **{"limits.batch_blocks": "100", "limits.leases_per_client": "2"})


def test_a_long_chain_goes_in_several_copies(rigged: Any) -> None:
    async def use(rig: Rig) -> None:
        space = rig.open()
        keys = keys_of(space, 100)
        rig.put(space, keys)
        assert len(await rig.read(await rig.acquire(space, keys))) == 100
        assert rig.writes == [JOB_BLOCKS, 100 - JOB_BLOCKS]

    rigged(use, slabs=8)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_meanwhile_the_bytes_are_those_of_the_key(rigged: Any, seed: int) -> None:
    """Readers come, go and are cancelled while blocks are put, deleted, evicted and moved: seed by seed."""
    dice = random.Random(seed)

    async def use(rig: Rig) -> None:
        spaces = [rig.open(tenant) for tenant in (RED, BLUE)]
        chains = [(space, keys_of(space, dice.randint(1, 25), number)) for number in range(8) for space in spaces]

        async def dawdle(blocks: Any) -> None:
            for _ in range(dice.randint(0, 30)):
                await asyncio.sleep(0)
            if dice.random() < 0.05:
                raise OSError(errno.EIO, "now and then")

        rig.instead_of_write(dawdle)
        rig.lifting.health.tolerance = 10**6

        async def reader(owner: Owner) -> None:
            for _ in range(15):
                space, keys = dice.choice(chains)
                if dice.random() < 0.3:
                    lease = await rig.store.reads.acquire(owner, space, keys, lease_s=60, wait_s=0, layers=0, load_s=5)
                    for replica in lease.replicas if lease else ():
                        assert bytes(rig.store.view(replica)) == content(replica.key)
                    continue
                lease = await rig.acquire(space, keys, owner)
                assert await rig.read(lease) == [content(key) for key in keys[: len(lease.replicas) if lease else 0]]
                assert lease is None or all(replica.state is not State.FREE for replica in lease.replicas)
                if lease is not None and dice.random() < 0.9:
                    rig.store.reads.release(owner, lease.lease_id)

        async def trouble() -> None:
            for _ in range(150):
                space, keys = dice.choice(chains)
                deed = dice.random()
                if deed < 0.5:
                    missing = [key for key in keys if key not in space.dram.replicas]
                    if missing:
                        rig.put(space, missing)
                elif deed < 0.8:
                    rig.forget(space, dice.sample(keys, dice.randint(1, len(keys))), dice.choice(["", DRAM, HBM]))
                else:
                    await rig.store.defragment.step()
                for _ in range(dice.randint(0, 5)):
                    await asyncio.sleep(0)

        for space, keys in chains:
            rig.put(space, keys)
        readers = [asyncio.create_task(reader(Owner(10 + number))) for number in range(6)]
        troubled = asyncio.create_task(trouble())
        for task in readers[:2]:
            for _ in range(dice.randint(20, 200)):
                await asyncio.sleep(0)
            task.cancel()
        for outcome in await asyncio.gather(*readers, troubled, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        await until(lambda: rig.store.promotion.is_idle)
        for number in range(6):
            rig.store.end(Owner(10 + number))

    rigged(use, slabs=3)
