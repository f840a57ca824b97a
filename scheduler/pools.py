"""Who may take a model's requests, and what they have to do in decode: kept until the fleet changes."""

from collections.abc import Collection, Mapping, ValuesView

from scheduler.decode_pool import DecodePool
from scheduler.fleet import Fleet, Member
from scheduler.outlook import Pool


class Pools:
    """Pools by model, decode pools by model and group: hand-overs are within a group. Nothing is kept of a model that
    nobody serves or has requests of, whoever asks for it."""

    def __init__(self, fleet: Fleet, holders: Mapping[str, int]) -> None:
        self._fleet = fleet
        self._holders = holders
        self._pools: dict[str, Pool] = {}
        self._decodes: dict[tuple[str, str], DecodePool] = {}
        self._beside: dict[str, list[Member]] = {}  # who is beside each node
        self._generation = -1

    @property
    def decodes(self) -> ValuesView[DecodePool]:
        return self._decodes.values()

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

    def decode(self, model: str, group: str) -> DecodePool:
        return self._decodes.setdefault((model, group), DecodePool())

    def _follow(self) -> None:
        """What the fleet has become."""
        self._generation = self._fleet.generation
        self._pools.clear()
        self._beside = {}
        for member in self._fleet.members.values():
            self._beside.setdefault(member.instance.node, []).append(member)
        members: dict[tuple[str, str], list[Member]] = {}
        for member in self._fleet.members.values():
            instance = member.instance
            if instance.role.takes_decode and not member.is_draining:
                members.setdefault((instance.model, instance.group), []).append(member)
        for key in [key for key, pool in self._decodes.items() if not pool and key not in members]:
            del self._decodes[key]
        for key in self._decodes.keys() | members.keys():
            self.decode(*key).members = members.get(key, ())

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
