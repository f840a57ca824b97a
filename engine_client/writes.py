"""Operations that put blocks into a node: ask for slots, fill them, commit them."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from engine_client.leases import map_slabs
from engine_client.remote_reads import ALONG_BYTES, offer
from engine_client.steps import Begin, Call, Finish, Grant, Link, OpenSpace, Operation, PutReport, Work
from kvstore import wire
from kvstore.copier import address_of, checksum, copy_hashed
from kvstore.errors import InvalidRequest, ProtocolError, StaleLease, StoreError
from kvstore.packed import pack_keys, pack_u64, unpack_u64
from kvstore.types import BlockKey, Placement

SENT_ALONG_BYTES = 256 << 10
PIECED_BYTES = 4 << 20  # from here on a put is cut in pieces, so that node and client work at the same time


def place(
    link: Link, space: OpenSpace, keys: Sequence[BlockKey], sizes: Sequence[int], parent: BlockKey | None
) -> Operation[Grant]:
    """Ask for slots for a run of a chain; fill `slots`, then `commit` or `abort`.

    Where memory is not shared the slots are new buffers.
    """
    reply = yield _put_request(space, keys, sizes, parent)
    return (yield from _granted(link, reply, sizes, None))


def _put_request(space: OpenSpace, keys: Sequence[BlockKey], sizes: Sequence[int], parent: BlockKey | None) -> Call:
    packed = pack_keys(keys), parent or b"", pack_u64(sizes)
    return Call(lambda number: wire.Put(number, space.number, *packed))


def _granted(
    link: Link, reply: wire.Placed, sizes: Sequence[int], sources: Sequence[memoryview] | None
) -> Operation[Grant]:
    """The slots of a reply; where memory is not shared those of `sources`, filled already, or new buffers."""
    placements = tuple(map(Placement, reply.placements))
    granted = [at for at, placement in enumerate(placements) if placement is Placement.GRANTED]
    slab_ids, offsets = unpack_u64(reply.slab_ids), unpack_u64(reply.offsets)
    if not len(granted) == len(slab_ids) == len(offsets):
        raise ProtocolError(f"{len(granted)} blocks granted, {len(slab_ids)} slots")
    grant = Grant(link, reply.grant_id, placements, granted, [], remote=link.shared is None)
    if not grant.grant_id:
        grant.give_back()
    if link.shared is None:
        grant.slots = [sources[at] if sources else memoryview(bytearray(sizes[at])) for at in granted]
        return grant
    try:
        yield from map_slabs(link, slab_ids)
        places = zip(slab_ids, offsets, granted, strict=True)
        grant.slots = [link.shared.slot(slab_id, offset, sizes[at]) for slab_id, offset, at in places]
    except BaseException:
        yield from abort(link, grant)
        raise
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
        if not (yield from _offered(link, grant, checksums)):
            yield _commit_request(grant, checksums)
    finally:
        grant.give_back()
    return PutReport.of(grant.placements, grant.slots)


def _offered(link: Link, grant: Grant, checksums: Sequence[int]) -> Operation[bool]:
    """Whether the node has READ the blocks by itself: large ones, where it can."""
    if link.remote is None or not grant.remote or sum(map(len, grant.slots)) <= ALONG_BYTES:
        return False
    return (yield from offer(link, grant, checksums))


def _commit_request(grant: Grant, checksums: Sequence[int]) -> Call:
    packed = pack_u64(checksums)
    return Call(lambda number: wire.Commit(number, grant.grant_id, packed), grant.slots if grant.remote else ())


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
    if len(set(keys)) != len(keys) or parent in keys:
        raise InvalidRequest("a block comes once in a chain")
    if len(keys) > link.welcome.batch_blocks:
        raise InvalidRequest(f"{len(keys)} blocks in one put; this node takes {link.welcome.batch_blocks}")
    sizes = [len(source) for source in sources]
    along = PutReport()
    if 0 < sum(sizes) <= (SENT_ALONG_BYTES if link.remote is None else ALONG_BYTES):
        packed = (
            pack_keys(keys),
            parent or b"",
            pack_u64(sizes),
            pack_u64([checksum(source) for source in sources]),
        )
        reply = yield Call(lambda number: wire.Put(number, space.number, *packed), sources)
        placements = tuple(map(Placement, reply.placements))
        stored = [
            source for source, placement in zip(sources, placements, strict=True) if placement is Placement.GRANTED
        ]
        along = PutReport.of(placements, stored)
        if Placement.FULL not in placements:
            return along  # else the node may have memory if it is given the time to make it ready
    pieces = _pieces(len(keys), sum(sizes)) if link.shared is not None else [slice(0, len(keys))]
    report = yield from _put_pieces(link, space, keys, sources, parent, pieces)
    return report.after(along)


def _pieces(blocks: int, size: int) -> list[slice]:
    """How a large put is cut: the node sees to one piece while the client copies another.

    Only the short first piece is waited for before the copying, and only the short last one after it.
    """
    edge = max(blocks // 16, 1)
    if size < PIECED_BYTES or blocks < 4 * edge:
        return [slice(0, blocks)]
    return [slice(0, edge), slice(edge, blocks - edge), slice(blocks - edge, blocks)]


def _put_pieces(
    link: Link,
    space: OpenSpace,
    keys: Sequence[BlockKey],
    sources: Sequence[memoryview],
    parent: BlockKey | None,
    pieces: Sequence[slice],
) -> Operation[PutReport]:
    placing, committing, reports = [], [], []
    grant: Grant | None = None
    try:
        for piece in pieces:
            sizes = [len(source) for source in sources[piece]]
            above = keys[piece.start - 1] if piece.start else parent
            placing.append((piece, (yield Begin(_put_request(space, keys[piece], sizes, above)))))
        while placing:
            piece, ticket = placing.pop(0)
            reply = yield Finish(ticket)
            blocks = sources[piece]
            grant = yield from _granted(link, reply, [len(block) for block in blocks], blocks)
            wanted = [blocks[at] for at in grant.granted]
            reports.append(PutReport.of(grant.placements, grant.slots))
            if reports[-1].refused:  # what follows hangs on what was refused
                rest = sum(piece.stop - piece.start for piece, _ in placing)
                reports.append(PutReport(refused=rest, over_quota=rest if reports[-1].over_quota else 0))
                yield from _give_up(link, placing, [], None)
            if wanted:
                checksums = yield Work(partial(_fill, grant, wanted), sum(map(len, wanted)))
                if (yield from _offered(link, grant, checksums)):
                    grant.give_back()
                    grant = None
                    continue
                committing.append((grant, (yield Begin(_commit_request(grant, checksums)))))
            grant = None
        while committing:
            begun, ticket = committing.pop(0)
            begun.give_back()
            yield Finish(ticket)
    except BaseException:
        yield from _give_up(link, placing, committing, grant)
        raise
    return PutReport.sum(reports)


def _give_up(
    link: Link,
    placing: list[tuple[slice, Any]],
    committing: list[tuple[Grant, Any]],
    grant: Grant | None,
) -> Operation[None]:
    """Free what a put that failed still has, and forget it: what is committed already stays."""
    while placing:
        _, ticket = placing.pop(0)
        with suppress(StoreError):
            reply = yield Finish(ticket)
            yield from abort(link, Grant(link, reply.grant_id, (), [], [], remote=False))
    while committing:
        begun, ticket = committing.pop(0)
        begun.give_back()
        with suppress(StoreError):
            yield Finish(ticket)
    if grant is not None:
        with suppress(StoreError):
            yield from abort(link, grant)


def _fill(grant: Grant, blocks: Sequence[memoryview]) -> list[int]:
    """Copy into shared slots; each checksum while the bytes are still in the cache."""
    if grant.remote:
        return [checksum(block) for block in blocks]
    checksums = []
    for slot, block in zip(grant.slots, blocks, strict=True):
        assert len(slot) == len(block)
        checksums.append(copy_hashed(address_of(slot), address_of(block), block))
    return checksums
