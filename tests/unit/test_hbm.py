"""The device pool on the CPU, and over streams that are late."""

import asyncio
import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.copier import Copier
from kvstore.errors import ConfigError, Forbidden, InvalidRequest, ProtocolError
from kvstore.region import Region
from kvstore.tiers import TierSpec
from kvstore.tiers.device_pool import HostStream, SlabHandle, fills
from kvstore.types import HBM
from tests.tier_contract import (
    SLAB_BYTES,
    SLOT_BYTES,
    MediumContract,
    add_slabs,
    read_all,
    slot_of,
    write_all,
)

torch = pytest.importorskip("torch")
hbm = pytest.importorskip("kvstore.tiers.hbm")

REPO = Path(__file__).parents[2]
SPEC = TierSpec(HBM, SLAB_BYTES)
SLOTS = SLAB_BYTES // SLOT_BYTES


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier(threads=2)
    yield made
    made.close()


def tier_of(copier: Copier, slabs: int = 8) -> Any:
    return hbm.HbmTier(SPEC, device="cpu", capacity_bytes=slabs * SLAB_BYTES, copier=copier)


class LateStream(HostStream):
    """Does nothing before somebody waits for it, as a device may."""

    def __init__(self) -> None:
        self.begun = self.done = 0
        self.late: list[Callable[[], None]] = []

    def _later(self, work: Callable[[], None]) -> None:
        self.late.append(work)
        self.begun += 1

    def copy(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        located = list(pairs)
        self._later(lambda: HostStream.copy(self, located))

    def zero(self, target: Any) -> None:
        self._later(lambda: HostStream.zero(self, target))

    def mark(self) -> Any:
        stream, until = self, self.begun

        class LateMark:
            def synchronize(self) -> None:
                while stream.done < until:
                    stream.late.pop(0)()
                    stream.done += 1

        return LateMark()


class OneTensorPool(hbm.CudaPool):
    """What a GPU's pool does with its one tensor, done in host memory that is full of somebody's bytes."""

    def __init__(self, spec: TierSpec, device: Any, capacity_bytes: int) -> None:
        self._spec = spec
        self._pool = torch.full((capacity_bytes,), 0xEE, dtype=torch.uint8)
        self.peers = {"cuda:0->cuda:1": True}

    def stream(self) -> LateStream:
        return LateStream()

    def staging(self) -> Any:
        return torch.empty(hbm.STAGING_BYTES, dtype=torch.uint8)

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class GatedStream(HostStream):
    """Says that a copy has begun, and ends it when it is let."""

    def __init__(self) -> None:
        self.begun, self.open, self.has_ended = threading.Event(), threading.Event(), False

    def copy(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self.begun.set()
        assert self.open.wait(20)
        super().copy(pairs)
        self.has_ended = True


class FailingStream(HostStream):
    def copy(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        raise torch.AcceleratorError("unspecified launch failure")


# The contract, and staging.


class TestHbmTier(MediumContract):
    tier = HBM

    def open(self, copier: Copier) -> Any:
        return tier_of(copier)


class TestHbmTierWithSmallStaging(TestHbmTier):
    """Each batch takes many fills, and a block several."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hbm, "STAGING_BYTES", 4096)


class TestHbmTierOnALateDevice(TestHbmTierWithSmallStaging):
    """Staging that is filled or emptied too early has wrong bytes."""

    @pytest.fixture(autouse=True)
    def late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hbm.HostPool, "stream", lambda pool: LateStream())


class TestHbmTierInOneTensor(TestHbmTierWithSmallStaging):
    @pytest.fixture(autouse=True)
    def one_tensor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hbm, "POOLS", {"cpu": OneTensorPool})


@given(st.lists(st.integers(0, 1000), max_size=20), st.sampled_from([64, 128, 192, 512]))
def test_fills_hold_every_byte_once_in_order_and_no_two_in_one_place(sizes: list[int], staging_bytes: int) -> None:
    seen = [0] * len(sizes)
    for fill in fills(sizes, staging_bytes):
        end = 0
        for piece in fill:
            assert piece.start == seen[piece.block]
            assert piece.start < piece.end <= sizes[piece.block]
            assert piece.staged >= end
            assert piece.staged % 64 == 0
            seen[piece.block], end = piece.end, piece.staged + piece.end - piece.start
        assert 0 < end <= staging_bytes
    assert seen == sizes


def test_the_device_fills_one_buffer_while_the_other_is_emptied(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hbm, "STAGING_BYTES", 4096)
    streams: list[LateStream] = []
    waiting: list[int] = []

    class Counting(LateStream):
        def __init__(self) -> None:
            super().__init__()
            streams.append(self)

        def copy(self, pairs: Iterable[tuple[Any, Any]]) -> None:
            super().copy(pairs)
            waiting.append(len(self.late))

    monkeypatch.setattr(hbm.HostPool, "stream", lambda pool: Counting())

    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        for move in (tier.write, tier.read):
            waiting.clear()
            await move([(slot_of(HBM, 1, 0), memoryview(bytearray(5 * 4096)))])
            assert waiting == [1, 2, 2, 2, 2]
        await tier.aclose()

    asyncio.run(use())
    assert [stream.late for stream in streams] == [[], []]


# Where blocks lie.


def test_a_slot_is_a_tensor_in_place(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1, 2)
        slot = slot_of(HBM, 2, SLOTS - 1)
        tensor = tier.tensor(slot, 4001)
        assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (torch.uint8, (4001,), True)
        tensor.copy_(torch.arange(4001) % 251)
        assert await read_all(tier, [slot], [4001]) == [bytes(number % 251 for number in range(4001))]
        assert bytes(tier.region(2).view(slot.offset, 3)) == b"\0\1\2"
        await tier.aclose()

    asyncio.run(use())


def test_a_block_larger_than_its_slot_and_a_slot_beyond_its_slab_are_broken_invariants(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        slot = slot_of(HBM, 1, 0)
        beyond = slot._replace(offset=SLAB_BYTES - SLOT_BYTES + 64)
        for bad, size in [(slot, SLOT_BYTES + 1), (slot, -1), (beyond, 1), (slot._replace(offset=-64), 1)]:
            with pytest.raises(AssertionError):
                tier.tensor(bad, size)
        with pytest.raises(AssertionError):
            await tier.write([(slot, memoryview(bytes(SLOT_BYTES + 1)))])
        with pytest.raises(AssertionError):
            await tier.read([(slot, memoryview(bytearray(SLOT_BYTES + 1)))])
        await tier.aclose()

    asyncio.run(use())


def test_views_of_other_elements_are_moved_as_their_bytes(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        numbers = memoryview(bytes(range(160))).cast("d")
        await tier.write([(slot_of(HBM, 1, 1), numbers)])
        assert await read_all(tier, [slot_of(HBM, 1, 1)], [160]) == [bytes(range(160))]
        await tier.aclose()

    asyncio.run(use())


def test_blocks_move_within_the_device_in_the_order_that_is_given(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1, 2)
        first, second, third = slot_of(HBM, 1, 0), slot_of(HBM, 1, 1), slot_of(HBM, 2, 0)
        await write_all(tier, [first, second], [b"a" * 4001, b"b" * 4001])
        await tier.copy_within([(second, third, 4001), (first, second, 4001)])
        assert await read_all(tier, [first, second, third], [4001, 4001, 4002]) == [
            b"a" * 4001,
            b"a" * 4001,
            b"b" * 4001 + b"\0",
        ]
        await tier.copy_within([])
        with pytest.raises(AssertionError):
            await tier.copy_within([(first, first._replace(generation=2), 64)])
        await tier.aclose()

    asyncio.run(use())


# Memory that ends.


def test_when_all_memory_is_in_use_a_slab_is_refused_and_had_again_after_a_drop(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier, slabs=3)
        await add_slabs(tier, 1, 2, 3)
        for _ in range(2):
            with pytest.raises(OSError, match="are in use") as refused:
                await tier.prepare()
            assert refused.value.errno == errno.ENOMEM
        tier.drop_slab(2)
        await add_slabs(tier, 4)
        with pytest.raises(OSError, match="are in use"):
            await tier.prepare()
        await tier.aclose()

    asyncio.run(use())


def test_memory_is_nobodys_before_it_is_zeros(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Gated(LateStream):
        def zero(self, target: Any) -> None:
            super().zero(target)

            def wait() -> None:
                begun.set()
                assert may_end.wait(20)

            self._later(wait)

    class GatedPool(OneTensorPool):
        def stream(self) -> LateStream:
            return Gated()

    monkeypatch.setattr(hbm, "POOLS", {"cpu": GatedPool})

    async def use() -> None:
        tier = tier_of(copier)
        first = asyncio.create_task(tier.prepare())
        await asyncio.to_thread(begun.wait, 20)
        second = asyncio.create_task(tier.prepare())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done()
        assert not second.done(), "it would take what the first is still making"
        may_end.set()
        await asyncio.gather(first, second)
        await tier.aclose()

    asyncio.run(use())


def test_capacity_is_taken_in_whole_slabs(copier: Copier) -> None:
    tier = hbm.HbmTier(SPEC, device="cpu", capacity_bytes=2 * SLAB_BYTES + 5, copier=copier)
    assert tier.describe()["pool_bytes"] == 2 * SLAB_BYTES
    with pytest.raises(ConfigError, match=r"tiers\.hbm\.capacity: 1048575 bytes are no slab of 1048576"):
        hbm.HbmTier(SPEC, device="cpu", capacity_bytes=SLAB_BYTES - 1, copier=copier)


def test_more_than_there_is_ends_the_start_with_the_setting_and_what_is_free(copier: Copier) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.hbm\.capacity: \d+ bytes do not fit on cpu, where \d+ bytes are"):
        hbm.HbmTier(SPEC, device="cpu", capacity_bytes=1 << 50, copier=copier)


@pytest.mark.parametrize(
    ("device", "reason"),
    [("cuda:99", "there is no cuda:99; torch sees"), ("gpu", "no device of torch"), ("meta", "neither cpu nor a GPU")],
)
def test_a_device_that_is_not_there_ends_the_start(copier: Copier, device: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"tiers\.hbm\.device: .*{reason}"):
        hbm.HbmTier(SPEC, device=device, capacity_bytes=SLAB_BYTES, copier=copier)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from kvstore.errors import ConfigError
try:
    import kvstore.tiers.hbm
except ConfigError as error:
    print(error)
"""


def test_without_torch_the_error_names_the_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )
    assert "cairn-kv[engine]" in done.stdout


# A dropped slab, and who still maps it.


def test_a_dropped_slab_takes_its_bytes_from_those_who_still_map_it_and_nobody_gets_its_memory(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier, slabs=1)
        await add_slabs(tier, 1)
        client = Region(tier.region(1).readonly_fd(), SLAB_BYTES, writable=False, populate=True)
        await write_all(tier, [slot_of(HBM, 1, 0)], [b"secret"])
        assert bytes(client.view(0, 6)) == b"secret"
        tier.drop_slab(1)
        assert os.fstat(client.fd).st_blocks == 0
        await add_slabs(tier, 2)
        await write_all(tier, [slot_of(HBM, 2, 0)], [b"another's"])
        assert not any(client.view(0, SLAB_BYTES))
        client.close()
        await tier.aclose()

    asyncio.run(use())


def test_a_tensor_outlives_its_slab_and_shows_zeros(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        await write_all(tier, [slot_of(HBM, 1, 0)], [b"secret"])
        tensor = tier.tensor(slot_of(HBM, 1, 0), 6)
        tier.drop_slab(1)
        assert tensor.tolist() == [0] * 6
        await tier.aclose()
        assert tensor.tolist() == [0] * 6

    asyncio.run(use())


# Other processes.

ENGINE = f"""
import sys
from kvstore.region import Region
from kvstore.tiers.hbm import import_slab
fd, start, size = map(int, sys.argv[1:])
slab = import_slab(Region(fd, {SLAB_BYTES}, writable=True, populate=True))
assert tuple(slab.shape) == ({SLAB_BYTES},)
assert slab[start : start + size].tolist() == [number % 251 for number in range(size)]
slab[start : start + size] += 1
"""


def test_an_engine_in_another_process_reads_and_writes_slots_in_place(copier: Copier) -> None:
    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        slot, block = slot_of(HBM, 1, 5), bytes(number % 251 for number in range(4001))
        await write_all(tier, [slot], [block])
        exported = tier.export(1)
        assert exported is tier.region(1)
        command = [sys.executable, "-c", ENGINE, str(exported.fd), str(slot.offset), "4001"]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=REPO, pass_fds=[exported.fd], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        tier.wait_event(tier.ready_event())
        assert await read_all(tier, [slot], [4001]) == [bytes(number + 1 for number in block)]
        await tier.aclose()

    asyncio.run(use())


def test_an_event_of_a_gpu_is_refused_where_there_is_none(copier: Copier) -> None:
    with pytest.raises(InvalidRequest):
        tier_of(copier).wait_event(bytes(64))


HANDLE = SlabHandle(
    device="7d1ae4d6-8f0a-4a4e-9d5e-1d7f3c2b1a00",
    memory=bytes(range(64)),
    pool_offset=512,
    pool_bytes=8 * SLAB_BYTES,
    slab_offset=3 * SLAB_BYTES,
    slab_bytes=SLAB_BYTES,
    counter=b"/torch_12_34",
    counter_offset=7,
    event=b"\xff" * 64,
)


@given(st.binary(max_size=100), st.binary(max_size=100), st.binary(max_size=100))
def test_the_handle_of_a_slab_travels_as_bytes(memory: bytes, counter: bytes, event: bytes) -> None:
    handle = HANDLE._replace(memory=memory, counter=counter, event=event)
    assert SlabHandle.unpack(handle.pack()) == handle


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        HANDLE.pack()[:-1],
        HANDLE.pack() + b"\0",
        b"XHBM" + HANDLE.pack()[4:],
        HANDLE.pack()[:4] + b"\2" + HANDLE.pack()[5:],
        HANDLE._replace(slab_offset=8 * SLAB_BYTES).pack(),
        HANDLE._replace(slab_bytes=0).pack(),
        HANDLE._replace(pool_bytes=0).pack(),
        HANDLE.pack().replace(b"7d1ae4d6", b"\xff" * 8),
    ],
)
def test_bytes_that_are_no_handle_are_refused(bad: bytes) -> None:
    with pytest.raises(ProtocolError):
        hbm.import_slab(bad)


def test_a_slab_on_a_gpu_that_this_process_does_not_see_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="7d1ae4d6"):
        hbm.import_slab(HANDLE.pack())


