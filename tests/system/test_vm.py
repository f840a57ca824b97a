"""The tests on real RDMA verbs, run in a guest: all that there are, none left out in silence."""

import compileall
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.vm.conftest import PYVERBS_IS_FOREIGN
from tests.vm.machine import DIED, Outcome, build, missing, pyverbs_fits, run

ROOT = Path(__file__).parents[2]
PYTEST = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--confcutdir=tests/vm"]
BARE = ["env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable, *PYTEST]  # plugins take 25 s to import in the guest
TIMEOUT_S = 240
SKIPS = (PYVERBS_IS_FOREIGN,)  # reasons for which a test may be left out in the guest


def in_guest(out: Path, *arguments: str) -> Outcome:
    for package in ("kvstore", "engine_client", "server", "tests"):  # the guest is slow, and keeps nothing
        compileall.compile_dir(ROOT / package, quiet=2)
    return run([*BARE, "--junitxml=/run/machine/out/junit.xml", *arguments], out, TIMEOUT_S)


def collected(*arguments: str) -> int:
    """How many tests there are, counted on this side."""
    done = subprocess.run(
        [*BARE, "--collect-only", "--durations=0", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return sum("::" in line for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_all_tests_on_real_verbs_pass_in_a_guest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    lack = missing()
    try:
        lack or build()
    except (OSError, subprocess.CalledProcessError) as error:
        lack = f"no kernel for the guest: {error}"
    if lack:
        assert not os.environ.get("CI"), f"the tests on real verbs must run here: {lack}"
        pytest.skip(lack)
    outcome = in_guest(tmp_path, "tests/vm")
    if outcome.status == DIED:
        with capsys.disabled():
            print("\nthe guest died, once more:\n" + outcome.output[-2000:] + outcome.console[-4000:])
        outcome = in_guest(tmp_path, "tests/vm")
    print(outcome.output[-20_000:])
    assert outcome.status == 0, f"status {outcome.status} after {outcome.seconds:.0f} s\n{outcome.console[-4000:]}"
    cases = list(ElementTree.parse(tmp_path / "junit.xml").iter("testcase"))
    skips = [skip.get("message", "") for case in cases for skip in case.iter("skipped")]
    allowed = () if pyverbs_fits() else SKIPS
    assert [skip for skip in skips if not skip.startswith(allowed)] == []
    assert len(cases) == collected("tests/vm")
    with capsys.disabled():
        print(f"\n{len(cases) - len(skips)} tests on real verbs in {outcome.seconds:.0f} s")
