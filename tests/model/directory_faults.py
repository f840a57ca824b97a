"""Faults seeded into the directory, its batches and the homes. Tests that let one live are too weak."""

from tests.model.faults import Fault

ANNOUNCER, DIRECTORY, BATCHES, HOMES = (f"cluster/{name}.py" for name in ("announcer", "directory", "batches", "homes"))
MODEL_FAULTS = [
    Fault(
        "a batch from long ago is applied",
        DIRECTORY,
        "batch.sequence <= known.sequence:",
        "batch.sequence == known.sequence:",
    ),
    Fault("an earlier start is believed", DIRECTORY, "batch.epoch < known.epoch:", "batch.epoch < known.epoch - 1:"),
    Fault(
        "a new stream adds to the last",
        DIRECTORY,
        "            holder = self._begin(batch)\n",
        "            holder = known or self._begin(batch)\n",
    ),
    Fault("what is reset stays", DIRECTORY, "        self._reset(holder, records.resets)\n", ""),
    Fault(
        "who is gone is swept by nobody",
        DIRECTORY,
        "        self._unswept.update(partition for partition, tally in holder.tallies.items() if tally.blocks)\n",
        "",
    ),
    Fault(
        "who is gone is in answers",
        DIRECTORY,
        "living = (pair for pair in holding.pairs if pair[0] in self._holders)",
        "living = holding.pairs",
    ),
    Fault(
        "a sweep leaves the rest of a partition",
        DIRECTORY,
        "            del waiting[-most:]\n",
        "            waiting.clear()\n",
    ),
    Fault(
        "tallies of dropped partitions stay",
        DIRECTORY,
        "            for holder in self._holders.values():\n                holder.tallies.pop(partition, None)\n",
        "",
    ),
    Fault(
        "holdings of dropped blocks stay",
        DIRECTORY,
        "                    del self._holdings[holding.pairs]\n            self._unswept",
        "                    pass\n            self._unswept",
    ),
    Fault(
        "holdings of no block any more stay",
        DIRECTORY,
        "        self._settle(steps)\n        return shared",
        "        return shared",
    ),
    Fault(
        "tiers are added to those before",
        DIRECTORY,
        "sorted([*others, (number, tiers)] if tiers else others)",
        "sorted([*others, (number, tiers | had)] if tiers else others)",
    ),
    Fault(
        "digests are not looked at",
        DIRECTORY,
        "if _sums(holder.tallies.get(partition)) != (count, xor)",
        "if False",
    ),
    Fault(
        "a new stream begins with 1",
        ANNOUNCER,
        "1 + (self._last_sequence if is_first else stream.sequence)",
        "1 + (0 if is_first else stream.sequence)",
    ),
    Fault("after a gap the stream goes on", ANNOUNCER, "        self.sequence = 0\n\n\n", "\n\n"),
    Fault(
        "a batch is told once and not again",
        ANNOUNCER,
        "        return stream.unanswered\n",
        "        batch, stream.unanswered = stream.unanswered, None\n        return batch\n",
    ),
    Fault(
        "a home that was started again is not told anew",
        ANNOUNCER,
        "if stream.epoch == epochs.get(name)}",
        "if name in epochs}",
    ),
    Fault("what differs is not reset", ANNOUNCER, "        stream.resets |= anew\n", ""),
    Fault("what was late is never told", ANNOUNCER, "        anew |= self._take_late(stream)\n", ""),
    Fault(
        "what there is no room for is not late",
        ANNOUNCER,
        "            stream.late.add(partition)\n",
        "            pass\n",
    ),
    Fault(
        "what is late once is late for ever",
        ANNOUNCER,
        "        stream.late -= anew\n        stream.resets",
        "        stream.late |= anew\n        stream.resets",
    ),
    Fault("resets are told twice", ANNOUNCER, "        stream.resets.clear()\n        is_first", "        is_first"),
    Fault("elements are counted upwards only", ANNOUNCER, "+= 1 if is_there else -1", "+= 1"),
]
FAULTS = [
    Fault(
        "a batch that comes twice is applied twice",
        DIRECTORY,
        "batch.sequence <= known.sequence:",
        "batch.sequence < known.sequence:",
    ),
    Fault("a lost batch is not missed", DIRECTORY, "elif batch.sequence != known.sequence + 1:", "elif False:"),
    Fault("any answer is to the last batch", ANNOUNCER, "if reply.sequence < sent and not reply.is_gap:", "if False:"),
    Fault(
        "what moves to a home is not reset there",
        ANNOUNCER,
        "            self._streams[homes.home(partition)].resets.add(partition)\n",
        "            pass\n",
    ),
    Fault(
        "what moved still waits for its old home",
        ANNOUNCER,
        "            self._streams[name].leave_out(set(moved))\n",
        "            pass\n",
    ),
    Fault(
        "digests are told before the rest",
        ANNOUNCER,
        "told = () if stream.has_more else",
        "told = () if stream.resets else",
    ),
    Fault("a leaver keeps what it had", HOMES, "if home in gone])", "if home in names])"),
    Fault("who joins wins nothing", HOMES, "            after._challenge(name)\n", "            pass\n"),
    Fault("who joins wins everything", HOMES, "weights > self._weights", "weights > 0"),
    Fault("a challenger's weight is forgotten", HOMES, "        self._weights[won] = weights[won]\n", ""),
    Fault("what was before changes too", HOMES, "after._homes = self._homes.copy()", "after._homes = self._homes"),
    Fault(
        "who is left is not told",
        DIRECTORY,
        "            if step.left is not None:\n"
        "                self._is_left(step.left, name, partition)\n"
        "            if step.is_shared",
        "            if step.is_shared",
    ),
    Fault(
        "who is left by a sweep is not told",
        DIRECTORY,
        "            if step.left is not None:\n"
        "                self._is_left(step.left, name, partition)\n"
        "        self._settle",
        "        self._settle",
    ),
    Fault(
        "a second holder is passed over", DIRECTORY, "if numbers == [holder.number]:", "if holder.number in numbers:"
    ),
    Fault("what a node is to be told has no end", DIRECTORY, "if len(sole) < SOLE_KEPT_MOST:", "if True:"),
    Fault(
        "a new stream forgets what its node is to be told",
        DIRECTORY,
        "                holder.sole = known.sole\n",
        "                pass\n",
    ),
    Fault("what is gone is shared", DIRECTORY, "is_shared=bool(tiers and others)", "is_shared=bool(others)"),
    Fault("the only holder shares", DIRECTORY, "is_shared=bool(tiers and others)", "is_shared=bool(tiers)"),
    Fault(
        "an answer that was lost is not given again",
        DIRECTORY,
        "known.told if batch.sequence == known.sequence else",
        "known.told if False else",
    ),
    Fault("every holder is named", DIRECTORY, "islice(living, HOLDERS_MOST)", "living"),
    Fault("an earlier start's end ends a later one", DIRECTORY, "known.epoch <= epoch:", "True:"),
    Fault("stripes need not be all of the names", DIRECTORY, "if start != len(names):", "if start > len(names):"),
    Fault("names have any length", BATCHES, "if max(records.names, default=0) >> NAME_BITS:", "if False:"),
    Fault("a batch has any length", BATCHES, " <= NAMES_MOST:", ":"),
    Fault("any tier is taken in", BATCHES, "max(records.tiers, default=0) > ALL_TIERS", "False"),
    Fault("what is half there is passed over", BATCHES, "    if rest:\n", "    if False:\n"),
    Fault("others' partitions are told anew", ANNOUNCER, "if self._homes.home(partition) == home}", "}"),
    Fault(
        "a home that is ahead is behind",
        ANNOUNCER,
        "        self._last_sequence = max(self._last_sequence, reply.sequence)\n",
        "",
    ),
    Fault("what waits has no end", ANNOUNCER, "len(stream.waiting) < WAITING_MOST or block in stream.waiting", "True"),
    Fault("a batch takes all", ANNOUNCER, "islice(stream.waiting, most)", "stream.waiting"),
]
