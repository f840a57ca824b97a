"""Namespaces over HTTP, and what is asked of many blocks at once: match, exists, evict, pin, explain."""

import math
import struct
from functools import lru_cache
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query, Request, Response
from fastapi.responses import JSONResponse

from engine_client.cluster_operations import check_replicas
from kvstore import wire
from kvstore.catalogue import OpenNamespace
from kvstore.errors import InvalidRequest, NamespaceMismatch
from kvstore.explain import whereabouts
from kvstore.packed import pack_keys
from kvstore.prefix import Namespace
from kvstore.wire_cluster import MOST_COPIES
from server.operator_requests import LIST_LIMIT
from server.rest.door import SLOW_S, session_of, visit_of
from server.rest.keys import all_parts, find_namespace, first_parts, parent_of, to_key, to_keys
from server.rest.models import (
    EXAMPLE_KEY,
    IN_ORDER,
    KEY_PATTERN,
    MOST,
    NAME_PATTERN,
    BlockList,
    BlockRow,
    ByKeys,
    ByTokens,
    DemoteAll,
    DemoteKeys,
    DemoteResult,
    EvictAll,
    EvictResult,
    ExistsResult,
    ExplainResult,
    ExplainRow,
    MatchResult,
    NamespaceFields,
    NamespaceList,
    NamespaceRow,
    NothingPinned,
    PinKeys,
    PinList,
    PinResult,
    PinRow,
    PinTokens,
    PromoteKeys,
    PromoteResult,
    PromoteTokens,
)
from server.rest.openapi import GUARDED, READS_BODY, Parent, by_name, problems
from server.rest.problems import Problem
from server.session import Session

router = APIRouter(prefix="/v1", responses=GUARDED, generate_unique_id_function=by_name)

Name = Annotated[str, Path(description="Name of the namespace.")]
NewName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the namespace: 1 to 128 printable ASCII.")]
After = Annotated[str | None, Query(pattern=KEY_PATTERN, description="`next` of the list before.")]
Limit = Annotated[int, Query(ge=1, le=LIST_LIMIT)]
FromTier = Annotated[str, Query(description="From this tier only; empty: from all.")]
Replicas = Annotated[
    int,
    Query(
        ge=-1,
        le=MOST_COPIES,
        description="Nodes of a cluster that shall have each block; 0: by use, -1: as it was said last.",
    ),
]
Through = Annotated[bool, Query(description="Commits wait for the copies: with 2 replicas or more.")]
PinId = Annotated[int, Path(ge=1, le=MOST)]

BY_KEYS: Any = {"summary": "by keys", "value": {"keys": [EXAMPLE_KEY]}}
BY_TOKENS: Any = {"summary": "by tokens", "value": {"tokens": list(range(1, 33))}}
EXAMPLES: Any = {"keys": BY_KEYS, "tokens": BY_TOKENS}
HOLD = {"hard": False, "ttl_seconds": 3600.0}
PINS: Any = {
    "keys": {"summary": "by keys", "value": {"keys": [EXAMPLE_KEY], **HOLD}},
    "tokens": {"summary": "by tokens", "value": {"tokens": list(range(1, 33)), **HOLD}},
}
EVICTIONS: Any = {"keys": BY_KEYS, "all": {"summary": "all of the namespace", "value": {"all": True}}}

DEMOTIONS: Any = {
    "keys": {"summary": "by keys", "value": {"keys": [EXAMPLE_KEY], "tier": "nvme"}},
    "all": {"summary": "all of the namespace", "value": {"all": True, "tier": "nvme", "evict": True}},
}

Chain = Annotated[ByKeys | ByTokens, IN_ORDER, Body(openapi_examples=EXAMPLES)]
Eviction = Annotated[ByKeys | EvictAll, IN_ORDER, Body(openapi_examples=EVICTIONS)]
Promotion = Annotated[PromoteKeys | PromoteTokens, IN_ORDER, Body(openapi_examples=EXAMPLES)]
Demotion = Annotated[DemoteKeys | DemoteAll, IN_ORDER, Body(openapi_examples=DEMOTIONS)]
Pinning = Annotated[PinKeys | PinTokens, IN_ORDER, Body(openapi_examples=PINS)]
UNPIN = {"unpin": {"operationId": "unpin", "parameters": {"pin_id": "$response.body#/pin_id"}}}
LOOKUP = READS_BODY | problems(404, 409)


