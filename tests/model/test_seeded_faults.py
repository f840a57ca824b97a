"""Each seeded fault must be found by the tests of its part, run on a faulty copy of the package."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.model import (
    channel_faults,
    conductor_faults,
    directory_faults,
    faults,
    prefix_index_faults,
    published_faults,
    rdma_faults,
    tier_faults,
)
from tests.model.faults import Fault

FAULTS = {
    "table": faults.FAULTS,
    "table model": faults.MODEL_FAULTS,
    "tiers model": tier_faults.MODEL_FAULTS,
    "store model": tier_faults.STORE_FAULTS,
    "loads and stores": tier_faults.FAULTS,
    "published": published_faults.FAULTS,
    "channel": channel_faults.FAULTS,
    "channel model": channel_faults.MODEL_FAULTS,
    "transfers": rdma_faults.FAULTS,
    "transfers model": rdma_faults.MODEL_FAULTS,
    "directory": directory_faults.FAULTS,
    "directory model": directory_faults.MODEL_FAULTS,
    "conductor": conductor_faults.FAULTS,
    "conductor estimates": conductor_faults.ESTIMATE_FAULTS,
    "conductor model": conductor_faults.MODEL_FAULTS,
    "prefix index": prefix_index_faults.FAULTS,
    "prefix index model": prefix_index_faults.MODEL_FAULTS,
}
Outcomes = Callable[[str], dict[str, tuple[int, str]]]
REPO = Path(__file__).parents[2]
FOUND, NOT_FOUND = 1, 0  # exit status of pytest


def copy_package(folder: Path, fault: Fault | None) -> None:
    """`folder` becomes a checkout of the pure packages, with the fault in it."""
    for package in ("kvstore", "scheduler"):
        shutil.copytree(REPO / package, folder / package)
    (folder / "tests").symlink_to(REPO / "tests")
    if fault is not None:
        file = folder / fault.path
        file.write_text(file.read_text().replace(fault.before, fault.after))


def outcomes(suite: str, parent: Path) -> dict[str, tuple[int, str]]:
    """Of the tests on each faulty copy, and on one without a fault: exit status and output, by situation."""
    folders = {}
    for number, fault in enumerate((None, *FAULTS[suite])):
        folder = folders[fault.situation if fault is not None else "none"] = (
            parent / f"{suite.replace(' ', '-')}-{number}"
        )
        folder.mkdir()
        copy_package(folder, fault)
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CAIRN_MODEL_PROFILE": "mutant"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.run_faulty", suite, *folders.values()],
        cwd=REPO, env=environ, capture_output=True, text=True, timeout=110, check=True,
    )  # fmt: skip
    statuses = {folder: int(status) for status, folder in map(str.split, done.stdout.splitlines())}
    return {
        situation: (statuses[str(folder)], (folder / "output").read_text()) for situation, folder in folders.items()
    }


@pytest.fixture(scope="module")
def outcomes_of(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What `outcomes` says of a suite, run once."""
    parent = tmp_path_factory.mktemp("faulty")
    return cache(lambda suite: outcomes(suite, parent))


@pytest.mark.parametrize("suite", FAULTS)
def test_situations_are_told_apart(suite: str) -> None:
    assert len({fault.situation for fault in FAULTS[suite]}) == len(FAULTS[suite])


@pytest.mark.parametrize("suite", FAULTS)
def test_without_a_fault_nothing_is_found(suite: str, outcomes_of: Outcomes) -> None:
    status, output = outcomes_of(suite)["none"]
    assert status == NOT_FOUND, output


@pytest.mark.parametrize(
    ("suite", "fault"),
    [pytest.param(suite, fault, id=fault.situation) for suite, faults in FAULTS.items() for fault in faults],
)
def test_is_found(suite: str, fault: Fault, outcomes_of: Outcomes) -> None:
    source = (REPO / fault.path).read_text()
    assert source.count(fault.before) == 1, "the source has changed: seed this fault anew"
    status, output = outcomes_of(suite)[fault.situation]
    assert status == FOUND, output
