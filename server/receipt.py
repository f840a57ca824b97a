"""Blocks that come over a connection: where their bytes go, and what becomes of them once they are there."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from kvstore import wire
from kvstore.catalogue import OpenNamespace
from kvstore.copier import checksum
from kvstore.errors import InvalidRequest
from kvstore.packed import unpack_keys, unpack_u64
from kvstore.store import Store
from kvstore.transport.stream import sink
from kvstore.types import BlockKey, Owner, Placement

AT_ONCE_BYTES = 256 << 10  # verified on the event loop; more than that in a copier thread


@dataclass(slots=True)
class Receipt:
    """A payload on its way in. `grant_id` is 0 when none of it is wanted."""

    grant_id: int
    targets: list[memoryview]  # all of the payload, in order; unwanted blocks go to the sink
    wanted: list[memoryview]  # the slots among them
    checksums: list[int]  # of the wanted blocks
    reply: wire.Message

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.targets))


def keys_of(space: OpenNamespace, packed: bytes) -> list[BlockKey]:
    """InvalidRequest when they are no whole number of this namespace's keys."""
    if len(packed) % space.key_bytes:
        raise InvalidRequest(f"keys of this namespace have {space.key_bytes} bytes: {len(packed)} are no whole number")
    return unpack_keys(packed, space.key_bytes)


def receive_commit(store: Store, owner: Owner, request: wire.Commit) -> Receipt:
    """For the blocks of a grant, once."""
    checksums = list(unpack_u64(request.checksums))
    slots = store.puts.receive(owner, request.grant_id, len(checksums))
    return Receipt(request.grant_id, slots, slots, checksums, wire.Done(request.id))


def receive_put(store: Store, owner: Owner, space: OpenNamespace, request: wire.Put) -> Receipt:
    """For a put that brings its blocks along: slots for those that are wanted."""
    keys = keys_of(space, request.keys)
    sizes, checksums = unpack_u64(request.sizes), unpack_u64(request.checksums)
    if len(checksums) != len(keys):
        raise InvalidRequest(f"{len(checksums)} checksums for {len(keys)} blocks")
    placing = store.puts.place(owner, space, keys, BlockKey(request.parent) if request.parent else None, sizes)
    store.puts.granted(owner, space, keys, placing)
    reply = wire.Placed(request.id, 0, bytes(placing.placements), b"", b"")
    granted = [placement is Placement.GRANTED for placement in placing.placements]
    receipt = Receipt(0, [], [], [crc for crc, is_wanted in zip(checksums, granted, strict=True) if is_wanted], reply)
    if placing.grant is not None:
        receipt.grant_id = placing.grant.grant_id
        receipt.wanted = store.puts.receive(owner, receipt.grant_id, len(receipt.checksums))
    slots = iter(receipt.wanted)
    for size, is_wanted in zip(sizes, granted, strict=True):
        receipt.targets += [next(slots)] if is_wanted else sink(size)
    return receipt


def complete(store: Store, owner: Owner, receipt: Receipt, path: str) -> wire.Message | Awaitable[wire.Message]:
    """All is in place: verify, commit, and the reply. Raises Corrupt or StaleLease, and has freed the slots then."""
    if not receipt.grant_id:
        return receipt.reply
    if sum(map(len, receipt.wanted)) > AT_ONCE_BYTES:
        return _complete_later(store, owner, receipt, path)
    found = [checksum(block) for block in receipt.wanted]
    store.puts.commit_verified(owner, receipt.grant_id, receipt.checksums, found, path)
    return receipt.reply


async def _complete_later(store: Store, owner: Owner, receipt: Receipt, path: str) -> wire.Message:
    found: Sequence[int] = await store.copier.checksums(receipt.wanted)
    store.puts.commit_verified(owner, receipt.grant_id, receipt.checksums, found, path)
    return receipt.reply
