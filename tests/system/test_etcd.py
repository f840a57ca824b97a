"""Membership over a real etcd: the contract, etcd's faults, and nodes that are busy or die."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from kvstore.cluster.coordinator import Coordinator
from kvstore.cluster.etcd import LEAVE_S, EtcdCoordinator
from kvstore.cluster.members import DEAD_S, Member
from kvstore.errors import ConfigError, ConnectFailed
from tests.cluster_etcd import Cable, EtcdProcess
from tests.coordinator_contract import (
    ONE,
    THREE,
    TWO,
    CoordinatorContract,
    Listener,
    World,
    joined,
    member,
    until,
)
from tests.system.nodes import free_port, pause

PREFIXES = count()


class EtcdWorld:
    """Each name's coordinators go through a cable of their own; `straight` ones do not, and outlive a busy loop."""

    def __init__(self, etcd: EtcdProcess) -> None:
        self.etcd = etcd
        self._prefix = f"test-{next(PREFIXES)}"
        self._cables = {name: Cable(etcd.endpoint) for name in ("one", "two", "three")}
        self._made: list[Coordinator] = []

    async def __aenter__(self) -> "EtcdWorld":
        self._endpoints = {name: await cable.open() for name, cable in self._cables.items()}
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(coordinator.aclose() for coordinator in self._made))
        await asyncio.gather(*(cable.aclose() for cable in self._cables.values()))

    def coordinator(self, name: str) -> EtcdCoordinator:
        return self._make([self._endpoints[name]])

    def straight(self, *others: tuple[str, int]) -> EtcdCoordinator:
        """Tries the `others` first."""
        return self._make([*others, self.etcd.endpoint])

    def cut(self, name: str) -> None:
        self._cables[name].cut()

    async def break_off(self, name: str) -> None:
        await self._cables[name].break_off()

    def heal(self, name: str) -> None:
        self._cables[name].heal()

    def _make(self, endpoints: list[tuple[str, int]]) -> EtcdCoordinator:
        made = EtcdCoordinator(endpoints, self._prefix)
        self._made.append(made)
        return made


def in_world(etcd: EtcdProcess, work: Callable[[EtcdWorld], Awaitable[None]]) -> None:
    async def run() -> None:
        async with EtcdWorld(etcd) as world:
            await work(world)

    asyncio.run(run())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    etcd = EtcdProcess(tmp_path_factory.mktemp("etcd")).start()
    yield etcd
    etcd.kill()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EtcdProcess]:
    """One that a test may kill."""
    etcd = EtcdProcess(tmp_path).start()
    yield etcd
    etcd.kill()


class TestEtcd(CoordinatorContract):
    @pytest.fixture(autouse=True)
    def etcd(self, shared: EtcdProcess) -> None:
        self._etcd = shared

    def work(self, work: Callable[[World], Awaitable[None]]) -> None:
        in_world(self._etcd, work)


async def two_joined(world: EtcdWorld) -> tuple[list[EtcdCoordinator], list[Listener]]:
    coordinators, listeners = [world.straight(), world.straight()], [Listener(), Listener()]
    for coordinator, of, listener in zip(coordinators, (ONE, TWO), listeners, strict=True):
        await coordinator.join(of, listener)
    await listeners[0].until_seen(ONE, TWO)
    return coordinators, listeners


async def until_troubled(coordinators: list[EtcdCoordinator]) -> None:
    await until(lambda: all(coordinator.trouble for coordinator in coordinators))


async def until_well(coordinators: list[EtcdCoordinator]) -> None:
    await until(lambda: not any(coordinator.trouble for coordinator in coordinators))


def never_lost(listeners: list[Listener], *members: Member) -> bool:
    """Whether each, once it saw these members, saw them in all its views."""
    wanted = {member.name for member in members}
    seen = [[wanted <= view.members.keys() for view in listener.views] for listener in listeners]
    return all(views == sorted(views) and views[-1] for views in seen)


def test_etcd_killed_and_started_again_with_its_data_changes_no_view(own):
    async def work(world: EtcdWorld) -> None:
        coordinators, listeners = await two_joined(world)
        own.kill()
        await until_troubled(coordinators)
        assert "since" in coordinators[0].trouble
        await asyncio.sleep(DEAD_S + 1)
        await asyncio.to_thread(own.start)
        await until_well(coordinators)
        third = Listener()
        await world.straight().join(THREE, third)
        for listener in listeners:
            await listener.until_seen(ONE, TWO, THREE)
        await asyncio.sleep(DEAD_S + 1)
        assert third.sees(ONE, TWO, THREE)
        assert never_lost(listeners, ONE, TWO)

    in_world(own, work)


def test_etcd_that_lost_its_data_is_told_again_and_the_view_stays(own):
    async def work(world: EtcdWorld) -> None:
        coordinators, listeners = await two_joined(world)
        before = listeners[0].view.revision
        own.kill()
        await until_troubled(coordinators)
        own.forget()
        await asyncio.to_thread(own.start)
        await until_well(coordinators)
        await asyncio.sleep(DEAD_S + 1)
        third = Listener()
        await world.straight().join(THREE, third)
        for listener in listeners:
            await listener.until_seen(ONE, TWO, THREE)
            assert listener.view.revision > before
        assert never_lost(listeners, ONE, TWO)

    in_world(own, work)


