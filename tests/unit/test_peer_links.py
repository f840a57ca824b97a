"""Connections to other nodes that are slow, are not who they should be, or end at a bad moment."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from engine_client.address import parse_address
from kvstore import wire
from kvstore.catalogue import Catalogue, OpenNamespace, Tenant
from kvstore.cluster.members import Member
from kvstore.errors import ConfigError, ConnectFailed, DeadlineExceeded, PeerLost, ProtocolError
from kvstore.packed import pack_u64
from kvstore.prefix import Namespace
from kvstore.table import BlockTable, TierShape
from kvstore.transport.rdma.nic import DEFAULTS
from kvstore.transport.stream import FrameStream
from kvstore.types import DRAM, BlockKey
from kvstore.wire_cluster import Locate, Located
from server.clustering import advertised
from server.peers import Manner, PeerLinks

SLOW_S = 0.2
SIZE = 100


class Other(FrameStream):
    """A node that answers as it is told."""

    def __init__(self, host: "Host") -> None:
        super().__init__(1 << 20)
        self._host = host

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._host.connections.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._host.connections.remove(self)

    def frame_received(self, body: bytes, payload_bytes: int) -> Sequence[memoryview]:
        request = wire.decode_request(body)
        host = self._host
        host.requests.append(request)
        if isinstance(request, wire.Hello):
            welcome = wire.Welcome(
                request.id, wire.PROTOCOL, host.name, host.epoch, request.tenant, b"", False, False, 8192, 64, 1 << 20
            )
            asyncio.get_running_loop().call_later(host.hello_s, self.send, wire.encode(welcome))
        elif isinstance(request, Locate):
            self.send(wire.encode(Located(request.id, (), (), b"")))
        elif isinstance(request, wire.Open) and request.namespace is not None:
            self.send(wire.encode(wire.Opened(request.id, 1, host.root, request.namespace)))
        elif isinstance(request, wire.Acquire):
            self.send(wire.encode(host.acquired(request)))
        return ()

    def payload_received(self) -> None:
        raise AssertionError("no payloads are sent here")

    def broken(self, error: ProtocolError) -> None:
        raise error

    def hang_up(self) -> None:
        assert self._transport is not None
        self._transport.abort()


class Host:
    def __init__(self) -> None:
        self.name, self.epoch, self.hello_s = "b", 1, 0.0
        self.root = b""
        self.connections: list[Other] = []
        self.requests: list[Any] = []
        self.sizes = [SIZE]
        self.lost: list[str] = []
        self.address = ""

    def acquired(self, request: wire.Acquire) -> wire.Acquired:
        columns = [pack_u64([0] * len(self.sizes))] * 2
        return wire.Acquired(request.id, 5, 1000, *columns, pack_u64(self.sizes), *columns)

    @property
    def member(self) -> Member:
        return Member(name="b", epoch=1, address=self.address)


def running(test: Callable[[Host, PeerLinks], Awaitable[None]]) -> None:
    async def run() -> None:
        crashes: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: crashes.append(context.get("exception") or RuntimeError(context)))
        host = Host()
        server = await loop.create_server(lambda: Other(host), "127.0.0.1", 0)
        host.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        manner = Manner(me="a", token="of the cluster", transport="tcp", rdma=DEFAULTS)
        links = PeerLinks(manner, host.lost.append, crashes.append)
        try:
            async with asyncio.timeout(20.0):
                await test(host, links)
        finally:
            await links.aclose()
            server.close()
        await asyncio.sleep(0.05)
        assert crashes == []
        assert host.connections == []

    asyncio.run(run())


def opened() -> OpenNamespace:
    table = BlockTable({DRAM: TierShape(8192)})
    catalogue = Catalogue(4, lambda tenant, number: (table.space(tenant, number, DRAM),))
    namespace = Namespace(model="m", dtype="u8", layout="x", block_tokens=16, layers=2)
    return catalogue.define(Tenant("red", "r"), "x", namespace)[0]


def locate(number: int) -> Locate:
    return Locate(number, b"", b"")


def test_a_connection_that_takes_longer_than_any_who_asks_is_made_all_the_same():
    async def test(host: Host, links: PeerLinks) -> None:
        host.hello_s = SLOW_S
        with pytest.raises(DeadlineExceeded):
            await links.ask(host.member, locate, 0.6 * SLOW_S)
        await links.ask(host.member, locate, 0.6 * SLOW_S)
        assert sum(isinstance(request, wire.Hello) for request in host.requests) == 1

    running(test)


@pytest.mark.parametrize(("name", "epoch"), [("c", 1), ("b", 2)])
def test_another_node_or_start_at_a_members_address_is_asked_nothing(name, epoch):
    async def test(host: Host, links: PeerLinks) -> None:
        host.name, host.epoch = name, epoch
        with pytest.raises(PeerLost):
            await links.ask(host.member, locate, 2.0)
        assert not any(isinstance(request, Locate) for request in host.requests)

    running(test)


def test_all_who_ask_at_once_hear_that_nobody_listens():
    async def test(host: Host, links: PeerLinks) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            gone = Member(name="c", epoch=1, address=f"tcp://127.0.0.1:{free.getsockname()[1]}")
            errors = await asyncio.gather(*(links.ask(gone, locate, 2.0) for _ in range(3)), return_exceptions=True)
        for error in errors:
            assert isinstance(error, ConnectFailed)
            assert isinstance(error.__cause__, ConnectionRefusedError)

    running(test)


def test_a_connection_that_is_made_after_its_member_went_is_hung_up():
    async def test(host: Host, links: PeerLinks) -> None:
        host.hello_s = SLOW_S
        asking = asyncio.ensure_future(links.ask(host.member, locate, 2.0))
        await asyncio.sleep(SLOW_S / 4)
        links.close("b")
        with pytest.raises((PeerLost, ConnectFailed)):
            await asking
        await asyncio.sleep(SLOW_S)
        assert host.connections == []

    running(test)


def test_who_hung_up_on_all_connects_to_none_any_more():
    async def test(host: Host, links: PeerLinks) -> None:
        await links.ask(host.member, locate, 2.0)
        await links.aclose()
        with pytest.raises(ConnectFailed):
            await links.ask(host.member, locate, 2.0)

    running(test)


def test_a_lease_of_a_broken_connection_is_let_go_without_another():
    async def test(host: Host, links: PeerLinks) -> None:
        space = opened()
        host.root = space.root
        lease = await links.lease(host.member, space, [BlockKey(bytes(16))], lease_s=1.0, load_s=0.1)
        assert lease is not None
        host.connections[0].hang_up()
        await asyncio.sleep(0.05)
        links.release(lease)
        await asyncio.sleep(0.05)
        assert host.connections == []
        assert host.lost == ["b"]

    running(test)


def test_a_lease_of_more_blocks_than_were_asked_for_is_none():
    async def test(host: Host, links: PeerLinks) -> None:
        space = opened()
        host.root = space.root
        host.sizes = [SIZE] * 3
        with pytest.raises(ProtocolError):
            await links.lease(host.member, space, [BlockKey(bytes(16))], lease_s=1.0, load_s=0.1)

    running(test)


@pytest.mark.parametrize(
    ("address", "listen", "expected"),
    [
        ("tcp://::1:7401", "[::1]:0", "tcp://[::1]:7401"),
        ("tcp://[::1]:7401", "[::1]:7401", "tcp://[::1]:7401"),
        ("tls://0.0.0.0:7401", "n1.example:0", "tls://n1.example:7401"),
        ("tcp://10.0.0.1:7401", "10.0.0.9:80", "tcp://10.0.0.9:80"),
    ],
)
def test_an_advertised_address_is_one_that_others_understand(address, listen, expected):
    assert advertised(address, listen) == expected
    assert parse_address(expected).port


def test_a_file_of_authorities_that_is_not_there_is_a_wrong_setting():
    with pytest.raises(ConfigError):
        PeerLinks(Manner(me="a", token="t", ca_file="/nowhere/ca.pem", rdma=DEFAULTS), print, print)
