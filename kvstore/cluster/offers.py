"""What other nodes keep for readers of this one: blocks that are offered until nobody needs them any more."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.catalogue import OpenNamespace
from kvstore.cluster.links import Lease, Links
from kvstore.cluster.locating import Holders, Place
from kvstore.types import BlockKey


@dataclass(slots=True, eq=False)
class Kept:
    """A lease at a peer, and how many need it: the reader that found it, and the loads that run."""

    lease: Lease
    links: Links
    users: int = 1

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self.links.release(self.lease)


@dataclass(slots=True, eq=False)
class Offer:
    """A block (part) that a peer keeps for this node."""

    kept: Kept
    at: int  # in the lease
    size: int
    place: Place
    holders: Holders
    tried: set[str] = field(default_factory=set)

    def take(self) -> None:
        """A load needs it: until `leave`."""
        self.kept.users += 1

    def leave(self) -> None:
        self.kept.leave()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run is known to be, and its first block's place: nobody has to be asked."""

    holder: str
    place: Place


class Finding:
    """What a reader found. Closed when the reader waits no more; loads that run keep what they need.

    `first` is the number of the first block that this node had in no tier; at the beginning `blocks`, their count.
    """

    def __init__(self, offers: dict[tuple[int, BlockKey], list[Offer]], blocks: int) -> None:
        self.first = blocks
        self._all = offers
        self._mine: list[tuple[tuple[int, BlockKey], Offer]] = []
        self._kept: list[Kept] = []

    def add(self, space: OpenNamespace, kept: Kept, offers: Sequence[tuple[BlockKey, Offer]]) -> None:
        self._kept.append(kept)
        for key, offer in offers:
            self._mine.append(((space.number, key), offer))
            self._all.setdefault((space.number, key), []).append(offer)

    def close(self) -> None:
        for key, offer in self._mine:
            self._all[key].remove(offer)
            if not self._all[key]:
                del self._all[key]
        self._mine.clear()
        for kept in self._kept:
            kept.leave()
        self._kept.clear()
