"""Work in the background: run until it ends or its owner is closed, and never forgotten."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """`crashed` hears of what a task raised."""

    def __init__(self, crashed: Callable[[BaseException], None]) -> None:
        self._crashed = crashed
        self._tasks: dict[asyncio.Task[Any], None] = {}  # the oldest first

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` until it ends or this is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    async def aclose(self) -> None:
        """Cancel all, and wait for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crashed(error)
