"""What work costs in seconds: prefill by length and cached length, a decode step by batch and context, a transfer."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds to compute the last n - p of n tokens when p are cached: a polynomial in m = n - p and p.

        base_s + per_token_s * m + per_square_s * m * m + per_product_s * m * p

    The last two are attention: of new tokens to each other, and to cached ones. No coefficient is negative.
    """

    base_s: float
    per_token_s: float
    per_square_s: float
    per_product_s: float

    def seconds(self, tokens: float, cached: float) -> float:
        computed = tokens - cached
        return self.base_s + computed * (self.per_token_s + computed * self.per_square_s + cached * self.per_product_s)

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        return self.base_s, self.per_token_s, self.per_square_s, self.per_product_s


def prefill_seconds(coefficients: Floats, tokens: float, cached: Floats) -> Floats:
    """`PrefillCost.seconds` for many instances at once: coefficients `[n, 4]`, cached `[n]` or `[sources, n]`."""
    base, per_token, per_square, per_product = coefficients.T
    computed = tokens - cached
    seconds: Floats = base + computed * (per_token + computed * per_square + cached * per_product)
    return seconds


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of one decode step of `batch` sequences that have `context` tokens together."""

    base_s: float
    per_sequence_s: float
    per_token_s: float

    def seconds(self, batch: float, context: float) -> float:
        return self.base_s + batch * self.per_sequence_s + context * self.per_token_s


@dataclass(frozen=True, slots=True)
class TierCost:
    """Seconds to bring a prefix into an engine: from its host's tiers, and over the network.

    kv_bytes: of one token. Rates are bytes a second as one reader sees them alone; a tier that is not there has 0.
    """

    kv_bytes: int
    dram_rate: float
    nvme_rate: float
    network_rate: float
    latency_s: float = 0.001

    def pull_seconds(self, tokens: float, source_bytes: float, target_bytes: float) -> float:
        """From another node, behind the bytes that its source still has to send and its target to receive."""
        ahead = max(source_bytes, target_bytes)
        return self.latency_s + (tokens * self.kv_bytes + ahead) / self.network_rate

    def load_seconds(self, dram_tokens: float, nvme_tokens: float) -> float:
        """From this host's tiers."""
        dram = dram_tokens * self.kv_bytes / self.dram_rate if dram_tokens else 0.0
        nvme = nvme_tokens * self.kv_bytes / self.nvme_rate if nvme_tokens else 0.0
        return dram + nvme
