"""A node with a disk and a bucket, and all that can happen at once: bytes stay right, calls end, nothing is left held.

CAIRN_SOAK_S is for how many seconds (12), CAIRN_TEST_SEED which way it goes.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from engine_client.blocking import BlockingClient
from engine_client.client import Client
from engine_client.steps import Held, OpenSpace
from kvstore.errors import DeadlineExceeded, NotFound, StaleLease, TransportError
from kvstore.types import BlockKey
from tests.system.cairn_process import REPO, clean_environ
from tests.system.children import Child
from tests.system.nodes import PATIENCE_S, NodeProcess, content, namespace, pause, until

SECONDS = float(os.environ.get("CAIRN_SOAK_S", "12"))
SEED = int(os.environ.get("CAIRN_TEST_SEED", "3"))
MIB = 1 << 20
SIZES = {"small": 3000, "odd": 70_001, "large": MIB}
BLOCKS = {"small": 32, "odd": 12, "large": 4}
PROMPTS = 40
LIMIT_S, SLOWEST_S = 5.0, 12.0  # of a call: what it is given, and what none may take even where the node is frozen
OPERATOR, RED, BLUE = (f"{name}-token-of-this-tenant" for name in ("operator", "red", "blue"))
OPTIONS = (
    "--tenants.0.name=operator", f"--tenants.0.token={OPERATOR}", "--tenants.0.admin=true",
    "--tenants.1.name=red", f"--tenants.1.token={RED}", "--tenants.2.name=blue", f"--tenants.2.token={BLUE}",
    "--node.unix_tenant=", "--node.drain_seconds=2s", "--tiers.dram.capacity=32MiB", "--tiers.dram.slab=2MiB",
    "--tiers.nvme.capacity=128MiB", "--tiers.nvme.slab=4MiB", "--tiers.object.pack=4MiB",
)  # fmt: skip
POLICIES = {"all, through": ("all", "through"), "second hit, back": ("second_hit", "back")}


class Load:
    """What the clients have in common: prompts, the right bytes of each, and the slowest call."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.slowest_s = 0.0
        self.good_blocks = 0

    def prompt(self, space: OpenSpace) -> list[BlockKey]:
        """Of a few that are asked for often, and many that are not; pairs of them begin alike."""
        number, blocks = int(PROMPTS * self.rng.random() ** 2), BLOCKS[space.name]
        return space.keys([number // 2, *range(1, 2 * blocks), number, *range(1, 2 * blocks)])[:blocks]

    def verify(self, space: OpenSpace, keys: list[BlockKey], blocks: list[Any]) -> None:
        for key, block in zip(keys, blocks, strict=False):
            assert bytes(block) == content(key, SIZES[space.name]), f"wrong bytes of {key.hex()} in {space.name}"
        self.good_blocks += len(blocks)

    def time(self, began: float) -> None:
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)


class Blocking(Load):
    """Over shared memory, or TCP."""

    def __init__(self, seed: int, address: str, token: str) -> None:
        super().__init__(seed)
        self._client = BlockingClient(address, token, timeout_s=LIMIT_S, name=f"load {seed}")
        self._spaces: list[OpenSpace] = []
        self._held: list[tuple[OpenSpace, list[BlockKey], Held]] = []
        self._pins: list[int] = []
        self._works: list[Callable[[OpenSpace, list[BlockKey]], None]]
        self._works = [*([self._put] * 8), *([self._get] * 8), self._delete, self._promote, self._demote, self._pin]
        if address.startswith("unix"):
            self._works += [self._hold, self._hold, self._look]

    def step(self) -> None:
        if not self._spaces:
            self._spaces = [self._client.open(name, namespace(name, block_bytes=SIZES[name])) for name in SIZES]
        space = self.rng.choice(self._spaces)
        self.rng.choice(self._works)(space, self.prompt(space))

    def rest(self) -> None:
        """Let go of all. What was held before the node was started again is gone with it."""
        with suppress(TransportError):
            while self._held:
                self._release()
            while self._pins:
                self._unpin()

    def _put(self, space: OpenSpace, keys: list[BlockKey]) -> None:
        self._client.put(space, keys, [content(key, SIZES[space.name]) for key in keys])

    def _get(self, space: OpenSpace, keys: list[BlockKey]) -> None:
        buffers = [bytearray(SIZES[space.name]) for _ in keys]
        found = self._client.get(space, keys, buffers, tokens_per_s=self.rng.choice([0.0, 0.0, 2000.0]))
        self.verify(space, keys, buffers[:found])

    def _hold(self, space: OpenSpace, keys: list[BlockKey]) -> None:
        held = self._client.acquire(space, keys, lease_s=60.0, wait_s=self.rng.choice([0.0, 0.2]))
        if held is not None:
            self._held.append((space, keys, held))
        if len(self._held) > 2:
            self._release()

    def _release(self) -> None:
        space, keys, held = self._held.pop(0)
        self.verify(space, keys, held.blocks)
        self._client.release(held)

    def _look(self, space: OpenSpace, keys: list[BlockKey]) -> None:
        views = self._client.views(space, keys)
        found = [bytes(view.data) for view in views]
        valid = [view.is_valid() for view in views]
        for key, block, is_valid in zip(keys, found, valid, strict=False):
            if is_valid:
                self.verify(space, [key], [block])

    def _delete(self, space: OpenSpace, keys: list[BlockKey]) -> None:
        self._client.evict(space, keys, self.rng.choice(["", "dram", "nvme", "object"]))

    def _promote(self, space: OpenSpace, keys: list[BlockKey]) -> None:
        self._client.promote(space, keys, 1.0)

    def _demote(self, space: OpenSpace, keys: list[BlockKey]) -> None:
        self._client.demote(space, keys, self.rng.choice(["nvme", "object"]), evict=self.rng.random() < 0.5)

    def _pin(self, space: OpenSpace, keys: list[BlockKey]) -> None:
        self._pins.append(self._client.pin(space, keys, hard=self.rng.random() < 0.5, ttl_s=2.0).pin_id)
        if len(self._pins) > 2:
            self._unpin()

    def _unpin(self) -> None:
        with suppress(NotFound):  # there was nothing to pin, or the node was started again
            self._client.unpin(self._pins.pop(0))


def work(pipe: Connection, seed: int, address: str, token: str) -> None:
    """Until told to rest: then let go of all, say so, and wait to be told to go on."""
    load = Blocking(seed, address, token)
    while True:
        if pipe.poll():
            assert pipe.recv() == "rest"
            load.rest()
            pipe.send((load.slowest_s, load.good_blocks))
            pipe.recv()
        began = time.monotonic()
        try:
            load.step()
        except (TransportError, DeadlineExceeded, StaleLease):
            pause(0.005)  # the node is frozen, or was killed
        load.time(began)


def work_async(pipe: Connection, seed: int, address: str, token: str) -> None:
    asyncio.run(_work_async(pipe, seed, address, token))


async def _work_async(pipe: Connection, seed: int, address: str, token: str) -> None:
    """As `work`, four calls at once, some of which are cancelled."""
    load = Load(seed)
    client = Client(address, token, timeout_s=LIMIT_S, name=f"load {seed}")
    spaces: list[OpenSpace] = []
    while True:
        if pipe.poll():
            assert pipe.recv() == "rest"
            pipe.send((load.slowest_s, load.good_blocks))
            pipe.recv()
        began = time.monotonic()
        works = [asyncio.ensure_future(_step(client, load, spaces)) for _ in range(4)]
        if load.rng.random() < 0.2:
            works[0].cancel() if load.rng.random() < 0.5 else await asyncio.sleep(0.001)
            works[0].cancel()
        for outcome in await asyncio.gather(*works, return_exceptions=True):
            if isinstance(outcome, (TransportError, DeadlineExceeded)):
                await asyncio.sleep(0.005)
            elif outcome is not None and not isinstance(outcome, asyncio.CancelledError):
                raise outcome
        load.time(began)


async def _step(client: Client, load: Load, spaces: list[OpenSpace]) -> None:
    if not spaces:
        spaces[:] = [await client.open(name, namespace(name, block_bytes=SIZES[name])) for name in SIZES]
    space = load.rng.choice(spaces)
    keys = load.prompt(space)
    if load.rng.random() < 0.4:
        await client.put(space, keys, [content(key, SIZES[space.name]) for key in keys])
    else:
        buffers = [bytearray(SIZES[space.name]) for _ in keys]
        load.verify(space, keys, buffers[: await client.get(space, keys, buffers)])


@pytest.fixture(params=list(POLICIES))
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NodeProcess]:
    admission, write = POLICIES[request.param]
    lower = [f"--tiers.nvme.path={tmp_path / 'tier'}", f"--tiers.object.url=file://{tmp_path / 'bucket'}"]
    lower += [f"--tiers.nvme.admission={admission}", f"--tiers.nvme.write={write}"]
    started = NodeProcess(tmp_path, *OPTIONS, *lower, admin_token=OPERATOR).start()
    yield started
    if started.is_alive:
        started.kill()


