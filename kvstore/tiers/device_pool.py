"""What a tier on a device needs that needs no device: lanes for batches, streams in host memory, slabs' names."""

import asyncio
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from kvstore.copier import copy_bytes
from kvstore.errors import InvalidRequest, ProtocolError
from kvstore.region import Region

Tensor = Any  # of torch, which is not imported here

STAGING_ALIGN_BYTES = 64
MAGIC = b"CHBM"
VERSION = 1
HEADER = struct.Struct("<4sHHQQQQQ")
FIELD = struct.Struct("<H")


class Mark(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Block the thread until all work before it is done. Releases the GIL."""


class Stream(Protocol):
    """Work on a device, done in order; a call may return before its work is done."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each (target, source), of equal sizes."""

    def zero(self, target: Tensor) -> None: ...

    def mark(self) -> Mark: ...

    def wait(self, handle: bytes) -> None:
        """What comes later begins after the work that another process recorded in its event."""

    def event(self) -> bytes:
        """Record an event after the work so far; the handle by which another process waits for it."""


class DoneMark:
    """A point in the work of a HostStream, all of which is done."""

    def synchronize(self) -> None:
        pass


class HostStream:
    """Does its work in the caller's thread, without the GIL. Engines on the CPU have no events: handles are empty."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            np.copyto(target.numpy(), source.numpy())  # torch's own copy would start its thread pool

    def zero(self, target: Tensor) -> None:
        target.numpy().fill(0)

    def mark(self) -> Mark:
        return DoneMark()

    def wait(self, handle: bytes) -> None:
        if handle:
            raise InvalidRequest("a tier in host memory has no events to wait for")

    def event(self) -> bytes:
        return b""


class Memory(NamedTuple):
    """A slab's memory: `place` is its number in the pool. Host memory has a region."""

    place: int
    tensor: Tensor
    region: Region | None


class Pool(Protocol):
    """A device and the tier's memory on it. `peers` says for each pair of GPUs whether one reads the other's memory."""

    peers: dict[str, bool]

    def make(self, place: int, stream: Stream) -> Memory:
        """Memory for a slab, all zeros. Blocks the thread."""

    def drop(self, memory: Memory) -> None: ...

    def export(self, memory: Memory) -> bytes | Region: ...

    def stream(self) -> Stream: ...

    def staging(self) -> Tensor:
        """Host memory, uint8, that the device reads and writes by itself."""

    def describe(self) -> dict[str, Any]: ...

    def close(self) -> None:
        """Free all. Nobody uses memory or staging any more. Blocks the thread."""


class Piece(NamedTuple):
    """Bytes [start, end) of block number `block` of a batch, and where they lie in the staging buffer."""

    block: int
    start: int
    end: int
    staged: int


def fills(sizes: Sequence[int], staging_bytes: int) -> Iterator[list[Piece]]:
    """Cut a batch of blocks into pieces that fill a staging buffer, one list for each time it is filled.

        blocks    |---- 0 ----|-- 1 --|--------- 2 ---------|
        fills     |---- 0 ----|-- 1 --|- 2 -|   |---- 2 ----|

    Pieces begin at multiples of 64 bytes of the buffer, whose size is one too.
    """
    assert staging_bytes > 0
    assert staging_bytes % STAGING_ALIGN_BYTES == 0
    fill: list[Piece] = []
    used = 0
    for block, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + staging_bytes - used)
            fill.append(Piece(block, start, end, used))
            used += -(-(end - start) // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES
            start = end
            if used == staging_bytes:
                yield fill
                fill, used = [], 0
    if fill:
        yield fill


class Staging(NamedTuple):
    """One buffer, as the device and as Python see it."""

    tensor: Tensor
    view: memoryview


class Lane:
    """A stream with two staging buffers, for one batch at a time: that of who holds the `turn`.

    What raises may leave copies on their way: whoever calls waits for a mark of the stream before it goes on.
    """

    def __init__(self, pool: Pool) -> None:
        self.turn = asyncio.Lock()
        self.stream = pool.stream()
        tensors = (pool.staging(), pool.staging())
        self.staging = [Staging(tensor, memoryview(tensor.numpy())) for tensor in tensors]

    def write(self, blocks: Sequence[tuple[Tensor, memoryview]]) -> None:
        """Host to device, each (slot, view). Blocks the thread, though not until the last copies are done."""
        marks: deque[Mark] = deque()
        for (tensor, staged), fill in self._fills(blocks):
            if len(marks) == len(self.staging):
                marks.popleft().synchronize()  # what lay in this buffer has left it
            for piece in fill:
                copy_bytes(staged[piece.staged :], blocks[piece.block][1][piece.start : piece.end])
            self.stream.copy((_of_slot(blocks, p), _of_staging(tensor, p)) for p in fill)
            marks.append(self.stream.mark())

    def read(self, blocks: Sequence[tuple[Tensor, memoryview]]) -> None:
        """Device to host, each (slot, view). Blocks the thread until the views have the bytes."""
        ahead: deque[tuple[Mark, list[Piece], memoryview]] = deque()

        def empty() -> None:
            mark, fill, staged = ahead.popleft()
            mark.synchronize()
            for piece in fill:
                copy_bytes(blocks[piece.block][1][piece.start :], _of_staging(staged, piece))

        for (tensor, staged), fill in self._fills(blocks):
            self.stream.copy((_of_staging(tensor, p), _of_slot(blocks, p)) for p in fill)
            ahead.append((self.stream.mark(), fill, staged))
            if len(ahead) == len(self.staging):
                empty()
        while ahead:
            empty()

    def _fills(self, blocks: Sequence[tuple[Tensor, memoryview]]) -> Iterator[tuple[Staging, list[Piece]]]:
        """Each fill, and the buffer for it, in turns."""
        sizes = [view.nbytes for _, view in blocks]
        for number, fill in enumerate(fills(sizes, self.staging[0].view.nbytes)):
            yield self.staging[number % len(self.staging)], fill


def _of_slot(blocks: Sequence[tuple[Tensor, memoryview]], piece: Piece) -> Tensor:
    return blocks[piece.block][0][piece.start : piece.end]


def _of_staging(buffer: Any, piece: Piece) -> Any:
    return buffer[piece.staged : piece.staged + piece.end - piece.start]


class SlabHandle(NamedTuple):
    """By what another process on this host maps a slab on a GPU; docs/hbm.md draws its bytes.

    `device` is the GPU's UUID: the number of a GPU is another in each process. `memory`, `counter` and `event`
    are CUDA's and torch's names for the allocation, for the count of its users and for an event after which it
    may be used. The pool lies `pool_offset` bytes into the allocation, the slab `slab_offset` into the pool.
    """

    device: str
    memory: bytes
    pool_offset: int
    pool_bytes: int
    slab_offset: int
    slab_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes

    def pack(self) -> bytes:
        offsets = (self.pool_offset, self.pool_bytes, self.slab_offset, self.slab_bytes, self.counter_offset)
        fields = (self.device.encode(), self.memory, self.counter, self.event)
        return HEADER.pack(MAGIC, VERSION, 0, *offsets) + b"".join(FIELD.pack(len(f)) + f for f in fields)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Raises ProtocolError when it is none, or of another version, or names bytes outside its pool."""
        try:
            magic, version, reserved, *offsets = HEADER.unpack_from(packed)
            position, fields = HEADER.size, []
            for _ in range(4):
                (size,) = FIELD.unpack_from(packed, position)
                position += FIELD.size + size
                fields.append(packed[position - size : position])
            device = fields[0].decode("ascii")
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolError(f"not the handle of a slab: {error}") from error
        if (magic, version, reserved) != (MAGIC, VERSION, 0):
            raise ProtocolError(f"not the handle of a slab of version {VERSION}: it begins with {packed[:8].hex()}")
        if position != len(packed):
            raise ProtocolError(f"the handle of a slab has {len(packed)} bytes, and says that it has {position}")
        pool_offset, pool_bytes, slab_offset, slab_bytes, counter_offset = offsets
        if not slab_bytes or slab_offset + slab_bytes > pool_bytes:
            raise ProtocolError(f"a slab of {slab_bytes} bytes at {slab_offset} is not in a pool of {pool_bytes}")
        _, memory, counter, event = fields
        return cls(device, memory, pool_offset, pool_bytes, slab_offset, slab_bytes, counter, counter_offset, event)


def available_bytes() -> int:
    """Host memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
