"""How a command finds its node, and how what goes wrong on the way becomes a line and an exit code.

Exit codes: 0 done; 1 the operation failed or says no; 2 bad usage, settings or input; 130 interrupted.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from engine_client.address import Address, discover, parse_address
from engine_client.blocking import BlockingClient
from kvstore.errors import ConfigError, Forbidden, InvalidRequest, StoreError
from kvstore.transport.rdma.verbs import Verbs
from server.commands.inputs import duration
from server.commands.output import complain

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
PANEL = "Which node"
PATIENCE_S = 5.0
TRANSPORT_VARIABLE = "CAIRN_TRANSPORT"
VARIABLES = {"run_dir": "CAIRN_RUN_DIR", "token": "CAIRN_TOKEN", "address": "CAIRN_ADDRESS"}


@dataclass(frozen=True, slots=True)
class Invocation:
    """What every command takes: the options that say which node, and in what form to print."""

    json: bool = False
    address: str = ""
    token: str = ""
    run_dir: str = ""
    timeout: str = ""
    ca_file: str = ""
    transport: str = ""


def _json_option(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: a document, or one a line for lists.")] = False,
) -> None: ...


def _node_options(
    address: Annotated[
        str,
        typer.Option(
            "--address",
            "-a",
            envvar="CAIRN_ADDRESS",
            metavar="URL",
            rich_help_panel=PANEL,
            help="unix:///path, tcp://host:port or tls://host:port. Default: the socket in the run directory.",
        ),
    ] = "",
    token: Annotated[
        str,
        typer.Option(
            envvar="CAIRN_TOKEN",
            metavar="TOKEN",
            rich_help_panel=PANEL,
            help="Who is asking. Others see a command line: rather use the variable.",
        ),
    ] = "",
    run_dir: Annotated[
        str,
        typer.Option(
            envvar="CAIRN_RUN_DIR",
            metavar="DIR",
            rich_help_panel=PANEL,
            help="Where a node of this host keeps its socket and token. Default: as for `cairn node`.",
        ),
    ] = "",
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
            "-t",
            metavar="DURATION",
            rich_help_panel=PANEL,
            help="How long to wait for each answer. Default: 5s, and 1m where the node has much to do.",
        ),
    ] = "",
    ca_file: Annotated[
        str,
        typer.Option(
            metavar="FILE", rich_help_panel=PANEL, help="Authorities to trust for tls://. Default: the system's."
        ),
    ] = "",
    transport: Annotated[
        str,
        typer.Option(
            metavar="auto|local|rdma|tcp",
            rich_help_panel=PANEL,
            help="How to go there. Default: without RDMA; where blocks move, CAIRN_TRANSPORT, else auto.",
        ),
    ] = "",
) -> None: ...


def _options_of(declaration: Any) -> list[Any]:
    app = typer.Typer(add_completion=False)
    app.command()(declaration)
    return list(typer.main.get_command(app).params)


JSON_OPTIONS = _options_of(_json_option)
NODE_OPTIONS = _options_of(_node_options)


class LocalCommand(TyperCommand):
    """A command with --json that asks no node. Its function finds the options as `invocation(context)`."""

    shared: list[Any] = JSON_OPTIONS

    def get_params(self, ctx: Any) -> list[Any]:
        own = super().get_params(ctx)
        return [*own[:-1], *self.shared, *own[-1:]]  # --help stays the last

    def invoke(self, ctx: Any) -> Any:
        given = {option.name: ctx.params.pop(option.name) or option.default for option in self.shared}
        ctx.obj = Invocation(**given)
        try:
            return super().invoke(ctx)
        except StoreError as error:
            complain(error, as_json=ctx.obj.json)
            bad = isinstance(error, ConfigError | InvalidRequest)
            raise typer.Exit(BAD_INPUT if bad else FAILED) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error


class NodeCommand(LocalCommand):
    """A command that asks a node: --address and what goes with it."""

    shared = [*JSON_OPTIONS, *NODE_OPTIONS]  # noqa: RUF012 - never changed


class BareCommand(LocalCommand):
    """A command with no options but its own, whose errors become a line and an exit code all the same."""

    shared: list[Any] = []  # noqa: RUF012 - never changed


def invocation(context: typer.Context) -> Invocation:
    found = context.obj
    assert isinstance(found, Invocation)
    return found


@contextmanager
def node(
    context: typer.Context, patience_s: float = PATIENCE_S, *, moves_blocks: bool = False
) -> Iterator[BlockingClient]:
    """The node that was asked for, connected; `patience_s` per answer where no --timeout is given.

    Whoever `moves_blocks` goes by RDMA where it can, and as CAIRN_TRANSPORT says; others only if --transport says so.

    A token that was found in the run directory goes to nodes of this host only, and over the Unix socket
    only if the node wants one: the file may be of a time before tenants were configured.
    """
    options = invocation(context)
    address, token = target(options)
    transport = options.transport or ("local" if address.path else "tcp")
    if moves_blocks:
        transport = wanted_transport(options)
    with connected(context, address, token, transport, patience_s=patience_s) as client:
        yield client


def wanted_transport(options: Invocation) -> str:
    """Of a command that moves blocks."""
    return options.transport or os.environ.get(TRANSPORT_VARIABLE, "") or "auto"


@contextmanager
def connected(context: typer.Context, address: Address, token: str, transport: str, *, patience_s: float = PATIENCE_S,
              verbs: Verbs | None = None) -> Iterator[BlockingClient]:  # fmt: skip
    """A client of the node at `address`, connected; closed at the end, and when it cannot be."""
    options = invocation(context)
    timeout_s = duration(options.timeout) if options.timeout else patience_s
    name = f"cairn {context.info_name}, pid {os.getpid()}"
    tokens = ["", token] if address.path and token and not options.token else [token]
    while True:
        offered = tokens.pop(0)
        with BlockingClient(str(address), offered, timeout_s=timeout_s, name=name, ca_file=options.ca_file,
                            transport=transport, verbs=verbs) as client:  # fmt: skip
            try:
                client.connect()
            except Forbidden:
                if not tokens:
                    raise
                continue
            yield client
            return


def target(options: Invocation) -> tuple[Address, str]:
    """The node's address, and the token to say there."""
    given = {variable: getattr(options, name) for name, variable in VARIABLES.items() if getattr(options, name)}
    where, token = discover({**os.environ, **given})
    address = parse_address(where)
    if not options.token and not _is_here(address):
        return address, ""
    return address, token


def _is_here(address: Address) -> bool:
    if address.path or address.host == "localhost":
        return True
    try:
        return ip_address(address.host).is_loopback
    except ValueError:
        return False