class Crowd:
    """Clients of two tenants in processes of their own, over shared memory and TCP."""

    def __init__(self, stack: ExitStack, node: NodeProcess) -> None:
        self._stack = stack
        self._made = {
            "local": lambda seed: Child(work, seed, node.unix, RED),
            "remote": lambda seed: Child(work, seed, node.tcp, RED),
            "async": lambda seed: Child(work_async, seed, node.unix, BLUE),
        }
        self._children = {name: self._new(name, number) for number, name in enumerate(self._made)}

    def _new(self, name: str, number: int) -> Child:
        return self._stack.enter_context(self._made[name](SEED * 1000 + number))

    def replace(self, name: str, number: int) -> None:
        """One dies, whatever it is doing, and another takes its place."""
        self._children[name].kill()
        self._children[name] = self._new(name, number)

    def rest(self) -> int:
        """All let go of what they hold; how many blocks they got, all of them right."""
        for child in self._children.values():
            with suppress(OSError):  # it has died, and says of what
                child.say("rest")
        told = [child.hear() for child in self._children.values()]
        assert max(slowest_s for slowest_s, _ in told) < SLOWEST_S, told
        return sum(good_blocks for _, good_blocks in told)

    def go_on(self) -> None:
        for child in self._children.values():
            child.say("go on")


