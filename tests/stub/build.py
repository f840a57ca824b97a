"""A CUDA driver that is none, for code that wants one on machines without a GPU."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "cuda.c"


def build_stub_driver(target: Path, *options: str) -> None:
    """As a shared library. Skips the test, with the reason, where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the stub driver with")
    subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", str(target), str(SOURCE)], check=True)


def environ_with_stub_driver(folder: Path) -> dict[str, str]:
    """Build the stub in `folder`; the environment of a child that finds it as libcuda.so.1.

    Skips the test, with the reason, where there is no compiler or no kvikio.
    """
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed: its code cannot be run")
    build_stub_driver(folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    return {**os.environ, "LD_LIBRARY_PATH": path}
