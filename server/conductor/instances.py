"""Instances as they registered: what the policy knows of each, what a gateway is told, and costs that follow it."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Final

from scheduler.costs import DecodeCost, PrefillCost, TierCost
from scheduler.fitting import Refitting, RefittingDecode
from scheduler.fleet import Instance, Member, Role
from scheduler.requests import Route
from server.conductor.chains import NO_ROOT, Scheme
from server.conductor.models import HeartbeatBody, InstanceBody
from server.conductor.nodes import holder_of

log = logging.getLogger("cairn.conductor")

# Where a registration does not say:
DEFAULT_PREFILL: Final = PrefillCost(0.02, 1e-4, 1e-9, 1e-9)  # 10,000 tokens a second: an A800 and 70 B, eight of them
DEFAULT_DECODE: Final = DecodeCost(0.02, 2e-4, 1e-7)
DRAM_RATE: Final = 20e9  # bytes a second over PCIe 4.0 x16, as a copy reaches it
NVME_RATE: Final = 5e9  # of one PCIe 4.0 disk
NETWORK_RATE: Final = 10e9  # of 100 Gbit/s, as transfers reach it

SLOWER: Final = 0.8  # of a rate, at least, after one move that was slower: it may have shared its way with others
REFIT_S: Final = 5.0  # between two changes of what the policy counts with: each rebuilds its columns


@dataclass(slots=True)
class Registration:
    """One instance. `prefill` and `decode` follow what it measures, beginning with what it said of itself."""

    body: InstanceBody
    prefill: Refitting
    decode: RefittingDecode
    refitted_s: float
    samples: int = 0
    place: dict[str, Any] = field(default_factory=dict)  # for gateways
    is_node_alone: bool = False  # in no cluster
    network_rate: float = NETWORK_RATE  # from other nodes, as measured since
    nvme_rate: float = NVME_RATE

    @property
    def scheme(self) -> Scheme | None:
        """None where its blocks' names are not known."""
        body = self.body
        block_tokens, hash_name = body.block_tokens, body.hash
        if body.namespace is not None:
            block_tokens, hash_name = body.namespace.fields.block_tokens, body.namespace.fields.hash
        if not block_tokens:
            return None
        return Scheme(block_tokens, hash_name, self.root)

    @property
    def root(self) -> bytes:
        return bytes.fromhex(self.body.root) or NO_ROOT

    @property
    def kv_bytes(self) -> int:
        """Of a token; 0: not known."""
        space = self.body.namespace
        if self.body.kv_bytes or space is None:
            return self.body.kv_bytes
        return space.fields.block_bytes * space.fields.parts // space.fields.block_tokens

    @property
    def engine_holder(self) -> str:
        return f"engine:{self.body.name}" if self.body.events else ""

    def instance(self, role: Role | None = None) -> Instance:
        """As the policy sees it now, perhaps in another role than it registered with. Engines hand requests over only
        to their kind, and those that do so by their nodes not beyond a node in no cluster. Without a node, or with
        one alone, there is nothing that blocks could be pulled to."""
        body = self.body
        by_node = body.engine == "cairn" and self.is_node_alone
        tiers = TierCost(
            kv_bytes=self.kv_bytes,
            dram_rate=DRAM_RATE if body.dram_rate is None else body.dram_rate,
            nvme_rate=self.nvme_rate,
            network_rate=self.network_rate if body.node and not self.is_node_alone else 0.0,
        )
        return Instance(
            name=body.name,
            role=role or body.role,
            model=body.model,
            prefill=self.prefill.cost,
            decode=self.decode.cost,
            tiers=tiers,
            node=holder_of(body.node),
            engine_holder=self.engine_holder,
            decode_tokens=body.decode_tokens,
            decode_batch=body.decode_batch,
            grid_tokens=body.grid_tokens,
            group=f"{body.engine} at {body.node}" if by_node else body.engine,
        )

    def moved(self, rate: float, *, is_pull: bool) -> None:
        """So many bytes a second came to its node. A faster move shows what can be, a slower one takes off some."""
        if is_pull:
            self.network_rate = max(rate, SLOWER * self.network_rate)
        else:
            self.nvme_rate = max(rate, SLOWER * self.nvme_rate)
        self.samples += 1

    def heard(self, told: HeartbeatBody, now: float) -> bool:
        """Take its measurements; whether the policy should count with them now."""
        for tokens, cached, seconds in told.prefills:
            self.prefill.seen(tokens, cached, seconds)
        for batch, context, seconds in told.steps:
            self.decode.seen(batch, context, seconds)
        self.samples += len(told.prefills) + len(told.steps)
        if not self.samples or now - self.refitted_s < REFIT_S:
            return False
        self.samples, self.refitted_s = 0, now
        return True


def registered(body: InstanceBody, former: Registration | None, now: float) -> Registration:
    """A registration; one again that says the same of its costs goes on with what was measured."""
    prefill_cost = PrefillCost(*body.prefill) if body.prefill else DEFAULT_PREFILL
    decode_cost = DecodeCost(*body.decode) if body.decode else DEFAULT_DECODE
    goes_on = former is not None and _costs(former.body) == _costs(body)
    place = {
        "name": body.name,
        "address": body.address,
        "engine": body.engine,
        "bootstrap_host": body.bootstrap_host,
        "bootstrap_port": body.bootstrap_port,
    }
    if former is not None and former.body.address != body.address:
        was, name = former.body.address, body.name
        log.warning("%s was at %s, is at %s now: started anew, or two have one name", name, was, body.address)
    if former is not None and goes_on:
        return replace(former, body=body, place=place)
    return Registration(
        body,
        Refitting(prefill_cost),
        RefittingDecode(decode_cost),
        now,
        place=place,
        network_rate=NETWORK_RATE if body.network_rate is None else body.network_rate,
        nvme_rate=NVME_RATE if body.nvme_rate is None else body.nvme_rate,
    )


def told(route: Route, prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    """A route as gateways are told it, with the two places."""
    pull = route.pull
    return {
        "id": route.request,
        "prefill": prefill,
        "decode": decode,
        "cached_tokens": route.cached_tokens,
        "is_collocated": route.is_collocated,
        "pull": pull
        and {
            "source": pull.source.removeprefix("node:"),
            "target": pull.target.removeprefix("node:"),
            "first": pull.first,
            "stop": pull.stop,
        },
        "predicted": {
            "queue_ms": route.queue_s * 1000,
            "transfer_ms": route.transfer_s * 1000,
            "prefill_ms": route.prefill_s * 1000,
            "ttft_ms": route.ttft_s * 1000,
            "tbt_ms": route.tbt_s * 1000,
        },
    }


def row(registration: Registration, member: Member, now: float) -> dict[str, Any]:
    """What `GET /v1/instances` says of one."""
    instance, body = member.instance, registration.body
    return registration.place | {
        "role": instance.role.value,
        "model": body.model,
        "node": body.node,
        "is_draining": member.is_draining,
        "seen_ms": round((now - member.seen_s) * 1000),
        "queue_ms": member.queue_s(now) * 1000,
        "utilisation": member.utilisation(now),
        "prefilling": len(member.prefilling),
        "decoding": len(member.decoding.works) + len(member.arriving.works),
        "tbt_ms": member.step_s() * 1000,
        "prefill": instance.prefill.coefficients,
        "decode": (instance.decode.base_s, instance.decode.per_sequence_s, instance.decode.per_token_s),
    }


def _costs(body: InstanceBody) -> tuple[Any, ...]:
    return body.prefill, body.decode, body.network_rate, body.nvme_rate
