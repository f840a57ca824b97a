"""The async client: hung nodes, many calls at once, and cancellation at each await of each operation."""

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from engine_client.blocking import BlockingClient
from engine_client.client import Client
from engine_client.steps import OpenSpace
from kvstore.errors import ConnectFailed, DeadlineExceeded, StoreError, TransportError
from kvstore.types import BlockKey
from tests.system.nodes import NodeProcess, content, namespace, nothing_held, until
from tests.system.test_blocking_client import damage

SIZE = 120_000  # a copy of it goes to a thread
BLOCKS = 6
LIMIT_S = 0.4
SLACK_S = 0.8
MIB = 1 << 20
SPACE = namespace("model", block_bytes=SIZE)
MOST_AWAITS = 40


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[NodeProcess]:
    started = NodeProcess(tmp_path_factory.mktemp("node"), "--limits.wait_max=1s").start()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def _nothing_is_left(node) -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    node.thaw()
    node.assert_clean()
    node.empty()
    until(lambda: set(threading.enumerate()) <= threads, "the client's threads to end")


@pytest.fixture(params=["unix", "tcp"])
def address(node, request) -> tuple[str, str]:
    return (node.unix, "") if request.param == "unix" else (node.tcp, node.token)


@pytest.fixture
def writer(node) -> Iterator[BlockingClient]:
    with BlockingClient(node.unix) as client:
        yield client


def prompt(seed: int, blocks: int = BLOCKS) -> list[int]:
    return [seed, *range(4 * blocks - 1)]


def store(client: BlockingClient, seed: int) -> tuple[OpenSpace, list[BlockKey]]:
    space = client.open("model", SPACE)
    keys = space.keys(prompt(seed))
    client.put(space, keys, [content(key, SIZE) for key in keys])
    return space, keys


def are_right(keys: list[BlockKey], blocks: list) -> bool:
    return all(bytes(block) == content(key, SIZE) for key, block in zip(keys, blocks, strict=False))


async def no_tasks_but_this() -> bool:
    await asyncio.sleep(0)
    return asyncio.all_tasks() == {asyncio.current_task()}


# Cancellation.

Operate = Callable[[Client, OpenSpace, list[bytearray]], Awaitable[Any]]
PRESENT, ABSENT, WRITING = 50, 51, 52  # chains: stored, nowhere, being written by somebody else


def keys_of(space: OpenSpace, seed: int) -> list[BlockKey]:
    return space.keys(prompt(seed))


async def place_and_abort(client: Client, space: OpenSpace, buffers: list[bytearray]) -> None:
    grant = await client.place(space, keys_of(space, ABSENT), [SIZE] * BLOCKS)
    try:
        for slot in grant.slots:
            slot[:] = b"x" * SIZE
        await client.progress(grant, 2)
        await client.commit(grant)
    except BaseException:
        await client.abort(grant)
        raise


async def acquire_and_release(client: Client, space: OpenSpace, buffers: list[bytearray]) -> None:
    held = await client.acquire(space, keys_of(space, PRESENT), lease_s=60.0)
    assert held is not None
    try:
        await client.renew(held, 60.0)
    finally:
        await client.release(held)


async def pin_and_unpin(client: Client, space: OpenSpace, buffers: list[bytearray]) -> None:
    pinned = await client.pin(space, keys_of(space, PRESENT), hard=True, ttl_s=60.0)
    try:
        await client.explain(space, keys_of(space, PRESENT))
    finally:
        await client.unpin(pinned.pin_id)


async def put_in_pieces(client: Client, space: OpenSpace, buffers: list[bytearray]) -> None:
    keys = space.keys(prompt(ABSENT, 36))
    await client.put(space, keys, [bytes(SIZE)] * 36)


