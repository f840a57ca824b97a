"""The interface of a policy, and the choice between equals."""

from collections.abc import Callable
from typing import ClassVar, Protocol

import numpy as np

from scheduler.costs import Floats
from scheduler.outlook import Choice, Outlook

Draw = Callable[[], float]  # uniform in [0, 1)


class Policy(Protocol):
    """`choose` picks one of the instances of an outlook, of which there are some. It changes only its own turn."""

    name: ClassVar[str]

    def choose(self, outlook: Outlook) -> Choice: ...


def least(values: Floats, draw: Draw) -> int:
    """The position of the least of `[n]`; of equals any, so that an idle fleet does not begin with one instance."""
    positions = np.flatnonzero(values <= values.min())
    return int(positions[int(draw() * len(positions))])
