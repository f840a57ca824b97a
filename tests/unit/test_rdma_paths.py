"""All ways to one peer: right bytes by what is left of them, an end to everything, memory quiet once settled."""

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvstore.transport.rdma.transfer import MOST_TRIES, Fetch
from kvstore.transport.rdma.verbs import STATUSES, VerbsError
from tests.rdma_pair import KIB, MIB, RdmaPair, Watched
from tests.soft_verbs import SoftVerbs

Make = Callable[..., RdmaPair]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda **options: RdmaPair(stack, **options)


def stale(pair: RdmaPair, start: int = 0, size: int = 4 * KIB) -> Fetch:
    """With keys that nothing is lent by."""
    fetch = pair.fetch(start, size)
    return fetch._replace(rkeys=[rkey ^ 0x5500 for rkey in fetch.rkeys])


def refuse(*_: object) -> None:
    raise VerbsError(errno.EINVAL, "refused")


# Right bytes.


@pytest.mark.parametrize("size", [1, 4 * KIB, 64 * KIB, MIB, MIB + 1, 64 * MIB])
def test_a_block_of_any_size_is_the_peers(make: Make, size: int) -> None:
    pair = make(nics=2, queues=2, size=size)
    one = pair.start(pair.fetch(0, size), slice_bytes=MIB)
    pair.run()
    assert pair.is_right(one)
    assert pair.fabric.counts["read_bytes"] == size
    assert pair.paths.is_idle


def test_blocks_come_to_their_places_in_one_transfer(make: Make) -> None:
    pair = make()
    places = random.Random(1).sample(range(32), 32)
    one = pair.start(*(pair.fetch(at * 32 * KIB, 32 * KIB - at, place * 32 * KIB) for at, place in enumerate(places)))
    pair.run()
    assert pair.is_right(one)


@pytest.mark.parametrize("seed", range(5))
def test_queue_pairs_may_be_done_in_any_order(make: Make, seed: int) -> None:
    pair = make(nics=3, queues=2, depth=4, seed=seed)
    pair.fabric.pause()
    many = [pair.start(pair.fetch(at * 64 * KIB, 64 * KIB)) for at in range(16)]
    while pair.fabric.step(3):
        pair.run()
    assert pair.is_right(*many)
    assert all(path.rate.requests for path in pair.paths.paths)


def test_a_bit_that_flips_on_the_way_is_not_noticed_here(make: Make) -> None:
    """But by the checksum that whoever asked verifies; and it shows that these tests would see wrong bytes."""
    pair = make()
    pair.fabric.flipped_reads.add(3)
    one = pair.start(pair.fetch(0, 64 * KIB))
    pair.run()
    assert one.is_complete
    assert not pair.is_right(one)


def test_a_batch_of_reads_has_one_completion(make: Make) -> None:
    pair = make(depth=64)
    pair.start(*(pair.fetch(at * 4 * KIB, 4 * KIB) for at in range(16)))
    assert pair.fabric.completions_waiting == 1


def test_a_transfer_that_ends_may_begin_the_next(make: Make) -> None:
    pair = make()
    chain: list[Watched] = []

    def another() -> None:
        if len(chain) < 50:
            chain.append(one := Watched([pair.fetch(len(chain) * 4 * KIB, 16 * KIB)], 4 * KIB))
            one.after = another
            pair.paths.start(one.transfer)

    another()
    pair.run()
    assert len(chain) == 50
    assert pair.is_right(*chain)


# What is lent no more.


def test_a_wrong_key_fails_its_transfer_and_the_others_are_fetched_again(make: Make) -> None:
    pair = make(reconnects=True, depth=64)
    pair.fabric.pause()
    good = [pair.start(pair.fetch(at * 16 * KIB, 16 * KIB)) for at in range(4)]
    bad = pair.start(stale(pair))
    good += [pair.start(pair.fetch(at * 16 * KIB, 16 * KIB)) for at in range(4, 8)]
    pair.fabric.resume()
    pair.run()
    assert (bad.error, bad.ended, bad.settled) == ("StaleLease", 1, 1)
    assert pair.is_right(*good)


