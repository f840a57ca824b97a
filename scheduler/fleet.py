"""The instances as the Conductor knows them: what they are, what they said last, what was sent to them since."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from scheduler.costs import DecodeCost, PrefillCost, TierCost

BUSY_S: Final = 30.0  # over which an instance's utilisation is a mean
UNDER_WAY_S: Final = 5.0  # so long a request may take to its instance: before, what that says is not without it
PACE: Final = 0.9  # weight of the past in the mean seconds that a token of a queue takes


class Role(Enum):
    """What an instance takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def takes_prefill(self) -> bool:
        return self is not Role.DECODE

    @property
    def takes_decode(self) -> bool:
        return self is not Role.PREFILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One engine, as it registered.

    node: the store node beside it, as a holder of the index; empty: none. engine_holder: what its own events fill in
    the index; empty: it has no events. decode_tokens: of KV that it can hold; 0: not known. grid_tokens: it can use
    prefixes of multiples of this only.
    """

    name: str
    role: Role
    model: str
    prefill: PrefillCost
    decode: DecodeCost
    tiers: TierCost
    node: str = ""
    engine_holder: str = ""
    decode_tokens: int = 0
    decode_batch: int = 0  # sequences at a time; 0: not known
    grid_tokens: int = 1
    group: str = ""  # prefill and decode hand over only within a group: one kind of engine, one way of transfer


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance says of itself: work that waits for prefill or is in it, and sequences that it decodes."""

    at_s: float
    prefill_tokens: int
    decode_batch: int
    decode_context: int  # tokens of all of them


@dataclass(slots=True)
class Work:
    """One request at the instances that it was sent to. `prefilled_s` is None until its first token is there."""

    request: str
    model: str
    tenant: str
    session: str
    tokens: int
    output_tokens: int
    prefill: str
    decode: str
    routed_s: float
    prefill_s: float  # predicted, of the prefill alone
    first_token_s: float  # predicted, and what it was once it was there
    group: str = ""  # of both instances
    computed: int = 0  # tokens of the prompt that are not cached
    ready_s: float = 0.0  # predicted, when its prefix is where it is computed
    deadline_s: float | None = None
    pull_source: str = ""
    pull_target: str = ""
    pull_bytes: float = 0.0
    prefilled_s: float | None = None

    @property
    def context(self) -> int:
        """Tokens that it takes to decode it to its end."""
        return self.tokens + self.output_tokens

    @property
    def mean_context(self) -> int:
        """Tokens of it in the middle of its decode: what its steps cost on average."""
        return self.tokens + self.output_tokens // 2

    @property
    def leaving_tokens(self) -> int:
        """That have to go to another instance to be decoded."""
        return self.tokens if self.prefill != self.decode else 0


@dataclass(slots=True)
class Share:
    """Sequences at a decode instance, and the tokens of their contexts: at their ends, and in the middle."""

    works: dict[str, Work] = field(default_factory=dict)
    context: int = 0
    mean_context: int = 0

    def add(self, work: Work) -> None:
        self.works[work.request] = work
        self.context += work.context
        self.mean_context += work.mean_context

    def take(self, request: str) -> Work | None:
        work = self.works.pop(request, None)
        if work is not None:
            self.context -= work.context
            self.mean_context -= work.mean_context
        return work


