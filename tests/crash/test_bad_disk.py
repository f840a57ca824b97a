"""A disk that goes wrong while a node serves: DRAM serves on, and the tier is used again when the disk is well."""

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine_client.blocking import BlockingClient
from kvstore import recover as recover_module
from kvstore.diskblock import ALIGN
from kvstore.tiers import nvme as nvme_module
from kvstore.tiers.block_file import BlockFile
from tests.conftest import LiveNode
from tests.crash.tiered import fsck
from tests.faulty_file import Fault, Faults, FaultyFile, Lose
from tests.system.nodes import content, namespace, until

BLOCK_BYTES, BLOCKS = 60_000, 8
SETTINGS = {
    "tiers.dram.capacity": "8MiB",
    "tiers.dram.slab": "1MiB",
    "tiers.nvme.capacity": "48MiB",
    "tiers.nvme.slab": "1MiB",
    "tiers.nvme.admission": "all",
    "tiers.nvme.write": "through",
    "limits.put_timeout": "3s",
    "rest.listen": "",
}


class Weather(Faults):
    """What every operation of the named kinds meets for now: an error number, or a gate that it waits at."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.names: tuple[str, ...] = ()
        self.gate = threading.Event()
        self.gate.set()

    def storm(self, number: int, *names: str) -> None:
        self.number, self.names = number, names

    def clear(self) -> None:
        self.number = 0
        self.gate.set()

    def next(self, name: str, offset: int = 0, size: int = 0) -> Fault | None:
        self.gate.wait()
        if self.number and name in self.names:
            raise OSError(self.number, os.strerror(self.number))
        return None


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Iterator[Weather]:
    made = Weather()
    open_file = nvme_module.open_block_file

    def open_faulty(path: Path, *, io: Any = "auto", create_bytes: int | None = None) -> BlockFile:
        if create_bytes is not None:
            made.next("create")
        return FaultyFile(open_file(path, io=io, create_bytes=create_bytes), made)

    monkeypatch.setattr(nvme_module, "open_block_file", open_faulty)
    yield made
    made.clear()


class Engine:
    """Puts and gets prompts of a node, and knows the right bytes of each."""

    def __init__(self, node: LiveNode) -> None:
        self.node = node
        self._more = count(10_000)
        self.client = BlockingClient(f"unix://{node.config.node.unix_socket}", timeout_s=10, name="engine")
        self.space = self.client.open("bad", namespace("bad", block_bytes=BLOCK_BYTES))

    def keys(self, prompt: int) -> list[Any]:
        return self.space.keys([prompt, *range(4 * BLOCKS)])[:BLOCKS]

    def put(self, *prompts: int) -> int:
        """Blocks stored."""
        return sum(
            self.client.put(self.space, keys, [content(key, BLOCK_BYTES) for key in keys]).stored
            for keys in map(self.keys, prompts)
        )

    def get(self, prompt: int, load_s: float = 2.0) -> int:
        """Blocks got, each of them right."""
        keys = self.keys(prompt)
        buffers = [bytearray(BLOCK_BYTES) for _ in keys]
        found = self.client.get(self.space, keys, buffers, load_s=load_s)
        for key, buffer in zip(keys[:found], buffers, strict=False):
            assert buffer == content(key, BLOCK_BYTES), f"wrong bytes of prompt {prompt}"
        return found

    def in_dram_only(self, prompt: int) -> None:
        self.client.evict(self.space, self.keys(prompt), tier="nvme")

    def on_disk_only(self, prompt: int) -> None:
        """Once it is there."""
        until(lambda: self.on_disk(prompt), f"prompt {prompt} to be on the disk")
        self.client.evict(self.space, self.keys(prompt), tier="dram")

    def on_disk(self, prompt: int) -> bool:
        def look() -> bool:
            (space,) = (space for space in self.node.node.store.catalogue.all() if "bad" in space.names)
            assert space.nvme is not None
            found = [space.nvme.replicas.get(key) for key in self.keys(prompt)]
            return all(replica is not None and replica.state.value == "written" for replica in found)

        return bool(self.node.call(look))

    @property
    def tier(self) -> dict[str, Any]:
        return next(row for row in self.client.stat()["tiers"] if row["tier"] == "nvme")

    def is_grown(self) -> bool:
        tier = self.tier
        return bool(tier["capacity_bytes"] == tier["target_bytes"])

    def is_well(self) -> bool:
        return not self.tier["health"]

    def recovers(self) -> bool:
        """Whether it is well, after something more was put: only what is tried can show it."""
        self.put(next(self._more))
        return self.is_well()


Start = Callable[..., LiveNode]


@pytest.fixture
def engine(live_node: Start, weather: Weather, tmp_path: Path) -> Iterator[Engine]:
    node = live_node({**SETTINGS, "tiers.nvme.path": str(tmp_path / "tier")})
    engine = Engine(node)
    until(engine.is_grown, "the tier to have its size")
    yield engine
    weather.clear()
    engine.client.close()
    wait_until_quiet(node)


def wait_until_quiet(node: LiveNode) -> None:
    """Until nothing was on its way between the tiers for 0.2 s: what is on its way, its movers hold."""
    looks = 0

    def is_quiet() -> bool:
        nonlocal looks
        looks = 0 if list(node.node.store.problems()) else looks + 1
        return looks == 200

    node.wait_until(is_quiet)


def keeps_serving(engine: Engine, first: int) -> None:
    """DRAM takes more than it has room for, and gives what was put last."""
    for prompt in range(first, first + 30):
        assert engine.put(prompt) == BLOCKS
        assert engine.get(prompt) == BLOCKS


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_disk_that_takes_no_writes_is_left_alone_until_it_does(engine: Engine, weather: Weather, number: int) -> None:
    engine.put(1)
    engine.on_disk_only(1)
    weather.storm(number, "write", "punch", "reserve", "create")
    keeps_serving(engine, 100)
    until(lambda: "writing" in engine.tier["health"], "the failure to be seen")
    assert engine.get(1) == BLOCKS, "what is on the disk can be read all the same"
    weather.clear()

    until(engine.recovers, "the tier to recover")
    engine.put(2)
    engine.on_disk_only(2)
    assert engine.get(2) == BLOCKS


def test_a_disk_that_cannot_be_read_is_left_alone_until_it_can(engine: Engine, weather: Weather) -> None:
    for prompt in range(20):
        engine.put(prompt)
        engine.on_disk_only(prompt)
    weather.storm(errno.EIO, "read")
    misses = 0
    while "reading" not in engine.tier["health"]:
        assert engine.get(misses) == 0
        misses += 1
    assert misses < 10, "few blocks are given up for a disk that is away"
    keeps_serving(engine, 100)
    weather.clear()
    until(lambda: engine.get(19) == BLOCKS, "a block that was not given up to be read")
    assert engine.is_well()
    assert sum(engine.get(prompt) for prompt in range(20)) >= (20 - misses) * BLOCKS


def test_a_disk_that_hangs_holds_nobody_up(engine: Engine, weather: Weather) -> None:
    engine.put(1)
    engine.on_disk_only(1)
    weather.gate.clear()
    assert engine.get(1, load_s=0.2) == 0, "a load that does not come is a miss"
    keeps_serving(engine, 100)
    weather.clear()
    until(lambda: engine.get(1) == BLOCKS, "the disk to be used again")
    engine.put(2)
    engine.on_disk_only(2)


def test_a_disk_that_loses_writes_serves_no_wrong_bytes(engine: Engine, weather: Weather) -> None:
    """It reports success and does nothing: what is read is what lay there before, or nothing."""
    weather.next = lambda name, offset=0, size=0: Lose() if name == "write" else None  # type: ignore[method-assign]
    for prompt in range(10):
        engine.put(prompt)
        engine.on_disk_only(prompt)
        assert engine.get(prompt) == 0
    assert engine.client.stat()["counters"]["corrupt_blocks"] > 0


def used_bytes(folder: Path) -> int:
    found = 0
    for path in folder.glob("slabs/*"):
        with suppress(FileNotFoundError):
            found += path.stat().st_blocks * 512
    return found


def test_however_much_is_put_the_disk_has_no_more_than_the_capacity_and_a_page_of_the_filesystem_for_each_slab(
    engine: Engine, tmp_path: Path
) -> None:
    tier = engine.tier
    capacity, slab_bytes = tier["capacity_bytes"], tier["slab_bytes"]
    most = 0
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.is_set():
            most = max(most, used_bytes(tmp_path / "tier"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for prompt in range(100):
            engine.put(prompt)
            if prompt % 20 == 10:
                smaller = capacity // slab_bytes - prompt // 10
                size = smaller * slab_bytes
                engine.node.call(lambda size=size: engine.node.node.upkeep.set_tier("nvme", capacity_bytes=size))
    finally:
        is_over.set()
        watcher.join()
    assert engine.tier["blocks"] > 0
    assert 0 < most <= capacity + capacity // slab_bytes * ALIGN


@contextmanager
def small_filesystem(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no filesystem may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def test_a_disk_that_another_process_fills_is_used_again_when_there_is_room(live_node: Start, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    with small_filesystem(folder, "64m"):
        fill(folder / "others")
        os.truncate(folder / "others", 54 << 20)  # room for the ledger and a few slabs
        node = live_node({**SETTINGS, "tiers.nvme.path": str(folder / "tier")})
        engine = Engine(node)
        with closing(engine.client):
            until(lambda: not engine.is_well(), "the tier to find the disk full")
            assert 0 < engine.tier["capacity_bytes"] < engine.tier["target_bytes"]
            keeps_serving(engine, 100)
            (folder / "others").unlink()
            until(engine.is_grown, "the tier to grow")
            until(engine.recovers, "the tier to recover")
            fill(folder / "others")
            keeps_serving(engine, 200)
            (folder / "others").unlink()
            until(engine.recovers, "the tier to recover once more")
            engine.put(1)
            engine.on_disk_only(1)
            assert engine.get(1) == BLOCKS
            until(lambda: not engine.tier["ledger"]["pending"], "the ledger to take what waited")
        wait_until_quiet(node)
        node.stop()
        assert fsck(folder / "tier") == []


@pytest.mark.parametrize("how", ["read-only", "full"])
def test_a_node_that_starts_while_the_disk_takes_nothing_serves_and_takes_the_tier_up_later(
    live_node: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(recover_module, "RETRY_S", 0.1)
    folder = tmp_path / "small"
    settings = {**SETTINGS, "tiers.nvme.path": str(folder / "tier"), "tiers.nvme.capacity": "16MiB"}
    with small_filesystem(folder, "64m"):
        first = live_node(settings)
        engine = Engine(first)
        with closing(engine.client):
            until(engine.is_grown, "the tier to have its size")
            engine.put(1)
            engine.on_disk_only(1)
            until(lambda: not engine.tier["ledger"]["pending"])
        wait_until_quiet(first)
        first.stop()
        if how == "full":
            fill(folder / "others")
        else:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        shutil.copytree(tmp_path / "0", tmp_path / "1", ignore=shutil.ignore_patterns("*.sock"))  # the tenant's secret
        second = live_node(settings)
        engine = Engine(second)
        with closing(engine.client):
            assert engine.get(1) == 0
            assert engine.tier["is_recovering"]
            keeps_serving(engine, 100)
            if how == "full":
                (folder / "others").unlink()
            else:
                subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
            until(lambda: engine.get(1) == BLOCKS, "the tier to be taken up")
            until(engine.recovers, "the tier to be written again")
        wait_until_quiet(second)
        second.stop()
        assert not list(folder.glob("tier/ledger.broken*")), "the ledger was good all the time"
