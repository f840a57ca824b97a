"""What the JSON bodies of the REST interface look like."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from kvstore.prefix import LIMITS, MAX_TEXT_BYTES, MAX_TOKEN, TERMS_PATTERN
from kvstore.wire_cluster import MOST_COPIES
from server.config import YEAR_S

KEY_PATTERN = "^[0-9a-fA-F]{32}([0-9a-fA-F]{4})?$"
CHECKSUM_PATTERN = "^[0-9a-fA-F]{16}$"
SIZE_PATTERN = r"^\d{1,15}(\.\d{1,3})? ?(B|KiB|MiB|GiB|TiB)?$"
NAME_PATTERN = "^[ -.0-~]{1,128}$"  # printable ASCII but '/'

EXAMPLE_KEY = "9f86d081884c7d659a2feaa0c55ad015"
EXAMPLE_CHECKSUM = "2d06800538d394c2"

MOST_LOAD_S = 3600
MOST = 2**53 - 1  # the largest integer that every JSON reader understands


def _integral(value: Any) -> Any:
    """JSON has one kind of number: 16.0 is 16."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_integral(values: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(values)
    except ValidationError:
        if not isinstance(values, list):
            raise
        return validate([_integral(value) for value in values])


Key = Annotated[str, Field(pattern=KEY_PATTERN, examples=[EXAMPLE_KEY])]
Token = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_TOKEN})]  # `chain` checks it
INTEGRAL = BeforeValidator(_integral)
Text = Annotated[str, Field(max_length=MAX_TEXT_BYTES)]
RequiredText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_BYTES)]
Terms = Annotated[str, Field(max_length=MAX_TEXT_BYTES, pattern=TERMS_PATTERN)]
Share = Annotated[float, Field(gt=0, le=1)]


class Body(BaseModel):
    """What a client sends: of the types it is documented to have, and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Answer(BaseModel):
    """What the node sends. Rows of the node's own say at least what is declared here."""

    model_config = ConfigDict(frozen=True, extra="allow")


def _limit(name: str) -> Any:
    low, high = LIMITS[name]
    return Field(ge=low, le=min(high, MOST))


class NamespaceFields(Body):
    """What gives the bytes of a block their meaning; see kvstore.prefix.Namespace. Text is at most 256 bytes."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
                    "dtype": "bfloat16",
                    "layout": "kv-layer-head-token-dim",
                    "block_tokens": 16,
                    "layers": 30,
                }
            ]
        }
    )

    model: RequiredText
    revision: Text = ""
    weights_epoch: Annotated[int, _limit("weights_epoch"), INTEGRAL] = 0
    dtype: RequiredText
    layout: RequiredText
    block_tokens: Annotated[int, _limit("block_tokens"), INTEGRAL]
    adapter: Text = ""
    hash: Literal["xxh3", "sha256"] = "xxh3"
    parts: Annotated[int, _limit("parts"), INTEGRAL] = 1
    layers: Annotated[int, _limit("layers"), INTEGRAL]
    block_bytes: Annotated[int, _limit("block_bytes"), INTEGRAL] = 0
    codec: Terms = ""
    compaction: Terms = ""


class ByKeys(Body):
    """Blocks by their keys, in the order of the chain."""

    keys: list[Key]


class ByTokens(Body):
    """Blocks by the prompt's token ids; a partial last block has no key."""

    tokens: Annotated[list[Token], WrapValidator(_all_integral), Field(examples=[[1, 4093, 198, 2683]])]


class EvictAll(Body):
    """Every block of the namespace."""

    all: Literal[True]


Ttl = Annotated[float, Field(gt=0, le=YEAR_S, examples=[3600])]
Hard = Annotated[bool, Field(description="Never evicted; otherwise only after all that is not pinned.")]


LoadSeconds = Annotated[float, Field(gt=0, le=MOST_LOAD_S, description="What would take longer is left out.")]
BelowDram = Annotated[Literal["nvme", "object"], Field(description="Which tier they are written into.")]
EvictThen = Annotated[bool, Field(description="They leave DRAM when they are there.")]

