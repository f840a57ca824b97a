"""Blocks held in place: leases, the memory that they lie in, and gets that copy out of it."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from engine_client.steps import Call, Held, HeldOnDevice, Link, OpenSpace, Operation, Patience, Work, milliseconds
from kvstore import wire
from kvstore.copier import checksum, copy_bytes
from kvstore.errors import InvalidRequest, NotFound
from kvstore.packed import pack_keys, unpack_u64
from kvstore.region import Region
from kvstore.types import HBM, BlockKey

HELD_BYTES = 8 << 20  # copied at a time, while the node loads what follows


def map_slabs(link: Link, slab_ids: Sequence[int]) -> Operation[None]:
    shared = link.shared
    assert shared is not None

    def run() -> None:
        try:
            shared.map(slab_ids)
        except NotFound:
            return  # its blocks went elsewhere meanwhile: they are looked up again

    if not all(map(shared.is_mapped, slab_ids)):
        yield Work(run, -1)


def acquire_request(number: int, space: OpenSpace, keys: Sequence[BlockKey], lease_s: float, patience: Patience,
                     *, layers: int = 0, deliver: bool = False, tier: str = "",
                     parent: BlockKey | None = None, enough: int = 0) -> wire.Acquire:  # fmt: skip
    return wire.Acquire(
        number,
        space.number,
        pack_keys(keys),
        milliseconds(lease_s),
        milliseconds(patience.wait_s),
        layers,
        deliver,
        milliseconds(patience.load_s),
        patience.tokens_per_s,
        tier,
        parent or b"",
        enough,
    )


def acquire(
    link: Link,
    space: OpenSpace,
    keys: Sequence[BlockKey],
    *,
    lease_s: float,
    patience: Patience,
    layers: int,
    parent: BlockKey | None = None,
    enough: int = 0,
) -> Operation[Held | None]:
    """Hold the longest prefix that is here or comes in time, in place; with `enough`, as soon as so many blocks are
    here. Shared memory only."""
    shared = link.shared
    if shared is None:
        raise InvalidRequest("a lease needs shared memory: connect over the node's Unix socket")
    reply = yield Call(
        lambda number: acquire_request(
            number, space, keys, lease_s, patience, layers=layers, parent=parent, enough=enough
        ),
        wait_s=patience.longest_s,
    )
    if not reply.lease_id:
        return None
    slab_ids, offsets = unpack_u64(reply.slab_ids), unpack_u64(reply.offsets)
    checksums, in_place = unpack_u64(reply.checksums), unpack_u64(reply.layers)
    held = Held(link, reply.lease_id, reply.lease_ms / 1000, [], checksums, in_place)
    try:
        yield from map_slabs(link, slab_ids)
        places = zip(slab_ids, offsets, unpack_u64(reply.sizes), strict=True)
        held.blocks = [shared.slot(slab_id, offset, size) for slab_id, offset, size in places]
    except BaseException:
        yield from release(link, held)
        raise
    return held


def acquire_on_device(
    link: Link,
    space: OpenSpace,
    keys: Sequence[BlockKey],
    *,
    lease_s: float,
    patience: Patience,
    parent: BlockKey | None = None,
) -> Operation[HeldOnDevice | None]:
    """Hold the longest prefix that is in HBM or can be brought there in time. Its slabs are not mapped yet."""
    reply = yield Call(
        lambda number: acquire_request(number, space, keys, lease_s, patience, tier=HBM, parent=parent),
        wait_s=patience.longest_s,
    )
    if not reply.lease_id:
        return None
    columns = map(unpack_u64, (reply.slab_ids, reply.offsets, reply.sizes))
    places = tuple(zip(*columns, strict=True))
    checksums, layers = unpack_u64(reply.checksums), unpack_u64(reply.layers)
    lease_given_s = reply.lease_ms / 1000
    return HeldOnDevice(link, reply.lease_id, lease_given_s, [], checksums, layers, places=places, ready=reply.event)


def device_slabs(link: Link, held: HeldOnDevice, slab_ids: Sequence[int]) -> Operation[list[Region | bytes]]:
    """That from which to map slabs that held blocks lie in; see `SharedMemory.device_slabs`."""
    held.check(link)
    shared = link.shared
    if shared is None:
        raise InvalidRequest("HBM is shared on a host: connect over the node's Unix socket")
    slabs: list[Region | bytes] = yield Work(lambda: shared.device_slabs(slab_ids), -1)
    return slabs


def renew(link: Link, held: Held, lease_s: float) -> Operation[None]:
    held.check(link)
    yield Call(lambda number: wire.Renew(number, held.lease_id, milliseconds(lease_s)))


def release(link: Link, held: Held) -> Operation[None]:
    """Nothing is left to release on a connection that is lost."""
    held.give_back()
    if held.link is link:
        yield Call(lambda number: wire.Release(number, held.lease_id, held.last_use))


def get_held(
    link: Link,
    space: OpenSpace,
    keys: Sequence[BlockKey],
    targets: Sequence[Any],
    patience: Patience,
    parent: BlockKey | None,
) -> Operation[int]:
    """Get blocks that the index does not offer (yet): hold them, copy, verify, let go. Some MiB at a time, so that the
    first are copied while the node still loads others."""
    sizes = [memoryview(target).nbytes for target in targets]
    until = time.monotonic() + patience.longest_s
    done = 0
    while done < len(keys):
        left = min(max(until - time.monotonic(), 0.0), patience.load_s)
        rest = Patience(min(patience.wait_s, left), left, patience.tokens_per_s) if done else patience
        enough = sum(total < HELD_BYTES for total in accumulate(sizes[done:])) + 1
        before = keys[done - 1] if done else parent
        held = yield from acquire(
            link, space, keys[done:], lease_s=60.0, patience=rest, layers=0, parent=before, enough=enough
        )
        if held is None:
            break
        try:
            for key, block, size in zip(keys[done:], held.blocks, sizes[done:], strict=False):
                if len(block) > size:
                    raise InvalidRequest(f"block {key.hex()} has {len(block)} bytes; its buffer has {size}")
            copy = partial(_copy_held, held, targets[done:], verify=link.verify)
            good = yield Work(copy, sum(map(len, held.blocks)))
        finally:
            yield from release(link, held)
        done += good
        if good < len(held.blocks):
            yield Call(partial(report_request, space, [keys[done]]))
            break
        if good < enough:
            break
    return done


def _copy_held(held: Held, targets: Sequence[Any], *, verify: bool) -> int:
    for position, (block, expected) in enumerate(zip(held.blocks, held.checksums, strict=True)):
        target = memoryview(targets[position]).cast("B")[: len(block)]
        copy_bytes(target, block)
        if verify and checksum(target) != expected:
            return position
    return len(held.blocks)


def report_request(space: OpenSpace, keys: Sequence[BlockKey], number: int) -> wire.Report:
    return wire.Report(number, space.number, pack_keys(keys))
