"""Blocks in place, through a blocking client: views, leases that go on, and slots that are filled step by step."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from engine_client import leases, operations, writes
from engine_client.steps import Grant, Held, Link, OpenSpace, Operation, PutReport
from kvstore.transport.local import View
from kvstore.types import BlockKey

Result = TypeVar("Result")


class Slots(Protocol):
    """A part of the blocking client, which drives the operations."""

    def _drive(
        self, begin: Callable[[Link], Operation[Result]], within_s: float | None = None, wait_s: float = 0.0
    ) -> Result: ...

    def views(self, space: OpenSpace, keys: Sequence[BlockKey]) -> list[View]:
        """Blocks in place without a lease: use them, then ask each whether it `is_valid()`."""
        return self._drive(lambda link: operations.views(link, space, keys))

    def renew(self, held: Held, lease_s: float) -> None:
        """Keep it for longer. StaleLease when it lapsed."""
        self._drive(lambda link: leases.renew(link, held, lease_s))

    def place(
        self, space: OpenSpace, keys: Sequence[BlockKey], sizes: Sequence[int], parent: BlockKey | None = None
    ) -> Grant:
        """Ask for slots for a run of a chain; fill them, then `commit` or `abort`."""
        return self._drive(lambda link: writes.place(link, space, keys, sizes, parent))

    def progress(self, grant: Grant, layers: int) -> None:
        """The first `layers` layers of all slots are in place: readers that asked for that may begin."""
        self._drive(lambda link: writes.progress(link, grant, layers))

    def commit(self, grant: Grant, checksums: Sequence[int] | None = None) -> PutReport:
        """All slots are filled. StaleLease when it took too long, Corrupt when the bytes did not arrive well."""
        return self._drive(lambda link: writes.commit(link, grant, checksums))
