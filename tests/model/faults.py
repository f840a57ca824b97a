"""Faults seeded into the table, the slabs, the holds and the policies. Tests that let one live are too weak."""

from typing import NamedTuple


class Fault(NamedTuple):
    situation: str
    file: str  # in kvstore, if no package is named
    before: str  # once in the file
    after: str

    @property
    def path(self) -> str:
        """In the repository."""
        return self.file if self.file.startswith("scheduler/") else f"kvstore/{self.file}"


# The model must find these by itself.
MODEL_FAULTS = [
    Fault(
        "a replica that was committed keeps the version of its allocation",
        "table.py",
        "        self._move(replica, State.WRITTEN)\n        replica.version = next(self._versions)\n",
        "        self._move(replica, State.WRITTEN)\n",
    ),
    Fault(
        "a replica that is held is offered for eviction",
        "table.py",
        "        if replica.is_evictable:\n"
        "            self._evictable(replica).remove(replica)\n"
        "        if not replica.holders:\n"
        "            replica.slab.held += 1\n",
        "        if not replica.holders:\n            replica.slab.held += 1\n",
    ),
    Fault(
        "a replica that was let go is never offered again",
        "table.py",
        "        elif replica.is_evictable:\n            self._evictable(replica).add(replica)\n\n    def soft_pin",
        "\n    def soft_pin",
    ),
    Fault(
        "a slot is free when the first of its holders lets go",
        "table.py",
        "        if replica.holders:\n            return\n        replica.slab.held -= 1\n",
        "        replica.slab.held -= 1\n",
    ),
    Fault(
        "a tenant is charged for what it freed",
        "table.py",
        "        self._count(tier, replica.space.tenant, -replica.group.slot_bytes)\n        tier.copy_bytes -= ",
        "        self._count(tier, replica.space.tenant, -replica.size)\n        tier.copy_bytes -= ",
    ),
    Fault(
        "a parent goes before its children",
        "replica.py",
        "return self.key not in self.space.first_child or self.is_copy\n",
        "return True\n",
    ),
    Fault(
        "a parent that gets a child is still offered for eviction",
        "table.py",
        "            if parent.is_evictable and not parent.is_copy:\n"
        "                self._evictable(parent).remove(parent)\n",
        "",
    ),
    Fault(
        "a parent whose last child went is not offered for eviction",
        "table.py",
        "            self._evictable(parent).add(parent)\n",
        "            pass\n",
    ),
    Fault(
        "a parent does not take up the recency of the child that went",
        "table.py",
        "            parent.last_use = replica.last_use\n",
        "            pass\n",
    ),
    Fault(
        "a child that goes takes its younger siblings along",
        "replica.py",
        "            self.first_child[parent_key] = after\n",
        "            del self.first_child[parent_key]\n",
    ),
    Fault(
        "a sibling forgets who is before it",
        "replica.py",
        "        if after is not None:\n            after.previous_sibling = before\n",
        "",
    ),
    Fault(
        "a match counts what is still being written",
        "table.py",
        "                if replica is not None and replica.state is State.WRITTEN:\n",
        "                if replica is not None:\n",
    ),
    Fault(
        "a match uses the first block instead of the last",
        "table.py",
        "        last = here(matched - 1) if matched else None\n",
        "        last = here(0) if matched else None\n",
    ),
    Fault(
        "a put takes from its own class though another is colder",
        "table.py",
        "        if coldest is not None and coldest is not own:\n",
        "        if coldest is not None and own is None:\n",
    ),
    Fault(
        "a slab is emptied under a block that is written or read below it",
        "emptying.py",
        "if replica.holders or (replica.soft_pins and not pinned_too):",
        "if replica.soft_pins and not pinned_too:",
    ),
    Fault(
        "a slab is emptied before what hangs on it elsewhere",
        "emptying.py",
        "            if not replica.is_copy:\n",
        "            if replica.soft_pins > 99:\n",
    ),
    Fault(
        "a slot that is used again keeps its generation",
        "slab.py",
        "        self._generations[index] += 1\n",
        "",
    ),
    Fault(
        "a slab that is cut anew begins at generation 1",
        "slab.py",
        "        newest = max(generation, *self._generations, 0) + 1\n",
        "        newest = generation + 1\n",
    ),
    Fault(
        "a slab passes to another tenant",
        "slab.py",
        "        self.tenants.add(group.tenant)\n",
        "",
    ),
    Fault(
        "a slab's id is used again",
        "slab.py",
        "Slab(next(self._ids))",
        "Slab(len(self.slabs) + 1)",
    ),
    Fault(
        "a full slab that got a free slot is not offered",
        "slab.py",
        "        if slab.is_full and not is_apart:\n            self._roomy[group][slab.slab_id] = slab\n",
        "",
    ),
    Fault(
        "a slot is smaller than its block",
        "slab.py",
        "    return -(-size // step) * step\n",
        "    return max(size // step, 1) * step\n",
    ),
    Fault(
        "a lease is kept beyond its time",
        "holds.py",
        "while self._deadlines and self._deadlines[0][0] <= now:",
        "while self._deadlines and self._deadlines[0][0] < now:",
    ),
    Fault(
        "a client may have any number of leases",
        "holds.py",
        "self.held_by(owner) >= self._leases_per_client:\n",
        "self.held_by(owner) > self._leases_per_client:\n",
    ),
    Fault(
        "a touched block goes as if nobody had used it",
        "eviction/lru.py",
        "        self.remove(replica)\n        self.add(replica)\n",
        "        assert replica in self\n",
    ),
    Fault(
        "a block goes by its arrival instead of its last use",
        "eviction/order.py",
        "        if stamp > self._newest:\n",
        "        if stamp >= 0:\n",
    ),
    Fault(
        "a block that came late goes last",
        "eviction/order.py",
        "if first is None or (stamp, version) < (self._in_order[first], first.version):",
        "if first is None:",
    ),
    Fault(
        "a tenant whose coldest block went is still taken for the coldest",
        "evictable.py",
        "            elif first.last_use > known_use:\n"
        "                queue.known_use = first.last_use\n"
        "                heapreplace(self._heap, (first.last_use, number, queue))\n",
        "",
    ),
    Fault(
        "softly pinned blocks go first",
        "evictable.py",
        "        return first or self._pinned_copies.coldest() or self._pinned.coldest()\n",
        "        return self._pinned_copies.coldest() or self._pinned.coldest() or first\n",
    ),
    Fault(
        "copies that take more than their share wait for their turn",
        "evictable.py",
        "return copy if copies_first or copy.last_use < original.last_use else original",
        "return copy if copy.last_use < original.last_use else original",
    ),
    Fault(
        "a copy waits for its children",
        "replica.py",
        "return self.key not in self.space.first_child or self.is_copy\n",
        "return self.key not in self.space.first_child\n",
    ),
    Fault(
        "copies are not counted",
        "table.py",
        "        self.tiers[replica.space.tier].copy_bytes += replica.group.slot_bytes * (1 if is_copy else -1)\n",
        "",
    ),
    Fault(
        "a copy is counted after it went",
        "table.py",
        "        tier.copy_bytes -= replica.group.slot_bytes if replica.is_copy else 0\n",
        "",
    ),
    Fault(
        "a copy is offered as an original too",
        "table.py",
        "            self._evictable(replica).remove(replica)\n        replica.is_copy = is_copy\n",
        "            pass\n        replica.is_copy = is_copy\n",
    ),
    Fault(
        "a held replica that becomes a copy is offered for eviction",
        "table.py",
        "        if replica.is_evictable:\n            self._evictable(replica).add(replica)\n\n    # Making room.",
        "        if replica.state is State.WRITTEN:\n"
        "            self._evictable(replica).add(replica)\n\n    # Making room.",
    ),
    Fault(
        "a copy that goes takes its children out of the families",
        "table.py",
        "        del replica.space.replicas[replica.key]\n",
        "        del replica.space.replicas[replica.key]\n"
        "        if replica.is_copy:\n            replica.space.first_child.pop(replica.key, None)\n",
    ),
    Fault(
        "a copy that gets a child is not offered any more",
        "table.py",
        "            if parent.is_evictable and not parent.is_copy:\n                self",
        "            if parent.is_evictable:\n                self",
    ),
    Fault(
        "a copy whose child went is offered twice",
        "table.py",
        "        if parent.is_evictable and not parent.is_copy:\n            self._evictable(parent).add",
        "        if parent.is_evictable:\n            self._evictable(parent).add",
    ),
    Fault(
        "a copy keeps its place when it takes up the recency of a child",
        "table.py",
        "            self._evictable(parent).touch(parent)\n",
        "            pass\n",
    ),
    Fault(
        "a slab is emptied of all that hangs on its copies",
        "emptying.py",
        "            if not replica.is_copy:\n",
        "            if replica.holders == 0:\n",
    ),
]

