"""Client processes that a test kills, stops and continues, and one that watches over the others' service."""

import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from engine_client.blocking import BlockingClient
from tests.system.nodes import PATIENCE_S, NodeProcess, content, namespace, pause


class Child:
    """A forked process that runs `work(pipe, *arguments)`."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            self.pipe.close()
            try:
                work(theirs, *arguments)
                os._exit(0)
            except BaseException:
                theirs.send(("raised", traceback.format_exc()))
                os._exit(1)
        theirs.close()
        self.is_gone = False

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_gone:
            self.kill()
        self.pipe.close()

    def hear(self, within_s: float = PATIENCE_S) -> Any:
        """What it says next. Fails the test when it says nothing, or dies of an exception."""
        assert self.pipe.poll(within_s), "the child says nothing"
        said = self.pipe.recv()
        assert not (isinstance(said, tuple) and said[:1] == ("raised",)), said[1]
        return said

    def say(self, word: Any) -> None:
        self.pipe.send(word)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.is_gone = True

    def join(self) -> int:
        """Its exit code, once it ends by itself."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.is_gone:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.is_gone = True
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, "the child does not end"
            pause(0.002)
        return 0


BLOCKS, BLOCK_BYTES = 16, 4096


class Witness:
    """A well-behaved client in a process of its own: while others misbehave it reads and writes, and must not notice.

    As a context: fails the test if a call of its raised, if any byte was wrong, or if one took longer than `slowest_s`.
    """

    def __init__(self, node: NodeProcess, slowest_s: float = 2.0, token: str = "") -> None:
        self._slowest_s = slowest_s
        self._child = Child(watch, node, token)
        self._child.hear()

    def __enter__(self) -> "Witness":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                try:
                    self._child.say("enough")
                except OSError:
                    pass  # it has died, and says of what
                slowest_s = self._child.hear()
                assert slowest_s < self._slowest_s, f"the witness waited {slowest_s:.2f} s for a call"
                self._child.join()
        finally:
            self._child.__exit__(kind, error, trace)


def watch(pipe: Connection, node: NodeProcess, token: str) -> None:
    """Put, get and delete by turns over shared memory and TCP, until told that it is enough."""
    rounds, slowest_s = 0, 0.0
    ways = [BlockingClient(node.unix, token, name="witness", timeout_s=PATIENCE_S)]
    ways.append(BlockingClient(node.tcp, token or node.token, name="witness", timeout_s=PATIENCE_S))
    spaces = [client.open("witness", namespace("witness")) for client in ways]
    pipe.send("ready")
    while True:
        began = time.monotonic()
        for client, space in zip(ways, spaces, strict=True):
            keys = space.keys([rounds, *range(4 * BLOCKS)])[:BLOCKS]
            blocks = [content(key, BLOCK_BYTES) for key in keys]
            report = client.put(space, keys, blocks)
            assert report.stored + report.present == BLOCKS, report
            buffers = [bytearray(BLOCK_BYTES) for _ in keys]
            for reader, its in zip(ways, spaces, strict=True):
                found = reader.get(its, keys, buffers)
                assert found == BLOCKS, (found, reader.address, reader.explain(its, keys), reader.stat()["counters"])
                assert list(map(bytes, buffers)) == blocks, "the witness read wrong bytes"
        client.evict(space, keys)
        slowest_s = max(slowest_s, time.monotonic() - began)
        rounds += 1
        if pipe.poll(0.002):
            break
    for client in ways:
        client.close()
    pipe.send(slowest_s)
