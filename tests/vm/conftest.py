"""Tests on real RDMA verbs: they run where there is a device, as in the guest that tests/system/test_vm.py boots."""

from pathlib import Path

import pytest

from kvstore.transport.rdma.verbs import Verbs, load_verbs

DEVICES = Path("/sys/class/infiniband")
PYVERBS_IS_FOREIGN = "pyverbs is of another Python"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICES.is_dir() and any(DEVICES.iterdir()):
        return
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.skip(reason="no RDMA device here: tests/system/test_vm.py runs it in a guest"))


@pytest.fixture(params=["pyverbs", "ibverbs"])
def verbs(request: pytest.FixtureRequest) -> Verbs:
    """Each binding in turn."""
    if request.param == "pyverbs":
        pytest.importorskip("pyverbs.device", reason=PYVERBS_IS_FOREIGN)
    return load_verbs(request.param)
