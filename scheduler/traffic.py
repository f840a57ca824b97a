"""How many bytes each node still has to send and to receive, as far as was planned: they go at the rate of its link."""


class Traffic:
    """Bytes ahead by node. Links are thought to go through what was planned in its order."""

    def __init__(self) -> None:
        self._links: dict[str, tuple[float, float, float]] = {}  # bytes, as of when, bytes a second

    def ahead(self, node: str, now: float) -> float:
        link = self._links.get(node)
        return max(0.0, link[0] - (now - link[1]) * link[2]) if link is not None else 0.0

    def add(self, node: str, size: float, rate: float, now: float) -> None:
        """`size` bytes more, on a link of `rate` bytes a second."""
        self._links[node] = (self.ahead(node, now) + size, now, rate)

    def take(self, node: str, size: float, since_s: float, now: float) -> None:
        """They will not be sent after all, those of them at least that were not sent since they were planned."""
        if node in self._links:
            rate = self._links[node][2]
            ahead = self.ahead(node, now)
            self._links[node] = (ahead - min(ahead, max(0.0, size - (now - since_s) * rate)), now, rate)