@router.put("/namespaces/{ns}", status_code=201, response_model=NamespaceRow, tags=["namespaces"], responses={
    200: {"model": NamespaceRow, "description": "It stands for that already."}, **READS_BODY, **problems(409),
})  # fmt: skip
async def define_namespace(
    request: Request,
    response: Response,
    ns: NewName,
    fields: NamespaceFields,
    *,
    replicas: Replicas = -1,
    through: Through = False,
) -> NamespaceRow:
    """Say what a name stands for. 409 with the `differences` when it stands for something else, and for `replicas`
    that cannot be."""
    session = session_of(request)
    wanted = _namespace(fields)
    known = _names(session)
    try:
        check_replicas(replicas, through=through)
        await session.ask(wire.Open(0, ns, wanted, replicas, through))
    except NamespaceMismatch as error:
        differences = find_namespace(session, ns).namespace.differences(wanted)
        raise Problem(409, str(error), code=error.code, members={"differences": differences}) from error
    except InvalidRequest as error:
        if replicas < 0 and not through:
            raise
        raise Problem(409, str(error)) from error
    response.status_code = 200 if ns in known else 201
    return _row(ns, find_namespace(session, ns))


@router.get("/namespaces", response_model=NamespaceList, tags=["namespaces"])
async def list_namespaces(request: Request) -> NamespaceList:
    """The tenant's namespaces, a row for each name."""
    session = session_of(request)
    spaces = session.store.catalogue.of_tenant(session.tenant)
    return NamespaceList(namespaces=[_row(name, space) for space in spaces for name in space.names])


@router.get("/namespaces/{ns}", response_model=NamespaceRow, tags=["namespaces"], responses=problems(404))
async def show_namespace(request: Request, ns: Name) -> NamespaceRow:
    """What a name stands for, and how much of it is here."""
    return _row(ns, find_namespace(session_of(request), ns))


@router.get("/namespaces/{ns}/blocks", response_model=BlockList, tags=["blocks"], responses=problems(404, 409))
async def list_blocks(request: Request, ns: Name, after: After = None, limit: Limit = 1000) -> BlockList:
    """A page of a namespace's blocks, those that are being written included. Blocks may come and go between pages:
    404 when `after` is gone."""
    session = session_of(request)
    space = find_namespace(session, ns)
    start = to_key(space, after) if after else b""
    listed = await session.ask(wire.List(0, space.number, start, limit))
    rows = [BlockRow(**row) for row in listed.blocks]
    return BlockList(blocks=rows, next=rows[-1].key if listed.more and rows else None)


@router.delete("/namespaces/{ns}/blocks", response_model=EvictResult, tags=["blocks"], responses=problems(404))
async def evict_all(request: Request, ns: Name, tier: FromTier = "") -> EvictResult:
    """Delete every block of a namespace, from all tiers or from one."""
    session = session_of(request)
    return await _evict(session, find_namespace(session, ns), None, tier)


# Many blocks at once.


@router.post("/namespaces/{ns}/match", response_model=MatchResult, tags=["chains"], responses=LOOKUP)
async def match(request: Request, ns: Name, body: Chain, parent: Parent = None) -> MatchResult:
    """How many of a chain's blocks are here, from the first. Holds nothing."""
    session = session_of(request)
    space = find_namespace(session, ns)
    keys = first_parts(session, space, body)
    blocks = (await session.ask(wire.Match(0, space.number, pack_keys(keys), parent_of(space, parent)))).blocks
    tokens = blocks * space.namespace.block_tokens
    return MatchResult(matched_blocks=blocks, matched_tokens=tokens, keys=[key.hex() for key in keys])


@router.post("/namespaces/{ns}/exists", response_model=ExistsResult, tags=["chains"], responses=LOOKUP)
async def exists(request: Request, ns: Name, body: ByKeys) -> ExistsResult:
    """Which of these blocks are here, whatever comes before them."""
    session = session_of(request)
    space = find_namespace(session, ns)
    keys = to_keys(session, space, body.keys)
    session.store.counters.requests["exists"] += 1
    return ExistsResult(exists=[bool(whereabouts(session.store, space, key)[0]) for key in keys])


@router.post("/namespaces/{ns}/evict", response_model=EvictResult, tags=["chains"], responses=LOOKUP)
async def evict(request: Request, ns: Name, body: Eviction, tier: FromTier = "") -> EvictResult:
    """Delete blocks, from all tiers or from one. Those that are not here are not counted."""
    session = session_of(request)
    space = find_namespace(session, ns)
    return await _evict(session, space, body.keys if isinstance(body, ByKeys) else None, tier)


@router.post("/namespaces/{ns}/promote", response_model=PromoteResult, tags=["chains"], responses=LOOKUP)
async def promote(request: Request, ns: Name, body: Promotion, parent: Parent = None) -> PromoteResult:
    """Begin to load what lower tiers, or other nodes, have of a chain into DRAM, and do not wait for it."""
    session = session_of(request)
    space = find_namespace(session, ns)
    keys = first_parts(session, space, body)
    load_ms = math.ceil(body.load_seconds * 1000)
    before = parent_of(space, parent)
    promoted = await session.ask(wire.Promote(0, space.number, pack_keys(keys), load_ms, before))
    return PromoteResult(loading=promoted.loading)


