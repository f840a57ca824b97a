"""What `cairn doctor` says of one thing that it looked at."""

from typing import Literal, NamedTuple

State = Literal["ok", "note", "broken"]


class Finding(NamedTuple):
    """One thing that was looked at. A `note` works, and could be better or is not needed; `advice` says what to do."""

    name: str
    state: State
    found: str
    advice: str = ""
