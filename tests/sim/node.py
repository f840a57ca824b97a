"""Nodes of a simulated cluster: the real store and sessions, over a copier that needs no thread."""

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from kvstore import wire
from kvstore.admission import Admission
from kvstore.catalogue import Catalogue, Tenant
from kvstore.cluster.in_process import Room, RoomCoordinator
from kvstore.cluster.members import Member, View
from kvstore.cluster.service import Cluster, Options
from kvstore.copier import Copier
from kvstore.errors import Forbidden, Rejected
from kvstore.intake import Limits
from kvstore.prefix import Namespace
from kvstore.store import Below, Store
from kvstore.table import BlockTable, TierShape
from kvstore.tiers import TierSpec
from kvstore.tiers.dram import DramTier
from kvstore.types import DRAM, NVME, Owner, Placement
from kvstore.upkeep import Marks, Upkeep
from server.cluster_session import ClusterSession
from server.session import Session
from tests.sim import disks
from tests.sim.disks import SimulatedDisk
from tests.sim.loop import Process, SimulatedLoop, until
from tests.sim.network import End, Network
from tests.sim.peers import TOKEN, Served, SimulatedLinks

Result = TypeVar("Result")

SLAB_BYTES = 64 << 10
COPY_S = 50e-6  # that a copier takes for anything
INDEX_ENTRIES = 1024
LEASE_MAX_S, PUT_TIMEOUT_S, WAIT_MAX_S = 15.0, 3.0, 15.0
TENANT = Tenant("red", "secret")
SPACE = Namespace(model="m", dtype="u8", layout="x", block_tokens=16, layers=2)
JOIN_AGAIN_S = 0.5
LEAST_NODES = 2
DISK_SLABS = 8
FILLING_BYTES = 4096


class SimulatedCopier(Copier):
    """Does what it is given when its time is over."""

    def __init__(self) -> None:
        super().__init__(1)

    async def run(self, work: Callable[[], Result]) -> Result:
        await asyncio.sleep(COPY_S)
        return work()


class SimulatedCoordinator:
    """A `Coordinator` in a room whose members are processes of their own: none does another's work."""

    def __init__(self, room: Room, process: Process) -> None:
        self._seat: RoomCoordinator = Context().run(room.coordinator)
        self._process = process
        self._changed: Callable[[View], Any] = lambda view: None
        self._first: View | None = None
        self._is_joining = False

    @property
    def trouble(self) -> str:
        return self._seat.trouble

    async def join(self, member: Member, changed: Callable[[View], Any]) -> None:
        self._changed, self._is_joining = changed, True
        try:
            _apart(self._seat.join(member, self._hear))
        finally:
            self._is_joining = False
        assert self._first is not None
        changed(self._first)

    async def update(self, member: Member) -> None:
        _apart(self._seat.update(member))

    async def report_dead(self, name: str, epoch: int) -> None:
        _apart(self._seat.report_dead(name, epoch))

    async def aclose(self) -> None:
        _apart(self._seat.aclose())

    def _hear(self, view: View) -> None:
        if self._is_joining:
            self._first = view
        else:
            self._process.call(self._changed, view)


def _apart(work: Coroutine[Any, Any, None]) -> None:
    """Do what does not wait, in no process's name."""

    def drive() -> None:
        try:
            work.send(None)
        except StopIteration:
            return
        raise AssertionError("a room waits for nothing")

    Context().run(drive)


