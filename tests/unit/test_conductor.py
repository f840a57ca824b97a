"""The Conductor's decisions: where requests go, when none takes them, and that nothing of them is left at the end."""

from collections.abc import Callable
from itertools import count
from random import Random

import numpy as np
import pytest

from scheduler.admission import ADMISSIONS
from scheduler.conductor import Conductor
from scheduler.costs import DecodeCost, PrefillCost, TierCost
from scheduler.fleet import Instance, Load, Role
from scheduler.index import PrefixIndex
from scheduler.policies import POLICIES
from scheduler.requests import Chain, Explanation, Names, Reason, Refusal, Request, Route
from scheduler.tuning import Slo, Tuning

BLOCK = 64
DRAM, NVME = 1, 2
PREFILL = PrefillCost(0.01, 1e-3, 0.0, 0.0)  # a millisecond a token
DECODE = DecodeCost(0.02, 0.001, 1e-6)
TIERS = TierCost(kv_bytes=1000, dram_rate=1e9, nvme_rate=1e8, network_rate=1e8)

Made = Callable[..., Conductor]
numbers = count(1)


def names(start: int, blocks: int) -> Names:
    return np.arange(start, start + blocks, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def request(blocks: int = 16, start: int = 1, **more: object) -> Request:
    fields: dict[str, object] = {
        "chains": (Chain(names(start, blocks), BLOCK),),
        "arrived_s": 0.0,
        "model": "m",
        "id": f"r{next(numbers)}",
        "tokens": blocks * BLOCK + 10,
        "output_tokens": 100,
    }
    return Request(**(fields | more))  # type: ignore[arg-type]


def instance(name: str, role: Role = Role.PREFILL, **more: object) -> Instance:
    fields: dict[str, object] = {"node": f"node:{name}", "prefill": PREFILL, "decode": DECODE, "tiers": TIERS}
    return Instance(name=name, role=role, **({"model": "m"} | fields | more))  # type: ignore[arg-type]


def conductor(
    policy: str = "kvcache_centric",
    admission: str = "none",
    *,
    prefills: int = 3,
    decodes: int = 2,
    slo: Slo = Slo(),
    **tuning: object,
) -> Conductor:
    draws = count()
    tuned = Tuning(**tuning)  # type: ignore[arg-type]

    def draw() -> float:
        return next(draws) * 0.37 % 1

    made = Conductor(PrefixIndex(), POLICIES[policy](draw, tuned), ADMISSIONS[admission](), slo, draw, tuned)
    for number in range(prefills):
        made.register(instance(f"p{number}"), 0.0)
    for number in range(decodes):
        made.register(instance(f"d{number}", Role.DECODE), 0.0)
    return made


def holds(made: Conductor, node: str, chain: Names, tier: int = DRAM) -> None:
    made.index.stored(made.holder(f"node:{node}"), tier, chain)


def routed(made: Conductor, asked: Request, now: float = 0.0) -> Route:
    decision = made.route(asked, now)
    assert isinstance(decision, Route), decision
    return decision


def refused(made: Conductor, asked: Request, now: float = 0.0) -> Refusal:
    decision = made.route(asked, now)
    assert isinstance(decision, Refusal), decision
    return decision


@pytest.mark.parametrize("policy", POLICIES)
class TestEveryPolicy:
    def test_a_request_goes_to_a_prefill_and_a_decode_instance(self, policy: str) -> None:
        route = routed(conductor(policy), request())
        assert route.prefill[0] == "p"
        assert route.decode[0] == "d"

    def test_a_prompt_without_blocks_is_served(self, policy: str) -> None:
        route = routed(conductor(policy), request(0))
        assert route.cached_tokens == 0

    def test_a_fleet_without_any_prefix_is_no_division_by_nothing(self, policy: str) -> None:
        route = routed(conductor(policy), request())
        assert route.ttft_s == pytest.approx(PREFILL.seconds(1034, 0))

    def test_who_drains_or_is_gone_is_not_chosen(self, policy: str) -> None:
        made = conductor(policy)
        routed(made, request())
        made.drain("p0")
        made.remove("p1", 0.0)
        assert {routed(made, request()).prefill for _ in range(20)} == {"p2"}

    def test_excluded_instances_are_not_chosen(self, policy: str) -> None:
        made = conductor(policy)
        for _ in range(20):
            decision = made.route(request(), 0.0, exclude={"p0", "p2", "d1"})
            assert isinstance(decision, Route)
            assert (decision.prefill, decision.decode) == ("p1", "d0")

    def test_an_explanation_plans_nothing(self, policy: str) -> None:
        made = conductor(policy)
        explained = made.explain(request(), 0.0)
        assert len(explained.rows) == 3
        assert [row["is_chosen"] for row in explained.rows].count(True) == 1
        assert not made.fleet.works

    def test_at_least_the_last_token_is_computed(self, policy: str) -> None:
        made = conductor(policy, prefills=1)
        holds(made, "p0", names(1, 16))
        route = routed(made, request(16, tokens=16 * BLOCK))
        assert route.cached_tokens == 16 * BLOCK - 1


def test_the_session_that_shares_a_prefix_goes_where_it_lies() -> None:
    for policy in ("prefix_affinity", "kvcache_centric"):
        made = conductor(policy)
        holds(made, "p1", names(1, 12))
        route = routed(made, request(16))
        assert (route.prefill, route.cached_tokens, route.pull) == ("p1", 12 * BLOCK, None)


def test_a_busy_holder_is_left_for_an_idle_instance_that_pulls() -> None:
    made = conductor()
    holds(made, "p1", names(1, 15))
    busy = [routed(made, request(16, start=1)) for _ in range(2)]
    assert busy[0].prefill == "p1"
    pulled = next(route for route in (routed(made, request(16)) for _ in range(8)) if route.pull is not None)
    assert pulled.prefill != "p1"
    assert pulled.pull is not None
    assert (pulled.pull.source, pulled.pull.first, pulled.pull.stop) == ("node:p1", 0, 15)
    assert pulled.pull.target == f"node:{pulled.prefill}"


def test_local_policies_never_pull() -> None:
    for policy in ("random", "round_robin", "least_loaded", "prefix_affinity"):
        made = conductor(policy)
        holds(made, "p1", names(1, 15))
        assert all(routed(made, request()).pull is None for _ in range(10))


def test_a_little_more_elsewhere_is_not_worth_a_pull() -> None:
    made = conductor(prefills=2, balancing_threshold=1.5)
    holds(made, "p0", names(1, 12))
    holds(made, "p1", names(1, 15))
    for _ in range(3):
        routed(made, request(16), 0.0)
    assert all(work.pull_source == "" for work in made.fleet.works.values())


def test_a_busy_source_is_avoided_and_at_last_nobody_pulls() -> None:
    made = conductor(prefills=1, decodes=1)
    chain = names(1, 16)
    for node in ("a", "b"):
        holds(made, node, chain)
    made.register(instance("p0", tiers=TierCost(1000, 1e9, 1e8, network_rate=3e6)), 0.0)  # .34 s a prompt
    first, second = routed(made, request()), None
    made.prefilled(first.request, 0.0)
    made.finished(first.request, 0.0)  # so that it is expected nowhere
    second = routed(made, request())
    assert first.pull is not None
    assert second.pull is not None
    assert first.pull.source != second.pull.source
    assert second.transfer_s > 1.5 * first.transfer_s  # the target's link still has the first to receive


def test_a_disk_slower_than_computing_is_not_read() -> None:
    slow = TierCost(kv_bytes=1000, dram_rate=1e9, nvme_rate=1e5, network_rate=1e8)  # 10 ms a token
    made = conductor(prefills=0)
    made.register(instance("p0", tiers=slow), 0.0)
    holds(made, "p0", names(1, 4), DRAM)
    holds(made, "p0", names(1, 16), NVME)
    route = routed(made, request(16))
    assert route.cached_tokens == 4 * BLOCK


def test_what_an_instance_is_about_to_compute_counts_there() -> None:
    made = conductor("prefix_affinity", prefills=2)
    first = routed(made, request(16, start=500))
    other = "p1" if first.prefill == "p0" else "p0"
    made.heartbeat(other, Load(0.0, 500, 0, 0), 0.0)  # not as long as the prefill, which is in the queue of the first
    second = routed(made, request(16, start=500))
    assert second.prefill == first.prefill
    assert second.cached_tokens == 16 * BLOCK
    for route in (first, second):
        made.failed(route.request, 0.0)
    assert routed(made, request(16, start=500)).cached_tokens == 0


def test_requests_sent_since_the_last_poll_count() -> None:
    made = conductor("least_loaded", prefills=2)
    for name in ("p0", "p1"):
        made.heartbeat(name, Load(0.0, 5000, 0, 0), 0.0)
    sent = [routed(made, request(16, start=1000 * turn)).prefill for turn in range(1, 11)]
    assert sent.count("p0") == 5
    assert made.fleet.members["p0"].queue_s(0.0) == pytest.approx(5.01 + 5 * PREFILL.seconds(1034, 0))


def test_a_source_that_sends_to_others_is_slower_though_the_target_is_idle() -> None:
    made = conductor(prefills=1, decodes=1)
    holds(made, "a", names(1, 16))
    slow = TierCost(1000, 1e9, 1e8, network_rate=3e6)
    made.register(instance("p0", tiers=slow), 0.0)
    first = routed(made, request())
    made.drain("p0")
    made.register(instance("p1", tiers=slow), 0.0)
    assert routed(made, request()).transfer_s > 1.5 * first.transfer_s


def test_a_prompt_that_all_share_does_not_send_all_to_its_holder() -> None:
    for policy in ("prefix_affinity", "kvcache_centric"):
        made = conductor(policy)
        holds(made, "p1", names(1, 2))
        sent = [
            routed(made, request(chains=(Chain(np.concatenate([names(1, 2), names(1000 * turn, 14)]), BLOCK),))).prefill
            for turn in range(1, 31)
        ]
        assert all(5 <= sent.count(f"p{number}") <= 15 for number in range(3)), policy


def test_what_others_sent_counts_once_it_is_polled() -> None:
    made = conductor("least_loaded", prefills=2)
    made.heartbeat("p0", Load(0.0, 50_000, 0, 0), 0.0)
    assert [routed(made, request()).prefill for _ in range(10)] == ["p1"] * 10


def test_a_poll_ages() -> None:
    made = conductor("least_loaded", prefills=1)
    made.heartbeat("p0", Load(0.0, 10_000, 0, 0), 0.0)
    assert made.fleet.members["p0"].queue_s(0.0) == pytest.approx(10.01)
    assert made.fleet.members["p0"].queue_s(8.0) == pytest.approx(2.01)
    assert made.fleet.members["p0"].queue_s(99.0) == 0


def test_decodes_go_to_the_shorter_step() -> None:
    made = conductor(decodes=3)
    sent = [routed(made, request()).decode for _ in range(30)]
    assert [sent.count(f"d{number}") for number in range(3)] == [10, 10, 10]


def test_a_decode_instance_that_is_full_gets_nothing_while_others_have_room() -> None:
    made = conductor(decodes=1)
    made.register(instance("small", Role.DECODE, decode_tokens=1500, decode=DecodeCost(0.001, 0, 0)), 0.0)
    sent = [routed(made, request()).decode for _ in range(4)]
    assert sent == ["small", "d0", "d0", "d0"]


def test_an_idle_instance_of_both_roles_keeps_its_request_and_a_busy_one_hands_it_over() -> None:
    made = conductor(prefills=0, decodes=1, slo=Slo(tbt_s=5.0))
    made.register(instance("both", Role.BOTH), 0.0)
    assert routed(made, request(1)).is_collocated
    for turn in range(1, 20):
        routed(made, request(16, start=1000 * turn))
    assert not routed(made, request(16)).is_collocated


def test_groups_do_not_mix() -> None:
    made = conductor(prefills=0, decodes=0)
    made.register(instance("pv", group="vllm"), 0.0)
    made.register(instance("ds", Role.DECODE, group="sglang"), 0.0)
    assert refused(made, request()).reason is Reason.NO_INSTANCE
    made.register(instance("dv", Role.DECODE, group="vllm"), 0.0)
    assert routed(made, request()).decode == "dv"


def test_another_model_is_not_served() -> None:
    assert refused(conductor(), request(model="other")).reason is Reason.NO_INSTANCE


def test_a_role_can_be_switched() -> None:
    made = conductor(prefills=1, decodes=2)
    made.switch("d0", Role.PREFILL)
    assert {routed(made, request(start=1000 * turn)).decode for turn in range(9)} == {"d1"}
    assert {work.prefill for work in made.fleet.works.values()} == {"p0", "d0"}


def test_a_session_stays_where_it_was_if_that_costs_little() -> None:
    made = conductor()
    first = routed(made, request(16, start=9000, session="s"))
    made.finished(first.request, 0.0)
    for turn in range(10):
        again = routed(made, request(1, start=9100 + 20 * turn, session="s"))
        made.finished(again.request, 0.0)
        assert again.prefill == first.prefill
    made.heartbeat(first.prefill, Load(0.0, 60_000, 0, 0), 0.0)
    assert routed(made, request(1, start=9900, session="s")).prefill != first.prefill


def test_ttft_over_the_slo_is_refused_with_a_time_to_come_back() -> None:
    made = conductor(admission="early", prefills=1, slo=Slo(ttft_s=3.0))
    for _ in range(2):
        routed(made, request(16, start=1000 * next(numbers)))
    refusal = refused(made, request(16, start=7))
    assert refusal.reason is Reason.TTFT
    assert refusal.ttft_s > 3.0
    assert 1 <= refusal.retry_after_s <= 60


def test_admission_none_refuses_nothing_but_a_deadline() -> None:
    made = conductor(admission="none", prefills=1, slo=Slo(ttft_s=0.1, tbt_s=1e-9))
    for _ in range(5):
        routed(made, request(16, start=1000 * next(numbers)))
    assert refused(made, request(16, start=7, deadline_s=2.0)).reason is Reason.TTFT


def test_time_that_a_request_waited_before_counts() -> None:
    made = conductor(admission="early", slo=Slo(ttft_s=3.0))
    assert refused(made, request(arrived_s=0.0), now=2.5).reason is Reason.TTFT


def test_baseline_wastes_a_prefill_that_early_rejection_saves() -> None:
    full = Load(0.0, 0, 500, 500_000)
    slow = Slo(tbt_s=0.1)
    baseline = conductor("least_loaded", "baseline", decodes=1, slo=slow)
    baseline.heartbeat("d0", full, 0.0)
    route = routed(baseline, request())
    late = baseline.prefilled(route.request, 1.0)
    assert late is not None
    assert late.reason is Reason.TBT
    assert not baseline.fleet.works
    early = conductor("least_loaded", "early", decodes=1, slo=slow)
    early.heartbeat("d0", full, 0.0)
    assert refused(early, request()).reason is Reason.TBT


def test_prediction_sees_what_is_still_being_prefilled() -> None:
    """60 prompts are under way to an idle decode pool that can take 40: early rejection sees an idle pool."""
    for admission, taken in (("early", 60), ("predictive", 40)):
        made = conductor("least_loaded", admission, prefills=60, decodes=1, slo=Slo(tbt_s=0.1))
        decode = DecodeCost(0.02, 0.002, 0.0)
        made.register(instance("d0", Role.DECODE, decode=decode), 0.0)
        admitted = sum(isinstance(made.route(request(16, start=1000 * at), 0.0), Route) for at in range(1, 61))
        assert admitted == pytest.approx(taken, abs=1), admission


def test_low_priority_is_refused_first() -> None:
    made = conductor(admission="early", prefills=1, slo=Slo(ttft_s=4.0))
    routed(made, request(16, start=3000))
    routed(made, request(16, start=4000))
    assert refused(made, request(16, start=5000, priority=-1)).reason is Reason.TTFT
    routed(made, request(16, start=5000))


def test_a_tenant_with_more_than_its_share_makes_way_for_others() -> None:
    made = conductor(admission="early", prefills=1, slo=Slo(ttft_s=20.0))
    for turn in range(11):
        routed(made, request(16, start=10_000 + 100 * turn, tenant="greedy"))
    routed(made, request(16, start=20_000, tenant="modest"))
    assert refused(made, request(16, start=21_000, tenant="greedy")).reason is Reason.FAIR_SHARE
    routed(made, request(16, start=22_000, tenant="modest"))


def test_a_tenant_alone_may_use_all() -> None:
    made = conductor(admission="early", prefills=1, slo=Slo(ttft_s=20.0))
    for turn in range(17):
        routed(made, request(16, start=10_000 + 100 * turn, tenant="greedy"))


def test_a_busy_fleet_does_not_compute_a_shared_prefix_twice_though_one_request_would_gain() -> None:
    """Two instances, 64 requests at once over 8 documents: each alone would rather begin where the queue is shorter."""
    computed = {}
    for weight in (0.0, 2.0):
        made = conductor("prefix_affinity", prefills=2, work_weight=weight)
        total, asked_for = 0, Random(1)
        for _ in range(64):
            document = names(1 + 1000 * asked_for.randrange(8), 16)
            asked = request(chains=(Chain(document, BLOCK),), tokens=16 * BLOCK + 600)
            total += asked.tokens - routed(made, asked).cached_tokens
        computed[weight] = total - 64 * 600
    assert computed[2.0] < 10 * 16 * BLOCK
    assert computed[0.0] > 1.3 * computed[2.0]


def test_a_prefix_is_used_as_far_as_the_grid_of_its_instance() -> None:
    made = conductor(prefills=0)
    made.register(instance("p0", grid_tokens=256), 0.0)
    holds(made, "p0", names(1, 15))
    holds(made, "a", names(50, 15))
    assert routed(made, request()).cached_tokens == 768
    assert routed(made, request(start=50)).cached_tokens == 768


def test_a_heavier_tenant_has_a_larger_share() -> None:
    made = conductor(admission="early", prefills=1, slo=Slo(ttft_s=20.0), weights={"heavy": 20.0})
    for turn in range(11):
        routed(made, request(16, start=10_000 + 100 * turn, tenant="heavy"))
    routed(made, request(16, start=20_000, tenant="modest"))
    routed(made, request(16, start=21_000, tenant="heavy"))


def test_silent_instances_are_removed_with_their_requests() -> None:
    made = conductor("round_robin")
    sent = [routed(made, request()) for _ in range(3)]
    for name in ("p1", "p2", "d0", "d1"):
        made.heartbeat(name, Load(9.0, 0, 0, 0), 9.0)
    ended = made.tick(10.0, silent_s=3.0)
    assert ended.silent == ["p0"]
    assert ended.lost == [route.request for route in sent if route.prefill == "p0"]
    assert made.check() == []


def test_a_request_whose_deadline_passes_in_the_queue_is_dropped() -> None:
    made = conductor(prefills=1)
    late = routed(made, request(deadline_s=5.0))
    assert made.tick(4.0, 100.0).expired == []
    assert made.tick(5.1, 100.0).expired == [late.request]
    assert not made.fleet.works


def test_a_deadline_is_met_by_the_first_token() -> None:
    made = conductor(prefills=1)
    route = routed(made, request(deadline_s=5.0))
    made.prefilled(route.request, 4.0)
    assert made.tick(6.0, 100.0).expired == []
    assert list(made.fleet.works) == [route.request]


def test_a_request_nobody_speaks_of_is_forgotten() -> None:
    made = conductor()
    routed(made, request())
    made.tick(2000.0, 10_000.0)
    assert not made.fleet.works
    assert made.check() == []


def test_nothing_is_left_of_requests_that_ended_in_whatever_way() -> None:
    made = conductor()
    holds(made, "p1", names(1, 15))
    ends = (made.finished, made.failed, made.cancelled)
    sent = [routed(made, request(16, session=f"s{turn}", tenant=f"t{turn % 2}")) for turn in range(30)]
    for turn, route in enumerate(sent):
        if turn % 2:
            assert made.prefilled(route.request, 1.0) is None
            assert made.prefilled(route.request, 1.0) is None
        ends[turn % 3](route.request, 2.0)
        ends[turn % 3](route.request, 2.0)
        assert made.check() == []
    assert not made.fleet.works
    assert all(member.queue_s(2.0) == 0 for member in made.fleet.members.values())
    assert made.fair.waiting_s() == {}


def test_an_unknown_request_ends_without_harm() -> None:
    made = conductor()
    made.prefilled("nobody", 0.0)
    made.finished("nobody", 0.0)
    assert made.check() == []


def test_a_request_that_is_routed_again_is_under_way_once() -> None:
    made = conductor()
    asked = request()
    routed(made, asked)
    routed(made, asked)
    assert list(made.fleet.works) == [asked.id]
    assert made.check() == []


def test_two_ways_of_naming_blocks_count_side_by_side() -> None:
    made = conductor(prefills=0)
    made.register(instance("p0", engine_holder="engine:p0"), 0.0)
    made.register(instance("p1"), 0.0)
    theirs = names(70_000, 100)
    made.index.stored(made.holder("engine:p0"), 0, theirs[:60])
    both = (Chain(names(1, 16), BLOCK), Chain(theirs, 10))
    route = routed(made, request(chains=both))
    assert (route.prefill, route.cached_tokens) == ("p0", 600)


def test_an_explanation_says_what_each_would_have_meant() -> None:
    made = conductor()
    holds(made, "p1", names(1, 15))
    explained = made.explain(request(16), 0.0)
    assert isinstance(explained, Explanation)
    best = explained.rows[0]
    assert (best["instance"], best["local_tokens"], best["is_chosen"]) == ("p1", 960, True)
    other = next(row for row in explained.rows if row["instance"] == "p0")
    assert (other["pull_from"], other["pull_tokens"]) == ("node:p1", 960)
    assert other["pull_ttft_s"] < other["local_ttft_s"]


def sent(made: Conductor, name: str, **more: object) -> Route:
    """A request that goes to `name`, since all others that prefill are left out."""
    asked = request(**({"start": 1000 * next(numbers)} | more))  # type: ignore[arg-type]
    others = {
        each for each, member in made.fleet.members.items() if each != name and member.instance.role.takes_prefill
    }
    decision = made.route(asked, 0.0, exclude=others)
    assert isinstance(decision, Route), decision
    return decision


class TestQueues:
    def test_a_long_prompt_that_is_nearly_done_is_not_polled_as_a_new_one(self) -> None:
        made = conductor("least_loaded", prefills=1)
        routed(made, request(100))
        made.heartbeat("p0", Load(6.0, 6410, 0, 0), 6.0)
        assert made.fleet.members["p0"].queue_s(6.0) == pytest.approx(0.42)

    def test_a_queue_of_many_prompts_is_not_one_long_prompt(self) -> None:
        made = conductor("least_loaded", prefills=0)
        square = PrefillCost(0.0, 0.0, 1e-6, 0.0)  # a thousand tokens a second, ten thousand in a hundred
        made.register(instance("p0", prefill=square), 0.0)
        route = sent(made, "p0", tokens=1000)
        made.prefilled(route.request, 1.0)
        made.heartbeat("p0", Load(1.0, 10_000, 0, 0), 1.0)
        assert made.fleet.members["p0"].queue_s(1.0) == pytest.approx(10.0)

    def test_an_instance_that_counts_cached_tokens_too_has_no_more_to_do(self) -> None:
        made = conductor("prefix_affinity", prefills=1)
        holds(made, "p0", names(1, 16))
        for _ in range(3):
            assert routed(made, request(16)).cached_tokens == 16 * BLOCK
        made.heartbeat("p0", Load(0.0, 3 * 1034, 0, 0), 0.0)
        assert made.fleet.members["p0"].queue_s(0.0) == pytest.approx(3 * PREFILL.seconds(10, 0), abs=0.01)

    def test_who_leaves_the_queue_does_not_set_its_front_back(self) -> None:
        made = conductor("least_loaded", prefills=1)
        for _ in range(2):
            last = sent(made, "p0")
        made.cancelled(last.request, 0.9)
        assert made.fleet.members["p0"].queue_s(0.9) == pytest.approx(PREFILL.seconds(1034, 0) - 0.9)

    def test_what_is_cancelled_is_gone_from_what_was_polled(self) -> None:
        made = conductor("least_loaded", prefills=1)
        routes = [sent(made, "p0") for _ in range(3)]
        made.heartbeat("p0", Load(0.0, 3 * 1034, 0, 0), 0.0)
        for route in routes:
            made.cancelled(route.request, 0.1)
        assert made.fleet.members["p0"].queue_s(0.1) == 0

    def test_a_front_that_waits_for_its_prefix_keeps_all_behind_it_waiting(self) -> None:
        made = conductor(prefills=0)
        made.register(instance("p0", tiers=TierCost(1000, 1e9, 1e8, network_rate=3e6)), 0.0)
        holds(made, "a", names(1, 16))
        first = routed(made, request())
        assert first.transfer_s > 0.3
        assert made.fleet.members["p0"].queue_s(0.0) == pytest.approx(first.ttft_s)
        assert made.fleet.members["p0"].queue_s(first.transfer_s) == pytest.approx(first.prefill_s)

    def test_requests_that_were_never_reported_do_not_count_where_the_instance_has_none(self) -> None:
        made = conductor("least_loaded", prefills=1)
        for _ in range(30):
            sent(made, "p0")
        member = made.fleet.members["p0"]
        made.heartbeat("p0", Load(1.0, 29 * 1034, 0, 0), 1.0)
        assert member.queue_s(1.0) > 29
        made.heartbeat("p0", Load(40.0, 0, 0, 0), 40.0)
        assert member.queue_s(40.0) == 0

    def test_requests_on_their_way_to_an_instance_count_though_it_has_not_heard_of_them(self) -> None:
        made = conductor("least_loaded", prefills=1)
        made.heartbeat("p0", Load(0.0, 100, 0, 0), 0.0)
        for _ in range(5):
            sent(made, "p0")
        made.heartbeat("p0", Load(0.1, 0, 0, 0), 0.1)
        assert made.fleet.members["p0"].queue_s(0.1) > 5

    def test_an_instance_that_never_speaks_of_its_queue_is_not_believed_to_have_none(self) -> None:
        made = conductor("least_loaded", prefills=1)
        for _ in range(30):
            sent(made, "p0")
        made.heartbeat("p0", Load(9.0, 0, 0, 0), 9.0)
        assert made.fleet.members["p0"].queue_s(9.0) > 29


class TestPullCosts:
    def test_a_prefix_on_a_slow_disk_of_another_node_is_not_pulled(self) -> None:
        made = conductor(prefills=1)
        slow = TierCost(kv_bytes=1000, dram_rate=1e9, nvme_rate=1e5, network_rate=1e8)  # 10 ms a token
        made.register(instance("p1", tiers=slow), 0.0)
        holds(made, "p1", names(1, 16), NVME)
        assert sent(made, "p0", start=1).pull is None

    def test_of_a_prefix_half_on_a_slow_disk_the_half_in_memory_is_pulled(self) -> None:
        made = conductor(prefills=1)
        slow = TierCost(kv_bytes=1000, dram_rate=1e9, nvme_rate=1e5, network_rate=1e8)
        made.register(instance("p1", tiers=slow), 0.0)
        holds(made, "p1", names(1, 16), NVME)
        holds(made, "p1", names(1, 8), DRAM)
        route = sent(made, "p0", start=1)
        assert route.pull is not None
        assert (route.pull.stop, route.cached_tokens) == (8, 8 * BLOCK)

    def test_four_busy_nodes_with_all_of_it_do_not_hide_an_idle_one_with_nearly_all(self) -> None:
        made = conductor()
        for node in "abcd":
            holds(made, node, names(1, 16))
        holds(made, "e", names(1, 15))
        slow = TierCost(1000, 1e9, 1e8, network_rate=3e6)
        for number in range(5):
            made.register(instance(f"q{number}", tiers=slow), 0.0)
        sources = [sent(made, f"q{number}", start=1).pull for number in range(5)]
        assert {pull.source for pull in sources if pull is not None} == {f"node:{node}" for node in "abcde"}

    def test_a_pull_moves_what_its_node_lacks_though_its_instance_is_about_to_have_it(self) -> None:
        made = conductor(prefills=1)
        sent(made, "p0", start=1, blocks=8)
        holds(made, "a", names(1, 16))
        route = sent(made, "p0", start=1)
        assert route.pull is not None
        assert route.pull.first == 0
        assert made.fleet.works[route.request].pull_bytes == 16 * BLOCK * TIERS.kv_bytes

    def test_an_instance_without_a_node_pulls_nothing(self) -> None:
        made = conductor(prefills=0)
        made.register(instance("p0", node=""), 0.0)
        holds(made, "a", names(1, 16))
        route = routed(made, request())
        assert (route.pull, route.cached_tokens) == (None, 0)

    def test_a_pull_that_is_cancelled_late_gives_back_only_what_is_left_of_it(self) -> None:
        made = conductor(prefills=0)
        slow = TierCost(1000, 1e9, 1e8, network_rate=3e6)
        for name in ("p0", "p1", "p2"):
            made.register(instance(name, tiers=slow), 0.0)
        holds(made, "a", names(1, 16))
        first, second = sent(made, "p0", start=1), sent(made, "p1", start=1)
        made.cancelled(first.request, 0.3)
        asked = made.route(request(), 0.3, exclude={"p0", "p1"})
        assert isinstance(asked, Route)
        assert second.pull is not None
        assert asked.transfer_s == pytest.approx(2 * 1.024 / 3 - 0.3 + 0.341 - 0.041, abs=0.02)


class TestDecodePools:
    def test_a_group_that_is_full_is_not_helped_by_one_that_is_empty(self) -> None:
        for admission in ("early", "predictive"):
            made = conductor("least_loaded", admission, prefills=0, decodes=0, slo=Slo(tbt_s=0.1))
            decode = DecodeCost(0.02, 0.002, 0.0)
            for name, group in (("dv", "vllm"), ("ds", "sglang")):
                made.register(instance(name, Role.DECODE, group=group, decode=decode), 0.0)
            made.register(instance("pv", group="vllm"), 0.0)
            if admission == "early":
                made.heartbeat("dv", Load(0.0, 0, 60, 0), 0.0)
            answers = [made.route(request(0, tokens=1), 0.0) for _ in range(42)]
            assert isinstance(answers[-1], Refusal), admission

    def test_sequences_that_an_instance_does_not_know_any_more_take_nothing(self) -> None:
        """A gateway died, and nobody says how its requests ended."""
        made = conductor("least_loaded", "predictive", decodes=1, slo=Slo(tbt_s=0.1))
        made.register(instance("d0", Role.DECODE, decode_batch=70), 0.0)
        for turn in range(60):
            route = routed(made, request(0, tokens=1), 0.0)
            assert made.prefilled(route.request, 0.0) is None, turn
        made.heartbeat("d0", Load(1.0, 0, 60, 60), 1.0)
        assert made.fleet.members["d0"].step_s() == pytest.approx(DECODE.seconds(60, 60 * 51))
        made.heartbeat("d0", Load(7.0, 0, 0, 0), 7.0)
        assert made.fleet.members["d0"].step_s() == pytest.approx(DECODE.seconds(0, 0))
        assert made.fleet.members["d0"].has_room(1)
        for name in list(made.fleet.works):
            made.finished(name, 8.0)
        assert made.fleet.members["d0"].step_s() == pytest.approx(DECODE.seconds(0, 0))

    def test_sequences_of_other_conductors_take_room_and_time(self) -> None:
        made = conductor(decodes=2)
        made.register(instance("d0", Role.DECODE, decode_batch=10), 0.0)
        made.heartbeat("d0", Load(0.0, 0, 10, 1000), 0.0)
        made.heartbeat("d1", Load(0.0, 0, 60, 6000), 0.0)
        assert {routed(made, request()).decode for _ in range(5)} == {"d1"}
        for route in list(made.fleet.works):
            made.prefilled(route, 1.0)
        assert made.fleet.members["d1"].step_s(is_present=True) == pytest.approx(
            DECODE.seconds(65, 6000 + 5 * (1034 + 50))
        )

    def test_own_sequences_that_an_instance_speaks_of_are_not_counted_twice(self) -> None:
        made = conductor(decodes=1)
        for _ in range(5):
            made.prefilled(routed(made, request()).request, 1.0)
        before = made.fleet.members["d0"].step_s()
        made.heartbeat("d0", Load(1.0, 0, 5, 5500), 1.0)
        assert made.fleet.members["d0"].step_s() == before

    def test_sequences_of_other_conductors_are_predicted_to_stay(self) -> None:
        made = conductor("least_loaded", "predictive", decodes=1, slo=Slo(tbt_s=0.1))
        made.heartbeat("d0", Load(0.0, 0, 90, 9000), 0.0)
        assert refused(made, request()).reason is Reason.TBT

    def test_a_request_elsewhere_does_not_keep_the_view_of_who_decodes(self) -> None:
        made = conductor("least_loaded", "predictive", decodes=1, slo=Slo(tbt_s=0.1))
        routed(made, request())
        made.register(instance("d0", Role.DECODE, decode=DecodeCost(1.0, 0.0, 0.0)), 0.0)
        made.remove("d0", 0.0)
        made.register(instance("d1", Role.DECODE, decode=DecodeCost(0.01, 0.0, 0.0)), 0.0)
        assert isinstance(made.route(request(), 0.0, exclude={"p0"}), Route)
        made.register(instance("d1", Role.DECODE, decode=DecodeCost(0.01, 1.0, 0.0)), 0.0)
        assert isinstance(made.route(request(), 0.0, exclude={"p0"}), Refusal)


def test_a_full_instance_of_both_roles_hands_over_though_it_is_idle() -> None:
    made = conductor(prefills=0, decodes=1)
    made.register(instance("both", Role.BOTH, decode_batch=1, decode_tokens=1 << 20), 0.0)
    assert routed(made, request(1)).is_collocated
    assert not routed(made, request(1, start=700)).is_collocated


def test_collocation_can_be_turned_off() -> None:
    made = conductor(prefills=0, decodes=1, collocate_below=0.0)
    made.register(instance("both", Role.BOTH, decode=DecodeCost(9.0, 0.0, 0.0)), 0.0)
    assert not routed(made, request(1)).is_collocated


class TestFairness:
    def test_what_a_tenant_waits_for_of_one_model_takes_nothing_of_another(self) -> None:
        made = conductor(admission="early", prefills=1, slo=Slo(ttft_s=20.0))
        for name, role in (("op", Role.PREFILL), ("od", Role.DECODE)):
            made.register(instance(name, role, model="other"), 0.0)
        for turn in range(17):
            routed(made, request(16, start=10_000 + 100 * turn, tenant="greedy"))
        for turn in range(5):
            routed(made, request(16, start=20_000 + 100 * turn, tenant="modest", model="other"))
        routed(made, request(16, start=30_000, tenant="greedy"))

    def test_prefills_that_take_no_time_are_counted_as_well(self) -> None:
        made = conductor(prefills=0)
        made.register(instance("p0", prefill=PrefillCost(0.0, 0.0, 0.0, 0.0)), 0.0)
        for route in [routed(made, request()) for _ in range(3)]:
            made.prefilled(route.request, 1.0)
        assert made.check() == []

    def test_sessions_of_two_tenants_are_two(self) -> None:
        made = conductor()
        first = routed(made, request(16, start=9000, session="s", tenant="a"))
        made.finished(first.request, 0.0)
        prefills = set()
        for turn in range(9):
            again = routed(made, request(1, start=9100 + 20 * turn, session="s", tenant=f"b{turn}"))
            made.finished(again.request, 0.0)
            prefills.add(again.prefill)
        assert len(prefills) > 1


class TestRetries:
    def test_a_deadline_is_told_when_it_could_be_met(self) -> None:
        made = conductor(prefills=1)
        for _ in range(10):
            sent(made, "p0")
        refusal = refused(made, request(deadline_s=2.0, start=7))
        assert refusal.retry_after_s == pytest.approx(11 * 1.044 - 2.0)

    def test_a_deadline_that_an_idle_fleet_cannot_meet_is_not_told_to_come_back_soon(self) -> None:
        made = conductor(admission="early")
        assert refused(made, request(deadline_s=0.5)).retry_after_s == 60.0

    def test_a_pool_that_decodes_too_slowly_is_empty_after_one_decode(self) -> None:
        made = conductor("least_loaded", "predictive", decodes=1, slo=Slo(tbt_s=0.01))
        routed(made, request())
        refusal = refused(made, request())
        assert refusal.reason is Reason.TBT
        assert 1 <= refusal.retry_after_s <= 10.0


@pytest.mark.parametrize("admission", ADMISSIONS)
class TestLimitsThatNoIdleFleetKeeps:
    """A request that nobody could ever serve in time is served as well as can be, when nothing is in its way."""

    def test_a_prompt_too_long_for_the_slo_is_taken_by_an_idle_fleet_and_refused_by_a_busy_one(
        self, admission: str
    ) -> None:
        made = conductor(admission=admission, prefills=1, slo=Slo(ttft_s=1.0))
        routed(made, request())
        if admission != "none":
            assert refused(made, request(start=500)).reason is Reason.TTFT

    def test_a_step_that_is_longer_than_the_slo_refuses_nobody_who_decodes_alone(self, admission: str) -> None:
        made = conductor("least_loaded", admission, decodes=1, slo=Slo(tbt_s=0.001))
        route = routed(made, request())
        assert made.prefilled(route.request, 1.0) is None
        made.finished(route.request, 2.0)
        routed(made, request())


def test_a_priority_above_the_usual_is_not_held_to_its_tenants_share() -> None:
    made = conductor(admission="early", prefills=1, slo=Slo(ttft_s=20.0))
    for turn in range(11):
        routed(made, request(16, start=10_000 + 100 * turn, tenant="greedy"))
    routed(made, request(16, start=20_000, tenant="modest"))
    assert refused(made, request(16, start=21_000, tenant="greedy")).reason is Reason.FAIR_SHARE
    routed(made, request(16, start=21_000, tenant="greedy", priority=1))


def test_nothing_is_pulled_from_a_node_that_is_alone() -> None:
    made = conductor(prefills=1)
    holds(made, "a", names(1, 16))
    made.isolate("node:a", is_alone=True)
    assert routed(made, request()).pull is None
    made.isolate("node:a", is_alone=False)
    made.failed(next(iter(made.fleet.works)), 0.0)
    assert routed(made, request()).pull is not None


def test_models_that_nobody_serves_leave_nothing_behind() -> None:
    made = conductor()
    for number in range(100):
        refused(made, request(model=f"unknown-{number}"))
        made.route(request(model=f"unknown-{number}"), 0.0, exclude={"p0"})
    assert not made._pools._decode_s
    assert "unknown" not in repr(vars(made._pools))


def test_a_holder_that_went_leaves_its_number_to_another() -> None:
    made = conductor(prefills=1)
    holds(made, "gone", names(1, 16))
    assert routed(made, request()).pull is not None
    number = made.holder("node:gone")
    made.release("node:gone")
    made.release("node:gone")
    assert routed(made, request(start=1)).pull is None
    assert made.holder("node:new") == number
    made.index.stored(number, DRAM, names(1, 16))
    for work in list(made.fleet.works):
        made.cancelled(work, 9.0)
    pull = routed(made, request(start=1), 9.0).pull
    assert pull is not None
    assert pull.source == "node:new"
    assert made.holder("node:gone") != number


def test_who_drains_alone_is_noticed() -> None:
    made = conductor(prefills=2)
    routed(made, request())
    made.drain("p0")
    assert {routed(made, request()).prefill for _ in range(9)} == {"p1"}


def test_each_instance_is_expected_to_have_as_much_as_it_was_sent() -> None:
    made = conductor("prefix_affinity")
    chain = names(1, 100)
    for name, blocks in (("p0", 4), ("p1", 100), ("p2", 48), ("p0", 12)):
        sent(made, name, chains=(Chain(chain[:blocks], BLOCK),))
    rows = made.explain(request(chains=(Chain(chain, BLOCK),), tokens=101 * BLOCK), 0.0).rows
    assert {row["instance"]: row["local_tokens"] // BLOCK for row in rows} == {"p0": 12, "p1": 100, "p2": 48}


def test_holders_that_only_the_index_knows_do_no_harm() -> None:
    made = conductor()
    for number in range(9):
        made.index.holder(f"engine:other-{number}")
    routed(made, request())


def test_a_long_prompt_is_expected_as_far_as_it_goes() -> None:
    made = conductor("prefix_affinity", prefills=2)
    long = names(1, 2000)
    first = routed(made, request(2000, start=1))
    for blocks, expected in ((2000, 2000), (1999, 1984), (300, 288), (100, 100), (3, 0)):
        asked = request(
            chains=(Chain(np.concatenate([long[:blocks], names(10**6, 4)]), BLOCK),), tokens=(blocks + 4) * BLOCK
        )
        row = next(row for row in made.explain(asked, 0.0).rows if row["instance"] == first.prefill)
        assert row["local_tokens"] == expected * BLOCK, blocks


def test_what_leaves_a_node_for_decode_slows_what_is_pulled_from_it() -> None:
    made = conductor(prefills=1)
    slow = TierCost(1000, 1e9, 1e8, network_rate=3e6)
    for name in ("p1", "p2"):
        made.register(instance(name, tiers=slow), 0.0)
    holds(made, "p1", names(1, 16))
    alone = sent(made, "p2", start=1)
    made.cancelled(alone.request, 0.0)
    sent(made, "p1")
    assert sent(made, "p2", start=1).transfer_s == pytest.approx(1.5 * alone.transfer_s, rel=0.03)
