"""What a node of accelerators takes for a model's prefill, decode and moves of KV: from its sizes and rates, as data.

Figures of the Mooncake paper (FAST '25) are quoted by its section, table or figure. The one that is simulated:
LLaMA3-70B on a node of 8 A800-80GB with 4 links of 200 Gbps. Where the paper has no figure, the reason is given.
"""

from dataclasses import dataclass
from typing import Final

from scheduler.costs import DecodeCost, PrefillCost, TierCost

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer. Operations of a prefill of n tokens: layers * (a * n * n * width + b * n * width * width)."""

    name: str
    layers: int
    width: int
    a: int
    b: int
    query_heads_per_kv_head: int
    value_bytes: int  # of one number of the weights and of the KV
    weights: int

    @property
    def kv_bytes(self) -> int:
        """Of one token: a key and a value in each layer."""
        return 2 * self.value_bytes * self.layers * self.width // self.query_heads_per_kv_head

    @property
    def weight_bytes(self) -> int:
        return self.weights * self.value_bytes

    @property
    def per_token_flops(self) -> float:
        return float(self.layers * self.b * self.width**2)

    @property
    def per_square_flops(self) -> float:
        return float(self.layers * self.a * self.width)

    def flops(self, tokens: float, cached: float = 0.0) -> float:
        """Operations to compute the last `tokens - cached` of the tokens: the whole without its cached part."""
        whole, spared = tokens * tokens, cached * cached
        return self.per_square_flops * (whole - spared) + self.per_token_flops * (tokens - cached)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host and its accelerators: peak rates by data sheet, a second."""

    name: str
    accelerators: int
    flops: float  # of one accelerator
    hbm_bytes: int  # of one
    hbm_rate: float  # of one
    host_rate: float  # from the host's DRAM into all accelerators together
    network_rate: float  # of all links together
    dram_kv_bytes: int  # of the host's DRAM, for KV


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How much of the peak is reached, and what comes on top of it.

    mfu: share of peak operations in prefill. 0.65 with 0.05 s a prompt gives, within 11 %, all six figures of figure
    10 from the hits of the traces: 1.38 and 1.05 s a request on conversation with local and global cache (here 1.43
    and 1.04), 0.70 and 0.52 on tool&agent (a surrogate here: 0.71 and 0.52), 1.50 and 0.78 on synthetic (1.67 and
    0.72); the local ones become 1.33 and 1.52 s with the paper's own hit ratios. The formula counts attention without
    its causal half, so the true share is lower on long prompts.
    hbm: share of the HBM's rate when weights and KV are read; 0.7 is usual for decode kernels of that time.
    step_s: of a decode step whatever its batch. No published figure. 160 all-reduces of about 40 us over the NVLink
    of 8 A800 (400 GB/s) are 6 ms, the scheduler and the launch of kernels of vLLM 0.5.1 some 12 ms.
    sequence_s: of each sequence in a step: its 0.14 TFLOP at a share of 0.5 are 0.11 ms, sampling and detokenising
    are the rest.
    network: of the links' rate; 87 of 100 GB/s in figure 12.
    hbm_used: share of the HBM that an engine may take, vLLM's default. activation_bytes: of each accelerator.
    """

    mfu: float = 0.65
    prompt_s: float = 0.05
    hbm: float = 0.7
    step_s: float = 0.018
    sequence_s: float = 0.0002
    network: float = 0.87
    hbm_used: float = 0.9
    activation_bytes: int = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a simulated instance costs and holds.

    kv_bytes: of one token. dram_tokens: of KV that its host's DRAM holds. decode_tokens: of KV beside the weights in
    its HBM. weights_s: of a decode step's base, to read the weights; computing a piece of prompt in it hides that.
    """

    name: str
    prefill: PrefillCost
    decode: DecodeCost
    tiers: TierCost
    kv_bytes: int
    dram_tokens: int
    decode_tokens: int
    weights_s: float = 0.0


def hardware(model: Model, node: Node, efficiency: Efficiency | None = None) -> Hardware:
    """One instance of the model over all accelerators of the node. ValueError when its weights do not fit."""
    reached = efficiency or Efficiency()
    flops = node.accelerators * node.flops * reached.mfu
    hbm_rate = node.accelerators * node.hbm_rate * reached.hbm
    free = node.accelerators * (node.hbm_bytes * reached.hbm_used - reached.activation_bytes) - model.weight_bytes
    if free < model.kv_bytes:
        raise ValueError(f"{model.name} does not fit into {node.name}")
    per_square_s = model.per_square_flops / flops
    weights_s = model.weight_bytes / hbm_rate
    return Hardware(
        name=f"{model.name} on {node.name}",
        # n * n - p * p = m * m + 2 * m * p with m = n - p
        prefill=PrefillCost(reached.prompt_s, model.per_token_flops / flops, per_square_s, 2 * per_square_s),
        decode=DecodeCost(reached.step_s + weights_s, reached.sequence_s, model.kv_bytes / hbm_rate),
        tiers=TierCost(
            kv_bytes=model.kv_bytes,
            dram_rate=node.host_rate,
            nvme_rate=0.0,
            network_rate=node.network_rate * reached.network,
        ),
        kv_bytes=model.kv_bytes,
        dram_tokens=node.dram_kv_bytes // model.kv_bytes,
        decode_tokens=int(free // model.kv_bytes),
        weights_s=weights_s,
    )


LLAMA3_70B: Final = Model(  # table 1
    name="LLaMA3-70B",
    layers=80,
    width=8192,
    a=4,
    b=22,
    query_heads_per_kv_head=8,
    value_bytes=2,
    weights=70_000_000_000,
)
NODE_8XA800: Final = Node(  # §5.1; rates of the A800's data sheet: bf16 without sparsity, HBM2e
    name="8xA800-80GB",
    accelerators=8,
    flops=312e12,
    hbm_bytes=80 * GIB,
    hbm_rate=2039e9,
    host_rate=100e9,  # two accelerators share a PCIe 4.0 x16 uplink of 25 GB/s in the usual board of this node
    network_rate=4 * 25e9,
    dram_kv_bytes=3_000_000 * 320 * 1024,  # table 1: about 3 M tokens in 1 TB
)
LLAMA3_70B_8XA800: Final = hardware(LLAMA3_70B, NODE_8XA800)
