"""Engines that prefill and decode in one place, as the baselines that disaggregation is compared with."""

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from scheduler.costs import Floats
from scheduler.simulation.caches import BlockCache
from scheduler.simulation.hardware import Hardware
from scheduler.simulation.loop import Loop
from scheduler.simulation.outcomes import LoadSample, Outcomes, Record, longest_mean_s
from scheduler.simulation.steps import PlannedSteps
from scheduler.simulation.traces import BLOCK_TOKENS, TraceRequest
from scheduler.tuning import Slo

TOO_LONG: Final = "too_long"  # a prompt with its answer is more than the KV memory holds


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledSettings:
    """How an engine mixes prefill with decode; the defaults are those of vLLM 0.5.1, the published baseline.

    is_chunked: a step takes `step_tokens` tokens, first one of each sequence, then pieces of prompts; 512 is the
    default of that release, chosen there for the time between tokens. Otherwise prompts go first, and whole: a step
    takes all that wait, up to `prompt_tokens` together (its limit is the model's context), and decoding stands still.
    is_caching: prefixes that the KV memory still holds are not computed again. With chunks that release had no cache.
    piece_cost: what a prompt takes in pieces, in parts of what it takes whole. Figure 8 of the paper has 1.22, 1.26 and
    1.21 on its three traces (chunked over plain: 1.90/1.56, 2.68/2.12, 3.33/2.76). most_sequences: in the batch at a
    time.
    """

    is_chunked: bool = False
    is_caching: bool = False
    step_tokens: int = 512
    piece_cost: float = 1.22
    prompt_tokens: int = 131_072
    most_sequences: int = 256


VLLM: Final = CoupledSettings()
VLLM_PREFIX: Final = CoupledSettings(is_caching=True)
VLLM_CHUNKED: Final = CoupledSettings(is_chunked=True)
BASELINES: Final = {"vllm": VLLM, "vllm-prefix": VLLM_PREFIX, "vllm-chunked": VLLM_CHUNKED}


@dataclass(slots=True, eq=False)
class Running:
    """One request in an engine. `computed` tokens of its prompt are there, cached or prefilled."""

    request: TraceRequest
    record: Record
    computed: int = 0
    is_begun: bool = False
    first_step: int = 0  # among the engine's steps
    first_token_s: float = 0.0

    @property
    def held_tokens(self) -> int:
        return self.request.tokens + self.request.output_tokens


