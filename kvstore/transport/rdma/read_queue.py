"""One queue pair's READs: how many may be posted, which have arrived, and which must be fetched some other way."""

import errno
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.transport.rdma.transfer import Slice
from kvstore.transport.rdma.verbs import FLUSHED, STATUSES, SUCCESS, Own, QueuePair, Read, Remote, VerbsError

SIGNAL_EACH = 16  # READs without a completion of their own, at most: completions are what makes room for more
POLLED = 64
SEQUENCES = (1 << 32) - 1


class Failure(NamedTuple):
    """`slice` is the READ that failed, None where only the queue pair is known to have; `status` is a name."""

    slice: Slice | None
    status: str


class Posted(NamedTuple):
    """READs that one completion will answer, the last of them and all before."""

    last: int
    size: int
    started: float


class ReadQueue:
    """Posts in order and completes in order. After a failure nothing is in it any more: it has to be connected anew.

    A READ's id is (life of the queue pair << 32 | its number), so that completions of an earlier life are known as
    late, and counted: those that a reset left in the completion queue answer for nothing.
    """

    def __init__(self, pair: QueuePair, depth: int, window_bytes: int) -> None:
        self.pair = pair
        self.is_up = False
        self.is_dead = False  # its device does not answer any more
        self.in_flight_bytes = 0
        self.late_completions = 0
        self.batches: deque[Posted] = deque()
        self._depth = depth
        self._window_bytes = window_bytes
        self._posted: deque[tuple[int, Slice]] = deque()
        self._life = 1
        self._next = 0

    def connect(self, own: Own, remote: Remote) -> None:
        """Both ends do so, with new PSNs. VerbsError."""
        if self.is_dead:
            raise VerbsError(errno.ENODEV, "the device does not answer any more")
        assert not self._posted, "reset first"
        self._life += 1
        self._next = 0
        self.pair.connect(own, remote)
        self.pair.arm()
        self.is_up = True

    def room(self) -> int:
        """READs that may be posted now."""
        if not self.is_up or self.in_flight_bytes >= self._window_bytes:
            return 0
        return self._depth - len(self._posted)

    @property
    def window_left(self) -> int:
        """Bytes that may be posted, the last READ over it."""
        return self._window_bytes - self.in_flight_bytes

    @property
    def slices(self) -> list[Slice]:
        """What is in it, the first posted first."""
        return [piece for _, piece in self._posted]

    @property
    def oldest(self) -> float | None:
        """When the READ was posted that has been waiting for longest."""
        return self.batches[0].started if self.batches else None

    @property
    def in_flight(self) -> int:
        return len(self._posted)

    def post(self, slices: Sequence[Slice], nic: int, port: int, now: float) -> list[Posted]:
        """At most `room` of them, into memory of NIC number `nic` here from that of port `port` there; its batches.

        VerbsError: as after any failure, `reset` gives back all that is in it.
        """
        reads, size, number, life = [], 0, self._next, self._life << 32
        posted, last, batches = self._posted, len(slices) - 1, []
        for position, piece in enumerate(slices):
            size += piece.size
            signaled = position == last or position % SIGNAL_EACH == SIGNAL_EACH - 1
            reads.append(
                Read(
                    life | number,
                    piece.address,
                    piece.lkeys[nic],
                    piece.size,
                    piece.remote_address,
                    piece.rkeys[port],
                    signaled,
                )
            )
            posted.append((number, piece))
            if signaled:
                batches.append(Posted(number, size, now))
                self.in_flight_bytes += size
                size = 0
            number = number + 1 & SEQUENCES
            piece.transfer.posted(piece)
        self._next = number
        self.pair.post_reads(reads)
        self.batches += batches
        return batches

    def progress(self) -> tuple[list[Slice], list[Posted], Failure | None]:
        """What arrived, in which batches, and what failed, if something did: `reset` comes next then."""
        arrived: list[Slice] = []
        batches: list[Posted] = []
        try:
            self.pair.arm()
            while completions := self.pair.poll(POLLED):
                for completion in completions:
                    life, number = completion.wr_id >> 32, completion.wr_id & SEQUENCES
                    if life != self._life or not self._is_posted(number):
                        self.late_completions += 1
                    elif completion.status == SUCCESS:
                        self._retire(number, arrived, batches)
                    else:
                        return arrived, batches, self._failed(number, completion.status, arrived)
        except VerbsError as error:
            return arrived, batches, Failure(None, str(error))
        return arrived, batches, None

    def _is_posted(self, number: int) -> bool:
        return bool(self._posted) and number - self._posted[0][0] & SEQUENCES < len(self._posted)

    def _retire(self, number: int, arrived: list[Slice], batches: list[Posted]) -> None:
        """The READ `number` is done, and so are all before it."""
        posted = self._posted
        while True:
            this, piece = posted.popleft()
            arrived.append(piece)
            if this == number:
                break
        while self.batches and number - self.batches[0].last & SEQUENCES <= SEQUENCES >> 1:
            batch = self.batches.popleft()
            self.in_flight_bytes -= batch.size
            batches.append(batch)

    def _failed(self, number: int, status: int, arrived: list[Slice]) -> Failure:
        """Of those before it none failed, or theirs would be the first failure. It stays with those after it."""
        while self._posted[0][0] != number:
            arrived.append(self._posted.popleft()[1])
        name = STATUSES[status] if 0 <= status < len(STATUSES) else f"status {status}"
        return Failure(None if status == FLUSHED else self._posted[0][1], name)

    def reset(self) -> list[Slice]:
        """Bring the queue pair to where it touches no memory; what was in it and had not arrived. Never raises.

        Where the device refuses even that, it is dead, and what is in it stays there until `close`.
        """
        self.is_up = False
        self.batches.clear()
        self.in_flight_bytes = 0
        if self.is_dead:
            return []
        left: list[Slice] = []
        try:
            self.pair.reset()
            left = self._empty()
            self.pair.arm()
            while late := self.pair.poll(POLLED):
                self.late_completions += len(late)
        except VerbsError:
            self.is_dead = True
        return left

    def close(self) -> list[Slice]:
        """For good; as `reset`. Idempotent."""
        left = self.reset()
        self.is_dead = True
        try:
            self.pair.close()
        except VerbsError:
            self._empty()  # nobody gets that memory back: nothing says that the NIC does not write any more
        return left + self._empty()

    def _empty(self) -> list[Slice]:
        left = self.slices
        self._posted.clear()
        return left
