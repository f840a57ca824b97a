"""Names that survive a power loss: a file's is durable when its folder is."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on the disk. Blocks. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
