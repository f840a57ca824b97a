"""Calibration finds the costs of an OpenAI engine whose timing is known, whether it tells of its cache or not.

The engine notes how long it really took: on a machine with other work it sleeps longer than it means to.
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from typer.testing import CliRunner

from kvstore.errors import InvalidRequest
from scheduler.costs import DecodeCost, PrefillCost
from scheduler.fitting import fit_decode, fit_prefill
from server.commands.calibrate import calibrate_
from server.commands.reach import LocalCommand
from server.conductor.calibration import Calibration, Engine, Plan, calibrate
from server.gateway.upstream import Upstream

BLOCK = 16
PREFILL = PrefillCost(0.01, 2e-5, 1e-8, 2e-8)  # 93 ms for 2048 tokens
DECODE = DecodeCost(0.006, 5e-4, 1e-6)
PLAN = Plan(max_tokens=2048, max_batch=4, repeats=2, steps=8, vocabulary=5000)

app = typer.Typer()
app.command("calibrate", cls=LocalCommand)(calibrate_)
app.command("other")(lambda: None)


@dataclass
class TimedEngine:
    """One prefill at a time, decode steps of all streams together, blocks of 16 tokens cached."""

    tells: bool = True
    caches: bool = True
    longest: int = 100_000
    most_streams: int = 100
    key: str = ""
    blocks: set[int] = field(default_factory=set)
    running: list[tuple[asyncio.Queue[int], int]] = field(default_factory=list)
    asked: int = 0
    took: list[tuple[float, float, float]] = field(default_factory=list)  # (tokens, cached, seconds)
    stepped: list[tuple[float, float, float]] = field(default_factory=list)  # (batch, context, seconds)

    def app(self) -> web.Application:
        self.prefilling = asyncio.Lock()
        self.seats = asyncio.Semaphore(self.most_streams)
        made = web.Application(client_max_size=1 << 24)
        made.router.add_get("/v1/models", self.models)
        made.router.add_post("/v1/completions", self.completions)
        made.cleanup_ctx.append(self.stepping)
        return made

    async def stepping(self, _: web.Application) -> Any:
        async def steps() -> None:
            while True:
                batch = list(self.running)
                context = sum(tokens for _, tokens in batch)
                began_s = time.perf_counter()
                await asyncio.sleep(DECODE.seconds(len(batch), context) if batch else 0.001)
                if batch:
                    self.stepped.append((len(batch), context, time.perf_counter() - began_s))
                for queue, _ in batch:
                    queue.put_nowait(1)

        task = asyncio.create_task(steps())
        yield
        task.cancel()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "timed", "object": "model"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "who are you"}}, status=401)
        body = await request.json()
        prompt: list[int] = body["prompt"]
        self.asked += 1
        if len(prompt) > self.longest:
            return web.json_response({"error": {"message": f"at most {self.longest} tokens"}}, status=400)
        cached = self.take(prompt)
        if not body.get("stream"):
            await self.prefill(len(prompt), cached)
            usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": 1}
            if self.tells:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            return web.json_response({"choices": [{"index": 0, "text": "a"}], "usage": usage})
        return await self.stream(request, len(prompt), cached)

    async def stream(self, request: web.Request, tokens: int, cached: int) -> web.StreamResponse:
        async with self.seats:
            await self.prefill(tokens, cached)
            answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await answer.prepare(request)
            mine: tuple[asyncio.Queue[int], int] = (asyncio.Queue(), tokens)
            self.running.append(mine)
            try:
                for _ in range(60):
                    await answer.write(b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n')
                    await mine[0].get()
                await answer.write(b"data: [DONE]\n\n")
            finally:
                self.running.remove(mine)
        return answer

    def take(self, prompt: list[int]) -> int:
        """How many tokens of it are cached; all of it is from now on."""
        if not self.caches:
            return 0
        names = [hash(tuple(prompt[: end + BLOCK])) for end in range(0, len(prompt) - BLOCK, BLOCK)]
        cached = next((index for index, name in enumerate(names) if name not in self.blocks), len(names))
        self.blocks.update(names)
        return cached * BLOCK

    async def prefill(self, tokens: int, cached: int) -> None:
        async with self.prefilling:
            began_s = time.perf_counter()
            await asyncio.sleep(PREFILL.seconds(tokens, cached))
            self.took.append((tokens, cached, time.perf_counter() - began_s))


@contextmanager
def serving(engine: TimedEngine) -> Iterator[str]:
    """Its URL. It has a thread and a loop of its own, as another process would."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(engine.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def calibrated(url: str, told: Callable[[str], None] = lambda _: None) -> Calibration:
    async def run() -> Calibration:
        upstream = Upstream()
        try:
            engine = Engine(upstream, url, "", 20.0)
            return await calibrate(engine, await engine.first_model(), PLAN, random.Random(), told)
        finally:
            await upstream.close()

    return asyncio.run(run())


def check(found: Calibration, engine: TimedEngine) -> None:
    """By what it took; a few milliseconds are HTTP."""
    prefill, decode = fit_prefill(engine.took), fit_decode(engine.stepped)
    shares = (0.0, 0.5, 0.875) if engine.caches else (0.0,)
    for tokens, share in product((128, 1024, 2048), shares):
        wanted = prefill.seconds(tokens, tokens * share)
        assert found.prefill.seconds(tokens, tokens * share) == pytest.approx(wanted, rel=0.2, abs=0.008)
    for batch, context in ((1, 100), (4, 400), (4, 4000)):
        assert found.decode.seconds(batch, context) == pytest.approx(decode.seconds(batch, context), rel=0.3, abs=0.003)


