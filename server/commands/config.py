"""`cairn config`: every setting of a node, its value and where it is from."""

import os
from pathlib import Path
from typing import Annotated

import typer

from server.commands import output
from server.commands.reach import LocalCommand, invocation
from server.config import origins

app = typer.Typer(no_args_is_help=True, help="Show the settings a node would start with.")

ANY_SETTING = {"allow_extra_args": True, "ignore_unknown_options": True}
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="Settings in TOML.")]


@app.command("show", cls=LocalCommand, context_settings=ANY_SETTING, options_metavar="[OPTIONS] [--a.b.c VALUE]...")
def show(context: typer.Context, *, config: ConfigFile = None) -> None:
    """Show each setting, its value and where it is from.

    Takes what `cairn node` takes, and says what would come of it. Tokens and
    secrets are masked. Settings that are no good end it (2).

    \b
    Examples:
      cairn config show --config node.toml
      cairn config show --config node.toml --tiers.dram.capacity 32GiB --json
    """
    settings = origins(config, os.environ, context.args)
    if invocation(context).json:
        output.emit_rows([setting._asdict() for setting in settings])
        return
    shown = output.table("setting", "value", "from")
    for name, value, origin in settings:
        given = origin != "default"
        shown.add_row(name, value or output.dim("none"), origin if given else output.dim(origin))
    output.say(shown)
