"""How many instances of each role there should be, and which should change theirs: advice for an autoscaler."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, exp
from typing import Final

from scheduler.fleet import Fleet, Member, Role
from scheduler.requests import Reason

CREDIT: Final = 20.0  # requests within their SLO that are counted on top: one that is late among few is chance
ROUNDING: Final = 1e-9  # 4 instances' worth of load, summed up from floats, is not 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """When to advise more and when fewer. Shares are of 1.

    Up is cheap to be wrong about (an idle machine for minutes), down is not (requests miss their SLO while another one
    starts, for minutes): so up at once, down late and slowly.
    """

    min_prefill: int = 1
    max_prefill: int = 64
    min_decode: int = 1
    max_decode: int = 64
    prefill_utilisation: float = 0.7  # a queue with equal work waits 1.2 times the work at 0.7, 2.8 times at 0.85
    decode_utilisation: float = 0.8  # nothing queues in a batch, but its contexts grow by their answers
    attainment: float = 0.95  # of requests within their SLO; below, the pool is too small whatever its load says
    attained_s: float = 20.0  # smoothing of the attainment; once it is well again, this must be over soon
    level_s: float = 60.0  # smoothing; the load of single long prompts (10 s of prefill) must not show
    trend_s: float = 300.0  # smoothing of the slope; shorter, and it follows the noise of the level
    horizon_s: float = 60.0  # what an instance takes to start, weights loaded from a local disk: so far is looked ahead
    trend_share: float = 0.5  # of the level, at most, is added for the trend: a step is no ramp
    drain_s: float = 60.0  # in which a queue that is there should be gone
    up_factor: float = 2.0  # at most so many times the instances that are there: what was asked for must come first
    down_margin: float = 0.2  # so much more load must still fit when one is taken away
    hold_s: float = 300.0  # too many for so long before one is taken away; as Kubernetes' autoscaler waits
    step_s: float = 60.0  # then one each so often
    switch_s: float = 30.0  # too many for so long before one is lent to the other pool; switching back takes no start

    def __post_init__(self) -> None:
        if not (0 <= self.min_prefill <= self.max_prefill and 0 <= self.min_decode <= self.max_decode):
            raise ValueError("a pool's minimum is from 0 to its maximum")
        shares = (self.prefill_utilisation, self.decode_utilisation, self.attainment)
        if not all(0 < share <= 1 for share in shares) or self.up_factor <= 1 or self.down_margin < 0:
            raise ValueError("utilisations and attainment are in (0, 1], up_factor over 1, down_margin not negative")
        if (
            min(self.attained_s, self.level_s, self.trend_s, self.drain_s) <= 0
            or min(self.hold_s, self.step_s, self.switch_s) < 0
        ):
            raise ValueError("times are not negative, and those that divide are not 0")


@dataclass(frozen=True, slots=True)
class Standing:
    """An instance that takes work, and how much it has: 1 is full."""

    name: str
    role: Role
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What was asked of one model's instances in an interval.

    prefill: seconds of prefill for each second, of refused requests too. decode: how many full instances the sequences
    in decode would fill. queue_s: until a prefill that is sent now would begin, mean of the instances. Within: requests
    whose SLO was kept, of `answered` and `paced`; refusals are counted beside them.
    """

    standing: tuple[Standing, ...]
    prefill: float
    decode: float
    queue_s: float = 0.0
    answered: int = 0
    answered_within: int = 0
    refused_ttft: int = 0
    paced: int = 0
    paced_within: int = 0
    refused_tbt: int = 0


@dataclass(frozen=True, slots=True)
class Advice:
    """How many instances there should be, once `switches` (name, new role) are done; reasons are for people.

    One that does both counts as half in each.
    """

    prefill: int
    decode: int
    reasons: tuple[str, ...] = ()
    switches: tuple[tuple[str, Role], ...] = ()


def decode_use(member: Member, tbt_s: float) -> float:
    """Which share of an instance its sequences fill: of the time between tokens, of its memory, or of its batch."""
    instance, shares = member.instance, (member.decoding, member.arriving)
    spare_s = tbt_s - instance.decode.base_s
    uses = [(member.step_s() - instance.decode.base_s) / spare_s] if spare_s > 0 else [0.0]
    if instance.decode_tokens:
        uses.append(sum(share.context for share in shares) / instance.decode_tokens)
    if instance.decode_batch:
        uses.append(sum(len(share.works) for share in shares) / instance.decode_batch)
    return max(uses)