def test_any_number_of_stale_transfers_harms_no_other(make: Make) -> None:
    pair = make(reconnects=True, depth=64)
    pair.fabric.pause()
    bad = [pair.start(stale(pair)) for _ in range(5 * MOST_TRIES)]
    good = pair.start(pair.fetch(0, 128 * KIB))
    pair.fabric.resume()
    pair.run()
    assert len(pair.broke) == len(bad)
    assert {one.error for one in bad} == {"StaleLease"}
    assert pair.is_right(good)
    assert pair.paths.paths[0].health.failures == 0


def test_without_a_new_connection_the_others_go_by_another_path(make: Make) -> None:
    pair = make(nics=2)
    pair.fabric.pause()
    good = [pair.start(pair.fetch(at * 64 * KIB, 64 * KIB)) for at in range(4)]
    bad = pair.start(stale(pair))
    pair.fabric.resume()
    pair.run()
    assert bad.error == "StaleLease"
    assert pair.is_right(*good)
    assert len(pair.broke) == 1


def test_memory_that_is_taken_back_while_it_is_read_is_stale(make: Make) -> None:
    pair = make(reconnects=True)
    pair.fabric.before_reads[8] = pair.there.memory.close
    one = pair.start(pair.fetch(0, 64 * KIB))
    pair.run()
    assert (one.error, one.settled, one.is_complete) == ("StaleLease", 1, False)


def test_reads_beyond_what_is_lent_are_stale(make: Make) -> None:
    pair = make()
    one = pair.start(pair.fetch(pair.size - 2 * KIB, 4 * KIB, 0))
    pair.run()
    assert one.error == "StaleLease"


def test_a_place_that_is_not_registered_here_is_refused(make: Make) -> None:
    pair = make()
    one = pair.start(pair.fetch(0, 4 * KIB, pair.size - 2 * KIB))
    pair.run()
    assert one.error == "StaleLease"


# Paths that fail.


def test_what_was_on_a_path_that_is_cut_comes_by_the_other(make: Make) -> None:
    pair = make(nics=2)
    pair.cut(0)
    one = pair.start(pair.fetch(0, 256 * KIB))
    pair.run()
    assert not one.ended
    pair.give_up()
    assert pair.is_right(one)
    assert pair.broke == [pair.paths.paths[0]]


@pytest.mark.parametrize("fail", [RdmaPair.give_up, RdmaPair.hang])
def test_without_any_path_the_peer_is_lost_at_once(make: Make, fail: Callable[[RdmaPair], None]) -> None:
    pair = make(nics=2)
    pair.cut(0)
    pair.cut(1)
    many = [pair.start(pair.fetch(at * 64 * KIB, 64 * KIB)) for at in range(16)]
    fail(pair)
    assert {(one.error, one.ended, one.settled) for one in many} == {("PeerLost", 1, 1)}
    after = pair.start(pair.fetch(0, 4 * KIB))
    assert (after.error, after.settled) == ("PeerLost", 1)
    assert pair.paths.is_idle


def test_a_peer_that_hangs_is_not_waited_for(make: Make) -> None:
    pair = make(queues=2)
    pair.fabric.pause()
    one = pair.start(pair.fetch(0, 64 * KIB))
    assert pair.paths.next_expiry == pair.time + pair.paths.hung_s
    pair.time += pair.paths.hung_s
    pair.paths.expire()
    assert not one.ended
    pair.time += 0.01
    pair.paths.expire()
    assert (one.error, one.settled) == ("PeerLost", 1)
    assert pair.paths.next_expiry is None


