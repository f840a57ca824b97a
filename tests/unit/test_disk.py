"""Blocks on the disk with their headers: what is believed of what is read, and what failures say of the disk."""

import asyncio
import mmap
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.copier import checksum
from kvstore.disk import READ_FAILURES, Disk, disk_stride
from kvstore.disk_queue import DiskQueue
from kvstore.diskblock import ALIGN, HEADER_BYTES, padded, parse
from kvstore.table import BlockTable, Replica, TierShape
from kvstore.tiers import TierSpec, nvme
from kvstore.tiers.block_file import open_block_file
from kvstore.tiers.nvme import NvmeTier
from kvstore.types import NVME, BlockKey, Cause
from tests.faulty_file import Fail, Faults, FaultyFile, FlipBit, Lose, Tear
from tests.tiered_store import block_of

SLAB = 1 << 16
ROOT = b"r" * 16


class Clock:
    seconds = 50.0

    def now(self) -> float:
        return self.seconds


class Bench:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.faults = Faults()
        monkeypatch.setattr(
            nvme, "open_block_file", lambda path, **how: FaultyFile(open_block_file(path, **how), self.faults)
        )
        self.table = BlockTable({NVME: TierShape(SLAB, "", disk_stride)})
        self.space = self.table.space("red", 1, NVME)
        self.clock = Clock()
        self.folder = folder
        queue = DiskQueue(2)
        self.medium = NvmeTier(TierSpec(NVME, SLAB), folder, queue, io="posix")
        self.disk = Disk(self.medium, queue, self.clock, wall_ms=lambda: 7, root_of=lambda space: ROOT)

    async def grow(self) -> None:
        await self.medium.prepare()
        self.medium.adopt(self.table.tiers[NVME].pool.grow().slab_id)

    def allocate(self, name: str, size: int) -> Replica:
        replica = self.table.allocate(self.space, BlockKey(name.encode().ljust(16, b".")), None, size)
        assert replica is not None
        replica.checksum = checksum(block_of(replica.key, size))
        return replica

    async def store(self, *blocks: tuple[str, int]) -> list[Replica]:
        replicas = [self.allocate(*block) for block in blocks]
        pairs = [(replica, memoryview(block_of(replica.key, replica.size))) for replica in replicas]
        assert await self.disk.store(pairs)
        for replica in replicas:
            self.table.commit(replica, replica.checksum)
        return replicas

    async def load(self, *replicas: Replica) -> list[str]:
        """What became of each; good ones have their bytes."""
        targets = [memoryview(bytearray(replica.size)) for replica in replicas]
        found = await self.disk.load(list(zip(replicas, targets, strict=True)))
        for replica, target, loaded in zip(replicas, targets, found, strict=True):
            assert loaded != "good" or target == block_of(replica.key, replica.size)
        return found

    def fault(self, fault, after: int = 0) -> None:
        self.faults.at[len(self.faults.operations) + after] = fault

    def file(self, replica: Replica) -> Path:
        return self.folder / f"{replica.slab.slab_id:010d}.slab"


@pytest.fixture
def bench(monkeypatch) -> Iterator[Bench]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield Bench(folder / "slabs", monkeypatch)
    shutil.rmtree(folder)


def run(bench: Bench, test) -> None:
    async def all_of_it() -> None:
        await bench.grow()
        try:
            await test()
        finally:
            await bench.disk.aclose()

    asyncio.run(all_of_it())


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 20_000])
@pytest.mark.parametrize("room", ["the block", "its padding"])
def test_a_block_comes_back_whatever_room_its_memory_has(bench, size, room):
    async def test():
        (replica,) = await bench.store(("a", size))
        whole = padded(size) if room == "its padding" else size
        target = memoryview(mmap.mmap(-1, padded(whole)))[:whole]
        assert await bench.disk.load([(replica, target)]) == ["good"]
        assert target[:size] == block_of(replica.key, size)

    run(bench, test)


def test_nothing_is_written_beyond_the_memory_that_was_given(bench):
    async def test():
        (replica,) = await bench.store(("a", 5000))
        memory = bytearray(b"x" * 8192)
        assert await bench.disk.load([(replica, memoryview(memory)[100:5100])]) == ["good"]
        assert memory[:100] + memory[5100:] == b"x" * (8192 - 5000)

    run(bench, test)