class SimulatedNode:
    """One node, which can be stopped, killed and started again; `store` and `cluster` are those of its last start."""

    def __init__(self, world: "World", name: str, slabs: int, folder: Path | None) -> None:
        self.world = world
        self.name = name
        self.slabs = slabs
        self.folder = folder
        self.disk: SimulatedDisk | None = None
        self.epoch = world.random.randrange(1, 1000)
        self.process = Process(world.loop, name)
        self.process.is_killed = True
        self.is_ready = False
        self.upset_at = 0.0  # when it was last stopped, killed or started
        self._owners = count(1)
        self._filling = Owner(0)
        self._filled: list[bytes] = []

    @property
    def is_up(self) -> bool:
        return not self.process.is_killed

    def start(self) -> None:
        """Begin anew, with what lies on its disk and nothing in memory. Does nothing when it is up."""
        if self.is_up:
            return
        self.upset()
        self.epoch += self.world.random.randrange(1, 1000)
        self.is_ready = False
        self.process = Process(self.world.loop, self.name)
        self.process.call(self._make)

    def kill(self) -> None:
        """As SIGKILL. Does nothing when it is not up."""
        if not self.is_up:
            return
        self.upset()
        self.process.kill()
        self.is_ready = False
        if self.disk is not None:
            self.disk.let_go()
        self.world.room.hang(self.name)  # nobody says goodbye
        self.world.network.killed(self.process)

    def stop(self) -> None:
        self.upset()
        self.process.stop()

    def go_on(self) -> None:
        self.upset()
        self.process.go_on()

    def upset(self) -> None:
        """From now on nobody expects of it what was begun before."""
        self.upset_at = self.world.loop.seconds

    def fill(self) -> None:
        """Take all of its memory, for somebody who writes and does not end."""
        if self.is_up and self.is_ready:
            self.process.call(self._fill)

    def drain_filling(self) -> None:
        if self.is_up and self.is_ready:
            self.process.call(lambda: self.store.end(self._filling))

    # In its process.

    def _make(self) -> None:
        loop = self.world.loop
        shapes = {DRAM: TierShape(SLAB_BYTES)} | ({NVME: disks.SHAPE} if self.folder is not None else {})
        table = BlockTable(shapes)
        catalogue = Catalogue(16, lambda tenant, number: tuple(table.space(tenant, number, tier) for tier in shapes))
        copier = SimulatedCopier()
        dram = DramTier(TierSpec(DRAM, SLAB_BYTES), copier, huge_pages="no", mlock="no", prefault=False)
        limits = Limits(
            lease_max_s=LEASE_MAX_S, put_timeout_s=PUT_TIMEOUT_S, wait_max_s=WAIT_MAX_S, inflight_bytes=1 << 20
        )
        self.disk, below = None, Below(Admission(everything=True, bytes_per_day=0, now=loop.now()))
        if self.folder is not None:
            tenants = {TENANT.name: TENANT}
            self.disk = SimulatedDisk(self.folder, loop, table, catalogue, tenants=tenants, epoch=self.epoch)
            below = replace(below, disk=self.disk.disk, records=self.disk.records)
        self.store = Store(
            *(table, catalogue, dram, copier, loop),
            limits=limits,
            index_entries=INDEX_ENTRIES,
            epoch=self.epoch,
            above=None,
            below=below,
            crashed=self._crashed,
        )
        self.world.stores.append(self.store)
        capacities = {DRAM: self.slabs * SLAB_BYTES}
        if self.disk is not None:
            capacities[NVME] = DISK_SLABS * disks.SLAB_BYTES
        self.store.demotion.is_paused = self.disk is not None
        self.upkeep = Upkeep(self.store, {tier: Marks(0.95, 0.8) for tier in capacities}, capacities)
        self.coordinator = SimulatedCoordinator(self.world.room, self.process)
        self.links = SimulatedLinks(self.world.network, self.process)
        self.cluster = Cluster(
            *(self._member(), self.store, self.coordinator, self.links),
            tenant=lambda name: TENANT,
            options=Options(copies=self.world.copies),
            random=Random(self.world.random.random()).random,
            clock=loop,
            crashed=self._crashed,
        )
        self.links.lost = self.cluster.lost
        self._spawn(self._live())

    async def _live(self) -> None:
        await self.upkeep.resize(DRAM)
        if self.disk is not None:
            await self.disk.recovery.begin()
            self._spawn(self._recover(self.disk))
        for job in self.upkeep.jobs():
            self._spawn(job())
        self.world.network.listen(self.name, self.process, lambda end: Served(end, _Door(self, end)) and None)
        await self.cluster.start()
        self.is_ready = True

    async def _recover(self, disk: SimulatedDisk) -> None:
        await disk.recovery.load(self.store.expire)
        await self.upkeep.make_first_slabs()
        self.store.demotion.is_paused = False
        await self.cluster.recovered()

    def _member(self) -> Member:
        return Member(
            name=self.name, epoch=self.epoch, address=f"tcp://{self.name}:1", capacity_bytes=self.slabs * SLAB_BYTES
        )

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self.process.spawn(work).add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crashed(error)

    def _crashed(self, error: BaseException | None) -> None:
        story = "".join(traceback.format_exception(error)) if error is not None else ""
        self.world.loop.crash = self.world.loop.crash or f"{self.name} crashed: {story}"

    def session(self, *, is_peer: bool) -> Session:
        tenant = replace(TENANT, may_write=not is_peer)
        return Session(
            *(self.store, self.upkeep, tenant, Owner(next(self._owners)), "peer" if is_peer else "tcp"),
            cluster=self.cluster,
            is_peer=is_peer,
        )

    def _fill(self) -> None:
        """All that is free and can be evicted."""
        self.store.end(self._filling)
        self._filling = Owner(next(self._owners))
        space = self.store.open(
            TENANT, "filling", Namespace(model="f", dtype="u8", layout="x", block_tokens=1, layers=1)
        )
        while True:
            key = space.root[:8] + self.world.random.randbytes(8)
            try:
                placing = self.store.puts.place(self._filling, space, [key], None, [FILLING_BYTES])
                self.store.puts.granted(self._filling, space, [key], placing)
            except Rejected:
                break
            if placing.placements != [Placement.GRANTED]:
                break


