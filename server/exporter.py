"""The node's counters for Prometheus, under the names and labels of kvstore.metrics.METRICS."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.cluster.overview import Overview
from kvstore.metrics import METRICS
from kvstore.types import NVME, OBJECT

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.node import Node

OBJECT_COUNTS = {  # metric: what ObjectTier.describe() calls it
    "cairn_object_retries_total": "retries",
    "cairn_object_errors_total": "errors",
    "cairn_object_packs": "packs",
    "cairn_object_packs_trimmed_total": "trimmed",
    "cairn_object_packs_gone_total": "gone",
}
RDMA_PORTS = {  # metric: what NodeRdma.port_rows() calls it
    "cairn_rdma_path_connects_total": "connects",
    "cairn_rdma_path_failures_total": "failures",
    "cairn_rdma_read_bytes_total": "read_bytes",
    "cairn_rdma_read_bytes_per_second": "bytes_per_s",
    "cairn_rdma_read_seconds": "request_s",
}
CLUSTER_COUNTS = {  # metric: what Overview.numbers() calls it
    "cairn_cluster_members": "members",
    "cairn_cluster_in_touch": "in_touch",
    "cairn_cluster_draining": "draining",
    "cairn_cluster_directory_blocks": "directory_blocks",
    "cairn_cluster_directory_holdings": "directory_holdings",
    "cairn_cluster_copies": "copies",
    "cairn_cluster_copy_bytes": "copy_bytes",
    "cairn_cluster_adrift_blocks_total": "adrift_blocks",
    "cairn_cluster_locates_total": "locates",
    "cairn_cluster_announced_batches_total": "announced_batches",
    "cairn_cluster_repaired_partitions_total": "repaired_partitions",
    "cairn_cluster_pulled_bytes_total": "pulled_bytes",
    "cairn_cluster_pulled_bytes_per_second": "pulled_bytes_per_second",
    "cairn_cluster_retried_blocks_total": "retried_blocks",
    "cairn_cluster_replicated_blocks_total": "replicated_blocks",
    "cairn_cluster_dropped_copies_total": "dropped_copies",
    "cairn_cluster_short_blocks_total": "short_blocks",
    "cairn_cluster_reads_per_second": "reads_per_second",
}
CLUSTER_MEMBERS = {  # metric: what Overview.roster() calls it, and how many of it are one of the metric's unit
    "cairn_cluster_member_latency_seconds": ("latency_ms", 1000),
    "cairn_cluster_member_read_bytes_total": ("read_bytes", 1),
    "cairn_cluster_member_read_bytes_per_second": ("bytes_per_s", 1),
    "cairn_cluster_member_failures_total": ("failures", 1),
    "cairn_cluster_member_used_bytes": ("used_bytes", 1),
}
MOST_MEMBERS = 256  # that have samples of their own: the first by name
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
        yield from self._moved()
        yield from self._present()
        yield from self._below()
        yield from self._bucket()
        yield from self._rdma()
        yield from self._cluster()

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

    def _moved(self) -> Iterator[tuple[str, Samples]]:
        store = self._node.store
        counters, admission = store.counters, store.below.admission
        refused = {"used once": admission.unused_blocks, "over budget": admission.over_budget_blocks}
        yield "cairn_promoted_blocks_total", _labelled(counters.promoted_blocks)
        yield "cairn_demoted_blocks_total", _labelled(counters.demoted_blocks)
        yield "cairn_shed_blocks_total", [((), counters.shed_blocks)]
        yield "cairn_too_slow_blocks_total", [((), counters.loads_too_slow)]
        yield "cairn_hedged_blocks_total", [((), counters.hedged_loads)]
        yield "cairn_hedges_won_total", [((), counters.hedges_won)]
        yield "cairn_readmitted_blocks_total", [((), counters.readmitted_blocks)]
        yield "cairn_admitted_bytes_total", [((), admission.admitted_bytes)]
        yield "cairn_admission_refused_blocks_total", _labelled(refused)

    def _present(self) -> Iterator[tuple[str, Samples]]:
        store = self._node.store
        tiers = [(str(tier.name), tier) for tier in store.table.tiers.values()]
        slabs: list[tuple[tuple[str, ...], float]] = []
        for name, tier in tiers:
            spare = sum(1 for _ in tier.pool.spare())
            slabs += [((name, "cut"), len(tier.pool.slabs) - spare), ((name, "spare"), spare)]
        capacity: dict[str, float] = {name: tier.pool.capacity_bytes for name, tier in tiers}
        used: dict[str, float] = {name: tier.used_bytes for name, tier in tiers}
        blocks: dict[str, float] = {name: tier.replicas for name, tier in tiers}
        bucket = store.below.bucket
        if bucket is not None:
            told = bucket.describe()
            capacity[OBJECT], used[OBJECT], blocks[OBJECT] = bucket.spec.capacity_bytes, told["bytes"], told["blocks"]
        owned = [((name, tenant), size) for name, tier in tiers for tenant, size in tier.tenant_bytes.items()]
        indexes = store.exports.describe()
        yield "cairn_sessions", _labelled({**self._node.connections, "rest": self._http_sessions()})
        yield "cairn_tier_capacity_bytes", _labelled(capacity)
        yield "cairn_tier_used_bytes", _labelled(used)
        yield "cairn_tier_blocks", _labelled(blocks)
        yield "cairn_tier_slabs", slabs
        yield "cairn_tenant_used_bytes", owned
        yield "cairn_index_published_blocks", [((name,), index["published"]) for name, index in indexes.items()]
        yield "cairn_index_crowded_out_total", [((name,), index["crowded_out"]) for name, index in indexes.items()]

    def _below(self) -> Iterator[tuple[str, Samples]]:
        """Of the tiers below DRAM that there are."""
        store = self._node.store
        disk, bucket, records = store.below.disk, store.below.bucket, store.below.records
        read: dict[str, float] = {}
        written: dict[str, float] = {}
        reads: dict[str, float] = {}
        writes: dict[str, float] = {}
        reading: dict[str, float] = {}
        writing: dict[str, float] = {}
        healthy: dict[str, float] = {}
        failures: list[tuple[tuple[str, ...], float]] = []
        if disk is not None:
            read[NVME], written[NVME] = disk.reading.total_bytes, disk.writing.total_bytes
            reads[NVME], writes[NVME] = disk.reading.requests, disk.writing.requests
            reading[NVME], writing[NVME] = disk.reading.bytes_per_s, disk.writing.bytes_per_s
            healthy[NVME] = disk.read_health.is_well and disk.write_health.is_well
            failures += [((NVME, "read"), disk.read_health.failures), ((NVME, "write"), disk.write_health.failures)]
        if bucket is not None:
            told = bucket.describe()
            read[OBJECT], written[OBJECT] = told["bytes_read"], told["bytes_written"]
            reads[OBJECT], writes[OBJECT] = told["requests"].get("get", 0), told["requests"].get("put", 0)
            reading[OBJECT] = bucket.reading.bytes_per_s
            healthy[OBJECT] = told["state"] == "up"
        yield "cairn_tier_read_bytes_total", _labelled(read)
        yield "cairn_tier_written_bytes_total", _labelled(written)
        yield "cairn_tier_reads_total", _labelled(reads)
        yield "cairn_tier_writes_total", _labelled(writes)
        yield "cairn_tier_read_bytes_per_second", _labelled(reading)
        yield "cairn_tier_write_bytes_per_second", _labelled(writing)
        yield "cairn_tier_healthy", _labelled(healthy)
        yield "cairn_tier_failures_total", failures
        yield "cairn_tier_recovering", [((NVME,), store.demotion.is_paused)] if disk is not None else []
        yield "cairn_tier_queued_jobs", [((NVME,), disk.queue.waiting)] if disk is not None else []
        yield "cairn_ledger_pending_changes", [((), records.pending)] if records is not None else []

    def _bucket(self) -> Iterator[tuple[str, Samples]]:
        bucket = self._node.store.below.bucket
        told = bucket.describe() if bucket is not None else {}
        outcomes = {"hit": "hits", "miss": "misses", "damaged": "damaged"} if told else {}
        yield "cairn_object_requests_total", _labelled(told.get("requests", {}))
        yield "cairn_object_blocks_total", _labelled({name: told[counted] for name, counted in outcomes.items()})
        for metric, name in OBJECT_COUNTS.items():
            yield metric, [((), told[name])] if told else []

    def _rdma(self) -> Iterator[tuple[str, Samples]]:
        rdma = self._node.rdma
        rows = rdma.port_rows()
        yield "cairn_rdma_peers", [((), len(rdma.peers))]
        yield "cairn_rdma_registered_bytes", [((), rdma.registered_bytes)]
        yield "cairn_rdma_quarantined_bytes", [((), rdma.quarantined_bytes)]
        yield "cairn_rdma_late_completions_total", [((), rdma.late_completions)]
        states = [((row["port"], state), row[state]) for row in rows for state in ("up", "down")]
        yield "cairn_rdma_paths", states
        for metric, name in RDMA_PORTS.items():
            yield metric, [((row["port"],), row[name]) for row in rows]

    def _cluster(self) -> Iterator[tuple[str, Samples]]:
        """Of the cluster, where the node is in one."""
        cluster = self._node.cluster
        told = Overview(cluster).numbers() if cluster is not None else {}
        rows = Overview(cluster).roster() if cluster is not None else []
        others = [row for row in rows if cluster is not None and row["name"] != cluster.me.name][:MOST_MEMBERS]
        for metric, name in CLUSTER_COUNTS.items():
            yield metric, [((), told[name])] if told else []
        for metric, (name, per_unit) in CLUSTER_MEMBERS.items():
            yield metric, [((row["name"],), row[name] / per_unit) for row in others]


def _labelled(numbers: Mapping[str, float]) -> Samples:
    return [((label,), number) for label, number in numbers.items()]
