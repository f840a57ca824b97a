"""Drive the block table and the holds through random interleavings, and compare them with dicts and sets."""

import os
from hashlib import blake2b
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.check import check
from kvstore.errors import InvalidRequest, Rejected, StaleLease, TierFull
from kvstore.holds import Grant, Holds, Lease, Pin
from kvstore.table import BlockTable, Space, TierShape
from kvstore.types import DRAM, BlockKey, Cause, Change, GroupKey, Owner, Placement, State
from tests.model.oracle import CLASSES, SLAB_BYTES, Block, Model, Place, Slab

SLABS = 5
SLABS_MOST = 6
HOLDS_PER_CLIENT = 3
PINS_PER_TENANT = 8
STATES = {State.ALLOCATED: "allocated", State.WRITTEN: "written", State.EVICTED: "gone", State.FREE: "gone"}
PRESSURE = {Cause.PRESSURE, Cause.WATERMARK, Cause.QUOTA, Cause.SLAB_TAKEN, Cause.SHRUNK}

PROFILES = {
    # name: (examples, steps, derandomized)
    "mutant": (150, 40, True),
    "ci": (350, 50, False),
    "long": (5000, 80, False),
}

places = st.sampled_from([("red", 1), ("red", 2), ("blue", 3), ("blue", 4)])
prompts = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda ab: [0] * ab[0] + [1] * ab[1])
parts = st.integers(0, 1)
sizes = st.sampled_from(sorted(CLASSES))
owners = st.sampled_from([Owner(1), Owner(2)])
which = st.integers(0, 63)  # one of those there are, modulo their number
ttls = st.integers(1, 9)
seldom = st.integers(0, 3).map(lambda number: number == 3)  # what takes much away


class Held(NamedTuple):
    """A lease, grant or pin, and the blocks that the model has for it."""

    hold: Any
    blocks: list[Block]


def chain_of(place: Place, prompt: list[int], part: int) -> list[BlockKey]:
    """Keys that share what their prompts share. Namespaces of even number have two parts."""
    key = repr(place).encode()
    keys = []
    for token in prompt:
        key = blake2b(key + bytes([token]), digest_size=16).digest()
        keys.append(BlockKey(key + part.to_bytes(2, "little") if place[1] % 2 == 0 else key))
    return keys


class TableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable({DRAM: TierShape(SLAB_BYTES)})
        self.holds = Holds(self.table, HOLDS_PER_CLIENT, PINS_PER_TENANT)
        self.tier = self.table.tiers[DRAM]
        self.model = Model()
        self.leases: dict[int, Held] = {}
        self.grants: dict[int, Held] = {}
        self.pins: dict[int, Held] = {}
        self.known_ids: list[int] = []
        self.prompts: dict[tuple[Place, bytes], tuple[list[int], int]] = {}
        self.overdue: set[int] = set()
        self.expires: dict[int, int] = {}
        self.removed: list[tuple[Block, Cause]] = []
        self.last_version = 0
        self.now = 0

    # Both sides.

    def space(self, place: Place) -> Space:
        return self.table.space(*place, DRAM)

    def settle(self) -> None:
        """Take up what the table says went; whatever went under pressure must have been free to go."""
        self.removed = []
        by_replica = {block.replica: block for block in self.model.blocks.values()}
        for event in self.table.take_changes():
            block = by_replica[event.replica]
            if event.change is not Change.REMOVED:
                continue
            assert event.cause is not None
            if event.cause in PRESSURE:
                assert self.model.is_evictable(block), "evicted what is held, or before its child"
            assert event.replica.slot == block.slot, "its slot cannot be told any more"
            self.model.remove(block)
            self.removed.append((block, event.cause))

    def pick(self, found: dict[int, Held], number: int) -> Held:
        return found[sorted(found)[number % len(found)]]

    def is_full(self, owner: Owner) -> bool:
        mine = [held for held in (*self.leases.values(), *self.grants.values()) if held.hold.owner == owner]
        assert self.holds.held_by(owner) == len(mine)
        return len(mine) >= HOLDS_PER_CLIENT

    def keep(self, found: dict[int, Held], hold_id: int, hold: Lease | Grant | Pin, blocks: list[Block]) -> None:
        assert hold_id not in self.known_ids, "an id was used twice"
        self.known_ids.append(hold_id)
        found[hold_id] = Held(hold, blocks)
        self.expires[hold_id] = self.now + round(hold.expires_at - self.now)

    def drop(self, found: dict[int, Held], hold_id: int) -> None:
        for block in found.pop(hold_id).blocks:
            self.model.let_go(block)

    @initialize(stored=st.lists(st.tuples(places, prompts, parts, sizes), max_size=8))
    def start(self, stored: list[tuple[Place, list[int], int, int]]) -> None:
        for _ in range(SLABS):
            self.grow()
        for place, prompt, part, size in stored:
            self.store(place, prompt, part, size)

    # Writers.

    @rule(place=places, prompt=prompts, part=parts, size=sizes)
    def store(self, place: Place, prompt: list[int], part: int, size: int) -> None:
        """Put what is missing of a chain, room or not, and commit it at once."""
        grant = self.offer(Owner(9), place, prompt, part=part, start=0, size=size, ttl=1, insist=True)
        if grant is not None:
            self.finish(grant)

    @rule(place=places, prompt=prompts, part=parts, start=st.integers(0, 2), size=sizes,
          owner=owners, ttl=ttls, insist=st.booleans())  # fmt: skip
    def put(self, place: Place, prompt: list[int], part: int, start: int, size: int,
            owner: Owner, ttl: int, insist: bool) -> None:  # fmt: skip
        if self.is_full(owner):
            with pytest.raises(Rejected):
                self.holds.admit(owner)
        else:
            self.holds.admit(owner)
            self.offer(owner, place, prompt, part=part, start=start, size=size, ttl=ttl, insist=insist)

    def offer(self, owner: Owner, place: Place, prompt: list[int], *,
              part: int, start: int, size: int, ttl: int, insist: bool) -> Grant | None:  # fmt: skip
        """Begin to write a run of a chain, whose parent may be absent; `insist` on making room for it."""
        keys = chain_of(place, prompt, part)
        blocks = []
        for parent, key in list(zip([None, *keys], keys, strict=False))[start:]:
            self.prompts[place, key] = prompt[: keys.index(key) + 1], part
            found = self.model.find(place, key)
            expected = found and (Placement.PRESENT if found.state == "written" else Placement.BUSY)
            assert self.table.placement(self.space(place), key) == expected
            if found is not None:
                continue
            if insist and not self.make_room(place, size):
                break
            block = self.allocate(place, key, parent, size)
            if block is None:
                break
            blocks.append(block)
        if not blocks:
            return None
        grant = self.holds.grant(owner, [block.replica for block in blocks], self.now + ttl)
        self.keep(self.grants, grant.grant_id, grant, blocks)
        return grant

    def allocate(self, place: Place, key: BlockKey, parent: BlockKey | None, size: int) -> Block | None:
        has_room = self.model.has_room((place[0], CLASSES[size]))
        assert self.table.has_room(self.space(place), size) == has_room
        replica = self.table.allocate(self.space(place), key, parent, size)
        assert (replica is not None) == has_room
        if replica is None:
            return None
        self.model.uses += 1
        block = Block(place, key, parent, size, replica, replica.slot, self.model.uses)
        self.model.add(block)
        self.see_version(block)
        return block

    def make_room(self, place: Place, size: int) -> bool:
        ways = self.model.ways_to_make_room((place[0], CLASSES[size]))
        if not ways:
            with pytest.raises(TierFull):
                self.table.make_room(self.space(place), size)
            return False
        self.table.make_room(self.space(place), size)
        self.settle()
        assert {block for block, _ in self.removed} in ways, "made room at the wrong place"
        if not self.model.has_room((place[0], CLASSES[size])):
            slab = self.tier.pool.dirty(place[0])
            assert slab is not None
            self.shrink(slab.slab_id)
            self.grow()
        return True

    def see_version(self, block: Block) -> None:
        assert block.replica.version > self.last_version
        self.last_version = block.replica.version

    @precondition(lambda self: self.grants)
    @rule(number=which, layers=st.integers(0, 3), ttl=ttls)
    def progress(self, number: int, layers: int, ttl: int) -> None:
        """With it comes more time. What ran out keeps its slots: its writer may be writing on."""
        grant, blocks = self.pick(self.grants, number)
        if grant.grant_id in self.overdue:
            with pytest.raises(StaleLease):
                self.holds.granted(grant.owner, grant.grant_id)
            return
        assert self.holds.granted(grant.owner, grant.grant_id) is grant
        for block in blocks:
            if layers < block.replica.layers:
                with pytest.raises(InvalidRequest):
                    self.table.progress(block.replica, layers)
            else:
                self.table.progress(block.replica, layers)
                assert block.replica.layers == layers
        assert {event.change for event in self.table.take_changes()} <= {Change.PROGRESSED}
        self.holds.extend(grant, self.now + ttl)
        self.expires[grant.grant_id] = max(self.expires[grant.grant_id], self.now + ttl)

    @precondition(lambda self: self.grants)
    @rule(number=which)
    def commit(self, number: int) -> None:
        grant = self.pick(self.grants, number).hold
        with pytest.raises(StaleLease):
            self.holds.written(Owner(grant.owner + 1), grant.grant_id)
        if grant.grant_id in self.overdue:
            with pytest.raises(StaleLease):
                self.holds.written(grant.owner, grant.grant_id)
            self.drop(self.grants, grant.grant_id)
        else:
            self.finish(grant)

    def finish(self, grant: Grant) -> None:
        blocks = self.grants[grant.grant_id].blocks
        self.holds.finish(self.holds.written(grant.owner, grant.grant_id), [7] * len(blocks))
        events = self.table.take_changes()
        assert [(event.change, event.replica) for event in events] == [
            (Change.COMMITTED, block.replica) for block in blocks
        ]
        for block in blocks:
            block.state = "written"
            self.model.use(block)
            self.see_version(block)
        self.drop(self.grants, grant.grant_id)

    @precondition(lambda self: self.grants)
    @rule(number=which)
    def give_up(self, number: int) -> None:
        grant, blocks = self.pick(self.grants, number)
        with pytest.raises(StaleLease):
            self.holds.give_up(Owner(grant.owner + 1), grant.grant_id, Cause.ABORTED)
        assert self.holds.give_up(grant.owner, grant.grant_id, Cause.ABORTED)
        self.lose(Cause.ABORTED, [] if grant.grant_id in self.overdue else blocks)
        self.drop(self.grants, grant.grant_id)
        assert not self.holds.give_up(grant.owner, grant.grant_id, Cause.ABORTED)

    def lose(self, cause: Cause, blocks: list[Block]) -> None:
        """The table says of just these blocks that they went for `cause`."""
        self.settle()
        assert self.removed == [(block, cause) for block in blocks]

    # Readers.

    def some_chain(self, number: int, further: int) -> tuple[Place, list[BlockKey]]:
        """The keys up to one of the blocks that can be found, and `further` ones."""
        block = list(self.model.blocks.values())[number % len(self.model.blocks)]
        prompt, part = self.prompts[block.place, block.key]
        return block.place, chain_of(block.place, prompt + [0] * further, part)

    @precondition(lambda self: self.model.blocks)
    @rule(number=which, further=st.integers(0, 2))
    def match(self, number: int, further: int) -> None:
        place, keys = self.some_chain(number, further)
        here = [self.model.readable(place, key) for key in keys]
        matched = self.table.match([self.space(place)], keys)
        prefix = here.index(None) if None in here else len(here)
        if not any(here[prefix:]):
            assert matched == prefix
        if matched:
            last = here[matched - 1]
            assert last is not None
            self.model.use(last)
        self.advance(1)

    @precondition(lambda self: self.model.blocks)
    @rule(number=which)
    def touch(self, number: int) -> None:
        block = list(self.model.blocks.values())[number % len(self.model.blocks)]
        self.table.touch(block.replica)
        self.model.use(block)

    @precondition(lambda self: self.model.blocks)
    @rule(number=which, further=st.integers(0, 2), owner=owners, ttl=ttls, renewed=ttls, partial=st.booleans())
    def lease(self, number: int, further: int, owner: Owner, ttl: int, renewed: int, partial: bool) -> None:
        """Hold the prefix that is here, or is coming."""
        blocks = self.prefix(*self.some_chain(number, further), partial=partial)
        replicas = [block.replica for block in blocks]
        if self.is_full(owner):
            with pytest.raises(Rejected):
                self.holds.lease(owner, replicas, self.now + ttl)
        elif blocks:
            lease = self.holds.lease(owner, replicas, self.now + ttl)
            self.hold(blocks)
            self.keep(self.leases, lease.lease_id, lease, blocks)
            self.extend(lease, renewed)

    def extend(self, lease: Lease, ttl: int) -> None:
        self.holds.renew(lease.owner, lease.lease_id, self.now + ttl)
        self.expires[lease.lease_id] = max(self.expires[lease.lease_id], self.now + ttl)

    def prefix(self, place: Place, keys: list[BlockKey], *, partial: bool = False) -> list[Block]:
        blocks = []
        for key in keys:
            block = self.model.find(place, key)
            if block is None or (block.state != "written" and not partial):
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.holders += 1

    @precondition(lambda self: self.leases)
    @rule(number=which, ttl=ttls)
    def renew(self, number: int, ttl: int) -> None:
        lease = self.pick(self.leases, number).hold
        with pytest.raises(StaleLease):
            self.holds.renew(Owner(lease.owner + 1), lease.lease_id, self.now + 99)
        self.extend(lease, ttl)
        self.advance(1)

    @precondition(lambda self: self.leases)
    @rule(number=which)
    def release(self, number: int) -> None:
        lease = self.pick(self.leases, number).hold
        with pytest.raises(StaleLease):
            self.holds.release(Owner(lease.owner + 1), lease.lease_id)
        assert self.holds.release(lease.owner, lease.lease_id)
        self.drop(self.leases, lease.lease_id)

    @precondition(lambda self: self.known_ids)
    @rule(number=which, owner=owners)
    def release_again(self, number: int, owner: Owner) -> None:
        """What is no lease any more, or never was."""
        hold_id = self.known_ids[number % len(self.known_ids)]
        if hold_id not in self.leases:
            assert not self.holds.release(owner, hold_id)

    # Other nodes.

    @precondition(lambda self: self.model.blocks)
    @rule(number=which, is_copy=st.booleans(), with_chain=st.booleans())
    def mark_copy(self, number: int, is_copy: bool, with_chain: bool) -> None:
        """Held or not, with children or without, twice."""
        place, keys = self.some_chain(number, 0)
        for key in keys if with_chain else keys[-1:]:
            block = self.model.find(place, key)
            if block is not None:
                self.table.mark_copy(block.replica, is_copy=is_copy)
                self.table.mark_copy(block.replica, is_copy=is_copy)
                block.is_copy = is_copy

    @rule(share=st.sampled_from([0.0, 0.1, 0.4, 1.0]))
    def allow_copies(self, share: float) -> None:
        self.tier.copy_share = self.model.copy_share = share

    # Operators.

    @precondition(lambda self: self.model.blocks)
    @rule(number=which, hard=st.booleans(), ttl=ttls, partial=st.booleans(), nothing=seldom)
    def pin(self, number: int, hard: bool, ttl: int, partial: bool, nothing: bool) -> None:
        """Pins of nothing are no mistake, and count against the limit too."""
        place, keys = self.some_chain(number, 0)
        tenant = place[0]
        blocks = [] if nothing else self.prefix(place, keys, partial=partial)
        mine = [held for held in self.pins.values() if held.hold.tenant == tenant]
        replicas = [block.replica for block in blocks]
        if sum(max(len(held.blocks), 1) for held in mine) + max(len(blocks), 1) > PINS_PER_TENANT:
            with pytest.raises(Rejected):
                self.holds.pin(tenant, replicas, hard=hard, expires_at=self.now + ttl)
            return
        pin = self.holds.pin(tenant, replicas, hard=hard, expires_at=self.now + ttl)
        if hard:
            self.hold(blocks)
        else:
            for block in blocks:
                block.soft_pins += 1
        self.keep(self.pins, pin.pin_id, pin, blocks)

    @precondition(lambda self: self.pins)
    @rule(number=which, tenant=st.sampled_from(["red", "blue"]))
    def unpin(self, number: int, tenant: str) -> None:
        pin = self.pick(self.pins, number).hold
        assert self.holds.unpin(tenant, pin.pin_id) == (tenant == pin.tenant)
        if tenant == pin.tenant:
            self.drop_pin(pin.pin_id)
            assert not self.holds.unpin(tenant, pin.pin_id)

    def drop_pin(self, pin_id: int) -> None:
        if self.pins[pin_id].hold.hard:
            self.drop(self.pins, pin_id)
        else:
            for block in self.pins.pop(pin_id).blocks:
                block.soft_pins -= 1

    @precondition(lambda self: self.model.blocks)
    @rule(number=which)
    def discard(self, number: int) -> None:
        """Held or not, with children or without."""
        block = list(self.model.blocks.values())[number % len(self.model.blocks)]
        if block.state == "written":
            self.table.discard(block.replica, Cause.DELETED)
            self.lose(Cause.DELETED, [block])

    # Ends.

    @rule(step=st.integers(1, 3))
    def time_passes(self, step: int) -> None:
        self.advance(step)

    def advance(self, step: int) -> None:
        self.now += step
        lapsed = [
            hold_id
            for hold_id in (*self.leases, *self.grants, *self.pins)
            if self.expires[hold_id] <= self.now and hold_id not in self.overdue
        ]
        assert self.holds.expire(self.now) == len(lapsed)
        self.settle()
        late = [hold_id for hold_id in lapsed if hold_id in self.grants]
        gone = {block for hold_id in late for block in self.grants[hold_id].blocks}
        assert {block for block, _ in self.removed} == gone
        assert {cause for _, cause in self.removed} <= {Cause.PUT_TIMEOUT}
        self.overdue |= set(late)
        for hold_id in lapsed:
            if hold_id in self.leases:
                self.drop(self.leases, hold_id)
            elif hold_id in self.pins:
                self.drop_pin(hold_id)

    @rule(owner=owners)
    def end(self, owner: Owner) -> None:
        mine = [hold_id for hold_id, held in (*self.leases.items(), *self.grants.items()) if held.hold.owner == owner]
        assert self.holds.end(owner) == len(mine)
        self.settle()
        open_grants = [hold_id for hold_id in mine if hold_id in self.grants and hold_id not in self.overdue]
        gone = {block for hold_id in open_grants for block in self.grants[hold_id].blocks}
        assert {block for block, _ in self.removed} == gone
        assert {cause for _, cause in self.removed} <= {Cause.WRITER_LOST}
        for hold_id in mine:
            self.drop(self.leases if hold_id in self.leases else self.grants, hold_id)

    # Eviction and capacity.

    @rule(wanted=st.integers(1, 2), tenant=st.sampled_from([None, "red", "blue"]))
    def evict(self, wanted: int, tenant: str | None) -> None:
        for _ in range(wanted):
            expected = self.model.coldest(tenant)
            replica = self.table.coldest(DRAM, tenant)
            assert replica is (expected and expected.replica)
            if replica is None or expected is None:
                break
            self.table.evict(replica, Cause.WATERMARK)
            self.lose(Cause.WATERMARK, [expected])

    @rule(really=seldom)
    def empty_slab(self, really: bool) -> None:
        if not really:
            return
        ways = self.model.emptiable(pinned_too=False) or self.model.emptiable(pinned_too=True)
        assert self.table.empty_coldest_slab(DRAM, Cause.SHRUNK) == bool(ways)
        self.settle()
        assert {block for block, _ in self.removed} in (ways or [set()])

    @precondition(lambda self: len(self.model.slabs) < SLABS_MOST)
    @rule()
    def grow(self) -> None:
        slab = self.tier.pool.grow()
        assert slab.slab_id not in self.model.given_out, "a slab's id was used again"
        self.model.given_out[slab.slab_id] = []
        self.model.slabs[slab.slab_id] = Slab()

    @precondition(lambda self: len(self.model.slabs) > 1)
    @rule()
    def give_back_memory(self) -> None:
        spare = sorted(slab.slab_id for slab in self.tier.pool.spare())
        assert spare == sorted(slab_id for slab_id, slab in self.model.slabs.items() if not slab.occupants)
        if spare:
            self.shrink(spare[0])

    def shrink(self, slab_id: int) -> None:
        self.tier.pool.remove(self.tier.pool.slabs[slab_id])
        del self.model.slabs[slab_id]

    # Always.

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert list(check(self.table, self.holds)) == []
        assert not self.table.take_changes()

    @invariant()
    def each_block_is_where_it_was_put(self) -> None:
        for block in (*self.model.blocks.values(), *self.model.occupants()):
            replica = block.replica
            assert STATES[replica.state] == block.state
            assert replica.slot == block.slot
            assert (replica.holders, replica.soft_pins) == (block.holders, block.soft_pins)
            assert replica.is_copy == block.is_copy
        for held in (*self.leases.values(), *self.grants.values()):
            assert [block.replica for block in held.blocks] == list(held.hold.replicas)

    @invariant()
    def the_same_can_be_found(self) -> None:
        found = {
            ((space.tenant, space.number), key): replica
            for space in self.table.spaces()
            for key, replica in space.replicas.items()
        }
        assert found == {name: block.replica for name, block in self.model.blocks.items()}

    @invariant()
    def bytes_are_counted(self) -> None:
        used = self.model.used_bytes()
        assert {tenant: size for tenant, size in self.tier.tenant_bytes.items() if size} == used
        assert self.tier.used_bytes == sum(used.values())
        assert self.tier.copy_bytes == self.model.copy_bytes()
        assert self.tier.replicas == len(self.model.blocks)
        assert self.tier.pool.capacity_bytes == len(self.model.slabs) * SLAB_BYTES
        for owner in map(Owner, (1, 2)):
            mine = [held.blocks for held in self.grants.values() if held.hold.owner == owner]
            assert self.holds.writing_bytes(owner) == sum(block.size for blocks in mine for block in blocks)

    @invariant()
    def the_coldest_goes_next(self) -> None:
        for tenant in (None, "red", "blue"):
            expected = self.model.coldest(tenant)
            assert self.table.coldest(DRAM, tenant) is (expected and expected.replica)
        for room in {block.room for block in self.model.blocks.values()}:
            expected = self.model.coldest(room=room)
            assert self.tier.coldest_of(GroupKey(*room)) is (expected and expected.replica)


_examples, _steps, _derandomized = PROFILES[os.environ.get("CAIRN_MODEL_PROFILE", "ci")]

TestTable = TableMachine.TestCase
TestTable.settings = settings(
    max_examples=_examples,
    stateful_step_count=_steps,
    deadline=None,
    derandomize=_derandomized,
    phases=[Phase.generate] if _derandomized else list(Phase),
    suppress_health_check=[HealthCheck.too_slow],
)
