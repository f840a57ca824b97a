"""What is asked of the Conductor and what it answers: requests, routes, refusals.

Times are seconds on the clock of whoever calls; tokens count from the prompt's start.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Names = NDArray[np.uint64]  # of a chain's full blocks, first to last: 64 bits of each key

DEFAULT_OUTPUT_TOKENS: Final = 256  # of a request that does not say how much it wants


def names_of(keys: bytes) -> Names:
    """The names of packed keys, 16 bytes each: their first 8 bytes, little-endian."""
    return np.frombuffer(keys, dtype="<u8")[::2].astype(np.uint64)


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt's full blocks as one kind of holder names them: one block size, one root."""

    names: Names
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt that wants an answer.

    tokens: of the prompt. chains: its blocks, for each way in which the model's holders name them; may be empty.
    output_tokens: how many are expected at most. priority: below 0
    is refused first, above 0 is not held to its tenant's share; 0 is usual.
    deadline_s: when an answer that has not begun is of no use any more; None: the fleet's TTFT SLO decides.
    """

    id: str
    tokens: int
    chains: tuple[Chain, ...]
    arrived_s: float
    output_tokens: int = DEFAULT_OUTPUT_TOKENS
    model: str = ""
    tenant: str = "default"
    session: str = ""
    priority: int = 0
    deadline_s: float | None = None

    @property
    def mean_context(self) -> int:
        """Tokens of it in the middle of its decode."""
        return self.tokens + self.output_tokens // 2


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks [first, stop) of the request's chain number `chain` are to come from node `source` to node `target`."""

    source: str
    target: str
    chain: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a request goes. `decode` equals `prefill` where one instance does both.

    cached_tokens: of the prompt, that need no computing at `prefill` once `pull` is done. Predicted: queue_s until its
    prefill begins, transfer_s of what has to be loaded or pulled, ttft_s to the first token, tbt_s between tokens.
    """

    request: str
    prefill: str
    decode: str
    cached_tokens: int
    pull: Pull | None
    queue_s: float
    transfer_s: float
    prefill_s: float
    ttft_s: float
    tbt_s: float

    @property
    def is_collocated(self) -> bool:
        return self.prefill == self.decode


class Reason(Enum):
    """Why a request was refused."""

    NO_INSTANCE = "no_instance"  # nobody alive serves this model in the roles that it takes
    TTFT = "ttft"  # the first token would come after the SLO or the deadline
    TBT = "tbt"  # the decode pool would fall behind its SLO
    FAIR_SHARE = "fair_share"  # the fleet is busy, and this tenant has more than its share of it


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not now; perhaps after `retry_after_s`."""

    request: str
    reason: Reason
    retry_after_s: float
    ttft_s: float = 0.0  # as predicted for the best place; 0 where there was none
    tbt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request would go where: the decision, and what each instance would have meant, best first."""

    decision: Route | Refusal
    rows: list[dict[str, Any]] = field(default_factory=list)
