"""What a put may store: a chain that does not fit keeps its beginning."""

import pytest

from kvstore.catalogue import OpenNamespace, Tenant
from kvstore.holds import Holds
from kvstore.intake import Intake, Limits, Placing
from kvstore.metrics import Counters
from kvstore.prefix import Namespace, chain
from kvstore.table import BlockTable, TierShape
from kvstore.types import DRAM, Owner, Placement

SIZE = 64
SLAB = 10 * SIZE


class Bench:
    def __init__(self, *, slabs: int, quota_blocks: int) -> None:
        self.table = BlockTable({DRAM: TierShape(SLAB)})
        for _ in range(slabs):
            self.table.tiers[DRAM].pool.grow()
        self.holds = Holds(self.table, 100, 100)
        self.intake = Intake(self.table, self.holds, Limits(), Counters())
        namespace = Namespace(model="m", dtype="u8", layout="x", block_tokens=1, layers=1)
        tenant = Tenant("a", quota_bytes=quota_blocks * SIZE)
        self.root = namespace.root("a", "")
        space = self.table.space("a", 1, DRAM)
        self.space = OpenNamespace(1, tenant, namespace, self.root, space, (space,))

    def put(self, keys, parent=None):
        placing = Placing([], [])
        self.intake.place(placing, self.space, keys, parent, [SIZE] * len(keys))
        if placing.replicas:
            grant = self.holds.grant(Owner(1), placing.replicas, 1.0)
            self.holds.finish(grant, [1] * len(placing.replicas))
        self.table.take_changes()
        return placing.placements

    def match(self, keys):
        return self.table.match(self.space.spaces, keys)


@pytest.mark.parametrize(("slabs", "quota_blocks"), [(2, 10), (1, 0), (1, 10)])
def test_a_chain_too_long_keeps_its_beginning_however_often_it_is_put(slabs, quota_blocks):
    bench = Bench(slabs=slabs, quota_blocks=quota_blocks)
    keys = chain(range(20), 1, bench.root)
    for _ in range(3):
        bench.put(keys)
        assert bench.match(keys) == 10


@pytest.mark.parametrize("piece", [1, 3, 10])
def test_a_chain_too_long_put_piece_by_piece_keeps_its_beginning(piece):
    bench = Bench(slabs=1, quota_blocks=0)
    keys = chain(range(30), 1, bench.root)
    start, placements = 0, [Placement.GRANTED]
    while placements[-1] is Placement.GRANTED:
        placements = bench.put(keys[start : start + piece], keys[start - 1] if start else None)
        start += piece
    assert bench.match(keys) == 10


def test_another_chain_takes_the_room_of_the_coldest():
    bench = Bench(slabs=1, quota_blocks=0)
    old, new = chain(range(10), 1, bench.root), chain(range(100, 104), 1, bench.root)
    bench.put(old)
    assert bench.put(new) == [Placement.GRANTED] * 4
    assert (bench.match(old), bench.match(new)) == (6, 4)


def test_what_is_held_while_placing_is_let_go_when_it_is_refused():
    bench = Bench(slabs=1, quota_blocks=0)
    keys = chain(range(12), 1, bench.root)
    bench.put(keys)
    assert bench.put(keys)[-1] is Placement.FULL
    assert [replica.holders for replica in bench.space.dram.replicas.values()] == [0] * 10