def test_each_block_has_its_header_before_it(bench):
    async def test():
        first, second = await bench.store(("a", 3000), ("b", 3000))
        raw = bench.file(second).read_bytes()
        header = parse(raw[disk_stride(3000) :])
        assert header is not None
        assert (header.root, header.key, header.slot_index, header.size) == (ROOT, second.key, second.index, 3000)
        assert (header.checksum, header.generation) == (second.checksum, second.generation)
        assert raw[HEADER_BYTES:ALIGN] == bytes(ALIGN - HEADER_BYTES)
        assert first.slot.offset == 0

    run(bench, test)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (FlipBit(8 * 20), "corrupt"),
        (FlipBit(8 * (HEADER_BYTES + 5)), "good"),  # what fills up the header's page says nothing
        (FlipBit(8 * ALIGN), "corrupt"),
        (FlipBit(8 * (ALIGN + 2999) + 7), "corrupt"),
        (FlipBit(8 * (ALIGN + 3000)), "good"),  # nor what fills up the last page
        (Fail(), "failed"),
    ],
)
@pytest.mark.parametrize("room", [3000, 4096])
def test_what_is_read_otherwise_than_written_is_not_believed(bench, fault, expected, room):
    async def test():
        before, replica, after = await bench.store(("a", 3000), ("b", 3000), ("c", 3000))
        bench.fault(fault, after=1)
        targets = [memoryview(bytearray(room)) for _ in range(3)]
        found = await bench.disk.load(list(zip((before, replica, after), targets, strict=True)))
        assert found == ["good", expected, "good"]

    run(bench, test)


@pytest.mark.parametrize("fault", [Lose(), FlipBit(8 * ALIGN + 1), FlipBit(8 * 33)])
def test_a_write_that_went_wrong_unseen_is_seen_when_it_is_read(bench, fault):
    async def test():
        bench.fault(fault)
        (replica,) = await bench.store(("a", 3000))
        assert await bench.load(replica) == ["corrupt"]

    run(bench, test)


def test_what_was_read_beside_a_header_is_not_written_beside_another(bench):
    """It may be another tenant's: pages for headers are used again."""

    async def test():
        (read,) = await bench.store(("a", 3000))
        with bench.file(read).open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(b"secret of red" * 100)
        assert await bench.load(read) == ["good"]
        (written,) = await bench.store(("b", 3000))
        page = bench.file(written).read_bytes()[written.slot.offset :][:ALIGN]
        assert page[HEADER_BYTES:] == bytes(ALIGN - HEADER_BYTES)

    run(bench, test)


def test_a_folder_that_is_gone_has_no_space_and_the_rest_is_told(bench):
    async def test():
        shutil.rmtree(bench.folder)
        told = bench.medium.describe()
        assert (told["filesystem_free_bytes"], told["slabs_ready"]) == (0, 1)

    run(bench, test)


def test_a_lost_write_does_not_bring_back_what_was_there_before(bench):
    async def test():
        (old,) = await bench.store(("a", 3000))
        bench.table.discard(old, Cause.DELETED)
        bench.fault(Lose())
        (new,) = await bench.store(("b", 3000))
        assert new.slot.offset == old.slot.offset
        assert await bench.load(new) == ["corrupt"]

    run(bench, test)


def test_two_files_that_were_swapped_are_not_believed(bench):
    async def test():
        await bench.grow()
        one, *_ = await bench.store(*((str(number), 30_000) for number in range(2)))
        other = next(replica for replica in bench.space.replicas.values() if replica.slab is not one.slab)
        files = bench.file(one), bench.file(other)
        contents = [file.read_bytes() for file in files]
        for file, content in zip(files, reversed(contents), strict=True):
            with file.open("r+b") as opened:
                opened.write(content)
        assert await bench.load(one, other) == ["corrupt", "corrupt"]

    run(bench, test)


