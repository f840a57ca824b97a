"""Who is in the cluster: plain records, and the view that a node has of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

Condition = Literal["serving", "draining"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself when it joins. `epoch` grows at each start of it."""

    name: str
    epoch: int
    address: str  # where other nodes and clients reach it: tcp://host:port, tls://host:port
    rest: str = ""
    capacity_bytes: int = 0  # of DRAM
    transports: tuple[str, ...] = ("tcp",)
    labels: dict[str, str] = {}  # where it is: zone, rack, host
    condition: Condition = "serving"


@dataclass(frozen=True, slots=True)
class View:
    """The members that are alive, by name; `revision` grows with each change that its coordinator saw."""

    revision: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)

    def has(self, name: str, epoch: int) -> bool:
        """Whether this very start of a node is a member."""
        member = self.members.get(name)
        return member is not None and member.epoch == epoch


HEARTBEAT_S = 1.0
DEAD_S = 3.0  # three heartbeats missed


def distance(one: Mapping[str, str], other: Mapping[str, str]) -> int:
    """0 on one host, 1 in one rack, 2 in one zone, 3 elsewhere, by the labels that both have."""
    for far, label in enumerate(("host", "rack", "zone")):
        if label in one and one[label] == other.get(label):
            return far
    return 3
