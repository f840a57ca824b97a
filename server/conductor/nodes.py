"""Follows the store nodes: what each tells of its blocks becomes its holder's in the index."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Set
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import numpy as np

from engine_client.address import parse_address
from engine_client.client import Client
from engine_client.subscription import Standing, Update, subscribe
from kvstore.errors import InvalidRequest, StoreError
from kvstore.types import DRAM, HBM, KEY_BYTES, NVME, TierName
from kvstore.wire_events import BlockEvent
from scheduler.index import PrefixIndex
from scheduler.requests import Names

log = logging.getLogger("cairn.conductor.nodes")

MOST_NODES: Final = 4096  # that are followed: what the index has masks for
RETRY_S: Final = 30.0  # after an error that another try does not mend, unless somebody changes the node's settings
TIERS: Final[dict[TierName, int]] = {HBM: 0, DRAM: 1, NVME: 2}  # a bucket is everybody's: no reason to go anywhere
FIRST_PART: Final = bytes(2)


def holder_of(node: str) -> str:
    """A node's name as a holder; nothing for none."""
    return f"node:{node}" if node else ""


class NodeView:
    """What is known of one node's blocks. A block in several parts is there when its part 0 is: parts are written
    together, and what of it has gone is seen when it is read.

    `standing` is DEGRADED too while blocks are left out because the index is full.
    """

    def __init__(self, name: str, holder: int, index: PrefixIndex, most_blocks: int) -> None:
        self.name = name
        self.holder = holder
        self.told = Standing.DEGRADED  # by its follower
        self.changed_s = time.monotonic()  # when it was heard of last while that was not exact
        self.failure = ""
        self.is_alone: bool | None = None  # in no cluster, so that nothing can be pulled there; None: not known
        self.events = 0
        self.left_out = 0
        self._index = index
        self._most_blocks = most_blocks
        self._is_complete = True

    @property
    def standing(self) -> Standing:
        return self.told if self._is_complete else Standing.DEGRADED

    def take(self, update: Update) -> None:
        if update.is_reset:
            self._index.forget(self.holder)
            self._is_complete = True
        self._apply(update.events)
        self.told = update.standing
        self.changed_s = time.monotonic()
        self.failure = ""

    def forget(self) -> None:
        self._index.forget(self.holder)
        self._is_complete = True
        self.told = Standing.DEGRADED

    def row(self) -> dict[str, Any]:
        return {"name": self.name, "standing": self.standing.value, "events": self.events, "failure": self.failure}

    def _apply(self, events: Iterable[BlockEvent]) -> None:
        """The last word on a block in a tier is what counts, so a batch is at most six changes of the index."""
        last: dict[tuple[TierName, bytes], bool] = {}
        for event in events:
            key = event.key
            if len(key) == KEY_BYTES or key[KEY_BYTES:] == FIRST_PART:
                last[event.tier, key] = event.is_stored
        self.events += len(last)
        for tier, number in TIERS.items():
            gone = [key for (where, key), is_stored in last.items() if where == tier and not is_stored]
            come = [key for (where, key), is_stored in last.items() if where == tier and is_stored]
            if gone:
                self._index.removed(self.holder, number, _names(gone))
            if come and self._index.blocks + len(come) > self._most_blocks:
                self.left_out += len(come)
                self._is_complete = False
            elif come:
                self._index.stored(self.holder, number, _names(come))


class NodeViews:
    """A follower for each node that was named, by an instance or in the settings. `holder` gives a holder's number;
    `named` says which nodes are named now: others are dropped once they are out of reach for too long, and `gone` hears
    of their holders. `joined` hears of a node whose cluster is known by now, `crashed` of an invariant that is broken.
    """

    def __init__(
        self,
        index: PrefixIndex,
        holder: Callable[[str], int],
        token: str,
        ca_file: str,
        *,
        forget_after_s: float,
        most_blocks: int,
        named: Callable[[], Set[str]],
        joined: Callable[[str], None],
        gone: Callable[[str], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._index = index
        self._holder = holder
        self._token = token
        self._ca_file = ca_file
        self._forget_after_s = forget_after_s
        self._most_blocks = most_blocks
        self._named = named
        self._joined = joined
        self._gone = gone
        self._crashed = crashed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.views: dict[str, NodeView] = {}
        self.addresses: dict[str, str] = {}
        self.forgotten = 0  # times that a node was lost for too long

    def follow(self, name: str, address: str) -> None:
        """From now on; at another address it is another node of that name. Over MOST_NODES it is not followed."""
        if self.addresses.get(name) == address or (name not in self.views and len(self.views) >= MOST_NODES):
            return
        self.addresses[name] = address
        if name not in self.views:
            self.views[name] = NodeView(name, self._holder(holder_of(name)), self._index, self._most_blocks)
        self._restart(name)

    def look(self) -> None:
        """Forget what nodes had that are out of reach for too long; to be called now and then."""
        now = time.monotonic()
        late = [
            name
            for name, view in self.views.items()
            if view.told is Standing.DEGRADED and now - view.changed_s > self._forget_after_s
        ]
        named = self._named() if late else frozenset()
        for name in late:
            view = self.views[name]
            view.forget()
            view.changed_s = now
            self.forgotten += 1
            if name in named:
                self._restart(name)  # a follower that goes on where it was would leave out what is forgotten now
            else:
                self._tasks.pop(name).cancel()
                del self.views[name], self.addresses[name]
                self._gone(holder_of(name))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _restart(self, name: str) -> None:
        former = self._tasks.get(name)
        if former is not None:
            former.cancel()
        task = asyncio.get_running_loop().create_task(self._follow(self.views[name], former))
        task.add_done_callback(partial(self._ended, self.views[name]))
        self._tasks[name] = task

    def _ended(self, view: NodeView, task: asyncio.Task[None]) -> None:
        """By what nobody thought of: what it knows grows old from now on, so it is nothing. `look` begins anew."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AssertionError):
            self._crashed(error)
        elif error is not None:
            log.error("node %s is followed no more", view.name, exc_info=error)
            view.forget()
            view.failure, view.changed_s = f"{type(error).__name__}: {error}", time.monotonic()

    async def _follow(self, view: NodeView, former: asyncio.Task[None] | None) -> None:
        if former is not None:
            await asyncio.wait([former])  # its last update must not come after the first of this one
        while True:
            try:
                async with aclosing(
                    subscribe(
                        self.addresses[view.name], self._token, ca_file=self._ca_file, name=f"conductor of {view.name}"
                    )
                ) as updates:
                    async for update in updates:
                        view.take(update)
                        if update.is_reset:
                            await self._ask_for_cluster(view)
            except StoreError as error:
                view.told, view.failure = Standing.DEGRADED, str(error)
                log.warning("node %s: %s", view.name, error)
            await asyncio.sleep(RETRY_S)

    async def _ask_for_cluster(self, view: NodeView) -> None:
        """Raises StoreError for a node that does not answer that either."""
        way = "local" if parse_address(self.addresses[view.name]).path else "tcp"
        client = Client(self.addresses[view.name], self._token, name="conductor", ca_file=self._ca_file, transport=way)
        try:
            await client.nodes()
            view.is_alone = False
        except InvalidRequest:
            view.is_alone = True
        finally:
            await client.aclose()
        self._joined(view.name)


def _names(keys: list[bytes]) -> Names:
    return np.frombuffer(b"".join([key[:8] for key in keys]), dtype="<u8").astype(np.uint64)
