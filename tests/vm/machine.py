"""A machine with real RDMA verbs where there is none: a Debian kernel with Soft-RoCE in QEMU, over these very files.

    python tests/vm/machine.py build             fetch the kernel, make the initrd
    python tests/vm/machine.py run -- COMMAND    boot, run it as root in this folder, end with its status

The guest sees this machine's files, read-only under a tmpfs, and has rxe0 and rxe1. What the command writes to $OUT
comes back. Status: the command's; 250 the guest died, 251 it took too long, 252 no qemu or kernel, 253 no rxe device.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

DIED, LATE, ABSENT = 250, 251, 252
MODULES = (
    *("virtio_pci", "virtio_rng", "9pnet_virtio", "9p", "overlay", "crc32_generic", "crc32c_generic"),
    *("ib_uverbs", "rdma_ucm", "rdma_rxe", "dummy", "sch_netem"),
)
KERNEL = "linux-image-amd64"
PACKAGES = "qemu-system-x86 busybox-static ibverbs-providers libibverbs1 iproute2 python3-pyverbs"
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
NEEDED = ("drivers/infiniband", "drivers/virtio", "drivers/net", "drivers/char/hw_random", "fs", "net", "lib", "crypto")

INIT = r"""#!/bin/busybox sh
# The guest's first process: modules, then this machine's root, read-only, under a tmpfs.
B=/bin/busybox
$B mkdir -p /proc /sys /dev /lower /rw /new
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
die() { echo "init: $*" >/dev/console; $B sync; $B poweroff -f; }
for m in $($B cat /modules); do $B insmod /mod/$m.ko || echo "init: insmod $m failed" >/dev/console; done
$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro host /lower || die "no root"
$B mount -t tmpfs -o size=70% rw /rw; $B mkdir -p /rw/up /rw/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/rw/up,workdir=/rw/work overlay /new || die "no overlay"
for d in proc sys dev; do $B mount --move /$d /new/$d; done
$B mkdir -p /new/run/machine /new/dev/shm /new/dev/pts
$B mount -t tmpfs -o size=70% shm /new/dev/shm; $B mount -t devpts pts /new/dev/pts
$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 job /new/run/machine || die "no job share"
$B ln -sf /proc/self/fd /new/dev/fd
exec $B switch_root /new /bin/bash /run/machine/guest.sh
"""

GUEST = r"""# The guest's second stage: devices, then the command. The host ends the machine as soon as it sees `rc`.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
T=/run/machine
fin() { sync; echo "$1" >$T/rc.new; mv $T/rc.new $T/rc; sleep 9; busybox poweroff -f; }
ip link set lo up
for n in 0 1; do
    ip link add dum$n type dummy && ip addr add 10.99.$n.1/24 dev dum$n && ip link set dum$n mtu 4200 up
    rdma link add rxe$n type rxe netdev dum$n || fin 253
