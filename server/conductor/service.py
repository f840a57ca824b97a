"""The Conductor as it runs: the pure policy with its clock, what feeds it, and what is asked of it."""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine_client.address import parse_address
from kvstore.errors import ConfigError, NotFound
from scheduler.fleet import Load, Role
from scheduler.index import PrefixIndex
from scheduler.requests import DEFAULT_OUTPUT_TOKENS, Refusal, Request, Route
from server.conductor.advice import Advisors
from server.conductor.chains import Hashed, Scheme, hashed
from server.conductor.counts import Counts
from server.conductor.engines import EngineViews, Publisher
from server.conductor.hints import Hints, Wanted
from server.conductor.instances import Registration, registered, row, told
from server.conductor.making import make_conductor
from server.conductor.models import MOST_EXPECTED, HeartbeatBody, InstanceBody, RouteQuery, StateBody
from server.conductor.nodes import NodeViews, holder_of
from server.conductor.settings import ConductorConfig, node_addresses
from server.rest.problems import Problem, invalid

log = logging.getLogger("cairn.conductor")

Tokens = NDArray[np.uint32]

MISSED_BEATS: Final = 3  # one may be lost, two may be late
TICK_S: Final = 1.0
MOST_SCHEMES: Final = 8  # of one model: each is a hash of the whole prompt
MOST_INSTANCES: Final = 4096


