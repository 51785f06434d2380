"""Tells whether ranks that want the same value get the same bits, and which statements leave bits as they are.

Assumes indices in bounds, no overlapping writes, no undefined reads. Every location carries a hash of the expression
that made it: a chunk, the combination of two (either order gives the same bits), or of a list in its order, rounded
once. Equal hashes mean equal expressions, hence equal bits; different ones may still happen to agree for some data.
Does not report faults: different bits are legal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.casts import Mask, left, rounded
from commdsl.checks.contributions import initial, promised
from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, LocatedTask
from commdsl.checks.operations import HOW
from commdsl.ir.functions import FUNCTIONS
from commdsl.ir.marks import mark, mix, named
from commdsl.ir.schedules import Task

Hashes = NDArray[np.uint64]

UNROUNDED = np.uint64(0x5851F42D4C957F2D)
"""Sets the running sum of a list apart from one that was rounded and stored."""


CAST = np.uint64(0x2545F4914F6CDD1D)
"""Sets what was rounded to another element type on its way apart from what was not."""


def expressions(located: Located) -> Hashes:
    """A hash of the expression that every location holds at the end."""
    hashes = _initial(located)
    for _ in _run(located, hashes):
        pass
    return hashes[: located.nowhere + 1]


def idle_statements(located: Located) -> Iterator[tuple[LocatedStep, LocatedMoves]]:
    """Those that leave in every destination the bits that are there."""
    hashes = _initial(located)
    for step, made in _run(located, hashes):
        for moves, new in zip(step.moves, made, strict=True):
            if np.array_equal(new, hashes[moves.dest]):
                yield step, moves


def _initial(located: Located) -> Hashes:
    return mark(np.arange(located.size, dtype=np.uint64))


def _run(located: Located, hashes: Hashes) -> Iterator[tuple[LocatedStep, list[Hashes]]]:
    """Runs the schedule on `hashes` in place. Of every step what its statements write, before they do."""
    is_cast = np.zeros(located.size, np.bool_)
    for step in located.steps:
        if isinstance(step, LocatedTask):
            new = hashes[step.origins]
            if isinstance(step.step, Task):
                operands = [hashes[one] for one in step.operands.T]
                new = _applied((step.step.function, 0), operands).reshape(step.writes.shape)
            hashes[step.writes], is_cast[step.writes] = new, False
            continue
        made = [_expression(located, moves, hashes, is_cast) for moves in step.moves]
        yield step, made
        cast = [left(moves, is_cast) for moves in step.moves]
        for moves, new, of_cast in zip(step.moves, made, cast, strict=True):
            hashes[moves.dest], is_cast[moves.dest] = new, of_cast


def same_bits(located: Located) -> bool:
    """Whether each value a contract wants in several places is made by one expression everywhere."""
    hashes, start = expressions(located), initial(located)
    columns = mark(np.arange(start.sums.shape[1], dtype=np.uint64))
    for contract in located.schedule.contracts:
        if not len(contract.dest_rank):
            continue
        found = hashes[located.contract_dests(contract)]
        meant = promised(located, contract, start)
        _, first, which = np.unique(meant.sums @ columns, return_index=True, return_inverse=True)
        if not np.array_equal(found, found[first][which]):
            return False
    return True


def _pair(left: Hashes, right: Hashes, how: np.uint64) -> Hashes:
    """Commutative, not associative."""
    return mix(left + right + how)


def _expression(located: Located, moves: LocatedMoves, hashes: Hashes, is_cast: Mask) -> Hashes:
    rounds = None if moves.moves.cast is None else rounded(moves, is_cast)
    how = np.uint64(HOW.index(moves.moves.operation or ""))

    def taken(column: int) -> Hashes:
        found = hashes[moves.sources[:, column]]
        return found if rounds is None else np.where(rounds[:, column], mix(found ^ CAST), found)

    made = _computed(moves, taken(0), hashes)
    if moves.moves.accumulate:
        return _pair(hashes[moves.dest], made, how)
    absent = moves.sources == located.nowhere
    terms = (~absent[:, 0]).astype(np.int64)
    for column in range(1, moves.sources.shape[1]):
        term = taken(column)
        stored = np.where(terms == 1, made, mix(made ^ UNROUNDED))
        more = np.where(terms == 0, term, _pair(stored, term, how))
        made = np.where(absent[:, column], made, more)
        terms += ~absent[:, column]
    return made


def _computed(moves: LocatedMoves, rows: Hashes, hashes: Hashes) -> Hashes:
    """Return the hashes of what a function makes of rows; those of the rows where a statement applies none."""
    if moves.given is None:
        return rows
    made = _applied(moves.function, [rows, *hashes[moves.given.T]])
    ends = moves.moves.epilogue
    for name, at in (("bias", moves.bias), (ends.activation or "", None), ("residual", moves.residual)):
        if at is not None:
            made = _applied((name, 0), [made, hashes[at]])
        elif name == ends.activation:
            made = _applied((name, 0), [made])
    return made


def _applied(function: tuple[str, int], operands: Sequence[Hashes]) -> Hashes:
    """Return a hash for each row of the operands: either order of those that commute gives the same bits."""
    commutes = function[0] in FUNCTIONS and FUNCTIONS[function[0]].commutes
    made = np.full(len(operands[0]), named(*function))
    if commutes:
        return mix(made + np.sum(operands, axis=0, dtype=np.uint64))
    for one in operands:
        made = mix(made + one)
    return made
