"""Faults seeded into what moves blocks between slots and tiers. Tests that let one live are too weak."""

from tests.model.faults import Fault

# The model of a table with two tiers must find these by itself.
MODEL_FAULTS = [
    Fault(
        "the slab that a block moves into may go meanwhile",
        "table.py",
        "        move.slab.held += 1\n        tier.moves.add(move)\n",
        "        tier.moves.add(move)\n",
    ),
    Fault(
        "the second slot of a move is not counted",
        "table.py",
        "        self._count(tier, replica.space.tenant, +replica.group.slot_bytes)\n        self.hold(replica)\n",
        "        self.hold(replica)\n",
    ),
    Fault(
        "a block that moves is not held",
        "table.py",
        "        self._count(tier, replica.space.tenant, +replica.group.slot_bytes)\n        self.hold(replica)\n",
        "        self._count(tier, replica.space.tenant, +replica.group.slot_bytes)\n",
    ),
    Fault(
        "a block lies where it was never copied to",
        "table.py",
        "        is_moved = is_copied and replica.state is State.WRITTEN and replica.holders == 1\n",
        "        is_moved = replica.state is State.WRITTEN and replica.holders == 1\n",
    ),
    Fault(
        "a deleted block moves on",
        "table.py",
        "        is_moved = is_copied and replica.state is State.WRITTEN and replica.holders == 1\n",
        "        is_moved = is_copied and replica.holders == 1\n",
    ),
    Fault(
        "a block moves away under its reader",
        "table.py",
        "        is_moved = is_copied and replica.state is State.WRITTEN and replica.holders == 1\n",
        "        is_moved = is_copied and replica.state is State.WRITTEN\n",
    ),
    Fault(
        "the old slot of a block that moved is never free",
        "table.py",
        "            tier.pool.give_back(old_slab, old_index)\n",
        "",
    ),
    Fault(
        "the new slot of a block that did not move is never free",
        "table.py",
        "        else:\n            tier.pool.give_back(move.slab, move.index)\n",
        "",
    ),
    Fault(
        "a block that moved keeps the generation of its old slot",
        "table.py",
        "            replica.slab, replica.index, replica.generation = move.slab, move.index, move.generation\n",
        "            replica.slab, replica.index = move.slab, move.index\n",
    ),
    Fault(
        "a pinned block that moved is still counted in its old slab",
        "table.py",
        "            old_slab.pinned -= replica.soft_pins > 0\n",
        "",
    ),
    Fault(
        "a slab into which a hot block moved counts as cold",
        "table.py",
        "            move.slab.last_use = max(move.slab.last_use, replica.last_use)\n",
        "",
    ),
    Fault(
        "a block that moved keeps its version",
        "table.py",
        "            replica.version = next(self._versions)\n"
        "            self._changes.append(Event(Change.MOVED, replica))\n",
        "            self._changes.append(Event(Change.MOVED, replica))\n",
    ),
    Fault(
        "nobody hears of a move",
        "table.py",
        "            self._changes.append(Event(Change.MOVED, replica))\n",
        "",
    ),
    Fault(
        "the bytes of a restored block are not counted",
        "table.py",
        "        self._count(tier, space.tenant, +replica.group.slot_bytes)\n",
        "",
    ),
    Fault(
        "a restored block is nobody's child",
        "table.py",
        "        if replica.parent is not None:\n            self._adopt(replica, replica.parent)\n",
        "",
    ),
    Fault(
        "the slot of a restored block begins its generations anew",
        "slab.py",
        "        self._generations[index] = generation\n",
        "        self._generations[index] = 0\n",
    ),
    Fault(
        "free slots of a restored slab begin their generations anew",
        "slab.py",
        "        newest = max(generation, *self._generations, 0) + 1\n",
        "        newest = max(self._generations, default=0) + 1\n",
    ),
    Fault(
        "a new slab gets the id of a restored one",
        "slab.py",
        "        self._ids = count(max(slab_id + 1, next(self._ids)))\n",
        "",
    ),
    Fault(
        "slots of a slab are given out before it is known what lies in it",
        "slab.py",
        "        self._apart.add(slab_id)\n        return slab\n",
        "        self._roomy[group][slab_id] = slab\n        self._apart.add(slab_id)\n        return slab\n",
    ),
    Fault(
        "free slots of a restored slab are never used",
        "slab.py",
        "        self._free = list(free) if known else []\n",
        "        self._free = []\n",
    ),
    Fault(
        "a slab that is set apart gives out slots",
        "slab.py",
        "        self._roomy[slab.group].pop(slab.slab_id, None)\n",
        "",
    ),
    Fault(
        "a slot that is freed in a slab set apart is given out",
        "slab.py",
        "        if slab.is_full and not is_apart:\n",
        "        if slab.is_full:\n",
    ),
    Fault(
        "a slab that is set apart is spare with its last block",
        "slab.py",
        "        if slab.used == 0 and not is_apart:\n",
        "        if slab.used == 0:\n",
    ),
    Fault(
        "a slab that ran empty while it was apart is never spare",
        "slab.py",
        "        if slab.used == 0:\n            self._uncut(slab, slab.group)\n        elif",
        "        if",
    ),
    Fault(
        "free slots of a slab that was apart are never used",
        "slab.py",
        "        elif not slab.is_full:\n            self._roomy[slab.group][slab.slab_id] = slab\n",
        "",
    ),
    Fault(
        "with a block goes its parent, on which others hang",
        "emptying.py",
        "if above is None or has_siblings or above",
        "if above is None or above",
    ),
    Fault(
        "with a block goes its parent, which was used since",
        "emptying.py",
        "if above.last_use > coldest.last_use or bool",
        "if bool",
    ),
    Fault(
        "with a block goes its parent, which somebody holds",
        "emptying.py",
        "above.state is not State.WRITTEN or above.holders:",
        "above.state is not State.WRITTEN:",
    ),
    Fault(
        "with a block goes its parent, which is pinned",
        "emptying.py",
        " or bool(above.soft_pins) != bool(coldest.soft_pins):",
        ":",
    ),
    Fault(
        "with a block go all before it, however many bytes are wanted",
        "emptying.py",
        "    while most_bytes > 0 and replica.parent",
        "    while replica.parent",
    ),
    Fault(
        "blocks of the disk are offered while they are held",
        "evictable.py",
        "        return replica.is_evictable\n",
        "        return True\n",
    ),
    Fault(
        "a parent does not take up the uses of the child that went",
        "table.py",
        "        parent.hits = max(parent.hits, replica.hits)\n",
        "",
    ),
]

