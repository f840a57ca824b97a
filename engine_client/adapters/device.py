"""Blocks in GPU memory that the node shares: held there, and read in place by an engine's own kernels.

    with DeviceReader(client) as reader:
        held = reader.acquire(space, keys, lease_s=30.0)
        ...                                      # kernels on the current stream read held.tensors
        reader.release(held)

On a node whose tier is on the CPU the tensors are in host memory that this process cannot write.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from engine_client import leases
from engine_client.blocking import BlockingClient
from engine_client.steps import HeldOnDevice, Link, OpenSpace, Patience
from kvstore.errors import ProtocolError
from kvstore.tiers.hbm import import_slab
from kvstore.types import BlockKey

cuda: Any = torch.cuda  # without types


@dataclass(slots=True, eq=False)
class HeldTensors:
    """Blocks of a chain: `tensors[i]` is uint8 [bytes of block i] in the node's memory, not to be written.

    They are the blocks' as long as the lease lasts, `lease.lease_s` from when it was asked for, and none after
    `DeviceReader.release`. `lease.checksums` has the xxh3_64 of each, for who copies it to the host.
    """

    tensors: list[torch.Tensor]
    lease: HeldOnDevice


class DeviceReader:
    """One thread at a time. `client` is on the node's host, and outlives it.

    What is read here was verified by the node when it came into HBM.
    """

    def __init__(self, client: BlockingClient) -> None:
        self._client = client
        self._link: Link | None = None  # that the slabs were mapped over: another node's are others
        self._slabs: dict[int, torch.Tensor] = {}
        self._held: set[HeldTensors] = set()

    def __enter__(self) -> "DeviceReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def acquire(self, space: OpenSpace, keys: Sequence[BlockKey], *, lease_s: float, wait_s: float = 0.0,
                load_s: float = 2.0, tokens_per_s: float = 0.0, stream: Any = None) -> HeldTensors | None:  # fmt: skip
        """Hold the longest prefix of `keys` that is in HBM or comes there in time; None when there is none.

        `wait_s`, `load_s` and `tokens_per_s` as for `Patience`. On a GPU, `stream` (else the current one) waits
        until the bytes are in place: read them on it.

        Raises:
            InvalidRequest: the node has no HBM tier, or is not on this host.
            Forbidden: the node does not show its GPU's memory to this tenant.
            StoreError: as of the client.
        """
        patience = Patience(wait_s, load_s, tokens_per_s)
        lease = self._client.run(
            lambda link: leases.acquire_on_device(link, space, keys, lease_s=lease_s, patience=patience),
            patience.longest_s,
        )
        if lease is None:
            return None
        try:
            held = HeldTensors(self._tensors(lease), lease)
            if lease.ready:
                device = held.tensors[0].device
                event = cuda.Event.from_ipc_handle(device, lease.ready)
                (stream or cuda.current_stream(device)).wait_event(event)
        except BaseException:
            self._client.release(lease)
            raise
        self._held.add(held)
        return held

    def renew(self, held: HeldTensors, lease_s: float) -> None:
        """Keep it for longer. StaleLease when it lapsed."""
        self._client.renew(held.lease, lease_s)

    def release(self, held: HeldTensors, stream: Any = None) -> None:
        """Let go of the blocks, as soon as what is queued on `stream` (else the current one) is done. Idempotent."""
        if held not in self._held:
            return
        self._held.remove(held)
        device = held.tensors[0].device
        held.tensors = []
        event = None  # lives until the node has it
        if device.type == "cuda":
            event = cuda.Event(interprocess=True)
            event.record(stream or cuda.current_stream(device))
            held.lease.last_use = event.ipc_handle()
        self._client.release(held.lease)

    def close(self) -> None:
        """Let go of everything that is held, and of the node's memory."""
        for held in list(self._held):
            self.release(held)
        self._slabs.clear()
        self._link = None

    def _tensors(self, lease: HeldOnDevice) -> list[torch.Tensor]:
        if lease.link is not self._link:
            self._slabs.clear()
            self._link = lease.link
        wanted = [
            slab_id for slab_id in dict.fromkeys(place[0] for place in lease.places) if slab_id not in self._slabs
        ]
        if wanted:
            exported = self._client.run(lambda link: leases.device_slabs(link, lease, wanted))
            self._slabs.update(zip(wanted, map(import_slab, exported), strict=True))
        tensors = [self._slabs[slab_id][offset : offset + size] for slab_id, offset, size in lease.places]
        if any(tensor.numel() != size for tensor, (_, _, size) in zip(tensors, lease.places, strict=True)):
            raise ProtocolError("a block does not lie in its slab")
        return tensors
