"""Operations over RDMA: blocks READ from the node's memory into place here, and offered to it from where they lie."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine_client.remote import Remote, Slab
from engine_client.steps import (
    Call,
    Grant,
    Link,
    OpenSpace,
    Operation,
    Patience,
    Post,
    Pull,
    Rejoin,
    Work,
    milliseconds,
)
from kvstore import wire
from kvstore.copier import address_of, checksum, copy_hashed
from kvstore.errors import InvalidRequest, PeerLost, ProtocolError, StaleLease, StoreError
from kvstore.packed import pack_keys, pack_u64, unpack_u64
from kvstore.transport.rdma.memory import Memory
from kvstore.transport.rdma.transfer import Fetch, merged
from kvstore.transport.rdma.verbs import VerbsError
from kvstore.types import BlockKey

CROSSOVER_BYTES = 16 << 10  # up to here the bytes come with the answer, which is as quick as a READ and a release
ALONG_BYTES = 64 << 10  # up to here the bytes of a put go along with it: an offer is one round trip more
LEASE_S = 60.0
MOST_TRIES = 3


@dataclass(slots=True, eq=False)
class Landing:
    """Where blocks of one transfer land: registered memory, or pieces of the staging memory, to be copied on.

    Pieces are given back once both the operation is done with them and no NIC writes into them.
    """

    remote: Remote
    memories: list[Memory] = field(default_factory=list)
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)  # of block number: (start, bytes)
    waits_for: int = 1  # the operation, and the transfer if it was begun

    def place(self, at: int, target: memoryview) -> tuple[int, Memory] | None:
        """(address, memory) for block number `at`; None when the staging memory is full, or cannot be had."""
        address, size = address_of(target), len(target)
        memory = self.remote.rdma.memories.find(address, size)
        if memory is None:
            try:
                staging = self.remote.rdma.staging
            except VerbsError:
                return None
            start = staging.take(size)
            if start is None:
                return None
            self.pieces[at] = start, size
            return staging.address + start, staging.memory
        self.memories.append(memory)
        memory.users += 1
        return address, memory

    def begin(self) -> None:
        self.waits_for += 1

    def leave(self) -> None:
        self.waits_for -= 1
        if self.waits_for:
            return
        for memory in self.memories:
            memory.users -= 1
        for start, size in self.pieces.values():
            self.remote.rdma.staging.give_back(start, size)

    def view(self, at: int) -> memoryview:
        return self.remote.rdma.staging.view(*self.pieces[at])


def get_by_reads(
    link: Link,
    space: OpenSpace,
    keys: Sequence[BlockKey],
    views: Sequence[memoryview],
    patience: Patience,
    parent: BlockKey | None = None,
) -> Operation[int]:
    """Hold what is there of a chain, READ it into `views`, verify, let go. How many blocks are in place.

    Memory that is lent no more, and paths that fail, cost another try: by the same way, or by another path. -1 - blocks
    when RDMA gave up after so many: the rest has to come some other way.
    """
    done = tries = 0
    yield from mend(link)
    while done < len(keys):
        try:
            before = keys[done - 1] if done else parent
            here, is_all = yield from _get_some(link, space, keys[done:], views[done:], patience, before)
        except StaleLease:
            assert link.remote is not None
            link.remote.slabs.clear()
            tries += 1
        except PeerLost:
            if not link.is_open():
                raise
            yield Rejoin()
            tries += 1
        else:
            done += here
            if not is_all:
                return done
            tries += not here
        if tries >= MOST_TRIES:
            return -1 - done
    return done


def mend(link: Link) -> Operation[None]:
    """Connect anew what failed and has rested."""
    if link.remote is not None and link.remote.peer.paths.broken():
        yield Rejoin()


def _get_some(
    link: Link,
    space: OpenSpace,
    keys: Sequence[BlockKey],
    views: Sequence[memoryview],
    patience: Patience,
    parent: BlockKey | None,
) -> Operation[tuple[int, bool]]:
    """(Blocks in place, whether it is worth going on): the first of them, as many as there is place for at once."""
    request = partial(_acquire, space, keys, patience, parent)
    held = yield Call(request, wait_s=patience.longest_s)
    if not held.lease_id:
        return 0, False
    try:
        targets = _targets(keys, views, unpack_u64(held.sizes))
        found = yield from read_held(link, held, 0, targets)
    finally:
        with suppress(StoreError):
            yield Post(lambda number: wire.Release(number, held.lease_id))
    good = _agreeing(found, unpack_u64(held.checksums))
    if good < len(found):
        yield Call(lambda number: wire.Report(number, space.number, pack_keys([keys[good]])))
        return good, False
    return good, len(found) < len(targets)


def read_held(link: Link, held: wire.Acquired, start: int, targets: Sequence[memoryview]) -> Operation[list[int]]:
    """READ blocks of a lease, from number `start` on, into views of their sizes: the checksum of each as it arrived, of
    as many as there is place for at once. StaleLease where memory is lent no more."""
    remote = link.remote
    assert remote is not None
    landing = Landing(remote)
    end = start + len(targets)
    try:
        slabs = yield from _lent(remote, unpack_u64(held.slab_ids)[start:end])
        fetches: list[Fetch] = []
        for at, (slab, offset, target) in enumerate(
            zip(slabs, unpack_u64(held.offsets)[start:end], targets, strict=True)
        ):
            place = landing.place(at, target)
            if place is None:
                break
            address, memory = place
            fetches.append(
                Fetch(address, memory.lkeys, slab.address + offset, slab.rkeys, len(target), memory.numa_node)
            )
        if not fetches:
            return []
        landing.begin()
        yield Pull(merged(fetches, remote.rdma.options.slice_bytes), landing.leave)
        here = targets[: len(fetches)]
        found: list[int] = yield Work(partial(_finish, landing, here), sum(map(len, here)))
        return found
    finally:
        landing.leave()


def _acquire(
    space: OpenSpace, keys: Sequence[BlockKey], patience: Patience, parent: BlockKey | None, number: int
) -> wire.Acquire:
    return wire.Acquire(
        number,
        space.number,
        pack_keys(keys),
        milliseconds(LEASE_S),
        milliseconds(patience.wait_s),
        load_ms=milliseconds(patience.load_s),
        tokens_per_s=patience.tokens_per_s,
        parent=parent or b"",
    )


def _targets(keys: Sequence[BlockKey], views: Sequence[memoryview], sizes: Sequence[int]) -> list[memoryview]:
    for key, view, size in zip(keys, views, sizes, strict=False):
        if size > len(view):
            raise InvalidRequest(f"block {key.hex()} has {size} bytes; its buffer has {len(view)}")
    return [view[:size] for view, size in zip(views, sizes, strict=False)]


def _lent(remote: Remote, slab_ids: Sequence[int]) -> Operation[list[Slab]]:
    """Where slabs lie; the node is asked about those that are new. StaleLease when one is gone."""
    new = sorted(set(slab_ids) - remote.slabs.keys())
    if new:
        reply = yield Call(lambda number: wire.Lend(number, pack_u64(new)))
        addresses, sizes, rkeys = map(unpack_u64, (reply.addresses, reply.sizes, reply.rkeys))
        ports = len(remote.ports)
        if not len(new) == len(addresses) == len(sizes) or len(rkeys) != ports * len(new):
            raise ProtocolError(f"{len(addresses)} slabs lent, {len(new)} were asked for")
        for at, slab_id in enumerate(new):
            if sizes[at]:
                remote.slabs[slab_id] = Slab(addresses[at], sizes[at], tuple(rkeys[at * ports : (at + 1) * ports]))
    missing = [slab_id for slab_id in slab_ids if slab_id not in remote.slabs]
    if missing:
        raise StaleLease(f"slab {missing[0]} is gone")
    return [remote.slabs[slab_id] for slab_id in slab_ids]


def _finish(landing: Landing, targets: Sequence[memoryview]) -> list[int]:
    """The checksum of each block as it arrived; staged ones are copied to where they belong."""
    found = []
    for at, target in enumerate(targets):
        if at in landing.pieces:
            staged = landing.view(at)
            found.append(copy_hashed(address_of(target), address_of(staged), target))
            landing.remote.rdma.staged_bytes += len(target)
        else:
            found.append(checksum(target))
    return found


def _agreeing(found: Sequence[int], expected: Sequence[int]) -> int:
    return next((at for at, crc in enumerate(found) if crc != expected[at]), len(found))


def offer(link: Link, grant: Grant, checksums: Sequence[int]) -> Operation[bool]:
    """Let the node READ the blocks of a grant from where they lie; False when they must be sent instead."""
    remote = link.remote
    assert remote is not None
    yield from mend(link)
    landing = Landing(remote)
    try:
        places: list[tuple[int, Memory]] = []
        for at, source in enumerate(grant.slots):
            place = landing.place(at, source)
            if place is None:
                return False
            places.append(place)
        if landing.pieces:
            yield Work(partial(_stage, landing, grant.slots), sum(size for _, size in landing.pieces.values()))
        addresses = pack_u64([address for address, _ in places])
        rkeys = pack_u64([rkey for _, memory in places for rkey in memory.rkeys])
        packed = pack_u64(checksums)
        for _ in range(MOST_TRIES):
            try:
                reply = yield Call(lambda number: wire.Offer(number, grant.grant_id, packed, addresses, rkeys))
            except PeerLost:
                if not link.is_open():
                    raise
                remote.broke_there(range(len(remote.peer.paths.paths)))  # no path was up there
                yield Rejoin()
            else:
                remote.broke_there(reply.broken)
                return True
        return False
    finally:
        landing.leave()


def _stage(landing: Landing, sources: Sequence[Any]) -> None:
    for at, (start, size) in landing.pieces.items():
        target = landing.remote.rdma.staging.view(start, size)
        copy_hashed(address_of(target), address_of(sources[at]), target)
        landing.remote.rdma.staged_bytes += size
