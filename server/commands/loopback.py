"""Bare READs between two queue pairs of one port in this process: what verbs do by themselves, without a store."""

import mmap
import secrets
import select
import time
from contextlib import ExitStack

from kvstore.copier import address_of
from kvstore.transport.rdma.memory import Memory
from kvstore.transport.rdma.nic import Nic
from kvstore.transport.rdma.verbs import (
    STATUSES,
    SUCCESS,
    Access,
    Own,
    QueueLimits,
    QueuePair,
    Read,
    Remote,
    VerbsError,
)

PSN_BITS = 24


class Loopback:
    """READs of `source` into `target`, `size` bytes each, at most `depth` on their way. VerbsError for what is refused.

    After an error it is of no more use.
    """

    def __init__(self, nic: Nic, size: int, depth: int) -> None:
        self._depth = depth
        with ExitStack() as stack:
            self._maps = mmap.mmap(-1, size), mmap.mmap(-1, size)
            self.source, self.target = memoryview(self._maps[0]), memoryview(self._maps[1])
            domain = nic.context.domain()
            stack.callback(domain.close)
            self._theirs = Memory([domain], address_of(self.source), size, Access.LOCAL_WRITE | Access.REMOTE_READ)
            stack.callback(self._theirs.close)
            self._mine = Memory([domain], address_of(self.target), size, Access.LOCAL_WRITE)
            stack.callback(self._mine.close)
            limits = QueueLimits(sends=depth, receives=1)
            self._pair = domain.queue_pair(limits)
            stack.callback(self._pair.close)
            other = domain.queue_pair(limits)
            stack.callback(other.close)
            mine, theirs = secrets.randbits(PSN_BITS), secrets.randbits(PSN_BITS)
            _connect(nic, other, theirs, self._pair, mine)
            _connect(nic, self._pair, mine, other, theirs)
            self._stack = stack.pop_all()

    def read(self, size: int, count: int, deadline: float) -> None:
        """`count` READs of `size` bytes, side by side from the start, asleep until they are in place.

        VerbsError when one fails, TimeoutError at `deadline` of time.monotonic.
        """
        posted = done = 0
        while done < count:
            batch = min(count - posted, self._depth - (posted - done), max(self._depth // 2, 1))
            if batch:
                self._pair.post_reads([self._request(posted + at, size, batch - 1 - at) for at in range(batch)])
                posted += batch
            else:
                done = self._completed(deadline)

    def _request(self, at: int, size: int, left: int) -> Read:
        """[at * size, (at + 1) * size), the last of a batch signaled. Its id is how many are done with it."""
        start = at * size
        mine, theirs = self._mine, self._theirs
        return Read(
            at + 1, mine.address + start, mine.lkeys[0], size, theirs.address + start, theirs.rkeys[0], left == 0
        )

    def _completed(self, deadline: float) -> int:
        while True:
            self._pair.arm()
            found = self._pair.poll(self._depth)
            for completion in found:
                if completion.status != SUCCESS:
                    raise VerbsError(0, f"a READ ended with {_status(completion.status)}")
            if found:
                return found[-1].wr_id
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._pair.fd], [], [], left_s)[0]:
                raise TimeoutError("READs did not complete in time")

    def close(self) -> None:
        """VerbsError when the device refuses even that; all else is closed then. Idempotent."""
        self._stack.close()


def _connect(nic: Nic, pair: QueuePair, psn: int, other: QueuePair, their_psn: int) -> None:
    own = Own(psn, nic.port.number, nic.gid.number, nic.port.mtu_bytes)
    pair.connect(own, Remote(other.number, their_psn, nic.gid.raw, nic.port.lid))


def _status(status: int) -> str:
    return STATUSES[status] if 0 <= status < len(STATUSES) else f"status {status}"
