"""What an operator may set of the Conductor's decisions, with defaults that hold without tuning."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objectives: seconds to the first token, and between tokens."""

    ttft_s: float = 30.0
    tbt_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """balancing_threshold: how many times longer another node's prefix must be than the local one to be pulled (1 and
    up). Below it the difference is computed, though a pull would be a little faster: pulls load their sources.

    work_weight: of the seconds that a prompt takes to compute at a place, beside the time to its first token, while
    the instances are busy. 0 takes the earliest first token for each request alone. With 2 the simulated mean TTFT of
    prefix_affinity at 1.7 times the conversation trace falls by a quarter, and at its own speed rises by 1 %.
    session_slack: how much longer than at the best place a request may wait to go where its session went before.
    collocate_below: share of its time that an instance may spend on prefill and still decode what it prefilled.
    fair_from: predicted TTFT, as a share of its SLO, from which on tenants are held to their shares.
    fair_slack: how many times its share a tenant may use even then. weights: of tenants; 1 for those not named.
    low_priority_share: of the SLOs, for requests of a priority below 0: they are refused first.
    """

    balancing_threshold: float = 1.2
    work_weight: float = 2.0
    session_slack: float = 0.1
    collocate_below: float = 0.1
    fair_from: float = 0.5
    fair_slack: float = 1.25
    low_priority_share: float = 0.5
    weights: Mapping[str, float] = field(default_factory=dict)
