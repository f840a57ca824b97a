"""Which member is the home of a partition: evenly, the same everywhere, and moving as little as can be."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cluster.homes import Homes, mix
from kvstore.cluster.naming import PARTITIONS

TEN = [f"node-{number}" for number in range(10)]
members = st.lists(st.sampled_from([*TEN, "", "ä", "node-10"]), unique=True)


def all_of(homes: Homes) -> list[str]:
    return [homes.home(partition) for partition in range(PARTITIONS)]


def test_partitions_are_spread_evenly_over_ten_members():
    counts = Counter(all_of(Homes(TEN)))
    assert counts.keys() == set(TEN)
    assert max(counts.values()) / (PARTITIONS / 10) < 1.25


@pytest.mark.parametrize("count", [2, 3, 5, 100])
def test_no_member_has_far_more_than_its_share(count):
    homes = Homes(f"10.0.0.{number}" for number in range(count))
    counts = Counter(all_of(homes))
    share = PARTITIONS / count
    assert len(counts) == count
    assert max(counts.values()) < share + 5 * share**0.5


def test_homes_are_the_same_on_every_machine_and_in_every_release():
    homes = Homes(["a", "b", "c"])
    assert (
        "".join(homes.home(partition) for partition in range(0, PARTITIONS, 128)) == "babbbbbaacabaacccbccbbbcaaababcb"
    )
    assert mix(np.array([1, 2**64 - 1], np.uint64)).tolist() == [0x5692161D100B05E5, 0xB4D055FCF2CBBD7B]


def test_without_members_there_is_no_home():
    homes = Homes([])
    assert homes.home(0) == homes.home(PARTITIONS - 1) == ""
    assert homes.owned("a") == []
    assert homes.changed([]).moved(homes) == []


def test_a_single_member_is_the_home_of_all():
    homes = Homes([]).changed(["a"])
    assert homes.owned("a") == list(range(PARTITIONS))
    assert homes.changed([]).home(7) == ""


def test_who_joins_takes_from_the_others_and_nothing_moves_between_them():
    before = Homes(TEN)
    after = before.changed([*TEN, "new"])
    moved = after.moved(before)
    assert moved == after.owned("new")
    assert PARTITIONS / 11 * 0.75 < len(moved) < PARTITIONS / 11 * 1.25


def test_only_what_a_leaver_had_moves():
    before = Homes(TEN)
    after = before.changed(TEN[1:])
    assert after.moved(before) == before.owned(TEN[0])
    assert before.home(before.owned(TEN[0])[0]) == TEN[0]  # what was made before does not change


@settings(max_examples=60, deadline=None)
@given(st.lists(members, min_size=2, max_size=4))
def test_changes_lead_where_a_fresh_start_does(steps):
    homes = Homes(steps[0])
    for names in steps[1:]:
        homes = homes.changed(names)
        assert all_of(homes) == all_of(Homes(reversed(names)))


def test_of_many_members_each_that_changes_moves_what_it_has():
    names = [f"node-{number}" for number in range(1000)]
    homes = Homes(names)
    after = homes.changed([*names[5:], "a", "b"])
    assert all_of(after) == all_of(Homes([*names[5:], "a", "b"]))
