"""The whole serving path as processes on loopback: a Conductor, workers at store nodes, a gateway, and who asks it."""

import asyncio
import atexit
import contextlib
import json
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai

from tests.system.cairn_process import REPO, clean_environ
from tests.system.nodes import free_port, until

PATIENCE_S = 90.0  # for a process that loads torch, on a machine that is busy with other things
HEARTBEAT_S = 0.5
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
CONDUCTOR = {"heartbeat": f"{HEARTBEAT_S}s", "admission": "none"}
GATEWAY = {"refresh": "0.2s", "connect_timeout": "1s", "drain_seconds": "1s"}
WORKER = {
    "model": "tiny",
    "listen": "127.0.0.1:0",
    "threads": "1",
    "block_tokens": "16",
    "chunk_tokens": "64",
    "drain_seconds": "20s",
}


class Service:
    """One `cairn conductor`, `gateway` or `worker`; `begin` it, and it is there when `wait` returns.

    settings: by name, without the section, which is called as the service is.
    """

    def __init__(self, folder: Path, kind: str, name: str, settings: Mapping[str, str]) -> None:
        self.name = name
        self.settings = dict(settings)
        self.url = ""
        self._kind = kind
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> "Service":
        options = [f"--{self._kind}.{name}={value}" for name, value in self.settings.items()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "server.cli", self._kind, "--json", *options],
                cwd=REPO,
                env=clean_environ(**THREADS),
                stdout=subprocess.PIPE,
                stderr=log,
            )
        atexit.register(self.kill)
        return self

    def wait(self) -> "Service":
        """Until it says that it serves."""
        output = self.process.stdout
        assert output is not None
        readable, _, _ = select.select([output], [], [], PATIENCE_S)
        line = output.readline() if readable else b""
        if not line:
            self.kill()
            raise AssertionError(f"{self.name} did not start:\n{self.log[-4000:]}")
        ready = json.loads(line)
        self.url = ready["addresses"]["http"] if "addresses" in ready else f"http://{ready['address']}"
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        """With SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._ended()

    def stop(self) -> int:
        """As an operator would; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._ended()

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=10).raise_for_status().json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=10)

    def metric(self, name: str, *labels: str) -> float:
        """The sum of the samples of this name whose labels have all of these, each like `role="decode"`."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        found = (line for line in lines if line.startswith((f"{name} ", f"{name}{{")))
        return sum(float(line.split()[-1]) for line in found if all(label in line for label in labels))

    def _ended(self) -> int:
        code = self.process.wait(PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


@dataclass(frozen=True, slots=True)
class Layout:
    """Who there is. nodes: address by name; workers: (role, node) by name. The settings are on top of the tests'."""

    nodes: Mapping[str, str]
    workers: Mapping[str, tuple[str, str]]
    conductor: Mapping[str, str] = field(default_factory=dict)
    gateway: Mapping[str, str] = field(default_factory=dict)
    worker: Mapping[str, str] = field(default_factory=dict)


class Fleet:
    """`start`, and `gateway.url` answers; `close` kills all. The nodes are somebody else's."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.layout = layout
        listen = f"127.0.0.1:{free_port()}"
        self._conductor_url = f"http://{listen}"
        nodes = ",".join(f"{name}={address}" for name, address in layout.nodes.items())
        given = {**CONDUCTOR, "listen": listen, "nodes": nodes, **layout.conductor}
        self.conductor = Service(folder, "conductor", "conductor", given)
        given = {**GATEWAY, "listen": f"127.0.0.1:{free_port()}", "conductor": self._conductor_url, **layout.gateway}
        self.gateway = Service(folder, "gateway", "gateway", given)
        self.workers: dict[str, Service] = {}

    def start(self, *others: Service) -> "Fleet":
        """All at once, and `others` with them: most of the time goes into loading torch."""
        services = [self.conductor, self.gateway, *others]
        services += [self.worker(name, role, node) for name, (role, node) in self.layout.workers.items()]
        for service in services:
            service.begin()
        for service in services:
            service.wait()
        self.until_known(*self.workers)
        return self

    def worker(self, name: str, role: str, node: str) -> Service:
        """Another one, which is not started."""
        given = {"name": name, "role": role, "node": self.layout.nodes[node], "conductor": self._conductor_url}
        self.workers[name] = Service(self._folder, "worker", name, {**WORKER, **given, **self.layout.worker})
        return self.workers[name]

    def lone(self, name: str = "lone") -> Service:
        """A worker that knows nobody: what it answers is what all should."""
        return Service(self._folder, "worker", name, {**WORKER, **self.layout.worker, "name": name})

    def instances(self) -> dict[str, dict[str, Any]]:
        """As the Conductor sees them."""
        return {row["name"]: row for row in self.conductor.get("/v1/instances")["instances"]}

    def until_known(self, *names: str) -> None:
        """To the Conductor, with whatever their nodes hold, and to the gateway."""
        until(lambda: set(names) <= set(self.instances()), f"{names} at the Conductor", PATIENCE_S)
        until(self.is_exact, "the Conductor to know what the nodes hold", PATIENCE_S)
        count = len(self.instances())
        until(lambda: self._seen_by_gateway() == (count, "up"), f"the gateway to see {count}", PATIENCE_S)

    def is_exact(self) -> bool:
        """Whether the Conductor's index says what the nodes hold."""
        holders = self.conductor.get("/v1/health")["holders"]
        return len(holders) >= len(self.layout.nodes) and set(holders.values()) == {"exact"}

    def close(self) -> None:
        services = [self.gateway, *self.workers.values(), self.conductor]
        with ThreadPoolExecutor(len(services)) as pool:
            list(pool.map(Service.kill, services))

    def _seen_by_gateway(self) -> tuple[int, str]:
        told = httpx.get(f"{self.gateway.url}/health", timeout=10).json()
        return told["instances"], told["conductor"]


