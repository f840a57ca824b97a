"""Copies of hot stripes: how many, where, and when they are let go."""

from collections import Counter
from math import ceil
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.replication import Drop, HeatPolicy, HotStripe, Place, Replicate, Room, Sight

SIZE = 32 << 20
TARGET = 100.0
PLENTY = 100 * SIZE


def places(count: int, **fields: object) -> dict[str, Place]:
    return {f"n{number}": Place(f"n{number}", **{"free_bytes": PLENTY, **fields}) for number in range(count)}


def racks(zones: int, racks_each: int, hosts_each: int) -> dict[str, Place]:
    found = {}
    for zone in range(zones):
        for rack in range(racks_each):
            for host in range(hosts_each):
                name = f"z{zone}r{rack}h{host}"
                labels = {"zone": f"z{zone}", "rack": f"z{zone}r{rack}", "host": name}
                found[name] = Place(name, PLENTY, labels=labels)
    return found


def policy(least: int = 1, most: int = 8, seed: int = 1, **fields: int) -> HeatPolicy:
    return HeatPolicy(least, most, TARGET, Random(seed).random, **fields)


def hot(rate: float, *holders: str, is_copy: bool = False, stripe: object = "s") -> HotStripe:
    return HotStripe(stripe, SIZE, rate, holders or ("n0",), is_copy)


def suggested(of: HeatPolicy, members: dict[str, Place], *stripes: HotStripe, node: str = "n0") -> list:
    return list(of.suggest(Sight(node, stripes, members)))


class TestHowMany:
    def test_a_stripe_read_less_than_the_target_stays_where_it_is(self):
        assert suggested(policy(), places(5), hot(TARGET)) == []

    @pytest.mark.parametrize(("rate", "copies"), [(101, 2), (200, 2), (201, 3), (450, 5), (5000, 8)])
    def test_a_hotter_one_gets_holders_until_each_has_its_target(self, rate, copies):
        found = suggested(policy(), places(20), hot(rate))
        assert len({suggestion.target for suggestion in found}) == copies - 1
        assert "n0" not in {suggestion.target for suggestion in found}

    def test_cold_or_not_there_are_at_least_so_many(self):
        assert len(suggested(policy(least=3), places(5), hot(0.0))) == 2

    def test_holders_that_all_see_it_suggest_together_what_is_missing(self):
        holders = ("n0", "n1", "n2", "n3")
        rounds = [
            sum(
                len(suggested(policy(seed=seed * 4 + index), places(20), hot(150, *holders), node=node))
                for index, node in enumerate(holders)
            )
            for seed in range(300)
        ]
        assert sum(rounds) / len(rounds) == pytest.approx(2, rel=0.15)

    def test_a_round_has_a_bounded_number_of_suggestions(self):
        stripes = [hot(1000, stripe=number) for number in range(100)]
        found = suggested(policy(most_suggestions=10), places(20), *stripes)
        assert len(found) == 10
        assert {suggestion.stripe for suggestion in found} == {0, 1}


class TestDrop:
    def test_a_copy_goes_when_the_others_could_bear_twice_the_reads(self):
        assert suggested(policy(), places(3), hot(TARGET / 4, "n1", "n2", is_copy=True), node="n2") == [Drop("s")]

    def test_it_stays_while_reads_are_only_somewhat_fewer(self):
        assert suggested(policy(), places(3), hot(TARGET / 4 + 1, "n1", "n2", is_copy=True), node="n2") == []

    def test_an_original_stays(self):
        assert suggested(policy(), places(3), hot(0.0, "n1", "n2"), node="n2") == []

    def test_of_holders_that_all_see_it_cold_only_the_surplus_goes(self):
        holders = ("n3", "n1", "n2")
        dropping = [
            node for node in holders if suggested(policy(least=2), places(5), hot(0, *holders, is_copy=True), node=node)
        ]
        assert dropping == ["n3"]

    def test_a_holder_that_drains_does_not_count_as_one_that_stays(self):
        members = {**places(3), "n1": Place("n1", PLENTY, is_draining=True)}
        assert suggested(policy(), members, hot(0.0, "n1", "n2", is_copy=True), node="n2") == []

    @given(rate=st.floats(0, 2000), holders=st.integers(1, 12))
    def test_what_is_dropped_is_not_wanted_again_at_once(self, rate, holders):
        names = [f"n{number}" for number in range(holders)]
        last = sorted(names)[-1]
        if Drop("s") in suggested(policy(), places(20), hot(rate, *names, is_copy=True), node=last):
            names.remove(last)
            after = hot(rate * holders / (holders - 1), *names)
            assert suggested(policy(), places(20), after, node=names[0]) == []


