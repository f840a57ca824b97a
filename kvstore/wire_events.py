"""Messages for those who follow what happens to a node's blocks: a long poll, and pages of all that is there."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import ProtocolError
from kvstore.message import Message
from kvstore.types import KEY_BYTES, BlockKey, TierName
from kvstore.wire_cluster import TIER_BITS

EVENTS_LIMIT = 2048  # of one reply, however many are asked for: two milliseconds of the node
TIERS = {bit: tier for tier, bit in TIER_BITS.items()}
LENGTHS = (KEY_BYTES, KEY_BYTES + 2)  # of a block's key, and of a part's


class BlockEvent(NamedTuple):
    """A block (part) came to a tier, or went from it. `namespace` is its number; a removed one has neither parent nor
    size."""

    is_stored: bool
    namespace: int
    tier: TierName
    key: BlockKey
    parent: BlockKey | None = None  # None at a chain's start
    size: int = 0  # bytes


class Subscribe(Message, frozen=True, tag="subscribe"):
    """What happened after `after` to blocks of a namespace (0: all of the tenant)? Waits until there is something.

    `epoch` is that of the node's start which `after` is of; with another the answer is not exact.
    """

    namespace: int
    epoch: int
    after: int
    wait_ms: int = 0
    limit: int = EVENTS_LIMIT


class Happened(Message, frozen=True, tag="happened"):
    """All that happened from sequence `first` to `last` and that concerns who asks, in order; `last` is what to ask
    after next. Not exact: some of it is not known any more, and a snapshot is needed."""

    epoch: int
    first: int
    last: int
    is_exact: bool
    kinds: bytes  # u8 each: 1 stored, 0 removed
    tiers: bytes  # u8 each, as in TIER_BITS
    namespaces: bytes  # u16 each
    sizes: bytes  # u64 each
    keys: list[bytes]
    parents: list[bytes]  # empty: none


class Snapshot(Message, frozen=True, tag="snapshot"):
    """A page of the blocks that are here now. `cursor` is 0, or that of the page before."""

    namespace: int  # 0: all of the tenant
    cursor: int = 0
    limit: int = EVENTS_LIMIT


class Snapped(Message, frozen=True, tag="snapped"):
    """Blocks, as of `sequence`. Who replays all that happened after the first page's sequence onto all pages has what
    is there. `cursor` is 0 after the last page."""

    epoch: int
    sequence: int
    tiers: bytes  # u8 each
    namespaces: bytes  # u16 each
    sizes: bytes  # u64 each
    keys: list[bytes]
    parents: list[bytes]
    cursor: int


EventRequest = Subscribe | Snapshot
EventReply = Happened | Snapped


def happened(request: Subscribe, epoch: int, last: int, events: Sequence[BlockEvent], *, is_exact: bool) -> Happened:
    """The reply that says so."""
    kinds = bytes(event.is_stored for event in events)
    first = (request.after if is_exact else last) + 1
    return Happened(request.id, epoch, first, last, is_exact, kinds, *_columns(events))


def snapped(request: Snapshot, epoch: int, sequence: int, events: Sequence[BlockEvent], cursor: int) -> Snapped:
    """The reply that says so."""
    return Snapped(request.id, epoch, sequence, *_columns(events), cursor)


def events_of(reply: Happened | Snapped) -> list[BlockEvent]:
    """The rows of a reply; of a page all are stored. Raises ProtocolError when its columns do not fit together."""
    count = len(reply.keys)
    kinds = reply.kinds if isinstance(reply, Happened) else b"\1" * count
    lengths = (len(kinds), len(reply.tiers), len(reply.namespaces) // 2, len(reply.sizes) // 8, len(reply.parents))
    if any(length != count for length in lengths) or len(reply.namespaces) % 2 or len(reply.sizes) % 8:
        raise ProtocolError(f"columns of {lengths} rows for {count} keys")
    if any(len(key) not in LENGTHS for key in reply.keys) or any(len(p) not in (0, *LENGTHS) for p in reply.parents):
        raise ProtocolError(f"a key has {LENGTHS[0]} or {LENGTHS[1]} bytes")
    if not set(kinds) <= {0, 1} or not set(reply.tiers) <= TIERS.keys():
        raise ProtocolError("an event of no known kind or tier")
    numbers = struct.unpack(f"<{count}H", reply.namespaces)
    sizes = struct.unpack(f"<{count}Q", reply.sizes)
    return [
        BlockEvent(bool(kind), number, TIERS[tier], BlockKey(key), BlockKey(parent) if parent else None, size)
        for kind, number, tier, key, parent, size in zip(
            kinds, numbers, reply.tiers, reply.keys, reply.parents, sizes, strict=True
        )
    ]


def _columns(events: Sequence[BlockEvent]) -> tuple[bytes, bytes, bytes, list[bytes], list[bytes]]:
    return (
        bytes(TIER_BITS[event.tier] for event in events),
        struct.pack(f"<{len(events)}H", *(event.namespace for event in events)),
        struct.pack(f"<{len(events)}Q", *(event.size for event in events)),
        [event.key for event in events],
        [event.parent or b"" for event in events],
    )