class TestMeasuring:
    def test_the_costs_of_an_engine_are_found(self) -> None:
        heard: list[str] = []
        engine = TimedEngine()
        with serving(engine) as url:
            found = calibrated(url, heard.append)
        check(found, engine)
        assert len(heard) == PLAN.total
        assert {cached for tokens, cached, _ in found.prefills if tokens == 2048} == {0, 1024, 1792}
        assert found.notes == []

    def test_an_engine_that_says_nothing_of_its_cache_is_believed_by_its_times(self) -> None:
        engine = TimedEngine(tells=False)
        with serving(engine) as url:
            found = calibrated(url)
        check(found, engine)
        assert (2048, 1792) in {(tokens, cached) for tokens, cached, _ in found.prefills}
        assert "left out" in found.notes[0]  # of 64 tokens nobody can tell

    def test_an_engine_without_a_cache_is_not_taken_for_one_with_it(self) -> None:
        engine = TimedEngine(tells=False, caches=False)
        with serving(engine) as url:
            found = calibrated(url)
        assert {cached for _, cached, _ in found.prefills} == {0}
        check(found, engine)

    def test_more_streams_than_the_engine_runs_at_once_are_noted(self) -> None:
        with serving(TimedEngine(most_streams=2)) as url:
            found = calibrated(url)
        assert {batch for batch, _, _ in found.steps} == {1, 2}
        assert any("4 streams" in note for note in found.notes)

    def test_prompts_that_the_model_cannot_take_are_bad_input(self) -> None:
        with serving(TimedEngine(longest=1000)) as url, pytest.raises(InvalidRequest, match="at most 1000"):
            calibrated(url)

    @pytest.mark.parametrize("wrong", [{"max_tokens": 100}, {"max_batch": 1}, {"repeats": 0}, {"steps": 1}])
    def test_plans_that_tell_nothing_are_refused(self, wrong: dict[str, int]) -> None:
        fields = {"max_tokens": 2048, "max_batch": 4, "repeats": 1, "steps": 8, "vocabulary": 5000}
        with pytest.raises(InvalidRequest):
            Plan(**{**fields, **wrong})


class TestCommand:
    OPTIONS = ("--max-tokens", "1024", "--max-batch", "2", "--repeats", "1", "--steps", "4")

    def test_json_goes_to_stdout_and_to_a_file(self, tmp_path: Path) -> None:
        out = tmp_path / "costs.json"
        with serving(TimedEngine(key="secret")) as url:
            ended = CliRunner().invoke(
                app,
                ["calibrate", url, *self.OPTIONS, "--json", "--out", str(out)],
                env={"CAIRN_ENGINE_KEY": "secret"},
            )
        assert ended.exit_code == 0, ended.output
        document = json.loads(ended.stdout)
        assert json.loads(out.read_text()) == document
        assert (len(document["prefill"]), len(document["decode"]), document["kv_bytes"]) == (4, 3, None)
        assert set(document["residuals"]["prefill"]) == {"median", "p90"}
        assert document["model"] == "timed"

    def test_people_get_measured_beside_predicted(self) -> None:
        with serving(TimedEngine()) as url:
            ended = CliRunner().invoke(app, ["calibrate", url, *self.OPTIONS])
        assert ended.exit_code == 0, ended.output
        for text in ("measured ms", "predicted ms", "1,024", '"prefill": [', '"decode": ['):
            assert text in ended.stdout

    def test_an_engine_that_nobody_answers_for_is_a_failure(self) -> None:
        ended = CliRunner().invoke(app, ["calibrate", "http://127.0.0.1:9", *self.OPTIONS])
        assert ended.exit_code == 1

    def test_a_wrong_key_is_a_failure(self) -> None:
        with serving(TimedEngine(key="secret")) as url:
            ended = CliRunner().invoke(app, ["calibrate", url, *self.OPTIONS, "--api-key", "wrong"])
        assert ended.exit_code == 1
        assert "who are you" in ended.stderr

    @pytest.mark.parametrize(
        "arguments",
        [
            ["127.0.0.1:8000"],
            ["http://127.0.0.1:9", "--max-tokens", "10"],
            ["http://127.0.0.1:9", "--wait", "soon"],
            ["http://127.0.0.1:9", "--out", "/nowhere/at/all.json"],
        ],
    )
    def test_what_makes_no_sense_is_bad_input_and_asks_nobody(self, arguments: list[str]) -> None:
        ended = CliRunner().invoke(app, ["calibrate", *arguments])
        assert ended.exit_code == 2

    def test_an_engine_that_refuses_the_length_says_so(self) -> None:
        engine = TimedEngine(longest=600)
        with serving(engine) as url:
            ended = CliRunner().invoke(app, ["calibrate", url, *self.OPTIONS])
        assert ended.exit_code == 2
        assert "at most 600 tokens" in ended.stderr
        assert engine.asked == 2  # it is asked for the longest before anything is measured
