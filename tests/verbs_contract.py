"""What every binding of RDMA verbs does, real or not. One device, both ends in one process."""

import ctypes
import mmap
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from kvstore.transport.rdma.topology import choose_gid
from kvstore.transport.rdma.verbs import (
    FLUSHED,
    STATUSES,
    SUCCESS,
    Access,
    Completion,
    Context,
    Domain,
    MemoryRegion,
    Own,
    QueueLimits,
    QueuePair,
    Read,
    Receive,
    Remote,
    Send,
    Timers,
    Verbs,
    VerbsError,
)

LIMITS = QueueLimits(sends=32, receives=8, inline_bytes=64)
TIMERS = Timers(timeout=16, retries=3)
PATIENCE_S = 20.0
SIZE = 1 << 20
BOTH = Access.LOCAL_WRITE | Access.REMOTE_READ


class Place(NamedTuple):
    """Registered memory."""

    address: int
    region: MemoryRegion
    map: mmap.mmap

    def fill(self, data: bytes, at: int = 0) -> None:
        self.map[at : at + len(data)] = data

    def bytes(self, size: int, at: int = 0) -> bytes:
        return self.map[at : at + size]


class Ends(NamedTuple):
    context: Context
    domain: Domain
    one: QueuePair
    other: QueuePair


def completions(pair: QueuePair, count: int, timeout_s: float = PATIENCE_S) -> list[Completion]:
    """So many, by events."""
    found: list[Completion] = []
    until = time.monotonic() + timeout_s
    while True:
        pair.arm()
        while got := pair.poll(16):
            found += got
        if len(found) >= count:
            return found
        left = until - time.monotonic()
        if left <= 0 or not select.select([pair.fd], [], [], left)[0]:
            raise AssertionError(f"{len(found)} completions of {count} in {timeout_s} s: {found}")


def connect(context: Context, one: QueuePair, other: QueuePair) -> None:
    port = context.ports()[0]
    gid = choose_gid(port)
    psns = int.from_bytes(os.urandom(3), "big"), int.from_bytes(os.urandom(3), "big")
    for pair, peer, mine, theirs in ((one, other, *psns), (other, one, *psns[::-1])):
        own = Own(mine, port.number, gid.number, port.mtu_bytes, TIMERS)
        pair.connect(own, Remote(peer.number, theirs, gid.raw, port.lid))


def status(completion: Completion) -> str:
    return STATUSES[completion.status]