def test_a_pool_whose_handle_shows_all_tenants_is_not_exported(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on a GPU, whose pool is exported as a whole."""
    monkeypatch.setattr(hbm, "POOLS", {"cuda": hbm.HostPool})
    for one_tenant in (False, True):
        tier = hbm.HbmTier(SPEC, device="cuda:0", capacity_bytes=SLAB_BYTES, copier=copier, one_tenant=one_tenant)
        asyncio.run(add_slabs(tier, 1))
        assert tier.describe()["exports"] is one_tenant
        if one_tenant:
            assert tier.export(1) is tier.region(1)
        else:
            with pytest.raises(Forbidden, match="all tenants"):
                tier.export(1)
        asyncio.run(tier.aclose())


# Cancelled, failed, closed.


@pytest.mark.parametrize("cancellations", [1, 3])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_caller_that_is_cancelled_in_mid_copy_gets_its_memory_when_the_copy_has_ended(
    copier: Copier, monkeypatch: pytest.MonkeyPatch, direction: str, cancellations: int
) -> None:
    streams: list[GatedStream] = []

    def stream(pool: Any) -> GatedStream:
        streams.append(GatedStream())
        return streams[-1]

    monkeypatch.setattr(hbm.HostPool, "stream", stream)

    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        view = memoryview(bytearray(b"x" * 4096))
        move: Callable[..., Any] = getattr(tier, direction)
        inward, outward = streams
        gated = inward if direction == "write" else outward
        task = asyncio.create_task(move([(slot_of(HBM, 1, 0), view)]))
        await asyncio.to_thread(gated.begun.wait, 20)
        waiting = asyncio.create_task(move([(slot_of(HBM, 1, 1), view)]))
        for _ in range(cancellations):
            task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not task.done(), "the bytes are moving"
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gated.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gated.has_ended
        await move([(slot_of(HBM, 1, 2), view)])
        await tier.aclose()

    asyncio.run(use())


def test_a_load_does_not_wait_for_a_store(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[HostStream] = []

    def stream(pool: Any) -> HostStream:
        streams.append(HostStream() if streams else GatedStream())
        return streams[-1]

    monkeypatch.setattr(hbm.HostPool, "stream", stream)

    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        gated: Any = streams[0]
        storing = asyncio.create_task(write_all(tier, [slot_of(HBM, 1, 0)], [b"slow"]))
        await asyncio.to_thread(gated.begun.wait, 20)
        assert await read_all(tier, [slot_of(HBM, 1, 1)], [4]) == [bytes(4)]
        assert not storing.done()
        gated.open.set()
        await storing
        await tier.aclose()

    asyncio.run(use())


def test_a_device_that_fails_is_an_error_of_input_and_output(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hbm.HostPool, "stream", lambda pool: FailingStream())

    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        slots = [slot_of(HBM, 1, index) for index in (0, 1)]
        for attempt in (
            write_all(tier, slots[:1], [b"x"]),
            read_all(tier, slots[:1], [1]),
            tier.copy_within([(slots[0], slots[1], 1)]),
        ):
            with pytest.raises(OSError, match="cpu: unspecified launch failure") as failed:
                await attempt
            assert failed.value.errno == errno.EIO
        await tier.aclose()

    asyncio.run(use())


def test_a_slab_that_cannot_be_made_leaves_its_memory_to_the_next(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        tier = tier_of(copier, slabs=1)

        def refuse(*args: Any, **options: Any) -> None:
            raise OSError(errno.EMFILE, "too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(hbm, "make_backed_region", refuse)
            with pytest.raises(OSError, match="too many open files"):
                await tier.prepare()
        await add_slabs(tier, 1)
        await tier.aclose()

    asyncio.run(use())


def test_closing_waits_for_the_copy_under_way(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[GatedStream] = []

    def stream(pool: Any) -> GatedStream:
        streams.append(GatedStream())
        return streams[-1]

    monkeypatch.setattr(hbm.HostPool, "stream", stream)

    async def use() -> None:
        tier = tier_of(copier)
        await add_slabs(tier, 1)
        writing = asyncio.create_task(write_all(tier, [slot_of(HBM, 1, 0)], [b"slow"]))
        await asyncio.to_thread(streams[0].begun.wait, 20)
        closing = asyncio.create_task(tier.aclose())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        streams[0].open.set()
        await asyncio.gather(writing, closing)
        assert streams[0].has_ended

    asyncio.run(use())


def test_stat_names_the_device_its_room_its_staging_and_its_peers(copier: Copier) -> None:
    tier = tier_of(copier)
    described = tier.describe()
    assert {name: described[name] for name in ("device", "pool_bytes", "slabs_ready", "streams", "exports")} == {
        "device": "cpu",
        "pool_bytes": 8 * SLAB_BYTES,
        "slabs_ready": 0,
        "streams": 2,
        "exports": True,
    }
    assert described["staging_bytes"] == 4 * hbm.STAGING_BYTES
    assert described["device_free_bytes"] > 0
    assert described["peer_access"] == tier.peer_access() == {}


def test_random_blocks_written_and_read_by_random_batches_are_those_of_a_dict(copier: Copier) -> None:
    async def use() -> None:
        seed = random.Random(5)
        tier, truth = tier_of(copier), {}
        await add_slabs(tier, 1, 2, 3)
        places = [(slab_id, index) for slab_id in (1, 2, 3) for index in range(SLOTS)]
        for _ in range(60):
            chosen = seed.sample(places, seed.randint(1, 12))
            if seed.random() < 0.5:
                blocks = [seed.randbytes(seed.randint(1, SLOT_BYTES)) for _ in chosen]
                truth.update(zip(chosen, blocks, strict=True))
                await write_all(tier, [slot_of(HBM, *place) for place in chosen], blocks)
            elif known := [place for place in chosen if place in truth]:
                sizes = [len(truth[place]) for place in known]
                copies = await read_all(tier, [slot_of(HBM, *place) for place in known], sizes)
                assert copies == [truth[place] for place in known]
        await tier.aclose()

    asyncio.run(use())