# The unit tests of loads and stores must find these.
FAULTS = [
    Fault(
        "a block deleted while it is loaded comes back",
        "promotion.py",
        "        self._table.abort(target, Cause.DELETED)\n",
        "        pass\n",
    ),
    Fault(
        "a load is committed whatever was read",
        "promotion.py",
        '        elif read is not None and read.loaded == "good":\n',
        "        elif read is not None:\n",
    ),
    Fault(
        "a load that is over is still counted",
        "promotion.py",
        "        self.loading_bytes -= source.size\n",
        "",
    ),
    Fault(
        "the block on the disk may go while it is read",
        "promotion.py",
        "                self._own.hold(source.replica)\n            target = None\n",
        "                source.replica.holders += 1\n            target = None\n",
    ),
    Fault(
        "a stop costs the blocks that were being loaded",
        "promotion.py",
        "                self._finish(space, load, None)\n",
        "                self._finish(space, load, FAILED)\n",
    ),
    Fault(
        "a disk that is away costs its blocks",
        "promotion.py",
        "            return self._disk.read_health.is_well\n",
        "            return True\n",
    ),
    Fault(
        "what arrives too late is loaded",
        "loads.py",
        "        if arrival_s > load_s:\n            break\n",
        "",
    ),
    Fault(
        "what is computed sooner is loaded",
        "loads.py",
        "        if not block_s or arrival_s <= (position + 1 - first) * block_s:\n",
        "        if True:\n",
    ),
    Fault(
        "more is on the way than may be",
        "promotion.py",
        "        wanted = wanted[: self._fitting(wanted, space.tenant.name)]\n",
        "",
    ),
    Fault(
        "a load makes room at its own beginning",
        "promotion.py",
        "        parts = (part_of(space, key, part) for key in keys[:end] for part in range(space.namespace.parts))\n",
        "        parts = iter([])\n",
    ),
    Fault(
        "the second read goes over the quota",
        "promotion.py",
        "        if self._intake.make_room(space, first.size) is not Placement.GRANTED:\n",
        "        if not self._table.has_room(space.dram, first.size):\n",
    ),
    Fault(
        "who is late waits for the second read too",
        "promotion.py",
        "                await asyncio.wait([reading, hedge], return_when=asyncio.FIRST_COMPLETED)\n",
        "                await asyncio.wait([reading, hedge])\n",
    ),
    Fault(
        "a late read is not repeated",
        "promotion.py",
        "        return not reading.done() and self._hedges < HEDGES\n",
        "        return False\n",
    ),
    Fault(
        "a block deleted while it is written below comes back",
        "demotion.py",
        "                if is_good and replica.state is State.WRITTEN:  # else it was deleted meanwhile\n",
        "                if is_good:\n",
    ),
    Fault(
        "a block used while it is written below goes",
        "demotion.py",
        " and replica.last_use <= coldest_use:",
        ":",
    ),
    Fault(
        "a cancelled step evicts what it did not write",
        "demotion.py",
        "                    if is_done and replica.is_evictable",
        "                    if replica.is_evictable",
    ),
    Fault(
        "a block deleted while it is sent to the bucket is still known",
        "demotion.py",
        "                self._bucket.forget(self._space(replica).root, [replica.key])\n",
        "                pass\n",
    ),
    Fault(
        "a put is refused while blocks are on their way below",
        "puts.py",
        "return full and (self._demotion.is_relieving or ",
        "return full and (",
    ),
    Fault(
        "stores go on to a failing disk",
        "disk.py",
        "        return self.write_health.may_try(self._clock.now())\n",
        "        return True\n",
    ),
    Fault(
        "a header is not compared",
        "disk.py",
        "found is not None and _is_same(found, wanted) else",
        "found is not None else",
    ),
    Fault(
        "a checksum is not compared",
        "disk.py",
        '        if found == "good" and checksum(payload[: wanted.size]) != wanted.checksum:\n',
        '        if found == "none":\n',
    ),
    Fault(
        "a slab gives out slots while it is emptied",
        "reclaim.py",
        "        pool.set_apart(slab)\n",
        "        pool._apart.add(slab.slab_id)\n",
    ),
    Fault(
        "a slab is punched under a reader",
        "reclaim.py",
        "            if not slab.used:\n                await self._disk.punch",
        "            if slab:\n                await self._disk.punch",
    ),
    Fault(
        "stores take all threads",
        "disk_queue.py",
        "asyncio.Semaphore(max(threads - RESERVED, 1))",
        "asyncio.Semaphore(threads)",
    ),
    Fault(
        "stores go before loads",
        "disk_queue.py",
        "LOAD, STORE, STOP = 0, 1, 2\n",
        "LOAD, STORE, STOP = 1, 0, 2\n",
    ),
    Fault(
        "a budget fills up without end",
        "admission.py",
        "        self._left = min(self._left + self._rate * (now - self._at), self._rate * BURST_S)\n",
        "        self._left = self._left + self._rate * (now - self._at)\n",
    ),
]

