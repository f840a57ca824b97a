"""Blocks of other nodes: found, kept where they are by leases, and read once there is a place for them here.

A reader's `find` ends in offers; `Promotion` loads them as it loads from a disk, into slots of this node, and whoever
waits for a block waits for its load. A holder that fails is left alone for a while, and the next is tried.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile

from kvstore.bandwidth import Bandwidth
from kvstore.catalogue import OpenNamespace
from kvstore.clock import Clock
from kvstore.cluster.choice import Candidate, Run, assign, choose
from kvstore.cluster.holdings import Holdings
from kvstore.cluster.links import Lease, Links
from kvstore.cluster.locating import NOBODY, Holders, Locating, Place, place_of, places_of
from kvstore.cluster.members import View
from kvstore.cluster.offers import Finding, Kept, Offer, Origin
from kvstore.cluster.routes import Routes
from kvstore.errors import StoreError, TransportError
from kvstore.intake import part_of
from kvstore.metrics import Counters
from kvstore.reads import check_parent
from kvstore.table import Replica
from kvstore.types import DRAM, BlockKey
from kvstore.wire_cluster import TIER_BITS

READ_S = 5.0  # a holder has so long for one job, and a lease is kept for so long beyond its reader's patience
LEAST_LEASE_S = 0.2  # a holder has at least so long to answer, or a third of the reader's patience
GUESSED_BYTES = 256 << 10  # of a block, where its namespace does not say
TRIES = 3  # holders that are asked for a block
FIND_SHARE = 0.75  # of a reader's patience, in which blocks are found; in the rest they come
PARTS_AT_ONCE = 16  # of a block that are looked for; a namespace may say that it has 65,535
KNOWN_HOLDER = TIER_BITS[DRAM]


class Pulling:
    """`reading` is how fast blocks come from all peers together."""

    def __init__(self, links: Links, locating: Locating, routes: Routes, holdings: Holdings, *,
                 view: Callable[[], View], random: Callable[[], float], clock: Clock,
                 counters: Counters) -> None:  # fmt: skip
        self._links = links
        self._locating = locating
        self._routes = routes
        self._holdings = holdings
        self._view = view
        self._random = random
        self._clock = clock
        self._counters = counters
        self._offers: dict[tuple[int, BlockKey], list[Offer]] = {}  # several readers may have found a block
        self.reading = Bandwidth()
        self.retried_blocks = 0

    # For Promotion.

    def offer(self, space: OpenNamespace, key: BlockKey) -> Offer | None:
        """Of a block that some reader found, and that there is somebody left to read from."""
        offers = self._offers.get((space.number, key), ())
        return next((offer for offer in reversed(offers) if not offer.tried.issuperset(offer.holders)), None)

    def arrived(self, replica: Replica, offer: Offer) -> None:
        """Its bytes are in place and verified; it is about to be committed."""
        self._holdings.pulled(replica, offer.place)

    async def read(
        self, space: OpenNamespace, blocks: Sequence[tuple[BlockKey, Offer, memoryview]]
    ) -> list[int | None]:
        """Into views of exactly the blocks' sizes: the checksum of each that arrived as its holder has it, else None.

        Called again while a first read of an offer is under way, it asks another holder.
        """
        found: list[int | None] = [None] * len(blocks)
        async with asyncio.TaskGroup() as group:
            for run in _runs_of([offer for _, offer, _ in blocks]):
                group.create_task(self._read_run(space, blocks, run, found))
        return found

    # For readers.

    async def find(self, space: OpenNamespace, keys: Sequence[BlockKey], parent: BlockKey | None, until: float,
                   origin: Origin | None = None) -> Finding:  # fmt: skip
        """Have what this node lacks of a run of a chain kept by those who have it, as far as it is found well before
        `until`. The caller closes what it gets. Raises InvalidRequest."""
        check_parent(space, parent)
        finding = Finding(self._offers, len(keys))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIND_SHARE * (until - self._clock.now())):
                    await self._find_parts(finding, space, keys, parent, until, origin)
        except BaseException:
            finding.close()
            raise
        return finding

    async def reach(self, space: OpenNamespace, keys: Sequence[BlockKey], parent: BlockKey | None) -> int:
        """How many of a chain's blocks this node or others have, from the first; all parts of each. InvalidRequest."""
        check_parent(space, parent)
        matched = len(keys)
        for part in range(space.namespace.parts):
            wanted = [part_of(space, key, part) for key in keys[:matched]]
            if not wanted:
                break
            missing = self._missing(space, wanted)
            if not missing:
                continue
            above = part_of(space, parent, part) if parent is not None else None
            found = await self._holders(space, wanted, above, missing[0])
            matched = next((at for at in missing if not found[at - missing[0]]), matched)
        return matched

    # Inside.

    def _missing(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> list[int]:
        """Positions of those that no tier of this node has, or is getting."""
        return [at for at, key in enumerate(keys) if not any(key in tier.replicas for tier in space.spaces)]

    async def _holders(
        self, space: OpenNamespace, keys: Sequence[BlockKey], parent: BlockKey | None, first: int
    ) -> list[Holders]:
        """For each block from number `first` on."""
        place = place_of(space, keys, first, parent)
        if place is None:
            return [NOBODY] * (len(keys) - first)
        return await self._locating.holders(space, keys[first:], place)

    async def _find_parts(self, finding: Finding, space: OpenNamespace, keys: Sequence[BlockKey],
                          parent: BlockKey | None, until: float, origin: Origin | None) -> None:  # fmt: skip
        """Some parts at a time, of as many blocks as the parts before have."""
        parts = space.namespace.parts
        for start in range(0, parts, PARTS_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                finds = []
                for part in range(start, min(start + PARTS_AT_ONCE, parts)):
                    wanted = [part_of(space, key, part) for key in keys]
                    above = part_of(space, parent, part) if parent is not None else None
                    finds.append(group.create_task(self._find(finding, space, wanted, above, until, origin)))
            keys = keys[: min(find.result() for find in finds)]
            if not keys:
                break

    async def _find(self, finding: Finding, space: OpenNamespace, keys: Sequence[BlockKey], parent: BlockKey | None,
                    until: float, origin: Origin | None) -> int:  # fmt: skip
        """How many of the blocks, from the first, this node or others have."""
        missing = self._missing(space, keys)
        if not missing:
            return len(keys)
        first = missing[0]
        finding.first = min(finding.first, first)
        if origin is not None:
            places = places_of(space.root, keys, origin.place)
            found: Sequence[Holders] = [{origin.holder: KNOWN_HOLDER}] * (len(keys) - first)
        else:
            place = place_of(space, keys, first, parent)
            if place is None:
                return first
            places = [place] * first + places_of(space.root, keys[first:], place)
            found = await self._locating.holders(space, keys[first:], place)
        end = next((at for at in missing if not found[at - first]), len(keys))
        async with asyncio.TaskGroup() as group:
            for span in _spans([at for at in missing if at < end]):
                for run in self._runs(space, found, first, span, places[span.start].position):
                    group.create_task(self._keep(finding, space, keys, places, found, run, until=until))
        return end

    def _runs(
        self, space: OpenNamespace, found: Sequence[Holders], first: int, span: range, position: int
    ) -> list[Run]:
        """From whom to get which of the blocks of `span`; `found` are the holders of those from number `first` on."""
        holders = found[span.start - first : span.stop - first]
        size = space.namespace.block_bytes or GUESSED_BYTES
        runs = assign(holders, position, size, self._routes.routes, random=self._random, now=self._clock.now())
        return [Run(run.holder, span.start + run.start, span.start + run.end) for run in runs]

    async def _keep(self, finding: Finding, space: OpenNamespace, keys: Sequence[BlockKey], places: Sequence[Place],
                    holders: Sequence[Holders], run: Run, *, until: float) -> None:  # fmt: skip
        """Leases on a run, at one holder or, where that has less than was thought, at the next. `holders` are those of
        the last so many keys."""
        start, node, offset = run.start, run.holder, len(keys) - len(holders)
        tried: set[str] = set()  # for block `start`
        tries = 0
        while tries < TRIES:
            tries += 1
            tried.add(node)
            lease = await self._lease(space, node, keys[start : run.end], until)
            if lease is not None:
                kept = Kept(lease, self._links)
                offers = [
                    (keys[start + at], Offer(kept, at, size, places[start + at], holders[start + at - offset]))
                    for at, size in enumerate(takewhile(partial(_may_be, space), lease.sizes))
                ]
                finding.add(space, kept, offers)
                if offers:  # who lacked the blocks before may have the next
                    start, tries, tried = start + len(offers), 0, {node}
            if start == run.end:
                return
            other = self._other(holders[start - offset], tried, 0)
            if other is None:
                return
            node = other

    async def _lease(
        self,
        space: OpenNamespace,
        node: str,
        keys: Sequence[BlockKey],
        until: float,
        sizes: Sequence[int] | None = None,
    ) -> Lease | None:
        """None when it cannot be had; a node that fails is left alone for a while."""
        member = self._view().members.get(node)
        now = self._clock.now()
        patience_s = min(max((until - now) / 3, LEAST_LEASE_S), READ_S)
        if member is None:
            return None
        lease_s = max(until - now, 0.0) + 2 * READ_S
        try:
            async with asyncio.timeout(patience_s):
                load_s = patience_s / 2  # and half for the way
                lease = await self._links.lease(member, space, keys, lease_s=lease_s, load_s=load_s)
        except TimeoutError:
            self._routes.failed(node, "did not answer in time")
            return None
        except TransportError as error:
            self._routes.failed(node, str(error))
            return None
        except StoreError:
            return None  # it refuses, which says nothing of the next request
        self._routes.answered(node, self._clock.now() - now)
        if lease is not None and sizes is not None and list(lease.sizes) != list(sizes[: len(lease.sizes)]):
            self._links.release(lease)  # another engine's bytes for the same tokens, which do not fit into the slots
            return None
        return lease

    def _other(self, holders: Holders, tried: set[str], size: int) -> str | None:
        routes = self._routes.routes
        left = [node for node in holders if node not in tried and node in routes]
        candidates = [Candidate(node, holders[node], routes[node]) for node in left]
        chosen = choose(candidates, size, self._random, self._clock.now())
        return chosen.name if chosen is not None else None

    async def _read_run(self, space: OpenNamespace, blocks: Sequence[tuple[BlockKey, Offer, memoryview]], run: range,
                        found: list[int | None]) -> None:  # fmt: skip
        """Blocks that lie one after the other in one lease; then, of other holders, those that did not come well."""
        offers = {at: blocks[at][1] for at in run}
        tried = set.union(*(offer.tried for offer in offers.values()))
        left = list(run)
        first = offers[run.start]
        lease: Lease | None = first.kept.lease if not first.tried else None
        start = first.at
        is_own = False
        until = self._clock.now() + READ_S
        for _ in range(TRIES):
            if lease is not None:
                tried.add(lease.member.name)
                for offer in offers.values():
                    offer.tried.add(lease.member.name)
                try:
                    await self._read_from(lease, start, [blocks[at] for at in left], partial(_set, found, left))
                finally:
                    if is_own:
                        self._links.release(lease)
            for at in left:
                if found[at] is not None:
                    offers[at].tried.clear()  # should this load be in vain, another may ask the same again
            left = [at for at in left if found[at] is None]
            if not left:
                return
            node = self._other(offers[left[0]].holders, tried, sum(offers[at].size for at in left))
            if node is None:
                return
            left = [at for at in left if node in offers[at].holders]
            tried.add(node)
            self.retried_blocks += len(left)
            lease = await self._lease(
                space, node, [blocks[at][0] for at in left], until, [offers[at].size for at in left]
            )
            is_own, start = True, 0
            if lease is not None:
                left = left[: len(lease.sizes)]

    async def _read_from(self, lease: Lease, start: int, blocks: Sequence[tuple[BlockKey, Offer, memoryview]],
                         arrived: Callable[[int, int], None]) -> None:  # fmt: skip
        """Tells `arrived` of each block that is good: its number, and its checksum."""
        node = lease.member.name
        size = sum(offer.size for _, offer, _ in blocks)
        try:
            async with self._routes.turn(node, size) as turn:
                begun = self._clock.now()
                self.reading.begin(size, begun)
                try:
                    async with asyncio.timeout(READ_S):
                        checksums = await self._links.read(lease, start, [view for _, _, view in blocks], READ_S)
                    turn.is_good = len(checksums) == len(blocks)
                finally:
                    self.reading.end(size, begun, self._clock.now(), is_good=turn.is_good)
        except (TimeoutError, TransportError) as error:
            self._routes.failed(node, str(error) or f"no blocks in {READ_S} s")
            return
        except StoreError:
            return
        for number, ((key, offer, _), crc) in enumerate(zip(blocks, checksums, strict=False)):
            expected = lease.checksums[start + number]
            if crc == expected and offer.size == lease.sizes[start + number]:
                arrived(number, crc)
            else:
                self._counters.corrupt_blocks += 1
                with suppress(StoreError):
                    self._links.report(lease, key)


def _runs_of(offers: Sequence[Offer]) -> list[range]:
    """Those that lie one after the other in one lease together."""
    runs: list[range] = []
    for at, offer in enumerate(offers):
        before = offers[at - 1] if at else None
        if before is not None and before.kept is offer.kept and before.at + 1 == offer.at:
            runs[-1] = range(runs[-1].start, at + 1)
        else:
            runs.append(range(at, at + 1))
    return runs


def _may_be(space: OpenNamespace, size: int) -> bool:
    """Whether a block of this namespace may have so many bytes."""
    expected = space.namespace.block_bytes
    return size == expected if expected else size > 0


def _spans(positions: Sequence[int]) -> list[range]:
    """Neighbours together."""
    spans: list[range] = []
    for at in positions:
        if spans and spans[-1].stop == at:
            spans[-1] = range(spans[-1].start, at + 1)
        else:
            spans.append(range(at, at + 1))
    return spans


def _set(found: list[int | None], numbers: Sequence[int], at: int, checksum: int) -> None:
    found[numbers[at]] = checksum
