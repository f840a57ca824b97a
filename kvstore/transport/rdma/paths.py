"""All ways to one peer: which READ goes by which, what is done when one fails, and what is not safe to touch yet.

Pure but for the queue pairs: whoever waits for a descriptor calls `progress`, whoever has a clock calls `expire`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from kvstore.bandwidth import Bandwidth
from kvstore.errors import PeerLost, StaleLease
from kvstore.health import Health
from kvstore.transport.rdma.read_queue import Failure, ReadQueue
from kvstore.transport.rdma.transfer import MOST_TRIES, Slice, Transfer
from kvstore.transport.rdma.verbs import VerbsError

TURN_SLICES = 64
REFUSED = {"REM_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_OP_ERR", "LOC_PROT_ERR", "LOC_ACCESS_ERR", "LOC_LEN_ERR"}
"""What says something of the memory that one READ was for, and nothing of the path."""
GUESS_BYTES_PER_S = 10e9  # of a path that nothing is known of
FAR_S = 2e-6  # for each step between a NIC and the memory, until it is known what the path can do


@dataclass(slots=True, eq=False)
class Path:
    """From NIC number `nic` here to port number `port` there. `distance` of the NIC to memory of a NUMA node."""

    nic: int
    port: int
    name: str
    queues: list[ReadQueue]
    distance: Callable[[int], int] = lambda numa_node: 0
    health: Health = field(default_factory=lambda: Health(tolerance=1))
    rate: Bandwidth = field(default_factory=Bandwidth)
    connects: int = 0

    @property
    def is_up(self) -> bool:
        return all(queue.is_up for queue in self.queues)

    @property
    def is_dead(self) -> bool:
        """Its device does not answer any more."""
        return any(queue.is_dead for queue in self.queues)


class Paths:
    """`broke` hears of each path that failed; whoever owns the connection connects it anew, and calls `connected`.

    A READ that takes longer than `hung_s` is not waited for: its queue pair is reset, whatever the NIC still hopes.
    `quarantine_bytes` bounds the memory of transfers that were called off while NICs may still write into it: over it,
    queue pairs are reset, which ends that at once.
    """

    def __init__(self, *, quarantine_bytes: int, hung_s: float, now: Callable[[], float],
                 broke: Callable[[Path], None] = lambda path: None) -> None:  # fmt: skip
        self.paths: list[Path] = []
        self.hung_s = hung_s
        self._by_fd: dict[int, tuple[Path, ReadQueue]] = {}
        self._quarantine_bytes = quarantine_bytes
        self._now = now
        self._broke = broke
        self._waiting: deque[Transfer] = deque()  # with slices to post; each has its turn
        self._called_off: set[Transfer] = set()
        self._is_pumping = False

    def add(self, path: Path) -> None:
        """It is up once its queue pairs are connected."""
        self.paths.append(path)
        self._by_fd |= {queue.pair.fd: (path, queue) for queue in path.queues}

    # What a transfer goes through.

    def start(self, transfer: Transfer) -> None:
        """PeerLost, by the transfer's `error`, when no path is up."""
        assert transfer.pending, "a transfer is started once"
        self._waiting.append(transfer)
        self._pump()

    def call_off(self, transfer: Transfer) -> None:
        """It ends at once. Its memory is in quarantine until it is settled."""
        transfer.call_off()
        if not transfer.is_settled:
            self._called_off.add(transfer)
            if self.quarantined_bytes > self._quarantine_bytes:
                self._end_quarantine()

    @property
    def quarantined_bytes(self) -> int:
        """Of memory that nobody waits for any more, and that a NIC may still write."""
        self._called_off = {transfer for transfer in self._called_off if not transfer.is_settled}
        return sum(transfer.in_flight_bytes for transfer in self._called_off)

    @property
    def late_completions(self) -> int:
        return sum(queue.late_completions for path in self.paths for queue in path.queues)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not any(queue.in_flight for path in self.paths for queue in path.queues)

    def fds(self) -> list[int]:
        """What to wait on: `progress` is for the one that is readable."""
        return [fd for fd, (_, queue) in self._by_fd.items() if not queue.is_dead]

    def progress(self, fd: int) -> None:
        """Take up what has completed. May be called at any time."""
        path, queue = self._by_fd[fd]
        if not queue.is_up:
            queue.reset()
            return
        now = self._now()
        arrived, batches, failure = queue.progress()
        for batch in batches:
            path.rate.end(batch.size, batch.started, now, is_good=True)
        if batches:
            path.health.succeeded()
        for piece in arrived:
            piece.transfer.arrived(piece)
        if failure is not None:
            self._failed(path, queue, failure)
        self._pump()

    def expire(self) -> None:
        """Reset what has been waiting for longer than a living peer needs."""
        before = self._now() - self.hung_s
        for path in self.paths:
            for queue in path.queues:
                if queue.oldest is not None and queue.oldest < before:
                    self._failed(path, queue, Failure(None, f"no answer in {self.hung_s} s"))
        self._pump()

    @property
    def next_expiry(self) -> float | None:
        """When to call `expire`; None while nothing is on its way."""
        ages = [queue.oldest for path in self.paths for queue in path.queues if queue.oldest is not None]
        return min(ages) + self.hung_s if ages else None

    # Paths that come and go.

    def broken(self) -> list[int]:
        """Numbers of the paths that are down and may be tried now."""
        now = self._now()
        down = ((at, path) for at, path in enumerate(self.paths) if not path.is_up and not path.is_dead)
        return [at for at, path in down if path.health.may_try(now)]

    def connected(self, path: Path) -> None:
        """It was connected anew: let what waits go on."""
        path.connects += 1
        self._pump()

    def not_connected(self, path: Path, reason: str) -> None:
        """It could not be connected anew: leave it alone for a while."""
        path.health.failed(reason, self._now())
        self.reset(path)

    def reset(self, path: Path) -> None:
        """All of it: what was on its way goes some other way, or ends. Its queue pairs can be connected anew then."""
        self._empty(path)
        self._pump()

    def close(self) -> None:
        """Every transfer ends, and settles: no NIC touches its memory any more. Idempotent."""
        for path in self.paths:
            self._empty(path)
        for path in self.paths:
            for queue in path.queues:
                self._take_back(queue.close())
        self._pump()

    # Inside.

    def _failed(self, path: Path, queue: ReadQueue, failure: Failure) -> None:
        """One queue pair is done for, and its path with it: the peer will see the same of the other end.

        What is in it is fetched again; but for the first of it, which may be why, not more than MOST_TRIES times.
        """
        first = failure.slice or next(iter(queue.slices), None)
        if failure.slice is not None and failure.status in REFUSED:
            reason = f"{path.name}: what was to be read is not lent any more ({failure.status})"
            failure.slice.transfer.fail(StaleLease(reason))
        else:
            path.health.failed(failure.status, self._now())
            if first is not None:
                first.tries += 1
                if first.tries >= MOST_TRIES:
                    first.transfer.fail(PeerLost(f"{path.name}: {MOST_TRIES} tries to read one slice failed"))
        self._empty(path)
        self._broke(path)

    def _empty(self, path: Path) -> None:
        now = self._now()
        for queue in path.queues:
            for batch in queue.batches:
                path.rate.end(batch.size, batch.started, now, is_good=False)
            self._take_back(queue.reset())
            for piece in queue.slices:  # it is dead: they do not settle before it is closed
                piece.transfer.fail(PeerLost(f"{path.name}: the device does not answer any more"))

    def _take_back(self, pieces: list[Slice]) -> None:
        """They are in no queue pair, and come first of what is fetched next, if anybody still waits for them."""
        for piece in reversed(pieces):
            piece.transfer.left(piece)
            self._again(piece)

    def _again(self, piece: Slice) -> None:
        transfer = piece.transfer
        if transfer.is_ended:
            return
        transfer.pending.appendleft(piece)
        if transfer not in self._waiting:
            self._waiting.appendleft(transfer)

    def _end_quarantine(self) -> None:
        """That is nobody's failure."""
        for path in self.paths:
            posted = (piece for queue in path.queues if queue.is_up for piece in queue.slices)
            if any(piece.transfer in self._called_off for piece in posted):
                self._empty(path)
                self._broke(path)
        self._pump()

    def _pump(self) -> None:
        """Post what may be posted, a turn for each transfer."""
        if self._is_pumping:  # a transfer that ends may begin the next
            return
        self._is_pumping = True
        try:
            while self._waiting:
                if self._waiting[0].is_ended:
                    self._waiting.popleft()
                elif not any(path.is_up for path in self.paths):
                    self._waiting.popleft().fail(PeerLost(self._reasons()))
                elif not self._post_a_turn():
                    break
        finally:
            self._is_pumping = False

    def _reasons(self) -> str:
        return "no path is up: " + "; ".join(f"{path.name}: {path.health.reason or 'reset'}" for path in self.paths)

    def _post_a_turn(self) -> bool:
        """Slices of the first transfer into the queue pairs with room; whether any was posted."""
        transfer = self._waiting.popleft()
        lanes = [Lane(path, queue, transfer.numa_node) for path in self.paths if path.is_up for queue in path.queues]
        with_room = [lane for lane in lanes if lane.slots > 0]
        taken = 0
        while transfer.pending and with_room and taken < TURN_SLICES:
            lane = min(with_room, key=SPENT_S)
            lane.take(transfer.pending.popleft())
            if lane.slots <= 0:
                with_room.remove(lane)
            taken += 1
        if not taken:
            self._waiting.appendleft(transfer)
            return False
        if transfer.pending:
            self._waiting.append(transfer)
        now = self._now()
        for lane in lanes:
            if lane.slices and not transfer.is_ended:  # it may, when another queue pair refuses its share
                self._post(lane, now)
        return True

    def _post(self, lane: "Lane", now: float) -> None:
        path, queue = lane.path, lane.queue
        if not queue.is_up:  # failed since, with another of its path
            for piece in reversed(lane.slices):
                self._again(piece)
            return
        try:
            for batch in queue.post(lane.slices, path.nic, path.port, now):
                path.rate.begin(batch.size, now)
        except VerbsError as error:
            self._failed(path, queue, Failure(None, str(error)))


class Lane:
    """A queue pair with what a turn gives it: `spent_s` is how long the peer's bytes on it will take to come."""

    __slots__ = ("_byte_s", "bytes_left", "path", "queue", "slices", "slots", "spent_s")

    def __init__(self, path: Path, queue: ReadQueue, numa_node: int) -> None:
        self.path = path
        self.queue = queue
        self.slots = queue.room()
        self.bytes_left = queue.window_left
        self.slices: list[Slice] = []
        self._byte_s = len(path.queues) / (path.rate.bytes_per_s or GUESS_BYTES_PER_S)
        self.spent_s = path.rate.request_s or FAR_S * path.distance(numa_node)
        self.spent_s += queue.in_flight_bytes * self._byte_s

    def take(self, piece: Slice) -> None:
        self.slices.append(piece)
        self.spent_s += piece.size * self._byte_s
        self.bytes_left -= piece.size
        self.slots = self.slots - 1 if self.bytes_left > 0 else 0


SPENT_S = attrgetter("spent_s")
