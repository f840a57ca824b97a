"""A CUDA driver that is none, for kvikio's real code on machines without a GPU."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "cuda.c"


def environ_with_stub_driver(folder: Path) -> dict[str, str]:
    """Build the stub in `folder`; the environment of a child that finds it as libcuda.so.1.

    Skips the test, with the reason, where there is no compiler or no kvikio.
    """
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed: its code cannot be run")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the stub driver with")
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(folder / "libcuda.so.1"),
        str(SOURCE),
    ]
    subprocess.run(command, check=True)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    return {**os.environ, "LD_LIBRARY_PATH": path}
