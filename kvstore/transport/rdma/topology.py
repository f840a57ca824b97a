"""Where NICs are: which of a port's addresses to use, and how far a NIC is from memory, by what sysfs says."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.transport.rdma.verbs import Gid, Port

SYSFS = Path("/sys")
MAPPED = bytes(10) + b"\xff\xff"  # IPv4 in IPv6
LINK_LOCAL = b"\xfe\x80"
SAME_SWITCH, SAME_NODE, OTHER_NODE, UNKNOWN = range(4)
"""Distances between a NIC and memory, nearest first."""


def choose_gid(port: Port) -> Gid:
    """Of Ethernet the RoCE v2 entry that is routable, IPv4 first; of InfiniBand the first. By kind and prefix: the
    numbers differ from host to host.

    ConfigError when there is none.
    """
    if port.link_layer == "infiniband":
        if port.gids:
            return port.gids[0]
        raise ConfigError("the port has no GID: is a subnet manager running?")
    found = sorted((gid for gid in port.gids if gid.kind == "roce v2"), key=_preference)
    if not found:
        kinds = ", ".join(sorted({gid.kind for gid in port.gids})) or "none"
        raise ConfigError(
            f"the port has no RoCE v2 address (its kinds: {kinds}): give its network interface an IP address"
        )
    return found[0]


def _preference(gid: Gid) -> tuple[int, int]:
    if gid.raw.startswith(MAPPED):
        return 0, gid.number
    return (2 if gid.raw.startswith(LINK_LOCAL) else 1), gid.number


def gid_text(gid: bytes) -> str:
    """As people write it: IPv4 where it is."""
    if gid.startswith(MAPPED):
        return ".".join(map(str, gid[12:]))
    return ":".join(gid[at : at + 2].hex() for at in range(0, 16, 2))


class NicPlace(NamedTuple):
    """`pci` is the chain of PCI addresses from the root to the device; `numa_node` is -1 where it is not known."""

    device: str
    numa_node: int
    pci: tuple[str, ...]
    rate_gbps: float
    netdev: str
    firmware: str


def nic_places(sysfs: Path = SYSFS) -> dict[str, NicPlace]:
    """By device. What vanishes while it is looked at, or makes no sense, is left out or unknown."""
    places = {}
    try:
        devices = sorted((sysfs / "class/infiniband").iterdir())
    except OSError:
        return {}
    for device in devices:
        netdevs = _names(device / "device/net")
        places[device.name] = NicPlace(
            device.name,
            _number(device / "device/numa_node"),
            _pci_chain(device / "device"),
            max((_rate(port / "rate") for port in _paths(device / "ports")), default=0.0),
            netdevs[0] if netdevs else _text(device / "parent"),
            _text(device / "fw_ver"),
        )
    return places


def has_devices(sysfs: Path = SYSFS) -> bool:
    """Whether there is any RDMA device: a cheap look, before a binding is loaded."""
    return bool(_paths(sysfs / "class/infiniband"))


def distance(nic: NicPlace, numa_node: int, pci: Sequence[str] = ()) -> int:
    """From a NIC to memory of a NUMA node, or to a device with this chain of PCI addresses."""
    if pci and len(nic.pci) > 1 and len(pci) > 1 and set(nic.pci[:-1]) & set(pci[1:-1]):
        return SAME_SWITCH
    if nic.numa_node < 0 or numa_node < 0:
        return UNKNOWN
    return SAME_NODE if nic.numa_node == numa_node else OTHER_NODE


def nearest(places: Sequence[NicPlace], numa_node: int, pci: Sequence[str] = ()) -> list[NicPlace]:
    """Nearest first, the faster of equals first; the first are preferred, the rest are for when they fail."""
    return sorted(places, key=lambda nic: (distance(nic, numa_node, pci), -nic.rate_gbps, nic.device))


def memory_node(address: int, numa_maps: str) -> int:
    """NUMA node of most pages of the mapping that has `address`, by the text of /proc/self/numa_maps; -1: unknown."""
    best, found = -1, ""
    for line in numa_maps.splitlines():
        start = line.partition(" ")[0]
        if re.fullmatch(r"[0-9a-f]+", start) and best < int(start, 16) <= address:
            best, found = int(start, 16), line
    pages = [(int(count), int(node)) for node, count in re.findall(r"\bN(\d+)=(\d+)", found)]
    return max(pages, key=lambda page: (page[0], -page[1]))[1] if pages else -1


def _pci_chain(device: Path) -> tuple[str, ...]:
    try:
        parts = device.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return ()
    return tuple(part for part in parts if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part))


def _rate(path: Path) -> float:
    found = re.match(r"([\d.]+) Gb/sec", _text(path))
    return float(found[1]) if found else 0.0


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else -1


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _paths(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _names(folder: Path) -> list[str]:
    return [path.name for path in _paths(folder)]
