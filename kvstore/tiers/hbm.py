"""Memory of a GPU as a tier: one pool that is allocated once, and copies to and from it on streams of its own.

    host views  <- copier thread ->  two staging buffers, page-locked  <- stream ->  slots in the pool

While the device empties one staging buffer, the thread fills the other. There is one such lane per direction, so
loads and stores do not wait for each other; a lane has one batch at a time. On `device="cpu"` the same code runs
over host memory, with a stream whose work is done when it returns.
"""

import errno
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from warnings import catch_warnings

import numpy as np

from kvstore.copier import Copier
from kvstore.errors import ConfigError, Forbidden, InvalidRequest
from kvstore.region import Region, make_backed_region
from kvstore.tiers import TierSpec
from kvstore.tiers.device_pool import HostStream, Lane, Mark, Memory, Pool, SlabHandle, Stream, available_bytes
from kvstore.tiers.posix_file import BlockBuffer
from kvstore.types import Slot

try:
    import torch
    from torch import Tensor
except ImportError as missing:
    raise ConfigError("the HBM tier needs torch: pip install 'cairn-kv[engine]'") from missing

STAGING_BYTES = 8 << 20  # of one buffer of four: 0.3 ms at 25 GB/s, many times what a call of CUDA costs
EVENT_HANDLE_BYTES = 64  # cudaIpcEventHandle_t

cuda: Any = torch.cuda  # without types, as is the sharing of storage
UntypedStorage: Any = torch.UntypedStorage


class HostPool:
    """A memfd per slab, as in DRAM: who maps one slab sees no other, and none passes to another tenant."""

    def __init__(self, spec: TierSpec, device: torch.device, capacity_bytes: int) -> None:
        self._spec = spec
        self.peers: dict[str, bool] = {}
        free = available_bytes()
        if capacity_bytes > free:
            raise _no_room(spec, device, capacity_bytes, f"{free} bytes are available")

    def make(self, place: int, stream: Stream) -> Memory:
        name, size = f"cairn-{self._spec.name}", self._spec.slab_bytes
        region, _ = make_backed_region(name, size, huge_pages="no", mlock="no", prefault=True)
        return Memory(place, _tensor_of(region), region)

    def drop(self, memory: Memory) -> None:
        assert memory.region is not None
        memory.region.punch()  # clients may have it mapped for long: its pages go now
        memory.region.close()

    def export(self, memory: Memory) -> Region:
        assert memory.region is not None
        return memory.region

    def stream(self) -> Stream:
        return HostStream()

    def staging(self) -> Tensor:
        return torch.empty(STAGING_BYTES, dtype=torch.uint8)

    def describe(self) -> dict[str, Any]:
        return {"device_name": "host memory", "device_free_bytes": available_bytes()}

    def close(self) -> None:
        pass


class CudaStream:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = cuda.Stream(device)
        self._event = cuda.Event(interprocess=True)  # one for all: who waits late waits for more, never less

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        with cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def zero(self, target: Tensor) -> None:
        with cuda.stream(self._stream):
            target.zero_()

    def mark(self) -> Mark:
        event = cuda.Event(blocking=True)  # the thread sleeps, and does not spin
        event.record(self._stream)
        mark: Mark = event
        return mark

    def wait(self, handle: bytes) -> None:
        if len(handle) != EVENT_HANDLE_BYTES:
            raise InvalidRequest(f"the handle of an event has {EVENT_HANDLE_BYTES} bytes, not {len(handle)}")
        try:
            event = cuda.Event.from_ipc_handle(self._device, handle)
            self._stream.wait_event(event)
        except torch.AcceleratorError as error:
            raise InvalidRequest(f"the event cannot be waited for: {error}") from error

    def event(self) -> bytes:
        self._event.record(self._stream)
        return bytes(self._event.ipc_handle())


