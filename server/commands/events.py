"""`cairn events`: what happens to blocks, as it happens."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

import typer

from engine_client.subscription import Standing, Update, subscribe
from kvstore.errors import Forbidden
from kvstore.wire_events import BlockEvent
from server.commands import output
from server.commands.reach import invocation, node, target


def events(
    context: typer.Context,
    namespace: Annotated[str, typer.Argument(help="Of this namespace only; without, of all.")] = "",
    *,
    everything: Annotated[bool, typer.Option("--all", help="Begin with the blocks that are there already.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="End after so many events; 0: go on.")] = 0,
) -> None:
    """Watch blocks come to tiers and go from them.

    Ctrl-C ends it. It goes on when the node cannot be reached, and says so:
    while it is not exact, events may be missing.

    \b
    Examples:
      cairn events
      cairn events llama --all --limit 100
      cairn events --json | jq -r .key
    """
    options = invocation(context)
    names: dict[int, str] = {}
    with node(context) as client:
        if namespace:
            client.find(namespace)
        names |= {row["number"]: row["names"][0] for row in client.stat()["namespaces"]}
    asyncio.run(
        _follow(_Printer(names, as_json=options.json), _updates(context, namespace), limit, everything=everything)
    )


async def _updates(context: typer.Context, namespace: str) -> AsyncIterator[Update]:
    """With the token that was found in the run directory only if the node wants one: see `reach.node`."""
    options = invocation(context)
    address, token = target(options)
    name = f"cairn events, pid {os.getpid()}"
    tokens = ["", token] if address.path and token and not options.token else [token]
    while tokens:
        offered = tokens.pop(0)
        try:
            async with aclosing(
                subscribe(str(address), offered, namespace, ca_file=options.ca_file, name=name)
            ) as found:
                async for update in found:
                    yield update
        except Forbidden:
            if not tokens:
                raise


class _Printer:
    def __init__(self, names: dict[int, str], *, as_json: bool) -> None:
        self._names = names
        self._as_json = as_json

    def standing(self, standing: Standing) -> None:
        if self._as_json:
            output.emit({"type": standing.value})
        else:
            output.say(output.dim(f"-- {standing.value}"))

    def event(self, event: BlockEvent) -> None:
        name = self._names.get(event.namespace, f"number {event.namespace}")
        kind = "stored" if event.is_stored else "removed"
        row: dict[str, Any] = {"type": kind, "namespace": name, "tier": event.tier, "key": event.key.hex()}
        if self._as_json:
            parent = event.parent.hex() if event.parent is not None else ""
            output.emit({**row, "parent": parent, "bytes": event.size})
        else:
            size = f"  {output.size_text(event.size)}" if event.is_stored else ""
            output.say(f"{kind:<8}{event.tier:<6}{event.key.hex()}  {name}{size}")


async def _follow(printer: _Printer, updates: AsyncIterator[Update], limit: int, *, everything: bool) -> None:
    """What happens after the first moment that is exact; with `everything`, from the first snapshot on."""
    standing, has_begun, shown = Standing.DEGRADED, everything, 0
    async for update in updates:
        if has_begun:
            for event in update.events:
                printer.event(event)
                shown += 1
                if shown == limit:
                    return
        if update.standing is not standing:
            standing = update.standing
            printer.standing(standing)
        has_begun = has_begun or standing is Standing.EXACT
