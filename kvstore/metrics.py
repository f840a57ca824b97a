"""Plain counters of a node, and what each is called and means. Integers on the hot path; exported elsewhere."""

from collections import Counter
from dataclasses import dataclass, field

METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    # name: (type, labels, help)
    "cairn_hit_blocks_total": ("counter", ("tenant", "namespace"), "Blocks that readers found, local reads included."),
    "cairn_missed_blocks_total": ("counter", ("tenant", "namespace"), "Blocks that the node was asked for in vain."),
    "cairn_loaded_bytes_total": ("counter", ("path",), "Bytes of blocks sent or lent to readers, by path."),
    "cairn_stored_bytes_total": ("counter", ("path",), "Bytes of blocks committed, by path."),
    "cairn_stored_blocks_total": ("counter", (), "Blocks committed."),
    "cairn_duplicate_blocks_total": ("counter", (), "Blocks offered that were here or being written already."),
    "cairn_refused_blocks_total": ("counter", ("reason",), "Blocks for which there was no room or no quota."),
    "cairn_orphan_blocks_total": ("counter", (), "Blocks stored whose parent is not on this node."),
    "cairn_removed_blocks_total": ("counter", ("cause",), "Blocks that went, by cause."),
    "cairn_corrupt_blocks_total": ("counter", (), "Blocks whose bytes did not have their checksum."),
    "cairn_requests_total": ("counter", ("verb",), "Requests of the control protocol and of REST, by verb."),
    "cairn_errors_total": ("counter", ("code",), "Requests that were refused or failed, by error code."),
    "cairn_lapsed_holds_total": ("counter", (), "Leases, grants and pins that ran out."),
    "cairn_lost_sessions_total": ("counter", (), "Sessions that ended while they held something."),
    "cairn_sessions": ("gauge", ("kind",), "Open sessions, by kind of connection."),
    "cairn_tier_capacity_bytes": ("gauge", ("tier",), "Bytes of the tier's slabs."),
    "cairn_tier_used_bytes": ("gauge", ("tier",), "Bytes of slots in use."),
    "cairn_tier_blocks": ("gauge", ("tier",), "Blocks in the tier."),
    "cairn_tier_slabs": ("gauge", ("tier", "state"), "Slabs, by state: cut, spare."),
    "cairn_tenant_used_bytes": ("gauge", ("tier", "tenant"), "Bytes of slots in use by a tenant."),
    "cairn_index_published_blocks": ("gauge", ("tenant",), "Blocks in a tenant's published index."),
    "cairn_index_crowded_out_total": ("counter", ("tenant",), "Blocks that found no place in the published index."),
}  # fmt: skip


@dataclass(slots=True)
class Counters:
    """What the store counts as it goes; whoever exports reads them."""

    loaded_bytes: Counter[str] = field(default_factory=Counter)
    stored_bytes: Counter[str] = field(default_factory=Counter)
    stored_blocks: int = 0
    duplicate_blocks: int = 0
    refused_blocks: Counter[str] = field(default_factory=Counter)
    orphan_blocks: int = 0
    removed_blocks: Counter[str] = field(default_factory=Counter)
    corrupt_blocks: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lapsed_holds: int = 0
    lost_sessions: int = 0
