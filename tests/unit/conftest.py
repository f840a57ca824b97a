"""What several unit tests of the tiers begin with."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiered_store import TieredStore


@pytest.fixture
def make() -> Iterator[Callable[..., TieredStore]]:
    """Stores that at the end are at rest and in order."""
    stores: list[TieredStore] = []
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))

    def made(**settings) -> TieredStore:
        stores.append(TieredStore(folder / str(len(stores)), **settings))
        return stores[-1]

    yield made
    try:
        for node in stores:
            node.settle()
            assert node.problems() == []
            node.close()
    finally:
        shutil.rmtree(folder)
