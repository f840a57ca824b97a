"""`cairn simulate`: a recorded trace on a simulated cluster, under the Conductor and under coupled engines."""

import gzip
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.table import Table

from kvstore.errors import InvalidRequest
from scheduler.admission import ADMISSIONS
from scheduler.policies import POLICIES
from scheduler.simulate import simulate as replay
from scheduler.simulation.cluster import Shape
from scheduler.simulation.coupled import BASELINES, SPREADS, replay_coupled
from scheduler.simulation.hardware import LLAMA3_70B_8XA800
from scheduler.simulation.outcomes import Outcomes
from scheduler.simulation.traces import TraceRequest, cut, faster, read_trace
from scheduler.tuning import Slo
from server.commands import inputs, output, plotting
from server.commands.reach import invocation

MOST_INSTANCES = 1024
PERCENTILES = (50, 90, 99)
NONE = "none"  # as --policy: only the coupled engines


@dataclass(frozen=True, slots=True)
class Run:
    """One replay by its name in the table."""

    name: str
    replay: Callable[[Sequence[TraceRequest]], Outcomes]


def simulate(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace in JSON lines, or gzip of that (.gz).")],
    *,
    policy: Annotated[
        str, typer.Option("--policy", "-p", metavar="NAME,...", help=f"Of {', '.join(POLICIES)}; or {NONE}.")
    ] = "least_loaded,kvcache_centric",
    admission: Annotated[
        str, typer.Option("--admission", "-a", metavar="NAME,...", help=f"Of {', '.join(ADMISSIONS)}.")
    ] = "none",
    coupled: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"Compare with engines that do both: {', '.join(BASELINES)}.")
    ] = "",
    spread: Annotated[
        str, typer.Option(metavar="NAME", help=f"Requests over coupled engines: {', '.join(SPREADS)}.")
    ] = "least_loaded",
    prefill: Annotated[int, typer.Option(min=1, max=MOST_INSTANCES, help="Prefill instances.")] = 8,
    decode: Annotated[int, typer.Option(min=1, max=MOST_INSTANCES, help="Decode instances.")] = 8,
    pipeline_nodes: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Nodes that a prefill instance shares a prompt over.")
    ] = 1,
    speed: Annotated[float, typer.Option(min=0.001, max=1000.0, help="How many times as fast as recorded.")] = 1.0,
    first: Annotated[int, typer.Option(min=0, metavar="N", help="Only the first N requests; 0: all.")] = 0,
    ttft_slo: Annotated[str, typer.Option(metavar="TIME", help="To the first token, at most.")] = "30s",
    tbt_slo: Annotated[str, typer.Option(metavar="TIME", help="Between tokens, at most.")] = "100ms",
    seed: Annotated[int, typer.Option(help="Of whatever is left to chance.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw PNG files there; needs the extra `plots`.")
    ] = None,
) -> None:
    """Replay a trace on a simulated cluster of LLaMA3-70B.

    Each instance is a node of 8 A800 with 4 links of 200 Gbps. The Conductor
    decides as in service, once for each policy and admission. Coupled engines
    prefill and decode in one place, on as many nodes.

    \b
    Examples:
      cairn simulate conversation_trace.jsonl
      cairn simulate trace.jsonl.gz --policy kvcache_centric --admission none,early,predictive --speed 2
      cairn simulate trace.jsonl --coupled vllm,vllm-chunked --plot plots
    """
    slo = Slo(inputs.duration(ttft_slo), inputs.duration(tbt_slo))
    shape = Shape(prefill=prefill, decode=decode, pipeline_nodes=pipeline_nodes)
    runs = _disaggregated(policy, admission, shape, slo, seed) + _coupled(
        coupled, spread, pipeline_nodes * prefill + decode, slo
    )
    if not runs:
        raise InvalidRequest(f"--policy {NONE} leaves nothing to replay without --coupled")
    if plot is not None:
        plotting.need_matplotlib("--plot")
    requests = faster(_read(trace, first), speed)
    outcomes = _replayed(runs, requests)
    title = trace.name if speed == 1 else f"{trace.name}, {speed:g} times as fast"
    drawn = plotting.draw_all(plot, outcomes, slo, title) if plot is not None else []
    if invocation(context).json:
        output.emit(_document(requests, outcomes, slo, drawn))
    else:
        output.say(_about(requests, shape), "", _table(outcomes, slo), *_notes(outcomes, drawn))


