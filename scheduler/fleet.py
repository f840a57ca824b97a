"""The instances as the Conductor knows them: what they are, what they said last, what was sent to them since."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from scheduler.costs import DecodeCost, PrefillCost, TierCost


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
    the index, usually its name; empty: it has no events. decode_tokens: of KV that it can hold; 0: not known.
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
    tenant: str
    tokens: int
    output_tokens: int
    prefill: str
    decode: str
    routed_s: float
    prefill_s: float  # predicted, of the prefill alone
    ttft_s: float  # predicted
    transfer_s: float
    pull_source: str = ""
    pull_bytes: int = 0
    prefilled_s: float | None = None


@dataclass(slots=True)
class Member:
    """An instance with its work. Sums are kept, so that a look at it costs nothing."""

    instance: Instance
    seen_s: float
    is_draining: bool = False
    load: Load | None = None
    prefilling: dict[str, Work] = field(default_factory=dict)
    decoding: dict[str, Work] = field(default_factory=dict)  # and those whose prefill is to come here from elsewhere
    prefilling_s: float = 0.0  # predicted, of all that is in `prefilling`
    front_since_s: float = 0.0
    routed_since_s: float = 0.0  # predicted, of what was sent after the last load
    arrived_since: int = 0  # sequences that were sent to decode after the last load
    context_since: int = 0
    context: int = 0  # tokens of all that is in `decoding`, at its full length

    def queue_s(self, now: float) -> float:
        """Until a prefill that is sent now would begin: by what was sent, and by what the instance said; the larger."""
        mine = 0.0
        if self.prefilling:
            front = next(iter(self.prefilling.values()))
            mine = max(0.0, self.prefilling_s - min(front.prefill_s, max(0.0, now - self.front_since_s)))
        if self.load is None:
            return mine
        said = self.instance.prefill.seconds(self.load.prefill_tokens, 0) if self.load.prefill_tokens else 0.0
        return max(mine, max(0.0, said - (now - self.load.at_s)) + self.routed_since_s)

    def decode_load(self, now: float) -> tuple[int, int]:
        """(sequences, tokens) that it decodes or will: by what was sent, and by what it said; the larger."""
        if self.load is None:
            return len(self.decoding), self.context
        return (
            max(len(self.decoding), self.load.decode_batch + self.arrived_since),
            max(self.context, self.load.decode_context + self.context_since),
        )

    def heard(self, load: Load, now: float) -> None:
        self.seen_s = now
        self.load = load
        self.routed_since_s = 0.0
        self.arrived_since = self.context_since = 0

    def send_prefill(self, work: Work, now: float) -> None:
        if not self.prefilling:
            self.front_since_s = now
        self.prefilling[work.request] = work
        self.prefilling_s += work.prefill_s
        self.routed_since_s += work.prefill_s

    def end_prefill(self, request: str, now: float) -> None:
        work = self.prefilling.pop(request, None)
        if work is not None:
            self.prefilling_s = sum(each.prefill_s for each in self.prefilling.values())
            self.front_since_s = now

    def send_decode(self, work: Work) -> None:
        self.decoding[work.request] = work
        self.context += work.tokens + work.output_tokens
        self.arrived_since += 1
        self.context_since += work.tokens + work.output_tokens

    def end_decode(self, request: str) -> None:
        work = self.decoding.pop(request, None)
        if work is not None:
            self.context -= work.tokens + work.output_tokens


class Fleet:
    """All instances by name, and all requests that are under way."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.works: dict[str, Work] = {}

    def register(self, instance: Instance, now: float) -> None:
        """A new instance, or the same one with another role or other costs: its work stays."""
        member = self.members.get(instance.name)
        if member is None:
            self.members[instance.name] = Member(instance, now)
        else:
            member.instance, member.seen_s, member.is_draining = instance, now, False

    def switch(self, name: str, role: Role) -> None:
        """The instance takes other work from now on; what it has it ends."""
        member = self.members[name]
        member.instance = replace(member.instance, role=role)

    def remove(self, name: str, now: float) -> list[str]:
        """Forget an instance; the requests that were at it, which are under way no more."""
        member = self.members.pop(name, None)
        if member is None:
            return []
        lost = list(dict.fromkeys([*member.prefilling, *member.decoding]))
        for request in lost:
            self.end(request, now)
        return lost

    def takers(self, model: str, *, prefill: bool) -> Iterator[Member]:
        """Who takes new work of a model: prefill or decode."""
        for member in self.members.values():
            role = member.instance.role
            if not member.is_draining and member.instance.model == model:
                if role.takes_prefill if prefill else role.takes_decode:
                    yield member

    def begin(self, work: Work, now: float) -> None:
        self.works[work.request] = work
        self.members[work.prefill].send_prefill(work, now)
        self.members[work.decode].send_decode(work)

    def prefilled(self, request: str, now: float) -> None:
        work = self.works.get(request)
        if work is not None and work.prefilled_s is None:
            work.prefilled_s = now
            self._end_prefill(work, now)

    def end(self, request: str, now: float) -> Work | None:
        """The request is finished, failed or cancelled: nothing of it is left anywhere. None if it is not known."""
        work = self.works.pop(request, None)
        if work is not None:
            self._end_prefill(work, now)
            if work.decode in self.members:
                self.members[work.decode].end_decode(request)
        return work

    def _end_prefill(self, work: Work, now: float) -> None:
        if work.prefill in self.members:
            self.members[work.prefill].end_prefill(work.request, now)
