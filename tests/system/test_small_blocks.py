"""Hundreds of thousands of blocks of 64 to 512 bytes; CAIRN_TEST_BLOCKS=1000000 for the long run."""

import os
import random
import time
from collections.abc import Iterator

import pytest

from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace
from kvstore.types import BlockKey
from tests.system.children import Witness
from tests.system.nodes import NodeProcess, content, namespace, until

BLOCKS = int(os.environ.get("CAIRN_TEST_BLOCKS", "200000"))
CHAIN = 1000
SIZES = (64, 100, 128, 200, 256, 300, 512)
MIB = 1 << 20
SPACE = namespace("small", block_tokens=1)
MOST_BYTES_PER_BLOCK = 800


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[NodeProcess]:
    options = (
        f"--tiers.dram.capacity={64 * -(-BLOCKS // 200_000)}MiB", "--tiers.dram.high_watermark=1.0",
        "--tiers.dram.low_watermark=0.99", f"--index.entries={4 * BLOCKS}", "--limits.explain_history=0",
    )  # fmt: skip
    started = NodeProcess(tmp_path_factory.mktemp("node"), *options).start()
    yield started
    started.stop()


def size_of(position: int) -> int:
    return SIZES[position % len(SIZES)]


def chain_of(space: OpenSpace, number: int) -> list[BlockKey]:
    return space.keys([number, *range(CHAIN - 1)])


def test_many_small_blocks(node):
    chains = BLOCKS // CHAIN
    with (
        BlockingClient(node.unix, timeout_s=20.0) as client,
        BlockingClient(node.tcp, node.token, timeout_s=20.0) as remote,
    ):
        space, its = client.open("small", SPACE), remote.open("small", SPACE)
        before, began = node.memory_bytes, time.monotonic()
        for number in range(chains):
            keys = chain_of(space, number)
            blocks = [content(key, size_of(at)) for at, key in enumerate(keys)]
            where = (client, space) if number % 4 else (remote, its)
            assert where[0].put(where[1], keys, blocks).stored == CHAIN
        put_s = time.monotonic() - began
        per_block = (node.memory_bytes - before) / BLOCKS
        index = client.stat()["index"]["default"]
        assert index["published"] == BLOCKS
        asked = node.counters()["requests"].get("match", 0), node.counters()["requests"].get("acquire", 0)

        began = time.monotonic()
        buffers = [bytearray(size_of(at)) for at in range(CHAIN)]
        for number in range(chains):
            keys = chain_of(space, number)
            assert client.match(space, keys) == CHAIN
            assert client.get(space, keys, buffers) == CHAIN
            assert all(buffer.startswith(key) for key, buffer in zip(keys, buffers, strict=True))
            assert buffers[number % CHAIN] == content(keys[number % CHAIN], size_of(number % CHAIN))
        get_s = time.monotonic() - began
        requests = node.counters()["requests"]
        if not index["crowded_out"]:
            assert (requests.get("match", 0), requests.get("acquire", 0)) == asked, "the index knew them all"
        for number in random.Random(1).sample(range(chains), 5):
            assert remote.get(its, chain_of(its, number), buffers) == CHAIN
        print(f"{BLOCKS} blocks: {per_block:.0f} bytes of memory each, put in {put_s:.1f} s, got in {get_s:.1f} s")
        assert per_block < MOST_BYTES_PER_BLOCK

        with node.admin() as admin:
            assert admin.check() == []
            with Witness(node, slowest_s=1.0):
                assert client.evict(space).blocks == BLOCKS
            until(lambda: admin.stat()["tiers"][0]["used_bytes"] == 0)
            assert admin.check() == []
    assert client.match(space, chain_of(space, 0)) == 0


def test_more_blocks_than_the_index_has_places(tmp_path):
    """What is crowded out is still found, by asking the node; the number of places need not be a power of two."""
    node = NodeProcess(tmp_path, "--index.entries=1000").start()
    blocks = 6
    with BlockingClient(node.unix) as client:
        space = client.open("small", SPACE)
        for number in range(blocks):
            keys = chain_of(space, number)
            assert client.put(space, keys, [content(key, 64) for key in keys]).stored == CHAIN
        index = client.stat()["index"]["default"]
        assert index["entries"] == 1024
        assert index["published"] + index["crowded_out"] >= blocks * CHAIN
        buffers = [bytearray(64) for _ in range(CHAIN)]
        for number in range(blocks):
            keys = chain_of(space, number)
            assert client.match(space, keys) == CHAIN
            assert client.get(space, keys, buffers) == CHAIN
            assert list(map(bytes, buffers)) == [content(key, 64) for key in keys]
            assert client.match(space, [*keys, BlockKey(bytes(16))]) == CHAIN
            assert client.get_bytes(space, keys[500]) == content(keys[500], 64)
        client.evict(space, chain_of(space, 0))
        assert client.match(space, chain_of(space, 0)) == 0
        assert client.get(space, chain_of(space, 0), buffers) == 0
    node.assert_clean()
    node.empty()
    node.stop()