def test_a_slice_is_tried_so_often_and_not_more(make: Make) -> None:
    pair = make(reconnects=True)
    pair.fabric.failing.extend([STATUSES.index("RETRY_EXC_ERR")] * 100)
    one = pair.start(pair.fetch(0, 4 * KIB))
    pair.run()
    assert one.error == "PeerLost"
    assert len(pair.broke) == MOST_TRIES


def test_a_transfer_of_many_slices_is_tried_no_more_often(make: Make) -> None:
    pair = make(reconnects=True)
    pair.fabric.failing.extend([STATUSES.index("RETRY_EXC_ERR")] * 100)
    one = pair.start(pair.fetch(0, 256 * KIB))
    pair.run()
    assert one.error == "PeerLost"
    assert len(pair.broke) == MOST_TRIES


def test_a_path_that_fails_a_few_times_harms_nothing(make: Make) -> None:
    pair = make(reconnects=True)
    pair.fabric.failing.extend([STATUSES.index("RETRY_EXC_ERR")] * (MOST_TRIES - 1))
    one = pair.start(pair.fetch(0, 64 * KIB))
    pair.run()
    assert pair.is_right(one)


def test_where_posting_is_refused_the_other_path_does(make: Make) -> None:
    pair = make(nics=2)
    pair.fabric.refused_posts = 1
    one = pair.start(pair.fetch(0, 64 * KIB))
    pair.run()
    assert pair.is_right(one)
    assert len(pair.broke) == 1


def test_what_was_for_a_path_that_failed_in_the_same_turn_goes_by_the_other(make: Make) -> None:
    pair = make(nics=2, queues=2)
    pair.fabric.pause()
    pair.fabric.refused_posts = 1
    one = pair.start(pair.fetch(0, 128 * KIB))
    pair.fabric.resume()
    pair.run()
    assert pair.is_right(one)
    assert pair.broke == pair.paths.paths[:1]


def test_where_posting_is_always_refused_the_peer_is_lost(make: Make) -> None:
    pair = make(nics=2, reconnects=True)
    pair.fabric.refused_posts = 1000
    one = pair.start(pair.fetch(0, 64 * KIB))
    assert (one.error, one.ended, one.settled) == ("PeerLost", 1, 1)


def test_nothing_is_posted_for_a_transfer_that_ended_while_its_turn_was_posted(make: Make) -> None:
    """The first queue pair refuses its share once too often: what the others would get must not be written."""
    pair = make(nics=2, depth=4)
    pair.fabric.refused_posts = 1
    one = Watched([pair.fetch(0, 32 * KIB)], 4 * KIB)
    for piece in one.transfer.pending:
        piece.tries = MOST_TRIES - 1
    pair.paths.start(one.transfer)
    assert (one.error, one.settled) == ("PeerLost", 1)
    assert pair.fabric.counts["reads"] <= 4
    assert pair.here.map[16 * KIB : 32 * KIB] == bytes(16 * KIB)
    assert not any(queue.in_flight for path in pair.paths.paths for queue in path.queues)


def test_a_path_that_was_reset_by_its_owner_leaves_nothing_waiting(make: Make) -> None:
    pair = make(nics=2, depth=4)
    busy, idle = pair.paths.paths
    pair.fabric.pause()
    pair.paths.reset(idle)
    one = pair.start(pair.fetch(0, 16 * KIB))
    pair.connect(idle)
    pair.paths.reset(busy)
    assert (busy.queues[0].in_flight, idle.queues[0].in_flight) == (0, 4)
    pair.fabric.resume()
    pair.run()
    assert pair.is_right(one)


def test_a_path_that_could_not_be_connected_rests_and_is_tried_again(make: Make) -> None:
    pair = make()
    path = pair.paths.paths[0]
    pair.cut()
    for _ in range(2):
        pair.start(pair.fetch(0, 4 * KIB))
        pair.give_up()
        pair.connect(path)
    pair.paths.reset(path)
    assert pair.paths.broken() == []
    pair.time += 1.0
    assert pair.paths.broken() == [0]
    pair.fabric.heal()
    assert pair.connect(path)
    one = pair.start(pair.fetch(0, 4 * KIB))
    pair.run()
    assert pair.is_right(one)
    assert path.health.is_well
    assert pair.paths.broken() == []


