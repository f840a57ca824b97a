"""Events for followers: the log, snapshots while blocks come and go, the follower's states, and what routers read."""

import asyncio
import socket
import sys
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine_client.subscription import Follower, Standing, Update
from kvstore.catalogue import Catalogue, OpenNamespace, Tenant
from kvstore.errors import ConfigError, NotFound, ProtocolError, Rejected
from kvstore.events import SCANNED, SNAPSHOT_IDLE_S, SNAPSHOTS, EventLog, Snapshots
from kvstore.prefix import Namespace, part_key
from kvstore.table import BlockTable, Replica, TierShape
from kvstore.types import DRAM, NVME, BlockKey, Cause, Change, State
from kvstore.wire_events import EVENTS_LIMIT, BlockEvent, Happened, Snapped, Snapshot, Subscribe, events_of, happened
from server import event_feed, zmq_events
from server.event_feed import LEAST_PAGE, MOST_POLLS, EventFeed
from server.zmq_events import ZmqPublisher, encode_events

SLAB_BYTES, SLABS, SIZE = 1 << 20, 2, 1024  # a slab for each tenant
RED, BLUE = Tenant("red"), Tenant("blue")
FIELDS = {"dtype": "bf16", "layout": "kv", "layers": 2}


class Node:
    """A table, its log, and the feeds of clients; time is what a test says."""

    def __init__(self, entries: int = 1000, epoch: int = 1) -> None:
        self.table = BlockTable({DRAM: TierShape(SLAB_BYTES), NVME: TierShape(SLAB_BYTES, "")})
        for tier in self.table.tiers.values():
            for _ in range(SLABS):
                tier.pool.grow()
        self.catalogue = Catalogue(100, lambda tenant, number: tuple(
            self.table.space(tenant, number, tier) for tier in (DRAM, NVME)))  # fmt: skip
        self.events = EventLog(epoch, entries)
        self.snapshots = Snapshots()
        self.seconds = 0.0
        self.clock = SimpleNamespace(now=lambda: self.seconds)
        self.limits = SimpleNamespace(wait_max_s=60.0)

    def open(self, model: str = "a", tenant: Tenant = RED, parts: int = 1) -> OpenNamespace:
        namespace = Namespace(model=model, block_tokens=16, parts=parts, **FIELDS)
        return self.catalogue.define(tenant, model, namespace)[0]

    def feed(self, tenant: Tenant = RED) -> EventFeed:
        store: Any = self
        return EventFeed(store, tenant)

    def begin(self, space: OpenNamespace, name: bytes, parent: bytes = b"", tier: str = DRAM) -> Replica:
        place = next(found for found in space.spaces if found.tier == tier)
        above = key(parent) if parent else None
        replica = self.table.allocate(place, key(name), above, SIZE)
        assert replica is not None
        return replica

    def store(self, space: OpenNamespace, name: bytes, parent: bytes = b"", tier: str = DRAM) -> Replica:
        replica = self.begin(space, name, parent, tier)
        self.table.commit(replica, 7)
        self.settle()
        return replica

    def discard(self, replica: Replica) -> None:
        self.table.discard(replica, Cause.DELETED)
        self.settle()

    def settle(self) -> None:
        self.events.note(self.table.take_changes())

    def blocks(self, tenant: Tenant, number: int = 0) -> dict[Any, Any]:
        """What a follower should know."""
        return {
            (space.number, space.tier, replica.key): (replica.parent, replica.size)
            for space in self.table.spaces()
            if space.tenant == tenant.name and number in (0, space.number)
            for replica in space.replicas.values()
            if replica.state is State.WRITTEN
        }


