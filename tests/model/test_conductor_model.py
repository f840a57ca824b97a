"""Drive the Conductor through random fleets, prefixes and requests, and compare its books with a plain record.

Whatever comes in whatever order: a route goes to instances that take it, everything that began ends once, and then
nothing of it is left anywhere.
"""

import os
import random

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler.admission import ADMISSIONS
from scheduler.conductor import Conductor
from scheduler.costs import DecodeCost, PrefillCost, TierCost
from scheduler.fleet import Instance, Load, Role
from scheduler.index import PrefixIndex
from scheduler.policies import POLICIES
from scheduler.requests import Chain, Names, Reason, Refusal, Request, Route
from scheduler.tuning import Slo, Tuning

BLOCK = 256
INSTANCES = [f"i{number}" for number in range(5)]
SILENT_S = 5.0
TIERS = TierCost(kv_bytes=1000, dram_rate=1e9, nvme_rate=1e8, network_rate=1e7)
MUTANT = os.environ.get("CAIRN_MODEL_PROFILE") == "mutant"
instances = st.sampled_from(INSTANCES)
prompts = st.tuples(st.integers(0, 2), st.integers(0, 12))  # which document, how many blocks of it


def names(document: int, blocks: int) -> Names:
    return np.arange(1, blocks + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(document)


class Conducting(RuleBasedStateMachine):
    """`under_way`: request -> (prefill, decode, whether its first token is there); `takes`: instance -> its role."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        admission=st.sampled_from(sorted(ADMISSIONS)),
        seed=st.integers(0, 99),
        roles=st.tuples(*[st.sampled_from(list(Role))] * len(INSTANCES)),
    )
    def begin(self, policy: str, admission: str, seed: int, roles: tuple[Role, ...]) -> None:
        draw = random.Random(seed).random
        tuning = Tuning()
        slo = Slo(ttft_s=20.0, tbt_s=0.05)
        chooses = POLICIES[policy](draw, tuning)
        self.conductor = Conductor(PrefixIndex(), chooses, ADMISSIONS[admission](), slo, draw, tuning)
        self.slo = slo
        self.admits_all = admission == "none"
        self.now = 0.0
        self.number = 0
        self.takes: dict[str, Role] = {}
        self.draining: set[str] = set()
        self.seen: dict[str, float] = {}
        self.deadlines: dict[str, float] = {}
        self.under_way: dict[str, tuple[str, str, bool]] = {}
        for name, role in zip(INSTANCES, roles, strict=True):
            self.register(name, role)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=instances, role=st.sampled_from(list(Role)))
    def register(self, name: str, role: Role) -> None:
        self.conductor.register(
            Instance(
                name=name,
                role=role,
                model="m",
                prefill=PrefillCost(0.01, 1e-3, 1e-9, 2e-9),
                decode=DecodeCost(0.01, 0.002, 1e-7),
                tiers=TIERS,
                node=f"node:{name}",
            ),
            self.now,
        )
        self.takes[name] = role
        self.seen[name] = self.now
        self.draining.discard(name)

    @rule(name=instances, role=st.sampled_from(list(Role)))
    def switch(self, name: str, role: Role) -> None:
        if name in self.takes:
            self.conductor.switch(name, role)
            self.takes[name] = role

    @rule(name=instances)
    def drain(self, name: str) -> None:
        if name in self.takes:
            self.conductor.drain(name)
            self.draining.add(name)

    @rule(name=instances)
    def remove(self, name: str) -> None:
        lost = self.conductor.remove(name, self.now)
        assert sorted(lost) == sorted(self.gone(name))

    @rule(name=instances, waiting=st.integers(0, 9000), batch=st.integers(0, 40))
    def heartbeat(self, name: str, waiting: int, batch: int) -> None:
        if name in self.takes:
            self.conductor.heartbeat(name, Load(self.now, waiting, batch, batch * 1000), self.now)
            self.seen[name] = self.now

    @rule(name=instances, prompt=prompts, tier=st.integers(0, 2), there=st.booleans())
    def blocks(self, name: str, prompt: tuple[int, int], tier: int, there: bool) -> None:
        index, holder = self.conductor.index, self.conductor.holder(f"node:{name}")
        (index.stored if there else index.removed)(holder, tier, names(*prompt))

    @rule(
        asked=st.lists(prompts, min_size=1, max_size=6),
        more=st.integers(1, BLOCK),
        patience_s=st.sampled_from([None, 2.0, 30.0]),
        again=st.booleans(),
    )
    def ask(self, asked: list[tuple[int, int]], more: int, patience_s: float | None, again: bool) -> None:
        for prompt in asked:
            self.route(prompt, more, patience_s, again)

    def route(self, prompt: tuple[int, int], more: int, patience_s: float | None, again: bool) -> None:
        self.number += 1
        old = next(iter(self.under_way), None) if again else None
        name = old or f"r{self.number}"
        document, blocks = prompt
        request = Request(
            id=name,
            tokens=blocks * BLOCK + more,
            chains=(Chain(names(document, blocks), BLOCK),),
            arrived_s=self.now,
            output_tokens=50,
            model="m",
            tenant=f"t{document}",
            session=f"s{document}",
            priority=document - 1,
            deadline_s=None if patience_s is None else self.now + patience_s,
        )
        explained = self.conductor.explain(request, self.now)
        books = dict(self.conductor.fleet.works)
        assert set(books) == set(self.under_way), "an explanation plans nothing"
        decision = self.conductor.route(request, self.now)
        self.under_way.pop(name, None)
        self.deadlines.pop(name, None)
        prefills = [each for each, role in self.takes.items() if role.takes_prefill and each not in self.draining]
        decodes = [each for each, role in self.takes.items() if role.takes_decode and each not in self.draining]
        if isinstance(decision, Refusal):
            assert 1 <= decision.retry_after_s <= 60
            assert (decision.reason is Reason.NO_INSTANCE) == (not prefills or not decodes)
            if self.admits_all and patience_s is None:
                assert decision.reason in (Reason.NO_INSTANCE, Reason.FAIR_SHARE)
            return
        self.check_route(decision, request, prefills, decodes)
        assert [row["is_chosen"] for row in explained.rows].count(True) == 1
        self.under_way[name] = (decision.prefill, decision.decode, False)
        if request.deadline_s is not None:
            self.deadlines[name] = request.deadline_s

    def check_route(self, route: Route, request: Request, prefills: list[str], decodes: list[str]) -> None:
        assert route.prefill in prefills
        assert route.decode in decodes
        assert 0 <= route.cached_tokens < request.tokens
        assert route.ttft_s >= route.prefill_s > 0
        assert route.ttft_s >= route.queue_s + route.prefill_s - 1e-9
        if request.deadline_s is not None:
            assert self.now + route.ttft_s <= request.deadline_s
        if not self.admits_all:
            assert route.ttft_s <= self.slo.ttft_s
        if route.pull is not None:
            assert route.pull.target == f"node:{route.prefill}"
            assert route.pull.source != route.pull.target
            assert 0 <= route.pull.first < route.pull.stop <= len(request.chains[0].names)
            holder = self.conductor.holder(route.pull.source)
            _, memory, every = self.conductor.index.prefixes(request.chains[0].names)[holder]
            assert route.pull.stop in (memory, every)

    @rule(choices=st.lists(st.integers(0, 50), min_size=1, max_size=6))
    def first_tokens(self, choices: list[int]) -> None:
        for choice in choices:
            self.prefilled(self.any_request(choice))

    def prefilled(self, request: str) -> None:
        known = self.under_way.get(request)
        refusal = self.conductor.prefilled(request, self.now)
        if refusal is not None:
            assert refusal.tbt_s > self.slo.tbt_s
            assert not self.admits_all
            self.end(request)
        elif known is not None:
            self.under_way[request] = (known[0], known[1], True)
            self.deadlines.pop(request, None)

    @rule(choice=st.integers(0, 50), how=st.sampled_from(["finished", "failed", "cancelled"]))
    def ends(self, choice: int, how: str) -> None:
        request = self.any_request(choice)
        getattr(self.conductor, how)(request, self.now)
        self.end(request)

    @rule()
    def tick(self) -> None:
        ended = self.conductor.tick(self.now, SILENT_S)
        silent = [name for name in self.takes if self.now - self.seen[name] > SILENT_S]
        assert sorted(ended.silent) == sorted(silent)
        assert sorted(ended.lost) == sorted([request for name in silent for request in self.gone(name)])
        late = [request for request, deadline_s in self.deadlines.items() if self.now > deadline_s]
        assert sorted(ended.expired) == sorted(late)
        for request in late:
            self.end(request)

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "conductor"):
            return
        assert self.conductor.check() == []
        works = self.conductor.fleet.works
        assert {
            request: (work.prefill, work.decode, work.prefilled_s is not None) for request, work in works.items()
        } == self.under_way
        assert set(self.conductor.fleet.members) == set(self.takes)
        for name, member in self.conductor.fleet.members.items():
            mine = [
                request for request, (prefill, _, is_done) in self.under_way.items() if prefill == name and not is_done
            ]
            assert sorted(member.prefilling) == sorted(mine)
            decoding = [
                request for request, (_, decode, is_done) in self.under_way.items() if decode == name and is_done
            ]
            assert sorted(member.decoding.works) == sorted(decoding)
            assert member.queue_s(self.now) >= 0

    def any_request(self, choice: int) -> str:
        requests = [*self.under_way, "unknown"]
        return requests[choice % len(requests)]

    def end(self, request: str) -> None:
        self.under_way.pop(request, None)
        self.deadlines.pop(request, None)

    def gone(self, name: str) -> list[str]:
        """The requests of an instance, which are forgotten with it."""
        lost = [request for request, (prefill, decode, _) in self.under_way.items() if self.is_at(request, name)]
        for request in lost:
            self.end(request)
        self.takes.pop(name, None)
        self.draining.discard(name)
        return lost

    def is_at(self, request: str, name: str) -> bool:
        """Whether its end there would end it: a prefill instance that is done with it does not matter any more."""
        prefill, decode, is_done = self.under_way[request]
        return name == decode or (name == prefill and not is_done)

    def teardown(self) -> None:
        if hasattr(self, "conductor"):
            for request in list(self.conductor.fleet.works):
                self.conductor.cancelled(request, self.now)
            assert self.conductor.check() == []
            assert self.conductor.fair.waiting_s() == {}


TestConducting = Conducting.TestCase
TestConducting.settings = settings(
    max_examples=60 if MUTANT else 120,
    stateful_step_count=50,
    deadline=None,
    derandomize=MUTANT,
    phases=[Phase.generate] if MUTANT else list(Phase),
    suppress_health_check=list(HealthCheck),
)
