"""Network namespaces for processes of one test: a switch, a host for each name, links that can be cut and slowed."""

import atexit
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NAMESPACES = Path("/run/netns")
PREFIX = "cairn"
SUBNET = "10.86.0"
FIRST_HOST = 10
MOST_HOSTS = 200
BURST = "64kb"  # the largest packet that a virtual link hands on at once
QUEUE_MS = 200
CLONE_NEWNET = 0x40000000
RULES = "table inet cuts { chain input { type filter hook input priority 0; policy accept; }; }"

libc = ctypes.CDLL(None, use_errno=True)
numbers = itertools.count()


class Net:
    """Hosts with an address each, on a switch that is in a namespace of its own: the machine's network is not touched.

    Names of namespaces begin with this process's id; `sweep` removes what processes that died have left.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        assert len(hosts) <= MOST_HOSTS
        sweep()
        self._run = f"{PREFIX}{os.getpid()}-{next(numbers)}"
        self.addresses = {host: f"{SUBNET}.{FIRST_HOST + number}" for number, host in enumerate(hosts)}
        atexit.register(self.stop)
        try:
            self._build()
        except BaseException:
            self.stop()
            raise

    def _build(self) -> None:
        ip("netns", "add", self._namespace("switch"))
        self._in("switch", "ip", "link", "add", "br0", "type", "bridge")
        self._in("switch", "ip", "link", "set", "br0", "up")
        for number, (host, address) in enumerate(self.addresses.items()):
            namespace, port = self._namespace(host), f"port{number}"
            ip("netns", "add", namespace)
            self._in("switch", "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            self._in("switch", "ip", "link", "set", port, "master", "br0", "up")
            self._in(host, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            self._in(host, "ip", "link", "set", "eth0", "up")
            self._in(host, "ip", "link", "set", "lo", "up")
            self._in(host, "nft", RULES)

    def stop(self) -> None:
        """Remove everything, with whatever still runs there. Idempotent."""
        for namespace in sorted(NAMESPACES.glob(f"{self._run}-*")):
            remove(namespace.name)
        atexit.unregister(self.stop)

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread is on `host`: sockets that it opens, processes that it starts."""
        with (
            Path(f"/proc/self/task/{thread_id()}/ns/net").open() as home,
            (NAMESPACES / self._namespace(host)).open() as there,
        ):
            enter(there.fileno())
            try:
                yield
            finally:
                enter(home.fileno())

    def cut(self, source: str, target: str) -> None:
        """What `source` sends does not reach `target` any more; the other way it does."""
        self._in(target, "nft", f"add rule inet cuts input ip saddr {self.addresses[source]} drop")

    def part(self, some: Sequence[str], others: Sequence[str]) -> None:
        """Neither side reaches the other."""
        for one in some:
            for other in others:
                self.cut(one, other)
                self.cut(other, one)

    def heal(self) -> None:
        """Nothing is cut any more."""
        for host in self.addresses:
            self._in(host, "nft", "flush chain inet cuts input")

    def rate(self, host: str, mbit: float) -> None:
        """What `host` sends and what it receives goes at this rate, each way; 0: as fast as it can."""
        port = f"port{list(self.addresses).index(host)}"
        for namespace, device in ((host, "eth0"), ("switch", port)):
            if mbit:
                limit = ("rate", f"{mbit}mbit", "burst", BURST, "latency", f"{QUEUE_MS}ms")
                self._in(namespace, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit)
            elif "tbf" in self._in(namespace, "tc", "qdisc", "show", "dev", device):
                self._in(namespace, "tc", "qdisc", "delete", "dev", device, "root")

    def _namespace(self, host: str) -> str:
        return f"{self._run}-{host}"

    def _in(self, host: str, *command: str) -> str:
        return run("ip", "netns", "exec", self._namespace(host), *command)


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    missing = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} on the PATH"
    if os.geteuid():
        return "not root"
    try:
        Net(["probe"]).stop()
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"
    return ""


def sweep() -> None:
    """Remove the namespaces of processes that are no more, and what runs in them."""
    for path in sorted(NAMESPACES.glob(f"{PREFIX}[0-9]*-*")):
        owner = path.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            remove(path.name)


def remove(namespace: str) -> None:
    """With its processes; links go with the namespace."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in listed.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def enter(descriptor: int) -> None:
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def thread_id() -> int:
    return int(Path("/proc/thread-self").readlink().name)


def ip(*words: str) -> str:
    return run("ip", *words)


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
