"""How much of a chain is here, in few probes."""

from collections.abc import Callable


def gallop(here: Callable[[int], bool], length: int) -> int:
    """How many positions from 0 are `here`, if none is after one that is not: 2 log2(answer) probes.

    The last position is asked first, since a whole chain that is here is the common case.
    """
    if not length or not here(0):
        return 0
    if here(length - 1):
        return length
    present, step = 0, 1  # present is here; [present, absent) is halved below
    while present + step < length - 1 and here(present + step):
        present += step
        step *= 2
    absent = min(present + step, length - 1)
    while absent - present > 1:
        middle = (present + absent) // 2
        if here(middle):
            present = middle
        else:
            absent = middle
    return absent
