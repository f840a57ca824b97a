"""A node process of the bench's own."""

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine_client.address import read_token
from engine_client.blocking import BlockingClient


@dataclass(frozen=True, slots=True)
class RunningNode:
    """Where it serves, and the token for TCP."""

    address: str
    tcp_address: str
    token: str


@contextmanager
def running_node(run_dir: Path, capacity: str = "768MiB", *more: str) -> Iterator[RunningNode]:
    """Start a node, wait until all of its memory is ready, and stop it at the end."""
    options = [f"--node.run_dir={run_dir}", f"--tiers.dram.capacity={capacity}", "--rest.listen="]
    options += ["--node.tcp_listen=127.0.0.1:0", "--log.level=warning", "--json", *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli", "node", *options], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        with BlockingClient(ready["addresses"]["unix"]) as client:
            while client.stat()["tiers"][0]["capacity_bytes"] < client.stat()["tiers"][0]["target_bytes"]:
                select.select([process.stdout], [], [], 0.1)
        yield RunningNode(ready["addresses"]["unix"], ready["addresses"]["tcp"], read_token(run_dir))
    finally:
        process.terminate()
        process.wait(20)
