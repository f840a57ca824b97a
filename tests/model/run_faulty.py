"""Run tests on faulty copies of the package: `python -m tests.model.run_faulty SUITE FOLDER...`.

Prints for each folder, as it is done, the exit status of pytest and the folder; what pytest said is in
FOLDER/output. The test tools are imported once, and each run is a fork of this process: two at a time.
"""

import os
import sys
from pathlib import Path

import hypothesis.stateful
import pytest

AT_ONCE = 2
SUITES = {
    "table": [
        *("unit/test_holds.py", "unit/test_table.py", "unit/test_copies.py"),
        *("unit/test_slab.py", "unit/test_eviction.py"),
    ],
    "table model": ["model/test_table_model.py"],
    "tiers model": ["model/test_tiers_model.py"],
    "store model": ["model/test_tiered_store_model.py"],
    "loads and stores": [
        *("unit/test_disk_queue.py", "unit/test_admission.py", "unit/test_disk.py"),
        *("unit/test_promotion.py", "unit/test_demotion.py", "unit/test_reclaim.py"),
    ],
    "published": ["model/test_published_model.py"],
    "channel": ["unit/test_channel.py", "unit/test_channel_stream.py", "unit/test_channel_socket.py"],
    "channel model": ["model/test_channel_model.py"],
    "transfers": ["unit/test_read_queue.py", "unit/test_rdma_paths.py"],
    "transfers model": ["model/test_rdma_transfers_model.py"],
    "directory": ["unit/test_homes.py", "unit/test_directory.py", "unit/test_announcer.py"],
    "directory model": ["model/test_directory_model.py"],
    "conductor": ["unit/test_conductor.py"],
    "conductor estimates": ["unit/test_conductor.py"],
    "conductor model": ["model/test_conductor_model.py"],
    "prefix index": ["unit/test_prefix_index.py"],
    "prefix index model": ["model/test_prefix_index_machine.py"],
}
OPTIONS = ["-q", "-x", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", "--noconftest", "--rootdir", "."]


def run(suite: str, folder: Path) -> None:
    """In a fork: ends the process."""
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, str(folder))
    status = pytest.main([*OPTIONS, *(f"tests/{name}" for name in SUITES[suite])])
    sys.stdout.flush()
    os._exit(status)


def main(suite: str, folders: list[Path]) -> None:
    assert hypothesis.stateful.__name__ in sys.modules
    assert not any(name.startswith(("kvstore", "scheduler")) for name in sys.modules), "each fork imports its own"
    running: dict[int, Path] = {}
    while folders or running:
        while folders and len(running) < AT_ONCE:
            folder = folders.pop(0)
            child = os.fork()
            if not child:
                run(suite, folder)
            running[child] = folder
        child, status = os.wait()
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)} {running.pop(child)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], [Path(folder).resolve() for folder in sys.argv[2:]])
