"""How commands print: JSON for scripts; tables, bars and progress for people."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvstore.errors import Rejected, StoreError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
PIPE_COLUMNS = 160  # where nobody looks at the width, rows stay in one line
ALARM, WARNING = 0.95, 0.85  # shares from which a bar is red and yellow


def emit(document: Any) -> None:
    """One JSON document on a line of stdout."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def emit_rows(rows: Sequence[Any]) -> None:
    """JSON lines."""
    for row in rows:
        emit(row)


def say(*parts: RenderableType) -> None:
    """Tables and lines for people, on stdout; text is not taken for markup."""
    console = stdout()
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def stdout() -> Console:
    """As wide as the terminal, or as what COLUMNS says."""
    console = Console(highlight=False)
    if not console.is_terminal and console.width == 80:
        console.width = PIPE_COLUMNS
    return console


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def complain(error: StoreError, *, as_json: bool) -> None:
    """One line on stderr; with `as_json` a document on stdout too, so that stdout always has one."""
    stderr().print(f"error[{error.code}]: {error}", markup=False, soft_wrap=True)
    if as_json:
        problem: dict[str, Any] = {"code": error.code, "message": str(error), "retryable": error.retryable}
        if isinstance(error, Rejected):
            problem["retry_after_s"] = error.retry_after_s
        emit({"error": problem})


def progress(*, shown: bool = True) -> Progress:
    """A bar on stderr that is gone when it is done; nothing at all when nobody watches."""
    console = stderr()
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )


def table(*columns: str) -> Table:
    """Columns named ">..." hold numbers, those named "#..." keys that must be copied whole."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        number, key = column.startswith(">"), column.startswith("#")
        made.add_column(
            column.lstrip(">#"),
            justify="right" if number else "left",
            no_wrap=number,
            overflow="fold" if key else "ellipsis",
        )
    return made


def bar(share: float, width: int = 24, *, alarming: bool = True) -> ProgressBar:
    """A share of 1 as a bar; where much is bad, in the colour of how bad it is."""
    colour = "red" if alarming and share >= ALARM else "yellow" if alarming and share >= WARNING else "green"
    return ProgressBar(1.0, min(max(share, 0.0), 1.0), width=width, complete_style=colour, finished_style=colour)


def dim(text: str) -> Text:
    return Text(text, style="dim")


def alarm(text: str) -> Text:
    return Text(text, style="bold red")


def size_text(size_bytes: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    power = 0
    while abs(size_bytes) >= 1024 and power < len(UNITS) - 1:
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:.0f} B" if not power else f"{size_bytes:.1f} {UNITS[power]}"


def share_text(share: float) -> str:
    return f"{share:.1%}"


def rate_text(bytes_per_s: float | None) -> str:
    """Bytes a second for people; nothing where none was measured."""
    return f"{size_text(bytes_per_s)}/s" if bytes_per_s else "-"


def count_text(count: int, noun: str) -> str:
    """A count with its noun: "1 block", "1,024 blocks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
