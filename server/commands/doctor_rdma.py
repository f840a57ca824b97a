"""RDMA as `cairn doctor` sees it: binding, devices, ports, limits, and a READ by each port."""

import os
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.transport.rdma.nic import Nic, Opened, open_nics
from kvstore.transport.rdma.topology import (
    OTHER_NODE,
    SAME_SWITCH,
    SYSFS,
    distance,
    gid_text,
    gpu_places,
    has_devices,
    numa_nodes,
)
from kvstore.transport.rdma.verbs import Verbs, VerbsError, load_verbs
from server.commands import output
from server.commands.finding import Finding
from server.commands.loopback import Loopback
from server.config import DramSettings, RdmaSettings
from server.rdma import AUTO, OFF, options_of

MOST_MTU_BYTES = 4096  # of verbs
ETHERNET_MTU_BYTES = 4200  # of a network interface that a RoCE packet of 4096 bytes fits in, with its headers
IPC_LOCK = 14  # CAP_IPC_LOCK: no limit on locked memory
DEADLINE_S = 5.0
BYTES, SMALL_BYTES, SMALL_READS, LARGE_READS = 1 << 20, 4096, 32, 4
NO_RDMA = "nothing to do: TCP is used"
MEMINFO, STATUS = Path("/proc/meminfo"), Path("/proc/self/status")


def look(
    settings: RdmaSettings, dram: DramSettings, verbs: Verbs | None = None, sysfs: Path = SYSFS
) -> Iterator[Finding]:
    """What there is and whether it works, by `verbs` if given, else by the binding that is found.

    Never raises, and waits for at most DEADLINE_S on each port.
    """
    if settings.devices == OFF:
        yield Finding("rdma", "note", "off: rdma.devices is off", NO_RDMA)
        return
    try:
        verbs = verbs or load_verbs()
    except ConfigError as error:
        yield _missing(settings, str(error), sysfs)
        return
    opened = open_nics(verbs, options_of(settings).devices, sysfs)
    try:
        yield from _opened(settings, dram, verbs, opened, sysfs)
    finally:
        try:
            opened.close()
        except VerbsError:  # a device that is gone, which was said
            opened.nics.clear()


def _missing(settings: RdmaSettings, reason: str, sysfs: Path) -> Finding:
    """No binding: that matters where there is a device, or one is asked for."""
    if settings.devices != AUTO:
        return Finding("rdma", "broken", reason, "install one of them, or set rdma.devices to auto")
    advice = "install one of them for the devices of this host" if has_devices(sysfs) else NO_RDMA
    return Finding("rdma", "note", reason, advice)


def _opened(settings: RdmaSettings, dram: DramSettings, verbs: Verbs, opened: Opened, sysfs: Path) -> Iterator[Finding]:
    is_forced = settings.devices != AUTO
    if not opened.nics:
        found = f"{verbs.name}: {'; '.join(opened.reasons)}"
        advice = "check rdma.devices: the node does not start without them" if is_forced else NO_RDMA
        yield Finding("rdma", "broken" if is_forced else "note", found, advice)
        return
    yield Finding("rdma", "ok", f"{verbs.name}: {', '.join(nic.name for nic in opened.nics)}")
    for reason in opened.reasons:
        name, _, what = reason.partition(": ")
        yield Finding(f"rdma {name}", "note", what or reason, "it is not used; `rdma link` and `ip link` say more")
    yield _locked(dram, len(opened.nics))
    yield _huge_pages(dram)
    for nic in opened.nics:
        yield _port(nic, sysfs)
        yield _loopback(nic)


def _port(nic: Nic, sysfs: Path) -> Finding:
    """Its address, MTU and place."""
    port = nic.port
    is_ethernet = port.link_layer == "ethernet"
    found = f"{'RoCE v2' if is_ethernet else 'InfiniBand'} {gid_text(nic.gid.raw)}, GID {nic.gid.number}"
    found += f"; MTU {port.mtu_bytes}{_where(nic, sysfs)}"
    if port.mtu_bytes >= MOST_MTU_BYTES:
        return Finding(f"rdma {nic.name}", "ok", found)
    advice = f"an MTU of {MOST_MTU_BYTES} moves more bytes with a packet: set it on switch and subnet manager"
    if is_ethernet:
        place = nic.place.port(port.number) if nic.place is not None else None
        netdev = place.netdev if place is not None else ""
        advice = f"ip link set {netdev or 'its interface'} mtu {ETHERNET_MTU_BYTES}, on the switch too: packets of 4096"
    return Finding(f"rdma {nic.name}", "note", found, advice)


