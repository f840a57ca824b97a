"""A gateway in front of engines that keep to their conventions and fail, as the `openai` client sees it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.gateway.service import Gateway
from server.gateway.settings import load
from server.http_serving import HttpServing
from tests.fake_engines import MODEL, Fabric, FakeConductor, FakeEngine, answer_to, made, text_of, tokens_of

PROMPT = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 12}
QUICK = {"refresh": "100ms", "connect_timeout": "1s", "route_timeout": "1s", "tokenize_timeout": "300ms"}


class Stage:
    """A gateway, its Conductor and engines in this event loop, and a client."""

    def __init__(self, kinds: list[tuple[str, str, str]], pairs: list[tuple[str, str]] | None) -> None:
        fabric = Fabric()
        self.engines = {name: FakeEngine(name, fabric, engine, role) for name, engine, role in kinds}
        self.conductor = FakeConductor(list(self.engines.values()), pairs)

    async def start(self, settings: dict[str, str]) -> None:
        for engine in self.engines.values():
            await engine.start()
        await self.conductor.start()
        given = QUICK | {"listen": "127.0.0.1:0", "conductor": self.conductor.url, "drain_seconds": "2s"} | settings
        options = [f"--{name if '.' in name else f'gateway.{name}'}={value}" for name, value in given.items()]
        self.gateway = Gateway(load(None, {}, options))
        await self.gateway.start()
        self.client = openai.AsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key="key", max_retries=0)

    async def stop(self) -> None:
        await self.client.close()
        await self.gateway.stop()
        await asyncio.gather(self.conductor.stop(), *(engine.stop() for engine in self.engines.values()))

    def __getitem__(self, name: str) -> FakeEngine:
        return self.engines[name]

    async def metric(self, name: str) -> float:
        response = await self.client._client.get(f"{self.gateway.url}/metrics")
        return sum(float(line.split()[-1]) for line in response.text.splitlines() if line.startswith(name))


def on_stage(
    kinds: list[tuple[str, str, str]],
    play: Callable[[Stage], Awaitable[None]],
    pairs: list[tuple[str, str]] | None = None,
    **settings: str,
) -> None:
    async def played() -> None:
        stage = Stage(kinds, pairs)
        await stage.start(settings)
        try:
            async with asyncio.timeout(20):
                await play(stage)
        finally:
            for engine in stage.engines.values():
                engine.gate.set()
            await stage.stop()

    asyncio.run(played())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110, what is waited for has no events
            await asyncio.sleep(0.01)


async def text_of_stream(stage: Stage, body: dict[str, Any], **more: Any) -> tuple[str, Any]:
    """The text, and the usage where it came."""
    said, usage = "", None
    if "messages" in body:
        async for chunk in await stage.client.chat.completions.create(**body, stream=True, **more):
            said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
    else:
        async for piece in await stage.client.completions.create(**body, stream=True, **more):
            said += piece.choices[0].text if piece.choices else ""
            usage = piece.usage or usage
    return said, usage


VLLM = [("a", "vllm", "both"), ("b", "vllm", "both")]
APART = [("p", "vllm", "prefill"), ("d", "vllm", "decode")]
APART_TWICE = [*APART, ("p2", "vllm", "prefill"), ("d2", "vllm", "decode")]
SGLANG = [("p", "sglang", "prefill"), ("d", "sglang", "decode")]
USAGE = {"stream_options": {"include_usage": True}}


# Where requests go


@pytest.mark.parametrize("body", [PROMPT, CHAT], ids=["completions", "chat"])
@pytest.mark.parametrize(
    ("kinds", "pairs"),
    [(VLLM, None), (APART, [("p", "d")]), (SGLANG, [("p", "d")])],
    ids=["collocated", "vllm apart", "sglang apart"],
)
def test_answers_are_right_streamed_and_whole(kinds, pairs, body):
    async def play(stage: Stage) -> None:
        said, usage = await text_of_stream(stage, body, **USAGE)
        assert said == answer_to(body)
        assert usage.completion_tokens == 12
        if "messages" in body:
            whole = await stage.client.chat.completions.create(**body)
            assert whole.choices[0].message.content == said
        else:
            whole = await stage.client.completions.create(**body)
            assert whole.choices[0].text == said
        if pairs is not None:
            assert usage.prompt_tokens_details.cached_tokens == 7  # the prefill's
            assert whole.usage.prompt_tokens_details.cached_tokens == 7
        await until(lambda: len(stage.conductor.of("finished")) == 2)
        assert all(engine.hung_up == 0 for engine in stage.engines.values())
        assert await stage.metric('cairn_gateway_requests_total{outcome="finished"}') == 2

    on_stage(kinds, play, pairs)


def test_the_conductor_hears_who_asks_and_the_engines_do_not_hear_what_is_not_for_them():
    async def play(stage: Stage) -> None:
        headers = {"X-Request-Id": "mine-1", "X-Session-Id": "s", "X-Deadline-Ms": "5000"}
        more = {"priority": 3, "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
        raw = stage.client.with_options(api_key="a-token-of-16-chars").completions.with_raw_response
        answer = await raw.create(**PROMPT, extra_headers=headers, extra_body=more)
        assert answer.headers["x-request-id"] == "mine-1"
        query = stage.conductor.routes[0]["query"]
        assert query.id.startswith("mine-1-")
        assert (query.session, query.priority, query.tenant) == ("s", 3, "team")
        assert query.output_tokens == 12
        assert 4000 < query.deadline_ms <= 5000
        assert stage.conductor.routes[0]["tokens"] == list(b"Once upon a time")
        asked = [body for engine in stage.engines.values() for body in engine.asked]
        assert len(asked) == 1
        assert asked[0]["@id"] == query.id
        assert "priority" not in asked[0]
        assert "kv_transfer_params" not in asked[0]
        with pytest.raises(openai.AuthenticationError):
            await stage.client.completions.create(**PROMPT)

    on_stage(VLLM, play, **{"tenants.0.name": "team", "tenants.0.token": "a-token-of-16-chars"})


def test_a_prefill_is_not_told_what_one_token_cannot_do():
    async def play(stage: Stage) -> None:
        said, _ = await text_of_stream(stage, PROMPT, extra_body={"min_tokens": 4}, **USAGE)
        assert said == answer_to(PROMPT)
        assert stage["p"].asked[0]["kv_transfer_params"]["do_remote_decode"] is True
        assert stage["d"].asked[0]["kv_transfer_params"]["remote_engine_id"] == "p"
        assert stage["p"].asked[0]["@id"] == stage["d"].asked[0]["@id"]

    on_stage(APART, play, [("p", "d")])


def test_several_prompts_or_answers_go_to_one_instance():
    async def play(stage: Stage) -> None:
        await stage.client.completions.create(**PROMPT | {"prompt": ["one", "two"]})
        await stage.client.completions.create(**PROMPT, n=2)
        assert stage["p"].asked == []
        assert len(stage["d"].asked) == 2

    on_stage(APART, play, [("p", "d")])


def test_models_and_health_are_told():
    async def play(stage: Stage) -> None:
        models = await stage.client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        assert (await stage.client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await stage.client.models.retrieve("other")
        health = await stage.client._client.get(f"{stage.gateway.url}/health")
        assert health.json()["status"] == "ok"

    on_stage(VLLM, play)


def test_where_nobody_counts_tokens_a_request_is_routed_all_the_same():
    async def play(stage: Stage) -> None:
        for name in "ab":
            stage[name].tokenize_faults += ["stall", "broken"] * 4
        for _ in range(2):
            assert (await stage.client.completions.create(**PROMPT)).choices[0].text == answer_to(PROMPT)
        first, second = (route["tokens"] for route in stage.conductor.routes)
        assert len(first) == 4  # a quarter of the text
        assert first[0] != second[0]  # what is not known must not look the same
        assert await stage.metric("cairn_gateway_untokenised_total") == 2

    on_stage(VLLM, play)


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_a_prompt_of_tokens_is_asked_of_nobody(prompt):
    async def play(stage: Stage) -> None:
        await stage.client.completions.create(**PROMPT | {"prompt": prompt})
        assert stage.conductor.routes[0]["tokens"] == [1, 2, 3]

    on_stage(VLLM, play)


# Refusals


@pytest.mark.parametrize(("status", "error"), [(429, openai.RateLimitError), (503, openai.InternalServerError)])
def test_the_conductors_refusals_reach_the_client(status, error):
    async def play(stage: Stage) -> None:
        stage.conductor.refusals.append((status, "ttft"))
        with pytest.raises(error) as caught:
            await stage.client.completions.create(**PROMPT)
        assert caught.value.response.headers["retry-after"] == "3"
        assert caught.value.code == "ttft"
        assert await stage.metric('cairn_gateway_requests_total{outcome="refused"}') == 1

    on_stage(VLLM, play)


def test_a_decode_that_is_refused_after_its_prefill_does_not_begin():
    async def play(stage: Stage) -> None:
        stage.conductor.late_refusals.append((429, "tbt"))
        with pytest.raises(openai.RateLimitError):
            await stage.client.completions.create(**PROMPT)
        assert stage["d"].asked == []

    on_stage(APART, play, [("p", "d")])


@pytest.mark.parametrize("kinds", [VLLM, APART, SGLANG], ids=["collocated", "vllm apart", "sglang apart"])
def test_a_request_that_is_no_good_is_refused_once_with_the_engines_words(kinds):
    async def play(stage: Stage) -> None:
        for engine in stage.engines.values():
            engine.faults.append("bad")
        with pytest.raises(openai.BadRequestError, match="too long"):
            await stage.client.completions.create(**PROMPT)
        assert len(stage.conductor.routes) == 1
        assert stage.conductor.of("failed") == []

    on_stage(kinds, play, None if kinds is VLLM else [("p", "d")])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x"}, "model"),
        ({"model": MODEL}, "prompt"),
        ({"model": MODEL, "prompt": []}, "prompt"),
        ({"model": MODEL, "prompt": "x", "stream": "yes"}, "stream"),
        ({"model": MODEL, "prompt": "x", "priority": "high"}, "priority"),
        ([], None),
    ],
)
def test_what_cannot_be_routed_is_refused_by_name(body, param):
    async def play(stage: Stage) -> None:
        answer = await stage.client._client.post(f"{stage.gateway.url}/v1/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert stage.conductor.routes == []

    on_stage(VLLM, play)


def test_over_the_limit_requests_are_refused_and_under_it_served_again():
    async def play(stage: Stage) -> None:
        stage["a"].gate.clear()
        stage["b"].gate.clear()
        under_way = [asyncio.ensure_future(stage.client.completions.create(**PROMPT)) for _ in range(3)]
        await until(lambda: stage["a"].under_way + stage["b"].under_way == 3)
        with pytest.raises(openai.InternalServerError) as caught:
            await stage.client.completions.create(**PROMPT)
        assert caught.value.response.headers["retry-after"] == "1"
        stage["a"].gate.set()
        stage["b"].gate.set()
        assert all(answer.choices[0].text == answer_to(PROMPT) for answer in await asyncio.gather(*under_way))
        await stage.client.completions.create(**PROMPT)

    on_stage(VLLM, play, limit="3")


# Failures


@pytest.mark.parametrize(
    ("fault", "is_stream"),
    [(fault, True) for fault in ("refuse", "busy", "cut", "die:0", "error_event:0", "stall")]
    + [(fault, False) for fault in ("refuse", "busy", "cut")],
)
def test_an_instance_that_fails_before_the_first_byte_is_replaced(fault, is_stream):
    async def play(stage: Stage) -> None:
        stage["a"].faults.append(fault)
        if is_stream:
            said, _ = await text_of_stream(stage, PROMPT)
        else:
            said = (await stage.client.completions.create(**PROMPT)).choices[0].text
        assert said == answer_to(PROMPT)
        await until(lambda: bool(stage.conductor.of("finished")))
        (failed,) = stage.conductor.of("failed")
        assert failed[1] == ("" if fault == "busy" else "a")
        assert stage.conductor.routes[1]["query"].exclude == ["a"]
        assert await stage.metric("cairn_gateway_retries_total") == 1

    on_stage(VLLM, play, first_token_timeout="500ms")


@pytest.mark.parametrize("victim", ["p", "d"])
@pytest.mark.parametrize("fault", ["refuse", "cut", "stall", "killed"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_pair_of_which_one_fails_is_replaced(engine, fault, victim):
    async def play(stage: Stage) -> None:
        if fault == "killed":
            await stage[victim].stop()
        else:
            stage[victim].faults.append(fault)
        said, _ = await text_of_stream(stage, PROMPT)
        assert said == answer_to(PROMPT)
        await until(lambda: bool(stage.conductor.of("finished")))
        failed = stage.conductor.of("failed")
        assert failed or (fault == "killed" and victim == "p")  # which was missed before: it counts tokens, too
        if fault != "stall":
            assert {instance for _, instance in failed} <= {victim}
        await until(lambda: all(engine.under_way == 0 for engine in stage.engines.values()))

    kinds = [(name, engine, role) for name, _, role in APART_TWICE]
    on_stage(kinds, play, [("p", "d"), ("p2", "d2")], first_token_timeout="500ms")


def test_a_prefill_of_sglang_goes_on_when_its_decode_is_done_first():
    async def play(stage: Stage) -> None:
        stage["p"].gate.clear()
        said, _ = await text_of_stream(stage, PROMPT)
        assert said == answer_to(PROMPT)
        assert stage["p"].under_way == 1
        stage["p"].gate.set()
        await until(lambda: stage["p"].under_way == 0)
        assert stage["p"].hung_up == 0

    on_stage(SGLANG, play, [("p", "d")])


@pytest.mark.parametrize("body", [PROMPT, CHAT], ids=["completions", "chat"])
@pytest.mark.parametrize("fault", ["die:5", "stall:5", "error_event:5", "die:12"])
@pytest.mark.parametrize("is_apart", [False, True], ids=["collocated", "apart"])
def test_a_stream_that_breaks_goes_on_elsewhere_as_if_nothing_was(fault, body, is_apart):
    async def play(stage: Stage) -> None:
        stage["d" if is_apart else "a"].faults.append(fault)
        said, usage = await text_of_stream(stage, body, **USAGE)
        assert said == answer_to(body)
        assert usage.completion_tokens == 12
        assert usage.prompt_tokens == len(stage.conductor.routes[0]["tokens"])

    if is_apart:
        on_stage(APART_TWICE, play, [("p", "d"), ("p2", "d2")], idle_timeout="500ms")
    else:
        on_stage(VLLM, play, idle_timeout="500ms")


def test_a_stream_may_break_several_times():
    async def play(stage: Stage) -> None:
        stage["a"].faults += ["die:3"]
        stage["b"].faults += ["die:3"]
        stage["c"].faults += ["die:1"]
        chunks = [chunk async for chunk in await stage.client.chat.completions.create(**CHAT, stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer_to(CHAT)
        assert len({chunk.id for chunk in chunks}) == 1
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert "token_ids" not in str(chunks)
        assert await stage.metric("cairn_gateway_continued_total") == 3

    on_stage([(name, "cairn", "both") for name in "abcd"], play)


@pytest.mark.parametrize("more", [{"presence_penalty": 1.0}, {"stop": ["x"]}, {"logprobs": 0}])
def test_a_stream_that_cannot_go_on_elsewhere_ends_with_an_error(more):
    async def play(stage: Stage) -> None:
        stage["a"].faults.append("die:5")
        said = ""

        async def listen() -> None:
            nonlocal said
            async for chunk in await stage.client.completions.create(**PROMPT, stream=True, **more):
                said += chunk.choices[0].text

        with pytest.raises(openai.APIError, match="no instance could answer"):
            await listen()
        assert answer_to(PROMPT).startswith(said)
        assert len(said) > 5
        assert await stage.metric('cairn_gateway_requests_total{outcome="failed"}') == 1

    on_stage(VLLM, play)


def test_an_engine_that_does_not_say_its_tokens_is_not_continued():
    async def play(stage: Stage) -> None:
        stage["a"].returns_ids = False
        stage["a"].faults.append("die:5")
        with pytest.raises(openai.APIError):
            await text_of_stream(stage, PROMPT)

    on_stage(VLLM, play)


def test_when_all_fail_the_client_is_told_and_the_tries_are_bounded():
    async def play(stage: Stage) -> None:
        for name in "ab":
            stage[name].faults += ["refuse"] * 9
        with pytest.raises(openai.InternalServerError, match="engine is dead"):
            await stage.client.completions.create(**PROMPT)
        assert len(stage["a"].asked) + len(stage["b"].asked) == 4

    on_stage(VLLM, play)


def test_the_only_instance_is_asked_again():
    async def play(stage: Stage) -> None:
        stage["a"].faults.append("cut")
        assert (await stage.client.completions.create(**PROMPT)).choices[0].text == answer_to(PROMPT)

    on_stage([("a", "vllm", "both")], play)


def test_an_answer_that_does_not_begin_before_its_deadline_is_given_up():
    async def play(stage: Stage) -> None:
        for name in "ab":
            stage[name].faults += ["stall"] * 4
        with pytest.raises(openai.InternalServerError, match="deadline"):
            await text_of_stream(stage, PROMPT, extra_headers={"X-Deadline-Ms": "300"})
        assert len(stage.conductor.routes) == 1

    on_stage(VLLM, play)


class Roomy(FakeEngine):
    """Its chats without a limit have as many tokens as there is room for, as vLLM's do; it tells how many those are in
    `tells`."""

    most_tokens = 60

    def __init__(self, name: str, fabric: Fabric, tells: str) -> None:
        super().__init__(name, fabric)
        self._tells = tells
        routes = [Route(path, self.complete, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")]
        routes += [Route("/tokenize", self.tokenize, methods=["POST"]), Route("/v1/models", self.models)]
        self._serving = HttpServing(Starlette(routes=routes), "fake", "127.0.0.1:0", lambda error: None)

    async def tokenize(self, request: Request) -> Response:
        tokens = tokens_of(await request.json())
        more = {"max_model_len": self.most_tokens} if self._tells == "tokenize" else {}
        return JSONResponse({"tokens": tokens, "count": len(tokens)} | more)

    async def models(self, request: Request) -> Response:
        more = {"max_model_len": self.most_tokens} if self._tells == "models" else {}
        return JSONResponse({"object": "list", "data": [{"id": "other", "max_model_len": 7}, {"id": MODEL} | more]})

    def _made(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body and not body.get("max_tokens"):
            return made(tokens_of(body), self.most_tokens - len(tokens_of(body)))
        return super()._made(body)


@pytest.mark.parametrize("tells", ["tokenize", "models", ""])
def test_a_chat_without_a_limit_that_breaks_is_as_long_as_one_that_does_not(tells, monkeypatch):
    async def play(stage: Stage) -> None:
        body = {"model": MODEL, "messages": CHAT["messages"]}
        whole = text_of(made(tokens_of(body), Roomy.most_tokens - len(tokens_of(body))))
        stage["a"].faults.append("die:5")
        if tells:
            said, usage = await text_of_stream(stage, body, **USAGE)
            assert said == whole
            assert usage.total_tokens == Roomy.most_tokens
        else:
            with pytest.raises(openai.APIError, match="no instance could answer"):
                await text_of_stream(stage, body)
            assert stage["b"].asked == []

    monkeypatch.setattr(f"{__name__}.FakeEngine", lambda name, fabric, engine, role: Roomy(name, fabric, tells))
    on_stage(VLLM, play)


def test_a_stream_whose_rest_is_refused_ends_with_an_error():
    async def play(stage: Stage) -> None:
        stage["a"].faults.append("die:5")
        stage["b"].faults.append("bad")
        with pytest.raises(openai.APIError, match="could not go on elsewhere"):
            await text_of_stream(stage, PROMPT)

    on_stage(VLLM, play)


def lose(stage: Stage, *names: str) -> None:
    """The Conductor misses these, as after heartbeats that did not come."""
    for name in names:
        del stage.conductor.engines[name]
    stage.conductor.pairs = [pair for pair in stage.conductor.pairs if not set(pair) & set(names)]


@pytest.mark.parametrize(
    ("engine", "victim", "fault"),
    [
        *(("vllm", victim, fault) for victim in "ad" for fault in ("stall", "stall:0", "stall:5")),
        *(("vllm", "p", "stall"), ("sglang", "p", "stall"), ("sglang", "d", "stall"), ("sglang", "d", "stall:0")),
    ],
)
def test_an_instance_that_hangs_is_left_once_the_conductor_has_lost_it(engine, victim, fault, monkeypatch):
    async def play(stage: Stage) -> None:
        stage[victim].faults.append(fault)
        asked = asyncio.ensure_future(text_of_stream(stage, PROMPT))
        await until(lambda: bool(stage[victim].asked))
        lose(stage, victim)
        said, _ = await asked
        assert said == answer_to(PROMPT)
        await until(lambda: bool(stage.conductor.of("finished")))
        assert [instance for _, instance in stage.conductor.of("failed")] == [victim]
        assert await stage.metric("cairn_gateway_retries_total") == 1

    monkeypatch.setattr("server.gateway.asking.QUIET_S", 0.3)
    if victim == "a":
        on_stage(VLLM, play)
    else:
        on_stage([(name, engine, role) for name, _, role in APART_TWICE], play, [("p", "d"), ("p2", "d2")])


@pytest.mark.parametrize("why", ["listed", "draining", "lost Conductor", "new Conductor", "back in time"])
def test_an_instance_that_is_only_slow_is_waited_for(why, monkeypatch):
    async def play(stage: Stage) -> None:
        stage["a"].gate.clear()
        asked = asyncio.ensure_future(text_of_stream(stage, PROMPT))
        await until(lambda: stage["a"].under_way == 1)
        conductor, engine = stage.conductor, stage["a"]
        if why == "draining":
            draining.add("a")
        elif why == "lost Conductor":
            await conductor.stop()
        elif why == "new Conductor":
            conductor.is_new = True
        elif why == "back in time":
            lose(stage, "a")
            await asyncio.sleep(0.3)
            conductor.engines["a"] = engine
        await asyncio.sleep(0.9)
        engine.gate.set()
        said, _ = await asked
        assert said == answer_to(PROMPT)
        assert stage["b"].asked == []

    draining: set[str] = set()

    async def instances(conductor: FakeConductor, request: Request) -> Response:
        row = {"role": "both", "model": MODEL}
        return JSONResponse(
            []
            if conductor.is_new
            else [each.place | row | {"is_draining": each.name in draining} for each in conductor.engines.values()]
        )

    monkeypatch.setattr(FakeConductor, "instances", instances)
    monkeypatch.setattr("server.gateway.asking.QUIET_S", 0.6)
    on_stage(VLLM, play)


# Clients that go, a Conductor that goes, and the end


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_hangs_up_frees_its_engines(engine, is_stream):
    async def play(stage: Stage) -> None:
        stage["d"].gate.clear()
        stage["p"].gate.clear() if engine == "sglang" else None
        asked = asyncio.ensure_future(
            text_of_stream(stage, PROMPT) if is_stream else stage.client.completions.create(**PROMPT)
        )
        await until(lambda: stage["d"].under_way == 1)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        await until(lambda: bool(stage.conductor.of("cancelled")))
        await until(lambda: stage["d"].hung_up == 1)
        if engine == "sglang":
            await until(lambda: stage["p"].hung_up == 1)
        assert stage.conductor.of("failed") == []
        assert await stage.metric('cairn_gateway_requests_total{outcome="cancelled"}') == 1
        assert await stage.metric("cairn_gateway_in_flight") == 0

    on_stage([(name, engine, role) for name, _, role in APART], play, [("p", "d")])


@pytest.mark.parametrize(
    "kinds", [VLLM, APART, SGLANG, [("p", "vllm", "prefill")]], ids=["both", "vllm apart", "sglang apart", "half"]
)
def test_without_a_conductor_known_instances_serve_and_with_it_it_is_asked_again(kinds):
    async def play(stage: Stage) -> None:
        await stage.conductor.stop()
        for _ in range(4):
            assert (await stage.client.completions.create(**PROMPT)).choices[0].text == answer_to(PROMPT)
        assert await stage.metric("cairn_gateway_fallbacks_total") == 4
        assert await stage.metric("cairn_gateway_conductor_up") == 0
        assert all(engine.asked for engine in stage.engines.values())
        health = await stage.client._client.get(f"{stage.gateway.url}/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        await stage.conductor.restart()
        before = len(stage.conductor.routes)
        async with asyncio.timeout(5):
            while await stage.metric("cairn_gateway_conductor_up") == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await stage.client.completions.create(**PROMPT)
        assert len(stage.conductor.routes) == before + 1

    on_stage(kinds, play, None if len(kinds) == 1 or kinds is VLLM else [("p", "d")])


def test_a_conductor_that_has_just_started_costs_no_request():
    async def play(stage: Stage) -> None:
        stage.conductor.is_new = True
        for _ in range(3):
            assert (await stage.client.completions.create(**PROMPT)).choices[0].text == answer_to(PROMPT)
            await asyncio.sleep(0.15)  # over a look at its instances
        with pytest.raises(openai.InternalServerError, match="no_instance"):
            await stage.client.completions.create(**PROMPT | {"model": "other"})

    on_stage(VLLM, play)


def test_requests_with_one_id_are_two_to_the_conductor():
    async def play(stage: Stage) -> None:
        same = {"X-Request-Id": "twice"}
        both = [stage.client.completions.create(**PROMPT, extra_headers=same) for _ in range(2)]
        await asyncio.gather(*both)
        ids = [route["query"].id for route in stage.conductor.routes]
        assert all(each.startswith("twice-") for each in ids)
        assert len(set(ids)) == 2

    on_stage(VLLM, play)


def test_a_conductor_that_fails_at_routes_is_done_without():
    async def play(stage: Stage) -> None:
        stage.conductor.is_broken = True
        assert (await stage.client.completions.create(**PROMPT)).choices[0].text == answer_to(PROMPT)

    on_stage(VLLM, play)


def test_without_a_conductor_a_dead_instance_costs_one_try():
    async def play(stage: Stage) -> None:
        await stage.conductor.stop()
        await stage["a"].stop()
        for _ in range(6):
            assert (await stage.client.completions.create(**PROMPT)).choices[0].text == answer_to(PROMPT)
        assert await stage.metric("cairn_gateway_retries_total") <= 1

    on_stage(VLLM, play)


def test_what_is_under_way_ends_before_the_gateway_does():
    async def play(stage: Stage) -> None:
        stage["a"].gate.clear()
        asked = asyncio.ensure_future(text_of_stream(stage, PROMPT))
        await until(lambda: stage["a"].under_way == 1)
        stopping = asyncio.ensure_future(stage.gateway.stop())
        await until(lambda: stage.gateway._front.is_draining)
        with pytest.raises(openai.InternalServerError, match="shuts down"):
            await stage.client.completions.create(**PROMPT)
        stage["a"].gate.set()
        said, _ = await asked
        assert said == answer_to(PROMPT)
        await stopping
        assert stage.conductor.of("finished")

    on_stage(VLLM, play)


def test_many_requests_survive_instances_that_are_killed_under_them():
    async def play(stage: Stage) -> None:
        bodies = [PROMPT | {"prompt": f"prompt {number}", "max_tokens": 40} for number in range(50)]
        stage["d"].gate.clear()
        stage["d2"].gate.clear()
        stage["d2"].faults += ["die:7"] * 10
        asked = [asyncio.ensure_future(text_of_stream(stage, body)) for body in bodies]
        await until(lambda: stage["d"].under_way + stage["d2"].under_way == 50)
        await asyncio.gather(stage["d"].stop(), stage["p2"].stop())
        stage["d2"].gate.set()
        said = await asyncio.gather(*asked)
        assert [text for text, _ in said] == [answer_to(body) for body in bodies]
        assert await stage.metric("cairn_gateway_continued_total") >= 10

    names = [("p", "prefill"), ("p2", "prefill"), ("d", "decode"), ("d2", "decode"), ("p3", "prefill")]
    pairs = [(p, d) for p in ("p", "p2", "p3") for d in ("d", "d2")]
    on_stage([(name, "cairn", role) for name, role in names], play, pairs)