OPERATIONS: dict[str, Operate] = {
    "put in pieces": put_in_pieces,
    "get": lambda client, space, buffers: client.get(space, keys_of(space, PRESENT), buffers),
    "get what is written": lambda client, space, buffers: client.get(
        space, keys_of(space, WRITING), buffers, wait_s=0.02
    ),
    "put": lambda client, space, buffers: client.put(space, keys_of(space, ABSENT), [bytes(SIZE)] * BLOCKS),
    "put a small one": lambda client, space, buffers: client.put(space, keys_of(space, ABSENT)[:1], [bytes(SIZE)]),
    "place": place_and_abort,
    "acquire": acquire_and_release,
    "pin": pin_and_unpin,
    "get_bytes": lambda client, space, buffers: client.get_bytes(space, keys_of(space, PRESENT)[0]),
    "match": lambda client, space, buffers: client.match(space, keys_of(space, ABSENT)),
    "open": lambda client, space, buffers: client.open("another", namespace("another")),
    "find": lambda client, space, buffers: client.find("model"),
    "evict": lambda client, space, buffers: client.evict(space, keys_of(space, ABSENT)),
    "list": lambda client, space, buffers: client.list_blocks(space),
    "stat": lambda client, space, buffers: client.stat(),
    "connect": lambda client, space, buffers: client.connect(),
}


class Step:
    """Lets a coroutine run to its k-th suspension, cancels it there as `how` says, and lets it run on to its end."""

    def __init__(self, awaitable: Awaitable[Any], cancel_at: int, how: str) -> None:
        self._iterator = awaitable.__await__()
        self._cancel_at = cancel_at
        self._how = how
        self.suspensions = 0

    def __await__(self):
        outcome, error = None, None
        while True:
            try:
                waited_for = self._iterator.send(outcome) if error is None else self._iterator.throw(error)
            except StopIteration as stop:
                return stop.value
            outcome = error = None
            self.suspensions += 1
            self._strike(asyncio.current_task(), waited_for)
            try:
                outcome = yield waited_for
            except BaseException as failure:
                error = failure

    def _strike(self, task: asyncio.Task, waited_for: asyncio.Future | None) -> None:
        at = self.suspensions - self._cancel_at
        if self._how == "as it is done" and at == 0 and waited_for is not None:
            waited_for.add_done_callback(lambda _: task.cancel())  # before the task hears of it
        elif self._how != "as it is done" and (at == 0 or (self._how == "twice" and at == 1)):
            task.cancel()


