"""The RDMA ports of this host that can be used, opened; and how this store uses them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.transport.rdma.topology import (
    SYSFS,
    UNKNOWN,
    NicPlace,
    choose_gid,
    distance,
    nic_places,
    node_of_cpus,
    preferred,
)
from kvstore.transport.rdma.verbs import Context, Gid, Port, QueueLimits, Timers, Verbs, VerbsError
from kvstore.wire_rdma import RdmaPort

DEFAULT_TIMERS = Timers()


@dataclass(frozen=True, slots=True)
class Options:
    """`queue_pairs` of each path. `depth` READs and `window_bytes` may be on their way in each of them."""

    devices: tuple[str, ...] = ()  # as "mlx5_0" or "mlx5_0:1"; none: all
    queue_pairs: int = 2
    slice_bytes: int = 1 << 20
    depth: int = 128
    window_bytes: int = 8 << 20
    most_paths: int = 8
    hung_s: float = 1.0
    quarantine_bytes: int = 256 << 20
    timers: Timers = DEFAULT_TIMERS

    @property
    def limits(self) -> QueueLimits:
        return QueueLimits(sends=self.depth, receives=1)


DEFAULTS = Options()


class Nic(NamedTuple):
    """An active port of an open device, and the address by which it is reached."""

    context: Context
    port: Port
    gid: Gid
    place: NicPlace | None = None  # None where sysfs does not say

    def distance(self, numa_node: int) -> int:
        """To memory of that NUMA node; see topology.distance."""
        return distance(self.place, numa_node) if self.place is not None else UNKNOWN

    @property
    def name(self) -> str:
        return f"{self.context.device}:{self.port.number}"

    def described(self) -> RdmaPort:
        """As peers are told."""
        return RdmaPort(self.name, self.gid.raw, self.port.lid, self.port.mtu_bytes, self.port.link_layer)


class Opened(NamedTuple):
    """`reasons` say what of this host's RDMA is not used, and why."""

    nics: list[Nic]
    reasons: list[str]

    def close(self) -> None:
        """After all domains of them."""
        for context in {id(nic.context): nic.context for nic in self.nics}.values():
            context.close()


def open_nics(verbs: Verbs, devices: Sequence[str], sysfs: Path = SYSFS) -> Opened:
    """The active ports of these devices; of all devices for none: preferred ones first, by NUMA
    node of this process, then by rate.

    Never raises: `reasons` say what is missing.
    """
    opened = Opened([], [])
    try:
        found = verbs.devices()
    except VerbsError as error:
        opened.reasons.append(f"{verbs.name}: {error}")
        return opened
    wanted = {name.partition(":")[0] for name in devices}
    opened.reasons.extend(f"{name}: there is no such RDMA device" for name in sorted(wanted - set(found)))
    if not found:
        opened.reasons.append("this host has no RDMA device")
    for name in found:
        if not wanted or name in wanted:
            _open_ports(verbs, name, devices, opened)
    places = nic_places(sysfs)
    opened.nics[:] = [nic._replace(place=places.get(nic.context.device)) for nic in opened.nics]
    near, far = preferred(list(places.values()), node_of_cpus(os.sched_getaffinity(0), sysfs))
    order = [place.device for place in (*near, *far)]
    opened.nics.sort(key=lambda nic: order.index(nic.context.device) if nic.context.device in order else -1)
    return opened


def _open_ports(verbs: Verbs, device: str, devices: Sequence[str], opened: Opened) -> None:
    used = len(opened.nics)
    try:
        context = verbs.open(device)
        for port in context.ports():
            name = f"{device}:{port.number}"
            if devices and device not in devices and name not in devices:
                continue
            if not port.is_active:
                opened.reasons.append(f"{name}: its port is not active")
                continue
            try:
                opened.nics.append(Nic(context, port, choose_gid(port)))
            except ConfigError as error:
                opened.reasons.append(f"{name}: {error}")
        if len(opened.nics) == used:
            context.close()
    except VerbsError as error:
        opened.reasons.append(f"{device}: {error}")
