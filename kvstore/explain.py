"""Why a block hits or misses on this node, in words an operator can act on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.catalogue import OpenNamespace
from kvstore.intake import part_of
from kvstore.prefix import chain
from kvstore.replica import Replica
from kvstore.store import Store
from kvstore.types import DRAM, BlockKey, State


def explain(store: Store, space: OpenNamespace, keys: Sequence[BlockKey], tokens: bytes) -> list[dict[str, Any]]:
    """One row per key: `key` in hex, `hit`, `tier`, `reason`, `bytes`.

    With `tokens` (u32 each, the prompt that the keys were made of) a block that is not here is looked for in
    the tenant's other namespaces, and the row says which field keeps them apart.
    """
    others = _elsewhere(store, space, np.frombuffer(tokens, "<u4"), len(keys)) if tokens else {}
    rows = []
    for position, key in enumerate(keys):
        row = _row(store, space, key)
        if not row["hit"] and position in others:
            row["reason"] += f"; the same tokens are in {others[position]}"
        rows.append(row)
    return rows


def _row(store: Store, space: OpenNamespace, key: BlockKey) -> dict[str, Any]:
    tier, size = whereabouts(store, space, key)
    if not tier:
        return {"key": key.hex(), "hit": False, "tier": "", "reason": _absence(store, space, key), "bytes": 0}
    reason = f"on {tier}: loaded when asked for"
    if tier == DRAM:
        is_whole = store.reads.readable(space, key) is not None
        reason = "here" if is_whole else "here, another part of its block is loaded when asked for"
    return {"key": key.hex(), "hit": True, "tier": tier, "reason": reason, "bytes": size}


def whereabouts(store: Store, space: OpenNamespace, key: BlockKey) -> tuple[str, int]:
    """(The fastest tier that has this key, its bytes), or ("", 0) if any part of its block is in none."""
    for part in range(space.namespace.parts):
        if not store.where(space, part_of(space, key, part))[0]:
            return "", 0
    return store.where(space, key)


def _absence(store: Store, space: OpenNamespace, key: BlockKey) -> str:
    present = space.dram.replicas.get(key)
    if present is not None and present.state is State.ALLOCATED:
        return f"being written: {present.layers} of {space.namespace.layers} layers are in place"
    if present is not None:
        return "this part is here, another part of its block is not"
    last = store.history.last(space.number, key)
    if last is None:
        return "not stored here, as far back as this node remembers"
    what, when = last
    return f"{what}, {store.clock.now() - when:.1f} s ago"


def _elsewhere(store: Store, space: OpenNamespace, ids: np.ndarray, blocks: int) -> dict[int, str]:
    """Position -> a namespace of the same tenant that has the block of the same tokens, and how it differs.

    Of the first `blocks` blocks; of fewer where there are many namespaces, since nobody else is served meanwhile.
    """
    block_tokens = space.namespace.block_tokens
    others = [
        other
        for other in store.catalogue.of_tenant(space.tenant)
        if other is not space and other.namespace.block_tokens == block_tokens
    ]
    found: dict[int, str] = {}
    ids = ids[: min(blocks, store.limits.batch_blocks // max(len(others), 1)) * block_tokens]
    for other in others:
        keys = chain(ids, block_tokens, other.root, other.namespace.hash)
        differences = "; ".join(space.namespace.differences(other.namespace))
        for position, key in enumerate(keys):
            if whereabouts(store, other, key)[0]:
                found.setdefault(position, f"{other.names[0]!r} ({differences})")
    return found


def listed_row(replica: Replica) -> dict[str, Any]:
    """One block of a list, for people."""
    return {
        "key": replica.key.hex(),
        "parent": replica.parent.hex() if replica.parent is not None else "",
        "tier": str(replica.space.tier),
        "bytes": replica.size,
        "state": replica.state.value,
        "checksum": f"{replica.checksum:016x}" if replica.state is State.WRITTEN else "",
        "layers": replica.layers,
        "holders": replica.holders,
    }
