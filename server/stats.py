"""What a node says of itself: the answer to Stat, which CLI, REST and metrics show."""

from collections.abc import Sequence
from typing import Any

from kvstore.bandwidth import Bandwidth
from kvstore.catalogue import OpenNamespace, Tenant
from kvstore.cluster.overview import Overview
from kvstore.cluster.service import Cluster
from kvstore.store import Store
from kvstore.table import Tier
from kvstore.types import DRAM, HBM, OBJECT, TierName
from kvstore.upkeep import Upkeep
from server.rdma import NodeRdma


def stats(
    store: Store, upkeep: Upkeep, tenant: Tenant, rdma: NodeRdma | None = None, cluster: Cluster | None = None
) -> dict[str, Any]:
    """Nested plain values. An admin sees all tenants, others themselves. Without `rdma` nothing is said of it, and of
    `cluster` alike."""
    mine = [name for name in store.table.tiers[DRAM].tenant_bytes if tenant.admin or name == tenant.name]
    return {
        "tiers": tiers(store, upkeep, tenant),
        "tenants": {name: _tenant(store, name) for name in sorted({*mine, tenant.name})},
        "namespaces": [
            namespace for namespace in namespaces(store) if tenant.admin or namespace["tenant"] == tenant.name
        ],
        "counters": counters(store),
        "index": {
            name: numbers for name, numbers in store.exports.describe().items() if tenant.admin or name == tenant.name
        },
        **({"cluster": Overview(cluster).numbers()} if cluster is not None else {}),
        **({"rdma": rdma.describe("" if tenant.admin else tenant.name)} if rdma is not None else {}),
    }


def tiers(store: Store, upkeep: Upkeep, tenant: Tenant) -> list[dict[str, Any]]:
    """One row per tier, fastest first; sizes in bytes, rates per second.

    `hit_ratio` is of all blocks that were asked for. Hits are those of all tenants, and None but for an admin;
    `write_amplification` is bytes written by bytes admitted, None where nothing was.
    """
    rows = [_slabs_row(store, upkeep, tier) | _medium(store, tier.name) for tier in store.table.tiers.values()]
    if store.below.bucket is not None:
        rows.append(_bucket_row(store))
    for row in rows:
        row["promoted_blocks"] = store.counters.promoted_blocks[row["tier"]]
        row["demoted_blocks"] = store.counters.demoted_blocks[row["tier"]]
        row["moved_blocks"] = store.defragment.moved_blocks[row["tier"]]
        row["write_amplification"] = _write_amplification(row)
    _count_hits(rows, list(store.catalogue.all()) if tenant.admin else [])
    return rows


def _count_hits(rows: list[dict[str, Any]], spaces: Sequence[OpenNamespace]) -> None:
    """A hit is of the tier that the block was in when it was asked for; DRAM's are those of no other."""
    hits = sum(space.hit_blocks for space in spaces)
    asked = hits + sum(space.missed_blocks for space in spaces)
    elsewhere = {row["tier"]: row.get("hit_blocks", row["promoted_blocks"]) for row in rows if row["tier"] != DRAM}
    for row in rows:
        hit_blocks = elsewhere.get(row["tier"], max(hits - sum(elsewhere.values()), 0))
        row["hit_blocks"] = hit_blocks if spaces else None
        row["hit_ratio"] = round(min(hit_blocks / asked, 1.0), 4) if asked else None


def _write_amplification(row: dict[str, Any]) -> float | None:
    admitted_bytes = row["admission"]["admitted_bytes"] if "admission" in row else 0
    return round(row["write"]["bytes"] / admitted_bytes, 3) if admitted_bytes else None


def _slabs_row(store: Store, upkeep: Upkeep, tier: Tier) -> dict[str, Any]:
    slabs = tier.pool.slabs.values()
    cut = [slab for slab in slabs if slab.group is not None]
    return {
        "tier": str(tier.name),
        "capacity_bytes": tier.pool.capacity_bytes,
        "target_bytes": store.sizings[tier.name].target * tier.pool.slab_bytes,
        "used_bytes": tier.used_bytes,
        "blocks": tier.replicas,
        "draining": len(tier.draining),
        "high_watermark": upkeep.marks[tier.name].high,
        "low_watermark": upkeep.marks[tier.name].low,
        "slab_bytes": tier.pool.slab_bytes,
        "slabs": {"cut": len(cut), "spare": len(slabs) - len(cut)},
        "classes": _classes(tier),
    }


def _medium(store: Store, tier: TierName) -> dict[str, Any]:
    disk = store.below.disk
    if tier == HBM and store.lifting is not None:
        return {
            "medium": store.lifting.hbm.describe(),
            "health": store.lifting.health.reason,
            "hit_blocks": store.lifting.hit_blocks,
            "lifted_blocks": store.lifting.lifted_blocks,
        }
    if tier == DRAM or disk is None:
        return {"medium": store.dram.describe()}
    return {
        "medium": disk.medium.describe(),
        "health": _health(disk.read_health.reason, disk.write_health.reason),
        "failures": {"read": disk.read_health.failures, "write": disk.write_health.failures},
        "read": _path(disk.reading),
        "write": _path(disk.writing),
        "queued": disk.queue.waiting,
        "admission": {
            "admitted_bytes": store.below.admission.admitted_bytes,
            "unused_blocks": store.below.admission.unused_blocks,
            "over_budget_blocks": store.below.admission.over_budget_blocks,
        },
        "ledger": {"pending": store.below.records.pending if store.below.records is not None else 0},
        "is_recovering": store.demotion.is_paused,
    }


def _bucket_row(store: Store) -> dict[str, Any]:
    bucket = store.below.bucket
    assert bucket is not None
    told = bucket.describe()
    return {
        "tier": str(OBJECT),
        "capacity_bytes": bucket.spec.capacity_bytes,
        "used_bytes": told["bytes"],
        "blocks": told["blocks"],
        "medium": told,
        "health": "" if bucket.may_load() else "away",
        "read": _path(bucket.reading),
    }


def _path(path: Bandwidth) -> dict[str, Any]:
    return {
        "bytes": path.total_bytes,
        "requests": path.requests,
        "bytes_per_s": path.bytes_per_s,
        "request_s": path.request_s,
        "queued_bytes": path.queued_bytes,
    }


def _health(reading: str, writing: str) -> str:
    """Empty while all is well."""
    return "; ".join(filter(None, [reading and f"reading: {reading}", writing and f"writing: {writing}"]))


def _classes(tier: Tier) -> list[dict[str, Any]]:
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
        "shed_blocks": counted.shed_blocks,
        "loads_too_slow": counted.loads_too_slow,
        "hedged_loads": counted.hedged_loads,
        "hedges_won": counted.hedges_won,
        "readmitted_blocks": counted.readmitted_blocks,
    }
