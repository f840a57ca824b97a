"""What one client is told of the events of its tenant's blocks: long polls, and snapshots page by page."""

import asyncio
from collections.abc import Awaitable, Iterator

from kvstore.catalogue import Tenant
from kvstore.events import EventLog, Since
from kvstore.replica import Space
from kvstore.store import Store
from kvstore.wire_events import EVENTS_LIMIT, Happened, Snapped, Snapshot, Subscribe, happened, snapped

MOST_POLLS = 4  # that wait, of one client; more are answered at once
LEAST_PAGE = 64  # blocks: a snapshot has a bounded number of pages


class EventFeed:
    """The polls of one client."""

    def __init__(self, store: Store, tenant: Tenant) -> None:
        self._store = store
        self._log = store.events
        self._tenant = tenant
        self._polls = 0

    def subscribe(self, request: Subscribe) -> Happened | Awaitable[Happened]:
        """At once where there is something to tell, or nothing to wait for. NotFound for an unknown namespace."""
        if request.namespace:
            self._store.catalogue.numbered(self._tenant, request.namespace)
        after, limit = request.after, min(max(request.limit, 1), EVENTS_LIMIT)
        if request.epoch != self._log.epoch:
            after = -1
        found = self._log.since(after, limit, self._tenant.name, request.namespace)
        if found.entries or not found.is_exact or request.wait_ms <= 0 or self._polls >= MOST_POLLS:
            return self._happened(request, found)
        return self._later(request, found, limit)

    def snapshot(self, request: Snapshot) -> Snapped:
        """The next page. NotFound for a cursor that is not the last page's, Rejected while too many are under way."""
        spaces = self._spaces(request.namespace)
        limit = min(max(request.limit, LEAST_PAGE), EVENTS_LIMIT)
        now = self._store.clock.now()
        if request.cursor:
            blocks, cursor = self._store.snapshots.go_on(self._tenant.name, request.cursor, limit, now)
        else:
            blocks, cursor = self._store.snapshots.begin(self._tenant.name, spaces, limit, now)
        return snapped(request, self._log.epoch, self._log.sequence, [entry.event for entry in blocks], cursor)

    async def _later(self, request: Subscribe, found: Since, limit: int) -> Happened:
        """Wait for news of this tenant's; after `wait_ms` say how far there was none."""
        self._polls += 1
        try:
            async with asyncio.timeout(min(request.wait_ms / 1000, self._store.limits.wait_max_s)):
                while found.is_exact and not found.entries:
                    await news(self._log, found.last)
                    found = self._log.since(found.last, limit, self._tenant.name, request.namespace)
                    await asyncio.sleep(0)
        except TimeoutError:
            return self._happened(request, found)
        finally:
            self._polls -= 1
        return self._happened(request, found)

    def _happened(self, request: Subscribe, found: Since) -> Happened:
        events = [entry.event for entry in found.entries]
        return happened(request, self._log.epoch, found.last, events, is_exact=found.is_exact)

    def _spaces(self, number: int) -> Iterator[Space]:
        """Raises NotFound for a namespace that this tenant has not."""
        catalogue, tenant = self._store.catalogue, self._tenant
        opened = [catalogue.numbered(tenant, number)] if number else catalogue.of_tenant(tenant)
        return (space for found in opened for space in found.spaces)


async def news(log: EventLog, after: int) -> None:
    """Until the log has more than `after`."""
    if log.sequence > after:
        return
    arrived = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not arrived.done():
            arrived.set_result(None)

    log.watch(wake)
    try:
        await arrived
    finally:
        log.unwatch(wake)
