"""What a session's client may map: its tenant's index and slabs, its own ring, and slabs in the memory of a GPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import Forbidden, InvalidRequest, NotFound
from kvstore.lifting import Lifting
from kvstore.region import Region
from kvstore.types import DRAM, HBM, TierName

if TYPE_CHECKING:
    from server.session import Session


class Lent(NamedTuple):
    """Memory to map, whether the client may write there, and handles of what has no descriptor."""

    regions: list[Region]
    writable: list[bool]
    handles: tuple[bytes, ...] = ()


def lent(session: "Session", slab_ids: Sequence[int], tier: str) -> Lent:
    """Slabs of "hbm", else of DRAM; for none, the tenant's published index and the session's ring.

    NotFound for slabs that are gone or another tenant's; else as `lifting_of`.
    """
    if tier:
        hbm = lifting_of(session, tier).hbm
        _check_owner(session, slab_ids, HBM)
        exported = [hbm.export(slab_id) for slab_id in slab_ids]
        regions = [slab for slab in exported if not isinstance(slab, bytes)]
        return Lent(regions, [False] * len(regions), tuple(slab for slab in exported if isinstance(slab, bytes)))
    if not slab_ids:
        exports = session.store.exports
        return Lent([exports.index(session.tenant), exports.ring(session.owner, session.tenant)], [False, True])
    _check_owner(session, slab_ids, DRAM)
    regions = [session.store.dram.region(slab_id) for slab_id in slab_ids]
    return Lent(regions, [session.tenant.may_write] * len(regions))


def lifting_of(session: "Session", tier: str) -> Lifting:
    """What brings blocks to where this client can map them. InvalidRequest, Forbidden where it cannot or may not."""
    lifting = session.store.lifting
    if tier != HBM or lifting is None or session.path != "shared":
        raise InvalidRequest(f"there is no tier {tier!r} here that this client can map")
    if not lifting.hbm.may_export(to_writer=session.tenant.may_write):
        raise Forbidden("who maps a slab on this GPU sees and can write the whole pool")
    return lifting


def _check_owner(session: "Session", slab_ids: Sequence[int], tier: TierName) -> None:
    slabs = session.store.table.tiers[tier].pool.slabs
    for slab_id in slab_ids:
        slab = slabs.get(slab_id)
        if slab is None or slab.tenants != {session.tenant.name}:
            raise NotFound(f"no slab {slab_id} of tenant {session.tenant.name}")
