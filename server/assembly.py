"""The store of a node, put together from its settings: which tiers there are, and what each is made of."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import SystemRandom

from kvstore.admission import Admission
from kvstore.catalogue import Catalogue, Tenant
from kvstore.clock import MonotonicClock
from kvstore.copier import Copier
from kvstore.disk import Disk, disk_stride
from kvstore.disk_queue import DiskQueue
from kvstore.errors import ConfigError
from kvstore.intake import Limits
from kvstore.lifting import Above
from kvstore.records import Records
from kvstore.recover import Recovery, tenants_by_name
from kvstore.replica import Space
from kvstore.store import Below, Store
from kvstore.table import BlockTable, TierShape
from kvstore.tiers import TierSpec
from kvstore.tiers.block_file import probe_for
from kvstore.tiers.dram import DramTier
from kvstore.tiers.nvme import SLABS, NvmeTier
from kvstore.tiers.object_store import ObjectSpec, ObjectTier, open_bucket
from kvstore.types import DRAM, HBM, NVME, OBJECT, TierName
from kvstore.upkeep import Marks
from server.config import Config, HbmSettings, LimitSettings, NvmeSettings, ObjectSettings

LEAST_INDEX_ENTRIES, MOST_INDEX_ENTRIES = 1 << 16, 1 << 27
HBM_THREADS = 2  # one for each direction
INDEX_BYTES_PER_ENTRY = 4096  # of capacity: the index takes at most 1/64 of it, and is half full at 8 KiB a block


@dataclass(slots=True)
class Assembled:
    """A store that does nothing yet; `recovery` is there with a disk."""

    store: Store
    recovery: Recovery | None
    marks: dict[TierName, Marks] = field(default_factory=dict)
    capacities: dict[TierName, int] = field(default_factory=dict)


def make_store(
    config: Config, epoch: int, tenants: Sequence[Tenant], crashed: Callable[[BaseException | None], None]
) -> Assembled:
    """Raises ConfigError when a tier cannot be had as configured."""
    dram, nvme = config.tiers.dram, config.tiers.nvme
    clock = MonotonicClock()
    copier = Copier(config.copier.threads)
    hbm = config.tiers.hbm
    shapes = {HBM: TierShape(dram.slab)} if hbm.device else {}
    shapes[DRAM] = TierShape(dram.slab, dram.policy)
    if nvme.path:
        shapes[NVME] = TierShape(nvme.slab, "", disk_stride)
    table = BlockTable(shapes)
    catalogue = Catalogue(config.limits.namespaces_per_tenant, partial(_spaces, table))
    medium = DramTier(
        TierSpec(DRAM, dram.slab),
        copier,
        huge_pages=dram.huge_pages,
        mlock=dram.mlock,
        prefault=dram.prefault,
    )
    disk, records, recovery = None, None, None
    if nvme.path:
        disk = _disk(nvme, hbm.device, clock, catalogue)
        records = Records(Path(nvme.path), wall_ms=_wall_ms, failed=disk.store_failed)
        by_name = tenants_by_name(tenants)
        recovery = Recovery(table, catalogue, disk, records, tenants=by_name, epoch=epoch, now=clock.now)
    tiers_through = {NVME: nvme.path and nvme.write, OBJECT: config.tiers.object.url and config.tiers.object.write}
    below = Below(
        Admission(everything=nvme.admission == "all", bytes_per_day=nvme.write_budget, now=clock.now()),
        disk=disk,
        records=records,
        bucket=_bucket(config.tiers.object, config.node.name, copier, clock),
        peers=bool(config.cluster.coordinator),
        writes_through=frozenset(tier for tier, write in tiers_through.items() if write == "through"),
    )
    store = Store(
        *(table, catalogue, medium, copier, clock),
        limits=replace(_limits(config.limits), events=config.events.buffer),
        index_entries=_index_entries(config.index.entries, dram.capacity),
        epoch=epoch,
        above=_above(hbm, dram.slab, tenants, disk),
        below=below,
        crashed=crashed,
    )
    store.demotion.is_paused = disk is not None
    made = Assembled(store, recovery)
    made.marks[DRAM] = Marks(dram.high_watermark, dram.low_watermark)
    made.capacities[DRAM] = dram.capacity
    if hbm.device:
        made.marks[HBM] = Marks(1.0, 1.0)
        made.capacities[HBM] = hbm.capacity
    if nvme.path:
        made.marks[NVME] = Marks(nvme.high_watermark, nvme.low_watermark)
        made.capacities[NVME] = nvme.capacity
    return made


def _spaces(table: BlockTable, tenant: str, number: int) -> tuple[Space, ...]:
    return tuple(table.space(tenant, number, tier) for tier in table.tiers)


def _above(hbm: HbmSettings, slab_bytes: int, tenants: Sequence[Tenant], disk: Disk | None) -> Above | None:
    if not hbm.device:
        return None
    from kvstore.tiers.hbm import HbmTier  # torch takes seconds to import, and most nodes do not have it

    copier = Copier(HBM_THREADS)
    one_tenant = len({tenant.name for tenant in tenants}) == 1
    spec = TierSpec(HBM, slab_bytes)
    tier = HbmTier(spec, device=hbm.device, capacity_bytes=hbm.capacity, copier=copier, one_tenant=one_tenant)
    return Above(tier, copier, disk)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _disk(nvme: NvmeSettings, device: str, clock: MonotonicClock, catalogue: Catalogue) -> Disk:
    def root_of(space: Space) -> bytes:
        found = catalogue.of_number(space.number)
        assert found is not None, "namespaces are never closed"
        return found.root

    io = nvme.io
    if io == "auto":
        io = "kvikio" if probe_for(device).path_name == "kvikio-gds" else "posix"
    queue = DiskQueue(nvme.threads)
    medium = NvmeTier(TierSpec(NVME, nvme.slab), Path(nvme.path) / SLABS, queue, io=io)
    return Disk(medium, queue, clock, wall_ms=_wall_ms, root_of=root_of)


def _bucket(settings: ObjectSettings, node: str, copier: Copier, clock: MonotonicClock) -> ObjectTier | None:
    if not settings.url:
        return None
    spec = ObjectSpec(node=node, capacity_bytes=settings.capacity, codec=settings.codec, pack_bytes=settings.pack)
    bucket = open_bucket(settings.url, _options(settings.options))
    return ObjectTier(bucket, spec, copier, clock=clock, wall=time.time, random=SystemRandom())


def _options(text: str) -> Mapping[str, str]:
    options = {}
    for pair in filter(None, text.split(",")):
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"tiers.object.options: expected name=value,name=value, and {name!r} has no value")
        options[name] = value
    return options


def _limits(limits: LimitSettings) -> Limits:
    return Limits(
        batch_blocks=limits.batch_blocks,
        inflight_bytes=limits.inflight_bytes,
        leases_per_client=limits.leases_per_client,
        lease_max_s=limits.lease_max,
        put_timeout_s=limits.put_timeout,
        wait_max_s=limits.wait_max,
        namespaces_per_tenant=limits.namespaces_per_tenant,
        explain_history=limits.explain_history,
        pins_per_tenant=limits.pins_per_tenant,
    )


def _index_entries(wanted: int, capacity_bytes: int) -> int:
    """A power of two, as an index has."""
    if wanted:
        return 1 << (wanted - 1).bit_length()
    enough = 1 << (capacity_bytes // INDEX_BYTES_PER_ENTRY - 1).bit_length()
    return min(max(enough, LEAST_INDEX_ENTRIES), MOST_INDEX_ENTRIES)
