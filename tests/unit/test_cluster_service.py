"""A node's part in the cluster while others hang, refuse, come and go, or ask for what they may not have."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore.cluster.members import Member, View
from kvstore.cluster.probing import REPORT_AGAIN_S
from kvstore.cluster.replicating import FILL_S, FILLS_AT_ONCE, ROUND_S
from kvstore.cluster.replication import MOST_SUGGESTIONS
from kvstore.cluster.routes import LEAST_WINDOW_BYTES, Routes
from kvstore.cluster.service import DISCARD_STEP_BLOCKS
from kvstore.errors import ConnectFailed, Forbidden, InvalidRequest, Rejected
from kvstore.message import Message
from kvstore.packed import pack_keys
from kvstore.types import Owner
from kvstore.wire_cluster import Announce, Announced, Discard, Fill, Filled, Nodes, Replicate, Whereabouts
from server.session import Session
from tests.peer_doubles import Chain, Make, Node, clusters, nothing


@pytest.fixture
def make() -> Iterator[Make]:
    with clusters() as made:
        yield made


async def answered(node: Node, request: Message) -> Message:
    answer = node.cluster.handle(request)
    return answer if isinstance(answer, Message) else await answer


def session_of(node: Node, *, may_write: bool = True, is_peer: bool = False) -> Session:
    tenant = replace(node.store.tenants["red"], may_write=may_write)
    return Session(
        *(node.store.store, node.store.upkeep, tenant, Owner(9), "peer" if is_peer else "tcp"),
        cluster=node.cluster,
        is_peer=is_peer,
    )


class TestComparing:
    def test_who_gives_up_a_comparison_harms_neither_the_telling_nor_others_who_compare(self, make):
        node = make()
        chain = Chain(node, 64)
        goes_on = asyncio.Event()

        node.peers.before_ask = lambda member, message: goes_on.wait()
        node.store.put(chain.space, chain.keys[:8], chain.blocks[:8])
        impatient = node.store.start(node.cluster.telling.compare(0.5))
        patient = node.store.start(node.cluster.telling.compare(60.0))
        node.store.advance(1.0)

        assert node.store.finish(impatient) > 0
        goes_on.set()
        assert node.store.finish(patient) == 0
        assert node.crashes == []


class TestMembers:
    def test_a_member_that_refuses_is_read_from_all_the_same(self, make):
        node = make()
        chain = Chain(node, 64)

        def refuse(member: Member, message: Message) -> Message | None:
            if isinstance(message, Announce):
                raise Rejected("no member as seen from here")
            return None

        node.peers.reply = refuse
        node.store.put(chain.space, chain.keys[:8], chain.blocks[:8])
        node.store.run(node.cluster.telling.compare(0.5))

        assert node.cluster.routes.may_ask("b")
        assert node.cluster.routes.may_ask("c")
        node.peers.reply = lambda member, message: None
        node.store.advance(2.0)

    def test_a_member_that_objected_to_its_death_is_not_reported_again_at_once(self, make):
        node = make()
        reports: list[tuple[str, int]] = []

        async def report_dead(name: str, epoch: int) -> None:
            reports.append((name, epoch))

        node.cluster.probing._coordinator.report_dead = report_dead
        error = ConnectFailed("refused")
        error.__cause__ = ConnectionRefusedError()
        member = node.others["b"]
        for _ in range(5):
            node.store.call(lambda: node.cluster.probing.failed(member, error))
        assert reports == [("b", 1)]

        node.store.advance(REPORT_AGAIN_S)
        node.store.call(lambda: node.cluster.probing.failed(member, error))
        assert reports == [("b", 1)] * 2

    def test_who_does_not_answer_gets_no_copies(self, make):
        node = make()
        room = Announced(1, 1, room=(1 << 30, 1 << 30))
        for name in ("b", "c"):
            node.cluster._heard(name, room)
        node.cluster.routes.failed("b", "hangs")

        assert list(node.cluster._spots(is_to_stay=True)) == ["c"]


class TestTurns:
    def test_all_for_whom_there_is_room_go_when_one_ends(self, make):
        node = make()
        routes = Routes("a", {}, node.store.loop)
        routes.changed(View(1, node.others))
        running: list[int] = []

        async def read(number: int, size: int, seconds: float) -> None:
            async with routes.turn("b", size) as turn:
                running.append(number)
                await asyncio.sleep(seconds)
                turn.is_good = True

        async def all_at_once() -> None:
            large = [asyncio.ensure_future(read(number, LEAST_WINDOW_BYTES, 1.0)) for number in (0, 1)]
            await asyncio.sleep(0.5)
            small = [asyncio.ensure_future(read(number, 1000, 1.0)) for number in (2, 3, 4)]
            await asyncio.sleep(0.1)
            assert running == [0, 1]
            await asyncio.sleep(0.6)
            assert running == [0, 1, 2, 3, 4]
            await asyncio.gather(*large, *small)

        node.store.run(all_at_once())


class TestWhatOthersAsk:
    def test_a_node_that_is_emptied_takes_no_blocks(self, make):
        node = make()
        chain = Chain(node, 2, "b")
        fill = Fill(*(1, "red", "of 1", chain.space.namespace, pack_keys(chain.keys), b"", 0, 0, "b", 1000, True))
        node.cluster.me = Member(name="a", epoch=1, address="", condition="draining")

        with pytest.raises(Rejected):
            node.store.run(answered(node, fill))

    def test_all_of_a_namespace_is_deleted_in_small_steps(self, make):
        node = make()
        chain = Chain(node, 3 * DISCARD_STEP_BLOCKS, size=64)
        node.store.put(chain.space, chain.keys, chain.blocks)
        left: list[int] = []

        async def discard() -> Message:
            deleting = asyncio.ensure_future(answered(node, Discard(1, "red", chain.space.namespace, b"", whole=True)))
            while not deleting.done():
                left.append(len(chain.space.dram.replicas))
                await asyncio.sleep(0)
            return await deleting

        reply = node.store.run(discard())

        assert reply.blocks == len(chain.keys)
        assert len(set(left)) >= 3


class TestWhoMay:
    @pytest.mark.parametrize("is_peer", [False, True])
    def test_who_may_only_read_makes_no_copies(self, make, is_peer):
        node = make()
        chain = Chain(node, 2)
        node.store.put(chain.space, chain.keys, chain.blocks)
        session = session_of(node, may_write=False, is_peer=is_peer)

        with pytest.raises(Forbidden):
            node.store.run(session.ask(Replicate(1, chain.space.number, b"", True, 3)))

    def test_another_node_has_no_third_one_asked(self, make):
        node = make()
        chain = Chain(node, 2, "b")
        session = session_of(node, may_write=False, is_peer=True)

        for request in (Nodes(1), Whereabouts(1, chain.space.number, pack_keys(chain.keys))):
            with pytest.raises(InvalidRequest):
                node.store.run(session.ask(request))


class TestHot:
    def test_copies_that_nobody_takes_do_not_pile_up(self, make):
        node = make()
        chain = Chain(node, 64)
        node.store.put(chain.space, chain.keys[:8], chain.blocks[:8])

        async def hang(member: Member, message: Message) -> None:
            if isinstance(message, Fill):
                await asyncio.sleep(FILL_S)

        def reply(member: Member, message: Message) -> Message | None:
            return Filled(1, 0) if isinstance(message, Fill) else None

        node.store.advance(0.1)
        node.peers.reply = reply
        node.peers.before_ask = hang
        before = len(node.cluster._tasks._tasks)
        replicas = [chain.space.dram.replicas[key] for key in chain.keys[:8]]
        for _ in range(int(3 * FILL_S / ROUND_S)):
            for name in ("b", "c"):
                node.cluster._heard(name, Announced(1, 1, room=(1 << 30, 1 << 30)))
            for _ in range(2000):
                node.cluster.was_read(replicas)
            node.store.advance(ROUND_S)

        assert len(node.cluster._tasks._tasks) - before <= MOST_SUGGESTIONS + FILLS_AT_ONCE
        node.peers.before_ask = nothing
