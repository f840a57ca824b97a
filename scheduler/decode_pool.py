"""What the decode instances that a request may go to have to do, now and when a prefill that begins now is done."""

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import Final

from scheduler.fleet import Member, Work

FIRST_DECODE_S: Final = 10.0  # that a request decodes, until some have shown it
MEMORY: Final = 0.98  # weight of the past in a mean over requests


class DecodePool:
    """All that decodes or will, of one model and group. `members`: who takes decodes now."""

    def __init__(self) -> None:
        self.members: Sequence[Member] = ()
        self._coming: list[float] = []  # sorted: when each request will have its first token, as predicted
        self._begun: list[float] = []  # sorted: when it was there
        self._decode_s = FIRST_DECODE_S
        self._context = 0.0  # mean tokens of a request in the middle of its decode

    def __len__(self) -> int:
        return len(self._coming) + len(self._begun)

    def begin(self, work: Work) -> None:
        middle = work.tokens + work.output_tokens / 2
        self._context = _mean(self._context, middle) if self._context else middle
        insort(self._coming, work.first_token_s)

    def prefilled(self, work: Work, now: float) -> None:
        """To be called before the work itself knows of it."""
        self._forget(work)
        work.first_token_s = now
        insort(self._begun, now)

    def end(self, work: Work, now: float, *, is_finished: bool) -> None:
        self._forget(work)
        if is_finished and work.prefilled_s is not None:
            self._decode_s = _mean(self._decode_s, now - work.prefilled_s)

    @property
    def decode_s(self) -> float:
        """How long a request decodes, as a mean."""
        return self._decode_s

    def present_tbt_s(self, context: int) -> float:
        """The shortest step with one more sequence of that many tokens, if it came now: what is still being prefilled
        does not count."""
        steps = (member.step_s(more=1, context=context, is_present=True) for member in self.members)
        return min(steps, default=0.0)

    def tbt_s_at(self, when_s: float, now: float) -> float:
        """The mean step then, if each request decodes as long as the mean: who came within that time is there.

        A first token that is overdue comes now. What others than this Conductor sent stays as much as it is.
        """
        if not self.members:
            return 0.0
        since_s = when_s - self._decode_s
        there = bisect_right(self._begun, when_s) - bisect_right(self._begun, since_s)
        there += bisect_right(self._coming, when_s) - (bisect_right(self._coming, since_s) if since_s >= now else 0)
        there += sum(member.others_batch for member in self.members)
        batch = (there + 1) / len(self.members)
        return _average(member.instance.decode.seconds(batch, batch * self._context) for member in self.members)

    def _forget(self, work: Work) -> None:
        begins = self._coming if work.prefilled_s is None else self._begun
        at = bisect_right(begins, work.first_token_s) - 1
        assert begins[at] == work.first_token_s, (work.first_token_s, begins[at])
        del begins[at]


def _mean(old: float, new: float) -> float:
    return MEMORY * old + (1 - MEMORY) * new


def _average(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