class View:
    """A follower, and what it makes of the node's answers."""

    def __init__(self, node: Node, tenant: Tenant = RED, number: int = 0) -> None:
        self.follower = Follower()
        self.blocks: dict[Any, Any] = {}
        self.resets = 0
        self.number = number
        self.tenant = tenant
        self.connect(node)

    def connect(self, node: Node) -> None:
        self.node = node
        self.feed = node.feed(self.tenant)
        self.apply(self.follower.lost())
        self.follower.connected(node.events.epoch, self.number)

    def step(self, page: int = EVENTS_LIMIT) -> Update | None:
        request = msgspec.structs.replace(self.follower.request(1), limit=page)
        try:
            if isinstance(request, Snapshot):
                reply: Any = self.feed.snapshot(request)
            else:
                reply = self.feed.subscribe(msgspec.structs.replace(request, wait_ms=0))
        except NotFound as error:
            self.follower.refused(error)
            return None
        update = self.follower.take(reply)
        self.apply(update)
        return update

    def apply(self, update: Update | None) -> None:
        if update is None:
            return
        assert update.standing is self.follower.standing
        if update.is_reset:
            self.resets += 1
            self.blocks.clear()
        for event in update.events:
            place = (event.namespace, event.tier, event.key)
            if event.is_stored:
                self.blocks[place] = event.parent, event.size
            else:
                self.blocks.pop(place, None)

    def follow(self, page: int = EVENTS_LIMIT) -> None:
        """Until it is exact, and knows all."""
        for _ in range(1000):
            self.step(page)
            if self.standing is Standing.EXACT and self.follower.request(1).after == self.node.events.sequence:
                return
        pytest.fail("never exact")

    @property
    def standing(self) -> Standing:
        return self.follower.standing


def key(name: bytes) -> BlockKey:
    return BlockKey(name if len(name) > 16 else name.ljust(16, b"."))


def poll(after: int, wait_ms: int = 0, namespace: int = 0, epoch: int = 1) -> Subscribe:
    return Subscribe(1, namespace, epoch, after, wait_ms)


def told(reply: Any) -> list[tuple[bool, bytes]]:
    return [(event.is_stored, event.key.rstrip(b".")) for event in events_of(reply)]


# The log


def test_what_was_committed_is_told_with_its_parent_tier_and_size_and_what_was_removed_too():
    node = Node()
    space = node.open()
    node.store(space, b"a")
    node.discard(node.store(space, b"b", b"a", NVME))
    reply = node.feed().subscribe(poll(0))
    assert (reply.first, reply.last, reply.is_exact) == (1, 3, True)
    assert events_of(reply) == [
        BlockEvent(True, space.number, DRAM, key(b"a"), None, SIZE),
        BlockEvent(True, space.number, NVME, key(b"b"), key(b"a"), SIZE),
        BlockEvent(False, space.number, NVME, key(b"b"), None, 0),
    ]


def test_a_block_that_was_never_committed_is_no_news():
    node = Node()
    for cause in (Cause.ABORTED, Cause.WRITER_LOST, Cause.DELETED, Cause.LOAD_FAILED):
        replica = node.begin(node.open(), b"a")
        node.table.progress(replica, 1)
        node.table.abort(replica, cause)
        node.table.let_go(replica)
        node.settle()
    assert node.events.sequence == 0


def test_what_an_earlier_start_left_is_told_as_it_is_taken_up():
    node = Node()
    replica = node.store(node.open(), b"a")
    node.events.note([SimpleNamespace(change=Change.RESTORED, replica=replica, cause=None)])
    assert told(node.feed().subscribe(poll(1))) == [(True, b"a")]


def test_who_asks_after_what_the_ring_has_lost_is_told_that_the_answer_is_not_exact():
    node = Node(entries=4)
    for number in range(6):
        node.store(node.open(), b"%d" % number)
    assert node.feed().subscribe(poll(1)).is_exact is False
    assert told(node.feed().subscribe(poll(2))) == [(True, b"%d" % number) for number in (2, 3, 4, 5)]


@pytest.mark.parametrize(("after", "epoch"), [(-1, 1), (3, 1), (1, 2), (2**63, 1)])
def test_a_sequence_that_was_never_given_out_or_is_of_another_start_is_not_exact(after, epoch):
    node = Node()
    node.store(node.open(), b"a")
    node.store(node.open(), b"b")
    reply = node.feed().subscribe(poll(after, wait_ms=1000, epoch=epoch))
    assert (reply.is_exact, reply.last, told(reply)) == (False, 2, [])


