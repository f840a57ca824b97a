"""Blocks of other nodes, whatever those say and whenever they fall silent: no wrong bytes, nothing kept too long."""

import asyncio
from collections.abc import Iterator
from typing import cast

import pytest

from engine_client import peer_reads
from engine_client.steps import Call, Link
from kvstore import wire
from kvstore.cluster import pulling
from kvstore.cluster.members import Member
from kvstore.cluster.naming import PARTITIONS, partition_of
from kvstore.cluster.pulling import LEAST_LEASE_S, READ_S
from kvstore.cluster.window import Window
from kvstore.copier import checksum
from kvstore.errors import DeadlineExceeded, InvalidRequest, ProtocolError
from kvstore.message import Message
from kvstore.packed import pack_keys
from kvstore.prefix import Namespace, part_key
from kvstore.types import DRAM, NVME, BlockKey, Cause
from kvstore.wire_cluster import Announce, Announced, Fill, Locate, Located
from tests.peer_doubles import SIZE, Chain, Make, Node, clusters
from tests.tiered_store import OWNER, block_of, chain_keys


class OneByOne(Window):
    def may_start(self, size_bytes: int, now: float) -> bool:
        return not self.in_flight_bytes


@pytest.fixture
def make() -> Iterator[Make]:
    with clusters() as made:
        yield made


class TestPull:
    def test_what_others_have_comes_here_and_their_leases_end(self, make):
        node = make()
        chain = Chain(node, 5, "b")

        assert node.get(chain.space, chain.keys) == chain.blocks
        assert node.peers.leases == []
        assert not node.cluster.pulling._offers

    def test_a_holder_with_other_bytes_than_its_checksum_costs_another_read_and_no_wrong_bytes(self, make):
        node = make()
        chain = Chain(node, 3, "b", "c")
        good = dict(node.peers.blocks["c"])

        async def damage(member: Member) -> None:
            if member.name == "b":
                node.peers.blocks["b"] = {key: block[::-1] for key, block in good.items()}

        node.peers.before_read = damage

        assert node.get(chain.space, chain.keys) == chain.blocks
        assert node.peers.leases == []

    def test_a_run_in_the_middle_of_a_chain_hangs_on_what_is_before_it(self, make):
        node = make()
        chain = Chain(node, 6, "b")
        assert node.get(chain.space, chain.keys[:2]) == chain.blocks[:2]

        lease = node.store.run(
            node.store.store.reads.acquire(
                *(OWNER, chain.space, chain.keys[2:]),
                lease_s=1.0,
                wait_s=0.0,
                layers=0,
                load_s=1.0,
                parent=chain.keys[1],
            )
        )

        assert node.store.read(lease) == chain.blocks[2:]
        assert chain.space.dram.replicas[chain.keys[2]].parent == chain.keys[1]

    def test_who_lacks_the_first_blocks_of_a_run_is_asked_for_those_after_them(self, make):
        node = make()
        chain = Chain(node, 4, "b")
        node.has("c", chain.space, chain.keys[:1], chain.blocks[:1])
        del node.peers.blocks["b"][chain.keys[0]]

        assert node.get(chain.space, chain.keys) == chain.blocks

    def test_a_block_that_its_only_holder_has_damaged_is_read_once(self, make):
        node = make()
        chain = Chain(node, 2, "b")
        damaged = chain.keys[1]
        reads: list[int] = []
        read = node.cluster.pulling.read

        async def counted(space, blocks):
            reads.append(len(blocks))
            return await read(space, blocks)

        async def damage(member: Member) -> None:
            node.peers.blocks["b"][damaged] = block_of(damaged, SIZE, version=1)

        node.cluster.pulling.read = counted
        node.peers.before_read = damage

        assert node.get(chain.space, chain.keys) == chain.blocks[:1]
        assert reads == [2]

    def test_the_beginning_of_a_prefix_stays_while_its_end_comes(self, make):
        node = make()
        chain = Chain(node, 4, "b")
        assert node.get(chain.space, chain.keys[:2]) == chain.blocks[:2]
        other = Chain(node, 1, "c", start=40)
        assert node.get(other.space, other.keys) == other.blocks

        async def make_room(member: Member) -> None:
            coldest = node.store.table.coldest(DRAM)
            node.store.store.discard(other.space, [coldest.key], Cause.WATERMARK, DRAM)

        node.peers.before_read = make_room

        assert node.get(chain.space, chain.keys) == chain.blocks

    def test_what_one_reader_found_stays_when_another_who_found_it_too_goes(self, make):
        node = make()
        chain = Chain(node, 2, "b")
        find = node.cluster.pulling.find
        findings = [node.store.run(find(chain.space, chain.keys, None, node.store.loop.seconds + 9.0)) for _ in "12"]

        findings[1].close()
        assert node.cluster.pulling.offer(chain.space, chain.keys[0]) is not None
        findings[0].close()
        assert node.cluster.pulling.offer(chain.space, chain.keys[0]) is None

    def test_what_was_found_is_loaded_though_another_holder_hangs(self, make):
        node = make()
        chain = Chain(node, 4, "b")
        node.has("c", chain.space, chain.keys[:2], chain.blocks[:2])
        node.told("b", chain.space, chain.keys[:2], tiers=0)

        async def hang(member: Member, load_s: float) -> None:
            if member.name == "b":
                await asyncio.sleep(60.0)

        node.peers.before_lease = hang

        assert node.get(chain.space, chain.keys, load_s=0.2) == chain.blocks[:2]


