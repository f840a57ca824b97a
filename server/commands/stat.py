"""`cairn stat`: what a node says of itself, once."""

from typing import Any

import typer

from engine_client.blocking import BlockingClient
from server.commands import output
from server.commands.reach import invocation, node
from server.commands.tiers import tier_table


def stat(context: typer.Context) -> None:
    """Show node, tiers, tenants and what was counted.

    Counts are from the start of the node. An admin sees all tenants.

    \b
    Examples:
      cairn stat
      cairn stat --json | jq .counters.removed_blocks
    """
    with node(context) as client:
        found = snapshot(client)
    if invocation(context).json:
        output.emit(found)
    else:
        _print(found)


def snapshot(client: BlockingClient) -> dict[str, Any]:
    """What a node says of itself, with who it is and as whom one asks."""
    values = client.stat()
    welcome = client.connect()
    return {
        "address": str(client.address),
        "node": welcome.node,
        "epoch": welcome.epoch,
        "tenant": welcome.tenant,
        "may_write": welcome.may_write,
        "admin": welcome.admin,
        **values,
    }


def _print(found: dict[str, Any]) -> None:
    rights = ["may write" if found["may_write"] else "may only read", *(["admin"] if found["admin"] else [])]
    output.say(
        f"node {found['node']}, epoch {found['epoch']}, at {found['address']}",
        f"asked by tenant {found['tenant']}: {', '.join(rights)}",
        "",
        tier_table(found["tiers"]),
        "",
    )
    tenants = output.table("tenant", ">used", ">published blocks")
    for name, row in found["tenants"].items():
        used = ", ".join(f"{output.size_text(used)} {tier}" for tier, used in row["used_bytes"].items())
        tenants.add_row(name, used, f"{found['index'].get(name, {}).get('published', 0):,}")
    counters = output.table("counted since the start", ">")
    for name, label, count in _counted("", found["counters"]):
        counters.add_row(label, output.size_text(count) if name.endswith("_bytes") else f"{count:,}")
    output.say(tenants, "", counters)
    if found.get("rdma", {}).get("ports"):
        _print_rdma(found["rdma"])


def _print_rdma(found: dict[str, Any]) -> None:
    """Nothing of a node without RDMA: there is nothing to operate."""
    held = f"{output.size_text(found['registered_bytes'])} registered"
    if found["quarantined_bytes"]:
        held += f", {output.size_text(found['quarantined_bytes'])} in quarantine"
    late = f"{found['late_completions']:,} late completions"
    ports = ", ".join(row["port"] for row in found["ports"])
    peers = output.count_text(found["peers"], "connection")
    output.say("", f"RDMA by {found['binding']} on {ports}: {peers}, {held}, {late}", *found["reasons"])
    if not found["paths"]:
        return
    paths = output.table("client", "path", "state", ">READ", ">speed", ">a READ", ">failures", ">connects")
    for row in found["paths"]:
        state = row["reason"] or ("up" if row["up"] else "down")
        paths.add_row(
            row["client"],
            row["path"],
            state if row["up"] else output.alarm(state),
            output.size_text(row["read_bytes"]),
            output.rate_text(row["bytes_per_s"]),
            f"{row['request_s'] * 1e6:,.0f} us" if row["request_s"] else "-",
            f"{row['failures']:,}",
            f"{row['connects']:,}",
        )
    output.say("", paths)


def _counted(name: str, value: Any) -> list[tuple[str, str, int]]:
    """(counter, its name with the label's value, count) of all counters, those by label one by one."""
    if not isinstance(value, dict):
        return [(name, name.replace("_", " "), value)]
    rows = []
    for key, inner in value.items():
        for _, label, count in _counted(key, inner):
            full = f"{name.replace('_', ' ')}: {label}" if name else label
            rows.append((name or key, full, count))
    return rows
