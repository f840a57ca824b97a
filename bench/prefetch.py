"""What pulling early, late, or by a window costs a simulated decode instance in waiting, traffic and memory."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from scheduler.simulation.prefetching import Outcome, Scene, compare

GB = 1e9
COLORS = {"early": "tab:red", "late": "tab:blue", "windowed": "tab:green"}


def report(
    *,
    seeds: Annotated[int, typer.Option(help="Courses of events, from seed 0 on.", min=1)] = 5,
    requests: Annotated[int, typer.Option(help="In each.", min=100)] = 1200,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    plot: Annotated[Path | None, typer.Option(help="A PNG of the first course of events.")] = None,
) -> None:
    """Prefetch for one simulated decode instance: all at once, when it is needed, and by a window; some seconds.

    \b
    Examples:
      python -m bench prefetch
      python -m bench prefetch --seeds 1 --plot prefetch.png
      python -m bench prefetch --json
    """
    scene = Scene(requests=requests)
    shown = Table(title="stall: from when a request could begin until its bytes are there", title_justify="left")
    for name in (
        "seed",
        "prefetch",
        "stall s",
        "p50 s",
        "p99 s",
        "wasted",
        "ahead GB",
        "peak GB",
        "end s",
    ):
        shown.add_column(name, justify="left" if name == "prefetch" else "right")
    for seed in range(seeds):
        outcomes = compare(scene, random.Random(seed).random)
        for outcome in outcomes:
            row = figures(outcome)
            if as_json:
                sys.stdout.write(json.dumps({"seed": seed, **row}) + "\n")
                sys.stdout.flush()
            shown.add_row(str(seed), *_cells(row), end_section=outcome is outcomes[-1])
        if plot is not None and seed == 0:
            draw(plot, outcomes)
    if not as_json:
        Console().print(shown)


def figures(outcome: Outcome) -> dict[str, Any]:
    """wasted: share of what was pulled that was evicted before its use. ahead_bytes: mean over time, before its use."""
    return {
        "prefetch": outcome.strategy,
        "stall_s": outcome.stall_s,
        "stall_s_p50": outcome.stall_quantile_s(0.5),
        "stall_s_p99": outcome.stall_quantile_s(0.99),
        "pulled_bytes": outcome.pulled_bytes,
        "wasted": outcome.wasted_bytes / outcome.pulled_bytes,
        "ahead_bytes": outcome.ahead_bytes_mean,
        "peak_bytes": outcome.peak_bytes,
        "ended_s": outcome.ended_s,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["prefetch"],
        f"{row['stall_s']:,.1f}",
        f"{row['stall_s_p50']:.2f}",
        f"{row['stall_s_p99']:.2f}",
        f"{row['wasted']:.1%}",
        f"{row['ahead_bytes'] / GB:.1f}",
        f"{row['peak_bytes'] / GB:.1f}",
        f"{row['ended_s']:,.0f}",
    ]


def draw(path: Path, outcomes: Sequence[Outcome]) -> None:
    """A PNG: stall over requests, what each holds over time, and the window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    stalls, held, window = figure.subplots(3, 1)
    for outcome in outcomes:
        color = COLORS[outcome.strategy]
        ordered = sorted(outcome.stalls_s)
        shares = [(position + 1) / len(ordered) for position in range(len(ordered))]
        stalls.plot(ordered, shares, color=color, label=outcome.strategy)
        times = [sample.at_s for sample in outcome.samples]
        bytes_held = [(sample.running_bytes + sample.ahead_bytes) / GB for sample in outcome.samples]
        held.plot(times, bytes_held, color=color, linewidth=0.7, label=outcome.strategy)
        if outcome.strategy == "windowed":
            limits = [sample.window_bytes / GB for sample in outcome.samples]
            ahead = [sample.ahead_bytes / GB for sample in outcome.samples]
            window.plot(times, limits, color=color, label="window")
            window.fill_between(times, ahead, color=color, alpha=0.3, label="pulled ahead")
    stalls.set(xlabel="stall in s", ylabel="share of requests", ylim=(0, 1), xlim=(0, None))
    held.set(xlabel="s", ylabel="GB held", ylim=(0, None))
    window.set(xlabel="s", ylabel="GB", ylim=(0, None))
    for axes in (stalls, held, window):
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png", dpi=130)
