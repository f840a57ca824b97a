"""What every prefill instance would mean for one request, in columns: its wait, its prefix, its loads and pulls."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.costs import Floats, prefill_seconds
from scheduler.fleet import Member
from scheduler.requests import Request

SOURCES = 4  # nodes that are looked at for a pull: those with the longest prefix, of equals the least busy
NOBODY = -1  # a holder's number: the row of nothing that `Tokens` ends with
NEVER_S = 1e6  # a byte, by a way that is not there: a number, so that no bytes that way take no time

Tokens = NDArray[np.float64]  # [holders + 1, 3]: of the prompt, by tier as in PrefixIndex.prefixes; the last row is 0


class Pool:
    """The prefill instances of a model, in columns that change only with the fleet."""

    def __init__(self, members: Sequence[Member], holders: Mapping[str, int]) -> None:
        self.members = list(members)
        instances = [member.instance for member in members]
        self.names = [instance.name for instance in instances]
        self.nodes = [instance.node for instance in instances]
        self.coefficients: Floats = np.array([i.prefill.coefficients for i in instances], dtype=float).reshape(-1, 4)
        self.node_rows = np.array([holders.get(i.node, NOBODY) for i in instances], dtype=np.intp)
        self.engine_rows = np.array([holders.get(i.engine_holder, NOBODY) for i in instances], dtype=np.intp)
        tiers = [instance.tiers for instance in instances]
        self.kv_bytes: Floats = np.array([tier.kv_bytes for tier in tiers], dtype=float)
        self.latency_s: Floats = np.array([tier.latency_s for tier in tiers], dtype=float)
        # [tiers, n]: seconds a byte, of what an engine loads from its host's hbm, dram and nvme
        rates = np.array(
            [[np.inf] * len(tiers), [t.dram_rate for t in tiers], [t.nvme_rate for t in tiers]], dtype=float
        )
        self.tier_s_per_byte: Floats = _inverse(rates)
        self.network_s_per_byte: Floats = _inverse(np.array([tier.network_rate for tier in tiers], dtype=float))


class Source(NamedTuple):
    """A node that a prefix can be pulled from. `tokens` of the prompt, `busy_bytes` that it still has to send."""

    node: str
    tokens: float
    busy_bytes: float


class Choice(NamedTuple):
    """One instance for one request: seconds, and how the prefix gets there. `source` is None without a pull."""

    position: int
    source: Source | None
    cached_tokens: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    ttft_s: float


class Outlook:
    """A request over a pool. `prefixes` as `Tokens`; `expected` tokens of it that instances are about to compute;
    `sources` best first; `busy_bytes` that nodes have to receive.

    A prompt's last token is always computed. Transfers begin when a request is sent, so they pass while it waits.
    """

    def __init__(
        self,
        request: Request,
        pool: Pool,
        prefixes: Tokens,
        expected: Mapping[str, int],
        sources: Sequence[Source],
        busy_bytes: Mapping[str, float],
        *,
        now: float,
    ) -> None:
        self.request = request
        self.pool = pool
        self.sources = sources
        self._most = max(0, request.tokens - 1)
        self.queue_s: Floats = np.array([member.queue_s(now) for member in pool.members])
        node, engine = prefixes[pool.node_rows], prefixes[pool.engine_rows]
        # [3, n]: with what is in the GPU only, what is in memory too, what is on the disk too
        levels = np.maximum(node, engine[:, 2:3]).T
        if expected:
            soon = np.array([expected.get(name, 0) for name in pool.names], dtype=float)
            levels[1:] = np.maximum(levels[1:], soon)
        self._levels: Floats = np.minimum(levels, self._most)
        self._busy: Floats = np.array([busy_bytes.get(name, 0.0) for name in pool.nodes])

    def __len__(self) -> int:
        return len(self.pool.members)

    @cached_property
    def _local(self) -> tuple[NDArray[np.intp], Floats, Floats, Floats]:
        """For each instance the best level, and seconds to load it, to compute the rest, to the first token."""
        steps = np.diff(self._levels, axis=0, prepend=0.0)
        load_s = np.cumsum(steps * self.pool.kv_bytes * self.pool.tier_s_per_byte, axis=0)
        compute_s = prefill_seconds(self.pool.coefficients, self.request.tokens, self._levels)
        ttft_s = np.maximum(self.queue_s, load_s) + compute_s
        best = np.argmin(ttft_s, axis=0)
        at = best, np.arange(len(self))
        return best, load_s[at], compute_s[at], ttft_s[at]

    @property
    def local_s(self) -> Floats:
        """`[n]`: to the first token with what is at the instance and its node, as much of it as pays."""
        return self._local[3]

    @property
    def here_tokens(self) -> Floats:
        """`[n]`: of the prompt, that are there in any tier, or soon are."""
        there: Floats = self._levels[2]
        return there

    @property
    def local_tokens(self) -> Floats:
        """`[n]`: of the prompt, that are there and pay."""
        tokens: Floats = self._levels[self._local[0], np.arange(len(self))]
        return tokens

    @cached_property
    def _pulled(self) -> tuple[Floats, Floats, Floats]:
        """`[sources, n]`: seconds to pull, to compute the rest, to the first token."""
        cached = np.minimum(np.array([[source.tokens] for source in self.sources]), self._most)
        ahead = np.maximum(np.array([[source.busy_bytes] for source in self.sources]), self._busy)
        missing = np.maximum(0.0, cached - self._levels[2]) * self.pool.kv_bytes
        pull_s = self.pool.latency_s + (missing + ahead) * self.pool.network_s_per_byte
        cached = np.maximum(cached, self._levels[2])
        compute_s = prefill_seconds(self.pool.coefficients, self.request.tokens, cached)
        return pull_s, compute_s, np.maximum(self.queue_s, pull_s) + compute_s

    def pull_s(self, threshold: float) -> Floats:
        """`[sources, n]`: to the first token after a pull; inf where the source has not `threshold` times as much as is
        there, and where source and target are one."""
        if not self.sources:
            return np.full((0, len(self)), np.inf)
        tokens = np.array([[source.tokens] for source in self.sources])
        is_worth = tokens > threshold * self._levels[2]
        return np.where(is_worth, self._pulled[2], np.inf)

    def local(self, position: int) -> Choice:
        """The instance with what is there."""
        best, load_s, compute_s, ttft_s = (column[position] for column in self._local)
        return Choice(
            position,
            None,
            int(self._levels[best, position]),
            float(self.queue_s[position]),
            float(load_s),
            float(compute_s),
            float(ttft_s),
        )

    def pulling(self, position: int, source: int) -> Choice:
        """The instance with what a source has."""
        pull_s, compute_s, ttft_s = (column[source, position] for column in self._pulled)
        found = self.sources[source]
        return Choice(
            position,
            found,
            int(min(found.tokens, self._most)),
            float(self.queue_s[position]),
            float(pull_s),
            float(compute_s),
            float(ttft_s),
        )


def sources_of(
    nodes: Mapping[str, int], prefixes: Tokens, busy_bytes: Mapping[str, float], but: Collection[str] = ()
) -> list[Source]:
    """The nodes with the longest prefixes, `SOURCES` at most, of equals the least busy. `nodes`: holders by name."""
    names = [name for name in nodes if name not in but]
    tokens = prefixes[[nodes[name] for name in names], 2] if names else np.zeros(0)
    found = [Source(names[at], float(tokens[at]), busy_bytes.get(names[at], 0.0)) for at in np.flatnonzero(tokens > 0)]
    found.sort(key=lambda source: (-source.tokens, source.busy_bytes, source.node))
    return found[:SOURCES]


def _inverse(rates: Floats) -> Floats:
    inverse: Floats = np.divide(1.0, rates, out=np.full(rates.shape, NEVER_S), where=rates > 0)
    return inverse
