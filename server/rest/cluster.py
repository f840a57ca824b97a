"""The cluster over HTTP: its nodes, who has which blocks, copies, maintenance, check."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Request

from kvstore import wire
from kvstore.errors import InvalidRequest, NotFound
from kvstore.packed import pack_keys
from kvstore.wire_cluster import Nodes, Replicate, Roster, Whereabouts
from server.rest.door import SLOW_S, session_of, visit_of
from server.rest.keys import find_namespace, first_parts, parent_of
from server.rest.models import (
    EXAMPLE_KEY,
    IN_ORDER,
    ByKeys,
    ByTokens,
    Cluster,
    ClusterCheck,
    ClusterNode,
    DrainNode,
    DrainResult,
    ReplicateAll,
    ReplicateKeys,
    ReplicateResult,
    ReplicateTokens,
    Whereabout,
    WhereaboutsResult,
)
from server.rest.openapi import GUARDED, READS_BODY, Parent, by_name, problems
from server.rest.problems import Problem
from server.session import Session

router = APIRouter(
    prefix="/v1", tags=["cluster"], responses=GUARDED | problems(409), generate_unique_id_function=by_name
)

WANTED: Any = {"namespace": "llama", "copies": 2}
REPLICATIONS: Any = {
    "keys": {"summary": "by keys", "value": {"keys": [EXAMPLE_KEY], **WANTED}},
    "tokens": {"summary": "by tokens", "value": {"tokens": list(range(1, 33)), **WANTED}},
    "all": {"summary": "all of the namespace", "value": {"all": True, **WANTED}},
}

Name = Annotated[str, Path(description="Name of the namespace.")]
Replication = Annotated[ReplicateKeys | ReplicateTokens | ReplicateAll, IN_ORDER, Body(openapi_examples=REPLICATIONS)]
Chain = Annotated[ByKeys | ByTokens, IN_ORDER]


@router.get("/cluster", response_model=Cluster, response_model_exclude_unset=True)
async def show_cluster(request: Request) -> Cluster:
    """The nodes, as this one sees them. 409 where it is in no cluster, here and in all that follows."""
    roster = await _roster(session_of(request))
    return Cluster(node=roster.node, trouble=roster.trouble, nodes=[ClusterNode(**row) for row in roster.rows])


@router.get("/cluster/check", response_model=ClusterCheck)
async def check_cluster(request: Request) -> ClusterCheck:
    """Fsck of all nodes, and whether they agree on who is a member and who has what. Needs an admin."""
    visit_of(request).allow(SLOW_S)
    session = session_of(request)
    roster = await _roster(session)
    checked = await _ask(session, wire.Check(0, cluster=True))
    return ClusterCheck(problems=checked.problems, nodes=_names(roster))


@router.post("/cluster/drain", response_model=DrainResult, responses=READS_BODY | problems(404))
async def drain_node(request: Request, body: DrainNode) -> DrainResult:
    """Empty a node for maintenance: what only it has goes to others, and it takes no more. Needs an admin."""
    visit_of(request).allow(SLOW_S)
    session = session_of(request)
    names = _names(await _roster(session))
    if body.node not in names:
        raise NotFound(f"no node {body.node!r}; there are {', '.join(names)}")
    drained = await _ask(session, wire.Drain(0, "", body.node))
    return DrainResult(blocks=drained.blocks, left=drained.left)


@router.post("/cluster/replicate", response_model=ReplicateResult, responses=READS_BODY | problems(404))
async def replicate(request: Request, body: Replication) -> ReplicateResult:
    """Have at least so many copies in the cluster of blocks that this node has, ahead of need."""
    visit_of(request).allow(SLOW_S)
    session = session_of(request)
    space = find_namespace(session, body.namespace)
    is_whole = isinstance(body, ReplicateAll)
    packed = b"" if isinstance(body, ReplicateAll) else pack_keys(first_parts(session, space, body))
    done = await _ask(session, Replicate(0, space.number, packed, is_whole, body.copies))
    return ReplicateResult(blocks=done.blocks, copied=done.copied, short=done.short)


@router.post("/namespaces/{ns}/whereabouts", response_model=WhereaboutsResult, responses=READS_BODY | problems(404))
async def whereabouts(request: Request, ns: Name, body: Chain, parent: Parent = None) -> WhereaboutsResult:
    """Which nodes have which blocks of a chain, and in which tiers, as far as the directory knows."""
    session = session_of(request)
    space = find_namespace(session, ns)
    keys = first_parts(session, space, body)
    found = await _ask(session, Whereabouts(0, space.number, pack_keys(keys), parent_of(space, parent)))
    rows = zip(keys, found.holders, strict=True)
    return WhereaboutsResult(blocks=[Whereabout(key=key.hex(), nodes=holders) for key, holders in rows])


async def _roster(session: Session) -> Roster:
    roster: Roster = await _ask(session, Nodes(0))
    return roster


def _names(roster: Roster) -> list[str]:
    return [row["name"] for row in roster.rows]


async def _ask(session: Session, request: wire.Message) -> Any:
    """What fits the schema and is refused contradicts what is here: a node in no cluster. Raises Problem."""
    try:
        return await session.ask(request)
    except InvalidRequest as error:
        raise Problem(409, str(error)) from error
