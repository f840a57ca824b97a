"""What sysfs says of RDMA devices on several kinds of hosts, to be written into a folder and read from there.

A tree is paths with their texts; a text "-> path" is a symbolic link to that path of the tree. SOFT is as a kernel 6.1
with Soft-RoCE has it. The others are put together after how such machines and their drivers lay things out.
"""

import os
from pathlib import Path

Tree = dict[str, str]
LINK = "-> "
INFINIBAND, PCI = "class/infiniband", "bus/pci/devices"


def write(tree: Tree, folder: Path) -> Path:
    """`folder`, with the tree in it."""
    for name, text in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith(LINK):
            path.symlink_to(os.path.relpath(folder / text.removeprefix(LINK), path.parent))
        else:
            path.write_text(text + "\n")
    return folder


def numa(*rows: str) -> Tree:
    return {f"devices/system/node/node{node}/distance": row for node, row in enumerate(rows)}


def port(number: int = 1, *, layer: str = "Ethernet", rate: str = "400 Gb/sec (4X NDR)", state: str = "4: ACTIVE",
         netdev: str = "") -> Tree:  # fmt: skip
    folder = f"ports/{number}"
    tree = {f"{folder}/link_layer": layer, f"{folder}/rate": rate, f"{folder}/state": state}
    if netdev and layer == "Ethernet":
        tree |= {f"{folder}/gid_attrs/ndevs/{at}": netdev for at in range(2)}
        tree |= {f"{folder}/gid_attrs/types/0": "IB/RoCE v1", f"{folder}/gid_attrs/types/1": "RoCE v2"}
    return tree


def pci_nic(name: str, chain: str, numa_node: int, ports: Tree, model: str = "MT4129") -> Tree:
    """`chain` is its folder below devices."""
    device = f"devices/{chain}"
    inside = f"{device}/infiniband/{name}"
    tree = {
        f"{INFINIBAND}/{name}": LINK + inside,
        f"{inside}/device": LINK + device,
        f"{inside}/fw_ver": "28.39.1002",
        f"{inside}/hca_type": model,
        f"{device}/numa_node": str(numa_node),
        f"{device}/driver": LINK + "bus/pci/drivers/mlx5_core",
        "bus/pci/drivers/mlx5_core/module": "",
    }
    return tree | {f"{inside}/{path}": text for path, text in ports.items()}


def pci_gpu(chain: str, numa_node: int) -> Tree:
    device = f"devices/{chain}"
    return {
        f"{PCI}/{Path(chain).name}": LINK + device,
        f"{device}/vendor": "0x10de",
        f"{device}/class": "0x030200",
        f"{device}/numa_node": str(numa_node),
    }


# Two sockets, each with four switches that have a GPU and a NIC, and a NIC for storage.
SWITCHES = (  # NIC, root complex, NUMA node, and the addresses of NIC and GPU
    ("mlx5_0", "15", 0, "18", "1b"),
    ("mlx5_3", "3d", 0, "40", "43"),
    ("mlx5_4", "4c", 0, "4f", "52"),
    ("mlx5_5", "5b", 0, "5e", "61"),
    ("mlx5_6", "97", 1, "9a", "9d"),
    ("mlx5_9", "bd", 1, "c0", "c3"),
    ("mlx5_10", "cb", 1, "ce", "d1"),
    ("mlx5_11", "d9", 1, "dc", "df"),
)
STORAGE = (("mlx5_1", "26", 0, "29"), ("mlx5_7", "a7", 1, "aa"))


def _eight_gpus() -> Tree:
    tree = numa("10 21", "21 10")
    for name, root, node, nic, gpu in SWITCHES:
        bus = int(root, 16)
        switch = f"pci0000:{root}/0000:{root}:01.0/0000:{bus + 1:02x}:00.0/0000:{bus + 2:02x}"
        tree |= pci_nic(name, f"{switch}:00.0/0000:{nic}:00.0", node, port(layer="InfiniBand"))
        tree |= pci_gpu(f"{switch}:02.0/0000:{gpu}:00.0", node)
    for name, root, node, nic in STORAGE:
        ports = port(rate="200 Gb/sec (4X HDR)", netdev=f"ens{nic}np0")
        tree |= pci_nic(name, f"pci0000:{root}/0000:{root}:01.0/0000:{nic}:00.0", node, ports)
    return tree


