"""Threads for slow media: whose turn it is, and what becomes of work whose caller went."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvstore.disk_queue import RESERVED, DiskQueue

THREADS = 4


class Gate:
    """Work that waits for a test: `begun` when a thread is at it."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def work(self) -> str:
        self.begun.set()
        assert self.go.wait(10)
        return "done"


async def until(event: threading.Event) -> None:
    await asyncio.get_running_loop().run_in_executor(None, event.wait, 10)
    assert event.is_set()


@pytest.fixture
def queues() -> Iterator[list[DiskQueue]]:
    made: list[DiskQueue] = []
    yield made
    for queue in made:
        queue.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cairn-disk")]


def run(queues: list[DiskQueue], test, threads: int = THREADS) -> None:
    queues.append(DiskQueue(threads))
    asyncio.run(test(queues[-1]))


def test_without_work_there_are_no_threads(queues):
    queues.append(DiskQueue(THREADS))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cairn-disk")]


def test_work_gives_its_result_or_raises_its_error(queues):
    async def test(queue):
        assert await queue.load(lambda: 7) == 7
        assert await queue.store(lambda: 8) == 8
        for verb in (queue.load, queue.store):
            with pytest.raises(OSError, match="gone"):
                await verb(lambda: (_ for _ in ()).throw(OSError("gone")))

    run(queues, test)


def test_loads_go_before_stores_that_came_earlier(queues):
    async def test(queue):
        gates = [Gate() for _ in range(2)]
        busy = [asyncio.ensure_future(queue.load(gate.work)) for gate in gates]
        for gate in gates:
            await until(gate.begun)
        order = []
        stores = [asyncio.ensure_future(queue.store(lambda number=number: order.append(number))) for number in range(3)]
        await asyncio.sleep(0)
        loads = [asyncio.ensure_future(queue.load(lambda number=number: order.append(number))) for number in (10, 11)]
        await asyncio.sleep(0)
        for gate in gates[:1]:
            gate.go.set()
        await asyncio.gather(*stores, *loads)
        gates[1].go.set()
        await asyncio.gather(*busy)
        assert order == [10, 11, 0, 1, 2]

    run(queues, test, threads=2)


def test_stores_leave_threads_to_loads(queues):
    async def test(queue):
        gates = [Gate() for _ in range(THREADS + 2)]
        stores = [asyncio.ensure_future(queue.store(gate.work)) for gate in gates]
        for gate in gates[: THREADS - RESERVED]:
            await until(gate.begun)
        loads = [asyncio.ensure_future(queue.load(lambda: "at once")) for _ in range(RESERVED)]
        done, _ = await asyncio.wait(loads, timeout=1)
        begun = [gate.begun.is_set() for gate in gates]
        for gate in gates:
            gate.go.set()
        assert len(done) == RESERVED
        assert begun == [True] * (THREADS - RESERVED) + [False] * (len(gates) - THREADS + RESERVED)
        assert await asyncio.gather(*stores) == ["done"] * len(gates)

    run(queues, test)


@pytest.mark.parametrize("threads", [1, 2])
def test_with_few_threads_stores_are_done_all_the_same(queues, threads):
    async def test(queue):
        assert await asyncio.gather(*(queue.store(lambda: 1) for _ in range(5))) == [1] * 5

    run(queues, test, threads=threads)


@pytest.mark.parametrize("verb", ["load", "store"])
def test_work_that_no_thread_took_up_is_not_done_when_its_caller_goes(queues, verb):
    async def test(queue):
        gates = [Gate() for _ in range(THREADS)]
        busy = [asyncio.ensure_future(queue.load(gate.work)) for gate in gates]
        for gate in gates:
            await until(gate.begun)
        done = []
        task = asyncio.ensure_future(getattr(queue, verb)(lambda: done.append(1)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for gate in gates:
            gate.go.set()
        await asyncio.gather(*busy)
        assert await queue.store(lambda: 1) == 1
        assert done == []

    run(queues, test)


@pytest.mark.parametrize("verb", ["load", "store"])
def test_whoever_goes_while_a_thread_is_at_it_waits_for_its_end(queues, verb):
    async def test(queue):
        gate = Gate()
        task = asyncio.ensure_future(getattr(queue, verb)(gate.work))
        await until(gate.begun)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        gate.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await getattr(queue, verb)(lambda: 1) == 1

    run(queues, test)


def test_stores_whose_callers_went_give_their_turns_back(queues):
    async def test(queue):
        for _ in range(3 * THREADS):
            tasks = [asyncio.ensure_future(queue.store(lambda: 1)) for _ in range(2 * THREADS)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert await queue.store(lambda: 1) == 1

    run(queues, test)


def test_what_was_given_is_done_before_the_threads_end(queues):
    async def test(queue):
        gate, done = Gate(), []
        tasks = [asyncio.ensure_future(queue.load(gate.work))]
        tasks += [asyncio.ensure_future(queue.load(lambda number=number: done.append(number))) for number in range(20)]
        await until(gate.begun)
        closing = asyncio.get_running_loop().run_in_executor(None, queue.close)
        gate.go.set()
        await closing
        assert sorted(done) == list(range(20))
        await asyncio.gather(*tasks)

    run(queues, test)


def test_how_much_waits_can_be_seen(queues):
    async def test(queue):
        gate = Gate()
        task = asyncio.ensure_future(queue.load(gate.work))
        await until(gate.begun)
        more = [asyncio.ensure_future(queue.load(lambda: 1)) for _ in range(3)]
        await asyncio.sleep(0)
        assert queue.waiting == 3
        gate.go.set()
        await asyncio.gather(task, *more)
        assert queue.waiting == 0

    run(queues, test, threads=1)