def disturb(node: NodeProcess, crowd: Crowd, rng: random.Random, number: int) -> None:
    what = rng.choice(["death", "death", "freeze", "dram", "nvme", "marks"])
    if what == "death":
        crowd.replace(rng.choice(["local", "remote", "async"]), number)
    elif what == "freeze":
        node.freeze()
        pause(rng.random() / 2)
        node.thaw()
    else:
        with node.admin() as admin:
            if what == "marks":
                admin.set_tier("nvme", high_watermark=rng.choice([0.6, 0.9]), low_watermark=0.5)
            else:
                admin.set_tier(what, capacity_bytes=rng.choice([24, 32] if what == "dram" else [64, 128]) * MIB)


def left(node: NodeProcess) -> dict[str, Any]:
    """What somebody holds, or is still doing, and what is wrong with that; empty once all is quiet."""
    with node.admin() as admin:
        dram, nvme, _ = admin.stat()["tiers"]
        found = {
            "draining": dram["draining"] + nvme["draining"],
            "queued": nvme["queued"] + nvme["read"]["queued_bytes"] + nvme["write"]["queued_bytes"],
            "records": nvme["ledger"]["pending"],
            "size": [row["tier"] for row in (dram, nvme) if row["capacity_bytes"] != row["target_bytes"]],
            "held": [row["holders"] for row in _blocks(node) if row["holders"] or row["state"] != "written"],
            "problems": admin.check(),
            "recovering": nvme["is_recovering"],
        }
    return {name: value for name, value in found.items() if value}


def _blocks(node: NodeProcess) -> Iterator[dict[str, Any]]:
    for token in (RED, BLUE):
        with BlockingClient(node.unix, token, timeout_s=PATIENCE_S) as client:
            for name in SIZES:
                with suppress(NotFound):
                    yield from client.list_blocks(client.find(name), None, 10_000).blocks


def settle(node: NodeProcess, crowd: Crowd) -> int:
    good_blocks = crowd.rest()
    until(lambda: not left(node), f"all to be at rest: {left(node)}")
    node.assert_clean()
    return good_blocks


def test_clients_die_and_the_node_freezes_dies_and_changes_its_size_under_load(
    node: NodeProcess, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    with ExitStack() as stack:
        crowd = Crowd(stack, node)
        for start in range(2):
            until_s = time.monotonic() + SECONDS / 4
            number = 100 * (start + 1)
            while time.monotonic() < until_s:
                pause(rng.uniform(0.2, 0.8))
                disturb(node, crowd, rng, number := number + 1)
            if start == 0:
                node.kill()
                node.start()
        descriptors = node.descriptors
        assert settle(node, crowd) > 100
        crowd.go_on()
        pause(SECONDS / 8)
        assert settle(node, crowd) > 100
        assert node.descriptors <= descriptors + 32  # a slab more of each tier takes some, and nothing else does
    node.stop()
    command = [sys.executable, "-m", "server.cli", "check", "--data-dir", str(tmp_path / "tier"), "--deep", "--json"]
    done = subprocess.run(command, cwd=REPO, env=clean_environ(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, json.loads(done.stdout)["problems"]) == (0, []), done.stdout
