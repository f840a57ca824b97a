"""Who may take a model's requests, kept until the fleet changes, and how long their requests decode."""

from collections.abc import Collection, Mapping
from typing import Final

from scheduler.fleet import Fleet, Member
from scheduler.outlook import Pool

FIRST_DECODE_S: Final = 10.0  # that a request decodes, until some have shown it
LEAST_DECODE_S: Final = 0.001
MEMORY: Final = 0.98  # weight of the past in a mean over requests


class Pools:
    """Pools by model, times by model and group: hand-overs are within a group. Nothing is kept of a model that nobody
    serves, whoever asks for it."""

    def __init__(self, fleet: Fleet, holders: Mapping[str, int]) -> None:
        self._fleet = fleet
        self._holders = holders
        self._pools: dict[str, Pool] = {}
        self._decode_s: dict[tuple[str, str], float] = {}
        self._beside: dict[str, list[Member]] = {}  # who is beside each node
        self._generation = -1

    def of(self, model: str, exclude: Collection[str]) -> Pool:
        """Those that prefill and have somebody in their group to decode, without those in `exclude`."""
        if self._generation != self._fleet.generation:
            self._follow()
        if exclude:
            return self._make(model, exclude)
        pool = self._pools.get(model)
        if pool is None:
            pool = self._make(model, ())
            if pool.members:
                self._pools[model] = pool
        return pool

    def decode_s(self, model: str, group: str) -> float:
        """How long a request decodes, as a mean."""
        return self._decode_s.get((model, group), FIRST_DECODE_S)

    def decoded(self, model: str, group: str, seconds: float) -> None:
        """A request took that long."""
        mean_s = MEMORY * self.decode_s(model, group) + (1 - MEMORY) * seconds
        self._decode_s[model, group] = max(LEAST_DECODE_S, mean_s)

    def _follow(self) -> None:
        """What the fleet has become."""
        self._generation = self._fleet.generation
        self._pools.clear()
        self._beside = {}
        for member in self._fleet.members.values():
            self._beside.setdefault(member.instance.node, []).append(member)
        served = {(member.instance.model, member.instance.group) for member in self._fleet.members.values()}
        self._decode_s = {key: seconds for key, seconds in self._decode_s.items() if key in served}

    def _make(self, model: str, exclude: Collection[str]) -> Pool:
        takers: dict[str, list[Member]] = {}
        for member in self._fleet.takers(model, prefill=False):
            if member.instance.name not in exclude:
                takers.setdefault(member.instance.group, []).append(member)
        members = [
            member
            for member in self._fleet.takers(model, prefill=True)
            if member.instance.group in takers and member.instance.name not in exclude
        ]
        return Pool(members, takers, self._holders, self._beside)
