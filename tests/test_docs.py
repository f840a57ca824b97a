"""The documents against the code: links resolve, nothing that users meet is missing, and examples run."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from kvstore.errors import ERRORS
from kvstore.metrics import METRICS
from kvstore.wire import REPLIES, REQUESTS
from scheduler.admission import ADMISSIONS
from scheduler.policies import POLICIES
from server.cli import app
from server.conductor import exporter as conductor_exporter
from server.conductor import settings as conductor_settings
from server.conductor.app import ConductorRoutes
from server.config import defaults, load
from server.gateway import app as gateway_app
from server.gateway import metrics as gateway_metrics
from server.gateway import settings as gateway_settings
from server.rest import create_app
from server.sources import describe, show
from server.worker import app as worker_app
from server.worker import metrics as worker_metrics
from server.worker.settings import WorkerConfig

REPO = Path(__file__).parent.parent
DOCS = REPO / "docs"
PAGES = [REPO / "README.md", REPO / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def text(name: str) -> str:
    return (DOCS / name).read_text()


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_inside_the_repository_resolve(page):
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_can_be_reached_from_the_readme():
    reached, todo = set(), [REPO / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in LINK.findall(prose(page)):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists():
                todo.append(target)
            elif target.is_dir():
                todo += target.glob("*.md")
    assert {page for page in PAGES if page not in reached} == set()


# What users meet


def settings() -> dict[str, str]:
    """Of the node and of all services, with their defaults."""
    worker = {name: show(default, hint) for name, hint, default in describe(WorkerConfig)}
    return {**defaults(), **conductor_settings.defaults(), **gateway_settings.defaults(), **worker}


def test_every_setting_is_documented_with_its_default():
    rows = re.findall(r"^\| `([^`]+)` \| (?:`([^`]*)`)? ?\|", text("configuration.md"), re.MULTILINE)
    assert [name for name, count in Counter(name for name, _ in rows).items() if count > 1] == []
    assert dict(rows) == settings()


def test_every_setting_is_read_by_its_service():
    paths = [path for path in (REPO / "server").rglob("*.py") if path.name not in ("config.py", "settings.py")]
    code = "\n".join(path.read_text() for path in paths)
    assert [name for name in settings() if not re.search(rf"\.{name.rpartition('.')[2]}\b", code)] == []


def commands(command: Any, path: str) -> Iterator[str]:
    """A group that does something by itself, as `cairn conductor` does, is a command too."""
    default = getattr(command, "default", None)
    if default is not None or not hasattr(command, "commands"):
        yield path
    for name, inner in getattr(command, "commands", {}).items():
        if name != default:
            yield from commands(inner, f"{path} {name}")


def test_every_command_is_documented():
    page = text("cli.md")
    missing = [path for path in commands(typer.main.get_command(app), "cairn") if path not in page]
    assert missing == []


def test_every_path_of_the_rest_interface_is_documented():
    page = text("rest.md")
    operations = [
        f"{method.upper()} {path}"
        for path, methods in create_app(None).openapi()["paths"].items()
        for method in methods
    ]
    assert operations
    assert [operation for operation in operations if operation not in page] == []


def paths_of(routes: Any) -> Iterator[str]:
    for route in routes:
        for method in sorted(route.methods - {"HEAD"}):
            yield f"{method} {re.sub(r':[a-z]+}', '}', route.path)}"


@pytest.mark.parametrize(
    ("page", "routes"),
    [
        (
            "conductor.md",
            ConductorRoutes(SimpleNamespace(config=conductor_settings.ConductorConfig())).paths(),
        ),
        ("serving.md", gateway_app.create_app(gateway_settings.GatewayConfig(), None)[0].routes),
        ("serving.md", worker_app.create_app(None, "").routes),
    ],
    ids=["conductor", "gateway", "worker"],
)
def test_every_path_of_a_service_is_documented(page, routes):
    operations = list(paths_of(routes))
    assert operations
    assert [operation for operation in operations if f"`{operation}`" not in text(page)] == []


def metrics() -> set[str]:
    """Of the node and of all services."""
    asking = SimpleNamespace(is_up=True, places={}, counts=Counter())
    told = gateway_metrics.Metrics(asking, SimpleNamespace(missed=0)).render()[0]
    told += worker_metrics.Metrics(lambda: 0, lambda: 0).text()
    names = re.findall(r"^# TYPE (\w+)", told.decode(), re.MULTILINE)
    services = {name for name in names if not name.endswith("_created")}
    return {*METRICS, *conductor_exporter.METRICS, *conductor_exporter.HISTOGRAMS, *services}


def test_every_metric_is_documented():
    page = text("metrics.md")
    assert [name for name in metrics() if f"`{name}`" not in page] == []
    assert [name for name in re.findall(r"`(cairn_\w+)`", page) if name not in metrics()] == []


def test_every_policy_and_admission_is_documented():
    page = text("conductor.md")
    assert [name for name in (*POLICIES, *ADMISSIONS) if f"`{name}`" not in page] == []


def test_every_error_is_documented_with_its_class_and_whether_to_try_again():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (yes|no) \|", text("errors.md"), re.MULTILINE)
    assert rows == [(code, error.__name__, "yes" if error.retryable else "no") for code, error in ERRORS.items()]


def test_every_message_is_documented():
    page = text("protocol.md")
    missing = [verb for verb in {**REQUESTS, **REPLIES} if f"`{verb}`" not in page]
    assert missing == []


def tree() -> dict[str, set[str]]:
    """The modules that the architecture lists, by folder: it is the first word of a line, or one of several."""
    found: dict[str, set[str]] = {}
    folders: list[tuple[int, str]] = []
    listing = next(block for block in blocks(DOCS / "architecture.md", "") if block.startswith("kvstore/"))
    for line in listing.splitlines():
        indent = len(line) - len(line.lstrip())
        folders = [(at, name) for at, name in folders if at < indent]
        first, *words = line.split()
        if first.endswith("/"):
            folders.append((indent, first))
        elif folders:
            names = {word.rstrip(",") for word in (first, *words) if word.rstrip(",").endswith(".py")}
            found.setdefault("".join(name for _, name in folders).rstrip("/"), set()).update(names)
    return found


@pytest.mark.parametrize(
    "folder",
    [
        *(
            "kvstore",
            "kvstore/cluster",
            "engine_client",
            "server",
            "scheduler",
            "scheduler/policies",
            "scheduler/admission",
        ),
        *("scheduler/simulation", "server/conductor", "server/gateway", "server/worker"),
    ],
)
def test_every_module_is_in_the_architecture(folder):
    modules = {path.name for path in (REPO / folder).glob("*.py")} - {"__init__.py"}
    assert modules
    assert modules - tree()[folder] == set()
    if folder != "kvstore":
        assert tree()[folder] - modules == set()


# Examples


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    shell = "\n".join(block for page in PAGES for block in blocks(page, "sh"))
    named = set(re.findall(r"^make ([a-z]+)\b", shell, re.MULTILINE))
    assert named
    assert named <= targets


def test_every_cairn_command_in_an_example_exists():
    known = set(commands(typer.main.get_command(app), "cairn"))
    shell = "\n".join(block for page in PAGES for block in blocks(page, "sh"))
    for line in re.findall(r"^cairn .*$", shell, re.MULTILINE):
        words = line.split()
        assert {" ".join(words[:2]), " ".join(words[:3])} & known, line


@pytest.fixture
def node(tmp_path) -> Iterator[dict[str, str]]:
    """The environment in which examples find a small node without being told where it is."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CAIRN_")}
    environ |= {"XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    settings = ["--tiers.dram.capacity=64MiB", "--tiers.dram.slab=4MiB", "--node.tcp_listen=", "--rest.listen="]
    with subprocess.Popen(
        [sys.executable, "-m", "server.cli", "node", *settings], env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline(), "the node says when it serves"
            yield environ
        finally:
            process.terminate()


def test_the_python_in_the_readme_runs(node):
    for source in blocks(REPO / "README.md", "python"):
        done = subprocess.run([sys.executable, "-c", source], env=node, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_the_makefile_and_the_package_want_the_same_torch():
    wanted = re.findall(r"torch==[\d.]+", (REPO / "pyproject.toml").read_text())
    assert wanted == re.findall(r"torch==[\d.]+", (REPO / "Makefile").read_text())


def test_the_example_settings_are_good():
    environ = {"CAIRN_TENANTS__0__TOKEN": "t" * 32, "CAIRN_TENANTS__0__SECRET": "s" * 32}
    config = load(REPO / "deploy" / "node.toml", environ, [])
    assert [tenant.name for tenant in config.tenants] == [config.node.unix_tenant]
