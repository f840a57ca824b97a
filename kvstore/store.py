"""All tiers of a node together: where the table and the bytes meet. Reads and puts have modules of their own.

Each operation decides under the table synchronously, then `settle` makes the decisions known: published
index, waiting readers, the disk's ledger, history, counters. What may have to wait is a coroutine; everything else
answers at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvstore.admission import Admission
from kvstore.catalogue import Catalogue, OpenNamespace, Tenant
from kvstore.check import check
from kvstore.clock import Clock
from kvstore.copier import Copier
from kvstore.defragment import Defragment
from kvstore.demotion import Demotion
from kvstore.disk import Disk
from kvstore.errors import NotFound
from kvstore.events import EventLog, Snapshots
from kvstore.exports import Exports
from kvstore.history import History
from kvstore.holds import Holds, Pin
from kvstore.intake import Intake, Limits, part_of
from kvstore.lifting import Above, Lifting
from kvstore.metrics import Counters
from kvstore.node_holds import NodeHolds
from kvstore.prefix import Namespace
from kvstore.promotion import Promotion
from kvstore.published import IDENT_PREFIX
from kvstore.puts import Puts
from kvstore.reads import Reads
from kvstore.reclaim import Reclaim
from kvstore.records import Records
from kvstore.sizing import Sizing
from kvstore.table import BlockTable, Event, Replica
from kvstore.tasks import Tasks
from kvstore.tiers.dram import DramTier
from kvstore.tiers.object_store import ObjectTier
from kvstore.types import DRAM, HBM, NODE, NVME, OBJECT, BlockKey, Cause, Change, Owner, Slot, State, TierName

IDS_PER_EPOCH = 1 << 10  # of leases, grants and pins; an epoch is a millisecond, and ids stay below 2**53


@dataclass(frozen=True, slots=True)
class Below:
    """The tiers under DRAM, as far as there are any. `records` are there with the disk."""

    admission: Admission
    disk: Disk | None = None
    records: Records | None = None
    bucket: ObjectTier | None = None
    writes_through: frozenset[str] = frozenset()
    peers: bool = False  # other nodes have blocks too


class Store:
    """One node's blocks. `epoch` grows at each start of the node; `crashed` hears of what a task of it raised."""

    def __init__(self, table: BlockTable, catalogue: Catalogue, dram: DramTier, copier: Copier, clock: Clock, *,
                 limits: Limits, index_entries: int, epoch: int, above: Above | None, below: Below,
                 crashed: Callable[[BaseException], None]) -> None:  # fmt: skip
        self.table = table
        self.catalogue = catalogue
        self.dram = dram
        self.copier = copier
        self.clock = clock
        self.limits = limits
        self.below = below
        self.holds = Holds(table, limits.leases_per_client, limits.pins_per_tenant, epoch * IDS_PER_EPOCH + 1)
        self.exports = Exports(index_entries, epoch, is_all=not (above or below.disk or below.bucket or below.peers))
        self.history = History(limits.explain_history)
        self.events = EventLog(epoch, limits.events)
        self.snapshots = Snapshots()
        self.counters = Counters()
        self.intake = Intake(table, self.holds, limits, self.counters)
        hbm = above.hbm if above is not None else None
        self.sizings: Mapping[TierName, Sizing] = {
            name: Sizing(table.tiers[name].pool, medium)
            for name, medium in ((HBM, hbm), (DRAM, dram), (NVME, below.disk.medium if below.disk else None))
            if medium is not None
        }
        self._tasks = Tasks(crashed)
        self.own = NodeHolds(table)
        self.promotion = Promotion(
            *(self.own, self.intake, dram, copier, clock),
            counters=self.counters,
            disk=below.disk,
            bucket=below.bucket,
            hbm=hbm,
            most_bytes=limits.inflight_bytes,
            settle=self.settle,
            spawn=self._tasks.spawn,
        )
        self.demotion = Demotion(
            *(self.own, catalogue, dram, clock),
            counters=self.counters,
            disk=below.disk,
            bucket=below.bucket,
            admission=below.admission,
            writes_through=below.writes_through,
            settle=self.settle,
        )
        self.reads = Reads(
            *(table, self.holds, self.intake, self.promotion),
            bucket=below.bucket,
            clock=clock,
            limits=limits,
            used=self._use,
            settle=self.settle,
        )
        self.puts = Puts(
            *(table, catalogue, self.holds, self.intake),
            dram=dram,
            demotion=self.demotion,
            sizing=self.sizings[DRAM],
            clock=clock,
            limits=limits,
            counters=self.counters,
            history=self.history,
            settle=self.settle,
        )
        self.reclaim = self._make_reclaim(below.disk) if below.disk is not None else None
        self.lifting = self._make_lifting(above) if above is not None else None
        self.defragment = self._make_defragment(above)
        self.listeners: list[Callable[[Sequence[Event]], None]] = [self.events.note]  # hear of what the table changed

    def _make_defragment(self, above: Above | None) -> Defragment:
        counters = self.counters
        return Defragment(
            self.table,
            {DRAM: self._copy_within} | ({HBM: above.hbm.copy_within} if above is not None else {}),
            asked=lambda: (counters.requests.total(), counters.loaded_bytes.total()),
            settle=self.settle,
        )

    def _make_reclaim(self, disk: Disk) -> Reclaim:
        return Reclaim(*(self.own, self.catalogue, disk, self.counters), bucket=self.below.bucket, settle=self.settle)

    def _make_lifting(self, above: Above) -> Lifting:
        return Lifting(
            *(self.own, self.holds, self.intake, self.reads, above, self.sizings[HBM]),
            dram=self.dram,
            clock=self.clock,
            limits=self.limits,
            counters=self.counters,
            settle=self.settle,
        )

    def open(self, tenant: Tenant, name: str, namespace: Namespace) -> OpenNamespace:
        """The namespace behind a name; the first to use the name defines it. See `Catalogue.define`."""
        if namespace.block_bytes:
            for tier in self.table.tiers.values():
                tier.group(tenant.name, namespace.block_bytes)
        found, is_new = self.catalogue.define(tenant, name, namespace)
        self.exports.index(tenant)
        if is_new:
            if self.below.records is not None:
                self.below.records.note_namespaces(self.catalogue)
            if self.below.bucket is not None:
                self._tasks.spawn(self._look_into_bucket(found))
        return found

    async def aclose(self) -> None:
        """Stop what runs in the background, then close all tiers; what is under way on a disk ends first."""
        await self._tasks.aclose()
        self.exports.close()
        if self.below.records is not None:
            await self.below.records.aclose()
        if self.below.disk is not None:
            await self.below.disk.aclose()
        if self.below.bucket is not None:
            await self.below.bucket.aclose()
        if self.lifting is not None:
            await self.lifting.aclose()
        await self.dram.aclose()
        self.copier.close()

    def where(self, space: OpenNamespace, key: BlockKey) -> tuple[str, int]:
        """(The tier that has this key, its bytes), or ("", 0): DRAM, else the fastest."""
        for tier_space in (space.dram, *space.spaces):
            replica = self.table.readable(tier_space, key)
            if replica is not None:
                return str(tier_space.tier), replica.size
        size = self.below.bucket.raw_size(space.root, key) if self.below.bucket is not None else None
        return ("object", size) if size is not None else ("", 0)

    def view(self, replica: Replica) -> memoryview:
        """The block's bytes in place; good as long as the replica is held."""
        return self.dram.view(replica.slot, replica.size)

    # Operators.

    def discard(self, space: OpenNamespace, keys: Sequence[BlockKey], cause: Cause, tier: str = "") -> tuple[int, int]:
        """Delete blocks, from one tier if it is named: (how many, bytes of their slots). NotFound for no such tier.

        In a bucket they stay for other nodes, and are not seen any more by this one.
        """
        if tier and tier not in self.table.tiers and (tier != OBJECT or self.below.bucket is None):
            raise NotFound(f"no tier {tier!r} on this node")
        blocks = freed_bytes = 0
        if tier in ("", NVME) and self.below.records is not None and self.demotion.is_paused:
            self.below.records.delete([(space.number, key) for key in keys])
        if tier in ("", OBJECT) and self.below.bucket is not None:
            blocks += self.below.bucket.forget(space.root, keys)
        for tier_space in space.spaces:
            if tier not in ("", tier_space.tier):
                continue
            for key in keys:
                replica = tier_space.replicas.get(key)
                if replica is not None and self.promotion.is_loading(replica):
                    self.promotion.give_up(replica)
                elif replica is not None and replica.state is State.WRITTEN:
                    blocks += 1
                    freed_bytes += replica.group.slot_bytes
                    self.table.discard(replica, cause)
        self.settle()
        return blocks, freed_bytes

    async def verify(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> int:
        """Read blocks that somebody found damaged, and drop those that are; how many those were."""
        self.intake.check_batch(space, keys)
        corrupt = 0
        for key in keys:
            replica = self.table.readable(space.dram, key)
            if replica is None:
                continue
            lease = self.holds.lease(NODE, [replica], self.clock.now() + self.limits.lease_max_s)
            try:
                (found,) = await self.copier.checksums([self.view(replica)])
            finally:
                self.holds.release(NODE, lease.lease_id)
            if found != replica.checksum and replica.state is State.WRITTEN:
                corrupt += 1
                self.table.discard(replica, Cause.CORRUPT)
        if self.lifting is not None:
            corrupt += await self.lifting.verify(space, keys)
        self.counters.corrupt_blocks += corrupt
        self.settle()
        return corrupt

    def pin(self, space: OpenNamespace, keys: Sequence[BlockKey], *, hard: bool, ttl_s: float) -> Pin | None:
        """Pin the prefix of `keys` that is here. None when nothing of it is."""
        self.intake.check_batch(space, keys)
        replicas = []
        for key in keys:
            replica = self.table.readable(space.dram, key)
            if replica is None:
                break
            replicas.append(replica)
        if not replicas:
            return None
        return self.holds.pin(space.tenant.name, replicas, hard=hard, expires_at=self.clock.now() + ttl_s)

    def unpin(self, tenant: Tenant, pin_id: int) -> None:
        if not self.holds.unpin(tenant.name, pin_id):
            raise NotFound(f"no pin {pin_id} of tenant {tenant.name}")
        self.settle()

    def listed(self, space: OpenNamespace) -> Iterator[tuple[BlockKey, Replica]]:
        """Every block of a namespace that lies on this node, in its fastest tier; in no order but a stable one."""
        for position, tier_space in enumerate(space.spaces):
            faster = space.spaces[:position]
            for key, replica in tier_space.replicas.items():
                if not any(key in other.replicas for other in faster):
                    yield key, replica

    def problems(self) -> Iterator[str]:
        """What is wrong with the state in memory, a sentence each."""
        return check(self.table, self.holds, self.own.held())

    async def check(self) -> list[str]:
        """Fsck of the live node: its memory, and the disk's ledger once all of it is taken up. A sentence each."""
        found = list(self.problems())
        records = self.below.records
        if records is not None and not self.demotion.is_paused:
            try:
                found += await records.problems(space.nvme for space in self.catalogue.all() if space.nvme is not None)
            except OSError as error:
                found.append(f"the ledger cannot be read: {error}")
        return found

    # Upkeep.

    def expire(self) -> None:
        """Let go of all leases, grants and pins that ran out."""
        self.counters.lapsed_holds += self.holds.expire(self.clock.now())
        self.settle()

    def end(self, owner: Owner) -> None:
        """A session is over: its last uses count, whatever it held is let go."""
        self.note_uses(owner)
        self.exports.end(owner)
        self.counters.lost_sessions += self.holds.end(owner) > 0
        self.settle()

    def note_uses(self, owner: Owner | None = None) -> None:
        """Take up what local readers report in their rings, of one session or of all."""
        for tenant, name, blocks in self.exports.drain(owner):
            number, part = IDENT_PREFIX.unpack_from(name)
            space = self.catalogue.of_number(number)
            if space is None or space.tenant.name != tenant or part >= space.namespace.parts:
                continue
            key = part_of(space, BlockKey(name[IDENT_PREFIX.size :]), part)
            replica = self.table.readable(space.dram, key)
            if replica is not None:
                self._use(replica)
                space.hit_blocks += min(blocks, self.limits.batch_blocks)
                self.counters.loaded_bytes["shared"] += replica.size * min(blocks, self.limits.batch_blocks)

    def evict_step(self, low_bytes: int, blocks: int) -> bool:
        """Evict up to `blocks` of the coldest of DRAM down to `low_bytes` in use; whether there is more to do."""
        tier = self.table.tiers[DRAM]
        more = False
        for _ in range(blocks):
            replica = self.table.coldest(DRAM)
            more = replica is not None and tier.used_bytes > low_bytes
            if replica is None or not more:
                break
            self.table.evict(replica, Cause.WATERMARK)
        self.settle()
        return more

    def empty_slab(self, tier: TierName, cause: Cause) -> bool:
        """Evict all of the coldest slab of DRAM or HBM that can be emptied; False when none can."""
        emptied = self.table.empty_coldest_slab(tier, cause)
        self.settle()
        return emptied

    # Inside.

    def _use(self, replica: Replica) -> None:
        """It was read, and with it all before it: what is of use is worth writing below."""
        self.table.use(replica)
        above = replica.space.replicas.get(replica.parent) if replica.parent is not None else None
        while above is not None and above.is_copy:  # it takes up no child's recency in time: it may go before that
            self.table.touch(above)
            above = replica.space.replicas.get(above.parent) if above.parent is not None else None
        if replica.hits == 1:
            self.demotion.offer(replica)

    def settle(self) -> None:
        """Make known what the table changed."""
        events = self.table.take_changes()
        if not events:
            return
        self.exports.apply(events)
        if self.below.records is not None:
            self.below.records.note(events)
        for event in events:
            self._note(event)
        for listener in self.listeners:
            listener(events)

    def _note(self, event: Event) -> None:
        replica = event.replica
        space, key = replica.space, replica.key
        if event.cause is not None:
            self.counters.removed_blocks[event.cause.value] += 1
            if event.cause is not Cause.DEMOTED and space.tier != HBM:  # there it was a copy
                self.history.remember(space.number, key, f"removed: {event.cause.value}", self.clock.now())
        elif event.change is Change.COMMITTED:
            self.history.forget(space.number, key)
            if space.tier == DRAM:
                self.demotion.offer(replica)
        self.reads.note(event)

    async def _copy_within(self, pairs: Sequence[tuple[Slot, Slot, int]]) -> None:
        view = self.dram.view
        await self.copier.copy([(view(target, size), view(source, size)) for source, target, size in pairs])

    async def _look_into_bucket(self, space: OpenNamespace) -> None:
        assert self.below.bucket is not None
        await self.below.bucket.refresh(space.root)
