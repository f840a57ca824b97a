"""`cairn match`: how much of a prompt the node has."""

from typing import Annotated

import typer

from server.commands import inputs, output
from server.commands.reach import FAILED, invocation, node


def match(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name.")],
    *,
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", "-k", metavar="HEX,...", help="Keys of a chain; can be given several times."),
    ] = None,
    tokens: Annotated[str, typer.Option(metavar="FILE", help="Token ids of the prompt; - is stdin.")] = "",
    prompt_ids: Annotated[str, typer.Option(metavar="IDS", help="Token ids of the prompt: 1,2,3.")] = "",
) -> None:
    """Say how many blocks of a chain are there, from the first.

    In whatever tier. Fails (1) if not even one is.

    \b
    Examples:
      cairn match llama --tokens prompt.ids
      cairn match llama --prompt-ids 1,15043,3186,29991
      cairn match llama --keys 00112233445566778899aabbccddeeff --json
    """
    given = inputs.keys(keys or [])
    inputs.just_one({"--keys": given, "--tokens": tokens, "--prompt-ids": prompt_ids})
    ids = [] if given else inputs.tokens(tokens, prompt_ids)
    with node(context) as client:
        space = client.find(namespace, inputs.part_of(given))
        chain = inputs.chain(space, given, ids)
        matched = client.match(space, chain)
    matched_tokens = matched * space.namespace.block_tokens
    if invocation(context).json:
        output.emit(
            {
                "namespace": namespace,
                "blocks": len(chain),
                "matched_blocks": matched,
                "matched_tokens": matched_tokens,
                "keys": [key.hex() for key in chain],
            }
        )
    else:
        blocks = output.count_text(len(chain), "block")
        output.say(f"{matched:,} of {blocks}: {output.count_text(matched_tokens, 'token')}")
    if not matched:
        raise typer.Exit(FAILED)
