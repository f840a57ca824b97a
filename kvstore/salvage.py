"""A lost ledger made anew from the headers on the disk: slow, and only for that."""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from mmap import mmap

import numpy as np

from kvstore.catalogue import Catalogue, OpenNamespace
from kvstore.disk import Disk, disk_stride
from kvstore.diskblock import ALIGN, BlockHeader, parse
from kvstore.ledger import ROW, Rows
from kvstore.tiers.nvme import NvmeTier
from kvstore.types import NVME, GroupKey, Slot

log = logging.getLogger("cairn.salvage")

READ_BYTES = 4 << 20
MOST_GENERATION = 1 << 62  # what a payload pretends may not let a slot's next generation be too large

Read = Callable[[int, memoryview], None]
"""Fill a view, of whole pages, from an offset in a slab. Raises OSError."""


async def salvage(disk: Disk, catalogue: Catalogue) -> tuple[list[Rows], dict[int, GroupKey]]:
    """What the headers say: the records of all blocks of known namespaces, and what each slab is cut for."""
    roots: dict[bytes, OpenNamespace] = {space.root: space for space in catalogue.all()}
    chunks: list[Rows] = []
    groups: dict[int, GroupKey] = {}
    for slab_id in list(disk.medium.existing()):
        rows, group = await disk.queue.load(partial(_slab, disk.medium, slab_id, roots))
        if group is not None:
            chunks.append(rows)
            groups[slab_id] = group
    if groups:
        blocks = sum(map(len, chunks))
        log.warning("the ledger was empty: %d blocks found by their headers in %d slabs", blocks, len(groups))
    return chunks, groups


def headers(read: Read, slab_id: int, slab_bytes: int) -> Iterator[BlockHeader]:
    """Each page of a slab that is a header of a block in this very place.

    A slot that was given back still has one, and a payload may pretend to be one: who reads a block verifies it.
    """
    page = memoryview(mmap(-1, READ_BYTES))
    for start in range(0, slab_bytes, READ_BYTES):
        size = min(READ_BYTES, slab_bytes - start)
        read(start, page[:size])
        for offset in range(0, size, ALIGN):
            header = parse(page[offset : offset + ALIGN])
            if header is not None and is_at_home(header, slab_id, start + offset, slab_bytes):
                yield header


def is_at_home(header: BlockHeader, slab_id: int, offset: int, slab_bytes: int) -> bool:
    return (
        header.slab_id == slab_id
        and 0 < header.size <= slab_bytes
        and header.slot_index * disk_stride(header.size) == offset
        and offset + disk_stride(header.size) <= slab_bytes
        and header.generation < MOST_GENERATION
    )


def group_of(found: list[BlockHeader], tenants: Mapping[bytes, str]) -> GroupKey | None:
    """What a slab with these headers was cut for last; `tenants` by the root of each known namespace."""
    known = (header for header in found if header.root in tenants)
    newest = max(known, key=lambda header: header.generation, default=None)
    return GroupKey(tenants[newest.root], disk_stride(newest.size)) if newest is not None else None


def _slab(medium: NvmeTier, slab_id: int, roots: Mapping[bytes, OpenNamespace]) -> tuple[Rows, GroupKey | None]:
    def read(offset: int, view: memoryview) -> None:
        medium.load(Slot(NVME, slab_id, offset, len(view), 0), [view])

    tenants = {root: space.tenant.name for root, space in roots.items()}
    medium.restore(slab_id)
    try:
        found = list(headers(read, slab_id, medium.spec.slab_bytes))
    except OSError as error:
        log.error("slab %d cannot be read, its blocks are lost: %s", slab_id, error)
        found = []
    finally:
        medium.release(slab_id)
    group = group_of(found, tenants)
    if group is None:
        return np.zeros(0, ROW), None
    good = [header for header in found if GroupKey(tenants.get(header.root, ""), disk_stride(header.size)) == group]
    rows = np.zeros(len(good), ROW)
    for position, header in enumerate(good):
        row = rows[position]
        row["number"] = roots[header.root].number
        row["key_bytes"], row["parent_bytes"] = len(header.key), len(header.parent or b"")
        row["key"], row["parent"] = header.key.ljust(18, b"\0"), (header.parent or b"").ljust(18, b"\0")
        for name in ("slab_id", "slot_index", "size", "generation", "checksum", "last_use_ms", "depth", "hits"):
            row[name] = getattr(header, name)
    return rows, group
