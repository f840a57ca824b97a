"""Which instance computes a prompt: one policy a file, all asked the same way."""

from collections.abc import Callable
from typing import Final

from scheduler.policies.kvcache_centric import KvcacheCentric
from scheduler.policies.least_loaded import LeastLoaded
from scheduler.policies.policy import Draw, Policy
from scheduler.policies.prefix_affinity import PrefixAffinity
from scheduler.policies.random_choice import RandomChoice
from scheduler.policies.round_robin import RoundRobin
from scheduler.tuning import Tuning

POLICIES: Final[dict[str, Callable[[Draw, Tuning], Policy]]] = {
    policy.name: policy for policy in (RandomChoice, RoundRobin, LeastLoaded, PrefixAffinity, KvcacheCentric)
}
