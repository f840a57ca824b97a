"""Rules about the code itself. They fail like any other test, so no reviewer has to remember them."""

import ast
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).parent.parent
PRODUCT = ["kvstore", "engine_client", "scheduler", "server"]
SIZED = [*PRODUCT, "bench"]

MODULE_LINES, FUNCTION_LINES, PARAMETERS = 400, 70, 6

LAYERS = [  # inside kvstore: a module imports only from lines above its own
    {"types", "errors", "clock", "durable", "message", "tasks"},
    {
        "prefix",
        "gallop",
        "slab",
        "region",
        "history",
        "metrics",
        "eviction",
        "admission",
        "bandwidth",
        "health",
        "ledger_format",
        "wire_rdma",
        "wire_operators",
    },
    {"wire_cluster"},
    {"wire_events"},
    {"published", "wire", "packed", "copier", "replica", "diskblock", "compression", "replay", "ledger"},
    {"evictable", "emptying", "transport", "disk_queue"},
    {"tiers", "tier_state"},
    {"table", "sizing", "disk"},
    {"holds", "catalogue", "node_holds"},
    {"intake", "exports", "check", "records", "salvage", "loads", "events"},
    {"promotion", "demotion", "reclaim", "defragment", "recover", "fsck"},
    {"puts", "reads", "straight"},
    {"lifting"},
    {"store"},
    {"explain", "upkeep", "cluster"},
]
KVSTORE_MODULES = set().union(*LAYERS)
MAY_IMPORT = {  # a package, and what it may import of the others; nobody imports server
    "kvstore": {},
    "scheduler": {"kvstore": {"types", "errors", "prefix", "wire"}},
    "engine_client": {
        "kvstore": {
            "types",
            "errors",
            "prefix",
            "wire",
            *("wire_rdma", "wire_cluster", "wire_events", "message"),
            "health",
            "packed",
            "transport",
            "region",
            "published",
            "copier",
            "compression",
            "tiers.hbm",
        },
    },
    "server": {"kvstore": KVSTORE_MODULES, "engine_client": None, "scheduler": None},
}
PURE = [  # no I/O, no clock, no threads, no await
    *(
        f"kvstore/{name}.py"
        for name in (
            *("types", "errors", "prefix", "wire", "wire_cluster", "wire_operators", "slab", "table"),
            *(f"cluster/{pure}" for pure in ("members", "naming", "homes", "directory", "announcer")),
            *(f"cluster/{pure}" for pure in ("choice", "heat", "replication", "window")),
            *("admission", "bandwidth", "health", "diskblock", "replay"),
            *(
                "gallop",
                "replica",
                "evictable",
                "emptying",
                "tier_state",
                "holds",
                "catalogue",
                "intake",
                "history",
                "metrics",
            ),
        )
    ),
    "kvstore/eviction/*",
    "scheduler/*",
]
IMPURE = {
    *("asyncio", "concurrent", "threading", "multiprocessing", "subprocess", "selectors", "select", "signal"),
    *(
        "time",
        "socket",
        "ssl",
        "os",
        "io",
        "mmap",
        "pathlib",
        "tempfile",
        "random",
        "secrets",
        "logging",
        "uvloop",
    ),
}
THIRD_PARTY = {  # a dependency, and the modules that know it
    "msgspec": [
        *("kvstore/prefix.py", "kvstore/message.py", "kvstore/wire.py", "kvstore/wire_rdma.py"),
        *("kvstore/cluster/members.py", "kvstore/cluster/service.py", "kvstore/cluster/etcd_line.py"),
        *("server/config.py", "server/sources.py", "server/zmq_events.py"),
        *("server/*/settings.py", "server/conductor/app.py", "server/conductor/engine_blocks.py"),
        *("server/conductor/models.py", "server/worker/service.py"),
    ],
    "aiohttp": ["server/gateway/upstream.py"],
    "ibverbs": ["kvstore/transport/rdma/ibverbs_binding.py"],
    "pyverbs": ["kvstore/transport/rdma/pyverbs_binding.py"],
    "xxhash": [
        *("kvstore/prefix.py", "kvstore/copier.py", "kvstore/diskblock.py", "kvstore/tiers/packs.py"),
        "server/rest/blocks.py",
    ],
    "numpy": [
        *("kvstore/prefix.py", "kvstore/copier.py", "kvstore/region.py", "kvstore/explain.py", "kvstore/ledger*.py"),
        *("kvstore/recover.py", "kvstore/fsck.py", "kvstore/salvage.py", "kvstore/replay.py", "kvstore/tiers/*"),
        "kvstore/admission.py",
        "kvstore/cluster/*",
        "scheduler/*",
        *(f"server/conductor/{name}.py" for name in ("chains", "models", "nodes", "service")),
        *(
            "engine_client/layout.py",
            "engine_client/codec.py",
            "engine_client/compaction.py",
            "engine_client/quantise.py",
        ),
    ],
    "etcd3aio": ["kvstore/cluster/etcd_line.py"],
    "grpc": ["kvstore/cluster/etcd_line.py"],
    "zmq": ["server/zmq_events.py"],
    "rocksdict": ["kvstore/ledger.py"],
    "kvikio": ["kvstore/tiers/kvikio_file.py"],
    "obstore": ["kvstore/tiers/object_store.py"],
    "zstandard": ["kvstore/compression.py"],
    "lz4": ["kvstore/compression.py"],
    "matplotlib": ["server/commands/trace.py", "server/commands/plotting.py"],
    "uvloop": [f"server/commands/{service}.py" for service in ("node", "conductor", "gateway", "worker")],
    "fastapi": ["server/rest/*.py"],
    "pydantic": ["server/rest/models.py", "server/rest/openapi.py"],
    "starlette": [
        "server/rest/*.py",
        "server/http_serving.py",
        *(f"server/{service}/*.py" for service in ("conductor", "gateway", "worker")),
    ],
    "uvicorn": [
        "server/rest/__init__.py",
        "server/rest/http.py",
        "server/http_serving.py",
        "server/worker/service.py",
    ],
    "prometheus_client": [
        *(
            "server/exporter.py",
            "server/conductor/exporter.py",
            "server/gateway/metrics.py",
            "server/worker/metrics.py",
        ),
    ],
    "typer": ["server/cli.py", "server/commands/*"],
    "rich": ["server/commands/*"],
    "torch": ["engine_client/adapters/*", "kvstore/tiers/hbm.py"],
    "transformers": ["engine_client/adapters/transformers.py", "engine_client/adapters/batch*.py"],
}
BROAD_EXCEPT = [  # connection handler, task supervisor, engine adapters; drivers that throw it into an operation
    *("server/connection.py", "server/node.py", "engine_client/adapters/*"),
    *("engine_client/blocking.py", "engine_client/client.py"),
    "kvstore/ledger.py",  # rocksdict raises Exception itself
    "kvstore/disk_queue.py",  # a thread hands on whatever its work raises
]
FOREIGN_SIGNATURES = ["engine_client/adapters/*"]  # methods that an engine calls with whatever it likes
READS_ENVIRONMENT = ["server/cli.py", "server/commands/*"]

