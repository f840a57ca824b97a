"""What a client can ask of a node, each operation written once.

An operation is a generator. It yields what must be done outside (`Call` the node, do `Work` on bytes) and is
sent the outcome; the blocking and the async client drive the same generators, each in its own way.
"""

from collections.abc import Sequence
from typing import Any

from engine_client.steps import Call, Grant, Held, Link, OpenSpace, Operation, PutReport, Work
from kvstore import wire
from kvstore.copier import address_of, checksum, copy_bytes, copy_hashed
from kvstore.errors import Corrupt, InvalidRequest, NotFound, ProtocolError, StaleLease
from kvstore.transport.local import LocalGet, View
from kvstore.types import BlockKey, Placement
from kvstore.wire import pack_keys, pack_u64, unpack_u64

SENT_ALONG_BYTES = 256 << 10


def open_space(link: Link, space: OpenSpace) -> Operation[OpenSpace]:
    """Make `space` known on this connection: number and root come from the node."""
    reply = yield Call(lambda number: wire.Open(number, space.name, space.namespace))
    if not 0 <= space.part < reply.namespace.parts:
        raise InvalidRequest(f"part {space.part} of {reply.namespace.parts}")
    space.epoch = -1  # other threads may be reading: they take no number without its epoch
    space.number, space.root = reply.number, BlockKey(reply.root)
    space.epoch = link.welcome.epoch
    return space


def find_space(link: Link, name: str, part: int) -> Operation[OpenSpace]:
    """The namespace that a name stands for already. NotFound when it stands for none."""
    reply = yield Call(lambda number: wire.Open(number, name, None))
    return OpenSpace(name, reply.namespace, BlockKey(reply.root), reply.number, part, link.welcome.epoch)


def welcome(link: Link) -> Operation[wire.Welcome]:
    """What the node said of itself."""
    yield from ()
    return link.welcome


def match(link: Link, space: OpenSpace, keys: Sequence[BlockKey]) -> Operation[int]:
    """How many blocks of a chain the node has, from the first. Nothing is held."""
    if link.shared is not None:
        blocks = link.shared.reader.match(space.number, keys, space.namespace.parts)
        if blocks == len(keys) or link.shared.reader.is_complete:
            return blocks
    reply = yield Call(lambda number: wire.Match(number, space.number, pack_keys(keys)))
    return int(reply.blocks)


def get_rest(
    link: Link,
    space: OpenSpace,
    keys: Sequence[BlockKey],
    targets: Sequence[Any],
    wait_s: float,
    local: LocalGet | None,
) -> Operation[int]:
    """Go on with a get where shared memory alone could not: map slabs, ask the node, report damage.

    `local` says how far shared memory went; None when it was not tried yet.
    """
    if local is None:
        local = LocalGet() if link.shared is None else (yield _local_get(link, space, keys, targets))
    done = local.blocks
    while link.shared is not None and done < len(keys):
        if local.unmapped is not None:
            yield from _map(link, [local.unmapped])
        elif local.damaged:
            yield from report(space, [keys[done]])
            return done
        elif wait_s <= 0 and link.shared.reader.is_complete:
            return done
        else:
            return done + (yield from _get_held(link, space, keys[done:], targets[done:], wait_s))
        local = yield _local_get(link, space, keys[done:], targets[done:])
        done += local.blocks
    if done < len(keys):
        done += yield from _get_delivered(link, space, keys[done:], targets[done:], wait_s)
    return done


def _local_get(link: Link, space: OpenSpace, keys: Sequence[BlockKey], targets: Sequence[Any]) -> Work:
    shared = link.shared
    assert shared is not None
    size = sum(memoryview(target).nbytes for target in targets)
    return Work(lambda: shared.get_into(space.prefix, keys, targets, verify=link.verify), size)


def _map(link: Link, slab_ids: Sequence[int]) -> Operation[None]:
    shared = link.shared
    assert shared is not None

    def run() -> None:
        try:
            shared.map(slab_ids)
        except NotFound:
            return  # its blocks went elsewhere meanwhile: they are looked up again

    if not all(map(shared.is_mapped, slab_ids)):
        yield Work(run, -1)


