"""Where each layer's keys and values lie in the bytes of a KV block; copies to and from engine tensors.

The canonical order of a block (or of one part of a block) of T = `block_tokens` tokens is layer-major, native
dtype, little-endian, without padding:

    gqa   layer 0: K [kv_heads, T, head_dim]  V [kv_heads, T, value_head_dim]   layer 1: ...
    mla   layer 0: [T, head_dim + value_head_dim]                               layer 1: ...

`gqa` stands for every cache with a key and a value per head: multi-head, grouped and multi-query attention.
`mla` is one latent per token and layer; engines that keep it as two tensors (compressed KV and rotary key)
give them as key and value, and they lie side by side in each token's row.

Tensors are numpy arrays or CPU tensors of torch, of any strides; they are copied as raw bits, so dtypes that
numpy does not know (bfloat16, float8) are copied like all others. Copies release the GIL.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NotRequired, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}
"""The dtypes a block can hold, with the bytes of one element."""

Bits = NDArray[np.unsignedinteger[Any]]
Tensor = Any  # numpy array or torch CPU tensor; torch is not imported here


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What the bytes of a block mean: of a whole block, or of the part of it that one worker holds.

    `layers`, `kv_heads`, `first_layer` and `first_head` are those of this part; a whole block is a single
    part. `value_head_dim` is `head_dim` unless given; for `mla` it is the width of the second tensor, or 0
    where the engine keeps the latent in one. Raises ValueError on sizes that make no sense.
    """

    kind: Literal["gqa", "mla"]
    layers: int
    kv_heads: int = 1
    head_dim: int
    value_head_dim: int = 0
    block_tokens: int
    dtype: str
    layer_parts: int = 1
    head_parts: int = 1
    first_layer: int = 0
    first_head: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("gqa", "mla"):
            raise ValueError(f"kind {self.kind!r} is neither 'gqa' nor 'mla'")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "layer_parts", "head_parts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        for name in ("value_head_dim", "first_layer", "first_head"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, and must not be negative")
        if self.kind == "mla" and (self.kv_heads, self.head_parts) != (1, 1):
            raise ValueError("an mla cache has no heads to count or to split")
        if self.first_layer % self.layers or self.first_layer >= self.layers * self.layer_parts:
            raise ValueError(f"first_layer is {self.first_layer}: no part of {self.layers} begins there")
        if self.first_head % self.kv_heads or self.first_head >= self.kv_heads * self.head_parts:
            raise ValueError(f"first_head is {self.first_head}: no part of {self.kv_heads} begins there")
        if self.kind == "gqa" and self.value_head_dim == 0:
            object.__setattr__(self, "value_head_dim", self.head_dim)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block of this part."""
        return self.kv_heads * self.block_tokens * (self.head_dim + self.value_head_dim) * self.element_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this part."""
        return self.layers * self.layer_bytes

    @property
    def parts(self) -> int:
        """How many parts make a block."""
        return self.layer_parts * self.head_parts

    @property
    def part(self) -> int:
        """The number of this part among them."""
        return self.first_layer // self.layers * self.head_parts + self.first_head // self.kv_heads

    def layer_range(self, layer: int) -> tuple[int, int]:
        """The bytes [start, stop) of a block that are layer `layer` of this part, counted from 0.

        bytes   0           layer_bytes     2 * layer_bytes            block_bytes
                |-- layer 0 --|-- layer 1 ----|-- ...     -- layer n-1 --|
                 K       V     K         V                 K           V
        """
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer {layer} is not in [0, {self.layers})")
        return layer * self.layer_bytes, (layer + 1) * self.layer_bytes

    def one_layer(self) -> "KvLayout":
        """The layout of a single layer of this part, with its heads: of `layer_bytes` bytes."""
        return replace(self, layers=1, layer_parts=1, first_layer=0)

    def split(self, *, layer_parts: int = 1, head_parts: int = 1) -> tuple["KvLayout", ...]:
        """The layouts of the parts of a whole block, by part number: by stage, then by head range.

        Raises ValueError when this is a part already, or the layers or heads do not divide evenly.
        """
        if self.parts != 1:
            raise ValueError("this layout is a part already")
        if layer_parts < 1 or self.layers % layer_parts:
            raise ValueError(f"{self.layers} layers cannot be split evenly into {layer_parts} parts")
        if head_parts < 1 or self.kv_heads % head_parts:
            raise ValueError(f"{self.kv_heads} KV heads cannot be split evenly into {head_parts} parts")
        layers, kv_heads = self.layers // layer_parts, self.kv_heads // head_parts
        return tuple(
            replace(
                self,
                layers=layers,
                kv_heads=kv_heads,
                layer_parts=layer_parts,
                head_parts=head_parts,
                first_layer=stage * layers,
                first_head=rank * kv_heads,
            )
            for stage in range(layer_parts)
            for rank in range(head_parts)
        )

    def describe(self) -> str:
        """The layout in one line, equal for all parts of one block: the namespace's `layout` field.

        It differs whenever the bytes of a part of a given number would mean something else.
        """
        heads = "" if self.kind == "mla" else f" kv_heads={self.kv_heads * self.head_parts}"
        return (
            f"cairn/1 {self.kind} layers={self.layers * self.layer_parts}{heads} head_dim={self.head_dim}"
            f" value_head_dim={self.value_head_dim} block_tokens={self.block_tokens} dtype={self.dtype}"
            f" layer_parts={self.layer_parts} head_parts={self.head_parts}"
        )


