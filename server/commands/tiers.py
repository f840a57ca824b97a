"""`cairn tiers`: how full each tier is, and its capacity and watermarks while it serves."""

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
    *,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="NAME=VALUE", help=f"Change {', '.join(SETTINGS)}. Needs an admin."),
    ] = None,
    tier: Annotated[str, typer.Option(metavar="TIER", help="Which tier --set is about.")] = "dram",
) -> None:
    """Show how full each tier is, or change one while it serves.

    A changed capacity is reached step by step.

    \b
    Examples:
      cairn tiers
      cairn tiers --set capacity=2GiB --set high_watermark=0.9
    """
    wanted = _wanted(settings or [])
    with node(context) as client:
        if wanted:
            _set(client, tier, wanted)
        rows = client.stat()["tiers"]
    if invocation(context).json:
        output.emit_rows(rows)
    else:
        output.say(tier_table(rows), *_classes(rows), *_remarks(rows))


def tier_table(rows: list[dict[str, Any]]) -> Table:
    shown = output.table("tier", "usage", ">used", ">capacity", ">", ">low", ">high", ">blocks", ">slabs")
    for row in rows:
        share = row["used_bytes"] / row["capacity_bytes"] if row["capacity_bytes"] else 0.0
        shown.add_row(
            row["tier"],
            output.bar(share),
            output.size_text(row["used_bytes"]),
            output.size_text(row["capacity_bytes"]),
            output.share_text(share),
            f"{row['low_watermark']:.0%}",
            f"{row['high_watermark']:.0%}",
            f"{row['blocks']:,}",
            f"{row['slabs']['cut']}/{row['slabs']['cut'] + row['slabs']['spare']}",
        )
    return shown


def _classes(rows: list[dict[str, Any]]) -> list[RenderableType]:
    shown = output.table("tier", ">blocks up to", "usage", ">slots used", ">slabs")
    for row in rows:
        for found in row["classes"]:
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
        if row["target_bytes"] != row["capacity_bytes"]:
            found.append(f"{row['tier']}: on its way to {output.size_text(row['target_bytes'])}")
        if row["draining"]:
            found.append(f"{row['tier']}: {output.count_text(row['draining'], 'block')} wait for their last reader")
        found += [f"{row['tier']}: {reason}" for reason in row["medium"]["reasons"]]
    return found


def _wanted(settings: list[str]) -> dict[str, float]:
    wanted: dict[str, float] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in SETTINGS:
            raise InvalidRequest(f"--set takes NAME=VALUE with one of {', '.join(SETTINGS)}, not {setting!r}")
        wanted[name] = inputs.size(value) if name == "capacity" else inputs.share(value)
    return wanted


def _set(client: BlockingClient, tier: str, wanted: dict[str, float]) -> None:
    capacity = wanted.get("capacity")
    client.set_tier(
        tier,
        capacity_bytes=None if capacity is None else int(capacity),
        high_watermark=wanted.get("high_watermark"),
        low_watermark=wanted.get("low_watermark"),
    )
