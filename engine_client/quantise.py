"""One layer of a KV block as small integers or 8-bit floats, in numpy: what engine_client.codec quantises with.

The form of the bytes is drawn there. Scales and zeros are of a group: of a key, a head's channel over the block's
tokens; of a value, a head's token over its channels. The latent of an mla cache is treated like a value, its rotary
key like a key. numpy lets go of the GIL in all that takes time.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine_client.layout import KvLayout

FORMATS: Final = {"int8": 0xC1, "int4": 0xC2, "fp8": 0xC3}
"""The byte that a layer begins with. Another form of the same name gets another byte."""
LARGEST: Final = {  # the dtypes that can be quantised, and their largest finite number
    "float32": np.finfo(np.float32).max,
    "bfloat16": np.float32((2 - 2.0**-7) * 2.0**127),
    "float16": np.float32(65_504),
}

HEAD_BYTES: Final = 8
E4M3_LARGEST: Final = np.float32(448)
E4M3_NORMAL: Final = np.float32(2.0**-6)  # the smallest normal value, code 8; codes below are multiples of 2**-9

Bits = NDArray[np.unsignedinteger[Any]]
Values = NDArray[np.float32]


class NotEncoded(ValueError):
    """These bytes are not what this codec writes: another format, or damage."""


class IntegerCode:
    """Codes 0 to `levels` of a group's range: 255, in a byte, or 15, in half of one."""

    def __init__(self, layout: KvLayout, name: str, levels: int, parameter: np.dtype[Any]) -> None:
        self._dtype = layout.dtype
        self._name = name
        self._levels = levels
        self._parameter = parameter
        self._planes = _planes(layout)
        self._codes_at = HEAD_BYTES + sum(2 * plane.group_count * parameter.itemsize for plane in self._planes)
        self.layer_bytes = _padded(self._codes_at + sum(self._code_bytes(plane.count) for plane in self._planes))

    def encode(self, raw: memoryview, target: memoryview) -> None:
        place = _begun(target, self._name)
        at, codes_at = HEAD_BYTES, self._codes_at
        for plane in self._planes:
            values = _to_floats(plane.of(raw), self._dtype)
            for parameter in (zero_scale := self._parameters(values, plane.axis)):
                np.copyto(place[at : at + parameter.nbytes], parameter.reshape(-1).view(np.uint8))
                at += parameter.nbytes
            codes = self._codes(values, *(parameter.astype(np.float32) for parameter in zero_scale)).reshape(-1)
            stop = codes_at + self._code_bytes(codes.size)
            self._pack(codes, place[codes_at:stop])
            codes_at = stop

    def decode(self, source: memoryview, raw: memoryview) -> None:
        place = _checked(source, self._name)
        at, codes_at = HEAD_BYTES, self._codes_at
        for plane in self._planes:
            size = plane.group_count * self._parameter.itemsize
            zero, scale = (
                place[start : start + size].view(self._parameter).astype(np.float32).reshape(plane.groups)
                for start in (at, at + size)
            )
            stop = codes_at + self._code_bytes(plane.count)
            codes = self._unpack(place[codes_at:stop], plane.count).reshape(plane.shape)
            with np.errstate(all="ignore"):  # of bytes that went while they were read
                values: Values = np.multiply(codes, scale, dtype=np.float32)
                np.add(values, zero, out=values)
                if not (zero + scale * np.float32(self._levels) <= LARGEST[self._dtype]).all():
                    np.minimum(values, LARGEST[self._dtype], out=values)  # a rounded scale may lead past it
                _from_floats(values, self._dtype, plane.of(raw))
            at, codes_at = at + 2 * size, stop

    def _parameters(self, values: Values, axis: int) -> tuple[NDArray[Any], NDArray[Any]]:
        low, high = values.min(axis=axis, keepdims=True), values.max(axis=axis, keepdims=True)
        with np.errstate(all="ignore"):  # what overflows is not finite, and refused
            zero = low.astype(self._parameter)
            scale = ((high - low) / np.float32(self._levels)).astype(self._parameter)
        if not (np.isfinite(zero).all() and np.isfinite(scale).all()):
            raise ValueError(f"a value is not finite, or out of the range of {self._name}")
        return zero, scale

    def _codes(self, values: Values, zero: Values, scale: Values) -> NDArray[np.uint8]:
        """Overwrites `values`. A range of nothing, or too small for a parameter, is all zeros."""
        np.subtract(values, zero, out=values)
        np.divide(values, np.where(scale > 0, scale, np.float32(1)), out=values)
        np.rint(values, out=values)
        np.clip(values, 0, self._levels, out=values)
        return values.astype(np.uint8)

    def _pack(self, codes: Bits, target: Bits) -> None:
        # codes of half a byte:  [0, half) lie in the low halves, [half, n) in the high ones
        np.copyto(target, codes[: target.size])
        upper = codes[target.size :]
        np.bitwise_or(target[: upper.size], upper << 4, out=target[: upper.size])

    def _unpack(self, source: Bits, count: int) -> Bits:
        if source.size == count:
            return source
        codes = np.empty(count, np.uint8)
        np.bitwise_and(source, 15, out=codes[: source.size])
        np.right_shift(source[: count - source.size], 4, out=codes[source.size :])
        return codes

    def _code_bytes(self, count: int) -> int:
        return count if self._levels == 255 else (count + 1) // 2


def _e4m3_values() -> Values:
    """What each of the 256 codes stands for; 127 and 255 are NaN."""
    codes = np.arange(256)
    sign, exponent, mantissa = codes >> 7, codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent > 0, normal, np.ldexp(mantissa, -9))
    values[codes & 127 == 127] = np.nan
    signed: Values = (values * np.where(sign, -1, 1)).astype(np.float32)
    return signed


