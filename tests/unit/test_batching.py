"""Continuous batching: what a request is given does not depend on who else is in the batch, nor on the store."""

import asyncio
import contextlib
import random

import pytest

pytest.importorskip("torch")

import torch

from engine_client.adapters import transformers as adapter
from engine_client.adapters.batched_cache import SequenceKv, attend_in_batches, step
from engine_client.adapters.batching import BatchingEngine, ComputeFailed, Sampler
from server.worker.generator import Generator, Limits
from server.worker.jobs import Ended, Job
from tests.engine.test_transformers_adapter import MemoryStore

pytestmark = pytest.mark.engine

BLOCK, CHUNK = 16, 64
PROMPTS = 200


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return adapter.tiny_model()


@pytest.fixture(scope="module")
def alone(model):
    return adapter.TransformersEngine(model, block_tokens=BLOCK, chunk_tokens=CHUNK)


@pytest.fixture(scope="module")
def engine(model, alone):
    return BatchingEngine(model, block_tokens=BLOCK, chunk_tokens=CHUNK)


def prompts(count, longest=300, seed=0):
    chance = random.Random(seed)
    return [[chance.randrange(512) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def compute(engine, running):
    token = None
    while token is None:
        token = engine.chunk(running)
    return token


class Stored:
    """What a Generator takes for a store: a dict of blocks, or a store that is not there."""

    def __init__(self, memory):
        self.memory = memory

    def storing(self):
        return self.memory

    def loading(self):
        return contextlib.nullcontext(self.memory)


class CountingStore(MemoryStore):
    """Knows how many streams are neither finished nor aborted."""

    def __init__(self, layout):
        super().__init__(layout)
        self.open_streams = set()

    def begin(self, tokens):
        stream = super().begin(tokens)
        self.open_streams.add(stream)
        finish, abort = stream.finish, stream.abort

        def finished(complete_blocks):
            self.open_streams.discard(stream)
            return finish(complete_blocks)

        def aborted():
            self.open_streams.discard(stream)
            abort()

        stream.finish, stream.abort = finished, aborted
        return stream


async def generated(engine, asked, *, batch=8, store=None, leavers=()):
    """The tokens of all that is asked, `(prompt, max_tokens)` each; `leavers` go after their second token."""
    failures = []
    generator = Generator(engine, Limits(batch, 1 << 20, 1000), 1, store, lambda: failures.append("thread"))

    async def one(number, tokens, most):
        job = Job(engine.open(tokens, Sampler()), most, engine.ends)
        generator.submit(job)
        given = []
        while not isinstance(event := await job.events.get(), Ended):
            given.append(event)
            if number in leavers and len(given) == 2:
                generator.leave(job)
                return given, job
        assert event.reason == "length", event
        return given, job

    try:
        return await asyncio.gather(*(one(at, tokens, most) for at, (tokens, most) in enumerate(asked)))
    finally:
        await generator.stop()
        assert not failures


def test_two_hundred_prompts_that_join_and_leave_a_batch_get_the_tokens_that_each_gets_alone(engine, alone):
    chance = random.Random(1)
    asked = [(tokens, chance.randint(1, 10)) for tokens in prompts(PROMPTS, longest=150)]
    answers = asyncio.run(generated(engine, asked))
    expected = [alone.generate(tokens, most).token_ids for tokens, most in asked]
    assert [given for given, _ in answers] == expected


def test_logits_of_a_step_are_those_of_each_sequence_alone_bit_for_bit(model):
    attend_in_batches(model)
    kept, expected = [], []
    for tokens in prompts(9, longest=150, seed=2):
        cache = adapter.DynamicCache(config=model.config)
        logits = adapter.prefill(model, torch.tensor([tokens]), cache, CHUNK)
        kept.append((int(logits[0].argmax()), SequenceKv(cache)))
        expected.append([row[0] for _, row in adapter.decode(model, logits, cache, 9)])
    tokens = [token for token, _ in kept]
    for number in range(1, 9):
        logits = step(model, tokens, [kv for _, kv in kept], is_exact=True)
        for row, rows in zip(logits, expected, strict=True):
            assert torch.equal(row, rows[number])
        tokens = [int(row.argmax()) for row in logits]


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK, 2 * CHUNK + 1])
def test_a_prompt_that_ends_near_the_grid_is_computed_in_the_same_pieces(engine, alone, length):
    tokens = prompts(1, seed=length)[0] * length
    running = engine.open(tokens[:length], Sampler())
    given = [compute(engine, running), *(engine.step([running])[0] for _ in range(5))]
    assert given == alone.generate(tokens[:length], 6).token_ids


