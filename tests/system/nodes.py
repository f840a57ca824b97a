"""A real node process for tests, and what every test asks of it at the end: alive, clean, nobody holds anything."""

import atexit
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_client.blocking import BlockingClient
from kvstore.prefix import Namespace
from tests.system.cairn_process import CairnProcess

PATIENCE_S = 20.0  # for what should take milliseconds, on a machine that is busy with other things
SMALL = {"tiers.dram.capacity": "16MiB", "tiers.dram.slab": "1MiB", "tiers.dram.mlock": "no"}


def until(condition: Callable[[], Any], what: str = "", within_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`; fails the test if there is none in time."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {within_s} s in vain for {what or condition}"
        pause(0.005)
    return value


def pause(seconds: float) -> None:
    """Give others the processor, between two looks at a condition or as the random moment that a test is about."""
    select.select([], [], [], seconds)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NodeProcess:
    """`options` are settings as on the command line; `admin_token` is of a configured tenant that is an admin."""

    def __init__(self, folder: Path, *options: str, admin_token: str = "", tls: bool = False) -> None:
        self._run_dir = folder / "run"
        self.path = f"{self._run_dir}/node.sock"
        self.unix = f"unix://{self.path}"
        self.port = free_port()
        self.tcp = f"{'tls' if tls else 'tcp'}://127.0.0.1:{self.port}"
        self._admin_token = admin_token
        given = dict(option.removeprefix("--").split("=", 1) for option in options)
        self._settings = {**SMALL, "node.tcp_listen": f"127.0.0.1:{self.port}", "rest.listen": "", **given}
        self._process: CairnProcess | None = None

    def start(self) -> "NodeProcess":
        """At the same addresses as before, if it ran before."""
        self._process = CairnProcess(self._run_dir, {}, dict(self._settings))
        atexit.register(self._process.kill)  # a test that fails may leave it behind
        until(lambda: self.is_grown, "the node to have all its memory")
        return self

    @property
    def is_grown(self) -> bool:
        tier = self.tier()
        return bool(tier["capacity_bytes"] == tier["target_bytes"])

    @property
    def _cairn(self) -> CairnProcess:
        assert self._process is not None, "it was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self._cairn.pid

    @property
    def epoch(self) -> int:
        return self._cairn.epoch

    @property
    def is_alive(self) -> bool:
        return self._cairn.process.poll() is None

    @property
    def log(self) -> str:
        return self._cairn.log

    @property
    def token(self) -> str:
        return self._cairn.token

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._cairn.kill()

    def stop(self) -> None:
        """As an operator does; fails the test unless the node went in peace."""
        self.thaw()
        code = self._cairn.stop()
        assert code == 0, f"the node ended with {code}:\n{self.log[-4000:]}"
        assert "Traceback" not in self.log, self.log[-4000:]

    def admin(self) -> BlockingClient:
        return BlockingClient(self.unix, self._admin_token, timeout_s=PATIENCE_S, name="admin")

    def tier(self) -> dict[str, Any]:
        with self.admin() as admin:
            return dict(admin.stat()["tiers"][0])

    def counters(self) -> dict[str, Any]:
        with self.admin() as admin:
            return dict(admin.stat()["counters"])

    @property
    def used_bytes(self) -> int:
        return int(self.tier()["used_bytes"])

    @property
    def memory_bytes(self) -> int:
        """Private memory of the process, without the slabs."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def assert_clean(self) -> None:
        assert self.is_alive, f"the node ended with {self._cairn.process.returncode}:\n{self.log[-4000:]}"
        assert "broken invariant" not in self.log, self.log[-4000:]
        with self.admin() as admin:
            assert admin.check() == []

    def empty(self, *others: BlockingClient) -> None:
        """Delete all blocks of the admin's tenant, and of the `others`': what stays in use is held by somebody."""
        with self.admin() as admin:
            for client in (admin, *others):
                tenant = client.connect().tenant
                for row in client.stat()["namespaces"]:
                    if row["tenant"] == tenant:
                        client.evict(client.find(row["names"][0]))
            until(lambda: nothing_held(admin), f"nobody to hold anything: {admin.stat()['tiers']}")
            assert admin.check() == []


def nothing_held(admin: BlockingClient) -> bool:
    tier = admin.stat()["tiers"][0]
    return not (tier["used_bytes"] or tier["blocks"] or tier["draining"])


def namespace(
    model: str = "llama", block_tokens: int = 4, block_bytes: int = 0, layers: int = 4, parts: int = 1
) -> Namespace:
    return Namespace(
        model=model, dtype="bf16", layout="tokens-first", block_tokens=block_tokens, layers=layers,
        block_bytes=block_bytes, parts=parts,
    )  # fmt: skip


def content(key: bytes, size: int) -> bytes:
    """What the tests store under a key: bytes that no other key has, so that a reader anywhere can tell."""
    return (key * (size // len(key) + 1))[:size]
