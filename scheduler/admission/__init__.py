"""Which requests are refused, and when: one rule a file, all asked the same way."""

from collections.abc import Callable
from typing import Final

from scheduler.admission.admission import Admission
from scheduler.admission.baseline import Baseline
from scheduler.admission.early import EarlyRejection
from scheduler.admission.none import AdmitAll
from scheduler.admission.predictive import PredictiveRejection

ADMISSIONS: Final[dict[str, Callable[[], Admission]]] = {
    rule.name: rule for rule in (AdmitAll, Baseline, EarlyRejection, PredictiveRejection)
}
