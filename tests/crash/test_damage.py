"""Damage between two starts of a node: what is hurt is a miss, what is not is served, and a reason is given."""

import asyncio
import logging
import os
import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.catalogue import Tenant
from kvstore.diskblock import ALIGN, HEADER_BYTES
from kvstore.errors import ConfigError
from kvstore.fsck import Fsck
from kvstore.ledger import Ledger, records
from kvstore.types import NVME, BlockKey, Cause
from tests.crash.tiered import TENANT, fsck, keys_of, opened

SMALL, LARGE = 8192, 20_000
SMALL_BLOCKS, LARGE_BLOCKS = 13, 4  # 3 and 2 slabs
STRIDE = SMALL + ALIGN
SLAB_BYTES = 64 << 10
SEED = int(os.environ.get("CAIRN_TEST_SEED", "11"))


async def build(folder: Path) -> None:
    async with opened(folder) as node:
        small, large = node.open("small", SMALL), node.open("large", LARGE)
        await node.store_below(small, keys_of(small, 1, SMALL_BLOCKS))
        await node.store_below(large, keys_of(large, 1, LARGE_BLOCKS))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "tier"
    asyncio.run(build(folder))
    return folder


@pytest.fixture
def tier(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "tier")
    return tmp_path / "tier"


def slabs_of(tier: Path, blocks: int) -> list[Path]:
    """The slab files with blocks of that many bytes, in the order in which they were filled."""

    def first_size(path: Path) -> int:
        with path.open("rb") as file:
            page = file.read(HEADER_BYTES)
        return int.from_bytes(page[96:104], "little") if page.startswith(b"CAIRNBLK") else 0

    return [path for path in sorted(tier.glob("slabs/*.slab"), reverse=True) if first_size(path) == blocks]


async def _served(tier: Path, tenant: Tenant, settings: dict[str, str]) -> tuple[int, int]:
    async with opened(tier, tenant=tenant, **settings) as node:
        small, large = node.open("small", SMALL), node.open("large", LARGE)
        found = [
            sum([await node.has(space, key) for key in keys_of(space, 1, blocks)])
            for space, blocks in ((small, SMALL_BLOCKS), (large, LARGE_BLOCKS))
        ]
        later = [await node.has(small, key) for prompt in (3, 5) for key in keys_of(small, prompt, 8)]
        assert node.blocks_on_disk() == sum(found) + sum(later)
        assert await node.store_below(small, keys_of(small, 2, 2)) == 2, "life goes on"
    return found[0], found[1]


def served(tier: Path, tenant: Tenant = TENANT, **settings: str) -> tuple[int, int]:
    """(Small, large) blocks that a node on this folder serves, each of them right; then fsck has nothing to say."""
    found = asyncio.run(_served(tier, tenant, settings))
    assert fsck(tier) == []
    return found


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


ALL = (SMALL_BLOCKS, LARGE_BLOCKS)


def test_without_damage_all_is_served(tier: Path) -> None:
    assert fsck(tier) == []
    assert served(tier) == ALL


# Data.


@pytest.mark.parametrize("trial", range(12))
def test_a_flipped_bit_costs_the_block_that_it_is_in_and_no_other(tier: Path, trial: int) -> None:
    rng = random.Random(f"{SEED}/{trial}")
    slot, offset = rng.randrange(5), rng.choice([rng.randrange(HEADER_BYTES), ALIGN + rng.randrange(SMALL)])
    flip(slabs_of(tier, SMALL)[0], slot * STRIDE + offset, rng.randrange(8))
    (problem,) = fsck(tier)
    assert "1 blocks whose payload is damaged" in problem or "1 records whose slot does not have their block" in problem
    assert f"in slot {slot}" in problem
    assert served(tier) == (SMALL_BLOCKS - 1, LARGE_BLOCKS)


def test_flipped_bits_everywhere_are_all_found(tier: Path) -> None:
    rng = random.Random(SEED)
    for path in tier.glob("slabs/*.slab"):
        for offset in range(0, SLAB_BYTES, ALIGN):
            flip(path, offset + rng.randrange(HEADER_BYTES if offset % STRIDE == 0 else ALIGN), rng.randrange(8))
    small, large = served(tier)
    assert (small, large) == (0, 0)


