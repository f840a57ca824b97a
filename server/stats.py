"""What a node says of itself: the answer to Stat, which CLI, REST and metrics show."""

from typing import Any

from kvstore.catalogue import Tenant
from kvstore.store import Store
from kvstore.upkeep import Upkeep


def stats(store: Store, upkeep: Upkeep, tenant: Tenant) -> dict[str, Any]:
    """Nested plain values. An admin sees all tenants, others themselves."""
    mine = [name for name in store.table.tiers[_first(store)].tenant_bytes if tenant.admin or name == tenant.name]
    return {
        "tiers": tiers(store, upkeep),
        "tenants": {name: _tenant(store, name) for name in sorted({*mine, tenant.name})},
        "namespaces": [
            namespace for namespace in namespaces(store) if tenant.admin or namespace["tenant"] == tenant.name
        ],
        "counters": counters(store),
        "index": {
            name: numbers for name, numbers in store.exports.describe().items() if tenant.admin or name == tenant.name
        },
    }


def _first(store: Store) -> Any:
    return next(iter(store.table.tiers))


def tiers(store: Store, upkeep: Upkeep) -> list[dict[str, Any]]:
    """One row per tier, fastest first; sizes in bytes."""
    rows = []
    for tier in store.table.tiers.values():
        slabs = tier.pool.slabs.values()
        cut = [slab for slab in slabs if slab.group is not None]
        rows.append(
            {
                "tier": str(tier.name),
                "capacity_bytes": tier.pool.capacity_bytes,
                "target_bytes": store.sizing.target * tier.pool.slab_bytes,
                "used_bytes": tier.used_bytes,
                "blocks": tier.replicas,
                "draining": len(tier.draining),
                "high_watermark": upkeep.high,
                "low_watermark": upkeep.low,
                "slab_bytes": tier.pool.slab_bytes,
                "slabs": {"cut": len(cut), "spare": len(slabs) - len(cut)},
                "medium": store.dram.describe(),
                "classes": _classes(store, tier.name),
            }
        )
    return rows


def _classes(store: Store, tier_name: Any) -> list[dict[str, Any]]:
    tier = store.table.tiers[tier_name]
    rows = []
    for group in tier.pool.groups():
        slabs = tier.pool.of_group(group)
        slots = sum(slab.slots for slab in slabs)
        used = sum(slab.used for slab in slabs)
        rows.append({"slot_bytes": group.slot_bytes, "slabs": len(slabs), "slots": slots, "used": used})
    return rows


def _tenant(store: Store, name: str) -> dict[str, Any]:
    return {"used_bytes": {str(tier.name): tier.tenant_bytes.get(name, 0) for tier in store.table.tiers.values()}}


def namespaces(store: Store) -> list[dict[str, Any]]:
    """One row per namespace of every tenant: the caller leaves out what is not to be seen."""
    return [
        {
            "number": found.number,
            "names": list(found.names),
            "tenant": found.tenant.name,
            "fields": {name: getattr(found.namespace, name) for name in found.namespace.__struct_fields__},
            "fingerprint": found.namespace.fingerprint(),
            "blocks": sum(len(space.replicas) for space in found.spaces),
            "hit_blocks": found.hit_blocks,
            "missed_blocks": found.missed_blocks,
        }
        for found in store.catalogue.all()
    ]


def counters(store: Store) -> dict[str, Any]:
    counted = store.counters
    return {
        "loaded_bytes": dict(counted.loaded_bytes),
        "stored_bytes": dict(counted.stored_bytes),
        "stored_blocks": counted.stored_blocks,
        "duplicate_blocks": counted.duplicate_blocks,
        "refused_blocks": dict(counted.refused_blocks),
        "orphan_blocks": counted.orphan_blocks,
        "removed_blocks": dict(counted.removed_blocks),
        "corrupt_blocks": counted.corrupt_blocks,
        "requests": dict(counted.requests),
        "errors": dict(counted.errors),
        "lapsed_holds": counted.lapsed_holds,
        "lost_sessions": counted.lost_sessions,
    }
