"""`cairn ls`: the namespaces, or the blocks of one."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace
from kvstore import wire
from kvstore.types import BlockKey
from server.commands import inputs, output
from server.commands.reach import invocation, node

PAGE = 1000  # blocks asked for at once


def ls(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name; without, namespaces are listed.")] = "",
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="List so many blocks at most; 0: all.")] = 100,
    after: Annotated[str, typer.Option(metavar="HEX", help="Go on after this key.")] = "",
) -> None:
    """List namespaces, or the blocks of one.

    \b
    Examples:
      cairn ls
      cairn ls llama --limit 20
      cairn ls llama --limit 0 --json | jq -r .key
    """
    with node(context) as client:
        if not namespace:
            print_namespaces(context, client.stat()["namespaces"])
            return
        space = client.find(namespace)
        (start,) = inputs.chain(space, [inputs.key(after)]) if after else (None,)
        _list(context, client, space, limit, start)


def print_namespaces(context: typer.Context, rows: Sequence[dict[str, Any]]) -> None:
    if invocation(context).json:
        output.emit_rows(rows)
        return
    shown = output.table("namespace", "tenant", ">blocks", ">block", ">tokens", ">hits", "model", "dtype", "layout")
    for row in rows:
        fields = row["fields"]
        looked_up = row["hit_blocks"] + row["missed_blocks"]
        shown.add_row(
            ", ".join(row["names"]),
            row["tenant"],
            f"{row['blocks']:,}",
            output.size_text(fields["block_bytes"]) if fields["block_bytes"] else "any",
            str(fields["block_tokens"]),
            output.share_text(row["hit_blocks"] / looked_up) if looked_up else "-",
            fields["model"],
            fields["dtype"],
            fields["layout"],
        )
    output.say(shown if rows else "no namespace is defined yet; see `cairn namespace define --help`")


def _list(context: typer.Context, client: BlockingClient, space: OpenSpace, limit: int, after: BlockKey | None) -> None:
    as_json = invocation(context).json
    shown = output.table("#key", ">size", "tier", "state", ">layers", ">holders", "checksum")
    last, more = "", False
    for page in _pages(client, space, limit, after):
        if as_json:
            output.emit_rows(page.blocks)
            continue
        more = page.more
        for row in page.blocks:
            last = row["key"]
            shown.add_row(
                last,
                output.size_text(row["bytes"]),
                row["tier"],
                row["state"],
                f"{row['layers']}/{space.namespace.layers}",
                str(row["holders"]),
                row["checksum"],
            )
    if not as_json:
        output.say(shown if last else "no blocks")
        if more:
            output.say(output.dim(f"there are more: --after {last}, or --limit 0"))


def _pages(client: BlockingClient, space: OpenSpace, limit: int, after: BlockKey | None) -> Iterator[wire.Listed]:
    """Up to `limit` blocks, or all for 0."""
    listed = 0
    while True:
        page = client.list_blocks(space, after, min(PAGE, limit - listed) if limit else PAGE)
        yield page
        listed += len(page.blocks)
        if not page.more or (limit and listed >= limit):
            return
        after = inputs.key(page.blocks[-1]["key"])
