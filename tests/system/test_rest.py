"""The REST interface of a live node: what it answers, and that nothing is left behind whatever a client does."""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from xxhash import xxh3_64_hexdigest

from kvstore.catalogue import Tenant
from kvstore.errors import ConfigError
from kvstore.metrics import METRICS
from kvstore.prefix import Namespace, chain
from kvstore.reads import Reads
from kvstore.types import DRAM
from server.rest import create_app
from server.rest.door import Sessions
from server.rest.http import HttpConnection
from server.rest.models import NamespaceFields
from server.rest.node import size_bytes

FIELDS = {"model": "m", "dtype": "bfloat16", "layout": "kv", "block_tokens": 4, "layers": 2}
KEY, OTHER = "a1" * 16, "b2" * 16
MIB = 1 << 20


def body_of(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@contextmanager
def client_of(node: Any, token: str = "", **options: Any) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {token or node.token}"}
    with httpx.Client(base_url=node.url, headers=headers, timeout=10, **options) as client:
        yield client


@pytest.fixture
def node(live_node: Callable[..., Any]) -> Any:
    return live_node()


@pytest.fixture
def client(node: Any) -> Iterator[httpx.Client]:
    """Of the default tenant, with namespace `ns` defined."""
    with client_of(node) as client:
        assert client.put("/v1/namespaces/ns", json=FIELDS).status_code == 201
        yield client


def path(key: str = KEY, ns: str = "ns") -> str:
    return f"/v1/namespaces/{ns}/blocks/{key}"


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["status"] == status
    assert document["code"] == code
    assert document["type"] == f"urn:cairn:problem:{code}"
    assert document["title"]
    assert document["detail"]
    return document


# Blocks


@pytest.mark.parametrize("size", [1, 4096, 256 << 10, (256 << 10) + 1, 5 * MIB + 77])
def test_a_block_comes_back_as_it_was_put(client, size):
    body = body_of(size)
    checksum = xxh3_64_hexdigest(body)
    put = client.put(path(), content=body)
    assert put.status_code == 201
    assert put.json() == {"key": KEY, "bytes": size, "checksum": checksum}
    got = client.get(path())
    assert got.status_code == 200
    assert got.content == body
    for response in (put, got, client.head(path())):
        assert response.headers["etag"] == f'"{checksum}"'
    assert got.headers["accept-ranges"] == "bytes"


def test_a_block_that_is_here_already_stays(client):
    client.put(path(), content=b"first")
    again = client.put(path(), content=b"second")
    assert again.status_code == 200
    assert again.headers["etag"] == f'"{xxh3_64_hexdigest(b"first")}"'
    assert client.get(path()).content == b"first"


def test_head_says_what_get_would(client):
    client.put(path(), content=bytes(1000))
    head = client.head(path())
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "1000", b"")
    assert client.head(path(OTHER)).status_code == 404


def test_a_block_that_is_not_here_is_not_found(client):
    problem(client.get(path()), 404, "not_found")
    problem(client.delete(path()), 404, "not_found")
    problem(client.get(path(ns="other")), 404, "not_found")
    problem(client.put(path(ns="other"), content=b"x"), 404, "not_found")


def test_a_deleted_block_is_gone(client, node):
    client.put(path(), content=bytes(MIB))
    assert node.used_bytes
    assert client.delete(path()).status_code == 204
    assert client.get(path()).status_code == 404
    assert node.used_bytes == 0


@pytest.mark.parametrize("known", ['"{}"', 'W/"{}"', '"0", "{}"', "*"])
def test_who_has_the_block_is_not_sent_it_again(client, known):
    client.put(path(), content=b"block")
    headers = {"If-None-Match": known.format(xxh3_64_hexdigest(b"block"))}
    for method in ("GET", "HEAD"):
        response = client.request(method, path(), headers=headers)
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == f'"{xxh3_64_hexdigest(b"block")}"'
    assert client.get(path(), headers={"If-None-Match": '"0123456789abcdef"'}).content == b"block"


@pytest.mark.parametrize(
    ("wanted", "start", "end"),
    [("0-0", 0, 1), ("5-9", 5, 10), ("990-", 990, 1000), ("-7", 993, 1000), ("0-99999", 0, 1000), ("-5000", 0, 1000)],
)
def test_a_range_of_a_block(client, wanted, start, end):
    body = body_of(1000)
    client.put(path(), content=body)
    got = client.get(path(), headers={"Range": f"bytes={wanted}"})
    assert got.status_code == 206
    assert got.content == body[start:end]
    assert got.headers["content-range"] == f"bytes {start}-{end - 1}/1000"


@pytest.mark.parametrize("wanted", ["bytes=1-2,4-5", "bytes=9-3", "bytes=-", "pages=1-2", f"bytes={'9' * 30}-"])
def test_what_is_no_single_range_is_answered_in_full(client, wanted):
    client.put(path(), content=b"0123456789")
    got = client.get(path(), headers={"Range": wanted})
    assert (got.status_code, got.content) == (200, b"0123456789")


@pytest.mark.parametrize("wanted", ["bytes=10-", "bytes=10-20", "bytes=-0"])
def test_a_range_outside_of_the_block(client, wanted):
    client.put(path(), content=b"0123456789")
    got = client.get(path(), headers={"Range": wanted})
    problem(got, 416, "range_not_satisfiable")
    assert got.headers["content-range"] == "bytes */10"