@router.post("/namespaces/{ns}/demote", response_model=DemoteResult, tags=["chains"], responses=LOOKUP)
async def demote(request: Request, ns: Name, body: Demotion) -> DemoteResult:
    """Write blocks of DRAM into a lower tier, and with `evict` take them out of DRAM then. What cannot be written is
    not counted and stays."""
    session = session_of(request)
    space = find_namespace(session, ns)
    visit_of(request).allow(SLOW_S)
    keys = to_keys(session, space, body.keys) if isinstance(body, ByKeys) else []
    whole = isinstance(body, EvictAll)
    demoted = await session.ask(wire.Demote(0, space.number, pack_keys(keys), whole, body.tier, body.evict))
    return DemoteResult(written=demoted.written, evicted=demoted.evicted)


@router.post("/namespaces/{ns}/pin", status_code=201, response_model=PinResult, tags=["pins"], responses={
    201: {"description": "Pinned.", "links": UNPIN},
    200: {"model": NothingPinned, "description": "Nothing was here to pin."}, **READS_BODY, **problems(404, 409),
})  # fmt: skip
async def pin(request: Request, ns: Name, body: Pinning) -> PinResult | Response:
    """Keep the prefix of a chain that is here, for a time."""
    session = session_of(request)
    space = find_namespace(session, ns)
    keys = all_parts(session, space, body)
    ttl_ms = math.ceil(body.ttl_seconds * 1000)
    pinned = await session.ask(wire.Pin(0, space.number, pack_keys(keys), body.hard, ttl_ms))
    if not pinned.pin_id:
        return JSONResponse(NothingPinned().model_dump())
    parts = space.namespace.parts if isinstance(body, PinTokens) else 1
    return PinResult(pin_id=pinned.pin_id, blocks=pinned.blocks // parts)


@router.get("/pins", response_model=PinList, tags=["pins"])
async def list_pins(request: Request) -> PinList:
    """The tenant's pins."""
    session = session_of(request)
    now = session.store.clock.now()
    rows = [
        PinRow(
            pin_id=pin.pin_id,
            hard=pin.hard,
            blocks=len(pin.replicas),
            bytes=sum(replica.size for replica in pin.replicas),
            expires_in_seconds=max(0.0, pin.expires_at - now),
        )
        for pin in session.store.holds.pins(session.tenant.name)
    ]
    return PinList(pins=rows)


@router.delete("/pins/{pin_id}", status_code=204, response_class=Response, tags=["pins"], responses=problems(404))
async def unpin(request: Request, pin_id: PinId) -> Response:
    """Let go of a pin."""
    await session_of(request).ask(wire.Unpin(0, pin_id))
    return Response(status_code=204)


@router.post("/namespaces/{ns}/explain", response_model=ExplainResult, tags=["chains"], responses=LOOKUP)
async def explain(request: Request, ns: Name, body: Chain) -> ExplainResult:
    """Why these blocks would hit or miss. By tokens, the tenant's other namespaces are looked at too."""
    session = session_of(request)
    space = find_namespace(session, ns)
    keys = first_parts(session, space, body)
    tokens = struct.pack(f"<{len(body.tokens)}I", *body.tokens) if isinstance(body, ByTokens) else b""
    explained = await session.ask(wire.Explain(0, space.number, pack_keys(keys), tokens))
    return ExplainResult(blocks=[ExplainRow(**row) for row in explained.blocks])


async def _evict(session: Session, space: OpenNamespace, keys: list[str] | None, tier: str) -> EvictResult:
    packed = b"" if keys is None else pack_keys(to_keys(session, space, keys))
    evicted = await session.ask(wire.Evict(0, space.number, packed, keys is None, tier))
    return EvictResult(blocks=evicted.blocks, freed_bytes=evicted.freed_bytes)


def _namespace(fields: NamespaceFields) -> Namespace:
    try:
        return Namespace(**fields.model_dump())
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


@lru_cache(maxsize=1024)
def _fingerprint(namespace: Namespace) -> str:
    return namespace.fingerprint()


def _names(session: Session) -> set[str]:
    return {name for space in session.store.catalogue.of_tenant(session.tenant) for name in space.names}


def _row(name: str, space: OpenNamespace) -> NamespaceRow:
    namespace = space.namespace
    return NamespaceRow(
        name=name,
        names=list(space.names),
        number=space.number,
        root=space.root.hex(),
        fingerprint=_fingerprint(namespace),
        blocks=sum(len(found.replicas) for found in space.spaces),
        hit_blocks=space.hit_blocks,
        missed_blocks=space.missed_blocks,
        fields={field: getattr(namespace, field) for field in namespace.__struct_fields__},
    )
