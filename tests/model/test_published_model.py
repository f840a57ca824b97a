"""Drive the published index through many histories while readers are in the middle of their gets.

The writer's stores reach the readers word by word (tests/model/shared_memory.py). Readers may miss what
changes under them, and never get wrong bytes.
"""

import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore import published
from kvstore.copier import checksum
from kvstore.published import PARTIAL, READABLE
from tests.model.published_node import CHANGING, PIECES, Node, Published, in_slow_motion

PROFILES = {
    # name: (examples, steps, derandomized)
    "mutant": (40, 40, True),
    "ci": (60, 40, False),
    "long": (5000, 80, False),
}
TABLES = [(8, 128), (16, 4), (32, 128)]  # entries, probes: small ones fill up, few probes get crowded

which = st.integers(0, 63)  # one of those there are, modulo their number
several = st.lists(which, min_size=1, max_size=5)
landing = st.lists(st.sampled_from([0, 0, 0, 0, 0, 1, 1, 2, 3, 8, 30]), max_size=30)


@pytest.mark.parametrize(("entries", "probes"), TABLES)
def test_a_long_history_in_a_crowded_table(entries: int, probes: int) -> None:
    chance = random.Random(entries)
    with in_slow_motion(probes):
        node = Node(entries)
        for step in range(300):
            name = chance.choice(node.names)
            if name in node.model:
                node.remove(name)
            elif node.free:
                node.put(name, as_it_comes=step % 3 == 0)
            node.land_all()
            node.check()


# A get while one change lands, in every way that it can. `name` is stored behind `ahead`, in the table's first bucket.


def is_removed(node: Node, name: bytes, ahead: bytes) -> None:
    node.remove(name)


def hands_over_slot_and_bucket(node: Node, name: bytes, ahead: bytes) -> None:
    node.remove(name)
    node.put(node.names[2])


def is_stored_again_elsewhere(node: Node, name: bytes, ahead: bytes) -> None:
    node.move(name, in_place=False)


def is_overwritten_and_its_slot_used_again(node: Node, name: bytes, ahead: bytes) -> None:
    node.move(name, in_place=True)
    node.put(node.names[8])


def gets_another_piece(node: Node, name: bytes, ahead: bytes) -> None:
    node.progress(name)


def is_stored_again_where_another_was(node: Node, name: bytes, ahead: bytes) -> None:
    node.remove(ahead)
    node.move(name, in_place=False)


def has_another_before_it(node: Node, name: bytes, ahead: bytes) -> None:
    node.remove(ahead)
    node.put(node.names[2])


CHANGES = [
    is_removed,
    hands_over_slot_and_bucket,
    is_stored_again_elsewhere,
    is_overwritten_and_its_slot_used_again,
    gets_another_piece,
    is_stored_again_where_another_was,
    has_another_before_it,
]
FIND_LOADS, COMPARE_LOADS = 24, 8  # of words: of the entry ahead, of its own, of its own again
BURSTS = [0, 1, 2, 3, 5, 8, 13, 21, 34, 55]  # of stores that land between two loads


