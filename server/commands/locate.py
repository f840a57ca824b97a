"""`cairn locate`: which nodes of the cluster have which blocks of a chain."""

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated

import typer

from server.commands import inputs, output
from server.commands.nodes import holders_text
from server.commands.reach import FAILED, invocation, node

Holders = dict[str, list[str]]  # the tiers of each node that has a block


def locate(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name.")],
    key: Annotated[list[str] | None, typer.Argument(help="Keys of a chain, from the first.", metavar="KEY...")] = None,
    *,
    tokens: Annotated[str, typer.Option(metavar="FILE", help="Token ids of a prompt; - is stdin.")] = "",
    prompt_ids: Annotated[str, typer.Option(metavar="IDS", help="Token ids of a prompt: 1,2,3.")] = "",
    parent: Annotated[str, typer.Option(metavar="HEX", help="The key before the first, if a chain goes on here.")] = "",
) -> None:
    """Say which nodes of the cluster have which blocks of a chain.

    As far as the cluster's directory knows: who reads a block looks for
    itself. Fails (1) if nobody has any of them.

    \b
    Examples:
      cairn locate llama --tokens prompt.ids
      cairn locate llama 00112233445566778899aabbccddeeff --json
    """
    given = inputs.keys(key or [])
    inputs.just_one({"KEY": given, "--tokens": tokens, "--prompt-ids": prompt_ids})
    before = [inputs.key(parent)] if parent else []
    ids = [] if given else inputs.tokens(tokens, prompt_ids)
    with node(context) as client:
        space = client.find(namespace, inputs.part_of(given))
        chain = inputs.chain(space, given, ids)
        found = client.whereabouts(space, chain, inputs.chain(space, before)[0] if before else None)
    if invocation(context).json:
        output.emit_rows([{"key": one.hex(), "nodes": holders} for one, holders in zip(chain, found, strict=True)])
    else:
        _print(found)
    if not any(found):
        raise typer.Exit(FAILED)


def runs(found: Sequence[Holders]) -> list[tuple[range, Holders]]:
    """Consecutive blocks that the same nodes have in the same tiers."""
    cut: list[tuple[range, Holders]] = []
    for holders, blocks in groupby(found):
        start = cut[-1][0].stop if cut else 0
        cut.append((range(start, start + len(list(blocks))), holders))
    return cut


def _print(found: Sequence[Holders]) -> None:
    shown = output.table(">blocks", ">count", "nodes")
    for blocks, holders in runs(found):
        numbers = str(blocks[0]) if len(blocks) == 1 else f"{blocks[0]}-{blocks[-1]}"
        shown.add_row(numbers, f"{len(blocks):,}", holders_text(holders) or output.dim("nobody"))
    there = sum(map(bool, found))
    output.say(shown, f"{there:,} of {output.count_text(len(found), 'block')} are in the cluster")
