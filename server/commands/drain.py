"""`cairn drain`: empty a tier, or a node of the cluster."""

from typing import Annotated

import typer

from engine_client.blocking import BlockingClient
from kvstore.errors import InvalidRequest
from server.commands import inputs, output
from server.commands.reach import FAILED, invocation, node


def drain(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="TIER|NODE", help=f"{', '.join(inputs.SLABBED)}, or a node of the cluster.")
    ],
    *,
    is_node: Annotated[bool, typer.Option("--node", help="It is a node, even if it is called like a tier.")] = False,
) -> None:
    """Empty a tier, or a node of the cluster for maintenance.

    What a tier has and is worth it goes to the next lower one. What only that
    node has goes to others, and it takes no more. Of all tenants; needs an
    admin. Fails (1) if blocks are left: somebody holds them, or the slab that
    they are in; or no other node has room.

    \b
    Examples:
      cairn drain nvme
      cairn drain node-3
      cairn drain dram --json
    """
    kind = "tier" if target in inputs.TIERS and not is_node else "node"
    wanted = inputs.tier(target, inputs.SLABBED) if kind == "tier" else target
    with node(context) as client, output.progress() as shown:
        if kind == "node":
            _check_name(client, wanted, is_node=is_node)
        shown.add_task(f"draining {wanted}", total=None)
        drained = client.drain(node=wanted) if kind == "node" else client.drain(wanted)
    if invocation(context).json:
        output.emit({kind: wanted, "blocks": drained.blocks, "left": drained.left})
    else:
        left = f"; {output.count_text(drained.left, 'block')} left" if drained.left else ""
        output.say(f"{output.count_text(drained.blocks, 'block')} went{left}")
    if drained.left:
        raise typer.Exit(FAILED)


def _check_name(client: BlockingClient, name: str, *, is_node: bool) -> None:
    """Raises InvalidRequest for what is neither a tier nor a node."""
    no_tier = "" if is_node else f"{name!r} is no tier for this: {', '.join(inputs.SLABBED)}; and "
    try:
        names = [row["name"] for row in client.nodes().rows]
    except InvalidRequest as error:
        raise InvalidRequest(f"{no_tier}{error}") from error
    if name not in names:
        raise InvalidRequest(f"{no_tier}there is no node {name!r} in the cluster: {', '.join(names)}")
