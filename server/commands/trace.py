"""`cairn trace replay`: what caches of several capacities would have hit of a recorded trace, by eviction policy."""

import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.replay import BELADY, NAMES, Outcome, Prefill, Trace, parse, replay
from server.commands import inputs, output
from server.commands.reach import LocalCommand, invocation

app = typer.Typer(no_args_is_help=True, help="Ask recorded traces of requests what a cache would be worth.")
PREFILL = Prefill()


@app.command("replay", cls=LocalCommand)
def replay_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace in JSON lines, or gzip of that (.gz).")],
    *,
    capacity: Annotated[
        str,
        typer.Option("--capacity", "-c", metavar="N,...", help="In blocks, or sizes like 4GiB with --block-bytes."),
    ] = "1000,10000,30000,50000,100000",
    policy: Annotated[
        str, typer.Option("--policy", "-p", metavar="NAME,...", help=f"Of {', '.join(NAMES)}. Default: all.")
    ] = ",".join(NAMES),
    block_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Of the KV of one block.")] = "",
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens for which the trace has one id.")] = 512,
    prefill_us: Annotated[
        float, typer.Option(min=0, help="Time to compute a token's KV, without attention.")
    ] = PREFILL.us_per_token,
    attention_ns: Annotated[
        float, typer.Option(min=0, help="The same, added for each token before it.")
    ] = PREFILL.ns_per_token_pair,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw hit blocks over capacity; needs the extra `plots`.")
    ] = None,
) -> None:
    """Replay a trace of requests against eviction policies.

    Shows how many blocks and tokens would have been hit, and how much prefill
    time saved. `belady` knows the future: what it hits more can still be won.

    \b
    Examples:
      cairn trace replay conversation_trace.jsonl
      cairn trace replay trace.jsonl.gz --capacity 64GiB,1TiB --block-bytes 64MiB
      cairn trace replay trace.jsonl --policy lru,adaptive,belady --plot curve.png
    """
    capacities = _capacities(capacity, block_bytes)
    policies = _policies(policy)
    if plot is not None:
        _need_matplotlib()
    prefill = Prefill(prefill_us, attention_ns)
    trace = _read(file, block_tokens)
    outcomes = []
    with output.progress() as shown:
        task = shown.add_task("", total=len(capacities) * len(policies))
        for blocks, name in itertools.product(capacities, policies):
            shown.update(task, description=f"{name}, {output.count_text(blocks, 'block')}")
            outcomes.append(replay(trace, name, blocks, prefill))
            shown.advance(task)
    if plot is not None:
        _draw(plot, outcomes, file.name)
    if invocation(context).json:
        output.emit({"trace": trace.summary(), "outcomes": [asdict(outcome) for outcome in outcomes]})
    else:
        output.say(_about(trace, trace.seconds(prefill)), "", _table(outcomes))


def _capacities(text: str, block_bytes: str) -> list[int]:
    """Blocks, each capacity once, smallest first."""
    bytes_of_block = inputs.size(block_bytes) if block_bytes else 0
    if block_bytes and not bytes_of_block:
        raise InvalidRequest("--block-bytes: a block has at least 1 byte")
    found = set()
    for word in filter(None, text.split(",")):
        is_count = word.isascii() and word.isdecimal() and len(word) < 16
        if not is_count and not bytes_of_block:
            raise InvalidRequest(f"--capacity {word!r}: a number of blocks, or a size together with --block-bytes")
        blocks = int(word) if is_count else inputs.size(word) // bytes_of_block
        if not blocks:
            raise InvalidRequest(f"--capacity {word!r}: not one block")
        found.add(blocks)
    if not found:
        raise InvalidRequest("--capacity: give at least one")
    return sorted(found)


def _policies(text: str) -> list[str]:
    found = list(dict.fromkeys(filter(None, text.split(","))))
    unknown = [name for name in found if name not in NAMES]
    if unknown or not found:
        raise InvalidRequest(f"--policy takes some of {', '.join(NAMES)}, not {', '.join(unknown) or 'none'}")
    return found


def _read(path: Path, block_tokens: int) -> Trace:
    try:
        return parse(_lines(path), block_tokens)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidRequest(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: no text; a trace is JSON lines, and ends in .gz if it is compressed") from error


def _lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        yield from file


def _about(trace: Trace, prefill_s: float) -> str:
    found = trace.summary()
    return (
        f"{found['requests']:,} requests, {found['accesses']:,} blocks of {trace.block_tokens} tokens, "
        f"{found['unique_blocks']:,} of them different; {prefill_s:,.0f} s of prefill; "
        f"a cache without end would hit {output.share_text(found['infinite_hit_ratio'])}"
    )


def _table(outcomes: Sequence[Outcome]) -> Table:
    shown = output.table(">blocks held", "policy", "hit blocks", ">", ">hit tokens", ">saved prefill", ">")
    previous = 0
    for outcome in outcomes:
        is_new = outcome.capacity_blocks != previous
        previous = outcome.capacity_blocks
        shown.add_row(
            f"{outcome.capacity_blocks:,}" if is_new else "",
            outcome.policy,
            output.bar(outcome.hit_ratio, alarming=False),
            f"{outcome.hit_ratio:.2%}",
            f"{outcome.token_hit_ratio:.2%}",
            f"{outcome.saved_s:,.0f} s",
            f"{outcome.saved_ratio:.2%}",
        )
    return shown


def _need_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"--plot needs {error.name}: pip install 'cairn-kv[plots]'") from error


def _draw(path: Path, outcomes: Sequence[Outcome], title: str) -> None:
    """A PNG of hit ratio over capacity, a line for each policy."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(outcome.policy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.policy == name]
        axes.plot(
            [outcome.capacity_blocks for outcome in mine],
            [outcome.hit_ratio for outcome in mine],
            marker=".",
            label=name,
            linestyle="--" if name == BELADY else "-",
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(title=title, xlabel="capacity in blocks", ylabel="blocks hit, of all blocks")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from error
