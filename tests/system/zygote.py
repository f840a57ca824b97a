"""Node processes that are there at once: forked from one that has imported all that a node needs."""

import asyncio
import contextlib
import logging
import os
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import uvloop

from engine_client.blocking import BlockingClient
from server.config import Config, load
from server.node import Node
from tests.system.children import Child
from tests.system.nodes import PATIENCE_S


class Zygote:
    """Starts one node after the other, all with the same settings. Make it before this process has threads."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "node.log"
        self.config = load(None, {"HOME": str(folder)}, options)
        self.unix = f"unix://{self.config.node.unix_socket}"
        self._child = Child(_breed, self.config, self.log_path)
        self.pid = 0

    def start(self) -> int:
        """A node that serves; its epoch."""
        self._child.say("start")
        self.pid, said = self._child.hear()
        assert isinstance(said, int), f"the node did not start: {said}\n{self.log[-4000:]}"
        return said

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._child.say("wait")
        assert self._child.hear() == -signal.SIGKILL, self.log[-4000:]
        self.pid = 0

    def stop(self) -> None:
        """As an operator does; fails the test unless the node went in peace."""
        os.kill(self.pid, signal.SIGTERM)
        self._child.say("wait")
        code, self.pid = self._child.hear(), 0
        assert code == 0, f"the node ended with {code}:\n{self.log[-4000:]}"

    def admin(self) -> BlockingClient:
        return BlockingClient(self.unix, timeout_s=PATIENCE_S, name="admin")

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._child.kill()


def _breed(pipe: Connection, config: Config, log_path: Path) -> None:
    pid = 0
    while True:
        word = pipe.recv()
        if word == "start":
            ours, theirs = Pipe()
            pid = os.fork()
            if not pid:
                _serve(theirs, config, log_path)
            theirs.close()
            try:
                pipe.send((pid, ours.recv() if ours.poll(PATIENCE_S) else "it says nothing"))
            except EOFError:
                pipe.send((pid, "it ended"))
            ours.close()
        else:
            pipe.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _serve(pipe: Connection, config: Config, log_path: Path) -> None:
    """Never returns."""
    logging.basicConfig(filename=log_path, level="INFO", force=True, format="%(asctime)s %(name)s: %(message)s")
    code = 1
    try:

        async def live() -> int:
            node = Node(config)
            return await node.serve(lambda: pipe.send(node.epoch))

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(live())
    except BaseException as error:
        logging.exception("the node raised")
        pipe.send(repr(error))
    finally:
        logging.shutdown()
        os._exit(code)
