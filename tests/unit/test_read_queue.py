"""One queue pair's READs: what a completion answers for, what a failure leaves, when its memory is quiet."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvstore.transport.rdma.read_queue import SEQUENCES, ReadQueue
from kvstore.transport.rdma.transfer import Slice, Transfer
from kvstore.transport.rdma.verbs import FLUSHED, STATUSES, SUCCESS, Completion, VerbsError
from tests.rdma_pair import KIB, RdmaPair

DEPTH = 40


@pytest.fixture
def pair() -> Iterator[RdmaPair]:
    with ExitStack() as stack:
        yield RdmaPair(stack, depth=DEPTH)


def queue_of(pair: RdmaPair) -> ReadQueue:
    return pair.paths.paths[0].queues[0]


def slices(pair: RdmaPair, count: int, size: int = KIB) -> list[Slice]:
    transfer = Transfer([pair.fetch(0, count * size)], size)
    return [transfer.pending.popleft() for _ in range(count)]


def post(pair: RdmaPair, pieces: list[Slice]) -> None:
    queue_of(pair).post(pieces, 0, 0, now=1.0)


def refuse(*_: object) -> None:
    raise VerbsError(22, "refused")


def test_sixteen_reads_have_one_completion_that_answers_for_all(pair: RdmaPair) -> None:
    pieces = slices(pair, 16)
    post(pair, pieces)
    assert pair.fabric.completions_waiting == 1
    arrived, (batch,), failure = queue_of(pair).progress()
    assert (arrived, batch.size, batch.started, failure) == (pieces, 16 * KIB, 1.0, None)
    assert queue_of(pair).in_flight == queue_of(pair).in_flight_bytes == 0


@pytest.mark.parametrize(("reads", "completions"), [(1, 1), (17, 2), (32, 2), (40, 3)])
def test_there_is_a_completion_for_each_sixteen_reads_and_for_the_rest(
    pair: RdmaPair, reads: int, completions: int
) -> None:
    post(pair, slices(pair, reads))
    assert pair.fabric.completions_waiting == completions


def test_room_is_what_the_depth_leaves(pair: RdmaPair) -> None:
    pair.fabric.pause()
    post(pair, slices(pair, 30))
    assert queue_of(pair).room() == DEPTH - 30
    pair.fabric.step(16)
    queue_of(pair).progress()
    assert queue_of(pair).room() == DEPTH - 14


def test_there_is_no_room_once_the_window_is_full() -> None:
    with ExitStack() as stack:
        pair = RdmaPair(stack, depth=DEPTH, window_bytes=8 * KIB)
        pair.fabric.pause()
        post(pair, slices(pair, 7))
        assert queue_of(pair).room() == DEPTH - 7
        post(pair, slices(pair, 1))
        assert queue_of(pair).room() == 0


def test_reads_before_the_one_that_failed_have_arrived_and_it_and_those_behind_it_have_not(pair: RdmaPair) -> None:
    pieces = slices(pair, 20)
    pair.fabric.failing.extend([SUCCESS] * 9 + [STATUSES.index("REM_ACCESS_ERR")])
    post(pair, pieces)
    arrived, _, failure = queue_of(pair).progress()
    assert arrived == pieces[:9]
    assert failure == (pieces[9], "REM_ACCESS_ERR")
    assert queue_of(pair).reset() == pieces[9:]


def test_a_read_that_was_flushed_is_not_the_one_that_failed(pair: RdmaPair) -> None:
    pair.fabric.pause()
    pieces = slices(pair, 3)
    post(pair, pieces)
    pair.pair().fail()
    arrived, _, failure = queue_of(pair).progress()
    assert (arrived, failure) == ([], (None, "WR_FLUSH_ERR"))
    assert queue_of(pair).reset() == pieces


def test_a_status_that_is_not_known_is_a_failure(pair: RdmaPair) -> None:
    pair.fabric.failing.append(77)
    (piece,) = pieces = slices(pair, 1)
    post(pair, pieces)
    assert queue_of(pair).progress() == ([], [], (piece, "status 77"))


def test_completions_that_a_reset_left_are_late(pair: RdmaPair) -> None:
    pieces = slices(pair, 32)
    post(pair, pieces)
    assert queue_of(pair).reset() == pieces
    assert queue_of(pair).late_completions == 2


@pytest.mark.parametrize("status", [SUCCESS, FLUSHED])
def test_a_completion_of_an_earlier_life_answers_for_nothing(pair: RdmaPair, status: int) -> None:
    pair.fabric.pause()
    post(pair, slices(pair, 3))
    wr_id = pair.pair().posted[2].wr_id  # type: ignore[union-attr]
    pair.connect(pair.paths.paths[0])
    post(pair, slices(pair, 3))
    pair.pair().inject(Completion(wr_id, status, False, 0))
    assert queue_of(pair).progress() == ([], [], None)
    assert (queue_of(pair).late_completions, queue_of(pair).in_flight) == (1, 3)


def test_a_completion_that_comes_twice_is_late_the_second_time(pair: RdmaPair) -> None:
    pieces = slices(pair, 2)
    post(pair, pieces)
    ((completion, _),) = pair.pair().completions
    queue_of(pair).progress()
    pair.fabric.pause()
    post(pair, slices(pair, 3))
    pair.pair().inject(completion)
    assert queue_of(pair).progress() == ([], [], None)
    assert (queue_of(pair).late_completions, queue_of(pair).in_flight) == (1, 3)


def test_numbers_of_reads_begin_again_after_the_last(pair: RdmaPair) -> None:
    queue = queue_of(pair)
    queue._next = SEQUENCES - 4
    for _ in range(3):
        pieces = slices(pair, 3)
        post(pair, pieces)
        arrived, batches, failure = queue.progress()
        assert (arrived, len(batches), failure) == (pieces, 1, None)
    assert queue._next < SEQUENCES - 4


def test_a_batch_over_the_end_of_the_numbers_stays_until_its_last_read(pair: RdmaPair) -> None:
    queue = queue_of(pair)
    queue._next = SEQUENCES - 16
    pair.fabric.pause()
    pieces = slices(pair, 20)
    post(pair, pieces)
    pair.fabric.step(16)
    arrived, batches, _ = queue.progress()
    assert (arrived, len(batches), queue.in_flight_bytes) == (pieces[:16], 1, 4 * KIB)


@pytest.mark.parametrize("call", ["arm", "poll"])
def test_what_had_arrived_when_the_device_failed_is_not_lost(
    pair: RdmaPair, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    pieces = slices(pair, 16)
    post(pair, pieces)
    poll: Callable[[int], list[Completion]] = pair.pair().poll
    answers = iter([poll])
    monkeypatch.setattr(pair.pair(), "poll", lambda limit: next(answers, refuse)(limit))
    if call == "arm":
        monkeypatch.setattr(pair.pair(), "arm", refuse)
    arrived, _, failure = queue_of(pair).progress()
    assert failure is not None
    assert failure.slice is None
    assert arrived + queue_of(pair).reset() == pieces


def test_reads_of_which_it_is_not_known_whether_they_were_posted_are_given_back(pair: RdmaPair) -> None:
    pair.fabric.refused_posts = 1
    pieces = slices(pair, 8)
    with pytest.raises(VerbsError):
        post(pair, pieces)
    assert queue_of(pair).reset() == pieces
    assert queue_of(pair).in_flight_bytes == 0


def test_where_a_reset_is_refused_reads_stay_in_it_until_it_is_closed(
    pair: RdmaPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.fabric.pause()
    pieces = slices(pair, 2)
    post(pair, pieces)
    monkeypatch.setattr(pair.pair(), "reset", refuse)
    queue = queue_of(pair)
    assert queue.reset() == []
    assert (queue.is_dead, queue.slices) == (True, pieces)
    assert queue.reset() == []
    assert queue.close() == pieces
    assert queue.close() == []


def test_where_not_even_a_close_is_possible_nobody_gets_the_memory_back(
    pair: RdmaPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.fabric.pause()
    post(pair, slices(pair, 2))
    with monkeypatch.context() as patch:
        patch.setattr(pair.pair(), "reset", refuse)
        patch.setattr(pair.pair(), "close", refuse)
        assert queue_of(pair).close() == []
    assert queue_of(pair).close() == []


def test_a_dead_queue_pair_is_not_connected_anew(pair: RdmaPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it answers by now: what was in it may still be on its way."""
    with monkeypatch.context() as patch:
        patch.setattr(pair.pair(), "reset", refuse)
        queue_of(pair).reset()
    assert queue_of(pair).is_dead
    assert not pair.connect(pair.paths.paths[0])
    assert queue_of(pair).room() == 0
