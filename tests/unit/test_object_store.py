"""The object tier: one contract for every kind of bucket, and a bucket that fails, lags, lies and goes away."""

import asyncio
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import compression
from kvstore.copier import Copier, checksum
from kvstore.errors import ConfigError
from kvstore.tiers import object_store
from kvstore.tiers.bucket import RETRY_BURST, RETRY_SHARE, Bucket, Listed, Patience
from kvstore.tiers.object_store import ObjectSpec, ObjectTier, open_bucket
from kvstore.tiers.pack_map import PackMap
from kvstore.tiers.packs import PackedBlock, pack_name, parse_name
from kvstore.tiers.trimming import ORPHAN_S, plan_trim
from tests.faulty_bucket import (
    FaultyBucket,
    Toxic,
    answers,
    cuts,
    fails,
    first,
    flips,
    loses_the_answer,
    never_answers,
    waits,
)

ROOT, OTHER_ROOT = bytes(range(16)), bytes(range(1, 17))
DOWN = OSError("connection reset")
HASTE = Patience(request_s=5.0, backoff_s=0.0001, longest_backoff_s=0.001)

Block = tuple[bytes, bytes | None, int, int, memoryview]


class Hands:
    """A clock, monotonic and of the day, that a test moves."""

    def __init__(self) -> None:
        self.time_s = 1_000_000.0

    def now(self) -> float:
        return self.time_s


class RealClock:
    def now(self) -> float:
        return time.monotonic()


@pytest.fixture(scope="module")
def copier() -> Iterator[Copier]:
    made = Copier(threads=2)
    yield made
    made.close()


def content(number: int, size: int = 3000) -> bytes:
    return Random(number).randbytes(size)


def key(number: int, length: int = 16) -> bytes:
    return number.to_bytes(length, "big")


def block(number: int, size: int = 3000, data: bytes | None = None) -> Block:
    data = content(number, size) if data is None else data
    return key(number), key(number - 1) if number else None, number, checksum(data), memoryview(data)


def blocks(*numbers: int, size: int = 3000) -> list[Block]:
    return [block(number, size) for number in numbers]


async def read(tier: ObjectTier, *numbers: int, size: int = 3000, root: bytes = ROOT) -> list[bytes | None]:
    """What the tier reads of these blocks; what it calls a hit has the checksum that it says."""
    targets = [bytearray(size) for _ in numbers]
    found = await tier.read(
        root, [(key(number), memoryview(target)) for number, target in zip(numbers, targets, strict=True)]
    )
    pairs = list(zip(found, targets, strict=True))
    assert all(digest is None or digest == checksum(target) for digest, target in pairs)
    return [None if digest is None else bytes(target) for digest, target in pairs]


async def names(bucket: Bucket) -> list[str]:
    return sorted([item.name async for page in bucket.listing("v1/", "") for item in page])