class Replay:
    """One change, which the reader can be shown from any prefix of it on."""

    def __init__(self, node: Node, name: bytes, change: Callable[[], None]) -> None:
        self.node, self.name = node, name
        change()
        self.steps = list(node.wire.pending)
        self.prefixes = range(len(self.steps) + 1)
        self.states = []
        for _ in self.prefixes:
            self.states.append((bytes(memoryview(node.index_seen)), bytes(memoryview(node.slots_seen)), self.known()))
            node.wire.land(1)

    def known(self) -> Any:
        return self.node.visible.get(self.name)

    def show(self, prefix: int, burst_at: int = 0, burst: int = 0) -> None:
        """The reader sees `prefix`; before its load number `burst_at` the next `burst` steps will land."""
        index, slots, self.node.visible[self.name] = self.states[prefix]
        memoryview(self.node.index_seen)[:] = index
        memoryview(self.node.slots_seen)[:] = slots
        self.node.wire.pending = deque(self.steps[prefix : prefix + burst])
        self.node.wire.landing = deque([0] * burst_at + [burst])

    def find(self, first: int, burst_at: int, burst: int) -> bytes | None:
        """Its entry as a find sees it that begins at prefix `first` and ends at `first + burst`."""
        self.show(first, burst_at, burst)
        found = self.node.reader.find(self.name)
        self.node.land_all()
        states = [known for _, _, known in self.states[first : first + burst + 1]]
        if states[0] is not CHANGING and states.count(states[0]) == len(states):
            assert (found is None) == (states[0] is None), "it was there all the time, or never"
        if found is None:
            return None
        self.at, entry = found
        assert any(said.is_said_by(entry) for said in self.node.history[self.name]), "a torn entry"
        return entry

    def last_unchanged(self, entry: bytes) -> int:
        """The last prefix at which a reader can begin to compare and be told that `entry` did not change."""

        def may_pass(prefix: int) -> bool:
            for burst in self.bursts(prefix):
                for burst_at in range(COMPARE_LOADS if burst else 1):
                    self.show(prefix, burst_at, burst)
                    if self.node.reader.is_unchanged(self.at, entry):
                        return True
            return False

        return max((prefix for prefix in self.prefixes if may_pass(prefix)), default=-1)

    def bursts(self, first: int) -> list[int]:
        return [burst for burst in BURSTS if first + burst <= len(self.steps)]

    def piece(self, prefix: int, offset: int) -> bytes:
        return self.states[prefix][1][offset : offset + 8]


