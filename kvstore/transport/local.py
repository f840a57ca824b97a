"""A client's side of shared memory: blocks of the node's DRAM, found, copied and verified without asking it.

A get is: look up the published entry, copy, compare the entry again, verify the copy's checksum. Nothing is
held meanwhile and nothing leaks when the client dies. Descriptors come through a Unix connection of their own.
"""

import array
import ctypes
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore import wire
from kvstore.copier import copy_hashed
from kvstore.errors import DeadlineExceeded, InvalidRequest, PeerLost, ProtocolError
from kvstore.published import ENTRY, READABLE, IndexReader, UseRing
from kvstore.region import Region
from kvstore.types import KEY_BYTES, BlockKey

DESCRIPTORS = 64  # fetched at once
HANDLES = 16  # of some 400 bytes, so that an answer comes in one piece
ATTACH_FRAME_BYTES = 1 << 16


class Door:
    """Fetches the descriptors of a session from its node. One caller at a time.

    After any failure the next call connects anew: an answer that comes late must not be taken for the next one's.
    """

    def __init__(self, path: str, ticket: bytes) -> None:
        self._path = path
        self._ticket = ticket
        self._socket: socket.socket | None = None
        self._is_closed = False

    def fetch(self, slab_ids: Sequence[int], timeout_s: float) -> list[tuple[int, int]]:
        """(descriptor, bytes) of each slab; for none, of the published index and the use ring. Raises as `attach`."""
        return self.attach(slab_ids, "", timeout_s)[0]

    def attach(
        self, slab_ids: Sequence[int], tier: str, timeout_s: float
    ) -> tuple[list[tuple[int, int]], tuple[bytes, ...]]:
        """(Descriptor, bytes) of each slab, or the handle of each where they have no descriptors.

        Raises:
            NotFound: a slab is gone. The caller looks its block up again.
            TransportError: the node is lost, or did not answer in time.
        """
        try:
            stream = self._connected(timeout_s)
            stream.sendall(wire.encode(wire.Attach(0, self._ticket, tuple(slab_ids), tier)))
            space = socket.CMSG_SPACE(max(len(slab_ids), 2) * array.array("i").itemsize)
            frame, ancillary, _, _ = stream.recvmsg(ATTACH_FRAME_BYTES, space)
        except TimeoutError as error:
            self._hang_up()
            raise DeadlineExceeded("the node did not hand over descriptors in time") from error
        except OSError as error:
            self._hang_up()
            raise PeerLost(f"the node was lost while handing over descriptors: {error}") from error
        descriptors = array.array("i")
        for _level, _kind, data in ancillary:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        try:
            reply = _attached(frame, len(descriptors))
            return list(zip(descriptors, reply.sizes, strict=True)), reply.handles
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            self._hang_up()
            raise

    def _connected(self, timeout_s: float) -> socket.socket:
        if self._is_closed:
            raise PeerLost("the connection that this door was of is lost")
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(timeout_s)
            self._socket.connect(self._path)
        self._socket.settimeout(timeout_s)
        return self._socket

    def _hang_up(self) -> None:
        stream, self._socket = self._socket, None
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """For good, from any thread."""
        self._is_closed = True
        self._hang_up()


def _attached(frame: bytes, descriptors: int) -> wire.Attached:
    """The answer that so many descriptors came along with."""
    if not frame:
        raise PeerLost("the node hung up while handing over descriptors")
    wire.parse_header(frame[: wire.HEADER.size], ATTACH_FRAME_BYTES)
    reply = wire.decode_reply(frame[wire.HEADER.size :])
    if isinstance(reply, wire.Failed):
        raise wire.to_error(reply)
    if not isinstance(reply, wire.Attached) or len(reply.sizes) != descriptors:
        raise ProtocolError(f"{descriptors} descriptors came with {type(reply).__name__}")
    return reply


@dataclass(slots=True)
class View:
    """A block in place. `data` is its bytes as long as `is_valid()`: check after using them, not before."""

    data: memoryview
    checksum: int
    _reader: IndexReader
    _at: int
    _entry: bytes

    def is_valid(self) -> bool:
        """Whether all that was read from `data` so far was this block's."""
        return self._reader.is_unchanged(self._at, self._entry)


@dataclass(slots=True)
class LocalGet:
    """How far a get came without the node. `blocks` are in place; then one of the reasons, or all are."""

    blocks: int = 0
    unmapped: int | None = None  # the next block is in this slab: map it and go on
    damaged: bool = False  # the next block is here and does not have its checksum