class Meter:
    """Counts what is asked of one model and what comes of it, from one `demand` to the next."""

    def __init__(self, model: str, ttft_s: float, tbt_s: float, now: float) -> None:
        self._model, self._ttft_s, self._tbt_s = model, ttft_s, tbt_s
        self._restart(now)

    def asked(self, prefill_s: float) -> None:
        """A request was routed; what its prefill is predicted to take."""
        self._prefill_s += prefill_s

    def refused(self, reason: Reason, prefill_s: float) -> None:
        """Refused work is still asked for."""
        self._prefill_s += prefill_s
        self._refused_tbt += reason is Reason.TBT
        self._refused_ttft += reason is not Reason.TBT

    def began(self, ttft_s: float) -> None:
        """A request has its first token."""
        self._answered += 1
        self._answered_within += ttft_s <= self._ttft_s

    def ended(self, tbt_s: float) -> None:
        """A request has its last token; the mean time between them."""
        self._paced += 1
        self._paced_within += tbt_s <= self._tbt_s

    def demand(self, fleet: Fleet, now: float) -> Demand:
        """Of the time since the last one; counts begin anew."""
        standing, queues, decode = [], [], 0.0
        for member in fleet.members.values():
            instance = member.instance
            if instance.model != self._model or member.is_draining:
                continue
            queue_s = member.queue_s(now) if instance.role.takes_prefill else 0.0
            use = decode_use(member, self._tbt_s) if instance.role.takes_decode else 0.0
            if instance.role.takes_prefill:
                queues.append(queue_s)
            decode += use
            standing.append(Standing(instance.name, instance.role, max(queue_s / self._ttft_s, use)))
        made = Demand(
            standing=tuple(standing),
            prefill=self._prefill_s / max(now - self._since, ROUNDING),
            decode=decode,
            queue_s=sum(queues) / len(queues) if queues else 0.0,
            answered=self._answered,
            answered_within=self._answered_within,
            refused_ttft=self._refused_ttft,
            paced=self._paced,
            paced_within=self._paced_within,
            refused_tbt=self._refused_tbt,
        )
        self._restart(now)
        return made

    def _restart(self, now: float) -> None:
        self._since = now
        self._prefill_s = 0.0
        self._answered = self._answered_within = self._refused_ttft = 0
        self._paced = self._paced_within = self._refused_tbt = 0


