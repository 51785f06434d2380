"""Turns float32 values of a chunk into what is left of them when they have travelled in another element type.

Assumes whole chunks, as stretches with one scale are counted from the first element of a chunk. Does not share
anything with the kernels: it is the oracle's own.
"""

from __future__ import annotations

import numpy as np

from commdsl.ir.schedules import Cast
from commdsl.machine.dtypes import BY_NAME, FLOAT8_E4M3FN, Array

SMALLEST_SCALE = np.float32(2.0**-126)
"""The smallest normal number."""


def rounded(values: Array, cast: Cast) -> Array:
    """Float32 values, each rounded once, as float32."""
    if cast.stretch:
        return _scaled(values, cast.stretch)
    to = BY_NAME[cast.element]
    return to.to_float32(to.from_float32(values))


def _scaled(values: Array, stretch: int) -> Array:
    """As float8, each stretch by the least power of two that leaves no finite magnitude above 448."""
    rows = -(-len(values) // stretch)
    padded = np.zeros((rows, stretch), np.float32)
    padded.ravel()[: len(values)] = values
    finite = np.isfinite(padded)
    largest = np.where(finite, np.abs(padded), np.float32(0)).max(axis=1, initial=0)
    digits, power = np.frexp(largest)  # the largest is digits * 2**power, and 448 is 0.875 * 2**9
    scale = np.maximum(np.ldexp(np.float32(1), power - 9 + (digits > np.float32(0.875))), SMALLEST_SCALE)[:, None]
    parts = np.where(finite, padded, np.float32(0)) / scale
    found = scale * np.copysign(
        FLOAT8_E4M3FN.widen(FLOAT8_E4M3FN.narrow(parts)), parts
    )  # what becomes zero keeps its sign
    return np.where(finite, found, np.float32(np.nan)).ravel()[: len(values)]
