"""What the event loop and the engine's thread tell each other of a request."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from engine_client.adapters.batching import Running

Reason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class Ended:
    """The last that is heard of a request. `message` says what went wrong with "error"."""

    reason: Reason
    message: str = ""


@dataclass(slots=True, eq=False)
class Job:
    """One request: made by the event loop, computed by the engine's thread, and its events read by the event loop.

    is_stored: another worker has computed its prompt, so that the store is asked at once, before its turn.
    is_handed_over: it ends only when its prompt's KV is in the store.
    """

    running: "Running"
    max_tokens: int
    ends: frozenset[int]  # tokens that end it
    is_stored: bool = False
    is_handed_over: bool = False
    events: "asyncio.Queue[int | Ended]" = field(default_factory=asyncio.Queue)  # tokens, then one Ended
    began_s: float = 0.0  # by the event loop's clock
    ended: Ended | None = None  # the last of `events`, once it is among them
    cached_tokens: int = 0
    given_tokens: int = 0
    is_cancelled: bool = False
    is_stopped: bool = False  # by a stop string: it may be computed a little further

    @property
    def prompt_tokens(self) -> int:
        return len(self.running.tokens)

    @property
    def most_tokens(self) -> int:
        """Of KV that it can come to."""
        return self.prompt_tokens + self.max_tokens

    def ended_by(self, token: int, given: int) -> Reason | None:
        """Why `token`, the last of `given`, ends it."""
        if token in self.ends:
            return "stop"
        return "length" if given >= self.max_tokens else None
