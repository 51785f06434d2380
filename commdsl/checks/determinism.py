"""Tells whether ranks that want the same value get the same bits, and which statements leave bits as they are.

Assumes indices in bounds, no overlapping writes, no undefined reads. Every location carries a hash of the expression
that made it: a chunk, the combination of two (either order gives the same bits), or of a list in its order, rounded
once. Equal hashes mean equal expressions, hence equal bits; different ones may still happen to agree for some data.
Does not report faults: different bits are legal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.casts import Mask, left, rounded
from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, LocatedTask
from commdsl.checks.operations import HOW
from commdsl.ir.functions import ACTIVATIONS
from commdsl.ir.marks import mark, mix
from commdsl.ir.schedules import Contract

Hashes = NDArray[np.uint64]

UNROUNDED = np.uint64(0x5851F42D4C957F2D)
"""Sets the running sum of a list apart from one that was rounded and stored."""


CAST = np.uint64(0x2545F4914F6CDD1D)
"""Sets what was rounded to another element type on its way apart from what was not."""

ENDS = (None, *ACTIVATIONS)

PRODUCT = np.uint64(0x9E6C63D0876A9A75)
"""Sets rows that were multiplied apart from those that were not."""

NORMED = np.uint64(0xD1342543DE82EF95)
"""Sets what a row-wise function made apart from what it was made of."""


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
            hashes[step.writes], is_cast[step.writes] = hashes[step.origins], False
            continue
        made = [_expression(located, moves, hashes, is_cast) for moves in step.moves]
        yield step, made
        cast = [left(moves, is_cast) for moves in step.moves]
        for moves, new, of_cast in zip(step.moves, made, cast, strict=True):
            hashes[moves.dest], is_cast[moves.dest] = new, of_cast


def same_bits(located: Located) -> bool:
    """Whether each value a contract wants in several places is made by one expression everywhere."""
    hashes = expressions(located)
    for contract in located.schedule.contracts:
        if not len(contract.dest_rank):
            continue
        found = hashes[located.contract_dests(contract)]
        _, first, which = np.unique(_meant(located, contract), return_index=True, return_inverse=True)
        if not np.array_equal(found, found[first][which]):
            return False
    return True


def _meant(located: Located, contract: Contract) -> Hashes:
    """Of every chunk that a contract names a hash of what it is to have, in any order."""
    sources = located.contract_sources(contract)
    marks = np.where(sources == located.nowhere, np.uint64(0), mark(sources.astype(np.uint64)))
    meant: Hashes = marks.sum(axis=1, dtype=np.uint64)[contract.value]
    return meant


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
    """What a product or a row-wise function makes of rows; what the caller gives to the function is not looked at."""
    if moves.factors is not None:
        made = mix(mix(rows ^ PRODUCT) + hashes[moves.factors])
        ends = mix(made + np.uint64(ENDS.index(moves.moves.epilogue.activation)))
        for beside in () if moves.beside is None else moves.beside.T:
            ends = mix(ends + hashes[beside])
        return ends
    if moves.moves.applied is not None:
        return mix(rows ^ NORMED ^ np.uint64(moves.moves.applied.result))
    return rows
