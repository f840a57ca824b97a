"""The interface of admission."""

from typing import ClassVar, NamedTuple, Protocol

from scheduler.requests import Reason


class Prospect(NamedTuple):
    """What a request would get at its best place: seconds to the first token since it was first asked for, and between
    tokens at its decode instance: with who decodes there now, and with all who were sent there and have not ended. The
    limits are what it may take."""

    ttft_s: float
    present_tbt_s: float
    future_tbt_s: float
    ttft_limit_s: float
    tbt_limit_s: float


class Admission(Protocol):
    """`on_arrival` may refuse before anything is computed, `on_decode` after the prefill, which is then wasted."""

    name: ClassVar[str]

    def on_arrival(self, prospect: Prospect) -> Reason | None: ...

    def on_decode(self, tbt_s: float, tbt_limit_s: float) -> Reason | None: ...