@pytest.mark.parametrize("order", [range(8), range(7, -1, -1)], ids=["upwards", "downwards"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_get_of_a_block_that(change: Callable[..., None], order: Sequence[int]) -> None:
    with in_slow_motion(128):
        node = Node(8)
        ahead, name = node.names[:2]
        node.put(ahead)
        node.put(name, as_it_comes=change is gets_another_piece)
        if change is gets_another_piece:
            node.progress(name)
        node.land_all()
        node.wire.order = order
        replay = Replay(node, name, lambda: change(node, name, ahead))
        last_unchanged: dict[bytes, int] = {}
        copied_right = 0
        for first in replay.prefixes:
            for burst in replay.bursts(first):
                for burst_at in range(FIND_LOADS if burst else 1):
                    entry = replay.find(first, burst_at, burst)
                    if entry is None:
                        continue
                    if entry not in last_unchanged:
                        last_unchanged[entry] = replay.last_unchanged(entry)
                    said = published.Entry._make(published.ENTRY.unpack(entry))
                    expected = Published(name, said.state, said.layers, 0, said.generation).pieces[: said.layers]
                    for copied_at in range(first + burst, last_unchanged[entry] + 1):
                        pieces = [replay.piece(copied_at, said.offset + 8 * layer) for layer in range(said.layers)]
                        assert pieces == expected, "wrong bytes"
                        copied_right += 1
        assert copied_right > len(replay.steps)


# Histories and readers as Hypothesis likes.


@dataclass(eq=False)
class Get:
    """A reader in the middle of one."""

    name: bytes
    at: int = 0
    entry: bytes = b""
    is_disturbed: bool = False
    copied: list[bytes] = field(default_factory=list)


class PublishedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.restore = ExitStack()
        self.gets: list[Get] = []

    def teardown(self) -> None:
        self.restore.close()

    @initialize(table=st.sampled_from(TABLES))
    def start(self, table: tuple[int, int]) -> None:
        entries, probes = table
        self.restore.enter_context(in_slow_motion(probes))
        self.node = Node(entries)
        self.node.when_disturbed = self.disturb

    def disturb(self, name: bytes) -> None:
        for get in self.gets:
            get.is_disturbed |= get.name == name

    def name(self, number: int) -> bytes:
        return self.node.names[number % len(self.node.names)]

    def stored(self, number: int) -> bytes:
        return list(self.node.model)[number % len(self.node.model)]

    # The writer.

    @rule(numbers=several, as_it_comes=st.booleans())
    def put(self, numbers: list[int], as_it_comes: bool) -> None:
        for name in map(self.name, numbers):
            if self.node.free and name not in self.node.model:
                self.node.put(name, as_it_comes=as_it_comes)

    @rule(number=which)
    def progress(self, number: int) -> None:
        partial = [entry for entry in self.node.model.values() if entry.state == PARTIAL]
        if partial:
            self.node.progress(partial[number % len(partial)].name)

    @rule(numbers=several)
    def remove(self, numbers: list[int]) -> None:
        for name in map(self.name, numbers):
            self.node.remove(name)

    @precondition(lambda self: self.node.free and self.node.model)
    @rule(number=which, in_place=st.booleans())
    def move(self, number: int, in_place: bool) -> None:
        self.node.move(self.stored(number), in_place=in_place)

    @precondition(lambda self: self.node.model)
    @rule(number=which, heir=which)
    def hand_over(self, number: int, heir: int) -> None:
        """A block is evicted, and another is stored in its slot at once."""
        self.node.remove(self.stored(number))
        self.put([heir], as_it_comes=False)

    @rule(count=st.integers(1, 40))
    def land(self, count: int) -> None:
        self.node.wire.land(count)

    @rule()
    def land_all(self) -> None:
        self.node.land_all()

    @rule(order=st.permutations(range(8)))
    def reorder(self, order: list[int]) -> None:
        self.node.wire.order = order

    # Readers.

    def reading(self, counts: list[int]) -> None:
        self.node.wire.landing = deque(counts)

    @rule(number=which, counts=landing)
    def begin_get(self, number: int, counts: list[int]) -> None:
        get = Get(self.name(number))
        before = self.node.visible.get(get.name)
        self.gets.append(get)
        self.reading(counts)
        found = self.node.reader.find(get.name)
        if found is None:
            self.gets.remove(get)
            assert get.is_disturbed or before in (None, CHANGING), "it was there all the time"
            return
        get.at, get.entry = found
        assert any(said.is_said_by(get.entry) for said in self.node.history.get(get.name, [])), "a torn entry"
        if not get.is_disturbed and before is not CHANGING:
            assert before is not None
            assert before.is_said_by(get.entry)
        del self.gets[:-3]

    @precondition(lambda self: self.gets)
    @rule(number=which, counts=landing)
    def copy(self, number: int, counts: list[int]) -> None:
        """The next piece of the payload."""
        get = self.gets[number % len(self.gets)]
        said = published.Entry._make(published.ENTRY.unpack(get.entry))
        if len(get.copied) < said.layers:
            at = said.offset + 8 * len(get.copied)
            self.reading(counts)
            get.copied.append(self.node.slots_seen[at : at + 8])

    @precondition(lambda self: self.gets)
    @rule(number=which, counts=landing)
    def end_get(self, number: int, counts: list[int]) -> None:
        get = self.gets[number % len(self.gets)]
        self.reading(counts)
        unchanged = self.node.reader.is_unchanged(get.at, get.entry)
        self.gets.remove(get)
        assert unchanged or get.is_disturbed, "nothing changed, and the reader is told so"
        if unchanged:
            said = published.Entry._make(published.ENTRY.unpack(get.entry))
            expected = Published(get.name, said.state, said.layers, 0, said.generation).pieces
            assert get.copied == expected[: len(get.copied)], "wrong bytes"
            if len(get.copied) == PIECES:
                assert checksum(b"".join(get.copied)) == said.checksum

    @rule(number=which, counts=landing)
    def probe(self, number: int, counts: list[int]) -> None:
        watch = Get(self.name(number))
        before = self.node.visible.get(watch.name)
        self.gets.append(watch)
        self.reading(counts)
        readable = self.node.reader.is_readable(watch.name)
        self.gets.remove(watch)
        if not watch.is_disturbed and before is not CHANGING:
            assert readable == (before is not None and before.state == READABLE)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "node"):
            self.node.check()


_examples, _steps, _derandomized = PROFILES[os.environ.get("CAIRN_MODEL_PROFILE", "ci")]

TestPublished = PublishedMachine.TestCase
TestPublished.settings = settings(
    max_examples=_examples,
    stateful_step_count=_steps,
    deadline=None,
    derandomize=_derandomized,
    phases=[Phase.generate] if _derandomized else list(Phase),
    suppress_health_check=[HealthCheck.too_slow],
)
