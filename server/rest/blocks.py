"""Block bodies over HTTP: received straight into their slot, sent straight from it.

A slot that is received into is a grant's, one that is sent from is a lease's. Both are let go here whatever
becomes of the client, and at the latest with the request's session.
"""

import re
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from xxhash import xxh3_64

from kvstore import wire
from kvstore.catalogue import OpenNamespace
from kvstore.copier import copy_bytes
from kvstore.errors import DeadlineExceeded, NotFound, QuotaExceeded, StoreError, TierFull
from kvstore.explain import whereabouts
from kvstore.packed import pack_u64
from kvstore.table import Replica
from kvstore.types import DRAM, BlockKey, Placement
from server.rest.door import node_of, session_of, visit_of
from server.rest.http import connection_of
from server.rest.keys import find_namespace, to_key
from server.rest.models import CHECKSUM_PATTERN, KEY_PATTERN, MOST_LOAD_S, StoredBlock
from server.rest.openapi import (
    BINARY,
    CONTENT_RANGE,
    DELETION,
    ETAG,
    GUARDED,
    IF_NONE_MATCH,
    PERHAPS_ETAG,
    RANGED,
    RANGES,
    READS_BODY,
    UPLOAD,
    WHERE,
    Responses,
    by_name,
    problems,
)
from server.rest.problems import RETRY_AFTER_S, Problem, invalid
from server.session import Session

PIECE_BYTES = 256 << 10
LEASE_SHARE = 0.9  # of a lease in which its block must be sent: it cannot lapse before
LOAD_SHARE = 0.5  # of rest.request_timeout that a load may take
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
ETAGS = re.compile(r'"([^"]*)"')
NUMBER = re.compile(r"-?\d{1,20}(\.\d{1,30})?([eE][+-]?\d{1,3})?", re.ASCII)
KEY = re.compile(KEY_PATTERN)
CHECKSUM = re.compile(CHECKSUM_PATTERN)

router = APIRouter(
    prefix="/v1/namespaces/{ns}/blocks",
    tags=["blocks"],
    responses=GUARDED | problems(404, 409),
    generate_unique_id_function=by_name,
)

WHOLE = {"description": "The block.", "headers": ETAG | RANGES}
PART = {"description": "A range of it.", "headers": ETAG | RANGES | CONTENT_RANGE}
CONTENT = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
BYTES = {"content": {"application/octet-stream": BINARY}}
UNCHANGED = {"description": "The client has it already.", "headers": ETAG}
STORED: Responses = {
    200: {"model": StoredBlock, "description": "It was here already; the body was not used.", "headers": ETAG},
    201: {"description": "Stored.", "headers": ETAG},
}


class Target(NamedTuple):
    """The block that a path names. FastAPI would take 40 µs to find out."""

    session: Session
    space: OpenNamespace
    key: BlockKey


@router.put("/{key}", status_code=201, response_model=StoredBlock, openapi_extra=UPLOAD,
            responses=STORED | READS_BODY | problems(411, 507))  # fmt: skip
async def put_block(request: Request) -> Response:
    """Store a block. It is never rewritten: one that is here already stays, and the answer is 200."""
    session, space, key = _target(request)
    parent, expected = _parent(request, space), _expected_checksum(request)
    size = _upload_bytes(request, space)
    placed = await session.ask(wire.Put(0, space.number, key, parent, pack_u64([size])))
    placement = Placement(placed.placements[0])
    if placement is Placement.GRANTED:
        checksum = await _receive(request, session, placed.grant_id, expected)
        return _stored(201, key, size, checksum)
    if placement is Placement.PRESENT:
        replica = space.dram.replicas[key]
        return _stored(200, key, replica.size, replica.checksum)
    raise _refusal(placement, session)


@router.get("/{key}", response_class=Response, openapi_extra=RANGED,
            responses={200: WHOLE | BYTES, 206: PART | BYTES, 304: UNCHANGED, **problems(416)})  # fmt: skip
async def get_block(request: Request) -> Response:
    """The bytes of a block, or a range of them. One of a lower tier is loaded first; 503 when that takes too long."""
    session, space, key = _target(request)
    checksum = _checksum(session, space, key)
    if checksum is not None and _is_known(request, checksum) and whereabouts(session.store, space, key)[0]:
        return await _unchanged(session, space, key, checksum)
    lease_id = await _hold(request, session, space, key)
    response: BlockResponse | None = None
    try:
        (replica,) = session.leased(lease_id)
        if _is_known(request, replica.checksum):
            return await _unchanged(session, space, key, replica.checksum)
        wanted, condition = request.headers.get("range"), request.headers.get("if-range")
        bounds = None
        if wanted is not None and condition in (None, _etag(replica.checksum)["ETag"]):
            bounds = parse_range(wanted, replica.size)
        response = BlockResponse(session, replica, lease_id, bounds)
        return response
    finally:
        if response is None:
            session.store.reads.release(session.owner, lease_id)


