"""A trace over a simulated cluster: what many nodes hit as one pool, beside one cache of all their memory.

The nodes are the real ones (store, directory, pulling, copies) in virtual time. Requests come to them in turn; each
reads what there is of its prompt, from wherever it is, and stores the rest.
"""

import asyncio
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from bench.amplification import key_of, read_requests
from bench.measure import Figure
from kvstore import wire
from kvstore.copier import checksum
from kvstore.packed import pack_keys
from kvstore.prefix import Namespace
from kvstore.replay import parse, replay
from kvstore.types import DRAM, BlockKey
from kvstore.upkeep import Marks
from tests.sim.loop import SimulatedLoop, run
from tests.sim.node import SLAB_BYTES, TENANT, SimulatedNode, World

BLOCK_BYTES = 1024
SPACE = Namespace(model="m", dtype="u8", layout="x", block_tokens=512, layers=1, block_bytes=BLOCK_BYTES)
PAUSE_S = 0.02  # between two requests: the directory has heard of the last
LOAD_MS = 5000
SEED = 1


def report(trace: Path, nodes: int, blocks: int, copies: float) -> Iterator[Figure]:
    """Hit ratio of `nodes` of `blocks` each beside one LRU cache of all, and how evenly they are used."""
    requests = read_requests(trace)
    with trace.open() as lines:
        floor = replay(parse(lines), "lru", nodes * blocks).hit_ratio
    found: dict[str, Any] = run(lambda loop: _replay(loop, requests, nodes, blocks, copies))
    note = f"{nodes} nodes of {blocks:,} blocks; the floor is one LRU cache of {nodes * blocks:,}"
    yield Figure(
        "cluster_hits", found["hits"], "of all", floor, found["hits"] / floor, None, 0.98, is_ratio=True, note=note
    )
    for name in ("stored", "served", "asked"):
        counts = found[name]
        mean = sum(counts) / len(counts)
        yield Figure(
            f"imbalance_{name}", max(counts) / mean, "max/mean", None, None, None, 1.3, is_ratio=False,
            note=f"blocks {name} by the busiest node, by the mean of {mean:,.0f}",
        )  # fmt: skip


async def _replay(
    loop: SimulatedLoop, requests: list[list[int]], nodes: int, blocks: int, copies: float
) -> dict[str, Any]:
    slabs = round(blocks * BLOCK_BYTES / SLAB_BYTES)
    world = World(loop, SEED, nodes=nodes, slabs=slabs)
    world.copies = copies
    await world.start()
    for node in world.nodes.values():
        node.upkeep.marks[DRAM] = Marks(1.0, 0.9999)
    engines = [_Engine(node) for node in world.nodes.values()]
    total = hits = 0
    for ids, engine in zip(requests, cycle(engines)):
        keys = [BlockKey(key_of(identifier)) for identifier in ids]
        total += len(keys)
        hits += await engine.node.process.spawn(engine.request(keys))
        await asyncio.sleep(PAUSE_S)
    problems = [problem for node in world.nodes.values() for problem in node.store.problems()]
    assert not problems, problems[0]
    found = {
        "hits": hits / total,
        "stored": [engine.stored for engine in engines],
        "served": [_served(world, name) for name in world.nodes],
        "asked": [engine.asked for engine in engines],
    }
    world.close()
    return found


def _served(world: World, name: str) -> int:
    """Blocks that others read from a node."""
    routes = [node.cluster.routes.routes for node in world.nodes.values()]
    return sum(found[name].reading.total_bytes for found in routes if name in found) // BLOCK_BYTES


class _Engine:
    """Works on one node, as a client of it."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.stored = self.asked = 0
        self._session: Any = None

    async def request(self, keys: list[BlockKey]) -> int:
        """How many of a prompt's blocks were there. The rest is stored."""
        if self._session is None:
            self._session = self.node.session(is_peer=False)
            self._number = (await self._session.ask(wire.Open(1, "trace", SPACE))).number
        self.asked += len(keys)
        ask = self._session.ask
        held = await ask(wire.Acquire(2, self._number, pack_keys(keys), 60_000, load_ms=LOAD_MS))
        present = len(held.sizes) // 8
        store, owner = self.node.store, self._session.owner
        space = store.catalogue.numbered(TENANT, self._number)
        rest = keys[present:]
        if rest:
            parent = keys[present - 1] if present else None
            placing = store.puts.place(owner, space, rest, parent, [BLOCK_BYTES] * len(rest))
            store.puts.granted(owner, space, rest, placing)
            if placing.grant is not None:
                checksums = [checksum(store.view(replica)) for replica in placing.replicas]
                store.puts.commit(owner, placing.grant.grant_id, checksums, "tcp")
                self.stored += len(checksums)
        if held.lease_id:
            store.reads.release(owner, held.lease_id)
        return present
