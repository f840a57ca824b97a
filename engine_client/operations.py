"""What a client can ask of a node, each operation written once.

An operation is a generator. It yields what must be done outside (`Call` the node, do `Work` on bytes) and is
sent the outcome; the blocking and the async client drive the same generators, each in its own way.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from engine_client.cluster_operations import SLOW_S, check_replicas
from engine_client.leases import acquire_request, get_held, map_slabs, report_request
from engine_client.remote_reads import CROSSOVER_BYTES, get_by_reads
from engine_client.steps import Call, Link, OpenSpace, Operation, Patience, Work, milliseconds
from kvstore import wire
from kvstore.copier import checksum
from kvstore.errors import Corrupt, InvalidRequest, NotFound, PeerLost
from kvstore.packed import pack_keys, unpack_u64
from kvstore.transport.local import LocalGet, View
from kvstore.types import BlockKey


def open_space(link: Link, space: OpenSpace, replicas: int = -1, *, through: bool = False) -> Operation[OpenSpace]:
    """Make `space` known on this connection: number and root come from the node. `replicas` and `through`: see
    `wire.Open`."""
    check_replicas(replicas, through=through)
    reply = yield Call(lambda number: wire.Open(number, space.name, space.namespace, replicas, through))
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


def match(link: Link, space: OpenSpace, keys: Sequence[BlockKey], parent: BlockKey | None = None) -> Operation[int]:
    """How many blocks of a chain the node has, from the first. Nothing is held. `parent` is the key before the first:
    other nodes of a cluster are asked by it."""
    if link.shared is not None:
        blocks = link.shared.reader.match(space.number, keys, space.namespace.parts)
        if blocks == len(keys) or link.shared.reader.is_complete:
            return blocks
    reply = yield Call(lambda number: wire.Match(number, space.number, pack_keys(keys), parent or b""))
    return int(reply.blocks)


def get_rest(
    link: Link,
    space: OpenSpace,
    keys: Sequence[BlockKey],
    targets: Sequence[Any],
    patience: Patience,
    local: LocalGet | None,
    *,
    parent: BlockKey | None = None,
) -> Operation[int]:
    """Go on with a get where shared memory alone could not: map slabs, ask the node, report damage.

    `local` says how far shared memory went; None when it was not tried yet. `parent` is the key before the first.
    """
    if local is None:
        local = LocalGet() if link.shared is None else (yield _local_get(link, space, keys, targets))
    done = local.blocks
    while link.shared is not None and done < len(keys):
        if local.unmapped is not None:
            yield from map_slabs(link, [local.unmapped])
        elif local.damaged:
            yield from report(space, [keys[done]])
            return done
        elif patience.wait_s <= 0 and link.shared.reader.is_complete:
            return done
        else:
            before = keys[done - 1] if done else parent
            return done + (yield from get_held(link, space, keys[done:], targets[done:], patience, before))
        local = yield _local_get(link, space, keys[done:], targets[done:])
        done += local.blocks
    if link.remote is not None and sum(memoryview(target).nbytes for target in targets) > CROSSOVER_BYTES:
        views = [memoryview(target).cast("B") for target in targets]
        here = yield from get_by_reads(link, space, keys, views, patience, parent)
        if here >= 0:
            return here
        done = -1 - here
    if done < len(keys):
        before = keys[done - 1] if done else parent
        done += yield from _get_delivered(link, space, keys[done:], targets[done:], patience, before)
    return done


def _local_get(link: Link, space: OpenSpace, keys: Sequence[BlockKey], targets: Sequence[Any]) -> Work:
    shared = link.shared
    assert shared is not None
    prefix = _prefix(link, space)
    size = sum(memoryview(target).nbytes for target in targets)
    return Work(lambda: shared.get_into(prefix, keys, targets, verify=link.verify), size)


def _prefix(link: Link, space: OpenSpace) -> bytes:
    """Of the names of `space` on the node of `link`. PeerLost when `space` follows another by now."""
    if space.epoch != link.welcome.epoch:
        raise PeerLost("the node was started again meanwhile")
    return space.prefix


def _get_delivered(
    link: Link,
    space: OpenSpace,
    keys: Sequence[BlockKey],
    targets: Sequence[Any],
    patience: Patience,
    parent: BlockKey | None,
) -> Operation[int]:
    """Get blocks over the connection, received straight into `targets` and always verified."""
    views = [memoryview(target).cast("B") for target in targets]

    def places(reply: wire.Acquired) -> list[memoryview]:
        sizes = unpack_u64(reply.sizes)
        for view, size in zip(views, sizes, strict=False):
            if size > len(view):
                raise InvalidRequest(f"a block has {size} bytes; its buffer has {len(view)}")
        return [view[:size] for view, size in zip(views, sizes, strict=False)]

    reply = yield Call(
        lambda number: acquire_request(number, space, keys, 60.0, patience, deliver=True, parent=parent),
        targets=places,
        wait_s=patience.longest_s,
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
        found, unmapped = shared.views(_prefix(link, space), keys)
        if unmapped is None:
            return found
        yield from map_slabs(link, [unmapped])


def report(space: OpenSpace, keys: Sequence[BlockKey]) -> Operation[int]:
    """These blocks did not have their checksum here: the node looks itself, and drops what is damaged."""
    reply = yield Call(partial(report_request, space, keys))
    return int(reply.corrupt)


def get_bytes(link: Link, space: OpenSpace, key: BlockKey, patience: Patience) -> Operation[bytes]:
    """One block as fresh bytes. NotFound when it is not here, Corrupt when it is damaged."""
    rows = yield from explain(space, [key], b"")
    if not rows[0]["hit"]:
        raise NotFound(f"block {key.hex()}: {rows[0]['reason']}")
    target = bytearray(rows[0]["bytes"])
    blocks = yield from get_rest(link, space, [key], [target], patience, None)
    if not blocks:
        raise Corrupt(f"block {key.hex()} went or was damaged while it was read")
    return bytes(target)


def evict(space: OpenSpace, keys: Sequence[BlockKey] | None, tier: str) -> Operation[wire.Evicted]:
    """Delete blocks, or all of the namespace for None; from one tier only if it is named."""
    packed = pack_keys(keys or ())
    reply: wire.Evicted = yield Call(lambda number: wire.Evict(number, space.number, packed, keys is None, tier))
    return reply


def promote(
    space: OpenSpace, keys: Sequence[BlockKey], load_s: float, parent: BlockKey | None = None
) -> Operation[int]:
    """Begin to load what of these blocks lower tiers, or other nodes, have; how many are on their way."""
    packed, before = pack_keys(keys), parent or b""
    reply = yield Call(lambda number: wire.Promote(number, space.number, packed, milliseconds(load_s), before))
    return int(reply.loading)


def demote(space: OpenSpace, keys: Sequence[BlockKey] | None, tier: str, *, evict: bool) -> Operation[wire.Demoted]:
    """Write blocks, or all of the namespace for None, into a lower tier; with `evict` they leave DRAM then."""
    packed = pack_keys(keys or ())
    reply: wire.Demoted = yield Call(
        lambda number: wire.Demote(number, space.number, packed, keys is None, tier, evict), wait_s=SLOW_S
    )
    return reply


def pin(space: OpenSpace, keys: Sequence[BlockKey], *, hard: bool, ttl_s: float) -> Operation[wire.Pinned]:
    """Keep the prefix of `keys` that is here: `hard` never goes, soft goes last; for `ttl_s`."""
    packed = pack_keys(keys)
    reply: wire.Pinned = yield Call(lambda number: wire.Pin(number, space.number, packed, hard, milliseconds(ttl_s)))
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
