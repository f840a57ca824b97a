"""The gateway's counters for Prometheus."""

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.gateway.asking import Asking
from server.gateway.tokens import Tokens

TTFT_S: Final = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0)
OUTCOMES: Final = ("finished", "failed", "refused", "invalid", "cancelled", "overloaded")


class Metrics:
    """What happened, counted where it happens."""

    def __init__(self, asking: Asking, tokens: Tokens) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("cairn_gateway_requests", "Requests by how they ended.", ["outcome"], registry=registry)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.ttft_s = Histogram(
            "cairn_gateway_ttft_seconds",
            "From a streamed request's arrival to its first event.",
            buckets=TTFT_S,
            registry=registry,
        )
        self.retries = Counter("cairn_gateway_retries", "Tries after an instance failed.", registry=registry)
        self.continued = Counter(
            "cairn_gateway_continued", "Streams that went on at another instance.", registry=registry
        )
        self.in_flight = Gauge("cairn_gateway_in_flight", "Requests under way.", registry=registry)
        registry.register(_Seen(asking, tokens))

    def render(self) -> tuple[bytes, str]:
        """The text and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Seen(Collector):
    """What others count already."""

    def __init__(self, asking: Asking, tokens: Tokens) -> None:
        self._asking = asking
        self._tokens = tokens

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        asking, counts = self._asking, self._asking.counts
        yield GaugeMetricFamily("cairn_gateway_conductor_up", "Whether it answers.", float(asking.is_up is True))
        yield GaugeMetricFamily("cairn_gateway_instances", "Known instances.", len(asking.places))
        text = "Routes that were chosen without the Conductor."
        yield CounterMetricFamily("cairn_gateway_fallbacks", text, counts["fallbacks"])
        text = "Requests that were routed without their prompt's tokens."
        yield CounterMetricFamily("cairn_gateway_untokenised", text, self._tokens.missed)
        lost = CounterMetricFamily(
            "cairn_gateway_lost_reports", "Reports that the Conductor did not get.", labels=["why"]
        )
        for why in ("dropped", "undelivered"):
            lost.add_metric([why], counts[why])
        yield lost
