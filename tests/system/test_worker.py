"""Workers as an operator runs them, with the tiny model: their answers, what goes by the store, and how they end."""

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("torch")

import httpx
import openai
import torch

from engine_client.adapters.transformers import TransformersEngine, tiny_model
from tests.system.cairn_process import PATIENCE_S, REPO, clean_environ

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK, CHUNK = 16, 64
SETTINGS = {
    "model": "tiny",
    "listen": "127.0.0.1:0",
    "threads": "1",
    "block_tokens": str(BLOCK),
    "chunk_tokens": str(CHUNK),
    "drain_seconds": "20s",
}
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


class WorkerProcess:
    """A worker that serves. `log` is what it wrote to stderr so far."""

    def __init__(self, place, settings):
        self._log = place / f"{settings.get('name', 'worker')}.log"
        options = [f"--worker.{name}={value}" for name, value in {**SETTINGS, **settings}.items()]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "server.cli", "worker", "--json", *options],
                cwd=REPO,
                env=clean_environ(**THREADS),
                stdout=subprocess.PIPE,
                stderr=log,
            )
        readable, _, _ = select.select([self.process.stdout], [], [], 2 * PATIENCE_S)
        line = self.process.stdout.readline() if readable else b""
        if not line:
            self.kill()
            raise AssertionError(f"the worker did not start:\n{self.log}")
        self.url = json.loads(line)["addresses"]["http"]

    @property
    def log(self):
        return self._log.read_text()

    def post(self, path, **body):
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE_S)

    def tokens(self, prompt, most, **more):
        """The answer to a prompt of ids, and its ids."""
        body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "return_token_ids": True, **more}
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer, answer["choices"][0]["token_ids"]

    def metric(self, name):
        text = httpx.get(f"{self.url}/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"cairn_worker_{name}"))

    def wait_for(self, name, value):
        for _ in range(400):
            if self.metric(name) == value:
                return
            self.process.poll()
            select.select([], [], [], 0.02)
        raise AssertionError(f"{name} is {self.metric(name)}, not {value}")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def kill(self):
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def start_worker(tmp_path_factory):
    started = []

    def start(**settings):
        started.append(WorkerProcess(tmp_path_factory.mktemp("worker"), settings))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


@pytest.fixture(scope="module")
def alone():
    torch.set_num_threads(1)
    return TransformersEngine(tiny_model(), block_tokens=BLOCK, chunk_tokens=CHUNK)


@pytest.fixture(scope="module")
def node(start_node):
    return start_node()


@pytest.fixture(scope="module")
def prefiller(start_worker, node):
    return start_worker(name="p", role="prefill", node=node.address)


@pytest.fixture(scope="module")
def decoder(start_worker, node):
    return start_worker(name="d", role="decode", node=node.address)


@pytest.fixture(scope="module")
def solo(start_worker):
    return start_worker(name="solo")


def prompt_of(tokens, seed):
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(tokens)]


# Alone


def test_a_prompt_of_ids_gets_the_tokens_of_the_engine_alone(solo, alone):
    prompt = prompt_of(150, 1)
    answer, tokens = solo.tokens(prompt, 12)
    assert tokens == alone.generate(prompt, 12).token_ids
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_stream_says_the_same_as_a_whole_answer_to_the_openai_client(solo):
    client = openai.OpenAI(base_url=f"{solo.url}/v1", api_key="none")
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Good day"}], "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert client.models.list().data[0].id == "tiny"


def test_streamed_token_ids_are_all_of_them(solo, alone):
    prompt = prompt_of(30, 2)
    asked = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{solo.url}/v1/completions", json=asked) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert [token for choice in choices for token in choice["token_ids"]] == alone.generate(prompt, 9).token_ids
    assert choices[0]["prompt_token_ids"] == prompt


