"""Which instance decodes what another, or itself, has prefilled."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from scheduler.fleet import Member
from scheduler.outlook import NOBODY, Tokens
from scheduler.requests import Request
from scheduler.tuning import Slo

INTERFERENCE: Final = 0.9  # of an instance's time, at most, that its prefills are thought to take from its decodes
EQUAL: Final = 1.05  # steps that differ by less are as good as equal: then what is there decides


class Pairing:
    """Of instances with equally short steps that with most of the prompt is taken, of these any by `draw`.

    Where the prefill instance decodes too and prefills take less than `collocate_below` of its time, it keeps the
    request: nothing has to move, and hardly anything gets in its way.
    """

    def __init__(self, draw: Callable[[], float], slo: Slo, collocate_below: float) -> None:
        self._draw = draw
        self._slo = slo
        self._collocate_below = collocate_below

    def choose(
        self,
        request: Request,
        prefill: Member,
        takers: Sequence[Member],
        prefixes: Tokens,
        holders: Mapping[str, int],
        now: float,
    ) -> tuple[Member, float]:
        """One of `takers`, which are not none, and the seconds between tokens there."""
        context = request.tokens + request.output_tokens
        mean = request.mean_context
        steps = [(_step_s(member, mean, now), member, member.has_room(context)) for member in takers]
        if prefill.utilisation(now) < self._collocate_below:
            for step_s, member, has_room in steps:
                if member is prefill and has_room and step_s <= self._slo.tbt_s:
                    return member, step_s
        able = [(step_s, member) for step_s, member, has_room in steps if has_room]
        able = able or [(step_s, member) for step_s, member, _ in steps]
        least_s = min(step_s for step_s, _ in able)
        rows = [
            (-float(prefixes[holders.get(member.instance.node, NOBODY), 2]), step_s, at)
            for at, (step_s, member) in enumerate(able)
            if step_s <= EQUAL * least_s
        ]
        first = min(rows)[:2]
        best = [at for tokens, step_s, at in rows if (tokens, step_s) == first]
        step_s, member = able[best[int(self._draw() * len(best))]]
        return member, step_s


def _step_s(member: Member, context: int, now: float) -> float:
    """Between tokens with one more sequence; an instance that prefills too has less time for it."""
    step_s = member.step_s(more=1, context=context)
    if member.instance.role.takes_prefill:
        step_s /= 1 - min(INTERFERENCE, member.utilisation(now))
    return step_s
