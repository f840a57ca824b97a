"""`cairn top`: a live view of a node, and of its cluster."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from kvstore.errors import Rejected, StoreError, TransportError
from kvstore.types import DRAM
from server.commands import inputs, output
from server.commands.nodes import described, node_table, remarks, roster_of
from server.commands.reach import invocation, node
from server.commands.stat import snapshot
from server.commands.tiers import tier_table, traffic

NAMESPACES = 12  # shown to people, the busiest first
NODES = 24  # of the cluster, the fullest first


@dataclass(frozen=True, slots=True)
class Sample:
    """What the node said of itself at a time of this process's monotonic clock, in seconds."""

    at_s: float
    found: dict[str, Any]


def top(
    context: typer.Context,
    *,
    interval: Annotated[
        str, typer.Option("--interval", "-i", metavar="DURATION", help="How often to look, and what rates are over.")
    ] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, print, and end.")] = False,
) -> None:
    """Watch a node: tiers, rates, evictions, namespaces, tenants, its cluster.

    Ctrl-C ends it. It goes on when the node cannot be reached, and finds it
    again after a restart. Where stdout is no terminal, a view (with --json a
    document) is printed for each interval.

    \b
    Examples:
      cairn top
      cairn top --interval 5s
      cairn top --once --json | jq .rates.loaded_bytes
    """
    interval_s = inputs.duration(interval)
    views = _views(context, interval_s)
    if once:
        first = next(views)
        if not isinstance(first, StoreError):
            first = next(views)
        if isinstance(first, StoreError):
            raise first
        _print(context, first)
    elif invocation(context).json or not output.stdout().is_terminal:
        for view in views:
            _print(context, view)
    else:
        with Live(console=output.stdout(), screen=True, auto_refresh=False) as live:
            for view in views:
                live.update(_picture(view), refresh=True)


def _views(context: typer.Context, interval_s: float) -> Iterator[dict[str, Any] | StoreError]:
    """What `top` shows, once an interval; the error while the node cannot be reached."""
    before: Sample | None = None
    for sample in _samples(context, interval_s):
        if isinstance(sample, StoreError):
            before = None
            yield sample
        else:
            yield describe(before, sample)
            before = sample


def _samples(context: typer.Context, interval_s: float) -> Iterator[Sample | StoreError]:
    pause = Event()
    while True:
        try:
            with node(context) as client:
                roster = roster_of(client)
                while True:
                    cluster = {"cluster": described(roster)} if roster is not None else {}
                    yield Sample(time.monotonic(), snapshot(client) | cluster)
                    pause.wait(interval_s)
                    roster = roster_of(client) if roster is not None else None
        except (TransportError, Rejected) as error:
            yield error
            pause.wait(interval_s)


def describe(before: Sample | None, now: Sample) -> dict[str, Any]:
    """One view. Rates are per second since `before`; 0 where there is no `before` of the same start of the node."""
    found = now.found
    old = before.found if before is not None and before.found["epoch"] == found["epoch"] else found
    passed_s = now.at_s - before.at_s if before is not None else 0.0

    def rate(new_count: int, old_count: int) -> float:
        return round(max(new_count - old_count, 0) / passed_s, 3) if passed_s > 0 else 0.0

    counted, counted_before = found["counters"], old["counters"]
    earlier = {row["number"]: row for row in old["namespaces"]}
    namespaces = []
    for row in found["namespaces"]:
        last = earlier.get(row["number"], {"hit_blocks": 0, "missed_blocks": 0})
        looked_up = row["hit_blocks"] + row["missed_blocks"]
        namespaces.append(
            {
                "names": row["names"],
                "tenant": row["tenant"],
                "blocks": row["blocks"],
                "hit_ratio": round(row["hit_blocks"] / looked_up, 4) if looked_up else None,
                "hit_blocks": rate(row["hit_blocks"], last["hit_blocks"]),
                "missed_blocks": rate(row["missed_blocks"], last["missed_blocks"]),
            }
        )
    return {
        "reachable": True,
        "interval_seconds": round(passed_s, 3),
        **{name: found[name] for name in ("address", "node", "epoch", "tenant", "tiers", "tenants")},
        "rates": {
            "stored_bytes": rate(_sum(counted["stored_bytes"]), _sum(counted_before["stored_bytes"])),
            "loaded_bytes": rate(_sum(counted["loaded_bytes"]), _sum(counted_before["loaded_bytes"])),
            "hit_blocks": round(sum(row["hit_blocks"] for row in namespaces), 3),
            "missed_blocks": round(sum(row["missed_blocks"] for row in namespaces), 3),
            "requests": rate(_sum(counted["requests"]), _sum(counted_before["requests"])),
            "errors": rate(_sum(counted["errors"]), _sum(counted_before["errors"])),
            "removed_blocks": {
                cause: rate(count, counted_before["removed_blocks"].get(cause, 0))
                for cause, count in counted["removed_blocks"].items()
            },
            "tiers": _tier_rates(found["tiers"], old["tiers"], rate),
        },
        "namespaces": namespaces,
        **({"cluster": found["cluster"]} if "cluster" in found else {}),
    }


