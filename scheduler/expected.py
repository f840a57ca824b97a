"""Which prefixes instances are about to have, because requests that were sent there will compute them.

Who comes next with the same prefix finds it there: an instance takes its prompts in turn. Nobody else can pull it yet.
A chain is known by some of its blocks, at the same places in every chain: a long prompt costs some hundred entries.
"""

from bisect import bisect_left
from typing import Final

from scheduler.requests import Chain

GRID_TOKENS: Final = 256  # between two blocks that are looked at
FINE: Final = 64  # of them, before they are COARSE times as far apart
COARSE: Final = 4


class Expected:
    """Prefixes in the making, by instance, until their request ends. By then the holders' own events tell of them."""

    def __init__(self) -> None:
        self._instances: dict[int, dict[str, int]] = {}  # of each block: how many requests compute it where
        self._requests: dict[str, tuple[str, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: str, instance: str, chains: tuple[Chain, ...]) -> None:
        names = [name for chain in chains for name in _grid(chain)]
        self._requests[request] = (instance, names)
        for name in names:
            counts = self._instances.get(name)
            if counts is None:
                self._instances[name] = {instance: 1}
            else:
                counts[instance] = counts.get(instance, 0) + 1

    def drop(self, request: str) -> None:
        """Idempotent."""
        instance, names = self._requests.pop(request, ("", []))
        for name in names:
            counts = self._instances[name]
            counts[instance] -= 1
            if not counts[instance]:
                del counts[instance]
                if not counts:
                    del self._instances[name]

    def tokens(self, chains: tuple[Chain, ...]) -> dict[str, int]:
        """Of the prefix of a prompt, by instance."""
        found: dict[str, int] = {}
        if not self._instances:
            return found
        for chain in chains:
            for instance, places in self._deepest(_grid(chain)).items():
                found[instance] = max(found.get(instance, 0), _tokens(chain, places))
        return found

    def _deepest(self, names: list[int]) -> dict[str, int]:
        """How many of the names each instance has. Who has one has all before it: so the deepest place that has more
        instances than were found below it is found by halving."""
        found: dict[str, int] = {}

        def instances(place: int) -> int:
            return -len(self._instances.get(names[place - 1], ()))

        stop = len(names)
        while stop := bisect_left(range(1, stop + 1), -len(found), key=instances):
            for instance in self._instances[names[stop - 1]]:
                found.setdefault(instance, stop)
        return found


def _step(chain: Chain) -> int:
    return max(1, GRID_TOKENS // chain.block_tokens)


def _grid(chain: Chain) -> list[int]:
    step = _step(chain)
    fine: list[int] = chain.names[step - 1 : FINE * step : step].tolist()
    coarse: list[int] = chain.names[(FINE + COARSE) * step - 1 :: COARSE * step].tolist()
    return fine + coarse


def _tokens(chain: Chain, places: int) -> int:
    """Of a chain's prefix that has so many places of the grid."""
    return (places + (COARSE - 1) * max(0, places - FINE)) * _step(chain) * chain.block_tokens
