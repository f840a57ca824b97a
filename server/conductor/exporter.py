"""The Conductor's counters for Prometheus."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from server.conductor.counts import Histogram

if TYPE_CHECKING:
    from server.conductor.service import ConductorService

MOST_SERIES: Final = 256  # instances that have samples of their own: the first by name

# name: (kind, labels, what it says)
METRICS: Final[dict[str, tuple[str, tuple[str, ...], str]]] = {
    "cairn_conductor_routes_total": ("counter", ("policy", "outcome"), "Requests that were sent to instances."),
    "cairn_conductor_refusals_total": ("counter", ("reason",), "Requests that were refused."),
    "cairn_conductor_pulls_total": ("counter", (), "Routes with blocks to be pulled from another node."),
    "cairn_conductor_prompt_tokens_total": ("counter", (), "Tokens of the prompts that were routed."),
    "cairn_conductor_cached_tokens_total": ("counter", (), "Of those, tokens that need no computing."),
    "cairn_conductor_states_total": ("counter", ("state",), "Reports of how far requests are."),
    "cairn_conductor_requests": ("gauge", (), "Requests under way."),
    "cairn_conductor_lost_instances_total": ("counter", (), "Instances that were silent for too long."),
    "cairn_conductor_lost_requests_total": ("counter", (), "Requests that were at instances when those went."),
    "cairn_conductor_expired_requests_total": ("counter", (), "Requests whose deadline passed before a token came."),
    "cairn_conductor_index_blocks": ("gauge", (), "Different blocks that are known."),
    "cairn_conductor_index_holdings": ("gauge", (), "Pairs of a block and a holder."),
    "cairn_conductor_index_bytes": ("gauge", (), "Memory of the index."),
    "cairn_conductor_index_dropped_total": ("counter", (), "Blocks that are left out of the index for want of room."),
    "cairn_conductor_holders": ("gauge", ("kind", "standing"), "Nodes and engines by what is known of them."),
    "cairn_conductor_forgotten_nodes_total": ("counter", (), "Times that a node was out of reach for too long."),
    "cairn_conductor_instances": ("gauge", ("role",), "Registered instances; draining ones are a role."),
    "cairn_conductor_queue_seconds": ("gauge", ("instance",), "Until a prefill that is sent now would begin."),
    "cairn_conductor_ttft_predicted_seconds_total": ("counter", (), "Predicted times to the first token, summed."),
    "cairn_conductor_ttft_measured_seconds_total": ("counter", (), "Of the same requests, as they were."),
    "cairn_conductor_first_tokens_total": ("counter", ("within_slo",), "First tokens, and whether they kept the SLO."),
    "cairn_conductor_hints_total": ("counter", ("outcome",), "Loads ahead that nodes were asked for."),
    "cairn_conductor_hints_underway": ("gauge", (), "Loads ahead that have not come yet."),
    "cairn_conductor_scaling_target": ("gauge", ("model", "role"), "Instances that there should be."),
}
HISTOGRAMS: Final = {
    "cairn_conductor_route_seconds": "Time to decide, hashing included.",
    "cairn_conductor_ttft_error_seconds": "How far the first token was from its prediction.",
}
Samples = Iterable[tuple[tuple[str, ...], float]]


def render(service: "ConductorService") -> tuple[bytes, str]:
    """The text and its media type."""
    collectors = CollectorRegistry(auto_describe=False)
    collectors.register(_Reading(service))
    return generate_latest(collectors), CONTENT_TYPE_LATEST


class _Reading(Collector):
    """Reads the counters once."""

    def __init__(self, service: "ConductorService") -> None:
        self._service = service

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        samples = dict([*self._decided(), *self._known(), *self._fleet()])
        for name, (kind, labels, text) in METRICS.items():
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, text, labels=labels)
            for values, number in samples[name]:
                family.add_metric(values, number)
            yield family
        counts = self._service.counts
        for (name, text), found in zip(HISTOGRAMS.items(), (counts.route_s, counts.ttft_error_s), strict=True):
            yield _histogram(name, text, found)

    def _decided(self) -> Iterator[tuple[str, Samples]]:
        service = self._service
        counts, policy = service.counts, service.config.conductor.policy
        outcomes = [((policy, outcome), number) for outcome, number in counts.routes.items()]
        yield "cairn_conductor_routes_total", outcomes
        yield "cairn_conductor_refusals_total", _labelled(counts.refusals)
        yield "cairn_conductor_pulls_total", [((), counts.pulls)]
        yield "cairn_conductor_prompt_tokens_total", [((), counts.prompt_tokens)]
        yield "cairn_conductor_cached_tokens_total", [((), counts.cached_tokens)]
        yield "cairn_conductor_states_total", _labelled(counts.states)
        yield "cairn_conductor_requests", [((), len(service.conductor.fleet.works))]
        yield "cairn_conductor_lost_instances_total", [((), counts.lost_instances)]
        yield "cairn_conductor_lost_requests_total", [((), counts.lost_requests)]
        yield "cairn_conductor_expired_requests_total", [((), counts.expired_requests)]
        yield "cairn_conductor_ttft_predicted_seconds_total", [((), counts.predicted_ttft_s)]
        yield "cairn_conductor_ttft_measured_seconds_total", [((), counts.measured_ttft_s)]
        yield "cairn_conductor_first_tokens_total", [(("true",), counts.in_time), (("false",), counts.late)]
        hints = service.hints
        outcome = {
            "sent": hints.sent,
            "loaded": hints.loaded,
            "failed": hints.failed,
            "evicted": hints.evicted,
        }
        yield "cairn_conductor_hints_total", _labelled(Counter(outcome))
        yield "cairn_conductor_hints_underway", [((), hints.underway)]

    def _known(self) -> Iterator[tuple[str, Samples]]:
        service = self._service
        index, views = service.index, service.nodes.views.values()
        yield "cairn_conductor_index_blocks", [((), index.blocks)]
        yield "cairn_conductor_index_holdings", [((), index.holdings)]
        yield "cairn_conductor_index_bytes", [((), index.nbytes)]
        yield "cairn_conductor_index_dropped_total", [((), index.dropped + sum(view.left_out for view in views))]
        standings = Counter(service.standings())
        yield "cairn_conductor_holders", list(standings.items())
        yield "cairn_conductor_forgotten_nodes_total", [((), service.nodes.forgotten)]

    def _fleet(self) -> Iterator[tuple[str, Samples]]:
        now = time.monotonic()
        members = self._service.conductor.fleet.members
        roles = Counter("draining" if m.is_draining else m.instance.role.value for m in members.values())
        yield "cairn_conductor_instances", _labelled(roles)
        queues = [((name,), members[name].queue_s(now)) for name in sorted(members)[:MOST_SERIES]]
        yield "cairn_conductor_queue_seconds", queues
        advice = self._service.advisors.advice(now)
        targets = [((model, "prefill"), float(found.prefill)) for model, found in advice.items()]
        targets += [((model, "decode"), float(found.decode)) for model, found in advice.items()]
        yield "cairn_conductor_scaling_target", targets


def _histogram(name: str, text: str, found: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text)
    family.add_metric((), buckets=found.buckets(), sum_value=found.total)
    return family


def _labelled(numbers: Counter[str]) -> Samples:
    return [((label,), number) for label, number in numbers.items()]
