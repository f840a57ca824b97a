"""Copier threads: what they copy, what a cancelled caller waits for, and that they let Python go on."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.copier import PIECE_BYTES, Copier, address_of, checksum, copy_bytes, copy_hashed

BIG_BYTES = 64 << 20


@pytest.fixture
def copier() -> Any:
    made = Copier(threads=1)
    yield made
    made.close()


class Gate:
    """Work that says when it has begun, and ends when it is let."""

    def __init__(self, result: Any = "done") -> None:
        self.begun, self.open, self.result = threading.Event(), threading.Event(), result
        self.has_ended = False

    def __call__(self) -> Any:
        self.begun.set()
        assert self.open.wait(20)
        self.has_ended = True
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def has_begun(self) -> None:
        await asyncio.to_thread(self.begun.wait, 20)


async def turn_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# Copies.


@pytest.mark.parametrize("size", [0, 1, 63, 4096, 1 << 20])
@pytest.mark.parametrize("beyond", [0, 5])
def test_all_of_the_source_is_copied_and_no_byte_more(size: int, beyond: int) -> None:
    source = bytes(range(256)) * (size // 256 + 1)
    target = bytearray(b"\xee" * (size + beyond))
    copy_bytes(memoryview(target), memoryview(source)[:size])
    assert target == source[:size] + b"\xee" * beyond


def test_elements_of_any_type_are_copied_as_their_bytes() -> None:
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    target = np.zeros(6, np.float64)
    copy_bytes(target.data, source.data)
    assert target.tobytes() == source.tobytes()


def test_a_read_only_target_is_refused_and_stays_as_it_is() -> None:
    target = bytes(8)
    with pytest.raises(ValueError, match="read-only"):
        copy_bytes(memoryview(target), memoryview(b"12345678"))
    assert target == b"\0\0\0\0\0\0\0\0"


@pytest.mark.parametrize(("target_bytes", "source_bytes"), [(0, 1), (7, 8), (1, 1 << 20)])
def test_a_target_that_is_too_small_is_a_broken_invariant(target_bytes: int, source_bytes: int) -> None:
    with pytest.raises(AssertionError):
        copy_bytes(memoryview(bytearray(target_bytes)), memoryview(bytes(source_bytes)))


def test_a_buffer_with_gaps_is_refused() -> None:
    gaps = np.zeros((4, 4), np.uint8)[:, :2]
    for target, source in ((gaps, np.ones(8, np.uint8)), (np.ones(8, np.uint8), gaps)):
        with pytest.raises((BufferError, ValueError)):
            copy_bytes(target.data, source.data)


def test_checksums_are_xxh3_64(copier: Copier) -> None:
    assert checksum(b"") == 0x2D06800538D394C2
    assert checksum(memoryview(b"cairn")) == checksum(bytearray(b"cairn")) != checksum(b"Cairn")
    blocks = [memoryview(bytes([number]) * 1000) for number in range(5)]
    assert asyncio.run(copier.checksums(blocks)) == [checksum(block) for block in blocks]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 5])
@pytest.mark.parametrize("side", ["target", "source"])
def test_a_copy_that_is_hashed_on_its_way_has_the_checksum_of_the_whole(size: int, side: str) -> None:
    source = memoryview(bytes(range(251)) * (size // 251 + 1))
    target = memoryview(bytearray(b"\xee" * (size + 3)))
    hashed = (target if side == "target" else source)[:size]
    assert copy_hashed(address_of(target), address_of(source), hashed) == checksum(source[:size])
    assert target == bytes(source[:size]) + b"\xee\xee\xee"


def test_pairs_are_copied_together(copier: Copier) -> None:
    sources = [memoryview(bytes([number]) * 5000) for number in range(4)]
    targets = [bytearray(5000) for _ in sources]
    asyncio.run(copier.copy([(memoryview(target), source) for target, source in zip(targets, sources, strict=True)]))
    assert targets == [bytearray(source) for source in sources]


# Waiting.


def test_a_result_or_an_error_comes_back(copier: Copier) -> None:
    assert asyncio.run(copier.run(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(copier.run(lambda: 1 // 0))


@pytest.mark.parametrize("cancellations", [1, 2, 5])
def test_a_caller_that_is_cancelled_however_often_waits_for_its_bytes_to_stop(
    copier: Copier, cancellations: int
) -> None:
    gate = Gate()

    async def cancel() -> None:
        task = asyncio.create_task(copier.run(gate))
        await gate.has_begun()
        for _ in range(cancellations):
            task.cancel()
            await turn_the_loop()
            assert not task.done(), "the bytes are moving"
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gate.has_ended
        assert task.cancelled()

    asyncio.run(cancel())


def test_a_deadline_is_met_late_rather_than_with_bytes_still_moving(copier: Copier) -> None:
    gate = Gate()

    async def wait() -> None:
        asyncio.get_running_loop().call_later(0.03, gate.open.set)
        async with asyncio.timeout(0.005):
            await copier.run(gate)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    assert gate.has_ended


def test_work_that_no_thread_took_up_is_not_done_for_a_cancelled_caller(copier: Copier) -> None:
    first, second = Gate(), Gate()

    async def cancel() -> None:
        running = asyncio.create_task(copier.run(first))
        await first.has_begun()
        queued = asyncio.create_task(copier.run(second))
        await turn_the_loop()
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        assert not first.has_ended, "the cancelled one did not wait for its turn"
        first.open.set()
        assert await running == "done"
        assert await copier.run(lambda: "next") == "next"
        assert not second.begun.is_set()

    asyncio.run(cancel())


def test_work_that_fails_for_a_cancelled_caller_troubles_nobody(copier: Copier) -> None:
    gate = Gate(OSError("the disk is gone"))
    complaints: list[dict[str, Any]] = []

    async def cancel() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        task = asyncio.create_task(copier.run(gate))
        await gate.has_begun()
        task.cancel()
        await turn_the_loop()
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        await turn_the_loop()

    asyncio.run(cancel())
    assert complaints == []


def test_no_more_threads_than_asked_for_are_at_work() -> None:
    before = set(threading.enumerate())
    copier = Copier(threads=3)
    gates = [Gate() for _ in range(5)]

    async def run() -> None:
        tasks = [asyncio.create_task(copier.run(gate)) for gate in gates]
        for gate in gates[:3]:
            await gate.has_begun()
        await turn_the_loop()
        assert [gate.begun.is_set() for gate in gates] == [True, True, True, False, False]
        for gate in gates:
            gate.open.set()
        assert await asyncio.gather(*tasks) == ["done"] * 5

    asyncio.run(run())
    copier.close()
    left = set(threading.enumerate()) - before
    assert not any(thread.name.startswith("cairn-copier") for thread in left)


# Python goes on.


@pytest.mark.parametrize(
    "work",
    [lambda target, source: copy_bytes(target, source), lambda target, source: checksum(source)],
    ids=["copy", "checksum"],
)
def test_python_goes_on_beside_big_blocks(work: Callable[[memoryview, memoryview], Any]) -> None:
    """A call that kept the GIL would leave this thread a gap as long as itself, each time."""
    target, source = memoryview(bytearray(BIG_BYTES)), memoryview(bytearray(BIG_BYTES))
    for _ in range(30):
        begun, ended = threading.Event(), threading.Event()
        took: list[float] = []

        def in_a_thread(begun: threading.Event, ended: threading.Event, took: list[float]) -> None:
            start = time.perf_counter()
            begun.set()
            work(target, source)
            took.append(time.perf_counter() - start)
            ended.set()

        thread = threading.Thread(target=in_a_thread, args=(begun, ended, took))
        thread.start()
        begun.wait()
        longest_gap, before = 0.0, time.perf_counter()
        while not ended.is_set():
            now = time.perf_counter()
            longest_gap, before = max(longest_gap, now - before), now
        thread.join()
        if longest_gap < took[0] / 2:
            return
    pytest.fail("each call kept the GIL")
