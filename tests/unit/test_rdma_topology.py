"""Where NICs are and which address of a port is used, by trees of sysfs of several kinds of hosts."""

import shutil
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.transport.rdma import topology
from kvstore.transport.rdma.topology import (
    OTHER_NODE,
    SAME_NODE,
    SAME_SWITCH,
    UNKNOWN,
    GpuPlace,
    NicPlace,
    PortPlace,
    choose_gid,
    distance,
    gid_text,
    gpu_places,
    has_devices,
    memory_node,
    nic_places,
    node_of_cpus,
    numa_nodes,
    preferred,
    same_fabric,
)
from kvstore.transport.rdma.verbs import Gid, Port
from tests import sysfs_trees
from tests.sysfs_trees import Tree, write

LOCAL = bytes.fromhex("fe800000000000005c6c71fffee0cc87")
MAPPED = bytes(10) + b"\xff\xff\x0a\x63\x00\x01"
GLOBAL = bytes.fromhex("20010db8000000000000000000000001")
ROCE, IB = "ethernet", "infiniband"


def places(tree: Tree, folder: Path) -> dict[str, NicPlace]:
    return nic_places(write(tree, folder))


def names(found: tuple[NicPlace, ...]) -> list[str]:
    return [nic.device for nic in found]


def port_with(*gids: Gid, link_layer: str = ROCE) -> Port:
    return Port(1, is_active=True, mtu_bytes=4096, lid=0, link_layer=link_layer, gids=gids)


# Reading sysfs


def test_a_box_of_eight_gpus_has_a_nic_beside_each(tmp_path):
    nics = places(sysfs_trees.EIGHT_GPUS, tmp_path)
    gpus = {gpu.address: gpu for gpu in gpu_places(tmp_path)}
    assert (len(nics), len(gpus)) == (10, 8)
    for name, root, node, _, bus in sysfs_trees.SWITCHES:
        address, numa_node, pci = gpus[f"0000:{bus}:00.0"]
        assert (numa_node, pci[0], pci[-1]) == (node, f"0000:{root}:01.0", address)
        near, far = preferred(list(nics.values()), numa_node, pci)
        assert names(near) == [name]
        assert [distance(nic, numa_node, pci) for nic in far] == [SAME_NODE] * 4 + [OTHER_NODE] * 5


def test_what_is_no_gpu_is_not_listed(tmp_path):
    write(sysfs_trees.pci_gpu("pci0000:15/0000:15:01.0/0000:1b:00.0", 0), tmp_path)
    others = {"bridge": ("0x10de", "0x060400"), "audio": ("0x10de", "0x040300"), "graphics": ("0x1a03", "0x030000")}
    for name, (vendor, kind) in others.items():
        folder = tmp_path / sysfs_trees.PCI / name
        write({"vendor": vendor, "class": kind}, folder)
    assert gpu_places(tmp_path) == [GpuPlace("0000:1b:00.0", 0, ("0000:15:01.0", "0000:1b:00.0"))]


def test_memory_of_a_node_is_read_by_the_fast_nics_of_its_socket_first(tmp_path):
    nics = list(places(sysfs_trees.EIGHT_GPUS, tmp_path).values())
    near, far = preferred(nics, 1)
    assert names(near) == ["mlx5_10", "mlx5_11", "mlx5_6", "mlx5_9", "mlx5_7"], "the one for storage is slower"
    assert names(far) == ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_1"]
    assert preferred(nics[::-1], 1) == (near, far), "whatever order they come in"


def test_the_nearer_of_two_other_nodes_comes_first(tmp_path):
    nics = list(places(sysfs_trees.FOUR_NODES, tmp_path).values())
    assert numa_nodes(tmp_path) == [0, 1, 2, 3]
    assert [names(part) for part in preferred(nics, 3)] == [["mlx5_2"], ["mlx5_1", "mlx5_0"]]
    assert [names(part) for part in preferred(nics, 1)] == [["mlx5_0"], ["mlx5_1", "mlx5_2"]]


def test_a_single_nic_is_described_whole(tmp_path):
    assert places(sysfs_trees.ONE_NIC, tmp_path) == {
        "mlx5_0": NicPlace(
            "mlx5_0",
            0,
            ("0000:00:1c.0", "0000:03:00.0"),
            (PortPlace(1, "ACTIVE", 100.0, "Ethernet", "eth0"),),
            driver="mlx5_core",
            model="MT4129",
            firmware="28.39.1002",
            node_distances=((0, 10),),
        )
    }


def test_ports_of_one_device_have_interfaces_of_their_own(tmp_path):
    nic = places(sysfs_trees.TWO_PORTS, tmp_path)["mlx4_0"]
    assert nic.ports == (
        PortPlace(1, "ACTIVE", 56.0, "InfiniBand", "ib0"),
        PortPlace(2, "DOWN", 40.0, "Ethernet", "enp4s0d1"),
    )
    assert nic.rate_gbps == 56.0
    assert nic.port(2) == nic.ports[1]
    assert nic.port(3) is None


