"""The prefill side: puts a prompt's blocks into the store layer by layer, while the engine computes the next layer.

The engine says which layer of which blocks is computed; a thread of the client's own asks for slots, copies the
layer straight into them, tells the node how far it is, and commits blocks whose last layer is in place. Where a
codec leaves the size of a block open, its layers are gathered here, and slots are asked for when the last is encoded.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from engine_client.blocking import BlockingClient
from engine_client.codec import Codec, check_namespace
from engine_client.steps import Grant, OpenSpace
from kvstore.copier import copy_bytes
from kvstore.errors import StoreError

QUEUED_LAYERS = 256  # that may wait to be copied; the engine waits beyond, but not for long
PATIENCE_S = 1.0  # that an engine waits for a store; then this prompt is not stored
BEGIN_S = 0.5  # that the engine waits to hear what is there already

Write = Callable[[Sequence[memoryview], Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Stored:
    """What a prompt's stream committed. `failure` says what ended it early, and is empty otherwise."""

    blocks: int = 0
    bytes: int = 0
    failure: str = ""


class PrefillClient:
    """Streams blocks of one namespace (and of this worker's part of it) through `client`.

    A store that fails or is full costs the engine nothing but the blocks: the stream goes quiet. `codec` is the one
    that the engine writes with. Raises ValueError when the namespace is of another one.
    """

    def __init__(self, client: BlockingClient, space: OpenSpace, *, codec: Codec | None = None) -> None:
        check_namespace(space.namespace, codec)
        self._codec = codec
        self._client = client
        self._space = space
        self.form = (space.namespace.codec, space.namespace.compaction)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cairn-prefill")

    def begin(self, tokens: Any) -> "PrefillStream":
        """A stream for the whole blocks of a prompt, from its first token on. Never raises a StoreError."""
        keys = self._space.keys(tokens)
        try:
            present = self._client.match(self._space, keys, within_s=BEGIN_S)
        except StoreError as error:
            return self._stream([], range(0), f"begin: {error}")
        return self._stream(keys, range(present, len(keys)), "")

    def _stream(self, keys: Sequence[Any], wanted: range, failure: str) -> "PrefillStream":
        return PrefillStream(self._client, self._space, self._thread, keys, wanted, failure, codec=self._codec)

    def close(self) -> None:
        """Wait for what is under way. The BlockingClient is the caller's."""
        self._thread.shutdown(wait=True)


@dataclass(slots=True)
class _Run:
    """Consecutive blocks that are computed together: one grant."""

    first: int
    stop: int
    slots: list[memoryview]  # to write into: the grant's, or where sizes are open, memory of this process
    positions: list[int]  # in the prompt, of the slots
    grant: Grant | None = None


class PrefillStream:
    """One prompt's blocks on their way into the store. For the engine's thread; never raises a StoreError."""

    def __init__(
        self,
        client: BlockingClient,
        space: OpenSpace,
        thread: ThreadPoolExecutor,
        keys: Sequence[Any],
        wanted: range,
        failure: str,
        *,
        codec: Codec | None = None,
    ) -> None:
        self.wanted: Sequence[int] = wanted
        self._codec = codec
        self._client = client
        self._space = space
        self._thread = thread
        self._keys = keys
        self._failure = failure
        self._runs: dict[int, _Run] = {}
        self._jobs: deque[Future[None]] = deque()
        self._slots = threading.BoundedSemaphore(QUEUED_LAYERS)
        self._blocks = self._bytes = 0

    def layer_ready(self, layer: int, first_block: int, stop_block: int, write: Write) -> None:
        """`layer` of the blocks [first_block, stop_block) has been computed; of any block the layers come in order.

        `write(blocks, indexes)` copies that layer into the bytes of those blocks: called from this stream's
        thread, until `finish` or `abort` returns.
        """
        if self._failure or stop_block <= first_block:
            return
        if not self._slots.acquire(timeout=PATIENCE_S):
            self._failure = f"layers waited for {PATIENCE_S} s: the store is slow"
            return
        self._jobs.append(self._thread.submit(self._layer, layer, first_block, stop_block, write))

    def finish(self, complete_blocks: int) -> Stored:
        """Wait until what was given is in the store; runs with blocks from `complete_blocks` on are given up."""
        try:
            self._drain()
        finally:
            for run in self._runs.values():
                if run.stop > complete_blocks:
                    self._failure = self._failure or f"blocks [{run.first}, {run.stop}) were not completed"
            self._give_up()
        return Stored(self._blocks, self._bytes, self._failure)

    def abort(self) -> None:
        """Give up what is not committed. No write runs any more once this returns."""
        self._failure = self._failure or "aborted"
        try:
            self._drain()
        finally:
            self._give_up()

    # In the stream's thread.

    def _layer(self, layer: int, first: int, stop: int, write: Write) -> None:
        try:
            if self._failure:
                return
            run = self._runs.get(first)
            if run is None:
                run = self._begin(first, stop)
            if run.positions:
                write(run.slots, run.positions)
                if layer + 1 < self._space.namespace.layers and run.grant is not None:
                    self._client.progress(run.grant, layer + 1)
            if layer + 1 == self._space.namespace.layers:
                self._commit(run)
        except StoreError as error:
            self._failure = f"{error.code}: {error}"
        except BaseException as error:
            self._failure = f"write: {error}"
            raise
        finally:
            self._slots.release()

    def _begin(self, first: int, stop: int) -> _Run:
        size = self._space.namespace.block_bytes
        if size == 0 and self._codec is not None:
            slots = [memoryview(bytearray(self._codec.most_bytes)) for _ in range(first, stop)]
            run = _Run(first, stop, slots, [*range(first, stop)])
        else:
            grant = self._place(first, stop, [size] * (stop - first))
            run = _Run(first, stop, grant.slots, [first + at for at in grant.granted], grant)
        self._runs[first] = run
        return run

    def _place(self, first: int, stop: int, sizes: Sequence[int]) -> Grant:
        parent = self._keys[first - 1] if first else None
        return self._client.place(self._space, self._keys[first:stop], sizes, parent)

    def _commit(self, run: _Run) -> None:
        if run.grant is None:
            assert self._codec is not None
            encoded = [slot[: self._codec.size_of(slot)] for slot in run.slots]
            run.grant = self._place(run.first, run.stop, [block.nbytes for block in encoded])
            for slot, at in zip(run.grant.slots, run.grant.granted, strict=True):
                copy_bytes(slot, encoded[at])
        report = self._client.commit(run.grant)
        del self._runs[run.first]
        self._blocks += report.stored
        self._bytes += report.stored_bytes
        if report.refused:
            reason = "over the tenant's quota" if report.over_quota else "no room"
            self._failure = f"{report.refused} blocks were refused: {reason}"

    # In the engine's thread.

    def _drain(self) -> None:
        """Wait for the stream's jobs. What `write` itself raised is raised here: a fault of the engine's side."""
        jobs, self._jobs = self._jobs, deque()
        wait(jobs)
        for job in jobs:
            job.result()

    def _give_up(self) -> None:
        runs, self._runs = self._runs, {}
        for grant in (run.grant for run in runs.values() if run.grant is not None):
            try:
                self._client.abort(grant)
            except StoreError as error:  # the session is gone then, and the node has freed its slots
                self._failure = self._failure or f"{error.code}: {error}"
