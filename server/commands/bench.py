"""`cairn bench`: how fast this client gets and puts blocks, by each way to its node, beside what verbs do bare."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from engine_client.address import Address, parse_address
from engine_client.blocking import BlockingClient
from kvstore.errors import ConfigError, InvalidRequest, StoreError
from kvstore.transport.rdma.nic import Opened, open_nics
from kvstore.transport.rdma.topology import has_devices
from kvstore.transport.rdma.verbs import Verbs, VerbsError, load_verbs
from server.commands import inputs, output, reach
from server.commands.loopback import Loopback
from server.commands.reach import NodeCommand, connected, invocation, wanted_transport
from server.commands.transport_bench import MOST_BYTES, Case, Figure, measure

app = typer.Typer(no_args_is_help=True, help="Measure how fast blocks come and go.")

SIZES, BATCHES = "4KiB,64KiB,1MiB,16MiB", "1,16,64"
DEPTH = 128
PATIENCE_S = 30.0
TCP = "tcp://127.0.0.1:7401"
WAYS = ("local", "rdma", "tcp")
NO_DEVICE = "this host has no RDMA device"


@app.command("transport", cls=NodeCommand)
def transport(
    context: typer.Context,
    *,
    size: Annotated[str, typer.Option(metavar="SIZE,...", help="Sizes of a block.")] = SIZES,
    batch: Annotated[str, typer.Option(metavar="COUNT,...", help="Blocks of one call.")] = BATCHES,
    seconds: Annotated[str, typer.Option(metavar="DURATION", help="How long to measure each size and batch.")] = "1s",
    tcp_address: Annotated[
        str, typer.Option(metavar="URL", help="Where the node listens for RDMA and TCP, if it is asked by its socket.")
    ] = TCP,
) -> None:
    """Measure get and put by shared memory, RDMA and TCP, as far as this client has them.

    All ways take turns, so that they meet the same noise; beside them, if there
    is an RDMA device, bare READs of the same sizes between two queue pairs in
    this process. `ratio` is of that floor: 1 is as fast. At most 16 MiB at once
    are put into the node, into a namespace of its own, and evicted again.

    \b
    Examples:
      cairn bench transport
      cairn bench transport --address tcp://10.0.0.7:7401 --json
      cairn bench transport --transport rdma --size 1MiB --batch 16
    """
    cases = _cases(size, batch)
    run_s = inputs.duration(seconds)
    with ExitStack() as stack:
        verbs, missing = _verbs()
        clients = dict(_clients(context, tcp_address, verbs, missing, stack))
        if not clients:
            raise ConfigError("; ".join(f"{way}: {reason}" for way, reason in missing.items()))
        floor = _floor(verbs, max(case.total_bytes for case in cases), missing, stack)
        figures = []
        with output.progress() as shown:
            task = shown.add_task("measuring", total=len(cases))
            for case in cases:
                shown.update(task, description=f"{case.batch} x {output.size_text(case.size)}")
                figures += measure(clients, floor, case, run_s)
                shown.advance(task)
        welcome = next(iter(clients.values())).connect()
    if invocation(context).json:
        output.emit(
            {
                "node": welcome.node,
                "epoch": welcome.epoch,
                "binding": verbs.name if verbs is not None and floor is not None else "",
                "missing": missing,
                "figures": [figure._asdict() for figure in figures],
            }
        )
    else:
        _print(figures, missing)


def _cases(sizes: str, batches: str) -> list[Case]:
    """What is larger than MOST_BYTES in all is left out."""
    try:
        counts = sorted({int(count) for count in batches.split(",")})
    except ValueError as error:
        raise InvalidRequest(f"expected numbers with commas between, not {batches!r}") from error
    cases = [Case(size, count) for size in sorted({inputs.size(size) for size in sizes.split(",")}) for count in counts]
    if any(case.size < 1 or case.batch < 1 for case in cases):
        raise InvalidRequest("sizes and batches begin at 1")
    fitting = [case for case in cases if case.total_bytes <= MOST_BYTES]
    if not fitting:
        raise InvalidRequest(f"at most {output.size_text(MOST_BYTES)} at once: smaller blocks, or fewer")
    return fitting


def _verbs() -> tuple[Verbs | None, dict[str, str]]:
    """The binding, where it is of use; by way why that is missing."""
    if not has_devices():
        return None, {"rdma": NO_DEVICE}
    try:
        return load_verbs(), {}
    except ConfigError as error:
        return None, {"rdma": str(error)}


def _clients(
    context: typer.Context, tcp_address: str, verbs: Verbs | None, missing: dict[str, str], stack: ExitStack
) -> Iterator[tuple[str, BlockingClient]]:
    """A client by each way, all of one start of one node; `missing` says why another way is none."""
    options = invocation(context)
    given, token = reach.target(options)
    wanted = wanted_transport(options)
    if wanted not in ("auto", *WAYS):
        raise ConfigError(f"transport {wanted!r} is none of auto, {', '.join(WAYS)}")
    epoch = None
    for way in WAYS if wanted == "auto" else (wanted,):
        if way in missing:
            continue
        address = _address(way, given, tcp_address)
        if address is None:
            missing[way] = f"{given} is not a socket of this host"
            continue
        if way == "rdma" and address.tls and wanted == "auto":
            missing[way] = "it is not encrypted: --transport rdma takes it all the same"
            continue
        try:
            client = stack.enter_context(connected(context, address, token, way, patience_s=PATIENCE_S, verbs=verbs))
        except StoreError as error:
            if address == given and way != "rdma":
                raise
            missing[way] = str(error)
            continue
        welcome = client.connect()
        if epoch not in (None, (welcome.node, welcome.epoch)):
            missing[way] = f"another node is at {address}: give --tcp-address"
            continue
        epoch = welcome.node, welcome.epoch
        yield way, client


def _address(way: str, given: Address, tcp_address: str) -> Address | None:
    if way == "local":
        return given if given.path else None
    return parse_address(tcp_address) if given.path else given


def _floor(verbs: Verbs | None, size: int, missing: dict[str, str], stack: ExitStack) -> Loopback | None:
    """Bare READs by the first port; none where there is none."""
    if verbs is None:
        return None
    opened: Opened = open_nics(verbs, ())
    stack.callback(opened.close)
    if not opened.nics:
        missing["floor"] = "; ".join(opened.reasons)
        return None
    try:
        floor = Loopback(opened.nics[0], size, DEPTH)
    except VerbsError as error:
        missing["floor"] = str(error)
        return None
    stack.callback(floor.close)
    floor.source[:] = os.urandom(size)
    return floor


def _print(figures: list[Figure], missing: dict[str, str]) -> None:
    shown = output.table(
        ">block", ">batch", "", "way", ">p50 us", ">p99 us", ">GB/s", ">floor us", ">floor GB/s", ">ratio"
    )
    for figure in figures:
        floor: list[Any] = ["-", "-", "-"]
        if figure.floor_us is not None and figure.floor_gb_per_s is not None:
            floor = [f"{figure.floor_us:,.0f}", f"{figure.floor_gb_per_s:,.2f}", f"{figure.ratio:.2f}"]
        shown.add_row(
            output.size_text(figure.size_bytes),
            str(figure.batch),
            figure.call,
            figure.transport,
            f"{figure.p50_us:,.0f}",
            f"{figure.p99_us:,.0f}",
            f"{figure.gb_per_s:,.2f}",
            *floor,
        )
    output.say(shown, *(f"no {way}: {reason}" for way, reason in missing.items()))
