"""What every prefill instance would mean for one request, in columns: its wait, its prefix, its loads and pulls."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.costs import Floats, prefill_seconds
from scheduler.fleet import Member
from scheduler.requests import Request
from scheduler.traffic import Traffic

SOURCES = 4  # prefixes that are looked at for a pull: the longest, and shorter ones that come at less cost
STREAM_SHARE = 0.5  # of a link, at most, that what leaves for decode takes from a pull: they share it fairly
NOBODY = -1  # a holder's number: the row of nothing that `Tokens` ends with
NEVER_S = 1e6  # a byte, by a way that is not there: a number, so that no bytes that way take no time

Tokens = NDArray[np.float64]  # [holders + 1, 3]: of the prompt, by tier as in PrefixIndex.prefixes; the last row is 0


class Pool:
    """The prefill instances of a model, in columns that change only with the fleet, and who decodes for each group."""

    def __init__(
        self,
        members: Sequence[Member],
        takers: Mapping[str, list[Member]],
        holders: Mapping[str, int],
        beside: Mapping[str, Sequence[Member]],
    ) -> None:
        self.members = list(members)
        self.takers = takers
        self.beside = beside  # instances of any model beside each node; some nodes have none
        instances = [member.instance for member in members]
        self.names = [instance.name for instance in instances]
        self.grid: Floats = np.array([instance.grid_tokens for instance in instances], dtype=float)
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
        links = [instance.tiers.network_rate if instance.node else 0.0 for instance in instances]
        self.network_s_per_byte: Floats = _inverse(np.array(links, dtype=float))


class Source(NamedTuple):
    """A prefix that can be pulled from a node: `tokens` of the prompt, of them in its memory, the rest on its disk;
    `busy_bytes` that it still has to send."""

    node: str
    tokens: float
    memory_tokens: float
    busy_bytes: float

    @property
    def disk_tokens(self) -> float:
        return self.tokens - self.memory_tokens


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
    `sources` longest first; `receiving`: what nodes have to receive.

    A prompt's last token is always computed. Transfers begin when a request is sent, so they pass while it waits.
    """

    def __init__(
        self,
        request: Request,
        pool: Pool,
        prefixes: Tokens,
        expected: Mapping[str, int],
        sources: Sequence[Source],
        receiving: Traffic,
        *,
        now: float,
    ) -> None:
        self.request = request
        self.pool = pool
        self.sources = sources
        self._now = now
        self._most = max(0, request.tokens - 1)
        self.queue_s: Floats = np.array([member.queue_s(now) for member in pool.members])
        node, engine = prefixes[pool.node_rows], prefixes[pool.engine_rows]
        # [3, n]: with what is in the GPU only, what is in memory too, what is on the disk too
        levels = np.maximum(node, engine[:, 2:3]).T
        if expected:
            soon = np.array([expected.get(name, 0) for name in pool.names], dtype=float)
            levels[1:] = np.maximum(levels[1:], soon)
        self._levels: Floats = self._on_grid(levels)
        self.node_tokens: Floats = node[:, 2]  # [n]: of the prompt, that the nodes have now, in any tier
        self._busy: Floats = np.array([receiving.ahead(name, now) for name in pool.nodes])

    def __len__(self) -> int:
        return len(self.pool.members)

    def _on_grid(self, tokens: Floats) -> Floats:
        """What of a prefix an instance can use: some begin to compute at multiples of their chunk only."""
        usable: Floats = np.minimum(tokens, self._most) // self.pool.grid * self.pool.grid
        return usable

    @cached_property
    def pressure(self) -> float:
        """0 where the instances wait for work, towards 1 as they have more of it than this request would add."""
        if not len(self):
            return 0.0
        waiting_s, added_s = float(self.queue_s.mean()), float(self._local[2].mean())
        return waiting_s / max(waiting_s + added_s, 1e-9)

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

    def local_cost_s(self, weight: float) -> Floats:
        """`[n]`: `local_s`, and `weight` times what is computed for it, as far as others wait for the instances: work
        that another place would spare keeps all who come later waiting."""
        return self.local_s + weight * self.pressure * self._local[2]

    @property
    def local_tokens(self) -> Floats:
        """`[n]`: of the prompt, that are there and pay."""
        tokens: Floats = self._levels[self._local[0], np.arange(len(self))]
        return tokens

    @cached_property
    def _pulled(self) -> tuple[Floats, Floats, Floats]:
        """`[sources, n]`: seconds to pull, to compute the rest, to the first token."""
        pool = self.pool
        tokens, memory, busy = np.array([source[1:] for source in self.sources]).T[:, :, np.newaxis]
        ahead = np.maximum(busy, self._busy)
        missing = np.maximum(0.0, tokens - self.node_tokens) * pool.kv_bytes
        on_disk = np.maximum(0.0, tokens - np.maximum(memory, self.node_tokens)) * pool.kv_bytes
        disk_s_per_byte, stream_rate, stream_s = self._of_sources()
        network_s = (missing + ahead) * pool.network_s_per_byte
        taken = np.minimum(stream_rate * pool.network_s_per_byte, STREAM_SHARE)
        network_s = np.minimum(network_s / (1 - taken), network_s + taken * stream_s)
        pull_s = pool.latency_s + np.maximum(network_s, on_disk * disk_s_per_byte)
        cached = np.maximum(self._on_grid(tokens), self._levels[2])
        compute_s = prefill_seconds(self.pool.coefficients, self.request.tokens, cached)
        return pull_s, compute_s, np.maximum(self.queue_s, pull_s) + compute_s

    def _of_sources(self) -> tuple[Floats, Floats, Floats]:
        """`[sources, 1]`: seconds a byte of their disks, bytes a second that leave their nodes for decode, and
        for how many seconds. Where no instance is beside a node, its disk is thought to be as fast as its link."""
        columns = np.zeros((3, len(self.sources), 1))
        for row, source in enumerate(self.sources):
            for member in self.pool.beside.get(source.node, ()):
                rate, seconds = member.stream(self._now)
                nvme_rate = member.instance.tiers.nvme_rate
                columns[0, row] = 1 / nvme_rate if nvme_rate else NEVER_S
                columns[1, row] += rate
                columns[2, row] = max(columns[2, row, 0], seconds)
        return columns[0], columns[1], columns[2]

    def pull_s(self, threshold: float) -> Floats:
        """`[sources, n]`: to the first token after a pull; inf where the source has not `threshold` times as much as is
        there, and where source and target are one."""
        if not self.sources:
            return np.full((0, len(self)), np.inf)
        tokens = np.array([[source.tokens] for source in self.sources])
        is_worth = tokens > threshold * self._levels[2]
        return np.where(is_worth, self._pulled[2], np.inf)

    def pull_cost_s(self, threshold: float, weight: float) -> Floats:
        """`[sources, n]`: `pull_s`, with the work it takes as in `local_cost_s`."""
        pull_s = self.pull_s(threshold)
        return pull_s + weight * self.pressure * self._pulled[1] if self.sources else pull_s

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
            int(self._on_grid(np.array([found.tokens]))[position]),
            float(self.queue_s[position]),
            float(pull_s),
            float(compute_s),
            float(ttft_s),
        )