class SharedMemory:
    """All that a session may map. `may_write`: slabs are mapped writable."""

    def __init__(self, door: Door, timeout_s: float, *, may_write: bool) -> None:
        """Raises as `Door.fetch`."""
        self._door = door
        self.timeout_s = timeout_s  # of each exchange with the node
        self._may_write = may_write
        index, ring = door.fetch((), timeout_s)
        self.reader = IndexReader(_map(index, writable=False, populate=False).memory)
        self.ring = UseRing(_map(ring, writable=True, populate=True).memory)
        self._slabs: dict[int, Region] = {}
        self._bases: dict[int, int] = {}

    def map(self, slab_ids: Iterable[int]) -> None:
        """Map slabs that are not yet. Takes about 0.2 s per GiB. Raises as `Door.fetch`."""
        wanted = [slab_id for slab_id in dict.fromkeys(slab_ids) if slab_id not in self._slabs]
        for start in range(0, len(wanted), DESCRIPTORS):
            batch = wanted[start : start + DESCRIPTORS]
            for slab_id, descriptor in zip(batch, self._door.fetch(batch, self.timeout_s), strict=True):
                region = _map(descriptor, writable=self._may_write, populate=True)
                self._slabs[slab_id] = region
                self._bases[slab_id] = region.address

    def device_slabs(self, slab_ids: Sequence[int]) -> list[Region | bytes]:
        """That from which `kvstore.tiers.hbm.import_slab` maps slabs of HBM. Raises as `Door.attach`."""
        slabs: list[Region | bytes] = []
        for start in range(0, len(slab_ids), HANDLES):
            batch = slab_ids[start : start + HANDLES]
            descriptors, handles = self._door.attach(batch, "hbm", self.timeout_s)
            slabs += [_map(descriptor, writable=False, populate=True) for descriptor in descriptors]
            slabs += handles
            if len(descriptors) + len(handles) != len(batch):
                raise ProtocolError(f"{len(descriptors)} descriptors and {len(handles)} handles for {len(batch)} slabs")
        return slabs

    def slot(self, slab_id: int, offset: int, size: int) -> memoryview:
        """`size` bytes of a mapped slab, in place; writable if the session may write."""
        return self._slabs[slab_id].view(offset, size)

    def is_mapped(self, slab_id: int) -> bool:
        return slab_id in self._bases

    def get_into(self, prefix: bytes, keys: Sequence[BlockKey], targets: Sequence[Any], *, verify: bool) -> LocalGet:
        """Copy blocks of a chain to `targets`, from the first, until one cannot be had without the node.

        Args:
            prefix: what comes before the key in a published name: namespace and part.
            targets: writable buffers, each at least as large as its block.
        """
        reader, bases = self.reader, self._bases
        keys = _block_keys(keys)
        name = b""
        for position, key in enumerate(keys):
            name = prefix + key
            found = reader.find(name)
            if found is None:
                return self._stopped(position, prefix, keys)
            at, entry = found
            _, state, _, _, _, _, _, slab_id, offset, size, expected, _ = ENTRY.unpack(entry)
            if state != READABLE:
                return self._stopped(position, prefix, keys)
            base = bases.get(slab_id)
            if base is None:
                return self._stopped(position, prefix, keys, unmapped=slab_id)
            target = targets[position]
            address, room = _place(target)
            if size > room:
                raise InvalidRequest(f"block {key.hex()} has {size} bytes; its buffer has {room}")
            found_checksum = expected
            if verify:
                view = memoryview(target)
                whole = view if view.format == "B" and view.ndim == 1 else view.cast("B")
                found_checksum = copy_hashed(address, base + offset, whole if room == size else whole[:size])
            else:
                ctypes.memmove(address, base + offset, size)
            if not reader.is_unchanged(at, entry):
                return self._stopped(position, prefix, keys)
            if found_checksum != expected:
                return self._stopped(position, prefix, keys, damaged=reader.is_unchanged(at, entry))
        if keys:
            self.ring.report(name, len(keys))
        return LocalGet(len(keys))

    def _stopped(
        self,
        position: int,
        prefix: bytes,
        keys: Sequence[BlockKey],
        *,
        unmapped: int | None = None,
        damaged: bool = False,
    ) -> LocalGet:
        if position:
            self.ring.report(prefix + keys[position - 1], position)
        return LocalGet(position, unmapped, damaged)

    def views(self, prefix: bytes, keys: Sequence[BlockKey]) -> tuple[list[View], int | None]:
        """Blocks of a chain in place, from the first: (views, the slab to map before going on)."""
        reader, slabs = self.reader, self._slabs
        keys = _block_keys(keys)
        views: list[View] = []
        unmapped = None
        for key in keys:
            found = reader.find(prefix + key)
            if found is None:
                break
            at, entry = found
            _, state, _, _, _, _, _, slab_id, offset, size, expected, _ = ENTRY.unpack(entry)
            if state != READABLE or entry[0] & 1:
                break
            slab = slabs.get(slab_id)
            if slab is None:
                unmapped = slab_id
                break
            views.append(View(slab.view(offset, size), expected, reader, at, entry))
        if views:
            self.ring.report(prefix + keys[len(views) - 1], len(views))
        return views, unmapped

    def close(self) -> None:
        """Hang up. The memory is unmapped with its last user: another thread may be in the middle of a copy."""
        self._door.close()


def _block_keys(keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
    """Without their part, which published names have in front."""
    return keys if not keys or len(keys[0]) == KEY_BYTES else [BlockKey(key[:KEY_BYTES]) for key in keys]


def _map(descriptor: tuple[int, int], *, writable: bool, populate: bool) -> Region:
    """Map what the door handed over; the mapping has a descriptor of its own."""
    fd, size = descriptor
    try:
        return Region(fd, size, writable=writable, populate=populate)
    finally:
        os.close(fd)


def _place(target: Any) -> tuple[int, int]:
    """(address, bytes) of a writable, contiguous buffer."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(target)), memoryview(target).nbytes
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidRequest(f"a buffer to read into must be writable and contiguous: {error}") from error
