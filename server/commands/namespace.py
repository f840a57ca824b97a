"""`cairn namespace`: say what a name stands for, and look it up."""

from typing import Annotated

import typer

from engine_client.steps import OpenSpace
from kvstore.errors import InvalidRequest
from kvstore.prefix import HASHES, Namespace
from kvstore.wire_cluster import MOST_COPIES
from server.commands import inputs, output
from server.commands.reach import NodeCommand, invocation, node

app = typer.Typer(
    no_args_is_help=True, help="Define and show namespaces: what gives the bytes of blocks their meaning."
)


@app.command("define", cls=NodeCommand)
def define(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What to call it; 128 bytes, no /.")],
    *,
    model: Annotated[str, typer.Option(help="The model's name, as the engines agree on it.")],
    dtype: Annotated[str, typer.Option(help="How values are encoded: bfloat16.")],
    layout: Annotated[str, typer.Option(help="In what order they lie.")],
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")],
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 1,
    block_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Size of a block's part; 0: any.")] = "0",
    revision: Annotated[str, typer.Option(help="Revision of the model.")] = "",
    weights_epoch: Annotated[int, typer.Option(help="Grows when weights change under the same name.")] = 0,
    adapter: Annotated[str, typer.Option(help="LoRA adapter.")] = "",
    hash_name: Annotated[str, typer.Option("--hash", help=f"How keys are made: {', '.join(HASHES)}.")] = "xxh3",
    parts: Annotated[int, typer.Option(help="Writers that each put a slice of every block.")] = 1,
    replicas: Annotated[
        int,
        typer.Option(
            min=-1,
            max=MOST_COPIES,
            help="In a cluster: nodes that shall have each block; 0: by use, -1: as it was said last.",
        ),
    ] = -1,
    through: Annotated[bool, typer.Option("--through", help="With --replicas: commits wait for the copies.")] = False,
) -> None:
    """Say what a name stands for.

    Defining it again is fine; with other fields it fails (1) and says which
    differ.

    \b
    Examples:
      cairn namespace define llama --model meta-llama/Llama-3.1-8B --dtype bfloat16 \\
          --layout layer,kv,token,head,dim --block-tokens 16 --layers 32 --block-bytes 2MiB
      cairn namespace define llama --model m --dtype bfloat16 --layout plain --block-tokens 16 --replicas 2
    """
    if hash_name not in HASHES:
        raise InvalidRequest(f"--hash is one of {', '.join(HASHES)}, not {hash_name!r}")
    try:
        namespace = Namespace(
            model=model,
            revision=revision,
            weights_epoch=weights_epoch,
            dtype=dtype,
            layout=layout,
            block_tokens=block_tokens,
            adapter=adapter,
            hash="sha256" if hash_name == "sha256" else "xxh3",
            parts=parts,
            layers=layers,
            block_bytes=inputs.size(block_bytes),
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    with node(context) as client:
        space = client.open(name, namespace, replicas=replicas, through=through)
    _print(context, space)


@app.command("show", cls=NodeCommand)
def show(context: typer.Context, name: Annotated[str, typer.Argument(help="Its name.")]) -> None:
    """Show what a name stands for.

    Fails (1) if it stands for nothing; `cairn ls` lists all names.

    \b
    Example:
      cairn namespace show llama
    """
    with node(context) as client:
        space = client.find(name)
    _print(context, space)


def _print(context: typer.Context, space: OpenSpace) -> None:
    fields = {field: getattr(space.namespace, field) for field in space.namespace.__struct_fields__}
    if invocation(context).json:
        output.emit({"name": space.name, "fingerprint": space.namespace.fingerprint(), "fields": fields})
        return
    shown = output.table("field", "#value")
    for field, value in fields.items():
        shown.add_row(field, str(value) if value != "" else output.dim("none"))
    output.say(f"{space.name}, fingerprint {space.namespace.fingerprint()}", shown)
