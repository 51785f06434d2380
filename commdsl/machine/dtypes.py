"""The element types: how they are stored, how they widen to what they are combined in, which reductions they have.

Assumes numpy only, so bfloat16 and the 8-bit floats are kept as their bits. Does not know torch's names; `runtime`
does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

OPS = ("sum", "max", "min", "prod", "avg")
NAMED_OPS = ("sum", "max", "min", "prod")
"""Those that a file may name: every type that is reduced has them. Integers wrap. Of truth values the sum and the
maximum are `or`, the product and the minimum `and`, as in torch.
"""


@dataclass(frozen=True, slots=True)
class DType:
    """`storage` holds one element; `ops` is empty for a type whose bytes are only moved."""

    name: str
    storage: np.dtype[Any]
    ops: tuple[str, ...]
    is_float: bool
    widen: Callable[[Array], Array] = field(repr=False)
    narrow: Callable[[Array], Array] = field(repr=False)
    accumulator: type[np.floating[Any]] = np.float32  # of a floating type: what its elements widen to

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.storage.itemsize

    @property
    def casts(self) -> bool:
        """Whether its elements may travel in a shorter type: they are numbers that float32 holds, and are combined."""
        return self.is_float and bool(self.ops) and self.accumulator is np.float32

    def to_float32(self, values: Array) -> Array:
        return self.widen(values).astype(np.float32, copy=False)

    def from_float32(self, values: Array) -> Array:
        """Rounded to nearest, ties to even; integers are truncated."""
        return self.narrow(np.asarray(values, np.float32).astype(self.accumulator, copy=False))


def _bfloat16_widen(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bfloat16_narrow(values: Array) -> Array:
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded).astype(np.uint16)


def _plain(name: str, ops: tuple[str, ...], *, is_float: bool) -> DType:
    storage = np.dtype(name)
    accumulator = np.float64 if storage == np.float64 else np.float32

    def widen(values: Array) -> Array:
        return values.astype(accumulator)

    def narrow(values: Array) -> Array:
        with np.errstate(over="ignore"):  # to infinity, as the hardware does
            return values.astype(storage)

    return DType(name, storage, ops, is_float, widen, narrow, accumulator)


def _float8(name: str, exponent_bits: int, bias: int, *, has_infinity: bool) -> DType:
    """An 8-bit float as its bits, through a table of all 256 values: it is moved, never added."""
    table = np.array([_float8_value(bits, exponent_bits, bias, has_infinity) for bits in range(256)], np.float32)
    finite = np.nonzero(np.isfinite(table))[0]
    order = finite[np.argsort(table[finite], kind="stable")]
    sorted_values = table[order]

    def widen(bits: Array) -> Array:
        return table[bits]

    def narrow(values: Array) -> Array:
        at = np.clip(np.searchsorted(sorted_values, values), 1, len(order) - 1)
        left, right = sorted_values[at - 1], sorted_values[at]
        nearer_right = (right - values < values - left) | ((right - values == values - left) & (order[at] % 2 == 0))
        nearest = order[np.where(nearer_right, at, at - 1)]
        nearest = np.where((values == 0) & np.signbit(values), 0x80, nearest)  # zeros compare equal
        return np.where(np.isnan(values), 0x7F, nearest).astype(np.uint8)

    return DType(name, np.dtype(np.uint8), (), True, widen, narrow)


def _float8_value(bits: int, exponent_bits: int, bias: int, has_infinity: bool) -> float:
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if bits & 0x80 else 1.0
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    last = (1 << exponent_bits) - 1
    if exponent == last and has_infinity:
        return sign * np.inf if mantissa == 0 else np.nan
    if exponent == last and mantissa == (1 << mantissa_bits) - 1:
        return np.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


FLOAT64 = _plain("float64", OPS, is_float=True)
FLOAT32 = _plain("float32", OPS, is_float=True)
FLOAT16 = _plain("float16", OPS, is_float=True)
BFLOAT16 = DType("bfloat16", np.dtype(np.uint16), OPS, True, _bfloat16_widen, _bfloat16_narrow)
INT32 = _plain("int32", NAMED_OPS, is_float=False)
INT64 = _plain("int64", NAMED_OPS, is_float=False)
FLOAT8_E4M3FN = _float8("float8_e4m3fn", 4, 7, has_infinity=False)
FLOAT8_E5M2 = _float8("float8_e5m2", 5, 15, has_infinity=True)
INT16 = _plain("int16", NAMED_OPS, is_float=False)
INT8 = _plain("int8", NAMED_OPS, is_float=False)
UINT8 = _plain("uint8", NAMED_OPS, is_float=False)
BOOL = _plain("bool", NAMED_OPS, is_float=False)

ALL = (FLOAT32, FLOAT16, BFLOAT16, FLOAT64, INT32, INT64, INT16, INT8, UINT8, BOOL, FLOAT8_E4M3FN, FLOAT8_E5M2)
REDUCED = tuple(dtype for dtype in ALL if dtype.ops)
"""Those that have a reduction; the bytes of the others are only moved."""
BY_NAME = MappingProxyType({dtype.name: dtype for dtype in ALL})
