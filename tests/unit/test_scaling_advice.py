"""Advice on simulated demand: up at once, down late and by one, no flapping, roles switched before machines start."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.costs import DecodeCost, PrefillCost, TierCost
from scheduler.fleet import Fleet, Instance, Load, Role, Work
from scheduler.requests import Reason
from scheduler.scaling import Advice, Demand, Meter, Scaling, ScalingSettings, Standing

HOLD_S = ScalingSettings().hold_s
LOADS = Callable[[float], float]


class Cluster:
    """Instances that are there `start_s` after they were advised, and gone at once; roles are switched as advised."""

    def __init__(self, prefill: int, decode: int, settings: ScalingSettings, start_s: float = 60.0) -> None:
        self.scaling = Scaling(settings)
        self.counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.advices: list[tuple[float, Advice]] = []
        self.switched = 0
        self._start_s = start_s
        self._starting: list[tuple[float, Role]] = []
        self._now = 0.0

    def run(self, seconds: float, prefill: LOADS, decode: LOADS = lambda _: 1.0, every_s: float = 1.0) -> None:
        """Loads are in full instances, of seconds since this run began."""
        began_s = self._now
        while self._now < began_s + seconds:
            since_s = self._now - began_s
            for ready_s, role in [each for each in self._starting if each[0] <= self._now]:
                self._starting.remove((ready_s, role))
                self.counts[role] += 1
            asked = {Role.PREFILL: prefill(since_s), Role.DECODE: decode(since_s)}
            self.scaling.observe(self._demand(asked), self._now)
            advice = self.scaling.advice(self._now)
            self.advices.append((self._now, advice))
            self._follow(advice)
            self._now += every_s

    def _demand(self, asked: dict[Role, float]) -> Demand:
        asked = {role: max(0.0, load) for role, load in asked.items()}
        kept = {role: min(1.0, self.counts[role] / load) if load else 1.0 for role, load in asked.items()}
        return Demand(
            standing=tuple(self._standing()),
            prefill=asked[Role.PREFILL],
            decode=asked[Role.DECODE],
            answered=100,
            answered_within=round(100 * kept[Role.PREFILL]),
            paced=100,
            paced_within=round(100 * kept[Role.DECODE]),
        )

    def _standing(self) -> Iterator[Standing]:
        for role, count in self.counts.items():
            for number in range(count):
                yield Standing(f"{role.value}{number}", role, load=number / 10)

    def _follow(self, advice: Advice) -> None:
        for name, role in advice.switches:
            self.switched += 1
            self.counts[Role.DECODE if role is Role.PREFILL else Role.PREFILL] -= 1
            self.counts[role] += 1
            assert name.endswith("0") or len(advice.switches) > 1
        for role, wanted in ((Role.PREFILL, advice.prefill), (Role.DECODE, advice.decode)):
            self.counts[role] = min(self.counts[role], wanted)
            coming = sum(each is role for _, each in self._starting)
            for _ in range(wanted - self.counts[role] - coming):
                self._starting.append((self._now + self._start_s, role))

    def targets(self, after_s: float = 0.0) -> list[int]:
        return [advice.prefill for now, advice in self.advices if now >= after_s]

    def changes(self, after_s: float = 0.0) -> int:
        return sum(before != after for before, after in pairwise(self.targets(after_s)))


class TestPools:
    def test_a_step_of_load_is_answered_within_seconds_and_settles_at_what_it_needs(self) -> None:
        cluster = Cluster(4, 2, ScalingSettings())
        cluster.run(600, lambda _: 2.5)
        assert cluster.targets()[-1] == 4
        cluster.run(1800, lambda _: 7.0)
        assert max(cluster.targets(610)[:1]) > 4
        assert 10 <= cluster.targets()[-1] <= 12
        assert max(cluster.targets()) <= 16

    def test_what_is_asked_for_at_once_is_bounded_by_what_is_there(self) -> None:
        cluster = Cluster(2, 2, ScalingSettings(), start_s=120)
        cluster.run(119, lambda _: 50.0)
        assert max(cluster.targets()) == 4
        cluster.run(500, lambda _: 50.0)
        assert max(cluster.targets()) == 64

    def test_a_ramp_is_met_before_it_hurts(self) -> None:
        """The load grows by one instance in two minutes: those that it needs are there when it comes."""
        cluster = Cluster(3, 2, ScalingSettings())
        cluster.run(300, lambda _: 1.5)
        short = 0
        for minute in range(30):
            cluster.run(60, lambda since, minute=minute: 1.5 + (minute * 60 + since) / 120)
            short += cluster.counts[Role.PREFILL] < 1.5 + (minute + 1) / 2
        assert short == 0

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("load", [2.8, 3.5])
    def test_noise_round_a_threshold_does_not_flap(self, seed: int, load: float) -> None:
        """4 and 5 instances are exactly what is needed for loads of 2.8 and 3.5."""
        draw = random.Random(seed)
        cluster = Cluster(5, 2, ScalingSettings())
        cluster.run(3 * 3600, lambda _: load * (1 + draw.gauss(0, 0.3)))
        assert cluster.changes(600) <= 2

    def test_days_are_followed_in_few_changes(self) -> None:
        day_s = 86_400.0
        draw = random.Random(5)
        cluster = Cluster(2, 2, ScalingSettings())

        def load(now: float) -> float:
            return (5 - 4 * math.cos(2 * math.pi * now / day_s)) * (1 + draw.gauss(0, 0.2))

        cluster.run(2 * day_s, load, every_s=10.0)
        assert 13 <= max(cluster.targets()) <= 16
        assert min(cluster.targets(3600)) in (1, 2, 3)
        assert cluster.changes() <= 80  # 12 up and 12 down in a day are the least

    def test_after_a_burst_shorter_than_the_hold_nothing_is_taken_away_before_it_is_over(self) -> None:
        cluster = Cluster(4, 2, ScalingSettings())
        cluster.run(600, lambda _: 2.5)
        cluster.run(60, lambda _: 9.0)
        high = cluster.targets()[-1]
        assert high >= 8
        cluster.run(HOLD_S - 1, lambda _: 2.5)
        assert cluster.targets()[-1] == max(cluster.targets()) >= high
        cluster.run(3600, lambda _: 2.5)
        assert cluster.targets()[-1] == 5  # 4 would do, but not with the margin
        assert all(before - after <= 1 for before, after in pairwise(cluster.targets()))

    def test_requests_that_miss_their_slo_raise_the_pool_whatever_its_load_says(self) -> None:
        scaling = Scaling(ScalingSettings())
        scaling.observe(demand(4, 4, 0.5, 0.5, answered=100, answered_within=60, paced=100, paced_within=100), 0.0)
        advice = scaling.advice(0.0)
        assert (advice.prefill > 4, advice.decode) == (True, 4)
        assert "SLO" in advice.reasons[0]

    def test_one_late_request_among_few_is_chance(self) -> None:
        scaling = Scaling(ScalingSettings())
        scaling.observe(demand(4, 4, 0.5, 0.5, answered=1, answered_within=0), 0.0)
        assert scaling.advice(0.0).prefill == 4

    def test_advice_that_is_old_says_so_and_switches_nothing(self) -> None:
        scaling = Scaling(ScalingSettings())
        assert "nothing was observed" in scaling.advice(0.0).reasons[0]
        scaling.observe(demand(4, 4, 0.5, 0.5), 0.0)
        old = scaling.advice(HOLD_S + 100)
        assert (old.prefill, old.decode, old.switches) == (4, 4, ())
        assert old.reasons[0] == "nothing was observed for 400 s"

    def test_refused_requests_have_missed_their_slo(self) -> None:
        scaling = Scaling(ScalingSettings())
        scaling.observe(demand(4, 4, 0.5, 0.5, paced=50, paced_within=50, refused_tbt=50), 0.0)
        assert scaling.advice(0.0).decode > 4

    def test_a_queue_raises_prefill_by_what_empties_it_in_time(self) -> None:
        scaling = Scaling(ScalingSettings())
        scaling.observe(demand(4, 4, 2.8, 2.0, queue_s=30.0), 0.0)
        assert scaling.advice(0.0).prefill == 6  # 4 for the load, 30 s of 4 instances in 60 s

    def test_minimum_and_maximum_are_kept(self) -> None:
        limits = ScalingSettings(min_prefill=2, max_prefill=6)
        cluster = Cluster(3, 2, limits)
        cluster.run(900, lambda _: 100.0)
        assert max(cluster.targets()) == 6
        cluster.run(3 * 3600, lambda _: 0.0)
        assert cluster.targets()[-1] == 2

    @pytest.mark.parametrize("wrong", [{"min_prefill": 3, "max_prefill": 2}, {"attainment": 0.0}, {"up_factor": 1.0}])
    def test_settings_that_make_no_sense_are_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValueError):
            ScalingSettings(**wrong)

    @given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100), st.floats(0, 60), st.integers(0, 20)), max_size=50))
    @settings(max_examples=50, deadline=None)
    def test_whatever_comes_targets_stay_in_their_bounds(self, drawn: list[tuple[float, float, float, int]]) -> None:
        scaling = Scaling(ScalingSettings(max_prefill=10, max_decode=10))
        for number, (prefill, decode, queue_s, refused) in enumerate(drawn):
            scaling.observe(demand(3, 3, prefill, decode, queue_s=queue_s, refused_ttft=refused), number * 7.0)
            advice = scaling.advice(number * 7.0)
            assert 1 <= advice.prefill <= 10
            assert 1 <= advice.decode <= 10


class TestSwitches:
    def test_the_least_loaded_of_the_idle_pool_is_lent_before_a_machine_is_started(self) -> None:
        cluster = Cluster(8, 4, ScalingSettings())
        cluster.run(60, lambda _: 5.0, lambda _: 3.0)
        cluster.run(120, lambda _: 2.0, lambda _: 4.5)
        first = next(advice for _, advice in cluster.advices if advice.switches)
        assert first.switches[0] == ("prefill0", Role.DECODE)
        assert cluster.counts[Role.PREFILL] + cluster.counts[Role.DECODE] <= 13
        assert cluster.counts[Role.DECODE] >= 6

    def test_a_load_that_swings_between_the_pools_does_not_switch_all_the_time(self) -> None:
        """Each half minute the other pool has more: shorter than what it takes to be sure."""
        cluster = Cluster(6, 6, ScalingSettings())
        cluster.run(1800, lambda now: 3 + math.sin(now / 10), lambda now: 3 - math.sin(now / 10))
        assert cluster.switched == 0

    def test_nothing_is_switched_where_both_pools_are_short(self) -> None:
        cluster = Cluster(4, 4, ScalingSettings())
        cluster.run(300, lambda _: 6.0, lambda _: 6.0)
        assert cluster.switched == 0

    def test_instances_that_do_both_count_as_half_in_each_pool_and_are_not_switched(self) -> None:
        both = tuple(Standing(f"both{number}", Role.BOTH, 0.5) for number in range(4))
        scaling = Scaling(ScalingSettings())
        for second in range(100):
            scaling.observe(Demand(standing=both, prefill=0.5, decode=3.0), float(second))
        advice = scaling.advice(100.0)
        assert (advice.prefill, advice.decode, advice.switches) == (2, 4, ())


class TestMeter:
    def test_demand_is_what_was_asked_and_what_is_there(self) -> None:
        fleet = Fleet()
        for name, role in (("a", Role.PREFILL), ("b", Role.DECODE), ("c", Role.BOTH)):
            fleet.register(instance(name, role), 0.0)
        fleet.register(instance("other", Role.BOTH, model="another"), 0.0)
        meter = Meter("demo", ttft_s=10.0, tbt_s=0.1, now=0.0)
        fleet.members["b"].heard(Load(at_s=1.0, prefill_tokens=0, decode_batch=40, decode_context=0), 1.0)
        meter.asked(3.0)
        meter.refused(Reason.TTFT, 2.0)
        meter.refused(Reason.TBT, 1.0)
        for ttft_s in (1.0, 9.0, 11.0):
            meter.began(ttft_s)
        meter.ended(0.05)
        made = meter.demand(fleet, 2.0)
        assert made.prefill == 3.0
        assert made.decode == pytest.approx(0.4)
        assert (made.answered, made.answered_within, made.refused_ttft) == (3, 2, 1)
        assert (made.paced, made.paced_within, made.refused_tbt) == (1, 1, 1)
        assert sorted(each.name for each in made.standing) == ["a", "b", "c"]
        assert meter.demand(fleet, 3.0).prefill == 0.0

    def test_what_is_queued_is_seen(self) -> None:
        fleet = Fleet()
        fleet.register(instance("a", Role.PREFILL), 0.0)
        fleet.register(instance("b", Role.PREFILL), 0.0)
        fleet.register(instance("d", Role.DECODE), 0.0)
        fleet.begin(work("r", "a", "d", prefill_s=8.0), 0.0)
        made = Meter("demo", ttft_s=10.0, tbt_s=0.1, now=0.0).demand(fleet, 0.0)
        assert made.queue_s == pytest.approx(4.0)
        assert {each.name: each.load for each in made.standing}["b"] == 0.0


def instance(name: str, role: Role, model: str = "demo") -> Instance:
    return Instance(
        name=name,
        role=role,
        model=model,
        prefill=PrefillCost(0.0, 1e-3, 0.0, 0.0),
        decode=DecodeCost(0.0, 1e-3, 0.0),
        tiers=TierCost(1, 1.0, 1.0, 1.0),
    )


def work(name: str, prefill: str, decode: str, prefill_s: float) -> Work:
    return Work(
        request=name,
        model="demo",
        tenant="",
        session="",
        tokens=8000,
        output_tokens=10,
        prefill=prefill,
        decode=decode,
        routed_s=0.0,
        prefill_s=prefill_s,
        first_token_s=prefill_s,
    )


def demand(prefills: int, decodes: int, prefill: float, decode: float, **counts: float) -> Demand:
    standing = [Standing(f"p{number}", Role.PREFILL, 0.5) for number in range(prefills)]
    standing += [Standing(f"d{number}", Role.DECODE, 0.5) for number in range(decodes)]
    return Demand(standing=tuple(standing), prefill=prefill, decode=decode, **counts)  # type: ignore[arg-type]
