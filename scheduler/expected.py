"""Which prefixes instances are about to have, because requests that were sent there will compute them.

Who comes next with the same prefix finds it there: an instance takes its prompts in turn. Nobody else can pull it yet.
A chain is known by those blocks that end at a multiple of `GRID_TOKENS`: a long prompt costs some hundred entries.
"""

from typing import Final

from scheduler.requests import Chain

GRID_TOKENS: Final = 256


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
            counts = self._instances.setdefault(name, {})
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
            step = _step(chain)
            for at, name in enumerate(_grid(chain), 1):
                counts = self._instances.get(name)
                if counts is None:
                    break
                for instance in counts:
                    found[instance] = max(found.get(instance, 0), at * step * chain.block_tokens)
        return found


def _step(chain: Chain) -> int:
    return max(1, GRID_TOKENS // chain.block_tokens)


def _grid(chain: Chain) -> list[int]:
    step = _step(chain)
    names: list[int] = chain.names[step - 1 :: step].tolist()
    return names
