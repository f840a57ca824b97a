"""One end of a connection: its queue pairs, made and connected as the other end says, and made anew when they fail."""

import mmap
import secrets
from collections.abc import Callable, Sequence

from kvstore.copier import address_of
from kvstore.errors import ConnectFailed, ProtocolError
from kvstore.transport.rdma.channel import CHANNEL_BYTES, CHANNEL_LIMITS, Channel
from kvstore.transport.rdma.memory import Memory
from kvstore.transport.rdma.nic import Nic, Options
from kvstore.transport.rdma.paths import Path, Paths
from kvstore.transport.rdma.read_queue import ReadQueue
from kvstore.transport.rdma.topology import same_fabric
from kvstore.transport.rdma.verbs import Access, Domain, Own, QueuePair, Remote, VerbsError
from kvstore.wire_rdma import Join, Joined, PathEnds, QueueEnd, RdmaPort

MOST_QUEUES = 16  # of one path, whatever the other end wants
MOST_PORTS = 64
MTUS = (256, 512, 1024, 2048, 4096)
PSN_BITS = QUEUE_BITS = 24


class Peer:
    """`nics` and `domains` of this end, one domain each. The client's end begins: `propose`, then `settle` what the
    node answers; the node's end only answers, with `accept`.

    VerbsError and ConnectFailed leave it to be closed.
    """

    def __init__(self, nics: Sequence[Nic], domains: Sequence[Domain], options: Options, *,
                 now: Callable[[], float], broke: Callable[[Path], None] = lambda path: None) -> None:  # fmt: skip
        self._nics = list(nics)
        self._domains = list(domains)
        self._options = options
        self._ports: tuple[RdmaPort, ...] = ()  # of the other end
        self._is_client = False
        self.paths = Paths(quarantine_bytes=options.quarantine_bytes, hung_s=options.hung_s, now=now, broke=broke)
        self.channel: Channel | None = None
        self._channel_pair: QueuePair | None = None
        self._channel_memory: Memory | None = None
        self._channel_map: mmap.mmap | None = None
        self._psns: dict[int, list[int]] = {}  # that this end said, by path

    @property
    def other_ports(self) -> int:
        """How many the other end has."""
        return len(self._ports)

    # The client's end.

    def propose(self, ports: Sequence[RdmaPort]) -> tuple[tuple[PathEnds, ...], PathEnds]:
        """Paths to the node's ports, and the channel by the first of them. ConnectFailed when no two ports fit."""
        self._is_client = True
        check_ports(ports)
        self._ports = tuple(ports)
        for nic, port in pairs(self._nics, ports)[: self._options.most_paths]:
            self._add_path(nic, port, self._options.queue_pairs)
        if not self.paths.paths:
            raise ConnectFailed("no RDMA port here and there have the same link layer")
        first = self.paths.paths[0]
        channel = self._make_channel(first.nic)
        psn = secrets.randbits(PSN_BITS)
        self._psns[-1] = [psn]
        return self.again(range(len(self.paths.paths))), PathEnds(
            0, first.nic, first.port, (QueueEnd(channel.number, psn),)
        )

    def again(self, numbers: Sequence[int]) -> tuple[PathEnds, ...]:
        """What to say of paths that are to be connected, anew or at all. They are reset."""
        ends = []
        for number in numbers:
            path = self.paths.paths[number]
            self.paths.reset(path)
            ends.append(self._ends(number, path))
        return tuple(ends)

    def settle(self, joined: Joined, numbers: Sequence[int]) -> None:
        """The node's answer for paths `numbers`. ConnectFailed when the channel cannot be connected."""
        answers = {ends.number: ends for ends in joined.paths}
        for number in numbers:
            path = self.paths.paths[number]
            ends = answers.get(number)
            if ends is None or len(ends.queues) != len(path.queues):
                self.paths.not_connected(path, "the node's end could not be connected")
            else:
                self._connect(number, path, ends)
        if joined.channel is not None and self._channel_pair is not None:
            first = self.paths.paths[0]
            try:
                remote = self._remote(joined.channel.queues[0], first.port)
                self._channel_pair.connect(self._own(self._psns[-1][0], first.nic, first.port), remote)
            except (VerbsError, IndexError) as error:
                raise ConnectFailed(f"{first.name}: {error}") from error

    # The node's end.

    def accept(self, join: Join) -> Joined:
        """Connect what the client proposes; the answer has what worked. ProtocolError for what makes no sense.

        VerbsError when the channel cannot be connected.
        """
        if join.channel is not None:
            if self._ports or not join.ports:
                raise ProtocolError("the first Join, and no other, has the client's ports and a channel")
            check_ports(join.ports)
            self._ports = join.ports
        if not self._ports or len(join.paths) > self._options.most_paths:
            raise ProtocolError(f"{len(join.paths)} paths; first a channel, and at most {self._options.most_paths}")
        for ends in join.paths:
            self._check(ends)
        answers = [ends for ends in map(self._accept_path, join.paths) if ends is not None]
        channel = None
        if join.channel is not None:
            channel = self._accept_channel(join.channel)
        return Joined(join.id, tuple(answers), channel)

    def _check(self, ends: PathEnds) -> None:
        if not 0 <= ends.client_port < len(self._ports) or not 0 <= ends.node_port < len(self._nics):
            raise ProtocolError(f"a path from port {ends.client_port} to {ends.node_port}: there are no such ports")
        if not 0 < len(ends.queues) <= MOST_QUEUES:
            raise ProtocolError(f"a path of {len(ends.queues)} queue pairs; at most {MOST_QUEUES}")
        if not 0 <= ends.number < self._options.most_paths:
            raise ProtocolError(f"path {ends.number}; at most {self._options.most_paths}")

    def _accept_path(self, ends: PathEnds) -> PathEnds | None:
        known = self.paths.paths
        try:
            if ends.number == len(known):
                self._add_path(ends.node_port, ends.client_port, len(ends.queues))
            if ends.number >= len(known):  # one before it could not be made
                return None
            path = known[ends.number]
            if (path.nic, path.port, len(path.queues)) != (ends.node_port, ends.client_port, len(ends.queues)):
                raise ProtocolError(f"path {ends.number} had other ends before")
            self.paths.reset(path)
            answer = self._ends(ends.number, path)
        except VerbsError:
            return None
        return answer if self._connect(ends.number, path, ends) else None

    def _accept_channel(self, ends: PathEnds) -> PathEnds:
        self._check(ends)
        pair = self._make_channel(ends.node_port)
        psn = secrets.randbits(PSN_BITS)
        pair.connect(self._own(psn, ends.node_port, ends.client_port), self._remote(ends.queues[0], ends.client_port))
        return PathEnds(0, ends.client_port, ends.node_port, (QueueEnd(pair.number, psn),))

    # Both.

    def close(self) -> None:
        """No NIC touches any memory for it any more, and its transfers have ended and settled. Idempotent."""
        self.paths.close()
        if self.channel is not None:
            self.channel.close()
        if self._channel_pair is not None:
            self._channel_pair.close()
        if self._channel_memory is not None:
            self._channel_memory.close()
        self.channel = self._channel_pair = self._channel_memory = None

    def _add_path(self, nic: int, port: int, queue_pairs: int) -> None:
        queues: list[ReadQueue] = []
        try:
            for _ in range(queue_pairs):
                pair = self._domains[nic].queue_pair(self._options.limits)
                queues.append(ReadQueue(pair, self._options.depth, self._options.window_bytes))
        except VerbsError:
            for queue in queues:
                queue.close()
            raise
        self.paths.add(
            Path(nic, port, f"{self._nics[nic].name} to {self._ports[port].name}", queues, self._nics[nic].distance)
        )

    def _make_channel(self, nic: int) -> QueuePair:
        """Its receives are posted before the other end can know of it."""
        self._channel_map = mmap.mmap(-1, CHANNEL_BYTES)
        address = address_of(memoryview(self._channel_map))
        domain = self._domains[nic]
        self._channel_memory = memory = Memory([domain], address, CHANNEL_BYTES, Access.LOCAL_WRITE)
        self._channel_pair = pair = domain.queue_pair(CHANNEL_LIMITS)
        pair.prepare(self._nics[nic].port.number)
        self.channel = Channel(pair, address, memory.lkeys[0])
        return pair

    def _ends(self, number: int, path: Path) -> PathEnds:
        self._psns[number] = [secrets.randbits(PSN_BITS) for _ in path.queues]
        ends = zip(path.queues, self._psns[number], strict=True)
        queues = tuple(QueueEnd(queue.pair.number, psn) for queue, psn in ends)
        client_port, node_port = (path.nic, path.port) if self._is_client else (path.port, path.nic)
        return PathEnds(number, client_port, node_port, queues)

    def _connect(self, number: int, path: Path, ends: PathEnds) -> bool:
        try:
            for queue, psn, theirs in zip(path.queues, self._psns[number], ends.queues, strict=True):
                queue.connect(self._own(psn, path.nic, path.port), self._remote(theirs, path.port))
        except VerbsError as error:
            self.paths.not_connected(path, str(error))
            return False
        self.paths.connected(path)
        return True

    def _own(self, psn: int, nic: int, port: int) -> Own:
        mine = self._nics[nic]
        mtu_bytes = min(mine.port.mtu_bytes, self._ports[port].mtu_bytes)
        return Own(psn, mine.port.number, mine.gid.number, mtu_bytes, self._options.timers)

    def _remote(self, end: QueueEnd, port: int) -> Remote:
        if not (0 < end.number < 1 << QUEUE_BITS and 0 <= end.psn < 1 << PSN_BITS):
            raise ProtocolError(f"there is no queue pair {end.number} with PSN {end.psn}")
        theirs = self._ports[port]
        return Remote(end.number, end.psn, theirs.gid, theirs.lid)


def check_ports(ports: Sequence[RdmaPort]) -> None:
    """ProtocolError for what no ports are."""
    if len(ports) > MOST_PORTS:
        raise ProtocolError(f"{len(ports)} RDMA ports; at most {MOST_PORTS}")
    for port in ports:
        if len(port.gid) != 16 or not 0 <= port.lid < 1 << 16 or port.mtu_bytes not in MTUS:
            raise ProtocolError(f"there is no RDMA port like {port}"[:200])


def pairs(nics: Sequence[Nic], ports: Sequence[RdmaPort]) -> list[tuple[int, int]]:
    """(NIC here, port there), each at least once: side by side, as the rails of a cluster are wired.

    Only those that may be of one network.
    """
    count = max(len(nics), len(ports)) if nics and ports else 0
    sides = [(at % len(nics), at % len(ports)) for at in range(count)]
    return [(nic, port) for nic, port in sides if _fit(nics[nic], ports[port])]


def _fit(nic: Nic, port: RdmaPort) -> bool:
    return same_fabric(nic.gid.raw, nic.port.link_layer, port.gid, port.link_layer)
