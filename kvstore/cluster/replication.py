"""How many copies of a hot stripe there should be, and which members are asked to hold them."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

from kvstore.cluster.members import distance

CONSIDERED_PLACES = 16  # for one copy: more would let the work grow with the cluster
MOST_SUGGESTIONS = 32  # of a round; what is still wanted is suggested in the next


@dataclass(frozen=True, slots=True)
class Place:
    """A member as seen by who looks for room. `load` is a share of what it can do, the same measure for all."""

    name: str
    free_bytes: int
    load: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class HotStripe:
    """A stripe that this node holds: how often it is read here (blocks/s), and who holds it, this node too."""

    stripe: Hashable
    size_bytes: int
    rate: float
    holders: tuple[str, ...]
    is_copy: bool = False  # here


@dataclass(frozen=True, slots=True)
class Sight:
    """What a policy sees of a round: `stripes`, the hottest first, at `node`, and all members by name."""

    node: str
    stripes: Sequence[HotStripe]
    places: Mapping[str, Place]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Ask `target` to pull this stripe from here."""

    stripe: Hashable
    target: str


@dataclass(frozen=True, slots=True)
class Drop:
    """The copy here is not needed any more: it may go first."""

    stripe: Hashable


class ReplicationPolicy(Protocol):
    """Suggests; the owner may refuse, and looks at who holds what once more before anything is dropped."""

    def suggest(self, view: Sight) -> Iterator[Replicate | Drop]: ...


@dataclass(slots=True)
class HeatPolicy:
    """As many holders as keep each below `target_rate` (blocks/s of one stripe), between `least` and `most`.

    Each holder sees its own reads only and takes the others to have as many. Of the copies that it finds missing it
    suggests its share, so that all together suggest what one would alone. A copy is dropped when fewer holders would be
    enough for twice the reads. `random` gives numbers in [0, 1).
    """

    least: int
    most: int
    target_rate: float
    random: Callable[[], float]
    most_suggestions: int = MOST_SUGGESTIONS

    def suggest(self, view: Sight) -> Iterator[Replicate | Drop]:
        """Never to a member that drains or holds it already, nor to more room than there is."""
        room = Room(view.places, self.random)
        left = self.most_suggestions
        for hot in view.stripes:
            if left <= 0:
                return
            staying = room.staying(hot.holders)
            share = self._missing(hot, len(staying)) / max(1, len(staying))
            wanted = min(int(share + self.random()), left)
            for target in room.targets(hot.size_bytes, hot.holders, wanted):
                left -= 1
                yield Replicate(hot.stripe, target)
            if hot.is_copy and view.node in self._surplus(hot, staying):
                left -= 1
                yield Drop(hot.stripe)

    def _missing(self, hot: HotStripe, staying: int) -> int:
        return max(0, self._desired(hot, self.target_rate) - staying)

    def _surplus(self, hot: HotStripe, staying: list[str]) -> list[str]:
        """The last by name, so that two holders do not both go where one should."""
        enough = self._desired(hot, self.target_rate / 2)
        return sorted(staying)[enough:]

    def _desired(self, hot: HotStripe, target_rate: float) -> int:
        return min(max(ceil(len(hot.holders) * hot.rate / target_rate), self.least, 1), self.most)


class Room:
    """Who can take copies, in one round: what was given to a member counts as taken."""

    def __init__(self, places: Mapping[str, Place], random: Callable[[], float]) -> None:
        self._places = places
        self._open = [place for place in places.values() if not place.is_draining and place.free_bytes > 0]
        self._given: dict[str, int] = {}
        self._random = random

    def staying(self, holders: Iterable[str]) -> list[str]:
        """Those of them that are members and do not drain."""
        return [name for name in holders if name in self._places and not self._places[name].is_draining]

    def at_least(self, n: int, size_bytes: int, holders: Sequence[str]) -> list[str]:
        """Who should pull it so that `n` members that stay hold it; fewer where there is no room."""
        return self.targets(size_bytes, holders, n - len(self.staying(holders)))

    def targets(self, size_bytes: int, holders: Iterable[str], count: int) -> list[str]:
        """Up to `count` members that have room for `size_bytes` and are no holders.

        Of those with room the ones farthest from all holders, the earlier targets among them; of two drawn among these
        the less loaded, and of equals the one with more room.
        """
        known = [*holders]
        found: list[str] = []
        while len(found) < count:
            able = [place for place in self._some() if place.name not in known and self._free(place) >= size_bytes]
            if not able:
                break
            apart = [self._apart(place, known) for place in able]
            farthest = max(apart)
            place = self._better([one for one, far in zip(able, apart, strict=True) if far == farthest])
            self._given[place.name] = self._given.get(place.name, 0) + size_bytes
            found.append(place.name)
            known.append(place.name)
        return found

    def _some(self) -> list[Place]:
        if len(self._open) <= CONSIDERED_PLACES:
            return self._open
        drawn = {int(self._random() * len(self._open)) for _ in range(CONSIDERED_PLACES)}
        return [self._open[index] for index in sorted(drawn)]

    def _free(self, place: Place) -> int:
        return place.free_bytes - self._given.get(place.name, 0)

    def _apart(self, place: Place, holders: Iterable[str]) -> int:
        members = (self._places[name] for name in holders if name in self._places)
        return min((distance(place.labels, member.labels) for member in members), default=0)

    def _better(self, places: list[Place]) -> Place:
        if len(places) == 1:
            return places[0]
        first = int(self._random() * len(places))
        second = int(self._random() * (len(places) - 1))
        pair = (places[first], places[second + (second >= first)])
        return min(pair, key=lambda place: (place.load, -self._free(place)))