@router.head("/{key}", response_class=Response, openapi_extra=IF_NONE_MATCH, responses={
    200: {"description": "The block.", "headers": PERHAPS_ETAG | RANGES | WHERE},
    304: {"description": "The client has it already.", "headers": PERHAPS_ETAG},
})  # fmt: skip
async def head_block(request: Request) -> Response:
    """Whether a block is here, in which tier, its size and, but for the object tier, its ETag. Loads nothing."""
    session, space, key = _target(request)
    tier, size = whereabouts(session.store, space, key)
    if not tier:
        space.missed_blocks += 1
        raise _absent(space, key)
    checksum = _checksum(session, space, key)
    if _is_known(request, checksum):
        return await _unchanged(session, space, key, checksum)
    return Response(headers=_etag(checksum) | CONTENT | {"X-Cairn-Tier": tier, "Content-Length": str(size)})


@router.delete("/{key}", status_code=204, response_class=Response, openapi_extra=DELETION)
async def delete_block(request: Request) -> Response:
    """Delete a block, from all tiers or from one. Who is reading it reads on."""
    session, space, key = _target(request)
    tier = request.query_params.get("tier", "")
    evicted = await session.ask(wire.Evict(0, space.number, key, tier=tier))
    if not evicted.blocks:
        raise _absent(space, key)
    return Response(status_code=204)


