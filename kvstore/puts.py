"""Puts: slots for the blocks that are wanted, then commit or abort by their writer.

Each step decides under the table synchronously; only a put that needs memory made ready for it waits.
"""

from collections.abc import Callable, Sequence

from kvstore.catalogue import Catalogue, OpenNamespace, Tenant
from kvstore.clock import Clock
from kvstore.demotion import Demotion
from kvstore.errors import Corrupt, InvalidRequest, Rejected
from kvstore.history import History
from kvstore.holds import Holds
from kvstore.intake import REFUSALS, Intake, Limits, Placing
from kvstore.metrics import Counters
from kvstore.sizing import Sizing
from kvstore.slab import slot_bytes
from kvstore.table import BlockTable, Replica
from kvstore.tiers.dram import DramTier
from kvstore.types import DRAM, BlockKey, Cause, Owner, Placement


class Puts:
    """`settle` makes known what the table changed."""

    def __init__(self, table: BlockTable, catalogue: Catalogue, holds: Holds, intake: Intake, *, dram: DramTier,
                 demotion: Demotion, sizing: Sizing, clock: Clock, limits: Limits, counters: Counters, history: History,
                 settle: Callable[[], None]) -> None:  # fmt: skip
        self._table = table
        self._catalogue = catalogue
        self._holds = holds
        self._intake = intake
        self._dram = dram
        self._sizing = sizing
        self._clock = clock
        self._limits = limits
        self._demotion = demotion
        self._counters = counters
        self._history = history
        self._settle = settle
        # Hears of blocks that are being written, of a run of keys that begins its chain.
        self.begun: Callable[[OpenNamespace, Sequence[BlockKey], Sequence[Replica]], None] = lambda *_: None

    def place(self, owner: Owner, space: OpenNamespace, keys: Sequence[BlockKey],
              parent: BlockKey | None, sizes: Sequence[int]) -> Placing:  # fmt: skip
        """Begin a put of a run of a chain: allocate what is wanted. To be continued by `granted`."""
        self._intake.check_put(owner, space, keys, parent, sizes)
        placing = Placing([], [], is_start=parent is None)
        self._intake.place(placing, space, keys, parent, sizes)
        return placing

    def needs_memory(self, placing: Placing, tenant: Tenant) -> bool:
        """Whether it stopped for want of memory that will be there in a while: a slab's must be replaced first, or
        blocks are just being written to a lower tier."""
        full = bool(placing.placements) and placing.placements[-1] is Placement.FULL
        return full and (self._demotion.is_relieving or self._table.tiers[DRAM].pool.dirty(tenant.name) is not None)

    async def place_slowly(self, space: OpenNamespace, keys: Sequence[BlockKey],
                           parent: BlockKey | None, sizes: Sequence[int]) -> Placing:  # fmt: skip
        """As `place`, for a put that needs memory. Nothing is allocated while it waits."""
        deadline = self._clock.now() + self._limits.put_timeout_s
        while True:
            placing = Placing([], [], is_start=parent is None)
            self._intake.place(placing, space, keys, parent, sizes)
            if not self.needs_memory(placing, space.tenant) or self._clock.now() >= deadline:
                return placing
            missing = zip(placing.placements, sizes, strict=True)
            missing_bytes = sum(slot_bytes(size) for placement, size in missing if placement is Placement.FULL)
            self.withdraw(placing)
            if self._table.tiers[DRAM].pool.dirty(space.tenant.name) is None:
                await self._demotion.relieved(deadline - self._clock.now())
            for _ in range(-(-missing_bytes // self._table.tiers[DRAM].pool.slab_bytes)):
                if not await self._sizing.renew(space.tenant.name):
                    break

    def withdraw(self, placing: Placing) -> None:
        """Free what was allocated for a put that is not `granted`."""
        for replica in placing.replicas:
            self._table.abort(replica, Cause.ABORTED)
            self._table.let_go(replica)
        self._settle()

    def granted(self, owner: Owner, space: OpenNamespace, keys: Sequence[BlockKey], placing: Placing) -> None:
        """Hand the slots to the writer: they are its own until commit, abort or the put's time limit.

        Rejected, with the slots free, for a writer that was given others meanwhile.
        """
        try:
            self._intake.admit(owner, sum(replica.size for replica in placing.replicas))
        except Rejected:
            self.withdraw(placing)
            raise
        for key, placement in zip(keys, placing.placements, strict=True):
            if placement in REFUSALS:
                self._counters.refused_blocks[REFUSALS[placement]] += 1
                self._history.remember(space.number, key, f"refused: {REFUSALS[placement]}", self._clock.now())
        if placing.replicas:
            expires_at = self._clock.now() + self._limits.put_timeout_s
            placing.grant = self._holds.grant(owner, placing.replicas, expires_at)
            if placing.is_start:
                self.begun(space, keys, placing.replicas)
        self._settle()

    def progress(self, owner: Owner, grant_id: int, layers: int) -> None:
        """The first `layers` layers of every block of the grant are in place. The put's time limit begins anew."""
        grant = self._holds.granted(owner, grant_id)
        most = min(self._layers(replica) for replica in grant.replicas)
        if layers > most or any(layers < replica.layers for replica in grant.replicas):
            raise InvalidRequest(f"layers in place go up, to {most} at most: not {layers}")
        for replica in grant.replicas:
            self._table.progress(replica, layers)
        self._holds.extend(grant, self._clock.now() + self._limits.put_timeout_s)
        self._settle()

    def commit(self, owner: Owner, grant_id: int, checksums: Sequence[int], path: str) -> None:
        """Every block of the grant is in place. StaleLease when it ran out; its slots are free then."""
        grant = self._holds.written(owner, grant_id)
        if len(checksums) != len(grant.replicas):
            raise InvalidRequest(f"{len(checksums)} checksums for {len(grant.replicas)} blocks")
        for replica in grant.replicas:
            replica.layers = self._layers(replica)
        self._holds.finish(grant, checksums)
        self._counters.stored_blocks += len(grant.replicas)
        self._counters.stored_bytes[path] += grant.size_bytes
        self._settle()

    def commit_verified(
        self, owner: Owner, grant_id: int, checksums: Sequence[int], found: Sequence[int], path: str
    ) -> None:
        """As `commit`, for bytes that the node received: `found` are their checksums. Corrupt gives the grant up."""
        grant = self._holds.written(owner, grant_id)
        for replica, expected, actual in zip(grant.replicas, checksums, found, strict=True):
            if expected != actual:
                self.abort(owner, grant_id, Cause.CORRUPT)
                self._counters.corrupt_blocks += 1
                raise Corrupt(f"block {replica.key.hex()} arrived with checksum {actual:016x}, not {expected:016x}")
        self.commit(owner, grant_id, checksums, path)

    def abort(self, owner: Owner, grant_id: int, cause: Cause = Cause.ABORTED) -> None:
        """The writer will not write any more. Idempotent."""
        self._holds.give_up(owner, grant_id, cause)
        self._settle()

    def receive(self, owner: Owner, grant_id: int, blocks: int) -> list[memoryview]:
        """The slots of a grant, in the order of the put, for a payload to be received into: once.

        StaleLease when the grant ran out, InvalidRequest for another number of blocks or a second payload.
        """
        grant = self._holds.written(owner, grant_id)
        if grant.receiving:
            raise InvalidRequest(f"grant {grant_id} has its payload already")
        if blocks != len(grant.replicas):
            raise InvalidRequest(f"{blocks} checksums for {len(grant.replicas)} blocks")
        grant.receiving = True
        return [self._dram.view(replica.slot, replica.size) for replica in grant.replicas]

    def receive_again(self, owner: Owner, grant_id: int) -> None:
        """What was to be received did not come, and nothing writes into the slots: another payload may."""
        self._holds.granted(owner, grant_id).receiving = False

    def _layers(self, replica: Replica) -> int:
        found = self._catalogue.of_number(replica.space.number)
        assert found is not None, "namespaces are never closed"
        return found.namespace.layers