class NamespaceFields(TypedDict):
    """The fields of a `Namespace` that an engine knows."""

    model: str
    revision: str
    weights_epoch: int
    dtype: str
    layout: str
    block_tokens: int
    adapter: str
    parts: int
    layers: int
    block_bytes: int
    codec: NotRequired[str]
    compaction: NotRequired[str]


class Encoding(Protocol):
    """What a namespace says of the codec of its blocks; see engine_client.codec."""

    @property
    def name(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...


def namespace_fields(
    layout: KvLayout,
    *,
    model: str,
    revision: str = "",
    weights_epoch: int = 0,
    adapter: str = "",
    codec: Encoding | None = None,
    compaction: str = "",
) -> NamespaceFields:
    """The fields of the namespace in which blocks of this layout, of this model's weights, are equal.

    With a codec, and with what was left out of the cache that they were computed with (`compaction`), they are others.
    """
    fields = NamespaceFields(
        model=model,
        revision=revision,
        weights_epoch=weights_epoch,
        dtype=layout.dtype,
        layout=layout.describe(),
        block_tokens=layout.block_tokens,
        adapter=adapter,
        parts=layout.parts,
        layers=layout.layers,
        block_bytes=layout.block_bytes if codec is None else codec.block_bytes,
    )
    if codec is not None and codec.name != "none":
        fields["codec"] = codec.name
    if compaction:
        fields["compaction"] = compaction
    return fields


def pack_layer(
    layout: KvLayout,
    layer: int,
    blocks: Sequence[memoryview],
    starts: Sequence[int],
    key: Tensor,
    value: Tensor | None = None,
) -> None:
    """Copies one layer of many blocks out of engine tensors into the blocks' bytes.

    `blocks[n]`, `block_bytes` long, receives the tokens [starts[n], starts[n] + block_tokens) of the tensors'
    token axis. Shapes: gqa `[kv_heads, tokens, head_dim]`, with or without a leading batch axis of 1, with
    the heads of this part or with all heads of the model; mla `[tokens, width]` with any number of leading
    axes of 1, and `value` as the layout has it. Nothing else of the blocks is touched. Raises ValueError
    naming what does not fit, before any byte is written.
    """
    planes = _planes(layout, layer, key, value)
    for block in blocks:
        if block.readonly:
            raise ValueError("a block to be written is read-only")
    for inside, outside in _pairs(layout, planes, blocks, starts):
        np.copyto(inside, outside)


def unpack_layer(
    layout: KvLayout,
    layer: int,
    blocks: Sequence[memoryview],
    starts: Sequence[int],
    key: Tensor,
    value: Tensor | None = None,
) -> None:
    """Copies one layer of many blocks into preallocated engine tensors: `pack_layer` the other way round."""
    planes = _planes(layout, layer, key, value)
    for plane in planes:
        if not plane.tensor.flags.writeable:
            raise ValueError("a tensor to be filled is read-only")
    for inside, outside in _pairs(layout, planes, blocks, starts):
        np.copyto(outside, inside)


@dataclass(frozen=True, slots=True)
class _Plane:
    """One tensor's share of a layer: its bits `[kv_heads, tokens, width]`, and where they lie in a block."""

    tensor: Bits
    offset: int  # bytes, of the first element in the block
    strides: tuple[int, int, int]  # bytes, from head to head, token to token, element to element in the block


def _planes(layout: KvLayout, layer: int, key: Tensor, value: Tensor | None) -> list[_Plane]:
    offset = layout.layer_range(layer)[0]
    size, tokens = layout.element_bytes, layout.block_tokens
    if layout.kind == "mla":
        # one row per token:  [ key: head_dim | value: value_head_dim ]
        row = (layout.head_dim + layout.value_head_dim) * size
        strides, second, key_width = (0, row, size), layout.head_dim * size, layout.head_dim
        if value is None:
            key_width += layout.value_head_dim
        elif layout.value_head_dim == 0:
            raise ValueError("value is given, and the layout has one latent tensor per layer")
        planes = [_Plane(_bits(layout, "key", key, key_width), offset, strides)]
    else:
        # [ key: kv_heads x tokens x head_dim ][ value: kv_heads x tokens x value_head_dim ]
        strides = (tokens * layout.head_dim * size, layout.head_dim * size, size)
        second = layout.kv_heads * strides[0]
        planes = [_Plane(_bits(layout, "key", key, layout.head_dim), offset, strides)]
        if value is None:
            raise ValueError("value is missing, and the layout has keys and values")
        strides = (tokens * layout.value_head_dim * size, layout.value_head_dim * size, size)
    if value is not None:
        planes.append(_Plane(_bits(layout, "value", value, layout.value_head_dim), offset + second, strides))
        if planes[0].tensor.shape[1] != planes[1].tensor.shape[1]:
            raise ValueError(f"key has {planes[0].tensor.shape[1]} tokens and value has {planes[1].tensor.shape[1]}")
    return planes


def _pairs(
    layout: KvLayout, planes: Sequence[_Plane], blocks: Sequence[memoryview], starts: Sequence[int]
) -> list[tuple[Bits, Bits]]:
    """Per block and plane, the array in the block and the array in the tensor that correspond."""
    if len(blocks) != len(starts):
        raise ValueError(f"there are {len(blocks)} blocks and {len(starts)} starts")
    tokens, step = planes[0].tensor.shape[1], layout.block_tokens
    bits = np.dtype(f"<u{layout.element_bytes}")
    shapes = [(plane.tensor.shape[0], step, plane.tensor.shape[2]) for plane in planes]
    pairs = []
    for block, start in zip(blocks, starts, strict=True):
        if not 0 <= start <= tokens - step:
            raise ValueError(f"tokens [{start}, {start + step}) are not in a tensor of {tokens} tokens")
        if block.nbytes != layout.block_bytes or not block.c_contiguous:
            raise ValueError(
                f"a block of {block.nbytes} bytes, where the layout has {layout.block_bytes} contiguous bytes"
            )
        for plane, shape in zip(planes, shapes, strict=True):
            inside: Bits = np.ndarray(shape, bits, block, plane.offset, plane.strides)
            pairs.append((inside, plane.tensor[:, start : start + step]))
    return pairs


def _bits(layout: KvLayout, name: str, tensor: Tensor, width: int) -> Bits:
    """The bits of an engine tensor as `[kv_heads, tokens, width]`, with this part's heads only."""
    array = _array_bits(layout, name, tensor)
    axes = 2 if layout.kind == "mla" else 3
    lead = array.ndim - axes
    if lead < 0 or any(size != 1 for size in array.shape[:lead]) or (axes == 3 and lead > 1):
        wanted = "[tokens, width]" if axes == 2 else "[kv_heads, tokens, width]"
        raise ValueError(f"{name} has shape {list(array.shape)}, not {wanted} with a batch of 1")
    if array.shape[-1] != width:
        raise ValueError(f"{name} is {array.shape[-1]} wide, where the layout has {width}")
    array = array.reshape(array.shape[lead:])
    if axes == 2:
        return array.reshape(1, *array.shape)
    if len(array) == layout.kv_heads:
        return array
    if len(array) == layout.kv_heads * layout.head_parts:
        # all heads of the model; this part's are [first_head, first_head + kv_heads)
        part: Bits = array[layout.first_head : layout.first_head + layout.kv_heads]
        return part
    raise ValueError(f"{name} has {len(array)} heads, where the layout has {layout.kv_heads}")


def _array_bits(layout: KvLayout, name: str, tensor: Tensor) -> Bits:
    """A view of an engine tensor, of any shape and strides, as unsigned integers of the same size."""
    size = layout.element_bytes
    if not isinstance(tensor, np.ndarray) and not hasattr(tensor, "data_ptr"):
        raise ValueError(f"{name} is a {type(tensor).__name__}, neither a numpy array nor a torch tensor")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, np.ndarray):
        dtype = tensor.dtype.name
        if not hasattr(np, layout.dtype) and dtype == f"uint{8 * size}":
            dtype = layout.dtype  # numpy has no such dtype: its bits stand for it
    if dtype != layout.dtype:
        raise ValueError(f"{name} has dtype {dtype}, where the layout has {layout.dtype}")
    if isinstance(tensor, np.ndarray):
        order = tensor.dtype.byteorder if tensor.dtype.byteorder in "<>" else "="
        bits: Bits = tensor.view(f"{order}u{size}")
        return bits
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, and must be on the CPU")
    torch = sys.modules[type(tensor.dtype).__module__]
    same_size = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[size]
    bits = tensor.view(getattr(torch, same_size)).numpy().view(f"=u{size}")
    return bits
