"""The software double does what real verbs do, and what only a double can."""

import errno
import random
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from kvstore.transport.rdma.verbs import (
    FLUSHED,
    STATUSES,
    SUCCESS,
    Access,
    Completion,
    Own,
    QueuePair,
    Read,
    Receive,
    Remote,
    Send,
    VerbsError,
)
from tests.soft_verbs import SoftFabric, SoftQueuePair, SoftVerbs, is_readable
from tests.verbs_contract import LIMITS, Ends, Place, VerbsContract, completions, connect


@pytest.fixture
def fabric() -> SoftFabric:
    return SoftFabric()


@pytest.fixture
def verbs(fabric: SoftFabric) -> SoftVerbs:
    return SoftVerbs(fabric)


def read_of(place: Place, wr_id: int = 1, *, signaled: bool = True) -> Read:
    """Of 64 bytes within it."""
    address = place.address
    return Read(wr_id, address, place.region.lkey, 64, address + 4096, place.region.rkey, signaled)


def send_of(place: Place, wr_id: int = 1) -> Send:
    return Send(wr_id, place.address, place.region.lkey, 64, True, False)


def names(found: list[Completion]) -> list[str]:
    return [STATUSES[done.status] for done in found]


class TestSoftVerbs(VerbsContract):
    @pytest.fixture
    def give_up(self, fabric: SoftFabric) -> Callable[[], None]:
        return fabric.expire

    @pytest.fixture
    def place_here(self, ends: Ends, stack: ExitStack) -> Place:
        place = self.place(ends.domain, stack)
        place.fill(b"y" * 64, 4096)
        return place

    def test_a_post_over_the_limit_has_posted_what_fits(
        self, ends: Ends, place_here: Place, fabric: SoftFabric
    ) -> None:
        fabric.pause()
        with pytest.raises(VerbsError) as refused:
            ends.one.post_reads([read_of(place_here, at) for at in range(LIMITS.sends + 1)])
        assert refused.value.errno == errno.ENOMEM
        fabric.resume()
        done = completions(ends.one, LIMITS.sends)
        assert [one.wr_id for one in done] == list(range(LIMITS.sends))
        ends.one.post_reads([read_of(place_here)])

    def test_unsignaled_reads_take_room_until_a_later_completion_is_polled(self, ends: Ends, place_here: Place) -> None:
        ends.one.post_reads([read_of(place_here, signaled=False)] * (LIMITS.sends - 1))
        ends.one.post_reads([read_of(place_here)])
        with pytest.raises(VerbsError):
            ends.one.post_reads([read_of(place_here)])
        assert len(ends.one.poll(16)) == 1
        ends.one.post_reads([read_of(place_here)] * LIMITS.sends)

    def test_completions_from_before_a_reset_stay_and_make_no_room(
        self, ends: Ends, place_here: Place, fabric: SoftFabric
    ) -> None:
        ends.one.post_reads([read_of(place_here, 7)] * 4)
        for pair in (ends.one, ends.other):
            pair.reset()
        connect(ends.context, ends.one, ends.other)
        fabric.pause()
        ends.one.post_reads([read_of(place_here)] * LIMITS.sends)
        assert [done.wr_id for done in ends.one.poll(16)] == [7] * 4
        with pytest.raises(VerbsError):
            ends.one.post_reads([read_of(place_here)])

    def test_a_completion_queue_that_overflows_is_told(self, ends: Ends) -> None:
        assert isinstance(ends.one, SoftQueuePair)
        for _ in range(LIMITS.sends + LIMITS.receives + 1):
            ends.one.inject(Completion(1, SUCCESS, False, 0))
        with pytest.raises(AssertionError, match="overflowed"):
            ends.one.inject(Completion(1, SUCCESS, False, 0))

    def test_the_two_keys_of_memory_are_not_each_others(self, ends: Ends, place_here: Place) -> None:
        region = place_here.region
        ends.one.post_reads([read_of(place_here)._replace(rkey=region.lkey)])
        assert names(ends.one.poll(1)) == ["REM_ACCESS_ERR"]

    def test_a_message_into_memory_that_must_not_be_written_fails_at_both_ends(
        self, ends: Ends, place_here: Place, stack: ExitStack
    ) -> None:
        there = self.place(ends.domain, stack, Access.REMOTE_READ)
        ends.other.post_receive(Receive(2, there.address, there.region.lkey, 64))
        ends.one.post_send(send_of(place_here))
        assert (names(ends.one.poll(2)), names(ends.other.poll(2))) == (["REM_OP_ERR"], ["LOC_PROT_ERR"])
        assert there.bytes(64) == bytes(64)

    def test_a_message_into_memory_beyond_the_end_of_a_region_fails_at_both_ends(
        self, ends: Ends, place_here: Place
    ) -> None:
        end = place_here.address + len(place_here.map)
        ends.other.post_receive(Receive(2, end - 32, place_here.region.lkey, 64))
        ends.one.post_send(send_of(place_here)._replace(size=32))
        assert (names(ends.one.poll(2)), names(ends.other.poll(2))) == (["REM_OP_ERR"], ["LOC_PROT_ERR"])

    def test_a_message_longer_than_its_receive_is_told_as_the_standard_has_it(
        self, ends: Ends, place_here: Place
    ) -> None:
        ends.other.post_receive(Receive(2, place_here.address, place_here.region.lkey, 63))
        ends.one.post_send(send_of(place_here))
        assert (names(ends.one.poll(2)), names(ends.other.poll(2))) == (["REM_INV_REQ_ERR"], ["LOC_LEN_ERR"])

    def test_a_message_from_memory_by_a_wrong_key_fails_here_and_takes_no_receive(
        self, ends: Ends, place_here: Place
    ) -> None:
        ends.other.post_receive(Receive(2, place_here.address, place_here.region.lkey, 64))
        ends.one.post_send(send_of(place_here)._replace(lkey=1))
        assert names(ends.one.poll(2)) == ["LOC_PROT_ERR"]
        assert ends.other.poll(2) == []

    def test_requests_go_one_by_one_when_the_test_says_so(
        self, ends: Ends, place_here: Place, fabric: SoftFabric
    ) -> None:
        fabric.pause()
        ends.one.post_reads([read_of(place_here, at) for at in range(3)])
        assert ends.one.poll(16) == []
        assert fabric.step() == 1
        assert [done.wr_id for done in ends.one.poll(16)] == [0]
        assert fabric.step(5) == 2
        assert fabric.step() == 0
        assert fabric.completions_waiting == 2

    def test_the_order_is_shuffled_between_queue_pairs_and_kept_within_each(self) -> None:
        def run(seed: int) -> list[tuple[int, int]]:
            fabric, found = SoftFabric(), list[tuple[int, int]]()
            fabric.order = random.Random(seed)
            with ExitStack() as stack:
                context = SoftVerbs(fabric).open("soft0")
                domain = self.another_domain(context, stack)
                place = self.place(domain, stack)
                pairs = [self.pair(domain, stack) for _ in range(8)]
                fabric.pause()
                for at in range(0, 8, 2):
                    connect(context, pairs[at], pairs[at + 1])
                    pairs[at].post_reads([read_of(place, number) for number in range(8)])
                while fabric.step():
                    found += [(at, done.wr_id) for at, pair in enumerate(pairs) for done in pair.poll(16)]
            return found

        first = run(1)
        assert first == run(1)
        assert first != run(2)
        assert first != sorted(first)
        for at in range(0, 8, 2):
            assert [number for pair, number in first if pair == at] == list(range(8))

    @pytest.mark.parametrize("how", ["cut", "kill", "reset", "close"])
    def test_a_peer_that_is_gone_does_not_answer(self, fabric: SoftFabric, stack: ExitStack, how: str) -> None:
        here, there = SoftVerbs(fabric), SoftVerbs(fabric)
        context, far = here.open("soft0"), there.open("soft0")
        domain, far_domain = self.another_domain(context, stack), self.another_domain(far, stack)
        one, other = self.pair(domain, stack), self.pair(far_domain, stack)
        place, source = self.place(domain, stack), self.place(far_domain, stack)
        connect_hosts(here, there, one, other)
        read = Read(1, place.address, place.region.lkey, 64, source.address, source.region.rkey, True)
        one.post_reads([read])
        assert names(one.poll(2)) == ["SUCCESS"]
        {
            "cut": lambda: fabric.cut(here.gid("soft0"), there.gid("soft0")),
            "kill": there.kill,
            "reset": other.reset,
            "close": other.close,
        }[how]()
        one.arm()
        one.post_reads([read, read])
        assert not is_readable(one.fd)
        fabric.expire()
        assert is_readable(one.fd)
        assert names(one.poll(5)) == ["RETRY_EXC_ERR", STATUSES[FLUSHED]]

    def test_a_cut_that_heals_in_time_loses_nothing(self, ends: Ends, place_here: Place, fabric: SoftFabric) -> None:
        gid = ends.context.verbs.gid("soft0")  # type: ignore[attr-defined]
        fabric.cut(gid, gid)
        ends.one.post_reads([read_of(place_here)])
        assert ends.one.poll(1) == []
        fabric.heal()
        assert names(ends.one.poll(1)) == ["SUCCESS"]

    def test_one_end_that_is_connected_anew_as_at_first_is_not_answered(
        self, ends: Ends, place_here: Place, fabric: SoftFabric
    ) -> None:
        host = ends.context.verbs  # type: ignore[attr-defined]
        for pair in (ends.one, ends.other):
            pair.reset()
        connect_hosts(host, host, ends.one, ends.other)
        ends.one.post_reads([read_of(place_here)])
        assert names(ends.one.poll(4)) == ["SUCCESS"]
        ends.one.reset()
        ends.one.connect(Own(1, 1, 1, 4096), Remote(ends.other.number, 2, host.gid("soft0"), 0))
        ends.one.post_reads([read_of(place_here)])
        fabric.expire()
        assert names(ends.one.poll(4)) == ["RETRY_EXC_ERR"], "the other end is further on in its PSNs"

    def test_time_gives_up_what_nobody_answers_and_leaves_what_went_on(self, stack: ExitStack) -> None:
        waiting: list[tuple[float, Callable[[], None]]] = []
        fabric = SoftFabric(later=lambda seconds, call: waiting.append((seconds, call)))
        context = SoftVerbs(fabric).open("soft0")
        domain = self.another_domain(context, stack)
        one, other = self.pair(domain, stack), self.pair(domain, stack)
        place = self.place(domain, stack)
        connect(context, one, other)
        one.post_send(send_of(place, 1))
        other.post_receive(Receive(9, place.address, place.region.lkey, 64))
        one.post_send(send_of(place, 2))
        assert [seconds for seconds, _ in waiting] == [pytest.approx(7 * 0.64e-3)] * 2
        waiting[0][1]()
        assert names(one.poll(4)) == ["SUCCESS"]
        waiting[1][1]()
        assert names(one.poll(4)) == ["RNR_RETRY_EXC_ERR"]

    def test_a_bit_of_one_read_is_flipped(self, ends: Ends, place_here: Place, fabric: SoftFabric) -> None:
        fabric.flipped_reads = {2}
        brought = []
        for _ in range(3):
            ends.one.post_reads([read_of(place_here)])
            brought.append(place_here.bytes(64))
        differing = [sum((a ^ b).bit_count() for a, b in zip(it, b"y" * 64, strict=True)) for it in brought]
        assert differing == [0, 1, 0]

    def test_memory_that_is_taken_back_while_reads_are_on_their_way_is_not_read(
        self, ends: Ends, place_here: Place, stack: ExitStack, fabric: SoftFabric
    ) -> None:
        source = self.place(ends.domain, stack)
        fabric.before_reads[2] = source.region.close
        read = read_of(place_here)._replace(remote_address=source.address, rkey=source.region.rkey)
        ends.one.post_reads([read] * 3)
        assert names(ends.one.poll(8)) == ["SUCCESS", "REM_ACCESS_ERR", "WR_FLUSH_ERR"]

    def test_what_a_reset_dropped_is_not_carried_out_once_it_is_connected_anew(
        self, ends: Ends, place_here: Place, fabric: SoftFabric
    ) -> None:
        fabric.pause()
        ends.one.post_reads([read_of(place_here)])
        ends.other.post_receive(Receive(2, place_here.address, place_here.region.lkey, 64))
        for pair in (ends.one, ends.other):
            pair.reset()
        connect(ends.context, ends.one, ends.other)
        fabric.resume()
        assert ends.one.poll(4) == []
        assert place_here.bytes(64) == bytes(64)
        ends.one.post_send(send_of(place_here))
        fabric.expire()
        assert names(ends.one.poll(4)) == ["RNR_RETRY_EXC_ERR"]

    @pytest.mark.parametrize("sloppy", [False, True])
    def test_after_a_reset_memory_is_quiet_but_for_a_sloppy_nic(
        self, ends: Ends, place_here: Place, fabric: SoftFabric, sloppy: bool
    ) -> None:
        fabric.sloppy = sloppy
        fabric.pause()
        ends.one.post_reads([read_of(place_here)])
        ends.one.reset()
        fabric.resume()
        assert place_here.bytes(64) == bytes(64)
        fabric.haunt()
        assert (place_here.bytes(64) == bytes(64)) is not sloppy

    def test_the_next_request_ends_as_the_test_says(self, ends: Ends, place_here: Place, fabric: SoftFabric) -> None:
        fabric.failing += [SUCCESS, STATUSES.index("LOC_QP_OP_ERR")]
        ends.one.post_reads([read_of(place_here)] * 3)
        assert names(ends.one.poll(8)) == ["SUCCESS", "LOC_QP_OP_ERR", "WR_FLUSH_ERR"]
        assert place_here.bytes(64) == bytes(64), "a NIC that lies moved nothing"

    def test_posts_and_registrations_are_refused(self, ends: Ends, place_here: Place, fabric: SoftFabric) -> None:
        fabric.refused_posts = fabric.refused_registrations = 1
        with pytest.raises(VerbsError):
            ends.one.post_reads([read_of(place_here, at) for at in range(4)])
        assert [done.wr_id for done in ends.one.poll(8)] == [0, 1], "a part of it went out"
        with pytest.raises(VerbsError):
            ends.domain.register(place_here.address, 64, Access.LOCAL_WRITE)
        ends.one.post_reads([read_of(place_here)])
        assert len(ends.one.poll(8)) == 1

    def test_a_device_that_vanishes_refuses_everything_but_to_be_closed(
        self, ends: Ends, place_here: Place, verbs: SoftVerbs
    ) -> None:
        verbs.vanish()
        for call in (
            verbs.devices,
            ends.context.ports,
            ends.context.domain,
            ends.one.arm,
            ends.one.reset,
            ends.one.state,
            lambda: ends.one.poll(1),
            lambda: ends.one.post_reads([read_of(place_here)]),
            lambda: ends.domain.queue_pair(LIMITS),
        ):
            with pytest.raises(VerbsError) as gone:
                call()
            assert gone.value.errno == errno.EIO
        ends.one.close()
        place_here.region.close()

    def test_what_others_stand_on_cannot_be_closed(self, ends: Ends, place_here: Place, fabric: SoftFabric) -> None:
        assert fabric.registered_bytes == len(place_here.map)
        for thing in (ends.context, ends.domain):
            with pytest.raises(VerbsError) as busy:
                thing.close()
            assert busy.value.errno == errno.EBUSY
        for child in (ends.one, ends.other, place_here.region, ends.domain, ends.context):
            child.close()
            child.close()
        assert fabric.registered_bytes == 0
        for call in (ends.context.domain, lambda: ends.domain.register(place_here.address, 64, Access.LOCAL_WRITE)):
            with pytest.raises(VerbsError):
                call()

    def test_hosts_have_addresses_of_their_own(self, fabric: SoftFabric) -> None:
        hosts = [SoftVerbs(fabric, ("soft0", "soft1")) for _ in range(3)]
        assert len({host.gid(device) for host in hosts for device in host.devices()}) == 6


def connect_hosts(here: SoftVerbs, there: SoftVerbs, one: QueuePair, other: QueuePair) -> None:
    one.connect(Own(1, 1, 1, 4096), Remote(other.number, 2, there.gid("soft0"), 0))
    other.connect(Own(2, 1, 1, 4096), Remote(one.number, 1, here.gid("soft0"), 0))
