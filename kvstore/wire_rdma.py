"""Messages by which two ends connect queue pairs, and say where blocks lie in registered memory."""

import msgspec

from kvstore.message import Message


class RdmaPort(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A port of the sender, by which it can be reached. Ports are numbered from 0, as they are listed."""

    name: str  # device:port
    gid: bytes
    lid: int
    mtu_bytes: int
    link_layer: str  # "ethernet" or "infiniband"


class QueueEnd(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The sender's end of a queue pair, and the PSN of its first packet."""

    number: int
    psn: int


class PathEnds(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Queue pairs between two ports. Paths are numbered from 0."""

    number: int
    client_port: int
    node_port: int
    queues: tuple[QueueEnd, ...]


class Join(Message, frozen=True, tag="join"):
    """Connect queue pairs. The first of a session comes before anything but Hello and has a `channel`: after its
    answer all frames go by that. Later ones connect paths anew that failed: their queue pairs are reset first.
    """

    ports: tuple[RdmaPort, ...]  # of the client; in the first only
    paths: tuple[PathEnds, ...]
    channel: PathEnds | None = None


class Joined(Message, frozen=True, tag="joined"):
    """The node's ends of those that are connected."""

    paths: tuple[PathEnds, ...]
    channel: PathEnds | None = None


class Lend(Message, frozen=True, tag="lend"):
    """Where these slabs lie in the node's memory, for READs of blocks that are held."""

    slab_ids: bytes  # u64 each


class Lent(Message, frozen=True, tag="lent"):
    """Good until the connection ends. A slab that is gone has no bytes."""

    addresses: bytes  # u64 each, as are all that follow
    sizes: bytes
    rkeys: bytes  # for each slab, one for each port of the node


class Offer(Message, frozen=True, tag="offer"):
    """The blocks of a grant lie at these addresses of the client: the node READs, verifies and commits them.

    The memory stays as it is until the answer, or the end of the connection.
    """

    grant_id: int
    checksums: bytes  # u64 each, as are all that follow
    addresses: bytes
    rkeys: bytes  # for each block, one for each port of the client


class Fetched(Message, frozen=True, tag="fetched"):
    """They are stored. `broken` are paths that failed at the node's end meanwhile: to be connected anew."""

    broken: tuple[int, ...] = ()
