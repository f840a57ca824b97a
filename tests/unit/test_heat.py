"""Heat of stripes: rates that decay, and what is kept when there are more stripes than entries."""

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.heat import Heat

START = 1e6  # a clock is seldom near 0


def test_a_stripe_read_steadily_has_that_rate():
    heat = Heat(half_life_s=10, entries=4)
    for tick in range(1000):
        heat.note("stripe", 8, START + tick * 0.1)
    assert heat.rate("stripe", START + 100) == pytest.approx(80, rel=0.02)


def test_an_unread_stripe_loses_half_of_its_rate_in_a_half_life():
    heat = Heat(half_life_s=10, entries=4)
    heat.note("stripe", 32, START)
    assert heat.rate("stripe", START + 10) == pytest.approx(heat.rate("stripe", START) / 2)
    assert heat.rate("stripe", START + 1e7) == 0.0


def test_a_stripe_never_read_has_no_rate():
    assert Heat(10, 4).rate("stripe", START) == 0.0
    assert Heat(10, 4).hottest(3, START) == []


def test_the_hottest_come_first():
    heat = Heat(10, 100)
    for stripe in range(50):
        heat.note(stripe, stripe + 1, START)
    assert [stripe for stripe, _ in heat.hottest(3, START)] == [49, 48, 47]


def test_a_recent_read_is_hotter_than_many_of_long_ago():
    heat = Heat(10, 100)
    heat.note("old", 1000, START)
    heat.note("new", 2, START + 100)
    assert heat.hottest(1, START + 100)[0][0] == "new"


def test_the_hot_stay_among_thousands_that_are_read_once():
    heat, random = Heat(60, 256), Random(1)
    for tick in range(20_000):
        now = START + tick * 0.01
        heat.note(("once", tick), 32, now)
        if tick % 10 == 0:
            heat.note(("hot", random.randrange(4)), 32, now)
    assert len(heat) == 256
    assert {stripe for stripe, _ in heat.hottest(4, now)} == {("hot", number) for number in range(4)}
    assert heat.rate(("hot", 0), now) == pytest.approx(80, rel=0.3)


def test_one_that_becomes_hot_gets_in_although_all_entries_are_warm():
    heat = Heat(60, 8)
    for stripe in range(8):
        heat.note(stripe, 100, START)
    for tick in range(400):
        heat.note("riser", 32, START + tick * 0.01)
        heat.note(("once", tick), 1, START + tick * 0.01)
    assert heat.hottest(1, START + 4)[0][0] == "riser"


def test_what_a_newcomer_inherits_is_not_its_rate():
    heat = Heat(10, 1)
    heat.note("hot", 10_000, START)
    heat.note("new", 1, START)
    assert len(heat) == 1
    assert heat.rate("new", START) == pytest.approx(heat_of_one_block(10), rel=1e-3)


def heat_of_one_block(half_life_s: float) -> float:
    heat = Heat(half_life_s, 1)
    heat.note("stripe", 1, START)
    return heat.rate("stripe", START)


reads = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 32), st.floats(0, 100)), max_size=150)


@given(reads=reads, entries=st.integers(1, 25))
def test_no_rate_is_higher_than_what_was_read_and_all_are_exact_while_there_is_room(reads, entries):
    heat, now = Heat(10, entries), START
    exact: dict[int, float] = defaultdict(float)
    for stripe, blocks, wait_s in reads:
        now += wait_s
        for known in exact:
            exact[known] *= 0.5 ** (wait_s / 10)
        exact[stripe] += blocks * heat_of_one_block(10)
        heat.note(stripe, blocks, now)
    assert len(heat) == min(entries, len(exact))
    for stripe, rate in exact.items():
        assert heat.rate(stripe, now) <= rate * 1.001 + 1e-6
        if len(exact) <= entries:
            assert heat.rate(stripe, now) == pytest.approx(rate, rel=1e-3, abs=1e-6)
