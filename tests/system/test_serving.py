"""The whole serving path with real processes: two nodes, a Conductor, prefill and decode workers, a gateway.

What clients get is compared with what one worker gives that knows no store and no other worker.
"""

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("torch")

from tests.system.cairn_process import REPO, clean_environ
from tests.system.cluster import Cluster, etcd_or_skip
from tests.system.nodes import until
from tests.system.serving import (
    CONDUCTOR,
    THREADS,
    Answered,
    Asked,
    Fleet,
    Layout,
    Service,
    ask,
    ask_all,
    asking,
    free_ports,
    requests_over,
    texts,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)]

MODEL, MOST = "tiny", 24
LONG = 400  # tokens of an answer that is still running when something happens
WORKERS = {"p1": ("prefill", "n1"), "p2": ("prefill", "n2"), "d1": ("decode", "n1"), "d2": ("decode", "n2")}
AFTER_FAILURES = ("cairn_gateway_retries_total", "cairn_gateway_continued_total")
BACK_S = 20.0  # for what takes a second or two, on a machine that is busy with other things


class Site:
    """Everything that runs, and what a lone worker says to any prompt."""

    def __init__(self, cluster: Cluster, fleet: Fleet, lone: Service) -> None:
        self.cluster = cluster
        self.fleet = fleet
        self.lone = lone
        self._expected: dict[tuple[str, int], tuple[int, ...]] = {}

    @property
    def url(self) -> str:
        return self.fleet.gateway.url

    def heal(self) -> None:
        """The nodes and the Conductor are there, all know each other, and nothing is under way."""
        dead = [node for node in self.cluster.nodes if node not in self.cluster.alive]
        if dead:
            self.cluster.start_nodes(dead)
            self.cluster.until_whole()
        if not self.fleet.conductor.is_alive:
            self.fleet.conductor.begin().wait()
        self.fleet.until_known(*self.fleet.workers)
        self.until_idle()

    def until_idle(self) -> None:
        """No process has anything of a request left."""
        fleet = self.fleet
        until(lambda: fleet.conductor.get("/v1/health")["requests"] == 0, "the Conductor to forget all", BACK_S)
        until(lambda: fleet.gateway.metric("cairn_gateway_in_flight") == 0, "the gateway to be idle", BACK_S)
        for worker in fleet.workers.values():
            until(partial(_is_idle, worker), f"{worker.name} to be idle", BACK_S)

    def assert_equal(self, wanted: Sequence[Asked], answers: Sequence[Answered], most: int = MOST) -> None:
        """To what the lone worker says."""
        new = [asked for asked in wanted if (asked.prompt, most) not in self._expected]
        for asked, answer in zip(new, asyncio.run(ask_all(self.lone.url, new, MODEL, most)), strict=True):
            self._expected[asked.prompt, most] = answer.token_ids
        for asked, answer in zip(wanted, answers, strict=True):
            assert answer.token_ids == self._expected[asked.prompt, most], f"another answer to {asked}"
            assert len(answer.token_ids) == most


def _is_idle(worker: Service) -> bool:
    return not worker.metric("cairn_worker_queue") + worker.metric("cairn_worker_batch")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    etcd_or_skip()
    folder = tmp_path_factory.mktemp("serving")
    cluster = Cluster(folder / "cluster", settings={"tiers.dram.capacity": "64MiB"})
    try:
        cluster.start(("n1", "n2"))
        fleet = Fleet(folder / "fleet", Layout({name: node.unix for name, node in cluster.nodes.items()}, WORKERS))
        lone = fleet.lone()
        try:
            yield Site(cluster, fleet.start(lone), lone)
            assert fleet.gateway.stop() == 0, fleet.gateway.log[-4000:]
            for worker in fleet.workers.values():
                assert worker.stop() == 0, worker.log[-4000:]
            assert fleet.conductor.stop() == 0, fleet.conductor.log[-4000:]
            for service in (fleet.gateway, fleet.conductor, *fleet.workers.values()):
                assert "Traceback" not in service.log, service.log[-4000:]
            cluster.assert_sound()
        finally:
            lone.kill()
            fleet.close()
    finally:
        cluster.close()


@pytest.fixture
def site(whole: Site) -> Site:
    whole.heal()
    return whole


