"""Blocks on their way from a peer's memory into memory here, in slices, until nothing of them is on its way."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.errors import StoreError

MOST_TRIES = 4  # of one slice that fail: what looks like a path may be the peer's memory that is gone


class Fetch(NamedTuple):
    """A block of `size` bytes: where it goes and where it is. Keys by the number of the NIC here, of the port there."""

    address: int
    lkeys: Sequence[int]
    remote_address: int
    rkeys: Sequence[int]
    size: int
    numa_node: int = -1  # of the memory here


def merged(fetches: Sequence[Fetch], most_bytes: int) -> list[Fetch]:
    """Neighbours on both sides as one, up to `most_bytes`: blocks of a chain often lie one after the other."""
    found = list(fetches[:1])
    for fetch in fetches[1:]:
        last = found[-1]
        size = last.size + fetch.size
        if (
            last.address + last.size == fetch.address
            and last.remote_address + last.size == fetch.remote_address
            and last.lkeys == fetch.lkeys
            and last.rkeys == fetch.rkeys
            and size <= most_bytes
        ):
            found[-1] = Fetch(last.address, last.lkeys, last.remote_address, last.rkeys, size, last.numa_node)
        else:
            found.append(fetch)
    return found


class Slice:
    """A part of a block that one READ fetches."""

    __slots__ = ("address", "lkeys", "remote_address", "rkeys", "size", "transfer", "tries")

    def __init__(self, transfer: "Transfer", fetch: Fetch, start: int, size: int) -> None:
        self.transfer = transfer
        self.address = fetch.address + start
        self.lkeys = fetch.lkeys
        self.remote_address = fetch.remote_address + start
        self.rkeys = fetch.rkeys
        self.size = size
        self.tries = 0


class Transfer:
    """`ended` is called once: all is in place, or `error` says why it never will be, or it was called off.

    `settled` is called once, after that or with it: no NIC writes into its memory any more, whatever came of it.
    """

    def __init__(
        self,
        fetches: Sequence[Fetch],
        slice_bytes: int,
        *,
        ended: Callable[[], None] = lambda: None,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self.pending: deque[Slice] = deque()
        for fetch in fetches:
            size = fetch.size
            if size <= slice_bytes:
                self.pending.append(Slice(self, fetch, 0, size))
                continue
            for start in range(0, size, slice_bytes):
                self.pending.append(Slice(self, fetch, start, min(slice_bytes, size - start)))
        assert self.pending, "there is something to fetch"
        self.numa_node = fetches[0].numa_node
        self.error: StoreError | None = None
        self.is_ended = False
        self.is_settled = False
        self.in_flight = 0
        self.in_flight_bytes = 0
        self._missing = len(self.pending)
        self._when_ended = ended
        self._when_settled = settled

    @property
    def is_complete(self) -> bool:
        """Every byte is in place."""
        return not self._missing

    def posted(self, piece: Slice) -> None:
        self.in_flight += 1
        self.in_flight_bytes += piece.size

    def arrived(self, piece: Slice) -> None:
        self._missing -= 1
        if not self._missing and not self.is_ended:
            self._end()
        self.left(piece)

    def left(self, piece: Slice) -> None:
        """It is in no queue pair any more."""
        self.in_flight -= 1
        self.in_flight_bytes -= piece.size
        self._settle()

    def fail(self, error: StoreError) -> None:
        """Give up; of several reasons the first counts. What is in flight still settles."""
        if not self.is_ended:
            self.error = error
            self._end()
            self._settle()

    def call_off(self) -> None:
        """Nobody waits for it any more. Idempotent."""
        if not self.is_ended:
            self._end()
            self._settle()

    def _end(self) -> None:
        self.is_ended = True
        self.pending.clear()
        self._when_ended()

    def _settle(self) -> None:
        if self.is_ended and not self.in_flight and not self.is_settled:
            self.is_settled = True
            self._when_settled()
