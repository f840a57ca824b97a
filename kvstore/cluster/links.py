"""Ways to other members: what the cluster asks of whatever carries its messages and blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.catalogue import OpenNamespace
from kvstore.cluster.members import Member
from kvstore.message import Message
from kvstore.types import BlockKey


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """The first of the blocks that were asked for, which a peer keeps where they are until it is released.

    `handle` is for who made it.
    """

    member: Member
    space: OpenNamespace
    keys: Sequence[BlockKey]
    sizes: Sequence[int]
    checksums: Sequence[int]
    handle: Any


class Links(Protocol):
    """Every method raises TransportError when the peer cannot be reached or is lost, and what the peer refused with.

    ConnectFailed `from` ConnectionRefusedError says that the peer's process is not there. Cancelled, a method leaves
    nothing behind: no lease, and nobody who writes into a view.
    """

    async def ask(self, member: Member, request: Callable[[int], Message], within_s: float) -> Any:
        """The reply to a request about the cluster."""
        ...

    async def lease(
        self, member: Member, space: OpenNamespace, keys: Sequence[BlockKey], *, lease_s: float, load_s: float
    ) -> Lease | None:
        """Have a peer keep the longest prefix of `keys` that it has, or can load from its own tiers within `load_s`;
        None when it has nothing of it, or does not know the namespace."""
        ...

    async def read(self, lease: Lease, start: int, views: Sequence[memoryview], within_s: float) -> list[int]:
        """Blocks of a lease from number `start` on, into views of exactly their sizes; the checksum of each as it
        arrived, of the first only when the peer had fewer. Nobody writes into the views any more when it returns."""
        ...

    def report(self, lease: Lease, key: BlockKey) -> None:
        """This block did not have its checksum here: the peer shall look at its own. Waits for nothing."""
        ...

    def release(self, lease: Lease) -> None:
        """Let go. Waits for nothing, and does nothing where the peer is lost."""
        ...

    def close(self, name: str) -> None:
        """Hang up on a member that is gone, or was started again. What is under way fails with PeerLost."""
        ...

    async def aclose(self) -> None:
        """Hang up on all."""
        ...
