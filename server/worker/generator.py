"""Requests on their way through the engine: one thread computes, others wait for the store, the event loop reads.

The engine's thread owns its queues and learns what happens from its inbox. It computes a chunk of one prompt, then
a step of all sequences that decode, so that a long prompt delays the others' tokens by a chunk's time at most.
"""

import asyncio
import logging
import queue
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from engine_client.adapters import PrefixLostError
from server.worker.jobs import Ended, Job, Reason
from server.worker.store_side import LOADS, StoreSide

if TYPE_CHECKING:
    from engine_client.adapters.batching import BatchingEngine

log = logging.getLogger("cairn.worker")

MEASURED = 512  # prefills and steps that are kept for the next heartbeat
STORE_THREADS = 2 * LOADS  # so that what waits for blocks to be stored does not keep others from loading


class Limits(NamedTuple):
    """How much of the engine the requests together may take."""

    batch: int
    tokens: int  # of KV, over the whole batch
    queue: int
    chunks_per_step: int = 1


class Prefill(NamedTuple):
    tokens: int
    cached_tokens: int
    seconds: float


class Step(NamedTuple):
    batch: int
    context_tokens: int
    seconds: float


class Measured:
    """What the engine's thread took for what; the oldest make way. For one that writes and one that takes."""

    def __init__(self) -> None:
        self.prefills: deque[Prefill] = deque(maxlen=MEASURED)
        self.steps: deque[Step] = deque(maxlen=MEASURED)

    def take(self) -> tuple[list[Prefill], list[Step]]:
        """All since the last time."""
        prefills = [self.prefills.popleft() for _ in range(len(self.prefills))]
        return prefills, [self.steps.popleft() for _ in range(len(self.steps))]


Happening = tuple[Callable[[Job], None], Job]


