"""Conductor, gateway and worker against who stalls, lies, or asks for what nobody should."""

import asyncio
import json
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import openai
import pytest

from kvstore.errors import ConfigError, ConnectFailed
from kvstore.prefix import Namespace
from server.conductor import app as conductor_app
from server.conductor import nodes as conductor_nodes
from server.conductor.models import InstanceBody
from server.conductor.service import ConductorService
from server.conductor.settings import load
from server.gateway.upstream import Upstream
from server.http_serving import HttpServing
from server.worker.registration import Registration
from tests.fake_engines import answer_to
from tests.system.test_conductor_service import in_a_loop, instance, route, serving
from tests.system.test_gateway import CHAT, PROMPT, VLLM, Stage, on_stage, text_of_stream

NAMESPACE = Namespace(model="m", dtype="bf16", layout="t", block_tokens=16, layers=1, block_bytes=4096)
SHORT_S = 0.2


def told_of(body: dict[str, Any]) -> InstanceBody:
    return msgspec.convert(body, InstanceBody)


async def until(is_so: Any) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110, what is waited for has no events
            await asyncio.sleep(0.02)


async def status_without_a_body(port: int, path: str) -> bytes:
    """The status line that a client gets who says that a body comes, and sends none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{{".encode())
    try:
        async with asyncio.timeout(5):
            return await reader.readline()
    finally:
        writer.close()


# The Conductor


@in_a_loop
async def test_a_conductor_that_was_stopped_for_a_while_does_not_take_its_fleet_for_dead() -> None:
    async with serving("--conductor.heartbeat=200ms") as (service, client):
        service.register(told_of(instance("a")))
        await route(client, id="r")
        threading.Event().wait(1.5)  # nothing runs here, as after SIGSTOP
        await asyncio.sleep(0.25)
        assert set(service.registrations) == {"a"}
        assert "r" in service.conductor.fleet.works
        await until(lambda: not service.registrations)  # and now it is silent indeed


@in_a_loop
async def test_names_that_come_and_go_do_not_use_up_the_index() -> None:
    async with serving() as (service, _):
        for number in range(4200):
            service.register(told_of(instance(f"pod-{number}", node=f"node-{number}")))
            service.remove(f"pod-{number}")
        for number in range(20):
            service.register(told_of(instance(f"e-{number}", events="tcp://127.0.0.1:9")))
            service.remove(f"e-{number}")
        assert len([name for name in service.index.holders if name is not None]) == 0


@in_a_loop
async def test_a_follower_that_breaks_ends_the_conductor_or_its_own_view(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [ValueError("no number"), AssertionError("broken")]

    async def breaking(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0.05)
        raise errors.pop(0)
        yield

    monkeypatch.setattr(conductor_nodes, "subscribe", breaking)
    service = ConductorService(load(None, {}, []))
    try:
        service.nodes.follow("a", "tcp://127.0.0.1:1")
        await until(lambda: service.nodes.views["a"].failure)
        assert service.nodes.views["a"].standing.value == "degraded"
        assert not service.failure.done()
        service.nodes.follow("b", "tcp://127.0.0.1:1")
        await until(service.failure.done)
        assert isinstance(service.failure.exception(), AssertionError)
    finally:
        await service.close()


@in_a_loop
async def test_a_body_that_does_not_come_is_not_waited_for_by_the_conductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor_app, "BODY_S", SHORT_S)
    async with serving() as (_, client):
        for path in ("/v1/route", "/v1/instances", "/v1/requests/r"):
            assert b" 408 " in await status_without_a_body(client.base_url.port or 0, path)


@in_a_loop
async def test_a_whole_answer_does_not_count_as_a_late_first_token() -> None:
    async with serving() as (service, client):
        service.register(told_of(instance("a")))
        await route(client, id="r")
        assert (await client.post("/v1/requests/r", json={"state": "finished"})).status_code == 204
        assert service.counts.in_time + service.counts.late == 0


@in_a_loop
async def test_a_client_that_asks_for_a_billion_tokens_costs_no_other_its_place() -> None:
    async with serving() as (service, client):
        service.register(told_of(instance("a", decode=[0.02, 2e-4, 1e-7])))
        assert (await route(client, output_tokens=1 << 30)).status_code == 200
        assert (await route(client, output_tokens=100)).status_code == 200


@in_a_loop
async def test_two_instances_of_one_name_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (service, _):
        service.register(told_of(instance("a")))
        service.register(told_of(instance("a")))
        assert not caplog.records
        with caplog.at_level(logging.WARNING):
            service.register(told_of(instance("a", address="http://other:8100")))
        assert "http://other:8100" in caplog.text


@in_a_loop
async def test_a_worker_that_leaves_does_not_register_again() -> None:
    async with serving() as (service, client):
        body = instance("w")
        beat = {"prefill_tokens": 0, "decode_batch": 0, "decode_context": 0}
        url = str(client.base_url).rstrip("/")
        registration = Registration("w", url, "", lambda: dict(body), lambda: beat, lambda role: None)
        running = asyncio.create_task(registration.run())
        await until(lambda: "w" in service.registrations)
        await registration.leave()
        assert service.conductor.fleet.members["w"].is_draining
        service.remove("w")  # as a Conductor that has started anew
        await asyncio.sleep(2.5)
        assert "w" not in service.registrations
        running.cancel()
        await asyncio.wait([running])
        await registration.close()


# The gateway


@pytest.mark.parametrize(
    "text",
    [
        '{"model": "\\ud800", "prompt": "x"}',
        '{"model": "model", "prompt": "x", "priority": 1' + "0" * 400 + "}",
        '{"model": "model", "prompt": "x", "max_tokens": true}',
    ],
    ids=["surrogate", "huge", "bool"],
)
def test_bodies_that_nobody_can_serve_are_refused_and_not_routed_by_turns(text):
    async def play(stage: Stage) -> None:
        async with httpx.AsyncClient(base_url=stage.gateway.url) as client:
            answer = await client.post("/v1/completions", content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert await stage.metric("cairn_gateway_fallbacks_total") == 0
        assert not any(engine.asked for engine in stage.engines.values())

    on_stage(VLLM, play)


def test_a_session_that_is_no_text_is_no_session():
    async def play(stage: Stage) -> None:
        content = '{"model": "model", "prompt": "x", "prompt_cache_key": "\\ud800"}'
        async with httpx.AsyncClient(base_url=stage.gateway.url) as client:
            assert (await client.post("/v1/completions", content=content)).status_code == 200

    on_stage(VLLM, play)


def test_what_the_conductor_says_is_too_large_goes_nowhere():
    async def play(stage: Stage) -> None:
        stage.conductor.refusals.append((413, "too_large"))
        with pytest.raises(openai.APIStatusError) as caught:
            await stage.client.completions.create(**PROMPT)
        assert caught.value.status_code == 413
        assert not any(engine.asked for engine in stage.engines.values())
        assert await stage.metric("cairn_gateway_fallbacks_total") == 0
        assert (await stage.client.completions.create(**PROMPT)).choices[0].text == answer_to(PROMPT)

    on_stage(VLLM, play)


def test_clients_do_not_choose_what_engines_call_their_requests():
    async def play(stage: Stage) -> None:
        await text_of_stream(stage, CHAT, extra_body={"rid": "another's", "request_id": "another's"})
        asked = [body for engine in stage.engines.values() for body in engine.asked]
        assert asked
        assert "another's" not in str(asked)

    on_stage(VLLM, play)


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "a..b"])
def test_an_address_that_is_no_name_is_an_instance_that_is_not_there(host):
    async def asked() -> None:
        upstream = Upstream(connect_s=1)
        try:
            with pytest.raises(ConnectFailed):
                await upstream.json("GET", f"http://{host}:80/", timeout_s=5)
        finally:
            await upstream.close()

    asyncio.run(asked())


# The worker


@asynccontextmanager
async def working(**more: Any) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """A worker with the tiny model in this loop, without a store: what serves, and a client of it."""
    pytest.importorskip("torch")
    from server.worker.app import create_app as worker_app
    from server.worker.generator import Generator, Limits
    from server.worker.model import load_model
    from server.worker.serving import Serving
    from server.worker.settings import WorkerSettings

    settings = WorkerSettings(model="tiny", threads=1, block_tokens=16, chunk_tokens=64, **more)
    model = load_model(settings)
    generator = Generator(model.engine, Limits(16, 65_536, 256), 1, None, lambda: None)
    serving = Serving(settings, model, generator)
    server = HttpServing(worker_app(serving, ""), "worker.listen", "127.0.0.1:0", lambda error: None)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            yield serving, client
    finally:
        await generator.stop()
        await server.stop()
        serving.close()


def long_answer(client: httpx.AsyncClient) -> "asyncio.Task[httpx.Response]":
    asked = {"prompt": [1, 2, 3], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    return asyncio.create_task(client.post("/v1/completions", json=asked))


@pytest.mark.engine
@pytest.mark.parametrize(
    "odd", [{"temperature": 1, "top_p": 0}, {"temperature": 1e-40}, {"temperature": 1e-300, "top_p": 1e-300}]
)
@in_a_loop
async def test_a_request_at_the_edge_of_sampling_is_served_and_costs_no_other_its_answer(odd: dict[str, Any]) -> None:
    async with working() as (serving, client):
        long = long_answer(client)
        await until(lambda: serving.generator.load[1] == 1)
        answer = await client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 5, **odd})
        greedy = await client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 5, "temperature": 0})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == greedy.json()["choices"][0]["text"]
        assert (await long).status_code == 200


@pytest.mark.engine
@in_a_loop
async def test_a_prompt_that_the_model_fails_at_costs_no_other_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with working() as (serving, client):
        from engine_client.adapters.batching import ComputeFailed

        engine = serving.model.engine
        chunk = engine.chunk

        def failing(running: Any) -> int | None:
            if 77 in running.tokens:
                raise ComputeFailed("out of memory")
            found: int | None = chunk(running)
            return found

        monkeypatch.setattr(engine, "chunk", failing)
        long = long_answer(client)
        await until(lambda: serving.generator.load[1] == 1)
        answer = await client.post("/v1/completions", json={"prompt": [77], "max_tokens": 5})
        assert answer.status_code == 500
        assert (await long).status_code == 200
        await until(lambda: not serving.generator.jobs)


@pytest.mark.engine
@in_a_loop
async def test_what_a_worker_cannot_read_is_the_clients_fault() -> None:
    async with working() as (_, client):
        for content in (
            "[" * 100_000,
            json.dumps({"prompt": [1], "kv_transfer_params": {"seed": 1 << 70}}),
            json.dumps({"prompt": [1], "kv_transfer_params": {"do_remote_prefill": True, "first_token_id": "x"}}),
        ):
            answer = await client.post("/v1/completions", content=content)
            assert answer.status_code == 400, answer.text


@pytest.mark.engine
@in_a_loop
async def test_a_body_that_does_not_come_is_not_waited_for_by_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    from server.worker import app

    monkeypatch.setattr(app, "BODY_S", SHORT_S)
    async with working() as (_, client):
        assert b" 408 " in await status_without_a_body(client.base_url.port or 0, "/v1/completions")


@in_a_loop
async def test_a_client_that_does_not_read_its_stream_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from server.worker import app

    monkeypatch.setattr(app, "TAKE_S", SHORT_S)
    left = asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        while True:
            yield b"data: " + bytes(1 << 20) + b"\n\n"

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await app.Stream(events(), left.set)(scope, receive, send)

    server = HttpServing(endless, "worker.listen", "127.0.0.1:0", lambda error: None)
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    async with asyncio.timeout(5):
        await left.wait()
    assert server._server is not None
    state = server._server.server_state
    await until(lambda: not state.connections and not state.tasks)
    writer.close()
    await server.stop()


def test_messages_that_a_template_refuses_are_the_clients_fault():
    pytest.importorskip("torch")
    jinja2 = pytest.importorskip("jinja2")
    from kvstore.errors import InvalidRequest
    from server.worker.model import _tokens_of

    class Tokenizer:
        encode = decode = str

        def apply_chat_template(self, messages: Any, **more: Any) -> str:
            raise jinja2.TemplateError("roles must alternate")

    with pytest.raises(InvalidRequest, match="alternate"):
        _tokens_of(Tokenizer()).chat([], with_answer=True)


def test_text_that_a_tokenizer_refuses_is_the_clients_fault():
    from kvstore.errors import InvalidRequest
    from server.worker.texts import ModelTokens

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    with pytest.raises(InvalidRequest):
        ModelTokens(encode, lambda *_: "", lambda *_: "").encode("\ud800")


def spaced(tokens: Sequence[int]) -> str:
    """A vocabulary of words, each with the space before it, that the first one loses."""
    return "".join(f" w{token}" for token in tokens).removeprefix(" ")


def test_text_that_goes_on_elsewhere_keeps_the_space_between_its_words():
    from server.worker.texts import Growing

    prompt, answer = [1, 2, 3], [4, 5, 6, 7]
    first = Growing(spaced, before=prompt)
    said = "".join(first.add(token) for token in answer[:2])
    second = Growing(spaced, before=prompt + answer[:2])
    said += "".join(second.add(token) for token in answer[2:]) + second.end()
    assert spaced(prompt) + said == spaced(prompt + answer)


def test_half_a_character_before_a_text_is_no_part_of_it():
    from server.worker.texts import ByteTokens, Growing

    growing = Growing(ByteTokens().decode, before=list("aé".encode())[:2])
    assert "".join(growing.add(token) for token in b"bc") + growing.end() == "bc"


def test_a_store_that_hangs_costs_one_prompt_its_patience_and_not_all():
    from server.worker.store_side import REST_S, StoreSide

    with socket.create_server(("127.0.0.1", 0)) as hanging:  # takes connections, and says nothing
        store = StoreSide(f"tcp://127.0.0.1:{hanging.getsockname()[1]}", "", "m", NAMESPACE, "w")
        for client in (*store._loading, store._storing):
            client._timeout_s = 0.6
        took_s = []
        for _ in range(6):
            began = time.monotonic()
            with store.loading() as load:
                assert load is None
            assert store.storing() is None
            took_s.append(time.monotonic() - began)
        assert max(took_s) >= 0.6
        assert sum(took_s) < 2 * 0.6 + 0.3 < 2 * REST_S
        store.close()


@pytest.mark.parametrize("listen", ["0.0.0.0:8100", "[::]:8100"])
def test_a_worker_that_listens_everywhere_says_where_others_find_it(listen):
    from server.worker.settings import load as load_worker

    options = [f"--worker.listen={listen}", "--worker.conductor=http://127.0.0.1:7410"]
    with pytest.raises(ConfigError, match=r"worker\.advertise"):
        load_worker(None, {}, options)
    assert load_worker(None, {}, [*options, "--worker.advertise=10.0.0.1:8100"]).worker.advertise


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@in_a_loop
async def test_a_worker_whose_engine_thread_dies_ends_and_leaves_no_client_waiting() -> None:
    pytest.importorskip("torch")
    from server.worker.model import load_model
    from server.worker.service import FAILED, Worker
    from server.worker.settings import WorkerSettings

    settings = WorkerSettings(model="tiny", listen="127.0.0.1:0", threads=1, block_tokens=16, chunk_tokens=64)
    model = load_model(settings)
    worker = Worker(settings, model, {})
    ready = asyncio.Event()
    serving = asyncio.create_task(worker.serve(ready.set))
    await ready.wait()

    def dying(batch: Any) -> list[int]:
        raise MemoryError

    async with httpx.AsyncClient(base_url=worker.url, timeout=30) as client:
        waiting = long_answer(client)
        model.engine.step = dying
        stream = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": [1], "max_tokens": 400, "stream": True, "temperature": 0})
        )
        async with asyncio.timeout(10):
            answers = await asyncio.gather(waiting, stream, return_exceptions=True)
            assert await serving == FAILED
    for answer in answers:
        assert not isinstance(answer, httpx.Response) or answer.status_code >= 500 or "engine_failed" in answer.text


@pytest.mark.engine
@pytest.mark.slow
def test_a_worker_at_a_node_that_hangs_serves_on_and_finds_it_again(tmp_path, start_node):
    pytest.importorskip("torch")
    from tests.system.test_worker import CHUNK, WorkerProcess, prompt_of

    node = start_node()
    worker = WorkerProcess(tmp_path, {"name": "w", "node": node.address, "load_seconds": "1s"})
    try:
        prompts = [prompt_of(3 * CHUNK + number, number) for number in range(1, 7)]
        expected = [worker.tokens(prompt, 5)[1] for prompt in prompts]
        os.kill(node.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert [worker.tokens(prompt, 5)[1] for prompt in prompts] == expected
        assert time.monotonic() - began < 6
        os.kill(node.pid, signal.SIGCONT)
        for _ in range(60):
            answer, tokens = worker.tokens(prompts[0], 5)
            assert tokens == expected[0]
            if answer["usage"]["prompt_tokens_details"]["cached_tokens"]:
                break
            select.select([], [], [], 0.25)
        else:
            raise AssertionError("the node is not asked any more")
        assert worker.stop() == 0
    finally:
        os.kill(node.pid, signal.SIGCONT)
        worker.kill()
