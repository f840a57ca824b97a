"""Which nodes hold the blocks of a chain: one parallel round of questions to the homes of its stripes."""

import asyncio
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvstore.catalogue import OpenNamespace
from kvstore.clock import Clock
from kvstore.cluster.directory import HOLDERS_MOST, Directory
from kvstore.cluster.homes import Homes
from kvstore.cluster.links import Links
from kvstore.cluster.members import Member, View
from kvstore.cluster.naming import STRIPE_BLOCKS, names_of, partition_of
from kvstore.cluster.routes import Routes
from kvstore.errors import ProtocolError, StoreError, TransportError
from kvstore.types import KEY_BYTES, BlockKey
from kvstore.wire_cluster import HOLDING, STRIPE, Locate, Located

LOCATE_S = 0.25  # a home that does not answer by then knows of nothing
Holders = Mapping[str, int]  # of a block: node -> tiers, as bits
NOBODY: Holders = {}


class Place(NamedTuple):
    """Where a block is in the directory: the partition of its stripe, and how far it is from the stripe's start."""

    partition: int
    position: int


class Stripe(NamedTuple):
    """Blocks [start, end) of a run, which are in one stripe."""

    partition: int
    position: int  # of block `start` in it
    start: int
    end: int


def place_after(before: Place, root: bytes, key: BlockKey) -> Place:
    """Of the block after one."""
    if before.position + 1 < STRIPE_BLOCKS:
        return Place(before.partition, before.position + 1)
    return Place(partition_of(root, key), 0)


def places_of(root: bytes, keys: Sequence[BlockKey], first: Place) -> list[Place]:
    """Of each block of a run; `first` is the place of its first."""
    places = [first]
    for key in keys[1:]:
        places.append(place_after(places[-1], root, BlockKey(key[:KEY_BYTES])))
    return places


def stripes_of(root: bytes, keys: Sequence[BlockKey], first: Place) -> list[Stripe]:
    """A run of a chain, cut into stripes; `first` is the place of its first block."""
    stripes: list[Stripe] = []
    start, place = 0, first
    while start < len(keys):
        end = min(start + STRIPE_BLOCKS - place.position, len(keys))
        stripes.append(Stripe(place.partition, place.position, start, end))
        start = end
        if start < len(keys):
            place = Place(partition_of(root, keys[start]), 0)
    return stripes


def place_of(space: OpenNamespace, keys: Sequence[BlockKey], at: int, parent: BlockKey | None) -> Place | None:
    """Of block number `at` of a run. Without `parent` the run begins its chain, unless its first block is known here to
    be further on; else by the nearest block before it that is known here. None when none of that is known."""
    place, back = _first(space, keys[0], parent), 0
    known = _known(space, keys[0])
    if parent is not None or (known is not None and known.position):
        for nearer in range(at, -1, -1):
            known = _known(space, keys[nearer])
            if known is not None:
                place, back = known, nearer
                break
    for key in keys[back + 1 : at + 1]:
        place = place_after(place, space.root, BlockKey(key[:KEY_BYTES])) if place is not None else None
    return place


def _first(space: OpenNamespace, key: BlockKey, parent: BlockKey | None) -> Place | None:
    if parent is None:
        return Place(partition_of(space.root, key), 0)
    above = _known(space, parent)
    return place_after(above, space.root, BlockKey(key[:KEY_BYTES])) if above is not None else None


def _known(space: OpenNamespace, key: BlockKey) -> Place | None:
    for tier_space in space.spaces:
        replica = tier_space.replicas.get(key)
        if replica is not None and replica.partition >= 0:
            return Place(replica.partition, replica.position)
    return None


class Locating:
    """`view` and `homes` say who is a member and whose a partition is, at present; `me` is this node's name."""

    def __init__(self, me: str, directory: Directory, links: Links, routes: Routes, clock: Clock, *,
                 view: Callable[[], View], homes: Callable[[], Homes]) -> None:  # fmt: skip
        self._me = me
        self._directory = directory
        self._links = links
        self._routes = routes
        self._clock = clock
        self._view = view
        self._homes = homes
        self.requests = 0

    async def holders(self, space: OpenNamespace, keys: Sequence[BlockKey], first: Place) -> list[Holders]:
        """For each block of a run who has it beside this node, as far as its home knows and is heard of in time."""
        names = names_of(space.root, keys)
        by_home: dict[str, list[Stripe]] = {}
        for stripe in stripes_of(space.root, keys, first):
            by_home.setdefault(self._homes().home(stripe.partition), []).append(stripe)
        found: list[Holders] = [NOBODY] * len(keys)
        asked = [self._ask(home, stripes, names, found) for home, stripes in by_home.items() if home]
        if len(asked) == 1:
            await asked[0]
        else:
            await asyncio.gather(*asked)
        return found

    async def _ask(self, home: str, stripes: Sequence[Stripe], names: Sequence[int], found: list[Holders]) -> None:
        packed = b"".join(STRIPE.pack(stripe.partition, stripe.end - stripe.start) for stripe in stripes)
        wanted = array("Q", [name for stripe in stripes for name in names[stripe.start : stripe.end]]).tobytes()
        member = self._view().members.get(home)
        try:
            if home == self._me:
                reply = self._directory.locate(Locate(0, packed, wanted))
            elif member is None or not self._routes.may_ask(home):
                return
            else:
                self.requests += 1
                reply = await self._asked(member, Locate(0, packed, wanted))
            answers = self._understood(reply, len(wanted) // 8)
        except StoreError:
            return  # what nobody can be asked about is a miss
        at = 0
        for stripe in stripes:
            size = stripe.end - stripe.start
            found[stripe.start : stripe.end] = answers[at : at + size]
            at += size

    async def _asked(self, member: Member, request: Locate) -> Located:
        """A home that does not answer is left alone for a while: each reader would wait for it anew."""
        begun = self._clock.now()
        try:
            reply: Located = await self._links.ask(
                member, lambda number: Locate(number, request.stripes, request.names), LOCATE_S
            )
        except TransportError as error:
            self._routes.failed(member.name, str(error))
            raise
        self._routes.answered(member.name, self._clock.now() - begun)
        return reply

    def _understood(self, reply: Located, count: int) -> list[Holders]:
        """Holders by name, of living members only. Raises ProtocolError for what makes no sense."""
        members = self._view().members
        if len(reply.holdings) > count or any(len(packed) > HOLDING.size * HOLDERS_MOST for packed in reply.holdings):
            raise ProtocolError(f"{len(reply.holdings)} holdings of {count} blocks, or too many holders")
        holdings: list[Holders] = [NOBODY]
        try:
            for packed in reply.holdings:
                pairs = HOLDING.iter_unpack(packed)
                named = ((reply.nodes[number], tiers) for number, tiers in pairs)
                holdings.append({node: tiers for node, tiers in named if node != self._me and node in members})
            which = array("H")
            which.frombytes(reply.which)
            if len(which) != count:
                raise ProtocolError(f"{len(which)} answers about {count} blocks")
            return [holdings[number] for number in which]
        except (IndexError, ValueError, struct.error) as error:
            raise ProtocolError(f"an answer of the directory that makes no sense: {error}") from error
