"""The Conductor's service over HTTP, in this process and in one of its own, with real store nodes beside it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zmq.asyncio

from engine_client.blocking import BlockingClient
from engine_client.subscription import Standing, Update
from kvstore.prefix import Namespace, part_key
from kvstore.types import DRAM, NVME, OBJECT, BlockKey, TierName
from kvstore.wire_events import BlockEvent
from scheduler.index import PrefixIndex
from scheduler.requests import names_of
from server.conductor.app import create_app
from server.conductor.chains import hashed
from server.conductor.nodes import NodeView
from server.conductor.service import ConductorService
from server.conductor.settings import load
from server.http_serving import HttpServing
from tests.system import nodes as waiting
from tests.system.cairn_process import REPO, CairnProcess, clean_environ

NAMESPACE = Namespace(model="m", dtype="bf16", layout="t", block_tokens=16, layers=1, block_bytes=4096)
PATIENCE_S = 20.0
PROMPT = list(range(1000, 1000 + 160))  # ten blocks


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 3 * PATIENCE_S))

    return run


def instance(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "role": "both",
        "model": "m",
        "engine": "cairn",
        "address": f"http://{name}:8100",
        "block_tokens": 16,
        "kv_bytes": 256,
        "prefill": [0.01, 1e-3, 0, 0],
        "decode": [0.01, 1e-4, 1e-8],
    } | more


@asynccontextmanager
async def serving(*options: str) -> AsyncIterator[tuple[ConductorService, httpx.AsyncClient]]:
    """A Conductor in this loop, and a client of it."""
    service = ConductorService(load(None, {}, ["--conductor.listen=127.0.0.1:0", *options]))
    server = HttpServing(create_app(service), "conductor.listen", "127.0.0.1:0", service.crashed)
    await server.start()
    service.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=10) as client:
            yield service, client
        assert not service.failure.done()
    finally:
        await server.stop()
        await service.close()


async def route(client: httpx.AsyncClient, tokens: list[int] = PROMPT, **more: Any) -> httpx.Response:
    return await client.post("/v1/route", json={"model": "m", "tokens": tokens, **more})


async def until(client: httpx.AsyncClient, path: str, wanted: Any) -> dict[str, Any]:
    """The first answer of `path` that is as wanted."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = (await client.get(path)).json()
            if wanted(answer):
                return dict(answer)
            await asyncio.sleep(0.02)


@in_a_loop
async def test_a_request_goes_through_its_states_and_leaves_nothing() -> None:
    async with serving() as (service, client):
        assert (await client.post("/v1/instances", json=instance("a"))).json() == {"heartbeat_ms": 1000}
        told = (await route(client, id="r1")).json()
        assert told["id"] == "r1"
        assert (
            told["prefill"]
            == told["decode"]
            == {
                "name": "a",
                "address": "http://a:8100",
                "engine": "cairn",
                "bootstrap_host": "",
                "bootstrap_port": 0,
            }
        )
        assert told["is_collocated"]
        assert told["cached_tokens"] == 0
        assert told["pull"] is None
        assert told["predicted"]["ttft_ms"] == pytest.approx(170)
        for state in ("prefilled", "prefilled", "finished", "finished", "cancelled"):
            assert (await client.post("/v1/requests/r1", json={"state": state})).status_code == 204
        assert (await client.get("/v1/health")).json()["requests"] == 0
        assert service.counts.in_time == 1


@in_a_loop
async def test_what_was_sent_counts_before_it_is_told() -> None:
    async with serving() as (_, client):
        for name in "ab":
            await client.post("/v1/instances", json=instance(name))
        went = [(await route(client, [n] * 160)).json()["prefill"]["name"] for n in range(10)]
        assert sorted(went) == ["a"] * 5 + ["b"] * 5


