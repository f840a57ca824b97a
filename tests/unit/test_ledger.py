"""The ledger against a dict: what is put is found again, after a reopening too; damage is told, never read."""

import os
import random
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore import ledger as ledger_module
from kvstore.errors import ConfigError
from kvstore.ledger import BATCH_RECORDS, BROKEN_KEPT, RECORD_BYTES, Ledger, Marks, Record, records, set_aside
from kvstore.types import BlockKey, GroupKey

HUGE, LARGE = 2**64 - 1, 2**32 - 1


def record(seed: int, number: int = 1, key_bytes: int = 16) -> Record:
    rng = random.Random(seed)
    parent = BlockKey(rng.randbytes(key_bytes)) if seed % 3 else None
    key = BlockKey(rng.randbytes(key_bytes))
    return Record(number, key, parent, seed, seed % 64, 1 << 20, 1, seed, rng.getrandbits(64), 5, seed % 9, 0)


def found(ledger: Ledger, chunk: int = 100) -> list[Record]:
    return [entry for rows in ledger.scan(chunk) for entry in records(rows)]


def in_order(puts: list[Record]) -> list[Record]:
    return sorted(puts, key=lambda entry: (entry.number, entry.key))


def name(entry: Record) -> tuple[int, bytes]:
    return entry.number, entry.key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with closing(Ledger(path)) as opened:
        yield opened


class TestRecords:
    def test_a_new_ledger_is_empty_and_clean(self, ledger: Ledger) -> None:
        assert ledger.was_clean
        assert ledger.marks() == Marks()
        assert (ledger.slabs(), ledger.count(), found(ledger)) == ({}, 0, [])
        assert ledger.get(1, bytes(16)) is None

    def test_every_field_comes_back_as_it_was_put(self, ledger: Ledger) -> None:
        puts = [
            Record(0, BlockKey(bytes(16)), None, 0, 0, 0, 0, 0, 0, 0, 0, 0),
            Record(0, BlockKey(bytes(18)), BlockKey(bytes(18)), 0, 0, 0, 0, 0, 0, 0, 0, 0),
            Record(
                *(LARGE, BlockKey(b"\xff" * 18), BlockKey(b"\xff" * 16), HUGE, LARGE, LARGE),
                *(HUGE, HUGE, HUGE, HUGE, LARGE, LARGE),
            ),
            Record(7, BlockKey(b"k" * 14 + b"\0\0"), BlockKey(b"p" * 17 + b"\0"), 1, 2, 3, 4, 5, 6, 7, 8, 9),
        ]
        ledger.apply(puts)
        assert found(ledger) == in_order(puts)
        assert [ledger.get(*name(entry)) for entry in puts] == puts

    def test_a_block_is_found_in_its_own_namespace_only(self, ledger: Ledger) -> None:
        ledger.apply([record(1, number=1)])
        assert ledger.get(2, record(1).key) is None

    def test_a_key_deleted_and_put_in_one_call_is_there(self, ledger: Ledger) -> None:
        ledger.apply([record(1)])
        newer = record(1)._replace(generation=9)
        ledger.apply([newer], [name(newer)])
        assert found(ledger) == [newer]

    def test_of_two_puts_of_a_key_the_later_counts(self, ledger: Ledger) -> None:
        ledger.apply([record(1), record(1)._replace(hits=3)])
        assert found(ledger) == [record(1)._replace(hits=3)]

    @pytest.mark.parametrize(
        ("deletes", "puts"),
        [(0, BATCH_RECORDS), (0, BATCH_RECORDS + 1), (3, 3 * BATCH_RECORDS), (BATCH_RECORDS + 2, 1), (0, 0)],
    )
    def test_a_call_of_any_length_is_applied_whole(self, ledger: Ledger, deletes: int, puts: int) -> None:
        older = [record(seed) for seed in range(deletes)]
        newer = [record(seed, number=2) for seed in range(puts)]
        ledger.apply(older)
        ledger.apply(newer, [name(entry) for entry in older])
        assert found(ledger) == in_order(newer)

    @pytest.mark.parametrize("wrong", [{"size": 2**32}, {"generation": -1}, {"key": b"k" * 17}, {"parent": b"p"}])
    def test_a_record_that_cannot_be_kept_stops_its_call_before_anything_is_written(
        self, ledger: Ledger, wrong: dict[str, int]
    ) -> None:
        with pytest.raises((struct.error, AssertionError)):
            ledger.apply([record(1), record(2)._replace(**wrong)])
        assert found(ledger) == []

    def test_after_many_changes_and_reopenings_it_is_what_a_dict_is(self, path: Path) -> None:
        rng, expected = random.Random(1), dict[tuple[int, bytes], Record]()
        for _ in range(6):
            with closing(Ledger(path)) as ledger:
                assert ledger.was_clean
                assert found(ledger) == in_order(list(expected.values()))
                for _ in range(20):
                    puts = [
                        record(rng.randrange(400), rng.randrange(3), rng.choice([16, 18]))._replace(
                            hits=rng.randrange(99)
                        )
                        for _ in range(rng.randrange(60))
                    ]
                    gone = [name(record(rng.randrange(400), rng.randrange(3))) for _ in range(rng.randrange(60))]
                    ledger.apply(puts, gone)
                    for key in gone:
                        expected.pop(key, None)
                    expected |= {name(entry): entry for entry in puts}
                assert ledger.count() == len(expected)


