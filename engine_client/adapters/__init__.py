"""What an engine's adapter needs of the store, and what all adapters share; one engine per module.

DecodeClient.load     -> LoadedPrefix    the prefix that the store has
PrefillClient.begin   -> PrefillStream   the blocks that it lacks, layer by layer
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine_client.codec import Codec, pack_encoded, unpack_encoded
from engine_client.compaction import SinkWindow
from engine_client.layout import KvLayout, Tensor, pack_layer, unpack_layer
from engine_client.quantise import NotEncoded

LOG = logging.getLogger(__name__)

BlockWriter = Callable[[Sequence[memoryview], Sequence[int]], None]


class PutReport(Protocol):
    """What a prefill put into the store."""

    @property
    def blocks(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def failure(self) -> str:
        """What ended it early; empty otherwise."""
        ...


class PrefillStream(Protocol):
    """One prompt's blocks on their way into the store."""

    @property
    def wanted(self) -> Sequence[int]:
        """Indexes, within the prompt, of the blocks that the store lacks."""
        ...

    def layer_ready(self, layer: int, first_block: int, stop_block: int, write: BlockWriter) -> None:
        """Tells that `layer` of the blocks [first_block, stop_block) has been computed.

        Of any one block the layers come in order. `write(blocks, indexes)` copies that layer into the bytes
        of those blocks, all of them in that range; it may be called at once or later, from any thread, any
        number of times, until `finish` or `abort` returns.
        """
        ...

    def finish(self, complete_blocks: int) -> PutReport:
        """Commits the wanted blocks below `complete_blocks`, after their last write."""
        ...

    def abort(self) -> None:
        """Gives up what is not committed. No write runs any more once this returns."""
        ...


class PrefillClient(Protocol):
    """Where an engine's new blocks go."""

    def begin(self, tokens: Sequence[int]) -> PrefillStream:
        """Opens a stream for the whole blocks of `tokens`, from the prompt's first token on."""
        ...


class LoadedPrefix(Protocol):
    """The blocks of a prompt's prefix, readable until `close`, right as long as `is_intact()` says so afterwards."""

    @property
    def tokens(self) -> int: ...
    @property
    def blocks(self) -> Sequence[memoryview]: ...
    @property
    def failure(self) -> str:
        """What cut it short; empty for a plain miss."""
        ...

    def is_intact(self) -> bool: ...
    def close(self) -> None: ...


class DecodeClient(Protocol):
    """Where an engine's prefixes come from."""

    def load(self, tokens: Sequence[int], deadline_s: float) -> LoadedPrefix:
        """The longest stored prefix of `tokens` that arrives within `deadline_s` seconds; perhaps none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one request gave and cost. Times in seconds of the wall clock."""

    token_ids: list[int]
    prompt_tokens: int
    reused_tokens: int  # of the prompt, from the store
    computed_tokens: int  # of the prompt
    ttft_s: float  # from the call until the first token is known, the load included
    total_s: float
    load_s: float  # finding the prefix, and copying it into the engine
    compute_s: float  # of the prompt, without the times the engine waited for the store
    put_s: float  # in which at least one put was under way
    put_hidden_s: float  # of those, while the engine computed
    bytes_loaded: int
    bytes_stored: int
    failures: tuple[str, ...]  # what went wrong at the store; the tokens are right all the same


class PrefixLostError(Exception):
    """What was read of a loaded prefix may not have been its bytes: it was held for too long."""


