"""How a cluster looks to clients, on the command line and over REST: a real node whose cluster is told, not there."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from engine_client.blocking import BlockingClient
from engine_client.client import Client
from engine_client.steps import OpenSpace
from kvstore import wire
from kvstore.errors import InvalidRequest, ProtocolError
from kvstore.types import BlockKey
from kvstore.wire_cluster import Nodes, Replicate, Replicated, Roster, Whereabout, Whereabouts
from server.commands.locate import runs
from server.session import Session
from tests.system.nodes import content, namespace
from tests.system.test_cli import Shell
from tests.system.test_rest import client_of, problem

SIZE = 4096
TOKENS = list(range(16))  # four blocks
IDS = ",".join(map(str, TOKENS))
ROWS = [
    {
        "name": "node-1",
        "epoch": 1_700_000_000_000,
        "address": "tcp://10.0.0.1:7401",
        "condition": "serving",
        "labels": {"zone": "a", "rack": "3"},
        "capacity_bytes": 1 << 30,
        "used_bytes": 1 << 29,
        "blocks": 1234,
        "copies": 56,
        "load": 0.25,
        "latency_ms": 0.0,
    },
    {
        "name": "node-2",
        "epoch": 1_700_000_000_000,
        "address": "tcp://10.0.0.2:7401",
        "condition": "draining",
        "latency_ms": 0.25,
        "trouble": "it timed out",
        "bytes_per_s": 1.5 * (1 << 30),
    },
    {"name": "dram", "epoch": 1},
]
HOLDERS = [{"node-1": ["dram", "nvme"]}, {"node-1": ["dram", "nvme"]}, {"node-2": ["dram"]}, {}]


class Told:
    """Answers what is asked about a cluster, and keeps every request. The rest goes to the node's own session."""

    def __init__(self) -> None:
        self.asked: list[wire.Message] = []
        self.is_clustered = True
        self.trouble = ""
        self.short = self.left = 0
        self.problems: list[str] = []
        self.rows: list[dict[str, Any]] = ROWS
        self.holders: list[dict[str, list[str]]] = HOLDERS

    def answer(self, request: Any) -> wire.Message | None:
        self.asked.append(request)
        if not self.is_clustered:
            return None
        match request:
            case Nodes():
                return Roster(request.id, "node-1", self.trouble, self.rows)
            case Whereabouts():
                return Whereabout(request.id, self.holders[: len(request.keys) // 16])
            case Replicate():
                blocks = 1000 if request.whole else len(request.keys) // 16
                return Replicated(request.id, blocks, blocks, self.short)
            case wire.Drain(node=node) if node:
                return wire.Drained(request.id, 7, self.left)
            case wire.Check(cluster=True):
                return wire.Checked(request.id, self.problems)
        return None

    def of(self, kind: type[Any]) -> list[Any]:
        return [request for request in self.asked if isinstance(request, kind)]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told, own = Told(), Session.handle

    def handle(session: Session, request: wire.Message) -> Any:
        reply = told.answer(request)
        if reply is None and told.is_clustered and isinstance(request, wire.Open):
            request = wire.Open(request.id, request.name, request.namespace)
        return own(session, request) if reply is None else reply

    monkeypatch.setattr(Session, "handle", handle)
    return told


@pytest.fixture
def node(told: Told, live_node: Callable[..., Any]) -> Any:
    return live_node({})


@pytest.fixture
def alone(told: Told, node: Any) -> Any:
    """A node in no cluster."""
    told.is_clustered = False
    return node


@pytest.fixture
def cairn(node: Any) -> Shell:
    return Shell(CAIRN_RUN_DIR=node.config.node.run_dir)


@pytest.fixture(params=["unix", "tcp"])
def client(node: Any, request: pytest.FixtureRequest) -> Iterator[BlockingClient]:
    with BlockingClient(node.node.addresses[request.param], node.token) as client:
        yield client


@pytest.fixture
def rest(node: Any) -> Iterator[httpx.Client]:
    with client_of(node) as client:
        yield client


def stored(client: BlockingClient, blocks: int) -> tuple[OpenSpace, list[BlockKey]]:
    """A namespace in which the first of four blocks are stored, and the keys of all."""
    space = client.open("llama", namespace())
    keys = space.keys(TOKENS)
    client.put(space, keys[:blocks], [content(key, SIZE) for key in keys[:blocks]])
    return space, keys


# The key before


def test_a_get_says_which_key_is_before_what_it_asks_the_node_for(told, client):
    space, keys = stored(client, 2)
    buffers = [bytearray(SIZE) for _ in keys]
    assert client.get(space, keys, buffers, wait_s=0.01) == 2
    asked = told.of(wire.Acquire)[-1]
    before = {len(keys): b"", len(keys) - 2: keys[1]}  # over TCP all is asked for
    assert asked.parent == before[len(asked.keys) // 16]
    assert bytes(buffers[1]) == content(keys[1], SIZE)


def test_a_call_for_the_middle_of_a_chain_says_which_key_is_before_it(told, client):
    space, keys = stored(client, 2)
    assert client.get(space, keys[2:], [bytearray(SIZE) for _ in keys[2:]], wait_s=0.01, parent=keys[1]) == 0
    assert told.of(wire.Acquire)[-1].parent == keys[1]
    client.promote(space, keys[2:], parent=keys[1])
    assert told.of(wire.Promote)[-1].parent == keys[1]
    client.match(space, keys[2:], parent=keys[1])
    assert [request.parent for request in told.of(wire.Match)] in ([keys[1]], [])  # a whole index needs no node
    if client.address.path:
        assert client.acquire(space, keys[3:], lease_s=1, parent=keys[2]) is None
        assert told.of(wire.Acquire)[-1].parent == keys[2]


def test_the_client_for_asyncio_says_the_same(told, node):
    async def work() -> None:
        async with Client(node.node.addresses["tcp"], node.token) as client:
            space = await client.open("llama", namespace(), replicas=3, through=True)
            keys = space.keys(TOKENS)
            await client.match(space, keys[1:], parent=keys[0])
            await client.get(space, keys[1:], [bytearray(SIZE)] * 3, parent=keys[0])
            await client.promote(space, keys[1:], parent=keys[0])
            assert (await client.nodes()).rows == ROWS
            assert await client.whereabouts(space, keys) == HOLDERS
            assert (await client.replicate(space, keys, 2)).copied == 4
            assert (await client.drain(node="node-2")).blocks == 7
            assert await client.check(cluster=True) == []
            assert await client.check() == []
            assert (await client.drain("dram")).left == 0

    asyncio.run(work())
    parents = [told.of(kind)[-1].parent for kind in (wire.Match, wire.Acquire, wire.Promote)]
    assert len(set(parents)) == 1
    assert parents[0]
    assert [(request.replicas, request.through) for request in told.of(wire.Open)] == [(3, True)]


# What a client asks of a cluster


def test_a_client_asks_a_node_about_its_cluster(told, client):
    space, keys = stored(client, 0)
    assert client.nodes() == Roster(client.nodes().id - 1, "node-1", "", ROWS)
    assert client.whereabouts(space, keys[1:2], keys[0]) == HOLDERS[:1]
    assert told.of(Whereabouts)[-1].parent == keys[0]
    assert client.replicate(space, keys[:3], 2).blocks == 3
    assert client.replicate(space, None, 2).blocks == 1000
    assert client.drain("", node="node-2").blocks == 7
    told.problems = ["node-2: a slab lies twice"]
    assert client.check(cluster=True) == ["node-2: a slab lies twice"]


def test_copies_that_a_namespace_shall_have_are_said_again_on_a_new_connection(told, client, monkeypatch):
    space = client.open("llama", namespace(), replicas=2, through=True)
    other = client.find("llama")

    def refuse(session: Session, request: wire.Message) -> Any:
        raise ProtocolError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(Session, "handle", refuse)
        with pytest.raises(ProtocolError):
            client.stat()
    told.asked.clear()
    client.stat()
    assert [(request.name, request.replicas, request.through) for request in told.of(wire.Open)] == [
        (space.name, 2, True),
        (other.name, -1, False),
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda client, space, keys: client.replicate(space, keys, 0),
        lambda client, space, keys: client.replicate(space, keys, 1 << 20),
        lambda client, space, keys: client.drain(),
        lambda client, space, keys: client.drain("dram", "node-2"),
        lambda client, space, keys: client.open("other", space.namespace, replicas=-2),
        lambda client, space, keys: client.open("other", space.namespace, replicas=1, through=True),
    ],
    ids=["no copies", "a million copies", "a drain of nothing", "a drain of two", "-2 replicas", "none to wait for"],
)
def test_what_makes_no_sense_is_refused_before_the_node_is_asked(told, client, call):
    space, keys = stored(client, 0)
    told.asked.clear()
    with pytest.raises(InvalidRequest):
        call(client, space, keys)
    assert told.asked == []


def test_a_client_of_a_node_in_no_cluster_is_told_so(alone, client):
    space, keys = stored(client, 0)
    for ask in (client.nodes, lambda: client.whereabouts(space, keys), lambda: client.replicate(space, keys, 2)):
        with pytest.raises(InvalidRequest, match="cluster"):
            ask()
    assert client.stat()["tiers"], "it goes on with the node"


# On the command line


def define(cairn: Shell, *options: str) -> str:
    fields = ["--model=m", "--dtype=bfloat16", "--layout=plain", "--block-tokens=4"]
    cairn.ok("namespace", "define", "llama", *fields, *options)
    return "llama"


def test_nodes_are_shown_with_what_is_known_of_them(told, cairn):
    told.trouble = "etcd does not answer"
    lines = cairn.ok("nodes").text.splitlines()
    assert lines[1].split()[:2] == ["node-1", "*"]
    for found in ("serving", "10.0.0.1:7401", "a/3", "512.0 MiB", "1.0 GiB", "1,234", "56", "25%"):
        assert found in lines[1]
    for found in ("draining", "0.25 ms", "1.5 GiB/s"):
        assert found in lines[2]
    assert lines[-2:] == ["etcd does not answer", "node-2: it timed out"]
    row = cairn.ok("nodes", "--json").row
    assert row == {"node": "node-1", "trouble": "etcd does not answer", "nodes": ROWS}


def test_what_is_known_of_no_node_has_no_column(told, cairn):
    told.rows = [{"name": "node-1", "epoch": 1, "labels": {"host": "h"}}]
    assert cairn.ok("nodes").text.splitlines()[0].split() == ["node", "condition", "age"]


def test_runs_of_blocks_at_the_same_nodes_are_one_line(cairn):
    space = define(cairn)
    lines = cairn.ok("locate", space, "--prompt-ids", IDS).text.splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["0-1", "2", "node-1", "dram+nvme"],
        ["2", "1", "node-2", "dram"],
        ["3", "1", "nobody"],
    ]
    assert lines[4] == "3 of 4 blocks are in the cluster"
    rows = cairn.ok("locate", space, "--prompt-ids", IDS, "--json").rows
    assert [row["nodes"] for row in rows] == HOLDERS
    assert [blocks for blocks, _ in runs(HOLDERS)] == [range(2), range(2, 3), range(3, 4)]


def test_blocks_in_the_middle_of_a_chain_are_located_with_the_key_before(told, cairn):
    keys = [row["key"] for row in cairn.ok("locate", define(cairn), "--prompt-ids", IDS, "--json").rows]
    cairn.ok("locate", "llama", keys[1], "--parent", keys[0])
    assert told.of(Whereabouts)[-1].parent.hex() == keys[0]
    assert cairn("locate", "llama", keys[1], "--parent", "00").code == 2


def test_blocks_that_nobody_has_are_a_failure(told, cairn):
    told.holders = [{}] * 4
    outcome = cairn("locate", define(cairn), "--prompt-ids", IDS)
    assert outcome.code == 1
    assert "0 of 4 blocks" in outcome.text


def test_blocks_are_replicated_in_steps(told, cairn, monkeypatch):
    monkeypatch.setattr("server.commands.replicate.STEP_BLOCKS", 3)
    row = cairn.ok("replicate", define(cairn), "--prompt-ids", IDS, "--copies", "2", "--json").row
    assert row == {"namespace": "llama", "copies": 2, "blocks": 4, "copied": 4, "short": 0}
    assert [(len(request.keys) // 16, request.whole) for request in told.of(Replicate)] == [(3, False), (1, False)]


def test_a_namespace_is_replicated_and_what_falls_short_is_a_failure(told, cairn):
    assert cairn.ok("replicate", define(cairn), "--copies", "3").text == "made 1,000 copies of 1,000 blocks\n"
    assert told.of(Replicate)[-1].whole
    told.short = 1
    outcome = cairn("replicate", "llama", "--copies", "3")
    assert outcome.code == 1
    assert outcome.text == "made 1,000 copies of 1,000 blocks; 1 block with fewer than 3\n"


def test_a_node_is_drained_by_its_name(told, cairn):
    assert cairn.ok("drain", "node-2", "--json").row == {"node": "node-2", "blocks": 7, "left": 0}
    told.left = 2
    outcome = cairn("drain", "node-2")
    assert (outcome.code, outcome.text) == (1, "7 blocks went; 2 blocks left\n")
    assert [(request.tier, request.node) for request in told.of(wire.Drain)] == [("", "node-2")] * 2


def test_what_is_called_like_a_tier_is_the_tier_unless_said_otherwise(told, cairn):
    assert cairn.ok("drain", "dram", "--json").row == {"tier": "dram", "blocks": 0, "left": 0}
    assert cairn.ok("drain", "dram", "--node", "--json").row == {"node": "dram", "blocks": 7, "left": 0}
    outcome = cairn("drain", "drma")
    assert outcome.code == 2
    assert "'drma' is no tier for this: hbm, dram, nvme; and there is no node 'drma'" in outcome.err
    assert "is no tier" not in cairn("drain", "drma", "--node").err


def test_all_nodes_are_checked(told, cairn):
    assert cairn.ok("check", "--cluster").text == "all is well on 3 nodes\n"
    told.problems = ["node-2 does not answer"]
    outcome = cairn("check", "--cluster", "--json")
    assert outcome.code == 1
    assert outcome.row == {"ok": False, "problems": told.problems, "nodes": ["node-1", "node-2", "dram"]}
    assert cairn.ok("check").text == "all is well\n"


def test_top_shows_the_cluster_if_there_is_one(told, cairn):
    view = cairn.ok("top", "--once", "--interval", "10ms", "--json").row
    assert view["cluster"]["nodes"] == ROWS
    assert "node-2" in cairn.ok("top", "--once", "--interval", "10ms").text
    told.is_clustered = False
    assert "cluster" not in cairn.ok("top", "--once", "--interval", "10ms", "--json").row


def test_a_miss_is_explained_by_the_nodes_that_have_the_block(told, cairn):
    rows = cairn.ok("explain", define(cairn), "--prompt-ids", IDS, "--json").rows
    assert [row["nodes"] for row in rows] == HOLDERS
    assert "; on node-1 dram+nvme" in cairn.ok("explain", "llama", "--prompt-ids", IDS).text
    told.is_clustered = False
    assert "nodes" not in cairn.ok("explain", "llama", "--prompt-ids", IDS, "--json").rows[0]


def test_a_namespace_is_defined_with_its_copies(told, cairn):
    define(cairn, "--replicas", "2", "--through")
    assert [(request.replicas, request.through) for request in told.of(wire.Open)] == [(2, True)]


@pytest.mark.parametrize(
    "words",
    [
        ["nodes"],
        ["locate", "llama", "--prompt-ids", IDS],
        ["replicate", "llama", "--copies", "2"],
        ["drain", "node-2"],
        ["drain", "dram", "--node"],
        ["namespace", "define", "n", "--model=m", "--dtype=d", "--layout=l", "--block-tokens=4", "--replicas=2"],
        ["check", "--cluster"],
    ],
    ids=" ".join,
)
def test_a_question_about_a_cluster_to_a_node_in_none_ends_with_2(alone, cairn, words):
    define(cairn)
    outcome = cairn(*words, "--json")
    assert outcome.code == 2
    assert "cluster" in outcome.err
    assert outcome.row["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    "words",
    [
        ["locate", "llama"],
        ["locate", "llama", "nothex"],
        ["locate", "llama", "00" * 16, "--prompt-ids", "1"],
        ["replicate", "llama"],
        ["replicate", "llama", "--copies", "0"],
        ["replicate", "llama", "--copies", "many"],
        ["replicate", "llama", "00" * 16, "--prompt-ids", "1", "--copies", "2"],
        ["replicate", "llama", "nothex", "--copies", "2"],
        ["check", "--cluster", "--data-dir", "/nowhere"],
        ["drain", "object"],
        ["namespace", "define", "n", "--model=m", "--dtype=d", "--layout=l", "--block-tokens=4", "--through"],
        ["namespace", "define", "n", "--model=m", "--dtype=d", "--layout=l", "--block-tokens=4", "--replicas=-2"],
    ],
    ids=" ".join,
)
def test_bad_input_about_a_cluster_ends_with_2(cairn, words):
    define(cairn)
    assert cairn(*words).code == 2


# Over REST


FIELDS = {"model": "m", "dtype": "bfloat16", "layout": "plain", "block_tokens": 4, "layers": 1}


def test_the_cluster_is_shown_over_rest(told, rest):
    assert rest.get("/v1/cluster").json() == {"node": "node-1", "trouble": "", "nodes": ROWS}
    told.problems = ["node-2 does not answer"]
    found = rest.get("/v1/cluster/check").json()
    assert found == {"problems": ["node-2 does not answer"], "nodes": ["node-1", "node-2", "dram"]}


def test_blocks_are_located_and_replicated_over_rest(told, rest):
    assert rest.put("/v1/namespaces/llama?replicas=2&through=true", json=FIELDS).status_code == 201
    assert [(request.replicas, request.through) for request in told.of(wire.Open)] == [(2, True)]
    found = rest.post("/v1/namespaces/llama/whereabouts", json={"tokens": TOKENS}).json()["blocks"]
    assert [row["nodes"] for row in found] == HOLDERS
    keys = [row["key"] for row in found]
    done = rest.post("/v1/cluster/replicate", json={"namespace": "llama", "keys": keys[:2], "copies": 3})
    assert done.json() == {"blocks": 2, "copied": 2, "short": 0}
    done = rest.post("/v1/cluster/replicate", json={"namespace": "llama", "tokens": TOKENS, "copies": 3})
    assert done.json()["blocks"] == 4
    done = rest.post("/v1/cluster/replicate", json={"namespace": "llama", "all": True, "copies": 3})
    assert done.json()["blocks"] == 1000
    assert [(request.copies, request.whole) for request in told.of(Replicate)] == [(3, False), (3, False), (3, True)]


def test_a_chain_that_goes_on_says_its_key_before_over_rest(told, rest):
    rest.put("/v1/namespaces/llama", json=FIELDS)
    keys = rest.post("/v1/namespaces/llama/match", json={"tokens": TOKENS}).json()["keys"]
    before = {"parent": keys[0]}
    for verb, kind in (("match", wire.Match), ("promote", wire.Promote), ("whereabouts", Whereabouts)):
        response = rest.post(f"/v1/namespaces/llama/{verb}", params=before, json={"keys": keys[1:]})
        assert response.status_code == 200, response.text
        assert told.of(kind)[-1].parent.hex() == keys[0]
    assert rest.get(f"/v1/namespaces/llama/blocks/{keys[1]}", params=before).status_code == 404
    assert told.of(wire.Acquire)[-1].parent.hex() == keys[0]


def test_a_node_is_drained_over_rest(told, rest):
    assert rest.post("/v1/cluster/drain", json={"node": "node-2"}).json() == {"blocks": 7, "left": 0}
    problem(rest.post("/v1/cluster/drain", json={"node": "node-9"}), 404, "not_found")
    problem(rest.post("/v1/cluster/drain", json={"node": ""}), 422, "invalid_request")


@pytest.mark.parametrize("copies", [0, 1 << 20, "2", None])
def test_copies_that_cannot_be_are_refused_over_rest(rest, copies):
    rest.put("/v1/namespaces/llama", json=FIELDS)
    problem(
        rest.post("/v1/cluster/replicate", json={"namespace": "llama", "all": True, "copies": copies}),
        422,
        "invalid_request",
    )


def test_commits_that_would_wait_for_no_copy_are_refused_over_rest(told, rest):
    problem(rest.put("/v1/namespaces/llama?through=true", json=FIELDS), 409, "conflict")
    assert told.of(wire.Open) == []


def test_a_node_in_no_cluster_says_so_over_rest(alone, rest):
    rest.put("/v1/namespaces/llama", json=FIELDS)
    problem(rest.get("/v1/cluster"), 409, "conflict")
    problem(rest.get("/v1/cluster/check"), 409, "conflict")
    problem(rest.post("/v1/cluster/drain", json={"node": "node-2"}), 409, "conflict")
    problem(rest.post("/v1/cluster/replicate", json={"namespace": "llama", "all": True, "copies": 2}), 409, "conflict")
    problem(rest.post("/v1/namespaces/llama/whereabouts", json={"tokens": TOKENS}), 409, "conflict")
    problem(rest.put("/v1/namespaces/other?replicas=2", json=FIELDS), 409, "conflict")
