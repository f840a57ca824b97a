"""The index of prefixes beside a dict of sets: whatever is stored, removed and forgotten, it says just that; and where
it has too little room, never more than that."""

import os
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler import holder_sets, index, name_table
from scheduler.index import PrefixIndex
from scheduler.name_table import hashes_of

PROFILES = {"mutant": (60, 50, True), "": (60, 50, False)}  # examples, steps, the same each time
EXAMPLES, STEPS, DERANDOMIZED = PROFILES.get(os.environ.get("CAIRN_MODEL_PROFILE", ""), PROFILES[""])
CROWDED, SPREAD = 60, 180  # names that want the same bucket, and others
HOLDERS = [*range(4), 63, 64, 65, 130]  # numbers; some are in other words of a mask
TIERS = range(3)
FEW_SETS = 5
SEEN, SAMPLE = 3, 12  # of the blocks that have changed, and of all
CHAIN = 20
MASK = 2**64 - 1
Holding = tuple[int, int]  # holder and tier


def name_of(hash_: int) -> int:
    """The name that has a hash: `hashes_of` backwards."""
    hash_ = hash_ * pow(0xD6E8FEB86659FD93, -1, 2**64) & MASK
    hash_ ^= hash_ >> 32
    hash_ = hash_ * pow(0x9E3779B97F4A7C15, -1, 2**64) & MASK
    return hash_ ^ hash_ >> 32


NAMES = [
    *(name_of((3 << 61) + number * 7) for number in range(CROWDED)),
    *(number * 0x5851F42D4C957F2D & MASK for number in range(SPREAD)),
]
assert hashes_of(np.array(NAMES[:1], np.uint64))[0] == 3 << 61

holders = st.sampled_from(HOLDERS)
tiers = st.sampled_from(TIERS)
some = st.one_of(
    st.lists(st.integers(0, len(NAMES) - 1), max_size=12),
    st.tuples(st.integers(0, len(NAMES) - 1), st.integers(1, 90)).map(lambda pair: [*range(len(NAMES))][slice(*pair)]),
    st.just([*range(CROWDED)]),
    st.tuples(st.integers(0, 9), st.integers(1, 40)).map(lambda pair: [*range(pair[0], pair[0] + pair[1])] * 2),
)


class IndexMachine(RuleBasedStateMachine):
    """Tables and batches are small here, so that all of their edges are met."""

    def __init__(self) -> None:
        super().__init__()
        self.small = [
            mock.patch.multiple(
                name_table, LEAST_BUCKETS=3, MOVED_LEAST=8, MOVED_AT_ONCE=2, REWRITTEN=32, LOOKED_AT=16
            ),
            mock.patch.multiple(index, BATCH=32),
        ]
        for patch in self.small:
            patch.start()
        self.index = PrefixIndex()
        self.model: dict[int, set[Holding]] = {}
        self.is_exact = True

    @initialize(few=st.booleans())
    def begin(self, few: bool) -> None:
        self.is_exact = not few
        if few:
            self.small.append(mock.patch.multiple(holder_sets, SETS_MOST=FEW_SETS))
            self.small[-1].start()
        for number in range(max(HOLDERS) + 1):
            assert self.index.holder(f"node:{number}") == number

    def teardown(self) -> None:
        for patch in self.small:
            patch.stop()

    # What holders say.

    @rule(holder=holders, tier=tiers, which=some)
    def stored(self, holder: int, tier: int, which: list[int]) -> None:
        holder, tier = self.pair(holder, tier)
        self.index.stored(holder, tier, names(which))
        for number in which:
            self.model.setdefault(number, set()).add((holder, tier))
        self.chains(which)

    @rule(holder=holders, tier=tiers, which=some)
    def removed(self, holder: int, tier: int, which: list[int]) -> None:
        holder, tier = self.pair(holder, tier)
        self.index.removed(holder, tier, names(which))
        for number in which:
            self.drop(number, {(holder, tier)})
        self.chains(which)

    @rule(holder=holders)
    def forget(self, holder: int) -> None:
        self.index.forget(holder)
        for number in [*self.model]:
            self.drop(number, {(holder, tier) for tier in TIERS})

    @rule(holder=holders)
    def comes_again_under_another_name(self, holder: int) -> None:
        name = self.index.holders[holder]
        assert name is not None
        self.index.release(name)
        assert self.index.holders[holder] is None
        for number in [*self.model]:
            self.drop(number, {(holder, tier) for tier in TIERS})
        assert self.index.holder(name + "'") == holder

    @rule(which=some)
    def all_go(self, which: list[int]) -> None:
        """Blocks that nobody has any more."""
        for holder, tier in {pair for number in which for pair in self.model.get(number, ())}:
            self.removed(holder, tier, which)

    def pair(self, holder: int, tier: int) -> Holding:
        """Of four where there is room for few sets, so that some blocks have several."""
        return (holder, tier) if self.is_exact else (holder % 2, tier % 2)

    def drop(self, number: int, holdings: set[Holding]) -> None:
        if number in self.model:
            self.model[number] -= holdings
            if not self.model[number]:
                del self.model[number]

    # What it says.

    @rule(which=some)
    def prefixes(self, which: list[int]) -> None:
        found = self.index.prefixes(names(which))
        for holder in HOLDERS:
            for tier in TIERS:
                expected = self.prefix(which, holder, tier)
                if not self.is_exact:
                    assert found[holder, tier] <= expected
                else:
                    assert found[holder, tier] == expected
        assert found.sum() == found[HOLDERS].sum()

    def prefix(self, which: list[int], holder: int, tier: int) -> int:
        wanted = {(holder, faster) for faster in range(tier + 1)}
        for place, number in enumerate(which):
            if not wanted & self.model.get(number, set()):
                return place
        return len(which)

    def chains(self, which: list[int]) -> None:
        """Some that go through blocks that have changed."""
        for number in which[:SEEN]:
            for first in (number, max(0, number - SEEN)):
                self.prefixes([*range(first, min(first + CHAIN, len(NAMES)))])

    @rule(first=st.integers(0, len(NAMES) // SAMPLE - 1))
    def some_blocks(self, first: int) -> None:
        for number in range(first, len(NAMES), len(NAMES) // SAMPLE):
            self.prefixes([number])

    @invariant()
    def counts_are_right(self) -> None:
        holdings = sum(len({holder for holder, _ in pairs}) for pairs in self.model.values())
        if not self.is_exact:
            assert self.index.blocks <= len(self.model)
            assert holdings - self.index.dropped <= self.index.holdings <= holdings
        else:
            assert self.index.blocks == len(self.model)
            assert self.index.holdings == holdings
            assert self.index.dropped == 0

    @invariant()
    def nothing_is_broken(self) -> None:
        assert self.index.check() == []


def names(which: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([NAMES[number] for number in which], np.uint64)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    derandomize=DERANDOMIZED,
    phases=[Phase.generate] if DERANDOMIZED else [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