class TestScan:
    @pytest.mark.parametrize("chunk", [1, 7, 100, 101, 1000])
    def test_gives_every_record_once_and_in_order(self, ledger: Ledger, chunk: int) -> None:
        puts = [record(seed, number=(0, 1, 256)[seed % 3], key_bytes=16 + seed % 2 * 2) for seed in range(101)]
        ledger.apply(puts)
        pieces = list(ledger.scan(chunk))
        assert all(0 < len(rows) <= chunk for rows in pieces)
        assert found(ledger, chunk) == in_order(puts)

    def test_keeps_a_chunk_in_memory_and_not_all(self, ledger: Ledger) -> None:
        ledger.apply([record(seed) for seed in range(20_000)])
        tracemalloc.start()
        try:
            assert sum(len(rows) for rows in ledger.scan(200)) == 20_000
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 5 * 200 * RECORD_BYTES + 50_000

    def test_goes_on_while_records_come_and_go(self, ledger: Ledger) -> None:
        puts = in_order([record(seed) for seed in range(1000)])
        ledger.apply(puts)
        seen = []
        for rows in ledger.scan(10):
            seen += records(rows)
            ledger.apply([record(len(seen), number=0)], [name(seen[-1])])
        assert seen == puts

    def test_left_in_the_middle_does_not_keep_the_folder_locked(self, path: Path) -> None:
        with closing(Ledger(path)) as ledger:
            ledger.apply([record(seed) for seed in range(100)])
            scan = ledger.scan(10)
            next(scan)
        with closing(Ledger(path)) as ledger:
            assert ledger.count() == 100