class TestLies:
    def test_a_block_of_no_bytes_is_none(self, make):
        node = make()
        chain = Chain(node, 3, "b")
        node.peers.sizes = lambda sizes: [sizes[0], 0, *sizes[2:]]

        assert node.get(chain.space, chain.keys) == chain.blocks[:1]
        assert node.store.store.promotion.is_idle

    def test_blocks_of_another_size_than_their_namespace_says_are_left_alone(self, make):
        node = make()
        namespace = Namespace(model="m", dtype="u8", layout="x", block_tokens=16, layers=2, block_bytes=SIZE)
        space = node.store.call(lambda: node.store.store.open(node.store.tenants["red"], "sized", namespace))
        keys = chain_keys(space, range(2))
        node.has("b", space, keys, [block_of(key, SIZE) for key in keys])
        node.peers.sizes = lambda sizes: [size - 1 for size in sizes]

        assert node.get(space, keys) == []
        assert node.store.store.promotion.is_idle

    def test_an_answer_with_more_holders_than_it_may_name_makes_no_sense(self, make):
        node = make()
        home = node.cluster._homes.home
        chains = (Chain(node, 2, "b", start=start) for start in range(64))
        chain = next(chain for chain in chains if home(partition_of(chain.space.root, chain.keys[0])) == "b")
        flood = Located(1, ("b",), (b"\0\0\2" * 100_000,), b"\1\0" * 2)
        node.peers.reply = lambda member, message: flood if isinstance(message, Locate) else None

        assert node.get(chain.space, chain.keys) == []

    @pytest.mark.parametrize("reply", [wire.Done(1), Announced(1, 7)])
    def test_an_answer_to_something_else_is_refused(self, reply):
        link = cast(Link, None)
        for operation in (
            peer_reads.about(link, Call(lambda number: Locate(number, b"", b""))),
            peer_reads.hold(link, 1, [], 1.0, 1.0),
            peer_reads.Numbers().of(link, b"", Namespace(model="m", dtype="u8", layout="x", block_tokens=1, layers=1)),
        ):
            call = next(operation)
            assert isinstance(call, Call)
            call.request(1)
            with pytest.raises(ProtocolError):
                operation.send(reply)

    @pytest.mark.parametrize("place", [(PARTITIONS, 0), (-1, 0), (0, 32), (0, -1)])
    def test_a_fill_with_a_place_that_there_is_not_is_refused(self, make, place):
        node = make()
        chain = Chain(node, 2, "b")
        fill = Fill(*(1, "red", "of 1", chain.space.namespace, pack_keys(chain.keys), b"", *place, "b", 1000, True))

        async def filled() -> Message:
            answer = node.cluster.handle(fill)
            return answer if isinstance(answer, Message) else await answer

        with pytest.raises(InvalidRequest):
            node.store.run(filled())


