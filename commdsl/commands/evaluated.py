"""Turns terms of `ensure` with functions into the numbers that they stand for, and how far rounding may move them.

Written from the meanings in the registry of functions and in the language reference. Assumes terms that were resolved,
and the tensors that ranks were given, factors of products as matrices. Shares nothing with the interpreter. Does not
compare. Floats are float64 (long double for float64) and carry a bound of their error: each function and each sum is
rounded at most once where it is stored. Other types are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import erf, sqrt
from typing import Any, assert_never

import numpy as np

from commdsl.ir.contracts import AppliedTerm, ChunkTerm, FinishedTerm, SumTerm, Term
from commdsl.ir.functions import ELEMENTWISE, MATMUL
from commdsl.language.records import dataclass
from commdsl.machine.dtypes import Array, DType

STEEPEST = 1.13
"""No slope of gelu, nor of silu, is larger."""


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Elements, row by row; the most by which each may be off (floats alone); the length of a row, where known."""

    elements: Array
    error: Array
    columns: int | None = None

    @property
    def most(self) -> Array:
        """The largest size of each element."""
        return np.asarray(np.abs(self.elements) + self.error)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How terms are evaluated: `chunk` reads what was given, (buffer, rank, chunk), with the type and the columns of
    its matrix; how a sum is combined; the type of the result; the unit of rounding and its smallest step.
    """

    chunk: Callable[[int, int, int], tuple[Array, DType, int | None]]
    operation: str
    dtype: DType
    unit: float
    smallest: float

    @property
    def precise(self) -> type[np.floating[Any]]:
        return np.longdouble if self.dtype.name == "float64" else np.float64

    def rounded(self, elements: Array, error: Array, columns: int | None, times: int = 1) -> Evaluated:
        """What is stored so many times on its way."""
        more = times * (self.unit * (np.abs(elements) + error) + self.smallest)
        return Evaluated(elements, np.asarray(error + more), columns)


def value_of(term: Term, row: int, numbers: Evaluation) -> Evaluated:
    """Evaluate one row of a term."""
    match term:
        case ChunkTerm(buffer, rank, chunk):
            elements, of, columns = numbers.chunk(buffer, int(rank[row]), int(chunk[row]))
            if not numbers.dtype.is_float:
                return Evaluated(elements, np.zeros(0), columns)
            wide = of.widen(elements).astype(numbers.precise)
            return Evaluated(wide, np.zeros_like(wide), columns)
        case SumTerm(_, parts, rows):
            ends = ((of, np.searchsorted(at, (row, row + 1))) for of, at in zip(parts, rows, strict=True))
            terms = [value_of(of, one, numbers) for of, here in ends for one in range(*here.tolist())]
            return combined(terms, numbers.operation, numbers)
        case AppliedTerm(function, operands, result):
            return _applied(function, result, [value_of(one, row, numbers) for one in operands], numbers)
        case FinishedTerm(of, bias, activation, residual):
            first, last = (None if one is None else value_of(one, row, numbers) for one in (bias, residual))
            return _finished(value_of(of, row, numbers), first, activation, last, numbers)
        case _:
            assert_never(term)


def combined(terms: Sequence[Evaluated], operation: str, numbers: Evaluation) -> Evaluated:
    """Combine terms; each and every partial result may be stored."""
    columns, elements = terms[0].columns, [one.elements for one in terms]
    if not numbers.dtype.is_float:
        return Evaluated(whole(elements, numbers.dtype, operation), np.zeros(0), columns)
    size, error = (reduce(np.add, parts) for parts in ([one.most for one in terms], [one.error for one in terms]))
    stored = (len(terms) + 1) * (numbers.unit * size + numbers.smallest)
    match operation:
        case "sum":
            return Evaluated(reduce(np.add, elements), error + stored, columns)
        case "avg":
            return Evaluated(reduce(np.add, elements) / len(terms), (error + 2 * stored) / len(terms), columns)
        case "max" | "min":
            best = reduce(np.maximum if operation == "max" else np.minimum, elements)
            return Evaluated(best, reduce(np.maximum, [one.error for one in terms]) + stored, columns)
        case "prod":
            return reduce(lambda left, right: _multiplied(left, right, numbers), terms)
        case unknown:
            raise AssertionError(unknown)


def whole(values: Sequence[Array], dtype: DType, operation: str) -> Array:
    """Integers as they wrap, truth values by `or` and `and`."""
    if dtype.name == "bool":
        return reduce(np.logical_or if operation in ("sum", "max") else np.logical_and, values)
    function = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[operation]
    return reduce(lambda left, right: function(left, right, dtype=dtype.storage, casting="unsafe"), values)


def _multiplied(left: Evaluated, right: Evaluated, numbers: Evaluation) -> Evaluated:
    made = left.elements * right.elements
    return numbers.rounded(made, left.most * right.most - np.abs(made), left.columns)


def _applied(function: str, result: int, operands: Sequence[Evaluated], numbers: Evaluation) -> Evaluated:
    if function in ELEMENTWISE:
        return combined(operands, ELEMENTWISE[function].operation, numbers)
    if function == MATMUL:
        return _product(operands[0], operands[1], numbers)
    assert function == "add_rms_norm", function
    x, residual, weight, eps = operands
    added = combined([x, residual], "sum", numbers)
    return added if result == 0 else _normed(added, weight, float(eps.elements[0]), numbers)


def _product(rows: Evaluated, factor: Evaluated, numbers: Evaluation) -> Evaluated:
    """The rows times those of the factor: a column for each of these."""
    depth = factor.columns or rows.columns
    assert depth is not None, "a factor is given as a matrix"
    (a, b), (most_a, most_b) = (
        [one.reshape(-1, depth) for one in pair]
        for pair in ((rows.elements, factor.elements), (rows.most, factor.most))
    )
    made = a @ b.T
    if not numbers.dtype.is_float:
        return Evaluated(made.ravel(), np.zeros(0), len(b))
    size = most_a @ most_b.T
    error = size - np.abs(a) @ np.abs(b).T + (depth + 2) * 2.0**-52 * size
    return numbers.rounded(made.ravel(), error.ravel(), len(b))


def _normed(rows: Evaluated, weight: Evaluated, eps: float, numbers: Evaluation) -> Evaluated:
    """Each row divided by the root of its mean square and eps, times the weight."""
    shape = (-1, weight.elements.size)
    y, off = rows.elements.reshape(shape), rows.error.reshape(shape)
    root = np.sqrt(np.square(y).mean(axis=1, keepdims=True) + eps)
    moved = np.sqrt(np.square(off).mean(axis=1, keepdims=True))  # the root moves by no more
    least = np.maximum(root - moved, max(sqrt(eps), numbers.smallest))
    made = y / root * weight.elements
    error = (off / least + np.abs(y) * moved / (root * least)) * weight.most + np.abs(y / root) * weight.error
    return numbers.rounded(made.ravel(), error.ravel(), shape[1], times=2)


def _finished(
    product: Evaluated, bias: Evaluated | None, activation: str | None, residual: Evaluated | None, numbers: Evaluation
) -> Evaluated:
    """A bias is added to every row, an activation applied, a residual added."""
    made = product
    if bias is not None:
        row = [np.tile(one, product.elements.size // one.size or 1) for one in (bias.elements, bias.error) if one.size]
        made = combined([product, Evaluated(row[0], row[-1])], "sum", numbers)
    match activation:
        case None:
            pass
        case "gelu":
            share = np.array([(1 + erf(float(one) / sqrt(2))) / 2 for one in made.elements])
            made = numbers.rounded(made.elements * share, STEEPEST * made.error, made.columns)
        case "swiglu":
            made = _gated(made, numbers)
        case unknown:
            raise AssertionError(unknown)
    return made if residual is None else combined([made, residual], "sum", numbers)


def _gated(both: Evaluated, numbers: Evaluation) -> Evaluated:
    """Silu of the first half of each row, times the second."""
    assert both.columns is not None, "a product has columns"
    half = both.columns // 2
    (gate, up), (off_gate, off_up) = (
        np.split(one.reshape(-1, both.columns), [half], axis=1) for one in (both.elements, both.error)
    )
    silu = gate / (1 + np.exp(-gate))
    error = STEEPEST * off_gate * (np.abs(up) + off_up) + np.abs(silu) * off_up
    return numbers.rounded((silu * up).ravel(), error.ravel(), half)
