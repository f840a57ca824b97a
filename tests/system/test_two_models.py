"""The same tokens under two models, or one model in two guises: never one's blocks for the other's."""

from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec
import pytest

from engine_client.blocking import BlockingClient
from kvstore.errors import NamespaceMismatch, NotFound
from kvstore.types import BlockKey
from tests.system.children import Child
from tests.system.nodes import NodeProcess, content, namespace
from tests.system.wire_client import WireClient

TOKENS = list(range(100, 164))
SIZE = 5000
LLAMA = namespace("llama", block_bytes=SIZE)
OTHERS = {
    "model": "qwen", "revision": "r2", "weights_epoch": 1, "dtype": "fp8", "layout": "heads-first", "adapter": "lora",
    "hash": "sha256", "layers": 5, "block_bytes": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[NodeProcess]:
    started = NodeProcess(tmp_path_factory.mktemp("node")).start()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def _nothing_is_left(node) -> Iterator[None]:
    yield
    node.assert_clean()
    node.empty()


@pytest.fixture(params=["unix", "tcp"])
def client(node, request) -> Iterator[BlockingClient]:
    with BlockingClient(node.unix if request.param == "unix" else node.tcp, node.token) as found:
        yield found


@pytest.mark.parametrize("field", OTHERS)
def test_the_same_tokens_in_namespaces_that_differ_in_one_field(client, field):
    other = msgspec.structs.replace(LLAMA, **{field: OTHERS[field]})
    mine, theirs = client.open("llama", LLAMA), client.open(f"other {field}", other)
    keys, its = mine.keys(TOKENS), theirs.keys(TOKENS)
    assert not {*keys} & {*its}
    client.put(mine, keys, [b"m" * SIZE] * 16)
    assert client.match(theirs, its) == 0
    for wrong in (its, keys):
        assert client.match(theirs, wrong) == 0
        assert client.get(theirs, wrong, [bytearray(SIZE) for _ in wrong]) == 0
        with pytest.raises(NotFound):
            client.get_bytes(theirs, wrong[0])
    rows = client.explain(theirs, its, b"".join(token.to_bytes(4, "little") for token in TOKENS))
    assert all("'llama'" in row["reason"] and f"{field}:" in row["reason"] for row in rows)
    client.put(theirs, its, [b"t" * SIZE] * 16)
    for space, chain, letter in ((mine, keys, b"m"), (theirs, its, b"t")):
        buffers = [bytearray(SIZE) for _ in chain]
        assert client.get(space, chain, buffers) == 16
        assert {bytes(buffer) for buffer in buffers} == {letter * SIZE}
    assert client.evict(mine).blocks == 16
    assert client.match(theirs, its) == 16


def test_a_name_that_stands_for_another_model(client):
    client.open("taken", LLAMA)
    with pytest.raises(NamespaceMismatch, match="model: 'llama' here, 'qwen' there"):
        client.open("taken", msgspec.structs.replace(LLAMA, model="qwen"))


def test_two_names_for_one_model(client):
    one, two = client.open("one", LLAMA), client.open("two", LLAMA)
    assert (one.number, one.root) == (two.number, two.root)
    client.put(one, one.keys(TOKENS), [bytes(SIZE)] * 16)
    assert client.match(two, two.keys(TOKENS)) == 16


def test_the_same_key_in_two_namespaces(node, client):
    """No honest client makes one; who does it finds two blocks, not one."""
    key = BlockKey(b"the same key 16b")
    mine, theirs = client.open("llama", LLAMA), client.open("qwen", msgspec.structs.replace(LLAMA, model="qwen"))
    client.put(mine, [key], [b"m" * SIZE])
    assert client.match(theirs, [key]) == 0
    client.put(theirs, [key], [b"t" * SIZE])
    with WireClient(node) as bare:
        assert bare.get(mine.number, [key]) == [b"m" * SIZE]
        assert bare.get(theirs.number, [key]) == [b"t" * SIZE]
    buffer = bytearray(SIZE)
    assert client.get(mine, [key], [buffer]) == 1
    assert buffer == b"m" * SIZE
    client.evict(mine, [key])
    assert client.get(theirs, [key], [buffer]) == 1
    assert buffer == b"t" * SIZE


def serve_a_model(pipe: Connection, node: NodeProcess, model: str) -> None:
    client = BlockingClient(node.unix)
    space = client.open(model, msgspec.structs.replace(LLAMA, model=model))
    buffers = [bytearray(SIZE) for _ in range(16)]
    for turn in range(120):
        keys = space.keys([turn % 30, *TOKENS[1:]])
        blocks = [model.encode() + content(key, SIZE - 5) for key in keys]
        client.put(space, keys, blocks)
        found = client.get(space, keys, buffers)
        assert list(map(bytes, buffers[:found])) == blocks[:found]
    pipe.send("done")


def test_two_models_at_once(node):
    with Child(serve_a_model, node, "llama") as one, Child(serve_a_model, node, "qwen2") as two:
        assert one.hear() == two.hear() == "done"


def test_a_block_of_which_one_part_is_here(client):
    parted = namespace("parted", parts=3)
    parts = [client.open("parted", parted, part) for part in range(3)]
    for writers in (1, 2, 3):
        space = parts[writers - 1]
        client.put(space, space.keys(TOKENS), [bytes([writers]) * 100] * 16)
        whole = 16 if writers == 3 else 0
        for reader, its in enumerate(parts):
            buffers = [bytearray(100) for _ in range(16)]
            assert client.match(its, its.keys(TOKENS)) == whole
            if whole:
                assert client.get(its, its.keys(TOKENS), buffers) == 16
                assert {bytes(buffer) for buffer in buffers} == {bytes([reader + 1]) * 100}
