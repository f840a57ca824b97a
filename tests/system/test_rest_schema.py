"""The REST interface against its own OpenAPI document, as a stranger would try it: schemathesis, all default checks."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.rest import create_app
from tests.system.schemathesis_hooks import KEYS, NAMESPACE

REPO = Path(__file__).parents[2]
FIELDS = {"model": "m", "dtype": "bfloat16", "layout": "kv", "block_tokens": 4, "layers": 2}
ADMIN, WRITER = "a" * 16, "w" * 16
SETTINGS = {
    "node.unix_tenant": "",
    "rest.body_bytes": "1MiB",
    "limits.namespaces_per_tenant": "10000",
    "tenants.0.name": "admin",
    "tenants.0.token": ADMIN,
    "tenants.0.admin": "true",
    "tenants.1.name": "writer",
    "tenants.1.token": WRITER,
}


def fuzz(node: Any, token: str, *options: str) -> str:
    """What schemathesis prints. It fails the test when a check fails."""
    environ = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.system.schemathesis_hooks", "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{node.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {token}", "--seed", "2", "--no-color", "--continue-on-failure"),
            *options,
        ],
        env=environ,
        cwd=node.config.node.run_dir,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def put_blocks(node: Any, token: str) -> None:
    with httpx.Client(base_url=node.url, headers={"Authorization": f"Bearer {token}"}) as client:
        client.put(f"/v1/namespaces/{NAMESPACE}", json=FIELDS)
        for key in KEYS:
            assert client.put(f"/v1/namespaces/{NAMESPACE}/blocks/{key}", content=bytes(100)).status_code == 201


def test_every_answer_is_as_the_document_says(live_node):
    """A writer, who may not change tiers: else the fuzzer would try all the memory there is."""
    node = live_node(SETTINGS)
    put_blocks(node, WRITER)
    printed = fuzz(node, WRITER, "--max-examples", "4")
    assert re.search(r"\b[1-9]\d{2,} generated, \d+ passed", printed), printed


def test_every_answer_to_an_admin_is_as_the_document_says(live_node):
    node = live_node(SETTINGS)
    put_blocks(node, ADMIN)
    fuzz(node, ADMIN, "--max-examples", "4", "--phases", "examples,coverage", "--include-tag", "node",
         "--exclude-method", "PATCH")  # fmt: skip


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(None).openapi()


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, found) for path, methods in document["paths"].items() for method, found in methods.items()]


def test_the_document_says_who_needs_a_token(document):
    for path, _, operation in operations(document):
        assert bool(operation["security"]) == path.startswith("/v1/")
        assert ("401" in operation["responses"]) == path.startswith("/v1/")


def test_every_error_in_the_document_is_a_problem(document):
    for path, method, operation in operations(document):
        for status, response in operation["responses"].items():
            if status >= "400" and method != "head":
                assert list(response["content"]) == ["application/problem+json"], (path, method, status)


def test_every_operation_has_a_name_and_a_sentence(document):
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert all(operation["description"] for _, _, operation in operations(document))
