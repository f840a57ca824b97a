"""Which objects of a bucket to delete: over the capacity what was not used for longest, and what dead nodes left."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvstore.tiers.bucket import Listed
from kvstore.tiers.packs import manifest_name, pack_name, parse_name

TRIM_TO = 0.9  # of the capacity, so that the next packs find room
ORPHAN_S = 24 * 3600.0  # long after any upload has ended

PackRef = tuple[bytes, str]
"""Root and id."""


class Plan(NamedTuple):
    """`victims`: packs, the first to go first. `orphans`: objects by name, no pack that can be read among them."""

    victims: list[PackRef]
    sizes: dict[PackRef, int]
    orphans: list[str]


def plan_trim(listed: Iterable[Listed], used_s: Mapping[PackRef, float], *, now_s: float, capacity_bytes: int) -> Plan:
    """Decide from one listing; `used_s` is when this node last read a pack. A capacity of 0 is no limit.

    Nodes that trim at once and read the same choose the same. Packs without a manifest count, and are not touched for
    a day: their manifest may be on its way.
    """
    packs: dict[PackRef, Listed] = {}
    manifests: dict[PackRef, Listed] = {}
    for item in listed:
        name = parse_name(item.name)
        if name is not None:
            (manifests if name.is_manifest else packs)[name.root, name.pack_id] = item
    orphans = [pack_name(*ref) for ref in packs.keys() - manifests.keys() if _is_old(packs[ref], now_s)]
    orphans += [manifest_name(*ref) for ref in manifests.keys() - packs.keys() if _is_old(manifests[ref], now_s)]
    sizes = {ref: item.size_bytes for ref, item in packs.items()}
    excess = sum(sizes.values())
    victims = []
    if 0 < capacity_bytes < excess:
        excess -= int(capacity_bytes * TRIM_TO)
        readable = packs.keys() & manifests.keys()
        for ref in sorted(readable, key=lambda ref: (max(used_s.get(ref, 0.0), packs[ref].modified_s), ref)):
            if excess <= 0:
                break
            victims.append(ref)
            excess -= sizes[ref]
    return Plan(victims, sizes, sorted(orphans))


def _is_old(item: Listed, now_s: float) -> bool:
    return now_s - item.modified_s > ORPHAN_S
