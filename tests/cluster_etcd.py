"""A real etcd for tests, on free ports and in a temporary folder, that can be killed, stopped and started again."""

import asyncio
import atexit
import json
import os
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

from tests.system.nodes import free_port, until


class EtcdProcess:
    """One server; `folder` is its data's, and what it logs is in `log` there."""

    def __init__(self, folder: Path) -> None:
        assert shutil.which("etcd"), "these tests need etcd: apt-get install etcd-server"
        self.folder = folder
        self.port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.kill)

    @property
    def endpoint(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def start(self) -> "EtcdProcess":
        """At the same ports and with the same data as before, if it ran before."""
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        options = {
            "name": "one",
            "data-dir": str(self.folder / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"one={peer}",
            "logger": "zap",
            "log-level": "warn",
            "unsafe-no-fsync": "",
        }
        given = [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(["etcd", *given], stdout=log, stderr=log, env=environment)
        until(self._is_healthy, "etcd to be healthy")
        return self

    def compact(self) -> None:
        """Let it forget all but the newest revision."""
        newest = self._asked("kv/range", {"key": "AA=="})["header"]["revision"]
        self._asked("kv/compaction", {"revision": newest})

    def kill(self) -> None:
        """With SIGKILL, as a crash. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Hang it: connections stay, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def forget(self) -> None:
        """Lose its data; for one that was killed."""
        shutil.rmtree(self.folder / "data")

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "etcd does not run"
        self._process.send_signal(number)

    def _asked(self, what: str, question: dict[str, str]) -> Any:
        url, body = f"http://127.0.0.1:{self.port}/v3/{what}", json.dumps(question).encode()
        with urllib.request.urlopen(url, body, timeout=10) as answer:
            return json.load(answer)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except (URLError, OSError):
            return False


class Cable:
    """A TCP proxy on the loop that opens it. Cut, it carries nothing, and answers to nothing: packets are lost."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._carriers: set[asyncio.Task[None]] = set()

    async def open(self) -> tuple[str, int]:
        """The address to connect to."""
        self._server = await asyncio.start_server(self._carry_both, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return host, port

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    async def break_off(self) -> None:
        """Break the connections that are; others can be made at once."""
        for task in self._carriers:
            task.cancel()
        await asyncio.gather(*self._carriers, return_exceptions=True)

    async def aclose(self) -> None:
        self._server.close()
        await self.break_off()

    async def _carry_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carriers.add(task)
        try:
            await self._whole.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            try:
                await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
            finally:
                far_writer.close()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._carriers.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(64 << 10):
            await self._whole.wait()
            writer.write(piece)
            await writer.drain()
        writer.close()