class ObjectTierContract:
    """What holds with every kind of bucket. A class that inherits gives `bucket`."""

    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: Bucket, copier: Copier) -> None:
        self.bucket, self.copier = bucket, copier

    def tier(self, node: str = "a", **changed: Any) -> ObjectTier:
        spec = ObjectSpec(**({"node": node, "capacity_bytes": 1 << 30, "refresh_s": 0.0} | changed))
        return ObjectTier(self.bucket, spec, self.copier, clock=RealClock(), wall=time.time, random=Random(node))

    async def replace(self, name: str, body: bytes) -> None:
        """Another object in place of one that is there."""
        await self.bucket.delete(name)
        await self.bucket.put(name, memoryview(body), part_bytes=0)

    async def body(self, name: str) -> bytes:
        return bytes(await self.bucket.get(name, 0, 1 << 30))

    async def pack(self) -> str:
        return next(name for name in await names(self.bucket) if "/p/" in name)

    # The bucket

    def test_an_object_is_never_written_over(self) -> None:
        async def scenario() -> None:
            await self.bucket.put("v1/name", memoryview(b"first"), part_bytes=0)
            with pytest.raises(FileExistsError):
                await self.bucket.put("v1/name", memoryview(b"second"), part_bytes=0)
            assert await self.body("v1/name") == b"first"

        asyncio.run(scenario())

    def test_a_range_may_end_beyond_the_object_or_begin_there(self) -> None:
        async def scenario() -> None:
            await self.bucket.put("v1/name", memoryview(b"0123456789"), part_bytes=0)
            assert await self.bucket.get("v1/name", 2, 5) == b"234"
            assert await self.bucket.get("v1/name", 8, 20) == b"89"
            assert await self.bucket.get("v1/name", 50, 60) == b""
            with pytest.raises(FileNotFoundError):
                await self.bucket.get("v1/416", 0, 5)

        asyncio.run(scenario())

    def test_a_listing_begins_after_a_name_and_keeps_to_its_folder(self) -> None:
        async def scenario() -> None:
            for name in ("v1/a/1", "v1/a/2", "v1/a/3", "v1/ab/4"):
                await self.bucket.put(name, memoryview(b"12345"), part_bytes=0)
            pages = [page async for page in self.bucket.listing("v1/a/", "v1/a/1")]
            found = sorted(item for page in pages for item in page)
            assert [(item.name, item.size_bytes) for item in found] == [("v1/a/2", 5), ("v1/a/3", 5)]
            assert [page async for page in self.bucket.listing("v1/nothing/", "")] in ([], [[]])

        asyncio.run(scenario())

    # The tier

    @pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
    def test_a_block_put_by_one_node_is_got_by_another(self, codec: Any) -> None:
        async def scenario() -> None:
            here, there = self.tier("Node_1.A-b", codec=codec), self.tier("b")
            even = block(7, data=b"all the same" * 250)
            assert await here.write(ROOT, [*blocks(1, 2, 3), even]) == 4
            assert not there.has(ROOT, key(1))
            await there.refresh(ROOT)
            assert there.has(ROOT, key(1))
            assert there.raw_size(ROOT, key(3)) == 3000
            expected = [content(1), content(3), bytes(even[4])]
            assert await read(there, 1, 3, 7) == expected
            assert await read(here, 1, 3, 7) == expected
            assert await there.write(ROOT, blocks(4)) == 1
            await here.refresh(ROOT)
            assert await read(here, 4) == [content(4)]
            assert (there.describe()["compression_ratio"] > 1.2) == (codec != "none")

        asyncio.run(scenario())

    def test_keys_of_parts_and_blocks_of_a_byte_come_back(self) -> None:
        async def scenario() -> None:
            tier = self.tier()
            data = b"\x07"
            parts = [(key(number, 18), key(0, 18), 0, checksum(data), memoryview(data)) for number in (1, 2)]
            assert await tier.write(ROOT, parts) == 2
            target = bytearray(1)
            assert await tier.read(ROOT, [(key(2, 18), memoryview(target))]) == [checksum(data)]
            assert target == data

        asyncio.run(scenario())

    def test_a_pack_in_several_parts_comes_back(self) -> None:
        async def scenario() -> None:
            here, there = self.tier("a", multipart_bytes=6 << 20, part_bytes=5 << 20), self.tier("b")
            size = 3 << 20
            assert await here.write(ROOT, blocks(1, 2, 3, 4, size=size)) == 4
            await there.refresh(ROOT)
            assert await read(there, 4, 1, size=size) == [content(4, size), content(1, size)]

        asyncio.run(scenario())

    def test_what_is_known_to_be_there_is_not_written_again(self) -> None:
        async def scenario() -> None:
            tier = self.tier()
            assert await tier.write(ROOT, blocks(1, 2)) == 2
            assert await tier.write(ROOT, blocks(1, 2, 3, 3)) == 1
            assert await asyncio.gather(tier.write(ROOT, blocks(4, 5)), tier.write(ROOT, blocks(5, 6))) == [2, 1]
            assert tier.describe()["blocks"] == 6

        asyncio.run(scenario())

    def test_neighbours_come_with_one_request(self) -> None:
        async def scenario() -> None:
            tier = self.tier(gap_bytes=4000)
            await tier.write(ROOT, blocks(*range(10)))
            await read(tier, 0, 2, 3)
            assert tier.describe()["requests"]["get"] == 1
            await read(tier, 0, 9)
            assert tier.describe()["requests"]["get"] == 3

        asyncio.run(scenario())

    def test_what_is_unknown_of_another_size_or_of_another_namespace_is_missed(self) -> None:
        async def scenario() -> None:
            tier = self.tier()
            await tier.write(ROOT, blocks(1))
            assert await read(tier, 2, 1) == [None, content(1)]
            assert await read(tier, 1, size=2999) == [None]
            assert await read(tier, 1, root=OTHER_ROOT) == [None]
            tier.forget(ROOT, [key(1)])
            assert await read(tier, 1) == [None]

        asyncio.run(scenario())

    @pytest.mark.parametrize("damage", ["cut to nothing", "cut", "flipped", "gone", "another pack"])
    def test_a_damaged_pack_is_missed_and_not_asked_for_again(self, damage: str) -> None:
        async def scenario() -> None:
            tier = self.tier()
            await tier.write(ROOT, blocks(1))
            name = await self.pack()
            body = await self.body(name)
            if damage == "gone":
                await self.bucket.delete(name)
            else:
                await self.replace(name, {
                    "cut to nothing": b"x",
                    "cut": body[:2000],
                    "flipped": body[:2000] + b"\0\0" + body[2002:],
                    "another pack": body[:16] + content(9) + body[16 + 3000:],
                }[damage])  # fmt: skip
            assert await read(tier, 1) == [None]
            asked = tier.describe()["requests"]["get"]
            assert await read(tier, 1) == [None]
            said = tier.describe()
            assert said["requests"]["get"] == asked == 1
            assert said["damaged"] + said["gone"] == 1
            assert said["state"] == "up"
            assert await tier.write(ROOT, blocks(1)) == 1
            assert await read(tier, 1) == [content(1)]

        asyncio.run(scenario())

    def test_a_damaged_manifest_is_read_once_and_hides_its_pack_only(self) -> None:
        async def scenario() -> None:
            here, there = self.tier("a"), self.tier("b")
            await here.write(ROOT, blocks(1))
            name = (await self.pack()).replace("/p/", "/m/")
            body = await self.body(name)
            await self.replace(name, body[:-1] + bytes([body[-1] ^ 1]))
            await here.write(ROOT, blocks(2))
            for _ in range(2):
                await there.refresh(ROOT)
            assert await read(there, 1, 2) == [None, content(2)]
            said = there.describe()
            assert (said["damaged"], said["requests"]["get"]) == (1, 3)

        asyncio.run(scenario())

    def test_a_namespace_is_deleted_whole_and_no_other(self) -> None:
        async def scenario() -> None:
            here, there = self.tier("a"), self.tier("b")
            await here.write(ROOT, blocks(1))
            await there.write(ROOT, blocks(2))
            await here.write(OTHER_ROOT, blocks(3))
            await here.delete(ROOT)
            assert [parse_name(name).root for name in await names(self.bucket)] == [OTHER_ROOT] * 2
            assert await read(here, 1, 2) == [None, None]
            assert await read(there, 2) == [None]
            assert await read(here, 3, root=OTHER_ROOT) == [content(3)]
            assert await here.write(ROOT, blocks(1)) == 1

        asyncio.run(scenario())

    def test_over_the_capacity_the_packs_not_used_for_longest_go(self) -> None:
        async def scenario() -> None:
            tier = self.tier(capacity_bytes=17_000)
            for number in range(5):
                await tier.write(ROOT, blocks(number))
            await tier.write(OTHER_ROOT, blocks(5))
            assert await read(tier, 0) == [content(0)]
            assert await tier.trim() > 0
            assert await read(tier, 0, 1, 2, 3, 4) == [content(0), None, None, content(3), content(4)]
            assert await read(tier, 5, root=OTHER_ROOT) == [content(5)]
            assert len(await names(self.bucket)) == 8
            assert await tier.trim() == 0

        asyncio.run(scenario())

    def test_nodes_that_trim_at_once_delete_no_more_than_one_would(self) -> None:
        async def scenario() -> None:
            here, there = (self.tier(node, capacity_bytes=17_000) for node in "ab")
            for number in range(6):
                await here.write(ROOT, blocks(number))
            await there.refresh(ROOT)
            await asyncio.gather(here.trim(), there.trim())
            expected = [None, None, *map(content, range(2, 6))]
            assert await read(here, *range(6)) == expected
            assert await read(there, *range(6)) == expected
            assert len(await names(self.bucket)) == 8

        asyncio.run(scenario())

    def test_packs_that_another_node_trimmed_are_forgotten_by_open(self) -> None:
        async def scenario() -> None:
            here, there = self.tier("a", capacity_bytes=100), self.tier("b")
            await here.write(ROOT, blocks(1))
            await there.open(ROOT)
            assert there.has(ROOT, key(1))
            await here.trim()
            await there.open(ROOT)
            assert not there.has(ROOT, key(1))

        asyncio.run(scenario())


