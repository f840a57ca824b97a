"""`cairn replicate`: more copies of blocks in the cluster, ahead of need."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from kvstore.types import BlockKey
from kvstore.wire_cluster import MOST_COPIES
from server.commands import inputs, output
from server.commands.reach import FAILED, invocation, node

STEP_BLOCKS = 256  # asked for at once: the bar moves by so many


def replicate(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name.")],
    key: Annotated[
        list[str] | None, typer.Argument(help="Keys of blocks; without, all of the namespace.", metavar="[KEY...]")
    ] = None,
    *,
    copies: Annotated[
        int, typer.Option(min=1, max=MOST_COPIES, help="How many nodes shall have each block, this one included.")
    ],
    tokens: Annotated[str, typer.Option(metavar="FILE", help="Token ids of a prompt; - is stdin.")] = "",
    prompt_ids: Annotated[str, typer.Option(metavar="IDS", help="Token ids of a prompt: 1,2,3.")] = "",
) -> None:
    """Have at least so many copies of blocks in the cluster.

    Of those that the node that is asked has, and without waiting for readers
    to want them. Fails (1) if blocks are left with fewer copies, or if the
    node has none of those that were named: cairn locate says who has.

    \b
    Examples:
      cairn replicate llama --tokens system-prompt.ids --copies 3
      cairn replicate llama --copies 2
    """
    given = inputs.keys(key or [])
    ways: dict[str, object] = {"KEY": given, "--tokens": tokens, "--prompt-ids": prompt_ids}
    is_whole = not any(ways.values())
    if not is_whole:
        inputs.just_one(ways)
    ids = [] if given or is_whole else inputs.tokens(tokens, prompt_ids)
    looked_at = copied = short = 0
    with node(context) as client, output.progress() as shown:
        space = client.find(namespace, inputs.part_of(given))
        chain = None if is_whole else inputs.chain(space, given, ids)
        task = shown.add_task("copying", total=None if chain is None else len(chain))
        for step in _steps(chain):
            done = client.replicate(space, step, copies)
            looked_at, copied, short = looked_at + done.blocks, copied + done.copied, short + done.short
            shown.advance(task, len(step or ()))
    _print(context, namespace, copies, (looked_at, copied, short))
    if short or not (looked_at or is_whole):
        raise typer.Exit(FAILED)


def _steps(chain: Sequence[BlockKey] | None) -> Iterator[Sequence[BlockKey] | None]:
    if chain is None:
        yield None
        return
    for start in range(0, len(chain), STEP_BLOCKS):
        yield chain[start : start + STEP_BLOCKS]


def _print(context: typer.Context, namespace: str, copies: int, counts: tuple[int, int, int]) -> None:
    looked_at, copied, short = counts
    if invocation(context).json:
        output.emit({"namespace": namespace, "copies": copies, "blocks": looked_at, "copied": copied, "short": short})
        return
    left = f"; {output.count_text(short, 'block')} with fewer than {copies}" if short else ""
    made = f"{copied:,} {'copy' if copied == 1 else 'copies'}"
    output.say(f"made {made} of {output.count_text(looked_at, 'block')}{left}")