class TestWhere:
    def test_a_holder_a_draining_and_a_full_member_get_none(self):
        members = places(4)
        members["n1"] = Place("n1", PLENTY, is_draining=True)
        members["n2"] = Place("n2", SIZE - 1)
        assert suggested(policy(), members, hot(5000)) == [Replicate("s", "n3")]

    def test_room_that_was_given_in_this_round_is_taken(self):
        members = {**places(1), "n1": Place("n1", 2 * SIZE)}
        found = suggested(policy(), members, *(hot(200, stripe=number) for number in range(5)))
        assert found == [Replicate(0, "n1"), Replicate(1, "n1")]

    def test_zones_without_a_holder_come_first_then_racks(self):
        for seed in range(20):
            found = Room(racks(2, 2, 4), Random(seed).random).targets(SIZE, ["z0r0h0"], 4)
            assert found[0].startswith("z1")
            assert {name[:4] for name in ["z0r0h0", *found[:3]]} == {"z0r0", "z0r1", "z1r0", "z1r1"}

    def test_of_equally_far_ones_the_loaded_is_avoided(self):
        members = {**places(3), "n1": Place("n1", PLENTY, load=0.9)}
        assert Room(members, Random(1).random).targets(SIZE, ["n0"], 1) == ["n2"]

    def test_of_equally_loaded_ones_the_roomy_is_taken(self):
        members = {**places(3), "n1": Place("n1", 2 * PLENTY)}
        assert Room(members, Random(1).random).targets(SIZE, ["n0"], 1) == ["n1"]

    def test_copies_of_many_stripes_spread_over_all_members(self):
        room = Room(places(200, free_bytes=1000 * SIZE), Random(3).random)
        got = Counter(room.targets(SIZE, ["n0"], 1)[0] for _ in range(199 * 20))
        assert len(got) == 199
        assert max(got.values()) <= 2 * 20

    def test_so_many_replicas_are_filled_up_to_and_no_further(self):
        room = Room({**places(5), "n4": Place("n4", PLENTY, is_draining=True)}, Random(1).random)
        assert len(room.at_least(3, SIZE, ["n0"])) == 2
        assert room.at_least(2, SIZE, ["n0", "n1"]) == []
        assert len(room.at_least(2, SIZE, ["n0", "n4"])) == 1
        assert len(room.at_least(2, SIZE, ["n0", "gone"])) == 1
        assert len(room.at_least(9, SIZE, ["n0"])) == 3


members_of_any_kind = st.lists(
    st.tuples(st.integers(0, 4), st.floats(0, 1), st.booleans(), st.integers(0, 2)), min_size=1, max_size=40
)


@given(
    members=members_of_any_kind,
    rates=st.lists(st.floats(0, 3000), max_size=6),
    holders=st.sets(st.integers(0, 45), min_size=1, max_size=5),
    seed=st.integers(0, 100),
)
def test_no_member_gets_what_it_holds_or_has_no_room_for_and_there_are_never_too_many(members, rates, holders, seed):
    around = {
        f"n{number}": Place(f"n{number}", free * SIZE, load, {"zone": f"z{zone}"}, drains)
        for number, (free, load, drains, zone) in enumerate(members)
    }
    names = [f"n{number}" for number in holders]
    stripes = [hot(rate, *names, stripe=number) for number, rate in enumerate(rates)]
    given_to: Counter[str] = Counter()
    of_stripe: Counter[int] = Counter()
    for suggestion in suggested(policy(seed=seed), around, *stripes, node=names[0]):
        assert isinstance(suggestion, Replicate)
        assert suggestion.target not in names
        assert not around[suggestion.target].is_draining
        given_to[suggestion.target] += 1
        of_stripe[suggestion.stripe] += 1
    assert all(count * SIZE <= around[name].free_bytes for name, count in given_to.items())
    staying = sum(name in around and not around[name].is_draining for name in names)
    for stripe, count in of_stripe.items():
        assert staying + count <= max(1, min(8, ceil(len(names) * rates[stripe] / TARGET)))
