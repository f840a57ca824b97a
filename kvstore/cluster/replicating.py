"""Copies on purpose: of hot blocks, of namespaces that want some, and of all that a node has before it goes."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, cast

from kvstore.catalogue import OpenNamespace
from kvstore.clock import Clock
from kvstore.cluster.heat import Heat
from kvstore.cluster.holdings import Block, Holdings
from kvstore.cluster.links import Links
from kvstore.cluster.locating import Locating, Place
from kvstore.cluster.members import View
from kvstore.cluster.naming import STRIPE_BLOCKS
from kvstore.cluster.replication import Drop, HeatPolicy, HotStripe, Replicate, Room, Sight
from kvstore.cluster.replication import Place as Spot
from kvstore.errors import StoreError
from kvstore.packed import pack_keys
from kvstore.store import Store
from kvstore.table import Replica
from kvstore.tasks import Tasks
from kvstore.types import DRAM, BlockKey, Cause, State
from kvstore.wire_cluster import Fill, Filled

ROUND_S = 1.0  # between two looks at what is hot
HALF_LIFE_S = 10.0
HOT_STRIPES, HEAT_ENTRIES = 16, 4096
FILL_S = 10.0  # that a target may take for one run
FILL_TRIES = 3
FILLS_AT_ONCE = 4
BEHIND_BLOCKS = 1 << 16  # that wait for their copies; more are left to heat


class Spots(Protocol):
    """Who has room: for blocks that are to stay, or else for copies that go first."""

    def __call__(self, *, is_to_stay: bool) -> dict[str, Spot]: ...


class Chain(NamedTuple):
    """A run of a chain that this node holds, all of it in one stripe."""

    keys: list[BlockKey]
    parent: BlockKey | None
    place: Place
    size_bytes: int


class Replicating:
    """`policy` suggests; what is refused here (gone, held, no room) is not done."""

    def __init__(self, me: str, store: Store, holdings: Holdings, locating: Locating, links: Links,
                 policy: HeatPolicy, *, view: Callable[[], View], spots: Spots, tasks: Tasks,
                 random: Callable[[], float], clock: Clock) -> None:  # fmt: skip
        self._me = me
        self._store = store
        self._holdings = holdings
        self._locating = locating
        self._links = links
        self._policy = policy
        self._view = view
        self._spots = spots
        self._tasks = tasks
        self._random = random
        self._clock = clock
        self._heat = Heat(HALF_LIFE_S, HEAT_ENTRIES)
        self._hot: dict[Block, list[BlockKey]] = {}  # a stripe's first block here -> all that were read of it
        self._behind: deque[Block] = deque()
        self._has_more = asyncio.Event()
        self._fills = asyncio.Semaphore(FILLS_AT_ONCE)
        self.copied_blocks = 0
        self.dropped_copies = 0
        self.short_blocks = 0

    # Heat.

    def was_read(self, replicas: Sequence[Replica]) -> None:
        """A peer reads these, a run of a chain."""
        now = self._clock.now()
        for replica, start, end in _stripes(replicas):
            block = replica.space.number, replica.key
            self._heat.note(block, end - start, now)
            self._hot[block] = [found.key for found in replicas[start:end]]
        if len(self._hot) > 2 * HEAT_ENTRIES:
            hottest = self._heat.hottest(HEAT_ENTRIES, now)
            blocks = [cast(Block, block) for block, _ in hottest]
            self._hot = {block: self._hot[block] for block in blocks if block in self._hot}

    @property
    def reads_per_s(self) -> float:
        """Of the hottest stripes here, together."""
        return sum(rate for _, rate in self._heat.hottest(HOT_STRIPES, self._clock.now()))

    async def keep_hot(self) -> None:
        """Have more copies of what is hot made, and let go of copies that are hot no more, until it is cancelled."""
        while True:
            await asyncio.sleep(ROUND_S)
            if self._fills.locked():
                continue  # what was begun before is not done yet
            now = self._clock.now()
            hottest = self._heat.hottest(HOT_STRIPES, now)
            stripes = [await self._sight(cast(Block, block), rate) for block, rate in hottest]
            seen = [stripe for stripe in stripes if stripe is not None]
            spots = {**self._spots(is_to_stay=False), self._me: Spot(self._me, 0)}  # it holds them: no more is for it
            for wish in self._policy.suggest(Sight(self._me, seen, spots)):
                if isinstance(wish, Replicate):
                    self._tasks.spawn(self._replicate(wish))
                elif isinstance(wish, Drop):
                    self._drop(wish)

    async def _sight(self, block: Block, rate: float) -> HotStripe | None:
        space = self._store.catalogue.of_number(block[0])
        chain = self._chain(space, self._hot.get(block, [])) if space is not None else None
        if space is None or chain is None:
            return None
        others = (await self._locating.holders(space, chain.keys[:1], chain.place))[0]
        is_copy = all(space.dram.replicas[key].is_copy for key in chain.keys if key in space.dram.replicas)
        return HotStripe(block, chain.size_bytes, rate, (self._me, *others), is_copy)

    async def _replicate(self, wish: Replicate) -> None:
        block = cast(Block, wish.stripe)
        space = self._store.catalogue.of_number(block[0])
        chain = self._chain(space, self._hot.get(block, [])) if space is not None else None
        if space is not None and chain is not None:
            await self._fill(space, chain, wish.target, keep=False)

    def _drop(self, wish: Drop) -> None:
        block = cast(Block, wish.stripe)
        space = self._store.catalogue.of_number(block[0])
        if space is None:
            return
        replicas = [self._store.table.readable(space.dram, key) for key in self._hot.pop(block, [])]
        surplus = [found.key for found in replicas if found and found.is_copy and found.is_evictable]
        self._store.discard(space, surplus, Cause.SURPLUS, DRAM)
        self.dropped_copies += len(surplus)

    # At least so many.

    def stored(self, space: OpenNamespace, replica: Replica) -> None:
        """It was put here, and its namespace may want more of it. Commits that wait for that see to it themselves."""
        if space.replicas > 1 and not space.through and not replica.is_copy:
            self.later(space, [replica.key])

    def later(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> None:
        """Give these as many copies as their namespace wants, when there is time."""
        fitting = keys[: max(BEHIND_BLOCKS - len(self._behind), 0)]
        self.short_blocks += len(keys) - len(fitting)
        self._behind.extend((space.number, key) for key in fitting)
        self._has_more.set()

    async def keep_behind(self) -> None:
        """Give stored blocks the copies that their namespaces want, until it is cancelled."""
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            while self._behind:
                blocks = [self._behind.popleft() for _ in range(min(len(self._behind), STRIPE_BLOCKS))]
                for number in dict.fromkeys(number for number, _ in blocks):
                    space = self._store.catalogue.of_number(number)
                    if space is not None:
                        await self.ensure(space, [key for other, key in blocks if other == number], space.replicas)

    async def ensure(self, space: OpenNamespace, keys: Sequence[BlockKey], copies: int) -> tuple[int, int, int]:
        """Have so many nodes hold each of these blocks, as far as they are here: (blocks here, copies made, blocks that
        have fewer all the same)."""
        blocks = made = short = 0
        for chain in self._chains(space, keys):
            found = await self._locating.holders(space, chain.keys, chain.place)
            fewest = min(found, key=len, default={})
            holders = [self._me, *fewest]
            filled = await self._spread(space, chain, holders, copies)
            blocks += len(chain.keys)
            made += filled * len(chain.keys)
            short += len(chain.keys) * (len(holders) + filled < copies)
        self.short_blocks += short
        return blocks, made, short

    async def _spread(self, space: OpenNamespace, chain: Chain, holders: list[str], copies: int) -> int:
        """How many more hold it then."""
        filled = 0
        tried = list(holders)
        for _ in range(FILL_TRIES):
            room = Room(self._spots(is_to_stay=True), self._random)
            missing = copies - filled - len(room.staying(holders)) - (self._me in holders)
            targets = room.targets(chain.size_bytes, tried, missing)
            if not targets:
                break
            tried += targets
            done = await asyncio.gather(*(self._fill(space, chain, target, keep=True) for target in targets))
            filled += sum(blocks == len(chain.keys) for blocks in done)
        return filled

    # Emptying.

    async def vacate(self) -> tuple[int, int]:
        """Have others hold what only this node holds: (blocks moved, blocks that nobody took)."""
        moved = left = 0
        for space in list(self._store.catalogue.all()):
            keys = list(dict.fromkeys(key for tier_space in space.spaces for key in tier_space.replicas))
            for chain in self._chains(space, keys):
                found = await self._locating.holders(space, chain.keys, chain.place)
                spots = self._spots(is_to_stay=True)
                staying = [[name for name in block if name in spots and not spots[name].is_draining] for block in found]
                if all(staying):
                    continue
                if await self._spread(space, chain, [], 1):
                    moved += len(chain.keys)
                else:
                    left += sum(not names for names in staying)
        return moved, left

    # Inside.

    def _chains(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> Iterator[Chain]:
        """What is here of these, in runs of blocks that follow one another in one stripe."""
        run: list[Replica] = []
        for key in keys:
            replica = self._anywhere(space, key)
            if replica is None:
                continue
            follows = run and replica.parent == run[-1].key and replica.position
            if run and not follows:
                yield _chain_of(run)
                run = []
            run.append(replica)
        if run:
            yield _chain_of(run)

    def _chain(self, space: OpenNamespace, keys: Sequence[BlockKey]) -> Chain | None:
        return next(self._chains(space, keys), None)

    def _anywhere(self, space: OpenNamespace, key: BlockKey) -> Replica | None:
        for tier_space in space.spaces:
            replica = tier_space.replicas.get(key)
            if replica is not None and replica.state is State.WRITTEN and replica.partition >= 0:
                return replica
        return None

    async def _fill(self, space: OpenNamespace, chain: Chain, target: str, *, keep: bool) -> int:
        """How many blocks of the run the target holds then."""
        member = self._view().members.get(target)
        if member is None:
            return 0

        def request(number: int) -> Fill:
            return Fill(
                number,
                space.tenant.name,
                space.names[0] if space.names else space.root.hex(),
                space.namespace,
                pack_keys(chain.keys),
                chain.parent or b"",
                *chain.place,
                self._me,
                int(FILL_S * 1000),
                keep,
            )

        async with self._fills:
            try:
                reply: Filled = await self._links.ask(member, request, FILL_S + 1)
            except StoreError:
                return 0
        self.copied_blocks += reply.blocks
        return reply.blocks


def _stripes(replicas: Sequence[Replica]) -> Iterator[tuple[Replica, int, int]]:
    """(First, start, end) of each stripe of a run."""
    start = 0
    for at, replica in enumerate(replicas):
        if at > start and not replica.position:
            yield replicas[start], start, at
            start = at
    if replicas:
        yield replicas[start], start, len(replicas)


def _chain_of(run: Sequence[Replica]) -> Chain:
    first = run[0]
    size_bytes = sum(replica.size for replica in run)
    return Chain([found.key for found in run], first.parent, Place(first.partition, first.position), size_bytes)