class ConductorService:
    """One event loop owns it all; every method runs to its end on it. `start`, then `close`."""

    def __init__(self, config: ConductorConfig) -> None:
        self.config = config
        settings = config.conductor
        self.index = PrefixIndex()
        self.conductor = make_conductor(self.index, settings)
        self.advisors = Advisors(config.scaling, self.conductor.slo)
        self.counts = Counts()
        self.registrations: dict[str, Registration] = {}
        self.nodes = NodeViews(
            self.index,
            self.conductor.holder,
            settings.node_token,
            settings.node_ca_file,
            forget_after_s=settings.forget_after,
            most_blocks=settings.index_blocks,
            named=self._named_nodes,
            joined=self._joined,
            gone=self.conductor.release,
            crashed=self.crashed,
        )
        self.engines = EngineViews(self.index, self.conductor.holder, self.crashed)
        self.hints = Hints(
            self.index,
            self.nodes,
            settings.node_token,
            settings.node_ca_file,
            most=settings.hints,
            measured=self._measured,
        )
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._schemes: dict[str, tuple[Scheme, ...]] = {}
        self._fixed_nodes = node_addresses(settings.nodes)
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        for name, address in self._fixed_nodes.items():
            self.nodes.follow(name, address)
        self._ticking = asyncio.get_running_loop().create_task(self._tick())
        self._ticking.add_done_callback(self._ended)

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self.hints.close()
        await self.nodes.close()
        await self.engines.close()

    def crashed(self, error: BaseException) -> None:
        """An invariant is broken: end, rather than route by a view that is wrong."""
        if not self.failure.done():
            log.critical("an invariant is broken", exc_info=error)
            self.failure.set_exception(error)

    # Requests.

    def route(self, query: RouteQuery, tokens: Tokens) -> dict[str, Any] | Refusal:
        began = time.perf_counter()
        works = self.conductor.fleet.works
        if len(works) >= self.config.conductor.inflight and query.id not in works:
            raise Problem(503, "as many requests as it takes are under way: conductor.inflight", retry_after_s=1.0)
        now = time.monotonic()
        prompts, request = self._request(query, tokens, now)
        self.hints.cancelled(request.id, now)
        found = self.conductor.route(request, now, query.exclude)
        if isinstance(found, Refusal):
            self.counts.refusals[found.reason.value] += 1
            self.advisors.refused(query.model, found.reason, self._alone_s(query.model, request.tokens))
        else:
            self._count(found, request.tokens)
            self.advisors.asked(query.model, found.prefill_s)
            self._plan(found, prompts, now)
        self.counts.route_s.add(time.perf_counter() - began)
        return found if isinstance(found, Refusal) else self._answer(found)

    def explain(self, query: RouteQuery, tokens: Tokens) -> dict[str, Any]:
        now = time.monotonic()
        _, request = self._request(query, tokens, now)
        found = self.conductor.explain(request, now, query.exclude)
        decision = found.decision
        if isinstance(decision, Refusal):
            told: dict[str, Any] = {
                "refusal": {"reason": decision.reason.value, "retry_after_s": decision.retry_after_s}
            }
        else:
            told = {"route": self._answer(decision)}
        return told | {"rows": found.rows}

    def report(self, request: str, body: StateBody) -> Refusal | None:
        """How far a request is; one that is not known is no matter. The refusal of an admission that looks again."""
        now = time.monotonic()
        self.counts.states[body.state] += 1
        if body.state == "prefilled":
            self._measure(request, now)
            self.hints.consumed(request, now)
            refusal = self.conductor.prefilled(request, now)
            if refusal is not None:
                self.counts.refusals[refusal.reason.value] += 1
            return refusal
        if body.state == "finished":  # perhaps without a word of its first token, as of an answer that is no stream
            self.hints.consumed(request, now)
            self.conductor.finished(request, now)
            return None
        self.hints.cancelled(request, now)
        if body.state == "failed":
            self.conductor.failed(request, now)
        else:
            self.conductor.cancelled(request, now)
        return None

    # Instances.

    def register(self, body: InstanceBody) -> dict[str, Any]:
        now = time.monotonic()
        if body.name not in self.registrations and len(self.registrations) >= MOST_INSTANCES:
            raise Problem(503, f"{MOST_INSTANCES} instances are registered, and no more are taken", retry_after_s=60.0)
        if body.node_address:
            try:
                parse_address(body.node_address)
            except ConfigError as error:
                raise invalid("node_address", str(error)) from error
        made = registered(body, self.registrations.get(body.name), now)
        view = self.nodes.views.get(body.node)
        made.is_node_alone = view is not None and bool(view.is_alone)
        try:
            self._follow_engine(made)
            self.conductor.register(made.instance(), now)
        except ValueError as error:  # of the index: all numbers are given away
            self.engines.drop(body.name)
            raise Problem(503, str(error), retry_after_s=60.0) from error
        self.registrations[body.name] = made
        self._gather_schemes()
        if body.node and body.node_address and body.node not in self._fixed_nodes:
            self.nodes.follow(body.node, body.node_address)
        return {"heartbeat_ms": round(self.config.conductor.heartbeat * 1000)}

    def heartbeat(self, name: str, body: HeartbeatBody) -> dict[str, Any]:
        found = self._known(name)
        now = time.monotonic()
        load = Load(now, body.prefill_tokens, body.decode_batch, body.decode_context)
        self.conductor.heartbeat(name, load, now)
        for _, _, seconds in body.steps:
            self.advisors.stepped(found.body.model, seconds)
        member = self.conductor.fleet.members[name]
        role, is_draining = member.instance.role, member.is_draining
        if found.heard(body, now):
            self._renew(name, now)
        return {"role": role.value, "is_draining": is_draining}

    def drain(self, name: str) -> None:
        self._known(name)
        self.conductor.drain(name)

    def switch(self, name: str, role: Role) -> None:
        self._known(name)
        self.conductor.switch(name, role)

    def remove(self, name: str) -> None:
        self._known(name)
        now = time.monotonic()
        self._lost(self.conductor.remove(name, now), now)
        self._forget(name)

    def instances(self) -> dict[str, Any]:
        now = time.monotonic()
        members = self.conductor.fleet.members
        rows = [row(found, members[name], now) for name, found in sorted(self.registrations.items())]
        nodes = [view.row() for _, view in sorted(self.nodes.views.items())]
        return {"instances": rows, "nodes": nodes, "engines": list(self.engines.rows())}

    def scaling(self) -> dict[str, Any]:
        return {"models": self.advisors.rows(time.monotonic())}

    def standings(self) -> Iterator[tuple[str, str]]:
        """(kind, standing) of each holder."""
        yield from (("node", view.standing.value) for view in self.nodes.views.values())
        yield from (("engine", view.standing.value) for view in self.engines.views.values())

    def health(self) -> dict[str, Any]:
        holders = {f"node:{name}": view.standing.value for name, view in sorted(self.nodes.views.items())}
        holders |= {f"engine:{name}": view.standing.value for name, view in sorted(self.engines.views.items())}
        return {
            "status": "ok" if self.registrations else "no_instances",
            "instances": len(self.registrations),
            "requests": len(self.conductor.fleet.works),
            "blocks": self.index.blocks,
            "holdings": self.index.holdings,
            "holders": holders,
        }

    # Inside.

    def _request(self, query: RouteQuery, tokens: Tokens, now: float) -> tuple[Sequence[Hashed], Request]:
        prompts = hashed(tokens, self._schemes.get(query.model, ()))
        return prompts, Request(
            id=query.id or secrets.token_hex(16),
            tokens=len(tokens),
            chains=tuple(prompt.chain for prompt in prompts),
            arrived_s=now,
            output_tokens=min(query.output_tokens or DEFAULT_OUTPUT_TOKENS, MOST_EXPECTED),
            model=query.model,
            tenant=query.tenant,
            session=query.session,
            priority=query.priority,
            deadline_s=None if query.deadline_ms is None else now + query.deadline_ms / 1000,
        )

    def _count(self, route: Route, tokens: int) -> None:
        counts = self.counts
        counts.routes["collocated" if route.is_collocated else "disaggregated"] += 1
        counts.pulls += route.pull is not None
        counts.cached_tokens += route.cached_tokens
        counts.prompt_tokens += tokens

    def _plan(self, route: Route, prompts: Sequence[Hashed], now: float) -> None:
        """Load ahead what the request will use, where its instance has a node that knows its namespace."""
        if not route.transfer_s:
            return
        found = self.registrations[route.prefill]
        node, space = found.body.node, found.body.namespace
        prompt = next((prompt for prompt in prompts if prompt.scheme == found.scheme), None)
        is_ours = route.pull is None or prompts[route.pull.chain] is prompt
        if node and space is not None and prompt is not None and is_ours:
            self.hints.plan(Wanted(route.request, prompt, space, found.kv_bytes), route, node, now)

    def _answer(self, route: Route) -> dict[str, Any]:
        return told(route, self.registrations[route.prefill].place, self.registrations[route.decode].place)

    def _measure(self, request: str, now: float) -> None:
        """Compare its time to the first token with what was predicted."""
        work = self.conductor.fleet.works.get(request)
        if work is None or work.prefilled_s is not None:
            return
        measured_s, predicted_s = now - work.routed_s, work.first_token_s - work.routed_s
        counts = self.counts
        counts.ttft_error_s.add(abs(measured_s - predicted_s))
        counts.measured_ttft_s += measured_s
        counts.predicted_ttft_s += predicted_s
        is_in_time = measured_s <= self.config.conductor.ttft_slo
        counts.in_time += is_in_time
        counts.late += not is_in_time
        self.advisors.began(work.model, measured_s)

    def _alone_s(self, model: str, tokens: int) -> float:
        """What the prompt's prefill would take with nothing cached; 0 where nobody serves the model."""
        found = next((found for found in self.registrations.values() if found.body.model == model), None)
        return found.prefill.cost.seconds(tokens, 0) if found is not None else 0.0

    def _known(self, name: str) -> Registration:
        found = self.registrations.get(name)
        if found is None:
            raise NotFound(f"no instance {name} is registered")
        return found

    def _forget(self, name: str) -> None:
        """An instance that the policy has forgotten already."""
        gone = self.registrations.pop(name)
        self.engines.drop(name)
        self.conductor.release(f"engine:{name}")
        if gone.body.node not in self.nodes.views and gone.body.node not in self._named_nodes():
            self.conductor.release(holder_of(gone.body.node))
        self._gather_schemes()

    def _follow_engine(self, made: Registration) -> None:
        body = made.body
        if not body.events:
            self.engines.drop(body.name)
            return
        scheme = made.scheme or Scheme(0, body.hash, made.root)
        try:
            self.engines.follow(body.name, Publisher(body.events, scheme, hashes_are_keys=body.engine == "cairn"))
        except ConfigError as error:
            raise invalid("events", str(error)) from error

    def _gather_schemes(self) -> None:
        """The distinct ways in which each model's blocks are named; those over MOST_SCHEMES go by load alone."""
        schemes: dict[str, dict[Scheme, None]] = {}
        for name, found in self.registrations.items():
            for scheme in (found.scheme, self.engines.scheme(name)):
                if scheme is not None:
                    schemes.setdefault(found.body.model, {})[scheme] = None
        self._schemes = {model: tuple(each)[:MOST_SCHEMES] for model, each in schemes.items()}

    def _renew(self, name: str, now: float) -> None:
        """What is known of an instance has changed, but not its role, nor whether it drains, nor when it was heard."""
        member = self.conductor.fleet.members[name]
        is_draining, seen_s = member.is_draining, member.seen_s
        self.conductor.register(self.registrations[name].instance(member.instance.role), now)
        member.seen_s = seen_s
        if is_draining:
            self.conductor.drain(name)

    def _measured(self, node: str, rate: float, *, is_pull: bool) -> None:
        """How many bytes a second came to a node, from others or from its own disk."""
        for found in self.registrations.values():
            if found.body.node == node:
                found.moved(rate, is_pull=is_pull)

    def _joined(self, node: str) -> None:
        is_alone = bool(self.nodes.views[node].is_alone)
        self.conductor.isolate(holder_of(node), is_alone=is_alone)
        for name, found in self.registrations.items():
            if found.body.node == node and found.is_node_alone is not is_alone:
                found.is_node_alone = is_alone
                self._renew(name, time.monotonic())

    def _named_nodes(self) -> set[str]:
        return {*self._fixed_nodes, *(found.body.node for found in self.registrations.values())}

    def _lost(self, requests: Sequence[str], now: float) -> None:
        self.counts.lost_requests += len(requests)
        for request in requests:
            self.hints.cancelled(request, now)

    async def _tick(self) -> None:
        silent_s = MISSED_BEATS * self.config.conductor.heartbeat
        pause_s = min(TICK_S, self.config.conductor.heartbeat / 2)
        observed_s = now = time.monotonic()
        while True:
            due_s = now + pause_s
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            for member in self.conductor.fleet.members.values():
                member.seen_s = min(now, member.seen_s + max(0.0, now - due_s))  # nobody was heard in that time
            ended = self.conductor.tick(now, silent_s)
            for name in ended.silent:
                log.warning("instance %s said nothing for %.1f s: it is gone", name, silent_s)
                self.counts.lost_instances += 1
                self._forget(name)
            self._lost(ended.lost, now)
            self.counts.expired_requests += len(ended.expired)
            for request in ended.expired:
                self.hints.cancelled(request, now)
            self.nodes.look()
            self.hints.look(now)
            if now - observed_s >= TICK_S:
                observed_s = now
                models = {found.body.model for found in self.registrations.values()}
                self._gather_schemes()  # engines may have said meanwhile how large their blocks are
                self.advisors.observe(self.conductor.fleet, models, now)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashed(error)
