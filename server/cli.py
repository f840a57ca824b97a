"""The command `cairn`: which commands there are. Exit codes: 0 done, 1 failed or no, 2 bad usage or input."""

import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvstore.errors import ConfigError
from server.commands import (
    bench,
    calibrate,
    check,
    conductor,
    config,
    demote,
    doctor,
    drain,
    events,
    evict,
    explain,
    gateway,
    get,
    locate,
    ls,
    match,
    namespace,
    node,
    nodes,
    pin,
    promote,
    put,
    replicate,
    simulate,
    stat,
    tiers,
    top,
    trace,
    worker,
)
from server.commands.reach import BareCommand, LocalCommand, NodeCommand

app = typer.Typer(
    name="cairn",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)

PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Blocks": {
        "put": put.put,
        "get": get.get,
        "match": match.match,
        "ls": ls.ls,
        "evict": evict.evict,
        "pin": pin.pin,
        "unpin": pin.unpin,
        "explain": explain.explain,
        "locate": locate.locate,
    },
    "Watch and operate": {
        "stat": stat.stat,
        "top": top.top,
        "nodes": nodes.nodes,
        "events": events.events,
        "tiers": tiers.tiers,
        "promote": promote.promote,
        "demote": demote.demote,
        "replicate": replicate.replicate,
        "drain": drain.drain,
        "check": check.check,
    },
}
SERVE, OPERATE = "Serve", "Watch and operate"


def _show_version(*, wanted: bool | None) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"cairn {version('cairn-kv')}")
    except PackageNotFoundError:
        typer.echo("cairn, not installed")
    raise typer.Exit


@app.callback()
def cairn(
    *,
    show_version: Annotated[
        bool | None, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = None,
) -> None:
    """Cairn keeps the KV cache of LLM engines: a prompt's prefix is computed once and used by all on the host.

    \b
    A first look:
      cairn node &
      cairn stat
      cairn top
    """


class ServiceGroup(TyperGroup):
    """A service that has commands beside it: without the name of one it serves, whatever settings follow."""

    default = "serve"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def _serves(into: typer.Typer, name: str, command: Callable[..., None]) -> None:
    """A command that runs a service: all of its settings are options."""
    into.command(
        name,
        cls=LocalCommand,
        rich_help_panel=SERVE,
        context_settings=config.ANY_SETTING,
        options_metavar="[OPTIONS] [--a.b.c VALUE]...",
    )(command)


_serves(app, "node", node.node)
_serves(app, "gateway", gateway.gateway)
_serves(app, "worker", worker.worker)
conducting = typer.Typer(cls=ServiceGroup, help="Say where requests go, and measure what they cost.")
_serves(conducting, ServiceGroup.default, conductor.conductor)
conducting.command("calibrate", cls=LocalCommand)(calibrate.calibrate_)
app.add_typer(conducting, name="conductor", rich_help_panel=SERVE)


@app.command("demo", cls=BareCommand, rich_help_panel=SERVE, context_settings=config.ANY_SETTING, add_help_option=False)
def demo(context: typer.Context) -> None:
    """One process computes a prompt's prefix, another decodes from it; needs the extra `engine`.

    \b
    Example:
      cairn demo
    """
    try:
        module = importlib.import_module("server.commands.demo")
    except ModuleNotFoundError as error:
        raise ConfigError(f"the demo needs {error.name}: pip install 'cairn-kv[engine]'") from error
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command("demo", cls=BareCommand)(module.demo)
    inner(args=context.args, prog_name="cairn demo")


app.add_typer(config.app, name="config", rich_help_panel=SERVE)
for panel, commands in PANELS.items():
    for name, command in commands.items():
        app.command(name, cls=NodeCommand, rich_help_panel=panel)(command)
app.add_typer(namespace.app, name="namespace", rich_help_panel="Blocks")
app.add_typer(bench.app, name="bench", rich_help_panel="Watch and operate")
app.add_typer(trace.app, name="trace", rich_help_panel="Watch and operate")
app.command("simulate", cls=LocalCommand, rich_help_panel=OPERATE)(simulate.simulate)
app.command(
    "doctor",
    cls=NodeCommand,
    rich_help_panel=OPERATE,
    context_settings=config.ANY_SETTING,
    options_metavar="[OPTIONS] [--a.b.c VALUE]...",
)(doctor.doctor)


def main() -> None:
    """The entry point; ends the process."""
    app(prog_name="cairn")


if __name__ == "__main__":
    main()