class CoupledEngine:
    """One engine. A sequence begins when all that it will hold fits into the KV memory, so none is preempted.

    Steps that only decode are planned until the first sequence ends, and cut at the next step when a prompt comes.
    """

    def __init__(self, name: str, loop: Loop, hardware: Hardware, settings: CoupledSettings) -> None:
        self.name = name
        self._loop = loop
        self._hardware = hardware
        self._settings = settings
        self._cache = BlockCache(hardware.decode_tokens // BLOCK_TOKENS)
        self._waiting: deque[Running] = deque()  # for their first token; those that began are in front
        self._running: list[tuple[int, int, Running]] = []  # heap by last step
        self._joined = 0
        self._held_tokens = 0  # of all that began
        self._context = 0  # of those that decode, at the last step that is done
        self._step_ends = array("d")  # of all steps that gave tokens
        self._plan = PlannedSteps(loop, hardware.decode, self._plan_ends)
        self._is_busy = False
        self.sent = 0  # requests

    @property
    def waiting_tokens(self) -> int:
        """Of prompts, not computed yet; nothing of a step counts as done before its end."""
        return sum(sequence.request.tokens - sequence.computed for sequence in self._waiting)

    @property
    def requests(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def waiting_s(self) -> float:
        """To compute all prompts that have no token yet, as if nothing was decoded."""
        cost = self._hardware.prefill
        return sum(cost.seconds(each.request.tokens, each.computed) for each in self._waiting)

    @property
    def step_s(self) -> float:
        """Of a step that decodes what there is now."""
        return self._hardware.decode.seconds(len(self._running), self._context) if self._running else 0.0

    def prefill_s(self, request: TraceRequest) -> float:
        """Alone, with what is cached now."""
        return self._hardware.prefill.seconds(request.tokens, self._cached_tokens(request))

    def submit(self, request: TraceRequest, record: Record) -> None:
        self.sent += 1
        sequence = Running(request, record)
        record.prefill = record.decode = self.name
        if sequence.held_tokens > self._hardware.decode_tokens:
            record.reason = TOO_LONG
            return
        self._waiting.append(sequence)
        if not self._is_busy:
            self._next()
        elif len(self._plan):
            self._plan.shorten()

    def _cached_tokens(self, request: TraceRequest) -> int:
        """The last token of a prompt is always computed."""
        if not self._settings.is_caching:
            return 0
        return min(self._cache.prefix(request.blocks) * BLOCK_TOKENS, request.tokens - 1)

    def _next(self) -> None:
        self._is_busy = True
        began = self._admit()
        if self._settings.is_chunked and self._waiting and self._waiting[0].is_begun:
            self._mixed_step()
        elif began:
            self._prompt_step(began)
        elif self._running:
            self._plan.make(len(self._running), self._running[0][0] - len(self._step_ends), self._context)
        else:
            self._is_busy = False

    def _admit(self) -> list[Running]:
        """Those at the front that can begin now: for whole prompts one step's, for pieces all that fit."""
        settings, tokens = self._settings, 0
        began: list[Running] = []
        count = len(self._running) + sum(1 for sequence in self._waiting if sequence.is_begun)
        for sequence in self._waiting:
            if sequence.is_begun:
                continue
            self._look_up(sequence)
            tokens += sequence.request.tokens - sequence.computed
            is_over = not settings.is_chunked and bool(began) and tokens > settings.prompt_tokens
            fits = self._held_tokens + sequence.held_tokens <= self._hardware.decode_tokens
            if is_over or not fits or count >= settings.most_sequences:
                break
            sequence.is_begun = True
            sequence.record.queue_s = self._loop.now - sequence.record.arrived_s
            self._held_tokens += sequence.held_tokens
            count += 1
            began.append(sequence)
        return began

    def _look_up(self, sequence: Running) -> None:
        sequence.computed = sequence.record.cached_tokens = self._cached_tokens(sequence.request)
        sequence.record.cached_blocks = -(-sequence.computed // BLOCK_TOKENS)

    def _prompt_step(self, began: list[Running]) -> None:
        """Whole prompts, after each other in one step; nobody else gets a token."""
        cost = self._hardware.prefill
        seconds = 0.0
        for sequence in began:
            sequence.record.prefill_s = cost.seconds(sequence.request.tokens, sequence.computed) - cost.base_s
            seconds += sequence.record.prefill_s
            sequence.record.prefill_s += cost.base_s / len(began)

        def end() -> None:
            for sequence in began:
                self._prefilled(sequence)
            self._next()

        self._loop.after(cost.base_s + seconds, end)

    def _mixed_step(self) -> None:
        """A token of each sequence, and pieces of the first prompts in what is left of the step."""
        cost, decode = self._hardware.prefill, self._hardware.decode
        left = max(1, self._settings.step_tokens - len(self._running))
        pieces: list[tuple[Running, int, float]] = []
        for sequence in self._waiting:
            if not left or not sequence.is_begun:
                break
            size = min(left, sequence.request.tokens - sequence.computed)
            seconds = cost.seconds(sequence.computed + size, sequence.computed) - cost.base_s
            seconds *= self._settings.piece_cost
            pieces.append((sequence, size, seconds))
            left -= size
        compute_s = sum(seconds for _, _, seconds in pieces)
        # computing hides the reading of the weights, or is hidden by it
        hidden_s = min(self._hardware.weights_s, compute_s)
        step_s = decode.seconds(len(self._running), self._context) - hidden_s + compute_s

        def end() -> None:
            self._stepped(np.array([self._loop.now]))
            for sequence, size, seconds in pieces:
                sequence.computed += size
                sequence.record.prefill_s += seconds
                if sequence.computed == sequence.request.tokens:
                    sequence.record.prefill_s += cost.base_s
                    self._prefilled(sequence)
            self._next()

        ending = sum(1 for sequence, size, _ in pieces if sequence.computed + size == sequence.request.tokens)
        self._loop.after(step_s + ending * cost.base_s, end)

    def _plan_ends(self) -> None:
        self._stepped(self._plan.take())
        self._next()

    def _stepped(self, ends: Floats) -> None:
        """Each sequence that decodes got a token at each of these moments."""
        if not self._running:
            return
        self._step_ends.frombytes(ends.tobytes())
        self._context += len(ends) * len(self._running)
        while self._running and self._running[0][0] == len(self._step_ends):
            self._finished(heapq.heappop(self._running)[2])

    def _prefilled(self, sequence: Running) -> None:
        """Its first token is there."""
        record, request = sequence.record, sequence.request
        self._waiting.remove(sequence)
        sequence.first_token_s = self._loop.now
        record.ttft_s = self._loop.now - record.arrived_s
        sequence.first_step = len(self._step_ends)
        self._context += request.tokens + 1
        if self._settings.is_caching:
            self._cache.use(request.blocks)
        if request.output_tokens == 1:
            self._finished(sequence)
        else:
            last = sequence.first_step + request.output_tokens - 1
            heapq.heappush(self._running, (last, self._joined, sequence))
            self._joined += 1

    def _finished(self, sequence: Running) -> None:
        request, record = sequence.request, sequence.record
        ends = np.frombuffer(self._step_ends[sequence.first_step :], dtype=float)
        record.finished_s = self._loop.now
        record.tbt_s = 0.0
        if request.output_tokens > 1:
            record.tbt_s = longest_mean_s(np.diff(ends, prepend=sequence.first_token_s))
        self._held_tokens -= sequence.held_tokens
        self._context -= request.tokens + request.output_tokens


Spread = Callable[[Sequence[CoupledEngine], TraceRequest], CoupledEngine]


def least_loaded(engines: Sequence[CoupledEngine], request: TraceRequest) -> CoupledEngine:
    """The one with the fewest tokens to prefill, of equals with the fewest requests."""
    return min(engines, key=lambda engine: (engine.waiting_tokens, engine.requests))


def cache_aware(engines: Sequence[CoupledEngine], request: TraceRequest) -> CoupledEngine:
    """The one that would have the first token first, by its queue and its own cache."""
    return min(engines, key=lambda engine: (engine.waiting_s + engine.prefill_s(request), engine.requests))


def round_robin(engines: Sequence[CoupledEngine], request: TraceRequest) -> CoupledEngine:
    """The one that had the fewest requests so far."""
    return min(engines, key=lambda engine: engine.sent)


SPREADS: Final[dict[str, Spread]] = {spread.__name__: spread for spread in (least_loaded, cache_aware, round_robin)}


def replay_coupled(
    requests: Sequence[TraceRequest],
    hardware: Hardware,
    settings: CoupledSettings,
    *,
    instances: int = 16,
    spread: Spread = least_loaded,
    slo: Slo | None = None,
    sample_s: float = 5.0,
    told: Callable[[int], None] = lambda arrived: None,
) -> Outcomes:
    """Requests over equal engines; nobody is refused. `slo` is the measure of the load samples, `told` hears how many
    requests arrived."""
    limits, loop = slo or Slo(), Loop()
    engines = [CoupledEngine(f"coupled-{number}", loop, hardware, settings) for number in range(instances)]
    records = [
        Record(
            id=str(number),
            arrived_s=request.arrived_s,
            tokens=request.tokens,
            output_tokens=request.output_tokens,
            blocks=len(request.blocks),
        )
        for number, request in enumerate(requests)
    ]
    loads: list[LoadSample] = []

    def arrive(number: int) -> None:
        spread(engines, requests[number]).submit(requests[number], records[number])
        told(number + 1)
        if number + 1 < len(requests):
            loop.at(requests[number + 1].arrived_s, lambda: arrive(number + 1))

    def sample() -> None:
        prefill = sum(engine.waiting_s for engine in engines) / instances / limits.ttft_s
        decode = sum(engine.step_s for engine in engines) / instances / limits.tbt_s
        loads.append(LoadSample(loop.now, prefill, decode))
        if loop.now + sample_s <= requests[-1].arrived_s:
            loop.after(sample_s, sample)

    if requests:
        loop.at(requests[0].arrived_s, lambda: arrive(0))
        loop.at(requests[0].arrived_s, sample)
    loop.run()
    return Outcomes(records, loads)
