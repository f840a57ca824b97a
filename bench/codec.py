"""What each codec, and what is left out, costs the demo model: size, error, speed, and greedy tokens that differ."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.node import running_node
from engine_client.blocking import BlockingClient
from engine_client.codec import CODECS, codec_for, decode_block, encode_block
from engine_client.compaction import KeptHeads, SinkWindow
from engine_client.decode import DecodeClient
from engine_client.layout import KvLayout, namespace_fields, pack_layer
from engine_client.prefill import PrefillClient
from kvstore.prefix import Namespace

DOCUMENT = Path("/usr/share/common-licenses/GPL-2")
QUESTIONS = ("What is this text about?", "Who published it, and when?", "List what a reader may do.")
WINDOW = SinkWindow(64, 256)
ROUNDS = 9
CHUNK = 256  # tokens that are computed at once


@dataclass(slots=True)
class Row:
    """Rates are of raw bytes, `ratio` is of encoded to raw ones, `of_memcpy` of its time to the codec's."""

    name: str
    ratio: float
    key_rms: float = 0.0  # relative: of the error, over that of the values
    key_max: float = 0.0
    value_rms: float = 0.0
    value_max: float = 0.0
    encode_gb_s: float | None = None
    encode_of_memcpy: float | None = None
    decode_gb_s: float | None = None
    decode_of_memcpy: float | None = None
    equal_tokens: list[int] | None = None  # for each prompt, greedy tokens up to the first that differs


@dataclass(frozen=True, slots=True)
class Way:
    """A codec, with or without something left out."""

    name: str
    codec: str = "none"
    kept_heads: list[list[int]] | None = None
    window: SinkWindow | None = None


