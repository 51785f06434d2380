"""Turns float32 values of a chunk into what is left of them when they have travelled in another element type.

Assumes whole chunks, as stretches with one scale are counted from the first element of a chunk. Does not share
anything with the kernels: it is the oracle's own.
"""

from __future__ import annotations

import numpy as np

from commdsl.ir.schedules import Cast
from commdsl.machine.dtypes import BY_NAME, FLOAT8_E4M3FN, Array

LARGEST = np.float32(448)
"""The largest number of float8."""

SMALLEST_SCALE = np.float32(2.0**-126)
"""The smallest normal number: a lesser one has fewer digits."""


def rounded(values: Array, cast: Cast) -> Array:
    """Float32 values, each rounded once, as float32."""
    if cast.stretch:
        return _scaled(values, cast.stretch)
    to = BY_NAME[cast.element]
    return to.to_float32(to.from_float32(values))


def _scaled(values: Array, stretch: int) -> Array:
    """As float8, each stretch by a scale that makes its largest finite magnitude the largest number of float8."""
    rows = -(-len(values) // stretch)
    padded = np.zeros((rows, stretch), np.float32)
    padded.ravel()[: len(values)] = values
    finite = np.isfinite(padded)
    largest = np.where(finite, np.abs(padded), np.float32(0)).max(axis=1, initial=0)
    scale = np.where(largest > 0, np.maximum(largest / LARGEST, SMALLEST_SCALE), np.float32(1))[:, None]
    parts = np.where(finite, padded, np.float32(0)) / scale
    digits = np.copysign(FLOAT8_E4M3FN.widen(FLOAT8_E4M3FN.narrow(parts)), parts)  # what becomes zero keeps its sign
    found = digits * scale
    return np.where(finite, found, np.float32(np.nan)).ravel()[: len(values)]
