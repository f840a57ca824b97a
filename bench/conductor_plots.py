"""Plots of the Conductor's tables: our values as bars and curves, published ones as diamonds."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

from scheduler.simulation.capacity import ENOUGH, PUBLISHED_GAINS, TBT_S, Capacity, gain
from scheduler.simulation.outcomes import Outcomes
from scheduler.tuning import Slo
from server.commands import plotting

NONE = float("nan")


def draw_bars(
    path: Path,
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    published: Mapping[str, Sequence[float]] | None = None,
    *,
    unit: str,
    number: str = "{:.2f}",
) -> Path:
    """Values of each series for each group, beside published ones (nan where there is none)."""
    drawn = plotting.figure(max(6.0, 2 + 0.75 * len(groups) * max(1, len(series))), 4.5)
    axes = drawn.subplots()
    plotting.bars(axes, groups, series, published, number=number)
    axes.set(ylabel=unit, title=title)
    axes.legend(fontsize=8)
    return plotting.save(drawn, path)


def draw_ttft(path: Path, mean_ttft_s: Mapping[str, float], published_s: Mapping[str, float]) -> Path:
    """(a): mean TTFT by policy; on a logarithmic axis, since they differ by more than ten times."""
    names = list(mean_ttft_s)
    drawn = plotting.figure(7, 4.5)
    axes = drawn.subplots()
    marks = {"simulated": [published_s.get(name, NONE) for name in names]}
    plotting.bars(axes, names, {"simulated": list(mean_ttft_s.values())}, marks, number="{:.2f} s")
    known = [*mean_ttft_s.values(), *published_s.values()]
    axes.set(
        yscale="log",
        ylim=(min(known) / 2, max(known) * 2),
        ylabel="mean time to first token, seconds",
        title="Policies on the conversation trace, 16 instances",
    )
    plotting.plain_seconds(axes.yaxis)
    axes.legend(fontsize=8)
    return plotting.save(drawn, path)


def draw_capacity(path: Path, trace: str, rows: Sequence[Capacity], disaggregated: str) -> Path:
    """(b): how much more than each baseline the disaggregated system serves: at one speed, and by the highest speed."""
    mine = {row.slo.tbt_s: row for row in rows if row.system == disaggregated}
    baselines = list(dict.fromkeys(row.system for row in rows if row.system != disaggregated))
    groups = [f"TBT ≤ {tbt_s * 1000:.0f} ms" for tbt_s in mine]
    speed = "its own speed" if rows[0].speed == 1 else f"{rows[0].speed:g} times its speed"
    titles = {False: f"requests within both limits, replayed at {speed}"}
    if any(row.highest_speed for row in rows):
        titles[True] = f"highest speed at which {ENOUGH:.0%} are within both limits"
    drawn = plotting.figure(6 * len(titles), 4.8)
    readings = drawn.subplots(1, len(titles), squeeze=False)[0]
    for axes, (by_speed, reading) in zip(readings, titles.items(), strict=True):
        series = {}
        for name in baselines:
            theirs = {row.slo.tbt_s: row for row in rows if row.system == name}
            series[f"over {name}"] = [_gain(mine[tbt_s], theirs[tbt_s], by_speed=by_speed) for tbt_s in mine]
        marks = {f"over {baselines[0]}": _published(trace, list(mine))}
        plotting.bars(axes, groups, series, marks, number="{:+.0%}")
        axes.set_ylabel("more than the baseline, as a share of it")
        axes.set_title(reading, fontsize=10)
        axes.legend(fontsize=8)
    drawn.suptitle(f"Effective capacity on the {trace} trace, TTFT ≤ {rows[0].slo.ttft_s:g} s")
    return plotting.save(drawn, path)


def draw_loads(path: Path, outcomes: Mapping[str, Outcomes], title: str) -> Path:
    """(c): load of the prefill and the decode pool over time, by admission."""
    return plotting.save(plotting.loads(outcomes, title), path)


def draw_curves(path: Path, outcomes: Mapping[str, Outcomes], slo: Slo, title: str) -> Path:
    """Distributions of TTFT and TBT."""
    return plotting.save(plotting.curves(outcomes, slo, title), path)


def draw_ratio(path: Path, effective: Mapping[str, Mapping[str, float]], title: str) -> Path:
    """(e): effective requests by how 16 nodes are divided: `{trace: {"8:8": share of requests}}`."""
    drawn = plotting.figure(8, 4.5)
    axes = drawn.subplots()
    for number, (trace, shares) in enumerate(effective.items()):
        colour = plotting.COLOURS[number % len(plotting.COLOURS)]
        axes.plot(list(shares), list(shares.values()), marker="o", label=trace, color=colour)
    divisions = list(dict.fromkeys(division for shares in effective.values() for division in shares))
    if "8:8" in divisions:
        axes.axvline(divisions.index("8:8"), color="black", linestyle=":", label="published best, about 1:1")
    axes.set(
        xlabel="prefill : decode instances", ylabel="requests within both limits, of all", title=title, ylim=(0, 1)
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    return plotting.save(drawn, path)


def _gain(mine: Capacity, theirs: Capacity, *, by_speed: bool) -> float:
    """nan over a baseline that serves nothing."""
    found = gain(mine.highest_speed, theirs.highest_speed) if by_speed else gain(mine.effective, theirs.effective)
    return found if isfinite(found) else NONE


def _published(trace: str, limits_s: Sequence[float]) -> list[float]:
    known = dict(zip(TBT_S, PUBLISHED_GAINS.get(trace, ()), strict=False))
    return [known.get(limit_s, NONE) for limit_s in limits_s]
