"""The command line against real nodes: what each command prints, and with which code it ends."""

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import types
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from engine_client.blocking import BlockingClient
from kvstore.prefix import Namespace
from kvstore.types import BlockKey
from server.cli import app
from server.commands.output import size_text
from server.commands.top import Sample, describe
from server.conductor.settings import ConductorConfig
from server.config import Config, defaults
from server.gateway.settings import GatewayConfig
from server.sources import describe as describe_settings
from server.worker.settings import WorkerConfig
from tests.system.cairn_process import PATIENCE_S, REPO, clean_environ

BLOCK = 4096
KEY = "00112233445566778899aabbccddeeff"
OTHER = "ffeeddccbbaa99887766554433221100"
FIELDS = ["--model", "m", "--dtype", "d", "--layout", "l", "--block-tokens", "4"]
numbers = count()


class Outcome(NamedTuple):
    """How a command ended. `rows` are the JSON documents on stdout."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def rows(self) -> list[Any]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def row(self) -> Any:
        (row,) = self.rows
        return row


class Shell:
    """Runs `cairn` in this process, as somebody would who has set `environ`."""

    def __init__(self, **environ: str) -> None:
        self.environ: dict[str, str | None] = {
            "CAIRN_ADDRESS": None,
            "CAIRN_TOKEN": None,
            "CAIRN_RUN_DIR": None,
            "COLUMNS": "160",
            **environ,
        }

    def __call__(self, *words: object, stdin: bytes = b"") -> Outcome:
        result = CliRunner().invoke(app, [str(word) for word in words], stdin, env=self.environ, catch_exceptions=False)
        return Outcome(result.exit_code, result.stdout_bytes, result.stderr)

    def ok(self, *words: object, stdin: bytes = b"") -> Outcome:
        outcome = self(*words, stdin=stdin)
        assert (outcome.code, outcome.err) == (0, "")
        return outcome


@pytest.fixture(scope="module")
def node(start_node):
    return start_node()


@pytest.fixture(scope="module")
def cairn(node) -> Shell:
    return Shell(CAIRN_RUN_DIR=str(node.run_dir))


@pytest.fixture
def space(cairn) -> str:
    """A namespace of the test's own: blocks of 4 tokens and 4 KiB."""
    return define(cairn)


def define(cairn: Shell, *options: object) -> str:
    name = f"space-{next(numbers)}"
    fields = {"model": name, "dtype": "bfloat16", "layout": "plain", "block-tokens": 4, "layers": 2}
    words = [f"--{field}={value}" for field, value in {**fields, "block-bytes": BLOCK}.items()]
    cairn.ok("namespace", "define", name, *words, *options)
    return name


@pytest.fixture
def block(tmp_path) -> Path:
    path = tmp_path / "block.kv"
    path.write_bytes(os.urandom(BLOCK))
    return path


@pytest.fixture
def prompt(tmp_path) -> tuple[Path, Path]:
    """(token ids, bytes) of five blocks and a rest."""
    ids, blocks = tmp_path / "prompt.ids", tmp_path / "prompt.kv"
    ids.write_text(" ".join(map(str, range(1, 23))))
    blocks.write_bytes(os.urandom(5 * BLOCK))
    return ids, blocks


