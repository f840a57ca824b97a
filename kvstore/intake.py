"""What a put may store: checked against the limits, then room, quota and memory for each block in turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.catalogue import OpenNamespace
from kvstore.errors import InvalidRequest, Rejected, TierFull
from kvstore.holds import Grant, Holds
from kvstore.metrics import Counters
from kvstore.prefix import part_key, split_part
from kvstore.slab import slot_bytes
from kvstore.table import BlockTable, Replica
from kvstore.types import DRAM, KEY_BYTES, BlockKey, Cause, Owner, Placement

REFUSALS = {Placement.FULL: "tier full", Placement.OVER_QUOTA: "over quota"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request or client may ask for; the settings of the same names."""

    batch_blocks: int = 16_384
    inflight_bytes: int = 1 << 30
    leases_per_client: int = 4096
    lease_max_s: float = 600.0
    put_timeout_s: float = 30.0
    wait_max_s: float = 60.0
    namespaces_per_tenant: int = 256
    explain_history: int = 65_536
    pins_per_tenant: int = 100_000
    events: int = 65_536


@dataclass(slots=True)
class Placing:
    """A put on its way: what became of each block so far. `grant` is None when nothing was granted."""

    placements: list[Placement]
    replicas: list[Replica]
    grant: Grant | None = None
    is_start: bool = False  # of a chain


class Intake:
    """Decides synchronously, under the table. The caller settles what was evicted."""

    def __init__(self, table: BlockTable, holds: Holds, limits: Limits, counters: Counters) -> None:
        self._table = table
        self._holds = holds
        self._limits = limits
        self._counters = counters

    def place(self, placing: Placing, space: OpenNamespace, keys: Sequence[BlockKey],
               parent: BlockKey | None, sizes: Sequence[int]) -> None:  # fmt: skip
        """Decide about the keys that `placing` has no answer for yet; stops at the first without room.

        What of the chain is here already is held meanwhile: room for its end is not made at its beginning.
        """
        replicas = space.dram.replicas
        held = [replicas[key] for key in (parent, *keys) if key is not None and self._is_readable(space, key)]
        for replica in held:
            self._table.hold(replica)
        try:
            self._place(placing, space, keys, parent, sizes)
        finally:
            for replica in held:
                self._table.let_go(replica)

    def _is_readable(self, space: OpenNamespace, key: BlockKey) -> bool:
        return self._table.placement(space.dram, key) is Placement.PRESENT

    def _place(self, placing: Placing, space: OpenNamespace, keys: Sequence[BlockKey],
               parent: BlockKey | None, sizes: Sequence[int]) -> None:  # fmt: skip
        done = len(placing.placements)
        above = keys[done - 1] if done else parent
        for key, size in zip(keys[done:], sizes[done:], strict=True):
            placement = self._table.placement(space.dram, key)
            if placement is None:
                placement = self.make_room(space, size)
            else:
                self._counters.duplicate_blocks += 1
                if placement is Placement.PRESENT:
                    self._table.touch(space.dram.replicas[key])
            if placement is Placement.GRANTED:
                replica = self._table.allocate(space.dram, key, above, size)
                assert replica is not None, "room was made"
                placing.replicas.append(replica)
                self._counters.orphan_blocks += above is not None and above not in space.dram.replicas
            if placement in REFUSALS:  # so are all that follow: they hang on this one
                placing.placements += [placement] * (len(keys) - len(placing.placements))
                return
            placing.placements.append(placement)
            above = key

    def make_room(self, space: OpenNamespace, size: int) -> Placement:
        """Have room in DRAM for a block of `size` bytes: GRANTED, or why not."""
        tenant, tier = space.tenant, self._table.tiers[DRAM]
        wanted_bytes = slot_bytes(size)
        if tenant.quota_bytes:
            if wanted_bytes > tenant.quota_bytes:
                return Placement.OVER_QUOTA  # with nothing evicted: it would not help
            while tier.tenant_bytes.get(tenant.name, 0) + wanted_bytes > tenant.quota_bytes:
                replica = self._table.coldest(DRAM, tenant.name)
                if replica is None:
                    return Placement.OVER_QUOTA
                self._table.evict(replica, Cause.QUOTA)
        try:
            self._table.make_room(space.dram, size)
        except TierFull:
            return Placement.FULL
        return Placement.GRANTED if self._table.has_room(space.dram, size) else Placement.FULL

    def check_batch(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> None:
        if len(keys) > self._limits.batch_blocks:
            raise InvalidRequest(f"{len(keys)} blocks in one request; batch_blocks is {self._limits.batch_blocks}")
        if any(len(key) != space.key_bytes for key in keys):
            raise InvalidRequest(f"keys of this namespace have {space.key_bytes} bytes")

    def check_put(self, owner: Owner, space: OpenNamespace, keys: Sequence[BlockKey],
                   parent: BlockKey | None, sizes: Sequence[int]) -> None:  # fmt: skip
        self.check_batch(space, keys)
        parts = space.namespace.parts
        if parts > 1 and any(int.from_bytes(key[KEY_BYTES:], "little") >= parts for key in keys):
            raise InvalidRequest(f"this namespace has the parts 0 to {parts - 1}")
        if len(set(keys)) != len(keys) or parent in keys:
            raise InvalidRequest("a block comes once in a chain")
        if parent is not None and len(parent) != space.key_bytes:
            raise InvalidRequest(f"keys of this namespace have {space.key_bytes} bytes")
        if len(sizes) != len(keys):
            raise InvalidRequest(f"{len(sizes)} sizes for {len(keys)} keys")
        expected = space.namespace.block_bytes
        limit = self._table.tiers[DRAM].pool.slab_bytes
        for size in sizes:
            if (expected and size != expected) or not 0 < size <= limit:
                raise InvalidRequest(f"a block here has {expected or f'1 to {limit}'} bytes, not {size}")
        self.admit(owner, sum(sizes))

    def admit(self, owner: Owner, size_bytes: int) -> None:
        """Refuse a writer that has as much on the way as it may, before it gets that much more."""
        self._holds.admit(owner)
        writing_bytes = self._holds.writing_bytes(owner) + size_bytes
        if writing_bytes > self._limits.inflight_bytes:
            raise Rejected(f"{writing_bytes} bytes on the way; inflight_bytes is {self._limits.inflight_bytes}")


def part_of(space: OpenNamespace, key: BlockKey, part: int) -> BlockKey:
    """The key of another part of the same block."""
    return key if space.namespace.parts == 1 else part_key(split_part(key)[0], part)
