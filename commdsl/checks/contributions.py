"""Turns a schedule into what each location holds: which initial chunks are combined there, and how often.

Assumes indices in bounds, no overlapping writes and no undefined reads. A step is a linear map on contribution counts,
so a forward pass carries every location's contributions at once (exactly when small, else as 64-bit fingerprints, each
with a total that saturates), and one backward pass of the transposed map recounts a single location exactly at any
scale. What a product makes has two contributions: its rows, and a block of its factor. What a task writes is a
contribution of its own, that nothing else is. Does not judge.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, LocatedTask, Locations
from commdsl.ir.marks import mark
from commdsl.language.records import dataclass

Sums = NDArray[np.uint64]
Totals = NDArray[np.int64]

EXACT_CELLS = 1 << 21
"""Up to so many (location, initial chunk) pairs are counted exactly: 16 MB, and a tenth of a second."""

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


def initial(located: Located, among: NDArray[np.bool_] | None = None) -> Contents:
    """Every location the caller fills, and everything a task makes, holds its own mark once; the others nothing. Of
    them only those `among` these.
    """
    given = np.flatnonzero(located.given() if among is None else located.given() & among)
    given, size = given[given != located.nowhere], located.size
    if size * len(given) <= EXACT_CELLS:
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
            contents.put(step.writes.ravel(), contents.at(step.origins.ravel()))
        else:
            made = [(moves, _written(moves, contents)) for moves in step.moves]
            for moves, new in made:
                contents.put(moves.dest, new)
        yield step


def _written(moves: LocatedMoves, contents: Contents) -> Contents:
    new = combine(contents, moves.contributing)
    if not moves.moves.accumulate:
        return new
    old = contents.at(moves.dest)
    return Contents(new.sums + old.sums, np.minimum(new.totals + old.totals, MANY))


def recount(located: Located, location: int) -> NDArray[np.int64]:
    """How often each initial location contributes to one location at the end.

    Exact: the transpose of the schedule applied to the unit vector of that location.
    """
    weight = np.zeros(located.size, dtype=np.int64)
    weight[location] = 1
    for step in reversed(located.steps):
        if isinstance(step, LocatedTask):
            weight[step.origins] = weight[step.writes]
            weight[step.writes] = 0
            continue
        transposed(step, weight)
    weight[~located.given()] = 0
    weight[located.nowhere] = 0
    return weight


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
        touched = moves.contributing[rows]
        np.add.at(weight, touched, part[rows, None])
        weight[touched] = np.minimum(weight[touched], MANY)
