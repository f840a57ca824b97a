"""Who holds which replicas until when: leases of readers, grants of writers, pins of operators.

Each has an owner and a time limit; whatever an owner holds is let go when its session ends. A grant that
ran out takes its blocks out of reach at once but keeps their slots until the writer gives up or its session
ends: only then can none of its bytes land in them any more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count
from typing import Any

from kvstore.errors import Rejected, StaleLease
from kvstore.table import BlockTable, Replica
from kvstore.types import NODE, Cause, Owner

SLACK = 1024  # deadlines of released holds that may wait beside twice the live ones


@dataclass(slots=True, eq=False)
class Lease:
    """A promise to a reader: these replicas keep their slots until `expires_at` (node's seconds)."""

    lease_id: int
    owner: Owner
    expires_at: float
    replicas: tuple[Replica, ...] = field(repr=False)


@dataclass(slots=True, eq=False)
class Grant:
    """Slots that one writer fills. `overdue`: it took too long, and may still be writing."""

    grant_id: int
    owner: Owner
    expires_at: float
    replicas: tuple[Replica, ...] = field(repr=False)
    size_bytes: int
    overdue: bool = False
    receiving: bool = False  # the node itself puts a payload into the slots


@dataclass(slots=True, eq=False)
class Pin:
    """An operator's wish: a hard pin is never evicted, a soft one last."""

    pin_id: int
    tenant: str
    hard: bool
    expires_at: float
    replicas: tuple[Replica, ...] = field(repr=False)


class Holds:
    """`first_id` should be above all ids of an earlier start: who holds one of those must not hit upon another's."""

    def __init__(self, table: BlockTable, leases_per_client: int, pins_per_tenant: int, first_id: int = 1) -> None:
        self._table = table
        self._leases_per_client = leases_per_client
        self._pins_per_tenant = pins_per_tenant
        self._leases: dict[int, Lease] = {}
        self._grants: dict[int, Grant] = {}
        self._pins: dict[int, Pin] = {}
        self._owned: dict[Owner, set[int]] = {}  # leases and grants
        self._writing_bytes: dict[Owner, int] = {}
        self._pinned: dict[str, int] = {}  # replicas by tenant; a pin of none counts as one
        self._deadlines: list[tuple[float, int]] = []
        self._ids = count(first_id)

    # Readers.

    def lease(self, owner: Owner, replicas: Sequence[Replica], expires_at: float) -> Lease:
        self._admit(owner)
        lease = Lease(next(self._ids), owner, expires_at, tuple(replicas))
        for replica in replicas:
            self._table.hold(replica)
        self._leases[lease.lease_id] = lease
        self._keep(owner, lease.lease_id, expires_at)
        return lease

    def renew(self, owner: Owner, lease_id: int, expires_at: float) -> Lease:
        """Keep it for longer; never for less."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner != owner:
            raise StaleLease(f"lease {lease_id} lapsed, was released, or is another client's")
        lease.expires_at = max(lease.expires_at, expires_at)
        return lease

    def leased(self, owner: Owner, lease_id: int) -> tuple[Replica, ...]:
        """What a live lease of this owner holds. StaleLease when there is none."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner != owner:
            raise StaleLease(f"lease {lease_id} lapsed, was released, or is another client's")
        return lease.replicas

    def release(self, owner: Owner, lease_id: int) -> bool:
        """Let go. Idempotent for its owner: False when there was nothing left to release."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        if lease.owner != owner:
            raise StaleLease(f"lease {lease_id} is another client's")
        self._drop_lease(lease)
        return True

    # Writers.

    def grant(self, owner: Owner, replicas: Sequence[Replica], expires_at: float) -> Grant:
        """The replicas were just allocated: their one holder is this writer."""
        size_bytes = sum(replica.size for replica in replicas)
        grant = Grant(next(self._ids), owner, expires_at, tuple(replicas), size_bytes)
        self._grants[grant.grant_id] = grant
        _count(self._writing_bytes, owner, +size_bytes)
        self._keep(owner, grant.grant_id, expires_at)
        return grant

    def admit(self, owner: Owner) -> None:
        """Refuse a client that holds as much as it may; to be asked before anything is allocated for it."""
        self._admit(owner)

    def granted(self, owner: Owner, grant_id: int) -> Grant:
        """The live grant, for progress. StaleLease when it ran out; its writer may be writing even so."""
        grant = self._grants.get(grant_id)
        if grant is None or grant.owner != owner:
            raise StaleLease(f"grant {grant_id} ran out, was finished, or is another client's")
        if grant.overdue:
            raise StaleLease(f"grant {grant_id} ran out: its blocks were given up")
        return grant

    def written(self, owner: Owner, grant_id: int) -> Grant:
        """The live grant of a writer that has written its last byte, for `finish`.

        StaleLease when it ran out; its slots are then free.
        """
        grant = self._grants.get(grant_id)
        if grant is not None and grant.owner == owner and grant.overdue:
            self._drop_grant(grant)
        return self.granted(owner, grant_id)

    def extend(self, grant: Grant, expires_at: float) -> None:
        """Its writer is at work: give it longer, never less."""
        grant.expires_at = max(grant.expires_at, expires_at)

    def finish(self, grant: Grant, checksums: Sequence[int]) -> None:
        """Commit every block of the grant."""
        assert len(checksums) == len(grant.replicas)
        assert not grant.overdue
        self._remove_grant(grant)
        for replica, checksum in zip(grant.replicas, checksums, strict=True):
            self._table.commit(replica, checksum)

    def give_up(self, owner: Owner, grant_id: int, cause: Cause) -> bool:
        """Abort every block of the grant and free its slots: the writer will not write again."""
        grant = self._grants.get(grant_id)
        if grant is None:
            return False
        if grant.owner != owner:
            raise StaleLease(f"grant {grant_id} is another client's")
        self._abort(grant, cause)
        self._drop_grant(grant)
        return True

    # Operators.

    def pin(self, tenant: str, replicas: Sequence[Replica], *, hard: bool, expires_at: float) -> Pin:
        pinned = self._pinned.get(tenant, 0) + max(len(replicas), 1)
        if pinned > self._pins_per_tenant:
            limit = self._pins_per_tenant
            raise Rejected(f"tenant {tenant} would pin {pinned} blocks; pins_per_tenant is {limit}")
        pin = Pin(next(self._ids), tenant, hard, expires_at, tuple(replicas))
        for replica in replicas:
            if hard:
                self._table.hold(replica)
            else:
                self._table.soft_pin(replica, +1)
        self._pinned[tenant] = pinned
        self._pins[pin.pin_id] = pin
        self._set_deadline(expires_at, pin.pin_id)
        return pin

    def unpin(self, tenant: str, pin_id: int) -> bool:
        """Let go of a pin. False when it is not there (any more)."""
        pin = self._pins.get(pin_id)
        if pin is None or pin.tenant != tenant:
            return False
        self._drop_pin(pin)
        return True

    def pins(self, tenant: str) -> list[Pin]:
        return [pin for pin in self._pins.values() if pin.tenant == tenant]

    # Ends.

    def expire(self, now: float) -> int:
        """Let go of what ran out; how many leases, grants and pins that were."""
        lapsed = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            _, hold_id = heappop(self._deadlines)
            hold = self._leases.get(hold_id) or self._grants.get(hold_id) or self._pins.get(hold_id)
            if hold is None or (isinstance(hold, Grant) and hold.overdue):
                continue  # let go since, or counted already
            if hold.expires_at > now:
                heappush(self._deadlines, (hold.expires_at, hold_id))
                continue
            if isinstance(hold, Lease):
                self._drop_lease(hold)
            elif isinstance(hold, Pin):
                self._drop_pin(hold)
            else:
                self._abort(hold, Cause.PUT_TIMEOUT)
            lapsed += 1
        return lapsed

    def end(self, owner: Owner) -> int:
        """The owner's session is over, and with it its memory mappings: let go of all that it held."""
        held = list(self._owned.get(owner, ()))
        for hold_id in held:
            if (lease := self._leases.get(hold_id)) is not None:
                self._drop_lease(lease)
            else:
                self.give_up(owner, hold_id, Cause.WRITER_LOST)
        assert owner not in self._owned
        return len(held)

    def held_by(self, owner: Owner) -> int:
        return len(self._owned.get(owner, ()))

    def writing_bytes(self, owner: Owner) -> int:
        """Bytes in the owner's open grants, overdue ones too."""
        return self._writing_bytes.get(owner, 0)

    # State.

    def _admit(self, owner: Owner) -> None:
        if owner != NODE and self.held_by(owner) >= self._leases_per_client:
            limit = self._leases_per_client
            raise Rejected(f"this client holds {limit} leases and grants: leases_per_client")

    def _keep(self, owner: Owner, hold_id: int, expires_at: float) -> None:
        self._owned.setdefault(owner, set()).add(hold_id)
        self._set_deadline(expires_at, hold_id)

    def _set_deadline(self, expires_at: float, hold_id: int) -> None:
        heappush(self._deadlines, (expires_at, hold_id))
        live = len(self._leases) + len(self._grants) + len(self._pins)
        if len(self._deadlines) > 2 * live + SLACK:
            self._deadlines = [(hold.expires_at, hold_id) for hold_id, hold in self._all()]
            heapify(self._deadlines)

    def _unkeep(self, owner: Owner, hold_id: int) -> None:
        owned = self._owned[owner]
        owned.remove(hold_id)
        if not owned:
            del self._owned[owner]

    def _abort(self, grant: Grant, cause: Cause) -> None:
        if not grant.overdue:
            grant.overdue = True
            for replica in grant.replicas:
                self._table.abort(replica, cause)

    def _remove_grant(self, grant: Grant) -> None:
        self._unkeep(grant.owner, grant.grant_id)
        del self._grants[grant.grant_id]
        _count(self._writing_bytes, grant.owner, -grant.size_bytes)

    def _drop_grant(self, grant: Grant) -> None:
        self._remove_grant(grant)
        for replica in grant.replicas:
            self._table.let_go(replica)

    def _drop_lease(self, lease: Lease) -> None:
        self._unkeep(lease.owner, lease.lease_id)
        del self._leases[lease.lease_id]
        for replica in lease.replicas:
            self._table.let_go(replica)

    def _drop_pin(self, pin: Pin) -> None:
        del self._pins[pin.pin_id]
        _count(self._pinned, pin.tenant, -max(len(pin.replicas), 1))
        for replica in pin.replicas:
            if pin.hard:
                self._table.let_go(replica)
            else:
                self._table.soft_pin(replica, -1)

    def held(self) -> Iterator[Replica]:
        """Each replica that a lease, a grant or a hard pin holds, once for each."""
        for _, hold in self._all():
            if not isinstance(hold, Pin) or hold.hard:
                yield from hold.replicas

    def _all(self) -> Iterator[tuple[int, Lease | Grant | Pin]]:
        return chain(self._leases.items(), self._grants.items(), self._pins.items())


def _count(counts: dict[Any, int], key: Any, step: int) -> None:
    counts[key] = counts.get(key, 0) + step
    if not counts[key]:
        del counts[key]
