"""`cairn tiers`: how full, fast and healthy each tier is, and its capacity and watermarks while it serves."""

from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from engine_client.blocking import BlockingClient
from kvstore.errors import InvalidRequest
from server.commands import inputs, output
from server.commands.reach import invocation, node

SETTINGS = ("capacity", "high_watermark", "low_watermark")


def tiers(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[set TIER NAME=VALUE...]",
            help=f"Change {', '.join(SETTINGS)} of {' or '.join(inputs.SLABBED)}; without it only look.",
        ),
    ] = None,
) -> None:
    """Show how full, fast and healthy each tier is, or change one while it serves.

    Changing needs an admin; a new capacity is reached step by step. An
    admin sees hits by tier, too: they are of all tenants together.

    \b
    Examples:
      cairn tiers
      cairn tiers set dram capacity=2GiB high_watermark=0.9
      cairn tiers set nvme capacity=200GiB
    """
    wanted = _wanted(words or [])
    with node(context) as client:
        if wanted is not None:
            _set(client, *wanted)
        rows = client.stat()["tiers"]
    if invocation(context).json:
        output.emit_rows(rows)
    else:
        output.say(tier_table(rows), "", speed_table(rows), *_classes(rows), *_remarks(rows))


def tier_table(rows: list[dict[str, Any]]) -> Table:
    shown = output.table("tier", "usage", ">used", ">capacity", ">", ">low", ">high", ">blocks", ">slabs")
    for row in rows:
        share = row["used_bytes"] / row["capacity_bytes"] if row["capacity_bytes"] else 0.0
        has_slabs = "slabs" in row
        shown.add_row(
            row["tier"],
            output.bar(share),
            output.size_text(row["used_bytes"]),
            output.size_text(row["capacity_bytes"]) if row["capacity_bytes"] else "no limit",
            output.share_text(share) if row["capacity_bytes"] else "-",
            f"{row['low_watermark']:.0%}" if has_slabs else "-",
            f"{row['high_watermark']:.0%}" if has_slabs else "-",
            f"{row['blocks']:,}",
            f"{row['slabs']['cut']}/{row['slabs']['cut'] + row['slabs']['spare']}" if has_slabs else "-",
        )
    return shown


def speed_table(rows: list[dict[str, Any]]) -> Table:
    """Hits and traffic of the tiers."""
    shown = output.table("tier", ">hits", ">", ">read", ">at", ">written", ">at", ">amplified", "path", "health")
    for row in rows:
        read, written = traffic(row)
        known = row["hit_ratio"] is not None
        is_counted = "read" in row or "bytes_read" in row["medium"]
        amplified = row["write_amplification"]
        shown.add_row(
            row["tier"],
            f"{row['hit_blocks']:,}" if row["hit_blocks"] is not None else "-",
            output.share_text(row["hit_ratio"]) if known else "-",
            output.size_text(read) if is_counted else "-",
            output.rate_text(row["read"]["bytes_per_s"] if "read" in row else None),
            output.size_text(written) if is_counted else "-",
            output.rate_text(row["write"]["bytes_per_s"] if "write" in row else None),
            f"{amplified:.2f}" if amplified is not None else "-",
            ", ".join(row["medium"].get("paths", [])) or "-",
            _health(row),
        )
    return shown


def traffic(row: dict[str, Any]) -> tuple[int, int]:
    """(Bytes read, bytes written) of a tier since the node started; none are counted of DRAM and HBM."""
    if "write" in row:
        return row["read"]["bytes"], row["write"]["bytes"]
    return row["medium"].get("bytes_read", 0), row["medium"].get("bytes_written", 0)


def _health(row: dict[str, Any]) -> RenderableType:
    if row.get("health"):
        return output.alarm(row["health"])
    return output.dim("recovering") if row.get("is_recovering") else "well"


def _classes(rows: list[dict[str, Any]]) -> list[RenderableType]:
    shown = output.table("tier", ">blocks up to", "usage", ">slots used", ">slabs")
    for row in rows:
        for found in row.get("classes", []):
            shown.add_row(
                row["tier"],
                output.size_text(found["slot_bytes"]),
                output.bar(found["used"] / found["slots"], alarming=False),
                f"{found['used']:,}/{found['slots']:,}",
                str(found["slabs"]),
            )
    return ["", shown] if shown.row_count else []


def _remarks(rows: list[dict[str, Any]]) -> list[str]:
    found = []
    for row in rows:
        if row.get("target_bytes", row["capacity_bytes"]) != row["capacity_bytes"]:
            found.append(f"{row['tier']}: on its way to {output.size_text(row['target_bytes'])}")
        if row.get("draining"):
            found.append(f"{row['tier']}: {output.count_text(row['draining'], 'block')} wait for their last reader")
        reasons = row["medium"].get("reasons") or [row["medium"].get("reason", "")]
        found += [f"{row['tier']}: {reason}" for reason in reasons if reason]
    return found


def _wanted(words: list[str]) -> tuple[str, dict[str, float]] | None:
    """(Tier, what to change of it); None only to look."""
    if not words:
        return None
    if words[0] != "set" or len(words) < 3:
        raise InvalidRequest(f"expected `set TIER NAME=VALUE...`, not {' '.join(words)!r}")
    tier = inputs.tier(words[1], inputs.SLABBED)
    wanted: dict[str, float] = {}
    for setting in words[2:]:
        name, equals, value = setting.partition("=")
        if not equals or name not in SETTINGS:
            raise InvalidRequest(f"expected NAME=VALUE with one of {', '.join(SETTINGS)}, not {setting!r}")
        wanted[name] = inputs.size(value) if name == "capacity" else inputs.share(value)
    return tier, wanted


def _set(client: BlockingClient, tier: str, wanted: dict[str, float]) -> None:
    capacity = wanted.get("capacity")
    client.set_tier(
        tier,
        capacity_bytes=None if capacity is None else int(capacity),
        high_watermark=wanted.get("high_watermark"),
        low_watermark=wanted.get("low_watermark"),
    )
