"""Each seeded fault must be found by the model or the unit tests, run on a faulty copy of the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.faults import FAULTS, Fault

REPO = Path(__file__).parents[2]
FOUND, NOT_FOUND = 1, 0  # exit status of pytest


def copy_package(folder: Path, fault: Fault | None) -> None:
    """`folder` becomes a checkout with the fault in it."""
    shutil.copytree(REPO / "kvstore", folder / "kvstore")
    (folder / "tests").symlink_to(REPO / "tests")
    if fault is not None:
        file = folder / "kvstore" / fault.file
        file.write_text(file.read_text().replace(fault.before, fault.after))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Of the tests on each faulty copy, and on one without a fault: exit status and output, by situation."""
    folders = {}
    for fault in (None, *FAULTS):
        situation = fault.situation if fault is not None else "none"
        folders[situation] = tmp_path_factory.mktemp("faulty")
        copy_package(folders[situation], fault)
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CAIRN_MODEL_PROFILE": "mutant"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.run_faulty", *folders.values()],
        cwd=REPO, env=environ, capture_output=True, text=True, timeout=110, check=True,
    )  # fmt: skip
    statuses = {folder: int(status) for status, folder in map(str.split, done.stdout.splitlines())}
    return {
        situation: (statuses[str(folder)], (folder / "output").read_text()) for situation, folder in folders.items()
    }


def test_situations_are_told_apart() -> None:
    assert len({fault.situation for fault in FAULTS}) == len(FAULTS)


def test_without_a_fault_nothing_is_found(outcomes: dict[str, tuple[int, str]]) -> None:
    status, output = outcomes["none"]
    assert status == NOT_FOUND, output


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.situation)
def test_is_found(fault: Fault, outcomes: dict[str, tuple[int, str]]) -> None:
    source = (REPO / "kvstore" / fault.file).read_text()
    assert source.count(fault.before) == 1, "the source has changed: seed this fault anew"
    status, output = outcomes[fault.situation]
    assert status == FOUND, output
