"""Messages of a cluster: between its nodes, and of operators who ask one node about all.

Blocks are named by 60 bits of their key (`kvstore.cluster.naming`), as u64; partitions are u16, tiers a u8 with a bit
for each (`TIER_BITS`), all packed little-endian. Drawn in docs/protocol.md.
"""

import struct
from typing import Any

from kvstore.message import Message
from kvstore.prefix import Namespace
from kvstore.types import DRAM, HBM, NVME

TIER_BITS = {HBM: 1, DRAM: 2, NVME: 4}
DIGEST = struct.Struct("<HIQ")  # partition, count, xor
HOLDING = struct.Struct("<HB")  # which of the reply's nodes, tiers
STRIPE = struct.Struct("<HH")  # partition, how many of the names are in it
MOST_COPIES = 1024  # of a block, that anybody may ask for


class Announce(Message, frozen=True, tag="announce"):
    """What changed at a holder, to one of its homes: each block with all the tiers that have it now, 0 for none.

    Batches are numbered, and each is answered before the next is sent. `is_first` begins a stream, whose numbers go on
    from the last one's: the home forgets whatever it knew of this node. First `resets` (partitions that are told anew)
    are forgotten, then the records are applied, then `digests` compared.
    """

    node: str
    epoch: int
    sequence: int
    is_first: bool
    resets: bytes  # u16 each
    partitions: bytes  # u16 each, of the records
    names: bytes  # u64 each
    tiers: bytes  # u8 each
    digests: bytes = b""  # DIGEST each, of partitions of which everything has been told


class Announced(Message, frozen=True, tag="announced"):
    """`is_gap`: batches are missing, or the home was started since: begin a new stream."""

    sequence: int  # the last that was applied
    is_gap: bool = False
    sole: bytes = b""  # names, u64: of those the node is the only holder by now
    shared: bytes = b""  # names, u64: of the batch's, those that others hold too
    differing: bytes = b""  # partitions, u16, whose digest is another here
    room: tuple[int, int] = (0, 0)  # bytes at the home: for blocks that are to stay, for copies that go first
    load: float = 0.0  # of the home: a share of what it may have on its way
    used_bytes: int = 0  # of the home's DRAM
    blocks: int = 0  # there


class Locate(Message, frozen=True, tag="locate"):
    """Who holds these blocks, as far as this home knows?"""

    stripes: bytes  # STRIPE each, in the order of the names
    names: bytes  # u64 each


class Located(Message, frozen=True, tag="located"):
    """`which` has a u16 per name: 0 for nobody, else one more than an index of `holdings`."""

    nodes: tuple[str, ...]
    holdings: tuple[bytes, ...]  # HOLDING each
    which: bytes


class Fill(Message, frozen=True, tag="fill"):
    """Pull this run of a chain from `holder`. A node of the cluster says so to another.

    With `keep` the blocks are as if they had been put there, else copies that go first. Where the run begins in its
    stripe is said too: what is before it may not be there.
    """

    tenant: str
    name: str
    namespace: Namespace
    keys: bytes
    parent: bytes
    partition: int
    position: int
    holder: str
    load_ms: int
    keep: bool


class Filled(Message, frozen=True, tag="filled"):
    blocks: int  # of the run, from its first, that are here now


class Discard(Message, frozen=True, tag="discard"):
    """Delete blocks of a namespace, or all of it with `whole`, where they are. A node of the cluster says so to all."""

    tenant: str
    namespace: Namespace
    keys: bytes
    whole: bool


class Discarded(Message, frozen=True, tag="discarded"):
    blocks: int
    freed_bytes: int


class Vacate(Message, frozen=True, tag="vacate"):
    """Give what only this node has to others, and take no more. A node of the cluster says so to another."""


class Vacated(Message, frozen=True, tag="vacated"):
    moved: int
    left: int  # blocks that nobody took


class Examine(Message, frozen=True, tag="examine"):
    """What is wrong here, and who is a member as seen from here?"""


class Examined(Message, frozen=True, tag="examined"):
    problems: list[str]
    members: dict[str, int]  # name -> epoch


class Nodes(Message, frozen=True, tag="nodes"):
    """Who is in the cluster, as this node sees it."""


class Roster(Message, frozen=True, tag="roster"):
    """`trouble` says what is wrong with membership; empty while the node is in touch with its coordinator."""

    node: str
    trouble: str
    rows: list[dict[str, Any]]


class Whereabouts(Message, frozen=True, tag="whereabouts"):
    """Which nodes have which blocks of a chain? `parent` is the key before the first, empty at the chain's start."""

    namespace: int
    keys: bytes
    parent: bytes = b""


class Whereabout(Message, frozen=True, tag="whereabout"):
    """For each key the nodes that hold it, each with its tiers."""

    holders: list[dict[str, list[str]]]


class Replicate(Message, frozen=True, tag="replicate"):
    """Have at least `copies` of these blocks in the cluster, all of the namespace with `whole`."""

    namespace: int
    keys: bytes
    whole: bool
    copies: int


class Replicated(Message, frozen=True, tag="replicated"):
    blocks: int  # that were looked at: those that this node holds
    copied: int  # copies made
    short: int  # blocks with fewer copies than asked for


ClusterRequest = Announce | Locate | Fill | Discard | Vacate | Examine | Nodes | Whereabouts | Replicate
ClusterReply = Announced | Located | Filled | Discarded | Vacated | Examined | Roster | Whereabout | Replicated