class TestParts:
    def test_a_parent_that_is_no_key_is_refused(self, make):
        node = make()
        space = node.store.open(parts=2)
        keys = chain_keys(space, range(1))

        with pytest.raises(InvalidRequest):
            node.store.run(
                node.store.store.reads.acquire(
                    *(OWNER, space, keys), lease_s=1.0, wait_s=0.0, layers=0, load_s=1.0, parent=BlockKey(b"x")
                )
            )
        with pytest.raises(InvalidRequest):
            node.store.run(node.cluster.pulling.reach(space, keys, BlockKey(b"x")))

    def test_a_parent_that_is_no_key_is_refused_of_who_asks_no_other_node_too(self, make):
        node = make()
        space = node.store.open(parts=2)
        keys = chain_keys(space, range(1))
        acquire = node.store.store.reads.acquire

        with pytest.raises(InvalidRequest):
            node.store.run(
                acquire(
                    *(OWNER, space, keys),
                    lease_s=1.0,
                    wait_s=0.0,
                    layers=0,
                    load_s=1.0,
                    parent=BlockKey(b"x"),
                    alone=True,
                )
            )

    def test_of_many_parts_no_more_are_asked_about_than_can_be_there(self, make):
        node = make()
        space = node.store.open(parts=65_535)
        keys = chain_keys(space, range(4))
        before = len(node.peers.asked)

        assert node.get(space, keys) == []
        assert len(node.peers.asked) - before <= 2 * pulling.PARTS_AT_ONCE

    def test_all_parts_of_a_block_come(self, make):
        node = make()
        parts = pulling.PARTS_AT_ONCE + 1
        space = node.store.open(parts=parts)
        keys = [chain_keys(space, range(2), part) for part in range(parts)]
        for part in range(parts):
            node.has("b", space, keys[part], [block_of(key, 100) for key in keys[part]])

        assert node.get(space, keys[0]) == [block_of(key, 100) for key in keys[0]]
        assert part_key(BlockKey(keys[0][0][:16]), parts - 1) in space.dram.replicas


