"""A Conductor and a gateway in front of real vLLM servers: answers, KV events, routes, prefill and decode apart.

Runs where CAIRN_VLLM says how to start vLLM's OpenAI server; see tests/vllm_engines.py.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("torch")

from tests import vllm_engines
from tests.system.cairn_process import REPO, clean_environ
from tests.system.nodes import until
from tests.system.serving import CONDUCTOR, GATEWAY, Service, free_ports
from tests.vllm_engines import BLOCK_TOKENS, MODEL, Registrar, VllmServer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not vllm_engines.COMMAND, reason="CAIRN_VLLM does not say how to start vLLM"),
]

BLOCKS = 128  # of each server's cache: 4,096 tokens
SMALL_CACHE = {"--num-gpu-blocks-override": str(BLOCKS)}
MOST, LONG = 24, 1500
SOON_S = 30.0  # for what takes milliseconds, on a machine that is busy with other things


class Front:
    """A Conductor and a gateway of their own in front of servers, which others start and stop."""

    def __init__(self, folder: Path, engines: list[tuple[VllmServer, dict[str, Any]]], **conductor: str) -> None:
        folder.mkdir()
        port = free_ports(2)
        url = f"http://127.0.0.1:{port}"
        given = {**CONDUCTOR, "heartbeat": "1s", "listen": f"127.0.0.1:{port}", **conductor}
        self.conductor = Service(folder, "conductor", "conductor", given)
        given = {**GATEWAY, "listen": f"127.0.0.1:{port + 1}", "conductor": url}
        self.gateway = Service(folder, "gateway", "gateway", given)
        self.conductor.begin().wait()
        self._registrar = Registrar(url, engines).start()
        self.gateway.begin().wait()
        self._engines = engines
        self.until_exact()

    def until_exact(self) -> None:
        until(self.is_exact, "the events of all to be known", SOON_S)

    def is_exact(self) -> bool:
        holders = self.conductor.get("/v1/health")["holders"]
        return set(holders) == {f"engine:{server.name}" for server, _ in self._engines} and set(holders.values()) == {
            "exact"
        }

    def rows(self, tokens: list[int]) -> dict[str, int]:
        """How much of a prompt each server has, as the Conductor sees it."""
        told = self.conductor.post("/v1/explain", model=MODEL, tokens=tokens).raise_for_status().json()
        return {row["instance"]: row["local_tokens"] for row in told["rows"]}

    def until_known(self, name: str, tokens: list[int], count: int) -> None:
        until(lambda: self.rows(tokens).get(name) == count, f"{count} tokens at {name}", SOON_S)

    def close(self) -> None:
        self._registrar.stop()
        self.gateway.kill()
        self.conductor.kill()


def ids(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(vllm_engines.VOCABULARY) for _ in range(count)]


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def completed(url: str, prompt: Any, *, is_stream: bool = False, most: int = MOST) -> tuple[str, tuple[int, ...], Any]:
    """(text, token ids, usage)."""
    given: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": most, "temperature": 0}
    given["extra_body"] = {"return_token_ids": True}
    with client_of(url) as client:
        if not is_stream:
            whole = client.completions.create(**given)
            return whole.choices[0].text, tuple(whole.choices[0].token_ids), whole.usage
        text, made, usage = "", [], None
        for chunk in client.completions.create(**given, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.text
                made += getattr(choice, "token_ids", None) or []
        return text, tuple(made), usage


def chatted(url: str, messages: list[dict[str, str]], *, is_stream: bool = False) -> str:
    given: dict[str, Any] = {"model": MODEL, "messages": messages, "max_completion_tokens": MOST, "temperature": 0}
    with client_of(url) as client:
        if not is_stream:
            return client.chat.completions.create(**given).choices[0].message.content or ""
        pieces = client.chat.completions.create(**given, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)


def cached_in(usage: Any) -> int:
    return usage.prompt_tokens_details.cached_tokens or 0


def whole_blocks(tokens: list[int]) -> int:
    return len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def tokens_of_chat(server: VllmServer, messages: list[dict[str, str]]) -> list[int]:
    answer = httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "messages": messages}, timeout=10)
    return list(answer.raise_for_status().json()["tokens"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vllm")
    vllm_engines.save_model(made / "model")
    return made


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[VllmServer]]:
    """Two of them that know nothing of one another."""
    port = free_ports(6)
    made = [VllmServer(folder, name, port + 3 * at, SMALL_CACHE) for at, name in enumerate(("v1", "v2"))]
    try:
        for server in made:
            server.begin()
        yield [server.wait() for server in made]
    finally:
        for server in made:
            server.kill()


@pytest.fixture
def fresh(servers: list[VllmServer]) -> list[VllmServer]:
    """With empty caches."""
    for server in servers:
        server.reset_cache()
    return servers


@pytest.fixture
def front(tmp_path: Path, fresh: list[VllmServer]) -> Iterator[Front]:
    made = Front(tmp_path / "front", [(server, {}) for server in fresh])
    try:
        yield made
        for service in (made.conductor, made.gateway):
            assert "Traceback" not in service.log, service.log[-4000:]
    finally:
        made.close()


TEXT = "The quick brown fox jumps over the lazy dog, and nobody knows why it should. " * 8
MESSAGES = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Why, then?"}]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_answers_through_the_gateway_are_those_of_vllm_itself(front, servers, is_stream):
    for prompt in (TEXT, ids(300, seed=1), [5, 6, 7], "é, ü and 漢字: half characters come in pieces"):
        expected = completed(servers[0].url, prompt)
        assert completed(front.gateway.url, prompt, is_stream=is_stream)[:2] == expected[:2]
        assert len(expected[1]) == MOST
    assert chatted(front.gateway.url, MESSAGES, is_stream=is_stream) == chatted(servers[0].url, MESSAGES)
    assert front.gateway.metric("cairn_gateway_untokenised_total") == 0
    assert front.gateway.metric("cairn_gateway_retries_total") == 0
    assert front.gateway.metric("cairn_gateway_requests_total", 'outcome="finished"') == 5


def test_what_vllm_refuses_reaches_the_client_as_it_is(front, servers):
    for url in (servers[0].url, front.gateway.url):
        with pytest.raises(openai.BadRequestError) as caught:
            completed(url, ids(3000, seed=2))
        assert "2048" in str(caught.value)
        with pytest.raises(openai.BadRequestError) as caught:
            completed(url, [vllm_engines.VOCABULARY])
        assert "out of vocabulary" in str(caught.value)


def test_the_index_follows_what_a_server_caches(front, servers):
    prompt, other = ids(200, seed=3), ids(64, seed=4)
    assert front.rows(prompt) == {"v1": 0, "v2": 0}
    completed(servers[0].url, prompt)
    front.until_known("v1", prompt, whole_blocks(prompt))
    assert front.rows(prompt)["v2"] == 0
    assert front.rows(prompt[:100] + other)["v1"] == 96, "the blocks that both begin with"
    usage = completed(servers[0].url, prompt)[2]
    assert cached_in(usage) == whole_blocks(prompt), "the index says what vLLM itself finds"
    chat = tokens_of_chat(servers[1], MESSAGES)
    chatted(servers[1].url, MESSAGES)
    front.until_known("v2", chat, whole_blocks(chat))
    assert front.is_exact()


def test_the_index_forgets_what_a_server_evicts(front, servers):
    first = ids(1000, seed=5)
    completed(servers[0].url, first, most=1)
    front.until_known("v1", first, whole_blocks(first))
    for seed in range(6, 12):
        completed(servers[0].url, ids(1000, seed=seed), most=1)
    until(lambda: front.rows(first)["v1"] < whole_blocks(first), "evictions to be told", SOON_S)
    known = front.rows(first)["v1"]
    assert cached_in(completed(servers[0].url, first, most=1)[2]) == known
    assert front.is_exact()
    assert front.conductor.get("/v1/health")["holdings"] <= BLOCKS
    servers[0].reset_cache()
    until(lambda: front.rows(first)["v1"] == 0, "a cleared cache to be told", SOON_S)
    assert front.is_exact()


def test_a_conductor_that_comes_later_learns_what_was_told_before(tmp_path, fresh):
    prompt = ids(500, seed=20)
    completed(fresh[1].url, prompt)
    late = Front(tmp_path / "late", [(server, {}) for server in fresh])
    try:
        assert late.rows(prompt) == {"v1": 0, "v2": whole_blocks(prompt)}
    finally:
        late.close()


def test_requests_go_where_their_prefix_is(tmp_path, fresh):
    """Against taking turns: tokens that vLLM did not compute, as its own usage and metrics say."""
    found = {}
    for policy in ("round_robin", "kvcache_centric"):
        for server in fresh:
            server.reset_cache()
        before = sum(server.metric("vllm:prefix_cache_hits_total") for server in fresh)
        front = Front(tmp_path / policy, [(server, {}) for server in fresh], policy=policy)
        try:
            documents = [ids(400, seed=seed) for seed in (30, 31, 32)]
            chance = random.Random(1)
            hits = total = 0
            for number in range(18):
                prompt = documents[chance.randrange(3)] + ids(40, seed=100 + number)
                usage = completed(front.gateway.url, prompt, most=4)[2]
                hits, total = hits + cached_in(usage), total + usage.prompt_tokens
        finally:
            front.close()
        told = sum(server.metric("vllm:prefix_cache_hits_total") for server in fresh) - before
        assert told == hits
        found[policy] = hits
        print(f"{policy}: {hits} of {total} prompt tokens were cached")
    assert found["kvcache_centric"] == 15 * 384, "each document is computed once"
    assert found["round_robin"] < found["kvcache_centric"]


def test_calibration_fits_a_server(fresh):
    words = ["conductor", "calibrate", "--json", fresh[0].url, "--max-tokens", "1024", "--max-batch", "4"]
    words += ["--repeats", "2", "--steps", "16", "--vocabulary", "2000"]
    outcome = subprocess.run(
        [sys.executable, "-m", "server.cli", *words], cwd=REPO, env=clean_environ(), capture_output=True, text=True
    )
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    print(json.dumps(found, indent=1))
    cached = {(tokens, cached) for tokens, cached, _ in found["samples"]["prefill"]}
    assert cached >= {(1024, 0), (1024, 512), (1024, 896), (64, 32)}, "vLLM says what it found in its cache"
    assert {batch for batch, _, _ in found["samples"]["decode"]} == {1, 2, 4}
    base_s, per_token_s, *_ = found["prefill"]
    assert base_s + per_token_s > 0
    assert found["decode"][0] > 0


def test_a_server_that_is_started_again_has_nothing(front, servers):
    """Last of those with two servers: nothing is known of the old one's cache, and its events are followed anew."""
    prompt = ids(200, seed=40)
    completed(servers[1].url, prompt)
    front.until_known("v2", prompt, whole_blocks(prompt))
    answer: list[str] = []
    given: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": LONG, "temperature": 0, "stream": True}
    with client_of(front.gateway.url) as client:
        for chunk in client.completions.create(**given):
            answer += [choice.text for choice in chunk.choices]
            if len(answer) == 50:
                servers[1].kill()  # which has the prefix, so it is the one that answers
    assert front.gateway.metric("cairn_gateway_continued_total") == 1
    assert "".join(answer) == completed(servers[0].url, prompt, most=LONG)[0], "the other one goes on"
    until(lambda: "v2" not in front.rows(prompt), "the dead one to be gone", SOON_S)
    servers[1].begin().wait()
    until(lambda: front.rows(prompt).get("v2") == 0, "it to be back with nothing", SOON_S)
    front.until_exact()
    completed(servers[1].url, prompt)
    front.until_known("v2", prompt, whole_blocks(prompt))


