"""What knows who is alive; etcd in production, a room in this process for tests."""

from collections.abc import Callable
from typing import Any, Protocol

from kvstore.cluster.members import Member, View


class Coordinator(Protocol):
    """Knows who is alive. A member that says nothing for `DEAD_S` is gone; who is alive and was lost joins again by
    itself. Out of touch, the last view stays, and `trouble` says so."""

    @property
    def trouble(self) -> str:
        """What is wrong, as a sentence; empty while in touch."""
        ...

    async def join(self, member: Member, changed: Callable[[View], Any]) -> None:
        """Become a member and stay one. `changed` hears of each new view on the caller's loop, and of the first before
        this returns. Raises ConnectFailed when nothing answers, ConfigError when a living member has that name."""
        ...

    async def update(self, member: Member) -> None:
        """Say something else of oneself. Out of touch, it is said on return."""
        ...

    async def report_dead(self, name: str, epoch: int) -> None:
        """This start of a node refuses connections: its process is gone. It is no member from here on, unless it
        objects, which it does by joining again."""
        ...

    async def aclose(self) -> None:
        """Leave at once. Idempotent."""
        ...