def test_one_failure_alone_does_not_rest_a_path(make: Make) -> None:
    pair = make()
    pair.cut()
    pair.start(pair.fetch(0, 4 * KIB))
    pair.give_up()
    assert pair.paths.broken() == [0]


def test_what_waits_goes_on_once_a_path_is_connected_anew(make: Make) -> None:
    pair = make(nics=2, depth=2)
    pair.fabric.pause()
    one = pair.start(pair.fetch(0, 64 * KIB))
    pair.paths.reset(pair.paths.paths[0])
    pair.connect(pair.paths.paths[0])
    assert pair.paths.paths[0].queues[0].room() == 0
    pair.fabric.resume()
    pair.run()
    assert pair.is_right(one)


# Devices that are gone.


@pytest.mark.parametrize("read", [1, 5, 17])
def test_a_device_that_vanishes_on_the_way_loses_the_peer_and_nothing_hangs(make: Make, read: int) -> None:
    pair = make(queues=2)
    pair.fabric.before_reads[read] = pair.here.verbs.vanish
    many = [pair.start(pair.fetch(at * 128 * KIB, 128 * KIB)) for at in range(4)]
    for queue in pair.paths.paths[0].queues:
        pair.paths.progress(queue.pair.fd)
    assert {(one.error, one.ended) for one in many} == {("PeerLost", 1)}
    assert pair.paths.fds() == []
    assert pair.paths.broken() == []
    pair.paths.close()
    assert {one.settled for one in many} == {1}


def test_where_a_reset_is_refused_the_memory_is_in_use_until_it_is_closed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not fetched by another path: what a NIC writes late could be another block's bytes."""
    pair = make(nics=2, depth=4)
    pair.fabric.pause()
    one = pair.start(pair.fetch(0, 16 * KIB))
    monkeypatch.setattr(pair.pair(0), "reset", refuse)
    monkeypatch.setattr(pair.pair(1), "reset", refuse)
    pair.hang()
    assert (one.error, one.ended, one.settled) == ("PeerLost", 1, 0)
    pair.paths.call_off(one.transfer)
    assert pair.paths.quarantined_bytes == 16 * KIB
    pair.paths.close()
    assert one.settled == 1


def test_everything_ends_and_settles_when_it_is_closed(make: Make) -> None:
    pair = make(nics=2, queues=2, depth=4)
    pair.fabric.pause()
    many = [pair.start(pair.fetch(at * 64 * KIB, 64 * KIB)) for at in range(16)]
    late: list[Watched] = []
    many[0].when_settled = lambda: late.append(pair.start(pair.fetch(0, 4 * KIB)))
    pair.paths.close()
    pair.paths.close()
    assert {(one.error, one.ended, one.settled) for one in many + late} == {("PeerLost", 1, 1)}
    pair.fabric.resume()
    assert pair.here.map[:] == bytes(pair.size)


def test_a_queue_pair_that_cannot_be_closed_keeps_no_other_from_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make(nics=2)
    pair.fabric.pause()
    one = pair.start(pair.fetch(0, 64 * KIB))
    with monkeypatch.context() as patch:
        patch.setattr(pair.pair(0), "close", refuse)
        pair.paths.close()
    assert (one.ended, one.settled) == (1, 1)
    with pytest.raises(VerbsError):
        pair.pair(1).state()
    pair.pair(0).close()


# Calling off.


