"""`cairn drain`: empty a tier."""

from typing import Annotated

import typer

from server.commands import inputs, output
from server.commands.reach import FAILED, invocation, node


def drain(
    context: typer.Context,
    tier: Annotated[str, typer.Argument(help=f"Which tier: {' or '.join(inputs.SLABBED)}.")],
) -> None:
    """Empty a tier; what is worth it goes to the next lower one.

    Of all tenants. Fails (1) if blocks are left: somebody holds them, or the
    slab that they are in. Needs an admin.

    \b
    Examples:
      cairn drain nvme
      cairn drain dram --json
    """
    wanted = inputs.tier(tier, inputs.SLABBED)
    with node(context) as client, output.progress() as shown:
        shown.add_task(f"draining {wanted}", total=None)
        drained = client.drain(wanted)
    if invocation(context).json:
        output.emit({"tier": wanted, "blocks": drained.blocks, "left": drained.left})
    else:
        left = f"; {output.count_text(drained.left, 'block')} left" if drained.left else ""
        output.say(f"{output.count_text(drained.blocks, 'block')} went{left}")
    if drained.left:
        raise typer.Exit(FAILED)
