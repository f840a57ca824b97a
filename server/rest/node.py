"""The node itself over HTTP: tiers, check, stats, health and metrics."""

from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from kvstore import wire
from kvstore.errors import InvalidRequest, NotFound
from kvstore.types import DRAM, NVME
from server.config import SIZES
from server.rest.door import SLOW_S, node_of, session_of, visit_of
from server.rest.models import CheckResult, DrainResult, Health, TierChange, TierList, TierRow
from server.rest.openapi import GUARDED, READS_BODY, by_name, problems
from server.rest.problems import RETRY_AFTER_S, Problem
from server.session import Session
from server.sources import QUANTITY
from server.stats import tiers

router = APIRouter(generate_unique_id_function=by_name)

TierPath = Annotated[str, Path(description="Name of the tier.", examples=["dram"])]
METRICS_BODY = {"content": {"text/plain": {"schema": {"type": "string"}}}}


@router.get("/v1/tiers", response_model=TierList, response_model_exclude_unset=True, tags=["node"], responses=GUARDED)
async def list_tiers(request: Request) -> TierList:
    """The tiers, fastest first."""
    return TierList(tiers=_tiers(session_of(request)))


@router.get(
    "/v1/tiers/{tier}",
    response_model=TierRow,
    response_model_exclude_unset=True,
    tags=["node"],
    responses=GUARDED | problems(404),
)
async def show_tier(request: Request, tier: TierPath) -> TierRow:
    """Capacity, use, watermarks, hits, speed and health of a tier."""
    return _tier(session_of(request), tier)


@router.patch("/v1/tiers/{tier}", response_model=TierRow, response_model_exclude_unset=True, tags=["node"],
              responses=GUARDED | READS_BODY | problems(404, 409))  # fmt: skip
async def change_tier(request: Request, tier: TierPath, change: TierChange) -> TierRow:
    """Change a tier while it serves; a new capacity is reached step by step. Needs an admin. 409 for watermarks that
    contradict each other or those that are set, and for a capacity that this host has no memory for."""
    session = session_of(request)
    capacity_bytes = None if change.capacity is None else size_bytes(change.capacity)
    reply = wire.SetTier(0, tier, capacity_bytes, change.high_watermark, change.low_watermark)
    if capacity_bytes is not None and session.tenant.admin:
        _check_room(_tier(session, tier), capacity_bytes)
    try:
        await session.ask(reply)
    except InvalidRequest as error:
        raise Problem(409, str(error)) from error
    return _tier(session, tier)


@router.post("/v1/tiers/{tier}/drain", response_model=DrainResult, tags=["node"],
             responses=GUARDED | problems(404))  # fmt: skip
async def drain_tier(request: Request, tier: TierPath) -> DrainResult:
    """Empty a tier, of all tenants; what is worth it goes to the next lower one. Needs an admin."""
    visit_of(request).allow(SLOW_S)
    drained = await session_of(request).ask(wire.Drain(0, tier))
    return DrainResult(blocks=drained.blocks, left=drained.left)


@router.post("/v1/check", response_model=CheckResult, tags=["node"], responses=GUARDED)
async def check(request: Request) -> CheckResult:
    """Fsck of the live node. Needs an admin."""
    return CheckResult(problems=(await session_of(request).ask(wire.Check(0))).problems)


@router.get("/v1/stats", response_model=dict[str, Any], tags=["node"], responses=GUARDED)
async def stats(request: Request) -> dict[str, Any]:
    """What the node counts; an admin sees all tenants, others themselves."""
    values: dict[str, Any] = (await session_of(request).ask(wire.Stat(0))).values
    return values


@router.get("/healthz", response_model=Health, tags=["health"], responses=problems(500))
async def healthz() -> Health:
    """The process lives."""
    return Health(status="ok")


@router.get("/readyz", response_model=Health, tags=["health"], responses=problems(500, 503))
async def readyz(request: Request) -> Health:
    """All of the memory is in place, and the node is not going down."""
    if not node_of(request).is_ready:
        raise Problem(503, "the node is starting, resizing or stopping", code="not_ready", retry_after_s=RETRY_AFTER_S)
    return Health(status="ready")


@router.get("/metrics", response_class=Response, tags=["health"], responses={200: METRICS_BODY, **problems(500)})
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    body, media_type = request.app.state.exporter.render()
    return Response(body, media_type=media_type)


def size_bytes(capacity: int | str) -> int:
    """Of a number, or of text like "2GiB"."""
    if isinstance(capacity, int):
        return capacity
    match = QUANTITY.fullmatch(capacity)
    assert match is not None, "the schema's pattern is narrower"
    number, unit = match.groups()
    return int(float(number) * SIZES[unit or "B"])


def _tiers(session: Session) -> list[TierRow]:
    return [TierRow(**row) for row in tiers(session.store, session.upkeep, session.tenant)]


def _tier(session: Session, name: str) -> TierRow:
    for row in _tiers(session):
        if row.tier == name:
            return row
    raise NotFound(f"no tier {name!r}; there are {', '.join(row.tier for row in _tiers(session))}")


def _check_room(tier: TierRow, capacity_bytes: int) -> None:
    """Raises Problem for a capacity that would take more than the host has to give: nobody would survive that."""
    if tier.target_bytes is None or tier.slab_bytes is None or tier.tier not in (DRAM, NVME):
        return  # its capacity cannot be changed at all, or its medium has no more than it has
    most_bytes = tier.capacity_bytes + _available_bytes()
    what = "this host has memory"
    if tier.tier == NVME:
        punched_bytes = tier.medium["slabs_punched"] * tier.slab_bytes  # their room is free, and theirs
        most_bytes = tier.capacity_bytes - punched_bytes + tier.medium["filesystem_free_bytes"]
        what = "the disk has room"
    if capacity_bytes > max(most_bytes, tier.target_bytes):
        raise Problem(409, f"a capacity of {capacity_bytes} bytes; {what} for {most_bytes}")


def _available_bytes() -> int:
    """What the kernel says can be had without swapping."""
    lines = FilePath("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
