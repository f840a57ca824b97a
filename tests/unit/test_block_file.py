"""Block files: one contract for every way that bytes take to the disk, and how the way is chosen."""

import ctypes
import errno
import mmap
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.diskblock import ALIGN
from kvstore.errors import ConfigError
from kvstore.tiers import kvikio_file, posix_file
from kvstore.tiers.block_file import BlockFile, open_block_file, probe
from kvstore.tiers.kvikio_file import Kvikio, KvikioFile, load_kvikio
from kvstore.tiers.posix_file import MAX_BUFFERS, MAX_BUSY, NO_DIRECT_IO, NO_HOLES, PosixFile, aligned_buffer
from tests.faulty_file import Fail, Faults, FaultyFile, FlipBit, Lose, Tear, Wait
from tests.stub.build import environ_with_stub_driver

REPO = Path(__file__).parents[2]
PAGES = 256
FILE_BYTES = PAGES * ALIGN


def misaligned(size: int, by: int) -> memoryview:
    """A writable buffer whose first byte lies `by` bytes after the start of a page."""
    return aligned_buffer(size + ALIGN)[by : by + size]


def filled(size: int, by: int = 0) -> memoryview:
    buffer = misaligned(size, by)
    buffer[:] = os.urandom(size)
    return buffer


def read_bytes(file: BlockFile, offset: int, size: int) -> bytes:
    buffer = aligned_buffer(size)
    file.read(offset, [buffer])
    return bytes(buffer)


