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
from kvstore.errors import NotFound, QuotaExceeded, StoreError, TierFull
from kvstore.table import Replica
from kvstore.types import DRAM, BlockKey, Placement
from kvstore.wire import pack_u64
from server.rest.door import node_of, session_of, visit_of
from server.rest.http import connection_of
from server.rest.keys import find_namespace, to_key
from server.rest.models import CHECKSUM_PATTERN, KEY_PATTERN, StoredBlock
from server.rest.openapi import (
    BINARY,
    BLOCK_PATH,
    CONTENT_RANGE,
    ETAG,
    GUARDED,
    IF_NONE_MATCH,
    RANGED,
    RANGES,
    READS_BODY,
    UPLOAD,
    Responses,
    by_name,
    problems,
)
from server.rest.problems import RETRY_AFTER_S, Problem, invalid
from server.session import Session

PIECE_BYTES = 256 << 10
LEASE_SHARE = 0.9  # of a lease in which its block must be sent: it cannot lapse before
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
ETAGS = re.compile(r'"([^"]*)"')
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
        replica = space.spaces[0].replicas[key]
        return _stored(200, key, replica.size, replica.checksum)
    raise _refusal(placement, session)


@router.get("/{key}", response_class=Response, openapi_extra=RANGED,
            responses={200: WHOLE | BYTES, 206: PART | BYTES, 304: UNCHANGED, **problems(416)})  # fmt: skip
async def get_block(request: Request) -> Response:
    """The bytes of a block, or a range of them."""
    session, space, key = _target(request)
    replica = _readable(session, space, key)
    if _is_known(request, replica):
        return await _unchanged(session, space, replica)
    wanted, condition = request.headers.get("range"), request.headers.get("if-range")
    bounds = None
    if wanted is not None and condition in (None, _etag(replica)):
        bounds = parse_range(wanted, replica.size)
    return BlockResponse(session, space, replica, bounds)


@router.head("/{key}", response_class=Response, openapi_extra=IF_NONE_MATCH,
             responses={200: WHOLE, 304: UNCHANGED})  # fmt: skip
async def head_block(request: Request) -> Response:
    """Whether a block is here, its size and its ETag."""
    session, space, key = _target(request)
    replica = _readable(session, space, key)
    if _is_known(request, replica):
        return await _unchanged(session, space, replica)
    return Response(headers=_headers(replica) | {"Content-Length": str(replica.size)})


@router.delete("/{key}", status_code=204, response_class=Response, openapi_extra=BLOCK_PATH)
async def delete_block(request: Request) -> Response:
    """Delete a block. Who is reading it reads on."""
    session, space, key = _target(request)
    evicted = await session.ask(wire.Evict(0, space.number, key))
    if not evicted.blocks:
        raise NotFound(f"no block {key.hex()} in namespace {space.names[0]!r}")
    return Response(status_code=204)


class BlockResponse(Response):
    """A block's bytes, in [start, end) of `bounds` or all, sent from its slot under a lease of their own.

    The lease is let go when the bytes are out of this process, or the connection is gone: uvicorn's buffers
    refer to the slot until then. Cancelled, or not read by the client in time, it ends the connection first.
    """

    def __init__(
        self, session: Session, space: OpenNamespace, replica: Replica, bounds: tuple[int, int] | None
    ) -> None:
        start, end = bounds or (0, replica.size)
        headers = _headers(replica) | {"Content-Length": str(end - start)}
        if bounds is not None:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{replica.size}"
        super().__init__(None, 200 if bounds is None else 206, headers, "application/octet-stream")
        self._session = session
        self._space = space
        self._replica = replica
        self._range = range(start, end, PIECE_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session, replica = self._session, self._replica
        lease_s = session.store.limits.lease_max_s
        request = wire.Acquire(0, self._space.number, replica.key, int(lease_s * 1000))
        lease_id = (await session.ask(request)).lease_id
        if not lease_id:
            raise NotFound(f"block {replica.key.hex()} was evicted just now")
        try:
            if session.leased(lease_id)[0] is not replica:
                raise NotFound(f"block {replica.key.hex()} was replaced just now")
            await self._send(scope, send, lease_s * LEASE_SHARE)
        except BaseException:
            connection = connection_of(scope)
            if connection is not None and visit_of(Request(scope)).answering:
                await connection.abort()
            raise
        finally:
            session.store.release(session.owner, lease_id)

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
        (slot,) = store.receive(owner, grant_id, 1)
        digest, filled_bytes = xxh3_64(), 0
        async for chunk in request.stream():
            copy_bytes(slot[filled_bytes:], memoryview(chunk))
            digest.update(chunk)
            filled_bytes += len(chunk)
        found = digest.intdigest()
        if filled_bytes != len(slot):
            raise Problem(400, f"a body of {filled_bytes} bytes was announced with {len(slot)}")
        store.commit_verified(owner, grant_id, [found if expected is None else expected], [found], session.path)
    except BaseException:
        store.abort(owner, grant_id)
        raise
    return found


def _stored(status: int, key: BlockKey, size: int, checksum: int) -> Response:
    digits = f"{checksum:016x}"
    content = {"key": key.hex(), "bytes": size, "checksum": digits}
    return JSONResponse(content, status, {"ETag": f'"{digits}"'})


def _refusal(placement: Placement, session: Session) -> StoreError | Problem:
    if placement is Placement.BUSY:
        return Problem(409, "another client is writing this block", code="busy", retry_after_s=RETRY_AFTER_S)
    if placement is Placement.OVER_QUOTA:
        quota = session.tenant.quota_bytes
        return QuotaExceeded(f"the quota of {quota} bytes is used up, and nothing of it may be evicted")
    return TierFull("no slot is free, and nothing may be evicted")


def _readable(session: Session, space: OpenNamespace, key: BlockKey) -> Replica:
    replica = session.store.readable(space, key)
    if replica is None:
        space.missed_blocks += 1
        raise NotFound(f"no block {key.hex()} in namespace {space.names[0]!r}")
    return replica


async def _unchanged(session: Session, space: OpenNamespace, replica: Replica) -> Response:
    """304: a use of the block like any other."""
    await session.ask(wire.Match(0, space.number, replica.key))
    return Response(status_code=304, headers={"ETag": _etag(replica)})


def _is_known(request: Request, replica: Replica) -> bool:
    known = request.headers.get("if-none-match")
    if known is None:
        return False
    return known.strip() == "*" or f"{replica.checksum:016x}" in ETAGS.findall(known)


def _etag(replica: Replica) -> str:
    return f'"{replica.checksum:016x}"'


def _headers(replica: Replica) -> dict[str, str]:
    return {"ETag": _etag(replica), "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