def _get_held(
    link: Link, space: OpenSpace, keys: Sequence[BlockKey], targets: Sequence[Any], wait_s: float
) -> Operation[int]:
    """Get blocks that the index does not offer (yet): hold them, copy, verify, let go."""
    held = yield from acquire(link, space, keys, lease_s=60.0, wait_s=wait_s, layers=0)
    if held is None:
        return 0
    try:
        sizes = [memoryview(target).nbytes for target in targets]
        for key, block, size in zip(keys, held.blocks, sizes, strict=False):
            if len(block) > size:
                raise InvalidRequest(f"block {key.hex()} has {len(block)} bytes; its buffer has {size}")
        good = yield Work(lambda: _copy_held(held, targets, verify=link.verify), sum(sizes))
    finally:
        yield from release(link, held)
    if good < len(held.blocks):
        yield from report(space, [keys[good]])
    return int(good)


def _copy_held(held: Held, targets: Sequence[Any], *, verify: bool) -> int:
    for position, (block, expected) in enumerate(zip(held.blocks, held.checksums, strict=True)):
        target = memoryview(targets[position]).cast("B")[: len(block)]
        copy_bytes(target, block)
        if verify and checksum(target) != expected:
            return position
    return len(held.blocks)


def _get_delivered(
    link: Link, space: OpenSpace, keys: Sequence[BlockKey], targets: Sequence[Any], wait_s: float
) -> Operation[int]:
    """Get blocks over the connection, received straight into `targets` and always verified."""
    views = [memoryview(target).cast("B") for target in targets]

    def places(reply: wire.Acquired) -> list[memoryview]:
        sizes = unpack_u64(reply.sizes)
        for view, size in zip(views, sizes, strict=False):
            if size > len(view):
                raise InvalidRequest(f"a block has {size} bytes; its buffer has {len(view)}")
        return [view[:size] for view, size in zip(views, sizes, strict=False)]

    wait_ms = int(wait_s * 1000)
    reply = yield Call(
        lambda number: wire.Acquire(number, space.number, pack_keys(keys), 60_000, wait_ms, 0, True),
        targets=places,
        wait_s=wait_s,
    )
    blocks = places(reply)
    expected = unpack_u64(reply.checksums)
    found = yield Work(lambda: [checksum(block) for block in blocks], sum(map(len, blocks)))
    for position in range(len(blocks)):
        if found[position] != expected[position]:
            yield from report(space, [keys[position]])
            return position
    return len(blocks)


def views(link: Link, space: OpenSpace, keys: Sequence[BlockKey]) -> Operation[list[View]]:
    """Blocks in place without a lease: use them, then ask each whether it `is_valid()`. Shared memory only."""
    shared = link.shared
    if shared is None:
        raise InvalidRequest("views need shared memory: connect over the node's Unix socket")
    while True:
        found, unmapped = shared.views(space.prefix, keys)
        if unmapped is None:
            return found
        yield from _map(link, [unmapped])


def acquire(
    link: Link, space: OpenSpace, keys: Sequence[BlockKey], *, lease_s: float, wait_s: float, layers: int
) -> Operation[Held | None]:
    """Hold the longest prefix that is here or comes within `wait_s`, in place. Shared memory only."""
    shared = link.shared
    if shared is None:
        raise InvalidRequest("a lease needs shared memory: connect over the node's Unix socket")
    wait_ms, lease_ms = int(wait_s * 1000), int(lease_s * 1000)
    reply = yield Call(
        lambda number: wire.Acquire(number, space.number, pack_keys(keys), lease_ms, wait_ms, layers),
        wait_s=wait_s,
    )
    if not reply.lease_id:
        return None
    slab_ids, offsets = unpack_u64(reply.slab_ids), unpack_u64(reply.offsets)
    checksums, in_place = unpack_u64(reply.checksums), unpack_u64(reply.layers)
    held = Held(link, reply.lease_id, reply.lease_ms / 1000, [], checksums, in_place)
    try:
        yield from _map(link, slab_ids)
        places = zip(slab_ids, offsets, unpack_u64(reply.sizes), strict=True)
        held.blocks = [shared.slot(slab_id, offset, size) for slab_id, offset, size in places]
    except BaseException:
        yield from release(link, held)
        raise
    return held