def test_a_tenant_is_told_of_its_own_blocks_only():
    node = Node()
    node.store(node.open("a", RED), b"r")
    node.store(node.open("a", BLUE), b"b")
    assert told(node.feed(BLUE).subscribe(poll(0))) == [(True, b"b")]
    assert told(node.feed(BLUE).snapshot(Snapshot(1, 0))) == [(True, b"b")]
    red = node.open("a", RED).number
    with pytest.raises(NotFound):
        node.feed(BLUE).subscribe(poll(0, namespace=red))
    with pytest.raises(NotFound):
        node.feed(BLUE).snapshot(Snapshot(1, red))


def test_of_one_namespace_only_its_blocks_are_told():
    node = Node()
    one, other = node.open("a"), node.open("b")
    node.store(one, b"1")
    node.store(other, b"2")
    assert told(node.feed().subscribe(poll(0, namespace=other.number))) == [(True, b"2")]
    assert told(node.feed().snapshot(Snapshot(1, other.number))) == [(True, b"2")]


def test_among_very_many_events_of_others_one_poll_looks_at_a_bounded_number():
    node = Node(entries=2 * SCANNED)
    node.store(node.open("b", BLUE), b"b")
    (entry,) = node.events.since(0, 1, "blue").entries
    for _ in range(SCANNED):
        node.events._append(entry)
    node.store(node.open(), b"a")
    first = node.feed().subscribe(poll(0))
    assert (first.is_exact, first.last, told(first)) == (True, SCANNED, [])
    assert told(node.feed().subscribe(poll(first.last))) == [(True, b"a")]


# Waiting


def test_a_poll_waits_for_the_first_event_of_its_tenant():
    async def scenario() -> None:
        node = Node()
        red, blue = node.open("a", RED), node.open("a", BLUE)
        waiting = asyncio.ensure_future(node.feed().subscribe(poll(0, wait_ms=60_000)))
        await asyncio.sleep(0)
        node.store(blue, b"b")
        for _ in range(4):
            await asyncio.sleep(0)
        assert not waiting.done()
        node.store(red, b"a")
        assert told(await waiting) == [(True, b"a")]
        assert not node.events._watchers

    asyncio.run(scenario())


