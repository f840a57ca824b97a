"""A channel beside two byte strings: whatever the order of events, all arrives in order, and nobody waits for ever."""

import os
import random
from contextlib import ExitStack

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.errors import PeerLost
from kvstore.transport.rdma.channel import CHANNEL_BYTES, MESSAGES, Channel
from tests.channel_pair import soft_channels
from tests.soft_verbs import SoftFabric, SoftQueuePair

PROFILES = {"mutant": (150, 50, True), "": (100, 60, False)}  # examples, steps, the same each time
EXAMPLES, STEPS, DERANDOMIZED = PROFILES.get(os.environ.get("CAIRN_MODEL_PROFILE", ""), PROFILES[""])
ROUNDS = 400
sides = st.integers(0, 1)
reads = st.sampled_from([1, 50, 8000, 8184, 9000, CHANNEL_BYTES])
sizes = st.integers(0, 300) | st.sampled_from([8184, 8185, 20_000, 200_000])


class ChannelMachine(RuleBasedStateMachine):
    """Requests are carried out one by one, when `step` says so, in the order of a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.fabric = SoftFabric(seed=1)
        self.both = soft_channels(self.fabric, self.stack)  # has the memory
        self.channels: tuple[Channel, Channel] = self.both[:2]
        self.written = [bytearray(), bytearray()]
        self.read = [bytearray(), bytearray()]  # by whoever wrote it
        self.chance = random.Random(0)
        self.may_break = self.is_broken = False
        self.fabric.pause()

    @initialize(may_break=st.booleans(), seed=st.integers(0, 99))
    def begin(self, may_break: bool, seed: int) -> None:
        self.may_break = may_break
        self.fabric.order = random.Random(seed)

    @rule(side=sides, size=sizes)
    def write(self, side: int, size: int) -> None:
        if self.channels[side].error is None:
            data = self.chance.randbytes(size)
            self.channels[side].write(data)
            self.written[side] += data

    @rule(side=sides)
    def flush(self, side: int) -> None:
        self.channels[side].flush()

    @rule(side=sides, size=sizes, most=reads)
    def exchange(self, side: int, size: int, most: int) -> None:
        """Write, bring over what may go now, and read some of it."""
        self.write(side, size)
        self.flush(side)
        self.fabric.step(1000)
        self.progress(1 - side)
        self.take(1 - side, most)

    @rule(side=sides)
    def progress(self, side: int) -> None:
        self.channels[side].progress()

    @rule(side=sides, size=reads)
    def take(self, side: int, size: int) -> None:
        buffer = bytearray(size)
        got = self.channels[side].read_into(memoryview(buffer))
        self.read[1 - side] += buffer[:got]

    @rule(count=st.sampled_from([1, 2, 5, 50]))
    def step(self, count: int) -> None:
        self.fabric.step(count)

    @precondition(lambda self: not self.is_broken)
    @rule()
    def deliver_all(self) -> None:
        """With both ends read from, everything arrives."""
        for _ in range(ROUNDS):
            if self.read == self.written:
                break
            before = self._news()
            for side in (0, 1):
                self.fabric.step(1000)
                self.progress(side)
                self.take(side, CHANNEL_BYTES)
            assert self._news() != before, "it is stuck"
        assert self.read == self.written

    @precondition(lambda self: not self.is_broken)
    @rule(side=sides)
    def send_all_to_a_reader(self, side: int) -> None:
        """The sender reads nothing meanwhile."""
        for _ in range(ROUNDS):
            if self.read[side] == self.written[side]:
                break
            before = self._news()
            self.fabric.step(1000)
            self.progress(side)
            self.progress(1 - side)
            self.take(1 - side, CHANNEL_BYTES)
            assert self._news() != before, "it is stuck"
        assert self.read[side] == self.written[side]

    @precondition(lambda self: self.may_break and not self.is_broken)
    @rule(side=sides, how=st.sampled_from(["fail", "close"]))
    def break_off(self, side: int, how: str) -> None:
        self.is_broken = True
        if how == "fail":
            pair(self.channels[side]).fail()
        else:
            self.channels[side].close()

    @precondition(lambda self: self.is_broken)
    @rule()
    def expire(self) -> None:
        self.fabric.expire()

    def _news(self) -> tuple[int, ...]:
        return (
            *(len(way) for way in self.read),
            self.fabric.counts["sends"],
            *(channel._posts for channel in self.channels),
        )

    @invariant()
    def what_was_read_is_the_beginning_of_what_was_written(self) -> None:
        for read, written in zip(self.read, self.written, strict=True):
            assert written.startswith(read)

    @invariant()
    def no_message_waits_for_a_receive(self) -> None:
        if not self.is_broken:
            for source, target in (self.channels, self.channels[::-1]):
                assert len(pair(source).posted) <= len(pair(target).receives)

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        for channel in self.channels:
            if channel.error is None:
                slots = [wr_id >> 1 & 127 for wr_id in channel._receiving] + [slot for slot, *_ in channel._inbox]
                assert sorted(slots) == list(range(MESSAGES))
                assert len(channel._sending) <= MESSAGES
                assert channel.pending_bytes == sum(map(len, channel._queue))
                assert channel.late_completions == 0

    @invariant()
    def an_error_comes_of_a_break_and_leaves_nothing_posted(self) -> None:
        for channel in self.channels:
            assert channel.error is None or (self.is_broken and isinstance(channel.error, PeerLost))
            if channel.error is not None:
                assert not pair(channel).posted
                assert not pair(channel).receives
                assert channel.pending_bytes == 0

    def teardown(self) -> None:
        if not self.is_broken:
            self.deliver_all()
        self.stack.close()


def pair(channel: Channel) -> SoftQueuePair:
    assert isinstance(channel._pair, SoftQueuePair)
    return channel._pair


TestChannel = ChannelMachine.TestCase
TestChannel.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    derandomize=DERANDOMIZED,
    phases=[Phase.generate] if DERANDOMIZED else list(Phase),
    suppress_health_check=list(HealthCheck),
)
