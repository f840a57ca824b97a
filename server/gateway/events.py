"""Server-sent events of an OpenAI stream: cut apart, passed on as they are, and read where it matters."""

import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from kvstore.errors import ProtocolError

EVENT_BYTES: Final = 32 << 20  # an event with a long prompt's token ids
DONE: Final = b"data: [DONE]\n\n"
BLANK: Final = re.compile(rb"\r?\n\r?\n")
# A quote inside of a JSON string has a backslash before it, so this is never in one.
IDS: Final = re.compile(rb',\s*"(?:prompt_)?token_ids"\s*:\s*(?:null|\[[0-9,\s]*\])')


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Each event with the blank line that ends it. What follows the last of those is no event, and is left out.

    Raises ProtocolError for an event over EVENT_BYTES, and what `chunks` raises.
    """
    waiting = b""
    async for chunk in chunks:
        begin = max(0, len(waiting) - 3)  # a blank line may have begun with the last three bytes
        waiting += chunk
        end = 0
        for match in BLANK.finditer(waiting, begin):
            yield waiting[end : match.end()]
            end = match.end()
        waiting = waiting[end:]
        if len(waiting) > EVENT_BYTES:
            raise ProtocolError(f"an event has more than {EVENT_BYTES} bytes")


def payload(event: bytes) -> bytes:
    """What an event says: its data lines."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and b"\r" not in event:
        return event[6:-2]  # as all engines write them
    lines = event.replace(b"\r\n", b"\n").split(b"\n")
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


def document(event: bytes) -> Mapping[str, Any] | None:
    """The JSON object of an event; None when it has none."""
    try:
        found = json.loads(payload(event))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def event(found: Mapping[str, Any]) -> bytes:
    """An event that says this."""
    return b"data: " + json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


def without_ids(raw: bytes) -> bytes:
    """An event, or any JSON, without the token ids that nobody asked for."""
    return IDS.sub(b"", raw) if b"token_ids" in raw else raw


def error_in(raw: bytes) -> Mapping[str, Any] | None:
    """What an engine says when it fails in the middle of a stream: {"error": {...}}."""
    if b'"error"' not in raw[:64]:
        return None
    found = (document(raw) or {}).get("error")
    return found if isinstance(found, dict) else None


def with_cached(usage: dict[str, Any], cached_tokens: int | None) -> dict[str, Any]:
    """The usage with the prefill's cached tokens; without any where the prefill did not say."""
    details = usage.get("prompt_tokens_details")
    if cached_tokens is None:
        return {**usage, "prompt_tokens_details": None} if details else usage
    told = details if isinstance(details, dict) else {}
    return {**usage, "prompt_tokens_details": {**told, "cached_tokens": cached_tokens}}


def cached_of(answer: Any) -> int | None:
    """usage.prompt_tokens_details.cached_tokens of an answer or of a stream's last event."""
    for name in ("usage", "prompt_tokens_details", "cached_tokens"):
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer if isinstance(answer, int) else None
