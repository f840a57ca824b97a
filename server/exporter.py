"""The node's counters for Prometheus, under the names and labels of kvstore.metrics.METRICS."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.node import Node

Samples = Iterable[tuple[tuple[str, ...], float]]


class Exporter(Collector):
    """Reads the counters when it is asked. `http_sessions` says how many sessions REST has open."""

    def __init__(self, node: "Node", http_sessions: "Callable[[], int]") -> None:
        self._node = node
        self._http_sessions = http_sessions
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> tuple[bytes, str]:
        """The text and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        samples = dict(self._samples())
        for name, (kind, labels, text) in METRICS.items():
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, text, labels=labels)
            for values, number in samples[name]:
                family.add_metric(values, number)
            yield family

    def _samples(self) -> Iterator[tuple[str, Samples]]:
        yield from self._counted()
        yield from self._present()

    def _counted(self) -> Iterator[tuple[str, Samples]]:
        store = self._node.store
        counters = store.counters
        found = list(store.catalogue.all())
        label = [(space.tenant.name, space.names[0]) for space in found]
        yield "cairn_hit_blocks_total", zip(label, [space.hit_blocks for space in found], strict=True)
        yield "cairn_missed_blocks_total", zip(label, [space.missed_blocks for space in found], strict=True)
        yield "cairn_loaded_bytes_total", _labelled(counters.loaded_bytes)
        yield "cairn_stored_bytes_total", _labelled(counters.stored_bytes)
        yield "cairn_stored_blocks_total", [((), counters.stored_blocks)]
        yield "cairn_duplicate_blocks_total", [((), counters.duplicate_blocks)]
        yield "cairn_refused_blocks_total", _labelled(counters.refused_blocks)
        yield "cairn_orphan_blocks_total", [((), counters.orphan_blocks)]
        yield "cairn_removed_blocks_total", _labelled(counters.removed_blocks)
        yield "cairn_corrupt_blocks_total", [((), counters.corrupt_blocks)]
        yield "cairn_requests_total", _labelled(counters.requests)
        yield "cairn_errors_total", _labelled(counters.errors)
        yield "cairn_lapsed_holds_total", [((), counters.lapsed_holds)]
        yield "cairn_lost_sessions_total", [((), counters.lost_sessions)]

    def _present(self) -> Iterator[tuple[str, Samples]]:
        store = self._node.store
        tiers = [(str(tier.name), tier) for tier in store.table.tiers.values()]
        slabs: list[tuple[tuple[str, ...], float]] = []
        for name, tier in tiers:
            spare = sum(1 for _ in tier.pool.spare())
            slabs += [((name, "cut"), len(tier.pool.slabs) - spare), ((name, "spare"), spare)]
        used = [((name, tenant), size) for name, tier in tiers for tenant, size in tier.tenant_bytes.items()]
        indexes = store.exports.describe()
        yield "cairn_sessions", _labelled({**self._node.connections, "rest": self._http_sessions()})
        yield "cairn_tier_capacity_bytes", [((name,), tier.pool.capacity_bytes) for name, tier in tiers]
        yield "cairn_tier_used_bytes", [((name,), tier.used_bytes) for name, tier in tiers]
        yield "cairn_tier_blocks", [((name,), tier.replicas) for name, tier in tiers]
        yield "cairn_tier_slabs", slabs
        yield "cairn_tenant_used_bytes", used
        yield "cairn_index_published_blocks", [((name,), index["published"]) for name, index in indexes.items()]
        yield "cairn_index_crowded_out_total", [((name,), index["crowded_out"]) for name, index in indexes.items()]


def _labelled(numbers: Mapping[str, float]) -> Samples:
    return [((label,), number) for label, number in numbers.items()]
