"""What the table's changes make of a tenant's published index, and whose rings are drained."""

from collections.abc import Iterator

import pytest

from kvstore.catalogue import Tenant
from kvstore.exports import RING_ENTRIES, Exports
from kvstore.published import ENTRY, PARTIAL, READABLE, Entry, IndexReader, UseRing, ident
from kvstore.region import Region
from kvstore.table import BlockTable, TierShape
from kvstore.types import DRAM, BlockKey, Cause, Owner

RED, BLUE = Tenant("red"), Tenant("blue")
KEY, OTHER_KEY = BlockKey(bytes(range(16))), BlockKey(bytes(range(1, 17)))
SLAB_BYTES = 4096


@pytest.fixture
def table() -> BlockTable:
    made = BlockTable({DRAM: TierShape(SLAB_BYTES)})
    for _ in range(2):
        made.tiers[DRAM].pool.grow()
    return made


@pytest.fixture
def exports() -> Iterator[Exports]:
    made = Exports(64, epoch=5, is_all=True)
    yield made
    made.close()


def said(reader: IndexReader, name: bytes) -> Entry | None:
    found = reader.find(name)
    return None if found is None else Entry._make(ENTRY.unpack(found[1]))


def test_a_block_is_published_as_it_comes_and_gone_before_its_slot_is_anothers(
    table: BlockTable, exports: Exports
) -> None:
    reader = IndexReader(exports.index(RED).memory)
    space, name = table.space("red", 3, DRAM), ident(3, KEY)
    assert reader.epoch == 5
    replica = table.allocate(space, KEY, None, 1000)
    assert replica is not None
    exports.apply(table.take_changes())
    assert said(reader, name) is None

    table.progress(replica, 2)
    exports.apply(table.take_changes())
    entry = said(reader, name)
    assert entry is not None
    assert (entry.state, entry.layers, entry.size) == (PARTIAL, 2, 1000)

    table.commit(replica, checksum=2**64 - 1)
    exports.apply(table.take_changes())
    entry = said(reader, name)
    assert entry is not None
    assert (entry.state, entry.tier, entry.checksum) == (READABLE, 1, 2**64 - 1)
    slot = replica.slot
    assert (entry.slab_id, entry.offset, entry.generation) == (slot.slab_id, slot.offset, slot.generation)

    table.discard(replica, Cause.DELETED)
    heir = table.allocate(space, OTHER_KEY, None, 1000)
    assert heir is not None
    assert heir.slot[:3] == slot[:3], "it has the slot, and the effects were not handled yet"
    table.commit(heir, checksum=7)
    exports.apply(table.take_changes())
    assert said(reader, name) is None
    found = said(reader, ident(3, OTHER_KEY))
    assert found is not None
    assert found.generation > entry.generation


def test_what_was_committed_and_removed_at_once_is_not_published(table: BlockTable, exports: Exports) -> None:
    reader = IndexReader(exports.index(RED).memory)
    replica = table.allocate(table.space("red", 3, DRAM), KEY, None, 1000)
    assert replica is not None
    table.progress(replica, 1)
    table.commit(replica, checksum=7)
    table.discard(replica, Cause.DELETED)
    exports.apply(table.take_changes())
    assert said(reader, ident(3, KEY)) is None
    assert exports.describe()["red"] == {"entries": 64, "published": 0, "crowded_out": 0}


def test_tenants_see_their_own_blocks_only(table: BlockTable, exports: Exports) -> None:
    red, blue = exports.index(RED), exports.index(BLUE)
    assert exports.index(RED) is red
    for tenant in ("red", "blue", "green"):
        replica = table.allocate(table.space(tenant, 3, DRAM), KEY, None, 1000)
        if replica is not None:
            table.commit(replica, checksum=len(tenant))
    exports.apply(table.take_changes())
    assert {said(IndexReader(region.memory), ident(3, KEY)).checksum for region in (red, blue)} == {3, 4}  # type: ignore[union-attr]
    assert exports.describe().keys() == {"red", "blue"}


def test_a_client_that_reopens_its_index_cannot_write_to_it(exports: Exports) -> None:
    region = exports.index(RED)
    with pytest.raises(PermissionError):
        Region(region.fd, region.size, writable=True, populate=False)


def test_rings_are_drained_by_session_or_all_at_once(exports: Exports) -> None:
    first, second = Owner(1), Owner(2)
    clients = [UseRing(exports.ring(first, RED).memory), UseRing(exports.ring(second, BLUE).memory)]
    assert exports.ring(first, RED) is exports.ring(first, RED)
    names = [ident(3, KEY), ident(4, KEY)]
    for client, name in zip(clients, names, strict=True):
        client.report(name, 9)
    assert list(exports.drain(first)) == [("red", names[0], 9)]
    assert list(exports.drain()) == [("blue", names[1], 9)]
    assert list(exports.drain(Owner(3))) == []
    clients[0].report(names[0], 1)
    exports.end(first)
    assert list(exports.drain(first)) == []
    assert list(exports.drain()) == []
    exports.end(first)


def test_a_hostile_ring_costs_a_ringful_at_most(exports: Exports) -> None:
    memory = exports.ring(Owner(1), RED).memory
    memory[:8] = b"\xff" * 8
    assert len(list(exports.drain())) == RING_ENTRIES
