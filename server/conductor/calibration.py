"""Measures what prefill and decode cost on a real engine, by nothing but its OpenAI API.

Prefill is the time of `/v1/completions` with one token to make, HTTP included. Each length is asked for with random
ids that nobody sent before, then with the beginning of a prompt that was just sent. How much of it was cached the
engine says in `usage.prompt_tokens_details.cached_tokens`. One that does not say is judged by its times: nearer to
that of the new part alone, the shared part was cached; nearer to that of the whole, it was not; where the two do not
differ much, they say nothing and are left out; where most say that it was not, nothing was.

Decode is the time between tokens of 1, 2, 4, ... streams at once, as long as all of them are being decoded, with short
contexts and with long ones. A fast engine's tokens come in bursts where the CPU is busy, so a while is measured as well
as a number of them.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any, Final

from kvstore.errors import Forbidden, InvalidRequest, ProtocolError, Rejected, TransportError
from scheduler.costs import DecodeCost, PrefillCost
from scheduler.fitting import fit_decode, fit_prefill, relative_errors
from server.gateway.upstream import Streamed, Upstream, url_at

LEAST_TOKENS: Final = 64  # the first length; each further one is twice as long
LEAST_MAX_TOKENS: Final = 512  # four lengths: a square needs three to show
NEW_SHARES: Final = (2, 8)  # of a prompt, that is new behind a cached beginning: a half and an eighth
FIRST_ID: Final = 1000  # below are special tokens, in most vocabularies
LONG_CONTEXT: Final = 4096  # of one stream, at most
STREAMED: Final = 1024  # tokens of one stream, at most: it is ended as soon as enough of them were seen
WINDOW_S: Final = 0.2  # that decode is measured for at least
LEAST_WINDOW_S: Final = 0.05  # of streams that end before: a shorter one is but a burst
DISTINCT: Final = 1.5  # times; a time that is longer by less does not tell whether a prefix was cached
EVENT: Final = b"data:"
DONE: Final = b"[DONE]"
REFUSED: Final = (400, 413, 422)

Sample = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: prompts up to max_tokens, up to max_batch streams, each of `steps` tokens, all `repeats` times.

    Ids are from FIRST_ID to below `vocabulary`. Raises InvalidRequest for what cannot be measured.
    """

    max_tokens: int
    max_batch: int
    repeats: int
    steps: int
    vocabulary: int

    def __post_init__(self) -> None:
        if self.max_tokens < LEAST_MAX_TOKENS:
            raise InvalidRequest(f"prompts of at least {LEAST_MAX_TOKENS} tokens are needed to tell costs apart")
        if self.max_batch < 2 or self.repeats < 1 or not 4 <= self.steps <= STREAMED // 2:
            raise InvalidRequest(f"at least 2 streams, 1 repeat, and from 4 to {STREAMED // 2} steps")
        if self.vocabulary < 2 * FIRST_ID:
            raise InvalidRequest(f"a vocabulary has at least {2 * FIRST_ID} ids")

    @property
    def lengths(self) -> list[int]:
        """Of prompts, in tokens: twice the one before, and the longest."""
        made = [LEAST_TOKENS]
        while made[-1] * 2 < self.max_tokens:
            made.append(made[-1] * 2)
        return [*made, self.max_tokens]

    @property
    def batches(self) -> list[int]:
        made = [1]
        while made[-1] * 2 <= self.max_batch:
            made.append(made[-1] * 2)
        return made

    @property
    def contexts(self) -> list[int]:
        """Of one stream's prompt."""
        return [LEAST_TOKENS, min(LONG_CONTEXT, self.max_tokens // 2)]

    @property
    def total(self) -> int:
        """Measurements."""
        return self.repeats * (len(self.lengths) * (1 + len(NEW_SHARES)) + len(self.batches) * len(self.contexts))


@dataclass(slots=True)
class Calibration:
    """What was measured, and the costs that explain it."""

    model: str
    prefills: list[Sample]  # (tokens, cached, seconds)
    steps: list[Sample]  # (batch, context, seconds)
    prefill: PrefillCost
    decode: DecodeCost
    notes: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """For JSON; coefficients are in the order of the fields of the costs."""
        cost = self.decode
        return {
            "model": self.model,
            "prefill": list(self.prefill.coefficients),
            "decode": [cost.base_s, cost.per_sequence_s, cost.per_token_s],
            "kv_bytes": None,
            "samples": {"prefill": self.prefills, "decode": self.steps},
            "residuals": {
                "prefill": _residuals(self.prefills, self.prefill.seconds),
                "decode": _residuals(self.steps, cost.seconds),
            },
            "notes": self.notes,
        }


class Engine:
    """An OpenAI-compatible engine that is measured. `token` is its API key; empty: none."""

    def __init__(self, upstream: Upstream, url: str, token: str, timeout_s: float) -> None:
        self._upstream, self._url, self._timeout_s = upstream, url, timeout_s
        self._headers = {"content-type": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"

    async def first_model(self) -> str:
        """The first that it serves."""
        url = url_at(self._url, "/v1/models")
        answer = await self._upstream.json("GET", url, headers=self._headers, timeout_s=self._timeout_s)
        _check(answer.status, answer.body, url)
        try:
            return str(answer.json()["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ProtocolError(f"{url} names no model") from error

    async def prefill(self, model: str, prompt: Sequence[int]) -> tuple[float, int | None]:
        """(seconds, tokens that were cached as the engine says; None: it does not say)."""
        url = url_at(self._url, "/v1/completions")
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
        began_s = time.perf_counter()
        answer = await self._upstream.json("POST", url, body, headers=self._headers, timeout_s=self._timeout_s)
        seconds = time.perf_counter() - began_s
        _check(answer.status, answer.body, url)
        return seconds, _cached(answer.json())

    async def stream(self, model: str, prompt: Sequence[int]) -> AsyncIterator[int]:
        """Tokens made so far, each time that some come. Leaving it ends the request."""
        url = url_at(self._url, "/v1/completions")
        asked = {"model": model, "prompt": prompt, "max_tokens": STREAMED, "temperature": 0, "stream": True}
        # What OpenAI's API does not have, vLLM, SGLang and Cairn's worker do; others ignore it.
        asked |= {"ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        body, made = json.dumps(asked).encode(), 0
        async with self._upstream.stream(
            "POST", url, body, headers=self._headers, timeout_s=self._timeout_s, idle_s=self._timeout_s
        ) as streamed:
            if not streamed.is_ok:
                _check(streamed.status, await streamed.read(), url)
            async for event in _events(streamed):
                if not event.get("choices"):
                    continue
                usage = event.get("usage") or {}
                made = int(usage.get("completion_tokens") or made + 1)
                yield made


async def calibrate(
    engine: Engine, model: str, plan: Plan, draw: random.Random, told: Callable[[str], None]
) -> Calibration:
    """Measure and fit; `told` hears of each measurement after it.

    Raises StoreError; InvalidRequest when the engine refuses what the plan asks for.
    """
    notes: list[str] = []
    for length in (plan.lengths[0], plan.lengths[-1]):  # what compiles and allocates at first use does so now
        await engine.prefill(model, _ids(draw, plan, length))
    answers = [each for _ in range(plan.repeats) for each in await _prefills(engine, model, plan, draw, told)]
    steps = []
    for context, batch in product(plan.contexts, plan.batches):
        for _ in range(plan.repeats):
            found = await _decode(engine, model, plan, [_ids(draw, plan, context) for _ in range(batch)])
            told(f"decode, {batch} x {context} tokens")
            if found is None:
                notes.append(f"{batch} streams of {context} tokens were not decoded at once for long enough")
            else:
                steps.append(found)
    try:
        prefills, unclear = _believed(answers)
        if unclear:
            notes.append(f"{unclear} times did not tell whether a prefix was cached: left out")
        return Calibration(model, prefills, steps, fit_prefill(prefills), fit_decode(steps), list(dict.fromkeys(notes)))
    except ValueError as error:
        raise ProtocolError(f"what was measured explains no cost: {'; '.join([str(error), *notes])}") from error


@dataclass(frozen=True, slots=True)
class _Answer:
    """A prefill: `shared` of its tokens were sent before, `said` is what the engine says of them."""

    tokens: int
    shared: int
    said: int | None
    seconds: float


async def _prefills(
    engine: Engine, model: str, plan: Plan, draw: random.Random, told: Callable[[str], None]
) -> list[_Answer]:
    """Each length once, new and behind cached beginnings."""
    answers = []
    for length in plan.lengths:
        prompt = _ids(draw, plan, length)
        for shared in (0, *(length - length // share for share in NEW_SHARES)):
            asked = [*prompt[:shared], *_ids(draw, plan, length - shared)] if shared else prompt
            seconds, said = await engine.prefill(model, asked)
            answers.append(_Answer(length, shared, said, seconds))
            told(f"{length} tokens, {shared} sent before")
    return answers


def _believed(answers: Sequence[_Answer]) -> tuple[list[Sample], int]:
    """(tokens, cached, seconds) of all that tell it; how many do not."""
    judged = _judged(answers)
    samples: list[Sample] = []
    for answer in answers:
        cached = answer.said
        if cached is None:
            cached = judged.get((answer.tokens, answer.shared)) if answer.shared else 0
        if cached is not None:
            samples.append((answer.tokens, min(cached, answer.tokens - 1), answer.seconds))
    return samples, len(answers) - len(samples)


def _judged(answers: Sequence[_Answer]) -> dict[tuple[int, int], int]:
    """(tokens, shared) -> how many were cached, by the median of their times; what they do not tell is not there."""
    times: dict[tuple[int, int], list[float]] = {}
    for answer in answers:
        if answer.said is None:
            times.setdefault((answer.tokens, answer.shared), []).append(answer.seconds)
    new = [(length, 0, seconds) for (length, shared), each in times.items() if not shared for seconds in each]
    if not new:
        return {}
    alone = fit_prefill(new)
    judged = {}
    for (length, shared), each in times.items():
        alone_s, whole_s = alone.seconds(length - shared, 0), alone.seconds(length, 0)
        if shared and whole_s > DISTINCT * alone_s:
            judged[length, shared] = shared if median(each) < (alone_s + whole_s) / 2 else 0
    if 2 * sum(map(bool, judged.values())) < len(judged):  # it has no cache, and some of its times are noise
        return dict.fromkeys(judged, 0)
    return judged


async def _decode(engine: Engine, model: str, plan: Plan, prompts: Sequence[Sequence[int]]) -> Sample | None:
    """(batch, context, seconds) of a step while all streams are being decoded; None if they were not for a while."""
    seen: list[list[tuple[float, int]]] = [[] for _ in prompts]
    enough = asyncio.Event()

    async def follow(index: int) -> None:
        try:
            async for made in engine.stream(model, prompts[index]):
                seen[index].append((time.perf_counter(), made))
                is_enough = min(len(each) for each in seen) > plan.steps
                if is_enough and time.perf_counter() - max(each[0][0] for each in seen) >= WINDOW_S:
                    return
        finally:  # where one ends, they are not all at once any more
            enough.set()

    streams = [asyncio.create_task(follow(index)) for index in range(len(prompts))]
    try:
        await enough.wait()
    finally:
        for stream in streams:
            stream.cancel()
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    return _step(seen, [len(prompt) for prompt in prompts])


def _step(seen: Sequence[Sequence[tuple[float, int]]], prompts: Sequence[int]) -> Sample | None:
    """From (time, tokens made so far) of each stream."""
    if not all(seen):
        return None
    first_s, last_s = max(times[0][0] for times in seen), min(times[-1][0] for times in seen)
    if last_s - first_s < LEAST_WINDOW_S:
        return None
    gaps, context = [], 0.0
    for times, prompt in zip(seen, prompts, strict=True):
        within = [each for each in times if first_s <= each[0] <= last_s]
        if len(within) < 2 or within[-1][1] == within[0][1]:
            return None
        gaps.append((within[-1][0] - within[0][0]) / (within[-1][1] - within[0][1]))
        context += prompt + (within[-1][1] + within[0][1]) / 2
    return len(prompts), context, median(gaps)


async def _events(streamed: Streamed) -> AsyncIterator[dict[str, Any]]:
    """JSON of a stream of server-sent events, to its end."""
    rest = b""
    async for chunk in streamed.chunks():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(EVENT) or line[len(EVENT) :].strip() == DONE:
                continue
            try:
                event = json.loads(line[len(EVENT) :])
            except ValueError as error:
                raise ProtocolError(f"an event is not JSON: {line[:80]!r}") from error
            if not isinstance(event, dict) or "error" in event:
                raise ProtocolError(f"the engine ends a stream with {line[:200]!r}")
            yield event


def _cached(answer: Any) -> int | None:
    try:
        said = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    except (KeyError, TypeError):
        return None
    return said if isinstance(said, int) and said >= 0 else None


def _check(status: int, body: bytes, url: str) -> None:
    """Raises for all but 2xx."""
    said = f"{url} answers {status}: {body[:200].decode(errors='replace')}"
    if 200 <= status < 300:
        return
    if status in REFUSED:
        raise InvalidRequest(said)
    if status in (401, 403):
        raise Forbidden(said)
    if status in (429, 503):
        raise Rejected(said)
    raise TransportError(said) if status >= 500 else ProtocolError(said)


def _ids(draw: random.Random, plan: Plan, count: int) -> list[int]:
    return draw.choices(range(FIRST_ID, plan.vocabulary), k=count)


def _residuals(samples: Sequence[Sample], predicted: Callable[[float, float], float]) -> dict[str, float]:
    middle, high = relative_errors([predicted(*sample[:2]) for sample in samples], [sample[2] for sample in samples])
    return {"median": middle, "p90": high}
