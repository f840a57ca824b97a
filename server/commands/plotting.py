"""Plots of replays as PNG files: curves of TTFT and TBT, load over time, hit ratios."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.errors import ConfigError, InvalidRequest
from scheduler.simulation.outcomes import Floats, Outcomes, distribution
from scheduler.tuning import Slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DPI: Final = 150
LEAST_S: Final = 0.01  # where a logarithmic axis of seconds begins; answers of one token have no time between them
COLOURS: Final = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
LINES: Final = ("-", "--", ":", "-.")  # so that curves that lie on each other are both seen
CLOSE: Final = 1.25  # how many times as high as its bar a mark may be and still be in the way of the bar's number
LIMIT_COLOUR: Final = "#d62728"


def need_matplotlib(option: str) -> None:
    """ConfigError when the extra is not there; `option` is what asked for it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"{option} needs {error.name}: pip install 'cairn-kv[plots]'") from error


def figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(drawn: "Figure", path: Path) -> Path:
    """As PNG; its folder is made. InvalidRequest when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, format="png", dpi=DPI)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from error
    return path


def draw_all(folder: Path, outcomes: Mapping[str, Outcomes], slo: Slo, title: str) -> list[Path]:
    """The three plots of replays by name, in `folder`."""
    return [
        save(curves(outcomes, slo, title), folder / "latency.png"),
        save(loads(outcomes, title), folder / "load.png"),
        save(hits(outcomes, title), folder / "hits.png"),
    ]


def curves(outcomes: Mapping[str, Outcomes], slo: Slo, title: str) -> "Figure":
    """Cumulative distributions of TTFT and TBT over all requests that came: a refused one never gets there."""
    drawn = figure(11, 5)
    ttft, tbt = drawn.subplots(1, 2, sharey=True)
    for number, (name, found) in enumerate(outcomes.items()):
        _curve(ttft, found.ttft_s, len(found.records), name, number)
        _curve(tbt, found.tbt_s, len(found.records), name, number)
    for axes, limit_s, label in (
        (ttft, slo.ttft_s, "time to first token, seconds"),
        (tbt, slo.tbt_s, "time between tokens, seconds\n(mean of the longest 10 % of a request's intervals)"),
    ):
        axes.axvline(limit_s, color=LIMIT_COLOUR, linewidth=1, alpha=0.8, label=f"SLO {limit_s:g} s")
        axes.set(xlabel=label, xscale="log")
        axes.set_xlim(left=max(LEAST_S, axes.get_xlim()[0]))
        plain_seconds(axes.xaxis)
        axes.grid(visible=True, alpha=0.3)
    ttft.set_ylim(0, 1.02)
    _percent(ttft)
    ttft.set_ylabel("requests, of all that arrived")
    ttft.legend(loc="upper left", fontsize=8)
    tbt.legend([tbt.lines[-1]], [f"SLO {slo.tbt_s:g} s"], loc="lower right", fontsize=8)
    drawn.suptitle(title)
    return drawn


def loads(outcomes: Mapping[str, Outcomes], title: str) -> "Figure":
    """Load of the pools over time, one row for each replay; 1 is what the SLO allows."""
    drawn = figure(11, 1.2 + 2.1 * max(1, len(outcomes)))
    rows = drawn.subplots(max(1, len(outcomes)), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, found) in zip(rows, outcomes.items(), strict=False):
        at_min = [sample.at_s / 60 for sample in found.loads]
        axes.plot(at_min, [sample.prefill for sample in found.loads], label="prefill", color=COLOURS[0], linewidth=1)
        axes.plot(at_min, [sample.decode for sample in found.loads], label="decode", color=COLOURS[1], linewidth=1)
        axes.axhline(1, color=LIMIT_COLOUR, linewidth=1, alpha=0.6, label="SLO")
        refused = f", {found.refusals:,} refused" if found.refusals else ""
        axes.set_title(f"{name}{refused}", fontsize=9, loc="left")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    rows[-1].set_xlabel("minutes of replay")
    rows[0].legend(fontsize=8, ncols=3, loc="upper right")
    drawn.supylabel("mean load of the pool, as a share of its SLO", fontsize=10)
    drawn.suptitle(title)
    return drawn


def hits(outcomes: Mapping[str, Outcomes], title: str) -> "Figure":
    """Token and block hit ratio of each replay."""
    ratios = {
        "of tokens": [found.token_hit_ratio for found in outcomes.values()],
        "of blocks": [found.block_hit_ratio for found in outcomes.values()],
    }
    drawn = figure(max(5.0, 1.5 + 1.3 * len(outcomes)), 4.5)
    axes = drawn.subplots()
    bars(axes, list(outcomes), ratios, number="{:.1%}")
    _percent(axes)
    axes.set(ylabel="found in a cache, of all in prompts", title=title)
    axes.legend(fontsize=8)
    return drawn


def bars(
    axes: "Axes",
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    published: Mapping[str, Sequence[float]] | None = None,
    *,
    number: str = "{:.2f}",
) -> None:
    """Bars side by side, a group of one for each series; a diamond where a value was published (nan: none)."""
    width = 0.8 / max(1, len(series))
    is_first = True
    for at, (name, values) in enumerate(series.items()):
        places = [group + (at - (len(series) - 1) / 2) * width for group in range(len(groups))]
        marks = (published or {}).get(name, [nan] * len(values))
        axes.bar(places, values, width * 0.92, label=name, color=COLOURS[at % len(COLOURS)])
        for place, value, mark in zip(places, values, marks, strict=True):
            if isfinite(value):
                is_near = value / CLOSE < mark < value * CLOSE
                top = (place, max(value, mark) if is_near else value)
                text, offset = number.format(value), (0, 6 if is_near else 2)
                axes.annotate(text, top, offset, textcoords="offset points", ha="center", fontsize=7)
        if any(isfinite(mark) for mark in marks):
            label = "published" if is_first else None
            axes.scatter(places, marks, marker="D", s=28, color="black", zorder=3, label=label)
            is_first = False
    axes.set_xticks(range(len(groups)), [group.replace(" · ", "\n") for group in groups], fontsize=8)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, axis="y", alpha=0.3)


def _curve(axes: "Axes", values_s: Floats, arrived: int, name: str, number: int) -> None:
    ordered, shares = distribution(values_s.clip(min=LEAST_S))
    axes.step(
        ordered,
        shares * len(ordered) / max(1, arrived),
        where="post",
        label=name,
        color=COLOURS[number % len(COLOURS)],
        linestyle=LINES[number % len(LINES)],
        linewidth=1.5,
    )


def _percent(axes: "Axes") -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def plain_seconds(axis: "Axis") -> None:
    """0.1, 0.3, 1, 3 on a logarithmic axis instead of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