def during(
    site: Site, wanted: Sequence[Asked], happening: Callable[[], Any], spread_s: float = 3.0, most: int = MOST
) -> list[Answered]:
    """The answers to all, begun over `spread_s`, while something happens after a third of it."""

    async def run() -> list[Answered]:
        async def happen() -> None:
            await asyncio.sleep(spread_s / 3)
            await asyncio.to_thread(happening)

        load = ask_all(site.url, wanted, MODEL, most, spread_s)
        answers, _ = await asyncio.gather(load, happen())
        return answers

    return asyncio.run(run())


def test_fifty_requests_at_once_are_answered_as_by_one_worker(site: Site) -> None:
    wanted = requests_over(texts(6, 90, seed=1), 50)
    answers = asyncio.run(ask_all(site.url, wanted, MODEL, MOST))
    site.assert_equal(wanted, answers)
    again = asyncio.run(ask_all(site.url, wanted[:12], MODEL, MOST))
    site.assert_equal(wanted[:12], again)
    for answer in again:
        assert answer.prompt_tokens - 64 <= answer.cached_tokens < answer.prompt_tokens, "all whole chunks"
    followers = [answer for number, answer in enumerate(answers) if number >= 25]
    assert sum(answer.cached_tokens for answer in followers) > 0, "later requests share the earlier ones' documents"
    decoded = [site.fleet.workers[name].metric("cairn_worker_generated_tokens_total") for name in ("d1", "d2")]
    assert all(decoded), "both decode"


