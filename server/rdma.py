"""What a node has of RDMA: its NICs, the slabs registered for each tenant, and who may have queue pairs."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from kvstore.copier import Copier
from kvstore.errors import ConfigError, NotFound, Rejected
from kvstore.region import Region
from kvstore.transport.rdma.memory import Memory
from kvstore.transport.rdma.nic import Opened, Options, open_nics
from kvstore.transport.rdma.paths import Path
from kvstore.transport.rdma.peer import Peer
from kvstore.transport.rdma.topology import has_devices
from kvstore.transport.rdma.verbs import Access, Domain, Verbs, VerbsError, load_verbs
from kvstore.wire_rdma import RdmaPort
from server.config import RdmaSettings

log = logging.getLogger("cairn.rdma")

OFF, AUTO = "off", "auto"
COUNTED = ("read_bytes", "failures", "connects")
MOST_SHOWN = 128  # characters of a name


def options_of(settings: RdmaSettings) -> Options:
    names = () if settings.devices == AUTO else tuple(filter(None, settings.devices.split(",")))
    return Options(
        devices=names,
        queue_pairs=settings.queue_pairs,
        slice_bytes=settings.slice,
        quarantine_bytes=settings.quarantine,
    )


class Guest(Protocol):
    """A connection that has queue pairs. `was_used` since the clock's hand last came by."""

    was_used: bool
    client: str

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way, and its session holds nothing."""

    def make_way(self) -> None:
        """Hang up, and close its peer; the client connects again when it needs to."""


class NodeRdma:
    """Slabs of a tenant are in a protection domain of its own on each NIC: what a client's queue pairs reach is its
    tenant's, for reading.

    `reasons` say why there is none, where there is none.
    """

    def __init__(self, settings: RdmaSettings, copier: Copier, verbs: Verbs | None) -> None:
        self.options = options_of(settings)
        self.peers: dict[Peer, Guest] = {}
        self._tenants: dict[Peer, str] = {}
        self._ended: dict[str, Counter[str]] = {}  # by port, of connections that are no more
        self._ended_late = 0
        self.binding = ""
        self._copier = copier
        self._most_peers = settings.peers
        self._opened = Opened([], ["rdma.devices is off"])
        self._domains: dict[str, list[Domain]] = {}
        self._slabs: dict[int, Memory] = {}
        if settings.devices == OFF:
            return
        if settings.devices == AUTO and verbs is None and not has_devices():
            self._opened.reasons[:] = ["this host has no RDMA device"]
            return
        try:
            verbs = verbs or load_verbs()
        except ConfigError as error:
            self._opened.reasons[:] = [str(error)]
        else:
            self.binding = verbs.name
            self._opened = open_nics(verbs, self.options.devices)
        if settings.devices != AUTO and not self._opened.nics:
            raise ConfigError(f"rdma.devices {settings.devices}: {'; '.join(self._opened.reasons)}")
        log.log(logging.INFO, "RDMA: %s", ", ".join(port.name for port in self.ports) or "; ".join(self.reasons))

    @property
    def ports(self) -> tuple[RdmaPort, ...]:
        return tuple(nic.described() for nic in self._opened.nics)

    @property
    def reasons(self) -> list[str]:
        return self._opened.reasons

    @property
    def registered_bytes(self) -> int:
        return sum(memory.size for memory in self._slabs.values())

    def peer(self, tenant: str, guest: Guest) -> Peer:
        """One more connection with queue pairs. Rejected when there are as many as may be and none is idle."""
        if not self._opened.nics:
            raise Rejected("this node has no RDMA: " + "; ".join(self.reasons), 60.0)
        if len(self.peers) >= self._most_peers and not self._make_room():
            raise Rejected(f"{self._most_peers} connections have queue pairs: rdma.peers")
        peer = Peer(self._opened.nics, self._domains_of(tenant), self.options, now=time.monotonic)
        self.peers[peer] = guest
        self._tenants[peer] = tenant
        return peer

    def _make_room(self) -> bool:
        """By CLOCK: of those that were not used since the hand last came by, the first that is idle."""
        for _ in range(2 * len(self.peers)):
            peer, guest = next(iter(self.peers.items()))
            self.peers[peer] = self.peers.pop(peer)
            if not guest.was_used and guest.is_idle:
                guest.make_way()
                return True
            guest.was_used = False
        return False

    def close_peer(self, peer: Peer) -> None:
        peer.close()
        if self.peers.pop(peer, None) is None:
            return
        self._tenants.pop(peer, None)
        self._ended_late += peer.paths.late_completions
        for path in peer.paths.paths:
            self._ended.setdefault(self._opened.nics[path.nic].name, Counter()).update(counted(path))

    async def memory(self, tenant: str, slab_id: int, region: Region) -> Memory:
        """A slab as it is registered for its tenant; at first use that is done in a thread.

        Rejected when a NIC refuses it, NotFound when the slab went meanwhile.
        """
        known = self._slabs.get(slab_id)
        if known is not None:
            return known
        access, domains = Access.LOCAL_WRITE | Access.REMOTE_READ, self._domains_of(tenant)
        view = region.view(0, region.size)  # it stays mapped while it is pinned
        made: list[Memory] = []
        try:
            await self._copier.run(lambda: made.append(Memory(domains, region.address, region.size, access)))
        except VerbsError as error:
            raise Rejected(f"slab {slab_id} cannot be registered: {error}") from error
        except BaseException:  # whoever asked went meanwhile
            for memory in made:
                memory.close()
            raise
        finally:
            view.release()
        (memory,) = made
        known = self._slabs.get(slab_id)
        if known is not None or region.fd < 0:
            memory.close()
            if known is None:
                raise NotFound(f"slab {slab_id} is gone")
            return known
        self._slabs[slab_id] = memory
        return memory

    def dropped(self, slab_id: int) -> None:
        """The slab goes: peers that still believe in it get errors, and nothing of what comes in its place."""
        memory = self._slabs.pop(slab_id, None)
        if memory is not None:
            memory.close()

    def _domains_of(self, tenant: str) -> list[Domain]:
        if tenant not in self._domains:
            self._domains[tenant] = [nic.context.domain() for nic in self._opened.nics]
        return self._domains[tenant]

    @property
    def quarantined_bytes(self) -> int:
        return sum(peer.paths.quarantined_bytes for peer in self.peers)

    @property
    def late_completions(self) -> int:
        """Of all connections that there ever were."""
        return self._ended_late + sum(peer.paths.late_completions for peer in self.peers)

    def describe(self, tenant: str = "") -> dict[str, Any]:
        """For people. Paths are those to clients of `tenant`, or to all for none."""
        shown = [(peer, guest) for peer, guest in self.peers.items() if tenant in ("", self._tenants[peer])]
        return {
            "binding": self.binding,
            "ports": self.port_rows(),
            "reasons": list(self.reasons),
            "peers": len(self.peers),
            "registered_bytes": self.registered_bytes,
            "quarantined_bytes": self.quarantined_bytes,
            "late_completions": self.late_completions,
            "paths": [row for peer, guest in shown for row in path_rows(peer, guest.client, self._tenants[peer])],
        }

    def port_rows(self) -> list[dict[str, Any]]:
        """One row per port here. Counts are of all paths that there ever were; the rest is of those there are."""
        rows = {}
        for nic in self._opened.nics:
            row: dict[str, Any] = {"port": nic.name, "up": 0, "down": 0, "bytes_per_s": 0.0, "request_s": 0.0}
            ended = self._ended.get(nic.name, Counter())
            rows[nic.name] = row | {name: ended[name] for name in COUNTED}
        for path in (path for peer in self.peers for path in peer.paths.paths):
            row = rows[self._opened.nics[path.nic].name]
            row["up" if path.is_up else "down"] += 1
            row["bytes_per_s"] = max(row["bytes_per_s"], path.rate.bytes_per_s)
            row["request_s"] = max(row["request_s"], path.rate.request_s)
            for name, count in counted(path).items():
                row[name] += count
        return list(rows.values())

    def close(self) -> None:
        """After all connections."""
        for peer in list(self.peers):
            self.close_peer(peer)
        for slab_id in list(self._slabs):
            self.dropped(slab_id)
        for domains in self._domains.values():
            for domain in domains:
                domain.close()
        self._domains.clear()
        self._opened.close()


def counted(path: Path) -> dict[str, int]:
    """What only grows."""
    return {"read_bytes": path.rate.total_bytes, "failures": path.health.failures, "connects": path.connects}


def path_rows(peer: Peer, client: str, tenant: str) -> Sequence[dict[str, Any]]:
    """What was measured of each path, for people; a client says what it and its ports are called."""
    return [
        {
            "tenant": tenant,
            "client": _printable(client),
            "path": _printable(path.name),
            "up": path.is_up,
            "reason": path.health.reason,
            **counted(path),
            "bytes_per_s": path.rate.bytes_per_s,
            "request_s": path.rate.request_s,
        }
        for path in peer.paths.paths
    ]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text[:MOST_SHOWN])