def _tier_rates(
    rows: list[dict[str, Any]], before: list[dict[str, Any]], rate: Callable[[int, int], float]
) -> dict[str, dict[str, float]]:
    rates = {}
    for row, old in zip(rows, before, strict=True):
        (read, written), (old_read, old_written) = traffic(row), traffic(old)
        rates[row["tier"]] = {
            "read_bytes": rate(read, old_read),
            "written_bytes": rate(written, old_written),
            "promoted_blocks": rate(row["promoted_blocks"], old["promoted_blocks"]),
            "demoted_blocks": rate(row["demoted_blocks"], old["demoted_blocks"]),
        }
    return rates


def _sum(by_label: dict[str, int]) -> int:
    return sum(by_label.values())


def _print(context: typer.Context, view: dict[str, Any] | StoreError) -> None:
    if not invocation(context).json:
        output.say(_picture(view), "")
    elif isinstance(view, StoreError):
        output.emit({"reachable": False, "error": {"code": view.code, "message": str(view)}})
    else:
        output.emit(view)


def _activity(namespace: dict[str, Any]) -> tuple[float, int]:
    return namespace["hit_blocks"] + namespace["missed_blocks"], namespace["blocks"]


def _picture(view: dict[str, Any] | StoreError) -> Group:
    if isinstance(view, StoreError):
        return Group(output.alarm("not reachable"), output.dim(str(view)))
    head = f"node {view['node']}, epoch {view['epoch']}, at {view['address']} as {view['tenant']}"
    rates = view["rates"]
    flow = output.table(">stored/s", ">loaded/s", ">hits/s", ">misses/s", ">requests/s", ">errors/s")
    flow.add_row(
        output.size_text(rates["stored_bytes"]),
        output.size_text(rates["loaded_bytes"]),
        *(f"{rates[name]:,.1f}" for name in ("hit_blocks", "missed_blocks", "requests", "errors")),
    )
    gone = output.table("blocks that went", ">/s")
    for cause, rate in rates["removed_blocks"].items():
        gone.add_row(cause.replace("_", " "), f"{rate:,.1f}")
    spaces = output.table("namespace", "tenant", ">blocks", "hits", ">", ">hits/s", ">misses/s")
    busiest = sorted(view["namespaces"], key=_activity, reverse=True)
    for row in busiest[:NAMESPACES]:
        known = row["hit_ratio"] is not None
        spaces.add_row(
            ", ".join(row["names"]),
            row["tenant"],
            f"{row['blocks']:,}",
            output.bar(row["hit_ratio"], 12, alarming=False) if known else "",
            output.share_text(row["hit_ratio"]) if known else "-",
            f"{row['hit_blocks']:,.1f}",
            f"{row['missed_blocks']:,.1f}",
        )
    if len(busiest) > NAMESPACES:
        spaces.add_row(output.dim(f"and {len(busiest) - NAMESPACES:,} more"))
    tenants = output.table("tenant", ">used")
    for name, row in view["tenants"].items():
        tenants.add_row(name, output.size_text(_sum(row["used_bytes"])))
    moved = _moved_table(rates["tiers"])
    parts: list[RenderableType] = [tier_table(view["tiers"]), *([moved] if moved.row_count else []), flow]
    parts += [gone] if rates["removed_blocks"] else []
    parts += [*([spaces] if view["namespaces"] else []), tenants]
    parts += _cluster(view["cluster"]) if "cluster" in view else []
    return Group(head, *(item for part in parts for item in ("", part)))


def _cluster(found: dict[str, Any]) -> list[RenderableType]:
    """The nodes, and what is wrong with membership."""
    rows = sorted(found["nodes"], key=lambda row: row.get("used_bytes") or 0, reverse=True)
    shown = node_table(rows[:NODES], found["node"])
    if len(rows) > NODES:
        shown.add_row(output.dim(f"and {len(rows) - NODES:,} more"))
    return [shown, *remarks(found["trouble"], rows)[1:]]


def _moved_table(rates: dict[str, dict[str, float]]) -> Table:
    """What goes to and from the tiers below DRAM."""
    shown = output.table("tier", ">read/s", ">written/s", ">promoted/s", ">demoted/s")
    for tier, moving in rates.items():
        if tier != DRAM:
            sizes = [output.size_text(moving[name]) for name in ("read_bytes", "written_bytes")]
            shown.add_row(tier, *sizes, f"{moving['promoted_blocks']:,.1f}", f"{moving['demoted_blocks']:,.1f}")
    return shown