class TestTheRest:
    def test_marks_and_slabs_are_there_after_a_reopening(self, path: Path) -> None:
        marks = Marks(slab_bytes=1 << 26, epoch=HUGE)
        with closing(Ledger(path)) as ledger:
            ledger.put_marks(marks)
            ledger.put_slab(HUGE, "rouge et été", 4096)
            ledger.put_slab(1, "", HUGE)
            ledger.put_slab(2, "red", 4096)
            ledger.delete_slabs([2])
            ledger.apply([record(1)])
        with closing(Ledger(path, create=False)) as ledger:
            assert ledger.marks() == marks
            assert ledger.slabs() == {HUGE: GroupKey("rouge et été", 4096), 1: GroupKey("", HUGE)}
            assert found(ledger) == [record(1)]

    def test_where_writes_must_wait_for_a_flush_none_is_lost(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usual = ledger_module._options

        def tiny() -> object:
            options = usual()
            options.set_write_buffer_size(64 << 10)
            options.set_max_write_buffer_number(2)
            return options

        monkeypatch.setattr(ledger_module, "_options", tiny)
        puts = [record(seed) for seed in range(20_000)]
        with closing(Ledger(path)) as ledger:
            ledger.apply(puts)
            assert found(ledger) == in_order(puts)

    def test_a_closed_ledger_refuses_every_call(self, path: Path) -> None:
        ledger = Ledger(path)
        ledger.close()
        for call in (ledger.count, ledger.marks, ledger.sync, ledger.slabs, lambda: ledger.apply([record(1)])):
            with pytest.raises(OSError, match="closed"):
                call()


class TestOpening:
    def test_twice_is_refused(self, path: Path, ledger: Ledger) -> None:
        with pytest.raises(ConfigError, match="in use by another process"):
            Ledger(path)
        assert ledger.count() == 0

    def test_in_two_processes_is_refused(self, path: Path, ledger: Ledger) -> None:
        script = f"from pathlib import Path; from kvstore.ledger import Ledger, set_aside; p = Path({str(path)!r})"
        for call in ("Ledger(p)", "set_aside(p)"):
            done = subprocess.run([sys.executable, "-c", f"{script}; {call}"], capture_output=True, text=True)
            assert "ConfigError" in done.stderr
            assert "in use by another process" in done.stderr
        ledger.apply([record(1)])

    def test_nothing_is_made_where_nothing_shall_be(self, path: Path) -> None:
        with pytest.raises(ConfigError, match="not a ledger: nothing is there"):
            Ledger(path, create=False)
        assert not path.exists()

    def test_an_empty_folder_becomes_a_ledger(self, path: Path) -> None:
        path.mkdir()
        with closing(Ledger(path)) as ledger:
            assert ledger.was_clean
        assert os.listdir(path.parent) == [path.name]

    def test_another_folder_is_left_alone(self, path: Path) -> None:
        path.mkdir()
        (path / "thesis.txt").write_text("all of it")
        for call in (Ledger, set_aside):
            with pytest.raises(ConfigError, match="not a ledger"):
                call(path)
        assert os.listdir(path) == ["thesis.txt"]

    @pytest.mark.parametrize("version", ["0", "2", "99"])
    def test_another_format_version_is_refused_and_not_touched(self, path: Path, version: str) -> None:
        Ledger(path).close()
        (path / "FORMAT").write_text(f"cairn ledger {version}\n")
        before = sorted(os.listdir(path))
        with pytest.raises(ConfigError, match=f"format version {version} is not 1"):
            Ledger(path)
        assert sorted(os.listdir(path)) == before

    def test_after_a_process_that_did_not_close_it_says_so(self, path: Path) -> None:
        script = f"import os; from tests.unit.test_ledger import *; Ledger(Path({str(path)!r})).apply([record(1)]);"
        assert subprocess.run([sys.executable, "-c", script + "os._exit(3)"]).returncode == 3
        with closing(Ledger(path)) as ledger:
            assert not ledger.was_clean
            assert found(ledger) == [record(1)]
        with closing(Ledger(path)) as ledger:
            assert ledger.was_clean


DAMAGE = {
    "gone": lambda file, rng: file.unlink(),
    "empty": lambda file, rng: os.truncate(file, 0),
    "cut": lambda file, rng: os.truncate(file, rng.randrange(1, file.stat().st_size)),
    "flipped": lambda file, rng: flip(file, rng),
}


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def pieces(log: bytes) -> Iterator[int]:
    """Where the kinds of a log's pieces are: behind a checksum and a size, in blocks of 32 KiB."""
    start = 0
    while start + 7 < len(log):
        yield start + 6
        start += 7 + int.from_bytes(log[start + 4 : start + 6], "little")
        if -start % 2**15 < 7:
            start += -start % 2**15


def read_into(entries: list[Record], path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        for rows in ledger.scan(50):
            entries += records(rows)


def filled(path: Path) -> list[Record]:
    """Two sorted files, a change of what the first has among them."""
    puts = [record(seed) for seed in range(3000)]
    for half in (puts[:2000], puts[1000:]):
        with closing(Ledger(path)) as ledger:
            ledger.apply(half)
    return in_order(puts)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    path = tmp_path_factory.mktemp("sound") / "ledger"
    return path, filled(path)


class TestDamage:
    @pytest.mark.parametrize("how", DAMAGE)
    @pytest.mark.parametrize("kind", ["*.sst", "MANIFEST-*", "CURRENT", "FORMAT"])
    def test_of_what_holds_records_is_told(
        self, sound: tuple[Path, list[Record]], path: Path, kind: str, how: str
    ) -> None:
        for seed in range(3):
            shutil.copytree(sound[0], path)
            rng = random.Random(f"{kind} {how} {seed}")
            DAMAGE[how](rng.choice(sorted(path.glob(kind))), rng)
            before: list[Record] = []
            with pytest.raises((ConfigError, OSError)):
                read_into(before, path)
            assert before == sound[1][: len(before)]
            shutil.rmtree(path)

    @pytest.mark.parametrize("how", DAMAGE)
    @pytest.mark.parametrize("kind", ["LOG", "LOG.old.*", "OPTIONS-*", "IDENTITY", "rocksdict-config.json", "LOCK"])
    def test_of_what_holds_none_does_no_harm(
        self, sound: tuple[Path, list[Record]], path: Path, kind: str, how: str
    ) -> None:
        shutil.copytree(sound[0], path)
        files = [file for file in sorted(path.glob(kind)) if how in ("gone", "empty") or file.stat().st_size]
        for file in files:
            DAMAGE[how](file, random.Random(f"{kind} {how}"))
        with closing(Ledger(path)) as ledger:
            assert found(ledger) == sound[1]

    def test_a_ledger_of_an_earlier_day_under_the_mark_of_a_later_is_refused(self, path: Path) -> None:
        filled(path)
        earlier = path.with_name("earlier")
        shutil.copytree(path, earlier)
        with closing(Ledger(path)) as ledger:
            ledger.apply([record(9)])
        shutil.copy(path / "CLEAN", earlier)
        with pytest.raises(OSError, match="closed at change 4001, and now at 4000"):
            Ledger(earlier)

    @pytest.mark.parametrize("kind", ["*.log", "MANIFEST-*"])
    def test_of_the_kind_of_a_piece_of_a_log_is_told_and_nobody_waits_for_ever(
        self, path: Path, tmp_path: Path, kind: str
    ) -> None:
        with closing(Ledger(path)) as ledger:
            ledger.apply([record(seed) for seed in range(1000)])
            shutil.copytree(path, tmp_path / "crashed")
        (log,) = (tmp_path / "crashed").glob(kind)
        sound = log.read_bytes()
        for place in pieces(sound):
            for bit in (4, 8, 128):
                spoilt = bytearray(sound)
                spoilt[place] ^= bit
                if spoilt[place] > 4:
                    log.write_bytes(spoilt)
                    with pytest.raises(OSError, match="damaged"):
                        Ledger(log.parent)
        log.write_bytes(sound)
        with closing(Ledger(log.parent)) as ledger:
            assert ledger.count() == 1000

    def test_can_be_set_aside_while_it_is_being_handled(self, path: Path) -> None:
        filled(path)
        flip(min(path.glob("*.sst")), random.Random(3))
        ledger = Ledger(path)
        try:
            found(ledger)
        except OSError:
            ledger.close()
            assert set_aside(path).name == "ledger.broken-1"
            with closing(Ledger(path)) as fresh:
                assert fresh.count() == 0
        else:
            pytest.fail("the damage was not found")

    def test_broken_ledgers_are_numbered_and_the_last_kept(self, path: Path) -> None:
        (path.parent / "ledger.broken-mine").mkdir()
        for number in range(1, 5):
            Ledger(path).close()
            assert set_aside(path) == path.with_name(f"ledger.broken-{number}")
        left = {file.name for file in path.parent.iterdir()}
        assert left == {"ledger.broken-mine", "ledger.broken-3", "ledger.broken-4"}
        assert len(left) - 1 == BROKEN_KEPT
