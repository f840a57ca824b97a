"""Which holder is read, and how a chain is cut into runs: few, from fast holders, several at once."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.choice import (
    CONSIDERED_HOLDERS,
    LEAST_RUN_BYTES,
    Candidate,
    Route,
    Run,
    assign,
    choose,
    expected_s,
)
from kvstore.cluster.naming import STRIPE_BLOCKS
from kvstore.health import FIRST_PAUSE_S

MIB = 1 << 20
HBM, DRAM, NVME = 1, 2, 4


def route(*, latency_s: float = 0.001, rate: float = 1e9, distance: int = 0) -> Route:
    measured = Route(distance=distance, latency_s=latency_s)
    measured.reading.bytes_per_s = rate
    return measured


def candidate(name: str, tiers: int = DRAM, **measured: float) -> Candidate:
    return Candidate(name, tiers, route(**measured))


def quarantined() -> Route:
    failing = route()
    failing.health.failed("refused", 0.0)
    return failing


class TestExpectation:
    def test_it_is_the_latency_and_the_time_to_move_what_is_in_flight_and_this(self):
        path = route(latency_s=0.002, rate=1e9)
        path.reading.begin(3_000_000, 0.0)
        assert expected_s(path, DRAM, 1_000_000) == pytest.approx(0.002 + 0.004)
        assert expected_s(path, DRAM, 1_000_000, 3) == pytest.approx(0.006 + 0.004)

    def test_dram_is_faster_than_hbm_and_that_than_nvme(self):
        times = [expected_s(route(), tiers, MIB) for tiers in (DRAM | NVME, HBM | NVME, NVME)]
        assert times == sorted(times)
        assert len(set(times)) == 3

    def test_of_equal_paths_the_near_one_is_faster(self):
        times = [expected_s(route(distance=far), DRAM, MIB) for far in range(5)]
        assert times[:4] == sorted(set(times))
        assert times[4] == times[3]

    def test_a_path_never_measured_is_worth_a_try(self):
        assert 0 < expected_s(Route(), DRAM, MIB) < expected_s(route(rate=1e8, distance=3), DRAM, MIB)

    def test_latency_is_smoothed(self):
        path = Route()
        path.answered(0.001)
        assert path.latency_s == 0.001
        path.answered(0.002)
        assert 0.001 < path.latency_s < 0.002


class TestChoice:
    def test_of_two_the_faster_is_chosen_always(self):
        both = [candidate("slow", rate=1e8), candidate("fast")]
        assert {choose(both, MIB, Random(seed).random, 0.0).name for seed in range(50)} == {"fast"}

    def test_of_many_the_slowest_is_never_chosen_and_no_other_gets_everything(self):
        many = [candidate(f"n{number}", rate=1e9 - number * 1e7) for number in range(10)]
        random = Random(5).random
        chosen = Counter(choose(many, MIB, random, 0.0).name for _ in range(5000))
        assert "n9" not in chosen
        assert len(chosen) == 9
        assert max(chosen.values()) < 0.25 * 5000

    def test_equal_holders_get_equal_shares(self):
        many = [candidate(f"n{number}") for number in range(5)]
        random = Random(6).random
        chosen = Counter(choose(many, MIB, random, 0.0).name for _ in range(10_000))
        assert max(chosen.values()) / min(chosen.values()) < 1.15

    def test_load_in_flight_is_evened_out(self):
        many, random = [candidate(f"n{number}") for number in range(8)], Random(7).random
        for _ in range(8 * 100):
            choose(many, MIB, random, 0.0).route.reading.begin(MIB, 0.0)
        queued = [each.route.inflight_bytes // MIB for each in many]
        assert max(queued) - min(queued) <= 6

    def test_a_quarantined_holder_is_never_chosen(self):
        both = [Candidate("failing", DRAM, quarantined()), candidate("slow", rate=1e6)]
        assert {choose(both, MIB, Random(seed).random, 0.5).name for seed in range(50)} == {"slow"}
        assert choose(both[:1], MIB, Random(1).random, 0.5) is None
        assert choose([], MIB, Random(1).random, 0.5) is None

    def test_after_its_pause_one_read_tries_it(self):
        failing = Candidate("failing", DRAM, quarantined())
        assert choose([failing], MIB, Random(1).random, FIRST_PAUSE_S) is failing
        failing.route.reading.begin(MIB, FIRST_PAUSE_S)
        assert choose([failing], MIB, Random(1).random, FIRST_PAUSE_S) is None
        failing.route.health.succeeded()
        assert choose([failing], MIB, Random(1).random, FIRST_PAUSE_S) is failing


def assigned(holders, position=0, block_bytes=MIB, routes=None, seed=1, now=0.0) -> list[Run]:
    if routes is None:
        routes = {name: route() for holding in holders for name in holding}
    return assign(holders, position, block_bytes, routes, random=Random(seed).random, now=now)


class TestAssignment:
    def test_a_chain_of_one_holder_is_cut_at_stripes_only(self):
        assert assigned([{"a": DRAM}] * 70, position=20) == [Run("a", 0, 12), Run("a", 12, 44), Run("a", 44, 70)]

    def test_nothing_is_read_when_nothing_is_asked_for_or_nobody_has_it(self):
        assert assigned([]) == []
        assert assigned([{}, {"a": DRAM}]) == []
        assert assigned([{"a": 0}]) == []

    def test_a_block_that_nobody_has_ends_it(self):
        assert assigned([{"a": DRAM}] * 5 + [{}] + [{"a": DRAM}] * 5) == [Run("a", 0, 5)]

    def test_where_a_holder_ends_another_goes_on(self):
        chain = [{"a": DRAM}] * 5 + [{"a": DRAM, "b": DRAM}] * 5 + [{"b": DRAM}] * 5
        assert assigned(chain, block_bytes=4096) == [Run("a", 0, 10), Run("b", 10, 15)]

    def test_dram_is_read_before_disk_although_it_ends_earlier(self):
        chain = [{"a": NVME, "b": DRAM}] * 30 + [{"a": NVME}] * 2
        assert assigned(chain) == [Run("b", 0, 30), Run("a", 30, 32)]

    def test_a_holder_with_some_blocks_on_disk_is_asked_once(self):
        chain = [{"a": DRAM if index % 2 else NVME} for index in range(32)]
        assert assigned(chain) == [Run("a", 0, 32)]

    @pytest.mark.parametrize("seed", range(10))
    def test_stripes_go_to_several_holders_at_once(self, seed):
        runs = assigned([{"a": DRAM, "b": DRAM}] * 32 * 8, seed=seed)
        assert [run.end - run.start for run in runs] == [32] * 8
        assert Counter(run.holder for run in runs) == {"a": 4, "b": 4}

    @pytest.mark.parametrize("seed", range(10))
    def test_one_large_stripe_is_shared_by_its_holders_in_large_pieces(self, seed):
        runs = assigned([dict.fromkeys("abcd", DRAM)] * 32, seed=seed)
        assert 2 <= len(runs) <= 4
        assert all((run.end - run.start) * MIB >= LEAST_RUN_BYTES for run in runs)
        assert len({run.holder for run in runs}) >= 2

    def test_one_small_stripe_comes_from_one_holder(self):
        assert len(assigned([dict.fromkeys("abcd", DRAM)] * 32, block_bytes=LEAST_RUN_BYTES // 32)) == 1

    def test_a_slow_holder_gets_less(self):
        routes = {"fast": route(), "slow": route(rate=1e8)}
        runs = assigned([{"fast": DRAM, "slow": DRAM}] * 32 * 20, routes=routes)
        assert Counter(run.holder for run in runs)["slow"] <= 3

    def test_a_quarantined_or_unknown_holder_is_as_if_it_had_nothing(self):
        routes = {"failing": quarantined(), "b": route()}
        chain = [{"failing": DRAM, "unknown": DRAM, "b": NVME}] * 3 + [{"failing": DRAM, "unknown": DRAM}]
        assert assigned(chain, routes=routes, now=0.5) == [Run("b", 0, 3)]

    def test_of_hundreds_of_holders_one_that_works_is_found(self):
        names = [f"n{number}" for number in range(300)]
        routes = {name: quarantined() for name in names}
        routes["n123"] = route()
        chain = [dict.fromkeys(names, DRAM)] * 4
        for seed in range(20):
            assert assigned(chain, routes=routes, seed=seed, now=0.5) == [Run("n123", 0, 4)]

    def test_hundreds_of_holders_all_get_their_turn(self):
        names = [f"n{number}" for number in range(10 * CONSIDERED_HOLDERS)]
        chain = [dict.fromkeys(names, DRAM)]
        assert len({assigned(chain, seed=seed)[0].holder for seed in range(2000)}) == len(names)


holdings = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 7), max_size=6)


@given(
    holders=st.lists(holdings, max_size=100),
    position=st.integers(0, STRIPE_BLOCKS - 1),
    block_bytes=st.sampled_from([4096, MIB, 20 * MIB]),
    broken=st.sets(st.sampled_from("abcdef")),
    seed=st.integers(0, 1000),
)
def test_runs_cover_the_longest_prefix_once_and_each_holder_has_what_it_is_asked_for(
    holders, position, block_bytes, broken, seed
):
    routes = {name: quarantined() if name in broken else route() for name in "abcdef"}
    runs = assigned(holders, position, block_bytes, routes, seed, now=0.5)
    able = [any(tiers and name not in broken for name, tiers in holding.items()) for holding in holders]
    assert sum(run.end - run.start for run in runs) == (able.index(False) if False in able else len(able))
    end = 0
    for run in runs:
        assert run.start == end < run.end
        end = run.end
        assert run.holder not in broken
        assert all(holders[index][run.holder] for index in range(run.start, run.end))
        assert (position + run.start) // STRIPE_BLOCKS == (position + run.end - 1) // STRIPE_BLOCKS
    for one, other in pairwise(runs):
        assert one.holder != other.holder or (position + other.start) % STRIPE_BLOCKS == 0
