"""Turns what operands hold, and what an average multiplies and divides by, into what is no average as a Plan means it.

Assumes what operands hold was counted. Does not know where they lie; `computes` does. Shares nothing with `lower`.

What holds n contributions is their sum divided by d(n): by n where a contract sums n, else by the least power of two
that is not less. So a sum over d(n) of operands over d(a), d(b), ... weighs them by d(a) : d(b) : ... of d(n).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.moves import MOST_CONTRIBUTIONS
from commdsl.program.proof.values import Mask

Longs: TypeAlias = NDArray[np.int64]


class Weights(NamedTuple):
    """What a Plan says of some operations, a row for each."""

    operands: Sequence[tuple[Ints, Mask | None]]  # a column for each operand
    whole: Ints
    averaged: frozenset[int]  # of how many contributions contracts want sums


def weighed(held: Sequence[tuple[Longs, Mask | None]], weights: Weights) -> tuple[Longs, Mask]:
    """How many contributions each result holds, and whether its weights are right and in lowest terms."""
    counts = [_there(column, valid) for column, valid in held]
    factors = [_there(column.astype(np.int64), valid) for column, valid in weights.operands]
    if len(counts) == 1:
        return counts[0], (factors[0] == 1) & (weights.whole == 1)
    whole = weights.whole.astype(np.int64)
    contributions: Longs = np.minimum(np.sum(counts, axis=0), MOST_CONTRIBUTIONS)
    divisor = _divisor(contributions, weights.averaged)
    is_fair: Mask = np.gcd.reduce([*factors, whole]) == 1
    for count, factor in zip(counts, factors, strict=True):
        is_fair &= _divisor(count, weights.averaged) * whole == factor * divisor
    return contributions, is_fair


def _divisor(count: Longs, averaged: frozenset[int]) -> Longs:
    """d(n), 0 of none."""
    divisor = np.minimum(count, 1)
    while (is_less := divisor < count).any():
        divisor = np.where(is_less, 2 * divisor, divisor)
    for number in averaged:
        divisor = np.where(count == number, number, divisor)
    return divisor


def _there(column: Longs, valid: Mask | None) -> Longs:
    return column if valid is None else np.where(valid, column, 0)
