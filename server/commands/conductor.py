"""`cairn conductor`: says where requests go, in the foreground."""

import logging
import os

import typer
import uvloop

from server.commands import output
from server.commands.config import ConfigFile
from server.commands.reach import invocation
from server.conductor.settings import ConductorConfig, load

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def conductor(context: typer.Context, *, config: ConfigFile = None) -> None:
    """Run a Conductor in the foreground until SIGTERM or Ctrl-C.

    Instances register there, gateways ask it where a request goes. Every setting
    is an option too. A line on stdout says when it serves, and where; logs go to
    stderr. Settings that are no good end it (2).

    \b
    Examples:
      cairn conductor
      cairn conductor --config cairn.toml --conductor.policy prefix_affinity
      cairn conductor --conductor.nodes a=tcp://10.0.0.7:7401 --conductor.node_token TOKEN --json
    """
    settings = load(config, os.environ, context.args)
    logging.basicConfig(level=settings.log.level.upper(), format=LINE, force=True)
    uvloop.run(_serve(settings, as_json=invocation(context).json))


async def _serve(settings: ConductorConfig, *, as_json: bool) -> None:
    from server.conductor.app import create_app  # the other commands need nothing of it, and it takes a while
    from server.conductor.service import ConductorService
    from server.http_serving import HttpServing, until_signalled

    service = ConductorService(settings)
    serving = HttpServing(create_app(service), "conductor.listen", settings.conductor.listen, service.crashed)
    try:
        await serving.start()
        service.start()
        url = serving.url
        if as_json:
            output.emit({"pid": os.getpid(), "policy": settings.conductor.policy, "addresses": {"http": url}})
        else:
            output.say(f"conductor, policy {settings.conductor.policy}, pid {os.getpid()}, serves at {url}")
        await until_signalled(service.failure)
    finally:
        await serving.stop()
        await service.close()
