"""A cluster in virtual time, under many seeds: what goes wrong is had again by the command that a failure prints."""

import os
import subprocess
import sys
from pathlib import Path
from random import SystemRandom

import pytest

from tests.sim import many
from tests.sim.run import failures_of, simulate, told

REPO = Path(__file__).parent.parent.parent
SEEDS, FRESH_SEEDS = 200, 8
PROCESSES = 2
SAME_SEEDS = 2
SEED_BYTES = 4


@pytest.mark.timeout(600)
def test_whatever_goes_wrong_all_is_well_at_rest():
    fresh = int.from_bytes(SystemRandom().randbytes(SEED_BYTES), "little")
    seeds = [*range(SEEDS), *range(fresh, fresh + FRESH_SEEDS)]

    wrong = [told(outcome) for outcome in failures_of(seeds, processes=PROCESSES) if outcome.wrongs]

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", range(SAME_SEEDS))
def test_a_run_is_the_same_again_in_another_process(seed):
    code = f"from tests.sim.run import simulate; print(simulate({seed}).digest)"
    digests = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPO,
            env=os.environ | {"PYTHONHASHSEED": hashes},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hashes in ("1", "2")
    ]

    assert digests == [simulate(seed).digest] * 2


def test_a_request_asks_no_more_of_many_nodes_than_a_chain_has_stripes():
    few, more = many.row(10, seed=1), many.row(40, seed=1)

    stripes = -(-many.CHAIN_BLOCKS // 32)
    assert few[1] <= stripes
    assert more[1] <= stripes
    assert more[5] <= stripes, "messages of a put"
