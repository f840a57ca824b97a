"""What `cairn bench transport` measures: gets and puts of a batch by several clients in turn, beside bare READs."""

import gc
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from engine_client.blocking import BlockingClient
from engine_client.steps import OpenSpace
from kvstore.errors import Corrupt, Rejected, StoreError, TransportError
from kvstore.prefix import MAX_TOKEN, Namespace
from kvstore.transport.rdma.verbs import VerbsError
from kvstore.types import BlockKey
from server.commands.loopback import Loopback

NAME = "cairn-bench"
NAMESPACE = Namespace(model=NAME, dtype="uint8", layout="bytes", block_tokens=1, layers=1)
MOST_BYTES = 16 << 20
LEAST_ROUNDS, MOST_ROUNDS = 5, 500
FLOOR_S = 10.0


class Case(NamedTuple):
    """`batch` blocks of `size` bytes in one call."""

    size: int
    batch: int

    @property
    def total_bytes(self) -> int:
        return self.size * self.batch


class Figure(NamedTuple):
    """Of `rounds` calls. The floor is that of bare READs, None where there is no device; `ratio` is floor by p50."""

    transport: str
    call: str  # get, put
    size_bytes: int
    batch: int
    rounds: int
    p50_us: float
    p99_us: float
    gb_per_s: float
    floor_us: float | None
    floor_gb_per_s: float | None
    ratio: float | None


def measure(clients: Mapping[str, BlockingClient], floor: Loopback | None, case: Case, run_s: float) -> list[Figure]:
    """For about `run_s`, all in turn. Nothing stays in the node but a namespace's name.

    Rejected when the node has no room, Corrupt when other bytes come back than went.
    """
    spans: dict[tuple[str, str], list[float]] = {(way, call): [] for way in clients for call in ("get", "put")}
    floors: list[float] = []
    with ExitStack() as stack:
        ends = {way: stack.enter_context(_End.of(client, case)) for way, client in clients.items()}
        until = time.perf_counter() + run_s
        for number in range(MOST_ROUNDS + 1):
            if number > LEAST_ROUNDS and time.perf_counter() >= until:
                break
            found = {(way, call): span for way, end in ends.items() for call, span in end.round().items()}
            bare_s = _span_s(lambda: _read(floor, case)) if floor is not None else 0.0
            if number:  # the first maps, registers and connects
                floors.append(bare_s)
                for key, span in found.items():
                    spans[key].append(span)
    floor_s = statistics.median(floors) if floor is not None else None
    return [_figure(way, call, case, sorted(spans[way, call]), floor_s) for way, call in spans]


def _figure(way: str, call: str, case: Case, spans: Sequence[float], floor_s: float | None) -> Figure:
    p50, p99 = statistics.median(spans), spans[min(len(spans) * 99 // 100, len(spans) - 1)]
    return Figure(
        way,
        call,
        case.size,
        case.batch,
        len(spans),
        round(p50 * 1e6, 1),
        round(p99 * 1e6, 1),
        round(case.total_bytes / p50 / 1e9, 4),
        round(floor_s * 1e6, 1) if floor_s is not None else None,
        round(case.total_bytes / floor_s / 1e9, 4) if floor_s is not None else None,
        round(floor_s / p50, 4) if floor_s is not None else None,
    )


def _read(floor: Loopback | None, case: Case) -> None:
    assert floor is not None
    try:
        floor.read(case.size, case.batch, time.monotonic() + FLOOR_S)
    except (VerbsError, TimeoutError) as error:
        raise TransportError(f"bare READs: {error}") from error


def _span_s(work: Callable[[], object]) -> float:
    """Seconds of one call, with no garbage collection in it."""
    gc.disable()
    try:
        began = time.perf_counter()
        work()
        return max(time.perf_counter() - began, 1e-9)
    finally:
        gc.enable()


class _End:
    """One client with registered memory for a case: what it puts and where it gets to."""

    def __init__(self, client: BlockingClient, space: OpenSpace, case: Case) -> None:
        self._client = client
        self._space = space
        self._source = bytearray(os.urandom(case.total_bytes))
        self._target = bytearray(case.total_bytes)
        places = [slice(at * case.size, (at + 1) * case.size) for at in range(case.batch)]
        self._blocks = [memoryview(self._source)[place] for place in places]
        self._targets = [memoryview(self._target)[place] for place in places]
        self._is_verified = False

    @classmethod
    @contextmanager
    def of(cls, client: BlockingClient, case: Case) -> Iterator["_End"]:
        end = cls(client, client.open(NAME, NAMESPACE), case)
        registered = [client.register(buffer) for buffer in (end._source, end._target)]
        try:
            yield end
        finally:
            with suppress(StoreError):  # a call was late and a NIC writes there still: it goes with the client
                for buffer in registered:
                    buffer.close()

    def round(self) -> dict[str, float]:
        """Seconds of a put of new blocks and of a get of them; they are evicted then, whatever comes of it."""
        keys = self._space.keys([secrets.randbelow(MAX_TOKEN) for _ in self._blocks])
        try:
            put_s = _span_s(lambda: self._put(keys))
            get_s = _span_s(lambda: self._get(keys))
        finally:
            self._client.evict(self._space, keys)
        if not self._is_verified and self._source != self._target:
            raise Corrupt("other bytes came back than went")
        self._is_verified = True
        return {"get": get_s, "put": put_s}

    def _put(self, keys: Sequence[BlockKey]) -> None:
        if self._client.put(self._space, keys, self._blocks).stored < len(keys):
            raise Rejected(f"the node has no room for {len(keys)} blocks of {len(self._blocks[0])} bytes")

    def _get(self, keys: Sequence[BlockKey]) -> None:
        if self._client.get(self._space, keys, self._targets) < len(keys):
            raise Rejected("blocks were evicted as soon as they were put: the node is too full to be measured")
