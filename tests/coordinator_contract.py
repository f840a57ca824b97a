"""What every coordinator promises, as a test class to inherit."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import pytest

from kvstore.cluster.coordinator import Coordinator
from kvstore.cluster.members import DEAD_S, HEARTBEAT_S, Member, View
from kvstore.errors import ConfigError, ConnectFailed

PATIENCE_S = 20.0


def member(name: str, epoch: int = 1, capacity_bytes: int = 1 << 30) -> Member:
    labels = {"zone": "z1", "rack": "r2"}
    return Member(name=name, epoch=epoch, address=f"tcp://{name}:7070", capacity_bytes=capacity_bytes, labels=labels)


class Listener:
    """Keeps the views that a member hears."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self._news = asyncio.Event()

    def __call__(self, view: View) -> None:
        self.views.append(view)
        self._news.set()

    @property
    def view(self) -> View:
        return self.views[-1]

    def sees(self, *members: Member) -> bool:
        return dict(self.view.members) == {member.name: member for member in members}

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until a view is heard after which `condition` holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def until_seen(self, *members: Member) -> None:
        try:
            await self.until(lambda: self.sees(*members))
        except TimeoutError:
            pytest.fail(f"sees {dict(self.view.members)}, and not {members}")


class World(Protocol):
    """A place where coordinators meet, and the network between it and each of them."""

    def coordinator(self, name: str) -> Coordinator: ...

    def cut(self, name: str) -> None: ...

    def heal(self, name: str) -> None: ...


Work = Callable[[World], Awaitable[None]]
ONE, TWO, THREE = member("one"), member("two"), member("three")


async def joined(world: World, of: Member) -> tuple[Coordinator, Listener]:
    coordinator, listener = world.coordinator(of.name), Listener()
    await coordinator.join(of, listener)
    return coordinator, listener


async def until(condition: Callable[[], bool]) -> None:
    """Looks now and then, for what no view tells."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


class CoordinatorContract:
    """Inherit it as `Test...` and say how a world is made, worked in, and left without members."""

    def work(self, work: Work) -> None:
        raise AssertionError("the class that inherits says how")

    def test_who_joins_has_heard_a_view_with_itself_in_it(self):
        async def work(world: World) -> None:
            coordinator, heard = await joined(world, ONE)
            assert heard.sees(ONE)
            assert heard.view.has("one", 1)
            assert not coordinator.trouble

        self.work(work)

    def test_two_see_each_other_and_then_that_one_has_left(self):
        async def work(world: World) -> None:
            _, at_one = await joined(world, ONE)
            two, at_two = await joined(world, TWO)
            assert at_two.sees(ONE, TWO)
            await at_one.until_seen(ONE, TWO)
            await two.aclose()
            await two.aclose()
            await at_one.until_seen(ONE)

        self.work(work)

    def test_who_is_late_sees_all_at_once(self):
        async def work(world: World) -> None:
            for early in (ONE, TWO):
                await joined(world, early)
            _, at_three = await joined(world, THREE)
            assert at_three.views[0] == at_three.view
            assert at_three.sees(ONE, TWO, THREE)

        self.work(work)

    def test_what_a_member_says_anew_is_heard_by_all(self):
        async def work(world: World) -> None:
            one, at_one = await joined(world, ONE)
            _, at_two = await joined(world, TWO)
            grown = member("one", capacity_bytes=2 << 30)
            await one.update(grown)
            await at_two.until_seen(grown, TWO)
            await at_one.until_seen(grown, TWO)

        self.work(work)

    def test_views_come_in_the_order_of_their_revisions(self):
        async def work(world: World) -> None:
            one, at_one = await joined(world, ONE)
            for size in range(10):
                await one.update(member("one", capacity_bytes=size))
                two, _ = await joined(world, TWO)
                await two.aclose()
            await joined(world, THREE)
            await at_one.until_seen(member("one", capacity_bytes=9), THREE)
            revisions = [view.revision for view in at_one.views]
            assert revisions == sorted(set(revisions))

        self.work(work)

    def test_a_name_that_lives_is_refused_to_the_same_and_to_an_older_start(self):
        async def work(world: World) -> None:
            _, heard = await joined(world, member("one", 5))
            for epoch in (5, 4):
                with pytest.raises(ConfigError, match="one"):
                    await joined(world, member("one", epoch))
            assert heard.sees(member("one", 5))

        self.work(work)

    def test_a_later_start_takes_the_place_of_one_that_died_unheard(self):
        async def work(world: World) -> None:
            _, at_two = await joined(world, TWO)
            await joined(world, ONE)
            again = member("one", 2)
            await joined(world, again)
            await at_two.until_seen(TWO, again)

        self.work(work)

    def test_who_is_silent_is_gone_and_joins_again_by_itself(self):
        async def work(world: World) -> None:
            loop = asyncio.get_running_loop()
            one, at_one = await joined(world, ONE)
            _, at_two = await joined(world, TWO)
            await at_one.until_seen(ONE, TWO)
            world.cut("one")
            since = loop.time()
            await at_two.until_seen(TWO)
            assert loop.time() - since > DEAD_S - 2 * HEARTBEAT_S
            await until(lambda: bool(one.trouble))
            assert at_one.sees(ONE, TWO), "out of touch, the last view stays"
            world.heal("one")
            await at_two.until_seen(ONE, TWO)
            await until(lambda: not one.trouble)
            assert at_one.sees(ONE, TWO)

        self.work(work)

    def test_what_happens_while_out_of_touch_is_said_and_heard_on_return(self):
        async def work(world: World) -> None:
            one, at_one = await joined(world, ONE)
            two, _ = await joined(world, TWO)
            await at_one.until_seen(ONE, TWO)
            world.cut("one")
            await until(lambda: bool(one.trouble))
            grown = member("one", capacity_bytes=2 << 30)
            await one.update(grown)
            await two.aclose()
            _, at_three = await joined(world, THREE)
            assert not at_three.sees(grown, THREE)
            world.heal("one")
            await at_three.until_seen(grown, THREE)
            await at_one.until_seen(grown, THREE)

        self.work(work)

    def test_who_is_reported_dead_and_lives_objects(self):
        async def work(world: World) -> None:
            _, at_one = await joined(world, ONE)
            two, at_two = await joined(world, TWO)
            await two.report_dead("one", 1)
            await at_two.until(lambda: not all(view.has("one", 1) for view in at_two.views))
            await at_two.until_seen(ONE, TWO)
            await at_one.until_seen(ONE, TWO)

        self.work(work)

    def test_who_is_reported_dead_and_is_silent_is_gone_before_its_time(self):
        async def work(world: World) -> None:
            loop = asyncio.get_running_loop()
            await joined(world, ONE)
            two, at_two = await joined(world, TWO)
            world.cut("one")
            since = loop.time()
            await two.report_dead("one", 1)
            await at_two.until_seen(TWO)
            assert loop.time() - since < DEAD_S - HEARTBEAT_S

        self.work(work)

    def test_a_report_of_another_start_changes_nothing(self):
        async def work(world: World) -> None:
            await joined(world, member("one", 2))
            two, at_two = await joined(world, TWO)
            await two.report_dead("one", 1)
            await two.report_dead("nobody", 1)
            grown = member("two", capacity_bytes=1)
            await two.update(grown)
            await at_two.until_seen(member("one", 2), grown)
            assert all(view.has("one", 2) for view in at_two.views)

        self.work(work)

    def test_nobody_to_join_is_said_in_time(self):
        async def work(world: World) -> None:
            world.cut("one")
            with pytest.raises(ConnectFailed):
                await joined(world, ONE)

        self.work(work)
