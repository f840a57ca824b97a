"""Two nodes that share a bucket: what one stored the other serves, also after the first is gone."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine_client.blocking import BlockingClient
from kvstore.prefix import Namespace
from tests.system.nodes import NodeProcess, until

NAMESPACE = Namespace(model="m", dtype="u8", layout="bytes", block_tokens=16, layers=1)
BLOCK_BYTES = 96 << 10
BLOCKS = 24
TOKENS = np.arange(16 * BLOCKS, dtype=np.uint32)
CONTENTS = [np.random.default_rng(number).bytes(BLOCK_BYTES) for number in range(BLOCKS)]


def options(bucket: Path, codec: str) -> list[str]:
    return [
        f"--tiers.object.url=file://{bucket}",
        f"--tiers.object.codec={codec}",
        "--tiers.object.write=through",
        "--tiers.nvme.admission=all",
    ]


@pytest.fixture(params=["none", "zstd"])
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[NodeProcess]]:
    """Both of one tenant with one secret, or neither could name the other's blocks."""
    made = []
    for name in ("first", "second"):
        (tmp_path / name / "run").mkdir(parents=True)
        if made:
            shutil.copy(tmp_path / "first" / "run" / "token", tmp_path / name / "run" / "token")
        node = NodeProcess(tmp_path / name, *options(tmp_path / "bucket", request.param))
        made.append(node.start())
    yield made
    for node in made:
        if node.is_alive:
            node.stop()


def test_a_block_put_into_one_node_is_got_from_the_other(nodes):
    first, second = nodes
    with BlockingClient(first.unix) as one:
        space = one.open("shared", NAMESPACE)
        keys = space.keys(TOKENS)
        assert one.put(space, keys, CONTENTS).stored == BLOCKS
        until(lambda: one.stat()["tiers"][-1]["demoted_blocks"] == BLOCKS, "all blocks to be in the bucket")
    first.kill()
    with BlockingClient(second.unix, timeout_s=20) as two:
        space = two.open("shared", NAMESPACE)
        until(lambda: two.match(space, keys) == BLOCKS, "the other node to learn of them")
        buffers = [bytearray(BLOCK_BYTES) for _ in keys]
        assert two.get(space, keys, buffers) == BLOCKS
        assert buffers == CONTENTS
        (row,) = [row for row in two.stat()["tiers"] if row["tier"] == "object"]
        assert row["promoted_blocks"] == BLOCKS


def test_what_only_the_bucket_has_is_a_miss_when_it_is_gone(nodes, tmp_path):
    first, second = nodes
    with BlockingClient(first.unix) as one, BlockingClient(second.unix) as two:
        space = one.open("shared", NAMESPACE)
        keys = space.keys(TOKENS)
        one.put(space, keys, CONTENTS)
        until(lambda: one.stat()["tiers"][-1]["demoted_blocks"] == BLOCKS, "all blocks to be in the bucket")
        there = two.open("shared", NAMESPACE)
        until(lambda: two.match(there, keys) == BLOCKS, "the other node to learn of them")
        shutil.rmtree(tmp_path / "bucket")
        buffers = [bytearray(BLOCK_BYTES) for _ in keys]
        assert two.get(there, keys, buffers) == 0
        assert two.put(there, keys, CONTENTS).stored == BLOCKS
        assert two.get(there, keys, buffers) == BLOCKS
        assert buffers == CONTENTS
