"""What a tenant's clients on this host may map: its published index, and a use ring for each of them."""

from collections.abc import Iterator, Sequence

from kvstore.catalogue import Tenant
from kvstore.published import (
    PARTIAL,
    READABLE,
    PublishedIndex,
    UseRing,
    ident,
    index_bytes,
    ring_bytes,
)
from kvstore.region import Region, make_region
from kvstore.table import Event, Replica
from kvstore.types import DRAM, Change, Owner, State

PASS_REPORTS = 4096  # taken up in one pass over all rings, about 10 ms at worst; older ones are forgotten
RING_ENTRIES = 4096  # reports between two drains; 96 KiB per client
DRAM_CODE = 1  # the tier that is published: clients can map no other


class Exports:
    """Published indexes by tenant, made at its first namespace; rings by session."""

    def __init__(self, index_entries: int, epoch: int, *, is_all: bool) -> None:
        """`is_all`: the node has no lower tiers, so that what is not published is not here."""
        self._entries = index_entries
        self._epoch = epoch
        self._is_all = is_all
        self._indexes: dict[str, tuple[Region, PublishedIndex]] = {}
        self._rings: dict[Owner, tuple[Region, UseRing, str]] = {}

    def index(self, tenant: Tenant) -> Region:
        """The memory of a tenant's published index; clients get it read-only."""
        if tenant.name not in self._indexes:
            region = make_region("cairn-index", index_bytes(self._entries), only_writer=True)
            self._indexes[tenant.name] = (
                region,
                PublishedIndex(region.memory, self._entries, self._epoch, is_all=self._is_all),
            )
        return self._indexes[tenant.name][0]

    def ring(self, owner: Owner, tenant: Tenant) -> Region:
        """The memory of a session's use ring, which its client writes."""
        if owner not in self._rings:
            region = make_region("cairn-ring", ring_bytes(RING_ENTRIES))
            self._rings[owner] = region, UseRing(region.memory), tenant.name
        return self._rings[owner][0]

    def apply(self, events: Sequence[Event]) -> None:
        """Publish what the table changed, in its order."""
        for event in events:
            replica = event.replica
            if replica.space.tier != DRAM:
                continue
            found = self._indexes.get(replica.space.tenant)
            if found is None:
                continue
            index = found[1]
            name = ident(replica.space.number, replica.key)
            if event.change is Change.REMOVED:
                index.remove(name)
            elif replica.state in (State.ALLOCATED, State.WRITTEN):  # else a REMOVED follows
                self._publish(index, name, replica, PARTIAL if replica.state is State.ALLOCATED else READABLE)

    @staticmethod
    def _publish(index: PublishedIndex, name: bytes, replica: Replica, state: int) -> None:
        slot = replica.slot
        index.publish(
            name,
            (state, DRAM_CODE, replica.layers),
            (slot.slab_id, slot.offset, replica.size, replica.checksum, slot.generation),
        )

    def drain(self, owner: Owner | None = None) -> Iterator[tuple[str, bytes, int]]:
        """(tenant, name, blocks) of what clients read by themselves, of one session or of all."""
        rings = self._rings.values() if owner is None else filter(None, [self._rings.get(owner)])
        most = max(PASS_REPORTS // max(len(self._rings), 1), 1)
        for _, ring, tenant in rings:
            for name, blocks in ring.drain(most):
                yield tenant, name, blocks

    def end(self, owner: Owner) -> None:
        """The session is over: its ring goes."""
        found = self._rings.pop(owner, None)
        if found is not None:
            found[0].close()

    def describe(self) -> dict[str, dict[str, int]]:
        return {
            tenant: {
                "entries": self._entries,
                "published": index.published,
                "crowded_out": index.crowded_out,
            }
            for tenant, (_, index) in self._indexes.items()
        }

    def close(self) -> None:
        for owner in list(self._rings):
            self.end(owner)
        for region, _ in self._indexes.values():
            region.close()
        self._indexes.clear()
