"""Drive a table of two tiers through moves, slabs set apart and restarts, and compare it with dicts and sets."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.check import check
from kvstore.holds import Holds
from kvstore.table import BlockTable, Move, Replica, TierShape
from kvstore.types import DRAM, NVME, BlockKey, Cause, Change, GroupKey, Slot, State, TierName
from tests.model.test_table_model import chain_of

SLAB_BYTES = {DRAM: 4096, NVME: 12_288}
STRIDES = {  # bytes of a block: of its slot
    DRAM: {1000: 1024, 1300: 1344, 2000: 2048},
    NVME: {1000: 4096, 1300: 4096, 2000: 6144},
}
SLABS = 4
SLABS_MOST = 5
EPOCH = 1000  # generations of one start
STATES = {State.ALLOCATED: "allocated", State.WRITTEN: "written", State.EVICTED: "gone", State.FREE: "gone"}

PROFILES = {
    # name: (examples, steps, derandomized)
    "mutant": (140, 40, True),
    "ci": (150, 50, False),
    "long": (5000, 80, False),
}

Place = tuple[str, int]
"""Tenant and number of a namespace."""

places = st.sampled_from([("red", 1), ("red", 3), ("blue", 5)])
prompts = st.tuples(st.integers(1, 4), st.integers(0, 2)).map(lambda ab: [0] * ab[0] + [1] * ab[1])
tiers = st.sampled_from([DRAM, NVME])
sizes = st.sampled_from([1000, 1300, 2000])
which = st.integers(0, 63)  # one of those there are, modulo their number
befallen = st.sampled_from(["", "held", "pinned", "used"])  # the parent of what goes next


@dataclass(eq=False)
class Block:
    tier: TierName
    place: Place
    key: BlockKey
    parent: BlockKey | None
    size: int
    replica: Replica
    slot: Slot
    last_use: int
    state: str = "allocated"
    holders: int = 1
    soft_pins: int = 0
    hits: int = 0

    @property
    def group(self) -> GroupKey:
        return GroupKey(self.place[0], STRIDES[self.tier][self.size])


@dataclass(eq=False)
class Slab:
    """A `group` of None is spare; whose it was stays."""

    tenant: str | None = None
    group: GroupKey | None = None
    is_apart: bool = False
    given_out: list[tuple[int, int, int]] = field(default_factory=list)  # (start, end, generation), ever


@dataclass
class Counted:
    """Stands for the holds: each replica as often as the model says that it is held, but for its moves."""

    blocks: list[Block]
    moving: list[Block]

    def held(self) -> Iterator[Replica]:
        for block in self.blocks:
            yield from [block.replica] * (block.holders - self.moving.count(block))


class TiersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.new_table()
        self.blocks: list[Block] = []  # that have a slot
        self.slabs: dict[TierName, dict[int, Slab]] = {DRAM: {}, NVME: {}}
        self.moves: list[tuple[Move, Block]] = []
        self.readers: list[Block] = []  # each holds once
        self.uses = 0
        self.epoch = 0

    # Both sides.

    def new_table(self) -> None:
        shapes = {DRAM: TierShape(SLAB_BYTES[DRAM]), NVME: TierShape(SLAB_BYTES[NVME], "", lambda s: STRIDES[NVME][s])}
        self.table = BlockTable(shapes)

    @initialize(stored=st.lists(st.tuples(tiers, places, prompts, sizes), max_size=8), forked=prompts)
    def start(self, stored: list[tuple[TierName, Place, list[int], int]], forked: list[int]) -> None:
        for tier in (DRAM, NVME):
            for _ in range(SLABS):
                self.grow(tier)
        for last in (0, 1):  # what goes first has a sibling
            self.store(DRAM, ("red", 1), [*forked, last], 1000)
        for tier, place, prompt, size in stored:
            self.store(tier, place, prompt, size)

    def find(self, tier: TierName, place: Place, key: BlockKey | None) -> Block | None:
        found = (block for block in self.blocks if (block.tier, block.place, block.key) == (tier, place, key))
        return next((block for block in found if block.state != "gone"), None)

    def children(self, block: Block) -> list[Block]:
        return [
            other
            for other in self.blocks
            if (other.tier, other.place, other.parent) == (block.tier, block.place, block.key) and other.state != "gone"
        ]

    def pick(self, found: list[Block], number: int) -> Block:
        return found[number % len(found)]

    def among(self, *states: str) -> list[Block]:
        return [block for block in self.blocks if block.state in states]

    def loose(self) -> list[Block]:
        """Written, and nobody holds them."""
        return [block for block in self.among("written") if not block.holders]

    def events(self) -> list[tuple[Change, Replica, Cause | None]]:
        return [tuple(event) for event in self.table.take_changes()]  # type: ignore[misc]

    def used_by(self, tier: TierName, slab_id: int) -> list[Slot]:
        """Slots of a slab that are somebody's."""
        mine = [block.slot for block in self.blocks if (block.tier, block.slot.slab_id) == (tier, slab_id)]
        moving = [move.target for move, block in self.moves if (block.tier, move.target.slab_id) == (tier, slab_id)]
        return mine + moving

    def has_room(self, tier: TierName, group: GroupKey) -> bool:
        for slab_id, slab in self.slabs[tier].items():
            if slab.group is None and slab.tenant in (None, group.tenant):
                return True
            slots = SLAB_BYTES[tier] // group.slot_bytes
            if slab.group == group and not slab.is_apart and len(self.used_by(tier, slab_id)) < slots:
                return True
        return False

    def take(self, tier: TierName, group: GroupKey, slot: Slot) -> None:
        """The table gave out a slot: it must be one that it may have, and nobody else's."""
        slab = self.slabs[tier][slot.slab_id]
        start, end = slot.offset, slot.offset + slot.size
        assert slot.tier == tier
        assert slot.size == group.slot_bytes
        assert 0 <= start < end <= SLAB_BYTES[tier]
        assert not slab.is_apart, "a slot of a slab that is set apart"
        assert slab.tenant in (None, group.tenant), "a slab passed from one tenant to another"
        assert slab.group in (None, group), "two classes in one slab"
        for other in self.used_by(tier, slot.slab_id):
            assert end <= other.offset or other.offset + other.size <= start, "slots overlap"
        newest = max((was for low, high, was in slab.given_out if low < end and start < high), default=0)
        assert slot.generation > newest, "a slot was handed out twice"
        slab.given_out.append((start, end, slot.generation))
        slab.tenant, slab.group = str(group.tenant), group

    def vacated(self, tier: TierName, slab_id: int) -> None:
        slab = self.slabs[tier][slab_id]
        if not slab.is_apart and not self.used_by(tier, slab_id):
            slab.group = None

    def use(self, block: Block) -> None:
        self.uses += 1
        block.last_use = self.uses

    def let_go(self, block: Block) -> None:
        block.holders -= 1
        self.drop_if_free(block)

    def drop_if_free(self, block: Block) -> None:
        if block.state == "gone" and not block.holders:
            self.blocks.remove(block)
            self.vacated(block.tier, block.slot.slab_id)

    def remove(self, block: Block) -> None:
        block.state = "gone"
        parent = self.find(block.tier, block.place, block.parent)
        if parent is not None:
            parent.last_use = max(parent.last_use, block.last_use)
            parent.hits = max(parent.hits, block.hits)
        self.drop_if_free(block)

    # Blocks.

    @rule(tier=tiers, place=places, prompt=prompts, size=sizes)
    def store(self, tier: TierName, place: Place, prompt: list[int], size: int) -> None:
        for block in self.allocate(tier, place, prompt, size):
            self.write(block)

    @rule(tier=tiers, place=places, prompt=prompts, size=sizes)
    def begin(self, tier: TierName, place: Place, prompt: list[int], size: int) -> None:
        self.allocate(tier, place, prompt, size)

    def allocate(self, tier: TierName, place: Place, prompt: list[int], size: int) -> list[Block]:
        """What is missing of a chain, as far as there is room."""
        made: list[Block] = []
        space = self.table.space(*place, tier)
        keys = chain_of(place, prompt, 0)
        for parent, key in zip([None, *keys], keys, strict=False):
            if self.find(tier, place, key) is not None:
                continue
            group = GroupKey(place[0], STRIDES[tier][size])
            has_room = self.has_room(tier, group)
            assert self.table.has_room(space, size) == has_room
            replica = self.table.allocate(space, key, parent, size)
            assert (replica is not None) == has_room
            if replica is None:
                break
            self.take(tier, group, replica.slot)
            self.uses += 1
            made.append(Block(tier, place, key, parent, size, replica, replica.slot, self.uses))
            self.blocks.append(made[-1])
        return made

    @precondition(lambda self: self.among("allocated"))
    @rule(number=which)
    def commit(self, number: int) -> None:
        self.write(self.pick(self.among("allocated"), number))

    def write(self, block: Block) -> None:
        self.table.commit(block.replica, block.size)
        assert self.events() == [(Change.COMMITTED, block.replica, None)]
        block.state = "written"
        self.use(block)
        self.let_go(block)

    @precondition(lambda self: self.among("allocated"))
    @rule(number=which)
    def abort(self, number: int) -> None:
        """Its writer lets go some other time."""
        block = self.pick(self.among("allocated"), number)
        self.table.abort(block.replica, Cause.ABORTED)
        assert self.events() == [(Change.REMOVED, block.replica, Cause.ABORTED)]
        self.readers.append(block)
        self.remove(block)

    @precondition(lambda self: self.among("written"))
    @rule(number=which)
    def read(self, number: int) -> None:
        """One, or with it the block before it after that."""
        block = self.pick(self.among("written"), number)
        self.touch(block)
        above = self.find(block.tier, block.place, block.parent)
        if number % 2 and above is not None and above.state == "written":
            self.touch(above)

    def touch(self, block: Block) -> None:
        self.table.use(block.replica)
        block.hits += 1
        self.use(block)

    @precondition(lambda self: self.among("written"))
    @rule(number=which)
    def hold(self, number: int) -> None:
        """Moving or not."""
        block = self.pick(self.among("written"), number)
        self.table.hold(block.replica)
        block.holders += 1
        self.readers.append(block)

    @precondition(lambda self: self.readers)
    @rule(number=which)
    def release(self, number: int) -> None:
        block = self.readers.pop(number % len(self.readers))
        self.table.let_go(block.replica)
        self.let_go(block)

    def pin(self, number: int, *, pin: bool) -> None:
        block = self.pick(self.among("written"), number)
        step = 1 if pin else -min(block.soft_pins, 1)
        if step:
            self.table.soft_pin(block.replica, step)
            block.soft_pins += step

    @precondition(lambda self: self.among("written"))
    @rule(number=which)
    def discard(self, number: int) -> None:
        """Held, moving, with children or not."""
        self.delete(self.pick(self.among("written"), number))

    def delete(self, block: Block) -> None:
        self.table.discard(block.replica, Cause.DELETED)
        assert self.events() == [(Change.REMOVED, block.replica, Cause.DELETED)]
        self.remove(block)

    # What goes next.

    def coldest(self) -> Block | None:
        candidates = (block for block in self.loose() if block.tier == DRAM and not self.children(block))
        return min(candidates, key=lambda block: (block.soft_pins > 0, block.last_use), default=None)

    def coldest_chain(self, most_bytes: int) -> list[Block]:
        coldest = self.coldest()
        if coldest is None:
            return []
        found = [coldest]
        while sum(block.size for block in found) < most_bytes:
            above = self.find(DRAM, coldest.place, found[-1].parent)
            if above is None or above not in self.loose() or self.children(above) != [found[-1]]:
                break
            if above.last_use > coldest.last_use or (above.soft_pins > 0) != (coldest.soft_pins > 0):
                break
            found.append(above)
        return found

    @rule(most_bytes=st.sampled_from([1, 1001, 2500, 9999]), pinned=which, above=befallen)
    def evict_a_chain(self, most_bytes: int, pinned: int, above: str) -> None:
        """As a store into a lower tier does: hold all, then let go and evict one by one."""
        if self.among("written"):
            self.pin(pinned, pin=bool(pinned % 2))
        coldest = self.coldest()
        parent = coldest and self.find(DRAM, coldest.place, coldest.parent)
        if parent is not None and parent.state == "written":
            number = self.among("written").index(parent)
            if above == "held":
                self.hold(number)
            elif above == "pinned":
                self.pin(number, pin=True)
            elif above == "used":
                self.touch(parent)
        chain = self.coldest_chain(most_bytes)
        replicas = self.table.coldest_chain(DRAM, most_bytes)
        assert replicas == [block.replica for block in chain]
        for replica in replicas:
            self.table.hold(replica)
        for block in chain:
            self.table.let_go(block.replica)
            self.table.evict(block.replica, Cause.DEMOTED)
            self.remove(block)
        assert self.events() == [(Change.REMOVED, replica, Cause.DEMOTED) for replica in replicas]

    # Moves.

    @precondition(lambda self: self.loose())
    @rule(number=which, meanwhile=st.sampled_from(["deleted", "held", "pinned", "used"]))
    def move(self, number: int, meanwhile: str) -> None:
        """From begin to end, and something happens to the block between."""
        block = self.begin_move(number)
        if block is None:
            return
        if meanwhile == "deleted":
            self.delete(block)
        elif meanwhile == "used":
            self.touch(block)
        elif meanwhile == "pinned":
            self.table.soft_pin(block.replica, +1)
            block.soft_pins += 1
        else:
            self.table.hold(block.replica)
            block.holders += 1
            self.readers.append(block)
        self.end_move(len(self.moves) - 1, is_copied=True)

    @precondition(lambda self: self.loose())
    @rule(number=which)
    def start_to_move(self, number: int) -> None:
        self.begin_move(number)

    def begin_move(self, number: int) -> Block | None:
        block = self.pick(self.loose(), number)
        has_room = self.has_room(block.tier, block.group)
        move = self.table.begin_move(block.replica)
        assert (move is not None) == has_room
        if move is not None:
            self.take(block.tier, block.group, move.target)
            block.holders += 1
            self.moves.append((move, block))
        return block if move is not None else None

    @precondition(lambda self: self.among("written"))
    @rule(number=which)
    def begin_move_of_what_is_held(self, number: int) -> None:
        block = self.pick(self.among("written"), number)
        if block.holders:
            with pytest.raises(AssertionError):
                self.table.begin_move(block.replica)

    @precondition(lambda self: self.moves)
    @rule(number=which, is_copied=st.booleans())
    def end_a_move(self, number: int, is_copied: bool) -> None:
        self.end_move(number, is_copied=is_copied)

    def end_move(self, number: int, *, is_copied: bool) -> None:
        move, block = self.moves.pop(number % len(self.moves))
        old, target, before = block.slot, move.target, block.replica.version
        is_moved = is_copied and block.state == "written" and block.holders == 1
        assert self.table.end_move(move, is_copied=is_copied) == is_moved
        if is_moved:
            block.slot = target
            assert self.events() == [(Change.MOVED, block.replica, None)]
            assert block.replica.version > before
        self.let_go(block)
        for slab_id in {old.slab_id, target.slab_id}:
            self.vacated(block.tier, slab_id)

    # Slabs.

    @rule(tier=tiers)
    def grow(self, tier: TierName) -> None:
        if len(self.slabs[tier]) < SLABS_MOST:
            slab = self.table.tiers[tier].pool.grow()
            assert slab.slab_id not in self.slabs[tier]
            self.slabs[tier][slab.slab_id] = Slab()

    @rule(tier=tiers)
    def give_back_memory(self, tier: TierName) -> None:
        pool = self.table.tiers[tier].pool
        spare = {slab.slab_id for slab in pool.spare()}
        assert spare == {slab_id for slab_id, slab in self.slabs[tier].items() if slab.group is None}
        if len(self.slabs[tier]) > SLABS and spare:
            pool.remove(pool.slabs[min(spare)])
            del self.slabs[tier][min(spare)]

    @rule(tier=tiers, number=which)
    def set_apart(self, tier: TierName, number: int) -> None:
        found = [slab_id for slab_id, slab in self.slabs[tier].items() if slab.group is not None and not slab.is_apart]
        if found:
            slab_id = found[number % len(found)]
            self.table.tiers[tier].pool.set_apart(self.table.tiers[tier].pool.slabs[slab_id])
            self.slabs[tier][slab_id].is_apart = True

    @rule(tier=tiers, number=which, again=st.booleans())
    def empty_a_slab(self, tier: TierName, number: int, again: bool) -> None:
        """As a slab is given back: apart, block by block, whatever is put meanwhile."""
        found = [slab_id for slab_id, slab in self.slabs[tier].items() if slab.group is not None and not slab.is_apart]
        if not found:
            return
        slab_id = found[number % len(found)]
        self.set_apart(tier, found.index(slab_id))
        for block in [block for block in self.among("written") if (block.tier, block.slot.slab_id) == (tier, slab_id)]:
            self.delete(block)
            if again:
                self.allocate(tier, block.place, [0, 2], block.size)
        self.nothing_is_wrong()
        self.each_slab_is_whose_it_was()
        self.rejoin(tier, [name for name, slab in self.slabs[tier].items() if slab.is_apart].index(slab_id))

    @rule(tier=tiers, number=which)
    def rejoin(self, tier: TierName, number: int) -> None:
        found = [slab_id for slab_id, slab in self.slabs[tier].items() if slab.is_apart]
        if found:
            slab_id = found[number % len(found)]
            self.table.tiers[tier].pool.rejoin(self.table.tiers[tier].pool.slabs[slab_id])
            self.slabs[tier][slab_id].is_apart = False
            self.vacated(tier, slab_id)

    # Restarts.

    @rule(order=st.randoms(use_true_random=False), discards=st.integers(0, 2), begins=st.integers(0, 2))
    def restart(self, order, discards: int, begins: int) -> None:  # type: ignore[no-untyped-def]
        """What was written to the disk is taken up in any order, while blocks go and others come."""
        self.epoch += EPOCH
        left = [block for block in self.among("written") if block.tier == NVME]
        self.new_table()
        self.blocks, self.moves, self.readers = [], [], []
        self.slabs[DRAM] = {}
        kept = {slab_id: slab for slab_id, slab in self.slabs[NVME].items() if slab.group is not None}
        self.slabs[NVME] = kept
        pool = self.table.tiers[NVME].pool
        for slab_id, slab in kept.items():
            assert slab.group is not None
            pool.restore(slab_id, slab.group, self.epoch)
            slab.is_apart = True
        self.grow(DRAM)
        order.shuffle(left)
        for number, block in enumerate(left):
            self.restore(block)
            if number < discards:
                self.discard(number)
            if number < begins:
                self.allocate(NVME, block.place, [0, 2], block.size)
            self.nothing_is_wrong()
        for slab_id, slab in list(kept.items()):
            pool.restored(pool.slabs[slab_id])
            slab.is_apart = False
            self.vacated(NVME, slab_id)
        self.grow(DRAM)
        self.grow(NVME)

    def restore(self, block: Block) -> None:
        old, slot = block.replica, block.slot
        space = self.table.space(*block.place, NVME)
        slab = self.table.tiers[NVME].pool.slabs[slot.slab_id]
        assert slab.group is not None
        index = slot.offset // slot.size
        replica = Replica(
            *(space, block.key, block.parent, slab, slab.group, index, slot.generation, block.size),
            holders=0,
            state=State.WRITTEN,
        )
        replica.hits = old.hits
        self.table.restore(replica)
        assert self.events() == [(Change.RESTORED, replica, None)]
        assert self.table.readable(space, block.key) is replica
        self.uses += 1
        restored = Block(NVME, block.place, block.key, block.parent, block.size, replica, slot, self.uses)
        restored.state, restored.holders, restored.hits = "written", 0, block.hits
        self.blocks.append(restored)

    # Always.

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert list(check(self.table, cast(Holds, Counted(self.blocks, [block for _, block in self.moves])))) == []
        assert self.events() == []

    @invariant()
    def each_block_is_where_it_was_put(self) -> None:
        for block in self.blocks:
            replica = block.replica
            assert STATES[replica.state] == block.state
            assert replica.slot == block.slot
            assert (replica.holders, replica.soft_pins, replica.hits) == (block.holders, block.soft_pins, block.hits)
        found = {
            (space.tier, (space.tenant, space.number), key): replica
            for space in self.table.spaces()
            for key, replica in space.replicas.items()
        }
        live = [block for block in self.blocks if block.state != "gone"]
        assert found == {(block.tier, block.place, block.key): block.replica for block in live}

    @invariant()
    def each_slab_is_whose_it_was(self) -> None:
        for tier, slabs in self.slabs.items():
            pool = self.table.tiers[tier].pool
            assert pool.slabs.keys() == slabs.keys()
            for slab_id, slab in slabs.items():
                assert pool.slabs[slab_id].group == slab.group
                if slab.group is not None and not slab.is_apart:
                    assert pool.slabs[slab_id].used == len(self.used_by(tier, slab_id))

    @invariant()
    def bytes_are_counted(self) -> None:
        for tier, slabs in self.slabs.items():
            used: dict[str, int] = {}
            for slab_id, slab in slabs.items():
                size = sum(slot.size for slot in self.used_by(tier, slab_id))
                if size:
                    used[str(slab.tenant)] = used.get(str(slab.tenant), 0) + size
            state = self.table.tiers[tier]
            assert {tenant: size for tenant, size in state.tenant_bytes.items() if size} == used
            assert state.used_bytes == sum(used.values())

    @invariant()
    def the_coldest_goes_next(self) -> None:
        coldest = self.coldest()
        assert self.table.coldest(DRAM) is (coldest and coldest.replica)
        assert self.table.coldest(NVME) is None, "blocks of the disk go with their slab"


_examples, _steps, _derandomized = PROFILES[os.environ.get("CAIRN_MODEL_PROFILE", "ci")]

TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(
    max_examples=_examples,
    stateful_step_count=_steps,
    deadline=None,
    derandomize=_derandomized,
    phases=[Phase.generate] if _derandomized else list(Phase),
    suppress_health_check=[HealthCheck.too_slow],
)
