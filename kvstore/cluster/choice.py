"""From whom to read: how long each path to a holder is expected to take, and which blocks come from which holder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvstore.bandwidth import SMOOTHING, Bandwidth
from kvstore.cluster.naming import STRIPE_BLOCKS
from kvstore.health import Health
from kvstore.types import DRAM, HBM, NVME
from kvstore.wire_cluster import TIER_BITS

ASSUMED_BYTES_PER_S = 1e9  # of a path that nothing was read over: a 10 Gbit/s network, so that new holders are tried
ASSUMED_LATENCY_S = 0.0002
DISTANCE_S = (0.0, 0.00005, 0.0002, 0.001)  # by `members.distance`: what a farther holder must be faster by
NVME_LATENCY_S = 0.0001  # of a random read of a data-centre disk
NVME_S_PER_BYTE = 1 / 3e9  # such a disk reads 3 GB/s, and its holder does so before it sends
HBM_S_PER_BYTE = 1 / 20e9  # down over PCIe, before it is sent
LONGEST_PAUSE_S = 5.0  # that a member which failed is not asked: it may be the only one that has something
CONSIDERED_HOLDERS = 16  # of a block: more would let the work of a read grow with the cluster
LEAST_RUN_BYTES = 4 << 20  # a stripe is not shared by holders in smaller pieces: requests have their price

_DRAM, _HBM, _NVME = TIER_BITS[DRAM], TIER_BITS[HBM], TIER_BITS[NVME]


@dataclass(slots=True)
class Route:
    """What is known of the path to one peer. `latency_s` is that of a request that moves nothing, 0 until measured."""

    distance: int = len(DISTANCE_S) - 1
    latency_s: float = 0.0
    reading: Bandwidth = field(default_factory=Bandwidth)
    health: Health = field(default_factory=lambda: Health(longest_pause_s=LONGEST_PAUSE_S))

    @property
    def inflight_bytes(self) -> int:
        return self.reading.queued_bytes

    def answered(self, took_s: float) -> None:
        """The peer answered a small request after `took_s`."""
        self.latency_s += SMOOTHING * (took_s - self.latency_s) if self.latency_s else took_s

    def may_read(self, now: float) -> bool:
        """Whether it is well, or its pause is over and nobody else is trying it."""
        return self.health.is_well or (self.health.may_try(now) and not self.inflight_bytes)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A holder of what is to be read, and the tiers (`TIER_BITS`) that it has all of it in."""

    name: str
    tiers: int
    route: Route


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks [start, end) of those asked for come from `holder`; all are of one stripe."""

    holder: str
    start: int
    end: int


def expected_s(route: Route, tiers: int, size_bytes: int, requests: int = 1, pending_bytes: int = 0) -> float:
    """Seconds until `size_bytes` would be here, after what is in flight and `pending_bytes` that are about to be."""
    rate = route.reading.bytes_per_s or ASSUMED_BYTES_PER_S
    moving_s = (route.inflight_bytes + pending_bytes + size_bytes) / rate
    far = min(max(route.distance, 0), len(DISTANCE_S) - 1)
    return requests * (route.latency_s or ASSUMED_LATENCY_S) + moving_s + _tier_s(tiers, size_bytes) + DISTANCE_S[far]


def choose(
    candidates: Sequence[Candidate],
    size_bytes: int,
    random: Callable[[], float],
    now: float,
    pending: Mapping[str, int] | None = None,
) -> Candidate | None:
    """Of two drawn among those that may be read, the one that is expected to be done first; None when there is none.

    `random` gives numbers in [0, 1); `pending` are bytes that were given to holders by name and not yet begun.
    """
    able = [candidate for candidate in candidates if candidate.route.may_read(now)]
    if len(able) < 2:
        return able[0] if able else None
    first = int(random() * len(able))
    second = int(random() * (len(able) - 1))
    drawn = (able[first], able[second + (second >= first)])
    waiting = pending or {}

    def done_s(candidate: Candidate) -> float:
        return expected_s(candidate.route, candidate.tiers, size_bytes, pending_bytes=waiting.get(candidate.name, 0))

    return min(drawn, key=done_s)


def assign(
    holders: Sequence[Mapping[str, int]],
    position: int,
    block_bytes: int,
    routes: Mapping[str, Route],
    *,
    random: Callable[[], float],
    now: float,
) -> list[Run]:
    """Runs that cover the longest prefix of which each block has a holder that may be read.

    `holders` are for each block those that have it, with tiers; the first is at `position` of its stripe. Runs are few:
    each goes as far as any holder of its first block does, DRAM before slower tiers. Stripes go to several holders, and
    so do large pieces of a stripe when there are more holders than stripes. A holder that `routes` lacks is not read.
    Blocks with the same holders are cheap if they share one mapping.
    """
    segments = list(_segments(holders, position, routes, random=random, now=now))
    pending: dict[str, int] = {}
    runs: list[Run] = []
    for start, end, candidates in segments:
        for piece_start, piece_end in _pieces(start, end, len(candidates), len(segments), block_bytes):
            size_bytes = (piece_end - piece_start) * block_bytes
            chosen = choose(candidates, size_bytes, random, now, pending)
            assert chosen is not None, "a segment has holders that may be read"
            pending[chosen.name] = pending.get(chosen.name, 0) + size_bytes
            goes_on = (position + piece_start) % STRIPE_BLOCKS and runs and runs[-1].holder == chosen.name
            piece_start = runs.pop().start if goes_on else piece_start
            runs.append(Run(chosen.name, piece_start, piece_end))
    return runs


def _tier_s(tiers: int, size_bytes: int) -> float:
    if tiers & _DRAM:
        return 0.0
    if tiers & _HBM:
        return size_bytes * HBM_S_PER_BYTE
    return NVME_LATENCY_S + size_bytes * NVME_S_PER_BYTE


def _segments(
    holders: Sequence[Mapping[str, int]],
    position: int,
    routes: Mapping[str, Route],
    *,
    random: Callable[[], float],
    now: float,
) -> Iterator[tuple[int, int, list[Candidate]]]:
    """[start, end) of one stripe after another piece of it, each with those who have all of it in such a tier."""
    start = 0
    while start < len(holders):
        wanted = _DRAM
        able = _able(holders[start], wanted, routes, random=random, now=now)
        if not able:
            wanted = ~0
            able = _able(holders[start], wanted, routes, random=random, now=now)
        if not able:
            return
        limit = min(len(holders), start + STRIPE_BLOCKS - (position + start) % STRIPE_BLOCKS)
        changes = [start, *(index for index in range(start + 1, limit) if holders[index] is not holders[index - 1])]
        reach = {name: _reach(holders, changes, name, wanted, limit) for name in able}
        end = max(reach.values())
        farthest = [name for name, reached in reach.items() if reached == end]
        within = [holders[index] for index in changes if index < end]
        yield start, end, [Candidate(name, _tiers(within, name), routes[name]) for name in farthest]
        start = end


def _able(
    holding: Mapping[str, int],
    wanted: int,
    routes: Mapping[str, Route],
    *,
    random: Callable[[], float],
    now: float,
) -> list[str]:
    """Those that have it in such a tier and may be read; only so many, from anywhere among them."""
    names = list(holding)
    if len(names) > CONSIDERED_HOLDERS:
        begin = int(random() * len(names))
        names = names[begin:] + names[:begin]
    found = (name for name in names if holding[name] & wanted and name in routes and routes[name].may_read(now))
    return list(islice(found, CONSIDERED_HOLDERS))


def _reach(holders: Sequence[Mapping[str, int]], changes: Sequence[int], name: str, wanted: int, limit: int) -> int:
    for index in changes:
        if not holders[index].get(name, 0) & wanted:
            return index
    return limit


def _tiers(holdings: Sequence[Mapping[str, int]], name: str) -> int:
    """The tiers that have all of it; the slowest where there is no such."""
    tiers = ~0
    for holding in holdings:
        tiers &= holding[name]
    return tiers or _NVME


def _pieces(start: int, end: int, holders: int, segments: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """A segment in as many equal pieces as keep its holders busy, none below LEAST_RUN_BYTES or of no block."""
    blocks = end - start
    count = min(-(-holders // segments), blocks * block_bytes // LEAST_RUN_BYTES, blocks)
    count = max(count, 1)
    for piece in range(count):
        yield start + blocks * piece // count, start + blocks * (piece + 1) // count