class Member:
    """An instance with its work: what was sent to it, and what it said itself. A look at it costs nothing."""

    def __init__(self, instance: Instance, now: float) -> None:
        self.instance = instance
        self.seen_s = now
        self.is_draining = False
        self.load: Load | None = None
        self.prefilling: dict[str, Work] = {}  # the front is being computed, as far as is known
        self.arriving = Share()  # to be decoded here once their prefill is done
        self.decoding = Share()
        self.others_batch = 0  # sequences here that others sent, by what the instance said
        self._phantoms = 0  # sequences that should be here by what was heard of them, and that it does not know
        self._decodes = False  # it has spoken of sequences, so it would if there were some
        self.others_context = 0.0
        self._prefilling_s = 0.0  # predicted, of all that is in `prefilling`
        self._leaving_tokens = 0  # of those in `prefilling` that are decoded elsewhere
        self._front_since_s = now
        self._told_s = 0.0  # of prefill, by what the instance said and what was sent since
        self._told_at_s = now
        self._tells = False  # it has spoken of prompts that wait, so it would if there were some
        self._unheard_s = 0.0  # of prefill, so lately sent that the instance may not have known of it
        self._pace = (0.0, 0.0)  # tokens of prompts and the seconds of their prefill, as a decaying mean
        self._busy = 0.0  # prefill seconds a second, decaying
        self._busy_at_s = now

    def queue_s(self, now: float) -> float:
        """Until a prefill that is sent now would begin. By what was sent; it is more where the instance has work of
        others too, and less where the instance knows nothing of what was sent to it long ago."""
        sent_s = self._sent_s(now)
        if self.load is None:
            return sent_s
        told_s = self._told(now)
        return max(told_s, min(sent_s, told_s + self._unheard_s) if self._tells else sent_s)

    def utilisation(self, now: float) -> float:
        """The share of its time that prefill took lately."""
        return self._busy * math.exp((self._busy_at_s - now) / BUSY_S)

    def stream(self, now: float) -> tuple[float, float]:
        """Bytes a second that leave for decode instances while it computes what was sent to it, and for how long."""
        if not self._leaving_tokens or not self._prefilling_s:
            return 0.0, 0.0
        return self._leaving_tokens * self.instance.tiers.kv_bytes / self._prefilling_s, self._sent_s(now)

    def step_s(self, *, more: int = 0, context: int = 0, is_present: bool = False) -> float:
        """A decode step with `more` sequences of `context` tokens: with all that come here, or those here now."""
        here = len(self.decoding.works) - self._phantoms
        batch = here + self.others_batch + more
        tokens = self.decoding.mean_context * here / max(1, len(self.decoding.works)) + self.others_context + context
        if not is_present:
            batch, tokens = batch + len(self.arriving.works), tokens + self.arriving.mean_context
        return self.instance.decode.seconds(batch, tokens)

    def alone_s(self, context: int) -> float:
        """A decode step of one sequence with nobody beside it."""
        return self.instance.decode.seconds(1, context)

    def has_room(self, context: int) -> bool:
        """Whether it can hold this many more tokens, and one more sequence."""
        at_most, sequences = self.instance.decode_tokens, self.instance.decode_batch
        here = len(self.decoding.works) - self._phantoms
        held = self.decoding.context * here / max(1, len(self.decoding.works))
        held += self.arriving.context + self.others_context
        count = here + len(self.arriving.works) + self.others_batch
        return (not at_most or held + context <= at_most) and (not sequences or count < sequences)

    def heard(self, load: Load, now: float) -> None:
        """Compare what it says with what was sent to it: the rest is of others. Engines that did not look for a prefix
        yet count whole prompts: what is no more than those is no rest."""
        self.seen_s = now
        self.load = load
        said, sent_s = load.prefill_tokens, self._sent_s(now)
        computed = sum(work.computed for work in self.prefilling.values())
        if said < computed:
            self._told_s = min(sent_s, self._prefilling_s * said / computed)
        else:
            self._told_s = sent_s + self._seconds(said - sum(work.tokens for work in self.prefilling.values()))
        self._told_at_s = load.at_s
        self._tells = self._tells or said > 0
        lately = now - UNDER_WAY_S
        self._unheard_s = sum(work.prefill_s for work in self.prefilling.values() if work.routed_s > lately)
        self.others_batch = max(0, load.decode_batch - len(self.decoding.works))
        self._decodes = self._decodes or load.decode_batch > 0
        old = sum(work.first_token_s < lately for work in self.decoding.works.values())
        self._phantoms = max(0, old - load.decode_batch) if self._decodes else 0
        self.others_context = self.others_batch * load.decode_context / max(1, load.decode_batch)

    def send_prefill(self, work: Work, now: float) -> None:
        if not self.prefilling:
            self._front_since_s = now
        self.prefilling[work.request] = work
        self._prefilling_s += work.prefill_s
        self._leaving_tokens += work.leaving_tokens
        self._told_s, self._told_at_s = self._told(now) + work.prefill_s, now
        tokens, seconds = self._pace
        self._pace = PACE * tokens + work.tokens, PACE * seconds + work.prefill_s
        self._busy = self.utilisation(now) + work.prefill_s / BUSY_S
        self._busy_at_s = now

    def end_prefill(self, request: str, now: float, *, is_done: bool) -> None:
        """Who goes from the middle of the queue changes nothing for its front."""
        front = next(iter(self.prefilling), None)
        work = self.prefilling.pop(request, None)
        if work is None:
            return
        self._prefilling_s = max(0.0, self._prefilling_s - work.prefill_s) if self.prefilling else 0.0
        self._leaving_tokens -= work.leaving_tokens
        if request == front:
            self._front_since_s = now
        if not is_done:
            self._told_s, self._told_at_s = max(0.0, self._told(now) - work.prefill_s), now

    def send_decode(self, work: Work) -> None:
        self.arriving.add(work)

    def begin_decode(self, request: str) -> None:
        work = self.arriving.take(request)
        if work is not None:
            self.decoding.add(work)

    def end_decode(self, request: str) -> None:
        self.arriving.take(request)
        self.decoding.take(request)
        self._phantoms = min(self._phantoms, len(self.decoding.works))

    def _sent_s(self, now: float) -> float:
        """Until all that was sent is computed, as predicted. The front may have to wait for its prefix yet."""
        if not self.prefilling:
            return 0.0
        front = next(iter(self.prefilling.values()))
        front_s = now - max(self._front_since_s, front.ready_s)
        return max(0.0, self._prefilling_s - min(front.prefill_s, front_s))

    def _told(self, now: float) -> float:
        return max(0.0, self._told_s - (now - self._told_at_s))

    def _seconds(self, queued: int) -> float:
        """To prefill prompts of so many tokens together: as long as such took lately: they are not one long one."""
        if queued <= 0:
            return 0.0
        tokens, seconds = self._pace
        return queued * seconds / tokens if tokens else self.instance.prefill.seconds(queued, 0)


