"""What is worth a write: by what was seen before, and within a budget of bytes."""

from random import Random

import pytest

from kvstore.admission import BURST_S, DAY_S, Admission, Budget, Seen
from kvstore.types import BlockKey

KEYS = [BlockKey(Random(number).randbytes(16)) for number in range(4000)]


class TestSeen:
    def test_what_was_added_is_known_and_nearly_nothing_else(self):
        seen = Seen()
        for key in KEYS[:2000]:
            seen.add(key)
        assert all(key in seen for key in KEYS[:2000])
        assert sum(key in seen for key in KEYS[2000:]) <= 2

    def test_the_parts_of_a_block_are_told_apart(self):
        seen = Seen()
        seen.add(BlockKey(KEYS[0] + b"\x00\x00"))
        assert BlockKey(KEYS[0] + b"\x01\x00") not in seen

    def test_when_it_is_full_the_older_half_is_forgotten(self):
        seen = Seen(bits=1 << 16, keys=100)
        for key in KEYS[:201]:
            seen.add(key)
        assert all(key in seen for key in KEYS[100:201])
        assert sum(key in seen for key in KEYS[:100]) <= 2

    def test_it_stays_useful_however_many_keys_come(self):
        seen = Seen(bits=1 << 14, keys=800)
        for key in KEYS[:3000]:
            seen.add(key)
        assert sum(key in seen for key in KEYS[3000:]) < 0.05 * 1000


class TestBudget:
    def test_none_is_no_limit(self):
        assert Budget(0, 0.0).take(1 << 60, 0.0)

    def test_an_hours_share_may_be_spent_at_once_and_comes_back_with_time(self):
        budget = Budget(24_000, 100.0)
        assert budget.take(600, 100.0)
        assert budget.take(400, 100.0)
        assert not budget.take(1, 100.0)
        assert not budget.take(501, 100.0 + BURST_S / 2)
        assert budget.take(500, 100.0 + BURST_S / 2)

    def test_what_is_not_spent_is_not_saved_up_beyond_an_hour(self):
        budget = Budget(24_000, 0.0)
        assert not budget.take(1001, 10 * DAY_S)
        assert budget.take(1000, 10 * DAY_S)
        assert not budget.take(1, 10 * DAY_S)

    def test_over_a_day_no_more_than_the_budget_and_an_hour_is_written(self):
        budget, written = Budget(24_000, 0.0), 0
        for minute in range(24 * 60 + 1):
            written += 100 * budget.take(100, 60.0 * minute)
        assert 23_900 <= written <= 25_000


class TestAdmission:
    def test_a_block_that_leaves_unused_is_admitted_the_second_time(self):
        admission = Admission(everything=False, bytes_per_day=0, now=0.0)
        assert [admission.admits(KEYS[0], 0, 10, 0.0) for _ in range(3)] == [False, True, True]
        assert (admission.unused_blocks, admission.admitted_bytes) == (1, 20)

    def test_a_used_block_is_admitted_at_once(self):
        admission = Admission(everything=False, bytes_per_day=0, now=0.0)
        assert admission.admits(KEYS[0], 1, 10, 0.0)

    def test_a_block_that_stays_where_it_is_is_not_remembered(self):
        admission = Admission(everything=False, bytes_per_day=0, now=0.0)
        assert [admission.admits_early(KEYS[0], 0, 10, 0.0) for _ in range(3)] == [False] * 3
        assert admission.unused_blocks == 0
        assert not admission.admits(KEYS[0], 0, 10, 0.0)
        assert admission.admits_early(KEYS[0], 0, 10, 0.0)

    @pytest.mark.parametrize("verb", ["admits", "admits_early"])
    def test_everything_is_still_within_the_budget(self, verb):
        admission = Admission(everything=True, bytes_per_day=24 * 25, now=0.0)
        assert [getattr(admission, verb)(key, 0, 10, 0.0) for key in KEYS[:3]] == [True, True, False]
        assert (admission.over_budget_blocks, admission.admitted_bytes, admission.unused_blocks) == (1, 20, 0)
