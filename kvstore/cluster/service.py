"""A node's part in the cluster: who is a member, what each is told, asked and given, and what follows when one goes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from kvstore.catalogue import OpenNamespace, Tenant
from kvstore.clock import Clock
from kvstore.cluster.announcer import Announcer
from kvstore.cluster.coordinator import Coordinator
from kvstore.cluster.directory import Directory
from kvstore.cluster.holdings import Holdings
from kvstore.cluster.homes import Homes
from kvstore.cluster.links import Links
from kvstore.cluster.locating import Locating, Place
from kvstore.cluster.members import Member, View
from kvstore.cluster.naming import PARTITIONS, STRIPE_BLOCKS
from kvstore.cluster.offers import Origin
from kvstore.cluster.probing import Probing
from kvstore.cluster.pulling import Pulling
from kvstore.cluster.replicating import Replicating
from kvstore.cluster.replication import HeatPolicy
from kvstore.cluster.replication import Place as Spot
from kvstore.cluster.routes import Routes
from kvstore.cluster.telling import DIGEST_S, Telling
from kvstore.errors import ConnectFailed, InvalidRequest, NamespaceMismatch, NotFound, Rejected
from kvstore.intake import part_of
from kvstore.message import Message
from kvstore.packed import unpack_keys
from kvstore.prefix import Namespace
from kvstore.store import Store
from kvstore.table import Replica
from kvstore.tasks import Tasks
from kvstore.types import DRAM, NODE, BlockKey, Cause
from kvstore.wire_cluster import (
    Announce,
    Announced,
    Discard,
    Discarded,
    Examine,
    Examined,
    Fill,
    Filled,
    Locate,
    Vacate,
    Vacated,
)

JOIN_AGAIN_S = 1.0
COMPARE_S = 8.0
DISCARD_STEP_BLOCKS = 64
SWEEP_BLOCKS = 4096
FILL_LEASE_S = 1.0
COPIED_S = 3.0  # that a commit waits for copies: less than a client waits for its answer

Answer = Message | Awaitable[Message]


@dataclass(frozen=True, slots=True)
class Options:
    """`copies`: the share of DRAM that copies of other nodes' blocks may take before they go first. `hot_copies`: of a
    hot stripe, at most; one more for each `hot_rate` blocks/s that are read of it at a holder."""

    copies: float = 0.1
    hot_copies: int = 4
    hot_rate: float = 2000.0


class Cluster:
    """`start`, then `aclose`. `tenant` finds a tenant by name; `random` gives numbers in [0, 1)."""

    def __init__(self, me: Member, store: Store, coordinator: Coordinator, links: Links, *,
                 tenant: Callable[[str], Tenant], options: Options, random: Callable[[], float], clock: Clock,
                 crashed: Callable[[BaseException], None]) -> None:  # fmt: skip
        self.me = me
        self.view = View()
        self.directory = Directory()
        self.store = store
        self._coordinator = coordinator
        self.links = links
        self._tenant = tenant
        self._tasks = Tasks(crashed)
        self._homes = Homes(())
        self._announcer = Announcer(me.name, me.epoch)
        self.rooms: dict[str, tuple[int, Announced]] = {}  # what each member said last, and in which epoch
        self._join_trouble = ""
        self._is_untidy = asyncio.Event()
        self.holdings = Holdings(store, self._announcer)
        self.routes = Routes(me.name, me.labels, clock)
        self.probing = Probing(
            *(coordinator, links, self.routes, clock), view=lambda: self.view, tasks=self._tasks, gone=self._gone
        )
        self.lost = self.probing.lost
        self.locating = Locating(
            *(me.name, self.directory, links, self.routes, clock), view=lambda: self.view, homes=lambda: self._homes
        )
        self.pulling = Pulling(
            *(links, self.locating, self.routes, self.holdings),
            view=lambda: self.view,
            random=random,
            clock=clock,
            counters=store.counters,
        )
        self.telling = Telling(
            *(me.name, self._announcer, self.holdings, self.directory, links),
            view=lambda: self.view,
            tasks=self._tasks,
            random=random,
            heard=self._heard,
            lost=self.probing.failed,
        )
        self.replicating = Replicating(
            *(me.name, store, self.holdings, self.locating, links),
            HeatPolicy(1, options.hot_copies, options.hot_rate, random),
            view=lambda: self.view,
            spots=self._spots,
            tasks=self._tasks,
            random=random,
            clock=clock,
        )
        store.table.tiers[DRAM].copy_share = options.copies
        store.listeners.append(self._changed)
        store.promotion.use_peers(self.pulling)
        store.reads.finder = self.pulling
        store.puts.begun = self.holdings.begun
        self.holdings.stored = self.replicating.stored

    # Life.

    async def start(self) -> None:
        """Become a member; in the background, where the coordinator does not answer yet. Raises ConfigError."""
        try:
            await self._coordinator.join(self.me, self._seen)
        except ConnectFailed as error:
            self._join_trouble = str(error)
            self._tasks.spawn(self._join_later())
        for job in (
            self._keep_tidy,
            self.telling.keep,
            self.telling.keep_comparing,
            self.replicating.keep_hot,
            self.replicating.keep_behind,
        ):
            self._tasks.spawn(job())
        if not self.store.demotion.is_paused:  # it was recovered before this began to listen, or has no disk
            await self.recovered()

    async def aclose(self) -> None:
        """Leave, and hang up."""
        await self._coordinator.aclose()
        await self._tasks.aclose()
        await self.links.aclose()

    async def recovered(self) -> None:
        """What an earlier start left on the disk is known now."""
        for _ in self.holdings.take_up_restored():
            self.telling.poke()
            await asyncio.sleep(0)

    async def _join_later(self) -> None:
        while self._join_trouble:
            await asyncio.sleep(JOIN_AGAIN_S)
            try:
                await self._coordinator.join(self.me, self._seen)
                self._join_trouble = ""
            except ConnectFailed as error:
                self._join_trouble = str(error)

    @property
    def trouble(self) -> str:
        """What is wrong with membership, as a sentence."""
        if self._join_trouble:
            return f"not a member yet: {self._join_trouble}"
        return self._coordinator.trouble

    @property
    def is_draining(self) -> bool:
        return self.me.condition == "draining"

    # Members.

    def _seen(self, view: View) -> None:
        before, self.view = self.view, view
        self.routes.changed(view)
        for name, member in before.members.items():
            if not view.has(name, member.epoch):
                self.directory.forget(name, member.epoch)
                self.links.close(name)
                self.rooms.pop(name, None)
                self._is_untidy.set()
        serving = [name for name, member in view.members.items() if member.condition == "serving"]
        self._homes = self._homes.changed(serving or view.members)
        epochs = {name: member.epoch for name, member in view.members.items()}
        self.telling.tell_again(self._announcer.homes_changed(self._homes, epochs))
        self.directory.keep(self._is_home)
        self.telling.poke()

    def _gone(self, member: Member) -> None:
        """Its process is gone. While nobody can be told, do without it, as all do who have a connection to it."""
        if self._coordinator.trouble and self.view.has(member.name, member.epoch):
            others = {name: other for name, other in self.view.members.items() if name != member.name}
            self._seen(View(self.view.revision, others))

    async def _keep_tidy(self) -> None:
        """Take away what is forgotten, and what came late for partitions that have another home by now."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(DIGEST_S):
                    await self._is_untidy.wait()
            self._is_untidy.clear()
            self.directory.keep(self._is_home)
            has_more = True
            while has_more:
                has_more = self.directory.sweep(SWEEP_BLOCKS)
                await asyncio.sleep(0)

    def _is_home(self, partition: int) -> bool:
        return self._homes.home(partition) == self.me.name

    def _heard(self, name: str, reply: Announced) -> None:
        member = self.view.members.get(name)
        if member is not None:
            self.routes.answered(name, 0.0)
            self.rooms[name] = member.epoch, msgspec.structs.replace(reply, sole=b"", shared=b"", differing=b"")

    def _spots(self, *, is_to_stay: bool) -> dict[str, Spot]:
        """Who has room for how much, of the members that said so."""
        spots = {}
        for name, (epoch, said) in self.rooms.items():
            if self.view.has(name, epoch) and self.routes.may_ask(name):
                member = self.view.members[name]
                free_bytes = said.room[0] if is_to_stay else said.room[1]
                spots[name] = Spot(name, free_bytes, said.load, member.labels, member.condition == "draining")
        return spots

    def _changed(self, events: Sequence[Any]) -> None:
        self.holdings.note(events)
        self.telling.poke()

    # What other nodes ask.

    def handle(self, request: Message) -> Answer:
        """The reply, or a coroutine that makes it. Raises what the request is refused with."""
        match request:
            case Announce():
                return self._announced(request)
            case Locate():
                return self.directory.locate(request)
            case Fill():
                return self._fill(request)
            case Discard():
                return self._discard(request)
            case Vacate():
                return self._vacated(request)
            case Examine():
                return self._examined(request)
        raise InvalidRequest(f"{type(request).__name__} is nothing that nodes ask of each other")

    def _announced(self, request: Announce) -> Announced:
        if not self.view.has(request.node, request.epoch):
            raise Rejected(f"{request.node}, epoch {request.epoch}, is no member as seen from {self.me.name}", 0.1)
        reply = self.directory.apply(request)
        if request.is_first:
            self._is_untidy.set()
        tier = self.store.table.tiers[DRAM]
        capacity_bytes = tier.pool.slab_bytes * len(tier.pool.slabs)
        free_bytes = max(capacity_bytes - tier.used_bytes, 0)
        copies_bytes = max(int(tier.copy_share * capacity_bytes) - tier.copy_bytes, 0)
        load = self.store.promotion.loading_bytes / self.store.limits.inflight_bytes
        return msgspec.structs.replace(
            reply,
            id=request.id,
            room=(free_bytes + tier.copy_bytes, max(free_bytes, copies_bytes)),
            load=load,
            used_bytes=tier.used_bytes,
            blocks=tier.replicas,
        )

    async def _fill(self, request: Fill) -> Filled:
        if not (0 <= request.partition < PARTITIONS and 0 <= request.position < STRIPE_BLOCKS):
            raise InvalidRequest(f"no place {request.partition}, {request.position} in the directory")
        if self.is_draining:
            raise Rejected("this node is being emptied, and takes no blocks")
        space = self.known(request.tenant, request.namespace, request.name)
        keys = unpack_keys(request.keys, space.key_bytes)
        origin = Origin(request.holder, Place(request.partition, request.position))
        parent = BlockKey(request.parent) if request.parent else None
        lease = await self.store.reads.acquire(
            *(NODE, space, keys),
            lease_s=FILL_LEASE_S,
            wait_s=0.0,
            layers=0,
            load_s=request.load_ms / 1000,
            parent=parent,
            origin=origin,
        )
        if lease is None:
            return Filled(request.id, 0)
        self.store.reads.release(NODE, lease.lease_id)
        if request.keep:
            parts = range(space.namespace.parts)
            self.holdings.keep(space, [part_of(space, key, part) for key in keys for part in parts])
        return Filled(request.id, len(lease.replicas))

    def known(self, tenant_name: str, namespace: Namespace, name: str) -> OpenNamespace:
        """The namespace of these fields, opened if need be; under its root where the name stands for something else."""
        tenant = self._tenant(tenant_name)
        try:
            return self.store.catalogue.of_fields(tenant, namespace)
        except NotFound:
            try:
                return self.store.open(tenant, name, namespace)
            except NamespaceMismatch:
                return self.store.open(tenant, namespace.root(tenant.name, tenant.secret).hex(), namespace)

    async def _discard(self, request: Discard) -> Discarded:
        """What is here now, in small steps: others are served meanwhile."""
        if request.whole and self.store.demotion.is_paused:
            raise Rejected("it is not known yet what lies on the disk: ask again")
        try:
            space = self.store.catalogue.of_fields(self._tenant(request.tenant), request.namespace)
        except NotFound:
            return Discarded(request.id, 0, 0)
        keys = unpack_keys(request.keys, space.key_bytes)
        if request.whole:
            keys = list(dict.fromkeys(key for tier_space in space.spaces for key in tier_space.replicas))[::-1]
        blocks = freed_bytes = 0
        for start in range(0, len(keys), DISCARD_STEP_BLOCKS):
            counts = self.store.discard(space, keys[start : start + DISCARD_STEP_BLOCKS], Cause.DELETED)
            blocks, freed_bytes = blocks + counts[0], freed_bytes + counts[1]
            await asyncio.sleep(0)
        return Discarded(request.id, blocks, freed_bytes)

    async def _vacated(self, request: Vacate) -> Vacated:
        return Vacated(request.id, *await self.vacate())

    async def _examined(self, request: Examine) -> Examined:
        return Examined(
            request.id, await self.problems(), {name: found.epoch for name, found in self.view.members.items()}
        )

    async def vacate(self) -> tuple[int, int]:
        """Be no home and take nothing any more, and give what only this node has to others: (moved, left)."""
        self.me = msgspec.structs.replace(self.me, condition="draining")
        await self._coordinator.update(self.me)
        await self.telling.compare(COMPARE_S)
        return await self.replicating.vacate()

    async def problems(self) -> list[str]:
        """What is wrong here: with this node, its part of the directory, and what others know of it."""
        found = await self.store.check()
        found += [f"directory: {problem}" for problem in self.directory.problems()]
        if self.trouble:
            found.append(self.trouble)
        if await self.telling.compare(COMPARE_S):
            differing = await self.telling.compare(COMPARE_S)
            if differing:
                found.append(f"{differing} partitions of the directory differ from what is here, told twice")
        return found

    def was_read(self, replicas: Sequence[Replica]) -> None:
        """Another node reads these here."""
        self.replicating.was_read(replicas)

    async def replicate(self, space: OpenNamespace, keys: Sequence[BlockKey], copies: int) -> tuple[int, int, int]:
        """See `Replicating.ensure`."""
        return await self.replicating.ensure(space, keys, copies)

    async def copied(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> None:
        """Until as many others have these as their namespace wants, or `COPIED_S`; what lacks then comes later."""
        try:
            async with asyncio.timeout(COPIED_S):
                _, _, short = await self.replicating.ensure(space, keys, space.replicas)
        except TimeoutError:
            short = len(keys)
        if short:
            self.replicating.later(space, keys)