IN_ORDER = Field(union_mode="left_to_right")  # of a choice, the first that fits: trying all takes twice as long


class PromoteKeys(ByKeys):
    load_seconds: LoadSeconds = 30.0


class PromoteTokens(ByTokens):
    load_seconds: LoadSeconds = 30.0


class DemoteKeys(ByKeys):
    tier: BelowDram
    evict: EvictThen = False


class DemoteAll(EvictAll):
    tier: BelowDram
    evict: EvictThen = False


class PinKeys(ByKeys):
    hard: Hard = False
    ttl_seconds: Ttl


class PinTokens(ByTokens):
    hard: Hard = False
    ttl_seconds: Ttl


class TierChange(Body):
    """What is absent stays as it is. Capacity is rounded down to whole slabs."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"capacity": "2GiB", "high_watermark": 0.9}]})

    capacity: Annotated[int, Field(ge=0), INTEGRAL] | Annotated[str, Field(pattern=SIZE_PATTERN)] | None = None
    high_watermark: Share | None = None
    low_watermark: Share | None = None


class ProblemDocument(Answer):
    """RFC 9457. `code` is that of docs/errors.md, or one of HTTP's own in docs/rest.md."""

    type: Annotated[str, Field(examples=["urn:cairn:problem:not_found"])]
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    detail: str
    code: str
    retry_after: Annotated[float | None, Field(description="Seconds.")] = None
    errors: list["InvalidField"] | None = None
    differences: Annotated[list[str] | None, Field(description="Of two namespaces, a field each.")] = None


class InvalidField(Answer):
    location: str
    message: str


class StoredBlock(Answer):
    key: str
    bytes: int
    checksum: Annotated[str, Field(description="xxh3_64 of the bytes, in hex.")]


class BlockRow(Answer):
    key: str
    parent: Annotated[str, Field(description="Key of the block before it; empty at a chain's start.")]
    tier: str
    bytes: int
    state: Annotated[str, Field(description="written, or allocated while it is being written.")]
    checksum: str
    layers: int
    holders: Annotated[int, Field(description="Leases, hard pins, and its writer.")]


class BlockList(Answer):
    blocks: list[BlockRow]
    next: Annotated[str | None, Field(description="What to give as `after` to go on; null at the end.")]


class NamespaceRow(Answer):
    name: str
    names: Annotated[list[str], Field(description="All names of the same fields.")]
    number: int
    root: Annotated[str, Field(description="The key before the first block, in hex.")]
    fingerprint: str
    blocks: int
    hit_blocks: int
    missed_blocks: int
    fields: dict[str, Any]


class NamespaceList(Answer):
    namespaces: list[NamespaceRow]


class MatchResult(Answer):
    matched_blocks: int
    matched_tokens: int
    keys: Annotated[list[str], Field(description="Of the whole chain: the first `matched_blocks` are here.")]


class ExistsResult(Answer):
    exists: Annotated[list[bool], Field(description="In the order of the keys.")]


class EvictResult(Answer):
    blocks: int
    freed_bytes: int


class PromoteResult(Answer):
    loading: Annotated[int, Field(description="Blocks (parts) on their way.")]


class DemoteResult(Answer):
    written: Annotated[int, Field(description="Blocks that the tier has now and had not.")]
    evicted: int


class DrainResult(Answer):
    blocks: Annotated[int, Field(description="That went.")]
    left: Annotated[int, Field(description="Held by somebody, or their slab is.")]


class PinResult(Answer):
    pin_id: int
    blocks: Annotated[int, Field(description="How many from the first are here, and pinned.")]


class NothingPinned(Answer):
    blocks: Literal[0] = 0


class PinRow(Answer):
    pin_id: int
    hard: bool
    blocks: int
    bytes: int
    expires_in_seconds: float


class PinList(Answer):
    pins: list[PinRow]


