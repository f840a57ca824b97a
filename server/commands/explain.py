"""`cairn explain`: why blocks hit or miss."""

from typing import Annotated, Any

import typer

from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace
from kvstore.errors import InvalidRequest
from kvstore.types import BlockKey
from server.commands import inputs, output
from server.commands.nodes import holders_text
from server.commands.reach import invocation, node


def explain(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name.")],
    key: Annotated[list[str] | None, typer.Argument(help="Keys of blocks.", metavar="KEY...")] = None,
    *,
    tokens: Annotated[str, typer.Option(metavar="FILE", help="Token ids of a prompt; - is stdin.")] = "",
    prompt_ids: Annotated[str, typer.Option(metavar="IDS", help="Token ids of a prompt: 1,2,3.")] = "",
) -> None:
    """Say why blocks hit or miss.

    Which tier has it; or never stored, evicted (when, and by what), refused,
    or being written. With tokens the tenant's other namespaces are looked at
    too, and the field that keeps them apart is named. In a cluster it says
    which nodes have what is missed here.

    \b
    Examples:
      cairn explain llama --tokens prompt.ids
      cairn explain llama 00112233445566778899aabbccddeeff
    """
    given = inputs.keys(key or [])
    inputs.just_one({"KEY": given, "--tokens": tokens, "--prompt-ids": prompt_ids})
    ids = [] if given else inputs.tokens(tokens, prompt_ids)
    with node(context) as client:
        space = client.find(namespace, inputs.part_of(given))
        chain = inputs.chain(space, given, ids)
        rows = client.explain(space, chain, inputs.packed(ids))
        if not all(row["hit"] for row in rows):
            _add_nodes(client, space, chain, rows)
    if invocation(context).json:
        output.emit_rows(rows)
    else:
        _print(rows)


def _add_nodes(client: BlockingClient, space: OpenSpace, chain: list[BlockKey], rows: list[dict[str, Any]]) -> None:
    """To each row the nodes of the cluster that have the block; nothing where the node is in no cluster."""
    try:
        found = client.whereabouts(space, chain)
    except InvalidRequest:
        return
    for row, holders in zip(rows, found, strict=True):
        row["nodes"] = holders


def _print(rows: list[dict[str, Any]]) -> None:
    shown = output.table(">block", "#key", "hit", "tier", ">size", "#why")
    for position, row in enumerate(rows):
        shown.add_row(
            str(position),
            row["key"],
            "hit" if row["hit"] else "miss",
            row["tier"],
            output.size_text(row["bytes"]) if row["hit"] else "",
            row["reason"] + _elsewhere(row),
        )
    hits = sum(row["hit"] for row in rows)
    first = next((position for position, row in enumerate(rows) if not row["hit"]), len(rows))
    output.say(shown, f"{hits:,} of {output.count_text(len(rows), 'block')} are there; a reader gets {first:,}")


def _elsewhere(row: dict[str, Any]) -> str:
    return f"; on {holders_text(row['nodes'])}" if not row["hit"] and row.get("nodes") else ""
