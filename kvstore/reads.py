"""Reads: what of a chain is here, and leases on it, loaded and waited for where that is asked.

What may have to wait (a block that is being written or loaded) is a coroutine; everything else answers at once.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from kvstore.catalogue import OpenNamespace
from kvstore.clock import Clock
from kvstore.errors import InvalidRequest
from kvstore.holds import Holds, Lease
from kvstore.intake import Intake, Limits, part_of
from kvstore.promotion import Promotion
from kvstore.table import BlockTable, Event, Replica
from kvstore.tiers.object_store import ObjectTier
from kvstore.types import BlockKey, Owner, State

FINDS = 2  # of one acquire
ROUNDS = 16  # of loads for one acquire: more than limits.inflight_bytes of a prefix come in several


class Finding(Protocol):
    """What other nodes keep for a reader. `first` is the number of the first block that this node had in no tier."""

    first: int

    def close(self) -> None:
        """The reader waits no more."""
        ...


class Finder(Protocol):
    """Finds what this node lacks of a chain on other nodes, and has them keep it; see `kvstore.cluster.pulling`."""

    async def find(
        self, space: OpenNamespace, keys: Sequence[BlockKey], parent: BlockKey | None, until: float, origin: Any = None
    ) -> Finding: ...


class Reads:
    """`used` hears of each prefix that was read, by its last block; `settle` makes known what the table changed."""

    def __init__(self, table: BlockTable, holds: Holds, intake: Intake, promotion: Promotion, *,
                 bucket: ObjectTier | None, clock: Clock, limits: Limits,
                 used: Callable[[Replica], None], settle: Callable[[], None]) -> None:  # fmt: skip
        self._table = table
        self._holds = holds
        self._intake = intake
        self._promotion = promotion
        self._bucket = bucket
        self._clock = clock
        self._limits = limits
        self._used = used
        self._settle = settle
        self.finder: Finder | None = None  # with a cluster
        self._arrivals: dict[tuple[int, BlockKey], list[asyncio.Future[None]]] = {}

    def note(self, event: Event) -> None:
        """Wake whoever waits for this block."""
        if self._arrivals:
            for future in self._arrivals.pop((event.replica.space.number, event.replica.key), ()):
                if not future.done():
                    future.set_result(None)

    def match(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> int:
        """How many blocks of a chain this node can get, from whatever tier, from the first; all parts of each."""
        self._intake.check_batch(space, keys)
        bucket = self._bucket
        spaces = [found for found in space.spaces if self._promotion.may_load(found.tier)]
        elsewhere = None
        if bucket is not None and bucket.may_load():
            elsewhere = partial(bucket.has, space.root)
        matched = len(keys)
        for part in range(space.namespace.parts):
            if not matched:
                break  # a client may say that there are 65,535 parts
            matched = self._table.match(spaces, [part_of(space, key, part) for key in keys[:matched]], elsewhere)
        return matched

    def readable(self, space: OpenNamespace, key: BlockKey, layers: int = 0) -> Replica | None:
        """The replica of `key` in DRAM if all parts of its block are there, or, with `layers`, that far along."""
        found = None
        for part in range(space.namespace.parts):
            wanted = part_of(space, key, part)
            replica = space.dram.replicas.get(wanted)
            if replica is None:
                return None
            if replica.state is not State.WRITTEN and not 0 < layers <= replica.layers:
                return None
            if wanted == key or part == 0:
                found = replica if wanted == key else found
        return found

    async def acquire(self, owner: Owner, space: OpenNamespace, keys: Sequence[BlockKey], *,
                      lease_s: float, wait_s: float, layers: int, load_s: float = 0.0, tokens_per_s: float = 0.0,
                      parent: BlockKey | None = None, origin: Any = None,
                      alone: bool = False, enough: int = 0) -> Lease | None:  # fmt: skip
        """Hold the longest prefix of `keys` that is in DRAM or comes in time; None when there is none.

        A block that is being written is waited for, for `wait_s`. What lower tiers or other nodes have is loaded, for
        `load_s`, and not where it could be computed sooner at `tokens_per_s` (0: unknown). `parent` is the key before
        the first; `origin` says which node has the blocks, where that is known; with `alone` no other node is asked.
        With `enough` it ends as soon as so many blocks are here. Cancelled, it holds nothing.
        """
        self._intake.check_batch(space, keys)
        check_parent(space, parent)
        started = self._clock.now()
        wait_until = started + min(wait_s, self._limits.wait_max_s)
        load_until = started + min(load_s, self._limits.wait_max_s)
        come = partial(self._come, space, keys, parent, wait_until, load_until,
                       tokens_per_s=tokens_per_s, layers=layers, enough=enough)  # fmt: skip
        if self.finder is None or load_s <= 0 or alone:
            await come()
        else:
            for _ in range(FINDS):
                finding = await self.finder.find(space, keys, parent, load_until, origin)
                try:
                    await come()
                finally:
                    finding.close()
                if self.is_here(space, keys[: min(finding.first, enough or len(keys))], layers):
                    break  # else what this node had turned out to be of no use, and others may have it
        return self.try_acquire(owner, space, keys, lease_s=lease_s, layers=layers, partly=True)[0]

    async def begin(
        self, space: OpenNamespace, keys: Sequence[BlockKey], parent: BlockKey | None, load_s: float
    ) -> int:
        """Begin to load what of these blocks lower tiers or other nodes have; how many are on their way."""
        check_parent(space, parent)
        finding = None
        load_s = min(load_s, self._limits.wait_max_s)
        if self.finder is not None:
            finding = await self.finder.find(space, keys, parent, self._clock.now() + load_s)
        try:
            return self._promotion.begin(space, keys, load_s, 0.0, parent)
        finally:
            if finding is not None:
                finding.close()

    async def _come(self, space: OpenNamespace, keys: Sequence[BlockKey], parent: BlockKey | None,
                    wait_until: float, load_until: float, *,
                    tokens_per_s: float, layers: int, enough: int) -> None:  # fmt: skip
        """Until nothing of the chain, or of its first `enough` blocks, is on its way any more, or it is too late."""
        rounds = 0
        waited = keys[:enough] if enough else keys
        while True:
            now = self._clock.now()
            if rounds < ROUNDS and now < load_until:
                rounds += bool(self._promotion.begin(space, keys, load_until - now, tokens_per_s, parent))
            blocked = self._blocked(space, waited, layers)
            if blocked is None:
                return
            loading = self._last_loading(space, waited) if self._is_loading(space, blocked) else None
            left_s = (wait_until if loading is None else load_until) - self._clock.now()
            if left_s <= 0:
                return
            await self._arrival(space.number, loading or blocked, left_s)

    def _blocked(self, space: OpenNamespace, keys: Sequence[BlockKey], layers: int) -> BlockKey | None:
        """The part, somebody is writing or loading it, that ends what can be held now."""
        for key in keys:
            if self.readable(space, key, layers) is None:
                return self._being_written(space, key)
        return None

    def is_here(self, space: OpenNamespace, keys: Sequence[BlockKey], layers: int = 0) -> bool:
        """Whether all of it can be held now."""
        return all(self.readable(space, key, layers) is not None for key in keys)

    def try_acquire(self, owner: Owner, space: OpenNamespace, keys: Sequence[BlockKey], *,
                    lease_s: float, layers: int, partly: bool) -> tuple[Lease | None, BlockKey | None]:  # fmt: skip
        """What `acquire` can hold at once: (lease, the first key that somebody is writing or loading).

        Without `partly` nothing is held as long as there is such a key.
        """
        self._intake.check_batch(space, keys)
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
        lease_s = min(lease_s, self._limits.lease_max_s)
        lease = self._holds.lease(owner, replicas, self._clock.now() + lease_s)
        self._used(replicas[-1])
        return lease, blocked

    def renew(self, owner: Owner, lease_id: int, lease_s: float) -> None:
        expires_at = self._clock.now() + min(lease_s, self._limits.lease_max_s)
        self._holds.renew(owner, lease_id, expires_at)

    def release(self, owner: Owner, lease_id: int) -> None:
        """Idempotent. StaleLease for another client's."""
        self._holds.release(owner, lease_id)
        self._settle()

    def _is_loading(self, space: OpenNamespace, key: BlockKey) -> bool:
        replica = space.dram.replicas.get(key)
        return replica is not None and self._promotion.is_loading(replica)

    def _last_loading(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> BlockKey | None:
        """The one to wait for, before the first that is not here: those before it come earlier, or soon after."""
        last = None
        for key in keys:
            for part in range(space.namespace.parts):
                replica = space.dram.replicas.get(part_of(space, key, part))
                if replica is None:
                    return last
                if self._promotion.is_loading(replica):
                    last = replica.key
        return last

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
            replica = space.dram.replicas.get(part_of(space, key, part))
            if replica is not None and replica.state is State.ALLOCATED:
                return replica.key
        return None


def check_parent(space: OpenNamespace, parent: BlockKey | None) -> None:
    """Raises InvalidRequest for what is no key of the namespace."""
    if parent is not None and len(parent) != space.key_bytes:
        raise InvalidRequest(f"keys of this namespace have {space.key_bytes} bytes")
