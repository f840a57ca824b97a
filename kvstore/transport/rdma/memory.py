"""Registered memory: what a NIC may read and write, and what a peer needs to know to read it."""

import mmap
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvstore.copier import address_of
from kvstore.errors import InvalidRequest
from kvstore.transport.rdma.topology import SYSFS, memory_node, numa_nodes
from kvstore.transport.rdma.verbs import Access, Domain, MemoryRegion

ALIGN_BYTES = 4096
NUMA_MAPS = Path("/proc/self/numa_maps")


class Memory:
    """`size` bytes at `address`, registered in one domain of each NIC; keys are in the order of the NICs.

    Whoever registers keeps it mapped until `close`. VerbsError when a NIC refuses it; nothing is registered then.
    `numa_node` is where its pages are, -1 where that is not known.
    """

    def __init__(self, domains: Sequence[Domain], address: int, size: int, access: Access) -> None:
        self.address = address
        self.size = size
        self.users = 0  # transfers that may still write into it
        self._regions: list[MemoryRegion] = []
        with ExitStack() as undo:
            for domain in domains:
                region = domain.register(address, size, access)
                undo.callback(region.close)
                self._regions.append(region)
            undo.pop_all()
        self.lkeys = tuple(region.lkey for region in self._regions)
        self.rkeys = tuple(region.rkey for region in self._regions)
        self.numa_node = _numa_node(address)

    def close(self) -> None:
        """Peers' READs of it fail from now on. Idempotent."""
        for region in self._regions:
            region.close()


class MemoryMap:
    """Registered memories by address; no two overlap."""

    def __init__(self) -> None:
        self._memories: list[Memory] = []

    def add(self, memory: Memory) -> None:
        """InvalidRequest when it overlaps another."""
        at = bisect_right(self._memories, memory.address, key=_start)
        before, after = self._memories[at - 1 : at], self._memories[at : at + 1]
        if any(other.address + other.size > memory.address for other in before) or any(
            memory.address + memory.size > other.address for other in after
        ):
            raise InvalidRequest("memory is registered once: this overlaps what is registered already")
        insort(self._memories, memory, key=_start)

    def remove(self, memory: Memory) -> None:
        """Idempotent."""
        self._memories = [other for other in self._memories if other is not memory]

    def find(self, address: int, size: int) -> Memory | None:
        """The one that has all of [address, address + size)."""
        at = bisect_right(self._memories, address, key=_start)
        if not at:
            return None
        memory = self._memories[at - 1]
        return memory if address + size <= memory.address + memory.size else None

    def __iter__(self) -> Iterator[Memory]:
        return iter(self._memories)


def _start(memory: Memory) -> int:
    return memory.address


class Staging:
    """Registered memory of this process's own, for blocks whose place is not registered: they are copied once more.

    Pieces are taken in turn, and given back in any order, once no NIC touches them.
    """

    def __init__(self, domains: Sequence[Domain], size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size)
        self._view = memoryview(self._map)
        self.address = address_of(self._view)
        self.memory = Memory(domains, self.address, size, Access.LOCAL_WRITE | Access.REMOTE_READ)
        self._free: list[tuple[int, int]] = [(0, size)]  # (start, end), by start, none touches the next

    @property
    def taken_bytes(self) -> int:
        return self.size - sum(end - start for start, end in self._free)

    def take(self, size: int) -> int | None:
        """Where `size` bytes are the caller's now; None when there is no such stretch."""
        size = _aligned(size)
        for at, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[at : at + 1] = [(start + size, end)] if start + size < end else []
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        end = start + _aligned(size)
        at = bisect_right(self._free, (start, 0))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
            at -= 1
        self._free.insert(at, (start, end))

    def view(self, start: int, size: int) -> memoryview:
        return self._view[start : start + size]

    def close(self) -> None:
        """No NIC touches it any more. Its pages go with the last view."""
        self.memory.close()
        self._view.release()


def _numa_node(address: int) -> int:
    if len(numa_nodes(SYSFS)) < 2:
        return -1  # nothing to choose, and the file is made by a walk over all that is mapped
    try:
        return memory_node(address, NUMA_MAPS.read_text())
    except OSError:  # a kernel without NUMA
        return -1


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