def test_a_transfer_that_is_called_off_ends_at_once_and_settles_when_its_reads_are_done(make: Make) -> None:
    pair = make(depth=8)
    pair.fabric.pause()
    one = pair.start(pair.fetch(0, 64 * KIB))
    pair.paths.call_off(one.transfer)
    pair.paths.call_off(one.transfer)
    assert (one.ended, one.settled, one.transfer.error) == (1, 0, None)
    assert pair.paths.quarantined_bytes == 32 * KIB
    pair.fabric.resume()
    pair.run()
    assert (one.ended, one.settled) == (1, 1)
    assert pair.paths.quarantined_bytes == 0
    assert pair.fabric.counts["reads"] == 8


def test_a_transfer_that_waits_settles_when_it_is_called_off(make: Make) -> None:
    pair = make(depth=4)
    pair.fabric.pause()
    first, second = (pair.start(pair.fetch(at * 64 * KIB, 64 * KIB)) for at in range(2))
    pair.paths.call_off(second.transfer)
    assert (second.ended, second.settled) == (1, 1)
    pair.fabric.resume()
    pair.run()
    assert pair.is_right(first)
    assert pair.fabric.counts["reads"] == 16


def test_a_transfer_that_is_called_off_after_it_is_complete_is_so(make: Make) -> None:
    pair = make()
    one = pair.start(pair.fetch(0, 64 * KIB))
    pair.run()
    pair.paths.call_off(one.transfer)
    assert pair.is_right(one)


def test_what_is_called_off_is_not_fetched_again(make: Make) -> None:
    pair = make(reconnects=True)
    pair.cut()
    one = pair.start(pair.fetch(0, 64 * KIB))
    pair.paths.call_off(one.transfer)
    pair.give_up()
    assert (one.ended, one.settled) == (1, 1)
    assert pair.paths.is_idle


def test_a_thousand_transfers_that_are_called_off_are_forgotten(make: Make) -> None:
    pair = make(nics=2, queues=2, depth=64, size=4 * MIB, seed=1)
    pair.fabric.pause()
    many = []
    for at in range(1000):
        many.append(pair.start(pair.fetch(at * 4 * KIB, 8 * KIB)))
        if at % 3:
            pair.fabric.step(1)
        pair.paths.call_off(many[-1].transfer)
        if not at % 50:
            pair.run()
    pair.fabric.resume()
    pair.run()
    assert {(one.ended, one.settled) for one in many} == {(1, 1)}
    assert pair.paths.is_idle
    assert pair.paths.quarantined_bytes == 0
    assert pair.fabric.completions_waiting == 0
    assert pair.broke == []
    after = pair.start(pair.fetch(0, MIB))
    pair.run()
    assert pair.is_right(after)


def test_over_its_limit_quarantine_ends_by_a_reset_and_the_others_go_on(make: Make) -> None:
    pair = make(nics=2, depth=8, quarantine_bytes=16 * KIB)
    pair.fabric.pause()
    gone = [pair.start(pair.fetch(at * 4 * KIB, 4 * KIB)) for at in range(5)]
    good = pair.start(pair.fetch(64 * KIB, 64 * KIB))
    for one in gone[:4]:
        pair.paths.call_off(one.transfer)
    assert (pair.paths.quarantined_bytes, pair.broke) == (16 * KIB, [])
    pair.reconnects = True
    pair.paths.call_off(gone[4].transfer)
    assert pair.paths.quarantined_bytes == 0
    assert {one.settled for one in gone} == {1}
    pair.fabric.resume()
    pair.run()
    assert pair.is_right(good)
    assert all(path.health.is_well and not path.health.failures for path in pair.paths.paths)


def test_over_the_limit_only_the_paths_that_may_write_there_are_reset(make: Make) -> None:
    pair = make(nics=2, depth=4, quarantine_bytes=0)
    pair.fabric.pause()
    gone, good = (pair.start(pair.fetch(at * 4 * KIB, 4 * KIB)) for at in range(2))
    assert [path.queues[0].in_flight for path in pair.paths.paths] == [1, 1]
    pair.paths.call_off(gone.transfer)
    assert pair.broke == pair.paths.paths[:1]
    pair.fabric.resume()
    pair.run()
    assert gone.settled == 1
    assert pair.is_right(good)