class Scaling:
    """Follows the demand on one model and says how many instances it needs."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._prefill = _Pool(settings, settings.min_prefill, settings.max_prefill, settings.prefill_utilisation)
        self._decode = _Pool(settings, settings.min_decode, settings.max_decode, settings.decode_utilisation)
        self._advice = Advice(settings.min_prefill, settings.min_decode, ("nothing was observed yet",))
        self._observed_s: float | None = None

    def observe(self, demand: Demand, now: float) -> None:
        """One interval is over; times must not go back."""
        elapsed_s = None if self._observed_s is None else now - self._observed_s
        if elapsed_s is not None and elapsed_s <= 0:
            return
        self._observed_s = now
        here = {role: sum(each.role is role for each in demand.standing) for role in Role}
        both = here[Role.BOTH] / 2
        queued = demand.queue_s * (here[Role.PREFILL] + both) / self._settings.drain_s
        pools = (
            (self._prefill, Role.PREFILL, demand.prefill, queued),
            (self._decode, Role.DECODE, demand.decode, 0.0),
        )
        for pool, role, load, extra in pools:
            pool.followed(load, here[role] + both, elapsed_s)
            pool.attained(*_attained(demand, role), elapsed_s)
            pool.decide(extra, now)
        self._advice = self._advised(demand, now)

    def advice(self, now: float) -> Advice:
        """What the last observation led to; before the first one the minima."""
        if self._observed_s is None or now - self._observed_s <= self._settings.hold_s:
            return self._advice
        reasons = (f"nothing was observed for {now - self._observed_s:.0f} s", *self._advice.reasons)
        return Advice(self._advice.prefill, self._advice.decode, reasons)

    def _advised(self, demand: Demand, now: float) -> Advice:
        switches = self._lend(self._prefill, self._decode, Role.PREFILL, demand.standing, now)
        switches = switches or self._lend(self._decode, self._prefill, Role.DECODE, demand.standing, now)
        reasons = [f"prefill: {self._prefill.reason}", f"decode: {self._decode.reason}"]
        if switches:
            names = ", ".join(name for name, _ in switches)
            reasons.append(f"{names}: to {switches[0][1].value}, which lacks what the other pool has too much of")
        return Advice(self._prefill.target, self._decode.target, tuple(reasons), tuple(switches))

    def _lend(
        self, giver: "_Pool", taker: "_Pool", role: Role, standing: Iterable[Standing], now: float
    ) -> list[tuple[str, Role]]:
        """The least loaded of the one pool for the other, as many as the one can spare and the other lacks.

        Those that are lent are not held back for `hold_s`: the targets are those after the switch.
        """
        count = min(giver.spare(now), ceil(taker.target - taker.here - ROUNDING))
        if count < 1:
            return []
        givers = sorted((each for each in standing if each.role is role), key=lambda each: (each.load, each.name))
        switched = givers[:count]
        giver.lent(len(switched))
        return [(each.name, Role.DECODE if role is Role.PREFILL else Role.PREFILL) for each in switched]


class _Pool:
    """One role: its load by level and trend (Holt's smoothing, by elapsed time), its attainment, and its target."""

    def __init__(self, settings: ScalingSettings, least: int, most: int, utilisation: float) -> None:
        self._settings = settings
        self._least, self._most, self._utilisation = least, most, utilisation
        self._level = self._trend = 0.0
        self._within = self._counted = 0.0  # requests, decayed
        self._low_since_s: float | None = None
        self._stepped_s = -settings.step_s
        self._enough = least  # instances that carry the load with the margin to go down
        self.here = 0.0
        self.target = least
        self.reason = ""

    def followed(self, load: float, here: float, elapsed_s: float | None) -> None:
        self.here = here
        if elapsed_s is None:  # one interval tells little: what is there is enough until more is known
            self._level = min(load, here * self._utilisation)
            self.target = self._bounded(ceil(here))
            return
        before = self._level
        expected = before + self._trend * elapsed_s
        self._level = max(0.0, expected + _weight(elapsed_s, self._settings.level_s) * (load - expected))
        slope = (self._level - before) / elapsed_s
        self._trend += _weight(elapsed_s, self._settings.trend_s) * (slope - self._trend)

    def attained(self, within: int, counted: int, elapsed_s: float | None) -> None:
        kept = 1.0 - _weight(elapsed_s or 0.0, self._settings.attained_s)
        self._within = self._within * kept + within
        self._counted = self._counted * kept + counted

    def decide(self, extra: float, now: float) -> None:
        """The target; `extra` instances are wanted beside those for the load."""
        settings, here = self._settings, self.here
        rise = min(max(0.0, self._trend) * settings.horizon_s, settings.trend_share * self._level)
        wanted = (self._level + rise) / self._utilisation + extra
        need = ceil(wanted - ROUNDING)
        reason = f"{self._level:.2f} instances' worth of load, {rise:.2f} more expected, {extra:.2f} for the queue"
        missed = self._missed()
        if missed > 0:
            need = max(need, ceil(here * (1.0 + missed / settings.attainment) - ROUNDING), int(here) + 1)
            reason += f"; {missed:.0%} too few requests within their SLO"
        need = self._bounded(need)
        self._enough = need if missed > 0 else self._bounded(ceil(wanted * (1.0 + settings.down_margin) - ROUNDING))
        most = max(ceil(here * settings.up_factor), int(here) + 1)
        self.reason = reason
        if need > self.target:
            self.target = max(self.target, min(need, most))
        if self._enough >= self.target:
            self._low_since_s = None
        elif self._low_since_s is None:
            self._low_since_s = now
        elif now - self._low_since_s >= settings.hold_s and now - self._stepped_s >= settings.step_s:
            self.target -= 1
            self._stepped_s = now
            self.reason = f"{reason}; fewer are enough since {now - self._low_since_s:.0f} s"

    def spare(self, now: float) -> int:
        """How many the pool could do without, with the margin to go down, for some time already."""
        if self._low_since_s is None or now - self._low_since_s < self._settings.switch_s:
            return 0
        return max(0, int(self.here) - self._enough)

    def lent(self, count: int) -> None:
        self.target = max(self._enough, min(self.target, int(self.here) - count))

    def _missed(self) -> float:
        """What lacks to the attainment that is wanted."""
        return max(0.0, self._settings.attainment - (self._within + CREDIT) / (self._counted + CREDIT))

    def _bounded(self, count: int) -> int:
        return min(max(count, self._least), self._most)


def _attained(demand: Demand, role: Role) -> tuple[int, int]:
    """(requests within their SLO, all that were counted): refused ones are not within."""
    if role is Role.PREFILL:
        return demand.answered_within, demand.answered + demand.refused_ttft
    return demand.paced_within, demand.paced + demand.refused_tbt


def _weight(elapsed_s: float, constant_s: float) -> float:
    """Of a new value in a mean that forgets with this time constant."""
    return 1.0 - exp(-elapsed_s / constant_s)
