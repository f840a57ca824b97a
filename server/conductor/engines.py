"""Follows the engines that publish what they cache, each into its holder of the index."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from scheduler.index import PrefixIndex
from server.conductor.chains import Scheme
from server.conductor.engine_blocks import EngineBlocks
from server.conductor.engine_events import EngineEvents

log = logging.getLogger("cairn.conductor.engines")


class Publisher(NamedTuple):
    """Where an engine publishes, and what its blocks are called. hashes_are_keys: by our names already."""

    endpoints: str
    scheme: Scheme
    hashes_are_keys: bool


class EngineViews:
    """One follower for each engine that was named; `holder` gives a holder's number, `crashed` hears of an invariant
    that is broken."""

    def __init__(
        self, index: PrefixIndex, holder: Callable[[str], int], crashed: Callable[[BaseException], None]
    ) -> None:
        self._index = index
        self._holder = holder
        self._crashed = crashed
        self._publishers: dict[str, Publisher] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.views: dict[str, EngineEvents] = {}

    def follow(self, name: str, publisher: Publisher) -> None:
        """From now on; nothing new where it is followed there already. ConfigError for endpoints that are none."""
        if self._publishers.get(name) == publisher:
            return
        self.drop(name)
        holder = self._holder(f"engine:{name}")
        blocks = EngineBlocks(self._index, holder, publisher.scheme, hashes_are_keys=publisher.hashes_are_keys)
        view = EngineEvents(name, publisher.endpoints, blocks)
        view.start()
        self._publishers[name] = publisher
        self.views[name] = view
        task = asyncio.get_running_loop().create_task(view.run())
        task.add_done_callback(partial(self._ended, view))
        self._tasks[name] = task

    def drop(self, name: str) -> None:
        """It is followed no more, and what it had is forgotten."""
        view = self.views.pop(name, None)
        if view is None:
            return
        del self._publishers[name]
        task = self._tasks.pop(name)
        self._ending.add(task)
        task.add_done_callback(lambda _: view.close())
        task.add_done_callback(self._ending.discard)
        task.cancel()
        self._index.forget(self._holder(f"engine:{name}"))

    def _ended(self, view: EngineEvents, task: asyncio.Task[None]) -> None:
        """By what nobody thought of: what it knows grows old from now on, so it is nothing."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AssertionError):
            self._crashed(error)
        elif error is not None:
            log.error("engine %s is followed no more", view.name, exc_info=error)
            view.blocks.forget()
            view.blocks.missed()

    def scheme(self, name: str) -> Scheme | None:
        """What its blocks are called, by what it told of their size; None where it did not say."""
        view = self.views.get(name)
        if view is None or not view.blocks.block_tokens:
            return None
        return self._publishers[name].scheme._replace(block_tokens=view.blocks.block_tokens)

    def rows(self) -> Iterator[dict[str, Any]]:
        return (view.row() for _, view in sorted(self.views.items()))

    async def close(self) -> None:
        for name in list(self.views):
            self.drop(name)
        await asyncio.gather(*self._ending, return_exceptions=True)
