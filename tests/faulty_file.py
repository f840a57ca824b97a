"""A BlockFile that goes wrong when a test says so: what disks, cables and full filesystems do."""

import errno
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.diskblock import ALIGN, padded
from kvstore.tiers.block_file import BlockFile, PathName
from kvstore.tiers.posix_file import BlockBuffer


@dataclass(frozen=True)
class Fail:
    """The operation does nothing but raise; with `forever` every later one does too: a disk that is gone."""

    number: int = errno.EIO
    forever: bool = False


@dataclass(frozen=True)
class Tear:
    """A write gets no further than its first `kept_bytes`, and raises; with `forever` all later operations do too."""

    kept_bytes: int
    number: int = errno.EIO
    forever: bool = False


@dataclass(frozen=True)
class Lose:
    """A write reports success and does nothing: who reads gets what was there before."""


@dataclass(frozen=True)
class FlipBit:
    """One bit, counted from the operation's start, of what is read or of what a write leaves behind is another."""

    bit: int


@dataclass(frozen=True)
class Wait:
    """The operation begins when the event is set; `begun` is set when it waits."""

    until: threading.Event
    begun: threading.Event = field(default_factory=threading.Event)


Fault = Fail | Tear | Lose | FlipBit | Wait


class Faults:
    """What happens at which operation, counted from 0 over all the files that share this.

    `operations` lists what was called so far: ("write", offset, bytes) and the like.
    """

    def __init__(self, at: Mapping[int, Fault] | None = None) -> None:
        self.at = dict(at or {})
        self.operations: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()
        self._dead: int | None = None

    def next(self, name: str, offset: int = 0, size: int = 0) -> Fault | None:
        """Count an operation. Its fault, after Fail was raised and Wait was waited for."""
        with self._lock:
            fault = self.at.get(len(self.operations))
            self.operations.append((name, offset, size))
            if self._dead is not None:
                fault = Fail(self._dead)
            elif isinstance(fault, Fail | Tear) and fault.forever:
                self._dead = fault.number
        if isinstance(fault, Fail):
            raise OSError(fault.number, f"{os.strerror(fault.number)}, as the test wants it")
        if isinstance(fault, Wait):
            fault.begun.set()
            fault.until.wait()
        return fault


class FaultyFile:
    """Host memory only. A fault that makes no sense for an operation (a torn read) is an AssertionError."""

    def __init__(self, file: BlockFile, faults: Faults | None = None) -> None:
        self.file = file
        self.faults = faults or Faults()

    @property
    def path_name(self) -> PathName:
        return self.file.path_name

    def read(self, offset: int, buffers: Sequence[BlockBuffer]) -> None:
        fault = self.faults.next("read", offset, _size(buffers))
        assert not isinstance(fault, Tear | Lose)
        self.file.read(offset, buffers)
        if isinstance(fault, FlipBit):
            position = fault.bit // 8
            for buffer in buffers:
                assert isinstance(buffer, memoryview)
                if position < buffer.nbytes:
                    buffer.cast("B")[position] ^= 1 << fault.bit % 8
                    return
                position -= buffer.nbytes
            raise AssertionError("the bit is beyond what was read")

    def write(self, offset: int, buffers: Sequence[BlockBuffer]) -> None:
        fault = self.faults.next("write", offset, _size(buffers))
        if isinstance(fault, Lose):
            return
        if isinstance(fault, Tear):
            self._overwrite(offset, _joined(buffers)[: fault.kept_bytes])
            raise OSError(fault.number, f"torn after {fault.kept_bytes} bytes, as the test wants it")
        self.file.write(offset, buffers)
        if isinstance(fault, FlipBit):
            changed = _joined(buffers)
            changed[fault.bit // 8] ^= 1 << fault.bit % 8
            self._overwrite(offset, changed)

    def reserve(self, size: int) -> None:
        assert not isinstance(self.faults.next("reserve", 0, size), Tear | FlipBit)
        self.file.reserve(size)

    def punch(self, offset: int, size: int) -> None:
        if not isinstance(self.faults.next("punch", offset, size), Lose):
            self.file.punch(offset, size)

    def sync(self) -> None:
        if not isinstance(self.faults.next("sync"), Lose):
            self.file.sync()

    def close(self) -> None:
        self.file.close()

    def describe(self) -> dict[str, Any]:
        return self.file.describe()

    def _overwrite(self, offset: int, changed: bytearray) -> None:
        """Write any number of bytes; the rest of the last page stays as it is."""
        if not changed:
            return
        pages = memoryview(bytearray(padded(len(changed))))
        self.file.read(offset + len(pages) - ALIGN, [pages[-ALIGN:]])
        pages[: len(changed)] = changed
        self.file.write(offset, [pages])


def _size(buffers: Sequence[BlockBuffer]) -> int:
    return sum(buffer.nbytes for buffer in buffers if isinstance(buffer, memoryview))


def _joined(buffers: Sequence[BlockBuffer]) -> bytearray:
    joined = bytearray()
    for buffer in buffers:
        assert isinstance(buffer, memoryview)
        joined += buffer
    return joined
