"""What tests of several folders share."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvstore.transport.rdma.verbs import Verbs
from kvstore.types import DRAM
from server.config import load
from server.node import Node
from tests.system.cairn_process import CairnProcess, StartNode

SETTINGS = {
    "node.tcp_listen": "127.0.0.1:0",
    "node.drain_seconds": "1s",
    "rest.listen": "127.0.0.1:0",
    "tiers.dram.capacity": "32MiB",
    "tiers.dram.slab": "8MiB",
    "tiers.dram.mlock": "no",
    "tiers.dram.huge_pages": "no",
    "index.entries": "1024",
}


class LiveNode:
    """A node that serves from a thread of this process, with small tiers. `call` does something in its thread."""

    def __init__(self, run_dir: Path, settings: dict[str, str], verbs: Verbs | None = None) -> None:
        self._verbs = verbs
        options = [f"--{name}={value}" for name, value in {**SETTINGS, **settings}.items()]
        self.config = load(None, {"HOME": str(run_dir)}, options)
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="node")
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            self.node = Node(self.config, self._verbs)
            try:
                await self.node.start()
                await self.node.upkeep.resized.wait()
            except BaseException as error:
                self._failure = error
                raise
            finally:
                self._started.set()
            await self._stop.wait()
            await self.node.stop()

        try:
            uvloop.run(serve())
        except BaseException as error:
            self._failure = self._failure or error

    def call(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, done between two events of the node's loop."""

        async def done() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result(timeout=10)

    def wait_until(self, is_so: Callable[[], bool], seconds: float = 10) -> None:
        """Look after each turn of the node's loop until `is_so`."""

        async def looked() -> None:
            turn = asyncio.Event()
            async with asyncio.timeout(seconds):
                while not is_so():
                    self.loop.call_later(0.001, turn.set)
                    await turn.wait()
                    turn.clear()

        asyncio.run_coroutine_threadsafe(looked(), self.loop).result(timeout=seconds + 5)

    @property
    def url(self) -> str:
        return str(self.call(lambda: self.node.addresses["rest"]))

    @property
    def token(self) -> str:
        return Path(self.config.node.run_dir, "token").read_text().split()[0]

    @property
    def used_bytes(self) -> int:
        return int(self.call(lambda: self.node.store.table.tiers[DRAM].used_bytes))

    def problems(self) -> list[str]:
        """What `cairn check` would find."""
        return list(self.call(lambda: list(self.node.store.problems())))

    def stop(self) -> None:
        """Stop it. Fails when something was broken: its state, an invariant, or its thread."""
        if self._thread.is_alive():
            problems, is_ready = self.problems(), self.call(lambda: self.node.is_ready)
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=30)
            assert problems == []
            assert is_ready, "the node stopped by itself"
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure


@pytest.fixture
def live_node(tmp_path: Path) -> Iterator[Callable[..., LiveNode]]:
    """Starts nodes: `live_node({"rest.body_bytes": "1MiB"})`. At the end they are checked and stopped."""
    nodes: list[LiveNode] = []

    def start(settings: dict[str, str] | None = None, verbs: Verbs | None = None) -> LiveNode:
        nodes.append(LiveNode(tmp_path / str(len(nodes)), settings or {}, verbs))
        return nodes[-1]

    yield start
    for node in nodes:
        node.stop()


@pytest.fixture(scope="module")
def start_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartNode]:
    """Starts node processes: `start_node(run_dir, environ, **{"log.level": "debug"})`. All end with the module."""
    started: list[CairnProcess] = []

    def start(
        run_dir: Path | None = None, environ: dict[str, str] | None = None, **settings: str | None
    ) -> CairnProcess:
        started.append(CairnProcess(run_dir or tmp_path_factory.mktemp("node") / "run", environ or {}, settings))
        return started[-1]

    yield start
    for node in started:
        node.kill()


@pytest.fixture
def node_process(start_node: StartNode) -> Iterator[CairnProcess]:
    """A node process of the test's own, small and at ephemeral ports."""
    node = start_node()
    yield node
    node.kill()
