"""Whether a member that broke its connection, or does not answer, is gone: then its coordinator is told at once."""

import asyncio
from collections.abc import Callable

from kvstore.clock import Clock
from kvstore.cluster.coordinator import Coordinator
from kvstore.cluster.links import Links
from kvstore.cluster.members import Member, View
from kvstore.cluster.routes import Routes
from kvstore.errors import ConnectFailed, StoreError, TransportError
from kvstore.tasks import Tasks
from kvstore.wire_cluster import Locate

PROBE_S = 1.0
PROBE_PAUSES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
REPORT_AGAIN_S = 10.0  # a member that objected to its death is not reported again before: it would come and go


class Probing:
    """`view` says who is a member at present; `gone` hears of members whose process is known to be gone."""

    def __init__(self, coordinator: Coordinator, links: Links, routes: Routes, clock: Clock, *,
                 view: Callable[[], View], tasks: Tasks, gone: Callable[[Member], None]) -> None:  # fmt: skip
        self._coordinator = coordinator
        self._links = links
        self._routes = routes
        self._clock = clock
        self._view = view
        self._tasks = tasks
        self._gone = gone
        self._probing: set[str] = set()
        self._reported: dict[tuple[str, int], float] = {}  # starts of members that were said to be dead: when

    def lost(self, name: str) -> None:
        """A connection to a member broke: is it still there?"""
        member = self._view().members.get(name)
        if member is not None and name not in self._probing:
            self._probing.add(name)
            self._tasks.spawn(self._probe(member))

    def failed(self, member: Member, error: StoreError) -> bool:
        """It did not answer, or refused. Whether it is gone: nobody listens at its address any more."""
        if isinstance(error, TransportError):
            self._routes.failed(member.name, str(error))
        is_gone = isinstance(error, ConnectFailed) and isinstance(error.__cause__, ConnectionRefusedError)
        if is_gone:
            self._report(member)
        return is_gone

    async def _probe(self, member: Member) -> None:
        """Ask until it answers, or is known to be gone: where a process ends, its last connections still open."""
        try:
            for pause_s in PROBE_PAUSES_S:
                await asyncio.sleep(pause_s)
                try:
                    await self._links.ask(member, lambda number: Locate(number, b"", b""), PROBE_S)
                except StoreError as error:
                    if self.failed(member, error):
                        return
                else:
                    self._routes.answered(member.name, 0.0)
                    return
        finally:
            self._probing.discard(member.name)

    def _report(self, member: Member) -> None:
        self._gone(member)
        now = self._clock.now()
        self._reported = {start: at for start, at in self._reported.items() if now - at < REPORT_AGAIN_S}
        if (member.name, member.epoch) not in self._reported:
            self._reported[member.name, member.epoch] = now
            self._tasks.spawn(self._coordinator.report_dead(member.name, member.epoch))
