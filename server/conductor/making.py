"""The policy as an operator's settings make it."""

from random import Random

from scheduler.admission import ADMISSIONS
from scheduler.conductor import Conductor
from scheduler.index import PrefixIndex
from scheduler.policies import POLICIES
from scheduler.tuning import Slo, Tuning
from server.conductor.settings import ConductorSettings, weights


def make_conductor(index: PrefixIndex, settings: ConductorSettings) -> Conductor:
    """A Conductor with nobody in its fleet."""
    draw = Random().random
    tuning = Tuning(
        work_weight=settings.work_weight,
        balancing_threshold=settings.balancing_threshold,
        session_slack=settings.session_slack,
        collocate_below=settings.collocate_below,
        fair_from=settings.fair_from,
        fair_slack=settings.fair_slack,
        low_priority_share=settings.low_priority_share,
        weights=weights(settings.shares),
    )
    return Conductor(
        index,
        POLICIES[settings.policy](draw, tuning),
        ADMISSIONS[settings.admission](),
        Slo(settings.ttft_slo, settings.tbt_slo),
        draw,
        tuning,
    )
