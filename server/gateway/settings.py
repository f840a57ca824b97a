"""The settings of a gateway: one frozen tree, checked as a whole."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvstore.errors import ConfigError
from server.config import (
    HOST_PORT,
    TOKEN_CHARACTERS,
    Bytes,
    Count,
    Listen,
    LogSettings,
    Seconds,
    Secret,
    TenantSettings,
    Threads,
    Timeout,
)
from server.sources import Given, build, collect, describe, show

URL: Final = rf"https?://{HOST_PORT}"
Url = Annotated[str, Meta(pattern=rf"^{URL}\Z", extra={"expected": "a URL like http://127.0.0.1:7410"})]


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where it listens, whom it asks, and how long it waits for whom."""

    listen: Listen = "127.0.0.1:8000"
    conductor: Url = "http://127.0.0.1:7410"
    conductor_token: Secret = ""
    engine_token: Secret = ""  # what engines want as a bearer token; "": none
    tokenizer: str = ""  # a folder or name for transformers; "": an engine's /tokenize
    tries: Threads = 4  # instances or pairs that one request is sent to: three may die under it
    limit: Count = 1024  # requests under way; over it clients get 503
    body_bytes: Bytes = 64 << 20  # of a request: images come inline
    reports: Count = 10_000  # that wait for the Conductor at most; a request makes two
    refresh: Timeout = 1.0  # between two looks at the instances, and for a Conductor that was lost
    connect_timeout: Timeout = 2.0
    route_timeout: Timeout = 2.0  # a route takes milliseconds
    tokenize_timeout: Timeout = 2.0  # 128k tokens take some 0.2 s
    first_token_timeout: Timeout = 300.0  # queue and prefill: ten times the usual SLO
    idle_timeout: Timeout = 60.0  # between two pieces of a stream
    request_timeout: Timeout = 1800.0  # of a whole answer
    client_timeout: Timeout = 60.0  # for a client to send its body, and to take each piece
    drain_seconds: Seconds = 30.0  # after SIGTERM, for requests under way


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set. `tenants` are the store's: without any, all clients are the tenant `default`."""

    gateway: GatewaySettings = GatewaySettings()
    tenants: tuple[TenantSettings, ...] = ()
    log: LogSettings = LogSettings()


def load(path: Path | None, environ: Mapping[str, str], options: Sequence[str]) -> GatewayConfig:
    """The checked settings of all sources (see `server.sources`). Raises ConfigError."""
    given = collect(GatewayConfig, path, environ, options)
    config = build(GatewayConfig, given)
    for rule, name in _contradictions(config):
        raise ConfigError(f"{rule}: {name} ({_origin(given, name)})")
    return config


def defaults() -> dict[str, str]:
    """Every setting and its default, for people."""
    return {name: show(default, hint) for name, hint, default in describe(GatewayConfig)}


def _origin(given: Mapping[str, Given], name: str) -> str:
    return given[name].origin if name in given else "default"


def _contradictions(config: GatewayConfig) -> Iterator[tuple[str, str]]:
    """The rules that are broken, each with the setting that does it."""
    if not config.gateway.listen:
        yield "a gateway that listens nowhere is of no use", "gateway.listen"
    if not config.gateway.body_bytes:
        yield "a body must have room for a byte", "gateway.body_bytes"
    tokens = [tenant.token for tenant in config.tenants]
    for index, token in enumerate(tokens):
        if len(token) < TOKEN_CHARACTERS:
            yield f"a token must have at least {TOKEN_CHARACTERS} characters", f"tenants.{index}.token"
        if token in tokens[:index]:
            yield "two tenants may not share a token", f"tenants.{index}.token"
