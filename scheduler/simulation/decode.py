"""A decode engine: continuous batching, with the steps between two changes of the batch computed at once."""

import heapq
from array import array
from collections import deque
from collections.abc import Callable

import numpy as np

from scheduler.costs import DecodeCost, Floats
from scheduler.simulation.loop import Loop
from scheduler.simulation.prefill import Job
from scheduler.simulation.steps import PlannedSteps


class DecodeEngine:
    """Every sequence in the batch gets one token a step. A sequence joins between steps, when all that it will hold
    fits in the KV memory; the others wait in their order.

    A request's first token is made by its prefill, so `output_tokens - 1` steps are left, at least one.
    """

    def __init__(
        self,
        loop: Loop,
        cost: DecodeCost,
        capacity_tokens: int,
        capacity_batch: int,
        ends: Callable[[Job], None],
    ) -> None:
        self._loop = loop
        self._cost = cost
        self._capacity_tokens = capacity_tokens
        self._capacity_batch = capacity_batch
        self._ends = ends
        self._waiting: deque[Job] = deque()
        self._running: list[tuple[int, int, Job]] = []  # heap by last step
        self._joined = 0
        self._reserved_tokens = 0
        self._context = 0  # of those in the batch, at the last step that is done
        self._step_ends = array("d")  # of all steps that are done
        self._plan = PlannedSteps(loop, cost, self._change)  # until the next change of the batch

    @property
    def batch(self) -> int:
        """Sequences, those that wait too."""
        return len(self._running) + len(self._waiting)

    @property
    def context(self) -> int:
        """Tokens of all of them, those in the batch as of now."""
        waiting = sum(job.request.tokens + 1 for job in self._waiting)
        return self._context + self._plan.done * len(self._running) + waiting

    @property
    def step_s(self) -> float:
        """Of a step of now's batch."""
        return self._cost.seconds(len(self._running), self.context) if self._running else 0.0

    def intervals(self, job: Job) -> Floats:
        """Seconds between a finished job's tokens, from its prefill's on."""
        assert job.prefilled_s is not None
        ends = np.frombuffer(self._step_ends[job.first_step : job.last_step], dtype=float)
        return np.diff(ends, prepend=job.prefilled_s)

    def submit(self, job: Job) -> None:
        self._waiting.append(job)
        if not self._running:
            self._change()
        elif len(self._waiting) == 1 and self._fits(job):
            self._plan.shorten()

    def _fits(self, job: Job) -> bool:
        """One sequence fits always, however long."""
        whole = job.request.tokens + job.request.output_tokens
        return not self._running or (
            len(self._running) < self._capacity_batch and self._reserved_tokens + whole <= self._capacity_tokens
        )

    def _change(self) -> None:
        """The plan is done: who is ready leaves, who fits joins, and the next plan is made."""
        taken = self._plan.take()
        self._step_ends.frombytes(taken.tobytes())
        self._context += len(taken) * len(self._running)
        ended = []
        while self._running and self._running[0][0] == len(self._step_ends):
            ended.append(heapq.heappop(self._running)[2])
        for job in ended:
            self._reserved_tokens -= job.request.tokens + job.request.output_tokens
            self._context -= job.request.tokens + 1 + job.last_step - job.first_step
        while self._waiting and self._fits(self._waiting[0]):
            self._join(self._waiting.popleft())
        if self._running:
            self._plan.make(len(self._running), self._running[0][0] - len(self._step_ends), self._context)
        for job in ended:
            self._ends(job)

    def _join(self, job: Job) -> None:
        job.first_step = len(self._step_ends)
        job.last_step = job.first_step + max(1, job.request.output_tokens - 1)
        heapq.heappush(self._running, (job.last_step, self._joined, job))
        self._joined += 1
        self._reserved_tokens += job.request.tokens + job.request.output_tokens
        self._context += job.request.tokens + 1
