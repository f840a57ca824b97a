"""Prefill and decode apart as vLLM does it, and our own workers: one after the other, with kv_transfer_params."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from kvstore.errors import ProtocolError
from server.gateway.asked import CHAT, Asked
from server.gateway.asking import Decision
from server.gateway.engines import EngineFailed, Engines, Opened, with_ids
from server.gateway.events import cached_of

REMOTE_DECODE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
NOT_OF_A_PREFILL: Final = frozenset({"stream_options", "min_tokens"})  # of one token they are refused


def prefill_body(wanted: Asked) -> dict[str, Any]:
    """The request as the prefill instance gets it: the same prompt, one token, and a promise that others go on."""
    body = {name: value for name, value in wanted.body.items() if name not in NOT_OF_A_PREFILL}
    body |= {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
    if wanted.path == CHAT or "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return body


@asynccontextmanager
async def prefill_then_decode(
    engines: Engines, decision: Decision, wanted: Asked, attempt_id: str, prefilled: Callable[[], Awaitable[None]]
) -> AsyncIterator[Opened]:
    """The decode instance's answer, once the prefill instance has done its part.

    Raises EngineFailed, EngineRefused, and what `prefilled` raises, which is called in between.
    """
    answer = await engines.ask(decision.prefill, wanted, prefill_body(wanted), attempt_id)
    try:
        found = answer.json()
    except ProtocolError as error:
        raise EngineFailed(decision.prefill, str(error), answer) from error
    await prefilled()

    async def cached_tokens() -> int | None:
        return cached_of(found)

    params = found.get("kv_transfer_params") if isinstance(found, dict) else None
    body = {**with_ids(decision.decode, wanted), **({"kv_transfer_params": params} if params else {})}
    async with engines.stream(decision.decode, wanted, body, attempt_id) as chunks:
        yield Opened(decision.decode, chunks, cached_tokens)
