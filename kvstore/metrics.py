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
    "cairn_tier_read_bytes_total": ("counter", ("tier",), "Bytes of blocks read from a tier below DRAM."),
    "cairn_tier_written_bytes_total": ("counter", ("tier",), "Bytes of blocks written to a tier below DRAM."),
    "cairn_tier_reads_total": ("counter", ("tier",), "Reads from a tier below DRAM, of one or more blocks each."),
    "cairn_tier_writes_total": ("counter", ("tier",), "Writes to a tier below DRAM, of one or more blocks each."),
    "cairn_tier_read_bytes_per_second": ("gauge", ("tier",), "How fast blocks come from a tier while it reads."),
    "cairn_tier_write_bytes_per_second": ("gauge", ("tier",), "How fast blocks go to a tier while it writes."),
    "cairn_tier_healthy": ("gauge", ("tier",), "1 while a tier below DRAM can be read and written, else 0."),
    "cairn_tier_failures_total": ("counter", ("tier", "direction"), "Reads and writes of a tier that failed."),
    "cairn_tier_recovering": ("gauge", ("tier",), "1 until it is known what an earlier start left in the tier."),
    "cairn_tier_queued_jobs": ("gauge", ("tier",), "Reads and writes that wait for a thread."),
    "cairn_promoted_blocks_total": ("counter", ("tier",), "Blocks loaded into DRAM, by the tier they came from."),
    "cairn_demoted_blocks_total": ("counter", ("tier",), "Blocks written below DRAM, by the tier they went to."),
    "cairn_shed_blocks_total": ("counter", (), "Blocks evicted from DRAM that a lower tier should have had."),
    "cairn_too_slow_blocks_total": ("counter", (), "Blocks not loaded: too late, or computed sooner."),
    "cairn_hedged_blocks_total": ("counter", (), "Blocks read a second time because the first read was late."),
    "cairn_hedges_won_total": ("counter", (), "Blocks of which the second read was there first."),
    "cairn_readmitted_blocks_total": ("counter", (), "Blocks written once more because their slab was given back."),
    "cairn_admitted_bytes_total": ("counter", (), "Bytes of blocks that were found worth a write."),
    "cairn_admission_refused_blocks_total": ("counter", ("reason",), "Blocks found not worth a write, by reason."),
    "cairn_ledger_pending_changes": ("gauge", (), "Changes of the NVMe tier that its ledger has not been told of."),
    "cairn_object_requests_total": ("counter", ("kind",), "Requests to the bucket, by kind."),
    "cairn_object_retries_total": ("counter", (), "Requests to the bucket that were repeated."),
    "cairn_object_errors_total": ("counter", (), "Requests to the bucket that failed, repeated ones included."),
    "cairn_object_blocks_total": ("counter", ("outcome",), "Blocks asked of the bucket, by what became of them."),
    "cairn_object_packs": ("gauge", (), "Packs in the bucket that this node knows."),
    "cairn_object_packs_trimmed_total": ("counter", (), "Packs that this node deleted to keep the capacity."),
    "cairn_object_packs_gone_total": ("counter", (), "Packs that were known and had been deleted."),
    "cairn_tenant_used_bytes": ("gauge", ("tier", "tenant"), "Bytes of slots in use by a tenant."),
    "cairn_rdma_peers": ("gauge", (), "Connections that have queue pairs."),
    "cairn_rdma_registered_bytes": ("gauge", (), "Bytes of slabs that NICs may read."),
    "cairn_rdma_quarantined_bytes": ("gauge", (), "Bytes that a NIC may still write though nobody waits for them."),
    "cairn_rdma_late_completions_total": ("counter", (), "Completions of READs that nobody waited for any more."),
    "cairn_rdma_paths": ("gauge", ("port", "state"), "Paths from a port of the node to clients, by state: up, down."),
    "cairn_rdma_path_connects_total": ("counter", ("port",), "Times that a path was connected, the first included."),
    "cairn_rdma_path_failures_total": ("counter", ("port",), "Times that a path failed, or could not be connected."),
    "cairn_rdma_read_bytes_total": ("counter", ("port",), "Bytes that the node has READ from clients."),
    "cairn_rdma_read_bytes_per_second": ("gauge", ("port",), "How fast the port's fastest path READs while it does."),
    "cairn_rdma_read_seconds": ("gauge", ("port",), "How long READs take, posted to completed, on the slowest path."),
    "cairn_cluster_members": ("gauge", (), "Members of the cluster as the node sees them, itself included."),
    "cairn_cluster_in_touch": ("gauge", (), "1 while the node is a member and hears of the others, else 0."),
    "cairn_cluster_draining": ("gauge", (), "1 while the node takes no blocks since it is being emptied, else 0."),
    "cairn_cluster_directory_blocks": ("gauge", (), "Blocks of which the node's part of the directory knows."),
    "cairn_cluster_directory_holdings": ("gauge", (), "Pairs of such a block and a node that has it."),
    "cairn_cluster_copies": ("gauge", (), "Blocks of DRAM that other nodes have too, and that go first."),
    "cairn_cluster_copy_bytes": ("gauge", (), "Bytes of slots with such copies."),
    "cairn_cluster_adrift_blocks_total": ("counter", (), "Blocks stored that other nodes may not find."),
    "cairn_cluster_locates_total": ("counter", (), "Requests to other nodes who has blocks."),
    "cairn_cluster_announced_batches_total": ("counter", (), "Batches that told what the node has, and were answered."),
    "cairn_cluster_repaired_partitions_total": ("counter", (), "Partitions found to differ, and told anew."),
    "cairn_cluster_pulled_bytes_total": ("counter", (), "Bytes of blocks that came from other nodes."),
    "cairn_cluster_pulled_bytes_per_second": ("gauge", (), "How fast blocks come from other nodes while they do."),
    "cairn_cluster_retried_blocks_total": ("counter", (), "Blocks asked of another holder after one failed."),
    "cairn_cluster_replicated_blocks_total": ("counter", (), "Blocks that other nodes pulled at this node's wish."),
    "cairn_cluster_dropped_copies_total": ("counter", (), "Copies dropped since their stripe was hot no more."),
    "cairn_cluster_short_blocks_total": ("counter", (), "Blocks found to have fewer copies than was asked for."),
    "cairn_cluster_reads_per_second": ("gauge", (), "Blocks that others read of the 16 hottest stripes here."),
    "cairn_cluster_member_latency_seconds": ("gauge", ("member",), "How long a lease takes to get; 0: not known."),
    "cairn_cluster_member_read_bytes_total": ("counter", ("member",), "Bytes of blocks that came from a member."),
    "cairn_cluster_member_read_bytes_per_second": ("gauge", ("member",), "How fast they come while they do."),
    "cairn_cluster_member_failures_total": ("counter", ("member",), "Requests to a member that failed."),
    "cairn_cluster_member_used_bytes": ("gauge", ("member",), "Bytes of a member's DRAM in use, as it said last."),
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
    promoted_blocks: Counter[str] = field(default_factory=Counter)  # by the tier that they came from
    demoted_blocks: Counter[str] = field(default_factory=Counter)  # by the tier that they went to
    shed_blocks: int = 0  # evicted from DRAM though a lower tier should have had them
    loads_too_slow: int = 0
    hedged_loads: int = 0
    hedges_won: int = 0
    readmitted_blocks: int = 0
