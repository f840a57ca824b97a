"""A node with an NVMe tier that is killed again and again under load: what was durable is served, and nothing wrong."""

import os
import random
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from engine_client.blocking import BlockingClient
from kvstore.errors import TransportError
from tests.system.children import Child
from tests.system.nodes import content, namespace, pause, until
from tests.system.zygote import Zygote

KILLS = int(os.environ.get("CAIRN_TEST_KILLS", "50"))
SEED = int(os.environ.get("CAIRN_TEST_SEED", "3"))
BLOCKS, BLOCK_BYTES, PROMPTS = 8, 20_000, 400
OPTIONS = {
    "node.tcp_listen": "",
    "rest.listen": "",
    "node.drain_seconds": "1s",
    "tiers.dram.capacity": "8MiB",
    "tiers.dram.slab": "1MiB",
    "tiers.dram.mlock": "no",
    "tiers.dram.huge_pages": "no",
    "tiers.nvme.capacity": "48MiB",
    "tiers.nvme.slab": "1MiB",
    "tiers.nvme.admission": "all",
    "tiers.nvme.write": "through",
    "index.entries": "4096",
}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Zygote]:
    options = {**OPTIONS, "tiers.nvme.path": str(tmp_path / "nvme")}
    with Zygote(tmp_path / "home", *(f"--{name}={value}" for name, value in options.items())) as nodes:
        yield nodes


class Reader:
    """Puts and gets prompts, and knows the right bytes of each from its number."""

    def __init__(self, client: BlockingClient) -> None:
        self._client = client
        self._space = client.open("load", namespace("load", block_bytes=BLOCK_BYTES))

    def put(self, prompt: int) -> None:
        keys = self._keys(prompt)
        self._client.put(self._space, keys, [content(key, BLOCK_BYTES) for key in keys])

    def get(self, prompt: int) -> int:
        """How many of its blocks are there, all of them right."""
        keys = self._keys(prompt)
        buffers = [bytearray(BLOCK_BYTES) for _ in keys]
        found = self._client.get(self._space, keys, buffers, load_s=5)
        for key, buffer in zip(keys[:found], buffers, strict=False):
            assert buffer == content(key, BLOCK_BYTES), f"wrong bytes of prompt {prompt}"
        return found

    def _keys(self, prompt: int) -> list[Any]:
        return self._space.keys([prompt, *range(4 * BLOCKS)])[:BLOCKS]


def load(pipe: Connection, address: str) -> None:
    """Put and get until told that it is enough. Says how often it was cut off, and how many blocks it got."""
    rng = random.Random(SEED)
    cut_off = got = rounds = 0
    client = BlockingClient(address, timeout_s=5, name="load")
    reader: Reader | None = None
    while not pipe.poll():
        try:
            reader = reader or Reader(client)
            reader.put(rng.randrange(PROMPTS))
            got += reader.get(rng.randrange(PROMPTS))
            rounds += 1
        except TransportError:
            cut_off += 1
            pause(0.005)
    client.close()
    pipe.send((cut_off, got, rounds))


def nvme(admin: BlockingClient) -> dict[str, Any]:
    return dict(admin.stat()["tiers"][1])


def test_a_node_killed_under_load_serves_right_bytes_after_every_start(nodes: Zygote) -> None:
    rng = random.Random(SEED)
    epoch = nodes.start()
    with Child(load, nodes.unix) as child:
        for kill in range(KILLS):
            with closing(nodes.admin()) as admin:
                until(lambda: nvme(admin)["blocks"] > 20 * BLOCKS)
                pause(rng.random() * 0.2)
            nodes.kill()
            later = nodes.start()
            assert later > epoch
            epoch = later
            with closing(nodes.admin()) as admin:
                until(lambda: not nvme(admin)["is_recovering"], "the tier to be taken up")
                reader = Reader(admin)
                hits = sum(reader.get(prompt) for prompt in rng.sample(range(PROMPTS), 40))
                assert hits > 0, f"nothing is served after kill {kill}"
                assert admin.check() == []
        child.say("enough")
        cut_off, got, rounds = child.hear()
        assert child.join() == 0
    assert cut_off >= 1
    assert got > 0
    assert rounds > KILLS
    nodes.stop()
    assert "broken invariant" not in nodes.log
