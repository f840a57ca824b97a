"""A node whose peers are doubles: they do what a test says, over a store whose threads and clock do so too."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from kvstore.catalogue import OpenNamespace
from kvstore.cluster.batches import pack
from kvstore.cluster.directory import Directory
from kvstore.cluster.in_process import Room
from kvstore.cluster.links import Lease
from kvstore.cluster.locating import Place, stripes_of
from kvstore.cluster.members import Member
from kvstore.cluster.naming import names_of, partition_of
from kvstore.cluster.service import Cluster, Options
from kvstore.copier import checksum
from kvstore.message import Message
from kvstore.types import BlockKey
from kvstore.wire_cluster import Announce, Locate
from tests.tiered_store import TieredStore, block_of, chain_keys, tiered_stores

SIZE = 1000
Make = Callable[..., "Node"]


class Peers:
    """Other nodes, as `Links`: what they hold, and what they do about it."""

    def __init__(self) -> None:
        self.directories = {"b": Directory(), "c": Directory()}
        self.blocks: dict[str, dict[BlockKey, bytes]] = {}
        self.leases: list[Lease] = []
        self.leased: list[tuple[str, float, float]] = []  # every lease that was asked for: node, lease_s, load_s
        self.asked: list[Message] = []
        self.reports = 0
        self.read_from: list[str] = []
        self.sizes: Callable[[list[int]], list[int]] = lambda sizes: sizes
        self.reply: Callable[[Member, Message], Message | None] = lambda member, message: None
        self.before_lease: Callable[[Member, float], Any] = nothing
        self.before_ask: Callable[[Member, Message], Any] = nothing
        self.before_read: Callable[[Member], Any] = nothing

    async def ask(self, member: Member, request: Callable[[int], Message], within_s: float) -> Any:
        message = request(1)
        self.asked.append(message)
        await self.before_ask(member, message)
        await asyncio.sleep(0)
        reply = self.reply(member, message)
        if reply is not None:
            return reply
        if isinstance(message, Announce):
            return self.directories[member.name].apply(message)
        assert isinstance(message, Locate)
        return self.directories[member.name].locate(message)

    async def lease(
        self, member: Member, space: OpenNamespace, keys: Sequence[BlockKey], *, lease_s: float, load_s: float
    ) -> Lease | None:
        self.leased.append((member.name, lease_s, load_s))
        await self.before_lease(member, load_s)
        blocks = self.blocks.get(member.name, {})
        here = []
        for key in keys:
            if key not in blocks:
                break
            here.append(key)
        if not here:
            return None
        sizes = self.sizes([len(blocks[key]) for key in here])
        lease = Lease(member, space, tuple(here), sizes, [checksum(blocks[key]) for key in here], None)
        self.leases.append(lease)
        return lease

    async def read(self, lease: Lease, start: int, views: Sequence[memoryview], within_s: float) -> list[int]:
        self.read_from.append(lease.member.name)
        await self.before_read(lease.member)
        found = []
        for key, view in zip(lease.keys[start:], views, strict=False):
            block = self.blocks[lease.member.name][key]
            view[:] = block[: len(view)]
            found.append(checksum(view))
        return found

    def report(self, lease: Lease, key: BlockKey) -> None:
        self.reports += 1

    def release(self, lease: Lease) -> None:
        self.leases.remove(lease)

    def close(self, name: str) -> None:
        pass

    async def aclose(self) -> None:
        pass


async def nothing(*_: Any) -> None:
    pass


class Node:
    """A node of a cluster with members b and c, which are doubles."""

    def __init__(self, store: TieredStore, *, is_started: bool = True) -> None:
        self.store = store
        self.peers = Peers()
        self.crashes: list[BaseException] = []
        self.room = Room()
        self.others = {name: Member(name=name, epoch=1, address=f"tcp://{name}:1") for name in ("b", "c")}
        self.seats = {name: self.room.coordinator() for name in self.others}
        for name, member in self.others.items():
            store.run(self.seats[name].join(member, lambda view: None))
        self.cluster: Cluster = store.call(self._made)
        if is_started:
            self.start()

    def _made(self) -> Cluster:
        return Cluster(
            *(Member(name="a", epoch=1, address="tcp://a:1"), self.store.store, self.room.coordinator(), self.peers),
            tenant=self.store.tenants.__getitem__,
            options=Options(),
            random=Random(1).random,
            clock=self.store.loop,
            crashed=self.crashes.append,
        )

    def start(self) -> None:
        self.store.run(self.cluster.start())
        self.store.advance(0.1)

    def close(self) -> None:
        self.store.run(self.cluster.aclose())
        assert self.crashes == []
        assert self.peers.leases == []

    def has(self, name: str, space: OpenNamespace, keys: Sequence[BlockKey], blocks: Sequence[bytes]) -> None:
        """Another node has these, a chain from its first block, and its homes know."""
        self.peers.blocks.setdefault(name, {}).update(zip(keys, blocks, strict=True))
        self.told(name, space, keys)

    def told(self, name: str, space: OpenNamespace, keys: Sequence[BlockKey], tiers: int = 2) -> None:
        partitions = []
        for stripe in stripes_of(space.root, keys, Place(partition_of(space.root, keys[0]), 0)):
            partitions += [stripe.partition] * (stripe.end - stripe.start)
        for directory in (self.cluster.directory, *self.peers.directories.values()):
            known = directory._nodes.get(name)
            directory.apply(
                Announce(
                    *(0, name, 1, known.sequence + 1 if known else 1, known is None, b""),
                    *(pack("H", partitions), pack("Q", names_of(space.root, keys)), bytes([tiers] * len(keys))),
                )
            )

    def get(self, space: OpenNamespace, keys: Sequence[BlockKey], **how: Any) -> list[bytes]:
        return self.store.get(space, keys, **how)


class Chain:
    """Blocks of one prompt, which others have."""

    def __init__(self, node: Node, blocks: int, *names: str, start: int = 0, size: int = SIZE) -> None:
        self.space = node.store.open()
        self.keys = chain_keys(self.space, range(start, start + blocks))
        self.blocks = [block_of(key, size) for key in self.keys]
        for name in names:
            node.has(name, self.space, self.keys, self.blocks)


@contextmanager
def clusters() -> Iterator[Make]:
    """Makes nodes that at the end are at rest, in order, and keep nothing of others."""
    nodes: list[Node] = []
    with tiered_stores() as made:

        def node(*, is_started: bool = True, **settings: Any) -> Node:
            nodes.append(Node(made(**settings), is_started=is_started))
            return nodes[-1]

        yield node
        for one in nodes:
            one.store.settle()
            one.close()
