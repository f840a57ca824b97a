"""A prefill engine: one queue, first come first served, alone on a node or as a pipeline over several."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.costs import PrefillCost
from scheduler.requests import Request, Route
from scheduler.simulation.loop import Loop
from scheduler.simulation.network import Flow

CHUNK_TOKENS = 1024  # of a pipeline; published: more than 1,000, so that a chunk fills the GPUs


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the cluster. Moments are None until they come."""

    request: Request
    names: list[int]  # of its prompt's full blocks
    block_tokens: int
    route: Route
    sent_s: float
    held_blocks: int = 0  # of its prefix, that were brought to the engine for it and cannot be pushed out
    is_ready: bool = False
    ready_s: float = 0.0
    begun_s: float = 0.0
    prefill_s: float = 0.0
    prefilled_s: float | None = None
    cached_blocks: int = 0
    cached_tokens: int = 0
    stream: Flow | None = None
    is_streamed: bool = False
    first_step: int = 0  # of its decoding, among its engine's steps
    last_step: int = 0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`nodes` that divide the layers of a model among them, and take a prompt in chunks (CPP).

    With n chunks a prompt of T seconds takes T / nodes * (1 + (nodes - 1) / n), and the next may follow T / nodes
    after it began: one node is an ordinary engine.
    """

    nodes: int = 1
    chunk_tokens: int = CHUNK_TOKENS

    def latency_s(self, seconds: float, computed: int) -> float:
        chunks = max(1, -(-computed // self.chunk_tokens))
        return seconds / self.nodes * (1 + (self.nodes - 1) / chunks)

    def occupancy_s(self, seconds: float) -> float:
        return seconds / self.nodes


class PrefillEngine:
    """Computes the jobs that it is given in their order; the front waits for its transfer, and all behind it.

    When it takes a job, `cached_tokens` says how much of the prompt its node holds at that moment. `begun` and `ended`
    are called with the times of the job set.
    """

    def __init__(
        self,
        loop: Loop,
        cost: PrefillCost,
        pipeline: Pipeline,
        cached_tokens: Callable[[Job], int],
        begun: Callable[[Job], None],
        ended: Callable[[Job], None],
    ) -> None:
        self._loop = loop
        self._cost = cost
        self._pipeline = pipeline
        self._cached_tokens = cached_tokens
        self._begun = begun
        self._ended = ended
        self._queue: deque[Job] = deque()
        self._computing: dict[Job, None] = {}
        self._is_busy = False
        self._free_s = 0.0
        self.busy_s = 0.0  # of all its nodes' time, spent on prefill

    @property
    def waiting_tokens(self) -> int:
        """To be computed yet, of those that wait and those in it; nothing of a prompt counts as done before all is."""
        waiting = sum(job.request.tokens - job.route.cached_tokens for job in self._queue)
        return waiting + sum(job.request.tokens - job.cached_tokens for job in self._computing)

    @property
    def waiting_s(self) -> float:
        """Until it would begin with a job that comes now, if all transfers are in time."""
        queued = sum(
            self._pipeline.occupancy_s(self._cost.seconds(job.request.tokens, job.route.cached_tokens))
            for job in self._queue
        )
        return max(0.0, self._free_s - self._loop.now) + queued

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def ready(self, job: Job) -> None:
        """Its prefix is where it will be used."""
        job.is_ready = True
        job.ready_s = self._loop.now
        self._next()

    def _next(self) -> None:
        if self._is_busy or not self._queue or not self._queue[0].is_ready:
            return
        job = self._queue.popleft()
        self._is_busy = True
        self._computing[job] = None
        job.begun_s = self._loop.now
        self._compute(job)

    def _compute(self, job: Job) -> None:
        tokens = job.request.tokens
        job.cached_tokens = self._cached_tokens(job)
        seconds = self._cost.seconds(tokens, job.cached_tokens)
        job.prefill_s = self._pipeline.latency_s(seconds, tokens - job.cached_tokens)
        self.busy_s += seconds
        self._free_s = self._loop.now + self._pipeline.occupancy_s(seconds)
        self._loop.at(self._free_s, self._free)
        self._loop.after(job.prefill_s, lambda: self._end(job))
        self._begun(job)

    def _free(self) -> None:
        self._is_busy = False
        self._next()

    def _end(self, job: Job) -> None:
        del self._computing[job]
        job.prefilled_s = self._loop.now
        self._ended(job)