class CudaPool:
    """One tensor on a GPU, shared with other processes as a whole: CUDA knows no smaller unit."""

    def __init__(self, spec: TierSpec, device: torch.device, capacity_bytes: int) -> None:
        count = cuda.device_count() if cuda.is_available() else 0
        if device.index >= count:
            raise ConfigError(f"tiers.{spec.name}.device: there is no {device}; torch sees {count} GPUs")
        self._spec = spec
        self._device = device
        names = [f"cuda:{number}" for number in range(count)]
        pairs = [(one, other) for one in names for other in names if one != other]
        self.peers = {f"{one}->{other}": cuda.can_device_access_peer(one, other) for one, other in pairs}
        free, total = cuda.mem_get_info(device)
        room = f"{free} of {total} bytes are free"
        if capacity_bytes > free:
            raise _no_room(spec, device, capacity_bytes, room)
        try:
            self._pool = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise _no_room(spec, device, capacity_bytes, room) from error
        self._shared: SlabHandle | None = None

    def make(self, place: int, stream: Stream) -> Memory:
        size = self._spec.slab_bytes
        tensor = self._pool[place * size : (place + 1) * size]
        stream.zero(tensor)  # the slab that had it may have been a stranger's
        stream.mark().synchronize()
        return Memory(place, tensor, None)

    def drop(self, memory: Memory) -> None:
        pass

    def export(self, memory: Memory) -> bytes:
        if self._shared is None:
            self._shared = self._share()  # once: of each sharing torch waits for its reader, who may have died
        return self._shared._replace(slab_offset=memory.place * self._spec.slab_bytes).pack()

    def _share(self) -> SlabHandle:
        storage: Any = self._pool.untyped_storage()
        _, memory, pool_bytes, pool_offset, counter, counter_offset, event, must_wait = storage._share_cuda_()
        places = (pool_offset, pool_bytes, 0, self._spec.slab_bytes)
        return SlabHandle(_uuid(self._device), memory, *places, counter, counter_offset, event if must_wait else b"")

    def stream(self) -> Stream:
        return CudaStream(self._device)

    def staging(self) -> Tensor:
        try:
            return torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        except (torch.AcceleratorError, torch.OutOfMemoryError) as error:
            raise ConfigError(f"tiers.{self._spec.name}: no page-locked memory for copies: {error}") from error

    def describe(self) -> dict[str, Any]:
        free, total = cuda.mem_get_info(self._device)
        name = cuda.get_device_name(self._device)
        return {"device_name": name, "device_free_bytes": free, "device_total_bytes": total}

    def close(self) -> None:
        if self._shared is not None:
            UntypedStorage._release_ipc_counter_cuda(self._shared.counter, self._shared.counter_offset)
            self._shared = None
        self._pool = self._pool.new_empty(0)
        cuda.empty_cache()
        torch.accelerator.empty_host_cache()


POOLS: dict[str, type[HostPool] | type[CudaPool]] = {"cpu": HostPool, "cuda": CudaPool}