def test_a_range_counts_only_if_the_block_is_the_same(client):
    client.put(path(), content=b"0123456789")
    etag = client.head(path()).headers["etag"]
    assert client.get(path(), headers={"Range": "bytes=1-2", "If-Range": etag}).content == b"12"
    assert client.get(path(), headers={"Range": "bytes=1-2", "If-Range": '"other"'}).status_code == 200


def test_a_checksum_that_comes_along_is_verified(client, node):
    right = {"X-Cairn-Checksum": xxh3_64_hexdigest(b"block")}
    wrong = {"X-Cairn-Checksum": "0" * 16}
    problem(client.put(path(), content=b"block", headers=wrong), 422, "corrupt")
    assert node.used_bytes == 0
    assert client.put(path(), content=b"block", headers=right).status_code == 201
    problem(client.put(path(OTHER), content=b"x", headers={"X-Cairn-Checksum": "no"}), 422, "invalid_request")


def test_a_parent_is_kept(client):
    client.put(path(), content=b"1")
    assert client.put(path(OTHER), params={"parent": KEY}, content=b"2").status_code == 201
    rows = {row["key"]: row["parent"] for row in client.get("/v1/namespaces/ns/blocks").json()["blocks"]}
    assert rows == {KEY: "", OTHER: KEY}


@pytest.mark.parametrize("key", ["zz" * 16, "a1" * 15, "a1" * 17, "a1" * 19])
def test_what_is_no_key_is_refused(client, key):
    for method in ("PUT", "GET", "DELETE"):
        document = problem(client.request(method, path(key), content=b"x"), 422, "invalid_request")
        assert document["errors"][0]["location"] == "path.key"


def test_a_key_or_size_of_another_namespace_is_a_conflict(client):
    problem(client.get(path(KEY + "0000")), 409, "namespace_mismatch")
    client.put("/v1/namespaces/sized", json={**FIELDS, "block_bytes": 100})
    problem(client.put(path(ns="sized"), content=bytes(99)), 409, "namespace_mismatch")
    assert client.put(path(ns="sized"), content=bytes(100)).status_code == 201


def test_a_block_of_parts_is_readable_when_all_of_them_are_here(client):
    client.put("/v1/namespaces/halves", json={**FIELDS, "parts": 2})
    first, second = (path(f"{KEY}{part}", "halves") for part in ("0000", "0100"))
    assert client.put(first, content=b"first").status_code == 201
    problem(client.get(first), 404, "not_found")
    assert client.put(second, content=b"second").status_code == 201
    assert client.get(first).content == b"first"
    assert client.get(second).content == b"second"
    problem(client.put(path(f"{KEY}0200", "halves"), content=b"third"), 409, "namespace_mismatch")
    problem(client.put(path(KEY, "halves"), content=b"x"), 409, "namespace_mismatch")


def test_a_block_needs_a_length(client, node):
    problem(client.put(path(), content=iter([b"one", b"two"])), 411, "length_required")
    problem(client.put(path(), content=b""), 422, "invalid_request")
    assert node.used_bytes == 0


def test_a_block_that_somebody_else_is_writing(client, node):
    with raw(node) as writer:
        begin_put(writer, node, KEY, 1000, b"half")
        node.wait_until(lambda: node.node.store.table.tiers[DRAM].used_bytes > 0)
        response = client.put(path(), content=bytes(1000))
        problem(response, 409, "busy")
        assert int(response.headers["retry-after"]) >= 1
        assert client.get(path()).status_code == 404


def test_a_full_store_says_so(live_node):
    node = live_node({"tiers.dram.capacity": "8MiB"})
    with client_of(node) as client:
        client.put("/v1/namespaces/ns", json=FIELDS)
        assert client.put(path(), content=bytes(8 * MIB)).status_code == 201
        client.post("/v1/namespaces/ns/pin", json={"keys": [KEY], "hard": True, "ttl_seconds": 60})
        document = problem(client.put(path(OTHER), content=bytes(8 * MIB)), 507, "tier_full")
        assert document["retry_after"] > 0


def test_a_tenant_s_quota_is_used_up(live_node):
    node = live_node(tenants({"quota": "1MiB"}))
    with client_of(node, TOKENS[0]) as client:
        client.put("/v1/namespaces/ns", json=FIELDS)
        assert client.put(path(), content=bytes(MIB)).status_code == 201
        client.post("/v1/namespaces/ns/pin", json={"keys": [KEY], "hard": True, "ttl_seconds": 60})
        problem(client.put(path(OTHER), content=bytes(4096)), 507, "quota_exceeded")


def test_a_block_is_found_under_the_key_of_its_tokens(client):
    tokens = list(range(9))
    namespace = client.get("/v1/namespaces/ns").json()
    keys = chain(tokens, 4, bytes.fromhex(namespace["root"]))
    client.put(path(keys[0].hex()), content=b"block")
    matched = client.post("/v1/namespaces/ns/match", json={"tokens": tokens}).json()
    assert matched == {"matched_blocks": 1, "matched_tokens": 4, "keys": [key.hex() for key in keys]}


# Namespaces and many blocks at once


