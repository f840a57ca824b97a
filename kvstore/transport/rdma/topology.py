"""Where NICs are: which of a port's addresses to use, and how far a NIC is from memory, by what sysfs says."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.transport.rdma.verbs import Gid, Port

SYSFS = Path("/sys")
MAPPED = bytes(10) + b"\xff\xff"  # IPv4 in IPv6
LINK_LOCAL = b"\xfe\x80"
SAME_SWITCH, SAME_NODE, OTHER_NODE, UNKNOWN = range(4)
"""Distances between a NIC and memory, nearest first: a PCIe switch below the root port is shared; the root complex or
the NUMA node is; neither is; sysfs does not say."""
PCI_ADDRESS = r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")  # PCI vendor; classes of GPUs, with and without outputs
SUBNET_BYTES = 8  # of a GID: the prefix of an InfiniBand subnet


def choose_gid(port: Port, wanted: int | None = None) -> Gid:
    """Of Ethernet the RoCE v2 entry that is routable, IPv4 first; of InfiniBand the first. By kind and prefix: the
    numbers differ from host to host. `wanted` is the number of an entry that somebody insists on.

    ConfigError when there is none.
    """
    if wanted is not None:
        for gid in port.gids:
            if gid.number == wanted and gid.kind in ("ib", "roce v2"):
                return gid
        raise ConfigError(f"entry {wanted} of the port's addresses is empty, or not for RoCE v2")
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


def same_fabric(gid: bytes, link_layer: str, other_gid: bytes, other_link_layer: str) -> bool:
    """Whether it makes sense to try a path between two ports: a hint, for a network may connect more, or less.

    Ethernet: both addresses are IPv4, or both routable IPv6, or both link-local. InfiniBand: one subnet.
    """
    if link_layer != other_link_layer:
        return False
    if link_layer == "infiniband":
        return gid[:SUBNET_BYTES] == other_gid[:SUBNET_BYTES]
    return all(gid.startswith(prefix) == other_gid.startswith(prefix) for prefix in (MAPPED, LINK_LOCAL))


class PortPlace(NamedTuple):
    """As sysfs has it: `state` is "ACTIVE", "DOWN" or another; "" and 0 are not known."""

    number: int
    state: str
    rate_gbps: float
    link_layer: str  # "Ethernet", "InfiniBand"
    netdev: str


class NicPlace(NamedTuple):
    """`pci` is the chain of PCI addresses from the root to the device; a device that is software has none.

    `numa_node` is -1 where it is not known.
    """

    device: str
    numa_node: int
    pci: tuple[str, ...]
    ports: tuple[PortPlace, ...]
    driver: str
    model: str
    firmware: str
    node_distances: tuple[tuple[int, int], ...]  # (NUMA node, how far it is from its own: 10 is its own)

    @property
    def rate_gbps(self) -> float:
        """Of its fastest active port."""
        return max((port.rate_gbps for port in self.ports if port.state == "ACTIVE"), default=0.0)

    def port(self, number: int) -> PortPlace | None:
        return next((port for port in self.ports if port.number == number), None)


class GpuPlace(NamedTuple):
    """`numa_node` and `pci` as of a NicPlace."""

    address: str
    numa_node: int
    pci: tuple[str, ...]


def nic_places(sysfs: Path = SYSFS) -> dict[str, NicPlace]:
    """By device. What vanishes while it is looked at, or makes no sense, is left out or unknown."""
    places = {}
    for device in _paths(sysfs / "class/infiniband"):
        ports = tuple(_port_place(device, number) for number in sorted(_numbers(device / "ports")))
        if not ports:
            continue
        node = _number(device / "device/numa_node")
        places[device.name] = NicPlace(
            device.name,
            node,
            _pci_chain(device / "device"),
            ports,
            driver=_target(device / "device/driver"),
            model=_text(device / "hca_type"),
            firmware=_text(device / "fw_ver"),
            node_distances=_node_distances(sysfs, node),
        )
    return places


def gpu_places(sysfs: Path = SYSFS) -> list[GpuPlace]:
    """NVIDIA's, in the order of their PCI addresses."""
    return [
        GpuPlace(device.name, _number(device / "numa_node"), _pci_chain(device))
        for device in _paths(sysfs / "bus/pci/devices")
        if _text(device / "vendor") == NVIDIA and _text(device / "class").startswith(DISPLAYS)
    ]