# These need a rare situation, which a unit test sets up.
FAULTS = [
    Fault(
        "a discarded replica loses its slot under its readers",
        "table.py",
        "        self._forget(replica, cause)\n        if not replica.holders:\n            self._drain(replica)\n",
        "        self._forget(replica, cause)\n        self._drain(replica)\n",
    ),
    Fault(
        "an aborted block keeps the key from the next writer",
        "table.py",
        '        """No new reader can find it from here on."""\n        self._move(replica, State.EVICTED)\n',
        "        self._move(replica, State.EVICTED)\n        if replica.holders:\n            return\n",
    ),
    Fault(
        "the slot of a removed block is told by its slab's next use",
        "replica.py",
        "        slot_bytes = self.group.slot_bytes\n",
        "        slot_bytes = (self.slab.group or self.group).slot_bytes\n",
    ),
    Fault(
        "a block becomes its own ancestor and can never go",
        "table.py",
        "if parent is not None and space.descends(parent, key):",
        "if parent == key:",
    ),
    Fault(
        "a softly pinned block goes though there is another way",
        "table.py",
        "        if own is not None and not own.soft_pins:\n",
        "        if own is not None:\n",
    ),
    Fault(
        "a softly pinned block is never given up for a put",
        "table.py",
        "Cause.SLAB_TAKEN, pinned_too=True):",
        "Cause.SLAB_TAKEN, pinned_too=False):",
    ),
    Fault(
        "a slab with a pin is emptied as if it had none",
        "table.py",
        "            if self._empty_slab(slabs, Cause.SLAB_TAKEN, pinned_too=False):\n",
        "            if self._empty_slab(slabs, Cause.SLAB_TAKEN, pinned_too=True):\n",
    ),
    Fault(
        "of softly pinned blocks, originals go before copies",
        "evictable.py",
        "        return first or self._pinned_copies.coldest() or self._pinned.coldest()\n",
        "        return first or self._pinned.coldest() or self._pinned_copies.coldest()\n",
    ),
    Fault(
        "originals go in a row with copies that are too many",
        "emptying.py",
        "        if above.is_copy != coldest.is_copy:\n            break",
        "        if above.soft_pins != coldest.soft_pins:\n            break",
    ),
    Fault(
        "the front of the hottest chain looks cold",
        "emptying.py",
        "            last_use = max(last_use, replica.last_use)\n",
        "            last_use = slab.last_use\n",
    ),
    Fault(
        "the same slabs are looked into in vain for ever",
        "emptying.py",
        "        slab.last_use = max(slab.last_use, last_use)\n",
        "",
    ),
    Fault(
        "held slabs hide one that can be emptied",
        "emptying.py",
        "(slab for slab in slabs if not slab.held and (pinned_too or not slab.pinned))",
        "(slab for slab in slabs if pinned_too or not slab.pinned)",
    ),
    Fault(
        "a tenant waits for memory though the spare slab is its own",
        "slab.py",
        "if owner is not None and owner != tenant)",
        "if owner is not None)",
    ),
    Fault(
        "a renewed lease never ends",
        "holds.py",
        "                heappush(self._deadlines, (hold.expires_at, hold_id))\n                continue\n",
        "                continue\n",
    ),
    Fault(
        "a lease is renewed for less",
        "holds.py",
        "        lease.expires_at = max(lease.expires_at, expires_at)\n",
        "        lease.expires_at = expires_at\n",
    ),
    Fault(
        "a client releases another's lease",
        "holds.py",
        "        if lease.owner != owner:\n"
        '            raise StaleLease(f"lease {lease_id} is another client\'s")\n'
        "        self._drop_lease(lease)\n",
        "        self._drop_lease(lease)\n",
    ),
    Fault(
        "a writer that took too long loses its slots while it writes",
        "holds.py",
        '        if grant.overdue:\n            raise StaleLease(f"grant {grant_id} ran out: its',
        "        if grant.overdue:\n            self._drop_grant(grant)\n"
        '            raise StaleLease(f"grant {grant_id} ran out: its',
    ),
    Fault(
        "a writer that took too long keeps its slots after its last word",
        "holds.py",
        "        if grant is not None and grant.owner == owner and grant.overdue:\n"
        "            self._drop_grant(grant)\n",
        "",
    ),
    Fault(
        "a grant that ran out is counted again",
        "holds.py",
        "if hold is None or (isinstance(hold, Grant) and hold.overdue):",
        "if hold is None:",
    ),
    Fault(
        "a soft pin outlives its time on a block that was being written",
        "holds.py",
        "            else:\n                self._table.soft_pin(replica, -1)\n",
        "            elif replica.version > pin.pin_id + 1 << 40:\n                self._table.soft_pin(replica, -1)\n",
    ),
    Fault(
        "a session that ends leaves its grants behind",
        "holds.py",
        "                self.give_up(owner, hold_id, Cause.WRITER_LOST)\n",
        "                self._unkeep(owner, hold_id)\n",
    ),
    Fault(
        "a block that came late twice goes at its earlier time",
        "eviction/order.py",
        "if self._late.get(replica) == stamp:",
        "if replica in self._late:",
    ),
    Fault(
        "removed blocks pile up in the policy",
        "eviction/order.py",
        "        if len(self._heap) > 2 * len(self._late) + SLACK:\n",
        "        if len(self._heap) > 20000:\n",
    ),
    Fault(
        "a tenant's block that is colder than its others is overlooked",
        "evictable.py",
        "        if replica.last_use < queue.known_use:\n",
        "        if queue.known_use == NEVER:\n",
    ),
]