@in_a_loop
async def test_octets_and_json_are_the_same_prompt() -> None:
    async with serving() as (_, client):
        await client.post("/v1/instances", json=instance("a"))
        body = np.array(PROMPT, dtype="<u4").tobytes()
        answer = await client.post(
            "/v1/explain?model=m&output_tokens=5&exclude=x,y", content=body, headers={"content-type": OCTETS}
        )
        told = (await client.post("/v1/explain", json={"model": "m", "tokens": PROMPT, "output_tokens": 5})).json()
        assert without_id(answer.json()) == without_id(told)
        assert told["rows"][0]["instance"] == "a"
        assert (await client.get("/v1/health")).json()["requests"] == 0


OCTETS = "application/octet-stream"


def without_id(told: dict[str, Any]) -> dict[str, Any]:
    return told | {"route": told["route"] | {"id": ""}}


@pytest.mark.parametrize(
    ("path", "body", "status", "place"),
    [
        ("/v1/route", b"{", 400, "no JSON"),
        ("/v1/route", b"[]", 422, "body: "),
        ("/v1/route", b'{"model":"m"}', 422, "tokens: "),
        ("/v1/route", b'{"model":"m","tokens":[1,-1]}', 422, "tokens[1]: "),
        ("/v1/route", b'{"model":"m","tokens":[1,4294967296]}', 422, "tokens[1]: "),
        ("/v1/route", b'{"model":"m","tokens":[1.5]}', 422, "tokens[0]: "),
        ("/v1/route", b'{"model":"m","tokens":[],"outputs":1}', 422, "outputs: "),
        ("/v1/route", b'{"model":"m","tokens":[],"output_tokens":0}', 422, "output_tokens: "),
        ("/v1/route", b'{"model":"m","tokens":[],"deadline_ms":-1}', 422, "deadline_ms: "),
        ("/v1/route", b'{"model":"m","tokens":[],"exclude":["/"]}', 422, "exclude[0]: "),
        ("/v1/instances", b'{"name":"a b","model":"m","engine":"vllm","address":"x"}', 422, "name: "),
        ("/v1/instances", b'{"name":"a","model":"m","engine":"tgi","address":"x"}', 422, "engine: "),
        ("/v1/instances", b'{"name":"a","model":"m","engine":"vllm","address":"x","root":"zz"}', 422, "root: "),
        ("/v1/instances", b'{"name":"a","model":"m","engine":"vllm","address":"x","prefill":[1]}', 422, "prefill: "),
        (
            "/v1/instances",
            b'{"name":"a","model":"m","engine":"vllm","address":"x","node":"n","node_address":"n:7401"}',
            422,
            "node_address: ",
        ),
        ("/v1/requests/r", b'{"state":"done"}', 422, "state: "),
        ("/v1/instances/a/role", b'{"role":"chief"}', 422, "role: "),
    ],
)
@in_a_loop
async def test_bad_bodies_are_refused_by_the_name_of_the_field(path: str, body: bytes, status: int, place: str) -> None:
    async with serving() as (_, client):
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert place in answer.json()["detail"]


@in_a_loop
async def test_bad_octets_and_queries_are_refused() -> None:
    async with serving("--conductor.body=1KiB") as (_, client):
        for query, body, status in [
            ("model=m", b"123", 422),
            ("model=m&model=n", b"1234", 422),
            ("model=m&color=red", b"1234", 422),
            ("model=m&priority=x", b"1234", 422),
            ("model=m", b"1234" * 257, 413),
        ]:
            answer = await client.post(f"/v1/route?{query}", content=body, headers={"content-type": OCTETS})
            assert answer.status_code == status, answer.text
        assert (await client.get("/v1/nothing")).status_code == 404
        assert set((await client.put("/v1/instances")).headers["allow"].split(", ")) >= {"GET", "POST"}
        answer = await client.get("/v1/route")
        assert answer.status_code == 405
        assert answer.headers["allow"] == "POST"