class HbmTier:
    """Slabs in the memory of `device`, "cpu" or "cuda:N"; `capacity_bytes` of it, in whole slabs.

    A CUDA handle shows its holder the whole pool, to read and to write, and cannot be taken back. So slabs on
    a GPU are exported only where `one_tenant` says that no stranger's blocks can be in the pool.

    Threads of `copier` wait for what engines do on the GPU: the tier wants one of its own, with two threads.

    Raises:
        ConfigError: there is no such device, or not so much memory on it.
    """

    def __init__(
        self, spec: TierSpec, *, device: str, capacity_bytes: int, copier: Copier, one_tenant: bool = False
    ) -> None:
        self.spec = spec
        self._copier = copier
        self.device = _parse_device(spec, device)
        self._has_one_tenant = one_tenant
        places = capacity_bytes // spec.slab_bytes
        if places < 1:
            raise ConfigError(f"tiers.{spec.name}.capacity: {capacity_bytes} bytes are no slab of {spec.slab_bytes}")
        self._pool: Pool = POOLS[self.device.type](spec, self.device, places * spec.slab_bytes)
        self._inward, self._outward = Lane(self._pool), Lane(self._pool)
        self._pool_bytes = places * spec.slab_bytes
        self._free = list(range(places - 1, -1, -1))
        self._prepared: list[Memory] = []
        self._slabs: dict[int, Memory] = {}

    async def prepare(self) -> None:
        """Raises OSError: ENOMEM when all memory is in use, EIO when the device fails."""

        def make() -> None:
            if not self._free:
                raise OSError(errno.ENOMEM, f"all {self._pool_bytes} bytes on {self.device} are in use")
            place = self._free.pop()
            try:
                self._prepared.append(self._pool.make(place, self._inward.stream))
            except BaseException:
                self._free.append(place)
                raise

        if not self._prepared:  # a caller that was cancelled left its memory
            await self._run(self._inward, make)

    def adopt(self, slab_id: int) -> None:
        self._slabs[slab_id] = self._prepared.pop()

    def drop_slab(self, slab_id: int) -> None:
        """On a GPU the bytes stay until the memory is prepared again, which makes them zeros."""
        memory = self._slabs.pop(slab_id)
        self._pool.drop(memory)
        self._free.append(memory.place)

    def tensor(self, slot: Slot, size: int) -> Tensor:
        """The first `size` bytes of a slot, in place: uint8 [size] on the device."""
        assert 0 <= size <= slot.size
        assert 0 <= slot.offset <= slot.offset + slot.size <= self.spec.slab_bytes, "a slice would be cut short"
        tensor: Tensor = self._slabs[slot.slab_id].tensor[slot.offset : slot.offset + size]
        return tensor

    async def buffers(self, places: Sequence[tuple[Slot, int]]) -> list[BlockBuffer]:
        """The first bytes of slots, for a file to read into: a file waits for no stream, so this does.

        What was begun in the slots before is done: copies, and work of engines whose events were waited for.
        """
        await self._run(self._inward, lambda: None)
        tensors: list[Any] = [self.tensor(slot, size) for slot, size in places]
        return [memoryview(tensor.numpy()) if self.device.type == "cpu" else tensor for tensor in tensors]

    def region(self, slab_id: int) -> Region:
        """A slab's memfd; on the CPU only."""
        region = self._slabs[slab_id].region
        assert region is not None, f"a slab on {self.device} is no memfd"
        return region

    def may_export(self, *, to_writer: bool) -> bool:
        """Whether a slab may be shown to another process: on a GPU only if it may see and write all of the pool."""
        return self.device.type == "cpu" or (self._has_one_tenant and to_writer)

    def export(self, slab_id: int) -> bytes | Region:
        """From what `import_slab` maps the slab elsewhere on this host: a handle, or the memfd. Raises Forbidden."""
        if not self.may_export(to_writer=True):
            raise Forbidden(f"a handle of a slab on {self.device} would show the blocks of all tenants")
        return self._pool.export(self._slabs[slab_id])

    async def read(self, blocks: Sequence[tuple[Slot, memoryview]]) -> None:
        """Raises OSError, EIO when the device fails; then what is in the views is undefined."""
        located = self._located(blocks)
        await self._run(self._outward, lambda: self._outward.read(located))

    async def write(self, blocks: Sequence[tuple[Slot, memoryview]]) -> None:
        """Raises OSError, EIO when the device fails; then what is in the slots is undefined."""
        located = self._located(blocks)
        await self._run(self._inward, lambda: self._inward.write(located))

    async def copy_within(self, pairs: Sequence[tuple[Slot, Slot, int]]) -> None:
        """Copy `size` bytes for each (source, target, size), in this order, on the device. Errors as of `write`."""
        assert all((source.slab_id, source.offset) != (target.slab_id, target.offset) for source, target, _ in pairs)
        located = [(self.tensor(target, size), self.tensor(source, size)) for source, target, size in pairs]
        await self._run(self._inward, lambda: self._inward.stream.copy(located))

    def wait_event(self, handle: bytes) -> None:
        """What the tier begins from now on comes after the work that an engine recorded in this event.

        An engine sends one when it has put KV into a slot, and when it lets go of a slot that its kernels may
        still read. It keeps the event until it has the reply. Raises InvalidRequest when it is no event's handle.
        """
        self._inward.stream.wait(handle)
        self._outward.stream.wait(handle)

    def ready_event(self) -> bytes:
        """The handle of an event after all writes so far: the tier's, and those of engines that it waits for.

        An engine whose stream waits for it may then read every slot that was committed before. It opens the
        handle after this call: the event is recorded again by the next one.
        """
        return self._inward.stream.event()

    def peer_access(self) -> dict[str, bool]:
        """For each pair of GPUs, as "cuda:0->cuda:1", whether the first reaches the second's memory directly."""
        return dict(self._pool.peers)

    async def aclose(self) -> None:
        """Free everything. Who mapped a slab on a GPU must be gone; a copy that waits for an engine is waited for."""
        async with self._inward.turn, self._outward.turn:
            for slab_id in list(self._slabs):
                self.drop_slab(slab_id)
            while self._prepared:
                self._pool.drop(self._prepared.pop())
            for lane in (self._inward, self._outward):
                lane.staging.clear()
            await self._copier.run(self._pool.close)

    def describe(self) -> dict[str, Any]:
        lanes = (self._inward, self._outward)
        return {
            "medium": "device memory",
            "device": str(self.device),
            "pool_bytes": self._pool_bytes,
            "slabs_ready": len(self._slabs),
            "staging_bytes": sum(buffer.view.nbytes for lane in lanes for buffer in lane.staging),
            "streams": len(lanes),
            "exports": self.may_export(to_writer=True),
            "peer_access": self.peer_access(),
            **self._pool.describe(),
        }

    def _located(self, blocks: Sequence[tuple[Slot, memoryview]]) -> list[tuple[Tensor, memoryview]]:
        return [(self.tensor(slot, view.nbytes), view.cast("B")) for slot, view in blocks]

    async def _run(self, lane: Lane, work: Callable[[], None]) -> None:
        """Do `work` in a copier thread. However it ends, nothing of it moves after."""

        def drained() -> None:
            try:
                try:
                    work()
                finally:
                    lane.stream.mark().synchronize()
            except torch.AcceleratorError as error:
                raise OSError(errno.EIO, f"{self.device}: {error}") from error

        async with lane.turn:
            await self._copier.run(drained)


