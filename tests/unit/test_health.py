"""Whether a medium can be relied on: pauses that double, and what ends them."""

from kvstore.health import FIRST_PAUSE_S, LONGEST_PAUSE_S, Health


def test_a_well_medium_may_be_tried_at_any_time():
    health = Health()
    assert health.is_well
    assert health.may_try(0.0)
    assert not health.succeeded()


def test_after_a_failure_it_is_left_alone_for_a_pause_that_doubles():
    health, now = Health(), 100.0
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert health.failed("broken", now) == (pause_s == FIRST_PAUSE_S)
        assert not health.may_try(now + pause_s - 0.01)
        now += pause_s
        assert health.may_try(now)
    assert pause_s == LONGEST_PAUSE_S


def test_failures_of_what_was_begun_before_the_pause_do_not_lengthen_it():
    health = Health()
    for _ in range(100):
        health.failed("broken", 100.0)
    assert health.failures == 100
    assert health.may_try(100.0 + FIRST_PAUSE_S)
    health.failed("still broken", 101.0)
    assert not health.may_try(102.9)
    assert health.may_try(103.0)


def test_a_success_ends_it_and_the_next_pause_is_short_again():
    health = Health()
    health.failed("broken", 100.0)
    health.failed("broken", 101.0)
    assert health.succeeded()
    assert health.is_well
    assert health.may_try(101.0)
    health.failed("broken", 200.0)
    assert health.may_try(200.0 + FIRST_PAUSE_S)


def test_it_says_why():
    health = Health()
    health.failed("first", 0.0)
    health.failed("second", 0.5)
    assert health.reason == "second"


class TestTolerance:
    def test_a_few_failures_in_a_row_are_borne(self):
        health = Health(tolerance=2)
        assert [health.failed("bad block", 0.0) for _ in range(4)] == [False, False, True, False]
        assert not health.may_try(0.5)

    def test_a_success_between_begins_the_count_anew(self):
        health = Health(tolerance=2)
        for _ in range(10):
            health.failed("bad block", 0.0)
            health.failed("bad block", 0.0)
            assert not health.succeeded()
        assert health.is_well
        assert health.failures == 20
