"""Hit ratios of the eviction policies inside a node's store, where blocks go leaves first, over a trace of requests."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.amplification import OWNER, failed, key_of, read_requests
from bench.measure import Figure
from kvstore.catalogue import Tenant
from kvstore.eviction import EVICTION
from kvstore.prefix import Namespace
from kvstore.types import DRAM
from kvstore.upkeep import Upkeep
from server.assembly import make_store
from server.config import load

BLOCK_BYTES = 4096
SLAB_BYTES = 1 << 20
CAPACITIES = (5_888, 9_984, 29_952)  # blocks: whole slabs near the sizes of docs/traces.md
NAMESPACE = Namespace(model="trace", dtype="u8", layout="bytes", block_tokens=512, layers=1, block_bytes=BLOCK_BYTES)
TENANT = Tenant("bench", admin=True)


def run(trace: Path) -> Iterator[Figure]:
    """Each policy at each capacity; the floor is LRU's ratio at that capacity."""
    requests = read_requests(trace)
    for blocks in CAPACITIES:
        lru = 0.0
        for policy in EVICTION:
            with tempfile.TemporaryDirectory(prefix="cairn-bench-") as folder:
                hits = asyncio.run(_replay(Path(folder), requests, policy, blocks))
            lru = lru or hits
            note = f"{policy} with {blocks:,} blocks of DRAM"
            name = f"hits_{policy}_{blocks}"
            yield Figure(name, hits, "of all", lru, hits / lru, None, 1.0, is_ratio=True, note=note)


async def _replay(folder: Path, requests: list[list[int]], policy: str, blocks: int) -> float:
    options = {
        "node.run_dir": folder,
        "tiers.dram.capacity": f"{blocks * BLOCK_BYTES}B",
        "tiers.dram.slab": f"{SLAB_BYTES}B",
        "tiers.dram.policy": policy,
        "tiers.dram.mlock": "no",
        "tiers.dram.huge_pages": "no",
    }
    config = load(None, {}, [f"--{name}={value}" for name, value in options.items()])
    made = make_store(config, 1, [TENANT], failed)
    await Upkeep(made.store, made.marks, made.capacities).resize(DRAM)
    space = made.store.open(TENANT, "trace", NAMESPACE)
    hits = 0
    for ids in requests:
        keys = [key_of(identifier) for identifier in ids]
        lease, _ = made.store.reads.try_acquire(OWNER, space, keys, lease_s=60, layers=0, partly=True)
        present = len(lease.replicas) if lease is not None else 0
        hits += present
        parent = keys[present - 1] if present else None
        placing = made.store.puts.place(OWNER, space, keys[present:], parent, [BLOCK_BYTES] * len(keys[present:]))
        made.store.puts.granted(OWNER, space, keys[present:], placing)
        if placing.grant is not None:
            made.store.puts.commit(OWNER, placing.grant.grant_id, [0] * len(placing.replicas), "bench")
        if lease is not None:
            made.store.reads.release(OWNER, lease.lease_id)
    await made.store.aclose()
    return hits / sum(map(len, requests))
