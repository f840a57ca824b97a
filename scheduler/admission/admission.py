"""The interface of admission."""

from typing import ClassVar, NamedTuple, Protocol

from scheduler.decode_pool import DecodePool
from scheduler.requests import Reason


class Prospect(NamedTuple):
    """What a request that is asked for `now` would get at its best place: seconds to the first token, and when that is;
    seconds between tokens at the decode instance as it is now. The limits are what it may take."""

    now: float
    ttft_s: float
    first_token_s: float
    tbt_s: float
    context: int  # tokens at its end
    ttft_limit_s: float
    tbt_limit_s: float


class Admission(Protocol):
    """`on_arrival` may refuse before anything is computed, `on_decode` after the prefill, which is then wasted."""

    name: ClassVar[str]

    def on_arrival(self, prospect: Prospect, pool: DecodePool) -> Reason | None: ...

    def on_decode(self, tbt_s: float, tbt_limit_s: float) -> Reason | None: ...
