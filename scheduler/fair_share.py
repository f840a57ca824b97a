"""Which tenant has more than its share of a busy fleet."""

from collections.abc import Mapping


class FairShare:
    """Predicted prefill seconds that tenants have waiting for a model. A share is by weight among those who have any.

    A tenant alone may use all: nothing is kept free for who does not ask. Who waits for another model takes nothing.
    """

    def __init__(self, weights: Mapping[str, float], slack: float) -> None:
        self._weights = weights
        self._slack = slack
        self._waiting: dict[str, dict[str, tuple[int, float]]] = {}  # by model and tenant: requests, seconds

    def add(self, model: str, tenant: str, seconds: float) -> None:
        tenants = self._waiting.setdefault(model, {})
        requests, waiting_s = tenants.get(tenant, (0, 0.0))
        tenants[tenant] = requests + 1, waiting_s + seconds

    def take(self, model: str, tenant: str, seconds: float) -> None:
        """What was added once. KeyError for what was not."""
        tenants = self._waiting[model]
        requests, waiting_s = tenants[tenant]
        if requests > 1:
            tenants[tenant] = requests - 1, max(0.0, waiting_s - seconds)
            return
        del tenants[tenant]
        if not tenants:
            del self._waiting[model]

    def is_over(self, model: str, tenant: str) -> bool:
        """Whether the tenant has more than `slack` times its share of what waits; alone it has all."""
        tenants = self._waiting.get(model, {})
        _, mine_s = tenants.get(tenant, (0, 0.0))
        if not mine_s:
            return False
        share = self._weight(tenant) / sum(map(self._weight, tenants))
        return mine_s > self._slack * share * sum(waiting_s for _, waiting_s in tenants.values())

    def waiting_s(self) -> dict[tuple[str, str], float]:
        """By model and tenant."""
        return {
            (model, tenant): waiting_s
            for model, tenants in self._waiting.items()
            for tenant, (_, waiting_s) in tenants.items()
        }

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