class Float8Code:
    """e4m3fn, after a head's keys or values were scaled to its largest number."""

    def __init__(self, layout: KvLayout) -> None:
        self._dtype = layout.dtype
        self._planes = _planes(layout)
        self._values = _e4m3_values()
        self._codes_at = HEAD_BYTES + 4 * sum(plane.shape[0] for plane in self._planes)
        self.layer_bytes = _padded(self._codes_at + sum(plane.count for plane in self._planes))

    def encode(self, raw: memoryview, target: memoryview) -> None:
        place = _begun(target, "fp8")
        at, codes_at = HEAD_BYTES, self._codes_at
        for plane in self._planes:
            values = _to_floats(plane.of(raw), self._dtype)
            scale = np.abs(values).max(axis=(1, 2), keepdims=True) / E4M3_LARGEST
            if not np.isfinite(scale).all():
                raise ValueError("a value is not finite")
            np.copyto(place[at : at + scale.nbytes], scale.reshape(-1).view(np.uint8))
            np.divide(values, np.where(scale > 0, scale, np.float32(1)), out=values)
            codes = place[codes_at : codes_at + plane.count].reshape(plane.shape)
            np.copyto(codes, _e4m3_codes(values), casting="unsafe")
            at, codes_at = at + scale.nbytes, codes_at + plane.count

    def decode(self, source: memoryview, raw: memoryview) -> None:
        place = _checked(source, "fp8")
        at, codes_at = HEAD_BYTES, self._codes_at
        for plane in self._planes:
            target = plane.of(raw)
            for head, scale in enumerate(place[at : at + 4 * plane.shape[0]].view("<f4")):
                table = np.empty(256, target.dtype)
                with np.errstate(all="ignore"):
                    limit = LARGEST[self._dtype]
                    _from_floats(np.clip(self._values * scale, -limit, limit), self._dtype, table)
                stop = codes_at + target[head].size
                np.take(table, place[codes_at:stop].reshape(target[head].shape), out=target[head], mode="clip")
                codes_at = stop
            at += 4 * plane.shape[0]


def _e4m3_codes(values: Values) -> NDArray[np.uint32]:
    """The nearest code of each value, the even one of two; overwrites `values`.

    Below the smallest normal value the codes are linear, above it they are the upper bits of the float's own.
    """
    signs = values.view(np.uint32) >> 24 & 0x80
    np.abs(values, out=values)
    np.minimum(values, E4M3_LARGEST, out=values)
    linear = np.minimum(values, E4M3_NORMAL)
    linear += np.float32(2.0**14)  # whose last bit is 2**-9: what is above it is the code
    bits = np.maximum(values, E4M3_NORMAL).view(np.uint32)
    bits += np.uint32(0x7FFFF) + (bits >> 20 & 1)
    codes = (bits >> 20) + (linear.view(np.uint32) & 15)
    codes -= np.uint32((120 << 3) + 8)  # the difference of the exponents' biases; code 8 is in both sums
    codes |= signs
    return codes


# Values


@dataclass(frozen=True, slots=True)
class _Plane:
    """The keys or the values of one layer `[heads, tokens, width]`; `axis` is the one that a group runs along."""

    shape: tuple[int, int, int]
    element: np.dtype[Any]  # its bits
    offset: int  # bytes
    strides: tuple[int, int, int]  # bytes
    axis: int

    def of(self, raw: memoryview) -> Bits:
        return np.ndarray(self.shape, self.element, raw, self.offset, self.strides)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(1 if axis == self.axis else size for axis, size in enumerate(self.shape))

    @property
    def group_count(self) -> int:
        return self.count // self.shape[self.axis]


def _planes(layout: KvLayout) -> list[_Plane]:
    heads, tokens, size = layout.kv_heads, layout.block_tokens, layout.element_bytes
    key, value = layout.head_dim, layout.value_head_dim
    element = np.dtype(f"<u{size}")
    if layout.kind == "mla":
        row = (key + value) * size
        planes = [_Plane((1, tokens, key), element, 0, (0, row, size), axis=2)]
        if value:
            planes.append(_Plane((1, tokens, value), element, key * size, (0, row, size), axis=1))
        return planes
    return [
        _Plane((heads, tokens, width), element, offset, (tokens * width * size, width * size, size), axis)
        for width, offset, axis in ((key, 0, 1), (value, heads * tokens * key * size, 2))
    ]


def _to_floats(bits: Bits, dtype: str) -> Values:
    """A copy as float32."""
    if dtype == "bfloat16":
        wide = bits.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return bits.view(dtype).astype(np.float32)


def _from_floats(values: Values, dtype: str, target: Bits) -> None:
    """Round to the nearest, the even one of two; overwrites `values`."""
    if dtype == "bfloat16":
        wide = values.view(np.uint32)
        wide += np.uint32(0x7FFF) + (wide >> 16 & 1)
        wide >>= 16
        np.copyto(target, wide, casting="unsafe")
    else:
        np.copyto(target.view(dtype), values, casting="unsafe")


# Bytes


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _begun(target: memoryview, name: str) -> NDArray[np.uint8]:
    place = np.frombuffer(target, np.uint8)
    place[:HEAD_BYTES] = (FORMATS[name], 0, 0, 0, 0, 0, 0, 0)
    place[-HEAD_BYTES + 1 :] = 0  # what is padding of it stays so
    return place


def _checked(source: memoryview, name: str) -> NDArray[np.uint8]:
    place = np.frombuffer(source, np.uint8)
    if place[0] != FORMATS[name]:
        raise NotEncoded(f"a layer of format {place[0]:#04x}, which is not {name}: {FORMATS[name]:#04x}")
    return place
