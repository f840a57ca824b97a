"""The settings of a worker: one frozen tree, checked as a whole."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvstore.errors import ConfigError
from server.config import (
    HOST_PORT,
    Count,
    Entries,
    Listen,
    LogSettings,
    Name,
    Seconds,
    Secret,
    Threads,
    Timeout,
    host_port,
)
from server.sources import build, collect

URL: Final = r"https?://[^\s,/?#]+(/[^\s,?#]*)?"
Urls = Annotated[
    str,
    Meta(pattern=rf"^({URL}(,{URL})*)?\Z", extra={"expected": "http://host:port, several with commas, or nothing"}),
]
EVERYWHERE: Final = ("0.0.0.0", "::")  # addresses to listen at, and not to go to
BUILT_IN: Final = ("smollm2", "tiny")


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The engine, what it serves, and whom it knows."""

    listen: Listen = "127.0.0.1:8100"
    advertise: str = ""  # where the gateway reaches it, host:port; "": at `listen`
    name: Name = "worker"
    role: Literal["prefill", "decode", "both"] = "both"
    token: Secret = ""  # what clients must show; "": nothing
    model: str = "smollm2"  # or tiny, or a folder
    served_model: str = ""  # how clients call it; "": after the model
    revision: str = ""  # of a folder's weights: workers that share a store must say the same
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Threads = 2
    batching: Literal["exact", "fast"] = "exact"
    block_tokens: Count = 64
    chunk_tokens: Count = 256
    chunks_per_step: Count = 1  # of prompts, between two steps of those that decode
    max_batch: Count = 16
    max_tokens_total: Count = 65_536  # of KV, over all that is in the batch
    queue: Entries = 256  # requests that may wait
    node: str = ""  # address of the store node beside it; "": none
    node_token: Secret = ""
    node_advertise: str = ""  # where the Conductor reaches the node; "": as here
    load_seconds: Timeout = 2.0  # that a prefix may take to come
    conductor: Urls = ""  # at each of which it registers; the first one's word on its role counts. "": nowhere
    conductor_token: Secret = ""
    drain_seconds: Seconds = 30.0


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set of a worker."""

    worker: WorkerSettings = WorkerSettings()
    log: LogSettings = LogSettings()


def load(path: Path | None, environ: Mapping[str, str], options: Sequence[str]) -> WorkerConfig:
    """The checked settings of all sources, see `server.sources`. Raises ConfigError."""
    config = build(WorkerConfig, collect(WorkerConfig, path, environ, options))
    for complaint in _contradictions(config.worker):
        raise ConfigError(complaint)
    return config


def _contradictions(worker: WorkerSettings) -> Iterator[str]:
    if not worker.listen:
        yield "worker.listen: expected host:port"
    if worker.advertise and not re.fullmatch(HOST_PORT, worker.advertise):
        yield f"worker.advertise: expected host:port, not {worker.advertise!r}"
    elif worker.conductor and not worker.advertise and host_port(worker.listen)[0] in EVERYWHERE:
        yield f"worker.advertise: expected host:port where others reach what listens at {worker.listen}"
    if worker.chunk_tokens % worker.block_tokens:
        sizes = f"{worker.chunk_tokens} is not a multiple of worker.block_tokens {worker.block_tokens}"
        yield f"worker.chunk_tokens {sizes}"
    if worker.model not in BUILT_IN and not Path(worker.model).is_dir():
        yield f"worker.model: expected {', '.join(BUILT_IN)}, or a folder, not {worker.model!r}"
    if worker.role == "prefill" and not worker.node:
        yield "a worker that only prefills needs a store: worker.node"
