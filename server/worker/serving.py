"""One request's way through a worker: its prompt becomes tokens, those a job, the job's tokens pieces of text."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstore.errors import InvalidRequest
from server.worker.generator import Generator
from server.worker.jobs import Ended, Job
from server.worker.metrics import Metrics
from server.worker.model import Model
from server.worker.openai_api import Asked, Piece
from server.worker.problems import Refused, field_is_wrong
from server.worker.settings import WorkerSettings
from server.worker.texts import Growing

log = logging.getLogger("cairn.worker")

RETRY_AFTER_S = 1


class Serving:
    """Whatever asks for tokens goes through `begin`, `pieces` and `leave`, in this order."""

    def __init__(self, settings: WorkerSettings, model: Model, generator: Generator) -> None:
        self._settings = settings
        self.model = model
        self.generator = generator
        self.metrics = Metrics(lambda: generator.queued, lambda: len(generator.jobs) - generator.queued)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="cairn-tokens")  # tokenizers dislike company
        self.is_draining = False

    @property
    def most_tokens(self) -> int:
        """Of a prompt and its answer."""
        return min(self.model.engine.context_tokens, self._settings.max_tokens_total)

    async def prompt(self, asked: Asked, *, with_answer: bool = True) -> list[int]:
        """The tokens of what is asked. Raises Refused."""
        if isinstance(asked.prompt, list):
            tokens = asked.prompt
        else:
            tokens = await self._tokens(asked, with_answer=with_answer)
        vocabulary = self.model.engine.vocabulary
        if not tokens or not all(0 <= token < vocabulary for token in tokens):
            raise field_is_wrong("prompt", f"at least one token, each from 0 to {vocabulary - 1}")
        return tokens

    async def _tokens(self, asked: Asked, *, with_answer: bool) -> list[int]:
        def encode() -> list[int]:
            if asked.is_chat:
                return self.model.tokens.chat(asked.messages, with_answer=with_answer)
            assert isinstance(asked.prompt, str)
            return self.model.tokens.encode(asked.prompt)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, encode)
        except InvalidRequest as error:
            name = "messages" if asked.is_chat else "prompt"
            raise Refused(400, str(error), param=name, code="invalid_value") from error

    def begin(self, asked: Asked, tokens: list[int]) -> tuple[Job, int]:
        """A job that runs, and the seed that its tokens are drawn with. Raises Refused."""
        from engine_client.adapters.batching import Sampler

        room = self.most_tokens - len(tokens)
        most = asked.max_tokens if asked.max_tokens is not None else room
        if most > room or room < 1:
            self.metrics.requests.labels("invalid").inc()
            both = f"{len(tokens)} tokens and {max(most, 1)} to come"
            message = f"{both} are over the {self.most_tokens} that there is room for"
            name = "messages" if asked.is_chat else "prompt"
            raise Refused(400, message, param=name, code="context_length_exceeded")
        self._check_room()
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        engine = self.model.engine
        job = Job(
            engine.open(tokens, Sampler(asked.temperature, asked.top_p, seed)),
            max_tokens=most,
            ends=frozenset() if asked.ignores_end else engine.ends,
            is_stored=asked.takes_over,
            is_handed_over=asked.hands_over,
        )
        self.generator.submit(job)
        return job, seed

    def _check_room(self) -> None:
        if self.is_draining:
            self.metrics.requests.labels("refused").inc()
            raise Refused(503, "the worker stops", code="draining", retry_after_s=RETRY_AFTER_S)
        if self.generator.is_full:
            self.metrics.requests.labels("refused").inc()
            raise Refused(429, "too many requests wait: worker.queue", code="queue_full", retry_after_s=RETRY_AFTER_S)

    async def pieces(self, job: Job, asked: Asked) -> AsyncIterator[Piece]:
        """The last one has a reason. Raises Refused where the job ends by an error."""
        growing = Growing(self.model.tokens.decode, asked.stops, job.running.tokens)
        clock = asyncio.get_running_loop().time
        last_s = job.began_s
        given = 0
        while True:
            event = await job.events.get()
            if isinstance(event, Ended):
                yield self._end(job, growing, event, [], "")
                return
            now = clock()
            (self.metrics.tbt_s if given else self.metrics.ttft_s).observe(now - last_s)
            if not given:
                self._count_prompt(job, asked, event)
            last_s, given = now, given + 1
            self.metrics.generated_tokens.inc()
            text = growing.add(event)
            if growing.is_stopped:
                yield self._end(job, growing, Ended("stop"), [event], text)
                return
            if job.ended is not None and job.events.qsize() == 1:  # the end came with this token
                yield self._end(job, growing, job.ended, [event], text)
                return
            yield Piece(text, [event])

    def leave(self, job: Job) -> None:
        """Nobody reads its pieces any more; one that has not ended ends."""
        if job in self.generator.jobs:
            self.metrics.requests.labels("stopped" if job.is_stopped else "cancelled").inc()
        self.generator.leave(job)

    def transfer(self, request_id: str, first_token: int, seed: int) -> dict[str, Any]:
        """What the worker that decodes is told, as vLLM's connectors do it."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._settings.name,
            "remote_request_id": request_id,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "first_token_id": first_token,
            "seed": seed,
        }

    def close(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def _end(self, job: Job, growing: Growing, ended: Ended, tokens: list[int], text: str) -> Piece:
        if ended.reason == "error":
            self.metrics.requests.labels("failed").inc()
            raise Refused(503 if self.is_draining else 500, ended.message, code="engine_failed")
        was_stopped = growing.is_stopped
        text += growing.end()
        job.is_stopped = growing.is_stopped
        if not was_stopped:
            self.metrics.requests.labels("finished").inc()
        return Piece(text, tokens, "stop" if growing.is_stopped else ended.reason)

    def _count_prompt(self, job: Job, asked: Asked, token: int) -> None:
        self.metrics.prompt_tokens.labels("store").inc(job.cached_tokens)
        self.metrics.prompt_tokens.labels("computed").inc(job.prompt_tokens - job.cached_tokens)
        if asked.first_token is not None and asked.first_token != token:
            self.metrics.other_first_tokens.inc()
            log.warning("the first token is %d here, and was %d where it was prefilled", token, asked.first_token)
