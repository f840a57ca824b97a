"""A replay of requests on a simulated cluster of prefill and decode instances, under the real Conductor."""

from collections.abc import Callable, Sequence

import numpy as np

from scheduler.admission import ADMISSIONS
from scheduler.conductor import Conductor
from scheduler.index import PrefixIndex
from scheduler.policies import POLICIES
from scheduler.requests import Chain, Request
from scheduler.simulation.cluster import Cluster, Shape
from scheduler.simulation.loop import Loop
from scheduler.simulation.outcomes import Outcomes
from scheduler.simulation.traces import TraceRequest
from scheduler.tuning import Slo, Tuning


def simulate(
    requests: Sequence[TraceRequest],
    shape: Shape,
    draw: Callable[[], float],
    *,
    policy: str = "kvcache_centric",
    admission: str = "none",
    slo: Slo | None = None,
    tuning: Tuning | None = None,
) -> Outcomes:
    """What came of each request, in order of arrival. `draw` decides between equals: a seed makes a run repeatable.

    policy, admission: names in POLICIES and ADMISSIONS. ValueError for names that there are not.
    """
    loop = Loop()
    for name, known in ((policy, POLICIES), (admission, ADMISSIONS)):
        if name not in known:
            raise ValueError(f"{name} is none of {', '.join(known)}")
    slo, tuning = slo or Slo(), tuning or Tuning()
    chooses, admits = POLICIES[policy](draw, tuning), ADMISSIONS[admission]()
    cluster = Cluster(loop, Conductor(PrefixIndex(), chooses, admits, slo, draw, tuning), shape, slo)
    cluster.replay([asked(request, number, shape.block_tokens) for number, request in enumerate(requests)])
    return Outcomes(cluster.records, cluster.loads)


def asked(request: TraceRequest, number: int, block_tokens: int) -> Request:
    """A request of a trace as the Conductor takes it. Its output length is known to it, as an upper limit would be."""
    chain = Chain(np.array(request.blocks, np.uint64), block_tokens)
    return Request(
        id=str(number),
        tokens=request.tokens,
        chains=(chain,),
        arrived_s=request.arrived_s,
        output_tokens=request.output_tokens,
    )