def test_after_a_quarantine_that_ended_what_waited_goes_by_the_path_that_is_left(make: Make) -> None:
    """No completion will come that could move it on."""
    pair = make(nics=2, depth=4, quarantine_bytes=0)
    pair.fabric.pause()
    busy, idle = pair.paths.paths
    pair.paths.reset(idle)
    gone, waits = (pair.start(pair.fetch(at * 64 * KIB, 8 * KIB)) for at in range(2))
    pair.connect(idle)
    pair.paths.call_off(gone.transfer)
    assert gone.settled == 1
    assert (busy.queues[0].in_flight, idle.queues[0].in_flight) == (0, 2)
    pair.fabric.resume()
    pair.run()
    assert pair.is_right(waits)


@pytest.mark.parametrize("how", ["hang", "call off", "close", "stale"])
def test_memory_that_is_used_again_once_settled_is_not_written_by_reads_from_before(make: Make, how: str) -> None:
    """Into what a reset dropped, a NIC may write at any time until the reset is done: here at the last moment."""
    pair = make(nics=2, queues=2, depth=8, quarantine_bytes=0, reconnects=True)
    pair.fabric.sloppy = True
    pair.fabric.pause()
    many = [pair.start(pair.fetch(at * 64 * KIB, 64 * KIB)) for at in range(8)]
    used_again: list[tuple[int, int]] = []
    content = os.urandom(64 * KIB)

    def use_again(one: Watched) -> None:
        """What a NIC could still write, it writes now at the latest; and what it wrote is replaced."""
        assert one.transfer.in_flight == 0
        pair.fabric.haunt()
        start = one.fetches[0].address - pair.here.address
        pair.here.map[start : start + len(content)] = content
        used_again.append((start, len(content)))

    for one in many:
        one.when_settled = lambda one=one: use_again(one)  # type: ignore[misc]
    if how == "hang":
        pair.reconnects = False
        pair.hang()
    elif how == "call off":
        for one in many:
            pair.paths.call_off(one.transfer)
    elif how == "close":
        pair.paths.close()
    else:
        pair.there.memory.close()
    pair.fabric.resume()
    pair.run()
    pair.fabric.haunt()
    assert len(used_again) == len(many)
    for start, size in used_again:
        assert pair.here.map[start : start + size] == content


def test_late_completions_are_counted_and_answer_for_nothing(make: Make) -> None:
    pair = make(depth=64)
    path = pair.paths.paths[0]
    lost = pair.start(*(pair.fetch(at * 4 * KIB, 4 * KIB) for at in range(32)))
    late = [completion for completion, _ in pair.pair().completions]
    pair.paths.reset(path)  # before anybody has seen them
    assert (lost.error, lost.settled) == ("PeerLost", 1)
    assert pair.paths.late_completions == len(late) == 2
    pair.connect(path)
    pair.here.map[:] = bytes(pair.size)
    pair.fabric.pause()
    one = pair.start(pair.fetch(0, 128 * KIB))
    for completion in late:
        pair.pair().inject(completion)
    pair.run()
    assert pair.paths.late_completions == 4
    assert not one.ended
    pair.fabric.resume()
    pair.run()
    assert pair.is_right(one)


# Back-pressure and fairness.


@pytest.mark.parametrize(
    ("depth", "window_bytes", "most"),
    [(8, MIB, 8), (64, 16 * KIB, 4), (64, 10 * KIB, 3)],
)
def test_no_more_is_posted_than_depth_and_window_let(make: Make, depth: int, window_bytes: int, most: int) -> None:
    """The window by one slice more at most."""
    pair = make(depth=depth, window_bytes=window_bytes)
    pair.fabric.pause()
    many = [pair.start(pair.fetch(at * 128 * KIB, 128 * KIB)) for at in range(8)]
    queue = pair.paths.paths[0].queues[0]
    assert queue.in_flight == most
    while pair.fabric.step():
        pair.run()
        assert queue.in_flight <= most
    assert pair.is_right(*many)


