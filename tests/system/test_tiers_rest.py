"""The REST interface of a node with tiers below DRAM: where blocks are, what is loaded, and what moves them."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from xxhash import xxh3_64_hexdigest

from kvstore.metrics import METRICS
from kvstore.tiers.nvme import NvmeTier
from kvstore.types import NVME
from tests.system.test_rest import (
    FIELDS,
    KEY,
    MIB,
    OTHER,
    TOKENS,
    begin_put,
    body_of,
    client_of,
    held,
    path,
    problem,
    raw,
    tenants,
)

BODY = body_of(10_000)
ETAG = f'"{xxh3_64_hexdigest(BODY)}"'


def below(folder: Path) -> dict[str, str]:
    return {
        "tiers.nvme.path": str(folder / "nvme"),
        "tiers.nvme.capacity": "16MiB",
        "tiers.nvme.slab": "2MiB",
        "tiers.nvme.io": "posix",
        "tiers.object.url": f"file://{folder}/bucket",
    }


def wait_for_disk(node: Any) -> None:
    """Until blocks can be written there."""
    store = node.node.store
    node.wait_until(lambda: not store.demotion.is_paused and store.sizings[NVME].is_reached)


@pytest.fixture
def node(live_node: Callable[..., Any], tmp_path: Path) -> Any:
    node = live_node(below(tmp_path))
    wait_for_disk(node)
    return node


@pytest.fixture
def client(node: Any) -> Iterator[httpx.Client]:
    with client_of(node) as client:
        assert client.put("/v1/namespaces/ns", json=FIELDS).status_code == 201
        yield client


def demote(client: httpx.Client, *keys: str, tier: str = "nvme", evict: bool = True) -> dict[str, Any]:
    which = {"keys": list(keys)} if keys else {"all": True}
    response = client.post("/v1/namespaces/ns/demote", json={**which, "tier": tier, "evict": evict})
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.fixture
def lower(client: httpx.Client, request: pytest.FixtureRequest) -> str:
    """A block lies in this tier, and not in DRAM."""
    tier = str(getattr(request, "param", "nvme"))
    assert client.put(path(), content=BODY).status_code == 201
    assert demote(client, KEY, tier=tier) == {"written": 1, "evicted": 1}
    return tier


def lies_in(client: httpx.Client, key: str = KEY) -> str:
    return str(client.head(path(key)).headers.get("x-cairn-tier", ""))


BOTH = pytest.mark.parametrize("lower", ["nvme", "object"], indirect=True)


@BOTH
def test_a_block_of_a_lower_tier_comes_as_it_was_put(client, node, lower):
    got = client.get(path())
    assert (got.status_code, got.content, got.headers["etag"]) == (200, BODY, ETAG)
    assert lies_in(client) == "dram"
    node.wait_until(lambda: not held(node))


@BOTH
def test_a_range_of_a_block_of_a_lower_tier(client, node, lower):
    got = client.get(path(), headers={"Range": "bytes=10-19"})
    assert (got.status_code, got.content) == (206, BODY[10:20])
    problem(client.get(path(), headers={"Range": "bytes=10000-"}), 416, "range_not_satisfiable")
    node.wait_until(lambda: not held(node))


@BOTH
def test_head_says_where_a_block_is_and_loads_nothing(client, node, lower):
    head = client.head(path())
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "10000", b"")
    assert head.headers["x-cairn-tier"] == lower
    assert head.headers.get("etag") == (ETAG if lower == "nvme" else None)
    assert node.call(lambda: dict(node.node.store.counters.promoted_blocks)) == {}


@BOTH
def test_who_has_a_block_of_a_lower_tier_is_not_sent_it_again(client, node, lower):
    assert client.get(path(), headers={"If-None-Match": ETAG}).status_code == 304
    assert lies_in(client) == ("nvme" if lower == "nvme" else "dram")  # what a bucket has, nobody knows the ETag of
    node.wait_until(lambda: not held(node))


def test_a_head_knows_the_etag_of_what_is_on_disk(client, lower):
    for known, status in ((ETAG, 304), ("*", 304), ('"0123456789abcdef"', 200)):
        assert client.head(path(), headers={"If-None-Match": known}).status_code == status


@BOTH
def test_all_that_looks_sees_the_lower_tier(client, lower):
    assert client.post("/v1/namespaces/ns/exists", json={"keys": [KEY, OTHER]}).json() == {"exists": [True, False]}
    assert client.post("/v1/namespaces/ns/match", json={"keys": [KEY]}).json()["matched_blocks"] == 1
    (row,) = client.post("/v1/namespaces/ns/explain", json={"keys": [KEY]}).json()["blocks"]
    assert (row["hit"], row["tier"], row["bytes"]) == (True, lower, 10_000)
    assert row["reason"] == f"on {lower}: loaded when asked for"


def test_a_load_that_may_take_no_time_is_refused_for_now(client, lower):
    refused = client.get(path(), params={"load_s": "0"})
    document = problem(refused, 503, "deadline_exceeded")
    assert "is in tier nvme, and was not loaded within 0 s" in document["detail"]
    assert refused.headers["retry-after"] == "1"
    assert client.get(path(), params={"load_s": 0.5}).content == BODY


def test_a_load_that_hangs_is_given_up_and_leaves_nothing_held(live_node, tmp_path, monkeypatch):
    node = live_node({**below(tmp_path), "rest.request_timeout": "2s"})
    wait_for_disk(node)
    with client_of(node) as client:
        client.put("/v1/namespaces/ns", json=FIELDS)
        client.put(path(), content=BODY)
        demote(client, KEY)
        load, gate = NvmeTier.load, threading.Event()

        def late(self: NvmeTier, slot: Any, buffers: Any) -> None:
            gate.wait(10)
            load(self, slot, buffers)

        monkeypatch.setattr(NvmeTier, "load", late)
        problem(client.get(path(), params={"load_s": 0.2}), 503, "deadline_exceeded")
        gate.set()
        node.wait_until(lambda: node.node.store.promotion.is_idle)
        assert client.get(path()).content == BODY


@pytest.mark.parametrize("load_s", ["-1", "soon", "nan", "inf", "1_0", "3601", "", "0x1"])
def test_a_time_to_load_that_makes_no_sense(client, lower, load_s):
    document = problem(client.get(path(), params={"load_s": load_s}), 422, "invalid_request")
    assert document["errors"][0]["location"] == "query.load_s"


def test_a_disk_that_fails_makes_its_blocks_absent_and_leaves_nothing_held(client, node, lower, monkeypatch):
    def failing(self: NvmeTier, slot: Any, buffers: Any) -> None:
        raise OSError(errno.EIO, "a bad block")

    monkeypatch.setattr(NvmeTier, "load", failing)
    problem(client.get(path()), 404, "not_found")
    assert client.put(path(OTHER), content=BODY).status_code == 201
    assert client.get(path(OTHER)).content == BODY
    node.wait_until(lambda: node.node.store.promotion.is_idle and not held(node))
    assert client.get("/v1/tiers/nvme").json()["failures"]["read"] >= 1


def test_a_block_that_is_damaged_on_disk_is_not_found_any_more(client, node, lower, tmp_path):
    for slab in (tmp_path / "nvme" / "slabs").glob("*.slab"):
        data = bytearray(slab.read_bytes())
        start = data.find(BODY[:64])
        if start >= 0:
            data[start] ^= 1
            slab.write_bytes(data)
    problem(client.get(path()), 404, "not_found")
    assert lies_in(client) == ""
    assert client.get("/v1/stats").json()["counters"]["corrupt_blocks"] == 1


def test_a_part_in_dram_and_a_part_on_disk_make_a_block(client):
    client.put("/v1/namespaces/ns2", json={**FIELDS, "parts": 2, "model": "halves"})
    for part in ("0000", "0100"):
        assert client.put(path(KEY + part, "ns2"), content=BODY).status_code == 201
    moved = client.post("/v1/namespaces/ns2/demote", json={"keys": [KEY + "0100"], "tier": "nvme", "evict": True})
    assert moved.json() == {"written": 1, "evicted": 1}
    assert client.head(path(KEY + "0000", "ns2")).headers["x-cairn-tier"] == "dram"
    (row,) = client.post("/v1/namespaces/ns2/explain", json={"keys": [KEY + "0000"]}).json()["blocks"]
    assert row["reason"] == "here, another part of its block is loaded when asked for"
    assert client.get(path(KEY + "0000", "ns2")).content == BODY
    assert client.head(path(KEY + "0100", "ns2")).headers["x-cairn-tier"] == "dram"


def test_a_part_on_disk_is_no_block_without_the_others(client):
    client.put("/v1/namespaces/ns2", json={**FIELDS, "parts": 2, "model": "halves"})
    assert client.put(path(KEY + "0000", "ns2"), content=BODY).status_code == 201
    client.post("/v1/namespaces/ns2/demote", json={"keys": [KEY + "0000"], "tier": "nvme", "evict": True})
    assert client.head(path(KEY + "0000", "ns2")).status_code == 404
    (row,) = client.post("/v1/namespaces/ns2/explain", json={"keys": [KEY + "0000"]}).json()["blocks"]
    assert (row["hit"], row["tier"]) == (False, "")


@BOTH
def test_what_is_not_sent_is_let_go_though_the_tenant_s_session_goes_on(client, node, lower):
    with raw(node) as lasting:
        begin_put(lasting, node, OTHER, 1000, b"some")
        node.wait_until(lambda: len(held(node)) == 1)
        problem(client.get(path(), headers={"Range": "bytes=10000-"}), 416, "range_not_satisfiable")
        assert client.get(path(), headers={"If-None-Match": ETAG}).status_code == 304
        assert client.get(path()).content == BODY
        node.wait_until(lambda: len(held(node)) == 1)


# Moving


def test_demoting_keeps_the_block_in_dram_unless_it_is_evicted(client):
    client.put(path(), content=BODY)
    assert demote(client, KEY, evict=False) == {"written": 1, "evicted": 0}
    assert lies_in(client) == "dram"
    assert demote(client, evict=True) == {"written": 0, "evicted": 1}
    assert lies_in(client) == "nvme"


def test_promoting_loads_without_being_asked_for_the_bytes(client, node, lower):
    promoted = client.post("/v1/namespaces/ns/promote", json={"keys": [KEY, OTHER]})
    assert promoted.json() == {"loading": 1}
    node.wait_until(lambda: node.node.store.promotion.is_idle)
    assert lies_in(client) == "dram"
    assert client.post("/v1/namespaces/ns/promote", json={"keys": [KEY], "load_seconds": 0.5}).json() == {"loading": 0}


def test_a_block_is_deleted_from_one_tier(client):
    client.put(path(), content=BODY)
    demote(client, KEY, evict=False)
    assert client.delete(path(), params={"tier": "dram"}).status_code == 204
    assert lies_in(client) == "nvme"
    problem(client.delete(path(), params={"tier": "dram"}), 404, "not_found")
    problem(client.delete(path(), params={"tier": "tape"}), 404, "not_found")
    assert client.delete(path(), params={"tier": "nvme"}).status_code == 204
    assert lies_in(client) == ""


def test_many_blocks_are_deleted_from_one_tier(client):
    for key in (KEY, OTHER):
        client.put(path(key), content=BODY)
    demote(client, evict=False)
    url = "/v1/namespaces/ns"
    assert client.post(f"{url}/evict", params={"tier": "nvme"}, json={"keys": [KEY]}).json()["blocks"] == 1
    assert client.delete(f"{url}/blocks", params={"tier": "dram"}).json()["blocks"] == 2
    assert (lies_in(client), lies_in(client, OTHER)) == ("", "nvme")
    problem(client.delete(f"{url}/blocks", params={"tier": "tape"}), 404, "not_found")


def test_a_tier_is_drained(client, lower):
    assert client.post("/v1/tiers/nvme/drain").json() == {"blocks": 1, "left": 0}
    assert client.get("/v1/tiers/nvme").json()["blocks"] == 0
    problem(client.post("/v1/tiers/tape/drain"), 404, "not_found")
    problem(client.post("/v1/tiers/object/drain"), 404, "not_found")


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        ("demote", {"keys": [KEY]}),
        ("demote", {"keys": [KEY], "tier": "dram"}),
        ("demote", {"tier": "nvme"}),
        ("demote", {"all": False, "tier": "nvme"}),
        ("promote", {"keys": [KEY], "load_seconds": 0}),
        ("promote", {}),
    ],
)
def test_what_cannot_be_moved_is_refused(client, operation, body):
    problem(client.post(f"/v1/namespaces/ns/{operation}", json=body), 422, "invalid_request")


def test_a_node_without_the_tier_says_so(live_node):
    with client_of(live_node()) as client:
        client.put("/v1/namespaces/ns", json=FIELDS)
        client.put(path(), content=BODY)
        problem(client.post("/v1/namespaces/ns/demote", json={"keys": [KEY], "tier": "nvme"}), 404, "not_found")
        assert client.post("/v1/namespaces/ns/promote", json={"keys": [KEY]}).json() == {"loading": 0}


def test_who_may_not_move_blocks(live_node):
    node = live_node(tenants({"may_write": "false"}, {"admin": "true"}))
    with client_of(node, TOKENS[0]) as client:
        client.put("/v1/namespaces/ns", json=FIELDS)
        problem(client.post("/v1/namespaces/ns/demote", json={"all": True, "tier": "nvme"}), 403, "forbidden")
        problem(client.post("/v1/tiers/dram/drain"), 403, "forbidden")
        assert client.get("/v1/tiers/dram").json()["hit_blocks"] is None
    with client_of(node, TOKENS[1]) as client:
        assert client.get("/v1/tiers/dram").json()["hit_blocks"] == 0


# Looking


def test_tiers_say_what_they_are_and_how_they_do(client, node, lower):
    client.get(path())
    client.get(path())
    rows = {row["tier"]: row for row in client.get("/v1/tiers").json()["tiers"]}
    assert list(rows) == ["dram", "nvme", "object"]
    dram, nvme, bucket = rows.values()
    assert (dram["hit_blocks"], nvme["hit_blocks"], bucket["hit_blocks"]) == (1, 1, 0)
    assert (dram["hit_ratio"], nvme["hit_ratio"]) == (0.5, 0.5)
    assert (nvme["health"], nvme["is_recovering"], nvme["medium"]["paths"]) == ("", False, ["posix"])
    assert nvme["read"]["bytes"] == nvme["write"]["bytes"] == 10_000
    assert "slabs" not in bucket
    assert "read" not in dram
    assert client.get("/v1/tiers/object").json() == bucket


def test_the_disk_is_resized_within_what_there_is(client, node):
    changed = client.patch("/v1/tiers/nvme", json={"capacity": "8MiB", "high_watermark": 0.9})
    assert (changed.json()["target_bytes"], changed.json()["high_watermark"]) == (8 * MIB, 0.9)
    node.wait_until(lambda: node.node.store.sizings[NVME].is_reached)
    too_much = problem(client.patch("/v1/tiers/nvme", json={"capacity": "900TiB"}), 409, "conflict")
    assert "the disk has room for" in too_much["detail"]
    problem(client.patch("/v1/tiers/object", json={"capacity": "1GiB"}), 404, "not_found")


def test_metrics_tell_of_every_tier(client, node, lower):
    client.get(path())
    lines = httpx.get(node.url + "/metrics").text.splitlines()
    for line in (
        'cairn_tier_blocks{tier="nvme"} 1.0',
        'cairn_tier_blocks{tier="object"} 0.0',
        'cairn_tier_written_bytes_total{tier="nvme"} 10000.0',
        'cairn_tier_read_bytes_total{tier="nvme"} 10000.0',
        'cairn_tier_reads_total{tier="nvme"} 1.0',
        'cairn_promoted_blocks_total{tier="nvme"} 1.0',
        'cairn_demoted_blocks_total{tier="nvme"} 1.0',
        'cairn_tier_healthy{tier="nvme"} 1.0',
        'cairn_tier_healthy{tier="object"} 1.0',
        'cairn_tier_recovering{tier="nvme"} 0.0',
        'cairn_tier_failures_total{direction="write",tier="nvme"} 0.0',
        'cairn_admission_refused_blocks_total{reason="used once"} 0.0',
        "cairn_object_errors_total 0.0",
    ):
        assert line in lines
    named = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert named == set(METRICS)