def test_a_namespace_whose_root_is_another_is_not_believed(bench):
    async def test():
        (replica,) = await bench.store(("a", 100))
        bench.disk._root_of = lambda space: b"q" * 16
        assert await bench.load(replica) == ["corrupt"]

    run(bench, test)


class TestCopy:
    def test_a_copy_has_the_bytes_and_a_header_of_its_own(self, bench):
        async def test():
            await bench.grow()
            (replica,) = await bench.store(("a", 3000))
            move = bench.table.begin_move(replica)
            assert await bench.disk.copy([(replica, move.target)]) == ["good"]
            assert bench.table.end_move(move, is_copied=True)
            assert await bench.load(replica) == ["good"]

        run(bench, test)

    @pytest.mark.parametrize(
        ("fault", "after", "expected"),
        [(FlipBit(8 * ALIGN), 0, ["corrupt", "good"]), (Fail(), 1, ["good", "failed"]),
         (Fail(), 2, ["failed", "failed"]), (Tear(5000), 3, ["failed", "failed"])],
    )  # fmt: skip
    def test_what_cannot_be_copied_is_told(self, bench, fault, after, expected):
        async def test():
            replicas = await bench.store(("a", 3000), ("b", 3000))
            moves = [bench.table.begin_move(replica) for replica in replicas]
            bench.fault(fault, after)
            found = await bench.disk.copy([(move.replica, move.target) for move in moves])
            assert found == expected
            for move, loaded in zip(moves, found, strict=True):
                bench.table.end_move(move, is_copied=loaded == "good")
            faulty = isinstance(fault, FlipBit)
            assert await bench.load(*replicas) == ["good", "good"] or faulty

        run(bench, test)


class TestHealth:
    def test_a_write_that_fails_is_told_and_writing_pauses(self, bench):
        async def test():
            replica = bench.allocate("a", 3000)
            bench.fault(Fail())
            assert not await bench.disk.store([(replica, memoryview(bytes(3000)))])
            bench.table.abort(replica, Cause.ABORTED)
            bench.table.let_go(replica)
            assert (bench.disk.may_store(), bench.disk.may_load()) == (False, True)
            bench.clock.seconds += 1.0
            assert bench.disk.may_store()
            await bench.store(("b", 3000))
            assert bench.disk.write_health.is_well

        run(bench, test)

    def test_a_few_blocks_that_cannot_be_read_are_no_bad_disk(self, bench):
        async def test():
            replicas = await bench.store(("a", 3000), ("b", 3000))
            for _ in range(5):
                for _ in range(READ_FAILURES):
                    bench.fault(Fail())
                    assert await bench.load(replicas[0]) == ["failed"]
                assert bench.disk.may_load()
                assert await bench.load(replicas[1]) == ["good"]

        run(bench, test)

    def test_many_in_a_row_are(self, bench):
        async def test():
            (replica,) = await bench.store(("a", 3000))
            for _ in range(READ_FAILURES + 1):
                bench.fault(Fail())
                await bench.load(replica)
            assert (bench.disk.may_store(), bench.disk.may_load()) == (True, False)
            bench.clock.seconds += 1.0
            assert await bench.load(replica) == ["good"]
            assert bench.disk.read_health.is_well

        run(bench, test)

    def test_damage_is_no_failure_of_the_disk(self, bench):
        async def test():
            (replica,) = await bench.store(("a", 3000))
            for _ in range(5):
                bench.fault(FlipBit(8 * ALIGN))
                assert await bench.load(replica) == ["corrupt"]
            assert bench.disk.may_load()

        run(bench, test)

    def test_a_punch_that_fails_pauses_writing(self, bench):
        async def test():
            (replica,) = await bench.store(("a", 3000))
            slab_id = replica.slab.slab_id
            bench.table.discard(replica, Cause.DELETED)
            bench.fault(Fail())
            await bench.disk.punch(slab_id)
            assert not bench.disk.may_store()

        run(bench, test)

    def test_speed_is_measured_both_ways(self, bench):
        async def test():
            (replica,) = await bench.store(("a", 3000))
            await bench.load(replica)
            for path in (bench.disk.reading, bench.disk.writing):
                assert (path.requests, path.total_bytes, path.queued_bytes) == (1, 3000, 0)

        run(bench, test)