def test_the_rate_of_a_port_that_is_down_does_not_count(tmp_path):
    tree = sysfs_trees.pci_nic("x", "pci0000:00/0000:01:00.0", 0, sysfs_trees.port(state="1: DOWN"))
    assert places(tree, tmp_path)["x"].rate_gbps == 0.0


def test_a_soft_device_is_nowhere(tmp_path):
    nic = places(sysfs_trees.SOFT, tmp_path)["rxe0"]
    assert (nic.numa_node, nic.pci, nic.driver, nic.node_distances) == (-1, (), "", ())
    assert nic.ports == (PortPlace(1, "ACTIVE", 2.5, "Ethernet", "dum0"),)
    assert distance(nic, 0) == UNKNOWN
    assert preferred([nic], 0) == ((nic,), ())


@pytest.mark.parametrize("tree", [{}, sysfs_trees.NO_RDMA])
def test_a_host_without_rdma_has_none(tmp_path, tree):
    assert places(tree, tmp_path) == {}
    assert not has_devices(tmp_path)
    assert gpu_places(tmp_path) == []
    assert preferred([], 0) == ((), ())


def test_odd_values_are_unknown_and_what_has_no_port_is_left_out(tmp_path):
    nics = places(sysfs_trees.ODD, tmp_path)
    assert nics.keys() == {"no_rate", "strange"}
    assert nics["no_rate"].ports == (PortPlace(1, "ACTIVE", 0.0, "", ""),)
    assert nics["no_rate"].numa_node == nics["strange"].numa_node == -1
    assert nics["strange"].ports[0][1:3] == ("", 0.0)
    assert nics["strange"].node_distances == ()