def _where(nic: Nic, sysfs: Path) -> str:
    place = nic.place
    if place is None:
        return ""
    port = place.port(nic.port.number)
    parts = [f"{port.rate_gbps:g} Gb/s"] if port is not None and port.rate_gbps else []
    if place.pci:
        parts.append(f"PCIe {place.pci[-1]}")
    if place.numa_node >= 0:
        far = [str(node) for node in numa_nodes(sysfs) if nic.distance(node) == OTHER_NODE]
        parts.append(f"NUMA node {place.numa_node}" + (f", far from memory of {', '.join(far)}" if far else ""))
    near = [gpu.address for gpu in gpu_places(sysfs) if distance(place, gpu.numa_node, gpu.pci) == SAME_SWITCH]
    if near:
        parts.append(f"on a PCIe switch with GPU {', '.join(near)}")
    return "".join(f"; {part}" for part in parts)


# Memory.


def _locked(dram: DramSettings, ports: int) -> Finding:
    """All of the tier is pinned, and counted, once for each port."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = ports * dram.capacity
    if limit == resource.RLIM_INFINITY:
        return Finding("rdma memory", "ok", "locked memory has no limit")
    found = f"{output.size_text(limit)} may be locked; {output.size_text(wanted)} with all slabs on "
    found += output.count_text(ports, "port")
    if limit >= wanted:
        return Finding("rdma memory", "ok", found)
    if _has_capability(IPC_LOCK):
        return Finding("rdma memory", "ok", f"{found}; CAP_IPC_LOCK lifts the limit")
    return Finding("rdma memory", "broken", found, "LimitMEMLOCK=infinity for its service, or `ulimit -l unlimited`")


def _has_capability(number: int) -> bool:
    return bool(int(_field(STATUS, "CapEff", "0"), 16) >> number & 1)


def _huge_pages(dram: DramSettings) -> Finding:
    """A NIC looks addresses up by page: with small ones its cache of them does not do for a large tier."""
    pages, kilobytes = int(_field(MEMINFO, "HugePages_Total", "0")), int(_field(MEMINFO, "Hugepagesize", "0 kB")[:-3])
    size = pages * kilobytes << 10
    found = f"{output.size_text(size)} in huge pages; tiers.dram.huge_pages is {dram.huge_pages}"
    if dram.huge_pages != "no" and size >= dram.capacity:
        return Finding("rdma huge pages", "ok", found)
    advice = "with them a NIC finds addresses quicker: sysctl vm.nr_hugepages before the node starts"
    return Finding("rdma huge pages", "note", found, advice)


def _field(path: Path, name: str, default: str) -> str:
    try:
        lines: Sequence[str] = path.read_text().splitlines()
    except OSError:
        return default
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), default)


# A transfer.


def _loopback(nic: Nic) -> Finding:
    """1 MiB READ from this process by this process, compared; then how long small ones take, and how fast large are."""
    name = f"rdma {nic.name} loop-back"
    deadline = time.monotonic() + DEADLINE_S
    advice = "peers that are tried find the same, and go by TCP: look at dmesg, `rdma link` and its driver"
    loopback: Loopback | None = None
    try:
        loopback = Loopback(nic, LARGE_READS * BYTES, max(SMALL_READS, LARGE_READS))
        loopback.source[:BYTES] = os.urandom(BYTES)
        loopback.read(BYTES, 1, deadline)
        if loopback.target[:BYTES] != loopback.source[:BYTES]:
            return Finding(name, "broken", "a READ brought other bytes than it should", "do not use this port")
        spans = [_span_s(loopback, SMALL_BYTES, 1, deadline) for _ in range(SMALL_READS)]
        rate = LARGE_READS * BYTES / _span_s(loopback, BYTES, LARGE_READS, deadline)
    except TimeoutError:
        return Finding(name, "broken", f"no answer in {DEADLINE_S:g} s", advice)
    except OSError as error:
        return Finding(name, "broken", error.strerror or str(error), advice)
    finally:
        _close(loopback)
    small_us = statistics.median(spans) * 1e6
    return Finding(name, "ok", f"4 KiB in {small_us:,.0f} us; 1 MiB READs at {rate / 1e9:,.2f} GB/s")


def _span_s(loopback: Loopback, size: int, count: int, deadline: float) -> float:
    began = time.perf_counter()
    loopback.read(size, count, deadline)
    return max(time.perf_counter() - began, 1e-9)


def _close(loopback: Loopback | None) -> None:
    if loopback is None:
        return
    try:
        loopback.close()
    except VerbsError:  # the device is gone, which the READ has said
        return