class Generator:
    """Made inside the event loop. `failed` is called there when the engine's thread ends by a fault of its own."""

    def __init__(
        self,
        engine: "BatchingEngine",
        limits: Limits,
        threads: int,
        store: StoreSide | None,
        failed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._threads = threads
        self._store = store
        self._failed = failed
        self.measured = Measured()
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Happening | None] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="cairn-store")
        # of the event loop:
        self.jobs: set[Job] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        # of the engine's thread:
        self._waiting: deque[Job] = deque()
        self._preparing: set[Job] = set()
        self._turn: Job | None = None  # of those, the one that was not asked for before it was its turn
        self._ready: list[Job] = []  # oldest first
        self._prefilling: Job | None = None
        self._batch: list[Job] = []
        self._thread = threading.Thread(target=self._run, name="cairn-engine", daemon=True)
        self._thread.start()

    # In the event loop.

    @property
    def queued(self) -> int:
        """Requests without a first token."""
        return sum(job.given_tokens == 0 for job in self.jobs)

    @property
    def is_full(self) -> bool:
        return self.queued > self._limits.queue

    @property
    def load(self) -> tuple[int, int, int]:
        """Tokens of prompts that are not computed, sequences that decode, and their tokens."""
        decoding = [job for job in self.jobs if job.given_tokens]
        waiting = sum(job.running.left_tokens for job in self.jobs if job.given_tokens == 0)
        return waiting, len(decoding), sum(job.prompt_tokens + job.given_tokens for job in decoding)

    def submit(self, job: Job) -> None:
        """Its events follow. The caller has looked at `is_full`, and must `leave` whatever comes."""
        assert job.most_tokens <= self._limits.tokens
        job.began_s = self._loop.time()
        self.jobs.add(job)
        self._idle.clear()
        self._inbox.put((self._arrived, job))

    def leave(self, job: Job) -> None:
        """Nobody reads its events any more. Where it has not ended, it leaves the batch at the next step."""
        if job in self.jobs:
            self._forget(job)
            job.is_cancelled = True
            self._inbox.put((self._cancelled, job))

    async def drain(self, seconds: float) -> None:
        """Wait until nothing runs, for `seconds` at most."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            log.warning("%d requests were still running after %g s", len(self.jobs), seconds)

    async def stop(self) -> None:
        """End what runs, and the threads. Grants and leases are given back."""
        for job in list(self.jobs):
            self._ended(job, Ended("error", "the worker stops"))
        self._inbox.put(None)
        await asyncio.to_thread(self._wind_up)

    def _wind_up(self) -> None:
        self._thread.join()
        self._pool.shutdown(wait=True)
        while not self._inbox.empty():  # what the store gave in the meantime
            happening = self._inbox.get()
            if happening is not None:
                self._engine.close(happening[1].running)

    def _told(self, events: list[tuple[Job, int | Ended]]) -> None:
        for job, event in events:
            if isinstance(event, Ended):
                self._ended(job, event)
            elif job in self.jobs:
                job.given_tokens += 1
                job.events.put_nowait(event)

    def _ended(self, job: Job, ended: Ended) -> None:
        if job in self.jobs:
            self._forget(job)
            job.ended = ended
            job.events.put_nowait(ended)

    def _forget(self, job: Job) -> None:
        self.jobs.discard(job)
        if not self.jobs:
            self._idle.set()

    # In the threads that wait for the store.

    def _prepare(self, job: Job, *, is_to_load: bool) -> None:
        try:
            if self._store is not None and not job.is_cancelled:
                storing = self._store.storing()
                with self._store.loading() if is_to_load else nullcontext() as loading:
                    self._engine.prepare(job.running, loading, storing)
        finally:
            self._inbox.put((self._prepared, job))

    def _finish(self, job: Job) -> None:
        """All is computed: what is to be stored is waited for, and the job may end by it."""
        try:
            self._engine.finish(job.running)
        finally:
            if job.is_handed_over:
                self._tell([(job, Ended("length"))])

    # In the engine's thread.

    def _run(self) -> None:
        from engine_client.adapters.batching import ComputeFailed

        is_stopped = False
        try:
            self._engine.use_threads(self._threads)
            while not is_stopped:
                is_stopped = not self._read_inbox()
                self._start_next()
                self._prefill_some()
                try:
                    self._step()
                except ComputeFailed as error:
                    lost, self._batch = self._batch, []  # nobody knows for which of them it computed
                    self._lose(lost, str(error))
        finally:
            left = [*self._ready, *self._batch, *([self._prefilling] if self._prefilling else [])]
            for job in left:
                self._close(job)
            if not is_stopped:
                self._call(self._failed)

    def _read_inbox(self) -> bool:
        """Waits when there is nothing to compute. False: it is time to stop."""
        is_next = bool(self._ready or (self._waiting and self._turn is None))
        is_idle = not self._batch and self._prefilling is None and not is_next
        while True:
            try:
                happening = self._inbox.get(block=is_idle)
            except queue.Empty:
                return True
            if happening is None:
                return False
            react, job = happening
            react(job)
            is_idle = False

    def _arrived(self, job: Job) -> None:
        if job.is_stored and len(self._preparing) + len(self._ready) < LOADS:
            self._ask_store(job, is_to_load=True)
        else:
            self._waiting.append(job)

    def _prepared(self, job: Job) -> None:
        self._preparing.discard(job)
        if job is self._turn:
            self._turn = None
        if job.is_cancelled:
            self._close(job)
        else:
            insort(self._ready, job, key=lambda one: one.began_s)

    def _cancelled(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        elif job in self._batch:
            self._batch.remove(job)
        elif job is self._prefilling:
            self._prefilling = None
            self._close(job)
        elif job in self._ready:
            self._ready.remove(job)
            self._close(job)

    def _start_next(self) -> None:
        """The next prompt begins. The store is asked at a prompt's turn: what the one before shared is there then."""
        if self._prefilling is not None:
            return
        if self._waiting and self._turn is None and self._is_oldest(self._waiting[0]):
            self._turn = self._waiting.popleft()
            self._ask_store(self._turn, is_to_load=True)
        if self._ready and self._fits(self._ready[0]):
            self._prefilling = self._ready.pop(0)

    def _is_oldest(self, job: Job) -> bool:
        return not self._ready or job.began_s <= self._ready[0].began_s

    def _ask_store(self, job: Job, *, is_to_load: bool) -> None:
        self._preparing.add(job)
        if self._store is None:
            self._prepared(job)
        else:
            self._in_pool(lambda: self._prepare(job, is_to_load=is_to_load))

    def _fits(self, job: Job) -> bool:
        taken = sum(other.most_tokens for other in self._batch)
        return len(self._batch) < self._limits.batch and taken + job.most_tokens <= self._limits.tokens

    def _prefill_some(self) -> None:
        from engine_client.adapters.batching import ComputeFailed

        for _ in range(self._limits.chunks_per_step if self._batch else 1):
            job = self._prefilling
            if job is None:
                return
            try:
                token = self._engine.chunk(job.running)
            except PrefixLostError as error:
                log.warning("a loaded prefix was lost, and is computed: %s", error)
                self._prefilling = None
                self._ask_store(job, is_to_load=False)
                return
            except ComputeFailed as error:
                self._prefilling = None
                self._close(job)
                self._lose([job], str(error))
                return
            if token is not None:
                self._prefilling = None
                self._first(job, token)

    def _first(self, job: Job, token: int) -> None:
        running = job.running
        job.cached_tokens = running.prefix.tokens
        self.measured.prefills.append(Prefill(len(running.tokens), job.cached_tokens, running.compute_s))
        events: list[tuple[Job, int | Ended]] = [(job, token)]
        reason = job.ended_by(token, 1)
        if reason is None:
            self._batch.append(job)
        elif not job.is_handed_over:
            events.append((job, Ended(reason)))
        self._tell(events)
        self._in_pool(lambda: self._finish(job))

    def _step(self) -> None:
        batch = self._batch
        if not batch:
            return
        context = sum(job.running.context_tokens for job in batch)
        began = time.perf_counter()
        tokens = self._engine.step([job.running for job in batch])
        self.measured.steps.append(Step(len(batch), context, time.perf_counter() - began))
        events: list[tuple[Job, int | Ended]] = []
        going: list[Job] = []
        for job, token in zip(batch, tokens, strict=True):
            events.append((job, token))
            given = job.running.context_tokens - job.prompt_tokens + 1
            reason: Reason | None = job.ended_by(token, given)
            if reason is None:
                going.append(job)
            else:
                events.append((job, Ended(reason)))
        self._batch = going
        self._tell(events)

    def _lose(self, jobs: list[Job], message: str) -> None:
        log.error("the model failed: %s", message)
        self._tell([(job, Ended("error", message)) for job in jobs])

    def _close(self, job: Job) -> None:
        self._in_pool(lambda: self._engine.close(job.running))

    def _in_pool(self, work: Callable[[], None]) -> None:
        self._pool.submit(work).add_done_callback(_complain)

    # From any thread.

    def _tell(self, events: list[tuple[Job, int | Ended]]) -> None:
        if events:
            self._call(lambda: self._told(events))

    def _call(self, what: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed: nobody is there to hear it
            log.debug("the event loop is closed")


def _complain(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        log.error("waiting for the store failed", exc_info=error)
