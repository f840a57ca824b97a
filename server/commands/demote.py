"""`cairn demote`: write blocks of DRAM into a lower tier."""

from typing import Annotated

import typer

from kvstore.types import NVME
from server.commands import inputs, output
from server.commands.reach import invocation, node


def demote(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name.")],
    key: Annotated[list[str] | None, typer.Argument(help="Keys of blocks.", metavar="KEY...")] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All blocks of the namespace.")] = False,
    to: Annotated[str, typer.Option(metavar="TIER", help=f"Which tier: {' or '.join(inputs.BELOW)}.")] = str(NVME),
    evict: Annotated[bool, typer.Option("--evict", help="They leave DRAM then.")] = False,
) -> None:
    """Write blocks of DRAM into a lower tier, whether they were used or not.

    What the tier has already is not written again. A tier that is full or
    ailing takes less: the answer counts what was written.

    \b
    Examples:
      cairn demote llama --all
      cairn demote llama 00112233445566778899aabbccddeeff --to object --evict
    """
    given = inputs.keys(key or [])
    inputs.just_one({"KEY": given, "--all": everything})
    tier = inputs.tier(to, inputs.BELOW)
    with node(context) as client, output.progress() as shown:
        shown.add_task(f"writing to {tier}", total=None)
        space = client.find(namespace, inputs.part_of(given))
        demoted = client.demote(space, None if everything else inputs.chain(space, given), tier, evict=evict)
    if invocation(context).json:
        output.emit({"namespace": namespace, "tier": tier, "written": demoted.written, "evicted": demoted.evicted})
    else:
        gone = f", evicted {demoted.evicted:,}" if evict else ""
        output.say(f"wrote {output.count_text(demoted.written, 'block')} to {tier}{gone}")
