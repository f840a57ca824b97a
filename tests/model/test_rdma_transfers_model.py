"""Transfers beside what they are to bring: right bytes or none, one end each, and memory that is quiet once settled."""

import os
import random
from contextlib import ExitStack

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.transport.rdma.transfer import MOST_TRIES
from kvstore.transport.rdma.verbs import STATUSES, SUCCESS, Access, Completion, Read
from tests.rdma_pair import RdmaPair, Registered, Watched
from tests.soft_verbs import SoftQueuePair

PROFILES = {"mutant": (100, 50, True), "": (300, 60, False)}  # examples, steps, the same each time
EXAMPLES, STEPS, DERANDOMIZED = PROFILES.get(os.environ.get("CAIRN_MODEL_PROFILE", ""), PROFILES[""])
PAGE = 256
NICS, QUEUES, DEPTH, WINDOW_BYTES, QUARANTINE_BYTES = 2, 2, 4, 3 * PAGE, 5 * PAGE
SLAB, SLABS = 16 * PAGE, 3
AREA, AREAS = 16 * PAGE, 8
NUMBERS = 1 << 32
BROKEN = [STATUSES.index(name) for name in ("RETRY_EXC_ERR", "REM_ACCESS_ERR", "WR_FLUSH_ERR", "GENERAL_ERR")]
nics = st.integers(0, NICS - 1)
slabs = st.integers(0, SLABS - 1)


class Started:
    """A transfer from a slab into an area, and what it is to bring there."""

    def __init__(self, area: int, slab: int, watched: Watched, expected: bytes, broken_before: int) -> None:
        self.area = area
        self.slab = slab
        self.watched = watched
        self.expected = expected
        self.broken_before = broken_before
        self.may_be_stale = self.is_called_off = False