EIGHT_GPUS = _eight_gpus()
ONE_NIC = {
    **numa("10"),
    **pci_nic("mlx5_0", "pci0000:00/0000:00:1c.0/0000:03:00.0", 0, port(rate="100 Gb/sec (4X EDR)", netdev="eth0")),
}
# NUMA nodes 0 and 1 are of one socket, 2 and 3 of the other.
FOUR_NODES = {
    **numa("10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10"),
    **pci_nic("mlx5_0", "pci0000:20/0000:20:01.1/0000:21:00.0", 0, port()),
    **pci_nic("mlx5_1", "pci0000:80/0000:80:01.1/0000:81:00.0", 2, port()),
    **pci_nic("mlx5_2", "pci0000:a0/0000:a0:01.1/0000:a1:00.0", 3, port()),
}
TWO_PORTS = {
    **numa("10"),
    **pci_nic(
        "mlx4_0",
        "pci0000:00/0000:00:03.0/0000:04:00.0",
        0,
        {
            **port(1, layer="InfiniBand", rate="56 Gb/sec (4X FDR)"),
            **port(2, state="1: DOWN", rate="40 Gb/sec (4X QDR)"),
        },
        model="MT4099",
    ),
    "devices/pci0000:00/0000:00:03.0/0000:04:00.0/net/ib0/dev_port": "0",
    "devices/pci0000:00/0000:00:03.0/0000:04:00.0/net/enp4s0d1/dev_port": "1",
}
SOFT = {
    f"{INFINIBAND}/rxe0": LINK + "devices/virtual/infiniband/rxe0",
    "devices/virtual/infiniband/rxe0/parent": "dum0",
    "devices/virtual/infiniband/rxe0/fw_ver": "",
    "devices/virtual/infiniband/rxe0/node_type": "1: CA",
    "devices/virtual/infiniband/rxe0/node_desc": "rxe",
    "devices/virtual/infiniband/rxe0/ports/1/state": "4: ACTIVE",
    "devices/virtual/infiniband/rxe0/ports/1/phys_state": "5: LinkUp",
    "devices/virtual/infiniband/rxe0/ports/1/link_layer": "Ethernet",
    "devices/virtual/infiniband/rxe0/ports/1/rate": "2.5 Gb/sec (1X SDR)",
    "devices/virtual/infiniband/rxe0/ports/1/gid_attrs/types/0": "RoCE v2",
    "devices/virtual/infiniband/rxe0/ports/1/gid_attrs/types/1": "RoCE v2",
    "devices/virtual/infiniband/rxe0/ports/1/gid_attrs/ndevs/0": "dum0",
    "devices/virtual/infiniband/rxe0/ports/1/gid_attrs/ndevs/1": "dum0",
}
NO_RDMA = numa("10")
ODD = {  # what a driver got wrong, or is not there
    **pci_nic("no_rate", "pci0000:00/0000:00:01.0/0000:01:00.0", -1, {"ports/1/state": "4: ACTIVE"}),
    **pci_nic("strange", "pci0000:00/0000:00:02.0/0000:02:00.0", 0, port(rate="1.2.3 Gb/sec (?)", state="ACTIVE")),
    **pci_nic("nameless", "pci0000:00/0000:00:03.0/0000:03:00.0", 0, {"ports/first/state": "4: ACTIVE"}),
    "devices/pci0000:00/0000:00:02.0/0000:02:00.0/numa_node": "none",
    f"{INFINIBAND}/gone": LINK + "devices/pci0000:00/0000:00:09.0/infiniband/gone",
    "devices/system/node/node0/distance": "near",
}
