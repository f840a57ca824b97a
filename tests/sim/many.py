"""The directory with many nodes: what one request costs, by how many there are.

Each node has a table of the size that the trace of docs/figures.md was replayed with, and tells its homes of it; then
chains are located, and a member goes. Messages are encoded and decoded as on a network.
"""

from collections.abc import Callable, Sequence
from random import Random
from time import perf_counter
from typing import Any

from kvstore import wire
from kvstore.catalogue import Catalogue, OpenNamespace
from kvstore.clock import Clock
from kvstore.cluster.announcer import Announcer
from kvstore.cluster.directory import Directory
from kvstore.cluster.homes import Homes
from kvstore.cluster.locating import Locating, Place, stripes_of
from kvstore.cluster.members import Member, View
from kvstore.cluster.naming import names_of, partition_of
from kvstore.cluster.routes import Routes
from kvstore.message import Message
from kvstore.replica import Space
from kvstore.types import DRAM, KEY_BYTES, BlockKey
from kvstore.wire_cluster import TIER_BITS, Announce
from tests.sim.loop import SimulatedLoop, run
from tests.sim.node import SPACE, TENANT

TABLE_BLOCKS, CHAIN_BLOCKS = 5859, 537
BATCH_BLOCKS = 4096
LOCATES = 200
COLUMNS = "nodes  messages/locate  bytes/locate  us/locate  found  messages/put  moved  told anew/node  us/change"


class Direct:
    """What `Locating` asks of `Links`: the home of that name, without a network."""

    def __init__(self, directories: dict[str, Directory]) -> None:
        self._directories = directories
        self.messages = self.bytes = 0

    async def ask(self, member: Member, request: Callable[[int], Message], within_s: float) -> Any:
        sent = wire.encode(request(1))
        asked = wire.decode_request(sent[wire.HEADER.size :])
        answered = wire.encode(self._directories[member.name].locate(asked))
        self.messages += 1
        self.bytes += len(sent) + len(answered)
        return wire.decode_reply(answered[wire.HEADER.size :])


class Crowd:
    """So many nodes, with full tables and a directory that knows them."""

    def __init__(self, count: int, random: Random) -> None:
        self.names = [f"n{number}" for number in range(count)]
        self.view = View(1, {name: Member(name=name, epoch=1, address="") for name in self.names})
        self.homes = Homes(self.names)
        self.directories = {name: Directory() for name in self.names}
        self.announcers = {name: Announcer(name, 1) for name in self.names}
        catalogue = Catalogue(1, lambda tenant, number: (Space(tenant, number, DRAM),))
        self.space: OpenNamespace = catalogue.define(TENANT, "s", SPACE)[0]
        self.chains: list[list[BlockKey]] = []
        self.batches = 0
        self._blocks: dict[str, dict[int, int]] = {name: {} for name in self.names}  # name -> partition, by holder
        epochs = dict.fromkeys(self.names, 1)
        for name in self.names:
            self.announcers[name].homes_changed(self.homes, epochs)
        for name in self.names:
            for _ in range(TABLE_BLOCKS // CHAIN_BLOCKS):
                self.put(name, some_chain(random))

    def put(self, holder: str, chain: list[BlockKey]) -> int:
        """Have it stored there and announced; how many messages that took."""
        self.chains.append(chain)
        before = self.batches
        names = names_of(self.space.root, chain)
        first = Place(partition_of(self.space.root, chain[0]), 0)
        for stripe in stripes_of(self.space.root, chain, first):
            for name in names[stripe.start : stripe.end]:
                self._blocks[holder][name] = stripe.partition
                self.announcers[holder].toggle(stripe.partition, name, 1, is_there=True)
                self.announcers[holder].note(stripe.partition, name)
        self._tell(holder, {self.homes.home(stripe.partition) for stripe in stripes_of(self.space.root, chain, first)})
        return self.batches - before

    def leave(self, gone: str) -> tuple[int, int, float]:
        """(Partitions that moved, blocks that each holder told anew, seconds to decide about homes)."""
        begun = perf_counter()
        homes = self.homes.changed([name for name in self.names if name != gone])
        took_s = perf_counter() - begun
        moved = homes.moved(self.homes)
        self.homes = homes
        epochs = dict.fromkeys(homes.names, 1)
        told = 0
        for name in self.names:
            anew = self.announcers[name].homes_changed(homes, epochs)
            told += sum(partition in anew for partition in self._blocks[name].values())
        return len(moved), told // len(self.names), took_s

    async def locate(self, random: Random, clock: Clock) -> tuple[Direct, int, float]:
        """(What was sent, blocks found, seconds) of `LOCATES` chains that somebody has."""
        links = Direct(self.directories)
        found = 0
        begun = perf_counter()
        for _ in range(LOCATES):
            me = random.choice(self.names)
            chain = random.choice(self.chains)
            locating = Locating(
                *(me, self.directories[me], links, Routes(me, {}, clock), clock),
                view=lambda: self.view,
                homes=lambda: self.homes,
            )
            place = Place(partition_of(self.space.root, chain[0]), 0)
            holders = await locating.holders(self.space, chain, place)
            found += sum(map(bool, holders))
        return links, found, perf_counter() - begun

    def _tell(self, holder: str, homes: set[str]) -> None:
        announcer = self.announcers[holder]
        for home in sorted(homes):
            while announcer.waiting(home):
                batch = announcer.batch(home, _described, BATCH_BLOCKS)
                assert batch is not None
                sent: Announce = wire.decode_request(wire.encode(batch)[wire.HEADER.size :])
                announcer.answered(home, self.directories[home].apply(sent))
                self.batches += 1


def _described(name: Any) -> tuple[int, int]:
    return name, TIER_BITS[DRAM]


def some_chain(random: Random) -> list[BlockKey]:
    return [BlockKey(random.randbytes(KEY_BYTES)) for _ in range(CHAIN_BLOCKS)]


def row(count: int, seed: int) -> Sequence[float]:
    """The figures of one size, in the order of `COLUMNS`."""
    random = Random(seed)
    crowd = Crowd(count, random)

    async def located(loop: SimulatedLoop) -> tuple[Direct, int, float]:
        return await crowd.locate(random, loop)

    links, found, took_s = run(located)
    messages = crowd.put(crowd.names[0], some_chain(random))
    moved, told, change_s = crowd.leave(crowd.names[-1])
    return (
        *(count, links.messages / LOCATES, links.bytes / LOCATES, took_s / LOCATES * 1e6),
        *(found / LOCATES / CHAIN_BLOCKS, messages, moved, told, change_s * 1e6),
    )


def show(nodes: int) -> None:
    """Print a table, with 10, 100 and so on up to that many."""
    print(f"{TABLE_BLOCKS} blocks a node, chains of {CHAIN_BLOCKS} blocks")
    print(COLUMNS)
    widths = [len(column) for column in COLUMNS.replace("told anew/node", "told_anew/node").split()]
    count = 10
    while count <= nodes:
        figures = row(count, seed=count)
        shown = zip(figures, widths, strict=True)
        print(
            "  ".join(f"{figure:>{width}.{0 if figure == int(figure) else 1}f}" for figure, width in shown), flush=True
        )
        count *= 10