class BlockResponse(Response):
    """A held block's bytes, in [start, end) of `bounds` or all, sent from its slot.

    The lease is let go when the bytes are out of this process, or the connection is gone: uvicorn's buffers
    refer to the slot until then. Cancelled, or not read by the client in time, it ends the connection first.
    """

    def __init__(self, session: Session, replica: Replica, lease_id: int, bounds: tuple[int, int] | None) -> None:
        start, end = bounds or (0, replica.size)
        headers = _etag(replica.checksum) | CONTENT | {"Content-Length": str(end - start)}
        if bounds is not None:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{replica.size}"
        super().__init__(None, 200 if bounds is None else 206, headers, "application/octet-stream")
        self._session = session
        self._replica = replica
        self._lease_id = lease_id
        self._range = range(start, end, PIECE_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._session
        try:
            await self._send(scope, send, session.store.limits.lease_max_s * LEASE_SHARE)
        except BaseException:
            connection = connection_of(scope)
            if connection is not None and visit_of(Request(scope)).answering:
                await connection.abort()
            raise
        finally:
            session.store.reads.release(session.owner, self._lease_id)

    async def _send(self, scope: Scope, send: Send, lease_s: float) -> None:
        request = Request(scope)
        visit, connection = visit_of(request), connection_of(scope)
        patience_s = node_of(request).config.rest.request_timeout
        clock, view = self._session.store.clock, self._session.store.view(self._replica)
        lapses_at = clock.now() + lease_s
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for at in self._range:
            if connection is not None and connection.lost.is_set():
                return
            visit.allow(min(patience_s, lapses_at - clock.now()))
            end = min(at + PIECE_BYTES, self._range.stop)
            piece = view[at:end] if connection is not None else bytes(view[at:end])
            await send({"type": "http.response.body", "body": piece, "more_body": end < self._range.stop})
        if connection is not None:
            await connection.sent()


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """[start, end) of one byte range; None for what is none, or several. Raises Problem (416) outside of the block."""
    match = RANGE.fullmatch(header)
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        start, end = max(0, size - int(match[2])), size
    else:
        start = int(match[1])
        end = min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= size:
        raise Problem(416, f"the block has {size} bytes", headers={"Content-Range": f"bytes */{size}"})
    return start, end


def _target(request: Request) -> Target:
    session, digits = session_of(request), request.path_params["key"]
    if not KEY.fullmatch(digits):
        raise invalid("path.key", "a key has 32 hex digits, and 4 more where the namespace has parts")
    space = find_namespace(session, request.path_params["ns"])
    return Target(session, space, to_key(space, digits))


def _parent(request: Request, space: OpenNamespace) -> bytes:
    digits = request.query_params.get("parent")
    if digits is None:
        return b""
    if not KEY.fullmatch(digits):
        raise invalid("query.parent", "a key has 32 hex digits, and 4 more where the namespace has parts")
    return to_key(space, digits)


def _expected_checksum(request: Request) -> int | None:
    digits = request.headers.get("x-cairn-checksum")
    if digits is None:
        return None
    if not CHECKSUM.fullmatch(digits):
        raise invalid("header.x-cairn-checksum", "a checksum has 16 hex digits")
    return int(digits, 16)


def _upload_bytes(request: Request, space: OpenNamespace) -> int:
    """The size that a body announces. Raises Problem for one that cannot be a block here."""
    visit, node = visit_of(request), node_of(request)
    size = visit.content_length
    if size is None:
        raise Problem(411, "a block needs a Content-Length: its slot is chosen by it")
    visit.body_bytes = min(node.config.rest.body_bytes, node.store.table.tiers[DRAM].pool.slab_bytes)
    visit.check_body(size)
    visit.body_bytes = size
    expected = space.namespace.block_bytes
    if size and expected and size != expected:
        message = f"a block of this namespace has {expected} bytes, not {size}"
        raise Problem(409, message, code="namespace_mismatch")
    return size


async def _receive(request: Request, session: Session, grant_id: int, expected: int | None) -> int:
    """Take the body into the grant's slot and commit it; its checksum. Fails, or is cancelled, with the slot freed."""
    store, owner = session.store, session.owner
    try:
        (slot,) = store.puts.receive(owner, grant_id, 1)
        digest, filled_bytes = xxh3_64(), 0
        async for chunk in request.stream():
            copy_bytes(slot[filled_bytes:], memoryview(chunk))
            digest.update(chunk)
            filled_bytes += len(chunk)
        found = digest.intdigest()
        if filled_bytes != len(slot):
            raise Problem(400, f"a body of {filled_bytes} bytes was announced with {len(slot)}")
        copies = session.copies_of(grant_id)
        store.puts.commit_verified(owner, grant_id, [found if expected is None else expected], [found], session.path)
    except BaseException:
        store.puts.abort(owner, grant_id)
        raise
    if copies is not None:
        await copies.made()
    return found


def _stored(status: int, key: BlockKey, size: int, checksum: int) -> Response:
    content = {"key": key.hex(), "bytes": size, "checksum": f"{checksum:016x}"}
    return JSONResponse(content, status, _etag(checksum))


def _refusal(placement: Placement, session: Session) -> StoreError | Problem:
    if placement is Placement.BUSY:
        return Problem(409, "another client is writing this block", code="busy", retry_after_s=RETRY_AFTER_S)
    if placement is Placement.OVER_QUOTA:
        quota = session.tenant.quota_bytes
        return QuotaExceeded(f"the quota of {quota} bytes is used up, and nothing of it may be evicted")
    return TierFull("no slot is free, and nothing may be evicted")


async def _hold(request: Request, session: Session, space: OpenNamespace, key: BlockKey) -> int:
    """A lease on a block, which is loaded first where a lower tier has it. Raises NotFound, DeadlineExceeded."""
    load_s, parent = _load_s(request), _parent(request, space)
    lease_ms = int(session.store.limits.lease_max_s * 1000)
    acquired = await session.ask(
        wire.Acquire(0, space.number, key, lease_ms, load_ms=int(load_s * 1000), parent=parent)
    )
    if acquired.lease_id:
        return int(acquired.lease_id)
    tier, _ = whereabouts(session.store, space, key)
    if tier:
        raise DeadlineExceeded(f"block {key.hex()} is in tier {tier}, and was not loaded within {load_s:g} s")
    raise _absent(space, key)


def _load_s(request: Request) -> float:
    """How long a load may take: what is left of the request's time is for sending."""
    most_s = node_of(request).config.rest.request_timeout * LOAD_SHARE
    text = request.query_params.get("load_s")
    if text is None:
        return most_s
    if not NUMBER.fullmatch(text) or not 0 <= float(text) <= MOST_LOAD_S:
        raise invalid("query.load_s", f"expected seconds, a number from 0 to {MOST_LOAD_S}")
    return min(float(text), most_s)


def _absent(space: OpenNamespace, key: BlockKey) -> NotFound:
    return NotFound(f"no block {key.hex()} in namespace {space.names[0]!r}")


def _checksum(session: Session, space: OpenNamespace, key: BlockKey) -> int | None:
    """Of the block in the fastest tier that the table knows; None where only a bucket has it."""
    found = (session.store.table.readable(tier_space, key) for tier_space in space.spaces)
    return next((replica.checksum for replica in found if replica is not None), None)


async def _unchanged(session: Session, space: OpenNamespace, key: BlockKey, checksum: int | None) -> Response:
    """304: a use of the block like any other."""
    await session.ask(wire.Match(0, space.number, key))
    return Response(status_code=304, headers=_etag(checksum))


def _is_known(request: Request, checksum: int | None) -> bool:
    known = request.headers.get("if-none-match")
    if known is None:
        return False
    return known.strip() == "*" or (checksum is not None and f"{checksum:016x}" in ETAGS.findall(known))


def _etag(checksum: int | None) -> dict[str, str]:
    return {"ETag": f'"{checksum:016x}"'} if checksum is not None else {}
