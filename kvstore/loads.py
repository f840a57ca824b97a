"""What a load is: a block of another tier, or of another node, on its way into DRAM; and which are worth it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvstore.bandwidth import Bandwidth
from kvstore.catalogue import OpenNamespace
from kvstore.disk import Loaded
from kvstore.table import Replica
from kvstore.types import PEER, BlockKey, TierName

JOB_BYTES, JOB_BLOCKS = 4 << 20, 16  # of one load: small enough to hand on early, large enough for its overhead
PEER_BYTES, PEER_BLOCKS = 8 << 20, 64  # the overhead of one from another node is larger


class PeerOffer(Protocol):
    """A block that another node keeps for this one."""

    size: int

    def take(self) -> None:
        """A load needs it, until `leave`."""
        ...

    def leave(self) -> None: ...


class Peers(Protocol):
    """Other nodes, as a source: `offer` of what a reader had them keep, and `read` of that, None where it failed."""

    reading: Bandwidth

    def offer(self, space: OpenNamespace, key: BlockKey) -> PeerOffer | None: ...

    async def read(
        self, space: OpenNamespace, blocks: Sequence[tuple[BlockKey, Any, memoryview]]
    ) -> list[int | None]: ...

    def arrived(self, replica: Replica, offer: Any) -> None:
        """Its bytes are in place, and it is about to be committed."""
        ...


class Source(NamedTuple):
    """Where a block of another tier is to be had; `replica` is None where it is none of this node's, `offer` is there
    for a block of another node."""

    tier: TierName
    key: BlockKey
    parent: BlockKey | None
    size: int
    replica: Replica | None
    offer: PeerOffer | None = None


class Read(NamedTuple):
    """What became of a block, and the checksum that its bytes have if they are good."""

    loaded: Loaded
    checksum: int


FAILED = Read("failed", 0)


@dataclass(slots=True, eq=False)
class Load:
    """A block on its way into `target`; `source` is held until it is there."""

    source: Source
    target: Replica


def read_of(checksum: int | None) -> Read:
    return FAILED if checksum is None else Read("good", checksum)


def worthwhile(wanted: Sequence[tuple[int, Source]], first: int, paths: Mapping[TierName, Bandwidth], now: float, *,
               load_s: float, block_s: float) -> int:  # fmt: skip
    """How many of the wanted (position, part), from the first, to load.

    `first` is the position of the first block that is missing; a block is computed in `block_s` (0: unknown).
    """
    tier_bytes: Counter[TierName] = Counter()
    best = 0
    for count, (position, source) in enumerate(wanted, 1):
        tier_bytes[source.tier] += source.size
        arrivals = (path.arrival_s(tier_bytes[tier]) for tier, path in paths.items() if tier_bytes[tier])
        arrival_s = max(arrivals, default=0.0)
        if arrival_s > load_s:
            break
        if not block_s or arrival_s <= (position + 1 - first) * block_s:
            best = count
    if not best and wanted:
        path = paths.get(wanted[0][1].tier)
        return int(path is not None and path.is_stale(now))  # one, to learn how fast the tier is now
    return best


def jobs_of(loads: Sequence[Load]) -> list[list[Load]]:
    """Loads in their order, cut where a job is large enough or the tier changes."""
    jobs: list[list[Load]] = []
    job_bytes = 0
    for load in loads:
        is_far = load.source.tier == PEER
        most_bytes, most_blocks = (PEER_BYTES, PEER_BLOCKS) if is_far else (JOB_BYTES, JOB_BLOCKS)
        if (
            not jobs
            or len(jobs[-1]) >= most_blocks
            or job_bytes + load.source.size > most_bytes
            or jobs[-1][0].source.tier != load.source.tier
        ):
            jobs.append([])
            job_bytes = 0
        jobs[-1].append(load)
        job_bytes += load.source.size
    return jobs