def process(*words: object, **environ: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "server.cli", *map(str, words)],
        cwd=REPO,
        env=clean_environ(**environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# Put, get, match


def test_a_file_that_was_put_comes_back_byte_for_byte(cairn, space, block, tmp_path):
    put = cairn.ok("put", space, block, "--key", KEY)
    assert "stored 1 block, 4.0 KiB" in put.text
    assert cairn.ok("get", space, KEY).out == block.read_bytes()
    cairn.ok("get", space, KEY, "-o", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == block.read_bytes()


def test_put_and_get_say_in_json_what_they_did(cairn, space, block, tmp_path):
    assert cairn.ok("put", space, block, "-k", KEY, "--json").row == {
        "namespace": space,
        "blocks": 1,
        "stored": 1,
        "present": 0,
        "busy": 0,
        "refused": 0,
        "over_quota": 0,
        "stored_bytes": BLOCK,
        "reason": "",
        "keys": [KEY],
    }
    copy = str(tmp_path / "copy")
    row = cairn.ok("get", space, KEY, "-o", copy, "--json").row
    assert row == {"namespace": space, "key": KEY, "bytes": BLOCK, "file": copy}


def test_several_files_get_the_keys_in_their_order(cairn, space, block, tmp_path):
    second = tmp_path / "second.kv"
    second.write_bytes(os.urandom(BLOCK))
    cairn.ok("put", space, block, second, "--key", f"{KEY},{OTHER}")
    assert cairn.ok("get", space, OTHER).out == second.read_bytes()


def test_a_prompt_file_is_cut_into_the_blocks_of_its_chain(cairn, space, prompt):
    ids, blocks = prompt
    keys = cairn.ok("put", space, blocks, "--tokens", ids, "--json").row["keys"]
    assert len(keys) == 5
    assert cairn.ok("get", space, keys[3]).out == blocks.read_bytes()[3 * BLOCK : 4 * BLOCK]
    assert cairn.ok("match", space, "--tokens", ids).text == "5 of 5 blocks: 20 tokens\n"
    parents = [row["parent"] for row in cairn.ok("ls", space, "--json").rows]
    assert parents[1:] == keys[:-1]


def test_as_many_files_as_blocks_are_the_blocks(cairn, space, prompt, tmp_path):
    ids, blocks = prompt
    files = [tmp_path / f"{number}.kv" for number in range(5)]
    for number, file in enumerate(files):
        file.write_bytes(blocks.read_bytes()[number * BLOCK : (number + 1) * BLOCK])
    assert cairn.ok("put", space, *files, "--tokens", ids, "--json").row["stored"] == 5


def test_where_any_size_goes_a_prompt_file_is_cut_evenly(cairn, tmp_path, prompt):
    space = define(cairn, "--block-bytes=0")
    ids, blocks = prompt
    blocks.write_bytes(os.urandom(5 * 10))
    assert cairn.ok("put", space, blocks, "--tokens", ids, "--json").row["stored_bytes"] == 50


def test_a_second_put_stores_nothing_again(cairn, space, prompt):
    ids, blocks = prompt
    cairn.ok("put", space, blocks, "--tokens", ids)
    again = cairn.ok("put", space, blocks, "--tokens", ids)
    assert "stored 0 blocks" in again.text
    assert "5 blocks: were there already" in again.text


def test_blocks_and_tokens_come_from_stdin(cairn, space, block, prompt):
    assert cairn.ok("put", space, "-", "--key", KEY, stdin=block.read_bytes()).code == 0
    assert cairn.ok("get", space, KEY).out == block.read_bytes()
    ids, blocks = prompt
    assert cairn.ok("put", space, blocks, "--tokens", "-", "--json", stdin=ids.read_bytes()).row["stored"] == 5
    assert cairn.ok("match", space, "--tokens", "-", "--json", stdin=ids.read_bytes()).row["matched_blocks"] == 5


@pytest.mark.parametrize(
    "text", ["1 2 3 4 5 6 7 8", "1,2,3,4,5,6,7,8", "[1, 2, 3, 4,\n 5, 6, 7, 8]", "1\n2\n3\n4\n5 6 7 8\n"]
)
def test_token_ids_may_be_written_in_any_usual_way(cairn, space, text, tmp_path):
    ids = tmp_path / "ids"
    ids.write_text(text)
    plain = cairn("match", space, "--prompt-ids", "1,2,3,4,5,6,7,8", "--json").row
    assert cairn("match", space, "--tokens", ids, "--json").row == plain
    assert plain["blocks"] == 2


def test_match_counts_from_the_first_block(cairn, space, prompt):
    ids, blocks = prompt
    keys = cairn.ok("put", space, blocks, "--tokens", ids, "--json").row["keys"]
    cairn.ok("evict", space, *keys[2:])
    row = cairn.ok("match", space, "--tokens", ids, "--json").row
    assert row == {"namespace": space, "blocks": 5, "matched_blocks": 2, "matched_tokens": 8, "keys": keys}
    assert (
        cairn.ok("match", space, "--keys", keys[0], "--keys", f"{keys[1]},{keys[2]}").text
        == "2 of 3 blocks: 8 tokens\n"
    )


def test_a_miss_ends_with_1(cairn, space, prompt):
    ids, _ = prompt
    assert cairn("match", space, "--tokens", ids).code == 1
    miss = cairn("match", space, "--tokens", ids, "--json")
    assert (miss.code, miss.row["matched_blocks"]) == (1, 0)
    get = cairn("get", space, KEY)
    assert (get.code, get.out) == (1, b"")
    assert get.err.startswith(f"error[not_found]: block {KEY}: not stored here")


def test_with_json_an_error_is_a_document_too(cairn, space, tmp_path):
    get = cairn("get", space, KEY, "-o", tmp_path / "copy", "--json")
    assert get.code == 1
    assert get.err.startswith("error[not_found]: ")
    assert get.row["error"]["code"] == "not_found"
    assert get.row["error"]["retryable"] is False
    assert not (tmp_path / "copy").exists()


def test_what_somebody_else_is_writing_is_busy(cairn, node, space, block):
    with BlockingClient(node.address) as writer:
        grant = writer.place(writer.find(space), [BlockKey(bytes.fromhex(KEY))], [BLOCK])
        put = cairn("put", space, block, "--key", KEY)
        assert put.code == 1
        assert "1 block: are being written by somebody else" in put.text
        assert "allocated" in cairn.ok("ls", space).text
        assert "being written" in cairn.ok("explain", space, KEY).text
        writer.abort(grant)


# Looking


def test_namespaces_are_listed(cairn, space, node):
    assert space in cairn.ok("ls").text
    row = next(row for row in cairn.ok("ls", "--json").rows if space in row["names"])
    assert set(row) >= {"names", "tenant", "fields", "fingerprint", "blocks", "hit_blocks", "missed_blocks"}
    assert row["fields"]["block_tokens"] == 4


def test_blocks_are_listed_to_a_limit_and_beyond(cairn, space, prompt):
    ids, blocks = prompt
    keys = cairn.ok("put", space, blocks, "--tokens", ids, "--json").row["keys"]
    rows = cairn.ok("ls", space, "--json").rows
    assert [row["key"] for row in rows] == keys
    assert set(rows[0]) == {"key", "parent", "tier", "bytes", "state", "checksum", "layers", "holders"}
    two = cairn.ok("ls", space, "--limit", 2)
    assert keys[1] in two.text
    assert keys[2] not in two.text
    assert f"--after {keys[1]}" in two.text
    assert [row["key"] for row in cairn.ok("ls", space, "--after", keys[1], "--limit", 0, "--json").rows] == keys[2:]


def test_more_blocks_than_a_page_are_all_listed_once(cairn, node, space):
    keys = fill(node, space, 2500)
    assert [row["key"] for row in cairn.ok("ls", space, "--limit", 0, "--json").rows] == keys
    assert len(cairn.ok("ls", space, "--limit", 1500, "--json").rows) == 1500


def test_an_empty_namespace_lists_nothing(cairn, space):
    assert cairn.ok("ls", space).text == "no blocks\n"
    assert cairn.ok("ls", space, "--json").out == b""


def test_a_namespace_is_shown(cairn, space):
    assert "bfloat16" in cairn.ok("namespace", "show", space).text
    row = cairn.ok("namespace", "show", space, "--json").row
    assert row["name"] == space
    assert len(row["fingerprint"]) == 32
    assert row["fields"]["layout"] == "plain"


def test_a_name_that_is_defined_otherwise_is_refused_with_the_difference(cairn, space):
    words = ["namespace", "define", space, "--model", space, "--layout", "plain", "--block-tokens", 4, "--layers", 2]
    again = cairn("namespace", "define", *words[2:], "--dtype", "bfloat16", "--block-bytes", "4KiB")
    assert again.code == 0
    other = cairn("namespace", "define", *words[2:], "--dtype", "float16", "--block-bytes", "4KiB")
    assert other.code == 1
    assert "error[namespace_mismatch]: " in other.err
    assert "dtype: 'bfloat16' here, 'float16' there" in other.err


def test_explain_says_why(cairn, space, prompt):
    ids, blocks = prompt
    keys = cairn.ok("put", space, blocks, "--tokens", ids, "--json").row["keys"]
    cairn.ok("evict", space, keys[4])
    text = cairn.ok("explain", space, "--tokens", ids).text
    assert "removed: deleted" in text
    assert "4 of 5 blocks are there; a reader gets 4" in text
    rows = cairn.ok("explain", space, keys[0], KEY, "--json").rows
    assert [row["hit"] for row in rows] == [True, False]
    assert set(rows[0]) == {"key", "hit", "tier", "reason", "bytes"}


def test_explain_finds_the_same_tokens_in_another_namespace(cairn, space, prompt):
    ids, blocks = prompt
    cairn.ok("put", space, blocks, "--tokens", ids)
    other = define(cairn)
    reason = cairn.ok("explain", other, "--tokens", ids, "--json").rows[0]["reason"]
    assert "the same tokens are in 'space-" in reason
    assert f"(model: '{other}' here, 'space-" in reason


def test_stat_shows_the_node(cairn, node, space):
    text = cairn.ok("stat").text
    assert f"epoch {node.epoch}" in text
    assert "64.0 MiB" in text
    row = cairn.ok("stat", "--json").row
    assert (row["node"], row["epoch"], row["tenant"], row["address"]) == ("node", node.epoch, "default", node.address)
    assert set(row) >= {"tiers", "tenants", "namespaces", "counters", "index", "may_write", "admin"}


def test_tiers_show_their_usage(cairn, space, block):
    cairn.ok("put", space, block, "--key", KEY)
    assert "dram" in cairn.ok("tiers").text
    row = cairn.ok("tiers", "--json").row
    assert row["tier"] == "dram"
    assert row["used_bytes"] >= BLOCK
    assert set(row) >= {"capacity_bytes", "target_bytes", "high_watermark", "low_watermark", "blocks", "slabs"}


def test_check_of_a_sound_node_is_clean(cairn):
    assert cairn.ok("check").text == "all is well\n"
    assert cairn.ok("check", "--json").row == {"ok": True, "problems": []}


# Operating


def test_evict_frees_what_is_named(cairn, space, prompt):
    ids, blocks = prompt
    keys = cairn.ok("put", space, blocks, "--tokens", ids, "--json").row["keys"]
    assert cairn.ok("evict", space, *keys[:2]).text == "evicted 2 blocks, 8.0 KiB\n"
    row = cairn.ok("evict", space, "--all", "--json").row
    assert row == {"namespace": space, "blocks": 3, "freed_bytes": 3 * BLOCK}
    gone = cairn("evict", space, keys[0])
    assert (gone.code, gone.text) == (1, "evicted 0 blocks, 0 B\n")
    assert cairn.ok("evict", space, "--all").text == "evicted 0 blocks, 0 B\n"


def test_all_of_a_large_namespace_goes_even_behind_a_block_that_is_being_written(cairn, node, space):
    with BlockingClient(node.address) as writer:
        writer.place(writer.find(space), [BlockKey(bytes.fromhex(KEY))], [BLOCK])
        fill(node, space, 2500)
        assert cairn.ok("evict", space, "--all", "--json").row["blocks"] == 2500
        assert [row["key"] for row in cairn.ok("ls", space, "--json").rows] == [KEY]


def test_a_pin_holds_until_it_is_let_go(cairn, space, prompt):
    ids, blocks = prompt
    keys = cairn.ok("put", space, blocks, "--tokens", ids, "--json").row["keys"]
    row = cairn.ok("pin", space, "--tokens", ids, "--hard", "--ttl", "90s", "--json").row
    assert row == {"namespace": space, "pin_id": row["pin_id"], "blocks": 5, "hard": True, "ttl_seconds": 90.0}
    assert {row["holders"] for row in cairn.ok("ls", space, "--json").rows} == {1}
    assert cairn.ok("unpin", row["pin_id"], "--json").row == {"pin_id": row["pin_id"]}
    assert {row["holders"] for row in cairn.ok("ls", space, "--json").rows} == {0}
    soft = cairn.ok("pin", space, keys[0], KEY)
    assert "1 of 2 blocks, for 10m" in soft.text
    assert cairn.ok("unpin", soft.text.split()[1].rstrip(":")).code == 0


def test_pinning_nothing_and_letting_go_of_nothing_end_with_1(cairn, space):
    assert cairn("pin", space, KEY).code == 1
    unpin = cairn("unpin", 999_999)
    assert unpin.code == 1
    assert unpin.err == "error[not_found]: no pin 999999 of tenant default\n"


def test_a_tier_is_changed_while_it_serves(start_node):
    cairn = Shell(CAIRN_RUN_DIR=str(start_node().run_dir))
    assert "32.0 MiB" in cairn.ok("tiers", "set", "dram", "capacity=32MiB").text  # on its way there, or there already
    row = cairn.ok("tiers", "set", "dram", "high_watermark=0.8", "low_watermark=0.5", "--json").row
    assert (row["target_bytes"], row["high_watermark"], row["low_watermark"]) == (32 << 20, 0.8, 0.5)
    senseless = cairn("tiers", "set", "dram", "high_watermark=0.3")
    assert senseless.code == 2
    assert "watermarks" in senseless.err
    absent = cairn("tiers", "set", "nvme", "capacity=1GiB")
    assert (absent.code, absent.err) == (1, "error[not_found]: no tier 'nvme' with slabs; there is dram\n")


def fill(node, space: str, blocks: int) -> list[str]:
    """Store small blocks; their keys."""
    with BlockingClient(node.address) as writer:
        found = writer.find(space)
        keys = found.keys(range(4 * blocks))
        payload = bytes(BLOCK)
        writer.put(found, keys, [payload] * blocks)
    return [key.hex() for key in keys]


# Bad input


BAD = {
    "no namespace": ["put"],
    "no file": ["put", "{space}", "--key", KEY],
    "neither key nor tokens": ["put", "{space}", "{block}"],
    "both key and tokens": ["put", "{space}", "{block}", "--key", KEY, "--tokens", "{ids}"],
    "a key that is none": ["put", "{space}", "{block}", "--key", "0011"],
    "a key with spaces": ["get", "{space}", "00 112233445566778899aabbccddeeff"],
    "two keys for a file": ["put", "{space}", "{block}", "--key", KEY, "--key", OTHER],
    "a file that is not there": ["put", "{space}", "/no/such/file", "--key", KEY],
    "a directory": ["put", "{space}", "/", "--key", KEY],
    "a block of another size": ["put", "{space}", "{ids}", "--key", KEY],
    "a prompt of another size": ["put", "{space}", "{block}", "--tokens", "{ids}"],
    "a key with a part where there are none": ["get", "{space}", KEY + "0000"],
    "a part that is not there": ["put", "{space}", "{block}", "--prompt-ids", "1,2,3,4", "--part", "1"],
    "tokens that are none": ["match", "{space}", "--prompt-ids", "1,two,3"],
    "a token that is too large": ["match", "{space}", "--prompt-ids", "4294967296,1,2,3"],
    "a negative token": ["match", "{space}", "--prompt-ids", "-1,1,2,3"],
    "bytes for tokens": ["match", "{space}", "--tokens", "{block}"],
    "no tokens": ["match", "{space}", "--prompt-ids", ","],
    "too few tokens": ["match", "{space}", "--prompt-ids", "1,2,3"],
    "nothing to match": ["match", "{space}"],
    "nothing to evict": ["evict", "{space}"],
    "all and a key": ["evict", "{space}", KEY, "--all"],
    "json on a stdout of bytes": ["get", "{space}", KEY, "--json"],
    "a target in no directory": ["get", "{space}", KEY, "-o", "/no/such/directory/file"],
    "a negative limit": ["ls", "{space}", "--limit", "-1"],
    "a time without a unit of time": ["pin", "{space}", KEY, "--ttl", "10GiB"],
    "a pin for no time": ["pin", "{space}", KEY, "--ttl", "0s"],
    "a pin for ever": ["pin", "{space}", KEY, "--ttl", "99999999999h"],
    "a pin id that is none": ["unpin", "seventeen"],
    "a pin id of another world": ["unpin", str(2**64)],
    "a setting of a tier that is none": ["tiers", "set", "dram", "colour=red"],
    "a setting without a value": ["tiers", "set", "dram", "capacity"],
    "a tier without a setting": ["tiers", "set", "dram"],
    "a tier of another world": ["tiers", "set", "tape", "capacity=1GiB"],
    "a tier that has no slabs": ["tiers", "set", "object", "capacity=1GiB"],
    "a word that is not set": ["tiers", "get", "dram", "capacity"],
    "a size that is none": ["tiers", "set", "dram", "capacity=lots"],
    "a size of another world": ["tiers", "set", "dram", "capacity=99999999TiB"],
    "a share above 1": ["tiers", "set", "dram", "high_watermark=1.5"],
    "less than a slab": ["tiers", "set", "dram", "capacity=1KiB"],
    "nothing to promote": ["promote", "{space}"],
    "a load that takes no time": ["promote", "{space}", KEY, "--load", "0s"],
    "nothing to demote": ["demote", "{space}"],
    "demoted to where it is": ["demote", "{space}", KEY, "--to", "dram"],
    "evicted from a tier of another world": ["evict", "{space}", KEY, "--tier", "tape"],
    "evicted upwards": ["evict", "{space}", KEY, "--to", "dram"],
    "evicted from below to below": ["evict", "{space}", KEY, "--tier", "nvme", "--to", "object"],
    "a bucket that is drained": ["drain", "object"],
    "no tier to drain": ["drain"],
    "a doctor with a setting that is none": ["doctor", "--tiers.nvme.pth", "/tmp"],
    "an address that is none": ["stat", "--address", "node.example"],
    "a timeout that is none": ["stat", "--timeout", "soon"],
    "an interval of nothing": ["top", "--interval", "0s", "--once"],
    "authorities that are none": ["stat", "--address", "tls://127.0.0.1:1", "--ca-file", "{block}"],
    "a name with a slash": ["namespace", "define", "a/b", *FIELDS],
    "a block of no tokens": ["namespace", "define", "n", *FIELDS, "--block-tokens", "0"],
    "no model": ["namespace", "define", "n", *FIELDS[2:]],
    "a hash that is none": ["namespace", "define", "n", *FIELDS, "--hash", "md5"],
    "an option that is none": ["stat", "--jsn"],
    "a command that is none": ["stats"],
}  # fmt: skip


@pytest.mark.parametrize("words", BAD.values(), ids=BAD)
def test_bad_input_ends_with_2_and_says_what_is_wrong(cairn, space, block, prompt, words):
    if words[:2] == ["get", "{space}"]:
        cairn.ok("put", space, block, "--key", KEY)
    names = {"{space}": space, "{block}": block, "{ids}": prompt[0]}
    outcome = cairn(*(names.get(word, word) for word in words))
    assert outcome.code == 2
    assert "rror" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_key_needs_its_part_where_blocks_have_parts(cairn, block):
    space = define(cairn, "--parts", 2)
    bare = cairn("put", space, block, "--key", KEY)
    assert bare.code == 2
    assert "36 hex digits" in bare.err
    cairn.ok("put", space, block, "--key", KEY + "0100")
    assert cairn("match", space, "--keys", KEY + "0100").code == 1
    cairn.ok("put", space, block, "--key", KEY + "0000")
    assert cairn.ok("match", space, "--keys", KEY + "0100").code == 0
    assert cairn.ok("get", space, KEY + "0100").out == block.read_bytes()
    assert cairn("get", space, KEY + "0100", KEY).code == 2


# Which node, and who is asking


ASKING = {
    "put": ["put", "x", "{block}", "--key", KEY],
    "get": ["get", "x", KEY],
    "match": ["match", "x", "--keys", KEY],
    "ls": ["ls"],
    "stat": ["stat"],
    "tiers": ["tiers"],
    "evict": ["evict", "x", "--all"],
    "pin": ["pin", "x", KEY],
    "unpin": ["unpin", "1"],
    "explain": ["explain", "x", KEY],
    "promote": ["promote", "x", KEY],
    "demote": ["demote", "x", "--all"],
    "drain": ["drain", "dram"],
    "check": ["check"],
    "top": ["top", "--once"],
    "namespace show": ["namespace", "show", "x"],
    "namespace define": ["namespace", "define", "x", *FIELDS],
}


@pytest.mark.parametrize("words", ASKING.values(), ids=ASKING)
def test_without_a_node_every_command_ends_with_1(tmp_path, block, words):
    outcome = Shell(CAIRN_RUN_DIR=str(tmp_path))(*(block if word == "{block}" else word for word in words))
    assert outcome.code == 1
    assert outcome.err == f"error[connect_failed]: unix://{tmp_path}/node.sock: No such file or directory\n"


@pytest.mark.parametrize("words", ASKING.values(), ids=ASKING)
def test_with_a_wrong_token_every_command_ends_with_1(node, block, words):
    cairn = Shell(CAIRN_ADDRESS=node.tcp_address, CAIRN_TOKEN="wrong" * 8)
    outcome = cairn(*(block if word == "{block}" else word for word in words))
    assert outcome.code == 1
    assert outcome.err == "error[forbidden]: the token is not known here\n"


@pytest.mark.parametrize(
    "words", [words for name, words in ASKING.items() if "x" in words and name != "namespace define"]
)
def test_a_namespace_that_is_not_there_ends_with_1(cairn, block, words):
    outcome = cairn(*(block if word == "{block}" else word for word in words))
    assert outcome.code == 1
    assert outcome.err == "error[not_found]: no namespace 'x' of tenant default\n"


def test_the_run_directory_has_the_token_for_tcp_on_this_host(node):
    outcome = Shell()("stat", "--address", node.tcp_address, "--run-dir", node.run_dir, "--json")
    assert (outcome.code, outcome.row["address"]) == (0, node.tcp_address)


def test_a_token_that_was_found_is_not_sent_to_another_host(start_node):
    node = start_node(**{"node.tcp_listen": "0.0.0.0:0"})
    elsewhere = node.tcp_address  # tcp://0.0.0.0:port reaches this host, and is no loopback address
    outcome = Shell(CAIRN_RUN_DIR=str(node.run_dir))("stat", "--address", elsewhere)
    assert (outcome.code, outcome.err) == (1, "error[forbidden]: a token is needed\n")
    assert Shell(CAIRN_TOKEN=node.token).ok("stat", "--address", elsewhere).code == 0


def test_options_outweigh_the_environment(node):
    cairn = Shell(CAIRN_ADDRESS="tcp://127.0.0.1:1", CAIRN_TOKEN="wrong" * 8, CAIRN_RUN_DIR="/nowhere")
    assert cairn("stat").code == 1
    assert cairn.ok("stat", "--address", node.tcp_address, "--token", node.token).code == 0


def test_blocks_go_over_tcp_as_well(node, cairn, space, prompt):
    tcp = Shell(CAIRN_ADDRESS=node.tcp_address, CAIRN_TOKEN=node.token)
    ids, blocks = prompt
    keys = tcp.ok("put", space, blocks, "--tokens", ids, "--json").row["keys"]
    assert tcp.ok("get", space, keys[4]).out == blocks.read_bytes()[4 * BLOCK :]
    assert cairn.ok("match", space, "--tokens", ids).text == "5 of 5 blocks: 20 tokens\n"


def test_a_node_that_hangs_is_given_up_in_time(node_process):
    os.kill(node_process.pid, signal.SIGSTOP)
    hung = Shell()("stat", "--address", node_process.address, "--timeout", "200ms")
    os.kill(node_process.pid, signal.SIGCONT)
    assert (hung.code, hung.err) == (1, f"error[deadline_exceeded]: {node_process.address}: no answer in time\n")


def test_who_answers_and_is_no_node_is_told_apart(node):
    outcome = Shell()("stat", "--address", node.rest_url.replace("http", "tcp"))
    assert outcome.code == 1
    assert outcome.err.startswith("error[protocol_error]: not a frame of this protocol")


TENANTS = {
    "node.unix_tenant": "reader",
    "tenants.0.name": "reader",
    "tenants.0.token": "reader-token-of-16",
    "tenants.0.may_write": "false",
    "tenants.1.name": "writer",
    "tenants.1.token": "writer-token-of-16",
    "tenants.1.quota": "16KiB",
}


@pytest.fixture(scope="module")
def shared(start_node):
    return start_node(**TENANTS)


@pytest.mark.parametrize("name", ["put", "evict", "pin", "unpin", "demote"])
def test_who_may_only_read_is_refused(shared, block, name):
    reader = Shell(CAIRN_ADDRESS=shared.address)
    reader.ok("namespace", "define", "x", *FIELDS)
    outcome = reader(*(block if word == "{block}" else word for word in ASKING[name]))
    assert outcome.code == 1
    assert outcome.err == "error[forbidden]: tenant reader may only read\n"


@pytest.mark.parametrize("words", [["check"], ["drain", "dram"], ["tiers", "set", "dram", "capacity=32MiB"]])
def test_who_is_no_admin_may_not_operate(shared, words):
    outcome = Shell(CAIRN_ADDRESS=shared.tcp_address, CAIRN_TOKEN="writer-token-of-16")(*words)
    assert outcome.code == 1
    assert outcome.err == "error[forbidden]: tenant writer is no admin\n"


def test_who_may_only_read_still_reads_and_looks(shared):
    reader = Shell(CAIRN_ADDRESS=shared.address)
    assert "may only read" in reader.ok("stat").text
    assert reader.ok("tiers").code == 0


def test_an_old_token_in_the_run_directory_does_not_shut_the_door(shared):
    (shared.run_dir / "token").write_text("token-of-a-time-before secret\n")
    assert "tenant reader" in Shell(CAIRN_RUN_DIR=str(shared.run_dir)).ok("stat").text


def test_a_refused_block_names_the_reason(shared, prompt):
    writer = Shell(CAIRN_ADDRESS=shared.tcp_address, CAIRN_TOKEN="writer-token-of-16")
    ids, blocks = prompt
    space = define(writer)
    writer.ok("put", space, "-", "--prompt-ids", "9,9,9,9", stdin=bytes(BLOCK))
    writer.ok("pin", space, "--prompt-ids", "9,9,9,9", "--hard")
    put = writer("put", space, blocks, "--tokens", ids, "--json")
    assert put.code == 1
    assert (put.row["stored"], put.row["refused"], put.row["reason"][:19]) == (3, 2, "refused: over quota")
    writer.ok("evict", space, *put.row["keys"][:3])
    assert "2 blocks: refused: over quota" in writer("put", space, blocks, "--tokens", ids).text


# The node


def test_the_node_says_on_one_line_where_it_serves(tmp_path):
    options = ["--node.tcp_listen=", "--rest.listen=", "--tiers.dram.capacity=4MiB", "--tiers.dram.slab=4MiB"]
    started = process("node", f"--node.run_dir={tmp_path}/run", *options)
    line = started.stdout.readline().decode()
    started.send_signal(signal.SIGINT)
    rest, log = started.communicate(timeout=PATIENCE_S)
    assert line.startswith("node node, epoch ")
    assert line.endswith(f"serves at unix://{tmp_path}/run/node.sock\n")
    assert (started.returncode, rest) == (0, b"")
    assert b"INFO cairn.node: " in log


def test_a_node_ends_with_0_when_it_is_asked_to_and_grows_its_epoch(start_node):
    first = start_node()
    assert Shell(CAIRN_RUN_DIR=str(first.run_dir)).ok("stat").code == 0
    assert first.stop() == 0
    assert not (first.run_dir / "node.sock").exists()
    second = start_node(first.run_dir)
    assert second.epoch > first.epoch
    second.kill()
    third = start_node(first.run_dir)
    assert third.epoch > second.epoch
    assert Shell(CAIRN_RUN_DIR=str(first.run_dir)).ok("stat", "--json").row["epoch"] == third.epoch


def test_settings_come_from_file_environment_and_options(start_node, tmp_path):
    file = tmp_path / "node.toml"
    file.write_text('[node]\nname = "from-file"\n[tiers.dram]\nslab = "2MiB"\n')
    environ = {"CAIRN_TIERS__DRAM__CAPACITY": "8MiB", "CAIRN_TIERS__DRAM__SLAB": "1MiB"}
    node = start_node(environ=environ, **{"tiers.dram.capacity": None, "tiers.dram.slab": None, "config": str(file)})
    row = Shell(CAIRN_ADDRESS=node.address).ok("stat", "--json").row
    assert row["node"] == "from-file"
    assert (row["tiers"][0]["slab_bytes"], row["tiers"][0]["target_bytes"]) == (1 << 20, 8 << 20)


WRONG_SETTINGS = {
    "unknown": (["--tiers.dram.capcity", "1GiB"], "did you mean --tiers.dram.capacity?"),
    "no value": (["--log.level"], "--log.level: needs a value"),
    "bad value": (["--log.level", "loud"], "expected one of debug, info, warning, error, not 'loud'"),
    "a word": (["faster"], "faster: expected an option"),
    "no file": (["--config", "/no/such/file"], "/no/such/file: No such file or directory"),
    "contradiction": (["--tiers.dram.capacity=1MiB"], "a slab must fit into the tier"),
}


@pytest.mark.parametrize(("options", "message"), WRONG_SETTINGS.values(), ids=WRONG_SETTINGS)
@pytest.mark.parametrize("command", [["node"], ["config", "show"]], ids=["node", "config"])
def test_wrong_settings_end_with_2_and_the_nearest_right_name(command, options, message, tmp_path):
    outcome = Shell(HOME=str(tmp_path))(*command, *options)
    assert outcome.code == 2
    assert outcome.err.startswith("error[config_error]: ")
    assert message in outcome.err


def test_a_node_that_cannot_have_its_places_ends_with_2(node, tmp_path):
    taken = node.tcp_address.removeprefix("tcp://")
    small = ["--tiers.dram.capacity=4MiB", "--tiers.dram.slab=4MiB", "--rest.listen="]
    blocked = tmp_path / "file"
    blocked.write_text("")
    for options, message in (
        ([f"--node.run_dir={node.run_dir}", "--node.tcp_listen="], "another node serves at"),
        ([f"--node.run_dir={tmp_path}/run", f"--node.tcp_listen={taken}"], f"node.tcp_listen {taken}: "),
        ([f"--node.run_dir={blocked}/run", "--node.tcp_listen="], f"node.run_dir {blocked}/run: "),
    ):
        started = process("node", *small, *options)
        out, err = started.communicate(timeout=PATIENCE_S)
        assert (started.returncode, out) == (2, b"")
        assert f"error[config_error]: {message}" in err.decode()
        assert b"Traceback" not in err


def test_a_supervisor_that_listens_is_told(start_node, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(PATIENCE_S)
        start_node(environ={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert listening.recv(100) == b"READY=1"


def test_config_show_says_where_each_value_is_from(tmp_path):
    file = tmp_path / "node.toml"
    file.write_text('[[tenants]]\nname = "default"\ntoken = "0123456789abcdef"\n')
    cairn = Shell(CAIRN_LOG__LEVEL="debug", HOME=str(tmp_path))
    words = ["config", "show", "--config", file, "--tiers.dram.capacity=2GiB"]
    assert "0123456789abcdef" not in cairn.ok(*words).text
    rows = {row["name"]: row for row in cairn.ok(*words, "--json").rows}
    assert set(defaults()) >= {name for name in rows if not name.startswith("tenants")}
    assert rows["tiers.dram.capacity"] == {
        "name": "tiers.dram.capacity",
        "value": "2GiB",
        "origin": "--tiers.dram.capacity",
    }
    assert rows["log.level"]["origin"] == "CAIRN_LOG__LEVEL"
    assert (rows["tenants.0.token"]["value"], rows["tenants.0.token"]["origin"]) == ("********", str(file))
    assert rows["node.name"]["origin"] == "default"


# top


def test_top_looks_once(cairn, space, block):
    cairn.ok("put", space, block, "--key", KEY)
    text = cairn.ok("top", "--once", "--interval", "100ms").text
    assert "requests/s" in text
    assert "dram" in text
    assert re.search(r"^and \d+ more", text, re.MULTILINE)
    row = cairn.ok("top", "--once", "--interval", "100ms", "--json").row
    assert set(row) == {
        *("reachable", "interval_seconds", "address", "node", "epoch", "tenant"),
        *("tiers", "tenants", "rates", "namespaces"),
    }
    assert row["interval_seconds"] >= 0.1
    assert row["rates"]["requests"] > 0


def test_rates_are_counts_over_the_time_between_two_looks(cairn, space, block):
    def look(at_s: float) -> Sample:
        return Sample(at_s, cairn.ok("stat", "--json").row)

    before = look(10.0)
    cairn.ok("put", space, block, "--key", KEY)
    cairn.ok("match", space, "--keys", KEY)
    cairn.ok("get", space, KEY)
    cairn.ok("evict", space, KEY)
    view = describe(before, look(12.0))
    assert view["rates"]["stored_bytes"] == BLOCK / 2
    assert view["rates"]["loaded_bytes"] == BLOCK / 2
    assert view["rates"]["removed_blocks"]["deleted"] == 0.5
    (row,) = (row for row in view["namespaces"] if space in row["names"])
    assert (row["hit_ratio"], row["hit_blocks"], row["missed_blocks"]) == (1.0, 0.5, 0.0)


def test_rates_begin_anew_with_a_restart(cairn):
    now = Sample(12.0, cairn.ok("stat", "--json").row)
    before = Sample(10.0, {**now.found, "epoch": now.found["epoch"] - 1})
    for view in (describe(before, now), describe(None, now)):
        assert view["rates"]["requests"] == 0.0


def test_top_goes_on_through_a_restart(start_node):
    first = start_node()
    with closing_process(process("top", "--json", "-i", "100ms", CAIRN_RUN_DIR=str(first.run_dir))) as watching:
        assert next_view(watching, reachable=True)["epoch"] == first.epoch
        first.kill()
        assert next_view(watching, reachable=False)["error"]["code"] in ("connect_failed", "peer_lost")
        second = start_node(first.run_dir)
        assert next_view(watching, reachable=True)["epoch"] == second.epoch
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=PATIENCE_S)
    assert (watching.returncode, err) == (130, b"")


def next_view(watching: subprocess.Popen, *, reachable: bool) -> dict:
    """The first view from now on in which the node is (not) reachable."""
    for line in watching.stdout:
        view = json.loads(line)
        if view["reachable"] == reachable:
            return view
    raise AssertionError(watching.stderr.read())


@contextmanager
def closing_process(started: subprocess.Popen) -> Iterator[subprocess.Popen]:
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


# On a terminal


class Terminal:
    """A command on a terminal of 120 columns; `shown` is all that it wrote there."""

    def __init__(self, *words: object, **environ: str) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server.cli", *map(str, words)],
            cwd=REPO,
            env=clean_environ(TERM="xterm", **environ),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert self._read(deadline), f"{text!r} did not come:\n{self.shown}"

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self, deadline: float) -> bool:
        readable, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
        try:
            piece = os.read(self._fd, 65536) if readable else b""
        except OSError:  # the other side is closed
            return False
        self.shown += piece.decode(errors="replace")
        return bool(piece)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self._fd)


def test_top_is_live_on_a_terminal_and_leaves_it_clean(node):
    with closing(Terminal("top", "-i", "100ms", CAIRN_RUN_DIR=str(node.run_dir))) as terminal:
        terminal.wait_for("requests/s")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
    assert "\x1b[?1049h" in terminal.shown
    assert "\x1b[?1049l" in terminal.shown
    assert "Traceback" not in terminal.shown


def test_a_put_shows_its_progress_on_a_terminal(node, cairn, space, prompt):
    ids, blocks = prompt
    with closing(Terminal("put", space, blocks, "--tokens", ids, CAIRN_RUN_DIR=str(node.run_dir))) as terminal:
        assert terminal.end() == 0
    assert "storing blocks" in terminal.shown
    assert "stored 5 blocks" in terminal.shown


def test_the_bytes_of_a_block_are_kept_off_a_terminal(node, cairn, space, block):
    cairn.ok("put", space, block, "--key", KEY)
    with closing(Terminal("get", space, KEY, CAIRN_RUN_DIR=str(node.run_dir))) as terminal:
        assert terminal.end() == 2
    assert "--output" in terminal.shown


def test_a_node_shows_how_much_memory_is_ready_on_a_terminal(tmp_path):
    options = ["--node.tcp_listen=", "--rest.listen=", "--tiers.dram.capacity=64MiB", "--tiers.dram.slab=4MiB"]
    with closing(Terminal("node", f"--node.run_dir={tmp_path}/run", *options)) as terminal:
        terminal.wait_for("serves at")
        terminal.wait_for("memory, in slabs")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0


def test_a_reader_that_goes_early_makes_no_traceback(node, cairn, space):
    fill(node, space, 2500)
    with closing_process(process("ls", space, "--limit", "0", "--json", CAIRN_RUN_DIR=str(node.run_dir))) as listing:
        listing.stdout.readline()
        listing.stdout.close()
        assert listing.wait(PATIENCE_S) == 1
        assert listing.stderr.read() == b""


# Help


def all_commands() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def visit(command: Any, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            visit(inner, f"{path} {name}".strip())
        if not hasattr(command, "commands"):
            found[path] = command

    visit(typer.main.get_command(app), "")
    return found


COMMANDS = all_commands()


def test_all_commands_are_there():
    assert set(COMMANDS) == {
        *("node", "config show", "demo", "put", "get", "match", "ls", "evict", "pin", "unpin", "explain"),
        *("namespace define", "namespace show", "stat", "tiers", "check", "top"),
        *("promote", "demote", "drain", "doctor", "trace replay", "bench transport"),
        *("nodes", "locate", "replicate", "events"),
        *("conductor serve", "conductor calibrate", "gateway", "worker", "simulate"),
    }


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "demo"])
def test_help_has_an_example_and_all_options(name):
    outcome = Shell().ok(*name.split(), "--help")
    assert "Example" in outcome.text
    assert f"cairn {name.removesuffix(' serve')}" in outcome.text
    assert "--json" in outcome.text


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_use_options_that_exist(name):
    help_text = COMMANDS[name].help.replace("\\\n", " ")
    spelled = name.removesuffix(" serve")
    examples = [line.strip() for line in help_text.splitlines() if line.strip().startswith(f"cairn {spelled}")]
    assert examples
    known = {"--help", *(f"--{setting}" for setting in settings_of(name))}
    context = COMMANDS[name].make_context(name, [], resilient_parsing=True)
    for option in COMMANDS[name].get_params(context):
        known |= set(option.opts)
    for example in examples:
        words = shlex.split(example.partition("|")[0].partition("&&")[0])
        used = {word.partition("=")[0] for word in words if word.startswith("-") and not word.startswith("-1")}
        assert used <= known


def settings_of(command: str) -> set[str]:
    """What a command takes as options beside its own."""
    trees = {"conductor serve": ConductorConfig, "gateway": GatewayConfig, "worker": WorkerConfig}
    trees |= dict.fromkeys(("node", "config show", "doctor"), Config)
    return {name for name, _, _ in describe_settings(trees[command])} if command in trees else set()


def test_the_version_is_told():
    assert Shell().ok("--version").text.startswith("cairn")


def test_a_command_that_is_nearly_right_is_told_its_name():
    assert "explain" in Shell()("explan").err


def test_the_demo_passes_its_words_on(monkeypatch):
    def demo(*, fast: bool = False) -> None:
        """A demo."""
        typer.echo(f"fast: {fast}")

    module = types.ModuleType("server.commands.demo")
    module.demo = demo
    monkeypatch.setitem(sys.modules, "server.commands.demo", module)
    assert Shell().ok("demo", "--fast").text == "fast: True\n"
    assert "--fast" in Shell().ok("demo", "--help").text
    assert Shell()("demo", "--slow").code == 2


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (1 << 60, "1024.0 PiB")],
)
def test_sizes_are_in_binary_units(size, text):
    assert size_text(size) == text


def test_the_namespace_of_the_tests_is_what_the_sdk_would_open(node, cairn, space):
    namespace = Namespace(model=space, dtype="bfloat16", layout="plain", block_tokens=4, layers=2, block_bytes=BLOCK)
    with BlockingClient(node.address) as client:
        assert client.open(space, namespace).namespace == client.find(space).namespace
