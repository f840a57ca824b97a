"""One process of the demo: a model that prefills into a node or decodes out of it; JSON lines in and out."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_client.adapters import Generation
from engine_client.adapters.transformers import TransformersEngine, load_model, smollm2_revision
from engine_client.blocking import BlockingClient
from engine_client.decode import DecodeClient
from engine_client.layout import namespace_fields
from engine_client.prefill import PrefillClient
from kvstore.prefix import Namespace

NAMESPACE = "smollm2"


class Worker:
    """A model, and a connection to the node for each direction."""

    def __init__(self, settings: dict[str, Any]) -> None:
        cache_dir = Path(settings["cache_dir"]) if settings["cache_dir"] else None
        self._model, self._tokenizer = load_model(settings["dtype"], settings["threads"], cache_dir)
        self._engine = TransformersEngine(
            self._model,
            block_tokens=settings["block_tokens"],
            chunk_tokens=settings["chunk_tokens"],
            load_deadline_s=5.0,
        )
        fields = namespace_fields(self._engine.layout, model="SmolLM2-135M-Instruct", revision=smollm2_revision())
        namespace = Namespace(**fields)
        loading = BlockingClient(settings["address"], settings["token"], name=f"{settings['role']} loads")
        storing = BlockingClient(settings["address"], settings["token"], name=f"{settings['role']} stores")
        self._load = DecodeClient(loading, loading.open(NAMESPACE, namespace))
        self._store = PrefillClient(storing, storing.open(NAMESPACE, namespace))

    def prompt(self, document: str, document_tokens: int, question: str) -> list[int]:
        """The chat prompt of a question on the first tokens of a document; the document comes first."""
        ids = self._tokenizer(document, add_special_tokens=False).input_ids[:document_tokens]
        text = f"{self._tokenizer.decode(ids)}\n\nQuestion: {question}\nAnswer in a few words."
        message = [{"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        tokens: list[int] = self._tokenizer(rendered, add_special_tokens=False).input_ids
        return tokens

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """Compute what the store lacks of a prompt, and put it there."""
        return self._row(self._engine.generate(tokens, 0, load=self._load, store=self._store))

    def decode(self, tokens: list[int], steps: int) -> dict[str, Any]:
        """Answer a prompt whose KV comes from the store."""
        return self._row(self._engine.generate(tokens, steps, load=self._load))

    def alone(self, tokens: list[int], steps: int) -> dict[str, Any]:
        """The same without any store: what the answer must be, and what it costs."""
        return self._row(self._engine.generate(tokens, steps))

    def _row(self, generation: Generation) -> dict[str, Any]:
        text = self._tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        fields = Generation.__dataclass_fields__
        return {name: getattr(generation, name) for name in fields} | {"text": text}


def main() -> None:
    """Settings as the first line, then one request a line: {"do": name, ...its arguments}."""
    worker = Worker(json.loads(sys.stdin.readline()))
    verbs: dict[str, Callable[..., Any]] = {
        "prompt": worker.prompt,
        "prefill": worker.prefill,
        "decode": worker.decode,
        "alone": worker.alone,
    }
    _answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _answer(verbs[request.pop("do")](**request))


def _answer(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