class TestSilence:
    def test_a_find_ends_when_its_reader_waits_no_more(self, make):
        node = make()
        chain = Chain(node, 3, "b", "c")

        async def hang(member: Member, load_s: float) -> None:
            await asyncio.sleep(60.0)

        node.peers.before_lease = hang
        started = node.store.loop.seconds

        assert node.get(chain.space, chain.keys, load_s=0.1) == []
        assert node.store.loop.seconds - started < 0.3

    def test_a_holder_that_needs_all_the_time_it_was_given_is_not_left_alone(self, make):
        node = make()
        chain = Chain(node, 3, "b")

        async def load(member: Member, load_s: float) -> None:
            await asyncio.sleep(load_s + LEAST_LEASE_S / 4)

        node.peers.before_lease = load

        assert node.get(chain.space, chain.keys, load_s=6.0) == chain.blocks
        assert node.cluster.routes.may_ask("b")

    def test_cancelled_at_any_turn_it_keeps_nothing(self, make):
        node = make()
        chain = Chain(node, 3, "b")
        for turns in range(12):
            node.store.run(node.store.cancelled(node.store.acquire(chain.space, chain.keys), turns))
            node.store.settle()
            node.store.store.end(OWNER)
            node.store.drop_dram(chain.space, chain.keys)

            assert node.peers.leases == [], turns
            assert not node.cluster.pulling._offers

    def test_what_waits_for_its_turn_does_not_wait_for_a_holder_that_failed(self, make):
        node = make(dram=8)
        chain = Chain(node, 4, "b")
        space, blocks = chain.space, chain.blocks

        async def hang(member: Member) -> None:
            await asyncio.sleep(READ_S)
            raise DeadlineExceeded("no answer")

        node.peers.before_read = hang
        node.cluster.routes._paths["b"].window = OneByOne(1, 1)

        async def reads() -> None:
            await asyncio.gather(*(node.cluster.pulling.read(space, [block]) for block in offered))

        finding = node.store.run(node.cluster.pulling.find(space, chain.keys, None, node.store.loop.seconds + 30.0))
        offered = [
            (key, node.cluster.pulling.offer(space, key), memoryview(bytearray(len(block))))
            for key, block in zip(chain.keys, blocks, strict=True)
        ]
        started = node.store.loop.seconds
        node.store.run(reads())
        finding.close()

        assert node.store.loop.seconds - started < READ_S + 1.0

    def test_a_hung_holder_of_some_blocks_does_not_keep_others_of_the_same_job_waiting(self, make):
        node = make()
        chain = Chain(node, 2)
        node.has("b", chain.space, chain.keys[:1], chain.blocks[:1])
        node.has("c", chain.space, chain.keys, chain.blocks)
        node.peers.blocks["c"].pop(chain.keys[0])
        node.told("c", chain.space, chain.keys[:1], tiers=0)

        async def hang(member: Member) -> None:
            if member.name == "b":
                await asyncio.sleep(READ_S)
                raise DeadlineExceeded("no answer")

        node.peers.before_read = hang

        async def read() -> list[int | None]:
            finding = await node.cluster.pulling.find(chain.space, chain.keys, None, node.store.loop.seconds + 9.0)
            offers = [node.cluster.pulling.offer(chain.space, key) for key in chain.keys]
            views = [memoryview(bytearray(SIZE)) for _ in chain.keys]
            reading = asyncio.ensure_future(
                node.cluster.pulling.read(chain.space, list(zip(chain.keys, offers, views, strict=True)))
            )
            await asyncio.wait([reading], timeout=1.0)
            assert node.peers.read_from == ["b", "c"]
            found = await reading
            finding.close()
            return found

        assert node.store.run(read()) == [None, checksum(chain.blocks[1])]

    def test_a_promote_waits_no_longer_than_any_other_reader(self, make):
        node = make()
        chain = Chain(node, 3, "b")

        assert node.store.run(node.store.store.reads.begin(chain.space, chain.keys, None, 1e9)) == 3
        node.store.settle()
        most_s = node.store.limits.wait_max_s
        assert all(lease_s <= most_s + 2 * READ_S for _, lease_s, _ in node.peers.leased)


class TestPlaces:
    def test_a_block_has_one_place_in_all_tiers_though_what_was_before_it_is_gone(self, make):
        node = make()
        chain = Chain(node, 4)
        store = node.store
        store.put(chain.space, chain.keys, chain.blocks)
        store.store.discard(chain.space, chain.keys[:2], Cause.DELETED)
        store.run(store.store.demotion.demote(chain.space, chain.keys[2:], NVME, evict=False))

        for key in chain.keys[2:]:
            places = {(tier.replicas[key].partition, tier.replicas[key].position) for tier in chain.space.spaces}
            assert len(places) == 1
        store.advance(1.0)
        assert store.run(node.cluster.telling.compare(1.0)) == 0

    def test_what_was_here_before_the_cluster_is_announced_too(self, make):
        node = make(is_started=False)
        node.close()
        store = node.store
        chain = Chain(node, 3)
        store.put(chain.space, chain.keys, chain.blocks)
        store.store.listeners.pop()
        for key in chain.keys:
            chain.space.dram.replicas[key].partition = -1

        late = Node(store)
        store.advance(1.0)

        assert [replica.partition >= 0 for replica in chain.space.dram.replicas.values()] == [True] * 3
        assert store.run(late.cluster.telling.compare(1.0)) == 0
        assert sum(len(message.names) for message in late.peers.asked if isinstance(message, Announce)) or (
            late.cluster.directory.blocks
        )
        late.close()
        assert store.table.tiers[DRAM].replicas == 3
