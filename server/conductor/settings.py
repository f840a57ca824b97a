"""The settings of `cairn conductor`: one frozen tree, checked as a whole."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from engine_client.address import parse_address
from kvstore.errors import ConfigError
from server.config import (
    TOKEN_CHARACTERS,
    Bytes,
    Count,
    Entries,
    Listen,
    LogSettings,
    Rate,
    Seconds,
    Secret,
    Share,
    Timeout,
)
from server.sources import build, collect, describe, show

NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
NODE: Final = rf"{NAME}=[^,=\s]+"
WEIGHT: Final = rf"{NAME}=(\d{{1,6}}(\.\d{{1,6}})?)"
LEAST_TIMEOUT_S: Final = 0.05  # of a heartbeat: below it the beats themselves would be the load

Nodes = Annotated[
    str,
    Meta(
        pattern=rf"^({NODE}(,{NODE})*)?\Z", extra={"expected": "name=tcp://host:port with commas between, or nothing"}
    ),
]
Weights = Annotated[
    str, Meta(pattern=rf"^({WEIGHT}(,{WEIGHT})*)?\Z", extra={"expected": "tenant=2,other=1, or nothing"})
]
PolicyName = Literal["kvcache_centric", "prefix_affinity", "least_loaded", "round_robin", "random"]
AdmissionName = Literal["none", "baseline", "early", "predictive"]


class ConductorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go, and what is promised to them."""

    listen: Listen = "127.0.0.1:7410"  # no token guards it at first, so nobody else's host reaches it
    token: Secret = ""  # "": everybody who reaches `listen` may ask
    policy: PolicyName = "kvcache_centric"
    admission: AdmissionName = "predictive"  # a request that would miss its SLO costs others theirs
    ttft_slo: Timeout = 30.0  # what Mooncake promised on long prompts
    tbt_slo: Timeout = 0.1  # ten tokens a second: faster than people read
    work_weight: Rate = 2.0  # of the seconds to compute a prompt, beside the time to its first token, on a busy fleet
    balancing_threshold: Rate = 1.2  # how many times the local prefix another node's must be, to be pulled
    session_slack: Rate = 0.1  # how much longer a request may wait where its session was than at the best place
    collocate_below: Rate = 0.1  # share of its time an instance may prefill and still decode the same; 0: never
    fair_from: Share = 0.5  # predicted TTFT over its SLO, from which tenants are held to their shares
    fair_slack: Rate = 1.25  # how many times its share a tenant may use even then
    low_priority_share: Share = 0.5  # of the SLOs, for priorities below 0: those are refused first
    heartbeat: Timeout = 1.0  # three without a word and an instance is gone: a crash costs three seconds of routes
    nodes: Nodes = ""  # store nodes to follow beside those that instances name
    node_token: Secret = ""  # what store nodes are asked with
    node_ca_file: str = ""  # of their certificates; "": the system's
    forget_after: Seconds = 60.0  # that a node is out of reach: longer than a restart, shorter than a repair
    index_blocks: Count = 20_000_000  # that are known at most: 1.2 GB at 60 bytes
    body: Bytes = 16 << 20  # of a request: 2 M tokens in JSON, 4 M as they are
    inflight: Count = 100_000  # requests that are under way at most
    hints: Entries = 64  # loads ahead that nodes are asked for at a time; 0: none
    shares: Weights = ""  # of tenants when the fleet is busy; who is not named has weight 1


class ScalingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the scaling advice keeps to."""

    prefill_min: Count = 1
    prefill_max: Count = 64
    decode_min: Count = 1
    decode_max: Count = 64
    prefill_utilisation: Share = 0.7  # of an instance: above it queues grow faster than load
    decode_utilisation: Share = 0.8  # nothing queues in a batch, but contexts grow
    hold: Seconds = 300.0  # before one goes: starting an engine again takes minutes


class ConductorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set. Sizes are in bytes and durations in seconds."""

    conductor: ConductorSettings = ConductorSettings()
    scaling: ScalingLimits = ScalingLimits()
    log: LogSettings = LogSettings()


def load(path: Path | None, environ: Mapping[str, str], options: Sequence[str]) -> ConductorConfig:
    """The checked settings of all sources (see `server.sources`). Raises ConfigError."""
    given = collect(ConductorConfig, path, environ, options)
    config = build(ConductorConfig, given)
    for rule, name in _contradictions(config):
        origin = given[name].origin if name in given else "default"
        raise ConfigError(f"{rule}: {name} ({origin})")
    return config


def defaults() -> dict[str, str]:
    """Every setting and its default, for people."""
    return {name: show(default, hint) for name, hint, default in describe(ConductorConfig)}


def node_addresses(nodes: str) -> dict[str, str]:
    """{"a": "tcp://10.0.0.1:7401"} of "a=tcp://10.0.0.1:7401"."""
    return dict(pair.split("=", 1) for pair in nodes.split(",")) if nodes else {}


def weights(shares: str) -> dict[str, float]:
    """{"a": 2.0} of "a=2"."""
    pairs = (pair.split("=", 1) for pair in shares.split(",")) if shares else ()
    return {name: float(weight) for name, weight in pairs}


def _contradictions(config: ConductorConfig) -> Iterator[tuple[str, str]]:
    """The rules that are broken, each with the name of the setting that does."""
    conductor, scaling = config.conductor, config.scaling
    if not conductor.listen:
        yield "a Conductor that listens nowhere is of no use", "conductor.listen"
    if 0 < len(conductor.token) < TOKEN_CHARACTERS:
        yield f"a token must have at least {TOKEN_CHARACTERS} characters", "conductor.token"
    if conductor.heartbeat < LEAST_TIMEOUT_S:
        yield f"a heartbeat takes at least {LEAST_TIMEOUT_S * 1000:g}ms", "conductor.heartbeat"
    if conductor.balancing_threshold < 1:
        yield "a shorter prefix is not worth a pull: at least 1", "conductor.balancing_threshold"
    if conductor.fair_slack < 1:
        yield "a tenant may use its share: at least 1", "conductor.fair_slack"
    if not conductor.body:
        yield "a body must have room for a byte", "conductor.body"
    if len(re.findall("=", conductor.nodes)) != len(node_addresses(conductor.nodes)):
        yield "two nodes may not share a name", "conductor.nodes"
    for address in node_addresses(conductor.nodes).values():
        try:
            parse_address(address)
        except ConfigError as error:
            yield str(error), "conductor.nodes"
    if any(not weight for weight in weights(conductor.shares).values()):
        yield "a share must be above 0", "conductor.shares"
    if scaling.prefill_min > scaling.prefill_max:
        yield "the least may not be above the most", "scaling.prefill_min"
    if scaling.decode_min > scaling.decode_max:
        yield "the least may not be above the most", "scaling.decode_min"