@in_a_loop
async def test_without_the_token_nobody_asks_and_metrics_are_open() -> None:
    token = "0123456789abcdef"
    async with serving(f"--conductor.token={token}") as (_, client):
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": token}):
            answer = await client.get("/v1/instances", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
        assert (await client.get("/v1/instances", headers={"authorization": f"Bearer {token}"})).status_code == 200
        assert (await client.get("/metrics")).status_code == 200


@in_a_loop
async def test_unknown_instances_are_told_to_register() -> None:
    async with serving() as (_, client):
        beat = {"prefill_tokens": 0, "decode_batch": 0, "decode_context": 0}
        assert (await client.post("/v1/instances/a/heartbeat", json=beat)).status_code == 404
        assert (await client.post("/v1/instances/a/drain")).status_code == 404
        assert (await client.post("/v1/instances/a/role", json={"role": "both"})).status_code == 404
        assert (await client.delete("/v1/instances/a")).status_code == 404
        answer = await route(client)
        assert answer.status_code == 503
        assert answer.json()["reason"] == "no_instance"
        assert int(answer.headers["retry-after"]) >= 1


@in_a_loop
async def test_a_late_first_token_is_refused_with_when_to_come_again() -> None:
    async with serving("--conductor.ttft_slo=1s") as (service, client):
        await client.post("/v1/instances", json=instance("a"))
        assert (await route(client, [7] * 5000, id="first")).status_code == 200  # an idle instance tries its best
        answer = await route(client, [8] * 5000)
        assert answer.status_code == 429
        assert answer.json()["reason"] == "ttft"
        assert int(answer.headers["retry-after"]) >= 4
        answer = await route(client, deadline_ms=20)
        assert answer.status_code == 429
        assert service.counts.refusals["ttft"] == 2
        assert (await client.get("/v1/health")).json()["requests"] == 1


@in_a_loop
async def test_silent_instances_go_with_their_requests_and_come_back() -> None:
    async with serving("--conductor.heartbeat=100ms") as (service, client):
        await client.post("/v1/instances", json=instance("a"))
        assert (await route(client, id="r")).status_code == 200
        await until(client, "/v1/health", lambda told: told["instances"] == 0)
        assert (await client.get("/v1/health")).json()["requests"] == 0
        assert (service.counts.lost_instances, service.counts.lost_requests) == (1, 1)
        assert (await client.post("/v1/requests/r", json={"state": "failed", "instance": "a"})).status_code == 204
        await client.post("/v1/instances", json=instance("a"))
        assert (await route(client)).status_code == 200


@in_a_loop
async def test_drained_instances_take_nothing_and_roles_switch() -> None:
    async with serving() as (_, client):
        for name in "ab":
            await client.post("/v1/instances", json=instance(name))
        await client.post("/v1/instances/a/drain")
        beat = {"prefill_tokens": 0, "decode_batch": 0, "decode_context": 0}
        told = (await client.post("/v1/instances/a/heartbeat", json=beat)).json()
        assert told == {"role": "both", "is_draining": True}
        assert {(await route(client)).json()["prefill"]["name"] for _ in range(4)} == {"b"}
        await client.post("/v1/instances/b/role", json={"role": "decode"})
        assert (await client.post("/v1/instances/b/heartbeat", json=beat)).json()["role"] == "decode"
        assert (await route(client)).status_code == 503
        await client.post("/v1/instances", json=instance("a", role="prefill"))
        told = (await route(client)).json()
        assert (told["prefill"]["name"], told["decode"]["name"]) == ("a", "b")
        assert (await route(client, exclude=["a"])).status_code == 503
        assert (await client.delete("/v1/instances/b")).status_code == 204
        assert (await route(client)).status_code == 503


@in_a_loop
async def test_measured_prefills_change_what_is_predicted_and_a_role_stays() -> None:
    async with serving() as (service, client):
        await client.post("/v1/instances", json=instance("a"))
        await client.post("/v1/instances/a/role", json={"role": "prefill"})
        service.registrations["a"].refitted_s -= 60
        samples = [[100 * n, 0, 0.02 + 100 * n * 2e-3] for n in range(1, 60)]
        beat = {"prefill_tokens": 0, "decode_batch": 0, "decode_context": 0, "prefills": samples}
        told = (await client.post("/v1/instances/a/heartbeat", json=beat)).json()
        assert told["role"] == "prefill"
        [row] = (await client.get("/v1/instances")).json()["instances"]
        assert row["prefill"][1] == pytest.approx(2e-3, rel=0.2)
        assert row["role"] == "prefill"


@in_a_loop
async def test_metrics_say_what_happened() -> None:
    async with serving("--conductor.policy=round_robin") as (_, client):
        await client.post("/v1/instances", json=instance("a"))
        await route(client, id="r")
        await client.post("/v1/requests/r", json={"state": "prefilled"})
        text = (await client.get("/metrics")).text
        for line in (
            'cairn_conductor_routes_total{outcome="collocated",policy="round_robin"} 1.0',
            'cairn_conductor_states_total{state="prefilled"} 1.0',
            'cairn_conductor_instances{role="both"} 1.0',
            "cairn_conductor_route_seconds_count 1.0",
            "cairn_conductor_ttft_error_seconds_count 1.0",
            'cairn_conductor_queue_seconds{instance="a"} 0.0',
            "cairn_conductor_requests 1.0",
        ):
            assert line in text, line


@in_a_loop
async def test_scaling_advice_is_there_for_each_model() -> None:
    async with serving("--scaling.prefill_min=2", "--conductor.heartbeat=5s") as (_, client):
        await client.post("/v1/instances", json=instance("a"))
        told = await until(client, "/v1/scaling", lambda told: told["models"])
        assert told["models"][0]["model"] == "m"


class Stored:
    """A node with ten blocks of PROMPT, through the real client."""

    def __init__(self, node: CairnProcess) -> None:
        with BlockingClient(node.address) as client:
            space = client.open("space", NAMESPACE)
            self.root = space.root.hex()
            keys = space.keys(PROMPT)
            client.put(space, keys, [bytes([n]) * 4096 for n in range(len(keys))])

    def beside(self, name: str, node: CairnProcess) -> dict[str, Any]:
        """The registration of an instance beside it."""
        fields = {name: getattr(NAMESPACE, name) for name in NAMESPACE.__struct_fields__}
        return instance(
            f"engine-{name}",
            node=name,
            node_address=node.tcp_address,
            root=self.root,
            namespace={"name": "space", "fields": fields},
        )


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CairnProcess]:
    found = CairnProcess(tmp_path / "n1", {}, {"node.name": "n1"})
    yield found
    found.kill()


