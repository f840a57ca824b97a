"""`cairn gateway`: OpenAI's API in front of engines, in the foreground."""

import logging
import os

import typer
import uvloop

from server.commands import output
from server.commands.config import ConfigFile
from server.commands.reach import invocation
from server.gateway.settings import GatewayConfig, load

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def gateway(context: typer.Context, *, config: ConfigFile = None) -> None:
    """Run a gateway in the foreground until SIGTERM or Ctrl-C.

    Serves OpenAI's API and sends each request to the engines that the Conductor
    chooses: vLLM, SGLang and `cairn worker`, prefill and decode apart or in one.
    Every setting is an option too. A line on stdout says when it serves, and
    where; logs go to stderr. Settings that are no good end it (2).

    \b
    Examples:
      cairn gateway
      cairn gateway --gateway.conductor http://10.0.0.2:7410 --gateway.listen 0.0.0.0:8000
      cairn gateway --config cairn.toml --json
    """
    settings = load(config, os.environ, context.args)
    logging.basicConfig(level=settings.log.level.upper(), format=LINE, force=True)
    uvloop.run(_serve(settings, as_json=invocation(context).json))


async def _serve(settings: GatewayConfig, *, as_json: bool) -> None:
    from server.gateway.service import Gateway
    from server.http_serving import until_signalled  # the other commands need nothing of it

    found = Gateway(settings)
    try:
        await found.start()
        if as_json:
            output.emit({"pid": os.getpid(), "conductor": settings.gateway.conductor, "addresses": {"http": found.url}})
        else:
            output.say(f"gateway, pid {os.getpid()}, serves at {found.url}, asks {settings.gateway.conductor}")
        await until_signalled(found.failure)
    finally:
        await found.stop()
