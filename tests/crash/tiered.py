"""A store with DRAM and NVMe in this process, driven step by step: nothing runs in the background but loads."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from kvstore.catalogue import OpenNamespace, Tenant
from kvstore.copier import checksum
from kvstore.fsck import Fsck
from kvstore.prefix import chain
from kvstore.table import BlockTable
from kvstore.types import DRAM, NVME, BlockKey, Cause, Owner, Placement
from kvstore.upkeep import Upkeep
from server.assembly import Assembled, make_store
from server.config import load
from tests.system.nodes import content, namespace

TENANT = Tenant("default", secret="a secret", admin=True)
READER = Owner(7)
SETTINGS = {
    "tiers.dram.capacity": "4MiB",
    "tiers.dram.slab": "1MiB",
    "tiers.dram.mlock": "no",
    "tiers.dram.huge_pages": "no",
    "tiers.dram.prefault": "false",
    "tiers.nvme.capacity": "512KiB",
    "tiers.nvme.slab": "64KiB",
    "tiers.nvme.admission": "all",
    "tiers.nvme.io": "posix",
    "tiers.nvme.threads": "2",
    "index.entries": "256",
}
_epochs = count(1_000)


class Tiered:
    """What `opened` gives. `broken` is what a task of the store raised."""

    def __init__(self, made: Assembled, broken: list[BaseException | None]) -> None:
        assert made.recovery is not None
        self.store, self.recovery, self.broken = made.store, made.recovery, broken
        assert self.store.below.disk is not None
        assert self.store.below.records is not None
        self.disk, self.records = self.store.below.disk, self.store.below.records
        self.upkeep = Upkeep(made.store, made.marks, made.capacities)

    @property
    def table(self) -> BlockTable:
        return self.store.table

    def open(self, name: str, size: int) -> OpenNamespace:
        return self.store.open(TENANT, name, namespace(name, block_bytes=size))

    def put(self, space: OpenNamespace, keys: Sequence[BlockKey], parent: BlockKey | None = None) -> None:
        """Store what belongs to these keys in DRAM."""
        size = space.namespace.block_bytes
        placing = self.store.puts.place(READER, space, keys, parent, [size] * len(keys))
        assert set(placing.placements) == {Placement.GRANTED}, placing.placements
        self.store.puts.granted(READER, space, keys, placing)
        assert placing.grant is not None
        blocks = [content(key, size) for key in keys]
        for view, block in zip(self.store.puts.receive(READER, placing.grant.grant_id, len(keys)), blocks, strict=True):
            view[:] = block
        self.store.puts.commit(READER, placing.grant.grant_id, list(map(checksum, blocks)), "shared")

    async def store_below(self, space: OpenNamespace, keys: Sequence[BlockKey], parent: BlockKey | None = None) -> int:
        """Put blocks and move them from DRAM to the disk; how many are there."""
        self.put(space, keys, parent)
        written, _ = await self.store.demotion.demote(space, keys, NVME, evict=True)
        self.drop_from_dram(space, keys)
        return written

    def drop_from_dram(self, space: OpenNamespace, keys: Iterable[BlockKey]) -> None:
        self.store.discard(space, list(keys), Cause.DELETED, DRAM)

    async def has(self, space: OpenNamespace, key: BlockKey) -> bool:
        """Whether the block can be got; fails if it is not what was put under its key."""
        lease = await self.store.reads.acquire(READER, space, [key], lease_s=5, wait_s=0, layers=0, load_s=5)
        if lease is None:
            return False
        (replica,) = lease.replicas
        found = bytes(self.store.view(replica))
        self.store.reads.release(READER, lease.lease_id)
        self.drop_from_dram(space, [key])
        assert found == content(key, space.namespace.block_bytes), f"wrong bytes under {key.hex()}"
        return True

    def blocks_on_disk(self) -> int:
        return self.table.tiers[NVME].replicas

    async def flush(self, *, sync: bool = False) -> None:
        await self.records.flush()
        if sync:
            await self.records.run(lambda ledger: ledger.sync())

    async def assert_sound(self) -> None:
        assert list(self.store.problems()) == []
        assert await self.records.problems([space for space in self.table.spaces() if space.tier == NVME]) == []
        assert self.broken == []


@asynccontextmanager
async def opened(folder: Path, *, tenant: Tenant = TENANT, **settings: str) -> AsyncIterator[Tiered]:
    """The tier in `folder` taken up as a node does; settings by their last word, like `capacity="1MiB"`."""
    given = {**SETTINGS, "tiers.nvme.path": str(folder), **{f"tiers.nvme.{name}": v for name, v in settings.items()}}
    options = [f"--{name}={value}" for name, value in given.items()]
    broken: list[BaseException | None] = []
    made = make_store(load(None, {"HOME": str(folder)}, options), next(_epochs), [tenant], broken.append)
    node = Tiered(made, broken)
    try:
        await node.store.sizings[DRAM].grow()
        await node.recovery.begin()
        await node.recovery.load()
        node.store.demotion.is_paused = False
        await node.upkeep.resize_disk()
        yield node
        await node.assert_sound()
    finally:
        await node.store.aclose()


def keys_of(space: OpenNamespace, prompt: int, blocks: int) -> list[BlockKey]:
    tokens = [prompt, *range(4 * blocks)][: 4 * blocks]
    return chain(tokens, space.namespace.block_tokens, space.root)


def fsck(folder: Path, *, deep: bool = True, repair: bool = False) -> list[str]:
    return list(Fsck(folder, deep=deep, repair=repair).run())