def test_a_prefix_that_the_store_has_is_not_computed_and_the_tokens_stay_the_same(engine, alone):
    memory = MemoryStore(engine.layout)
    document = prompts(1, seed=5)[0] * 300
    asked = [(document[: 3 * CHUNK] + question, 6) for question in prompts(6, longest=40, seed=6)]
    answers = asyncio.run(generated(engine, asked, store=Stored(memory)))
    assert [job.cached_tokens for _, job in answers] == [0] + [3 * CHUNK] * 5
    assert [given for given, _ in answers] == [alone.generate(tokens, 6).token_ids for tokens, _ in asked]
    assert memory.open_loads == 0


def test_a_prefix_that_is_lost_while_it_is_read_is_computed(engine, alone):
    memory = MemoryStore(engine.layout)
    tokens = prompts(1, seed=7)[0] * 300
    tokens = tokens[: 2 * CHUNK + 5]
    alone.generate(tokens, 0, store=memory)
    whole = memory.load

    def load(tokens, deadline_s):
        loaded = whole(tokens, deadline_s)
        loaded.is_intact = lambda: False
        return loaded

    memory.load = load
    ((given, job),) = asyncio.run(generated(engine, [(tokens, 4)], store=Stored(memory)))
    assert given == alone.generate(tokens, 4).token_ids
    assert job.cached_tokens == 0
    assert memory.open_loads == 0


@pytest.mark.parametrize("is_left", [True, False])
def test_who_leaves_while_the_prompt_is_computed_or_waits_gives_back_what_the_store_lent(
    engine, alone, is_left, monkeypatch
):
    memory = CountingStore(engine.layout)
    tokens = prompts(1, seed=11)[0] * 3000
    alone.generate(tokens[: 2 * CHUNK], 0, store=memory)

    async def run():
        loop, real, is_under_way = asyncio.get_running_loop(), engine.chunk, asyncio.Event()

        def chunk(running):
            if jobs[0].running.computed_tokens > 5 * CHUNK:
                loop.call_soon_threadsafe(is_under_way.set)
            return real(running)

        monkeypatch.setattr(engine, "chunk", chunk)
        generator = Generator(engine, Limits(8, 1 << 20, 100), 1, Stored(memory), lambda: None)
        jobs = [Job(engine.open(tokens[: 40 * CHUNK + at], Sampler()), 9, frozenset(), at > 1) for at in range(6)]
        for job in jobs:
            generator.submit(job)
        await is_under_way.wait()
        assert memory.open_streams
        if is_left:
            for job in jobs:
                generator.leave(job)
            assert generator.load == (0, 0, 0)
        await generator.stop()
        return jobs

    jobs = asyncio.run(run())
    assert (jobs[0].ended is None) == is_left
    assert memory.open_loads == 0
    assert not memory.open_streams


class DownStore:
    def load(self, tokens, deadline_s):
        raise ConnectionError("gone")

    def begin(self, tokens):
        raise ConnectionError("gone")


@pytest.mark.parametrize("memory", [DownStore(), None])
def test_a_store_that_is_down_costs_no_answer(engine, alone, memory):
    asked = [(tokens * 3, 5) for tokens in prompts(3, seed=8)]
    answers = asyncio.run(generated(engine, asked, store=Stored(memory)))
    assert [given for given, _ in answers] == [alone.generate(tokens, 5).token_ids for tokens, _ in asked]