class Fleet:
    """All instances by name, and all requests that are under way."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.works: dict[str, Work] = {}
        self.generation = 0  # grows with each change of who takes what

    def register(self, instance: Instance, now: float) -> None:
        """A new instance, or the same one with another role or other costs: its work stays."""
        self.generation += 1
        member = self.members.get(instance.name)
        if member is None:
            self.members[instance.name] = Member(instance, now)
        else:
            member.instance, member.seen_s, member.is_draining = instance, now, False

    def switch(self, name: str, role: Role) -> None:
        """The instance takes other work from now on; what it has it ends."""
        self.generation += 1
        member = self.members[name]
        member.instance = replace(member.instance, role=role)

    def drain(self, name: str) -> None:
        """The instance takes nothing any more; what it has it ends."""
        self.generation += 1
        self.members[name].is_draining = True

    def remove(self, name: str) -> None:
        """Forget an instance; what is under way there has been ended before."""
        self.generation += 1
        del self.members[name]

    def takers(self, model: str, *, prefill: bool) -> Iterator[Member]:
        """Who takes new work of a model: prefill or decode."""
        for member in self.members.values():
            role = member.instance.role
            takes = role.takes_prefill if prefill else role.takes_decode
            if takes and not member.is_draining and member.instance.model == model:
                yield member

    def begin(self, work: Work, now: float) -> None:
        self.works[work.request] = work
        self.members[work.prefill].send_prefill(work, now)
        self.members[work.decode].send_decode(work)

    def prefilled(self, request: str, now: float) -> Work | None:
        """The first token is there. None when that is known already, or the request is not."""
        work = self.works.get(request)
        if work is None or work.prefilled_s is not None:
            return None
        work.prefilled_s = work.first_token_s = now
        self._end_prefill(work, now, is_done=True)
        if work.decode in self.members:
            self.members[work.decode].begin_decode(request)
        return work

    def end(self, request: str, now: float) -> Work | None:
        """The request is finished, failed or cancelled: nothing of it is left anywhere. None if it is not known."""
        work = self.works.pop(request, None)
        if work is not None:
            self._end_prefill(work, now, is_done=False)
            if work.decode in self.members:
                self.members[work.decode].end_decode(request)
        return work

    def _end_prefill(self, work: Work, now: float, *, is_done: bool) -> None:
        if work.prefill in self.members:
            self.members[work.prefill].end_prefill(work.request, now, is_done=is_done)
