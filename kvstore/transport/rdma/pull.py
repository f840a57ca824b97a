"""Waiting for transfers: in an event loop, or in a thread that blocks."""

import asyncio
import select
import time
from collections.abc import Callable, Sequence

from kvstore.errors import DeadlineExceeded, PeerLost
from kvstore.transport.rdma.paths import Paths
from kvstore.transport.rdma.transfer import Fetch, Transfer


class Watch:
    """Lets an event loop tell `paths` of completions, and of the time. `refresh` when they have changed."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._loop = asyncio.get_running_loop()
        self._fds: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def refresh(self) -> None:
        if self._is_stopped:
            return
        fds = set(self._paths.fds())
        for fd in self._fds - fds:
            self._loop.remove_reader(fd)
        for fd in fds - self._fds:
            self._loop.add_reader(fd, self._progress, fd)
        self._fds = fds
        self._look()

    def _progress(self, fd: int) -> None:
        self._paths.progress(fd)
        if fd not in self._paths.fds():  # its device is gone, and it may stay readable
            self.refresh()

    def _look(self) -> None:
        """Something may have been posted: see that it does not take for ever."""
        if self._timer is None and not self._is_stopped and self._paths.next_expiry is not None:
            self._timer = self._loop.call_later(self._paths.hung_s / 2, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._paths.expire()
        self._look()

    def stop(self) -> None:
        """Before the queue pairs are closed. Idempotent."""
        self._is_stopped = True
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._fds.clear()
        if self._timer is not None:
            self._timer.cancel()


async def pull(watch: Watch, paths: Paths, fetches: Sequence[Fetch], *, slice_bytes: int, timeout_s: float,
               settled: Callable[[], None]) -> None:  # fmt: skip
    """READ all of them. `settled` is called once, when no NIC writes into their memory any more, whatever comes of it.

    Cancelled, late or with its device gone (DeadlineExceeded), it returns at once, and NICs may go on writing until
    `settled`. Else it has settled: after StaleLease (the peer does not lend that memory any more) and PeerLost (no
    path is up) the same places can be read into once more.
    """
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended() -> None:
        if any(path.is_dead for path in paths.paths) and not over.done():
            over.set_result(None)

    def quiet() -> None:
        settled()
        if not over.done():
            over.set_result(None)

    transfer = Transfer(fetches, slice_bytes, ended=ended, settled=quiet)
    paths.start(transfer)
    watch.refresh()
    try:
        async with asyncio.timeout(timeout_s):
            await over
    except TimeoutError as error:
        raise DeadlineExceeded(f"blocks did not come by RDMA in {timeout_s} s") from error
    finally:
        paths.call_off(transfer)
    _check(transfer)


def pull_blocking(paths: Paths, fetches: Sequence[Fetch], *, slice_bytes: int, deadline: float, lifeline: int,
                  settled: Callable[[], None]) -> None:  # fmt: skip
    """As `pull`, asleep until `deadline` of time.monotonic. PeerLost too when the TCP connection `lifeline` ends.

    It has settled then, unless a device is gone: nobody would hear of completions, so its paths are reset.
    """
    transfer = Transfer(fetches, slice_bytes, settled=settled)
    poll = select.poll()
    for fd in paths.fds():
        poll.register(fd, select.POLLIN)
    poll.register(lifeline, select.POLLRDHUP)
    paths.start(transfer)
    try:
        while not transfer.is_ended:
            now = time.monotonic()
            if now >= deadline:
                raise DeadlineExceeded("blocks did not come by RDMA in time")
            if paths.next_expiry is not None and now >= paths.next_expiry:
                paths.expire()
            wake_at = min(deadline, paths.next_expiry or deadline)
            events = poll.poll(max((wake_at - now) * 1000, 1))
            if any(fd == lifeline for fd, _ in events):
                raise PeerLost("the peer hung up")
            for fd, _ in events:
                paths.progress(fd)
                if fd not in paths.fds():  # its device is gone, and it would be readable for ever
                    poll.unregister(fd)
    finally:
        paths.call_off(transfer)
        for path in paths.paths:
            if any(piece.transfer is transfer for queue in path.queues for piece in queue.slices):
                paths.reset(path)
    _check(transfer)


def _check(transfer: Transfer) -> None:
    if transfer.error is not None and not transfer.is_settled:
        raise DeadlineExceeded(f"{transfer.error}, and it may still write")
    if transfer.error is not None:
        raise transfer.error
