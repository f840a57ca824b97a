"""Two hosts on a fabric: one READs from the memory of the other, by as many NICs and queue pairs as a test wants."""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvstore.copier import address_of
from kvstore.transport.rdma.paths import Path, Paths
from kvstore.transport.rdma.read_queue import ReadQueue
from kvstore.transport.rdma.topology import choose_gid
from kvstore.transport.rdma.transfer import Fetch, Transfer
from kvstore.transport.rdma.verbs import Access, Context, Domain, Own, QueueLimits, QueuePair, Remote, VerbsError
from tests.soft_verbs import SoftFabric, SoftQueuePair, SoftVerbs, is_readable

KIB, MIB = 1 << 10, 1 << 20


class Registered:
    """[address, address + size) in a domain of each NIC."""

    def __init__(self, domains: Sequence[Domain], address: int, size: int, access: Access) -> None:
        self._regions = [domain.register(address, size, access) for domain in domains]
        self.lkeys = [region.lkey for region in self._regions]
        self.rkeys = [region.rkey for region in self._regions]

    def close(self) -> None:
        for region in self._regions:
            region.close()


class Host:
    """Its NICs, a domain on each, and `size` bytes that are registered in all of them."""

    def __init__(self, fabric: SoftFabric, nics: int, size: int, access: Access, stack: ExitStack) -> None:
        self.verbs = SoftVerbs(fabric, [f"soft{number}" for number in range(nics)])
        self.contexts: list[Context] = [self.verbs.open(device) for device in self.verbs.devices()]
        self.domains: list[Domain] = [context.domain() for context in self.contexts]
        self.ports = [context.ports()[0] for context in self.contexts]
        self.map = mmap.mmap(-1, size)
        self.address = address_of(memoryview(self.map))
        self.memory = Registered(self.domains, self.address, size, access)
        for thing in (*self.contexts, *self.domains, self.memory):
            stack.callback(thing.close)


class Watched:
    """A transfer, and how often it ended and settled."""

    def __init__(self, fetches: Sequence[Fetch], slice_bytes: int) -> None:
        self.fetches = list(fetches)
        self.ended = self.settled = 0
        self.after: Callable[[], None] = lambda: None  # what its owner does once it has ended
        self.when_settled: Callable[[], None] = lambda: None
        self.transfer = Transfer(fetches, slice_bytes, ended=self._end, settled=self._settle)

    @property
    def error(self) -> str:
        return type(self.transfer.error).__name__

    @property
    def is_complete(self) -> bool:
        return self.transfer.is_complete and not self.transfer.error

    def _end(self) -> None:
        self.ended += 1
        assert not self.settled, "it ends first"
        self.after()

    def _settle(self) -> None:
        self.settled += 1
        assert self.ended, "it ends first"
        self.when_settled()


class RdmaPair:
    """`nics` paths of `queues` queue pairs each, all connected. `time` passes when a test sets it.

    The target lies here and the source, of random bytes, there. `reconnects`: a path that breaks is connected anew
    at once, until that is not wanted any more.
    """

    def __init__(self, stack: ExitStack, *, nics: int = 1, queues: int = 1, depth: int = 16, size: int = MIB,
                 window_bytes: int = 64 * MIB, quarantine_bytes: int = 64 * MIB, seed: int | None = None,
                 reconnects: bool = False) -> None:  # fmt: skip
        self.fabric = SoftFabric(seed)
        self.size = size
        self.here = Host(self.fabric, nics, size, Access.LOCAL_WRITE, stack)
        self.there = Host(self.fabric, nics, size, Access.REMOTE_READ, stack)
        self.there.map[:] = os.urandom(size)
        self.time = 100.0
        self.reconnects = reconnects
        self.broke: list[Path] = []
        self.paths = Paths(quarantine_bytes=quarantine_bytes, hung_s=1.0, now=lambda: self.time, broke=self._path_broke)
        self._peers: dict[int, list[QueuePair]] = {}
        self._psn = 0
        for nic in range(nics):
            pairs = [self.here.domains[nic].queue_pair(QueueLimits(depth, 1)) for _ in range(queues)]
            path = Path(nic, nic, f"nic {nic}", [ReadQueue(pair, depth, window_bytes) for pair in pairs])
            self._peers[nic] = [self.there.domains[nic].queue_pair(QueueLimits(1, 1)) for _ in range(queues)]
            for peer in self._peers[nic]:
                stack.callback(peer.close)
            self.paths.add(path)
            self.connect(path)
        stack.callback(self.paths.close)

    # Connections.

    def connect(self, path: Path) -> bool:
        """Both ends, anew or at all; whether that could be."""
        if path.is_up:
            self.paths.reset(path)
        for queue, peer in zip(path.queues, self._peers[path.nic], strict=True):
            self._psn += 1000
            port = self.here.ports[path.nic]
            own = Own(self._psn, 1, choose_gid(port).number, port.mtu_bytes)
            ends = Remote(peer.number, self._psn + 1, choose_gid(self.there.ports[path.nic]).raw, 0)
            try:
                peer.reset()
                peer.connect(own._replace(psn=self._psn + 1), Remote(queue.pair.number, self._psn, self._gid(path), 0))
                queue.connect(own, ends)
            except VerbsError as error:
                self.paths.not_connected(path, str(error))
                return False
        self.paths.connected(path)
        return True

    def _gid(self, path: Path) -> bytes:
        return choose_gid(self.here.ports[path.nic]).raw

    def _path_broke(self, path: Path) -> None:
        self.broke.append(path)
        if self.reconnects:
            self.connect(path)

    def cut(self, nic: int = 0) -> None:
        self.fabric.cut(self.here.verbs.gid(f"soft{nic}"), self.there.verbs.gid(f"soft{nic}"))

    def pair(self, path: int = 0, queue: int = 0) -> SoftQueuePair:
        pair = self.paths.paths[path].queues[queue].pair
        assert isinstance(pair, SoftQueuePair)
        return pair

    # Transfers.

    def fetch(self, start: int, size: int, target: int | None = None) -> Fetch:
        """[start, start + size) of the source, to the same place of the target, or to `target`."""
        here, there = self.here, self.there
        place = start if target is None else target
        return Fetch(here.address + place, here.memory.lkeys, there.address + start, there.memory.rkeys, size)

    def start(self, *fetches: Fetch, slice_bytes: int = 4 * KIB) -> Watched:
        watched = Watched(fetches, slice_bytes)
        self.paths.start(watched.transfer)
        return watched

    def is_right(self, *watched: Watched) -> bool:
        """Whether these are over, well, and every byte of them is the source's."""
        return all(
            (one.ended, one.settled, one.is_complete) == (1, 1, True) and all(map(self.is_there, one.fetches))
            for one in watched
        )

    def is_there(self, fetch: Fetch) -> bool:
        return ctypes.string_at(fetch.address, fetch.size) == ctypes.string_at(fetch.remote_address, fetch.size)

    def progress(self) -> bool:
        """As an event loop does: hear what has completed, of queue pairs that say so. Whether any did."""
        readable = [fd for fd in self.paths.fds() if is_readable(fd)]
        for fd in readable:
            self.paths.progress(fd)
        return bool(readable)

    def run(self) -> None:
        """Until nothing is left to hear."""
        while self.progress():
            pass

    def give_up(self) -> None:
        """What nothing answers fails, as a NIC does after its retries."""
        self.fabric.expire()
        self.run()

    def hang(self) -> None:
        """Time passes, and nothing comes."""
        self.time += 1.5
        self.paths.expire()
        self.run()
