"""Whether a medium can be relied on: after failures it is left alone for a while that doubles, then tried again."""

from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class Health:
    """One direction (reading or writing) of one tier. `reason` is what failed last, empty while all is well."""

    tolerance: int = 0  # failures in a row that say nothing of the medium
    longest_pause_s: float = LONGEST_PAUSE_S
    reason: str = ""
    failures: int = 0  # ever
    _in_a_row: int = 0
    _pause_s: float = FIRST_PAUSE_S
    _resume_at: float = 0.0

    @property
    def is_well(self) -> bool:
        return not self.reason

    def may_try(self, now: float) -> bool:
        return not self.reason or now >= self._resume_at

    def failed(self, reason: str, now: float) -> bool:
        """Whether it was well until now. Of failures during one pause only the first counts for the next."""
        was_well = self.is_well
        self.failures += 1
        self._in_a_row += 1
        if self._in_a_row <= self.tolerance:
            return False
        if now >= self._resume_at:
            self._resume_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, self.longest_pause_s)
        self.reason = reason
        return was_well

    def succeeded(self) -> bool:
        """Whether it had failed before."""
        was_failing = not self.is_well
        self._in_a_row = 0
        self.reason, self._pause_s, self._resume_at = "", FIRST_PAUSE_S, 0.0
        return was_failing
