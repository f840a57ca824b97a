"""`cairn worker`: an engine in the foreground, OpenAI-compatible, in front of a store."""

import asyncio
import logging
import os

import typer

from server.commands import output
from server.commands.config import ConfigFile
from server.commands.node import LINE
from server.commands.reach import invocation

QUIET = {  # unless the environment says otherwise; set before torch is imported
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads would take the cores from other processes
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}


def worker(context: typer.Context, *, config: ConfigFile = None) -> None:
    """Run a model in the foreground until SIGTERM or Ctrl-C; needs the extra `engine`.

    It answers OpenAI's API. With --worker.node prefixes come from the store
    and go to it; with --worker.conductor it registers itself. A line on
    stdout says when it serves, and where; logs go to stderr. Settings that
    are no good end it (2).

    \b
    Examples:
      cairn worker
      cairn worker --worker.node unix:///run/cairn/node.sock
      cairn worker --worker.role decode --worker.listen 127.0.0.1:8101 --json
    """
    from server.worker.model import load_model, measure
    from server.worker.service import Worker
    from server.worker.settings import load

    given = load(config, os.environ, context.args)
    logging.basicConfig(level=given.log.level.upper(), format=LINE, force=True)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    model = load_model(given.worker)
    costs = measure(model.engine)

    async def serve() -> int:
        found = Worker(given.worker, model, costs)

        def ready() -> None:
            settings = given.worker
            if invocation(context).json:
                row = {"worker": settings.name, "role": settings.role, "model": model.name, "pid": os.getpid()}
                output.emit(row | {"addresses": {"http": found.url}})
            else:
                who = f"worker {settings.name} ({settings.role}, {model.name}), pid {os.getpid()},"
                output.say(f"{who} serves at {found.url}")

        return await found.serve(ready)

    raise typer.Exit(asyncio.run(serve()))
