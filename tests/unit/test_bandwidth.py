"""How fast a path is: what requests at once, failures and silence say of it."""

import pytest

from kvstore.bandwidth import SMOOTHING, STALE_S, WINDOW_BYTES, WINDOW_S, Bandwidth


def move(path: Bandwidth, size: int, start: float, seconds: float, *, is_good: bool = True) -> None:
    path.begin(size, start)
    path.end(size, start, start + seconds, is_good=is_good)


def test_before_anything_was_measured_nothing_is_known():
    path = Bandwidth()
    assert (path.bytes_per_s, path.request_s, path.arrival_s(1 << 30)) == (0, 0, 0)
    move(path, 1000, 0.0, WINDOW_S / 2)
    assert path.bytes_per_s == 0


def test_the_first_window_is_the_rate_and_later_ones_shift_it():
    path = Bandwidth()
    move(path, 1000, 0.0, 0.5)
    assert path.bytes_per_s == 2000
    move(path, 1000, 9.0, 0.25)
    assert path.bytes_per_s == 2000 + SMOOTHING * 2000
    assert path.request_s == pytest.approx(0.5 - SMOOTHING * 0.25)


def test_a_window_ends_by_its_bytes_too():
    path = Bandwidth()
    move(path, WINDOW_BYTES, 0.0, 0.001)
    assert path.bytes_per_s == pytest.approx(WINDOW_BYTES * 1000)


def test_requests_at_once_share_the_time_in_which_any_is_under_way():
    path = Bandwidth()
    path.begin(1000, 0.0)
    path.begin(1000, 0.5)
    assert path.queued_bytes == 2000
    path.end(1000, 0.0, 1.0, is_good=True)
    path.begin(1000, 1.5)
    path.end(1000, 0.5, 2.0, is_good=True)
    path.end(1000, 1.5, 2.5, is_good=True)
    assert path.total_bytes == 3000
    assert path.bytes_per_s == 1000 + SMOOTHING * (2000 - 1000)
    assert path.queued_bytes == 0


def test_idle_time_is_no_time():
    path = Bandwidth()
    for start in (0.0, 100.0, 200.0):
        move(path, 500, start, WINDOW_S)
    assert path.bytes_per_s == 500 / WINDOW_S


@pytest.mark.parametrize("seconds", [0.1, 30.0])
def test_a_failed_request_says_nothing_about_the_rate(seconds):
    path = Bandwidth()
    move(path, 1000, 0.0, 0.5)
    before = path.bytes_per_s, path.request_s, path.requests, path.total_bytes
    move(path, 1000, 1.0, seconds, is_good=False)
    assert (path.bytes_per_s, path.request_s, path.requests, path.total_bytes) == before
    move(path, 1000, 50.0, 0.5)
    assert path.bytes_per_s == 2000
    assert path.queued_bytes == 0


def test_after_a_while_without_requests_what_was_measured_is_old():
    path = Bandwidth()
    move(path, 1000, 0.0, 0.5)
    assert [path.is_stale(0.5 + seconds) for seconds in (0, STALE_S - 1, STALE_S + 1)] == [False, False, True]
    path.begin(1000, 50.0)
    assert not path.is_stale(99.0)
    path.end(1000, 50.0, 99.0, is_good=False)
    assert not path.is_stale(99.0)


def test_what_is_queued_arrives_first():
    path = Bandwidth()
    move(path, 1000, 0.0, 0.5)
    path.begin(3000, 1.0)
    assert path.arrival_s(1000) == 2.0


def test_a_clock_that_stands_still_is_no_division_by_zero():
    path = Bandwidth()
    move(path, WINDOW_BYTES, 1.0, 0.0)
    assert path.bytes_per_s == 0
    move(path, WINDOW_BYTES, 1.0, 0.5)
    assert path.bytes_per_s == 4 * WINDOW_BYTES