@in_a_loop
async def test_requests_go_where_a_real_node_has_their_prefix(node: CairnProcess) -> None:
    stored = Stored(node)
    async with serving(f"--conductor.node_token={node.token}") as (service, client):
        await client.post("/v1/instances", json=stored.beside("n1", node))
        await client.post("/v1/instances", json=instance("other"))
        told = await until(client, "/v1/health", lambda told: told["holders"].get("node:n1") == "exact")
        assert told["blocks"] == 10
        for number in range(3):
            found = (await route(client, [*PROMPT, 5, 6, 7], id=f"r{number}")).json()
            assert (found["prefill"]["name"], found["cached_tokens"], found["pull"]) == ("engine-n1", 160, None)
        with BlockingClient(node.address) as writer:
            writer.evict(writer.find("space"), None)
        await until(client, "/v1/health", lambda told: told["blocks"] == 0)
        assert service.index.check() == []


@in_a_loop
async def test_a_node_that_is_out_of_reach_is_forgotten_and_learnt_again_though_it_missed_nothing(
    node: CairnProcess,
) -> None:
    Stored(node)
    options = (f"--conductor.nodes=n1={node.tcp_address}", "--conductor.forget_after=1s")
    async with serving(f"--conductor.node_token={node.token}", *options) as (service, client):
        await until(client, "/v1/health", lambda told: told["holders"] == {"node:n1": "exact"})
        os.kill(node.pid, signal.SIGSTOP)
        try:
            told = await until(client, "/v1/health", lambda told: told["holders"] == {"node:n1": "degraded"})
            assert told["blocks"] == 10
            await until(client, "/v1/health", lambda told: told["blocks"] == 0)
        finally:
            os.kill(node.pid, signal.SIGCONT)
        told = await until(client, "/v1/health", lambda told: told["holders"] == {"node:n1": "exact"})
        assert told["blocks"] == 10
        assert service.nodes.forgotten >= 1
        assert service.index.check() == []