@pytest.mark.parametrize("how", ["once", "twice", "as it is done"])
@pytest.mark.parametrize("what", OPERATIONS)
def test_an_operation_cancelled_at_its_kth_await(node, writer, address, what, how):
    """No lease, grant or task stays, nobody writes into the caller's buffers after, and the client goes on."""
    if what == "acquire" and address[1]:
        pytest.skip("a lease needs shared memory")
    space, keys = store(writer, PRESENT)
    grant = writer.place(space, space.keys(prompt(WRITING)), [SIZE] * BLOCKS) if what == "get what is written" else None

    async def cancel_at(number: int) -> bool:
        """Whether there was a `number`-th await."""
        client = Client(*address, timeout_s=5.0)
        mine = OpenSpace("model", SPACE)
        if what != "connect" and number % 2:  # else it connects on the way
            mine = await client.open("model", SPACE)
        else:
            mine.number, mine.root, mine.epoch = space.number, space.root, space.epoch
        buffers = [bytearray(SIZE) for _ in range(BLOCKS)]
        step = Step(OPERATIONS[what](client, mine, buffers), number // 2 + 1, how)

        async def run() -> None:
            await step

        task = asyncio.create_task(run())
        was_cancelled = False
        try:
            await task
        except asyncio.CancelledError:
            was_cancelled = True
        before = [bytes(buffer) for buffer in buffers]
        assert await no_tasks_but_this()
        rest = [bytearray(SIZE) for _ in keys]
        its = await client.open("model", SPACE)
        assert await client.get(its, keys, rest) == BLOCKS
        assert are_right(keys, rest)
        assert [bytes(buffer) for buffer in buffers] == before, "somebody wrote into them after"
        with node.admin() as admin:
            await asyncio.to_thread(until, lambda: only_blocks(admin, grant), "nothing to be held by this client")
        await client.aclose()
        writer.evict(space, space.keys(prompt(ABSENT, 36)))
        return was_cancelled or step.suspensions >= number // 2 + 1

    async def each() -> int:
        for number in range(2 * MOST_AWAITS):
            if not await cancel_at(number) and not await cancel_at(number + 1):
                return number
        raise AssertionError(f"{what} awaits more than {MOST_AWAITS} times")

    print(f"{what}: cancelled at {asyncio.run(each())} awaits")
    if grant is not None:
        writer.abort(grant)


def only_blocks(admin: BlockingClient, grant: object) -> bool:
    """Nobody holds anything but the test itself."""
    tier = admin.stat()["tiers"][0]
    space = admin.find("model")
    rows = admin.list_blocks(space).blocks
    held = [row for row in rows if row["holders"]]
    return not tier["draining"] and len(held) == (BLOCKS if grant is not None else 0)


# Hung nodes and lost ones.


def test_every_call_on_a_node_that_hangs_ends_in_time(node, writer, address):
    _, keys = store(writer, 1)

    async def use() -> None:
        async with Client(*address, timeout_s=LIMIT_S) as client:
            mine = await client.open("model", SPACE)
            buffers = [bytearray(SIZE) for _ in keys]
            node.freeze()
            calls = [
                client.stat(), client.put(mine, mine.keys(prompt(2)), [bytes(SIZE)] * BLOCKS),
                client.get_bytes(mine, keys[0]), client.get(mine, keys, buffers),
                client.match(mine, mine.keys(prompt(3))), client.evict(mine, keys),
                client.place(mine, mine.keys(prompt(4)), [SIZE] * BLOCKS), client.pin(mine, keys, hard=True, ttl_s=9.0),
                client.open("new", SPACE),
            ]  # fmt: skip
            began = time.monotonic()
            said = await asyncio.gather(*calls, return_exceptions=True)
            assert time.monotonic() - began < LIMIT_S + SLACK_S
            assert all(not isinstance(each, BaseException) or isinstance(each, TransportError) for each in said), said
            assert isinstance(said[0], DeadlineExceeded)
            async with Client(*address, timeout_s=LIMIT_S) as fresh:
                began = time.monotonic()
                with pytest.raises(TransportError):
                    await fresh.stat()
                assert time.monotonic() - began < LIMIT_S + SLACK_S
            node.thaw()
            with node.admin() as admin:
                space_now = admin.find("model")
                await asyncio.to_thread(
                    until, lambda: not [row for row in admin.list_blocks(space_now).blocks if row["holders"]],
                    "what it was given too late to be given back",
                )  # fmt: skip
            await client.put(mine, keys, [content(key, SIZE) for key in keys])
            assert await client.get(mine, keys, buffers) == BLOCKS
            assert are_right(keys, buffers)

    asyncio.run(use())


def test_answers_that_come_after_their_caller_has_gone(node, writer, address):
    """The payload of a reply that nobody waits for any more goes nowhere."""
    _, keys = store(writer, 5)

    async def use() -> None:
        async with Client(*address, timeout_s=5.0) as client:
            mine = await client.open("model", SPACE)
            for turn in range(12):
                buffers = [bytearray(SIZE) for _ in keys]
                task = asyncio.create_task(client.get(mine, keys, buffers))
                for _ in range(turn % 6):
                    await asyncio.sleep(0)
                await asyncio.sleep(0.0003 * (turn // 2))
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                before = [bytes(buffer) for buffer in buffers]
                other = [bytearray(SIZE) for _ in keys]
                assert await client.get(mine, keys, other) == BLOCKS
                assert are_right(keys, other)
                assert [bytes(buffer) for buffer in buffers] == before

    asyncio.run(use())


def test_many_calls_at_once(node, address):
    """Also of slabs that are not mapped yet, by many at once."""

    async def one(client: Client, space: OpenSpace, number: int) -> None:
        keys = space.keys(prompt(1000 + number))
        blocks = [content(key, SIZE) for key in keys]
        await client.put(space, keys, blocks)
        buffers = [bytearray(SIZE) for _ in keys]
        found = await client.get(space, keys, buffers)
        assert list(map(bytes, buffers))[:found] == blocks[:found]

    async def read(client: Client, space: OpenSpace, number: int) -> None:
        keys = space.keys(prompt(1000 + number))
        buffers = [bytearray(SIZE) for _ in keys]
        found = await client.get(space, keys, buffers)
        assert are_right(keys[:found], buffers)

    async def use() -> None:
        async with Client(*address) as client:
            space = await client.open("model", SPACE)
            for start in range(0, 40, 10):
                await asyncio.gather(*(one(client, space, start + number) for number in range(10)))
        for _ in range(5):
            async with Client(*address, copier_threads=4) as fresh:
                space = await fresh.open("model", SPACE)
                await asyncio.gather(*(read(fresh, space, number) for number in range(15, 40)))

    asyncio.run(use())
    assert node.counters()["corrupt_blocks"] == 0


def test_a_client_that_is_closed_while_calls_are_under_way(node, writer, address):
    """They end with a TransportError or with their result; none is cancelled, and none comes after."""
    _, keys = store(writer, 6)

    async def use() -> None:
        for turn in range(8):
            client = Client(*address)
            mine = await client.open("model", SPACE)
            buffers = [[bytearray(SIZE) for _ in keys] for _ in range(6)]
            calls = [asyncio.create_task(client.get(mine, keys, each)) for each in buffers]
            calls += [asyncio.create_task(client.put(mine, mine.keys(prompt(700 + turn)), [bytes(SIZE)] * BLOCKS))]
            for _ in range(turn):
                await asyncio.sleep(0)
            await client.aclose()
            for said in await asyncio.gather(*calls, return_exceptions=True):
                assert not isinstance(said, BaseException) or isinstance(said, TransportError), repr(said)
            for call in (client.stat(), client.get(mine, keys, buffers[0])):
                with pytest.raises(ConnectFailed):
                    await call
            await client.aclose()

    asyncio.run(use())
    gc.collect()


def test_cancelled_because_a_timeout_struck(node, writer, address):
    """`asyncio.timeout` around a call says TimeoutError, even if the node cannot be told of it any more."""
    store(writer, 7)

    async def use() -> None:
        async with Client(*address, timeout_s=LIMIT_S) as client:
            mine = await client.open("model", SPACE)
            keys = mine.keys(prompt(8))
            node.freeze()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.put(mine, keys, [bytes(SIZE)] * BLOCKS)
            node.thaw()
            assert (await client.put(mine, keys, [bytes(SIZE)] * BLOCKS)).stored + 1

    asyncio.run(use())


# Waiting and damage.


@pytest.mark.parametrize("end", ["commit", "abort", "nothing"])
def test_a_get_that_waits_for_a_writer(node, writer, address, end):
    space = writer.open("model", SPACE)
    keys = space.keys(prompt(9))
    grant = writer.place(space, keys, [SIZE] * BLOCKS)
    for slot, key in zip(grant.slots, keys, strict=True):
        slot[:] = content(key, SIZE)

    async def use() -> None:
        async with Client(*address) as client:
            mine = await client.open("model", SPACE)
            buffers = [bytearray(SIZE) for _ in keys]
            began = time.monotonic()
            task = asyncio.create_task(client.get(mine, keys, buffers, wait_s=0.3 if end == "nothing" else 10.0))
            assert await client.get(mine, keys, [bytearray(SIZE) for _ in keys]) == 0, "others are not kept waiting"
            if end == "commit":
                await asyncio.to_thread(writer.commit, grant)
            elif end == "abort":
                await asyncio.to_thread(writer.abort, grant)
            found = await task
            assert found == (BLOCKS if end == "commit" else 0)
            assert are_right(keys[:found], buffers)
            assert time.monotonic() - began < 2.0

    asyncio.run(use())
    writer.abort(grant)


def test_memory_that_somebody_damaged(node, writer, address):
    space = writer.open("sized", namespace("sized"))
    keys = space.keys(prompt(10))
    writer.put(space, keys, [content(key, 20_000) for key in keys])
    damage(node, space.number, keys[2])
    before = node.counters()["corrupt_blocks"]

    async def use() -> None:
        async with Client(*address) as client:
            mine = await client.open("sized", namespace("sized"))
            assert await client.get(mine, keys, [bytearray(20_000) for _ in keys]) == 2
            with pytest.raises(StoreError):
                await client.get_bytes(mine, keys[2])

    asyncio.run(use())
    assert node.counters()["corrupt_blocks"] == before + 1
    with node.admin() as admin:
        assert not nothing_held(admin)