BANNED_NAMES = re.compile(
    r"(Manager|Helper|Utils?|Common|Mixin|Factory|Registry|Impl|Wrapper|Info|Data|V\d)$|^(Base|Abstract)[A-Z]"
)
BANNED_FUNCTIONS = re.compile(r"_v\d+$|^(do|handle|process)_(it|stuff|data)$")
BANNED_FILES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py", "base.py", "manager.py"}
BANNED_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


class Module(NamedTuple):
    """A parsed file: `path` in the repository, `package` its first folder, `part` what follows."""

    path: str
    source: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    @property
    def part(self) -> str:
        return self.path.split("/")[1].removesuffix(".py")

    def among(self, patterns: list[str]) -> bool:
        return any(fnmatch(self.path, pattern) for pattern in patterns)


def read(path: str) -> Module:
    source = (REPO / path).read_text()
    return Module(path, source, ast.parse(source, path))


def files(*folders: str) -> list[str]:
    found = (path for folder in folders for path in (REPO / folder).rglob("*.py"))
    return sorted(str(path.relative_to(REPO)) for path in found if "__pycache__" not in path.parts)


def imports(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level
        elif isinstance(node, ast.ImportFrom):
            if node.module in PRODUCT:  # from kvstore import table
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


# Rules: each yields what is wrong with a module


def size(module: Module) -> Iterator[str]:
    lines = len(module.source.splitlines())
    if lines > MODULE_LINES:
        yield f"{lines} lines, of at most {MODULE_LINES}"
    for function in functions(module):
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{function.name} has {lines} lines, of at most {FUNCTION_LINES}"
        positional = [*function.args.posonlyargs, *function.args.args]
        named = [argument for argument in positional if argument.arg not in ("self", "cls")]
        if len(named) > PARAMETERS:
            yield f"{function.name} has {len(named)} positional parameters: make some keyword-only"


def docstring(module: Module) -> Iterator[str]:
    if module.path.endswith("__init__.py") and not module.source.strip():
        return
    sentence = (ast.get_docstring(module.tree) or "").split("\n\n")[0]
    if not sentence.endswith((".", "?", ":")):
        yield "the docstring does not begin with a sentence on what the module is for"


def names(module: Module) -> Iterator[str]:
    if Path(module.path).name in BANNED_FILES:
        yield "name the module after what is in it"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and BANNED_NAMES.search(node.name):
            yield f"class {node.name}: say what it is"
    for function in functions(module):
        if BANNED_FUNCTIONS.search(function.name):
            yield f"{function.name}: say what it does, and keep one version of it"


def layers(module: Module) -> Iterator[str]:
    if module.package == "kvstore" and module.part != "__init__" and module.part not in KVSTORE_MODULES:
        yield "which layer of kvstore is it in? Add it to LAYERS"
        return
    for name in imports(module):
        top, *inner = name.split(".")
        if not top:
            yield "a relative import hides where a name is from"
        elif top == "kvstore" == module.package and inner and module.part != "__init__":
            theirs, mine = level(inner[0]), level(module.part)
            if inner[0] != module.part and not (theirs is not None and mine is not None and theirs < mine):
                yield f"imports {name}, which is not in a lower layer"
        elif top in PRODUCT and top != module.package and not may_import(module.package, top, inner):
            yield f"{module.package} may not import {name}"


def may_import(package: str, other: str, inner: list[str]) -> bool:
    allowed = MAY_IMPORT[package].get(other, set())
    if allowed is None or not inner:
        return allowed is None or bool(allowed)
    return inner[0] in allowed or ".".join(inner) in allowed


def level(part: str) -> int | None:
    return next((number for number, layer in enumerate(LAYERS) if part in layer), None)


def purity(module: Module) -> Iterator[str]:
    if module.among(PURE):
        yield from (f"is pure, and imports {name}" for name in imports(module) if name.split(".")[0] in IMPURE)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.AsyncFunctionDef | ast.Await):
                yield "is pure, and waits"