def renew(link: Link, held: Held, lease_s: float) -> Operation[None]:
    held.check(link)
    yield Call(lambda number: wire.Renew(number, held.lease_id, int(lease_s * 1000)))


def release(link: Link, held: Held) -> Operation[None]:
    """Nothing is left to release on a connection that is lost."""
    held.give_back()
    if held.link is link:
        yield Call(lambda number: wire.Release(number, held.lease_id))


def place(
    link: Link,
    space: OpenSpace,
    keys: Sequence[BlockKey],
    sizes: Sequence[int],
    parent: BlockKey | None,
    sources: Sequence[memoryview] | None = None,
) -> Operation[Grant]:
    """Ask for slots for a run of a chain; fill `slots`, then `commit` or `abort`.

    Where memory is not shared the slots are those of `sources`, filled already, or new buffers.
    """
    packed = pack_keys(keys), parent or b"", pack_u64(sizes)
    reply = yield Call(lambda number: wire.Put(number, space.number, *packed))
    placements = tuple(map(Placement, reply.placements))
    granted = [at for at, placement in enumerate(placements) if placement is Placement.GRANTED]
    slab_ids, offsets = unpack_u64(reply.slab_ids), unpack_u64(reply.offsets)
    if not len(granted) == len(slab_ids) == len(offsets):
        raise ProtocolError(f"{len(granted)} blocks granted, {len(slab_ids)} slots")
    if link.shared is None:
        slots = [sources[at] if sources else memoryview(bytearray(sizes[at])) for at in granted]
        return Grant(link, reply.grant_id, placements, granted, slots, remote=True)
    grant = Grant(link, reply.grant_id, placements, granted, [], remote=False)
    try:
        yield from _map(link, slab_ids)
        places = zip(slab_ids, offsets, granted, strict=True)
        grant.slots = [link.shared.slot(slab_id, offset, sizes[at]) for slab_id, offset, at in places]
    except BaseException:
        yield from abort(link, grant)
        raise
    if not grant.grant_id:
        grant.give_back()
    return grant


def progress(link: Link, grant: Grant, layers: int) -> Operation[None]:
    """The first `layers` layers of all slots are in place. Says nothing of slots that are not shared."""
    if grant.grant_id and not grant.remote:
        if grant.link is not link:
            raise StaleLease("the connection that the grant was got on is lost")  # who writes may be writing still
        yield Call(lambda number: wire.Progress(number, grant.grant_id, layers))


def commit(link: Link, grant: Grant, checksums: Sequence[int] | None = None) -> Operation[PutReport]:
    """All slots are filled. `checksums` if they are known already."""
    if not grant.grant_id:
        return PutReport.of(grant.placements, ())
    grant.check(link)
    try:
        if checksums is None:
            size = sum(map(len, grant.slots))
            checksums = yield Work(lambda: [checksum(slot) for slot in grant.slots], size)
        packed = pack_u64(checksums)
        payload = grant.slots if grant.remote else ()
        yield Call(lambda number: wire.Commit(number, grant.grant_id, packed), payload)
    finally:
        grant.give_back()
    return PutReport.of(grant.placements, grant.slots)


def abort(link: Link, grant: Grant) -> Operation[None]:
    """Nothing is left to give up on a connection that is lost."""
    grant.give_back()
    if grant.grant_id and grant.link is link:
        yield Call(lambda number: wire.Abort(number, grant.grant_id))


def put(
    link: Link, space: OpenSpace, keys: Sequence[BlockKey], blocks: Sequence[Any], parent: BlockKey | None
) -> Operation[PutReport]:
    """Store a run of a chain: those of its blocks that the node has not and has room for.

    Small ones are sent along with the request, which saves a round trip and costs two copies in the kernel.
    """
    sources = [memoryview(block).cast("B") for block in blocks]
    if len(sources) != len(keys):
        raise InvalidRequest(f"{len(sources)} blocks for {len(keys)} keys")
    sizes = [len(source) for source in sources]
    if 0 < sum(sizes) <= SENT_ALONG_BYTES:
        packed = (
            pack_keys(keys),
            parent or b"",
            pack_u64(sizes),
            pack_u64([checksum(source) for source in sources]),
        )
        reply = yield Call(lambda number: wire.Put(number, space.number, *packed), sources)
        placements = tuple(map(Placement, reply.placements))
        if Placement.FULL not in placements:
            granted = [at for at, placement in enumerate(placements) if placement is Placement.GRANTED]
            return PutReport.of(placements, [sources[at] for at in granted])
    grant = yield from place(link, space, keys, sizes, parent, sources)
    wanted = [sources[at] for at in grant.granted]
    try:
        checksums = yield Work(lambda: _fill(grant, wanted), sum(map(len, wanted)))
    except BaseException:
        yield from abort(link, grant)
        raise
    return (yield from commit(link, grant, checksums))


