"""Asks nodes to load ahead what queued requests will use: blocks of other nodes, and of their own lower tiers."""

import asyncio
import logging
import time
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from engine_client.address import parse_address
from engine_client.client import Client
from engine_client.steps import OpenSpace
from kvstore.errors import InvalidRequest, NotFound, StoreError
from kvstore.types import DRAM as DRAM_TIER
from scheduler.index import PrefixIndex
from scheduler.prefetch import Hint, Prefetching
from scheduler.requests import Pull, Route
from server.conductor.chains import Hashed
from server.conductor.models import NamedNamespace
from server.conductor.nodes import NodeViews, holder_of

log = logging.getLogger("cairn.conductor.hints")

LOAD_S: Final = 30.0  # that a node may take to load what it is asked for
LOOK_S: Final = 0.05  # until the first look at whether it has come; each after it waits twice as long
LOOK_MOST_S: Final = 0.4
MEASURED_S: Final = 0.25  # a load that takes less says little of a rate: looks are too far between
LOOKED_AT: Final = 32  # requests, at a time: a look at a long one takes most of a millisecond
DRAM: Final = 1  # column of PrefixIndex.prefixes: what is in memory


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a routed request will use at its node, and as what the node knows it."""

    request: str
    hashed: Hashed
    namespace: NamedNamespace
    kv_bytes: int  # of a token


class Measured(Protocol):
    """Hears how fast bytes came to a node."""

    def __call__(self, node: str, rate: float, *, is_pull: bool) -> None: ...


class Hints:
    """`plan` what a request needs, then tell how it goes on; loads are asked for in the background, when their windows
    allow. A load that a node has begun is not called back: cancelling ends only what was not asked for yet."""

    def __init__(
        self,
        index: PrefixIndex,
        nodes: NodeViews,
        token: str,
        ca_file: str,
        *,
        most: int,
        measured: Measured,
    ) -> None:
        """measured: what it is called with says how many bytes a second came to a node, where that took its time."""
        self._index = index
        self._nodes = nodes
        self._token = token
        self._ca_file = ca_file
        self._most = most
        self._measured = measured
        self._wanted: dict[str, Wanted] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._clients: dict[str, tuple[str, Client]] = {}
        self._spaces: dict[tuple[str, str], OpenSpace] = {}
        self._there: dict[str, tuple[str, int]] = {}  # request -> node and blocks that came for it, until it uses them
        self._closing: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(max(1, most))
        self._timer: asyncio.TimerHandle | None = None
        self.prefetching = Prefetching()
        self.sent = self.loaded = self.failed = self.evicted = 0

    def plan(self, wanted: Wanted, route: Route, node: str, now: float) -> None:
        """A request was sent to an instance beside `node`. Nothing where all that it uses is in memory there."""
        pull = route.pull or self._lift(wanted, route, node)
        if pull is None or pull.stop <= pull.first or node not in self._nodes.addresses or not self._most:
            return
        size_bytes = (pull.stop - pull.first) * wanted.hashed.scheme.block_tokens * wanted.kv_bytes
        if self.prefetching.queued(wanted.request, pull, size_bytes, expected_at_s=now + route.queue_s, now=now):
            self._wanted[wanted.request] = wanted
            self._pump(now)

    def look(self, now: float) -> None:
        """Find what went from memory before it was used: then the windows were too large. Call it now and then."""
        for request in list(islice(self._there, LOOKED_AT)):
            node, stop = self._there.pop(request)
            wanted = self._wanted.get(request)
            if wanted is None:
                continue
            if node in self._nodes.views and self._in_memory(wanted, node, stop) < stop:
                self.evicted += 1
                self.prefetching.evicted(request, now)
            else:
                self._there[request] = node, stop  # behind those that wait for their turn
        for node in self._clients.keys() - self._nodes.addresses.keys():
            self._drop(node)
        self._pump(now)

    def consumed(self, request: str, now: float) -> None:
        """Its prefill is done."""
        self._there.pop(request, None)
        if self._wanted.pop(request, None) is not None:
            task = self._tasks.get(request)
            self.prefetching.consumed(request, now, stall_s=LOOK_S if task is not None else 0.0)
            self._stop(request)
            self._pump(now)

    def cancelled(self, request: str, now: float) -> None:
        self._there.pop(request, None)
        if self._wanted.pop(request, None) is not None:
            self.prefetching.cancelled(request)
            self._stop(request)
            self._pump(now)

    @property
    def underway(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
        for _, client in self._clients.values():
            await client.aclose()

    def _lift(self, wanted: Wanted, route: Route, node: str) -> Pull | None:
        """From the node's own lower tiers into its memory."""
        if not route.transfer_s:
            return None
        block_tokens = wanted.hashed.scheme.block_tokens
        stop = min(-(-route.cached_tokens // block_tokens), len(wanted.hashed.chain.names))
        first = self._in_memory(wanted, node, stop)
        return Pull(holder_of(node), holder_of(node), 0, first, stop) if first < stop else None

    def _in_memory(self, wanted: Wanted, node: str, stop: int) -> int:
        """Blocks of the chain that the node has in memory, from the first."""
        lengths = self._index.prefixes(wanted.hashed.chain.names[:stop])
        holder = self._nodes.views[node].holder
        return int(lengths[holder, DRAM]) if holder < len(lengths) else 0

    def _pump(self, now: float) -> None:
        for request in self.prefetching.expired(now):
            self._wanted.pop(request, None)
            self._stop(request)
        if len(self._tasks) < self._most:
            for hint in self.prefetching.due(now):
                self._tasks[hint.request] = asyncio.get_running_loop().create_task(self._load(hint))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_s = self.prefetching.wake_s(now)
        if wake_s is not None:
            wait_s = max(LOOK_S, wake_s - now)
            self._timer = asyncio.get_running_loop().call_later(wait_s, lambda: self._pump(time.monotonic()))

    def _stop(self, request: str) -> None:
        task = self._tasks.pop(request, None)
        if task is not None:
            task.cancel()

    async def _load(self, hint: Hint) -> None:
        """Ask the target, then wait until its events say that all is there."""
        wanted, pull = self._wanted[hint.request], hint.pull
        node = pull.target.removeprefix("node:")
        try:
            async with self._turns, asyncio.timeout(LOAD_S):
                client, space = await self._at(node, wanted)
                keys = wanted.hashed.run(pull.first, pull.stop)
                parent = wanted.hashed.key(pull.first - 1) if pull.first else None
                self.sent += 1
                began_s = time.monotonic()
                if await client.promote(space, keys, LOAD_S, parent):
                    await self._come(wanted, node, pull.stop)
                took_s = time.monotonic() - began_s
                if took_s >= MEASURED_S:
                    self._measured(node, hint.size_bytes / took_s, is_pull=pull.source != pull.target)
            self.loaded += 1
            self._there[hint.request] = node, pull.stop
            self.prefetching.arrived(hint.request, time.monotonic())
        except (StoreError, TimeoutError) as error:
            self.failed += 1
            log.info("node %s did not load ahead: %s", node, error)
            self._wanted.pop(hint.request, None)
            self.prefetching.cancelled(hint.request)
        finally:
            if self._tasks.get(hint.request) is asyncio.current_task():
                del self._tasks[hint.request]
        self._pump(time.monotonic())

    async def _come(self, wanted: Wanted, node: str, stop: int) -> None:
        """Wait until the node's events have told of all these blocks: nobody says when it is the last."""
        wait_s = LOOK_S
        while self._in_memory(wanted, node, stop) < stop:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LOOK_MOST_S)

    def _drop(self, node: str) -> None:
        """Its client, if there is one: it is gone, or is elsewhere."""
        _, client = self._clients.pop(node, ("", None))
        if client is not None:
            self._spaces = {at: space for at, space in self._spaces.items() if at[0] != node}
            closing = asyncio.get_running_loop().create_task(client.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _at(self, node: str, wanted: Wanted) -> tuple[Client, OpenSpace]:
        """The node's client, and the namespace as it has it there. Raises StoreError."""
        address = self._nodes.addresses.get(node)
        if address is None:
            raise NotFound(f"node {node} is followed no more")
        known = self._clients.get(node)
        if known is None or known[0] != address:
            self._drop(node)
            way = "local" if parse_address(address).path else "tcp"  # no block is read here
            client = Client(address, self._token, name="conductor", ca_file=self._ca_file, transport=way)
            self._clients[node] = address, client
            self.prefetching.target(holder_of(node), await _memory_bytes(client), time.monotonic())
        client = self._clients[node][1]
        at = node, wanted.namespace.name
        if at not in self._spaces:
            self._spaces[at] = await client.open(wanted.namespace.name, wanted.namespace.fields)
        if self._spaces[at].root != wanted.hashed.scheme.root:
            raise InvalidRequest(f"namespace {wanted.namespace.name} has another root than instances registered")
        return client, self._spaces[at]


async def _memory_bytes(client: Client) -> int:
    """Of the node, for blocks. Raises StoreError."""
    found = await client.stat()
    return sum(row["target_bytes"] for row in found["tiers"] if row["tier"] == DRAM_TIER)