def test_a_namespace_is_what_it_was_first_said_to_be(client):
    same = client.put("/v1/namespaces/ns", json=FIELDS)
    assert same.status_code == 200
    assert same.json()["fields"] == {
        "revision": "", "weights_epoch": 0, "adapter": "", "hash": "xxh3", "parts": 1, "block_bytes": 0, "codec": "",
        "compaction": "", **FIELDS,
    }  # fmt: skip
    other = problem(client.put("/v1/namespaces/ns", json={**FIELDS, "dtype": "float16"}), 409, "namespace_mismatch")
    assert other["differences"] == ["dtype: 'bfloat16' here, 'float16' there"]
    assert [row["name"] for row in client.get("/v1/namespaces").json()["namespaces"]] == ["ns"]


def test_json_has_one_kind_of_number(client):
    assert client.put("/v1/namespaces/ns", json={**FIELDS, "layers": 2.0}).status_code == 200
    problem(client.put("/v1/namespaces/ns", json={**FIELDS, "layers": 2.5}), 422, "invalid_request")
    url = "/v1/namespaces/ns/match"
    keys = [client.post(url, json={"tokens": tokens}).json()["keys"] for tokens in ([1, 2, 3, 4], [1, 2.0, 3, 4.0])]
    assert keys[0] == keys[1]
    problem(client.post(url, json={"tokens": [1, 2.5, 3, 4]}), 422, "invalid_request")


def test_two_names_of_one_namespace(client):
    assert client.put("/v1/namespaces/alias", json=FIELDS).status_code == 201
    client.put(path(), content=b"block")
    assert client.get(path(ns="alias")).content == b"block"
    rows = client.get("/v1/namespaces").json()["namespaces"]
    assert [(row["name"], row["blocks"]) for row in rows] == [("ns", 1), ("alias", 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"layers": "2"},
        {"layers": True},
        {"model": ""},
        {"model": "é" * 200},
        {"colour": 1},
        {"hash": "md5"},
    ],
)
def test_a_namespace_that_makes_no_sense(client, change):
    problem(client.put("/v1/namespaces/bad", json={**FIELDS, **change}), 422, "invalid_request")
    problem(client.get("/v1/namespaces/bad"), 404, "not_found")


def test_the_fields_of_a_namespace_are_those_of_the_store():
    ours, theirs = NamespaceFields(**FIELDS), Namespace(**FIELDS)
    assert ours.model_dump() == {name: getattr(theirs, name) for name in theirs.__struct_fields__}


def test_blocks_are_listed_in_pages(client):
    keys = [f"{number:032x}" for number in range(5)]
    for key in keys:
        client.put(path(key), content=b"block")
    url = "/v1/namespaces/ns/blocks"
    first = client.get(url, params={"limit": 3}).json()
    rest = client.get(url, params={"limit": 3, "after": first["next"]}).json()
    assert [row["key"] for row in first["blocks"] + rest["blocks"]] == keys
    assert rest["next"] is None
    problem(client.get(url, params={"after": OTHER}), 404, "not_found")
    problem(client.get(url, params={"limit": 0}), 422, "invalid_request")


def test_match_counts_from_the_first(client):
    keys = [f"{number:032x}" for number in range(4)]
    for key in (keys[0], keys[1], keys[3]):
        client.put(path(key), content=b"block")
    url = "/v1/namespaces/ns"
    assert client.post(f"{url}/match", json={"keys": keys[:3]}).json()["matched_blocks"] == 2
    assert client.post(f"{url}/match", json={"keys": []}).json()["matched_blocks"] == 0
    assert client.post(f"{url}/exists", json={"keys": keys}).json() == {"exists": [True, True, False, True]}


def test_evict_deletes_by_key_or_everything(client, node):
    keys = [f"{number:032x}" for number in range(4)]
    for key in keys:
        client.put(path(key), content=bytes(4096))
    evicted = client.post("/v1/namespaces/ns/evict", json={"keys": [keys[0], OTHER]})
    assert evicted.json() == {"blocks": 1, "freed_bytes": 4096}
    assert client.post("/v1/namespaces/ns/evict", json={"all": True}).json()["blocks"] == 3
    client.put(path(), content=b"block")
    assert client.delete("/v1/namespaces/ns/blocks").json()["blocks"] == 1
    assert node.used_bytes == 0


def test_a_pin_is_listed_until_it_is_let_go(client):
    client.put(path(), content=bytes(4096))
    body = {"keys": [KEY, OTHER], "hard": True, "ttl_seconds": 60}
    pinned = client.post("/v1/namespaces/ns/pin", json=body)
    assert (pinned.status_code, pinned.json()["blocks"]) == (201, 1)
    pin_id = pinned.json()["pin_id"]
    (row,) = client.get("/v1/pins").json()["pins"]
    assert 0 < row.pop("expires_in_seconds") <= 60
    assert row == {"pin_id": pin_id, "hard": True, "blocks": 1, "bytes": 4096}
    assert client.delete(f"/v1/pins/{pin_id}").status_code == 204
    problem(client.delete(f"/v1/pins/{pin_id}"), 404, "not_found")
    assert client.get("/v1/pins").json() == {"pins": []}


def test_nothing_is_there_to_pin(client):
    response = client.post("/v1/namespaces/ns/pin", json={"tokens": [1, 2, 3, 4], "ttl_seconds": 1})
    assert (response.status_code, response.json()) == (200, {"blocks": 0})


