"""Tests that need a GPU: where there is none each is skipped, and the summary says how many and why."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def why_not() -> str | None:
    """Why tests of a GPU cannot run here; None where they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if ours and (reason := why_not()):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "needs a GPU" in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests in tests/gpu were not run: {why_not()}", yellow=True)