@in_a_loop
async def test_a_lost_node_that_nobody_names_any_more_is_not_looked_for(node: CairnProcess) -> None:
    stored = Stored(node)
    options = (f"--conductor.node_token={node.token}", "--conductor.forget_after=1s", "--conductor.heartbeat=500ms")
    async with serving(*options) as (service, client):
        await client.post("/v1/instances", json=stored.beside("n1", node))
        await until(client, "/v1/health", lambda told: told["blocks"] == 10)
        node.kill()
        await until(client, "/v1/health", lambda told: not told["holders"])
        assert (service.nodes.views, service.nodes.addresses, service.index.blocks) == ({}, {}, 0)


@in_a_loop
async def test_nothing_is_pulled_to_a_node_in_no_cluster_nor_handed_over_beyond_it(node: CairnProcess) -> None:
    stored = Stored(node)
    options = (f"--conductor.node_token={node.token}", "--conductor.admission=none")
    async with serving(*options) as (service, client):
        busy = stored.beside("n1", node) | {"node": "", "node_address": ""}
        await client.post("/v1/instances", json=stored.beside("n1", node) | {"role": "prefill"})
        await client.post("/v1/instances", json=busy | {"name": "far", "role": "decode"})
        await client.post("/v1/instances", json=stored.beside("n1", node) | {"name": "near", "role": "decode"})
        await until(client, "/v1/health", lambda told: told["holders"].get("node:n1") == "exact")
        await until(client, "/v1/health", lambda _: service.nodes.views["n1"].is_alone)
        member = service.conductor.fleet.members["engine-n1"]
        assert member.instance.tiers.network_rate == 0
        for _ in range(6):
            assert (await route(client, [*PROMPT, 1])).json()["decode"]["name"] == "near"


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[CairnProcess]:
    path = tmp_path / "disk"
    path.mkdir()
    sizes = {"tiers.nvme.capacity": "64MiB", "tiers.nvme.slab": "4MiB"}
    found = CairnProcess(tmp_path / "n1", {}, {"node.name": "n1", "tiers.nvme.path": str(path), **sizes})
    yield found
    found.kill()


def demote(node: CairnProcess) -> None:
    """All to the disk, as soon as the node is done with looking at it."""
    with BlockingClient(node.address) as client:
        waiting.until(lambda: client.demote(client.find("space"), None, "nvme", evict=True).evicted == 10)


@in_a_loop
async def test_what_a_request_will_use_is_loaded_from_the_disk_ahead_of_it(tiered: CairnProcess) -> None:
    stored = Stored(tiered)
    demote(tiered)
    async with serving(f"--conductor.node_token={tiered.token}", "--conductor.ttft_slo=1h") as (service, client):
        await client.post("/v1/instances", json=stored.beside("n1", tiered))
        await until(client, "/v1/health", lambda told: told["blocks"] == 10)
        assert in_memory(service) == 0
        found = (await route(client, [*PROMPT, 1], id="r")).json()
        assert (found["cached_tokens"], found["pull"]) == (160, None)
        await until(client, "/v1/health", lambda _: service.hints.loaded)
        assert in_memory(service) == 10
        assert (service.hints.sent, service.hints.failed, service.hints.underway) == (1, 0, 0)
        assert len(service.hints.prefetching) == 1
        assert service.hints.prefetching.targets["node:n1"].memory_bytes > 0
        await client.post("/v1/requests/r", json={"state": "prefilled"})
        assert len(service.hints.prefetching) == 0


