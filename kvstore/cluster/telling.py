"""Tells the homes what this node holds: batches on their way, one at a time to each home, until everything is said."""

import asyncio
from collections.abc import Callable, Hashable
from typing import cast

from kvstore.cluster import holdings
from kvstore.cluster.announcer import Announcer
from kvstore.cluster.directory import Directory
from kvstore.cluster.holdings import Block, Holdings
from kvstore.cluster.links import Links
from kvstore.cluster.members import Member, View
from kvstore.errors import StoreError
from kvstore.tasks import Tasks
from kvstore.wire_cluster import Announce, Announced

GATHER_S = 0.005  # changes of so long go together
BATCH_BLOCKS = 4096  # 45 KiB, and about 4 ms of the home's event loop
ANSWER_S = 2.0
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # after so many failures in a row
DIGEST_S = 10.0  # between two comparisons with each home


class Telling:
    """`heard` is told of each home that answered, `lost` of each that did not, and why."""

    def __init__(self, me: str, announcer: Announcer, held: Holdings, directory: Directory, links: Links, *,
                 view: Callable[[], View], tasks: Tasks, random: Callable[[], float],
                 heard: Callable[[str, Announced], None],
                 lost: Callable[[Member, StoreError], object]) -> None:  # fmt: skip
        self._me = me
        self._announcer = announcer
        self._holdings = held
        self._directory = directory
        self._links = links
        self._view = view
        self._tasks = tasks
        self._random = random
        self._heard = heard
        self._lost = lost
        self._busy: dict[str, asyncio.Future[int]] = {}  # home -> partitions found to differ
        self._told: dict[str, dict[int, Block]] = {}  # of the batch that a home has not answered
        self._has_more = asyncio.Event()
        self._scans = 0
        self.batches = 0
        self.repaired_partitions = 0

    def poke(self) -> None:
        """There may be something to tell."""
        self._has_more.set()

    async def keep(self) -> None:
        """Tell what there is to tell, until it is cancelled."""
        while True:
            await self._has_more.wait()
            await asyncio.sleep(GATHER_S)
            self._has_more.clear()
            for home in self._announcer.homes_waiting():
                self._begin(home)

    async def keep_comparing(self) -> None:
        """Compare digests with each home now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(DIGEST_S * (0.5 + self._random()))
            if not self._scans:
                for home in sorted(self._view().members):
                    self._begin(home, is_digest=True)

    async def compare(self, within_s: float) -> int:
        """Tell everything and compare with all homes; in how many partitions they differed, or were not to be asked.

        What differs is told anew: a second call finds nothing where all is well.
        """
        try:
            async with asyncio.timeout(within_s):
                while self._scans or self._busy:
                    await asyncio.wait([*self._busy.values()] or [asyncio.ensure_future(asyncio.sleep(GATHER_S))])
                homes = sorted(self._view().members)
                for home in homes:
                    self._begin(home, is_digest=True)
                busy = [self._busy[home] for home in homes if home in self._busy]
                if busy:
                    await asyncio.wait(busy)  # which leaves them to others when this is cancelled
                return sum(future.result() for future in busy)
        except TimeoutError:
            return len(self._busy) + self._scans

    def tell_again(self, partitions: set[int]) -> None:
        """These partitions have another home, or one that has forgotten."""
        if partitions:
            self._scans += 1
            self._tasks.spawn(self._scan(partitions))

    async def _scan(self, partitions: set[int]) -> None:
        try:
            for _ in self._holdings.note_again(partitions):
                self.poke()
                await asyncio.sleep(0)
        finally:
            self._scans -= 1
            self.poke()

    def _begin(self, home: str, *, is_digest: bool = False) -> None:
        if home not in self._busy:
            self._busy[home] = asyncio.get_running_loop().create_future()
            self._tasks.spawn(self._tell(home, is_digest=is_digest))

    async def _tell(self, home: str, *, is_digest: bool) -> None:
        failures = differing = 0
        try:
            while True:
                batch = self._batch(home, is_digest=is_digest)
                if batch is None:
                    break
                is_digest = is_digest and not batch.digests
                try:
                    reply = await self._send(home, batch)
                    anew = self._announcer.answered(home, reply)
                except StoreError as error:
                    member = self._view().members.get(home)
                    if member is not None:
                        self._lost(member, error)
                    await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
                    failures += 1
                    continue
                failures = 0
                self.batches += 1
                self._take_up(home, reply)
                differing += len(reply.differing) // 2
                self.repaired_partitions += len(reply.differing) // 2
                self.tell_again(anew)
        finally:
            self._told.pop(home, None)
            self._busy.pop(home).set_result(differing)
            self.poke()

    def _batch(self, home: str, *, is_digest: bool) -> Announce | None:
        told: dict[int, Block] = {}

        def describe(block: Hashable) -> tuple[int, int]:
            telling = cast(holdings.Telling, block)
            name, tiers = self._holdings.describe(telling)
            told[name] = telling[:2]
            return name, tiers

        batch = self._announcer.batch(home, describe, BATCH_BLOCKS, digest=is_digest and not self._scans)
        if told:
            self._told[home] = told
        return batch

    async def _send(self, home: str, batch: Announce) -> Announced:
        if home == self._me:
            return self._directory.apply(batch)
        member = self._view().members.get(home)
        if member is None:
            raise StoreError(f"{home} is no member any more")

        def numbered(number: int) -> Announce:
            fields = (batch.node, batch.epoch, batch.sequence, batch.is_first, batch.resets, batch.partitions)
            return Announce(number, *fields, batch.names, batch.tiers, batch.digests)

        reply: Announced = await self._links.ask(member, numbered, ANSWER_S)
        self._heard(home, reply)
        return reply

    def _take_up(self, home: str, reply: Announced) -> None:
        self._holdings.shared(reply.shared, self._told.get(home, {}))
        if reply.sole:
            self._holdings.sole(reply.sole)
        self._told.pop(home, None)
