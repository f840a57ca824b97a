"""A client's connection once it goes by RDMA: READs in an event loop or in a thread, and paths connected anew."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from engine_client.remote import Remote
from engine_client.replies import Replies
from engine_client.steps import Link, Pull
from kvstore.errors import PeerLost
from kvstore.transport.rdma.channel_stream import ChannelTransport
from kvstore.transport.rdma.pull import Watch, pull, pull_blocking


class Pulls:
    """`take_over` brings the frames from TCP to the channel of `remote`. `rejoin` connects what failed anew."""

    def __init__(self, remote: Remote, rejoin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._remote = remote
        self._rejoin = rejoin
        self._rejoining: asyncio.Task[None] | None = None
        self._watch = Watch(remote.peer.paths)

    def take_over(self, replies: Replies) -> None:
        """PeerLost when the connection has ended. To be closed even so."""
        channel = self._remote.peer.channel
        assert channel is not None, "it was joined"
        replies.move_to(lambda lifeline: ChannelTransport(channel, replies, lifeline, self.close))
        self._watch.refresh()

    async def pull(self, step: Pull, timeout_s: float) -> None:
        slice_bytes = self._remote.rdma.options.slice_bytes
        paths = self._remote.peer.paths
        await pull(self._watch, paths, step.fetches, slice_bytes=slice_bytes, timeout_s=timeout_s, settled=step.settled)

    async def rejoin(self) -> None:
        """Once for all that ask meanwhile."""
        if self._rejoining is None or self._rejoining.done():
            self._rejoining = asyncio.get_running_loop().create_task(self._rejoin())
        await asyncio.shield(self._rejoining)
        self._watch.refresh()

    def close(self) -> None:
        """The connection is over: every READ ends, and no NIC touches memory for it. Idempotent."""
        if self._rejoining is not None:
            self._rejoining.cancel()
        self._watch.stop()
        self._remote.peer.close()


def pull_in_thread(step: Pull, link: Link | None, deadline: float) -> None:
    """Asleep until all is in place, or `deadline` of time.monotonic. Raises as `pull_blocking`."""
    if link is None or link.remote is None or not link.is_open():
        step.settled()
        raise PeerLost("the connection broke, and what it held is gone")
    remote = link.remote
    pull_blocking(
        remote.peer.paths,
        step.fetches,
        slice_bytes=remote.rdma.options.slice_bytes,
        deadline=deadline,
        lifeline=link.lifeline(),
        settled=step.settled,
    )