def test_a_truncated_slab_costs_its_blocks(tier: Path) -> None:
    os.truncate(slabs_of(tier, SMALL)[1], SLAB_BYTES // 2)
    assert any("is no whole slab" in problem for problem in fsck(tier))
    assert served(tier) == (SMALL_BLOCKS - 5, LARGE_BLOCKS)


def test_two_swapped_slabs_cost_the_blocks_of_both(tier: Path) -> None:
    first, second = slabs_of(tier, SMALL)[:2]
    first.rename(tier / "beside")
    second.rename(first)
    (tier / "beside").rename(second)
    assert len(fsck(tier)) == 2
    assert served(tier) == (SMALL_BLOCKS - 10, LARGE_BLOCKS)


def test_two_slabs_of_different_classes_swapped_cost_the_blocks_of_both(tier: Path) -> None:
    first, second = slabs_of(tier, SMALL)[0], slabs_of(tier, LARGE)[0]
    first.rename(tier / "beside")
    second.rename(first)
    (tier / "beside").rename(second)
    assert served(tier) == (SMALL_BLOCKS - 5, LARGE_BLOCKS - 2)


def test_a_deleted_slab_costs_its_blocks(tier: Path) -> None:
    slabs_of(tier, SMALL)[0].unlink()
    (problem,) = fsck(tier)
    assert "its file is gone" in problem
    assert served(tier) == (SMALL_BLOCKS - 5, LARGE_BLOCKS)


def test_all_slabs_deleted_leave_an_empty_tier(tier: Path) -> None:
    shutil.rmtree(tier / "slabs")
    assert served(tier) == (0, 0)


def test_a_copy_of_an_older_slab_costs_at_most_what_it_lacks(tier: Path, tmp_path: Path) -> None:
    """A restored backup: its blocks are whole, and not those that the ledger means."""
    old = slabs_of(tier, SMALL)[0]
    shutil.copy(old, tmp_path / "old")

    async def live() -> None:
        async with opened(tier) as node:
            space = node.open("small", SMALL)
            node.upkeep.set_tier(NVME, high_watermark=0.3, low_watermark=0.1)
            await node.upkeep.relieve_disk()
            await node.store_below(space, keys_of(space, 5, 8))

    asyncio.run(live())
    shutil.copy(tmp_path / "old", old)
    served(tier)


def test_stray_files_beside_the_slabs_are_removed(tier: Path) -> None:
    (tier / "slabs" / "prepared.new").write_bytes(bytes(ALIGN))
    (tier / "slabs" / "0000000099.slab").write_bytes(bytes(ALIGN))
    assert len(fsck(tier)) == 2
    assert served(tier) == ALL


# The ledger.


@pytest.mark.parametrize("repaired", [False, True])
def test_a_lost_ledger_is_made_anew_from_the_headers(tier: Path, repaired: bool) -> None:
    shutil.rmtree(tier / "ledger")
    if repaired:
        assert fsck(tier, repair=True)[0] == "there is no ledger"
        assert fsck(tier) == []
    assert served(tier) == ALL


def test_a_lost_ledger_of_a_slab_that_was_cut_anew_is_made_from_the_later_headers(tier: Path) -> None:
    """Headers of the earlier cut are still there, between those of the later."""

    async def cut_anew() -> None:
        async with opened(tier) as node:
            small, large = node.open("small", SMALL), node.open("large", LARGE)
            node.store.discard(small, keys_of(small, 1, SMALL_BLOCKS), Cause.DELETED, NVME)
            for prompt in range(3, 6):
                await node.store_below(large, keys_of(large, prompt, 4))

    async def served_of_large() -> int:
        async with opened(tier) as node:
            large = node.open("large", LARGE)
            return sum([await node.has(large, key) for prompt in (1, 3, 4, 5) for key in keys_of(large, prompt, 4)])

    asyncio.run(cut_anew())
    shutil.rmtree(tier / "ledger")
    assert asyncio.run(served_of_large()) == 16


@pytest.mark.parametrize("kind", ["sst", "log"])
@pytest.mark.parametrize("trial", range(4))
def test_a_damaged_ledger_is_set_aside_and_made_anew_or_has_lost_nothing(tier: Path, kind: str, trial: int) -> None:
    rng = random.Random(f"{SEED}/{trial}")
    asyncio.run(crash_with_a_log(tier))
    path = max(tier.glob(f"ledger/*.{kind}"), key=lambda path: path.stat().st_size)
    for _ in range(8):
        flip(path, rng.randrange(path.stat().st_size), rng.randrange(8))
    small, large = served(tier)
    if kind == "sst":
        assert (small, large) == ALL
    else:
        assert large == LARGE_BLOCKS


async def crash_with_a_log(tier: Path) -> None:
    """As a killed node leaves it: some records are in the log only."""
    image = tier.with_name("image")
    async with opened(tier) as node:
        small = node.open("small", SMALL)
        await node.store_below(small, keys_of(small, 3, 4))
        await node.flush(sync=True)
        shutil.copytree(tier, image)
    shutil.rmtree(tier)
    image.rename(tier)


@pytest.mark.parametrize("name", ["CURRENT", "MANIFEST", "FORMAT", "CLEAN"])
def test_a_ledger_without_one_of_its_files_loses_nothing_or_is_refused(tier: Path, name: str) -> None:
    for path in tier.glob(f"ledger/{name}*"):
        path.unlink()
    if name == "FORMAT":
        with pytest.raises(ConfigError, match="is not a ledger"):
            served(tier)
    else:
        assert served(tier) == ALL


def test_a_ledger_of_another_format_version_is_refused_with_the_reason(tier: Path) -> None:
    (tier / "ledger" / "FORMAT").write_text("cairn ledger 2\n")
    with pytest.raises(ConfigError, match="format version 2 is not 1"):
        served(tier)
    with pytest.raises(ConfigError, match="format version 2 is not 1"):
        fsck(tier, repair=True)


def test_a_ledger_that_another_process_has_is_refused_with_the_reason(tier: Path) -> None:
    async def both() -> None:
        async with opened(tier):
            with pytest.raises(ConfigError, match="in use by another process"):
                fsck(tier, repair=True)
            with pytest.raises(ConfigError, match="in use by another process"):
                async with opened(tier):
                    pass

    asyncio.run(both())
    assert served(tier) == ALL


def test_of_two_records_of_a_slot_the_later_generation_counts(tier: Path) -> None:
    """The ledger was not told in time that the earlier block went."""
    with closing(Ledger(tier / "ledger")) as ledger:
        one = next(record for rows in ledger.scan() for record in records(rows))
        ledger.apply([one._replace(key=BlockKey(bytes(16)), generation=one.generation - 1, last_use_ms=0)])
    (problem,) = fsck(tier)
    assert "1 records in a slot that is another's" in problem
    assert served(tier) == ALL


# Namespaces and tenants.


@pytest.mark.parametrize("left", [b"", b"[{", b"{}", b'[{"number": 1}]', None])
def test_lost_or_damaged_namespaces_cost_all_blocks_with_the_reason(
    tier: Path, left: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tier / "namespaces.json"
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    assert any("lost or damaged" in problem for problem in fsck(tier))
    with caplog.at_level(logging.INFO):
        assert served(tier) == (0, 0)
    assert "nobody knows whose" in caplog.text or "makes no sense" in caplog.text


def test_another_secret_of_the_tenant_is_a_reason_to_ignore_its_blocks(
    tier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Tenant(TENANT.name, secret="another", admin=True)
    with caplog.at_level(logging.INFO):
        assert served(tier, other) == (0, 0)
    assert "the secret of tenant default has changed" in caplog.text
    assert "17 of namespaces that are unknown or changed" in caplog.text


def test_blocks_of_a_tenant_that_is_not_configured_any_more_are_ignored(
    tier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert served(tier, Tenant("stranger", secret=TENANT.secret)) == (0, 0)
    assert "tenant default is not configured any more" in caplog.text


def test_a_namespace_that_is_ignored_keeps_its_number_for_itself(tier: Path) -> None:
    """Else its records would be those of a stranger if the node was killed before they were deleted."""

    async def numbers() -> set[int]:
        async with opened(tier, tenant=Tenant(TENANT.name, secret="another")) as node:
            return {node.open(name, SMALL).number for name in ("one", "two")}

    assert min(asyncio.run(numbers())) > 2


# Configuration.


@pytest.mark.parametrize("capacity", ["256KiB", "384KiB", "1MiB", "4MiB"])
def test_another_capacity_keeps_what_has_room_within_it(tier: Path, capacity: str) -> None:
    slabs = {"256KiB": 4, "384KiB": 6}.get(capacity)
    small, large = served(tier, capacity=capacity)
    if slabs is None or slabs >= 5:
        assert (small, large) == ALL
    else:
        assert small + large >= SMALL_BLOCKS + LARGE_BLOCKS - 5
    assert sum(1 for _ in tier.glob("slabs/*.slab")) == (slabs or {"1MiB": 16, "4MiB": 64}[capacity])


def test_another_slab_size_is_refused_with_the_reason_and_nothing_is_touched(tier: Path) -> None:
    with pytest.raises(ConfigError, match="laid out with slabs of 65536 bytes, not 131072"):
        served(tier, slab="128KiB")
    assert served(tier) == ALL


# Repair.


def test_repair_mends_each_kind_of_damage_and_counts_it(tier: Path) -> None:
    small, large = slabs_of(tier, SMALL), slabs_of(tier, LARGE)
    flip(small[0], ALIGN)
    flip(small[1], 16)
    large[0].unlink()
    (tier / "slabs" / "notes.txt").write_text("hello")
    _misplace_a_record(tier / "ledger")
    look = Fsck(tier, deep=True, repair=True)
    problems = list(look.run())
    assert [count for count in look.counts.problems.values() if not count] == []
    assert set(look.counts.problems) == {
        "stray files",
        "blocks whose payload is damaged",
        "records whose slot does not have their block",
        "records in a slot that is another's",
        "records that do not fit into their slab",
        "records of namespaces that nobody knows",
    }
    assert look.counts.mended == look.counts.problems.total() >= len(problems)
    assert fsck(tier) == []
    assert served(tier) == (SMALL_BLOCKS - 2, LARGE_BLOCKS - 2)


def _misplace_a_record(path: Path) -> None:
    """Records for a slot that is taken, for one beyond the slab, and of a namespace that is none."""
    keys = [BlockKey(bytes(15) + bytes([last])) for last in range(3)]
    with closing(Ledger(path)) as ledger:
        one = next(record for rows in ledger.scan() for record in records(rows) if record.size == SMALL)
        ledger.apply(
            [
                one._replace(key=keys[0], generation=0),
                one._replace(key=keys[1], slot_index=77),
                one._replace(key=keys[2], number=99),
            ]
        )
