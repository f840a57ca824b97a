"""`cairn doctor`: is this machine, and the node on it, as the settings need it; why not, and what to do."""

import asyncio
import ctypes
import errno
import importlib.util
import mmap
import os
import platform
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from fcntl import F_GETLK, F_UNLCK, F_WRLCK, fcntl
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvstore.errors import ConfigError, ConnectFailed, StoreError
from server.commands import doctor_rdma, output
from server.commands.config import ConfigFile
from server.commands.finding import Finding, State
from server.commands.reach import FAILED, invocation, node
from server.config import Config, NvmeSettings, ObjectSettings, load

if TYPE_CHECKING:
    from kvstore.tiers.bucket import Bucket

LEAST_PYTHON = (3, 11)
HUGE_PAGE_BYTES = 2 << 20
DESCRIPTORS_SPARE = 64
BUCKET_S = 10.0  # for one page of a listing
FLOCK = "hhqqi"  # struct flock of 64-bit Linux
TIMEX_BYTES = 256  # at least struct timex
CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR
NETWORKED = {"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "fuse", "tmpfs", "overlay"}


def doctor(context: typer.Context, *, config: ConfigFile = None) -> None:
    """Look at this machine and its node, and say what is wrong, why, and what to do.

    Takes the settings that the node is started with. Fails (1) if something
    is broken. It writes one page beside the NVMe tier and removes it again,
    asks a bucket for one page of names, and READs 1 MiB on each RDMA port.

    \b
    Examples:
      cairn doctor
      cairn doctor --config node.toml
      cairn doctor --tiers.nvme.path /mnt/kv --json
    """
    settings = load(config, os.environ, context.args)
    disk = _disk(settings.tiers.nvme, settings.tiers.hbm.device)
    findings = [*_machine(settings), *disk, *_object(settings.tiers.object)]
    findings += [*_devices(settings.tiers.hbm.device), *doctor_rdma.look(settings.rdma, settings.tiers.dram)]
    findings += [_clock(settings), *_node(context, settings)]
    is_well = all(finding.state != "broken" for finding in findings)
    if invocation(context).json:
        output.emit({"ok": is_well, "checks": [finding._asdict() for finding in findings]})
    else:
        _print(findings)
    if not is_well:
        raise typer.Exit(FAILED)


def _print(findings: list[Finding]) -> None:
    shown = output.table("", "what", "#found", "#what to do")
    for name, state, found, advice in findings:
        mark = output.alarm(state) if state == "broken" else output.dim(state) if state == "note" else state
        shown.add_row(mark, name, found, advice)
    broken = sum(finding.state == "broken" for finding in findings)
    output.say(shown, "", f"{output.count_text(broken, 'thing')} broken" if broken else "nothing is broken")


# The machine.


def _machine(settings: Config) -> Iterator[Finding]:
    version = platform.python_version()
    is_new = sys.version_info >= LEAST_PYTHON
    yield Finding("python", "ok" if is_new else "broken", version, "" if is_new else "install Python 3.11 or newer")
    yield _memory(settings.tiers.dram.capacity)
    yield _locked_memory(settings)
    yield _huge_pages(settings)
    yield _descriptors(settings)


def _memory(capacity: int) -> Finding:
    total, available = _meminfo("MemTotal"), _meminfo("MemAvailable")
    found = f"{output.size_text(available)} of {output.size_text(total)} available"
    found += f"; tiers.dram.capacity is {output.size_text(capacity)}"
    if capacity > total:
        return Finding("memory", "broken", found, "lower tiers.dram.capacity")
    if capacity > available:
        return Finding("memory", "note", found, "enough if the node has its memory already; else lower the capacity")
    return Finding("memory", "ok", found)


def _locked_memory(settings: Config) -> Finding:
    dram = settings.tiers.dram
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if dram.mlock == "no" or limit == resource.RLIM_INFINITY or limit >= dram.capacity or os.geteuid() == 0:
        return Finding("locked memory", "ok", f"tiers.dram.mlock is {dram.mlock}")
    found = f"the limit is {output.size_text(limit)}; tiers.dram.mlock is {dram.mlock}"
    state: State = "broken" if dram.mlock == "require" else "note"
    return Finding("locked memory", state, found, "LimitMEMLOCK=infinity for its service, or `ulimit -l unlimited`")


def _huge_pages(settings: Config) -> Finding:
    dram = settings.tiers.dram
    free_bytes, pages = _meminfo("HugePages_Free", 1) * HUGE_PAGE_BYTES, _meminfo("HugePages_Total", 1)
    found = f"{pages:,} of 2 MiB, {output.size_text(free_bytes)} free; tiers.dram.huge_pages is {dram.huge_pages}"
    if dram.huge_pages == "no" or free_bytes >= dram.capacity:
        return Finding("huge pages", "ok", found)
    advice = f"sysctl vm.nr_hugepages={-(-dram.capacity // HUGE_PAGE_BYTES)}, before the node starts"
    return Finding("huge pages", "broken" if dram.huge_pages == "require" else "note", found, advice)


def _descriptors(settings: Config) -> Finding:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    dram, nvme = settings.tiers.dram, settings.tiers.nvme
    files = nvme.capacity // nvme.slab if nvme.path else 0
    wanted = max(
        2 * (dram.capacity // dram.slab) + files + 4 * settings.limits.connections + DESCRIPTORS_SPARE,
        2 * files,  # the tier takes half of all descriptors at most
    )
    found = f"{limit:,} allowed; about {wanted:,} with all slabs and limits.connections"
    if limit >= wanted:
        return Finding("descriptors", "ok", found)
    return Finding("descriptors", "broken", found, f"LimitNOFILE={wanted} for its service, or larger slabs")


def _meminfo(name: str, unit: int = 1024) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        label, _, value = line.partition(":")
        if label == name:
            return int(value.split()[0]) * unit
    return 0


# The NVMe tier.


def _disk(nvme: NvmeSettings, device: str) -> Iterator[Finding]:
    """`device` is tiers.hbm.device."""
    from kvstore.records import LEDGER  # with RocksDB, which no other command needs
    from kvstore.tiers.block_file import probe, probe_for

    way = probe_for(device) if nvme.io == "auto" else probe()
    forced = nvme.io == "kvikio" and way.path_name == "posix"
    advice = "set tiers.nvme.io to auto, or install what is missing" if forced else ""
    used = "posix, as tiers.nvme.io says" if nvme.io == "posix" else f"{way.path_name}: {way.reason}"
    yield Finding("block files", "broken" if forced else "ok", used, advice)
    if not nvme.path:
        yield Finding("nvme tier", "note", "off: tiers.nvme.path is empty", "give it a folder on a local NVMe disk")
        return
    folder = Path(nvme.path)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        yield _direct_io(there)
        yield _space(folder, there, nvme)
        yield _filesystem(there)
        yield _ledger_lock(folder / LEDGER / "LOCK")
    except OSError as error:
        yield Finding(
            "nvme tier",
            "broken",
            f"{there}: {error.strerror}",
            "run this as the node's user, who must be able to write there",
        )


def _direct_io(folder: Path) -> Finding:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    with tempfile.TemporaryDirectory(prefix="cairn-doctor-", dir=folder) as inside:
        try:
            fd = os.open(Path(inside) / "page", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            try:
                os.pwritev(fd, [page], 0)
                os.preadv(fd, [page], 0)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            advice = "use ext4 or xfs on a local disk: all that is read fills the page cache as well"
            return Finding("O_DIRECT", "note", f"{folder}: not on this filesystem", advice)
    return Finding("O_DIRECT", "ok", f"{folder}: works")


def _space(folder: Path, there: Path, nvme: NvmeSettings) -> Finding:
    stat = os.statvfs(there)
    taken = sum(path.stat().st_blocks * 512 for path in (folder / "slabs").glob("*.slab"))
    free = stat.f_bavail * stat.f_frsize
    found = f"{output.size_text(free)} free and {output.size_text(taken)} in slabs"
    found += f"; tiers.nvme.capacity is {output.size_text(nvme.capacity)}"
    if free + taken >= nvme.capacity:
        return Finding("disk space", "ok", found)
    return Finding("disk space", "broken", found, "lower tiers.nvme.capacity: the tier stays smaller than that anyway")


def _filesystem(folder: Path) -> Finding:
    """Whether what the node gives back reaches the disk: an SSD that is never told slows down when it is full."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    kind, options = next((found for found in _mounts() if found[0] == device), (device, "unknown", ""))[1:]
    discards = Path(f"/sys/dev/block/{device}/queue/discard_max_bytes")
    if not discards.exists():
        discards = Path(f"/sys/dev/block/{device}/../queue/discard_max_bytes")
    if kind in NETWORKED:
        return Finding("trim", "note", f"{kind} is no filesystem of a local disk", "use ext4 or xfs on a local disk")
    if not discards.exists() or discards.read_text().strip() == "0":
        return Finding("trim", "note", f"{kind}: its device takes no TRIM", "nothing to do; a disk behind it may slow")
    if "discard" in options.split(","):
        return Finding("trim", "ok", f"{kind}, mounted with discard")
    advice = "systemctl enable --now fstrim.timer, or mount with discard"
    return Finding("trim", "note", f"{kind}, mounted without discard", advice)


def _mounts() -> Iterator[tuple[str, str, str]]:
    """(Device number, filesystem, options) of each mount."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        fields = mount.split(" ")
        yield fields[2], kind, f"{fields[5]},{options}"


def _ledger_lock(path: Path) -> Finding:
    """Asks who has it, and does not take it: a node that starts just now must find it free."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return Finding("ledger", "ok", f"none at {path.parent} yet")
    try:
        asked = fcntl(fd, F_GETLK, struct.pack(FLOCK, F_WRLCK, 0, 0, 0, 0))
    finally:
        os.close(fd)
    kind, _, _, _, pid = struct.unpack(FLOCK, asked)
    if kind == F_UNLCK:
        return Finding("ledger", "ok", f"{path.parent}: nobody has it")
    return Finding("ledger", "ok", f"{path.parent}: process {pid} has it", "only one node may have this folder")


# The object tier.


def _object(settings: ObjectSettings) -> Iterator[Finding]:
    if not settings.url:
        yield Finding("object tier", "note", "off: tiers.object.url is empty", "give it a bucket to share with nodes")
        return
    folder = Path(settings.url.removeprefix("file://"))
    if settings.url.startswith("file:") and not folder.exists():
        yield Finding("object tier", "note", f"{folder} is not there", "the node makes it when it starts")
        return
    from kvstore.compression import check_codec
    from kvstore.tiers.object_store import open_bucket  # as above: obstore

    pairs = [pair.partition("=") for pair in settings.options.split(",") if pair]
    try:
        check_codec(settings.codec)
        bucket = open_bucket(settings.url, {name: value for name, _, value in pairs})
        began = time.monotonic()
        names = asyncio.run(_first_page(bucket))
    except ConfigError as error:
        yield Finding("object tier", "broken", str(error), "see tiers.object in docs/configuration.md")
    except OSError as error:
        found = f"{settings.url}: {str(error) or f'no answer in {BUCKET_S:.0f} s'}"
        yield Finding("object tier", "broken", found, "check the address, the network, and the rights of its keys")
    else:
        passed_ms = (time.monotonic() - began) * 1000
        found = f"{settings.url}: {output.count_text(names, 'object')} on the first page, in {passed_ms:.0f} ms"
        yield Finding("object tier", "ok", found)


async def _first_page(bucket: "Bucket") -> int:
    async with asyncio.timeout(BUCKET_S), aclosing(bucket.listing("v1/", "")) as pages:
        async for page in pages:
            return len(page)
    return 0


# What else the machine has.


def _devices(device: str) -> Iterator[Finding]:
    """`device` is tiers.hbm.device."""
    try:
        ctypes.CDLL("libcuda.so.1")
        yield Finding("cuda driver", "ok", "libcuda.so.1 is there")
    except OSError:
        state: State = "broken" if device.startswith("cuda") else "note"
        yield Finding("cuda driver", state, "libcuda.so.1 is not there", "only needed for GPUs: install the driver")
    for package, extra, purpose in (
        ("kvikio", "gds", "GPUDirect Storage"),
        ("torch", "engine", "blocks in GPU memory"),
    ):
        is_there = importlib.util.find_spec(package) is not None
        advice = "" if is_there else f"only needed for {purpose}: pip install 'cairn-kv[{extra}]'"
        state = "ok" if is_there else "broken" if package == "torch" and device else "note"
        yield Finding(package, state, "installed" if is_there else "not installed", advice)


def _clock(settings: Config) -> Finding:
    """Nodes of one bucket find each other's packs by the time of day; epochs grow even if it was set back."""
    epoch = Path(settings.node.run_dir) / f"{settings.node.name}.epoch"
    try:
        ahead_s = int(epoch.read_text()) / 1000 - time.time()
    except (OSError, ValueError):
        ahead_s = 0.0
    if ahead_s > 1:
        return Finding("clock", "broken", f"set back by {ahead_s:,.0f} s since a start of the node", "set the clock")
    libc = ctypes.CDLL(None)
    if libc.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES)) == CLOCK_UNSYNCHRONISED:
        return Finding(
            "clock", "note", "not synchronised", "run chrony or systemd-timesyncd where nodes share a bucket"
        )
    return Finding("clock", "ok", "synchronised")


# The node.


def _node(context: typer.Context, settings: Config) -> Iterator[Finding]:
    options = invocation(context)
    is_named = bool(options.address)
    if not options.address and not options.run_dir:
        own = settings.node
        context.obj = replace(options, address=f"unix://{own.unix_socket}", run_dir=own.run_dir)
    try:
        with node(context) as client:
            welcome = client.connect()
            rows = client.stat()["tiers"]
    except ConnectFailed as error:
        advice = "start it, or give --address or --run-dir" if is_named else "nothing to do if none runs here"
        yield Finding("node", "broken" if is_named else "note", str(error), advice)
        return
    except StoreError as error:
        yield Finding("node", "broken", f"{error.code}: {error}", "see docs/errors.md")
        return
    yield Finding("node", "ok", f"{welcome.node}, epoch {welcome.epoch}, as tenant {welcome.tenant}")
    for row in rows:
        name = f"tier {row['tier']}"
        notes = list(row["medium"].get("reasons", []))
        if row.get("is_recovering"):
            notes.append("what an earlier start left is being taken up")
        if row.get("target_bytes", row["capacity_bytes"]) != row["capacity_bytes"]:
            notes.append(f"on its way to {output.size_text(row['target_bytes'])}")
        if row.get("health"):
            yield Finding(name, "broken", row["health"], "it is tried again by itself; look at the disk or bucket")
        else:
            yield Finding(name, "note" if notes else "ok", "; ".join(notes) or "well")
