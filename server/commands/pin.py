"""`cairn pin` and `cairn unpin`: keep blocks for a while, and let them go."""

from typing import Annotated

import typer

from server.commands import inputs, output
from server.commands.reach import FAILED, invocation, node


def pin(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name.")],
    key: Annotated[list[str] | None, typer.Argument(help="Keys of a chain, from the first.", metavar="KEY...")] = None,
    *,
    tokens: Annotated[str, typer.Option(metavar="FILE", help="Token ids of a prompt; - is stdin.")] = "",
    prompt_ids: Annotated[str, typer.Option(metavar="IDS", help="Token ids of a prompt: 1,2,3.")] = "",
    hard: Annotated[bool, typer.Option("--hard", help="Never evicted; else last.")] = False,
    ttl: Annotated[str, typer.Option(metavar="DURATION", help="For how long.")] = "10m",
) -> None:
    """Keep blocks of a chain for a while.

    Pins what is there of it, from the first block. Fails (1) if nothing is.

    \b
    Examples:
      cairn pin llama --tokens system-prompt.ids --ttl 12h
      cairn pin llama 00112233445566778899aabbccddeeff --hard --ttl 30m
    """
    given = inputs.keys(key or [])
    inputs.just_one({"KEY": given, "--tokens": tokens, "--prompt-ids": prompt_ids})
    ttl_s = inputs.duration(ttl)
    ids = [] if given else inputs.tokens(tokens, prompt_ids)
    with node(context) as client:
        space = client.find(namespace, inputs.part_of(given))
        chain = inputs.chain(space, given, ids)
        pinned = client.pin(space, chain, hard=hard, ttl_s=ttl_s)
    if invocation(context).json:
        output.emit(
            {
                "namespace": namespace,
                "pin_id": pinned.pin_id,
                "blocks": pinned.blocks,
                "hard": hard,
                "ttl_seconds": ttl_s,
            }
        )
    elif pinned.blocks:
        blocks = output.count_text(len(chain), "block")
        output.say(f"pin {pinned.pin_id}: {pinned.blocks:,} of {blocks}, for {ttl}")
    else:
        output.say("nothing of it is there")
    if not pinned.blocks:
        raise typer.Exit(FAILED)


def unpin(
    context: typer.Context, pin_id: Annotated[int, typer.Argument(min=1, max=2**63 - 1, help="What `cairn pin` said.")]
) -> None:
    """Let go of a pin before its time.

    Fails (1) if there is no such pin (any more).

    \b
    Example:
      cairn unpin 17
    """
    with node(context) as client:
        client.unpin(pin_id)
    if invocation(context).json:
        output.emit({"pin_id": pin_id})
    else:
        output.say(f"pin {pin_id} is gone")