class Demo:
    """The demo's model, prompts, and the KV of the first of them as raw blocks.

    `rounded_otherwise` are the tokens without any store, computed in other pieces: what differs there is bfloat16's.
    """

    def __init__(self, tokens: int, steps: int, prompts: int) -> None:
        from engine_client.adapters import transformers as adapter

        self.adapter, self.steps = adapter, steps
        self.model, tokenizer = adapter.load_model("bfloat16", 1)
        self.model.generation_config.eos_token_id = None  # all answers have all their tokens
        ids = tokenizer(DOCUMENT.read_text(), add_special_tokens=False).input_ids
        self.prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"{tokenizer.decode(ids[at : at + tokens])}\n\n{question}"}],
                add_generation_prompt=True,
                return_dict=True,
            ).input_ids
            for at, question in zip(range(0, prompts * 500, 500), QUESTIONS, strict=False)
        ]
        self.layout = self.engine(Way("none")).layout
        self.expected, self.rounded_otherwise = (
            [self.engine(Way("none"), chunk).generate(prompt, steps).token_ids for prompt in self.prompts]
            for chunk in (CHUNK, CHUNK // 2)
        )

    def engine(self, way: Way, chunk_tokens: int = CHUNK) -> Any:
        left_out = {"kept_heads": way.kept_heads, "window": way.window}
        return self.adapter.TransformersEngine(
            self.model, chunk_tokens=chunk_tokens, codec=way.codec, load_deadline_s=30.0, **left_out
        )

    def raw_blocks(self) -> list[memoryview]:
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        self.adapter.prefill(self.model, torch.tensor([self.prompts[0]]), cache, CHUNK)
        starts = [n * self.layout.block_tokens for n in range(len(self.prompts[0]) // self.layout.block_tokens)]
        blocks = [memoryview(bytearray(self.layout.block_bytes)) for _ in starts]
        for layer in range(self.layout.layers):
            pack_layer(self.layout, layer, blocks, starts, cache.layers[layer].keys, cache.layers[layer].values)
        return blocks

    def equal_tokens(self, client: BlockingClient, way: Way) -> list[int]:
        """Greedy tokens as without a store, for each prompt, when its prefix was loaded through `way`."""
        engine = self.engine(way)
        fields = namespace_fields(self.layout, model=way.name, codec=engine.codec, compaction=engine.compaction)
        space = client.open(way.name, Namespace(**fields))
        load, store = DecodeClient(client, space, codec=engine.codec), PrefillClient(client, space, codec=engine.codec)
        equal = []
        for prompt, expected in zip(self.prompts, self.expected, strict=True):
            engine.generate(prompt, 0, store=store)
            got = engine.generate(prompt, self.steps, load=load)
            assert got.reused_tokens, got.failures
            equal.append(_equal(got.token_ids, expected))
        store.close()
        client.evict(space)
        return equal


def run(tokens: int, steps: int, prompts: int) -> Iterator[Row]:
    """One row of no store at all, one a codec, then one for a window and one for left out heads."""
    demo = Demo(tokens, steps, prompts)
    yield Row("no store, other pieces", 1.0, equal_tokens=list(map(_equal, demo.rounded_otherwise, demo.expected)))
    raw = demo.raw_blocks()
    heads = _loudest_heads(demo.layout, raw)
    ways = [Way(name, name) for name in CODECS]
    ways += [Way(WINDOW.name, window=WINDOW), Way(f"heads{len(heads[0])}of{demo.layout.kv_heads}", kept_heads=heads)]
    with (
        tempfile.TemporaryDirectory(prefix="cairn-bench-") as run_dir,
        running_node(Path(run_dir)) as node,
        BlockingClient(node.address, timeout_s=30.0) as client,
    ):
        for way in ways:
            row = _measured(demo.layout, raw, way)
            row.equal_tokens = demo.equal_tokens(client, way)
            yield row


def _equal(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many are equal, from the first."""
    pairs = zip(tokens, expected, strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(expected))


def _measured(layout: KvLayout, raw: Sequence[memoryview], way: Way) -> Row:
    if way.window is not None:
        return Row(way.name, len(way.window.kept_blocks(len(raw), layout.block_tokens)) / len(raw))
    codec = KeptHeads(way.codec, layout, way.kept_heads) if way.kept_heads else codec_for(way.codec, layout)
    encoded = [memoryview(bytearray(codec.most_bytes)) for _ in raw]
    back = [memoryview(bytearray(layout.block_bytes)) for _ in raw]
    sizes = [encode_block(codec, *pair) for pair in zip(raw, encoded, strict=True)]
    row = Row(way.name, sum(sizes) / sum(block.nbytes for block in raw))
    encode_us = _spans(lambda at: encode_block(codec, raw[at], encoded[at]), len(raw))
    decode_us = _spans(lambda at: decode_block(codec, encoded[at], back[at]), len(raw))
    copy = np.empty(layout.block_bytes, np.uint8)
    memcpy_us = _spans(lambda at: np.copyto(copy, np.frombuffer(raw[at], np.uint8)), len(raw))
    row.encode_gb_s, row.decode_gb_s = layout.block_bytes / encode_us / 1e3, layout.block_bytes / decode_us / 1e3
    row.encode_of_memcpy, row.decode_of_memcpy = memcpy_us / encode_us, memcpy_us / decode_us
    row.key_rms, row.key_max, row.value_rms, row.value_max = _errors(layout, raw, back)
    return row


def _spans(work: Callable[[int], object], blocks: int) -> float:
    """Median microseconds of one block, of this thread's own processor time: others are on this machine."""
    spans = []
    for number in range(ROUNDS * blocks):
        began = time.thread_time_ns()
        work(number % blocks)
        spans.append((time.thread_time_ns() - began) / 1000)
    return statistics.median(spans)


def _errors(layout: KvLayout, raw: Sequence[memoryview], back: Sequence[memoryview]) -> tuple[float, ...]:
    """For keys, then values: relative RMS, largest absolute error."""
    found = []
    for before, after in zip(_planes(layout, raw), _planes(layout, back), strict=True):
        error = after - before
        found += [float(np.sqrt((error**2).mean() / (before**2).mean())), float(np.abs(error).max())]
    return tuple(found)


def _planes(layout: KvLayout, blocks: Sequence[memoryview]) -> list[NDArray[np.float32]]:
    """Keys and values of many bfloat16 blocks, `[blocks, layers, heads, tokens * width]` each."""
    bits = np.stack([np.frombuffer(block, np.uint16) for block in blocks]).astype(np.uint32) << 16
    layers = bits.view(np.float32).reshape(len(blocks), layout.layers, 2, layout.kv_heads, -1)
    return [layers[:, :, 0], layers[:, :, 1]]


def _loudest_heads(layout: KvLayout, raw: Sequence[memoryview]) -> list[list[int]]:
    """Of each layer all heads but the one with the smallest values: a crude choice, to see the order of the damage."""
    sizes = np.square(_planes(layout, raw)[1]).mean(axis=(0, 3))
    return [sorted(map(int, np.argsort(layer)[1:])) for layer in sizes]


def report(
    *,
    tokens: Annotated[int, typer.Option(help="Of the document, in each prompt.", min=300)] = 1024,
    steps: Annotated[int, typer.Option(help="Greedy tokens compared.", min=1)] = 64,
    prompts: Annotated[int, typer.Option(help="How many.", min=1, max=len(QUESTIONS))] = len(QUESTIONS),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Codecs on the demo model: size, error, speed beside memcpy, and greedy tokens equal to those without a store.

    \b
    Examples:
      python -m bench codec
      python -m bench codec --prompts 1 --json
    """
    shown = Table(title=f"SmolLM2-135M-Instruct, bfloat16; greedy tokens equal, of {steps}", title_justify="left")
    names = "codec,size,K rms,K max,V rms,V max,encode GB/s,of memcpy,decode GB/s,of memcpy,equal tokens"
    for name in names.split(","):
        shown.add_column(name, justify="left" if name == "codec" else "right")
    for row in run(tokens, steps, prompts):
        if as_json:
            sys.stdout.write(json.dumps(asdict(row)) + "\n")
            sys.stdout.flush()
        rates = (row.encode_gb_s, row.encode_of_memcpy, row.decode_gb_s, row.decode_of_memcpy)
        shown.add_row(
            row.name,
            f"{row.ratio:.3f}",
            *(f"{value:.2g}" for value in (row.key_rms, row.key_max, row.value_rms, row.value_max)),
            *("" if rate is None else f"{rate:.2f}" for rate in rates),
            ", ".join(map(str, row.equal_tokens or ())),
        )
    if not as_json:
        Console().print(shown)
