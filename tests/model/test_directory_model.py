"""Holders and homes beside plain dicts: whatever is lost, doubled or late, and whoever comes and goes, in the end each
home says exactly who has what."""

import os
import random
import struct
from collections.abc import Hashable, Iterator
from functools import cache
from unittest import mock

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.cluster import announcer as announcers
from kvstore.cluster import directory as directories
from kvstore.cluster.announcer import Announcer
from kvstore.cluster.directory import Directory
from kvstore.cluster.homes import Homes
from kvstore.errors import StaleLease
from kvstore.wire_cluster import HOLDING, STRIPE, Announce, Announced, Locate

PROFILES = {"mutant": (100, 60, True), "": (100, 60, False)}  # examples, steps, the same each time
EXAMPLES, STEPS, DERANDOMIZED = PROFILES.get(os.environ.get("CAIRN_MODEL_PROFILE", ""), PROFILES[""])
NODES = "abc"
NAMES = 3  # of each partition
AGAIN = 0.3  # the part of messages that come twice
WAITING_MOST, SOLE_MOST = 4, 2  # of announcer.py and directory.py, here
ROUNDS = 400  # in which all must be quiet
Block = tuple[int, int]  # partition, name

homes_of = cache(Homes)
ALL_HOMES = homes_of(frozenset(NODES))
SOME = [partition for node in NODES for partition in ALL_HOMES.owned(node)[:2]]
nodes = st.sampled_from(NODES)
blocks = st.tuples(st.sampled_from(SOME), st.integers(0, NAMES - 1)).map(lambda pair: (pair[0], pair[0] * 16 + pair[1]))
tiers = st.sampled_from([0, 1, 2, 2, 4, 6, 7])
which = st.integers(0, 63)  # one of those there are, modulo their number
seldom = st.integers(0, 3).map(lambda number: number == 3)


class Process:
    """One start of a node: its blocks, what it tells, its part of the directory, and its view of the members."""

    def __init__(self, node: str, epoch: int) -> None:
        self.node = node
        self.epoch = epoch
        self.tiers: dict[Block, int] = {}
        self.told: set[tuple[Block, int]] = set()
        self.announcer = Announcer(node, epoch)
        self.directory = Directory()
        self.view: dict[str, int] = {}

    def change(self, block: Block, told: int) -> None:
        changed = self.tiers.get(block, 0) ^ told
        for index in range(3):
            if changed >> index & 1:
                self.announcer.toggle(*block, index, is_there=bool(told >> index & 1))
        self.tiers[block] = told
        if not told:
            del self.tiers[block]
        self.told.add((block, told))
        self.announcer.note(block[0], block)

    def describe(self, block: Hashable) -> tuple[int, int]:
        assert isinstance(block, tuple)
        return block[1], self.tiers.get(block, 0)

    def note_again(self, partitions: set[int]) -> None:
        for block in self.tiers:
            if block[0] in partitions:
                self.announcer.note(block[0], block)

    def see(self, members: dict[str, int]) -> None:
        before, self.view = self.view, dict(members)
        homes = homes_of(frozenset(members))
        for node, epoch in before.items():
            if members.get(node) != epoch:
                self.directory.forget(node, epoch)
        self.directory.keep(lambda partition: homes.home(partition) == self.node)
        self.note_again(self.announcer.homes_changed(homes, self.view))

    def who(self, partition: int) -> dict[Block, dict[str, int]]:
        """Of all names that the model knows in that partition."""
        names = [partition * 16 + number for number in range(NAMES)]
        request = Locate(0, STRIPE.pack(partition, len(names)), struct.pack(f"<{len(names)}Q", *names))
        reply = self.directory.locate(request)
        pairs = [HOLDING.iter_unpack(holding) for holding in reply.holdings]
        found = [{}, *({reply.nodes[number]: told for number, told in some} for some in pairs)]
        places = struct.unpack(f"<{len(names)}H", reply.which)
        return {(partition, name): found[place] for name, place in zip(names, places, strict=True)}


