"""The Conductor: which instances take a request, or that none does. Synchronous, without a clock, the same in the
service and in the simulator.

    route ──> prefilled ──> finished
      │           └───────> failed, cancelled
      └───────────────────> failed, cancelled, expired
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.admission.admission import Admission, Prospect
from scheduler.expected import Expected
from scheduler.explaining import Draft, route_of, rows_of
from scheduler.fair_share import FairShare
from scheduler.fleet import Fleet, Instance, Load, Role, Work
from scheduler.index import PrefixIndex
from scheduler.outlook import Choice, Outlook, Tokens, sources_of
from scheduler.pairing import Pairing
from scheduler.policies.policy import Policy
from scheduler.pools import Pools
from scheduler.requests import Chain, Explanation, Pull, Reason, Refusal, Request, Route
from scheduler.traffic import Traffic
from scheduler.tuning import Slo, Tuning

NODE: Final = "node:"  # what the holders' names of store nodes begin with
SESSIONS: Final = 100_000  # whose last instance is remembered
FORGOTTEN_S: Final = 900.0  # after its predicted first token, that a request is under way without a word of its end
RETRY_S: Final = (1.0, 60.0)  # what a refused request is told to wait, at least and at most


class Ended(NamedTuple):
    """What `tick` found: instances that are silent, requests that were there, requests whose deadline is gone."""

    silent: list[str]
    lost: list[str]
    expired: list[str]


class Conductor:
    """Owns the fleet, what is planned, and the view of who holds what. `draw` is uniform in [0, 1).

    The index is filled by whoever hears the holders; a node's holder is called "node:" and its name.
    """

    def __init__(
        self,
        index: PrefixIndex,
        policy: Policy,
        admission: Admission,
        slo: Slo,
        draw: Callable[[], float],
        tuning: Tuning,
    ) -> None:
        self.index = index
        self.fleet = Fleet()
        self.slo = slo
        self.tuning = tuning
        self.policy = policy
        self.admission = admission
        self.fair = FairShare(tuning.weights, tuning.fair_slack)
        self._pairing = Pairing(draw, slo, tuning.collocate_below)
        self._nodes: dict[str, int] = {}
        self._holders: dict[str, int] = {}
        self._pools = Pools(self.fleet, self._holders)
        self._sending, self._receiving = Traffic(), Traffic()
        self._expected = Expected()
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()  # by tenant and its name for it

    def register(self, instance: Instance, now: float) -> None:
        """A new instance, or one that changed; what it has under way stays."""
        for holder in (instance.node, instance.engine_holder):
            if holder:
                self.holder(holder)
        self.fleet.register(instance, now)

    def holder(self, name: str) -> int:
        """The number of a holder in the index; a new one is taken up."""
        if name not in self._holders:
            self._holders[name] = self.index.holder(name)
            if name.startswith(NODE):
                self._nodes[name] = self._holders[name]
            self.fleet.generation += 1
        return self._holders[name]

    def release(self, name: str) -> None:
        """A holder that will not come back: what it had is forgotten, and its number may become another's."""
        if self._holders.pop(name, None) is not None:
            self._nodes.pop(name, None)
            self.index.release(name)
            self.fleet.generation += 1

    def isolate(self, name: str, *, is_alone: bool) -> None:
        """Whether nothing can be pulled from a node: one in no cluster keeps what it has to itself."""
        number = self.holder(name)
        if is_alone:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = number

    def heartbeat(self, name: str, load: Load, now: float) -> None:
        """What an instance says of itself. KeyError for one that is not registered."""
        self.fleet.members[name].heard(load, now)

    def drain(self, name: str) -> None:
        """KeyError for one that is not registered."""
        self.fleet.drain(name)

    def switch(self, name: str, role: Role) -> None:
        """KeyError for one that is not registered."""
        self.fleet.switch(name, role)

    def remove(self, name: str, now: float) -> list[str]:
        """The instance is gone: the requests that were there, which are under way no more."""
        member = self.fleet.members.get(name)
        if member is None:
            return []
        held = [*member.prefilling, *member.arriving.works, *member.decoding.works]
        lost = list(dict.fromkeys(held))
        for request in lost:
            self._end(request, now, is_finished=False)
        self.fleet.remove(name)
        return lost

    def tick(self, now: float, silent_s: float) -> Ended:
        """Find what is over without anybody saying so: call it each second or so."""
        silent = [name for name, member in self.fleet.members.items() if now - member.seen_s > silent_s]
        lost = [request for name in silent for request in self.remove(name, now)]
        expired = []
        for work in list(self.fleet.works.values()):
            is_late = work.deadline_s is not None and work.prefilled_s is None and now > work.deadline_s
            if is_late:
                expired.append(work.request)
            if is_late or now > work.first_token_s + FORGOTTEN_S:
                self._end(work.request, now, is_finished=False)
        return Ended(silent, lost, expired)

    def route(self, request: Request, now: float, exclude: Collection[str] = ()) -> Route | Refusal:
        """Decide, and plan with it: the request is under way until it is said to have ended. `exclude`: instances that
        it must not go to, since it failed there. A request that is under way already is begun again."""
        self._end(request.id, now, is_finished=False)
        draft = self._draft(request, now, exclude)
        if isinstance(draft, Refusal):
            return draft
        refusal = self._refusal(request, draft, now)
        if refusal is not None:
            return refusal
        self._begin(request, draft, now)
        return route_of(request, draft)

    def explain(self, request: Request, now: float, exclude: Collection[str] = ()) -> Explanation:
        """What `route` would decide, and why. Plans nothing; a policy that goes in turns takes its turn."""
        draft = self._draft(request, now, exclude)
        if isinstance(draft, Refusal):
            return Explanation(draft)
        refusal = self._refusal(request, draft, now)
        return Explanation(refusal or route_of(request, draft), rows_of(draft, self.tuning.balancing_threshold))

    def prefilled(self, request: str, now: float) -> Refusal | None:
        """The first token is there. The decode pool may refuse the request now; then it has ended. Idempotent."""
        work = self.fleet.works.get(request)
        if work is None or work.prefilled_s is not None:
            return None
        self.fleet.prefilled(request, now)
        self.fair.take(work.model, work.tenant, work.prefill_s)
        member = self.fleet.members.get(work.decode)
        if member is None or work.prefill == work.decode:
            return None
        tbt_s, limit_s = member.step_s(is_present=True), max(self.slo.tbt_s, member.alone_s(work.mean_context))
        reason = self.admission.on_decode(tbt_s, limit_s)
        if reason is None:
            return None
        self._end(request, now, is_finished=False)
        retry_s = self._pools.decode_s(work.model, work.group) * (1 - limit_s / tbt_s)
        return Refusal(request, reason, _bounded(retry_s), 0.0, tbt_s)

    def finished(self, request: str, now: float) -> None:
        """Idempotent, as the other ends are."""
        self._end(request, now, is_finished=True)

    def failed(self, request: str, now: float) -> None:
        """At one of its instances. It may be routed again."""
        self._end(request, now, is_finished=False)

    def cancelled(self, request: str, now: float) -> None:
        """Nobody waits for it any more."""
        self._end(request, now, is_finished=False)

    def check(self) -> list[str]:
        """What is wrong with the books, a sentence each."""
        works = self.fleet.works
        problems = []
        for name, member in self.fleet.members.items():
            held = {*member.prefilling, *member.arriving.works, *member.decoding.works}
            problems += [f"{name} has {request}, which is not under way" for request in held - works.keys()]
            for share in (member.arriving, member.decoding):
                sums = [sum(work.context for work in share.works.values())]
                sums += [sum(work.mean_context for work in share.works.values())]
                if sums != [share.context, share.mean_context]:
                    problems.append(f"{name} counts {share.context} tokens of context")
        for request, work in works.items():
            prefill, decode = self.fleet.members.get(work.prefill), self.fleet.members.get(work.decode)
            is_waiting = work.prefilled_s is None
            if is_waiting is not (prefill is not None and request in prefill.prefilling):
                problems.append(f"{request} is or is not being prefilled")
            if decode is None or request not in (decode.arriving if is_waiting else decode.decoding).works:
                problems.append(f"{request} is not where it is decoded")
        if len(self._expected) != len(works):
            problems.append("prefixes are expected of others than are under way")
        waiting = sum(work.prefill_s for work in works.values() if work.prefilled_s is None)
        if abs(sum(self.fair.waiting_s().values()) - waiting) > 1e-6:
            problems.append(f"tenants wait for {sum(self.fair.waiting_s().values())} s, requests for {waiting} s")
        return problems

    def _draft(self, request: Request, now: float, exclude: Collection[str]) -> Draft | Refusal:
        pool = self._pools.of(request.model, exclude)
        if not pool.members:
            return Refusal(request.id, Reason.NO_INSTANCE, RETRY_S[0])
        lengths = [self.index.prefixes(chain.names) for chain in request.chains]
        prefixes = self._prefixes(request.chains, lengths)
        sources = sources_of(self._nodes, prefixes, self._sending, now)
        expected = self._expected.tokens(request.chains)
        outlook = Outlook(request, pool, prefixes, expected, sources, self._receiving, now=now)
        choice = self._in_session(request, outlook, self.policy.choose(outlook))
        prefill = pool.members[choice.position]
        takers = pool.takers[prefill.instance.group]
        decode, tbt_s = self._pairing.choose(request, prefill, takers, prefixes, self._holders, now)
        pull = self._pull(request.chains, lengths, choice, prefill.instance.node)
        return Draft(outlook, choice, prefill, decode, tbt_s, pull)

    def _prefixes(self, chains: Sequence[Chain], lengths: Sequence[NDArray[np.int32]]) -> Tokens:
        found = np.zeros((1 + max(map(len, lengths), default=len(self.index.holders)), 3))
        for chain, blocks in zip(chains, lengths, strict=True):
            np.maximum(found[: len(blocks)], blocks * float(chain.block_tokens), out=found[: len(blocks)])
        return found

    def _in_session(self, request: Request, outlook: Outlook, choice: Choice) -> Choice:
        """Where the session went before, if that costs little: engines keep more of it than they tell."""
        last = self._sessions.get((request.tenant, request.session)) if request.session else None
        if last is None or last not in outlook.pool.names:
            return choice
        there = outlook.local(outlook.pool.names.index(last))
        return there if there.ttft_s <= choice.ttft_s * (1 + self.tuning.session_slack) else choice

    def _refusal(self, request: Request, draft: Draft, now: float) -> Refusal | None:
        """A limit that an idle fleet could not keep either is what the idle fleet would do: else nobody ever could."""
        share = self.tuning.low_priority_share if request.priority < 0 else 1.0
        waited_s = now - request.arrived_s
        decode_s = self._pools.decode_s(request.model, draft.prefill.instance.group)
        context, first_token_s = request.mean_context, now + draft.choice.ttft_s
        idle_s = draft.choice.transfer_s + draft.choice.prefill_s
        prospect = Prospect(
            ttft_s=waited_s + draft.choice.ttft_s,
            present_tbt_s=draft.decode.step_s(more=1, context=context, is_present=True),
            future_tbt_s=draft.decode.step_s(more=1, context=context),
            ttft_limit_s=max(self.slo.ttft_s * share, idle_s),
            tbt_limit_s=max(self.slo.tbt_s * share, draft.decode.alone_s(context)),
        )
        reason = self.admission.on_arrival(prospect)
        late_s = draft.choice.ttft_s - prospect.ttft_limit_s
        is_busy = request.priority <= 0 and prospect.ttft_s > self.tuning.fair_from * prospect.ttft_limit_s
        if request.deadline_s is not None and first_token_s > request.deadline_s:
            reason = Reason.TTFT
            late_s = max(late_s, first_token_s - request.deadline_s)
        elif reason is None and is_busy and self.fair.is_over(request.model, request.tenant):
            reason = Reason.FAIR_SHARE
        if reason is None:
            return None
        retry_s = draft.choice.queue_s
        if reason is Reason.TTFT:
            retry_s = late_s if late_s < draft.choice.queue_s else RETRY_S[1]  # an idle fleet would be too slow as well
        elif reason is Reason.TBT:
            tbt_s = max(draft.tbt_s, prospect.present_tbt_s, prospect.future_tbt_s)
            retry_s = decode_s * max(0.0, 1 - prospect.tbt_limit_s / tbt_s)
        return Refusal(request.id, reason, _bounded(retry_s), prospect.ttft_s, draft.tbt_s)

    def _pull(
        self, chains: Sequence[Chain], lengths: Sequence[NDArray[np.int32]], choice: Choice, target: str
    ) -> Pull | None:
        """The blocks of the choice's source that its target lacks, of the chain by whose names the source has them."""
        if choice.source is None or not target:
            return None
        source, here = self._holders[choice.source.node], self._holders[target]
        for number, (chain, blocks) in enumerate(zip(chains, lengths, strict=True)):
            stop = -(-int(choice.source.tokens) // chain.block_tokens)
            if blocks[source, 2] >= stop:
                first = int(blocks[here, 2])
                return Pull(choice.source.node, target, number, first, stop)
        return None

    def _begin(self, request: Request, draft: Draft, now: float) -> None:
        choice, tiers = draft.choice, draft.prefill.instance.tiers
        source = choice.source.node if choice.source is not None else ""
        target = draft.prefill.instance.node
        missing = choice.source.tokens - float(draft.outlook.node_tokens[choice.position]) if choice.source else 0.0
        work = Work(
            request=request.id,
            model=request.model,
            tenant=request.tenant,
            session=request.session,
            tokens=request.tokens,
            output_tokens=request.output_tokens,
            prefill=draft.prefill.instance.name,
            decode=draft.decode.instance.name,
            routed_s=now,
            prefill_s=choice.prefill_s,
            first_token_s=now + choice.ttft_s,
            group=draft.prefill.instance.group,
            computed=request.tokens - choice.cached_tokens,
            ready_s=now + choice.transfer_s,
            deadline_s=request.deadline_s,
            pull_source=source,
            pull_target=target,
            pull_bytes=max(0.0, missing) * tiers.kv_bytes,
        )
        if source:
            self._sending.add(source, work.pull_bytes, tiers.network_rate, now)
            self._receiving.add(target, work.pull_bytes, tiers.network_rate, now)
        self.fleet.begin(work, now)
        self.fair.add(work.model, work.tenant, work.prefill_s)
        self._expected.add(request.id, work.prefill, request.chains)
        if request.session:
            self._sessions[request.tenant, request.session] = work.prefill
            self._sessions.move_to_end((request.tenant, request.session))
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)

    def _end(self, request: str, now: float, *, is_finished: bool) -> None:
        work = self.fleet.end(request, now)
        if work is None:
            return
        self._expected.drop(request)
        if is_finished and work.prefilled_s is not None:
            self._pools.decoded(work.model, work.group, now - work.prefilled_s)
        if work.prefilled_s is None:
            self.fair.take(work.model, work.tenant, work.prefill_s)
            if work.pull_bytes:
                self._sending.take(work.pull_source, work.pull_bytes, work.routed_s, now)
                self._receiving.take(work.pull_target, work.pull_bytes, work.routed_s, now)


def _bounded(retry_s: float) -> float:
    low, high = RETRY_S
    return min(high, max(low, retry_s))
