"""Put, acquire, release, evict: where the table and the bytes meet.

Each operation decides under the table synchronously, then `_settle` makes the decisions known: published
index, waiting readers, history, counters. What may have to wait (memory for a slab, a block that is being
written, a checksum) is a coroutine; everything else answers at once.
"""

import asyncio
from collections.abc import Sequence

from kvstore.catalogue import Catalogue, OpenNamespace, Tenant
from kvstore.clock import Clock
from kvstore.copier import Copier
from kvstore.errors import Corrupt, InvalidRequest, NotFound
from kvstore.exports import Exports
from kvstore.history import History
from kvstore.holds import Holds, Lease, Pin
from kvstore.intake import REFUSALS, Intake, Limits, Placing, part_of
from kvstore.metrics import Counters
from kvstore.prefix import Namespace
from kvstore.published import IDENT_PREFIX
from kvstore.sizing import Sizing
from kvstore.slab import slot_bytes
from kvstore.table import BlockTable, Event, Replica
from kvstore.tiers.dram import DramTier
from kvstore.types import DRAM, BlockKey, Cause, Change, Owner, Placement, State

IDS_PER_EPOCH = 1 << 10  # of leases, grants and pins; an epoch is a millisecond, and ids stay below 2**53
NODE = Owner(0)  # the node itself, for what it holds while it looks at it


