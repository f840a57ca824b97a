"""`cairn check`: does what the node says of itself agree?"""

import typer

from server.commands import output
from server.commands.reach import FAILED, invocation, node

PATIENCE_S = 60.0  # it reads every block's record


def check(context: typer.Context) -> None:
    """Check the live node: table, slabs and holds must agree.

    Fails (1) if they do not. Needs an admin. The node answers nobody else
    meanwhile.

    \b
    Example:
      cairn check && echo all is well
    """
    with node(context, PATIENCE_S) as client, output.progress() as shown:
        shown.add_task("checking", total=None)
        problems = client.check()
    if invocation(context).json:
        output.emit({"ok": not problems, "problems": problems})
    else:
        output.say(*problems or ["all is well"])
    if problems:
        raise typer.Exit(FAILED)