class TransfersMachine(RuleBasedStateMachine):
    """READs are carried out one by one, when `step` says so, in the order of a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        size = max(SLAB * SLABS, AREA * AREAS)
        self.pair = RdmaPair(self.stack, nics=NICS, queues=QUEUES, depth=DEPTH, size=size, seed=1,
                             window_bytes=WINDOW_BYTES, quarantine_bytes=QUARANTINE_BYTES)  # fmt: skip
        self.pair.fabric.pause()
        self.slabs = [self.lent(number) for number in range(SLABS)]
        self.live: list[Started] = []
        self.quiet: dict[int, bytes] = {area: self.area(area) for area in range(AREAS)}  # what lies in it
        self.seen: dict[SoftQueuePair, set[int]] = {}  # completions that there were
        self.chance = random.Random(0)
        self.may_fail = True

    @initialize(may_fail=st.sampled_from([True, True, False]), seed=st.integers(0, 99))
    def begin(self, may_fail: bool, seed: int) -> None:
        self.may_fail = may_fail
        self.pair.fabric.order = random.Random(seed)

    # The memory on both sides.

    def lent(self, number: int) -> Registered:
        there = self.pair.there
        return Registered(there.domains, there.address + number * SLAB, SLAB, Access.REMOTE_READ)

    def area(self, number: int) -> bytes:
        return self.pair.here.map[number * AREA : (number + 1) * AREA]

    def pairs(self) -> list[SoftQueuePair]:
        return [self.pair.pair(path, queue) for path in range(NICS) for queue in range(QUEUES)]

    def posted_into(self, area: int) -> int:
        """Bytes."""
        start = self.pair.here.address + area * AREA
        reads = [read for pair in self.pairs() for read in pair.posted if isinstance(read, Read)]
        return sum(read.size for read in reads if start <= read.address < start + AREA)

    # Transfers.

    @precondition(lambda self: self.quiet)
    @rule(
        slab=slabs,
        pieces=st.lists(st.tuples(st.integers(0, 11), st.sampled_from([1, PAGE + 1, 4 * PAGE, 4 * PAGE])), min_size=1,
                        max_size=4),
        then_another=st.booleans(),
        connected=st.booleans(),
    )  # fmt: skip
    def start_one(self, slab: int, pieces: list[tuple[int, int]], then_another: bool, connected: bool) -> None:
        if connected:
            self.connect()
        self.start(slab, pieces, then_another)

    @precondition(lambda self: len(self.quiet) >= 4)
    @rule(slab=slabs, pages=st.integers(1, 9))
    def start_some(self, slab: int, pages: int) -> None:
        self.connect()
        for number in range(4):
            self.start(slab, [(number, pages * PAGE)])

    def start(self, slab: int, pieces: list[tuple[int, int]], then_another: bool = False) -> None:
        area = min(self.quiet)
        assert self.area(area) == self.quiet.pop(area), "it was written after it was settled"
        self.pair.here.map[area * AREA : (area + 1) * AREA] = bytes(AREA)
        fetches, expected = [], b""
        for page, size in pieces:
            place = area * AREA + len(expected)
            source = slab * SLAB + page * PAGE
            fetches.append(self.pair.fetch(source, size, place)._replace(rkeys=self.slabs[slab].rkeys))
            expected += self.pair.there.map[source : source + size]
        watched = Watched(fetches, PAGE)
        started = Started(area, slab, watched, expected, len(self.pair.broke))
        watched.after = lambda: self.ended(started, then_another)
        watched.when_settled = lambda: self.settled(started)
        self.live.append(started)
        self.pair.paths.start(watched.transfer)

    def ended(self, one: Started, then_another: bool) -> None:
        transfer = one.watched.transfer
        if one.is_called_off:
            return
        if transfer.error is None:
            assert self.area(one.area)[: len(one.expected)] == one.expected, "wrong bytes"
        elif type(transfer.error).__name__ == "StaleLease":
            assert one.may_be_stale, transfer.error
        elif "tries" in str(transfer.error):
            assert len(self.pair.broke) - one.broken_before >= MOST_TRIES - 1
        else:
            assert not any(path.is_up for path in self.pair.paths.paths), transfer.error
        if then_another and self.quiet:
            self.start(0, [(0, PAGE)])

    def settled(self, one: Started) -> None:
        assert one.watched.ended == 1
        assert not self.posted_into(one.area), "a NIC may still write there"
        self.live.remove(one)
        self.quiet[one.area] = self.area(one.area)

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, AREAS - 1))
    def call_off(self, at: int) -> None:
        one = self.live[at % len(self.live)]
        one.is_called_off = one.is_called_off or not one.watched.ended
        self.pair.paths.call_off(one.watched.transfer)
        assert one.watched.ended == 1

    # What becomes of them.

    @rule(count=st.sampled_from([1, 2, 5]))
    def step(self, count: int) -> None:
        self.pair.fabric.step(count)
        for pair in self.pairs():
            self.seen.setdefault(pair, set()).update(completion.wr_id for completion, _ in pair.completions)

    @rule()
    def progress(self) -> None:
        self.pair.run()

    @rule(count=st.sampled_from([3, 8]))
    def step_and_progress(self, count: int) -> None:
        self.step(count)
        self.pair.run()

    @rule(nic=nics)
    def progress_without_reason(self, nic: int) -> None:
        self.pair.paths.progress(self.pair.pair(nic).fd)

    @rule(at=st.integers(0, 99), queue=st.integers(0, NICS * QUEUES - 1), is_good=st.booleans())
    def complete_twice(self, at: int, queue: int, is_good: bool) -> None:
        """A completion that was there before comes again, late: one that looks as if it was posted, if there is."""
        pair = self.pairs()[queue]
        self.progress()
        numbers = {read.wr_id % NUMBERS for read in pair.posted if isinstance(read, Read)}
        seen = sorted(self.seen.get(pair, set()), key=lambda wr_id: (wr_id % NUMBERS not in numbers, wr_id))
        if seen:
            late = self.pair.paths.late_completions
            wr_id = seen[0 if at % 2 else at % len(seen)]
            pair.inject(Completion(wr_id, SUCCESS if is_good else BROKEN[0], False, 0))
            self.progress()
            assert self.pair.paths.late_completions == late + 1

    @precondition(lambda self: self.live)
    @rule()
    def all_arrives(self) -> None:
        """While a path is up and nothing fails, whatever is started ends."""
        if self.pair.fabric._cut or self.pair.fabric.failing or self.pair.fabric.refused_posts:
            return
        for _ in range(100):
            if not self.live:
                break
            self.step(1000)
            self.progress()
        assert not self.live, "it is stuck"

    # What goes wrong.

    @precondition(lambda self: self.may_fail)
    @rule(what=st.sampled_from(["refuse a post", "cut", "give up", "reset"]), nic=nics)
    def fail(self, what: str, nic: int) -> None:
        if what == "refuse a post":
            self.pair.fabric.refused_posts = 1
        elif what == "cut":
            self.pair.cut(nic)
        elif what == "give up":
            self.pair.give_up()
        else:
            self.pair.paths.reset(self.pair.paths.paths[nic])

    @precondition(lambda self: self.may_fail and self.live)
    @rule(at=st.integers(0, AREAS - 1))
    def take_back(self, at: int) -> None:
        """The memory that is read is used for something else, and lent again."""
        slab = self.live[at % len(self.live)].slab
        for one in self.live:
            one.may_be_stale = one.may_be_stale or one.slab == slab
        self.slabs[slab].close()
        self.pair.there.map[slab * SLAB : (slab + 1) * SLAB] = self.chance.randbytes(SLAB)
        self.slabs[slab] = self.lent(slab)

    @precondition(lambda self: self.may_fail and self.live)
    @rule(status=st.sampled_from(BROKEN), before=st.integers(0, 2), count=st.sampled_from([1, 1, 8]))
    def poison(self, status: int, before: int, count: int) -> None:
        """READs fail, one after the other."""
        self.step(before)
        self.pair.fabric.failing.extend([status] * count)
        for _ in range(count):
            for one in self.live:
                one.may_be_stale = one.may_be_stale or STATUSES[status] == "REM_ACCESS_ERR"
            self.step(1)
            self.progress()
        self.pair.fabric.failing.clear()

    @precondition(lambda self: self.may_fail)
    @rule()
    def hang(self) -> None:
        self.progress()
        before = [read for pair in self.pairs() for read in pair.posted]
        self.pair.time += 1.5
        self.pair.paths.expire()
        assert not any(read is old for pair in self.pairs() for read in pair.posted for old in before)

    @rule(seconds=st.sampled_from([0.1, 0.5]))
    def wait(self, seconds: float) -> None:
        self.pair.time += seconds

    @rule(wanted=st.booleans())
    def reconnect(self, wanted: bool) -> None:
        """What is down; from now on at once, where that is wanted."""
        self.pair.reconnects = wanted
        self.connect()

    def connect(self) -> None:
        self.pair.fabric.heal()
        for path in self.pair.paths.paths:
            if not path.is_up:
                self.pair.connect(path)

    # What is always so.

    @invariant()
    def quiet_memory_is_not_written(self) -> None:
        for area, content in self.quiet.items():
            assert self.area(area) == content

    @invariant()
    def all_end_once_and_settle_once_after_it(self) -> None:
        is_news = any(pair.completions for pair in self.pairs())
        for one in self.live:
            assert (one.watched.ended, one.watched.settled) in ((0, 0), (1, 0))
            waits = bool(one.watched.transfer.pending) and not one.watched.ended
            assert waits or self.posted_into(one.area) or is_news, "it is in nobody's hands"

    @invariant()
    def no_more_is_posted_than_may_be(self) -> None:
        for pair in self.pairs():
            sizes = [read.size for read in pair.posted if isinstance(read, Read)]
            assert len(sizes) <= DEPTH
            assert sum(sizes[:-1]) < WINDOW_BYTES

    @invariant()
    def nothing_waits_while_a_path_is_idle(self) -> None:
        waiting = [one for one in self.live if one.watched.transfer.pending]
        up = [number for number, path in enumerate(self.pair.paths.paths) if path.is_up]
        assert up or all(one.watched.ended for one in self.live)
        if waiting:
            idle = [self.pair.pair(path, queue) for path in up for queue in range(QUEUES)]
            assert all(pair.posted or pair.completions for pair in idle)

    @invariant()
    def quarantine_is_bounded(self) -> None:
        gone = [one for one in self.live if one.is_called_off]
        in_use = sum(self.posted_into(one.area) for one in gone)
        assert in_use <= self.pair.paths.quarantined_bytes <= QUARANTINE_BYTES

    @invariant()
    def without_a_failure_no_path_breaks_but_for_the_quarantine(self) -> None:
        if not self.may_fail:
            assert all(path.health.failures == 0 for path in self.pair.paths.paths)

    @invariant()
    def rates_count_what_is_posted(self) -> None:
        for path in self.pair.paths.paths:
            assert path.rate.queued_bytes == sum(queue.in_flight_bytes for queue in path.queues)

    def teardown(self) -> None:
        for slab in self.slabs:
            slab.close()
        self.stack.close()
        assert not self.live, "a transfer never settles"


TestTransfers = TransfersMachine.TestCase
TestTransfers.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    derandomize=DERANDOMIZED,
    phases=[Phase.generate] if DERANDOMIZED else list(Phase),
    suppress_health_check=list(HealthCheck),
)
