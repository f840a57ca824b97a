"""Size classes, slabs and the pool: whose a slab is, which slot comes next, what a generation says."""

import pytest

from kvstore.errors import ConfigError
from kvstore.slab import SLOT_ALIGN_BYTES, Slab, SlabPool, slot_bytes
from kvstore.types import GroupKey

RED = GroupKey("red", 1024)
RED_LARGE = GroupKey("red", 2048)
BLUE = GroupKey("blue", 1024)
SLAB_BYTES = 4096


def pool_of(slabs: int) -> SlabPool:
    pool = SlabPool(SLAB_BYTES)
    for _ in range(slabs):
        pool.grow()
    return pool


def take(pool: SlabPool, group: GroupKey) -> tuple[Slab, int, int]:
    taken = pool.take(group, object())
    assert taken is not None
    assert list(pool.check()) == []
    return taken


def give_back(pool: SlabPool, taken: tuple[Slab, int, int]) -> None:
    pool.give_back(taken[0], taken[1])
    assert list(pool.check()) == []


class TestSizeClass:
    @pytest.mark.parametrize(
        ("size", "expected"),
        [
            *((1, 64), (64, 64), (65, 128), (1023, 1024), (1024, 1024), (1025, 1088), (1088, 1088)),
            *((2048, 2048), (2049, 2176), (1 << 20, 1 << 20), ((1 << 20) + 1, (1 << 20) + (1 << 16))),
        ],
    )
    def test_is_the_next_of_sixteen_steps_per_doubling(self, size: int, expected: int) -> None:
        assert slot_bytes(size) == expected

    @pytest.mark.parametrize("sizes", [range(1, 70_000), range((1 << 24) - 99, (1 << 24) + 99)], ids=str)
    def test_holds_the_block_wastes_little_and_is_its_own_class(self, sizes: range) -> None:
        before = 0
        for size in sizes:
            found = slot_bytes(size)
            assert size <= found <= max(size + SLOT_ALIGN_BYTES - 1, size * 17 // 16)
            assert found % SLOT_ALIGN_BYTES == 0
            assert slot_bytes(found) == found
            assert found >= before
            before = found

    def test_of_large_blocks_are_few(self) -> None:
        assert len({slot_bytes(size) for size in range((1 << 16) + 1, (1 << 17) + 1)}) == 16

    def test_of_nothing_is_a_mistake(self) -> None:
        with pytest.raises(AssertionError):
            slot_bytes(0)


class TestSlabSize:
    @pytest.mark.parametrize("slab_bytes", [0, -64, 63, 4097, 65 << 20])
    def test_that_is_no_size_class_is_refused(self, slab_bytes: int) -> None:
        with pytest.raises(ConfigError, match="the next size it can have is"):
            SlabPool(slab_bytes)

    @pytest.mark.parametrize("slab_bytes", [64, 4096, 64 << 20, 68 << 20])
    def test_that_is_one_fits_a_block_of_each_size_up_to_it(self, slab_bytes: int) -> None:
        pool = SlabPool(slab_bytes)
        pool.grow()
        for size in (max(slab_bytes // 100, 1), slab_bytes // 2 + 1, slab_bytes - 1, slab_bytes):
            give_back(pool, take(pool, GroupKey("red", slot_bytes(size))))


class TestSlots:
    def test_of_a_new_slab_come_low_offsets_first(self) -> None:
        pool = pool_of(1)
        assert [take(pool, RED)[1] for _ in range(4)] == [0, 1, 2, 3]

    def test_run_out_with_the_slabs(self) -> None:
        pool = pool_of(2)
        taken = [take(pool, RED) for _ in range(8)]
        assert len({(slab.slab_id, index) for slab, index, _ in taken}) == 8
        assert not pool.has_room(RED)
        assert pool.take(RED, object()) is None

    def test_are_full_by_class_not_by_tier(self) -> None:
        pool = pool_of(2)
        take(pool, RED)
        take(pool, RED_LARGE)
        assert pool.has_room(RED)
        assert pool.has_room(RED_LARGE)
        assert not pool.has_room(BLUE)

    def test_used_again_have_another_generation(self) -> None:
        pool = pool_of(1)
        take(pool, RED)
        seen = set()
        for _ in range(5):
            again = take(pool, RED)
            assert (again[1], again[2]) not in seen
            seen.add((again[1], again[2]))
            give_back(pool, again)

    def test_of_a_slab_cut_anew_have_a_generation_above_all_before(self) -> None:
        pool = pool_of(1)
        newest = 0
        for group in (RED, RED_LARGE, RED, RED_LARGE):
            taken = [take(pool, group) for _ in range(SLAB_BYTES // group.slot_bytes)]
            assert min(generation for _, _, generation in taken) > newest
            newest = max(generation for _, _, generation in taken)
            for slot in taken:
                give_back(pool, slot)

    def test_given_back_twice_are_a_mistake(self) -> None:
        pool = pool_of(1)
        kept, twice = take(pool, RED), take(pool, RED)
        give_back(pool, twice)
        with pytest.raises(AssertionError, match="given back once"):
            pool.give_back(twice[0], twice[1])
        assert kept[0].occupants[kept[1]] is not None

    def test_are_taken_at_the_same_speed_from_many_slabs(self) -> None:
        """Dictionaries that are emptied from the front make each look at the first entry slower."""
        pool = pool_of(4000)
        taken = [take_quickly(pool) for _ in range(16_000)]
        for slab, index, _ in taken[::2]:
            pool.give_back(slab, index)
        again = [take_quickly(pool) for _ in range(8000)]
        assert len({(slab.slab_id, index) for slab, index, _ in again}) == 8000
        assert list(pool.check()) == []


def take_quickly(pool: SlabPool) -> tuple[Slab, int, int]:
    taken = pool.take(RED, pool)
    assert taken is not None
    return taken


class TestSpareSlab:
    def test_is_one_whose_last_slot_was_given_back(self) -> None:
        pool = pool_of(1)
        first, second = take(pool, RED), take(pool, RED)
        give_back(pool, first)
        assert list(pool.spare()) == []
        give_back(pool, second)
        assert [slab.slab_id for slab in pool.spare()] == [first[0].slab_id]
        assert not pool.has_slabs(RED)
        assert list(pool.groups()) == []

    def test_may_serve_another_class_of_its_tenant(self) -> None:
        pool = pool_of(1)
        give_back(pool, take(pool, RED))
        assert pool.has_room(RED_LARGE)
        take(pool, RED_LARGE)

    def test_never_serves_another_tenant(self) -> None:
        pool = pool_of(1)
        slab, *_ = taken = take(pool, RED)
        give_back(pool, taken)
        assert not pool.has_room(BLUE)
        assert pool.take(BLUE, object()) is None
        assert pool.dirty("blue") is slab
        assert pool.dirty("red") is None
        with pytest.raises(AssertionError, match="never passes to another tenant"):
            slab.cut(BLUE, SLAB_BYTES)

    def test_of_the_same_tenant_is_taken_before_one_that_nobody_used(self) -> None:
        pool = pool_of(2)
        mine, *_ = taken = take(pool, RED)
        give_back(pool, taken)
        assert take(pool, RED_LARGE)[0] is mine

    def test_that_nobody_used_is_dirty_for_nobody(self) -> None:
        assert pool_of(1).dirty("red") is None

    def test_goes_and_its_id_does_not_come_back(self) -> None:
        pool = pool_of(1)
        slab, *_ = taken = take(pool, RED)
        give_back(pool, taken)
        pool.remove(slab)
        assert pool.capacity_bytes == 0
        assert pool.dirty("blue") is None
        assert pool.grow().slab_id != slab.slab_id
        assert pool.capacity_bytes == SLAB_BYTES

    def test_is_not_one_in_use(self) -> None:
        pool = pool_of(1)
        slab, *_ = take(pool, RED)
        with pytest.raises(KeyError):
            pool.remove(slab)


class TestApart:
    def test_gives_out_no_slot_until_it_rejoins(self) -> None:
        pool = pool_of(1)
        slab, *_ = take(pool, RED)
        pool.set_apart(slab)
        assert not pool.has_room(RED)
        assert pool.take(RED, object()) is None
        pool.rejoin(slab)
        assert take(pool, RED)[0] is slab

    def test_is_spare_only_when_it_rejoins(self) -> None:
        pool = pool_of(1)
        taken = take(pool, RED)
        pool.set_apart(taken[0])
        give_back(pool, taken)
        assert list(pool.spare()) == []
        assert list(pool.in_use()) == [taken[0]]
        pool.rejoin(taken[0])
        assert list(pool.spare()) == [taken[0]]
        assert list(pool.check()) == []


class TestRestored:
    def test_free_slots_are_known_at_the_end_only(self) -> None:
        pool = SlabPool(SLAB_BYTES)
        slab = pool.restore(7, RED, 500)
        assert not pool.has_room(RED)
        slab.restore(2, object(), 9)
        pool.restored(slab)
        assert {take(pool, RED)[1] for _ in range(3)} == {0, 1, 3}
        assert not pool.has_room(RED)

    def test_generations_go_on_above_those_of_earlier_starts(self) -> None:
        pool = SlabPool(SLAB_BYTES)
        slab = pool.restore(7, RED, 500)
        slab.restore(2, object(), 9)
        pool.restored(slab)
        pool.give_back(slab, 2)
        generations = {index: generation for _, index, generation in (take(pool, RED) for _ in range(4))}
        assert generations[2] > 9
        assert min(generations[index] for index in (0, 1, 3)) > 500

    def test_later_slabs_have_greater_ids_whatever_the_order(self) -> None:
        pool = SlabPool(SLAB_BYTES)
        for slab_id in (9, 3, 7):
            pool.restore(slab_id, RED, 1)
        assert pool.grow().slab_id == 10

    def test_one_without_blocks_is_its_tenants_spare(self) -> None:
        pool = SlabPool(SLAB_BYTES)
        pool.restored(pool.restore(7, RED, 1))
        assert [slab.owner for slab in pool.spare()] == ["red"]
        assert pool.dirty("blue") is not None
        assert pool.take(BLUE, object()) is None