def test_pins_by_tokens_hold_every_part(client):
    client.put("/v1/namespaces/halves", json={**FIELDS, "parts": 2})
    root = client.get("/v1/namespaces/halves").json()["root"]
    (key,) = chain([1, 2, 3, 4], 4, bytes.fromhex(root))
    for part in (0, 1):
        client.put(path(key.hex() + struct.pack("<H", part).hex(), "halves"), content=b"part")
    body = {"tokens": [1, 2, 3, 4], "ttl_seconds": 60}
    assert client.post("/v1/namespaces/halves/match", json={"tokens": [1, 2, 3, 4]}).json()["matched_blocks"] == 1
    assert client.post("/v1/namespaces/halves/pin", json=body).json()["blocks"] == 1
    assert client.get("/v1/pins").json()["pins"][0]["blocks"] == 2


def test_explain_names_the_namespace_that_has_the_tokens(client):
    client.put("/v1/namespaces/half", json={**FIELDS, "dtype": "float16"})
    tokens = [1, 2, 3, 4]
    keys = client.post("/v1/namespaces/half/match", json={"tokens": tokens}).json()["keys"]
    client.put(path(keys[0], "half"), content=b"block")
    (row,) = client.post("/v1/namespaces/ns/explain", json={"tokens": tokens}).json()["blocks"]
    assert row["hit"] is False
    assert "'half' (dtype: 'bfloat16' here, 'float16' there)" in row["reason"]
    (row,) = client.post("/v1/namespaces/half/explain", json={"keys": keys}).json()["blocks"]
    assert (row["hit"], row["tier"], row["bytes"]) == (True, "dram", 5)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"keys": [KEY], "tokens": [1]},
        {"keys": KEY},
        {"tokens": [-1] * 4},
        {"tokens": [2**32] * 4},
        {"tokens": ["1"]},
    ],
)
def test_a_lookup_that_makes_no_sense(client, body):
    problem(client.post("/v1/namespaces/ns/match", json=body), 422, "invalid_request")


def test_more_blocks_than_a_batch_may_have(live_node):
    node = live_node({"limits.batch_blocks": "2"})
    with client_of(node) as client:
        client.put("/v1/namespaces/ns", json=FIELDS)
        document = problem(client.post("/v1/namespaces/ns/match", json={"keys": [KEY] * 3}), 422, "invalid_request")
        assert "batch_blocks" in document["detail"]
        problem(client.post("/v1/namespaces/ns/match", json={"tokens": [1] * 12}), 422, "invalid_request")


# The node


def test_a_tier_is_changed_while_it_serves(client, node):
    assert client.get("/v1/tiers/dram").json()["capacity_bytes"] == 32 * MIB
    changed = client.patch("/v1/tiers/dram", json={"capacity": "16MiB", "high_watermark": 0.8, "low_watermark": 0.5})
    assert changed.status_code == 200
    assert changed.json()["target_bytes"] == 16 * MIB
    node.wait_until(lambda: node.node.upkeep.resized.is_set())
    (row,) = client.get("/v1/tiers").json()["tiers"]
    assert (row["capacity_bytes"], row["high_watermark"], row["low_watermark"]) == (16 * MIB, 0.8, 0.5)


@pytest.mark.parametrize("change", [{"low_watermark": 0.99}, {"capacity": 1}, {"capacity": "900TiB"}])
def test_a_change_that_cannot_be(client, change):
    problem(client.patch("/v1/tiers/dram", json=change), 409, "conflict")
    assert client.get("/v1/tiers/dram").json()["target_bytes"] == 32 * MIB


@pytest.mark.parametrize("change", [{"capacity": "many"}, {"capacity": True}, {"high_watermark": 0}, {"colour": 1}])
def test_a_change_that_makes_no_sense(client, change):
    problem(client.patch("/v1/tiers/dram", json=change), 422, "invalid_request")


def test_a_tier_that_is_not_there(client):
    problem(client.get("/v1/tiers/nvme"), 404, "not_found")
    problem(client.patch("/v1/tiers/nvme", json={"capacity": "1GiB"}), 404, "not_found")


@pytest.mark.parametrize(("text", "size"), [(5, 5), ("5", 5), ("1.5 KiB", 1536), ("2GiB", 2 << 30), ("7B", 7)])
def test_sizes_are_read_as_people_write_them(text, size):
    assert size_bytes(text) == size


def test_the_node_checks_and_counts_itself(client):
    client.put(path(), content=b"block")
    assert client.post("/v1/check").json() == {"problems": []}
    assert client.get("/v1/stats").json()["counters"]["stored_bytes"] == {"rest": 5}


def test_health_needs_no_token(node):
    for url, status in (("/healthz", "ok"), ("/readyz", "ready")):
        response = httpx.get(node.url + url)
        assert (response.status_code, response.json()) == (200, {"status": status})
    assert httpx.get(node.url + "/docs").status_code == 200
    assert httpx.get(node.url + "/openapi.json").json()["info"]["title"] == "Cairn"


