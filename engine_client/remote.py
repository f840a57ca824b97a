"""What a client has of RDMA: its NICs and registered memory, and of each connection the node's memory as it is lent."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvstore.copier import address_of
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.health import Health
from kvstore.transport.rdma.memory import Memory, MemoryMap, Staging
from kvstore.transport.rdma.nic import Options, open_nics
from kvstore.transport.rdma.peer import Peer
from kvstore.transport.rdma.topology import has_devices
from kvstore.transport.rdma.verbs import Access, Domain, Verbs, VerbsError, load_verbs
from kvstore.wire_rdma import RdmaPort

STAGING_BYTES = 64 << 20
TRANSPORTS = ("auto", "local", "rdma", "tcp")


class Registered:
    """A buffer that NICs read and write in place. It stays as it is, and where it is, until it is closed."""

    def __init__(self, rdma: "Rdma | None", buffer: Any, memory: Memory | None) -> None:
        self._rdma = rdma
        self._buffer = buffer
        self.memory = memory

    @property
    def is_quiet(self) -> bool:
        """No NIC writes into it: after calls that were cancelled or late, one may for a moment."""
        return self.memory is None or not self.memory.users

    def close(self) -> None:
        """InvalidRequest while it is not quiet. Idempotent."""
        if not self.is_quiet:
            raise InvalidRequest("a NIC may still write into this buffer: it is not quiet")
        memory, self.memory = self.memory, None
        if memory is not None and self._rdma is not None:
            self._rdma.memories.remove(memory)
            memory.close()
        self._buffer = None


class Rdma:
    """The NICs of this process, opened; one protection domain for each. ConfigError says why there are none."""

    def __init__(self, options: Options, verbs: Verbs | None = None) -> None:
        self.options = options
        verbs = verbs or load_verbs()
        self._opened = open_nics(verbs, options.devices)
        self.nics = self._opened.nics
        self.domains: list[Domain] = []
        self.memories = MemoryMap()
        self.health = Health()  # of connections by RDMA: after one that failed, TCP does for a while
        self.staged_bytes = 0  # that were copied once more, since their place is not registered
        self._staging: Staging | None = None
        if not self.nics:
            raise ConfigError("; ".join(self._opened.reasons))
        try:
            for nic in self.nics:
                self.domains.append(nic.context.domain())
        except VerbsError as error:
            self.close()
            raise ConfigError(str(error)) from error

    def peer(self) -> Peer:
        return Peer(self.nics, self.domains, self.options, now=time.monotonic)

    def register(self, buffer: Any) -> Registered:
        """Pin a writable, contiguous buffer. InvalidRequest when it is not, overlaps another, or a NIC refuses it."""
        address, size = address_and_size(buffer)
        try:
            memory = Memory(self.domains, address, size, Access.LOCAL_WRITE | Access.REMOTE_READ)
        except VerbsError as error:
            raise InvalidRequest(f"this buffer cannot be registered: {error}") from error
        try:
            self.memories.add(memory)
        except InvalidRequest:
            memory.close()
            raise
        return Registered(self, buffer, memory)

    @property
    def staging(self) -> Staging:
        """VerbsError when it cannot be registered."""
        if self._staging is None:
            self._staging = Staging(self.domains, STAGING_BYTES)
        return self._staging

    def close(self) -> None:
        """After its peers. Registered buffers are so no more."""
        for memory in list(self.memories):
            self.memories.remove(memory)
            memory.close()
        if self._staging is not None:
            self._staging.close()
        for domain in self.domains:
            domain.close()
        self.domains.clear()
        self._opened.close()


def address_and_size(buffer: Any) -> tuple[int, int]:
    """Of a writable, contiguous buffer. InvalidRequest for others."""
    try:
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise ValueError("it is read-only")
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidRequest(f"a buffer to register is writable and contiguous: {error}") from error
    return address_of(view), len(view)


def rdma_for(transport: str, address: Any, options: Options, verbs: Verbs | None) -> Rdma | None:
    """What a client of a node at `address` has of RDMA; None where it goes by shared memory or TCP.

    By itself, `auto`, a client takes RDMA where there is a NIC, and not in place of TLS, which it has not.
    ConfigError for a transport that cannot be, or RDMA where it is forced and there is none.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport {transport!r} is none of {', '.join(TRANSPORTS)}")
    if (transport == "local") != bool(address.path) and transport != "auto":
        raise ConfigError(f"transport {transport!r} does not go to {address}")
    if address.path or transport == "tcp" or (transport == "auto" and address.tls):
        return None
    if transport == "auto" and verbs is None and not has_devices():
        return None
    try:
        return Rdma(options, verbs)
    except ConfigError:
        if transport == "rdma":
            raise
        return None


class Slab(NamedTuple):
    """Where a slab lies in the node's memory; the key for each of the node's ports."""

    address: int
    size: int
    rkeys: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Remote:
    """The node's memory as one connection may read it. `ports` are the node's."""

    rdma: Rdma
    peer: Peer
    ports: Sequence[RdmaPort]
    slabs: dict[int, Slab] = field(default_factory=dict)

    def broke_there(self, numbers: Sequence[int]) -> None:
        """Paths that failed at the node's end: they are down here too, until they are connected anew."""
        for path in (self.peer.paths.paths[number] for number in numbers if 0 <= number < len(self.peer.paths.paths)):
            self.peer.paths.reset(path)