def numa_nodes(sysfs: Path = SYSFS) -> list[int]:
    """Empty where the kernel has no NUMA."""
    folders = (re.fullmatch(r"node([0-9]+)", path.name) for path in _paths(sysfs / "devices/system/node"))
    return sorted(int(found[1]) for found in folders if found)


def has_devices(sysfs: Path = SYSFS) -> bool:
    """Whether there is any RDMA device: a cheap look, before a binding is loaded."""
    return bool(_paths(sysfs / "class/infiniband"))


def distance(nic: NicPlace, numa_node: int, pci: Sequence[str] = ()) -> int:
    """From a NIC to memory of a NUMA node, or to a device that is there and has this chain of PCI addresses."""
    if set(nic.pci[1:-1]) & set(pci[1:-1]):
        return SAME_SWITCH
    if nic.pci and pci and _bus(nic.pci[0]) == _bus(pci[0]):
        return SAME_NODE
    if nic.numa_node < 0 or numa_node < 0:
        return UNKNOWN
    return SAME_NODE if nic.numa_node == numa_node else OTHER_NODE


def preferred(
    places: Sequence[NicPlace], numa_node: int, pci: Sequence[str] = ()
) -> tuple[tuple[NicPlace, ...], tuple[NicPlace, ...]]:
    """The nearest, and those for when they fail, nearest first; of equals the faster first, then by name."""

    def far(nic: NicPlace) -> tuple[int, int]:
        return distance(nic, numa_node, pci), dict(nic.node_distances).get(numa_node, 0)

    ordered = sorted(places, key=lambda nic: (far(nic), -nic.rate_gbps, nic.device))
    count = sum(far(nic) == far(ordered[0]) for nic in ordered)
    return tuple(ordered[:count]), tuple(ordered[count:])


def node_of_cpus(cpus: Collection[int], sysfs: Path = SYSFS) -> int:
    """The NUMA node that has all of these CPUs; -1 where several have."""
    nodes = {
        int(path.parent.name.removeprefix("node"))
        for cpu in cpus
        for path in (sysfs / "devices/system/node").glob(f"node[0-9]*/cpu{cpu}")
    }
    return nodes.pop() if len(nodes) == 1 else -1


def memory_node(address: int, numa_maps: str) -> int:
    """NUMA node of most pages of the mapping that has `address`, by the text of /proc/self/numa_maps; -1: unknown."""
    best, found = -1, ""
    for line in numa_maps.splitlines():
        start = line.partition(" ")[0]
        if re.fullmatch(r"[0-9a-f]+", start) and best < int(start, 16) <= address:
            best, found = int(start, 16), line
    pages = [(int(count), int(node)) for node, count in re.findall(r"\bN(\d+)=(\d+)", found)]
    return max(pages, key=lambda page: (page[0], -page[1]))[1] if pages else -1


def _port_place(device: Path, number: int) -> PortPlace:
    port = device / "ports" / str(number)
    return PortPlace(
        number,
        _text(port / "state").partition(": ")[2],
        _rate(port / "rate"),
        _text(port / "link_layer"),
        _netdev(device, number),
    )


def _netdev(device: Path, port: int) -> str:
    """Of its first address; where a port has none yet, or of IPoIB, the interface that says it is of this port."""
    of_address = _text(device / "ports" / str(port) / "gid_attrs/ndevs/0") or _text(device / "parent")
    if of_address:
        return of_address
    netdevs = _paths(device / "device/net")
    of_port = [path.name for path in netdevs if _number(path / "dev_port") == port - 1]
    return of_port[0] if of_port else ""


def _node_distances(sysfs: Path, node: int) -> tuple[tuple[int, int], ...]:
    row = _text(sysfs / f"devices/system/node/node{node}/distance").split()
    nodes = numa_nodes(sysfs)
    if len(row) != len(nodes) or not all(re.fullmatch(r"[0-9]+", word) for word in row):
        return ()
    return tuple(zip(nodes, map(int, row), strict=True))


def _pci_chain(device: Path) -> tuple[str, ...]:
    try:
        parts = device.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return ()
    return tuple(part for part in parts if re.fullmatch(PCI_ADDRESS, part))


def _bus(address: str) -> str:
    return address.rpartition(":")[0]


def _target(link: Path) -> str:
    try:
        return link.readlink().name
    except OSError:
        return ""


def _rate(path: Path) -> float:
    found = re.match(r"([0-9]+(?:\.[0-9]+)?) Gb/sec", _text(path))
    return float(found[1]) if found else 0.0


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else -1


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in _paths(folder) if re.fullmatch(r"[0-9]{1,3}", path.name)]


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
