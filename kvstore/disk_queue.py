"""Threads for slow media: loads go before stores, and stores never take all of the threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from queue import PriorityQueue
from threading import Thread
from typing import Any, TypeVar

from kvstore.copier import finished

Result = TypeVar("Result")
LOAD, STORE, STOP = 0, 1, 2
RESERVED = 2  # threads that do not store


class DiskQueue:
    """`threads` threads, started at the first work."""

    def __init__(self, threads: int) -> None:
        self._queue: PriorityQueue[tuple[int, int, Callable[[], Any], Future[Any]]] = PriorityQueue()
        self._order = count()
        self._threads: list[Thread] = []
        self._size = threads
        self._stores = asyncio.Semaphore(max(threads - RESERVED, 1))

    async def load(self, work: Callable[[], Result]) -> Result:
        """Do `work` in a thread, before all stores that wait."""
        return await finished(self._submit(LOAD, work))

    async def store(self, work: Callable[[], Result]) -> Result:
        """Do `work` in a thread when no load waits, and some threads are left for loads."""
        async with self._stores:
            return await finished(self._submit(STORE, work))

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def close(self) -> None:
        """End the threads, after what was given to them. Nothing may be given to them after."""
        for _ in self._threads:
            self._queue.put((STOP, next(self._order), lambda: None, Future()))
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _submit(self, priority: int, work: Callable[[], Result]) -> "Future[Result]":
        if not self._threads:
            self._threads = [Thread(target=self._run, name=f"cairn-disk-{number}") for number in range(self._size)]
            for thread in self._threads:
                thread.start()
        job: Future[Result] = Future()
        self._queue.put((priority, next(self._order), work, job))
        return job

    def _run(self) -> None:
        while True:
            priority, _, work, job = self._queue.get()
            if priority == STOP:
                return
            if not job.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                job.set_exception(error)
                del error
            else:
                job.set_result(result)
            del work, job
