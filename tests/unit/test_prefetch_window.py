"""Prefetch windows: what is hinted and when, how a window follows what it hears, and that nothing of it leaks."""

import itertools
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import prefetch
from scheduler.prefetch import LAIN_S, LEAST_BYTES, RATE_S, SLACK_S, UNDERWAY_MOST_S, Prefetching, State
from scheduler.requests import Pull

SIZE = LEAST_BYTES // 2
PULL = Pull("store", "decode", 0, 0, 16)


class Decode:
    """A target under test. `run` has it use requests one by one, each some time after it arrived."""

    def __init__(self, memory_bytes: int = 0) -> None:
        self.prefetching = Prefetching()
        self.now = 0.0
        self.prefetching.target("decode", memory_bytes, 0.0)
        self._numbers = itertools.count()
        self._there: list[str] = []

    @property
    def target(self) -> prefetch.Target:
        return self.prefetching.targets["decode"]

    def queue(self, count: int, needed_s: float | None = None, size: int = SIZE) -> list[str]:
        names = [f"r{next(self._numbers)}" for _ in range(count)]
        for name in names:
            expected_at_s = self.now if needed_s is None else needed_s
            self.prefetching.queued(name, PULL, size, expected_at_s=expected_at_s, now=self.now)
        return names

    def due(self) -> list[str]:
        return [hint.request for hint in self.prefetching.due(self.now)]

    def run(self, steps: int, each_s: float = 0.01) -> None:
        """So often: pull what is due, and use the oldest. The queue never ends."""
        self.queue(max(0, 200 - len(self.prefetching)))
        for _ in range(steps):
            self._there += self.due()
            for name in self._there:
                self.prefetching.arrived(name, self.now)
            self.now += each_s
            self.prefetching.consumed(self._there.pop(0), self.now)
            self.queue(1)


def test_a_window_begins_small_and_one_of_any_size_may_go_alone():
    decode = Decode()
    decode.queue(5)
    assert decode.due() == ["r0", "r1"]
    assert decode.due() == []
    large = Decode()
    large.queue(2, size=100 * LEAST_BYTES)
    assert large.due() == ["r0"]


def test_hints_come_by_when_they_are_needed_over_all_targets():
    prefetching = Prefetching()
    for number, needed_s in enumerate((0.5, 0.1, 0.3, 0.2)):
        pull = Pull("store", f"decode{number % 2}", 0, 0, 1)
        prefetching.queued(str(number), pull, 1, expected_at_s=needed_s, now=0.0)
    hints = prefetching.due(0.0)
    assert [hint.request for hint in hints] == ["1", "3", "2", "0"]
    assert hints[0].pull.target == "decode1"


def test_what_is_needed_much_later_is_not_pulled_yet():
    decode = Decode()
    decode.queue(1, needed_s=100.0)
    assert decode.due() == []
    wake_s = decode.prefetching.wake_s(0.0)
    assert wake_s is not None
    assert 100.0 - 3 * SLACK_S < wake_s < 100.0
    decode.now = wake_s
    assert decode.due() == ["r0"]


def test_a_request_that_is_expected_sooner_moves_forward():
    decode = Decode()
    decode.queue(2, needed_s=100.0)
    decode.prefetching.queued("r1", PULL, SIZE, expected_at_s=0.5, now=0.0)
    assert decode.due() == ["r1"]


def test_a_window_doubles_while_bytes_come_just_in_time_then_grows_by_one_request_a_window():
    decode = Decode()
    decode.run(2)
    assert decode.target.window_bytes >= 1.5 * LEAST_BYTES
    decode.target.is_doubling = False
    before = decode.target.window_bytes
    decode.run(round(before / SIZE))
    assert decode.target.window_bytes == pytest.approx(before + SIZE, rel=0.2)


def test_bytes_that_lay_for_too_long_halve_a_window_once_for_all_that_were_pulled_before():
    decode = Decode()
    decode.target.window_bytes = 16.0 * SIZE
    decode.queue(16)
    names = decode.due()
    assert len(names) == 16
    for name in names:
        decode.prefetching.arrived(name, 0.0)
    for name in names:
        decode.prefetching.consumed(name, LAIN_S + 0.1)
    assert decode.target.window_bytes == 8.0 * SIZE
    assert not decode.target.is_doubling


def test_evicted_bytes_halve_a_window_and_are_pulled_again():
    decode = Decode()
    decode.target.window_bytes = 8.0 * SIZE
    decode.queue(1)
    assert decode.due() == ["r0"]
    decode.prefetching.arrived("r0", 0.1)
    decode.prefetching.evicted("r0", 0.2)
    assert decode.target.window_bytes == 4.0 * SIZE
    assert decode.target.used_bytes == 0
    decode.now = 0.3
    assert decode.due() == ["r0"]


def test_what_is_used_slowly_caps_a_window_at_what_is_used_in_the_time_of_a_pull():
    decode = Decode()
    decode.target.window_bytes = 1000.0 * SIZE
    decode.run(100, each_s=0.1)
    slow = decode.target.limit_bytes
    assert slow < 2 * SIZE / 0.1 * SLACK_S
    decode.run(3000, each_s=0.01)
    assert decode.target.limit_bytes > 2 * slow


