"""What the Conductor is told and asked over HTTP, decoded strictly: a refusal names the field."""

import re
from array import array
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvstore.prefix import HashName, Namespace
from scheduler.fleet import Role
from server.rest.problems import Problem, invalid

MOST_OUTPUT = 1 << 30
MOST_EXPECTED = 4096  # of that: a limit is no plan, and one client's must not look like the load of a thousand
MOST_EXCLUDED = 64
MOST_SAMPLES = 1024  # of one heartbeat
COMPLAINT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<where>[^`]*)`)?\Z", re.DOTALL)

Text = Annotated[str, Meta(max_length=256)]
Id = Annotated[str, Meta(max_length=128)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}\Z")]
Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Tokens = Annotated[int, Meta(ge=0, le=MOST_OUTPUT)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Number = Annotated[float, Meta(ge=0, le=1e12)]
Rate = Annotated[float, Meta(ge=0, le=1e15)]
Tree = TypeVar("Tree", bound=msgspec.Struct)


class RouteQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request without its prompt, as in a query string. deadline_ms: from now. exclude: instances not to take."""

    model: Text = ""
    id: Id = ""
    output_tokens: Annotated[int, Meta(ge=1, le=MOST_OUTPUT)] | None = None
    tenant: Annotated[str, Meta(min_length=1, max_length=64)] = "default"
    session: Text = ""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    deadline_ms: Annotated[float, Meta(ge=0, le=86_400_000)] | None = None
    exclude: Annotated[list[Name], Meta(max_length=MOST_EXCLUDED)] = []


class RouteBody(RouteQuery, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """With its prompt."""

    tokens: list[Token]


class NamedNamespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A namespace of the store and the name that it has at the instance's node."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    fields: Namespace


class InstanceBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine that registers.

    root: hex of its namespace's root; a namespace may say block_tokens and hash in its place. Rates: bytes a second
    from its node's tiers and from other nodes. prefill, decode: coefficients of its costs as it measured them.
    """

    name: Name
    role: Role = Role.BOTH
    model: Text
    engine: Literal["cairn", "vllm", "sglang"]
    address: Annotated[str, Meta(min_length=1, max_length=512)]
    node: Annotated[str, Meta(max_length=64)] = ""
    node_address: Text = ""
    block_tokens: Annotated[int, Meta(ge=0, le=65_536)] = 0
    hash: HashName = "xxh3"
    root: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""
    namespace: NamedNamespace | None = None
    events: Text = ""
    bootstrap_host: Text = ""
    bootstrap_port: Port = 0
    kv_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    dram_rate: Rate | None = None
    nvme_rate: Rate | None = None
    network_rate: Rate | None = None
    prefill: tuple[Number, Number, Number, Number] | None = None
    decode: tuple[Number, Number, Number] | None = None
    decode_tokens: Tokens = 0
    decode_batch: Tokens = 0
    grid_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 1


class HeartbeatBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an instance says of its work. prefills: (tokens, cached, seconds) each; steps: (batch, context, seconds)."""

    prefill_tokens: Tokens
    decode_batch: Tokens
    decode_context: Tokens
    prefills: Annotated[list[tuple[Tokens, Tokens, Number]], Meta(max_length=MOST_SAMPLES)] = []
    steps: Annotated[list[tuple[Tokens, Tokens, Number]], Meta(max_length=MOST_SAMPLES)] = []


class StateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How far a request is. instance: the one that failed."""

    state: Literal["prefilled", "finished", "failed", "cancelled"]
    instance: Text = ""


class RoleBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an instance takes from now on."""

    role: Role


_ROUTE = msgspec.json.Decoder(RouteBody)


def route_body(body: bytes) -> tuple[RouteQuery, NDArray[np.uint32]]:
    """Of JSON. Raises Problem."""
    try:
        asked = _ROUTE.decode(body)
    except msgspec.DecodeError as error:
        raise problem_of(error) from error
    return asked, np.frombuffer(array("I", asked.tokens), dtype=np.uint32)  # a third of np.array's time


def route_octets(body: bytes, query: list[tuple[str, str]]) -> tuple[RouteQuery, NDArray[np.uint32]]:
    """Of a body of u32 little-endian, the rest in the query string; `exclude` may be there several times."""
    if len(body) % 4:
        raise invalid("tokens", f"{len(body)} bytes are no u32 each")
    fields: dict[str, Any] = {}
    for name, value in query:
        if name == "exclude":
            fields.setdefault(name, []).extend(value.split(","))
        elif name in fields:
            raise invalid(name, "is there twice")
        else:
            fields[name] = value
    try:
        asked = msgspec.convert(fields, RouteQuery, strict=False)
    except msgspec.ValidationError as error:
        raise problem_of(error) from error
    return asked, np.frombuffer(body, dtype="<u4")


def decoded(body: bytes, tree: type[Tree]) -> Tree:
    """Raises Problem: 400 for what is no JSON, 422 for what does not fit."""
    try:
        return msgspec.json.decode(body, type=tree)
    except msgspec.DecodeError as error:
        raise problem_of(error) from error


def problem_of(error: msgspec.DecodeError) -> Problem:
    """Says where and what, and not what was sent: a prompt is nobody's business."""
    if not isinstance(error, msgspec.ValidationError):
        return Problem(400, f"the body is no JSON: {error}")
    match = COMPLAINT.match(str(error))
    assert match is not None
    what, where = match["what"], (match["where"] or "").removeprefix("$").lstrip(".")
    unknown = re.search(r"field `([^`]*)`", what)
    return invalid(where or (unknown[1] if unknown else "body"), what)
