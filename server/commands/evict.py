"""`cairn evict`: delete blocks by key, or all of a namespace; from all tiers, from one, or into a lower one."""

from typing import Annotated, Any

import typer

from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace
from kvstore.errors import InvalidRequest
from kvstore.types import DRAM, BlockKey
from server.commands import inputs, output, reach
from server.commands.reach import FAILED, invocation, node

PATIENCE_S = 60.0  # for all blocks of a tier, which the node deletes by itself
STEP_BLOCKS = 1000  # deleted between two looks of the node at its other clients


def evict(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name.")],
    key: Annotated[list[str] | None, typer.Argument(help="Keys of blocks.", metavar="KEY...")] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All blocks of the namespace.")] = False,
    tier: Annotated[str, typer.Option(metavar="TIER", help="From this tier only.")] = "",
    to: Annotated[str, typer.Option(metavar="TIER", help="From DRAM, after writing them into this tier.")] = "",
) -> None:
    """Delete blocks, from all tiers or from one.

    Readers that hold them keep them until they let go. Fails (1) if none of
    the keys is there. With --to they are kept below; one that could not be
    written stays where it is.

    \b
    Examples:
      cairn evict llama 00112233445566778899aabbccddeeff
      cairn evict llama --all
      cairn evict llama --all --tier nvme
      cairn evict llama --all --tier dram --to nvme
    """
    given = inputs.keys(key or [])
    inputs.just_one({"KEY": given, "--all": everything})
    _check(tier, to)
    with node(context, PATIENCE_S if everything and tier else reach.PATIENCE_S) as client:
        space = client.find(namespace, inputs.part_of(given))
        done = _evict(client, space, None if everything else inputs.chain(space, given), tier, to)
    if invocation(context).json:
        output.emit({"namespace": namespace, **done})
    else:
        rest = f"{done['written']:,} written to {to}" if to else output.size_text(done["freed_bytes"])
        output.say(f"evicted {output.count_text(done['blocks'], 'block')}, {rest}")
    if given and not done["blocks"]:
        raise typer.Exit(FAILED)


def _evict(client: BlockingClient, space: OpenSpace, keys: list[BlockKey] | None, tier: str, to: str) -> dict[str, Any]:
    if to:
        demoted = client.demote(space, keys, to, evict=True)
        return {"blocks": demoted.evicted, "written": demoted.written, "tier": str(DRAM), "to": to}
    if keys is None and not tier:
        blocks, freed_bytes = _evict_all(client, space)
        return {"blocks": blocks, "freed_bytes": freed_bytes}
    evicted = client.evict(space, keys, tier)
    found = {"blocks": evicted.blocks, "freed_bytes": evicted.freed_bytes}
    return {**found, "tier": tier} if tier else found


def _check(tier: str, to: str) -> None:
    if tier:
        inputs.tier(tier)
    if to:
        inputs.tier(to, inputs.BELOW)
        if tier not in ("", DRAM):
            raise InvalidRequest(f"--to takes blocks of dram, not of {tier}: `cairn drain {tier}` empties a whole tier")


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
