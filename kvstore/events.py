"""What happened to a node's blocks, in order, for those who follow it: a bounded log, and pages of what is there.

A follower takes a snapshot page by page, then all that happened after the sequence of its first page: each event says
what became of one block (part) in one tier, so it has exactly what is there, whatever happened between the pages.
Neither slots nor what is still being written is in here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from kvstore.errors import NotFound, Rejected
from kvstore.replica import Replica, Space
from kvstore.tier_state import Event
from kvstore.types import BlockKey, Change, State
from kvstore.wire_events import BlockEvent

SCANNED = 16_384  # entries looked through at once for those of one tenant: a millisecond or two
SNAPSHOTS = 8  # under way at a time for each tenant; each keeps a list of the keys of one namespace in one tier
SNAPSHOT_IDLE_S = 30.0  # until one that nobody goes on with makes way
STORED = (Change.COMMITTED, Change.RESTORED)
PAGES = 1 << 32  # of a snapshot: a cursor is the snapshot's number and the page's


class Entry(NamedTuple):
    """One event of the log, or one block of a page."""

    is_stored: bool
    space: Space
    key: BlockKey
    parent: BlockKey | None
    size: int  # bytes; 0 of what was removed

    @property
    def event(self) -> BlockEvent:
        return BlockEvent(self.is_stored, self.space.number, self.space.tier, self.key, self.parent, self.size)


class Since(NamedTuple):
    """What `EventLog.since` found: all that was asked about up to `last`; if not `is_exact`, nothing."""

    entries: list[Entry]
    last: int
    is_exact: bool


class EventLog:
    """The last `entries` events of one start of a node, numbered from 1. `sequence` is the last one's number."""

    def __init__(self, epoch: int, entries: int) -> None:
        assert entries > 0
        self.epoch = epoch
        self.sequence = 0
        self._ring: list[Entry | None] = [None] * entries
        self._first = 1  # the oldest that is kept
        self._watchers: dict[Callable[[], None], None] = {}

    def note(self, events: Sequence[Event]) -> None:
        """Take up what the table changed, and wake who watches."""
        before = self.sequence
        for event in events:
            replica = event.replica
            if not is_known(replica):
                continue
            if event.change in STORED:
                self._append(Entry(True, replica.space, replica.key, replica.parent, replica.size))
            elif event.change is Change.REMOVED:
                self._append(Entry(False, replica.space, replica.key, None, 0))
        if self.sequence != before:
            self._wake()

    def since(self, after: int, most: int, tenant: str, number: int = 0) -> Since:
        """Up to `most` events after `after` of a tenant's blocks, of one namespace unless `number` is 0.

        It looks at a bounded number of events: there may be more after `last` even if fewer than `most` were found.
        """
        if not self._first - 1 <= after <= self.sequence:
            return Since([], self.sequence, False)
        found: list[Entry] = []
        last, end = after, min(self.sequence, after + SCANNED)
        while last < end and len(found) < most:
            last += 1
            entry = self._ring[last % len(self._ring)]
            assert entry is not None
            if entry.space.tenant == tenant and number in (0, entry.space.number):
                found.append(entry)
        return Since(found, last, True)

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` after each addition, until `unwatch`."""
        self._watchers[wake] = None

    def unwatch(self, wake: Callable[[], None]) -> None:
        self._watchers.pop(wake, None)

    def _append(self, entry: Entry) -> None:
        self.sequence += 1
        self._ring[self.sequence % len(self._ring)] = entry
        self._first = max(self._first, self.sequence - len(self._ring) + 1)

    def _wake(self) -> None:
        for wake in list(self._watchers):
            wake()


class Pages:
    """Walks through the blocks of `spaces` while these change: those that are there from begin to end come once."""

    def __init__(self, spaces: Iterable[Space]) -> None:
        self._spaces = list(spaces)[::-1]
        self._space: Space | None = None
        self._keys: list[BlockKey] = []  # of that space, the next one last

    def next(self, most: int) -> list[Entry]:
        """The blocks among the next `most` keys."""
        assert most > 0
        found: list[Entry] = []
        while most and self.more:
            if not self._keys:
                self._space = self._spaces.pop()
                self._keys = list(self._space.replicas)[::-1]
            assert self._space is not None
            keys = self._keys[: -most - 1 : -1]
            del self._keys[len(self._keys) - len(keys) :]
            most -= len(keys)
            for key in keys:
                replica = self._space.replicas.get(key)
                if replica is not None and replica.state is State.WRITTEN and is_known(replica):
                    found.append(Entry(True, self._space, key, replica.parent, replica.size))
        return found

    @property
    def more(self) -> bool:
        return bool(self._keys) or bool(self._spaces)


@dataclass(slots=True)
class _Reading:
    pages: Pages
    tenant: str
    page: int
    used_at: float


class Snapshots:
    """Pages of snapshots under way. A cursor is good once, for the next page; `now` is in seconds."""

    def __init__(self) -> None:
        self._open: dict[int, _Reading] = {}
        self._numbers = count(1)

    def begin(self, tenant: str, spaces: Iterable[Space], most: int, now: float) -> tuple[list[Entry], int]:
        """The first page: (blocks, cursor of the next, 0 after the last). Rejected while too many are under way."""
        for number in [n for n, reading in self._open.items() if now - reading.used_at >= SNAPSHOT_IDLE_S]:
            del self._open[number]
        if sum(reading.tenant == tenant for reading in self._open.values()) >= SNAPSHOTS:
            raise Rejected(f"{SNAPSHOTS} snapshots of tenant {tenant} are under way", 1.0)
        number = next(self._numbers)
        self._open[number] = _Reading(Pages(spaces), tenant, 0, now)
        return self._next(number, most, now)

    def go_on(self, tenant: str, cursor: int, most: int, now: float) -> tuple[list[Entry], int]:
        """A later page, as `begin`. NotFound for what is not the cursor of the page before: begin again."""
        number, page = divmod(cursor, PAGES)
        reading = self._open.get(number)
        if reading is None or reading.tenant != tenant or reading.page != page:
            raise NotFound(f"the snapshot of cursor {cursor} is gone: begin again")
        return self._next(number, most, now)

    def _next(self, number: int, most: int, now: float) -> tuple[list[Entry], int]:
        reading = self._open[number]
        reading.page += 1
        reading.used_at = now
        blocks = reading.pages.next(most)
        if reading.pages.more:
            return blocks, number * PAGES + reading.page
        del self._open[number]
        return blocks, 0


def is_known(replica: Replica) -> bool:
    """Whether events tell of it: only a commit gives it a checksum, and what was never committed is nobody's news.

    A block whose checksum is 0, one in 2^64, is not told of at all.
    """
    return replica.checksum != 0
