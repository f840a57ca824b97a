"""Which tenant has more than its share of a busy fleet."""

from collections.abc import Mapping


class FairShare:
    """Predicted prefill seconds that each tenant has waiting. A share is by weight among those who have any.

    A tenant alone may use all: nothing is kept free for who does not ask.
    """

    def __init__(self, weights: Mapping[str, float], slack: float) -> None:
        self._weights = weights
        self._slack = slack
        self._waiting_s: dict[str, float] = {}

    def add(self, tenant: str, seconds: float) -> None:
        self._waiting_s[tenant] = self._waiting_s.get(tenant, 0.0) + seconds

    def take(self, tenant: str, seconds: float) -> None:
        left = self._waiting_s[tenant] - seconds
        if left > 1e-9:
            self._waiting_s[tenant] = left
        else:
            del self._waiting_s[tenant]

    def is_over(self, tenant: str) -> bool:
        """Whether the tenant has more than `slack` times its share of what waits; alone it has all."""
        mine = self._waiting_s.get(tenant, 0.0)
        if not mine:
            return False
        weights = sum(self._weight(name) for name in self._waiting_s)
        share = self._weight(tenant) / weights
        return mine > self._slack * share * sum(self._waiting_s.values())

    def waiting_s(self) -> dict[str, float]:
        """By tenant."""
        return dict(self._waiting_s)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
