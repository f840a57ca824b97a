"""A node and its clients over RDMA, by the software double: blocks are READ in place, and whatever fails ends well."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine_client.blocking import BlockingClient
from engine_client.client import Client
from engine_client.steps import OpenSpace
from kvstore.prefix import Namespace
from kvstore.transport.rdma.nic import Options
from kvstore.types import BlockKey
from tests.conftest import LiveNode
from tests.soft_verbs import SoftFabric, SoftVerbs

BLOCK = 256 << 10
NAMESPACE = Namespace(model="m", dtype="float16", layout="flat", block_tokens=16, layers=1)


@pytest.fixture
def fabric() -> SoftFabric:
    return SoftFabric()


@pytest.fixture
def node(live_node: Callable[..., LiveNode], fabric: SoftFabric) -> LiveNode:
    return live_node({}, SoftVerbs(fabric))


@contextmanager
def connected(node: LiveNode, fabric: SoftFabric, **named: Any) -> Iterator[BlockingClient]:
    address = node.call(lambda: node.node.addresses["tcp"])
    options = {"transport": "rdma", "verbs": SoftVerbs(fabric), "rdma": Options(hung_s=0.2)} | named
    with BlockingClient(address, node.token, **options) as client:
        yield client


@pytest.fixture
def client(node: LiveNode, fabric: SoftFabric) -> Iterator[BlockingClient]:
    with connected(node, fabric) as client:
        yield client


def blocks_of(count: int, size: int = BLOCK) -> list[bytes]:
    return [os.urandom(size) for _ in range(count)]


def keys_of(space: OpenSpace, count: int) -> list[BlockKey]:
    return space.keys(list(range(16 * count)))


def test_blocks_that_were_put_are_got_by_reads(client: BlockingClient, fabric: SoftFabric, node: LiveNode) -> None:
    space = client.open("s", NAMESPACE)
    keys, blocks = keys_of(space, 12), blocks_of(12)
    assert client.put(space, keys, blocks).stored == 12
    assert fabric.counts["read_bytes"] == 12 * BLOCK
    targets = [bytearray(BLOCK) for _ in blocks]
    assert client.get(space, keys, targets) == 12
    assert targets == [bytearray(block) for block in blocks]
    assert fabric.counts["read_bytes"] == 24 * BLOCK
    counters = node.node.store.counters
    assert (counters.loaded_bytes["rdma"], counters.stored_bytes["rdma"]) == (12 * BLOCK, 12 * BLOCK)


def test_small_blocks_come_with_the_answer(client: BlockingClient, fabric: SoftFabric) -> None:
    space = client.open("s", NAMESPACE)
    keys, blocks = keys_of(space, 4), blocks_of(4, 4096)
    assert client.put(space, keys, blocks).stored == 4
    targets = [bytearray(4096) for _ in blocks]
    assert client.get(space, keys, targets) == 4
    assert targets == [bytearray(block) for block in blocks]
    assert fabric.counts["reads"] == 0


def test_blocks_of_registered_buffers_are_not_copied(client: BlockingClient, fabric: SoftFabric) -> None:
    space = client.open("s", NAMESPACE)
    keys = keys_of(space, 4)
    source, target = bytearray(os.urandom(4 * BLOCK)), bytearray(4 * BLOCK)
    registered = [client.register(buffer) for buffer in (source, target)]
    pieces = [slice(at * BLOCK, (at + 1) * BLOCK) for at in range(4)]
    assert client.put(space, keys, [memoryview(source)[piece] for piece in pieces]).stored == 4
    assert client.get(space, keys, [memoryview(target)[piece] for piece in pieces]) == 4
    assert source == target
    rdma = client._rdma
    assert rdma is not None
    assert rdma.staged_bytes == 0
    for buffer in registered:
        assert buffer.is_quiet
        buffer.close()


def test_the_async_client_gets_many_chains_at_once(node: LiveNode, fabric: SoftFabric) -> None:
    async def run() -> None:
        address = node.call(lambda: node.node.addresses["tcp"])
        async with Client(address, node.token, transport="rdma", verbs=SoftVerbs(fabric)) as client:
            space = await client.open("s", NAMESPACE)
            chains = [space.keys([chain, *range(16 * 2 - 1)]) for chain in range(8)]
            blocks = [blocks_of(2) for _ in chains]
            await asyncio.gather(*(client.put(space, *pair) for pair in zip(chains, blocks, strict=True)))
            targets = [[bytearray(BLOCK) for _ in range(2)] for _ in chains]
            got = await asyncio.gather(*(client.get(space, *pair) for pair in zip(chains, targets, strict=True)))
            assert got == [2] * 8
            assert targets == [[bytearray(block) for block in chain] for chain in blocks]

    asyncio.run(run())
    assert fabric.counts["read_bytes"] == 2 * 8 * 2 * BLOCK