def test_those_that_the_store_has_do_not_keep_others_waiting_for_ever(engine):
    async def run():
        generator = Generator(engine, Limits(2, 1 << 20, 1000), 1, Stored(MemoryStore(engine.layout)), lambda: None)
        began = []
        jobs = [Job(engine.open([1, 2, at], Sampler()), 3, frozenset(), at != 30) for at in range(60)]

        async def one(at):
            generator.submit(jobs[at])
            await jobs[at].events.get()
            began.append(at)

        await asyncio.gather(*map(one, range(60)))
        await generator.stop()
        return began.index(30)

    assert asyncio.run(run()) < 45


def test_requests_that_end_with_their_first_token_make_way_for_those_that_wait(engine):
    answers = asyncio.run(generated(engine, [(tokens, 1) for tokens in prompts(5, seed=10)]))
    assert [len(given) for given, _ in answers] == [1] * 5


def test_who_leaves_does_not_change_what_the_others_get(engine, alone):
    memory = MemoryStore(engine.layout)
    asked = [(tokens, 12) for tokens in prompts(12, seed=9)]
    leavers = {0, 3, 4, 11}
    answers = asyncio.run(generated(engine, asked, batch=4, store=Stored(memory), leavers=leavers))
    for number, ((given, _), (tokens, most)) in enumerate(zip(answers, asked, strict=True)):
        expected = alone.generate(tokens, most).token_ids
        assert given == (expected[:2] if number in leavers else expected)
    assert memory.open_loads == 0


def test_a_prompt_that_is_computed_does_not_stop_those_that_decode(engine):
    async def run():
        generator = Generator(engine, Limits(8, 1 << 20, 100), 1, None, lambda: None)
        short = Job(engine.open([1, 2, 3], Sampler()), 400, frozenset())
        generator.submit(short)
        await short.events.get()
        long = Job(engine.open([4] * 40 * CHUNK, Sampler()), 1, frozenset())
        generator.submit(long)
        await long.events.get()
        await generator.stop()
        return short.given_tokens

    assert asyncio.run(run()) >= 40


def test_seeded_sampling_depends_on_the_seed_and_not_on_the_batch(engine):
    def sampled(seeds):
        batch = [engine.open(list(range(1, 40)), Sampler(1.0, 0.9, seed)) for seed in seeds]
        given = [[compute(engine, running)] for running in batch]
        for _ in range(8):
            for tokens, token in zip(given, engine.step(batch), strict=True):
                tokens.append(token)
        return given

    together = sampled([1, 2, 3, 1])
    assert together[0] == together[3] == sampled([1])[0]
    assert len({tuple(tokens) for tokens in together}) == 3


def test_top_p_leaves_out_what_is_unlikely():
    logits = torch.tensor([0.0, 3.0, 2.0, -1.0])
    sampler = Sampler(1.0, 0.5, 0)
    assert {sampler.pick(logits) for _ in range(50)} == {1}
    assert {Sampler(1.0, 1.0, seed).pick(logits) for seed in range(200)} > {1, 2}
    assert Sampler(0.0).pick(logits) == 1


def test_a_model_that_fails_ends_those_that_it_computed_and_serves_on(engine, alone, monkeypatch):
    async def run():
        generator = Generator(engine, Limits(8, 1 << 20, 100), 1, None, lambda: None)
        real, calls = engine.step, []

        def step_that_fails(batch):
            calls.append(len(batch))
            if len(calls) == 3:
                raise ComputeFailed("out of memory")
            return real(batch)

        monkeypatch.setattr(engine, "step", step_that_fails)
        events = []
        for most in (8, 4):
            job = Job(engine.open([5, 6, 7], Sampler()), most, frozenset())
            generator.submit(job)
            while not events or not isinstance(events[-1], Ended):
                events.append(await job.events.get())
            events.append(0)
        await generator.stop()
        return events

    events = asyncio.run(run())
    assert events[3] == Ended("error", "out of memory")
    assert events[5:9] == alone.generate([5, 6, 7], 4).token_ids
