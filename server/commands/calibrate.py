"""`cairn conductor calibrate`: what prefill and decode cost on a running engine, for the Conductor to reckon with."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.table import Table

from kvstore.errors import InvalidRequest
from server.commands import inputs, output
from server.commands.reach import invocation
from server.conductor.calibration import Calibration, Engine, Plan, Sample, calibrate
from server.gateway.upstream import Upstream


def calibrate_(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the engine: http://host:port, without /v1.")],
    *,
    model: Annotated[str, typer.Option(metavar="NAME", help="Default: the first that the engine serves.")] = "",
    max_tokens: Annotated[int, typer.Option(metavar="N", help="The longest prompt.")] = 8192,
    max_batch: Annotated[int, typer.Option(metavar="N", help="The most streams at once.")] = 16,
    repeats: Annotated[int, typer.Option(metavar="N", help="Of each measurement.")] = 3,
    steps: Annotated[int, typer.Option(metavar="N", help="Tokens of each stream that are measured.")] = 32,
    vocabulary: Annotated[
        int, typer.Option(metavar="N", help="Ids of prompts are from 1000 to below this: all must be the model's.")
    ] = 10_000,
    api_key: Annotated[
        str, typer.Option(envvar="CAIRN_ENGINE_KEY", metavar="KEY", help="The engine's; rather use the variable.")
    ] = "",
    wait: Annotated[str, typer.Option(metavar="DURATION", help="For each answer, at most.")] = "2m",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON there too.")] = None,
) -> None:
    """Measure an engine over its OpenAI API and fit the costs of prefill and decode.

    It should have nothing else to do meanwhile. Its prefix cache is filled with
    random prompts. What is printed can be given to the engine's registration
    (`prefill`, `decode`). Fails (1) when the engine cannot be reached, and (2)
    when it refuses what is asked, like prompts longer than its model takes.

    \b
    Examples:
      cairn conductor calibrate http://127.0.0.1:8100
      cairn conductor calibrate http://10.0.0.7:8000 --max-tokens 65536 --max-batch 64
      cairn conductor calibrate http://127.0.0.1:8100 --json --out costs.json
    """
    plan = Plan(max_tokens, max_batch, repeats, steps, vocabulary)
    wait_s = inputs.duration(wait)
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise InvalidRequest(f"expected http://host:port, not {url!r}")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise InvalidRequest(f"{out} cannot be written: its folder is not there, or it is one")
    with output.progress() as shown:
        task = shown.add_task("warming up", total=plan.total)

        def told(text: str) -> None:
            shown.update(task, description=text, advance=1)

        found = asyncio.run(_measure(url, model, api_key, wait_s, plan, told))
    document = {"url": url, **found.document()}
    if out is not None:
        _write(out, document)
    if invocation(context).json:
        output.emit(document)
    else:
        _print(found, document)


async def _measure(
    url: str, model: str, key: str, wait_s: float, plan: Plan, told: Callable[[str], None]
) -> Calibration:
    upstream = Upstream()
    try:
        engine = Engine(upstream, url, key, wait_s)
        return await calibrate(engine, model or await engine.first_model(), plan, random.Random(), told)
    finally:
        await upstream.close()


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(document, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from error


def _print(found: Calibration, document: dict[str, Any]) -> None:
    output.say(
        f"{found.model}, {output.count_text(len(found.prefills), 'prefill')} and "
        f"{output.count_text(len(found.steps), 'round')} of decode measured",
        "",
        _table(("tokens", "cached"), found.prefills, found.prefill.seconds),
        _residual_text(document["residuals"]["prefill"]),
        "",
        _table(("streams", "context"), found.steps, found.decode.seconds),
        _residual_text(document["residuals"]["decode"]),
        "",
        *(output.alarm(note) for note in found.notes),
        f'"prefill": {json.dumps(document["prefill"])}',
        f'"decode": {json.dumps(document["decode"])}',
    )


def _table(columns: tuple[str, str], samples: Sequence[Sample], predicted: Callable[[float, float], float]) -> Table:
    """One row for each place: the median of its measurements, and what the fitted cost says."""
    table = output.table(*(f">{column}" for column in columns), ">measured ms", ">predicted ms", ">error")
    places: dict[tuple[int, int], list[float]] = {}
    for first, second, seconds in samples:
        places.setdefault((round(first), round(second)), []).append(seconds)
    for place, times in sorted(places.items()):
        measured_s, predicted_s = median(times), predicted(*place)
        error = f"{predicted_s / measured_s - 1:+.0%}"
        row = (*(f"{each:,}" for each in place), f"{measured_s * 1e3:,.1f}", f"{predicted_s * 1e3:,.1f}", error)
        table.add_row(*row)
    return table


def _residual_text(residuals: dict[str, float]) -> str:
    return f"off by {residuals['median']:.1%} in the median, by {residuals['p90']:.1%} at the 90th percentile"
