"""`cairn get`: the bytes of one block, verified."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import InvalidRequest
from server.commands import inputs, output
from server.commands.reach import invocation, node

STDOUT = Path("-")


def get(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Its name.")],
    key: Annotated[str, typer.Argument(help="32 hex digits, or 36 with the part.")],
    *,
    target: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the bytes go; - is stdout.")
    ] = STDOUT,
) -> None:
    """Get the bytes of a block.

    Fails (1) if it is not there; `cairn explain` says why. A block of a lower
    tier is loaded first, which may take half of --timeout.

    \b
    Examples:
      cairn get llama 00112233445566778899aabbccddeeff -o block.kv
      cairn get llama 00112233445566778899aabbccddeeff | sha256sum
    """
    as_json = invocation(context).json
    if target == STDOUT and as_json:
        raise InvalidRequest("--json says where the bytes went: give --output FILE with it")
    if target == STDOUT and sys.stdout.isatty():
        raise InvalidRequest("the bytes of a block are nothing for a terminal: give --output FILE")
    found = inputs.key(key)
    with node(context, moves_blocks=True) as client:
        space = client.find(namespace, inputs.part_of([found]))
        (found,) = inputs.chain(space, [found])
        block = client.get_bytes(space, found)
    if target == STDOUT:
        sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()
        return
    try:
        target.write_bytes(block)
    except OSError as error:
        raise InvalidRequest(f"{target}: {error.strerror}") from error
    if as_json:
        output.emit({"namespace": namespace, "key": found.hex(), "bytes": len(block), "file": str(target)})
    else:
        output.say(f"{output.size_text(len(block))} in {target}")