class Asked(NamedTuple):
    """One request of a client. `document` is the number of the one that its prompt begins with."""

    document: int
    prompt: str
    is_stream: bool


class Answered(NamedTuple):
    """What came of it. cached_tokens: of usage; ttft_s: to the first piece, or the whole where it is not a stream."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float


def requests_over(documents: Sequence[str], count: int, seed: int = 0) -> list[Asked]:
    """Requests that share documents, each with a question of its own, every second one streamed."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        document = chance.randrange(len(documents))
        question = f"\nQuestion {number}: what does line {chance.randrange(10, 99)} say? Answer:"
        found.append(Asked(document, documents[document] + question, bool(number % 2)))
    return found


def texts(count: int, words: int, seed: int = 0) -> list[str]:
    """Documents of so many words, each unlike the others from its first word on."""
    chance = random.Random(seed)
    syllables = [first + then for first in "bdfgklmnprst" for then in "aeiou"]
    documents = []
    for number in range(count):
        made = ("".join(chance.choices(syllables, k=chance.randint(1, 3))) for _ in range(words))
        documents.append(f"Document {chance.randrange(10**6)}-{number}. " + " ".join(made) + ".")
    return documents


def asking(url: str, timeout_s: float = 120.0) -> openai.AsyncOpenAI:
    """A client that never tries again by itself."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s)


async def ask(client: openai.AsyncOpenAI, asked: Asked, model: str, most: int, **headers: str) -> Answered:
    """Greedy, to the end of `most` tokens or the model's own. Raises openai's errors."""
    began = time.perf_counter()
    given: dict[str, Any] = {
        "model": model,
        "prompt": asked.prompt,
        "max_tokens": most,
        "temperature": 0,
        "extra_body": {"return_token_ids": True},
        "extra_headers": headers,
    }
    if not asked.is_stream:
        whole = await client.completions.create(**given)
        choice = whole.choices[0]
        took_s = time.perf_counter() - began
        return _answered(choice.text, getattr(choice, "token_ids", None) or (), whole.usage, (took_s, took_s))
    parts: list[str] = []
    ids: list[int] = []
    usage, first_s = None, 0.0
    stream = await client.completions.create(**given, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        first_s = first_s or time.perf_counter() - began
        usage = chunk.usage or usage
        for choice in chunk.choices:
            parts.append(choice.text)
            ids += getattr(choice, "token_ids", None) or ()
    return _answered("".join(parts), ids, usage, (first_s, time.perf_counter() - began))


async def ask_all(url: str, wanted: Sequence[Asked], model: str, most: int, spread_s: float = 0.0) -> list[Answered]:
    """All of them at a time, or begun over `spread_s`; an error is the test's."""
    async with asking(url) as client:

        async def one(number: int, asked: Asked) -> Answered:
            await asyncio.sleep(spread_s * number / len(wanted))
            return await ask(client, asked, model, most)

        return list(await asyncio.gather(*(one(number, asked) for number, asked in enumerate(wanted))))


def _answered(text: str, ids: Sequence[int], usage: Any, spans_s: tuple[float, float]) -> Answered:
    assert usage is not None, "the answer has no usage"
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details is not None else 0
    return Answered(text, tuple(ids), usage.prompt_tokens, cached, *spans_s)


def free_ports(count: int) -> int:
    """The first of so many in a row."""
    while True:
        first = free_port() // 2
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