class VerbsContract:
    """A subclass has a fixture `verbs`; the first device of it is used."""

    @pytest.fixture
    def give_up(self) -> Callable[[], None]:
        """Where time does not pass by itself: let the retries of a peer that does not answer be used up."""
        return lambda: None

    @pytest.fixture
    def stack(self) -> Iterator[ExitStack]:
        with ExitStack() as stack:
            yield stack

    @pytest.fixture
    def context(self, verbs: Verbs, stack: ExitStack) -> Context:
        context = verbs.open(verbs.devices()[0])
        stack.callback(context.close)
        return context

    @pytest.fixture
    def domain(self, context: Context, stack: ExitStack) -> Domain:
        return self.another_domain(context, stack)

    @pytest.fixture
    def ends(self, context: Context, domain: Domain, stack: ExitStack) -> Ends:
        one, other = (self.pair(domain, stack) for _ in range(2))
        for pair in (one, other):
            pair.prepare(context.ports()[0].number)
        connect(context, one, other)
        return Ends(context, domain, one, other)

    def another_domain(self, context: Context, stack: ExitStack) -> Domain:
        domain = context.domain()
        stack.callback(domain.close)
        return domain

    def pair(self, domain: Domain, stack: ExitStack) -> QueuePair:
        pair = domain.queue_pair(LIMITS)
        stack.callback(pair.close)
        return pair

    def place(self, domain: Domain, stack: ExitStack, access: Access = BOTH, size: int = SIZE) -> Place:
        memory = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        region = domain.register(address, size, access)
        stack.callback(region.close)
        return Place(address, region, memory)

    def test_devices_have_active_ports_with_an_address(self, context: Context) -> None:
        port = context.ports()[0]
        assert port.is_active
        assert port.mtu_bytes in (256, 512, 1024, 2048, 4096)
        assert len(choose_gid(port).raw) == 16

    def test_a_read_brings_the_peers_bytes(self, ends: Ends, stack: ExitStack) -> None:
        source, target = self.place(ends.domain, stack), self.place(ends.domain, stack)
        data = os.urandom(SIZE)
        source.fill(data)
        ends.one.post_reads(
            [Read(7, target.address, target.region.lkey, SIZE, source.address, source.region.rkey, True)]
        )
        (done,) = completions(ends.one, 1)
        assert (done.wr_id, done.status, done.is_receive) == (7, SUCCESS, False)
        assert target.bytes(SIZE) == data

    def test_of_a_batch_only_the_signaled_reads_complete_and_all_are_there(self, ends: Ends, stack: ExitStack) -> None:
        source, target = self.place(ends.domain, stack), self.place(ends.domain, stack)
        data = os.urandom(SIZE)
        source.fill(data)
        step = SIZE // 16
        reads = [
            Read(
                at,
                target.address + (15 - at) * step,
                target.region.lkey,
                step,
                source.address + at * step,
                source.region.rkey,
                at in (7, 15),
            )
            for at in range(16)
        ]
        ends.one.post_reads(reads)
        assert [done.wr_id for done in completions(ends.one, 2)] == [7, 15]
        pieces = [data[at * step : (at + 1) * step] for at in range(16)]
        assert target.bytes(SIZE) == b"".join(pieces[::-1])

    def test_messages_arrive_in_order_inline_or_not(self, ends: Ends, stack: ExitStack) -> None:
        here, there = self.place(ends.domain, stack), self.place(ends.domain, stack)
        messages = [os.urandom(size) for size in (1, 64, 4096, 60)]
        for at in range(4):
            ends.other.post_receive(Receive(100 + at, there.address + at * 8192, there.region.lkey, 8192))
        for at, message in enumerate(messages):
            here.fill(message, at * 8192)
            inline = len(message) <= ends.one.inline_bytes
            ends.one.post_send(Send(at, here.address + at * 8192, here.region.lkey, len(message), True, inline))
        got = completions(ends.other, 4)
        assert [(done.wr_id, done.size, done.is_receive) for done in got] == [
            (100 + at, len(message), True) for at, message in enumerate(messages)
        ]
        for at, message in enumerate(messages):
            assert there.bytes(len(message), at * 8192) == message
        assert [done.wr_id for done in completions(ends.one, 4)] == [0, 1, 2, 3]

    def test_a_read_with_a_wrong_key_fails_and_what_is_behind_it_is_flushed(self, ends: Ends, stack: ExitStack) -> None:
        source, target = self.place(ends.domain, stack), self.place(ends.domain, stack)
        wrong = source.region.rkey ^ 0x5500
        ends.one.post_reads(
            [
                Read(at, target.address, target.region.lkey, 64, source.address, rkey, True)
                for at, rkey in enumerate((wrong, source.region.rkey, source.region.rkey))
            ]
        )
        done = completions(ends.one, 3)
        assert status(done[0]) in ("REM_ACCESS_ERR", "REM_INV_REQ_ERR")
        assert [other.status for other in done[1:]] == [FLUSHED, FLUSHED]
        assert (ends.one.state(), ends.other.state()) == ("ERR", "ERR")

    def test_after_an_error_both_ends_are_reset_and_connected_anew(self, ends: Ends, stack: ExitStack) -> None:
        source, target = self.place(ends.domain, stack), self.place(ends.domain, stack)
        source.fill(b"x" * 64)
        bad = Read(1, target.address, target.region.lkey, 64, source.address, source.region.rkey ^ 0x5500, True)
        ends.one.post_reads([bad])
        completions(ends.one, 1)
        for pair in (ends.one, ends.other):
            pair.reset()
            while pair.poll(16):
                pass
        connect(ends.context, ends.one, ends.other)
        ends.one.post_reads([bad._replace(wr_id=2, rkey=source.region.rkey)])
        (done,) = completions(ends.one, 1)
        assert (done.wr_id, done.status) == (2, SUCCESS)
        assert target.bytes(64) == b"x" * 64

    def test_memory_that_is_registered_no_more_cannot_be_read(self, ends: Ends, stack: ExitStack) -> None:
        source, target = self.place(ends.domain, stack), self.place(ends.domain, stack)
        rkey = source.region.rkey
        source.region.close()
        ends.one.post_reads([Read(1, target.address, target.region.lkey, 64, source.address, rkey, True)])
        (done,) = completions(ends.one, 1)
        assert status(done) in ("REM_ACCESS_ERR", "RETRY_EXC_ERR", "REM_OP_ERR")

    def test_memory_without_the_right_cannot_be_read(self, ends: Ends, stack: ExitStack) -> None:
        source = self.place(ends.domain, stack, Access.LOCAL_WRITE)
        target = self.place(ends.domain, stack)
        read = Read(1, target.address, target.region.lkey, 64, source.address, source.region.rkey, True)
        ends.one.post_reads([read])
        (done,) = completions(ends.one, 1)
        assert status(done) == "REM_ACCESS_ERR"

    def test_a_read_beyond_the_end_of_a_region_fails(self, ends: Ends, stack: ExitStack) -> None:
        source, target = self.place(ends.domain, stack), self.place(ends.domain, stack)
        at = source.address + SIZE - 32
        ends.one.post_reads([Read(1, target.address, target.region.lkey, 64, at, source.region.rkey, True)])
        (done,) = completions(ends.one, 1)
        assert status(done) == "REM_ACCESS_ERR"
        assert target.bytes(64) == bytes(64)

    def test_a_queue_pair_does_not_reach_the_memory_of_another_domain(self, ends: Ends, stack: ExitStack) -> None:
        target = self.place(ends.domain, stack)
        another = self.another_domain(ends.context, stack)
        self.pair(another, stack)
        source = self.place(another, stack)
        read = Read(1, target.address, target.region.lkey, 64, source.address, source.region.rkey, True)
        ends.one.post_reads([read])
        (done,) = completions(ends.one, 1)
        assert status(done) == "REM_ACCESS_ERR"

    def test_the_channel_speaks_of_a_completion_that_comes_after_it_was_armed(
        self, ends: Ends, stack: ExitStack
    ) -> None:
        source, target = self.place(ends.domain, stack), self.place(ends.domain, stack)
        read = Read(1, target.address, target.region.lkey, 64, source.address, source.region.rkey, True)
        for _ in range(3):
            ends.one.arm()
            assert not ends.one.poll(16)
            assert not select.select([ends.one.fd], [], [], 0)[0]
            ends.one.post_reads([read])
            assert select.select([ends.one.fd], [], [], PATIENCE_S)[0]
            assert len(completions(ends.one, 1)) == 1

    def test_a_reset_drops_what_was_posted(self, ends: Ends, stack: ExitStack) -> None:
        there = self.place(ends.domain, stack)
        for at in range(LIMITS.receives):
            ends.other.post_receive(Receive(at, there.address, there.region.lkey, 64))
        ends.other.reset()
        assert ends.other.state() == "RESET"
        assert all(done.status == FLUSHED for done in ends.other.poll(16))
        ends.other.prepare(ends.context.ports()[0].number)
        assert ends.other.state() == "INIT"
        for at in range(LIMITS.receives):
            ends.other.post_receive(Receive(at, there.address, there.region.lkey, 64))

    def test_what_completed_before_the_channel_was_armed_is_found_by_polling(
        self, ends: Ends, stack: ExitStack
    ) -> None:
        here, there = self.place(ends.domain, stack), self.place(ends.domain, stack)
        for number in range(50):
            ends.other.post_receive(Receive(number, there.address, there.region.lkey, 64))
            ends.one.post_send(Send(number, here.address, here.region.lkey, 64, True, False))
            assert [done.wr_id for done in completions(ends.other, 1)] == [number]
            assert [done.wr_id for done in completions(ends.one, 1)] == [number]

    def test_a_read_that_is_not_signaled_completes_when_it_fails(self, ends: Ends, stack: ExitStack) -> None:
        place = self.place(ends.domain, stack)
        wrong = place.region.rkey ^ 0x5500
        ends.one.post_reads([Read(1, place.address, place.region.lkey, 64, place.address + 64, wrong, False)])
        (done,) = completions(ends.one, 1)
        assert (done.wr_id, status(done)) == (1, "REM_ACCESS_ERR")

    def test_a_read_into_memory_by_a_wrong_key_fails_here(self, ends: Ends, stack: ExitStack) -> None:
        source, target = self.place(ends.domain, stack), self.place(ends.domain, stack)
        source.fill(b"x" * 64)
        wrong = target.region.lkey ^ 0x5500
        ends.one.post_reads([Read(1, target.address, wrong, 64, source.address, source.region.rkey, True)])
        (done,) = completions(ends.one, 1)
        assert (done.wr_id, status(done)) == (1, "LOC_PROT_ERR")
        assert target.bytes(64) == bytes(64)

    def test_the_bytes_of_an_inline_message_may_change_once_it_is_posted(self, ends: Ends, stack: ExitStack) -> None:
        here, there = self.place(ends.domain, stack), self.place(ends.domain, stack)
        here.fill(b"before")
        ends.one.post_send(Send(1, here.address, 0, 6, True, True))
        here.fill(b"after!")
        ends.other.post_receive(Receive(2, there.address, there.region.lkey, 64))
        assert [done.size for done in completions(ends.other, 1)] == [6]
        assert there.bytes(6) == b"before"

    def test_a_message_longer_than_its_receive_fails_at_both_ends(self, ends: Ends, stack: ExitStack) -> None:
        here, there = self.place(ends.domain, stack), self.place(ends.domain, stack)
        ends.other.post_receive(Receive(1, there.address, there.region.lkey, 64))
        ends.one.post_send(Send(2, here.address, here.region.lkey, 65, True, False))
        assert status(completions(ends.one, 1)[0]) in ("REM_INV_REQ_ERR", "REM_OP_ERR")  # the second by Soft-RoCE
        assert status(completions(ends.other, 1)[0]) in ("LOC_LEN_ERR", "LOC_QP_OP_ERR")
        assert there.bytes(65) == bytes(65)

    def test_a_message_that_nobody_receives_is_given_up(
        self, ends: Ends, stack: ExitStack, give_up: Callable[[], None]
    ) -> None:
        here = self.place(ends.domain, stack)
        ends.one.post_send(Send(1, here.address, here.region.lkey, 64, True, False))
        give_up()
        assert status(completions(ends.one, 1)[0]) == "RNR_RETRY_EXC_ERR"

    def test_a_peer_that_expects_another_psn_does_not_answer(
        self, ends: Ends, stack: ExitStack, give_up: Callable[[], None]
    ) -> None:
        place = self.place(ends.domain, stack)
        port = ends.context.ports()[0]
        gid = choose_gid(port)
        for pair, peer, mine, theirs in ((ends.one, ends.other, 1000, 2000), (ends.other, ends.one, 2000, 900_000)):
            pair.reset()
            own = Own(mine, port.number, gid.number, port.mtu_bytes, TIMERS)
            pair.connect(own, Remote(peer.number, theirs, gid.raw, port.lid))
        read = Read(1, place.address, place.region.lkey, 64, place.address + 64, place.region.rkey, True)
        ends.one.post_reads([read])
        give_up()
        assert status(completions(ends.one, 1)[0]) == "RETRY_EXC_ERR"

    def test_what_is_posted_without_end_is_refused(self, ends: Ends, stack: ExitStack) -> None:
        place = self.place(ends.domain, stack)
        ends.other.reset()
        read = Read(1, place.address, place.region.lkey, 64, place.address + 64, place.region.rkey, True)
        with pytest.raises(VerbsError):
            ends.one.post_reads([read] * (16 * LIMITS.sends))
        ends.one.reset()

    def test_what_is_posted_to_a_pair_that_fails_is_flushed(self, ends: Ends, stack: ExitStack) -> None:
        place = self.place(ends.domain, stack)
        ends.other.post_receive(Receive(1, place.address, place.region.lkey, 64))
        ends.other.fail()
        ends.other.post_send(Send(2, place.address, place.region.lkey, 64, True, False))
        done = completions(ends.other, 2)
        assert {(one.wr_id, status(one)) for one in done} == {(1, "WR_FLUSH_ERR"), (2, "WR_FLUSH_ERR")}
        assert ends.other.state() == "ERR"

    def test_nothing_can_be_sent_before_it_is_connected(self, ends: Ends, stack: ExitStack) -> None:
        here = self.place(ends.domain, stack)
        pair = self.pair(ends.domain, stack)
        with pytest.raises(VerbsError):
            pair.post_send(Send(1, here.address, here.region.lkey, 64, True, False))

    def test_no_memory_and_no_size_are_refused(self, domain: Domain) -> None:
        with pytest.raises(VerbsError):
            domain.register(0, 0, BOTH)

    def test_closing_twice_is_the_same_as_once(self, ends: Ends, stack: ExitStack) -> None:
        place = self.place(ends.domain, stack)
        for thing in (ends.one, place.region):
            thing.close()
            thing.close()
