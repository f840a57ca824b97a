"""Write amplification of the NVMe tier: bytes written to the disk by bytes admitted, over a real trace of requests."""

import asyncio
import gzip
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from bench.measure import Figure
from kvstore.catalogue import OpenNamespace, Tenant
from kvstore.copier import checksum
from kvstore.errors import TierFull
from kvstore.prefix import Namespace
from kvstore.types import DRAM, KEY_BYTES, NVME, BlockKey, Owner
from kvstore.upkeep import Upkeep
from server.assembly import Assembled, make_store
from server.config import load

BLOCK_BYTES = 128 << 10  # so that a tier of 4 GiB holds 31,000 blocks of the trace, a sixth of all
NAMESPACE = Namespace(model="trace", dtype="u8", layout="bytes", block_tokens=512, layers=1, block_bytes=BLOCK_BYTES)
SETTINGS = ("--tiers.dram.capacity=512MiB", "--tiers.dram.mlock=no", "--tiers.dram.huge_pages=no")
DISK = ("--tiers.nvme.capacity=4GiB", "--tiers.nvme.slab=64MiB")
OWNER = Owner(1)


def run(trace: Path, admission: str) -> Iterator[Figure]:
    """Replay `trace` (JSONL with `hash_ids`, also .gz), one request after the other, as fast as the disk takes it."""
    with tempfile.TemporaryDirectory(prefix="cairn-bench-", dir=".") as folder:
        yield asyncio.run(_replay(Path(folder).absolute(), read_requests(trace), admission))


def read_requests(trace: Path) -> list[list[int]]:
    """The `hash_ids` of each request: one id per block, equal ids for equal prefixes."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


async def _replay(folder: Path, requests: list[list[int]], admission: str) -> Figure:
    options = [f"--node.run_dir={folder}", f"--tiers.nvme.path={folder}/nvme", f"--tiers.nvme.admission={admission}"]
    config = load(None, {}, [*options, *SETTINGS, *DISK])
    tenant = Tenant("bench", admin=True)
    made = make_store(config, 1, [tenant], failed)
    upkeep = Upkeep(made.store, made.marks, made.capacities)
    await upkeep.resize(DRAM)
    await _recovered(made)
    await upkeep.resize_disk()
    space = made.store.open(tenant, "trace", NAMESPACE)
    loaded_blocks = 0
    for ids in requests:
        keys = [key_of(identifier) for identifier in ids]
        lease = await made.store.reads.acquire(OWNER, space, keys, lease_s=60, wait_s=0, layers=0, load_s=60)
        present = len(lease.replicas) if lease is not None else 0
        loaded_blocks += present
        with suppress(TierFull):
            _put(made, space, keys[present:], keys[present - 1] if present else None)
        if lease is not None:
            made.store.reads.release(OWNER, lease.lease_id)
        await upkeep.relieve()
        await upkeep.relieve_disk()
        if made.store.below.records is not None:
            await made.store.below.records.flush()
    disk = made.store.below.disk
    assert disk is not None
    written, admitted = disk.writing.total_bytes, made.store.below.admission.admitted_bytes
    accesses = sum(map(len, requests))
    removed = made.store.counters.removed_blocks
    note = (
        f"{written / 1e9:.1f} GB written for {admitted / 1e9:.1f} GB admitted, {made.store.counters.readmitted_blocks} "
        f"blocks twice; {loaded_blocks / accesses:.4f} of {accesses} block accesses hit, "
        f"{made.store.counters.promoted_blocks[NVME]} of them from the disk; {dict(removed)}"
    )
    await made.store.aclose()
    return Figure("write_amplification", written / admitted, "x", None, None, None, 1.3, is_ratio=False, note=note)


def _put(made: Assembled, space: OpenNamespace, keys: list[BlockKey], parent: BlockKey | None) -> None:
    puts = made.store.puts
    placing = puts.place(OWNER, space, keys, parent, [BLOCK_BYTES] * len(keys))
    puts.granted(OWNER, space, keys, placing)
    if placing.grant is not None:
        checksums = [checksum(made.store.view(replica)) for replica in placing.replicas]
        puts.commit(OWNER, placing.grant.grant_id, checksums, "bench")


def key_of(identifier: int) -> BlockKey:
    """As evenly spread as a real one."""
    return BlockKey(blake2b(identifier.to_bytes(8, "little"), digest_size=KEY_BYTES).digest())


async def _recovered(made: Assembled) -> None:
    assert made.recovery is not None
    await made.recovery.begin()
    await made.recovery.load()
    made.store.demotion.is_paused = False


def failed(error: BaseException | None) -> None:
    raise AssertionError(f"a task of the store failed: {error!r}")