class TestMemory(ObjectTierContract):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return open_bucket("memory:///", {})


class TestFolder(ObjectTierContract):
    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        return open_bucket(f"file://{tmp_path}/a bucket", {})


class TestDict(ObjectTierContract):
    """The tests' own bucket keeps the contract too, so what it shows of faults is true of others."""

    @pytest.fixture
    def bucket(self) -> Bucket:
        return FaultyBucket()


# A bucket that fails

Make = Callable[..., ObjectTier]


@pytest.fixture
def bucket() -> FaultyBucket:
    return FaultyBucket()


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def tier(bucket: FaultyBucket, hands: Hands, copier: Copier) -> Make:
    """Makes tiers on one bucket: `tier("b", codec="lz4")`. `lag_s` sets a node's time of day back."""

    def make(node: str = "a", lag_s: float = 0.0, **changed: Any) -> ObjectTier:
        spec = ObjectSpec(**({"node": node, "capacity_bytes": 1 << 30, "refresh_s": 0.0, "patience": HASTE} | changed))
        return ObjectTier(bucket, spec, copier, clock=hands, wall=lambda: hands.time_s - lag_s, random=Random(node))

    return make


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(within())


def test_a_request_that_fails_once_is_repeated(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here, there = tier("a"), tier("b")
        for kind in ("put", "list", "get"):
            bucket.next_up[kind] += [fails(DOWN)]
        assert await here.write(ROOT, blocks(1)) == 1
        await there.refresh(ROOT)
        assert await read(there, 1) == [content(1)]
        assert here.describe()["retries"] + there.describe()["retries"] == 3

    run(scenario)


def test_retries_are_at_most_a_tenth_of_the_requests_and_ten(bucket: FaultyBucket, tier: Make, hands: Hands) -> None:
    async def scenario() -> None:
        here = tier()
        await here.write(ROOT, blocks(1))
        before = here.describe()["retries"]
        for _ in range(300):
            hands.time_s += 120  # the bucket is never away for longer
            bucket.next_up["get"].clear()
            bucket.next_up["get"] += [fails(DOWN)]
            await read(here, 1)
        retries = here.describe()["retries"] - before
        assert RETRY_BURST < retries <= RETRY_BURST + RETRY_SHARE * 302

    run(scenario)


def test_no_request_is_repeated_without_end(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        bucket.cut_off(DOWN)
        with pytest.raises(OSError, match="connection reset"):
            await tier().write(ROOT, blocks(1))
        assert bucket.asked == {"put": 4}

    run(scenario)


def test_a_refusal_for_lack_of_rights_is_not_repeated(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        bucket.cut_off(PermissionError("no"))
        with pytest.raises(PermissionError):
            await tier().write(ROOT, blocks(1))
        assert bucket.asked == {"put": 1}

    run(scenario)


def test_a_bucket_that_is_away_is_left_alone_and_found_again(bucket: FaultyBucket, tier: Make, hands: Hands) -> None:
    async def scenario() -> None:
        here = tier()
        await here.write(ROOT, blocks(1))
        bucket.cut_off(DOWN)
        for _ in range(3):
            assert await read(here, 1) == [None]
        assert here.describe()["state"] == "away"
        assert "connection reset" in here.describe()["reason"]
        assert not here.may_load()
        asked = bucket.asked.total()
        assert await read(here, 1) == [None]
        await here.refresh(ROOT)
        with pytest.raises(OSError, match="away"):
            await here.write(ROOT, blocks(2))
        with pytest.raises(OSError, match="away"):
            await here.trim()
        assert bucket.asked.total() == asked
        assert here.has(ROOT, key(1))
        hands.time_s += 2
        assert here.may_load()
        assert await read(here, 1) == [None]
        assert bucket.asked.total() == asked + 1, "one try, not repeated"
        assert not here.may_load()
        bucket.reconnect()
        hands.time_s += 3
        assert await read(here, 1) == [content(1)]
        assert here.describe()["state"] == "up"
        assert await here.write(ROOT, blocks(2)) == 1

    run(scenario)


def test_one_request_finds_out_whether_the_bucket_is_back(bucket: FaultyBucket, tier: Make, hands: Hands) -> None:
    async def scenario() -> None:
        here = tier()
        await here.write(ROOT, blocks(1))
        bucket.cut_off(DOWN)
        for _ in range(3):
            await read(here, 1)
        bucket.reconnect()
        hands.time_s += 2
        begun, until = asyncio.Event(), asyncio.Event()
        bucket.next_up["get"] += [waits(begun, until)]
        asked = bucket.asked["get"]
        probe = asyncio.create_task(read(here, 1))
        await begun.wait()
        assert await read(here, 1) == [None]
        assert bucket.asked["get"] == asked + 1
        probe.cancel()
        await asyncio.wait([probe])
        assert await read(here, 1) == [content(1)], "a try that was given up leaves room for the next"

    run(scenario)


def test_a_bucket_that_does_not_answer_is_given_up_in_time(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here = tier(patience=replace(HASTE, request_s=0.01))
        await here.write(ROOT, blocks(1))
        for kind in ("put", "get", "list", "delete"):
            bucket.always[kind] = never_answers()
        assert await read(here, 1) == [None]
        await here.refresh(ROOT)
        with pytest.raises(OSError):
            await here.write(ROOT, blocks(2))

    run(scenario)


def test_few_requests_are_sent_at_once(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here = tier(gap_bytes=0, span_bytes=1, reads_at_once=3)
        await here.write(ROOT, blocks(*range(40)))
        assert await read(here, *range(40)) == [content(number) for number in range(40)]
        assert bucket.asked["get"] == 40
        assert bucket.most_at_once <= 3

    run(scenario)


def test_requests_that_wait_for_their_turn_are_not_sent_to_a_bucket_that_is_away(
    bucket: FaultyBucket, tier: Make
) -> None:
    async def scenario() -> None:
        here = tier(gap_bytes=0, span_bytes=1, reads_at_once=40, patience=replace(HASTE, requests_at_once=1))
        await here.write(ROOT, blocks(*range(40)))
        bucket.cut_off(DOWN)
        assert await read(here, *range(40)) == [None] * 40
        assert bucket.asked["get"] < 20

    run(scenario)


# Answers that are wrong


@pytest.mark.parametrize("toxic", [cuts(0), cuts(100), cuts(4500), flips(0), flips(-1), answers(b"\0" * 9000)])
def test_an_answer_that_is_wrong_costs_misses(toxic: Toxic, bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here = tier()
        await here.write(ROOT, blocks(1, 2, 3))
        bucket.next_up["get"] += [toxic]
        found = await read(here, 1, 2, 3)
        assert None in found
        assert all(data in (None, content(number)) for number, data in enumerate(found, 1))

    run(scenario)


def test_blocks_beside_a_damaged_one_are_read(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here = tier()
        await here.write(ROOT, blocks(1, 2, 3))
        bucket.next_up["get"] += [flips(4000)]
        assert await read(here, 1, 2, 3) == [content(1), None, content(3)]
        assert [here.has(ROOT, key(number)) for number in (1, 2, 3)] == [True, False, True]

    run(scenario)


def test_packs_deleted_under_a_reader_are_missed(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here, there = tier("a", capacity_bytes=100), tier("b")
        await here.write(ROOT, blocks(1, 2))
        await there.refresh(ROOT)
        begun, until = asyncio.Event(), asyncio.Event()
        bucket.next_up["get"] += [waits(begun, until)]
        reading = asyncio.create_task(read(there, 1, 2))
        await begun.wait()
        await here.trim()
        until.set()
        assert await reading == [None, None]
        assert there.describe()["gone"] == 1

    run(scenario)


def test_a_stale_listing_costs_misses_until_the_next(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here, there = tier("a"), tier("b")
        await here.write(ROOT, blocks(1))
        bucket.next_up["list"] += [answers([])]
        await there.refresh(ROOT)
        assert await read(there, 1) == [None]
        await there.refresh(ROOT)
        assert await read(there, 1) == [content(1)]

    run(scenario)


def test_a_listing_of_what_is_deleted_meanwhile_is_no_error(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here, there = tier("a"), tier("b")
        await here.write(ROOT, blocks(1))
        old = [page async for page in bucket.listing(f"v1/{ROOT.hex()}/m/", "")]
        await here.delete(ROOT)
        bucket.next_up["list"] += [answers(old)]
        await there.refresh(ROOT)
        assert not there.has(ROOT, key(1))
        assert there.describe()["damaged"] == 0

    run(scenario)


# Writers that are interrupted


def test_a_node_killed_between_pack_and_manifest_leaves_nothing_to_see(
    bucket: FaultyBucket, tier: Make, hands: Hands
) -> None:
    async def scenario() -> None:
        here, there = tier("a"), tier("b")
        begun = asyncio.Event()
        bucket.next_up["put"] += [None, waits(begun, asyncio.Event())]
        writing = asyncio.create_task(here.write(ROOT, blocks(1)))
        await begun.wait()
        writing.cancel()
        await asyncio.wait([writing])
        await here.drain()
        assert [name for name in bucket.objects if "/m/" in name] == []
        await there.refresh(ROOT)
        assert await read(there, 1) == [None]
        bucket.modified = dict.fromkeys(bucket.modified, hands.time_s)
        hands.time_s += ORPHAN_S - 1
        await there.trim()
        assert len(bucket.objects) == 1, "its manifest may be on its way"
        hands.time_s += 2
        await there.trim()
        assert bucket.objects == {}
        assert await here.write(ROOT, blocks(1)) == 1

    run(scenario)


@pytest.mark.parametrize("before", [[], [None]], ids=["pack", "manifest"])
def test_a_put_whose_answer_is_lost_is_done_once(before: list[None], bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here, there = tier("a"), tier("b")
        bucket.next_up["put"] += [*before, loses_the_answer(DOWN)]
        assert await here.write(ROOT, blocks(1)) == 1
        assert len([name for name in bucket.objects if "/m/" in name]) == 1
        await there.refresh(ROOT)
        assert await read(there, 1) == await read(here, 1) == [content(1)]

    run(scenario)


def test_a_manifest_of_another_under_the_same_name_stays_and_the_pack_gets_another_name(
    bucket: FaultyBucket, tier: Make
) -> None:
    async def scenario() -> None:
        here = tier()

        def conflict() -> None:
            name = next(iter(bucket.objects)).replace("/p/", "/m/")
            bucket.objects[name], bucket.modified[name] = b"another's", 0.0

        bucket.next_up["put"] += [None, first(conflict)]
        assert await here.write(ROOT, blocks(1)) == 1
        assert b"another's" in bucket.objects.values()
        there = tier("b")
        await there.refresh(ROOT)
        assert await read(there, 1) == await read(here, 1) == [content(1)]

    run(scenario)


def test_names_that_are_always_taken_are_an_error(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        bucket.always["put"] = fails(FileExistsError("taken"))
        with pytest.raises(FileExistsError):
            await tier().write(ROOT, blocks(1))
        assert bucket.asked["put"] == 3

    run(scenario)


def test_a_pack_that_took_too_long_is_not_made_known(bucket: FaultyBucket, tier: Make, hands: Hands) -> None:
    async def scenario() -> None:
        def late() -> None:
            hands.time_s += 301

        bucket.next_up["put"] += [first(late)]
        with pytest.raises(OSError, match="took so long"):
            await tier().write(ROOT, blocks(1))
        assert [name for name in bucket.objects if "/m/" in name] == []

    run(scenario)


def test_a_cancelled_read_leaves_memory_alone(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here = tier()
        await here.write(ROOT, blocks(1))
        begun, until = asyncio.Event(), asyncio.Event()
        bucket.next_up["get"] += [waits(begun, until)]
        memory = bytearray(b"\xee" * 3000)
        reading = asyncio.create_task(here.read(ROOT, [(key(1), memoryview(memory))]))
        await begun.wait()
        reading.cancel()
        await asyncio.wait([reading])
        until.set()
        assert await read(here, 1) == [content(1)]
        assert memory == b"\xee" * 3000

    run(scenario)


def test_a_write_keeps_nothing_of_the_memory_that_it_was_given(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here = tier()
        memory = bytearray(content(1))
        begun = asyncio.Event()
        bucket.next_up["put"] += [waits(begun, asyncio.Event())]
        view = memoryview(memory)
        writing = asyncio.create_task(here.write(ROOT, [(key(1), None, 0, checksum(view), view)]))
        await begun.wait()
        view[:] = bytes(3000)
        writing.cancel()
        await asyncio.wait([writing])
        del writing
        view.release()
        memory.clear()

    run(scenario)


def test_a_block_that_does_not_have_its_checksum_is_not_stored(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here = tier()
        number, parent, depth, digest, data = block(1)
        assert await here.write(ROOT, [(number, parent, depth, digest ^ 1, data), block(2)]) == 1
        assert await here.write(ROOT, [(key(3), None, 0, 0, data)]) == 0
        assert here.describe()["damaged"] == 2
        assert [here.has(ROOT, key(number)) for number in (1, 2, 3)] == [False, True, False]

    run(scenario)


@pytest.mark.parametrize("bad", [(b"short", None, 0), (b"k" * 16, b"p", 0), (b"k" * 16, None, -1)])
def test_a_block_that_no_pack_can_hold_is_refused(bad: Any, bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError):
            await tier().write(ROOT, [(*bad, checksum(b"x"), memoryview(b"x"))])
        with pytest.raises(ValueError):
            await tier().write(ROOT, [(b"k" * 16, None, 0, checksum(b""), memoryview(b""))])
        assert bucket.asked == {}

    run(scenario)


# News from other nodes


def test_refreshing_is_rate_limited_and_shared(bucket: FaultyBucket, tier: Make, hands: Hands) -> None:
    async def scenario() -> None:
        here = tier(refresh_s=1.0)
        await asyncio.gather(*(here.refresh(ROOT) for _ in range(5)))
        await here.refresh(ROOT)
        assert bucket.asked["list"] == 1
        hands.time_s += 1
        await here.refresh(ROOT)
        assert bucket.asked["list"] == 2

    run(scenario)


def test_a_refresh_that_is_cancelled_or_closed_goes_on_for_nobody(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        here = tier()
        begun, until = asyncio.Event(), asyncio.Event()
        bucket.next_up["list"] += [waits(begun, until)]
        impatient, patient = (asyncio.create_task(here.refresh(ROOT)) for _ in range(2))
        await begun.wait()
        impatient.cancel()
        await asyncio.wait([impatient])
        assert not patient.done()
        until.set()
        await patient
        begun.clear()
        bucket.next_up["list"] += [waits(begun, asyncio.Event())]
        left = asyncio.create_task(here.refresh(ROOT))
        await begun.wait()
        await here.aclose()
        await left
        assert bucket.at_once == 0

    run(scenario)


def test_only_news_are_listed_and_fetched(bucket: FaultyBucket, tier: Make, hands: Hands) -> None:
    async def scenario() -> None:
        here, there = tier("a"), tier("b")
        for number in range(5):
            await here.write(ROOT, blocks(number))
        await there.refresh(ROOT)
        asked = bucket.asked["get"]
        hands.time_s += 3600
        await here.write(ROOT, blocks(5))
        await there.refresh(ROOT)
        assert bucket.asked["get"] == asked + 1
        assert await read(there, 5) == [content(5)]

    run(scenario)


def test_a_node_whose_clock_lags_a_little_is_seen_and_one_far_behind_by_open(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        reader, right, late, far = tier("r"), tier("a"), tier("b", lag_s=300), tier("c", lag_s=3600)
        await right.write(ROOT, blocks(1))
        await reader.refresh(ROOT)
        await late.write(ROOT, blocks(2))
        await far.write(ROOT, blocks(3))
        await reader.refresh(ROOT)
        assert await read(reader, 1, 2, 3) == [content(1), content(2), None]
        await reader.open(ROOT)
        assert await read(reader, 3) == [content(3)]

    run(scenario)


def test_a_node_whose_clock_is_far_ahead_hides_nobody(bucket: FaultyBucket, tier: Make) -> None:
    async def scenario() -> None:
        reader, right, ahead = tier("r"), tier("a"), tier("b", lag_s=-1e9)
        await ahead.write(ROOT, blocks(1))
        await reader.refresh(ROOT)
        await right.write(ROOT, blocks(2))
        await reader.refresh(ROOT)
        assert await read(reader, 1, 2) == [content(1), content(2)]

    run(scenario)


def test_blocks_that_were_compressed_with_what_is_not_installed_here_are_missed(
    bucket: FaultyBucket, tier: Make, monkeypatch: Any
) -> None:
    async def scenario() -> None:
        here = tier("a", codec="lz4")
        await here.write(ROOT, [block(1, data=bytes(3000)), block(2)])
        monkeypatch.setattr(compression, "lz4_block", None)
        there = tier("b")
        await there.refresh(ROOT)
        assert await read(there, 1, 2) == [None, content(2)]
        assert there.describe()["damaged"] == 0
        with pytest.raises(ConfigError, match=r"cairn-kv\[compression\]"):
            tier("c", codec="lz4")

    run(scenario)


# What is known


def packed(number: int, offset: int = 16) -> PackedBlock:
    return PackedBlock(key(number), None, "none", offset, 10, 10, number, 0)


@pytest.mark.parametrize("count", [60_000, 180_000])
def test_a_known_block_takes_at_most_200_bytes(count: int) -> None:
    known = PackMap(1_000_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for start in range(0, count, 1000):
        known.add(ROOT, str(start), 1000, [packed(number) for number in range(start, start + 1000)])
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert known.blocks == count
    assert taken / count <= 200


@pytest.mark.parametrize("goes", ["0", "1"])
def test_of_two_packs_with_the_same_block_one_can_go_without_the_other(goes: str) -> None:
    known = PackMap(10)
    for identifier in ("0", "1"):
        known.add(ROOT, identifier, 7, [packed(5)])
    known.drop(ROOT, goes)
    place = known.find(ROOT, key(5))
    assert (place and place.pack.identifier) == ("1" if goes == "0" else None)


def test_beyond_the_limit_the_packs_that_were_not_used_for_longest_are_forgotten() -> None:
    known = PackMap(10)
    packs = [known.add(ROOT, str(start), 7, map(packed, range(start, start + 4))) for start in (0, 4)]
    known.touch(packs[0], 1.0)
    known.add(ROOT, "8", 7, map(packed, range(8, 12)))
    assert [number for number in range(12) if known.find(ROOT, key(number))] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert (known.blocks, known.packs, known.size_bytes) == (8, 3, 21)


ADD = st.tuples(st.just("add"), st.lists(st.integers(0, 9), max_size=5, unique=True))
STEPS = st.lists(
    st.one_of(
        *(ADD, ADD),
        st.tuples(st.just("forget"), st.lists(st.integers(0, 9), max_size=3)),
        st.tuples(st.sampled_from(["drop", "shed"]), st.integers(0, 9)),
        st.tuples(st.just("drop_root"), st.none()),
    ),
    max_size=20,
)


@given(STEPS)
@settings(max_examples=300)
def test_what_is_known_is_what_a_dict_would_know(steps: list[tuple[str, Any]]) -> None:
    known, model, packs = PackMap(1000), {}, {}
    for turn, (step, what) in enumerate(steps):
        name = str(what)
        if step == "add":
            packs[str(turn)] = known.add(ROOT, str(turn), 1, map(packed, what))
            model |= dict.fromkeys(what, str(turn))
        elif step == "forget":
            known.forget(ROOT, map(key, what))
            model = {number: pack for number, pack in model.items() if number not in what}
        elif step == "drop_root":
            known.drop_root(ROOT)
            model, packs = {}, {}
        elif name in packs:
            if step == "drop":
                known.drop(ROOT, name)
                del packs[name]
            else:
                known.shed(packs[name])
            model = {number: pack for number, pack in model.items() if pack != name}
        found = {number: known.find(ROOT, key(number)) for number in range(10)}
        assert {number: place.pack.identifier for number, place in found.items() if place} == model
        assert (known.blocks, known.packs, known.raw_bytes) == (len(model), len(packs), 10 * len(model))


# Which packs to delete


def test_a_plan_takes_the_oldest_and_counts_what_it_may_not_touch() -> None:
    ids = [f"{number:012x}00000000-n-000000" for number in range(5)]
    listed = [Listed(pack_name(ROOT, name), 100, float(number)) for number, name in enumerate(ids)]
    listed += [Listed(pack_name(ROOT, name).replace("/p/", "/m/"), 9, 0.0) for name in ids[1:]]
    listed += [Listed("v1/readme.txt", 1 << 40, 0.0)]
    plan = plan_trim(listed, {(ROOT, ids[1]): 50.0}, now_s=60.0, capacity_bytes=400)
    assert plan.victims == [(ROOT, ids[2]), (ROOT, ids[3])]
    assert plan.orphans == []
    assert plan_trim(listed, {}, now_s=60.0, capacity_bytes=500).victims == []
    later = plan_trim(listed, {}, now_s=2e5, capacity_bytes=500)
    assert later.orphans == [pack_name(ROOT, ids[0])]


def test_without_a_limit_nothing_goes_but_what_dead_nodes_left(bucket: FaultyBucket, tier: Make, hands: Hands) -> None:
    async def scenario() -> None:
        here = tier(capacity_bytes=0)
        await here.write(ROOT, blocks(1))
        bucket.objects[pack_name(ROOT, "0" * 20 + "-dead-000000")] = b"orphan"
        bucket.modified = dict.fromkeys(bucket.objects, hands.time_s)
        hands.time_s += ORPHAN_S + 1
        assert await here.trim() == 0
        assert await read(here, 1) == [content(1)]
        assert len(bucket.objects) == 2

    run(scenario)


def test_nodes_that_share_a_name_and_a_moment_do_not_share_packs(bucket: FaultyBucket, copier: Copier) -> None:
    async def scenario() -> None:
        spec = ObjectSpec(node="node", capacity_bytes=0, refresh_s=0.0)
        here, there = (
            ObjectTier(bucket, spec, copier, clock=Hands(), wall=lambda: 5.0, random=Random(seed)) for seed in (1, 2)
        )
        await here.write(ROOT, blocks(1))
        await there.write(ROOT, blocks(2))
        await here.refresh(ROOT)
        assert await read(here, 1, 2) == [content(1), content(2)]

    run(scenario)


# Settings


def test_without_its_package_object_storage_names_the_extra(monkeypatch: Any) -> None:
    monkeypatch.setattr(object_store, "obstore", None)
    with pytest.raises(ConfigError, match=r"cairn-kv\[object\]"):
        open_bucket("memory:///", {})


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("ftp://x", {}),
        ("nonsense", {}),
        ("s3://", {}),
        ("s3://bucket", {"no_such_option": "1"}),
        ("file:///tmp", {"region": "x"}),
    ],
)
def test_a_bad_url_or_option_is_a_configuration_error(url: str, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        open_bucket(url, options)


@pytest.mark.parametrize("node", ["", "a b", "a/b", "x" * 65, "-a", "ä"])
def test_a_node_name_that_cannot_be_part_of_a_name_is_refused(node: str) -> None:
    with pytest.raises(ConfigError):
        ObjectSpec(node=node, capacity_bytes=1)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ConfigError):
        ObjectSpec(node="a", capacity_bytes=-1)
