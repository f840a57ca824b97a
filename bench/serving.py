"""Real requests through a gateway to real workers: what a policy of the Conductor does to their first tokens."""

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine_client.blocking import BlockingClient
from scheduler.policies import POLICIES as KNOWN
from tests.system.cluster import Cluster, ClusterNode
from tests.system.serving import Answered, Asked, Fleet, Layout, ask, asking, requests_over, texts

POLICIES = ("kvcache_centric", "round_robin", "random")
NODES = ("n1", "n2")
WORKERS = {"p1": ("prefill", "n1"), "p2": ("prefill", "n2"), "d1": ("decode", "n1"), "d2": ("decode", "n2")}
WARMING = 6  # requests that no figure counts: each worker has done something, and the Conductor knows how long it took
REFIT_S = 7.0  # in which a Conductor counts with what it was told


@dataclass(frozen=True, slots=True)
class Scene:
    """What is asked, and of whom. A document's length in words lies between the two."""

    model: str
    words: tuple[int, int]
    block_tokens: int
    chunk_tokens: int
    capacity: str
    requests: int = 50
    documents: int = 8
    answer_tokens: int = 8  # few: first tokens are what is looked at
    rounds: int = 2
    is_pooled: bool = True
    spread_s: float = 0.0  # over which the requests begin; 0: all at once


SMOLLM2 = Scene("smollm2", (510, 1000), 64, 256, "1536MiB")
TINY = Scene("tiny", (190, 380), 16, 64, "512MiB")


class Outcome(NamedTuple):
    """One policy's run over all requests. prefill_s: processor seconds of the prefill workers."""

    policy: str
    answers: list[Answered]
    took_s: float
    prefill_s: float


