"""Messages and frames of the control protocol; no sockets. Drawn byte by byte in docs/protocol.md.

    frame   | body_bytes u32 | magic u32 | payload_bytes u64 | body: MessagePack | payload |

A body is an array: verb tag, request id, fields. Keys, sizes, offsets and checksums travel as packed bytes.
A payload follows a Commit to a node that the client does not share memory with, a Put with checksums, and an
Acquired that was asked to deliver: the blocks one after the other, in the order of the message.
"""

import struct
from typing import Any, NamedTuple

import msgspec

from kvstore.errors import ERRORS, ProtocolError, Rejected, StoreError
from kvstore.message import Message as Message
from kvstore.prefix import Namespace
from kvstore.wire_cluster import ClusterReply, ClusterRequest
from kvstore.wire_events import EventReply, EventRequest
from kvstore.wire_events import Snapshot as Snapshot
from kvstore.wire_events import Subscribe as Subscribe
from kvstore.wire_operators import Check as Check
from kvstore.wire_operators import Checked as Checked
from kvstore.wire_operators import Demote as Demote
from kvstore.wire_operators import Demoted as Demoted
from kvstore.wire_operators import Drain as Drain
from kvstore.wire_operators import Drained as Drained
from kvstore.wire_operators import Evict as Evict
from kvstore.wire_operators import Evicted as Evicted
from kvstore.wire_operators import Explain as Explain
from kvstore.wire_operators import Explained as Explained
from kvstore.wire_operators import List as List
from kvstore.wire_operators import Listed as Listed
from kvstore.wire_operators import Pin as Pin
from kvstore.wire_operators import Pinned as Pinned
from kvstore.wire_operators import Promote as Promote
from kvstore.wire_operators import Promoted as Promoted
from kvstore.wire_operators import SetTier as SetTier
from kvstore.wire_operators import Stat as Stat
from kvstore.wire_operators import Stats as Stats
from kvstore.wire_operators import Unpin as Unpin
from kvstore.wire_rdma import Fetched as Fetched
from kvstore.wire_rdma import Join as Join
from kvstore.wire_rdma import Joined as Joined
from kvstore.wire_rdma import Lend as Lend
from kvstore.wire_rdma import Lent as Lent
from kvstore.wire_rdma import Offer as Offer
from kvstore.wire_rdma import RdmaPort as RdmaPort

PROTOCOL = 1
MAGIC = 0x314B5643  # "CVK1"
HEADER = struct.Struct("<IIQ")


class Hello(Message, frozen=True, tag="hello"):
    """First of a connection. An empty token is for the Unix socket's own tenant.

    With the cluster's token comes another node: for the blocks of `tenant`, or, if that is empty, about the cluster.
    """

    protocol: int
    token: str
    client: str  # who is asking: for logs and `stat`
    tenant: str = ""


class Welcome(Message, frozen=True, tag="welcome"):
    """`ticket` lets another Unix connection fetch descriptors for this session; empty over TCP. `ports` only there."""

    protocol: int
    node: str
    epoch: int
    tenant: str
    ticket: bytes
    may_write: bool
    admin: bool
    slab_bytes: int
    batch_blocks: int
    frame_bytes: int
    ports: tuple[RdmaPort, ...] = ()  # by which it can be reached by RDMA


class Attach(Message, frozen=True, tag="attach"):
    """Descriptors for the session of `ticket`: of its index and ring if `slab_ids` is empty, else of those slabs.

    They come with the answer as SCM_RIGHTS, slabs read-only unless the session may write. `tier` is "hbm" or DRAM.
    """

    ticket: bytes
    slab_ids: tuple[int, ...]
    tier: str = ""


class Attached(Message, frozen=True, tag="attached"):
    sizes: tuple[int, ...]  # bytes of each, in the order of the descriptors
    handles: tuple[bytes, ...] = ()  # of slabs on a GPU, which have no descriptors: docs/hbm.md


class Open(Message, frozen=True, tag="open"):
    """Name a namespace. The first to use a name says what it stands for.

    An empty name is for other nodes: the namespace of these fields, if it is known here under whatever name.
    """

    name: str
    namespace: Namespace | None  # None: whatever the name stands for already
    replicas: int = -1  # copies to keep in a cluster: 0 as many as heat asks for, -1 whatever was said last
    through: bool = False  # commits wait for them


class Opened(Message, frozen=True, tag="opened"):
    number: int
    root: bytes
    namespace: Namespace


class Match(Message, frozen=True, tag="match"):
    """How many of a chain's blocks are here, from the first. Holds nothing.

    In a cluster, those that other nodes have count too. `parent` is the key before the first, empty at the chain's
    start: without it other nodes' blocks are found from the start of a chain only.
    """

    namespace: int
    keys: bytes
    parent: bytes = b""


class Matched(Message, frozen=True, tag="matched"):
    blocks: int


class Acquire(Message, frozen=True, tag="acquire"):
    """Hold the longest prefix of `keys` that is here, or is being written and comes within `wait_ms`.

    With `layers` > 0 a block that is being written counts as soon as that many layers are in place.
    With `deliver` nothing is held beyond the answer: the blocks follow it as payload.
    Blocks of lower tiers are loaded if they come within `load_ms`, and sooner than they could be computed at
    `tokens_per_s` (0: not known); so are, in a cluster, those of other nodes (`parent` as for Match).
    With `enough` the answer comes as soon as so many are here (0: all), while the rest is still loaded.
    With `tier` "hbm" they are brought there, and held there and nowhere else.
    """

    namespace: int
    keys: bytes
    lease_ms: int
    wait_ms: int = 0
    layers: int = 0
    deliver: bool = False
    load_ms: int = 0
    tokens_per_s: float = 0.0
    tier: str = ""
    parent: bytes = b""
    enough: int = 0