def test_etcd_hung_for_longer_than_leases_last_ends_none_for_those_who_saw_it(own):
    async def work(world: EtcdWorld) -> None:
        coordinators, listeners = await two_joined(world)
        own.stop()
        await until_troubled(coordinators)
        await asyncio.sleep(5)
        own.go_on()
        await until_well(coordinators)
        await asyncio.sleep(DEAD_S + 1)
        third = Listener()
        await world.straight().join(THREE, third)
        await third.until_seen(ONE, TWO, THREE)
        for listener in listeners:
            await listener.until_seen(ONE, TWO, THREE)
        assert never_lost(listeners, ONE, TWO)

    in_world(own, work)


def test_a_hung_etcd_holds_up_neither_leaving_nor_failing_to_join(own):
    async def work(world: EtcdWorld) -> None:
        loop = asyncio.get_running_loop()
        coordinators, _ = await two_joined(world)
        threads = threading.active_count()
        own.stop()
        since = loop.time()
        await asyncio.gather(*(coordinator.aclose() for coordinator in coordinators))
        assert loop.time() - since < LEAVE_S + 1
        await until(lambda: threading.active_count() <= threads - 2)
        with pytest.raises(ConnectFailed, match=str(own.port)):
            await world.straight().join(THREE, Listener())
        assert loop.time() - since < 15
        own.go_on()

    in_world(own, work)


def test_a_node_whose_loop_is_busy_stays_a_member(shared):
    async def work(world: EtcdWorld) -> None:
        _, listeners = await two_joined(world)
        pause(DEAD_S + 1)
        third = Listener()
        await world.straight().join(THREE, third)
        assert third.sees(ONE, TWO, THREE)
        for listener in listeners:
            await listener.until_seen(ONE, TWO, THREE)
        assert never_lost(listeners, ONE, TWO)

    in_world(shared, work)


def test_the_next_endpoint_is_asked_where_one_refuses_and_one_hangs(shared, tmp_path):
    async def work(world: EtcdWorld) -> None:
        hung = EtcdProcess(tmp_path).start()
        hung.stop()
        try:
            heard = Listener()
            await world.straight(("127.0.0.1", free_port()), hung.endpoint).join(ONE, heard)
            assert heard.sees(ONE)
        finally:
            hung.kill()

    in_world(shared, work)


def test_changes_during_an_outage_are_seen_after_it_though_etcd_has_compacted_them(own):
    async def work(world: EtcdWorld) -> None:
        one, at_one = await joined(world, ONE)
        two, _ = await joined(world, TWO)
        await at_one.until_seen(ONE, TWO)
        world.cut("one")
        await until(lambda: bool(one.trouble))
        for size in range(50):
            await two.update(member("two", capacity_bytes=size))
        changed = member("two", capacity_bytes=50)
        await two.update(changed)
        await joined(world, THREE)
        await asyncio.to_thread(own.compact)
        world.heal("one")
        await at_one.until_seen(ONE, changed, THREE)

    in_world(own, work)


def test_connections_that_break_lose_no_change(shared):
    async def work(world: EtcdWorld) -> None:
        _, at_one = await joined(world, ONE)
        two, _ = await joined(world, TWO)
        for size in range(20):
            await two.update(member("two", capacity_bytes=size))
            await world.break_off("one")
            await asyncio.sleep(0.1 * (size % 4))
        await at_one.until_seen(ONE, member("two", capacity_bytes=19))
        await asyncio.sleep(DEAD_S)
        assert never_lost([at_one], ONE, TWO)

    in_world(shared, work)


def test_who_is_reported_dead_again_and_again_objects_ever_more_slowly(shared):
    async def work(world: EtcdWorld) -> None:
        loop = asyncio.get_running_loop()
        (_, two), (_, at_two) = await two_joined(world)
        absences_s = []
        for _ in range(3):
            await two.report_dead("one", 1)
            await at_two.until_seen(TWO)
            since = loop.time()
            await at_two.until_seen(ONE, TWO)
            absences_s.append(loop.time() - since)
        assert absences_s[0] < 1
        assert absences_s[2] > 1

    in_world(shared, work)


def test_a_start_whose_place_a_later_one_took_says_so_and_returns_when_that_is_gone(shared):
    async def work(world: EtcdWorld) -> None:
        first, heard = world.straight(), Listener()
        await first.join(ONE, heard)
        again = member("one", 2)
        second = world.straight()
        await second.join(again, Listener())
        await heard.until_seen(again)
        await until(lambda: "epoch 2" in first.trouble)
        with pytest.raises(ConfigError):
            await world.straight().join(again, Listener())
        assert heard.sees(again)
        await second.aclose()
        await heard.until_seen(ONE)
        await until_well([first])

    in_world(shared, work)


def test_a_join_that_is_cancelled_leaves_no_thread(own):
    async def work(world: EtcdWorld) -> None:
        threads = threading.active_count()
        own.stop()
        joining = asyncio.ensure_future(world.straight().join(ONE, Listener()))
        await asyncio.sleep(0.5)
        joining.cancel()
        await asyncio.wait([joining])
        assert joining.cancelled()
        await until(lambda: threading.active_count() <= threads)
        own.go_on()

    in_world(own, work)
