"""A node started as an operator starts it: by `cairn node`, in a process of its own."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
PATIENCE_S = 30.0
SETTINGS = {
    "tiers.dram.capacity": "64MiB",
    "tiers.dram.slab": "4MiB",
    "tiers.dram.huge_pages": "no",
    "node.tcp_listen": "127.0.0.1:0",
    "rest.listen": "127.0.0.1:0",
}


def clean_environ(**more: str) -> dict[str, str]:
    """This process's environment without what would reach a node or a command by accident."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CAIRN_", "NOTIFY_"))}
    return kept | more


class CairnProcess:
    """A node that serves: it has said so. `log` is what it wrote to stderr so far.

    settings: by name, on top of SETTINGS; None takes one of those away.
    """

    def __init__(self, run_dir: Path, environ: dict[str, str], settings: dict[str, str | None]) -> None:
        self.run_dir = run_dir
        self._log = run_dir.with_suffix(".log")
        given = {"node.run_dir": str(run_dir), **SETTINGS, **settings}
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "server.cli", "node", "--json", *options],
                cwd=REPO,
                env=clean_environ(**environ),
                stdout=subprocess.PIPE,
                stderr=log,
            )
        ready = self._first_line()
        self.pid: int = ready["pid"]
        self.epoch: int = ready["epoch"]
        self.address: str = ready["addresses"]["unix"]
        self.tcp_address: str = ready["addresses"].get("tcp", "")
        self.rest_url: str = ready["addresses"].get("rest", "")

    def _first_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        line = self.process.stdout.readline() if readable else b""
        if not line:
            self.kill()
            raise AssertionError(f"the node did not start:\n{self.log}")
        return dict(json.loads(line))

    @property
    def token(self) -> str:
        """Of the default tenant of a node without configured ones."""
        return (self.run_dir / "token").read_text().split()[0]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def stop(self) -> int:
        """As an operator would; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._ended()

    def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return self._ended()

    def _ended(self) -> int:
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


StartNode = Callable[..., CairnProcess]
