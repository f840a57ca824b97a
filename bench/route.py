"""How long the Conductor takes to decide, in this process and over HTTP, and how soon it knows a node's blocks."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from numpy.typing import NDArray

from bench.measure import Figure, without_collector
from bench.node import RunningNode, running_node
from engine_client.blocking import BlockingClient
from kvstore.prefix import Namespace, chain
from kvstore.types import BlockKey
from scheduler.requests import names_of
from server.conductor.models import InstanceBody, decoded, route_body, route_octets
from server.conductor.service import ConductorService
from server.conductor.settings import load

COMMAND: Final = [sys.executable, "-m", "server.cli", "conductor"]
INSTANCES: Final = 64
BLOCKS: Final = 100_000
BLOCK_TOKENS: Final = 16  # the smallest that engines use: the most to hash
LONG, SHORT = 131_072, 8_192  # tokens
PROMPTS: Final = 64
CONNECTIONS: Final = 4
OPTIONS: Final = ["--conductor.admission=none", "--conductor.listen=127.0.0.1:0", "--conductor.heartbeat=1h"]
SPACE: Final = Namespace(model="m", dtype="bf16", layout="bench", block_tokens=BLOCK_TOKENS, layers=1, block_bytes=64)
RANDOM: Final = np.random.default_rng(7)

Prompt = NDArray[np.uint32]
FIGURES: Final = (
    *("route_128k", "route_128k_json", "route_128k_http", "route_128k_http_json"),
    *("routes_8k", "routes_8k_json", "routes_8k_http", "routes_8k_http_json", "warm_start"),
)


def run(names: set[str]) -> Iterator[Figure]:
    """Figures by name; all for none. Needs 300 MB and a minute."""
    wanted = names or set(FIGURES)
    shared = RANDOM.integers(0, 150_000, LONG, dtype=np.uint32)
    if wanted & set(FIGURES[:2] + FIGURES[4:6]):
        yield from (figure for figure in asyncio.run(_in_process(shared)) if figure.name in wanted)
    if wanted & set(FIGURES[2:4] + FIGURES[6:]):
        with tempfile.TemporaryDirectory() as folder, running_node(Path(folder), "256MiB") as node:
            root = _fill(node, shared)
            with _conductor(node) as (url, pid):
                yield from (figure for figure in _over_http(url, pid, shared, root) if figure.name in wanted)


async def _in_process(shared: Prompt) -> list[Figure]:
    service = ConductorService(load(None, {}, OPTIONS))
    root = bytes(range(16))
    for body in _instances(root):
        service.register(decoded(json.dumps(body).encode(), InstanceBody))
    keys = b"".join(chain(shared, BLOCK_TOKENS, BlockKey(root)))
    for number in range(INSTANCES):
        holder = service.conductor.holder(f"node:n{number}")
        known = names_of(keys)[: len(keys) // 16 * (number + 1) // INSTANCES]
        service.index.stored(holder, 1, known)
        service.index.stored(holder, 1, RANDOM.integers(1, 2**63, BLOCKS // INSTANCES, dtype=np.uint64))
    found = []
    for name, tokens, as_json in (
        *(("route_128k", LONG, False), ("route_128k_json", LONG, True)),
        *(("routes_8k", SHORT, False), ("routes_8k_json", SHORT, True)),
    ):
        bodies = _bodies(shared, tokens, as_json=as_json)
        spans, cpu = _decide(service, bodies, 500 if tokens == LONG else 2000, as_json=as_json)
        p50, p99 = cpu[len(cpu) // 2], cpu[len(cpu) * 99 // 100]
        note = f"decoding, hashing and deciding in this process; of the processor {p50:,.0f} us, p99 {p99:,.0f} us"
        found.append(_figure(name, spans, note))
    await service.close()
    return found


def _decide(
    service: ConductorService, bodies: Sequence[bytes], runs: int, *, as_json: bool
) -> tuple[list[float], list[float]]:
    """Microseconds of each decision, sorted: by the wall, with others having their turns, and of this thread alone."""
    wall, cpu = [], []
    with without_collector():
        for turn in range(runs):
            body = bodies[turn % len(bodies)]
            began, began_cpu = time.perf_counter_ns(), time.thread_time_ns()
            query, prompt = route_body(body) if as_json else route_octets(body, [("model", "m"), ("id", "r")])
            service.route(query, prompt)
            wall.append((time.perf_counter_ns() - began) / 1000)
            cpu.append((time.thread_time_ns() - began_cpu) / 1000)
    return sorted(wall), sorted(cpu)


def _over_http(url: str, pid: int, shared: Prompt, root: bytes) -> Iterator[Figure]:
    began = time.perf_counter()
    with httpx.Client(base_url=url, timeout=30) as client:
        for body in _instances(root):
            client.post("/v1/instances", json=body).raise_for_status()
        while client.get("/v1/health").json()["holders"].get("node:n0") != "exact":
            pass
        known = client.get("/v1/health").json()["blocks"]
        note = f"from the start until all {known:,} blocks of a real node are known"
        yield Figure("warm_start", time.perf_counter() - began, "s", None, None, None, 5.0, is_ratio=False, note=note)
    for name, tokens, as_json in (
        *(("route_128k_http", LONG, False), ("route_128k_http_json", LONG, True)),
        *(("routes_8k_http", SHORT, False), ("routes_8k_http_json", SHORT, True)),
    ):
        requests = [_http(body, as_json=as_json) for body in _bodies(shared, tokens, as_json=as_json)]
        is_long = tokens == LONG
        began_s = _processor_s(pid)
        spans, wall_s = asyncio.run(_ask(url, requests, 300 if is_long else 4000, 1 if is_long else CONNECTIONS))
        cpu_us = 1e6 * (_processor_s(pid) - began_s) / len(spans)
        note = f"over HTTP on loopback, the service on one core; of that {cpu_us:,.0f} us each"
        yield _figure(name, spans, note, rate=None if is_long else len(spans) / wall_s)


def _figure(name: str, spans_us: Sequence[float], note: str, rate: float | None = None) -> Figure:
    """Long prompts: the 99th percentile in microseconds. Short ones: routes a second, beside 1,000."""
    ordered = sorted(spans_us)
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    if "128k" in name:
        most_us = {"route_128k": 2000.0, "route_128k_json": 10_000.0, "route_128k_http": 5000.0}.get(name, 20_000.0)
        told = f"the value is the 99th percentile, the median {p50:,.0f} us: {note}"
        return Figure(name, p99, "us", None, None, p99, most_us, is_ratio=False, note=told)
    per_s = rate or 1e6 * len(ordered) / sum(ordered)
    return Figure(name, per_s, "routes/s", 1000.0, per_s / 1000, p99, 1.0, is_ratio=True, note=note)


def _instances(root: bytes) -> Iterator[dict[str, Any]]:
    for number in range(INSTANCES):
        yield {
            "name": f"e{number}",
            "role": "prefill" if number % 2 else "decode",
            "model": "m",
            "engine": "vllm",
            "address": f"http://e{number}:8000",
            "node": f"n{number}",
            "block_tokens": BLOCK_TOKENS,
            "root": root.hex(),
            "kv_bytes": 1000,
        }


def _bodies(shared: Prompt, tokens: int, *, as_json: bool) -> list[bytes]:
    """Prompts that begin as the shared one does, for more or less of their length."""
    found = []
    for number in range(PROMPTS):
        same = tokens * number // PROMPTS
        prompt = np.concatenate([shared[:same], RANDOM.integers(0, 150_000, tokens - same, dtype=np.uint32)])
        if as_json:
            found.append(json.dumps({"model": "m", "id": f"r{number}", "tokens": prompt.tolist()}).encode())
        else:
            found.append(prompt.astype("<u4").tobytes())
    return found


def _http(body: bytes, *, as_json: bool) -> bytes:
    media_type = "application/json" if as_json else "application/octet-stream"
    target = "/v1/route" if as_json else "/v1/route?model=m&id=r"
    head = f"POST {target} HTTP/1.1\r\nhost: c\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _ask(url: str, requests: Sequence[bytes], count: int, connections: int) -> tuple[list[float], float]:
    """Microseconds of each answer, and seconds of all. Bare sockets: the client must not be what is measured."""
    host, port = url.removeprefix("http://").split(":")
    spans: list[float] = []
    turns = iter(range(count))

    async def ask() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for turn in turns:
            began = time.perf_counter_ns()
            writer.write(requests[turn % len(requests)])
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(size)
            spans.append((time.perf_counter_ns() - began) / 1000)
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(connections)))
    return spans, time.perf_counter() - began


def _processor_s(pid: int) -> float:
    """That a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _fill(node: RunningNode, shared: Prompt) -> bytes:
    """BLOCKS blocks, those of the shared prompt first; the namespace's root."""
    batch = 1024
    with BlockingClient(node.address) as client:
        space = client.open("bench", SPACE)
        others = RANDOM.integers(0, 150_000, BLOCKS * BLOCK_TOKENS - LONG, dtype=np.uint32)
        for prompt in (shared, others):
            keys, parent = space.keys(prompt), None
            for first in range(0, len(keys), batch):
                run = keys[first : first + batch]
                client.put(space, run, [bytes(64)] * len(run), parent)
                parent = run[-1]
        return bytes(space.root)


@contextmanager
def _conductor(node: RunningNode) -> Iterator[tuple[str, int]]:
    """A service process on one core; where it serves, and its number."""
    options = [*OPTIONS, f"--conductor.nodes=n0={node.tcp_address}", f"--conductor.node_token={node.token}", "--json"]
    process = subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        os.sched_setaffinity(told["pid"], {min(os.sched_getaffinity(0))})
        yield told["addresses"]["http"], told["pid"]
    finally:
        process.terminate()
        process.wait(20)
