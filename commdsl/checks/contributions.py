"""Turns a schedule into what each location holds: which terms are combined there, and how often.

A term is an initial chunk, or a function of the registry of what its operands held: functions are uninterpreted, so two
terms are equal if they are built alike. Assumes indices in bounds, no overlapping writes and no undefined reads.

Without functions a step is a linear map on contribution counts, so a forward pass carries every location's
contributions at once: exactly when small, else as 64-bit fingerprints, each with a total that saturates. With functions
every location has the sum of the fingerprints of its terms, that of a function made of its name and the fingerprints of
its operands. `terms` builds what a single location holds exactly, at any scale. A task of the caller makes a chunk of
its own, that nothing else is. Does not judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, LocatedTask, Locations
from commdsl.ir.contracts import AppliedTerm, ChunkTerm, Contract, FinishedTerm, SumTerm, Term
from commdsl.ir.functions import FUNCTIONS, PLAIN
from commdsl.ir.marks import mark, named
from commdsl.ir.schedules import Task
from commdsl.language.records import dataclass

Sums = NDArray[np.uint64]
Totals = NDArray[np.int64]

EXACT_CELLS = 1 << 21
"""Up to so many (location, initial chunk) pairs are counted exactly: 16 MB, and a tenth of a second."""

BIAS = "bias"
"""The name of the function that makes a row of numbers an addend of every row."""

MANY = np.int64(1) << 31
"""Totals stop here, so that contributions cannot wrap around to look right."""


@dataclass(frozen=True, eq=False)
class Contents:
    """What locations hold: `sums[i]` is the sum of the marks of its contributions, `totals[i]` their number."""

    sums: Sums  # (n, width)
    totals: Totals  # (n,)

    def equal(self, other: Contents) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = (self.totals == other.totals) & (self.sums == other.sums).all(axis=1)
        return same

    def at(self, locations: Locations) -> Contents:
        return Contents(self.sums.take(locations, axis=0), self.totals.take(locations))

    def put(self, locations: Locations, new: Contents) -> None:
        self.sums[locations] = new.sums
        self.totals[locations] = new.totals


def initial(located: Located) -> Contents:
    """Return contents in which every location the caller fills, and each origin, holds its own mark once."""
    given = np.flatnonzero(located.given())
    given, size = given[given != located.nowhere], located.size
    if size * len(given) <= EXACT_CELLS and not located.schedule.has_functions:
        sums = np.zeros((size, max(1, len(given))), dtype=np.uint64)
        sums[given, np.arange(len(given))] = 1
    else:
        sums = np.zeros((size, 1), dtype=np.uint64)
        sums[given, 0] = mark(given.astype(np.uint64))
    totals = np.zeros(size, dtype=np.int64)
    totals[given] = 1
    return Contents(sums, totals)


def combine(contents: Contents, sources: Locations) -> Contents:
    """The combination of each row of sources (n, k); column by column, so that nothing of size n * k * width exists."""
    new = contents.at(sources[:, 0])
    for column in range(1, sources.shape[1]):
        more = contents.at(sources[:, column])
        new = Contents(new.sums + more.sums, np.minimum(new.totals + more.totals, MANY))
    return new


def forward(located: Located, contents: Contents) -> Iterator[LocatedStep | LocatedTask]:
    """Runs the schedule on `contents` in place; every step, when it has run."""
    for step in located.steps:
        if isinstance(step, LocatedTask):
            made = contents.at(step.origins.ravel())
            if isinstance(step.step, Task):
                made = applied((step.step.function, 0), [contents.at(one) for one in step.operands.T])
            contents.put(step.writes.ravel(), made)
        else:
            results = [(moves, _written(moves, contents)) for moves in step.moves]
            for moves, new in results:
                contents.put(moves.dest, new)
        yield step


def _written(moves: LocatedMoves, contents: Contents) -> Contents:
    new = combine(contents, moves.sources)
    if moves.given is not None:
        new = applied(moves.function, [new, *map(contents.at, moves.given.T)])
    if moves.moves.accumulate:
        new = summed(new, contents.at(moves.dest))
    if moves.moves.epilogue == PLAIN:
        return new
    bias, residual = (None if at is None else contents.at(at) for at in (moves.bias, moves.residual))
    return finished(new, bias, moves.moves.epilogue.activation, residual)


def promised(located: Located, contract: Contract, start: Contents) -> Contents:
    """Return what a contract says of each of its chunks."""
    if contract.term is not None:
        return _meant(located, contract.term, start)
    return combine(start, located.contract_sources(contract)).at(contract.value.astype(np.int64))


def _meant(located: Located, term: Term, start: Contents) -> Contents:
    match term:
        case ChunkTerm(buffer, rank, chunk):
            return start.at(located.at_start(buffer, rank, chunk))
        case SumTerm(_, parts, rows, count):
            found = Contents(np.zeros((count, start.sums.shape[1]), np.uint64), np.zeros(count, np.int64))
            for part, row in zip(parts, rows, strict=True):
                inner = _meant(located, part, start)
                np.add.at(found.sums, row, inner.sums)
                np.add.at(found.totals, row, inner.totals)
            return Contents(found.sums, np.minimum(found.totals, MANY))
        case AppliedTerm(function, operands, result):
            return applied((function, result), [_meant(located, one, start) for one in operands])
        case FinishedTerm(of, bias, activation, residual):
            added = (None if one is None else _meant(located, one, start) for one in (bias, residual))
            first, last = added
            return finished(_meant(located, of, start), first, activation, last)
        case _:
            assert_never(term)


# --- terms ------------------------------------------------------------------------------------------------------------


def summed(one: Contents, other: Contents) -> Contents:
    """Return the combination of both, row by row."""
    return Contents(one.sums + other.sums, np.minimum(one.totals + other.totals, MANY))


def applied(function: tuple[str, int], operands: Sequence[Contents]) -> Contents:
    """Return a single term for each row: a result of a function, by its name and number, of these operands."""
    marks = [mark(one.sums[:, 0] ^ mark(one.totals.astype(np.uint64))) for one in operands]
    digest = np.full(len(marks[0]), named(*function))
    if function[0] in FUNCTIONS and FUNCTIONS[function[0]].commutes:
        digest = mark(digest + np.sum([mark(one) for one in marks], axis=0, dtype=np.uint64))
    else:
        for one in marks:
            digest = mark(digest + one)
    return Contents(digest[:, None], np.ones(len(digest), np.int64))


def finished(product: Contents, bias: Contents | None, activation: str | None, residual: Contents | None) -> Contents:
    """Return what a product is after its epilogue. A bias and a residual are terms of a sum, as whatever is added."""
    if bias is not None:
        product = summed(product, applied((BIAS, 0), [bias]))
    if activation is not None:
        product = applied((activation, 0), [product])
    return product if residual is None else summed(product, residual)


def transposed(step: LocatedStep, weight: NDArray[np.int64]) -> None:
    """From how often each location contributes behind a step to how often before it, in place."""
    taken = [weight[moves.dest] for moves in step.moves]
    if not any(part.any() for part in taken):
        return
    for moves in step.moves:
        if not moves.moves.accumulate:
            weight[moves.dest] = 0
    for moves, part in zip(step.moves, taken, strict=True):
        rows = np.flatnonzero(part)
        touched = moves.sources[rows]
        np.add.at(weight, touched, part[rows, None])
        weight[touched] = np.minimum(weight[touched], MANY)