# The model of a whole store must find these.
STORE_FAULTS = [
    Fault(
        "what is read is not verified",
        "disk.py",
        '        if found == "good" and checksum(payload[: wanted.size]) != wanted.checksum:\n',
        '        if found == "none":\n',
    ),
    Fault(
        "a block deleted while it is loaded comes back",
        "promotion.py",
        "        self._table.abort(target, Cause.DELETED)\n",
        "        pass\n",
    ),
    Fault(
        "a block deleted while it is written below comes back",
        "demotion.py",
        "                if is_good and replica.state is State.WRITTEN:  # else it was deleted meanwhile\n",
        "                if is_good:\n",
    ),
    Fault(
        "a block deleted while a restart takes it up comes back",
        "recover.py",
        "            if deleted and (number, key) in deleted:\n",
        "            if not key:\n",
    ),
    Fault(
        "a block deleted before a restart comes back",
        "records.py",
        "                    self._note(name, None)\n",
        "                    pass\n",
    ),
    Fault(
        "a load is left alone by who began it",
        "promotion.py",
        "let_go(load.source.replica)\n                if load.source.offer is not None:\n",
        "table\n                if load.source.offer is not None:\n",
    ),
    Fault(
        "loads go over the quota",
        "promotion.py",
        "            if self._intake.make_room(space, source.size) is Placement.GRANTED:\n",
        "            if self._table.has_room(space.dram, source.size):\n",
    ),
    Fault(
        "a slab that is given back stays apart",
        "reclaim.py",
        "            pool.rejoin(slab)\n",
        "            pass\n",
    ),
]
