"""What `cairn doctor` says of RDMA, over the software double and trees like sysfs."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.transport.rdma.verbs import STATUSES, Verbs
from server.commands import doctor_rdma
from server.commands.doctor_rdma import look
from server.commands.finding import Finding
from server.config import DramSettings, RdmaSettings
from tests.soft_verbs import SoftFabric, SoftVerbs

GIB = 1 << 30
DRAM = DramSettings(capacity=GIB)
LOOPBACK = "rdma soft0:1 loop-back"


@pytest.fixture
def fabric() -> SoftFabric:
    return SoftFabric()


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, resource.RLIM_INFINITY)


def limit(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (size, size))


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    return tmp_path


def examined(verbs: Verbs, sysfs: Path, devices: str = "auto", dram: DramSettings = DRAM) -> dict[str, Finding]:
    return {finding.name: finding for finding in look(RdmaSettings(devices=devices), dram, verbs, sysfs)}


def is_clean(fabric: SoftFabric) -> bool:
    return not fabric.pairs and not fabric.registered_bytes


def test_a_sound_device_is_found_and_read_from(fabric: SoftFabric, sysfs: Path) -> None:
    found = examined(SoftVerbs(fabric), sysfs)
    assert list(found) == ["rdma", "rdma memory", "rdma huge pages", "rdma soft0:1", LOOPBACK]
    assert (found["rdma"].state, found["rdma"].found) == ("ok", "soft: soft0:1")
    assert found["rdma soft0:1"].state == "ok"
    assert "RoCE v2 10.0.1.0, GID 1; MTU 4096" in found["rdma soft0:1"].found
    assert found[LOOPBACK].state == "ok"
    assert "4 KiB in" in found[LOOPBACK].found
    assert "GB/s" in found[LOOPBACK].found
    assert fabric.counts["read_bytes"] >= 1 << 20
    assert is_clean(fabric)


def test_each_active_port_is_read_from_and_another_is_named(fabric: SoftFabric, sysfs: Path) -> None:
    verbs = SoftVerbs(fabric, ["soft0", "soft1", "soft2"])
    verbs.inactive.add("soft1")
    found = examined(verbs, sysfs)
    assert (found["rdma soft1:1"].state, found["rdma soft1:1"].found) == ("note", "its port is not active")
    assert [name for name in found if "loop-back" in name] == [LOOPBACK, "rdma soft2:1 loop-back"]


def test_without_a_device_tcp_is_used_and_nothing_is_broken(fabric: SoftFabric, sysfs: Path) -> None:
    found = examined(SoftVerbs(fabric, []), sysfs)
    assert list(found) == ["rdma"]
    assert found["rdma"].state == "note"
    assert "no RDMA device" in found["rdma"].found
    assert "TCP is used" in found["rdma"].advice


def test_a_device_that_is_asked_for_and_missing_is_broken(fabric: SoftFabric, sysfs: Path) -> None:
    found = examined(SoftVerbs(fabric), sysfs, devices="mlx5_7")
    assert found["rdma"].state == "broken"
    assert "mlx5_7" in found["rdma"].found


def test_rdma_that_is_off_is_not_looked_at(fabric: SoftFabric, sysfs: Path) -> None:
    verbs = SoftVerbs(fabric)
    verbs.vanish()
    found = examined(verbs, sysfs, devices="off")
    assert [finding.state for finding in found.values()] == ["note"]


@pytest.mark.parametrize(("devices", "state"), [("auto", "note"), ("mlx5_0", "broken")])
def test_a_binding_that_is_missing_is_told_how_to_be_had(
    monkeypatch: pytest.MonkeyPatch, sysfs: Path, devices: str, state: str
) -> None:
    def missing() -> Verbs:
        raise ConfigError("no RDMA binding: install python3-pyverbs")

    monkeypatch.setattr(doctor_rdma, "load_verbs", missing)
    (found,) = look(RdmaSettings(devices=devices), DRAM, None, sysfs)
    assert found.state == state
    assert "python3-pyverbs" in found.found


def wrong_bytes(fabric: SoftFabric, verbs: SoftVerbs) -> None:
    fabric.flipped_reads.add(1)


def refused(fabric: SoftFabric, verbs: SoftVerbs) -> None:
    fabric.failing.append(STATUSES.index("REM_ACCESS_ERR"))


def silence(fabric: SoftFabric, verbs: SoftVerbs) -> None:
    fabric.pause()


def no_memory(fabric: SoftFabric, verbs: SoftVerbs) -> None:
    fabric.refused_registrations = 1


def no_post(fabric: SoftFabric, verbs: SoftVerbs) -> None:
    fabric.refused_posts = 1


def unplugged(fabric: SoftFabric, verbs: SoftVerbs) -> None:
    fabric.before_reads[1] = verbs.vanish


FAULTS = {
    "other bytes than it should": wrong_bytes,
    "REM_ACCESS_ERR": refused,
    "no answer in 0.05 s": silence,
    "cannot register": no_memory,
    "were posted": no_post,
    "gone": unplugged,
}


@pytest.mark.parametrize(("reason", "fault"), FAULTS.items(), ids=[fault.__name__ for fault in FAULTS.values()])
def test_a_port_that_does_not_read_is_broken_and_left_clean(
    monkeypatch: pytest.MonkeyPatch,
    fabric: SoftFabric,
    sysfs: Path,
    reason: str,
    fault: Callable[[SoftFabric, SoftVerbs], None],
) -> None:
    monkeypatch.setattr(doctor_rdma, "DEADLINE_S", 0.05)
    verbs = SoftVerbs(fabric)
    fault(fabric, verbs)
    found = examined(verbs, sysfs)[LOOPBACK]
    assert found.state == "broken"
    assert reason in found.found
    assert found.advice
    assert is_clean(fabric)


def test_a_device_that_is_gone_before_it_is_opened_is_a_reason(fabric: SoftFabric, sysfs: Path) -> None:
    verbs = SoftVerbs(fabric)
    verbs.vanish()
    found = examined(verbs, sysfs)
    assert "gone" in found["rdma"].found


def test_small_packets_are_a_note_that_names_the_interface(fabric: SoftFabric, sysfs: Path) -> None:
    port = sysfs / "class/infiniband/soft0/ports/1"
    (port / "gid_attrs/ndevs").mkdir(parents=True)
    (port / "gid_attrs/ndevs/0").write_text("eth7\n")
    found = examined(SoftVerbs(fabric, mtu_bytes=1024), sysfs)["rdma soft0:1"]
    assert found.state == "note"
    assert "MTU 1024" in found.found
    assert "ip link set eth7 mtu 4200" in found.advice


def test_speed_and_place_are_said_where_sysfs_has_them(fabric: SoftFabric, sysfs: Path) -> None:
    device = sysfs / "devices/pci0000:17/0000:17:01.0/0000:18:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("0\n")
    port = sysfs / "class/infiniband/soft0/ports/1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    (sysfs / "class/infiniband/soft0/device").symlink_to(device)
    for node in (0, 1):
        (sysfs / f"devices/system/node/node{node}").mkdir(parents=True)
    found = examined(SoftVerbs(fabric), sysfs)["rdma soft0:1"].found
    assert found.endswith("; 400 Gb/s; PCIe 0000:18:00.0; NUMA node 0, far from memory of 1")


@pytest.mark.parametrize(
    ("locked", "capabilities", "state"), [(2 * GIB, "0", "ok"), (GIB, "0", "broken"), (GIB, "4000", "ok")]
)
def test_the_tier_is_locked_once_for_each_port(
    monkeypatch: pytest.MonkeyPatch,
    fabric: SoftFabric,
    tmp_path: Path,
    locked: int,
    capabilities: str,
    state: str,
) -> None:
    limit(monkeypatch, locked)
    status = tmp_path / "status"
    status.write_text(f"Name:\tcairn\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(doctor_rdma, "STATUS", status)
    found = examined(SoftVerbs(fabric, ["soft0", "soft1"]), tmp_path)["rdma memory"]
    assert found.state == state
    assert "2.0 GiB with all slabs on 2 ports" in found.found


@pytest.mark.parametrize(("wanted", "pages", "state"), [("try", 512, "ok"), ("no", 512, "note"), ("try", 8, "note")])
def test_huge_pages_that_do_not_do_are_a_note(
    monkeypatch: pytest.MonkeyPatch, fabric: SoftFabric, tmp_path: Path, wanted: str, pages: int, state: str
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"HugePages_Total:     {pages}\nHugepagesize:       2048 kB\n")
    monkeypatch.setattr(doctor_rdma, "MEMINFO", meminfo)
    dram = DramSettings(capacity=GIB, huge_pages=wanted)
    assert examined(SoftVerbs(fabric), tmp_path, dram=dram)["rdma huge pages"].state == state