class Store:
    """One node's blocks. `epoch` grows at each start of the node."""

    def __init__(self, table: BlockTable, dram: DramTier, copier: Copier, clock: Clock, *,
                 limits: Limits, index_entries: int, epoch: int) -> None:  # fmt: skip
        self.table = table
        self.dram = dram
        self.copier = copier
        self.clock = clock
        self.limits = limits
        self.holds = Holds(table, limits.leases_per_client, limits.pins_per_tenant, epoch * IDS_PER_EPOCH + 1)
        self.catalogue = Catalogue(limits.namespaces_per_tenant)
        self.exports = Exports(index_entries, epoch)
        self.history = History(limits.explain_history)
        self.counters = Counters()
        self.intake = Intake(table, self.holds, limits, self.counters)
        self.sizing = Sizing(table.tiers[DRAM].pool, dram)
        self._arrivals: dict[tuple[int, BlockKey], list[asyncio.Future[None]]] = {}

    def open(self, tenant: Tenant, name: str, namespace: Namespace) -> OpenNamespace:
        """The namespace behind a name; the first to use the name defines it. See `Catalogue.define`."""
        if namespace.block_bytes > self.table.tiers[DRAM].pool.slab_bytes:
            raise InvalidRequest(f"blocks of {namespace.block_bytes} bytes do not fit into a slab")
        found, is_new = self.catalogue.define(tenant, name, namespace)
        if is_new:
            found.spaces = [self.table.space(tenant.name, found.number, tier) for tier in self.table.tiers]
            self.exports.index(tenant)
        return found

    # Reading.

    def match(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> int:
        """How many blocks of a chain can be read here, from the first; all parts of each."""
        self.intake.check_batch(space, keys)
        return min(
            self.table.match(space.spaces, [part_of(space, key, part) for key in keys])
            for part in range(space.namespace.parts)
        )

    def readable(self, space: OpenNamespace, key: BlockKey, layers: int = 0) -> Replica | None:
        """The replica of `key` if all parts of its block are here, or, with `layers`, that far along."""
        found = None
        for part in range(space.namespace.parts):
            wanted = part_of(space, key, part)
            replica = space.spaces[0].replicas.get(wanted)
            if replica is None:
                return None
            if replica.state is not State.WRITTEN and not 0 < layers <= replica.layers:
                return None
            if wanted == key or part == 0:
                found = replica if wanted == key else found
        return found

    async def acquire(self, owner: Owner, space: OpenNamespace, keys: Sequence[BlockKey], *,
                      lease_s: float, wait_s: float, layers: int) -> Lease | None:  # fmt: skip
        """Hold the longest prefix of `keys` that is here or comes within `wait_s`; None when there is none.

        A block that is being written is waited for, one that nobody writes is not. Cancelled, it holds nothing.
        """
        self.intake.check_batch(space, keys)
        deadline = self.clock.now() + min(wait_s, self.limits.wait_max_s)
        while True:
            lease, blocked = self.try_acquire(owner, space, keys, lease_s=lease_s, layers=layers, partly=False)
            left_s = deadline - self.clock.now()
            if blocked is None or left_s <= 0:
                break
            await self._arrival(space.number, blocked, left_s)
        if lease is None:
            lease, _ = self.try_acquire(owner, space, keys, lease_s=lease_s, layers=layers, partly=True)
        return lease

    def try_acquire(self, owner: Owner, space: OpenNamespace, keys: Sequence[BlockKey], *,
                    lease_s: float, layers: int, partly: bool) -> tuple[Lease | None, BlockKey | None]:  # fmt: skip
        """What `acquire` can hold at once: (lease, the first key that somebody is writing).

        Without `partly` nothing is held as long as there is such a key.
        """
        self.intake.check_batch(space, keys)
        replicas: list[Replica] = []
        blocked = None
        for key in keys:
            replica = self.readable(space, key, layers)
            if replica is None:
                blocked = self._being_written(space, key)
                break
            replicas.append(replica)
        if blocked is not None and not partly:
            return None, blocked
        space.hit_blocks += len(replicas)
        space.missed_blocks += len(keys) - len(replicas)
        if not replicas:
            return None, blocked
        lease_s = min(lease_s, self.limits.lease_max_s)
        lease = self.holds.lease(owner, replicas, self.clock.now() + lease_s)
        self.table.touch(replicas[-1])
        return lease, blocked

    def renew(self, owner: Owner, lease_id: int, lease_s: float) -> None:
        expires_at = self.clock.now() + min(lease_s, self.limits.lease_max_s)
        self.holds.renew(owner, lease_id, expires_at)

    def release(self, owner: Owner, lease_id: int) -> None:
        """Idempotent. StaleLease for another client's."""
        self.holds.release(owner, lease_id)
        self._settle()

    def view(self, replica: Replica) -> memoryview:
        """The block's bytes in place; good as long as the replica is held."""
        return self.dram.view(replica.slot, replica.size)

    # Writing.

    def place(self, owner: Owner, space: OpenNamespace, keys: Sequence[BlockKey],
              parent: BlockKey | None, sizes: Sequence[int]) -> Placing:  # fmt: skip
        """Begin a put of a run of a chain: allocate what is wanted. To be continued by `granted`."""
        self.intake.check_put(owner, space, keys, parent, sizes)
        placing = Placing([], [])
        self.intake.place(placing, space, keys, parent, sizes)
        return placing

    def needs_memory(self, placing: Placing, tenant: Tenant) -> bool:
        """Whether it stopped for want of a slab whose memory must be replaced first, which takes a while."""
        full = bool(placing.placements) and placing.placements[-1] is Placement.FULL
        return full and self.table.tiers[DRAM].pool.dirty(tenant.name) is not None

    async def place_slowly(self, space: OpenNamespace, keys: Sequence[BlockKey],
                           parent: BlockKey | None, sizes: Sequence[int]) -> Placing:  # fmt: skip
        """As `place`, for a put that needs memory. Nothing is allocated while it waits."""
        deadline = self.clock.now() + self.limits.put_timeout_s
        while True:
            placing = Placing([], [])
            self.intake.place(placing, space, keys, parent, sizes)
            if not self.needs_memory(placing, space.tenant) or self.clock.now() >= deadline:
                return placing
            missing = zip(placing.placements, sizes, strict=True)
            missing_bytes = sum(slot_bytes(size) for placement, size in missing if placement is Placement.FULL)
            self.withdraw(placing)
            for _ in range(-(-missing_bytes // self.table.tiers[DRAM].pool.slab_bytes)):
                if not await self.sizing.renew(space.tenant.name):
                    break

    def withdraw(self, placing: Placing) -> None:
        """Free what was allocated for a put that is not `granted`."""
        for replica in placing.replicas:
            self.table.abort(replica, Cause.ABORTED)
            self.table.let_go(replica)
        self._settle()

    def granted(self, owner: Owner, space: OpenNamespace, keys: Sequence[BlockKey], placing: Placing) -> None:
        """Hand the slots to the writer: they are its own until commit, abort or the put's time limit."""
        for key, placement in zip(keys, placing.placements, strict=True):
            if placement in REFUSALS:
                self.counters.refused_blocks[REFUSALS[placement]] += 1
                self.history.remember(space.number, key, f"refused: {REFUSALS[placement]}", self.clock.now())
        if placing.replicas:
            expires_at = self.clock.now() + self.limits.put_timeout_s
            placing.grant = self.holds.grant(owner, placing.replicas, expires_at)
        self._settle()

    def progress(self, owner: Owner, grant_id: int, layers: int) -> None:
        """The first `layers` layers of every block of the grant are in place. The put's time limit begins anew."""
        grant = self.holds.granted(owner, grant_id)
        most = min(self._namespace(replica).namespace.layers for replica in grant.replicas)
        if layers > most or any(layers < replica.layers for replica in grant.replicas):
            raise InvalidRequest(f"layers in place go up, to {most} at most: not {layers}")
        for replica in grant.replicas:
            self.table.progress(replica, layers)
        self.holds.extend(grant, self.clock.now() + self.limits.put_timeout_s)
        self._settle()

    def commit(self, owner: Owner, grant_id: int, checksums: Sequence[int], path: str) -> None:
        """Every block of the grant is in place. StaleLease when it ran out; its slots are free then."""
        grant = self.holds.written(owner, grant_id)
        if len(checksums) != len(grant.replicas):
            raise InvalidRequest(f"{len(checksums)} checksums for {len(grant.replicas)} blocks")
        for replica in grant.replicas:
            replica.layers = self._namespace(replica).namespace.layers
        self.holds.finish(grant, checksums)
        self.counters.stored_blocks += len(grant.replicas)
        self.counters.stored_bytes[path] += grant.size_bytes
        self._settle()

    def commit_verified(
        self, owner: Owner, grant_id: int, checksums: Sequence[int], found: Sequence[int], path: str
    ) -> None:
        """As `commit`, for bytes that the node received: `found` are their checksums. Corrupt gives the grant up."""
        grant = self.holds.written(owner, grant_id)
        for replica, expected, actual in zip(grant.replicas, checksums, found, strict=True):
            if expected != actual:
                self.abort(owner, grant_id, Cause.CORRUPT)
                self.counters.corrupt_blocks += 1
                raise Corrupt(f"block {replica.key.hex()} arrived with checksum {actual:016x}, not {expected:016x}")
        self.commit(owner, grant_id, checksums, path)

    def abort(self, owner: Owner, grant_id: int, cause: Cause = Cause.ABORTED) -> None:
        """The writer will not write any more. Idempotent."""
        self.holds.give_up(owner, grant_id, cause)
        self._settle()

    def receive(self, owner: Owner, grant_id: int, blocks: int) -> list[memoryview]:
        """The slots of a grant, in the order of the put, for a payload to be received into: once.

        StaleLease when the grant ran out, InvalidRequest for another number of blocks or a second payload.
        """
        grant = self.holds.written(owner, grant_id)
        if grant.receiving:
            raise InvalidRequest(f"grant {grant_id} has its payload already")
        if blocks != len(grant.replicas):
            raise InvalidRequest(f"{blocks} checksums for {len(grant.replicas)} blocks")
        grant.receiving = True
        return [self.view(replica) for replica in grant.replicas]

    # Operators.

    def discard(self, space: OpenNamespace, keys: Sequence[BlockKey], cause: Cause) -> tuple[int, int]:
        """Delete blocks: (how many, bytes of their slots)."""
        blocks = freed_bytes = 0
        for tier_space in space.spaces:
            for key in keys:
                replica = self.table.readable(tier_space, key)
                if replica is not None:
                    blocks += 1
                    freed_bytes += slot_bytes(replica.size)
                    self.table.discard(replica, cause)
        self._settle()
        return blocks, freed_bytes

    async def verify(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> int:
        """Read blocks that somebody found damaged, and drop those that are; how many those were."""
        self.intake.check_batch(space, keys)
        corrupt = 0
        for key in keys:
            replica = self.table.readable(space.spaces[0], key)
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
        self.counters.corrupt_blocks += corrupt
        self._settle()
        return corrupt

    def pin(self, space: OpenNamespace, keys: Sequence[BlockKey], *, hard: bool, ttl_s: float) -> Pin | None:
        """Pin the prefix of `keys` that is here. None when nothing of it is."""
        self.intake.check_batch(space, keys)
        replicas = []
        for key in keys:
            replica = self.table.readable(space.spaces[0], key)
            if replica is None:
                break
            replicas.append(replica)
        if not replicas:
            return None
        return self.holds.pin(space.tenant.name, replicas, hard=hard, expires_at=self.clock.now() + ttl_s)

    def unpin(self, tenant: Tenant, pin_id: int) -> None:
        if not self.holds.unpin(tenant.name, pin_id):
            raise NotFound(f"no pin {pin_id} of tenant {tenant.name}")
        self._settle()

    # Upkeep.

    def expire(self) -> None:
        """Let go of all leases, grants and pins that ran out."""
        self.counters.lapsed_holds += self.holds.expire(self.clock.now())
        self._settle()

    def end(self, owner: Owner) -> None:
        """A session is over: its last uses count, whatever it held is let go."""
        self.note_uses(owner)
        self.exports.end(owner)
        self.counters.lost_sessions += self.holds.end(owner) > 0
        self._settle()

    def note_uses(self, owner: Owner | None = None) -> None:
        """Take up what local readers report in their rings, of one session or of all."""
        for tenant, name, blocks in self.exports.drain(owner):
            number, part = IDENT_PREFIX.unpack_from(name)
            space = self.catalogue.of_number(number)
            if space is None or space.tenant.name != tenant or part >= space.namespace.parts:
                continue
            key = part_of(space, BlockKey(name[IDENT_PREFIX.size :]), part)
            replica = self.table.readable(space.spaces[0], key)
            if replica is not None:
                self.table.touch(replica)
                space.hit_blocks += min(blocks, self.limits.batch_blocks)
                self.counters.loaded_bytes["shared"] += replica.size * min(blocks, self.limits.batch_blocks)

    def evict_step(self, low_bytes: int, blocks: int) -> bool:
        """Evict up to `blocks` of the coldest down to `low_bytes` in use; whether there is more to do."""
        tier = self.table.tiers[DRAM]
        for _ in range(blocks):
            if tier.used_bytes <= low_bytes:
                break
            replica = self.table.coldest(DRAM)
            if replica is None:
                break
            self.table.evict(replica, Cause.WATERMARK)
        else:
            self._settle()
            return True
        self._settle()
        return False

    def empty_slab(self, cause: Cause) -> bool:
        """Evict all of the coldest slab that can be emptied; False when none can."""
        emptied = self.table.empty_coldest_slab(DRAM, cause)
        self._settle()
        return emptied

    # Inside.

    def _settle(self) -> None:
        """Make known what the table changed."""
        events = self.table.take_changes()
        if not events:
            return
        self.exports.apply(events)
        for event in events:
            self._note(event)

    def _note(self, event: Event) -> None:
        space, key = event.replica.space, event.replica.key
        if event.cause is not None:
            self.counters.removed_blocks[event.cause.value] += 1
            self.history.remember(space.number, key, f"removed: {event.cause.value}", self.clock.now())
        elif event.change is Change.COMMITTED:
            self.history.forget(space.number, key)
        for future in self._arrivals.pop((space.number, key), ()) if self._arrivals else ():
            if not future.done():
                future.set_result(None)

    async def _arrival(self, number: int, key: BlockKey, wait_s: float) -> None:
        """Until something happens to `key`, at most `wait_s`."""
        future = asyncio.get_running_loop().create_future()
        waiting = self._arrivals.setdefault((number, key), [])
        waiting.append(future)
        try:
            await asyncio.wait([future], timeout=wait_s)
        finally:
            waiting.remove(future) if future in waiting else None
            if not waiting and self._arrivals.get((number, key)) is waiting:
                del self._arrivals[number, key]

    def _being_written(self, space: OpenNamespace, key: BlockKey) -> BlockKey | None:
        """The part of the block that somebody is writing, if a part is what it lacks."""
        for part in range(space.namespace.parts):
            replica = space.spaces[0].replicas.get(part_of(space, key, part))
            if replica is not None and replica.state is State.ALLOCATED:
                return replica.key
        return None

    def _namespace(self, replica: Replica) -> OpenNamespace:
        found = self.catalogue.of_number(replica.space.number)
        assert found is not None, "namespaces are never closed"
        return found
