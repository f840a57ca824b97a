"""What must be true of a simulated cluster at rest, when all is well again; each checker yields what is not."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from kvstore.cluster.homes import Homes
from kvstore.cluster.locating import Place, stripes_of
from kvstore.cluster.naming import name_of, partition_of
from kvstore.types import BlockKey, State
from kvstore.wire_cluster import HOLDING, STRIPE, TIER_BITS, Locate
from tests.sim.node import SimulatedNode, World

Union = Mapping[tuple[int, int], Mapping[str, int]]  # (partition, name) -> node -> tiers, as bits


def node_at_rest(node: SimulatedNode) -> Iterator[str]:
    """Nothing is held, loaded, moved or waited for."""
    store = node.store
    yield from store.problems()
    held = [replica.key.hex() for replica in store.holds.held()]
    if held:
        yield f"{len(held)} holds are left, of {held[0]}"
    own = [replica.key.hex() for replica in store.own.held()]
    if own:
        yield f"the node holds {len(own)} replicas, of {own[0]}"
    if store.promotion.loading_bytes or not store.promotion.is_idle:
        yield f"{store.promotion.loading_bytes} bytes are being loaded"
    for tier in store.table.tiers.values():
        if tier.draining or tier.moves:
            yield f"{tier.name}: {len(tier.draining)} replicas drain, {len(tier.moves)} move"
    for space in store.table.spaces():
        for key, replica in space.replicas.items():
            if replica.state is not State.WRITTEN:
                yield f"{key.hex()} is {replica.state.value}"
            elif replica.partition < 0:
                yield f"{key.hex()} is in {space.tier}, and was never announced"


def same_views(world: World) -> Iterator[str]:
    """Everyone sees every start of every node, and nothing else."""
    expected = {node.name: node.epoch for node in world.nodes.values()}
    for node in world.nodes.values():
        seen = {name: member.epoch for name, member in node.cluster.view.members.items()}
        if seen != expected:
            yield f"{node.name} sees {seen}, not {expected}"
        if trouble := node.cluster.trouble:
            yield f"{node.name}: {trouble}"


def union_of_holders(world: World) -> dict[tuple[int, int], dict[str, int]]:
    """What the directory should say, by what is in the tables."""
    union: dict[tuple[int, int], dict[str, int]] = {}
    for node in world.nodes.values():
        for space in node.store.catalogue.all():
            for tier_space in space.spaces:
                for key, replica in tier_space.replicas.items():
                    if replica.state is State.WRITTEN and replica.partition >= 0:
                        block = (replica.partition, name_of(space.root, key))
                        tiers = union.setdefault(block, {})
                        tiers[node.name] = tiers.get(node.name, 0) | TIER_BITS[tier_space.tier]
    return union


def directory_is_exact(world: World, union: Union) -> Iterator[str]:
    """Each home says of its partitions what the holders have; and it knows of nothing else."""
    some = next(iter(world.nodes.values()))
    members = some.cluster.view.members
    homes = Homes([name for name, member in members.items() if member.condition == "serving"] or members)
    by_home: dict[str, list[tuple[int, int]]] = {}
    for block in sorted(union):
        by_home.setdefault(homes.home(block[0]), []).append(block)
    for node in world.nodes.values():
        directory = node.cluster.directory
        yield from (f"{node.name}: {problem}" for problem in directory.problems())
        blocks = by_home.get(node.name, [])
        if directory.blocks != len(blocks):
            yield f"{node.name}: its directory knows {directory.blocks} blocks, of {len(blocks)}"
        for block, told in zip(blocks, _located(node, blocks), strict=True):
            if told != union[block]:
                yield f"{node.name}: block {block} is said to be at {told}, and is at {union[block]}"


def _located(node: SimulatedNode, blocks: Sequence[tuple[int, int]]) -> Iterator[dict[str, int]]:
    stripes = [STRIPE.pack(partition, len(list(run))) for partition, run in groupby(blocks, key=lambda block: block[0])]
    names = b"".join(name.to_bytes(8, "little") for _, name in blocks)
    reply = node.cluster.directory.locate(Locate(0, b"".join(stripes), names))
    holdings: list[dict[str, int]] = [{}]
    holdings += (
        {reply.nodes[number]: tiers for number, tiers in HOLDING.iter_unpack(packed)} for packed in reply.holdings
    )
    for at in range(len(blocks)):
        yield holdings[int.from_bytes(reply.which[2 * at : 2 * at + 2], "little")]


def reachable(node: SimulatedNode, root: bytes, prompt: Sequence[BlockKey]) -> int:
    """How many of a chain's blocks this node has, or somebody where the chain says that they are announced, from the
    first. A block whose parent its holder never had is announced elsewhere: it is found there only."""
    world = node.world
    first = Place(partition_of(root, prompt[0]), 0)
    for stripe in stripes_of(root, prompt, first):
        for at in range(stripe.start, stripe.end):
            for other in world.nodes.values():
                found = [space.replicas.get(prompt[at]) for space in other.store.table.spaces()]
                written = [replica for replica in found if replica is not None and replica.state is State.WRITTEN]
                if any(other is node or replica.partition == stripe.partition for replica in written):
                    break
            else:
                return at
    return len(prompt)
