"""`python -m bench local|tiers|rdma|cluster|...`: figures beside floors; `--help` says what there is."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import (
    amplification,
    cluster,
    cluster_trace,
    codec,
    conductor,
    directory,
    local,
    policies,
    prefetch,
    prefix_index,
    rdma,
    route,
    serving,
    tiers,
)
from bench.measure import Figure
from kvstore.transport.rdma.topology import has_devices

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure Cairn on this machine. Figures are medians; ratios compare with a floor from the same run."""


Names = Annotated[list[str] | None, typer.Argument(help="Only these figures.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@app.command(name="local")
def local_command(names: Names = None, *, as_json: AsJson = False) -> None:
    """One node and its clients: shared memory, Unix socket, TCP loopback, the table, hashing.

    \b
    Examples:
      python -m bench local
      python -m bench local get_4k put_64k --json
    """
    _report(local.run(set(names or ())), set(names or ()), as_json=as_json)


@app.command(name="tiers")
def tiers_command(names: Names = None, *, as_json: AsJson = False) -> None:
    """The NVMe tier on the disk of the current folder: its files, and a node with it beside one without.

    \b
    Examples:
      python -m bench tiers
      python -m bench tiers nvme_read_1m --json
    """
    _report(tiers.run(set(names or ())), set(names or ()), as_json=as_json)


@app.command(name="rdma")
def rdma_command(
    names: Names = None,
    *,
    binding: Annotated[str, typer.Option(help="pyverbs or ibverbs; else the first there is.")] = "",
    as_json: AsJson = False,
) -> None:
    """What a READ costs in Python; and, where there is an RDMA device, gets by a node beside bare READs.

    \b
    Examples:
      python -m bench rdma
      make vm-shell CMD=".venv/bin/python -m bench rdma --binding ibverbs"
    """
    _report(rdma.run(set(names or ()), binding), set(names or ()) if has_devices() else set(), as_json=as_json)


@app.command(name="cluster")
def cluster_command(
    names: Names = None,
    *,
    nodes: Annotated[int, typer.Option(min=3, help="Node processes.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Several nodes and etcd on this machine: gets from other nodes, and what killed nodes cost; three minutes.

    \b
    Examples:
      python -m bench cluster
      python -m bench cluster remote_get_1m_b64 directory_lost_1 --nodes 5 --json
    """
    _report(cluster.run(set(names or ()), cluster.Sizes(nodes=nodes)), set(names or ()), as_json=as_json)


@app.command(name="amplification")
def amplification_command(
    trace: Annotated[Path, typer.Argument(help="JSONL with hash_ids, also .gz; see docs/traces.md.")],
    *,
    admission: Annotated[str, typer.Option(help="second_hit or all.")] = "second_hit",
    as_json: AsJson = False,
) -> None:
    """Bytes written to the disk by bytes admitted, over a trace; needs 5 GB of disk and a minute.

    \b
    Example:
      python -m bench amplification conversation_trace.jsonl
    """
    _report(amplification.run(trace, admission), set(), as_json=as_json)


@app.command(name="policies")
def policies_command(
    trace: Annotated[Path, typer.Argument(help="JSONL with hash_ids, also .gz; see docs/traces.md.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Hit ratios of the eviction policies inside the store, beside LRU; a few minutes.

    \b
    Example:
      python -m bench policies conversation_trace.jsonl
    """
    _report(policies.run(trace), set(), as_json=as_json)


@app.command(name="directory")
def directory_command(
    trace: Annotated[Path, typer.Argument(help="JSONL with hash_ids, also .gz; see docs/traces.md.")],
    names: Names = None,
    *,
    as_json: AsJson = False,
) -> None:
    """The directory of a cluster in this process: memory of a block and holder, locate, apply, homes.

    \b
    Example:
      python -m bench directory conversation_trace.jsonl
    """
    _report(directory.run(set(names or ()), trace), set(names or ()), as_json=as_json)


@app.command(name="cluster-trace")
def cluster_trace_command(
    trace: Annotated[Path, typer.Argument(help="JSONL with hash_ids, also .gz; see docs/traces.md.")],
    *,
    nodes: Annotated[int, typer.Option(help="Simulated nodes.")] = 10,
    blocks: Annotated[int, typer.Option(help="Blocks that each has room for.")] = 5859,
    copies: Annotated[float, typer.Option(help="As cluster.copies.")] = 0.1,
    as_json: AsJson = False,
) -> None:
    """Hit ratio and balance of a simulated cluster, beside one cache of all its memory; about a minute.

    \b
    Example:
      python -m bench cluster-trace conversation_trace.jsonl
    """
    _report(cluster_trace.report(trace, nodes, blocks, copies), set(), as_json=as_json)


@app.command(name="route")
def route_command(names: Names = None, *, as_json: AsJson = False) -> None:
    """What a decision of the Conductor takes with 64 instances, in this process and over HTTP; about a minute.

    \b
    Examples:
      python -m bench route
      python -m bench route route_128k routes_8k_http --json
    """
    _report(route.run(set(names or ())), set(names or ()), as_json=as_json)


@app.command(name="prefix-index")
def prefix_index_command(
    names: Names = None,
    *,
    blocks: Annotated[int, typer.Option(min=65_536, help="Blocks that it has.")] = prefix_index.BLOCKS,
    as_json: AsJson = False,
) -> None:
    """The Conductor's index of prefixes: memory of a block and holder, changes, questions; half a minute.

    \b
    Example:
      python -m bench prefix-index --blocks 10000000 --json
    """
    _report(prefix_index.run(set(names or ()), blocks), set(names or ()), as_json=as_json)


def _report(found: Iterable[Figure], names: set[str], *, as_json: bool) -> None:
    """Show figures as they come; exit code 2 for a name that there is not."""
    console = Console(stderr=True)
    figures = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("measuring")
        for figure in found:
            progress.update(bar, description=f"{figure.name} {figure.value:.2f} {figure.unit}")
            figures.append(figure)
            if as_json:
                sys.stdout.write(json.dumps(figure.as_json()) + "\n")
                sys.stdout.flush()
    unknown = names - {figure.name for figure in figures}
    if unknown:
        console.print(f"no figure is called {', '.join(sorted(unknown))}")
        raise typer.Exit(2)
    if not as_json:
        Console().print(table(figures))


app.command(name="codec")(codec.report)
app.command(name="conductor")(conductor.report)
app.command(name="prefetch")(prefetch.report)
app.command(name="serving")(serving.report)


def table(figures: list[Figure]) -> Table:
    """For people: a bar is how close a figure comes to its target, full when it is reached."""
    shown = Table(title="bigger is better in ratios: 1 is the floor", title_justify="left")
    for name in ("figure", "value", "p99", "floor", "ratio", "target", ""):
        shown.add_column(name, justify="left" if name in ("figure", "") else "right")
    for figure in figures:
        share = (figure.ratio or 0) / figure.target if figure.is_ratio else figure.target / max(figure.value, 1e-9)
        bar = ProgressBar(
            total=1.0, completed=min(share, 1.0), width=20, complete_style="green" if share >= 1 else "red"
        )
        shown.add_row(
            figure.name,
            f"{figure.value:,.2f} {figure.unit}",
            f"{figure.p99:,.1f}" if figure.p99 is not None else "",
            f"{figure.floor:,.2f}" if figure.floor is not None else "",
            f"{figure.ratio:.2f}" if figure.ratio is not None else "",
            f"{'≥' if figure.is_ratio else '≤'} {figure.target:g}{'' if figure.is_ratio else ' ' + figure.unit}",
            bar,
        )
    return shown


if __name__ == "__main__":
    app()