def test_a_node_that_is_not_ready_says_so(node, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("server.node.Node.is_ready", False)
        problem(httpx.get(node.url + "/readyz"), 503, "not_ready")
        assert httpx.get(node.url + "/healthz").status_code == 200
    assert httpx.get(node.url + "/readyz").status_code == 200


def test_metrics_count_what_happened(client, node):
    client.put(path(), content=b"block")
    client.get(path())
    client.get(path(OTHER))
    lines = httpx.get(node.url + "/metrics").text.splitlines()
    for line in (
        'cairn_stored_bytes_total{path="rest"} 5.0',
        'cairn_loaded_bytes_total{path="rest"} 5.0',
        'cairn_hit_blocks_total{namespace="ns",tenant="default"} 1.0',
        'cairn_missed_blocks_total{namespace="ns",tenant="default"} 1.0',
        'cairn_errors_total{code="not_found"} 1.0',
        'cairn_tier_blocks{tier="dram"} 1.0',
        'cairn_tier_capacity_bytes{tier="dram"} 3.3554432e+07',
        'cairn_sessions{kind="rest"} 0.0',
    ):
        assert line in lines


# Who may


TOKENS = ["t" * 16, "u" * 16]


def tenants(*settings: dict[str, str]) -> dict[str, str]:
    found = {"node.unix_tenant": ""}
    for number, (token, given) in enumerate(zip(TOKENS, settings, strict=False)):
        for name, value in {"name": f"tenant{number}", "token": token, **given}.items():
            found[f"tenants.{number}.{name}"] = value
    return found


@pytest.mark.parametrize(
    "given", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic dDp0"}, {"Authorization": "é"}]
)
def test_without_a_token_nothing_is_said(node, given):
    headers = {name: value.encode("latin-1") for name, value in given.items()}
    for url in ("/v1/namespaces", "/v1/nothing", path()):
        response = httpx.get(node.url + url, headers=headers)
        problem(response, 401, "forbidden")
        assert response.headers["www-authenticate"].startswith("Bearer ")


def test_a_tenant_that_may_only_read(live_node):
    node = live_node(tenants({"may_write": "false"}))
    with client_of(node, TOKENS[0]) as client:
        client.put("/v1/namespaces/ns", json=FIELDS)
        problem(client.put(path(), content=b"block"), 403, "forbidden")
        problem(client.patch("/v1/tiers/dram", json={"high_watermark": 0.9}), 403, "forbidden")
        problem(client.patch("/v1/tiers/dram", json={"capacity": "900TiB"}), 403, "forbidden")
        problem(client.post("/v1/check"), 403, "forbidden")


def test_a_token_that_may_only_read_beside_one_that_writes(live_node):
    """Requests of one tenant overlap; each has the rights of its own token."""
    reading = "reads-of-tenant-zero"
    node = live_node(tenants({"admin": "true", "read_token": reading}))
    with client_of(node, TOKENS[0]) as writer, client_of(node, reading) as reader:
        writer.put("/v1/namespaces/ns", json=FIELDS)
        writer.put(path(), content=b"block")

        def upload() -> Iterator[bytes]:
            yield b"half "
            for ask in (
                lambda: reader.put(path("b" * 32), content=b"block"),
                lambda: reader.delete(path()),
                lambda: reader.post("/v1/check"),
            ):
                problem(ask(), 403, "forbidden")
            assert reader.get(path()).content == b"block"
            yield b"a block"

        sent = writer.put(path("c" * 32), content=upload(), headers={"Content-Length": "12"})
        assert sent.status_code == 201
        assert reader.get(path("c" * 32)).content == b"half a block"
        with reader.stream("GET", path()):
            assert writer.put(path("d" * 32), content=b"block").status_code == 201


def test_tenants_do_not_see_each_other(live_node):
    node = live_node(tenants({}, {}))
    with client_of(node, TOKENS[0]) as one, client_of(node, TOKENS[1]) as two:
        one.put("/v1/namespaces/ns", json=FIELDS)
        one.put(path(), content=b"secret")
        pin = one.post("/v1/namespaces/ns/pin", json={"keys": [KEY], "ttl_seconds": 60}).json()["pin_id"]
        assert two.get("/v1/namespaces").json() == {"namespaces": []}
        problem(two.get(path()), 404, "not_found")
        two.put("/v1/namespaces/ns", json=FIELDS)
        problem(two.get(path()), 404, "not_found")
        problem(two.delete(path()), 404, "not_found")
        problem(two.delete(f"/v1/pins/{pin}"), 404, "not_found")
        assert two.get("/v1/pins").json() == {"pins": []}
        assert two.delete("/v1/namespaces/ns/blocks").json()["blocks"] == 0
        assert list(two.get("/v1/stats").json()["tenants"]) == ["tenant1"]
        assert one.get(path()).content == b"secret"


def test_a_tenant_that_asks_too_often(live_node):
    node = live_node(tenants({}, {}) | {"rest.requests_per_second": "2"})
    with client_of(node, TOKENS[0]) as one, client_of(node, TOKENS[1]) as two:
        statuses = [one.get("/v1/pins").status_code for _ in range(6)]
        assert statuses[:2] == [200, 200]
        assert 429 in statuses
        for _ in range(6):
            refused = one.get("/v1/pins")
            if refused.status_code == 429:
                break
        assert problem(refused, 429, "rejected")["retry_after"] <= 0.5
        assert refused.headers["retry-after"] == "1"
        assert two.get("/v1/pins").status_code == 200


# What HTTP refuses


def test_what_is_not_there(client):
    problem(client.get("/v2/things"), 404, "not_found")
    problem(client.get("/v1/things"), 404, "not_found")
    problem(client.get("/v1/namespaces/"), 404, "not_found")


def test_a_method_that_is_not_there(client):
    for url, allowed in ((path(), "DELETE, GET, HEAD, PUT"), ("/v1/namespaces/ns", "GET, PUT"), ("/docs", "GET, HEAD")):
        response = client.patch(url)
        problem(response, 405, "method_not_allowed")
        assert response.headers["allow"] == allowed


def test_a_body_that_is_no_json(client):
    headers = {"Content-Type": "application/json"}
    for body in (b"{", b"\xff\xfe", b'{"keys": [', b"[" * 100_000):
        problem(client.post("/v1/namespaces/ns/match", content=body, headers=headers), 400, "malformed")
    problem(client.post("/v1/namespaces/ns/match", content=b"NaN", headers=headers), 422, "invalid_request")


def test_a_broken_handler_says_nothing_about_the_inside(client, node, monkeypatch, caplog):
    def broken(*_: Any) -> None:
        raise RuntimeError("inside")

    monkeypatch.setattr("kvstore.catalogue.Catalogue.find", broken)
    document = problem(client.get("/v1/namespaces/ns"), 500, "internal")
    assert "inside" not in json.dumps(document)


def test_bodies_that_are_too_large(live_node):
    node = live_node({"rest.body_bytes": "100KiB"})
    with client_of(node) as client:
        client.put("/v1/namespaces/ns", json=FIELDS)
        problem(client.put(path(), content=bytes(102_401)), 413, "too_large")
        assert client.put(path(), content=bytes(102_400)).status_code == 201
        large = {"keys": [KEY] * 4000}
        problem(client.post("/v1/namespaces/ns/match", json=large), 413, "too_large")
        headers = {"Content-Type": "application/json"}
        chunks = iter([json.dumps(large).encode()] * 2)
        problem(client.post("/v1/namespaces/ns/match", content=chunks, headers=headers), 413, "too_large")


def test_a_block_that_no_slab_can_hold(client):
    problem(client.put(path(), content=bytes(8 * MIB + 1)), 413, "too_large")


# Clients that die, hang or lie


@contextmanager
def raw(node: Any) -> Iterator[socket.socket]:
    """A connection that takes little before it is read from: of 8 MiB the node must keep some."""
    host, port = node.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        connection.settimeout(10)
        connection.connect((host, int(port)))
        yield connection


def head(node: Any, method: str, url: str, size: int | None = None) -> bytes:
    length = "" if size is None else f"Content-Length: {size}\r\n"
    return f"{method} {url} HTTP/1.1\r\nHost: node\r\nAuthorization: Bearer {node.token}\r\n{length}\r\n".encode()


def begin_put(connection: socket.socket, node: Any, key: str, size: int, sent: bytes) -> None:
    connection.sendall(head(node, "PUT", path(key), size) + sent)


def read_all(connection: socket.socket) -> bytes:
    """Until the node hangs up."""
    received = b""
    while True:
        try:
            piece = connection.recv(1 << 20)
        except ConnectionResetError:
            return received
        if not piece:
            return received
        received += piece


def read_answers(connection: socket.socket, count: int) -> list[bytes]:
    """The bodies of so many answers."""
    bodies = []
    with connection.makefile("rb") as stream:
        for _ in range(count):
            assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
            size = 0
            while (line := stream.readline()) != b"\r\n":
                if line.startswith(b"content-length:"):
                    size = int(line.split(b":")[1])
            bodies.append(stream.read(size))
    return bodies


def used(node: Any) -> int:
    return int(node.node.store.table.tiers[DRAM].used_bytes)


def held(node: Any) -> list[Any]:
    return list(node.node.store.holds.held())


@pytest.mark.parametrize("sent_bytes", [0, 1, 300_000])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_dies_in_the_middle_of_a_put(client, node, sent_bytes, reset):
    with raw(node) as connection:
        begin_put(connection, node, KEY, MIB, bytes(sent_bytes))
        node.wait_until(lambda: used(node) > 0)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    node.wait_until(lambda: used(node) == 0)
    assert node.problems() == []
    assert client.put(path(), content=bytes(MIB)).status_code == 201


def test_a_client_that_is_slow_with_its_body(live_node):
    node = live_node({"rest.request_timeout": "200ms"})
    with client_of(node) as client, raw(node) as connection:
        client.put("/v1/namespaces/ns", json=FIELDS)
        begin_put(connection, node, KEY, MIB, b"some")
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "request_timeout"
        node.wait_until(lambda: used(node) == 0)
        with raw(node) as other:
            other.sendall(head(node, "POST", "/v1/namespaces/ns/match", 100) + b"{")
            assert read_all(other).startswith(b"HTTP/1.1 408 ")


def test_an_upload_that_outlives_its_grant(live_node):
    node = live_node({"limits.put_timeout": "100ms"})
    with client_of(node) as client, raw(node) as connection:
        client.put("/v1/namespaces/ns", json=FIELDS)
        begin_put(connection, node, KEY, 1000, b"some")
        node.wait_until(lambda: node.node.store.counters.lapsed_holds > 0)
        connection.sendall(bytes(996))
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
        node.wait_until(lambda: used(node) == 0)
        assert client.put(path(), content=bytes(1000)).status_code == 201


def test_a_client_that_dies_in_the_middle_of_a_get(client, node):
    client.put(path(), content=bytes(8 * MIB))
    with raw(node) as connection:
        connection.sendall(head(node, "GET", path()))
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        node.wait_until(lambda: len(held(node)) == 1)
    node.wait_until(lambda: not held(node))
    assert client.delete(path()).status_code == 204
    assert node.used_bytes == 0


def test_a_client_that_does_not_read(live_node):
    node = live_node({"rest.request_timeout": "200ms"})
    with client_of(node) as client, raw(node) as connection:
        client.put("/v1/namespaces/ns", json=FIELDS)
        client.put(path(), content=bytes(8 * MIB))
        connection.sendall(head(node, "GET", path()))
        node.wait_until(lambda: len(held(node)) == 1)
        node.wait_until(lambda: not held(node))
        assert len(read_all(connection)) < 8 * MIB


def test_a_slow_reader_gets_its_block_though_it_was_deleted_and_its_room_wanted(live_node):
    """Bytes that are still to be sent lie in the slot: it may not be given to anybody else."""
    node = live_node({"tiers.dram.capacity": "8MiB"})
    body = body_of(7 * MIB)
    with client_of(node) as client, raw(node) as connection:
        client.put("/v1/namespaces/ns", json=FIELDS)
        client.put(path(), content=body)
        connection.sendall(head(node, "GET", path()))
        node.wait_until(lambda: len(held(node)) == 1)
        assert client.delete(path()).status_code == 204
        assert client.put(path(OTHER), content=body_of(7 * MIB, seed=1)).status_code == 507
        assert read_answers(connection, 1) == [body]
        node.wait_until(lambda: not held(node))
        assert client.put(path(OTHER), content=body_of(7 * MIB, seed=1)).status_code == 201


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> list[HttpConnection]:
    """The node's HTTP connections, made so that what they send soon waits in the node's memory."""
    connections: list[HttpConnection] = []
    made = HttpConnection.connection_made

    def connection_made(self: HttpConnection, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)
        connections.append(self)

    monkeypatch.setattr(HttpConnection, "connection_made", connection_made)
    return connections


def test_the_last_bytes_of_a_block_are_still_its_own_when_its_room_is_wanted(small_buffers, client, node):
    """All of it was handed to the connection, which refers to the slot: it is not free before that is sent."""
    body = body_of(256 << 10)
    client.put(path(), content=body)
    with raw(node) as connection:
        connection.sendall(head(node, "GET", path()))
        node.wait_until(lambda: any(sender.transport.get_write_buffer_size() for sender in small_buffers))
        assert client.delete(path()).status_code == 204
        assert client.put(path(OTHER), content=body_of(256 << 10, seed=1)).status_code == 201
        assert read_answers(connection, 1) == [body]
    node.wait_until(lambda: not held(node))


def test_a_slot_is_let_go_after_the_connection_that_could_still_send_from_it(small_buffers, live_node, monkeypatch):
    node = live_node({"rest.request_timeout": "200ms"})
    release, lost = Reads.release, []

    def noted(self: Reads, owner: Any, lease_id: int) -> None:
        lost.append([sender.lost.is_set() for sender in small_buffers])
        release(self, owner, lease_id)

    monkeypatch.setattr(Reads, "release", noted)
    with client_of(node) as client:
        client.put("/v1/namespaces/ns", json=FIELDS)
        client.put(path(), content=bytes(256 << 10))
    node.wait_until(lambda: all(sender.lost.is_set() for sender in small_buffers))
    with raw(node) as connection:
        connection.sendall(head(node, "GET", path()))
        node.wait_until(lambda: lost)
        assert lost == [[True] * len(small_buffers)]


def test_uploads_and_downloads_are_let_go_of_though_the_tenant_s_session_goes_on(small_buffers, client, node):
    client.put(path(), content=bytes(256 << 10))
    with raw(node) as lasting:
        begin_put(lasting, node, OTHER, 1000, b"some")
        node.wait_until(lambda: len(held(node)) == 1)
        with raw(node) as writer, raw(node) as reader:
            begin_put(writer, node, "cc" * 16, MIB, b"some")
            reader.sendall(head(node, "GET", path()))
            node.wait_until(lambda: len(held(node)) == 3)
        node.wait_until(lambda: len(held(node)) == 1)
        assert client.get(path()).status_code == 200
        node.wait_until(lambda: len(held(node)) == 1)
        lasting.sendall(bytes(996))
        assert lasting.recv(4096).startswith(b"HTTP/1.1 201 ")


def test_a_session_lasts_as_long_as_any_request_of_its_tenant():
    ended: list[str] = []

    class Ending:
        def __init__(self, tenant: Tenant) -> None:
            self.tenant = tenant

        def end(self) -> None:
            ended.append(self.tenant.name)

    sessions = Sessions(SimpleNamespace(new_session=lambda tenant, path: Ending(tenant)))
    one, two = Tenant("one"), Tenant("two")
    with sessions.visit(one) as first:
        with sessions.visit(one) as second, sessions.visit(two) as other:
            assert first is second is not other
            assert len(sessions) == 2
        assert ended == ["two"]
    assert (ended, len(sessions)) == (["two", "one"], 0)
    with sessions.visit(one) as third:
        assert third is not first


def test_a_reader_that_is_slower_than_its_lease(live_node):
    node = live_node({"limits.lease_max": "300ms"})
    with client_of(node) as client, raw(node) as connection:
        client.put("/v1/namespaces/ns", json=FIELDS)
        client.put(path(), content=bytes(8 * MIB))
        connection.sendall(head(node, "GET", path()))
        node.wait_until(lambda: len(held(node)) == 1)
        node.wait_until(lambda: not held(node))
        assert node.call(lambda: node.node.store.counters.lapsed_holds) == 0, "the connection ends before the lease"
        assert len(read_all(connection)) < 8 * MIB


def test_a_client_that_goes_with_requests_sent_ahead(client, node):
    client.put(path(), content=bytes(8 * MIB))
    for _ in range(5):
        with raw(node) as connection:
            connection.sendall(head(node, "GET", path()) * 3 + head(node, "GET", "/v1/stats") * 5)
            node.wait_until(lambda: len(held(node)) == 1)
        node.wait_until(lambda: not held(node))
    assert client.get("/v1/stats").json()["counters"]["errors"].get("internal") is None


def test_requests_that_were_sent_ahead_are_answered_in_order(client, node):
    for number in range(3):
        client.put(path(f"{number:032x}"), content=bytes([number]) * MIB)
    with raw(node) as connection:
        connection.sendall(b"".join(head(node, "GET", path(f"{number:032x}")) for number in range(3)))
        assert read_answers(connection, 3) == [bytes([number]) * MIB for number in range(3)]
    node.wait_until(lambda: not held(node))


def test_readers_and_writers_at_once(client, node):
    bodies = {f"{number:032x}": body_of(MIB, number) for number in range(4)}
    failures: list[str] = []

    def work() -> None:
        with client_of(node) as own:
            for key, body in bodies.items():
                status = own.put(path(key), content=body).status_code
                got = own.get(path(key))
                if status not in (200, 201, 409) or (got.status_code == 200 and got.content != body):
                    failures.append(f"{status} {got.status_code}")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    node.wait_until(lambda: not held(node))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff" * 500,
        b"GET /\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"FOO / HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"GET /\xe9 HTTP/1.1\r\n\r\n",
        b"PUT /v1/x HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"PUT /v1/x HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_garbage_is_answered_and_hung_up_on(node, garbage):
    with raw(node) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
        if answer:
            assert answer[:10] == b"HTTP/1.1 4"
            assert b"application/problem+json" in answer
    assert httpx.get(node.url + "/healthz").status_code == 200


def test_a_head_without_end(node):
    with raw(node) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nA: ")
        with suppress(OSError):  # it is hung up on
            for _ in range(100):
                connection.sendall(b"a" * 65_536)
        assert read_all(connection)[:12] in (b"HTTP/1.1 431", b"")
    assert httpx.get(node.url + "/healthz").status_code == 200


def test_a_client_that_says_nothing_is_not_waited_for(live_node):
    node = live_node({"rest.request_timeout": "100ms"})
    with raw(node) as silent, raw(node) as slow:
        slow.sendall(b"GET / HT")
        assert read_all(silent) == b""
        assert read_all(slow).startswith(b"HTTP/1.1 408 ")


def test_too_many_requests_sent_ahead(node):
    with raw(node) as connection:
        connection.sendall(head(node, "GET", "/v1/pins") * 1000)
        assert read_all(connection).count(b"HTTP/1.1 200") < 1000
    assert httpx.get(node.url + "/healthz").status_code == 200


def test_too_many_connections(live_node):
    node = live_node({"limits.connections": "2"})
    with raw(node) as first, raw(node) as second:
        for connection in (first, second):
            connection.sendall(head(node, "GET", "/healthz"))
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        with raw(node) as third:
            answer = read_all(third)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "rejected"


# Its life


def test_a_node_that_stops_lets_go_of_uploads_and_downloads(live_node):
    node = live_node({"node.drain_seconds": "200ms"})
    with client_of(node) as client, raw(node) as writer, raw(node) as reader:
        client.put("/v1/namespaces/ns", json=FIELDS)
        client.put(path(OTHER), content=bytes(8 * MIB))
        begin_put(writer, node, KEY, MIB, b"some")
        reader.sendall(head(node, "GET", path(OTHER)))
        node.wait_until(lambda: len(held(node)) == 2)
        node.stop()
        assert held(node) == []


def test_an_address_that_is_taken(live_node, node):
    taken = node.url.removeprefix("http://")
    with pytest.raises(ConfigError, match=rf"rest\.listen {taken}: "):
        live_node({"rest.listen": taken})


def test_the_app_serves_under_any_server(client, node):
    """Without word of when bytes have left, they are copied."""
    body = body_of(MIB)
    client.put(path(), content=body)

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(node.node))
        headers = {"Authorization": f"Bearer {node.token}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://app", headers=headers) as inside:
            return [await inside.get(path()), await inside.put(path(OTHER), content=body), await inside.get("/metrics")]

    got, put, metrics = asyncio.run_coroutine_threadsafe(ask(), node.loop).result(timeout=10)
    assert got.content == body
    assert put.status_code == 201
    assert metrics.status_code == 200
    assert held(node) == []


def test_every_metric_is_exported(node):
    text = httpx.get(node.url + "/metrics").text
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} == set(METRICS)


def test_no_rest_interface_where_none_is_wanted(live_node):
    node = live_node({"rest.listen": ""})
    assert "rest" not in node.call(lambda: node.node.addresses)
