"""`cairn node`: a node in the foreground."""

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING

import typer
import uvloop
from rich.console import Console

from kvstore.errors import ConfigError
from kvstore.types import DRAM
from server.commands import output
from server.commands.config import ConfigFile
from server.commands.reach import invocation
from server.config import Config, load

if TYPE_CHECKING:
    from server.node import Node

log = logging.getLogger("cairn.node")

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOOK_S = 0.2  # between two looks at how much memory is ready


def node(context: typer.Context, *, config: ConfigFile = None) -> None:
    """Run a node in the foreground until SIGTERM or Ctrl-C.

    Every setting is an option too: `cairn config show` lists them. A line on
    stdout says when the node serves, and where; logs go to stderr. Settings
    that are no good end it (2).

    \b
    Examples:
      cairn node
      cairn node --config node.toml
      cairn node --tiers.dram.capacity 32GiB --node.tcp_listen 10.0.0.7:7401 --json
    """
    settings = load(config, os.environ, context.args)
    console = output.stderr()
    _log_to(console, settings.log.level)
    raise typer.Exit(uvloop.run(_serve(settings, console, as_json=invocation(context).json)))


async def _serve(settings: Config, console: Console, *, as_json: bool) -> int:
    from server.node import Node  # the other commands need nothing of it, and it takes a while

    try:
        found = Node(settings)
    except OSError as error:
        raise ConfigError(f"node.run_dir {settings.node.run_dir}: {error.strerror}") from error
    memory: list[asyncio.Task[None]] = []

    def ready() -> None:
        _announce(found, as_json=as_json)
        if console.is_terminal:
            memory.append(asyncio.ensure_future(_show_memory(found)))

    try:
        return await found.serve(ready)
    finally:
        for task in memory:
            task.cancel()


def _announce(found: "Node", *, as_json: bool) -> None:
    """Say where it serves: on stdout, and to a supervisor that listens (systemd's Type=notify)."""
    name, addresses = found.config.node.name, found.addresses
    if as_json:
        output.emit({"node": name, "epoch": found.epoch, "pid": os.getpid(), "addresses": addresses})
    else:
        places = ", ".join(addresses.values())
        output.say(f"node {name}, epoch {found.epoch}, pid {os.getpid()}, serves at {places}")
    place = os.environ.get("NOTIFY_SOCKET", "")
    if place:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.sendto(b"READY=1", "\0" + place[1:] if place.startswith("@") else place)
        except OSError as error:
            log.warning("NOTIFY_SOCKET %s: %s", place, error.strerror)


async def _show_memory(found: "Node") -> None:
    """A bar while memory is made ready, beside serving."""
    resized = found.upkeep.resized
    with output.progress() as shown:
        task = shown.add_task("memory, in slabs")
        while not resized.is_set():
            tier = found.store.table.tiers[DRAM]
            shown.update(task, total=found.store.sizings[DRAM].target, completed=len(tier.pool.slabs))
            try:
                await asyncio.wait_for(resized.wait(), LOOK_S)
            except TimeoutError:
                continue


class _ConsoleLog(logging.Handler):
    """Log lines by way of the console, above a bar if there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


def _log_to(console: Console, level: str) -> None:
    handler = _ConsoleLog(console)
    handler.setFormatter(logging.Formatter(LINE))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
