"""What a worker counts, as Prometheus text."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TBT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5)


class Metrics:
    """The gauges are read when they are asked for: requests without a first token, and those that decode."""

    def __init__(self, queued: Callable[[], int], batch: Callable[[], int]) -> None:
        self._collected = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by how they ended.", "outcome")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, by where their KV is from.", "source")
        self.generated_tokens = self._counter("generated_tokens", "Tokens that were given.")
        self.other_first_tokens = self._counter(
            "other_first_tokens", "First tokens that were not those of the worker that computed the prompt."
        )
        self.ttft_s = Histogram(
            "cairn_worker_ttft_seconds",
            "From a request to its first token.",
            buckets=TTFT_S,
            registry=self._collected,
        )
        self.tbt_s = Histogram(
            "cairn_worker_tbt_seconds", "From one token to the next.", buckets=TBT_S, registry=self._collected
        )
        self._gauge("queue", "Requests that have no token yet.", queued)
        self._gauge("batch", "Sequences that decode.", batch)

    def text(self) -> bytes:
        return generate_latest(self._collected)

    def _counter(self, name: str, says: str, *labels: str) -> Counter:
        return Counter(f"cairn_worker_{name}", says, labels, registry=self._collected)

    def _gauge(self, name: str, says: str, value: Callable[[], int]) -> None:
        Gauge(f"cairn_worker_{name}", says, registry=self._collected).set_function(value)