class DirectoryMachine(RuleBasedStateMachine):
    """Messages reach whoever has the name by then; answers reach the start of a node that asked.

    Where all see at once who comes and goes, nothing differs in the end; else digests may find what does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[str, Process] = {}
        self.members: dict[str, int] = {}
        self.epochs = dict.fromkeys(NODES, 0)
        self.see_at_once = True
        self.told: dict[str, set[tuple[Block, int]]] = {node: set() for node in NODES}
        self.batches: list[tuple[str, Announce]] = []
        self.answers: list[tuple[Process, str, Announced]] = []
        self.chance = random.Random(0)
        self.small = mock.patch.multiple(announcers, WAITING_MOST=WAITING_MOST)
        self.few = mock.patch.multiple(directories, SOLE_MOST=SOLE_MOST, SOLE_KEPT_MOST=5)
        self.small.start()
        self.few.start()

    @initialize(count=st.integers(1, 3), seed=st.integers(0, 99), see_at_once=st.sampled_from([True, True, False]))
    def begin(self, count: int, seed: int, see_at_once: bool) -> None:
        self.chance.seed(seed)
        self.see_at_once = see_at_once
        for node in NODES[:count]:
            self.start(node)
        self.all_see()

    def all_see(self) -> None:
        for process in self.alive.values():
            process.see(self.members)

    # Nodes come and go.

    @rule(node=nodes)
    def start(self, node: str) -> None:
        if node not in self.alive:
            self.epochs[node] += 1
            self.alive[node] = process = Process(node, self.epochs[node])
            self.members[node] = process.epoch
            self.told[node] |= set()
            process.told = self.told[node]
            process.see(self.members)
            if self.see_at_once:
                self.all_see()

    @rule(node=nodes, sure=seldom)
    def kill(self, node: str, sure: bool) -> None:
        if sure and node in self.alive:
            del self.alive[node]
            self.members.pop(node, None)
            if self.see_at_once:
                self.all_see()

    @rule(node=nodes)
    def restart(self, node: str) -> None:
        """So fast that nobody sees it away."""
        if node in self.alive:
            del self.alive[node]
            self.start(node)

    @precondition(lambda self: not self.see_at_once)
    @rule(node=nodes, sure=seldom)
    def lose_sight_of(self, node: str, sure: bool) -> None:
        if sure:
            self.members.pop(node, None)

    @precondition(lambda self: not self.see_at_once)
    @rule(node=nodes)
    def come_back(self, node: str) -> None:
        if node in self.alive:
            self.members[node] = self.alive[node].epoch

    @precondition(lambda self: not self.see_at_once)
    @rule(node=nodes)
    def see(self, node: str) -> None:
        if node in self.alive:
            self.alive[node].see(self.members)

    # Blocks come and go, and are told of.

    @rule(node=nodes, block=blocks, told=tiers)
    def change(self, node: str, block: Block, told: int) -> None:
        if node in self.alive:
            self.alive[node].change(block, told)

    @rule(node=nodes, some=st.lists(st.tuples(blocks, tiers), min_size=5, max_size=15))
    def change_many(self, node: str, some: list[tuple[Block, int]]) -> None:
        for block, told in some:
            self.change(node, block, told)

    @rule(node=nodes, home=nodes, most=st.sampled_from([1, 3, 100]), digest=seldom)
    def send(self, node: str, home: str, most: int, digest: bool) -> None:
        if node in self.alive:
            process = self.alive[node]
            batch = process.announcer.batch(home, process.describe, most, digest=digest)
            if batch is not None:
                self.batches.append((home, batch))

    @precondition(lambda self: self.batches)
    @rule(number=which, again=seldom)
    def deliver(self, number: int, again: bool) -> None:
        number %= len(self.batches)
        home, batch = self.batches[number]
        if not again:
            del self.batches[number]
        self.hand_over(home, batch)

    @precondition(lambda self: self.answers)
    @rule(number=which, again=seldom)
    def answer(self, number: int, again: bool) -> None:
        number %= len(self.answers)
        process, home, reply = self.answers[number]
        if not again:
            del self.answers[number]
        process.note_again(process.announcer.answered(home, reply))

    @rule(node=nodes, home=nodes)
    def ask_for_a_new_stream(self, node: str, home: str) -> None:
        """An answer from when the home did not know of the node's."""
        if node in self.alive:
            process = self.alive[node]
            process.note_again(process.announcer.answered(home, Announced(0, 0, is_gap=True)))

    @rule(node=nodes, home=nodes, most=st.sampled_from([1, 3, 100]), digest=seldom)
    def exchange(self, node: str, home: str, most: int, *, digest: bool) -> None:
        """A batch and its answer, with nothing in between."""
        if node in self.alive and home in self.alive:
            process = self.alive[node]
            batch = process.announcer.batch(home, process.describe, most, digest=digest)
            if batch is not None:
                self.settle(process, home, batch)

    @rule(node=nodes)
    def tell_all(self, node: str) -> None:
        """Batches and their answers, as long as there are any and they arrive."""
        for home in self.members if node in self.alive else ():
            for _ in range(5):
                self.exchange(node, home, 3, digest=False)

    @precondition(lambda self: self.batches or self.answers)
    @rule(number=which)
    def lose(self, number: int) -> None:
        if number < len(self.batches):
            del self.batches[number]
        elif self.answers:
            del self.answers[number % len(self.answers)]

    @rule(node=nodes, most=st.sampled_from([1, 3, 100]))
    def sweep(self, node: str, most: int) -> None:
        if node in self.alive:
            self.alive[node].directory.sweep(most)

    # Both sides.

    def hand_over(self, home: str, batch: Announce) -> Announced | None:
        """To whoever has that name; None if nobody has, if the holder is no member there, or its start is over."""
        if home not in self.alive or self.alive[home].view.get(batch.node, 0) < batch.epoch:
            return None
        try:
            reply = self.alive[home].directory.apply(batch)
        except StaleLease:
            assert batch.epoch < self.epochs[batch.node]
            return None
        assert len(reply.sole) <= SOLE_MOST * 8
        sender = self.alive.get(batch.node)
        if sender is not None and sender.epoch == batch.epoch:
            self.answers.append((sender, home, reply))
            return reply
        return None

    def settle(self, process: Process, home: str, batch: Announce) -> None:
        """It arrives and so does the answer; either may come once more, later."""
        reply = self.hand_over(home, batch)
        if self.chance.random() < AGAIN:
            self.batches.append((home, batch))
        if reply is not None:
            answer = self.answers.pop()
            if self.chance.random() < AGAIN:
                self.answers.append(answer)
            process.note_again(process.announcer.answered(home, reply))

    def pairs(self) -> Iterator[tuple[Process, str]]:
        return ((process, home) for process in self.alive.values() for home in self.members)

    def settle_all(self) -> None:
        """Every batch is answered, until there is none."""
        for _ in range(ROUNDS):
            waiting = [(process, home) for process, home in self.pairs() if home in process.announcer.homes_waiting()]
            if not waiting:
                return
            for process, home in waiting:
                batch = process.announcer.batch(home, process.describe, 3)
                assert batch is not None
                self.settle(process, home, batch)
        raise AssertionError("batches without end")

    def compare_digests(self) -> list[int]:
        """Partitions that are told anew for it."""
        found: list[int] = []
        for process, home in self.pairs():
            batch = process.announcer.batch(home, process.describe, 3, digest=True)
            assert batch is not None
            assert len(batch.digests) > 0
            reply = self.alive[home].directory.apply(batch)
            anew = process.announcer.answered(home, reply)
            process.note_again(anew)
            found += anew
        return found

    @invariant()
    def directories_agree_with_themselves(self) -> None:
        for process in self.alive.values():
            assert list(process.directory.problems()) == []

    @rule(node=nodes)
    def nobody_is_said_to_have_what_it_never_told_of(self, node: str) -> None:
        for partition in SOME if node in self.alive else ():
            for block, holders in self.alive[node].who(partition).items():
                for holder, told in holders.items():
                    assert (block, told) in self.told[holder]

    @invariant()
    def what_waits_is_bounded(self) -> None:
        for process, home in self.pairs():
            assert process.announcer.waiting(home) <= 2 * WAITING_MOST

    def teardown(self) -> None:
        try:
            self.quieten()
        finally:
            self.small.stop()
            self.few.stop()

    def quieten(self) -> None:
        """All see who is there, and everything is told: now the homes know everything, whatever else arrives."""
        self.deliver_late()
        for node, process in self.alive.items():
            self.members[node] = process.epoch
        for process in self.alive.values():
            process.see(self.members)
        self.settle_all()
        if not self.see_at_once:
            for process in self.alive.values():  # saw another member for a moment, alone
                process.directory.keep(lambda partition: bool(partition % 2))
            self.compare_digests()
            self.settle_all()
        self.check()
        self.deliver_late()
        self.settle_all()
        self.all_see()  # what came late for others' partitions goes
        self.check()
        assert self.compare_digests() == []
        self.check()
        for process in self.alive.values():
            while process.directory.sweep(2):
                pass
        self.check()
        homes_know = [process.directory for process in self.alive.values()]
        truth = [set(process.tiers) for process in self.alive.values()]
        assert sum(directory.blocks for directory in homes_know) == len(set().union(*truth))
        assert sum(directory.holdings for directory in homes_know) == sum(map(len, truth))

    def deliver_late(self) -> None:
        """Some of what is under way."""
        self.chance.shuffle(self.batches)
        late = [self.batches.pop() for _ in range(len(self.batches) // 2)]
        for home, batch in late:
            self.hand_over(home, batch)
        self.chance.shuffle(self.answers)
        for process, home, reply in self.answers:
            process.note_again(process.announcer.answered(home, reply))
        self.answers.clear()

    def check(self) -> None:
        """All answers are true."""
        for partition in SOME if self.alive else ():
            home = self.alive[homes_of(frozenset(self.members)).home(partition)]
            for block, holders in home.who(partition).items():
                assert holders == {
                    node: there.tiers[block] for node, there in self.alive.items() if block in there.tiers
                }
        self.directories_agree_with_themselves()


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    derandomize=DERANDOMIZED,
    phases=[Phase.generate] if DERANDOMIZED else list(Phase),
    suppress_health_check=list(HealthCheck),
)