# Prefill and decode apart


@pytest.fixture(scope="module", params=["folder", "nixl"])
def apart(request: pytest.FixtureRequest, folder: Path) -> Iterator[list[VllmServer]]:
    """A server for prefill and one for decode that hand KV over."""
    transfer: dict[str, Any] = {"kv_connector": "NixlConnector"}
    if request.param == "folder":
        transfer = {"kv_connector": "FolderConnector", "kv_connector_module_path": "tests.vllm_folder_connector"}
        transfer |= {"kv_connector_extra_config": {"path": str(folder / "kv")}}
    elif not vllm_engines.has_module("nixl"):
        pytest.skip("nixl is not installed beside vLLM")
    port = free_ports(8)
    made = []
    for at, (role, part) in enumerate({"prefill": "kv_producer", "decode": "kv_consumer"}.items()):
        options = {"--kv-transfer-config": json.dumps(transfer | {"kv_role": part})}
        environ = {"PYTHONPATH": str(REPO), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 6 + at)}
        made.append(VllmServer(folder, f"{role}-{request.param}", port + 3 * at, options, environ))
    try:
        for server in made:
            server.begin()
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.kill()


def roles_of(pair: list[VllmServer]) -> list[tuple[VllmServer, dict[str, Any]]]:
    return list(zip(pair, ({"role": "prefill"}, {"role": "decode"}), strict=True))


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_prefill_and_decode_apart_answer_as_one(tmp_path, apart, is_stream):
    prefill, decode = apart
    decode.reset_cache()
    front = Front(tmp_path / "front", roles_of(apart))
    name = "vllm:external_prefix_cache_hits_total"
    try:
        before = decode.metric(name)
        for prompt in (ids(200, seed=50 + is_stream), ids(20, seed=58 + is_stream), ids(64, seed=53 + is_stream)):
            text, made, usage = completed(front.gateway.url, prompt, is_stream=is_stream)
            assert cached_in(usage) == 0, "the prefill computed it all"
            assert len(made) == MOST
            decode.reset_cache()
            assert (text, made) == completed(decode.url, prompt)[:2]
        assert decode.metric(name) - before >= 192 + 32, "KV came from the prefill"
        chat = chatted(front.gateway.url, MESSAGES, is_stream=is_stream)
        decode.reset_cache()
        assert chat == chatted(decode.url, MESSAGES)
        prompt = ids(300, seed=60 + is_stream)
        completed(front.gateway.url, prompt)
        front.until_known(prefill.name, prompt, 288)
        assert cached_in(completed(front.gateway.url, prompt, is_stream=is_stream)[2]) == 288, "the prefill's"
        assert front.gateway.metric("cairn_gateway_retries_total") == 0
        assert front.is_exact()
    finally:
        front.close()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_a_prefill_that_hands_over_nothing_costs_time_and_no_answer(tmp_path, fresh, is_stream):
    """Servers without a connector: there are no kv_transfer_params in the prefill's answer, and the decode computes."""
    front = Front(tmp_path / "front", roles_of(fresh))
    try:
        for prompt in (ids(200, seed=70), TEXT):
            expected = completed(fresh[0].url, prompt)
            assert completed(front.gateway.url, prompt, is_stream=is_stream)[:2] == expected[:2]
        assert chatted(front.gateway.url, MESSAGES, is_stream=is_stream) == chatted(fresh[0].url, MESSAGES)
        assert front.gateway.metric("cairn_gateway_retries_total") == 0
    finally:
        front.close()