class ExplainRow(Answer):
    key: str
    hit: bool
    tier: str
    reason: str
    bytes: int


class ExplainResult(Answer):
    blocks: list[ExplainRow]


class SizeClass(Answer):
    slot_bytes: int
    slabs: int
    slots: int
    used: int


class Traffic(Answer):
    """One direction of a tier since the node started; rates are 0 until something was measured."""

    bytes: int
    requests: int
    bytes_per_s: Annotated[float, Field(description="Of all requests together, while there were any.")]
    request_s: Annotated[float, Field(description="Seconds that one request takes.")]
    queued_bytes: int


class TierRow(Answer):
    """What a tier has no notion of is absent: the object tier has no slabs, DRAM no traffic."""

    tier: str
    capacity_bytes: Annotated[int, Field(description="Of the slabs there are now; of a bucket what is set, 0: any.")]
    target_bytes: Annotated[int | None, Field(description="The capacity it is being brought to.")] = None
    used_bytes: int
    blocks: int
    draining: Annotated[int | None, Field(description="Gone for new readers and still held by old ones.")] = None
    high_watermark: float | None = None
    low_watermark: float | None = None
    slab_bytes: int | None = None
    slabs: dict[str, int] | None = None
    medium: dict[str, Any]
    classes: list[SizeClass] | None = None
    promoted_blocks: Annotated[int, Field(description="That came into DRAM from here.")]
    demoted_blocks: Annotated[int, Field(description="That were written here from above.")]
    hit_blocks: Annotated[int | None, Field(description="Blocks read that this tier had; null but for an admin.")]
    hit_ratio: Annotated[float | None, Field(description="Of all blocks asked for; null while there are none.")]
    write_amplification: Annotated[float | None, Field(description="Bytes written by bytes admitted.")]
    read: Traffic | None = None
    write: Traffic | None = None
    health: Annotated[str | None, Field(description="Empty while all is well.")] = None
    is_recovering: Annotated[bool | None, Field(description="What an earlier start left is being taken up.")] = None


class TierList(Answer):
    tiers: list[TierRow]


class CheckResult(Answer):
    problems: Annotated[list[str], Field(description="Empty when all is well.")]


class ClusterCheck(CheckResult):
    nodes: Annotated[list[str], Field(description="Those that were asked.")]


class DrainNode(Body):
    """Which node of the cluster."""

    node: Annotated[str, Field(pattern=NAME_PATTERN, examples=["node-3"])]


class Copies(Body):
    """How many, and of which namespace."""

    namespace: Annotated[str, Field(min_length=1, examples=["llama"])]
    copies: Annotated[int, Field(ge=1, le=MOST_COPIES, description="Nodes that shall have each block."), INTEGRAL]


class ReplicateKeys(ByKeys, Copies):
    """Of these blocks."""


class ReplicateTokens(ByTokens, Copies):
    """Of a prompt's blocks."""


class ReplicateAll(EvictAll, Copies):
    """Of all that the node has of the namespace."""


class ReplicateResult(Answer):
    blocks: Annotated[int, Field(description="That this node has of those.")]
    copied: Annotated[int, Field(description="Copies made.")]
    short: Annotated[int, Field(description="Blocks that still have fewer copies.")]


class ClusterNode(Answer):
    """What is not known here of a node is absent or null."""

    name: str
    epoch: Annotated[int, Field(description="When it was started, in ms of its clock.")]
    condition: Annotated[str, Field(description="serving, or draining.")] = ""
    address: str = ""


class Cluster(Answer):
    node: Annotated[str, Field(description="The one that was asked.")]
    trouble: Annotated[str, Field(description="Of its membership; empty while all is well.")]
    nodes: list[ClusterNode]


class Whereabout(Answer):
    key: str
    nodes: Annotated[dict[str, list[str]], Field(description="The tiers of each node that has it.")]


class WhereaboutsResult(Answer):
    blocks: list[Whereabout]


class Health(Answer):
    status: str
