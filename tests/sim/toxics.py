"""What goes wrong in a simulated cluster, by name. Each goes on for a while, and is well again when it ends."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

from tests.sim.loop import until
from tests.sim.network import Way, pairs

if TYPE_CHECKING:
    from tests.sim.node import World

LEAST_S, MOST_S = 0.2, 8.0  # that something goes on; a member is dead after 3 s of silence
SLOW_BYTES_PER_S = 4e6
LATE_S = 0.4


def how_long(random: Random) -> float:
    return random.uniform(LEAST_S, MOST_S)


def some_way(world: "World", random: Random) -> tuple[str, str]:
    return random.choice(pairs(list(world.nodes)))


@contextmanager
def changed(way: Way, **fields: float) -> Iterator[None]:
    """Of several changes of one field the last that has not ended counts."""
    for name, value in fields.items():
        way.changes.setdefault(name, [getattr(way, name)]).append(value)
        setattr(way, name, value)
    yield
    for name, value in fields.items():
        values = way.changes[name]
        values.remove(value)
        setattr(way, name, values[-1])


async def delay(world: "World", random: Random) -> None:
    with changed(world.network.way(*some_way(world, random)), latency_s=random.uniform(0.005, LATE_S), jitter_s=LATE_S):
        await asyncio.sleep(how_long(random))


async def slow_link(world: "World", random: Random) -> None:
    way = world.network.way(*some_way(world, random))
    with changed(way, bytes_per_s=SLOW_BYTES_PER_S * random.random() + 1e5):
        await asyncio.sleep(how_long(random))
    way.free_at = 0.0


async def drop(world: "World", random: Random) -> None:
    """Connections between two hosts break, again and again."""
    one, other = some_way(world, random)
    for _ in range(random.randrange(1, 6)):
        world.network.break_between(one, other)
        await asyncio.sleep(random.expovariate(5.0))


async def duplicate(world: "World", random: Random) -> None:
    with changed(world.network.way(*some_way(world, random)), duplicated=random.random()):
        await asyncio.sleep(how_long(random))


async def reorder(world: "World", random: Random) -> None:
    with changed(world.network.way(*some_way(world, random)), late=random.random()):
        await asyncio.sleep(how_long(random))


async def bit_flip(world: "World", random: Random) -> None:
    with changed(world.network.way(*some_way(world, random)), flipped=random.random()):
        await asyncio.sleep(how_long(random))


async def cut_one_way(world: "World", random: Random) -> None:
    one, other = some_way(world, random)
    world.network.cut(one, other)
    await asyncio.sleep(how_long(random))
    world.network.mend(one, other)


async def cut_both_ways(world: "World", random: Random) -> None:
    """Between one node and some others."""
    one = random.choice(list(world.nodes))
    others = [name for name in world.nodes if name != one and random.random() < 0.7]
    ways = [(one, other) for other in others] + [(other, one) for other in others]
    for way in ways:
        world.network.cut(*way)
    await asyncio.sleep(how_long(random))
    for way in ways:
        world.network.mend(*way)


async def hang(world: "World", random: Random) -> None:
    """As SIGSTOP does. Its heartbeats are missing too, unless something else sends them."""
    node = world.nodes[random.choice(list(world.nodes))]
    process = node.process
    if not node.is_up or process.is_stopped:
        return
    node.stop()
    if is_silent := random.random() < 0.5:
        world.room.hang(node.name)
    await asyncio.sleep(how_long(random))
    if node.process is process and node.is_up:
        if is_silent:
            world.room.heal(node.name)
        node.go_on()


async def kill(world: "World", random: Random) -> None:
    """As SIGKILL does, between any two steps of it; it is started again, with nothing in memory."""
    node = world.nodes[random.choice(list(world.nodes))]
    if not node.is_up or node.process.is_stopped:
        return
    node.process.after(random.randrange(1, 2000), node.kill)
    await asyncio.sleep(how_long(random))
    node.kill()
    await asyncio.sleep(random.choice((0.0, 0.5, how_long(random))))
    node.start()


async def drain(world: "World", random: Random) -> None:
    """A node gives its blocks to others, is shut down, and comes back."""
    node = world.nodes[random.choice(list(world.nodes))]
    if not node.is_ready or node.process.is_stopped:
        return
    process = node.process
    draining = process.spawn(node.cluster.vacate())
    await asyncio.wait([draining], timeout=MOST_S)
    if node.process is process:
        node.kill()
        await asyncio.sleep(how_long(random))
        node.start()


async def cut_coordinator(world: "World", random: Random) -> None:
    node = world.nodes[random.choice(list(world.nodes))]
    world.room.cut(node.name)
    await asyncio.sleep(how_long(random))
    await until(lambda: node.is_up and not node.process.is_stopped, LEAST_S)
    world.room.heal(node.name)


async def full_node(world: "World", random: Random) -> None:
    """Somebody pins what takes all of its memory."""
    node = world.nodes[random.choice(list(world.nodes))]
    node.fill()
    await asyncio.sleep(how_long(random))
    node.drain_filling()


Toxic = Callable[["World", Random], Awaitable[None]]
TOXICS: dict[str, Toxic] = {
    "delay": delay,
    "slow link": slow_link,
    "drop": drop,
    "duplicate": duplicate,
    "reorder": reorder,
    "bit flip": bit_flip,
    "cut one way": cut_one_way,
    "cut both ways": cut_both_ways,
    "hang": hang,
    "kill": kill,
    "drain": drain,
    "cut coordinator": cut_coordinator,
    "full node": full_node,
}
