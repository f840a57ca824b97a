"""Which member is the home of each partition of the directory, by rendezvous hashing."""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvstore.cluster.naming import PARTITIONS

STEP_WEIGHTS = 1 << 17  # that are computed at a time: what fits into the cache
Words = npt.NDArray[np.uint64]


def mix(words: Words) -> Words:
    """Each word to one that looks random; no two to the same (the finalizer of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


_SALTS = mix(np.arange(1, PARTITIONS + 1, dtype=np.uint64))


def _seeds(names: Iterable[str]) -> Words:
    digests = (blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


class Homes:
    """A partition's home is the member of the highest weight there. Never changes: `changed` makes another.

    As `mix` is a bijection, two members weigh the same nowhere.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self._homes = [""] * PARTITIONS
        self._weights = np.zeros(PARTITIONS, np.uint64)  # of the homes
        self._owned: dict[str, list[int]] = {}  # by home, once somebody asks
        self._decide(list(range(PARTITIONS)))

    def home(self, partition: int) -> str:
        """Its name; empty without members."""
        return self._homes[partition]

    def owned(self, name: str) -> list[int]:
        """The partitions whose home it is, ascending."""
        if not self._owned:
            for partition, home in enumerate(self._homes):
                self._owned.setdefault(home, []).append(partition)
        return self._owned.get(name, []).copy()

    def moved(self, before: "Homes") -> list[int]:
        """The partitions that have another home than before, ascending."""
        pairs = zip(self._homes, before._homes, strict=True)
        return [partition for partition, (home, other) in enumerate(pairs) if home != other]

    def changed(self, names: Iterable[str]) -> "Homes":
        """As `Homes(names)`, at a cost that grows with what moves: what leavers had is decided anew, and who joins
        takes what it wins."""
        after = Homes(())
        after.names = frozenset(names)
        gone = self.names - after.names
        after._homes = self._homes.copy()
        after._weights = self._weights.copy()
        if not self.names or not after.names:
            return Homes(after.names)
        after._decide([partition for partition, home in enumerate(self._homes) if home in gone])
        for name in after.names - self.names:
            after._challenge(name)
        return after

    def _decide(self, partitions: list[int]) -> None:
        """Choose the homes of these among all members."""
        if not self.names:
            return
        names = sorted(self.names)
        seeds = _seeds(names)
        step = max(1, STEP_WEIGHTS // len(names))
        for start in range(0, len(partitions), step):
            some = partitions[start : start + step]
            weights = mix(_SALTS[some][:, None] ^ seeds[None, :])
            winners = weights.argmax(axis=1)
            self._weights[some] = weights[np.arange(len(some)), winners]
            for partition, winner in zip(some, winners.tolist(), strict=True):
                self._homes[partition] = names[winner]

    def _challenge(self, name: str) -> None:
        """It takes the partitions where it weighs more than their homes."""
        weights = mix(_SALTS ^ _seeds([name]))
        won = np.flatnonzero(weights > self._weights)
        self._weights[won] = weights[won]
        for partition in won.tolist():
            self._homes[partition] = name
