"""`cairn evict`: delete blocks by key, or all of a namespace."""

from typing import Annotated

import typer

from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace
from server.commands import inputs, output
from server.commands.reach import FAILED, invocation, node

STEP_BLOCKS = 1000  # deleted between two looks of the node at its other clients


def evict(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name.")],
    key: Annotated[list[str] | None, typer.Argument(help="Keys of blocks.", metavar="KEY...")] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All blocks of the namespace.")] = False,
) -> None:
    """Delete blocks.

    Readers that hold them keep them until they let go. Fails (1) if none of
    the keys is there.

    \b
    Examples:
      cairn evict llama 00112233445566778899aabbccddeeff
      cairn evict llama --all
    """
    given = inputs.keys(key or [])
    inputs.just_one({"KEY": given, "--all": everything})
    with node(context) as client:
        space = client.find(namespace, inputs.part_of(given))
        if everything:
            blocks, freed_bytes = _evict_all(client, space)
        else:
            evicted = client.evict(space, inputs.chain(space, given))
            blocks, freed_bytes = evicted.blocks, evicted.freed_bytes
    if invocation(context).json:
        output.emit({"namespace": namespace, "blocks": blocks, "freed_bytes": freed_bytes})
    else:
        output.say(f"evicted {output.count_text(blocks, 'block')}, {output.size_text(freed_bytes)}")
    if given and not blocks:
        raise typer.Exit(FAILED)


def _evict_all(client: BlockingClient, space: OpenSpace) -> tuple[int, int]:
    """In steps, so that the node serves others in between; then whatever is left or came meanwhile at once."""
    total = next((row["blocks"] for row in client.stat()["namespaces"] if row["number"] == space.number), 0)
    blocks = freed_bytes = 0
    with output.progress() as shown:
        task = shown.add_task("evicting blocks", total=total)
        while blocks < total:
            page = client.list_blocks(space, None, STEP_BLOCKS)
            step = client.evict(space, [inputs.key(row["key"]) for row in page.blocks])
            blocks, freed_bytes = blocks + step.blocks, freed_bytes + step.freed_bytes
            shown.update(task, completed=blocks)
            if not step.blocks:
                break
    rest = client.evict(space, None)
    return blocks + rest.blocks, freed_bytes + rest.freed_bytes