def cached_pages(path: Path) -> int:
    """Pages of the file that the page cache holds."""
    with open(path, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    pages = (ctypes.c_ubyte * (len(mapping) // mmap.PAGESIZE))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), pages) == 0
    return sum(page & 1 for page in pages)


class DeviceMemory:
    """What looks like an array on a GPU."""

    def __init__(self, address: int, size: int, **changed: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            **changed,
        }


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder that is not in memory."""
    if subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path], text=True).strip() == "tmpfs":
        pytest.skip("the folder for temporary files is a tmpfs, that has no disk below it")
    return tmp_path


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    folder = Path("/dev/shm") / f"cairn-test-{os.getpid()}-{tmp_path.name}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


changes = st.lists(
    st.tuples(
        st.integers(0, PAGES - 1),
        st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0, 0, 1, 16, 512, 4095])), min_size=1, max_size=4),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


class BlockFileContract:
    """What every BlockFile does. `open` gives one over a file that exists."""

    def open(self, path: Path) -> BlockFile:
        raise AssertionError("the subclass says what is tested")

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    def path(self, folder: Path) -> Path:
        open_block_file(folder / "slab", io="posix", create_bytes=FILE_BYTES).close()
        return folder / "slab"

    @pytest.fixture
    def file(self, path: Path) -> Iterator[BlockFile]:
        file = self.open(path)
        yield file
        file.close()

    def test_a_new_file_reads_as_zeros(self, file: BlockFile) -> None:
        assert read_bytes(file, 0, FILE_BYTES) == bytes(FILE_BYTES)

    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(changes)
    def test_what_is_written_is_read_back(self, file: BlockFile, changes: list[Any]) -> None:
        expected = bytearray(read_bytes(file, 0, FILE_BYTES))
        for page, parts, is_write in changes:
            buffers = [filled(pages * ALIGN, by) for pages, by in parts]
            start, size = page * ALIGN, sum(map(len, buffers))
            if start + size > FILE_BYTES:
                start = FILE_BYTES - size
            if is_write:
                file.write(start, buffers)
                expected[start : start + size] = b"".join(buffers)
            else:
                file.read(start, buffers)
                assert b"".join(buffers) == expected[start : start + size]
        assert read_bytes(file, 0, FILE_BYTES) == expected

    def test_what_is_written_is_there_when_opened_again(self, file: BlockFile, path: Path) -> None:
        block = filled(3 * ALIGN)
        file.write(ALIGN, [block])
        file.sync()
        again = self.open(path)
        assert read_bytes(again, ALIGN, 3 * ALIGN) == block
        again.close()
        with open(path, "rb") as other:  # and for who reads it through the page cache
            other.seek(ALIGN)
            assert other.read(3 * ALIGN) == block

    def test_sync_asks_the_disk_for_this_file(self, file: BlockFile, monkeypatch: pytest.MonkeyPatch) -> None:
        synced = []
        monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
        file.sync()
        assert [Path(name).name for name in synced] == ["slab"]

    def test_more_buffers_than_a_system_call_takes(self, path: Path) -> None:
        file = self.open(path)
        count = MAX_BUFFERS + 100
        file.reserve(count * ALIGN)
        memory, back = filled(count * ALIGN), aligned_buffer(count * ALIGN)
        file.write(0, [memory[i * ALIGN : (i + 1) * ALIGN] for i in range(count)])
        file.read(0, [back[i * ALIGN : (i + 1) * ALIGN] for i in range(count)])
        assert back == memory
        file.close()

    def test_buffers_that_may_not_be_changed_are_written_and_not_read_into(self, file: BlockFile) -> None:
        constant = memoryview(bytes(range(256)) * 16)
        file.write(0, [constant])
        file.write(ALIGN, [filled(ALIGN)])
        assert read_bytes(file, 0, ALIGN) == constant
        with pytest.raises(TypeError):
            file.read(ALIGN, [constant])
        assert constant == bytes(range(256)) * 16

    @pytest.mark.parametrize("offset", [FILE_BYTES - ALIGN, FILE_BYTES, FILE_BYTES * 8])
    def test_reading_past_the_end_is_an_error(self, file: BlockFile, offset: int) -> None:
        with pytest.raises(OSError) as failed:
            file.read(offset, [aligned_buffer(ALIGN), aligned_buffer(ALIGN)])
        assert failed.value.errno == errno.EIO
        assert str(failed.value.filename).endswith("slab")

    def test_a_file_that_was_cut_inside_a_page_ends_before_it(self, file: BlockFile, path: Path) -> None:
        os.truncate(path, FILE_BYTES - 100)
        assert read_bytes(file, 0, FILE_BYTES - ALIGN) == bytes(FILE_BYTES - ALIGN)
        with pytest.raises(OSError) as failed:
            file.read(FILE_BYTES - ALIGN, [aligned_buffer(ALIGN)])
        assert failed.value.errno == errno.EIO

    def test_what_is_no_multiple_of_a_page_is_a_bug(self, file: BlockFile) -> None:
        for offset, size in ((1, ALIGN), (512, ALIGN), (-ALIGN, ALIGN), (0, 512), (0, ALIGN + 1), (0, 0)):
            with pytest.raises(AssertionError):
                file.read(offset, [memoryview(bytearray(size))])
            with pytest.raises(AssertionError):
                file.write(offset, [memoryview(bytearray(size))])
            with pytest.raises(AssertionError):
                file.punch(offset, size)
        assert read_bytes(file, 0, FILE_BYTES) == bytes(FILE_BYTES)

    def test_a_view_with_gaps_is_refused(self, file: BlockFile) -> None:
        with pytest.raises(TypeError):
            file.read(0, [memoryview(bytearray(2 * ALIGN))[::2]])

    def test_what_is_no_buffer_is_refused(self, file: BlockFile) -> None:
        with pytest.raises(TypeError):
            file.read(0, [object()])  # type: ignore[list-item]

    def test_a_punched_range_is_zeros_and_costs_no_disk(self, file: BlockFile, path: Path) -> None:
        block = filled(8 * ALIGN)
        file.write(0, [block])
        file.sync()
        before = os.stat(path).st_blocks
        file.punch(2 * ALIGN, 4 * ALIGN)
        assert read_bytes(file, 0, 8 * ALIGN) == block[: 2 * ALIGN].tobytes() + bytes(4 * ALIGN) + block[6 * ALIGN :]
        assert os.stat(path).st_size == FILE_BYTES
        assert file.describe()["reasons"] == [] or NO_HOLES not in file.describe()["reasons"]
        file.sync()
        assert before - os.stat(path).st_blocks == 4 * ALIGN // 512
        file.write(2 * ALIGN, [block])
        assert read_bytes(file, 2 * ALIGN, 8 * ALIGN) == block

    def test_reserving_makes_the_file_longer_and_changes_nothing(self, file: BlockFile, path: Path) -> None:
        block = filled(ALIGN)
        file.write(0, [block])
        file.reserve(2 * FILE_BYTES)
        file.reserve(FILE_BYTES)
        assert os.stat(path).st_size == 2 * FILE_BYTES
        assert os.stat(path).st_blocks * 512 >= 2 * FILE_BYTES
        assert read_bytes(file, 0, ALIGN) == block
        assert read_bytes(file, 2 * FILE_BYTES - ALIGN, ALIGN) == bytes(ALIGN)

    def test_reserving_more_than_there_is_says_that_the_disk_is_full(self, in_memory: Path) -> None:
        open_block_file(in_memory / "big", io="posix", create_bytes=ALIGN).close()
        file = self.open(in_memory / "big")
        with pytest.raises(OSError) as failed:
            file.reserve(1 << 44)
        assert failed.value.errno == errno.ENOSPC
        file.close()

    def test_a_write_that_the_system_refuses_says_why(self, file: BlockFile) -> None:
        limit = 64 << 20
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))  # Python ignores the signal that goes with it
        try:
            with pytest.raises(OSError) as failed:
                file.write(limit - ALIGN, [filled(ALIGN), filled(ALIGN)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert failed.value.errno == errno.EFBIG
        assert str(failed.value.filename).endswith("slab")

    def test_threads_that_read_and_write_at_once_do_not_mix(self, file: BlockFile) -> None:
        threads, rounds, pages = 8, 20, PAGES // 8

        def churn(thread: int) -> None:
            start = thread * pages * ALIGN
            for turn in range(rounds):
                block = filled(pages * ALIGN, by=16 * (turn % 3))
                file.write(start, [block[:ALIGN], block[ALIGN:]])
                back = misaligned(pages * ALIGN, by=16 * (turn % 2))
                file.read(start, [back])
                assert back == block

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(churn, thread) for thread in range(threads)]:
                done.result()

    def test_it_says_which_way_bytes_take(self, file: BlockFile) -> None:
        assert file.describe()["path"] == file.path_name

    def test_descriptors_are_given_back(self, path: Path) -> None:
        before = os.listdir("/proc/self/fd")
        self.open(path).close()
        assert os.listdir("/proc/self/fd") == before

    def test_an_error_names_the_file_as_it_is_called_by_now(self, file: BlockFile, path: Path) -> None:
        path.rename(path.with_name("renamed"))
        with pytest.raises(OSError, match="renamed"):
            file.read(FILE_BYTES, [aligned_buffer(ALIGN)])

    def test_a_file_that_is_not_there_is_not_made(self, folder: Path) -> None:
        with pytest.raises(FileNotFoundError):
            self.open(folder / "nothing")
        assert not (folder / "nothing").exists()


class PastThePageCache:
    """What a way with O_DIRECT does, beside the contract."""

    open: Any

    def test_nothing_stays_in_the_page_cache(self, disk: Path) -> None:
        open_block_file(disk / "direct", io="posix", create_bytes=FILE_BYTES).close()
        file = self.open(disk / "direct")
        if NO_DIRECT_IO in file.describe()["reasons"]:
            pytest.skip(f"the filesystem of {disk} has no O_DIRECT")
        for by in (0, 16):
            file.write(0, [filled(FILE_BYTES, by)])
            assert cached_pages(disk / "direct") == 0
            file.read(0, [misaligned(FILE_BYTES, by)])
            assert cached_pages(disk / "direct") == 0
        file.close()


class TestPosixFile(PastThePageCache, BlockFileContract):
    def open(self, path: Path) -> BlockFile:
        return open_block_file(path, io="posix")


class TestPosixFileThroughThePageCache(BlockFileContract):
    def open(self, path: Path) -> BlockFile:
        return PosixFile(path, direct=False)

    @pytest.fixture
    def folder(self, in_memory: Path) -> Path:
        return in_memory

    def test_it_says_so(self, file: BlockFile) -> None:
        assert file.describe() == {"path": "posix-buffered", "reasons": [NO_DIRECT_IO]}


class TestFaultyFileWithoutFaults(BlockFileContract):
    def open(self, path: Path) -> BlockFile:
        return FaultyFile(PosixFile(path))


def test_kvikio_over_a_stub_driver_keeps_the_contract(tmp_path: Path) -> None:
    environ = environ_with_stub_driver(tmp_path)
    tests = REPO / "tests" / "stub" / "kvikio_contract.py"
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", REPO, tests]
    child = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr


# The POSIX way: what the kernel may do.


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    open_block_file(tmp_path / "slab", io="posix", create_bytes=FILE_BYTES).close()
    return tmp_path / "slab"


def test_a_call_that_moves_less_than_it_was_asked_is_continued(slab, monkeypatch):
    def little(call):
        def moved(fd, views, offset):
            first = views[0][: min(len(views[0]), 2 * ALIGN)]
            done = call(fd, [first], offset)
            return done - 100 if done == 2 * ALIGN else done

        return moved

    monkeypatch.setattr(posix_file.os, "preadv", little(os.preadv))
    monkeypatch.setattr(posix_file.os, "pwritev", little(os.pwritev))
    file, buffers = PosixFile(slab), [filled(3 * ALIGN), filled(5 * ALIGN), filled(ALIGN)]
    file.write(ALIGN, buffers)
    assert read_bytes(file, ALIGN, 9 * ALIGN) == b"".join(buffers)
    file.close()


def test_a_system_that_is_busy_is_asked_again_but_not_for_ever(slab, monkeypatch):
    asked = []

    def often_busy(fd, views, offset):
        asked.append(offset)
        if len(asked) % MAX_BUSY:
            raise BlockingIOError(errno.EAGAIN, "busy")
        return ALIGN

    def always_busy(fd, views, offset):
        asked.append(offset)
        raise BlockingIOError(errno.EAGAIN, "busy")

    file = PosixFile(slab)
    monkeypatch.setattr(posix_file.os, "preadv", often_busy)
    file.read(0, [aligned_buffer(2 * ALIGN)])
    assert asked == [0] * MAX_BUSY + [ALIGN] * MAX_BUSY
    asked.clear()
    monkeypatch.setattr(posix_file.os, "preadv", always_busy)
    with pytest.raises(BlockingIOError):
        file.read(0, [aligned_buffer(ALIGN)])
    assert len(asked) == MAX_BUSY
    file.close()


def test_a_file_with_a_bad_first_page_is_opened_for_the_others(slab, monkeypatch):
    def bad_page(fd, views, offset):
        raise OSError(errno.EIO, "bad page")

    with monkeypatch.context() as patched:
        patched.setattr(posix_file.os, "preadv", bad_page)
        file = PosixFile(slab)
    assert file.path_name == "posix" or NO_DIRECT_IO in file.describe()["reasons"]
    assert read_bytes(file, ALIGN, ALIGN) == bytes(ALIGN)
    file.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EROFS])
def test_a_file_that_cannot_be_opened_says_why(slab, monkeypatch, number):
    def refused(path, flags, *_):
        raise OSError(number, "refused")

    monkeypatch.setattr(posix_file.os, "open", refused)
    with pytest.raises(OSError) as failed:
        PosixFile(slab)
    assert failed.value.errno == number


@pytest.mark.parametrize("refused_by", ["open", "preadv"])
def test_a_filesystem_without_direct_io_is_read_through_the_page_cache(slab, monkeypatch, refused_by):
    real_open, real_preadv, direct = os.open, os.preadv, set()

    def opened(path, flags, *rest):
        if flags & os.O_DIRECT and refused_by == "open":
            raise OSError(errno.EINVAL, "no O_DIRECT")
        fd = real_open(path, flags, *rest)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def preadv(fd, views, offset):
        if fd in direct and refused_by == "preadv":
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_preadv(fd, views, offset)

    monkeypatch.setattr(posix_file.os, "open", opened)
    monkeypatch.setattr(posix_file.os, "preadv", preadv)
    before = os.listdir("/proc/self/fd")
    file = open_block_file(slab, io="posix")
    assert file.path_name == "posix-buffered"
    block = filled(ALIGN, by=1)
    file.write(0, [block])
    assert read_bytes(file, 0, ALIGN) == block
    file.close()
    assert os.listdir("/proc/self/fd") == before


def test_what_passes_through_the_page_cache_does_not_stay_there(disk):
    path = disk / "buffered"
    open_block_file(path, io="posix", create_bytes=FILE_BYTES).close()
    file = PosixFile(path, direct=False)
    file.write(0, [filled(FILE_BYTES)])
    file.sync()
    assert cached_pages(path) == 0
    file.read(0, [aligned_buffer(FILE_BYTES)])
    assert cached_pages(path) == 0
    file.close()


def test_a_filesystem_that_makes_no_holes_is_told_of(slab, monkeypatch):
    def refused(*_):
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    file, block = PosixFile(slab), filled(ALIGN)
    file.write(0, [block])
    monkeypatch.setattr(posix_file, "_libc", SimpleNamespace(fallocate=refused))
    file.punch(0, ALIGN)
    assert file.describe()["reasons"] == [NO_HOLES]
    assert read_bytes(file, 0, ALIGN) == block
    file.close()


def test_memory_of_a_gpu_never_comes_to_a_posix_call(slab):
    file, memory = PosixFile(slab), filled(ALIGN)
    array = DeviceMemory(ctypes.addressof(ctypes.c_char.from_buffer(memory)), ALIGN)
    for call in (file.read, file.write):
        with pytest.raises(TypeError, match="DeviceMemory"):
            call(0, [array])
    assert read_bytes(file, 0, ALIGN) == bytes(ALIGN)
    file.close()


def test_a_full_disk_is_an_error_and_goes_on_when_there_is_room(tmp_path):
    """In a child that may mount a small filesystem: the errno is the disk's own, not a limit's."""
    script = """
import errno, os, sys
from pathlib import Path
from kvstore.tiers.block_file import open_block_file
folder, buffer = Path(sys.argv[1]), memoryview(os.urandom(65536))
def refused(call):
    try:
        call()
    except OSError as error:
        return error.errno == errno.ENOSPC
other = open_block_file(folder / "other", io="posix", create_bytes=512 << 10)
file = open_block_file(folder / "slab", io="posix", create_bytes=256 << 10)
assert refused(lambda: open_block_file(folder / "more", io="posix", create_bytes=512 << 10))
assert not (folder / "more").exists()
assert refused(lambda: file.reserve(1 << 20))
os.truncate(folder / "slab", 8 << 20)
assert refused(lambda: [file.write(offset, [buffer]) for offset in range(0, 8 << 20, 65536)])
other.punch(0, 512 << 10)
file.write(256 << 10, [buffer])
back = memoryview(bytearray(65536))
file.read(256 << 10, [back])
assert back == buffer
print("as it should")
"""
    mount = 'mount -t tmpfs -o size=1m none "$1" || exit 77; exec "$2" -c "$3" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", tmp_path, sys.executable]
    child = subprocess.run([*command, script], capture_output=True, text=True, cwd=REPO)
    if child.returncode == 77 or child.stderr.startswith("unshare"):
        pytest.skip(f"no filesystem may be mounted here: {child.stderr.strip()}")
    assert child.stdout.strip() == "as it should", child.stderr


# Opening, and which way is taken.


def test_a_file_is_made_with_its_room_reserved(tmp_path):
    file = open_block_file(tmp_path / "slab", io="posix", create_bytes=FILE_BYTES)
    made = os.stat(tmp_path / "slab")
    assert made.st_size == FILE_BYTES
    assert made.st_blocks * 512 >= FILE_BYTES
    assert made.st_mode & 0o777 == 0o600
    file.close()


def test_the_name_of_a_new_file_is_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    open_block_file(tmp_path / "slab", io="posix", create_bytes=ALIGN).close()
    assert synced == [str(tmp_path)]


def test_a_file_that_is_there_is_not_made_again(slab):
    with pytest.raises(FileExistsError):
        open_block_file(slab, io="posix", create_bytes=ALIGN)
    assert os.stat(slab).st_size == FILE_BYTES


def test_a_file_without_room_is_not_left_behind(in_memory):
    with pytest.raises(OSError) as failed:
        open_block_file(in_memory / "slab", io="posix", create_bytes=1 << 44)
    assert failed.value.errno == errno.ENOSPC
    assert os.listdir(in_memory) == []


def test_a_file_that_was_made_and_cannot_be_opened_is_not_left_behind(tmp_path, monkeypatch):
    def opened(path):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("kvstore.tiers.block_file.PosixFile", opened)
    with pytest.raises(OSError):
        open_block_file(tmp_path / "slab", io="posix", create_bytes=ALIGN)
    assert os.listdir(tmp_path) == []


class FakeJob:
    def __init__(self, result: int | Exception) -> None:
        self.result, self.was_waited_for = result, False

    def get(self) -> int:
        self.was_waited_for = True
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class FakeCuFile:
    """A CuFile of a kvikio that is not there. `jobs` are what pread and pwrite give, one after the other."""

    def __init__(self, path: str | Path, flags: str) -> None:
        self.jobs: list[FakeJob | Exception] = []
        self.stored = memoryview(b"")

    def fileno(self) -> int:
        return -1

    def __enter__(self) -> "FakeCuFile":
        return self

    def __exit__(self, *_: object) -> None: ...

    def pwrite(self, buffer: memoryview, size: int, offset: int) -> FakeJob:
        self.stored = buffer
        return FakeJob(size)

    def pread(self, buffer: memoryview, size: int, offset: int) -> FakeJob:
        if self.jobs:
            job = self.jobs.pop(0)
            if isinstance(job, Exception):
                raise job
            return job
        buffer[:] = self.stored
        return FakeJob(size)


def fake_kvikio(*, prefers_compat: bool = False, has_gds: bool = True, file: Any = FakeCuFile) -> dict[str, Any]:
    """Modules as `import` would find them."""
    kvikio: Any = ModuleType("kvikio")
    kvikio.CuFile = file
    kvikio.defaults = SimpleNamespace(
        set=lambda values: None, get=lambda name: 1, is_compat_mode_preferred=lambda: prefers_compat
    )
    kvikio.cufile_driver = SimpleNamespace(get=lambda name: has_gds)
    return {"kvikio": kvikio, "kvikio.defaults": kvikio.defaults, "kvikio.cufile_driver": kvikio.cufile_driver}


@pytest.fixture
def machine(monkeypatch):
    """`machine(driver=…, modules=…)`: what the probe finds."""

    def made(*, driver: bool, modules: dict[str, Any]) -> None:
        def loaded(name: str, **_: Any) -> None:
            assert name == "libcuda.so.1"
            if not driver:
                raise OSError("libcuda.so.1: cannot open shared object file")

        monkeypatch.setattr(kvikio_file, "ctypes", SimpleNamespace(CDLL=loaded))
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    load_kvikio.cache_clear()
    yield made
    load_kvikio.cache_clear()


class ForgetfulCuFile(FakeCuFile):
    def pread(self, buffer: memoryview, size: int, offset: int) -> FakeJob:
        return FakeJob(size)


def failing_file(path: str, flags: str) -> None:
    raise RuntimeError("CUDA error at: utils.cpp:59: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH\nmore")


@pytest.mark.parametrize(
    ("driver", "modules", "path_name", "reason"),
    [
        (False, {}, "posix", "no CUDA driver: libcuda.so.1 not found"),
        (True, {"kvikio": None}, "posix", "kvikio not installed: pip install 'cairn-kv[gds]'"),
        (
            True,
            fake_kvikio(file=failing_file),
            "posix",
            "kvikio does not work with this CUDA driver: "
            "CUDA error at: utils.cpp:59: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        ),
        (
            True,
            fake_kvikio(file=ForgetfulCuFile),
            "posix",
            "kvikio does not work with this CUDA driver: what was written is not what was read",
        ),
        (
            True,
            fake_kvikio(prefers_compat=True),
            "kvikio-posix",
            "a CUDA driver, and no cuFile for it: kvikio's POSIX path",
        ),
        (
            True,
            fake_kvikio(has_gds=False),
            "kvikio-posix",
            "a CUDA driver, and GPUDirect Storage not loaded: kvikio's POSIX path",
        ),
        (True, fake_kvikio(), "kvikio-gds", "GPUDirect Storage"),
    ],
    ids=["no driver", "no kvikio", "a driver that does not fit", "wrong bytes", "no cuFile", "no GDS", "GDS"],
)
def test_the_probe_says_which_way_and_why(machine, driver, modules, path_name, reason):
    machine(driver=driver, modules=modules)
    assert (probe().path_name, probe().reason) == (path_name, reason)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('libcufile not found')", "kvikio cannot be loaded: libcufile not found"),
        ("import cuda_that_is_not", "kvikio not installed in full (cuda_that_is_not is missing)"),
    ],
)
def test_a_kvikio_that_does_not_import_is_told_of(machine, monkeypatch, tmp_path, source, reason):
    (tmp_path / "kvikio.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "kvikio"]:
        monkeypatch.delitem(sys.modules, name)
    machine(driver=True, modules={})
    assert probe().path_name == "posix"
    assert probe().reason.startswith(reason)


def test_kvikio_where_there_is_none_is_a_bad_setting_that_names_the_extra(machine, slab):
    machine(driver=False, modules={})
    with pytest.raises(ConfigError, match=r"cairn-kv\[gds\].*no CUDA driver"):
        open_block_file(slab, io="kvikio")
    file = open_block_file(slab, io="auto")
    assert file.path_name.startswith("posix")
    file.close()


# kvikio: what it may do, without it.


@pytest.mark.parametrize(
    ("jobs", "number"),
    [
        ([FakeJob(RuntimeError("at: x.hpp:90: POSIX error on pread: Input/output error")), FakeJob(ALIGN)], errno.EIO),
        ([FakeJob(RuntimeError("POSIX error on pread: Read-only file system")), FakeJob(ALIGN)], errno.EROFS),
        ([FakeJob(RuntimeError("cuFile error: something new")), FakeJob(ALIGN)], errno.EIO),
        ([FakeJob(512), FakeJob(ALIGN)], errno.EIO),
        ([FakeJob(ALIGN), RuntimeError("CUDA error: out of memory")], errno.EIO),
        ([FakeJob(ALIGN), ValueError("a bug")], None),
    ],
    ids=["EIO", "EROFS", "an unknown error", "a short read", "refused at once", "a bug"],
)
def test_a_failed_read_returns_when_no_thread_of_kvikio_uses_a_buffer(slab, jobs, number):
    file = KvikioFile(slab, Kvikio(SimpleNamespace(CuFile=FakeCuFile), True, "GPUDirect Storage"))
    file._file.jobs = list(jobs)
    with pytest.raises((OSError, ValueError)) as failed:
        file.read(0, [aligned_buffer(ALIGN), aligned_buffer(ALIGN)])
    assert getattr(failed.value, "errno", None) == number
    assert all(job.was_waited_for for job in jobs if isinstance(job, FakeJob))


@pytest.mark.parametrize(
    ("message", "changed"),
    [("contiguous", {"strides": (2,)}), ("read-only", {"data": (0, True)})],
    ids=["gaps", "read-only"],
)
def test_memory_of_a_gpu_that_cannot_be_read_into_is_refused(slab, message, changed):
    file = KvikioFile(slab, Kvikio(SimpleNamespace(CuFile=FakeCuFile), True, "GPUDirect Storage"))
    with pytest.raises(TypeError, match=message):
        file.read(0, [DeviceMemory(0, ALIGN, **changed)])


# The double that goes wrong.


@pytest.fixture
def faulty(slab):
    def made(**at):
        return FaultyFile(PosixFile(slab), Faults({int(number[1:]): fault for number, fault in at.items()}))

    return made


def test_the_nth_operation_fails_and_the_next_does_not(faulty):
    file = faulty(_1=Fail(errno.ENOSPC))
    file.write(0, [filled(ALIGN)])
    with pytest.raises(OSError) as failed:
        file.write(ALIGN, [filled(ALIGN)])
    assert failed.value.errno == errno.ENOSPC
    assert read_bytes(file, ALIGN, ALIGN) == bytes(ALIGN)
    assert file.faults.operations == [("write", 0, ALIGN), ("write", ALIGN, ALIGN), ("read", ALIGN, ALIGN)]


def test_a_disk_that_is_gone_stays_gone_for_every_file_on_it(slab):
    faults = Faults({0: Fail(errno.EROFS, forever=True)})
    files = [FaultyFile(PosixFile(slab), faults) for _ in range(2)]
    for call in (lambda: files[0].sync(), lambda: files[1].reserve(ALIGN), lambda: read_bytes(files[0], 0, ALIGN)):
        with pytest.raises(OSError) as failed:
            call()
        assert failed.value.errno == errno.EROFS


@pytest.mark.parametrize("kept", [0, 1, ALIGN - 1, ALIGN, ALIGN + 7])
def test_a_torn_write_leaves_its_first_bytes(faulty, kept):
    old, new = filled(2 * ALIGN), filled(2 * ALIGN)
    file = faulty(_1=Tear(kept))
    file.write(0, [old])
    with pytest.raises(OSError):
        file.write(0, [new[:ALIGN], new[ALIGN:]])
    assert read_bytes(file, 0, 2 * ALIGN) == bytes(new[:kept]) + bytes(old[kept:])


def test_a_lost_write_leaves_what_was_there(faulty):
    old = filled(ALIGN)
    file = faulty(_1=Lose())
    file.write(0, [old])
    file.write(0, [filled(ALIGN)])
    assert read_bytes(file, 0, ALIGN) == old


@pytest.mark.parametrize("operation", [0, 1], ids=["written", "read"])
def test_one_bit_is_another(faulty, operation):
    file, block = faulty(**{f"_{operation}": FlipBit(8 * ALIGN + 3)}), filled(2 * ALIGN)
    file.write(0, [block[:ALIGN], block[ALIGN:]])
    changed = bytearray(block)
    changed[ALIGN] ^= 8
    halves = aligned_buffer(2 * ALIGN)
    file.read(0, [halves[:ALIGN], halves[ALIGN:]])
    assert halves == changed
    assert read_bytes(file, 0, 2 * ALIGN) == (block if operation else changed)


def test_an_operation_waits_for_an_event(faulty):
    wait = Wait(threading.Event())
    file, block = faulty(_0=wait), filled(ALIGN)
    writer = threading.Thread(target=file.write, args=(0, [block]))
    writer.start()
    assert wait.begun.wait(10)
    assert read_bytes(file, 0, ALIGN) == bytes(ALIGN)
    wait.until.set()
    writer.join(10)
    assert read_bytes(file, 0, ALIGN) == block
