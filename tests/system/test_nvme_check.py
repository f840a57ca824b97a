"""`cairn check --data-dir` on the folder of a node, and what a node refuses to start on."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_client.blocking import BlockingClient
from tests.system.cairn_process import REPO, clean_environ
from tests.system.nodes import NodeProcess, content, namespace, until

BLOCKS, SIZE = 20, 60_000


def cairn_check(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """(Exit code, what it printed)."""
    command = [sys.executable, "-m", "server.cli", "check", "--data-dir", str(folder), "--json", *options]
    done = subprocess.run(command, cwd=REPO, env=clean_environ(), capture_output=True, text=True, timeout=60)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node that has all its blocks on the disk too."""
    node = NodeProcess(
        tmp_path,
        f"--tiers.nvme.path={tmp_path / 'tier'}",
        "--tiers.nvme.capacity=16MiB",
        "--tiers.nvme.slab=1MiB",
        "--tiers.nvme.admission=all",
        "--tiers.nvme.write=through",
    ).start()
    with node.admin() as client:
        until(lambda: is_grown(client), "the tier to have its size")
        space = client.open("checked", namespace("checked", block_bytes=SIZE))
        keys = space.keys(range(4 * BLOCKS))
        client.put(space, keys, [content(key, SIZE) for key in keys])
        until(lambda: on_disk(client) == (BLOCKS, 0), "all to be on the disk, and recorded")
    yield node
    if node.is_alive:
        node.kill()


def is_grown(client: BlockingClient) -> bool:
    tier = client.stat()["tiers"][1]
    return bool(tier["capacity_bytes"] == tier["target_bytes"])


def on_disk(client: BlockingClient) -> tuple[int, int]:
    """(Blocks that are written, changes that are not recorded)."""
    tier = client.stat()["tiers"][1]
    return tier["demoted_blocks"], tier["ledger"]["pending"]


def served(node: NodeProcess) -> int:
    with node.admin() as client:
        until(lambda: not client.stat()["tiers"][1]["is_recovering"])
        space = client.find("checked")
        keys = space.keys(range(4 * BLOCKS))
        buffers = [bytearray(SIZE) for _ in keys]
        found = client.get(space, keys, buffers, load_s=5)
        assert [bytes(buffer) for buffer in buffers[:found]] == [content(key, SIZE) for key in keys[:found]]
        return found


def test_the_folder_of_a_node_that_runs_is_refused_and_of_one_that_went_is_sound(
    node: NodeProcess, tmp_path: Path
) -> None:
    code, said = cairn_check(tmp_path / "tier")
    assert (code, said["error"]["code"]) == (2, "config_error")
    assert "in use by another process" in said["error"]["message"]
    node.stop()
    code, said = cairn_check(tmp_path / "tier", "--deep")
    assert (code, said["ok"], said["problems"]) == (0, True, [])
    assert (said["counts"]["records"], said["counts"]["good"]) == (BLOCKS, BLOCKS)


def test_a_lost_ledger_is_repaired_and_the_node_serves_all(node: NodeProcess, tmp_path: Path) -> None:
    node.kill()
    shutil.rmtree(tmp_path / "tier" / "ledger")
    code, said = cairn_check(tmp_path / "tier")
    assert (code, said["ok"]) == (1, False)
    assert said["counts"]["problems"]["blocks that no record leads to"] == BLOCKS
    code, said = cairn_check(tmp_path / "tier", "--repair")
    assert (code, said["ok"], said["left"]) == (0, True, [])
    node.start()
    assert served(node) == BLOCKS
    node.assert_clean()
    node.stop()


def test_a_folder_without_a_tier_and_options_without_a_folder_are_bad_usage(tmp_path: Path) -> None:
    code, said = cairn_check(tmp_path)
    assert (code, said["error"]["code"]) == (2, "config_error")
    command = [sys.executable, "-m", "server.cli", "check", "--repair"]
    done = subprocess.run(command, cwd=REPO, env=clean_environ(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--data-dir" in done.stderr


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tiers.nvme.slab": "2MiB"}, "laid out with slabs of 1048576 bytes, not 2097152"),
        ({}, "format version 7 is not 1"),
    ],
)
def test_a_node_refuses_a_tier_of_another_layout_or_format_and_ends_with_2(
    node: NodeProcess, tmp_path: Path, settings: dict[str, str], reason: str
) -> None:
    node.stop()
    if not settings:
        (tmp_path / "tier" / "ledger" / "FORMAT").write_text("cairn ledger 7\n")
    given = {"node.run_dir": str(tmp_path / "run"), "node.tcp_listen": "", "rest.listen": "", "tiers.nvme.slab": "1MiB"}
    given |= {"tiers.nvme.path": str(tmp_path / "tier"), "tiers.nvme.capacity": "16MiB", **settings}
    command = [sys.executable, "-m", "server.cli", "node", *(f"--{name}={value}" for name, value in given.items())]
    done = subprocess.run(command, cwd=REPO, env=clean_environ(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
