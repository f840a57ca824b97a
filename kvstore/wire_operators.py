"""Messages of operators: tiers, pins, deletion, explanation, what the node says of itself."""

from typing import Any

from kvstore.message import Message


class Promote(Message, frozen=True, tag="promote"):
    """Begin to load what of these blocks lower tiers have, 1,024 at most, and do not wait for it."""

    namespace: int
    keys: bytes
    load_ms: int
    parent: bytes = b""


class Promoted(Message, frozen=True, tag="promoted"):
    loading: int  # blocks (parts) on their way


class Demote(Message, frozen=True, tag="demote"):
    """Write blocks into a lower tier: those of `keys`, or all of the namespace with `whole`. With `evict` they go from
    DRAM then."""

    namespace: int
    keys: bytes
    whole: bool
    tier: str
    evict: bool


class Demoted(Message, frozen=True, tag="demoted"):
    written: int  # blocks that the tier has now and had not
    evicted: int


class Drain(Message, frozen=True, tag="drain"):
    """Empty a tier: what is worth it goes to the next lower one; or a node: what only it has goes to others.

    Needs an admin.
    """

    tier: str
    node: str = ""


class Drained(Message, frozen=True, tag="drained"):
    blocks: int
    left: int  # held by somebody, or its slab is


class Evict(Message, frozen=True, tag="evict"):
    """Delete blocks by key, or all of the namespace with `whole`; from one tier only if it is named."""

    namespace: int
    keys: bytes
    whole: bool = False
    tier: str = ""


class Evicted(Message, frozen=True, tag="evicted"):
    blocks: int
    freed_bytes: int


class Pin(Message, frozen=True, tag="pin"):
    """Keep the prefix of `keys` that is here: `hard` never goes, soft goes last."""

    namespace: int
    keys: bytes
    hard: bool
    ttl_ms: int


class Pinned(Message, frozen=True, tag="pinned"):
    pin_id: int  # 0 where nothing was there to pin
    blocks: int


class Unpin(Message, frozen=True, tag="unpin"):
    pin_id: int


class Explain(Message, frozen=True, tag="explain"):
    """Why these blocks would hit or miss. With `tokens` (u32 each) other namespaces are looked at too."""

    namespace: int
    keys: bytes
    tokens: bytes = b""


class Explained(Message, frozen=True, tag="explained"):
    blocks: list[dict[str, Any]]


class List(Message, frozen=True, tag="list"):
    """Blocks of a namespace, in no order but a stable one, after the key `after` (empty: from the start)."""

    namespace: int
    after: bytes
    limit: int


class Listed(Message, frozen=True, tag="listed"):
    blocks: list[dict[str, Any]]
    more: bool


class Stat(Message, frozen=True, tag="stat"):
    """What the node says of itself, of the tenant's namespaces, of its tiers."""


class Stats(Message, frozen=True, tag="stats"):
    values: dict[str, Any]


class SetTier(Message, frozen=True, tag="set_tier"):
    """Change a tier while it serves. None leaves a value as it is. Needs an admin."""

    tier: str
    capacity_bytes: int | None = None
    high_watermark: float | None = None
    low_watermark: float | None = None


class Check(Message, frozen=True, tag="check"):
    """Fsck of the live node, or of the whole cluster. Needs an admin."""

    cluster: bool = False


class Checked(Message, frozen=True, tag="checked"):
    problems: list[str]
