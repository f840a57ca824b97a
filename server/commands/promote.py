"""`cairn promote`: load blocks of lower tiers into DRAM ahead of need."""

from typing import Annotated

import typer

from server.commands import inputs, output
from server.commands.reach import invocation, node


def promote(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name.")],
    key: Annotated[list[str] | None, typer.Argument(help="Keys of a chain, from the first.", metavar="KEY...")] = None,
    *,
    tokens: Annotated[str, typer.Option(metavar="FILE", help="Token ids of a prompt; - is stdin.")] = "",
    prompt_ids: Annotated[str, typer.Option(metavar="IDS", help="Token ids of a prompt: 1,2,3.")] = "",
    load: Annotated[
        str, typer.Option(metavar="DURATION", help="Leave out what would not be there within this time.")
    ] = "30s",
) -> None:
    """Begin to load what lower tiers have of a chain.

    Does not wait for it. What is in DRAM, or on its way, is not loaded again.

    \b
    Examples:
      cairn promote llama --tokens system-prompt.ids
      cairn promote llama 00112233445566778899aabbccddeeff --load 2s
    """
    given = inputs.keys(key or [])
    inputs.just_one({"KEY": given, "--tokens": tokens, "--prompt-ids": prompt_ids})
    load_s = inputs.duration(load)
    ids = [] if given else inputs.tokens(tokens, prompt_ids)
    with node(context) as client:
        space = client.find(namespace, inputs.part_of(given))
        chain = inputs.chain(space, given, ids)
        loading = client.promote(space, chain, load_s)
    if invocation(context).json:
        output.emit({"namespace": namespace, "blocks": len(chain), "loading": loading})
    else:
        output.say(f"{loading:,} of {output.count_text(len(chain), 'block')} on their way")