def dependencies(module: Module) -> Iterator[str]:
    for name in imports(module):
        top = name.split(".")[0]
        if top in BANNED_IMPORTS:
            yield f"imports {top}: what it reads can run code"
        elif top and top not in sys.stdlib_module_names and top not in PRODUCT:
            if top not in THIRD_PARTY:
                yield f"imports {top}, which is in no line of THIRD_PARTY"
            elif not module.among(THIRD_PARTY[top]):
                yield f"imports {top}, which is the business of {', '.join(THIRD_PARTY[top])}"


def exceptions(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"line {node.lineno}: a bare except hides bugs"
                continue
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = {"Exception", "BaseException"} & {dotted(name) for name in caught}
            last = node.body[-1]
            cleans_up = isinstance(last, ast.Raise) and last.exc is None
            if broad and not cleans_up and not module.among(BROAD_EXCEPT):
                yield f"line {node.lineno}: except {broad.pop()} hides bugs"
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("suppress"):
            suppressed = {dotted(argument) for argument in node.args}
            if suppressed & {"Exception", "BaseException"}:
                yield f"line {node.lineno}: suppressing every exception hides bugs"


def signatures(module: Module) -> Iterator[str]:
    for function in functions(module):
        if function.args.kwarg and not module.among(FOREIGN_SIGNATURES):
            yield f"{function.name} takes **{function.args.kwarg.arg}: name what it takes"
        for argument in [*function.args.posonlyargs, *function.args.args]:
            if argument.annotation and dotted(argument.annotation) == "bool":
                yield f"{function.name}: a boolean, {argument.arg}, must be named where it is given"


def state(module: Module) -> Iterator[str]:
    """Globals, the environment, locks and sleeping: state and time that no parameter shows."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
        elif isinstance(node, ast.Attribute):
            name = dotted(node)
            if name in ("os.environ", "os.getenv", "os.putenv") and not module.among(READS_ENVIRONMENT):
                yield f"line {node.lineno}: only the command line reads the environment"
            elif name == "logging.basicConfig" and module.package != "server":
                yield f"line {node.lineno}: a library does not configure logging"
            elif name.startswith("threading.") and node.attr in LOCKS and module.package == "kvstore":
                yield f"line {node.lineno}: a lock in kvstore, whose state has one owner"
        elif isinstance(node, ast.ImportFrom):
            imported = {alias.name for alias in node.names}
            if node.module == "threading" and imported & LOCKS and module.package == "kvstore":
                yield f"line {node.lineno}: a lock in kvstore, whose state has one owner"
            if node.module == "os" and imported & {"environ", "getenv"} and not module.among(READS_ENVIRONMENT):
                yield f"line {node.lineno}: only the command line reads the environment"


def sleep(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and dotted(node) == "time.sleep":
            yield f"line {node.lineno}: wait for what you wait for, not for a time"
        if isinstance(node, ast.ImportFrom) and node.module == "time" and "sleep" in {a.name for a in node.names}:
            yield f"line {node.lineno}: wait for what you wait for, not for a time"


def leftovers(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.source.splitlines(), 1):
        if found := LEFTOVERS.search(line):
            yield f"line {number}: {found[0]}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Raise) and node.exc and "NotImplementedError" in ast.unparse(node.exc):
            yield f"line {node.lineno}: a stub"


EVERYWHERE = [sleep]
IN_SIZED = [size, docstring, names, leftovers]
IN_PRODUCT = [layers, purity, dependencies, exceptions, signatures, state]


def problems(module: Module) -> list[str]:
    rules = [*EVERYWHERE]
    if module.package in SIZED:
        rules += IN_SIZED
    if module.package in PRODUCT:
        rules += IN_PRODUCT
    return [f"{rule.__name__}: {problem}" for rule in rules for problem in rule(module)]


@pytest.mark.parametrize("path", files(*SIZED, "tests"))
def test_module_is_tidy(path):
    assert problems(read(path)) == []


# The rules bite

DOC = '"""A module of a test."""\n'
FAULTS = {
    "size: 401 lines": ("kvstore/store.py", DOC + "x = 1\n" * 400),
    "size: f has 71 lines": ("kvstore/store.py", DOC + "def f():\n" + "    x = 1\n" * 70),
    "size: f has 7 positional": ("bench/local.py", DOC + "def f(a, b, c, d, e, f, g): ...\n"),
    "docstring:": ("bench/local.py", "x = 1\n"),
    "names: name the module": ("server/utils.py", DOC),
    "names: class SlabManager": ("server/node.py", DOC + "class SlabManager: ...\n"),
    "names: class BaseTier": ("server/node.py", DOC + "class BaseTier: ...\n"),
    "names: get_v2": ("server/node.py", DOC + "def get_v2(): ...\n"),
    "leftovers: line 2: TODO": ("server/node.py", DOC + "x = 1  # TODO: later\n"),
    "leftovers: line 2: a stub": ("server/node.py", DOC + "raise NotImplementedError\n"),
    "layers: which layer": ("kvstore/novelty.py", DOC),
    "layers: imports kvstore.store": ("kvstore/table.py", DOC + "from kvstore.store import Store\n"),
    "layers: imports kvstore.tiers": ("kvstore/evictable.py", DOC + "from kvstore import tiers\n"),
    "layers: kvstore may not import server": ("kvstore/store.py", DOC + "import server.config\n"),
    "layers: engine_client may not import server": ("engine_client/client.py", DOC + "import server\n"),
    "layers: engine_client may not import kvstore.table": (
        "engine_client/client.py",
        DOC + "from kvstore.table import BlockTable\n",
    ),
    "layers: scheduler may not import kvstore.published": (
        "scheduler/view.py",
        DOC + "from kvstore import published\n",
    ),
    "layers: a relative import": ("server/node.py", DOC + "from . import config\n"),
    "purity: is pure, and imports time": ("kvstore/eviction/lru.py", DOC + "import time\n"),
    "purity: is pure, and imports os.path": ("scheduler/policies/cost.py", DOC + "import os.path\n"),
    "purity: is pure, and waits": ("kvstore/table.py", DOC + "async def f(): ...\n"),
    "dependencies: imports torch": ("kvstore/store.py", DOC + "import torch\n"),
    "dependencies: imports requests": ("server/node.py", DOC + "from requests import get\n"),
    "dependencies: imports pickle": ("server/node.py", DOC + "import pickle\n"),
    "exceptions: line 4: a bare": ("server/stats.py", DOC + "try:\n    x = 1\nexcept:\n    raise\n"),
    "exceptions: line 4: except Exc": (
        "server/stats.py",
        DOC + "try:\n    x = 1\nexcept Exception:\n    x = 2\n",
    ),
    "exceptions: line 4: except BaseEx": (
        "server/stats.py",
        DOC + "try:\n    x = 1\nexcept (OSError, BaseException):\n    raise OSError\n",
    ),
    "exceptions: line 3: suppressing": (
        "server/node.py",
        DOC + "import contextlib\nwith contextlib.suppress(Exception):\n    x = 1\n",
    ),
    "signatures: f takes **options": ("server/node.py", DOC + "def f(**options): ...\n"),
    "signatures: f: a boolean, force": ("server/node.py", DOC + "def f(key: bytes, force: bool): ...\n"),
    "state: line 3: global": ("server/node.py", DOC + "def f():\n    global x\n"),
    "state: line 3: only the command": ("kvstore/store.py", DOC + "import os\nx = os.environ['X']\n"),
    "state: line 2: only the command": ("server/node.py", DOC + "from os import getenv\n"),
    "state: line 3: a library": ("kvstore/store.py", DOC + "import logging\nlogging.basicConfig()\n"),
    "state: line 3: a lock": ("kvstore/store.py", DOC + "import threading\nx = threading.Lock()\n"),
    "state: line 2: a lock": ("kvstore/store.py", DOC + "from threading import Condition\n"),
    "sleep: line 3": ("tests/test_node.py", DOC + "import time\ntime.sleep(1)\n"),
    "sleep: line 2": ("bench/local.py", DOC + "from time import sleep\n"),
}


@pytest.mark.parametrize(("problem", "fault"), FAULTS.items(), ids=FAULTS)
def test_a_rule_finds_its_fault(problem, fault):
    path, source = fault
    found = problems(Module(path, source, ast.parse(source)))
    assert len(found) == 1
    assert found[0].startswith(problem)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kvstore/store.py", "try:\n    x = 1\nexcept BaseException:\n    x = 2\n    raise\n"),
        ("engine_client/adapters/vllm.py", "try:\n    x = 1\nexcept Exception:\n    x = 2\n"),
        ("engine_client/adapters/vllm.py", "def update(self, **kwargs): ...\n"),
        ("server/node.py", "def f(*, force: bool): ...\n"),
        ("server/node.py", "def f(self, a, b, c, d, e, f, *, g): ...\n"),
        ("server/node.py", "import kvstore.table\nimport engine_client.client\nimport scheduler.view\n"),
        ("kvstore/tiers/nvme.py", "from kvstore.tiers import Tier\nfrom kvstore.copier import Copier\n"),
        ("kvstore/store.py", "import asyncio\nimport time\n"),
        ("bench/local.py", "import pickle\nimport redis\n"),
        ("server/commands/node.py", "import os\nx = os.environ\n"),
    ],
)
def test_what_is_allowed_is_not_complained_about(path, source):
    assert problems(Module(path, DOC + source, ast.parse(DOC + source))) == []
