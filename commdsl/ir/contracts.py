"""What contracts mean: the chunks at the end, and the terms or the chunks that they are equal to.

Assumes resolved ranks and chunks. Does not know the steps.

A `Term` over n rows has a value for each row. Functions are uninterpreted: two terms are equal if they are built alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.functions import FUNCTIONS
from commdsl.language.records import dataclass
from commdsl.language.source import Span

Ints: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ChunkTerm:
    """A chunk that the caller gives, or that a function of the caller wrote last."""

    buffer: int
    rank: Ints  # (n,)
    chunk: Ints  # (n,)


@dataclass(frozen=True, eq=False)
class SumTerm:
    """Terms combined by an operation: row i of `parts[k]` belongs to row `rows[k][i]`."""

    operation: str
    parts: tuple[Term, ...]  # over m rows each
    rows: tuple[Ints, ...]  # (m,) each, ascending
    count: int  # n


@dataclass(frozen=True, eq=False)
class AppliedTerm:
    """A result of a function of the registry."""

    function: str
    operands: tuple[Term, ...]
    result: int = 0


@dataclass(frozen=True, eq=False)
class FinishedTerm:
    """A term with the epilogue of a product: a bias is added, an activation applied, a residual added."""

    of: Term
    bias: ChunkTerm | None
    activation: str | None
    residual: ChunkTerm | None


Term: TypeAlias = ChunkTerm | SumTerm | AppliedTerm | FinishedTerm


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a contract says of casts: how often the most rounded contribution is, and to which element type."""

    times: int
    element: str

    @property
    def words(self) -> str:
        return f"rounded({self.element}, {self.times})"


@dataclass(frozen=True)
class Rotation:
    """Over the yields every chunk of `sources[0]` is handed over, in it or in `dests[0]`, on every rank exactly once;
    at each yield chunk i of `sources[n]` or `dests[n]` is of the same rank and chunk for every n.

    `visits[r, q, c]`: whether rank r is handed chunk c of rank q; None: every rank every chunk. `back`: none, or a
    buffer for each of `sources` that at the end has, chunk by chunk, the sum of what yields wrote about it.
    """

    sources: tuple[int, ...]  # buffers
    dests: tuple[int, ...]
    visits: NDArray[np.bool_] | None  # (num_ranks, num_ranks, num_chunks)
    back: tuple[int, ...] = ()

    @property
    def buffers(self) -> frozenset[int]:
        """In which pieces are handed over."""
        return frozenset((*self.sources, *self.dests))


@dataclass(frozen=True)
class Contract:
    """What must hold at the end. Row j: chunk `dest_chunk[j]` on `dest_rank[j]` equals value `value[j]`.

    Value v is the combination of initial chunks (source_rank[v, i], source_chunk[v, i]) of `source_buffer`, i in rank
    order: one (a copy) or several (a reduction). `operation` is how they are combined, None of copies; "sum" stands for
    the call's, too, where no statement names one. Of a scratch buffer, the chunks that its last Task or Yield wrote.
    `name` is the collective ("allreduce", "general", "rotation", ...). A rotation has no rows: `rotation` says what
    holds over the yields. Locations without a row are free at the end.

    `term`: what the rows are equal to, one for each row, where a contract names functions. Its values then are the
    chunks that are combined there but for functions: of a function the first operand, as a move would bring it.
    """

    name: str
    source_buffer: int
    dest_buffer: int
    operation: str | None
    dest_rank: Ints  # (n,)
    dest_chunk: Ints  # (n,)
    value: Ints  # (n,)
    source_rank: Ints  # (m, k)
    source_chunk: Ints  # (m, k)
    root: int | None
    span: Span = field(repr=False)
    source_valid: NDArray[np.bool_] | None = None  # (m, k), None: all
    rotation: Rotation | None = None
    rounding: Rounding | None = None
    term: Term | None = None

    @property
    def summed(self) -> frozenset[int]:
        """Of how many chunks its values are sums."""
        if self.operation != "sum":
            return frozenset()
        if self.term is not None:
            return frozenset(combined_in(self.term).tolist())
        if self.source_valid is None:
            return frozenset({self.source_rank.shape[1]})
        return frozenset(self.source_valid.sum(axis=1).tolist())


def parts_of(term: Term) -> tuple[Term, ...]:
    """Return the terms right inside a term."""
    match term:
        case ChunkTerm():
            return ()
        case SumTerm(_, parts) | AppliedTerm(_, parts):
            return parts
        case FinishedTerm(of, bias, _, residual):
            return (of, *(one for one in (bias, residual) if one is not None))
        case _:
            assert_never(term)


def combined_in(term: Term) -> NDArray[np.int64]:
    """Return of how many chunks each row is a combination, of a function those of its first operand."""
    match term:
        case ChunkTerm(_, rank):
            return np.ones(len(rank), np.int64)
        case SumTerm(_, parts, rows, count):
            found = np.zeros(count, np.int64)
            for part, row in zip(parts, rows, strict=True):
                np.add.at(found, row, combined_in(part))
            return found
        case AppliedTerm(_, (first, *_)) | FinishedTerm(first):
            return combined_in(first)
        case _:
            raise AssertionError(term)


def terms_of(contract: Contract) -> Iterator[Term]:
    """Yield every term in a contract, each before those inside it."""
    left = [] if contract.term is None else [contract.term]
    while left:
        term = left.pop()
        left += reversed(parts_of(term))
        yield term


def sources_of(contract: Contract) -> tuple[int, ...]:
    """Return the buffers whose chunks a contract is about, each once."""
    found = dict.fromkeys(term.buffer for term in terms_of(contract) if isinstance(term, ChunkTerm))
    return tuple(found) or (contract.source_buffer,)


def is_exact(contract: Contract) -> bool:
    """Whether kernels leave the bits of the reference interpreter."""
    applied = (term for term in terms_of(contract) if isinstance(term, AppliedTerm))
    return all(one.result not in FUNCTIONS[one.function].inexact for one in applied)
