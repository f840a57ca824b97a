"""The command line on a node with tiers below DRAM: what lies where, and how it is moved; and what the doctor sees."""

import json
import os
import socket
from collections.abc import Callable
from fcntl import LOCK_EX, LOCK_NB, lockf
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine_client.blocking import BlockingClient
from kvstore.types import BlockKey
from tests.system.cairn_process import CairnProcess, StartNode
from tests.system.nodes import until
from tests.system.test_cli import BLOCK, Shell

numbers = count()
BELOW = {
    "tiers.dram.capacity": "16MiB",
    "tiers.nvme.capacity": "16MiB",
    "tiers.nvme.slab": "2MiB",
    "tiers.nvme.io": "posix",
    "tiers.dram.mlock": "no",
}


def with_its_disk(node: CairnProcess) -> CairnProcess:
    """When blocks can be written there."""
    with BlockingClient(node.address) as client:

        def is_ready() -> bool:
            row = client.stat()["tiers"][1]
            return not row["is_recovering"] and row["capacity_bytes"] == row["target_bytes"]

        until(is_ready, "the disk to be ready")
    return node


@pytest.fixture(scope="module")
def node(start_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> CairnProcess:
    folder = tmp_path_factory.mktemp("tiers")
    below = {"tiers.nvme.path": str(folder / "nvme"), "tiers.object.url": f"file://{folder}/bucket"}
    return with_its_disk(start_node(**BELOW, **below))


@pytest.fixture
def cairn(node: CairnProcess) -> Shell:
    return Shell(CAIRN_RUN_DIR=str(node.run_dir))


@pytest.fixture
def space(cairn: Shell) -> str:
    name = f"tiered-{next(numbers)}"
    words = ["--dtype=bfloat16", "--layout=plain", "--block-tokens=4", f"--block-bytes={BLOCK}"]
    cairn.ok("namespace", "define", name, f"--model={name}", *words)
    return name


@pytest.fixture
def put(cairn: Shell, space: str, tmp_path: Path) -> Callable[[int], list[str]]:
    """Puts the blocks of a prompt; their keys."""

    def stored(blocks: int) -> list[str]:
        file = tmp_path / "prompt.kv"
        file.write_bytes(os.urandom(blocks * BLOCK))
        ids = ",".join(map(str, range(4 * blocks)))
        return list(cairn.ok("put", space, file, "--prompt-ids", ids, "--json").row["keys"])

    return stored


def where(cairn: Shell, space: str, *keys: str) -> list[str]:
    return [row["tier"] for row in cairn.ok("explain", space, *keys, "--json").rows]


def tier(cairn: Shell, name: str) -> dict[str, Any]:
    return next(row for row in cairn.ok("tiers", "--json").rows if row["tier"] == name)


def test_each_tier_is_shown_with_its_speed_and_health(cairn, space, put):
    keys = put(4)
    cairn.ok("demote", space, "--all", "--evict")
    cairn.ok("get", space, keys[0], "-o", os.devnull)
    text = cairn.ok("tiers").text
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["dram", "nvme", "object"]
    assert "posix" in text
    assert "well" in text
    nvme = tier(cairn, "nvme")
    assert (nvme["health"], nvme["is_recovering"], nvme["medium"]["paths"]) == ("", False, ["posix"])
    assert nvme["write"]["bytes"] >= 4 * BLOCK
    assert nvme["read"]["bytes"] >= BLOCK
    assert nvme["hit_blocks"] >= 1
    assert 0 < nvme["hit_ratio"] <= 1
    assert tier(cairn, "object")["health"] == ""


def test_a_demoted_block_is_found_below_and_comes_back_byte_for_byte(cairn, space, put, tmp_path):
    keys = put(3)
    cairn.ok("get", space, keys[2], "-o", tmp_path / "before")
    assert where(cairn, space, *keys) == ["dram"] * 3
    row = cairn.ok("demote", space, keys[2], "--evict", "--json").row
    assert row == {"namespace": space, "tier": "nvme", "written": 1, "evicted": 1}
    rows = cairn.ok("explain", space, *keys, "--json").rows
    assert [row["tier"] for row in rows] == ["dram", "dram", "nvme"]
    assert (rows[2]["hit"], rows[2]["reason"], rows[2]["bytes"]) == (True, "on nvme: loaded when asked for", BLOCK)
    assert cairn.ok("match", space, "--keys", ",".join(keys), "--json").row["matched_blocks"] == 3
    cairn.ok("get", space, keys[2], "-o", tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()
    assert where(cairn, space, keys[2]) == ["dram"]


def test_what_a_tier_has_is_not_written_again(cairn, space, put):
    put(2)
    assert cairn.ok("demote", space, "--all").text == "wrote 2 blocks to nvme\n"
    assert cairn.ok("demote", space, "--all", "--evict").text == "wrote 0 blocks to nvme, evicted 2\n"


def test_blocks_go_on_to_the_bucket_and_come_back(cairn, space, put):
    keys = put(2)
    assert cairn.ok("demote", space, "--all", "--to", "object", "--evict", "--json").row["written"] == 2
    assert where(cairn, space, *keys) == ["object", "object"]
    assert cairn.ok("promote", space, *keys, "--json").row == {"namespace": space, "blocks": 2, "loading": 2}
    until(lambda: where(cairn, space, *keys) == ["dram", "dram"], "the blocks to be loaded")
    assert cairn.ok("promote", space, *keys).text == "0 of 2 blocks on their way\n"


def test_evict_to_a_lower_tier_keeps_the_blocks(cairn, space, put):
    keys = put(3)
    row = cairn.ok("evict", space, "--all", "--tier", "dram", "--to", "nvme", "--json").row
    assert row == {"namespace": space, "blocks": 3, "written": 3, "tier": "dram", "to": "nvme"}
    assert where(cairn, space, *keys) == ["nvme"] * 3
    gone = cairn("evict", space, keys[0], "--to", "nvme")
    assert (gone.code, gone.text) == (1, "evicted 0 blocks, 0 written to nvme\n")


def test_evict_from_one_tier_leaves_the_others(cairn, space, put):
    keys = put(3)
    cairn.ok("demote", space, "--all")
    row = cairn.ok("evict", space, "--all", "--tier", "dram", "--json").row
    assert (row["blocks"], row["tier"]) == (3, "dram")
    assert where(cairn, space, *keys) == ["nvme"] * 3
    assert cairn.ok("evict", space, keys[2], "--tier", "nvme", "--json").row["blocks"] == 1
    assert where(cairn, space, *keys) == ["nvme", "nvme", ""]
    assert cairn.ok("evict", space, "--all", "--json").row["blocks"] == 2
    assert where(cairn, space, *keys) == ["", "", ""]


def test_top_shows_what_moves_between_tiers(cairn, space):
    row = cairn.ok("top", "--once", "--interval", "100ms", "--json").row
    assert set(row["rates"]["tiers"]) == {"dram", "nvme", "object"}
    assert set(row["rates"]["tiers"]["nvme"]) == {
        *("read_bytes", "written_bytes", "promoted_blocks", "demoted_blocks"),
    }
    assert "promoted/s" in cairn.ok("top", "--once", "--interval", "100ms").text


def test_the_disk_is_resized_while_it_serves(cairn):
    row = cairn.ok("tiers", "set", "nvme", "capacity=12MiB", "high_watermark=0.9", "--json").rows[1]
    assert (row["target_bytes"], row["high_watermark"]) == (12 << 20, 0.9)
    until(lambda: tier(cairn, "nvme")["capacity_bytes"] == 12 << 20, "the disk to shrink")
    assert cairn("tiers", "set", "nvme", "low_watermark=0.95").code == 2


def test_a_drained_tier_is_empty(cairn, space, put):
    keys = put(2)
    cairn.ok("demote", space, "--all", "--evict")
    assert cairn.ok("drain", "nvme", "--json").row["left"] == 0
    assert tier(cairn, "nvme")["blocks"] == 0
    assert "nvme" not in where(cairn, space, *keys)


def test_a_drain_that_leaves_blocks_that_are_held_ends_with_1(node, cairn, space, put):
    keys = put(2)
    with BlockingClient(node.address) as reader:
        held = reader.acquire(reader.find(space), [BlockKey(bytes.fromhex(keys[0]))], lease_s=60)
        outcome = cairn("drain", "dram", "--json")
        assert outcome.code == 1
        assert outcome.row["left"] >= 1
        reader.release(held)
    assert cairn.ok("drain", "dram").code == 0


# Doctor


def examined(cairn: Shell, *words: object, code: int = 0) -> dict[str, dict[str, str]]:
    outcome = cairn("doctor", "--json", *words)
    assert outcome.code == code, outcome.text
    assert outcome.row["ok"] == (code == 0)
    return {check["name"]: check for check in outcome.row["checks"]}


def settings(**given: object) -> list[str]:
    return [f"--{name}={value}" for name, value in given.items()]


@pytest.fixture
def alone(tmp_path: Path) -> Shell:
    """Where no node runs."""
    return Shell(CAIRN_RUN_DIR=None, XDG_RUNTIME_DIR=str(tmp_path / "run"))


def test_the_doctor_finds_a_sound_machine_and_says_what_is_not_there(alone):
    found = examined(alone)
    assert set(found) >= {
        *("python", "memory", "locked memory", "huge pages", "descriptors", "block files", "nvme tier"),
        *("object tier", "cuda driver", "kvikio", "torch", "rdma", "clock", "node"),
    }
    assert {check["state"] for check in found.values()} <= {"ok", "note"}
    assert found["node"]["state"] == "note"
    assert all(check["advice"] for check in found.values() if check["state"] == "note")
    assert "nothing is broken" in alone.ok("doctor").text


def test_the_doctor_looks_at_the_node_and_its_tiers(node, cairn):
    found = examined(cairn)
    assert f"epoch {node.epoch}" in found["node"]["found"]
    assert found["tier nvme"]["state"] in ("ok", "note")
    assert found["tier object"]["state"] == "ok"


def test_the_doctor_looks_at_the_disk_and_leaves_nothing_there(alone, tmp_path):
    folder = tmp_path / "nvme"
    folder.mkdir()
    options = ["--tiers.nvme.path", folder, "--tiers.nvme.capacity=1GiB"]
    found = examined(alone, *options)
    assert "posix" in found["block files"]["found"] or "kvikio" in found["block files"]["found"]
    assert {"O_DIRECT", "disk space", "trim", "ledger"} <= set(found)
    assert list(folder.iterdir()) == []


def test_the_doctor_says_that_a_folder_cannot_be_written(alone):
    found = examined(alone, "--tiers.nvme.path", "/proc/cairn", code=1)
    assert found["nvme tier"]["state"] == "broken"


def test_the_doctor_says_that_the_machine_is_too_small(alone, tmp_path):
    options = ["--tiers.dram.capacity=1000TiB", "--tiers.nvme.path", tmp_path, "--tiers.nvme.capacity=1000TiB"]
    found = examined(alone, *options, code=1)
    assert [name for name, check in found.items() if check["state"] == "broken"] == [
        *("memory", "descriptors", "disk space"),
    ]
    assert "lower tiers.dram.capacity" in found["memory"]["advice"]


def test_the_doctor_says_who_has_the_ledger_and_does_not_take_it(node, alone):
    with BlockingClient(node.address) as client:
        folder = Path(client.stat()["tiers"][1]["medium"]["folder"]).parent
    found = examined(alone, "--tiers.nvme.path", folder, "--tiers.nvme.capacity=16MiB", "--tiers.nvme.slab=2MiB")
    assert f"process {node.pid} has it" in found["ledger"]["found"]


def test_a_lock_that_nobody_has_can_be_taken_after_the_doctor_looked(alone, tmp_path):
    lock = tmp_path / "ledger" / "LOCK"
    lock.parent.mkdir()
    lock.touch()
    assert "nobody has it" in examined(alone, "--tiers.nvme.path", tmp_path)["ledger"]["found"]
    with lock.open("w") as file:
        lockf(file, LOCK_EX | LOCK_NB)


def test_the_doctor_asks_the_bucket(alone, tmp_path):
    (tmp_path / "bucket").mkdir()
    found = examined(alone, f"--tiers.object.url=file://{tmp_path}/bucket")
    assert "0 objects on the first page" in found["object tier"]["found"]
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        options = f"endpoint=http://127.0.0.1:{nobody.getsockname()[1]},allow_http=true,access_key_id=a"
        options += ",secret_access_key=very-secret"
        words = ["--tiers.object.url=s3://bucket", f"--tiers.object.options={options}"]
        found = examined(alone, *words, code=1)
    assert found["object tier"]["state"] == "broken"
    assert "very-secret" not in json.dumps(found)


def test_a_bucket_of_a_kind_that_is_unknown_is_broken(alone):
    assert examined(alone, "--tiers.object.url=ftp://x/y", code=1)["object tier"]["state"] == "broken"


def test_a_node_that_is_named_and_does_not_answer_is_broken(alone, tmp_path):
    assert examined(alone, "--address", f"unix://{tmp_path}/none", code=1)["node"]["state"] == "broken"


def test_a_clock_that_was_set_back_is_broken(alone, tmp_path):
    run_dir = tmp_path / "run" / "cairn"
    run_dir.mkdir(parents=True)
    (run_dir / "node.epoch").write_text(str(4_000_000_000_000))
    assert "set back" in examined(alone, code=1)["clock"]["found"]
