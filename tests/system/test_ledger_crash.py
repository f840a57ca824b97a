"""A process that writes a ledger is killed, or the power fails: whole batches are there, from the first on."""

import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.ledger import Ledger, Marks, Record, records
from kvstore.types import BlockKey

BATCH, KEPT = 200, 20  # records of a batch; how many batches are left, when the one before them goes
TRIALS = 20
SYNCED, WRITTEN = 30, 60


def batch(number: int) -> list[Record]:
    keys = [BlockKey(number.to_bytes(8, "big") + index.to_bytes(8, "big")) for index in range(BATCH)]
    return [Record(1, key, None, number, index, 1, 1, number, 5, 6, 7, 8) for index, key in enumerate(keys)]


def write(path: Path, first: int) -> None:
    """Batches from `first` on, and away with old ones in the same step; say the number of each that is written."""
    ledger, number = Ledger(path), first
    while True:
        ledger.apply(batch(number), [(1, record.key) for record in batch(number - KEPT)] if number >= KEPT else [])
        os.write(1, number.to_bytes(4, "big"))
        if number % 50 == 0:
            ledger.put_marks(Marks(epoch=number))
        number += 1


def batches(ledger: Ledger) -> list[int]:
    """The numbers of the batches that are there. Fails at a torn one."""
    found = [record for rows in ledger.scan() for record in records(rows)]
    numbers = sorted({record.version for record in found})
    assert found == [record for number in numbers for record in batch(number)]
    return numbers


def expected(last: int) -> list[int]:
    return list(range(max(last - KEPT + 1, 0), last + 1))


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_loses_nothing_that_it_was_told_is_written(tmp_path: Path) -> None:
    rng, first = random.Random(7), 0
    for _ in range(TRIALS):
        command = [sys.executable, "-m", "tests.system.test_ledger_crash", str(tmp_path / "ledger"), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            said = process.stdout.read(4 * rng.randrange(1, 200))
            process.send_signal(signal.SIGKILL)
            said += process.stdout.read()
        assert process.returncode == -signal.SIGKILL
        acknowledged = int.from_bytes(said[-4:], "big")
        with closing(Ledger(tmp_path / "ledger")) as ledger:
            assert not ledger.was_clean
            numbers = batches(ledger)
            assert ledger.marks().epoch >= (acknowledged - 1) // 50 * 50
        assert numbers in (expected(acknowledged), expected(acknowledged + 1))
        first = numbers[-1] + 1


def image(path: Path) -> tuple[Path, int, int]:
    """A copy of a ledger of WRITTEN batches with a sync after SYNCED: its log, where that was synced, and its end."""
    with closing(Ledger(path.with_name("live"))) as ledger:
        for number in range(WRITTEN):
            ledger.apply(batch(number), [(1, record.key) for record in batch(number - KEPT)] if number >= KEPT else [])
            if number == SYNCED - 1:
                ledger.sync()
                log = max(path.with_name("live").glob("*.log"))
                safe_bytes = log.stat().st_size
        shutil.copytree(path.with_name("live"), path)
    whole = (path / log.name).stat().st_size
    assert whole > safe_bytes
    return path / log.name, safe_bytes, whole


def spoil(log: Path, start: int, content: bytes) -> None:
    with log.open("r+b") as file:
        file.seek(start)
        file.write(content)


@pytest.mark.parametrize("left", ["nothing", "zeros", "zeros, then what was written later"])
@pytest.mark.parametrize("seed", range(3))
def test_after_a_power_loss_a_prefix_of_the_batches_is_there_and_all_that_was_synced(
    tmp_path: Path, seed: int, left: str
) -> None:
    rng = random.Random(f"{seed} {left}")
    log, safe_bytes, whole = image(tmp_path / "durable")
    cut = rng.randrange(safe_bytes, whole)
    if left == "nothing":
        os.truncate(log, cut)
    else:
        spoil(log, cut, bytes((whole if left == "zeros" else rng.randrange(cut, whole)) - cut))
    with closing(Ledger(log.parent)) as ledger:
        assert not ledger.was_clean
        numbers = batches(ledger)
        assert numbers == expected(numbers[-1])
        assert SYNCED - 1 <= numbers[-1] < WRITTEN
        ledger.apply(batch(numbers[-1] + 1))
    with closing(Ledger(log.parent)) as ledger:
        assert ledger.was_clean
        assert batches(ledger) == [*numbers, numbers[-1] + 1]


@pytest.mark.parametrize("seed", range(20))
def test_noise_in_the_log_is_told_or_ends_the_prefix(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    log, safe_bytes, whole = image(tmp_path / "durable")
    start = rng.randrange(safe_bytes, whole)
    length = rng.choice([1, 7, 5000, 50_000, whole])
    spoil(log, start, rng.randbytes(min(length, whole - start)))
    try:
        ledger = Ledger(log.parent)
    except OSError:
        return
    with closing(ledger):
        numbers = batches(ledger)
        assert numbers == expected(numbers[-1])
        assert SYNCED - 1 <= numbers[-1] < WRITTEN


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
