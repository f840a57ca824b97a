"""The room that members of one process meet in: the contract in virtual time, delays, and nodes that hang."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvstore.cluster import etcd
from kvstore.cluster.etcd import EtcdCoordinator
from kvstore.cluster.in_process import Room, RoomCoordinator
from kvstore.cluster.members import DEAD_S
from kvstore.errors import ConfigError
from tests.coordinator_contract import ONE, THREE, TWO, CoordinatorContract, World, joined, member


class VirtualTime(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer whenever nothing else is to do."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        wait = self._selector.select

        def select(timeout: float | None) -> Any:
            assert timeout is not None, "waits for ever"
            self._now += timeout
            return wait(0)

        self._selector.select = select

    def time(self) -> float:
        return self._now


class RoomWorld:
    def __init__(self, room: Room) -> None:
        self.room = room
        self.cut, self.heal = room.cut, room.heal

    def coordinator(self, name: str) -> RoomCoordinator:
        return self.room.coordinator()


def in_room(work: Callable[[RoomWorld], Awaitable[None]], delay_s: Callable[[], float] = lambda: 0.0) -> None:
    async def run() -> None:
        await work(RoomWorld(Room(delay_s)))

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(run())


class TestRoom(CoordinatorContract):
    def work(self, work: Callable[[World], Awaitable[None]]) -> None:
        in_room(work)


class TestRoomWithDelays(CoordinatorContract):
    def work(self, work: Callable[[World], Awaitable[None]]) -> None:
        delays_s = (delay for _ in range(10_000) for delay in (0.3, 0.0, 0.1))
        in_room(work, lambda: next(delays_s))


def test_a_hung_node_is_gone_after_its_silence_without_knowing_it_and_joins_again_when_it_goes_on():
    async def work(world: RoomWorld) -> None:
        one, at_one = await joined(world, ONE)
        _, at_two = await joined(world, TWO)
        await at_one.until_seen(ONE, TWO)
        world.room.hang("one")
        await asyncio.sleep(DEAD_S - 0.1)
        assert at_two.sees(ONE, TWO)
        await at_two.until_seen(TWO)
        await joined(world, THREE)
        assert not one.trouble
        assert at_one.sees(ONE, TWO)
        world.heal("one")
        await at_one.until_seen(ONE, TWO, THREE)
        await at_two.until_seen(ONE, TWO, THREE)

    in_room(work)


def test_a_short_silence_is_not_noticed():
    async def work(world: RoomWorld) -> None:
        await joined(world, ONE)
        _, at_two = await joined(world, TWO)
        for _ in range(5):
            world.room.hang("one")
            await asyncio.sleep(DEAD_S - 0.1)
            world.heal("one")
        await asyncio.sleep(2 * DEAD_S)
        assert at_two.sees(ONE, TWO)
        assert len(at_two.views) == 1

    in_room(work)


def test_the_next_start_of_a_hung_node_does_not_hang_and_outlives_the_silence_of_the_first():
    async def work(world: RoomWorld) -> None:
        _, at_two = await joined(world, TWO)
        await joined(world, ONE)
        world.room.hang("one")
        await asyncio.sleep(1)
        again = member("one", 2)
        _, at_one = await joined(world, again)
        await asyncio.sleep(2 * DEAD_S)
        assert at_one.sees(again, TWO)
        assert at_two.sees(again, TWO)

    in_room(work)


def test_who_leaves_while_cut_off_is_gone_after_its_silence():
    async def work(world: RoomWorld) -> None:
        one, _ = await joined(world, ONE)
        _, at_two = await joined(world, TWO)
        world.cut("one")
        await one.aclose()
        assert at_two.sees(ONE, TWO)
        await asyncio.sleep(DEAD_S + 0.1)
        assert at_two.sees(TWO)
        world.heal("one")
        await asyncio.sleep(1)
        assert at_two.sees(TWO)

    in_room(work)


def test_the_same_events_give_the_same_views():
    def views() -> list[Any]:
        heard: list[Any] = []

        async def work(world: RoomWorld) -> None:
            loop = asyncio.get_running_loop()
            for name in "abcdef":
                coordinator = world.coordinator(name)
                await coordinator.join(member(name), lambda view: heard.append((loop.time(), view)))
                world.cut(name)
                await asyncio.sleep(1)
            world.heal("c")
            await asyncio.sleep(10)

        in_room(work)
        return heard

    assert views() == views()


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(etcd, "FAILURES", ())
    with pytest.raises(ConfigError, match=r"cairn-kv\[cluster\]"):
        EtcdCoordinator([("127.0.0.1", 2379)], "cairn")