def sources_of(nodes: Mapping[str, int], prefixes: Tokens, sending: Traffic, now: float) -> list[Source]:
    """What nodes have of a prompt, longest first, `SOURCES` at most: each with its disk, and its memory alone. Left out
    is what another has too with no more on its disk and no more to send. `nodes`: holders by name."""
    names = list(nodes)
    tokens = prefixes[list(nodes.values())]
    found = []
    for at in np.flatnonzero(tokens[:, 2]).tolist():
        _, memory, every = tokens[at].tolist()
        busy_bytes = sending.ahead(names[at], now)
        found.append(Source(names[at], every, memory, busy_bytes))
        if 0 < memory < every:
            found.append(Source(names[at], memory, memory, busy_bytes))
    found.sort(key=lambda source: (-source.tokens, source.disk_tokens, source.busy_bytes, source.node))
    kept: list[Source] = []
    for source in found:
        if not any(
            longer.disk_tokens <= source.disk_tokens and longer.busy_bytes <= source.busy_bytes for longer in kept
        ):
            kept.append(source)
            if len(kept) == SOURCES:
                break
    return kept


def _inverse(rates: Floats) -> Floats:
    inverse: Floats = np.divide(1.0, rates, out=np.full(rates.shape, NEVER_S), where=rates > 0)
    return inverse
