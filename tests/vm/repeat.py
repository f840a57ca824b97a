"""Runs the tests on real verbs in a new guest each time, and says which failed how often.

python -m tests.vm.repeat 50 [arguments of pytest]
"""

import os
import statistics
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from tests.system.test_vm import in_guest
from tests.vm.machine import ABSENT, DIED, missing

TAIL = 6000  # characters of the output of a run that failed


def failures(out: Path) -> list[str]:
    """Names of the tests that failed; none where the guest left no report."""
    report = out / "junit.xml"
    if not report.exists():
        return []
    cases = ElementTree.parse(report).iter("testcase")
    failed = (case for case in cases if case.find("failure") is not None or case.find("error") is not None)
    return [f"{case.get('classname')}.{case.get('name')}" for case in failed]


def main(times: int, arguments: list[str]) -> int:
    """Status 0 when all runs passed, 1 when one did not, ABSENT when no guest can be had."""
    if lack := missing():
        print(lack, file=sys.stderr)
        return ABSENT
    failed: Counter[str] = Counter()
    bad, seconds = 0, []
    for number in range(1, times + 1):
        with tempfile.TemporaryDirectory() as folder:
            outcome = in_guest(Path(folder), *(arguments or ["tests/vm"]))
            names = failures(Path(folder))
        seconds.append(outcome.seconds)
        if outcome.status:
            bad += 1
            failed.update(names or [f"(no report: status {outcome.status})"])
        if outcome.status or times == 1:
            print(outcome.output[-TAIL:] if times > 1 else outcome.output)
        if outcome.status >= DIED:
            print(outcome.console[-TAIL:])
        print(f"run {number} of {times}: status {outcome.status}, {outcome.seconds:.0f} s", flush=True)
    print(f"{bad} of {times} runs failed; median {statistics.median(seconds):.0f} s, longest {max(seconds):.0f} s")
    for name, count in failed.most_common():
        print(f"{count:4d}  {name}")
    return int(bad > 0)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
