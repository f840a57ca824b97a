"""The OpenAPI document: what every operation can answer, beyond what FastAPI finds out by itself."""

from typing import Annotated, Any

from fastapi import Query
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from server.rest.models import (
    CHECKSUM_PATTERN,
    EXAMPLE_CHECKSUM,
    EXAMPLE_KEY,
    KEY_PATTERN,
    MOST_LOAD_S,
    ProblemDocument,
)
from server.rest.problems import MEDIA_TYPE

Responses = dict[int | str, dict[str, Any]]

DESCRIPTION = """
A node's blocks for whoever speaks HTTP: operators, tools, engines without the SDK.

Everything under `/v1` needs `Authorization: Bearer <token>`. Every refusal is a problem document (RFC 9457) whose
`code` says what happened; 405 comes with `Allow`, and what can be asked again later with `Retry-After`.
"""
Parent = Annotated[
    str | None, Query(pattern=KEY_PATTERN, description="Key of the block before the first, where a chain goes on.")
]
BINARY = {"schema": {"type": "string", "format": "binary", "minLength": 1}}

ETAG = {
    "ETag": {
        "description": "xxh3_64 of the whole block's bytes, in hex.",
        "required": True,
        "schema": {"type": "string", "pattern": '^"[0-9a-f]{16}"$'},
        "example": f'"{EXAMPLE_CHECKSUM}"',
    }
}
PERHAPS_ETAG = {"ETag": ETAG["ETag"] | {"required": False}}
RANGES = {"Accept-Ranges": {"required": True, "schema": {"type": "string", "const": "bytes"}}}
CONTENT_RANGE = {"Content-Range": {"required": True, "schema": {"type": "string", "pattern": "^bytes "}}}


def _parameter(place: str, name: str, description: str, pattern: str | None = None) -> dict[str, Any]:
    schema = {"type": "string"} | ({"pattern": pattern} if pattern else {})
    return {
        "in": place,
        "name": name,
        "description": description,
        "required": place == "path",
        "schema": schema,
    }


PATH = [
    _parameter("path", "ns", "Name of the namespace."),
    _parameter("path", "key", "The block's key, and the u16 number of the part where there are parts.", KEY_PATTERN)
    | {"example": EXAMPLE_KEY},
]
TIER = _parameter("query", "tier", "From this tier only.")
LOAD = _parameter(
    "query", "load_s", "Seconds that loading it from a lower tier may take; half of the request's at most."
)
LOAD["schema"] = {"type": "number", "minimum": 0, "maximum": MOST_LOAD_S}
WHERE = {"X-Cairn-Tier": {"description": "The fastest tier that has it.", "schema": {"type": "string"}}}
MATCHES = _parameter("header", "If-None-Match", "`*` or ETags: 304 when the block has one of them.")
DELETION: dict[str, Any] = {"parameters": [*PATH, TIER]}
IF_NONE_MATCH: dict[str, Any] = {"parameters": [*PATH, MATCHES]}
RANGED: dict[str, Any] = {
    "parameters": [
        *PATH,
        LOAD,
        _parameter("query", "parent", "Key of the block before it: other nodes are asked by it.", KEY_PATTERN),
        MATCHES,
        _parameter("header", "Range", "One range of bytes; several are answered with all of it."),
        _parameter("header", "If-Range", "ETag without which Range does not count."),
    ]
}
UPLOAD: dict[str, Any] = {
    "parameters": [
        *PATH,
        _parameter("query", "parent", "Key of the block before this one; none for a chain's first.", KEY_PATTERN),
        _parameter("header", "X-Cairn-Checksum", "xxh3_64 of the body in hex: checked if given.", CHECKSUM_PATTERN),
    ],
    "requestBody": {"required": True, "content": {"application/octet-stream": BINARY}},
}

RETRY_AFTER = {
    "Retry-After": {
        "description": "Whole seconds; `retry_after` in the body is exact.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    }
}
CHALLENGE = {"WWW-Authenticate": {"required": True, "schema": {"type": "string", "pattern": "^Bearer "}}}
HEADERS: dict[int, dict[str, Any]] = {401: CHALLENGE, 416: CONTENT_RANGE, 429: RETRY_AFTER, 503: RETRY_AFTER}
MEANINGS = {
    400: "The request could not be parsed.",
    401: "The token is missing or wrong.",
    403: "The token's tenant may not do this.",
    404: "It is not here.",
    408: "The body did not come in time.",
    409: "It contradicts what is here.",
    411: "A block needs a Content-Length.",
    413: "The body is too large.",
    416: "The range lies outside of the block.",
    422: "The request does not fit the schema, or makes no sense.",
    429: "A limit of this tenant was reached.",
    500: "The node failed at this request.",
    503: "The node has too much to do, or is not ready.",
    507: "No room: the tier is full (`tier_full`), or the tenant's quota is used up (`quota_exceeded`).",
}


def problems(*statuses: int) -> Responses:
    """That an operation can answer with these problems."""
    return {
        status: {
            "description": MEANINGS[status],
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
            "headers": HEADERS.get(status, {}),
        }
        for status in statuses
    }


GUARDED = problems(401, 403, 422, 429, 500, 503)  # any operation under /v1
READS_BODY = problems(400, 408, 413)


def by_name(route: APIRoute) -> str:
    """Operations are called what their functions are called."""
    return route.name


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Add what FastAPI cannot know: the problem's schema, who needs a token, and that HEAD has no bodies."""
    _, definitions = models_json_schema(
        [(ProblemDocument, "serialization")], ref_template="#/components/schemas/{model}"
    )
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "The token of a tenant."}
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["security"] = [{"token": []}] if path.startswith("/v1/") else []
            if method == "head":
                for response in operation["responses"].values():
                    response.pop("content", None)
    return document


def limit_block_bytes(document: dict[str, Any], slab_bytes: int) -> None:
    """Say how large a block can be on this node."""
    fields = document["components"]["schemas"]["NamespaceFields"]["properties"]
    fields["block_bytes"]["maximum"] = slab_bytes