def run(scene: Scene, policies: Sequence[str] = POLICIES, seen: Callable[[], None] = lambda: None) -> Iterator[Outcome]:
    """Each policy once a round, with empty stores; the order turns round from round to round. `seen` at each answer.

    Fails an assertion when two policies give different answers to a request.
    """
    fewest, most = scene.words
    lengths = [fewest + (most - fewest) * number // (scene.documents - 1) for number in range(scene.documents)]
    documents = [texts(1, words, seed=number)[0] for number, words in enumerate(lengths)]
    wanted = [asked._replace(is_stream=True) for asked in requests_over(documents, scene.requests, seed=1)]
    warming = [
        asked._replace(is_stream=True)
        for asked in requests_over(texts(WARMING, fewest // 2, seed=99), WARMING, seed=99)
    ]
    expected: list[tuple[int, ...]] = []
    with _fleet(scene) as (fleet, stores):
        for number in range(scene.rounds):
            for policy in policies if number % 2 == 0 else reversed(policies):
                _restart(fleet, policy)
                asyncio.run(_warmed(fleet.gateway.url, warming, scene))
                for store in stores:
                    _empty(store)
                began, busy_s = time.perf_counter(), _busy_s(fleet)
                answers = asyncio.run(_asked(fleet.gateway.url, wanted, scene, seen))
                outcome = Outcome(policy, answers, time.perf_counter() - began, _busy_s(fleet) - busy_s)
                expected = expected or [answer.token_ids for answer in answers]
                assert [answer.token_ids for answer in answers] == expected, f"{policy} changes answers"
                yield outcome


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of all rounds of one policy: seconds, and shares of prompt tokens."""
    ttfts_s = sorted(answer.ttft_s for outcome in outcomes for answer in outcome.answers)
    answers = [answer for outcome in outcomes for answer in outcome.answers]
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return {
        "policy": outcomes[0].policy,
        "ttft_mean_s": statistics.fmean(ttfts_s),
        "ttft_p50_s": statistics.median(ttfts_s),
        "ttft_p90_s": ttfts_s[int(0.9 * (len(ttfts_s) - 1))],
        "tokens_per_s": sum(len(answer.token_ids) for answer in answers) / sum(outcome.took_s for outcome in outcomes),
        "hit_share": sum(answer.cached_tokens for answer in answers) / prompt_tokens,
        "computed_tokens": (prompt_tokens - sum(answer.cached_tokens for answer in answers)) / len(outcomes),
        "prefill_s": statistics.fmean(outcome.prefill_s for outcome in outcomes),
    }


def report(
    *,
    model: Annotated[Literal["smollm2", "tiny"], typer.Option(help="What the workers serve.")] = "smollm2",
    requests: Annotated[int, typer.Option(help="At a time.", min=2)] = 50,
    rounds: Annotated[int, typer.Option(help="Of all policies, the order turned round each time.", min=1)] = 2,
    policies: Annotated[str, typer.Option(help="With commas between; ratios are to the first.")] = ",".join(POLICIES),
    spread: Annotated[float, typer.Option(help="Seconds over which requests begin; 0: all at once.", min=0)] = 0.0,
    apart: Annotated[
        bool, typer.Option("--apart", help="Nodes that are no cluster, as where etcd is missing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line: each run, then each policy.")
    ] = False,
) -> None:
    """The same requests over shared documents by each policy: two prefill and two decode workers, one thread each.

    Answers must be equal. Prefill seconds are processor time of the prefill workers. Minutes with smollm2.

    \b
    Examples:
      python -m bench serving
      python -m bench serving --model tiny --rounds 1
      python -m bench serving --apart --policies kvcache_centric,round_robin --json
    """
    names = policies.split(",")
    if not set(names) <= set(KNOWN):
        raise typer.BadParameter(f"policies: some of {', '.join(sorted(KNOWN))}")
    scene = SMOLLM2 if model == "smollm2" else TINY
    pooled = not apart and shutil.which("etcd") is not None
    scene = replace(scene, requests=requests, rounds=rounds, is_pooled=pooled, spread_s=spread)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    scenery = {"model": model, "requests": requests, "pooled": pooled}
    outcomes: dict[str, list[Outcome]] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("starting", total=rounds * len(names) * requests)
        for outcome in run(scene, names, seen=lambda: progress.advance(bar)):
            outcomes.setdefault(outcome.policy, []).append(outcome)
            progress.update(bar, description=f"{outcome.policy}: {outcome.took_s:.1f} s")
            if as_json:
                _write({**scenery, "round": len(outcomes[outcome.policy]), **figures([outcome])})
    rows = [figures(found) for found in outcomes.values()]
    best = rows[0]
    for row in rows:
        row["ttft_ratio"] = row["ttft_mean_s"] / best["ttft_mean_s"]
        row["prefill_ratio"] = row["prefill_s"] / best["prefill_s"]
    if as_json:
        for row in rows:
            _write({**scenery, "rounds": rounds, **row})
        return
    where = "two nodes in a cluster" if pooled else "two nodes apart"
    Console().print(_table(rows, f"{requests} requests, {scene.documents} documents, {model}, {where}; answers equal"))


def _write(row: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def _table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    caption = "TTFT and prefill in seconds; ratios are to the first row"
    shown = Table(title=title, title_justify="left", caption=caption, box=box.SIMPLE, padding=(0, 1))
    for name in ("policy", "TTFT", "p50", "p90", "ratio", "tok/s", "hits", "computed", "prefill", "ratio"):
        shown.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        shown.add_row(
            row["policy"],
            *(f"{row[name]:.2f}" for name in ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_ratio")),
            f"{row['tokens_per_s']:.1f}",
            f"{row['hit_share']:.1%}",
            f"{row['computed_tokens']:,.0f}",
            *(f"{row[name]:.2f}" for name in ("prefill_s", "prefill_ratio")),
        )
    return shown


@contextmanager
def _fleet(scene: Scene) -> Iterator[tuple[Fleet, list[BlockingClient]]]:
    """What runs, and a client of each node."""
    settings = {"tiers.dram.capacity": scene.capacity, "tiers.dram.slab": "16MiB", "log.level": "warning"}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cairn-")))
        if scene.is_pooled:
            cluster = Cluster(folder / "cluster", settings=settings)
            stack.callback(cluster.close)
            cluster.start(NODES)
            addresses = {name: node.unix for name, node in cluster.nodes.items()}
        else:
            addresses = {}
            for name in NODES:
                node = ClusterNode(folder / name, {**settings, "node.tcp_listen": ""})
                stack.callback(node.kill)
                node.start()
                addresses[name] = node.unix
        worker = {
            "model": scene.model,
            "block_tokens": str(scene.block_tokens),
            "chunk_tokens": str(scene.chunk_tokens),
            "load_seconds": "10s",
        }
        fleet = Fleet(folder / "fleet", Layout(addresses, WORKERS, worker=worker))
        stack.callback(fleet.close)
        fleet.start()
        yield fleet, [stack.enter_context(BlockingClient(address, name="bench")) for address in addresses.values()]


def _restart(fleet: Fleet, policy: str) -> None:
    """The Conductor, so that it knows nothing of what another policy did."""
    fleet.conductor.stop()
    fleet.conductor.settings["policy"] = policy
    fleet.conductor.begin().wait()
    fleet.until_known(*fleet.workers)


def _empty(store: BlockingClient) -> None:
    for row in store.stat()["namespaces"]:
        store.evict(store.find(row["names"][0]))


def _busy_s(fleet: Fleet) -> float:
    """Processor seconds of the prefill workers so far."""
    ticks = 0
    for name, (role, _) in WORKERS.items():
        if role == "prefill":
            fields = Path(f"/proc/{fleet.workers[name].process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # of user and system, the 14th and 15th of all
    return ticks / os.sysconf("SC_CLK_TCK")


async def _warmed(url: str, wanted: Sequence[Asked], scene: Scene) -> None:
    await _asked(url, wanted, scene, lambda: None)
    await asyncio.sleep(REFIT_S)


async def _asked(url: str, wanted: Sequence[Asked], scene: Scene, seen: Callable[[], None]) -> list[Answered]:
    async with asking(url, timeout_s=1800) as client:

        async def one(number: int, asked: Asked) -> Answered:
            await asyncio.sleep(scene.spread_s * number / len(wanted))
            answer = await ask(client, asked, scene.model, scene.answer_tokens)
            seen()
            return answer

        return list(await asyncio.gather(*(one(number, asked) for number, asked in enumerate(wanted))))