def test_a_window_takes_no_more_than_a_share_of_the_memory():
    decode = Decode(memory_bytes=40 * SIZE)
    decode.run(400, each_s=0.001)
    assert decode.target.limit_bytes == prefetch.MEMORY_SHARE * 40 * SIZE


def test_time_without_anything_to_use_says_nothing_about_the_rate():
    decode = Decode()
    names = decode.queue(100)
    for name in names:
        decode.now += 0.1
        decode.prefetching.consumed(name, decode.now)
    rate = decode.target.rate.bytes_per_s
    assert rate == pytest.approx(SIZE / 0.1, rel=0.2)
    decode.now += 100 * RATE_S
    (name,) = decode.queue(1)
    decode.now += 0.1
    decode.prefetching.consumed(name, decode.now)
    assert decode.target.rate.bytes_per_s == pytest.approx(rate, rel=0.05)


def test_a_request_whose_deadline_is_gone_is_dropped_with_its_hint():
    decode = Decode()
    for name, deadline_s in (("late", 1.0), ("later", 5.0)):
        decode.prefetching.queued(name, PULL, SIZE, expected_at_s=0.0, deadline_s=deadline_s, now=0.0)
    assert decode.due() == ["late", "later"]
    assert decode.prefetching.wake_s(0.0) == 1.0
    assert decode.prefetching.expired(1.0) == []
    assert decode.prefetching.expired(1.1) == ["late"]
    assert decode.prefetching.expired(1.1) == []
    assert decode.target.used_bytes == SIZE
    decode.prefetching.arrived("late", 1.2)
    decode.prefetching.consumed("late", 1.3)
    assert len(decode.prefetching) == 1


def test_a_pull_of_which_nothing_is_heard_frees_its_part_of_the_window():
    decode = Decode()
    decode.queue(1)
    assert decode.due() == ["r0"]
    decode.now = UNDERWAY_MOST_S + 1.0
    assert decode.due() == []
    assert decode.target.used_bytes == 0
    assert len(decode.prefetching) == 0


def test_a_target_that_is_gone_takes_its_requests_along():
    decode = Decode()
    decode.queue(3)
    decode.due()
    decode.prefetching.remove("decode")
    decode.prefetching.remove("decode")
    assert len(decode.prefetching) == 0
    decode.prefetching.arrived("r0", 1.0)
    assert decode.prefetching.expired(inf) == []


def test_too_many_requests_are_not_pulled_ahead(monkeypatch):
    monkeypatch.setattr(prefetch, "QUEUED_MOST", 3)
    prefetching = Prefetching()
    taken = [prefetching.queued(str(number), PULL, 1, expected_at_s=0.0, now=0.0) for number in range(5)]
    assert taken == [True, True, True, False, False]


names = st.integers(0, 7).map(str)
steps = st.one_of(
    st.tuples(st.just("queued"), names, st.integers(1, 4 * SIZE), st.floats(-1, 20), st.floats(0.1, 30)),
    st.tuples(st.sampled_from(["arrived", "consumed", "evicted", "cancelled"]), names),
    st.tuples(st.sampled_from(["due", "expired", "wake_s"])),
    st.tuples(st.just("pass"), st.floats(0, 20)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=60))
def test_whatever_is_said_in_whatever_order_the_sums_stay_right(told):
    """No hint twice without an eviction between, none for a request that is gone; bounds hold."""
    prefetching, now = Prefetching(), 0.0
    prefetching.target("decode", 1000 * SIZE, now)
    hinted: set[str] = set()
    for what, *rest in told:
        if what == "pass":
            now += rest[0]
        elif what == "queued":
            name, size, wait_s, life_s = rest
            prefetching.queued(name, PULL, size, expected_at_s=now + wait_s, deadline_s=now + life_s, now=now)
        elif what == "due":
            due = {hint.request for hint in prefetching.due(now)}
            assert not due & hinted
            hinted = {name for name in hinted | due if name in prefetching.targets["decode"].members}
        elif what == "expired":
            hinted -= set(prefetching.expired(now))
        elif what == "wake_s":
            assert (prefetching.wake_s(now) is not None) >= (len(prefetching) > 0)
        elif what == "cancelled":
            prefetching.cancelled(rest[0])
            hinted.discard(rest[0])
        else:
            getattr(prefetching, what)(rest[0], now)
            hinted -= {rest[0]} if what != "arrived" else set()
        target = prefetching.targets["decode"]
        taking = [ahead for ahead in target.members.values() if ahead.state is not State.WAITING]
        assert target.used_bytes == sum(ahead.size_bytes for ahead in taking)
        assert len(taking) <= 1 or target.used_bytes <= prefetch.MEMORY_SHARE * target.memory_bytes
        assert LEAST_BYTES <= target.limit_bytes <= max(LEAST_BYTES, prefetch.MEMORY_SHARE * target.memory_bytes)
