"""Node processes that are there at once: forked from one that has imported all that a node needs, and no more.

A process that had opened a RocksDB would not do: its threads are not there after a fork, and are waited for.
"""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import uvloop

from engine_client.blocking import BlockingClient
from server.config import Config, load
from server.node import Node
from tests.system.cairn_process import REPO, clean_environ
from tests.system.nodes import PATIENCE_S


class Zygote:
    """Starts one node after the other, all with the same settings."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log_path = folder / "node.log"
        self._log_path.touch()
        self.unix = f"unix://{load(None, {'HOME': str(folder)}, options).node.unix_socket}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.zygote", str(folder), *options],
            cwd=REPO,
            env=clean_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._ask("hello")
        self.pid = 0

    def start(self) -> int:
        """A node that serves; its epoch."""
        answer = self._ask("start")
        assert answer["epoch"], f"the node did not start: {answer['error']}\n{self.log[-4000:]}"
        self.pid = answer["pid"]
        return int(answer["epoch"])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self._ask("wait")["code"] == -signal.SIGKILL, self.log[-4000:]

    def stop(self) -> None:
        """As an operator does; fails the test unless the node went in peace."""
        os.kill(self.pid, signal.SIGTERM)
        code = self._ask("wait")["code"]
        assert code == 0, f"the node ended with {code}:\n{self.log[-4000:]}"

    def admin(self) -> BlockingClient:
        return BlockingClient(self.unix, timeout_s=PATIENCE_S, name="admin")

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout], [], [], 2 * PATIENCE_S)
        assert readable, f"no answer to {word}:\n{self.log[-4000:]}"
        return dict(json.loads(self._process.stdout.readline()))

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # and with it the node
        self._process.communicate()


def breed(folder: Path, options: list[str]) -> None:
    """Answer each word on stdin by a line on stdout."""
    config = load(None, {"HOME": str(folder)}, options)
    pid = 0
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        if line.strip() == "start":
            ours, theirs = Pipe()
            pid = os.fork()
            if not pid:
                _serve(theirs, config, folder / "node.log")
            theirs.close()
            try:
                epoch, error = ours.recv() if ours.poll(PATIENCE_S) else (0, "it says nothing")
            except EOFError:
                epoch, error = 0, "it ended"
            ours.close()
            answer = {"pid": pid, "epoch": epoch, "error": error}
        elif line.strip() == "wait":
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
        print(json.dumps(answer), flush=True)


def _serve(pipe: Connection, config: Config, log_path: Path) -> None:
    """Never returns."""
    logging.basicConfig(filename=log_path, level="INFO", force=True, format="%(asctime)s %(name)s: %(message)s")
    code = 1
    try:

        async def live() -> int:
            node = Node(config)
            return await node.serve(lambda: pipe.send((node.epoch, "")))

        code = uvloop.run(live())
    except BaseException as error:
        logging.exception("the node raised")
        pipe.send((0, repr(error)))
    finally:
        logging.shutdown()
        os._exit(code)


if __name__ == "__main__":
    breed(Path(sys.argv[1]), sys.argv[2:])
