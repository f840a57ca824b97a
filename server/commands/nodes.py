"""`cairn nodes`: who is in the cluster, as one of its nodes sees it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import RenderableType
from rich.table import Table

from engine_client.blocking import BlockingClient
from kvstore.errors import InvalidRequest
from kvstore.wire_cluster import Roster
from server.commands import output
from server.commands.reach import invocation, node

PLACE = ("zone", "rack")  # labels that are shown
SPANS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
SERVING = "serving"
UNKNOWN = "-"
HEADINGS = (
    *("#node", "condition", ">age", "#address", "/".join(PLACE), ">used", ">capacity"),
    *(">blocks", ">copies", ">load", ">RTT", ">speed"),
)


def nodes(context: typer.Context) -> None:
    """Show the nodes of the cluster, as the node that is asked sees them.

    RTT and speed are those measured from there; - is what it does not know.

    \b
    Examples:
      cairn nodes
      cairn nodes --json | jq -r '.nodes[] | select(.condition != "serving") | .name'
    """
    with node(context) as client:
        roster = client.nodes()
    if invocation(context).json:
        output.emit(described(roster))
    else:
        output.say(node_table(roster.rows, roster.node), *remarks(roster.trouble, roster.rows))


def roster_of(client: BlockingClient) -> Roster | None:
    """None when the node is in no cluster."""
    try:
        return client.nodes()
    except InvalidRequest:
        return None


def described(roster: Roster) -> dict[str, Any]:
    """As JSON has it."""
    return {"node": roster.node, "trouble": roster.trouble, "nodes": roster.rows}


def node_table(rows: Sequence[Mapping[str, Any]], here: str) -> Table:
    """A row for each node; the one that was asked is marked. What is known of none is left out."""
    cells = [_cells(row, here) for row in rows]
    known = [heading for heading in HEADINGS if any(row[heading] != UNKNOWN for row in cells)]
    shown = output.table(*known)
    for row in cells:
        shown.add_row(*(row[heading] for heading in known))
    return shown


def _cells(row: Mapping[str, Any], here: str) -> dict[str, RenderableType]:
    used, capacity, labels = row.get("used_bytes"), row.get("capacity_bytes"), row.get("labels", {})
    condition = row.get("condition") or "unknown"
    latency_ms, load = row.get("latency_ms"), row.get("load")
    found: tuple[RenderableType, ...] = (
        row["name"] + (" *" if row["name"] == here else ""),
        condition if condition == SERVING and not row.get("trouble") else output.alarm(condition),
        age_text(row["epoch"]),
        row.get("address") or UNKNOWN,
        "/".join(labels.get(name, UNKNOWN) for name in PLACE) if labels.keys() & PLACE else UNKNOWN,
        UNKNOWN if used is None else output.size_text(used),
        output.size_text(capacity) if capacity else UNKNOWN,
        _count(row.get("blocks")),
        _count(row.get("copies")),
        UNKNOWN if load is None else f"{load:.0%}",
        f"{latency_ms:,.2f} ms" if latency_ms else UNKNOWN,
        output.rate_text(row.get("bytes_per_s")),
    )
    return dict(zip(HEADINGS, found, strict=True))


def remarks(trouble: str, rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """What is wrong with membership, and with the ways to nodes, if anything is."""
    found = [trouble] if trouble else []
    found += [f"{row['name']}: {row['trouble']}" for row in rows if row.get("trouble")]
    return ["", *map(output.alarm, found)] if found else []


def holders_text(holders: Mapping[str, Sequence[str]]) -> str:
    """Nodes with the tiers in which they have a block: "n1 dram+nvme, n2 dram"."""
    return ", ".join(f"{name} {'+'.join(holders[name])}" for name in sorted(holders))


def age_text(epoch: int) -> str:
    """How long ago a node was started: its epoch is then, in ms of its clock; - where that is no past here."""
    passed_s = time.time() - epoch / 1000
    return next((f"{passed_s / span_s:.0f}{unit}" for span_s, unit in SPANS if passed_s >= span_s), UNKNOWN)


def _count(blocks: int | None) -> str:
    return UNKNOWN if blocks is None else f"{blocks:,}"
