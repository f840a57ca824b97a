"""The table and the hashing, in pure Python, without a node."""

import os
import struct
import time
import tracemalloc

import numpy as np
import xxhash

from bench.measure import Figure, latency
from kvstore.prefix import Namespace, chain
from kvstore.table import BlockTable, Space, TierShape
from kvstore.types import DRAM, BlockKey, Cause

BLOCK_BYTES = 512
SLAB_BYTES = 1 << 20
CHAIN_BLOCKS = 256


def hash_8590() -> Figure:
    """Keys of 8,590 tokens at 16 per block, from an int32 buffer; the floor only hashes 536 slices of bytes."""
    tokens = np.random.default_rng(1).integers(0, 50_000, 8590, dtype=np.int32)
    namespace = Namespace(model="m", dtype="bfloat16", layout="x", block_tokens=16, layers=1)
    root = namespace.root("t", "")
    raw = tokens.tobytes()

    def floor() -> None:
        parent = bytes(root)
        digest = xxhash.xxh3_128_digest
        for start in range(0, len(raw) - 63, 64):
            parent = digest(parent + raw[start : start + 64])

    note = "keys of 8,590 tokens, 16 a block, from int32; floor: the bare hash loop"
    return latency("hash_8590_b16", lambda: chain(tokens, 16, root), floor, most_us=100.0, note=note, runs=500)


def table_figures(blocks: int) -> list[Figure]:
    """Microseconds a block of match, put (allocate and commit) and evict, and bytes of memory a resident block."""
    table, space = _empty_table(blocks)
    chains = [_keys() for _ in range(blocks // CHAIN_BLOCKS)]
    put_us = _per_block(blocks, lambda: _fill(table, space, chains))
    match_us = _per_block(blocks, lambda: [table.match([space], keys) for keys in chains])
    evict_us = _per_block(blocks, lambda: _evict_all(table))
    dict_us = _per_block(blocks, lambda: _fill_dict(chains))
    return [
        _bounded("table_match", match_us, "us/block", 1.0, "longest prefix of 256-block chains, per block"),
        _bounded("table_put", put_us, "us/block", 8.0, "allocate and commit; floor: a dict of the same keys", dict_us),
        _bounded("table_evict", evict_us, "us/block", 8.0, "the coldest, leaves first"),
        table_memory(),
    ]


def table_memory(blocks: int = 1_000_000) -> Figure:
    """Bytes of Python memory a resident block, keys included, in a table of a million."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    table, space = _empty_table(blocks)
    for _ in range(blocks // CHAIN_BLOCKS):
        _fill(table, space, [_keys()])
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    resident = table.tiers[DRAM].replicas
    per_block = (after - before) / resident
    return _bounded("table_memory", per_block, "bytes/block", 600.0, f"at {resident:,} resident blocks")


def _empty_table(blocks: int) -> tuple[BlockTable, Space]:
    table = BlockTable({DRAM: TierShape(SLAB_BYTES)})
    for _ in range(-(-blocks * BLOCK_BYTES // SLAB_BYTES) + 1):
        table.tiers[DRAM].pool.grow()
    return table, table.space("bench", 1, DRAM)


def _keys() -> list[BlockKey]:
    raw = os.urandom(16 * CHAIN_BLOCKS)
    return [BlockKey(raw[start : start + 16]) for start in range(0, len(raw), 16)]


def _fill(table: BlockTable, space: Space, chains: list[list[BlockKey]]) -> None:
    for number, keys in enumerate(chains):
        replicas = []
        parent = None
        for key in keys:
            replica = table.allocate(space, key, parent, BLOCK_BYTES)
            assert replica is not None
            replicas.append(replica)
            parent = key
        for replica in replicas:
            (checksum,) = struct.unpack("<Q", replica.key[:8])
            table.commit(replica, checksum + number)
        table.take_changes()


def _evict_all(table: BlockTable) -> None:
    while (replica := table.coldest(DRAM)) is not None:
        table.evict(replica, Cause.PRESSURE)
    table.take_changes()


def _fill_dict(chains: list[list[BlockKey]]) -> dict[BlockKey, BlockKey]:
    return {key: key for keys in chains for key in keys}


def _per_block(blocks: int, work: object) -> float:
    assert callable(work)
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / blocks * 1e6


def _bounded(name: str, value: float, unit: str, most: float, note: str, floor: float | None = None) -> Figure:
    ratio = floor / value if floor is not None else None
    return Figure(name, value, unit, floor, ratio, None, most, is_ratio=False, note=note)