def import_slab(handle: bytes | Region) -> Tensor:
    """A slab that another process exported, uint8 [slab bytes]; mapped until the last tensor of it is gone.

    Of a region that is mapped read-only the tensor must not be written: torch does not know, the kernel does.

    Raises:
        ProtocolError: the handle is none.
        InvalidRequest: this process cannot map it: it does not see that GPU, or the exporter is gone or itself.
    """
    if isinstance(handle, Region):
        return _tensor_of(handle)
    slab = SlabHandle.unpack(handle)
    count = cuda.device_count() if cuda.is_available() else 0
    visible = [device for device in map(_cuda, range(count)) if _uuid(device) == slab.device]
    if not visible:
        raise InvalidRequest(f"the slab is on GPU {slab.device}, and this process sees {count} others")
    event, memory = slab.event or bytes(EVENT_HANDLE_BYTES), (slab.memory, slab.pool_bytes, slab.pool_offset)
    counter = (slab.counter, slab.counter_offset)
    try:
        pool = UntypedStorage._new_shared_cuda(visible[0].index, *memory, *counter, event, bool(slab.event))
    except torch.AcceleratorError as error:
        raise InvalidRequest(f"the slab cannot be mapped: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=visible[0]).set_(pool, slab.slab_offset, (slab.slab_bytes,), (1,))


def _tensor_of(region: Region) -> Tensor:
    """Holds a view of the region, so the mapping lives as long as the tensor."""
    with catch_warnings(action="ignore", category=UserWarning):  # that torch knows no read-only memory
        return torch.from_numpy(np.frombuffer(region.view(0, region.size), np.uint8))


def _cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


def _uuid(device: torch.device) -> str:
    properties: Any = cuda.get_device_properties(device)
    return str(properties.uuid)


def _parse_device(spec: TierSpec, device: str) -> torch.device:
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"tiers.{spec.name}.device: {device!r} is no device of torch") from error
    if parsed.type not in POOLS:
        raise ConfigError(f"tiers.{spec.name}.device: {device!r} is neither cpu nor a GPU like cuda:0")
    return _cuda(parsed.index or 0) if parsed.type == "cuda" else torch.device("cpu")


def _no_room(spec: TierSpec, device: torch.device, capacity_bytes: int, room: str) -> ConfigError:
    return ConfigError(f"tiers.{spec.name}.capacity: {capacity_bytes} bytes do not fit on {device}, where {room}")