def test_a_device_may_vanish_between_any_two_looks_at_it(tmp_path, monkeypatch):
    def read(last: int) -> int:
        """How many files of mlx5_6 were read, and before number `last` of them mlx5_6 vanished."""
        root = write(sysfs_trees.EIGHT_GPUS, tmp_path / str(last))
        count = 0
        of_kernel = Path.read_text

        def counted(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
            nonlocal count
            if "mlx5_6" in path.parts:
                count += 1
            if count == last:
                shutil.rmtree(root / "devices/pci0000:97", ignore_errors=True)
            return of_kernel(path, encoding, errors)

        with monkeypatch.context() as patch:
            patch.setattr(topology.Path, "read_text", counted)
            found = nic_places(root)
        assert found.keys() - {"mlx5_6"} == {name for name, *_ in (*sysfs_trees.SWITCHES, *sysfs_trees.STORAGE)} - {
            "mlx5_6"
        }
        assert all(nic.ports[0].rate_gbps for name, nic in found.items() if name != "mlx5_6")
        return count

    files = read(-1)
    assert files > 4
    for last in range(1, files + 1):
        read(last)


# Distances


def nic_at(numa_node: int, *pci: str) -> NicPlace:
    return NicPlace("nic", numa_node, pci, (), "", "", "", ())


@pytest.mark.parametrize(
    ("nic", "gpu", "expected"),
    [
        (
            ("0:15:01.0", "0:16:00.0", "0:17:00.0", "0:18:00.0"),
            ("0:15:01.0", "0:16:00.0", "0:17:02.0", "0:1b:00.0"),
            SAME_SWITCH,
        ),
        (("0:15:01.0", "0:16:00.0"), ("0:15:01.0", "0:1b:00.0"), SAME_NODE),
        (("0:15:01.0", "0:16:00.0"), ("0:15:02.0", "0:1b:00.0"), SAME_NODE),
        (("0:15:00.0",), ("0:15:01.0",), SAME_NODE),
        (("0:15:01.0", "0:16:00.0"), ("1:15:01.0", "1:16:00.0"), UNKNOWN),
        ((), (), UNKNOWN),
        ((), ("0:15:01.0",), UNKNOWN),
    ],
)
def test_without_numa_what_pci_says_counts(nic, gpu, expected):
    assert distance(nic_at(-1, *nic), -1, gpu) == expected


def test_memory_of_the_host_is_near_by_its_numa_node():
    nic = nic_at(1, "0000:15:01.0", "0000:16:00.0")
    assert [distance(nic, node) for node in (1, 0, -1)] == [SAME_NODE, OTHER_NODE, UNKNOWN]


# Memory


NUMA_MAPS = """\
00400000 default file=/usr/bin/python3 mapped=3 mapmax=2 N0=3 kernelpagesize_kB=4
7f0000000000 bind:1 file=/memfd:slab\\040(deleted) dirty=70 N0=6 N1=64 kernelpagesize_kB=2048
7f0008000000 default anon=4 dirty=4 N0=2 N1=2 kernelpagesize_kB=4
7f000c000000 default
7ffd00000000 default stack anon=3 dirty=3 N1=3 kernelpagesize_kB=4
"""


@pytest.mark.parametrize(
    ("address", "node"),
    [
        (0x7F0000000000, 1),
        (0x7F0000123456, 1),
        (0x7F0008000000, 0),  # as many of each: the lower
        (0x7F000C000000, -1),  # not touched yet
        (0x7FFD00000010, 1),
        (0x1000, -1),
    ],
)
def test_memory_is_where_most_pages_of_its_mapping_are(address, node):
    assert memory_node(address, NUMA_MAPS) == node


def test_memory_is_nowhere_by_an_empty_or_a_broken_text():
    assert memory_node(0x1000, "") == memory_node(0x1000, "zzz N0=3\n\n") == -1


# Addresses


def test_of_an_rxe_port_the_ipv4_address_is_taken():
    port = port_with(Gid(0, LOCAL, "roce v2"), Gid(1, MAPPED, "roce v2"))
    assert choose_gid(port).number == 1


@pytest.mark.parametrize(
    ("gids", "expected"),
    [
        ([(LOCAL, "roce v1"), (LOCAL, "roce v2"), (MAPPED, "roce v1"), (MAPPED, "roce v2")], 3),
        ([(MAPPED, "roce v2"), (MAPPED, "roce v1"), (LOCAL, "roce v2")], 0),
        ([(LOCAL, "roce v2"), (GLOBAL, "roce v1"), (GLOBAL, "roce v2")], 2),
        ([(GLOBAL, "roce v2"), (MAPPED, "roce v2")], 1),
        ([(LOCAL, "roce v1"), (LOCAL, "roce v2")], 1),
    ],
)
def test_of_roce_v2_addresses_the_routable_come_first_whatever_their_number(gids, expected):
    assert choose_gid(port_with(*(Gid(at, *gid) for at, gid in enumerate(gids)))).number == expected


def test_without_roce_v2_the_reason_says_what_to_do():
    with pytest.raises(ConfigError, match=r"its kinds: roce v1.*give its network interface an IP address"):
        choose_gid(port_with(Gid(0, LOCAL, "roce v1")))
    with pytest.raises(ConfigError, match="its kinds: none"):
        choose_gid(port_with())


def test_of_infiniband_the_first_is_taken_and_none_means_no_subnet_manager():
    assert choose_gid(port_with(Gid(0, LOCAL, "ib"), Gid(1, GLOBAL, "ib"), link_layer=IB)).number == 0
    with pytest.raises(ConfigError, match="subnet manager"):
        choose_gid(port_with(link_layer=IB))


def test_an_entry_that_somebody_insists_on_is_taken_or_refused():
    port = port_with(Gid(0, LOCAL, "roce v1"), Gid(1, LOCAL, "roce v2"), Gid(3, MAPPED, "roce v2"))
    assert choose_gid(port, 1).number == 1
    for wanted in (0, 2, -1):
        with pytest.raises(ConfigError, match=f"entry {wanted} "):
            choose_gid(port, wanted)


def test_addresses_are_written_as_people_do():
    assert gid_text(MAPPED) == "10.99.0.1"
    assert gid_text(LOCAL) == "fe80:0000:0000:0000:5c6c:71ff:fee0:cc87"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((MAPPED, ROCE), (MAPPED, ROCE), True),
        ((GLOBAL, ROCE), (GLOBAL[:4] + LOCAL[4:], ROCE), True),
        ((LOCAL, ROCE), (LOCAL, ROCE), True),
        ((MAPPED, ROCE), (GLOBAL, ROCE), False),
        ((LOCAL, ROCE), (GLOBAL, ROCE), False),
        ((LOCAL, ROCE), (MAPPED, ROCE), False),
        ((LOCAL, IB), (LOCAL, ROCE), False),
        ((LOCAL, IB), (LOCAL[:8] + GLOBAL[8:], IB), True),
        ((LOCAL, IB), (GLOBAL, IB), False),
    ],
)
def test_a_path_is_tried_where_both_ends_may_be_of_one_network(one, other, expected):
    assert same_fabric(*one, *other) is same_fabric(*other, *one) is expected


def test_cpus_of_one_node_say_where_a_process_is(tmp_path: Path) -> None:
    for node, cpu in ((0, 0), (0, 1), (1, 2)):
        (tmp_path / f"devices/system/node/node{node}/cpu{cpu}").mkdir(parents=True)
    assert node_of_cpus({0, 1}, tmp_path) == 0
    assert node_of_cpus({2}, tmp_path) == 1
    assert node_of_cpus({1, 2}, tmp_path) == -1
    assert node_of_cpus({7}, tmp_path) == -1
