"""The nouns. Plain data: no I/O, no clock, no locks; imported by everything, imports nothing."""

from collections.abc import Hashable
from enum import Enum, IntEnum
from typing import NamedTuple, NewType

KEY_BYTES = 16

BlockKey = NewType("BlockKey", bytes)
"""Digest of a block's tokens and of all the tokens before it, within one namespace: 16 bytes.

In a namespace of several parts the key of a part is the block's key and a u16 part number, 18 bytes.
"""

TierName = NewType("TierName", str)
Owner = NewType("Owner", int)
"""A client's session on this node. Whatever it holds is freed when it ends."""

NODE = Owner(0)
"""The node itself, which holds what it copies: a client that goes must not free it meanwhile."""

HBM = TierName("hbm")
DRAM = TierName("dram")
NVME = TierName("nvme")
OBJECT = TierName("object")
PEER = TierName("peer")
"""Other nodes, as a source of blocks; no tier of this one."""


class State(Enum):
    """Where a replica is in its life. A FREE replica is no replica: its record is gone."""

    ALLOCATED = "allocated"  # has a slot and one writer; readable below its watermark by who asks for that
    WRITTEN = "written"  # committed; readable; evictable once nothing holds it
    EVICTED = "evicted"  # no new readers; keeps its slot until the last holder lets go
    FREE = "free"

    __hash__ = object.__hash__  # members are single; Enum's own hashes the name, in Python


class Change(Enum):
    """What happened to a replica that others publish, announce or count."""

    PROGRESSED = "progressed"
    COMMITTED = "committed"
    RESTORED = "restored"  # taken up from an earlier start
    MOVED = "moved"  # to another slot of its tier
    REMOVED = "removed"


class Cause(Enum):
    """Why a replica went."""

    PRESSURE = "pressure"  # a put needed its room
    WATERMARK = "watermark"  # background eviction down to the low watermark
    DEMOTED = "demoted"  # as by watermark, and a copy lies in a lower tier
    QUOTA = "quota"  # its tenant needed the room for something newer
    SLAB_TAKEN = "slab_taken"  # another size class needed its slab
    SHRUNK = "shrunk"  # the tier's capacity was made smaller
    DRAINED = "drained"  # somebody asked for its tier to be emptied
    SURPLUS = "surplus"  # other nodes have it too, and nobody reads it here any more
    DELETED = "deleted"  # somebody asked for it
    CORRUPT = "corrupt"  # its bytes did not have its checksum
    LOAD_FAILED = "load_failed"  # its bytes could not be read, or not in time
    ABORTED = "aborted"  # its writer gave up
    WRITER_LOST = "writer_lost"  # its writer's session ended
    PUT_TIMEOUT = "put_timeout"  # its writer took too long


class Placement(IntEnum):
    """What became of one block of a put; the value travels on the wire."""

    PRESENT = 0  # already here: not wanted
    GRANTED = 1  # wanted: it has a slot
    BUSY = 2  # another writer is at it: not wanted
    FULL = 3  # no room for it
    OVER_QUOTA = 4  # the tenant may not store more

    __hash__ = int.__hash__


class Slot(NamedTuple):
    """A place for one block in one tier. `generation` grows each time the place is used again."""

    tier: TierName
    slab_id: int
    offset: int  # bytes from the slab's start
    size: int  # bytes of the slot, at least the block's
    generation: int


class GroupKey(NamedTuple):
    """The blocks that may share a slab: one tenant, one size class."""

    tenant: Hashable
    slot_bytes: int