class Acquired(Message, frozen=True, tag="acquired"):
    """`lease_id` is 0 where nothing is held: an empty prefix, or delivered blocks."""

    lease_id: int
    lease_ms: int  # as long as it was asked for, or as limits.lease_max lets it
    slab_ids: bytes  # u64 each, as are all that follow
    offsets: bytes
    sizes: bytes
    checksums: bytes
    layers: bytes
    event: bytes = b""  # on a GPU: the reader's stream waits for it first


class Renew(Message, frozen=True, tag="renew"):
    lease_id: int
    lease_ms: int


class Release(Message, frozen=True, tag="release"):
    """Idempotent."""

    lease_id: int
    event: bytes = b""  # on a GPU: after the reader's last use


class Put(Message, frozen=True, tag="put"):
    """Ask for slots for a run of a chain. `parent` is the key before the first, empty at the chain's start.

    With `checksums` (xxh3_64 of each, u64) all the blocks follow as payload, and those that are wanted are
    stored at once: one round trip, for small blocks.
    """

    namespace: int
    keys: bytes
    parent: bytes
    sizes: bytes
    checksums: bytes = b""


class Placed(Message, frozen=True, tag="placed"):
    """`placements` has one byte per key (kvstore.types.Placement); slabs and offsets are of the granted ones."""

    grant_id: int  # 0 where nothing was granted, or what was is stored already
    placements: bytes
    slab_ids: bytes
    offsets: bytes


class Progress(Message, frozen=True, tag="progress"):
    """The first `layers` layers of every block of the grant are in place."""

    grant_id: int
    layers: int


class Commit(Message, frozen=True, tag="commit"):
    """Every block of the grant is in place, or follows as payload."""

    grant_id: int
    checksums: bytes  # xxh3_64 of each, u64


class Abort(Message, frozen=True, tag="abort"):
    """The writer will not write any more. Idempotent."""

    grant_id: int


class Report(Message, frozen=True, tag="report"):
    """A reader found bytes that do not have their checksum: the node looks for itself, and drops them if so."""

    namespace: int
    keys: bytes


class Reported(Message, frozen=True, tag="reported"):
    corrupt: int


class Done(Message, frozen=True, tag="done"):
    """It is done, and there is nothing more to say."""


class Failed(Message, frozen=True, tag="failed"):
    code: str
    message: str
    retry_after_s: float = 0.0


Request = (
    Hello | Attach | Open | Match | Acquire | Renew | Release | Put | Progress | Commit | Abort | Report
    | Promote | Demote | Drain | Evict | Pin | Unpin | Explain | List | Stat | SetTier | Check | Join | Lend | Offer
    | ClusterRequest | EventRequest
)  # fmt: skip
Reply = (
    Welcome | Attached | Opened | Matched | Acquired | Placed | Reported | Promoted | Demoted | Drained
    | Evicted | Pinned | Explained | Listed | Stats | Checked | Done | Failed | Joined | Lent | Fetched
    | ClusterReply | EventReply
)  # fmt: skip

REQUESTS: dict[str, type[Message]] = {str(cls.__struct_config__.tag): cls for cls in Request.__args__}
REPLIES: dict[str, type[Message]] = {str(cls.__struct_config__.tag): cls for cls in Reply.__args__}

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request)
_decode_reply = msgspec.msgpack.Decoder(Reply)
UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)  # the last: arrays in arrays in arrays


class Frame(NamedTuple):
    """What a header announces, in bytes."""

    body_bytes: int
    payload_bytes: int


def encode(message: Message, payload_bytes: int = 0) -> bytes:
    """Header and body of a frame; the payload is sent after it."""
    body = _encode(message)
    return HEADER.pack(len(body), MAGIC, payload_bytes) + body


def parse_header(header: bytes | bytearray | memoryview, limit_bytes: int) -> Frame:
    """Raises ProtocolError for what is no frame, or one over the limit."""
    if len(header) != HEADER.size:
        raise ProtocolError(f"a header has {HEADER.size} bytes, not {len(header)}")
    body_bytes, magic, payload_bytes = HEADER.unpack(header)
    if magic != MAGIC:
        raise ProtocolError(f"not a frame of this protocol: magic {magic:#010x}")
    if body_bytes > limit_bytes:
        raise ProtocolError(f"a frame of {body_bytes} bytes is over the limit of {limit_bytes}")
    return Frame(body_bytes, payload_bytes)


def decode_request(body: bytes | bytearray | memoryview) -> Any:
    """One of `Request`. Raises ProtocolError."""
    try:
        return _decode_request.decode(body)
    except UNDECODABLE as error:
        raise ProtocolError(f"not a request: {error}") from error


def decode_reply(body: bytes | bytearray | memoryview) -> Any:
    """One of `Reply`. Raises ProtocolError."""
    try:
        return _decode_reply.decode(body)
    except UNDECODABLE as error:
        raise ProtocolError(f"not a reply: {error}") from error


def failed(request_id: int, error: StoreError) -> Failed:
    retry_after_s = error.retry_after_s if isinstance(error, Rejected) else 0.0
    return Failed(request_id, error.code, str(error), retry_after_s)


def to_error(reply: Failed) -> StoreError:
    """The exception that the node translated into `reply`; an unknown code is a ProtocolError."""
    cls = ERRORS.get(reply.code)
    if cls is None:
        return ProtocolError(f"unknown error {reply.code!r}: {reply.message}")
    if issubclass(cls, Rejected):
        return cls(reply.message, reply.retry_after_s)
    return cls(reply.message)
