"""The nouns of client operations: what an operation asks its driver for, and what it works on."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore import wire
from kvstore.errors import StaleLease
from kvstore.prefix import Namespace, chain, part_key
from kvstore.published import IDENT_PREFIX
from kvstore.transport.local import SharedMemory
from kvstore.transport.rdma.transfer import Fetch
from kvstore.types import KEY_BYTES, BlockKey, Placement

if TYPE_CHECKING:
    from engine_client.remote import Remote

NOT_OPEN = BlockKey(b"")


def milliseconds(seconds: float) -> int:
    """As a request has them: from none to thirty years, which stands for all that is longer."""
    return int(min(max(seconds, 0.0), 1e9) * 1000)


@dataclass(slots=True)
class Call:
    """Send a request (made with the id that the driver gives) and wait for its reply.

    `payload` is sent after it. `targets` says where the reply's payload goes, once the reply is known.
    `wait_s` is how long the node itself may take on purpose, on top of the client's time limit.
    """

    request: Callable[[int], wire.Message]
    payload: Sequence[memoryview] = ()
    targets: Callable[[Any], Sequence[memoryview]] | None = None
    wait_s: float = 0.0


@dataclass(slots=True)
class Post:
    """Send a request whose reply nobody waits for."""

    request: Callable[[int], wire.Message]


@dataclass(slots=True)
class Begin:
    """Send a request without a payload in its reply, and go on: the outcome is a ticket for `Finish`."""

    call: Call


@dataclass(slots=True)
class Finish:
    """Wait for the reply to a request that was begun. An operation finishes what it begins, or fails."""

    ticket: Any


@dataclass(slots=True)
class Pull:
    """READ blocks from the node's memory. `settled` is called once no NIC writes into their targets any more."""

    fetches: Sequence[Fetch]
    settled: Callable[[], None]


@dataclass(slots=True)
class Rejoin:
    """Connect anew what of the RDMA paths failed; at most one at a time does so."""


@dataclass(slots=True)
class Work:
    """Something that moves or reads about `size` bytes, or may block for a moment (`size` -1)."""

    run: Callable[[], Any]
    size: int


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a reader waits, in seconds: for blocks that somebody is writing, and for those of lower tiers.

    A load that takes longer than computing the blocks at `tokens_per_s` (0: not known) is not begun.
    """

    wait_s: float
    load_s: float
    tokens_per_s: float = 0.0

    @property
    def longest_s(self) -> float:
        return max(self.wait_s, self.load_s)


Result = TypeVar("Result")
Step = Call | Post | Begin | Finish | Work | Pull | Rejoin
Operation = Generator[Step, Any, Result]


@dataclass(slots=True, eq=False)
class OpenSpace:
    """A namespace as this client uses it. `number` and `root` follow the node through its restarts."""

    name: str
    namespace: Namespace
    root: BlockKey = NOT_OPEN
    number: int = -1
    part: int = 0
    epoch: int = -1  # of the node that gave the number

    def keys(self, tokens: Any) -> list[BlockKey]:
        """The key of each full block of a prompt; with several parts, of this client's part."""
        keys = chain(tokens, self.namespace.block_tokens, self.root, self.namespace.hash)
        if self.namespace.parts == 1:
            return keys
        return [part_key(key, self.part) for key in keys]

    @property
    def key_bytes(self) -> int:
        return KEY_BYTES if self.namespace.parts == 1 else KEY_BYTES + 2

    @property
    def prefix(self) -> bytes:
        return IDENT_PREFIX.pack(self.number, self.part)


@dataclass(slots=True, eq=False)
class Link:
    """What an operation needs to know of the connection it runs on.

    `lent` counts the grants and leases that were got on it and not given back: as long as there are any, somebody
    here may be in the node's memory.
    """

    welcome: wire.Welcome
    shared: SharedMemory | None
    verify: bool
    lent: int = 0
    is_open: Callable[[], bool] = lambda: True  # as far as is known here
    remote: "Remote | None" = None  # where the node's memory can be read by RDMA
    lifeline: Callable[[], int] = lambda: -1  # descriptor of the TCP connection beside that


@dataclass(slots=True, eq=False)
class Loan:
    """A grant or a lease, good on the connection it was got on and on no other."""

    link: Link
    is_returned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.link.lent += 1

    def give_back(self) -> None:
        """Whoever had it is out of the node's memory. Idempotent."""
        self.link.lent -= not self.is_returned
        self.is_returned = True

    def check(self, link: Link) -> None:
        """Raises StaleLease when it is of another connection than `link`."""
        if self.link is not link:
            self.give_back()
            raise StaleLease("the connection that it was got on is lost, and it with it")


@dataclass(frozen=True, slots=True)
class PutReport:
    """What became of the blocks of a put, by count."""

    stored: int = 0
    present: int = 0  # here before
    busy: int = 0  # being written by somebody else
    refused: int = 0  # no room, or over quota
    stored_bytes: int = 0
    over_quota: int = 0  # of the refused: the tenant's quota, not the node's memory

    @classmethod
    def of(cls, placements: Sequence[Placement], stored: Sequence[memoryview]) -> "PutReport":
        count = placements.count
        return cls(
            stored=len(stored),
            present=count(Placement.PRESENT),
            busy=count(Placement.BUSY),
            refused=count(Placement.FULL) + count(Placement.OVER_QUOTA),
            stored_bytes=sum(map(len, stored)),
            over_quota=count(Placement.OVER_QUOTA),
        )

    def after(self, first: "PutReport") -> "PutReport":
        """Of two puts of the same blocks, the second offering all again: what the first stored is not `present`."""
        return replace(
            self,
            stored=self.stored + first.stored,
            present=max(self.present - first.stored, 0),
            stored_bytes=self.stored_bytes + first.stored_bytes,
        )

    @classmethod
    def sum(cls, reports: Sequence["PutReport"]) -> "PutReport":
        return cls(*map(sum, zip(*map(astuple, reports), strict=True)))


@dataclass(slots=True, eq=False)
class Grant(Loan):
    """Slots to fill: `granted[i]` is the position in the put's keys that `slots[i]` is for.

    Over shared memory the slots are the node's own; elsewhere they are buffers here, sent at commit.
    """

    grant_id: int
    placements: tuple[Placement, ...]
    granted: list[int]
    slots: list[memoryview]
    remote: bool


@dataclass(slots=True, eq=False)
class Held(Loan):
    """Blocks that keep their slots while the lease lasts. `blocks` in place over shared memory."""

    lease_id: int
    lease_s: float  # that the node gave it, counted from when it was asked
    blocks: list[memoryview]
    checksums: tuple[int, ...]
    layers: tuple[int, ...]  # in place, from the first; fewer than all in a block that is being written
    last_use: bytes = b""  # handle of an event after it, for the node to wait for; of blocks on a GPU


@dataclass(slots=True, eq=False)
class HeldOnDevice(Held):
    """Blocks in HBM. `places` are (slab id, offset, bytes); `ready` is an event to wait for before they are read."""

    places: tuple[tuple[int, int, int], ...] = ()
    ready: bytes = b""