class StoredPrefix:
    """The part of a prompt that the store had, on its way into the engine's cache; perhaps no token.

    `codec` is what its blocks were written with. With a `window` the `left_out_tokens` in its middle are not loaded:
    the cache holds `cached_tokens`, and what is computed next has the positions that follow `tokens`.
    """

    def __init__(
        self,
        layout: KvLayout,
        clock: Callable[[], float],
        failures: list[str],
        *,
        codec: Codec | None = None,
        window: SinkWindow | None = None,
    ) -> None:
        self.tokens = self.left_out_tokens = self.bytes = 0
        self._codec = codec
        self._window = window
        self.found_s = self.copied_s = 0.0
        self._layout = layout
        self._clock = clock
        self._failures = failures
        self._loaded: LoadedPrefix | None = None
        self._blocks: Sequence[memoryview] = ()

    def find(self, client: DecodeClient, tokens: Sequence[int], deadline_s: float, grid_tokens: int) -> None:
        """Asks for the prefix of `tokens`; what is off the grid of `grid_tokens` is left out."""
        if len(tokens) == 0:
            return
        began = self._clock()
        with survived("load", self._failures):
            self._loaded = client.load(tokens, deadline_s)
            if self._loaded.failure:
                self._failures.append(f"load: {self._loaded.failure}")
            usable = min(self._loaded.tokens, len(tokens)) // grid_tokens * grid_tokens
            blocks = self._loaded.blocks[: usable // self._layout.block_tokens]
            if len(blocks) * self._layout.block_tokens != usable:
                raise ValueError(f"{len(blocks)} blocks came for {usable} tokens")
            self._check_sizes(blocks)
            if self._window is not None:
                blocks = [blocks[at] for at in self._window.kept_blocks(len(blocks), self._layout.block_tokens)]
            self._blocks, self.tokens = blocks, usable
            self.left_out_tokens = usable - len(blocks) * self._layout.block_tokens
            self.bytes = sum(block.nbytes for block in blocks)
        self.found_s = self._clock() - began

    def _check_sizes(self, blocks: Sequence[memoryview]) -> None:
        size = self._layout.block_bytes if self._codec is None else self._codec.block_bytes
        if size and any(block.nbytes != size for block in blocks):
            raise ValueError(f"a block came that is not {size} bytes long")

    @property
    def cached_tokens(self) -> int:
        """Of `tokens`, those that are loaded."""
        return self.tokens - self.left_out_tokens

    def copy_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copies one layer into tensors of `cached_tokens` tokens; the layers come in order, and the last closes.

        Raises PrefixLostError when the bytes may not have been the prefix's.
        """
        began = self._clock()
        starts = range(0, self.cached_tokens, self._layout.block_tokens)
        try:
            if self._codec is None:
                unpack_layer(self._layout, layer, self._blocks, starts, keys, values)
            else:
                unpack_encoded(self._codec, layer, self._blocks, starts, keys, values)
        except NotEncoded as error:
            raise PrefixLostError(f"what is stored of the prefix cannot be read: {error}") from error
        if self._loaded is None or not self._loaded.is_intact():
            raise PrefixLostError(f"the prefix was lost while layer {layer} was read")
        if layer == self._layout.layers - 1:
            self.close()  # all is copied: the blocks need not stay for as long as the rest computes
        self.copied_s += self._clock() - began

    def close(self) -> None:
        """Lets go of the blocks; may be called at any time."""
        loaded, self._loaded, self._blocks = self._loaded, None, ()
        if loaded is not None:
            with survived("close", self._failures):
                loaded.close()


class Offering:
    """A prompt's blocks on their way into the store, and the time that takes. A failure ends it quietly.

    Failures are added to `failures`; after one, nothing more is offered, and what was begun is aborted.
    """

    def __init__(
        self, layout: KvLayout, clock: Callable[[], float], failures: list[str], *, codec: Codec | None = None
    ) -> None:
        self.stored_bytes = 0
        self._codec = codec
        self._left_out_tokens = 0
        self._layout = layout
        self._clock = clock
        self._failures = failures
        self._stream: PrefillStream | None = None
        self._stop_block = 0
        self._offered = [0] * layout.layers  # per layer: blocks [0, n) have been offered
        self._waiting: list[tuple[float, float]] = []  # spans in which the engine waited for the store
        self._writing: list[tuple[float, float]] = []  # spans in which blocks were written, on any thread

    def begin(self, client: PrefillClient, tokens: Sequence[int], prefix: StoredPrefix) -> None:
        """Opens the stream for `tokens`, a whole number of blocks, whose cache begins with `prefix`.

        A prefix that is not whole is not offered again.
        """
        self._left_out_tokens = prefix.left_out_tokens
        if self._left_out_tokens:
            self._offered = [prefix.tokens // self._layout.block_tokens] * self._layout.layers
        self._stop_block = len(tokens) // self._layout.block_tokens
        if self._stop_block:
            with self._waited("begin"):
                self._stream = client.begin(tokens)

    def offer(self, layer: int, start: int, end: int, keys: Tensor, values: Tensor) -> None:
        """Offers the blocks of `layer` that are complete with the tokens [start, end) and were not before.

        `keys` and `values` hold all tokens [0, end) of the cache, in which those that were left out do not count,
        and must not change until `finish` or `abort` returns.
        """
        first, stop = self._offered[layer], (end + self._left_out_tokens) // self._layout.block_tokens
        if self._stream is None or first >= stop:
            return
        self._offered[layer] = stop
        with self._waited("put"):
            if any(first <= block < stop for block in self._stream.wanted):
                self._stream.layer_ready(layer, first, stop, partial(self._write, layer, keys, values))

    def _write(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        blocks: Sequence[memoryview],
        indexes: Sequence[int],
    ) -> None:
        began = self._clock()
        starts = [index * self._layout.block_tokens - self._left_out_tokens for index in indexes]
        if self._codec is None:
            pack_layer(self._layout, layer, blocks, starts, keys, values)
        else:
            pack_encoded(self._codec, layer, blocks, starts, keys, values)
        self._writing.append((began, self._clock()))

    def finish(self) -> None:
        """Waits until what was offered is in the store."""
        if self._stream is not None:
            with self._waited("finish"):
                report = self._stream.finish(self._stop_block)
                self._stream = None
                self.stored_bytes = report.bytes
                if report.failure:
                    self._failures.append(f"put: {report.failure}")

    def abort(self) -> None:
        """Ends what was begun and is not finished; may be called at any time."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with survived("abort", self._failures):
                stream.abort()

    @contextmanager
    def _waited(self, what: str) -> Iterator[None]:
        began, failures = self._clock(), len(self._failures)
        with survived(what, self._failures):
            yield
        if len(self._failures) > failures:
            self.abort()
        self._waiting.append((began, self._clock()))

    @property
    def waited_s(self) -> float:
        """Seconds in which the engine's own thread was at the store."""
        return _covered_s(self._waiting)

    @property
    def put_s(self) -> float:
        """Seconds in which any thread was at it."""
        return _covered_s(self._waiting + self._writing)


def _covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of spans [start, stop)."""
    covered, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered


@contextmanager
def survived(what: str, failures: list[str]) -> Iterator[None]:
    """Whatever the store does in this block, the request goes on; the failure is added to `failures`."""
    try:
        yield
    except Exception as error:
        LOG.warning("%s failed; the request goes on without the store", what, exc_info=True)
        failures.append(f"{what}: {type(error).__name__}: {error}")
