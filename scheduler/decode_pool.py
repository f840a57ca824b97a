"""What the decode instances of a model have to do, now and when a prefill that begins now is done."""

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import Final

from scheduler.fleet import Member, Work

FIRST_DECODE_S: Final = 10.0  # that a request decodes, until some have shown it
MEMORY: Final = 0.98  # weight of the past in a mean over requests


class DecodePool:
    """All that decodes or will, of one model. `members`: who takes decodes now."""

    def __init__(self) -> None:
        self.members: Sequence[Member] = ()
        self._begins: list[float] = []  # sorted: when each request has its first token, as predicted or as it was
        self._decode_s = FIRST_DECODE_S
        self._context = 0.0  # mean tokens of a request in the middle of its decode

    def __len__(self) -> int:
        return len(self._begins)

    def begin(self, work: Work) -> None:
        middle = work.tokens + work.output_tokens / 2
        self._context = _mean(self._context, middle) if self._context else middle
        insort(self._begins, work.first_token_s)

    def prefilled(self, work: Work, now: float) -> None:
        self._forget(work.first_token_s)
        work.first_token_s = now
        insort(self._begins, now)

    def end(self, work: Work, now: float, *, is_finished: bool) -> None:
        self._forget(work.first_token_s)
        if is_finished and work.prefilled_s is not None:
            self._decode_s = _mean(self._decode_s, now - work.prefilled_s)

    @property
    def decode_s(self) -> float:
        """How long a request decodes, as a mean."""
        return self._decode_s

    def present_tbt_s(self) -> float:
        """The mean step of those that decode now; what is still being prefilled does not count."""
        return _average(member.step_s(is_present=True) for member in self.members)

    def tbt_s_at(self, when_s: float) -> float:
        """The mean step then, if each request decodes as long as the mean: who came within that time is there."""
        if not self.members:
            return 0.0
        there = bisect_right(self._begins, when_s) - bisect_right(self._begins, when_s - self._decode_s)
        batch = (there + 1) / len(self.members)
        return _average(member.instance.decode.seconds(batch, batch * self._context) for member in self.members)

    def _forget(self, begin_s: float) -> None:
        at = bisect_right(self._begins, begin_s) - 1
        assert self._begins[at] == begin_s, (begin_s, self._begins[at])
        del self._begins[at]


def _mean(old: float, new: float) -> float:
    return MEMORY * old + (1 - MEMORY) * new


def _average(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
