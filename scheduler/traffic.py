"""How many bytes each node still has to send and to receive, as far as was planned: they go at the rate of its link."""

from collections.abc import Iterator, Mapping


class Traffic(Mapping[str, float]):
    """Bytes ahead by node, as of `now`, which its owner sets before it looks."""

    def __init__(self) -> None:
        self.now = 0.0
        self._links: dict[str, tuple[float, float, float]] = {}  # bytes, as of when, bytes a second

    def add(self, node: str, size: float, rate: float) -> None:
        """`size` bytes more, on a link of `rate` bytes a second."""
        self._links[node] = (self.get(node, 0.0) + size, self.now, rate)

    def take(self, node: str, size: float) -> None:
        """They will not be sent after all, or have been already."""
        if node in self._links:
            _, _, rate = self._links[node]
            self._links[node] = (max(0.0, self[node] - size), self.now, rate)

    def __getitem__(self, node: str) -> float:
        size, at_s, rate = self._links[node]
        return max(0.0, size - (self.now - at_s) * rate)

    def __iter__(self) -> Iterator[str]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)