class _Door:
    """Who may come in at a node."""

    def __init__(self, node: SimulatedNode, end: End) -> None:
        self._node = node
        self._end = end

    def welcome(self, hello: Any) -> tuple[Any, wire.Welcome]:
        node = self._node
        if not isinstance(hello, wire.Hello) or hello.token not in (TOKEN, TENANT.name):
            raise Forbidden("the token is missing or wrong")
        is_control = hello.token == TOKEN and not hello.tenant
        session = (
            ClusterSession(node.cluster, node.store.counters)
            if is_control
            else node.session(is_peer=hello.token == TOKEN)
        )
        tenant = hello.tenant if hello.token == TOKEN else TENANT.name
        welcome = wire.Welcome(
            hello.id, wire.PROTOCOL, node.name, node.epoch, tenant, b"", True, False, SLAB_BYTES, 16_384, 64 << 20
        )
        return session, welcome


class World:
    """All nodes of a simulated cluster, and what is between them; `random` decides about everything."""

    def __init__(self, loop: SimulatedLoop, seed: int, *, nodes: int, slabs: int, folder: Path | None = None) -> None:
        self.loop = loop
        self.random = Random(seed)
        self.network = Network(loop, Random(seed + 1))
        room_random = Random(seed + 2)
        self.room = Room(lambda: room_random.uniform(0.0, 0.05))
        self.copies = self.random.choice((0.0, 0.1, 0.5, 1.0))
        self.stores: list[Store] = []
        self.nodes: dict[str, SimulatedNode] = {}
        for name in (f"n{number}" for number in range(nodes)):
            self.nodes[name] = SimulatedNode(self, name, slabs, folder / name if folder is not None else None)

    async def start(self) -> None:
        for node in self.nodes.values():
            node.start()
        await self.ready()

    async def ready(self) -> None:
        """Until all nodes are up and serve."""
        await until(lambda: all(node.is_ready for node in self.nodes.values()), 0.01)

    def close(self) -> None:
        """Give their memory back, dead or alive."""
        for node in self.nodes.values():
            node.kill()
        for store in self.stores:
            store.exports.close()
            with suppress(StopIteration):
                store.dram.aclose().send(None)
            store.copier.close()