def _fill(grant: Grant, blocks: Sequence[memoryview]) -> list[int]:
    """Copy into shared slots; each checksum while the bytes are still in the cache."""
    if grant.remote:
        return [checksum(block) for block in blocks]
    checksums = []
    for slot, block in zip(grant.slots, blocks, strict=True):
        assert len(slot) == len(block)
        checksums.append(copy_hashed(address_of(slot), address_of(block), block))
    return checksums


def report(space: OpenSpace, keys: Sequence[BlockKey]) -> Operation[int]:
    """These blocks did not have their checksum here: the node looks itself, and drops what is damaged."""
    reply = yield Call(lambda number: wire.Report(number, space.number, pack_keys(keys)))
    return int(reply.corrupt)


def get_bytes(link: Link, space: OpenSpace, key: BlockKey) -> Operation[bytes]:
    """One block as fresh bytes. NotFound when it is not here, Corrupt when it is damaged."""
    rows = yield from explain(space, [key], b"")
    if not rows[0]["hit"]:
        raise NotFound(f"block {key.hex()}: {rows[0]['reason']}")
    target = bytearray(rows[0]["bytes"])
    blocks = yield from get_rest(link, space, [key], [target], 0.0, None)
    if not blocks:
        raise Corrupt(f"block {key.hex()} went or was damaged while it was read")
    return bytes(target)


def evict(space: OpenSpace, keys: Sequence[BlockKey] | None) -> Operation[wire.Evicted]:
    """Delete blocks, or all of the namespace for None."""
    packed = pack_keys(keys or ())
    reply: wire.Evicted = yield Call(lambda number: wire.Evict(number, space.number, packed, keys is None))
    return reply


def pin(space: OpenSpace, keys: Sequence[BlockKey], *, hard: bool, ttl_s: float) -> Operation[wire.Pinned]:
    """Keep the prefix of `keys` that is here: `hard` never goes, soft goes last; for `ttl_s`."""
    packed = pack_keys(keys)
    reply: wire.Pinned = yield Call(lambda number: wire.Pin(number, space.number, packed, hard, int(ttl_s * 1000)))
    return reply


def unpin(pin_id: int) -> Operation[None]:
    yield Call(lambda number: wire.Unpin(number, pin_id))


def explain(space: OpenSpace, keys: Sequence[BlockKey], tokens: bytes) -> Operation[list[dict[str, Any]]]:
    """Why each block hits or misses; with the prompt's tokens (u32) other namespaces are looked at too."""
    reply = yield Call(lambda number: wire.Explain(number, space.number, pack_keys(keys), tokens))
    return list(reply.blocks)


def list_blocks(space: OpenSpace, after: BlockKey | None, limit: int) -> Operation[wire.Listed]:
    """Up to `limit` blocks of the namespace, from the one after `after` on."""
    reply: wire.Listed = yield Call(lambda number: wire.List(number, space.number, after or b"", limit))
    return reply


def stat() -> Operation[dict[str, Any]]:
    """What the node says of itself."""
    reply = yield Call(wire.Stat)
    return dict(reply.values)


def set_tier(
    tier: str, capacity_bytes: int | None, high_watermark: float | None, low_watermark: float | None
) -> Operation[None]:
    """Change a tier while it serves."""
    yield Call(lambda number: wire.SetTier(number, tier, capacity_bytes, high_watermark, low_watermark))


def check() -> Operation[list[str]]:
    """Fsck of the live node: what is wrong, a sentence each."""
    reply = yield Call(wire.Check)
    return list(reply.problems)