def test_a_poll_that_waits_in_vain_says_how_far_there_was_nothing_and_one_that_is_cancelled_leaves_nothing():
    async def scenario() -> None:
        node = Node()
        blue = node.open("a", BLUE)
        feed = node.feed()
        waiting = asyncio.ensure_future(feed.subscribe(poll(0, wait_ms=20)))
        await asyncio.sleep(0)
        node.store(blue, b"b")
        reply = await waiting
        assert (reply.is_exact, reply.last, told(reply)) == (True, 1, [])
        waiting = asyncio.ensure_future(feed.subscribe(poll(1, wait_ms=60_000)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not node.events._watchers
        assert not feed._polls

    asyncio.run(scenario())


def test_of_one_client_only_so_many_polls_wait():
    async def scenario() -> None:
        feed = Node().feed()
        waiting = [asyncio.ensure_future(feed.subscribe(poll(0, wait_ms=60_000))) for _ in range(MOST_POLLS)]
        await asyncio.sleep(0)
        assert isinstance(feed.subscribe(poll(0, wait_ms=60_000)), Happened)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(scenario())


# Snapshots


def test_a_cursor_is_good_once_for_its_tenant_and_snapshots_that_nobody_goes_on_with_make_way():
    node = Node()
    space = node.open()
    for number in range(2 * LEAST_PAGE):
        node.store(space, b"%d" % number)
    feed = node.feed()
    cursors = [feed.snapshot(Snapshot(1, 0, 0, LEAST_PAGE)).cursor for _ in range(SNAPSHOTS)]
    with pytest.raises(Rejected):
        feed.snapshot(Snapshot(1, 0))
    node.feed(BLUE).snapshot(Snapshot(1, 0))
    with pytest.raises(NotFound):
        node.feed(BLUE).snapshot(Snapshot(1, 0, cursors[0]))
    assert len(feed.snapshot(Snapshot(1, 0, cursors[0], LEAST_PAGE)).keys) == LEAST_PAGE
    for cursor in (cursors[0], -1, 2**63):
        with pytest.raises(NotFound):
            feed.snapshot(Snapshot(1, 0, cursor))
    node.seconds = SNAPSHOT_IDLE_S
    assert feed.snapshot(Snapshot(1, 0)).cursor == 0
    with pytest.raises(NotFound):
        feed.snapshot(Snapshot(1, 0, cursors[1]))


def test_a_follower_whose_snapshot_is_gone_begins_again():
    node = Node()
    for number in range(3 * LEAST_PAGE):
        node.store(node.open(), b"%d" % number)
    view = View(node)
    view.step(LEAST_PAGE)
    node.seconds = SNAPSHOT_IDLE_S
    View(node).step()
    view.follow()
    assert (view.resets, view.blocks) == (2, node.blocks(RED))


# Followers


@pytest.mark.parametrize("seed", range(40))
def test_a_follower_that_is_exact_knows_just_what_is_there_whatever_happens_meanwhile(seed, monkeypatch):
    random = Random(seed)
    monkeypatch.setattr(event_feed, "LEAST_PAGE", 1)
    node = Node(entries=random.choice([8, 64, 1024]))
    spaces = [node.open("a"), node.open("b"), node.open("p", parts=2), node.open("a", BLUE)]
    views = [View(node), View(node, BLUE), View(node, RED, spaces[1].number)]
    were_exact = 0
    for _ in range(600):
        _change(random, node, spaces)
        for view in views:
            if random.random() < 0.3:
                view.step(random.randint(1, 9))
            if random.random() < 0.01:
                view.connect(node)
                node.seconds += SNAPSHOT_IDLE_S
            if view.standing is Standing.EXACT and view.follower.request(1).after == node.events.sequence:
                were_exact += 1
                assert view.blocks == node.blocks(view.tenant, view.number)
    for view in views:
        view.follow()
        assert view.blocks == node.blocks(view.tenant, view.number)
    assert were_exact


def _change(random: Random, node: Node, spaces: Sequence[OpenNamespace]) -> None:
    space = random.choice(spaces)
    place = random.choice(space.spaces)
    block = key(b"%d" % random.randrange(12))
    if space.namespace.parts > 1:
        block = part_key(block, random.randrange(2))
    replica = place.replicas.get(block)
    if replica is not None:
        if replica.state is State.WRITTEN:
            node.table.discard(replica, Cause.DELETED)
        elif random.random() < 0.5:
            node.table.commit(replica, 7)
        else:
            node.table.abort(replica, Cause.ABORTED)
            node.table.let_go(replica)
    else:
        replica = node.begin(space, block, tier=place.tier)
        if random.random() < 0.7:
            node.table.commit(replica, 7)
    node.settle()


def test_a_follower_is_degraded_until_all_pages_and_what_happened_meanwhile_are_in():
    node = Node()
    space = node.open()
    replicas = [node.store(space, b"%d" % number) for number in range(2 * LEAST_PAGE)]
    view = View(node)
    assert view.step(LEAST_PAGE) is not None
    assert view.standing is Standing.DEGRADED
    node.discard(replicas[0])
    node.store(space, b"new")
    view.step(LEAST_PAGE)
    assert view.standing is Standing.DEGRADED
    view.step(LEAST_PAGE)
    view.step(1)
    assert view.standing is Standing.DEGRADED
    assert view.blocks != node.blocks(RED)
    view.step(1)
    assert view.standing is Standing.EXACT
    assert view.blocks == node.blocks(RED)
    assert view.resets == 1


def test_a_follower_that_lost_the_connection_for_a_moment_goes_on_without_a_snapshot():
    node = Node()
    view = View(node)
    view.follow()
    view.apply(view.follower.lost())
    assert view.standing is Standing.DEGRADED
    node.store(node.open(), b"a")
    view.connect(node)
    view.follow()
    assert (view.resets, view.blocks) == (1, node.blocks(RED))


def test_a_follower_that_missed_too_much_and_one_whose_node_was_restarted_take_a_snapshot():
    node = Node(entries=4)
    view = View(node)
    view.follow()
    for number in range(5):
        node.store(node.open(), b"%d" % number)
    assert view.step() == Update(Standing.DEGRADED)
    view.follow()
    assert (view.resets, view.blocks) == (2, node.blocks(RED))
    restarted = Node(epoch=2)
    restarted.store(restarted.open(), b"other")
    view.connect(restarted)
    view.follow()
    assert (view.resets, view.blocks) == (3, restarted.blocks(RED))


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": b"1234567"},
        {"kinds": b""},
        {"kinds": b"\2"},
        {"tiers": b"\3"},
        {"namespaces": b"\1"},
        {"keys": [b"short"]},
        {"keys": []},
        {"parents": [b"short"]},
        {"first": 2},
        {"last": -1},
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(change):
    follower = Follower()
    follower.connected(1, 0)
    follower.take(Snapped(1, 1, 0, b"", b"", b"", [], [], 0))
    event = BlockEvent(True, 1, DRAM, key(b"a"), key(b"p"), SIZE)
    good = happened(poll(0), 1, 1, [event], is_exact=True)
    with pytest.raises(ProtocolError):
        follower.take(msgspec.structs.replace(good, **change))
    assert follower.take(good) == Update(Standing.EXACT, False, (event,))
    with pytest.raises(ProtocolError):
        follower.take(Snapped(1, 1, 0, b"", b"", b"", [], [], 0))


# What routers read


def router_events(node: Node, after: int = 0) -> list[dict[str, Any]]:
    def block_tokens(number: int) -> int:
        found = node.catalogue.of_number(number)
        assert found is not None
        return found.namespace.block_tokens

    return list(encode_events(node.events.since(after, 1000, "red").entries, block_tokens))


def test_a_chain_is_one_event_for_routers_and_what_goes_from_one_tier_too():
    node = Node()
    space = node.open()
    replicas = [node.store(space, name, parent) for name, parent in ((b"b", b"a"), (b"c", b"b"), (b"x", b""))]
    replicas.append(node.store(space, b"y", b"x", NVME))
    for replica in replicas:
        node.discard(replica)
    stored = {"type": "BlockStored", "token_ids": [], "block_size": 16, "lora_id": None, "lora_name": None}
    assert router_events(node) == [
        {**stored, "block_hashes": [key(b"b"), key(b"c")], "parent_block_hash": key(b"a"), "medium": "CPU"},
        {**stored, "block_hashes": [key(b"x")], "parent_block_hash": None, "medium": "CPU"},
        {**stored, "block_hashes": [key(b"y")], "parent_block_hash": key(b"x"), "medium": "STORAGE"},
        {"type": "BlockRemoved", "block_hashes": [key(b"b"), key(b"c"), key(b"x")], "medium": "CPU"},
        {"type": "BlockRemoved", "block_hashes": [key(b"y")], "medium": "STORAGE"},
    ]


def test_parts_of_a_block_are_groups_for_routers():
    node = Node()
    space = node.open(parts=2)
    for part in (0, 1):
        node.store(space, part_key(key(b"b"), part), part_key(key(b"a"), part))
    found = [(event["block_hashes"], event["parent_block_hash"], event["group_idx"]) for event in router_events(node)]
    assert found == [([key(b"b")], key(b"a"), 0), ([key(b"b")], key(b"a"), 1)]


@pytest.mark.parametrize("seed", range(20))
def test_routers_are_told_of_each_block_just_once_whatever_happens_while_all_is_published(seed, monkeypatch):
    monkeypatch.setattr(zmq_events, "BATCH_EVENTS", 2)
    monkeypatch.setattr(zmq_events, "LINGER_S", 0)
    random = Random(seed)
    node = Node(entries=random.choice([4, 64, 1024]))
    spaces = [node.open("a"), node.open("p", parts=2), node.open("a", BLUE)]
    messages: list[bytes] = []
    publisher = publisher_of(node)
    publisher._publisher = SimpleNamespace(send_multipart=lambda frames: messages.append(frames[2]))

    async def scenario() -> None:
        for _ in range(30):
            _change(random, node, spaces)
        task = asyncio.ensure_future(publisher._publish())
        for _ in range(400):
            for _ in range(random.choice([0, 1, 6])):
                _change(random, node, spaces)
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(scenario())
    number_of = {"CPU": DRAM, "STORAGE": NVME}
    known = _as_counted(messages)
    there = {(place[1], place[2][:16], place[2][16:]) for place in node.blocks(RED)}
    assert {(number_of[medium], *name) for medium, *name in known} == there


def _as_counted(messages: Sequence[bytes]) -> set[tuple[str, bytes, bytes]]:
    """What a router knows. A block that it is told of twice would stay for ever where stores are counted."""
    known: set[tuple[str, bytes, bytes]] = set()
    for message in messages:
        _, events, rank = msgspec.msgpack.decode(message)
        assert rank is None
        for event in events:
            if event["type"] == "AllBlocksCleared":
                known.clear()
                continue
            part = event["group_idx"].to_bytes(2, "little") if "group_idx" in event else b""
            names = {(event["medium"], digest, part) for digest in event["block_hashes"]}
            if event["type"] == "BlockStored":
                assert not names & known
                known |= names
            else:
                known -= names
    return known


def publisher_of(node: Node, listen: str = "127.0.0.1:1") -> ZmqPublisher:
    store: Any = node
    return ZmqPublisher(store, "red", listen, "kv")


def test_what_is_kept_for_replays_is_bounded_in_batches_and_bytes(monkeypatch):
    publisher = publisher_of(Node())
    publisher._publisher = SimpleNamespace(send_multipart=lambda frames: None)
    monkeypatch.setattr(zmq_events, "KEPT_BATCHES", 5)
    for _ in range(9):
        publisher._send_events([{"type": "AllBlocksCleared"}])
    assert [sequence for sequence, _ in publisher._kept] == [4, 5, 6, 7, 8]
    monkeypatch.setattr(zmq_events, "KEPT_BYTES", 2 * len(publisher._kept[0][1]))
    publisher._send_events([{"type": "AllBlocksCleared"}])
    assert [sequence for sequence, _ in publisher._kept] == [8, 9]


def test_without_pyzmq_and_at_a_port_that_is_taken_the_node_does_not_start(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="and the port after"):
            publisher_of(Node(), f"127.0.0.1:{taken.getsockname()[1]}").start()
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"cairn-kv\[zmq\]"):
        publisher_of(Node()).start()


def test_a_router_that_asks_for_what_is_not_kept_any_more_has_all_told_anew_but_not_too_often(monkeypatch):
    monkeypatch.setattr(zmq_events, "KEPT_BATCHES", 1)
    monkeypatch.setattr(zmq_events, "LINGER_S", 0)
    node = Node()
    space = node.open()
    publisher = publisher_of(node)
    messages: list[bytes] = []
    answers: list[tuple[bytes, ...]] = []

    async def scenario() -> None:
        requests: asyncio.Queue[list[bytes]] = asyncio.Queue()

        async def send_multipart(frames: tuple[bytes, ...]) -> None:
            answers.append(frames)

        async def ask(start: int) -> None:
            requests.put_nowait([b"router", b"", start.to_bytes(8, "big")])
            for _ in range(20):
                await asyncio.sleep(0)

        publisher._publisher = SimpleNamespace(send_multipart=lambda frames: messages.append(frames[2]))
        publisher._replays = SimpleNamespace(recv_multipart=requests.get, send_multipart=send_multipart)
        running = asyncio.ensure_future(publisher.run())
        for name in (b"a", b"b"):
            node.store(space, name)
            for _ in range(20):
                await asyncio.sleep(0)
        assert len(messages) == 3
        await ask(2)
        assert [frames[3] for frames in answers] == [(2).to_bytes(8, "big"), zmq_events.END]
        await ask(0)
        assert len(messages) == 3
        publisher._told_all_at -= zmq_events.ANEW_S
        await ask(0)
        assert len(messages) == 5
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    assert _as_counted(messages[:3]) == _as_counted(messages[3:]) != set()
    assert not node.events._watchers
