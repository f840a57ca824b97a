"""Faults seeded into the index of prefixes, its table and its sets. Tests that let one live are too weak."""

from tests.model.faults import Fault

INDEX, SETS, TABLE = (f"scheduler/{name}.py" for name in ("index", "holder_sets", "name_table"))
MODEL_FAULTS = [
    Fault(
        "a search ends at its first bucket", TABLE, "left = left[(rows[left] != EMPTY).all(axis=1)]", "left = left[:0]"
    ),
    Fault(
        "what is taken out leaves no mark", TABLE, "np.where(has_empty, np.uint64(EMPTY), np.uint64(TAKEN_OUT))", "0"
    ),
    Fault(
        "what is taken out always leaves a mark",
        TABLE,
        "np.where(has_empty, np.uint64(EMPTY), np.uint64(TAKEN_OUT))",
        "TAKEN_OUT",
    ),
    Fault("marks that are written over are still counted", TABLE, "        self.marks -= int(np", "        _ = int(np"),
    Fault("of two that want a slot both have it", TABLE, "            is_left[fits] = ~is_in\n", ""),
    Fault(
        "what does not fit goes where nobody looks",
        TABLE,
        "            at = np.where(is_full, buckets[width - 1 :: width], at)\n",
        "            at = np.where(is_full, buckets[width - 1 :: width] + 1, at)\n",
    ),
    Fault(
        "what the last generation has is not looked up",
        TABLE,
        "            if self._last is not None:\n                slots",
        "            if False:\n                slots",
    ),
    Fault("what the last generation has is stored twice", TABLE, "            self._last.clear(in_last)\n", ""),
    Fault(
        "what was taken over is not found",
        TABLE,
        "            slots[missing] = self._current.find(hashes[missing])\n",
        "",
    ),
    Fault(
        "the last buckets of a generation are not moved",
        TABLE,
        "if stop == self._last.buckets:",
        "if stop * 2 > self._last.buckets:",
    ),
    Fault("what was moved is still there", TABLE, "        hashes[slots] = TAKEN_OUT\n", ""),
    Fault("blocks of a holder that is forgotten stay", TABLE, "            self.clear(slots[changed == 0])\n", ""),
    Fault(
        "only the current generation forgets",
        TABLE,
        "        for generation in self._generations():\n            generation.rewrite(after)\n",
        "        self._current.rewrite(after)\n",
    ),
    Fault(
        "a set has the tier it had before too",
        SETS,
        "self._masks[made, tier, word] ^= flag",
        "self._masks[made, tier, word] |= flag",
    ),
    Fault("one more tier is one more holder", SETS, ".any(axis=1) - had", ".any(axis=1)"),
    Fault(
        "sets that no block has stay",
        SETS,
        "            self._leave(numbers)\n            self._wipe(numbers)\n",
        "            pass\n",
    ),
    Fault(
        "a number that is free is still found",
        SETS,
        "            self._leave(numbers)\n            self._wipe",
        "            self._wipe",
    ),
    Fault(
        "blocks that change their set are counted in both",
        SETS,
        "        np.subtract.at(self._blocks, before, blocks)\n",
        "",
    ),
    Fault(
        "holders past the first word are others",
        SETS,
        "counts[rows[places // _WORD] * _WORD",
        "counts[rows[places // _WORD] % TIERS * _WORD",
    ),
    Fault("sets that have become equal stay apart", SETS, "        after[left] = found\n", ""),
    Fault(
        "of sets that have become one the blocks are lost",
        SETS,
        "        np.add.at(self._blocks, after[gone], self._blocks[gone])\n",
        "",
    ),
    Fault(
        "a set keeps the hash it had",
        SETS,
        "            self._hashes[numbers[told[numbers, tier]]] ^= _hash_of(holder, tier)\n",
        "            pass\n",
    ),
    Fault("DRAM does not count what is in HBM", SETS, "            masks[words : 2 * words] |= masks[:words]\n", ""),
    Fault("a gap does not end a prefix", SETS, "            np.bitwise_and.accumulate(masks, axis=1, out=masks)\n", ""),
    Fault(
        "a prefix ends where its last run begins",
        SETS,
        "= starts[runs[places // _WORD] + 1]",
        "= starts[runs[places // _WORD]]",
    ),
    Fault(
        "blocks behind an unknown one count",
        SETS,
        "numbers[: missing[0]] if len(missing) else numbers",
        "numbers[numbers != NOTHING]",
    ),
    Fault(
        "a name that comes twice is stored twice",
        INDEX,
        "            yield hashes[is_first]\n",
        "            yield hashes\n",
    ),
    Fault("the next one has what the last one had", INDEX, "            self.forget(number)\n", ""),
    Fault("what is stored again moves", INDEX, "        before[is_known] = self._names.values[known]\n", ""),
]
FAULTS = [
    Fault(
        "two names that no table takes are kept", TABLE, "    hashes[hashes <= TAKEN_OUT] |= np.uint64(1 << 63)\n", ""
    ),
    Fault("a table never shrinks", TABLE, "is_thin = wanted < THIN * slots and", "is_thin = False and"),
    Fault(
        "a generation moves in one go",
        TABLE,
        "self._move(max(MOVED_LEAST, self._pace * hashes))",
        "self._move(self._last.slots)",
    ),
    Fault("a generation moves too slowly", TABLE, "ceil(HASTE * self._last.slots / room)", "1"),
    Fault(
        "sets that a hash confuses are one",
        SETS,
        "        found[_differ(masks, self._masks[found])] = NO_SET\n",
        "",
    ),
    Fault("sets that a hash confuses become one", SETS, "        found[differs] = NOTHING\n", ""),
    Fault("what is lost to a hash is not said", INDEX, "        self.dropped += dropped\n", ""),
    Fault(
        "what is not stored is not said",
        INDEX,
        "        self.dropped += int(blocks[is_refused].sum())\n        changed[is_refused] = sets",
        "        changed[is_refused] = sets",
    ),
    Fault("any number of holders", INDEX, "if len(self._numbers) == HOLDERS_MOST:", "if False:"),
    Fault(
        "there are more sets than may be",
        SETS,
        "wanted = max(0, min(wanted, self.most - len(self)))",
        "wanted = max(0, wanted)",
    ),
    Fault(
        "for want of a set the last holder stays",
        INDEX,
        "        changed[is_refused] = NOTHING\n",
        "        changed[is_refused] = sets[is_refused]\n",
    ),
    Fault(
        "for want of a set the others go too",
        INDEX,
        "        changed[is_refused] = sets[is_refused]\n",
        "        changed[is_refused] = NOTHING\n",
    ),
]
