"""What a client can ask one node of a cluster about all: who is in it, who has what, copies, maintenance."""

from collections.abc import Sequence

from engine_client.steps import Call, OpenSpace, Operation
from kvstore import wire
from kvstore.errors import InvalidRequest, ProtocolError
from kvstore.packed import pack_keys
from kvstore.types import BlockKey
from kvstore.wire_cluster import MOST_COPIES, Nodes, Replicate, Replicated, Roster, Whereabouts

SLOW_S = 3600.0  # what moves a whole tier, namespace or node may take that long
CHECK_S = 60.0  # every node reads each of its blocks' records


def check_replicas(replicas: int, *, through: bool) -> None:
    """Raises InvalidRequest for copies that no namespace can have: see `wire.Open`."""
    if not -1 <= replicas <= MOST_COPIES:
        raise InvalidRequest(f"{replicas} replicas: from 0 to {MOST_COPIES}, or -1 for what was said last")
    if through and replicas < 2:
        raise InvalidRequest("commits that wait for copies need some to wait for: 2 replicas or more")


def nodes() -> Operation[Roster]:
    """Who is in the cluster, as the node sees it. InvalidRequest when it is in none."""
    reply: Roster = yield Call(Nodes)
    return reply


def whereabouts(
    space: OpenSpace, keys: Sequence[BlockKey], parent: BlockKey | None = None
) -> Operation[list[dict[str, list[str]]]]:
    """For each block of a chain the nodes that have it, each with its tiers. `parent` is the key before the first."""
    packed = pack_keys(keys)
    reply = yield Call(lambda number: Whereabouts(number, space.number, packed, parent or b""))
    if len(reply.holders) != len(keys):
        raise ProtocolError(f"{len(reply.holders)} whereabouts of {len(keys)} blocks")
    return list(reply.holders)


def replicate(space: OpenSpace, keys: Sequence[BlockKey] | None, copies: int) -> Operation[Replicated]:
    """Have at least `copies` of these blocks in the cluster, of all that the node has of the namespace for None."""
    if not 1 <= copies <= MOST_COPIES:
        raise InvalidRequest(f"{copies} copies: from 1 to {MOST_COPIES}")
    packed = pack_keys(keys or ())
    reply: Replicated = yield Call(
        lambda number: Replicate(number, space.number, packed, keys is None, copies), wait_s=SLOW_S
    )
    return reply


def drain(tier: str, node: str) -> Operation[wire.Drained]:
    """Empty a tier into the next lower one; or a node of the cluster, whose blocks go to others."""
    if bool(tier) == bool(node):
        raise InvalidRequest("a drain is of a tier or of a node" + (", not of both" if tier else ""))
    reply: wire.Drained = yield Call(lambda number: wire.Drain(number, tier, node), wait_s=SLOW_S)
    return reply


def check(*, cluster: bool) -> Operation[list[str]]:
    """Fsck of the live node, or of all nodes and of what they know of each other: what is wrong, a sentence each."""
    reply = yield Call(lambda number: wire.Check(number, cluster), wait_s=CHECK_S if cluster else 0.0)
    return list(reply.problems)