def test_a_stop_string_ends_the_text_before_it(solo):
    prompt = prompt_of(40, 3)
    answer, tokens = solo.tokens(prompt, 40)
    letters = [chr(token) if 32 <= token < 127 else "" for token in tokens]
    stop = next(letter for letter in letters[3:] if letter)
    stopped, fewer = solo.tokens(prompt, 40, stop=[stop])
    text = answer["choices"][0]["text"]
    assert stopped["choices"][0]["text"] == text[: text.index(stop)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert len(fewer) < 40
    solo.wait_for("batch", 0)


def test_a_seed_gives_the_same_again(solo):
    prompt = prompt_of(20, 4)
    drawn = [solo.tokens(prompt, 10, temperature=1.0, top_p=0.9, seed=seed)[1] for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", 2), ("best_of", 3), ("logprobs", 1), ("echo", True), ("tools", [{"type": "function"}])),
        *(("temperature", -1), ("top_p", 2), ("max_tokens", 0), ("max_tokens", "9"), ("seed", 1.5), ("stream", "yes")),
        *(("stop", [""]), ("stop", ["a"] * 5), ("prompt", ["a", "b"]), ("prompt", []), ("prompt", [512])),
        *(("prompt", [[1], [2]]), ("logit_bias", {"1": 2}), ("presence_penalty", 0.5), ("kv_transfer_params", [])),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_a_field_that_is_wrong_or_not_served_is_named(solo, field, value):
    response = solo.post("/v1/completions", **{"prompt": "abc", field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"


def test_requests_that_are_none_are_refused_in_openais_form(solo):
    long = solo.post("/v1/completions", prompt="a" * 16_380, max_tokens=5)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    other = solo.post("/v1/completions", prompt="a", model="gpt")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    for body in (b"{", b"[]", b"\xff"):
        response = httpx.post(f"{solo.url}/v1/chat/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]
    chat = solo.post("/v1/chat/completions", messages=[{"role": "user", "content": [{"type": "image_url"}]}])
    assert chat.json()["error"]["param"] == "messages.0.content"


def test_tokenize_gives_the_tokens_that_a_prompt_is_computed_with(solo):
    messages = [{"role": "user", "content": "hi"}]
    told = solo.post("/tokenize", messages=messages, add_generation_prompt=True).json()
    assert bytes(told["tokens"]) == b"user: hi\nassistant: "
    answer = solo.post("/v1/chat/completions", messages=messages, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == told["count"]


def test_a_client_that_goes_takes_its_sequence_out_of_the_batch(solo):
    asked = {"prompt": prompt_of(64, 5), "max_tokens": 15_000, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{solo.url}/v1/completions", json=asked) as response:
        lines = response.iter_lines()  # kept: without it the response is closed
        next(lines)
        assert solo.metric("batch") == 1
    solo.wait_for("batch", 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{solo.url}/v1/completions", json={**asked, "stream": False}, timeout=0.5)
    solo.wait_for("batch", 0)
    assert solo.metric('requests_total{outcome="cancelled"}') == 2


def test_what_is_over_the_queue_is_told_when_to_come_again(start_worker):
    worker = start_worker(name="narrow", queue="1", max_batch="1", token="secret-of-the-worker")
    headers = {"authorization": "Bearer secret-of-the-worker"}
    assert httpx.get(f"{worker.url}/v1/models").status_code == 401
    asked = {"prompt": prompt_of(10, 6), "max_tokens": 2000, "temperature": 0}

    async def many():
        async with httpx.AsyncClient(base_url=worker.url, headers=headers, timeout=1.5) as client:
            tasks = [client.post("/v1/completions", json=asked) for _ in range(8)]
            return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(many())
    refused = [answer for answer in answers if isinstance(answer, httpx.Response) and answer.status_code == 429]
    assert len(refused) >= 4
    assert int(refused[0].headers["retry-after"]) >= 1
    assert refused[0].json()["error"]["type"] == "rate_limit_error"


# By the store


def test_what_one_worker_prefills_another_decodes_from(prefiller, decoder, alone):
    prompt = prompt_of(5 * CHUNK + 7, 10)
    handed, first = prefiller.tokens(prompt, 1, kv_transfer_params=HAND_OVER)
    params = handed["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["remote_engine_id"] == "p"
    assert [params["first_token_id"]] == first
    answer, tokens = decoder.tokens(prompt, 16, kv_transfer_params=params)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 5 * CHUNK}
    assert tokens == alone.generate(prompt, 16).token_ids
    assert tokens[:1] == first
    assert decoder.metric("other_first_tokens_total") == 0


def test_a_sampled_first_token_is_the_same_where_it_is_decoded(prefiller, decoder):
    prompt = prompt_of(CHUNK + 9, 11)
    for _ in range(5):
        handed, first = prefiller.tokens(prompt, 1, temperature=1.0, kv_transfer_params=HAND_OVER)
        _, tokens = decoder.tokens(prompt, 3, temperature=1.0, kv_transfer_params=handed["kv_transfer_params"])
        assert tokens[:1] == first


def test_forty_requests_with_shared_documents_get_what_each_gets_alone(prefiller, decoder, alone, node):
    documents = [prompt_of(4 * CHUNK, 20 + number) for number in range(4)]
    prompts = [documents[number % 4] + prompt_of(5 + number, 50 + number) for number in range(40)]

    async def answered(client, prompt):
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True}
        handed = await client.post(
            f"{prefiller.url}/v1/completions", json={**body, "max_tokens": 1, "kv_transfer_params": HAND_OVER}
        )
        params = handed.raise_for_status().json()["kv_transfer_params"]
        answer = await client.post(
            f"{decoder.url}/v1/completions", json={**body, "max_tokens": 10, "kv_transfer_params": params}
        )
        return handed.json(), answer.raise_for_status().json()

    async def all_of_them():
        async with httpx.AsyncClient(timeout=2 * PATIENCE_S) as client:
            return await asyncio.gather(*(answered(client, prompt) for prompt in prompts))

    pairs = asyncio.run(all_of_them())
    tokens = [answer["choices"][0]["token_ids"] for _, answer in pairs]
    assert tokens == [alone.generate(prompt, 10).token_ids for prompt in prompts]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for _, answer in pairs]
    assert cached == [4 * CHUNK] * 40
    computed = sum(handed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for handed, _ in pairs)
    assert computed == 4


def test_a_store_that_dies_costs_no_answer(start_worker, start_node, alone):
    node = start_node()
    worker = start_worker(name="lonely", node=node.address, load_seconds="0.5s")
    prompt = prompt_of(3 * CHUNK + 3, 30)
    expected = alone.generate(prompt, 5).token_ids
    assert worker.tokens(prompt, 5)[1] == expected
    answer, tokens = worker.tokens(prompt, 5)
    assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"], tokens) == (3 * CHUNK, expected)
    os.kill(node.pid, signal.SIGKILL)
    answer, tokens = worker.tokens(prompt, 5)
    assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"], tokens) == (0, expected)
    assert worker.stop() == 0


# Its end, and its place at the Conductor


def test_on_sigterm_what_runs_ends_and_what_comes_is_refused(start_worker):
    worker = start_worker(name="ending")
    asked = {"prompt": prompt_of(10, 31), "max_tokens": 300, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{worker.url}/v1/completions", json=asked, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        next(lines)
        worker.process.send_signal(signal.SIGTERM)
        refused = None
        while refused is None or refused.status_code == 200:
            refused = worker.post("/v1/completions", prompt="a", max_tokens=1)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert worker.process.wait(PATIENCE_S) == 0


class Conductor(ThreadingHTTPServer):
    """Keeps what it is told; forgets the worker once."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.told = []
        self.heard = threading.Condition()
        self.is_to_forget = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def wait_for(self, method, path, more=lambda body: True):
        def found():
            return [body for said, where, body in self.told if (said, where) == (method, path) and more(body)]

        with self.heard:
            assert self.heard.wait_for(found, PATIENCE_S), self.told
            return found()[-1]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"null")
        answer = {"heartbeat_ms": 50} if self.path == "/v1/instances" else {"role": "decode", "is_draining": False}
        status = 200
        with self.server.heard:
            if self.path.endswith("/heartbeat") and self.server.is_to_forget:
                self.server.is_to_forget, status = False, 404
            self.server.told.append((self.command, self.path, body))
            self.server.heard.notify_all()
        said = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_DELETE = do_POST

    def log_message(self, *args):
        pass


def test_a_worker_registers_says_how_it_is_doing_and_leaves(start_worker, node):
    conductor = Conductor()
    url = f"http://127.0.0.1:{conductor.server_port}"
    worker = start_worker(name="w1", node=node.address, conductor=url, conductor_token="a-token-of-the-conductor")
    body = conductor.wait_for("POST", "/v1/instances")
    assert (body["name"], body["role"], body["model"], body["engine"]) == ("w1", "both", "tiny", "cairn")
    assert f"http://{body['address']}" == worker.url
    assert (body["block_tokens"], body["hash"], len(body["root"]), body["node"]) == (BLOCK, "xxh3", 32, "node")
    assert body["kv_bytes"] == 4 * 2 * 2 * 16 * 4
    worker.tokens(prompt_of(100, 40), 5)
    beat = conductor.wait_for("POST", "/v1/instances/w1/heartbeat", lambda body: body["prefills"])
    assert beat["prefills"][0][:2] == [100, 0]
    conductor.told.clear()
    conductor.is_to_forget = True
    assert conductor.wait_for("POST", "/v1/instances")["role"] == "decode"
    assert worker.stop() == 0
    conductor.wait_for("POST", "/v1/instances/w1/drain")
    conductor.wait_for("DELETE", "/v1/instances/w1")
    conductor.shutdown()


def test_a_worker_whose_conductor_is_gone_serves_on(start_worker):
    worker = start_worker(name="w2", conductor="http://127.0.0.1:9")
    assert len(worker.tokens([1, 2, 3], 4)[1]) == 4
    assert worker.stop() == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--worker.model=nowhere"], "worker.model"),
        (["--worker.chunk_tokens=100"], "multiple"),
        (["--worker.role=prefill"], "worker.node"),
        (["--worker.rolle=both"], "worker.role"),
    ],
)
def test_settings_that_are_no_good_end_it_with_2(options, complaint):
    command = [sys.executable, "-m", "server.cli", "worker", *options]
    ended = subprocess.run(command, cwd=REPO, env=clean_environ(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 2
    assert complaint in ended.stderr