def test_chats_are_answered_as_by_one_worker(site: Site) -> None:
    messages = [{"role": "system", "content": texts(1, 60, seed=2)[0]}, {"role": "user", "content": "And then?"}]

    async def chats(url: str) -> list[str | None]:
        async with asking(url) as client:
            given: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": MOST, "temperature": 0}
            whole = await client.chat.completions.create(**given)
            stream = await client.chat.completions.create(**given, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            return [whole.choices[0].message.content, "".join(parts)]

    expected = asyncio.run(chats(site.lone.url))
    assert asyncio.run(chats(site.url)) == expected
    assert expected[0] == expected[1]


def test_a_node_that_is_killed_costs_no_answer(site: Site) -> None:
    wanted = requests_over(texts(6, 90, seed=5), 40, seed=5)
    answers = during(site, wanted, site.cluster.nodes["n2"].kill)
    site.assert_equal(wanted, answers)
    more = requests_over(texts(4, 90, seed=6), 12, seed=6)
    site.assert_equal(more, asyncio.run(ask_all(site.url, more, MODEL, MOST)))


def test_without_the_conductor_the_gateway_goes_on_and_finds_it_again(site: Site) -> None:
    fleet = site.fleet
    before = fleet.gateway.metric("cairn_gateway_fallbacks_total")
    blocks = fleet.conductor.get("/v1/health")["blocks"]
    wanted = requests_over(texts(6, 90, seed=7), 40, seed=7)
    site.assert_equal(wanted, during(site, wanted, fleet.conductor.kill))
    assert fleet.gateway.metric("cairn_gateway_fallbacks_total") > before
    assert httpx.get(f"{site.url}/health").json()["conductor"] == "lost"
    fleet.conductor.begin().wait()
    serves_s = time.monotonic()
    until(fleet.is_exact, "the index to be exact", BACK_S)
    exact_s = time.monotonic()
    fleet.until_known(*fleet.workers)
    print(f"index exact {exact_s - serves_s:.2f} s, fleet known {time.monotonic() - serves_s:.2f} s after it serves")
    assert exact_s - serves_s < 5, "a restart is warm from snapshots"
    assert fleet.conductor.get("/v1/health")["blocks"] >= blocks
    served = fleet.conductor.metric("cairn_conductor_routes_total")
    again = asyncio.run(ask_all(site.url, wanted[:8], MODEL, MOST))
    site.assert_equal(wanted[:8], again)
    assert fleet.conductor.metric("cairn_conductor_routes_total") - served >= 8
    assert fleet.conductor.metric("cairn_conductor_cached_tokens_total") > 0, "it knows what the nodes have"


def test_a_conductor_that_restarts_amid_the_load_costs_no_answer(site: Site) -> None:
    wanted = requests_over(texts(6, 90, seed=13), 60, seed=13)

    def happening() -> None:
        site.fleet.conductor.kill()
        site.fleet.conductor.begin().wait()

    site.assert_equal(wanted, during(site, wanted, happening, spread_s=10.0))


def test_a_client_that_goes_away_leaves_nothing(site: Site) -> None:
    wanted = requests_over(texts(2, 90, seed=8), 6, seed=8)

    async def leave() -> None:
        async with asking(site.url) as client:
            for number, asked in enumerate(wanted):
                given: dict[str, Any] = {"model": MODEL, "prompt": asked.prompt, "max_tokens": LONG, "temperature": 0}
                if number % 2:
                    stream = await client.completions.create(**given, stream=True)
                    await anext(aiter(stream))
                    await stream.close()
                else:
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(client.completions.create(**given), 0.05 * number + 0.02)

    before = site.fleet.gateway.metric("cairn_gateway_requests_total", 'outcome="cancelled"')
    asyncio.run(leave())
    site.until_idle()
    left = site.fleet.gateway.metric("cairn_gateway_requests_total", 'outcome="cancelled"') - before
    assert left == len(wanted)
    site.cluster.empty()
    site.cluster.assert_sound()


def test_overload_is_refused_with_retry_after_and_the_rest_is_served(site: Site) -> None:
    wanted = [asked._replace(is_stream=False) for asked in requests_over(texts(24, 110, seed=9), 24, seed=9)]
    with other_conductor(site, admission="early", ttft_slo="50ms", tbt_slo="10s"):
        answers = asyncio.run(_answers_or_refusals(site.url, wanted))
        told = site.fleet.conductor.metric("cairn_conductor_refusals_total")
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert refused
    assert told == len(refused)
    for error in refused:
        assert int(error.response.headers["retry-after"]) >= 1
        assert error.code == "ttft"
    served = {asked: answer for asked, answer in zip(wanted, answers, strict=True) if isinstance(answer, Answered)}
    assert len(served) + len(refused) == len(wanted)
    assert served
    site.assert_equal(list(served), list(served.values()))


def test_a_deadline_is_kept(site: Site) -> None:
    (wanted,) = requests_over(texts(1, 300, seed=10), 1, seed=10)

    async def refused() -> Any:
        async with asking(site.url) as client:
            with pytest.raises(openai.APIStatusError) as raised:
                await ask(client, wanted, MODEL, MOST, **{"X-Deadline-Ms": "1"})
            return raised.value

    error = asyncio.run(refused())
    assert error.status_code in (429, 504), error
    site.until_idle()

    async def served() -> Answered:
        async with asking(site.url) as client:
            return await ask(client, wanted, MODEL, MOST, **{"X-Deadline-Ms": "60000"})

    site.assert_equal([wanted], [asyncio.run(served())])


def test_a_worker_takes_another_role_when_told_so(site: Site) -> None:
    fleet = site.fleet
    base = fleet.conductor.url
    try:
        assert httpx.post(f"{base}/v1/instances/p2/role", json={"role": "decode"}).status_code == 204
        assert fleet.instances()["p2"]["role"] == "decode"
        until(lambda: "the role is decode now" in fleet.workers["p2"].log, "the worker to be told", BACK_S)
        prefilled = fleet.workers["p1"].metric("cairn_worker_prompt_tokens_total")
        wanted = requests_over(texts(6, 90, seed=11), 18, seed=11)
        site.assert_equal(wanted, asyncio.run(ask_all(site.url, wanted, MODEL, MOST)))
        assert fleet.workers["p1"].metric("cairn_worker_prompt_tokens_total") > prefilled
        assert fleet.instances()["p2"]["role"] == "decode", "a heartbeat does not take it back"
    finally:
        httpx.post(f"{base}/v1/instances/p2/role", json={"role": "prefill"})


def test_killed_workers_are_replaced_and_no_request_is_lost(site: Site) -> None:
    wanted = requests_over(texts(6, 90, seed=3), 50, seed=3)
    fleet = site.fleet

    def happening() -> None:
        fleet.workers.pop("p1").kill()
        fleet.workers.pop("d2").kill()
        new = [fleet.worker("p3", "prefill", "n1").begin(), fleet.worker("d3", "decode", "n2").begin()]
        for worker in new:
            worker.wait()

    before = [fleet.gateway.metric(name) for name in AFTER_FAILURES]
    answers = during(site, wanted, happening)
    retried, continued = (fleet.gateway.metric(name) - was for name, was in zip(AFTER_FAILURES, before, strict=True))
    print(f"{retried:.0f} tries after a failure, {continued:.0f} streams went on elsewhere")
    assert retried, "the workers died amid their work"
    site.assert_equal(wanted, answers)
    until(lambda: not {"p1", "d2"} & set(fleet.instances()), "the dead to be missed", BACK_S)
    fleet.until_known("p3", "d3")
    more = requests_over(texts(4, 90, seed=4), 16, seed=4)
    site.assert_equal(more, asyncio.run(ask_all(site.url, more, MODEL, MOST)))
    served = [fleet.workers[name].metric("cairn_worker_prompt_tokens_total") for name in ("p3", "d3")]
    assert all(served), "the new ones take their part"


def test_a_worker_that_is_drained_gets_nothing_new(site: Site) -> None:
    fleet = site.fleet
    base = fleet.conductor.url
    assert httpx.post(f"{base}/v1/instances/d1/drain").status_code == 204
    until(lambda: fleet.instances()["d1"]["is_draining"], "the Conductor to drain it", BACK_S)
    given = fleet.workers["d1"].metric("cairn_worker_generated_tokens_total")
    wanted = requests_over(texts(4, 90, seed=12), 12, seed=12)
    site.assert_equal(wanted, asyncio.run(ask_all(site.url, wanted, MODEL, MOST)))
    assert fleet.workers["d1"].metric("cairn_worker_generated_tokens_total") == given
    assert fleet.instances()["d1"]["is_draining"], "a heartbeat does not take it back"
    assert fleet.workers.pop("d1").stop() == 0
    until(lambda: "d1" not in fleet.instances(), "it to leave", BACK_S)


@contextmanager
def other_conductor(site: Site, **settings: str) -> Iterator[None]:
    """In between the Conductor has other settings; a restart each."""
    fleet = site.fleet

    def restart(given: dict[str, str]) -> None:
        assert fleet.conductor.stop() == 0
        kept = {name: value for name, value in fleet.conductor.settings.items() if name not in settings}
        fleet.conductor.settings = {**kept, **given}
        fleet.conductor.begin().wait()
        fleet.until_known(*fleet.workers)

    restart(settings)
    try:
        yield
    finally:
        restart({name: CONDUCTOR[name] for name in settings if name in CONDUCTOR})


async def _answers_or_refusals(url: str, wanted: Sequence[Asked]) -> list[Answered | BaseException]:
    async with asking(url) as client:
        asks: list[Coroutine[Any, Any, Answered]] = [ask(client, asked, MODEL, MOST) for asked in wanted]
        return list(await asyncio.gather(*asks, return_exceptions=True))


def test_a_script_starts_all_on_one_host_and_another_stops_it(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl on the PATH")
    cairn = tmp_path / "cairn"
    cairn.write_text(f'#!/bin/sh\nPYTHONPATH={REPO} exec {sys.executable} -m server.cli "$@"\n')
    cairn.chmod(0o700)
    first = free_ports(5)
    environ = clean_environ(CAIRN=str(cairn), FIRST_PORT=str(first), **THREADS)
    scripts, folder = REPO / "deploy" / "serving", tmp_path / "all"

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=150, check=False)

    try:
        started = run(scripts / "start.sh", folder, MODEL)
        assert started.returncode == 0, started.stderr
        (line,) = (line for line in started.stdout.splitlines() if "/v1/completions" in line)
        asked = run("sh", "-c", f"{line} --silent --fail")
        assert asked.returncode == 0, asked.stderr
        assert '"text"' in asked.stdout
        again = run(scripts / "start.sh", folder, MODEL)
        assert again.returncode == 1
        assert "runs already" in again.stderr
    finally:
        stopped = run(scripts / "stop.sh", folder)
    assert stopped.returncode == 0, stopped.stderr
    assert not list(folder.glob("*.pid"))
    for log in folder.glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()[-4000:]