def _disaggregated(policy: str, admission: str, shape: Shape, slo: Slo, seed: int) -> list[Run]:
    """Each policy under each admission."""
    policies = [] if policy == NONE else _names("--policy", policy, list(POLICIES))
    admissions = _names("--admission", admission, list(ADMISSIONS))

    def run(chosen: str, admitted: str) -> Run:
        name = chosen if len(admissions) == 1 else f"{chosen} · {admitted}"
        return Run(
            name,
            lambda requests: replay(requests, shape, Random(seed).random, policy=chosen, admission=admitted, slo=slo),
        )

    return [run(chosen, admitted) for chosen, admitted in itertools.product(policies, admissions)]


def _coupled(coupled: str, spread: str, instances: int, slo: Slo) -> list[Run]:
    balance = SPREADS[_names("--spread", spread, list(SPREADS))[0]]

    def run(name: str) -> Run:
        return Run(
            name,
            lambda requests: replay_coupled(
                requests, LLAMA3_70B_8XA800, BASELINES[name], instances=instances, spread=balance, slo=slo
            ),
        )

    return [run(name) for name in (_names("--coupled", coupled, list(BASELINES)) if coupled else [])]


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    found = list(dict.fromkeys(filter(None, text.split(","))))
    unknown = [name for name in found if name not in known]
    if unknown or not found:
        raise InvalidRequest(f"{option} takes some of {', '.join(known)}, not {', '.join(unknown) or 'none'}")
    return found


def _read(path: Path, first: int) -> list[TraceRequest]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            requests = read_trace(file)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: no text; a trace is JSON lines, and ends in .gz if it is compressed") from error
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidRequest(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return cut(requests, 0, first) if first else requests


def _replayed(runs: Sequence[Run], requests: Sequence[TraceRequest]) -> dict[str, Outcomes]:
    outcomes = {}
    with output.progress() as shown:
        task = shown.add_task("", total=len(runs))
        for run in runs:
            shown.update(task, description=run.name)
            outcomes[run.name] = run.replay(requests)
            shown.advance(task)
    return outcomes


def _about(requests: Sequence[TraceRequest], shape: Shape) -> str:
    count, span_s = len(requests), requests[-1].arrived_s
    rate = f", {count / span_s:.2f} a second" if span_s else ""
    tokens = sum(request.tokens for request in requests) / count
    output_tokens = sum(request.output_tokens for request in requests) / count
    return (
        f"{output.count_text(count, 'request')}{rate}; on average {tokens:,.0f} tokens in, "
        f"{output_tokens:,.0f} out; {shape.hardware.name}, "
        f"{shape.prefill} prefill and {shape.decode} decode"
    )


def _table(outcomes: dict[str, Outcomes], slo: Slo) -> Table:
    within = f"in TTFT {slo.ttft_s:g} s, TBT {slo.tbt_s * 1000:g} ms"
    columns = (">TTFT mean", ">p50", ">p90", ">p99", ">TBT mean", ">p50", ">p90", ">p99", ">hit tokens")
    shown = output.table("replay", *columns, ">prefill/request", ">refused", within, ">")
    for name, found in outcomes.items():
        ttft = (found.mean_ttft_s, *(found.ttft_percentile_s(percent) for percent in PERCENTILES))
        tbt = (found.mean_tbt_s, *(found.tbt_percentile_s(percent) for percent in PERCENTILES))
        share = found.effective_share(slo)
        shown.add_row(
            name,
            *(_time_text(value) for value in (*ttft, *tbt)),
            output.share_text(found.token_hit_ratio),
            _time_text(found.prefill_s_per_request),
            f"{found.refusals:,}",
            output.bar(share, 12, alarming=False),
            output.share_text(share),
        )
    return shown


def _time_text(seconds: float) -> str:
    if not isfinite(seconds):
        return "-"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _notes(outcomes: dict[str, Outcomes], drawn: Sequence[Path]) -> list[str]:
    """Why requests were refused, and which files there are now."""
    notes = []
    for name, found in outcomes.items():
        if found.refused:
            why = ", ".join(f"{count:,} for {reason}" for reason, count in found.refused.items())
            notes.append(f"{name} refused {why}; {found.wasted_prefill_s:,.0f} s of prefill were wasted")
    notes += [f"drawn: {path}" for path in drawn]
    return ["", *notes] if notes else []


def _document(
    requests: Sequence[TraceRequest], outcomes: dict[str, Outcomes], slo: Slo, drawn: Sequence[Path]
) -> dict[str, Any]:
    return {
        "trace": {"requests": len(requests), "seconds": requests[-1].arrived_s},
        "slo": {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s},
        "outcomes": [{"name": name, **_numbers(found.summary(slo))} for name, found in outcomes.items()],
        "plots": [str(path) for path in drawn],
    }


def _numbers(summary: dict[str, Any]) -> dict[str, Any]:
    """JSON has no number for what was not measured."""
    return {
        name: None if isinstance(value, float) and not isfinite(value) else value for name, value in summary.items()
    }