def test_a_small_transfer_does_not_wait_for_a_big_one(make: Make) -> None:
    pair = make(size=16 * MIB, depth=64)
    pair.fabric.pause()
    big = pair.start(pair.fetch(0, 16 * MIB))
    small = pair.start(pair.fetch(0, 4 * KIB))
    for _ in range(64 + 64 + 1):
        pair.fabric.step(1)
        pair.run()
    assert small.ended
    assert not big.ended
    pair.fabric.resume()
    pair.run()
    assert pair.is_right(big, small)


def test_transfers_take_turns(make: Make) -> None:
    pair = make(size=4 * MIB, depth=64)
    pair.fabric.pause()
    many = [pair.start(pair.fetch(at * MIB, MIB)) for at in range(4)]
    for _ in range(10):
        pair.fabric.step(64)
        pair.run()
    posted = [256 - len(one.transfer.pending) for one in many]
    assert max(posted) - min(posted) <= 2 * 64  # a turn, and the one that the first had before the others came


def test_a_turn_has_an_end(make: Make) -> None:
    pair = make(size=4 * MIB, depth=128)
    pair.fabric.pause()
    many = [pair.start(pair.fetch(at * MIB, MIB)) for at in range(3)]
    pair.fabric.step(128)
    pair.run()
    assert [one.transfer.in_flight for one in many] == [64, 64, 0]


def test_small_transfers_are_spread_over_idle_paths(make: Make) -> None:
    pair = make(nics=2, queues=2, depth=64)
    pair.fabric.pause()
    for at in range(64):
        pair.start(pair.fetch(at * 4 * KIB, 4 * KIB))
    assert [queue.in_flight for path in pair.paths.paths for queue in path.queues] == [16, 16, 16, 16]


def test_the_nearer_nic_is_taken_while_nothing_is_measured(make: Make) -> None:
    pair = make(nics=2)
    pair.paths.paths[0].distance = lambda _: 2
    pair.fabric.pause()
    pair.start(pair.fetch(0, 4 * KIB))
    assert [path.queues[0].in_flight for path in pair.paths.paths] == [0, 1]


def test_the_path_that_was_measured_as_faster_gets_more(make: Make) -> None:
    pair = make(nics=2, size=64 * MIB, depth=64)
    slow, fast = pair.paths.paths
    pair.fabric.pause()
    for path, seconds in ((slow, 0.4), (fast, 0.1)):
        other = fast if path is slow else slow
        pair.paths.reset(other)
        one = pair.start(pair.fetch(0, 32 * MIB), slice_bytes=MIB)
        pair.time += seconds
        pair.fabric.resume()
        pair.run()
        assert pair.is_right(one)
        pair.fabric.pause()
        pair.connect(other)
    assert slow.rate.bytes_per_s * 3 < fast.rate.bytes_per_s
    pair.start(pair.fetch(0, 60 * MIB), slice_bytes=MIB)
    assert 0 < slow.queues[0].in_flight * 2 < fast.queues[0].in_flight


def test_what_failed_says_nothing_of_a_paths_rate(make: Make) -> None:
    pair = make(nics=2, reconnects=True)
    pair.fabric.failing.extend([STATUSES.index("RETRY_EXC_ERR")] * 2)
    one = pair.start(pair.fetch(0, 256 * KIB))
    pair.run()
    assert pair.is_right(one)
    assert sum(path.rate.total_bytes for path in pair.paths.paths) <= 256 * KIB
    assert [path.rate.queued_bytes for path in pair.paths.paths] == [0, 0]


def test_hosts_are_told_apart() -> None:
    with ExitStack() as stack:
        pair = RdmaPair(stack)
        assert isinstance(pair.here.verbs, SoftVerbs)
        assert pair.here.verbs.gid("soft0") != pair.there.verbs.gid("soft0")