done
mkdir -p /dev/infiniband
ulimit -l unlimited; ulimit -n 65536
stty -F /dev/ttyS0 raw -echo 2>/dev/null
setsid -w /bin/bash $T/command.sh </dev/null >/dev/ttyS0 2>&1
fin $?
"""


class Archive:
    """A cpio archive in the newc format."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        terminated = name.encode() + b"\0"
        fields = [len(self._parts) + 300, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(terminated), 0]
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + terminated
        self._parts.append(header + bytes(-len(header) % 4) + content + bytes(-len(content) % 4))

    def bytes(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return b"".join(self._parts)


class Outcome(NamedTuple):
    """`output` is what the command wrote; `console` what the kernel said."""

    status: int
    output: str
    console: str
    seconds: float


def cache() -> Path:
    """Where kernels are kept: CAIRN_VM_CACHE, else in the user's cache folder."""
    user = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/root"), ".cache")
    return Path(os.environ.get("CAIRN_VM_CACHE") or Path(user, "cairn", "vm"))


def missing() -> str:
    """What this machine lacks, as a sentence; "" when it can boot a guest."""
    if not shutil.which("qemu-system-x86_64"):
        return f"there is no qemu: apt-get install {PACKAGES}"
    if not shutil.which("busybox") or not shutil.which("apt-get"):
        return "there is no busybox or apt-get"
    return ""


def build() -> Path:
    """The folder with vmlinuz and initrd of the distribution's newest kernel. Raises CalledProcessError, OSError."""
    depends = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise FileNotFoundError(f"apt knows no kernel {KERNEL}: apt-get update")
    folder = cache() / found[1]
    if not (folder / "initrd").exists():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as temporary:
            made = Path(temporary)
            os.chmod(made, 0o755)
            subprocess.run(["apt-get", "-qq", "download", found[1]], cwd=made, check=True, stdout=subprocess.DEVNULL)
            (package,) = made.glob("*.deb")
            _unpack(package, made / "root")
            ready = made / "ready"
            ready.mkdir()
            (ready / "initrd").write_bytes(_initrd(made / "root"))
            shutil.copy(next((made / "root/boot").glob("vmlinuz-*")), ready / "vmlinuz")
            ready.rename(folder)
    return folder


def _unpack(package: Path, root: Path) -> None:
    root.mkdir()
    wanted = ["./boot/vmlinuz-*", *(f"./lib/modules/*/kernel/{part}/*" for part in NEEDED)]
    wanted.append("./lib/modules/*/kernel/arch/x86/crypto/*")
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as tar:
        subprocess.run(["tar", "-x", "-C", str(root), "--wildcards", *wanted], stdin=tar.stdout, check=True)


def _initrd(root: Path) -> bytes:
    files = {path.stem.replace("-", "_"): path for path in root.rglob("*.ko")}
    order: list[str] = []

    def need(name: str) -> None:
        if name in order or name not in files:
            return
        depends = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
        for other in depends[1].decode().replace("-", "_").split(",") if depends else ():
            need(other)
        order.append(name)

    for module in MODULES:
        need(module)
    busybox = shutil.which("busybox")
    assert busybox is not None
    archive = Archive()
    for folder in ("bin", "mod", "dev"):
        archive.add(folder, 0o040755)
    archive.add("dev/console", 0o020600, device=(5, 1))
    archive.add("bin/busybox", 0o100755, Path(busybox).read_bytes())
    for module in order:
        archive.add(f"mod/{module}.ko", 0o100644, files[module].read_bytes())
    archive.add("modules", 0o100644, "\n".join(order).encode() + b"\n")
    archive.add("init", 0o100755, INIT.encode())
    return archive.bytes()


def run(command: list[str], out: Path, timeout_s: float, *, show: bool = False) -> Outcome:
    """Boot, run it in this folder with $OUT, and bring what it wrote there to `out`. `show`: its output as it comes."""
    kernel = build()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        job = Path(temporary)
        _write_job(job, command)
        with open(job / "output", "wb") as output:
            guest = subprocess.Popen(
                _qemu(kernel, job),
                stdin=subprocess.DEVNULL,
                stdout=None if show else output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = _wait(guest, job / "rc", started + timeout_s)
            finally:
                guest.kill()  # does nothing to one that has ended by itself
                guest.wait()
        shutil.copytree(job / "out", out, dirs_exist_ok=True)
        output_text, console = _text(job / "output"), _text(job / "console")
    return Outcome(status, output_text, console, time.monotonic() - started)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def pyverbs_fits() -> bool:
    """Whether the distribution's pyverbs is here and of this Python."""
    return any(PYVERBS.glob(f"device.cpython-{sys.version_info.major}{sys.version_info.minor}-*.so"))


def _write_job(job: Path, command: list[str]) -> None:
    """Pyverbs is on the path where it is of this Python: the distribution's other packages are not."""
    (job / "out").mkdir()
    (job / "site").mkdir()
    if pyverbs_fits():
        (job / "site/pyverbs").symlink_to(PYVERBS)
    settings = {
        "PATH": os.environ["PATH"],
        "CAIRN_VM": "1",
        "OUT": "/run/machine/out",
        "PYTHONPATH": "/run/machine/site",
    }
    settings["PYTHONDONTWRITEBYTECODE"] = "1"
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    lines = [f"export {exports}", f"cd {shlex.quote(os.getcwd())}", f"exec {shlex.join(command)}"]
    (job / "command.sh").write_text("\n".join(lines) + "\n")
    (job / "guest.sh").write_text(GUEST)


def _qemu(kernel: Path, job: Path) -> list[str]:
    """Emulated, but where the machine has real virtualization: /dev/kvm alone may be one that boots no stock kernel."""
    flags = Path("/proc/cpuinfo").read_text()
    is_real = re.search(r"\b(vmx|svm)\b", flags) and os.access("/dev/kvm", os.W_OK)
    accelerator = ["-accel", "kvm", "-cpu", "host"] if is_real else ["-accel", "tcg,thread=multi", "-cpu", "max"]
    quiet = "console=ttyS1 panic=-1 quiet loglevel=4 mitigations=off nokaslr tsc=reliable no_timer_check"
    share = "local,security_model=none"
    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", *accelerator),
        *("-machine", "q35", "-smp", "2", "-m", "3072", "-append", quiet),
        *("-kernel", str(kernel / "vmlinuz"), "-initrd", str(kernel / "initrd")),
        *("-fsdev", f"{share},id=host,path=/,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
        *("-fsdev", f"{share},id=job,path={job}", "-device", "virtio-9p-pci,fsdev=job,mount_tag=job"),
        *("-device", "virtio-rng-pci", "-serial", "stdio", "-serial", f"file:{job}/console"),
    ]


def _wait(guest: "subprocess.Popen[bytes]", status: Path, deadline: float) -> int:
    while guest.poll() is None and not status.exists():
        if time.monotonic() > deadline:
            return LATE
        try:
            guest.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
    try:
        guest.wait(timeout=0.3)  # what the serial line still holds
    except subprocess.TimeoutExpired:
        pass
    return int(status.read_text()) if status.exists() else DIED


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("build", "run"))
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir(), "cairn-vm-out"))
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, command = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if lack := missing():
        print(lack, file=sys.stderr)
        return ABSENT
    if given.verb == "build":
        print(build())
        return 0
    outcome = run(command, given.out, given.timeout, show=True)
    if outcome.status >= DIED:
        print(outcome.console[-4000:], file=sys.stderr)
    print(f"status {outcome.status} after {outcome.seconds:.1f} s", file=sys.stderr)
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
