"""Faults seeded into the published index, writer and reader. Its model test must find each."""

from tests.model.faults import Fault

FAULTS = [
    Fault(
        "the reader does not look again after its copy",
        "published.py",
        "return self._memory[at : at + ENTRY_BYTES] == entry and not entry[0] & 1",
        "return not entry[0] & 1",
    ),
    Fault(
        "an entry that is being written counts as unchanged",
        "published.py",
        "return self._memory[at : at + ENTRY_BYTES] == entry and not entry[0] & 1",
        "return self._memory[at : at + ENTRY_BYTES] == entry",
    ),
    Fault(
        "an entry is written without being marked as such",
        "published.py",
        "SEQUENCE.pack_into(memory, at, sequence | 1)",
        "SEQUENCE.pack_into(memory, at, sequence)",
    ),
    Fault(
        "an entry is marked as whole before it is",
        "published.py",
        "        memory[at + STATE_AT : at + ENTRY_BYTES] = body\n"
        "        SEQUENCE.pack_into(memory, at, (sequence | 1) + 1 & 0xFFFFFFFF)\n",
        "        SEQUENCE.pack_into(memory, at, (sequence | 1) + 1 & 0xFFFFFFFF)\n"
        "        memory[at + STATE_AT : at + ENTRY_BYTES] = body\n",
    ),
    Fault(
        "a torn entry is handed out: its offset may lie outside of the slab",
        "published.py",
        "return (at, entry) if self.is_unchanged(at, entry) else None",
        "return at, entry",
    ),
    Fault(
        "a removed entry hides those behind it",
        "published.py",
        "self._write(at, EMPTY_BODY if reach < 0 else GONE_BODY)",
        "self._write(at, EMPTY_BODY)",
    ),
    Fault(
        "a removed entry stays a tombstone that nothing needs",
        "published.py",
        "self._write(at, EMPTY_BODY if reach < 0 else GONE_BODY)",
        "self._write(at, GONE_BODY)",
    ),
    Fault(
        "a tombstone before the removed entry goes that another entry needs",
        "published.py",
        "elif reach < back:",
        "else:",
    ),
    Fault(
        "tombstones that only the removed entry needed stay",
        "published.py",
        "        if reach < length:\n            self._clean(at, length, reach)\n",
        "",
    ),
    Fault(
        "entries between the home and the place of the removed one are forgotten",
        "published.py",
        "reach = max(reach, back + (before - _home(name, self._mask) & self._wrap))",
        "pass",
    ),
    Fault(
        "only the next entry is asked whether its probe passes",
        "published.py",
        "for ahead in range(ENTRY_BYTES, self._longest, ENTRY_BYTES):",
        "for ahead in range(ENTRY_BYTES, 2 * ENTRY_BYTES, ENTRY_BYTES):",
    ),
    Fault(
        "cleaning backwards runs out of the table at its start",
        "published.py",
        "before = (self._end if before == HEADER_BYTES else before) - ENTRY_BYTES",
        "before -= ENTRY_BYTES",
    ),
    Fault(
        "the reader turns round one bucket before the table's end",
        "published.py",
        "self._end = index_bytes(entries)\n\n    def find",
        "self._end = index_bytes(entries) - ENTRY_BYTES\n\n    def find",
    ),
    Fault(
        "the reader gives up one bucket before the writer does",
        "published.py",
        "        for _ in range(PROBES):\n            entry = memory",
        "        for _ in range(PROBES - 1):\n            entry = memory",
    ),
    Fault(
        "a tombstone is taken without looking whether the name is published further on",
        "published.py",
        "            if state == GONE:\n                place = at if place is None else place\n",
        "            if state == GONE:\n                return at, False\n",
    ),
    Fault(
        "the last bucket of a probe is never used",
        "published.py",
        "        for _ in range(PROBES):\n            _, state, found = probe(memory, at)",
        "        for _ in range(PROBES - 1):\n            _, state, found = probe(memory, at)",
    ),
    Fault(
        "a block counts as readable while it is being stored",
        "published.py",
        "return state == READABLE and not sequence & 1",
        "return True",
    ),
    Fault(
        "half of a key is enough",
        "published.py",
        "STATE_AT, IDENT_AT, IDENT_END = 4, 8, 28",
        "STATE_AT, IDENT_AT, IDENT_END = 4, 8, 20",
    ),
    Fault(
        "another namespace's block is readable here",
        "published.py",
        "            if found == name and state != GONE:\n                return state",
        "            if found[4:] == name[4:] and state != GONE:\n                return state",
    ),
    Fault(
        "readers are not told that blocks found no bucket",
        "published.py",
        "            CROWDED_OUT.pack_into(self._memory, HEADER.size, self.crowded_out)\n",
        "",
    ),
]
