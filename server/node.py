"""The node process: one event loop that owns the table and serves Unix, TCP and HTTP clients."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from engine_client.address import Address
from kvstore.catalogue import Tenant
from kvstore.cluster.service import Cluster
from kvstore.errors import ConfigError
from kvstore.transport.rdma.verbs import Verbs
from kvstore.types import DRAM, Owner
from kvstore.upkeep import Upkeep
from server.assembly import make_store
from server.clustering import make_cluster, tell_of_trouble
from server.config import Config, host_port
from server.connection import Connection
from server.http_serving import HttpServing
from server.rdma import NodeRdma
from server.rest import create_app
from server.session import Session
from server.tenants import doorkeeper
from server.zmq_events import ZmqPublisher

log = logging.getLogger("cairn.node")

FREEZE_BLOCKS, FREEZE_LOOK_S = 50_000, 0.5


class Node:
    """One node. `start`, then `stop`; or `serve` until a signal comes. Nothing happens before `start`.

    `verbs` is another RDMA binding than the one that is found.
    """

    def __init__(self, config: Config, verbs: Verbs | None = None) -> None:
        self.config = config
        run_dir = Path(config.node.run_dir)
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.doorkeeper = doorkeeper(config)
        self.epoch = _next_epoch(run_dir / f"{config.node.name}.epoch")
        self.tickets: dict[bytes, Session] = {}
        made = make_store(config, self.epoch, self.doorkeeper.tenants, self.crashed)
        self.store, self.recovery = made.store, made.recovery
        self.upkeep = Upkeep(self.store, made.marks, made.capacities)
        self.rdma = NodeRdma(config.rdma, self.store.copier, verbs)
        self.store.dram.dropping = self.rdma.dropped
        self.cluster: Cluster | None = None
        self.verbs = verbs
        self._owners = count(1)
        self._connections: dict[Connection, None] = {}  # oldest first
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._rest: HttpServing | None = None
        self._publisher: ZmqPublisher | None = None
        self._crash: BaseException | None = None
        self._stopping = asyncio.Event()

    # For connections.

    def connected(self, connection: Connection) -> bool:
        """Count a connection in; False when there are too many. Who has not said who it is makes way for others."""
        self._connections[connection] = None
        if len(self._connections) <= self.config.limits.connections:
            return True
        stranger = next(other for other in self._connections if other.is_stranger)
        if stranger is not connection:
            del self._connections[stranger]
            stranger.make_way()
        return stranger is not connection

    def disconnected(self, connection: Connection, ticket: bytes) -> None:
        self._connections.pop(connection, None)
        self.tickets.pop(ticket, None)

    def new_session(self, tenant: Tenant, path: str) -> Session:
        """`path` is shared, tcp, rest or, for another node, peer. The caller ends it."""
        return Session(
            *(self.store, self.upkeep, tenant, Owner(next(self._owners)), path),
            rdma=self.rdma,
            cluster=self.cluster,
            is_peer=path == "peer",
        )

    def crashed(self, error: BaseException | None) -> None:
        """A broken invariant: serving on could mean wrong bytes, so the process ends with code 70."""
        self._crash = self._crash or error
        log.critical("broken invariant, the node stops: %r", error, exc_info=error)
        self._stopping.set()

    @property
    def is_ready(self) -> bool:
        return bool(self._servers) and self.upkeep.resized.is_set() and not self._stopping.is_set()

    @property
    def connections(self) -> dict[str, int]:
        kinds = [connection.kind for connection in self._connections]
        return {kind: kinds.count(kind) for kind in ("unix", "tcp")}

    @property
    def addresses(self) -> dict[str, str]:
        """Where clients find it, by kind (unix, tcp, rest), with the real ports where 0 was configured."""
        node = self.config.node
        found = {"unix": f"unix://{node.unix_socket}"}
        for server in [server for server in self._servers if server.sockets[0].family != socket.AF_UNIX]:
            host, _ = host_port(node.tcp_listen)
            port = server.sockets[0].getsockname()[1]
            found["tcp"] = str(Address(host=host, port=port, tls=bool(node.tls_cert)))
        if self._rest is not None:
            found["rest"] = self._rest.url
        return found

    # Life.

    async def start(self) -> None:
        """Serve once the first slab is ready; the rest of the memory is made ready while serving.

        Raises ConfigError when memory, a socket or a certificate cannot be had as configured.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._loop_failed)
        await self.store.sizings[DRAM].grow()
        if self.recovery is not None:
            await self.recovery.begin()
            self._spawn(self._recover)
        for job in self.upkeep.jobs():
            self._spawn(job)
        self._spawn(self._spare_the_collector)
        node, events = self.config.node, self.config.events
        if node.tcp_listen:
            self._servers.append(await self._listen_tcp())
        if self.config.rest.listen:
            self._rest = HttpServing(
                create_app(self),
                "rest.listen",
                self.config.rest.listen,
                self.crashed,
                connections=self.config.limits.connections,
                patience_s=self.config.rest.request_timeout,
                drain_s=node.drain_seconds,
                errors=self.store.counters.errors,
            )
        if events.zmq:
            self._publisher = ZmqPublisher(
                self.store, node.unix_tenant or self.doorkeeper.tenants[0].name, events.zmq, events.topic
            )
            self._publisher.start()
            self._spawn(self._publisher.run)
        if self._rest is not None:
            await self._rest.start()
        if self.config.cluster.coordinator:
            self.cluster = make_cluster(self)
        self._servers.insert(0, await self._listen_unix(Path(node.unix_socket), int(node.unix_mode, 8)))
        for server in self._servers:
            await server.start_serving()
        if self.cluster is not None:
            await self.cluster.start()
            self._spawn(partial(tell_of_trouble, self.cluster))
        log.info("node %s, epoch %d, serves at %s", node.name, self.epoch, node.unix_socket)

    async def serve(self, ready: Callable[[], None] = lambda: None) -> int:
        """Until SIGTERM or SIGINT; the process's exit code. Calls `ready` when clients can connect."""
        _allow_descriptors()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        await self.start()
        ready()
        await self._stopping.wait()
        await self.stop()
        return 70 if self._crash is not None else 0

    async def stop(self) -> None:
        """Take no more clients, let requests under way end for `drain_seconds`, then close."""
        self._stopping.set()
        if self.cluster is not None:
            await self.cluster.aclose()
        for server in self._servers:
            server.close()
        if self._rest is not None:
            await self._rest.stop()
        connections = list(self._connections)
        for connection in connections:
            connection.close()
        if connections:
            await asyncio.wait(
                [asyncio.ensure_future(connection.closed.wait()) for connection in connections],
                timeout=self.config.node.drain_seconds,
            )
        if self._crash is None:
            await self.store.demotion.flush(self.store.clock.now() + self.config.node.drain_seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._connections):  # those that did not end in time
            connection.end_rdma()
        self.rdma.close()
        if self._publisher is not None:
            self._publisher.close()
        await self.store.aclose()
        _remove(Path(self.config.node.unix_socket))

    async def _recover(self) -> None:
        """Take up what lies on the disk; nothing is written there before."""
        assert self.recovery is not None
        try:
            await self.recovery.load(self.store.settle)
        except OSError as error:
            log.error("the nvme tier is not used: %s", error)
            return
        await self.upkeep.make_first_slabs()
        self.store.demotion.is_paused = False
        if self.cluster is not None:
            await self.cluster.recovered()

    async def _spare_the_collector(self) -> None:
        """Keep what the table holds out of full garbage collections: a third of a second at a million blocks.

        Replicas are in no cycles, so they go by their reference counts all the same.
        """
        gc.collect()
        gc.freeze()  # what was imported stays
        frozen = 0
        while True:
            stored = self.store.counters.stored_blocks
            if stored - frozen >= FREEZE_BLOCKS:
                gc.collect(1)
                gc.freeze()
                frozen = stored
            await asyncio.sleep(FREEZE_LOOK_S)

    def _spawn(self, work: Callable[[], object]) -> None:
        async def supervised() -> None:
            try:
                await work()  # type: ignore[misc]
            except Exception as error:
                self.crashed(error)

        self._tasks.append(asyncio.get_running_loop().create_task(supervised()))

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError):
            log.info("connection: %s", error)
        elif isinstance(error, BaseException):
            self.crashed(error)
        else:
            log.warning("%s", context.get("message"))

    async def _listen_unix(self, path: Path, mode: int) -> asyncio.Server:
        _remove_stale(path)
        before = os.umask(0o777 & ~mode)
        try:
            loop = asyncio.get_running_loop()
            return await loop.create_unix_server(lambda: Connection(self, "unix"), str(path))
        except OSError as error:
            raise ConfigError(f"node.unix_socket {path}: {error.strerror}") from error
        finally:
            os.umask(before)

    async def _listen_tcp(self) -> asyncio.Server:
        node = self.config.node
        host, port = host_port(node.tcp_listen)
        context = None
        try:
            if node.tls_cert:
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.load_cert_chain(node.tls_cert, node.tls_key)
            loop = asyncio.get_running_loop()
            # Who comes before the cluster is there would never see it.
            return await loop.create_server(
                lambda: Connection(self, "tcp"), host, port, ssl=context, start_serving=False
            )
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"node.tcp_listen {node.tcp_listen}: {error.strerror or error}") from error


def _allow_descriptors() -> None:
    """As many as the system lets this process have: each slab takes two, each client one and its ring two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _next_epoch(path: Path) -> int:
    """Greater than at every start before, even if the clock was set back."""
    try:
        last = int(path.read_text())
    except (OSError, ValueError):
        last = 0
    epoch = max(last + 1, time.time_ns() // 1_000_000)
    beside = path.with_suffix(".epoch.new")
    beside.write_text(str(epoch))
    beside.replace(path)
    return epoch


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """A socket file that nobody answers at is what a killed node left. Raises ConfigError when one answers."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            _remove(path)
            return
    raise ConfigError(f"another node serves at {path}")
