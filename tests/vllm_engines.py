"""Real vLLM servers for tests: a small random model with a tokenizer, processes, and the loop that registers them.

CAIRN_VLLM is the command that starts vLLM's OpenAI server, like "vllm serve" or
"/opt/vllm/bin/python -m vllm.entrypoints.openai.api_server".
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import httpx

from tests.system.cairn_process import REPO
from tests.system.nodes import until

COMMAND = shlex.split(os.environ.get("CAIRN_VLLM", ""))
MODEL = "random-llama"
PAIRED = "etaoinshrdlucmfwypvbgkqjxzETAOINSHRDLUCMFW"  # of any two of them there is a token
VOCABULARY = 256 + len(PAIRED) ** 2
BLOCK_TOKENS = 32
START_S = 240.0  # vLLM imports for a minute where others want the cores
HEARTBEAT_S = 0.3
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}
OPTIONS = {
    "--host": "127.0.0.1",
    "--served-model-name": MODEL,
    "--dtype": "float32",
    "--max-model-len": "2048",
    "--max-num-batched-tokens": "2048",
    "--max-num-seqs": "8",
    "--block-size": str(BLOCK_TOKENS),
    "--seed": "0",
}
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_model(folder: Path) -> Path:
    """A Llama of random weights whose next tokens hang on the whole prompt, and a tokenizer of bytes and some pairs."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(product(PAIRED, repeat=2))
    words = {word: number for number, word in enumerate([*letters, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(words, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def has_module(name: str) -> bool:
    """Whether the Python that runs vLLM can import this: that of COMMAND, or the one beside it."""
    python = Path(COMMAND[0])
    if not python.name.startswith("python"):
        python = Path(shutil.which(COMMAND[0]) or COMMAND[0]).with_name("python")
    return subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode == 0


class VllmServer:
    """One process; `begin`, then `wait`. Its KV events are at `port` + 1, replays at `port` + 2.

    options: of the command line, on top of OPTIONS; environ: on top of ENVIRON.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        port: int,
        options: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"
        self.events = f"tcp://127.0.0.1:{port + 1},tcp://127.0.0.1:{port + 2}"
        self._log = folder / f"{name}.log"
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": f"kv@{name}"}
        # Without the star vLLM would connect to the first, and not listen there.
        events |= {"endpoint": f"tcp://*:{port + 1}", "replay_endpoint": f"tcp://127.0.0.1:{port + 2}"}
        given = {"--port": str(port), **OPTIONS, "--kv-events-config": json.dumps(events), **(options or {})}
        self._options = [word for option in given.items() for word in option]
        self._environ = {**os.environ, **ENVIRON, **(environ or {})}
        self._model = str(folder / "model")
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> "VllmServer":
        model = [self._model] if COMMAND[-1] == "serve" else ["--model", self._model]
        flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*COMMAND, *model, *flags, *self._options],
                cwd=REPO,
                env=self._environ,
                stdout=log,
                stderr=log,
                start_new_session=True,  # its engine core dies with it
            )
        return self

    def wait(self) -> "VllmServer":
        """Until it answers."""
        until(lambda: self.is_healthy() or not self.is_alive, f"{self.name} to start", START_S)
        assert self.is_alive, self.log[-6000:]
        return self

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """It and its children, with SIGKILL. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        found = (line for line in lines if line.startswith((f"{name} ", f"{name}{{")))
        return sum(float(line.split()[-1]) for line in found)

    def reset_cache(self) -> None:
        """Empty it. vLLM publishes that at its next step, so a step is made."""
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=60).raise_for_status()
        asked = {"model": MODEL, "prompt": [1], "max_tokens": 1}
        httpx.post(f"{self.url}/v1/completions", json=asked, timeout=60).raise_for_status()

    def registration(self, **more: Any) -> dict[str, Any]:
        """What a Conductor is told of it."""
        told = {"name": self.name, "model": MODEL, "engine": "vllm", "address": self.address, "role": "both"}
        return told | {"events": self.events, "block_tokens": BLOCK_TOKENS} | more


class Registrar:
    """Tells a Conductor of engines and that they live, as an operator's script would, from `start` to `stop`."""

    def __init__(self, conductor_url: str, engines: Sequence[tuple[VllmServer, dict[str, Any]]]) -> None:
        self._url = f"{conductor_url}/v1/instances"
        self._engines = list(engines)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registrar")

    def start(self) -> "Registrar":
        for server, more in self._engines:
            self._register(server, more)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        load = {"prefill_tokens": 0, "decode_batch": 0, "decode_context": 0}
        while not self._stopped.wait(HEARTBEAT_S):
            for server, more in self._engines:
                if not server.is_healthy():
                    continue
                try:
                    answer = httpx.post(f"{self._url}/{server.name}/heartbeat", json=load, timeout=10)
                    if answer.status_code == 404:
                        self._register(server, more)
                except httpx.TransportError:
                    continue

    def _register(self, server: VllmServer, more: dict[str, Any]) -> None:
        httpx.post(self._url, json=server.registration(**more), timeout=10).raise_for_status()