@in_a_loop
async def test_how_fast_a_load_came_is_what_the_next_is_reckoned_with(
    tiered: CairnProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.conductor.hints.MEASURED_S", 0.0)
    stored = Stored(tiered)
    demote(tiered)
    async with serving(f"--conductor.node_token={tiered.token}", "--conductor.ttft_slo=1h") as (service, client):
        await client.post("/v1/instances", json=stored.beside("n1", tiered))
        await until(client, "/v1/health", lambda told: told["blocks"] == 10)
        await route(client, [*PROMPT, 1], id="r")
        await until(client, "/v1/health", lambda _: service.hints.loaded)
        found = service.registrations["engine-n1"]
        assert found.nvme_rate == 0.8 * 5e9
        assert found.network_rate == 1e10


@in_a_loop
async def test_what_was_loaded_ahead_and_evicted_before_its_use_is_loaded_again(tiered: CairnProcess) -> None:
    stored = Stored(tiered)
    demote(tiered)
    async with serving(f"--conductor.node_token={tiered.token}", "--conductor.ttft_slo=1h") as (service, client):
        await client.post("/v1/instances", json=stored.beside("n1", tiered))
        await until(client, "/v1/health", lambda told: told["blocks"] == 10)
        await route(client, [*PROMPT, 1], id="r")
        await until(client, "/v1/health", lambda _: service.hints.loaded)
        await asyncio.to_thread(demote, tiered)
        await until(client, "/v1/health", lambda _: service.hints.evicted)
        await until(client, "/v1/health", lambda _: service.hints.loaded == 2)
        assert in_memory(service) == 10


@in_a_loop
async def test_a_load_for_a_request_that_is_cancelled_before_its_turn_is_never_asked_for(tiered: CairnProcess) -> None:
    stored = Stored(tiered)
    demote(tiered)
    options = (f"--conductor.node_token={tiered.token}", "--conductor.admission=none")
    async with serving(*options) as (service, client):
        await client.post("/v1/instances", json=stored.beside("n1", tiered))
        await until(client, "/v1/health", lambda told: told["blocks"] == 10)
        await route(client, [7] * 600_000)
        await route(client, [*PROMPT, 1], id="r")
        assert len(service.hints.prefetching) == 1
        await client.post("/v1/requests/r", json={"state": "cancelled"})
        assert (len(service.hints.prefetching), service.hints.sent) == (0, 0)


def in_memory(service: ConductorService) -> int:
    """Blocks of PROMPT that the view says are in the node's memory."""
    scheme = service.registrations["engine-n1"].scheme
    assert scheme is not None
    [prompt] = hashed(np.array(PROMPT, dtype=np.uint32), [scheme])
    return int(service.index.prefixes(prompt.chain.names)[service.nodes.views["n1"].holder, 1])


@in_a_loop
async def test_requests_go_where_an_engine_says_that_it_has_their_prefix() -> None:
    context = zmq.asyncio.Context()
    events, replays = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    places = [f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in (events, replays)]

    async def replay() -> None:
        """Nothing is kept."""
        while True:
            peer, *_ = await replays.recv_multipart()
            await replays.send_multipart((peer, b"", (2**64 - 1).to_bytes(8, "big"), b""))

    replaying = asyncio.create_task(replay())
    try:
        async with serving() as (_, client):
            await client.post("/v1/instances", json=instance("a", engine="vllm", events=",".join(places)))
            await client.post("/v1/instances", json=instance("b", engine="vllm"))
            await until(client, "/v1/health", lambda told: told["holders"] == {"engine:a": "exact"})
            stored = ["BlockStored", list(range(10)), None, PROMPT, 16, None]
            batch = msgspec.msgpack.encode([0.0, [stored], 0])
            await events.send_multipart((b"", (0).to_bytes(8, "big"), batch))
            await until(client, "/v1/health", lambda told: told["blocks"] == 10)
            found = (await route(client, [*PROMPT, 1])).json()
            assert (found["prefill"]["name"], found["cached_tokens"]) == ("a", 160)
            assert (await client.delete("/v1/instances/a")).status_code == 204
            assert (await client.get("/v1/health")).json()["blocks"] == 0
            answer = await client.post("/v1/instances", json=instance("c", events="nowhere"))
            assert (answer.status_code, answer.json()["errors"][0]["location"]) == (422, "events")
    finally:
        replaying.cancel()
        context.destroy(linger=0)


@in_a_loop
async def test_a_wrong_token_shows_at_the_node(node: CairnProcess) -> None:
    async with serving("--conductor.node_token=wrong", f"--conductor.nodes=n1={node.tcp_address}") as (_, client):
        told = await until(client, "/v1/instances", lambda told: told["nodes"][0]["failure"])
        assert told["nodes"][0]["standing"] == "degraded"


@in_a_loop
async def test_a_broken_invariant_ends_the_service() -> None:
    service = ConductorService(load(None, {}, []))

    def broken(*_: Any) -> None:
        raise AssertionError("planted")

    service.conductor.route = broken  # type: ignore[method-assign, assignment]
    transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://c") as client:
        answer = await route(client)
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    with pytest.raises(AssertionError, match="planted"):
        await service.failure


class Viewed:
    """A view of a node without the node."""

    def __init__(self, most_blocks: int = 100) -> None:
        self.index = PrefixIndex()
        self.view = NodeView("n", self.index.holder("node:n"), self.index, most_blocks)

    def take(self, *events: BlockEvent, is_reset: bool = False) -> None:
        self.view.take(Update(Standing.EXACT, is_reset, events))

    def lengths(self, *keys: BlockKey) -> list[int]:
        found: list[int] = self.index.prefixes(names_of(b"".join(keys)))[self.view.holder].tolist()
        return found


KEYS = [BlockKey(bytes([n]) * 16) for n in range(1, 9)]


def stored(key: BlockKey, tier: TierName = DRAM) -> BlockEvent:
    return BlockEvent(True, 1, tier, key)


def removed(key: BlockKey, tier: TierName = DRAM) -> BlockEvent:
    return BlockEvent(False, 1, tier, key)


def test_a_block_in_parts_is_there_when_its_first_part_is() -> None:
    viewed = Viewed()
    viewed.take(stored(part_key(KEYS[0], 1)), stored(part_key(KEYS[1], 0)))
    assert (viewed.lengths(KEYS[0]), viewed.lengths(KEYS[1])) == ([0, 0, 0], [0, 1, 1])
    viewed.take(removed(part_key(KEYS[1], 1)))
    assert viewed.lengths(KEYS[1]) == [0, 1, 1]


def test_of_what_a_batch_says_of_a_block_the_last_counts() -> None:
    viewed = Viewed()
    viewed.take(stored(KEYS[0]), stored(KEYS[0], NVME), removed(KEYS[0]), removed(KEYS[1]), stored(KEYS[1]))
    assert viewed.lengths(*KEYS[:2]) == [0, 0, 2]
    assert viewed.index.check() == []


def test_a_block_in_the_bucket_is_no_reason_to_go_to_a_node() -> None:
    viewed = Viewed()
    viewed.take(stored(KEYS[0], OBJECT))
    assert viewed.index.blocks == 0


def test_a_view_that_leaves_blocks_out_is_not_exact_until_it_begins_anew() -> None:
    viewed = Viewed(most_blocks=3)
    viewed.take(*map(stored, KEYS[:3]))
    assert viewed.view.standing is Standing.EXACT
    viewed.take(*map(stored, KEYS[3:]))
    assert (viewed.view.standing, viewed.view.left_out, viewed.index.blocks) == (Standing.DEGRADED, 5, 3)
    viewed.take(stored(KEYS[0]), is_reset=True)
    assert (viewed.view.standing, viewed.index.blocks) == (Standing.EXACT, 1)


def test_the_command_says_where_it_serves_and_ends_on_sigterm() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli", "conductor", "--json", "--conductor.listen=127.0.0.1:0"],
        cwd=REPO,
        env=clean_environ(CAIRN_NODE__NAME="other"),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert httpx.get(told["addresses"]["http"] + "/v1/health").json()["status"] == "no_instances"
        os.kill(told["pid"], signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
